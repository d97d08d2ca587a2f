"""How a model marks its thought, and how its chat template is told to think or not.

Chat templates do not say this, so short chats are rendered: with and without thinking, and with a thought in an answer.
What stands before and behind that thought are the markers. Many templates leave the thoughts of earlier answers out;
then the markers are among the known ones that the template mentions.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from frameshard.engine.channels import Channel, Marker

Render = Callable[[Sequence[Mapping[str, str]], Mapping[str, Any]], str | None]
"""Renders messages with variables for the template; ``None`` if the template refuses them."""

KNOWN = (
    ("<think>\n", "\n</think>\n\n"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]\n"),
)
"""Texts that open and close a thought."""

_QUESTION = {"role": "user", "content": "Hello"}
_THOUGHT, _ANSWER = "thought-0f2b", "answer-7d91"
_TAG = r"(?:<[^<>\s]+>|\[[^\[\]\s]+\])"
_LAST_TAG = re.compile(rf"({_TAG})\s*\Z")
_LAST_NAME = re.compile(rf"{_TAG}\w+{_TAG}\s*\Z")  # such as <|open|>think<|sep|>


class Thinking(NamedTuple):
    """
    :param opening: the text that begins a thought, with the white space around it.
    :param closing: the text that ends it and begins the answer.
    :param header: a text that begins an answer without a thought; empty for most models.
    :param switches: the template can be told not to think.
    """

    opening: str
    closing: str
    header: str
    switches: bool

    @property
    def markers(self) -> tuple[Marker, ...]:
        begin, end = self.opening.strip(), self.closing.strip()
        found = (Marker(begin, Channel.TEXT, Channel.THOUGHT), Marker(end, Channel.THOUGHT, Channel.TEXT))
        return (*found, Marker(self.header, Channel.TEXT, Channel.TEXT)) if self.header else found

    def prompt_end(self, prompt: str, *, wanted: bool, formed: bool) -> tuple[str, Channel]:
        """Returns what the prompt must end with in addition, and the channel in which the answer then begins.

        :param wanted: the model shall think.
        :param formed: the answer has a form, which cannot begin with a thought. So the thought must begin here.
        """
        end = prompt.rstrip()
        if end.endswith(self.opening.strip()):
            return ("", Channel.THOUGHT) if wanted else (self.closing, Channel.TEXT)
        if end.endswith(self.closing.strip()):
            return "", Channel.TEXT
        if wanted:
            return (self.opening, Channel.THOUGHT) if formed else ("", Channel.TEXT)
        return "" if self.switches else self.opening + self.closing, Channel.TEXT


def switch(*, wanted: bool) -> dict[str, bool]:
    """The variables that tell a template whether to think."""
    return {"enable_thinking": wanted, "thinking": wanted}


def find_thinking(render: Render, source: str) -> Thinking | None:
    """Finds out how a model thinks; ``None`` if it does not.

    :param source: the chat template.
    """
    asked = render([_QUESTION], switch(wanted=True))
    if asked is None:
        return None
    marks = _rendered_marks(render, asked) or _known_marks(source)
    if marks is None:
        return None
    opening, closing = marks
    header = _before(_ANSWER, render([_QUESTION, _answer()], _whole()), asked).strip()
    if opening.strip() in header or closing.strip() in header or asked.rstrip().endswith(opening.strip()):
        header = ""
    return Thinking(opening, closing, header, switches=render([_QUESTION], switch(wanted=False)) != asked)


def _rendered_marks(render: Render, asked: str) -> tuple[str, str] | None:
    """What stands before and behind a thought in an answer."""
    told = render([_QUESTION, _answer(reasoning_content=_THOUGHT, reasoning=_THOUGHT, thinking=_THOUGHT)], _whole())
    if told is None or not told.startswith(asked):
        return None
    closing = _before(_ANSWER, told, _THOUGHT)
    opening = _before(_THOUGHT, told, asked)
    if told.startswith(asked + _THOUGHT) and (tag := _LAST_TAG.search(asked)):
        opening = tag[0]  # the prompt ends in the thought
        if tag[1] in closing and (name := _LAST_NAME.search(asked)):
            opening = name[0]  # the tag is behind every name
    return (opening, closing) if opening.strip() and closing.strip() else None


def _known_marks(source: str) -> tuple[str, str] | None:
    return next((marks for marks in KNOWN if marks[0].strip() in source), None)


def _answer(**fields: str) -> dict[str, str]:
    return {"role": "assistant", "content": _ANSWER, **fields}


def _whole() -> dict[str, bool]:
    return {"add_generation_prompt": False, **switch(wanted=True)}


def _before(word: str, text: str | None, start: str) -> str:
    """The text between ``start`` and ``word``; empty if they do not stand in this order."""
    if text is None or (begin := text.find(start)) < 0 or (end := text.find(word, begin + len(start))) < 0:
        return ""
    return text[begin + len(start) : end]


class ThoughtLimit:
    """Ends thoughts that are too long, or in which the model ends its output: tokens are put in instead of sampled
    ones, so that an answer follows. Which ones depends only on the tokens before, so it is the same in a resumed job
    and with drafts.

    :param most: tokens of thought in one answer, without markers; ``None``: no limit.
    :param closing: the tokens that end a thought.
    """

    def __init__(self, most: int | None = None, closing: Sequence[int] = ()) -> None:
        self._most = most
        self._closing = closing
        self._n_thought = 0
        self._due: deque[int] = deque()

    @property
    def due(self) -> int | None:
        """The next token, if it is put in; ``None`` if it is sampled."""
        return self._due[0] if self._due else None

    def add(self, token: int, before: Channel, after: Channel, *, ends: bool = False) -> None:
        """Counts a token of the answer.

        :param before: the active channel before the token.
        :param after: the active channel behind it.
        :param ends: the model ends its output with it.
        """
        if self._due:
            self._due.popleft()
        elif after is Channel.THOUGHT:
            self._n_thought += before is Channel.THOUGHT
            if ends or (self._most is not None and self._n_thought >= self._most):
                begun = ends and token in self._closing[:1]  # some models end their output with it, too
                self._due.extend(self._closing[begun:])
