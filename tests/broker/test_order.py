"""The order of jobs, without processes and in simulated time: 1,000 jobs with random priorities, conversations,
deadlines, changes and cancels. The engine carries out the broker's commands, one token of each of its jobs a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from frameshard.broker.job import OVERTAKEN_PER_RANK
from frameshard.broker.jobs import MAX_DEATHS, Jobs
from frameshard.errors import EngineDied, Overloaded
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

EPOCH = 77
N_JOBS = 1000
SLOTS = 3
STEP_S = 0.01
MOST_OVERTAKEN = OVERTAKEN_PER_RANK * (2 * m.MAX_PRIORITY + 2)


class Commands(list[em.Command]):
    """Checks each job when it gets its slot."""

    def __init__(self, check: Callable[[em.Submit], None]) -> None:
        super().__init__()
        self._check = check

    def append(self, command: em.Command) -> None:
        if isinstance(command, em.Submit):
            self._check(command)
        super().append(command)


class Play:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.jobs = Jobs(slots=SLOTS, max_jobs=N_JOBS, max_client_jobs=N_JOBS)
        self.clients = [ServerConnection(n, epoch=EPOCH, held_bytes=1 << 20, now=0.0) for n in range(1, 4)]
        self.submitted = 0
        self.asked: dict[int, m.Submit] = {}  # open jobs
        self.due: dict[int, float] = {}
        self.owner: dict[int, ServerConnection] = {}
        self.tokens: dict[int, int] = {}
        self.ends: dict[int, m.JobEvent] = {}
        self.overtaken: dict[int, int] = {}
        self.engine: dict[int, int] = {}  # by the engine's number of a job: how many tokens it has
        self.told: dict[int, int] = {}  # by the engine's number: the priority that the engine knows
        self.jobs.commands = Commands(self.check_order)
        self.jobs.engine_ready()

    def submit(self) -> None:
        self.submitted += 1
        number, draw = self.submitted, self.draw
        request = m.Submit(
            id=number,
            epoch=EPOCH,
            job=number,
            kind="completion",
            prompt="x",
            conversation=draw.choice([None, None, "inn", "forge"]),
            window=256,
            priority=draw.randint(0, 2),
            deadline_ms=draw.choice([0, 0, 200, 2000, 20_000]),
        )
        client = self.owner[number] = draw.choice(self.clients)
        self.asked[number] = request
        self.overtaken[number] = self.tokens[number] = 0
        if request.deadline_ms:
            self.due[number] = self.now + request.deadline_ms / 1000
        self.jobs.submit(client, request, self.now)

    def disturb(self) -> None:
        number = self.draw.choice(list(self.asked))
        if self.draw.random() < 0.1:
            self.jobs.cancel(self.owner[number], number)
        else:
            self.jobs.set_priority(self.owner[number], number, self.draw.randint(0, 2))

    def obey(self) -> None:
        """Carries out the broker's commands. A command may cause others."""
        while self.jobs.commands:
            command = self.jobs.commands.pop(0)
            if isinstance(command, em.Submit):
                self.engine[command.job] = len(command.resume)
                self.told[command.job] = command.priority
                self.jobs.engine_event(em.Started(command.job, 1, 0, 0))
            elif isinstance(command, em.SetPriority):
                self.told[command.job] = command.priority
            elif isinstance(command, em.Cancel) and self.engine.pop(command.job, None) is not None:
                self.jobs.engine_event(em.Cancelled(command.job))

    def check_order(self, command: em.Submit) -> None:
        """No job that could run instead goes before the one that got the slot."""
        open_jobs = self.jobs._jobs.values()
        first = self.jobs._jobs[command.job]
        busy = {job.conversation for job in open_jobs if job.at_engine and job is not first}
        busy |= {job.conversation for job in self.jobs._leaving.values()}
        for job in open_jobs:
            if job.at_engine and job is not first:
                continue
            if job.conversation is None or job.conversation not in busy:
                assert first.order <= job.order
            busy.add(job.conversation)
            if job.number < first.number and not job.tokens:
                self.overtaken[job.request.job] += 1

    def step(self) -> None:
        for number in list(self.engine):
            job = self.jobs._jobs.get(number)
            if job is None or number not in self.engine:  # it has left in this step
                continue
            n = self.engine[number]
            if n == 1 + job.request.job % 20:
                del self.engine[number]
                self.jobs.engine_event(em.Done(number, "stop", 1, n, 0.0, 0.0))
            else:
                self.engine[number] += 1
                self.tokens[job.request.job] += 1
                self.jobs.engine_event(em.Token(number, n, 5, "a"))
            self.obey()

    def hear(self) -> None:
        for client in self.clients:
            while (frame := client.next_frame()) is not None:
                client.sent()
                event = m.decode_answer(frame)
                if isinstance(event, m.TERMINAL):
                    assert event.job not in self.ends
                    self.ends[event.job] = event
                    del self.asked[event.job]
                    self.check_end(event)

    def check_end(self, event: m.JobEvent) -> None:
        if isinstance(event, m.Failed):
            assert event.error.name == "deadline_missed"
            assert self.now - STEP_S < self.due[event.job] <= self.now
            assert self.tokens[event.job] == 0
        elif isinstance(event, m.Done):
            assert self.tokens[event.job] == 1 + event.job % 20

    def check_slots(self) -> None:
        """No job runs while one that could run in its place has a higher priority. The engine knows the priorities."""
        open_jobs = list(self.jobs._jobs.values())
        running = [job for job in open_jobs if job.at_engine]
        busy = {job.conversation for job in running}
        waiting = [job.priority for job in open_jobs if not job.at_engine and job.conversation not in busy - {None}]
        assert len(running) <= SLOTS
        assert min([3, *(job.priority for job in running)]) >= max([0, *waiting])
        assert all(self.told[job.number] == job.priority for job in running)


