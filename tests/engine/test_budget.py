"""Budgets that shrink and grow during an answer, on the emulated device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

from frameshard.broker.frameblock import FrameBlockMemory
from frameshard.engine import budgets
from frameshard.engine.budgets import Budgets
from frameshard.errors import DeadlineMissed, OutOfMemory
from frameshard.wire import engine as em
from servers import until
from sidecars import DEADLINE_S

CASTLE = user("Who lives in the old castle?")
LONG = "The wind blew over the hills and the old road was empty. "
MIB = 1 << 20


@pytest.fixture(scope="module")
def streamer(shallow_model: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model, device="emulated", mode="stream_only", n_ctx=2048, n_parallel=2) as child:
        yield child


@pytest.fixture
def full(streamer: EngineProcess) -> EngineProcess:
    """The engine without a limit, with all weights resident."""
    settle(streamer, 0)
    return streamer


@pytest.fixture(scope="module")
def slow_streamer(deep_model: Path) -> Iterator[EngineProcess]:
    """An engine that reads some 50 tokens of a prompt per second while weights are streamed."""
    fields: dict[str, object] = {"device": "emulated:0.1", "mode": "stream_only", "n_ctx": 2048, "n_ubatch": 8}
    with engine(deep_model, **fields, n_parallel=1) as child:
        yield child


def settle(child: EngineProcess, n_bytes: int) -> Event:
    """Sets the budget of an idle engine. For no limit (0) it also waits until all weights are resident."""
    child.budget(n_bytes)
    child.wait_for("released")
    child.wait_for("observed")
    deadline = time.monotonic() + 60
    while (stats := child.stats())["streamed_shards"] and not n_bytes:
        assert time.monotonic() < deadline
        child.send(op="ping", seq=0)  # answered by the main thread: it has taken a turn since
        child.wait_for("pong")
    assert stats["budget_bytes"] == n_bytes
    return stats


def test_ready_names_floor_and_full(shallow_model: Path) -> None:
    child = EngineProcess()
    try:
        ready = child.load(shallow_model, device="emulated", n_ctx=512, n_parallel=1, n_threads=1)
        info = ready["model"]
        assert 0 < info["floor_bytes"] < info["full_bytes"]
        assert ready["vram_budget_bytes"] == 0
        assert info["plan"]["ring_bytes"] == 0
        stats = child.stats()
        assert stats["used_bytes"] <= info["full_bytes"]
        assert stats["resident_shards"] > 0
        assert stats["streamed_shards"] == stats["cpu_shards"] == 0
    finally:
        child.close()


def test_loads_at_the_floor_and_not_below(shallow_model: Path) -> None:
    fields: dict[str, object] = {"device": "emulated", "n_ctx": 512, "n_parallel": 1, "n_threads": 1}
    child = EngineProcess()
    try:
        event = child.load(shallow_model, **fields, vram_budget_bytes=4 * MIB)
        assert event["ev"] == "fatal"
        assert event["error"]["name"] == "budget_below_floor"
        floor = event["error"]["detail"]["floor_bytes"]
        assert floor > 4 * MIB
    finally:
        child.close()
    with engine(shallow_model, **fields, vram_budget_bytes=floor) as child:
        assert text(child.run(CASTLE))
        stats = child.stats()
        assert stats["peak_bytes"] <= stats["budget_bytes"] == floor


def test_unknown_device(shallow_model: Path) -> None:
    child = EngineProcess()
    try:
        event = child.load(shallow_model, device="CUDA77")
        assert event["error"]["name"] == "unknown_device"
        assert "emulated" in event["error"]["detail"]["devices"]
        assert event["error"]["message"].startswith("no device named 'CUDA77'")
        assert child.process.wait(DEADLINE_S) == 3
    finally:
        child.close()


def test_same_text_while_vram_goes_and_comes(full: EngineProcess) -> None:
    params = {"max_tokens": 120}
    alone = full.run(CASTLE, params=params)
    floor, everything = full.stats()["floor_bytes"], full.stats()["full_bytes"]
    budgets = {5: floor, 20: (floor + everything) // 2, 30: floor + MIB, 40: 0}
    job = full.submit(CASTLE, params=params)
    events: list[Event] = []
    released: list[Event] = []
    while not events or events[-1]["ev"] != "done" or len(released) < len(budgets):
        event = full.next_event()
        if event["ev"] == "released":
            released.append(event)
        elif event.get("job") == job:
            events.append(event)
            if event["ev"] == "token" and event["n"] in budgets:
                full.budget(budgets[event["n"]])
    assert ids(events) == ids(alone)
    assert text(events) == text(alone)
    assert [event["vram_budget_bytes"] for event in released] == list(budgets.values())
    for event in released:
        assert event["used_bytes"] <= (event["vram_budget_bytes"] or everything)


def in_a_prompt(child: EngineProcess) -> tuple[list[int], int, int]:
    """Begins a job 4 MiB above the floor. Returns its tokens when nothing disturbs it, the floor and its number."""
    prompt, params = LONG * 6, {"max_tokens": 8}
    settle(child, 0)
    alone = ids(child.run(prompt, params=params))
    floor = child.stats()["floor_bytes"]
    settle(child, floor + 4 * MIB)
    job = child.submit(prompt, params=params)
    child.wait_for("started", job=job)
    return alone, floor, job


def end_quickly(child: EngineProcess, job: int) -> list[Event]:
    """Ends the job without a limit, where no weights are streamed. Returns its events."""
    child.budget(0)
    events, _ = child.until(job, "released")
    return events


def test_shrinks_in_the_middle_of_a_prompt(slow_streamer: EngineProcess) -> None:
    child = slow_streamer
    alone, floor, job = in_a_prompt(child)
    seq = child.budget(floor)
    event = child.wait_for("released", "token")
    assert (event["ev"], event["seq"]) == ("released", seq)
    assert event["used_bytes"] <= floor
    assert ids(end_quickly(child, job)) == alone


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is counted on Linux")
def test_a_late_host_budget_does_not_stop_the_change_of_vram(slow_streamer: EngineProcess) -> None:
    """Host memory is released after the graph, VRAM in the middle of it."""
    child = slow_streamer
    vram = child.stats()["floor_bytes"]
    settle(child, vram + 4 * MIB)
    child.budget(vram + 4 * MIB, host_bytes=1)
    child.wait_for("refused")  # host memory is measured anew
    host = child.stats()["host"]["floor_bytes"]
    job = child.submit(LONG * 6, params={"max_tokens": 8})
    child.wait_for("started", job=job)
    child.budget(vram, timeout_s=0.0, host_bytes=host)
    child.wait_for("refused", "released")
    assert (child.stats()["budget_bytes"], child.stats()["host"]["budget_bytes"]) == (vram, host)
    until(lambda: child.stats()["used_bytes"] <= vram)
    assert end_quickly(child, job)[-1]["ev"] == "done"


@pytest.mark.parametrize("back_at_once", [False, True])
def test_a_late_park_comes_after_the_decode(slow_streamer: EngineProcess, *, back_at_once: bool) -> None:
    """A change that follows waits for it. The text stays as it is."""
    child = slow_streamer
    alone, floor, job = in_a_prompt(child)
    with child.at_once():
        child.budget(floor + 2 * MIB, timeout_s=0.0, parked=True)
        if back_at_once:
            child.budget(floor + 3 * MIB, timeout_s=60.0)
    answer = child.wait_for("refused", "released")
    if not back_at_once:
        assert answer["ev"] == "released" or answer["error"]["name"] == "deadline_missed"
        until(lambda: child.stats()["used_bytes"] == 0)
        until(lambda: child.stats()["budget_bytes"] == floor + 2 * MIB)
        child.budget(floor + 3 * MIB, timeout_s=60.0)
    assert child.wait_for("refused", "released")["ev"] == "released"
    stats = child.stats()
    assert 0 < stats["used_bytes"] <= stats["budget_bytes"] == floor + 3 * MIB
    assert ids(end_quickly(child, job)) == alone


def test_below_the_floor_is_refused_and_nothing_changes(full: EngineProcess) -> None:
    with full.slowly():
        job = full.submit(CASTLE, params={"max_tokens": 40})
        full.wait_for("token", job=job)
        floor = full.stats()["floor_bytes"]
        seq = full.budget(floor - 1)
        event = full.wait_for("released", "refused")
        assert (event["ev"], event["seq"]) == ("refused", seq)
        assert event["error"]["name"] == "budget_below_floor"
        assert event["error"]["detail"] == {"budget_bytes": floor - 1, "floor_bytes": floor}
        assert full.stats()["budget_bytes"] == 0
    assert full.finish(job)[job][-1]["ev"] == "done"


@pytest.mark.parametrize(
    "fields",
    [{"vram_budget_bytes": -1}, {"vram_budget_bytes": "all"}, {}, {"vram_budget_bytes": MIB, "timeout_s": "long"}],
)
def test_bad_budgets(full: EngineProcess, fields: dict[str, object]) -> None:
    full.send(op="budget", seq=3, **fields)
    event = full.wait_for("released", "refused")
    assert (event["ev"], event["seq"]) == ("refused", 3)
    assert event["error"]["name"] == "bad_argument"


def test_grows_again_while_idle_and_while_it_speaks(full: EngineProcess) -> None:
    everything, floor = full.stats()["full_bytes"], full.stats()["floor_bytes"]
    small = settle(full, floor)
    assert small["used_bytes"] <= floor
    large = settle(full, 0)
    assert large["streamed_shards"] == large["cpu_shards"] == 0
    assert large["used_bytes"] <= everything
    settle(full, floor)
    job = full.submit(CASTLE, params={"max_tokens": 1500})
    full.wait_for("token", job=job)
    full.budget(0)
    while True:
        event = full.wait_for("token", "done", job=job)
        assert event["ev"] == "token", "the answer ended before all weights were resident again"
        if event["n"] % 10 == 0 and full.stats()["streamed_shards"] == 0:
            break
    full.send(op="cancel", job=job)
    assert full.finish(job)[job][-1]["ev"] == "cancelled"


def test_cancel_in_a_long_prompt(slow_streamer: EngineProcess) -> None:
    child, params = slow_streamer, {"max_tokens": 8}
    settle(child, 0)
    alone = ids(child.run(CASTLE, params=params))
    settle(child, child.stats()["floor_bytes"] + 4 * MIB)
    before = child.stats()["prompt_tokens"]
    job = child.submit(LONG * 25, conversation="long", params=params)
    n_prompt = child.wait_for("started", job=job)["n_prompt"]
    child.send(op="ping", seq=9)
    assert child.wait_for("pong", "token")["ev"] == "pong"
    child.send(op="cancel", job=job)
    assert child.wait_for("cancelled", "done", job=job)["ev"] == "cancelled"
    assert child.stats()["prompt_tokens"] - before < n_prompt / 4
    child.budget(0)
    assert ids(child.run(CASTLE, conversation="long", params=params)) == alone


def test_planned_mode_keeps_its_budget(model_path: Path) -> None:
    with engine(model_path, device="emulated:4", n_ctx=512, n_parallel=2, vram_budget_bytes=100 * MIB) as child:
        jobs = [child.submit(CASTLE, params={"max_tokens": 30}) for _ in range(3)]
        child.wait_for("token", job=jobs[0])
        child.budget(80 * MIB)
        until(lambda: child.stats()["budget_bytes"] == 80 * MIB)
        child.finish(*jobs)
        stats = child.stats()
        assert stats["budget_bytes"] == 80 * MIB
        assert stats["used_bytes"] <= 80 * MIB
        assert stats["peak_bytes"] <= 100 * MIB
        assert stats["cpu_bytes"] + stats["streamed_bytes"] > 0


OVERHEAD = """
import sys

