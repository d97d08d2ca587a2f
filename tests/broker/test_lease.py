"""The lease: versions, repeated requests, parking, hibernation and waking, and changes by the sidecar itself."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import cycle, islice

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.broker.leases import ENOUGH_BYTES, IDLE_S, LOW_BYTES, WANTS_EVERY_S, Lease
from frameshard.testing import fake_engine
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection
from sidecars import GREEDY, WORDS, alive, in_trio, launch, raw_peer

MIB = 1 << 20
EPOCH = 7


@in_trio
async def test_a_version_that_is_not_above_the_one_in_force_changes_nothing() -> None:
    async with launch() as client, frameshard.connect(client.info) as other:
        assert (await client.set_budget(64, version=3)).lease.version == 3
        for late in (client.set_budget(32, version=3), other.set_budget(32, version=2)):
            with pytest.raises(errors.StaleLease) as refused:
                await late
            assert refused.value.detail["version"] == 3
        assert (await client.budget()).vram_budget_bytes == 64 * MIB
        # The version of a change that was refused for another reason can be used again.
        with pytest.raises(errors.BudgetBelowFloor):
            await client.set_budget(1, version=4)
        assert (await client.budget()).version == 3
        assert (await other.set_budget(40, version=4)).vram_budget_bytes == 40 * MIB
        assert (await other.set_budget(48)).lease.version == 4  # without a version the last change counts


@in_trio
async def test_a_change_that_is_said_again_is_not_made_again() -> None:
    """After a lost connection a client repeats requests without an answer. Newer changes, also of other clients, must
    stay in force."""
    async with launch() as client:
        async with raw_peer(client.info) as peer:
            welcome = await peer.greet()
            old = m.BudgetSet(5, peer.epoch, 64 * MIB)
            await peer.say(old)
            answers = [await peer.hear_of(5) for _ in range(3)]
            assert [type(answer) for answer in answers] == [m.Lease, m.Released, m.Observed]
            await peer.say(m.BudgetSet(6, peer.epoch, 1))
            refused = await peer.hear_of(6)
            assert refused.error.name == "budget_below_floor"
        await client.set_budget(32)
        async with raw_peer(client.info) as peer:
            assert (await peer.greet(session=welcome.session)).resumed
            await peer.say(old)
            assert [await peer.hear_of(5) for _ in range(3)] == answers
            await peer.say(m.BudgetSet(6, peer.epoch, 1))
            assert await peer.hear_of(6) == refused
            await peer.say(m.BudgetSet(4, peer.epoch, 48 * MIB))  # new, but older than the last
            assert (await peer.hear_of(4)).error.name == "stale_lease"
        assert (await client.budget()).vram_budget_bytes == 32 * MIB


@pytest.mark.parametrize("state", ["parked", "hibernated"])
@in_trio
async def test_jobs_wait_for_an_active_lease(state: m.LeaseState) -> None:
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), vram_budget_mb=128) as client:
        notices = client.notices()
        async with client.complete(WORDS, sampling=GREEDY) as stream:
            for _ in range(5):
                await stream.__anext__()
            pid = (await client.stats()).broker.engine_pid
            assert pid is not None
            result = await client.set_budget(100, state=state, version=1)
            assert (result.vram_budget_bytes, result.used_bytes) == (100 * MIB, 0)
            budget = await client.budget()
            assert (budget.state, budget.vram_budget_bytes, budget.used_bytes) == (state, 100 * MIB, 0)
            assert alive(pid) == (state == "parked")
            async with client.complete("one two", sampling=frameshard.Sampling(max_tokens=2)) as waiting:
                broker = (await client.stats()).broker
                assert (broker.engine_restarts, broker.jobs_queued + broker.jobs_running) == (0, 2)
                if state == "hibernated":
                    assert (broker.engine, broker.engine_pid) == ("hibernated", None)
                    with pytest.raises(errors.BadArgument):
                        await client.set_budget(100, state="parked")
                    with pytest.raises(errors.EngineDied):
                        await client.plan([100])
                with pytest.raises(errors.BudgetBelowFloor):
                    await client.set_budget(1, state=state)
                back = await client.set_budget(120, version=2)
                assert (back.vram_budget_bytes, back.used_bytes) == (120 * MIB, 120 * MIB)
                assert (await waiting.completed()).text == "one two"
            for _ in range(50):
                await stream.__anext__()
            said = stream.text.split()
            assert said == list(islice(cycle(WORDS.split()), len(said)))
        broker = (await client.stats()).broker
        assert (broker.engine, broker.engine_restarts) == ("ready", 0)
        heard = [await notices.receive() for _ in range(notices.statistics().current_buffer_used)]
        assert [notice.detail for notice in heard if notice.kind == "state"] == [state, "active"]
        assert "wants" in {notice.kind for notice in heard}


@in_trio
async def test_an_engine_that_dies_while_it_is_parked_stays_away() -> None:
    async with launch(engine=fake_engine(delay_s=0.002)) as client:
        async with client.complete(WORDS) as stream:
            await stream.__anext__()
            pid = (await client.stats()).broker.engine_pid
            assert pid is not None
            await client.set_budget(100, state="parked")
            changes = client.engine_changes()
            os.kill(pid, signal.SIGKILL)
            assert (await changes.receive()).state == "hibernated"
            assert (await client.budget()).state == "hibernated"
            await client.set_budget(100)
            assert (await stream.completed()).text == WORDS


@in_trio
async def test_hibernating_and_waking_in_one_breath() -> None:
    """The last change counts, and each change gets its answers."""
    async with launch(engine=fake_engine(delay_s=0.001)) as client:
        async with client.complete(WORDS) as stream:
            await stream.__anext__()
            states: list[m.LeaseState] = ["hibernated", "active", "parked", "active", "hibernated", "active"]
            results: dict[int, frameshard.BudgetResult] = {}

            async def change(number: int) -> None:
                results[number] = await client.set_budget(60 + number, state=states[number], timeout_s=20)

            async with trio.open_nursery() as nursery:
                for number in range(len(states)):
                    nursery.start_soon(change, number)
                    await trio.lowlevel.checkpoint()
            assert sorted(results) == list(range(6))
            budget = await client.budget()
            assert budget.state == "active"
            assert (await stream.completed()).text == WORDS


@in_trio
async def test_parking_before_the_engine_is_back_is_hibernating() -> None:
    """Each change is answered. The next change brings the engine back, whatever the state of its start is."""
    async with launch(engine=fake_engine(delay_s=0.001)) as client:
        for pause_s in (0.0, 0.0, 0.05, 0.3):
            await client.set_budget(64, state="hibernated")
            results: list[int] = []

            async def change(
                state: m.LeaseState, n_mb: int, pause_s: float = pause_s, results: list[int] = results
            ) -> None:
                await trio.sleep(pause_s if state == "parked" else 0)
                results.append((await client.set_budget(n_mb, state=state, timeout_s=20)).vram_budget_bytes)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(change, "active", 65)
                await trio.lowlevel.checkpoint()
                nursery.start_soon(change, "parked", 66)
            assert len(results) == 2
            budget = await client.budget()
            assert (budget.state in ("parked", "hibernated"), budget.used_bytes) == (True, 0)
            assert (await client.set_budget(67, timeout_s=20)).used_bytes == 67 * MIB
            assert (await client.complete("one two").completed()).text == "one two"


@in_trio
async def test_more_is_asked_for_while_jobs_are_open() -> None:
    async with launch(engine=fake_engine(delay_s=1.0), vram_budget_mb=64) as client:
        notices = client.notices()
        async with client.complete(WORDS):
            notice = await notices.receive()
            assert (notice.kind, notice.vram_budget_bytes) == ("wants", 256 * MIB)
            budget = await client.budget()
            assert (budget.wanted_bytes, budget.used_bytes) == (256 * MIB, 64 * MIB)

        async def idle() -> bool:
            return (await client.budget()).wanted_bytes == 64 * MIB

        with trio.fail_after(60):
            while not await idle():
                await trio.sleep(0.01)


@in_trio
async def test_an_idle_sidecar_gives_back_and_takes_again() -> None:
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), vram_budget_mb=256) as client:
        notices = client.notices()
        await client.set_budget(256, floor_mb=64)
        notice = await notices.receive()
        assert (notice.kind, notice.vram_budget_bytes) == ("gives_back", 64 * MIB)
        with trio.fail_after(60):
            while (await client.budget()).used_bytes != 64 * MIB:
                await trio.sleep(0.01)
        async with client.complete("la", sampling=GREEDY):
            notice = await notices.receive()
            assert (notice.kind, notice.vram_budget_bytes) == ("gives_back", 256 * MIB)
            with trio.fail_after(60):
                while (await client.budget()).used_bytes != 256 * MIB:
                    await trio.sleep(0.01)


@in_trio
async def test_caps_and_plans() -> None:
    async with launch(n_ctx=512, n_parallel=2) as client:
        caps = await client.caps_and_requirements()
        assert (caps.floor_bytes, caps.full_bytes, caps.context, caps.mode) == (16 * MIB, 256 * MIB, 512, "planned")
        assert caps.total_bytes is None  # the device does not report it: only the host's budget counts
        rows = await client.plan([1, 64, 0], prompt_tokens=100)
        assert [(row.vram_budget_bytes, row.fits, row.ttft_s) for row in rows] == [
            (1 * MIB, False, None),
            (64 * MIB, True, 0.1),
            (0, True, 0.1),
        ]


@in_trio
async def test_the_host_budget_stays_until_it_is_changed() -> None:
    """Through changes of the VRAM budget, of other clients, through hibernation and an engine's death."""
    async with (
        launch(engine=fake_engine(host_floor_mb=16, host_full_mb=96), host_budget_mb=64) as client,
        frameshard.connect(client.info) as other,
    ):
        assert (await client.budget()).host_used_bytes == 64 * MIB
        changed = await other.set_budget(100, host_budget_mb=48)
        assert (changed.lease.host_budget_bytes, changed.host_budget_bytes) == (48 * MIB, 48 * MIB)
        assert (changed.host_used_bytes, changed.observed.host_observed_bytes) == (48 * MIB, 48 * MIB)
        assert (await client.set_budget(80)).host_budget_bytes == 48 * MIB
        with pytest.raises(errors.BudgetBelowFloor) as below:
            await client.set_budget(90, host_budget_mb=15)
        assert below.value.detail == {"host_budget_bytes": 15 * MIB, "host_floor_bytes": 16 * MIB}
        assert (await client.budget()).vram_budget_bytes == 80 * MIB
        await client.set_budget(80, state="hibernated")
        with pytest.raises(errors.BudgetBelowFloor, match="host budget"):  # without an engine
            await client.set_budget(80, host_budget_mb=15)
        hibernated = await client.set_budget(80, state="hibernated", host_budget_mb=32)
        assert hibernated.host_budget_bytes == 32 * MIB
        assert (await client.set_budget(80)).host_used_bytes == 32 * MIB
        engine = (await client.stats()).broker.engine_pid
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        with trio.fail_after(60):
            while (await client.stats()).broker.engine_pid in (engine, None):
                await trio.sleep(0.01)
        assert (await client.set_budget(70)).host_used_bytes == 32 * MIB
        assert (await client.set_budget(70, host_budget_mb=0)).host_used_bytes == 96 * MIB
        with pytest.raises(errors.BadArgument, match="host_budget_mb is a number"):
            await client.set_budget(70, host_budget_mb=-1)