@pytest.mark.parametrize("seed", range(2))
def test_the_order_holds_and_no_job_starves(seed: int) -> None:
    play = Play(seed)
    while play.submitted < N_JOBS or play.asked:
        play.now += STEP_S
        while play.submitted < N_JOBS and play.draw.random() < 0.22:
            play.submit()
        if play.asked and play.draw.random() < 0.3:
            play.disturb()
        play.jobs.fail_overdue(play.now)
        play.obey()
        play.step()
        play.hear()
        play.check_slots()
        assert play.now < 3600, f"these starve: {play.asked.keys()}"
    assert len(play.ends) == N_JOBS
    assert play.jobs.held_bytes == 0
    kinds = {type(event) for event in play.ends.values()}
    assert kinds == {m.Done, m.Failed, m.Cancelled}
    assert max(play.overtaken.values()) <= MOST_OVERTAKEN


def test_the_engine_gets_an_urgent_job_together_with_the_pause_of_another() -> None:
    """If it came after the pause, the engine would have begun another decode."""
    jobs = Jobs(slots=1, max_jobs=9, max_client_jobs=9)
    client = ServerConnection(1, epoch=EPOCH, held_bytes=1 << 14, now=0.0)
    jobs.engine_ready()

    def submit(number: int, priority: int) -> int:
        request = m.Submit(number, EPOCH, number, "completion", prompt="x", window=256, priority=priority)
        return jobs.submit(client, request, 0.0)

    def sent() -> list[tuple[str, int]]:
        commands = [(type(command).__name__, command.job) for command in jobs.commands]  # type: ignore[union-attr]
        jobs.commands.clear()
        return commands

    background = submit(1, 0)
    assert sent() == [("Submit", background)]
    urgent = submit(2, 2)
    assert sent() == [("Cancel", background), ("Submit", urgent)]
    jobs.engine_event(em.Cancelled(background))
    assert sent() == []
    jobs.cancel(client, 2)
    third = submit(3, 1)
    assert sent() == [("Cancel", urgent), ("Submit", third)]
    jobs.engine_event(em.Cancelled(urgent))
    assert sent() == []
    jobs.engine_event(em.Started(third, 1, 0, 0))
    jobs.engine_event(em.Done(third, "stop", 1, 0, 0.0, 0.0))
    assert (sent(), jobs.running) == ([("Submit", background)], 1)


