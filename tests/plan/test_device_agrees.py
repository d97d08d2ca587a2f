"""The planner and the shard device have the same pieces and sizes: one from the header, the other in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from frameshard import native
from frameshard.errors import BadArgument, BudgetBelowFloor
from frameshard.plan.memory import NOT_ESTIMATED

EXACT = """
import json, sys
from frameshard import native
from frameshard.engine.runtime import Runtime
from frameshard.plan.ladder import make_ladder
from frameshard.plan.model import read_model
from frameshard.wire.engine import EngineConfig

F16, Q8_0 = 1, 8
path, kv_type, n_seq = sys.argv[1], sys.argv[2], 2
model = read_model(path)
shards = [*make_ladder(model), *([model.core] if model.core else [])]
weights = [native.WeightShape(t.name, i, t.ggml_type, t.shape) for i, shard in enumerate(shards) for t in shard.tensors]
row = model.integer("attention.head_count_kv") * model.integer("attention.key_length")


def lay_out(n_used, buffers=(), overhead=0):
    shape = (Q8_0 if kv_type == "q8_0" else F16, row, 512, n_seq, n_used)
    kv = [native.KvShape(layer, *shape) for layer in range(model.n_layer) for _ in ("keys", "values")]
    return native.lay_out("emulated", weights, kv=kv, buffers=buffers, overhead_bytes=overhead)


layout = lay_out(200)
budget = layout.fixed_bytes + layout.kv_used_bytes + layout.weights_beside_kv_bytes + (1 << 20)  # compute buffers
config = EngineConfig(
    model=path, device="emulated:20", n_ctx=512, n_ubatch=64, n_parallel=n_seq, n_threads=1, kv_type=kv_type,
    vram_budget_bytes=budget, mode="stream_only",
)
with Runtime.load(config) as runtime:
    for sequence in range(n_seq):
        runtime.device.use_kv(sequence, 200)
    runtime.device.set_budget(budget)  # takes a ring, which a model that was all resident has not had
    runtime.device.set_plan([], 2 * layout.min_ring_bytes)
    while runtime.device.fill():
        pass
    stats = runtime.device.stats()
    spare = stats.most_graph_bytes - stats.graph_bytes
    layout = lay_out(200, [stats.buffers_bytes - stats.kv_bytes + spare], stats.overhead_bytes)
    room = stats.budget_bytes - layout.fixed_bytes + spare - stats.kv_bytes
    ring, n_slabs = layout.fit(room, 2 * layout.min_ring_bytes)
    resident = int(layout.slabs[:n_slabs].sum())
    print(json.dumps({
        "floor": (layout.floor_bytes, stats.floor_bytes),
        "full": (layout.full_bytes, stats.full_bytes),
        "core": (layout.core_bytes, stats.core_bytes),
        "scratch": (layout.scratch_bytes, stats.scratch_bytes),
        "kv": (layout.kv_used_bytes, stats.kv_bytes),
        "ring": (ring, stats.ring_bytes),
        "arena": (resident, stats.arena_bytes),
        "all resident": (n_slabs == len(layout.slabs), stats.ring_bytes == 0),
    }))
"""

LOAD = """
import json, sys
from collections import Counter
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.model import read_model
from frameshard.plan.memory import estimate_context, estimate_steps, fixed_vram
from frameshard.plan.layout import lay_out
from frameshard.plan.workload import Workload

