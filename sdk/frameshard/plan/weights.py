"""The weights of a model as arrays. Arrays have one value for each shard of the ladder. Sizes are bytes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from frameshard.plan.layout import USE_ORDER, Layout
from frameshard.plan.profile import BYTES_PER_WEIGHT, Kind, kind_of
from frameshard.plan.routing import Routing, even

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Shards:
    """The sizes and kinds of weights of the model's shards."""

    def __init__(self, layout: Layout) -> None:
        ladder = layout.ladder
        self.n_bytes: Floats = np.array([shard.n_bytes for shard in ladder], dtype=np.float64)
        self.n_tensors = np.array([len(shard.tensors) for shard in ladder], dtype=np.int64)
        self.tensor_bytes: Floats = np.array([t.n_bytes for shard in ladder for t in shard.tensors], dtype=np.float64)
        """The bytes of all tensors, shard by shard."""
        self.active: Floats = np.array([shard.active_bytes for shard in ladder], dtype=np.float64) / self.n_bytes
        """The share of each shard's bytes that one token reads."""
        of_kind = [
            [(kind_of(layout.model, shard, tensor), tensor.n_weights) for tensor in shard.tensors] for shard in ladder
        ]
        self.kinds: dict[Kind, int] = {}
        """For each kind of weights, its row in ``n_weights``, which has shape [kinds, shards]."""
        for row in of_kind:
            for kind, _ in row:
                self.kinds.setdefault(kind, len(self.kinds))
        self.n_weights: Floats = np.zeros((len(self.kinds), len(ladder)))
        for i, row in enumerate(of_kind):
            for kind, n in row:
                self.n_weights[self.kinds[kind], i] += n
        n_bytes = {kind: BYTES_PER_WEIGHT[kind.type_name] * self.n_weights[i].sum() for kind, i in self.kinds.items()}
        self.main_type = max(n_bytes, key=lambda kind: n_bytes[kind], default=Kind("F16", 0, 0)).type_name
        """The type of the kind of weights with the most bytes."""
        self.names = [shard.kind for shard in ladder]
        self.masks: dict[str, Mask] = {
            kind: np.array([k == kind for k in self.names], dtype=np.bool_) for kind in USE_ORDER
        }

    def by_kind(self, values: dict[str, float], default: float = 0.0) -> Floats:
        """An array with the value for the kind of each shard, shape [shards]."""
        return np.array([values.get(kind, default) for kind in self.names], dtype=np.float64)


@lru_cache(maxsize=8)
def shards_of(layout: Layout) -> Shards:
    """The shards of a layout. They are kept, because one plan needs them for dozens of costs."""
    return Shards(layout)


class Experts:
    """The experts that are not resident, and the numbers of them in the expert cache and in host memory.

    :param routing: ``None``, or one of another model: all experts are chosen equally often.
    :param n_matrices: how many matrices of single experts stay in host memory.
    """

    def __init__(
        self,
        layout: Layout,
        shards: Shards,
        share: Floats,
        ring: int,
        routing: Routing | None,
        n_matrices: float = float("inf"),
    ) -> None:
        experts, model = shards.masks["experts"], layout.model
        self.missing: Mask = experts & (share < 1.0)
        n_expert = model.n_expert if experts.any() else 0
        if routing is None or routing.likely.shape[1] != n_expert:
            routing = even(n_expert, model.n_expert_used)
        self.routing = routing
        # While decoding, most of the ring is the expert cache. Streamed shards of other kinds have three slots, or
        # fewer if the experts of a token would not fit otherwise.
        others = (share < 1.0) & ~self.missing
        sizes = layout.sizes.piece_padded_bytes[others[layout.sizes.piece_shards]]
        self.largest_other = int(sizes.max(initial=0))
        layers = max(float((1 - share)[self.missing].sum()), 1.0)
        each = float(shards.n_bytes[experts].mean()) / n_expert if n_expert else 1.0
        self.matrix_bytes = each / float(shards.n_tensors[experts].mean()) if n_expert else 1.0
        slots = [max(ring - n * self.largest_other, 0) / each for n in (3, 2, 1)]
        n_slots = next((n for n in slots if n >= model.n_expert_used), slots[-1])
        self.n_cached = (n_slots - min(layout.sizes.expert_slots_passing, n_slots / 4)) / layers
        """The average number of experts of a layer in the cache, while decoding."""
        self.n_cached_in_prompts = max(ring - 3 * layout.min_ring_bytes, 0) / each / layers
        self.n_matrices = layers * float(shards.n_tensors[experts].mean()) if n_expert else 0.0
        """The matrices of one expert in all layers."""
        self.n_in_host = n_matrices / self.n_matrices if self.n_matrices else float("inf")
        """The average number of experts of a layer in host memory, which is the second cache."""
