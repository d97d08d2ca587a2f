"""Computes a lower bound on the number of tokens of a text, quickly, also for texts that take seconds to tokenise."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_SPACES = b" \t\n\v\f\r"


class LeastTokens:
    """A lower bound on the number of tokens of a text, computed from its bytes.

    The weight of a byte is 1 / n, where n is the length of the longest token with that byte. So the weights of the
    bytes of any token add up to at most 1, and a text has at least as many tokens as the sum of its weights. A byte
    without a token for it alone has the weight 0, because a tokenizer may drop it.

    :param pieces: the bytes of all tokens.
    :param strips: the vocabulary has tokens that remove the white space next to them.
    :param escapes: the vocabulary writes a space as U+2581, as SentencePiece does.
    """

    def __init__(self, pieces: Iterable[bytes], *, strips: bool, escapes: bool) -> None:
        self._escapes = escapes
        known = [self._escaped(piece) for piece in pieces]
        longest = np.zeros(256)
        lengths = np.array([len(piece) for piece in known])
        np.maximum.at(longest, np.frombuffer(b"".join(known), np.uint8), np.repeat(lengths, lengths))
        single = {piece[0] for piece in known if len(piece) == 1}
        dropped = set(range(256)) - single | (set(self._escaped(_SPACES)) if strips else set())
        longest[list(dropped)] = np.inf
        self._weights = 1 / longest

    def of(self, text: bytes) -> int:
        """Returns the fewest tokens that ``text`` can have, without BOS and EOS."""
        counts = np.bincount(np.frombuffer(self._escaped(text), np.uint8), minlength=256)
        return math.ceil(float(counts @ self._weights) - 1e-6)  # the sum may be too large by rounding errors

    def _escaped(self, text: bytes) -> bytes:
        return text.replace(b" ", "\u2581".encode()) if self._escapes else text