path, share = sys.argv[1], float(sys.argv[2])
model = read_model(path)
layout = lay_out(model, "emulated")
workload = Workload(512, n_ubatch=64)
fixed = fixed_vram(model, "emulated") + estimate_steps(model, "emulated", workload).most_bytes
context = estimate_context(model, "emulated", workload)
budget = fixed + context.used + layout.least_bytes + int(share * layout.arena_bytes)
config = EngineConfig(
    model=path, device="emulated:20", n_ctx=512, n_ubatch=64, n_parallel=1, n_threads=1, vram_budget_bytes=budget
)
with Runtime.load(config) as runtime:
    stats, plan = runtime.device.stats(), runtime.placement.plan
    held = stats.overhead_bytes + stats.buffers_bytes - stats.kv_bytes + stats.core_bytes + stats.scratch_bytes
    held += stats.most_graph_bytes - stats.graph_bytes
    whole = stats.full_bytes - held - layout.arena_bytes
    pairs = set(zip(layout.sizes.piece_shards.tolist(), layout.sizes.piece_slabs.tolist()))
    print(json.dumps({
        "fixed": held,
        "estimated": fixed,
        "floor": stats.floor_bytes - held - layout.least_bytes,
        "whole": whole,
        "estimated_floor": context.window,
        "estimated_whole": context.whole,
        "kv": stats.kv_bytes,
        "slab": int(layout.sizes.slabs.max()),
        "shards_of_a_slab": max(Counter(slab for _, slab in pairs).values()),
        "resident_shards": stats.resident_shards,
        "resident_bytes": stats.resident_bytes,
        "planned_shards": plan.resident,
        "planned_bytes": plan.tiers[0].resident_bytes,
        "ladder": len(layout.ladder),
        "used": stats.used_bytes,
        "budget": budget,
        "device_floor": stats.floor_bytes,
        "planned_floor": fixed + context.window + layout.least_bytes,
    }))
"""

DEFAULTS = """
import json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.model import read_model
from frameshard.plan.memory import estimate_context, estimate_steps, fixed_vram
from frameshard.plan.layout import lay_out
from frameshard.plan.workload import Workload

path, (n_ctx, n_parallel, n_ubatch, host_budget_bytes) = sys.argv[1], map(int, sys.argv[2:])
model = read_model(path)
workload = Workload(n_ctx, n_ubatch=n_ubatch, n_parallel=n_parallel, host_budget_bytes=host_budget_bytes)
steps = estimate_steps(model, "emulated", workload)
floor = fixed_vram(model, "emulated") + steps.floor_bytes + lay_out(model, "emulated").least_bytes
floor += estimate_context(model, "emulated", workload).window
config = EngineConfig(
    model=path, device="emulated:20", n_ctx=n_ctx, n_ubatch=n_ubatch, n_parallel=n_parallel, n_threads=1,
    host_budget_bytes=host_budget_bytes,
)
with Runtime.load(config, fill=False) as runtime:
    stats = runtime.device.stats()
    print(json.dumps({
        "floor": (stats.floor_bytes, floor),
        "graph": (stats.most_graph_bytes, steps.most_bytes),
        "step": (runtime.n_ubatch, steps.most_tokens),
    }))
