"""Gives host memory back while the machine is short of it, before the system swaps or ends a process.

The machine is short if little is available, or if tasks wait for memory (PSI). The limit of a control group counts as
the machine's memory. Then the sidecar's own limit is lowered
step by step: the KV store gives first, then weights that can be read again, down to the floor. When neither has been so
for :data:`CALM_S`, the limit ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from frameshard.engine import hostcount
from frameshard.engine.hostmemory import HostMemory

logger = logging.getLogger("frameshard.engine")

LOW_SHARE = 20
LOW_BYTES = 2 << 30
"""The machine is short if less than one of `LOW_SHARE` parts of its memory is available, and less than this."""

ENOUGH = 2
"""The pressure is over when this many times as much is available."""

STALLED = 10.0
STALLED_SHARE = 2
"""The machine is short if tasks wait for memory in more than `STALLED` percent of the time, and less than one of
`STALLED_SHARE` parts of its memory is available: tasks also wait if another group has reached its limit."""

CALM_STALLED = 1.0

STEP_BYTES = 64 << 20
"""At least so much is given back at once."""

EVERY_S = 1.0
CALM_S = 30.0


class Pressure:
    """Watches the machine for one engine. Use it from one thread only.

    :param host: what gives memory back.
    :param tell: is told the sidecar's own limit in bytes, 0 when it ends, and why.
    :param proc: where /proc is.
    """

    def __init__(self, host: HostMemory, tell: Callable[[int, str], None], proc: Path = hostcount.PROC) -> None:
        self._host = host
        self._tell = tell
        self._proc = proc
        self._due_at = 0.0
        self._calm_since: float | None = None

    def look(self) -> None:
        """To be called several times a second."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + EVERY_S
        machine = hostcount.machine(self._proc)
        if machine is None:
            return
        low = min(machine.total_bytes // LOW_SHARE, LOW_BYTES)
        missing = ENOUGH * low - machine.available_bytes
        scarce = machine.available_bytes < machine.total_bytes // STALLED_SHARE
        if machine.available_bytes < low or (scarce and machine.stalled > STALLED):
            self._calm_since = None
            if self._host.press(max(missing, STEP_BYTES)):
                why = f"{machine.available_bytes >> 20} MiB of the memory of {machine.of} are available"
                if machine.stalled > STALLED:
                    why = f"tasks wait for memory {machine.stalled:.0f} % of the time"
                logger.warning("%s: the limit for host memory is %d MiB", why, self._host.pressed_bytes >> 20)
                self._tell(self._host.pressed_bytes, why)
        elif not self._host.pressed_bytes or missing > 0 or (scarce and machine.stalled > CALM_STALLED):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= CALM_S:
            self._host.ease()
            self._tell(0, f"{machine.of} has enough memory again")
