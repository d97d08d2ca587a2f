"""The text of an answer for the client, in whole code points and without any part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Returns a decoder for the bytes of tokens. It holds back the bytes of an incomplete code point. Bytes that are
    not UTF-8 become U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def first_found(text: str, strings: Iterable[str]) -> tuple[int, int] | None:
    """Returns where one of ``strings`` begins and ends in ``text``. It is the one that ends first, so that the result
    does not depend on how the text is divided into pieces. If several end at the same place, it is the longest."""
    found = [(at + len(string), at) for string in strings if (at := text.find(string)) >= 0]
    if not found:
        return None
    end, begin = min(found)
    return begin, end


def held_back(text: str, strings: Iterable[str]) -> int:
    """Returns the length of the longest suffix of ``text`` that may be the beginning of one of ``strings``."""
    return max((_overlap(text, string) for string in strings), default=0)


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``string``."""
    for n in range(min(len(string) - 1, len(text)), 0, -1):
        if text.endswith(string[:n]):
            return n
    return 0


class TextStream:
    """The text of one answer. Holds back text that may be the beginning of a stop string, until more text comes.

    :param stops: the stop strings.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """True after a stop string was found. That string and all text after it are dropped."""

    def push(self, text: str) -> str:
        """Adds text, and returns the text that is certain now; it may be empty."""
        if self.stopped:
            return ""
        text = self._held + text
        if found := first_found(text, self._stops):
            self.stopped, self._held = True, ""
            return text[: found[0]]
        held = held_back(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        text, self._held = self._held, ""
        return text
