"""Jobs of higher priority run first. They pause running jobs of lower priority, whose text does not change."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.testing import fake_engine
from sidecars import in_trio, launch


class Talk:
    """Runs jobs whose answer is their prompt, and records the order in which they end."""

    def __init__(self, client: frameshard.Client, nursery: trio.Nursery) -> None:
        self.ended: list[str] = []
        self._client = client
        self.nursery = nursery

    async def say(self, name: str, n: int, priority: int) -> None:
        text = " ".join(f"{name}{i}" for i in range(n))
        sampling = frameshard.Sampling(max_tokens=n, temperature=0.0)
        result = await self._client.complete(text, sampling=sampling, priority=priority).completed()
        assert (result.text, result.n_generated) == (text, n)
        self.ended.append(name)

    async def begin(self, name: str, n: int, priority: int) -> None:
        """Starts a job, and returns when the engine has it."""
        running = await self.running()
        self.nursery.start_soon(self.say, name, n, priority)
        while await self.running() == running:
            await trio.sleep(0.005)

    async def running(self) -> int:
        return (await self._client.stats()).broker.jobs_running


@asynccontextmanager
async def talk(n_parallel: int) -> AsyncIterator[Talk]:
    async with launch(engine=fake_engine(delay_s=0.002), n_parallel=n_parallel) as client:
        async with trio.open_nursery() as nursery:
            yield Talk(client, nursery)


@in_trio
async def test_urgent_jobs_pause_the_one_of_the_lowest_priority() -> None:
    async with talk(2) as jobs:
        await jobs.begin("background", 400, 0)
        await jobs.begin("normal", 400, 1)
        for number in range(5):
            await jobs.say(f"urgent{number}-", 20, 2)
        assert len(jobs.ended) == 5
    assert jobs.ended[5:] == ["normal", "background"]


@pytest.mark.parametrize("priority", [0, 1, 2])
@in_trio
async def test_jobs_of_one_priority_do_not_pause_each_other(priority: int) -> None:
    async with talk(1) as jobs:
        await jobs.begin("first", 200, priority)
        await jobs.say("second", 1, priority)
    assert jobs.ended == ["first", "second"]


@in_trio
async def test_no_job_waits_for_ever() -> None:
    """There are always two urgent jobs for one slot. The background job still gets the slot after a while."""
    async with talk(1) as jobs:
        await jobs.begin("urgent", 50, 2)
        jobs.nursery.start_soon(jobs.say, "background", 50, 0)

        async def urgent_ones() -> None:
            while "background" not in jobs.ended:
                await jobs.say("urgent", 3, 2)

        jobs.nursery.start_soon(urgent_ones)
        jobs.nursery.start_soon(urgent_ones)
    assert 2 < jobs.ended.index("background") < 40


@in_trio
async def test_a_job_is_told_that_it_is_paused_and_that_it_continues() -> None:
    """A client that does not read gets no pile of these events."""
    sampling = frameshard.Sampling(max_tokens=100_000, temperature=0.0)
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:

        async def urgent() -> None:
            brief = frameshard.Sampling(max_tokens=2)
            await client.complete("li", sampling=brief, priority=2).completed()

        async def read(stream: frameshard.Stream) -> None:
            with suppress(errors.JobCancelled):
                await stream.completed()

        for window, least, most in ((2, 0, 6), (256, 2, 12)):
            told: list[bool] = []
            async with client.complete("la", sampling=sampling, priority=0, window=window) as background:
                background.on_paused = told.append
                await background.__anext__()
                async with trio.open_nursery() as nursery:
                    if least:
                        nursery.start_soon(read, background)
                    for _ in range(6):  # more of them would raise the background job
                        await urgent()
                    await background.cancel()
                await read(background)
            assert told == [number % 2 == 0 for number in range(len(told))]
            assert least <= len(told) <= most


@in_trio
async def test_an_urgent_question_raises_the_answer_that_it_waits_for() -> None:
    """The innkeeper's background answer has a lower priority than another job, which never ends, but the player's next
    question to the innkeeper waits for it."""
    endless = frameshard.Sampling(max_tokens=100_000)
    brief = frameshard.Sampling(max_tokens=3)
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:
        async with client.complete("other", sampling=endless) as other:
            await other.__anext__()
            background = client.complete("hum", sampling=brief, conversation="inn", priority=0)
            background.begin()
            await client.complete("rooms?", sampling=brief, conversation="inn", priority=2).completed()
            assert (await background.completed()).text == "hum hum hum"
            await other.__anext__()


@in_trio
async def test_a_job_can_be_cancelled_while_it_is_paused() -> None:
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:
        endless = frameshard.Sampling(max_tokens=100_000)
        async with client.complete("la", sampling=endless, priority=0) as paused:
            await paused.__anext__()
            async with client.complete("li", sampling=endless, priority=2) as urgent:
                await urgent.__anext__()
                broker = (await client.stats()).broker
                assert (broker.jobs_running, broker.jobs_queued) == (1, 1)
                await paused.cancel()
                with pytest.raises(errors.JobCancelled):
                    await paused.completed()
                await urgent.__anext__()
                assert (await client.stats()).broker.jobs_queued == 0


@in_trio
async def test_priorities_and_deadlines_amid_changes_cancels_and_kills() -> None:
    draw = random.Random(1)
    n_jobs = 1000
    async with launch(engine=fake_engine(delay_s=0.0005), n_parallel=3, max_client_jobs=256) as client:
        ended = blamed = 0
        room = trio.CapacityLimiter(200)

        async def one(number: int) -> None:
            nonlocal ended, blamed
            n = draw.randint(1, 60 if number < 100 else 8)
            text = " ".join(f"{number}-{i}" for i in range(n))
            sampling = frameshard.Sampling(max_tokens=n, temperature=0.0)
            deadline_ms = draw.choice([0, 0, 1, 100, 3_600_000])
            options = {"sampling": sampling, "priority": draw.randint(0, 2), "deadline_ms": deadline_ms}
            async with room, client.complete(text, **options) as stream:
                if draw.random() < 0.3:
                    stream.set_priority(draw.randint(0, 2))
                if draw.random() < 0.2:
                    with suppress(StopAsyncIteration, errors.DeadlineMissed, errors.EngineDied):
                        await stream.__anext__()
                    await stream.cancel()
                try:
                    await stream.completed()
                except (errors.JobCancelled, errors.DeadlineMissed):
                    pass
                except errors.EngineDied:  # twice over this job, without a token between
                    blamed += 1
                assert text.startswith(stream.text)
                assert stream.result is None or stream.text == text
            ended += 1

        async with trio.open_nursery() as nursery:
            for number in range(n_jobs):
                nursery.start_soon(one, number)
            for _ in range(3):
                await trio.sleep(0.3)
                if engine := (await client.stats()).broker.engine_pid:
                    with suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(engine, signal.SIGKILL)
        assert ended == n_jobs
        assert blamed <= 2  # the second and the third death find one job each that is on trial
        broker = (await client.stats()).broker
        assert (broker.jobs_running, broker.jobs_queued) == (0, 0)


def test_a_paused_answer_of_a_real_model_is_unchanged(model_path: Path) -> None:
    """In mode stream_only, a paused job has the same tokens as an undisturbed one."""

    async def main() -> None:
        options = {"n_ctx": 512, "n_parallel": 1, "n_threads": 1, "mode": "stream_only", "vram_budget_mb": 100}
        sampling = frameshard.Sampling(max_tokens=40, temperature=0.7, seed=5)
        async with frameshard.launch(model_path, device="emulated", **options) as client:
            alone = await client.complete("The old lighthouse", sampling=sampling).completed()
            async with client.complete("The old lighthouse", sampling=sampling, priority=0) as paused:
                for _ in range(2):
                    await paused.__anext__()
                    urgent = client.complete("Who goes there?", sampling=frameshard.Sampling(max_tokens=3), priority=2)
                    await urgent.completed()
                    assert paused.result is None
                assert (await paused.completed()).text == alone.text

    trio.run(main)
