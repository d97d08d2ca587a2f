"""Reads from the NVIDIA driver (NVML) how much VRAM this process uses, to check the device's own ledger.

Some systems do not report it: without NVIDIA's library, under Windows' WDDM, or in a container that hides process ids.
There :meth:`Observer.used` is ``None`` and the ledger is not checked.
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


# VRAM that is kept free for the driver to grow. Kernels and workspaces take memory at their first use: on an H100 the
# driver's share grew by 50 MiB after the load, and by at most 24 MiB at once.
DRIVER_MARGIN = 64 << 20

MAX_UNLISTED = 128 << 20
"""If more unlisted VRAM appears, it belongs to another process that started at the same time."""

WINDOW_S = 0.25
LOOKS = 4


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


class Observer:
    """NVML's figures for this process and the whole device.

    Make it before the process opens a GPU. In a container NVML may list this process under another process id: then it
    is the one that NVML lists only after the GPU was opened. ``pid`` may be set to that of a child process that was
    started after this object was made.
    """

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
        except Exception as error:  # nvmlInit raises a different class for each part that can be missing
            self._nvml = None
            logger.info("no NVML, VRAM is counted by the device's ledger alone: %s", error)

    @property
    def available(self) -> bool:
        """Whether NVML works on this machine."""
        return self._nvml is not None

    def used(self) -> int | None:
        """The bytes of VRAM that the driver counts for the process on all GPUs; ``None`` if it does not report them.

        A process takes a little more VRAM than the driver lists for it: 37 MiB more on an H100. This unlisted part is
        included. It is measured once: how much the VRAM in use that no process is listed for has grown since this
        object was made.
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
        """The free and the total bytes of the GPUs that this process uses, or of the first GPU if it uses none;
        ``None`` if the driver does not report them."""
        if self._nvml is None:
            return None
        try:
            mine = [handle for handle in self._handles if self._listed_as in self._on(handle)] or self._handles[:1]
            memory = [self._nvml.nvmlDeviceGetMemoryInfo(handle) for handle in mine]
        except self._nvml.NVMLError:
            return None
        return sum(each.free for each in memory), sum(each.total for each in memory)

    def others(self) -> dict[int, int]:
        """The bytes of VRAM of every other process, by process id, all GPUs together. Processes that only draw are
        included. Empty if the driver does not report them."""
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
        with contextlib.suppress(nvml.NVMLError):  # some GPUs have no graphics
            listed += nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        return {process.pid: process.usedGpuMemory or 0 for process in listed}

    def _unlisted_bytes(self) -> int:
        """The bytes of VRAM in use on all GPUs that NVML lists for no process."""
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
    """Updates the overhead in the device's ledger: the VRAM that the driver holds for this process for its own use."""

    def __init__(self, device: ShardDevice, observer: Observer | None) -> None:
        self._device = device
        self._observer = observer
        self._meter = OverheadMeter()

    def measure(self) -> None:
        """[any thread] Measures the overhead and sets it. Call it only while nothing is allocated or freed: the
        driver's figure may be seconds late.

        :raises BudgetBelowFloor: with this overhead the budget is below the floor.
        """
        used = self._observer.used() if self._observer is not None else None
        if used is not None:
            stats = self._device.stats()
            self._device.set_overhead(max(0, used - (stats.used_bytes - stats.overhead_bytes)) + DRIVER_MARGIN)
            self._meter.clear()

    def follow(self) -> None:
        """Raises the overhead if the driver has taken more VRAM since :meth:`measure`. Call it between decodes; it
        takes 0.05 ms. The device evicts weights at once, so that :data:`DRIVER_MARGIN` is free again."""
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
