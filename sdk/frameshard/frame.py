"""The frame block: shared memory in which the host reports its frames to the sidecar (bindings/PROTOCOL.md).

    frames = FrameBlock(path, target_frame_ms=16.7)
    while playing:
        frames.begin()
        ...                                     # update and draw
        frames.end(gpu_busy_ms=12.1)            # if the game engine measures it

A write takes a microsecond and never waits. One process writes a frame block, and any number of processes may read it.
"""

from __future__ import annotations

import mmap
import numbers
import os
import struct
import sys
import time
from types import TracebackType

from frameshard.errors import BadArgument
from frameshard.records import record

MAGIC, VERSION, PAGE_BYTES = 0x42465346, 1, 4096
IDLE = 1
"""The flag that the host draws no frames now."""

LEAST_FRAME_MS, MOST_MS = 0.1, 10_000.0
MAX_BUDGET_BYTES = 2**53 - 1
"""As in the protocol's messages."""

_HOST = struct.Struct("<QQQQQQQ")
_HOST_AT, _SEQUENCE_AT, _FLAGS_AT, _SIDECAR_AT = 16, 8, 12, 2048
_SIDECAR = struct.Struct("<QQQQQ")


def clock_ns() -> int:
    """Returns the time in nanoseconds, by the clock of the frame block."""
    if sys.platform == "darwin":
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
    return time.perf_counter_ns()  # CLOCK_MONOTONIC on Linux, QueryPerformanceCounter on Windows


@record
class Answer:
    """The sidecar's answer to budgets in the frame block.

    :param applied_generation: the generation of the last budget that was applied.
    :param refused_generation: the generation of the last budget that was refused.
    :param budget_bytes: the budget in force; 0: no limit.
    :param used_bytes: the VRAM that the sidecar uses.
    :param floor_bytes: the floor.
    """

    applied_generation: int
    refused_generation: int
    budget_bytes: int
    used_bytes: int
    floor_bytes: int


def initialise(page: mmap.mmap) -> None:
    """Writes the header of a new frame block into memory that is all zeros."""
    struct.pack_into("<II", page, 0, MAGIC, VERSION)


