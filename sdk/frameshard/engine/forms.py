"""Answers of a given form (a JSON schema, choices, a regular expression or a grammar): which tokens may come next, by
llguidance.

A form comes from a client. So it is first compiled in a process that bounds time and memory
(:mod:`frameshard.engine.formcheck`), and here only when it is known to stay small. What llguidance may spend on one
token is bounded by its own limits; a form that exceeds them in the middle of an answer fails that job.

The tokens' bytes are those that the text of an answer is made of, so what is matched is what the client gets.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from frameshard.engine.confined import OUT_OF_TIME, Confined, Gone
from frameshard.errors import BadArgument, Unsupported
from frameshard.wire.messages import Sampling

MAX_BYTES = 64 << 10
MAX_LEXER_STATES = 50_000
"""Of one job; they take 1 to 2 KB each."""

_WORKER = Path(__file__).with_name("formcheck.py")
_TRIES = 2  # what was killed from outside is started again
_REMEMBERED = 64  # forms
_MAX_REASON_CHARS = 500
_TOO_COMPLEX = "too complex for an answer that has begun: "


class Form(NamedTuple):
    """What an answer is held to.

    :param name: of the field of :class:`Sampling` that asks for it.
    :param text: its value, or what :mod:`frameshard.engine.formcheck` takes for it.
    """

    name: str
    text: str


def form_of(sampling: Sampling) -> Form | None:
    """The form that a request asks for; None for any text.

    :raises BadArgument: it asks for several.
    """
    choices = json.dumps(sampling.choices) if sampling.choices else ""
    texts = {"json_schema": sampling.json_schema, "choices": choices, "regex": sampling.regex, "lark": sampling.lark}
    forms = [Form(name, text) for name, text in texts.items() if text]
    if len(forms) > 1:
        names = " and ".join(form.name for form in forms)
        raise BadArgument(f"{names}: an answer has one form: leave all but one out", field=forms[1].name)
    return forms[0] if forms else None


class Grammar(NamedTuple):
    """What :meth:`Forms.matcher` takes: a form's field, and its grammar for llguidance."""

    field: str
    text: str


class Matcher:
    """What may come next in one answer.

    :raises BadArgument: the form cannot be used with this vocabulary. :meth:`allowed` and :meth:`accept` raise it where
        the form is too complex after all.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar) -> None:
        self._field = grammar.field
        self._n_vocab = tokenizer.vocab_size
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, grammar.text, log_level=0, limits=limits)
        self._mask = allocate_token_bitmask(1, self._n_vocab)
        self._check("")

    @property
    def complete(self) -> bool:
        """Nothing can follow any more."""
        return self._matcher.is_stopped()

    def allowed(self) -> npt.NDArray[np.int64]:
        """The tokens that may come next, ascending; among them those that end the answer, where it may end here."""
        fill_next_token_bitmask(self._matcher, self._mask)
        self._check(_TOO_COMPLEX)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        return np.flatnonzero(bits)

    def accept(self, token: int) -> None:
        """The next token is ``token``."""
        self._matcher.consume_token(token)
        self._check(_TOO_COMPLEX)

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            why = "no token of this model can follow" if error.startswith("NoExtension") else what + error
            raise _refused(self._field, why)


class Forms:
    """Makes matchers for one model. Any thread may use it. Free it with :meth:`close`.

    ``vocabulary`` gives the bytes of each token, empty for those that may only end an answer or not occur at all, and
    the tokens that end one. It is called once, for the first form: that takes 0.3 s for 49,000 tokens and 3 s for
    262,000, in which other Python threads run little.
    """

    def __init__(self, vocabulary: Callable[[], tuple[list[bytes], list[int]]]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._confined: Confined | None = None
        self._lock = threading.Lock()
        self._try = functools.lru_cache(_REMEMBERED)(self._try_confined)

    def grammar(self, form: Form) -> Grammar:
        """May last a second or two; a form that was seen of late takes milliseconds.

        :raises BadArgument: no answer can be held to ``form``; the error says why and, of a JSON schema, where.
        :raises Unsupported: the model's vocabulary has no token that ends an answer.
        """
        with self._lock:
            text, refusal = self._try(form)
            if refusal:
                raise _refused(form.name, refusal)
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(form.name, *self._vocabulary())
        grammar = Grammar(form.name, text)
        self.matcher(grammar)  # the same limits with all of the vocabulary
        return grammar

    def matcher(self, grammar: Grammar) -> Matcher:
        """For a new answer. Takes 1 to 3 ms for an ordinary form, and never waits for another."""
        assert self._tokenizer is not None
        return Matcher(self._tokenizer, grammar)

    def close(self) -> None:
        """Ends the process that checks. Safe to call twice."""
        with self._lock:
            self._drop()

    def _try_confined(self, form: Form) -> tuple[str, str]:
        """The grammar, or why there is none."""
        if len(form.text.encode("utf-8", "replace")) > MAX_BYTES:
            return "", f"more than {MAX_BYTES} bytes"
        status = 0
        for _ in range(_TRIES):
            try:
                if self._confined is None:
                    self._confined = Confined(_WORKER)
                answer = self._confined.ask({"form": form.name, "text": form.text})
                return answer.get("grammar", ""), answer.get("reason", "")
            except Gone as gone:
                self._drop()
                status = gone.status
                if status == OUT_OF_TIME:
                    return "", "too complex: it takes more than half a second of CPU time to compile"
        raise _refused(form.name, f"it ends the process that compiles it (status {status})")

    def _drop(self) -> None:
        if self._confined is not None:
            self._confined.close()
            self._confined = None


def _refused(field: str, why: str) -> BadArgument:
    return BadArgument(f"{field}: {why[:_MAX_REASON_CHARS]}", field=field)


class _Vocabulary:
    """What llguidance's wrapper asks for. It never tokenises: nothing is forced."""

    def __init__(self, tokens: list[bytes], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError


def _make_tokenizer(field: str, tokens: list[bytes], ends: list[int]) -> LLTokenizer:
    if not ends:
        raise Unsupported(f"this model has no token that ends an answer: leave {field} out")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, ends)), eos_token=ends)
