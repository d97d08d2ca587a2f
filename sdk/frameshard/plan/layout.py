"""The layout of a model on the shard device: the ladder, its pieces and slabs, and the smallest ring. Sizes are bytes.

The shard device computes the layout (:func:`frameshard.native.lay_out`). This module derives the figures for plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from frameshard import native
from frameshard.plan.ladder import make_ladder
from frameshard.plan.model import Model, Shard

Floats = NDArray[np.float64]
USE_ORDER = {"vision": 0, "attention": 1, "other": 2, "shared": 3, "experts": 4, "ffn": 5, "ffn_down": 6, "output": 7}
"""The order in which a layer's graph uses its kinds of shards."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a model's ladder.

    :param sizes: the shard device's figures. Their fixed part is the core and the scratch buffer, without KV cache,
        compute buffers and driver.
    """

    model: Model = field(repr=False)
    ladder: tuple[Shard, ...] = field(repr=False)
    sizes: native.Layout

    @property
    def min_ring_bytes(self) -> int:
        """The bytes of the smallest ring. Every streamed step fits in it."""
        return self.sizes.min_ring_bytes

    @property
    def least_bytes(self) -> int:
        """The least bytes of VRAM for weights: the smallest ring, or all slabs if these are smaller."""
        return self.sizes.floor_bytes - self.sizes.fixed_bytes

    @property
    def arena_bytes(self) -> int:
        """The bytes of all slabs."""
        return self.sizes.arena_bytes

    def resident_share(self, n_slabs: int) -> Floats:
        """For each shard, the share of its bytes that is in the first ``n_slabs`` slabs; shape [shards]."""
        shard, n_bytes = self.sizes.piece_shards, self.sizes.piece_padded_bytes.astype(np.float64)
        held = np.bincount(shard, weights=n_bytes * (self.sizes.piece_slabs < n_slabs), minlength=len(self.ladder))
        return held / np.bincount(shard, weights=n_bytes, minlength=len(self.ladder))

    @cached_property
    def use_order(self) -> NDArray[np.intp]:
        """The indices of the ladder, in the order in which a graph uses the shards; shape [shards]."""

        def key(i: int) -> tuple[float, int, int]:
            shard = self.ladder[i]
            layer = shard.layer if shard.layer is not None else -1 if shard.kind == "other" else float("inf")
            return layer, USE_ORDER[shard.kind], i

        return np.array(sorted(range(len(self.ladder)), key=key), dtype=np.intp)


@lru_cache(maxsize=8)
def lay_out(model: Model, device: str) -> Layout:
    """The layout of a model on an inner device.

    :param device: the name of the inner device, as in a profile's fingerprint. This machine need not have it.
    """
    ladder = make_ladder(model)
    core = [model.core] if model.core else []
    weights = [
        native.WeightShape(tensor.name, i, tensor.ggml_type, tensor.shape)
        for i, shard in enumerate((*ladder, *core))
        for tensor in shard.tensors
    ]
    return Layout(model, ladder, native.lay_out(device, weights))
