"""The ladder: which shards deserve VRAM first.

The resident set at any budget is a prefix of this order, so giving VRAM back is popping the tail and needs no search.
Kinds are ordered by what a byte of VRAM saves. The output head comes first: a prompt computes one row of it, so its
copy has no computation of its own to hide behind. Weights that every token reads come before experts of which a token
reads a few, and among the former those go first that would cost a hand-off to the CPU twice a layer. Within a kind
layers are taken in bit-reversed order (0, 16, 8, 24, 4, ...): every prefix is spread evenly over the depth of the
model, so that copies for the layers left out find computation to hide behind.
"""

from __future__ import annotations

from frameshard.plan.model import Model, Shard

_ORDER = {"output": 0, "attention": 1, "shared": 2, "other": 3, "ffn": 4, "ffn_down": 4, "vision": 5, "experts": 6}
_BITS = 16


def make_ladder(model: Model) -> tuple[Shard, ...]:
    """The model's shards, first to keep to first to give up. The core (always resident) and shards that decoding never
    reads are left out. Depends on the model alone."""
    shards = [shard for shard in model.shards if shard.kind != "core" and shard.active_bytes > 0]
    return tuple(sorted(shards, key=lambda shard: (_ORDER[shard.kind], _spread(shard.layer or 0), shard.name)))


def _spread(layer: int) -> int:
    return int(f"{layer:0{_BITS}b}"[::-1], 2)
