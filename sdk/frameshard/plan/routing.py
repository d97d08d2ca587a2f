"""How the routers of a mixture of experts choose experts. What they chose is counted, and the counts are kept with the
profiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from frameshard.plan import kept
from frameshard.plan.model import Model

_ENOUGH = 16  # a layer's counts are used only if each expert was chosen so many times on average
_PROMPT = 1024  # the tokens of the prompt by which two routings are compared


@dataclass(frozen=True, eq=False)
class Routing:
    """How the routers of a model choose experts.

    :param likely: for each layer and each of its experts, the probability that a token uses it, descending; shape
        [layers, experts].
    """

    likely: NDArray[np.float64]

    def used(self, n_tokens: int) -> NDArray[np.float64]:
        """For each expert of a layer, the probability that at least one of ``n_tokens`` tokens uses it, descending;
        shape [experts]. It is the mean over the layers. If one layer chooses all experts equally often, a prompt uses
        all experts of that layer, but not more of the others."""
        return _used(self, n_tokens)


@lru_cache(maxsize=256)
def _used(routing: Routing, n_tokens: int) -> NDArray[np.float64]:
    used: NDArray[np.float64] = (1 - (1 - routing.likely) ** n_tokens).mean(axis=0)
    return used


@lru_cache(maxsize=8)
def even(n_expert: int, n_used: int) -> Routing:
    """The routing in which a token uses ``n_used`` of ``n_expert`` experts, each of them equally often."""
    return Routing(np.full((1, n_expert), min(n_used / max(n_expert, 1), 1.0)))


def of_shares(shares: ArrayLike, n_used: int) -> Routing:
    """The routing in which a token uses ``n_used`` experts.

    :param shares: for each layer the share of its choices that each expert gets, with sum 1; shape [layers, experts].
    """
    shares = np.sort(np.asarray(shares, dtype=np.float64))[:, ::-1]
    return Routing(np.minimum(n_used * shares, 1.0))


def of_counts(uses: Collection[Sequence[int]], n_used: int) -> Routing | None:
    """The routing in which a token uses ``n_used`` experts.

    :param uses: for each layer the counts of its experts.
    :returns: ``None`` if there are too few counts.
    """
    found = []
    for counts in uses:
        each = np.array(counts, dtype=np.float64)
        mean = float(each.mean()) if each.size else 0.0
        if mean >= _ENOUGH:
            # Counts also differ by chance (Poisson noise): their square roots by a variance of 1/4, whatever the counts
            # are. That part is removed. An expert that no token has chosen keeps next to nothing: a layer has many of
            # them, and a small share of each would add up in a prompt.
            roots = np.sqrt(each)
            variance = float(roots.var())
            spread = max(variance - 0.25, 0.0) / variance if variance else 0.0
            likely = (roots.mean() + spread * (roots - roots.mean())) ** 2
            found.append(likely / likely.sum())
    return of_shares(found, n_used) if found else None


def differ(one: Routing | None, other: Routing | None) -> float:
    """How much two routings of a model differ, from 0 to 1: the share of a token's choices that would have to move to
    other experts, or of all experts the share that a prompt uses in one of them only, whichever is larger.

    :param one: ``None``: all experts are chosen equally often.
    """
    known = one or other
    if known is None:
        return 0.0
    n_used, n_expert = float(known.likely.sum(axis=1).mean()), known.likely.shape[1]
    pair = [each or even(n_expert, round(n_used)) for each in (one, other)]
    token, prompt = (np.abs(pair[0].used(n) - pair[1].used(n)).sum() for n in (1, _PROMPT))
    return float(max(token / (2 * n_used), prompt / n_expert))


def load(model: Model) -> dict[str, list[int]]:
    """The kept counts of a model, by the name of the shard; empty if there are none that fit the model."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError):
        found = json.loads(_path(model).read_text("utf-8"))
        return {
            str(name): [min(max(int(n), 0), 1 << 16) for n in counts]
            for name, counts in found.items()
            if len(counts) == model.n_expert
        }
    return {}


def recall(model: Model) -> Routing | None:
    """The routing by the kept counts of a model; ``None`` if there are too few."""
    return of_counts(load(model).values(), model.n_expert_used)


def save(model: Model, uses: Mapping[str, Sequence[int]]) -> None:
    """Keeps counts for the next run. Without write access to the cache it does nothing."""
    kept.try_write(_path(model), dict(uses), "what experts are chosen is")


def _path(model: Model) -> Path:
    key = [model.path.name, model.file_bytes, model.arch, model.n_layer, model.n_expert, model.n_expert_used]
    return kept.path_of(key, "routing-")
