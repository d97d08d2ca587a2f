"""Measures how fast a model's file is read from its disk, past the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from frameshard import models, native

READ_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""The sizes of reads that are measured."""
_READERS = 4  # as many as the shard device has


def measure(path: Path, seconds: float = 1.0, most_gbps: float = 0.0) -> dict[str, list[float]]:
    """The bytes per second of :data:`READ_BYTES`, four reads at a time, as for
    :attr:`frameshard.plan.profile.Profile.disk`. Empty where files cannot be read past the page cache, and for a file
    that is smaller than all of them.

    :param path: the file; it is only read.
    :param seconds: time for all sizes together.
    :param most_gbps: a limit on the rates in 1e9 bytes/s; 0 for none.
    """
    if sys.platform != "linux":
        return {}
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            rates = {size: _rate(fd, size, seconds / len(READ_BYTES)) for size in READ_BYTES}
        finally:
            os.close(fd)
        limit = most_gbps * 1e9 or float("inf")
        found = {size: min(rate, limit) for size, rate in rates.items() if rate > 0}
        return {"read_bytes": [float(size) for size in found], "rate": list(found.values())} if found else {}
    return {}


def measure_model(model: Path, device: str) -> dict[str, list[float]]:
    """The rates of the disk that a model is on, as :func:`measure` gives them. Of several files the largest is read:
    the first one may hold no weights.

    :param device: name of the device, which limits the rates if it is an emulated one with a disk.
    """
    largest = max(models.files_of(model), key=os.path.getsize)
    return measure(largest, most_gbps=native.parse_device(device).disk_gbps)


def _rate(fd: int, size: int, seconds: float) -> float:
    """Bytes per second of reads of ``size`` bytes; 0 if the file is smaller."""
    n_places = os.fstat(fd).st_size // size
    if n_places == 0:
        return 0.0
    start = time.monotonic()
    done = [0] * _READERS
    ended = [start] * _READERS

    def work(reader: int) -> None:
        if sys.platform != "linux":
            return
        with mmap.mmap(-1, size) as memory, contextlib.suppress(OSError):
            place = reader
            while not done[reader] or time.monotonic() < start + seconds:
                done[reader] += os.preadv(fd, [memory], (place * 7919 % n_places) * size)
                place += _READERS
                ended[reader] = time.monotonic()

    threads = [threading.Thread(target=work, args=(reader,)) for reader in range(_READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / max(max(ended) - start, 1e-9)
