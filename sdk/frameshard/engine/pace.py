"""Decides when the next decode may start and how many prompt tokens it computes, so that a game keeps its frame rate.

The shard device paces single steps by the frame block. This module paces whole decodes.
"""

from __future__ import annotations

import time

from frameshard.engine.batch import Batcher
from frameshard.engine.runtime import Runtime
from frameshard.native import Pacing

MIN_CHUNK = 32
"""The fewest prompt tokens of one decode, also when the host's frames take too long."""
_FIRST_CHUNK = 512  # the prompt tokens of one decode when the host begins to draw frames


class Pace:
    """The pacing of one engine. Only the main thread uses it."""

    def __init__(self) -> None:
        self.due_at = 0.0
        """The time at which the next decode may start, in seconds of the monotonic clock."""
        self._target = 0.0
        self._pacing = False

    def set_target(self, tokens_per_second: float) -> None:
        """Limits the rate of all jobs together; 0 is no limit. The next decode may start at once."""
        self._target, self.due_at = tokens_per_second, 0.0

    def produced(self, n_tokens: int) -> None:
        """Computes the time of the next decode, after one that produced ``n_tokens`` tokens."""
        if self._target > 0:
            # The rate stays below the target also after a late token: the lost time is not made up.
            self.due_at = max(self.due_at, time.monotonic() - 1 / self._target) + n_tokens / self._target
        else:
            self.due_at = 0.0

    def follow_frames(self, runtime: Runtime, batcher: Batcher) -> bool:
        """Adapts the next decode to the frames of the host. The device must have a frame block.

        :returns: true if a new plan is needed, because the game's use of the GPU has changed much. While a game uses
            the GPU, each hand-off between CPU and device waits, so a plan with fewer of them is better.
        """
        assert runtime.device is not None
        assert runtime.placement is not None
        pacing = runtime.device.pacing()
        if pacing.pacing and not self._pacing:
            batcher.chunk = min(batcher.chunk, _FIRST_CHUNK)
        self._pacing = bool(pacing.pacing)
        batcher.chunk = _chunk(runtime.n_ubatch, batcher.chunk, pacing)
        busy_s, planned_s = pacing.gpu_busy_s, runtime.placement.gpu_busy_s
        if (busy_s > 0) == (planned_s > 0) and planned_s / 2 <= busy_s <= planned_s * 2:
            return False
        runtime.placement.gpu_busy_s = busy_s
        return True


def _chunk(n_ubatch: int, chunk: int, pacing: Pacing) -> int:
    """Returns the prompt tokens of one decode: fewer if single steps are long compared with the host's frame."""
    if not pacing.pacing:
        return n_ubatch
    if pacing.longest_step_s > pacing.target_frame_s / 8:
        return max(min(MIN_CHUNK, n_ubatch), chunk // 2)
    return min(n_ubatch, chunk * 2) if pacing.longest_step_s < pacing.target_frame_s / 32 else chunk
