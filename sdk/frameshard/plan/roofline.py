"""Lower bounds of the time that any placement takes on a machine, for comparison with measured times.

Copies, the CPU and the device work at the same time. Each piece of weights that is not resident is either copied and
then read by the device, or read by the CPU; it may also be split. The shortest time in which all three finish is the
solution of a linear program. By its dual, any three factors with sum 1, for copies, CPU and device, give a lower bound:
each piece counts with the cheaper of its two ways. If the device is fast, the bound is the bytes that are not resident,
divided by the sum of the rates of CPU and copies.

The bound has only the work itself. Predictions (costs.py) add hand-offs, launches, waiting for a full ring and turns
between CPU and device, so a prediction is never below its bound.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_SHARES = 64
_DEVICE_WEIGHTS = np.linspace(0.0, 1.0, 9)


def least_seconds(
    copy_s: Floats,
    device_s: Floats,
    cpu_s: Floats | None,
    *,
    resident_s: float,
    copied_s: float = 0.0,
    memory_s: float = 0.0,
) -> float:
    """The least time in seconds for all pieces.

    :param copy_s: the time to copy each piece, shape [pieces].
    :param device_s: the time of the device for each piece, if it is copied.
    :param cpu_s: the time of the CPU for each piece, if it is not copied; ``None`` if the CPU may not be used.
    :param resident_s: other work of the device.
    :param copied_s: other copies.
    :param memory_s: the time of host memory to read all pieces once.
    """
    if cpu_s is None:
        return max(float(copy_s.sum()) + copied_s, float(device_s.sum()) + resident_s, memory_s)
    share = np.linspace(0.0, 1.0, _SHARES + 1)[:, None]
    best = memory_s
    for weight in _DEVICE_WEIGHTS:
        streamed = (1 - weight) * share * copy_s + weight * device_s
        computed = (1 - weight) * (1 - share) * cpu_s
        cheaper = np.minimum(streamed, computed).sum(axis=1) + (1 - weight) * share[:, 0] * copied_s
        best = max(best, float(cheaper.max()) + weight * resident_s)
    return best
