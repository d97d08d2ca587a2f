"""Prepares the images of a request. Small ones are sent in the message, larger ones through shared memory.

On Linux the shared memory is a memory file, sealed after it is written. It cannot change, and the kernel removes it
when the last process has closed it. Elsewhere it is a file in a directory of this user, which Windows removes when this
process ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, Literal

from frameshard import system
from frameshard.errors import BadArgument
from frameshard.records import record
from frameshard.wire import messages as m

if sys.platform == "linux":
    import fcntl

INLINE_BYTES = 16 << 10
"""Larger images go through shared memory: those in a message take its room from the texts."""


@record
class Pixels:
    """An image of 8-bit pixels, top row first.

    :param data: `height` rows of `stride` bytes. They are copied when the question is asked: in the asynchronous client
        when its stream is begun or entered.
    :param width: pixels in a row.
    :param height: rows.
    :param format: "rgb", or "rgba" with an alpha channel, which is not used.
    :param stride: bytes from the start of one row to the start of the next; 0: the rows have no gap.
    """

    data: bytes | bytearray | memoryview = field(repr=False)
    width: int
    height: int
    format: Literal["rgb", "rgba"] = "rgb"
    stride: int = 0


class SharedImages:
    """The images of one job. :attr:`wire` has them for the request. Close it when the job has ended.

    :param images: each is the bytes of an image or sound file, or :class:`Pixels`.
    :raises BadArgument: it is no such list, an image is empty or too large, or cannot be written for the sidecar.
    """

    def __init__(self, images: Sequence[bytes | Pixels]) -> None:
        self._undo = contextlib.ExitStack()
        if isinstance(images, str) or not isinstance(images, Sequence):
            raise _no_images()
        try:
            self.wire = tuple(self._share(image) for image in images)
        except BaseException:
            self.close()
            raise

    def _share(self, image: bytes | Pixels) -> m.Image:
        pixels = image if isinstance(image, Pixels) else Pixels(image, 0, 0)
        data = _bytes_of(pixels.data)
        kind: m.ImageFormat = pixels.format if isinstance(image, Pixels) else "encoded"
        if len(data) <= INLINE_BYTES:
            return m.Image(kind, bytes(data), "", 0, pixels.width, pixels.height, pixels.stride)
        path = self._memory(data)
        return m.Image(kind, b"", path, len(data), pixels.width, pixels.height, pixels.stride)

    def _memory(self, data: memoryview) -> str:
        try:
            if sys.platform == "linux":
                fd = os.memfd_create("frameshard-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                self._undo.callback(os.close, fd)
                with open(fd, "wb", closefd=False) as file:
                    file.write(data)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
                return f"/proc/{os.getpid()}/fd/{fd}"
            path = system.image_directory() / f"image-{secrets.token_hex(16)}"
            self._undo.callback(system.share(path, data))
        except OSError as error:
            raise BadArgument(f"an image cannot be shared: {error}", field="images") from None
        return str(path)

    def close(self) -> None:
        """Releases the shared memory. Safe to call twice."""
        self._undo.close()


def unchanging(images: Any) -> Any:
    """Images with copies of their buffers, so that the program may write into these again. What is no image is left as
    it is, and :class:`SharedImages` refuses it."""

    def copied(image: Any) -> Any:
        data = image.data if isinstance(image, Pixels) else image
        if isinstance(data, bytes):
            return image
        try:
            kept = bytes(_bytes_of(data))
        except BadArgument:
            return image
        return replace(image, data=kept) if isinstance(image, Pixels) else kept

    return tuple(map(copied, images)) if isinstance(images, (list, tuple)) else images


def _bytes_of(data: Any) -> memoryview:
    """
    :raises BadArgument: these are no bytes, or too few or too many for an image.
    """
    try:
        view = memoryview(data)
    except TypeError:
        raise _no_images() from None
    if view.itemsize != 1:
        raise BadArgument(
            f"an image's data has elements of {view.itemsize} bytes: convert it to 8 bits a channel", field="images"
        )
    if not view.c_contiguous:
        raise BadArgument("an image's data has gaps between its bytes: copy it into bytes", field="images")
    if not 0 < view.nbytes <= m.MAX_IMAGE_BYTES:
        raise BadArgument(f"an image has 1 to {m.MAX_IMAGE_BYTES} bytes", field="images")
    return view.cast("B")


def _no_images() -> BadArgument:
    return BadArgument("images: a list of bytes or Pixels is needed; read the files first", field="images")
