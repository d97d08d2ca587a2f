"""Runs stock llama.cpp's own benchmark for comparison, with as much of the model on the GPU as fits in a budget.

With :func:`placement` the whole budget is for weights. Context and buffers are not counted, so llama.cpp may use more
VRAM than the budget. Dense models run with the largest possible ``-ngl``. Mixtures of experts run with ``-ngl 999`` and
the experts of as few layers as possible on the CPU (``-ncmoe``): that is faster than ``-ngl`` at every budget in which
it fits. :mod:`frameshard.cli.equal_vram` finds what fits with everything counted, among :func:`layers_on_gpu` and
:func:`attention_on_gpu`.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frameshard import ggml
from frameshard.engine.llama import ALL_LAYERS
from frameshard.errors import BadArgument, FrameshardError
from frameshard.plan.model import Model
from frameshard.plan.workload import Workload

from .vram import run_observed

if TYPE_CHECKING:
    from frameshard.engine.observer import Observer

UBATCH = 2048
"""The ubatch in tokens with which llama.cpp prefills fastest."""


def batch(ubatch: int = UBATCH) -> list[str]:
    """llama.cpp's arguments for the tokens of a batch and of a ubatch."""
    return ["-b", "2048", "-ub", str(ubatch)]


@dataclass(frozen=True)
class Setting:
    """What llama.cpp puts on the GPU.

    :param placement: arguments from :func:`placement`, :func:`layers_on_gpu` or :func:`attention_on_gpu`.
    :param ubatch: tokens of a ubatch, 2048 at most.
    """

    placement: tuple[str, ...]
    ubatch: int = UBATCH

    def __str__(self) -> str:
        """The arguments that differ from those of every run."""
        return " ".join(self.placement if self.ubatch == UBATCH else (*self.placement, "-ub", str(self.ubatch)))


class AboveLimit(Exception):
    """A run was stopped, because it took more VRAM than its limit."""


@dataclass(frozen=True)
class Measured:
    """The result of one run: seconds of the prefill, tokens per second of all sequences together, and peak bytes of
    VRAM that NVML counts."""

    ttft_s: float
    decode_tps: float
    nvml_peak: int | None


def check(program: str) -> None:
    """Checks before a measurement that a program of llama.cpp is there.

    :raises BadArgument: it is not.
    """
    if shutil.which(program) is None:
        raise BadArgument(f"cannot run {program}: there is no such program")


def environment() -> dict[str, str]:
    """The environment of this process, without what :mod:`frameshard.engine` and :mod:`frameshard.ggml` set."""
    return {key: value for key, value in ggml.environment_before().items() if key != "GGML_NO_BACKTRACE"}


def _sizes(model: Model) -> tuple[int, Counter[int], Counter[int]]:
    """The bytes of weights in the file: of the head, of each layer without its experts, of each layer's experts."""
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
    return head, layers, experts


def placement(model: Model, budget_bytes: int) -> list[str]:
    """The arguments that put as many weights on the GPU as fit in ``budget_bytes``, by the sizes in the file."""
    head, layers, experts = _sizes(model)
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


Placements = list[tuple[tuple[str, ...], int]]
"""Arguments, and the bytes of weights, keys and values that they put on the GPU; ascending."""


def layers_on_gpu(model: Model, kv_bytes: int) -> Placements:
    """All placements of layers and experts, from none on the GPU to the whole model there. Experts are on it only if
    all layers are.

    :param kv_bytes: the bytes of keys and values of all layers. Those of a layer are where its attention is.
    """
    head, layers, experts = _sizes(model)
    all_on_cpu = ("-ncmoe", str(model.n_layer)) if experts else ()
    found: Placements = [(("-ngl", "0"), 0)]
    n_bytes = head
    for n in range(1, model.n_layer + 2):
        if n > 1:
            n_bytes += layers[model.n_layer + 1 - n] + kv_bytes // model.n_layer
        found.append((("-ngl", str(n), *all_on_cpu), n_bytes))
    for on_cpu in reversed(range(model.n_layer if experts else 0)):
        n_bytes += experts[on_cpu]
        if experts[on_cpu]:
            found.append((("-ngl", str(ALL_LAYERS), "-ncmoe", str(on_cpu)), n_bytes))
    return found


