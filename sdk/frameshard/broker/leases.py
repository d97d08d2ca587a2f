"""The VRAM lease: the agreement in force, the changes that wait for an answer, and what the sidecar does on its own.

The tables of states and transitions are in :mod:`frameshard.wire.states` (`LEASE`, `CHANGE`). This module carries out
the actions of each transition. For a new state add a row to `LEASE`; for a new action a member to `Do` and a method to
:class:`Lease`.

The last change is in force, whichever host has sent it. A change is refused if its version is not above the one in
force. This module does no I/O, and time is a parameter, in seconds. It leaves commands for the engine in
:attr:`Lease.commands` and notices for hosts in :attr:`Lease.notices`. Section "The lease" of bindings/PROTOCOL.md says
what hosts can rely on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from frameshard.errors import (
    BadArgument,
    BadMessage,
    DeadlineMissed,
    FrameshardError,
    Overloaded,
    StaleLease,
    below_floor,
    below_host_floor,
)
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection
from frameshard.wire.states import Do

logger = logging.getLogger("frameshard.broker")

MAX_PENDING = 64
"""The most changes that may wait for an answer. So many finished changes are kept too, to repeat their answers."""

IDLE_S = 5.0
"""After so many seconds without a job the sidecar gives back the VRAM above the host's floor."""

WANTS_EVERY_S = 10.0

LOW_BYTES = 128 << 20
"""If less than this is free on the device, the sidecar shrinks until `ENOUGH_BYTES` are free."""

ENOUGH_BYTES = 256 << 20
PRESSURE_EVERY_S = 1.0
OWN_TIMEOUT_S = 5.0
OWN_RETRY_S = 5.0
"""So long after a refusal the sidecar makes no change of that kind on its own."""

_WORDS: dict[states.Lease, m.LeaseState] = {
    states.Lease.ACTIVE: "active",
    states.Lease.PARKED: "parked",
    states.Lease.HIBERNATING: "hibernated",
    states.Lease.HIBERNATED: "hibernated",
    states.Lease.WAKING: "active",
}
"""The protocol's names of the states."""

_WITHOUT_ENGINE = (states.Lease.HIBERNATING, states.Lease.HIBERNATED, states.Lease.WAKING)


@dataclass(eq=False)
class _Change:
    """A host's change of the lease."""

    number: int
    """Its number in commands to the engine."""
    connection: ServerConnection
    request: m.BudgetSet
    asked_at: float
    host_budget_bytes: int
    """The host budget that it asks for, or the one in force before it; 0 for no limit."""
    before: m.LeaseState
    """The state before; a refusal restores it."""
    state: states.Change = states.Change.ASKED
    waited_s: float = 0.0
    """Seconds from the host's request until the command to the engine."""
    answers: list[m.Reply] = field(default_factory=list)

    @property
    def released(self) -> bool:
        return self.state in (states.Change.RELEASED, states.Change.OVER)

    def step(self, event: str) -> None:
        """Moves the change to its next state.

        :raises BadMessage: the engine cannot send this event in the present state.
        """
        if event not in states.CHANGE[self.state]:
            raise BadMessage(f"the engine sent {event!r} for a change that is {self.state.value}")
        self.state = states.CHANGE[self.state][event]

    def answer(self, answer: m.Reply) -> None:
        self.answers.append(answer)
        self.connection.reply(answer)


@dataclass
class HostFigures:
    """The host memory of all processes, in bytes.

    :param budget_bytes: the host budget in force; 0 for no limit.
    :param floor_bytes: the floor of the host budget; 0: not known.
    :param used_bytes: what is held, by the engine's count.
    :param total_bytes: of the machine. It and `free_bytes` are None if the system does not report them.
    """

    budget_bytes: int
    floor_bytes: int = 0
    used_bytes: int = 0
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass
class _OwnChange:
    """A change that the sidecar makes on its own, and the notice of it."""

    number: int
    bound_bytes: int
    kind: m.NoticeKind
    detail: str
    before: tuple[int, int]
    """The own limits before; a refusal restores them."""
    told: bool = False
    """The host has got the notice."""


