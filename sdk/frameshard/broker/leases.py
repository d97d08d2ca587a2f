"""The VRAM lease: what host and sidecar agreed on, who waits for which answer, and what the sidecar says on its own.

The last word counts, whoever says it, except that a version which is not above the one in force is refused. Decides and
does no I/O, and time is a parameter: what the engine shall do is left in :attr:`Lease.ops`, what hosts shall hear in
:attr:`Lease.notices`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from frameshard.errors import (
    BadArgument,
    BadMessage,
    DeadlineMissed,
    FrameshardError,
    Overloaded,
    StaleLease,
    from_wire,
)
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

MAX_PENDING = 64
"""Changes that wait for an acknowledgement; also how many that are over can be asked for again."""


@dataclass(eq=False)
class _Change:
    connection: ServerConnection
    request: m.BudgetSet
    asked_at: float
    version_before: int
    waited_s: float = 0.0
    """For an engine, before it was asked."""
    said: list[m.Reply] = field(default_factory=list)

    @property
    def granted(self) -> bool:
        return bool(self.said)

    @property
    def released(self) -> bool:
        return len(self.said) > 1

    def say(self, answer: m.Reply) -> None:
        self.said.append(answer)
        self.connection.reply(answer)


class Lease:
    """What host and sidecar agreed on."""

    def __init__(self, budget_bytes: int, epoch: int) -> None:
        self.budget_bytes = budget_bytes
        """The host's word; 0 is no limit."""
        self.state: m.LeaseState = "active"
        """The last that was asked for."""
        self.version = 0
        self.floor_bytes = 0
        """The model's; no budget below it is possible."""
        self.full_bytes = 0
        self.used_bytes = 0
        """Held by the sidecar, by its own count."""
        self.total_bytes: int | None = None
        """Of the device; None where nothing tells, and so `free_bytes`."""
        self.free_bytes: int | None = None
        self._epoch = epoch
        self._changes: dict[int, _Change] = {}
        self._over: deque[_Change] = deque(maxlen=MAX_PENDING)
        self._newest: dict[ServerConnection, int] = {}
        self._numbers = 0
        self._load_s = 0.0
        self.ops: list[dict[str, Any]] = []
        """For the engine, in order; the caller takes them out."""
        self.notices: list[m.Notice] = []
        """For sessions that want them; the caller takes them out."""

    # ---- clients ----------------------------------------------------------------------------------------------------

    def set(self, connection: ServerConnection, request: m.BudgetSet, now: float) -> None:
        """Asks for a change.

        The same request again (after a resumption) changes nothing, however long ago it was: what was answered is
        answered again. Raises :class:`Overloaded`, :class:`StaleLease`, :class:`BudgetBelowFloor`,
        :class:`BadArgument`.
        """
        for change in (*self._changes.values(), *self._over):
            if change.connection is connection and change.request.id == request.id:
                for answer in change.said:
                    connection.reply(answer)
                return
        if request.id < self._newest.get(connection, 0):
            raise StaleLease("this client has asked for another change since", version=self.version)
        if request.version and request.version <= self.version:
            raise StaleLease(
                f"version {request.version} is not above {self.version}, which is in force", version=self.version
            )
        if len(self._changes) >= MAX_PENDING:
            raise Overloaded(f"{MAX_PENDING} budget changes wait already")
        self._newest[connection] = request.id
        self._numbers += 1
        change = self._changes[self._numbers] = _Change(connection, request, now, self.version)
        self.version = request.version or self.version
        self._ask(self._numbers)

    def describe(self, request_id: int, open_jobs: int) -> m.Budget:
        """The answer to budget_get."""
        short = open_jobs > 0 and 0 < self.budget_bytes < self.full_bytes
        return m.Budget(
            request_id,
            self._epoch,
            vram_budget_bytes=self.budget_bytes,
            floor_bytes=self.floor_bytes,
            full_bytes=self.full_bytes,
            state=self.state,
            version=self.version,
            wanted_bytes=self.full_bytes if short else self.used_bytes,
            used_bytes=self.used_bytes,
        )

    def drop(self, connection: ServerConnection) -> None:
        """The client is gone; what it asked for stays in force."""
        for number in [number for number, change in self._changes.items() if change.connection is connection]:
            del self._changes[number]
        for change in [change for change in self._over if change.connection is connection]:
            self._over.remove(change)
        self._newest.pop(connection, None)

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_load_bytes(self) -> int:
        """The budget that a new engine is loaded with: the latest wanted, unless it is certain to be refused."""
        wanted = [change.request.vram_budget_bytes for change in self._changes.values() if not change.released]
        if wanted and (wanted[-1] == 0 or wanted[-1] >= self.floor_bytes):
            return wanted[-1]
        return self.budget_bytes

    def engine_ready(self, floor_bytes: int, full_bytes: int, budget_bytes: int, now: float) -> None:
        """An engine runs with `budget_bytes`; it is told all changes that its predecessor had not made."""
        self.floor_bytes, self.full_bytes, self.budget_bytes = floor_bytes, full_bytes, budget_bytes
        for number, change in list(self._changes.items()):
            if change.released:
                self._observed(number, None, 0.0)  # the process that was to be observed is gone
            else:
                change.waited_s = now - change.asked_at
                self._ask(number)

    def engine_lost(self) -> None:
        self.ops.clear()

    def fail_all(self, error: FrameshardError) -> None:
        """There will be no engine."""
        for number in list(self._changes):
            self._refused(number, error)

    def engine_event(self, event: dict[str, Any]) -> None:
        """Takes an acknowledgement. Raises :class:`BadMessage` when the engine makes no sense."""
        try:
            self._take(event)
        except (KeyError, TypeError, ValueError, BadArgument) as error:
            raise BadMessage(f"the engine's budget event is wrong: {error!r}") from None

    def _take(self, event: dict[str, Any]) -> None:
        phase, change = event["phase"], self._changes.get(event["seq"])
        if phase == "released":
            self.budget_bytes, self.used_bytes = event["budget_bytes"], event["used_bytes"]
        if change is None:
            return
        request = change.request
        if phase == "lease":
            if not change.granted:
                reached, seconds = event["budget_bytes"], float(event["seconds"])
                decision: m.Decision = "granted" if reached == request.vram_budget_bytes else "partial"
                change.say(m.Lease(request.id, self._epoch, decision, reached, seconds, self.version))
        elif phase == "released":
            seconds = change.waited_s + float(event["seconds"])
            change.say(m.Released(request.id, self._epoch, self.budget_bytes, self.used_bytes, seconds))
        elif phase == "observed":
            self._observed(event["seq"], event["observed_bytes"], change.waited_s + float(event["seconds"]))
        elif phase == "refused":
            error = from_wire(event["error"])
            if isinstance(error, DeadlineMissed):
                self.budget_bytes = request.vram_budget_bytes  # stays in force, only late
            elif self.version == request.version:
                self.version = change.version_before
            self._refused(event["seq"], error)
        else:
            raise ValueError(phase)

    def _refused(self, number: int, error: FrameshardError) -> None:
        change = self._changes.pop(number)
        change.say(m.Error(change.request.id, self._epoch, m.ErrorInfo.of(error)))
        self._over.append(change)

    def _observed(self, number: int, observed_bytes: int | None, seconds: float) -> None:
        change = self._changes.pop(number)
        change.say(m.Observed(change.request.id, self._epoch, observed_bytes, seconds))
        self._over.append(change)

    def _ask(self, number: int) -> None:
        request = self._changes[number].request
        self.ops.append(
            {"op": "budget", "seq": number, "bytes": request.vram_budget_bytes, "timeout_s": request.timeout_s}
        )