@in_trio
async def test_a_launch_below_the_host_floor_is_refused() -> None:
    with pytest.raises(errors.BudgetBelowFloor, match="set host_budget_mb to 16 or more"):
        async with launch(engine=fake_engine(host_floor_mb=16), host_budget_mb=8):
            pass


# ---- decisions, with a clock of the test's own ----------------------------------------------------------------------


def host() -> ServerConnection:
    return ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)


def lease(budget_mb: int, used_mb: int, keep_mb: int = 0, host_mb: int = 0) -> Lease:
    """A lease in force, with a model whose floor is 16 MiB and which is fully resident in 256 MiB."""
    made = Lease(0, EPOCH)
    made.engine_ready(16 * MIB, 256 * MIB, 0, 0.0)
    terms = m.BudgetSet(1, EPOCH, budget_mb * MIB, floor_bytes=keep_mb * MIB, host_budget_bytes=host_mb * MIB)
    made.set(host(), terms, 0.0)
    obey(made, used_mb)
    made.notices.clear()
    return made


def obey(made: Lease, used_mb: int) -> list[int]:
    """Carries out the commands as an engine would; returns their budgets in MiB."""
    budgets_mb = []
    for command in made.commands:
        assert isinstance(command, em.SetBudget)
        budgets_mb.append(command.vram_budget_bytes // MIB)
        made.engine_event(em.BudgetGranted(command.seq, command.vram_budget_bytes, 0.0), 0.0)
        made.engine_event(released(command, used_mb), 0.0)
        made.engine_event(em.BudgetObserved(command.seq, None, 0.0), 0.0)
    made.commands.clear()
    return budgets_mb


def released(command: em.SetBudget, used_mb: int, seconds: float = 0.0) -> em.BudgetReleased:
    budgets = command.vram_budget_bytes, used_mb * MIB
    return em.BudgetReleased(command.seq, *budgets, seconds, command.host_budget_bytes)


def told(made: Lease) -> list[em.SetBudget]:
    """The commands for the engine, which it has got now."""
    commands = [command for command in made.commands if isinstance(command, em.SetBudget)]
    made.commands.clear()
    return commands


def answers(connection: ServerConnection) -> list[m.Message]:
    found = []
    while (frame := connection.next_frame()) is not None:
        connection.sent()
        found.append(m.decode_answer(frame))
    return found


def look(made: Lease, now: float, *, used_mb: int, free_mb: int) -> None:
    event = em.Watch(
        used_bytes=used_mb * MIB,
        floor_bytes=16 * MIB,
        full_bytes=256 * MIB,
        total_bytes=8192 * MIB,
        free_bytes=free_mb * MIB,
        appeared=(),
        excess_bytes=0,
    )
    made.engine_event(event, now)


def heard(made: Lease) -> list[tuple[str, int]]:
    notices = [(notice.kind, notice.vram_budget_bytes // MIB) for notice in made.notices]
    made.notices.clear()
    return notices


def test_wants_are_rate_limited() -> None:
    made = lease(64, 64)
    for now in range(25):
        made.tick(float(now), 1)
    assert heard(made) == [("wants", 256)] * 3
    assert WANTS_EVERY_S == 10
    made = lease(256, 256)
    made.tick(0.0, 1)
    assert heard(made) == []


def test_what_is_not_needed_is_given_back_and_taken_again() -> None:
    made = lease(200, 200, keep_mb=50)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S - 0.1, 0)
    assert made.commands == []
    made.tick(10.0 + IDLE_S, 0)
    assert heard(made) == []  # nothing is promised that the engine may refuse
    assert obey(made, 50) == [50]
    assert heard(made) == [("gives_back", 50)]
    made.tick(60.0, 0)
    assert made.commands == []
    assert made.describe(1, 0).vram_budget_bytes == 200 * MIB  # the lease is unchanged
    made.tick(61.0, 1)
    assert ("gives_back", 200) in heard(made)
    assert obey(made, 200) == [200]
    assert heard(made) == []


def refuse(made: Lease, error: errors.FrameshardError, now: float) -> int:
    """The engine refuses its only command. Returns the budget in MiB."""
    (command,) = told(made)
    made.engine_event(em.BudgetRefused(command.seq, m.ErrorInfo.of(error)), now)
    return command.vram_budget_bytes // MIB


def test_what_the_engine_refuses_to_give_back_is_not_promised(caplog: pytest.LogCaptureFixture) -> None:
    made = lease(200, 200, keep_mb=50)
    made.tick(10.0, 0)
    for now in (15.0, 20.0):  # again after a while
        made.tick(now, 0)
        assert refuse(made, errors.BudgetBelowFloor("host memory has no room"), now) == 50
        made.tick(now + 4.9, 0)
        assert (made.commands, heard(made)) == ([], [])
    assert [record.message for record in caplog.records] == [
        "the sidecar cannot change its use of VRAM on its own (there are no jobs): host memory has no room"
    ]
    made.tick(25.0, 0)
    assert (obey(made, 50), heard(made)) == ([50], [("gives_back", 50)])
    made.tick(26.0, 1)
    heard(made)
    assert refuse(made, errors.OutOfMemory("no"), 26.0) == 200  # so the limit is still in force
    assert made.engine_load_bytes() == 50 * MIB
    made.tick(27.0, 1)
    assert made.commands == []
    made.tick(31.0, 1)
    assert obey(made, 200) == [200]


def test_what_pressure_could_not_release_is_not_promised() -> None:
    made = lease(250, 250)
    look(made, 2.0, used_mb=250, free_mb=100)
    assert refuse(made, errors.BudgetBelowFloor("host memory has no room"), 2.0) == 94
    look(made, 3.0, used_mb=250, free_mb=100)
    assert (made.commands, heard(made), made.engine_load_bytes()) == ([], [], 250 * MIB)
    look(made, 7.0, used_mb=250, free_mb=100)
    assert refuse(made, errors.DeadlineMissed("late"), 12.0) == 94
    look(made, 12.5, used_mb=120, free_mb=230)
    assert heard(made) == []
    look(made, 13.0, used_mb=94, free_mb=256)  # the release has come after its deadline
    assert (heard(made), made.engine_load_bytes()) == ([("pressure", 94)], 94 * MIB)


def test_more_is_asked_for_at_once_where_what_was_wanted_is_out_of_date() -> None:
    made = lease(64, 64, keep_mb=20)
    made.tick(0.0, 1)
    assert heard(made) == [("wants", 256)]
    made.tick(1.0, 0)
    made.tick(1.0 + IDLE_S, 0)
    obey(made, 20)
    made.tick(6.5, 1)
    assert heard(made) == [("gives_back", 20), ("wants", 256), ("gives_back", 64)]
    obey(made, 64)
    connection = host()
    for number, state, wanted in ((1, "parked", 64), (2, "active", 256)):
        made.set(connection, m.BudgetSet(number, EPOCH, 64 * MIB, state=state), 7.0)  # type: ignore[arg-type]
        obey(made, 0)
        made.tick(7.0, 1)
        assert heard(made) == [("state", 64), ("wants", wanted)]


def test_nothing_is_given_back_that_was_not_agreed() -> None:
    made = lease(200, 200)
    for now in range(60):
        made.tick(float(now), 0)
    assert made.commands == []


def test_a_machine_short_of_memory_is_told() -> None:
    made = lease(200, 200)
    for limit in (500 * MIB, 0):
        made.engine_event(em.HostPressure(limit, "300 MiB of the machine's memory are available"), 1.0)
    assert [(notice.kind, notice.host_budget_bytes) for notice in made.notices] == [
        ("host_pressure", 500 * MIB),
        ("host_pressure", 0),
    ]


def test_pressure_shrinks_until_enough_is_free() -> None:
    assert (LOW_BYTES // MIB, ENOUGH_BYTES // MIB) == (128, 256)
    made = lease(250, 250)
    look(made, 1.0, used_mb=250, free_mb=128)
    assert made.commands == []
    look(made, 2.0, used_mb=250, free_mb=100)
    assert heard(made) == []
    assert obey(made, 94) == [94]
    assert heard(made) == [("pressure", 94)]
    look(made, 2.5, used_mb=94, free_mb=256)
    look(made, 4.0, used_mb=94, free_mb=20)
    assert obey(made, 16) == [16]  # not below the floor
    heard(made)
    look(made, 6.0, used_mb=16, free_mb=20)
    assert (made.commands, heard(made)) == ([], [])
    # The host's next change counts.
    connection = ServerConnection(2, epoch=EPOCH, held_bytes=0, now=0.0)
    made.set(connection, m.BudgetSet(1, EPOCH, 128 * MIB), 7.0)
    assert obey(made, 128) == [128]
    assert made.engine_load_bytes() == 128 * MIB


def test_a_host_budget_in_force_is_not_refused_when_the_floor_has_grown() -> None:
    made = Lease(64 * MIB, EPOCH, host_budget_bytes=48 * MIB)
    made.engine_ready(16 * MIB, 256 * MIB, 0, 0.0)
    made.engine_event(em.Watch(0, 16 * MIB, 256 * MIB, None, None, (), 0, host_floor_bytes=49 * MIB), 0.0)
    connection = ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)
    asked = m.BudgetSet(1, EPOCH, 64 * MIB, state="parked")
    with pytest.raises(errors.BudgetBelowFloor, match="set host_budget_mb to 49 or more"):
        made.set(connection, replace(asked, host_budget_bytes=47 * MIB), 0.0)
    for number, host_budget_bytes in ((2, None), (3, 48 * MIB)):
        made.set(connection, replace(asked, id=number, host_budget_bytes=host_budget_bytes), 0.0)
    assert [command.host_budget_bytes for command in made.commands] == [48 * MIB] * 2


def test_what_a_sidecar_does_on_its_own_keeps_its_floor_and_its_host_budget() -> None:
    made = lease(200, 200, keep_mb=5, host_mb=48)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S, 0)
    (idle,) = told(made)
    assert (idle.vram_budget_bytes, idle.host_budget_bytes) == (16 * MIB, 48 * MIB)
    made.engine_event(released(idle, 16), 20.0)
    made.tick(30.0, 1)
    (again,) = told(made)
    assert (again.vram_budget_bytes, again.host_budget_bytes) == (200 * MIB, 48 * MIB)
    # At the floor there is nothing to give back.
    made = lease(200, 16, keep_mb=5)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S, 0)
    assert (made.commands, heard(made)) == ([], [])


