"""Drafts tokens by a lookup in the text so far: prompt lookup decoding (Saxena, 2023).

The lookup searches the earlier text (prompt and answer) for the last tokens of the sequence. The tokens that followed
there are the draft. The lookup learns the acceptance rate for each length of the match. It compares every new token
with the predicted one, also if the prediction was not decoded. So a text without repetitions is soon decoded without
drafts and costs almost nothing.

Everything here depends only on the tokens: the same text gives the same drafts, also in a new engine after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SHORTEST = 2
LONGEST = 16
"""The length of a match in tokens: the minimum, and the maximum that is searched for."""

_LENGTHS = (2, 4, 8, 16)  # tokens of each sequence in one graph; few values, because each change rebuilds the graph
_LEAST_GAIN = 1.03  # drafts must raise the tokens per second by at least this factor
_PLACES = 16  # so many earlier matches are compared, the latest first
_DECAY = 0.95  # weight of an observation relative to the next one
_PRIOR_WEIGHT = 4.0  # a usual rate counts as so many observations
# The usual acceptance rates after matches of 2, 3, 4-5, 6-9 and more tokens.
_USUAL = (0.35, 0.6, 0.7, 0.8, 0.9)
_CLASSES = (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, *[4] * (LONGEST - 9))


class Lookup:
    """Drafts for one sequence.

    :param prompt: the first tokens of the sequence. Negative ones stand for images and are never drafted.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}  # for each two tokens, the positions that follow them
        self._accepted = [rate * _PRIOR_WEIGHT for rate in _USUAL]
        self._tried = [_PRIOR_WEIGHT] * len(_USUAL)
        for token in prompt:
            self._append(token)
        self._find()

    @property
    def matched(self) -> bool:
        """Whether the lookup has a draft."""
        return self._match > 0

    def add(self, token: int) -> None:
        """Appends ``token`` to the sequence."""
        if self._match:
            kind = _CLASSES[self._match]
            self._tried[kind] = self._tried[kind] * _DECAY + 1
            self._accepted[kind] = self._accepted[kind] * _DECAY + (token == self._tokens[self._at])
        self._append(token)
        self._find()

    def draft(self, n: int) -> list[int]:
        """Drafts the next ``n`` tokens; fewer if an image follows, none without a match."""
        drafted: list[int] = []
        if self._match:
            for at in range(self._at, self._at + n):
                # At the end of the text the draft continues with its own first tokens, as in a text that repeats.
                token = self._tokens[at] if at < len(self._tokens) else drafted[at - len(self._tokens)]
                if token < 0:
                    break
                drafted.append(token)
        return drafted

    def expected(self, n: int) -> float:
        """The expected number of tokens that a decode with ``n`` drafted tokens yields: the accepted ones, and one
        more."""
        total = chance = 1.0
        for match in range(self._match, self._match + n) if self._match else ():
            kind = _CLASSES[min(match, LONGEST)]
            chance *= self._accepted[kind] / self._tried[kind]
            total += chance
        return total

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        if len(self._tokens) > SHORTEST:
            first, second = self._tokens[-3:-1]
            self._after.setdefault((first, second), []).append(len(self._tokens) - 1)

    def _find(self) -> None:
        """Finds the longest match of the last tokens; of equally long ones the latest."""
        tokens, end = self._tokens, len(self._tokens)
        self._match = self._at = 0
        if end < SHORTEST or min(tokens[-2:]) < 0:
            return
        for at in reversed(self._after.get((tokens[-2], tokens[-1]), ())[-_PLACES:]):
            match = SHORTEST
            while match < LONGEST and match < at and tokens[at - 1 - match] == tokens[end - 1 - match]:
                match += 1
            if match > self._match:
                self._match, self._at = match, at
                if match == LONGEST:
                    return


def best_length(expected: Callable[[int], float], seconds: Callable[[int], float], room: int) -> tuple[int, float]:
    """Chooses how many tokens of each sequence to decode in one graph.

    :param expected: gives the expected tokens of all sequences together, for ``n`` drafted tokens of each.
    :param seconds: gives the time of a graph with ``n`` tokens of each sequence.
    :param room: the most tokens of each sequence.
    :returns: the number of tokens of each sequence, and the expected tokens per second.
    """
    best, most = 1, _LEAST_GAIN * expected(0) / seconds(1)
    for length in _LENGTHS:
        if length > room:
            break
        rate = expected(length - 1) / seconds(length)
        if rate > most:
            best, most = length, rate
    return best, most
