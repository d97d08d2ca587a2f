"""From token bytes to text that a client may show: whole code points only, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Text of one answer. Bytes of an unfinished code point, and text that may turn out to begin a stop string, are
    held back until what follows decides. Bytes that can be no UTF-8 come out as U+FFFD."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """A stop string was met; it and what follows it are never given out."""

    def push(self, piece: bytes) -> str:
        """The text that ``piece`` sets free; may be empty."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.decode(piece)
        # The stop string that is complete first counts, however the text arrived; of those, the longest.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, when nothing follows any more. An unfinished code point is dropped, so that the text of a
        shorter answer is always a prefix of the longer one's."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
