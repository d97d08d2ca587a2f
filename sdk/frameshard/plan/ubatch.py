"""Chooses ``n_ubatch``: the most prompt tokens in one graph.

Larger graphs copy streamed weights less often, but their compute buffers leave less VRAM for weights while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from frameshard.errors import BudgetBelowFloor
from frameshard.plan.memory import estimate_context, estimate_fixed, estimate_prompt
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.workload import Workload

LEAST_UBATCH = 256
PLAIN_UBATCH = 512
"""The size if there is no budget."""
_UBATCHES = (LEAST_UBATCH, PLAIN_UBATCH, 1024, 2048, 4096, 8192)
_LONG_PROMPT = 8192
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
    model: Model,
    profile: Profile,
    vram_budget_bytes: int,
    workload: Workload,
    *,
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """Chooses the size at launch, for prompts that fill a conversation (at most 8192 tokens).

    Larger compute buffers raise the floor, and the host may reduce the budget later. So the size is chosen for the
    budget and for half of it, and its floor is at most half of the budget. If :data:`PLAIN_UBATCH` has a higher floor
    than that, this floor is the limit.

    :param vram_budget_bytes: the budget at launch; 0 for no limit, which gives :data:`PLAIN_UBATCH`.
    """
    if not vram_budget_bytes:
        return PLAIN_UBATCH
    workload = replace(workload, n_prompt=min(workload.n_ctx, _LONG_PROMPT), n_ubatch=PLAIN_UBATCH)
    plain = plan_workload(model, profile, 0, workload, overhead_bytes)
    lowest = max(vram_budget_bytes // 2, plain.floor_bytes)
    budgets = [vram_budget_bytes, lowest] if lowest < vram_budget_bytes else [vram_budget_bytes]
    return choose_ubatch(model, profile, budgets, workload, overhead_bytes=overhead_bytes, routing=routing)


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
