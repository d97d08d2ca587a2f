"""Passes on the output of an engine process, and keeps its last lines to explain why the process died.

llama.cpp, ggml and the C++ runtime write the reason of an abort only to standard output or standard error.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from frameshard.broker import log

TAIL_BYTES = 4096
MAX_LINES = 4
MAX_CHARACTERS = 600

_NOISE = ("engine: INFO:", "engine: DEBUG:")
"""Lines that begin so are not kept: they are ordinary lines of the engine's log."""


class LastWords:
    """Keeps the last lines of one process."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        """Set when all output was read: the process, and all processes that inherited its pipe, have closed it."""
        self._tail = b""

    def __str__(self) -> str:
        """Returns the last lines as one line; "" if there are none."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        kept = [line for line in lines if line and not line.startswith(_NOISE)]
        return "; ".join(kept[-MAX_LINES:])[-MAX_CHARACTERS:]

    async def listen(self, pipe: trio.abc.ReceiveStream) -> None:
        """Reads `pipe` to its end, and writes all of it to the log."""
        with suppress(trio.BrokenResourceError):
            while data := await pipe.receive_some():
                self._tail += data
                if len(self._tail) > TAIL_BYTES:
                    self._tail = self._tail[-TAIL_BYTES:].partition(b"\n")[2] or self._tail[-TAIL_BYTES:]
                log.write(bytes(data))
        self.ended.set()