class Bench:
    """Jobs of one client, and what its engine is told."""

    def __init__(self, slots: int = 1, **limits: int) -> None:
        self.jobs = Jobs(slots=slots, max_jobs=9, max_client_jobs=limits.get("max_client_jobs", 9))
        self.client = ServerConnection(1, epoch=EPOCH, held_bytes=1 << 14, now=0.0)
        self.submitted = 0
        self.jobs.engine_ready()

    def submit(self, **fields: Any) -> int:
        """Adds a job. The engine's number of it is also the client's."""
        self.submitted += 1
        request = m.Submit(self.submitted, EPOCH, self.submitted, "completion", prompt="x", window=256, **fields)
        return self.jobs.submit(self.client, request, 0.0)

    def told(self) -> list[tuple[str, int]]:
        """The commands for the engine: their types and jobs. It has got them now."""
        commands = [(type(command).__name__, command.job) for command in self.jobs.commands]  # type: ignore[union-attr]
        self.jobs.commands.clear()
        return commands

    def start(self, *jobs: int) -> None:
        for job in jobs:
            self.jobs.engine_event(em.Started(job, 1, 0, 0))

    def say(self, job: int, n: int = 0) -> None:
        self.jobs.engine_event(em.Token(job, n, 5, "a"))

    def end(self, job: int) -> None:
        self.jobs.engine_event(em.Cancelled(job))

    def heard(self) -> list[tuple[str, int]]:
        """The events for the client."""
        events = []
        while (frame := self.client.next_frame()) is not None:
            self.client.sent()
            event = m.decode_answer(frame)
            events.append((type(event).__name__, event.job))  # type: ignore[union-attr]
        return events


def test_a_missed_deadline_ends_the_job_in_the_engine_and_frees_its_slot() -> None:
    bench = Bench()
    late, waiting, next_one = bench.submit(deadline_ms=100), bench.submit(deadline_ms=50), bench.submit()
    bench.start(late)
    assert (bench.told(), bench.jobs.next_due) == ([("Submit", late)], 0.05)
    bench.jobs.fail_overdue(0.049)
    assert bench.jobs.open == 3
    bench.jobs.fail_overdue(0.05)
    assert (bench.jobs.open, bench.jobs.next_due, bench.told()) == (2, 0.1, [])
    bench.jobs.fail_overdue(0.1)
    assert bench.told() == [("Cancel", late), ("Submit", next_one)]
    assert (bench.jobs.running, bench.jobs.queued, bench.jobs.next_due) == (2, 0, math.inf)
    bench.end(late)
    assert (bench.jobs.running, bench.told()) == (1, [])
    assert bench.heard() == [("Started", late), ("Failed", waiting), ("Failed", late)]


def test_a_job_that_is_being_cancelled_misses_no_deadline() -> None:
    bench = Bench()
    job = bench.submit(deadline_ms=100)
    bench.jobs.cancel(bench.client, job)
    assert bench.jobs.next_due == math.inf  # else the task that keeps deadlines would never sleep
    bench.jobs.fail_overdue(1.0)
    bench.end(job)
    assert bench.heard() == [("Cancelled", job)]


def test_a_token_in_time_keeps_the_deadline() -> None:
    bench = Bench()
    job = bench.submit(deadline_ms=100)
    bench.start(job)
    bench.say(job)
    bench.jobs.fail_overdue(1.0)
    assert (bench.jobs.open, bench.jobs.next_due) == (1, math.inf)


