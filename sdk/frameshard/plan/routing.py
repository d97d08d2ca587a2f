"""Counts how often the routers of a mixture of experts choose each expert. The counts are kept with the profiles."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from frameshard.plan import kept
from frameshard.plan.model import Model

_ENOUGH = 16  # a layer's counts are used only if each expert was chosen so many times on average


def shares(uses: Collection[Sequence[int]]) -> tuple[float, ...]:
    """The share of a layer's choices that each expert gets, descending; the mean over all layers.

    :param uses: for each layer the counts of its experts.
    :returns: one share for each expert, with sum 1; empty if there are too few counts.
    """
    found = []
    for counts in uses:
        each = np.array(counts, dtype=np.float64)
        mean = float(each.mean()) if each.size else 0.0
        if mean >= _ENOUGH:
            # Counts also differ by chance (Poisson noise). That part is removed.
            variance = float(each.var())
            spread = max(variance - mean, 0.0) / variance if variance else 0.0
            found.append(np.sort(mean + spread * (each - mean))[::-1] / each.sum())
    return tuple(np.mean(found, axis=0).tolist()) if found else ()


def differ(one: Sequence[float], other: Sequence[float]) -> float:
    """How much two results of :func:`shares` differ: the share of choices that would have to move to other experts,
    from 0 to 1."""
    size = max(len(one), len(other))
    pair = [np.array(each if len(each) else [1 / max(size, 1)] * size) for each in (one, other)]
    return float(np.abs(pair[0] - pair[1]).sum()) / 2


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


def recall(model: Model) -> tuple[float, ...]:
    """The :func:`shares` of the kept counts of a model."""
    return shares(load(model).values())


def save(model: Model, uses: Mapping[str, Sequence[int]]) -> None:
    """Keeps counts for the next run. Without write access to the cache it does nothing."""
    kept.try_write(_path(model), dict(uses), "what experts are chosen is")


def _path(model: Model) -> Path:
    key = [model.path.name, model.file_bytes, model.arch, model.n_layer, model.n_expert, model.n_expert_used]
    return kept.path_of(key, "routing-")
