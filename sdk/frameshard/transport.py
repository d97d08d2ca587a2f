"""Uses ZeroMQ sockets in trio and asyncio, and sets the socket options of both ends.

pyzmq supports asyncio but not trio, and waits in another way there. The file descriptor of a ZeroMQ socket is
edge-triggered: it only signals that the socket's state *may* have changed, and any call on the socket, also a send, can
consume the signal. A task that waits for the descriptor after another task's send could wait for ever. So each send
reads the state itself (``EVENTS``), and wakes the waiting receiver if there is something to receive. A thread for the
socket was rejected: each message would pass between threads twice, and the state would be in two places.
"""

from __future__ import annotations

import secrets
from typing import Any

import anyio
import anyio.lowlevel
import zmq

from frameshard.wire import codec

HANDSHAKE_MS = 1000
HIGH_WATER = 256
"""The most messages that ZeroMQ queues to or from one peer."""

ZAP_DOMAIN = b"frameshard"
MAX_PARTS = 3
"""The most parts of one message, including the address that a router adds."""

STEP_PARTS = 100
"""The number of parts that are read before other tasks may run. Reading them takes less than a millisecond."""

MAX_DROPPED = 10_000
"""The most parts of one message that are read, including those that are dropped. A million parts would take seconds,
and no other peer could be served meanwhile."""


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
    """A ZeroMQ socket for the tasks of one thread. One task may receive, and all may send.

    :param max_parts: the most parts of a message.
    :param in_turn: the number of messages that are received before other tasks may run. With more than one, tasks that
        wait for these messages may go on in any order.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, max_parts: int = MAX_PARTS, in_turn: int = 1) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._max_parts = max_parts
        self._in_turn = in_turn
        self._parked: anyio.CancelScope | None = None
        self._reading: list[bytes] = []  # the parts of the present message that were read so far
        self._drained = False
        self._received = 0  # messages since other tasks could run

    async def receive(self) -> list[bytes]:
        """Receives a message and returns its parts. If it has more parts than the limit, the returned list is one part
        longer than the limit, and the other parts are dropped.

        :raises Flooded: the message has more than :data:`MAX_DROPPED` parts.
        """
        self._received += 1
        if self._received > self._in_turn:
            self._received = 1
            await anyio.lowlevel.checkpoint()
        while True:
            try:
                if not self._reading:
                    self._reading = [self._socket.recv(zmq.NOBLOCK)]
                for _ in range(MAX_DROPPED // STEP_PARTS):
                    if self._read_on():
                        message, self._reading = self._reading, []
                        return message
                    await anyio.lowlevel.checkpoint()
                raise Flooded(self._reading[0])
            except zmq.Again:
                self._drained = True
            # A receive that finds nothing consumes the earlier signals. New messages make the descriptor readable.
            with anyio.CancelScope() as self._parked:
                await anyio.wait_readable(self._fd)
            self._parked = None
            self._received = 1

    def drained(self) -> bool:
        """Returns true if the queue of received messages was empty at some moment since the last call."""
        drained, self._drained = self._drained or self._parked is not None, False
        return drained

    def try_send(self, parts: list[bytes]) -> bool:
        """Sends a message without waiting.

        :returns: false if the peer's queue is full, or if no peer has connected yet.
        :raises Unreachable: the peer is not connected.
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
        """Reads up to `STEP_PARTS` parts. Returns true if the message is complete."""
        for _ in range(STEP_PARTS):
            if not self._socket.getsockopt(zmq.RCVMORE):
                return True
            part = self._socket.recv(zmq.NOBLOCK)
            if len(self._reading) <= self._max_parts:
                self._reading.append(part)
        return False


def new_number() -> int:
    """Returns a new random number for an epoch or a session."""
    return secrets.randbelow(codec.MAX_ID) + 1


def configure(socket: zmq.Socket[bytes], *, linger_ms: int) -> None:
    """Sets the options that both ends use.

    ZeroMQ's own heartbeats stay off. With them, libzmq 4.3.5 aborts the process if a heartbeat is due on a connection
    that has ended while its receive queue was full (libzmq#4364). So a client that floods the broker could end it, and
    a dying broker could end the game. The protocol has its own pings, and on one machine the operating system reports a
    dead peer.

    :param linger_ms: milliseconds that a closed socket still tries to send its queue.
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
