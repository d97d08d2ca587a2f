"""Learns while a model serves how much longer graphs take than plans predict: :mod:`frameshard.plan.corrections`."""

from __future__ import annotations

import statistics
import time

from frameshard.plan import corrections
from frameshard.plan.corrections import Corrections, Kind, Work
from frameshard.plan.model import Model
from frameshard.plan.plans import GraphSize, Plan
from frameshard.plan.profile import Profile

_GROUP = 8  # the median of so many decodes in a row counts
_PAUSE_S = 0.25  # between two groups; to predict the time of a graph takes a part of a millisecond
_LEAST_PROMPT = 128  # the end of a prompt is a smaller graph, and does not show how fast prompts are read
_CHANGED = 0.02  # corrections are kept again when one has changed by this share


class Practice:
    """The corrections of one model under one profile and in one mode. Use it from the thread that decodes, except where
    it says so."""

    def __init__(self, model: Model, profile: Profile, mode: str) -> None:
        self.corrections = corrections.load(model, profile, mode)
        """[any thread] What was learnt so far. It is replaced, not changed."""
        self._model, self._profile, self._mode = model, profile, mode
        self._kept = self.corrections
        self._plan: Plan | None = None
        self._kind: Kind | None = None
        self._seconds: list[float] = []
        self._last: Work = "decode"
        self._due_at = 0.0

    def observe(self, plan: Plan, graph: GraphSize, seconds: float) -> None:
        """Takes the time of one graph.

        :param plan: the plan in force, with all weights resident that it makes so.
        :param seconds: with sampling, until the next graph can begin.
        """
        work: Work = "decode" if graph.n_tokens == graph.n_seq else "prompt"
        is_first, self._last = work == "prompt" and self._last == "decode", work
        if work == "decode" and time.monotonic() < self._due_at:
            return
        if work == "prompt" and (graph.n_seq > 1 or graph.n_tokens < _LEAST_PROMPT):
            return
        kind = Kind.of(work, graph.n_context)
        if plan is not self._plan or kind != self._kind:
            self._plan, self._kind, self._seconds = plan, kind, []
        self._seconds.append(seconds)
        if work == "decode" and len(self._seconds) < _GROUP:
            return
        ratio = statistics.median(self._seconds) / plan.uncorrected_s(work, graph, is_first=is_first)
        self.corrections = self.corrections.with_ratio(kind, ratio)
        self._seconds = []
        self._due_at = time.monotonic() + _PAUSE_S

    def keep(self) -> None:
        """Writes the corrections to the cache, if they have changed since they were written."""
        if _differ(self.corrections, self._kept) > _CHANGED:
            corrections.save(self.corrections, self._model, self._profile, self._mode)
            self._kept = self.corrections


def _differ(one: Corrections, other: Corrections) -> float:
    """The largest difference of a correction, relative; 1.0 if one of them is new."""
    if one is other:
        return 0.0
    if one.seen.keys() != other.seen.keys():
        return 1.0
    factors = ([each.factor(kind.work, kind.n_context) for each in (one, other)] for kind in one.seen)
    return max(max(pair) / min(pair) - 1.0 for pair in factors)
