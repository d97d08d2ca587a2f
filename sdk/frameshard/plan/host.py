"""What of a model's weights is in host memory at a host budget, and what comes from the disk for every graph.

The shard device divides the budget in the same way (``native/src/host_cache.cpp``). Sizes are bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from frameshard.errors import BudgetBelowFloor
from frameshard.native import EMULATED
from frameshard.plan.layout import Floats, Layout

_MOST_BUFFER_BYTES = 64 << 20  # for reads ahead: a quarter of the room, up to so much
_MOST_EMBEDDING_BYTES = 4 << 20  # for rows of the embedding, which llama.cpp reads through the page cache
_STAGING_BYTES = 32 << 20  # what is held is not pinned: it is copied to the device through this


def host_floor(layout: Layout, device: str) -> int:
    """The smallest host budget for weights: an estimate, since a launch counts the bytes of whole pages.

    :param device: name of the inner device.
    """
    n_bytes, experts = layout.sizes.piece_padded_bytes, _of_experts(layout)
    return _beside(layout, device) + _least_buffer(n_bytes, experts) + int(n_bytes[experts].sum())


def disk_share(layout: Layout, device: str, n_slabs: int, host_budget_bytes: int) -> Floats:
    """For each shard, the share of its bytes that every graph reads from disk; shape [shards].

    :param device: name of the inner device.
    :param n_slabs: the number of resident slabs.
    :param host_budget_bytes: host memory for weights; 0 for no limit.
    :raises BudgetBelowFloor: the budget is below the floor.
    """
    n_bytes, experts = layout.sizes.piece_padded_bytes, _of_experts(layout)
    n_shards = len(layout.ladder)
    if not host_budget_bytes or host_budget_bytes >= layout.model.file_bytes:
        return np.zeros(n_shards)
    floor = host_floor(layout, device)
    if host_budget_bytes < floor:
        raise BudgetBelowFloor(
            f"a host memory budget of {host_budget_bytes >> 20} MiB is below the floor of about {-(-floor >> 20)} MiB",
            budget_bytes=host_budget_bytes,
            floor_bytes=floor,
        )
    room = host_budget_bytes - _beside(layout, device)
    buffer = max(_least_buffer(n_bytes, experts), min(_MOST_BUFFER_BYTES, room // 4))
    left = room - buffer - int(n_bytes[experts].sum())
    wanted = ~experts & (layout.sizes.piece_slabs >= n_slabs)
    held = np.cumsum(np.where(wanted, n_bytes, 0)) <= left
    from_disk = np.where(wanted & ~held, n_bytes, 0)
    shards = layout.sizes.piece_shards
    read = np.bincount(shards, weights=from_disk.astype(np.float64), minlength=n_shards)
    share: Floats = read / np.bincount(shards, weights=n_bytes, minlength=n_shards)
    return share


def _of_experts(layout: Layout) -> NDArray[np.bool_]:
    """For each piece, whether it has experts: these are all held."""
    kinds = np.array([shard.kind == "experts" for shard in layout.ladder])
    of_experts: NDArray[np.bool_] = kinds[layout.sizes.piece_shards]
    return of_experts


def _least_buffer(n_bytes: NDArray[np.int64], experts: NDArray[np.bool_]) -> int:
    """Room for two of the largest pieces that are not held at every budget."""
    return 2 * int(n_bytes[~experts].max(initial=0))


def _beside(layout: Layout, device: str) -> int:
    embedding = min(_MOST_EMBEDDING_BYTES, layout.model.file_bytes // 16)
    return embedding + (0 if device == EMULATED else _STAGING_BYTES)
