"""Carries out the requests of clients: at once, or when the engine has answered."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from frameshard.broker.embedder import Embedder
from frameshard.broker.frameblock import FrameBlockMemory
from frameshard.broker.job import conversation_key
from frameshard.broker.jobs import Jobs
from frameshard.broker.leases import Lease
from frameshard.broker.supervisor import Supervisor
from frameshard.errors import BadArgument, EngineDied, FrameshardError, Overloaded, unknown_adapter
from frameshard.records import record
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection
from frameshard.wire.launch import ServeConfig, adapter_of

logger = logging.getLogger("frameshard.broker")

MAX_ASKED = 128
"""The most requests that may wait for the engine."""

MAX_ASKED_BY_ONE = 32
"""The most requests of one client that may wait for the engine. So no client alone can keep the others out."""


_Asked = m.StatsGet | m.PlanGet | m.CountTokens | m.AdapterLoad | m.AdapterUnload | m.KvSave | m.KvLoad
"""Requests that the engine answers."""

_IN_MAIN_THREAD = (em.LoadAdapter, em.UnloadAdapter, em.SaveKv, em.LoadKv)
"""Commands over which the engine's main thread works between two decodes."""

_Answered = Callable[[em.Answer | FrameshardError], None]


@record
class _Open:
    """A command that the engine has not answered.

    :param then: gets the answer, or why there is none.
    :param connection: of the client that waits for the answer; None: the broker itself waits.
    """

    command: em.Command
    then: _Answered
    connection: ServerConnection | None


