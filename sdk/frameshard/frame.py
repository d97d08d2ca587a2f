"""The frame block: shared memory in which the host writes each frame when it draws (bindings/PROTOCOL.md).

    frames = FrameBlock(path, target_frame_ms=16.7)
    while playing:
        frames.begin()
        ...                                     # update and draw
        frames.end(gpu_busy_ms=12.1)            # where the engine measures it

A write takes a microsecond and never waits. One process writes a frame block; any number may read it.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from types import TracebackType

from frameshard.errors import BadArgument

MAGIC, VERSION, PAGE_BYTES = 0x42465346, 1, 4096
IDLE = 1
"""Flag: the host draws nothing that has to be on time."""

_HOST = struct.Struct("<QQQQQQQ")
_HOST_AT, _SEQUENCE_AT, _FLAGS_AT, _SIDECAR_AT = 16, 8, 12, 2048
_SIDECAR = struct.Struct("<QQQQQ")


def clock_ns() -> int:
    """The clock of the times in a frame block, in nanoseconds."""
    if sys.platform == "darwin":
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return time.perf_counter_ns()  # CLOCK_MONOTONIC on Linux, QueryPerformanceCounter on Windows


@dataclass(frozen=True)
class Answer:
    """The sidecar's answer to budgets in the frame block: the last generation it has applied, the last it has refused,
    the budget in force, the VRAM it holds, and the floor, in bytes."""

    applied_generation: int
    refused_generation: int
    budget_bytes: int
    used_bytes: int
    floor_bytes: int


def initialise(page: mmap.mmap) -> None:
    """Makes zeroed memory a frame block that no host has written to."""
    struct.pack_into("<II", page, 0, MAGIC, VERSION)


class FrameBlock:
    """The writer of the frame block at `path`, for one thread at a time.

    :param target_frame_ms: time that the host wants a frame to take.
    :raises BadArgument: there is no frame block at `path`.
    """

    def __init__(self, path: str | os.PathLike[str], *, target_frame_ms: float = 1000 / 60) -> None:
        self.path = os.fspath(path)
        try:
            with open(path, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        except (OSError, ValueError) as error:
            raise BadArgument(f"no frame block at {os.fspath(path)}: {error}") from None
        if struct.unpack_from("<II", self._page) != (MAGIC, VERSION):
            self._page.close()
            raise BadArgument(f"{os.fspath(path)} is no frame block of version {VERSION}")
        self._sequence = struct.unpack_from("<I", self._page, _SEQUENCE_AT)[0] & ~1
        self._frame, self._start, _, self._time, self._busy, self._generation, self._budget = _HOST.unpack_from(
            self._page, _HOST_AT
        )
        self._flags = 0
        self.target_frame_ms = target_frame_ms

    def __enter__(self) -> FrameBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self) -> None:
        """A frame begins. The time since the last call is the last frame's time."""
        now = clock_ns()
        if self._start:
            self._time = now - self._start
        self._start = now
        self._frame += 1
        self._flags = 0
        self._write()

    def end(self, *, gpu_busy_ms: float) -> None:
        """The frame has kept the GPU busy for `gpu_busy_ms`; the next ones are expected to take as long."""
        self._busy = max(0, int(gpu_busy_ms * 1e6))

    def idle(self) -> None:
        """Nothing is drawn until the next :meth:`begin`: the sidecar may use the whole GPU."""
        self._flags = IDLE
        self._start = 0  # the pause is not a frame
        self._write()

    def set_budget(self, vram_budget_bytes: int) -> int:
        """Asks for a VRAM budget without a message; it takes effect within one step of a running graph.

        :returns: the generation that :attr:`answer` will have.
        """
        self._generation += 1
        self._budget = vram_budget_bytes
        self._write()
        return int(self._generation)

    @property
    def answer(self) -> Answer:
        return Answer(*_SIDECAR.unpack_from(self._page, _SIDECAR_AT))

    def close(self) -> None:
        """Safe to call twice. The frame block stays for its other users."""
        self._page.close()

    def _write(self) -> None:
        page = self._page
        struct.pack_into("<I", page, _SEQUENCE_AT, (self._sequence + 1) & 0xFFFFFFFF)
        struct.pack_into("<I", page, _FLAGS_AT, self._flags)
        _HOST.pack_into(
            page,
            _HOST_AT,
            self._frame,
            self._start,
            int(self.target_frame_ms * 1e6),
            self._time,
            self._busy,
            self._generation,
            self._budget,
        )
        self._sequence = (self._sequence + 2) & 0xFFFFFFFF
        struct.pack_into("<I", page, _SEQUENCE_AT, self._sequence)
