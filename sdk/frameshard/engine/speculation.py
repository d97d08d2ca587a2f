"""Decides whether drafted tokens are decoded for a model, and predicts the time of verifying them."""

from __future__ import annotations

from frameshard.engine.runtime import Runtime
from frameshard.plan.plans import Plan

# In stream-only mode costs must not depend on measured times, so this one is a constant: the time of one more token in
# the same decode, relative to the first token, while weights are streamed.
_VERIFY_COST = 0.04
_REBUILD_S = 60e-6  # to rebuild the graph, per layer. Measured on 2 slow cores: resident 45e-6, streamed 80e-6


def worthwhile(runtime: Runtime) -> bool:
    """Whether drafted tokens can be decoded and may save time. A mixture of experts in stream-only mode never saves
    time: each drafted token would copy other experts, and the number of drafts must not depend on measured times."""
    return runtime.can_speculate and (runtime.mode == "planned" or not runtime.model_info.n_expert_used)


class StepCosts:
    """Predicted times of decode steps, from the plan in force."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: tuple[Plan | None, dict[tuple[int, int], float]] = (None, {})
        self.last: tuple[int, int] | None = None
        """The sequences of the last decode step and the tokens of each; ``None`` if the last decode was a prefill."""

    def seconds(self, n_seq: int, n_each: int) -> float:
        """The time of a decode of ``n_each`` tokens of each of ``n_seq`` sequences. In stream-only mode it is relative
        to the time with one token of each, so that it is the same at every budget."""
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
        # llama.cpp builds a new graph if the shape differs from that of the last step.
        rebuild_s = _REBUILD_S * self._runtime.model_info.n_layer if shape != self.last else 0.0
        return known[shape] + rebuild_s
