"""The tables of the lease: every pair of state and event, and random sequences of events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from frameshard.broker.leases import IDLE_S, Lease
from frameshard.errors import BadArgument, BadMessage, DeadlineMissed, EngineDied, FrameshardError
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection
from frameshard.wire.states import CHANGE, LEASE, LEASE_REFUSED, Change, Do

MIB = 1 << 20
EPOCH = 7
FLOOR, FULL = 16 * MIB, 256 * MIB
EVENTS = {event for row in LEASE.values() for event in row}
OWN = {"idle", "jobs", "pressure"}


def test_each_pair_is_a_step_or_refused() -> None:
    assert set(LEASE) == set(states.Lease)
    for state in states.Lease:
        for event in EVENTS:
            known = [event in LEASE[state], (state, event) in LEASE_REFUSED, event in OWN and state.value != "active"]
            assert known.count(True) == 1, (state, event)
    assert {do for row in LEASE.values() for _, todo in row.values() for do in todo} == set(Do)
    assert set(CHANGE) == set(Change)


def test_each_state_is_reached_and_left() -> None:
    steps = {(state, row[event][0]) for state, row in LEASE.items() for event in row}
    for state in states.Lease:
        assert any(old is not state and new is state for old, new in steps)
        assert any(old is state and new is not state for old, new in steps)


class Bench:
    """A lease, one host that asks for changes, and the answers to it."""

    def __init__(self) -> None:
        self.lease = Lease(0, EPOCH)
        self.host = ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)
        self.now = 0.0
        self.asked: list[int] = []
        self.requests: dict[int, m.BudgetSet] = {}
        self.heard: dict[int, list[str]] = {}
        self.lease.engine_ready(FLOOR, FULL, 0, 0.0)

    def state(self) -> states.Lease:
        return self.lease._state

    def ask(self, state: m.LeaseState, n_bytes: int = 64 * MIB, keep_bytes: int = 0, version: int = 0) -> None:
        number = len(self.asked) + 1
        request = m.BudgetSet(number, EPOCH, n_bytes, state=state, floor_bytes=keep_bytes, version=version)
        self.lease.set(self.host, request, self.now)
        self.asked.append(number)
        self.requests[number] = request

    def obey(self, *, observe: bool = True) -> None:
        """The engine carries out its commands.

        :param observe: the driver's count comes too.
        """
        for command in self.lease.commands:
            assert isinstance(command, em.SetBudget)
            self.lease.engine_event(em.BudgetGranted(command.seq, command.vram_budget_bytes, 0.0), self.now)
            used = 0 if command.parked else command.vram_budget_bytes or FULL
            self.lease.engine_event(em.BudgetReleased(command.seq, command.vram_budget_bytes, used, 0.0), self.now)
            if observe:
                self.lease.engine_event(em.BudgetObserved(command.seq, None, 0.0), self.now)
        self.lease.commands.clear()

    def refuse(self, error: FrameshardError) -> None:
        """The engine refuses its commands."""
        for command in self.lease.commands:
            assert isinstance(command, em.SetBudget)
            self.lease.engine_event(em.BudgetRefused(command.seq, m.ErrorInfo.of(error)), self.now)
        self.lease.commands.clear()

    def look(self, free_mb: int) -> None:
        used = self.lease.used_bytes
        self.lease.engine_event(em.Watch(used, FLOOR, FULL, 8192 * MIB, free_mb * MIB, (), 0), self.now)

    def tick(self, seconds: float, jobs: int) -> None:
        self.now += seconds
        self.lease.tick(self.now, jobs)

    def answers(self) -> dict[int, list[str]]:
        """The types of the answers to each request."""
        for number in self.asked:
            self.heard.setdefault(number, [])
        while (frame := self.host.next_frame()) is not None:
            answer = m.decode_answer(frame)
            self.heard[answer.id].append(type(answer).__name__)  # type: ignore[union-attr, index]
            self.host.sent()
        return self.heard

    def check(self) -> None:
        """Once every change is answered, the lease is what the host was told: the changes that were released count."""
        heard = self.answers()
        if any(not types or types[-1] not in ("Observed", "Error") for types in heard.values()):
            return
        in_force = [self.requests[number] for number in self.asked if "Released" in heard[number]]
        last = in_force[-1] if in_force else m.BudgetSet(0, EPOCH, 0)
        assert (self.lease.budget_bytes, self.lease.version) == (
            last.vram_budget_bytes,
            max((request.version for request in in_force), default=0),
        )
        # An engine that ends while it is parked leaves the lease hibernated.
        assert self.lease.state == last.state or (last.state, self.lease.state) == ("parked", "hibernated")


def in_state(state: states.Lease) -> Bench:
    bench = Bench()
    bench.ask("active", 200 * MIB, keep_bytes=50 * MIB)
    bench.obey()
    if state is states.Lease.PARKED:
        bench.ask("parked")
        bench.obey()
    elif state is not states.Lease.ACTIVE:
        bench.ask("hibernated")
        if state is not states.Lease.HIBERNATING:
            bench.lease.engine_hibernated(0.0)
        if state is states.Lease.WAKING:
            bench.ask("active")
    assert bench.state() is state
    return bench


RAISE: dict[str, Callable[[Bench], None]] = {
    "active": lambda bench: bench.ask("active"),
    "parked": lambda bench: bench.ask("parked"),
    "hibernated": lambda bench: bench.ask("hibernated"),
    "ready": lambda bench: bench.lease.engine_ready(FLOOR, FULL, bench.lease.engine_load_bytes(), bench.now),
    "lost": lambda bench: bench.lease.engine_lost(bench.now),
    "gone": lambda bench: bench.lease.engine_hibernated(bench.now),
}


@pytest.mark.parametrize("state", states.Lease)
@pytest.mark.parametrize("event", RAISE)
def test_the_code_does_what_the_table_says(state: states.Lease, event: str) -> None:
    bench = in_state(state)
    if (state, event) in LEASE_REFUSED:
        with pytest.raises(BadArgument, match="has to become active"):
            RAISE[event](bench)
        assert bench.state() is state
        return
    bench.lease.commands.clear()
    RAISE[event](bench)
    after, actions = LEASE[state][event]
    assert bench.state() is after
    waits = Do.TELL_ALL in actions and state is states.Lease.WAKING
    assert bool(bench.lease.commands) == (Do.TELL in actions or waits)
    if event in ("active", "parked", "hibernated"):
        heard = bench.answers()[bench.asked[-1]]
        settled = Do.SETTLE in actions
        assert heard == (["Lease", "Released", "Observed"] if settled else ["Lease"] if Do.GRANT in actions else [])


@pytest.mark.parametrize("state", states.Lease)
def test_on_its_own_it_acts_only_while_active(state: states.Lease) -> None:
    bench = in_state(state)
    bench.lease.used_bytes = 200 * MIB if state is states.Lease.ACTIVE else bench.lease.used_bytes
    bench.lease.commands.clear()
    bench.tick(1.0, 0)
    bench.tick(IDLE_S + 1, 0)
    assert len(bench.lease.commands) == (state is states.Lease.ACTIVE)
    bench.obey()
    bench.tick(1.0, 1)
    assert len(bench.lease.commands) == (state is states.Lease.ACTIVE)
    bench.obey()
    bench.now += 10
    bench.look(free_mb=20)
    assert len(bench.lease.commands) == (state is states.Lease.ACTIVE)
    assert bench.state() is state


def test_a_refusal_brings_back_what_was_before() -> None:
    for before in (states.Lease.ACTIVE, states.Lease.PARKED):
        for asked in ("active", "parked"):
            bench = in_state(before)
            bench.ask(asked)
            bench.refuse(EngineDied("no"))
            assert bench.state() is before
    bench = in_state(states.Lease.ACTIVE)
    bench.ask("parked")
    bench.refuse(DeadlineMissed("late"))
    assert bench.state() is states.Lease.PARKED  # the change stays in force
    bench = in_state(states.Lease.WAKING)
    bench.lease.fail_all(EngineDied("off"))
    assert bench.state() is states.Lease.HIBERNATING


def test_to_park_while_no_engine_is_ready_is_to_hibernate() -> None:
    """Parking needs an engine. After the end of an engine, and before the start of the next, it had no answer once."""
    bench = in_state(states.Lease.WAKING)
    bench.ask("parked")
    assert bench.lease.ends_engine
    bench.lease.engine_hibernated(bench.now)
    assert bench.state() is states.Lease.HIBERNATED
    assert bench.answers()[bench.asked[-1]] == ["Lease", "Released", "Observed"]


def test_an_own_change_does_not_overtake_the_hosts() -> None:
    """A new job during a change must not restore the budget before the change."""
    bench = in_state(states.Lease.ACTIVE)
    bench.tick(1.0, 0)
    bench.tick(IDLE_S + 1, 0)
    bench.obey()
    bench.ask("active", 100 * MIB)
    bench.tick(1.0, 1)
    assert len(bench.lease.commands) == 1
    bench.obey()
    bench.tick(1.0, 1)
    assert (bench.lease.commands, bench.lease.used_bytes) == ([], 100 * MIB)


def test_an_answer_out_of_turn_is_nonsense() -> None:
    bench = in_state(states.Lease.ACTIVE)
    bench.ask("active")
    (command,) = bench.lease.commands
    assert isinstance(command, em.SetBudget)
    with pytest.raises(BadMessage):
        bench.lease.engine_event(em.BudgetReleased(command.seq, MIB, MIB, 0.0), 0.0)


@pytest.mark.parametrize("seed", range(40))
def test_random_walks_answer_everything_once_and_keep_to_the_answers(seed: int) -> None:
    choice = random.Random(seed).choice
    bench = Bench()
    refused, has_engine = 0, True
    for _ in range(200):
        event = choice([*RAISE, "obey", "obey", "refuse", "late driver", "off", "idle", "jobs", "pressure"])
        try:
            if event in ("ready", "gone"):
                bench.lease.engine_lost(bench.now)
            if event in ("active", "parked", "hibernated"):
                version = choice([0, bench.lease.version + 1])
                bench.ask(event, choice([0, 64, 100, 200]) * MIB, version=version)
            elif event in RAISE:
                RAISE[event](bench)
            elif event in ("obey", "refuse", "late driver") and not has_engine:
                bench.lease.commands.clear()
            elif event == "late driver":  # the engine ends before the driver has counted
                bench.obey(observe=False)
                bench.lease.engine_lost(bench.now)
            elif event == "obey":
                bench.obey()
            elif event == "refuse":
                bench.refuse(EngineDied("no"))
            elif event == "off":
                bench.lease.engine_lost(bench.now)
                bench.lease.fail_all(EngineDied("off"))
            elif event == "pressure":
                bench.look(free_mb=choice([20, 4000]))
            else:
                bench.tick(IDLE_S + 1, event == "jobs")
        except BadArgument:
            refused += 1
        if event in ("ready", "lost", "gone", "late driver", "off"):
            has_engine = event == "ready"
        bench.check()
    # At the end the host asks for an active lease, and an engine starts.
    bench.ask("active", 0)
    bench.lease.engine_lost(bench.now)
    bench.lease.engine_ready(FLOOR, FULL, 0, bench.now)
    bench.obey()
    assert bench.state() is states.Lease.ACTIVE
    bench.check()
    whole, failed = ["Lease", "Released", "Observed"], (["Error"], ["Lease", "Error"])
    for number, heard in bench.answers().items():
        assert heard == whole or heard in failed, (number, heard)
