"""The broker's traffic, with a real broker process, real sockets and the fake engine."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
from contextlib import AsyncExitStack, ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
import trio
import zmq

import frameshard
from frameshard import client as client_module
from frameshard import errors
from frameshard.broker import endpoint as places
from frameshard.broker import listener as listener_module
from frameshard.broker.listener import GROWTH_BYTES, Listener
from frameshard.broker.requests import MAX_ASKED_BY_ONE
from frameshard.broker.server import Server
from frameshard.testing import fake_engine
from frameshard.wire import codec, connection
from frameshard.wire import messages as m
from sidecars import (
    GREEDY,
    WORDS,
    RawPeer,
    alive,
    directory_of,
    freeze,
    gone_after,
    host,
    in_trio,
    launch,
    raw_peer,
    thaw,
    until_lost,
)

CLIENT = """
import sys, trio, frameshard
async def main():
    async with frameshard.connect(sys.argv[1]) as client:
        print((await client.stats()).broker.engine_pid, flush=True)
        async with client.complete(sys.argv[2], sampling=frameshard.Sampling(max_tokens=100000)) as stream:
            count = 0
            async for delta in stream:
                count += delta.tokens
                if count == 20:
                    print("speaking", flush=True)
            print(stream.text, flush=True)
trio.run(main)
"""


def connect_file(client: frameshard.Client) -> str:
    return str(directory_of(client.info) / "connect.json")


@in_trio
async def test_a_stream_arrives_whole(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with client.complete(WORDS) as stream:
            events = [event async for event in stream]
        assert stream.text == WORDS
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert stream.result is not None
        assert (stream.result.n_generated, stream.result.reason) == (200, "stop")


@in_trio
async def test_many_jobs_of_many_clients() -> None:
    async with launch(engine=fake_engine(delay_s=0.001)) as first:
        async with frameshard.connect(first.info) as second, frameshard.connect(first.info) as third:

            async def run(client: frameshard.Client, text: str) -> None:
                assert (await client.complete(text).completed()).text == text

            async with trio.open_nursery() as nursery:
                for index in range(30):
                    client = (first, second, third)[index % 3]
                    nursery.start_soon(run, client, f"{index} {WORDS[: 7 * index]}".strip())
            stats = await first.stats()
            assert (stats.broker.sessions, stats.broker.jobs_running, stats.broker.jobs_queued) == (3, 0, 0)


@in_trio
async def test_leaving_a_stream_cancels_its_job() -> None:
    async with launch(engine=fake_engine(delay_s=0.001, endless=True)) as client:
        async with client.complete("la", sampling=GREEDY) as stream:
            async for _ in stream:
                break
        with trio.fail_after(60):
            while (await client.stats()).broker.jobs_running:
                await trio.sleep(0.01)


@in_trio
async def test_cancel_while_queued() -> None:
    async with launch(engine=fake_engine(delay_s=0.001, endless=True), n_parallel=1) as client:
        async with client.complete("la", sampling=GREEDY), client.complete("li", sampling=GREEDY) as second:
            assert (await client.stats()).broker.jobs_queued == 1
            await second.cancel()
            with pytest.raises(errors.JobCancelled):
                await second.completed()
            assert second.text == ""
            assert (await client.stats()).broker.jobs_queued == 0


@in_trio
async def test_a_client_that_vanishes_takes_only_its_jobs_with_it() -> None:
    async with launch(engine=fake_engine(delay_s=0.01, endless=True), silent_s=1.0) as client:
        other = host(CLIENT, connect_file(client), WORDS)
        assert other.stdout is not None
        async with client.complete("la", sampling=frameshard.Sampling(max_tokens=400)) as stream:
            assert await trio.to_thread.run_sync(other.stdout.readline)
            assert await trio.to_thread.run_sync(other.stdout.readline) == "speaking\n"
            other.kill()
            other.wait()
            other.stdout.close()
            assert (await stream.completed()).n_generated == 400
        with trio.fail_after(60):
            while (await client.stats()).broker.jobs_running:
                await trio.sleep(0.01)


@in_trio
async def test_a_client_that_freezes_goes_on_where_it_was() -> None:
    """It is stopped for longer than its own time limit for the broker, and must not report the broker as lost."""
    async with launch(engine=fake_engine(delay_s=0.02)) as client:
        other = host(CLIENT, connect_file(client), WORDS)
        assert other.stdout is not None
        await trio.to_thread.run_sync(other.stdout.readline)
        assert await trio.to_thread.run_sync(other.stdout.readline) == "speaking\n"
        freeze(other.pid)
        await trio.sleep(3)
        thaw(other.pid)
        assert (await trio.to_thread.run_sync(other.stdout.readline)).strip() == WORDS
        assert await trio.to_thread.run_sync(other.wait) == 0
        other.stdout.close()


STREAM = """
import sys, trio, frameshard
from frameshard.testing import fake_engine
async def main():
    engine = fake_engine(delay_s=0.04)
    limits = {"silent_s": 1.0, "hang_still_s": 8.0, "hang_idle_s": 8.0}
    async with frameshard.launch("no model", engine=engine, **limits) as client:
        broker = (await client.stats()).broker
        async with client.complete(sys.argv[1]) as stream:
            await stream.__anext__()
            print(broker.pid, broker.engine_pid, flush=True)
            await stream.completed()
            print(stream.text, flush=True)
        print((await client.stats()).broker.engine_restarts, flush=True)
