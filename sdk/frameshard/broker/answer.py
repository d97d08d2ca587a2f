"""Reads the stream of a chat completion in OpenAI's form. The server is not trusted: whatever it sends ends in text or
in :class:`BadAnswer`, within limits on memory. This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from frameshard.wire import messages as m

MAX_LINE_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 18
"""Of one answer. Short answers have less, by the two following limits."""

TEXT_BYTES_PER_TOKEN = 64
"""Tokens are shorter on average, so an answer with more text has ignored `max_tokens`."""

BYTES_PER_TOKEN = 4096
"""What may be sent for each token: one token is one JSON object in most servers."""

SPARE_BYTES = 1 << 18
"""What may be sent beside the tokens."""

PIECE_CHARS = 8192
"""The most characters that are given out at once, so that they fit into one event."""

_MAX_COUNT = 1 << 31


class BadAnswer(Exception):
    """The server's bytes are no answer; ``str()`` says why, without a word of theirs."""


class AnswerReader:
    """One answer.

    :param max_tokens: the most tokens that the server was asked for.
    """

    def __init__(self, max_tokens: int) -> None:
        self.reason: m.Reason | None = None
        """Set when the server has said why the answer ends. Its text is complete then."""
        self.over = False
        """Nothing follows."""
        self.n_prompt = 0
        self.n_generated = 0
        self._left_bytes = SPARE_BYTES + BYTES_PER_TOKEN * max_tokens
        self._text_left = min(MAX_TEXT_BYTES, SPARE_BYTES // 64 + TEXT_BYTES_PER_TOKEN * max_tokens)
        self._line = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Takes bytes of the response's body.

        :returns: the next parts of the text, not empty.
        :raises BadAnswer: the bytes are no answer. The parts before them are given out first.
        """
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise BadAnswer("it sends more than an answer of this length needs")
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._check_length(line)
            if not self.over and line.startswith(b"data:"):  # other lines are comments and names of events
                yield from self._take(line[5:].strip())
        self._check_length(self._line)

    def _check_length(self, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise BadAnswer(f"it sends a line of more than {MAX_LINE_BYTES} bytes")

    def _take(self, data: bytes) -> list[str]:
        if data == b"[DONE]":
            if self.reason is None:
                raise BadAnswer("it ends an answer without a reason")
            self.over = True
            return []
        try:
            document = json.loads(data.decode())
        except (ValueError, RecursionError):
            raise BadAnswer("it sends what is not JSON in UTF-8") from None
        match document:
            case {"error": error} if error is not None:
                raise BadAnswer("it reports an error in the middle of an answer")
            case {"choices": []}:
                texts = []
            case {"choices": [{"delta": dict(delta)} as choice, *_]}:
                texts = self._text(delta.get("content"))
                self._end(choice.get("finish_reason"))
            case _:
                raise BadAnswer("it sends JSON that is no part of a chat completion")
        self._count(document.get("usage"))
        return texts

    def _text(self, content: Any) -> list[str]:
        if content is None or content == "":
            return []
        if not isinstance(content, str) or self.reason is not None:
            raise BadAnswer("it sends content that is no text of the answer")
        try:
            self._text_left -= len(content.encode())
        except UnicodeEncodeError:
            raise BadAnswer("it sends half a surrogate pair") from None
        if self._text_left < 0:
            raise BadAnswer("its answer is longer than max_tokens")
        return [content[at : at + PIECE_CHARS] for at in range(0, len(content), PIECE_CHARS)]

    def _end(self, reason: Any) -> None:
        if reason is None:
            return
        if reason not in ("stop", "length"):  # such as content_filter; a tool was not offered
            raise BadAnswer("it ends the answer for another reason than its end or its length")
        self.reason = reason

    def _count(self, usage: Any) -> None:
        counts = usage if isinstance(usage, dict) else {}
        given = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")]
        known = [count for count in given if type(count) is int and 0 <= count < _MAX_COUNT]
        if len(known) == 2:
            self.n_prompt, self.n_generated = known
