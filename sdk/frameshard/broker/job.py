"""One job of a client: what was asked, how far it is, and where it is now."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from frameshard.broker.fallback import Away
from frameshard.broker.images import NO_IMAGES, HeldImages
from frameshard.sentences import Marked
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire import states
from frameshard.wire.connection import ServerConnection

OVERTAKEN_PER_RANK = 8
"""The priority of a waiting job rises by one each time so many later jobs have overtaken it."""


def conversation_key(connection: ServerConnection, name: str) -> str:
    """The engine's name for a conversation. It includes the session, because clients do not share conversations of the
    same name."""
    return f"{connection.session}/{name}"


@dataclass(eq=False)
class Job:
    """One job.

    :param number: its number at the engine. The numbers that clients choose may collide.
    :param at_engine: the engine has the job.
    :param cancelling: the client has cancelled it, and the engine has not answered yet.
    :param tokens: ids of the tokens that it has produced.
    """

    number: int
    connection: ServerConnection
    request: m.Submit
    seed: int
    asked_priority: int
    """The priority that its client asked for; that of a warm-up is idle."""
    due: float = math.inf
    """The time by which it must have a token; infinite without a deadline, and once it has a token."""
    state: states.Job = states.Job.QUEUED
    at_engine: bool = False
    cancelling: bool = False
    tokens: list[int] = field(default_factory=list)
    undelivered: int = 0
    """Tokens since the last text or thought. A token without text sends no delta."""
    n_thought: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    history: em.Shapes = ()
    """How the engine has divided the prompt into graphs, in mode ``stream_only``."""
    deaths: int = 0
    """How many engines died with this job since its last new token."""
    progressed: bool = False
    """True if it has produced a new token in the present engine."""
    turn: int = 0
    """Its position in the order in which jobs were first given to an engine; 0: not yet given."""
    overtaken: int = 0
    """How many later jobs were preferred to this one while it waited."""
    inherited: int = em.IDLE_PRIORITY
    """The highest priority of the jobs that wait for it."""
    rank: int = 0
    """The priority that the engine knows."""
    pausing: bool = False
    """True while it leaves the engine to make room for a job of higher priority. It continues later."""
    paused: bool = False
    """True after its client was told that it is paused, until it runs again."""
    images: HeldImages = NO_IMAGES
    away: Away = field(default_factory=lambda: Away(may_go=False))

    @property
    def n_generated(self) -> int:
        """How many tokens its answer has, with those of a text that the engine goes on from."""
        return len(self.tokens) + (0 if self.away.given is None else self.away.given.n_tokens)

    @property
    def may_go(self) -> bool:
        """It may go to the fallback server: its answer has not begun."""
        return self.away.may_go and not self.tokens and self.away.given is None

    @cached_property
    def conversation(self) -> str | None:
        """The engine's name for its conversation."""
        name = self.request.conversation
        return None if name is None else conversation_key(self.connection, name)

    @property
    def priority(self) -> int:
        """The priority by which it pauses other jobs, and by which they pause it."""
        return min(self._level, m.MAX_PRIORITY)

    @property
    def order(self) -> tuple[int, float]:
        """Of two jobs that wait, the one with the lower value goes first."""
        return -self._level, self.due

    @property
    def _level(self) -> int:
        """The priority that was asked for or inherited, raised after many jobs have overtaken it. It may exceed the
        highest priority, so that no job waits for ever, also not for urgent jobs with deadlines. A warm-up waits for
        all jobs, except for those that wait for it."""
        level = max(self.asked_priority, self.inherited)
        return level if level == em.IDLE_PRIORITY else level + self.overtaken // OVERTAKEN_PER_RANK

    def command(self) -> em.Submit:
        """Returns the command that starts or resumes the job."""
        return em.Submit(
            job=self.number,
            kind=self.request.kind,
            sampling=dataclasses.replace(self.request.sampling, seed=self.seed),
            messages=self.request.messages,
            prompt=self.request.prompt,
            images=self.images.images,
            conversation=self.conversation,
            resume=tuple(self.tokens),
            history=self.history,
            sentences=self.request.sentences,
            priority=self.rank,
            warm_up=self.request.warm_up,
            adapters=self.request.adapters,
            thinking=self.request.thinking,
            thinking_tokens=self.request.thinking_tokens,
            template_keywords=self.request.template_keywords,
            tools=self.request.tools,
            tool_choice=self.request.tool_choice,
            given=self.away.given.text if self.away.given is not None else "",
        )

    def deliver(self, marked: Marked, thought: str = "", calls: Sequence[m.ToolCall] = ()) -> None:
        """Sends text, thought and calls to the client.

        :raises Overloaded: the client does not read.
        """
        if not (marked.text or thought or calls):
            return
        job, tokens, begin = self.request.job, self.undelivered, 0
        if marked.text or thought:
            self.undelivered = 0
        if thought:
            self.n_thought += tokens
            if self.request.thinking == "shown":
                self.connection.thought(job, thought, tokens)
            tokens = 0
        for end in marked.ends:
            self.connection.delta(job, marked.text[begin:end], tokens, sentence_end=True)
            begin, tokens = end, 0
        if begin < len(marked.text):
            self.connection.delta(job, marked.text[begin:], tokens)
        for call in calls:
            self.connection.tool_call(job, call)