trio.run(main)
"""


@in_trio
async def test_no_job_fails_when_processes_are_stopped() -> None:
    """They are stopped for longer than any time limit, as by a console, a debugger or a cgroup freezer. Each sidecar
    has a host of its own, and all of them are stopped at the same time, since there is nothing to do but wait."""
    async with trio.open_nursery() as nursery:
        for who in ("broker", "client", "engine", "all"):
            await nursery.start(stop_for_a_while, who)  # one launch at a time


async def stop_for_a_while(who: str, task_status: trio.TaskStatus[None]) -> None:
    """Stops a host, its sidecar or both during an answer. Started when the answer has begun."""
    process = host(STREAM, WORDS)
    with process:
        assert process.stdout is not None
        read = process.stdout.readline
        broker, engine = (int(pid) for pid in (await trio.to_thread.run_sync(read)).split())
        task_status.started()
        stopped = {"broker": [broker], "client": [process.pid], "engine": [engine]}
        pids = stopped.get(who, [process.pid, broker, engine])
        try:
            for pid in pids:
                freeze(pid)
            if who == "engine":  # it is replaced
                await trio.to_thread.run_sync(gone_after, [engine])
            else:
                await trio.sleep(10)
        finally:
            for pid in filter(alive, reversed(pids)):  # the engine first, so that the broker does not miss it
                thaw(pid)
        assert await trio.to_thread.run_sync(read) == f"{WORDS}\n", who
        assert await trio.to_thread.run_sync(read) == ("1\n" if who == "engine" else "0\n"), who
        assert await trio.to_thread.run_sync(process.wait) == 0, who


@in_trio
async def test_what_is_asked_of_a_stopped_sidecar_is_answered_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped for longer than the time limit of an answer, which is long enough for a busy machine."""
    monkeypatch.setattr(client_module, "ANSWER_S", 4.0)
    async with launch() as client:
        stats = await client.stats()
        assert stats.broker.engine_pid is not None
        pids = [stats.broker.pid, stats.broker.engine_pid]
        for pid in pids:
            freeze(pid)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert (await client.set_budget(100, timeout_s=2.0)).vram_budget_bytes == 100 << 20

            nursery.start_soon(ask)
            await trio.sleep(8)
            for pid in reversed(pids):  # the engine first, so that the broker does not wait for it
                thaw(pid)
        assert (await client.complete(WORDS).completed()).text == WORDS
        assert (await client.stats()).broker.engine_restarts == 0


@in_trio
async def test_a_stopped_broker_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with launch() as client:
        stats = await client.stats()
        monkeypatch.setattr(connection, "STOPPED_BEATS", 6)
        freeze(stats.broker.pid)
        await until_lost(client)
        thaw(stats.broker.pid)