def test_pressure_is_not_answered_again_before_the_engine_had_time() -> None:
    made = lease(250, 250)
    for now, n_commands in ((2.0, 1), (2.9, 0), (3.1, 1)):
        look(made, now, used_mb=250, free_mb=100)
        assert len(told(made)) == n_commands, now


def test_pressure_does_not_wait_for_the_drivers_count() -> None:
    made = lease(250, 250)
    made.set(host(), m.BudgetSet(1, EPOCH, 240 * MIB), 1.0)
    (command,) = told(made)
    made.engine_event(em.BudgetGranted(command.seq, 240 * MIB, 0.0), 1.0)
    look(made, 2.0, used_mb=240, free_mb=100)
    assert made.commands == []  # the host's change comes first
    made.engine_event(released(command, 240), 2.0)
    look(made, 3.0, used_mb=240, free_mb=100)
    assert len(told(made)) == 1


@pytest.mark.parametrize("why", ["idle", "pressure"])
def test_the_budget_is_what_the_host_has_set_when_a_smaller_engine_starts_again(why: str) -> None:
    made = lease(200, 200, keep_mb=50)
    if why == "pressure":
        look(made, 1.0, used_mb=200, free_mb=100)
    else:
        made.tick(10.0, 0)
        made.tick(10.0 + IDLE_S, 0)
    (less,) = told(made)
    made.engine_event(released(less, less.vram_budget_bytes // MIB), 20.0)
    made.engine_lost(21.0)
    assert made.engine_load_bytes() == less.vram_budget_bytes
    made.engine_ready(16 * MIB, 256 * MIB, less.vram_budget_bytes, 22.0)
    assert made.describe(1, 0).vram_budget_bytes == 200 * MIB


def test_an_engine_loads_with_what_was_asked_for_last_if_it_can_run_in_that() -> None:
    made = lease(200, 200, host_mb=48)
    made.engine_event(em.Watch(0, 16 * MIB, 256 * MIB, None, None, (), 0, host_floor_bytes=32 * MIB), 0.0)
    made.engine_lost(1.0)
    for number, n_mb, host_mb, loaded in ((1, 100, 40, (100, 40)), (2, 5, 20, (200, 48)), (3, 0, 0, (0, 0))):
        terms = m.BudgetSet(number, EPOCH, n_mb * MIB, host_budget_bytes=host_mb * MIB)
        made.set(host(), terms, 2.0)
        assert (made.engine_load_bytes(), made.engine_load_host_bytes()) == (loaded[0] * MIB, loaded[1] * MIB)
    made.set(host(), m.BudgetSet(4, EPOCH, 64 * MIB), 3.0)  # the host budget stays that of the last change
    assert (made.engine_load_bytes(), made.engine_load_host_bytes()) == (64 * MIB, 0)


def test_a_budget_of_the_frame_block_is_in_force() -> None:
    made = lease(200, 200, keep_mb=50)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S, 0)
    (idle,) = told(made)
    made.engine_event(released(idle, 50), 20.0)
    made.engine_event(em.BudgetReleased(0, 120 * MIB, 120 * MIB, 0.0), 21.0)
    budget = made.describe(1, 0)
    assert (budget.vram_budget_bytes, budget.used_bytes) == (120 * MIB, 120 * MIB)
    made.tick(22.0, 1)
    assert made.commands == []  # there is nothing to take again


def test_an_own_change_names_the_budget_of_the_frame_block_that_it_replaces() -> None:
    made = lease(200, 200, keep_mb=50)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S, 0)
    (idle,) = told(made)
    assert idle.known_generation == 0
    made.engine_event(em.BudgetReleased(idle.seq, 200 * MIB, 200 * MIB, 0.0), 16.0)
    assert heard(made) == []  # a budget in the frame block came before it: it holds more
    made.engine_event(em.BudgetReleased(0, 200 * MIB, 200 * MIB, 0.0, generation=7), 16.0)
    made.tick(17.0, 1)
    assert told(made) == []  # the frame block's budget has replaced the limit
    made.tick(18.0, 0)
    made.tick(18.0 + IDLE_S, 0)
    (idle,) = told(made)
    assert (idle.vram_budget_bytes, idle.known_generation) == (50 * MIB, 7)
    made.set(host(), m.BudgetSet(1, EPOCH, 100 * MIB), 24.0)
    assert [command.known_generation for command in told(made)] == [None]


