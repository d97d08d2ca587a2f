"""Properties of every plan, for random models, machines and budgets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frameshard.errors import BudgetBelowFloor
from frameshard.native import CPU, STREAMED
from frameshard.plan.costs import Conditions, Costs, Graph
from frameshard.plan.header import Tensor
from frameshard.plan.ladder import make_ladder
from frameshard.plan.layout import Layout, lay_out
from frameshard.plan.memory import DRIVER_BYTES, Context, estimate_context, estimate_steps, fixed_vram
from frameshard.plan.model import Model, Shard, read_model
from frameshard.plan.plans import GraphSize, Mode, Plan, make_plan, plan_workload
from frameshard.plan.profile import Profile
from frameshard.plan.roofline import least_seconds
from frameshard.plan.routing import Routing
from frameshard.plan.steps import Steps
from frameshard.plan.workload import Workload
from work import count_calls

F16 = 1
patient = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
MODES: tuple[Mode, ...] = ("planned", "stream_only")
# Rates of a machine with an H100 and 16 cores: bytes and operations per second.
H100 = Profile({"device": "CUDA0"}, 55e9, 50e9, 119e9, 112e9, 2.9e12, 1.2e12, 400e12, 17e-6)


def shard(name: str, kind: str, layer: int | None, sizes: list[tuple[int, int]], share: float = 1.0) -> Shard:
    tensors = tuple(
        Tensor(f"{name}.t{i}.weight", F16, (cols, rows), 2 * rows * cols, 0) for i, (cols, rows) in enumerate(sizes)
    )
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return Shard(name, kind, layer, tensors, n_bytes, int(n_bytes * share))


def model_of(shards: list[Shard], n_layer: int, n_expert: int = 0, n_used: int = 0) -> Model:
    tensors = tuple(tensor for shard in shards for tensor in shard.tensors)
    metadata = {"any.attention.head_count": 8, "any.attention.head_count_kv": 2, "any.feed_forward_length": 2048}
    return Model(
        Path("any.gguf"),
        "any",
        n_layer,
        1024,
        4096,
        n_expert,
        n_used,
        4096,
        0,
        tensors,
        tuple(shards),
        None,
        metadata,
        "",
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    n_layer = draw(st.integers(1, 12))
    cols = draw(st.sampled_from([256, 576, 1024]))
    n_ff = draw(st.integers(200, 6000))
    n_expert = draw(st.sampled_from([0, 0, 4, 32]))
    n_used = draw(st.integers(1, 4)) if n_expert else 0
    core = shard("core", "core", None, [(cols, 1)])
    shards = [core]
    for i in range(n_layer):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(cols, cols), (cols, 256), (cols, 256)]))
        if n_expert and i:
            experts = shard(f"blk.{i}.experts", "experts", i, [(cols, n_ff * n_expert)] * 3, n_used / n_expert)
            shards += [experts, shard(f"blk.{i}.shared", "shared", i, [(cols, 512)])]
        else:
            shards.append(shard(f"blk.{i}.ffn", "ffn", i, [(cols, n_ff)] * 3))
    if draw(st.booleans()):
        shards.append(shard("output", "output", None, [(cols, draw(st.integers(500, 60_000)))]))
    if draw(st.booleans()):
        shards.append(shard("other", "other", None, [(cols, 300)]))
    return model_of(shards, n_layer, n_expert, n_used)


def rates(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(np.log(low), np.log(high)).map(np.exp).map(float)


profiles = st.builds(
    Profile,
    st.sampled_from([{"device": "emulated"}, {"device": "CUDA0"}, {"device": "Vulkan0", "weights": "staged"}]),
    h2d=rates(1e9, 1e11),
    d2h=rates(1e9, 1e11),
    dram=rates(1e10, 5e11),
    cpu_gemv=rates(1e9, 2e11),
    gpu_gemv=rates(1e9, 4e12),
    cpu_flops=rates(1e10, 5e12),
    gpu_flops=rates(1e10, 1e15),
    handoff_s=rates(1e-7, 1e-4),
)
fixed_sizes = st.integers(0, 1 << 26)


def layout_for(model: Model, profile: Profile) -> Layout:
    return lay_out(model, profile.device)


def budgets_of(model: Model, profile: Profile, fixed: int) -> st.SearchStrategy[int]:
    layout = layout_for(model, profile)
    return st.integers(fixed + layout.least_bytes, fixed + layout.arena_bytes + (1 << 20))


def vram(plan: Plan, model: Model, profile: Profile) -> int:
    """The bytes of VRAM that the device takes for a plan, from the sizes of its slabs."""
    layout = layout_for(model, profile)
    ring, n_slabs = layout.sizes.fit(plan.budget_bytes - plan.fixed_bytes, plan.ring_bytes)
    assert ring == plan.ring_bytes
    return plan.fixed_bytes + ring + sum(layout.sizes.slabs[:n_slabs])


@patient
@given(st.data(), models(), profiles, fixed_sizes, st.sampled_from(MODES))
def test_no_plan_is_above_its_budget(
    data: st.DataObject, model: Model, profile: Profile, fixed: int, mode: Mode
) -> None:
    budget = data.draw(budgets_of(model, profile, fixed))
    plan = make_plan(model, profile, budget_bytes=budget, fixed_bytes=fixed, mode=mode)
    assert vram(plan, model, profile) <= budget
    ladder = make_ladder(model)
    total = sum(shard.n_bytes for shard in ladder)
    for tier in plan.tiers:
        assert len(tier.placements) == len(ladder)
        assert set(tier.placements) <= ({STREAMED} if mode == "stream_only" else {STREAMED, CPU})
        assert tier.n_resident + tier.n_streamed + tier.n_cpu == len(ladder)
        assert tier.resident_bytes + tier.streamed_bytes + tier.cpu_bytes == pytest.approx(total, abs=3)
        assert fixed + plan.ring_bytes + tier.resident_bytes <= budget + 1
        assert tier.n_resident == plan.resident
    assert [tier.min_tokens for tier in plan.tiers] == sorted({tier.min_tokens for tier in plan.tiers})
    assert plan.tiers[0].min_tokens == 0


@patient
@given(st.data(), models(), fixed_sizes)
def test_a_smaller_budget_keeps_a_part_of_what_a_larger_one_keeps(
    data: st.DataObject, model: Model, fixed: int
) -> None:
    budgets = sorted(data.draw(st.lists(budgets_of(model, H100, fixed), min_size=2, max_size=4)))
    layout = layout_for(model, H100)
    plans = [make_plan(model, H100, budget_bytes=budget, fixed_bytes=fixed) for budget in budgets]
    for small, large in itertools.pairwise(plans):
        assert small.resident <= large.resident  # both resident sets are prefixes of the same ladder
        assert small.tiers[0].resident_bytes <= large.tiers[0].resident_bytes
    held = [layout.sizes.fit(budget - fixed, 3 * layout.min_ring_bytes)[1] for budget in budgets]
    assert held == sorted(held)


@patient
@given(models(), profiles, fixed_sizes, st.sampled_from(MODES))
def test_the_floor_is_sharp(model: Model, profile: Profile, fixed: int, mode: Mode) -> None:
    floor = make_plan(model, profile, budget_bytes=0, fixed_bytes=fixed, mode=mode).floor_bytes
    plan = make_plan(model, profile, budget_bytes=floor, fixed_bytes=fixed, mode=mode)
    assert vram(plan, model, profile) <= floor
    with pytest.raises(BudgetBelowFloor) as caught:
        make_plan(model, profile, budget_bytes=floor - 1, fixed_bytes=fixed, mode=mode)
    assert caught.value.detail == {"budget_bytes": floor - 1, "floor_bytes": floor}


@patient
@given(models(), profiles, fixed_sizes)
def test_full_is_sharp(model: Model, profile: Profile, fixed: int) -> None:
    full = make_plan(model, profile, budget_bytes=0, fixed_bytes=fixed)
    assert full.ring_bytes == 0
    assert full.resident == len(make_ladder(model))
    assert full.tiers[0].streamed_bytes == full.tiers[0].cpu_bytes == 0
    assert vram(full, model, profile) == full.full_bytes == full.budget_bytes
    if full.full_bytes > full.floor_bytes:
        less = make_plan(model, profile, budget_bytes=full.full_bytes - 1, fixed_bytes=fixed)
        assert less.ring_bytes > 0
        assert less.resident < full.resident


@patient
@given(st.data(), models(), profiles, fixed_sizes, st.sampled_from(MODES), st.integers(1, 2000))
def test_no_prediction_beats_its_bound(
    data: st.DataObject, model: Model, profile: Profile, fixed: int, mode: Mode, n_prompt: int
) -> None:
    budget = data.draw(budgets_of(model, profile, fixed))
    plan = make_plan(model, profile, budget_bytes=budget, fixed_bytes=fixed, mode=mode)
    for tier in plan.tiers:
        assert 0 < tier.bound_s <= tier.predicted_s * (1 + 1e-9)
    assert 0 < plan.bound_ttft(n_prompt) <= plan.predicted_ttft(n_prompt) * (1 + 1e-9)
    assert plan.bound_decode_tps() >= plan.predicted_decode_tps() * (1 - 1e-9)


@patient
@given(st.data(), models(), profiles, fixed_sizes)
def test_the_cpu_is_used_only_where_it_helps(data: st.DataObject, model: Model, profile: Profile, fixed: int) -> None:
    budget = data.draw(budgets_of(model, profile, fixed))
    planned, streamed = (make_plan(model, profile, budget_bytes=budget, fixed_bytes=fixed, mode=mode) for mode in MODES)
    for ours, theirs in zip(planned.tiers, streamed.tiers, strict=True):
        assert ours.predicted_s <= theirs.predicted_s * (1 + 1e-9)


@given(
    st.lists(st.tuples(*[st.floats(1e-6, 1.0)] * 3), min_size=1, max_size=20),
    st.floats(0, 1.0),
    st.floats(0, 1.0),
    st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_no_split_beats_the_bound(
    costs: list[tuple[float, float, float]], resident_s: float, copied_s: float, shares: list[float]
) -> None:
    copy, device, cpu = np.array(costs).T
    streamed = np.array(shares[: len(costs)])
    took = max(
        float((copy * streamed).sum()) + copied_s,
        float((device * streamed).sum()) + resident_s,
        float((cpu * (1 - streamed)).sum()),
    )
    assert least_seconds(copy, device, cpu, resident_s=resident_s, copied_s=copied_s) <= took * (1 + 1e-9)


def test_the_bound_of_even_pieces_is_the_sum_of_the_rates() -> None:
    left_out, copy, cpu, device = 8e9, 55e9, 112e9, 3e12
    pieces = np.full(80, left_out / 80)
    bound = least_seconds(pieces / copy, pieces / device, pieces / cpu, resident_s=0.001)
    assert bound == pytest.approx(left_out / (copy + cpu), rel=0.01)
    assert bound <= left_out / (copy + cpu)
    alone = least_seconds(pieces / copy, pieces / device, None, resident_s=0.001)
    assert alone == pytest.approx(left_out / copy)
    # Other copies take the link for a while, and then the CPU computes more of the pieces.
    shared = least_seconds(pieces / copy, pieces / device, pieces / cpu, resident_s=0.001, copied_s=0.01)
    assert shared == pytest.approx((left_out + 0.01 * copy) / (copy + cpu), rel=0.01)


def dense(n_layer: int = 40, n_ff: int = 11520) -> Model:
    shards = [shard("output", "output", None, [(4096, 131072)])]
    for i in range(n_layer):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(4096, 4096), (4096, 5120), (4096, 1024)]))
        shards.append(shard(f"blk.{i}.ffn", "ffn", i, [(4096, n_ff)] * 3))
    return model_of(shards, n_layer)


def experts_model() -> Model:
    """48 layers with 8 of 128 experts."""
    shards = []
    for i in range(48):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (2048, 1024), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, 8 / 128))
    return model_of(shards, 48, 128, 8)


def test_the_ladder_spreads_each_kind_over_the_layers() -> None:
    ladder = make_ladder(dense(8))
    assert [shard.layer for shard in ladder if shard.kind == "ffn"] == [0, 4, 2, 6, 1, 5, 3, 7]
    kinds = [shard.kind for shard in ladder]
    assert kinds == sorted(kinds, key=["output", "attention", "ffn"].index)


def test_experts_stay_with_the_cpu_while_decoding() -> None:
    shards = [shard("output", "output", None, [(2048, 40_000)])]
    for i in range(24):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, 8 / 128))
    model = model_of(shards, 24, 128, 8)
    plan = make_plan(model, H100, budget_bytes=6 << 30, fixed_bytes=900 << 20)
    ladder = make_ladder(model)
    decode, prompt = plan.tiers[0], plan.tiers[-1]
    left_out = range(plan.resident, len(ladder))
    assert {ladder[i].kind for i in left_out} == {"experts"}
    assert all(decode.placements[i] == CPU for i in left_out)
    assert all(prompt.placements[i] == STREAMED for i in left_out[1:])  # the first is partly resident
    # A resident shard that is evicted before the next plan gets the placement of its kind.
    full = make_plan(model, H100, budget_bytes=0, fixed_bytes=900 << 20)
    for each, placement in zip(ladder, full.tiers[0].placements, strict=True):
        assert placement == (CPU if each.kind == "experts" else STREAMED)


def test_a_ring_of_one_step_hides_no_copies() -> None:
    """For this prompt the device takes as long as the copies. With one step in the ring the times add up; with more,
    copies and computation overlap. Before both the host prepares the graph."""
    model, n_tokens = dense(), round(H100.gpu_flops / H100.h2d)
    layout = layout_for(model, H100)

    def ttft(n_steps: int) -> float:
        plan = make_plan(
            model,
            H100,
            budget_bytes=n_steps * layout.min_ring_bytes,
            fixed_bytes=0,
            mode="stream_only",
            n_ubatch=n_tokens,
        )
        return plan.predicted_ttft(n_tokens) - plan._prompts.costs(n_tokens).at(n_tokens, 0).preparation.behind(0.0)

    assert ttft(4) == pytest.approx(layout.arena_bytes / H100.h2d, rel=0.15)
    assert ttft(1) > 1.7 * ttft(4)


def test_the_host_prepares_steps_of_prompts() -> None:
    """Its time rises with the square of the step, because of the mask. Tokens and drafts use the graph before again."""
    costs = make_plan(dense(), H100, budget_bytes=6 << 30, fixed_bytes=0)._costs
    token, drafts, step, double = (costs.at(n_tokens, 512).preparation.behind(0.0) for n_tokens in (1, 8, 2048, 4096))
    assert token < drafts < 1e-5
    assert step > 0.01
    assert double > 2.5 * step


def test_the_next_step_is_prepared_while_one_is_computed() -> None:
    plan = make_plan(dense(), H100, budget_bytes=6 << 30, fixed_bytes=0, n_ubatch=2048)
    preparation = plan._prompts.costs(2048).at(2048, 2048).preparation
    alone_s = plan.uncorrected_s("prompt", [GraphSize(2048, 2048, 1)])
    behind_s = plan.predicted_ttft(4096) - plan.predicted_ttft(2048)
    assert alone_s - behind_s == pytest.approx(preparation.ahead_s)
    assert preparation.ahead_s > preparation.then_s > 0.001


def test_long_prompts_are_read_one_after_another() -> None:
    """The first step of a prompt is not prepared while the prompt before it is computed."""
    plan = make_plan(dense(), H100, budget_bytes=6 << 30, fixed_bytes=0, n_ubatch=2048)
    assert plan.predicted_ttft(4096, n_parallel=3) == pytest.approx(3 * plan.predicted_ttft(4096))


def test_the_cpu_waits_for_a_device_that_draws() -> None:
    calm, busy = (
        make_plan(dense(), H100, budget_bytes=6 << 30, fixed_bytes=0, gpu_busy_s=seconds) for seconds in (0.0, 12e-3)
    )
    assert busy._costs.conditions.turn_s - calm._costs.conditions.turn_s == pytest.approx(4e-3)


def test_large_graphs_have_plans_of_their_own() -> None:
    """The CPU's part in a graph of 512 tokens would take 16 times as long with 8,192 tokens."""
    slow = dataclasses.replace(H100, h2d=1e9)
    plan = make_plan(dense(), slow, budget_bytes=8 << 30, fixed_bytes=900 << 20, n_ubatch=8192)
    assert [tier.min_tokens for tier in plan.tiers] == [0, 2, 8, 32, 128, 1024, 4096]
    assert [tier.n_tokens for tier in plan.tiers] == [1, 4, 16, 64, 512, 2048, 8192]
    on_cpu = [tier.cpu_bytes for tier in plan.tiers]
    assert on_cpu[4] > on_cpu[5] > on_cpu[6]
    one = make_plan(dense(), slow, budget_bytes=8 << 30, fixed_bytes=900 << 20, n_ubatch=1)
    assert [tier.n_tokens for tier in one.tiers] == [1]


