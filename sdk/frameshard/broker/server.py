"""The traffic between clients and the engine: receives frames, passes them to sessions, jobs, lease and supervisor, and
sends what these return.

Guarantees: nothing here waits for the GPU or for a single client. The memory for each client is limited. Every frame is
answered or dropped, whatever its content is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from frameshard.broker import fallback
from frameshard.broker.embedder import Embedder
from frameshard.broker.jobs import Jobs
from frameshard.broker.leases import Lease
from frameshard.broker.requests import Requests
from frameshard.broker.session import Session, Sessions
from frameshard.broker.supervisor import Supervisor
from frameshard.errors import ConnectionLost, FrameshardError, internal
from frameshard.transport import Flooded, Socket, Unreachable
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.launch import EngineOptions, ServeConfig

if TYPE_CHECKING:
    from frameshard.broker.remote import Remote  # needs httpx

logger = logging.getLogger("frameshard.broker")

RETRY_S = 0.02
"""Seconds between two attempts to send to a client whose queue is full."""

SILENCE_CHECK_S = 0.5
NEGOTIATE_S = 0.25


class Server:
    """The parts of one launch.

    :param epoch: the number of the launch.
    :param directory: the directory of the launch.
    :param remote: the connections to the fallback server, if there is one.
    """

    def __init__(
        self,
        config: ServeConfig,
        epoch: int,
        directory: Path,
        *,
        remote: Remote | None = None,
        on_loading: Callable[[m.Loading], None] | None = None,
    ) -> None:
        self.error: FrameshardError | None = None
        self._on_loading = on_loading
        self._config = config
        self._socket: Socket | None = None
        self._epoch = epoch
        self._sessions = Sessions(
            epoch,
            held_bytes=config.held_bytes,
            silent_s=config.silent_s,
            max_client_jobs=config.max_client_jobs,
            describe=lambda: (self._supervisor.state.value, self._requests.model),
            is_connected=self._is_connected,
        )
        self._remote = remote
        self._jobs = Jobs(
            slots=config.n_parallel,
            max_jobs=config.max_jobs,
            max_client_jobs=config.max_client_jobs,
            model=config.fallback_model if remote is not None else "",
        )
        self._lease = Lease(config.vram_budget_bytes, epoch, config.host_budget_bytes)
        self._supervisor = Supervisor(config, self, self._engine_config)
        self._embedder = Embedder(config.embedder, epoch, self._flush)
        self._requests = Requests(
            config,
            epoch,
            directory,
            jobs=self._jobs,
            lease=self._lease,
            supervisor=self._supervisor,
            embedder=self._embedder,
            n_sessions=lambda: len(self._sessions),
            end_engine_if_asked=self._end_engine_if_asked,
            predicted=self._predicted,
        )
        self._device = config.device
        self._announce: Callable[[], None] | None = None
        self._deadline = trio.Event()
        """Set when there may be an earlier time at which a job fails or goes to the fallback server."""
        self._stop = trio.Event()
        self._blocked = trio.Event()

    async def run(self, announce: Callable[[], None]) -> None:
        """Runs until :meth:`stop` is called or the first load fails. Then :attr:`error` has the reason.

        :param announce: called once, when the model is loaded.
        """
        self._announce = announce
        try:
            async with trio.open_nursery() as nursery:
                tasks = self._retry, self._watch_silence, self._supervise, self._keep_negotiating, self._keep_deadlines
                for task in (*tasks, self._embedder.run):
                    nursery.start_soon(task)
                if self._remote is not None:
                    nursery.start_soon(self._remote.run, self._fallback_event)
                await self._stop.wait()
                if self.error is None:
                    self._jobs.fail_all(ConnectionLost("the sidecar is shutting down"))
                    self._flush()
                    await self._supervisor.stop()
                nursery.cancel_scope.cancel()
        finally:  # also when the host has ended; the engine's process has ended too
            self._requests.remove_parts()

    def stop(self) -> None:
        """Ends :meth:`run`: fails the open jobs and stops the engine."""
        self._stop.set()

    def http_ended(self, why: str, pause_s: float) -> None:
        """To be called when the HTTP server has ended.

        :param why: how, and its last lines.
        :param pause_s: seconds until it is started again.
        """
        detail = why.encode()[: m.MAX_NOTICE_DETAIL].decode(errors="ignore")
        self._notify(m.Notice(self._epoch, "http", 0, pause_s, detail))
        self._flush()

    def held_bytes(self) -> int:
        """The bytes of what was asked in the open jobs."""
        return self._jobs.held_bytes

    def disconnected(self) -> None:
        """To be called when the socket was closed with all its connections. A new socket follows."""
        self._socket = None
        self._sessions.disconnected()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        await self._supervisor.run()
        if self._announce is not None:
            self.error = self._supervisor.error
            self.stop()

    async def receive(self, socket: Socket) -> None:
        """Receives and sends on `socket`. Returns when a peer has sent a message with too many parts: then the socket
        must be replaced."""
        self._socket = socket
        while True:
            try:
                peer, *parts = await socket.receive()
            except Flooded as flood:
                logger.warning("%s: its sender is dropped", flood)
                self._sessions.drop(flood.first)
                self._forget_evicted()
                return
            wanted = self._sessions.receive(peer, parts, trio.current_time())
            self._forget_evicted()
            if wanted is not None:
                self._serve(*wanted)
            self._flush()

    async def _retry(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            await trio.sleep(RETRY_S)
            self._flush()

    async def _keep_negotiating(self) -> None:
        while True:
            await trio.sleep(NEGOTIATE_S)
            self._negotiate()
            if self._lease.commands or self._lease.notices:
                self._flush()

    async def _keep_deadlines(self) -> None:
        while True:
            departure = self._jobs.next_departure(trio.current_time())
            with trio.move_on_at(min(self._jobs.next_due, departure)):
                await self._deadline.wait()
                self._deadline = trio.Event()
            self._jobs.fail_overdue(trio.current_time())
            self._flush()

    def _fallback_event(self, event: fallback.Event) -> None:
        try:
            self._jobs.fallback_event(event, trio.current_time())
        except Exception as error:
            self._jobs.fail(event.job, internal(logger, "a job at the fallback server", error))
        self._deadline.set()
        self._flush()

    def _predicted(self, job: int, ttft_s: float) -> None:
        self._jobs.predicted(job, ttft_s, trio.current_time())
        self._deadline.set()

    def _send_away(self) -> None:
        """Sends jobs to the fallback server if there is no room here. After room was lost there is none until an engine
        is ready: also not while one is loaded after a hibernation."""
        if self._remote is None:
            return
        engine = self._supervisor.state
        if self._lease.state != "active" or engine is states.Engine.OFF:
            self._jobs.set_room(False)
        elif engine is states.Engine.READY:
            self._jobs.set_room(True)
        self._jobs.depart(trio.current_time())
        for command in self._jobs.asks:
            self._remote.send(command)
        self._jobs.asks.clear()

    def _negotiate(self) -> None:
        self._lease.tick(trio.current_time(), self._jobs.open)
        self._end_engine_if_asked()

    def _end_engine_if_asked(self) -> None:
        if self._lease.ends_engine and not self._supervisor.hibernate():
            self._lease.engine_hibernated(trio.current_time())

    async def _watch_silence(self) -> None:
        """Ends the jobs of clients that are gone. It counts looks at which the broker had read everything but the
        client had sent nothing. So a broker that was stopped for some time does not take its clients for silent."""
        while True:
            await trio.sleep(SILENCE_CHECK_S)
            if self._socket is None or not self._socket.drained():
                continue
            for session in self._sessions:
                connection = session.connection
                connection.silent_looks += 1
                if connection.silent_looks * SILENCE_CHECK_S <= self._config.silent_s:
                    continue
                if self._is_connected(session):
                    connection.silent_looks = 0
                else:
                    self._jobs.drop(connection, ConnectionLost("the client has gone"))
                    self._embedder.drop(connection)
            self._flush()

    def _is_connected(self, session: Session) -> bool:
        """Whether the client's process is alive. The operating system closes the connection of a dead process, but only
        a send shows it. So this sends a pong."""
        if session.reachable and self._socket is not None:
            try:
                self._socket.try_send([session.peer, m.encode(session.connection.pong(1))])
            except Unreachable:
                session.reachable = False
        return session.reachable

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def _serve(self, session: Session, request: m.Request) -> None:
        """Carries out a request. If it raises any exception, only this request fails."""
        try:
            if isinstance(request, m.Bye):
                session.connection.ok(request.id)
                self._flush()
                self._forget(session)
            elif isinstance(request, m.Shutdown):
                session.connection.ok(request.id)
                self.stop()
            else:
                self._requests.carry_out(session.connection, request)
                if isinstance(request, m.Submit) and request.deadline_ms:
                    self._deadline.set()
                elif isinstance(request, m.BudgetSet):
                    _log_change(session.client, request)
        except Exception as error:
            why = internal(logger, f"the request {type(request).__name__}", error)
            session.connection.refuse(None if isinstance(request, m.Credit) else request.id, why)

    def _forget_evicted(self) -> None:
        while self._sessions.evicted:
            self._forget(self._sessions.evicted.popleft())

    def _forget(self, session: Session) -> None:
        self._sessions.end(session)
        self._jobs.drop(session.connection)
        self._lease.drop(session.connection)
        self._embedder.drop(session.connection)

    # ---- engine (called by the supervisor) --------------------------------------------------------------------------

    def engine_ready(self, ready: em.Ready) -> None:
        # Later engines use the device that the first one has chosen: the host may have taken memory of it since.
        first = self._requests.model or ready.model
        if self._config.device == "auto":
            self._device = first.device
        self._requests.model = replace(
            ready.model, embedder=Path(self._config.embedder).name, passed_over=first.passed_over
        )
        self._lease.load_s = self._supervisor.load_s
        self._lease.engine_ready(
            ready.model.floor_bytes, ready.model.full_bytes, ready.vram_budget_bytes, trio.current_time()
        )
        self._requests.engine_ready()
        self._jobs.engine_ready()
        self._tell_all()
        self._end_engine_if_asked()  # a client may have asked for hibernation while the engine was loading
        if self._announce is not None:
            try:
                self._announce()
            except FrameshardError as error:
                self.error = error
                self.stop()
            self._announce = None

    def engine_event(self, event: em.Event) -> bool:
        if isinstance(event, em.Loading):
            self._tell_loading(m.Loading(self._epoch, event.stage, event.done, event.total))
        elif isinstance(event, em.BudgetEvent | em.Watch | em.HostPressure):
            self._lease.engine_event(event, trio.current_time())
        elif isinstance(event, em.Answer):
            self._requests.engine_answered(event)
        elif isinstance(event, em.JobEvent):
            return self._jobs.engine_event(event)
        return False

    def engine_lost(self, death: FrameshardError | None) -> bool:
        self._jobs.engine_lost(death)
        self._lease.engine_lost(trio.current_time())
        cause_gone = self._requests.engine_lost(death)
        if self._supervisor.state is not states.Engine.HIBERNATED:
            self._tell_all()
        return cause_gone

    def engine_wanted(self) -> bool:
        return self._lease.state == "active"

    def engine_hibernated(self) -> None:
        self._lease.engine_hibernated(trio.current_time())
        self._tell_all()

    def engine_woken(self) -> None:
        self._jobs.engine_woken()
        self._tell_all()

    def engine_off(self, error: FrameshardError) -> None:
        self._jobs.engine_off(error)
        self._lease.fail_all(error)
        self._tell_all()

    def engine_busy(self) -> bool:
        return self._jobs.running > 0

    def engine_works(self) -> bool:
        return self.engine_busy() or self._requests.in_main_thread or self._lease.changing

    def engine_changed(self) -> None:
        self._flush()

    def _engine_config(self) -> em.EngineConfig:
        options = {field.name: getattr(self._config, field.name) for field in fields(EngineOptions)}
        adapters = tuple(f"{name}={path}" for name, path in self._requests.adapters.items())
        options.update(
            vram_budget_bytes=self._lease.engine_load_bytes(),
            host_budget_bytes=self._lease.engine_load_host_bytes(),
            device=self._device,
            adapters=adapters,
        )
        return em.EngineConfig(**options)

    def _tell_all(self) -> None:
        supervisor = self._supervisor
        why = None if supervisor.error is None else m.ErrorInfo.of(supervisor.error)
        for session in self._sessions:
            session.connection.reply(m.Engine(self._epoch, supervisor.state.value, supervisor.restarts, why))

    def _tell_loading(self, loading: m.Loading) -> None:
        if self._announce is not None and self._on_loading is not None:
            self._on_loading(loading)
        self._notify(loading)

    def _notify(self, news: m.Notice | m.Loading) -> None:
        for session in self._sessions:
            if session.notices:
                session.connection.notify(news)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends everything that can be sent now, to the engine, to the fallback server, to peers without a session and
        to sessions."""
        self._send_away()
        for commands in (self._lease.commands, self._jobs.commands):
            for command in commands:
                self._supervisor.send(command)
            commands.clear()
        for notice in self._lease.notices:
            self._notify(notice)
        self._lease.notices.clear()
        if self._socket is None:
            return
        while self._sessions.strangers:
            with suppress(Unreachable):
                self._socket.try_send(list(self._sessions.strangers.popleft()))
        for session in self._sessions:
            self._flush_session(session, self._socket)
            if session.connection.overrun:
                logger.warning("%r does not read its answers: its session ends", session)
                self._forget(session)

    def _flush_session(self, session: Session, socket: Socket) -> None:
        connection = session.connection
        while session.reachable and (frame := connection.next_frame()) is not None:
            try:
                if not socket.try_send([session.peer, frame]):
                    self._blocked.set()
                    return
            except Unreachable:
                session.reachable = False
                return
            connection.sent()


def _log_change(client: str, request: m.BudgetSet) -> None:
    budget = f"{request.vram_budget_bytes / (1 << 20):g} MiB" if request.vram_budget_bytes else "no limit"
    logger.info("%r sets the VRAM budget to %s, %s; reason: %r", client, budget, request.state, request.reason)
