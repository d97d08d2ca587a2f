"""Reads from Windows' DXGI how much VRAM this process uses, on GPUs of all makers. NVML does not say it under WDDM.

A GPU's local memory is its VRAM; on an integrated GPU it is a share of host memory. Windows gives each process a budget
of it, which shrinks while others use more.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from ctypes import byref, c_char, c_long, c_size_t, c_uint, c_uint64, c_void_p, c_wchar

from frameshard.records import record

_FACTORY1 = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387").bytes_le  # IID_IDXGIFactory1
_ADAPTER3 = uuid.UUID("645967a4-1392-4310-a798-8053ce3e93fd").bytes_le  # IID_IDXGIAdapter3
# Positions in the tables of methods of these two interfaces.
_QUERY_INTERFACE, _RELEASE, _GET_DESC1, _ENUM_ADAPTERS1, _QUERY_VIDEO_MEMORY_INFO = 0, 2, 10, 12, 14
_SOFTWARE = 2  # DXGI_ADAPTER_FLAG_SOFTWARE
_LOCAL = 0  # DXGI_MEMORY_SEGMENT_GROUP_LOCAL
_MOST_ADAPTERS = 64


class _Description(ctypes.Structure):
    """DXGI_ADAPTER_DESC1."""

    _fields_ = (
        ("description", c_wchar * 128),
        ("ids", c_uint * 4),
        ("dedicated_video_bytes", c_size_t),
        ("dedicated_system_bytes", c_size_t),
        ("shared_system_bytes", c_size_t),
        ("luid", c_char * 8),
        ("flags", c_uint),
    )


class _Memory(ctypes.Structure):
    """DXGI_QUERY_VIDEO_MEMORY_INFO."""

    _fields_ = (
        ("budget_bytes", c_uint64),
        ("used_bytes", c_uint64),
        ("available_for_reservation_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
    )


@record
class _Adapter:
    """A GPU. It is kept to the end of the process."""

    pointer: c_void_p
    total_bytes: int

    def memory(self) -> _Memory | None:
        """The figures for this process; ``None`` if the GPU has gone."""
        memory = _Memory()
        status = _call(self.pointer, _QUERY_VIDEO_MEMORY_INFO, 0, _LOCAL, byref(memory))
        return memory if status >= 0 else None


class DxgiObserver:
    """The figures of DXGI, as :class:`~frameshard.engine.observer.Observer` describes them. It knows the process that
    makes it alone: with another ``pid`` there are none."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._adapters = _adapters()

    @property
    def source(self) -> str | None:
        """``"dxgi"`` if Windows knows a GPU, else ``None``."""
        return "dxgi" if self._adapters else None

    def used(self) -> int | None:
        """The bytes of this process in the VRAM of all GPUs; ``None`` if there is no GPU."""
        figures = self._figures()
        return sum(memory.used_bytes for _, memory in figures) if figures else None

    def totals(self) -> tuple[int, int] | None:
        """What Windows still grants to this process, and the VRAM, of the GPUs on which it has VRAM; of the first GPU
        if it has none. ``None`` if there is no GPU."""
        figures = self._figures()
        mine = [each for each in figures if each[1].used_bytes] or figures[:1]
        if not mine:
            return None
        free = sum(max(0, memory.budget_bytes - memory.used_bytes) for _, memory in mine)
        return free, max(free, sum(total_bytes for total_bytes, _ in mine))

    def others(self) -> dict[int, int]:
        """Always empty: DXGI tells each process its own figures only."""
        return {}

    def _figures(self) -> list[tuple[int, _Memory]]:
        """The VRAM of each GPU, and its figures for this process."""
        if self.pid != os.getpid():
            return []
        figures = ((adapter.total_bytes, adapter.memory()) for adapter in self._adapters)
        return [(total_bytes, memory) for total_bytes, memory in figures if memory is not None]


def _adapters() -> list[_Adapter]:
    """The GPUs, without those that Windows computes in software. Empty on other systems."""
    if sys.platform != "win32":
        return []
    factory = c_void_p()
    try:
        if ctypes.WinDLL("dxgi").CreateDXGIFactory1(_FACTORY1, byref(factory)) < 0:
            return []
    except OSError:
        return []
    found = []
    for index in range(_MOST_ADAPTERS):
        plain, adapter, description = c_void_p(), c_void_p(), _Description()
        if _call(factory, _ENUM_ADAPTERS1, index, byref(plain)) < 0:
            break
        known = _call(plain, _GET_DESC1, byref(description)) >= 0 and not description.flags & _SOFTWARE
        if known and _call(plain, _QUERY_INTERFACE, _ADAPTER3, byref(adapter)) >= 0:
            found.append(_Adapter(adapter, description.dedicated_video_bytes))
        _call(plain, _RELEASE)
    _call(factory, _RELEASE)
    return found


def _call(pointer: c_void_p, method: int, *arguments: object) -> int:
    """Calls a method of a COM interface with numbers of 32 bits and pointers. Returns its status, which is negative for
    an error."""
    if sys.platform != "win32":
        raise AssertionError("only Windows has COM")
    table = ctypes.cast(pointer, ctypes.POINTER(ctypes.POINTER(c_void_p)))[0]
    types = (c_uint if isinstance(argument, int) else c_void_p for argument in arguments)
    function = ctypes.WINFUNCTYPE(c_long, c_void_p, *types)(table[method] or 0)
    return int(function(pointer, *arguments))
