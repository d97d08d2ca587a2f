"""The jobs of all clients: which wait, which run, and how they continue after the engine has died.

This module neither sends nor waits: commands for the engine are put into :attr:`Jobs.commands`, events into the
clients' connections. Only the images of jobs are files, which :mod:`frameshard.broker.images` keeps open.

A job is resumed from its prompt, its seed and the tokens that it has produced, so its client sees one stream without a
gap. In stream-only mode the text is the same as without the death: the engine samples token i only from (seed, i) and
repeats the shapes of the first run's graphs (``history``).

Each job counts the engine deaths since its last new token. At :data:`MAX_DEATHS` the job fails with the engine's
reason, and the other jobs continue. To find the job that kills the engine, the jobs that were in a dead engine go back
one at a time: the next one when the one before has produced a new token or has ended. So at every death after the
first, at most one job in the engine has produced nothing new, and that job is the cause.

A free slot goes to the waiting job of the highest priority, among equals to the one with the earliest deadline for its
first token. Without deadlines it goes to the client that has waited longest for its turn, so no client waits for the
whole queue of another one. A job of higher priority pauses a running one of lower priority. A job has at least the
priority of the jobs that wait for it, which are the later ones of its conversation: otherwise a background job, which
others overtake, would hold up an urgent one (priority inversion; the remedy is that of Sha, Rajkumar and Lehoczky,
"Priority Inheritance Protocols", 1990).

Which jobs go to the fallback server is decided in :mod:`frameshard.broker.departures`.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import sys
from collections.abc import Sequence

from frameshard.broker import fallback
from frameshard.broker.departures import Departures
from frameshard.broker.fallback import Away
from frameshard.broker.images import Images
from frameshard.broker.job import Job
from frameshard.errors import BadMessage, DeadlineMissed, EngineDied, FrameshardError, Overloaded, UnknownJob
from frameshard.sentences import Marked
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection

MAX_DEATHS = 2

_TERMINAL = (em.Done, em.Failed, em.Cancelled)


class Jobs:
    """All jobs that have not ended.

    :param slots: the most jobs in the engine.
    :param max_jobs: the most jobs of all clients.
    :param max_client_jobs: the most jobs of one client.
    :param model: the name of the fallback server's model; empty: there is no such server.
    """

    def __init__(self, *, slots: int, max_jobs: int, max_client_jobs: int, model: str = "") -> None:
        self._slots = slots
        self._max_jobs = max_jobs
        self._max_client_jobs = max_client_jobs
        self._numbers = 0
        self._jobs: dict[int, Job] = {}
        self._leaving: dict[int, Job] = {}
        """Jobs that are over for their client but still in the engine, by job number."""
        self._turn = 0
        self._turns: dict[ServerConnection, int] = {}  # the last turn of each client
        self._engine_ready = False
        self._images = Images()
        self._departures = Departures(model)
        self._off: FrameshardError | None = None
        self.held_bytes = 0
        """The bytes of the requests of all jobs."""
        self.commands: list[em.Command] = []
        """Commands for the engine, in order. The caller removes them."""

    @property
    def asks(self) -> list[fallback.Command]:
        """Commands for the connections to the fallback server, in order. The caller removes them."""
        return self._departures.asks

    @property
    def open(self) -> int:
        """How many jobs have not ended."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        return sum(not job.at_engine for job in self._jobs.values()) - self.remote

    @property
    def running(self) -> int:
        """How many jobs are in the engine, including those that are over for their client."""
        return sum(job.at_engine for job in self._jobs.values()) + len(self._leaving)

    @property
    def remote(self) -> int:
        """How many jobs are at the fallback server."""
        return sum(job.away.attempt > 0 for job in self._jobs.values())

    def use_adapter(self, name: str) -> bool:
        """Whether a job that has not ended uses the adapter, or one that is still in the engine."""
        jobs = (*self._jobs.values(), *self._leaving.values())
        return any(adapter.name == name for job in jobs for adapter in job.request.adapters)

    # ---- clients ----------------------------------------------------------------------------------------------------

    def may_go(self, request: m.Submit) -> bool:
        """Whether the job of this request may go to the fallback server."""
        return self._departures.may_go(request)

    def submit(self, connection: ServerConnection, request: m.Submit, now: float) -> int:
        """Adds a job. A repeated request (after the connection was resumed) changes nothing.

        :param now: seconds of a monotonic clock.
        :returns: the job's number at the engine; 0 for a repeated request.
        :raises Overloaded: too many jobs are open.
        :raises BadArgument: an image does not match the request's fields.
        """
        if request.job in connection.jobs:
            return 0
        if len(self._jobs) >= self._max_jobs:
            raise Overloaded(f"{self._max_jobs} jobs wait already", max_jobs=self._max_jobs)
        if len(list(connection.jobs)) >= self._max_client_jobs:
            raise Overloaded("this client has too many jobs open", max_jobs=self._max_client_jobs)
        seed = secrets.randbits(32) if request.sampling.seed is None else request.sampling.seed
        images = self._images.hold(request.images)
        self._numbers += 1
        priority = em.IDLE_PRIORITY if request.warm_up else request.priority
        due = now + request.deadline_ms / 1000 if request.deadline_ms else math.inf
        away = Away(self.may_go(request))
        job = Job(self._numbers, connection, request, seed, priority, due, images=images, away=away)
        self._jobs[self._numbers] = job
        self.held_bytes += _size(request)
        connection.open(request.job, request.timeline, request.window)
        self._fill_slots()
        return job.number

    def cancel(self, connection: ServerConnection, job_id: int) -> None:
        """Ends a job early.

        :raises UnknownJob: there is no such job. A job counts until the client has taken its last event.
        """
        job = self._find(connection, job_id)
        if job is not None:
            self._cancel(job)

    def set_priority(self, connection: ServerConnection, job_id: int, priority: int) -> None:
        """Changes the priority of a job. This may pause another job, or this one.

        :raises UnknownJob: as :meth:`cancel`.
        """
        job = self._find(connection, job_id)
        if job is not None and not job.request.warm_up:
            job.asked_priority = priority
            self._fill_slots()

    @property
    def next_due(self) -> float:
        """The earliest deadline that can still be missed; infinite if there is none."""
        return min((job.due for job in self._jobs.values() if not job.cancelling), default=math.inf)

    def next_departure(self, now: float) -> float:
        """The next time after `now` at which a job that waits may have to go to the fallback server."""
        times = (self._departures.time(job) for job in self._jobs.values() if job.may_go and not job.at_engine)
        return min((time for time in times if time > now), default=math.inf)

    def fail_overdue(self, now: float) -> None:
        """Fails the jobs that have no token and whose deadlines are over."""
        for job in list(self._jobs.values()):
            if job.due <= now and not job.cancelling:
                deadline_ms = job.request.deadline_ms
                error = DeadlineMissed(f"the job has no token after {deadline_ms} ms", deadline_ms=deadline_ms)
                job.connection.failed(job.request.job, error)
                self._leave(job)
        self._fill_slots()

    def _find(self, connection: ServerConnection, job_id: int) -> Job | None:
        """Returns None for a job that has ended and whose last event the client has not taken."""
        for job in self._jobs.values():
            if job.connection is connection and job.request.job == job_id:
                return job
        if job_id not in connection.jobs:
            raise UnknownJob(f"no job {job_id} is open", job=job_id)
        return None

    def drop(self, connection: ServerConnection, error: FrameshardError | None = None) -> None:
        """Ends all jobs of a client.

        :param error: the jobs fail with this error; None: no events are sent.
        """
        self._turns.pop(connection, None)
        for job in list(self._jobs.values()):
            if job.connection is connection:
                if error is not None:
                    connection.failed(job.request.job, error)
                self._leave(job)

    # ---- fallback server --------------------------------------------------------------------------------------------

    def set_room(self, room: bool) -> None:
        """Called when the sidecar has got VRAM and an engine for jobs, or has lost them."""
        if room != self._departures.room:
            self._departures.room = room
            self._fill_slots()

    def unread(self, number: int, n_tokens: int) -> int:
        """How many of the tokens of a job's prompt the engine has to read: those that its conversation did not have."""
        return self._departures.unread(self._jobs.get(number), n_tokens)

    def predicted(self, number: int, ttft_s: float, now: float) -> None:
        """Called with the plan's time to the first token of a job with a deadline."""
        job = self._jobs.get(number)
        if job is not None and job.may_go:
            job.away.late_at = job.due - ttft_s
            if now > job.away.late_at:
                self._recall(job, now)

    def depart(self, now: float) -> None:
        """Sends jobs that wait to the fallback server, if they must not wait here. Takes those without a token back
        from an engine that has no room."""
        if not self._departures.model:
            return
        for job in self._jobs.values() if not self._departures.room else ():
            self._recall(job, now)
        n_free = fallback.MAX_REMOTE - self.remote
        waiting = sorted(self._first_in_line(), key=self._place) if n_free > 0 else []
        for job in [job for job in waiting if job.may_go and self._departures.time(job) <= now][:n_free]:
            self._departures.ask(job, now)
            self._take_turn(job)

    def _recall(self, job: Job, now: float) -> None:
        """Takes a job without a token back from the engine, for the fallback server."""
        if job.at_engine and job.may_go and not (job.pausing or job.cancelling) and job.away.retry_at <= now:
            job.pausing = job.away.recalled = True
            self.commands.append(em.Cancel(job.number, pause=True))

    def fallback_event(self, event: fallback.Event, now: float) -> None:
        """Handles what the fallback server has sent, or that it has failed."""
        job = self._jobs.get(event.job)
        if job is None or job.away.attempt != event.attempt:
            return  # the job has ended, or is elsewhere
        try:
            if self._departures.take(job, event, now):
                self._end(job, "done")
        except Overloaded as error:
            self._drop_unread(job, error)
        if isinstance(event, fallback.Broken) and self._off is not None and not job.may_go:
            message = f"the fallback server failed ({event.error.message}), and {self._off.message}"
            self._fail(job, EngineDied(message, **self._off.detail))
        self._fill_slots()

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_ready(self) -> None:
        """Called when an engine can take jobs. Gives it jobs that wait."""
        self._engine_ready = True
        self._off = None
        self._fill_slots()

    def engine_lost(self, death: FrameshardError | None) -> None:
        """Called when the engine has ended. Its jobs wait for the next engine, except for jobs that are being cancelled
        and jobs with too many deaths.

        :param death: why it died; None if it was told to end.
        """
        self._engine_ready = False
        self._departures.nothing_read()
        self._leaving.clear()
        self.commands.clear()
        for job in list(self._jobs.values()):
            job.deaths += job.at_engine and death is not None
            job.at_engine = job.pausing = False
            if job.cancelling:
                self._cancelled(job)
            elif death is not None and job.deaths >= MAX_DEATHS:
                blame = f"the engine died {job.deaths} times over this job, the last time because: {death.message}"
                self._fail(job, EngineDied(blame, **{**death.detail, "reason": death.name}))

    def engine_off(self, error: FrameshardError) -> None:
        """Called when no engine can be started: ends all jobs that the fallback server cannot answer."""
        self._off = error
        for job in list(self._jobs.values()):
            if not job.may_go and not job.away.attempt:
                self._fail(job, error)

    def engine_woken(self) -> None:
        """Called when an engine is started again."""
        self._off = None

    def fail(self, number: int, error: FrameshardError) -> None:
        """Ends a job, if it has not ended."""
        if number in self._jobs:
            self._fail(self._jobs[number], error)

    def fail_all(self, error: FrameshardError) -> None:
        """Ends all jobs."""
        for job in list(self._jobs.values()):
            self._fail(job, error)

    def engine_event(self, event: em.JobEvent) -> bool:
        """Handles an event of a job.

        :returns: true if it is a new token.
        :raises BadMessage: the event is impossible in the job's state.
        """
        if event.job in self._leaving:
            if isinstance(event, _TERMINAL):
                del self._leaving[event.job]
                self._fill_slots()
            return False
        job = self._jobs.get(event.job)
        if job is None:
            return False  # the job has ended here in the meantime
        kind = em.NAMES[type(event)]
        if kind not in states.JOB[job.state]:
            raise BadMessage(f"the engine sent {kind!r} for a job that is {job.state.value}")
        self._take(job, event)
        return isinstance(event, em.Token)

    def _take(self, job: Job, event: em.JobEvent) -> None:
        connection, job_id = job.connection, job.request.job
        if isinstance(event, em.Started):
            if not job.n_prompt:
                job.n_prompt, job.n_reused = event.n_prompt, event.n_reused
            if job.away.given is not None:
                job.away.given.n_tokens = event.n_given
            if job.state is states.Job.QUEUED:
                connection.started(job_id, job.n_prompt, job.seed)
            elif job.paused:
                job.paused = False
                connection.unpaused(job_id)
            job.history = job.history or event.history
            job.state = states.JOB[job.state]["started"]
        elif isinstance(event, em.Progress):
            connection.progress(job_id, event.phase, event.done, event.total)
        elif isinstance(event, em.Token):
            self._take_token(job, event)
        elif isinstance(event, em.Done):
            if not self._deliver_held(job):
                return
            self._departures.remember(job)
            connection.done(
                job_id,
                reason=event.reason,
                n_prompt=job.n_prompt,
                n_generated=job.n_generated,
                n_reused=job.n_reused,
                n_left=event.n_left,
                n_thought=job.n_thought,
                prefill_s=event.prefill_s,
                decode_s=event.decode_s,
            )
            self._end(job, "done")
        elif isinstance(event, em.Failed):
            self._fail(job, event.error.exception())
        elif job.pausing and not job.cancelling:
            job.at_engine = job.pausing = False
            if job.state is states.Job.RUNNING and not job.paused:
                job.paused = True
                connection.paused(job_id)
            self._fill_slots()
        else:
            self._cancelled(job)

    def _take_token(self, job: Job, token: em.Token) -> None:
        if token.n != job.n_generated:
            raise BadMessage(f"the engine sent token {token.n} after {job.n_generated} tokens")
        job.tokens.append(token.id)
        job.undelivered += 1
        job.deaths = 0
        job.due = math.inf
        self._deliver(job, Marked(token.text, token.ends), token.thought, token.calls)
        if not job.progressed:
            job.progressed = True
            self._fill_slots()

    def _deliver_held(self, job: Job) -> bool:
        """Sends what was held back of a text from the fallback server if the engine had nothing to add to it.

        :returns: false if the job has failed.
        """
        if job.away.given is None or job.tokens:
            return True
        return self._deliver(job, job.away.given.end())

    def _deliver(self, job: Job, marked: Marked, thought: str = "", calls: Sequence[m.ToolCall] = ()) -> bool:
        """Sends text, thought and calls.

        :returns: false if the job has failed, because its client does not read.
        """
        try:
            job.deliver(marked, thought, calls)
        except Overloaded as error:
            self._drop_unread(job, error)
            return False
        return True

    def _drop_unread(self, job: Job, error: Overloaded) -> None:
        job.connection.failed(job.request.job, error)
        self._leave(job)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        if not self._engine_ready:
            return
        self._inherit_priorities()
        while not self._on_trial() and (job := self._next()) is not None:
            if self.running - self._ending >= self._slots and not self._pause_for(job):
                return
            job.at_engine, job.progressed, job.rank = True, False, job.priority
            self.commands.append(job.command())
            self._take_turn(job)
            self._inherit_priorities()

    def _take_turn(self, job: Job) -> None:
        """Notes that a job goes to the engine or to the fallback server."""
        if job.turn == 0:
            self._turn += 1
            job.turn = self._turns[job.connection] = self._turn
        for other in self._jobs.values():
            waits = not other.at_engine and not other.away.attempt
            other.overtaken += waits and other.number < job.number and other.order > job.order

    def _inherit_priorities(self) -> None:
        """Gives each job at least the priority of the later jobs of its conversation. Tells the engine of changes."""
        highest: dict[str, int] = {}
        for job in reversed(self._jobs.values()):
            if job.conversation is not None:
                job.inherited = highest.get(job.conversation, em.IDLE_PRIORITY)
                highest[job.conversation] = max(job.inherited, job.priority)
            if job.at_engine and job.rank != job.priority:
                job.rank = job.priority
                self.commands.append(em.SetPriority(job.number, job.rank))

    def _next(self) -> Job | None:
        """Returns the next job for a free slot, None if no job can run."""
        waiting = filter(self._departures.stays, self._first_in_line())
        return min(waiting, key=self._place, default=None)

    def _first_in_line(self) -> list[Job]:
        """Returns the jobs that wait, in the order of their numbers. The jobs of one conversation run one at a time, in
        order."""
        jobs = self._jobs.values()
        taken = {job.conversation for job in jobs if job.at_engine or job.away.attempt}
        taken |= {job.conversation for job in self._leaving.values()}
        waiting: list[Job] = []
        for job in jobs:
            out = job.at_engine or job.away.attempt
            if not out and (job.conversation is None or job.conversation not in taken):
                waiting.append(job)
                taken.add(job.conversation)
        return waiting

    def _place(self, job: Job) -> tuple[object, ...]:
        """The order of jobs that wait. Jobs that were in an engine when it died come first, then those of the highest
        priority, then those with the earliest deadline. Among equals come the jobs that had their turn before, then the
        oldest job of the client whose last turn is longest ago."""
        turn = job.turn or self._turns.get(job.connection, 0)
        return job.deaths == 0, job.order, job.turn == 0, turn, job.number

    @property
    def _ending(self) -> int:
        """How many jobs in the engine are about to leave it. The next ones are sent to it already, so that they are
        prepared while the decode runs after which the slots are free."""
        ending = (job for job in self._jobs.values() if job.at_engine and (job.pausing or job.cancelling))
        return sum(1 for _ in ending) + len(self._leaving)

    def _pause_for(self, job: Job) -> bool:
        """Pauses the running job of the lowest priority, if its priority is below that of ``job``.

        :returns: whether there is such a job.
        """
        running = (job for job in self._jobs.values() if job.at_engine and not (job.pausing or job.cancelling))
        last = min(running, key=lambda other: (other.rank, -other.turn), default=None)
        if last is None or last.rank >= job.priority:
            return False
        last.pausing = True
        self.commands.append(em.Cancel(last.number, pause=True))
        return True

    def _on_trial(self) -> bool:
        """Returns true if no further job may enter the engine, because after a death they go back one at a time: some
        job has deaths, and a job in the engine has produced nothing new."""
        jobs = self._jobs.values()
        unproven = bool(self._leaving) or any(job.at_engine and not job.progressed for job in jobs)
        return unproven and any(job.deaths for job in jobs)

    def _cancel(self, job: Job) -> None:
        if not job.at_engine:
            self._cancelled(job)
        elif not job.cancelling:
            job.cancelling = True
            if not job.pausing:
                self.commands.append(em.Cancel(job.number))

    def _leave(self, job: Job) -> None:
        """Ends the job for its client, and cancels it in the engine."""
        self._forget(job)
        if job.at_engine:
            self._leaving[job.number] = job
            if not (job.cancelling or job.pausing):
                self.commands.append(em.Cancel(job.number))

    def _fail(self, job: Job, error: FrameshardError) -> None:
        job.connection.failed(job.request.job, error)
        self._end(job, "failed")

    def _cancelled(self, job: Job) -> None:
        job.connection.cancelled(job.request.job)
        self._end(job, "cancelled")

    def _end(self, job: Job, event: str) -> None:
        """Ends the job after its last event was added."""
        job.state = states.JOB[job.state][event]
        self._forget(job)
        self._fill_slots()

    def _forget(self, job: Job) -> None:
        del self._jobs[job.number]
        self.held_bytes -= _size(job.request)
        self._departures.forget(job)
        job.images.close()


def _size(value: object) -> int:
    """The bytes of memory of a request, or of a part of it."""
    parts = vars(value).values() if dataclasses.is_dataclass(value) else value if isinstance(value, tuple) else ()
    return sys.getsizeof(value) + sum(map(_size, parts))
