"""What the shard device does with each shard: plans, the budget, room for the KV cache, and the experts that are used.

A :class:`Placement` belongs to the thread that decodes, except for what says [any thread].
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from frameshard.engine.llama import KV_PAGE, Llama
from frameshard.engine.nvml import DriverOverhead, Observer
from frameshard.engine.probe import load_or_probe
from frameshard.errors import BudgetBelowFloor, OutOfMemory
from frameshard.native import CPU, EMULATED, ShardDevice
from frameshard.plan import routing
from frameshard.plan.ladder import make_ladder
from frameshard.plan.layout import lay_out
from frameshard.plan.memory import DRIVER_BYTES, Context, estimate_context
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.ubatch import LEAST_UBATCH, choose_launch_ubatch, choose_ubatch
from frameshard.plan.workload import Workload
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

_ROUTING_CHANGED = 0.08  # share of choices
REPLAN_SHARE = 16
"""A new plan is made when the KV cache has grown or shrunk by more than one in so many bytes of the budget."""
_LEAST_CTX_USED = 512  # tokens of context that decoding is planned for at least


class Placement:
    """Placements of a model's shards on a shard device.

    :param device_name: the device as the options have it.
    :param model: what the file's header says; its weights are loaded into ``device`` afterwards.
    :param observer: NVML's view of this process; ``None`` where there is none.
    """

    def __init__(
        self,
        device: ShardDevice,
        device_name: str,
        model: Model,
        config: EngineConfig,
        n_threads: int,
        observer: Observer | None,
    ) -> None:
        self.device = device
        self.overhead = DriverOverhead(device, observer)
        self.ladder = make_ladder(model)
        self.mode = config.mode
        """"planned" or "stream_only"; a change takes effect with the next :meth:`replan`."""
        self.gpu_busy_s = 0.0
        """How long the host keeps the device busy in each frame; a change takes effect with the next
        :meth:`replan`."""
        self.routing: tuple[float, ...] = ()
        """How the model's routers choose experts, as plans have it; see :meth:`learn`."""
        self.unfilled = False
        """Part of the KV cache was freed: :meth:`fill` finds room for weights."""
        self._device_name, self._model, self._config, self._n_threads = device_name, model, config, n_threads
        self._profile: Profile | None = None
        self._plan: Plan | None = None
        self._lengths: Sequence[int] = ()
        self._expected: list[int] = []  # tokens of each sequence for which the device has room
        self._cut = False
        self._kv_planned = self._ring_planned = 0
        device.set_shards([[tensor.name for tensor in shard.tensors] for shard in self.ladder])

    @property
    def profile(self) -> Profile:
        """[any thread] Rates of the machine; measured at the first use."""
        if self._profile is None:
            self._profile = load_or_probe(
                self.device,
                self._model,
                device_name=self._device_name,
                n_threads=self._n_threads,
                kv_type=self._config.kv_type,
            )
        return self._profile

    @property
    def plan(self) -> Plan:
        """[any thread] The plan in force."""
        assert self._plan is not None
        return self._plan

    @property
    def vram_budget_bytes(self) -> int:
        """[any thread] The budget in force; 0 is no limit."""
        return _limit(self.device.stats().budget_bytes)

    def choose_ubatch(self, budgets: Sequence[int], n_prompt: int) -> int:
        """``n_ubatch`` for prompts of ``n_prompt`` tokens in each sequence at each of ``budgets``; without these, for
        the budget of the configuration and half of it."""
        config = self._config
        try:
            profile = self.profile
            self.overhead.measure()
            # Some of the driver's libraries are loaded with the first graph.
            least = 0 if self.device.inner == EMULATED else DRIVER_BYTES
            overhead_bytes = max(least, self.device.stats().overhead_bytes)
            workload = Workload(config.n_ctx, n_prompt, n_parallel=config.n_parallel, kv_type=config.kv_type)
            estimated: dict[str, Any] = {"overhead_bytes": overhead_bytes, "routing": routing.recall(self._model)}
            if not budgets:
                return choose_launch_ubatch(self._model, profile, config.vram_budget_bytes, workload, **estimated)
            together = config.n_parallel
            return choose_ubatch(self._model, profile, budgets, workload, n_together=together, **estimated)
        except (BudgetBelowFloor, OutOfMemory):  # by an estimate: the device knows the floor and names it
            return LEAST_UBATCH

    def start(self, llama: Llama, lengths: Sequence[int]) -> None:
        """Takes the VRAM that the model cannot do without, and makes the first plan.

        :param lengths: tokens that each sequence holds; changes as the runtime decodes.
        :raises BudgetBelowFloor: the budget is too small for this model and context.
        :raises OutOfMemory: the device refuses the memory.
        """
        self._n_ctx_seq, self._n_ubatch = llama.n_ctx_seq, llama.n_ubatch
        self._lengths, self._expected = lengths, [0] * len(lengths)
        self.overhead.measure()
        try:
            _ = self.profile
        except OutOfMemory:
            self.device.commit()  # a budget without room for the probe is below the floor: this names it
            raise
        self.device.commit()
        kept = routing.load(self._model) if self._model.n_expert else {}
        self.routing = routing.shares(kept.values())
        self.replan()

    def settle(self, *, fill: bool) -> None:
        """Ends the load, after the first graph: counts what the driver's libraries took, and fills the budget with
        weights if ``fill``."""
        # The device recalls the counts of the last run alone: the token of the warm-up says nothing.
        kept = routing.load(self._model) if self._model.n_expert else {}
        for i, shard in enumerate(self.ladder):
            if shard.kind == "experts":
                self.device.set_expert_uses(i, kept.get(shard.name, []))
        self.overhead.measure()
        self.replan()
        while fill and self.fill():
            pass

    # --- plans ----------------------------------------------------------------------------------------------------

    def replan(self) -> None:
        """Makes the plan for the budget in force and gives it to the device. To be called between decodes after the
        budget changed; before that the device keeps within its budget by the old plan.

        :raises BudgetBelowFloor: the floor has risen above the budget.
        """
        while True:
            stats = self.device.stats()
            self._kv_planned = stats.kv_bytes + stats.kv_host_bytes
            n_ctx_used = max(_LEAST_CTX_USED, *self._lengths)
            try:
                self.adopt(self.plan_for(_limit(stats.budget_bytes), n_ctx_used, gpu_busy_s=self.gpu_busy_s))
                return
            except BudgetBelowFloor:
                if self.device.stats().budget_generation == stats.budget_generation:
                    raise

    def adopt(self, plan: Plan) -> None:
        """Gives a plan to the device. Between decodes."""
        self._plan = plan
        tiers = [(tier.min_tokens, tier.placements) for tier in plan.tiers]
        self.device.set_plan(tiers, plan.ring_bytes, plan.expert_stream_share, exact=self.mode == "stream_only")
        self._ring_planned = self.device.stats().ring_bytes

    def plan_for(
        self, vram_budget_bytes: int, n_ctx_used: int, n_parallel: int = 0, *, gpu_busy_s: float = 0.0
    ) -> Plan:
        """[any thread] The plan for a budget when each token sees ``n_ctx_used`` others, and the context is what it is
        now, or that of ``n_parallel`` sequences as long if that is more; changes nothing.

        :raises BudgetBelowFloor: the budget is below the floor.
        """
        stats, model, name, kv_type = self.device.stats(), self._model, self.device.inner, self._config.kv_type
        layout = lay_out(model, name)
        fixed = stats.overhead_bytes + stats.buffers_bytes - stats.kv_bytes + stats.core_bytes + stats.scratch_bytes
        used = stats.kv_bytes + stats.kv_host_bytes
        if n_parallel:
            workload = Workload(self._n_ctx_seq, n_ctx_used, n_parallel=n_parallel, kv_type=kv_type)
            used = max(used, estimate_context(model, name, workload).used)
        context = Context(
            used=used,
            whole=stats.full_bytes - fixed - layout.arena_bytes,
            window=stats.floor_bytes - fixed - layout.least_bytes,
            kv_type=kv_type,
        )
        return make_plan(
            model,
            self.profile,
            budget_bytes=vram_budget_bytes,
            fixed_bytes=fixed,
            context=context,
            mode=self.mode,
            n_ctx_used=n_ctx_used,
            n_ubatch=self._n_ubatch,
            gpu_busy_s=gpu_busy_s,
            routing=self.routing,
            layout=layout,
        )

    def what_if(self, vram_budget_bytes: int, n_prompt: int) -> dict[str, object]:
        """[any thread] Whether a budget fits, where weights would be, and predicted times; changes nothing."""
        row: dict[str, object] = {
            "vram_budget_bytes": vram_budget_bytes,
            "fits": False,
            "ttft_s": None,
            "tokens_per_second": None,
        }
        sizes = {"resident_bytes": 0, "streamed_bytes": 0, "cpu_bytes": 0}
        with contextlib.suppress(BudgetBelowFloor):
            plan = self.plan_for(vram_budget_bytes, min(n_prompt, self._n_ctx_seq), 1)
            row.update(fits=True, ttft_s=plan.predicted_ttft(n_prompt), tokens_per_second=plan.predicted_decode_tps())
            sizes = {name: getattr(plan.tiers[0], name) for name in sizes}
        return {**row, **sizes}

    def by_kind(self) -> dict[str, str]:
        """[any thread] What decoding does with each shard right now: by kind one letter a layer, R resident,
        S streamed, C on the CPU, and a point where a layer has no shard of that kind."""
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
        """Looks at the experts that were chosen of late. If they differ much from what the plan in force was made for,
        keeps them for the next run, and a new plan is due. Between decodes."""
        if not self._model.n_expert:
            return False
        seen = {
            shard.name: self.device.expert_uses(i, self._model.n_expert)
            for i, shard in enumerate(self.ladder)
            if shard.kind == "experts"
        }
        now = routing.shares(seen.values())
        if not now or routing.differ(now, self.routing) < _ROUTING_CHANGED:
            return False
        self.routing = now
        routing.save(self._model, {name: counts for name, counts in seen.items() if counts})
        return True

    # --- room -----------------------------------------------------------------------------------------------------

    def fill(self, max_bytes: int = 2**63) -> int:
        """Copies up to about ``max_bytes`` of weights into free budget.

        :returns: bytes copied; 0 when there is no more to do, or when another process holds memory that the budget
            allows.
        """
        try:
            self.unfilled = False
            filled = self.device.fill(max_bytes)
            self._replan_for_context()
            return filled
        except OutOfMemory as error:
            logger.warning("fewer weights are resident than the budget allows: %s", error)
            return 0

    def expect(self, seq: int, length: int) -> None:
        """Sequence ``seq`` will soon hold ``length`` tokens: takes room for all of them, and plans for the budget that
        is left.

        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        if length <= self._expected[seq]:
            return
        self._expected[seq] = _pages(length)
        self.device.use_kv(seq, self._expected[seq])
        self._replan_for_context()

    def shrink(self, seq: int) -> None:
        """Sequence ``seq`` was cut: gives back the room beyond its length."""
        expected = _pages(self._lengths[seq])
        if expected < self._expected[seq]:
            self._expected[seq] = expected
            self.device.use_kv(seq, expected)
            self.unfilled = self._cut = True

    def after_decode(self) -> None:
        """After each decode: follows the driver. Only now does the device know where the cells of a cut sequence lie,
        and so which can be freed."""
        self.unfilled, self._cut = self.unfilled or self._cut, False
        self.overhead.follow()

    def _replan_for_context(self) -> None:
        """A plan takes tens of milliseconds: it stays while the context changes little."""
        stats = self.device.stats()
        changed = abs(stats.kv_bytes + stats.kv_host_bytes - self._kv_planned)
        # A ring that has shrunk has no room for the experts that it kept.
        shrunk = stats.ring_bytes < self._ring_planned
        if self._plan is not None and (shrunk or changed * REPLAN_SHARE > stats.budget_bytes):
            try:
                self.replan()
            except BudgetBelowFloor as error:  # the driver took more meanwhile: the plan in force still works
                logger.warning("%s", error)


def _pages(length: int) -> int:
    return -(-length // KV_PAGE) * KV_PAGE


def _limit(budget_bytes: int) -> int:
    """The device's "no limit" is a number beyond any memory; everywhere else it is 0."""
    return budget_bytes if budget_bytes < 2**53 else 0
