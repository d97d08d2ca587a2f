"""Encodes pictures, for test_towers.py. It runs in a process of its own, because there is one device per process."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from frameshard.engine import vision
from frameshard.engine.runtime import Runtime
from frameshard.engine.sounds import Sound, tone
from frameshard.errors import BudgetBelowFloor
from frameshard.wire.engine import EngineConfig

M_MMAP_THRESHOLD = -3  # of malloc.h


def read(text: str) -> vision.Image | Sound:
    other, text = text.endswith("~"), text.removesuffix("~")
    if "x" not in text:
        return tone(float(text), rate=8_000 if other else 16_000)
    width, height = map(int, text.split("x"))
    pixels = np.random.default_rng(width * height + other).integers(0, 256, 3 * width * height, dtype=np.uint8)
    return vision.Image(width, height, pixels.tobytes())


def main(model: Path, mmproj: Path, device: str, out: Path, inputs: Sequence[str]) -> None:
    """Writes the embeddings of ``inputs`` to ``out``.npz, and to ``out``.json the budgets that they need, for each
    pass, and the peak of the second pass, in bytes.

    An input is an image's size, WxH, or seconds of sound; with ~ behind it, it has the same size and is another one.
    Of its tiles with the same number of tokens, and so with the same graph, one is encoded. On the shard device
    everything is encoded once more, with the least budget that is enough.
    """
    # libmtmd's Pixtral multiplies memory that was never written by 0, and old memory may hold NaN. New memory does not.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    config = EngineConfig(model=str(model), device=device, n_ctx=1024, n_parallel=1, n_threads=1, mmproj=str(mmproj))
    found: dict[str, npt.NDArray[np.float32]] = {}
    figures: dict[str, Any] = {"floors": []}
    with Runtime.load(config, measure=False) as runtime:
        tower = vision.Vision(runtime, str(mmproj))
        tower.embeddings.set_limit(0)  # the second encode must not come from there
        pictures: dict[str, vision.Picture] = {}
        for each in inputs:
            for part in tower.tokenize(tower.marker, [read(each)], add_special=True):
                if isinstance(part, vision.Picture):
                    pictures.setdefault(f"{each} {part.n_tokens}", part)
        shards = runtime.device

        def encode(name: str) -> None:
            floors = []
            for key, picture in pictures.items():
                tower.encode(picture)
                assert picture.embedding is not None
                found[f"{name} {key}"] = picture.embedding
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
                    tower.encode([*pictures.values()][floors.index(floor)])
                except BudgetBelowFloor as error:
                    figures["needed"] = error.detail["floor_bytes"]
        tower.close()
    np.savez(out.with_suffix(".npz"), **found)
    out.with_suffix(".json").write_text(json.dumps(figures))