def test_a_late_change_stays_in_force_with_all_its_terms() -> None:
    made, connection = lease(200, 200), host()
    terms = m.BudgetSet(1, EPOCH, 100 * MIB, floor_bytes=50 * MIB, host_budget_bytes=48 * MIB)
    made.set(connection, terms, 1.0)
    (command,) = told(made)
    made.engine_event(em.BudgetGranted(command.seq, 100 * MIB, 0.0), 1.0)
    late = m.ErrorInfo.of(errors.DeadlineMissed("late"))
    made.engine_event(em.BudgetRefused(command.seq, late), 2.0)
    budget = made.describe(1, 0)
    assert (budget.vram_budget_bytes, budget.host_budget_bytes) == (100 * MIB, 48 * MIB)
    made.tick(10.0, 0)
    made.tick(10.0 + IDLE_S, 0)
    assert obey(made, 50) == [50]
    assert heard(made)[-1] == ("gives_back", 50)


def test_a_refused_change_leaves_the_version_of_a_later_one() -> None:
    made, connection = lease(200, 200), host()
    made.set(connection, m.BudgetSet(1, EPOCH, 5 * MIB, version=3), 1.0)
    made.set(connection, m.BudgetSet(2, EPOCH, 100 * MIB, version=4), 1.0)
    first, _ = told(made)
    made.engine_event(em.BudgetRefused(first.seq, m.ErrorInfo.of(errors.below_floor(5 * MIB, 16 * MIB))), 1.0)
    assert made.version == 4


