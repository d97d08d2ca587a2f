"""What has arrived for one reader and was not read yet. It works in trio and in asyncio.

anyio's and asyncio's own channels do not fit: one complains when it is dropped without being closed, the other cannot
be closed. Its methods and errors are those that a trio program knows from :class:`trio.MemoryReceiveChannel`.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import trio

T = TypeVar("T")


class WouldBlock(anyio.WouldBlock, trio.WouldBlock):
    """Nothing has arrived yet."""


class EndOfChannel(anyio.EndOfStream, trio.EndOfChannel):
    """Everything was read, and nothing more comes."""


class Statistics(NamedTuple):
    current_buffer_used: int
    max_buffer_size: int


class Inbox(Generic[T]):
    """An asynchronous iterator over what arrives. It may be dropped without being closed.

    :param limit: as many wait to be read; then each further one takes the place of the oldest, so that the last states
        are known to a reader who comes late.
    """

    def __init__(self, limit: int) -> None:
        self.closed = False
        self._limit = limit
        self._waiting: deque[T] = deque(maxlen=limit)
        self._changed = anyio.Event()

    def put(self, what: T) -> None:
        """Adds something for the reader, unless the inbox is closed."""
        if not self.closed:
            self._waiting.append(what)
            self._changed.set()

    def close(self) -> None:
        """Nothing more comes. What has arrived can still be read."""
        self.closed = True
        self._changed.set()

    async def aclose(self) -> None:
        """Like :meth:`close`."""
        self.close()

    async def receive(self) -> T:
        """Waits for the next and returns it. Nothing is lost if the wait is cancelled.

        :raises EndOfChannel: nothing more comes. Also an `anyio.EndOfStream`, and a `trio.EndOfChannel`.
        """
        await anyio.lowlevel.checkpoint()
        while not self._waiting and not self.closed:
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        return self.receive_nowait()

    def receive_nowait(self) -> T:
        """Returns the next.

        :raises WouldBlock: nothing has arrived yet. Also an `anyio.WouldBlock`, and a `trio.WouldBlock`.
        :raises EndOfChannel: nothing more comes.
        """
        if self._waiting:
            return self._waiting.popleft()
        raise EndOfChannel if self.closed else WouldBlock

    def statistics(self) -> Statistics:
        """How much waits to be read."""
        return Statistics(len(self._waiting), self._limit)

    def __aiter__(self) -> Inbox[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except EndOfChannel:
            raise StopAsyncIteration from None

    def __enter__(self) -> Inbox[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Inbox[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
