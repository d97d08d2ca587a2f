"""The progress of a load and of a long prompt, from a real sidecar to its client."""

from __future__ import annotations

import itertools
from pathlib import Path

import trio

import frameshard


def test_a_load_and_a_long_prompt_tell_how_far_they_are(deep_model: Path) -> None:
    loads: list[frameshard.Loading] = []
    progress: list[frameshard.Progress] = []
    short: list[frameshard.Progress] = []
    sampling = frameshard.Sampling(max_tokens=1, temperature=0)
    scope = frameshard.launch(
        deep_model,
        device="emulated:0.02",  # each step takes longer than steps of which several are told together
        mode="stream_only",
        vram_budget_mb=16,
        n_ctx=1536,
        n_ubatch=256,
        n_parallel=1,
        on_loading=loads.append,
    )

    async def main() -> None:
        async with scope as client:
            for text, seen in (("a" * 1100, progress), ("a" * 400, short)):
                stream = client.complete(text, sampling=sampling)
                stream.on_progress = seen.append
                await stream.completed()

    trio.run(main)
    stages = [stage for stage, _ in itertools.groupby(loads, lambda load: load.stage)]
    assert stages == ["read", "profile", "fill"]
    for stage in stages:
        done = [(load.done, load.total) for load in loads if load.stage == stage]
        assert done == sorted(done)
        assert done[-1][0] == done[-1][1] > 0
        assert len({total for _, total in done}) == 1
    assert {each.phase for each in progress} == {"prefill"}
    done = [(each.done, each.total) for each in progress]
    assert done == sorted(done)
    assert len(done) >= 4
    assert done[-1][0] == done[-1][1] >= 1024
    assert not short
