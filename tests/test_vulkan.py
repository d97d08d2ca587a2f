"""The shard device over Vulkan. ``make vulkan`` runs this on Mesa's software Vulkan; elsewhere it is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from frameshard import ggml

pytestmark = pytest.mark.skipif(
    "FRAMESHARD_VULKAN" not in os.environ, reason="needs the GPU module for Vulkan, and a Vulkan device: make vulkan"
)

# The model's floor is 12 MiB and its full size 160 MiB with these arguments.
BUDGETS = "floor,60,100,130,full"


def test_a_time_line_is_refused() -> None:
    """Before the model is loaded, and by the shard device itself."""
    device = os.environ["FRAMESHARD_VULKAN"]
    command = [sys.executable, "-m", "frameshard", "bench", "--model", "smollm2-135m", "--device", device]
    done = subprocess.run([*command, "--timeline", "t.png"], capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert f"--timeline cannot be recorded on {device}" in done.stderr
    assert "loading" not in done.stderr
    code = "import sys; from frameshard.native import ShardDevice as D; "
    code += "D(sys.argv[1], vram_budget_bytes=0, n_threads=1).start_trace()"
    done = subprocess.run([sys.executable, "-c", code, device], capture_output=True, text=True, timeout=600)
    assert "frameshard.errors.Unsupported: no time line on Vulkan" in done.stderr


def test_an_opened_device() -> None:
    """The loader uses our layer. The profile that is measured without a model has the rates of imported memory, as a
    model's weights do."""
    device = os.environ["FRAMESHARD_VULKAN"]
    code = "import sys; from frameshard.native import ShardDevice as D; "
    code += "print(D(sys.argv[1], vram_budget_bytes=0, n_threads=1).stats().host_weights.name)"
    environment = os.environ | {"VK_LOADER_DEBUG": "layer"}
    command = [sys.executable, "-c", code, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f'Insert instance layer "{ggml.VULKAN_LAYER}"' in done.stderr
    assert done.stdout.split()[-1] == "IMPORTED"


SEQUENCES = """
import sys
import numpy as np
from frameshard.engine.runtime import Runtime
from frameshard.models import resolve
from frameshard.wire.engine import EngineConfig

config = EngineConfig(str(resolve("smollm2-135m")), device=sys.argv[1], n_ctx=512, n_ubatch=8, n_parallel=3)
with Runtime.load(config) as runtime:
    tokens = runtime.tokenizer.tokenize("The keeper counts ships, gulls and the hours until the lamp is lit.")
    found = [runtime.decode_tokens(seq, tokens)[0] for seq in range(3)]
    print(float(np.abs(np.stack(found) - found[0]).max()))
"""


def test_every_sequence_computes_the_same() -> None:
    """Each has its own part of the KV cache, of which only the cells in use have VRAM. The loader uses our layer."""
    command = [sys.executable, "-c", SEQUENCES, os.environ["FRAMESHARD_VULKAN"]]
    environment = os.environ | {"VK_LOADER_DEBUG": "layer"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f'Insert instance layer "{ggml.VULKAN_LAYER}"' in done.stderr
    assert float(done.stdout) < 0.01


WITH_EXPERTS = """
import random
import sys
from pathlib import Path
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
import numpy as np

model, device, budget_mb, mode, *more = sys.argv[1:]
config = EngineConfig(model, device=device, n_ctx=512, n_ubatch=64, n_parallel=1, mode=mode,
                      vram_budget_bytes=int(budget_mb) << 20)
draw = random.Random(1)

def logits(vocabulary):
    return runtime.logits(runtime.decode([Rows(0, [draw.randrange(8, vocabulary)])])[0])

with Runtime.load(config) as runtime:
    runtime.decode_tokens(0, [draw.randrange(8, 1000) for _ in range(40)])
"""
"""The start of the programs below: an engine of a model with experts, which has read a prompt."""

AHEAD = """
    rows = [logits(200).copy() for _ in range(100)]
    stats = runtime.device.stats()
    np.save(more[0], np.stack(rows))
    print(stats.experts_ahead, stats.experts_again)
"""

KEPT = """
    def held_bytes():
        return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

    for i in range(1000):
        logits(1000)
        if i == 400:
            before, streamed = held_bytes(), runtime.device.stats().experts_streamed
        if i % 300 == 299:
            runtime.trim(0, 40)
    print(held_bytes() - before, runtime.device.stats().experts_streamed - streamed)
"""

PARKED = """
    for _ in range(100):
        logits(1000)
        runtime.device.park()
        runtime.unpark()
"""


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool], str]:
    """Writes a model with experts, which are chosen equally often if the argument is true; returns its path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "profiles" / "tools")
    synth = __import__("synth_gguf")

    def write(even: bool) -> str:
        shape = synth.Shape("qwen3moe", 8, 256, 4, 2, 64, 512, 1024, "Q4_0", 64, 4, 256, even=even)
        synth.write(shape, str(tmp_path / "experts.gguf"))
        return str(tmp_path / "experts.gguf")

    return write


def _run(program: str, model: str, budget_mb: int, mode: str, *more: str) -> list[int]:
    """Runs a program on a model with experts; returns the numbers that it prints."""
    arguments = [model, os.environ["FRAMESHARD_VULKAN"], str(budget_mb), mode, *more]
    command = [sys.executable, "-c", WITH_EXPERTS + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_experts_that_are_computed_before_the_choice_is_known(experts: Callable[[bool], str], tmp_path: Path) -> None:
    """The device starts with the experts of its cache while the CPU waits for the router's choice alone, on the one
    queue that all streams share. Where an expert was missing it computes the layer again."""
    model = experts(False)
    found = {mb: _run(AHEAD, model, mb, "stream_only", str(tmp_path / f"{mb}.npy")) for mb in (400, 40)}
    assert found[400] == [0, 0]  # all is resident
    ahead, again = found[40]
    assert ahead > 10 * again > 0
    logits = [np.load(tmp_path / f"{mb}.npy") for mb in (400, 40)]
    assert np.abs(logits[0] - logits[1]).max() < 0.001


def test_copies_of_experts_keep_no_memory(experts: Callable[[bool], str]) -> None:
    """ggml-vulkan keeps some 7 KiB for each wait of one stream for another until the CPU waits for both."""
    more_bytes, streamed = _run(KEPT, experts(True), 16, "planned")
    assert streamed > 300
    assert more_bytes < 3500 * streamed


def test_a_device_that_is_parked_after_copies_of_experts(experts: Callable[[bool], str]) -> None:
    """ggml-vulkan's events point to what they were recorded in. Parking frees that with its stream."""
    _run(PARKED, experts(True), 20, "planned")


