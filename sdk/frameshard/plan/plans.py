"""Plans: the placement of each shard at a budget, and the predicted times.

The budget decides which shards are resident: a prefix of the ladder, in the slabs of the shard device. For each tier, a
plan chooses which of the other shards are streamed and which the CPU computes. It compares a few dozen splits and takes
the one with the shortest predicted time. In these splits the first shards to go to the CPU are either the experts,
because a token reads few of them and streaming may copy all, or the output head, because a prefill computes one row of
logits. Feed-forward networks and attention follow. Each kind is spread evenly over the layers, so that copies and the
CPU work at the same time. Then the plan changes each shard from streamed to CPU or back, and keeps what is quicker. On
small models the result is within a few percent of the best of all splits (test_optimum.py). A feed-forward network is
two shards, so that its down projection can be copied while the CPU computes the rest.

``costs`` predicts the time of a graph. All functions are pure. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from frameshard.errors import below_floor
from frameshard.native import CPU, STREAMED
from frameshard.plan.corrections import NONE, Corrections, Work
from frameshard.plan.costs import Conditions, Costs, Graph
from frameshard.plan.host import host_share
from frameshard.plan.layout import Layout, lay_out
from frameshard.plan.memory import Context, estimate_context, estimate_steps, fixed_vram
from frameshard.plan.model import Model
from frameshard.plan.profile import Profile
from frameshard.plan.routing import Routing
from frameshard.plan.steps import Steps, next_step
from frameshard.plan.weights import Mask
from frameshard.plan.workload import Workload
from frameshard.records import record

Mode = Literal["planned", "stream_only"]

# The tiers: (fewest tokens of a graph, number of tokens that the tier is planned for).
_TIERS = ((0, 1), (2, 4), (8, 16), (32, 64), (128, 512), (1024, 2048), (4096, 8192))
_DECODING = 4  # tiers of up to so many tokens are planned as decodes, with one token of each sequence
# The sizes of the expert cache to try, in 64ths of all experts. They are few, so that a small change of the budget or
# of the context does not change the size of the ring.
_CACHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)
# A larger cache takes the room of weights that prompts need. It must reduce the time of one step of a prompt and of an
# answer of so many tokens to this share.
_ANSWER, _WORTH_A_CACHE = 64, 0.99
# The ring has room for so many steps of the largest size: one in use, the others for copies while the CPU works. A
# mixture of experts copies only the experts in use, and gains little from more.
_RING, _RING_OF_EXPERTS = 4, 3
_SPLITS = 8  # the share of a kind on the CPU is tried in steps of 1/8
_CPU_ORDERS = (
    ("experts", "shared", "ffn", "ffn_down", "output", "attention"),
    ("output", "experts", "shared", "ffn", "ffn_down", "attention"),
    ("experts", "shared", "ffn_down", "ffn", "attention", "output"),
)
# A hand-off to the CPU and back waits while the host uses the device: for this share of the host's busy time in a
# frame. On an H100 it was 4.4 ms with 12 ms of drawing in each frame.
_BUSY_TURN = 1 / 3
_AS_GOOD = 1.01  # times up to this factor of the least time count as equal, because nobody notices the difference
_LONG = 4  # a step must also suit prompts of so many of the largest steps
_NO_CONTEXT = Context()
_NO_BUFFERS = Steps()


class GraphSize(NamedTuple):
    """The size of one graph.

    :param n_tokens: its tokens.
    :param n_before: the most tokens of a sequence before them.
    :param n_seq: its sequences.
    """

    n_tokens: int
    n_before: int
    n_seq: int

    @property
    def n_context(self) -> int:
        """The tokens of a sequence after it."""
        return self.n_before + self.n_tokens // self.n_seq


@record
class TierPlan:
    """Placements for graphs of at least ``min_tokens`` tokens.

    :param n_tokens: the number of tokens that the tier is planned for.
    :param placements: for each shard of the ladder, STREAMED or CPU: its placement while it is not resident.
    :param predicted_s: predicted time of a graph of ``n_tokens``.
    :param bound_s: lower bound of that time.

    The ``n_`` fields count shards, and the ``_bytes`` fields their bytes, for each placement at the plan's budget. A
    shard that is partly resident is counted with the placement of its other part.
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


