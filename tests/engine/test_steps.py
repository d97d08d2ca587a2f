"""The steps of prompts follow the budget: a real engine process on the emulated device."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineProcess, engine, ids

from frameshard.engine import probe

MIB = 1 << 20
FIELDS: dict[str, Any] = {"device": "emulated:0.05", "n_ctx": 2048, "n_parallel": 1}
PROMPT = "the keeper counts gulls and ships " * 20  # 930 tokens of the tiny models
SHORT = {"max_tokens": 4}


def n_graphs(child: EngineProcess, prompt: str) -> int:
    """The graphs in which a prompt and its first token are computed."""
    before = child.stats()["graphs"]
    assert len(ids(child.run(prompt, params={"max_tokens": 1}))) == 1
    return int(child.stats()["graphs"] - before)


def test_the_floor_is_the_same_after_any_launch(deep_model: Path) -> None:
    fields = {**FIELDS, "device": "emulated"}  # no floor depends on the link
    floors = []
    for budget_bytes in (0, 64 * MIB, 16 * MIB):
        with engine(deep_model, **fields, vram_budget_bytes=budget_bytes) as child:
            assert child.run(PROMPT, params=SHORT)[-1]["ev"] == "done"
            floors.append(child.stats()["floor_bytes"])
    assert len(set(floors)) == 1
    with engine(deep_model, **fields, n_ubatch=2048) as child:  # which is the largest step of the others
        assert child.stats()["floor_bytes"] > 2 * floors[0]


def copies_decide(profile: dict[str, Any]) -> dict[str, Any]:
    """The profile of a machine whose GPU takes no time beside its link, and whose CPU is of no use beside it."""
    factors = {"cpu_flops": 1e-3, "cpu_gemv": 1e-3, "gpu_flops": 1e3, "gpu_gemv": 1e3, "flops": 1e3, "kv_bytes": 1e3}
    for each in (profile, *profile["products"].values(), *profile["attention"].values()):
        for name in each.keys() & factors.keys():
            rates = each[name]
            each[name] = [r * factors[name] for r in rates] if isinstance(rates, list) else rates * factors[name]
    return profile


def test_steps_follow_the_budget(deep_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the floor a prompt is read in small steps, because no others fit. With more VRAM it is read in one, because
    the weights are copied for each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = "emulated:1"
    command = [sys.executable, "-m", "frameshard", "profile", "--model", deep_model, "--device", device]
    subprocess.run([*command, "--threads", "1", "--seconds", "0.5"], check=True, capture_output=True, timeout=300)
    kept = probe.cached_path(probe.fingerprint(device, 1))
    kept.write_text(json.dumps(copies_decide(json.loads(kept.read_text()))))
    with engine(deep_model, **{**FIELDS, "device": device}) as child:
        floor = child.stats()["floor_bytes"]
        seen = []
        for budget_bytes in (floor + 12 * MIB, floor, floor + 12 * MIB):
            child.budget(budget_bytes)
            assert child.wait_for("released")["used_bytes"] <= budget_bytes
            seen.append(n_graphs(child, f"{len(seen)} {PROMPT}"))
            stats = child.stats()
            assert stats["used_bytes"] <= budget_bytes
            assert stats["floor_bytes"] == floor
    assert seen == [1, 4, 1]


@pytest.mark.parametrize("model", ["deep_model", "mamba"])
def test_a_shrink_in_the_middle_of_a_large_step(
    model: str, deep_model: Path, tiny_model: Callable[[str], Path]
) -> None:
    """The step is given up, and the prompt goes on in smaller ones. The answer is that of an undisturbed prompt, also
    if the state cannot be rolled back, so that the prompt is read anew."""
    path = deep_model if model == "deep_model" else tiny_model("mamba2")
    with engine(path, **FIELDS, vram_budget_bytes=0) as child:
        floor = child.stats()["floor_bytes"]
        expected = ids(child.run(PROMPT, params=SHORT))
        for _ in range(2):
            child.budget(floor + 24 * MIB)
            child.wait_for("released")
            before = child.stats()["graphs"]
            job = child.submit(PROMPT, params=SHORT)
            while child.stats()["graphs"] == before:
                time.sleep(0.005)
            child.budget(floor)
            events, released = child.until(job, "released")
            assert released["used_bytes"] <= floor
            assert events[-1]["ev"] == "done", events[-1]
            assert ids(events) == expected
