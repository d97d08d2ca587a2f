"""The VRAM that a driver holds for this process beside what the device allocates: measured and counted."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from frameshard.engine.observer import Observer
from frameshard.errors import BudgetBelowFloor
from frameshard.native import ShardDevice, Stats

logger = logging.getLogger("frameshard.engine")

# VRAM that is kept free for the driver to grow. Kernels and workspaces take memory at their first use: 50 MiB after
# the load of a dense model on an H100, 66 MiB after that of a recurrent one, and 81 MiB in the load of a mixture of
# experts.
DRIVER_MARGIN = 96 << 20
# The least of it that is kept free at a budget that has no room for all of it.
LEAST_MARGIN = 16 << 20

WINDOW_S = 0.25
LOOKS = 4
LOOK_S = 0.05
"""The least time between two samples. One takes 0.2 to 0.3 ms on an H100 machine, as much as 7 % of a quick token."""


class OverheadMeter:
    """Computes from repeated samples how much VRAM the driver holds beyond the device's ledger, while decodes run.

    A driver may count an allocation or a release late, and a late release looks like overhead. So the result is the
    minimum of the last :data:`WINDOW_S` seconds, and only if there are at least :data:`LOOKS` samples.
    """

    def __init__(self) -> None:
        self._looks: collections.deque[tuple[float, int]] = collections.deque()

    def look(self, now: float, observed_bytes: int, ledger_bytes: int, counted_bytes: int) -> int | None:
        """Adds a sample.

        :param now: seconds of a monotonic clock.
        :param observed_bytes: the VRAM that the driver counts for the process.
        :param ledger_bytes: the VRAM in the device's ledger, without its overhead.
        :param counted_bytes: the overhead in the ledger now, with :data:`DRIVER_MARGIN`.
        :returns: the overhead to count from now on, with :data:`DRIVER_MARGIN`; ``None`` if ``counted_bytes`` is still
            large enough.
        """
        self._looks.append((now, observed_bytes - ledger_bytes))
        while len(self._looks) > LOOKS and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        if len(self._looks) < LOOKS or now - self._looks[0][0] < WINDOW_S:
            return None
        held = min(overhead for _, overhead in self._looks)
        return held + DRIVER_MARGIN if held + DRIVER_MARGIN // 2 > counted_bytes else None

    def clear(self) -> None:
        """Forgets all samples, after the ledger's overhead was set."""
        self._looks.clear()


class DriverOverhead:
    """Updates the overhead in the device's ledger: the VRAM that the driver holds for this process for its own use."""

    def __init__(self, device: ShardDevice, observer: Observer | None) -> None:
        self._device = device
        self._observer = observer
        self._meter = OverheadMeter()
        self._looked_s = 0.0  # when follow() has taken its latest sample
        self._wanted_bytes = 0  # the overhead by the latest measurement, with all of DRIVER_MARGIN
        self._least_bytes = 0  # the least overhead that was set since the load: that of the lowest floor
        self._changing = threading.Lock()  # held while the budget changes: the overhead does not rise then

    def measure(self, *, ends_load: bool = False) -> None:
        """[any thread] Measures the overhead and sets it. Call it only while nothing is allocated or freed: the
        driver's figure may be seconds late.

        :param ends_load: from now on the game knows the floor.
        :raises BudgetBelowFloor: with this overhead and :data:`LEAST_MARGIN` the budget is below the floor.
        """
        used = self._observer.used() if self._observer is not None else None
        if used is None:
            return
        stats = self._device.stats()
        held = max(0, used - (stats.used_bytes - stats.overhead_bytes)) + DRIVER_MARGIN
        counted = _counted(stats)
        # The driver may have kept all of `pool_bytes`, which the device counts for prompts, or none of it. So the true
        # figure is between `held - pool_bytes` and `held`; the old figure is kept if it is in that range.
        overhead = min(max(counted, held - stats.pool_bytes), held)
        self._wanted_bytes = max(counted, overhead) if stats.lacks_workspaces else overhead
        overhead = _within_budget(self._wanted_bytes, stats, stats.budget_bytes)
        self._least_bytes = overhead if ends_load else min(self._least_bytes, overhead)
        self._device.set_overhead(overhead)
        self._meter.clear()

    def follow(self) -> None:
        """Raises the overhead if the driver has taken more VRAM since :meth:`measure`. Call it between decodes; it
        takes a sample every :data:`LOOK_S`. The device evicts weights at once, so that :data:`DRIVER_MARGIN` is free
        again, or less of it at the floor."""
        now = time.monotonic()
        if self._observer is None or now - self._looked_s < LOOK_S or not self._changing.acquire(blocking=False):
            return
        try:
            self._looked_s = now
            self._follow(now, self._observer)
        finally:
            self._changing.release()

    def _follow(self, now: float, observer: Observer) -> None:
        before = self._device.stats()
        observed = observer.used()
        after = self._device.stats()
        if observed is None or after.used_bytes != before.used_bytes:
            return
        ledger = after.used_bytes - after.overhead_bytes
        overhead = self._meter.look(now, observed, ledger, after.overhead_bytes)
        if overhead is None:
            return
        self._meter.clear()
        self._wanted_bytes = overhead - after.pool_bytes
        wanted = _within_budget(self._wanted_bytes, after, after.budget_bytes)
        if wanted == _counted(after):
            return
        logger.info("the driver holds %d MiB now", (overhead - DRIVER_MARGIN) >> 20)
        try:
            self._device.set_overhead(wanted)
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    @contextlib.contextmanager
    def lowered_floor(self, budget_bytes: int) -> Iterator[None]:
        """[budget thread] A context in which the budget may change to ``budget_bytes``, 0 for all VRAM. If the floor is
        above it because the driver has taken more VRAM since the load, less of :data:`DRIVER_MARGIN` is kept free; this
        waits for the graph that runs."""
        with self._changing:
            stats = self._device.stats()
            overhead = max(_within_budget(self._wanted_bytes, stats, budget_bytes), self._least_bytes)
            if budget_bytes and 0 < stats.floor_bytes - budget_bytes <= _counted(stats) - overhead:
                self._device.set_overhead(overhead)
            yield


def _counted(stats: Stats) -> int:
    """The bytes of the overhead that was set last: without the pools, which the device counts."""
    return stats.overhead_bytes - stats.pool_bytes


def _within_budget(wanted_bytes: int, stats: Stats, budget_bytes: int) -> int:
    """An overhead for which a budget is not below the floor.

    :param wanted_bytes: the overhead with all of :data:`DRIVER_MARGIN`.
    :returns: the same with as much of the margin as there is room for, and at least :data:`LEAST_MARGIN`.
    """
    room = _counted(stats) + budget_bytes - stats.floor_bytes
    return min(wanted_bytes, max(room, wanted_bytes - DRIVER_MARGIN + LEAST_MARGIN))
