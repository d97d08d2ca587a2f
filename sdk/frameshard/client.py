"""The asynchronous client, for trio and asyncio.

    async with frameshard.launch(model=path, vram_budget_mb=2048) as client:
        async with client.ask("Any rooms left?", conversation="innkeeper") as stream:
            async for event in stream:
                print(event.text, end="")

The end of a stream's block cancels its job. The end of the client's block ends all jobs, and the sidecar if it was
launched here. No task runs and no cancel scope is open inside an iterator, so a stream may be left or passed on at any
point. The client's own block is entered and left in one task; all tasks of its event loop may use it.

anyio runs the one code in both libraries. Under asyncio a shield does not hold a task's own cancellation back, so each
cleanup here is complete although any wait in it may be cancelled.

trio raises the KeyboardInterrupt of Ctrl-C in whichever task runs. The client's own tasks are protected from it: from
there it would reach the user's code in an exception group, which ``except KeyboardInterrupt`` does not catch. What a
callback such as `on_loading` raises in them ends the session, and leaves the client's block as it is, in no group.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc
import zmq
from trio.lowlevel import enable_ki_protection

from frameshard import program, system
from frameshard.conversation import Conversations, LoadResult, Turn
from frameshard.errors import (
    BadArgument,
    ConnectionLost,
    ContextOverflow,
    DeadlineMissed,
    EngineDied,
    FrameshardError,
    JobCancelled,
    Unsupported,
    VersionMismatch,
    again,
    only_cause,
    typed,
)
from frameshard.frame import FrameBlock
from frameshard.images import Pixels, SharedImages
from frameshard.inbox import EndOfChannel, Inbox
from frameshard.options import JobOptions, LaunchOptions, LeaseTerms
from frameshard.tools import Tool
from frameshard.transport import Flooded, Socket, configure
from frameshard.wire import checks
from frameshard.wire import launch as wire_launch
from frameshard.wire import messages as m
from frameshard.wire.connection import BEAT_S, ClientConnection
from frameshard.wire.launch import ConnectInfo, ServeConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

    Rows = npt.NDArray[np.float16]
else:
    Rows = Any  # numpy is imported only for programs that embed

T = TypeVar("T")
U = TypeVar("U")

MIB = 1 << 20
RETRY_S = 0.01
ANSWER_S = 10.0
"""Seconds to wait for an answer that needs no work of the engine. The end of the sidecar is noticed sooner."""

ADAPTER_S = 120.0
"""Seconds to wait for a change of the adapters. Its file is read, and it waits for the running decode."""

EMBED_S = 1800.0
"""Seconds to wait for embeddings. They are computed when nothing else wants the CPU, so a slow answer is no fault."""

KV_S = 60.0
"""Seconds to wait until a file with a KV cache is written or read."""

PARTIAL_S = 60.0
"""Seconds to wait for the release after a change of the budget was granted in part."""

ENDED_S = 0.5
"""Seconds to see that nobody listens at the endpoint of a sidecar whose process is gone. The system says so at once."""

SHUTDOWN_S = 1.0
EXIT_S = 3.0
MAX_READY_LINE = 1 << 16
MAX_REPLIES = 3
"""The most answers to one request: those to a change of the budget."""

MAX_UNREAD = 16
"""The most notices, or changes of the engine's state, that wait for a reader."""

_LOADING = ("loading", "restarting")
"""States of the engine in which a new one is on its way. The sidecar replaces one that hangs."""

MAX_OUTPUT = 1000
"""If a sidecar does not start, so many bytes of its last output are kept for the error."""


