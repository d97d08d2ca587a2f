"""Plans: what each shard does at a budget, and how long that will take.

The resident set follows from the budget alone (a prefix of the ladder, cut into the same slabs as the shard device cuts
it). What is left for a plan to choose is, by tier of graph size, which of the other shards stream through the ring and
which the CPU computes. It is chosen by predicted time among a few dozen splits: experts go to the CPU first (a token
reads few of them, streaming moves all) or the output head (which computes one row even for a prompt), then feed-forward
networks and attention, each spread evenly over the layers so that copies and CPU work at the same time; then each shard
is tried the other way. On small models that comes within a few percent of the best of all splits (test_optimum.py). A
feed-forward network is two shards: its down projection can stream while the CPU computes what comes before.

Prediction of one graph: the device and the CPU take turns (their times and the hand-offs add up) while copies run
beside them, except where the ring is full. Copies and CPU slow each other down when host memory cannot serve both.

Everything here is a pure function of its arguments. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from frameshard.errors import BudgetBelowFloor, Unsupported
from frameshard.native import EMULATED
from frameshard.plan import bounds
from frameshard.plan.header import GGML_TYPES, Tensor
from frameshard.plan.ladder import make_ladder
from frameshard.plan.machine import Kind, KvType, Profile, heads_of, kind_of, kv_value_bytes
from frameshard.plan.model import Model, Shard

STREAMED, CPU = 1, 2
"""Placements of a shard that is not resident, as in the device's C interface."""

Mode = Literal["planned", "stream_only"]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Tiers by tokens in a graph: (from this many, planned for this many).
_TIERS = ((0, 1), (2, 4), (8, 16), (32, 64), (128, 512), (1024, 2048), (4096, 8192))
_DECODING = 4  # up to so many tokens a graph is one of decoding, each token from another sequence
_MiB = 1 << 20
_ALIGN = 256  # kAlign of the shard device
_ROW = 512  # MATRIX_ROW_PADDING of ggml-cuda
_ROW_BLOCK = 32  # kRowBlock of the shard device
_DRIVER_UNIT = 2 * _MiB  # as the shard device counts it for real devices
_SCRATCH = 2 * _MiB  # kScratchBytes
_WHOLE_TENSORS = 32  # kPrefillTokens of the shard device: graphs of fewer tokens take experts one at a time
# Sizes tried for the cache of experts, in 64ths of all experts: few, so that the ring stays as it is when a budget or a
# context changes a little.
_CACHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_WORTH_A_CACHE = 0.98  # of the time without: what it holds is read from elsewhere first
# Largest steps that the ring has room for: one in use, the others so that copies go on while the CPU works. Of experts
# only those that are used are copied, so there more room gains little.
_RING, _RING_OF_EXPERTS = 4, 3
_RING_BESIDE_CACHES = 3  # kRingBesideCaches of the shard device
_SPLITS = 8  # steps from nothing to everything in which a kind of shard moves to the CPU
_CPU_ORDERS = (
    ("experts", "shared", "ffn", "ffn_down", "output", "attention"),
    ("output", "experts", "shared", "ffn", "ffn_down", "attention"),
    ("experts", "shared", "ffn_down", "ffn", "attention", "output"),
)
# Per shard and graph: kernels launched beside the products, whose own launches are in their measured rates, and
# hand-offs when it runs on the CPU. Attention hands over before and after the attention kernel itself, which stays
# where the KV cache is; experts hand over their choice, which also waits for the device when all of them are cached,
# then copies, slots and rows.
_KERNELS = {"attention": 9, "shared": 3, "ffn": 2, "ffn_down": 0, "experts": 10, "output": 1, "vision": 8, "other": 4}
# How often a token's activations pass the device's memory between products (norms, rotations, sums, conversions of what
# is three times as wide in the network, and eight times with the experts of each token gathered and summed): fitted to
# prompts of 1,024 tokens of minitron-8b-q4_0 and of 1,024 to 16,384 of qwen3-30b-a3b-q4_0 on H100 machines.
_PASSES = {"attention": 12, "ffn": 43, "experts": 180}
_HANDOFFS = {"attention": 2.0, "experts": 5.0}
_CHOICE = 1.5
_INPUT = 0.5  # the experts' input, which comes along where the CPU may compute some
# What the CPU takes for a layer's experts, or for its router and what follows that, however little there is to compute:
# its threads meet after each of some six operations (14 of the H100 machine).
_MEETINGS_S = {"experts": 70e-6, "shared": 70e-6}
_WITHIN_S = 16e-6  # to copy a cached expert's matrix within the device (H100 machine)
_PASSING = 32  # kPassing of the shard device: slots of the cache that keep nothing
# A turn to the CPU and back waits for the device while a game draws: 4.4 ms beside 12 ms a frame on an H100.
_BUSY_TURN = 1 / 3
_KV_BLOCK = 32  # values that share a scale in both quantised types
_VERIFIED = 32  # most rows in which drafted tokens are verified, of all sequences together
LEAST_UBATCH = 256
PLAIN_UBATCH = 512
"""Prompt tokens computed at once where nothing is known of budgets."""
_UBATCHES = (LEAST_UBATCH, PLAIN_UBATCH, 1024, 2048, 4096, 8192)
_LONG_PROMPT = 8192
# What of the tensors in a layer's graph is live at once and lies apart, as the compute buffers of 11 models of 10
# architectures have it with 64 to 1,024 tokens: 1.0 to 1.25 of the sum in estimate_fixed().
_LIVE = 1.3
DRIVER_BYTES = 512 << 20
"""What a GPU's driver context and libraries hold of a budget, about; exact once an engine runs."""
_ANSWER = 16  # tokens of the first sentence, which a player waits for
_AS_GOOD = 1.01  # times the least: what nobody would notice
_LEAST_OFFLOADED = 32  # llama.cpp copies weights to the GPU for graphs of at least so many tokens
_USE_ORDER = {"vision": 0, "attention": 1, "other": 2, "shared": 3, "experts": 4, "ffn": 5, "ffn_down": 6, "output": 7}


