"""The work that a model is planned or measured for."""

from __future__ import annotations

from frameshard.plan.profile import KvType
from frameshard.records import record


@record
class Workload:
    """Several sequences of the same lengths. Lengths are in tokens.

    :param n_ctx: context of each sequence.
    :param n_prompt: length of each prompt, and so of each sequence when decoding starts.
    :param n_generate: length of each answer.
    :param n_parallel: number of sequences.
    :param n_ubatch: the most tokens of one graph; 0 if the plan chooses it.
    :param kv_type: type of the KV cache.
    :param exact: for mode stream-only.
    :param host_budget_bytes: the limit on host memory; 0: none. It limits the steps of prompts.
    """

    n_ctx: int
    n_prompt: int = 512
    n_generate: int = 16
    n_parallel: int = 1
    n_ubatch: int = 512
    kv_type: KvType = "f16"
    exact: bool = False
    host_budget_bytes: int = 0
