"""The client for frame loops."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import frameshard
import frameshard.sync
from frameshard import ChatMessage, Engine, Notice, Sampling, errors
from frameshard.sync import (
    MAX_EVENTS,
    BudgetArrived,
    BudgetGranted,
    BudgetObserved,
    BudgetRefused,
    BudgetReleased,
    Closed,
    Event,
    Failed,
    Finished,
    FrameBlockArrived,
    HistoryArrived,
    Job,
    KvArrived,
    Loaded,
    PacingArrived,
    Ready,
    Saved,
    Sidecar,
    StatsArrived,
    TextAdded,
    ThoughtAdded,
    TokenCountArrived,
)
from frameshard.testing import fake_engine
from frameshard.wire.messages import FEATURES
from servers import until
from sidecars import GREEDY, WORDS, freeze, thaw

T = TypeVar("T")


def price(item: str) -> str:
    return f"2 gold for {item}"


def start(**options: object) -> Sidecar:
    return Sidecar.launch("no model", **{"engine": fake_engine(), **options})


def play(
    sidecar: Sidecar, done: Callable[[], object], timeout_s: float = 120.0, events: list[Event] | None = None
) -> list[Event]:
    """Polls once a frame until `done` is true; returns all events. They are appended to `events` as they come."""
    events = [] if events is None else events
    pause = threading.Event()
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, events
        events += sidecar.poll()
        pause.wait(0.002)
    return events


def of(events: list[Event], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def test_a_game_that_asks() -> None:
    with start(engine=fake_engine(delay_s=0.001)) as sidecar:
        job = sidecar.ask("one two three", conversation="inn", timeline=4)
        assert (job.text, job.ended) == ("", False)
        events = play(sidecar, lambda: job.ended)
        assert isinstance(events[0], Ready)
        assert events[0].model.arch == "echo"
        assert {event.delta.timeline for event in of(events, TextAdded)} == {4}
        assert "".join(event.text for event in of(events, TextAdded)) == job.text == "one two three"
        assert of(events, Finished) == [Finished(job, events[-1].completion)]  # type: ignore[union-attr]
        assert job.result is not None
        assert job.result.n_prompt == 3
    assert sidecar.poll() == [Closed(None)]
    assert sidecar.poll() == []


def test_questions_of_a_conversation_wait_for_each_other() -> None:
    with start(engine=fake_engine(delay_s=0.001)) as sidecar:
        jobs = [sidecar.ask(f"question {index}", conversation="inn") for index in range(5)]
        sidecar.forget("inn")
        jobs.append(sidecar.ask("anew", conversation="inn"))
        play(sidecar, lambda: all(job.ended for job in jobs))
        assert [job.result and job.result.n_prompt for job in jobs] == [2, 6, 10, 14, 18, 1]


def test_a_conversation_is_saved_and_loaded_in_its_turn() -> None:
    with start(engine=fake_engine(delay_s=0.001)) as sidecar:
        events: list[Event] = []
        first = sidecar.ask("one two", conversation="inn", system="be kind")
        events += play(sidecar, lambda: first.ended)
        sidecar.save("inn")
        play(sidecar, lambda: of(events, Saved), events=events)
        (saved,) = of(events, Saved)
        second = sidecar.ask("three", conversation="inn")
        wrong = sidecar.load(b"no save", conversation="inn")
        loaded = sidecar.load(saved.data, conversation="inn")
        third = sidecar.ask("four", conversation="inn")
        events += play(sidecar, lambda: third.ended)
        assert [job.result and job.result.n_prompt for job in (second, third)] == [2 + 4 + 1, 2 + 4 + 1]
        refused, result = of(events, Loaded)
        assert (refused.request, refused.result) == (wrong, None)
        assert isinstance(refused.error, errors.BadSave)
        assert result == Loaded(loaded, frameshard.LoadResult(same_model=True, same_template=True), None)
        asked = [sidecar.save_kv("inn", "inn.kv"), sidecar.load_kv("inn.kv", conversation="inn")]
        events = []
        play(sidecar, lambda: len(of(events, KvArrived)) == 2, events=events)
        assert {event.request for event in of(events, KvArrived)} == set(asked)  # their answers come at the same time
        assert {event.kv and event.kv.detail for event in of(events, KvArrived)} == {"there is no model"}
        sidecar.forget("inn")
        number = sidecar.history("inn")
        events = []
        play(sidecar, lambda: of(events, HistoryArrived), events=events)
        assert of(events, HistoryArrived) == [HistoryArrived(number, (ChatMessage("system", "be kind"),))]


def test_budgets_are_set_in_order() -> None:
    with start() as sidecar:
        numbers = [sidecar.set_budget(mib) for mib in (100, 8, 60, 50)]
        query = sidecar.stats()
        seen: list[Event] = []
        play(
            sidecar,
            lambda: len(of(seen, BudgetObserved) + of(seen, StatsArrived)) == 4,
            events=seen,
        )
        released = of(seen, BudgetReleased)
        assert [(event.request, event.released.vram_budget_bytes >> 20) for event in released] == [
            (numbers[0], 100),
            (numbers[2], 60),
            (numbers[3], 50),
        ]
        (refused,) = of(seen, BudgetRefused)
        assert refused.request == numbers[1]
        assert isinstance(refused.error, errors.BudgetBelowFloor)
        assert [event.request for event in of(seen, BudgetObserved)] == [number for number in numbers if number != 2]
        (stats,) = of(seen, StatsArrived)
        assert stats.request == query
        assert stats.stats is not None
        wrong = sidecar.set_budget(-1)
        (refused,) = of(play(sidecar, lambda: sidecar._events) + sidecar.poll(), BudgetRefused)
        assert refused.request == wrong


def test_the_host_budget_is_a_term_of_its_own() -> None:
    with start(engine=fake_engine(host_floor_mb=16, host_full_mb=96), host_budget_mb=80) as sidecar:
        numbers = [
            sidecar.set_budget(100, host_budget_mb=48),
            sidecar.set_budget(64),
            sidecar.set_budget(64, host_budget_mb=8),
        ]
        seen: list[Event] = []
        play(sidecar, lambda: of(seen, BudgetRefused), events=seen)
        assert [event.lease.host_budget_bytes >> 20 for event in of(seen, BudgetGranted)] == [48, 48]
        assert [event.released.host_used_bytes >> 20 for event in of(seen, BudgetReleased)] == [48, 48]
        (refused,) = of(seen, BudgetRefused)
        assert refused.request == numbers[2]
        assert refused.error.detail["host_floor_bytes"] == 16 << 20


def test_cancel() -> None:
    with start(engine=fake_engine(endless=True, delay_s=0.001)) as sidecar:
        early = sidecar.complete("la", sampling=GREEDY)
        sidecar.cancel(early)
        job, other = sidecar.complete("la", sampling=GREEDY), sidecar.complete("li", sampling=GREEDY)
        play(sidecar, lambda: job.text and other.text)
        sidecar.cancel(job)
        play(sidecar, lambda: job.ended and early.ended)
        assert isinstance(job.error, errors.JobCancelled)
        assert isinstance(early.error, errors.JobCancelled)
        assert not other.ended
        sidecar.cancel(job)
    events = sidecar.poll(10_000)
    (failed,) = of(events, Failed)
    assert failed.job is other
    assert isinstance(failed.error, errors.ConnectionLost)
    assert isinstance(events[-1], Closed)


def test_a_game_that_does_not_poll_loses_nothing() -> None:
    with start(engine=fake_engine(endless=True)) as sidecar:
        long = Sampling(max_tokens=MAX_EVENTS + 200)
        # Each word is a sentence, and sentences are not joined to fewer events.
        jobs = [sidecar.complete(f"No{index}.", sampling=long, sentences=True) for index in range(2)]
        until(lambda: len(sidecar._events) >= MAX_EVENTS)
        threading.Event().wait(0.5)
        assert len(sidecar._events) <= MAX_EVENTS + len(jobs) + 2
        play(sidecar, lambda: all(job.ended for job in jobs))
        for index, job in enumerate(jobs):
            assert job.text == " ".join([f"No{index}."] * long.max_tokens)


def test_a_game_that_does_not_poll_holds_a_long_thought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameshard.sync, "MAX_EVENTS", 8)
    with start() as sidecar:
        sidecar.wait_ready()
        job = sidecar.ask("one", thinking="shown", thinking_tokens=200, window=256)
        until(lambda: len(sidecar._events) >= 8)
        threading.Event().wait(0.5)
        assert len(sidecar._events) <= 8 + 2
        play(sidecar, lambda: job.ended)
        assert job.thought == "".join(f"hm{index} " for index in range(200))


def test_a_job_goes_on_whose_queue_was_emptied_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameshard.sync, "MAX_EVENTS", 8)
    polled: list[Event] = []

    class Queue(deque[Event]):
        """It is emptied after the first look at it that finds it full. This stands for a poll of the other thread."""

        def __len__(self) -> int:
            n_events = super().__len__()
            if n_events >= 8 and not polled:
                polled.extend(sidecar.poll(n_events))
            return n_events

    with start(engine=fake_engine(endless=True)) as sidecar:
        sidecar.wait_ready()
        sidecar._events = Queue(sidecar._events)
        job = sidecar.complete("No.", sampling=Sampling(max_tokens=100), sentences=True)
        until(lambda: polled)
        play(sidecar, lambda: job.ended)
        assert job.text == " ".join(["No."] * 100)


def test_errors_of_a_launch() -> None:
    with pytest.raises(errors.BadArgument):
        Sidecar.launch("x", vram_budget_mb=-1)
    with start(engine=fake_engine(fatal="bad_model")) as sidecar:
        job = sidecar.ask("anyone there")
        with pytest.raises(errors.BadModel):
            sidecar.wait_ready(20)
        failed, closed = sidecar.poll()
        assert isinstance(failed, Failed)
        assert failed.job is job
        assert isinstance(job.error, errors.BadModel)
        assert isinstance(closed, Closed)
        assert isinstance(closed.error, errors.BadModel)
        with pytest.raises(errors.BadModel):
            sidecar.ask("anyone")


def test_a_wrong_argument_fails_its_own_job_alone() -> None:
    asks: list[Callable[[Sidecar], Job]] = [
        lambda sidecar: sidecar.ask("one", conversation="inn", priority=7),
        lambda sidecar: sidecar.ask("one", conversation="inn", adapters=["pirate"]),  # type: ignore[arg-type]
        lambda sidecar: sidecar.ask("one", conversation="inn", temprature=1),  # type: ignore[call-arg]
        lambda sidecar: sidecar.ask("one", conversation="inn", tools=5),  # type: ignore[arg-type]
        lambda sidecar: sidecar.ask("one", conversation="inn", images=[5]),  # type: ignore[list-item]
        lambda sidecar: sidecar.ask("one", conversation="inn", system="caf\udce9"),
        lambda sidecar: sidecar.ask("caf\udce9", conversation="inn"),
        lambda sidecar: sidecar.ask(5, conversation="inn"),  # type: ignore[arg-type]
        lambda sidecar: sidecar.ask("one", conversation=["inn"]),  # type: ignore[arg-type]
        lambda sidecar: sidecar.tool_results({"id": object()}, conversation="inn"),
        lambda sidecar: sidecar.tool_results(5, conversation="inn"),  # type: ignore[arg-type]
        lambda sidecar: sidecar.chat(5),  # type: ignore[arg-type]
        lambda sidecar: sidecar.complete("caf\udce9"),
    ]
    with start(engine=fake_engine(delay_s=0.001)) as sidecar:
        sidecar.wait_ready()
        for ask in asks:
            first, late = ask(sidecar), ask(sidecar)
            good = sidecar.ask("one two", conversation="inn")
            behind = ask(sidecar)  # waits for its turn
            play(sidecar, lambda jobs=(first, late, good, behind): all(job.ended for job in jobs))
            for job in (first, late, behind):
                assert isinstance(job.error, errors.BadArgument), job.error
                sidecar.set_priority(job, 2)
            assert (good.text, good.error) == ("one two", None)
            with pytest.raises(errors.BadArgument):
                sidecar.set_priority(good, True)
        for call in (sidecar.cancel, lambda job: sidecar.set_priority(job, 1)):
            with pytest.raises(errors.BadArgument, match="must be a Job"):
                call(None)
        last = sidecar.ask("still here")
        play(sidecar, lambda: last.ended)
        assert last.text == "still here"
        assert sidecar.error is None


def test_a_wrong_argument_fails_its_own_request_alone() -> None:
    requests: list[Callable[[Sidecar], int]] = [
        lambda sidecar: sidecar.embed(5),  # type: ignore[arg-type]
        lambda sidecar: sidecar.plan(["x"]),  # type: ignore[list-item]
        lambda sidecar: sidecar.count_tokens("caf\udce9"),
        lambda sidecar: sidecar.count_tokens("x", tools=[price]),  # type: ignore[list-item]
        lambda sidecar: sidecar.adapter_load("pirate", 5),  # type: ignore[arg-type]
        lambda sidecar: sidecar.set_budget(64, tiemout_s=1),  # type: ignore[call-arg]
        lambda sidecar: sidecar.set_budget("x"),  # type: ignore[arg-type]
        lambda sidecar: sidecar.load(5, conversation="inn"),  # type: ignore[arg-type]
        lambda sidecar: sidecar.load_kv(5, conversation="inn"),  # type: ignore[arg-type]
    ]
    with start() as sidecar:
        sidecar.wait_ready()
        for request in requests:
            number, stats = request(sidecar), sidecar.stats()
            seen: list[Event] = []
            play(sidecar, lambda seen=seen: of(seen, StatsArrived), events=seen)
            found = {event.request: event.error for event in seen if hasattr(event, "request")}
            assert isinstance(found[number], errors.BadArgument), seen
            assert found[stats] is None
        calls: list[Callable[[Any], object]] = [sidecar.history, sidecar.save, sidecar.forget]
        for call in calls:
            with pytest.raises(errors.BadArgument):
                call(["inn"])
        job = sidecar.ask("one two", conversation="inn")
        play(sidecar, lambda: job.ended)
        assert job.text == "one two"
        assert sidecar.error is None


def test_what_a_call_was_given_may_change_behind_it() -> None:
    history, stock = [ChatMessage("user", "one two")], {"iron": [1]}
    frame = bytearray(12)
    with start() as sidecar:  # it loads, so what is asked waits
        told = sidecar.chat(history)
        seen = sidecar.ask("four", images=[frameshard.Pixels(frame, 2, 2)])
        counted = sidecar.count_tokens(history)
        looped = sidecar.tool_results({"id": stock}, conversation="inn")
        history.append(ChatMessage("user", "five"))
        frame.clear()
        stock["iron"].append(stock)  # type: ignore[arg-type]
        events = play(sidecar, lambda: told.ended and seen.ended and looped.ended)
        play(sidecar, lambda: of(events, TokenCountArrived), events=events)
    assert (told.text, seen.text) == ("one two", "four")
    (count,) = of(events, TokenCountArrived)
    assert (count.request, count.count and count.count.n_tokens) == (counted, 2)
    assert "no calls" in str(looped.error), looped.error


def test_a_job_that_ends_before_its_turn_lets_nobody_overtake() -> None:
    with start(engine=fake_engine(endless=True, delay_s=0.001)) as sidecar:
        first = sidecar.ask("la", conversation="inn", sampling=GREEDY)
        cancelled = sidecar.ask("one", conversation="inn", sampling=GREEDY)
        play(sidecar, lambda: first.text)
        sidecar.cancel(cancelled)
        refused = sidecar.ask("one", conversation="inn", priority=7)
        last = sidecar.ask("two", conversation="inn", sampling=Sampling(max_tokens=1))
        sidecar.forget("inn")
        play(sidecar, lambda: cancelled.ended)
        assert isinstance(cancelled.error, errors.JobCancelled)
        seen: list[Event] = []
        sidecar.stats()
        play(sidecar, lambda: of(seen, StatsArrived), events=seen)
        sidecar.history("inn")
        play(sidecar, lambda: of(seen, HistoryArrived), events=seen)
        assert [message.content for message in of(seen, HistoryArrived)[0].messages][:1] == ["la"]
        assert not first.ended
        assert not last.ended
        sidecar.cancel(first)
        play(sidecar, lambda: first.ended and refused.ended and last.ended)
        assert isinstance(refused.error, errors.BadArgument)
        assert (last.text, last.error) == ("two", None)


def test_a_shutdown_of_a_lost_sidecar() -> None:
    with start() as sidecar:
        sidecar.wait_ready()
        sidecar._do(lambda client: client._core.gone(errors.ConnectionLost("it is gone")))
        sidecar.shutdown()
        play(sidecar, lambda: sidecar._ended)
        assert isinstance(sidecar.error, errors.ConnectionLost)


def test_a_lost_sidecar() -> None:
    with start(engine=fake_engine(endless=True, delay_s=0.005)) as sidecar:
        job = sidecar.complete("la", sampling=GREEDY)
        sidecar.stats()
        events = play(sidecar, lambda: job.text)
        play(sidecar, lambda: of(events, StatsArrived), events=events)
        (stats,) = of(events, StatsArrived)
        assert stats.stats is not None
        os.kill(stats.stats.broker.pid, signal.SIGKILL)
        seen: list[Event] = []
        play(sidecar, lambda: of(seen, Closed), events=seen)
        assert isinstance(seen[-1], Closed)
        assert isinstance(seen[-1].error, errors.ConnectionLost)
        assert isinstance(job.error, errors.ConnectionLost)
        lengths = []
        for _ in range(2):
            with pytest.raises(errors.ConnectionLost) as caught:
                sidecar.stats()
            lengths.append(len(caught.traceback))
        assert lengths[0] == lengths[1], "one error is not raised by many calls"


@pytest.mark.parametrize("end", ["close", "shutdown", "kill"])
def test_each_request_gets_its_event_when_the_session_ends(end: str) -> None:
    for _ in range(2):
        with start() as sidecar:
            sidecar.wait_ready()
            sidecar.stats()
            events: list[Event] = []
            play(sidecar, lambda got=events: of(got, StatsArrived), events=events)
            stats = of(events, StatsArrived)[0].stats
            assert stats is not None
            calls: list[Callable[[], int]] = [
                sidecar.budget,
                sidecar.stats,
                lambda sidecar=sidecar: sidecar.plan([100]),
                lambda sidecar=sidecar: sidecar.set_budget(100),
                lambda sidecar=sidecar: sidecar.count_tokens("one"),
                lambda sidecar=sidecar: sidecar.history("inn"),
                lambda sidecar=sidecar: sidecar.save("inn"),
                lambda sidecar=sidecar: sidecar.load(b"", conversation="inn"),
            ]
            asked = []
            if end == "close":
                asked = [call() for call in calls]
                sidecar.close()
            elif end == "shutdown":
                sidecar.shutdown()
            else:
                os.kill(stats.broker.pid, signal.SIGKILL)
            # A game that asks each frame, also in the last one.
            with contextlib.suppress(errors.FrameshardError):
                while True:
                    asked += [call() for call in calls]
                    time.sleep(0.001)
            until(lambda sidecar=sidecar: sidecar._events and isinstance(sidecar._events[-1], Closed))
            seen = sidecar.poll(1_000_000)
            answered: Counter[int] = Counter(getattr(event, "request", 0) for event in seen)
            partly = Counter(event.request for event in of(seen, BudgetGranted) + of(seen, BudgetReleased))
            assert all(answered[number] - partly[number] == 1 for number in asked)
            assert isinstance(seen[-1], Closed)


def test_engine_changes_arrive() -> None:
    with start(engine=fake_engine(delay_s=0.005)) as sidecar:
        job = sidecar.complete(WORDS)
        sidecar.stats()
        seen: list[Event] = []
        play(sidecar, lambda: of(seen, StatsArrived), events=seen)
        (stats,) = of(seen, StatsArrived)
        assert stats.stats is not None
        assert stats.stats.broker.engine_pid is not None
        os.kill(stats.stats.broker.engine_pid, signal.SIGKILL)
        play(sidecar, lambda: job.ended and len(of(seen, Engine)) >= 2, events=seen)
        assert [change.state for change in of(seen, Engine)] == ["restarting", "ready"]
        assert job.text == WORDS


def test_chat_budget_pacing_and_the_frame_block() -> None:
    with start(engine=fake_engine(delay_s=0.001)) as sidecar:
        job = sidecar.chat([ChatMessage("system", "be brief"), ChatMessage("user", "one two")])
        numbers = [sidecar.set_pacing("prioritize_graphics", target_tokens_per_second=5000.0)]
        numbers += [sidecar.set_pacing("haste"), sidecar.budget(), sidecar.frame_block()]  # type: ignore[arg-type]
        seen: list[Event] = []
        play(sidecar, lambda: job.ended and of(seen, FrameBlockArrived), events=seen)
        assert job.error is None
        assert job.text.endswith("one two")
        fine, wrong = sorted(of(seen, PacingArrived), key=lambda event: event.request)
        assert (fine.request, fine.error, wrong.request) == (numbers[0], None, numbers[1])
        assert isinstance(wrong.error, errors.BadArgument)
        (bounds,) = of(seen, BudgetArrived)
        assert bounds.budget is not None
        assert (bounds.request, bounds.budget.state) == (numbers[2], "active")
        (arrived,) = of(seen, FrameBlockArrived)
        assert (arrived.request, arrived.error) == (numbers[3], None)
        assert arrived.block is not None
        with arrived.block as block:
            block.begin()
        sidecar.shutdown()
        play(sidecar, lambda: sidecar._ended)


def test_notices_and_features_are_the_protocols() -> None:
    with start(engine=fake_engine(endless=True, delay_s=0.001)) as sidecar:
        sidecar.set_budget(64)
        job = sidecar.complete("la", sampling=GREEDY)
        seen: list[Event] = []
        play(sidecar, lambda: of(seen, Notice), events=seen)
        (ready,) = of(seen, Ready)
        assert ready.features == FEATURES
        assert (of(seen, Notice)[0].kind, job.ended) == ("wants", False)


def test_both_clients_take_the_same_arguments() -> None:
    for name in ("ask", "chat", "complete", "set_budget", "plan", "set_pacing", "frame_block", "connect", "launch"):
        asynchronous = getattr(frameshard.Client if hasattr(frameshard.Client, name) else frameshard, name)
        mine = inspect.signature(getattr(Sidecar, name)).parameters
        theirs = inspect.signature(asynchronous).parameters
        only_awaited = {"observe", "on_lease", "on_loading", "on_released", "self", "cls"}  # events replace these
        assert {
            name: (parameter.kind, parameter.default, parameter.annotation) for name, parameter in mine.items()
        }.items() >= {
            name: (parameter.kind, parameter.default, parameter.annotation)
            for name, parameter in theirs.items()
            if name not in only_awaited
        }.items(), name


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_not_got_the_session() -> None:
    with start() as sidecar:
        sidecar.wait_ready()
        child = os.fork()
        if not child:
            refused = 0
            calls: list[Callable[[], object]] = [lambda: sidecar.ask("one"), sidecar.stats, sidecar.wait_ready]
            for call in calls:
                with contextlib.suppress(BaseException):
                    try:
                        call()
                    except errors.ConnectionLost as error:
                        refused += "forked process" in error.message
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        job = sidecar.ask("one two")
        play(sidecar, lambda: job.ended)
        assert job.text == "one two"
    with pytest.raises(errors.ConnectionLost, match="the sidecar is closed"):
        sidecar.ask("one")


def test_a_game_that_does_not_poll_learns_which_answer_was_too_long(tmp_path: Path) -> None:
    place = tmp_path / "sidecar.json"
    with start(engine=fake_engine(endless=True), held_bytes=500, connect_file=place) as sidecar:
        long = sidecar.complete("No.", sampling=Sampling(max_tokens=10 * MAX_EVENTS), sentences=True)
        short = sidecar.complete("No.", sampling=Sampling(max_tokens=3))
        play(sidecar, lambda: long.text)
        with Sidecar.connect(place) as other:
            seen: list[Event] = []
            n_running = 1
            while n_running:
                other.stats()
                play(other, lambda: of(seen, StatsArrived), events=seen)
                (arrived,) = of(seen, StatsArrived)
                assert arrived.stats is not None
                n_running = arrived.stats.broker.jobs_running
                seen.clear()
        play(sidecar, lambda: long.ended and short.ended)
        assert isinstance(long.error, errors.Overloaded)
        assert long.text.startswith("No. No. No.")
        assert short.text == "No. No. No."


def test_close_while_loading() -> None:
    sidecar = start(engine=(sys.executable, "-c", "import signal; signal.pause()"))
    sidecar.close()
    assert isinstance(sidecar.poll()[-1], Closed)
    with pytest.raises(errors.FrameshardError):
        sidecar.wait_ready()
    for _ in range(10):
        start().close()


def test_calls_wait_for_nobody() -> None:
    """They return while all processes of the sidecar are stopped. `profiles/tools/render_loop.py` measures their
    time."""
    with start(engine=fake_engine(endless=True, delay_s=0.001)) as sidecar:
        sidecar.wait_ready()
        sidecar.stats()
        seen: list[Event] = []
        play(sidecar, lambda: of(seen, StatsArrived), events=seen)
        (stats,) = of(seen, StatsArrived)
        assert stats.stats is not None
        assert stats.stats.broker.engine_pid is not None
        pids = [stats.stats.broker.pid, stats.stats.broker.engine_pid]
        calls: list[Callable[[], object]] = [
            lambda: sidecar.poll(),
            lambda: sidecar.ask("la", sampling=GREEDY),
            lambda: sidecar.set_budget(64),
            lambda: sidecar.stats(),
            lambda: sidecar.cancel(Job()),
        ]
        times: list[list[float]] = [[] for _ in calls]
        for pid in pids:
            freeze(pid)
        for _ in range(50):
            for call, seconds in zip(calls, times, strict=True):
                started = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - started)
        for pid in pids:
            thaw(pid)
        # Each takes about 20 microseconds. A call that waits for an answer would take seconds each time, not only when
        # the machine pauses the test.
        assert max(map(min, times)) < 2.0


def test_a_thought_comes_in_events_of_its_own() -> None:
    with start() as sidecar:
        sidecar.wait_ready()
        job = sidecar.ask("one two", thinking="shown")
        events = play(sidecar, lambda: job.ended)
        thoughts = [event.thought.text for event in events if isinstance(event, ThoughtAdded)]
        assert "".join(thoughts) == job.thought == "hm0 hm1 hm2 "
        assert job.text == "one two"
        assert job.result is not None
        assert job.result.n_thought == 3
