"""What the NVIDIA driver counts for this process: the cross-check of the device's own ledger.

Not every system tells: without NVIDIA's library, under Windows' WDDM, or where process numbers are hidden,
:meth:`Observer.used` is ``None`` and the ledger stands alone.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import time
from typing import Any

from frameshard.errors import BudgetBelowFloor
from frameshard.native import ShardDevice

logger = logging.getLogger("frameshard.engine")


# What the driver may take on top of what it was last seen to hold. Kernels and workspaces that are used for the first
# time take memory: on an H100 the driver's share grew by 50 MiB from the end of the load on, by 24 at most at once.
DRIVER_MARGIN = 64 << 20

MAX_UNLISTED = 128 << 20
"""More than that is another process that came at the same time."""

WINDOW_S = 0.25
LOOKS = 4


class OverheadMeter:
    """How much VRAM the driver holds beyond the device's ledger, from looks at both while work goes on.

    A driver may count an allocation or a release late. A late release looks like overhead, so the smallest of the
    figures of the last :data:`WINDOW_S` seconds is believed, and only once there are :data:`LOOKS` of them.
    """

    def __init__(self) -> None:
        self._looks: collections.deque[tuple[float, int]] = collections.deque()

    def look(self, now: float, observed_bytes: int, ledger_bytes: int, counted_bytes: int) -> int | None:
        """Takes a look; returns the overhead to count from now on, or ``None`` while ``counted_bytes`` will do.

        :param now: seconds of any steady clock.
        :param observed_bytes: what the driver counts for the process.
        :param ledger_bytes: what the device's ledger explains of that.
        :param counted_bytes: the overhead that the device counts now, :data:`DRIVER_MARGIN` included.
        """
        self._looks.append((now, observed_bytes - ledger_bytes))
        while len(self._looks) > LOOKS and now - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()
        if len(self._looks) < LOOKS or now - self._looks[0][0] < WINDOW_S:
            return None
        held = min(overhead for _, overhead in self._looks)
        return held + DRIVER_MARGIN if held + DRIVER_MARGIN // 2 > counted_bytes else None

    def clear(self) -> None:
        """Forgets all looks: the ledger was corrected by other means."""
        self._looks.clear()


class Observer:
    """Make it before the process opens a GPU: a process that NVML lists only afterwards, when its numbers are those of
    another namespace, is this one. ``pid`` may be set to that of a child started since."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._nvml: Any = None
        self._before: set[int] = set()
        self._listed_as: int | None = None
        self._unlisted_before = 0
        self._unlisted: int | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._before = set(self._processes())
            self._unlisted_before = self._unlisted_bytes()
        except Exception as error:  # nvmlInit raises a class of its own for each thing that can be missing
            self._nvml = None
            logger.info("no NVML, VRAM is counted by the device's ledger alone: %s", error)

    @property
    def available(self) -> bool:
        """NVML answers on this machine."""
        return self._nvml is not None

    def used(self) -> int | None:
        """Bytes of VRAM that the driver counts for the process over all GPUs; ``None`` where it does not tell.

        A process takes a little more of the card than the driver lists for it: 37 MiB on an H100. What the card lacked
        beyond all listed processes once this one had opened it, and not before, is counted too.
        """
        if self._nvml is None:
            return None
        try:
            processes = self._processes()
            listed = self._listed(processes)
            if listed is None:
                return None
            if self._unlisted is None:
                self._unlisted = min(max(0, self._unlisted_bytes() - self._unlisted_before), MAX_UNLISTED)
            return listed + self._unlisted
        except self._nvml.NVMLError:
            return None

    def _listed(self, processes: dict[int, int]) -> int | None:
        if self._listed_as is None:
            new = [pid for pid in processes if pid not in self._before]
            if self.pid in processes:
                self._listed_as = self.pid
            elif len(new) == 1:
                self._listed_as = new[0]
        return None if self._listed_as is None else processes.get(self._listed_as)

    def totals(self) -> tuple[int, int] | None:
        """Bytes free and in all on the GPUs that this process uses (on the first while it uses none); ``None`` where
        the driver does not tell."""
        if self._nvml is None:
            return None
        try:
            mine = [handle for handle in self._handles if self._listed_as in self._on(handle)] or self._handles[:1]
            memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in mine]
        except self._nvml.NVMLError:
            return None
        return sum(each.free for each in memory), sum(each.total for each in memory)

    def others(self) -> dict[int, int]:
        """Bytes that each other process holds on any GPU, those that draw included; empty where nothing is told."""
        found: dict[int, int] = {}
        if self._nvml is not None:
            try:
                for handle in self._handles:
                    for pid, n_bytes in self._on(handle).items():
                        found[pid] = found.get(pid, 0) + n_bytes
            except self._nvml.NVMLError:
                return {}
        return {pid: n_bytes for pid, n_bytes in found.items() if pid not in (self.pid, self._listed_as)}

    def _on(self, handle: Any) -> dict[int, int]:
        nvml = self._nvml
        listed = [*nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        with contextlib.suppress(nvml.NVMLError):  # not every card draws
            listed += nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        return {process.pid: process.usedGpuMemory or 0 for process in listed}

    def _unlisted_bytes(self) -> int:
        """What is used of the cards and listed for no process."""
        used = sum(self._nvml.nvmlDeviceGetMemoryInfo(handle).used for handle in self._handles)
        return int(used) - sum(sum(self._on(handle).values()) for handle in self._handles)

    def _processes(self) -> dict[int, int]:
        used: dict[int, int] = {}
        for handle in self._handles:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory is not None:
                    used[process.pid] = used.get(process.pid, 0) + process.usedGpuMemory
        return used


class DriverOverhead:
    """Keeps the ledger's overhead at what the driver holds for this process beyond the ledger's other uses."""

    def __init__(self, device: ShardDevice, observer: Observer | None) -> None:
        self._device = device
        self._observer = observer
        self._meter = OverheadMeter()

    def measure(self) -> None:
        """[any thread] Counts the overhead. Only while the ledger stands still: the driver's figure may be late by
        seconds.

        :raises BudgetBelowFloor: what the driver holds leaves less than the floor.
        """
        used = self._observer.used() if self._observer is not None else None
        if used is not None:
            stats = self._device.stats()
            self._device.set_overhead(max(0, used - (stats.used_bytes - stats.overhead_bytes)) + DRIVER_MARGIN)
            self._meter.clear()

    def follow(self) -> None:
        """Counts what the driver has taken since :meth:`measure`, while work goes on. To be called between decodes;
        takes 0.05 ms. Weights make room for it at once, so that the driver's margin is whole again."""
        if self._observer is None:
            return
        before = self._device.stats()
        observed = self._observer.used()
        after = self._device.stats()
        if observed is None or after.used_bytes != before.used_bytes:
            return
        ledger = after.used_bytes - after.overhead_bytes
        overhead = self._meter.look(time.monotonic(), observed, ledger, after.overhead_bytes)
        if overhead is None:
            return
        logger.info("the driver holds %d MiB now", (overhead - DRIVER_MARGIN) >> 20)
        self._meter.clear()
        try:
            self._device.set_overhead(overhead)
        except BudgetBelowFloor as error:
            logger.warning("%s", error)
