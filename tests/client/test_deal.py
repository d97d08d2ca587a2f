"""A deal about VRAM between a streaming pool and a sidecar, with real sidecars."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import trio

import frameshard
from frameshard import errors, system
from frameshard.deal import MIB, SPARE_BYTES
from frameshard.testing import fake_engine
from sidecars import DEADLINE_S, in_both, in_trio, launch, until

FRAME_S = 0.005


class Pool:
    """A streaming pool without textures: it holds what it wants, and more if the limit allows."""

    def __init__(self, deal: frameshard.Deal, client: frameshard.Client) -> None:
        self.wants_bytes = 0
        self.held_bytes = 0
        self.limits: list[int] = []
        self._deal, self._client = deal, client

    def frame(self) -> None:
        limit = self._deal.update(frameshard.PoolNeeds(self.held_bytes, self.wants_bytes // 2, self.wants_bytes))
        if not self.limits or self.limits[-1] != limit:
            self.limits.append(limit)
        self.held_bytes = limit

    async def until(self, condition: Callable[[], bool]) -> None:
        """Draws frames. In each, what pool and sidecar hold lies within the grant."""
        due = time.monotonic() + DEADLINE_S / 2
        while not condition():
            assert time.monotonic() < due, self._deal
            before = self.held_bytes
            self.frame()
            used = (await self._client.budget()).used_bytes
            assert min(before, self.held_bytes) + used <= (self._deal.grant_bytes or 1 << 62)
            await anyio.sleep(FRAME_S)


@in_both
async def test_the_pools_demand_moves_the_sidecar_both_ways() -> None:
    async with launch(vram_budget_mb=300, engine=fake_engine(full_mb=512)) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=400 * MIB, step_bytes=10 * MIB, dwell_s=0.2)
        pool = Pool(deal, client)
        async with anyio.create_task_group() as group:
            group.start_soon(deal.run)
            assert deal.needs == frameshard.SidecarNeeds(16 * MIB, 16 * MIB)  # all its budgets are equally fast
            await pool.until(lambda: pool.held_bytes == 380 * MIB)
            assert deal.arbiter.budget_bytes == 20 * MIB
            group.cancel_scope.cancel()


@in_both
async def test_a_sidecar_that_refuses_gets_another_budget() -> None:
    """The floor rises because an adapter is loaded, and the deal does not know it yet."""
    async with launch(vram_budget_mb=64, engine=fake_engine(floor_mb=16)) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB, step_bytes=MIB, dwell_s=0.05)
        await client.adapter_load("large", __file__)
        floor_bytes = 16 * MIB + Path(__file__).stat().st_size
        pool = Pool(deal, client)
        pool.wants_bytes = 100 * MIB
        async with anyio.create_task_group() as group:
            group.start_soon(deal.run)
            await pool.until(lambda: deal.arbiter.budget_bytes == 17 * MIB)
            group.cancel_scope.cancel()
        assert (await client.budget()).vram_budget_bytes == 17 * MIB >= floor_bytes


@in_both
async def test_the_deal_goes_on_when_the_engine_was_off(tmp_path: Path) -> None:
    """A budget that is asked for meanwhile is refused with EngineDied."""
    sick = tmp_path / "sick"
    options = {"restart_limit": 0, "off_pause_s": 0.05, "off_pause_max_s": 0.2}
    async with launch(vram_budget_mb=64, engine=fake_engine(sick=str(sick)), **options) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB, step_bytes=MIB, dwell_s=0.05)
        pool = Pool(deal, client)
        async with anyio.create_task_group() as group:
            group.start_soon(deal.run)
            changes = client.engine_changes()
            sick.touch()
            system.kill((await client.stats()).broker.engine_pid)
            while (await changes.receive()).state != "off":
                pass
            pool.wants_bytes = 70 * MIB
            await pool.until(lambda: deal.arbiter._refused_at > 0)
            sick.unlink()
            await pool.until(lambda: deal.arbiter.budget_bytes <= 30 * MIB and pool.held_bytes >= 70 * MIB)
            assert (await client.budget()).vram_budget_bytes == deal.arbiter.budget_bytes
            group.cancel_scope.cancel()


class DiedAfterwards:
    """A change of the budget with which an engine was loaded before it died."""

    async def granted(self) -> None:
        raise errors.EngineDied("the engine ended with signal 9")

    def close(self) -> None:
        pass


@in_trio
async def test_a_step_that_is_in_force_after_an_error_counts() -> None:
    async with launch(vram_budget_mb=64) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB, step_bytes=MIB)
        deal.update(frameshard.PoolNeeds(0, 90 * MIB, 90 * MIB))
        assert deal._change is not None
        change, step = deal._change
        await change.granted()
        await change.released()
        deal._change = DiedAfterwards(), step  # type: ignore[assignment]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deal.run)
            await until(lambda: deal.arbiter.budget_bytes == 16 * MIB)
            nursery.cancel_scope.cancel()
        assert deal.update(frameshard.PoolNeeds(0, 90 * MIB, 90 * MIB)) == 84 * MIB


@in_both
async def test_a_deal_goes_on_while_many_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan of the deal is refused as long as others wait."""
    async with launch(vram_budget_mb=64, engine=fake_engine(floor_mb=16)) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB, step_bytes=MIB, dwell_s=0.05)
        refused: list[object] = []

        async def plan(budgets: object) -> None:
            refused.append(budgets)
            raise errors.Overloaded("too many requests wait")

        monkeypatch.setattr(client, "plan", plan)
        deal._planned_for = None
        pool = Pool(deal, client)
        pool.wants_bytes = 70 * MIB
        async with anyio.create_task_group() as group:
            group.start_soon(deal.run)
            await pool.until(lambda: len(refused) > 1 and pool.held_bytes >= 70 * MIB)
            group.cancel_scope.cancel()


