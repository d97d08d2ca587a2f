"""Runs stock llama.cpp's own benchmark for comparison, with as much of the model on the GPU as fits in a budget.

The whole budget is for weights. Context and buffers are not counted, so llama.cpp may use more VRAM than the budget.
Dense models run with the largest possible ``-ngl``. Mixtures of experts run with ``-ngl 999`` and the experts of as few
layers as possible on the CPU (``-ncmoe``): that is faster than ``-ngl`` at every budget in which it fits.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frameshard.engine.llama import ALL_LAYERS
from frameshard.errors import FrameshardError
from frameshard.plan.model import Model
from frameshard.plan.workload import Workload

from .vram import Sampler

if TYPE_CHECKING:
    from frameshard.engine.nvml import Observer

BATCH = ["-b", "2048", "-ub", "2048"]
"""The arguments with which llama.cpp prefills fastest."""


@dataclass(frozen=True)
class Measured:
    """The result of one run: seconds of the prefill, tokens per second of all sequences together, and peak bytes of
    VRAM that NVML counts."""

    ttft_s: float
    decode_tps: float
    nvml_peak: int | None


def environment() -> dict[str, str]:
    """The environment of this process, without the variables that :mod:`frameshard.engine` sets."""
    return {key: value for key, value in os.environ.items() if key != "GGML_NO_BACKTRACE"}


def placement(model: Model, budget_bytes: int) -> list[str]:
    """The arguments that put as many weights on the GPU as fit in ``budget_bytes``, by the sizes in the file."""
    layers: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    head = embedding = 0
    for tensor in model.tensors:
        part = tensor.name.split(".")
        if part[0] == "blk":
            kind = experts if "exps" in part[2] else layers
            kind[int(part[1])] += tensor.n_bytes
        elif part[0] == "token_embd":
            embedding = tensor.n_bytes
        else:
            head += tensor.n_bytes
    if not any(tensor.name == "output.weight" for tensor in model.tensors):
        head += embedding  # the head is the embedding, and llama.cpp keeps a second copy of it on the GPU
    if experts:
        room = budget_bytes - head - sum(layers.values())
        on_cpu = model.n_layer
        while on_cpu and experts[on_cpu - 1] <= room:
            on_cpu -= 1
            room -= experts[on_cpu]
        if room >= 0:
            return ["-ngl", str(ALL_LAYERS), "-ncmoe", str(on_cpu)]
    room, n = budget_bytes - head, 0
    while room >= 0 and n <= model.n_layer:
        n += 1  # -ngl counts the head as the first layer; the last layers of the model follow
        room -= layers[model.n_layer - n] + experts[model.n_layer - n]
    return ["-ngl", str(n)]


def kv_type(name: str) -> list[str]:
    """llama.cpp's arguments for a type of the KV cache."""
    return ["-ctk", name, "-ctv", name]


def measure(
    binary: str,
    model: Model,
    where: list[str],
    observer: Observer | None,
    workload: Workload,
    *,
    threads: int,
) -> Measured:
    """Runs llama.cpp's ``llama-batched-bench``. Its first prompt is not counted, because it allocates and uploads.

    :param binary: path of the program.
    :param where: arguments from :func:`placement`.
    :param observer: a new one; ``None`` without a GPU.
    :raises FrameshardError: the program failed; the message has its last output.
    """
    prompt, generate, parallel = workload.n_prompt, workload.n_generate, workload.n_parallel
    # Each sequence has KV cells of its own, a multiple of 256.
    context = -(-(prompt + generate) // 256) * 256 * parallel
    command = [binary, "-m", str(model.path), "-c", str(context), *BATCH, "-fa", "on"]
    command += ["-t", str(threads), "-npp", str(prompt), "-ntg", f"1,{generate}", "-npl", str(parallel)]
    command += ["--output-format", "jsonl", *where]
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())
        except OSError as error:
            raise FrameshardError(f"cannot run {binary}: {error.strerror}") from error
        if observer is not None:
            observer.pid = process.pid
        try:
            with Sampler(observer) as nvml:
                output, _ = process.communicate()
        finally:
            process.kill()
            process.wait()
        rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if process.returncode or not rows or rows[-1]["tg"] != generate:
            log.seek(0)
            words = [line.strip() for line in log.read().splitlines() if line.strip()]
            last = "; ".join(words[-3:]) or f"it ended with {process.returncode}"
            raise FrameshardError(f"{' '.join(command)} failed: {last}")
    return Measured(rows[-1]["t_pp"], rows[-1]["speed_tg"], nvml.peak_bytes)