class Requests:
    """Carries out the requests of all sessions, except for those that end a session or the sidecar.

    :param epoch: the number of the launch.
    :param directory: the directory of the launch.
    :param n_sessions: returns the number of sessions.
    :param end_engine_if_asked: ends the engine if hibernation was asked for.
    :param predicted: gets a job's number and the plan's time to its first token, if the job has a deadline and may go
        to the fallback server.
    """

    def __init__(
        self,
        config: ServeConfig,
        epoch: int,
        directory: Path,
        *,
        jobs: Jobs,
        lease: Lease,
        supervisor: Supervisor,
        embedder: Embedder,
        n_sessions: Callable[[], int],
        end_engine_if_asked: Callable[[], None],
        predicted: Callable[[int, float], None],
    ) -> None:
        self.model: m.ModelInfo | None = None
        """None until the first load is complete."""
        self.adapters = dict(map(adapter_of, config.adapters))
        """The paths of the adapters, by name. Each new engine loads them."""
        self._config = config
        self._epoch = epoch
        self._jobs = jobs
        self._lease = lease
        self._supervisor = supervisor
        self._embedder = embedder
        self._n_sessions = n_sessions
        self._end_engine_if_asked = end_engine_if_asked
        self._predicted = predicted
        self._asked: dict[int, _Open] = {}
        """The commands that wait for an answer, by their numbers."""
        self._numbers = 0
        self._frame_block = FrameBlockMemory(directory)
        self._settings: dict[type, em.Command] = {}  # these are sent to each new engine when it is ready
        self._started_at = time.monotonic()

    def carry_out(self, connection: ServerConnection, request: m.Request) -> None:
        """Carries out a request and queues its answer.

        :raises FrameshardError: the request is refused; the caller sends this error as the answer.
        """
        if isinstance(request, m.Submit):
            self._submit(connection, request)
        elif isinstance(request, m.Cancel):
            self._jobs.cancel(connection, request.job)
            connection.ok(request.id)
        elif isinstance(request, m.PrioritySet):
            self._jobs.set_priority(connection, request.job, request.priority)
            connection.ok(request.id)
        elif isinstance(request, m.BudgetSet):
            self._lease.set(connection, request, trio.current_time())
            self._end_engine_if_asked()
            if self._lease.state == "active" or self._supervisor.state is states.Engine.OFF:
                self._supervisor.wake()
        elif isinstance(request, m.BudgetGet):
            connection.reply(self._lease.describe(request.id, self._jobs.open))
        elif isinstance(request, m.CapsGet):
            connection.reply(self._caps(request.id))
        elif isinstance(request, m.PlanGet):
            self._ask(connection, request, lambda seq: em.MakePlans(seq, request.budgets, request.prompt_tokens))
        elif isinstance(request, m.AdapterLoad):
            if "=" in request.name:
                raise BadArgument("the name of an adapter has no '='", field="name")
            self._ask(connection, request, lambda seq: em.LoadAdapter(seq, request.name, request.path))
        elif isinstance(request, m.AdapterUnload):
            if self._jobs.use_adapter(request.name):
                raise BadArgument(
                    f"jobs use the adapter {request.name!r}: it can be unloaded when they have ended", field="name"
                )
            self._ask(connection, request, lambda seq: em.UnloadAdapter(seq, request.name))
        elif isinstance(request, m.KvSave | m.KvLoad):
            self._move_kv(connection, request)
        elif isinstance(request, m.CountTokens):
            content = (request.messages, request.prompt, request.tools)
            self._ask(connection, request, lambda seq: em.CountTokens(seq, *content))
        elif isinstance(request, m.Embed):
            self._embedder.ask(connection, request)
        elif isinstance(request, m.FrameBlockGet):
            path = self._frame_block.path()
            if em.OpenFrameBlock not in self._settings:  # an engine maps it again with each such command
                self._set(em.OpenFrameBlock(path))
            connection.reply(m.FrameBlock(request.id, self._epoch, path))
        elif isinstance(request, m.Pacing):
            self._set(em.SetPacing(request.scheduling_mode, request.target_tokens_per_second))
            connection.ok(request.id)
        elif isinstance(request, m.ModelInfoGet):
            assert self.model is not None  # no client can connect before the first load
            connection.reply(m.Model(request.id, self._epoch, self.model))
        elif isinstance(request, m.StatsGet):
            self._ask(connection, request, em.GetStats)

    def _submit(self, connection: ServerConnection, request: m.Submit) -> None:
        if self._supervisor.state is states.Engine.OFF:
            self._supervisor.wake()
            if not self._jobs.may_go(request):
                raise self._supervisor.off()
        for adapter in request.adapters:
            if adapter.name not in self.adapters:
                raise unknown_adapter(adapter.name, self.adapters)
            if self._unloads(adapter.name):
                raise BadArgument(f"the adapter {adapter.name!r} is being unloaded", field="adapters")
        if len({adapter.name for adapter in request.adapters}) < len(request.adapters):
            raise BadArgument("an adapter is there twice", field="adapters")
        number = self._jobs.submit(connection, request, trio.current_time())
        connection.ok(request.id)
        if number and request.deadline_ms and self._jobs.may_go(request):
            self._predict(number, request)
        self._lease.tick(trio.current_time(), self._jobs.open)
        self._end_engine_if_asked()

    def _move_kv(self, connection: ServerConnection, request: m.KvSave | m.KvLoad) -> None:
        if not os.path.isabs(request.path):
            raise BadArgument("path must be absolute", field="path")
        key = conversation_key(connection, request.conversation)
        if isinstance(request, m.KvLoad):
            self._ask(connection, request, lambda seq: em.LoadKv(seq, key, request.path))
        else:
            # Not longer for a longer name: that of the file may be as long as the file system allows.
            part = os.path.join(os.path.dirname(request.path), f".frameshard-{secrets.token_hex(8)}.part")
            self._ask(connection, request, lambda seq: em.SaveKv(seq, key, request.path, part))

    def _set(self, command: em.Command) -> None:
        self._settings[type(command)] = command
        if self._supervisor.state is states.Engine.READY:
            self._supervisor.send(command)

    def _predict(self, job: int, request: m.Submit) -> None:
        """Asks for the plan's time to the first token of a job: first how many tokens its prompt has."""

        def planned(event: em.Answer | FrameshardError) -> None:
            if isinstance(event, em.Plans) and event.rows and (ttft_s := event.rows[0].ttft_s) is not None:
                self._predicted(job, ttft_s)

        def counted(event: em.Answer | FrameshardError) -> None:
            if isinstance(event, em.TokenCount) and event.n_tokens:
                budgets = (self._lease.budget_bytes,)
                n_tokens = self._jobs.unread(job, event.n_tokens)
                self._ask_engine(lambda seq: em.MakePlans(seq, budgets, n_tokens), planned)

        self._ask_engine(lambda seq: em.CountTokens(seq, request.messages, tools=request.tools), counted)

    def _ask(self, connection: ServerConnection, request: _Asked, command: Callable[[int], em.Command]) -> None:
        self._ask_engine(command, lambda event: self._answer(connection, request, event), connection)

    def _ask_engine(
        self, command: Callable[[int], em.Command], then: _Answered, connection: ServerConnection | None = None
    ) -> None:
        """Asks the engine.

        :param command: makes the command from its number.
        :param then: gets the answer, or why there is none.
        :param connection: of the client that waits for the answer; None: the broker itself waits.
        """
        if self._supervisor.state is not states.Engine.READY:
            off = self._supervisor.state is states.Engine.OFF
            then(self._supervisor.off() if off else _no_engine())
            return
        n_own = sum(asked.connection is connection for asked in self._asked.values())
        if n_own >= MAX_ASKED_BY_ONE or len(self._asked) >= MAX_ASKED:
            whose = f"{n_own} requests of this client" if n_own >= MAX_ASKED_BY_ONE else f"{len(self._asked)} requests"
            then(Overloaded(f"{whose} wait for the engine: ask again when some are answered"))
            return
        self._numbers += 1
        self._asked[self._numbers] = asked = _Open(command(self._numbers), then, connection)
        self._supervisor.send(asked.command)

    def _unloads(self, adapter: str) -> bool:
        """Whether the engine was told to unload this adapter and has not answered."""
        commands = (asked.command for asked in self._asked.values())
        return any(isinstance(command, em.UnloadAdapter) and command.name == adapter for command in commands)

    @property
    def in_main_thread(self) -> bool:
        """Whether the engine's main thread has such work for a request that it may not answer pings."""
        return any(isinstance(asked.command, _IN_MAIN_THREAD) for asked in self._asked.values())

    def _answer(self, connection: ServerConnection, request: _Asked, event: em.Answer | FrameshardError) -> None:
        """Answers a request that the engine was asked.

        :param event: the engine's answer, or why there is none.
        """
        if isinstance(request, m.StatsGet):
            self._answer_stats(connection, request.id, event.stats if isinstance(event, em.Stats) else None)
        elif isinstance(event, FrameshardError):
            connection.refuse(request.id, event)
        elif isinstance(event, em.Stats):
            connection.refuse(request.id, FrameshardError("the engine has answered with statistics"))
        elif isinstance(event, em.Kv):
            connection.reply(m.Kv(request.id, self._epoch, event.n_tokens, event.file_bytes, event.detail))
        elif event.error is not None:
            connection.refuse(request.id, event.error.exception())
        elif isinstance(event, em.TokenCount):
            connection.reply(m.TokenCount(request.id, self._epoch, event.n_tokens, event.n_left))
        elif isinstance(event, em.Adapters):
            if isinstance(request, m.AdapterLoad):
                self.adapters[request.name] = request.path
            elif isinstance(request, m.AdapterUnload):
                self.adapters.pop(request.name, None)
            self._lease.floor_bytes = event.floor_bytes
            connection.reply(m.Adapters(request.id, self._epoch, event.adapters, event.floor_bytes))
        else:
            connection.reply(m.PlanAnswer(request.id, self._epoch, event.rows))

    def _caps(self, request_id: int) -> m.Caps:
        assert self.model is not None
        lease = self._lease
        return m.Caps(
            request_id,
            self._epoch,
            device=self.model.device,
            total_bytes=lease.total_bytes,
            free_bytes=lease.free_bytes,
            floor_bytes=lease.floor_bytes,
            full_bytes=lease.full_bytes,
            context=self.model.n_ctx,
            mode=self._config.mode,
            host_total_bytes=lease.host.total_bytes,
            host_free_bytes=lease.host.free_bytes,
            host_floor_bytes=lease.host.floor_bytes,
        )

    def _answer_stats(self, connection: ServerConnection, request_id: int, engine: Mapping[str, Any] | None) -> None:
        supervisor = self._supervisor
        broker = m.BrokerStats(
            pid=os.getpid(),
            engine_pid=supervisor.pid,
            engine=supervisor.state.value,
            engine_restarts=supervisor.restarts,
            sessions=self._n_sessions(),
            jobs_queued=self._jobs.queued,
            jobs_running=self._jobs.running,
            uptime_s=time.monotonic() - self._started_at,
            jobs_remote=self._jobs.remote,
        )
        connection.reply(m.Stats(request_id, self._epoch, broker, engine))

    # ---- engine -----------------------------------------------------------------------------------------------------

    def engine_ready(self) -> None:
        for command in self._settings.values():
            self._supervisor.send(command)

    def engine_answered(self, event: em.Answer) -> None:
        asked = self._asked.pop(event.seq, None)
        if asked is not None:
            asked.then(event)

    def engine_lost(self, death: FrameshardError | None) -> bool:
        """Called when the engine has ended. If it could not load an adapter, the next engine goes on without it, and
        jobs that use it fail.

        :param death: why it died; None if it was told to end.
        :returns: whether the cause is such an adapter.
        """
        culprit = None if death is None else death.detail.get("adapter")
        dropped = False
        if culprit in self.adapters:
            del self.adapters[culprit]
            dropped = True
            logger.warning("the next engine does without the adapter %s: %s", culprit, death)
        self.remove_parts()
        waiting, self._asked = self._asked, {}
        for asked in waiting.values():
            asked.then(_died(death) if death is not None else _no_engine())
        return dropped

    def remove_parts(self) -> None:
        """Removes what an engine that has ended has left of unfinished files."""
        for asked in self._asked.values():
            if isinstance(asked.command, em.SaveKv):
                with suppress(OSError):
                    os.unlink(asked.command.part)


def _no_engine() -> EngineDied:
    return EngineDied("no engine runs now that could do this")


def _died(death: FrameshardError) -> EngineDied:
    """The error for a request whose answer the engine did not live to give."""
    return EngineDied(
        f"the engine died before it had answered: {death.message}", **{**death.detail, "reason": death.name}
    )
