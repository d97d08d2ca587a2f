"""The ladder: the order in which shards become resident. Eviction goes in the reverse order.

The resident set at any budget is a prefix of the ladder. The order of kinds follows the time that a byte of VRAM saves:

- The output head is first. A prefill computes one row of logits, so no computation hides the copy of the head.
- Attention is next: on the CPU it would need two hand-offs in each layer.
- Experts are last, because a token reads only a few of them.

Within a kind the layers are in bit-reversed order (0, 16, 8, 24, 4, ...). So every prefix is spread evenly over the
layers of the model, and the copies of the other layers overlap with computation.
"""

from __future__ import annotations

from frameshard.plan.model import Model, Shard

_ORDER = {"output": 0, "attention": 1, "shared": 2, "other": 3, "ffn": 4, "ffn_down": 4, "vision": 5, "experts": 6}
_BITS = 16


def make_ladder(model: Model) -> tuple[Shard, ...]:
    """The model's ladder. The last shard is evicted first. The core is left out, because it is always resident, and so
    are shards that decoding never reads. The ladder depends only on the model."""
    shards = [shard for shard in model.shards if shard.kind != "core" and shard.active_bytes > 0]
    return tuple(sorted(shards, key=lambda shard: (_ORDER[shard.kind], _spread(shard.layer or 0), shard.name)))


def _spread(layer: int) -> int:
    return int(f"{layer:0{_BITS}b}"[::-1], 2)
