"""A small random model of every architecture that llama.cpp's own test can save: three sequences against one at a time
in llama.cpp on the CPU. ``make architectures`` makes the models and runs this; elsewhere it is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MODELS = sorted(Path(os.environ.get("FRAMESHARD_ARCHITECTURES", "/nowhere")).glob("*.gguf"))

SEQUENCES = """
import json, sys
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
import numpy as np

path, mode, share, kv_type, out = sys.argv[1:]
config = EngineConfig(
    path, device="emulated", mode=mode, n_ctx=512, n_parallel=3, n_ubatch=64, n_threads=1, kv_type=kv_type
)
texts = np.random.default_rng(1).integers(5, 120, (3, 256)).tolist()
held, histories, logits = [[], [], []], [], []  # what each sequence has; before each row of logits; the rows
with Runtime.load(config) as runtime:
    stats = runtime.device.stats()
    floor = stats.floor_bytes
    runtime.device.set_budget(floor + int(float(share) * (stats.full_bytes - floor)), timeout_s=60)
    runtime.placement.replan()

    def read(*seqs, n):
        steps = {}
        for seq in seqs:
            steps[seq] = texts[seq][len(held[seq]) : len(held[seq]) + n]
            held[seq] += steps[seq]
            histories.append(list(held[seq]))
        if len(seqs) == 1:
            logits.append(runtime.decode_tokens(seqs[0], steps[seqs[0]])[0])
        else:
            rows = runtime.decode([Rows(seq, steps[seq]) for seq in seqs])
            logits.extend(runtime.logits(row).copy() for row in rows)

    for seq, n in enumerate((128, 96, 32)):
        read(seq, n=n)
    read(0, 1, 2, n=16)
    read(1, 2, n=1)
    read(0, 2, n=1)
    if runtime.llama.can_trim and runtime.trim(1, 64) == 64:
        held[1] = held[1][:64]
        read(1, n=64)
    data = runtime.save(0, lambda n: np.empty(n, np.uint8))
    runtime.clear(2)
    assert runtime.restore(2, data, len(held[0]))
    held[2], texts[2] = list(held[0]), texts[0]
    read(2, n=16)
    read(0, n=16)
np.save(out + ".npy", np.stack(logits))
json.dump(histories, open(out + ".json", "w"))
"""

ALONE = """
import json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
import numpy as np

path, kv_type, histories, out = sys.argv[1:]
config = EngineConfig(path, device="cpu", n_ctx=512, n_parallel=1, n_ubatch=64, n_threads=1, kv_type=kv_type)
logits = []
with Runtime.load(config) as runtime:
    for history in json.load(open(histories)):
        runtime.clear(0)
        logits.append(runtime.decode_tokens(0, history)[0])
np.save(out, np.stack(logits))
"""


def run(code: str, *arguments: object) -> None:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "errors.Unsupported:" in ran.stderr:
        pytest.skip(ran.stderr.strip().rpartition("\n")[2])
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.skipif(not MODELS, reason="needs llama.cpp's test of architectures: make architectures")
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_logits_are_those_of_llama_cpp(path: Path, kv_type: str, tmp_path: Path) -> None:
    """llama.cpp reads each text from its beginning, in a context of its own."""
    # The VRAM budget is a share of what lies between the floor and everything resident.
    for mode, share in (("stream_only", 0.0), ("planned", 0.5)):
        run(SEQUENCES, path, mode, share, kv_type, tmp_path / mode)
    run(ALONE, path, kv_type, tmp_path / "planned.json", tmp_path / "known.npy")
    known = np.load(tmp_path / "known.npy")
    for mode in ("stream_only", "planned"):
        found = np.load(tmp_path / f"{mode}.npy")
        # Rounding differs with the cells and the steps. A wrong weight or cell changes logits by their size.
        assert np.abs(found - known).max() <= 0.01 * np.abs(known).max(), mode
