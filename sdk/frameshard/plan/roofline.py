"""Lower bounds of the time of any placement on a machine of given rates, to compare measured times with.

Three things work at once: copies, the CPU and the device. Each piece of weights that is not resident either is copied
and read by the device, or is read by the CPU; it may be split. The least time in which all three end is a linear
program, and by its dual every choice of three weights with sum 1 gives a lower bound: each piece costs at least the
cheaper of its two ways. Where the device is fast this comes to bytes left out / (CPU + copy), in bytes per second.

Only the work itself counts. Hand-offs, launches, a full ring and turns between CPU and device are part of predictions
alone (costs.py), which is why a prediction is never below its bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_SHARES = 64
_DEVICE_WEIGHTS = np.linspace(0.0, 1.0, 9)


def least_seconds(
    copy_s: Floats, device_s: Floats, cpu_s: Floats | None, *, resident_s: float, memory_s: float = 0.0
) -> float:
    """Least time for pieces that each take ``copy_s`` and ``device_s``, or ``cpu_s``.

    ``resident_s`` is other work of the device and ``memory_s`` what host memory needs for all pieces either way.
    ``cpu_s`` of None forbids the CPU.
    """
    if cpu_s is None:
        return max(float(copy_s.sum()), float(device_s.sum()) + resident_s, memory_s)
    share = np.linspace(0.0, 1.0, _SHARES + 1)[:, None]
    best = memory_s
    for weight in _DEVICE_WEIGHTS:
        streamed = (1 - weight) * share * copy_s + weight * device_s
        computed = (1 - weight) * (1 - share) * cpu_s
        best = max(best, float(np.minimum(streamed, computed).sum(axis=1).max()) + weight * resident_s)
    return best