def test_the_cpu_share_of_a_dense_model_is_spread() -> None:
    model = dense()
    plan = make_plan(model, H100, budget_bytes=2 << 30, fixed_bytes=900 << 20)
    layers = [
        each.layer
        for each, placement in zip(make_ladder(model), plan.tiers[0].placements, strict=True)
        if each.kind == "ffn" and placement == CPU and each.layer is not None
    ]
    assert 10 < len(layers) < 40
    gaps = np.diff([-1, *sorted(layers)])
    assert gaps.max() <= 2 + 40 // len(layers)


def mixture(n_experts: int, n_used: int) -> Model:
    """A mixture of experts; with the same ``n_used / n_experts`` a token reads the same bytes."""
    shards = []
    for i in range(24):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, n_used / n_experts))
    return model_of(shards, 24, n_experts, n_used)


def test_the_cpu_and_the_link_divide_experts_as_a_whole() -> None:
    profile = dataclasses.replace(H100, dram=400e9)  # CPU and link do not slow each other down

    def plan_of(n_experts: int, n_used: int) -> Plan:
        return make_plan(mixture(n_experts, n_used), profile, budget_bytes=3 << 30, fixed_bytes=900 << 20)

    one, eight = plan_of(16, 1), plan_of(128, 8)  # the same bytes for each token
    read_bytes = one.tiers[0].cpu_bytes / 16
    one_s, eight_s = one.predicted_decode_s(), eight.predicted_decode_s()
    alone_s = read_bytes / max(H100.cpu_gemv, H100.h2d)
    assert one_s > alone_s  # one missing expert is computed by the CPU or copied
    assert eight_s < one_s - 0.1 * alone_s


