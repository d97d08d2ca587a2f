"""Accepts connections and hands them to Hypercorn, with limits for many, slow and hostile clients.

Hypercorn's own accept loop is not used: it has no limit for connections, an error in one connection ends all of them,
and a client that does not read holds its connection, and the end of the process, for ever.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import partial

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frameshard.errors import BadArgument
from frameshard.http.guard import MAX_HEADER_BYTES
from frameshard.http.refusal import overloaded

logger = logging.getLogger("frameshard.http")

MAX_CONNECTIONS = 256
IDLE_S = 15.0
"""A connection without a request is closed after this time. It is also the time that the headers of one may take."""

SEND_S = 30.0
"""A client that takes nothing of its response for this long loses its connection."""

LINGER_S = 1.0
"""A connection is read for so long after a response that came before the end of its request. Closed at once, it would
be reset, and the client might not see the response."""


class Connection:
    """A connection as Hypercorn sees it: trio's stream with time limits."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self._stream = stream
        self._sending = trio.Lock()
        self._responding: set[trio.CancelScope] = set()
        self.ended = trio.Event()
        """Set when the client has left, or the connection is closed."""

    async def receive_some(self, max_bytes: int) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.ended.set()
            raise
        if not data:
            self.ended.set()
        return data

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(SEND_S) as scope:
            async with self._sending:
                await self._stream.send_all(data)
        if scope.cancelled_caught:
            self.abort()
            raise trio.BrokenResourceError("the client does not read")
        for response in self._responding:
            response.deadline = trio.current_time() + SEND_S

    async def respond(self, send: Send, message: Message) -> None:
        """Passes a part of a response to Hypercorn, which waits until an HTTP/2 client lets it send that part.

        A client that takes nothing of any response for :data:`SEND_S` loses its connection.
        """
        with trio.move_on_after(SEND_S) as scope:
            self._responding.add(scope)
            try:
                await send(message)
            finally:
                self._responding.discard(scope)
        if scope.cancelled_caught:
            self.abort()

    async def send_eof(self) -> None:
        # Hypercorn does this also while another task sends, which trio refuses.
        async with self._sending:
            await self._stream.send_eof()

    async def aclose(self) -> None:
        """Closes the connection when the client has closed its side, or after :data:`LINGER_S`."""
        try:
            with trio.move_on_after(LINGER_S):
                await self.ended.wait()
        finally:
            await self._stream.aclose()

    def abort(self) -> None:
        """Closes the connection at once, also while it sends or receives."""
        self.ended.set()
        self.socket.close()


class Listener:
    """
    :param listener: made by :func:`open_listener`.
    :param app: the ASGI application.
    """

    def __init__(self, listener: trio.SocketListener, app: ASGIApp) -> None:
        self._listener = listener
        self._config = Config()
        self._config.errorlog = logger
        self._config.include_server_header = False
        self._config.keep_alive_timeout = IDLE_S
        # At this number of requests Hypercorn ends an HTTP/2 connection, also the answers that are not complete yet.
        self._config.keep_alive_max_requests = sys.maxsize
        self._config.h11_max_incomplete_size = MAX_HEADER_BYTES
        self._app = app
        self._open: set[Connection] = set()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._open)

    async def run(self) -> None:
        """Serves until it is cancelled. Then all connections are closed at once."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.serve_listeners, self._handle, [self._listener]))
            try:
                await trio.sleep_forever()
            finally:
                for connection in self._open:
                    connection.abort()

    async def _handle(self, stream: trio.SocketStream) -> None:
        connection = Connection(stream)
        if len(self._open) >= 2 * MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        full = len(self._open) >= MAX_CONNECTIONS
        self._open.add(connection)
        try:
            await (_refuse(connection) if full else self._serve(connection))
        except Exception as error:
            logger.warning("a connection is closed, because Hypercorn failed: %r", error)
        finally:
            self._open.discard(connection)
            await trio.aclose_forcefully(stream)

    async def _serve(self, connection: Connection) -> None:
        """Ends at once when the client leaves. Hypercorn alone would keep the connection until it was idle for long."""

        async def watch() -> None:
            await connection.ended.wait()
            nursery.cancel_scope.cancel()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app(scope, receive, partial(connection.respond, send))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            wrapped = wrap_app(app, 0, "asgi")
            await TCPServer(wrapped, self._config, WorkerContext(None), ConnectionState({}), connection)
            nursery.cancel_scope.cancel()


async def _refuse(connection: Connection) -> None:
    response = overloaded(503, f"there are {MAX_CONNECTIONS} connections").response()
    fields = b"".join(b"%s: %s\r\n" % field for field in response.raw_headers)
    head = b"HTTP/1.1 503 Service Unavailable\r\n" + fields + b"Connection: close\r\n\r\n"
    with trio.move_on_after(LINGER_S), suppress(trio.BrokenResourceError):  # the client has left
        await connection.send_all(head + bytes(response.body))
        await connection.send_eof()
        while await connection.receive_some(1 << 16):
            pass


async def open_listener(host: str, port: int) -> trio.SocketListener:
    """Listens on an address.

    :param host: an IP address.
    :param port: 0: a free one.
    :raises BadArgument: this is not possible.
    """
    try:
        (listener,) = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise BadArgument(f"cannot listen on {host} port {port}: {error.strerror}", field="bind") from None
    return listener
