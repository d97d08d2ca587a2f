"""The broker's sockets: one that clients connect to, one that answers who may, and a bound on what they can cost.

ZeroMQ bounds the parts of a message but not their number, and shows a message only when its last part is there. So a
peer that sends parts without end fills memory unseen, at hundreds of MiB a second, and cannot be told from the others.
Hence memory is watched: when it has grown too far, all connections are dropped with what was under way on them. Honest
clients connect again by themselves, resume their sessions and miss nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio
import zmq
from zmq.utils import z85

from frameshard.broker.server import Server
from frameshard.errors import BadArgument, EndpointInUse
from frameshard.transport import ZAP_DOMAIN, Socket, configure

logger = logging.getLogger("frameshard.broker")

LINGER_MS = 200
GROWTH_BYTES = 256 << 20
"""More than all that may be kept for clients, in ordinary use."""

MEMORY_CHECK_S = 0.1
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
                nursery.start_soon(server.receive, Socket(self._router))
                await _memory_has_grown()
                nursery.cancel_scope.cancel()
            logger.warning("a peer fills this process's memory: all connections are dropped")
            server.disconnected()
            self._context.destroy(linger=0)
            self._open(self.endpoint)

    def close(self) -> None:
        """What has been sent still gets a moment to arrive."""
        self._context.destroy(linger=LINGER_MS)

    def _open(self, wanted: str) -> str:
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._context.socket(zmq.ROUTER)
        configure(self._router, linger_ms=LINGER_MS)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 0),
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


async def _memory_has_grown() -> None:
    if not _STATM.exists():
        await trio.sleep_forever()
    most = _memory() + GROWTH_BYTES
    while _memory() < most:
        await trio.sleep(MEMORY_CHECK_S)


def _memory() -> int:
    """Bytes of memory that this process uses."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