@pytest.mark.parametrize(("n_experts", "n_used"), [(16, 1), (8, 2), (32, 4)])
@pytest.mark.parametrize("weights", ["pinned", "staged"])
def test_a_few_missing_experts_are_copied_wherever_the_cpu_is_quicker(
    n_experts: int, n_used: int, weights: str
) -> None:
    """Else the expert cache would keep for ever the first experts that were chosen. And two sequences are predicted as
    one is: the CPU is not slowed down by copies that there are none of."""
    profile = dataclasses.replace(H100, fingerprint={"device": "CUDA0", "weights": weights}, h2d=25e9)
    plan = make_plan(mixture(n_experts, n_used), profile, budget_bytes=3 << 30, fixed_bytes=900 << 20)
    assert 1 / 64 < plan.expert_stream_share < 1 / 8
    assert plan.predicted_decode_s(2) < 2.05 * plan.predicted_decode_s(1)


def test_copies_by_the_cpu_take_turns_with_its_work() -> None:
    model = dense()

    def plan_with(weights: str, h2d: float) -> Plan:
        profile = dataclasses.replace(H100, fingerprint={"device": "Vulkan0", "weights": weights}, h2d=h2d)
        return make_plan(model, profile, budget_bytes=4 << 30, fixed_bytes=900 << 20)

    for h2d in (9e9, 30e9, 200e9):
        staged, imported = plan_with("staged", h2d).tiers[0], plan_with("imported", h2d).tiers[0]
        turns_s = staged.cpu_bytes / H100.cpu_gemv + staged.streamed_bytes / h2d
        assert staged.predicted_s > 0.99 * turns_s
        assert staged.predicted_s >= imported.predicted_s
        # The CPU computes or copies, whichever is faster; a few small shards are not worth their hand-off.
        slower = staged.streamed_bytes if h2d < H100.cpu_gemv else staged.cpu_bytes
        assert slower < 0.05 * (staged.streamed_bytes + staged.cpu_bytes)


