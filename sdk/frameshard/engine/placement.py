"""Drives the shard device of a loaded model: plans, the budget, room for the KV cache, and counts of chosen experts.

Only the thread that decodes may use a :class:`Placement`, except for methods marked [any thread].
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from frameshard.engine.llama import KV_PAGE, Llama
from frameshard.engine.observer import Observer
from frameshard.engine.overhead import DriverOverhead
from frameshard.engine.rates import Rates
from frameshard.errors import BudgetBelowFloor, OutOfMemory, below_floor
from frameshard.native import CPU, ShardDevice, Stats
from frameshard.plan import routing
from frameshard.plan.corrections import Corrections
from frameshard.plan.host import host_floor
from frameshard.plan.ladder import make_ladder
from frameshard.plan.layout import Layout, lay_out
from frameshard.plan.memory import Context, estimate_context, mask_bytes
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.steps import LEAST_STEP, Steps
from frameshard.plan.workload import Workload
from frameshard.wire import messages as m
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

OnLoading = Callable[[m.LoadingStage, int, int], None]
"""Is called with a stage of the load, and what of it is done: the fields of :class:`frameshard.wire.engine.Loading`."""

_ROUTING_CHANGED = 0.08  # share of the routers' choices that must differ before a new plan is made
_REPLAN_SHARE = 1 / 16
"""A new plan is made when the size of the KV cache has changed by more than this part of what decodes stream and
compute on the CPU, or of the budget if that is less. Until then what the cache displaces is streamed."""
_LEAST_REPLAN_SHARE = 1 / 64
"""A change by less than this part of the budget needs no new plan: after each one the driver records the launches of a
decode again, which takes some 10 ms."""
_PROMPT_SHARE = 1 / 4
"""Before a prompt is read, a new plan is made only if the KV cache has changed by more than this part of the budget:
making a plan takes a tenth of a second, and the answer would wait for it. A smaller change gets its plan from
:meth:`Placement.fill`, after the prompt."""
_PLANS_KEPT = 16  # prompts that come and go need the same few plans again
_FILL_STEPS = 20  # reports of progress while a load fills VRAM
_LEAST_CTX_USED = 512  # plans assume at least so many tokens of context


class Placement:
    """Placements of a model's shards on a shard device. Make it before the weights are loaded into ``device``.

    :param rates: what plans are made with.
    :param model: the header of the model file.
    :param observer: what the driver counts for this process; ``None`` on the emulated device.
    :param on_loading: called with the progress of :meth:`settle`.
    """

    def __init__(
        self,
        device: ShardDevice,
        rates: Rates,
        model: Model,
        config: EngineConfig,
        observer: Observer | None,
        on_loading: OnLoading,
    ) -> None:
        self.device, self.rates = device, rates
        self.overhead = DriverOverhead(device, observer)
        self.ladder = make_ladder(model)
        self.mode = config.mode
        """"planned" or "stream_only"; a change takes effect with the next :meth:`replan`."""
        self.gpu_busy_s = 0.0
        """Seconds of each frame in which the host keeps the device busy; a change takes effect with the next
        :meth:`replan`."""
        self.routing: routing.Routing | None = None
        """How often the routers choose each expert; :meth:`learn` updates it."""
        self.unfilled = False
        """Part of the KV cache was freed, so :meth:`fill` can make more weights resident."""
        self.on_outdated: Callable[[], None] = self.replan_if_fits
        """Is called when the KV cache has changed so much that a new plan is better. At first it makes the plan, which
        takes a tenth of a second."""
        self.n_adopted = 0
        """The number of plans that were given to the device."""
        self._model, self._config, self._on_loading = model, config, on_loading
        self._plan: Plan | None = None
        self._plans: dict[object, tuple[Profile, Plan]] = {}  # by all else that they depend on, the latest last
        self._lengths: Sequence[int] = ()
        self._expected: list[int] = []  # for each sequence, the number of tokens that the device has room for
        self._cut = False
        self._steps = Steps()
        self._refused_step = 0  # the most tokens of a step that fits, if one of the plan's size did not
        self._kv_planned = self._ring_planned = 0
        device.set_shards([[tensor.name for tensor in shard.tensors] for shard in self.ladder])

    @property
    def plan(self) -> Plan:
        """[any thread] The plan in force."""
        assert self._plan is not None
        return self._plan

    @property
    def vram_budget_bytes(self) -> int:
        """[any thread] The budget in force, in bytes; 0 for no limit."""
        return _limit(self.device.stats().budget_bytes)

    @property
    def planned(self) -> bool:
        """Whether a plan is in force; false during the load."""
        return self._plan is not None

    @property
    def step_at_floor(self) -> int:
        """The most tokens of a step at the floor. In the layout for the largest step it takes more than in its own."""
        return self._steps.within(self._steps.floor_bytes)[-1]

    @property
    def step(self) -> int:
        """The most tokens of one step of a prompt at the budget in force."""
        return min(self.plan.n_ubatch, self._refused_step or self.plan.n_ubatch)

    @property
    def refused_bytes(self) -> int:
        """The smallest budget for the last graph, if the budget in force had no room for it; otherwise 0. A
        budget has no room for any graph if the floor has risen above it, because the driver has taken more VRAM."""
        stats = self.device.stats()
        if stats.refused_graph_bytes:
            return stats.floor_bytes + stats.refused_graph_bytes - stats.floor_graph_bytes
        return stats.floor_bytes if stats.floor_bytes > stats.budget_bytes else 0

    @property
    def left_bytes(self) -> int | None:
        """The VRAM that other programs leave, if that is less than the budget allows; otherwise ``None``."""
        free, _ = self.device.memory()
        stats = self.device.stats()
        left = stats.used_bytes + free
        return left if left < min(stats.budget_bytes, stats.full_bytes) else None

    def refuse_step(self, n_tokens: int) -> bool:
        """Makes steps smaller, after the device had no room for a graph.

        :param n_tokens: the tokens of that graph.
        :returns: whether a smaller one may fit; false if there is another reason.
        """
        stats = self.device.stats()
        if not stats.refused_graph_bytes or n_tokens <= LEAST_STEP:
            return False
        room = max(stats.budget_bytes - stats.floor_bytes + stats.floor_graph_bytes, 0)
        fits = int(n_tokens * min(room / stats.refused_graph_bytes, 0.9)) // LEAST_STEP * LEAST_STEP
        self._refused_step = max(fits, LEAST_STEP)
        logger.info("a step of %d tokens has no room in the budget: %d from now on", n_tokens, self._refused_step)
        return True

    def start(
        self, llama: Llama, lengths: Sequence[int], sizes: Sequence[int], graph_bytes: Callable[[int], int]
    ) -> None:
        """Takes the VRAM that the model needs at any budget, and makes the first plan.

        :param lengths: the number of tokens in each sequence. The runtime updates this list as it decodes.
        :param sizes: the steps to choose from, ascending.
        :param graph_bytes: returns the bytes of the compute buffer of a step; 0: of the largest decode.
        :raises BudgetBelowFloor: the budget is too small for this model and context.
        :raises OutOfMemory: the device refuses the memory.
        """
        self._n_ctx_seq, self._sliding_cells = llama.n_ctx_seq, llama.sliding_cells
        self._lengths, self._expected = lengths, [0] * len(lengths)
        self.overhead.measure()
        try:
            _ = self.rates.profile
        except OutOfMemory:
            self._commit()  # without room for the probe the budget is below the floor: this raises with the floor
            raise
        self._commit()
        self._measure_steps(sizes, graph_bytes)
        kept = routing.load(self._model) if self._model.n_expert else {}
        self.routing = routing.of_counts(kept.values(), self._model.n_expert_used)
        self.replan()

    def _measure_steps(self, sizes: Sequence[int], graph_bytes: Callable[[int], int]) -> None:
        """Measures the compute buffers of steps, by graphs that do not run. They are at the start of a context; in a
        full one the masks are larger. The buffer of the largest step is known: the context was made for that step.

        :raises BudgetBelowFloor: the floor must be raised for decodes, and the budget is below it.
        """
        stats, share = self.device.stats(), lay_out(self._model, self.device.inner).sizes.pool_share
        floor_bytes, most_bytes = stats.floor_graph_bytes, stats.most_graph_bytes
        if floor_bytes == most_bytes:
            self._steps = Steps(0, most_bytes, ((sizes[-1], most_bytes),))
            return

        def whole(n_tokens: int) -> int:
            measured = graph_bytes(n_tokens)
            n_tokens = n_tokens or self._config.n_parallel
            masks = [
                mask_bytes(self._model, n_tokens, n_cells, self._sliding_cells)
                for n_cells in (n_tokens, max(self._n_ctx_seq, n_tokens))
            ]
            return min(measured + masks[1] - masks[0], most_bytes)

        decode_bytes = whole(0)
        if decode_bytes > floor_bytes:
            self.device.set_floor_graphs(decode_bytes)
            floor_bytes = self.device.stats().floor_graph_bytes
            self.require_floor()
        graphs = [*((n_tokens, whole(n_tokens)) for n_tokens in sizes[:-1]), (sizes[-1], most_bytes)]
        steps = tuple((n, size + int(share * max(size - floor_bytes, 0))) for n, size in graphs)
        self._steps = Steps(0, floor_bytes, steps, self._n_ctx_seq)

    def require_floor(self) -> None:
        """Graphs may raise the floor: from one the device learns which keys and values must stay in VRAM.

        :raises BudgetBelowFloor: the floor is above the budget now.
        """
        stats = self.device.stats()
        if stats.budget_bytes < stats.floor_bytes:
            raise below_floor(stats.budget_bytes, stats.floor_bytes)

    def _commit(self) -> None:
        try:
            self.device.commit()
        except BudgetBelowFloor:
            stats = self.device.stats()
            if not 0 < stats.host_budget_bytes < stats.host_floor_bytes:
                raise
            self.device.set_host_budget(0)  # who limits all of the sidecar refuses it, with what the processes need
            self.device.commit()

    def settle(self, *, fill: bool) -> None:
        """Ends the load, after the first graph: measures the VRAM of the driver's libraries, and makes weights resident
        if ``fill``."""
        # The counts come from earlier runs only, because the warm-up has decoded a meaningless token.
        kept = routing.load(self._model) if self._model.n_expert else {}
        for i, shard in enumerate(self.ladder):
            if shard.kind == "experts":
                self.device.set_expert_uses(i, kept.get(shard.name, []))
        self.overhead.measure(ends_load=True)
        self.replan()
        if fill:
            self._fill_all()

    def _fill_all(self) -> None:
        """Makes as many weights resident as the budget allows."""
        total = self.plan.tiers[0].resident_bytes
        n_filled, total_mib = 0, -(-total >> 20)
        self._on_loading("fill", 0, total_mib)
        while filled := self.fill(max(total // _FILL_STEPS, 1 << 20)):
            n_filled += filled
            self._on_loading("fill", min(n_filled, total) >> 20, total_mib)
        self._on_loading("fill", total_mib, total_mib)

    # --- plans ----------------------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Makes the plan for the budget in force and gives it to the device. Call it between decodes, after the budget
        has changed. Until then the device keeps within the new budget with the old plan.

        :raises BudgetBelowFloor: the floor has risen above the budget.
        """
        self.begin_plan()
        self.adopt(self.next_plan())

    def replan_if_fits(self) -> None:
        """As :meth:`replan`. If the floor has risen above the budget, it only warns: the plan in force still works."""
        try:
            self.replan()
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    def begin_plan(self) -> None:
        """Notes the KV cache and the ring that the next plan is made for. Call it before :meth:`next_plan`."""
        stats = self.device.stats()
        self._kv_planned, self._ring_planned = stats.kv_bytes + stats.kv_host_bytes, stats.ring_bytes

    def next_plan(self) -> Plan:
        """[any thread] Makes the plan for the budget in force; changes nothing.

        :raises BudgetBelowFloor: the floor has risen above the budget.
        """
        while True:
            stats = self.device.stats()
            n_ctx_used = _pages(max(_LEAST_CTX_USED, *self._lengths))
            try:
                return self.plan_for(_limit(stats.budget_bytes), n_ctx_used, gpu_busy_s=self.gpu_busy_s)
            except BudgetBelowFloor:
                if self.device.stats().budget_generation == stats.budget_generation:
                    raise

    def adopt(self, plan: Plan) -> None:
        """Gives a plan to the device. Call it between decodes."""
        self._plan, self._refused_step = plan, 0
        self.n_adopted += 1
        tiers = [(tier.min_tokens, tier.placements) for tier in plan.tiers]
        self.device.set_plan(tiers, plan.ring_bytes, plan.expert_stream_share, exact=self.mode == "stream_only")
        self._ring_planned = self.device.stats().ring_bytes

    def plan_for(
        self, vram_budget_bytes: int, n_ctx_used: int, n_parallel: int = 0, *, gpu_busy_s: float = 0.0
    ) -> Plan:
        """[any thread] Makes the plan for a budget; changes nothing.

        :param n_ctx_used: tokens of context that each decoded token attends to.
        :param n_parallel: if not 0, the KV cache is at least that of so many sequences of ``n_ctx_used`` tokens.
        :param gpu_busy_s: seconds of each frame in which the host keeps the device busy.
        :raises BudgetBelowFloor: the budget is below the floor.
        """
        stats, model, name, kv_type = self.device.stats(), self._model, self.device.inner, self._config.kv_type
        layout = lay_out(model, name)
        buffers = stats.buffers_bytes - stats.kv_bytes - stats.graph_bytes
        # Not the scratch of the figures: while the machine is measured, that includes what the measurement holds.
        fixed = stats.overhead_bytes - stats.pool_bytes + buffers + stats.core_bytes + layout.sizes.scratch_bytes
        steps = replace(self._steps, least_bytes=stats.least_graph_bytes)
        used = stats.kv_bytes + stats.kv_host_bytes
        if n_parallel:
            workload = Workload(
                self._n_ctx_seq,
                n_ctx_used,
                n_ubatch=self._config.n_ubatch,
                n_parallel=n_parallel,
                kv_type=kv_type,
                exact=self.mode == "stream_only",
            )
            used = max(used, estimate_context(model, name, workload).used)
        context = Context(
            used=used,
            whole=stats.full_bytes - fixed - steps.most_bytes - layout.arena_bytes,
            window=stats.floor_bytes - fixed - stats.floor_graph_bytes - layout.least_bytes,
            kv_type=kv_type,
            sliding_cells=self._sliding_cells,
        )
        host_bytes = self._host_bytes(stats, layout)
        profile = self.rates.profile
        given: dict[str, Any] = {
            "budget_bytes": vram_budget_bytes,
            "fixed_bytes": fixed,
            "host_budget_bytes": host_bytes,
            "steps": replace(steps, floor_bytes=stats.floor_graph_bytes),
            "context": context,
            "mode": self.mode,
            "n_ctx_used": n_ctx_used,
            "n_ubatch": 0,
            "gpu_busy_s": gpu_busy_s,
            "routing": self.routing,
        }
        serving = Corrections(cpu_factor=self.rates.corrections.cpu_factor)
        key = (*given.values(), serving.cpu_factor)
        known = self._plans.get(key)
        if known is None or known[0] is not profile:
            known = self._plans[key] = profile, make_plan(model, profile, layout=layout, corrections=serving, **given)
            for oldest in list(self._plans)[:-_PLANS_KEPT]:
                self._plans.pop(oldest, None)  # another thread may have removed it
        return known[1]

    def _host_bytes(self, stats: Stats, layout: Layout) -> int:
        """Host memory for weights, for a plan; 0 for no limit, and while the disk's rates are not known."""
        if not stats.host_budget_bytes or not self.rates.profile.disk:
            return 0
        beside = stats.host_used_bytes - stats.host_weights_bytes
        return max(stats.host_budget_bytes - beside, host_floor(layout, self.device.inner))

    def what_if(self, vram_budget_bytes: int, n_prompt: int) -> dict[str, object]:
        """[any thread] Whether a budget fits, the bytes of each placement and the predicted times; changes nothing."""
        row: dict[str, object] = {
            "vram_budget_bytes": vram_budget_bytes,
            "fits": False,
            "ttft_s": None,
            "tokens_per_second": None,
        }
        sizes = {"resident_bytes": 0, "streamed_bytes": 0, "cpu_bytes": 0}
        with contextlib.suppress(BudgetBelowFloor):
            plan = self.corrected(self.plan_for(vram_budget_bytes, min(n_prompt, self._n_ctx_seq), 1))
            row.update(fits=True, ttft_s=plan.predicted_ttft(n_prompt), tokens_per_second=plan.predicted_decode_tps())
            sizes = {name: getattr(plan.tiers[0], name) for name in sizes}
        return {**row, **sizes}

    def corrected(self, plan: Plan) -> Plan:
        """[any thread] The plan with predictions that count in what serving has shown."""
        return replace(plan, corrections=self.rates.corrections)

    def by_kind(self) -> dict[str, str]:
        """[any thread] The placement of each shard while decoding: for each kind a string with one letter per layer,
        R resident, S streamed, C on the CPU, and a point if the layer has no shard of that kind."""
        resident, others = self.device.stats().resident_shards, self.plan.tiers[0].placements
        letters = {
            (shard.kind, shard.layer or 0): "R" if i < resident else "C" if others[i] == CPU else "S"
            for i, shard in enumerate(self.ladder)
        }
        lengths: dict[str, int] = {}
        for kind, layer in letters:
            lengths[kind] = max(lengths.get(kind, 0), layer + 1)
        return {kind: "".join(letters.get((kind, i), ".") for i in range(n)) for kind, n in lengths.items()}

    def learn(self) -> bool:
        """Compares what serving has shown with what the plan in force was made for. Call it between decodes.

        :returns: whether a new plan is needed.
        """
        routed = self._learn_routing()
        return routed or self.rates.corrections.cpu_factor != self.plan.cpu_factor

    def _learn_routing(self) -> bool:
        """Compares the experts that the routers chose recently with those that the plan in force was made for. If they
        differ much, saves the counts for the next run.

        :returns: whether they do.
        """
        if not self._model.n_expert:
            return False
        seen = {
            shard.name: self.device.expert_uses(i, self._model.n_expert)
            for i, shard in enumerate(self.ladder)
            if shard.kind == "experts"
        }
        now = routing.of_counts(seen.values(), self._model.n_expert_used)
        if now is None or routing.differ(now, self.routing) < _ROUTING_CHANGED:
            return False
        self.routing = now
        routing.save(self._model, {name: counts for name, counts in seen.items() if counts})
        return True

    # --- room -----------------------------------------------------------------------------------------------------

    def fill(self, max_bytes: int = 2**63) -> int:
        """Makes up to about ``max_bytes`` more of the weights resident.

        :returns: bytes copied; 0 if no more fit in the budget, or if other processes have taken the VRAM.
        """
        try:
            self.unfilled = False
            filled = self.device.fill(max_bytes)
            self._replan_for_context()
            return filled
        except OutOfMemory as error:
            logger.warning("fewer weights are resident than the budget allows: %s", error)
            return 0

    def expect(self, seq: int, length: int, *, prompt: bool = False) -> None:
        """Takes room for ``length`` tokens in sequence ``seq``, and makes a new plan if much less budget is left.

        :param prompt: a prompt is read next, not one token.
        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        if length <= self._expected[seq]:
            return
        self._expected[seq] = _pages(length)
        self.device.use_kv(seq, self._expected[seq])
        self._replan_for_context(prompt=prompt)

    def shrink(self, seq: int) -> None:
        """Frees the room beyond the length of sequence ``seq``, after it was cut."""
        expected = _pages(self._lengths[seq])
        if expected < self._expected[seq]:
            self._expected[seq] = expected
            self.device.use_kv(seq, expected)
            self.unfilled = self._cut = True

    def after_decode(self) -> None:
        """Counts what the driver has taken. Call it after each decode. After a cut it sets :attr:`unfilled` again,
        because the device learns only with the next decode which cells it can free."""
        self.unfilled, self._cut = self.unfilled or self._cut, False
        self.overhead.follow()

    def _tolerated(self, budget_bytes: int, *, prompt: bool) -> float:
        """By how many bytes the KV cache may change before a new plan is made."""
        if prompt:
            return _PROMPT_SHARE * budget_bytes
        decode = self.plan.tiers[0]
        left_out = min(decode.streamed_bytes + decode.cpu_bytes, budget_bytes)
        return max(_REPLAN_SHARE * left_out, _LEAST_REPLAN_SHARE * budget_bytes)

    def _replan_for_context(self, *, prompt: bool = False) -> None:
        """Asks for a new plan if the KV cache has changed much. Small changes keep the old one.

        :param prompt: a prompt waits for it, so it is made at once.
        """
        stats = self.device.stats()
        changed = abs(stats.kv_bytes + stats.kv_host_bytes - self._kv_planned)
        # A ring that has shrunk keeps fewer experts than the plan counts on.
        shrunk = not prompt and stats.ring_bytes < self._ring_planned
        if self._plan is not None and (shrunk or changed > self._tolerated(stats.budget_bytes, prompt=prompt)):
            self.begin_plan()
            if prompt:
                self.replan_if_fits()
            else:
                self.on_outdated()


def _pages(length: int) -> int:
    return -(-length // KV_PAGE) * KV_PAGE


def _limit(budget_bytes: int) -> int:
    """The budget with 0 for no limit. The device's own value for no limit is a number larger than any memory."""
    return budget_bytes if budget_bytes < 2**53 else 0
