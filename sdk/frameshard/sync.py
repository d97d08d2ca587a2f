"""The client for programs with a frame loop: no call waits, and once a frame :meth:`Sidecar.poll` says what happened.

    sidecar = Sidecar.launch(path, vram_budget_mb=2048)
    sidecar.ask("Any rooms left?", conversation="innkeeper")
    while playing:
        for event in sidecar.poll():
            if isinstance(event, TextAdded):
                subtitles += event.text
    sidecar.close()

A thread of its own runs the asynchronous client. Calls here queue a command for it and return; commands are carried out
in order, and their outcome, errors included, comes as an event. What a call is given is copied: the program may change
its lists and buffers at once. What an event brings is the protocol's own message
(:mod:`frameshard.wire.messages`), as from the asynchronous client. Handles (:class:`Job`) change only inside
:meth:`Sidecar.poll`, so the program's thread never sees one change in between. While a program does not poll,
1,024 events wait for it here, and the sidecar keeps some text of each job (its launch option `held_bytes`, 48 KiB). A
job whose answer is longer than that ends with :class:`Overloaded`. All others are complete when it polls again.

The thread does not come along into a forked process (:func:`os.fork`). There, whatever asks for something raises
:class:`ConnectionLost`, and jobs that were open do not end: connect anew with :meth:`Sidecar.connect`. The parent goes
on as before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from frameshard import client as asynchronous
from frameshard.client import Client, ClientScope, Completion, Rows, Stream
from frameshard.conversation import LoadResult, check_name
from frameshard.errors import (
    BadArgument,
    ConnectionLost,
    DeadlineMissed,
    FrameshardError,
    JobCancelled,
    again,
    internal,
    typed,
)
from frameshard.frame import FrameBlock
from frameshard.images import unchanging
from frameshard.options import JobOptions, LaunchOptions, LeaseTerms
from frameshard.records import record
from frameshard.tools import Tool
from frameshard.wire import messages as m
from frameshard.wire.launch import ConnectInfo

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AdaptersArrived",
    "BudgetArrived",
    "BudgetGranted",
    "BudgetObserved",
    "BudgetRefused",
    "BudgetReleased",
    "CapsArrived",
    "Closed",
    "EmbeddingsArrived",
    "Event",
    "Failed",
    "Finished",
    "FrameBlockArrived",
    "HistoryArrived",
    "Job",
    "KvArrived",
    "Loaded",
    "PacingArrived",
    "Paused",
    "PlanArrived",
    "Progressed",
    "Ready",
    "Resumed",
    "Saved",
    "Sidecar",
    "StatsArrived",
    "TextAdded",
    "ThoughtAdded",
    "TokenCountArrived",
    "ToolCalled",
]

T = TypeVar("T")

MAX_EVENTS = 1024
"""Events waiting for :meth:`Sidecar.poll`; jobs are held back beyond that."""

CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class Job:
    """One request. Its fields say what :meth:`Sidecar.poll` has reported so far."""

    def __init__(self) -> None:
        self.text = ""
        self.thought = ""
        """What the model has thought so far, if `thinking` is ``shown``."""
        self.tool_calls: tuple[m.ToolCall, ...] = ()
        """The calls of tools so far."""
        self.paused = False
        """True while a job of higher priority has its place. It continues on its own."""
        self.result: Completion | None = None
        self.error: FrameshardError | None = None
        """Why there is no result; :class:`JobCancelled` after :meth:`Sidecar.cancel`."""
        self._scope = trio.CancelScope()
        self._stream: Stream | None = None

    @property
    def ended(self) -> bool:
        return self.result is not None or self.error is not None

    def __repr__(self) -> str:
        state = "failed" if self.error else "finished" if self.result else "open"
        return f"<Job {state}, {len(self.text)} characters>"


@record
class Ready:
    """The sidecar has loaded its model. `features`, `http_url` and `http_key` are those of
    :class:`frameshard.Client`."""

    model: m.ModelInfo
    features: tuple[str, ...]
    http_url: str
    http_key: str = field(repr=False)


@record
class TextAdded:
    """More of a job's answer."""

    job: Job
    delta: m.Delta

    @property
    def text(self) -> str:
        """Of the delta; never cut within a code point."""
        return self.delta.text


