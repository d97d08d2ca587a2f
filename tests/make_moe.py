"""Turns a dense GGUF of the llama architecture into a mixture of experts with the same output, for tests.

Every expert computes the dense feed-forward network, with its hidden units in another order. They are moved in blocks
of 32, so that quantised blocks stay as they are. The bytes of the experts differ, but any choice of experts gives the
output of the dense model up to rounding, because llama.cpp scales the weights of the chosen experts to a sum of 1. If
matrices of different experts are mixed up, the output is garbage, so the error is noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_BLOCK = 32  # a multiple of the quantisation block of every type in a source file (F32, F16, Q4_0, Q4_1, Q8_0)
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def make_moe(source: Path, target: Path, *, n_expert: int = 8, n_used: int = 2, seed: int = 7) -> None:
    """Writes ``source`` (dense, architecture ``llama``) to ``target`` with ``n_expert`` experts, of which a token uses
    ``n_used``."""
    reader = gguf.GGUFReader(source)
    arch = _scalar(reader, "general.architecture")
    if arch != "llama":
        raise ValueError(f"{source}: architecture {arch} is not llama")
    n_embd = _scalar(reader, "llama.embedding_length")
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_used)

    orders: dict[str, list[np.ndarray]] = {}  # for each layer, the order of hidden blocks in each expert
    for tensor in reader.tensors:
        data = np.asarray(tensor.data)  # quantised types: bytes, [rows, bytes of a row]
        layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
        if part not in _DENSE:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
            continue
        down = part == "ffn_down"  # its columns are the hidden units; in the other two matrices the rows are
        n_blocks = int(tensor.shape[0 if down else 1]) // _BLOCK
        if layer not in orders:
            orders[layer] = [np.arange(n_blocks), *(rng.permutation(n_blocks) for _ in range(n_expert - 1))]
            router = rng.standard_normal((n_expert, n_embd)).astype(np.float32)
            writer.add_tensor(f"{layer}.ffn_gate_inp.weight", router)
        blocks = data.reshape(data.shape[0], n_blocks, -1) if down else data.reshape(n_blocks, _BLOCK, -1)
        experts = [(blocks[:, order] if down else blocks[order]).reshape(data.shape) for order in orders[layer]]
        writer.add_tensor(f"{layer}.{part}_exps.weight", np.stack(experts), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _scalar(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"no {key} in the file")
    return field.contents()
