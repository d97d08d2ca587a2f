"""The header of a LoRA adapter file (GGUF), checked against the model that it is for.

llama.cpp does not check all of it, and some errors end the process: a scale of another type, matrices of types that it
cannot multiply with, experts that the model does not have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from frameshard.errors import BadModel, Unsupported
from frameshard.plan.header import Header, Tensor, Wrong, read_header, wrong
from frameshard.plan.model import Model
from frameshard.records import record

_TYPES = ("F32", "F16", "BF16", "Q8_0")
_FLOAT32 = 6  # GGUF's number for the type of a key
_ALIGN = 256  # of tensors in VRAM


@record
class AdapterFile:
    """A checked adapter file.

    :param n_bytes: what its matrices take in VRAM.
    :param token_bytes: what llama.cpp's compute buffers need more with it, at most, for each token of a graph.
    :param fingerprint: what :attr:`frameshard.plan.header.Header.fingerprint` says, in hex.
    """

    path: Path
    n_bytes: int
    token_bytes: int
    fingerprint: str


def vram_bytes(adapters: Sequence[AdapterFile], n_ubatch: int, unit_bytes: int) -> int:
    """What adapters add to the floor, at most: their matrices, and what the compute buffers grow by, which is usually
    nothing. Because their allocator may leave gaps, twice the bytes in use at once are counted.

    :param n_ubatch: the most tokens of a step; 0 for the matrices alone.
    :param unit_bytes: the device gives VRAM in multiples of so many bytes.
    """
    growth = max((each.token_bytes for each in adapters), default=0)
    return sum(-(-each.n_bytes // unit_bytes) * unit_bytes for each in adapters) + 2 * n_ubatch * growth


def read_adapter(path: str | os.PathLike[str], model: Model) -> AdapterFile:
    """Reads and checks the header of an adapter file.

    :raises ModelNotFound: there is no such file.
    :raises BadModel: the file is not a LoRA adapter, is truncated, or is for another model.
    :raises Unsupported: it is of a kind that cannot be applied here.
    """
    path = Path(path)
    header = read_header(path)
    try:
        _check_keys(header, model)
        pairs = _pairs(header)
        adapted = {tensor.name: tensor for tensor in model.tensors}
        for name, (a, b) in pairs.items():
            _check_pair(name, a, b, adapted.get(name))
    except Wrong as error:
        raise BadModel(f"{path.name}: {error}", path=str(path)) from None
    if any(name.startswith("token_embd.") for name in pairs):
        raise Unsupported(f"{path.name} adapts the token embedding, which is not supported", path=str(path))
    if "adapter.alora.invocation_tokens" in header.array_lengths:
        raise Unsupported(f"{path.name} is an activated LoRA (aLoRA), which is not supported", path=str(path))
    matrices = [tensor for pair in pairs.values() for tensor in pair]
    rows = max(_shape(a)[1] + _shape(b)[1] for a, b in pairs.values())
    return AdapterFile(
        path,
        n_bytes=sum(-(-tensor.n_bytes // _ALIGN) * _ALIGN for tensor in matrices),
        token_bytes=4 * rows * max(1, model.n_expert_used),
        fingerprint=header.fingerprint.hex(),
    )


def _check_keys(header: Header, model: Model) -> None:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if header.metadata.get(key) != wanted:
            wrong(f"not a LoRA adapter: {key} is {header.metadata.get(key)!r}, not {wanted!r}")
    arch = header.metadata.get("general.architecture")
    if arch != model.arch:
        wrong(f"an adapter for models of architecture {arch!r}; {model.path.name} is {model.arch!r}")
    alpha = header.metadata.get("adapter.lora.alpha", 0.0)
    if header.kinds.get("adapter.lora.alpha", _FLOAT32) != _FLOAT32 or not math.isfinite(float(alpha)):  # type: ignore[arg-type]
        wrong(f"adapter.lora.alpha is {alpha!r}, not a finite 32-bit number")


def _pairs(header: Header) -> dict[str, tuple[Tensor, Tensor]]:
    """The two matrices for each tensor of the model."""
    halves: dict[str, dict[str, Tensor]] = {}
    for tensor in header.tensors:
        name, _, half = tensor.name.rpartition(".")
        if half in ("lora_a", "lora_b"):
            halves.setdefault(name, {})[half] = tensor
        elif not tensor.name.endswith("_norm.weight"):  # llama.cpp skips those
            wrong(f"tensor {tensor.name} is neither lora_a nor lora_b")
    if not halves:
        wrong("there are no matrices in it")
    for name, pair in halves.items():
        if len(pair) < 2:
            wrong(f"{name} has only {next(iter(pair))}")
    return {name: (pair["lora_a"], pair["lora_b"]) for name, pair in halves.items()}


def _check_pair(name: str, a: Tensor, b: Tensor, adapted: Tensor | None) -> None:
    if adapted is None:
        wrong(f"it adapts {name}, which the model does not have: it is for another model")
    for tensor in (a, b):
        if tensor.type_name not in _TYPES:
            wrong(f"tensor {tensor.name} has type {tensor.type_name}; supported are {', '.join(_TYPES)}")
    n_in, n_out, *more = _shape(adapted)
    if adapted.type_name == "NVFP4" or (more != [1, 1] and not ("_exps." in name and more[1] == 1)):
        wrong(f"{name} is of a kind that cannot be adapted")
    if name.startswith("token_embd."):
        return  # refused by the caller; its matrices are stored the other way round
    rank = _shape(a)[1]
    if _shape(a) != [n_in, rank, *more] or _shape(b) != [rank, n_out, *more]:
        wrong(
            f"{name} has the shape {list(adapted.shape)}, and its adapter {list(a.shape)} and {list(b.shape)}: it is"
            " for another model"
        )


def _shape(tensor: Tensor) -> list[int]:
    """All four dimensions. ggml does not write those of 1 at the end: the ``lora_a`` of rank 1 may have only one."""
    return [*tensor.shape, 1, 1, 1][:4]
