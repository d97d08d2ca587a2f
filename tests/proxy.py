"""A proxy in front of an HTTP server that cuts, stalls and lies."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio


@dataclass(frozen=True)
class Fault:
    """What happens to a connection.

    :param say: these bytes are sent instead of the server's.
    :param after: so many bytes of the response pass; None: all.
    :param stall: then nothing more comes; without it the connection is closed.
    """

    say: bytes | None = None
    after: int | None = None
    stall: bool = False


PASS = Fault()
REFUSE = Fault(after=0)


def response(body: bytes, kind: str = "text/event-stream", status: str = "200 OK", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{extra}Connection: close\r\n\r\n"
    return head.encode() + body


@dataclass
class Proxy:
    """A running proxy.

    :param choose: says what happens to the next connection.
    """

    target_port: int
    choose: Callable[[], Fault] = lambda: PASS
    port: int = 0
    n_open: int = 0
    n_faults: int = 0
    heads: list[bytes] = field(default_factory=list)
    """The beginnings of what the clients sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, client: trio.SocketStream) -> None:
        fault = self.choose()
        self.n_faults += fault != PASS
        self.n_open += 1
        try:
            async with client:
                await (self._lie(client, fault) if fault.say is not None else self._pass(client, fault))
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        finally:
            self.n_open -= 1

    async def _lie(self, client: trio.SocketStream, fault: Fault) -> None:
        self.heads.append(await client.receive_some(1 << 16))
        assert fault.say is not None
        await client.send_all(fault.say)
        if fault.stall:
            await self._wait_for_end(client)

    async def _pass(self, client: trio.SocketStream, fault: Fault) -> None:
        if fault.after == 0 and not fault.stall:
            return
        server = await trio.open_tcp_stream("127.0.0.1", self.target_port)
        async with server, trio.open_nursery() as nursery:

            async def forward() -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    while data := await client.receive_some(1 << 16):
                        self.heads.append(data)
                        await server.send_all(data)
                nursery.cancel_scope.cancel()  # one of them has left

            nursery.start_soon(forward)
            left = fault.after
            with contextlib.suppress(trio.BrokenResourceError):
                while left != 0 and (data := await server.receive_some(1 << 16)):
                    data = data if left is None else data[:left]
                    left = None if left is None else left - len(data)
                    await client.send_all(data)
            if fault.stall:
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()

    async def _wait_for_end(self, client: trio.SocketStream) -> None:
        while await client.receive_some(1 << 16):
            pass


@asynccontextmanager
async def proxy(target_port: int) -> AsyncIterator[Proxy]:
    """A proxy in front of a port of this machine."""
    made = Proxy(target_port)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        made.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, made.serve, [listener])
        yield made
        nursery.cancel_scope.cancel()
