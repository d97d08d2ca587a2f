"""Plans: what each shard does at a budget, and how long that will take.

The resident set follows from the budget alone: it is a prefix of the ladder, in the slabs of the shard device. A plan
chooses, by tier of graph size, which of the other shards stream through the ring and which the CPU computes. It takes
the split with the least predicted time of a few dozen: experts go to the CPU first (a token reads few of them,
streaming copies all) or the output head (a prefill computes one row of it), then feed-forward networks and attention,
each spread evenly over the layers so that copies and CPU work at the same time. Then each shard is tried the other way.
On small models the result is within a few percent of the best of all splits (test_optimum.py). A feed-forward network
is two shards: its down projection can stream while the CPU computes the part before it.

How a graph's time is predicted is in ``costs``. All functions are pure. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from frameshard.errors import below_floor
from frameshard.native import CPU, STREAMED
from frameshard.plan.costs import Conditions, Costs, Graph
from frameshard.plan.layout import Layout, lay_out
from frameshard.plan.memory import Context
from frameshard.plan.model import Model
from frameshard.plan.profile import Profile
from frameshard.plan.weights import Mask

Mode = Literal["planned", "stream_only"]

# Tiers by tokens in a graph: (from this many, planned for this many).
_TIERS = ((0, 1), (2, 4), (8, 16), (32, 64), (128, 512), (1024, 2048), (4096, 8192))
_DECODING = 4  # most tokens of a graph that counts as decode, each token of another sequence
# Sizes that are tried for the expert cache, in 64ths of all experts: few, so that a small change of the budget or the
# context leaves the ring as it is.
_CACHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_WORTH_A_CACHE = 0.98  # of the time without it: filling a larger cache costs copies first
# Steps of the largest size that fit the ring: one in use, the others for copies while the CPU works. A mixture of
# experts copies only experts that are used and gains little by more.
_RING, _RING_OF_EXPERTS = 4, 3
_SPLITS = 8  # shares of a kind of shard that are tried on the CPU, from none to all
_CPU_ORDERS = (
    ("experts", "shared", "ffn", "ffn_down", "output", "attention"),
    ("output", "experts", "shared", "ffn", "ffn_down", "attention"),
    ("experts", "shared", "ffn_down", "ffn", "attention", "output"),
)
# A turn to the CPU and back waits for the device while the host draws, by this share of its busy time: 4.4 ms beside
# 12 ms a frame on an H100.
_BUSY_TURN = 1 / 3
_NO_CONTEXT = Context()


@dataclass(frozen=True)
class TierPlan:
    """Placements for graphs of at least ``min_tokens`` tokens.

    :param placements: by shard of the ladder, STREAMED or CPU: what it does while it is not resident.
    :param predicted_s: time of a graph of ``n_tokens``; ``bound_s`` is its lower bound.

    The counts and bytes are placements at the plan's budget. A shard of which a part is resident counts as what the
    rest of it does.
    """

    min_tokens: int
    n_tokens: int
    placements: tuple[int, ...] = field(repr=False)
    predicted_s: float
    bound_s: float
    n_resident: int
    n_streamed: int
    n_cpu: int
    resident_bytes: int
    streamed_bytes: int
    cpu_bytes: int


@dataclass(frozen=True)
class Plan:
    """What every shard does at ``budget_bytes``: the first ``resident`` of the ladder are in VRAM (all of them if
    ``ring_bytes`` is 0), the others do as the tier of a graph's size says. ``expert_stream_share``: of the experts that
    a token needs and that are neither resident nor cached, what share is copied so that copies take as long as the CPU
    does for the others, from 0 to 1."""

    budget_bytes: int
    fixed_bytes: int
    floor_bytes: int
    full_bytes: int
    ring_bytes: int
    resident: int
    tiers: tuple[TierPlan, ...]
    expert_stream_share: float
    mode: Mode
    n_ubatch: int
    _costs: Costs = field(repr=False, compare=False)

    def predicted_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """Seconds from an empty context until the logits after ``n_parallel`` prompts of ``n_tokens`` each, several of
        them in a graph where they fit."""
        return sum(self._graph_seconds(*graph) for graph in self._graphs(n_tokens, n_parallel))

    def bound_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """Least seconds for that with this resident set and size of graphs."""
        return self._costs.bound(self._graphs(n_tokens, n_parallel), may_use_cpu=self.mode == "planned")

    def predicted_decode_s(self, n_parallel: int = 1, n_each: int = 1) -> float:
        """Seconds of a graph of ``n_each`` tokens of each of ``n_parallel`` sequences, with the logits of all."""
        n_tokens = n_parallel * n_each
        return self._graph_seconds(n_tokens, self._costs.conditions.n_ctx_used, n_parallel, n_tokens)

    def predicted_decode_tps(self, n_parallel: int = 1) -> float:
        """Tokens per second of ``n_parallel`` sequences together, one token each in a graph."""
        return n_parallel / self.predicted_decode_s(n_parallel)

    def bound_decode_tps(self, n_parallel: int = 1) -> float:
        """Most tokens per second of ``n_parallel`` sequences that any placement of the rest gives with this resident
        set."""
        graph = (n_parallel, self._costs.conditions.n_ctx_used, n_parallel)
        return n_parallel / self._costs.bound([graph], may_use_cpu=self.mode == "planned")

    def static_ttft(self, n_tokens: int) -> float:
        """Seconds for the same with this resident set and everything else as llama.cpp has it with ``-ngl``: each graph
        copies it from pageable memory, and nothing overlaps."""
        return sum(self._costs.static_seconds(*graph) for graph in self._graphs(n_tokens))

    def static_decode_tps(self) -> float:
        """Tokens per second of one sequence when the CPU computes everything that is not resident."""
        return 1.0 / self._costs.static_seconds(1, self._costs.conditions.n_ctx_used)

    def summary(self, n_prompt: int = 512, n_parallel: int = 1) -> dict[str, object]:
        """The plan as plain values, for JSON and tables."""
        tiers = [
            {
                "min_tokens": tier.min_tokens,
                "resident": {"shards": tier.n_resident, "bytes": tier.resident_bytes},
                "streamed": {"shards": tier.n_streamed, "bytes": tier.streamed_bytes},
                "cpu": {"shards": tier.n_cpu, "bytes": tier.cpu_bytes},
                "predicted_s": tier.predicted_s,
                "bound_s": tier.bound_s,
            }
            for tier in self.tiers
        ]
        return {
            "mode": self.mode,
            "budget_bytes": self.budget_bytes,
            "fixed_bytes": self.fixed_bytes,
            "floor_bytes": self.floor_bytes,
            "full_bytes": self.full_bytes,
            "ring_bytes": self.ring_bytes,
            "tiers": tiers,
            "predicted_ttft_s": self.predicted_ttft(n_prompt, n_parallel),
            "predicted_decode_tps": self.predicted_decode_tps(n_parallel),
            "bound_ttft_s": self.bound_ttft(n_prompt, n_parallel),
            "bound_decode_tps": self.bound_decode_tps(n_parallel),
        }

    def _graphs(self, n_tokens: int, n_parallel: int = 1) -> list[tuple[int, int, int]]:
        """(tokens, tokens of a sequence before it, sequences) of each graph of so many prompts."""
        if n_tokens > self.n_ubatch:
            one = [(min(self.n_ubatch, n_tokens - done), done, 1) for done in range(0, n_tokens, self.n_ubatch)]
            return one * n_parallel
        together = min(self.n_ubatch // n_tokens, n_parallel)
        groups = [min(together, n_parallel - done) for done in range(0, n_parallel, together)]
        return [(n * n_tokens, 0, n) for n in groups]

    def _graph_seconds(self, n_tokens: int, n_before: int, n_seq: int, n_rows: int = 0) -> float:
        tier = next(tier for tier in reversed(self.tiers) if n_tokens >= tier.min_tokens)
        on_cpu = np.array(tier.placements, dtype=np.int8) == CPU
        return self._costs.at(n_tokens, n_before, n_seq, n_rows).seconds(on_cpu)


def make_plan(
    model: Model,
    profile: Profile,
    *,
    budget_bytes: int,
    fixed_bytes: int,
    context: Context = _NO_CONTEXT,
    mode: Mode = "planned",
    n_ctx_used: int = 512,
    n_ubatch: int = 512,
    gpu_busy_s: float = 0.0,
    routing: Sequence[float] = (),
    layout: Layout | None = None,
) -> Plan:
    """The plan for a budget; ``budget_bytes`` of 0 means no limit.

    ``fixed_bytes`` is what VRAM holds beside arena, ring and ``context``: overhead, compute buffers, core and scratch,
    from the shard device after commit or from :func:`estimate_fixed`. Decoding is predicted at ``n_ctx_used`` tokens of
    context. In mode ``stream_only`` nothing is computed on the CPU. ``gpu_busy_s`` is how long a game keeps the device
    busy in each frame. ``routing`` is how the model's routers choose: of a layer's choices the share of the expert that
    is chosen most, of the next, and so on (descending, sum 1); by default all are chosen alike. ``layout`` is needed
    only for a device not configured by default. Raises :class:`BudgetBelowFloor`.
    """
    layout = layout or lay_out(model, profile.device)
    floor = fixed_bytes + context.window + layout.least_bytes
    full = fixed_bytes + context.whole + layout.arena_bytes
    budget = budget_bytes or full
    if budget < floor:
        raise below_floor(budget, floor)
    # The KV cache in VRAM leaves room for a ring of some steps. The rest of it passes through the KV window.
    room = max(budget - fixed_bytes - layout.sizes.weights_beside_kv_bytes, 0)
    if context.used <= room:
        kv_room = float("inf")
        fixed_bytes += context.used
    else:
        kv_room = max(room - context.window, 0)
        fixed_bytes += max(room, context.window)
    # Copies also run while the host keeps the device busy, as far as the ring has room.
    room = budget - fixed_bytes
    n_steps = _RING_OF_EXPERTS if model.n_expert else _RING
    least_ring = n_steps * layout.min_ring_bytes + min(round(gpu_busy_s * profile.h2d), room // 8)
    turn_s = profile.handoff_s + gpu_busy_s * _BUSY_TURN
    found: list[tuple[float, Costs]] = []
    for wanted_ring in _rings(layout, room, least_ring, routing):
        ring, n_slabs = layout.sizes.fit(room, wanted_ring)
        share = layout.resident_share(n_slabs)
        conditions = Conditions(ring, n_ctx_used, turn_s, kv_room, routing, context.kv_type)
        costs = Costs(layout, profile, share, conditions)
        seconds = costs.at(1, n_ctx_used).seconds(costs.shards.masks["experts"] & (mode == "planned"))
        if not found or seconds < _WORTH_A_CACHE * found[-1][0]:
            found.append((seconds, costs))
    costs = found[-1][1]
    tiers = tuple(_plan_tier(costs, *tier, mode, n_ubatch) for tier in _TIERS if tier[0] <= max(n_ubatch, 1))
    whole = costs.resident_share >= 1.0
    return Plan(
        budget_bytes=budget,
        fixed_bytes=fixed_bytes,
        floor_bytes=floor,
        full_bytes=full,
        ring_bytes=costs.conditions.ring,
        resident=len(whole) if whole.all() else int(np.argmin(whole)),
        tiers=tiers,
        expert_stream_share=costs.stream_share,
        mode=mode,
        n_ubatch=n_ubatch,
        _costs=costs,
    )


def _rings(layout: Layout, room: int, least: int, routing: Sequence[float]) -> Iterator[int]:
    """Sizes of the ring to choose from: the least, and larger ones with room for the expert cache."""
    yield least
    experts = sum(shard.n_bytes for shard in layout.ladder if shard.kind == "experts")
    others = sum(shard.n_bytes for shard in layout.ladder) - experts
    spare = room - least - others - int(layout.sizes.slabs.max(initial=0))
    if routing:
        yield from (least + experts * n // 64 for n in _CACHES if experts * n // 64 <= spare)


def _plan_tier(costs: Costs, min_tokens: int, n_tokens: int, mode: Mode, n_ubatch: int) -> TierPlan:
    n_tokens = max(min(n_tokens, n_ubatch), 1)
    decode = n_tokens <= _DECODING
    n_before, n_seq = (costs.conditions.n_ctx_used, n_tokens) if decode else (0, 1)
    graph = costs.at(n_tokens, n_before, n_seq)
    # What evicted shards do until the next plan: a token reads few experts, so those are left to the CPU in decoding.
    evicted = (
        costs.shards.masks["experts"]
        if decode and mode == "planned"
        else np.zeros(len(costs.layout.ladder), dtype=np.bool_)
    )
    best, on_cpu = float("inf"), evicted
    for choice in _splits(costs) if mode == "planned" else [evicted]:
        seconds = graph.seconds(choice, best)
        if seconds < best:
            best, on_cpu = seconds, choice
    if mode == "planned":
        best, on_cpu = _improved(costs, graph, best, on_cpu)
    share, n_bytes = costs.resident_share, costs.shards.n_bytes
    left_out = share < 1.0
    placements = np.where(np.where(left_out, on_cpu, evicted), CPU, STREAMED)
    streamed, cpu = left_out & ~on_cpu, left_out & on_cpu
    return TierPlan(
        min_tokens=min_tokens,
        n_tokens=n_tokens,
        placements=tuple(placements.tolist()),
        predicted_s=best,
        bound_s=costs.bound([(n_tokens, n_before, n_seq)], may_use_cpu=mode == "planned"),
        n_resident=int((~left_out).sum()),
        n_streamed=int(streamed.sum()),
        n_cpu=int(cpu.sum()),
        resident_bytes=round(float((n_bytes * share).sum())),
        streamed_bytes=round(float((n_bytes * (1 - share))[streamed].sum())),
        cpu_bytes=round(float((n_bytes * (1 - share))[cpu].sum())),
    )


def _splits(costs: Costs) -> Iterator[Mask]:
    """Candidates for what the CPU computes, from nothing to everything, in the orders of _CPU_ORDERS, each once."""
    nothing = np.zeros(len(costs.layout.ladder), dtype=np.bool_)
    seen = {nothing.tobytes()}
    yield nothing
    order = costs.layout.use_order
    for kinds in _CPU_ORDERS:
        on_cpu = nothing
        for kind in kinds:
            members = order[(costs.shards.masks[kind] & (costs.resident_share < 1.0))[order]]
            counts = sorted({round(len(members) * i / _SPLITS) for i in range(1, _SPLITS + 1)} - {0})
            for count in counts:
                candidate = on_cpu.copy()
                candidate[members[((np.arange(count) + 0.5) * len(members) / count).astype(np.intp)]] = True
                if candidate.tobytes() not in seen:
                    seen.add(candidate.tobytes())
                    yield candidate
            on_cpu = on_cpu.copy()
            on_cpu[members] = True


def _improved(costs: Costs, graph: Graph, best: float, on_cpu: Mask) -> tuple[float, Mask]:
    """The split after each shard in the order of use was tried the other way, alone and in place of the one before it,
    and the quicker one kept."""
    before: list[int] = []
    for i in costs.layout.use_order[(costs.resident_share < 1.0)[costs.layout.use_order]]:
        for also in ([], before):
            other = on_cpu.copy()
            other[[i, *also]] = ~other[[i, *also]]
            if not also or other[i] != other[also[0]]:
                seconds = graph.seconds(other, best)
                if seconds < best:
                    best, on_cpu = seconds, other
        before = [i]
    return best, on_cpu
