"""Encodes one picture, for test_tiling.py: python encode_driver.py MODEL MMPROJ DEVICE OUT.npz

On the shard device it does so at several budgets. One of them is the smallest that is enough for the image. It is a
process of its own, because there is one device per process.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import numpy.typing as npt

from frameshard.engine import vision
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor
from frameshard.wire.engine import EngineConfig

SIZE = (672, 644)
"""2,208 patches of 14 x 14 pixels: more than one tile of a feed-forward block."""
MIB = 1 << 20


def main(model: str, mmproj: str, device: str, out: str) -> None:
    width, height = SIZE
    pixels = np.random.default_rng(3).integers(0, 256, 3 * width * height, dtype=np.uint8).tobytes()
    config = EngineConfig(
        model=model, mmproj=mmproj, device=device, n_ctx=1024, n_parallel=1, n_threads=1, mode="stream_only"
    )
    found: dict[str, npt.NDArray[np.float32]] = {}
    figures = []
    with Runtime.load(config, measure=False) as runtime:
        eyes = vision.Vision(runtime, mmproj)
        eyes.embeddings.set_limit(0)  # the second encode must not come from there

        def encode() -> npt.NDArray[np.float32]:
            image = vision.Image(width, height, pixels)
            parts = eyes.tokenize(eyes.marker, [image], add_special=True)
            picture = next(part for part in parts if isinstance(part, vision.Picture))
            eyes.encode(picture)
            assert picture.embedding is not None
            return picture.embedding

        found["all"] = encode()
        shards = runtime.device
        if shards is not None:
            floor = shards.stats().image_floor_bytes
            for more in (0, 8):
                shards.set_budget(floor + more * MIB, timeout_s=10)
                shards.reset_peak()
                found[str(more)] = encode()
                figures.append({"budget": floor + more * MIB, "peak": shards.stats().peak_bytes})
            shards.set_budget(floor - 1, timeout_s=10)
            try:
                encode()
            except BudgetBelowFloor as error:
                figures.append({"refused_at": floor - 1, "needs": error.detail["floor_bytes"]})
        eyes.close()
    np.savez(out, **found)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
