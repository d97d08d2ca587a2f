"""``frameshard verify`` on the emulated device, with every kind of model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_models
from frameshard.cli import common
from frameshard.cli import verify as verify_command
from frameshard.cli.verify import agrees

QUANTISED = {"qwen3moe"}  # llama.cpp repacks Q4_0 on the CPU, so it rounds differently from any device
LONGER = ("--generate", "32")  # of such a model: by fewer tokens the perplexities of its modes differ by chance


def verify(model: Path, budgets: str, *extra: str, threads: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "frameshard", "verify", "--model", str(model), "--device", "emulated"),
            *("--threads", str(threads), "--generate", "16", "--vram-budget", budgets, "--json", *extra),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows_of(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert result.stdout, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


def check(result: subprocess.CompletedProcess[str], n_budgets: int, *, agrees_with_stock: bool = True) -> None:
    """Checks the rows of so many budgets, and the exit status. Where the model need not agree with stock llama.cpp, its
    planned rows must agree with its stream-only rows."""
    rows = rows_of(result)
    assert [row["mode"] for row in rows] == ["stream_only", "planned"] * n_budgets
    assert result.returncode == (0 if all(row["ok"] for row in rows) else 1), result.stderr
    for at, row in enumerate(rows):
        assert row["within_budget"], row
        if row["mode"] == "stream_only":
            assert row["max_abs_logit_diff"] == 0.0, row
            assert row["peak_vram_mb"] <= row["budget_mb"], row
        elif not agrees_with_stock:
            ratio = row["perplexity"] / rows[at - 1]["perplexity"]
            assert abs(ratio - 1) <= verify_command.PERPLEXITY_RATIO, row
        if agrees_with_stock:
            assert row["ok"], row


def test_smollm2_at_three_budgets(model_path: Path) -> None:
    check(verify(model_path, "floor,60,full", "--prompt", "64"), 3)


def test_many_layers_at_many_budgets(deep_model: Path) -> None:
    result = verify(deep_model, "floor,11,15,19,0")
    check(result, 5)
    assert rows_of(result)[-1]["budget_mb"] > 19  # 0 is no limit


def test_a_slow_link_sends_work_to_the_cpu_and_changes_no_answer(shallow_model: Path) -> None:
    check(verify(shallow_model, "30", "--device", "emulated:0.5"), 1)


def test_mixture_of_experts(shallow_moe: Path) -> None:
    check(verify(shallow_moe, "floor,70", "--prompt", "64"), 2)


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_two_threads(tiny_model: Callable[[str], Path], name: str) -> None:
    """The model is small, because ggml's threads keep the cores busy while they wait."""
    longer = LONGER if name in QUANTISED else ()
    result = verify(tiny_model(name), "floor", "--device", "emulated:0.5", *longer, threads=2)
    check(result, 1, agrees_with_stock=name not in QUANTISED)


@pytest.mark.parametrize("name", tiny_models.ARCHS)
def test_every_kind_of_architecture(tiny_model: Callable[[str], Path], name: str) -> None:
    longer = LONGER if name in QUANTISED else ()
    check(verify(tiny_model(name), "floor,full", *longer), 2, agrees_with_stock=name not in QUANTISED)


SAVE = """
import sys
from frameshard import cpu
cpu.check()
import llama_cpp
params = llama_cpp.llama_model_default_params()
params.use_extra_bufts = False  # else it saves weights in an order for this CPU
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
llama_cpp.llama_model_save_to_file(model, sys.argv[2].encode())
"""


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "kimi-linear"])
def test_a_file_that_llama_cpp_has_saved(tiny_model: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """It has all keys that llama.cpp knows, with 0 or infinity where the model has no such value."""
    saved = tmp_path / f"{name}.gguf"
    subprocess.run([sys.executable, "-c", SAVE, str(tiny_model(name)), str(saved)], check=True, timeout=60)
    longer = LONGER if name in QUANTISED else ()
    check(verify(saved, "floor", *longer), 1, agrees_with_stock=name not in QUANTISED)


def test_what_agrees_with_stock() -> None:
    """Either nearly the same answers, or no more difference than rounding makes."""
    same = {"top1_agreement": 0.98, "perplexity": 85.9, "perplexity_ref": 85.6, "kl": 0.004}
    assert agrees(same, 0)
    for wrong in ({"top1_agreement": 0.95}, {"perplexity": 87.0}):
        assert not agrees(same | wrong, 0.003)
        assert agrees(same | wrong, 0.004)


def test_logits_that_are_no_numbers_fail() -> None:
    """JSON has no NaN and no infinity: such figures are null."""
    reference = np.random.default_rng(0).random((3, 10), dtype=np.float32)
    logits = reference.copy()
    logits[1, 2] = np.nan
    found = verify_command._agreement(logits, reference, [1, 2, 3, 4, 5])
    assert not agrees(found, spread=0.01)
    document = json.loads(
        common.to_json(verify_command._finite({"processors": found, "rows": [{**found, "ok": False}]}))
    )
    for figures in (document["processors"], document["rows"][0]):
        assert figures["kl"] is figures["perplexity"] is None
        assert figures["perplexity_ref"] > 0


def test_too_few_tokens_for_a_change_of_the_budget(model_path: Path) -> None:
    result = verify(model_path, "full", "--generate", "1")
    assert result.returncode == 2
    assert "--generate must be at least 3" in json.loads(result.stdout)["error"]["message"]


def test_a_budget_below_the_floor_names_the_floor(model_path: Path) -> None:
    result = verify(model_path, "1", "--prompt", "16")
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert error["name"] == "budget_below_floor"
    floor = -(-error["detail"]["floor_bytes"] // 2**20)
    assert f"{floor} MiB" in error["message"]


def test_the_cpu_is_no_shard_device(model_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "frameshard", "verify", "--model", str(model_path)),
            *("--device", "cpu", "--vram-budget", "9"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert "--device emulated" in result.stderr
