"""Where the sentences of an answer end, found while its text arrives: a host speaks a sentence while the next is
generated.

Each character is looked at once, in order, and nothing depends on the pieces in which they come. Whether a mark such as
``.`` ends a sentence is known from what follows, so a little text is held back: the last character, which is the one to
be marked, and up to three quotes, brackets, dashes or spaces in front of the next word. That is :data:`MAX_HELD`.

The rules, in the order in which they are asked:

- A line break after text ends a sentence. White space behind an end belongs to the sentence before it.
- ``。！？`` ``।॥`` ``؟۔`` ``։`` ``።፧`` ``។៕`` ``။`` end a sentence, and closing quotes and brackets that follow belong
  to it.
- ``. ! ? …``, the wide dot ``．`` and ``‼⁇⁈⁉`` end one if white space follows, behind closing quotes and brackets. So
  numbers and names such as ``example.com`` go on. Chinese, Japanese and Korean text may follow at once.
- A dot does not end one after an abbreviation, an initial, or the number of an item of a list.
- A small letter that follows goes on with the sentence, except behind a bare ``!`` or ``?``.

What they cannot know: ``etc.``, ``a.m.`` and the like end a sentence if a capital follows; ``Dr.`` and initials never
do. A German ordinal before a capital (``3. Oktober``) is read as an end.
"""

# ruff: noqa: RUF001, RUF002, SIM905  (marks of many scripts are what this is about; a list of words is easier to read)
from __future__ import annotations

import re
import unicodedata
from enum import Enum, auto
from typing import NamedTuple

MAX_HELD = 4
"""Characters that are held back at most while more may follow."""

TAIL = 16
"""Characters before a dot that are remembered; no abbreviation is longer."""

LINE_BREAKS = "\n\u2028\u2029"
DOTS = ".\uff0e"
ELLIPSES = "\u2026"
CRIES = "!?\u203c\u2047\u2048\u2049"
FULL_STOPS = "\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u0589\u1362\u1367\u17d4\u17d5\u104b"
"""Of scripts in which they are nothing else: Chinese and Japanese, Devanagari, Arabic, Armenian, Ethiopic, Khmer,
Myanmar."""

CLOSERS = "\"'*_~`"
OPENERS = "\"'*_~`\u00bf\u00a1"

BEFORE_NAMES = frozenset(
    """Mr Mrs Ms Mx Dr Dra Prof Rev Fr Br Sr Sra Srta Sres Sig Dott Hr Hrn St Ste Sta Sto Mt Ft Capt Cpt Cmdr Sgt
    Cpl Pvt Lt Maj Col Gen Adm Gov Sen Rep Pres Hon Messrs Mme Mlle Dipl Ing vs viz cf eg ie ca approx bzw vgl evtl ggf
    sog inkl zzgl напр см ул проф акад доц डॉ श्री पं د""".split()
)
"""Behind these a dot ends no sentence. Those that begin with a small letter may begin a sentence, with a capital."""

BEFORE_NUMBERS = frozenset(
    """no nos nr núm vol Bd fig Abb Tab art Abs ch Kap sec eq p pp pág S n № кн стр Jan Feb Mar Apr Jun Jul Aug Sep Sept
    Oct Okt Nov Dec Dez""".split()
)
"""Behind these it does not if a digit follows."""

AT_ENDS = frozenset(["a.m", "p.m", "A.M", "P.M", "Ph.D", "u.s.w", "u.v.m"])
"""Letters with dots that sentences end with."""

_DOTTED = re.compile(r"(?:[^\W\d_]\.-?)+[^\W\d_]")
_SMALL_INITIALS = frozenset("zduovs")
"""Of z. B., d. h., u. a., o. ä., v. a., s. o."""

_WORDS_OF_ONE_LETTER = frozenset("IЯ")
_NEXT_INITIAL = re.compile(r"(?:^|\W)[^\W\d_]\.\s?[^\W\d_]$")
_ITEM = re.compile(r"\W*(?:\d{1,3}|[^\W\d_])")


class Marked(NamedTuple):
    """Text, and where in it sentences end: numbers of characters, ascending, each above 0."""

    text: str
    ends: tuple[int, ...] = ()


