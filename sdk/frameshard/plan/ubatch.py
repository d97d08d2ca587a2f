"""Chooses ``n_ubatch``: the most prompt tokens in one graph.

Larger graphs copy streamed weights less often, but their compute buffers leave less VRAM for weights while they run,
and raise the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from frameshard.errors import BudgetBelowFloor
from frameshard.plan.layout import lay_out
from frameshard.plan.memory import estimate_context, estimate_fixed, estimate_prompt
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.workload import Workload

LEAST_UBATCH = 256
PLAIN_UBATCH = 512
"""The size whose floor a launch takes as the measure."""
_UBATCHES = (LEAST_UBATCH, PLAIN_UBATCH, 1024, 2048, 4096, 8192)
_HIGHER_FLOOR = 1.25  # a launch may raise the floor by this factor, for prompts in about half of the time
_AS_GOOD = 1.01  # times up to this factor of the least time count as equal, because nobody notices the difference


def choose_ubatch(
    model: Model,
    profile: Profile,
    budgets: Sequence[int],
    workload: Workload,
    *,
    n_together: int = 1,
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """Chooses the size with the least time for prompts: the geometric mean over ``budgets``. Of sizes within 1 % of
    the least time it takes the smallest, which evicts the fewest weights.

    :param budgets: VRAM budgets in bytes.
    :param n_together: the number of prompts that are prefilled at the same time.
    :param overhead_bytes: VRAM of the driver's context.
    :param routing: as for :func:`make_plan`.
    :raises BudgetBelowFloor: even the smallest size leaves no room.
    """
    n_prompt = workload.n_prompt
    found: list[tuple[float, int]] = []
    for n_ubatch in _UBATCHES:
        if found and n_ubatch >= 2 * n_prompt * n_together:
            break
        sized = replace(workload, n_ubatch=n_ubatch)
        try:
            plans = [plan_workload(model, profile, b, sized, overhead_bytes, routing) for b in budgets]
        except BudgetBelowFloor:
            if not found:
                raise
            break
        seconds = [plan.predicted_ttft(n_prompt, n_together) for plan in plans]
        found.append((float(np.log(seconds).mean()), n_ubatch))
    as_good = min(found)[0] + np.log(_AS_GOOD)
    return min(n_ubatch for log_seconds, n_ubatch in found if log_seconds <= as_good)


def choose_launch_ubatch(
    model: Model, device: str, workload: Workload, vram_budget_bytes: int, *, overhead_bytes: int = 0
) -> int:
    """Chooses the size at launch: the largest one with which the floor is at most a quarter higher than with
    :data:`PLAIN_UBATCH`. The budget at launch does not matter, because the host may reduce it later; but the floor lies
    within it if that of :data:`PLAIN_UBATCH` does.

    :param device: the name of the inner device.
    :param vram_budget_bytes: the budget at launch; 0 for no limit.
    :param overhead_bytes: VRAM of the driver's context and of adapters.
    """

    def floor(n_ubatch: int) -> int:
        return beside + estimate_fixed(model, device, replace(workload, n_ubatch=n_ubatch), overhead_bytes)

    beside = estimate_context(model, device, workload).window + lay_out(model, device).least_bytes
    highest = _HIGHER_FLOOR * floor(PLAIN_UBATCH)
    if vram_budget_bytes:
        highest = min(highest, vram_budget_bytes)
    sizes = (n_ubatch for n_ubatch in _UBATCHES if PLAIN_UBATCH < n_ubatch <= workload.n_ctx)
    return max((n_ubatch for n_ubatch in sizes if floor(n_ubatch) <= highest), default=PLAIN_UBATCH)


def plan_workload(
    model: Model,
    profile: Profile,
    vram_budget_bytes: int,
    workload: Workload,
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> Plan:
    """Makes the plan for a workload from estimates, without loading the model. Arguments and errors are those of
    :func:`choose_ubatch`."""
    return make_plan(
        model,
        profile,
        budget_bytes=vram_budget_bytes,
        fixed_bytes=estimate_fixed(model, profile.device, workload, overhead_bytes),
        prompt_bytes=estimate_prompt(model, profile.device, workload),
        context=estimate_context(model, profile.device, workload),
        n_ctx_used=workload.n_prompt,
        n_ubatch=workload.n_ubatch,
        routing=routing,
    )
