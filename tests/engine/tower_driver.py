"""Encodes pictures, for test_towers.py: python tower_driver.py MODEL MMPROJ DEVICE OUT.npz INPUT...

An input is an image's size, WxH, or seconds of sound; with ~ behind it, it has the same size and is another one. On the
shard device everything is encoded once more, with the least budget that is enough. It is a process of its own, because
there is one device per process.

It prints the index of the first picture of each input, the budget that each picture needs, for each pass, and the peak
of the second pass, in bytes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from frameshard.engine import vision
from frameshard.engine.runtime import Runtime
from frameshard.engine.sounds import Sound, tone
from frameshard.errors import BudgetBelowFloor
from frameshard.wire.engine import EngineConfig


def read(text: str) -> vision.Image | Sound:
    other, text = text.endswith("~"), text.removesuffix("~")
    if "x" not in text:
        return tone(float(text), rate=8_000 if other else 16_000)
    width, height = map(int, text.split("x"))
    pixels = np.random.default_rng(width * height + other).integers(0, 256, 3 * width * height, dtype=np.uint8)
    return vision.Image(width, height, pixels.tobytes())


def main(model: str, mmproj: str, device: str, out: str, *inputs: str) -> None:
    config = EngineConfig(model=model, mmproj=mmproj, device=device, n_ctx=1024, n_parallel=1, n_threads=1)
    found: dict[str, npt.NDArray[np.float32]] = {}
    figures: dict[str, Any] = {"begins": [], "floors": []}
    with Runtime.load(config) as runtime:
        tower = vision.Vision(runtime, mmproj)
        tower.embeddings.set_limit(0)  # the second encode must not come from there
        pictures = []
        for each in map(read, inputs):
            figures["begins"].append(len(pictures))
            parts = tower.tokenize(tower.marker, [each], add_special=True)
            pictures += [part for part in parts if isinstance(part, vision.Picture)]
        shards = runtime.device

        def encode(name: str) -> None:
            floors = []
            for i, picture in enumerate(pictures):
                tower.encode(picture)
                assert picture.embedding is not None
                found[f"{name} {i}"] = picture.embedding
                floors.append(0 if shards is None else shards.stats().image_floor_bytes)
            figures["floors"].append(floors)

        encode("all")
        if shards is not None:
            floors = figures["floors"][0]
            floor = max(floors)
            shards.set_budget(floor, timeout_s=10)
            shards.reset_peak()
            encode("least")
            figures["peak"] = shards.stats().peak_bytes
            if floor > shards.stats().floor_bytes:  # else the language model needs as much
                shards.set_budget(floor - 1, timeout_s=10)
                try:
                    tower.encode(pictures[floors.index(floor)])
                except BudgetBelowFloor as error:
                    figures["needed"] = error.detail["floor_bytes"]
        tower.close()
    np.savez(out, **found)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
