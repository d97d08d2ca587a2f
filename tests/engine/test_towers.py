"""A tiny tower of every kind that libmtmd reads: on the shard device, at several budgets, and with stock libmtmd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
import tiny_towers

DRIVER = Path(__file__).parent / "tower_driver.py"
INPUTS = {"vision": ("200x150", "96x300", "700x650"), "audio": ("1", "7.5")}


def encoded(
    model: Path, mmproj: Path, device: str, out: Path, inputs: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    command = [sys.executable, str(DRIVER), str(model), str(mmproj), device, str(out), *inputs]
    # libmtmd's Pixtral multiplies memory that was never written by 0, and old memory may hold NaN. New memory does not.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert result.returncode == 0, result.stderr[-4000:]
    with np.load(out) as arrays:
        return dict(arrays), json.loads(result.stdout)


@pytest.mark.parametrize("name", tiny_towers.TOWERS)
def test_embeddings_are_those_of_libmtmd(name: str, tmp_path: Path) -> None:
    tower = tiny_towers.TOWERS[name]
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make(tower.model, model)
    tiny_towers.make(name, mmproj)
    inputs = INPUTS[tower.kind]
    expected, _ = encoded(model, mmproj, "cpu", tmp_path / "cpu.npz", inputs)
    first = expected["all 0"]
    assert first.std() > 1e-3
    assert not np.array_equal(first, expected[f"all {len(expected) - 1}"])
    found, figures = encoded(model, mmproj, "emulated", tmp_path / "emulated.npz", inputs)
    for i in range(len(expected)):
        known = expected[f"all {i}"]
        assert np.linalg.norm(found[f"all {i}"] - known) < 3e-3 * np.linalg.norm(known), i
        for budget in ("0", "8"):
            assert np.array_equal(found[f"{budget} {i}"], found[f"all {i}"]), (i, budget)
    floors = figures["floors"][0]
    assert figures["floors"][1:] == [floors, floors]  # whatever was encoded before
    assert max(figures["peaks"]) <= 0
    assert figures.get("needed", max(floors)) == max(floors)
