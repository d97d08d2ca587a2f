"""When the next decode may start, and how much of a prompt it reads: the engine's part of pacing beside a game.

The shard device paces single steps by the frame block; here it is about whole decodes.
"""

from __future__ import annotations

import time

from frameshard.engine.batch import Batcher
from frameshard.engine.runtime import Runtime
from frameshard.native import Pacing

MIN_CHUNK = 32
"""Prompt tokens that one decode reads at least, also when the host's frames are short of time."""


class Pace:
    """For the main thread."""

    def __init__(self) -> None:
        self.due_at = 0.0
        """The next decode may start, by the monotonic clock."""
        self._target = 0.0

    def set_target(self, tokens_per_second: float) -> None:
        """Bounds the rate of all jobs together; 0 is no bound. The next decode may start at once."""
        self._target, self.due_at = tokens_per_second, 0.0

    def produced(self, n_tokens: int) -> None:
        """A decode has ended with so many new tokens."""
        if self._target > 0:
            # A late token does not make the next ones come faster than the target.
            self.due_at = max(self.due_at, time.monotonic() - 1 / self._target) + n_tokens / self._target
        else:
            self.due_at = 0.0

    def follow_frames(self, runtime: Runtime, batcher: Batcher) -> bool:
        """Adapts the next decode to the frames of the host, where the device reads a frame block.

        :returns: whether the plan has to be made anew: beside a game each turn between CPU and device waits for the
            device, so another plan is the best.
        """
        assert runtime.device is not None
        assert runtime.placement is not None
        pacing = runtime.device.pacing()
        batcher.chunk = _chunk(runtime.n_ubatch, batcher.chunk, pacing)
        busy_s, planned_s = pacing.gpu_busy_s, runtime.placement.gpu_busy_s
        if (busy_s > 0) == (planned_s > 0) and planned_s / 2 <= busy_s <= planned_s * 2:
            return False
        runtime.placement.gpu_busy_s = busy_s
        return True


def _chunk(n_ubatch: int, chunk: int, pacing: Pacing) -> int:
    """Prompt tokens to read in one decode: fewer when single steps are long beside the host's frame."""
    if not pacing.pacing:
        return n_ubatch
    if pacing.longest_step_s > pacing.target_frame_s / 8:
        return max(min(MIN_CHUNK, n_ubatch), chunk // 2)
    return min(n_ubatch, chunk * 2) if pacing.longest_step_s < pacing.target_frame_s / 32 else chunk