def test_a_conversation_waits_until_its_job_has_left_the_engine() -> None:
    bench = Bench(slots=2)
    late, later = bench.submit(conversation="inn", deadline_ms=100), bench.submit(conversation="inn")
    bench.start(late)
    bench.jobs.fail_overdue(0.1)
    assert bench.told() == [("Submit", late), ("Cancel", late)]
    bench.end(late)
    assert bench.told() == [("Submit", later)]


def test_what_a_dead_engine_was_told_is_not_told_to_the_next() -> None:
    bench = Bench(slots=2)
    late, cancelled = bench.submit(deadline_ms=100), bench.submit()
    bench.start(late, cancelled)
    bench.jobs.fail_overdue(0.1)
    bench.jobs.cancel(bench.client, cancelled)
    bench.jobs.engine_lost(EngineDied("a signal"))
    assert (bench.told(), bench.jobs.open, bench.jobs.running) == ([], 0, 0)
    following = [bench.submit(), bench.submit()]
    bench.jobs.engine_ready()
    assert bench.told() == [("Submit", job) for job in following]
    assert bench.heard() == [
        *(("Started", job) for job in (late, cancelled)),
        ("Failed", late),
        ("Cancelled", cancelled),
    ]


def test_an_end_that_was_asked_for_is_no_death_of_the_jobs() -> None:
    bench = Bench()
    job = bench.submit()
    for _ in range(2 * MAX_DEATHS):
        bench.start(job)
        bench.jobs.engine_lost(None)
        bench.jobs.engine_ready()
    bench.start(job)
    bench.jobs.engine_lost(EngineDied("a signal"))
    assert bench.jobs.open == 1


def test_only_deaths_since_the_last_token_count() -> None:
    bench = Bench()
    job = bench.submit()
    for n in range(2 * MAX_DEATHS):
        bench.start(job)
        bench.say(job, n)
        bench.jobs.engine_lost(EngineDied("a signal"))
        bench.jobs.engine_ready()
    assert bench.jobs.open == 1
    for _ in range(MAX_DEATHS - 1):
        bench.start(job)
        bench.jobs.engine_lost(EngineDied("a signal"))
        bench.jobs.engine_ready()
    assert bench.jobs.open == 0


def test_after_a_death_jobs_go_back_one_at_a_time_before_all_others() -> None:
    bench = Bench(slots=3)
    jobs = [bench.submit(), bench.submit()]
    bench.start(*jobs)
    bench.told()
    bench.jobs.engine_lost(EngineDied("a signal"))
    urgent = bench.submit(priority=2)
    bench.jobs.engine_ready()
    for job in jobs:
        assert bench.told() == [("Submit", job)]
        bench.start(job)
        bench.say(job)
    assert bench.told() == [("Submit", urgent)]


def test_a_job_that_is_over_for_its_client_is_still_on_trial() -> None:
    bench = Bench(slots=3)
    suspect, other = bench.submit(deadline_ms=100), bench.submit()
    bench.start(suspect, other)
    bench.jobs.engine_lost(EngineDied("a signal"))
    bench.jobs.engine_ready()
    assert bench.told() == [("Submit", suspect)]
    bench.jobs.fail_overdue(0.1)
    assert bench.told() == [("Cancel", suspect)]  # it may kill this engine yet
    bench.end(suspect)
    assert bench.told() == [("Submit", other)]


def test_a_paused_job_is_told_so_once() -> None:
    """If the next engine pauses it again before its first token, its client knows already."""
    bench = Bench()
    job = bench.submit(priority=0)
    bench.start(job)
    bench.say(job)
    urgent = bench.submit(priority=2)
    bench.end(job)
    bench.jobs.cancel(bench.client, urgent)
    bench.end(urgent)
    again = bench.submit(priority=2)
    bench.end(job)  # the engine had not started it yet
    bench.jobs.cancel(bench.client, again)
    bench.end(again)
    bench.start(job)
    names = [name for name, of in bench.heard() if of == job]
    assert names == ["Started", "Delta", "Paused", "Resumed"]


