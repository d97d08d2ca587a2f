"""Answers of a given form: which tokens a JSON schema allows next, by llguidance.

A schema comes from a client. So it is first compiled in a process that bounds time and memory
(:mod:`frameshard.engine.schemacheck`), and here only when it is known to stay small. What llguidance may spend on one
token is bounded by its own limits; a schema that exceeds them in the middle of an answer fails that job.

The tokens' bytes are those that the text of an answer is made of, so what is matched is what the client gets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from frameshard.engine.confined import OUT_OF_TIME, Confined, Gone
from frameshard.errors import BadArgument, Unsupported

MAX_BYTES = 64 << 10
MAX_LEXER_STATES = 50_000
"""Of one job; they take 1 to 2 KB each."""

_WORKER = Path(__file__).with_name("schemacheck.py")
_TRIES = 2  # what was killed from outside is started again
_REMEMBERED = 64  # schemas
_MAX_REASON_CHARS = 500
_TOO_COMPLEX = "too complex for an answer that has begun: "


class Matcher:
    """What may come next in one answer.

    :raises BadArgument: the schema cannot be used with this vocabulary. :meth:`allowed` and :meth:`accept` raise it
        where the schema is too complex after all.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._n_vocab = tokenizer.vocab_size
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
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
            raise _refused("no token of this model can follow" if error.startswith("NoExtension") else what + error)


class Schemas:
    """Makes matchers for one model. Any thread may use it. Free it with :meth:`close`.

    ``vocabulary`` gives the bytes of each token, empty for those that may only end an answer or not occur at all, and
    the tokens that end one. It is called once, for the first schema: that takes 0.3 s for 49,000 tokens and 3 s for
    262,000, in which other Python threads run little.
    """

    def __init__(self, vocabulary: Callable[[], tuple[list[bytes], list[int]]]) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._confined: Confined | None = None
        self._lock = threading.Lock()
        self._try = functools.lru_cache(_REMEMBERED)(self._try_confined)

    def grammar(self, schema: str) -> str:
        """What :meth:`matcher` takes. May last a second or two; a schema that was seen of late takes milliseconds.

        :raises BadArgument: no answer can be held to ``schema``; the error says why and where.
        :raises Unsupported: the model's vocabulary has no token that ends an answer.
        """
        with self._lock:
            grammar, refusal = self._try(schema)
            if refusal:
                raise _refused(refusal)
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(*self._vocabulary())
        self.matcher(grammar)  # the same limits with all of the vocabulary
        return grammar

    def matcher(self, grammar: str) -> Matcher:
        """For a new answer. Takes 1 to 3 ms for an ordinary schema, and never waits for another."""
        assert self._tokenizer is not None
        return Matcher(self._tokenizer, grammar)

    def close(self) -> None:
        """Ends the process that checks. Safe to call twice."""
        with self._lock:
            self._drop()

    def _try_confined(self, schema: str) -> tuple[str, str]:
        """The grammar, or why there is none."""
        if len(schema.encode("utf-8", "replace")) > MAX_BYTES:
            return "", f"more than {MAX_BYTES} bytes"
        status = 0
        for _ in range(_TRIES):
            try:
                if self._confined is None:
                    self._confined = Confined(_WORKER)
                answer = self._confined.ask({"schema": schema})
                return answer.get("grammar", ""), answer.get("reason", "")
            except Gone as gone:
                self._drop()
                status = gone.status
                if status == OUT_OF_TIME:
                    return "", "too complex: it takes more than half a second of CPU time to compile"
        raise _refused(f"it ends the process that compiles it (status {status})")

    def _drop(self) -> None:
        if self._confined is not None:
            self._confined.close()
            self._confined = None


def _refused(why: str) -> BadArgument:
    return BadArgument(f"json_schema: {why[:_MAX_REASON_CHARS]}", field="json_schema")


class _Vocabulary:
    """What llguidance's wrapper asks for. It never tokenises: nothing is forced."""

    def __init__(self, tokens: list[bytes], ends: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = ends[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError


def _make_tokenizer(tokens: list[bytes], ends: list[int]) -> LLTokenizer:
    if not ends:
        raise Unsupported("this model has no token that ends an answer: leave json_schema out")
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, ends)), eos_token=ends)