@dataclass(frozen=True, kw_only=True)
class Completion(m.Done):
    """A finished answer: the job's last event, and the whole text. Times do not include waiting in the queue.

    :param n_dropped: see :attr:`Stream.n_dropped`.
    :param seed: seed of the random numbers: the requested one, or the one that the sidecar chose.
    :param tool_calls: the calls of tools that the answer ends with.
    """

    text: str
    n_dropped: int = 0
    seed: int = 0
    tool_calls: tuple[m.ToolCall, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BudgetResult(m.Released):
    """A change of the VRAM budget that is in force, with all its answers.

    :param lease: the first answer.
    :param observed: the third answer, with the VRAM that the driver counts; None if it was not waited for.
    """

    lease: m.Lease
    observed: m.Observed | None


class Stream:
    """The answer to one request: an async context manager and an async iterator over :class:`frameshard.Delta`.

    Iteration ends when the answer is complete; then :attr:`result` is set. If the job fails, iteration raises its
    error: :class:`BadArgument` or :class:`Unsupported` for what was asked, :class:`ContextOverflow`,
    :class:`DeadlineMissed` (`deadline_ms`), :class:`EngineDied`, :class:`Overloaded`, :class:`ConnectionLost`, or
    :class:`JobCancelled` after :meth:`cancel`. A slow reader does not delay other jobs; it gets larger deltas.
    """

    def __init__(
        self,
        client: Client,
        submit: Callable[[tuple[m.Image, ...]], tuple[int, int]],
        conversation: Turn | None,
        images: Sequence[bytes | Pixels],
        fields: dict[str, Any],
    ) -> None:
        self.result: Completion | None = None
        self.text = ""
        """The text of the answer so far."""
        self._client = client
        self._submit = submit
        self._fields = fields
        self.progress: m.Progress | None = None
        """How much of the images and the prompt is done; only for a job with images or a long prompt."""
        self.on_progress: Callable[[m.Progress], None] | None = None
        """Called with each new :attr:`progress` while the stream is read."""
        self.paused = False
        """True while the answer waits in its middle, such as for a job of higher priority. It continues on its own."""
        self.on_paused: Callable[[bool], None] | None = None
        """Called with :attr:`paused` when it has changed, while the stream is read."""
        self.thought = ""
        """What the model has thought so far, if `thinking` is ``shown``. It is not in :attr:`text`."""
        self.on_thought: Callable[[m.Thought], None] | None = None
        """Called with each new part of :attr:`thought` while the stream is read."""
        self.remote = False
        """True if the fallback server has begun this answer. Once the answer is complete: true if that server
        completed it."""
        self.seed = 0
        """Seed of the random numbers: the requested one, or the one that the sidecar chose. 0 until the job runs."""
        self.tool_calls: tuple[m.ToolCall, ...] = ()
        """The calls of tools so far. Each is whole, and its arguments match the tool's schema."""
        self.on_tool_call: Callable[[m.ToolCall], None] | None = None
        """Called with each new call, while the stream is read."""
        self._images = images
        self._shared: SharedImages | None = None
        self._turn = conversation
        self._request: int | None = None
        """The request for the job, until its answer has come."""
        self._job: int | None = None
        self._entered = False
        self._cancelled = False
        self._ended = False
        self._events: Inbox[m.JobEvent] | None = None
        self._wait_for_room: Callable[[], Awaitable[None]] | None = None
        """Awaited before each event is taken, by a program that passes all events on."""

    def __repr__(self) -> str:
        state = "new" if self._job is None else "ended" if self._ended else "open"
        return f"<Stream of job {self._job}, {state}, {len(self.text)} characters>"

    @property
    def n_dropped(self) -> int:
        """How many of the conversation's oldest questions, with their answers, are not in the prompt,
        because the context is full. It may grow until the first text comes. Only for :meth:`Client.ask`."""
        return 0 if self._turn is None else self._turn.n_dropped

    async def __aenter__(self) -> Stream:
        if self._entered:
            raise BadArgument("a stream is entered once")
        self.begin()
        self._entered = True
        try:
            await self._accepted()
        except BaseException as error:
            self._leave(failed=isinstance(error, FrameshardError))
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the job unless it has ended. Returns at once. The engine stops within the time of one shard. If
        another task reads the stream, its iteration ends, and its :meth:`completed` raises :class:`JobCancelled`."""
        self._leave()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> m.Delta:
        while not self._ended:
            if self._events is None:
                raise BadArgument("a stream is read inside its async with block")
            if self._request is not None:  # it was begun and not entered
                await self._accepted_or_left()
            try:
                if self._wait_for_room is not None:
                    await self._wait_for_room()
                event = await self._events.receive()
            except EndOfChannel:
                if self._ended:
                    break
                self._end(failed=True)
                raise self._client._why() from None
            if self._ended:  # another task has closed the stream meanwhile
                break
            self._client._taken(event)
            if isinstance(event, m.Delta):
                self.text += event.text
                if self._turn is not None:
                    self._turn.answer = self.text
                return event
            if isinstance(event, m.Started):
                self.remote = event.remote
                self.seed = event.seed
                continue
            if isinstance(event, m.UnknownEvent):
                continue
            if isinstance(event, m.Thought):
                self.thought += event.text
                if self.on_thought is not None:
                    self.on_thought(event)
                continue
            if isinstance(event, (m.Paused, m.Resumed)):
                self.paused = isinstance(event, m.Paused)
                if self.on_paused is not None:
                    self.on_paused(self.paused)
                continue
            if isinstance(event, m.ToolCalled):
                self._add_call(m.ToolCall(event.call_id, event.name, event.arguments))
                continue
            if isinstance(event, m.Progress):
                self.progress = event
                if self.on_progress is not None:
                    self.on_progress(event)
                continue
            if isinstance(event, m.Failed):
                error = event.error.exception()
                if isinstance(error, ContextOverflow) and self._turn is not None and not self._begun:
                    if self._cancelled:  # the sidecar was told so of the job that has failed
                        self._end()
                        raise JobCancelled("the job was cancelled")
                    if self._turn.shorten(self._excess(error)):
                        await self._open_again()
                        continue
                self._end(failed=True)
                raise error
            if isinstance(event, m.Done):
                self.remote = event.remote
                self.result = Completion(
                    **vars(event),
                    text=self.text,
                    n_dropped=self.n_dropped,
                    seed=self.seed,
                    tool_calls=self.tool_calls,
                )
            self._end()
            if isinstance(event, m.Cancelled):
                raise JobCancelled("the job was cancelled")
        raise StopAsyncIteration

    async def _open_again(self) -> None:
        try:
            self._open()
        except FrameshardError:
            self._leave(failed=True)
            raise
        await self._accepted_or_left()

    def _excess(self, error: ContextOverflow) -> int:
        """At least so many tokens of the prompt and the answer do not fit; 0: not known."""
        n_prompt, n_ctx = error.detail.get("n_prompt"), error.detail.get("n_ctx")
        if not isinstance(n_prompt, int) or not isinstance(n_ctx, int):
            return 0
        if n_prompt > n_ctx:
            return n_prompt - n_ctx
        sampling: m.Sampling = self._fields.get("sampling", m.DEFAULT_SAMPLING)
        return n_prompt + sampling.max_tokens - n_ctx  # there is no room for the answer

    @property
    def _begun(self) -> bool:
        """Something of the answer was read. Another prompt would begin another answer."""
        return bool(self.text or self.thought or self.tool_calls)

    def _add_call(self, call: m.ToolCall) -> None:
        self.tool_calls += (call,)
        if self._turn is not None:
            self._turn.calls = self.tool_calls
        if self.on_tool_call is not None:
            self.on_tool_call(call)

    async def completed(self) -> Completion:
        """Reads to the end and returns the whole answer. The stream need not be entered with ``async with``.

        Raises the errors of iteration.
        """
        if self._job is None:
            async with self:
                return await self.completed()
        async for _ in self:
            pass
        if self.result is None:
            raise JobCancelled("the stream was closed before its end")
        return self.result

    async def cancel(self) -> None:
        """Asks the sidecar to cancel the job. Iteration goes on to the job's last event: :class:`JobCancelled`, or
        another end that came first."""
        if self._job is not None and not self._ended:
            self._cancelled = True
            self._client._cancel(self._job)

    def set_priority(self, priority: int) -> None:
        """Changes the priority of the job, from 0 to 2. This takes effect at once: it may pause another job, or this
        one. Does nothing if the job has ended.

        :raises BadArgument: there is no such priority.
        """
        if type(priority) is not int or not 0 <= priority <= m.MAX_PRIORITY:
            raise BadArgument(f"priority must be an integer from 0 to {m.MAX_PRIORITY}", field="priority")
        self._fields["priority"] = priority
        if self._job is not None and not self._ended:
            self._client._set_priority(self._job, priority)

    def begin(self) -> None:
        """Sends the request, unless it was sent already. Entering the stream does this too.

        :raises FrameshardError: the request cannot be sent, and the stream has ended; or the conversation's last answer
            is still open, and the stream may be begun later.
        """
        if self._job is None:
            if self._ended:
                raise BadArgument("this stream has ended: ask again")
            with typed():
                if self._turn is not None:
                    self._turn.begin()
            try:
                with typed():
                    self._open()
            except BaseException:
                self._end(failed=True)
                raise

    def _open(self) -> None:
        if self._shared is None:
            self._shared = SharedImages(self._images)
            self._images = ()
        images = self._shared.wire
        self._request, self._job, self._events = self._client._open(lambda: self._submit(images))

    async def _accepted(self) -> None:
        """Waits until the sidecar has taken the job. May be called again if the wait was cancelled."""
        if self._request is not None:
            await self._client._answer(self._request, only=False)
            self._client._drop(self._request)
            self._request = None

    async def _accepted_or_left(self) -> None:
        try:
            await self._accepted()
        except FrameshardError:
            self._leave(failed=True)
            raise

    def _leave(self, *, failed: bool = False) -> None:
        if self._request is not None:
            self._client._drop(self._request)
        if self._job is not None and not self._ended:
            self._client._leave(self._job)
            if self._events is not None:
                self._events.close()  # another task may wait for it
        self._end(failed=failed)

    def _end(self, *, failed: bool = False) -> None:
        if not self._ended:
            self._ended, self.paused = True, False
            if self._shared is not None:
                self._shared.close()
            if self._turn is not None:
                self._turn.end(failed=failed)


class BudgetChange:
    """A change of the VRAM budget, made by :meth:`Client.change_budget`. Its answers come in the order of the methods.
    An answer before the one that is awaited need not be awaited itself. An await that was cancelled, or had no answer
    in time, may be repeated."""

    def __init__(self, client: Client, request: int, timeout_s: float) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._n_taken = 0
        weakref.finalize(self, client._drop, request).atexit = False

    async def granted(self) -> m.Lease:
        """The first answer: whether the whole change or a part of it is possible by the deadline, and the predicted
        time.

        :raises BadArgument: no further answer comes, because the change has failed or was closed; or this answer was
            awaited before.
        :raises FrameshardError: as :meth:`Client.set_budget`; the other two methods raise the same errors.
        """
        return await self._answer(m.Lease, 0)

    async def released(self) -> m.Released:
        """The second answer: the change is in force, and the memory is released."""
        return await self._answer(m.Released, 1)

    async def observed(self) -> m.Observed:
        """The third answer: the VRAM that the driver counts. It may come seconds later."""
        observed = await self._answer(m.Observed, 2)
        self.close()
        return observed

    async def _answer(self, kind: type[T], at: int) -> T:
        """Waits for the answer number `at`, from 0. Those before it are taken and dropped."""
        if self._request in self._client._answers and at < self._n_taken:
            raise BadArgument("this answer was awaited before: await the next one")
        while True:
            answer = await self._client._answer(
                self._request, self._timeout_s + ANSWER_S, only=False, while_loading=True
            )
            self._n_taken += 1
            if isinstance(answer, m.Lease) and answer.decision == "partial":
                self._timeout_s = max(PARTIAL_S, answer.seconds)
            if self._n_taken > at:
                assert isinstance(answer, kind)
                return answer

    def close(self) -> None:
        """To be called if no more answers are awaited. The change goes on."""
        self._client._drop(self._request)


class Client:
    """A session with a sidecar; made by :func:`launch` and :func:`connect`. Only tasks of one thread may use it."""

    def __init__(self, core: ClientConnection, socket: Socket, info: ConnectInfo, name: str) -> None:
        self.info = info
        """The sidecar's endpoint and keys, for :func:`connect`. Keep the keys secret."""
        self.on_loading: OnLoading | None = None
        """Called with the progress of a load, when an engine starts again."""
        self._core = core
        self._socket = socket
        self._answers: dict[int, Inbox[m.Reply]] = {}
        self._endings: list[int] = []  # requests for the end of the sidecar
        self._streams: dict[int, Inbox[m.JobEvent]] = {}
        # Weak references: an inbox may be dropped without being closed.
        self._watchers: weakref.WeakSet[Inbox[m.Engine]] = weakref.WeakSet()
        self._listeners: weakref.WeakSet[Inbox[m.Notice]] = weakref.WeakSet()
        self._conversations = Conversations(name)
        self._welcomed = anyio.Event()
        self._blocked = anyio.Event()
        # It is here before the task that it is for: a cancelled client ends that task, however far it has come.
        self._traffic = anyio.CancelScope(shield=True)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the sidecar's additions to the protocol (bindings/PROTOCOL.md, "Features")."""
        return () if self._core.welcome is None else self._core.welcome.features

    @property
    def http_url(self) -> str:
        """Base URL of OpenAI's HTTP interface; "" unless the launch option `http` is set."""
        return self.info.http_url

    @property
    def http_key(self) -> str:
        """The key for HTTP requests (``Authorization: Bearer``). Keep it secret."""
        return self.info.http_key

    def __repr__(self) -> str:
        return f"<Client of {self.info.endpoint}, {self._core.state.value}, {len(self._streams)} jobs>"

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def ask(self, text: str, *, system: str | None = None, **options: Unpack[JobOptions]) -> Stream:
        """Asks the model and streams its answer.

        With a `conversation` the prompt begins with its earlier messages. An answer that was not read to its end is
        included as far as it was read. When the context is full, the oldest questions and answers are forgotten;
        :attr:`Stream.n_dropped` tells how many. A question that gets no answer leaves questions and answers as they
        were; if it fails, also the system message.
        `images` come before the text. Later questions of the conversation include the answer, but not the images.

        :param system: the system message of the conversation from now on.
        :param options: see :class:`frameshard.options.JobOptions`: `conversation`, `sampling`, `images` (bytes of PNG
            or JPEG files, of WAV or MP3 files for a tower that hears, or :class:`Pixels`), `timeline`, `window`,
            `sentences` (deltas say where sentences end),
            `priority` (0 to 2; 2 is urgent), `adapters` (scales of loaded LoRA adapters by name), `thinking`
            (``off``, ``hidden`` or ``shown``) with `thinking_tokens` and `template_keywords`, `tools` (that the model
            may call: see :meth:`tool_results`) and `tool_choice`. `timeline` is a number that comes back in each event:
            a game that loads a saved state can recognise answers to questions from before.
        """
        for name, given in (("text", text), ("system", "" if system is None else system)):
            if not isinstance(given, str):
                raise BadArgument(f"{name} must be a string", field=name)
        turn = Turn(self._conversations, options.get("conversation"), system, text)
        return self._stream("chat", turn, lambda fields: {"messages": turn.messages(fields)}, options)

    def tool_results(self, results: Mapping[str, object], **options: Unpack[JobOptions]) -> Stream:
        """Has the model go on after an answer of :meth:`ask` that ended with calls of tools.

        A question instead of results is possible, too: then the calls are forgotten.

        :param results: the result of each call, by its id: a text, or a value that is given to the model as JSON.
        :param options: as for :meth:`ask`; the `conversation` is needed. Give the `tools` again if the model may call
            further ones.
        :raises BadArgument: a result cannot be written as JSON, such as NaN. When the stream is entered: a result is
            missing, or there is no such call.
        """
        turn = Turn(self._conversations, options.get("conversation"), None, result_texts(results))
        return self._stream("chat", turn, lambda fields: {"messages": turn.messages(fields)}, options)

    def chat(self, messages: Sequence[m.ChatMessage], **options: Unpack[JobOptions]) -> Stream:
        """Like :meth:`ask`, for callers that keep the history themselves.

        With a `conversation` the KV cache is kept. A prompt with the same beginning as the last one is then prefilled
        faster. `images` come before the text of the last message.
        """
        with typed():
            said = tuple(messages)
        return self._stream("chat", None, lambda _: {"messages": said}, options)

    def complete(self, prompt: str, **options: Unpack[JobOptions]) -> Stream:
        """Streams the text that the model generates after `images` and `prompt`, without a chat template."""
        return self._stream("completion", None, lambda _: {"prompt": prompt}, options)

    async def warm_up(self, messages: Sequence[m.ChatMessage], *, adapters: Mapping[str, float] | None = None) -> int:
        """Reads messages ahead of time, such as the lore that many characters share. Later prompts that begin with them
        need not read them again. All other jobs go first.

        :param adapters: those of the later prompts: what was read with other adapters cannot be reused.
        :returns: the number of tokens that were read.
        :raises BadArgument: they are more than the launch option `kv_cache_mb` allows to keep.
        :raises ContextOverflow: they are longer than a context (launch option `n_ctx`).
        :raises Unsupported: the model has a recurrent state.
        """
        return (await self.chat(messages, warm_up=True, adapters=adapters or {}).completed()).n_prompt

    def _stream(
        self,
        kind: m.Kind,
        turn: Turn | None,
        content: Callable[[Mapping[str, Any]], dict[str, Any]],
        options: JobOptions,
    ) -> Stream:
        """Makes the stream of a job.

        :param content: returns the messages or the prompt, from the other fields of the job.
        """
        fields = _known(options, JobOptions)
        images = fields.pop("images", ())
        if "adapters" in fields:
            fields["adapters"] = tuple(m.Adapter(name, scale) for name, scale in _by_name(fields["adapters"]))
        if "tools" in fields:
            fields["tools"] = _told(fields["tools"])

        def submit(shared: tuple[m.Image, ...]) -> tuple[int, int]:
            others = {**fields, "images": shared}
            return self._core.submit(kind, **content(others), **others)

        return Stream(self, submit, turn, images, fields)

    # ---- conversations: what was said is kept here, so it can be read and saved after the end of the sidecar ---------

    def history(self, conversation: str) -> tuple[m.ChatMessage, ...]:
        """The system text, questions and answers of a conversation of :meth:`ask`, oldest first. An open answer is
        included as far as it was read."""
        return self._conversations.history(conversation)

    def forget(self, conversation: str) -> None:
        """Forgets the questions and answers of a conversation. Its system text stays."""
        self._conversations.forget(conversation)

    def save(self, conversation: str) -> bytes:
        """Returns the :meth:`history` of a conversation as bytes, for :meth:`load` and for the other bindings.

        They have some kilobytes, 1 MiB at most; the oldest exchanges of a longer history are left out.
        """
        return self._conversations.save(conversation, self._model)

    def load(self, data: bytes, *, conversation: str) -> LoadResult:
        """Replaces a conversation by a saved one. The next question computes its prompt again.

        The save may be from another sidecar, model, budget or binding.

        :raises BadSave: the data are damaged, too large, of a newer format, or no save; nothing changes.
        :raises BadArgument: an answer of the conversation is still open; nothing changes.
        """
        return self._conversations.load(data, conversation, self._model)

    def save_kv(self, conversation: str, path: str | os.PathLike[str]) -> Awaitable[m.Kv]:
        """Has the sidecar write the KV cache of a conversation to a file, so that after :meth:`load` and
        :meth:`load_kv` its next question need not read the whole text again. The file has kilobytes for each token.

        `n_tokens` of the answer is 0 if there is nothing to write, or if the file cannot be written, which is no error
        here; `detail` says why.

        :raises EngineDied: no engine is running.
        :raises Overloaded: many requests wait.
        """
        absolute = _absolute(path, "path")
        return self._asked(lambda: self._core.kv_save(conversation, absolute), m.Kv, KV_S)

    def load_kv(self, path: str | os.PathLike[str], *, conversation: str) -> Awaitable[m.Kv]:
        """Has the sidecar read a file of :meth:`save_kv`. Await it before the next question of the conversation.

        `n_tokens` of the answer is 0 if the file is damaged, or of another model, device, mode, `kv_type` or version;
        `detail` says why. Then the text is read anew.

        :raises EngineDied: no engine is running.
        :raises Overloaded: many requests wait.
        """
        absolute = _absolute(path, "path")
        return self._asked(lambda: self._core.kv_load(conversation, absolute), m.Kv, KV_S)

    @property
    def _model(self) -> m.ModelInfo:
        welcome = self._core.welcome
        assert welcome is not None
        assert welcome.model is not None  # a sidecar is reached once its model is loaded
        return welcome.model

    # ---- VRAM and figures: a request is sent by the call, and answered when that is awaited --------------------------

    async def set_budget(
        self,
        vram_budget_mb: float,
        *,
        observe: bool = True,
        on_lease: Callable[[m.Lease], None] | None = None,
        on_released: Callable[[m.Released], None] | None = None,
        **terms: Unpack[LeaseTerms],
    ) -> BudgetResult:
        """Sets the VRAM budget: the limit in MiB for everything that the sidecar holds in VRAM; 0 for no limit.

        Jobs go on meanwhile. If `state` is not ``active``, they wait, and the budget applies when the sidecar is active
        again.

        :param observe: also wait until the driver's count is known, which may take seconds.
        :param on_lease: called with the first answer, which comes at once.
        :param on_released: called with the second answer, before the driver's count is known.
        :param terms: see :class:`frameshard.options.LeaseTerms`: `timeout_s`, `state`, `floor_mb`, `version`, `reason`,
            `host_budget_mb` (the limit for host memory).
        :raises BadArgument: a term has a wrong value, or the sidecar is to be parked while it is hibernated; nothing
            changes.
        :raises BudgetBelowFloor: the model cannot run in this budget, or the sidecar in this host budget; nothing
            changes.
        :raises Unsupported: the system does not count host memory, so there can be no host budget.
        :raises StaleLease: a newer change is in force; nothing changes.
        :raises DeadlineMissed: the memory was not released in time. The new budget stays in force. The time in which an
            engine is loaded does not count.
        :raises EngineDied: the engine is off after repeated deaths.
        """
        change = self.change_budget(vram_budget_mb, **terms)
        lease = await change.granted()
        if on_lease is not None:
            on_lease(lease)
        released = await change.released()
        if on_released is not None:
            on_released(released)
        if not observe:
            change.close()
        return BudgetResult(**vars(released), lease=lease, observed=await change.observed() if observe else None)

    def change_budget(self, vram_budget_mb: float, **terms: Unpack[LeaseTerms]) -> BudgetChange:
        """Like :meth:`set_budget`, for callers that await each answer themselves. The request is sent at once.

        :raises BadArgument: a term has a wrong value.
        """
        fields = _known(terms, LeaseTerms)
        if "floor_mb" in fields:
            fields["floor_bytes"] = mebibytes(fields.pop("floor_mb"), "floor_mb")
        if fields.get("host_budget_mb") is not None:
            fields["host_budget_bytes"] = mebibytes(fields["host_budget_mb"], "host_budget_mb")
        fields.pop("host_budget_mb", None)
        budget_bytes = mebibytes(vram_budget_mb)
        request_id = self._ask(lambda: self._core.budget_set(budget_bytes, **fields))
        return BudgetChange(self, request_id, terms.get("timeout_s", m.BudgetSet.timeout_s))

    def budget(self) -> Awaitable[m.Budget]:
        """The lease in force: budget, floor, state and version."""
        return self._asked(self._core.budget_get, m.Budget)

    def caps_and_requirements(self) -> Awaitable[m.Caps]:
        """The properties of the device and the requirements of the model."""
        return self._asked(self._core.caps_and_requirements, m.Caps)

    def plan(self, budgets_mb: Sequence[float], *, prompt_tokens: int = 512) -> Awaitable[tuple[m.PlanRow, ...]]:
        """Predicts placements and speed at each budget; changes nothing.

        :param budgets_mb: at most 32 budgets in MiB.
        :param prompt_tokens: length of the prompt for the predicted TTFT.
        :raises EngineDied: no engine is running.
        :raises Overloaded: many requests wait.
        :raises Unsupported: the model runs on the CPU, without a shard device.
        """

        def request() -> int:
            return self._core.plan(tuple(mebibytes(budget) for budget in budgets_mb), prompt_tokens)

        return self._asked_then(request, m.PlanAnswer, lambda plan: plan.rows)

    def count_tokens(
        self, content: str | Sequence[m.ChatMessage], *, tools: Sequence[Tool] = ()
    ) -> Awaitable[m.TokenCount]:
        """Counts the tokens of the prompt of a completion, or of a chat as the model's chat template renders it. No job
        waits for it. The result also says how many tokens still fit into the context behind the prompt.

        :param tools: those of the chat: the prompt describes them.
        :raises BadArgument: `content` is empty, the chat template refuses the messages, or a tool is wrong.
        :raises ContextOverflow: the prompt is so long that it cannot fit into the context. (A prompt that is only a
            little too long is counted, and no token is left.)
        :raises EngineDied: no engine is running.
        :raises Overloaded: many requests wait.
        :raises Unsupported: it is a chat and the model has no chat template, or one that cannot have tools.
        """
        told = _told(tools)

        def request() -> int:
            messages, prompt = ((), content) if isinstance(content, str) else (tuple(content), "")
            return self._core.count_tokens(messages, prompt, told)

        return self._asked(request, m.TokenCount)

    def embed(self, texts: Sequence[str]) -> Awaitable[Rows]:
        """Embeds texts with the sentence encoder that the sidecar was launched with (`embedder`). Texts of similar
        meaning have rows with a large dot product. No job waits for it.

        The first call waits until the encoder is loaded. Texts are encoded at idle priority, so while other programs
        use all CPU time the answer may take long.

        :param texts: 1 to 64 texts, each not empty.
        :returns: shape [number of texts, dimensions], float16. Each row has length 1.
        :raises BadArgument: there are no texts, too many, or one of them is empty or larger than 64 KiB; or `texts` is
            one text and not a list.
        :raises ContextOverflow: a text is longer than the encoder's context. Detail has its index as ``text``.
        :raises Unsupported: the sidecar has no sentence encoder.
        :raises BadModel: the encoder's file cannot be used.
        :raises ModelNotFound: there is no such file.
        :raises Overloaded: too many requests wait.
        :raises EngineDied: the embedder's process died twice.
        """
        return self._asked_then(lambda: self._core.embed(_listed(texts)), m.Embeddings, rows_of, EMBED_S)

    def embed_counted(self, texts: Sequence[str]) -> Awaitable[tuple[Rows, int]]:
        """As :meth:`embed`, with the number of tokens that the encoder has read for all texts (0: the sidecar is older
        and does not tell)."""
        return self._asked_then(
            lambda: self._core.embed(_listed(texts)),
            m.Embeddings,
            lambda answer: (rows_of(answer), answer.n_tokens),
            EMBED_S,
        )

    def notices(self) -> Inbox[m.Notice]:
        """The sidecar's notices from now on: ``async for notice in client.notices()``. Of those that were
        not read the last 16 are kept."""
        return self._listen(self._listeners)

    def set_pacing(
        self, scheduling_mode: m.SchedulingMode = "balance", *, target_tokens_per_second: float = 0.0
    ) -> Awaitable[None]:
        """Sets how the sidecar shares the GPU with the frames of :meth:`frame_block`.

        :param scheduling_mode: ``prioritize_graphics`` uses the GPU only in the time that the frames leave free.
            ``balance`` uses more, as long as the frames keep their target time. ``prioritize_compute`` ignores the
            frames.
        :param target_tokens_per_second: the limit for all jobs together, from 0.1 to 10,000; 0 for no limit.
        """
        return self._asked_then(
            lambda: self._core.pacing(scheduling_mode, target_tokens_per_second), m.Ok, lambda ok: None
        )

    def frame_block(self, *, target_frame_ms: float = 1000 / 60) -> Awaitable[FrameBlock]:
        """The frame block, into which the host writes each frame. Only one program may write into a sidecar's block.

        :param target_frame_ms: the time that a frame should take.
        """
        return self._asked_then(
            self._core.frame_block, m.FrameBlock, lambda found: FrameBlock(found.path, target_frame_ms=target_frame_ms)
        )

    def adapter_load(self, name: str, path: str | os.PathLike[str]) -> Awaitable[m.Adapters]:
        """Loads a LoRA adapter, which jobs may then use: ``ask(..., adapters={name: 0.8})``. Jobs go on meanwhile. The
        adapters stay loaded if the engine restarts.

        :raises ModelNotFound: there is no such file.
        :raises BadModel: the file is damaged, is not a LoRA adapter, or is for another model.
        :raises Unsupported: this kind of adapter cannot be applied.
        :raises BudgetBelowFloor: the VRAM budget has no room for it; nothing changes.
        :raises BadArgument: another file is loaded under this name, too many adapters are loaded, the name has a "=",
            or the lease is parked.
        :raises EngineDied: no engine is running, as while the lease is hibernated, or it died over the request.
        :raises Overloaded: many requests wait, or no sequence is free to try the adapter.
        """
        absolute = _absolute(path, "path")
        return self._asked(lambda: self._core.adapter_load(name, absolute), m.Adapters, ADAPTER_S)

    def adapter_unload(self, name: str) -> Awaitable[m.Adapters]:
        """Unloads a LoRA adapter and frees its VRAM. If none of this name is loaded, nothing changes. No new job may
        use it meanwhile; if this is refused, it stays loaded.

        :raises BadArgument: a job that has not ended uses it, or one that has not left the engine yet.
        :raises EngineDied: no engine is running, or it died over the request.
        :raises Overloaded: many requests wait.
        """
        return self._asked(lambda: self._core.adapter_unload(name), m.Adapters, ADAPTER_S)

    def model_info(self) -> Awaitable[m.ModelInfo]:
        """The loaded model and how it was loaded."""
        return self._asked_then(self._core.model_info, m.Model, lambda answer: answer.model)

    def stats(self) -> Awaitable[m.Stats]:
        """The present figures of the sidecar: jobs, speed, VRAM. Those of the engine are None while no engine runs, or
        while many requests wait for it."""
        return self._asked(self._core.stats, m.Stats)

    def engine_changes(self) -> Inbox[m.Engine]:
        """The changes of the engine's state from now on. Of those that were not read the last 16 are kept."""
        return self._listen(self._watchers)

    def shutdown(self) -> Awaitable[None]:
        """Ends the sidecar for all its clients."""

        def request() -> int:
            self._endings.append(self._core.shutdown())
            return self._endings[-1]

        return self._asked_then(request, m.Ok, lambda ok: None)

    def _listen(self, listeners: weakref.WeakSet[Inbox[T]]) -> Inbox[T]:
        inbox = Inbox[T](MAX_UNREAD)
        listeners.add(inbox)
        if self._core.error is not None:
            inbox.close()
        return inbox

    # ---- for streams ------------------------------------------------------------------------------------------------

    def _open(self, submit: Callable[[], tuple[int, int]]) -> tuple[int, int, Inbox[m.JobEvent]]:
        request_id, job = submit()
        self._expect(request_id)
        # At most a window of events is on its way, and this client may add one if the sidecar does not know the job.
        events = self._streams[job] = Inbox(m.MAX_WINDOW + 1)
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

    def _set_priority(self, job: int, priority: int) -> None:
        if self._core.error is None:
            self._core.set_priority(job, priority)
            self._flush()

    def _leave(self, job: int) -> None:
        self._streams.pop(job, None)
        if self._core.error is None:
            self._core.abandon(job)
            self._cancel(job)

    def _why(self) -> FrameshardError:
        assert self._core.error is not None
        return again(self._core.error)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[], int]) -> int:
        request_id = request()
        self._expect(request_id)
        self._flush()
        return request_id

    def _asked(self, request: Callable[[], int], kind: type[T], timeout_s: float = ANSWER_S) -> Awaitable[T]:
        """Sends a request at once. Await the result for its answer."""
        return self._asked_then(request, kind, lambda found: found, timeout_s)

    def _asked_then(
        self, request: Callable[[], int], kind: type[T], made: Callable[[T], U], timeout_s: float = ANSWER_S
    ) -> Awaitable[U]:
        """Like :meth:`_asked`, for what is made of the answer. It is one coroutine, because asyncio may cancel a task
        before its first step: a coroutine inside would then complain that nobody has awaited it."""
        with typed():
            request_id = self._ask(request)

        async def answer() -> U:
            found = await self._answer(request_id, timeout_s)
            assert isinstance(found, kind)
            return made(found)

        coroutine = answer()
        weakref.finalize(coroutine, self._drop, request_id).atexit = False  # the answer may come, and nobody take it
        return coroutine

    def _expect(self, request_id: int) -> None:
        self._answers[request_id] = Inbox(MAX_REPLIES)

    def _drop(self, request_id: int) -> None:
        self._answers.pop(request_id, None)

    async def _answer(
        self, request_id: int, timeout_s: float = ANSWER_S, *, only: bool = True, while_loading: bool = False
    ) -> m.Reply:
        """Waits for an answer.

        :param only: it is the only one, and nobody waits again if this fails or is cancelled.
        :param while_loading: an engine that is being loaded will answer. The time until it is ready does not count.
        """
        inbox = self._answers.get(request_id)
        if inbox is None:
            if self._core.error is not None:
                raise self._why()
            raise BadArgument("no further answer to this request comes")
        # The time limit counts heartbeats, so time in which either process was stopped does not count. The time before
        # the request is sent does not count either: if it was held up when a wait began, a whole limit follows.
        due_beats = self._core.heard_beats + timeout_s / BEAT_S
        answer = None
        try:
            while answer is None:
                held_up = self._held_up(request_id, while_loading)
                with anyio.move_on_after(max(BEAT_S, (due_beats - self._core.heard_beats) * BEAT_S)):
                    answer = await inbox.receive()
                if held_up or self._held_up(request_id, while_loading):
                    due_beats = self._core.heard_beats + timeout_s / BEAT_S
                elif answer is None and self._core.heard_beats >= due_beats:
                    raise DeadlineMissed(f"no answer within {timeout_s:g} s")
        except EndOfChannel:
            raise self._why() from None
        finally:
            if only or isinstance(answer, m.Error):
                self._drop(request_id)
        if isinstance(answer, m.Error):
            raise answer.error.exception()
        return answer

    def _held_up(self, request_id: int, while_loading: bool) -> bool:
        """Whether a request cannot be answered yet: it is not sent, or waits for an engine that is being loaded."""
        return self._core.waits(request_id) or (while_loading and self._core.engine in _LOADING)

    # ---- tasks ------------------------------------------------------------------------------------------------------

    @enable_ki_protection
    async def _run(self, sidecar: anyio.abc.Process | None) -> None:
        """Receives messages until :attr:`_traffic` is cancelled. It is shielded from other cancellations, so that a
        cancelled client can still end its session."""
        with self._traffic:
            async with anyio.create_task_group() as group:
                for task in (self._receive, self._beat, self._retry):
                    group.start_soon(task)
                if sidecar is not None:
                    group.start_soon(self._watch, sidecar)

    @enable_ki_protection
    async def _watch(self, sidecar: anyio.abc.Process) -> None:
        """Waits for the end of a launched sidecar, so that it is known at once. The end of other sidecars is noticed
        only because they are silent."""
        status = await sidecar.wait()
        if status == 0:  # it has done as it was asked, though its answer may not have been read yet
            for request_id in self._endings:
                if request_id in self._answers:
                    self._answers[request_id].put(m.Ok(request_id, self.info.epoch))
        self._core.gone(ConnectionLost(f"the sidecar has ended with status {status}"))
        self._flush()

    async def _greeted(self) -> None:
        await self._welcomed.wait()
        if self._core.error is not None:
            raise self._why()

    @enable_ki_protection
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

    @enable_ki_protection
    async def _beat(self) -> None:
        while True:
            await anyio.sleep(BEAT_S)
            self._core.beat()
            self._flush()

    @enable_ki_protection
    async def _retry(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = anyio.Event()
            await anyio.sleep(RETRY_S)
            self._flush()

    def _deliver(self, message: m.Reply | m.JobEvent | m.Unasked) -> None:
        if isinstance(message, m.JobEvent):
            if message.job in self._streams:
                self._streams[message.job].put(message)
        elif isinstance(message, m.Engine):
            _tell(self._watchers, message)
        elif isinstance(message, m.Notice):
            _tell(self._listeners, message)
        elif isinstance(message, m.Loading):
            if self.on_loading is not None:
                self.on_loading(message)
        elif isinstance(message, m.Welcome):
            self._welcomed.set()
        elif message.id in self._answers:
            self._answers[message.id].put(message)

    def _flush(self) -> None:
        while (frame := self._core.next_frame()) is not None:
            if not self._socket.try_send([frame]):
                self._blocked.set()
                break
            self._core.sent()
        if self._core.error is not None:
            self._lost()

    def _lost(self) -> None:
        """Ends all waiting for answers and events."""
        self._welcomed.set()
        inboxes: tuple[Inbox[Any], ...]
        inboxes = (*self._answers.values(), *self._streams.values(), *self._watchers, *self._listeners)
        for inbox in inboxes:
            inbox.close()


@contextlib.contextmanager
def _open_log(log: int | None) -> Iterator[int]:
    """Yields a file descriptor for the sidecar's log. For None it is standard error, or the null device if that is
    closed."""
    try:
        fd = os.open(os.devnull, os.O_WRONLY) if log == subprocess.DEVNULL else os.dup(2 if log is None else log)
    except TypeError:
        raise BadArgument("log is a file descriptor, such as file.fileno()", field="log") from None
    except OSError as error:
        if log is not None:
            raise BadArgument(f"log is no open file descriptor: {error.strerror}", field="log") from None
        fd = os.open(os.devnull, os.O_WRONLY)
    try:
        yield fd
    finally:
        os.close(fd)


OnLoading = Callable[[m.Loading], None]


async def _ready_line(sidecar: anyio.abc.Process, config: bytes, on_loading: OnLoading | None) -> bytes:
    """Sends the configuration and reads the sidecar's line; it is incomplete if the sidecar has ended. Lines with the
    progress of the load, which may come before, go to `on_loading`."""
    assert sidecar.stdin is not None
    assert sidecar.stdout is not None
    said = b""
    with contextlib.suppress(anyio.BrokenResourceError):  # it reads no further; what it has to say comes below
        await sidecar.stdin.send(config)
    with contextlib.suppress(anyio.BrokenResourceError, anyio.EndOfStream):
        while len(said) < MAX_READY_LINE:
            while b"\n" in said:
                line, _, said = said.partition(b"\n")
                loading = wire_launch.parse_loading(line)
                if loading is None:
                    return line + b"\n"
                if on_loading is not None:
                    on_loading(loading)
            said += await sidecar.stdout.receive()
    return said


@enable_ki_protection
async def _copy_words(sidecar: anyio.abc.Process, log: int, output: bytearray) -> None:
    """Copies the sidecar's output to the log, until the sidecar writes to the log itself. Keeps the last part in
    `output`."""
    assert sidecar.stderr is not None
    async for data in sidecar.stderr:
        with contextlib.suppress(OSError):
            os.write(log, data)
        output += data
        del output[:-MAX_OUTPUT]


async def _status(sidecar: anyio.abc.Process) -> str:
    """Waits for a sidecar that has closed its output, and says how it ended."""
    with anyio.move_on_after(EXIT_S):
        await sidecar.wait()
    if sidecar.returncode is None:
        sidecar.kill()
        await sidecar.wait()
        return "not even after it had closed its output"
    return f"by signal {-sidecar.returncode}" if sidecar.returncode < 0 else f"with status {sidecar.returncode}"


def _tell(listeners: Iterable[Inbox[T]], what: T) -> None:
    for listener in listeners:
        listener.put(what)


class ClientScope:
    """The result of :func:`launch` and :func:`connect`. ``async with`` gives the :class:`Client`."""

    def __init__(
        self,
        name: str,
        info: ConnectInfo | None,
        config: ServeConfig | None,
        log: int | None,
        on_loading: OnLoading | None = None,
    ) -> None:
        try:
            checks.fields_of(m.Hello)["client"].check.take(name, True)
        except checks.Refused as refused:
            raise BadArgument(f"name: {refused}", field="name") from None
        self._name = name
        self.on_loading = on_loading
        self._info = info
        self._config = config
        self._log = log
        self._sidecar: anyio.abc.Process | None = None
        self._client: Client | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def __aenter__(self) -> Client:
        # The task group is closed without the exception of the block, so that an error of the user's code is raised as
        # it is and not in an exception group.
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            if self._config is not None:
                self._info = await self._start(self._config)
            assert self._info is not None
            self._client = self._connect(self._info)
            # Not by start(): in a scope that is cancelled it would wait for a task that is shielded.
            self._tasks.start_soon(self._client._run, self._sidecar)
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
        try:
            with anyio.CancelScope(shield=True):
                await self._leave()
        finally:
            try:
                # The group's own scope is not cancelled: it has this task in it.
                if self._client is not None:
                    self._client._traffic.cancel()
                await self._tasks.__aexit__(None, None, None)
            except BaseException as error:
                cause = only_cause(error)
                if cause is None:
                    raise
                raise cause from None
            finally:
                if self._client is not None:
                    self._client._socket.close()
                if self._context is not None:
                    self._context.destroy(linger=0)
                with anyio.CancelScope(shield=True):
                    await self._end()

    async def _leave(self) -> None:
        client = self._client
        if client is None:
            return
        try:
            if client._core.error is None and client._core.welcome is not None:
                with anyio.move_on_after(SHUTDOWN_S), contextlib.suppress(FrameshardError):
                    await client._answer(client._ask(client._core.shutdown if self._config else client._core.bye))
        finally:
            client._core.close()
            client._lost()

    async def _end(self) -> None:
        if self._sidecar is None:
            return
        if self._client is None and self._sidecar.returncode is None:
            self._sidecar.terminate()  # while it is still importing modules, it would notice our end too late
        with anyio.move_on_after(EXIT_S):
            await self._sidecar.aclose()  # kills the process if it is cancelled

    async def _start(self, config: ServeConfig) -> ConnectInfo:
        with _open_log(self._log) as log:
            try:
                with system.inheriting(log) as child:
                    command = program.command("frameshard.broker", "--log-fd", child.name)
                    self._sidecar = await anyio.open_process(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,  # until it writes to the log itself: see broker/__main__.py
                        **child.options,
                    )
            except (OSError, RuntimeError) as error:  # RuntimeError: trio has no thread to start it in
                why = error.strerror if isinstance(error, OSError) else error
                raise EngineDied(f"the sidecar cannot be started with {command[0]}: {why}") from None
            line, output, status, failure = b"", bytearray(), None, None
            async with anyio.create_task_group() as group:
                group.start_soon(_copy_words, self._sidecar, log, output)
                try:
                    line = await _ready_line(self._sidecar, wire_launch.config_line(config), self.on_loading)
                    status = None if line.endswith(b"\n") else await _status(self._sidecar)
                except (
                    Exception,
                    KeyboardInterrupt,
                ) as error:  # raised behind the group, which would wrap it in an exception group
                    failure = error
                if status is None:
                    group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if status is not None:
            last = output.decode(errors="replace").strip()
            raise EngineDied(
                f"the sidecar ended before it was ready: {command[0]} ended {status}, "
                + (f"and its last words are: {last}" if last else "without a word"),
                python=command[0],
                status=status,
            )
        return wire_launch.parse_ready(line)

    def _connect(self, info: ConnectInfo) -> Client:
        if self._config is None and _has_ended(info):
            raise ConnectionLost(f"the sidecar of this connect file has ended (its process {info.pid} is gone)")
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
        core = ClientConnection(self._name, epoch=info.epoch, notices=True)
        client = Client(core, Socket(dealer), info, self._name)
        client.on_loading = self.on_loading
        client._flush()
        return client


def launch(
    model: str | os.PathLike[str],
    *,
    vram_budget_mb: float = 0,
    name: str = "python",
    log: int | None = None,
    on_loading: OnLoading | None = None,
    **options: Unpack[LaunchOptions],
) -> ClientScope:
    """Starts a sidecar with a model and connects to it: ``async with launch(...) as client``.

    The sidecar ends with the block. It also ends when this process ends, for whatever reason.

    :param model: path of a GGUF file; :func:`frameshard.models.resolve` finds one by name.
    :param vram_budget_mb: the limit in MiB for everything that the sidecar holds in VRAM; 0 for no limit.
    :param name: name of this client in the sidecar's log.
    :param log: file descriptor for the sidecar's log, or ``subprocess.DEVNULL``; by default standard error.
    :param on_loading: called with each :class:`frameshard.Loading` while the model is loaded, for a progress bar; also
        when an engine starts again later.
    :param options: see :class:`frameshard.options.LaunchOptions`: `device` (``auto``: the best GPU, or the CPU if
        there is none), `n_ctx`, `n_parallel`, `mmproj`, ...
    :raises BadArgument: an option is unknown or has a wrong value.
    :raises Unsupported: this program is frozen or embeds Python, so that there is no Python to run the sidecar with.

    Entering the block raises the error of a failed load: :class:`ModelNotFound`, :class:`BadModel`,
    :class:`UnknownDevice`, :class:`BudgetBelowFloor`, ...
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise Unsupported(  # the program itself would be started again instead of a sidecar
            "a frozen program, or one that embeds Python, has no Python to run the sidecar with: start the command"
            " `frameshard serve --connect-file FILE` of a bundle, then connect(FILE)"
        )
    fields: dict[str, Any] = {**options}
    for path in ("mmproj", "draft_model", "embedder", "fallback_key_file"):
        given = fields.pop(path, None)
        fields |= {path: _absolute(given, path)} if given else {}
    if "adapters" in fields:
        fields["adapters"] = [_named(name, path) for name, path in _by_name(fields["adapters"])]
    if isinstance(fields.get("connect_file"), os.PathLike):
        fields["connect_file"] = os.fspath(fields["connect_file"])
    for size in ("kv_cache", "host_budget"):
        if f"{size}_mb" in fields:
            fields[f"{size}_bytes"] = mebibytes(fields.pop(f"{size}_mb"), f"{size}_mb")
    if on_loading is not None:
        fields["loading"] = "on"
    fields |= {"model": _absolute(model, "model"), "vram_budget_bytes": mebibytes(vram_budget_mb)}
    return ClientScope(name, None, wire_launch.make_config(fields), log, on_loading)


def _known(options: Mapping[str, Any], all_options: type) -> dict[str, Any]:
    """A copy of keyword arguments, none of which is unknown."""
    for name in options:
        if name not in all_options.__annotations__:
            raise BadArgument(f"{name}: unknown option", field=name)
    return {**options}


def _listed(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts of a list. A string is refused: it is a sequence too, of single letters."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise BadArgument("texts must be a list of strings", field="texts")
    return tuple(texts)


def _absolute(path: str | os.PathLike[str], field: str) -> str:
    try:
        return os.path.abspath(path)
    except TypeError:
        raise BadArgument(f"{field} must be a path", field=field) from None


def _named(name: str, path: str | os.PathLike[str]) -> str:
    """An adapter as the launch options have it. Its name ends at the first '='."""
    if not isinstance(name, str) or "=" in name:
        raise BadArgument(f"adapters: the name {name!r} must be a string without '='", field="adapters")
    return f"{name}={_absolute(path, 'adapters')}"


def _by_name(adapters: Mapping[str, T]) -> Iterable[tuple[str, T]]:
    if not isinstance(adapters, Mapping):
        raise BadArgument("adapters: must be a map by name, such as {'pirate': 0.8}", field="adapters")
    return adapters.items()


def connect(target: str | os.PathLike[str] | ConnectInfo, *, name: str = "python") -> ClientScope:
    """Connects to a running sidecar: ``async with connect(...) as client``. The end of the block does not end the
    sidecar. Entering the block raises :class:`ConnectionLost` if no sidecar answers.

    :param target: the path of its connect file, or the :attr:`Client.info` of another client.
    :param name: name of this client in the sidecar's log.
    :raises ConnectionLost: there is no such file.
    :raises BadArgument: it is no connect file.
    """
    if isinstance(target, ConnectInfo):
        return ClientScope(name, target, None, None)
    if not isinstance(target, str | os.PathLike):
        raise BadArgument("target must be the path of a connect file, or a client's info", field="target")
    try:
        text = system.read_start(Path(target), wire_launch.MAX_CONNECT_FILE)
    except FileExistsError as error:
        raise BadArgument(f"{os.fspath(target)} is no connect file: {error.strerror}", field="target") from None
    except OSError as error:
        raise ConnectionLost(f"no sidecar has left its connect file at {os.fspath(target)}: {error.strerror}") from None
    except ValueError as error:  # the path contains NUL, or is not UTF-8
        raise BadArgument(f"target is no path: {error}", field="target") from None
    try:
        info = wire_launch.parse_info(text)
    except BadArgument as error:
        raise BadArgument(f"{os.fspath(target)} is no connect file: {error.message}", **error.detail) from None
    return ClientScope(name, info, None, None)


def _has_ended(info: ConnectInfo) -> bool:
    """Whether a sidecar was killed, so that its connect file was left. A process that is not seen may run in another
    namespace: then somebody listens at the endpoint."""
    if system.may_run(info.pid):
        return False
    kind, _, where = info.endpoint.partition("://")
    address: Any = where
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        address = (host, int(port))
    family = socket.AF_INET
    if sys.platform != "win32" and kind == "ipc":
        family = socket.AF_UNIX
    with socket.socket(family) as caller:
        caller.settimeout(ENDED_S)
        try:
            caller.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            pass
    return False


def _told(tools: Iterable[Tool]) -> tuple[m.Tool, ...]:
    """The tools as the protocol has them."""
    with typed():
        for tool in (given := tuple(tools)):
            if not isinstance(tool, Tool):
                raise BadArgument(
                    f"tools: a {type(tool).__name__} is no Tool: take frameshard.tool(function), or "
                    "frameshard.Tool(name, description, schema)",
                    field="tools",
                )
        return tuple(tool.wire() for tool in given)


def result_texts(results: Mapping[str, object]) -> dict[str, str]:
    """The results of calls as the model reads them: letters as they are, not as numbers of code points.

    :raises BadArgument: it is no map, or a result cannot be written as JSON.
    """
    if not isinstance(results, Mapping):
        raise BadArgument("results must be a map: the result of each call by its id", field="results")

    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)

    try:
        return {call: text(value) for call, value in results.items()}
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArgument(f"results: {error}", field="results") from None


def rows_of(answer: m.Embeddings) -> Rows:
    """The rows of an answer, shape [number of texts, dimensions]."""
    import numpy as np

    return np.frombuffer(answer.rows, "<f2").reshape(-1, answer.n_dim).astype(np.float16)


def mebibytes(count: float, field: str = "vram_budget_mb") -> int:
    """The bytes of so many MiB, rounded up: the rest of a subtraction is above 0, and must not become "no limit".

    :param field: the argument that has the number, for the error.

    :raises BadArgument: it is not a number from 0 up.
    """
    if type(count) not in (int, float) or not 0 <= count < 2**33:
        raise BadArgument(f"{field} is a number of MiB, 0 or more", field=field)
    return math.ceil(count * MIB)