class _Mark(Enum):
    """What may end the sentence."""

    NONE = auto()
    DOT = auto()
    ELLIPSIS = auto()
    CRY = auto()
    FULL_STOP = auto()


class _Verdict(Enum):
    """What the next character says about it."""

    OPEN = auto()
    NO_END = auto()
    END_BEFORE = auto()
    END_BEHIND = auto()


class Splitter:
    """Finds the ends of sentences in one answer."""

    def __init__(self) -> None:
        self._given: list[str] = []
        self._n_given = 0
        self._ends: list[int] = []
        self._held = ""
        """The last character that belongs to the sentence, and what stands in front of the next word."""
        self._in_guillemets = False
        self._begin_sentence()

    def _begin_sentence(self) -> None:
        self._tail = ""
        self._n_characters = 0
        """Of the sentence; the tail has the last ones."""
        self._has_text = False
        self._has_word = False
        self._forget_mark()

    def _forget_mark(self) -> None:
        self._mark = _Mark.NONE
        self._closed = False
        """By a quote or bracket behind the mark."""
        self._spaced = False
        """White space has followed."""
        self._numbers = False
        """The dot's word goes on with a number."""

    def feed(self, text: str, *, last: bool = False) -> Marked:
        """Takes more of the answer.

        :param last: nothing follows: what is held is given, and what remains since the last end is a sentence.
        :returns: the text that this sets free, with the ends in it.
        """
        for character in text:
            self._take(character)
        if last:
            self._give(self._held)
            self._held = ""
            if self._has_text:
                self._end()
        given = Marked("".join(self._given), tuple(self._ends))
        self._given, self._ends, self._n_given = [], [], 0
        return given

    def _give(self, text: str) -> None:
        self._given.append(text)
        self._n_given += len(text)

    def _end(self) -> None:
        self._ends.append(self._n_given)
        self._begin_sentence()

    # ---- a character ------------------------------------------------------------------------------------------------

    def _take(self, character: str) -> None:
        verdict = _Verdict.NO_END if self._mark is _Mark.NONE else self._judge(character)
        held, ahead = self._held[:1], self._held[1:]
        if verdict is _Verdict.NO_END:
            self._note(ahead)
            self._forget_mark()
            self._go_on(character)
        elif verdict is _Verdict.END_BEHIND:
            self._give(self._held + character)
            self._held = ""
            self._end()
        elif verdict is _Verdict.END_BEFORE:
            self._give(held)
            self._held = ""
            self._end()
            for each in ahead + character:
                self._take(each)
        elif ahead or (self._spaced and not character.isspace()):
            self._held += character
        else:
            self._note(character)
            self._give(held)
            self._held = character

    def _go_on(self, character: str) -> None:
        """The character belongs to the sentence."""
        self._give(self._held)
        self._held = character
        if character in LINE_BREAKS and self._has_text:
            self._give(character)
            self._held = ""
            self._end()
            return
        mark = _mark_of(character) if self._has_word else _Mark.NONE
        if mark is not _Mark.DOT or not self._is_abbreviation():
            self._mark = mark
        self._note(character)

    def _note(self, text: str) -> None:
        """Remembers what decisions about later characters need."""
        for character in text:
            if character in "«»":  # French ones have white space outside and inside, German ones stand the other way
                self._in_guillemets = character == "«" and not self._tail[-1:].strip()
            self._n_characters += 1
            self._tail = (self._tail + character)[-TAIL:]
            self._has_text = self._has_text or not character.isspace()
            self._has_word = self._has_word or unicodedata.category(character)[0] in "LNS"

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _judge(self, character: str) -> _Verdict:
        """Whether a sentence ends at the mark, by the next character."""
        if character in LINE_BREAKS:
            return _Verdict.END_BEHIND
        if self._spaced:
            return self._judge_next_word(character)
        if (mark := _mark_of(character)) is not _Mark.NONE:
            self._add_mark(mark)
            return _Verdict.OPEN
        if _closes(character, self._mark):
            self._closed = True
            return _Verdict.OPEN
        bare_cry = self._mark is _Mark.CRY and not self._closed
        if character.isspace():
            if self._mark is _Mark.FULL_STOP or (bare_cry and not self._in_guillemets):
                return _Verdict.END_BEHIND
            self._spaced = True
            return _Verdict.OPEN
        if self._mark is _Mark.FULL_STOP:
            return _Verdict.END_BEFORE
        numbered = self._mark is _Mark.DOT and self._tail[-2:-1].isdigit()
        if _is_unspaced(character) and self._mark is not _Mark.ELLIPSIS and not numbered:
            return _Verdict.END_BEFORE
        return _Verdict.NO_END

    def _judge_next_word(self, character: str) -> _Verdict:
        """The same behind white space."""
        loose = self._closed or self._mark is _Mark.ELLIPSIS  # the sentence may go on behind a quote or bracket
        if len(self._held) == 1:
            if character.isspace():
                return _Verdict.OPEN
            mark, closes = _mark_of(character), character == "»" and self._in_guillemets
            if mark is not _Mark.NONE or closes:
                self._spaced = False
                self._closed = closes
                if mark is not _Mark.NONE:
                    self._add_mark(mark)  # as in ". . ."
                return _Verdict.OPEN
        if character.isspace() or _opens(character):
            return _Verdict.OPEN if loose and len(self._held) < MAX_HELD else _Verdict.END_BEFORE
        if character.islower() and (loose or self._mark is _Mark.DOT):
            return _Verdict.NO_END
        if character.isdigit() and self._numbers:
            return _Verdict.NO_END
        return _Verdict.END_BEFORE

    def _add_mark(self, mark: _Mark) -> None:
        both = (self._mark, mark)
        strong = (each for each in (_Mark.FULL_STOP, _Mark.CRY) if each in both)
        self._mark = next(strong, _Mark.ELLIPSIS)
        self._closed = False

    def _is_abbreviation(self) -> bool:
        """The dot that follows belongs to the word before it."""
        if self._n_characters <= TAIL and _ITEM.fullmatch(self._tail):
            return True
        words = re.split(r"\s", self._tail)
        if len(words) == 1 and self._n_characters > TAIL:
            return False  # it is longer than any
        word = words[-1].lstrip("([{\"'“‘„‚«»*_~`¿¡-–—/")
        spellings = {word, word[:1].lower() + word[1:]}
        self._numbers = not BEFORE_NUMBERS.isdisjoint(spellings)
        if not BEFORE_NAMES.isdisjoint(spellings):
            return True
        if _DOTTED.fullmatch(word):
            return word not in AT_ENDS
        if _NEXT_INITIAL.search(self._tail):
            return True
        return len(word) == 1 and word not in _WORDS_OF_ONE_LETTER and (word.isupper() or word in _SMALL_INITIALS)


