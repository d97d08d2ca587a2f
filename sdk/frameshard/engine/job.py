"""A job in the engine, and the sequence that it runs in."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from frameshard.engine.adapters import NO_ADAPTERS, AdapterSet
from frameshard.engine.answer import Answer
from frameshard.engine.draft import DraftState
from frameshard.engine.lookup import Lookup
from frameshard.engine.sampling import NOTHING_PREPARED, Prepared, Sampler
from frameshard.engine.sequences import Cells, Shape
from frameshard.engine.vision import Picture
from frameshard.wire import messages as m


@dataclass(eq=False)
class Job:
    """One request.

    :param resume: the tokens of the answer that an earlier engine produced, behind those of a text that another model
        has written.
    :param history: the shapes in which the earlier engine decoded the prompt.
    :param shapes: the chunks of the prompt that are not decoded yet.
    :param pictures: the images in the prompt, by the index of their first token. Tokens of an image are negative.
    """

    id: int
    prompt: list[int]
    sampling: m.Sampling
    seed: int
    conversation: str | None
    resume: list[int]
    history: list[Shape]
    answer: Answer
    prepared: Prepared = NOTHING_PREPARED
    priority: int = 1
    warm_up: bool = False
    """The job ends when its prompt is read. What was read is put into the KV store."""
    wanted: tuple[m.Adapter, ...] = ()
    """The adapters that the request asks for."""
    adapters: AdapterSet = NO_ADAPTERS
    """The adapters that it is decoded with, from :meth:`Batcher.add` to the end. Only cells that were decoded with the
    same ones are reused."""
    gave_way: bool = False
    """Its last decode was aborted, for a more urgent job or a smaller budget."""
    last_turn: int = 0
    """The number of the last turn in which it generated."""
    slot: Slot | None = None
    sampler: Sampler | None = None
    shapes: collections.deque[Shape] = field(default_factory=collections.deque)
    produced: list[int] = field(default_factory=list)
    started_at: float = 0.0
    first_token_at: float = 0.0
    pictures: dict[int, Picture] = field(default_factory=dict)
    lookup: Lookup | None = None
    """The source of drafts by lookup; ``None`` if nothing is drafted for this job."""
    draft_state: DraftState | None = None
    to_prefill: list[int] = field(default_factory=list)
    """The tokens to prefill before the job generates: the prompt, and in planned mode also ``resume``."""

    def next_tokens(self, n: int) -> list[int]:
        """The last sampled token and up to ``n - 1`` drafted ones, filled up to ``n`` with copies of the last."""
        tokens = self.produced[-1:]
        if self.draft_state is not None and self.draft_state.next:
            tokens += self.draft_state.next[: n - 1]
        elif self.lookup is not None:
            tokens += self.lookup.draft(n - 1)
        return tokens + tokens[-1:] * (n - len(tokens))

    def expected(self, n_drafted: int, *, with_draft: bool = False) -> float:
        """The expected number of tokens that a decode with ``n_drafted`` drafted tokens yields."""
        if self.lookup is None:
            return 1.0
        looked_up = self.lookup.expected(n_drafted)
        if with_draft and self.draft_state is not None:
            return max(looked_up, self.draft_state.expected(n_drafted))
        return looked_up

    def prefers_draft_model(self, n_drafted: int) -> bool:
        """The draft model is expected to yield more tokens than the lookup."""
        return self.expected(n_drafted, with_draft=True) > self.expected(n_drafted)

    @property
    def resumed(self) -> bool:
        """The job has run before, in an earlier engine."""
        return bool(self.resume or self.history)

    @property
    def prefilling(self) -> bool:
        """Part of :attr:`to_prefill` is not decoded yet."""
        return bool(self.shapes)


@dataclass(eq=False)
class Slot(Cells):
    """One sequence of the context.

    :param pictures: for each image among the tokens the index of its first token, its tokens and its positions.
    :param store_at: when it has so many tokens, they are put into the KV store; 0: never.
    """

    seq: int = 0
    job: Job | None = None
    used_at: int = 0
    pictures: list[tuple[int, int, int]] = field(default_factory=list)
    store_at: int = 0

    def whole(self, length: int) -> int:
        """``length``; if that lies inside an image, the index where the image begins."""
        return min([length, *(at for at, n, _ in self.pictures if at < length < at + n)])

    def positions(self, length: int) -> int:
        """The number of positions of the first ``length`` tokens. An image may have fewer positions than tokens."""
        return length - sum(n_tokens - n_pos for at, n_tokens, n_pos in self.pictures if at < length)

    def cut(self, length: int) -> None:
        """Removes all but the first ``length`` tokens."""
        del self.tokens[length:]
        self.pictures = [picture for picture in self.pictures if picture[0] < length]
        left, kept = length, []
        for n_kept, n_decoded in self.shapes:
            if left <= 0:
                break
            kept.append((min(n_kept, left), n_decoded))
            left -= n_kept
        self.shapes = kept


def job_slot(job: Job) -> Slot:
    """The sequence of a running job."""
    assert job.slot is not None
    return job.slot