@record
class ThoughtAdded:
    """More of what the model thinks before it answers. Only for jobs whose `thinking` is ``shown``."""

    job: Job
    thought: m.Thought


@record
class ToolCalled:
    """A job's answer calls a tool. After :class:`Finished`, give the results to :meth:`Sidecar.tool_results`."""

    job: Job
    call: m.ToolCall


@record
class Progressed:
    """How far a job with images or a long prompt has got before its first token."""

    job: Job
    progress: m.Progress


@record
class Paused:
    """A job of higher priority has taken a job's place. The job continues on its own; :class:`Resumed` follows."""

    job: Job


@record
class Resumed:
    """A paused job continues."""

    job: Job


@record
class Finished:
    """A job's last event: the answer is complete."""

    job: Job
    completion: Completion


@record
class Failed:
    """A job's last event: it ended by an error, or was cancelled (:class:`JobCancelled`)."""

    job: Job
    error: FrameshardError


@record
class BudgetGranted:
    """First answer to a change of the budget: all of it by the deadline, or a part, and how long it is predicted to
    take."""

    request: int
    lease: m.Lease


@record
class BudgetReleased:
    """Second answer: the change is in force, and the memory is released."""

    request: int
    released: m.Released


@record
class BudgetObserved:
    """Third answer: what the driver counts."""

    request: int
    observed: m.Observed


@record
class BudgetRefused:
    """The change was refused and nothing has changed, or (:class:`DeadlineMissed`) it is in force but late."""

    request: int
    error: FrameshardError


@record
class BudgetArrived:
    """Answer to :meth:`Sidecar.budget`; an `error` instead when there was none."""

    request: int
    budget: m.Budget | None
    error: FrameshardError | None


@record
class CapsArrived:
    """Answer to :meth:`Sidecar.caps_and_requirements`; an `error` instead when there was none."""

    request: int
    caps: m.Caps | None
    error: FrameshardError | None


@record
class PlanArrived:
    """Answer to :meth:`Sidecar.plan`, one row for each budget asked; an `error` instead when there was none."""

    request: int
    rows: tuple[m.PlanRow, ...] | None
    error: FrameshardError | None


@record
class TokenCountArrived:
    """Answer to :meth:`Sidecar.count_tokens`; an `error` instead when there was none."""

    request: int
    count: m.TokenCount | None
    error: FrameshardError | None


@dataclass(frozen=True, eq=False)
class EmbeddingsArrived:
    """Answer to :meth:`Sidecar.embed`: the rows, shape [number of texts, dimensions]; an `error` instead when there are
    none."""

    request: int
    rows: Rows | None
    error: FrameshardError | None


@record
class StatsArrived:
    """Answer to :meth:`Sidecar.stats`; an `error` instead when there was none."""

    request: int
    stats: m.Stats | None
    error: FrameshardError | None


@record
class AdaptersArrived:
    """Answer to :meth:`Sidecar.adapter_load` and :meth:`Sidecar.adapter_unload`: the adapters that are loaded now; an
    `error` instead if nothing has changed."""

    request: int
    adapters: m.Adapters | None
    error: FrameshardError | None


@record
class FrameBlockArrived:
    """Answer to :meth:`Sidecar.frame_block`: the mapped frame block; an `error` instead when there was none."""

    request: int
    block: FrameBlock | None
    error: FrameshardError | None


@record
class PacingArrived:
    """Answer to :meth:`Sidecar.set_pacing`: it is in force, unless there is an `error`."""

    request: int
    error: FrameshardError | None


@record
class HistoryArrived:
    """Answer to :meth:`Sidecar.history`; an `error` instead if the session had ended before."""

    request: int
    messages: tuple[m.ChatMessage, ...]
    error: FrameshardError | None = None


@record
class Saved:
    """Answer to :meth:`Sidecar.save`; an `error` instead if the session had ended before."""

    request: int
    data: bytes
    error: FrameshardError | None = None


@record
class Loaded:
    """Answer to :meth:`Sidecar.load`; an `error` instead when nothing was loaded."""

    request: int
    result: LoadResult | None
    error: FrameshardError | None


@record
class KvArrived:
    """Answer to :meth:`Sidecar.save_kv` and :meth:`Sidecar.load_kv`; an `error` instead when there was none."""

    request: int
    kv: m.Kv | None
    error: FrameshardError | None


