"""Writes a GGUF with the published shapes of a language model and random weights, for machines without a model hub.

    python profiles/tools/synth_gguf.py minitron-8b-f16 minitron-8b-f16.gguf

Speed and memory depend on shapes and types, not on values. Only the choice of experts depends on values. The mean of
random 4-bit weights is not 0, so all hidden states have a common direction, and nearly all tokens choose the same
experts of a layer. Models with ``-even`` have weights with mean 0, and layers that add little to a token's embedding:
there all experts are chosen equally often. Real models are between the two. A number at the end is that of the layers,
where a disk has no room for all of them. ``tiny-`` models are for trying the tools.

The shape of Mistral-NeMo-Minitron-4B-128K is not published. ``minitron-4b-f16`` has the width and the heads of
Minitron-4B-Base, and as many layers as the settings in the artifact of arXiv 2604.26334 tell. Those settings allow 207
to 218 MiB for a layer; here it has 210.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

TILE = 32 << 20
"""The number of values in the random tile that fills all tensors."""
BLOCK, BLOCK_BYTES = 32, 18  # Q4_0: a scale in F16 and 32 values of 4 bits
SCALE, SMALL = 0.004, 1e-6
HALVES = {
    "Q2_K": {80: 2e-3, 82: 3e-3},
    "Q3_K": {108: 5e-4},
    "Q4_K": {0: 1e-4, 2: 7.5e-4},
    "Q6_K": {208: 1.5e-5},
}
"""For each type of quantisation in blocks of 256: the F16 values of a block by their offset in bytes. All other bytes
may have any value. With these, random weights have a standard deviation of about 0.02."""
LARGER = {
    "Q2_K": {
        "attn_v": "Q4_K",
        "attn_output": "Q3_K",
        "ffn_down": "Q3_K",
        "ffn_down_exps": "Q3_K",
        "output": "Q6_K",
    },
    "Q4_K": dict.fromkeys(("attn_v", "ffn_down", "ffn_down_exps", "output"), "Q6_K"),
}
"""For each kind of file the tensors that llama.cpp's quantiser keeps in a larger type. In Q4_K_M files it does so in
half of the layers, here in all."""


@dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head: int
    ff: int
    vocab: int
    kind: str  # "F16" | "Q4_0" | "Q4_K" | "Q2_K"
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    even: bool = False
    window: int = 0


SHAPES = {
    "minitron-4b-f16": Shape("llama", 34, 3072, 24, 8, 128, 9216, 131072, "F16"),
    "minitron-8b-f16": Shape("llama", 40, 4096, 32, 8, 128, 11520, 131072, "F16"),
    "minitron-8b-q4_0": Shape("llama", 40, 4096, 32, 8, 128, 11520, 131072, "Q4_0"),
    "qwen3-30b-a3b-q4_0": Shape("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, "Q4_0", 128, 8, 768),
    "qwen3-30b-a3b-q4_0-even": Shape("qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, "Q4_0", 128, 8, 768, even=True),
    "qwen3-235b-a22b-q2_k": Shape("qwen3moe", 94, 4096, 64, 4, 128, 12288, 151936, "Q2_K", 128, 8, 1536),
    "qwen3-235b-a22b-q4_0-even-36": Shape(
        "qwen3moe", 36, 4096, 64, 4, 128, 12288, 151936, "Q4_0", 128, 8, 1536, even=True
    ),
    "llama3-8b-q4_k_m": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, "Q4_K"),
    "mixtral-8x7b-q4_k_m": Shape("llama", 32, 4096, 32, 8, 128, 14336, 32000, "Q4_K", 8, 2, 14336),
    "olmoe-7b-q4_k_m": Shape("qwen3moe", 16, 2048, 16, 16, 128, 1024, 50304, "Q4_K", 64, 8, 1024),
    "gemma3-12b-q4_0": Shape("gemma3", 48, 3840, 16, 8, 256, 15360, 262144, "Q4_0", window=1024),
    "tiny-f16": Shape("llama", 4, 256, 4, 2, 64, 512, 1024, "F16"),
    "tiny-moe-q4_0": Shape("qwen3moe", 4, 256, 4, 2, 64, 512, 1024, "Q4_0", 16, 4, 128),
    "tiny-moe-q2_k": Shape("qwen3moe", 4, 256, 4, 2, 64, 512, 1024, "Q2_K", 16, 4, 256),
}


class HeaderWriter(gguf.GGUFWriter):
    """Packs the values of a vocabulary together. gguf packs each alone, which takes a second."""

    def _pack_val(self, val: Any, vtype: gguf.GGUFValueType, *args: Any, **options: Any) -> bytes:
        if vtype != gguf.GGUFValueType.ARRAY or len(val) < 1000:
            packed: bytes = super()._pack_val(val, vtype, *args, **options)
            return packed
        if isinstance(val[0], bytes):
            data = b"".join(len(word).to_bytes(8, "little") + word for word in val)
        else:
            data = np.array(val, "<f4" if isinstance(val[0], float) else "<i4").tobytes()
        return struct.pack("<IIQ", vtype, gguf.GGUFValueType.get_type(val[0]), len(val)) + data


class Writer:
    def __init__(self, path: str, shape: Shape) -> None:
        self.path, self.shape = path, shape
        self.file = HeaderWriter(path, shape.arch)
        self.random = np.random.default_rng(7)
        self.tiles: dict[tuple[str, float], npt.NDArray[np.uint8]] = {}
        self.tensors: list[tuple[str, str, int]] = []

    def add(self, name: str, kind: str, *ne: int) -> None:
        """Adds a tensor. ``ne`` is its shape in ggml's order."""
        count = int(np.prod(ne, dtype=np.int64))
        shape = list(reversed(ne))
        if is_quantised(kind):
            block, block_bytes = sizes(kind)
            shape[-1] = shape[-1] // block * block_bytes
            raw = gguf.GGMLQuantizationType[kind]
            self.file.add_tensor_info(name, shape, np.dtype(np.uint8), bytes_of(kind, count), raw_dtype=raw)
        else:
            self.file.add_tensor_info(name, shape, np.dtype(kind), bytes_of(kind, count))
        self.tensors.append((name, kind, count))

    def weight(self, name: str, *ne: int) -> None:
        part = name.removesuffix(".weight").rpartition(".")[2]
        kind = LARGER.get(self.shape.kind, {}).get(part, self.shape.kind)
        self.add(name, "float16" if kind == "F16" else kind, *ne)

    def tile(self, kind: str, scale: float) -> npt.NDArray[np.uint8]:
        if (kind, scale) not in self.tiles:
            if kind == "float16":
                made = (self.random.standard_normal(TILE, dtype=np.float32) * 0.02).astype(np.float16).view(np.uint8)
            elif kind in HALVES:
                block, block_bytes = sizes(kind)
                blocks = self.random.integers(0, 256, (TILE // block, block_bytes), dtype=np.uint8)
                for offset, half in HALVES[kind].items():
                    blocks[:, offset : offset + 2] = np.array([half], np.float16).view(np.uint8)
                made = blocks.reshape(-1)
            else:
                low = 1 if self.shape.even else 0  # 4-bit values are -8 to 7
                blocks = np.empty((TILE // BLOCK, BLOCK_BYTES), np.uint8)
                blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
                halves = self.random.integers(low, 16, (2, len(blocks), BLOCK // 2), dtype=np.uint8)
                blocks[:, 2:] = halves[0] | halves[1] << 4
                made = blocks.reshape(-1)
            self.tiles[kind, scale] = made
        return self.tiles[kind, scale]

    def data(self, name: str, kind: str, count: int) -> npt.NDArray[np.uint8]:
        if kind == "float32":
            router = "gate_inp" in name
            values = (
                self.random.standard_normal(count, dtype=np.float32) * 0.05 if router else np.ones(count, np.float32)
            )
            return values.view(np.uint8)
        small = self.shape.even and ("attn_output" in name or "down" in name)
        return np.resize(self.tile(kind, SMALL if small else SCALE), bytes_of(kind, count))

    def close(self, *, with_weights: bool) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_ti_data_to_file()
        for name, kind, count in self.tensors if with_weights else []:
            self.file.write_tensor_data(self.data(name, kind, count))
        self.file.close()
        if not with_weights:  # the file has its full size and takes no room on the disk
            padded = (gguf.GGUFWriter.ggml_pad(bytes_of(kind, n), 32) for _, kind, n in self.tensors)
            os.truncate(self.path, gguf.GGUFWriter.ggml_pad(os.path.getsize(self.path), 32) + sum(padded))


def is_quantised(kind: str) -> bool:
    return kind == "Q4_0" or kind in HALVES


def sizes(kind: str) -> tuple[int, int]:
    """The values and the bytes of a block."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return n_values, n_bytes


def bytes_of(kind: str, count: int) -> int:
    """The bytes of so many values."""
    if not is_quantised(kind):
        return count * np.dtype(kind).itemsize
    block, block_bytes = sizes(kind)
    return count // block * block_bytes


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def describe(file: gguf.GGUFWriter, *, layers: int, width: int, heads: int, kv_heads: int, ff: int, vocab: int) -> None:
    """Adds the metadata of a language model, and a vocabulary of bytes and invented words."""
    file.add_name("random weights")
    file.add_block_count(layers)
    file.add_context_length(131072)
    file.add_embedding_length(width)
    file.add_feed_forward_length(ff)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(1e6)
    file.add_vocab_size(vocab)
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    tokens += [b"\xe2\x96\x81w%d" % i for i in range(vocab - len(tokens))]
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens)
    file.add_token_scores([-float(i) for i in range(vocab)])
    file.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_add_bos_token(False)
    file.add_chat_template(CHAT_TEMPLATE)


def write(shape: Shape, path: str, *, with_weights: bool = True) -> None:
    """Writes the file. Without weights it is a header and a hole, which is enough for plans."""
    writer = Writer(path, shape)
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
    file.add_key_length(shape.head)
    file.add_value_length(shape.head)
    file.add_rope_dimension_count(shape.head)
    if shape.experts:
        file.add_expert_count(shape.experts)
        file.add_expert_used_count(shape.experts_used)
        file.add_expert_feed_forward_length(shape.expert_ff)
    if shape.window:
        file.add_sliding_window(shape.window)
    gemma = shape.arch == "gemma3"
    head_norms = ("attn_q_norm", "attn_k_norm") if shape.arch in ("gemma3", "qwen3moe") else ()
    width, query, kv = shape.width, shape.heads * shape.head, shape.kv_heads * shape.head
    writer.weight("token_embd.weight", width, shape.vocab)
    writer.add("output_norm.weight", "float32", width)
    if not gemma:
        writer.weight("output.weight", width, shape.vocab)
    for i in range(shape.layers):
        block = f"blk.{i}"
        for name in ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if gemma else ())):
            writer.add(f"{block}.{name}.weight", "float32", width)
        writer.weight(f"{block}.attn_q.weight", width, query)
        writer.weight(f"{block}.attn_k.weight", width, kv)
        writer.weight(f"{block}.attn_v.weight", width, kv)
        writer.weight(f"{block}.attn_output.weight", query, width)
        for name in head_norms:
            writer.add(f"{block}.{name}.weight", "float32", shape.head)
        if shape.experts:
            writer.add(f"{block}.ffn_gate_inp.weight", "float32", width, shape.experts)
            writer.weight(f"{block}.ffn_gate_exps.weight", width, shape.expert_ff, shape.experts)
            writer.weight(f"{block}.ffn_up_exps.weight", width, shape.expert_ff, shape.experts)
            writer.weight(f"{block}.ffn_down_exps.weight", shape.expert_ff, width, shape.experts)
        else:
            writer.weight(f"{block}.ffn_gate.weight", width, shape.ff)
            writer.weight(f"{block}.ffn_up.weight", width, shape.ff)
            writer.weight(f"{block}.ffn_down.weight", shape.ff, width)
    writer.close(with_weights=with_weights)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        sys.exit(f"usage: synth_gguf.py {'|'.join(SHAPES)} OUT.gguf")
    write(SHAPES[sys.argv[1]], sys.argv[2])
