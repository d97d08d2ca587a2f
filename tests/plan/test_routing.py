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

EVEN = (1 / 128,) * 128
SKEWED = (1 / 16,) * 16 + (0.0,) * 112


def experts() -> Model:
    shards = [shard("output", "output", None, [(2048, 40_000)])]
    for i in range(24):
        shards.append(shard(f"blk.{i}.attention", "attention", i, [(2048, 4096), (4096, 2048)]))
        shards.append(shard(f"blk.{i}.experts", "experts", i, [(2048, 768 * 128)] * 3, 8 / 128))
    return model_of(shards, 24, 128, 8)


def test_chance_is_no_skew() -> None:
    random = np.random.default_rng(3)
    counts = [random.multinomial(4096, EVEN).tolist() for _ in range(40)]
    assert routing.differ(routing.shares(counts), EVEN) < 0.02
    assert routing.differ(routing.shares(counts), ()) < 0.02
    counts = [random.permutation(random.multinomial(4096, SKEWED)).tolist() for _ in range(40)]
    assert routing.differ(routing.shares(counts), SKEWED) < 0.06


def test_little_seen_says_nothing() -> None:
    assert routing.shares([]) == ()
    assert routing.shares([[], [1] * 128]) == ()


def test_counts_are_kept_by_model(moe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = read_model(moe_path)
    assert routing.load(model) == {}
    kept = {"blk.0.experts": [5, 0, 7, 0, 0, 1, 0, 0]}
    routing.save(model, kept)
    assert routing.load(model) == kept
    assert routing.recall(model) == ()  # too few choices
    routing.save(model, {"blk.0.experts": [90, 0, 80, 0, 0, 70, 0, 0]})
    assert routing.recall(model) == routing.shares([[90, 0, 80, 0, 0, 70, 0, 0]]) != ()
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
    model, alike = experts(), tuple([1 / 8] * 8 + [0.0] * 120)
    layout = lay_out(model, "CUDA0")
    plan = make_plan(model, H100, budget_bytes=15 << 28, fixed_bytes=900 << 20, n_ubatch=2048, routing=alike)
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
    model, alike = experts(), tuple([1 / 8] * 8 + [0.0] * 120)
    even, same = (
        make_plan(model, H100, budget_bytes=3 << 30, fixed_bytes=900 << 20, n_ubatch=2048, routing=each)
        for each in (EVEN, alike)
    )
    tier = next(tier for tier in same.tiers if tier.n_tokens == 16)
    assert tier.streamed_bytes > 2 * tier.cpu_bytes
    assert same.predicted_decode_tps(16) > 4 * even.predicted_decode_tps(16)
    assert same.predicted_decode_tps(16) <= 1.01 * same.bound_decode_tps(16)
