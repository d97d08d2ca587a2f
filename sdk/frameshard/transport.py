"""ZeroMQ in trio: an adapter around a pyzmq socket, and the options that both ends set.

pyzmq supports asyncio but not trio, and a ZeroMQ socket's file descriptor is edge-triggered: it signals that the
socket's state *may* have changed, and any call on the socket (also a send) can consume the signal. A task that waits
for the descriptor after another task's send would wait for ever. So after every operation the state itself
(``EVENTS``) is read, and a waiting receiver is woken when there is something to receive. Rejected: a thread for the
socket, which costs two hand-overs per message and a second place for state.
"""

from __future__ import annotations

import secrets
from typing import Any

import trio
import zmq

from frameshard.wire import codec

HANDSHAKE_MS = 1000
HIGH_WATER = 256
"""Messages that ZeroMQ queues to or from one peer."""

ZAP_DOMAIN = b"frameshard"
MAX_PARTS = 3
"""Parts of one message, including the address that a router adds."""

STEP_PARTS = 100
"""Parts of a message that is too long which are read before other tasks have their turn; less than a millisecond."""

MAX_DROPPED = 10_000
"""Parts of one message that are read and dropped. A million takes seconds, during which no other peer is served."""


class Unreachable(Exception):
    """The peer is not connected now."""


class Flooded(Exception):
    """A message has more than :data:`MAX_DROPPED` parts. The socket cannot be used any more: close it.

    :param first: the message's first part; for a router the sender's address.
    """

    def __init__(self, first: bytes) -> None:
        super().__init__(f"a message of more than {MAX_DROPPED} parts")
        self.first = first


class Socket:
    """A ZeroMQ socket for the tasks of one thread. One task may receive; any may send."""

    def __init__(self, socket: zmq.Socket[bytes], *, max_parts: int = MAX_PARTS) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._max_parts = max_parts
        self._parked: trio.CancelScope | None = None
        self._reading: list[bytes] = []  # the parts read so far of the present message
        self._drained = False

    async def receive(self) -> list[bytes]:
        """The next message. Of one with more parts than the limit, one part more is kept and the rest dropped.

        :raises Flooded: the rest is too long.
        """
        await trio.lowlevel.checkpoint()
        while True:
            try:
                if not self._reading:
                    self._reading = [self._socket.recv(zmq.NOBLOCK)]
                for _ in range(MAX_DROPPED // STEP_PARTS):
                    if self._read_on():
                        message, self._reading = self._reading, []
                        return message
                    await trio.lowlevel.checkpoint()
                raise Flooded(self._reading[0])
            except zmq.Again:
                self._drained = True
            # A receive that finds nothing has consumed earlier signals; later ones make the descriptor readable.
            with trio.CancelScope() as self._parked:
                await trio.lowlevel.wait_readable(self._fd)
            self._parked = None

    def drained(self) -> bool:
        """Whether everything received had been read at some moment since the last call."""
        drained, self._drained = self._drained or self._parked is not None, False
        return drained

    def try_send(self, parts: list[bytes]) -> bool:
        """Sends a message without waiting.

        :returns: false where the peer's queue is full, or no peer is connected yet.
        :raises Unreachable: the peer is not connected now.
        """
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise Unreachable from None
        finally:
            if self._parked is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._parked.cancel()
        return True

    def close(self) -> None:
        self._socket.close()

    def _read_on(self) -> bool:
        """Reads up to `STEP_PARTS` parts; true where the message is complete."""
        for _ in range(STEP_PARTS):
            if not self._socket.getsockopt(zmq.RCVMORE):
                return True
            part = self._socket.recv(zmq.NOBLOCK)
            if len(self._reading) <= self._max_parts:
                self._reading.append(part)
        return False


def new_number() -> int:
    """A fresh random number for an epoch or a session."""
    return secrets.randbelow(codec.MAX_ID) + 1


def configure(socket: zmq.Socket[bytes], *, linger_ms: int) -> None:
    """Sets the options that both ends have.

    ZeroMQ's own heartbeats stay off: libzmq 4.3.5 aborts the process when a heartbeat is due on a connection that ended
    while its receive queue was full (libzmq#4364), so a flooding client could end the broker, or a dying broker the
    game. The protocol has pings of its own, and on one machine the system reports a dead peer.
    """
    options: list[tuple[int, Any]] = [
        (zmq.MAXMSGSIZE, codec.CLIENT.frame),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.LINGER, linger_ms),
    ]
    for option, value in options:
        socket.setsockopt(option, value)
