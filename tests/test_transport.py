"""The adapter between ZeroMQ and trio under load, compared with the obvious one, which stalls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
import zmq

from frameshard.transport import MAX_DROPPED, STEP_PARTS, Flooded, Socket, Unreachable, configure
from sidecars import in_trio

COUNT = 20_000


class Naive(Socket):
    """Waits until the descriptor is readable and then reads, which works with other sockets."""

    async def receive(self) -> list[bytes]:
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                pass

    def try_send(self, parts: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


async def echo_load(kind: type[Socket], count: int) -> int:
    """Sends messages in both directions at once through one pair of sockets.

    :returns: how many came back before the traffic stalled.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for socket in (router, dealer):
            configure(socket, linger_ms=0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("tcp://127.0.0.1:*")
        dealer.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        server, client = kind(router), kind(dealer)
        received = 0

        async def serve() -> None:
            while True:
                parts = await server.receive()
                while not server.try_send(parts):
                    await trio.sleep(0.001)

        async def send() -> None:
            for number in range(count):
                while not client.try_send([b"%d" % number]):
                    await trio.sleep(0.001)
                await trio.lowlevel.checkpoint()

        async def receive() -> None:
            nonlocal received
            while received < count:
                assert await client.receive() == [b"%d" % received]
                received += 1
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(send)
            nursery.start_soon(receive)
            before = -1
            while before < received < count:
                before = received
                await trio.sleep(2)
            nursery.cancel_scope.cancel()
        return received
    finally:
        context.destroy(linger=0)


@in_trio
async def test_nothing_stalls_under_load() -> None:
    assert await echo_load(Socket, COUNT) == COUNT


@in_trio
async def test_the_naive_adapter_stalls() -> None:
    """If this test fails, libzmq's descriptor behaves differently, and the adapter can become simpler."""
    assert await echo_load(Naive, COUNT) < COUNT


@in_trio
async def test_a_router_says_that_nobody_is_there() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        with pytest.raises(Unreachable):
            Socket(router).try_send([b"nobody", b"hello"])


@contextmanager
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two sockets that are connected to each other."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://pair")
        theirs.connect("inproc://pair")
        yield ours, theirs


@asynccontextmanager
async def counted_turns() -> AsyncIterator[Callable[[], int]]:
    """Yields a function that returns how many times another task has run since the block began."""
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        yield lambda: turns
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_message_of_too_many_parts_is_given_up() -> None:
    """Other tasks run while the message is read."""
    with pair() as (ours, theirs):
        theirs.send_multipart([b"first"] + [b""] * (MAX_DROPPED + 100))
        async with counted_turns() as turns:
            with pytest.raises(Flooded) as flood:
                await Socket(ours).receive()
        assert flood.value.first == b"first"
        assert turns() >= MAX_DROPPED // STEP_PARTS // 2  # trio runs the ready tasks in any order


@in_trio
async def test_messages_that_wait_are_received_several_in_a_turn() -> None:
    """A request must not wait for a turn of all other tasks for each request before it."""
    n_messages = 80
    with pair() as (ours, theirs):
        for number in range(n_messages):
            theirs.send(b"%d" % number)
        socket = Socket(ours, in_turn=8)
        async with counted_turns() as turns:
            assert [int((await socket.receive())[0]) for _ in range(n_messages)] == list(range(n_messages))
        assert 5 <= turns() <= 20


@in_trio
async def test_a_long_message_whose_receiver_was_cancelled_is_one_message_still() -> None:
    with pair() as (ours, theirs):
        theirs.send_multipart([b"a"] * 1000)
        theirs.send_multipart([b"b"])
        socket = Socket(ours)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    for _ in range(3):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel)
                await socket.receive()
        assert scope.cancelled_caught
        assert await socket.receive() == [b"a"] * 4
        assert await socket.receive() == [b"b"]


@in_trio
async def test_a_message_of_many_parts_is_cut() -> None:
    with pair() as (ours, theirs):
        theirs.send_multipart([b"x"] * 1000)
        theirs.send_multipart([b"a", b"b"])
        socket = Socket(ours)
        assert await socket.receive() == [b"x"] * 4
        assert await socket.receive() == [b"a", b"b"]