class FrameBlock:
    """Writes the frame block at `path`. Only one thread may use it at a time.

    :param target_frame_ms: the time in milliseconds that the host wants a frame to take, from 0.1 to 10,000.
    :raises BadArgument: there is no frame block at `path`, or `target_frame_ms` is out of range.
    """

    def __init__(self, path: str | os.PathLike[str], *, target_frame_ms: float = 1000 / 60) -> None:
        self.path = os.fspath(path)
        self.target_frame_ms = target_frame_ms
        self._page = _map(path)
        self._sequence = struct.unpack_from("<I", self._page, _SEQUENCE_AT)[0] & ~1
        self._frame, _, _, self._time, self._busy, self._generation, self._budget = _HOST.unpack_from(
            self._page, _HOST_AT
        )
        self._start = 0  # the time since an earlier writer's last frame is not a frame
        self._flags = 0

    def __enter__(self) -> FrameBlock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def target_frame_ms(self) -> float:
        """As the parameter. It may be set; :class:`BadArgument` is raised if it is out of range."""
        return self._target_frame_ms

    @target_frame_ms.setter
    def target_frame_ms(self, target_frame_ms: float) -> None:
        self._target = _nanoseconds("target_frame_ms", target_frame_ms, LEAST_FRAME_MS)
        self._target_frame_ms = target_frame_ms

    def begin(self) -> None:
        """Call it when a frame begins. The time since the last call is the time of the last frame."""
        now = clock_ns()
        if self._start:
            self._time = now - self._start
        self._start = now
        self._frame += 1
        self._flags = 0
        self._write()

    def end(self, *, gpu_busy_ms: float) -> None:
        """Reports how long the frame has kept the GPU busy. The sidecar expects the same of the next frames: it reads
        the value after the next :meth:`begin`.

        :param gpu_busy_ms: milliseconds, from 0 to 10,000.
        :raises BadArgument: it is out of range.
        """
        self._busy = _nanoseconds("gpu_busy_ms", gpu_busy_ms, 0.0)

    def idle(self) -> None:
        """Call it when no frames are drawn until the next :meth:`begin`. The sidecar may then use the whole GPU."""
        self._flags = IDLE
        self._start = 0  # the pause is not a frame
        self._write()

    def set_budget(self, vram_budget_bytes: int) -> int:
        """Asks for a VRAM budget without a message. It takes effect within one step of a running graph.

        :param vram_budget_bytes: the budget in bytes.
        :returns: the generation of this budget, which :attr:`answer` will have.
        :raises BadArgument: it is not an integer from 0 to 2^53 - 1.
        """
        if not (isinstance(vram_budget_bytes, int) and 0 <= vram_budget_bytes <= MAX_BUDGET_BYTES):
            raise BadArgument(
                f"vram_budget_bytes must be an integer from 0 to {MAX_BUDGET_BYTES}", field="vram_budget_bytes"
            )
        self._generation += 1
        self._budget = vram_budget_bytes
        self._write()
        return int(self._generation)

    @property
    def answer(self) -> Answer:
        return Answer(*_SIDECAR.unpack_from(self._page, _SIDECAR_AT))

    def close(self) -> None:
        """Closes the mapping. The frame block remains for its other users. Safe to call twice."""
        self._page.close()

    def _write(self) -> None:
        page = self._page
        times = self._start, self._target, self._time, self._busy
        host = _HOST.pack(self._frame, *times, self._generation, self._budget)
        struct.pack_into("<I", page, _SEQUENCE_AT, (self._sequence + 1) & 0xFFFFFFFF)
        struct.pack_into("<I", page, _FLAGS_AT, self._flags)
        page[_HOST_AT : _HOST_AT + _HOST.size] = host
        self._sequence = (self._sequence + 2) & 0xFFFFFFFF
        struct.pack_into("<I", page, _SEQUENCE_AT, self._sequence)


class Unlimited:
    """The sidecar's side of the frame block at `path`, if it holds no VRAM: each budget is in force at once.

    :raises BadArgument: there is no frame block at `path`.
    """

    def __init__(self, path: str) -> None:
        self._page = _map(path)
        self._answered = 0

    def answer(self) -> None:
        """Answers the budget that the host has written last. Call it every few milliseconds."""
        before = struct.unpack_from("<I", self._page, _SEQUENCE_AT)
        *_, generation, _budget = _HOST.unpack_from(self._page, _HOST_AT)
        written = before[0] % 2 == 0 and before == struct.unpack_from("<I", self._page, _SEQUENCE_AT)
        if written and generation != self._answered:
            self._answered = generation
            struct.pack_into("<Q", self._page, _SIDECAR_AT, generation)


def _map(path: str | os.PathLike[str]) -> mmap.mmap:
    """
    :raises BadArgument: there is no frame block at `path`.
    """
    try:
        with open(path, "r+b") as file:
            page = mmap.mmap(file.fileno(), PAGE_BYTES)
    except (OSError, ValueError) as error:
        raise BadArgument(f"no frame block at {os.fspath(path)}: {error}") from None
    if struct.unpack_from("<II", page) != (MAGIC, VERSION):
        page.close()
        raise BadArgument(f"{os.fspath(path)} is no frame block of version {VERSION}")
    return page


def _nanoseconds(name: str, ms: float, least: float) -> int:
    """
    :raises BadArgument: `ms` is not a number from `least` to :data:`MOST_MS`. NaN is not either.
    """
    if not (isinstance(ms, numbers.Real) and least <= ms <= MOST_MS):
        raise BadArgument(f"{name} must be a number from {least:g} to {MOST_MS:g}", field=name)
    return int(ms * 1e6)