def test_figures_of_an_8b_model_beside_an_h100() -> None:
    """The predictions are in the range between times measured with other placements and the computed best."""
    model = dense()
    for gib, upstream, bound in ((2, 6.9, 10.3), (4, 8.1, 12.0), (8, 12.0, 17.5), (12, 22.3, 34.0)):
        plan = make_plan(model, H100, budget_bytes=gib << 30, fixed_bytes=900 << 20, n_ctx_used=1024, n_ubatch=2048)
        assert plan.bound_decode_tps() == pytest.approx(bound, rel=0.1)
        assert upstream < plan.predicted_decode_tps() < bound
        assert plan.predicted_ttft(1024) < 1.6 / 4
        # The formula for llama.cpp, compared with measured figures: 6.9 to 22.3 tokens/s, 1.57 to 0.56 s.
        assert plan.static_decode_tps() == pytest.approx(upstream, rel=0.15)
        assert plan.static_ttft(1024) == pytest.approx({2: 1.57, 4: 1.41, 8: 0.97, 12: 0.56}[gib], rel=0.2)


def test_each_budget_has_its_own_step() -> None:
    """Streamed weights are copied once for each step: steps are as large as it takes to hide that, or as fits."""
    model, workload = dense(), Workload(8256, 8192, n_ubatch=0)
    steps = estimate_steps(model, "CUDA0", workload)
    assert [size for size, _ in steps.sizes] == [256, 512, 1024, 2048, 4096]

    def plan(budget_bytes: int) -> Plan:
        return plan_workload(model, H100, budget_bytes, workload, DRIVER_BYTES)

    full, floor = plan(0), plan(0).floor_bytes
    assert plan(floor).n_ubatch <= 256
    assert plan(2 << 30).n_ubatch == 4096
    assert full.n_ubatch < plan(12 << 30).n_ubatch  # nothing is copied, so that a small step does as well
    for more in (128 << 20, 512 << 20):
        at = plan(floor + more)
        assert steps.n_bytes(at.n_ubatch) - steps.floor_bytes <= more
        assert at.predicted_ttft(8192) < plan(floor).predicted_ttft(8192)
    with pytest.raises(BudgetBelowFloor):
        plan(floor - 1)


