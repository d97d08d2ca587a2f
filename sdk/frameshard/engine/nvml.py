"""Reads from the NVIDIA driver (NVML) how much VRAM this process uses, to check the device's own ledger.

Some systems do not report it: without NVIDIA's library, under Windows' WDDM, or in a container that hides process ids.
There :meth:`NvmlObserver.used` is ``None``.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

MAX_UNLISTED = 128 << 20
"""If more unlisted VRAM appears, it belongs to another process that started at the same time."""


class NvmlObserver:
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
        self.error = ""
        """Why there is no NVML."""
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            self._before = set(self._processes())
            self._unlisted_before = self._unlisted_bytes()
        except Exception as error:  # nvmlInit raises a different class for each part that can be missing
            self._nvml = None
            self.error = f"no NVML: {error}"

    @property
    def source(self) -> str | None:
        """``"nvml"`` if NVML works on this machine, else ``None``."""
        return None if self._nvml is None else "nvml"

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