async def bad_frames(peer: RawPeer) -> None:
    """Sends every kind of wrong frame in the protocol document. Each gets an answer."""
    epoch = peer.epoch
    for frame in [
        b"",
        b"\xc1",
        b"\x81",
        b"\x82\xa1t\xa4ping\xa1t\xa4ping",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        codec.encode({}),
        codec.encode({"t": "fly"}),
        codec.encode({"t": 5}),
        codec.encode({"t": "stats"}),
        codec.encode({"t": "stats", "id": 0, "epoch": epoch}),
        codec.encode({"t": "stats", "id": True, "epoch": epoch}),
        codec.encode({"t": "stats", "id": "1", "epoch": epoch}),
        codec.encode({"t": "stats", "id": 1, "epoch": epoch, "more": 1}),
        codec.encode({"t": "stats", "id": 1, "epoch": 1.5}),
        codec.encode({"t": "submit", "id": 1, "epoch": epoch, "job": 1, "kind": "song"}),
        codec.encode({"t": "submit", "id": 1, "epoch": epoch, "job": 1, "kind": "chat"}),
        codec.encode({"t": "submit", "id": 1, "epoch": epoch, "job": 1, "kind": "chat", "messages": [1]}),
        codec.encode({"t": "submit", "id": 1, "epoch": epoch, "job": 1, "kind": "chat", "messages": {}}),
        codec.encode({"t": "budget_set", "id": 1, "epoch": epoch, "vram_budget_bytes": -1}),
        codec.encode({"t": "budget_set", "id": 1, "epoch": epoch, "vram_budget_bytes": 1e9}),
        codec.encode({"t": "credit", "epoch": epoch, "job": 1, "next": -1}),
    ]:
        await peer.send(frame)
        answer = await peer.hear()
        assert isinstance(answer, m.Error)
        assert answer.error.name == "bad_message", frame


