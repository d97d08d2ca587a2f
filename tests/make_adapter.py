"""Writes a synthetic LoRA adapter for a model: seeded random weights, strong enough to change its text. It has learned
nothing; it stands for a real one in tests and measurements.

    python tests/make_adapter.py MODEL ADAPTER [RANK [SEED]]

It adapts the matrices of attention and of feed-forward networks in all layers, experts included.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gguf
import numpy as np

_ADAPTED = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)\.weight")


def make_adapter(model: Path, target: Path, *, rank: int = 8, seed: int = 1, gain: float = 0.5) -> None:
    """Writes an adapter with ``alpha`` = ``rank``, so a scale of 1 adds the product of its matrices as it is.

    :param gain: size of the change to each result, relative to a matrix that keeps the size of its input.
    """
    reader = gguf.GGUFReader(model)
    arch = reader.get_field("general.architecture")
    assert arch is not None
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, arch.contents())
    writer.add_type("adapter")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(2)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for tensor in reader.tensors:
        if not _ADAPTED.fullmatch(tensor.name):
            continue
        n_in, n_out, *experts = map(int, tensor.shape)
        a = rng.standard_normal((*experts, rank, n_in), dtype=np.float32) / n_in**0.5
        b = rng.standard_normal((*experts, n_out, rank), dtype=np.float32) * (gain / rank**0.5)
        if rank == 1 and not experts:
            a = a[0]  # ggml does not write dimensions of 1 at the end, which are the first ones of NumPy
        writer.add_tensor(f"{tensor.name}.lora_a", a.astype(np.float16))
        writer.add_tensor(f"{tensor.name}.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[3:]]
    make_adapter(Path(sys.argv[1]), Path(sys.argv[2]), **dict(zip(("rank", "seed"), numbers, strict=False)))