@dataclass(frozen=True, eq=False)
class Layout:
    """How the shard device cuts a model: pieces in ladder order, packed into slabs, and the least ring.

    ``min_ring`` is what any streamed step fits, ``total`` all slabs together, ``scratch`` what results of matrices pass
    through that are cut into several pieces.
    """

    model: Model = field(repr=False)
    ladder: tuple[Shard, ...] = field(repr=False)
    slabs: tuple[int, ...] = field(repr=False)
    pieces: tuple[tuple[int, int, int], ...] = field(repr=False)  # (shard, slab, bytes)
    min_ring: int
    unit_bytes: int
    total: int
    scratch: int

    def residency(self, room: int, wanted_ring: int) -> tuple[int, int]:
        """(ring bytes, slabs held) in ``room`` bytes beside the fixed part; room for the least ring is the caller's to
        see to."""
        if self.total <= room:
            return 0, len(self.slabs)
        ring = min(max(wanted_ring, self.min_ring), room) // self.unit_bytes * self.unit_bytes
        held = 0
        for n_slabs, size in enumerate(self.slabs):
            held += size
            if held > room - ring:
                return ring, n_slabs
        return ring, len(self.slabs)

    def resident_share(self, n_slabs: int) -> Floats:
        """Of each shard, the share of its bytes in the first ``n_slabs`` slabs."""
        shard, slab, n_bytes = self._piece_arrays
        held = np.bincount(shard, weights=n_bytes * (slab < n_slabs), minlength=len(self.ladder))
        return held / np.bincount(shard, weights=n_bytes, minlength=len(self.ladder))

    @cached_property
    def _piece_arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        columns = np.array(self.pieces, dtype=np.int64).reshape(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2].astype(np.float64)

    @cached_property
    def use_order(self) -> NDArray[np.intp]:
        """Ladder indices in the order in which a graph uses the shards."""

        def key(i: int) -> tuple[float, int, int]:
            shard = self.ladder[i]
            layer = shard.layer if shard.layer is not None else -1 if shard.kind == "other" else float("inf")
            return layer, _USE_ORDER[shard.kind], i

        return np.array(sorted(range(len(self.ladder)), key=key), dtype=np.intp)


