"""The paper's evaluation, predicted by profiles/tools/evaluate.py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from frameshard.plan.model import read_model

TOOLS = Path(__file__).parents[2] / "profiles" / "tools"


def document(command: Sequence[str]) -> dict[str, Any]:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return __import__("evaluate")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return __import__("synth_gguf")


def test_a_few_cells(shapes: ModuleType, tmp_path: Path) -> None:
    args = ("--model", "minitron-8b-f16", "--ctx", "4096", "--vram", "2,4,8,16")
    result = document([sys.executable, str(TOOLS / "evaluate.py"), "--system", "cli2", *args, "--json"])
    rows = result["rows"]
    assert [row["budget_gib"] for row in rows] == [2, 4, 8, 16]
    assert {row["prompt_tokens"] for row in rows} == {4035}
    for row in rows:
        cell = row["spec_sheet"]
        assert cell["e2e_s"] == pytest.approx(cell["ttft_s"] + 100 / cell["tps"])
        assert row["fitted"] is None  # plain llama.cpp was published for cli3 alone
    seconds = [row["spec_sheet"]["e2e_s"] for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    assert [row["published"] and row["published"]["tps"] for row in rows] == [None, None, None, 22.3]
    assert result["slower_with_more_vram"] == []

    path = tmp_path / "minitron-8b-f16.gguf"
    shapes.write(shapes.SHAPES["minitron-8b-f16"], str(path), with_weights=False)
    profile = TOOLS.parent / "cli2-rtx-5070-ti-16gb.json"
    command = [sys.executable, "-m", "frameshard", "plan", "--model", str(path), "--profile", str(profile), "--json"]
    command += ["--prompt", "4035", "--ctx", "4096", "--parallel", "1", "--vram-budget", "4GiB"]
    plan = document(command)
    (planned,) = plan["rows"]
    same = rows[1]["spec_sheet"]
    assert planned["ubatch"] == same["ubatch"]
    assert planned["predicted_ttft_s"] == pytest.approx(same["ttft_s"])
    assert planned["predicted_decode_tps"] == pytest.approx(same["tps"])


def test_plain_llama_cpp_is_predicted_from_half_of_its_cells(tool: ModuleType) -> None:
    profile = tool.profiles.load(TOOLS.parent / "cli3-rtx-5090-32gb.json")
    found = tool.models(["qwen3-30b-a3b-q4_0"])
    rates, report = tool.calibrate("Q4_0", found, profile)
    for each in report:
        assert each["held_out"] == each["cells"] // 2
        assert each["fitted"]["median"] < 0.1
        assert each["fitted"]["median"] < each["spec_sheet"]["median"]
    model = found["qwen3-30b-a3b-q4_0"]
    fitted = tool.fitted_profile(profile, rates, model)
    everything = tool.predict(model, fitted, 1024, 889, 24)["tps"]
    assert everything == pytest.approx(161, rel=0.2)  # llama.cpp's, with everything on the GPU
    assert everything < tool.predict(model, profile, 1024, 889, 24)["tps"]


def test_the_fit_finds_known_rates_and_leaves_out_what_it_cannot_tell(tool: ModuleType) -> None:
    terms = np.random.default_rng(7).uniform(1, 9, (40, 3)) * [1e9, 1e12, 1]
    terms[:, 2] = 0
    seconds = terms @ [1 / 2e10, 1 / 3e13, 0] + 0.01
    assert tool.fit(terms, np.full(40, 0.01), seconds) == pytest.approx([2e10, 3e13, 0])


def test_more_vram_that_is_slower_is_listed(tool: ModuleType) -> None:
    cells = [(2, 1.0, 10.0), (4, 0.9, 9.0), (6, math.nan, math.nan), (8, 0.9, 20.0)]
    rows = [
        {"model": "m", "context": 1024, "budget_gib": gib, "spec_sheet": tool.latencies(ttft, tps)}
        for gib, ttft, tps in cells
    ]
    rows[2]["spec_sheet"] = None  # below the floor
    found = tool.regressions(rows, "spec_sheet")
    assert [(each["figure"], each["budget_gib"]) for each in found] == [("tps", 4), ("e2e_s", 4)]
    assert found[0]["by"] == pytest.approx(10 / 9)


def test_what_was_not_published_is_refused(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (["--vram", "3"], ["--ctx", "x"], ["--model", "gpt"]):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--system", "cli1", *args])
        with pytest.raises(SystemExit) as refused:
            tool.main()
        assert refused.value.code == 2
        assert args[0] in capsys.readouterr().err


def test_a_file_without_weights_has_the_same_plan_and_k_quants_have_sane_weights(
    shapes: ModuleType, tmp_path: Path
) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    both = []
    for with_weights in (True, False):
        path = tmp_path / f"{with_weights}.gguf"
        shapes.write(shapes.SHAPES["tiny-moe-q2_k"], str(path), with_weights=with_weights)
        both.append(read_model(path))
    assert both[0].shards == both[1].shards
    assert both[0].file_bytes == both[1].file_bytes
    seen = set()
    for tensor in GGUFReader(tmp_path / "True.gguf").tensors:
        if tensor.name.endswith("weight") and tensor.tensor_type != GGMLQuantizationType.F32:
            weights = dequantize(tensor.data, tensor.tensor_type)
            seen.add(tensor.tensor_type.name)
            assert 0.01 < float(weights.std()) < 0.05
    assert seen == {"Q2_K", "Q3_K", "Q4_K", "Q6_K"}
