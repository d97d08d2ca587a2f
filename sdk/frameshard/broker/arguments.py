"""Checks the arguments of calls that a fallback server sends.

Both sides of a check come from outside: the arguments from the server, the schema, with regular expressions in it, from
a client. So a process with limits on time and memory does it (:mod:`frameshard.broker.argumentcheck`). The engine's
llguidance is not used, because it fixes the order of properties and so would refuse valid arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from frameshard.broker.answer import BadAnswer
from frameshard.broker.fallback import Call
from frameshard.confined import Confined, Gone
from frameshard.wire import messages as m
from frameshard.wire.toolchecks import MAX_DEPTH, schema_of, too_deep

_WORKER = Path(__file__).with_name("argumentcheck.py")


class CannotBeChecked(Exception):
    """A schema is no JSON schema, or the check exceeds its limits. Another answer would not change that."""


class ArgumentChecker:
    """Free it with :meth:`close`."""

    def __init__(self) -> None:
        self._confined = Confined(_WORKER)
        self._one_at_a_time = trio.CapacityLimiter(1)

    async def check(self, calls: Sequence[Call], tools: Sequence[m.Tool]) -> None:
        """Checks calls. The first check takes a fraction of a second, later ones milliseconds.

        :param tools: at least those that are called.
        :raises BadAnswer: the arguments of a call are not JSON, or too deep, or do not match the schema of its tool.
        :raises CannotBeChecked: no answer can be checked.
        """
        if not calls:
            return
        if any(too_deep(call.arguments) for call in calls):
            raise BadAnswer(f"it sends a call whose arguments have more than {MAX_DEPTH} levels")
        schemas = {tool.name: schema_of(tool) for tool in tools}
        request = {"calls": [[schemas[call.name], call.arguments] for call in calls]}
        try:
            answer = await trio.to_thread.run_sync(
                self._confined.ask, request, abandon_on_cancel=True, limiter=self._one_at_a_time
            )
        except Gone:
            raise CannotBeChecked("checking the arguments of its call takes too long") from None
        match answer.get("error"):
            case None:
                return
            case "invalid":
                raise BadAnswer("it sends a call with arguments that do not match the tool's schema")
            case _:
                raise CannotBeChecked("the schema of the tool that it calls cannot be used to check arguments")

    def close(self) -> None:
        """Ends the process. Safe to call twice."""
        self._confined.close()
