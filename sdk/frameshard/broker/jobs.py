"""Jobs of all clients: who waits, who runs, and how they go on after an engine's death.

Decides and does no I/O: what the engine shall do is left in :attr:`Jobs.ops`, what clients shall hear goes to their
connections. A job is replayed from its prompt, its seed and the tokens that it has produced, so its client sees one
stream without a gap. In stream-only mode the text is that of an undisturbed run: the engine draws token i from
(seed, i) alone and repeats the batch shapes of the first run, which it names in ``history``.

Deaths count per job: one that was in the engine at :data:`MAX_DEATHS` deaths without a new token of its own in between
fails with the engine's reason, and the others go on. So that they do not share its blame, jobs that were in an engine
when it died go back one at a time: the next one when the one before has said a new token, or has ended. At any death
after the first, at most one job in the engine has said nothing new, and it is the one to blame.

A free slot goes to the client whose last turn is the longest ago, so nobody waits behind another one's whole queue. A
job that runs is not interrupted.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import Any

from frameshard.broker.images import NO_IMAGES, HeldImages, Images
from frameshard.errors import BadArgument, BadMessage, EngineDied, FrameshardError, Overloaded, UnknownJob, from_wire
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection

Op = dict[str, Any]

MAX_DEATHS = 2


@dataclass(eq=False)
class Job:
    """One job. `number` is its name at the engine, where clients' numbers may collide."""

    number: int
    connection: ServerConnection
    request: m.Submit
    seed: int
    state: states.Job = states.Job.QUEUED
    at_engine: bool = False
    cancelling: bool = False
    tokens: list[int] = field(default_factory=list)
    unsaid: int = 0
    """Tokens since the last delta: some have no text of their own."""
    n_prompt: int = 0
    history: Any = None
    deaths: int = 0
    """Of engines that it was in, since its last new token."""
    speaking: bool = False
    """It has said a new token in the engine where it is now."""
    turn: int = 0
    """When it was first handed to an engine, counted over all jobs; 0: not yet."""
    images: HeldImages = NO_IMAGES

    @property
    def talk(self) -> str | None:
        """Its conversation, as the engine knows it: clients do not share conversations, whatever they call them."""
        name = self.request.conversation
        return None if name is None else f"{self.connection.session}/{name}"

    def op(self) -> Op:
        """What the engine needs to run it, from the start or from where it was."""
        request = self.request
        op: Op = {
            "op": "submit",
            "job": self.number,
            "kind": request.kind,
            "params": {**dataclasses.asdict(request.sampling), "seed": self.seed, "stop": list(request.sampling.stop)},
        }
        if request.kind == "chat":
            op["messages"] = [dataclasses.asdict(message) for message in request.messages]
        else:
            op["prompt"] = request.prompt
        if self.images.specs:
            op["images"] = list(self.images.specs)
        if self.talk is not None:
            op["conversation"] = self.talk
        if self.tokens:
            op["resume"] = list(self.tokens)
        if self.history is not None:
            op["history"] = self.history
        return op


