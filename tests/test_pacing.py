"""The frame block with a real sidecar: budgets that the host writes into it, and pacing by frames."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.frame import FrameBlock
from sidecars import in_trio, launch

MIB = 1 << 20
GREEDY = frameshard.Sampling(max_tokens=24, temperature=0.0)


async def applied(block: FrameBlock, generation: int) -> None:
    while block.answer.applied_generation < generation:
        await trio.sleep(0.002)


@in_trio
async def test_a_budget_in_the_page(shallow_model: Path) -> None:
    """It is applied during an answer and between answers. The broker learns of it. Below the floor it is refused."""
    async with frameshard.launch(
        shallow_model, device="emulated", vram_budget_mb=160, n_ctx=512, n_parallel=1, mode="stream_only"
    ) as client:
        undisturbed = (await client.complete("Once upon a time", sampling=GREEDY).completed()).text
        bounds = await client.budget()
        block = await client.frame_block()
        small = bounds.floor_bytes + 4 * MIB
        generation, text = 0, ""
        async with client.complete("Once upon a time", sampling=GREEDY) as stream:
            async for delta in stream:
                text += delta.text
                generation = block.set_budget(small if generation % 2 == 0 else bounds.full_bytes)
                await applied(block, generation)
                assert block.answer.used_bytes <= block.answer.budget_bytes
        assert text == undisturbed
        assert generation > 10
        await applied(block, block.set_budget(small))
        with trio.fail_after(60):
            while (await client.budget()).vram_budget_bytes != small:
                await trio.sleep(0.01)
        generation = block.set_budget(1)
        with trio.fail_after(60):
            while block.answer.refused_generation < generation:
                await trio.sleep(0.01)
        assert (await client.budget()).vram_budget_bytes == small
        # A budget by message replaces it. Opening the frame block again does not restore the old budget.
        await client.set_budget(bounds.full_bytes / MIB, observe=False)
        (await client.frame_block()).close()
        assert (await client.complete("Once upon a time", sampling=GREEDY).completed()).text == undisturbed
        assert (await client.budget()).vram_budget_bytes == bounds.full_bytes
        maps = Path(f"/proc/{(await client.stats()).broker.engine_pid}/maps")
        if maps.exists():
            assert maps.read_text().count("frameshard-frame-block") == 1


@in_trio
async def test_a_budget_in_the_page_replaces_the_sidecars_own_limit(shallow_model: Path) -> None:
    """Without jobs the sidecar has shrunk. A budget in the page stays in force when a job comes, also if it is as large
    as the sidecar's own limit, and if the job comes at once."""
    async with frameshard.launch(
        shallow_model, device="emulated", vram_budget_mb=160, n_ctx=512, n_parallel=1
    ) as client:
        notices = client.notices()
        keep_mb = ((await client.budget()).floor_bytes >> 20) + 8
        block = await client.frame_block()
        for more_mb, at_once in ((0, False), (16, True), (16, True)):
            await client.set_budget(160, floor_mb=keep_mb, observe=False)
            await client.complete("Once", sampling=GREEDY).completed()
            async for notice in notices:
                if notice.kind == "gives_back" and notice.vram_budget_bytes == keep_mb * MIB:
                    break
            with trio.fail_after(60):
                while (await client.budget()).used_bytes > keep_mb * MIB:
                    await trio.sleep(0.01)
            wanted = (keep_mb + more_mb) * MIB
            generation = block.set_budget(wanted)
            if not at_once:
                await applied(block, generation)
            await client.complete("Once", sampling=GREEDY).completed()
            await applied(block, generation)
            with trio.fail_after(60):
                while (await client.budget()).vram_budget_bytes != wanted:
                    await trio.sleep(0.01)
            await client.complete("Once", sampling=GREEDY).completed()
            assert block.answer.budget_bytes == wanted >= block.answer.used_bytes
            assert (await client.budget()).vram_budget_bytes == wanted


@in_trio
async def test_a_budget_in_the_page_is_granted_by_a_sidecar_without_vram(shallow_model: Path) -> None:
    async with frameshard.launch(shallow_model, device="cpu", n_ctx=512, n_parallel=1) as client:
        block = await client.frame_block()
        await applied(block, block.set_budget(64 * MIB))
        assert (block.answer.budget_bytes, block.answer.used_bytes) == (0, 0)


