"""Measures the peak VRAM of a process, as counted by the driver."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

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
