"""VRAM that is not for weights: the KV cache, from the shapes in a GGUF header, and an estimate of the compute buffers.

Sizes are bytes. The shard device computes how much VRAM a shape takes (:func:`frameshard.native.lay_out`).
"""

from __future__ import annotations

from frameshard import native
from frameshard.errors import Unsupported
from frameshard.plan.header import GGML_NUMBERS
from frameshard.plan.layout import lay_out
from frameshard.plan.model import Model
from frameshard.plan.profile import KvType, kv_value_bytes
from frameshard.plan.steps import Steps, floor_step, most_step, step_sizes
from frameshard.plan.windows import sliding_cells, step_limit
from frameshard.plan.workload import Workload
from frameshard.records import record

_PAGE = 256  # llama.cpp makes the number of KV cells a multiple of this
_KV_BLOCK = 32  # in both quantised types so many values share a scale
_VERIFIED = 32  # the most rows of logits in which drafted tokens are verified, all sequences together
# The most that a compute buffer is, relative to the sum of a layer's tensors in _graph_bytes(). Measured: 1.0 to 1.25
# with 11 models of 10 architectures and 64 to 1,024 tokens; 1.1 with 128 experts, as little as 0.5 with a few.
_LIVE = 1.3
# Of an expert whose feed-forward network is wider than the model, a gate, an up projection and their product are alive
# together. Measured: 3.0 times the width for each expert in use, with _LIVE 3.25.
_WIDE = 2.5
# A layer's recurrent states of all sequences in a graph, as they are read and as they are written. Measured: 1.0 with
# Mamba 2 and Falcon H1, 2.0 with Kimi Linear and RWKV.
_STATES = 2
# How much more a graph takes than in a layout of its own: llama.cpp lays its compute buffer out for the largest graph,
# in which the tensors of a smaller one share less memory. Measured: 1.55 with minitron-8b, 1.0 with qwen3-30b-a3b.
_SPREAD = 1.3
# llama.cpp at our pin writes states of further sequences of PLaMo 2 into the cells of others, and aborts where there
# are none. CogVLM computes logits of all tokens, and those of the first ones are returned.
_MOST_SEQUENCES = {"plamo2": 2, "cogvlm": 0}
NOT_ESTIMATED = frozenset({"deepseek4"})
"""Architectures whose compute buffers are larger than estimated, because they have tensors of their own."""
DRIVER_BYTES = 512 << 20
"""The approximate VRAM of a GPU's driver context and libraries. A running engine measures it."""


def check_sequences(model: Model, n_parallel: int) -> None:
    """Checks that llama.cpp gives each of so many sequences its own results.

    :raises Unsupported: it does not.
    """
    most = _MOST_SEQUENCES.get(model.arch, n_parallel)
    if most == 0:
        raise Unsupported(
            f"llama.cpp returns logits of other tokens than were asked for with {model.arch}: take another model"
        )
    if n_parallel > most:
        raise Unsupported(
            f"llama.cpp mixes up the states of more than {most} sequences of {model.arch}: load this model with"
            f" n_parallel {most}",
            n_parallel=most,
        )


def n_positions(model: Model) -> int | None:
    """The positions of a model with a learned embedding of each (GPT-2, StarCoder, MPT). It has no others; llama.cpp
    ends the process at the first token beyond them. ``None``: the model has any number."""
    return next((tensor.shape[1] for tensor in model.tensors if tensor.name == "position_embd.weight"), None)


