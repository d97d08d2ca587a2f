"""The VRAM budget in force, and who waits for an acknowledgement of which change.

The last word counts, whoever says it. Decides and does no I/O: what the engine shall do is left in :attr:`Lease.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frameshard.errors import BadArgument, BadMessage, DeadlineMissed, FrameshardError, Overloaded, from_wire
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

MAX_PENDING = 64
"""Changes that wait for an acknowledgement."""


@dataclass
class _Change:
    connection: ServerConnection
    request: m.BudgetSet
    released: bool = False


class Lease:
    """What host and sidecar agreed on."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        """In force at the engine; 0 is no limit."""
        self.floor_bytes = 0
        self.full_bytes = 0
        self._changes: dict[int, _Change] = {}
        self._numbers = 0
        self.ops: list[dict[str, Any]] = []
        """For the engine, in order; the caller takes them out."""

    def set(self, connection: ServerConnection, request: m.BudgetSet) -> None:
        """Asks the engine for a change. Raises :class:`Overloaded`."""
        if any(
            change.connection is connection and change.request.id == request.id for change in self._changes.values()
        ):
            return  # said again after a resumption
        if len(self._changes) >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} budget changes wait already")
        self._numbers += 1
        self._changes[self._numbers] = _Change(connection, request)
        self._ask(self._numbers)

    def engine_load_bytes(self) -> int:
        """The budget that a new engine is loaded with: the latest wanted, unless it is certain to be refused."""
        wanted = [change.request.vram_budget_bytes for change in self._changes.values() if not change.released]
        if wanted and (wanted[-1] == 0 or wanted[-1] >= self.floor_bytes):
            return wanted[-1]
        return self.budget_bytes

    def engine_ready(self, floor_bytes: int, full_bytes: int, budget_bytes: int) -> None:
        """An engine runs with `budget_bytes`; it is told all changes that its predecessor had not made."""
        self.floor_bytes, self.full_bytes, self.budget_bytes = floor_bytes, full_bytes, budget_bytes
        for number, change in list(self._changes.items()):
            if change.released:
                self._observed(number, None, 0.0)  # the process that was to be observed is gone
            else:
                self._ask(number)

    def engine_lost(self) -> None:
        self.ops.clear()

    def fail_all(self, error: FrameshardError) -> None:
        """There will be no engine."""
        for change in self._changes.values():
            change.connection.refuse(change.request.id, error)
        self._changes.clear()

    def drop(self, connection: ServerConnection) -> None:
        """The client is gone; what it asked for stays in force."""
        for number in [number for number, change in self._changes.items() if change.connection is connection]:
            del self._changes[number]

    def engine_event(self, event: dict[str, Any]) -> None:
        """Takes an acknowledgement. Raises :class:`BadMessage` when the engine makes no sense."""
        try:
            self._take(event)
        except (KeyError, TypeError, ValueError, BadArgument) as error:
            raise BadMessage(f"the engine's budget event is wrong: {error!r}") from None

    def _take(self, event: dict[str, Any]) -> None:
        phase, change = event["phase"], self._changes.get(event["seq"])
        if phase == "released":
            self.budget_bytes = event["budget_bytes"]
        if change is None:
            return
        connection, request = change.connection, change.request
        if phase == "released":
            change.released = True
            connection.reply(
                m.Released(
                    request.id, connection.epoch, event["budget_bytes"], event["used_bytes"], float(event["seconds"])
                )
            )
        elif phase == "observed":
            self._observed(event["seq"], event["observed_bytes"], float(event["seconds"]))
        elif phase == "refused":
            error = from_wire(event["error"])
            if isinstance(error, DeadlineMissed):
                self.budget_bytes = request.vram_budget_bytes  # stays in force, only late
            connection.refuse(request.id, error)
            del self._changes[event["seq"]]
        else:
            raise ValueError(phase)

    def _observed(self, number: int, observed_bytes: int | None, seconds: float) -> None:
        change = self._changes.pop(number)
        connection = change.connection
        connection.reply(m.Observed(change.request.id, connection.epoch, observed_bytes, seconds))

    def _ask(self, number: int) -> None:
        request = self._changes[number].request
        self.ops.append(
            {"op": "budget", "seq": number, "bytes": request.vram_budget_bytes, "timeout_s": request.timeout_s}
        )
