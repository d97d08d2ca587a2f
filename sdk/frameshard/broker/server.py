"""The one task group that owns the socket: takes frames, lets sessions, jobs, lease and engine decide, and sends.

Guarantees: nothing in this process waits for the GPU or for one client; what is kept for a client is bounded; a frame
of any content is answered or dropped. The server ends with its host, on a signal, on a client's shutdown, or when its
first engine cannot be loaded, and leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import trio
import zmq
from zmq.utils import z85

from frameshard.broker import endpoint as places
from frameshard.broker.jobs import Jobs
from frameshard.broker.leases import Lease
from frameshard.broker.session import Session, Sessions
from frameshard.broker.supervisor import Supervisor
from frameshard.errors import (
    BadMessage,
    ConnectionLost,
    EndpointInUse,
    EngineDied,
    FrameshardError,
    Overloaded,
)
from frameshard.transport import (
    BROKER_LINGER_MS,
    ZAP_DOMAIN,
    Socket,
    Unreachable,
    configure,
    new_number,
)
from frameshard.wire import launch, states
from frameshard.wire import messages as m
from frameshard.wire.launch import ConnectInfo, ServeConfig

logger = logging.getLogger("frameshard.broker")

RETRY_S = 0.02
"""Until a client whose queue was full is tried again."""

SILENCE_CHECK_S = 0.5
PARENT_CHECK_S = 0.25
MAX_STATS = 64
"""Requests for statistics that wait for the engine."""

MAX_FILES = 65536
OOM_SCORE_ADJ = 500

_KNOWN_INFO = (
    "name",
    "arch",
    "device",
    "n_ctx",
    "n_parallel",
    "n_vocab",
    "n_layer",
    "chat",
    "floor_bytes",
    "full_bytes",
)


def serve(
    config: ServeConfig,
    *,
    on_ready: Callable[[ConnectInfo, Path], None] | None = None,
    host_pipe: int | None = None,
) -> None:
    """Runs a sidecar until it is told to stop.

    `on_ready` is called once when the model is loaded, with what a client needs and the file that says the same to
    others. `host_pipe` is a file descriptor whose end of file means that the host is gone; without one, only a signal
    or a client ends the server.

    Raises what the model, the device or the budget is refused with (:class:`ModelNotFound`, :class:`BadModel`,
    :class:`UnknownDevice`, :class:`BudgetBelowFloor`, ...), :class:`EndpointInUse`, or :class:`EngineDied` when the
    engine does not survive loading. Not raised: an engine's later death, which clients learn by event.
    """
    _prepare_process()
    with places.claim(config.transport, config.endpoint) as (directory, wanted):
        context = zmq.Context()
        try:
            error = trio.run(_serve, config, context, directory, wanted, on_ready, host_pipe)
        finally:
            context.destroy(linger=BROKER_LINGER_MS)
    if error is not None:
        raise error


async def _serve(
    config: ServeConfig,
    context: zmq.Context[zmq.Socket[bytes]],
    directory: Path,
    wanted: str,
    on_ready: Callable[[ConnectInfo, Path], None] | None,
    host_pipe: int | None,
) -> FrameshardError | None:
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    epoch = new_number()
    async with _authenticator(context, z85.decode(client_public)), trio.open_nursery() as nursery:
        router = context.socket(zmq.ROUTER)
        bound = _bind(router, wanted, server_secret)
        server = Server(config, Socket(router), epoch)
        connect_file = Path(config.connect_file) if config.connect_file else directory / "connect.json"

        def announce() -> None:
            info = ConnectInfo(
                protocol=m.VERSION,
                endpoint=bound,
                epoch=epoch,
                pid=os.getpid(),
                server_key=server_public.decode(),
                client_key=client_public.decode(),
                client_secret=client_secret.decode(),
            )
            places.write_private(connect_file, launch.info_line(info))
            if on_ready is not None:
                on_ready(info, connect_file)

        if host_pipe is not None:
            nursery.start_soon(_watch_host, host_pipe, nursery.cancel_scope)
        nursery.start_soon(_watch_signals, server)
        try:
            await server.run(announce)
        finally:
            with suppress(OSError):
                connect_file.unlink()
        nursery.cancel_scope.cancel()
        return server.error
    return None


class Server:
    """All parts of one launch, and the traffic between them."""

    def __init__(self, config: ServeConfig, socket: Socket, epoch: int) -> None:
        self.error: FrameshardError | None = None
        self._config = config
        self._socket = socket
        self._epoch = epoch
        self._sessions = Sessions(
            epoch,
            held_bytes=config.held_bytes,
            silent_s=config.silent_s,
            max_client_jobs=config.max_client_jobs,
            describe=lambda: (self._supervisor.state.value, self._model),
        )
        self._jobs = Jobs(slots=config.n_parallel, max_jobs=config.max_jobs, max_client_jobs=config.max_client_jobs)
        self._lease = Lease(config.vram_budget_bytes)
        self._supervisor = Supervisor(config, self, self._load_op)
        self._model: m.ModelInfo | None = None
        self._stats: dict[int, tuple[Session, int]] = {}
        self._numbers = 0
        self._started_at = time.monotonic()
        self._announce: Callable[[], None] | None = None
        self._stop = trio.Event()
        self._blocked = trio.Event()

    async def run(self, announce: Callable[[], None]) -> None:
        """Until :meth:`stop`, or a first load that fails (:attr:`error`)."""
        self._announce = announce
        async with trio.open_nursery() as nursery:
            for task in (self._receive, self._retry, self._watch_silence, self._supervise):
                nursery.start_soon(task)
            await self._stop.wait()
            if self.error is None:
                self._jobs.fail_all(ConnectionLost("the sidecar is shutting down"))
                self._flush()
                await self._supervisor.stop()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Ends :meth:`run` in good order."""
        self._stop.set()

    # ---- tasks ------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        await self._supervisor.run()
        if self._announce is not None:
            self.error = self._supervisor.error
            self.stop()

    async def _receive(self) -> None:
        while True:
            peer, *parts = await self._socket.receive()
            wanted = self._sessions.receive(peer, parts, trio.current_time())
            while self._sessions.evicted:
                self._forget(self._sessions.evicted.popleft())
            if wanted is not None:
                session, request = wanted
                try:
                    self._handle(session, request)
                except FrameshardError as error:
                    session.connection.refuse(None if isinstance(request, m.Credit) else request.id, error)
            self._flush()

    async def _retry(self) -> None:
        while True:
            await self._blocked.wait()
            self._blocked = trio.Event()
            await trio.sleep(RETRY_S)
            self._flush()

    async def _watch_silence(self) -> None:
        while True:
            await trio.sleep(SILENCE_CHECK_S)
            now = trio.current_time()
            for session in self._sessions:
                if now - session.connection.heard_at > self._config.silent_s:
                    self._jobs.drop(session.connection, ConnectionLost("the client was silent for too long"))
            self._flush()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _handle(self, session: Session, request: m.Request) -> None:
        connection = session.connection
        if isinstance(request, m.Submit):
            self._demand_engine()
            self._jobs.submit(connection, request)
            connection.ok(request.id)
        elif isinstance(request, m.Cancel):
            self._jobs.cancel(connection, request.job)
            connection.ok(request.id)
        elif isinstance(request, m.BudgetSet):
            self._demand_engine()
            self._lease.set(connection, request)
        elif isinstance(request, m.BudgetGet):
            lease = self._lease
            connection.reply(m.Budget(request.id, self._epoch, lease.budget_bytes, lease.floor_bytes, lease.full_bytes))
        elif isinstance(request, m.ModelInfoGet):
            assert self._model is not None  # nobody can connect before the first load
            connection.reply(m.Model(request.id, self._epoch, self._model))
        elif isinstance(request, m.StatsGet):
            self._ask_stats(session, request.id)
        elif isinstance(request, m.Bye):
            connection.ok(request.id)
            self._flush()
            self._forget(session)
        elif isinstance(request, m.Shutdown):
            connection.ok(request.id)
            self.stop()

    def _demand_engine(self) -> None:
        if self._supervisor.state is states.Engine.OFF:
            assert self._supervisor.error is not None
            raise EngineDied(f"the engine is off: {self._supervisor.error.message}")

    def _ask_stats(self, session: Session, request_id: int) -> None:
        if self._supervisor.state is not states.Engine.READY:
            self._answer_stats(session, request_id, None)
        elif len(self._stats) >= MAX_STATS:
            raise Overloaded("too many requests for statistics wait")
        else:
            self._numbers += 1
            self._stats[self._numbers] = session, request_id
            self._supervisor.send({"op": "stats", "seq": self._numbers})

    def _answer_stats(self, session: Session, request_id: int, engine: dict[str, Any] | None) -> None:
        supervisor = self._supervisor
        broker = m.BrokerStats(
            pid=os.getpid(),
            engine_pid=supervisor.pid,
            engine=supervisor.state.value,
            engine_restarts=supervisor.restarts,
            sessions=len(self._sessions),
            jobs_queued=self._jobs.queued,
            jobs_running=self._jobs.running,
            uptime_s=time.monotonic() - self._started_at,
        )
        session.connection.reply(m.Stats(request_id, self._epoch, broker, engine))

    def _forget(self, session: Session) -> None:
        self._sessions.end(session)
        self._jobs.drop(session.connection)
        self._lease.drop(session.connection)

    # ---- engine (called by the supervisor) --------------------------------------------------------------------------

    def engine_ready(self, info: dict[str, Any]) -> None:
        try:
            self._model = m.convert(
                m.ModelInfo, {**{name: info.get(name) for name in _KNOWN_INFO}, "plan": info.get("plan", {})}
            )
        except m.Refused as refused:
            raise BadMessage(f"the engine's info is wrong: {refused}") from None
        budget_bytes = info.get("budget_bytes")
        in_force = budget_bytes if type(budget_bytes) is int else self._lease.engine_load_bytes()
        self._lease.engine_ready(self._model.floor_bytes, self._model.full_bytes, in_force)
        self._jobs.engine_ready()
        self._tell_all()
        if self._announce is not None:
            self._announce()
            self._announce = None

    def engine_event(self, event: dict[str, Any]) -> bool:
        kind = event.get("ev")
        if kind == "budget":
            self._lease.engine_event(event)
        elif kind == "stats":
            asked = self._stats.pop(event.get("seq", 0), None)
            if asked is not None:
                self._answer_stats(*asked, event.get("stats"))
        else:
            return self._jobs.engine_event(event)
        return False

    def engine_lost(self) -> None:
        self._jobs.engine_lost()
        self._lease.engine_lost()
        waiting, self._stats = self._stats, {}
        for session, request_id in waiting.values():
            self._answer_stats(session, request_id, None)
        self._tell_all()

    def engine_off(self, error: FrameshardError) -> None:
        ended = error if isinstance(error, EngineDied) else EngineDied(f"the engine is off: {error.message}")
        self._jobs.fail_all(ended)
        self._lease.fail_all(ended)
        self._tell_all()

    def engine_busy(self) -> bool:
        return self._jobs.running > 0

    def engine_changed(self) -> None:
        self._flush()

    def _load_op(self) -> dict[str, Any]:
        config = self._config
        return {
            "model": config.model,
            "device": config.device,
            "vram_budget": self._lease.engine_load_bytes(),
            "n_ctx": config.n_ctx,
            "n_ubatch": config.n_ubatch,
            "n_parallel": config.n_parallel,
            "n_threads": config.n_threads,
            "link_gbps": config.link_gbps,
            "mode": config.mode,
        }

    def _tell_all(self) -> None:
        supervisor = self._supervisor
        why = None if supervisor.error is None else m.ErrorInfo.of(supervisor.error)
        for session in self._sessions:
            session.connection.reply(m.Engine(self._epoch, supervisor.state.value, supervisor.restarts, why))

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Sends all that can be sent now: to the engine, to strangers, to sessions."""
        for ops in (self._lease.ops, self._jobs.ops):
            for op in ops:
                self._supervisor.send(op)
            ops.clear()
        while self._sessions.strangers:
            with suppress(Unreachable):
                self._socket.try_send(list(self._sessions.strangers.popleft()))
        for session in self._sessions:
            self._flush_session(session)
            if session.connection.overrun:
                logger.warning("%r does not read its answers: dropped", session)
                self._forget(session)

    def _flush_session(self, session: Session) -> None:
        connection = session.connection
        while session.reachable and (frame := connection.next_frame()) is not None:
            try:
                if not self._socket.try_send([session.peer, frame]):
                    self._blocked.set()
                    return
            except Unreachable:
                session.reachable = False
                return
            connection.sent()


# ---- the process ----------------------------------------------------------------------------------------------------


def _prepare_process() -> None:
    """More files than an idle-connection flood can use up, and the first to go when memory runs out."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


