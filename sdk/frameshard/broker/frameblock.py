"""The shared memory of the frame block. It is made at the first request for it, and removed when this process ends.

On Linux it is a memory file, sealed so that its size cannot change. Other processes open it through this process's
descriptor, so nothing is left behind if the sidecar is killed. Elsewhere it is a file in the directory of the launch,
which the next launch removes if the sidecar is killed.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from frameshard.errors import OutOfMemory
from frameshard.frame import PAGE_BYTES, initialise

if sys.platform == "linux":
    import fcntl


class FrameBlockMemory:
    """The frame block of one launch.

    :param directory: the directory of the launch.
    """

    def __init__(self, directory: Path) -> None:
        self._path: str | None = None
        self._directory = directory

    def path(self) -> str:
        """Returns the path at which any process of this user can open it.

        :raises OutOfMemory: the system gives no memory or file for it now. Nothing is left of it.
        """
        if self._path is None:
            try:
                self._path = self._make()
            except OSError as error:
                raise OutOfMemory(f"the frame block cannot be made: {error.strerror}") from None
        return self._path

    def _make(self) -> str:
        if sys.platform == "linux":
            fd = os.memfd_create("frameshard-frame-block", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                _begin(fd)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            except BaseException:
                os.close(fd)
                raise
            return f"/proc/{os.getpid()}/fd/{fd}"
        path = self._directory / "frame-block"
        try:
            with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
                _begin(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return str(path)


def _begin(fd: int) -> None:
    """Makes an empty file a frame block."""
    os.ftruncate(fd, PAGE_BYTES)
    with mmap.mmap(fd, PAGE_BYTES) as page:
        initialise(page)
