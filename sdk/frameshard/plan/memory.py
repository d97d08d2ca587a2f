"""VRAM beside the weights: the KV cache by the shapes in a GGUF header, and an estimate of the compute buffers.

Sizes are bytes. How much VRAM a shape takes is the shard device's to say (:func:`frameshard.native.lay_out`).
"""

from __future__ import annotations

from dataclasses import dataclass

from frameshard import native
from frameshard.errors import Unsupported
from frameshard.plan.header import GGML_NUMBERS
from frameshard.plan.layout import lay_out
from frameshard.plan.model import Model
from frameshard.plan.profile import KvType, kv_value_bytes
from frameshard.plan.workload import Workload

_PAGE = 256  # cells in which llama.cpp makes its cache
_KV_BLOCK = 32  # values that share a scale in both quantised types
_VERIFIED = 32  # most rows in which drafted tokens are verified, of all sequences together
# Compute buffer of a layer relative to the sum of tensors in estimate_fixed(): 1.0 to 1.25 for 11 models of 10
# architectures with 64 to 1,024 tokens.
_LIVE = 1.3
DRIVER_BYTES = 512 << 20
"""VRAM of a GPU's driver context and libraries, about; exact once an engine runs."""


def check_kv_type(model: Model, kv_type: KvType) -> None:
    """
    :raises Unsupported: llama.cpp has no KV cache of this type for the model.
    """
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
    """What graphs read of the KV cache for ``n_tokens`` of all sequences together, and of the recurrent state of
    ``n_seq``. An upper bound: sliding windows and layers that share a cache count in full."""
    values = sum(keys + values for keys, values in _kv_values(model))
    cells = -(-n_tokens // _PAGE) * _PAGE
    return int(values * cells * kv_value_bytes(kv_type)) + 4 * _recurrent_values(model) * n_seq


def _kv_values(model: Model) -> list[tuple[int, int]]:
    """Values of a token's keys and values in the KV cache, by layer."""
    heads = model.by_layer("attention.head_count")
    kv_heads = model.by_layer("attention.head_count_kv", -1)
    kv_heads = tuple(kv if kv >= 0 else head for kv, head in zip(kv_heads, heads, strict=True))
    head_dim = model.n_embd // max(max(heads, default=1), 1)
    keys = max(model.integer(f"attention.key_length{suffix}", head_dim) for suffix in ("", "_swa"))
    values = max(model.integer(f"attention.value_length{suffix}", head_dim) for suffix in ("", "_swa"))
    if model.integer("attention.key_length_mla"):
        values = 0  # latent attention reads its values out of the keys
    return [(heads * keys, heads * values) for heads in kv_heads]


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


def estimate_fixed(model: Model, device: str, workload: Workload, overhead_bytes: int = 0) -> int:
    """VRAM that depends neither on placement nor on the context in use, for planning without loading: core, scratch,
    compute buffer and ``overhead_bytes`` (driver context). Once a model is loaded, the shard device's statistics give
    the exact figure.

    :param device: name of the inner device.
    """
    n_seq, n_ubatch = workload.n_parallel, workload.n_ubatch
    cells = -(-workload.n_ctx // _PAGE) * _PAGE
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
    largest_kv = max(map(sum, _kv_values(model)), default=0)
    n_masks = 0 if not largest_kv else 2 if model.integer("attention.sliding_window") else 1
    mask = 2 * n_tokens * cells * n_masks
    logits = 4 * model.n_vocab * logits_rows(n_seq, n_ubatch, can_speculate=not _recurrent_values(model))
    # The head comes last and reuses the memory of all layers' activations but the last layer's.
    graph = mask + max(round(activations), logits + 12 * n_tokens * model.n_embd) + 64 * n_tokens
    # For prefill ggml-cuda converts a layer's quantised KV cache to 16 bits.
    converted = 2 * largest_kv * cells * n_seq if workload.kv_type != "f16" and device != native.EMULATED else 0
    beside = native.lay_out(device, (), buffers=[graph + converted], overhead_bytes=overhead_bytes)
    return lay_out(model, device).sizes.fixed_bytes + beside.fixed_bytes


@dataclass(frozen=True)
class Context:
    """Bytes of the KV cache (and of recurrent states): those ``used``, all that there may ever be (``whole``), and the
    largest layer's share of these (``window``). What is used is in VRAM as far as it fits beside the ring; the rest
    waits in host memory and passes through the window in every graph."""

    used: int = 0
    whole: int = 0
    window: int = 0
    kv_type: KvType = "f16"


def estimate_context(model: Model, device: str, workload: Workload) -> Context:
    """The context of a workload's sequences, which hold ``n_prompt`` tokens each.

    :param device: name of the inner device.
    """
    n_seq, kv_type = workload.n_parallel, workload.kv_type
    cells = -(-workload.n_ctx // _PAGE) * _PAGE
    used = min(workload.n_prompt, cells)
    number = GGML_NUMBERS[kv_type.upper()]
    kv = [
        native.KvShape(layer, number, row, cells, n_seq, used)
        for layer, rows in enumerate(_kv_values(model))
        for row in rows
        if row
    ]
    state = -(-_recurrent_values(model) // max(model.n_layer, 1))
    if state:
        kv += [native.KvShape(i, GGML_NUMBERS["F32"], state, n_seq, 1, n_seq) for i in range(model.n_layer)]
    sizes = native.lay_out(device, (), kv=kv)
    return Context(sizes.kv_used_bytes, sizes.kv_bytes, sizes.kv_window_bytes, kv_type)


def logits_rows(n_parallel: int, n_ubatch: int, *, can_speculate: bool) -> int:
    """Rows of logits that one graph may yield: one for each sequence, or more where drafted tokens are verified."""
    return max(n_parallel, min(_VERIFIED, n_ubatch)) if can_speculate else n_parallel