@in_trio
async def test_answers_go_on_beside_frames(shallow_model: Path) -> None:
    """Each mode is tested with frames that leave GPU time and frames that leave none. Idle frames are used fully."""
    options = {"device": "emulated", "mode": "stream_only", "n_ctx": 512, "n_parallel": 1}
    async with frameshard.launch(shallow_model, **options) as client:
        block = await client.frame_block(target_frame_ms=16.0)
        texts = set()

        async def draw(busy_ms: float) -> None:
            while True:
                block.begin()
                block.end(gpu_busy_ms=busy_ms)
                await trio.sleep(0.016)

        modes: tuple[frameshard.wire.messages.SchedulingMode, ...]
        modes = ("prioritize_graphics", "balance", "prioritize_compute")
        for mode in modes:
            for busy_ms in (0.0, 8.0, 20.0):
                await client.set_pacing(mode)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(draw, busy_ms)
                    short = frameshard.Sampling(max_tokens=4, temperature=0.0)
                    texts.add((await client.complete("The sky is", sampling=short).completed()).text)
                    nursery.cancel_scope.cancel()
        assert len(texts) == 1
        stats = (await client.stats()).engine
        assert stats is not None
        assert stats["pacing"]["frames"] > 10
        assert stats["pacing"]["waited_s"] > 0
        block.idle()
        await client.complete("The sky is", sampling=GREEDY).completed()
        after = (await client.stats()).engine
        assert after is not None
        assert after["pacing"]["waited_s"] == stats["pacing"]["waited_s"]
        assert after["pacing"]["pacing"] is False


@in_trio
async def test_tokens_come_no_faster_than_the_target(shallow_model: Path) -> None:
    async with frameshard.launch(shallow_model, device="cpu", n_ctx=512, n_parallel=1) as client:
        await client.set_pacing(target_tokens_per_second=20)
        sampling = frameshard.Sampling(max_tokens=11, temperature=0.0)
        result = await client.complete("Once upon a time", sampling=sampling).completed()
        assert result.n_generated == 11
        assert result.decode_s >= 0.45  # at least nine intervals, on any machine


@in_trio
async def test_a_target_out_of_range_is_refused_and_harms_nobody() -> None:
    async with launch() as client:
        for rate in (1e-12, 0.09, 10_001, -1, float("inf"), float("nan"), 1e-320, "fast", True, False):
            with pytest.raises(errors.BadArgument, match="target_tokens_per_second"):
                await client.set_pacing(target_tokens_per_second=rate)  # type: ignore[arg-type]
        for rate in (0, 0.1, 10_000):
            await client.set_pacing(target_tokens_per_second=rate)
        assert (await client.stats()).broker.engine_restarts == 0


@in_trio
async def test_what_was_due_at_the_old_target_is_forgotten(shallow_model: Path) -> None:
    """At 0.1 tokens per second the engine waits ten seconds. A new target ends this wait."""
    async with frameshard.launch(shallow_model, device="cpu", n_ctx=512, n_parallel=1) as client:
        sampling = frameshard.Sampling(max_tokens=200, temperature=0.0)
        await client.set_pacing(target_tokens_per_second=10)  # so that the answer does not end meanwhile
        async with client.complete("Once upon a time", sampling=sampling) as stream:
            await stream.__anext__()
            waited = []
            for _ in range(3):
                await client.set_pacing(target_tokens_per_second=0.1)
                with trio.move_on_after(1.0):  # tokens that are on their way
                    while True:
                        await stream.__anext__()
                asked = trio.current_time()
                await client.set_pacing(target_tokens_per_second=10)
                await stream.__anext__()
                waited.append(trio.current_time() - asked)
            # If the new target did not end the wait, it would last 8 s or more.
            assert min(waited) < 5


@in_trio
async def test_a_new_engine_is_told_the_settings() -> None:
    """There is one frame block per launch, and the pacing stays in force after an engine's death."""
    async with launch() as client:
        await client.set_pacing("prioritize_graphics", target_tokens_per_second=7)
        first, second = await client.frame_block(), await client.frame_block()
        assert first.set_budget(9) == 1
        second.close()
        assert (await client.frame_block()).set_budget(9) == 2
        before = await client.stats()
        assert before.engine is not None
        assert before.engine["settings"]["pacing"]["scheduling_mode"] == "prioritize_graphics"
        changes = client.engine_changes()
        assert before.broker.engine_pid is not None
        os.kill(before.broker.engine_pid, signal.SIGKILL)
        async for change in changes:
            if change.state == "ready":
                break
        after = await client.stats()
        assert after.engine is not None
        assert after.engine["settings"] == before.engine["settings"]