def test_an_urgent_job_pauses_no_job_that_is_leaving_already() -> None:
    bench = Bench(slots=2)
    first, second = bench.submit(priority=0), bench.submit(priority=0)
    bench.start(first, second)
    bench.told()
    bench.jobs.cancel(bench.client, first)
    urgent = bench.submit(priority=2)
    assert bench.told() == [("Cancel", first), ("Submit", urgent)]
    other = bench.submit(priority=2)
    assert bench.told() == [("Cancel", second), ("Submit", other)]
    bench.submit(priority=2)
    assert bench.told() == []


def test_a_warm_up_stays_behind_all_jobs() -> None:
    bench = Bench()
    bench.submit()
    warm_up = bench.submit(warm_up=True)
    bench.jobs.set_priority(bench.client, warm_up, 2)
    usual = bench.submit(priority=0)
    bench.told()
    bench.start(1)
    bench.jobs.engine_event(em.Done(1, "stop", 1, 0, 0.0, 0.0))
    assert bench.told() == [("Submit", usual)]


def test_a_new_priority_counts_at_once() -> None:
    bench = Bench()
    first, second = bench.submit(priority=1), bench.submit(priority=1)
    assert bench.told() == [("Submit", first)]
    bench.jobs.set_priority(bench.client, second, 2)
    assert bench.told() == [("Cancel", first), ("Submit", second)]


def test_a_job_that_waits_for_its_conversation_is_not_overtaken_by_lower_ones() -> None:
    """Else it would rise, and its conversation's job in the engine with it."""
    bench = Bench(slots=2, max_client_jobs=OVERTAKEN_PER_RANK + 2)
    bench.submit(priority=1, conversation="inn")
    bench.submit(priority=1, conversation="inn")
    for _ in range(OVERTAKEN_PER_RANK):
        bench.told()
        other = bench.submit(priority=0)
        assert bench.told() == [("Submit", other)]
        bench.start(other)
        bench.jobs.engine_event(em.Done(other, "stop", 1, 0, 0.0, 0.0))
    assert bench.told() == []


def test_the_requests_of_jobs_that_have_ended_are_not_held() -> None:
    bench = Bench()
    job = bench.submit()
    bench.start(job)
    assert bench.jobs.held_bytes > 0
    bench.jobs.engine_event(em.Done(job, "stop", 1, 0, 0.0, 0.0))
    assert bench.jobs.held_bytes == 0


def test_a_client_has_as_many_jobs_as_it_may() -> None:
    bench = Bench(max_client_jobs=2)
    bench.submit()
    bench.submit()
    with pytest.raises(Overloaded):
        bench.submit()


@pytest.mark.parametrize(
    "large",
    [
        {"messages": (m.ChatMessage("user", "x" * 50_000),)},
        {"tools": (m.Tool("look", "x" * 50_000), m.Tool("go", schema='{"type": "object"}'))},
        {"sampling": m.Sampling(json_schema='{"type": "string"}' + " " * 50_000)},
        {"sampling": m.Sampling(choices=tuple("x" * 1000 + str(i) for i in range(50)))},
    ],
)
def test_what_a_request_holds_is_counted_until_its_end(large: dict[str, Any]) -> None:
    """The listener takes memory that no job holds for that of a peer who fills it."""
    jobs = Jobs(slots=1, max_jobs=9, max_client_jobs=9)
    client = ServerConnection(1, epoch=EPOCH, held_bytes=1 << 14, now=0.0)
    asked = {"kind": "chat", "messages": (m.ChatMessage("user", "x"),), **large}
    for number in (1, 2):
        jobs.submit(client, m.Submit(number, EPOCH, number, **asked), 0.0)
    assert 2 * 50_000 < jobs.held_bytes < 2 * 70_000
    jobs.fail_all(EngineDied("gone"))
    assert jobs.held_bytes == 0
