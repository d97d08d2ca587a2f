"""Jobs of higher priority run first. They pause running jobs of lower priority, whose text does not change."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.testing import fake_engine
from frameshard.wire import messages as m
from sidecars import in_trio, launch, raw_peer, until


def complete(client: frameshard.Client, prompt: str, n: int, priority: int) -> frameshard.Stream:
    return client.complete(prompt, sampling=frameshard.Sampling(max_tokens=n, temperature=0.0), priority=priority)


async def read(stream: frameshard.Stream) -> None:
    with suppress(errors.JobCancelled):
        await stream.completed()


@in_trio
async def test_urgent_jobs_pause_the_one_of_the_lowest_priority() -> None:
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=2) as client:
        told: list[bool] = []
        async with (
            complete(client, "hum", 100_000, 0) as background,
            complete(client, "hm", 100_000, 1) as normal,
            trio.open_nursery() as nursery,
        ):
            normal.on_paused = told.append
            for stream in (background, normal):
                nursery.start_soon(read, stream)
            for _ in range(5):  # more of them would raise the background job
                async with complete(client, "now", 100_000, 2) as urgent:
                    await until(lambda: background.paused)
                    await urgent.__anext__()
                await until(lambda: not background.paused)
            assert not told
            for stream in (background, normal):
                await stream.cancel()


@in_trio
async def test_jobs_of_one_priority_do_not_pause_each_other() -> None:
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:
        for priority in range(3):
            told: list[bool] = []
            async with complete(client, "first", 100_000, priority) as first:
                first.on_paused = told.append
                second = complete(client, "second", 1, priority)
                async with second:
                    for _ in range(50):
                        await first.__anext__()
                    broker = (await client.stats()).broker
                    assert (broker.jobs_running, broker.jobs_queued, told) == (1, 1, [])
                    await first.cancel()
                    assert (await second.completed()).text == "second"


@in_trio
async def test_no_job_waits_for_ever() -> None:
    """There are always urgent jobs for the one slot. The background job still gets it after a while, and keeps it."""
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:
        async with raw_peer(client.info) as peer:  # its messages show in which order the jobs ended
            await peer.greet()
            for job in range(1, 50):
                priority, n = (0, 50) if job == 2 else (2, 100_000 if job == 1 else 3)
                sampling = m.Sampling(max_tokens=n)
                submit = m.Submit(job, peer.epoch, job, "completion", prompt="x", sampling=sampling, priority=priority)
                await peer.say(submit)
                assert isinstance(await peer.hear_of(job), m.Ok)
            await peer.say(m.Cancel(50, peer.epoch, 1))
            ended: list[int] = []
            while 2 not in ended:
                event = await peer.hear()
                if isinstance(event, m.Delta):
                    await peer.say(m.Credit(peer.epoch, event.job, event.seq + 1))
                elif isinstance(event, m.Done):
                    ended.append(event.job)
            assert ended[:-1] == list(range(3, ended[-2] + 1))
            assert 2 < len(ended) < 40


@in_trio
async def test_a_job_is_told_that_it_is_paused_and_that_it_continues() -> None:
    """A client that does not read gets no pile of these events."""
    sampling = frameshard.Sampling(max_tokens=100_000, temperature=0.0)
    async with launch(engine=fake_engine(delay_s=0.002, endless=True), n_parallel=1) as client:

        async def urgent() -> None:
            brief = frameshard.Sampling(max_tokens=2)
            await client.complete("li", sampling=brief, priority=2).completed()

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
