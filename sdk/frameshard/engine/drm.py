"""Reads from Linux's DRM drivers how much VRAM a process uses: AMD's and Intel's GPUs, which NVML does not know.

The kernel describes each open file of a GPU in ``/proc/PID/fdinfo`` (its page "DRM client usage stats"): the GPU, the
client that the file belongs to, and the client's bytes by memory region. Free memory is in sysfs, by amdgpu alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

VRAM = ("vram", "local")
"""How the names of regions on a GPU begin: ``vram`` (amdgpu), ``vram0`` (xe), ``local0`` (i915). Others, such as
``gtt`` and ``system0``, are host memory."""

KINDS = ("resident", "memory")
"""What a region's bytes are called, the better one first. ``total`` is of no use: it has evicted buffers too."""

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


class DrmObserver:
    """The figures of DRM drivers, as :class:`~frameshard.engine.observer.Observer` describes them.

    :param proc: where the proc file system is mounted.
    :param sys: where sysfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self.pid = os.getpid()
        self._proc, self._sys = proc, sys

    @property
    def source(self) -> str | None:
        """``"drm"`` if there is a GPU with a DRM driver, else ``None``."""
        return "drm" if any((self._sys / "class" / "drm").glob("renderD*")) else None

    def used(self) -> int | None:
        """The bytes of the process in the VRAM of all GPUs; ``None`` if no driver reports them."""
        clients = self._clients()
        return sum(clients.values()) if clients else None

    def totals(self) -> tuple[int, int] | None:
        """The free and the total bytes of the GPUs on which the process has VRAM; ``None`` unless their driver is
        amdgpu."""
        free = total = 0
        for gpu in {gpu for (gpu, _), n_bytes in self._clients().items() if n_bytes}:
            directory = self._sys / "bus" / "pci" / "devices" / gpu
            try:
                of_gpu = int((directory / "mem_info_vram_total").read_text())
                free += of_gpu - int((directory / "mem_info_vram_used").read_text())
            except (OSError, ValueError):
                return None
            total += of_gpu
        return (free, total) if total else None

    def others(self) -> dict[int, int]:
        """Always empty: the kernel shows other users' files to root alone."""
        return {}

    def _clients(self) -> dict[tuple[str, str], int]:
        """The bytes of VRAM of each client of the process, by GPU and client number. Several files may belong to one
        client."""
        found = {}
        for fields in self._files():
            n_bytes = _vram_bytes(fields)
            if n_bytes is not None and "drm-client-id" in fields:
                found[fields.get("drm-pdev", ""), fields["drm-client-id"]] = n_bytes
        return found

    def _files(self) -> Iterator[dict[str, str]]:
        """The fields of each open file of a GPU. A file may be closed meanwhile."""
        process = self._proc / str(self.pid)
        try:
            numbers = os.listdir(process / "fd")
        except OSError:
            return
        for number in numbers:
            try:
                if os.readlink(process / "fd" / number).startswith("/dev/dri/"):
                    lines = (process / "fdinfo" / number).read_text().splitlines()
                    yield {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
            except OSError:
                continue


def _vram_bytes(fields: dict[str, str]) -> int | None:
    """The bytes in regions of VRAM; ``None`` if the file has no such region."""
    regions: dict[str, int] = {}
    for kind in reversed(KINDS):
        prefix = f"drm-{kind}-"
        for key, value in fields.items():
            if key.startswith(prefix) and key[len(prefix) :].startswith(VRAM):
                number, _, unit = value.partition(" ")
                if number.isdigit() and unit in UNITS:
                    regions[key[len(prefix) :]] = int(number) * UNITS[unit]
    return sum(regions.values()) if regions else None