@pytest.mark.parametrize(
    "steps",
    [
        Steps(10, 100, ((256, 100), (512, 200), (4096, 3784))),
        Steps(10, 100, ((256, 100), (512, 200), (1000, 450))),  # the largest is no multiple of 32
        Steps(10, 10, ((32, 50),)),
        Steps(10, 10, ((7, 50),)),
    ],
)
def test_more_room_never_makes_the_largest_step_smaller(steps: Steps) -> None:
    largest = [steps.within(room)[-1] for room in range(10, steps.most_bytes + 2)]
    assert largest == sorted(largest)
    assert largest[-1] == steps.most_tokens
    for room, n_tokens in enumerate(largest, start=10):
        assert steps.n_bytes(n_tokens) <= max(room, steps.floor_bytes)


def test_a_model_whose_tensors_are_all_small() -> None:
    """It has nothing to place: every tensor is resident."""
    core = shard("core", "core", None, [(64, 384), (64, 160)])
    plan = make_plan(model_of([core], 1), H100, budget_bytes=0, fixed_bytes=0)
    assert plan.predicted_decode_tps() > 0


def test_the_floor_has_room_for_small_steps_only() -> None:
    """So it is far below that of a launch with large steps, and hardly depends on the context."""
    model = dense()

    def floor(n_ctx: int, n_ubatch: int = 0) -> int:
        workload = Workload(n_ctx, n_parallel=4, n_ubatch=n_ubatch)
        return plan_workload(model, H100, 0, workload, DRIVER_BYTES).floor_bytes

    assert floor(4096, 256) < floor(4096) < floor(4096, 512) < floor(4096, 4096)
    assert floor(768) <= floor(4096)
    large = estimate_steps(model, "CUDA0", Workload(1 << 17, n_ubatch=0))
    assert large.most_tokens == 1024  # larger ones would take much host memory for their masks


