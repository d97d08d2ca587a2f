"""Takes the calls of tools out of the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from frameshard.engine.tools import CallSyntax
from frameshard.errors import BadArgument
from frameshard.text import held_back
from frameshard.wire import codec
from frameshard.wire import messages as m
from frameshard.wire.toolchecks import MAX_DEPTH, call_id_of, too_deep

MAX_ARGUMENTS_BYTES = codec.CLIENT.string
"""The most bytes of one call's arguments, which are one string of the protocol."""


class Taken(NamedTuple):
    """What a part of an answer adds: text, then calls."""

    text: str = ""
    calls: tuple[m.ToolCall, ...] = ()


class CallReader:
    """Divides one answer into its text and its calls. A call is held back until it is whole. Text that may be the
    beginning of a call is held back until more comes.

    The form of the answer guarantees that nothing but calls follows the first one, and that they are valid.

    :param must_call: the answer is calls alone, without text.
    :param make_id: returns the id of the call with a number, from 0.
    """

    def __init__(self, syntax: CallSyntax, make_id: Callable[[int], str], *, must_call: bool = False) -> None:
        self._syntax = syntax
        self._make_id = make_id
        self._held = ""
        self._n_begun = 0
        """How many characters of the held text are of :meth:`begin`."""
        self._calling = must_call
        self._n_calls = 0
        self._before = syntax.begin
        """What comes before the next name."""
        self._ended = False
        """The last call is whole. Only another one may follow."""

    @property
    def called(self) -> bool:
        """The last thing in the answer is a whole call."""
        return self._ended

    def begin(self, text: str) -> None:
        """Adds a text from another model, with which the answer begins. It is not returned."""
        self.feed(text)
        self._n_begun = len(self._held)

    def feed(self, text: str) -> Taken:
        """Adds text, and returns what is certain now."""
        self._held += text
        if self._calling:
            return Taken("", self._calls())
        trigger = self._syntax.trigger
        begin = self._held.find(trigger)
        if begin < 0:
            begin = len(self._held) - held_back(self._held, [trigger])
        else:
            self._calling = True
        plain, self._held = self._held[self._n_begun : begin], self._held[begin:]
        self._n_begun = max(0, self._n_begun - begin)
        return Taken(plain, self._calls() if self._calling else ())

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer. A call that is not whole is dropped."""
        held, self._held = ("" if self._calling else self._held[self._n_begun :]), ""
        return held

    def _calls(self) -> tuple[m.ToolCall, ...]:
        """Takes the calls that are whole now.

        :raises BadArgument: the arguments of a call are too long or too deep for the broker.
        """
        calls: list[m.ToolCall] = []
        while True:
            if self._ended:
                join = self._syntax.join
                if not join or not self._held.startswith(join):
                    break
                self._held, self._before, self._ended = self._held[len(join) :], "", False
            call = self._whole() if "}" in self._held or len(self._held) > MAX_ARGUMENTS_BYTES else None
            if call is None:
                break
            calls.append(call)
        return tuple(calls)

    def _whole(self) -> m.ToolCall | None:
        """Takes a call from the text that is held, if one is whole. What follows its arguments stays."""
        syntax, begin = self._syntax, len(self._before)
        behind_name = syntax.between or "{"
        name_end = self._held.find(behind_name, begin) if self._held.startswith(self._before) else -1
        if name_end < 0:
            return None
        start = name_end + len(syntax.between)
        end, deep = None, False
        try:
            _, end = json.JSONDecoder(parse_int=str).raw_decode(self._held, start)  # Python limits an int's digits
        except ValueError:
            pass  # not whole yet
        except RecursionError:
            deep = True
        arguments = self._held[start:end]
        if len(arguments.encode("utf-8", "replace")) > MAX_ARGUMENTS_BYTES:
            raise BadArgument(f"a call has arguments of more than {MAX_ARGUMENTS_BYTES} bytes", field="tools")
        if deep or (end is not None and too_deep(arguments)):
            raise BadArgument(f"a call has arguments with more than {MAX_DEPTH} levels", field="tools")
        if end is None:
            return None
        rest = self._held[end:]
        if not (rest.startswith(syntax.end) or (syntax.join and rest.startswith(syntax.join))):
            return None
        call = m.ToolCall(self._make_id(self._n_calls), self._held[begin:name_end], arguments)
        self._held, self._ended = rest, True
        self._n_calls += 1
        return call


def call_id(seed: int, n_prompt: int, number: int) -> str:
    """Returns the id of a call. A job that is resumed gives the same ids again."""
    return call_id_of(f"{seed}/{n_prompt}/{number}")