def _mark_of(character: str) -> _Mark:
    if character in DOTS:
        return _Mark.DOT
    if character in ELLIPSES:
        return _Mark.ELLIPSIS
    if character in CRIES:
        return _Mark.CRY
    return _Mark.FULL_STOP if character in FULL_STOPS else _Mark.NONE


def _closes(character: str, mark: _Mark) -> bool:
    """It closes what was quoted, or belongs to the mark as an emoji does. Without spaces between words, an opening
    quote may follow a full stop; elsewhere the same ones close (German)."""
    if character in CLOSERS:
        return True
    category = unicodedata.category(character)
    return category in ("Pe", "Pf", "So", "Sk", "Cf", "Mn") or (category == "Pi" and mark is not _Mark.FULL_STOP)


def _opens(character: str) -> bool:
    """It may stand in front of the first word of a sentence."""
    return character in OPENERS or unicodedata.category(character) in ("Ps", "Pi", "Pf", "Pd", "Cf")


def _is_unspaced(character: str) -> bool:
    """A letter or an opening bracket of Chinese, Japanese or Korean."""
    code = ord(character)
    ranges = ((0x2E80, 0x9FFF), (0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0xFF00, 0xFFEF), (0x20000, 0x3FFFF))
    in_script = any(first <= code <= last for first, last in ranges)
    return in_script and unicodedata.category(character) in ("Lo", "Lm", "Nl", "Ps")
