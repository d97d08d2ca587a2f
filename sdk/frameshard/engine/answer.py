"""The output of one job: its tokens go in; the text of the answer, calls of tools and the thought come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from frameshard.engine.calls import CallReader, Taken
from frameshard.engine.channels import Channels, Parts
from frameshard.engine.thinking import ThoughtLimit
from frameshard.sentences import Splitter
from frameshard.text import TextStream, utf8_decoder
from frameshard.wire import messages as m


class Given(NamedTuple):
    """What can be sent now: see :class:`frameshard.wire.engine.Token`."""

    text: str
    ends: tuple[int, ...]
    thought: str
    calls: tuple[m.ToolCall, ...] = ()

    def followed_by(self, other: Given) -> Given:
        ends = (*self.ends, *(len(self.text) + end for end in other.ends))
        return Given(self.text + other.text, ends, self.thought + other.thought, self.calls + other.calls)


class Answer:
    """Stop strings and sentences are those of the answer's text. The thought and calls have none.

    :param stops: the stop strings.
    :param sentences: tell where sentences end.
    :param limit: ends the thought.
    :param marker_pieces: the texts of control tokens that markers have in them. In text control tokens have none.
    :param calls: for an answer that may have calls of tools.
    """

    def __init__(
        self,
        channels: Channels,
        stops: Sequence[str],
        *,
        sentences: bool,
        limit: ThoughtLimit,
        marker_pieces: Mapping[int, bytes],
        calls: CallReader | None = None,
    ) -> None:
        self._channels = channels
        self._limit = limit
        self._marker_pieces = marker_pieces
        self._decoder = utf8_decoder()
        self._calls = calls
        self._text = TextStream(stops)
        self._splitter = Splitter() if sentences else None
        self.n_given = 0
        """The number of tokens in the beginning of the answer that another model has written."""
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

    @property
    def called(self) -> bool:
        """The last thing in the answer is a whole call."""
        return self._calls is not None and self._calls.called

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
            if self._calls is not None:
                self._calls.begin(text)
            return self._cut(text)
        before = self._channels.active
        if not (ends and self.answering()):  # the token that ends the answer is in no marker
            piece = self._marker_pieces.get(token, piece)
        parts = self._channels.push(self._decoder.decode(piece))
        self._limit.add(token, before, self._channels.active, ends=ends)
        return self._given(parts)

    def finish(self) -> Given:
        """Returns what was held back, at the end of the output. An incomplete code point is dropped, so that the text
        of a shorter answer is always a prefix of the text of a longer one. A call that is not whole is dropped, too."""
        return self._given(self._channels.finish(), last=True)

    def _given(self, parts: Parts, *, last: bool = False) -> Given:
        text, calls = Taken(parts.text)
        if self._calls is not None:
            text, calls = self._calls.feed(text)
            text += self._calls.finish() if last else ""
        return self._cut(text, parts.thought, calls, last=last)

    def _cut(self, text: str, thought: str = "", calls: tuple[m.ToolCall, ...] = (), *, last: bool = False) -> Given:
        """Cuts the text at stop strings and sentences."""
        text = self._text.push(text) + (self._text.finish() if last else "")
        ends: tuple[int, ...] = ()
        if self._splitter is not None:
            text, ends = self._splitter.feed(text, last=last)
        return Given(text, ends, thought, calls)
