"""Turns the bytes of tokens into text for the client, in whole code points and without any part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """The text of one answer. Holds back the bytes of an incomplete code point, and text that may be the beginning of a
    stop string, until more bytes come. Bytes that are not UTF-8 become U+FFFD.

    :param stops: the stop strings.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """True after a stop string was found. That string and all text after it are dropped."""

    def push(self, piece: bytes) -> str:
        """Adds the bytes of a token, and returns the text that is complete now; it may be empty."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        # The stop string that ends first is taken, so that the result does not depend on how the text is divided into
        # pieces. If several end at the same place, the longest is taken.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer. Drops an incomplete code point, so that the
        text of a shorter answer is always a prefix of the text of a longer one."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