def test_a_prompt_takes_vram_for_its_own_steps_only() -> None:
    model, workload = dense(), Workload(8256, 8192, n_ubatch=0)
    plan = plan_workload(model, H100, 4 << 30, workload, DRIVER_BYTES)
    small = plan_workload(model, H100, 4 << 30, Workload(8256, 8192, n_ubatch=256), DRIVER_BYTES)
    assert plan.n_ubatch == 4096
    assert plan.predicted_ttft(256) == pytest.approx(small.predicted_ttft(256), rel=0.01)
    assert plan.predicted_ttft(8192) < small.predicted_ttft(8192) / 8


def test_a_plan_is_little_work() -> None:
    """Work is counted in function calls, which do not depend on the machine. 1,000 calls take about a millisecond."""

    def calls(n_layer: int, mib: int) -> int:
        model = dense(n_layer)
        layout = layout_for(model, H100)
        return count_calls(lambda: make_plan(model, H100, budget_bytes=mib << 20, fixed_bytes=900 << 20, layout=layout))

    found = [calls(48, mib) for mib in range(2048, 8192, 2048)]
    assert max(found) < 200_000
    assert min(found) < 70_000
    assert calls(96, 2048) < 6 * found[0]


def test_several_long_prompts_are_predicted_with_the_work_of_one() -> None:
    plan = make_plan(dense(8), H100, budget_bytes=2 << 30, fixed_bytes=900 << 20)
    for predict in (plan.predicted_ttft, plan.bound_ttft):
        assert predict(16384, 4) == pytest.approx(4 * predict(16384))
        one, four = (count_calls(partial(predict, 16384, n)) for n in (1, 4))
        assert four < 1.1 * one


def test_summary_is_plain(model_path: Path) -> None:
    model = read_model(model_path)
    steps = estimate_steps(model, "emulated", Workload(512, n_parallel=2, n_ubatch=256))
    fixed = fixed_vram(model, "emulated")
    summary = make_plan(model, H100, budget_bytes=80 << 20, fixed_bytes=fixed, steps=steps).summary(256)
    assert summary["budget_bytes"] == 80 << 20
    tiers = summary["tiers"]
    assert isinstance(tiers, list)
    assert sum(tiers[0][name]["shards"] for name in ("resident", "streamed", "cpu")) == 91
    for key in ("predicted_ttft_s", "predicted_decode_tps", "bound_ttft_s", "bound_decode_tps"):
        assert isinstance(summary[key], float)


