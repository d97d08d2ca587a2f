"""The VRAM lease: what host and sidecar agreed on, who waits for which answer, and what the sidecar says on its own.

The last word counts, whoever says it, except that a version which is not above the one in force is refused. Decides and
does no I/O, and time is a parameter: commands for the engine are left in :attr:`Lease.commands`, notices for hosts in
:attr:`Lease.notices`. bindings/PROTOCOL.md, "The lease", says what hosts may rely on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from frameshard.errors import (
    BadArgument,
    BudgetBelowFloor,
    DeadlineMissed,
    FrameshardError,
    Overloaded,
    StaleLease,
)
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

MAX_PENDING = 64
"""Changes that wait for an acknowledgement; also how many that are over can be asked for again."""

IDLE_S = 5.0
"""Without a job, before what is above the host's floor is given back."""

WANTS_EVERY_S = 10.0

LOW_BYTES = 128 << 20
"""Less than this free on the device is a near-miss of running out: the sidecar shrinks until `ENOUGH_BYTES` are."""

ENOUGH_BYTES = 256 << 20
PRESSURE_EVERY_S = 1.0
OWN_TIMEOUT_S = 5.0


@dataclass(eq=False)
class _Change:
    connection: ServerConnection
    request: m.BudgetSet
    asked_at: float
    before: tuple[int, m.LeaseState]
    """Version and state that a refusal brings back."""
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
        self.load_s = 0.0
        """From the last start of an engine to when it was ready."""
        self.commands: list[em.Command] = []
        """For the engine, in order; the caller takes them out."""
        self.notices: list[m.Notice] = []
        """For sessions that want them; the caller takes them out."""
        self._epoch = epoch
        self._changes: dict[int, _Change] = {}
        self._over: deque[_Change] = deque(maxlen=MAX_PENDING)
        self._newest: dict[ServerConnection, int] = {}
        self._numbers = 0
        self._reached: m.LeaseState = "active"
        self._asleep = False
        """There is no engine, and none is to come before the state is active again."""
        self._ending = False
        """The engine has been told to end, and no other is ready yet."""
        self._keep_bytes = 0
        self._idle_since: float | None = None
        self._given_back = False
        self._pressed_bytes = 0
        self._wants_at = 0.0
        self._pressure_at = 0.0

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
        if request.state == "parked" and self.state == "hibernated":
            raise BadArgument("a hibernated sidecar has to become active before it can be parked", field="state")
        if (request.state != "active" or self._ending) and 0 < request.vram_budget_bytes < self.floor_bytes:
            raise BudgetBelowFloor(
                f"a VRAM budget of {request.vram_budget_bytes >> 20} MiB is below the floor",
                budget_bytes=request.vram_budget_bytes,
                floor_bytes=self.floor_bytes,
            )
        self._newest[connection] = request.id
        self._numbers += 1
        change = self._changes[self._numbers] = _Change(connection, request, now, (self.version, self.state))
        self.version = request.version or self.version
        self.state = request.state
        if request.state == "hibernated":
            self._ending = True
            self._grant(change, 0.0)
            if self._asleep:
                self.engine_hibernated(now)
        elif self._ending:
            self._grant(change, self.load_s)  # an engine is started, and told when it is ready
        else:
            self._ask(self._numbers)

    def describe(self, request_id: int, jobs: int) -> m.Budget:
        """The answer to budget_get, with so many jobs open."""
        return m.Budget(
            request_id,
            self._epoch,
            vram_budget_bytes=self.budget_bytes,
            floor_bytes=self.floor_bytes,
            full_bytes=self.full_bytes,
            state=self.state,
            version=self.version,
            wanted_bytes=self.full_bytes if jobs and self._short() else self.used_bytes,
            used_bytes=self.used_bytes,
        )

    def drop(self, connection: ServerConnection) -> None:
        """The client is gone and will not ask again; what it asked for comes into force."""
        for change in [change for change in self._over if change.connection is connection]:
            self._over.remove(change)
        self._newest.pop(connection, None)

    # ---- on its own -------------------------------------------------------------------------------------------------

    def tick(self, now: float, jobs: int) -> None:
        """What is due: to be called when a job comes, and a few times a second; `jobs` are open."""
        if jobs and now >= self._wants_at and self._short():
            self._wants_at = now + WANTS_EVERY_S
            wanted = self.full_bytes if self.state == "active" else self.budget_bytes or self.full_bytes
            self._notify("wants", wanted, detail=f"{jobs} jobs are open")
        if jobs:
            self._idle_since = None
            if self._given_back:
                self._given_back = False
                self._ask_own("gives_back", "a job takes up the lease")
        elif self._idle_since is None:
            self._idle_since = now
        elif (
            self._keep_bytes
            and not self._given_back
            and now - self._idle_since >= IDLE_S
            and not self._busy()
            and self.used_bytes > max(self._keep_bytes, self.floor_bytes)
        ):
            self._given_back = True
            self._ask_own("gives_back", "there are no jobs")

    def _short(self) -> bool:
        return self.state != "active" or 0 < self.budget_bytes < self.full_bytes

    def _busy(self) -> bool:
        """The engine is not there, or is being told something that may change all."""
        return self._ending or self.state != "active" or any(not change.released for change in self._changes.values())

    def _bound(self) -> int:
        """What the engine is told: the host's word, or less where the sidecar holds back by itself; 0: no limit."""
        bounds = [self.budget_bytes, self._pressed_bytes]
        if self._given_back:
            bounds.append(max(self._keep_bytes, self.floor_bytes))
        return min((bound for bound in bounds if bound), default=0)

    def _ask_own(self, kind: m.NoticeKind, detail: str) -> None:
        self._numbers += 1
        bound = self._bound()
        self.commands.append(em.SetBudget(self._numbers, bound, OWN_TIMEOUT_S))
        self._notify(kind, bound or self.full_bytes, detail=detail)

    def _notify(self, kind: m.NoticeKind, n_bytes: int, seconds: float = 0.0, detail: str = "") -> None:
        self.notices.append(m.Notice(self._epoch, kind, n_bytes, seconds, detail))

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_load_bytes(self) -> int:
        """The budget that a new engine is loaded with: the latest wanted, unless it is certain to be refused."""
        wanted = [change.request.vram_budget_bytes for change in self._changes.values() if not change.released]
        if wanted and (wanted[-1] == 0 or wanted[-1] >= self.floor_bytes):
            return wanted[-1]
        return self._bound()

    def engine_ready(self, floor_bytes: int, full_bytes: int, budget_bytes: int, now: float) -> None:
        """An engine runs with `budget_bytes`; it is told all changes that its predecessor had not made."""
        self._asleep, self._ending = False, self.state == "hibernated"
        self.floor_bytes, self.full_bytes = floor_bytes, full_bytes
        if not self._given_back and not self._pressed_bytes:
            self.budget_bytes = budget_bytes
        for number, change in list(self._changes.items()):
            if self._ending:
                break  # this one is told to end, and what waits is answered then
            if change.released:
                self._observed(number, None, 0.0)  # the process that was to be observed is gone
            else:
                change.waited_s = now - change.asked_at
                self._ask(number)

    def engine_lost(self) -> None:
        self.commands.clear()

    def engine_hibernated(self, now: float) -> None:
        """The engine process has ended, and no other comes before an active lease is asked for."""
        self._asleep = self._ending = True
        self.used_bytes = 0
        asked_at = now
        pending = list(self._changes.items())
        last = max((at for at, (_, change) in enumerate(pending) if change.request.state != "active"), default=-1)
        for number, change in pending[: last + 1]:
            self.budget_bytes = change.request.vram_budget_bytes
            asked_at = change.asked_at
            self._grant(change, 0.0)
            if not change.released:
                self._released(change, now - change.asked_at)
            self._observed(number, 0, now - change.asked_at)
        if self.state == "parked":
            self.state = "hibernated"
        self._reach("hibernated", now - asked_at)

    def fail_all(self, error: FrameshardError) -> None:
        """There will be no engine."""
        for number in list(self._changes):
            self._refused(number, error)

    def engine_event(self, event: em.BudgetEvent | em.Watch, now: float) -> None:
        """Takes an answer or a look at the device."""
        if isinstance(event, em.Watch):
            self._look(event, now)
            return
        change = self._changes.get(event.seq)
        if isinstance(event, em.BudgetReleased):
            self.used_bytes = event.used_bytes
            if change is not None or event.seq == 0:  # 0: a budget in the frame block
                self.budget_bytes = event.vram_budget_bytes
                self._given_back, self._pressed_bytes, self._idle_since = False, 0, None
        elif isinstance(event, em.BudgetLate):
            self._notify("late", event.vram_budget_bytes, event.seconds, "the release lags behind")
        if change is None:
            return
        if isinstance(event, em.BudgetGranted):
            self._grant(change, event.seconds, event.vram_budget_bytes)
        elif isinstance(event, em.BudgetReleased):
            self._keep_bytes = change.request.floor_bytes
            seconds = change.waited_s + event.seconds
            self._released(change, seconds)
            self._reach(change.request.state, seconds)
        elif isinstance(event, em.BudgetObserved):
            self._observed(event.seq, event.observed_bytes, change.waited_s + event.seconds)
        elif isinstance(event, em.BudgetRefused):
            self._refused(event.seq, event.error.exception())

    def _look(self, event: em.Watch, now: float) -> None:
        if self.state == "hibernated":
            return  # an engine that frees its model
        self.used_bytes, self.floor_bytes = event.used_bytes, event.floor_bytes
        self.full_bytes = event.full_bytes
        self.total_bytes, self.free_bytes = event.total_bytes, event.free_bytes
        for pid, n_bytes in event.appeared:
            self._notify("other_process", n_bytes, detail=f"process {pid}" if pid else "")
        if event.excess_bytes:
            held = f"the driver counts {event.excess_bytes >> 20} MiB more than the lease"
            self._notify("pressure", self._bound(), detail=held)
        free = self.free_bytes
        if free is None or free >= LOW_BYTES or now < self._pressure_at or self._busy():
            return
        bound = max(self.floor_bytes, self.used_bytes - (ENOUGH_BYTES - free))
        if bound < self.used_bytes:
            self._pressure_at = now + PRESSURE_EVERY_S
            self._pressed_bytes = bound
            self._ask_own("pressure", f"{free >> 20} MiB of the device are free")

    def _grant(self, change: _Change, seconds: float, reached_bytes: int | None = None) -> None:
        if change.granted:
            return
        request = change.request
        reached = request.vram_budget_bytes if reached_bytes is None else reached_bytes
        late = reached != request.vram_budget_bytes or seconds > request.timeout_s
        change.say(m.Lease(request.id, self._epoch, "partial" if late else "granted", reached, seconds, self.version))
        if late:
            self._notify("late", reached, seconds, "the deadline is too short")

    def _released(self, change: _Change, seconds: float) -> None:
        change.say(m.Released(change.request.id, self._epoch, self.budget_bytes, self.used_bytes, seconds))

    def _observed(self, number: int, observed_bytes: int | None, seconds: float) -> None:
        change = self._changes.pop(number)
        change.say(m.Observed(change.request.id, self._epoch, observed_bytes, seconds))
        self._over.append(change)

    def _refused(self, number: int, error: FrameshardError) -> None:
        change = self._changes.pop(number)
        request = change.request
        if isinstance(error, DeadlineMissed):
            self.budget_bytes = request.vram_budget_bytes  # stays in force, only late
            self._keep_bytes = request.floor_bytes
        elif not any(later > number for later in self._changes):
            self.version, self.state = change.before
        change.say(m.Error(request.id, self._epoch, m.ErrorInfo.of(error)))
        self._over.append(change)

    def _reach(self, state: m.LeaseState, seconds: float) -> None:
        if state != self._reached:
            self._reached = state
            self._notify("state", self.budget_bytes or self.full_bytes, seconds, state)

    def _ask(self, number: int) -> None:
        request = self._changes[number].request
        self.commands.append(
            em.SetBudget(number, request.vram_budget_bytes, request.timeout_s, request.state == "parked")
        )