def test_a_rush_of_budgets(experts: Callable[[bool], str]) -> None:
    """The engine lives, holds each budget and answers with the same texts."""
    rush = str(Path(__file__).parent / "hostile" / "budgets.py")
    command = [sys.executable, rush, experts(False), "--device", os.environ["FRAMESHARD_VULKAN"]]
    done = subprocess.run([*command, "--seconds", "20", "--seed", "6"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(3600)
def test_the_text_is_the_same_at_five_budgets() -> None:
    command = [sys.executable, "-m", "frameshard", "verify", "--json", "--model", "smollm2-135m"]
    command += ["--device", os.environ["FRAMESHARD_VULKAN"], "--vram-budget", BUDGETS, "--ctx", "256"]
    # Small batches: software Vulkan compiles the kernels for large ones for minutes.
    command += ["--ubatch", "8", "--prompt", "48", "--generate", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500)
    assert done.stdout, done.stderr[-4000:]
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 10
    assert all(row["within_budget"] for row in rows), rows
    for row in rows:
        if row["mode"] == "stream_only":
            assert row["max_abs_logit_diff"] == 0, row
        else:  # the CPU rounds in other ways than the device, and so short a text says little about perplexity
            assert row["top1_agreement"] >= 0.95, row
            assert row["kl"] < 0.02, row