def test_the_version_of_a_refused_change_is_free_again_while_a_later_change_waits() -> None:
    made, connection = lease(200, 200), host()
    made.set(connection, m.BudgetSet(1, EPOCH, 5 * MIB, version=7), 1.0)
    made.set(connection, m.BudgetSet(2, EPOCH, 100 * MIB), 1.0)
    first, _ = made.commands
    assert isinstance(first, em.SetBudget)
    made.engine_event(em.BudgetRefused(first.seq, m.ErrorInfo.of(errors.below_floor(5 * MIB, 16 * MIB))), 1.0)
    made.set(connection, m.BudgetSet(3, EPOCH, 50 * MIB, version=7), 1.0)
    assert made.version == 7


def test_what_was_released_stays_in_force_when_no_engine_comes_back() -> None:
    """The host has read that the memory is free, or that it may be used again."""
    made, connection = lease(200, 200), host()
    made.set(connection, m.BudgetSet(1, EPOCH, 100 * MIB, state="parked", version=3), 1.0)
    obey(made, 0)
    made.set(connection, m.BudgetSet(2, EPOCH, 120 * MIB, version=4), 2.0)
    made.set(connection, m.BudgetSet(3, EPOCH, 64 * MIB, version=5), 2.0)
    unpark, _ = told(made)
    made.engine_event(em.BudgetGranted(unpark.seq, 120 * MIB, 0.0), 2.0)
    made.engine_event(released(unpark, 120), 2.0)
    answers(connection)
    made.engine_lost(3.0)
    made.fail_all(errors.EngineDied("the engine is off"))
    assert [type(answer) for answer in answers(connection)] == [m.Observed, m.Error]
    assert (made.state, made.version, made.budget_bytes) == ("active", 4, 120 * MIB)


