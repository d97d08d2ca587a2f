"""What happens to the device's memory beside us: the cross-check of the host's word.

The driver tells through NVML; the emulated device tells by itself, and plays another process where its fault script
says so. Elsewhere nobody tells, which is said once, and the host's word is what counts.
"""

from __future__ import annotations

import logging

from frameshard.engine.runtime import Runtime
from frameshard.native import EMULATED
from frameshard.wire import engine as em

logger = logging.getLogger("frameshard.engine")

UNIT = 1 << 20
"""Figures are told in MiB, so that a change of a few bytes is none."""

EXCESS_LOOKS = 8
"""So many looks in turn have to find more than the budget: the driver's figure lags behind a release."""


class Watcher:
    """Looks at one device. For one thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: set[int] | None = None
        self._above = 0
        self._used = 0
        self._played = 0
        if runtime.device is not None and runtime.device_name != EMULATED and self._totals() is None:
            logger.warning("nothing tells how full this GPU is or who else uses it: the host's word is what counts")

    def look(self, *, parked: bool) -> em.Watch:
        """The event for the broker. A process counts as appeared once, those there at the first look never."""
        runtime = self._runtime
        if runtime.device is None:
            return em.Watch(0, 0, 0, None, None, (), 0)
        stats = runtime.device.stats()
        totals, others = self._totals(), self._others(stats.used_bytes)
        known = self._known if self._known is not None else set(others)
        appeared = tuple((pid, n_bytes) for pid, n_bytes in others.items() if pid not in known)
        self._known = known | others.keys()
        free, total = (None, None) if totals is None else totals
        return em.Watch(
            used_bytes=stats.used_bytes,
            floor_bytes=stats.floor_bytes,
            full_bytes=stats.full_bytes,
            total_bytes=total,
            free_bytes=None if free is None else free // UNIT * UNIT,
            appeared=appeared,
            excess_bytes=0 if parked else self._excess(stats.used_bytes),
        )

    def _totals(self) -> tuple[int, int] | None:
        runtime = self._runtime
        if runtime.observer is not None:
            return runtime.observer.totals()
        assert runtime.device is not None
        return runtime.device.memory()

    def _others(self, used_bytes: int) -> dict[int, int]:
        """By process; 0 stands for one that the emulated device plays."""
        if self._runtime.observer is not None:
            return self._runtime.observer.others()
        totals = self._totals()
        assert totals is not None
        # Two looks in turn: an allocation that is under way is in the one count and not yet in the other.
        before, self._played = self._played, totals[1] - totals[0] - used_bytes
        played = min(before, self._played)
        return {0: played} if played >= UNIT else {}

    def _excess(self, used_bytes: int) -> int:
        """Bytes that the driver counts above the budget, and goes on counting while the ledger stands still. The budget
        thread corrects the ledger then, and the device shrinks by as much."""
        runtime = self._runtime
        observed = runtime.observer.used() if runtime.observer is not None else None
        budget, before, self._used = runtime.vram_budget_bytes, self._used, used_bytes
        if observed is None or not 0 < budget < observed or used_bytes != before:
            self._above = 0
            return 0
        self._above += 1
        return 0 if self._above % EXCESS_LOOKS else observed - budget
