"""What of a model's weights is in host memory at a host budget, and what comes from the disk.

The shard device divides the budget in the same way (``host_cache.cpp`` and ``host_experts.cpp`` in ``native/src``).
Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from frameshard.errors import BudgetBelowFloor
from frameshard.native import EMULATED
from frameshard.plan.layout import Floats, Layout

_MOST_BUFFER_BYTES = 64 << 20  # for reads ahead: a quarter of the room, up to so much
_MOST_EMBEDDING_BYTES = 4 << 20  # for rows of the embedding, which llama.cpp reads through the page cache
_STAGING_BYTES = 32 << 20  # what is held is not pinned: it is copied to the device through this
_PAGE_BYTES = 4096  # of reads from disk
_ROW_RUN = 512  # so many weights behind a matrix are read with it
_BLOCK_SLOTS = 64  # matrices of experts in a block, at most
_LEAST_BLOCKS = 8  # for all experts: the blocks of small models are smaller,
_LEAST_SLOTS = 8  # but not below this
_PASSING = 64  # slots for experts that do not stay: so many, or a half


@dataclass(frozen=True, eq=False)
class HostShare:
    """What is in host memory, of weights that are not resident in VRAM.

    :param read: for each shard, the share of its bytes that every graph reads from disk, without experts; shape
        [shards].
    :param n_matrices: how many matrices of single experts stay in host memory; infinite where all are there.
    """

    read: Floats
    n_matrices: float


def host_floor(layout: Layout, device: str) -> int:
    """The smallest host budget for weights: an estimate, since a launch counts the bytes of whole pages.

    :param device: name of the inner device.
    """
    return _beside(layout, device) + _least_buffer(layout) + _blocks(layout).n_bytes


def host_share(layout: Layout, device: str, n_slabs: int, host_budget_bytes: int) -> HostShare:
    """What is in host memory at a budget.

    :param device: name of the inner device.
    :param n_slabs: the number of resident slabs.
    :param host_budget_bytes: host memory for weights; 0 for no limit.
    :raises BudgetBelowFloor: the budget is below the floor.
    """
    n_shards = len(layout.ladder)
    if not host_budget_bytes or host_budget_bytes >= layout.model.file_bytes:
        return HostShare(np.zeros(n_shards), float("inf"))
    floor = host_floor(layout, device)
    if host_budget_bytes < floor:
        raise BudgetBelowFloor(
            f"a host memory budget of {host_budget_bytes >> 20} MiB is below the floor of about {-(-floor >> 20)} MiB",
            budget_bytes=host_budget_bytes,
            floor_bytes=floor,
        )
    n_bytes, blocks = layout.sizes.piece_padded_bytes, _blocks(layout)
    room = host_budget_bytes - _beside(layout, device) - blocks.n_bytes
    room -= max(_least_buffer(layout), min(_MOST_BUFFER_BYTES, room // 4))
    left_out = layout.sizes.piece_slabs >= n_slabs
    wanted = (blocks.n_experts == 1) & left_out
    held = np.cumsum(np.where(wanted, n_bytes, 0)) <= room
    from_disk = np.where(wanted & ~held, n_bytes, 0)
    shards = layout.sizes.piece_shards
    read = np.bincount(shards, weights=from_disk.astype(np.float64), minlength=n_shards)
    share: Floats = read / np.bincount(shards, weights=n_bytes, minlength=n_shards)
    room -= int(n_bytes[wanted & held].sum())
    return HostShare(share, blocks.n_staying(room, int(blocks.n_experts[(blocks.n_experts > 1) & left_out].sum())))


class _Blocks:
    """The blocks of slots for single experts.

    :ivar n_experts: for each piece, its experts; 1 for a piece without.
    :ivar n_bytes: the bytes of a block, which is the least; 0 for a model without experts.
    """

    def __init__(self, layout: Layout) -> None:
        shapes = [tensor.shape for shard in layout.ladder for tensor in shard.tensors]
        pieces = layout.sizes.piece_weights.tolist()
        self.n_experts: NDArray[np.int64] = np.array(
            [shapes[i][2] if len(shapes[i]) > 2 else 1 for i in pieces], dtype=np.int64
        )
        of_experts = self.n_experts > 1
        n_matrices = int(self.n_experts[of_experts].sum())
        self._n_slots = min(_BLOCK_SLOTS, max(n_matrices // _LEAST_BLOCKS, _LEAST_SLOTS))
        rows = np.array([_ROW_RUN / (shapes[i][0] * shapes[i][1]) if len(shapes[i]) > 2 else 0.0 for i in pieces])
        matrices = layout.sizes.piece_padded_bytes / self.n_experts * (1 + rows)
        slot_bytes = -(-int(matrices[of_experts].max(initial=0)) // _PAGE_BYTES) * _PAGE_BYTES
        self.n_bytes = self._n_slots * (slot_bytes + _PAGE_BYTES) if n_matrices else 0

    def n_staying(self, room: int, n_needed: int) -> float:
        """How many matrices stay in host memory.

        :param room: host memory beside the least.
        :param n_needed: the matrices that are not resident.
        """
        if not self.n_bytes:
            return float("inf")
        n_slots = min((room // self.n_bytes + 1) * self._n_slots, n_needed)
        return float("inf") if n_slots == n_needed else n_slots - min(_PASSING, n_slots // 2)


@lru_cache(maxsize=8)
def _blocks(layout: Layout) -> _Blocks:
    return _Blocks(layout)


def _least_buffer(layout: Layout) -> int:
    """Room for two of the largest pieces."""
    return 2 * int(layout.sizes.piece_padded_bytes.max(initial=0))


def _beside(layout: Layout, device: str) -> int:
    embedding = min(_MOST_EMBEDDING_BYTES, layout.model.file_bytes // 16)
    return embedding + (0 if device == EMULATED else _STAGING_BYTES)
