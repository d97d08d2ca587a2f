"""What the KV cells of a sequence hold: which tokens, and in which shapes they were decoded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from frameshard.engine.adapters import NO_ADAPTERS, AdapterSet
from frameshard.errors import BadArgument
from frameshard.wire.engine import Shapes

Shape = tuple[int, int]
"""One decode of one sequence: the number of tokens that the sequence kept, and the number that was decoded."""


@dataclass(eq=False)
class Cells:
    """The contents of the KV cells of one sequence.

    :param tokens: the tokens in order.
    :param shapes: the shapes in which they were decoded.
    :param adapters: the adapters with which they were decoded. Texts with other adapters share no cells.
    :param conversation: the conversation that the text belongs to; ``None`` if it belongs to none.
    """

    tokens: list[int] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    adapters: AdapterSet = NO_ADAPTERS
    conversation: str | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def repeated(shapes: Sequence[Shape], history: Sequence[Shape], limit: int) -> int:
    """How many tokens of cells can stand for the beginning of an earlier decode of the same text.

    :param shapes: of the cells. They may be cut.
    :param history: of the earlier decode.
    :param limit: the most tokens.
    :returns: the number of tokens, whole shapes of ``history``.
    """
    n = 0
    for (n_kept, n_decoded), (n_then, n_decoded_then) in zip(shapes, history, strict=False):
        if n_decoded != n_decoded_then or n_kept < n_then or n + n_then > limit:
            break
        n += n_then
        if n_kept > n_then:
            break
    return n


def pack_shapes(shapes: Iterable[Shape]) -> Shapes:
    """Run-length encodes shapes as (kept, decoded, count): [(3, 8), (1, 1), (1, 1)] -> ((3, 8, 1), (1, 1, 2))."""
    return tuple((*shape, len(list(run))) for shape, run in itertools.groupby(shapes))


def unpack_shapes(packed: Shapes, n_prompt: int, n_ubatch: int) -> list[Shape]:
    """Reverses :func:`pack_shapes`.

    :raises BadArgument: a prompt of ``n_prompt`` tokens cannot have been decoded in these shapes.
    """
    shapes: list[Shape] = []
    total, kept, decoded = 0, 0, 0
    for kept, decoded, count in packed:
        total += kept * count
        if not (0 < count <= n_prompt and 0 < kept <= decoded <= n_ubatch and total <= n_prompt):
            raise BadArgument("history is not that of this prompt", field="history")
        shapes += [(kept, decoded)] * count
    if total == n_prompt and kept < decoded:
        raise BadArgument("history cuts the last tokens of the prompt", field="history")
    return shapes