def test_a_context_without_room_waits_on_the_host() -> None:
    """The budget is smaller than the KV cache, so the cache of most layers is copied for each graph."""
    model = dense()
    whole = estimate_context(model, "emulated", Workload(1 << 15, 1 << 15))
    assert whole.used == whole.whole > 1 << 30
    assert whole.window * model.n_layer == whole.whole

    def plan(budget_bytes: int, n_used: int) -> Plan:
        context = estimate_context(model, "emulated", Workload(1 << 15, n_used))
        fixed = {"fixed_bytes": 900 << 20, "context": context}
        return make_plan(model, H100, budget_bytes=budget_bytes, n_ctx_used=n_used, n_ubatch=2048, **fixed)

    small, large = plan(3 << 29, 1 << 15), plan(8 << 30, 1 << 15)
    assert small.floor_bytes == large.floor_bytes == plan(3 << 29, 256).floor_bytes <= 3 << 29
    # The part without room in VRAM is copied for each token, in addition to weights.
    missing = whole.used - (3 << 29) + (900 << 20)
    assert small.predicted_decode_tps() < large.predicted_decode_tps()
    streamed = plan(3 << 29, 256)
    alone = make_plan(
        model, H100, budget_bytes=3 << 29, fixed_bytes=900 << 20, n_ctx_used=256, mode="stream_only", n_ubatch=2048
    )
    context = {"fixed_bytes": 900 << 20, "context": whole, "n_ctx_used": 1 << 15, "n_ubatch": 2048}
    both = make_plan(model, H100, budget_bytes=3 << 29, mode="stream_only", **context)
    assert 1 / both.predicted_decode_tps() > 1 / alone.predicted_decode_tps() + missing / H100.h2d
    assert small.predicted_ttft(1 << 15) > large.predicted_ttft(1 << 15)
    assert streamed.tiers[0].resident_bytes > small.tiers[0].resident_bytes


def test_an_answer_waits_for_the_vram_of_the_prompt() -> None:
    """A prompt's compute buffer takes the place of weights and of keys and values, which the first token waits for.
    Then its graph is made anew, and recorded in the second token: 441 kernels."""
    model, prompt_bytes, made_s = dense(), 1 << 30, 441 * 19e-6

    def plan(budget_bytes: int, n_used: int, prompt_bytes: int = prompt_bytes) -> Plan:
        context = estimate_context(model, "CUDA0", Workload(n_used, n_used))
        steps = Steps(0, prompt_bytes, ((2048, prompt_bytes),))
        fixed = {"fixed_bytes": 600 << 20, "steps": steps, "context": context}
        return make_plan(model, H100, budget_bytes=budget_bytes, n_ctx_used=n_used, n_ubatch=2048, **fixed)

    def waits_s(plan: Plan, n_generate: int) -> float:
        return n_generate / plan.predicted_answer_tps(2048, n_generate) - n_generate * plan.predicted_decode_s()

    for displaced in (plan(8 << 30, 1024), plan(3 << 30, 1 << 14)):  # weights; mostly keys and values
        assert waits_s(displaced, 4) - 2 * made_s == pytest.approx(prompt_bytes / H100.h2d, rel=0.15)
        assert waits_s(displaced, 4) - waits_s(displaced, 1) == pytest.approx(made_s, rel=0.02)
        assert waits_s(displaced, 400) == pytest.approx(waits_s(displaced, 4), rel=1e-6)
    assert waits_s(plan(8 << 30, 1024, prompt_bytes=0), 4) == pytest.approx(2 * made_s, rel=0.02)
    # With everything resident at all times the graph stays as it was.
    assert waits_s(plan(24 << 30, 1024), 4) == pytest.approx(0, abs=1e-6)


