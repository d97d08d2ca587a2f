"""Reads the stream of a chat completion in OpenAI's form. The server is not trusted: whatever it sends ends in text and
calls of tools or in :class:`BadAnswer`, within limits on memory. This module does no I/O.

Text is given out as it comes. Calls are given out at the end of the answer, when all of them are whole: before that the
answer may break off, and another one takes its place. Their arguments are not read here, but in a confined process:
:mod:`frameshard.broker.arguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from frameshard.broker.fallback import Call
from frameshard.wire import codec
from frameshard.wire import messages as m

MAX_LINE_BYTES = 1 << 16
MAX_TEXT_BYTES = 1 << 18
"""Of the text and the calls of one answer. Short answers have less, by the two following limits."""

TEXT_BYTES_PER_TOKEN = 64
"""Tokens are shorter on average, so an answer with more text has ignored `max_tokens`."""

BYTES_PER_TOKEN = 4096
"""What may be sent for each token: one token is one JSON object in most servers."""

SPARE_BYTES = 1 << 18
"""What may be sent beside the tokens."""

PIECE_CHARS = 8192
"""The most characters that are given out at once, so that they fit into one event."""

_MAX_COUNT = 1 << 31

_DATA_OR_TOO_LONG = re.compile(rb"^(?:data:(.*)|.{%d,})$" % (MAX_LINE_BYTES + 1), re.MULTILINE)
"""Matches the lines that are read. A server may send millions of other lines (comments, names of events, empty ones),
which must not take time for each."""


class BadAnswer(Exception):
    """The server's bytes are no answer; ``str()`` says why, without a word of theirs."""


@dataclass
class _Parts:
    """What has come of one call."""

    name: str = ""
    arguments: str = ""


class AnswerReader:
    """One answer.

    :param max_tokens: the most tokens that the server was asked for.
    :param tools: the names of the tools that it may call.
    :param must_call: the answer is calls alone: text beside them is left out.
    """

    def __init__(self, max_tokens: int, tools: Collection[str] = (), *, must_call: bool = False) -> None:
        self.reason: m.Reason | None = None
        """Set when the server has said why the answer ends. Its text and its calls are complete then."""
        self.calls: tuple[Call, ...] = ()
        """The calls, once :attr:`reason` is set."""
        self.over = False
        """Nothing follows."""
        self.n_prompt = 0
        self.n_generated = 0
        self.n_parts = 0
        """How many parts of text and calls have come."""
        self._tools = tools
        self._must_call = must_call
        self._parts: list[_Parts] = []
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
        lines, _, self._line = (self._line + data).rpartition(b"\n")
        for line in _DATA_OR_TOO_LONG.finditer(lines):
            self._check_length(line[0])
            if not self.over:
                yield from self._take(line[1].strip())
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
                self._add_calls(delta.get("tool_calls"))
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
        self._take_bytes(content)
        self.n_parts += 1
        if self._must_call:
            return []
        return [content[at : at + PIECE_CHARS] for at in range(0, len(content), PIECE_CHARS)]

    def _take_bytes(self, text: str) -> None:
        try:
            self._text_left -= len(text.encode())
        except UnicodeEncodeError:
            raise BadAnswer("it sends half a surrogate pair") from None
        if self._text_left < 0:
            raise BadAnswer("its answer is longer than max_tokens")

    def _add_calls(self, parts: Any) -> None:
        """Takes parts of calls. The `id` of a call is not read: calls get other ones."""
        if parts is None or parts == []:
            return
        if not isinstance(parts, list) or self.reason is not None:
            raise BadAnswer("it sends calls that are no part of the answer")
        for part in parts:
            match part:
                case {"index": index, "function": dict(function)} if type(index) is int:
                    self._add_part(index, function.get("name") or "", function.get("arguments") or "")
                case _:
                    raise BadAnswer("it sends a part of a call without its index or its function")

    def _add_part(self, index: int, name: Any, arguments: Any) -> None:
        if not 0 <= index < m.MAX_CALLS:
            raise BadAnswer(f"it sends more than {m.MAX_CALLS} calls")
        if index == len(self._parts):
            self._parts.append(_Parts())
        if index > len(self._parts) or not isinstance(name, str) or not isinstance(arguments, str):
            raise BadAnswer("it sends parts of calls that do not fit together")
        call = self._parts[index]
        if name and name not in self._tools:
            raise BadAnswer("it calls a tool that it must not call")
        if name and call.name not in ("", name):
            raise BadAnswer("it sends parts of calls that do not fit together")
        self._take_bytes(arguments)
        call.name = name or call.name
        call.arguments += arguments
        if len(call.arguments.encode()) > codec.CLIENT.string:
            raise BadAnswer(f"it sends a call with more than {codec.CLIENT.string} bytes of arguments")
        self.n_parts += 1

    def _end(self, reason: Any) -> None:
        if reason is None:
            return
        if reason not in ("stop", "length", "tool_calls"):  # such as content_filter
            raise BadAnswer("it ends the answer for another reason than its end or its length")
        whole = self._parts
        text_alone = self._must_call and (reason == "stop" or self.n_parts > 0)
        if not whole and (text_alone or reason == "tool_calls"):
            raise BadAnswer("it ends an answer without a call where there must be one")
        if reason == "length":
            whole = whole[:-1]  # the last one may be cut off
        if not all(call.name and call.arguments for call in whole):
            raise BadAnswer("it sends half a call")
        self.calls = tuple(Call(call.name, call.arguments) for call in whole)
        self.reason = "tool_calls" if whole and reason == "stop" else reason  # servers say both

    def _count(self, usage: Any) -> None:
        counts = usage if isinstance(usage, dict) else {}
        given = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")]
        known = [count for count in given if type(count) is int and 0 <= count < _MAX_COUNT]
        if len(known) == 2:
            self.n_prompt, self.n_generated = known
