"""How the shard device cuts a model: pieces in ladder order, packed into slabs, and the least ring. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from frameshard.native import EMULATED
from frameshard.plan.header import GGML_TYPES, Tensor
from frameshard.plan.ladder import make_ladder
from frameshard.plan.model import Model, Shard

Floats = NDArray[np.float64]
_MiB = 1 << 20
_ALIGN = 256  # kAlign of the shard device
_ROW = 512  # MATRIX_ROW_PADDING of ggml-cuda
_ROW_BLOCK = 32  # kRowBlock of the shard device
_DRIVER_UNIT = 2 * _MiB  # as the shard device counts it for real devices
_SCRATCH = 2 * _MiB  # kScratchBytes
USE_ORDER = {"vision": 0, "attention": 1, "other": 2, "shared": 3, "experts": 4, "ffn": 5, "ffn_down": 6, "output": 7}


@dataclass(frozen=True, eq=False)
class Layout:
    """How the shard device cuts a model: pieces in ladder order, packed into slabs, and the least ring.

    ``min_ring`` is what any streamed step fits, ``total`` all slabs together, ``scratch`` what results of matrices pass
    through that are cut into several pieces.
    """

    model: Model = field(repr=False)
    ladder: tuple[Shard, ...] = field(repr=False)
    slabs: tuple[int, ...] = field(repr=False)
    pieces: tuple[tuple[int, int, int], ...] = field(repr=False)  # (shard, slab, bytes)
    min_ring: int
    unit_bytes: int
    total: int
    scratch: int

    def residency(self, room: int, wanted_ring: int) -> tuple[int, int]:
        """(ring bytes, slabs held) in ``room`` bytes beside the fixed part; room for the least ring is the caller's to
        see to."""
        if self.total <= room:
            return 0, len(self.slabs)
        ring = min(max(wanted_ring, self.min_ring), room) // self.unit_bytes * self.unit_bytes
        held = 0
        for n_slabs, size in enumerate(self.slabs):
            held += size
            if held > room - ring:
                return ring, n_slabs
        return ring, len(self.slabs)

    def resident_share(self, n_slabs: int) -> Floats:
        """Of each shard, the share of its bytes in the first ``n_slabs`` slabs."""
        shard, slab, n_bytes = self._piece_arrays
        held = np.bincount(shard, weights=n_bytes * (slab < n_slabs), minlength=len(self.ladder))
        return held / np.bincount(shard, weights=n_bytes, minlength=len(self.ladder))

    @cached_property
    def _piece_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        columns = np.array(self.pieces, dtype=np.int64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2].astype(np.float64)

    @cached_property
    def use_order(self) -> NDArray[np.intp]:
        """Ladder indices in the order in which a graph uses the shards."""

        def key(i: int) -> tuple[float, int, int]:
            shard = self.ladder[i]
            layer = shard.layer if shard.layer is not None else -1 if shard.kind == "other" else float("inf")
            return layer, USE_ORDER[shard.kind], i

        return np.array(sorted(range(len(self.ladder)), key=key), dtype=np.intp)


@lru_cache(maxsize=8)
def lay_out(
    model: Model, *, unit_bytes: int = 1, piece_bytes: int = 0, step_bytes: int = 0, slab_bytes: int = 0
) -> Layout:
    """The layout that the shard device makes of a model when configured with these sizes; 0 stands for its defaults.

    ``unit_bytes`` is what the driver hands out VRAM in (:func:`vram_unit`)."""
    ladder = make_ladder(model)
    tensors = [(i, tensor) for i, shard in enumerate(ladder) for tensor in shard.tensors]
    total = model.core_bytes + sum(tensor.n_bytes for _, tensor in tensors)
    matrices = (tensor.n_bytes for _, tensor in tensors if tensor.name.startswith("blk.") and _is_matrix(tensor))
    step_bytes = step_bytes or min(max(2 * _MiB, total // 64), 32 * _MiB)
    piece_bytes = piece_bytes or max(4 * _MiB, max(matrices, default=0), step_bytes)
    slab_bytes = slab_bytes or min(max(_MiB, 4 * unit_bytes, total // 64), 64 * _MiB)

    slabs: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    of_shard = [0] * len(ladder)
    for i, tensor in tensors:
        row_bytes = _row_bytes(tensor)
        whole = not _is_matrix(tensor) or tensor.n_bytes <= piece_bytes
        each = tensor.n_bytes if whole else max(1, piece_bytes // row_bytes // _ROW_BLOCK) * _ROW_BLOCK * row_bytes
        for start in range(0, tensor.n_bytes, each):
            size = _padded(tensor, min(each, tensor.n_bytes - start))
            if not slabs or slabs[-1] + size > slab_bytes:
                slabs.append(0)
            slabs[-1] += size
            of_shard[i] += size
            pieces.append((i, len(slabs) - 1, size))
    slabs = [_rounded(size, unit_bytes) for size in slabs]
    largest_piece = max((size for _, _, size in pieces), default=0)
    return Layout(
        model=model,
        ladder=ladder,
        slabs=tuple(slabs),
        pieces=tuple(pieces),
        min_ring=_rounded(max(largest_piece, min(step_bytes, max(of_shard, default=0))), unit_bytes),
        unit_bytes=unit_bytes,
        total=sum(slabs),
        scratch=_SCRATCH if len(pieces) > len(tensors) else 0,
    )


def _is_matrix(tensor: Tensor) -> bool:
    return all(dim == 1 for dim in tensor.shape[2:])


def _row_bytes(tensor: Tensor) -> int:
    _, block, block_bytes = GGML_TYPES[tensor.ggml_type]
    return tensor.shape[0] // block * block_bytes


def _padded(tensor: Tensor, n_bytes: int) -> int:
    """What ``n_bytes`` of whole rows take: of quantised ones kernels also read what follows the last weight, to a run
    of 512, and the last row, to a block."""
    _, block, block_bytes = GGML_TYPES[tensor.ggml_type]
    if block > 1:
        rows = n_bytes // _row_bytes(tensor) if _is_matrix(tensor) else tensor.shape[1]
        n_bytes += -rows % _ROW_BLOCK * _row_bytes(tensor) + -tensor.shape[0] % _ROW // block * block_bytes
    return _rounded(n_bytes, _ALIGN)


def _rounded(n_bytes: int, unit_bytes: int) -> int:
    return -(-n_bytes // unit_bytes) * unit_bytes


def vram_unit(device: str) -> int:
    """Bytes in which a device's driver hands out VRAM: whatever is allocated takes whole units."""
    return 1 if device == EMULATED else _DRIVER_UNIT
