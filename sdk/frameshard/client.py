"""The asynchronous client, for trio.

    async with frameshard.launch(model=path, vram_budget_mb=2048) as client:
        async with client.ask("Any rooms left?", conversation="innkeeper") as stream:
            async for event in stream:
                print(event.text, end="")

What is open belongs to a scope: leaving a stream's block cancels its job, leaving the client's ends all of them, and a
launched sidecar with it. No task runs and no cancel scope is open inside an iterator, so a stream may be left, handed
on or dropped at any point.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import trio
import zmq

from frameshard import program
from frameshard.errors import (
    BadArgument,
    ConnectionLost,
    ContextOverflow,
    DeadlineMissed,
    EngineDied,
    FrameshardError,
    JobCancelled,
    VersionMismatch,
)
from frameshard.frame import FrameBlock
from frameshard.images import Pixels, SharedImages
from frameshard.transport import Flooded, Socket, configure
from frameshard.wire import launch as wire_launch
from frameshard.wire import messages as m
from frameshard.wire.connection import BEAT_S, ClientConnection
from frameshard.wire.launch import ConnectInfo, ServeConfig

T = TypeVar("T")

MIB = 1 << 20
RETRY_S = 0.01
ANSWER_S = 10.0
"""For any answer that does not wait for work. A sidecar that is gone is noticed sooner, by its silence."""

PARTIAL_S = 60.0
"""For a change of the budget of which the sidecar has said that it will be late."""

SHUTDOWN_S = 1.0
EXIT_S = 3.0
MAX_READY_LINE = 1 << 16
MAX_WORDS = 1000
"""Bytes of what a sidecar that did not start wrote last."""


@dataclass(frozen=True)
class Completion:
    """A finished answer. `reason` is ``stop`` or ``length``; times in seconds, without waiting in the queue."""

    text: str
    reason: str
    n_prompt: int
    n_generated: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Observation:
    """What the driver counts for the engine process. `bytes` is None where the system does not tell."""

    bytes: int | None
    seconds: float


@dataclass(frozen=True)
class BudgetGrant:
    """First answer to a change of the VRAM budget. `decision` is ``granted``, or ``partial`` when only `budget_bytes`
    can be reached by the deadline; all of it is predicted to take `seconds`. `version` is the one in force."""

    decision: m.Decision
    budget_bytes: int
    seconds: float
    version: int


@dataclass(frozen=True)
class BudgetResult:
    """A change of the VRAM budget that is in force: `used_bytes` are held, exact by the sidecar's own count, `seconds`
    after it was asked. `observed` is the driver's word, None when it was not waited for."""

    budget_bytes: int
    used_bytes: int
    seconds: float
    observed: Observation | None
    grant: BudgetGrant


@dataclass(frozen=True)
class Budget:
    """`budget_bytes` in force (0: no limit), the least possible, and the one from which on all weights are resident;
    `state` and `version` of the lease; what the sidecar would like to have now, and what it holds."""

    budget_bytes: int
    floor_bytes: int
    full_bytes: int
    state: m.LeaseState
    version: int
    wanted_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class Caps:
    """What the device has (None where the system does not tell) and what the model needs. `context` is the tokens of
    one conversation."""

    device: str
    total_bytes: int | None
    free_bytes: int | None
    floor_bytes: int
    full_bytes: int
    context: int
    mode: m.Mode


@dataclass(frozen=True)
class Stats:
    """Figures of the broker, and of the engine's device and batches (None while no engine runs)."""

    broker: m.BrokerStats
    engine: Mapping[str, Any] | None


@dataclass(frozen=True)
class Notice:
    """The sidecar's side of the negotiation; nothing has to be done. See bindings/PROTOCOL.md, "notice", for what the
    figures mean with each `kind`."""

    kind: m.NoticeKind
    budget_bytes: int
    seconds: float
    detail: str


@dataclass(frozen=True)
class EngineChange:
    """The engine process changed `state`: ``ready``, ``restarting``, ``hibernated`` or, with an `error`, ``off``."""

    state: m.EngineState
    restarts: int
    error: FrameshardError | None


