"""The time line of the executor shows the work that was done."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from forks import run_script

RECORD = """
import dataclasses, json, sys
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.layout import lay_out

config = EngineConfig(
    model=sys.argv[1], device="emulated:2", n_ctx=512, n_ubatch=64, n_parallel=1, n_threads=1
)
with Runtime.load(config, measure=False) as runtime:
    device = runtime.device
    device.set_budget((device.stats().floor_bytes + device.stats().full_bytes) // 2)
    runtime.placement.replan()
    while runtime.placement.fill():
        pass
    runtime.decode([Rows(0, [1])])  # which may make a plan of its own
    # All three lanes have work: half of what is left out goes to the CPU, and the ring cannot keep the other half.
    n = len(runtime.placement.plan.tiers[0].placements)
    device.set_plan([(0, [1 + (i % 2) for i in range(n)])], lay_out(runtime.model_info, "emulated").min_ring_bytes)
    runtime.decode([Rows(0, [1])])
    before = device.stats()
    device.start_trace()
    for token in range(3):
        runtime.decode([Rows(0, [token])])
        runtime.logits(0)
    spans = device.stop_trace()
    after = device.stats()
    print(json.dumps({
        "spans": [dataclasses.asdict(span) for span in spans],
        "copied": after.copied_bytes - before.copied_bytes,
        "copies": after.copies - before.copies,
        "cpu": after.cpu_segments - before.cpu_segments,
    }))
"""

PROMPT = """
import dataclasses, json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

config = EngineConfig(
    model=sys.argv[1], device="emulated:0.05", n_ctx=512, n_ubatch=256, n_parallel=1, n_threads=1, mode="stream_only"
)
with Runtime.load(config, measure=False) as runtime:
    device = runtime.device
    device.set_budget(device.stats().floor_bytes)
    runtime.placement.replan()
    words = [3 + 37 * i % 250 for i in range(256)]
    for trace in (False, False, True):  # the same experts are chosen as in the prompt before
        if trace:
            device.start_trace()
        runtime.clear(0)
        runtime.decode_tokens(0, words)
    spans = [dataclasses.asdict(span) for span in device.stop_trace()]
    print(json.dumps({"spans": spans}))
"""


def record(program: str, model: Path) -> dict[str, Any]:
    result = run_script(program, model)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_spans_account_for_all_work(deep_model: Path) -> None:
    found = record(RECORD, deep_model)
    lanes = {lane: [span for span in found["spans"] if span["lane"] == lane] for lane in ("copy", "device", "cpu")}
    assert all(span["start_s"] <= span["end_s"] for span in found["spans"])
    assert len(lanes["copy"]) == found["copies"] > 0
    assert sum(span["n_bytes"] for span in lanes["copy"]) == found["copied"]
    assert len(lanes["cpu"]) == found["cpu"] > 0
    assert len(lanes["device"]) > 3
    for lane in lanes.values():  # spans of a lane do not overlap
        assert all(earlier["end_s"] <= later["start_s"] for earlier, later in pairwise(lane))


def test_experts_are_computed_while_those_of_later_steps_are_copied(tiny_model: Callable[[str], Path]) -> None:
    """On a busy machine the threads of device and copies may not run at the same time in one recording."""

    def share_beside() -> float:
        spans = record(PROMPT, tiny_model("qwen3moe"))["spans"]
        largest = max(span["n_bytes"] for span in spans if span["lane"] == "device")
        # Products with a tensor of experts.
        products = [span for span in spans if span["lane"] == "device" and span["n_bytes"] == largest]
        copies = [span for span in spans if span["lane"] == "copy"]
        beside = [
            product
            for product in products
            if any(copy["start_s"] < product["end_s"] and product["start_s"] < copy["end_s"] for copy in copies)
        ]
        return len(beside) / len(products)

    assert any(share_beside() > 0.5 for _ in range(4))
