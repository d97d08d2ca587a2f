"""Many requests on one HTTP/2 connection: what one of them does must not end the answers of the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h2.connection
import h2.events
import h2.settings
import pytest
import trio
from trio.testing import MockClock

from frameshard.http.exchange import Exchanges
from frameshard.http.listener import SEND_S, Listener, open_listener
from frameshard.http.refusal import Refusal

WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
PART_BYTES = 1 << 16
N_PARTS = 5


class Peer:
    """A client with one connection.

    :param settings: differ from the defaults.
    """

    def __init__(self, stream: trio.SocketStream, settings: dict[Any, int]) -> None:
        self._stream = stream
        self._h2 = h2.connection.H2Connection()
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self._h2.initiate_connection()
        self.statuses: dict[int, bytes] = {}
        self.bodies: dict[int, bytes] = {}
        self.ended: set[int] = set()

    async def ask(self, path: str, body: bytes | None = None) -> int:
        """Sends a request, with a body that is not ended.

        :returns: the number of its stream.
        """
        stream = self._h2.get_next_available_stream_id()
        headers = {":method": "GET" if body is None else "POST", ":scheme": "http", ":authority": "a", ":path": path}
        self._h2.send_headers(stream, list(headers.items()), end_stream=body is None)
        self.bodies[stream] = b""
        await self.send(stream, body or b"", end=False)
        return stream

    async def send(self, stream: int, body: bytes, *, end: bool) -> None:
        """Sends a part of a body."""
        if body or end:
            self._h2.send_data(stream, body, end_stream=end)
        await self._stream.send_all(self._h2.data_to_send())

    async def take(self, stream: int, n_bytes: int) -> None:
        """Lets the server send more."""
        self._h2.increment_flow_control_window(n_bytes, stream)
        self._h2.increment_flow_control_window(n_bytes)
        await self._stream.send_all(self._h2.data_to_send())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Reads until the condition is true.

        :raises EOFError: the server ends the connection before.
        """
        while not condition():
            data = await self._stream.receive_some()
            if not data:
                raise EOFError
            for event in self._h2.receive_data(bytes(data)):
                if isinstance(event, h2.events.ResponseReceived):
                    self.statuses[event.stream_id] = dict(event.headers)[b":status"]
                elif isinstance(event, h2.events.DataReceived):
                    self.bodies[event.stream_id] += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    self.ended.add(event.stream_id)
                elif isinstance(event, h2.events.ConnectionTerminated):
                    raise EOFError
            await self._stream.send_all(self._h2.data_to_send())


class Server:
    """An HTTP server whose answers to ``/held`` wait for `release`."""

    def __init__(self) -> None:
        self.release = trio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/refused":
            await Refusal(404, "no", "unknown_url").response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/held":
            await send({"type": "http.response.body", "body": b"begin", "more_body": True})
            await self.release.wait()
        size = N_PARTS * PART_BYTES if scope["path"] == "/large" else 3
        await send({"type": "http.response.body", "body": b"x" * size})

    @asynccontextmanager
    async def peer(self, settings: dict[Any, int] | None = None) -> AsyncIterator[Peer]:
        socket = await open_listener("127.0.0.1", 0)
        listener = Listener(socket, Exchanges(self.app, lambda path, status: None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            async with await trio.open_tcp_stream("127.0.0.1", socket.socket.getsockname()[1]) as stream:
                yield Peer(stream, settings or {})
            nursery.cancel_scope.cancel()


def test_a_response_before_the_end_of_its_request_ends_no_other() -> None:
    async def main() -> None:
        server = Server()
        async with server.peer() as peer:
            held = await peer.ask("/held")
            refused = await peer.ask("/refused", b"x" * 1000)
            await peer.until(lambda: b"unknown_url" in peer.bodies[refused] and peer.bodies[held] == b"begin")
            await peer.send(refused, b"x" * 1000, end=False)
            await peer.send(refused, b"x" * 1000, end=True)
            await peer.until(lambda: refused in peer.ended)
            server.release.set()
            await peer.until(lambda: held in peer.ended)
            assert (peer.bodies[held], peer.statuses[refused]) == (b"beginxxx", b"404")

    trio.run(main, clock=MockClock())  # no time passes


def test_a_response_ends_although_the_rest_of_its_request_never_comes() -> None:
    async def main() -> None:
        async with Server().peer() as peer:
            refused = await peer.ask("/refused", b"x" * 1000)
            await peer.until(lambda: refused in peer.ended)

    trio.run(main, clock=MockClock(autojump_threshold=0.1))


def test_a_connection_has_no_last_request() -> None:
    async def main() -> None:
        server = Server()
        async with server.peer() as peer:
            held = await peer.ask("/held")
            for _ in range(22):
                asked = [await peer.ask("/") for _ in range(50)]
                await peer.until(lambda asked=asked: peer.ended.issuperset(asked))  # type: ignore[misc]
            server.release.set()
            await peer.until(lambda: held in peer.ended)

    trio.run(main, clock=MockClock())


def test_a_client_that_takes_nothing_loses_its_connection() -> None:
    async def main() -> None:
        async with Server().peer({WINDOW: 0}) as peer:
            asked = await peer.ask("/")
            with pytest.raises(EOFError), trio.fail_after(2 * SEND_S):
                await peer.until(lambda: False)
            assert (peer.statuses[asked], peer.bodies[asked]) == (b"200", b"")

    trio.run(main, clock=MockClock(autojump_threshold=0.1))


def test_a_slow_client_gets_a_large_response() -> None:
    async def main() -> None:
        async with Server().peer({WINDOW: 0}) as peer:
            asked = await peer.ask("/large")
            for taken in range(1, N_PARTS + 1):
                await trio.sleep(0.9 * SEND_S)
                await peer.take(asked, PART_BYTES)
                await peer.until(lambda taken=taken: len(peer.bodies[asked]) == taken * PART_BYTES)  # type: ignore[misc]
            await peer.until(lambda: asked in peer.ended)

    trio.run(main, clock=MockClock(autojump_threshold=0.1))