@dataclass
class _Own:
    """What the sidecar does on its own."""

    idle_since: float | None = None
    idle_bytes: int = 0
    """The limit while there are no jobs; 0 for none."""
    pressed_bytes: int = 0
    """The limit after too little of the device was free; 0 for none."""
    idle_at: float = 0.0
    """The limit for the time without jobs is not changed before."""
    pressure_at: float = 0.0
    """The limit for a full device is not changed before."""
    asked: _OwnChange | None = None
    """The last change, while it is not answered or late."""
    refusal: str = ""
    """Why the last change was refused, as it was logged."""

    def forget(self) -> None:
        """A budget of the host replaces all limits."""
        self.idle_bytes, self.pressed_bytes, self.idle_since, self.asked = 0, 0, None, None


class Lease:
    """The lease of one sidecar.

    :param budget_bytes: the VRAM budget of the launch; 0 for no limit.
    :param epoch: the number of the launch; it is part of each answer.
    :param host_budget_bytes: the host budget of the launch; 0 for no limit.
    """

    def __init__(self, budget_bytes: int, epoch: int, host_budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        """The budget that the host has set; 0 for no limit."""
        self.host = HostFigures(host_budget_bytes)
        """The lease of host memory."""
        self.floor_bytes = 0
        """The floor of the model: a smaller budget is refused."""
        self.full_bytes = 0
        """With this budget everything is resident."""
        self.used_bytes = 0
        """The VRAM that the engine holds, from its ledger."""
        self.total_bytes: int | None = None
        """The memory of the device. It and `free_bytes` are None if the driver does not report them."""
        self.free_bytes: int | None = None
        self.load_s = 0.0
        """Seconds from the last start of an engine until it was ready."""
        self.commands: list[em.Command] = []
        """Commands for the engine, in order. The caller removes and sends them."""
        self.notices: list[m.Notice] = []
        """Notices for the sessions that asked for notices. The caller removes and sends them."""
        self._state = states.Lease.ACTIVE
        self._epoch = epoch
        self._changes: dict[int, _Change] = {}
        """The changes that are not finished, by number."""
        self._over: deque[_Change] = deque(maxlen=MAX_PENDING)
        self._newest: dict[ServerConnection, int] = {}
        self._version = 0
        """The highest version of the changes that came into force."""
        self._loaded_ahead = False
        """The engine was loaded with the budgets of a change that it has not carried out."""
        self._numbers = 0
        self._announced: m.LeaseState = "active"
        self._keep_bytes = 0
        """The host's floor: the VRAM that a sidecar without jobs may keep; 0 for all."""
        self._own = _Own()
        self._frame_generation = 0
        """The `budget_generation` of the last budget in the frame block that came into force."""
        self._wants_at = 0.0
        self._actions: dict[Do, Callable[[_Change | None, float], None]] = {
            Do.GRANT: self._grant_now,
            Do.TELL: self._tell,
            Do.TELL_ALL: self._tell_all,
            Do.SETTLE: self._settle,
            Do.DROP: lambda _change, _now: self.commands.clear(),
            Do.GIVE_BACK: self._give_back,
            Do.TAKE_AGAIN: self._take_again,
            Do.SHRINK: self._shrink,
        }

    @property
    def state(self) -> m.LeaseState:
        """The state that was asked for last."""
        return _WORDS[self._state]

    @property
    def version(self) -> int:
        """The highest version of the changes in force and of those that wait; 0: none of them has one."""
        return max(self._version, *(change.request.version for change in self._changes.values()), 0)

    @property
    def ends_engine(self) -> bool:
        """Whether a running engine must end."""
        return self._state is states.Lease.HIBERNATING

    def _step(self, event: str, now: float, change: _Change | None = None) -> None:
        self._state, actions = states.LEASE[self._state][event]
        for action in actions:
            self._actions[action](change, now)

    # ---- clients ----------------------------------------------------------------------------------------------------

    def set(self, connection: ServerConnection, request: m.BudgetSet, now: float) -> None:
        """Starts a change. A repeated request, after a resumption, changes nothing and gets the same answers.

        :raises Overloaded: too many changes wait.
        :raises StaleLease: the version is not above the one in force, or this client has asked for a later change.
        :raises BudgetBelowFloor: the model cannot run in this budget. This is raised only if no engine checks it: for
            parking, hibernation and waking.
        :raises BadArgument: this state cannot be reached from the present one.
        """
        for change in (*self._changes.values(), *self._over):
            if change.connection is connection and change.request.id == request.id:
                for answer in change.answers:
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
        if (self._state, request.state) in states.LEASE_REFUSED:
            raise BadArgument(states.LEASE_REFUSED[self._state, request.state], field="state")
        unchecked = request.state != "active" or self._state in _WITHOUT_ENGINE
        if unchecked and 0 < request.vram_budget_bytes < self.floor_bytes:
            raise below_floor(request.vram_budget_bytes, self.floor_bytes)
        host_budget_bytes = self._host_wanted() if request.host_budget_bytes is None else request.host_budget_bytes
        # The processes may have grown since the host budget came into force, and the floor with them.
        if unchecked and host_budget_bytes != self.host.budget_bytes and 0 < host_budget_bytes < self.host.floor_bytes:
            raise below_host_floor(host_budget_bytes, self.host.floor_bytes)
        self._newest[connection] = request.id
        self._numbers += 1
        change = _Change(self._numbers, connection, request, now, host_budget_bytes, self.state)
        self._changes[change.number] = change
        self._step(request.state, now, change)

    def describe(self, request_id: int, jobs: int) -> m.Budget:
        """The answer to budget_get.

        :param jobs: the number of open jobs.
        """
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
            host_budget_bytes=self.host.budget_bytes,
            host_floor_bytes=self.host.floor_bytes,
            host_used_bytes=self.host.used_bytes,
        )

    def drop(self, connection: ServerConnection) -> None:
        """Forgets a client that is gone. Its changes still come into force."""
        for change in [change for change in self._over if change.connection is connection]:
            self._over.remove(change)
        self._newest.pop(connection, None)

    # ---- on its own -------------------------------------------------------------------------------------------------

    def tick(self, now: float, jobs: int) -> None:
        """Does what is due: asks the host for VRAM, or gives VRAM back. Call it when a job comes, and several times a
        second.

        :param jobs: the number of open jobs.
        """
        if jobs and now >= self._wants_at and self._short():
            self._wants_at = now + WANTS_EVERY_S
            wanted = self.full_bytes if self.state == "active" else self.budget_bytes or self.full_bytes
            self._notify("wants", wanted, detail=f"{jobs} jobs are open")
        own = self._own
        if jobs:
            own.idle_since = None
            if own.idle_bytes and now >= own.idle_at and not self._busy():
                self._step("jobs", now)
        elif own.idle_since is None:
            own.idle_since = now
        elif (
            self._keep_bytes
            and not own.idle_bytes
            and now - own.idle_since >= IDLE_S
            and now >= own.idle_at
            and not self._busy()
            and self.used_bytes > max(self._keep_bytes, self.floor_bytes)
        ):
            self._step("idle", now)

    def _short(self) -> bool:
        return self.state != "active" or 0 < self.budget_bytes < self.full_bytes

    def _busy(self) -> bool:
        """Whether the sidecar must not change the budget on its own: the lease is not active, or a host's change is not
        carried out yet."""
        return self._state is not states.Lease.ACTIVE or self.changing

    @property
    def changing(self) -> bool:
        """Whether a host's change is not carried out yet."""
        return any(not change.released for change in self._changes.values())

    def _host_wanted(self) -> int:
        """The host budget that was asked for last; 0 for no limit."""
        waiting = [change.host_budget_bytes for change in self._changes.values() if not change.released]
        return waiting[-1] if waiting else self.host.budget_bytes

    def _bound(self) -> int:
        """The budget for the engine: the host's budget or one of the sidecar's own limits, whichever is smallest; 0 for
        no limit."""
        own = self._own
        idle_bytes = max(own.idle_bytes, self.floor_bytes) if own.idle_bytes else 0
        return min((bound for bound in (self.budget_bytes, own.pressed_bytes, idle_bytes) if bound), default=0)

    def _give_back(self, _change: _Change | None, _now: float) -> None:
        before = self._own_limits()
        self._own.idle_bytes = self._keep_bytes
        self._wants_at = 0.0  # what was wanted before the idle time is out of date
        self._ask_own("gives_back", "there are no jobs", before)

    def _take_again(self, _change: _Change | None, _now: float) -> None:
        before = self._own_limits()
        self._own.idle_bytes = 0
        self._ask_own("gives_back", "a job takes up the lease", before)

    def _shrink(self, _change: _Change | None, now: float) -> None:
        assert self.free_bytes is not None
        before = self._own_limits()
        self._own.pressure_at = now + PRESSURE_EVERY_S
        self._own.pressed_bytes = self._pressure_bound()
        self._ask_own("pressure", f"{self.free_bytes >> 20} MiB of the device are free", before)

    def _own_limits(self) -> tuple[int, int]:
        return self._own.idle_bytes, self._own.pressed_bytes

    def _pressure_bound(self) -> int:
        """The budget that leaves `ENOUGH_BYTES` free on the device."""
        return max(self.floor_bytes, self.used_bytes - (ENOUGH_BYTES - (self.free_bytes or 0)))

    def _ask_own(self, kind: m.NoticeKind, detail: str, before: tuple[int, int]) -> None:
        """Tells the engine the present bound. A growth is announced at once, because the host must expect it from now
        on; memory is promised when it is free."""
        bound = self._tell_bound()
        self._own.asked = _OwnChange(self._numbers, bound, kind, detail, before)
        if bound == 0 or bound >= self.used_bytes:
            self._promise()

    def _tell_bound(self) -> int:
        """Tells the engine the budgets in force, within the sidecar's own limits. Returns the one for VRAM."""
        self._numbers += 1
        bound = self._bound()
        self.commands.append(
            em.SetBudget(
                self._numbers,
                bound,
                OWN_TIMEOUT_S,
                host_budget_bytes=self.host.budget_bytes,
                known_generation=self._frame_generation,
            )
        )
        return bound

    def _own_event(self, event: em.BudgetReleased | em.BudgetRefused, asked: _OwnChange, now: float) -> None:
        """Takes the answer to the last change that the sidecar has made on its own."""
        own = self._own
        if isinstance(event, em.BudgetReleased):
            own.refusal = ""
            if 0 < event.vram_budget_bytes <= asked.bound_bytes:  # else the frame block has had a larger one meanwhile
                self._promise()
            own.asked = None
            return
        error = event.error.exception()
        if isinstance(error, DeadlineMissed):
            return  # it stays in force: the promise is made when the figures say so
        own.asked = None
        own.idle_bytes, own.pressed_bytes = asked.before
        if asked.kind == "pressure":
            own.pressure_at = now + OWN_RETRY_S
        else:
            own.idle_at = now + OWN_RETRY_S
        if str(error) != own.refusal:
            own.refusal = str(error)
            logger.warning("the sidecar cannot change its use of VRAM on its own (%s): %s", asked.detail, error)

    def _promise(self) -> None:
        """Tells the host what is held at most from now on, once."""
        asked = self._own.asked
        if asked is not None and not asked.told:
            asked.told = True
            self._notify(asked.kind, asked.bound_bytes or self.full_bytes, detail=asked.detail)

    def _notify(self, kind: m.NoticeKind, n_bytes: int, seconds: float = 0.0, detail: str = "") -> None:
        self.notices.append(m.Notice(self._epoch, kind, n_bytes, seconds, detail))

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_load_bytes(self) -> int:
        """The budget that a new engine is loaded with: the last one that a host asked for, unless it is below the
        floor."""
        wanted = [change.request.vram_budget_bytes for change in self._changes.values() if not change.released]
        if wanted and (wanted[-1] == 0 or wanted[-1] >= self.floor_bytes):
            return wanted[-1]
        return self._bound()

    def engine_load_host_bytes(self) -> int:
        """The host budget that a new engine is loaded with, as :meth:`engine_load_bytes`."""
        wanted = self._host_wanted()
        return wanted if wanted == 0 or wanted >= self.host.floor_bytes else self.host.budget_bytes

    def engine_ready(self, floor_bytes: int, full_bytes: int, budget_bytes: int, now: float) -> None:
        """An engine is ready and runs with `budget_bytes`."""
        self.floor_bytes, self.full_bytes = floor_bytes, full_bytes
        self._loaded_ahead = self.changing  # what it was loaded for may still be refused
        if not self.changing and self._own_limits() == (0, 0):
            self.budget_bytes = budget_bytes
        self._step("ready", now)

    def engine_lost(self, now: float) -> None:
        """The engine has ended."""
        self._loaded_ahead = False
        self._step("lost", now)

    def engine_hibernated(self, now: float) -> None:
        """The engine has ended. No other one is started before the lease is active."""
        self._step("gone", now)

    def fail_all(self, error: FrameshardError) -> None:
        """Refuses all waiting changes with `error`, because no engine can be started now. Those that were released stay
        in force."""
        for change in list(self._changes.values()):
            if change.released:
                self._observed(change, None, 0.0)  # the engine process has ended and cannot be observed
            else:
                self._refused(change, error)

    def engine_event(self, event: em.BudgetEvent | em.Watch | em.HostPressure, now: float) -> None:
        """Takes the engine's answer to a change, its figures of the memory, or its own limit for host memory.

        :raises BadMessage: the engine cannot send this answer now.
        """
        if isinstance(event, em.Watch):
            self._look(event, now)
            return
        if isinstance(event, em.HostPressure):
            self.notices.append(m.Notice(self._epoch, "host_pressure", 0, 0.0, event.why, event.limit_bytes))
            return
        change, own = self._changes.get(event.seq), self._own.asked
        if isinstance(event, em.BudgetReleased):
            self.used_bytes, self.host.used_bytes = event.used_bytes, event.host_used_bytes
            if change is not None or event.seq == 0:  # 0: the budget came through the frame block
                self.budget_bytes, self.host.budget_bytes = event.vram_budget_bytes, event.host_budget_bytes
                self._own.forget()
                self._loaded_ahead = False
                self._frame_generation = event.generation or self._frame_generation
        elif isinstance(event, em.BudgetLate):
            self._notify("late", event.vram_budget_bytes, event.seconds, "the release lags behind")
        if change is None:
            if own is not None and own.number == event.seq and isinstance(event, em.BudgetReleased | em.BudgetRefused):
                self._own_event(event, own, now)
            return
        if isinstance(event, em.BudgetGranted):
            self._grant(change, event.seconds, event.vram_budget_bytes)
        elif isinstance(event, em.BudgetReleased):
            self._keep_bytes = change.request.floor_bytes
            seconds = change.waited_s + event.seconds
            self._released(change, seconds)
            self._announce(change.request.state, seconds)
        elif isinstance(event, em.BudgetObserved):
            self._observed(change, event.observed_bytes, change.waited_s + event.seconds, event.host_observed_bytes)
        elif isinstance(event, em.BudgetRefused):
            self._refused(change, event.error.exception())
        else:
            change.step("late")

    def _look(self, event: em.Watch, now: float) -> None:
        if self.state == "hibernated":
            return  # the engine is ending, and its figures are those of a model that is being freed
        self.used_bytes, self.floor_bytes = event.used_bytes, event.floor_bytes
        self.full_bytes = event.full_bytes
        self.total_bytes, self.free_bytes = event.total_bytes, event.free_bytes
        self.host.used_bytes, self.host.floor_bytes = event.host_used_bytes, event.host_floor_bytes
        self.host.total_bytes, self.host.free_bytes = event.host_total_bytes, event.host_free_bytes
        for pid, n_bytes in event.appeared:
            self._notify("other_process", n_bytes, detail=f"process {pid}" if pid else "")
        if event.excess_bytes:
            detail = f"the driver counts {event.excess_bytes >> 20} MiB more than the lease"
            self._notify("pressure", self._bound(), detail=detail)
        if self._own.asked is not None and self.used_bytes <= self._own.asked.bound_bytes:
            self._promise()  # its release was late
        if self.free_bytes is None or self.free_bytes >= LOW_BYTES or now < self._own.pressure_at or self._busy():
            return
        if self._pressure_bound() < self.used_bytes:
            self._step("pressure", now)

    # ---- changes ----------------------------------------------------------------------------------------------------

    def _tell(self, change: _Change | None, _now: float) -> None:
        assert change is not None
        request = change.request
        parked = request.state == "parked"
        self.commands.append(
            em.SetBudget(change.number, request.vram_budget_bytes, request.timeout_s, parked, change.host_budget_bytes)
        )

    def _tell_all(self, _change: _Change | None, now: float) -> None:
        for change in list(self._changes.values()):
            if change.released:
                self._observed(change, None, 0.0)  # the engine process has ended and cannot be observed
            else:
                change.waited_s = now - change.asked_at
                self._tell(change, now)

    def _grant_now(self, change: _Change | None, _now: float) -> None:
        assert change is not None
        self._grant(change, self.load_s if change.request.state == "active" else 0.0, change.request.vram_budget_bytes)

    def _settle(self, _change: _Change | None, now: float) -> None:
        self.used_bytes = self.host.used_bytes = 0
        asked_at = now
        waiting = list(self._changes.values())
        last = max((at for at, change in enumerate(waiting) if change.request.state != "active"), default=-1)
        for change in waiting[: last + 1]:
            asked_at = change.asked_at
            if not change.released:
                self.budget_bytes, self.host.budget_bytes = change.request.vram_budget_bytes, change.host_budget_bytes
                self._grant(change, 0.0, change.request.vram_budget_bytes)
                self._released(change, now - change.asked_at)
            self._observed(change, 0, now - change.asked_at)
        self._announce("hibernated", now - asked_at)

    def _grant(self, change: _Change, seconds: float, reached_bytes: int) -> None:
        first = change.state is states.Change.ASKED
        change.step("granted")
        if not first:
            return
        request = change.request
        late = reached_bytes != request.vram_budget_bytes or seconds > request.timeout_s
        decision: m.Decision = "partial" if late else "granted"
        change.answer(
            m.Lease(request.id, self._epoch, decision, reached_bytes, seconds, self.version, change.host_budget_bytes)
        )
        if late:
            self._notify("late", reached_bytes, seconds, "the deadline is too short")

    def _released(self, change: _Change, seconds: float) -> None:
        change.step("released")
        self._version = max(self._version, change.request.version)
        change.answer(
            m.Released(
                change.request.id,
                self._epoch,
                self.budget_bytes,
                self.used_bytes,
                seconds,
                self.host.budget_bytes,
                self.host.used_bytes,
            )
        )

    def _observed(
        self, change: _Change, observed_bytes: int | None, seconds: float, host_observed_bytes: int | None = None
    ) -> None:
        change.step("observed")
        answer = m.Observed(change.request.id, self._epoch, observed_bytes, seconds, host_observed_bytes)
        self._end(change, answer)

    def _refused(self, change: _Change, error: FrameshardError) -> None:
        change.step("refused")
        request = change.request
        if isinstance(error, DeadlineMissed):
            self.budget_bytes = request.vram_budget_bytes  # the change stays in force, although it is late
            self.host.budget_bytes = change.host_budget_bytes
            self._keep_bytes = request.floor_bytes
            self._version = max(self._version, request.version)
        else:
            self._undo(change)
        self._end(change, m.Error(request.id, self._epoch, m.ErrorInfo.of(error)))

    def _undo(self, change: _Change) -> None:
        """Restores the state before a refused change, and the budgets of an engine that was loaded with it."""
        if change.number == max(self._changes):
            self._step(f"undo {change.before}", 0.0)
        else:
            # The state of this change never came into force, so no later refusal may restore it.
            later = next(other for other in self._changes.values() if other.number > change.number)
            later.before = change.before
        if self._loaded_ahead and not self.changing:
            self._loaded_ahead = False
            self._tell_bound()

    def _end(self, change: _Change, answer: m.Reply) -> None:
        del self._changes[change.number]
        change.answer(answer)
        self._over.append(change)

    def _announce(self, state: m.LeaseState, seconds: float) -> None:
        if state != self._announced:
            self._announced = state
            self._wants_at = 0.0  # what was wanted in the state before is out of date
            self._notify("state", self.budget_bytes or self.full_bytes, seconds, state)
