"""The steps of prompts: how many tokens one graph may have, and the VRAM of its compute buffers.

A larger step copies streamed weights less often, but its compute buffers leave less VRAM for weights while it runs. So
each budget has its own largest step. The floor has room for small steps only.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from frameshard.records import record

LEAST_STEP = 32
"""The tokens of a step for which the floor has room whatever the model."""
EXACT_STEP = 512
"""The tokens of a step in stream-only mode, at every budget, because the bits of the logits depend on it."""
MOST_STEP = 4096
"""The most tokens of a step, if a launch does not say it."""
_FLOOR_STEP = 256
# An image is one step for models that read its tokens together.
_FLOOR_STEP_WITH_IMAGES = 512
_TILE = 128  # the columns that a GPU's product of matrices computes together
# The masks of attention in host memory, which llama.cpp fills before each graph: 4 bytes for each token of a step and
# of the context.
_MOST_MASK_BYTES = 512 << 20
_MASK_SHARE = 16  # of a limit on host memory they take one part in so many at most


@record
class Steps:
    """The compute buffers of graphs with one model and context, in VRAM.

    :param least_bytes: of decodes of one token.
    :param floor_bytes: what the floor has room for.
    :param sizes: steps with their bytes, ascending; the last is the largest step that llama.cpp's context allows. With
        their bytes come the workspaces that they make the driver hold.
    :param n_ctx: the context of each sequence, in tokens; 0: it has room for one of the largest steps only.
    """

    least_bytes: int = 0
    floor_bytes: int = 0
    sizes: tuple[tuple[int, int], ...] = ((MOST_STEP, 0),)
    n_ctx: int = 0

    @property
    def most_tokens(self) -> int:
        """The largest step."""
        return self.sizes[-1][0]

    @property
    def most_bytes(self) -> int:
        """The bytes of the largest step."""
        return self.sizes[-1][1]

    def n_bytes(self, n_tokens: int) -> int:
        """The bytes of a graph. Between two sizes it is an upper bound, because larger steps take more for each
        token."""
        points = [(1, min(self.least_bytes, self.sizes[0][1])), *self.sizes]
        n_bytes = round(float(np.interp(n_tokens, [at for at, _ in points], [n for _, n in points])))
        return min(n_bytes, self.floor_bytes) if n_tokens <= LEAST_STEP else n_bytes

    def within(self, room_bytes: int) -> tuple[int, ...]:
        """The sizes that fit in ``room_bytes``, and the largest step that does, ascending. There is always one, because
        the floor has room for it."""
        found = {n_tokens for n_tokens, n_bytes in self.sizes if n_bytes <= room_bytes}
        if self.most_bytes > room_bytes:
            steps = range(LEAST_STEP, self.most_tokens, LEAST_STEP) or (self.most_tokens,)
            fitting = bisect.bisect_right(steps, room_bytes, key=self.n_bytes)
            found.add(steps[max(fitting - 1, 0)])
        return tuple(sorted(found))


def floor_step(n_parallel: int, *, images: bool) -> int:
    """The tokens of a step for which the floor has room in llama.cpp's own layout, if a launch does not say it."""
    return max(_FLOOR_STEP_WITH_IMAGES if images else _FLOOR_STEP, n_parallel)


def most_step(n_ctx: int, least: int, host_budget_bytes: int = 0, limit: int = MOST_STEP) -> int:
    """The tokens of the largest step, if a launch does not say it.

    :param n_ctx: the context of each sequence.
    :param least: the smallest result.
    :param host_budget_bytes: the limit on host memory; 0: none.
    :param limit: the largest result.
    """
    most_mask_bytes = min(_MOST_MASK_BYTES, host_budget_bytes // _MASK_SHARE or _MOST_MASK_BYTES)
    n_tokens = min(limit, most_mask_bytes // (4 * max(n_ctx, 1)), n_ctx)
    return max(1 << max(n_tokens.bit_length() - 1, 0), least)


def next_step(n_left: int, most: int, *, exact: bool) -> int:
    """The tokens of the next step of a prompt of which ``n_left`` are left. The steps are about equal, so that their
    compute buffers take little VRAM. A full step and a small rest would copy the streamed weights as often. All but the
    first fill the GPU's tiles. The first is the smallest, because the GPU waits while the host prepares it.

    :param most: the most tokens of a step.
    :param exact: for mode stream-only: all steps but the last are full, so that prompts that begin alike have the same
        steps.
    """
    if exact:
        return min(n_left, most)
    n_steps = -(-n_left // most)
    return n_left - (n_steps - 1) * min(_TILE * -(-n_left // (n_steps * _TILE)), most)


def step_sizes(least: int, most: int) -> Sequence[int]:
    """The steps to choose from: ``least`` and its doubles, up to ``most``."""
    doubled = (least << i for i in range(16))
    return [*(size for size in doubled if size < most), most]
