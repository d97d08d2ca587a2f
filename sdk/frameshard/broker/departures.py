"""The jobs that go to the fallback server: which and when, and what its answers do to them.

Jobs without text go there while the engine has no room, and those that the plan cannot answer by their deadline. A job
whose answer has begun stays where it is. If the server breaks off an answer, the engine continues it from that text:
the client has it already, and another server would not go on from it. Before any text the job goes back into the queue.

This module does no I/O: commands for the connections are put into :attr:`Departures.asks`.
"""

from __future__ import annotations

import math

from frameshard.broker import fallback
from frameshard.broker.fallback import Given
from frameshard.broker.job import Job
from frameshard.wire import messages as m
from frameshard.wire import states

MAX_CONVERSATIONS = 256
"""So many conversations are remembered, for predictions."""


class Departures:
    """
    :param model: the name of the fallback server's model; empty: there is no such server.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.room = True
        """The sidecar has VRAM and an engine for jobs."""
        self.asks: list[fallback.Command] = []
        self._attempts = 0
        self._read: dict[str, int] = {}
        """How many tokens the engine has read of the conversations that ran last."""

    def may_go(self, request: m.Submit) -> bool:
        """Whether the job of this request may go to the server."""
        return bool(self.model) and fallback.may_go(request)

    def stays(self, job: Job) -> bool:
        """True if a waiting job is for the engine's next free slot; false if it is for the fallback server."""
        return not job.may_go or (self.room and not job.away.recalled)

    def time(self, job: Job) -> float:
        """The time from which on a job that waits goes to the server."""
        stays_until = job.away.late_at if self.room and not job.away.recalled else 0.0
        return max(job.away.retry_at, stays_until)

    def ask(self, job: Job, now: float) -> None:
        """Sends a job to the server."""
        self._attempts += 1
        job.away.attempt, job.away.given = self._attempts, Given(job.request, now)
        body = fallback.question(job.request, self.model, job.seed)
        self.asks.append(fallback.Ask(self._attempts, job.number, job.request, body))

    def forget(self, job: Job) -> None:
        """Called when a job has ended."""
        if job.away.attempt:
            self.asks.append(fallback.Drop(job.away.attempt))

    # ---- what the engine has read -----------------------------------------------------------------------------------

    def unread(self, job: Job | None, n_tokens: int) -> int:
        """How many of the tokens of a job's prompt the engine has to read."""
        known = 0 if job is None or job.conversation is None else self._read.get(job.conversation, 0)
        return max(1, n_tokens - known)

    def remember(self, job: Job) -> None:
        """Called when the engine has answered a job."""
        if self.model and job.conversation is not None:
            self._read.pop(job.conversation, None)
            self._read[job.conversation] = job.n_prompt + job.n_generated
            if len(self._read) > MAX_CONVERSATIONS:
                del self._read[next(iter(self._read))]

    def nothing_read(self) -> None:
        """Called when the engine has ended."""
        self._read.clear()

    # ---- what the server sends --------------------------------------------------------------------------------------

    def take(self, job: Job, event: fallback.Event, now: float) -> bool:
        """Takes an event of the attempt that goes on.

        :returns: true if the job is done.
        :raises Overloaded: the client does not read.
        """
        given = job.away.given
        assert given is not None
        if isinstance(event, fallback.Broken):
            _broken(job, given, event, now)
            return False
        _begin(job)
        if isinstance(event, fallback.Finished):
            _finish(job, given, event, now)
            return True
        job.undelivered += 1
        job.deliver(given.add(event.text, now))
        if given.stopped:
            _finish(job, given, fallback.Finished(event.attempt, event.job, "stop", 0, 0), now)
        return given.stopped


def _begin(job: Job) -> None:
    job.due = math.inf
    if job.state is states.Job.QUEUED:
        job.connection.started(job.request.job, 0, job.seed, remote=True)
    elif job.paused:
        job.paused = False
        job.connection.unpaused(job.request.job)
    job.state = states.JOB[job.state]["started"]


def _finish(job: Job, given: Given, event: fallback.Finished, now: float) -> None:
    job.deliver(given.end(), calls=fallback.with_ids(event.calls, job.request.messages))
    first_at = given.first_at if given.n_pieces else now
    job.connection.done(
        job.request.job,
        reason=event.reason,
        n_prompt=event.n_prompt,
        n_generated=max(event.n_generated, given.n_pieces),  # a part has a token or more
        prefill_s=first_at - given.started_at,
        decode_s=now - first_at,
        remote=True,
    )


def _broken(job: Job, given: Given, event: fallback.Broken, now: float) -> None:
    job.away.may_go = job.away.may_go and not event.refused
    if given.text:
        job.away.attempt = 0
        job.paused = True
        job.connection.paused(job.request.job)
    else:
        job.away.failed(now)
