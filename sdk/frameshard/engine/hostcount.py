"""Reads how much host memory processes, files and the machine use, from Linux's /proc. Other systems give no figures.

A page that several processes map is counted once: each process counts its share (PSS). The pages of the model's file
are counted apart and whole, also if another program uses the same file: those that the engine maps, and those that the
page cache has (mincore), because the system may keep them although no process maps them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from frameshard import models
from frameshard.engine import controlgroup
from frameshard.models import ModelFile
from frameshard.records import record

PROC = Path("/proc")
KIB = 1 << 10
LARGE_PAGES, NO_DUMP = b"hg", b"dd"
"""Flags of mappings. Emulated VRAM has the first alone; the KV store's memory has both."""


def counts() -> bool:
    """Whether this system has the figures."""
    return sys.platform == "linux" and (PROC / "self" / "smaps").exists()


@record
class Machine:
    """Host memory of the machine in bytes; of a control group if that has less available.

    :param available_bytes: what programs can still take without swapping.
    :param stalled: percent of the last 10 s in which a task waited for memory; 0 if the kernel does not tell.
    :param of: whose memory it is.
    """

    total_bytes: int
    available_bytes: int
    stalled: float
    of: str = "the machine"


def machine(proc: Path = PROC, groups: Path = controlgroup.MOUNT) -> Machine | None:
    """The figures of the machine, or of the control group with less available; None if the system does not give them.

    :param proc: where /proc is.
    :param groups: where the file systems of the control groups are.
    """
    found = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * KIB
        total, available = found["MemTotal"], found["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    stalled = controlgroup.stall(proc / "pressure" / "memory")
    group = controlgroup.tightest(proc, groups)
    if group is not None and group.available_bytes < available:
        return Machine(group.limit_bytes, group.available_bytes, max(stalled, group.stalled), "the control group")
    return Machine(total, available, stalled)


def family(ancestor: int) -> Iterator[int]:
    """The ids of a process and of all processes that it and they have started."""
    parents = {}
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                # The name, in parentheses, may have any characters. Behind it are the state and the parent.
                stat = (PROC / entry / "stat").read_bytes()
                parents[int(entry)] = int(stat[stat.rindex(b")") + 1 :].split()[1])
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return iter(found)


def process_bytes(pid: int) -> int:
    """The share of memory (PSS) of a process; 0 if it has ended or may not be read."""
    with contextlib.suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * KIB
    return 0


@record
class Own:
    """This process, without the mappings of the model's files and without emulated VRAM.

    :param bytes: its share of memory.
    :param mapped_bytes: addresses at which it maps the files.
    :param resident_bytes: pages of the files that are in memory at these addresses.
    """

    bytes: int
    mapped_bytes: int
    resident_bytes: int


def own(model: ModelPages, *, emulated: bool) -> Own:
    """
    :param emulated: whether the device is the emulated one, whose VRAM is memory of this process.
    """
    total = mapped = resident = pss = rss = size = 0
    of_file = False
    files = model.files
    for line in (PROC / "self" / "smaps").read_bytes().splitlines():
        if line.startswith(b"Pss:"):
            pss = int(line.split()[1]) * KIB
        elif line.startswith(b"Rss:"):
            rss = int(line.split()[1]) * KIB
        elif line.startswith(b"Size:"):
            size = int(line.split()[1]) * KIB
        elif line.startswith(b"VmFlags:"):
            if of_file:
                mapped += size
                resident += rss
            else:
                flags = line.split()[1:]
                if not (emulated and LARGE_PAGES in flags and NO_DUMP not in flags):
                    total += pss
        elif not line[:1].isupper():  # addresses, permissions, offset, device, inode, path
            of_file = _file_of(line) in files
    return Own(total, mapped - model.own_bytes, resident)


def _file_of(mapping: bytes) -> tuple[bytes, bytes]:
    """The device and the inode in a line of /proc/self/maps. Together they tell files apart. A path does not: it is the
    target of a link, and the name after a renaming."""
    words = mapping.split(maxsplit=5)
    return words[3], words[4]


def _file_at(address: int) -> tuple[bytes, bytes]:
    """What :func:`_file_of` gives for the mapping at an address. `os.stat` may name another device, as on btrfs."""
    for line in (PROC / "self" / "maps").read_bytes().splitlines():
        begin, _, end = line[: line.index(b" ")].partition(b"-")
        if int(begin, 16) <= address < int(end, 16):
            return _file_of(line)
    raise OSError(f"/proc/self/maps has no mapping at {address:x}")


class ModelPages:
    """The pages of a model's files, or of the part of a file that is the model.

    :raises ModelNotFound: a file is missing.
    :raises OSError: a file cannot be read.
    """

    def __init__(self, model: str) -> None:
        found = models.locate(model)
        whole = found.n_bytes is None
        self._files = [_Pages(ModelFile(path) if whole else found) for path in models.files_of(Path(model))]
        self.files = {file.key for file in self._files}
        """The device and the inode of each file, as in /proc/self/maps."""

    @property
    def own_bytes(self) -> int:
        """Addresses that this object maps."""
        return sum(file.own_bytes for file in self._files)

    def forget(self) -> None:
        """Drops pages from the page cache that no process maps."""
        for file in self._files:
            file.forget()

    def cached_bytes(self) -> int | None:
        """The bytes in the page cache; None if the system does not tell: of a file that another user owns and that this
        user may not write, Linux says that all of it is there."""
        total = 0
        for file in self._files:
            cached = file.cached_bytes()
            if cached is None:
                return None
            total += cached
        return total


def _is_told(path: Path, owner: int) -> bool:
    """Whether the system says which pages of a file are in memory: only of files that one owns or may write."""
    if sys.platform != "linux":
        return False
    return owner == os.geteuid() or os.access(path, os.W_OK, effective_ids=True)


class _Pages:
    """The pages of one file, or of a part of it."""

    def __init__(self, found: ModelFile) -> None:
        self._file = os.open(found.path, os.O_RDONLY)  # kept: the path may name another file later
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._begin = found.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        n_bytes = (found.offset + found.n_bytes if found.n_bytes else status.st_size) - self._begin
        self._map = mmap.mmap(self._file, n_bytes, access=mmap.ACCESS_READ, offset=self._begin)
        self._is_told = _is_told(found.path, status.st_uid)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.key = _file_at(self._bytes.ctypes.data)
        self._pages = np.empty(-(-len(self._map) // mmap.PAGESIZE), np.uint8)

    @property
    def own_bytes(self) -> int:
        return self._pages.size * mmap.PAGESIZE

    def forget(self) -> None:
        if sys.platform == "linux":
            os.posix_fadvise(self._file, self._begin, len(self._map), os.POSIX_FADV_DONTNEED)

    def cached_bytes(self) -> int | None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not self._is_told or not hasattr(libc, "mincore"):
            return None
        address, n_bytes = ctypes.c_void_p(self._bytes.ctypes.data), ctypes.c_size_t(len(self._map))
        if libc.mincore(address, n_bytes, self._pages.ctypes.data_as(ctypes.c_void_p)) != 0:
            return None
        return int(np.count_nonzero(self._pages & 1)) * mmap.PAGESIZE
