"""The sidecar's process: its sockets and keys, its limits, and what ends it.

It ends with its host, on a signal, on a client's shutdown, or when its first engine cannot be loaded, and leaves
nothing behind: no process, no socket, no directory.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio
import zmq
from zmq.utils import z85

from frameshard.broker import endpoint as places
from frameshard.broker.server import Server
from frameshard.errors import EndpointInUse, FrameshardError
from frameshard.transport import BROKER_LINGER_MS, ZAP_DOMAIN, Socket, configure, new_number
from frameshard.wire import launch
from frameshard.wire import messages as m
from frameshard.wire.launch import ConnectInfo, ServeConfig

PARENT_CHECK_S = 0.25
MAX_FILES = 65536
OOM_SCORE_ADJ = 500


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
    zap = context.socket(zmq.REP)
    zap.bind("inproc://zeromq.zap.01")
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

    async with trio.open_nursery() as nursery:
        nursery.start_soon(_authenticate, Socket(zap, max_parts=7), z85.decode(client_public))
        nursery.start_soon(_watch_signals, server)
        if host_pipe is not None:
            nursery.start_soon(_watch_host, host_pipe, nursery.cancel_scope)
        try:
            await server.run(announce)
        finally:
            with suppress(OSError):
                connect_file.unlink()
        nursery.cancel_scope.cancel()
    return server.error


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


async def _authenticate(socket: Socket, client_key: bytes) -> None:
    """Answers ZeroMQ's question for each connection (ZAP, rfc.zeromq.org/spec/27): only one key may come in."""
    while True:
        parts = await socket.receive()
        known = len(parts) == 7 and parts[2] == ZAP_DOMAIN and parts[5] == b"CURVE" and parts[6] == client_key
        status = [b"200", b"OK", b"client"] if known else [b"400", b"unknown key", b""]
        socket.try_send([b"1.0", parts[1], *status, b""])


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
