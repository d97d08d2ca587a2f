"""Learns while a model serves how much longer graphs take than plans predict: :mod:`frameshard.plan.corrections`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from frameshard.native import Stats
from frameshard.plan import corrections
from frameshard.plan.corrections import Corrections, Kind, Work
from frameshard.plan.model import Model
from frameshard.plan.plans import GraphSize, Plan
from frameshard.plan.profile import Profile

GROUP = 8
"""The median of so many decodes in a row counts."""
_PAUSE_S = 0.25  # between two groups of decodes; to predict the time of a graph takes a part of a millisecond
_LEAST_PROMPT = 128  # the end of a prompt is a smaller graph, and does not show how fast prompts are read
_CHANGED = 0.02  # corrections are kept again when one has changed by this share
_CPU_CHANGED = 0.05  # the CPU's factor is adopted when it has changed by this share: a new plan is made then
_CPU_NEWEST = 1 / 4  # the share of a new ratio in the CPU's factor, after the first
_LEAST_CPU = 1 / 8  # the least share of a decode in which the CPU computes, for its rate to count
_MOST_CPU_FACTOR = 32.0  # a larger factor, or one below its inverse, comes from a disturbance


class _CpuRate:
    """Compares the rate at which the CPU reads weights in decodes with the plan's prediction.

    :param stats: says the shard device's counters.
    :param factor: what earlier runs have shown; 1.0 for nothing.
    """

    def __init__(self, stats: Callable[[], Stats], factor: float) -> None:
        self.factor = factor
        """How much longer the CPU computes than the profile says, as a running mean."""
        self._stats, self._known = stats, factor != 1.0
        self._rates: list[float] = []  # of the group's decodes, from the second on, bytes/s
        self._before: Stats | None = None  # after the group's decode before

    def begin(self) -> None:
        """A group of decodes begins."""
        self._before, self._rates = None, []

    def note(self, seconds: float) -> None:
        """Takes the latest decode, which took so many seconds."""
        before, now = self._before, self._stats()
        self._before = now
        if before is None or now.graphs != before.graphs + 1:
            return  # other graphs ran as well
        busy_s = now.cpu_busy_s - before.cpu_busy_s
        if busy_s > _LEAST_CPU * seconds:
            self._rates.append((now.cpu_read_bytes - before.cpu_read_bytes) / busy_s)

    def compare(self, plan: Plan, graph: GraphSize) -> None:
        """The group is complete: updates :attr:`factor`."""
        if not self._rates:
            return
        ratio = plan.cpu_factor * plan.cpu_rate(graph) / max(statistics.median(self._rates), 1.0)
        if 1 / _MOST_CPU_FACTOR < ratio < _MOST_CPU_FACTOR:
            share = _CPU_NEWEST if self._known else 1.0
            self.factor, self._known = self.factor * (ratio / self.factor) ** share, True


class Practice:
    """The corrections of one model under one profile and in one mode. Use it from the thread that decodes, except where
    it says so.

    :param stats: says the shard device's counters.
    """

    def __init__(self, model: Model, profile: Profile, mode: str, stats: Callable[[], Stats]) -> None:
        self.corrections = corrections.load(model, profile, mode)
        """[any thread] What was learnt so far. It is replaced, not changed."""
        self._model, self._profile, self._mode = model, profile, mode
        self._kept = self.corrections
        self._cpu = _CpuRate(stats, self.corrections.cpu_factor)
        self._plan: Plan | None = None
        self._kind: Kind | None = None
        self._seconds: list[float] = []
        self._due_at = 0.0

    def observe(self, plan: Plan, graphs: Sequence[GraphSize], seconds: float) -> None:
        """Takes the time of one graph, or of steps of a prompt that followed each other.

        :param plan: the plan in force, with all weights resident that it makes so.
        :param seconds: with sampling, until the next graph can begin.
        """
        graph = graphs[-1]
        work: Work = "decode" if graph.n_tokens == graph.n_seq else "prompt"
        if work == "decode" and time.monotonic() < self._due_at:
            return
        if work == "prompt" and (graph.n_seq > 1 or graphs[0].n_tokens < _LEAST_PROMPT):
            return
        kind = Kind.of(work, graph.n_context)
        if plan is not self._plan or kind != self._kind:
            self._plan, self._kind, self._seconds = plan, kind, []
        if not self._seconds:
            self._cpu.begin()
        self._seconds.append(seconds)
        if work == "decode":
            self._cpu.note(seconds)
            if len(self._seconds) < GROUP:
                return
        ratio = statistics.median(self._seconds) / plan.uncorrected_s(work, graphs)
        self.corrections = self.corrections.with_ratio(kind, ratio)
        self._cpu.compare(plan, graph)
        if abs(math.log(self._cpu.factor / self.corrections.cpu_factor)) > _CPU_CHANGED:
            self.corrections = self.corrections.with_cpu_factor(self._cpu.factor)
        self._seconds = []
        if work == "decode":
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
    if one.seen.keys() != other.seen.keys() or one.cpu_factor != other.cpu_factor:
        return 1.0
    factors = ([each.factor(kind.work, kind.n_context) for each in (one, other)] for kind in one.seen)
    return max((max(pair) / min(pair) - 1.0 for pair in factors), default=0.0)