@in_trio
async def test_malformed_messages_are_answered_and_harm_nobody(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with client.complete(WORDS) as stream:
            async with raw_peer(client.info) as stranger:
                await bad_frames(stranger)
            async with raw_peer(client.info) as peer:
                await peer.greet()
                await bad_frames(peer)
                assert isinstance(await peer.tell({"t": "ping", "id": 3, "epoch": peer.epoch}), m.Pong)
            assert (await stream.completed()).text == WORDS


@in_trio
async def test_multipart_messages_are_refused(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with raw_peer(client.info) as peer:
            await peer.greet()
            ping = m.encode(m.Ping(2, peer.epoch))
            for parts in ([ping, ping], [b"", ping], [ping] * 5, [b"x"] * 5000):
                await peer.send(*parts)
                answer = await peer.hear()
                assert isinstance(answer, m.Error)
                assert answer.error.name == "bad_message"
            assert isinstance(await peer.tell({"t": "ping", "id": 3, "epoch": peer.epoch}), m.Pong)


@in_trio
async def test_a_message_of_very_many_parts_ends_its_sender_only() -> None:
    """All connections are closed and made again. The other client misses nothing."""
    async with launch(engine=fake_engine(delay_s=0.01)) as client:
        async with client.complete(WORDS) as stream, raw_peer(client.info) as peer:
            welcome = await peer.greet()
            await stream.__anext__()
            await trio.to_thread.run_sync(peer.socket._socket.send_multipart, [b""] * 100_000)
            while (await client.stats()).broker.sessions > 1:  # the message takes its time
                await trio.sleep(0.01)
            assert (await stream.completed()).text == WORDS
            assert (await client.stats()).broker.jobs_running == 0
            with trio.fail_after(30):
                assert not (await peer.greet(session=welcome.session)).resumed


@in_trio
async def test_idle_connections_do_not_use_up_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected clients continue. New ones can connect when the idle connections are gone."""
    import resource

    monkeypatch.setattr(connection, "GREETING_BEATS", 360)  # for a while no connection is accepted
    async with launch(engine=fake_engine(delay_s=0.01)) as client:
        path = client.info.endpoint.removeprefix("ipc://")
        resource.prlimit((await client.stats()).broker.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        with ExitStack() as crowd:
            refused = 0
            async with client.complete(WORDS) as stream:
                for number in itertools.count():
                    if refused == 100:
                        break
                    if number % 10 == 0:
                        await trio.sleep(0.001)
                    caller = crowd.enter_context(socket.socket(socket.AF_UNIX))
                    caller.setblocking(False)
                    try:
                        caller.connect(path)
                    except OSError:  # no connections are accepted now
                        refused += 1
                        caller.close()
                assert (await stream.completed()).text == WORDS
        async with frameshard.connect(client.info) as other:
            assert (await other.complete("a b").completed()).text == "a b"
        directory = directory_of(client.info)
    assert not directory.exists()


@in_trio
async def test_an_oversized_message_ends_its_connection_only() -> None:
    async with launch(engine=fake_engine(delay_s=0.002)) as client:
        async with client.complete(WORDS) as stream:
            async with raw_peer(client.info) as peer:
                welcome = await peer.greet()
                await peer.send(bytes((1 << 20) + 1))
                # ZeroMQ drops the connection and makes another one, on which the session must be resumed.
                with trio.fail_after(60):
                    while True:
                        with trio.move_on_after(0.2):
                            await peer.say(m.Ping(2, peer.epoch))
                            answer = await peer.hear_of(2)
                            if isinstance(answer, m.Error):
                                break
                assert answer.error.name == "connection_lost"
                await peer.say(m.Hello(7, m.VERSION, "raw", session=welcome.session))
                assert (await peer.hear_of(7)).resumed
            assert (await stream.completed()).text == WORDS


@in_trio
async def test_greeting(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with raw_peer(client.info) as peer:
            lost = await peer.tell({"t": "stats", "id": 5, "epoch": peer.epoch})
            assert (lost.id, lost.error.name) == (5, "connection_lost")
            other_version = {"t": "hello", "id": 6, "protocol": 2, "client": "x", "colour": "red"}
            refused = await peer.tell(other_version)
            assert (refused.id, refused.error.name, refused.error.detail) == (6, "version_mismatch", {"protocol": 1})
            assert (await peer.greet(epoch=peer.epoch % codec.MAX_ID + 1)).error.name == "connection_lost"
            unknown = await peer.greet(session=12345)
            assert (unknown.resumed, unknown.epoch, unknown.limits.message_bytes) == (False, peer.epoch, 1 << 20)
            assert unknown.model is not None
            again = await peer.greet()
            assert (again.session, again.resumed) == (unknown.session, False)
            stale = await peer.tell({"t": "stats", "id": 8, "epoch": peer.epoch % codec.MAX_ID + 1})
            assert (stale.id, stale.error.name) == (8, "connection_lost")


@in_trio
async def test_only_the_launch_key_comes_in(shared_sidecar: Path) -> None:
    """The stranger says hello before a peer with the right key does, whose answer comes."""
    async with frameshard.connect(shared_sidecar) as client:
        sessions = (await client.stats()).broker.sessions
        async with raw_peer(client.info, keys=zmq.curve_keypair()) as stranger, raw_peer(client.info) as peer:
            with trio.move_on_after(1) as scope:
                await stranger.greet()
            assert scope.cancelled_caught
            await peer.greet()
            await peer.say(m.Ping(2, peer.epoch))
            await peer.hear_of(2)
            assert (await client.stats()).broker.sessions <= sessions + 1  # those of dead peers end
        assert (await client.complete("still here").completed()).text == "still here"


@in_trio
async def test_unknown_jobs(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with raw_peer(client.info) as peer:
            await peer.greet()
            answer = await peer.tell({"t": "cancel", "id": 2, "epoch": peer.epoch, "job": 9})
            assert (answer.id, answer.error.name, answer.error.detail) == (2, "unknown_job", {"job": 9})


@in_trio
async def test_a_repeated_request_is_carried_out_once(shared_sidecar: Path) -> None:
    async with frameshard.connect(shared_sidecar) as client:
        async with raw_peer(client.info) as peer:
            await peer.greet()
            submit = m.Submit(2, peer.epoch, 1, "completion", prompt="a b")
            await peer.say(submit)
            await peer.say(submit)
            heard: list[object] = []
            with trio.fail_after(60):
                while not (heard and isinstance(heard[-1], m.Pong)):
                    heard.append(await peer.hear())
                    if isinstance(heard[-1], m.Done):
                        await peer.say(m.Ping(3, peer.epoch))
            kinds = sorted(type(each).__name__ for each in heard)
            assert kinds == ["Delta", "Delta", "Done", "Ok", "Ok", "Pong", "Started"]


@in_trio
async def test_a_reader_that_stands_still_gets_overloaded() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.0005), held_bytes=500) as client:
        async with raw_peer(client.info) as peer:
            await peer.greet()
            sampling = m.Sampling(max_tokens=100_000)
            await peer.say(m.Submit(2, peer.epoch, 1, "completion", prompt="slow", window=4, sampling=sampling))
            # The window is so large that nothing is held for this reader, whom the machine may pause.
            quick = client.complete(WORDS, sampling=m.Sampling(max_tokens=200), window=256)
            assert (await quick.completed()).text == WORDS
            with trio.fail_after(60):
                while (await client.stats()).broker.jobs_running:
                    await trio.sleep(0.01)
            events = []
            for seq in range(100):
                event = await peer.hear()
                while not isinstance(event, m.JobEvent):
                    event = await peer.hear()
                assert event.seq == seq
                await peer.say(m.Credit(peer.epoch, 1, seq + 1))
                events.append(event)
                if isinstance(event, m.TERMINAL):
                    break
            assert isinstance(events[-1], m.Failed)
            assert events[-1].error.name == "overloaded"
            text = "".join(event.text for event in events if isinstance(event, m.Delta))
            assert len(text) > 500
            assert set(text.split()) == {"slow"}


@in_trio
async def test_slots_go_round_by_client() -> None:
    """A short job waits only for the running job, not for the queue of another client."""
    async with launch(engine=fake_engine(endless=True, delay_s=0.002), n_parallel=1) as greedy:
        async with frameshard.connect(greedy.info) as modest, AsyncExitStack() as streams:
            talk = [await streams.enter_async_context(greedy.complete("la", sampling=GREEDY)) for _ in range(4)]
            for stream in talk[:3]:
                await stream.__anext__()  # one after another
                async with modest.complete("li", sampling=frameshard.Sampling(max_tokens=5)) as short:
                    await stream.aclose()
                    await short.completed()  # it would never come if a job of the other client were next
            await talk[3].__anext__()


@in_trio
async def test_a_conversation_holds_one_slot() -> None:
    """The next jobs of a conversation wait for it, and take no slots from other clients."""
    message = (frameshard.ChatMessage("user", "la"),)
    async with launch(engine=fake_engine(endless=True, delay_s=0.002), n_parallel=2) as client:
        async with frameshard.connect(client.info) as other, AsyncExitStack() as streams:
            talk = [
                await streams.enter_async_context(client.chat(message, conversation="innkeeper", sampling=GREEDY))
                for _ in range(3)
            ]
            assert (await other.complete("li", sampling=frameshard.Sampling(max_tokens=5)).completed()).n_generated == 5
            assert [(await client.stats()).broker.jobs_running, (await client.stats()).broker.jobs_queued] == [1, 2]
            for stream in talk:
                await stream.__anext__()  # one after another
                await stream.aclose()


@in_trio
async def test_too_many_jobs() -> None:
    engine = fake_engine(endless=True, delay_s=0.001)
    async with launch(engine=engine, max_jobs=6, max_client_jobs=4) as client:
        async with frameshard.connect(client.info) as other:
            async with AsyncExitStack() as streams:
                for each in (client, client, client, client, other, other):
                    await streams.enter_async_context(each.complete("la", sampling=GREEDY))
                for each in (client, other):
                    with pytest.raises(errors.Overloaded):
                        await each.complete("la").completed()
            with trio.fail_after(60):
                while True:
                    with suppress(errors.Overloaded):
                        sampling = m.Sampling(max_tokens=1, temperature=0)
                        assert (await client.complete("free", sampling=sampling).completed()).text
                        break


CROWD = """
import sys, trio, frameshard
from contextlib import AsyncExitStack

async def main():
    async with AsyncExitStack() as stack:
        for _ in range(31):
            client = await stack.enter_async_context(frameshard.connect(sys.argv[1]))
            await stack.enter_async_context(client.complete("la", sampling=frameshard.Sampling(max_tokens=100000)))
        print("all in", flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@in_trio
async def test_the_requests_of_one_client_keep_no_other_out() -> None:
    """The engine is stopped, so that requests wait for it. Who asks for too much gets the figures of the broker all the
    same."""
    async with launch() as client, frameshard.connect(client.info) as other:
        engine_pid = (await client.stats()).broker.engine_pid
        assert engine_pid is not None
        freeze(engine_pid)
        waiting = [client.count_tokens("a b c") for _ in range(MAX_ASKED_BY_ONE)]
        with pytest.raises(errors.Overloaded, match=f"{MAX_ASKED_BY_ONE} requests of this client wait"):
            await client.count_tokens("a b c")
        with pytest.raises(errors.Overloaded):
            await client.plan([64])
        stats = await client.stats()
        assert (stats.broker.engine, stats.engine) == ("ready", None)
        others = [other.count_tokens("a b"), other.stats()]
        await other.budget()  # those are on their way
        thaw(engine_pid)
        assert {(await answer).n_tokens for answer in waiting} == {3}
        assert (await others[0]).n_tokens == 2
        assert (await others[1]).engine is not None
        assert (await client.stats()).engine is not None


@in_trio
async def test_clients_that_vanished_make_room_at_once() -> None:
    """Connected clients keep their sessions, even if they are silent."""
    engine = fake_engine(delay_s=0.01, endless=True)
    async with launch(engine=engine, silent_s=60) as client, client.complete("li", sampling=GREEDY) as stream:
        await stream.__anext__()
        crowd = host(CROWD, connect_file(client))
        assert crowd.stdout is not None
        assert await trio.to_thread.run_sync(crowd.stdout.readline)
        freeze(crowd.pid)
        with pytest.raises(errors.Overloaded):
            async with frameshard.connect(client.info):
                pass
        stats = (await client.stats()).broker
        assert (stats.sessions, stats.jobs_queued + stats.jobs_running) == (32, 32)
        crowd.kill()
        crowd.wait()
        crowd.stdout.close()
        async with frameshard.connect(client.info) as other:
            assert (await other.stats()).broker.sessions == 32
        assert (await stream.__anext__()).text  # the first client has kept its session


@in_trio
async def test_who_has_made_room_cannot_resume() -> None:
    async with launch() as client:
        async with raw_peer(client.info) as peer:
            first = await peer.greet()
        async with AsyncExitStack() as peers:
            for _ in range(30):
                peer = await peers.enter_async_context(raw_peer(client.info))
                assert isinstance(await peer.greet(), m.Welcome)
            async with raw_peer(client.info) as peer:  # it takes the place of the first, which could have resumed
                assert isinstance(await peer.greet(), m.Welcome)
                assert (await client.stats()).broker.sessions == 32
            async with raw_peer(client.info) as peer:
                assert not (await peer.greet(session=first.session)).resumed


@in_trio
async def test_random_frames_harm_nobody() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    models = [
        {"t": "submit", "id": 1, "epoch": 1, "job": 1, "kind": "completion", "prompt": "x", "window": 2},
        {"t": "credit", "epoch": 1, "job": 1, "next": 1, "resend": True},
        {"t": "cancel", "id": 1, "epoch": 1, "job": 1},
        {"t": "budget_set", "id": 1, "epoch": 1, "vram_budget_bytes": 1 << 26},
        {"t": "stats", "id": 1, "epoch": 1},
        {"t": "hello", "id": 1, "protocol": 1, "client": "x", "session": 4},
    ]
    junk = [0, -1, 2**53 - 1, 1.5, True, None, "", "x" * 1000, [], [[]], {}, {"a": 1}, b"x", "chat", 2]
    async with launch(engine=fake_engine(delay_s=0.001)) as client:
        async with raw_peer(client.info) as peer, trio.open_nursery() as nursery:
            await peer.greet()

            async def drain() -> None:
                while True:
                    await peer.socket.receive()

            async def flood() -> None:
                for _ in range(3000):
                    fields = dict(rng.choice(models))
                    if "epoch" in fields:
                        fields["epoch"] = peer.epoch
                    for _ in range(rng.randint(0, 2)):
                        fields[rng.choice([*fields, "more"])] = rng.choice(junk)
                    frame = bytearray(codec.encode(fields))
                    if rng.random() < 0.3:
                        frame[rng.randrange(len(frame))] = rng.randrange(256)
                    await peer.send(*[bytes(frame)] * rng.choice([1] * 20 + [2, 4]))

            nursery.start_soon(drain)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(flood)
                    for _ in range(5):
                        assert (await client.complete(WORDS).completed()).text == WORDS
            assert not scope.cancelled_caught
            nursery.cancel_scope.cancel()
        stats = await client.stats()
        assert stats.broker.engine == "ready"
        assert stats.broker.engine_restarts == 0


@in_trio
async def test_a_peer_that_sends_requests_and_reads_nothing_is_dropped() -> None:
    async with launch() as client:
        before = memory(client_pid := (await client.stats()).broker.pid)
        async with raw_peer(client.info) as peer:
            await peer.greet()
            with trio.fail_after(60):
                while (await client.stats()).broker.sessions > 1:
                    for _ in range(1000):
                        if not peer.socket.try_send([m.encode(m.Ping(2, peer.epoch))]):
                            await trio.sleep(0.001)
        assert memory(client_pid) - before < 50 << 20


def memory(pid: int) -> int:
    """The resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@in_trio
async def test_when_memory_fills_up_all_connections_are_dropped_and_resumed(tmp_path: Path) -> None:
    """The broker runs in this process, so that the test can fill its memory. An endless message cannot be sent with an
    ordinary ZeroMQ."""
    public, secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    listener = Listener("tcp://127.0.0.1:*", secret, client_public)
    server = Server(frameshard.ServeConfig("none", engine=fake_engine(delay_s=0.01)), epoch=77, directory=tmp_path)
    info = frameshard.ConnectInfo(
        m.VERSION, listener.endpoint, 77, os.getpid(), public.decode(), client_public.decode(), client_secret.decode()
    )
    dropped = trio.Event()
    disconnected = server.disconnected

    def noted() -> None:
        disconnected()
        dropped.set()

    server.disconnected = noted  # type: ignore[method-assign]
    try:
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            nursery.start_soon(listener.run, server)
            nursery.start_soon(server.run, ready.set)
            await ready.wait()
            async with frameshard.connect(info) as client, client.complete(WORDS) as stream:
                await stream.__anext__()
                ballast = b"x" * (GROWTH_BYTES + (16 << 20))
                await dropped.wait()
                assert (await stream.completed()).text == WORDS
                assert (await client.stats()).broker.sessions == 1
            del ballast
            server.stop()
            nursery.cancel_scope.cancel()
    finally:
        listener.close()


@in_trio
async def test_what_jobs_hold_is_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory counts once more after they have ended, because the process may keep it."""
    memory, held, looks = 50 << 20, 0, 0

    def held_bytes() -> int:
        nonlocal looks
        looks += 1
        return held

    async def look() -> None:
        before = looks
        while looks < before + 3:
            await trio.sleep(0.01)

    monkeypatch.setattr(listener_module.system, "memory", lambda: nullcontext(lambda: memory))
    ended = trio.Event()

    async def watch() -> None:
        await listener_module._memory_has_grown(held_bytes)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await look()
        held = 400 << 20
        await look()
        memory += held + GROWTH_BYTES - 1
        await look()
        held = 0
        await look()
        assert not ended.is_set()
        memory += 1
        await ended.wait()


@in_trio
async def test_budget() -> None:
    async with launch(vram_budget_mb=64) as client:
        budget = await client.budget()
        assert (budget.vram_budget_bytes, budget.floor_bytes, budget.full_bytes) == (64 << 20, 16 << 20, 256 << 20)
        result = await client.set_budget(32)
        assert (result.vram_budget_bytes, result.used_bytes) == (32 << 20, 32 << 20)
        assert result.observed is not None
        assert result.observed.observed_bytes is None
        with pytest.raises(errors.BudgetBelowFloor) as refused:
            await client.set_budget(8)
        assert refused.value.detail == {"budget_bytes": 8 << 20, "floor_bytes": 16 << 20}
        assert (await client.budget()).vram_budget_bytes == 32 << 20
        assert (await client.set_budget(0, observe=False)).used_bytes == 256 << 20


@in_trio
async def test_tcp_with_curve() -> None:
    async with launch(transport="tcp") as client:
        assert client.info.endpoint.startswith("tcp://127.0.0.1:")
        assert (await client.complete(WORDS).completed()).text == WORDS
        async with frameshard.connect(client.info) as other:
            assert (await other.complete("a b").completed()).text == "a b"


@in_trio
async def test_secrets_stay_private() -> None:
    async with launch() as client:
        directory = directory_of(client.info)
        assert directory.stat().st_mode & 0o777 == 0o700
        for name in ("connect.json", "socket"):
            assert (directory / name).stat().st_mode & 0o077 == 0
        stats = await client.stats()
        assert stats.broker.engine_pid is not None
        for pid in (stats.broker.pid, stats.broker.engine_pid):
            said = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert client.info.client_secret.encode() not in said
        assert client.info.client_secret not in repr(client.info) + repr(client)


@in_trio
async def test_the_sidecar_is_the_first_to_go_when_memory_runs_out() -> None:
    async with launch() as client:
        stats = await client.stats()
        assert stats.broker.engine_pid is not None
        for pid in (stats.broker.pid, stats.broker.engine_pid):
            assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == 500


@in_trio
async def test_one_server_at_an_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/npc"
    async with launch(endpoint=endpoint) as client:
        assert client.info.endpoint == endpoint
        with pytest.raises(errors.EndpointInUse):
            async with launch(endpoint=endpoint):
                pass
        assert (await client.complete("mine").completed()).text == "mine"
    assert list(tmp_path.iterdir()) == []
    async with launch(transport="tcp") as client:
        with pytest.raises(errors.EndpointInUse):
            async with launch(endpoint=client.info.endpoint):
                pass


@in_trio
async def test_what_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/npc"
    async with launch(endpoint=endpoint) as client:
        left = directory_of(client.info) / "npc"
        os.kill((await client.stats()).broker.pid, signal.SIGKILL)
        await until_lost(client)
        assert left.is_socket()
        async with launch(endpoint=endpoint) as successor:
            assert (await successor.complete("mine").completed()).text == "mine"
    assert list(tmp_path.iterdir()) == []


@in_trio
async def test_the_files_of_other_programs_stay(tmp_path: Path) -> None:
    for name in ("npc.lock", "npc.closed"):
        (tmp_path / name).write_text("precious")
    async with launch(endpoint=f"ipc://{tmp_path}/npc") as client:
        assert (await client.complete("mine").completed()).text == "mine"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "npc.lock": "precious",
        "npc.closed": "precious",
    }


@in_trio
async def test_the_socket_of_another_program_stays(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as caller:
        other.bind(f"{tmp_path}/npc")
        other.listen()
        with pytest.raises(errors.EndpointInUse):
            async with launch(endpoint=f"ipc://{tmp_path}/npc"):
                pass
        caller.connect(f"{tmp_path}/npc")
    assert [path.name for path in tmp_path.iterdir()] == ["npc"]


@in_trio
async def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for endpoint, error in [
        (f"ipc://{tmp_path}/file", errors.EndpointInUse),
        ("tcp://0.0.0.0:5000", errors.BadArgument),
        ("udp://somewhere", errors.BadArgument),
    ]:
        with pytest.raises(error):
            async with launch(endpoint=endpoint):
                pass
    for path in ("x" * 120, "no/such/directory"):
        with pytest.raises(errors.BadArgument), places.claim("ipc", f"ipc://{tmp_path}/{path}"):
            pass
    assert (tmp_path / "file").read_text() == "precious"


@in_trio
async def test_shutdown_by_a_client_tells_the_others() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.01)) as client:
        async with client.complete("la", sampling=GREEDY) as stream, frameshard.connect(client.info) as other:
            await other.shutdown()
            with pytest.raises(errors.ConnectionLost):
                await stream.completed()


def test_a_defect_over_a_request_is_that_requests_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sitecustomize module makes one request raise an exception in each new process."""
    patch = """
from frameshard.broker.requests import Requests
whole = Requests.carry_out
def broken(self, connection, request):
    return 1 / 0 if getattr(request, "prompt", "") == "poison" else whole(self, connection, request)
Requests.carry_out = broken
"""
    (tmp_path / "sitecustomize.py").write_text(patch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    @in_trio
    async def run() -> None:
        async with launch() as client:
            with pytest.raises(errors.FrameshardError, match="ZeroDivisionError"):
                await client.complete("poison").completed()
            assert (await client.complete("once", sampling=GREEDY).completed()).text

    run()
