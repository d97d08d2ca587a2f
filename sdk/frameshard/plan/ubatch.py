"""The choice of ``n_ubatch``: how many tokens of prompts one graph computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from frameshard.errors import BudgetBelowFloor
from frameshard.plan.context import estimate_context, estimate_fixed
from frameshard.plan.model import Model
from frameshard.plan.plans import make_plan
from frameshard.plan.profile import KvType, Profile

LEAST_UBATCH = 256
PLAIN_UBATCH = 512
"""Prompt tokens computed at once where nothing is known of budgets."""
_UBATCHES = (LEAST_UBATCH, PLAIN_UBATCH, 1024, 2048, 4096, 8192)
_LONG_PROMPT = 8192
_ANSWER = 16  # tokens of the first sentence, which a player waits for
_AS_GOOD = 1.01  # times the least: what nobody would notice


def choose_ubatch(
    model: Model,
    profile: Profile,
    budgets: Sequence[int],
    *,
    n_ctx: int,
    n_prompt: int,
    n_seq: int = 1,
    n_together: int = 1,
    kv_type: KvType = "f16",
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """Prompt tokens to compute at once. More of them read weights that are streamed less often, and their buffers
    displace weights: the size with which ``n_together`` prompts of ``n_prompt`` tokens each and the first 16 tokens of
    their answers take least, in the geometric mean over ``budgets``, with ``n_seq`` contexts of ``n_ctx`` tokens. Of
    sizes within 1 % of that it is the one with which prompts take least. ``routing`` as for :func:`make_plan`.
    Raises :class:`BudgetBelowFloor` if even the smallest leaves no room."""
    found: list[tuple[float, float, int]] = []
    for n_ubatch in _UBATCHES:
        if found and n_ubatch >= 2 * n_prompt * n_together:
            break
        fixed = estimate_fixed(
            model, profile.device, n_ctx, n_ubatch, n_seq, kv_type=kv_type, overhead_bytes=overhead_bytes
        )
        context = estimate_context(model, profile.device, n_ctx, n_prompt, n_seq, kv_type=kv_type)
        try:
            plans = [
                make_plan(
                    model,
                    profile,
                    budget_bytes=b,
                    fixed_bytes=fixed,
                    context=context,
                    n_ctx_used=n_prompt,
                    n_ubatch=n_ubatch,
                    routing=routing,
                )
                for b in budgets
            ]
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
    budget_bytes: int,
    *,
    n_ctx: int,
    n_seq: int,
    kv_type: KvType = "f16",
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """The same for a sidecar that is launched with a budget, and prompts that fill a conversation (8192 tokens at
    most). Larger buffers are a higher floor, and the budget will shrink: so this is chosen for half of the budget too,
    and the floor stays at or below that, or is that of :data:`PLAIN_UBATCH`. Without a budget (0) it is that size."""
    if not budget_bytes:
        return PLAIN_UBATCH
    n_prompt = min(n_ctx, _LONG_PROMPT)
    fixed = estimate_fixed(
        model, profile.device, n_ctx, PLAIN_UBATCH, n_seq, kv_type=kv_type, overhead_bytes=overhead_bytes
    )
    context = estimate_context(model, profile.device, n_ctx, n_prompt, n_seq, kv_type=kv_type)
    plain = make_plan(model, profile, budget_bytes=0, fixed_bytes=fixed, context=context, n_ubatch=PLAIN_UBATCH)
    lowest = max(budget_bytes // 2, plain.floor_bytes)
    return choose_ubatch(
        model,
        profile,
        [budget_bytes, lowest] if lowest < budget_bytes else [budget_bytes],
        n_ctx=n_ctx,
        n_prompt=n_prompt,
        n_seq=n_seq,
        kv_type=kv_type,
        overhead_bytes=overhead_bytes,
        routing=routing,
    )
