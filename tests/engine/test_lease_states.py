"""Leases with the real engine on the emulated device: parking and hibernation, deadlines, and other processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import frameshard
from frameshard.errors import BudgetBelowFloor, DeadlineMissed
from frameshard.wire import messages as m

MIB = 1 << 20
GREEDY = m.Sampling(max_tokens=24, temperature=0.0)
QUESTIONS = ("Any rooms left?", "And what is there for breakfast?", "Thank you. Who lives in the lighthouse?")


def play(model: Path, main: Callable[[frameshard.Client], Awaitable[None]], **options: Any) -> None:
    options = {"device": "emulated", "n_ctx": 512, "n_parallel": 2, "n_threads": 1, "mode": "stream_only", **options}

    async def bounded() -> None:
        with trio.fail_after(120):
            async with frameshard.launch(model, log=subprocess.DEVNULL, **options) as client:
                await main(client)

    trio.run(bounded)


def test_a_conversation_survives_parking_and_hibernating(deep_model: Path) -> None:
    """The text is that of an undisturbed run, during an answer and between answers."""
    told: list[list[str]] = []

    async def talk(client: frameshard.Client, *states: m.LeaseState | None) -> None:
        texts = []
        for question, state in zip(QUESTIONS, states, strict=True):
            async with client.ask(question, conversation="inn", sampling=GREEDY) as stream:
                async for _ in stream:
                    if state is not None and len(stream.text) > 20:
                        down = await client.set_budget(18, state=state, timeout_s=30)
                        assert down.used_bytes == 0  # the emulated device has no driver with VRAM of its own
                        back = await client.set_budget(18, timeout_s=30)
                        assert 0 < back.used_bytes <= 18 * MIB
                        state = None
                texts.append(stream.text)
        told.append(texts)

    play(deep_model, lambda client: talk(client, None, None, None), vram_budget_mb=18)
    play(deep_model, lambda client: talk(client, "parked", "hibernated", "parked"), vram_budget_mb=18)
    assert told[0] == told[1]
    assert all(len(text) > 40 for text in told[0])


async def filled(client: frameshard.Client) -> None:
    """Waits until all weights are resident. After a larger budget the engine copies weights when it is idle."""
    while (await client.stats()).engine["streamed_bytes"]:
        await trio.sleep(0.02)


async def next_of(notices: trio.MemoryReceiveChannel[frameshard.Notice], kind: str) -> frameshard.Notice:
    while (notice := await notices.receive()).kind != kind:
        pass
    return notice


def test_what_was_chosen_at_launch_stays(model_path: Path) -> None:
    """An engine that starts later with a small budget keeps the ``n_ubatch`` of the launch, which had no budget."""

    async def main(client: frameshard.Client) -> None:
        floor = (await client.caps_and_requirements()).floor_bytes
        await client.set_budget(200, state="hibernated")
        with pytest.raises(BudgetBelowFloor) as below:
            await client.set_budget(floor / MIB - 1)
        assert below.value.detail["floor_bytes"] == floor
        await client.set_budget(floor / MIB, timeout_s=30)
        assert (await client.caps_and_requirements()).floor_bytes == floor

    play(model_path, main, n_ctx=4096, n_parallel=1, vram_budget_mb=0, device="emulated:2")


def test_a_deadline_that_is_too_short(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each free takes 10 ms. The first answer has the budget that can be reached in time, and the rest follows."""
    monkeypatch.setenv("FRAMESHARD_FAULTS", "free_ms=10")

    async def main(client: frameshard.Client) -> None:
        notices = client.notices()
        caps = await client.caps_and_requirements()
        await filled(client)
        low = caps.floor_bytes / MIB + 8
        first = await client.set_budget(low, timeout_s=60)  # there are no measured times yet
        assert (first.lease.decision, first.lease.seconds) == ("granted", 0)
        await client.set_budget(0)
        await filled(client)
        grants: list[frameshard.Lease] = []
        second = await client.set_budget(low, timeout_s=0.05, on_lease=grants.append)
        (grant,) = grants
        assert grant.decision == "partial"
        assert second.vram_budget_bytes < grant.vram_budget_bytes < caps.full_bytes
        assert grant.seconds > 0.05
        late = await next_of(notices, "late")
        assert (late.vram_budget_bytes, late.seconds) == (grant.vram_budget_bytes, grant.seconds)
        assert second.used_bytes <= second.vram_budget_bytes == int(low * MIB)

    play(model_path, main)


def test_a_release_that_lags_behind_is_told_half_way(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMESHARD_FAULTS", "free_ms=20")

    async def main(client: frameshard.Client) -> None:
        notices = client.notices()
        caps = await client.caps_and_requirements()
        await filled(client)
        change = client.change_budget(caps.floor_bytes / MIB + 1, timeout_s=0.2)
        granted = await change.granted()
        assert granted.decision == "granted"  # there are no measured times yet
        late = await next_of(notices, "late")
        assert granted.vram_budget_bytes < late.vram_budget_bytes <= caps.full_bytes
        # The deadline passes while the buffers are freed. It is missed only if another thread frees them: the thread
        # that frees them itself does not stop half way.
        with contextlib.suppress(DeadlineMissed):
            await change.released()
        while (await client.budget()).used_bytes > granted.vram_budget_bytes:
            await trio.sleep(0.02)

    play(model_path, main)


def test_another_process_on_the_card(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is reported. If it leaves too little VRAM, the sidecar gives some back by itself."""

    async def measured(client: frameshard.Client) -> None:
        """Makes sure that the machine's profile is kept. Then a load is short, and the other process comes after it."""

    play(model_path, measured)
    monkeypatch.setenv("FRAMESHARD_FAULTS", "other_mb=8000,other_from=300")

    async def main(client: frameshard.Client) -> None:
        notices = client.notices()
        caps = await client.caps_and_requirements()
        assert caps.total_bytes == 8192 * MIB
        await filled(client)
        text = (await client.complete("Once upon a time", sampling=GREEDY).completed()).text
        async with trio.open_nursery() as nursery:

            async def speak() -> None:
                while True:
                    await client.complete("Once upon a time", sampling=GREEDY).completed()

            nursery.start_soon(speak)
            heard: dict[str, int] = {}
            while not {"other_process", "pressure"} <= heard.keys():
                notice = await notices.receive()
                heard.setdefault(notice.kind, notice.vram_budget_bytes)
            nursery.cancel_scope.cancel()
        assert abs(heard["other_process"] - 8000 * MIB) <= MIB
        assert heard["pressure"] < caps.full_bytes
        while (await client.budget()).used_bytes > heard["pressure"]:
            await trio.sleep(0.02)
        free = (await client.caps_and_requirements()).free_bytes
        assert free is not None
        assert (await client.complete("Once upon a time", sampling=GREEDY).completed()).text == text

    play(model_path, main)


def test_plans_while_tokens_flow(model_path: Path) -> None:
    async def main(client: frameshard.Client) -> None:
        caps = await client.caps_and_requirements()
        async with client.complete("Once upon a time", sampling=GREEDY) as stream:
            await stream.__anext__()
            floor, full = caps.floor_bytes / MIB, caps.full_bytes / MIB
            rows = await client.plan([floor - 1, floor + 16, full + 1, 0], prompt_tokens=400)
            assert [row.fits for row in rows] == [False, True, True, True]
            assert (rows[0].ttft_s, rows[2].streamed_bytes) == (None, 0)
            assert rows[1].streamed_bytes > 0
            assert rows[1].tokens_per_second is not None
            await stream.completed()
        assert caps.mode == "stream_only"

    play(model_path, main, vram_budget_mb=100)
