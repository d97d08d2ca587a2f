"""Launches of the shard device for test_device_agrees.py. A process can have one only, so each has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from frameshard import native
from frameshard.engine.runtime import Runtime
from frameshard.plan.ladder import make_ladder
from frameshard.plan.layout import lay_out
from frameshard.plan.memory import estimate_context, estimate_steps, fixed_vram
from frameshard.plan.model import read_model
from frameshard.plan.profile import KvType
from frameshard.plan.workload import Workload
from frameshard.wire.engine import EngineConfig

F16, Q8_0 = 1, 8


def exact(path: str, kv_type: KvType) -> dict[str, tuple[int, int]]:
    """Sizes in a launch with two sequences of 200 tokens, as they are computed from the header and in the device."""
    n_seq = 2
    model = read_model(path)
    shards = [*make_ladder(model), *([model.core] if model.core else [])]
    weights = [
        native.WeightShape(t.name, i, t.ggml_type, t.shape) for i, shard in enumerate(shards) for t in shard.tensors
    ]
    row = model.integer("attention.head_count_kv") * model.integer("attention.key_length")

    def computed(n_used: int, buffers: Sequence[int] = (), overhead: int = 0) -> native.Layout:
        shape = (Q8_0 if kv_type == "q8_0" else F16, row, 512, n_seq, n_used)
        kv = [native.KvShape(layer, *shape) for layer in range(model.n_layer) for _ in ("keys", "values")]
        return native.lay_out("emulated", weights, kv=kv, buffers=buffers, overhead_bytes=overhead)

    layout = computed(200)
    budget = layout.fixed_bytes + layout.kv_used_bytes + layout.weights_beside_kv_bytes + (1 << 20)  # compute buffers
    config = EngineConfig(
        model=path,
        device="emulated:20",
        n_ctx=512,
        n_ubatch=64,
        n_parallel=n_seq,
        n_threads=1,
        kv_type=kv_type,
        vram_budget_bytes=budget,
        mode="stream_only",
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
        layout = computed(200, [stats.buffers_bytes - stats.kv_bytes + spare], stats.overhead_bytes)
        room = stats.budget_bytes - layout.fixed_bytes + spare - stats.kv_bytes
        ring, n_slabs = layout.fit(room, 2 * layout.min_ring_bytes)
        resident = int(layout.slabs[:n_slabs].sum())
        return {
            "floor": (layout.floor_bytes, stats.floor_bytes),
            "full": (layout.full_bytes, stats.full_bytes),
            "core": (layout.core_bytes, stats.core_bytes),
            "scratch": (layout.scratch_bytes, stats.scratch_bytes),
            "kv": (layout.kv_used_bytes, stats.kv_bytes),
            "ring": (ring, stats.ring_bytes),
            "arena": (resident, stats.arena_bytes),
            "all resident": (n_slabs == len(layout.slabs), stats.ring_bytes == 0),
        }


def load(path: str, share: float) -> dict[str, int]:
    """Figures of a launch at a budget with this share of the weights, and their estimates."""
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
        pairs = set(zip(layout.sizes.piece_shards.tolist(), layout.sizes.piece_slabs.tolist(), strict=True))
        return {
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
        }


def estimates(
    path: str, n_ctx: int, n_parallel: int, n_ubatch: int, host_budget_bytes: int
) -> dict[str, tuple[int, int]]:
    """Floor, largest compute buffer and largest step of a launch with these options, each with its estimate. 0 as a
    step or a host budget: that is not chosen."""
    model = read_model(path)
    workload = Workload(n_ctx, n_ubatch=n_ubatch, n_parallel=n_parallel, host_budget_bytes=host_budget_bytes)
    steps = estimate_steps(model, "emulated", workload)
    floor = fixed_vram(model, "emulated") + steps.floor_bytes + lay_out(model, "emulated").least_bytes
    floor += estimate_context(model, "emulated", workload).window
    config = EngineConfig(
        model=path,
        device="emulated:20",
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        n_parallel=n_parallel,
        n_threads=1,
        host_budget_bytes=host_budget_bytes,
    )
    with Runtime.load(config, fill=False) as runtime:
        stats = runtime.device.stats()
        return {
            "floor": (stats.floor_bytes, floor),
            "graph": (stats.most_graph_bytes, steps.most_bytes),
            "step": (runtime.n_ubatch, steps.most_tokens),
        }
