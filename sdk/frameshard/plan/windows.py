"""Sliding windows: layers in which a token attends to the last tokens before it only.

Such a layer needs the cells of its window, and of the tokens of one graph. llama.cpp can keep just these, and write new
ones over those that have left the window. Then a sequence can be cut only as far back as the cells reach, and the place
of a cell depends on what was decoded and cut before. The bits of the logits depend on that place. So all cells are kept
in stream-only mode, which promises the same bits, and where less than half of them could be spared.
"""

from __future__ import annotations

from frameshard.plan.model import Model
from frameshard.plan.steps import MOST_STEP

SLIDING_STEP = 2048
"""The most tokens of a graph if not all cells are kept and a launch does not say it. So many more cells are kept."""
_PAGE = 256  # llama.cpp makes the number of cells a multiple of this


def sliding_cells(model: Model, n_ctx: int, n_ubatch: int, *, exact: bool) -> int:
    """The cells of a sequence that layers with a sliding window keep; 0: all.

    :param n_ctx: the context of each sequence.
    :param n_ubatch: the most tokens of one graph; 0 if it is not chosen yet.
    :param exact: for mode stream-only.
    """
    cells = _pages(model.integer("attention.sliding_window") + (n_ubatch or SLIDING_STEP))
    return cells if not exact and 2 * cells <= _pages(n_ctx) and model.sliding_layers else 0


def can_take_back(model: Model, n_tokens: int, n_sliding: int) -> bool:
    """Whether two graphs of ``n_tokens`` tokens of a sequence can be taken back together: the second one must not have
    written over the window before the first.

    :param n_sliding: from :func:`sliding_cells`.
    """
    return not n_sliding or 2 * n_tokens <= n_sliding - model.integer("attention.sliding_window")


def _pages(cells: int) -> int:
    return -(-cells // _PAGE) * _PAGE


def step_limit(model: Model, n_ctx: int, *, exact: bool) -> int:
    """The most tokens of one graph with this model, if a launch does not say it."""
    return SLIDING_STEP if sliding_cells(model, n_ctx, 0, exact=exact) else MOST_STEP