from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor
from frameshard.frame import FrameBlock
from frameshard.wire.engine import EngineConfig

MIB = 1 << 20
model, path = sys.argv[1:]
config = EngineConfig(model, device="emulated", n_ctx=512, n_parallel=1, vram_budget_bytes=256 * MIB)
with Runtime.load(config, measure=False) as runtime, FrameBlock(path) as frames:
    device = runtime.device
    device.open_frame_block(path)
    budget_bytes = device.stats().floor_bytes + MIB
    frames.set_budget(budget_bytes)
    device.poll_frame_block()
    try:
        device.set_overhead(64 * MIB)
    except BudgetBelowFloor as error:
        assert error.detail["budget_bytes"] == budget_bytes < error.detail["floor_bytes"]
    else:
        raise SystemExit("there is no such room")
"""


def test_an_overhead_without_room_names_the_budget_in_force(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """That budget came in the frame block. In a process of its own, because there is one device per process."""
    path = FrameBlockMemory(tmp_path).path()
    command = [sys.executable, "-c", OVERHEAD, str(tiny_model("llama")), path]
    subprocess.run(command, check=True, timeout=DEADLINE_S)


class _Device:
    """Stands for the shard device of a parked engine, whose VRAM another program has meanwhile."""

    def stats(self) -> Any:
        return SimpleNamespace(used_bytes=0, floor_bytes=10)

    def set_budget(self, vram_bytes: int, *, known_generation: int | None) -> None:
        pass


class _Host:
    """Stands for the host memory. A lower budget takes effect later."""

    observed_bytes = None

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def check(self, budget_bytes: int) -> None:
        pass

    def check_move(self, budget_bytes: int, vram_bytes: int, *, parked: bool) -> None:
        pass

    def set_budget(self, budget_bytes: int, timeout_s: float) -> None:
        lower = budget_bytes < self.budget_bytes
        self.budget_bytes = budget_bytes
        if lower:
            raise DeadlineMissed("not yet")

    def follow_vram(self) -> None:
        pass

    def parts(self) -> Any:
        return SimpleNamespace(used_bytes=0)


def test_vram_that_could_not_be_taken_in_time_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host was told that the change stays in force. Other programs hold the VRAM for a while."""
    monkeypatch.setattr(budgets, "RETRY_EVERY_S", 0.01)
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=sent.append, send_made=lambda make: sent.append(make()))
    attempts: list[int] = []
    main: list[Any] = []

    def unpark() -> None:
        attempts.append(len(attempts))
        if len(attempts) < 4:
            raise OutOfMemory("other programs hold it")

    runtime: Any = SimpleNamespace(
        device=_Device(),
        floor_lock=threading.Lock(),
        placement=None,
        unpark=unpark,
        observer=None,
        vram_budget_bytes=50,
    )
    served = Budgets(link, lambda change: change() if main else main.append(change), lambda: None)
    served.parked = True
    host: Any = _Host(0)
    threading.Thread(target=served.serve, args=(runtime, host), daemon=True).start()
    served.ask(em.SetBudget(1, 50, 0.01))
    until(lambda: bool(sent) and isinstance(sent[-1], em.BudgetRefused))
    assert (sent[-1].error.name, sent[-1].error.message) == (
        "deadline_missed",
        "VRAM is not taken again yet; it stays in force",
    )
    time.sleep(0.05)
    assert attempts == []  # the first one has not failed yet
    main[0]()
    served.ask(em.SetBudget(2, 50, 60.0))  # a change that is refused at once does not end the attempts
    until(lambda: not served.parked)
    assert len(attempts) == 4
    time.sleep(0.05)
    assert len(attempts) == 4