class Stream:
    """The answer to one request: an async context manager and an async iterator over :class:`frameshard.Delta`.

    Iteration ends when the answer is complete; then :attr:`result` is set. It raises the job's error if it fails:
    :class:`ContextOverflow`, :class:`EngineDied`, :class:`Overloaded`, :class:`ConnectionLost`, or
    :class:`JobCancelled` after :meth:`cancel`. Reading slowly slows down nobody else; deltas get larger then.
    """

    def __init__(
        self,
        client: Client,
        submit: Callable[[tuple[m.Image, ...]], tuple[int, int]],
        conversation: _Turn | None,
        images: Sequence[bytes | Pixels] = (),
    ) -> None:
        self.result: Completion | None = None
        self.text = ""
        """All text so far."""
        self._client = client
        self._submit = submit
        self.progress: m.Progress | None = None
        """How far the sidecar has got with the images and the prompt; only of a job with images."""
        self.on_progress: Callable[[m.Progress], None] | None = None
        """Called with each :attr:`progress` that comes while the stream is read."""
        self._images = images
        self._shared: SharedImages | None = None
        self._turn = conversation
        self._request: int | None = None
        self._job: int | None = None
        self._ended = False
        self._events: trio.MemoryReceiveChannel[m.JobEvent] | None = None

    def __repr__(self) -> str:
        state = "new" if self._job is None else "ended" if self._ended else "open"
        return f"<Stream of job {self._job}, {state}, {len(self.text)} characters>"

    async def __aenter__(self) -> Stream:
        if self._job is not None and self._request is None:
            raise BadArgument("a stream is entered once")
        self._begin()
        try:
            await self._accepted()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the job unless it has ended. Returns at once; the engine stops within one shard."""
        if self._request is not None:
            self._client._drop(self._request)
        if self._job is not None and not self._ended:
            self._client._leave(self._job)
        self._end()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> m.Delta:
        while not self._ended:
            if self._events is None:
                raise BadArgument("a stream is read inside its async with block")
            try:
                event = await self._events.receive()
            except trio.EndOfChannel:
                self._end()
                raise self._client._why() from None
            self._client._taken(event)
            if isinstance(event, m.Delta):
                self.text += event.text
                return event
            if isinstance(event, (m.Started, m.UnknownEvent)):
                continue
            if isinstance(event, m.Progress):
                self.progress = event
                if self.on_progress is not None:
                    self.on_progress(event)
                continue
            if isinstance(event, m.Failed):
                error = event.error.exception()
                if isinstance(error, ContextOverflow) and self._turn is not None and self._turn.shorten():
                    self._open()
                    await self._accepted()
                    continue
                self._end()
                raise error
            if isinstance(event, m.Done):
                self.result = Completion(
                    self.text, event.reason, event.n_prompt, event.n_generated, event.prefill_s, event.decode_s
                )
            self._end()
            if isinstance(event, m.Cancelled):
                raise JobCancelled("the job was cancelled")
        raise StopAsyncIteration

    async def completed(self) -> Completion:
        """Reads to the end and returns the whole answer. Needs no ``async with`` of its own."""
        if self._job is None:
            async with self:
                return await self.completed()
        async for _ in self:
            pass
        if self.result is None:
            raise JobCancelled("the stream was closed before its end")
        return self.result

    async def cancel(self) -> None:
        """Asks for the job's end; reading goes on to its last event, JobCancelled or an end that came first."""
        if self._job is not None and not self._ended:
            self._client._cancel(self._job)

    def _begin(self) -> None:
        """Sends the request, unless that is done."""
        if self._job is None:
            if self._turn is not None:
                self._turn.begin()
            try:
                self._open()
            except BaseException:
                self._end()
                raise

    def _open(self) -> None:
        if self._shared is None:
            self._shared = SharedImages(self._images)
            self._images = ()
        images = self._shared.wire
        self._request, self._job, self._events = self._client._open(lambda: self._submit(images))

    async def _accepted(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        await self._client._answer(request)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._shared is not None:
                self._shared.close()
            if self._turn is not None:
                self._turn.end(self.text)


class _Conversation:
    """What was said so far, as far as it was heard."""

    def __init__(self) -> None:
        self.system: m.ChatMessage | None = None
        self.exchanges: list[tuple[m.ChatMessage, m.ChatMessage]] = []
        self.speaking = False


class _Turn:
    """One question in a conversation."""

    def __init__(self, find: Callable[[], _Conversation], system: str | None, text: str) -> None:
        self._find = find
        self._conversation = _Conversation()
        self._system = system
        self._question = m.ChatMessage("user", text)

    def messages(self) -> tuple[m.ChatMessage, ...]:
        conversation = self._conversation
        system = () if conversation.system is None else (conversation.system,)
        return (*system, *(said for exchange in conversation.exchanges for said in exchange), self._question)

    def begin(self) -> None:
        conversation = self._find()
        if conversation.speaking:
            raise BadArgument("this conversation's last answer is still open: leave its stream first")
        conversation.speaking = True
        self._conversation = conversation
        if self._system is not None:
            self._conversation.system = m.ChatMessage("system", self._system)

    def shorten(self) -> bool:
        """Forgets the oldest exchange; false when there is none."""
        if not self._conversation.exchanges:
            return False
        del self._conversation.exchanges[0]
        return True

    def end(self, answer: str) -> None:
        self._conversation.speaking = False
        if answer:
            self._conversation.exchanges.append((self._question, m.ChatMessage("assistant", answer)))


class Client:
    """A session with a sidecar; made by :func:`launch` and :func:`connect`. For the tasks of one thread."""

    def __init__(self, core: ClientConnection, socket: Socket, info: ConnectInfo) -> None:
        self.info = info
        """Where the sidecar is; :func:`connect` takes it too. Holds the keys: keep it to yourself."""
        self._core = core
        self._socket = socket
        self._answers: dict[int, trio.MemorySendChannel[m.Reply]] = {}
        self._inboxes: dict[int, trio.MemoryReceiveChannel[m.Reply]] = {}
        self._streams: dict[int, trio.MemorySendChannel[m.JobEvent]] = {}
        self._watchers: list[trio.MemorySendChannel[EngineChange]] = []
        self._listeners: list[trio.MemorySendChannel[Notice]] = []
        self._conversations: dict[str, _Conversation] = {}
        self._welcomed = trio.Event()
        self._blocked = trio.Event()

    def __repr__(self) -> str:
        return f"<Client of {self.info.endpoint}, {self._core.state.value}, {len(self._streams)} jobs>"

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        text: str,
        *,
        conversation: str | None = None,
        system: str | None = None,
        images: Sequence[bytes | Pixels] = (),
        sampling: m.Sampling = m.DEFAULT_SAMPLING,
        timeline: int = 0,
    ) -> Stream:
        """Says `text` to the model and streams its answer.

        With a `conversation`, what was said in it before belongs to the prompt: answers as far as they were read, also
        of streams that were left early. Its oldest exchanges are forgotten when the context is full. `system` sets the
        conversation's persona, and stays. `images`, bytes of PNG or JPEG files or :class:`Pixels`, stand before the
        text; later questions of the conversation see its answer, not the images. `timeline` comes back in each event,
        so a game that loads a save can tell tokens that were meant for another past.
        """
        turn = _Turn(lambda: self._conversation(conversation), system, text)

        def submit(shared: tuple[m.Image, ...]) -> tuple[int, int]:
            return self._core.submit(
                "chat",
                messages=turn.messages(),
                conversation=conversation,
                sampling=sampling,
                timeline=timeline,
                images=shared,
            )

        return Stream(self, submit, turn, images)

    def chat(
        self,
        messages: Sequence[m.ChatMessage],
        *,
        conversation: str | None = None,
        images: Sequence[bytes | Pixels] = (),
        sampling: m.Sampling = m.DEFAULT_SAMPLING,
        timeline: int = 0,
    ) -> Stream:
        """Like :meth:`ask` for callers that keep the history themselves. A `conversation` names what the engine should
        keep in its cache, so that a prompt which begins as the last one did is read faster. `images` stand before the
        last message's text."""

        def submit(shared: tuple[m.Image, ...]) -> tuple[int, int]:
            return self._core.submit(
                "chat",
                messages=tuple(messages),
                conversation=conversation,
                sampling=sampling,
                timeline=timeline,
                images=shared,
            )

        return Stream(self, submit, None, images)

    def complete(
        self,
        prompt: str,
        *,
        images: Sequence[bytes | Pixels] = (),
        sampling: m.Sampling = m.DEFAULT_SAMPLING,
        timeline: int = 0,
    ) -> Stream:
        """Streams what follows `images` and `prompt`, without a chat template."""

        def submit(shared: tuple[m.Image, ...]) -> tuple[int, int]:
            return self._core.submit("completion", prompt=prompt, sampling=sampling, timeline=timeline, images=shared)

        return Stream(self, submit, None, images)

    def _conversation(self, name: str | None) -> _Conversation:
        return _Conversation() if name is None else self._conversations.setdefault(name, _Conversation())

    def forget(self, conversation: str) -> None:
        """Begins a conversation anew."""
        self._conversations.pop(conversation, None)

    # ---- VRAM and figures -------------------------------------------------------------------------------------------

    async def set_budget(
        self,
        vram_budget_mb: float,
        *,
        timeout_s: float = 5.0,
        observe: bool = True,
        on_lease: Callable[[BudgetGrant], None] | None = None,
        on_released: Callable[[BudgetResult], None] | None = None,
        **lease: Any,
    ) -> BudgetResult:
        """All that the sidecar holds in VRAM has to fit into so many MiB from now on; 0 is no limit.

        Returns when the memory is released and, with `observe`, the driver was asked as well, which can take seconds;
        `on_lease` and `on_released` are called in between. Jobs go on meanwhile. `lease` has further terms:

        - ``state``: ``parked`` frees all VRAM but the driver's own and keeps everything else, ``hibernated`` ends the
          engine process; the budget is then the one to come back to with ``active``. Jobs wait meanwhile.
        - ``floor_mb``: with no work for 5 s the sidecar gives back all above it, until the next job; 0: it keeps all.
        - ``version``: a number above all before it; a change that comes late is then refused.
        - ``reason``: up to 64 bytes for the sidecar's log.

        Raises :class:`BudgetBelowFloor`, :class:`StaleLease` (nothing changes), :class:`DeadlineMissed` (stays in
        force) or :class:`EngineDied`.
        """
        request_id = self._begin_budget(vram_budget_mb, timeout_s, **lease)
        return await self._end_budget(request_id, timeout_s, observe, on_lease, on_released)

    def _begin_budget(self, vram_budget_mb: float, timeout_s: float, *, floor_mb: float = 0, **terms: Any) -> int:
        budget_bytes, floor_bytes = mebibytes(vram_budget_mb), mebibytes(floor_mb)
        return self._ask(lambda: self._core.budget_set(budget_bytes, timeout_s, floor_bytes=floor_bytes, **terms))

    async def _end_budget(
        self,
        request_id: int,
        timeout_s: float,
        observe: bool,
        on_lease: Callable[[BudgetGrant], None] | None,
        on_released: Callable[[BudgetResult], None] | None,
    ) -> BudgetResult:
        lease = await self._answer(request_id, timeout_s + ANSWER_S, last=False)
        assert isinstance(lease, m.Lease)
        grant = BudgetGrant(lease.decision, lease.vram_budget_bytes, lease.seconds, lease.version)
        if on_lease is not None:
            on_lease(grant)
        if grant.decision == "partial":
            timeout_s = max(PARTIAL_S, grant.seconds)
        released = await self._answer(request_id, timeout_s + ANSWER_S, last=False)
        assert isinstance(released, m.Released)
        result = BudgetResult(released.vram_budget_bytes, released.used_bytes, released.seconds, None, grant)
        if on_released is not None:
            on_released(result)
        if not observe:
            self._drop(request_id)
            return result
        observed = await self._answer(request_id, timeout_s + ANSWER_S)
        assert isinstance(observed, m.Observed)
        return replace(result, observed=Observation(observed.observed_bytes, observed.seconds))

    async def budget(self) -> Budget:
        """The budget in force and its bounds."""
        answer = await self._answer(self._ask(self._core.budget_get))
        assert isinstance(answer, m.Budget)
        return Budget(
            answer.vram_budget_bytes,
            answer.floor_bytes,
            answer.full_bytes,
            answer.state,
            answer.version,
            answer.wanted_bytes,
            answer.used_bytes,
        )

    async def caps_and_requirements(self) -> Caps:
        """What the device has and what the model needs."""
        answer = await self._answer(self._ask(self._core.caps_and_requirements))
        assert isinstance(answer, m.Caps)
        return Caps(
            answer.device,
            answer.total_bytes,
            answer.free_bytes,
            answer.floor_bytes,
            answer.full_bytes,
            answer.context,
            answer.mode,
        )

    async def plan(self, budgets_mb: Sequence[float], *, prompt_tokens: int = 512) -> tuple[m.PlanRow, ...]:
        """What would fit into each of at most 32 budgets, and how fast it would run. Changes nothing.

        Raises :class:`EngineDied` while no engine runs, :class:`Unsupported` on the CPU alone.
        """
        budgets = tuple(mebibytes(budget) for budget in budgets_mb)
        answer = await self._answer(self._ask(lambda: self._core.plan(budgets, prompt_tokens)))
        assert isinstance(answer, m.PlanAnswer)
        return answer.rows

    def notices(self) -> trio.MemoryReceiveChannel[Notice]:
        """What the sidecar says on its own from now on. Whoever does not read misses what comes after the first 16."""
        send, receive = trio.open_memory_channel[Notice](16)
        self._listeners.append(send)
        return receive

    async def set_pacing(
        self, scheduling_mode: m.SchedulingMode = "balance", *, target_tokens_per_second: float = 0.0
    ) -> None:
        """How the GPU is shared with the frames of :meth:`frame_block`: ``prioritize_graphics`` uses only what they
        leave, ``balance`` some more as long as they keep their time, ``prioritize_compute`` takes no notice of them.
        Tokens come no faster than the target, 0.1 to 10,000 a second for all jobs together, or 0 for as fast as they
        can."""
        await self._answer(self._ask(lambda: self._core.pacing(scheduling_mode, target_tokens_per_second)))

    async def frame_block(self, *, target_frame_ms: float = 1000 / 60) -> FrameBlock:
        """The page in which this program says when it draws; one program a sidecar."""
        answer = await self._answer(self._ask(self._core.frame_block))
        assert isinstance(answer, m.FrameBlock)
        return FrameBlock(answer.path, target_frame_ms=target_frame_ms)

    async def model_info(self) -> m.ModelInfo:
        """The model that is loaded and how."""
        answer = await self._answer(self._ask(self._core.model_info))
        assert isinstance(answer, m.Model)
        return answer.model

    async def stats(self) -> Stats:
        """Figures of this moment."""
        answer = await self._answer(self._ask(self._core.stats))
        assert isinstance(answer, m.Stats)
        return Stats(answer.broker, answer.engine)

    def engine_changes(self) -> trio.MemoryReceiveChannel[EngineChange]:
        """Changes of the engine's state from now on. Whoever does not read misses what comes after the first 16."""
        send, receive = trio.open_memory_channel[EngineChange](16)
        self._watchers.append(send)
        return receive

    async def shutdown(self) -> None:
        """Ends the sidecar, for all its clients."""
        await self._answer(self._ask(self._core.shutdown))

    # ---- for streams ------------------------------------------------------------------------------------------------

    def _open(self, submit: Callable[[], tuple[int, int]]) -> tuple[int, int, trio.MemoryReceiveChannel[m.JobEvent]]:
        request_id, job = submit()
        self._expect(request_id)
        # The window bounds what is under way, and one more may be made up here when the server has forgotten the job.
        self._streams[job], events = trio.open_memory_channel[m.JobEvent](m.MAX_WINDOW + 1)
        self._flush()
        return request_id, job, events

    def _taken(self, event: m.JobEvent) -> None:
        self._core.taken(event)
        if isinstance(event, m.TERMINAL):
            self._streams.pop(event.job, None)
        self._flush()

    def _cancel(self, job: int) -> None:
        if self._core.error is None:
            self._core.cancel(job)
            self._flush()

    def _leave(self, job: int) -> None:
        self._streams.pop(job, None)
        if self._core.error is None:
            self._core.abandon(job)
            self._cancel(job)

    def _why(self) -> FrameshardError:
        return self._core.error or ConnectionLost("the client is closed")

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[], int]) -> int:
        request_id = request()
        self._expect(request_id)
        self._flush()
        return request_id

    def _expect(self, request_id: int) -> None:
        self._answers[request_id], self._inboxes[request_id] = trio.open_memory_channel[m.Reply](3)

    def _drop(self, request_id: int) -> None:
        self._answers.pop(request_id, None)
        self._inboxes.pop(request_id, None)

    async def _answer(self, request_id: int, timeout_s: float = ANSWER_S, *, last: bool = True) -> m.Reply:
        # Time during which either side was stopped does not count.
        due_beats = self._core.heard_beats + timeout_s / BEAT_S
        answer = None
        try:
            while answer is None:
                with trio.move_on_after(max(BEAT_S, (due_beats - self._core.heard_beats) * BEAT_S)):
                    answer = await self._inboxes[request_id].receive()
                if answer is None and self._core.heard_beats >= due_beats:
                    raise DeadlineMissed(f"no answer within {timeout_s:g} s")
        except trio.EndOfChannel:
            self._drop(request_id)
            raise self._why() from None
        except BaseException:
            self._drop(request_id)
            raise
        if last or isinstance(answer, m.Error):
            self._drop(request_id)
        if isinstance(answer, m.Error):
            raise answer.error.exception()
        return answer

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _run(self, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        """Until the scope that it hands over is cancelled, and by nothing else: a client that is cancelled still says
        goodbye."""
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.shield = True
            for task in (self._receive, self._beat, self._retry):
                nursery.start_soon(task)
            task_status.started(nursery.cancel_scope)

    async def _greeted(self) -> None:
        await self._welcomed.wait()
        if self._core.error is not None:
            raise self._core.error

    async def _receive(self) -> None:
        while True:
            try:
                frames = await self._socket.receive()
            except Flooded as flood:
                self._core.gone(ConnectionLost(f"the server does not speak this protocol: {flood}"))
                self._flush()
                return
            for frame in frames:
                for message in self._core.receive(frame):
                    self._deliver(message)
            self._flush()

    async def _beat(self) -> None:
        while True:
            await trio.sleep(BEAT_S)
            self._core.beat()
            self._flush()

    async def _retry(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            await trio.sleep(RETRY_S)
            self._flush()

    def _deliver(self, message: m.Reply | m.JobEvent | m.Unasked) -> None:
        if isinstance(message, m.JobEvent):
            if message.job in self._streams:
                self._streams[message.job].send_nowait(message)
        elif isinstance(message, m.Engine):
            change = EngineChange(message.state, message.restarts, message.error.exception() if message.error else None)
            _tell(self._watchers, change)
        elif isinstance(message, m.Notice):
            _tell(self._listeners, Notice(message.kind, message.vram_budget_bytes, message.seconds, message.detail))
        elif isinstance(message, m.Welcome):
            self._welcomed.set()
        elif message.id in self._answers:
            self._answers[message.id].send_nowait(message)

    def _flush(self) -> None:
        while (frame := self._core.next_frame()) is not None:
            if not self._socket.try_send([frame]):
                self._blocked.set()
                break
            self._core.sent()
        if self._core.error is not None:
            self._lost()

    def _lost(self) -> None:
        """Everything that waits hears why."""
        self._welcomed.set()
        channels: tuple[trio.MemorySendChannel[Any], ...]
        channels = (*self._answers.values(), *self._streams.values(), *self._watchers, *self._listeners)
        for channel in channels:
            channel.close()
        self._answers.clear()
        self._streams.clear()
        self._watchers.clear()
        self._listeners.clear()


@contextlib.contextmanager
def _open_log(log: int | None) -> Iterator[int]:
    """A descriptor for the sidecar's log: standard error for None, nothing where that is closed."""
    try:
        fd = os.open(os.devnull, os.O_WRONLY) if log == subprocess.DEVNULL else os.dup(2 if log is None else log)
    except OSError as error:
        if log is not None:
            raise BadArgument(f"log is no open file descriptor: {error.strerror}", field="log") from None
        fd = os.open(os.devnull, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


async def _ready_line(sidecar: trio.Process, config: bytes) -> bytes:
    """What the sidecar answers; cut off when it ends before."""
    assert sidecar.stdin is not None
    assert sidecar.stdout is not None
    line = b""
    with contextlib.suppress(trio.BrokenResourceError):
        await sidecar.stdin.send_all(config)
        while not line.endswith(b"\n") and len(line) < MAX_READY_LINE:
            data = await sidecar.stdout.receive_some()
            if not data:
                break
            line += data
    return line


async def _copy_words(sidecar: trio.Process, log: int, words: bytearray) -> None:
    """Passes on to the log what the sidecar writes before it has the log itself; leaves the end of it in `words`."""
    assert sidecar.stderr is not None
    async for data in sidecar.stderr:
        with contextlib.suppress(OSError):
            os.write(log, data)
        words += data
        del words[:-MAX_WORDS]


async def _status(sidecar: trio.Process) -> str:
    """How the sidecar, which has closed its output, ended."""
    with trio.move_on_after(EXIT_S):
        await sidecar.wait()
    if sidecar.returncode is None:
        sidecar.kill()
        await sidecar.wait()
        return "not even after it had closed its output"
    return f"by signal {-sidecar.returncode}" if sidecar.returncode < 0 else f"with status {sidecar.returncode}"


def _tell(listeners: list[trio.MemorySendChannel[T]], what: T) -> None:
    for listener in list(listeners):
        try:
            listener.send_nowait(what)
        except trio.WouldBlock:
            pass
        except trio.BrokenResourceError:
            listeners.remove(listener)


class ClientScope:
    """What :func:`launch` and :func:`connect` return: ``async with`` it to get the :class:`Client`."""

    def __init__(self, name: str, info: ConnectInfo | None, config: ServeConfig | None, log: int | None) -> None:
        self._name = name
        self._info = info
        self._config = config
        self._log = log
        self._sidecar: trio.Process | None = None
        self._traffic: trio.CancelScope | None = None
        self._client: Client | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def __aenter__(self) -> Client:
        # The nursery's end is called by hand, without the block's exception: a user's error must come out of the block
        # as it is and not in a group.
        self._tasks = trio.open_nursery()
        self._nursery = await self._tasks.__aenter__()
        try:
            if self._config is not None:
                self._info = await self._start(self._config)
            assert self._info is not None
            self._client = self._connect(self._info)
            self._traffic = await self._nursery.start(self._client._run)
            if self._sidecar is not None:
                self._nursery.start_soon(self._watch, self._sidecar, self._client)
            await self._client._greeted()
            return self._client
        except BaseException:
            await self._close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        client = self._client
        if client is not None:
            with trio.CancelScope(shield=True):
                await self._leave(client)
        if self._traffic is not None:
            self._traffic.cancel()
        self._nursery.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            if client is not None:
                client._socket.close()
            if self._context is not None:
                self._context.destroy(linger=0)
            if self._sidecar is not None:
                with trio.CancelScope(shield=True):
                    await self._end(self._sidecar)

    async def _leave(self, client: Client) -> None:
        if client._core.error is None and client._core.welcome is not None:
            with trio.move_on_after(SHUTDOWN_S), contextlib.suppress(FrameshardError):
                await client._answer(client._ask(client._core.shutdown if self._config else client._core.bye))
        client._core.close()
        client._lost()

    async def _watch(self, sidecar: trio.Process, client: Client) -> None:
        """Our own child's end is known at once; the silence of a stranger's sidecar takes a while."""
        status = await sidecar.wait()
        client._core.gone(ConnectionLost(f"the sidecar has ended with status {status}"))
        client._flush()

    async def _end(self, sidecar: trio.Process) -> None:
        assert sidecar.stdin is not None
        assert sidecar.stdout is not None
        assert sidecar.stderr is not None
        if self._client is None:  # while its modules are imported it would learn of our end only after that
            sidecar.terminate()
        for pipe in (sidecar.stdin, sidecar.stdout, sidecar.stderr):
            await pipe.aclose()
        with trio.move_on_after(EXIT_S):
            await sidecar.wait()
        sidecar.kill()
        await sidecar.wait()

    async def _start(self, config: ServeConfig) -> ConnectInfo:
        with _open_log(self._log) as log:
            command = program.command("frameshard.broker", "--log-fd", str(log))
            try:
                self._sidecar = await trio.lowlevel.open_process(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,  # until it has taken its log: see broker/__main__.py
                    pass_fds=(log,),
                    start_new_session=True,  # a Ctrl-C in the terminal is the host's to answer
                )
            except OSError as error:
                raise EngineDied(f"the sidecar cannot be started with {command[0]}: {error.strerror}") from None
            words = bytearray()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy_words, self._sidecar, log, words)
                line = await _ready_line(self._sidecar, wire_launch.config_line(config))
                status = None if line.endswith(b"\n") else await _status(self._sidecar)
                if status is None:
                    nursery.cancel_scope.cancel()
        if status is not None:
            said = words.decode(errors="replace").strip()
            raise EngineDied(
                f"the sidecar ended before it was ready: {command[0]} ended {status}, "
                + (f"and its last words are: {said}" if said else "without a word"),
                python=command[0],
                status=status,
            )
        return wire_launch.parse_ready(line)

    def _connect(self, info: ConnectInfo) -> Client:
        if info.protocol < m.VERSION:
            raise VersionMismatch(f"the sidecar speaks protocol {info.protocol}, this client needs {m.VERSION}")
        self._context = zmq.Context()
        dealer = self._context.socket(zmq.DEALER)
        configure(dealer, linger_ms=0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, info.server_key.encode())
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, info.client_key.encode())
        dealer.setsockopt(zmq.CURVE_SECRETKEY, info.client_secret.encode())
        try:
            dealer.connect(info.endpoint)
        except zmq.ZMQError as error:
            raise BadArgument(f"cannot connect to {info.endpoint}: {error}", field="endpoint") from None
        client = Client(ClientConnection(self._name, epoch=info.epoch, notices=True), Socket(dealer), info)
        client._flush()
        return client


def launch(
    model: str | os.PathLike[str],
    *,
    vram_budget_mb: float = 0,
    device: str = "auto",
    mmproj: str | os.PathLike[str] | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    n_ctx: int = 4096,
    n_parallel: int = 4,
    name: str = "python",
    log: int | None = None,
    **options: Any,
) -> ClientScope:
    """Starts a sidecar with a model and connects to it: ``async with launch(...) as client``.

    The sidecar ends with the block, and also when this process ends in whatever way.

    :param model: path of a GGUF file; :func:`frameshard.models.resolve` finds one by name.
    :param vram_budget_mb: MiB of VRAM for everything that the sidecar does; 0 is no limit.
    :param device: ``auto`` (the first GPU, else the CPU), ``cpu``, ``emulated``, or a device's name such as ``CUDA0``.
    :param mmproj: path of the GGUF file that reads images for this model.
    :param draft_model: path of a GGUF file, a small model with the same vocabulary that drafts for this one.
    :param n_ctx: tokens of context of each conversation, rounded up to a multiple of 256. `n_parallel` of them run at
        once.
    :param name: of this client, for the sidecar's log.
    :param log: file descriptor for the sidecar's log, or ``subprocess.DEVNULL``; by default standard error.
    :param options: further fields of :class:`frameshard.ServeConfig`.

    Entering raises what the model or the device is refused with: :class:`ModelNotFound`, :class:`BadModel`,
    :class:`UnknownDevice`, :class:`BudgetBelowFloor`, ...
    """
    try:
        config = ServeConfig(
            model=os.path.abspath(model),
            vram_budget_bytes=mebibytes(vram_budget_mb),
            device=device,
            mmproj=os.path.abspath(mmproj) if mmproj else "",
            draft_model=os.path.abspath(draft_model) if draft_model else "",
            n_ctx=n_ctx,
            n_parallel=n_parallel,
            **options,
        )
    except TypeError as error:
        raise BadArgument(str(error)) from None
    return ClientScope(name, None, config, log)


def connect(target: str | os.PathLike[str] | ConnectInfo, *, name: str = "python") -> ClientScope:
    """Connects to a sidecar that runs: ``async with connect(...) as client``. Leaving the block does not end it.

    `target` is the path of its connect file, or another client's :attr:`Client.info`. Entering raises
    :class:`ConnectionLost` when nobody answers there.
    """
    if isinstance(target, ConnectInfo):
        return ClientScope(name, target, None, None)
    try:
        text = Path(target).read_bytes()
    except OSError as error:
        raise ConnectionLost(f"no sidecar has left its connect file at {os.fspath(target)}: {error.strerror}") from None
    return ClientScope(name, wire_launch.parse_info(text), None, None)


def mebibytes(count: float) -> int:
    """Bytes of so many MiB. Raises :class:`BadArgument`."""
    if type(count) not in (int, float) or not 0 <= count < 2**33:
        raise BadArgument("a budget is a number of MiB, 0 for no limit", field="vram_budget_mb")
    return int(count * MIB)