def _bind(router: zmq.Socket[bytes], wanted: str, secret: bytes) -> str:
    configure(router, linger_ms=BROKER_LINGER_MS)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 0)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, secret)
    router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        with _private_files():
            router.bind(wanted)
    except zmq.ZMQError as error:
        raise EndpointInUse(f"cannot listen at {wanted}: {error}", endpoint=wanted) from None
    bound = router.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()


@contextmanager
def _private_files() -> Iterator[None]:
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


@asynccontextmanager
async def _authenticator(context: zmq.Context[zmq.Socket[bytes]], client_key: bytes) -> AsyncIterator[None]:
    """Answers ZeroMQ's question for each connection (ZAP, rfc.zeromq.org/spec/27): only one key may come in."""
    zap = context.socket(zmq.REP)
    zap.bind("inproc://zeromq.zap.01")
    socket = Socket(zap, max_parts=7)

    async def answer() -> None:
        while True:
            parts = await socket.receive()
            known = len(parts) == 7 and parts[2] == ZAP_DOMAIN and parts[5] == b"CURVE" and parts[6] == client_key
            status = [b"200", b"OK", b"client"] if known else [b"400", b"unknown key", b""]
            socket.try_send([b"1.0", parts[1], *status, b""])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        yield
        nursery.cancel_scope.cancel()


async def _watch_signals(server: Server) -> None:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    with trio.open_signal_receiver(*(getattr(signal, name) for name in names if hasattr(signal, name))) as signals:
        async for _ in signals:
            server.stop()


async def _watch_host(pipe: int, scope: trio.CancelScope) -> None:
    """Ends all at once when the host is gone.

    That shows at the pipe's end or, should another child of the host have inherited the pipe, by a new parent process.
    Rejected: a parent-death signal, which fires when the thread that launched us ends.
    """
    parent = os.getppid()

    async def watch_parent() -> None:
        while os.getppid() == parent:
            await trio.sleep(PARENT_CHECK_S)
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_parent)
        async with trio.lowlevel.FdStream(pipe) as stream:
            while await stream.receive_some(1 << 12):
                pass
        scope.cancel()
