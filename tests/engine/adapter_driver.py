"""adapter_driver.py MODEL A B: checks that two adapters that are streamed at the floor give the bits of llama.cpp.

In a process of its own, because a process has one shard device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from frameshard import cpu, errors
from frameshard.engine.runtime import Runtime
from frameshard.plan.adapter import read_adapter
from frameshard.plan.header import read_header
from frameshard.wire import messages as m
from frameshard.wire.engine import EngineConfig

SETS = ((), (m.Adapter("a"),), (m.Adapter("a", 0.7), m.Adapter("b", -0.5)), ())
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_parallel": 2, "n_ubatch": 32, "n_threads": 1}


def logits_of_each_set(runtime: Runtime) -> list[npt.NDArray[np.float32]]:
    found = []
    for adapters in SETS:
        runtime.adapters.use(runtime.adapters.resolve(adapters))
        runtime.clear(0)
        found += [runtime.decode_tokens(0, tokens)[0] for tokens in (list(range(20, 60)), [7], [8])]
    return found


def main(model: str, *paths: str) -> None:
    files = dict(zip("ab", map(Path, paths), strict=True))
    # Repacked weights of the CPU backend round differently beside an adapter of experts. This loads them as they are.
    cpu.must_avoid_amx = lambda: True
    launched = tuple(f"{name}={path}" for name, path in files.items())
    with Runtime.load(EngineConfig(model, device="cpu", adapters=launched, **OPTIONS)) as runtime:
        expected = logits_of_each_set(runtime)
    assert not any(np.array_equal(expected[0], other) for other in (expected[3], expected[6]))

    with Runtime.load(EngineConfig(model, device="emulated", mode="stream_only", **OPTIONS)) as runtime:
        device = runtime.device
        assert device is not None
        before = device.stats().floor_bytes
        for name, path in files.items():
            runtime.load_adapter(name, read_adapter(path, runtime.model_info))
        floor = device.stats().floor_bytes
        matrices = [tensor for path in files.values() for tensor in read_header(path).tensors]
        assert floor >= before + sum(tensor.n_bytes for tensor in matrices)
        device.set_budget(floor, 60)
        device.reset_peak()
        found = logits_of_each_set(runtime)
        assert [np.array_equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)
        assert device.stats().peak_bytes <= floor == device.stats().floor_bytes
        with pytest.raises(errors.BudgetBelowFloor):
            runtime.load_adapter("c", read_adapter(files["a"], runtime.model_info))
        for name in files:
            runtime.adapters.unload(name)
        runtime.decode_tokens(0, [9])
        assert device.stats().floor_bytes == before


if __name__ == "__main__":
    main(*sys.argv[1:])