def attention_on_gpu(model: Model, kv_bytes: int) -> Placements:
    """The placements of a dense model with the attention of all layers on the GPU, and the feed-forward networks of the
    first layers on the CPU; from all of them to the first one. None for a mixture of experts, for which ``-ncmoe`` does
    that.

    :param kv_bytes: the bytes of keys and values of all layers.
    """
    head, layers, experts = _sizes(model)
    networks = Counter[int]()
    for tensor in model.tensors:
        part = tensor.name.split(".")
        if part[0] == "blk" and part[2] in ("ffn_gate", "ffn_up", "ffn_down"):
            networks[int(part[1])] += tensor.n_bytes
    if experts or not networks:
        return []
    whole = head + sum(layers.values()) + kv_bytes
    return [
        (("-ngl", str(ALL_LAYERS), "-ot", _networks_on_cpu(n)), whole - sum(networks[i] for i in range(n)))
        for n in range(model.n_layer, 0, -1)
    ]


def _networks_on_cpu(n: int) -> str:
    """llama.cpp's pattern for the feed-forward networks of the first ``n`` layers. It has no ``|``, for tables."""
    tens, units = divmod(n, 10)
    layers = [f"{'' if ten == 0 else ten}[0-9]" for ten in range(tens)]
    if units:
        layers.append(f"{tens or ''}[0-{units - 1}]")
    return ",".join(rf"blk\.{each}\.ffn_[gud]=CPU" for each in layers)


def kv_type(name: str) -> list[str]:
    """llama.cpp's arguments for a type of the KV cache."""
    return ["-ctk", name, "-ctv", name]


@dataclass(frozen=True)
class Program:
    """llama.cpp's ``llama-batched-bench`` with the arguments that all runs share.

    :param binary: path of the program.
    :param device: its arguments that choose the device.
    :param threads: its CPU threads.
    :param observe: makes an observer of its VRAM; ``None`` where nothing counts it.
    """

    binary: str
    model: Model
    device: tuple[str, ...]
    threads: int
    observe: Callable[[], Observer] | None

    def run(
        self,
        setting: Setting,
        workload: Workload,
        *,
        n_prompt: int | None = None,
        n_generate: int | None = None,
        limit_bytes: float = math.inf,
    ) -> Measured:
        """Runs the program. Its first prompt is not counted, because it allocates and uploads.

        :param n_prompt: tokens of prompt, if fewer than the workload has; the context is the workload's.
        :param n_generate: tokens to decode, likewise.
        :param limit_bytes: the run is stopped as soon as its VRAM is above.
        :raises FrameshardError: the program failed; the message has its last output.
        :raises AboveLimit: its VRAM was above the limit.
        """
        generate = n_generate or workload.n_generate
        command = self._command(setting, workload, n_prompt or workload.n_prompt, generate)
        with tempfile.TemporaryFile("w+") as log:
            try:
                ran = run_observed(command, self.observe, log, limit_bytes=limit_bytes, env=environment())
            except OSError as error:
                raise FrameshardError(f"cannot run {self.binary}: {error.strerror}") from error
            if (ran.peak_bytes or 0) > limit_bytes:
                raise AboveLimit
            rows = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
            if ran.code or not rows or rows[-1]["tg"] != generate:
                log.seek(0)
                words = [line.strip() for line in log.read().splitlines() if line.strip()]
                last = "; ".join(words[-3:]) or f"it ended with {ran.code}"
                raise FrameshardError(f"{' '.join(command)} failed: {last}")
        return Measured(rows[-1]["t_pp"], rows[-1]["speed_tg"], ran.peak_bytes)

    def _command(self, setting: Setting, workload: Workload, prompt: int, generate: int) -> list[str]:
        parallel = workload.n_parallel
        command = [self.binary, "-m", str(self.model.path), "-c", str(cells(workload) * parallel)]
        command += [*batch(setting.ubatch), "-fa", "on", "-t", str(self.threads)]
        if prompt > UBATCH:  # one step of it allocates and uploads
            command += ["-npp", f"{UBATCH},{prompt}", "-ntg", str(generate)]
        else:
            command += ["-npp", str(prompt), "-ntg", f"1,{generate}"]
        command += ["-npl", str(parallel), "--output-format", "jsonl"]
        return [*command, *self.device, *setting.placement, *kv_type(workload.kv_type)]


def cells(workload: Workload) -> int:
    """The KV cells of each sequence, a multiple of 256."""
    return -(-(workload.n_prompt + workload.n_generate) // 256) * 256
