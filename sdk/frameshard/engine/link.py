"""Sends events to the broker and receives its commands, on the stream between them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from frameshard.wire import channel
from frameshard.wire import engine as em


class BrokerGone(Exception):
    """The broker has closed its end of the stream."""


class Link:
    """Messages on the broker's socket. :meth:`send` may be called from any thread, :meth:`received` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, event: em.Event) -> None:
        """Sends an event to the broker.

        :raises BrokerGone: the broker has closed its end.
        """
        frame = em.pack(event)
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise BrokerGone(str(error)) from None

    def received(self) -> Iterator[dict[str, Any]]:
        """Yields the map of each message until the broker closes its end.

        :raises BadMessage: the bytes are not a message. The stream cannot be used any more.
        """
        reader = channel.Reader()
        while data := self._socket.recv(1 << 16):
            yield from reader.feed(data)
