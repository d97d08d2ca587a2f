"""The broker's sockets: one that clients connect to, one that authenticates them, and limits on their memory and files.

ZeroMQ limits the size of a message's parts but not their number, and delivers a message only when its last part has
arrived. So a peer can fill the memory with endless parts, at hundreds of MiB/s, and cannot be identified. Therefore the
broker watches its memory. If the memory has grown too much, the broker closes all connections, and messages in transit
are lost. Other clients connect again by themselves and resume their sessions without a loss. The broker does the same
if a message has too many parts: ZeroMQ cannot skip them, and delivers no other message before they are read.

libzmq 4.3.5 aborts the process if an ipc socket accepts a connection and no file descriptor is left. So no new
connections are accepted while half of the descriptors are in use. For that the socket's file is renamed: existing
connections stay open, and new clients try again by themselves. Unbinding was rejected, because it also closes the
existing connections.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import trio
import zmq
from zmq.utils import z85

from frameshard import system
from frameshard.broker.endpoint import closed_name
from frameshard.broker.server import Server
from frameshard.errors import BadArgument, EndpointInUse, FrameshardError
from frameshard.transport import ZAP_DOMAIN, Socket, configure

logger = logging.getLogger("frameshard.broker")

LINGER_MS = 200
GROWTH_BYTES = 256 << 20
"""If the process grows by this much beyond what jobs hold, a peer is filling its memory: ordinary clients need less."""

MEMORY_CHECK_S = 0.1
PAUSE_S = 0.5
"""Seconds between two looks at the file descriptors while no connection is accepted."""

MAX_PAUSE_S = 5.0
"""After so many seconds without new connections, all connections are closed. Those without a handshake have timed out
before."""

REQUESTS_IN_TURN = 8
"""The most requests that are carried out before other tasks may run. If it were one, requests would wait long while the
tasks of many jobs at the fallback server have much to do."""

BACKLOG = 32
"""The most connections that libzmq may still accept after the renaming."""

ACCEPTS_PER_S = 50_000
"""libzmq accepts fewer connections per second than this. It limits the time between two looks at the descriptors."""


class Listener:
    """The sockets of one sidecar. They are bound when it is made."""

    def __init__(self, wanted: str, server_secret: bytes, client_public: bytes) -> None:
        """
        :param wanted: the endpoint to bind.
        :param server_secret: the sidecar's secret CURVE key.
        :param client_public: the public CURVE key of all clients.
        :raises EndpointInUse: another sidecar listens there.
        :raises BadArgument: the endpoint cannot be bound.
        """
        self._server_secret = server_secret
        self._client_key = z85.decode(client_public)
        self.endpoint = self._open(wanted)

    async def run(self, server: Server) -> None:
        """Passes traffic between clients and `server` until it is cancelled."""
        while True:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._authenticate, Socket(self._zap, max_parts=7))
                for end in (
                    partial(server.receive, Socket(self._router, in_turn=REQUESTS_IN_TURN)),
                    partial(_memory_has_grown, server.held_bytes),
                    self._files_stay_in_use,
                ):
                    nursery.start_soon(_until, end, nursery.cancel_scope)
            logger.warning("all connections are closed")
            server.disconnected()
            self._context.destroy(linger=0)
            while True:
                try:
                    self._open(self.endpoint)
                    break
                except FrameshardError as error:  # another process has taken the endpoint
                    logger.warning("%s", error)
                    await trio.sleep(PAUSE_S)

    def close(self) -> None:
        """Closes the sockets. Messages that were sent have `LINGER_MS` to arrive."""
        self._context.destroy(linger=LINGER_MS)

    async def _files_stay_in_use(self) -> None:
        """Stops accepting connections while half of the descriptors are in use. Returns if they are still in use after
        `MAX_PAUSE_S`."""
        while True:
            most = system.max_files() // 2
            await trio.sleep(min(MEMORY_CHECK_S, most / ACCEPTS_PER_S))
            if _files_in_use() >= most:
                logger.warning("too many connections: no new ones are accepted for now")
                with self._not_accepting(), trio.move_on_after(MAX_PAUSE_S) as pause:
                    await trio.sleep(PAUSE_S)
                    while _files_in_use() >= most:
                        await trio.sleep(PAUSE_S)
                if pause.cancelled_caught:
                    return

    @contextmanager
    def _not_accepting(self) -> Iterator[None]:
        """No client can connect during the block. A TCP port stays open, because there libzmq does not abort."""
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
        """Answers ZeroMQ's request for each new connection (ZAP, rfc.zeromq.org/spec/27). Accepts a single key."""
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


async def _memory_has_grown(held_bytes: Callable[[], int]) -> None:
    """
    :param held_bytes: what the open jobs hold. The process may keep its memory after they have ended.
    """
    with system.memory() as memory:
        if memory is None:
            await trio.sleep_forever()
        most_held = held_bytes()
        start = memory() - most_held
        while memory() < start + GROWTH_BYTES + most_held:
            await trio.sleep(MEMORY_CHECK_S)
            most_held = max(most_held, held_bytes())
    logger.warning(
        "this process has grown by %d MiB more than its jobs need: a client may be filling its memory",
        GROWTH_BYTES >> 20,
    )


def _files_in_use() -> int:
    """The number of the lowest free file descriptor. All below it are in use."""
    try:
        fd = os.dup(2)
    except OSError:
        return sys.maxsize
    os.close(fd)
    return fd
