"""Measures the peak VRAM of a process, as counted by the driver."""

from __future__ import annotations

import math
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from frameshard.engine.observer import Observer

INTERVAL_S = 0.01


class Sampler:
    """A context manager that asks the driver every 10 ms. ``peak_bytes`` is ``None`` if it does not report it.

    :param above: called once, from another thread, when the VRAM is above ``limit_bytes``. Then sampling ends.
    """

    def __init__(
        self, observer: Observer | None, limit_bytes: float = math.inf, above: Callable[[], None] | None = None
    ) -> None:
        self.peak_bytes: int | None = None
        self._observer = observer
        self._limit_bytes, self._above = limit_bytes, above
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        if self._observer is None or self._observer.source is None:
            return
        while True:
            used = self._observer.used()
            if used is not None:
                self.peak_bytes = max(self.peak_bytes or 0, used)
                if self._above is not None and used > self._limit_bytes:
                    self._above()
                    return
            if self._stop.wait(INTERVAL_S):
                return

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Ran:
    """A program that has ended.

    :param output: of its standard output.
    :param peak_bytes: the most VRAM that it had; ``None`` if nothing counts it.
    """

    code: int
    output: str
    peak_bytes: int | None


def run_observed(
    command: Sequence[str],
    observe: Callable[[], Observer] | None,
    log: IO[str],
    *,
    limit_bytes: float = math.inf,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Runs a program, and stops it as soon as its VRAM is above a limit.

    :param observe: makes an observer of its VRAM; ``None`` where nothing counts it.
    :param log: where its standard error goes.
    :raises OSError: it cannot be started.
    """
    observer = None if observe is None else observe()  # made before the process: it looks for one that is new
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
    if observer is not None:
        observer.pid = process.pid
    try:
        with Sampler(observer, limit_bytes, process.kill) as vram:
            output, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    return Ran(process.returncode, output, vram.peak_bytes)
