"""Tiny models with random weights, one for each kind of architecture that the shard device must run.

They have a few MB. Most matrices are larger than 64 KiB, so they are not part of the core, and each layer has shards to
stream and to evict. Weights are scaled so that logits differ by a few units. The same name always gives the same bytes.
The vocabulary has the 256 byte tokens, so any text can be tokenised.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

N_VOCAB = 1024
N_CTX_TRAIN = 4096
BYTES = 3
"""The token of byte 0. The tokens of the other bytes follow."""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""A chat template that shows no tools."""


def add_key(
    writer: gguf.GGUFWriter, key: str, value: bool | int | float | str | Sequence[int] | Sequence[float]
) -> None:
    """Adds a key with the type that llama.cpp and libmtmd expect."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


class _File:
    """Collects the keys and tensors of a model file. :meth:`close` writes it."""

    def __init__(
        self, name: str, path: Path, arch: str, n_layer: int, n_embd: int, marks: Mapping[str, int] | None = None
    ) -> None:
        self.n_layer, self.n_embd, self._arch = n_layer, n_embd, arch
        self._rng = np.random.default_rng(zlib.crc32(name.encode()))
        self._writer = gguf.GGUFWriter(path, arch)
        self._writer.add_name(f"tiny {name}")
        self.key("block_count", n_layer)
        self.key("context_length", N_CTX_TRAIN)
        self.key("embedding_length", n_embd)
        self.key("attention.layer_norm_rms_epsilon", 1e-6)
        self._add_vocabulary(marks or {})

    def _add_vocabulary(self, marks: Mapping[str, int]) -> None:
        tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
        tokens += [mark.encode() for mark in marks]
        tokens += ["▁w%d".encode() % i for i in range(N_VOCAB - len(tokens))]
        writer = self._writer
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(N_VOCAB)])
        types = [2, 3, 3] + [6] * 256 + list(marks.values())
        writer.add_token_types(types + [1] * (N_VOCAB - len(types)))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)

    def add_chat_template(self, source: str) -> None:
        self._writer.add_chat_template(source)

    def add_eos(self) -> None:
        """Has texts end with EOS."""
        self._writer.add_add_eos_token(True)

    def key(self, name: str, value: bool | int | float | str | list[int] | list[bool]) -> None:
        """Adds a key of the architecture, with the type that llama.cpp expects."""
        add_key(self._writer, f"{self._arch}.{name}", value)

    def matrix(self, name: str, *shape: int, kind: str = "F16", gain: float = 1.0) -> None:
        """Adds random weights, scaled by the number of inputs. ``shape`` is in ggml's order."""
        values = self._rng.standard_normal(shape[::-1], dtype=np.float32) * (gain / shape[0] ** 0.5)
        quant = gguf.GGMLQuantizationType[kind]
        self._writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, quant), raw_dtype=quant)

    def vector(self, name: str, *shape: int, mean: float = 1.0, spread: float = 0.1) -> None:
        """Adds a norm, a bias or another small 32-bit tensor. ``name`` has its suffix."""
        values = mean + spread * self._rng.standard_normal(shape[::-1], dtype=np.float32)
        self._writer.add_tensor(name, values.astype(np.float32))

    def head(self, *, tied: bool = False, kind: str = "F16", norm: str = "output_norm") -> None:
        """Adds token embedding, last norm and output head."""
        self.matrix("token_embd", self.n_embd, N_VOCAB, kind=kind)
        self.vector(f"{norm}.weight", self.n_embd, mean=3.0)
        if not tied:
            self.matrix("output", self.n_embd, N_VOCAB, kind=kind)

    def attention_keys(self, n_head: int, n_kv: int | list[int], dim: int) -> None:
        self.key("attention.head_count", n_head)
        self.key("attention.head_count_kv", n_kv)
        self.key("attention.key_length", dim)
        self.key("attention.value_length", dim)
        self.key("rope.dimension_count", dim)
        self.key("rope.freq_base", 10000.0)

    def attention(
        self, i: int, n_head: int, n_kv: int, dim: int, *, kind: str = "F16", norms: bool = False, biases: bool = False
    ) -> None:
        self.matrix(f"blk.{i}.attn_q", self.n_embd, n_head * dim, kind=kind)
        if n_kv:
            self.matrix(f"blk.{i}.attn_k", self.n_embd, n_kv * dim, kind=kind)
            self.matrix(f"blk.{i}.attn_v", self.n_embd, n_kv * dim, kind=kind)
        self.matrix(f"blk.{i}.attn_output", n_head * dim, self.n_embd, kind=kind)
        if norms:
            self.vector(f"blk.{i}.attn_q_norm.weight", dim)
            self.vector(f"blk.{i}.attn_k_norm.weight", dim)
        if biases:
            for name, n in (("q", n_head), ("k", n_kv), ("v", n_kv)):
                self.vector(f"blk.{i}.attn_{name}.bias", n * dim, mean=0.0)

    def latent_attention_keys(self, kv_lora: int, rope: int, nope: int, value: int) -> None:
        """Keys and values of a token are computed from ``kv_lora`` latent values; ``rope`` of a key's are rotated."""
        self.key("attention.kv_lora_rank", kv_lora)
        self.key("attention.key_length", kv_lora + rope)
        self.key("attention.value_length", kv_lora)
        self.key("attention.key_length_mla", nope + rope)
        self.key("attention.value_length_mla", value)
        self.key("rope.dimension_count", rope)

    def latent_attention(self, i: int, n_head: int, kv_lora: int, rope: int, nope: int, value: int) -> None:
        """All of it but the queries."""
        self.matrix(f"blk.{i}.attn_kv_a_mqa", self.n_embd, kv_lora + rope)
        self.vector(f"blk.{i}.attn_kv_a_norm.weight", kv_lora)
        self.matrix(f"blk.{i}.attn_k_b", nope, kv_lora, n_head)
        self.matrix(f"blk.{i}.attn_v_b", kv_lora, value, n_head)
        self.matrix(f"blk.{i}.attn_output", n_head * value, self.n_embd)

    def ffn(self, i: int, n_ff: int, *, kind: str = "F16") -> None:
        self.matrix(f"blk.{i}.ffn_gate", self.n_embd, n_ff, kind=kind)
        self.matrix(f"blk.{i}.ffn_up", self.n_embd, n_ff, kind=kind)
        self.matrix(f"blk.{i}.ffn_down", n_ff, self.n_embd, kind=kind)

    def experts(self, i: int, n_expert: int, n_ff: int, *, kind: str) -> None:
        self.matrix(f"blk.{i}.ffn_gate_inp", self.n_embd, n_expert, kind="F32", gain=3.0)
        self.matrix(f"blk.{i}.ffn_gate_exps", self.n_embd, n_ff, n_expert, kind=kind)
        self.matrix(f"blk.{i}.ffn_up_exps", self.n_embd, n_ff, n_expert, kind=kind)
        self.matrix(f"blk.{i}.ffn_down_exps", n_ff, self.n_embd, n_expert, kind=kind)

    def dense_and_experts_keys(self) -> None:
        """The first layer is dense. The others have 8 experts, of which a token uses 2, and a shared one."""
        self.key("feed_forward_length", 512)
        self.key("leading_dense_block_count", 1)
        self.key("expert_count", 8)
        self.key("expert_used_count", 2)
        self.key("expert_shared_count", 1)
        self.key("expert_feed_forward_length", 160)
        self.key("expert_weights_scale", 1.0)
        self.key("expert_weights_norm", True)

    def shared_expert(self, i: int, n_ff: int, *, kind: str = "F16") -> None:
        self.matrix(f"blk.{i}.ffn_gate_shexp", self.n_embd, n_ff, kind=kind)
        self.matrix(f"blk.{i}.ffn_up_shexp", self.n_embd, n_ff, kind=kind)
        self.matrix(f"blk.{i}.ffn_down_shexp", n_ff, self.n_embd, kind=kind)

    def next_token(self, i: int) -> None:
        """Adds what a layer has that predicts the token after the next one. llama.cpp does not load that layer."""
        self.matrix(f"blk.{i}.nextn.eh_proj", 2 * self.n_embd, self.n_embd)
        self.norms(i, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")

    def mamba2_keys(self, inner: int, state: int, n_head: int) -> None:
        self.key("ssm.conv_kernel", 4)
        self.key("ssm.inner_size", inner)
        self.key("ssm.state_size", state)
        self.key("ssm.time_step_rank", n_head)
        self.key("ssm.group_count", 1)

    def mamba2(self, i: int, inner: int, state: int, n_head: int) -> None:
        conv = inner + 2 * state
        self.matrix(f"blk.{i}.ssm_in", self.n_embd, inner + conv + n_head)
        self.vector(f"blk.{i}.ssm_conv1d.weight", 4, conv, mean=0.0, spread=0.5)
        self.vector(f"blk.{i}.ssm_conv1d.bias", conv, mean=0.0)
        self.vector(f"blk.{i}.ssm_dt.bias", n_head, mean=-2.0, spread=1.0)
        self.vector(f"blk.{i}.ssm_a", 1, n_head, mean=-1.0)
        self.vector(f"blk.{i}.ssm_d", 1, n_head)
        self.vector(f"blk.{i}.ssm_norm.weight", inner, 1)
        self.matrix(f"blk.{i}.ssm_out", inner, self.n_embd)

    def norms(self, i: int, *names: str, mean: float = 1.0) -> None:
        for name in names:
            self.vector(f"blk.{i}.{name}.weight", self.n_embd, mean=mean)

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def _llama(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.attention_keys(6, 3, 64)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.attention(i, 6, 3, 64)
        file.ffn(i, 512)


def _gpt2(file: _File) -> None:
    n = file.n_embd
    file.key("feed_forward_length", 512)
    file.key("attention.head_count", 4)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.head()
    file.matrix("position_embd", n, N_CTX_TRAIN, kind="F32")
    file.vector("output_norm.bias", n, mean=0.0)
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        for name, inputs, outputs in (
            ("attn_qkv", n, 3 * n),
            ("attn_output", n, n),
            ("ffn_up", n, 512),
            ("ffn_down", 512, n),
        ):
            file.matrix(f"blk.{i}.{name}", inputs, outputs)
            file.vector(f"blk.{i}.{name}.bias", outputs, mean=0.0)
        for name in ("attn_norm", "ffn_norm"):
            file.vector(f"blk.{i}.{name}.bias", n, mean=0.0)


def _qwen3moe(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.key("expert_count", 16)
    file.key("expert_used_count", 4)
    file.key("expert_feed_forward_length", 128)
    file.attention_keys(6, 3, 64)
    file.head(kind="Q8_0")
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.attention(i, 6, 3, 64, kind="Q8_0", norms=True)
        file.experts(i, 16, 128, kind="Q4_0")


def _deepseek2(file: _File) -> None:
    n_head, rope, nope, value, q_lora, kv_lora = 4, 32, 64, 64, 128, 128
    file.dense_and_experts_keys()
    file.key("attention.head_count", n_head)
    file.key("attention.head_count_kv", 1)
    file.key("attention.q_lora_rank", q_lora)
    file.latent_attention_keys(kv_lora, rope, nope, value)
    file.key("rope.freq_base", 10000.0)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.matrix(f"blk.{i}.attn_q_a", file.n_embd, q_lora)
        file.vector(f"blk.{i}.attn_q_a_norm.weight", q_lora)
        file.matrix(f"blk.{i}.attn_q_b", q_lora, n_head * (nope + rope))
        file.latent_attention(i, n_head, kv_lora, rope, nope, value)
        if i == 0:
            file.ffn(i, 512)
            continue
        file.experts(i, 8, 160, kind="F16")
        file.shared_expert(i, 160)


def _deepseek4(file: _File) -> None:
    n_head, dim, rope, rank, n_ff, groups, n_streams = 8, 64, 32, 64, 128, 8, 4
    ratios = [0, 0, 4, 128]  # tokens that a cell of the compressed cache stands for
    index_head, index_dim = 64, 128  # llama.cpp knows no others
    file.key("feed_forward_length", n_ff)
    file.key("expert_count", 8)
    file.key("expert_used_count", 2)
    file.key("expert_shared_count", 1)
    file.key("expert_feed_forward_length", n_ff)
    file.key("expert_weights_scale", 1.0)
    file.key("expert_weights_norm", True)
    file.key("expert_gating_func", 4)
    file.key("swiglu_clamp_exp", 10.0)
    file.key("attention.head_count", n_head)
    file.key("attention.head_count_kv", 1)
    file.key("attention.key_length", dim)
    file.key("attention.value_length", dim)
    file.key("attention.q_lora_rank", rank)
    file.key("attention.sliding_window", 32)
    file.key("attention.output_group_count", groups)
    file.key("attention.output_lora_rank", 32)
    file.key("attention.compress_ratios", ratios)
    file.key("attention.compress_rope_freq_base", 160000.0)
    file.key("attention.indexer.head_count", index_head)
    file.key("attention.indexer.key_length", index_dim)
    file.key("attention.indexer.top_k", 131072)
    file.key("rope.dimension_count", rope)
    file.key("rope.freq_base", 10000.0)
    file.key("hyper_connection.count", n_streams)
    file.key("hyper_connection.sinkhorn_iterations", 2)
    file.key("hyper_connection.epsilon", 1e-6)
    file.key("hash_layer_count", 0)
    file.head()

    def connection(name: str, n: int, n_scales: int) -> None:
        file.matrix(f"{name}_fn", n_streams * file.n_embd, n, kind="F32")
        file.vector(f"{name}_base.weight", n, mean=0.0)
        file.vector(f"{name}_scale.weight", n_scales)

    def compressor(name: str, ratio: int, width: int) -> None:
        n = width * (2 if ratio == 4 else 1)  # overlapping windows
        file.matrix(f"{name}_kv", file.n_embd, n)
        file.matrix(f"{name}_gate", file.n_embd, n)
        file.matrix(f"{name}_ape", n, ratio, kind="F32")
        file.vector(f"{name}_norm.weight", width)

    connection("output_hc", n_streams, 1)
    for i, ratio in enumerate(ratios):
        file.norms(i, "attn_norm", "ffn_norm")
        file.matrix(f"blk.{i}.attn_q_a", file.n_embd, rank)
        file.vector(f"blk.{i}.attn_q_a_norm.weight", rank)
        file.matrix(f"blk.{i}.attn_q_b", rank, n_head * dim)
        file.matrix(f"blk.{i}.attn_kv", file.n_embd, dim)
        file.vector(f"blk.{i}.attn_kv_a_norm.weight", dim)
        file.vector(f"blk.{i}.attn_sinks.weight", n_head)
        file.matrix(f"blk.{i}.attn_output_a", n_head * dim // groups, 32, groups)
        file.matrix(f"blk.{i}.attn_output_b", groups * 32, file.n_embd)
        for name in ("attn", "ffn"):
            connection(f"blk.{i}.hc_{name}", (2 + n_streams) * n_streams, 3)
        if ratio:
            compressor(f"blk.{i}.attn_compressor", ratio, dim)
        if ratio == 4:
            compressor(f"blk.{i}.indexer_compressor", ratio, index_dim)
            file.matrix(f"blk.{i}.indexer.proj", file.n_embd, index_head)
            file.matrix(f"blk.{i}.indexer.attn_q_b", rank, index_head * index_dim)
        file.experts(i, 8, n_ff, kind="F16")
        file.vector(f"blk.{i}.exp_probs_b.bias", 8, mean=0.0)
        file.shared_expert(i, n_ff)


def _gpt_oss(file: _File) -> None:
    n_expert, n_ff = 8, 128
    file.key("feed_forward_length", n_ff)
    file.key("expert_count", n_expert)
    file.key("expert_used_count", 2)
    file.key("expert_feed_forward_length", n_ff)
    file.attention_keys(6, 3, 64)
    file.key("attention.sliding_window", 32)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "post_attention_norm")
        file.attention(i, 6, 3, 64, biases=True)
        file.vector(f"blk.{i}.attn_output.bias", file.n_embd, mean=0.0)
        file.vector(f"blk.{i}.attn_sinks.weight", 6)
        file.experts(i, n_expert, n_ff, kind="MXFP4")
        file.vector(f"blk.{i}.ffn_gate_inp.bias", n_expert, mean=0.0)
        for name, n in (("gate", n_ff), ("up", n_ff), ("down", file.n_embd)):
            file.vector(f"blk.{i}.ffn_{name}_exps.bias", n, n_expert, mean=0.0)


def _glm4moe(file: _File) -> None:
    file.dense_and_experts_keys()
    file.key("nextn_predict_layers", 1)
    file.attention_keys(6, 3, 64)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "post_attention_norm")
        file.attention(i, 6, 3, 64, biases=True)
        if i == 0:
            file.ffn(i, 512)
            continue
        file.experts(i, 8, 160, kind="F16")
        file.vector(f"blk.{i}.exp_probs_b.bias", 8, mean=0.0)
        file.shared_expert(i, 160)
    file.next_token(file.n_layer - 1)


def _qwen35moe(file: _File) -> None:
    n_k_head, n_v_head, dim = 2, 4, 64  # of linear attention
    file.key("feed_forward_length", 512)
    file.key("expert_count", 8)
    file.key("expert_used_count", 2)
    file.key("expert_feed_forward_length", 128)
    file.key("expert_shared_feed_forward_length", 128)
    file.key("nextn_predict_layers", 1)
    file.key("full_attention_interval", 2)
    file.attention_keys(4, 2, 64)
    file.key("rope.dimension_sections", [11, 11, 10, 0])
    file.key("ssm.conv_kernel", 4)
    file.key("ssm.inner_size", n_v_head * dim)
    file.key("ssm.state_size", dim)
    file.key("ssm.time_step_rank", n_v_head)
    file.key("ssm.group_count", n_k_head)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "post_attention_norm")
        if i % 2 == 1 or i == file.n_layer - 1:
            file.matrix(f"blk.{i}.attn_q", file.n_embd, 2 * 4 * 64)  # a gate for each head
            file.matrix(f"blk.{i}.attn_k", file.n_embd, 2 * 64)
            file.matrix(f"blk.{i}.attn_v", file.n_embd, 2 * 64)
            file.matrix(f"blk.{i}.attn_output", 4 * 64, file.n_embd)
            file.vector(f"blk.{i}.attn_q_norm.weight", 64)
            file.vector(f"blk.{i}.attn_k_norm.weight", 64)
        else:
            conv = (2 * n_k_head + n_v_head) * dim
            file.matrix(f"blk.{i}.attn_qkv", file.n_embd, conv)
            file.matrix(f"blk.{i}.attn_gate", file.n_embd, n_v_head * dim)
            file.vector(f"blk.{i}.ssm_conv1d.weight", 4, conv, mean=0.0, spread=0.5)
            file.vector(f"blk.{i}.ssm_dt.bias", n_v_head, mean=-2.0, spread=1.0)
            file.vector(f"blk.{i}.ssm_a", n_v_head, mean=-1.0)
            file.matrix(f"blk.{i}.ssm_beta", file.n_embd, n_v_head, kind="F32")
            file.matrix(f"blk.{i}.ssm_alpha", file.n_embd, n_v_head, kind="F32")
            file.vector(f"blk.{i}.ssm_norm.weight", dim)
            file.matrix(f"blk.{i}.ssm_out", n_v_head * dim, file.n_embd)
        file.matrix(f"blk.{i}.ffn_gate_inp", file.n_embd, 8, kind="F32", gain=3.0)
        file.matrix(f"blk.{i}.ffn_gate_up_exps", file.n_embd, 2 * 128, 8, kind="Q8_0")
        file.matrix(f"blk.{i}.ffn_down_exps", 128, file.n_embd, 8, kind="Q8_0")
        file.vector(f"blk.{i}.ffn_gate_inp_shexp.weight", file.n_embd, mean=0.0)
        file.shared_expert(i, 128)
    file.next_token(file.n_layer - 1)


def _qwen2vl(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.attention_keys(4, 2, 64)
    file.key("rope.dimension_sections", [8, 12, 12, 0])
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.attention(i, 4, 2, 64, biases=True)
        file.ffn(i, 512)


def _qwen3vl(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.attention_keys(6, 3, 64)
    file.key("rope.dimension_sections", [12, 10, 10, 0])
    file.key("n_deepstack_layers", 1)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.attention(i, 6, 3, 64, norms=True)
        file.ffn(i, 512)


def _gemma3n(file: _File) -> None:
    n_altup, per_layer, rank = 4, 256, 64  # llama.cpp knows no others
    file.key("feed_forward_length", 256)
    file.attention_keys(2, 1, 64)
    file.key("attention.sliding_window", 32)
    file.head(tied=True)
    file.matrix("altup_proj", file.n_embd, file.n_embd, n_altup - 1)
    file.matrix("altup_unembd_proj", file.n_embd, file.n_embd, n_altup - 1)
    file.matrix("per_layer_token_embd", per_layer * file.n_layer, N_VOCAB, gain=10.0)
    file.matrix("per_layer_model_proj", file.n_embd, per_layer * file.n_layer)
    file.vector("per_layer_proj_norm.weight", per_layer)
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm", "post_norm", "laurel_post_norm", "altup_router_norm")
        # Small, because errors of rounding would grow with each of so many layers.
        file.norms(i, "post_attention_norm", "post_ffw_norm", mean=0.5)
        file.attention(i, 2, 1, 64, norms=True)
        file.ffn(i, 256)
        file.matrix(f"blk.{i}.inp_gate", file.n_embd, per_layer)
        file.matrix(f"blk.{i}.proj", per_layer, file.n_embd)
        file.vector(f"blk.{i}.altup_correct_coef.weight", n_altup, n_altup, mean=0.0)
        file.vector(f"blk.{i}.altup_correct_scale.weight", file.n_embd)
        file.vector(f"blk.{i}.altup_predict_coef.weight", n_altup, n_altup * n_altup, mean=0.0)
        file.matrix(f"blk.{i}.altup_router", file.n_embd, n_altup, kind="F32")
        file.matrix(f"blk.{i}.laurel_l", file.n_embd, rank)
        file.matrix(f"blk.{i}.laurel_r", rank, file.n_embd)


def _gemma3(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.attention_keys(6, 3, 64)
    file.key("attention.sliding_window", 32)
    file.key("attention.sliding_window_pattern", 2)
    file.head(tied=True)
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        # These are large relative to the embedding. Otherwise a model with a tied head would repeat its input.
        file.norms(i, "post_attention_norm", "post_ffw_norm", mean=4.0)
        file.attention(i, 6, 3, 64, norms=True)
        file.ffn(i, 512)


def _gemma4(file: _File) -> None:
    n_shared, per_layer = 2, 128
    windows = [True, True, True, False, True, False]  # the last two share the caches of the two before them
    file.key("feed_forward_length", 512)
    file.attention_keys(4, 2, 128)
    file.key("attention.key_length_swa", 64)
    file.key("attention.value_length_swa", 64)
    file.key("rope.dimension_count_swa", 64)
    file.key("attention.sliding_window", 32)
    file.key("attention.sliding_window_pattern", windows)
    file.key("attention.shared_kv_layers", n_shared)
    file.key("embedding_length_per_layer_input", per_layer)
    file.head(tied=True)
    file.matrix("per_layer_token_embd", per_layer * file.n_layer, N_VOCAB, gain=10.0)
    file.matrix("per_layer_model_proj", file.n_embd, per_layer * file.n_layer)
    file.vector("per_layer_proj_norm.weight", per_layer)
    file.vector("rope_freqs.weight", 64)
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        file.norms(i, "post_attention_norm", "post_ffw_norm", "post_norm", mean=4.0)
        head = 64 if windows[i] else 128
        file.attention(i, 4, 2 if i < file.n_layer - n_shared else 0, head)
        file.vector(f"blk.{i}.attn_q_norm.weight", head)
        if i < file.n_layer - n_shared:
            file.vector(f"blk.{i}.attn_k_norm.weight", head)
        file.ffn(i, 512)
        file.matrix(f"blk.{i}.inp_gate", file.n_embd, per_layer)
        file.matrix(f"blk.{i}.proj", per_layer, file.n_embd)
        file.vector(f"blk.{i}.layer_output_scale.weight", 1)


def _mamba2(file: _File) -> None:
    file.key("feed_forward_length", 0)
    file.key("attention.head_count", 0)
    file.mamba2_keys(512, 64, 8)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm")
        file.mamba2(i, 512, 64, 8)


def _rwkv6(file: _File) -> None:
    n_embd, lora, decay, head, n_ff = file.n_embd, 64, 128, 64, 512
    file.key("feed_forward_length", n_ff)
    file.key("attention.head_count", 0)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.key("wkv.head_size", head)
    file.key("time_mix_extra_dim", lora)
    file.key("time_decay_extra_dim", decay)
    file.key("rescale_every_n_layers", 2)
    file.head()
    for name in ("output_norm", "token_embd_norm"):
        file.vector(f"{name}.bias", n_embd, mean=0.0)
    file.vector("token_embd_norm.weight", n_embd)
    for i in range(file.n_layer):
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            file.vector(f"blk.{i}.{name}.weight", n_embd)
            file.vector(f"blk.{i}.{name}.bias", n_embd, mean=0.0)
        file.matrix(f"blk.{i}.time_mix_w1", n_embd, 5 * lora)
        file.matrix(f"blk.{i}.time_mix_w2", lora, n_embd, 5)
        file.vector(f"blk.{i}.time_mix_lerp_x.weight", n_embd, mean=0.5)
        file.vector(f"blk.{i}.time_mix_lerp_fused.weight", n_embd, 1, 1, 5, mean=0.5)
        file.vector(f"blk.{i}.time_mix_first.weight", head, n_embd // head, mean=0.0)
        file.vector(f"blk.{i}.time_mix_decay.weight", n_embd, mean=0.0, spread=0.5)
        file.matrix(f"blk.{i}.time_mix_decay_w1", n_embd, decay)
        file.matrix(f"blk.{i}.time_mix_decay_w2", decay, n_embd)
        for name in ("key", "value", "receptance", "gate", "output"):
            file.matrix(f"blk.{i}.time_mix_{name}", n_embd, n_embd)
        for name in "kr":
            file.vector(f"blk.{i}.channel_mix_lerp_{name}.weight", n_embd, 1, 1, mean=0.5)
        file.matrix(f"blk.{i}.channel_mix_key", n_embd, n_ff)
        file.matrix(f"blk.{i}.channel_mix_value", n_ff, n_embd)
        file.matrix(f"blk.{i}.channel_mix_receptance", n_embd, n_embd)


def _rwkv7(file: _File) -> None:
    n_embd, lora = file.n_embd, 64
    file.key("feed_forward_length", 768)
    file.key("attention.head_count", 0)
    file.key("attention.layer_norm_epsilon", 1e-5)
    file.key("wkv.head_size", 64)
    for name in ("decay", "iclr", "value_residual_mix", "gate"):
        file.key(f"attention.{name}_lora_rank", lora)
    file.head()
    for name in ("output_norm", "token_embd_norm"):
        file.vector(f"{name}.bias", n_embd, mean=0.0)
    file.vector("token_embd_norm.weight", n_embd)
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "attn_norm_2", "time_mix_ln")
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            file.vector(f"blk.{i}.{name}.bias", n_embd, mean=0.0)
        for part in ("w", "a", "v", "g"):
            file.matrix(f"blk.{i}.time_mix_{part}1", n_embd, lora)
            file.matrix(f"blk.{i}.time_mix_{part}2", lora, n_embd)
            if part != "g":
                file.vector(f"blk.{i}.time_mix_{part}0.weight", n_embd, mean=0.0, spread=0.5)
        file.vector(f"blk.{i}.time_mix_lerp_fused.weight", n_embd, 1, 1, 6, mean=0.5)
        for name in ("k_k", "k_a"):
            file.vector(f"blk.{i}.time_mix_{name}.weight", n_embd)
        file.vector(f"blk.{i}.time_mix_r_k.weight", n_embd, mean=0.0)
        for name in ("key", "value", "receptance", "output"):
            file.matrix(f"blk.{i}.time_mix_{name}", n_embd, n_embd)
        file.vector(f"blk.{i}.channel_mix_lerp_k.weight", n_embd, 1, 1, mean=0.5)
        file.matrix(f"blk.{i}.channel_mix_key", n_embd, 768)
        file.matrix(f"blk.{i}.channel_mix_value", 768, n_embd)


def _kimi_linear(file: _File) -> None:
    n_head, dim, kv_lora, rope, nope, value = 2, 128, 128, 32, 64, 64
    n_kv = [0, 1] * (file.n_layer // 2)
    file.dense_and_experts_keys()
    file.key("expert_gating_func", 2)
    file.key("attention.head_count", [n_head] * file.n_layer)
    file.key("attention.head_count_kv", n_kv)
    file.latent_attention_keys(kv_lora, rope, nope, value)
    file.key("ssm.conv_kernel", 4)
    file.key("kda.head_dim", dim)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        if n_kv[i]:
            file.matrix(f"blk.{i}.attn_q", file.n_embd, n_head * (nope + rope))
            file.latent_attention(i, n_head, kv_lora, rope, nope, value)
        else:
            for name in "qkv":
                file.matrix(f"blk.{i}.attn_{name}", file.n_embd, n_head * dim)
                file.vector(f"blk.{i}.ssm_conv1d_{name}.weight", 4, 1, n_head * dim, mean=0.0, spread=0.5)
            file.vector(f"blk.{i}.ssm_a", 1, n_head, mean=-1.0)
            file.vector(f"blk.{i}.ssm_dt.bias", n_head * dim, mean=-2.0, spread=1.0)
            for name in "fg":
                file.matrix(f"blk.{i}.ssm_{name}_a", file.n_embd, dim)
                file.matrix(f"blk.{i}.ssm_{name}_b", dim, n_head * dim)
            file.matrix(f"blk.{i}.ssm_beta", file.n_embd, n_head, kind="F32")
            file.vector(f"blk.{i}.ssm_norm.weight", dim)
            file.matrix(f"blk.{i}.attn_output", n_head * dim, file.n_embd)
        if i == 0:
            file.ffn(i, 512)
            continue
        file.experts(i, 8, 160, kind="F16")
        file.vector(f"blk.{i}.exp_probs_b.bias", 8, mean=0.0)
        file.shared_expert(i, 160)


def _lfm2(file: _File) -> None:
    n_kv = [0, 2] * (file.n_layer // 2)
    file.key("feed_forward_length", 512)
    file.key("shortconv.l_cache", 3)
    file.attention_keys(4, n_kv, file.n_embd // 4)
    file.head(tied=True, norm="token_embd_norm")
    for i in range(file.n_layer):
        file.norms(i, "attn_norm", "ffn_norm")
        if n_kv[i]:
            file.attention(i, 4, n_kv[i], file.n_embd // 4, norms=True)
        else:
            file.vector(f"blk.{i}.shortconv.conv.weight", 3, file.n_embd, mean=0.0, spread=0.5)
            file.matrix(f"blk.{i}.shortconv.in_proj", file.n_embd, 3 * file.n_embd)
            file.matrix(f"blk.{i}.shortconv.out_proj", file.n_embd, file.n_embd)
        file.ffn(i, 512)


def _falcon_h1(file: _File) -> None:
    file.key("feed_forward_length", 512)
    file.attention_keys(6, 3, 64)
    file.mamba2_keys(512, 64, 8)
    file.head()
    for i in range(file.n_layer):
        file.norms(i, "attn_norm")
        file.vector(f"blk.{i}.ffn_norm", file.n_embd)
        file.attention(i, 6, 3, 64)
        file.mamba2(i, 512, 64, 8)
        file.ffn(i, 512)


@dataclass(frozen=True)
class Tiny:
    """An entry of :data:`ARCHS`: the properties of a model, and the function that makes it."""

    about: str
    arch: str
    n_layer: int
    n_embd: int
    fill: Callable[[_File], None]


ARCHS: dict[str, Tiny] = {
    "llama": Tiny("dense", "llama", 4, 256, _llama),
    "gpt2": Tiny("an embedding for each position", "gpt2", 4, 256, _gpt2),
    "qwen3moe": Tiny("experts, quantised", "qwen3moe", 4, 256, _qwen3moe),
    "deepseek2": Tiny("latent attention, shared experts, a dense first layer", "deepseek2", 4, 256, _deepseek2),
    "deepseek4": Tiny("a sliding and a compressed KV cache in each layer", "deepseek4", 4, 512, _deepseek4),
    "gpt-oss": Tiny("experts with biases in 4-bit floats, attention sinks", "gpt-oss", 4, 256, _gpt_oss),
    "glm4moe": Tiny("chosen with a bias, a last layer that is not loaded", "glm4moe", 5, 256, _glm4moe),
    "qwen35moe": Tiny("hybrid: linear and gated attention, gate and up in one", "qwen35moe", 5, 256, _qwen35moe),
    "qwen2vl": Tiny("positions of images in three dimensions", "qwen2vl", 4, 256, _qwen2vl),
    "qwen3vl": Tiny("images that are added behind the first layer too", "qwen3vl", 4, 256, _qwen3vl),
    "gemma3n": Tiny(
        "four states for each token, layers that share the KV cache of others", "gemma3n", 22, 256, _gemma3n
    ),
    "gemma3": Tiny("sliding window on every other layer, tied embedding", "gemma3", 4, 256, _gemma3),
    "gemma4": Tiny("layers that share the KV cache of others, embeddings by layer", "gemma4", 6, 256, _gemma4),
    "mamba2": Tiny("recurrent, state space", "mamba2", 4, 256, _mamba2),
    "rwkv6": Tiny("recurrent, products with weights in another shape", "rwkv6", 4, 256, _rwkv6),
    "rwkv7": Tiny("recurrent, linear attention", "rwkv7", 4, 256, _rwkv7),
    "kimi-linear": Tiny("hybrid: linear and latent attention in turns", "kimi-linear", 4, 256, _kimi_linear),
    "lfm2": Tiny("hybrid: convolutions and attention in turns", "lfm2", 4, 256, _lfm2),
    "falcon-h1": Tiny("hybrid: state space and attention in each layer", "falcon-h1", 4, 256, _falcon_h1),
}


def make(
    name: str,
    path: Path,
    *,
    n_layer: int = 0,
    chat_template: str = "",
    marks: Mapping[str, int] | None = None,
    add: Callable[[_File], None] = lambda file: None,
) -> None:
    """Writes the model ``name`` of :data:`ARCHS` to ``path``.

    :param n_layer: 0 for as many layers as :data:`ARCHS` has.
    :param marks: further tokens, with their types as GGUF has them: 3 for a control token, 4 for a user-defined one.
    :param add: adds further keys and tensors.
    """
    tiny = ARCHS[name]
    file = _File(name, path, tiny.arch, n_layer or tiny.n_layer, tiny.n_embd, marks)
    if chat_template:
        file.add_chat_template(chat_template)
    tiny.fill(file)
    add(file)
    file.close()
