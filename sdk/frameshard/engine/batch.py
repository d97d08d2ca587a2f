"""Scheduling: chooses which tokens of which jobs to decode next, and returns the events of each decode.

Each running job has one sequence. A decode step decodes the last token of every job that generates. Prompts are
prefilled one job at a time, in chunks of ``n_ubatch`` tokens. Chunks and decode steps alternate, so a long prompt does
not stop the other jobs. An image in a prompt takes two turns: the first encodes it, the second prefills its embeddings.
A decode is aborted when a more urgent job comes, and runs again later (:mod:`frameshard.engine.inflight`).

Speculative decoding: a decode step includes drafted tokens if the plan predicts more tokens per second with them.
Drafts come from the lookup or from the draft model. Each job uses the source that is expected to yield more tokens; the
time of the draft model is part of that decision. The sampler takes the rows of logits in order, as if each token had
been decoded alone, and stops at the first row where the sampled token is not the drafted one. The cells of the rejected
tokens are removed from the KV cache. So drafts change the speed of an answer, not its text. All sequences of a step get
the same number of tokens. With different numbers llama.cpp would split the step into several graphs and copy all
streamed weights for each.

Resuming after an engine's death: a job comes with the tokens that were sent before (``resume``). They are not sent
again. In planned mode they are prefilled as the end of the prompt: 800 tokens take as long as a prompt of 800 tokens.
The answer continues, but its text may differ from that of an undisturbed run. The last bits of the logits depend on the
kernels, and these depend on the *shapes* in which a sequence was decoded (in chunks or one token at a time). If two
tokens are almost equally likely, these bits decide. Plans and drafts change the shapes too, so planned mode does not
promise the same text in any case.

Stream-only mode promises the same text. A resumed job therefore repeats the shapes of the first run. Its prompt is
decoded in the same chunks (``history``, from the "started" event). Its answer is decoded one token at a time, or with
the same drafts, because drafts depend only on the text. This takes as long as the first run. Prefilling the answer in
chunks was rejected, because whether that gives the same bits depends on the kernels for each type, shape and length of
context. On the CPU it did with Q4_1 weights in all shapes that were tried, and it did not with F16. The same holds for
the number of sequences in a step: where the bits depend on it, a text is the same only if as many jobs generate.

LoRA adapters: llama.cpp applies one set of adapters to a whole graph, so only jobs with equal sets are decoded
together. The sets take turns. To change the set costs time (:mod:`frameshard.engine.adapters`), so a set keeps its turn
for some decodes.

Nothing here waits or does I/O: :meth:`Batcher.step` runs one decode and returns events for the broker.
:mod:`frameshard.engine.request` reads requests, so each job that comes here already has its tokens.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

from frameshard.engine.adapters import NO_ADAPTERS, AdapterSet
from frameshard.engine.answer import Given
from frameshard.engine.draft import DraftModel, DraftState
from frameshard.engine.inflight import InFlight
from frameshard.engine.job import Job, Slot, job_slot
from frameshard.engine.kvstore import KvStore
from frameshard.engine.llama import DecodeAborted, Rows, VramTaken
from frameshard.engine.lookup import best_length
from frameshard.engine.reuse import Reuse
from frameshard.engine.runtime import Runtime
from frameshard.engine.sampling import Sampler
from frameshard.engine.sequences import Shape, pack_shapes
from frameshard.engine.speculation import StepCosts
from frameshard.engine.vision import Picture, Vision
from frameshard.errors import (
    BadArgument,
    BadModel,
    BudgetBelowFloor,
    ContextOverflow,
    FrameshardError,
    OutOfMemory,
    Overloaded,
    internal,
)
from frameshard.plan.plans import GraphSize
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

MAX_QUEUED = 1024
TURN_DECODES = 8
"""If jobs with different sets of adapters generate, one set is decoded so many times before the next one."""

RATE_WINDOW_S = 2.0
TAKEN_S = 3.0
"""For how many seconds the start of a job is repeated if its KV cache gets no memory, and its decodes if other programs
leave too little VRAM. Then it fails."""

TAKEN_PAUSE_S = 0.1
"""The pause before that is repeated."""

READ_S = 0.3
"""Parts of a prompt follow each other at once for so many seconds, if each takes less than that."""

LONG_PROMPT = 1024
"""The progress of a prompt is reported from so many tokens on."""


class _NotFinite(Exception):
    """A row of logits contains NaN or infinity."""


class Batcher:
    """The jobs of one :class:`Runtime`. Only the runtime's thread may call it, except for methods with [any thread]."""

    def __init__(self, runtime: Runtime, vision: Vision | None = None, draft: DraftModel | None = None) -> None:
        self._runtime = runtime
        self._vision = vision
        self._draft = draft
        self._slots = [Slot(seq=seq) for seq in range(runtime.config.n_parallel)]
        device = runtime.device
        pinned = {} if device is None else {"pinned": device.take_pinned}
        self.store = KvStore(runtime.config.kv_cache_bytes, **pinned)
        self.reuse = Reuse(runtime, self._slots, self.store)
        """Which KV cells are where."""
        self._queued: collections.deque[Job] = collections.deque()
        self._turns = 0
        self._read_last = False
        self._set_in_turn: AdapterSet = NO_ADAPTERS
        self._set_turns = self._decodes_left = 0
        self._rate: collections.deque[tuple[float, int]] = collections.deque()
        self._in_flight = InFlight(runtime.abort, runtime.resume)
        self._prompt_tokens = 0
        self._drafted = self._accepted = 0
        self._model_drafted = self._model_accepted = 0
        self._costs = StepCosts(runtime)
        self._taken_since: dict[int, float] = {}  # by job: since when it gets too little memory
        self._start_at = 0.0  # no job starts before: the last one got no memory
        self._refused = False
        """The last decode got no memory, and nobody holds it. Who held it may have freed it meanwhile, so that decode
        runs once more."""
        self.chunk = runtime.n_ubatch
        """The most prompt tokens in one chunk. In stream-only mode a change applies to jobs that start afterwards."""

    # --- requests and figures -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """At least one job waits or runs."""
        return bool(self._queued) or any(slot.job for slot in self._slots)

    @property
    def prefilling(self) -> bool:
        """At least one running job still reads its prompt."""
        return any(slot.job is not None and slot.job.prefilling for slot in self._slots)

    @property
    def decoding(self) -> bool:
        """[any thread] A decode is running right now."""
        return self._in_flight.running

    def statistics(self) -> dict[str, object]:
        """[any thread] The numbers of running jobs, queued jobs and conversations, and the tokens per second of the
        last two seconds. Since the load: prompt tokens, drafted and accepted tokens, and how many of these two are from
        the draft model. And the figures of the KV store."""
        now = time.monotonic()
        recent = [(at, n) for at, n in list(self._rate) if at >= now - RATE_WINDOW_S]
        rate = sum(n for _, n in recent[1:]) / (now - recent[0][0]) if len(recent) > 1 else 0.0
        return {
            "jobs_running": sum(slot.job is not None for slot in self._slots),
            "jobs_queued": len(self._queued),
            "conversations": sum(slot.conversation is not None for slot in self._slots),
            "tokens_per_second": rate,
            "prompt_tokens": self._prompt_tokens,
            "drafted_tokens": self._drafted,
            "accepted_tokens": self._accepted,
            "draft_model_tokens": self._model_drafted,
            "draft_model_accepted": self._model_accepted,
            **self.store.statistics(),
        }

    def add(self, job: Job) -> None:
        """Takes a job.

        :raises BadArgument: the job number is in use, or an adapter of the job is not loaded.
        :raises Overloaded: too many jobs wait.
        """
        if any(job.id == other.id for other in self._jobs()):
            raise BadArgument(f"job {job.id} exists", field="job")
        if len(self._queued) >= MAX_QUEUED:
            raise Overloaded(f"{MAX_QUEUED} jobs wait already")
        job.adapters = self._runtime.adapters.resolve(job.wanted)
        self._queued.append(job)

    def uses(self, adapter: str) -> bool:
        """Whether a job that has not ended uses the adapter."""
        return any(each.name == adapter for job in self._jobs() for each in job.wanted)

    def cancel(self, job_id: int, *, keep: bool = False) -> list[em.JobEvent]:
        """Ends the job. Its conversation keeps the decoded tokens.

        :param keep: the job will be resumed: its cells are put into the KV store.
        :returns: the "cancelled" event; empty if the job has already ended.
        """
        self._in_flight.forget(job_id)
        for job in self._jobs():
            if job.id == job_id:
                if job.slot is None:
                    self._queued.remove(job)
                elif keep:
                    self.reuse.pause(job, job.slot)
                return [self._end(job, em.Cancelled(job.id))]
        return []

    def set_priority(self, job_id: int, priority: int) -> None:
        """Changes the priority of a job, if it has not ended."""
        for job in self._jobs():
            if job.id == job_id:
                job.priority = priority

    def interrupt(self, job_id: int) -> None:
        """[any thread] Stops decoding for this job. The running decode is aborted if no other job takes part in it. The
        caller must call :meth:`cancel` afterwards."""
        self._in_flight.interrupt(job_id)

    def preempt(self, priority: int) -> None:
        """[any thread] A job of this priority is about to be added: a decode of less urgent jobs gives way to it, and
        runs again later."""
        self._in_flight.preempt(priority)

    def step(self) -> list[em.JobEvent]:
        """Starts queued jobs; if none can start, runs one decode.

        :returns: the events of this step.
        :raises FrameshardError: the device failed. The runtime must not be used any more.
        """
        events = self._start_queued()
        if events:
            return events  # the next decode may take long: send these first
        jobs = self._choose()
        if not jobs:
            return events
        self._runtime.adapters.use(jobs[0].adapters)
        first, at = jobs[0], len(job_slot(jobs[0]).tokens)
        picture = first.pictures.get(at) if first.prefilling else None
        # Half an image cannot be decoded again, nor a recurrent state. A draft model would draft from another state.
        can_repeat = picture is None and self._runtime.llama.can_trim and self._draft is None
        if not self._in_flight.begin(jobs, can_repeat=can_repeat):
            return events
        reading = first.prefilling
        batch: list[tuple[Job, list[int]]] = []
        outputs: list[int] = []
        failure: DecodeAborted | FrameshardError | None = None
        again: Sequence[Job] = ()  # the jobs that decode the same again
        encoded = False
        try:
            if picture is not None:
                encoded = self._see(picture, first, at)
            elif reading:
                outputs = self._read(first, at)
            else:
                batch = self._batch_with_drafts(jobs)
                assert len({len(tokens) for _, tokens in batch}) == 1
                outputs = self._runtime.decode([Rows(job_slot(job).seq, tokens, "all") for job, tokens in batch])
        except (DecodeAborted, ContextOverflow, BudgetBelowFloor) as error:
            failure = error
        except VramTaken as error:
            failure, again = error, self._patient(jobs)
        except (BadArgument, OutOfMemory) as error:
            if isinstance(error, OutOfMemory) and self._runtime.aborted:
                failure = DecodeAborted()  # whether a smaller step has room shows when it runs again
            elif picture is not None:
                failure = error
            elif isinstance(error, OutOfMemory) and not self._refused:
                self._refused = True
                failure = DecodeAborted()
            else:
                raise
        self._in_flight.end()
        again = jobs if isinstance(failure, DecodeAborted) else again
        for job in jobs:
            job.gave_way = job in again
        if failure is not None:
            return self._recover(jobs, again, failure)
        self._refused = False
        for job in jobs:
            self._taken_since.pop(job.id, None)
        if encoded:
            done = sum(each.embedding is not None for each in first.pictures.values())
            return [em.Progress(first.id, "encode", done, len(first.pictures))]
        if reading:
            return self._has_read(first, outputs)
        return self._emit_all(batch, outputs, time.monotonic())

    def _recover(
        self, jobs: Sequence[Job], again: Sequence[Job], failure: DecodeAborted | FrameshardError
    ) -> list[em.JobEvent]:
        """Prepares what follows a decode that has failed, and ends the jobs that fail with it.

        :param again: the jobs that decode the same again.
        """
        events: list[em.JobEvent] = []
        for job in jobs:
            slot = job_slot(job)
            if slot.tokens and self._runtime.length(slot.seq) == 0:
                self._begin_again(job, slot)
            # After an abort a job decodes the same again, or is about to be cancelled. A prompt goes on in steps that
            # fit the budget.
            if isinstance(failure, FrameshardError) and job not in again:
                events.append(self._end(job, em.Failed(job.id, m.ErrorInfo.of(failure))))
        return events

    def _has_read(self, job: Job, outputs: Sequence[int]) -> list[em.JobEvent]:
        """The events of a part of a prompt that was read: its progress, and the first token if it was the last part."""
        events: list[em.JobEvent] = []
        if job.pictures or len(job.to_prefill) >= LONG_PROMPT:
            events.append(em.Progress(job.id, "prefill", len(job_slot(job).tokens), len(job.to_prefill)))
        if not job.prefilling:
            events += self._emit_all([(job, [])], outputs, time.monotonic())
        return events

    def _patient(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """The jobs that run again after a decode for which other programs leave too little VRAM. The others have waited
        too long. If there are none of these, pauses a little."""
        now = time.monotonic()
        self._refused = False
        patient = [job for job in jobs if now - self._taken_since.setdefault(job.id, now) <= TAKEN_S]
        if len(patient) == len(jobs):
            time.sleep(TAKEN_PAUSE_S)
        return patient

    def _emit_all(
        self, batch: Sequence[tuple[Job, list[int]]], outputs: Sequence[int], now: float
    ) -> list[em.JobEvent]:
        """The events of one decode.

        :param outputs: rows of logits, the same number for each job of ``batch``.
        :raises FrameshardError: the device has failed: it computes NaN or infinity for a single token too.
        """
        events: list[em.JobEvent] = []
        failed: list[Job] = []
        each = len(outputs) // len(batch)
        for i, (job, tokens) in enumerate(batch):
            try:
                events += self._emit(job, tokens, outputs[i * each : (i + 1) * each], now)
            except _NotFinite:
                failed.append(job)
            except FrameshardError:
                raise
            except Exception as defect:
                events.append(self._defect(job, defect))
        for job in failed:
            job_slot(job).conversation = None  # its KV cache may hold NaN too
            error = BadModel(
                "the model computes NaN or infinity for this prompt: some of its weights, or those of its adapters, are"
                " damaged"
            )
            events.append(self._end(job, em.Failed(job.id, m.ErrorInfo.of(error))))
        if failed:
            self._wipe()
            self._runtime.adapters.use(NO_ADAPTERS)
            with contextlib.suppress(DecodeAborted):
                if not self._runtime.computes(next(slot.seq for slot in self._slots if slot.job is None)):
                    raise FrameshardError("the device computes NaN or infinity where it computed numbers before")
        return events

    def _wipe(self) -> None:
        """Overwrites the cells of all sequences, because those of a failed job may hold NaN. Jobs that run read their
        text again. Conversations of other sequences are kept in the KV store."""
        for slot in self._slots:
            if slot.job is None:
                self.reuse.keep(slot)
        self._runtime.wipe()
        for slot in self._slots:
            if slot.job is None:
                slot.cut(0)
            else:
                self._begin_again(slot.job, slot)

    def _read(self, job: Job, at: int) -> list[int]:
        """Prefills the next part of a prompt, which is at index ``at``. If nothing else is to be done, further ones
        follow, each of which is prepared while the one before runs.

        :returns: the row of logits of the prompt's last token; none if the prompt goes on.
        """
        slot, ends_at = job_slot(job), time.monotonic() + READ_S
        unsure: collections.deque[tuple[Shape, list[int]]] = collections.deque()  # parts that may still fail
        try:
            while True:
                part = self._part(job, at)
                unsure.append((job.shapes.popleft(), part))
                at += len(part)
                ahead = time.monotonic() < ends_at and self._reads_on(job, unsure[-1][0], at)
                rows = Rows(slot.seq, part, "none" if job.shapes else "last")
                outputs = self._runtime.decode([rows], ahead=ahead)
                while len(unsure) > ahead:
                    self._keep_part(slot, *unsure.popleft())
                if not ahead:
                    if at == slot.store_at:
                        self.reuse.store_prefix(slot)
                    return outputs
        finally:
            job.shapes.extendleft(shape for shape, _ in reversed(unsure))

    def _reads_on(self, job: Job, shape: Shape, at: int) -> bool:
        """Whether the next part of a prompt, at index ``at``, may follow one of this shape at once. Commands, progress
        and jobs of the same priority wait for the end of both."""
        placement, (kept, decoded) = self._runtime.placement, shape
        alone = not self._queued and self._running() == [job] and not self._in_flight.others_wait
        if placement is None or placement.gpu_busy_s or not alone or job.gave_way:
            return False
        if not self._runtime.can_decode_ahead(decoded):
            return False
        if not job.shapes or at in job.pictures or at == job_slot(job).store_at or kept < decoded:
            return False
        return placement.plan.uncorrected_s("prompt", [GraphSize(kept, at - kept, 1)]) < READ_S

    def _see(self, picture: Picture, job: Job, at: int) -> bool:
        """Encodes the picture; if it is already encoded, prefills it.

        :returns: true if it was encoded.
        """
        assert self._vision is not None
        if picture.embedding is None:
            self._vision.encode(picture)
            return True
        slot, part = job_slot(job), self._part(job, at)
        self._vision.decode(slot.seq, picture)
        slot.pictures.append((at, picture.n_tokens, picture.n_pos))
        self._keep_part(slot, job.shapes.popleft(), part)
        return False

    def close(self) -> None:
        """Frees the samplers of jobs that still run, the vision tower and the draft model."""
        for job in self._jobs():
            if job.sampler is not None:
                job.sampler.close()
        if self._vision is not None:
            self._vision.close()
        if self._draft is not None:
            self._draft.close()

    # --- schedule -------------------------------------------------------------------------------------------------

    def _jobs(self) -> Iterable[Job]:
        yield from self._queued
        yield from self._running()

    def _running(self) -> list[Job]:
        return [slot.job for slot in self._slots if slot.job is not None]

    def _choose(self) -> list[Job]:
        """The jobs to decode next: one that prefills, or all that generate, in ascending order of their sequences. Jobs
        of lower priority wait while a job prefills. A warm-up that no job waits for waits while any job generates. Jobs
        with different sets of adapters generate in turns."""
        running = self._running()
        generating = [job for job in running if not job.prefilling]
        first = min(
            (job for job in running if job.prefilling), key=lambda job: (-job.priority, job.started_at), default=None
        )
        if first is not None and first.priority == em.IDLE_PRIORITY and generating:
            first = None
        if first is not None:
            generating = [job for job in generating if job.priority >= first.priority]
        if first is not None and not (generating and self._read_last):
            self._read_last = True
            self._costs.last = None
            return [first]
        self._read_last = False
        return self._in_turn(generating)

    def _in_turn(self, generating: list[Job]) -> list[Job]:
        """The jobs with the set of adapters whose turn it is."""
        groups: dict[AdapterSet, list[Job]] = {}
        for job in generating:
            groups.setdefault(job.adapters, []).append(job)
        if len(groups) < 2:
            return generating
        if not self._decodes_left or self._set_in_turn not in groups:
            self._set_in_turn = min(groups, key=lambda each: max(job.last_turn for job in groups[each]))
            self._set_turns += 1
            self._decodes_left = TURN_DECODES
        self._decodes_left -= 1
        for job in groups[self._set_in_turn]:
            job.last_turn = self._set_turns
        return groups[self._set_in_turn]

    def _part(self, prefilling: Job, at: int) -> list[int]:
        """The next tokens of a prompt, from index ``at`` on."""
        if self._runtime.mode == "planned":  # the budget may have changed
            prefilling.shapes = collections.deque(self._chunks(prefilling, at))
        kept, decoded = prefilling.shapes[0]
        tokens = prefilling.to_prefill[at : at + kept]
        # Rejected tokens change the bits by their number only, so copies of the last token stand for them.
        return tokens + tokens[-1:] * (decoded - kept)

    def _batch_with_drafts(self, generating: Sequence[Job]) -> list[tuple[Job, list[int]]]:
        """The last token of each job, and the number of drafted tokens that gives the most tokens per second."""
        n, runtime = len(generating), self._runtime
        for job in generating:
            if job.draft_state is not None:
                job.draft_state.next.clear()  # those of a decode that was aborted
        left = min(runtime.n_ctx_seq - len(job_slot(job).tokens) for job in generating)  # an image has fewer positions
        room = min(min(runtime.n_outputs_max, runtime.step) // n, left)
        length, rate = 1, 0.0
        if any(job.lookup is not None and job.lookup.matched for job in generating):
            length, rate = best_length(
                lambda n_drafted: sum(job.expected(n_drafted) for job in generating),
                lambda n_each: self._costs.seconds(n, n_each),
                room,
            )
        if self._draft is not None and any(job.draft_state is not None for job in generating):
            length = self._ask_draft(self._draft, generating, room, rate) or length
        self._costs.last = n, length
        return [(job, job.next_tokens(length)) for job in generating]

    def _ask_draft(self, draft: DraftModel, generating: Sequence[Job], room: int, rate: float) -> int:
        """Drafts with the draft model if that is expected to give more than ``rate`` tokens per second.

        :returns: the number of tokens of each job to decode; 0 if nothing was drafted, because it does not pay or
            because the draft model is still prefilling.
        """
        drafting = {
            job_slot(job).seq: job
            for job in generating
            if job.draft_state is not None and draft.has_room(len(job_slot(job).tokens) + room)
        }
        texts = {seq: job_slot(job).tokens + job.produced[-1:] for seq, job in drafting.items()}
        unread = {seq: draft.unread(seq, text) for seq, text in texts.items()}
        n_left = min((job.sampling.max_tokens - len(job.produced) for job in drafting.values()), default=0)

        def expected(n_drafted: int) -> float:
            return sum(job.expected(n_drafted, with_draft=True) for job in generating)

        def seconds(n_each: int) -> float:
            seqs = [seq for seq, job in drafting.items() if job.prefers_draft_model(n_each - 1)]
            late = sum(unread[seq] - 1 for seq in seqs)
            return self._costs.seconds(len(generating), n_each) + draft.seconds(len(seqs), n_each - 1, late, n_left)

        length, rate_with_draft = best_length(expected, seconds, room)
        asked = {seq: texts[seq] for seq, job in drafting.items() if job.prefers_draft_model(length - 1)}
        if not asked or rate_with_draft <= rate:
            draft.pass_over()
            return 0
        drafts = draft.draft(asked, length - 1)
        for seq, tokens in drafts.items():
            draft_state = drafting[seq].draft_state
            assert draft_state is not None
            draft_state.next = tokens
        return length if drafts else 0

    def _start_queued(self) -> list[em.JobEvent]:
        """Starts the jobs that have a free sequence. Prompts of one priority are read one after the other, and the next
        one is started only then: it can reuse what the one before has read."""
        events: list[em.JobEvent] = []
        waiting: set[str] = set()
        if (pause_s := self._start_at - time.monotonic()) > 0:
            if not self._running():
                time.sleep(pause_s)
            return events
        for job in list(self._queued):
            reading = any(other.prefilling and other.priority >= job.priority for other in self._running())
            # Jobs of one conversation run in the order they came.
            slot = None if reading or job.conversation in waiting else self._slot_for(job)
            if slot is not None:
                self._queued.remove(job)
                try:
                    events += self._start(job, slot)
                except OutOfMemory as error:
                    events += self._put_back(job, slot, error)
                except FrameshardError:
                    raise
                except Exception as error:
                    events.append(self._defect(job, error))
            if job in self._queued and job.conversation is not None:
                waiting.add(job.conversation)
        return events

    def _put_back(self, job: Job, slot: Slot, error: OutOfMemory) -> list[em.JobEvent]:
        """Puts a job whose KV cache got no memory back into the queue. Its sequence is emptied, so that the decodes of
        other jobs need no memory for it.

        :returns: the "failed" event if the job has waited too long for memory.
        """
        reason = self._runtime.without_memory(error)
        self.reuse.pause(job, slot)
        slot.job, slot.conversation, slot.used_at = None, None, 0
        self._runtime.clear(slot.seq)
        slot.cut(0)
        job.slot = None
        job.shapes.clear()
        now = time.monotonic()
        if now - self._taken_since.setdefault(job.id, now) > TAKEN_S:
            return [self._end(job, em.Failed(job.id, m.ErrorInfo.of(reason)))]
        self._queued.appendleft(job)  # none of its conversation came before it
        self._start_at = now + TAKEN_PAUSE_S
        return []

    def _defect(self, job: Job, error: Exception) -> em.JobEvent:
        """Ends a job whose sampler, matcher or text raised an unexpected exception. Other jobs continue."""
        if job.slot is not None:
            job.slot.conversation = None  # the content of its sequence is unknown
        defect = internal(logger, f"job {job.id}", error)
        return self._end(job, em.Failed(job.id, m.ErrorInfo.of(defect)))

    def _slot_for(self, job: Job) -> Slot | None:
        if job.conversation is not None:
            for slot in self._slots:
                if slot.conversation == job.conversation:
                    return slot if slot.job is None else None
        idle = [slot for slot in self._slots if slot.job is None]
        # Take an empty sequence first, then that of the least recently used conversation, which is then copied to the
        # KV store.
        return min(idle, key=lambda slot: (slot.conversation is not None, slot.used_at, slot.seq), default=None)

    def _start(self, job: Job, slot: Slot) -> list[em.JobEvent]:
        self._runtime.check_file()
        slot.job, job.slot = job, slot
        job.started_at = time.monotonic()
        exact = self._runtime.mode == "stream_only"
        job.to_prefill = job.prompt if exact else job.prompt + job.resume
        # A draft model cannot read images.
        drafts = self._draft is not None and job.lookup is not None and not job.pictures
        text = job.prompt + job.resume[:-1]
        answering = exact and bool(job.resume) and not drafts and self.reuse.paused(job, slot, text)
        if not answering:
            shapes = self._required_shapes(job) if exact else []
            self.reuse.begin(job, slot, job.to_prefill, shapes)
            job.shapes.extend(shapes[len(slot.shapes) :] if shapes else self._chunks(job, len(slot.tokens)))
        n_reused = min(len(slot.tokens), len(job.prompt))
        self._runtime.expect(slot.seq, len(job.prompt) + len(job.resume), prompt=True)
        if self._draft is not None and drafts:
            self._draft.check_file()
            job.draft_state = DraftState()
            if exact:
                self._draft.forget(slot.seq)  # its drafts may depend on the shapes in which it read the text
        seen = [token for token in job.prompt if token >= 0]
        job.sampler = Sampler(
            job.sampling,
            job.seed,
            self._runtime.n_vocab,
            seen,
            job.prepared,
            job.answer.answering,
        )
        history = pack_shapes(job.history if answering else [*slot.shapes, *job.shapes]) if exact else ()
        started = em.Started(job.id, len(job.prompt), n_reused, job.seed, history, job.answer.n_given)
        return [started, *self._take_up(job)] if answering or not exact else [started]

    def _begin_again(self, job: Job, slot: Slot) -> None:
        """Lets a job whose cells are lost read its text again, with its answer so far."""
        answered = [] if job.prefilling else [(1, 1)]  # the last token of the answer was not decoded yet
        job.to_prefill = job.prompt + job.produced
        job.shapes = collections.deque([*slot.shapes, *job.shapes, *answered])
        slot.cut(0)

    def _required_shapes(self, job: Job) -> list[Shape]:
        """The shapes in which a job must be decoded in mode stream-only: those of its first run; without a conversation
        those of an empty sequence, so that its text does not depend on what was read before. Empty if they are free."""
        if not job.history and job.conversation is not None:
            return []
        return job.history + self._chunks(job, sum(n_kept for n_kept, _ in job.history))

    def _chunks(self, job: Job, at: int) -> list[Shape]:
        """The shapes of the chunks of ``job.to_prefill`` from index ``at`` on."""
        shapes: list[Shape] = []
        while at < len(job.to_prefill):
            if at in job.pictures:
                n = job.pictures[at].n_tokens
            else:
                ends = (end for end in (*job.pictures, job_slot(job).store_at, len(job.to_prefill)) if end > at)
                n = self._runtime.next_step(min(ends) - at, self.chunk)
            shapes.append((n, n))
            at += n
        return shapes

    def _take_up(self, job: Job) -> list[em.JobEvent]:
        """Brings the sampler, the text and the drafts of a job to their state after ``resume``. The answer may already
        be complete: then the "done" event is returned."""
        assert job.sampler is not None
        for token in job.resume:
            try:
                job.sampler.accept(token)
                _, reason = self._add(job, token)
            except BadArgument as error:  # its form is too complex after all, or a call too long
                return [self._end(job, em.Failed(job.id, m.ErrorInfo.of(error)))]
            if reason is not None:
                return [self._done(job, reason, job.started_at)]
        return []

    # --- events ---------------------------------------------------------------------------------------------------

    def _keep_part(self, slot: Slot, shape: Shape, part: list[int]) -> None:
        """Keeps a part of a prompt that was decoded in this shape."""
        kept, _ = shape
        self._keep(slot, part, kept)
        self._prompt_tokens += kept

    def _keep(self, slot: Slot, tokens: list[int], kept: int) -> None:
        """Keeps ``kept`` of the tokens that were just decoded and removes the rest from the cache."""
        slot.tokens += tokens[:kept]
        slot.shapes.append((kept, len(tokens)))
        if kept < len(tokens):
            self._runtime.trim(slot.seq, self._runtime.length(slot.seq) - (len(tokens) - kept))

    def _emit(self, job: Job, tokens: list[int], rows: Sequence[int], now: float) -> list[em.JobEvent]:
        """Samples a token from each row in order. Stops at the first token that differs from the drafted one."""
        if job.warm_up:
            return [self._finish_warm_up(job, rows[-1], now)]
        events: list[em.JobEvent] = []
        by_model = job.draft_state is not None and bool(job.draft_state.next)
        refusal: BadArgument | None = None
        for kept, row in enumerate(rows, 1):
            try:
                reason = self._next_token(job, row, now, events)
            except BadArgument as error:  # its form is too complex after all, or a call too long
                refusal, reason = error, None
                break
            if reason is not None or tokens[kept : kept + 1] != job.produced[-1:]:
                break
        if tokens:
            self._keep(job_slot(job), tokens, kept)
            self._drafted += len(tokens) - 1
            self._accepted += kept - 1
            if by_model:
                self._model_drafted += len(tokens) - 1
                self._model_accepted += kept - 1
        if refusal is not None:
            events.append(self._end(job, em.Failed(job.id, m.ErrorInfo.of(refusal))))
        if reason is not None:
            events.append(self._done(job, reason, now))
        return events

    def _finish_warm_up(self, job: Job, row: int, now: float) -> em.JobEvent:
        if not self._runtime.is_finite(row):
            raise _NotFinite
        try:
            self.reuse.finish_warm_up(job_slot(job))
        except BadArgument as error:  # it is too large for the KV store
            return self._end(job, em.Failed(job.id, m.ErrorInfo.of(error)))
        return self._done(job, "length", now)

    def _next_token(self, job: Job, row: int, now: float, events: list[em.JobEvent]) -> m.Reason | None:
        """Samples a token and adds its event.

        :returns: the reason why the answer ends with it; ``None`` if the answer goes on.
        """
        assert job.sampler is not None
        if not self._runtime.is_finite(row):
            raise _NotFinite
        index = len(job.produced)
        job.first_token_at = job.first_token_at or now
        resumed = index < len(job.resume)
        if (known := job.resume[index] if resumed else job.answer.due) is not None:
            token = known
            job.sampler.accept(token)
        else:
            token = job.sampler.sample(self._runtime.llama.context, row, index)
        self._count(now)
        given, reason = self._add(job, token)
        if not resumed:
            events.append(em.Token(job.id, index, token, given.text, given.ends, given.thought, given.calls))
        return reason

    def _add(self, job: Job, token: int) -> tuple[Given, m.Reason | None]:
        """Appends ``token`` to the answer.

        :returns: what can be sent now, and the reason why the answer ends here; ``None`` if it goes on.
        """
        job.produced.append(token)
        if job.lookup is not None:
            job.lookup.add(token)
        if job.draft_state is not None:
            job.draft_state.add(token)
        ends = self._runtime.tokenizer.is_end(token)
        ended = ends and job.answer.answering()
        given = job.answer.push(token, b"" if ends else self._runtime.tokenizer.piece(token), ends=ends)
        if ended or job.answer.stopped or (job.sampler is not None and job.sampler.complete):
            reason: m.Reason = "tool_calls" if job.answer.called else "stop"
        elif len(job.produced) == job.sampling.max_tokens:
            reason = "length"
        else:
            return given, None
        return given.followed_by(job.answer.finish()), reason

    def _done(self, job: Job, reason: m.Reason, now: float) -> em.JobEvent:
        first_token_at = job.first_token_at or now
        done = em.Done(
            job.id,
            reason,
            n_prompt=len(job.prompt),
            n_generated=len(job.produced),
            prefill_s=first_token_at - job.started_at,
            decode_s=now - first_token_at,
            n_left=self._runtime.n_ctx_seq - len(job.prompt) - len(job.produced),
        )
        return self._end(job, done)

    def _count(self, now: float) -> None:
        if self._rate and self._rate[-1][0] == now:
            self._rate[-1] = (now, self._rate[-1][1] + 1)
        else:
            self._rate.append((now, 1))
        while self._rate[0][0] < now - RATE_WINDOW_S:
            self._rate.popleft()

    def _end(self, job: Job, event: em.JobEvent) -> em.JobEvent:
        self._taken_since.pop(job.id, None)
        if job.sampler is not None:
            job.sampler.close()
        if job.slot is not None:
            slot, job.slot = job.slot, None
            self._turns += 1
            slot.job = None
            if slot.conversation is None:
                self._runtime.clear(slot.seq)
                slot.cut(0)
                slot.used_at = 0
            else:
                slot.used_at = self._turns
        return event
