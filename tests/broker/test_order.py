"""The order of jobs, without processes and in simulated time: 1,000 jobs with random priorities, conversations,
deadlines, changes and cancels. The engine carries out the broker's commands, one token of each of its jobs a step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from frameshard.broker.job import OVERTAKEN_PER_RANK
from frameshard.broker.jobs import Jobs
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
        busy |= set(self.jobs._leaving.values())
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
