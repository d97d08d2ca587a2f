"""How few tokens a text can have: known at once where tokenising takes seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

_SPACES = b" \t\n\v\f\r"


class LeastTokens:
    """A lower bound on the number of tokens, by the bytes of a text. ``pieces`` are the bytes of all tokens. With
    ``strips`` the vocabulary has tokens that swallow the white space beside them; with ``escapes`` a space and U+2581
    are the same to it, as they are to SentencePiece.

    Each byte counts for one part of the longest token that has this byte in it. The bytes of a token then count for 1
    together at most, whatever the text, so that it has at least as many tokens as its bytes count for. Bytes that no
    token stands for alone count for nothing: a tokeniser may drop them.
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
        """As many tokens ``text`` has at least, without BOS and EOS."""
        counts = np.bincount(np.frombuffer(self._escaped(text), np.uint8), minlength=256)
        return math.ceil(float(counts @ self._weights) - 1e-6)  # of what rounding adds

    def _escaped(self, text: bytes) -> bytes:
        return text.replace(b" ", "\u2581".encode()) if self._escapes else text