"""


def estimates(path: Path, *options: int) -> dict[str, list[int]]:
    """Floor, largest compute buffer and largest step of a launch with these options, each with its estimate.

    :param options: context, sequences, tokens of a step and host budget; 0: that is not chosen.
    """
    command = [sys.executable, "-c", DEFAULTS, str(path), *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    figures: dict[str, list[int]] = json.loads(result.stdout)
    return figures


def load(path: Path, share: float) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), str(share)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    figures: dict[str, int] = json.loads(result.stdout)
    return figures


def check(figures: dict[str, int]) -> None:
    # The planner's figures are exact, but for llama.cpp's compute buffers: these are an upper bound.
    assert figures["floor"] == figures["estimated_floor"]
    assert figures["device_floor"] <= figures["planned_floor"] <= 1.5 * figures["device_floor"]
    assert 0 < figures["whole"] == figures["estimated_whole"]
    assert figures["kv"] <= figures["whole"]
    assert figures["used"] <= figures["budget"]
    # The numbers may differ a little. Tensors of a shard may be in another order, so the last resident slab may end
    # elsewhere. And there is no new plan for a small change of the context, as after the warm-up.
    assert figures["planned_shards"] == pytest.approx(figures["resident_shards"], abs=figures["shards_of_a_slab"])
    assert figures["planned_bytes"] == pytest.approx(
        figures["resident_bytes"], abs=figures["slab"] + figures["budget"] // 16
    )
    # An estimate may be a little too large, so that a budget made from it is enough.
    true, estimated = figures["fixed"] + figures["whole"], figures["estimated"] + figures["estimated_whole"]
    assert 0.95 * true <= estimated <= 1.6 * true


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_layout_is_the_devices_own(name: str, kv_type: str, tiny_model: Callable[[str], Path]) -> None:
    """lay_out() computes the same numbers from a header as the device has in memory, to the byte."""
    command = [sys.executable, "-c", EXACT, str(tiny_model(name)), kv_type]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    figures: dict[str, list[int]] = json.loads(result.stdout)
    for what, (computed, held) in figures.items():
        assert computed == held, what
    assert figures["all resident"] == [False, False]


def test_shapes_that_no_file_has_are_refused() -> None:
    sound = native.WeightShape("blk.0.ffn_up.weight", 0, 0, (256, 64))
    assert len(native.lay_out("CUDA0", [sound]).slabs) == 0  # a tensor of 64 KiB is in the core
    for change in (
        {"shape": (0, 64)},
        {"shape": (1 << 40, 1 << 40)},
        {"ggml_type": 4},
        {"ggml_type": 2, "shape": (33,)},
    ):
        with pytest.raises(BadArgument, match="weight 1 has"):
            native.lay_out("CUDA0", [sound, sound._replace(**change)])
    with pytest.raises(BadArgument, match="weight 1 has"):
        native.lay_out("CUDA0", [sound._replace(shard=1), sound])
    with pytest.raises(BadArgument, match="KV tensor 0"):
        native.lay_out("CUDA0", [sound], kv=[native.KvShape(0, 1, 256, 512, 1, used=513)])


def test_room_for_no_ring_is_refused() -> None:
    layout = native.lay_out("CUDA0", [native.WeightShape(f"blk.{i}.w", i, 1, (4096, 4096)) for i in range(4)])
    assert layout.unit_bytes == 2 << 20
    assert layout.fit(layout.arena_bytes, 0) == (0, len(layout.slabs))
    assert layout.fit(layout.min_ring_bytes + 1, 0) == (layout.min_ring_bytes, 0)
    with pytest.raises(BudgetBelowFloor):
        layout.fit(layout.min_ring_bytes - 1, 0)


@pytest.mark.parametrize("name", sorted({*tiny_models.ARCHS} - NOT_ESTIMATED))
def test_tiny_models(name: str, tiny_model: Callable[[str], Path]) -> None:
    check(load(tiny_model(name), 0.5))


@pytest.mark.parametrize("name", sorted({*tiny_models.ARCHS} - NOT_ESTIMATED))
def test_a_launch_with_default_options(name: str, tiny_model: Callable[[str], Path]) -> None:
    """The floor has room for small steps only, and the logits of all sequences."""
    figures = estimates(tiny_model(name), 4096, 4, 0, 0)
    launched, estimated = figures["floor"]
    assert launched <= estimated <= 1.5 * launched
    assert figures["step"] == [4096, 4096]
    assert figures["graph"][0] <= figures["graph"][1]


@pytest.mark.parametrize("name", ["falcon-h1", "kimi-linear", "lfm2", "mamba2", "qwen35moe", "rwkv6", "rwkv7"])
def test_recurrent_states_of_many_sequences(name: str, tiny_model: Callable[[str], Path]) -> None:
    launched, estimated = estimates(tiny_model(name), 512, 16, 64, 0)["floor"]
    assert launched <= estimated <= 1.5 * launched


def test_a_step_that_sequences_share_unevenly(tiny_model: Callable[[str], Path]) -> None:
    launched, estimated = estimates(tiny_model("gemma3n"), 2048, 16, 33, 0)["floor"]
    assert launched <= estimated <= 1.5 * launched


def test_a_limit_on_host_memory_makes_steps_smaller(model_path: Path) -> None:
    figures = estimates(model_path, 32768, 1, 0, 1 << 30)
    assert figures["step"] == [512, 512]
    assert figures["floor"][0] <= figures["floor"][1] <= 1.1 * figures["floor"][0]


def test_the_demo_model(model_path: Path) -> None:
    check(load(model_path, 0.4))


def test_experts(moe_path: Path) -> None:
    check(load(moe_path, 0.4))


def test_wide_experts(moe_path: Path) -> None:
    """Two experts of a token are wider than the model: their products take most of a step."""
    figures = estimates(moe_path, 512, 1, 0, 0)
    for launched, estimated in (figures["floor"], figures["graph"]):
        assert launched <= estimated <= 1.2 * launched