class Jobs:
    """All jobs that have not ended."""

    def __init__(self, *, slots: int, max_jobs: int, max_client_jobs: int) -> None:
        self._slots = slots
        self._max_jobs = max_jobs
        self._max_client_jobs = max_client_jobs
        self._numbers = 0
        self._jobs: dict[int, Job] = {}
        self._leaving: dict[int, str | None] = {}  # ended for their client, still at the engine; their conversations
        self._turn = 0
        self._turns: dict[ServerConnection, int] = {}  # each client's last one
        self._engine_ready = False
        self._images = Images()
        self.ops: list[Op] = []
        """For the engine, in order; the caller takes them out."""

    @property
    def open(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def queued(self) -> int:
        return sum(not job.at_engine for job in self._jobs.values())

    @property
    def running(self) -> int:
        """Jobs at the engine, those that are leaving included."""
        return sum(job.at_engine for job in self._jobs.values()) + len(self._leaving)

    # ---- clients ----------------------------------------------------------------------------------------------------

    def submit(self, connection: ServerConnection, request: m.Submit) -> None:
        """Takes a job. The same request again (after a resumption) changes nothing. Raises :class:`Overloaded`, and
        :class:`BadArgument` for images that are not what the request says."""
        if request.job in connection.jobs:
            return
        if len(self._jobs) >= self._max_jobs:
            raise Overloaded(f"{self._max_jobs} jobs wait already", max_jobs=self._max_jobs)
        if len(list(connection.jobs)) >= self._max_client_jobs:
            raise Overloaded("this client has too many jobs open", max_jobs=self._max_client_jobs)
        seed = secrets.randbits(32) if request.sampling.seed is None else request.sampling.seed
        images = self._images.hold(request.images)
        self._numbers += 1
        self._jobs[self._numbers] = Job(self._numbers, connection, request, seed, images=images)
        connection.open(request.job, request.timeline, request.window)
        self._fill_slots()

    def cancel(self, connection: ServerConnection, job_id: int) -> None:
        """Ends a job early. Raises :class:`UnknownJob`; a job whose end is on its way to the client is known."""
        for job in self._jobs.values():
            if job.connection is connection and job.request.job == job_id:
                self._cancel(job)
                return
        if job_id not in connection.jobs:
            raise UnknownJob(f"no job {job_id} is open", job=job_id)

    def drop(self, connection: ServerConnection, error: FrameshardError | None = None) -> None:
        """Ends all jobs of a client: with `error`, or without a word when nobody is there to hear it."""
        self._turns.pop(connection, None)
        for job in list(self._jobs.values()):
            if job.connection is connection:
                if error is not None:
                    connection.failed(job.request.job, error)
                self._leave(job)

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_ready(self) -> None:
        """An engine can take jobs: those of its predecessor first, since they are the oldest."""
        self._engine_ready = True
        self._fill_slots()

    def engine_lost(self, death: FrameshardError | None) -> None:
        """The engine is gone; its jobs wait for the next one, except those that were to end anyway and those that are
        to blame. `death` says why it died, None that its end was asked for."""
        self._engine_ready = False
        self._leaving.clear()
        self.ops.clear()
        for job in list(self._jobs.values()):
            job.deaths += job.at_engine and death is not None
            job.at_engine = False
            if job.cancelling:
                self._end(job, "cancelled")
            elif death is not None and job.deaths >= MAX_DEATHS:
                blame = f"the engine died {job.deaths} times over this job, the last time because: {death.message}"
                self._end(job, "failed", EngineDied(blame, **{**death.detail, "reason": death.name}))

    def fail_all(self, error: FrameshardError) -> None:
        """There will be no engine."""
        for job in list(self._jobs.values()):
            self._end(job, "failed", error)

    def engine_event(self, event: dict[str, Any]) -> bool:
        """Takes a job's event; true for a new token. Raises :class:`BadMessage` when the engine makes no sense."""
        kind, number = event.get("ev"), event.get("job")
        if number in self._leaving:
            if kind in ("done", "failed", "cancelled"):
                del self._leaving[number]
                self._fill_slots()
            return False
        job = self._jobs.get(number) if type(number) is int else None
        if job is None:
            return False  # its cancel crossed with its end
        if type(kind) is not str or kind not in states.JOB[job.state]:
            raise BadMessage(f"the engine says {kind!r} of a job that is {job.state.value}")
        try:
            self._take(job, kind, event)
        except (KeyError, TypeError, ValueError, BadArgument) as error:
            raise BadMessage(f"the engine's {kind!r} is wrong: {error!r}") from None
        return kind == "token"

    def _take(self, job: Job, kind: str, event: dict[str, Any]) -> None:
        if kind == "started":
            if job.state is states.Job.QUEUED:
                job.n_prompt = event["n_prompt"]
                job.connection.started(job.request.job, job.n_prompt)
            if job.history is None:
                job.history = event.get("history")
            job.state = states.JOB[job.state][kind]
        elif kind == "progress":
            job.connection.progress(job.request.job, event["phase"], event["done"], event["total"])
        elif kind == "token":
            if event["n"] != len(job.tokens):
                raise ValueError(f"token {event['n']} after {len(job.tokens)} tokens")
            job.tokens.append(event["id"])
            job.unsaid += 1
            job.deaths = 0
            if event["text"]:
                self._say(job, event["text"])
            if not job.speaking:
                job.speaking = True
                self._fill_slots()
        elif kind == "done":
            self._end(job, kind, event=event)
        elif kind == "failed":
            self._end(job, kind, from_wire(event["error"]))
        else:
            self._end(job, kind)

    def _say(self, job: Job, text: str) -> None:
        tokens, job.unsaid = job.unsaid, 0
        try:
            job.connection.delta(job.request.job, text, tokens)
        except Overloaded as error:
            job.connection.failed(job.request.job, error)
            self._leave(job)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _fill_slots(self) -> None:
        if not self._engine_ready:
            return
        free = self._slots - self.running
        while free > 0 and not self._on_trial() and (job := self._next()) is not None:
            if job.turn == 0:
                self._turn += 1
                job.turn = self._turns[job.connection] = self._turn
            job.at_engine, job.speaking = True, False
            self.ops.append(job.op())
            free -= 1

    def _next(self) -> Job | None:
        """Who gets a free slot: a job that had one in an engine before; else the oldest of the client whose last turn
        is the longest ago. A conversation has one slot at a time, in the order of its jobs."""
        talking = {job.talk for job in self._jobs.values() if job.at_engine} | set(self._leaving.values())
        waiting = (job for job in self._jobs.values() if not job.at_engine)
        return min(
            (job for job in waiting if job.talk is None or job.talk not in talking),
            key=lambda job: (
                job.deaths == 0,
                job.turn == 0,
                job.turn or self._turns.get(job.connection, 0),
                job.number,
            ),
            default=None,
        )

    def _on_trial(self) -> bool:
        """While jobs of a dead engine have said nothing new, no job enters beside another that has said nothing."""
        jobs = self._jobs.values()
        silent = bool(self._leaving) or any(job.at_engine and not job.speaking for job in jobs)
        return silent and any(job.deaths for job in jobs)

    def _cancel(self, job: Job) -> None:
        if not job.at_engine:
            self._end(job, "cancelled")
        elif not job.cancelling:
            job.cancelling = True
            self.ops.append({"op": "cancel", "job": job.number})

    def _leave(self, job: Job) -> None:
        """The job is over for its client; the engine may have to be told."""
        self._forget(job)
        if job.at_engine:
            self._leaving[job.number] = job.talk
            if not job.cancelling:
                self.ops.append({"op": "cancel", "job": job.number})

    def _end(
        self, job: Job, kind: str, error: FrameshardError | None = None, event: dict[str, Any] | None = None
    ) -> None:
        connection, job_id = job.connection, job.request.job
        if event is not None:
            connection.done(
                job_id,
                reason=event["reason"],
                n_prompt=job.n_prompt,
                n_generated=len(job.tokens),
                prefill_s=event["prefill_s"],
                decode_s=event["decode_s"],
            )
        elif error is not None:
            connection.failed(job_id, error)
        else:
            connection.cancelled(job_id)
        job.state = states.JOB[job.state][kind]
        self._forget(job)
        self._fill_slots()

    def _forget(self, job: Job) -> None:
        del self._jobs[job.number]
        job.images.close()
