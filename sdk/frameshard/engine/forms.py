"""Restricts an answer to a form: a JSON schema, choices, a regular expression or a Lark grammar. llguidance computes
which tokens may come next.

A form comes from a client and is not trusted. So it is first compiled in a process with limits on time and memory
(:mod:`frameshard.engine.formcheck`). Only a form that stays within them is compiled here. llguidance itself limits the
work for one token. A form that exceeds that limit in the middle of an answer fails its job.

llguidance gets the same bytes of each token as the text of an answer, so it checks exactly the text that the client
gets. It is imported for the first form, because most engines never get one and it takes long to import.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from frameshard.confined import OUT_OF_TIME, Confined, Gone
from frameshard.errors import BadArgument, Unsupported
from frameshard.wire.messages import Sampling

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_BYTES = 64 << 10
MAX_LEXER_STATES = 50_000
"""The most lexer states of one job. Each takes 1 to 2 KB."""

_WORKER = Path(__file__).with_name("formcheck.py")
_REMEMBERED = 64  # forms whose grammars are cached
_MAX_REASON_CHARS = 500
_TOO_COMPLEX = "too complex for an answer that has begun: "


class Form(NamedTuple):
    """The form of an answer.

    :param name: the field of :class:`Sampling` that has the form, or ``tools``.
    :param text: the field's value, or the tools and the syntax of calls, as text for
        :mod:`frameshard.engine.formcheck`.
    """

    name: str
    text: str


def form_of(sampling: Sampling) -> Form | None:
    """Returns the form that a request asks for; None if it asks for none.

    :raises BadArgument: the request asks for more than one form.
    """
    choices = json.dumps(sampling.choices) if sampling.choices else ""
    texts = {"json_schema": sampling.json_schema, "choices": choices, "regex": sampling.regex, "lark": sampling.lark}
    forms = [Form(name, text) for name, text in texts.items() if text]
    if len(forms) > 1:
        names = " and ".join(form.name for form in forms)
        raise BadArgument(f"{names}: an answer has one form: leave all but one out", field=forms[1].name)
    return forms[0] if forms else None


class Matcher:
    """Computes which tokens may come next in one answer.

    :param field: the name of the form.
    :param grammar: its grammar for llguidance.
    :raises BadArgument: the form cannot be used with this vocabulary. :meth:`allowed` and :meth:`accept` raise it if
        the form turns out to be too complex in the middle of the answer.
    """

    def __init__(self, tokenizer: LLTokenizer, field: str, grammar: str) -> None:
        from llguidance import LLMatcher, LLParserLimits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        self._field = field
        self._n_vocab = tokenizer.vocab_size
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._mask = allocate_token_bitmask(1, self._n_vocab)
        self._fill_mask = functools.partial(fill_next_token_bitmask, self._matcher, self._mask)
        self._check("")

    @property
    def complete(self) -> bool:
        """True if no more tokens can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> npt.NDArray[np.int64]:
        """Returns the ids of the tokens that may come next, ascending, shape [n]. They include the tokens that end the
        answer if it may end here."""
        self._fill_mask()
        self._check(_TOO_COMPLEX)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        return np.flatnonzero(bits)

    def accept(self, token: int) -> None:
        """Appends ``token`` to the answer."""
        self._matcher.consume_token(token)
        self._check(_TOO_COMPLEX)

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            why = "no token of this model can follow" if error.startswith("NoExtension") else what + error
            raise _refused(self._field, why)


class Forms:
    """Makes matchers for one model. Any thread may use it. Free it with :meth:`close`.

    :param vocabulary: returns the bytes of each token, and the tokens that end an answer. Tokens that must not occur in
        the text of an answer have no bytes. It is called once, for the first form. That takes 0.3 s for 49,000 tokens
        and 3 s for 262,000, and slows other Python threads meanwhile.
    """

    def __init__(self, vocabulary: Callable[[], tuple[list[bytes], list[int]]]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._confined = Confined(_WORKER)
        self._lock = threading.Lock()
        self._try = functools.lru_cache(_REMEMBERED)(self._try_confined)

    def matcher(self, form: Form) -> Matcher:
        """Checks a form and returns a matcher for a new answer. A new form may take a second or two, a cached one
        milliseconds, also while another thread checks a new one.

        :raises BadArgument: ``form`` cannot be used. The error says why and, for a JSON schema, where.
        :raises Unsupported: the model's vocabulary has no token that ends an answer.
        """
        text, refusal = self._try(form)
        if refusal:
            raise _refused(form.name, refusal)
        if self._tokenizer is None:
            with self._lock:
                self._tokenizer = self._tokenizer or _make_tokenizer(form.name, *self._vocabulary())
        return Matcher(self._tokenizer, form.name, text)

    def close(self) -> None:
        """Ends the process that checks forms. Safe to call twice."""
        self._confined.close()

    def _try_confined(self, form: Form) -> tuple[str, str]:
        """Returns the grammar and "", or "" and the reason why there is none."""
        if len(form.text.encode("utf-8", "replace")) > MAX_BYTES:
            return "", f"more than {MAX_BYTES} bytes"
        try:
            answer = self._confined.ask({"form": form.name, "text": form.text})
        except Gone as gone:
            if gone.status == OUT_OF_TIME:
                return "", "too complex: it takes more than half a second of CPU time to compile"
            raise _refused(form.name, f"it ends the process that compiles it (status {gone.status})") from None
        return answer.get("grammar", ""), answer.get("reason", "")


def _refused(field: str, why: str) -> BadArgument:
    return BadArgument(f"{field}: {why[:_MAX_REASON_CHARS]}", field=field)


class _Vocabulary:
    """The vocabulary, as llguidance's wrapper needs it. It cannot tokenise; without forced text, llguidance never asks
    for that."""

    def __init__(self, tokens: list[bytes], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError


def _make_tokenizer(field: str, tokens: list[bytes], ends: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    if not ends:
        raise Unsupported(f"this model has no token that ends an answer: leave {field} out")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, ends)), eos_token=ends)
