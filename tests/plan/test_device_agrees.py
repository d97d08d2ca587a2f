"""The planner cuts and counts as the shard device does: what one computes from the header, the other has in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models

LOAD = """
import json, sys
from collections import Counter
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.model import read_model
from frameshard.plan.planner import estimate_context, estimate_fixed, lay_out

path, share = sys.argv[1], float(sys.argv[2])
model = read_model(path)
layout = lay_out(model)
fixed, context = estimate_fixed(model, 512, 64, 1), estimate_context(model, 512, 512, 1)
budget = fixed + context.used + min(layout.min_ring, layout.total) + int(share * layout.total)
config = EngineConfig(
    model=path, device="emulated:20", n_ctx=512, n_ubatch=64, n_parallel=1, n_threads=1, vram_budget_bytes=budget
)
with Runtime.load(config) as runtime:
    stats, plan = runtime.device.stats(), runtime.plan
    held = stats.overhead_bytes + stats.buffers_bytes - stats.kv_bytes + stats.core_bytes + stats.scratch_bytes
    whole = stats.full_bytes - held - layout.total
    print(json.dumps({
        "fixed": held,
        "estimated": fixed,
        "floor": stats.floor_bytes - held - min(layout.min_ring, layout.total),
        "whole": whole,
        "estimated_floor": context.window,
        "estimated_whole": context.whole,
        "kv": stats.kv_bytes,
        "slab": max(layout.slabs),
        "shards_of_a_slab": max(Counter(slab for _, slab in {piece[:2] for piece in layout.pieces}).values()),
        "resident_shards": stats.resident_shards,
        "resident_bytes": stats.resident_bytes,
        "planned_shards": plan.resident,
        "planned_bytes": plan.tiers[0].resident_bytes,
        "ladder": len(layout.ladder),
        "used": stats.used_bytes,
        "budget": budget,
        "device_floor": stats.floor_bytes,
        "planned_floor": fixed + context.window + min(layout.min_ring, layout.total),
    }))
"""


def load(path: Path, share: float) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), str(share)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    figures: dict[str, int] = json.loads(result.stdout)
    return figures


def check(figures: dict[str, int]) -> None:
    # All of it is exact but llama.cpp's buffers, of which the estimate is an upper bound.
    assert figures["floor"] == figures["estimated_floor"]
    assert figures["device_floor"] <= figures["planned_floor"] <= 1.5 * figures["device_floor"]
    for name in ("floor", "whole"):
        assert 0 < figures[name] <= figures[f"estimated_{name}"] <= 3 * figures[name]
    assert figures["kv"] <= figures["whole"]
    assert figures["used"] <= figures["budget"]
    # Tensors of one shard may lie in another order, so that the last slab held ends elsewhere; and a plan is not made
    # anew for a little less context, as after the warm-up.
    assert figures["planned_shards"] == pytest.approx(figures["resident_shards"], abs=figures["shards_of_a_slab"])
    assert figures["planned_bytes"] == pytest.approx(
        figures["resident_bytes"], abs=figures["slab"] + figures["budget"] // 16
    )
    # An estimate may be above the truth, since a budget made from it must do, but not by much.
    true, estimated = figures["fixed"] + figures["whole"], figures["estimated"] + figures["estimated_whole"]
    assert 0.95 * true <= estimated <= 1.5 * true


@pytest.mark.parametrize("name", tiny_models.ARCHS)
def test_tiny_models(name: str, tiny_model: Callable[[str], Path]) -> None:
    check(load(tiny_model(name), 0.5))


def test_the_demo_model(model_path: Path) -> None:
    check(load(model_path, 0.4))


def test_experts(moe_path: Path) -> None:
    check(load(moe_path, 0.4))
