"""The output of one job: the bytes of its tokens go in, the text of the answer and the thought come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from frameshard.engine.channels import Channels, Parts
from frameshard.engine.thinking import ThoughtLimit
from frameshard.sentences import Splitter
from frameshard.text import TextStream, utf8_decoder


class Given(NamedTuple):
    """What can be sent now: see :class:`frameshard.wire.engine.Token`."""

    text: str
    ends: tuple[int, ...]
    thought: str

    def followed_by(self, other: Given) -> Given:
        ends = (len(self.text) + end for end in other.ends)
        return Given(self.text + other.text, (*self.ends, *ends), self.thought + other.thought)


class Answer:
    """Stop strings and sentences are those of the answer's text. The thought has none.

    :param stops: the stop strings.
    :param sentences: tell where sentences end.
    :param limit: ends the thought.
    :param marker_pieces: the texts of control tokens that markers have in them. In text control tokens have none.
    """

    def __init__(
        self,
        channels: Channels,
        stops: Sequence[str],
        *,
        sentences: bool,
        limit: ThoughtLimit,
        marker_pieces: Mapping[int, bytes],
    ) -> None:
        self._channels = channels
        self._limit = limit
        self._marker_pieces = marker_pieces
        self._decoder = utf8_decoder()
        self._text = TextStream(stops)
        self._splitter = Splitter() if sentences else None
        self.n_given = 0
        """How many tokens the text has that another model has given."""
        self._begin = ""
        self._given_left = 0

    def begin(self, text: str, n_tokens: int) -> None:
        """Lets the answer begin with a text from another model. It takes the place of the pieces of the first tokens,
        which may have a space in front that the text does not have."""
        self._begin, self.n_given, self._given_left = text, n_tokens, n_tokens

    @property
    def stopped(self) -> bool:
        """A stop string was found. All text after it is dropped."""
        return self._text.stopped

    def answering(self) -> bool:
        """The next token is of the answer's text. A form applies only then."""
        return self._channels.answering

    @property
    def due(self) -> int | None:
        """The next token, if it is put in to end the thought; ``None`` if it is sampled."""
        return self._limit.due

    def push(self, token: int, piece: bytes, *, ends: bool) -> Given:
        """Adds a token.

        :param piece: its bytes.
        :param ends: the model ends its output with it.
        """
        if self._given_left:
            self._given_left -= 1
            text, self._begin = self._begin, ""
            return self._given(self._text.push(text), Parts())
        before = self._channels.active
        parts = self._channels.push(self._decoder.decode(self._marker_pieces.get(token, piece)))
        self._limit.add(before, self._channels.active, ends=ends)
        return self._given(self._text.push(parts.text), parts)

    def finish(self) -> Given:
        """Returns what was held back, at the end of the output. An incomplete code point is dropped, so that the text
        of a shorter answer is always a prefix of the text of a longer one."""
        parts = self._channels.finish()
        return self._given(self._text.push(parts.text) + self._text.finish(), parts, last=True)

    def _given(self, text: str, parts: Parts, *, last: bool = False) -> Given:
        if self._splitter is None:
            return Given(text, (), parts.thought)
        return Given(*self._splitter.feed(text, last=last), parts.thought)
