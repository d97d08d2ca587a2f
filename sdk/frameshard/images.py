"""Images for a request: small ones inside the message, larger ones in shared memory.

On Linux that is a memory file, sealed after it is written: it cannot change, and it ends with the last process that has
it open. Elsewhere it is a temporary file of this user.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from frameshard.errors import BadArgument
from frameshard.wire import messages as m

if sys.platform == "linux":
    import fcntl


@dataclass(frozen=True)
class Pixels:
    """An image of a renderer: rows of 8-bit pixels from the top. Alpha is not used.

    :param data: `height` rows of `stride` bytes.
    :param stride: bytes from one row to the next; 0: rows follow each other without a gap.
    """

    data: bytes | bytearray | memoryview = field(repr=False)
    width: int
    height: int
    format: Literal["rgb", "rgba"] = "rgb"
    stride: int = 0


class SharedImages:
    """The images of one job, as its request has them in :attr:`wire`. Close it when the job has ended.

    :raises BadArgument: an image is empty or too large.
    """

    def __init__(self, images: Sequence[bytes | Pixels]) -> None:
        self._undo = contextlib.ExitStack()
        try:
            self.wire = tuple(self._share(image) for image in images)
        except BaseException:
            self.close()
            raise

    def _share(self, image: bytes | Pixels) -> m.Image:
        pixels = image if isinstance(image, Pixels) else Pixels(image, 0, 0)
        data = memoryview(pixels.data).cast("B")
        if not 0 < len(data) <= m.MAX_IMAGE_BYTES:
            raise BadArgument(f"an image has 1 to {m.MAX_IMAGE_BYTES} bytes", field="images")
        kind: m.ImageFormat = pixels.format if isinstance(image, Pixels) else "encoded"
        if len(data) <= m.MAX_INLINE_BYTES // m.MAX_IMAGES:
            return m.Image(kind, bytes(data), "", 0, pixels.width, pixels.height, pixels.stride)
        path = self._memory(data)
        return m.Image(kind, b"", path, len(data), pixels.width, pixels.height, pixels.stride)

    def _memory(self, data: memoryview) -> str:
        if sys.platform == "linux":
            fd = os.memfd_create("frameshard-image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._undo.callback(os.close, fd)
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
            return f"/proc/{os.getpid()}/fd/{fd}"
        fd, path = tempfile.mkstemp(prefix="frameshard-image-")
        self._undo.callback(os.unlink, path)
        with open(fd, "wb") as file:
            file.write(data)
        return path

    def close(self) -> None:
        """Safe to call twice."""
        self._undo.close()
