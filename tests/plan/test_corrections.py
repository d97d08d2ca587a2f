"""Corrections of predicted times, from what graphs took."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from test_planner import H100
from test_routing import experts

from frameshard.plan import corrections
from frameshard.plan.corrections import Corrections, Kind
from frameshard.plan.plans import GraphSize, Plan, make_plan


def taught(*ratios: float, n_context: int = 600) -> Corrections:
    known = corrections.NONE
    for ratio in ratios:
        known = known.with_ratio(Kind.of("decode", n_context), ratio)
    return known


def test_what_was_seen_corrects_such_work_and_fades_with_the_context() -> None:
    known = taught(*[1.5] * 20)
    assert known.factor("decode", 600) == pytest.approx(1.5, rel=0.02)
    factors = [known.factor("decode", 512 << i) for i in range(8)]
    assert factors == sorted(factors, reverse=True)
    assert 1.0 < factors[-1] < 1.15
    assert known.factor("prompt", 600) == 1.0


def test_it_follows_a_change_and_ignores_a_disturbance() -> None:
    assert taught(*[1.5] * 20, *[0.8] * 30).factor("decode", 600) == pytest.approx(0.8, rel=0.05)
    assert taught(1.5, 1.5, 1000.0, 0.0001) == taught(1.5, 1.5)
    assert math.isclose(taught(1.2, 1.4).factor("decode", 600), taught(1.4, 1.2).factor("decode", 600))


def test_only_predictions_change_and_budgets_keep_their_order() -> None:
    plans = [make_plan(experts(), H100, budget_bytes=n << 28, fixed_bytes=1 << 28) for n in range(3, 9)]
    known = taught(1.5).with_ratio(Kind.of("prompt", 600), 2.0)
    corrected = [replace(plan, corrections=known) for plan in plans]
    for plan, other in zip(plans, corrected, strict=True):
        assert other.tiers == plan.tiers
        assert plan.predicted_decode_tps() / other.predicted_decode_tps() == pytest.approx(1.5**0.8, rel=0.001)
        assert other.predicted_ttft(512) / plan.predicted_ttft(512) == pytest.approx(2.0**0.8, rel=0.001)
        assert other.bound_ttft(512) == plan.bound_ttft(512)


def test_a_slower_cpu_gets_less_of_a_decode() -> None:
    def plan(cpu_factor: float) -> Plan:
        known = taught(1.5).with_cpu_factor(cpu_factor)
        assert (known.factor("decode", 600) > 1) == (cpu_factor == 1.0)  # else it was seen with another plan
        return make_plan(experts(), H100, budget_bytes=1 << 30, fixed_bytes=1 << 28, corrections=known)

    fast, plain, slow = (plan(factor) for factor in (0.25, 1.0, 4.0))
    graph = GraphSize(1, 512, 1)
    assert [each.cpu_factor for each in (fast, plain, slow)] == [0.25, 1.0, 4.0]
    assert fast.expert_stream_share < plain.expert_stream_share < slow.expert_stream_share
    assert fast.predicted_decode_s() < plain.predicted_decode_s() < slow.predicted_decode_s()
    assert fast.cpu_rate(graph) > plain.cpu_rate(graph) > slow.cpu_rate(graph) > 0
    assert fast.predicted_decode_tps() <= fast.bound_decode_tps()
    assert slow.bound_decode_tps() == plain.bound_decode_tps()


def test_they_are_kept_for_one_model_and_one_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, known = experts(), replace(taught(1.5, 1.25), cpu_factor=1.125)
    corrections.save(known, model, H100, "planned")
    assert corrections.load(model, H100, "planned") == known
    assert corrections.load(model, replace(H100, h2d=H100.h2d * 1.01), "planned") == corrections.NONE
    assert corrections.load(replace(model, file_bytes=7), H100, "planned") == corrections.NONE
    assert corrections.load(model, H100, "stream_only") == corrections.NONE
    (file,) = tmp_path.rglob("corrections-*.json")
    whole = file.read_text()
    changed = (
        ("decode", "dance"),
        ('"n": 2', '"n": 0'),
        ("1.125", "-1.125"),
        ("1.125", "NaN"),
        ("1.125", "1e9"),
        ('"n": 2', '"n": Infinity'),
        ('"doubled": 0', '"doubled": -1'),
        ('"doubled": 0', '"doubled": 1000000000'),
    )
    assert all(old in whole for old, _ in changed)
    for damaged in ("", "{}", "[1]", "[" * 100_000, whole[:-9], *(whole.replace(*each) for each in changed)):
        file.write_text(damaged)
        assert corrections.load(model, H100, "planned") == corrections.NONE
