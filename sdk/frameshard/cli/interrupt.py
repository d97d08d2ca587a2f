"""Makes Ctrl-C end a command at once and without a traceback, with exit status 130.

Python handles a signal only between two bytecodes of the main thread. While a model loads, the main thread spends
seconds in single calls to llama.cpp, and an exception in a callback from there is lost. So another thread ends the
process if it is still running :data:`GRACE_S` after the signal. Usually the main thread has ended by then, and has
removed its temporary files.
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

from frameshard.errors import causes

T = TypeVar("T")

STATUS = 130
GRACE_S = 0.5

at_end: list[Callable[[], None]] = []
"""Functions that restore the terminal, or print a result. They are called before the thread ends the process, and must
not wait."""


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    """Ends this process :data:`GRACE_S` after a SIGINT, or at a second SIGINT, also while the main thread is in native
    code. The main thread must enter it.

    :raises KeyboardInterrupt: there was a SIGINT. Any other exception after it is replaced by this one.
    """
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
            raise KeyboardInterrupt from None  # the thread goes on, because the exit of the process may also take long
        raise
    finally:
        if not interrupted.is_set():
            sys.unraisablehook = hook
            signal.set_wakeup_fd(before)
            wakeup.close()


@contextlib.contextmanager
def printed(report: Callable[[], None]) -> Iterator[None]:
    """Prints what was measured until then, if Ctrl-C ends the block, also while it is in native code.

    :param report: prints it.
    """
    first = threading.Lock()  # held by the thread that prints

    def once() -> None:
        if first.acquire(blocking=False):
            report()
            sys.stdout.flush()

    at_end.append(once)
    try:
        yield
    except KeyboardInterrupt:
        once()
        raise
    finally:
        at_end.remove(once)


def _end() -> None:
    for restore in at_end:
        with contextlib.suppress(Exception):
            restore()
    os._exit(STATUS)


def run_async(main: Callable[[], Awaitable[T]]) -> T:
    """Runs ``trio.run(main)``. Ctrl-C raises a KeyboardInterrupt instead of an exception group with one, at the next
    checkpoint: anywhere else it may be in a callback, where it would be lost. If the output cannot be written, such as
    because its reader has ended, it raises an OSError instead of a group."""
    import trio

    try:
        return trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    except BaseException as error:
        found = list(causes(error))
        if any(isinstance(cause, KeyboardInterrupt) for cause in found):
            raise KeyboardInterrupt from None
        if all(isinstance(cause, OSError) for cause in found):
            raise found[0] from None
        raise
