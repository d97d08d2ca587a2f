"""What a model is planned or measured for."""

from __future__ import annotations

from dataclasses import dataclass

from frameshard.plan.profile import KvType


@dataclass(frozen=True)
class Workload:
    """Sequences of one kind, and the context and graphs for them. Sizes are tokens.

    :param n_ctx: context of each sequence.
    :param n_prompt: of each prompt: what a sequence holds when it decodes.
    :param n_generate: of each answer.
    :param n_parallel: sequences, each with a context of its own.
    :param n_ubatch: most tokens of one graph; 0 is for a plan to choose.
    :param kv_type: type of the KV cache.
    """

    n_ctx: int
    n_prompt: int = 512
    n_generate: int = 16
    n_parallel: int = 1
    n_ubatch: int = 512
    kv_type: KvType = "f16"
