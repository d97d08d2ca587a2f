"""Ctrl-C ends a command quietly and at once, with exit status 130.

Python handles a signal between two bytecodes of the main thread. A command that loads a model in this process spends
seconds in single calls into llama.cpp, and a callback from there swallows the exception. So a thread, which such calls
do not hold up, ends the process when the main thread has not done so :data:`GRACE_S` after the signal. In that time
the main thread usually unwinds, and removes what it has left on the disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

STATUS = 130
GRACE_S = 0.5

at_end: list[Callable[[], None]] = []
"""Called before the process is ended without unwinding, to give the terminal back as it was. Must not wait."""


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    """Ends this process :data:`GRACE_S` after a SIGINT, or at a second one, also while the main thread is in native
    code. To be entered by the main thread. Raises KeyboardInterrupt like Python's own handler, and nothing else once
    there was a SIGINT."""
    ours, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    interrupted = threading.Event()
    before, hook = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False), sys.unraisablehook

    def quiet(report: Any) -> None:
        if not isinstance(report.exc_value, KeyboardInterrupt):
            hook(report)

    def watch() -> None:
        while (numbers := ours.recv(1)) and numbers[0] != signal.SIGINT:
            pass
        if numbers:
            interrupted.set()
            ours.settimeout(GRACE_S)
            with contextlib.suppress(TimeoutError):
                ours.recv(1)
            _end()

    sys.unraisablehook = quiet
    threading.Thread(target=watch, daemon=True, name="interrupt").start()
    try:
        yield
    except BaseException:
        if interrupted.is_set():
            raise KeyboardInterrupt from None  # the watch goes on: leaving the process may take long, too
        raise
    finally:
        if not interrupted.is_set():
            sys.unraisablehook = hook
            signal.set_wakeup_fd(before)
            wakeup.close()


def _end() -> None:
    for restore in at_end:
        with contextlib.suppress(Exception):
            restore()
    os._exit(STATUS)


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """``trio.run(main)`` in which a Ctrl-C is a KeyboardInterrupt, not a group with one in it."""
    import trio

    try:
        return trio.run(main)
    except BaseException as error:
        if _holds_interrupt(error):
            raise KeyboardInterrupt from None
        raise


def _holds_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or any(map(_holds_interrupt, getattr(error, "exceptions", ())))
