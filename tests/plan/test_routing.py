"""Counts of chosen experts, and the plans that are made from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from test_planner import H100, model_of, shard

from frameshard.plan import routing
from frameshard.plan.costs import Costs
from frameshard.plan.layout import lay_out
from frameshard.plan.model import Model, read_model
from frameshard.plan.plans import make_plan

EVEN_SHARES = (1 / 128,) * 128
SKEWED_SHARES = (1 / 16,) * 16 + (0.0,) * 112
ALIKE_SHARES = (1 / 8,) * 8 + (0.0,) * 120
EVEN, SKEWED, ALIKE = (routing.of_shares([each], 8) for each in (EVEN_SHARES, SKEWED_SHARES, ALIKE_SHARES))


def experts() -> Model:
    shards = [shard("output", "output", None, [(2048, 40_000)])]
    for i in range(24):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, 8 / 128))
    return model_of(shards, 24, 128, 8)


def test_chance_is_no_skew() -> None:
    random = np.random.default_rng(3)
    counts = [random.multinomial(4096, EVEN_SHARES).tolist() for _ in range(40)]
    assert routing.differ(routing.of_counts(counts, 8), EVEN) < 0.02
    assert routing.differ(routing.of_counts(counts, 8), None) < 0.02
    counts = [random.permutation(random.multinomial(1 << 16, SKEWED_SHARES)).tolist() for _ in range(40)]
    assert routing.differ(routing.of_counts(counts, 8), SKEWED) < 0.06


def test_experts_that_no_token_chose_remain_rare() -> None:
    """A thousand tokens chose the same 8 experts. The next thousand do not choose as many others."""
    found = routing.of_counts([[1000] * 8 + [0] * 120], 8)
    assert found is not None
    assert 8 <= found.used(1000).sum() < 8.5


def test_little_seen_says_nothing() -> None:
    assert routing.of_counts([], 8) is None
    assert routing.of_counts([[], [1] * 128], 8) is None


def test_choices_that_only_prompts_notice_count() -> None:
    """Of a token's choices 2 % differ. But 1,024 tokens use nearly all experts, and not a sixteenth of them."""
    few = [0.98 / 8] * 8 + [0.02 / 120] * 120
    assert routing.differ(routing.of_shares([few], 8), ALIKE) > 0.5
    assert routing.differ(ALIKE, ALIKE) == 0.0
    assert routing.differ(None, None) == 0.0
    assert routing.differ(ALIKE, None) > 0.9


def test_one_layer_that_chooses_evenly_is_not_all() -> None:
    """A prompt copies all experts of this layer, and of the others as few as without it."""
    layers = [EVEN_SHARES] + [ALIKE_SHARES] * 23
    alike, mixed, even = (
        make_plan(experts(), H100, budget_bytes=6 << 30, fixed_bytes=900 << 20, n_ubatch=2048, routing=each)
        for each in (ALIKE, routing.of_shares(layers, 8), EVEN)
    )
    assert mixed._costs.experts.routing.used(1024).sum() == pytest.approx((128 + 23 * 8) / 24, rel=0.001)
    more, most = (each.predicted_ttft(1024) - alike.predicted_ttft(1024) for each in (mixed, even))
    assert 0 < more < 0.1 * most


def test_counts_are_kept_by_model(moe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = read_model(moe_path)
    assert routing.load(model) == {}
    kept = {"blk.0.experts": [5, 0, 7, 0, 0, 1, 0, 0]}
    routing.save(model, kept)
    assert routing.load(model) == kept
    assert routing.recall(model) is None  # too few choices
    routing.save(model, {"blk.0.experts": [90, 0, 80, 0, 0, 70, 0, 0]})
    recalled = routing.recall(model)
    assert recalled is not None
    expected = np.array([90, 80, 70, 0, 0, 0, 0, 0]) / 240 * model.n_expert_used
    assert recalled.likely == pytest.approx(np.array([expected]), abs=0.02)
    (path,) = tmp_path.rglob("routing-*.json")
    for broken in (
        "",
        "[]",
        "[" * 100_000,
        '{"blk.0.experts": [Infinity, 0, 0, 0, 0, 0, 0, 0]}',
        '{"blk.0.experts": [1]}',
        '{"blk.0.experts": 5}',
        '{"blk.0.experts": ["a"]}',
    ):
        path.write_text(broken)
        assert routing.load(model) == {}


def test_a_cache_is_made_for_experts_that_are_chosen_often() -> None:
    model, fixed = experts(), 900 << 20
    for gib in (6, 8, 10):
        even, skewed = (
            make_plan(model, H100, budget_bytes=gib << 30, fixed_bytes=fixed, n_ubatch=2048, routing=each)
            for each in (EVEN, SKEWED)
        )
        plain = make_plan(model, H100, budget_bytes=gib << 30, fixed_bytes=fixed, n_ubatch=2048)
        assert even.ring_bytes == plain.ring_bytes
        assert even.predicted_decode_tps() == pytest.approx(plain.predicted_decode_tps())
        assert skewed.ring_bytes >= even.ring_bytes
        assert skewed.predicted_decode_tps() > 1.25 * even.predicted_decode_tps()
        # For a prompt only the experts in use are copied, and cached ones are not.
        assert skewed.predicted_ttft(1024) < 0.6 * even.predicted_ttft(1024)
        assert skewed.predicted_ttft(1024) >= 0.99 * skewed.bound_ttft(1024)
        assert skewed.predicted_decode_tps() <= 1.01 * skewed.bound_decode_tps()


def test_in_little_vram_the_cache_takes_the_place_of_attention() -> None:
    """Attention is copied ahead. An expert is known only when it is needed, so the token waits for its copy."""
    model = experts()
    layout = lay_out(model, "CUDA0")
    plan = make_plan(model, H100, budget_bytes=15 << 28, fixed_bytes=900 << 20, n_ubatch=2048, routing=ALIKE)
    ring, n_slabs = layout.sizes.fit(plan.budget_bytes - plan.fixed_bytes, 3 * layout.min_ring_bytes)
    conditions = dataclasses.replace(plan._costs.conditions, ring=ring)
    without = Costs(layout, H100, layout.resident_share(n_slabs), conditions)
    attention = without.shards.masks["attention"]
    assert without.resident_share[attention].all()
    assert not plan._costs.resident_share[attention].all()
    assert without.at(1, 512).seconds(without.shards.masks["experts"]) > 2 * plan.predicted_decode_s()


def test_sequences_that_choose_alike_stream_only_what_they_use() -> None:
    """For sixteen sequences that use the same experts, these are copied once. The CPU would compute them for each
    token."""
    model = experts()
    even, same = (
        make_plan(model, H100, budget_bytes=3 << 30, fixed_bytes=900 << 20, n_ubatch=2048, routing=each)
        for each in (EVEN, ALIKE)
    )
    tier = next(tier for tier in same.tiers if tier.n_tokens == 16)
    assert tier.streamed_bytes > 2 * tier.cpu_bytes
    assert same.predicted_decode_tps(16) > 4 * even.predicted_decode_tps(16)
    assert same.predicted_decode_tps(16) <= 1.01 * same.bound_decode_tps(16)
