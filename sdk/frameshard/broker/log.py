"""The log: what the sidecar says itself, and the output of its child processes, on standard error.

Nothing waits until it is written. The program that reads standard error may be slow or stand still: a terminal in which
a user selects text, a pipe that a game does not read. A thread writes, and if too much waits for it, what follows is
left out, and the log says so.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress

MAX_WAITING_BYTES = 1 << 20
END_S = 1.0
"""Seconds that are left at the end of the process for what waits."""

_STDERR = 2


class _Writer:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._left_out_bytes = 0
        self._writing = False
        self._runs = False

    def put(self, data: bytes) -> None:
        with self._changed:
            if len(self._waiting) + len(data) > MAX_WAITING_BYTES:
                self._left_out_bytes += len(data)
                return
            self._waiting += data
            if not self._runs:
                with suppress(RuntimeError):  # the system gives no thread now
                    threading.Thread(target=self._run, daemon=True, name="log").start()
                    self._runs = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Waits until everything is written, for at most :data:`END_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), END_S if self._runs else 0.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                data, left_out_bytes = bytes(self._waiting), self._left_out_bytes
                self._waiting.clear()
                self._left_out_bytes, self._writing = 0, True
            if left_out_bytes:
                data += b"sidecar: WARNING: %d bytes of the log are left out: nobody has read it\n" % left_out_bytes
            with suppress(OSError):  # standard error is closed
                while data:
                    data = data[os.write(_STDERR, data) :]
            with self._changed:
                self._writing = False
                self._changed.notify_all()


_writer = _Writer()


class _Stream:
    """What a :class:`logging.StreamHandler` writes to."""

    def write(self, text: str) -> None:
        _writer.put(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Does not wait: the handler calls it after each line."""


def write(data: bytes) -> None:
    """Adds bytes to the log."""
    _writer.put(data)


def install() -> None:
    """From now on no logger waits for standard error. To be called once, after `logging.basicConfig`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(_Stream())
    atexit.register(_writer.finish)
