"""The broker's sockets: one that clients connect to, one that answers who may, and a bound on what they can cost.

ZeroMQ bounds the parts of a message but not their number, and shows a message only when its last part is there. So a
peer that sends parts without end fills memory unseen, at hundreds of MiB a second, and cannot be told from the others.
Hence memory is watched: when it has grown too far, all connections are dropped with what was under way on them. Honest
clients connect again by themselves, resume their sessions and miss nothing. The same is done when a message has too
many parts, since ZeroMQ cannot skip them and shows no other peer's message before they are read.

libzmq 4.3.5 aborts the process when an ipc socket accepts a connection and no file descriptor is left. So the doors
are closed while half of the descriptors are in use: the socket's file has another name then, so those who are in go on,
and those who wait try again by themselves. Rejected: unbinding, which ends the connections too.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path

import trio
import zmq
from zmq.utils import z85

from frameshard.broker.endpoint import closed_name
from frameshard.broker.server import Server
from frameshard.errors import BadArgument, EndpointInUse, FrameshardError
from frameshard.transport import ZAP_DOMAIN, Socket, configure

logger = logging.getLogger("frameshard.broker")

LINGER_MS = 200
GROWTH_BYTES = 256 << 20
"""More than all that may be kept for clients, in ordinary use."""

MEMORY_CHECK_S = 0.1
PAUSE_S = 0.5
"""Without a listening socket, once half of the file descriptors are in use; again and again until they are not."""

MAX_PAUSE_S = 5.0
"""Connections that do not begin a handshake are gone by then; the others are dropped."""

BACKLOG = 32
"""Connections that libzmq may still accept when the doors are closed."""

ACCEPTS_PER_S = 50_000
"""More than libzmq can accept: how often the descriptors must be looked at."""

_STATM = Path("/proc/self/statm")


class Listener:
    """Bound from its making on."""

    def __init__(self, wanted: str, server_secret: bytes, client_public: bytes) -> None:
        """Raises :class:`EndpointInUse`, :class:`BadArgument` for an endpoint that cannot be had."""
        self._server_secret = server_secret
        self._client_key = z85.decode(client_public)
        self.endpoint = self._open(wanted)

    async def run(self, server: Server) -> None:
        """Brings clients and `server` together until it is cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._authenticate, Socket(self._zap, max_parts=7))
                for end in (partial(server.receive, Socket(self._router)), _memory_has_grown, self._files_stay_in_use):
                    nursery.start_soon(_until, end, nursery.cancel_scope)
            logger.warning("all connections are dropped")
            server.disconnected()
            self._context.destroy(linger=0)
            while True:
                try:
                    self._open(self.endpoint)
                    break
                except FrameshardError as error:  # somebody was faster
                    logger.warning("%s", error)
                    await trio.sleep(PAUSE_S)

    def close(self) -> None:
        """What has been sent still gets a moment to arrive."""
        self._context.destroy(linger=LINGER_MS)

    async def _files_stay_in_use(self) -> None:
        """Closes the doors while half of the descriptors are in use, until that does not help."""
        while True:
            most = _max_files() // 2
            await trio.sleep(min(MEMORY_CHECK_S, most / ACCEPTS_PER_S))
            if _files_in_use() >= most:
                logger.warning("too many connections: no more for a while")
                with self._doors_closed(), trio.move_on_after(MAX_PAUSE_S) as pause:
                    await trio.sleep(PAUSE_S)
                    while _files_in_use() >= most:
                        await trio.sleep(PAUSE_S)
                if pause.cancelled_caught:
                    return

    @contextmanager
    def _doors_closed(self) -> Iterator[None]:
        """Nobody can connect. A port stays open: there, libzmq bears it that no descriptor is left."""
        if not self.endpoint.startswith("ipc://"):
            yield
            return
        path = Path(self.endpoint[len("ipc://") :])
        closed = closed_name(path)
        with suppress(OSError):
            path.replace(closed)
        try:
            yield
        finally:
            with suppress(OSError):
                closed.replace(path)

    def _open(self, wanted: str) -> str:
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router, linger_ms=LINGER_MS)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 0),
            (zmq.BACKLOG, BACKLOG),
            (zmq.CURVE_SERVER, 1),
            (zmq.CURVE_SECRETKEY, self._server_secret),
            (zmq.ZAP_DOMAIN, ZAP_DOMAIN),
            (zmq.ZAP_ENFORCE_DOMAIN, 1),
        ):
            self._router.setsockopt(option, value)
        try:
            with _private_files():
                self._router.bind(wanted)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            why = f"cannot listen at {wanted}: {error.strerror}"
            if error.errno == zmq.EADDRINUSE:
                raise EndpointInUse(why, endpoint=wanted) from None
            raise BadArgument(why, field="endpoint") from None
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def _authenticate(self, zap: Socket) -> None:
        """Answers ZeroMQ's question for each connection (ZAP, rfc.zeromq.org/spec/27): only one key may come in."""
        while True:
            parts = await zap.receive()
            known = len(parts) == 7 and parts[2] == ZAP_DOMAIN and parts[5:] == [b"CURVE", self._client_key]
            status = [b"200", b"OK", b"client"] if known else [b"400", b"unknown key", b""]
            zap.try_send([b"1.0", parts[1], *status, b""])


@contextmanager
def _private_files() -> Iterator[None]:
    mask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(mask)


async def _until(end: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await end()
    scope.cancel()


async def _memory_has_grown() -> None:
    if not _STATM.exists():
        await trio.sleep_forever()
    with _STATM.open("rb", buffering=0) as statm:  # once: later there may be no descriptor left
        most = _memory(statm) + GROWTH_BYTES
        while _memory(statm) < most:
            await trio.sleep(MEMORY_CHECK_S)
    logger.warning("a peer fills this process's memory")


def _memory(statm: FileIO) -> int:
    """Bytes of memory that this process uses."""
    statm.seek(0)
    return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _max_files() -> int:
    """Descriptors that this process may have."""
    if sys.platform == "win32":
        return sys.maxsize  # sockets are no file descriptors there
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _files_in_use() -> int:
    """All descriptors below this one are in use: each new one is the lowest that is free."""
    try:
        fd = os.dup(2)
    except OSError:
        return sys.maxsize
    os.close(fd)
    return fd