def test_experts_wait_behind_keys_and_values() -> None:
    """Keys and values of a layer are copied at once. Meanwhile no chosen experts are copied, so a token takes longer
    by what the link does not hide between two layers."""
    model, n_used = experts_model(), 1 << 14
    layout = layout_for(model, H100)
    held = estimate_context(model, "CUDA0", Workload(n_used, n_used)).used
    on_cpu = np.array([shard.kind == "experts" for shard in layout.ladder])

    def decode(n_on_host: int) -> Graph:
        """With everything but experts in VRAM."""
        room = float("inf") if n_on_host == 0 else held * (1 - (n_on_host - 0.5) / model.n_layer)
        conditions = Conditions(8 * layout.min_ring_bytes, n_used, 17e-6, room, kv_held=held)
        return Costs(layout, H100, np.where(on_cpu, 0.0, 1.0), conditions).at(1, n_used)

    none, few = decode(0), decode(6)
    assert few.host_kv.n_layers == 6
    assert few.host_kv.copy_s == pytest.approx(held * 6 / model.n_layer / H100.h2d, rel=0.01)
    waits_s = few.seconds(on_cpu) - none.seconds(on_cpu)
    # Longer contexts have longer copies, of which the link hides no more.
    longer = decode(6)
    longer.host_kv = dataclasses.replace(few.host_kv, copy_s=2 * few.host_kv.copy_s)
    assert longer.seconds(on_cpu) - few.seconds(on_cpu) >= 0.99 * few.host_kv.copy_s
    assert 0 <= waits_s < few.host_kv.copy_s


def test_cached_experts_are_copied_while_a_prompt_is_computed() -> None:
    """A step of a prompt copies them within the device. The device waits for the routers' choices only."""
    model, n_tokens = experts_model(), 1024
    layout = layout_for(model, H100)
    experts = np.array([shard.kind == "experts" for shard in layout.ladder])
    nothing = np.zeros(len(experts), dtype=np.bool_)
    one_bytes = next(shard for shard in layout.ladder if shard.kind == "experts").n_bytes // model.n_expert
    cache_bytes = 2 * model.n_expert_used * model.n_layer * one_bytes
    always_the_same = Routing(np.repeat([[1.0, 0.0]], [8, 120], axis=1))
    conditions = Conditions(3 * layout.min_ring_bytes + cache_bytes, n_tokens, 17e-6, float("inf"), always_the_same)
    cached, resident = (
        Costs(layout, H100, np.where(experts, share, 1.0), conditions).at(n_tokens, 0).computed_s(nothing)
        for share in (0.0, 1.0)
    )
    one_layer_s = 3 * model.n_expert_used * 16e-6  # the first copies have nothing to run beside
    assert 0 <= cached - resident - model.n_layer * conditions.turn_s < one_layer_s


def test_more_context_is_a_higher_floor(model_path: Path, tiny_model: Callable[[str], Path]) -> None:
    for path in (model_path, tiny_model("mamba2"), tiny_model("gemma4"), tiny_model("deepseek2")):
        model = read_model(path)
        workloads = [Workload(n_ctx, 100, n_parallel=4, n_ubatch=256) for n_ctx in (256, 512, 1024)]
        sizes = [estimate_steps(model, "emulated", each).most_bytes for each in workloads]
        assert sizes == sorted(sizes if model.arch == "mamba2" else set(sizes))  # recurrent: one size
        contexts = [estimate_context(model, "emulated", each) for each in workloads]
        assert len({context.used for context in contexts}) == 1
        for less, more in itertools.pairwise([Context(), *contexts]):
            assert (less.whole, less.window) <= (more.whole, more.window)
            assert more.window <= more.whole
        assert fixed_vram(model, "emulated", 7) == fixed_vram(model, "emulated") + 7


def test_verifying_drafts_costs_little_without_experts_and_much_with_cold_ones() -> None:
    """Eight tokens of one sequence in one step read streamed weights once, but each token uses other experts."""

    def eight(model: Model) -> float:
        layout = lay_out(model, "CUDA0")
        budget = layout.least_bytes + layout.arena_bytes // 16
        plan = make_plan(model, H100, budget_bytes=budget, fixed_bytes=0)
        return plan.predicted_decode_s(1, 8) / plan.predicted_decode_s(1, 1)

    cols, attention = 1024, [(1024, 1024), (1024, 256), (1024, 256), (1024, 1024)]
    heads = [shard("core", "core", None, [(cols, 1)])]
    heads += [shard(f"blk.{i}.attention", "attention", i, attention) for i in range(16)]
    ffn = [shard(f"blk.{i}.ffn", "ffn", i, [(cols, 60_000)] * 3) for i in range(16)]
    experts = [shard(f"blk.{i}.experts", "experts", i, [(cols, 64 * 1024)] * 3, 4 / 64) for i in range(16)]
    assert eight(model_of(heads + ffn, 16)) < 2
    assert eight(model_of(heads + experts, 16, 64, 4)) > 3
