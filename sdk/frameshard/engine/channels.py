"""Splits what a model says into channels: the text of its answer, and its thought.

A channel begins and ends at markers, such as ``<think>`` and ``</think>``. A marker is in no channel. It may come in
any number of pieces, so text that may be the beginning of a marker is held back until more comes. Nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from frameshard.text import first_found, held_back


class Channel(Enum):
    """What a part of the model's output is."""

    TEXT = "text"
    THOUGHT = "thought"


class Marker(NamedTuple):
    """A string at which one channel ends and another one begins. If both are the same, it is only left out."""

    text: str
    ends: Channel
    begins: Channel


class Parts(NamedTuple):
    """What came on each channel."""

    text: str = ""
    thought: str = ""


class Channels:
    """The channels of one answer.

    :param markers: the model's markers; none if it knows no channels. Its output is then text.
    :param begin: the channel in which the output begins.
    :param formed: the text has a form. A form allows exact texts and is checked by the token. So the text begins with
        the token after its marker, and no marker ends it.
    """

    def __init__(self, markers: Sequence[Marker] = (), begin: Channel = Channel.TEXT, *, formed: bool = False) -> None:
        self.active = begin
        """The channel of the next token."""
        self._formed = formed
        self._markers: dict[Channel, dict[str, Channel]] = {channel: {} for channel in Channel}
        for marker in markers:
            if not (formed and marker.ends is Channel.TEXT):
                self._markers[marker.ends][marker.text] = marker.begins
        self._held = ""
        self._trims = begin is not Channel.TEXT

    @property
    def answering(self) -> bool:
        """The next token is of the answer's text."""
        return self.active is Channel.TEXT

    def push(self, text: str) -> Parts:
        """Adds text, and returns what is certain now."""
        rest, self._held = self._held + text, ""
        given = dict.fromkeys(Channel, "")
        while found := first_found(rest, self._markers[self.active]):
            begin, end = found
            given[self.active] += self._trimmed(rest[:begin])
            self.active = self._markers[self.active][rest[begin:end]]
            self._trims = not (self._formed and self.answering)
            rest = rest[end:] if self._trims else ""
        held = held_back(rest, self._markers[self.active])
        self._held = rest[len(rest) - held :]
        given[self.active] += self._trimmed(rest[: len(rest) - held])
        return _parts(given)

    def finish(self) -> Parts:
        """Returns what was held back, at the end of the output."""
        held, self._held = self._held, ""
        return _parts({self.active: self._trimmed(held)})

    def _trimmed(self, text: str) -> str:
        """Leaves out the white space between a marker and what follows it."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


def _parts(given: dict[Channel, str]) -> Parts:
    return Parts(**{channel.value: text for channel, text in given.items()})
