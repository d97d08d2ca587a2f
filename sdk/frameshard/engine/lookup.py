"""What a sequence may say next, looked up in what it has said: prompt lookup decoding (Saxena, 2023).

The last tokens are sought among the earlier ones of prompt and answer; what followed there is the guess. What a guess
is worth is learned from the answer itself: with every token that comes, guessed or not, it is noted whether the guess
of that moment was right, by the length of the match. So a text that does not repeat costs next to nothing, and one that
begins to is noticed, without a guess being decoded for that.

All this depends on the tokens alone: the same text makes the same guesses, also when it is read again after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

SHORTEST = 2
LONGEST = 16
"""Tokens that a match is at least and that are counted at most."""

_LENGTHS = (2, 4, 8, 16)  # of a step with guesses; few, for a graph of a new length is built and planned anew
_LEAST_GAIN = 1.03
_PLACES = 16  # earlier places that are compared, the latest first
_MEMORY = 0.95  # what an older guess weighs beside the next one
_DOUBT = 4.0  # guesses that it takes to be half as sure of the text's own rate as of the usual one
# How often guesses by matches of 2, 3, 4-5, 6-9 and more tokens are right in an ordinary answer.
_USUAL = (0.35, 0.6, 0.7, 0.8, 0.9)
_CLASSES = (0, 0, 0, 1, 2, 2, 3, 3, 3, 3, *[4] * (LONGEST - 9))


class Lookup:
    """The guesses for one sequence, which begins with ``prompt``. Negative tokens (of images) are never guessed."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, int], list[int]] = {}  # where something followed these two
        self._right = [rate * _DOUBT for rate in _USUAL]
        self._tried = [_DOUBT] * len(_USUAL)
        for token in prompt:
            self._append(token)
        self._find()

    @property
    def matched(self) -> bool:
        """There is a guess."""
        return self._match > 0

    def add(self, token: int) -> None:
        """The sequence goes on with ``token``."""
        if self._match:
            kind = _CLASSES[self._match]
            self._tried[kind] = self._tried[kind] * _MEMORY + 1
            self._right[kind] = self._right[kind] * _MEMORY + (token == self._tokens[self._at])
        self._append(token)
        self._find()

    def guess(self, n: int) -> list[int]:
        """The next ``n`` tokens; fewer where an image follows, none without a match."""
        guessed: list[int] = []
        if self._match:
            for at in range(self._at, self._at + n):
                # A guess that reaches the end goes on with itself: that is what a text does that goes round.
                token = self._tokens[at] if at < len(self._tokens) else guessed[at - len(self._tokens)]
                if token < 0:
                    break
                guessed.append(token)
        return guessed

    def expected(self, n: int) -> float:
        """How many tokens a decode with ``n`` guesses will yield on average: the one that is certain, and of the
        guesses those before the first wrong one."""
        total = chance = 1.0
        for match in range(self._match, self._match + n) if self._match else ():
            kind = _CLASSES[min(match, LONGEST)]
            chance *= self._right[kind] / self._tried[kind]
            total += chance
        return total

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        if len(self._tokens) > SHORTEST:
            first, second = self._tokens[-3:-1]
            self._after.setdefault((first, second), []).append(len(self._tokens) - 1)

    def _find(self) -> None:
        """The earlier place whose past is the longest like the present one, the latest of several."""
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
    """How many tokens of each sequence to decode, at most ``room``, and how many tokens a second come of it: as many as
    yield the most, when ``n`` guesses for each yield ``expected(n)`` tokens and a step of ``n`` tokens each takes
    ``seconds(n)``."""
    best, most = 1, _LEAST_GAIN * expected(0) / seconds(1)
    for length in _LENGTHS:
        if length > room:
            break
        rate = expected(length - 1) / seconds(length)
        if rate > most:
            best, most = length, rate
    return best, most