def test_a_budget_over_which_the_engine_dies_does_not_come_into_force() -> None:
    """The next engine is loaded with it, and dies over the change as well."""
    made, connection = lease(100, 100), host()
    made.set(connection, m.BudgetSet(1, EPOCH, 200 * MIB, version=9), 1.0)
    made.engine_lost(1.0)
    made.engine_ready(16 * MIB, 256 * MIB, made.engine_load_bytes(), 2.0)
    assert [command.vram_budget_bytes for command in told(made)] == [200 * MIB]
    assert made.budget_bytes == 100 * MIB
    made.engine_lost(3.0)
    made.fail_all(errors.EngineDied("the engine is off"))
    assert (made.budget_bytes, made.version, made.engine_load_bytes(), told(made)) == (100 * MIB, 0, 100 * MIB, [])


def test_an_engine_that_was_loaded_for_a_refused_change_gets_the_budgets_in_force() -> None:
    made, connection = lease(100, 100, host_mb=48), host()
    made.set(connection, m.BudgetSet(1, EPOCH, 150 * MIB), 1.0)
    made.set(connection, m.BudgetSet(2, EPOCH, 200 * MIB, host_budget_bytes=32 * MIB), 1.0)
    made.engine_lost(1.0)
    assert (made.engine_load_bytes(), made.engine_load_host_bytes()) == (200 * MIB, 32 * MIB)
    made.engine_ready(16 * MIB, 256 * MIB, 200 * MIB, 2.0)
    no_room = m.ErrorInfo.of(errors.BudgetBelowFloor("there is no room for the KV blocks"))
    first, second = told(made)
    made.engine_event(em.BudgetRefused(first.seq, no_room), 2.0)
    assert told(made) == []
    made.engine_event(em.BudgetRefused(second.seq, no_room), 2.0)
    (again,) = told(made)
    assert (again.vram_budget_bytes, again.host_budget_bytes) == (100 * MIB, 48 * MIB)
    made.engine_event(released(again, 100), 2.0)
    assert (made.budget_bytes, made.host.budget_bytes, told(made)) == (100 * MIB, 48 * MIB, [])


