"""Predictions that follow what serving shows, in real engine processes on the emulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineProcess, engine

from frameshard.engine import probe
from frameshard.engine.practice import Practice
from frameshard.native import Stats
from frameshard.plan import corrections, profile
from frameshard.plan.corrections import Kind
from frameshard.plan.model import read_model

DEVICE = "emulated:1"
FIELDS: dict[str, object] = {"device": DEVICE, "mode": "planned", "speculate": "off", "n_ctx": 1024, "n_parallel": 1}
BUDGET = 40 << 20
N_PROMPT = 400
TOO_FAST = 12
MOST_JOBS = 40


def faster(profile: dict[str, Any]) -> dict[str, Any]:
    """The profile of a machine that is faster in everything."""
    of_matrices = ("cpu_flops", "gpu_flops", "kv_bytes", "flops")
    for each in (*profile["products"].values(), *profile["attention"].values()):
        each |= {name: [rate * TOO_FAST for rate in each[name]] for name in of_matrices if name in each}
    profile["copies"]["h2d"] = [rate * TOO_FAST for rate in profile["copies"]["h2d"]]
    rates = ("h2d", "d2h", "dram", "cpu_gemv", "gpu_gemv", "cpu_flops", "gpu_flops")
    return {**profile, **{name: profile[name] * TOO_FAST for name in rates}, "handoff_s": 0.0}


def faster_cpu(profile: dict[str, Any], times: float) -> dict[str, Any]:
    """The profile of a machine whose CPU is faster."""
    for each in profile["products"].values():
        each["cpu_flops"] = [rate * times for rate in each["cpu_flops"]]
        each["cpu_beside_copies"] *= times
    return {**profile, "cpu_gemv": profile["cpu_gemv"] * times}


def predicted(child: EngineProcess) -> tuple[float, float]:
    """The seconds of a prompt and of a token."""
    child.send(op="plan", seq=1, budgets=[BUDGET], prompt_tokens=N_PROMPT)
    (row,) = child.wait_for("plan")["rows"]
    return row["ttft_s"], 1 / row["tokens_per_second"]


def measured(child: EngineProcess) -> tuple[float, float]:
    """The same, of a job with as long a prompt."""
    (done,) = (each for each in child.run("castle " * N_PROMPT, params={"max_tokens": 48}) if each["ev"] == "done")
    assert abs(done["n_prompt"] - N_PROMPT) < 40
    return done["prefill_s"], done["decode_s"] / (done["n_generated"] - 1)


def follow(predictions: tuple[float, float], took: list[tuple[float, float]]) -> bool:
    """Whether predictions of a prompt and of a token are what jobs took."""
    each = zip(predictions, *took, strict=True)
    return all(min(times) / 1.5 < prediction < max(times) * 1.5 for prediction, *times in each)


def never() -> Stats:
    raise AssertionError("the device is not asked")


def frameshard(command: str, model: Path, *options: str) -> str:
    given = ["--model", str(model), "--device", DEVICE, "--threads", "1", *options]
    run = subprocess.run(
        [sys.executable, "-m", "frameshard", command, *given], capture_output=True, text=True, timeout=300, check=True
    )
    return " ".join(run.stdout.split())


@pytest.fixture(scope="module")
def profile_text(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The profile of this machine, as a command keeps it."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("measured")))
        frameshard("profile", shallow_model, "--seconds", "0.5")
        return probe.cached_path(probe.fingerprint(DEVICE, 1)).read_text()


def keep(changed: dict[str, Any]) -> None:
    """Keeps a profile as that of this machine."""
    kept = probe.cached_path(probe.fingerprint(DEVICE, 1))
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(changed))


def test_predictions_follow_what_serving_shows(
    shallow_model: Path, profile_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept profile says that the machine is much faster than it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep(faster(json.loads(profile_text)))
    with engine(shallow_model, vram_budget_bytes=BUDGET, **FIELDS) as child:
        before = predicted(child)
        took = [measured(child) for _ in range(3)]
        while not follow(after := predicted(child), took) and len(took) < MOST_JOBS:
            took.append(measured(child))  # the CPU's factor changed last: then decodes are compared anew
    assert follow(after, took)
    assert all(1.2 * before[work] < after[work] for work in (0, 1))  # a busy machine measures a slow profile
    with engine(shallow_model, vram_budget_bytes=BUDGET, **FIELDS) as child:
        assert predicted(child) == pytest.approx(after, rel=0.05)  # they are kept
    assert "corrected by what this model took here" in frameshard("plan", shallow_model, "--vram-budget", "40")


def test_the_speed_of_the_cpu_is_learnt(
    shallow_model: Path, profile_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second kept profile says that the CPU is 8 times as fast as it is. The first shows how fast it is: on a busy
    machine it is much faster in decodes than in measurements."""

    def learnt(name: str, times: float) -> float:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        keep(faster_cpu(json.loads(profile_text), times))
        with engine(shallow_model, vram_budget_bytes=BUDGET, **FIELDS) as child:
            for _ in range(2):
                measured(child)
        (known,) = (tmp_path / name).rglob("corrections-*.json")
        return float(json.loads(known.read_text())["cpu_factor"])

    first = learnt("first", 4.0)
    assert first != 1.0
    assert learnt("second", 8 * 4.0 / first) > 2


def test_equal_ratios_are_kept_until_predictions_stay_the_same(
    shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ratio makes the mean count more, so predictions change though the mean does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, rates = read_model(shallow_model), profile.load("h100-80gb-pcie5-16c")
    practice, kind = Practice(model, rates, "planned", stats=never), Kind.of("decode", 600)
    for _ in range(20):
        practice.corrections = practice.corrections.with_ratio(kind, 4.0)
        practice.keep()
        kept = corrections.load(model, rates, "planned")
        assert kept.factor("decode", 600) == pytest.approx(practice.corrections.factor("decode", 600), rel=0.02)