def longest_context(model: Model, n_ctx: int) -> int:
    """The longest context, of at most ``n_ctx`` tokens, that the model has positions for."""
    positions = n_positions(model)
    return n_ctx if positions is None else min(n_ctx, positions // _PAGE * _PAGE)


def check_context(model: Model, n_ctx: int) -> None:
    """Checks that the model has positions for a context of so many tokens.

    :raises Unsupported: it has not.
    """
    longest = longest_context(model, n_ctx)
    if n_ctx > longest:
        raise Unsupported(
            f"this model has embeddings for {n_positions(model)} positions: load it with n_ctx {longest}", n_ctx=longest
        )


def check_kv_type(model: Model, kv_type: KvType) -> None:
    """Checks that the model can have a KV cache of this type.

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


def kv_bytes(model: Model, n_tokens: int, n_seq: int = 1, kv_type: KvType = "f16", n_sliding: int = 0) -> int:
    """The bytes of KV cache and recurrent state of so many tokens.

    :param n_tokens: tokens in the KV cache, all sequences together.
    :param n_seq: sequences, each with a recurrent state.
    :param n_sliding: the cells of a sequence in layers with a sliding window; 0: all.
    """
    cells = -(-n_tokens // _PAGE) * _PAGE
    full, sliding = cell_bytes(model, kv_type)
    states = _recurrent_values(model) * len(model.recurrent_layers)
    return int(full * cells + sliding * min(cells, n_sliding * n_seq or cells)) + 4 * states * n_seq


def cell_bytes(model: Model, kv_type: KvType = "f16") -> tuple[float, float]:
    """The bytes of a token's keys and values: in layers without a sliding window, and in those with one."""
    values = _kv_values(model)
    sliding = sum(sum(rows) for layer, rows in values.items() if layer in model.sliding_layers)
    full = sum(map(sum, values.values())) - sliding
    return full * kv_value_bytes(kv_type), sliding * kv_value_bytes(kv_type)


def _kv_values(model: Model) -> dict[int, tuple[int, int]]:
    """For each layer that keeps them, the numbers of values in a token's keys and in its values."""
    heads = model.by_layer("attention.head_count")
    kv_heads = model.by_layer("attention.head_count_kv", -1)
    kv_heads = tuple(kv if kv >= 0 else head for kv, head in zip(kv_heads, heads, strict=True))
    head_dim = model.n_embd // max(max(heads, default=1), 1)
    plain = [model.integer(f"attention.{part}_length", head_dim) for part in ("key", "value")]
    sliding = [
        model.integer(f"attention.{part}_length_swa") or size
        for part, size in zip(("key", "value"), plain, strict=True)
    ]
    if not model.sliding_layers:  # it is not known which layers have a window
        plain = [max(sizes) for sizes in zip(plain, sliding, strict=True)]
    if model.integer("attention.key_length_mla"):
        plain[1] = sliding[1] = 0  # latent attention computes the values from the keys
    found = {}
    for layer in sorted(model.cached_layers):
        keys, values = sliding if layer in model.sliding_layers else plain
        found[layer] = kv_heads[layer] * keys, kv_heads[layer] * values
    return found


def _recurrent_values(model: Model) -> int:
    """The number of values in the recurrent state of one sequence in a layer that has one."""
    n_embd, conv = model.n_embd, max(model.integer("ssm.conv_kernel") - 1, 0)
    inner, state, groups = (model.integer(f"ssm.{key}") for key in ("inner_size", "state_size", "group_count"))
    n_head = max(model.integer("attention.head_count"), 1)
    if head_size := model.integer("wkv.head_size"):
        return 2 * n_embd + n_embd * head_size
    if cache := model.integer("shortconv.l_cache"):
        return n_embd * (cache - 1)
    if head_dim := model.integer("kda.head_dim"):
        return (3 * conv * head_dim + head_dim * head_dim) * n_head
    return conv * (inner + 2 * groups * state) + inner * state


def fixed_vram(model: Model, device: str, overhead_bytes: int = 0) -> int:
    """The VRAM that depends neither on placements, nor on the context, nor on the graph: core, scratch and
    ``overhead_bytes``.

    :param device: the name of the inner device.
    :param overhead_bytes: VRAM of the driver's context.
    """
    return lay_out(model, device).sizes.fixed_bytes + overhead_bytes


def estimate_floor(model: Model, workload: Workload, *, images: bool = False) -> int:
    """Estimates the floor on a GPU, without the driver's context: whether a GPU has room for the model at all.

    :param images: the model reads images, too.
    """
    device = "CUDA0"  # sizes are the same on all GPUs
    window = estimate_context(model, device, workload).window
    steps = estimate_steps(model, device, workload, images=images)
    return fixed_vram(model, device) + steps.floor_bytes + lay_out(model, device).least_bytes + window


def estimate_steps(model: Model, device: str, workload: Workload, *, images: bool = False) -> Steps:
    """Estimates the compute buffers of graphs. It is for plans without loading the model. With a loaded model, the
    shard device's statistics have the exact figures.

    :param device: the name of the inner device.
    :param images: the model reads images, too.
    """

    def graph_bytes(n_tokens: int, factor: float = 1.0) -> int:
        return _granular(device, round(factor * _graph_bytes(model, device, workload, n_tokens)))

    if workload.n_ubatch:
        # A step that the sequences do not share evenly was measured to take no more than the next larger one that they
        # do.
        even = -(-workload.n_ubatch // workload.n_parallel) * workload.n_parallel
        most_bytes = graph_bytes(even)
        return Steps(graph_bytes(workload.n_parallel), most_bytes, ((workload.n_ubatch, most_bytes),))
    least = floor_step(workload.n_parallel, images=images)
    limit = step_limit(model, workload.n_ctx, exact=workload.exact)
    most = most_step(workload.n_ctx, least, workload.host_budget_bytes, limit)
    floor_bytes = _granular(device, _floor_graph_bytes(model, device, workload, least, most))
    most_bytes, pool = graph_bytes(most), lay_out(model, device).sizes.pool_share
    sizes = []
    for n_tokens in step_sizes(least, most):
        n_bytes = min(graph_bytes(n_tokens, _SPREAD if most > least else 1.0), most_bytes)
        sizes.append((n_tokens, n_bytes + _granular(device, round(pool * max(n_bytes - floor_bytes, 0)))))
    return Steps(graph_bytes(workload.n_parallel), floor_bytes, tuple(sizes), workload.n_ctx)


def _floor_graph_bytes(model: Model, device: str, workload: Workload, least: int, most: int) -> int:
    """Estimates the compute buffers that the floor has room for, as a launch makes them: of a step of ``least`` tokens,
    and some for the logits of all rows, whose graph is laid out less tightly in a context for ``most`` tokens."""
    floor_bytes = _graph_bytes(model, device, workload, least)
    if most <= least:
        return floor_bytes
    per_token = (_graph_bytes(model, device, workload, most) - floor_bytes) / (most - least)
    n_rows = logits_rows(workload.n_parallel, most, can_speculate=not model.recurrent_layers)
    return floor_bytes + floor_spread(per_token, n_rows)


def floor_spread(per_token: float, n_rows: int) -> int:
    """The bytes that the floor has beside its small step for the graph with the logits of all rows: logits may take
    most of a small step, and that graph is laid out less tightly in a large context.

    :param per_token: the bytes that each further token of a step takes.
    :param n_rows: the most rows of logits.
    """
    return int(2 * per_token * n_rows)


def _granular(device: str, n_bytes: int) -> int:
    """The bytes that an allocation of ``n_bytes`` takes."""
    return native.lay_out(device, (), buffers=[n_bytes]).fixed_bytes if n_bytes else 0


def _graph_bytes(model: Model, device: str, workload: Workload, n_tokens: int) -> int:
    """Estimates the compute buffer of a graph of at most ``n_tokens`` tokens."""
    n_seq = workload.n_parallel
    cells = -(-workload.n_ctx // _PAGE) * _PAGE
    n_ff = model.integer("feed_forward_length")
    between: float = 2 * n_ff
    if model.n_expert_used:
        dense = any(tensor.name.endswith(".ffn_up.weight") for tensor in model.tensors)
        n_ff_expert = model.integer("expert_feed_forward_length", n_ff)
        experts = model.n_expert_used * max(_WIDE * n_ff_expert, n_ff_expert + model.n_embd)
        between = max(between, experts) if dense else experts
    n_tokens = min(n_tokens, cells * n_seq)
    query = model.integer("attention.head_count") * model.integer("attention.key_length")
    recurrent = 6 * model.integer("ssm.inner_size") + (10 * model.n_embd if model.integer("wkv.head_size") else 0)
    of_a_layer = 4 * model.n_embd + between + 2 * query + recurrent
    # Embeddings by layer are looked up, scaled and summed before the first layer.
    activations = _LIVE * 4 * n_tokens * max(of_a_layer, 3 * model.embedding_by_layer)
    largest_kv = max(map(sum, _kv_values(model).values()), default=0)
    logits = 4 * model.n_vocab * logits_rows(n_seq, n_tokens, can_speculate=not model.recurrent_layers)
    states = _recurrent_values(model) * min(n_seq, n_tokens) if model.recurrent_layers else 0
    # The output head is last. It reuses the memory of the activations, except for those of the last layer.
    graph = (
        mask_bytes(model, n_tokens, cells, _sliding_cells(model, workload))
        + _STATES * 4 * states
        + max(round(activations), logits + 12 * n_tokens * model.n_embd)
        + 64 * n_tokens
    )
    # In a prefill, ggml-cuda converts a layer's quantised KV cache to 16 bits.
    converted = 2 * largest_kv * cells * n_seq if workload.kv_type != "f16" and device != native.EMULATED else 0
    return graph + converted


def _sliding_cells(model: Model, workload: Workload) -> int:
    return sliding_cells(model, workload.n_ctx, workload.n_ubatch, exact=workload.exact)


def mask_bytes(model: Model, n_tokens: int, n_cells: int, n_sliding: int) -> int:
    """The masks of attention in a graph of ``n_tokens`` tokens that attend to ``n_cells`` cells. They have 16-bit
    values. Models with sliding windows have a second mask.

    :param n_sliding: the cells of a sequence in layers with a sliding window; 0: all.
    """
    if not model.attention_layers:
        return 0
    more = min(n_cells, n_sliding or n_cells) if model.integer("attention.sliding_window") else 0
    return 2 * n_tokens * (n_cells + more)


@record
class Context:
    """Bytes of the KV cache and of recurrent states. The part that fits beside the ring is in VRAM. The rest is in host
    memory and passes through the KV window in every graph.

    :param used: bytes of the cells in use, and of those held for further tokens.
    :param whole: bytes of all cells.
    :param window: bytes of the KV window, which holds the largest layer.
    :param kv_type: the type of the KV cache.
    :param sliding_cells: the cells of a sequence in layers with a sliding window; 0: all.
    """

    used: int = 0
    whole: int = 0
    window: int = 0
    kv_type: KvType = "f16"
    sliding_cells: int = 0


def estimate_context(model: Model, device: str, workload: Workload) -> Context:
    """The context of a workload. Each of its sequences holds ``n_prompt`` tokens.

    :param device: the name of the inner device.
    """
    n_seq, kv_type = workload.n_parallel, workload.kv_type
    cells = -(-workload.n_ctx // _PAGE) * _PAGE
    number, n_sliding = GGML_NUMBERS[kv_type.upper()], _sliding_cells(model, workload)
    kv = []
    for layer, rows in _kv_values(model).items():
        held = n_sliding if n_sliding and layer in model.sliding_layers else cells
        used = min(workload.n_prompt, held)
        kv += [native.KvShape(layer, number, row, held, n_seq, used) for row in rows if row]
    state = _recurrent_values(model)
    kv += [native.KvShape(i, GGML_NUMBERS["F32"], state, n_seq, 1, n_seq) for i in sorted(model.recurrent_layers)]
    sizes = native.lay_out(device, (), kv=kv)
    return Context(sizes.kv_used_bytes, sizes.kv_bytes, sizes.kv_window_bytes, kv_type, n_sliding)


def logits_rows(n_parallel: int, n_ubatch: int, *, can_speculate: bool) -> int:
    """The most rows of logits of one graph: one for each sequence, or more if drafted tokens are verified."""
    return max(n_parallel, min(_VERIFIED, n_ubatch)) if can_speculate else n_parallel
