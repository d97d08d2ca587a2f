"""Sends events to the broker and receives its commands, on the stream between them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from frameshard.wire import channel
from frameshard.wire import engine as em


class BrokerGone(Exception):
    """The broker has closed its end of the stream."""


class Link:
    """Messages on the broker's socket. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, event: em.Event) -> None:
        """Sends an event to the broker.

        :raises BrokerGone: the broker has closed its end.
        """
        self.send_made(lambda: event)

    def send_made(self, make: Callable[[], em.Event]) -> None:
        """Like :meth:`send`, for figures that several threads report. The figures of a later event are newer.

        :param make: reads the figures, quickly: nothing else is sent meanwhile.
        """
        try:
            with self._lock:
                self._socket.sendall(em.pack(make()))
        except OSError as error:
            raise BrokerGone(str(error)) from None

    def received(self) -> Iterator[dict[str, Any]]:
        """Yields the map of each message until the broker closes its end.

        :raises BadMessage: the bytes are not a message. The stream cannot be used any more.
        """
        reader = channel.Reader()
        while data := self._socket.recv(1 << 16):
            yield from reader.feed(data)