@in_trio
async def test_wrong_beginnings_are_typed() -> None:
    async with launch(vram_budget_mb=64) as client:
        with pytest.raises(errors.BadArgument, match="give grant_bytes"):
            await frameshard.Deal.begin(client)  # a device that does not report its free memory
        with pytest.raises(errors.BudgetBelowFloor):
            await frameshard.Deal.begin(client, grant_bytes=8 * MIB)
    async with launch() as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB)
        assert (await client.budget()).vram_budget_bytes == 100 * MIB == deal.arbiter.budget_bytes


@in_trio
async def test_there_is_no_deal_with_a_model_on_the_cpu(model_path: Path) -> None:
    async with frameshard.launch(model_path, device="cpu", n_ctx=512, n_parallel=1, n_threads=1) as client:
        for grant_bytes in (None, 1 << 30):
            with pytest.raises(errors.Unsupported, match="no VRAM to divide"):
                await frameshard.Deal.begin(client, grant_bytes=grant_bytes)


@in_both
async def test_the_end_of_the_sidecar_ends_the_run() -> None:
    async with launch(vram_budget_mb=64) as client:
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB)
        await client.shutdown()
        with pytest.raises(errors.ConnectionLost):
            await deal.run()
        needs = frameshard.PoolNeeds(0, 90 * MIB, 90 * MIB)
        assert deal.update(needs) == 36 * MIB  # the pool keeps its limit


async def talk(client: frameshard.Client, answers: list[frameshard.Completion]) -> None:
    sampling = frameshard.Sampling(max_tokens=16, temperature=0.0)
    while True:
        answers.append(await client.complete("Once upon a time", sampling=sampling).completed())


def emulated(model: Path, budget_mb: float) -> frameshard.ClientScope:
    """The link is so slow that VRAM is of use until all weights are resident, however fast the machine computes."""
    options = {"device": "emulated:0.5", "mode": "stream_only", "n_ctx": 1024, "n_parallel": 1, "n_threads": 1}
    return frameshard.launch(model, vram_budget_mb=budget_mb, **options)


@in_trio
async def test_a_talking_sidecar_shrinks_and_grows_with_the_pool(model_path: Path) -> None:
    """Pool and model together stay within the grant in each frame, and the answer is whole."""
    async with emulated(model_path, 100) as client, trio.open_nursery() as nursery:
        deal = await frameshard.Deal.begin(client, grant_bytes=160 * MIB, dwell_s=0.2)
        nursery.start_soon(deal.run)
        pool = Pool(deal, client)
        assert deal.needs.floor_bytes < deal.needs.useful_bytes < 120 * MIB
        answers: list[frameshard.Completion] = []
        nursery.start_soon(talk, client, answers)
        for city_bytes in (120 * MIB, 125 * MIB):
            pool.wants_bytes = city_bytes
            await pool.until(lambda: pool.held_bytes >= pool.wants_bytes)
            assert deal.arbiter.budget_bytes <= deal.grant_bytes - city_bytes
            pool.wants_bytes = 10 * MIB
            await pool.until(lambda: deal.arbiter.budget_bytes >= deal.needs.useful_bytes)
        n_before = len(answers)
        await pool.until(lambda: len(answers) > n_before)
        assert {(answer.n_generated, answer.text) for answer in answers} == {(16, answers[0].text)}
        assert (await client.budget()).vram_budget_bytes == deal.arbiter.budget_bytes == 160 * MIB - pool.held_bytes
        nursery.cancel_scope.cancel()