@pytest.mark.parametrize("ends", ["parked", "active"])
def test_a_late_park_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """The host was told that the change stays in force, so the engine keeps only the floor of its VRAM. It tries until
    it is parked, or until another change is in force, late or not."""
    monkeypatch.setattr(budgets, "RETRY_EVERY_S", 0.01)
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=sent.append, send_made=lambda make: sent.append(make()))
    main: list[Any] = []
    attempts: list[int] = []
    may_park = threading.Event()

    class Device(_Device):
        def set_budget(self, vram_bytes: int, *_: object, known_generation: int | None = None) -> None:
            runtime.vram_budget_bytes = vram_bytes
            if vram_bytes == 30:
                raise DeadlineMissed("not all is released yet")

        def park(self) -> None:
            attempts.append(len(attempts))
            if not may_park.is_set():
                raise OutOfMemory("host memory has no room for the KV cache")

    runtime: Any = SimpleNamespace(
        device=Device(), floor_lock=threading.Lock(), placement=None, observer=None, vram_budget_bytes=50
    )
    served = Budgets(link, lambda change: change() if main else main.append(change), lambda: None)
    host: Any = _Host(0)
    threading.Thread(target=served.serve, args=(runtime, host), daemon=True).start()
    served.ask(em.SetBudget(1, 40, 0.01, parked=True))
    until(lambda: bool(sent) and isinstance(sent[-1], em.BudgetRefused))
    assert sent[-1].error.message == "a decode is still running; it stays in force"
    main[0]()  # the decode has ended, and the engine cannot be parked
    until(lambda: len(attempts) > 3)
    assert (served.parked, runtime.vram_budget_bytes) == (False, 10)
    if ends == "parked":
        may_park.set()
        until(lambda: served.parked and runtime.vram_budget_bytes == 40)
    else:
        served.ask(em.SetBudget(2, 30, 0.01))
        until(lambda: isinstance(sent[-1], em.BudgetRefused) and sent[-1].seq == 2)
    n_attempts = len(attempts)
    time.sleep(0.05)
    assert len(attempts) == n_attempts


