"""Corrections: how much longer graphs take than a plan predicts, by kind of work, as serving has shown.

A profile is measured in a few seconds, with a few shapes of weights. What it misses shows while the model serves: the
engine compares the time of each graph with its prediction, and keeps the ratio by the kind of work, which is prompts or
decodes and the length of the context. Predictions that users see are multiplied by it. It is the same for all budgets,
so that noise never makes a smaller budget look faster. After a change of the budget it is learnt anew in some seconds
of work.

The CPU's share of decodes is compared apart. That ratio changes plans: with a slower CPU they stream more weights. The
CPU is slower than its profile beside a game that uses it, and where products of a graph are smaller than those of the
profile's measurements.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

from frameshard.plan import kept
from frameshard.plan.model import Model
from frameshard.plan.profile import Profile
from frameshard.records import record

Work = Literal["prompt", "decode"]

_LEAST_CONTEXT = 512  # shorter contexts count as one of this length; longer ones are told apart by powers of two
_MOST_DOUBLED = 32  # no context is so long
_FADES = 0.5  # what was seen at a context counts so much less at one of twice or half its length
_UNSEEN = 0.25  # the weight of a ratio of 1, beside one for each ratio that was seen
_NEWEST = 1 / 8  # the least share of a new ratio in what was seen; the first ones have equal shares
_OTHER_PLANS = 0.25  # by how much the logarithm of the CPU's factor changes where decodes are other ones
_MOST = 32.0  # a ratio beyond it, or below its inverse, comes from a disturbance


@record
class Kind:
    """A kind of work.

    :param doubled: the length of the context, as a power of two of the least one that is told apart.
    """

    work: Work
    doubled: int

    @classmethod
    def of(cls, work: Work, n_context: int) -> Kind:
        """The kind of a graph with so many tokens of context at its end."""
        return cls(work, round(_doubled(n_context)))

    @property
    def n_context(self) -> int:
        """A context of this length."""
        return _LEAST_CONTEXT << self.doubled


@record
class Seen:
    """What was seen of one kind of work.

    :param log_ratio: the logarithm of measured time through predicted time, as a running mean.
    :param n: the number of ratios in it.
    """

    log_ratio: float
    n: int


@record
class Corrections:
    """The corrections of one model on one machine.

    :param cpu_factor: how much longer the CPU computes than the profile says. Plans are made with it.
    """

    seen: Mapping[Kind, Seen] = field(default_factory=dict)
    cpu_factor: float = 1.0

    def factor(self, work: Work, n_context: int) -> float:
        """By what a prediction is to be multiplied: a mean of what was seen of such work, in which contexts of about
        this length count most. 1.0 if nothing was seen."""
        total, log_sum = _UNSEEN, 0.0
        for kind, seen in self.seen.items():
            if kind.work == work:
                weight = min(seen.n, 1 / _NEWEST) * _FADES ** abs(kind.doubled - _doubled(n_context))
                total, log_sum = total + weight, log_sum + weight * seen.log_ratio
        return math.exp(log_sum / total)

    def with_ratio(self, kind: Kind, ratio: float) -> Corrections:
        """Adds what was measured.

        :param ratio: measured time through predicted time.
        """
        if not 1 / _MOST < ratio < _MOST:
            return self
        before = self.seen.get(kind, Seen(0.0, 0))
        share = max(1 / (before.n + 1), _NEWEST)
        log_ratio = before.log_ratio + share * (math.log(ratio) - before.log_ratio)
        return replace(self, seen={**self.seen, kind: Seen(log_ratio, before.n + 1)})

    def with_cpu_factor(self, cpu_factor: float) -> Corrections:
        """Other plans are made with another factor. After a large change what was seen of decodes no longer counts."""
        same = abs(math.log(cpu_factor / self.cpu_factor)) < _OTHER_PLANS
        kept = {kind: seen for kind, seen in self.seen.items() if same or kind.work == "prompt"}
        return Corrections(kept, cpu_factor)


NONE = Corrections()


def load(model: Model, profile: Profile, mode: str) -> Corrections:
    """The kept corrections of a model in one mode of the engine; none if they belong to other rates."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        found = json.loads(_path(model, profile, mode).read_text("utf-8"))
        seen = {
            Kind(_work(each["work"]), int(each["doubled"])): Seen(float(each["log_ratio"]), int(each["n"]))
            for each in found["kinds"]
        }
        known = Corrections(seen, float(found["cpu_factor"]))
        logs = [*(each.log_ratio for each in seen.values()), math.log(known.cpu_factor)]
        sane = all(0 <= kind.doubled <= _MOST_DOUBLED and each.n > 0 for kind, each in seen.items())
        if sane and all(abs(log) <= math.log(_MOST) for log in logs):
            return known
    return NONE


def save(corrections: Corrections, model: Model, profile: Profile, mode: str) -> None:
    """Keeps corrections for the next run. Without write access to the cache it does nothing."""
    kinds = [{**vars(kind), **vars(seen)} for kind, seen in corrections.seen.items()]
    document = {"cpu_factor": corrections.cpu_factor, "kinds": kinds}
    kept.try_write(_path(model, profile, mode), document, "the corrections of predicted times are")


def _doubled(n_context: int) -> float:
    return math.log2(max(n_context, _LEAST_CONTEXT) / _LEAST_CONTEXT)


def _work(text: object) -> Work:
    if text == "prompt" or text == "decode":
        return text
    raise ValueError(f"{text} is no kind of work")


def _path(model: Model, profile: Profile, mode: str) -> Path:
    """A profile that is measured again has other rates, and so another path."""
    file = [model.path.name, model.file_bytes, model.arch, model.n_layer]
    rates = [profile.h2d, profile.dram, profile.cpu_gemv, profile.gpu_gemv, profile.cpu_flops, profile.gpu_flops]
    return kept.path_of([file, dict(profile.fingerprint), rates, mode], "corrections-")
