"""Measures how fast a model's file is read from its disk, past the page cache, and keeps the rates of each disk."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import sys
import threading
import time
from pathlib import Path

from frameshard import models, native
from frameshard.errors import ModelNotFound
from frameshard.plan import kept

Rates = dict[str, list[float]]
"""As :attr:`frameshard.plan.profile.Profile.disk` has them; empty if there are none."""

READ_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""The sizes of reads that are measured."""
_READERS = 4  # as many as the shard device has


def measure(path: Path, seconds: float = 1.0, most_gbps: float = 0.0) -> Rates:
    """The bytes per second of :data:`READ_BYTES`, four reads at a time. Empty where files cannot be read past the page
    cache, and for a file that is smaller than all of them.

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


def measure_model(model: Path, device: str) -> Rates:
    """The rates of the disk that a model is on, as :func:`measure` gives them. Empty if its file is gone.

    :param device: name of the device, which limits the rates if it is an emulated one with a disk.
    """
    with contextlib.suppress(OSError, ModelNotFound):
        return measure(_largest(model), most_gbps=native.parse_device(device).disk_gbps)
    return {}


def recall(model: Path, device: str) -> Rates:
    """What :func:`keep` has kept for the disk that a model is on. Empty if it makes no sense: a damaged file must not
    keep a model from loading."""
    with contextlib.suppress(OSError, ModelNotFound, ValueError, TypeError, KeyError):
        document = json.loads(_path(model, device).read_text("utf-8"))
        sizes, rates = (list(map(float, document[name])) for name in ("read_bytes", "rate"))
        rising = sizes == sorted(set(sizes))
        if sizes and rising and len(sizes) == len(rates) and all(1 <= each < math.inf for each in sizes + rates):
            return {"read_bytes": sizes, "rate": rates}
    return {}


def keep(model: Path, device: str, rates: Rates) -> None:
    """Keeps the measured rates of the disk that a model is on, for all models on it."""
    with contextlib.suppress(OSError, ModelNotFound):
        kept.try_write(_path(model, device), rates, "the rates of the disk are")


def _largest(model: Path) -> Path:
    """Of several files of a model the one to read: the first one may hold no weights."""
    return max(models.files_of(model), key=os.path.getsize)


def _path(model: Path, device: str) -> Path:
    """Where the rates of a disk are kept. After a restart another disk may have the number of this one, so its file
    system counts, too."""
    file = _largest(model)
    system = 0
    if sys.platform == "linux":
        system = os.statvfs(file).f_fsid
    return kept.path_of([os.stat(file).st_dev, system, native.parse_device(device).disk_gbps], "disk-")


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
                n_read = os.preadv(fd, [memory], (place * 7919 % n_places) * size)
                if n_read == 0:
                    break  # the file has become shorter
                done[reader] += n_read
                place += _READERS
                ended[reader] = time.monotonic()

    threads = [threading.Thread(target=work, args=(reader,)) for reader in range(_READERS)]
    try:
        for thread in threads:
            thread.start()
    finally:  # also if the system does not give all of them: the caller closes the file
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return sum(done) / max(max(ended) - start, 1e-9)
