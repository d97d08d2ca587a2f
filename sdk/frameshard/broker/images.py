"""Keeps the images that clients leave in shared memory until their jobs have ended.

On Linux an image is a sealed memory file, which the client cannot change or shrink. The broker keeps it open and checks
only its seals and size; the engine reads the bytes. Elsewhere an image is a file, which the client must not change
before the job has ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from frameshard.errors import BadArgument, Overloaded
from frameshard.wire import messages as m

if sys.platform == "linux":
    import fcntl

MAX_HELD_BYTES = 1 << 30
"""The most bytes of images in shared memory, of all jobs together."""

_MEMORY_FILE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_CHANNELS = {"rgb": 3, "rgba": 4}


@dataclass(eq=False)
class HeldImages:
    """The images of one job, as they are sent to the engine. Close it when the job has ended.

    :param on_close: functions that release the images.
    """

    images: tuple[m.Image, ...] = ()
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Releases the images. Safe to call twice."""
        while self.on_close:
            self.on_close.pop()()


NO_IMAGES = HeldImages()


class Images:
    """The images of all jobs."""

    def __init__(self) -> None:
        self._held_bytes = 0

    def hold(self, images: Sequence[m.Image]) -> HeldImages:
        """Checks and keeps the images of a job.

        :raises BadArgument: an image does not match its fields; detail has ``index``.
        :raises Overloaded: too many bytes of images are kept already.
        """
        held = HeldImages()
        with contextlib.ExitStack() as undo:
            undo.callback(held.close)
            held.images = tuple(self._take(index, image, held) for index, image in enumerate(images))
            undo.pop_all()
        return held

    def _take(self, index: int, image: m.Image, held: HeldImages) -> m.Image:
        n_bytes = image.size if image.path else len(image.data)
        _check(index, image, n_bytes)
        if not image.path:
            return image
        if self._held_bytes + n_bytes > MAX_HELD_BYTES:
            raise Overloaded("too many images wait", max_bytes=MAX_HELD_BYTES)
        path = _hold(index, image, held)
        self._held_bytes += n_bytes
        held.on_close.append(lambda: self._forget(n_bytes))
        return replace(image, path=path)

    def _forget(self, n_bytes: int) -> None:
        self._held_bytes -= n_bytes


def _wrong(index: int, why: str) -> BadArgument:
    return BadArgument(f"image {index}: {why}", field="images", index=index)


def _check(index: int, image: m.Image, n_bytes: int) -> None:
    if bool(image.path) == bool(image.data) or bool(image.path) != bool(image.size):
        raise _wrong(index, "either data, or path and size")
    if image.format == "encoded":
        if image.width or image.height or image.stride:
            raise _wrong(index, "an encoded image has its size in its bytes: leave width, height and stride out")
        return
    row = image.width * _CHANNELS[image.format]
    stride = image.stride or row
    if not row or not image.height:
        raise _wrong(index, "pixels need width and height")
    if stride < row:
        raise _wrong(index, f"a row has {row} bytes, the stride is {stride}")
    if n_bytes < stride * (image.height - 1) + row:
        raise _wrong(index, f"{n_bytes} bytes are too few for {image.width} x {image.height} {image.format}")


def _hold(index: int, image: m.Image, held: HeldImages) -> str:
    if sys.platform != "linux":
        return image.path
    if not _MEMORY_FILE.fullmatch(image.path):
        raise _wrong(index, "path is that of a memory file, /proc/PID/fd/N")
    try:
        fd = os.open(image.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _wrong(index, f"{image.path} cannot be opened: {error.strerror}") from None
    held.on_close.append(lambda: os.close(fd))
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # the file is not a memory file
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or seals & wanted != wanted:
        raise _wrong(index, "the memory is not sealed against writing, shrinking and growing")
    if state.st_size < image.size:
        raise _wrong(index, f"the memory has {state.st_size} bytes, not {image.size}")
    return f"/proc/{os.getpid()}/fd/{fd}"
