"""Whether drafted tokens may be decoded for a model, and what verifying them costs."""

from __future__ import annotations

from frameshard.engine.runtime import Runtime
from frameshard.plan.plans import Plan

# Cost of another token in the same decode relative to the first while weights are streamed; for stream-only mode, where
# it must not depend on times.
_VERIFY_COST = 0.04
_REBUILD_S = 60e-6  # of a layer; measured on 2 slow cores: resident 45e-6, streamed 80e-6


def worthwhile(runtime: Runtime) -> bool:
    """Drafted tokens can be decoded, and it may pay. In stream-only mode the number of drafted tokens must follow from
    the text alone, and each token of a mixture of experts would copy experts of its own."""
    return runtime.can_speculate and (runtime.mode == "planned" or not runtime.model_info.n_expert_used)


class StepCosts:
    """Predicted times of decode steps by the plan in force."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: tuple[Plan | None, dict[tuple[int, int], float]] = (None, {})
        self.last: tuple[int, int] | None = None
        """Sequences and tokens of each in the last decode; ``None`` if that was no decode step."""

    def seconds(self, n_seq: int, n_each: int) -> float:
        """Time of a decode of ``n_each`` tokens of each of ``n_seq`` sequences; in stream-only mode a multiple of the
        time of one token each, which is the same at any budget."""
        placement = self._runtime.placement
        assert placement is not None
        plan, known = self._known
        if plan is not placement.plan:
            plan, known = self._known = placement.plan, {}
        shape = n_seq, n_each
        if plan.mode == "stream_only":
            return 1.0 + _VERIFY_COST * (n_each - 1)
        if shape not in known:
            known[shape] = plan.predicted_decode_s(n_seq, n_each)
        # llama.cpp builds a new graph for a step of another shape.
        rebuild_s = _REBUILD_S * self._runtime.model_info.n_layer if shape != self.last else 0.0
        return known[shape] + rebuild_s
