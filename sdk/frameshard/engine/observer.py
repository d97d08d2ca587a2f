"""What the GPU's driver counts, to check the device's own ledger: by Windows' DXGI, NVML or Linux's DRM drivers.

Some systems report nothing, such as a container that hides process ids. There :meth:`Observer.used` is ``None`` and the
ledger is not checked.
"""

from __future__ import annotations

import logging
from typing import Protocol

from frameshard.engine.drm import DrmObserver
from frameshard.engine.dxgi import DxgiObserver
from frameshard.engine.nvml import NvmlObserver

logger = logging.getLogger("frameshard.engine")


class Observer(Protocol):
    """A driver's figures for this process and for the GPUs that it uses.

    ``pid`` may be set to that of a child process that was started after the observer was made. Make it before the
    process opens a GPU.
    """

    pid: int

    @property
    def source(self) -> str | None:
        """Where the figures come from: ``"dxgi"``, ``"nvml"`` or ``"drm"``; ``None`` if there are none."""

    def used(self) -> int | None:
        """The bytes of VRAM that the driver counts for the process on all GPUs; ``None`` if it does not report them."""

    def totals(self) -> tuple[int, int] | None:
        """The free and the total bytes of the GPUs that the process uses; ``None`` if the driver does not report
        them."""

    def others(self) -> dict[int, int]:
        """The bytes of VRAM of every other process, by process id, all GPUs together. Empty if the driver does not
        report them."""


def find_observer() -> Observer:
    """DXGI where Windows knows a GPU, because NVML does not count a process there (WDDM); else NVML where it works,
    else DRM. Without all of them the observer has no figures, and the log says so."""
    dxgi = DxgiObserver()
    if dxgi.source is not None:
        return dxgi
    nvml = NvmlObserver()
    if nvml.source is not None:
        return nvml
    drm = DrmObserver()
    if drm.source is None:
        logger.info("no driver counts VRAM here, only the device's ledger does: %s", nvml.error)
    return drm