def test_a_client_that_is_gone_is_forgotten() -> None:
    made, connection = lease(200, 200), host()
    made.set(connection, m.BudgetSet(2, EPOCH, 100 * MIB), 1.0)
    with pytest.raises(errors.StaleLease):
        made.set(connection, m.BudgetSet(1, EPOCH, 100 * MIB), 1.0)
    made.drop(connection)
    made.set(connection, m.BudgetSet(1, EPOCH, 100 * MIB), 1.0)


def test_refused_changes_leave_the_lease_as_it_was_before_all_of_them() -> None:
    made, connection = lease(200, 200), host()
    for number, state in enumerate(("parked", "active", "parked"), start=1):
        made.set(connection, m.BudgetSet(number, EPOCH, 100 * MIB, state=state, version=number), 1.0)
    for command in told(made):
        made.engine_event(em.BudgetRefused(command.seq, m.ErrorInfo.of(errors.EngineDied("no"))), 1.0)
    assert (made.state, made.version) == ("active", 0)


def test_times_count_from_the_hosts_request() -> None:
    """A change that has waited for an engine, and one that is granted after its deadline."""
    made, connection = lease(200, 200), host()
    made.engine_lost(1.0)
    made.set(connection, m.BudgetSet(1, EPOCH, 100 * MIB, timeout_s=2.0), 1.0)
    told(made)  # nobody gets it
    made.engine_ready(16 * MIB, 256 * MIB, 100 * MIB, 4.0)
    (command,) = told(made)
    made.engine_event(em.BudgetGranted(command.seq, 100 * MIB, 2.5), 4.0)
    made.engine_event(released(command, 100, 0.5), 4.5)
    made.engine_event(em.BudgetObserved(command.seq, None, 0.75), 4.75)
    granted, second, third = answers(connection)
    assert isinstance(granted, m.Lease)
    assert isinstance(second, m.Released)
    assert isinstance(third, m.Observed)
    assert (granted.decision, granted.seconds, second.seconds, third.seconds) == ("partial", 2.5, 3.5, 3.75)
    assert ("late", 100) in heard(made)


def test_the_last_figures_of_an_ending_engine_do_not_count() -> None:
    made = lease(200, 200)
    made.set(host(), m.BudgetSet(1, EPOCH, 200 * MIB, state="hibernated"), 1.0)
    look(made, 1.0, used_mb=130, free_mb=20)
    made.engine_hibernated(2.0)
    look(made, 2.0, used_mb=130, free_mb=20)
    assert (made.commands, made.describe(1, 0).used_bytes) == ([], 0)


def test_a_budget_below_the_floor_is_refused_before_an_engine_is_loaded_for_it() -> None:
    made = lease(200, 200)
    made.set(host(), m.BudgetSet(1, EPOCH, 200 * MIB, state="hibernated"), 1.0)
    made.engine_hibernated(2.0)
    with pytest.raises(errors.BudgetBelowFloor):
        made.set(host(), m.BudgetSet(2, EPOCH, 5 * MIB), 3.0)
    assert made.state == "hibernated"