@record
class Closed:
    """The last event of all: the sidecar is gone, by an `error` or because :meth:`Sidecar.close` was called."""

    error: FrameshardError | None


Event = (
    Ready
    | TextAdded
    | ThoughtAdded
    | ToolCalled
    | Progressed
    | Paused
    | Resumed
    | Finished
    | Failed
    | BudgetGranted
    | BudgetReleased
    | BudgetObserved
    | BudgetRefused
    | BudgetArrived
    | CapsArrived
    | PlanArrived
    | TokenCountArrived
    | EmbeddingsArrived
    | StatsArrived
    | AdaptersArrived
    | FrameBlockArrived
    | PacingArrived
    | HistoryArrived
    | Saved
    | Loaded
    | KvArrived
    | m.Notice
    | m.Engine
    | m.Loading
    | Closed
)

_Command = Callable[[Client], Callable[[], Awaitable[None]] | None]
"""Carried out at once, in order; returns what waits for the answers."""


class Sidecar:
    """A sidecar and the session with it. Only one thread may call its methods. No method waits, except those with
    a timeout."""

    def __init__(self, scope: ClientScope) -> None:
        """Use :meth:`launch` or :meth:`connect`."""
        self.error: FrameshardError | None = None
        """Why the sidecar is gone."""
        self._scope = scope
        scope.on_loading = self._put
        self._requests = 0
        self._events: deque[Event] = deque()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._open: dict[Job | int, Callable[[FrameshardError], Event]] = {}
        """The jobs and requests whose last event has not come, with what makes that event if they fail."""
        self._conversations: dict[str, trio.Event] = {}
        self._ready = threading.Event()
        self._ended = False
        self._ending = threading.Lock()  # nothing is taken on after the end; held for a moment only
        self._all = trio.CancelScope()
        self._wake: trio.Event | None = None
        self._room: trio.Event | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="frameshard", daemon=True)
        self._thread.start()

    @classmethod
    def launch(
        cls,
        model: str | os.PathLike[str],
        *,
        vram_budget_mb: float = 0,
        name: str = "python",
        log: int | None = None,
        **options: Unpack[LaunchOptions],
    ) -> Sidecar:
        """Starts a sidecar; the arguments are those of :func:`frameshard.launch`.

        Returns before the model is loaded: :class:`Ready` or :class:`Closed` follows. What is asked before that waits.
        With `loading="on"`, the event :class:`frameshard.Loading` says how far the load is.

        :raises BadArgument: an option is unknown or wrong.
        """
        return cls(asynchronous.launch(model, vram_budget_mb=vram_budget_mb, name=name, log=log, **options))

    @classmethod
    def connect(cls, target: str | os.PathLike[str] | ConnectInfo, *, name: str = "python") -> Sidecar:
        """Joins a sidecar that runs; the arguments are those of :func:`frameshard.connect`."""
        return cls(asynchronous.connect(target, name=name))

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._ended else "ready" if self._ready.is_set() else "loading"
        return f"<Sidecar {state}, {len(self._events)} events>"

    # ---- calls ------------------------------------------------------------------------------------------------------

    def poll(self, limit: int = 256) -> list[Event]:
        """At most `limit` events, oldest first; empty when nothing happened. Never waits."""
        events: list[Event] = []
        while len(events) < limit:
            try:
                event = self._events.popleft()
            except IndexError:
                break
            if isinstance(event, TextAdded):
                event.job.text += event.text
            elif isinstance(event, ThoughtAdded):
                event.job.thought += event.thought.text
            elif isinstance(event, ToolCalled):
                event.job.tool_calls += (event.call,)
            elif isinstance(event, (Paused, Resumed)):
                event.job.paused = isinstance(event, Paused)
            elif isinstance(event, Finished):
                event.job.result = event.completion
            elif isinstance(event, Failed):
                event.job.error, event.job.paused = event.error, False
            events.append(event)
        if self._room is not None:  # a job may have seen the queue full just before an earlier poll emptied it
            self._soon(self._make_room)
        return events

    def ask(self, text: str, *, system: str | None = None, **options: Unpack[JobOptions]) -> Job:
        """See :meth:`frameshard.Client.ask`. Questions of one conversation are answered one after the other."""
        conversation, kept = options.get("conversation"), _kept(options)
        return self._begin(conversation, lambda client: client.ask(text, system=system, **kept))

    def tool_results(self, results: Mapping[str, object], **options: Unpack[JobOptions]) -> Job:
        """See :meth:`frameshard.Client.tool_results`."""
        conversation, kept = options.get("conversation"), _kept(options)
        try:
            texts = asynchronous.result_texts(results)
        except BadArgument as error:
            refusal = error

            def refuse(client: Client) -> Stream:
                raise refusal

            return self._begin(conversation, refuse)
        return self._begin(conversation, lambda client: client.tool_results(texts, **kept))

    def chat(self, messages: Sequence[m.ChatMessage], **options: Unpack[JobOptions]) -> Job:
        """See :meth:`frameshard.Client.chat`."""
        said, kept = _copied(messages), _kept(options)
        return self._begin(None, lambda client: client.chat(said, **kept))

    def complete(self, prompt: str, **options: Unpack[JobOptions]) -> Job:
        """See :meth:`frameshard.Client.complete`."""
        kept = _kept(options)
        return self._begin(None, lambda client: client.complete(prompt, **kept))

    def warm_up(self, messages: Sequence[m.ChatMessage], *, adapters: Mapping[str, float] | None = None) -> Job:
        """See :meth:`frameshard.Client.warm_up`. The `n_prompt` of its result is the number of tokens."""
        return self.chat(messages, warm_up=True, adapters=adapters or {})

    def cancel(self, job: Job) -> None:
        """Ends a job early; :class:`Failed` with :class:`JobCancelled` follows, unless it has ended.

        :raises BadArgument: it is no job.
        """
        _check_job(job)
        self._soon(job._scope.cancel)

    def history(self, conversation: str) -> int:
        """See :meth:`frameshard.Client.history`; does not wait for open answers.

        :returns: the number of :class:`HistoryArrived`.
        :raises BadArgument: the name of the conversation is not a string.
        """
        return self._look(
            conversation,
            lambda client, number: HistoryArrived(number, client.history(conversation)),
            lambda number, error: HistoryArrived(number, (), error),
        )

    def save(self, conversation: str) -> int:
        """See :meth:`frameshard.Client.save`; does not wait for open answers.

        :returns: the number of :class:`Saved`.
        :raises BadArgument: the name of the conversation is not a string.
        """
        return self._look(
            conversation,
            lambda client, number: Saved(number, client.save(conversation)),
            lambda number, error: Saved(number, b"", error),
        )

    def load(self, data: bytes, *, conversation: str) -> int:
        """See :meth:`frameshard.Client.load`; waits for the answers to what was asked in the conversation before.

        :returns: the number of :class:`Loaded`.
        :raises BadArgument: the name of the conversation is not a string.
        """
        number, save = self._number(), _copied(data)

        def load(client: Client) -> None:
            try:
                result = client.load(save, conversation=conversation)
                self._put_last(number, Loaded(number, result, None))
            except FrameshardError as error:
                self._put_last(number, Loaded(number, None, error))

        self._in_turn(conversation, load, number, partial(Loaded, number, None))
        return number

    def save_kv(self, conversation: str, path: str | os.PathLike[str]) -> int:
        """See :meth:`frameshard.Client.save_kv`; :class:`KvArrived` follows."""
        return self._query(lambda client: client.save_kv(conversation, path), KvArrived)

    def load_kv(self, path: str | os.PathLike[str], *, conversation: str) -> int:
        """See :meth:`frameshard.Client.load_kv`; :class:`KvArrived` follows. Ask when it has come."""
        return self._query(lambda client: client.load_kv(path, conversation=conversation), KvArrived)

    def set_priority(self, job: Job, priority: int) -> None:
        """See :meth:`frameshard.Stream.set_priority`.

        :raises BadArgument: it is no job, or there is no such priority.
        """
        _check_job(job)
        if type(priority) is not int or not 0 <= priority <= m.MAX_PRIORITY:
            raise BadArgument(f"priority must be an integer from 0 to {m.MAX_PRIORITY}", field="priority")

        def command(client: Client) -> None:
            if job._stream is not None:  # an earlier command has made it, or failed
                job._stream.set_priority(priority)

        self._do(command)

    def forget(self, conversation: str) -> None:
        """See :meth:`frameshard.Client.forget`; waits for the answers to what was asked in the conversation before.

        :raises BadArgument: the name of the conversation is not a string.
        """
        self._in_turn(conversation, lambda client: client.forget(conversation))

    def set_budget(self, vram_budget_mb: float, **terms: Unpack[LeaseTerms]) -> int:
        """See :meth:`frameshard.Client.set_budget`.

        :returns: the number that :class:`BudgetGranted`, then :class:`BudgetReleased`, then :class:`BudgetObserved`, or
            :class:`BudgetRefused` will have.
        """
        number = self._number()
        refused = partial(BudgetRefused, number)

        def command(client: Client) -> Callable[[], Awaitable[None]] | None:
            try:
                with typed():
                    change = client.change_budget(vram_budget_mb, **terms)
            except FrameshardError as error:
                self._put_last(number, refused(error))
                return None

            async def answers() -> None:
                try:
                    self._put(BudgetGranted(number, await change.granted()))
                    self._put(BudgetReleased(number, await change.released()))
                    self._put_last(number, BudgetObserved(number, await change.observed()))
                except FrameshardError as error:
                    self._put_last(number, refused(error))

            return answers

        self._do(command, number, refused)
        return number

    def budget(self) -> int:
        """See :meth:`frameshard.Client.budget`. Returns the number of :class:`BudgetArrived`; so do those below."""
        return self._query(lambda client: client.budget(), BudgetArrived)

    def caps_and_requirements(self) -> int:
        """See :meth:`frameshard.Client.caps_and_requirements`; :class:`CapsArrived` follows."""
        return self._query(lambda client: client.caps_and_requirements(), CapsArrived)

    def plan(self, budgets_mb: Sequence[float], *, prompt_tokens: int = 512) -> int:
        """See :meth:`frameshard.Client.plan`; :class:`PlanArrived` follows."""
        budgets = _copied(budgets_mb)
        return self._query(lambda client: client.plan(budgets, prompt_tokens=prompt_tokens), PlanArrived)

    def count_tokens(self, content: str | Sequence[m.ChatMessage], *, tools: Sequence[Tool] = ()) -> int:
        """See :meth:`frameshard.Client.count_tokens`; :class:`TokenCountArrived` follows."""
        counted, told = _copied(content), _copied(tools)
        return self._query(lambda client: client.count_tokens(counted, tools=told), TokenCountArrived)

    def embed(self, texts: Sequence[str]) -> int:
        """See :meth:`frameshard.Client.embed`; :class:`EmbeddingsArrived` follows."""
        embedded = _copied(texts)
        return self._query(lambda client: client.embed(embedded), EmbeddingsArrived)

    def stats(self) -> int:
        """See :meth:`frameshard.Client.stats`; :class:`StatsArrived` follows."""
        return self._query(lambda client: client.stats(), StatsArrived)

    def adapter_load(self, name: str, path: str | os.PathLike[str]) -> int:
        """See :meth:`frameshard.Client.adapter_load`; :class:`AdaptersArrived` follows."""
        return self._query(lambda client: client.adapter_load(name, path), AdaptersArrived)

    def adapter_unload(self, name: str) -> int:
        """See :meth:`frameshard.Client.adapter_unload`; :class:`AdaptersArrived` follows."""
        return self._query(lambda client: client.adapter_unload(name), AdaptersArrived)

    def frame_block(self, *, target_frame_ms: float = 1000 / 60) -> int:
        """See :meth:`frameshard.Client.frame_block`; :class:`FrameBlockArrived` follows."""
        return self._query(lambda client: client.frame_block(target_frame_ms=target_frame_ms), FrameBlockArrived)

    def set_pacing(
        self, scheduling_mode: m.SchedulingMode = "balance", *, target_tokens_per_second: float = 0.0
    ) -> int:
        """See :meth:`frameshard.Client.set_pacing`; :class:`PacingArrived` follows."""

        def arrived(number: int, nothing: None, error: FrameshardError | None) -> Event:
            return PacingArrived(number, error)

        return self._query(
            lambda client: client.set_pacing(scheduling_mode, target_tokens_per_second=target_tokens_per_second),
            arrived,
        )

    def shutdown(self) -> None:
        """Ends the sidecar, for all its clients; :class:`Closed` follows."""

        def command(client: Client) -> Callable[[], Awaitable[None]] | None:
            try:
                answer = client.shutdown()
            except FrameshardError:
                return None  # it is gone already

            async def wait() -> None:
                with contextlib.suppress(FrameshardError):
                    await answer

            return wait

        self._do(command)

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """For programs that have nothing else to do: waits until the model is loaded.

        Raises what ended the sidecar instead, or :class:`DeadlineMissed`.
        """
        self._check_thread()
        if not self._ready.wait(timeout_s):
            raise DeadlineMissed(f"the sidecar was not ready within {timeout_s:g} s")
        if self._ended:
            raise self._why()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Ends the session, and a launched sidecar; waits for that at most `timeout_s`, 0 for not at all."""
        self._soon(self._all.cancel)
        self._thread.join(timeout_s)

    # ---- in the program's thread ------------------------------------------------------------------------------------

    def _why(self) -> FrameshardError:
        """Why nothing can be asked any more."""
        return ConnectionLost("the sidecar is closed") if self.error is None else again(self.error)

    def _check_thread(self) -> None:
        """Raises :class:`ConnectionLost` in a forked process. Elsewhere the thread says that it ends before it does."""
        if not self._thread.is_alive() and not self._ended:
            raise ConnectionLost("this is a forked process, which has not got the session: connect anew")

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _query(
        self,
        ask: Callable[[Client], Awaitable[T]],
        arrived: Callable[[int, T | None, FrameshardError | None], Event],
    ) -> int:
        """Asks for something; its answer or the error comes as the event that `arrived` makes."""
        number = self._number()

        def command(client: Client) -> Callable[[], Awaitable[None]] | None:
            try:
                with typed():
                    answer = ask(client)
            except FrameshardError as error:
                self._put_last(number, arrived(number, None, error))
                return None

            async def wait() -> None:
                try:
                    self._put_last(number, arrived(number, await answer, None))
                except Exception as error:
                    self._put_last(number, arrived(number, None, internal(logger, "a request", error)))

            return wait

        self._do(command, number, partial(arrived, number, None))
        return number

    def _look(
        self,
        conversation: str,
        look: Callable[[Client, int], Event],
        failed: Callable[[int, FrameshardError], Event],
    ) -> int:
        """Has the event made that `look` returns, in the order of commands."""
        check_name(conversation)
        number = self._number()

        def command(client: Client) -> None:
            self._put_last(number, look(client, number))

        self._do(command, number, partial(failed, number))
        return number

    def _in_turn(
        self,
        conversation: str,
        change: Callable[[Client], None],
        number: int | None = None,
        failed: Callable[[FrameshardError], Event] | None = None,
    ) -> None:
        """Changes a conversation when what was asked in it before is answered."""
        check_name(conversation)

        def command(client: Client) -> Callable[[], Awaitable[None]] | None:
            before, after = self._line_up(conversation)

            async def wait() -> None:
                await before.wait()
                change(client)
                after.set()

            if not before.is_set():
                return wait
            change(client)
            after.set()
            return None

        self._do(command, number, failed)

    def _begin(self, conversation: str | None, open_stream: Callable[[Client], Stream]) -> Job:
        job = Job()

        def command(client: Client) -> Callable[[], Awaitable[None]]:
            before, after = self._line_up(conversation)
            try:
                with typed():
                    stream = job._stream = open_stream(client)
                    if before.is_set():
                        stream.begin()
            except FrameshardError as error:
                return partial(self._end_job, Failed(job, error), before, after)

            async def answer() -> None:
                ending: Finished | Failed = Failed(job, JobCancelled("the job was cancelled"))
                try:
                    with job._scope:
                        await before.wait()
                        with typed():
                            stream.begin()
                        await self._relay(job, stream)
                        assert stream.result is not None
                        ending = Finished(job, stream.result)
                except Exception as error:
                    ending = Failed(job, internal(logger, "a job", error))
                finally:
                    await stream.aclose()
                await self._end_job(ending, before, after)

            return answer

        self._do(command, job, partial(Failed, job))
        return job

    async def _end_job(self, ending: Finished | Failed, before: trio.Event, after: trio.Event) -> None:
        self._put_last(ending.job, ending)
        await before.wait()  # a job may end before its turn, and those after it do not overtake those before it
        after.set()

    def _do(
        self,
        command: _Command,
        owner: Job | int | None = None,
        failed: Callable[[FrameshardError], Event] | None = None,
    ) -> None:
        """Has a command carried out.

        :param owner: the job or the request that it is for.
        :param failed: makes the owner's last event, should the session end before.
        """
        self._check_thread()
        with self._ending:
            if self._ended:
                raise self._why()
            if owner is not None and failed is not None:
                self._open[owner] = failed
            self._commands.put(command)
        self._soon(self._awake)

    def _soon(self, call: Callable[[], object]) -> None:
        """Has the other thread do something, also when it has not begun yet."""
        self._calls.put(call)
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._take_calls)

    # ---- in the other thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: FrameshardError | None = None
        try:
            error = trio.run(self._main)
        except BaseException as defect:
            error = FrameshardError(f"a defect of the client: {defect!r}")
            raise
        finally:
            with self._ending:
                self.error, self._ended = error, True
            for failed in self._open.values():  # each gets its end, those included that never began
                self._put(failed(error or ConnectionLost("the sidecar was closed")))
            self._put(Closed(error))
            self._ready.set()

    async def _main(self) -> FrameshardError | None:
        self._wake = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._take_calls()
        try:
            with self._all:
                async with self._scope as client:
                    changes = client.engine_changes()
                    self._put(Ready(await client.model_info(), client.features, client.http_url, client.http_key))
                    self._ready.set()
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._take_commands, client, nursery)
                        nursery.start_soon(self._take_notices, client)
                        async for change in changes:
                            self._put(change)
                        nursery.cancel_scope.cancel()
                    await client.model_info()  # raises why there are no more changes
        except FrameshardError as error:
            return error
        return None

    async def _take_notices(self, client: Client) -> None:
        async for notice in client.notices():
            self._put(notice)

    async def _take_commands(self, client: Client, nursery: trio.Nursery) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                while True:
                    later = self._commands.get_nowait()(client)
                    if later is not None:
                        nursery.start_soon(later)
            assert self._wake is not None
            await self._wake.wait()
            self._wake = trio.Event()

    def _take_calls(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def _put(self, event: Event) -> None:
        self._events.append(event)

    def _put_last(self, owner: Job | int, event: Event) -> None:
        self._open.pop(owner, None)
        self._put(event)

    def _awake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    def _line_up(self, conversation: str | None) -> tuple[trio.Event, trio.Event]:
        """What to wait for before one's turn in a conversation, and what to set after it."""
        free, after = trio.Event(), trio.Event()
        free.set()
        if not isinstance(conversation, str):
            return free, after  # none, or a wrong one, which is refused
        before = self._conversations.get(conversation, free)
        self._conversations[conversation] = after
        return before, after

    async def _relay(self, job: Job, stream: Stream) -> None:
        def progressed(progress: m.Progress) -> None:
            if len(self._events) < MAX_EVENTS:  # the next one says more
                self._put(Progressed(job, progress))

        stream.on_progress = progressed
        stream.on_thought = lambda thought: self._put(ThoughtAdded(job, thought))
        stream.on_tool_call = lambda call: self._put(ToolCalled(job, call))
        stream.on_paused = lambda paused: self._put(Paused(job) if paused else Resumed(job))
        stream._wait_for_room = self._wait_for_room
        async with stream:
            async for delta in stream:
                self._put(TextAdded(job, delta))

    async def _wait_for_room(self) -> None:
        while len(self._events) >= MAX_EVENTS:
            if self._room is None:
                self._room = trio.Event()
            await self._room.wait()


def _check_job(job: object) -> None:
    """
    :raises BadArgument: it is none, such as None. The other thread, and with it the session, would end by that.
    """
    if not isinstance(job, Job):
        raise BadArgument("job must be a Job, as ask returns it", field="job")


def _kept(options: JobOptions) -> JobOptions:
    """A copy of the options of a job; see :func:`_copied`."""
    kept: Any = {name: unchanging(value) if name == "images" else _copied(value) for name, value in options.items()}
    return kept  # type: ignore[no-any-return]


def _copied(value: Any) -> Any:
    """What was given, as it is now. The program may change its lists and buffers again before the other thread carries
    the command out."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return bytes(value) if isinstance(value, (bytearray, memoryview)) else value
