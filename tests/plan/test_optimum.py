"""Plans of small models, compared with the best placement. All placements are tried, with the same predictions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_planner import H100, model_of, shard

from frameshard.native import CPU
from frameshard.plan import profile
from frameshard.plan.costs import Costs
from frameshard.plan.layout import lay_out
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, TierPlan, make_plan
from frameshard.plan.weights import Mask

FIXED = 500 << 20
MACHINES = {"h100": H100} | {
    name: profile.load(name) for name in ("laptop-rtx-4060-8gb", "desktop-rtx-3060-12gb", "desktop-rtx-5090-32gb")
}


def dense(n_layer: int) -> Model:
    shards = [shard("output", "output", None, [(4096, 16384)])]
    for i in range(n_layer):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(4096, 4096), (4096, 5120), (4096, 1024)]))
        shards.append(shard(f"blk.{i}.ffn", "ffn", i, [(4096, 11520)] * 2))
        shards.append(shard(f"blk.{i}.ffn_down", "ffn_down", i, [(11520, 4096)]))
    return model_of(shards, n_layer)


def experts(n_layer: int) -> Model:
    shards = [shard("output", "output", None, [(2048, 40_000)])]
    for i in range(n_layer):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.shared", "shared", i, [(2048, 512)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, 8 / 128))
    return model_of(shards, n_layer, 128, 8)


def plan_of(model: Model, name: str, share: float) -> Plan:
    layout = lay_out(model, "CUDA0")
    budget = FIXED + layout.min_ring_bytes + int(share * layout.arena_bytes)
    return make_plan(model, MACHINES[name], budget_bytes=budget, fixed_bytes=FIXED, n_ubatch=512)


def least(costs: Costs, tier: TierPlan) -> float:
    """The least time of a tier's graph, over all placements of the shards that are not resident."""
    share = costs.resident_share
    decode = tier.n_tokens <= 4
    graph = costs.at(tier.n_tokens, costs.conditions.n_ctx_used if decode else 0, tier.n_tokens if decode else 1)
    left_out = np.flatnonzero(share < 1)
    placement: Mask = np.zeros(len(share), dtype=np.bool_)
    best = float("inf")
    for choice in itertools.product((False, True), repeat=len(left_out)):
        placement[left_out] = choice
        best = min(best, graph.seconds(placement))
    return best


@pytest.mark.parametrize("model", [dense(3), experts(3)], ids=["dense", "experts"])
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("share", [0.1, 0.6, 0.85])
def test_no_placement_is_much_better(model: Model, name: str, share: float) -> None:
    """The first tier is decoding. The last is a prompt, whose time is the TTFT."""
    plan = plan_of(model, name, share)
    for tier in plan.tiers:
        assert tier.predicted_s <= 1.04 * least(plan._costs, tier)
    assert plan.predicted_ttft(512) == pytest.approx(plan.tiers[-1].predicted_s)


@pytest.mark.parametrize("name", MACHINES)
def test_no_other_resident_set_decodes_much_faster(name: str) -> None:
    """Compares the ladder, which does not depend on the machine, with every set of whole shards of the same size or
    less."""
    for model in (dense(2), experts(2)):
        plan = plan_of(model, name, 0.5)
        costs, decode = plan._costs, plan.tiers[0]
        best = float("inf")
        for kept in itertools.product((0.0, 1.0), repeat=len(costs.layout.ladder)):
            share = np.array(kept)
            if float((costs.shards.n_bytes * share).sum()) <= decode.resident_bytes:
                other = Costs(costs.layout, costs.profile, share, costs.conditions)
                best = min(best, least(other, decode))
        assert decode.predicted_s <= 1.1 * best


def test_a_split_uses_both_ways_at_once() -> None:
    """In the best placement some shards are on the CPU and some are streamed."""
    plan = plan_of(dense(3), "h100", 0.1)
    placements = plan.tiers[0].placements
    assert 0 < sum(each == CPU for each in placements[plan.resident :]) < len(placements) - plan.resident
