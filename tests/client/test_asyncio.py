"""The asynchronous client in asyncio: its own ways to cancel and to end. Warnings are errors here."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import frameshard
from frameshard import errors
from frameshard.testing import fake_engine
from sidecars import DEADLINE_S, GREEDY, WORDS, alive, children, freeze, gone_after, launch, thaw

pytestmark = pytest.mark.filterwarnings("error")
LONG = " ".join(f"word{index}" for index in range(2000))

SCRIPT = """
import asyncio, json, sys
import frameshard
from frameshard.testing import fake_engine

async def main(say):
    async with frameshard.launch("no model", engine=fake_engine(endless=True, delay_s=0.001), log=-3) as client:
        async with client.complete("la", sampling=frameshard.Sampling(max_tokens=100_000)) as stream:
            await stream.__anext__()
            stats = (await client.stats()).broker
            say(json.dumps([stats.pid, stats.engine_pid]))
            async for event in stream:
                pass

say = lambda text: print(text, flush=True)
"""
"""Its first line of output has the processes of its sidecar. Then it reads an answer without an end."""

BESIDE = """
async def beside():
    ready = asyncio.Event()
    task = asyncio.create_task(main(lambda text: (say(text), ready.set())))
    await ready.wait()
    {}
asyncio.run(beside())
"""


def in_asyncio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), DEADLINE_S))

    return run


async def idle(client: frameshard.Client) -> None:
    while (stats := (await client.stats()).broker).jobs_running or stats.jobs_queued:
        await asyncio.sleep(0.01)


async def read(client: frameshard.Client, text: str = "la") -> str:
    async with client.complete(text, sampling=GREEDY) as stream:
        async for _ in stream:
            pass
    return stream.text


async def until_timeout(stream: frameshard.Stream) -> None:
    async with asyncio.timeout(0.2), stream:
        async for _ in stream:
            pass


@in_asyncio
async def test_a_stream_is_cancelled_in_each_way_of_asyncio() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.0005)) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(client), 0.2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.complete("la", sampling=GREEDY).completed(), 0.2)
        stream = client.complete("la", sampling=GREEDY)
        if sys.version_info >= (3, 11):
            with pytest.raises(TimeoutError):
                await until_timeout(stream)
        await stream.aclose()
        await idle(client)


@in_asyncio
async def test_a_task_is_cancelled_at_any_step() -> None:
    """Each task gets one step of the event loop more than the one before."""
    async with launch(engine=fake_engine(endless=True)) as client:
        answers_awaited = len(client._answers)
        for work in (read, frameshard.Client.stats, frameshard.Client.model_info):
            for steps in range(40):
                task = asyncio.ensure_future(work(client))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                outcome = (await asyncio.gather(task, return_exceptions=True))[0]
                # An answer may come within one step, if another process had the CPU meanwhile. read() never ends.
                answered = work is not read and steps > 0 and not isinstance(outcome, BaseException)
                assert answered or isinstance(outcome, asyncio.CancelledError), outcome
        await idle(client)
        del task, outcome
        assert len(client._answers) == answers_awaited


async def read_all(client: frameshard.Client, texts: list[str]) -> list[asyncio.Task[str]]:
    async with asyncio.TaskGroup() as group:
        return [group.create_task(read(client, text)) for text in texts]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio has no TaskGroup")
@in_asyncio
async def test_a_task_group_of_many_streams() -> None:
    async with launch(engine=fake_engine()) as client:
        texts = [f"{index} {WORDS}" for index in range(60)]
        assert [task.result() for task in await read_all(client, texts)] == texts
        with pytest.raises(BaseException) as failed:  # noqa: PT011 - a group, which Python 3.10 does not have
            await read_all(client, [LONG] * 20 + [""])
        assert failed.group_contains(errors.BadArgument)
        await idle(client)


@in_asyncio
async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    """Also one that takes the place of a cancellation."""

    async def fail() -> None:
        async with launch():
            entered.set()
            try:
                await asyncio.sleep(DEADLINE_S)
            finally:
                raise KeyError("mine")

    entered = asyncio.Event()
    task = asyncio.ensure_future(fail())
    await entered.wait()
    task.cancel()
    with pytest.raises(KeyError):
        await task


@in_asyncio
async def test_a_launch_that_is_cancelled_leaves_nothing() -> None:
    async def enter() -> None:
        async with launch(engine=(sys.executable, "-c", "import signal; signal.pause()")):
            pass

    before = set(children(os.getpid()))
    for seconds in (0.0, 0.02, 0.5):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(enter(), seconds)
        gone_after(list(set(children(os.getpid())) - before))


@in_asyncio
async def test_a_frozen_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on when it is thawed. One that is still frozen at the end of the block is ended."""
    monkeypatch.setattr(frameshard.client, "EXIT_S", 3.0)
    async with launch(engine=fake_engine(delay_s=0.001)) as client:
        pid = (await client.stats()).broker.pid
        async with client.complete(WORDS) as stream:
            await stream.__anext__()
            freeze(pid)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.stats(), 0.3)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(stream.completed(), 0.3)
            thaw(pid)
            assert (await stream.completed()).text == WORDS
        freeze(pid)
    assert not alive(pid)


@in_asyncio
async def test_a_second_cancellation_during_the_end_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block waits for a frozen broker when it is cancelled again."""
    monkeypatch.setattr(frameshard.client, "EXIT_S", 3.0)
    entered = asyncio.Event()

    async def work() -> None:
        nonlocal pids
        async with launch() as client:
            stats = (await client.stats()).broker
            assert stats.engine_pid is not None
            pids = [stats.pid, stats.engine_pid]
            freeze(stats.pid)
            entered.set()
            await asyncio.sleep(DEADLINE_S)

    pids: list[int] = []
    task = asyncio.ensure_future(work())
    await entered.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.2)
    with pytest.raises(asyncio.CancelledError):
        await task
    gone_after(pids)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("asyncio.run(main(say))  # interrupted", -signal.SIGINT),
        (BESIDE.format("await asyncio.wait_for(task, 0.1)"), 1),
        (BESIDE.format("pass"), 0),
    ],
    ids=["interrupted", "timed out", "left open"],
)
def test_the_end_of_a_program(ending: str, status: int) -> None:
    """No warning, nothing unclosed, no process."""
    program = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT + ending],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert program.stdout is not None
    pids = json.loads(program.stdout.readline())
    if "interrupted" in ending:
        program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=DEADLINE_S)
    gone_after(pids)
    assert program.returncode == status, said
    for complaint in ("never awaited", "never retrieved", "unclosed", "Warning", "destroyed", "Exception ignored"):
        assert complaint not in said
    assert said.count("Traceback") <= 4, said


def test_a_loop_that_is_closed_around_an_open_stream() -> None:
    """The program goes on, uses another event loop, and its end is the end of both sidecars."""
    ending = """
loop, ready = asyncio.new_event_loop(), []
task = loop.create_task(main(lambda text: (say(text), ready.append(text), loop.stop())))
loop.run_forever()
loop.close()
async def again():
    async with frameshard.launch("no model", engine=fake_engine(), log=-3) as client:
        say((await client.complete("once more").completed()).text)
asyncio.run(again())
"""
    program = subprocess.Popen([sys.executable, "-c", SCRIPT + ending], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = json.loads(program.stdout.readline())
    said, _ = program.communicate(timeout=DEADLINE_S)
    gone_after(pids)
    assert (program.returncode, said) == (0, "once more\n")
