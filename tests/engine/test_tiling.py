"""A vision tower with window attention: on the shard device, which computes it in tiles, and with stock libmtmd."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and a tower of one layer, with the architecture of Qwen2.5-VL. The feed-forward block is larger than a
    step, and its matrices are streamed in pieces."""
    tool = HERE.parent.parent / "profiles" / "tools" / "synth_vlm.py"
    spec = importlib.util.spec_from_file_location("synth_vlm", tool)
    assert spec is not None
    assert spec.loader is not None
    synth: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = synth
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tool.parent)  # as for a program in that directory
        spec.loader.exec_module(synth)
    shape = synth.Shape(1, 256, 2, 1, 256, 512, 1, 320, 4, 6784)
    folder = tmp_path_factory.mktemp("vlm")
    model, mmproj = folder / "model.gguf", folder / "mmproj.gguf"
    synth.model(shape, str(model))
    synth.tower(shape, str(mmproj))
    return model, mmproj


def encoded(pair: tuple[Path, Path], device: str, out: Path) -> tuple[dict[str, Any], list[dict[str, int]]]:
    command = [sys.executable, str(HERE / "encode_driver.py"), *map(str, pair), device, str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    with np.load(out) as arrays:
        return dict(arrays), json.loads(result.stdout)


def test_tiles_change_nothing_but_the_vram(pair: tuple[Path, Path], tmp_path: Path) -> None:
    expected, _ = encoded(pair, "cpu", tmp_path / "cpu.npz")
    found, figures = encoded(pair, "emulated", tmp_path / "emulated.npz")
    scale = np.linalg.norm(expected["all"])
    assert np.linalg.norm(found["all"] - expected["all"]) < 1e-3 * scale
    for budget in ("0", "8"):
        assert np.array_equal(found[budget], found["all"]), budget
    for each in figures[:2]:
        assert each["peak"] <= each["budget"]
    # The error names the smallest budget that is enough for the image.
    assert figures[2] == {"refused_at": figures[0]["budget"] - 1, "needs": figures[0]["budget"]}
    # Without tiles, a mask of 2,208 x 2,208 values as F32 and F16 would take 28 MiB more.
    assert figures[0]["budget"] < 184 * MIB, figures
