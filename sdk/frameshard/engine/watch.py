"""Watches the device's memory and the other processes that use it, to check the host's budget, and host memory.

The figures come from the driver (NVML, DRM, DXGI), else from the device's own interface (CUDA, Vulkan's memory budget),
which knows no other processes by their ids. The emulated device simulates another process if its fault script says so.
Where there are no figures, the log says so once.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from frameshard.engine import hostcount
from frameshard.engine.hostmemory import HostMemory
from frameshard.engine.runtime import Runtime
from frameshard.wire import engine as em

logger = logging.getLogger("frameshard.engine")

UNIT = 1 << 20
"""Free bytes are rounded down to this, so that a change of a few bytes sends no event."""

EXCESS_LOOKS = 8
"""The number of consecutive looks that must find more than the budget: the driver counts a release late."""


class Watcher:
    """Looks at one device. Use it from one thread only."""

    def __init__(self, runtime: Runtime, host: HostMemory) -> None:
        self._runtime = runtime
        self.host = host
        """[any thread] The host memory of the processes."""
        self._known: set[int] | None = None
        self._above = 0
        self._used = 0
        self._played = 0
        if runtime.device is not None and self._totals(runtime.device.stats().used_bytes) is None:
            logger.warning("this GPU does not report its free memory: the host's budget alone counts")

    def look(self, *, parked: bool) -> em.Watch:
        """Makes the event for the broker. A process is reported once, when it appears. The first look reports none.

        :param parked: the lease is parked; memory above the budget is then not reported.
        """
        runtime = self._runtime
        if runtime.device is None:
            return self._with_host(em.Watch(0, 0, 0, None, None, (), 0))
        stats = runtime.device.stats()
        totals, others = self._totals(stats.used_bytes), self._others(stats.used_bytes)
        known = self._known if self._known is not None else set(others)
        appeared = tuple((pid, n_bytes) for pid, n_bytes in others.items() if pid not in known)
        self._known = known | others.keys()
        free, total = (None, None) if totals is None else totals
        watch = em.Watch(
            used_bytes=stats.used_bytes,
            floor_bytes=stats.floor_bytes,
            full_bytes=stats.full_bytes,
            total_bytes=total,
            free_bytes=None if free is None else free // UNIT * UNIT,
            appeared=appeared,
            excess_bytes=0 if parked else self._excess(stats.used_bytes),
        )
        return self._with_host(watch)

    def newest(self, watch: em.Watch) -> em.Watch:
        """The event with what is in use now. Reading the rest takes a while, and the budget may change meanwhile."""
        device = self._runtime.device
        used = watch.used_bytes if device is None else device.stats().used_bytes
        return replace(watch, used_bytes=used, host_used_bytes=self.host.parts().used_bytes)

    def _with_host(self, watch: em.Watch) -> em.Watch:
        machine = hostcount.machine()
        return replace(
            watch,
            host_used_bytes=self.host.parts().used_bytes,
            host_floor_bytes=self.host.floor_bytes,
            host_total_bytes=None if machine is None else machine.total_bytes,
            host_free_bytes=None if machine is None else machine.available_bytes // UNIT * UNIT,
        )

    def _totals(self, used_bytes: int) -> tuple[int, int] | None:
        """The free and the total bytes of VRAM; ``None`` if nothing reports them."""
        runtime = self._runtime
        totals = None if runtime.observer is None else runtime.observer.totals()
        if totals is not None:
            return totals
        assert runtime.device is not None
        free, total = runtime.device.memory()
        # Vulkan without VK_EXT_memory_budget calls all memory free, also what is in use.
        return None if free + used_bytes // 2 > total else (free, total)

    def _others(self, used_bytes: int) -> dict[int, int]:
        """The bytes of VRAM of other processes, by process id. Id 0 is the one that the emulated device simulates."""
        if self._runtime.observer is not None:
            return self._runtime.observer.others()
        totals = self._totals(used_bytes)
        if totals is None:
            return {}
        # Take the smaller of two looks: an allocation in progress may be in one count and not yet in the other.
        before, self._played = self._played, totals[1] - totals[0] - used_bytes
        played = min(before, self._played)
        return {0: played} if played >= UNIT else {}

    def _excess(self, used_bytes: int) -> int:
        """The bytes above the budget that the driver has counted for :data:`EXCESS_LOOKS` looks while the ledger did
        not change; otherwise 0. The budget thread then corrects the ledger, and the device evicts that much."""
        runtime = self._runtime
        observed = runtime.observer.used() if runtime.observer is not None else None
        budget, before, self._used = runtime.vram_budget_bytes, self._used, used_bytes
        if observed is None or not 0 < budget < observed or used_bytes != before:
            self._above = 0
            return 0
        self._above += 1
        return 0 if self._above % EXCESS_LOOKS else observed - budget