@record
class Plan:
    """The placement of every shard at ``budget_bytes``.

    :param fixed_bytes: VRAM for everything but arena and ring while decoding.
    :param floor_bytes: the smallest budget that the model can run in.
    :param full_bytes: with this budget everything is resident.
    :param ring_bytes: size of the ring; 0 if all shards are resident.
    :param resident: the number of shards that are resident, from the start of the ladder.
    :param tiers: the placements of the other shards, by the size of a graph.
    :param expert_stream_share: from 0 to 1. It concerns the experts that a token needs and that are neither resident
        nor cached: this share of them is copied, and the CPU computes the others.
    :param disk_bytes: weights that a decode of one token reads from disk, on average.
    :param n_ubatch: the most tokens of one step of a prompt.
    :param corrections: what serving has shown; the methods named ``predicted_`` count it in.
    """

    budget_bytes: int
    fixed_bytes: int
    floor_bytes: int
    full_bytes: int
    ring_bytes: int
    resident: int
    tiers: tuple[TierPlan, ...]
    expert_stream_share: float
    disk_bytes: int
    mode: Mode
    n_ubatch: int
    _costs: Costs = field(repr=False, compare=False)
    _prompts: _Prompts = field(repr=False, compare=False)
    corrections: Corrections = field(default=NONE, repr=False, compare=False)

    def predicted_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """Predicted seconds to prefill ``n_parallel`` prompts of ``n_tokens`` tokens each, from an empty context.
        Several prompts share a graph if they fit."""
        times, n_together = self._rounds(n_tokens, n_parallel)
        return times * self._predicted_s("prompt", self._graphs(n_tokens, n_together))

    def bound_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """A lower bound of :meth:`predicted_ttft`, for any placement of the shards that are not resident."""
        times, n_together = self._rounds(n_tokens, n_parallel)
        graphs = self._graphs(n_tokens, n_together)
        return times * self._prompts.costs(_largest(graphs)).bound(graphs, may_use_cpu=self.mode == "planned")

    def predicted_decode_s(self, n_parallel: int = 1, n_each: int = 1) -> float:
        """Predicted seconds of a graph with ``n_each`` tokens of each of ``n_parallel`` sequences, and the logits of
        all tokens."""
        n_tokens = n_parallel * n_each
        graph = GraphSize(n_tokens, self._costs.conditions.n_ctx_used, n_parallel)
        return self._predicted_s("decode", [graph])

    def predicted_decode_tps(self, n_parallel: int = 1) -> float:
        """Predicted tokens per second of ``n_parallel`` sequences together, with one token of each in a graph."""
        return n_parallel / self.predicted_decode_s(n_parallel)

    def predicted_answer_tps(self, n_prompt: int, n_generate: int, n_parallel: int = 1) -> float:
        """Predicted tokens per second of answers of ``n_generate`` tokens, from the end of prompts of ``n_prompt`` on.
        The first token waits until the VRAM of the prompts' compute buffer holds weights, keys and values again. While
        everything is resident, the graph of a token is the one that ran before the prompts."""
        first_s = self._return_s(n_prompt, n_parallel)
        if first_s or self.ring_bytes:
            first_s += min(n_generate, 2) * self._costs.first_s
        return n_parallel * n_generate / (first_s + n_generate * self.predicted_decode_s(n_parallel))

    def bound_decode_tps(self, n_parallel: int = 1) -> float:
        """An upper bound of :meth:`predicted_decode_tps`, for any placement of the shards that are not resident."""
        graph = (n_parallel, self._costs.conditions.n_ctx_used, n_parallel)
        return n_parallel / self._costs.bound([graph], may_use_cpu=self.mode == "planned")

    def static_ttft(self, n_tokens: int) -> float:
        """Predicted seconds to prefill ``n_tokens`` tokens with llama.cpp's ``-ngl`` and the same resident set. Each
        graph copies the other shards from pageable memory, and copies do not overlap with computation."""
        return sum(self._prompts.costs(graph.n_tokens).static_seconds(*graph) for graph in self._graphs(n_tokens))

    def static_decode_tps(self) -> float:
        """Predicted tokens per second of one sequence if the CPU computes all shards that are not resident."""
        return 1.0 / self._costs.static_seconds(1, self._costs.conditions.n_ctx_used)

    def summary(self, n_prompt: int = 512, n_parallel: int = 1) -> dict[str, object]:
        """The plan as a dictionary of plain values, for JSON and tables.

        :param n_prompt: tokens of each prompt, for the predicted TTFT.
        :param n_parallel: sequences, for the predicted times.
        """
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
            "disk_bytes": self.disk_bytes,
            "ubatch": self.n_ubatch,
            "tiers": tiers,
            "predicted_ttft_s": self.predicted_ttft(n_prompt, n_parallel),
            "predicted_decode_tps": self.predicted_decode_tps(n_parallel),
            "bound_ttft_s": self.bound_ttft(n_prompt, n_parallel),
            "bound_decode_tps": self.bound_decode_tps(n_parallel),
        }

    def _return_s(self, n_prompt: int, n_parallel: int) -> float:
        """The time to copy into VRAM what the graphs of a prompt have no room for beside their compute buffer."""
        graph = n_parallel, self._costs.conditions.n_ctx_used, n_parallel
        prompt_costs = self._prompts.costs(_largest(self._graphs(n_prompt, n_parallel)))
        host_kv = prompt_costs.at(*graph).host_kv.n_bytes - self._costs.at(*graph).host_kv.n_bytes
        share = self._costs.resident_share - prompt_costs.resident_share
        n_bytes = max(host_kv, 0.0) + float(self._costs.shards.n_bytes @ np.maximum(share, 0.0))
        return n_bytes / self._costs.profile.h2d

    def _rounds(self, n_tokens: int, n_parallel: int) -> tuple[int, int]:
        """How many times the same graphs prefill prompts, and how many prompts each time: those of several steps are
        read one after the other."""
        return (n_parallel, 1) if n_tokens > self.n_ubatch else (1, n_parallel)

    def _graphs(self, n_tokens: int, n_parallel: int = 1) -> list[GraphSize]:
        """The graphs of one of the :meth:`_rounds` that prefill prompts."""
        if n_tokens > self.n_ubatch:
            steps, done = [], 0
            while done < n_tokens:
                size = next_step(n_tokens - done, self.n_ubatch, exact=self.mode == "stream_only")
                steps.append(GraphSize(size, done, 1))
                done += size
            return steps
        together = min(self.n_ubatch // n_tokens, n_parallel)
        groups = [min(together, n_parallel - done) for done in range(0, n_parallel, together)]
        return [GraphSize(n * n_tokens, 0, n) for n in groups]

    @property
    def cpu_factor(self) -> float:
        """How much longer the CPU computes than the profile says, as the plan takes it to."""
        return self._costs.conditions.cpu_factor

    def uncorrected_s(self, work: Work, graphs: Sequence[GraphSize]) -> float:
        """Predicted seconds of graphs that follow each other, by the profile and :attr:`cpu_factor`."""
        return sum(self._each_s(work, graphs))

    def _each_s(self, work: Work, graphs: Sequence[GraphSize]) -> Iterator[float]:
        """The seconds that each graph adds. A step of a prompt is prepared while the one before is computed."""
        before_s = 0.0
        for size in graphs:
            costs = self._prompts.costs(size.n_tokens) if work == "prompt" else self._costs
            graph = costs.at(*size, size.n_tokens if work == "decode" else size.n_seq)
            waits_s = graph.preparation.behind(before_s if size.n_before else 0.0)
            before_s = graph.computed_s(self._on_cpu(size.n_tokens))
            yield waits_s + before_s

    def cpu_rate(self, graph: GraphSize) -> float:
        """Predicted bytes/s of weights that the CPU reads in a decode while it computes; 0.0 if it computes nothing."""
        return self._costs.at(*graph, graph.n_tokens).cpu_rate(self._on_cpu(graph.n_tokens))

    def _on_cpu(self, n_tokens: int) -> Mask:
        """The shards that the CPU computes, if they are not resident, in a graph of so many tokens."""
        tier = next(tier for tier in reversed(self.tiers) if n_tokens >= tier.min_tokens)
        on_cpu: Mask = np.array(tier.placements, dtype=np.int8) == CPU
        return on_cpu

    def _predicted_s(self, work: Work, graphs: Sequence[GraphSize]) -> float:
        each_s = self._each_s(work, graphs)
        return sum(s * self.corrections.factor(work, graph.n_context) for s, graph in zip(each_s, graphs, strict=True))


def _largest(graphs: Sequence[GraphSize]) -> int:
    return max(graph.n_tokens for graph in graphs)


@dataclass
class _Prompts:
    """The costs of prompts at one budget. They depend on the size of a step, because its compute buffer takes the place
    of weights and of the KV cache.

    :param n_slabs: the most slabs that are resident.
    :param conditions: those of decodes, with the smallest ring.
    """

    layout: Layout
    profile: Profile
    budget: int
    fixed_bytes: int
    steps: Steps
    context: Context
    conditions: Conditions
    n_slabs: int
    _known: dict[int, Costs] = field(default_factory=dict)

    def costs(self, n_tokens: int) -> Costs:
        """The costs of steps of ``n_tokens`` tokens."""
        n_bytes = self.steps.n_bytes(n_tokens)
        if n_bytes not in self._known:
            fixed, kv_room = _with_context(self.layout, self.budget, self.fixed_bytes + n_bytes, self.context)
            ring, n_slabs = self.layout.sizes.fit(self.budget - fixed, self.conditions.ring)
            conditions = replace(self.conditions, ring=ring, kv_room=kv_room)
            self._known[n_bytes] = _costs(self.layout, self.profile, min(n_slabs, self.n_slabs), conditions)
        return self._known[n_bytes]

    def choose_step(self) -> int:
        """The step that costs least in a prompt of the largest step and in one of several, if all weights that are not
        resident are streamed. Where the two want different steps, it is the one with which either loses least. Of steps
        that are about as good it is the smallest, which evicts the fewest weights."""
        room = self.budget - self.fixed_bytes - self.context.window - self.layout.least_bytes
        sizes = self.steps.within(room)
        losses = dict.fromkeys(sizes, 1.0)
        for n_prompt in {sizes[-1], max(min(_LONG * sizes[-1], self.steps.n_ctx), sizes[-1])}:
            found = {n: self._token_s(n, n_prompt) for n in sizes}
            least_s = min(found.values())
            losses = {n: max(losses[n], seconds / least_s) for n, seconds in found.items()}
        return min(n for n, loss in losses.items() if loss <= _AS_GOOD * min(losses.values()))

    def _token_s(self, n_tokens: int, n_prompt: int) -> float:
        """The time for each token of a prompt that is read in steps of ``n_tokens``."""
        streamed = np.zeros(len(self.layout.ladder), dtype=np.bool_)
        graph = self.costs(n_tokens).at(n_tokens, (n_prompt - n_tokens) // 2)  # its tokens attend to as many others
        computed_s, first = graph.computed_s(streamed), n_tokens / n_prompt  # the first step of a prompt follows none
        waits_s = first * graph.preparation.behind(0.0) + (1 - first) * graph.preparation.behind(computed_s)
        return (waits_s + computed_s) / n_tokens


def make_plan(
    model: Model,
    profile: Profile,
    *,
    budget_bytes: int,
    fixed_bytes: int,
    host_budget_bytes: int = 0,
    steps: Steps = _NO_BUFFERS,
    context: Context = _NO_CONTEXT,
    mode: Mode = "planned",
    n_ctx_used: int = 512,
    n_ubatch: int = 512,
    gpu_busy_s: float = 0.0,
    routing: Routing | None = None,
    layout: Layout | None = None,
    corrections: Corrections = NONE,
) -> Plan:
    """Makes the plan for a budget.

    :param budget_bytes: the VRAM budget; 0 for no limit.
    :param fixed_bytes: VRAM for everything but arena, ring, ``context`` and compute buffers: overhead, core and
        scratch.
    :param host_budget_bytes: host memory for weights; 0 for no limit.
    :param steps: the compute buffers. Prompts evict weights to get room for them.
    :param context: the KV cache.
    :param mode: in ``stream_only`` the CPU computes nothing.
    :param n_ctx_used: tokens of context at which decodes are planned and predicted.
    :param n_ubatch: the most tokens of one graph; 0: the step of ``steps`` with which prompts take least.
    :param gpu_busy_s: seconds of each frame in which the host keeps the device busy.
    :param routing: how often experts are chosen; ``None``: all the same.
    :param layout: the layout, if it is not the default one of the profile's device.
    :param corrections: what serving has shown. Of these only the CPU's factor changes placements.
    :raises BudgetBelowFloor: a budget is below its floor.
    :raises BadArgument: weights come from disk, and the profile lacks its rates.
    """
    layout = layout or lay_out(model, profile.device)
    floor = fixed_bytes + steps.floor_bytes + context.window + layout.least_bytes
    full = fixed_bytes + steps.most_bytes + context.whole + layout.arena_bytes
    budget = budget_bytes or full
    if budget < floor:
        raise below_floor(budget, floor)
    beside_graphs = fixed_bytes
    fixed_bytes, kv_room = _with_context(layout, budget, beside_graphs + steps.least_bytes, context)
    # Copies go on while the host keeps the device busy, until the ring is full. So the ring has room for these copies.
    room = budget - fixed_bytes
    n_steps = _RING_OF_EXPERTS if model.n_expert else _RING
    least_ring = n_steps * layout.min_ring_bytes + min(round(gpu_busy_s * profile.h2d), room // 8)
    turn_s = profile.handoff_s + gpu_busy_s * _BUSY_TURN
    conditions = Conditions(
        least_ring, n_ctx_used, turn_s, kv_room, routing, context.kv_type, host_budget_bytes, context.used
    )
    conditions = replace(conditions, cpu_factor=corrections.cpu_factor, sliding_cells=context.sliding_cells)
    all_slabs = len(layout.sizes.slabs)
    prompts = _Prompts(layout, profile, budget, beside_graphs, steps, context, conditions, all_slabs)
    n_ubatch = n_ubatch or prompts.choose_step()
    costs, prompts = _with_cache(prompts, room, mode, n_ubatch)
    tiers = []
    for min_tokens, n_tokens in (tier for tier in _TIERS if tier[0] <= max(n_ubatch, 1)):
        n_tokens = max(min(n_tokens, n_ubatch), 1)
        in_prompts = min_tokens >= layout.sizes.prefill_tokens
        tiers.append(_plan_tier(prompts.costs(n_tokens) if in_prompts else costs, min_tokens, n_tokens, mode))
    whole = costs.resident_share >= 1.0
    return Plan(
        budget_bytes=budget,
        fixed_bytes=fixed_bytes,
        floor_bytes=floor,
        full_bytes=full,
        ring_bytes=costs.conditions.ring,
        resident=len(whole) if whole.all() else int(np.argmin(whole)),
        tiers=tuple(tiers),
        expert_stream_share=costs.stream_share,
        disk_bytes=round(costs.at(1, n_ctx_used).from_disk.n_bytes),
        mode=mode,
        n_ubatch=n_ubatch,
        _costs=costs,
        _prompts=prompts,
        corrections=corrections,
    )


def _with_context(layout: Layout, budget: int, fixed_bytes: int, context: Context) -> tuple[int, float]:
    """Adds the KV cache to ``fixed_bytes``. It leaves some VRAM for weights. Its part that does not fit passes through
    the KV window.

    :returns: the sum, and the most bytes of the KV cache in VRAM.
    """
    room = max(budget - fixed_bytes - layout.sizes.weights_beside_kv_bytes, 0)
    if context.used <= room:
        return fixed_bytes + context.used, float("inf")
    # The window has two panes, so that one is filled while the other is in use.
    return fixed_bytes + max(room, context.window), max(room - 2 * context.window, 0)


def _with_cache(prompts: _Prompts, room: int, mode: Mode, n_ubatch: int) -> tuple[Costs, _Prompts]:
    """Chooses the cache of experts.

    :param prompts: prompts with as many resident slabs as fit.
    :param room: VRAM for weights while decoding.
    :returns: the costs of decodes, and of prompts.
    """
    layout, profile, conditions = prompts.layout, prompts.profile, prompts.conditions
    found: list[tuple[float, Costs, _Prompts]] = []
    for wanted_ring in _rings(layout, room, conditions.ring, conditions.routing):
        ring, n_slabs = layout.sizes.fit(room, wanted_ring)
        costs = _costs(layout, profile, n_slabs, replace(conditions, ring=ring))
        those = replace(prompts, n_slabs=n_slabs, _known={})
        experts = costs.shards.masks["experts"]
        seconds = _ANSWER * costs.at(1, conditions.n_ctx_used).seconds(experts & (mode == "planned"))
        seconds += those.costs(n_ubatch).at(n_ubatch, 0).seconds(np.zeros_like(experts))
        if not found or seconds < _WORTH_A_CACHE * found[-1][0]:
            found.append((seconds, costs, those))
    _, costs, prompts = found[-1]
    return costs, prompts


def _costs(layout: Layout, profile: Profile, n_slabs: int, conditions: Conditions) -> Costs:
    host = host_share(layout, profile.device, n_slabs, conditions.host_budget_bytes)
    return Costs(layout, profile, layout.resident_share(n_slabs), conditions, host)


def _rings(layout: Layout, room: int, least: int, routing: Routing | None) -> Iterator[int]:
    """The sizes of the ring to try: the smallest, and larger ones with room for the expert cache. In little VRAM the
    cache takes the place of attention and other weights that every token reads. Their copies run ahead, but an expert
    is known only when it is needed."""
    yield least
    experts = sum(shard.n_bytes for shard in layout.ladder if shard.kind == "experts")
    if routing is not None:
        yield from (least + experts * n // 64 for n in _CACHES if experts * n // 64 <= room - least)


def _plan_tier(costs: Costs, min_tokens: int, n_tokens: int, mode: Mode) -> TierPlan:
    decode = n_tokens <= _DECODING
    n_before, n_seq = (costs.conditions.n_ctx_used, n_tokens) if decode else (0, 1)
    graph = costs.at(n_tokens, n_before, n_seq)
    # These shards go to the CPU if they are evicted before the next plan: in a decode the experts, because a token
    # reads few of them.
    evicted = (
        costs.shards.masks["experts"]
        if decode and mode == "planned"
        else np.zeros(len(costs.layout.ladder), dtype=np.bool_)
    )
    best, on_cpu = float("inf"), evicted
    for choice in _splits(costs) if mode == "planned" else [evicted]:
        lanes_s = graph.lanes_s(choice, best)
        if lanes_s < best:
            best, on_cpu = lanes_s, choice
    if mode == "planned":
        on_cpu = _improved(costs, graph, best, on_cpu)
    share, n_bytes = costs.resident_share, costs.shards.n_bytes
    left_out = share < 1.0
    placements = np.where(np.where(left_out, on_cpu, evicted), CPU, STREAMED)
    on_cpu = on_cpu & graph.from_disk.computable
    streamed, cpu = left_out & ~on_cpu, left_out & on_cpu
    return TierPlan(
        min_tokens=min_tokens,
        n_tokens=n_tokens,
        placements=tuple(placements.tolist()),
        predicted_s=graph.seconds(on_cpu),
        bound_s=costs.bound([(n_tokens, n_before, n_seq)], may_use_cpu=mode == "planned"),
        n_resident=int((~left_out).sum()),
        n_streamed=int(streamed.sum()),
        n_cpu=int(cpu.sum()),
        resident_bytes=round(float((n_bytes * share).sum())),
        streamed_bytes=round(float((n_bytes * (1 - share))[streamed].sum())),
        cpu_bytes=round(float((n_bytes * (1 - share))[cpu].sum())),
    )


def _splits(costs: Costs) -> Iterator[Mask]:
    """The sets of shards on the CPU to compare, from none to all, in the orders of _CPU_ORDERS. No set comes twice."""
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


def _improved(costs: Costs, graph: Graph, best: float, on_cpu: Mask) -> Mask:
    """Improves a split: moves each shard to or from the CPU, in the order of use, and keeps what is quicker. It tries
    each shard alone, and in exchange with the shard before it.

    :param best: the time of the split, as :meth:`Graph.lanes_s` says it.
    """
    before: list[int] = []
    for i in costs.layout.use_order[(costs.resident_share < 1.0)[costs.layout.use_order]]:
        for also in ([], before):
            other = on_cpu.copy()
            other[[i, *also]] = ~other[[i, *also]]
            if not also or other[i] != other[also[0]]:
                lanes_s = graph.lanes_s(other, best)
                if lanes_s < best:
                    best, on_cpu = lanes_s, other
        before = [i]
    return on_cpu


def plan_workload(
    model: Model,
    profile: Profile,
    vram_budget_bytes: int,
    workload: Workload,
    overhead_bytes: int = 0,
    routing: Routing | None = None,
) -> Plan:
    """Makes the plan for a workload from estimates, without loading the model.

    :param overhead_bytes: VRAM of the driver's context.
    :param routing: as for :func:`make_plan`.
    :raises BudgetBelowFloor: the budget is below its floor.
    """
    return make_plan(
        model,
        profile,
        budget_bytes=vram_budget_bytes,
        fixed_bytes=fixed_vram(model, profile.device, overhead_bytes),
        steps=estimate_steps(model, profile.device, workload),
        context=estimate_context(model, profile.device, workload),
        n_ctx_used=workload.n_prompt,
        n_ubatch=workload.n_ubatch,
        routing=routing,
    )
