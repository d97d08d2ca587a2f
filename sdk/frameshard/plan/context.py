"""VRAM beside the weights: the KV cache, and what estimates of compute buffers add. Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass

from frameshard.errors import Unsupported
from frameshard.plan.layout import _padded, _rounded, lay_out
from frameshard.plan.model import Model
from frameshard.plan.profile import KvType, kv_value_bytes

_KV_BLOCK = 32  # values that share a scale in both quantised types
_VERIFIED = 32  # most rows in which drafted tokens are verified, of all sequences together
# What of the tensors in a layer's graph is live at once and lies apart, as the compute buffers of 11 models of 10
# architectures have it with 64 to 1,024 tokens: 1.0 to 1.25 of the sum in estimate_fixed().
_LIVE = 1.3
DRIVER_BYTES = 512 << 20
"""What a GPU's driver context and libraries hold of a budget, about; exact once an engine runs."""


def check_kv_type(model: Model, kv_type: KvType) -> None:
    """:raises Unsupported: llama.cpp cannot keep this model's keys and values so."""
    if kv_type == "f16":
        return
    n_head, sizes = model.integer("attention.head_count"), []
    for name in ("key_length", "value_length"):
        sizes.append(model.integer(f"attention.{name}", model.n_embd // max(n_head, 1)))
        sizes.append(model.integer(f"attention.{name}_swa", sizes[-1]))
    odd = next((size for size in sizes if size % _KV_BLOCK), 0)
    if n_head and odd:
        raise Unsupported(
            f"{kv_type} keeps keys and values in blocks of {_KV_BLOCK}, which heads of {odd} are no multiple of: load "
            "this model with kv_type f16",
            kv_type=kv_type,
            head_size=odd,
        )
    if model.arch == "grok":
        raise Unsupported(
            f"{kv_type} needs flash attention, which {model.arch} models do without: load this one with kv_type f16",
            kv_type=kv_type,
            arch=model.arch,
        )


def kv_bytes(model: Model, n_tokens: int, n_seq: int = 1, kv_type: KvType = "f16") -> int:
    """KV cache for ``n_tokens`` of all sequences together, and recurrent state of ``n_seq``. An upper bound: sliding
    windows and layers that share a cache count in full."""
    cells = -(-n_tokens // 256) * 256
    return int(sum(_kv_values(model)) * cells * kv_value_bytes(kv_type)) + 4 * _recurrent_values(model) * n_seq


def _kv_values(model: Model) -> list[int]:
    """Keys and values of a token, by layer."""
    heads = model.by_layer("attention.head_count")
    kv_heads = model.by_layer("attention.head_count_kv", -1)
    kv_heads = tuple(kv if kv >= 0 else head for kv, head in zip(kv_heads, heads, strict=True))
    head_dim = model.n_embd // max(max(heads, default=1), 1)
    keys = max(model.integer(f"attention.key_length{suffix}", head_dim) for suffix in ("", "_swa"))
    values = max(model.integer(f"attention.value_length{suffix}", head_dim) for suffix in ("", "_swa"))
    if model.integer("attention.key_length_mla"):
        values = 0  # latent attention reads its values out of the keys
    return [heads * (keys + values) for heads in kv_heads]


def _recurrent_values(model: Model) -> int:
    """Values of recurrent state of one sequence, in all layers."""
    n_embd, conv = model.n_embd, max(model.integer("ssm.conv_kernel") - 1, 0)
    inner, state, groups = (model.integer(f"ssm.{key}") for key in ("inner_size", "state_size", "group_count"))
    n_head = max(model.integer("attention.head_count"), 1)
    if head_size := model.integer("wkv.head_size"):
        return (2 * n_embd + n_embd * head_size) * model.n_layer
    if cache := model.integer("shortconv.l_cache"):
        return n_embd * (cache - 1) * model.n_layer
    if head_dim := model.integer("kda.head_dim"):
        return (3 * conv * head_dim + head_dim * head_dim) * n_head * model.n_layer
    return (conv * (inner + 2 * groups * state) + inner * state) * model.n_layer


def estimate_fixed(
    model: Model,
    n_ctx: int,
    n_ubatch: int = 512,
    n_seq: int = 1,
    *,
    kv_type: KvType = "f16",
    overhead_bytes: int = 0,
    unit_bytes: int = 1,
) -> int:
    """VRAM that depends neither on placement nor on the context in use, for planning without loading: core, scratch,
    compute buffer and ``overhead_bytes`` (driver context), each in units of ``unit_bytes``. Each of ``n_seq`` sequences
    has a context of ``n_ctx`` tokens. Once a model is loaded, the device's statistics give the exact figure."""
    cells = -(-n_ctx // 256) * 256
    n_ff = model.integer("feed_forward_length")
    if model.n_expert_used:
        dense = any(tensor.name.endswith(".ffn_up.weight") for tensor in model.tensors)
        experts = model.n_expert_used * (model.integer("expert_feed_forward_length", n_ff) + model.n_embd)
        n_ff = max(n_ff, experts) if dense else experts
    n_tokens = min(n_ubatch, cells * n_seq)
    query = model.integer("attention.head_count") * model.integer("attention.key_length")
    recurrent = 6 * model.integer("ssm.inner_size") + (10 * model.n_embd if model.integer("wkv.head_size") else 0)
    activations = _LIVE * 4 * n_tokens * (4 * model.n_embd + 2 * n_ff + 2 * query + recurrent)
    # Of attention, in 16 bits; with sliding windows there is a second one.
    n_masks = 0 if not any(_kv_values(model)) else 2 if model.integer("attention.sliding_window") else 1
    mask = 2 * n_tokens * cells * n_masks
    logits = 4 * model.n_vocab * logits_rows(n_seq, n_ubatch, can_speculate=not _recurrent_values(model))
    # The head comes last and takes the place of the layers' activations, but for the last layer's.
    graph = mask + max(round(activations), logits + 12 * n_tokens * model.n_embd) + 64 * n_tokens
    core = sum(_padded(tensor, tensor.n_bytes) for tensor in model.core.tensors) if model.core else 0
    # For prompts ggml-cuda writes out a layer's quantised keys and values in 16 bits.
    written_out = 2 * max(_kv_values(model), default=0) * cells * n_seq if kv_type != "f16" and unit_bytes > 1 else 0
    parts = (core, lay_out(model).scratch, graph + written_out)
    return overhead_bytes + sum(_rounded(part, unit_bytes) for part in parts)


@dataclass(frozen=True)
class Context:
    """Bytes of keys and values (and recurrent states): those ``used``, all that there may ever be, and the largest
    layer's share of these (``window``). What is used is in VRAM as far as it fits beside the ring; the rest waits in
    host memory and passes through the window in every graph."""

    used: int = 0
    whole: int = 0
    window: int = 0
    kv_type: KvType = "f16"


def estimate_context(
    model: Model, n_ctx: int, n_used: int, n_seq: int = 1, *, kv_type: KvType = "f16", unit_bytes: int = 1
) -> Context:
    """The context of ``n_seq`` sequences that have room for ``n_ctx`` tokens each and hold ``n_used``."""
    each = -(-n_ctx // 256) * 256
    step = 256
    while 16 * step <= n_used:  # as cells_to_hold of the shard device
        step *= 2
    held = min(-(-n_used // step) * step, each)
    layers = max(model.n_layer, 1)
    used, whole = (
        layers * _rounded(-(-kv_bytes(model, cells * n_seq, n_seq, kv_type) // layers), unit_bytes)
        for cells in (held, each)
    )
    keys_and_values = int(max(_kv_values(model), default=0) * each * kv_value_bytes(kv_type))
    largest = max(keys_and_values, 4 * _recurrent_values(model) // layers) * n_seq
    return Context(used, whole, _rounded(largest, unit_bytes), kv_type)


def logits_rows(n_parallel: int, n_ubatch: int, *, can_speculate: bool) -> int:
    """Rows of logits that one graph may yield: one for each sequence, or more where drafted tokens are verified."""
    return max(n_parallel, min(_VERIFIED, n_ubatch)) if can_speculate else n_parallel
