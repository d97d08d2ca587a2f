"""What no placement can beat on a machine of given rates: the yardstick that measured figures are held against.

Rates are in bytes or floating-point operations per second, times in seconds. Only weights count here: hand-offs,
launches and the imperfect overlap of copies are the predictions' matter (planner.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """``memory`` is what host memory gives to CPU and copies together."""

    copy: float
    cpu: float
    gpu: float
    memory: float
    gpu_flops: float


def decode_seconds(rates: Rates, resident_bytes: float, other_bytes: float, *, may_use_cpu: bool = True) -> float:
    """Least time of one token that reads ``resident_bytes`` in VRAM and ``other_bytes`` in host memory.

    The best split of the latter lets copies and CPU end together: a share of ``copy / (copy + cpu)`` streams.
    """
    if not may_use_cpu:
        return max(other_bytes / rates.copy, (resident_bytes + other_bytes) / rates.gpu)
    streamed = other_bytes * rates.copy / (rates.copy + rates.cpu)
    host = other_bytes / min(rates.cpu + rates.copy, rates.memory)
    return max(host, (resident_bytes + streamed) / rates.gpu)


def prefill_seconds(rates: Rates, flops: float, streamed_bytes: float, n_graphs: int) -> float:
    """Least time for a prompt of ``flops`` operations in ``n_graphs`` graphs that each stream ``streamed_bytes``."""
    return max(flops / rates.gpu_flops, n_graphs * streamed_bytes / rates.copy)
