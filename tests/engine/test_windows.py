"""Layers with a sliding window keep the cells of their window and of one decode only, in planned mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_driver import engine, ids

from forks import run_script

FEW = {"max_tokens": 4}

CELLS = """
import sys
import numpy as np
from frameshard.engine.runtime import Runtime
from frameshard.plan.memory import estimate_context
from frameshard.plan.workload import Workload
from frameshard.wire.engine import EngineConfig

path, mode, place, out = sys.argv[1:]
config = EngineConfig(path, device="emulated", mode=mode, n_ctx=1024, n_parallel=2, n_ubatch=64, n_threads=1)
found = []

def read(seq, begin, end):
    for at in range(begin, end, 48):
        found.append(runtime.decode_tokens(seq, tokens[at : min(at + 48, end)])[0])

with Runtime.load(config, measure=False) as runtime:
    device, exact = runtime.device, mode == "stream_only"
    if place == "floor":
        device.set_budget(device.stats().floor_bytes, timeout_s=60)
    tokens = [int(token) for token in np.random.default_rng(1).integers(5, 250, 700)]
    read(0, 0, 610)
    for token in range(610, 640):
        found.append(runtime.decode_tokens(0, tokens[token : token + 1])[0])
    cells = 0 if exact else 256  # 32 of the window and 64 of a decode, in whole pages
    assert runtime.llama.sliding_cells == cells
    workload = Workload(1024, 640, n_ubatch=64, exact=exact)
    stats, planned = device.stats(), estimate_context(runtime.model_info, "emulated", workload)
    if place == "vram":
        assert (stats.kv_bytes, stats.kv_host_bytes) == (planned.used, 0)
    else:  # the KV window is in VRAM
        assert stats.kv_host_bytes == planned.used and 0 < stats.kv_bytes <= planned.window
    assert stats.used_bytes <= stats.budget_bytes

    assert runtime.trim(0, 500) == 500  # the cells from 469 on are needed, and there
    read(0, 500, 640)
    data = runtime.save(0, lambda n_bytes: np.empty(n_bytes, np.uint8))
    assert runtime.restore(1, data, 640)
    for seq in (0, 1):
        read(seq, 640, 700)
    if not exact:
        assert runtime.trim(0, 300) == 0 == runtime.length(0)
    else:
        runtime.clear(0)
    first = len(found)
    read(0, 0, 610)
    again = np.abs(np.stack(found[first:]) - np.stack(found[: len(found) - first]))
    assert again.max() <= (0 if place == "vram" else 0.01)  # at the floor plans differ
np.save(out, np.stack(found))
"""

TAKEN_BACK = """
import contextlib, sys
import numpy as np
from frameshard.engine.llama import DecodeAborted, Rows
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

config = EngineConfig(sys.argv[1], device="emulated", n_ctx=1024, n_ubatch=128, n_threads=1)
with Runtime.load(config, measure=False) as runtime:
    assert runtime.llama.sliding_cells == 256
    assert runtime.can_decode_ahead(112) and not runtime.can_decode_ahead(113)
    tokens = [int(token) for token in np.random.default_rng(1).integers(5, 250, 800)]

    def read(abort_at=None):
        for i in range(runtime.length(0) // 64 - 8, 4):
            if i == abort_at:
                runtime.abort()
            rows = Rows(0, tokens[512 + 64 * i :][:64], "none" if i < 3 else "last")
            outputs = runtime.decode([rows], ahead=i < 3)
        return runtime.logits(outputs[0]).copy()

    runtime.decode_tokens(0, tokens[:512])
    whole = read()
    for abort_at in range(4):
        runtime.clear(0)
        runtime.decode_tokens(0, tokens[:512])
        with contextlib.suppress(DecodeAborted):
            read(abort_at)
        runtime.resume()
        assert runtime.length(0) == 512 + 64 * max(abort_at - 1, 0)
        assert np.array_equal(read(), whole)
"""


def run(script: str, *args: object) -> None:
    result = run_script(script, *args)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("model", ["gemma3", "gemma3n", "gemma4"])
def test_fewer_cells_give_the_same_logits(model: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside a context with all cells; also at the floor, where most of the KV cache is in host memory."""
    found = []
    for mode, place in (("stream_only", "vram"), ("planned", "vram"), ("planned", "floor")):
        out = tmp_path / f"{mode}-{place}.npy"
        run(CELLS, tiny_model(model), mode, place, out)
        found.append(np.load(out))
    whole, few, at_floor = found
    # The order of sums differs. With other cells logits would differ by units.
    assert np.abs(few - whole).max() < 0.2 < 2 < np.abs(whole[1:] - whole[:-1]).max(axis=1).min()
    assert np.abs(at_floor - whole).max() < 0.2


def test_steps_that_fail_leave_the_cells_before_them(tiny_model: Callable[[str], Path]) -> None:
    """Two steps are under way, and the second may have begun to write over the window of the first."""
    run(TAKEN_BACK, tiny_model("gemma3"))


def test_a_beginning_that_is_out_of_reach_is_read_once_more(tiny_model: Callable[[str], Path]) -> None:
    lore = "the tale of the keeper " * 12
    with engine(tiny_model("gemma3"), n_ctx=1024, n_ubatch=64, n_parallel=1) as child:

        def reused(conversation: str, rest: str) -> int:
            events = child.run(lore + rest, conversation=conversation, params=FEW)
            assert len(ids(events)) == 4
            return int(events[0]["n_reused"])

        n_lore = child.run(lore, conversation="first", params=FEW)[0]["n_prompt"]
        assert reused("first", "and the ship " * 30) == pytest.approx(n_lore, abs=2)
        assert reused("first", "and the ship " * 30 + "came home ") > n_lore  # the conversation goes on
        assert reused("second", "they met ") == 0  # its window lies behind the lore
        n_reused = reused("third", "who they met ")
        assert n_reused == pytest.approx(n_lore, abs=2)
        assert reused("first", "and the ship " * 30 + "was lost ") == n_reused  # a copy is used whole or not at all
