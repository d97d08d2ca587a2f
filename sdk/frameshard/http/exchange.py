"""One HTTP request and its response, as the application sees them.

Guarantees: the application gets the whole body at once, within limits of size and time. When the client leaves before
the response is complete, the application is cancelled, and with it the job in the sidecar. A body that the application
does not want is read and dropped, because Hypercorn stops reading a connection whose body nobody takes. An HTTP/2
response does not end while such a body still comes: Hypercorn would close the connection, with all other answers on it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from urllib.parse import unquote

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frameshard.http.refusal import Refusal, overloaded

logger = logging.getLogger("frameshard.http")

MAX_BODY_BYTES = 32 << 20
"""Of one request: 8 images of 3 MiB in base64."""

MAX_BODIES_BYTES = 128 << 20
"""Of all requests that are open."""

BODY_S = 30.0
"""In this time a client has to send a body. It has as long again for what is left of one after its response."""

PAUSE_S = 1.0
"""A body that is still sent after its response has ended when nothing of it came for this long."""

_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE)


class Exchanges:
    """An ASGI application around another one.

    :param app: the application inside.
    :param count: called with the path and the status of each response.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._count = count
        self.held_bytes = 0
        """Of the bodies of open requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        scope = _with_path(scope)

        def started(status: int) -> None:
            self._count(scope["path"], status)

        exchange = _Exchange(self, receive, send, started, streams=scope["http_version"] == "2")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(exchange.pump, nursery.cancel_scope)
                try:
                    await self._app(scope, exchange.receive, exchange.send)
                except Exception as error:
                    logger.error("a request failed by a defect of frameshard", exc_info=error)
                nursery.cancel_scope.cancel()
        finally:
            exchange.drop()


def _with_path(scope: Scope) -> Scope:
    """A request whose target is a URL, as one whose target is a path (RFC 9112, 3.2.2). Its Host is that of the URL."""
    url = _ABSOLUTE.fullmatch(scope["raw_path"])
    if url is None:
        return scope
    host, path = url[1], url[2] or b"/"
    headers = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]
    return {**scope, "headers": headers, "raw_path": path, "path": unquote(path.decode("ascii"))}


class _Exchange:
    """
    :param streams: the connection has other exchanges at the same time, as in HTTP/2.
    """

    def __init__(
        self, owner: Exchanges, receive: Receive, send: Send, started: Callable[[int], None], *, streams: bool
    ) -> None:
        self._streams = streams
        self._owner = owner
        self._receive = receive
        self._send = send
        self._started = started
        self._body = bytearray()
        self._wanted = False
        self._refusal: Refusal | None = None
        self._begun = trio.Event()
        self._complete = trio.Event()  # also if the body is refused
        self._ended = trio.Event()
        self._patience = trio.CancelScope()
        self._answered = False

    async def pump(self, scope: trio.CancelScope) -> None:
        """Reads what the client sends, until it leaves. Cancels `scope` if it leaves before it has its answer."""
        await self._begun.wait()
        while (message := await self._receive())["type"] != "http.disconnect":
            self._take(message.get("body", b""))
            self._patience.deadline = trio.current_time() + PAUSE_S
            if not message.get("more_body", False):
                self._complete.set()
                self._ended.set()
        if not self._answered:
            scope.cancel()

    async def receive(self) -> Message:
        """The whole body.

        :raises Refusal: it is too large or comes too slowly.
        """
        if self._begun.is_set():
            await trio.sleep_forever()  # nothing comes after the body: see `pump` for a client that leaves
        self._wanted = True
        self._begun.set()
        with trio.move_on_after(BODY_S):
            await self._complete.wait()
        if self._refusal is None and not self._complete.is_set():
            self._refusal = Refusal(408, f"the body did not come within {BODY_S:g} s", "request_timeout")
        if self._refusal is not None:
            self.drop()
            raise self._refusal
        return {"type": "http.request", "body": bytes(self._body), "more_body": False}

    async def send(self, message: Message) -> None:
        self._begun.set()
        if message["type"] == "http.response.start":
            self._started(message["status"])
        elif not message.get("more_body", False):
            if self._streams and not self._ended.is_set():
                await self._send({**message, "more_body": True})
                await self._read_rest()
                message = {"type": "http.response.body"}
            self._answered = True
        await self._send(message)

    async def _read_rest(self) -> None:
        """Waits until the body of the request has ended, or does not come any more."""
        with trio.move_on_after(BODY_S), trio.move_on_after(PAUSE_S) as self._patience:
            await self._ended.wait()

    def drop(self) -> None:
        """Forgets the body."""
        self._wanted = False
        self._owner.held_bytes -= len(self._body)
        self._body = bytearray()

    def _take(self, data: bytes) -> None:
        if not self._wanted:
            return
        if len(self._body) + len(data) > MAX_BODY_BYTES:
            self._refusal = Refusal(413, f"a body has at most {MAX_BODY_BYTES} bytes", "request_too_large")
        elif self._owner.held_bytes + len(data) > MAX_BODIES_BYTES:
            self._refusal = overloaded(429, "too many large requests are open")
        if self._refusal is not None:
            self.drop()
            self._complete.set()
            return
        self._body += data
        self._owner.held_bytes += len(data)
