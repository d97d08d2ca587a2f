"""Writes MODEL.gguf and MMPROJ.gguf with the published shapes of Qwen2.5-VL-7B, in F16, and random weights.

    python profiles/tools/synth_vlm.py qwen2.5-vl-7b model.gguf mmproj.gguf

Speed and memory depend on shapes and types, not on values, so the pair replaces the model where it cannot be fetched.
``tiny`` is a small pair for trying the tools.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import gguf
import numpy as np
from synth_gguf import describe

SECTIONS = [16, 24, 24, 0]


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    tower_layers: int
    tower_width: int
    tower_heads: int
    tower_ff: int


SHAPES = {
    "qwen2.5-vl-7b": Shape(28, 3584, 28, 4, 18944, 152064, 32, 1280, 16, 3420),
    "tiny": Shape(4, 512, 4, 2, 1024, 1024, 8, 320, 4, 856),
}
HEAD = 128
TILE = 32 << 20


class Writer:
    """Collects the tensors first, and then writes the same random tile for each. A file of 15 GiB takes a minute."""

    def __init__(self, path: str, arch: str) -> None:
        self.file = gguf.GGUFWriter(path, arch)
        self.tensors: list[tuple[int, int]] = []
        self.half = (np.random.default_rng(7).standard_normal(TILE, dtype=np.float32) * 0.02).astype(np.float16)
        self.ones = np.ones(1 << 20, np.float32)

    def add(self, name: str, *shape: int, half: bool = True) -> None:
        """Adds a tensor. ``shape`` is in ggml's order."""
        size, kind = (2, np.float16) if half else (4, np.float32)
        count = int(np.prod(shape, dtype=np.int64))
        self.file.add_tensor_info(name, list(reversed(shape)), np.dtype(kind), count * size)
        self.tensors.append((count, size))

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        self.add(f"{name}.weight", columns, rows)
        if bias:
            self.add(f"{name}.bias", rows, half=False)

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_ti_data_to_file()
        for count, size in self.tensors:
            source = self.half if size == 2 else self.ones
            data = source[:count] if count <= len(source) else np.resize(source, count)
            self.file.write_tensor_data(data)
        self.file.close()


def model(shape: Shape, path: str) -> None:
    writer = Writer(path, "qwen2vl")
    file = writer.file
    describe(
        file,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ff=shape.ff,
        vocab=shape.vocab,
    )
    file.add_rope_dimension_sections(SECTIONS)
    writer.add("token_embd.weight", shape.width, shape.vocab)
    writer.add("output_norm.weight", shape.width, half=False)
    writer.add("output.weight", shape.width, shape.vocab)
    for i in range(shape.layers):
        block = f"blk.{i}"
        for name in ("attn_norm", "ffn_norm"):
            writer.add(f"{block}.{name}.weight", shape.width, half=False)
        writer.linear(f"{block}.attn_q", shape.heads * HEAD, shape.width)
        writer.linear(f"{block}.attn_k", shape.kv_heads * HEAD, shape.width)
        writer.linear(f"{block}.attn_v", shape.kv_heads * HEAD, shape.width)
        writer.linear(f"{block}.attn_output", shape.width, shape.heads * HEAD, bias=False)
        writer.linear(f"{block}.ffn_gate", shape.ff, shape.width, bias=False)
        writer.linear(f"{block}.ffn_up", shape.ff, shape.width, bias=False)
        writer.linear(f"{block}.ffn_down", shape.width, shape.ff, bias=False)
    writer.close()


def tower(shape: Shape, path: str) -> None:
    width, patch = shape.tower_width, 14
    writer = Writer(path, "clip")
    file = writer.file
    file.add_string("general.type", "mmproj")
    file.add_name("random tower")
    file.add_bool("clip.has_vision_encoder", True)
    file.add_string("clip.projector_type", "qwen2.5vl_merger")
    file.add_bool("clip.use_silu", True)
    for key, value in {
        "image_size": 560,
        "patch_size": patch,
        "embedding_length": width,
        "feed_forward_length": shape.tower_ff,
        "block_count": shape.tower_layers,
        "projection_dim": shape.width,
        "attention.head_count": shape.tower_heads,
        "n_wa_pattern": 8,
    }.items():
        file.add_uint32(f"clip.vision.{key}", value)
    file.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    file.add_array("clip.vision.image_mean", [0.48145466, 0.4578275, 0.40821073])
    file.add_array("clip.vision.image_std", [0.26862954, 0.26130258, 0.27577711])
    for suffix in ("", ".1"):
        writer.add(f"v.patch_embd.weight{suffix}", patch, patch, 3, width)
    for i in range(shape.tower_layers):
        block = f"v.blk.{i}"
        for name in ("ln1", "ln2"):
            writer.add(f"{block}.{name}.weight", width, half=False)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            writer.linear(f"{block}.{name}", width, width)
        writer.linear(f"{block}.ffn_gate", shape.tower_ff, width)
        writer.linear(f"{block}.ffn_up", shape.tower_ff, width)
        writer.linear(f"{block}.ffn_down", width, shape.tower_ff)
    writer.add("v.post_ln.weight", width, half=False)
    writer.linear("mm.0", 4 * width, 4 * width)
    writer.linear("mm.2", shape.width, 4 * width)
    writer.close()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: synth_vlm.py {'|'.join(SHAPES)} MODEL.gguf MMPROJ.gguf")
    shape = SHAPES[sys.argv[1]]
    model(shape, sys.argv[2])
    tower(shape, sys.argv[3])


if __name__ == "__main__":
    main()
