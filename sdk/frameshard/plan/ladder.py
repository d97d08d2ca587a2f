"""The ladder: the order in which shards get VRAM, and in reverse the order of eviction.

The resident set at any budget is a prefix of it. Kinds are ordered by the time that a byte of VRAM saves. The output
head comes first: a prefill computes one row of it, so its copy overlaps with no computation of its own. Weights that
every token reads come before experts, of which a token reads a few; among them those come first that would cost two
hand-offs to the CPU in each layer. Within a kind layers are in bit-reversed order (0, 16, 8, 24, 4, ...): every prefix
is spread evenly over the depth of the model, so that copies of the other layers overlap with computation.
"""

from __future__ import annotations

from frameshard.plan.model import Model, Shard

_ORDER = {"output": 0, "attention": 1, "shared": 2, "other": 3, "ffn": 4, "ffn_down": 4, "vision": 5, "experts": 6}
_BITS = 16


def make_ladder(model: Model) -> tuple[Shard, ...]:
    """The model's shards, the last to be evicted first. Without the core (always resident) and shards that decode never
    reads. Depends on the model alone."""
    shards = [shard for shard in model.shards if shard.kind != "core" and shard.active_bytes > 0]
    return tuple(sorted(shards, key=lambda shard: (_ORDER[shard.kind], _spread(shard.layer or 0), shard.name)))


def _spread(layer: int) -> int:
    return int(f"{layer:0{_BITS}b}"[::-1], 2)
