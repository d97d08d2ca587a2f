"""Plays a trace with a sidecar, as a game would, and checks the lease.

One task writes the frame block and sleeps for the length of each frame; it does not use the GPU. One task changes the
budget, one samples the VRAM in use, and each conversation has a task. Only one change of the budget is under way at a
time.

The sidecar keeps its lease if no sample is above the budgets in force, of VRAM and of host memory. While a change is
under way, until its release or its deadline, the larger one of the two budgets counts. Every job must end as its
question says.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

import frameshard
from frameshard.errors import BadArgument, BudgetBelowFloor, DeadlineMissed, FrameshardError, JobCancelled
from frameshard.frame import FrameBlock
from frameshard.simulation.trace import Ask, Cancel, Draw, Host, Lease, Trace, Vram
from frameshard.wire import messages as m

MIB = 1 << 20
SAMPLE_S = 1 / 60
PAGE_S = 0.001
DRAIN_S = 300.0
"""The most seconds that jobs may take after the end of the trace."""

LEAST_SHARE = 0.05
"""The smallest budget is the floor plus this share of the range from floor to full. On a real GPU the floor changes a
little, so it is not used itself."""


@dataclass(frozen=True)
class Sample:
    """The sidecar's figures at one moment.

    :param at: the moment is between `at` and `until`, in seconds since the start.
    :param used_bytes: VRAM in its ledger.
    :param observed_bytes: VRAM that the driver counts; None if the driver does not report it.
    :param frame_ms: the time of the last frame; None while nothing is drawn.
    :param host_used_bytes: host memory of all processes, by the engine's count; 0 while there is no engine.
    """

    at: float
    until: float
    used_bytes: int
    resident_bytes: int
    observed_bytes: int | None
    tokens_per_second: float
    frame_ms: float | None
    host_used_bytes: int = 0


@dataclass
class Change:
    """A change of the lease.

    :param budget_bytes: the new budget. If the new state is not active, it is the most that the sidecar may hold in
        that state.
    :param host_budget_bytes: the host budget with it; 0 for no limit.
    :param released_s: seconds from the request until the change was in force; None if it missed its deadline.
    """

    at: float
    budget_bytes: int
    state: m.LeaseState
    deadline_s: float
    by: str
    released_s: float | None = None
    host_budget_bytes: int = 0


@dataclass
class Job:
    """A question and how its job ended: ``stop``, ``length``, ``cancelled`` or the name of an error, whose message is
    ``error``."""

    at: float
    who: str
    question: str
    cancelled: bool = False
    text: str = ""
    outcome: str = ""
    error: str = ""
    n_prompt: int = 0
    n_generated: int = 0
    first_s: float | None = None
    ended_s: float = 0.0


@dataclass
class Recording:
    """The result of a replay. `problems` is empty if the sidecar kept its lease and every job ended as expected."""

    trace: str
    floor_bytes: int
    full_bytes: int
    samples: list[Sample] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    frames_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    host_floor_bytes: int = 0

    @property
    def resumed_s(self) -> list[float]:
        """For each change from another state back to active, the seconds until it was in force."""
        pairs = zip(self.changes, self.changes[1:], strict=False)
        return [b.released_s for a, b in pairs if a.state != "active" == b.state and b.released_s is not None]

    @property
    def tokens(self) -> int:
        return sum(job.n_generated for job in self.jobs)


async def play(client: frameshard.Client, trace: Trace, *, speed: float = 1.0, as_recorded: bool = False) -> Recording:
    """Plays `trace` to its end and waits for its jobs.

    The budgets of the trace are scaled to the model: the largest is enough for the whole model, and the smallest is a
    little above the sidecar's floor.

    :param speed: at 2 the events come twice as fast. Frames and deadlines keep their lengths.
    :param as_recorded: use the budgets of the trace without scaling.
    :raises BadArgument: the device has no VRAM.
    """
    bounds = await client.budget()
    if not bounds.full_bytes:
        raise BadArgument("this device holds no VRAM that could be negotiated: take a GPU, or emulated")
    return await _Player(client, trace, bounds, speed, as_recorded, await client.frame_block()).run()


class _Player:
    def __init__(
        self,
        client: frameshard.Client,
        trace: Trace,
        bounds: frameshard.Budget,
        speed: float,
        as_recorded: bool,
        block: FrameBlock,
    ) -> None:
        self._client, self._trace, self._bounds, self._block = client, trace, bounds, block
        self._speed, self._as_recorded = speed, as_recorded
        self._recording = Recording(
            trace.name, bounds.floor_bytes, bounds.full_bytes, host_floor_bytes=bounds.host_floor_bytes
        )
        self._draw: Draw | None = None
        self._drawing = trio.Event()
        self._state: m.LeaseState = "active"
        self._offer = bounds.full_bytes
        self._host_offer = bounds.host_budget_bytes
        self._driver_bytes = 0  # VRAM of the driver's context; a parked sidecar keeps it
        self._frame_ms: float | None = None
        self._frame_at = 0.0
        self._speaking: dict[str, frameshard.Stream] = {}
        self._start = time.monotonic()

    async def run(self) -> Recording:
        recording = self._recording
        async with trio.open_nursery() as others:
            others.start_soon(self._frames)
            others.start_soon(self._sample)
            with trio.move_on_after(self._trace.seconds / self._speed + DRAIN_S):
                async with trio.open_nursery() as work:
                    await self._script(work)
            others.cancel_scope.cancel()
        recording.seconds = self._now()
        for job in recording.jobs:
            if job.outcome not in ("stop", "length", *(("cancelled",) * job.cancelled)):
                end = f"ended with {job.outcome}: {job.error}" if job.error else job.outcome or "never ended"
                recording.problems.append(f"the question to {job.who} at {job.at:.2f} s {end}")
        recording.problems += over_the_lease(recording, self._bounds.vram_budget_bytes, self._bounds.host_budget_bytes)
        return recording

    def _now(self) -> float:
        return time.monotonic() - self._start

    async def _until(self, at: float) -> None:
        await trio.sleep(max(0.0, at / self._speed - self._now()))

    # ---- the script -------------------------------------------------------------------------------------------------

    async def _script(self, work: trio.Nursery) -> None:
        negotiation, changes = trio.open_memory_channel[Vram | Host | Lease](math.inf)
        work.start_soon(self._negotiate, changes)
        talks: dict[str, trio.MemorySendChannel[tuple[Job, int]]] = {}
        with contextlib.ExitStack() as channels:
            channels.enter_context(negotiation)
            for event in self._trace.events:
                await self._until(event.at)
                if isinstance(event, (Vram, Host, Lease)):
                    negotiation.send_nowait(event)
                elif isinstance(event, Ask):
                    if event.who not in talks:
                        talks[event.who], questions = trio.open_memory_channel[tuple[Job, int]](math.inf)
                        channels.enter_context(talks[event.who])
                        work.start_soon(self._talk, questions)
                    job = Job(self._now(), event.who, event.text)
                    self._recording.jobs.append(job)
                    talks[event.who].send_nowait((job, event.max_tokens))
                elif isinstance(event, Cancel):
                    await self._cancel(event.who)
                else:
                    self._draw = event if isinstance(event, Draw) else None
                    self._drawing.set()
            await self._until(self._trace.seconds)

    async def _cancel(self, who: str) -> None:
        for job in self._recording.jobs:
            job.cancelled = job.cancelled or (job.who == who and not job.outcome)
        if who in self._speaking:
            await self._speaking[who].cancel()

    # ---- frames -----------------------------------------------------------------------------------------------------

    async def _frames(self) -> None:
        with self._block:
            try:
                while True:
                    await self._frame()
            finally:
                self._block.idle()

    async def _frame(self) -> None:
        draw = self._draw
        if draw is None:
            self._block.idle()
            self._frame_ms = None
            self._drawing = trio.Event()
            await self._drawing.wait()
            self._frame_at = self._now()
            return
        began = self._now()
        self._block.target_frame_ms = draw.frame_ms
        self._block.begin()
        await trio.sleep(draw.gpu_busy_ms / 1e3)
        self._block.end(gpu_busy_ms=draw.gpu_busy_ms)
        self._frame_at = max(self._frame_at + draw.frame_ms / 1e3, self._now())  # a late frame delays the next
        await trio.sleep(max(0.0, self._frame_at - self._now()))
        self._frame_ms = 1e3 * (self._now() - began)
        self._recording.frames_ms.append(self._frame_ms)

    # ---- VRAM -------------------------------------------------------------------------------------------------------

    def _offered(self, event: Vram) -> int:
        """The budget for the sidecar in bytes."""
        left = self._trace.card_mb - event.game_mb
        if self._as_recorded:
            return max(1, left * MIB)  # 0 would mean no limit
        offers = self._trace.offers()
        least, most = min(offers), max(offers)
        share = 1.0 if most == least else LEAST_SHARE + (1 - LEAST_SHARE) * (left - least) / (most - least)
        floor, full = self._bounds.floor_bytes, self._bounds.full_bytes
        return floor + int(share * (full - floor))

    async def _host_offered(self, event: Host) -> int:
        """The host budget for the sidecar in bytes; 0 for no limit."""
        if event.above_floor_mb is None:
            return 0
        return (await self._client.budget()).host_floor_bytes + event.above_floor_mb * MIB

    async def _negotiate(self, events: trio.MemoryReceiveChannel[Vram | Host | Lease]) -> None:
        async for event in events:
            by, before = "message", (self._state, self._offer, self._host_offer)
            if isinstance(event, Lease):
                self._state = event.state
            elif isinstance(event, Host):
                self._host_offer = await self._host_offered(event)
            else:
                self._offer = self._offered(event)
                by = event.by if self._state == "active" else "message"
            held = self._offer if self._state == "active" else self._driver_bytes * (self._state == "parked")
            change = Change(
                self._now(), held, self._state, event.deadline_ms / 1e3, by, host_budget_bytes=self._host_offer
            )
            self._recording.changes.append(change)
            try:
                if by == "page":
                    await self._set_by_page(change)
                else:
                    await self._client.set_budget(
                        self._offer / MIB,
                        timeout_s=change.deadline_s,
                        observe=False,
                        state=self._state,
                        host_budget_mb=self._host_offer / MIB,
                    )
                change.released_s = self._now() - change.at
            except FrameshardError as error:
                if not isinstance(error, DeadlineMissed):
                    self._recording.changes.remove(change)  # refused: the lease before stays in force
                    self._state, self._offer, self._host_offer = before
                self._recording.problems.append(f"the lease asked for at {change.at:.2f} s: {error.message}")

    async def _set_by_page(self, change: Change) -> None:
        """Sets the budget through the frame block.

        :raises DeadlineMissed: the budget is in force, but too late.
        :raises BudgetBelowFloor: the sidecar refuses the budget.
        """
        generation = self._block.set_budget(change.budget_bytes)
        with trio.move_on_after(change.deadline_s):
            while self._block.answer.applied_generation < generation:
                if self._block.answer.refused_generation >= generation:
                    raise BudgetBelowFloor("the budget in the page was refused")
                await trio.sleep(PAGE_S)
            return
        raise DeadlineMissed(f"the budget in the page was not in force after {change.deadline_s:g} s")

    # ---- conversations ----------------------------------------------------------------------------------------------

    async def _talk(self, questions: trio.MemoryReceiveChannel[tuple[Job, int]]) -> None:
        async for job, max_tokens in questions:
            try:
                await self._answer(job, max_tokens)
            except JobCancelled:
                job.outcome = "cancelled"
            except FrameshardError as error:
                job.outcome, job.error = error.name, error.message
            finally:
                self._speaking.pop(job.who, None)
                job.ended_s = self._now()

    async def _answer(self, job: Job, max_tokens: int) -> None:
        if job.cancelled:
            raise JobCancelled("it was no longer wanted when its turn came")
        sampling = frameshard.Sampling(max_tokens=max_tokens, temperature=0.0)
        async with self._client.ask(job.question, conversation=job.who, sampling=sampling) as stream:
            self._speaking[job.who] = stream
            async for delta in stream:
                if job.first_s is None:
                    job.first_s = self._now() - job.at
                job.text += delta.text
                job.n_generated += delta.tokens
        assert stream.result is not None
        job.n_prompt, job.n_generated = stream.result.n_prompt, stream.result.n_generated
        job.outcome = stream.result.reason

    # ---- samples ----------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            at = self._now()
            try:
                engine = (await self._client.stats()).engine or {}
            except FrameshardError as error:
                self._recording.problems.append(f"no figures at {at:.2f} s: {error.message}")
                return
            self._driver_bytes = engine.get("overhead_bytes", self._driver_bytes)
            self._recording.samples.append(
                Sample(
                    at,
                    self._now(),
                    engine.get("used_bytes", 0),
                    engine.get("resident_bytes", 0),
                    engine.get("observed_bytes"),
                    engine.get("tokens_per_second", 0.0),
                    self._frame_ms,
                    engine.get("host", {}).get("used_bytes", 0),
                )
            )
            await trio.sleep(max(0.0, at + SAMPLE_S - self._now()))


def over_the_lease(recording: Recording, first_budget_bytes: int, first_host_bytes: int) -> list[str]:
    """One line of text for each budget that a sample exceeds."""
    vram = [(change, change.budget_bytes) for change in recording.changes]
    host = [(change, change.host_budget_bytes or math.inf) for change in recording.changes]
    return [
        *_over(vram, first_budget_bytes or math.inf, [(each, each.used_bytes) for each in recording.samples], "lease"),
        *_over(
            host,
            first_host_bytes or math.inf,
            [(each, each.host_used_bytes) for each in recording.samples],
            "host lease",
        ),
    ]


def _over(
    changes: Sequence[tuple[Change, float]], first_bytes: float, samples: Sequence[tuple[Sample, int]], what: str
) -> list[str]:
    """
    The largest excess since each change.

    :param changes: the changes with the bytes that each allows.
    :param samples: the samples with the bytes that are held.
    """
    found: dict[float, tuple[float, str]] = {}
    for sample, used_bytes in samples:
        latest, allowed = 0.0, first_bytes
        for change, budget_bytes in changes:
            if change.at > sample.until:
                break
            settled = change.at + min(change.deadline_s, change.released_s or math.inf) <= sample.at
            allowed = budget_bytes if settled else max(allowed, budget_bytes)
            latest = change.at
        over = (used_bytes - allowed) / MIB
        if over > max(0.0, found.get(latest, (0.0, ""))[0]):
            found[latest] = over, f"{over:.1f} MiB above the {what} at {sample.at:.2f} s"
    return [problem for _, problem in found.values()]
