"""What the NVIDIA driver counts for this process: the cross-check of the device's own ledger.

Not every system tells: without NVIDIA's library, under Windows' WDDM, or where process numbers are hidden,
:meth:`Observer.used` is ``None`` and the ledger stands alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

logger = logging.getLogger("frameshard.engine")


class Observer:
    """Make it before the process opens a GPU: a process that NVML lists only afterwards, when its numbers are those of
    another namespace, is this one. ``pid`` may be set to that of a child started since."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._nvml: Any = None
        self._before: set[int] = set()
        self._listed_as: int | None = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._before = set(self._processes())
        except Exception as error:  # nvmlInit raises a class of its own for each thing that can be missing
            self._nvml = None
            logger.info("no NVML, VRAM is counted by the device's ledger alone: %s", error)

    @property
    def available(self) -> bool:
        """NVML answers on this machine."""
        return self._nvml is not None

    def used(self) -> int | None:
        """Bytes of VRAM that the driver counts for the process over all GPUs; ``None`` where it does not tell."""
        if self._nvml is None:
            return None
        try:
            processes = self._processes()
        except self._nvml.NVMLError:
            return None
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

    def _processes(self) -> dict[int, int]:
        used: dict[int, int] = {}
        for handle in self._handles:
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory is not None:
                    used[process.pid] = used.get(process.pid, 0) + process.usedGpuMemory
        return used