def test_a_change_that_is_refused_changes_neither_budget() -> None:
    """The host budget grows first, and the engine cannot be unparked then."""
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=sent.append)
    host: Any = _Host(100)

    def unpark() -> None:
        raise OutOfMemory("the device could not be opened again")

    runtime: Any = SimpleNamespace(
        device=_Device(), floor_lock=threading.Lock(), placement=None, vram_budget_bytes=100, unpark=unpark
    )
    budgets = Budgets(link, lambda change: change(), lambda: None)
    budgets.parked = True
    budgets._host = host
    budgets._carry_out(runtime, em.SetBudget(1, 50, 1.0, parked=False, host_budget_bytes=200))
    assert isinstance(sent[-1], em.BudgetRefused)
    assert sent[-1].error.name == "out_of_memory"
    assert host.budget_bytes == 100


def test_a_refused_park_leaves_the_engine_as_it_was() -> None:
    """The VRAM budget is lowered before the engine parks. After the refusal the one of before is in force again."""
    sent: list[Any] = []
    plans: list[bool] = []
    link: Any = SimpleNamespace(send=sent.append)
    host: Any = _Host(100)
    in_force = [50]

    class Device(_Device):
        def set_budget(self, vram_bytes: int, timeout_s: float = 5.0) -> None:
            in_force.append(vram_bytes)

        def park(self) -> None:
            assert in_force[-1] == self.stats().floor_bytes
            raise OutOfMemory("host memory has no room for the KV cache")

    runtime: Any = SimpleNamespace(device=Device(), floor_lock=threading.Lock(), placement=None, vram_budget_bytes=50)
    budgets = Budgets(link, lambda change: change(), lambda: plans.append(budgets.parked))
    budgets._host = host
    budgets._carry_out(runtime, em.SetBudget(1, 40, 1.0, parked=True, host_budget_bytes=200))
    assert isinstance(sent[-1], em.BudgetRefused)
    assert sent[-1].error.name == "out_of_memory"
    assert (in_force[-1], host.budget_bytes) == (50, 100)
    assert plans == [False]


