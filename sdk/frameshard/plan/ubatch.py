"""The choice of ``n_ubatch``: how many tokens of prompts one graph computes.

Larger graphs read streamed weights less often, and their compute buffers leave less VRAM for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from frameshard.errors import BudgetBelowFloor
from frameshard.plan.memory import estimate_context, estimate_fixed
from frameshard.plan.model import Model
from frameshard.plan.plans import Plan, make_plan
from frameshard.plan.profile import Profile
from frameshard.plan.workload import Workload

LEAST_UBATCH = 256
PLAIN_UBATCH = 512
"""The size where no budget is known."""
_UBATCHES = (LEAST_UBATCH, PLAIN_UBATCH, 1024, 2048, 4096, 8192)
_LONG_PROMPT = 8192
_ANSWER = 16  # tokens of the first sentence, which a player waits for
_AS_GOOD = 1.01  # of the least time: nobody notices the difference


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
    """The size with which prompts and the first 16 tokens of their answers take the least time, in the geometric mean
    over ``budgets``. Of sizes within 1 % of that it is the one with which prompts take the least.

    :param budgets: VRAM budgets in bytes.
    :param n_together: prompts that are read at once.
    :param overhead_bytes: VRAM of the driver's context.
    :param routing: as for :func:`make_plan`.
    :raises BudgetBelowFloor: even the smallest size leaves no room.
    """
    n_prompt = workload.n_prompt
    found: list[tuple[float, float, int]] = []
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
        prompts = np.array([plan.predicted_ttft(n_prompt, n_together) for plan in plans])
        answers = _ANSWER * np.array([plan.predicted_decode_s(n_together) for plan in plans])
        found.append((float(np.log(prompts + answers).mean()), float(np.log(prompts).mean()), n_ubatch))
    as_good = min(found)[0] + np.log(_AS_GOOD)
    return min((prompts_s, n_ubatch) for both_s, prompts_s, n_ubatch in found if both_s <= as_good)[1]


def choose_launch_ubatch(
    model: Model,
    profile: Profile,
    vram_budget_bytes: int,
    workload: Workload,
    *,
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """The same for a sidecar that is launched with a budget, and prompts that fill a conversation (8192 tokens at
    most). Larger buffers raise the floor, and the budget will shrink: so this is chosen for half of the budget too, and
    the floor stays at or below that, or is that of :data:`PLAIN_UBATCH`. Without a budget (0) it is that size."""
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
    """The plan for a workload by estimates alone, without loading the model. Arguments and errors as for
    :func:`choose_ubatch`."""
    return make_plan(
        model,
        profile,
        budget_bytes=vram_budget_bytes,
        fixed_bytes=estimate_fixed(model, profile.device, workload, overhead_bytes),
        context=estimate_context(model, profile.device, workload),
        n_ctx_used=workload.n_prompt,
        n_ubatch=workload.n_ubatch,
        routing=routing,
    )
