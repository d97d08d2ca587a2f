"""Keeps the images that clients leave in shared memory until their jobs have ended.

On Linux an image is a sealed memory file, which the client cannot change or shrink. The broker keeps it open and checks
only its seals and size; the engine reads the bytes. Elsewhere an image is a file in one directory of this user, so that
no path makes the engine read another file. On Windows nobody can write to it while the broker keeps it open; on macOS
the client must not change it before the job has ended.

Images have the highest quarter of the file descriptors. So they leave enough for connections, and the lowest free
descriptor, by which the listener notices a flood of connections, does not depend on them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from frameshard import system
from frameshard.errors import BadArgument, Overloaded
from frameshard.wire import messages as m

if sys.platform != "win32":
    import fcntl

MAX_HELD_BYTES = 1 << 30
"""The most bytes of images in shared memory, of all jobs together."""

_MEMORY_FILE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_NAME = re.compile(r"image-[0-9a-z]{1,64}")
_FLAGS = getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if sys.platform != "linux" else 0)
"""A link from /proc to a memory file must be followed."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

_TOO_MANY = "too many images wait: ask again when some jobs have ended"

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
        :raises Overloaded: too many images, or too many bytes of them, are kept already.
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
            raise Overloaded(_TOO_MANY, max_bytes=MAX_HELD_BYTES)
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
    if image.format == "rgb" and not image.stride and n_bytes == image.width * image.height * _CHANNELS["rgba"]:
        raise _wrong(index, f"{n_bytes} bytes are {image.width} x {image.height} pixels of rgba: give this format")


def _hold(index: int, image: m.Image, held: HeldImages) -> str:
    """Opens the shared memory of an image and checks it.

    :returns: the path for the engine.
    :raises Overloaded: there is no descriptor for it.
    """
    _check_path(index, image.path)
    try:
        fd = _raised(system.open_to_read(image.path, _FLAGS))
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise Overloaded(_TOO_MANY) from None
        raise _wrong(index, f"{image.path} cannot be opened: {error.strerror}") from None
    held.on_close.append(lambda: os.close(fd))
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or not _is_sealed(fd):
        raise _wrong(index, "the memory is not sealed against writing, shrinking and growing")
    if state.st_size < image.size:
        raise _wrong(index, f"the memory has {state.st_size} bytes, not {image.size}")
    return f"/proc/{os.getpid()}/fd/{fd}" if sys.platform == "linux" else image.path


def _raised(fd: int) -> int:
    """Moves a descriptor into the highest quarter.

    :raises OSError: none is free there.
    """
    if sys.platform != "win32":
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, system.max_files() * 3 // 4)
        finally:
            os.close(fd)
    else:
        return fd


def _check_path(index: int, path: str) -> None:
    if sys.platform == "linux":
        if not _MEMORY_FILE.fullmatch(path):
            raise _wrong(index, "path is that of a memory file, /proc/PID/fd/N")
        return
    directory, name = os.path.split(path)
    wanted = str(system.image_directory())
    if os.path.normcase(directory) != os.path.normcase(wanted) or not _NAME.fullmatch(name):
        raise _wrong(index, f"path is that of a file image-NAME in {wanted}")


def _is_sealed(fd: int) -> bool:
    """Whether a memory file cannot change any more; true for a file where there are no memory files."""
    if sys.platform == "linux":
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # the file is not a memory file
            return False
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        return seals & wanted == wanted
    else:
        return True