@in_trio
async def test_notices_move_the_pool(model_path: Path) -> None:
    """A sidecar without jobs gives back after some seconds, and the pool may hold more. With a job it wants more, and
    the pool evicts."""
    async with emulated(model_path, 100) as client, trio.open_nursery() as nursery:
        deal = await frameshard.Deal.begin(client, grant_bytes=160 * MIB, dwell_s=0.1)
        nursery.start_soon(deal.run)
        pool = Pool(deal, client)

        def useful() -> bool:
            return deal.arbiter.budget_bytes >= deal.needs.useful_bytes > 40 * MIB

        async with trio.open_nursery() as talking:
            talking.start_soon(talk, client, [])
            pool.wants_bytes = 120 * MIB
            await pool.until(lambda: pool.held_bytes >= 120 * MIB)
            pool.wants_bytes = 20 * MIB
            await pool.until(useful)
            talking.cancel_scope.cancel()
        await pool.until(lambda: pool.held_bytes >= 130 * MIB)  # after some seconds without a job
        assert deal.arbiter.budget_bytes <= 30 * MIB
        async with trio.open_nursery() as talking:
            talking.start_soon(talk, client, [])
            await pool.until(useful)
            assert pool.held_bytes <= 120 * MIB
            talking.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


def test_the_program_of_the_document_runs(model_path: Path, tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "lease.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 15
    (tmp_path / "deal.py").write_text(block)
    result = subprocess.run([sys.executable, str(tmp_path / "deal.py")], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    pairs = [tuple(map(int, re.findall(r"(\d+) MiB", line))) for line in result.stdout.splitlines()]
    assert len(pairs) == 6
    assert all(pool + sidecar <= 128 for pool, sidecar in pairs)


@in_trio
async def test_the_grant_can_be_what_is_free(model_path: Path) -> None:
    """The emulated device has 8 GiB and reports what is free."""
    async with emulated(model_path, 100) as client, trio.open_nursery() as nursery:
        deal = await frameshard.Deal.begin(client)
        assert (8 << 30) - SPARE_BYTES - MIB <= deal.update(frameshard.PoolNeeds(0, 0, 0)) + 100 * MIB <= 8 << 30
        nursery.start_soon(deal.run)
        pool = Pool(deal, client)
        pool.wants_bytes = 9 << 30
        await pool.until(lambda: deal.arbiter.budget_bytes <= 128 * MIB)
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_sidecar_can_be_parked_by_the_demand() -> None:
    async with launch(vram_budget_mb=64, engine=fake_engine(delay_s=0.01, endless=True)) as client:
        notices = client.notices()
        deal = await frameshard.Deal.begin(client, grant_bytes=100 * MIB, dwell_s=0.1, may_park=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(deal.run)
            pool = Pool(deal, client)
            sampling = frameshard.Sampling(max_tokens=50, temperature=0.0)
            async with client.complete("a b c", sampling=sampling) as stream:
                pool.wants_bytes = 95 * MIB
                await pool.until(lambda: not deal.arbiter.budget_bytes and pool.held_bytes == 100 * MIB)
                parked = await client.budget()
                assert parked.state == "parked"
                # It wants its budget back. That says nothing about what it can use once it is active.
                async for notice in notices:
                    if notice.kind == "wants" and notice.vram_budget_bytes == parked.vram_budget_bytes:
                        break
                heard_at = time.monotonic()
                await pool.until(lambda: time.monotonic() > heard_at + 0.2)
                assert deal._wanted_bytes != parked.vram_budget_bytes
                pool.wants_bytes = 10 * MIB
                await pool.until(lambda: deal.arbiter.budget_bytes >= 16 * MIB)
                async for _ in stream:
                    pool.frame()
                assert stream.result is not None
                assert stream.result.n_generated == 50
            nursery.cancel_scope.cancel()
