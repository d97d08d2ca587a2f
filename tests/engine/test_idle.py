"""The profile that is measured in idle moments, in real engine processes on the emulated device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engine_driver import EngineProcess, Event, engine, text, user

from frameshard.engine import probe
from frameshard.plan import profile

CASTLE = user("Who lives in the old castle?")
DEVICE = "emulated:2"
FIELDS: dict[str, object] = {"device": DEVICE, "mode": "stream_only", "n_ctx": 512, "n_parallel": 1}
MIB = 1 << 20
BUDGET = 80 * MIB


def predicted(child: EngineProcess) -> Event:
    child.send(op="plan", seq=1, budgets=[BUDGET, 2 * BUDGET], prompt_tokens=256)
    rows: Event = child.wait_for("plan")["rows"]
    return rows


def test_a_launch_plans_from_an_estimate_and_measures_when_idle(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = probe.cached_path(probe.fingerprint(DEVICE, 1))
    deadline = time.monotonic() + 240
    with engine(model_path, vram_budget_bytes=BUDGET, **FIELDS) as child:
        assert child.stats()["profile"] == "estimated"
        assert not kept.exists()
        answer = text(child.run(CASTLE))
        estimated = predicted(child)
        # Jobs and smaller budgets that come while it measures go first and lose nothing.
        for pause_s in (1.1, 1.4, 1.7):
            time.sleep(pause_s)
            assert text(child.run(CASTLE)) == answer
            time.sleep(pause_s)
            child.budget(BUDGET - 8 * MIB, timeout_s=120)
            assert child.wait_for("released")["used_bytes"] <= BUDGET - 8 * MIB
            child.budget(BUDGET, timeout_s=120)
            child.wait_for("released")
        while (stats := child.stats())["profile"] != "measured":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert stats["peak_bytes"] <= stats["budget_bytes"] == BUDGET
        measured = predicted(child)
        assert measured != estimated
        assert text(child.run(CASTLE)) == answer
    assert profile.load(kept).attention
    before = kept.stat().st_mtime_ns
    for corrections in kept.parent.glob("corrections-*"):
        corrections.unlink()  # the last job taught how fast the machine is: test_practice.py
    with engine(model_path, vram_budget_bytes=BUDGET, **FIELDS) as child:
        assert child.stats()["profile"] == "measured"
        assert predicted(child) == measured  # plans of a launch with the kept profile are the same
    assert kept.stat().st_mtime_ns == before


def test_nothing_is_measured_where_a_host_limit_has_no_room_for_it(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = probe.cached_path(probe.fingerprint(DEVICE, 1))
    deadline, said = time.monotonic() + 240, ""
    with engine(model_path, vram_budget_bytes=BUDGET, host_budget_bytes=1024 * MIB, **FIELDS) as child:
        while "the host limit has no room to measure this machine" not in said:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            said += capfd.readouterr().err
        assert child.stats()["profile"] == "estimated"
        assert not kept.exists()
