"""A small random model of every architecture that llama.cpp's own test can save, in three sequences, against llama.cpp
on the CPU. ``make architectures`` makes the models and runs this; elsewhere it is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

MODELS = sorted(Path(os.environ.get("FRAMESHARD_ARCHITECTURES", "/nowhere")).glob("*.gguf"))

SEQUENCES = """
import sys
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
import numpy as np

path, device, mode, share, kv_type, out = sys.argv[1:]
config = EngineConfig(
    path, device=device, mode=mode, n_ctx=512, n_parallel=3, n_ubatch=64, n_threads=1, kv_type=kv_type
)
texts = np.random.default_rng(1).integers(5, 120, (3, 256)).tolist()
logits = []
with Runtime.load(config) as runtime:
    if runtime.device is not None:
        stats = runtime.device.stats()
        floor = stats.floor_bytes
        runtime.device.set_budget(floor + int(float(share) * (stats.full_bytes - floor)), timeout_s=60)
        runtime.placement.replan()

    def read(seq, begin, end, text=None):
        logits.append(runtime.decode_tokens(seq, texts[seq if text is None else text][begin:end])[0])

    ends = [128, 96, 32]
    for seq, end in enumerate(ends):
        read(seq, 0, end)
    for _ in range(2):  # decodes of all sequences together
        rows = runtime.decode([Rows(seq, texts[seq][end : end + 16]) for seq, end in enumerate(ends)])
        logits += [runtime.logits(row).copy() for row in rows]
        ends = [end + 16 for end in ends]
    if runtime.llama.can_trim and runtime.trim(1, 64) == 64:
        read(1, 64, 128)
    data = runtime.save(0, lambda n: np.empty(n, np.uint8))
    runtime.clear(2)
    assert runtime.restore(2, data, ends[0])
    read(2, ends[0], ends[0] + 16, text=0)
    read(0, ends[0], ends[0] + 16)
np.save(out, np.stack(logits))
"""


def logits_of(path: Path, tmp_path: Path, *, device: str, mode: str, share: float, kv_type: str) -> np.ndarray:
    """The logits of the last token of each decode, a row for each.

    :param share: the VRAM budget between the floor (0.0) and everything resident (1.0).
    """
    out = tmp_path / "logits.npy"
    command = [sys.executable, "-c", SEQUENCES, str(path), device, mode, str(share), kv_type, str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "errors.Unsupported:" in ran.stderr:
        pytest.skip(ran.stderr.strip().rpartition("\n")[2])
    assert ran.returncode == 0, ran.stderr[-4000:]
    logits: np.ndarray = np.load(out)
    return logits


@pytest.mark.skipif(not MODELS, reason="needs llama.cpp's test of architectures: make architectures")
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_logits_are_those_of_llama_cpp(path: Path, kv_type: str, tmp_path: Path) -> None:
    known = logits_of(path, tmp_path, device="cpu", mode="planned", share=1.0, kv_type=kv_type)
    for mode, share in (("stream_only", 0.0), ("planned", 0.5)):
        found = logits_of(path, tmp_path, device="emulated", mode=mode, share=share, kv_type=kv_type)
        # Rounding differs where a sliding window has other cells. A wrong weight or cell changes logits by their size.
        assert np.abs(found - known).max() <= 0.01 * np.abs(known).max(), mode