class StandIn:
    """Stands in for the runtime, its device and the counter of the driver, which never counts that less is used."""

    vram_budget_bytes = 0

    def __init__(self, *, late: bool) -> None:
        self.device, self.placement, self.observer = self, None, self if late else None
        self.floor_lock = threading.Lock()
        self.counted, self.was_read = threading.Event(), threading.Event()

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(floor_bytes=0, used_bytes=0)

    def set_budget(self, n_bytes: int, timeout_s: float, known_generation: int | None) -> None:
        pass

    def used(self) -> int:
        self.counted.set()
        return 1 << 40

    def poll_frame_block(self) -> None:
        self.was_read.set()
        raise SystemExit  # ends the budget thread


@pytest.mark.parametrize("late", [False, True], ids=["idle", "the driver counts late"])
def test_a_frame_block_is_read_from_when_it_is_opened(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "OBSERVE_EVERY_S", 3600.0)
    link: Any = SimpleNamespace(send=lambda event: None, send_made=lambda make: make())
    host: Any = SimpleNamespace(
        budget_bytes=0,
        observed_bytes=None,
        check=lambda n_bytes: None,
        check_move=lambda n_bytes, vram_bytes, *, parked: None,
        follow_vram=lambda: None,
        set_budget=lambda n_bytes, timeout_s: None,
        parts=lambda: SimpleNamespace(used_bytes=0),
    )
    runtime: Any = StandIn(late=late)
    served = budgets.Budgets(link, lambda change: None, lambda: None)

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            served.serve(runtime, host)

    threading.Thread(target=serve, daemon=True).start()
    if late:
        served.ask(em.SetBudget(1, 1 << 20, timeout_s=3600.0))
        assert runtime.counted.wait(60)
    time.sleep(0.1)  # the thread waits by now
    served.follow_frame_block()
    assert runtime.was_read.wait(60)
