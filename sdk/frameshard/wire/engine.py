"""Messages between the broker and its engine process: one frozen dataclass for each, checked in both directions.

The annotation of a field is its check (:mod:`frameshard.wire.checks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from frameshard.errors import BadArgument
from frameshard.wire import checks
from frameshard.wire import messages as m
from frameshard.wire.checks import Count

KvType = Literal["f16", "q8_0", "q4_0"]
Speculate = Literal["auto", "off"]

Path = Annotated[str, checks.text(4096)]
"""Of a file; "" is none."""


@dataclass(frozen=True)
class EngineConfig:
    """What the engine loads and how.

    :param model: path of a GGUF file.
    :param device: ``cpu`` (stock llama.cpp), ``emulated``, ``emulated:25`` (copies 25e9 bytes/s at most), a ggml device
        such as ``CUDA0``, ``stock:CUDA0`` for that device without the shard device, or ``auto`` (the first GPU,
        else the CPU).
    :param vram_budget_bytes: hard limit on all VRAM; 0 is no limit.
    :param n_ctx: tokens of context of each sequence, rounded up to a multiple of 256.
    :param n_ubatch: tokens of a prompt that are computed at once; 0 lets a plan choose at load.
    :param n_parallel: sequences, each with a context of its own.
    :param n_threads: 0 is half of the CPUs.
    :param mode: ``stream_only`` computes nothing on the CPU, so that logits have the same bits at every budget.
    :param speculate: ``off`` switches speculative decoding off.
    :param n_outputs_max: rows of logits that one decode may ask for; 0 is as many as the other options need.
    :param mmproj: path of the GGUF file of the vision tower; "" is none.
    :param draft_model: path of a GGUF file whose model drafts tokens; "" is none.
    :param kv_type: number format of the KV cache.
    :raises BadArgument: a value is of the wrong type or out of range; detail has ``field``.
    """

    model: Annotated[str, checks.text(4096, least=1)]
    device: Annotated[str, checks.text(256, least=1)] = "cpu"
    vram_budget_bytes: Count = 0
    n_ctx: Annotated[int, checks.integer(1, 2**24)] = 4096
    n_ubatch: Annotated[int, checks.integer(0, 2**16)] = 512
    n_parallel: Annotated[int, checks.integer(1, 64)] = 4
    n_threads: Annotated[int, checks.integer(0, 1024)] = 0
    mode: m.Mode = "planned"
    speculate: Speculate = "auto"
    n_outputs_max: Annotated[int, checks.integer(0, 2**16)] = 0
    mmproj: Path = ""
    draft_model: Path = ""
    kv_type: KvType = "f16"

    def __post_init__(self) -> None:
        checks.verify(self)
        if 0 < self.n_ubatch < self.n_parallel:
            raise BadArgument("n_ubatch must be at least n_parallel", field="n_parallel")
