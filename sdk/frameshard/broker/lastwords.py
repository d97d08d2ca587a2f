"""Standard output and error of an engine process: passed on, and the end of it kept as the reason of its death.

llama.cpp, ggml and the C++ runtime write only there why they abort.
"""

from __future__ import annotations

import os
from contextlib import suppress

import trio

TAIL_BYTES = 4096
MAX_LINES = 4
MAX_CHARACTERS = 600

_NOISE = ("engine: INFO:", "engine: DEBUG:")
"""Lines of the engine's own log that explain no death."""


class LastWords:
    """The last lines of one process."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        """Everything has been read: the process and all that inherited its pipe have closed it."""
        self._tail = b""

    def __str__(self) -> str:
        """The last lines as one; "" where there are none."""
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        kept = [line for line in lines if line and not line.startswith(_NOISE)]
        return "; ".join(kept[-MAX_LINES:])[-MAX_CHARACTERS:]

    async def listen(self, pipe: trio.abc.ReceiveStream) -> None:
        """Reads `pipe` to its end, and passes all of it on to this process's standard error."""
        with suppress(trio.BrokenResourceError):
            while data := await pipe.receive_some():
                self._tail += data
                if len(self._tail) > TAIL_BYTES:
                    self._tail = self._tail[-TAIL_BYTES:].partition(b"\n")[2] or self._tail[-TAIL_BYTES:]
                # In a thread: the reader of our standard error may be slow.
                await trio.to_thread.run_sync(_pass_on, bytes(data), abandon_on_cancel=True)
        self.ended.set()


def _pass_on(data: bytes) -> None:
    with suppress(OSError):  # it is closed
        while data:
            data = data[os.write(2, data) :]