@lru_cache(maxsize=8)
def lay_out(
    model: Model, *, unit_bytes: int = 1, piece_bytes: int = 0, step_bytes: int = 0, slab_bytes: int = 0
) -> Layout:
    """The layout that the shard device makes of a model when configured with these sizes; 0 stands for its defaults.

    ``unit_bytes`` is what the driver hands out VRAM in (:func:`vram_unit`)."""
    ladder = make_ladder(model)
    tensors = [(i, tensor) for i, shard in enumerate(ladder) for tensor in shard.tensors]
    total = model.core_bytes + sum(tensor.n_bytes for _, tensor in tensors)
    matrices = (tensor.n_bytes for _, tensor in tensors if tensor.name.startswith("blk.") and _is_matrix(tensor))
    step_bytes = step_bytes or min(max(2 * _MiB, total // 64), 32 * _MiB)
    piece_bytes = piece_bytes or max(4 * _MiB, max(matrices, default=0), step_bytes)
    slab_bytes = slab_bytes or min(max(_MiB, 4 * unit_bytes, total // 64), 64 * _MiB)

    slabs: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    of_shard = [0] * len(ladder)
    for i, tensor in tensors:
        row_bytes = _row_bytes(tensor)
        whole = not _is_matrix(tensor) or tensor.n_bytes <= piece_bytes
        each = tensor.n_bytes if whole else max(1, piece_bytes // row_bytes // _ROW_BLOCK) * _ROW_BLOCK * row_bytes
        for start in range(0, tensor.n_bytes, each):
            size = _padded(tensor, min(each, tensor.n_bytes - start))
            if not slabs or slabs[-1] + size > slab_bytes:
                slabs.append(0)
            slabs[-1] += size
            of_shard[i] += size
            pieces.append((i, len(slabs) - 1, size))
    slabs = [_rounded(size, unit_bytes) for size in slabs]
    largest_piece = max((size for _, _, size in pieces), default=0)
    return Layout(
        model=model,
        ladder=ladder,
        slabs=tuple(slabs),
        pieces=tuple(pieces),
        min_ring=_rounded(max(largest_piece, min(step_bytes, max(of_shard, default=0))), unit_bytes),
        unit_bytes=unit_bytes,
        total=sum(slabs),
        scratch=_SCRATCH if len(pieces) > len(tensors) else 0,
    )


def _is_matrix(tensor: Tensor) -> bool:
    return all(dim == 1 for dim in tensor.shape[2:])


def _row_bytes(tensor: Tensor) -> int:
    _, block, block_bytes = GGML_TYPES[tensor.ggml_type]
    return tensor.shape[0] // block * block_bytes


def _padded(tensor: Tensor, n_bytes: int) -> int:
    """What ``n_bytes`` of whole rows take: of quantised ones kernels also read what follows the last weight, to a run
    of 512, and the last row, to a block."""
    _, block, block_bytes = GGML_TYPES[tensor.ggml_type]
    if block > 1:
        rows = n_bytes // _row_bytes(tensor) if _is_matrix(tensor) else tensor.shape[1]
        n_bytes += -rows % _ROW_BLOCK * _row_bytes(tensor) + -tensor.shape[0] % _ROW // block * block_bytes
    return _rounded(n_bytes, _ALIGN)


def _rounded(n_bytes: int, unit_bytes: int) -> int:
    return -(-n_bytes // unit_bytes) * unit_bytes


def vram_unit(device: str) -> int:
    """Bytes in which a device's driver hands out VRAM: whatever is allocated takes whole units."""
    return 1 if device == EMULATED else _DRIVER_UNIT


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


def choose_ubatch(
    model: Model,
    profile: Profile,
    budgets: Sequence[int],
    *,
    n_ctx: int,
    n_prompt: int,
    n_seq: int = 1,
    n_together: int = 1,
    kv_type: KvType = "f16",
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """Prompt tokens to compute at once. More of them read weights that are streamed less often, and their buffers
    displace weights: the size with which ``n_together`` prompts of ``n_prompt`` tokens each and the first 16 tokens of
    their answers take least, in the geometric mean over ``budgets``, with ``n_seq`` contexts of ``n_ctx`` tokens. Of
    sizes within 1 % of that it is the one with which prompts take least. ``routing`` as for :func:`make_plan`.
    Raises :class:`BudgetBelowFloor` if even the smallest leaves no room."""
    unit = vram_unit(str(profile.fingerprint.get("device")))
    found: list[tuple[float, float, int]] = []
    for n_ubatch in _UBATCHES:
        if found and n_ubatch >= 2 * n_prompt * n_together:
            break
        fixed = estimate_fixed(
            model, n_ctx, n_ubatch, n_seq, kv_type=kv_type, overhead_bytes=overhead_bytes, unit_bytes=unit
        )
        context = estimate_context(model, n_ctx, n_prompt, n_seq, kv_type=kv_type, unit_bytes=unit)
        try:
            plans = [
                make_plan(
                    model,
                    profile,
                    budget_bytes=b,
                    fixed_bytes=fixed,
                    context=context,
                    n_ctx_used=n_prompt,
                    n_ubatch=n_ubatch,
                    routing=routing,
                )
                for b in budgets
            ]
        except BudgetBelowFloor:
            if not found:
                raise
            break
        prompts = np.array([plan.predicted_ttft(n_prompt, n_together) for plan in plans])
        answers = _ANSWER * np.array([plan.predicted_decode_s(n_together) for plan in plans])
        found.append((float(np.log(prompts + answers).mean()), float(np.log(prompts).mean()), n_ubatch))
    as_good = min(found)[0] + np.log(_AS_GOOD)
    return min((prompts_s, n_ubatch) for both_s, prompts_s, n_ubatch in found if both_s <= as_good)[1]


def choose_launch_ubatch(
    model: Model,
    profile: Profile,
    budget_bytes: int,
    *,
    n_ctx: int,
    n_seq: int,
    kv_type: KvType = "f16",
    overhead_bytes: int = 0,
    routing: Sequence[float] = (),
) -> int:
    """The same for a sidecar that is launched with a budget, and prompts that fill a conversation (8192 tokens at
    most). Larger buffers are a higher floor, and the budget will shrink: so this is chosen for half of the budget too,
    and the floor stays at or below that, or is that of :data:`PLAIN_UBATCH`. Without a budget (0) it is that size."""
    if not budget_bytes:
        return PLAIN_UBATCH
    unit, n_prompt = vram_unit(str(profile.fingerprint.get("device"))), min(n_ctx, _LONG_PROMPT)
    fixed = estimate_fixed(
        model, n_ctx, PLAIN_UBATCH, n_seq, kv_type=kv_type, overhead_bytes=overhead_bytes, unit_bytes=unit
    )
    context = estimate_context(model, n_ctx, n_prompt, n_seq, kv_type=kv_type, unit_bytes=unit)
    plain = make_plan(model, profile, budget_bytes=0, fixed_bytes=fixed, context=context, n_ubatch=PLAIN_UBATCH)
    lowest = max(budget_bytes // 2, plain.floor_bytes)
    return choose_ubatch(
        model,
        profile,
        [budget_bytes, lowest] if lowest < budget_bytes else [budget_bytes],
        n_ctx=n_ctx,
        n_prompt=n_prompt,
        n_seq=n_seq,
        kv_type=kv_type,
        overhead_bytes=overhead_bytes,
        routing=routing,
    )


@dataclass(frozen=True)
class TierPlan:
    """Graphs of at least ``min_tokens`` tokens: for each shard of the ladder what it does while it is not resident.

    ``predicted_s`` and ``bound_s`` are for one graph of ``n_tokens``; ``n_*`` and ``*_bytes`` count placements as they
    are at the plan's budget (a shard of which a part is resident counts by its bytes, and as what its rest does).
    """

    min_tokens: int
    n_tokens: int
    placements: tuple[int, ...] = field(repr=False)
    predicted_s: float
    bound_s: float
    n_resident: int
    n_streamed: int
    n_cpu: int
    resident_bytes: int
    streamed_bytes: int
    cpu_bytes: int


@dataclass(frozen=True)
class Plan:
    """What every shard does at ``budget_bytes``: the first ``resident`` of the ladder are in VRAM (all of them if
    ``ring_bytes`` is 0), the others do as the tier of a graph's size says. ``expert_stream_share``: of the experts that
    a token needs and that are neither resident nor cached, what share is copied so that copies take as long as the CPU
    does for the others, from 0 to 1."""

    budget_bytes: int
    fixed_bytes: int
    floor_bytes: int
    full_bytes: int
    ring_bytes: int
    resident: int
    tiers: tuple[TierPlan, ...]
    expert_stream_share: float
    mode: Mode
    n_ubatch: int
    _costs: _Costs = field(repr=False, compare=False)

    def predicted_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """Seconds from an empty context until the logits after ``n_parallel`` prompts of ``n_tokens`` each, several of
        them in a graph where they fit."""
        return sum(self._graph_seconds(*graph) for graph in self._graphs(n_tokens, n_parallel))

    def bound_ttft(self, n_tokens: int, n_parallel: int = 1) -> float:
        """Least seconds for that with this resident set and size of graphs."""
        return self._costs.bound(self._graphs(n_tokens, n_parallel), may_use_cpu=self.mode == "planned")

    def predicted_decode_s(self, n_parallel: int = 1, n_each: int = 1) -> float:
        """Seconds of a graph of ``n_each`` tokens of each of ``n_parallel`` sequences, with the logits of all."""
        n_tokens = n_parallel * n_each
        return self._graph_seconds(n_tokens, self._costs.n_ctx_used, n_parallel, n_tokens)

    def predicted_decode_tps(self, n_parallel: int = 1) -> float:
        """Tokens per second of ``n_parallel`` sequences together, one token each in a graph."""
        return n_parallel / self.predicted_decode_s(n_parallel)

    def bound_decode_tps(self, n_parallel: int = 1) -> float:
        """Most tokens per second of ``n_parallel`` sequences that any placement of the rest gives with this resident
        set."""
        graph = (n_parallel, self._costs.n_ctx_used, n_parallel)
        return n_parallel / self._costs.bound([graph], may_use_cpu=self.mode == "planned")

    def static_ttft(self, n_tokens: int) -> float:
        """Seconds for the same with this resident set and everything else as llama.cpp has it with ``-ngl``: each graph
        copies it from pageable memory, and nothing overlaps."""
        return sum(self._costs.static_seconds(*graph) for graph in self._graphs(n_tokens))

    def static_decode_tps(self) -> float:
        """Tokens per second of one sequence when the CPU computes everything that is not resident."""
        return 1.0 / self._costs.static_seconds(1, self._costs.n_ctx_used)

    def summary(self, n_prompt: int = 512, n_parallel: int = 1) -> dict[str, object]:
        """The plan as plain values, for JSON and tables."""
        tiers = [
            {
                "min_tokens": tier.min_tokens,
                "resident": {"shards": tier.n_resident, "bytes": tier.resident_bytes},
                "streamed": {"shards": tier.n_streamed, "bytes": tier.streamed_bytes},
                "cpu": {"shards": tier.n_cpu, "bytes": tier.cpu_bytes},
                "predicted_s": tier.predicted_s,
                "bound_s": tier.bound_s,
            }
            for tier in self.tiers
        ]
        return {
            "mode": self.mode,
            "budget_bytes": self.budget_bytes,
            "fixed_bytes": self.fixed_bytes,
            "floor_bytes": self.floor_bytes,
            "full_bytes": self.full_bytes,
            "ring_bytes": self.ring_bytes,
            "tiers": tiers,
            "predicted_ttft_s": self.predicted_ttft(n_prompt, n_parallel),
            "predicted_decode_tps": self.predicted_decode_tps(n_parallel),
            "bound_ttft_s": self.bound_ttft(n_prompt, n_parallel),
            "bound_decode_tps": self.bound_decode_tps(n_parallel),
        }

    def _graphs(self, n_tokens: int, n_parallel: int = 1) -> list[tuple[int, int, int]]:
        """(tokens, tokens of a sequence before it, sequences) of each graph of so many prompts."""
        if n_tokens > self.n_ubatch:
            one = [(min(self.n_ubatch, n_tokens - done), done, 1) for done in range(0, n_tokens, self.n_ubatch)]
            return one * n_parallel
        together = min(self.n_ubatch // n_tokens, n_parallel)
        groups = [min(together, n_parallel - done) for done in range(0, n_parallel, together)]
        return [(n * n_tokens, 0, n) for n in groups]

    def _graph_seconds(self, n_tokens: int, n_before: int, n_seq: int, n_rows: int = 0) -> float:
        tier = next(tier for tier in reversed(self.tiers) if n_tokens >= tier.min_tokens)
        on_cpu = np.array(tier.placements, dtype=np.int8) == CPU
        return self._costs.at(n_tokens, n_before, n_seq, n_rows).seconds(on_cpu)


def make_plan(
    model: Model,
    profile: Profile,
    *,
    budget_bytes: int,
    fixed_bytes: int,
    context: Context = Context(),
    mode: Mode = "planned",
    n_ctx_used: int = 512,
    n_ubatch: int = 512,
    gpu_busy_s: float = 0.0,
    routing: Sequence[float] = (),
    layout: Layout | None = None,
) -> Plan:
    """The plan for a budget; ``budget_bytes`` of 0 means no limit.

    ``fixed_bytes`` is what VRAM holds beside arena, ring and ``context``: overhead, compute buffers, core and scratch,
    from the shard device after commit or from :func:`estimate_fixed`. Decoding is predicted at ``n_ctx_used`` tokens of
    context. In mode ``stream_only`` nothing is computed on the CPU. ``gpu_busy_s`` is how long a game keeps the device
    busy in each frame. ``routing`` is how the model's routers choose: of a layer's choices the share of the expert that
    is chosen most, of the next, and so on (descending, sum 1); by default all are chosen alike. ``layout`` is needed
    only for a device not configured by default. Raises :class:`BudgetBelowFloor`.
    """
    layout = layout or lay_out(model, unit_bytes=vram_unit(str(profile.fingerprint.get("device"))))
    least = min(layout.min_ring, layout.total)
    floor = fixed_bytes + context.window + least
    full = fixed_bytes + context.whole + layout.total
    budget = budget_bytes or full
    if budget < floor:
        floor_mib = -(-floor // _MiB)
        raise BudgetBelowFloor(
            f"a VRAM budget of {budget // _MiB} MiB is below the floor: this model and context need {floor_mib} MiB",
            budget_bytes=budget,
            floor_bytes=floor,
        )
    # What of the context fits beside a ring of some steps. The others pass through a window, which has room there too.
    room = max(budget - fixed_bytes - min(_RING_BESIDE_CACHES * layout.min_ring, layout.total), 0)
    if context.used <= room:
        kv_room = float("inf")
        fixed_bytes += context.used
    else:
        kv_room = max(room - context.window, 0)
        fixed_bytes += max(room, context.window)
    # Beside a game copies go on while the device is not ours, as far as the ring holds them.
    room = budget - fixed_bytes
    n_steps = _RING_OF_EXPERTS if model.n_expert else _RING
    least_ring = n_steps * layout.min_ring + min(round(gpu_busy_s * profile.h2d), room // 8)
    turn_s = profile.handoff_s + gpu_busy_s * _BUSY_TURN
    found: list[tuple[float, _Costs]] = []
    for wanted_ring in _rings(layout, room, least_ring, routing):
        ring, n_slabs = layout.residency(room, wanted_ring)
        share = layout.resident_share(n_slabs)
        costs = _Costs(layout, profile, share, ring, n_ctx_used, turn_s, kv_room, routing, context.kv_type)
        seconds = costs.at(1, n_ctx_used).seconds(costs.kind_masks["experts"] & (mode == "planned"))
        if not found or seconds < _WORTH_A_CACHE * found[-1][0]:
            found.append((seconds, costs))
    costs = found[-1][1]
    tiers = tuple(_plan_tier(costs, *tier, mode, n_ubatch) for tier in _TIERS if tier[0] <= max(n_ubatch, 1))
    whole = costs.resident_share >= 1.0
    return Plan(
        budget_bytes=budget,
        fixed_bytes=fixed_bytes,
        floor_bytes=floor,
        full_bytes=full,
        ring_bytes=costs.ring,
        resident=len(whole) if whole.all() else int(np.argmin(whole)),
        tiers=tiers,
        expert_stream_share=costs.stream_share,
        mode=mode,
        n_ubatch=n_ubatch,
        _costs=costs,
    )


def _rings(layout: Layout, room: int, least: int, routing: Sequence[float]) -> Iterator[int]:
    """Sizes of the ring to choose from: beside what streams it holds single experts, of all layers that are not
    resident, up to all the room that other weights leave."""
    yield least
    experts = sum(shard.n_bytes for shard in layout.ladder if shard.kind == "experts")
    others = sum(shard.n_bytes for shard in layout.ladder) - experts
    spare = room - least - others - max(layout.slabs, default=0)
    if routing:
        yield from (least + experts * n // 64 for n in _CACHES if experts * n // 64 <= spare)


def _plan_tier(costs: _Costs, min_tokens: int, n_tokens: int, mode: Mode, n_ubatch: int) -> TierPlan:
    n_tokens = max(min(n_tokens, n_ubatch), 1)
    decode = n_tokens <= _DECODING
    n_before, n_seq = (costs.n_ctx_used, n_tokens) if decode else (0, 1)
    graph = costs.at(n_tokens, n_before, n_seq)
    # What evicted shards do until the next plan: a token reads few experts, so those are left to the CPU in decoding.
    evicted = (
        costs.kind_masks["experts"] if decode and mode == "planned" else np.zeros(len(costs.ladder), dtype=np.bool_)
    )
    best, on_cpu = float("inf"), evicted
    for choice in _splits(costs) if mode == "planned" else [evicted]:
        seconds = graph.seconds(choice, best)
        if seconds < best:
            best, on_cpu = seconds, choice
    if mode == "planned":
        best, on_cpu = _improved(costs, graph, best, on_cpu)
    share, n_bytes = costs.resident_share, costs.n_bytes
    left_out = share < 1.0
    placements = np.where(np.where(left_out, on_cpu, evicted), CPU, STREAMED)
    streamed, cpu = left_out & ~on_cpu, left_out & on_cpu
    return TierPlan(
        min_tokens=min_tokens,
        n_tokens=n_tokens,
        placements=tuple(placements.tolist()),
        predicted_s=best,
        bound_s=costs.bound([(n_tokens, n_before, n_seq)], may_use_cpu=mode == "planned"),
        n_resident=int((~left_out).sum()),
        n_streamed=int(streamed.sum()),
        n_cpu=int(cpu.sum()),
        resident_bytes=round(float((n_bytes * share).sum())),
        streamed_bytes=round(float((n_bytes * (1 - share))[streamed].sum())),
        cpu_bytes=round(float((n_bytes * (1 - share))[cpu].sum())),
    )


def _splits(costs: _Costs) -> Iterator[Mask]:
    """Candidates for what the CPU computes, from nothing to everything, in the orders of _CPU_ORDERS, each once."""
    nothing = np.zeros(len(costs.ladder), dtype=np.bool_)
    seen = {nothing.tobytes()}
    yield nothing
    order = costs.layout.use_order
    for kinds in _CPU_ORDERS:
        on_cpu = nothing
        for kind in kinds:
            members = order[(costs.kind_masks[kind] & (costs.resident_share < 1.0))[order]]
            counts = sorted({round(len(members) * i / _SPLITS) for i in range(1, _SPLITS + 1)} - {0})
            for count in counts:
                candidate = on_cpu.copy()
                candidate[members[((np.arange(count) + 0.5) * len(members) / count).astype(np.intp)]] = True
                if candidate.tobytes() not in seen:
                    seen.add(candidate.tobytes())
                    yield candidate
            on_cpu = on_cpu.copy()
            on_cpu[members] = True


def _improved(costs: _Costs, graph: _Graph, best: float, on_cpu: Mask) -> tuple[float, Mask]:
    """The split after each shard in the order of use was tried the other way, alone and in place of the one before it,
    and the quicker one kept."""
    before: list[int] = []
    for i in costs.layout.use_order[(costs.resident_share < 1.0)[costs.layout.use_order]]:
        for also in ([], before):
            other = on_cpu.copy()
            other[[i, *also]] = ~other[[i, *also]]
            if not also or other[i] != other[also[0]]:
                seconds = graph.seconds(other, best)
                if seconds < best:
                    best, on_cpu = seconds, other
        before = [i]
    return best, on_cpu


class _Costs:
    """What each shard costs on this machine with this resident set."""

    def __init__(
        self,
        layout: Layout,
        profile: Profile,
        share: Floats,
        ring: int,
        n_ctx_used: int,
        turn_s: float,
        kv_room: float,
        routing: Sequence[float] = (),
        kv_type: KvType = "f16",
    ) -> None:
        self.turn_s, self.ring, self.kv_room, self.kv_type = turn_s, ring, kv_room, kv_type
        self.layout, self.profile, self.resident_share, self.n_ctx_used = layout, profile, share, n_ctx_used
        self.ladder = layout.ladder
        self.n_bytes = np.array([shard.n_bytes for shard in self.ladder], dtype=np.float64)
        self.n_tensors = np.array([len(shard.tensors) for shard in self.ladder])
        self.active = np.array([shard.active_bytes for shard in self.ladder], dtype=np.float64) / self.n_bytes
        # How many weights of each kind are in each shard.
        self.kinds: dict[Kind, int] = {}
        of_kind = [
            [(kind_of(layout.model, shard, tensor), tensor.n_weights) for tensor in shard.tensors]
            for shard in self.ladder
        ]
        for row in of_kind:
            for kind, _ in row:
                self.kinds.setdefault(kind, len(self.kinds))
        self.n_weights = np.zeros((len(self.kinds), len(self.ladder)))
        for i, row in enumerate(of_kind):
            for kind, n in row:
                self.n_weights[self.kinds[kind], i] += n
        kinds = [shard.kind for shard in self.ladder]
        self.kind_masks = {kind: np.array([k == kind for k in kinds], dtype=np.bool_) for kind in _USE_ORDER}
        self.kernels_s = profile.kernel_s * np.array([_KERNELS[kind] for kind in kinds], dtype=np.float64)
        pass_s = 4 * layout.model.n_embd / profile.device_memory
        self.passes_s = pass_s * np.array([_PASSES.get(kind, 0) for kind in kinds], dtype=np.float64)
        self.handoffs = np.array([_HANDOFFS.get(kind, 1.0) for kind in kinds])
        self.meetings_s = np.array([_MEETINGS_S.get(kind, 0.0) for kind in kinds])
        self.copy_s = self.n_bytes * (1 - share) / profile.h2d
        experts = self.kind_masks["experts"]
        self.missing = experts & (share < 1.0)
        n_expert = layout.model.n_expert if experts.any() else 0
        # How likely a token is to choose each of a layer's experts, the likeliest first.
        shares = np.array(routing if len(routing) == n_expert else [1 / max(n_expert, 1)] * n_expert)
        self.likely: Floats = np.minimum(layout.model.n_expert_used * shares, 1.0)
        # How many of them are cached of each layer that is not resident: while decoding the ring holds little else.
        # What streams whole takes three places there, or fewer where the experts of a token would have none.
        others = (share < 1.0) & ~self.missing
        self.largest_other = max((size for shard, _, size in layout.pieces if others[shard]), default=0)
        layers = max(float((1 - share)[self.missing].sum()), 1.0)
        each = float(self.n_bytes[experts].mean()) / n_expert if n_expert else 1.0
        self.matrix_bytes = each / float(self.n_tensors[experts].mean()) if n_expert else 1.0
        slots = [max(ring - n * self.largest_other, 0) / each for n in (3, 2, 1)]
        n_slots = next((n for n in slots if n >= layout.model.n_expert_used), slots[-1])
        self.n_cached = (n_slots - min(_PASSING, n_slots / 4)) / layers
        self.n_cached_in_prompts = max(ring - 3 * layout.min_ring, 0) / each / layers
        # The copy engine runs ahead by what the ring holds beside the step in use; when none is, by a step at least.
        self.beside_s = max(ring - layout.min_ring, 0) / profile.h2d
        self.ahead_s = max(self.beside_s, layout.min_ring / profile.h2d)

    def bound(self, graphs: list[tuple[int, int, int]], *, may_use_cpu: bool) -> float:
        """Least time of graphs of (tokens, tokens before, sequences), of which each does all the work anew. Experts
        that none of the tokens uses need not be copied."""
        profile, left_out = self.profile, 1 - self.resident_share
        copy: list[Floats] = []
        device: list[Floats] = []
        cpu: list[Floats] = []
        resident_s = memory_s = 0.0
        for n_tokens, n_before, n_seq in graphs:
            graph = self.at(n_tokens, n_before, n_seq)
            copy.append(graph.fetched * left_out / profile.h2d)
            device.append(graph.on_device * left_out)
            cpu.append(graph.on_host * left_out * graph.uncached)
            resident_s += float((graph.on_device * self.resident_share).sum()) + graph.attention_s
            memory_s += graph.memory_s
        return bounds.least_seconds(
            np.concatenate(copy),
            np.concatenate(device),
            np.concatenate(cpu) if may_use_cpu else None,
            resident_s=resident_s,
            memory_s=memory_s if may_use_cpu else 0.0,
        )

    def static_seconds(self, n_tokens: int, n_before: int, n_seq: int = 1) -> float:
        """Time of a graph without streaming or overlap, where what is left out are layers that follow each other, or
        experts."""
        graph, left_out = self.at(n_tokens, n_before, n_seq), 1 - self.resident_share
        always = graph.attention_s + float(self.kernels_s.sum()) + self.turn_s
        if n_tokens >= _LEAST_OFFLOADED:
            return always + float((self.n_bytes * left_out).sum() / self.profile.h2d_pageable + graph.on_device.sum())
        experts = int((self.kind_masks["experts"] & (left_out > 0)).sum())
        computed = graph.on_device * self.resident_share + graph.on_host * left_out
        return always + float(computed.sum()) + experts * graph.handoff_s

    @cached_property
    def stream_share(self) -> float:
        return self.at(1, self.n_ctx_used).expert_stream_share

    def at(self, n_tokens: int, n_before: int, n_seq: int = 1, n_rows: int = 0) -> _Graph:
        return _Graph(self, n_tokens, n_before, n_seq, n_rows or n_seq)


def _first(values: Floats, n: float) -> float:
    """The sum of the first ``n`` values."""
    return float(np.interp(n, np.arange(len(values) + 1), np.concatenate(([0.0], np.cumsum(values)))))


class _Graph:
    """Times of one graph of ``n_tokens``, shared evenly by sequences that have ``n_before`` tokens each already, and
    ``n_rows`` of logits."""

    def __init__(self, costs: _Costs, n_tokens: int, n_before: int, n_seq: int, n_rows: int) -> None:
        profile, model = costs.profile, costs.layout.model
        # Of a layer's experts this share is used by at least one of the tokens, each by so many (columns).
        used = 1 - (1 - costs.likely) ** n_tokens
        experts, one_at_a_time = costs.kind_masks["experts"], n_tokens < _WHOLE_TENSORS
        chosen_alike = 1 - (1 - costs.active) ** n_tokens
        share_used = np.where(experts, used.mean(), chosen_alike) if used.size else chosen_alike
        columns = np.where(costs.kind_masks["output"], n_rows, n_tokens * costs.active / share_used)
        # What must come from host memory of what is not resident: experts that are used and not cached.
        n_cached = costs.n_cached if one_at_a_time else costs.n_cached_in_prompts
        cached = _first(used, n_cached) / max(float(used.sum()), 1e-9)
        # Copies of whole tensors begin before the router has chosen, with the experts that the graph before used: about
        # as many as twice the tokens use.
        predicted = 1 - (1 - costs.likely) ** (2 * n_tokens)
        predicted_cached = _first(predicted, costs.n_cached_in_prompts)
        predicted_anew = float(predicted.sum()) - predicted_cached
        touched = costs.n_bytes * share_used
        self.uncached = np.where(costs.missing, 1 - cached, 1.0)
        self.fetched = touched * self.uncached
        none = np.zeros(len(costs.ladder))
        self.on_device = none + sum(
            costs.n_weights[i] * share_used * profile.seconds_per_weight(kind, columns, on_cpu=False)
            for kind, i in costs.kinds.items()
        )
        # Experts are products of their own each: the CPU takes as long for each token as for one.
        at_once, times = np.where(experts, 1.0, columns), np.where(experts, columns, 1.0)
        self.on_host = none + sum(
            costs.n_weights[i] * share_used * times * profile.seconds_per_weight(kind, at_once, on_cpu=True)
            for kind, i in costs.kinds.items()
        )
        head_dim, n_head, _ = heads = heads_of(model)
        each = n_tokens / n_seq
        kv_rate, flops_rate = profile.attention_rates(heads, n_before + each / 2, costs.kv_type)
        flops = 4.0 * head_dim * n_head * model.n_layer * n_tokens * (n_before + each / 2)
        kv_read = kv_bytes(model, 256, kv_type=costs.kv_type) / 256 * (n_before + each) * n_seq
        self.attention_s = max(flops / flops_rate, kv_read / kv_rate)
        self._kv_copy_s = max(kv_read - costs.kv_room, 0.0) / profile.h2d
        order, share = costs.layout.use_order, costs.resident_share
        activations = 4 * n_tokens * model.n_embd * (1 / profile.h2d + 1 / profile.d2h)
        self.handoff_s = costs.turn_s + activations
        missing = costs.missing
        device_s = self.on_device + costs.kernels_s + n_tokens * costs.passes_s
        cpu_s = self.on_host * (1 - share) + costs.meetings_s
        # Experts are copied matrix by matrix, neighbours in one piece.
        share_copied = predicted_anew / max(predicted.size, 1)
        runs_rate = profile.copy_rate(costs.matrix_bytes / max(1 - share_copied, 1e-3))
        copy_s = np.where(missing, costs.n_bytes * share_copied * (1 - share) / runs_rate, costs.copy_s)
        shared_s = self.on_device * share
        turns = costs.handoffs
        # Cached ones are copied within the device, each matrix by itself.
        asked_s = costs.turn_s + _WITHIN_S * predicted_cached * costs.n_tensors
        self._cpu_slowdown, self._copy_slowdown = profile.slowdowns
        self.expert_stream_share = 0.0
        copied_s = np.zeros(len(costs.ladder))
        if one_at_a_time and missing.any():
            # Experts are met one at a time: their copies hide behind nothing but the CPU's part of the same layer, and
            # each slows the other.
            single_rate, uncached = profile.copy_rate(costs.matrix_bytes) / (1 + self._copy_slowdown), 1 - cached
            there_s = (touched / single_rate + self.on_device) * (1 - share) * uncached
            here_s = (1 + self._cpu_slowdown) * self.on_host * (1 - share) * uncached
            any_s = np.where(missing, costs.meetings_s * (1 - share), 0.0)
            both_s = max(float((here_s + there_s)[missing].sum()), 1e-12)
            # The device has one share for graphs of any size: that which suits one token.
            balanced = float((here_s + any_s)[missing].sum()) / both_s
            self.expert_stream_share = min(max(balanced, 0.0), 1.0) if n_tokens == 1 else costs.stream_share
            left = 1 - self.expert_stream_share
            any_s = any_s * min(float(used.sum()) * uncached * left, 1.0)
            shared_s = shared_s + np.where(missing, self.on_device * (1 - share) * cached + costs.kernels_s, 0.0)
            copied_s = np.where(missing, self.fetched * (1 - share) / single_rate, 0.0)
            at_least = _CHOICE + _INPUT
            turns = np.where(missing, at_least + (costs.handoffs - at_least) * uncached, turns)
            cpu_s = np.where(missing, np.maximum(any_s + here_s * left, there_s * self.expert_stream_share), cpu_s)
        # Experts stream one at a time for one token, else as whole tensors; which of them are used is asked by layer.
        self._streamed_singly = float(n_tokens == 1)
        beside_s, ahead_s = costs.beside_s, costs.ahead_s
        if missing.any() and n_tokens == 1:
            copy_s = np.where(missing, 0.0, copy_s)
            device_s = device_s + copied_s + np.where(missing, _CHOICE * self.handoff_s, 0.0)
            place_s = costs.largest_other / profile.h2d
            beside_s, ahead_s = 2 * place_s, 3 * place_s
        elif missing.any():
            device_s = device_s + np.where(missing, asked_s, 0.0)
            # The ring has room for whole tensors of experts.
            beside_s, ahead_s = beside_s * share_copied, ahead_s * share_copied
        self._device_s, self._cpu_s, self._expert_copy_s = device_s[order], cpu_s[order], copied_s[order]
        self._shared_s = shared_s[order]
        self._handoffs = turns[order]
        self._copy_s = copy_s[order]
        self._order = order
        self._beside_s, self._ahead_s = beside_s, ahead_s
        self._left_out = share[order] < 1.0
        self._always_s = self.attention_s + costs.turn_s
        self.memory_s = float((self.fetched * (1 - share)).sum()) / profile.memory

    def seconds(self, on_cpu: Mask, best: float = float("inf")) -> float:
        """Predicted time when of the shards left out those of ``on_cpu`` are computed there and the others stream;
        something that is no less than ``best`` where that is known to be too."""
        cpu = on_cpu[self._order] & self._left_out
        streamed = self._left_out & ~cpu
        copy = float(self._copy_s @ streamed) + self._kv_copy_s
        host = float(self._cpu_s @ cpu)
        # Neighbours on the CPU are computed in one go.
        handoffs = self._handoffs.copy()
        handoffs[1:] -= cpu[:-1]
        turns = np.where(cpu, self._shared_s + handoffs * self.handoff_s, self._device_s)
        device = float(turns.sum()) + self._always_s
        # Both at once get what host memory has: each is slowed by the share of time in which the other is busy.
        both = max(copy, device + host)
        host_slower = 1 + self._cpu_slowdown * min(copy / both, 1.0)
        copy_slower = 1 + self._copy_slowdown * host / both
        chain = device + host * host_slower
        singly = self._streamed_singly * float(self._expert_copy_s @ streamed)
        singly += self.expert_stream_share * float(self._expert_copy_s @ cpu)
        least = max(chain, copy + singly, self.memory_s)
        if least >= best:
            return least
        if not streamed.any():
            return least
        # Copies gain a lead while a streamed shard is used, and more until the next one is needed. The device waits for
        # what is lacking then.
        starts = np.flatnonzero(streamed)
        work = turns + np.where(cpu, self._cpu_s * host_slower, 0.0)
        uses = work[starts] + self._always_s / len(starts)
        gaps = np.add.reduceat(work, starts) - work[starts]
        gaps[-1] += work[: starts[0]].sum()
        copies = self._copy_s[starts] * copy_slower + self._kv_copy_s / len(starts)
        beside_s, ahead_s = self._beside_s, self._ahead_s
        lead, waits = min(float(gaps[-1]), ahead_s), 0.0
        for copy_s, use_s, gap_s in zip(copies.tolist(), uses.tolist(), gaps.tolist(), strict=True):
            if copy_s > lead:
                waits += copy_s - lead
                lead = copy_s
                if chain + waits >= best:
                    break
            lead -= copy_s
            if lead < beside_s:
                lead = min(lead + use_s, beside_s)
            if lead < ahead_s:
                lead = min(lead + gap_s, ahead_s)
        return max(least, chain + waits)
