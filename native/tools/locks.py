"""Locks of directories in the cache, against builds at the same time."""

import contextlib
import fcntl
import pathlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """Makes a directory and holds its lock. Waits for another build that holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {directory}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
