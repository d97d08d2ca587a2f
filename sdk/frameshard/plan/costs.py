"""Predicts the time of a graph on one machine, from the times of each shard resident, streamed and on the CPU.

The device and the CPU work in turns, so their times and those of the hand-offs are added. Copies run at the same time,
except while the ring is full. Copies and the CPU slow each other down, because they share host memory. Reads from disk
run ahead of all of them, so a graph takes at least the time of its reads. Before all that the host prepares a graph;
the next step of a prompt in part while the one before is computed.

Arrays have one value for each shard of the ladder. Times are seconds, sizes bytes, rates per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameshard.plan import roofline
from frameshard.plan.host import HostShare
from frameshard.plan.layout import Layout
from frameshard.plan.memory import cell_bytes, kv_bytes
from frameshard.plan.profile import KvType, Profile, heads_of
from frameshard.plan.routing import Routing
from frameshard.plan.weights import Experts, Mask, shards_of
from frameshard.plan.windows import can_take_back
from frameshard.records import record

Floats = NDArray[np.float64]

# The number of kernels that a shard launches besides its matrix products. The measured rates of products include their
# launches.
_KERNELS = {"attention": 9, "shared": 3, "ffn": 2, "ffn_down": 0, "experts": 10, "output": 1, "vision": 8, "other": 4}
# The time that each of these kernels adds to a token whose graph has not run with these weights in VRAM, as after a
# prompt if not all are resident: the shard device compiles it, and the driver launches its kernels one by one, then
# records them in the next token. On H100 machines the first two tokens together took 32 and 37 ms more than later ones
# with qwen3-30b-a3b-q4_0, and 12 to 24 ms with minitron-8b-q4_0.
_FIRST_S = 19e-6
# The same for each step of a prompt, whose later launches run ahead of the device. On an H100 machine 3.4 ms passed
# before the first launch with minitron-4b-f16 and 9 ms with qwen3-30b-a3b-q4_0, besides the mask and the embeddings.
_BUILD_S = 9e-6
# How often the device's memory reads or writes a token's activations between the products (norms, rotations, sums,
# conversions), in units of n_embd values. Activations of a feed-forward network are three times as wide, those of
# experts eight times. Prompts of 1,024 and 8,192 tokens with qwen3-30b-a3b-q4_0 and everything resident are predicted
# within 5 % on two H200 machines, those of 1,024 tokens with minitron-8b-q4_0 and -f16 within 2 % on an H100 machine.
_PASSES = {"attention": 12, "ffn": 43, "experts": 104}
# The number of hand-offs between device and CPU when a shard runs on the CPU; 1 for kinds that are not listed.
# Attention has one before and one after the attention kernel, which runs where the KV cache is. Experts hand over the
# router's choice, copies, slots and rows.
_HANDOFFS = {"attention": 2.0, "experts": 5.0}
_CHOICE = 1.5  # hand-offs for the router's choice, for which the host waits
_AHEAD = 0.75  # of these hand-offs pass while the device computes the experts, if all chosen ones are cached
_INPUT = 0.5  # hand-offs for the experts' input: it is copied because the CPU may compute some of them
# The least time of the CPU for the experts of a layer, or for its router: the CPU's threads synchronise after each
# operation. Measured with 14 threads on the H100 machine.
_MEETINGS_S = {"experts": 45e-6, "shared": 70e-6}
_WITHIN_S = 16e-6  # time of copying one matrix of a cached expert within the device; measured on the H100 machine
# llama.cpp writes the mask of attention with one thread: for each token it compares the positions of all tokens of its
# sequence in the graph, and copies a row of 2 bytes for each cell. Then the CPU looks up the tokens' embeddings. Once
# the graph before has ended, they are copied to the device. The last two are bytes/s of values in F32. Measured with
# prompts of 1,024 and 8,000 tokens of minitron-4b-f16 on an H100 machine.
_COMPARED_S = 3.3e-9
_MASKED_S = 0.25e-9
_LOOKED_UP = 6.5e9
_INPUTS = 14e9
# The shares of missing experts to copy that a plan compares: among them all multiples of a half, a third, a quarter, a
# sixth and an eighth, because the experts of a layer are not divided. None is 0: a full expert cache would for ever
# keep what it holds, whatever the model chooses. The least one costs a token up to 7 % where copies are slow.
_SHARES = np.arange(3, 97) / 96
_LEAST_OFFLOADED = 32  # llama.cpp copies weights to the GPU for graphs with at least so many tokens


@record
class Conditions:
    """The conditions of a prediction, besides the model, the machine and the resident set.

    :param ring: bytes of the ring.
    :param n_ctx_used: tokens of context that each decoded token attends to.
    :param turn_s: seconds of one hand-off to the CPU and back.
    :param kv_room: the most bytes of the KV cache in VRAM. The rest passes through the KV window in every graph.
    :param kv_held: bytes of the KV cache in VRAM and host memory: of the cells in use, and of those held for further
        tokens.
    :param routing: how often experts are chosen; ``None``: all the same.
    :param kv_type: the type of the KV cache.
    :param host_budget_bytes: host memory for weights; 0 for no limit.
    :param cpu_factor: how much longer the CPU computes than the profile says.
    :param sliding_cells: the cells of a sequence in layers with a sliding window; 0: all.
    """

    ring: int
    n_ctx_used: int
    turn_s: float
    kv_room: float
    routing: Routing | None = None
    kv_type: KvType = "f16"
    host_budget_bytes: int = 0
    kv_held: float = 0.0
    cpu_factor: float = 1.0
    sliding_cells: int = 0


class Costs:
    """The times of each shard on a machine, if ``share`` of its bytes are resident.

    :param host: what is in host memory; None for all weights. The CPU computes no shard of which a part is read from
        disk for every graph.
    """

    def __init__(
        self, layout: Layout, profile: Profile, share: Floats, conditions: Conditions, host: HostShare | None = None
    ) -> None:
        self.layout, self.profile, self.resident_share, self.conditions = layout, profile, share, conditions
        shards = self.shards = shards_of(layout)
        self.disk_share = np.zeros(len(shards.n_bytes)) if host is None else host.read
        n_matrices = float("inf") if host is None else host.n_matrices
        ring = conditions.ring
        self.experts = Experts(layout, shards, share, ring, conditions.routing, n_matrices)
        self.disk_bytes = float((shards.n_bytes * self.disk_share).sum())
        """The bytes that every graph reads from disk, without experts."""
        self.disk_s = 0.0
        if self.disk_bytes:
            sizes = layout.sizes
            read_bytes = float(np.average(sizes.piece_padded_bytes, weights=self.disk_share[sizes.piece_shards]))
            self.disk_s = self.disk_bytes / profile.disk_rate(read_bytes)
        n_kernels = shards.by_kind({k: float(n) for k, n in _KERNELS.items()})
        self.kernels_s = profile.kernel_s * n_kernels
        self.first_s = _FIRST_S * float(n_kernels.sum())
        """How much longer each of the first two tokens after a prompt takes while not everything is resident."""
        self.build_s = _BUILD_S * float(n_kernels.sum())
        """How much longer each step of a prompt takes than its computation."""
        pass_s = 4 * layout.model.n_embd / profile.device_memory
        self.passes_s = pass_s * shards.by_kind({k: float(n) for k, n in _PASSES.items()})
        self.handoffs = shards.by_kind(_HANDOFFS, 1.0)
        self.meetings_s = conditions.cpu_factor * shards.by_kind(_MEETINGS_S)
        # Each tensor is copied separately.
        each_s = shards.tensor_bytes / profile.copy_rates(np.maximum(shards.tensor_bytes, 1.0))
        self.copy_s = np.add.reduceat(each_s, shards.n_tensors.cumsum() - shards.n_tensors) * (1 - share)
        # How far copies can run ahead, in seconds: the ring without the step in use, or while no step is in use at
        # least one step.
        self.beside_s = max(ring - layout.min_ring_bytes, 0) / profile.h2d
        self.ahead_s = max(self.beside_s, layout.min_ring_bytes / profile.h2d)

    def bound(self, graphs: Sequence[tuple[int, int, int]], *, may_use_cpu: bool) -> float:
        """A lower bound of the time of several graphs with this resident set. Each graph copies its weights again.
        Experts that no token uses are not counted.

        :param graphs: for each graph the tokens, the tokens of a sequence before them, and the sequences.
        """
        profile, left_out = self.profile, 1 - self.resident_share
        copy: list[Floats] = []
        device: list[Floats] = []
        cpu: list[Floats] = []
        resident_s = kv_copy_s = memory_s = disk_s = 0.0
        for n_tokens, n_before, n_seq in graphs:
            graph = self.at(n_tokens, n_before, n_seq)
            copy.append(graph.fetched * left_out / profile.h2d)
            device.append(graph.on_device * left_out)
            cpu.append(graph.on_host * left_out * graph.uncached * min(self.conditions.cpu_factor, 1.0))
            resident_s += float((graph.on_device * self.resident_share).sum()) + graph.attention_s
            kv_copy_s += graph.host_kv.copy_s
            memory_s += graph.memory_s
            disk_s += graph.from_disk.ahead_s + graph.from_disk.experts_s
        least_s = roofline.least_seconds(
            np.concatenate(copy),
            np.concatenate(device),
            np.concatenate(cpu) if may_use_cpu else None,
            resident_s=resident_s,
            copied_s=kv_copy_s,
            memory_s=memory_s if may_use_cpu else 0.0,
        )
        return max(least_s, disk_s)

    def static_seconds(self, n_tokens: int, n_before: int, n_seq: int = 1) -> float:
        """The time of a graph without streaming, as llama.cpp runs it: copies and computation do not overlap. The
        shards that are not resident are experts or adjacent layers, so only experts cause hand-offs."""
        graph, left_out = self.at(n_tokens, n_before, n_seq), 1 - self.resident_share
        always = graph.attention_s + float(self.kernels_s.sum()) + self.conditions.turn_s
        if n_tokens >= _LEAST_OFFLOADED:
            copied = self.shards.n_bytes * left_out
            return always + float(copied.sum() / self.profile.h2d_pageable + graph.on_device.sum())
        experts = int((self.shards.masks["experts"] & (left_out > 0)).sum())
        computed = graph.on_device * self.resident_share + graph.on_host * left_out
        return always + float(computed.sum()) + experts * graph.handoff_s

    @cached_property
    def stream_share(self) -> float:
        """The share of a token's missing experts that is copied to the device. The CPU computes the others."""
        return self.at(1, self.conditions.n_ctx_used).expert_stream_share

    def at(self, n_tokens: int, n_before: int, n_seq: int = 1, n_rows: int = 0) -> Graph:
        """The times of a graph.

        :param n_tokens: tokens of all sequences together, the same number for each.
        :param n_before: tokens that each sequence holds before.
        :param n_rows: rows of logits; 0 for one of each sequence.
        """
        return Graph(self, n_tokens, n_before, n_seq, n_rows or n_seq)


def _first(values: Floats, n: float) -> float:
    """The sum of the first ``n`` values; ``n`` may have a fraction."""
    return float(np.interp(n, np.arange(len(values) + 1), np.concatenate(([0.0], np.cumsum(values)))))


@record
class _HostKv:
    """Keys and values in host memory, which are copied to the device.

    :param n_bytes: their bytes.
    :param copy_s: the time to copy them.
    :param n_layers: the number of layers whose keys and values they are.
    """

    n_bytes: float
    copy_s: float
    n_layers: float


@dataclass(frozen=True, eq=False)
class FromDisk:
    """What a graph reads from disk.

    :param n_bytes: its bytes.
    :param ahead_s: the time of reads that run ahead of use.
    :param experts_s: the time of reads for which all else waits.
    :param computable: the shards that the CPU can compute; shape [shards].
    """

    n_bytes: float
    ahead_s: float
    experts_s: float
    computable: Mask


class Preparation(NamedTuple):
    """The time in which the host prepares a graph.

    :param ahead_s: the part that may pass while the device computes the step of the prompt before this one.
    :param then_s: the rest. Device and copies wait meanwhile.
    """

    ahead_s: float
    then_s: float

    def behind(self, computed_s: float) -> float:
        """The time for which the device waits behind a step that takes ``computed_s``; 0.0: there is none."""
        return max(self.ahead_s - computed_s, 0.0) + self.then_s


class _Beside(NamedTuple):
    """How the CPU's work and copies go beside each other.

    :param cpu_longer: how much longer the CPU takes while copies run, relative to its time alone.
    :param copies_longer: the same for copies, while the CPU computes.
    :param in_turns: the CPU makes the copies itself.
    """

    cpu_longer: float
    copies_longer: float
    in_turns: bool


class _LayersOfExperts(NamedTuple):
    """The missing experts of a graph with few tokens, in all layers. Each is computed by the CPU or copied to the
    device as a whole, so if a layer misses only one, the CPU and the copies take turns.

    :param n_used: the experts that a layer uses.
    :param missing: the probability that one of them is missing.
    :param here_s: the time of the CPU if it computes all that are missing, beside copies.
    :param there_s: the time of copies if all are copied, beside the CPU's work.
    :param meetings_s: what the CPU takes besides, if it computes any in each layer.
    """

    n_used: int
    missing: float
    here_s: float
    there_s: float
    meetings_s: float
    beside: _Beside

    def best_share(self) -> float:
        """The share of the missing experts to copy."""
        return float(_SHARES[self.seconds(_SHARES)[0].argmin()])

    def seconds(self, shares: Floats) -> tuple[Floats, Floats]:
        """For each share of experts to copy: the time until they are computed and copied, and that of the CPU alone."""
        n = np.arange(self.n_used + 1)
        chances = reduce(np.convolve, [(1 - self.missing, self.missing)] * self.n_used, np.ones(1))
        # The device copies so many experts of a layer that the share is reached over several layers.
        wanted = np.minimum(shares[:, None] * n, n)
        fewer = np.floor(wanted)
        part = wanted - fewer
        pairs = zip(self._layers_s(n, fewer), self._layers_s(n, np.minimum(fewer + 1, n)), strict=True)
        whole_s, computed_s = (((1 - part) * less + part * more) @ chances for less, more in pairs)
        return whole_s, computed_s

    def _layers_s(self, n: NDArray[np.int64], copied: Floats) -> tuple[Floats, Floats]:
        """The same if each layer misses ``n`` experts of which so many are copied."""
        each = max(self.n_used * self.missing, 1e-12)
        computed = n - copied
        computed_s = self.here_s * computed / each + np.where(computed > 0, self.meetings_s, 0.0)
        copied_s = self.there_s * copied / each
        computed_s /= np.where(copied > 0, 1.0, 1 + self.beside.cpu_longer)
        copied_s /= np.where(computed > 0, 1.0, 1 + self.beside.copies_longer)
        whole_s = computed_s + copied_s if self.beside.in_turns else np.maximum(computed_s, copied_s)
        return whole_s, computed_s


class _Divided(NamedTuple):
    """The work of a graph, divided between the device, the CPU and copies. Shards are in the order of use.

    :param on_cpu: the shards that the CPU computes, of those that are not resident.
    :param streamed: the others of these.
    :param copy_s: the time of all copies but single experts, if the CPU does nothing.
    :param host_s: the time of the CPU, if nothing is copied. For layers of which some experts are copied meanwhile, the
        time of these copies counts if it is longer.
    :param turns: for each shard the time on the device, and of hand-offs to the CPU and back; shape [shards].
    :param host_slower: how much longer the CPU takes beside the copies.
    :param copy_slower: how much longer copies take beside the CPU.
    """

    on_cpu: Mask
    streamed: Mask
    copy_s: float
    host_s: float
    turns: Floats
    host_slower: float
    copy_slower: float


class Graph:
    """The times of one graph; made by :meth:`Costs.at`."""

    def __init__(self, costs: Costs, n_tokens: int, n_before: int, n_seq: int, n_rows: int) -> None:
        profile, shards, experts = costs.profile, costs.shards, costs.experts
        one_at_a_time = n_tokens < costs.layout.sizes.prefill_tokens
        used = experts.routing.used(n_tokens)
        n_cached = experts.n_cached if one_at_a_time else experts.n_cached_in_prompts
        cached = _first(used, n_cached) / max(float(used.sum()), 1e-9)
        touched = self._compute(costs, n_tokens, n_rows, used)
        # The part of the weights that host memory must supply if they are not resident: cached experts need no copy.
        self.uncached = np.where(experts.missing, 1 - cached, 1.0)
        self.fetched = touched * self.uncached
        self.from_disk = self._from_disk(costs, used, n_cached, one_at_a_time=one_at_a_time)
        self._attend(costs, n_tokens, n_before, n_seq)
        self.preparation = self._prepare(costs, n_tokens, n_before, n_seq)
        activations = 4 * n_tokens * costs.layout.model.n_embd * (1 / profile.h2d + 1 / profile.d2h)
        self.handoff_s = costs.conditions.turn_s + activations
        self._beside = _Beside(*profile.slowdowns(shards.main_type), profile.cpu_copies)
        share = costs.resident_share
        self.memory_s = (float((self.fetched * (1 - share)).sum()) + self.host_kv.n_bytes) / profile.memory

        device_s = self.on_device + costs.kernels_s + n_tokens * costs.passes_s
        self._computed_s = costs.conditions.cpu_factor * self.on_host * (1 - share) + costs.meetings_s
        cpu_s, self._computed_bytes = self._computed_s, self.fetched * (1 - share)
        shared_s, turns, copied_s = self.on_device * share, costs.handoffs, np.zeros(len(shards.n_bytes))
        self.expert_stream_share = 0.0
        if one_at_a_time and experts.missing.any():
            cpu_s, shared_s, turns, copied_s = self._single_experts(costs, n_tokens, used, cached, touched, cpu_s)
        copy_s, share_s = self._whole_experts(costs, n_tokens)
        # A graph of one token streams single experts, a larger one whole tensors of experts. In both cases the host
        # must read the router's choice in each layer. With few tokens the device may begin before it has.
        ahead_of_host_s = one_at_a_time * _AHEAD * self.handoff_s * cached ** float(used.sum())
        self._streamed_singly = float(n_tokens == 1)
        beside_s, ahead_s = costs.beside_s, costs.ahead_s
        if experts.missing.any() and n_tokens == 1:
            copy_s = np.where(experts.missing, 0.0, copy_s)
            choice_s = _CHOICE * self.handoff_s - ahead_of_host_s
            device_s = device_s + copied_s + np.where(experts.missing, choice_s, 0.0)
            slot_s = experts.largest_other / profile.h2d
            beside_s, ahead_s = 2 * slot_s, 3 * slot_s
        elif experts.missing.any():
            device_s = device_s + np.where(experts.missing, costs.conditions.turn_s - ahead_of_host_s, 0.0)
            # The ring reserves room for all experts of a layer, but only some of them are copied.
            beside_s, ahead_s = beside_s * share_s, ahead_s * share_s
        self._ahead_s = beside_s, ahead_s
        order = self._order = costs.layout.use_order
        self._device_s, self._cpu_s, self._expert_copy_s = device_s[order], cpu_s[order], copied_s[order]
        self._shared_s, self._handoffs, self._copy_s = shared_s[order], turns[order], copy_s[order]
        self._left_out = share[order] < 1.0
        self._always_s = self.attention_s + costs.conditions.turn_s

    def _compute(self, costs: Costs, n_tokens: int, n_rows: int, used: Floats) -> Floats:
        """Sets the times of matrix products on the device and on the CPU.

        :returns: the bytes of weights that the graph uses.
        """
        shards, profile = costs.shards, costs.profile
        experts = shards.masks["experts"]
        chosen_alike = 1 - (1 - shards.active) ** n_tokens
        share_used = np.where(experts, used.mean(), chosen_alike) if used.size else chosen_alike
        # The columns of each product. For experts: the tokens that use the same expert.
        columns = np.where(shards.masks["output"], n_rows, n_tokens * shards.active / share_used)
        none = np.zeros(len(shards.n_bytes))
        self.on_device = none + sum(
            shards.n_weights[i] * share_used * profile.seconds_per_weight(kind, columns, on_cpu=False)
            for kind, i in shards.kinds.items()
        )
        # The CPU computes the experts of each token separately, so the time is proportional to the tokens.
        at_once, times = np.where(experts, 1.0, columns), np.where(experts, columns, 1.0)
        self.on_host = none + sum(
            shards.n_weights[i] * share_used * times * profile.seconds_per_weight(kind, at_once, on_cpu=True)
            for kind, i in shards.kinds.items()
        )
        touched: Floats = shards.n_bytes * share_used
        return touched

    @staticmethod
    def _from_disk(costs: Costs, used: Floats, n_cached: float, *, one_at_a_time: bool) -> FromDisk:
        experts, computable = costs.experts, costs.disk_share == 0
        if experts.n_in_host == float("inf"):
            return FromDisk(costs.disk_bytes, costs.disk_s, 0.0, computable)
        # The experts that are used most are in VRAM, the next ones in host memory.
        n_missing = float(used.sum()) - _first(used, n_cached + experts.n_in_host)
        n_bytes = n_missing * experts.matrix_bytes * experts.n_matrices
        experts_s = n_bytes / costs.profile.disk_rate(experts.matrix_bytes)
        if not one_at_a_time:  # there are no whole tensors of experts
            computable = computable & ~experts.missing
        return FromDisk(costs.disk_bytes + n_bytes, costs.disk_s, experts_s, computable)

    def _attend(self, costs: Costs, n_tokens: int, n_before: int, n_seq: int) -> None:
        """Sets the times of attention, and those of keys and values in host memory."""
        model, conditions = costs.layout.model, costs.conditions
        head_dim, n_head, _ = heads = heads_of(model)
        n_cells, n_attended = n_before + n_tokens / n_seq, n_before + n_tokens / n_seq / 2
        n_slid = min(n_cells, conditions.sliding_cells or n_cells)
        n_attend, n_cached = len(model.attention_layers), max(len(model.cached_layers), 1)
        slide = len(model.sliding_layers) / n_cached
        states, by_cell = kv_bytes(model, 0, n_seq), cell_bytes(model, conditions.kv_type)
        full, sliding = by_cell[0] * n_cells * n_seq, by_cell[1] * n_slid * n_seq
        again = n_attend / n_cached  # some layers read what others keep
        self.attention_s = 0.0
        for share, attended, read in (
            (1 - slide, n_attended, states + full * again),
            (slide, min(n_attended, n_slid), sliding * again),
        ):
            kv_rate, flops_rate = costs.profile.attention_rates(heads, attended, conditions.kv_type)
            flops = 4.0 * head_dim * n_head * n_attend * share * n_tokens * attended
            self.attention_s += max(flops / flops_rate, read / kv_rate)
        # Whole layers are in host memory.
        kept = states + full + sliding
        left_out = max(1 - conditions.kv_room / max(kept, conditions.kv_held, 1.0), 0.0)
        n_kept = len(model.cached_layers | model.recurrent_layers)
        n_layers = float(np.ceil(left_out * n_kept))
        on_host = kept * n_layers / max(n_kept, 1)
        self.host_kv = _HostKv(on_host, on_host / costs.profile.h2d, n_layers)

    @staticmethod
    def _prepare(costs: Costs, n_tokens: int, n_before: int, n_seq: int) -> Preparation:
        each = n_tokens / n_seq
        masked = n_cells = n_before + each
        if costs.layout.model.sliding_layers:  # they have a mask of their own
            masked += min(n_cells, costs.conditions.sliding_cells or n_cells)
        mask_s = n_tokens * (each * _COMPARED_S + masked * n_seq * _MASKED_S)
        if each == 1 or n_tokens < costs.layout.sizes.prefill_tokens:  # llama.cpp uses the graph before again
            return Preparation(0.0, mask_s)
        embedded_bytes = 4 * n_tokens * costs.layout.model.n_embd
        ahead_s, then_s = mask_s + embedded_bytes / _LOOKED_UP, embedded_bytes / _INPUTS + costs.build_s
        if not can_take_back(costs.layout.model, int(each), costs.conditions.sliding_cells):
            return Preparation(0.0, ahead_s + then_s)
        return Preparation(ahead_s, then_s)

    def _single_experts(
        self, costs: Costs, n_tokens: int, used: Floats, cached: float, touched: Floats, cpu_s: Floats
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """The times of a graph with few tokens. It handles experts one at a time. Their copies overlap only with the
        CPU's work in the same layer, and both slow each other down. Copies that the CPU makes overlap with none of it.

        :returns: for each shard the time on the CPU, the time of the part that stays on the device while the CPU
            computes the shard, the number of hand-offs, and the time of copies.
        """
        share, missing = costs.resident_share, costs.experts.missing
        uncached = 1 - cached
        single_rate = costs.profile.copy_rate(costs.experts.matrix_bytes) / (1 + self._beside.copies_longer)
        there_s = (touched / single_rate + self.on_device) * (1 - share) * uncached
        here_s = (1 + self._beside.cpu_longer) * costs.conditions.cpu_factor * self.on_host * (1 - share) * uncached
        meetings_s = costs.meetings_s * (1 - share)
        here, there, meetings = (float(each[missing].sum()) for each in (here_s, there_s, meetings_s))
        work = _LayersOfExperts(round(float(used.sum())), uncached, here, there, meetings, self._beside)
        # The device uses one share for all sizes of graphs: the best one for a single token.
        self.expert_stream_share = work.best_share() if n_tokens == 1 else costs.stream_share
        whole_s, computed_s = (float(each[0]) for each in work.seconds(np.array([self.expert_stream_share])))
        of_layer = here_s / max(here, 1e-12)
        on_device_s = self.on_device * share
        on_device_s = on_device_s + np.where(missing, self.on_device * (1 - share) * cached + costs.kernels_s, 0.0)
        copied_s = np.where(missing, self.fetched * (1 - share) / single_rate, 0.0)
        at_least = _CHOICE + _INPUT
        turns = np.where(missing, at_least + (costs.handoffs - at_least) * uncached, costs.handoffs)
        self._computed_s = np.where(missing, of_layer * computed_s, self._computed_s)
        self._computed_bytes = self._computed_bytes * np.where(missing, 1 - self.expert_stream_share, 1.0)
        cpu_s = np.where(missing, of_layer * whole_s, cpu_s)
        return cpu_s, on_device_s, turns, copied_s

    def _whole_experts(self, costs: Costs, n_tokens: int) -> tuple[Floats, float]:
        """The times of a larger graph. It streams whole tensors of experts. Copies begin before the router has chosen,
        with the experts that the previous graph used. Together with the missing ones that is about as many as twice the
        tokens would use.

        :returns: for each shard the time of copies; that of experts, as a share of copying all of them.
        """
        shards, experts = costs.shards, costs.experts
        predicted = experts.routing.used(2 * n_tokens)
        predicted_cached = _first(predicted, experts.n_cached_in_prompts)
        share_copied = (float(predicted.sum()) - predicted_cached) / max(predicted.size, 1)
        # Each matrix of an expert is copied separately, but adjacent ones are copied together.
        runs_rate = costs.profile.copy_rate(experts.matrix_bytes / max(1 - share_copied, 1e-3))
        streamed_s = shards.n_bytes * share_copied * (1 - costs.resident_share) / runs_rate
        # Cached experts are copied within the device, each matrix separately.
        within_s = _WITHIN_S * predicted_cached * shards.n_tensors * (1 - costs.resident_share)
        copy_s = np.where(experts.missing, streamed_s + within_s, costs.copy_s)
        all_s = float((shards.n_bytes * (1 - costs.resident_share))[experts.missing].sum()) / costs.profile.h2d
        return copy_s, float(copy_s[experts.missing].sum()) / max(all_s, 1e-12)

    def seconds(self, on_cpu: Mask) -> float:
        """The predicted time of the graph. Of the shards that are not resident, the CPU computes those in ``on_cpu``
        and the others are streamed."""
        return self.preparation.behind(0.0) + self.computed_s(on_cpu)

    def computed_s(self, on_cpu: Mask) -> float:
        """The part of :meth:`seconds` after the preparation."""
        return self.from_disk.experts_s + max(self.lanes_s(on_cpu), self.memory_s, self.from_disk.ahead_s)

    def cpu_rate(self, on_cpu: Mask) -> float:
        """The bytes/s of weights that the CPU reads while it computes; 0.0 if it computes nothing."""
        work = self._divide(on_cpu)
        seconds = float(self._computed_s[self._order] @ work.on_cpu) * work.host_slower
        return float(self._computed_bytes[self._order] @ work.on_cpu) / seconds if seconds else 0.0

    def lanes_s(self, on_cpu: Mask, best: float = float("inf")) -> float:
        """The time in which device, CPU and copies are done. :meth:`seconds` adds what is the same for all ``on_cpu``,
        and is more where host memory or the disk is the limit.

        :param best: if the time is at least this, the result may be any number from ``best`` up, which is quicker.
        """
        work = self._divide(on_cpu)
        cpu, streamed, turns, kv_copy_s = work.on_cpu, work.streamed, work.turns, self.host_kv.copy_s
        chain = float(turns.sum()) + self._always_s + work.host_s * work.host_slower
        singly = self._streamed_singly * float(self._expert_copy_s @ streamed)
        singly += self.expert_stream_share * float(self._expert_copy_s @ cpu)
        copying = work.copy_s + singly + (work.host_s if self._beside.in_turns else 0.0)
        if max(copying, chain) >= best:  # that ends most calls: a plan tries many splits
            return best
        each_s = turns + np.where(cpu, self._cpu_s * work.host_slower, 0.0)
        # The link is not free for other copies while single experts are copied.
        taken = self._streamed_singly * self._expert_copy_s * np.where(cpu, self.expert_stream_share, streamed)
        held_s = self._held_up(float((each_s - taken).sum()), kv_copy_s * work.copy_slower)
        least = max(copying, chain + held_s)
        if least >= best or not streamed.any():
            return least
        # Copies run ahead while a streamed shard is used, and further until the next one is needed. If the copy of that
        # one is not complete then, the device waits for it.
        starts = np.flatnonzero(streamed)
        meanwhile = np.maximum((turns if self._beside.in_turns else each_s) - taken, 0.0)
        uses = meanwhile[starts] + self._always_s / len(starts)
        gaps = np.add.reduceat(meanwhile, starts) - meanwhile[starts]
        gaps[-1] += meanwhile[: starts[0]].sum()
        copies = self._copy_s[starts] * work.copy_slower + max(kv_copy_s - held_s, 0.0) / len(starts)
        beside_s, ahead_s = self._ahead_s
        lead, waits = min(float(gaps[-1]), ahead_s), held_s
        for copy_s, use_s, gap_s in zip(copies.tolist(), uses.tolist(), gaps.tolist(), strict=True):
            if copy_s > lead:
                waits += copy_s - lead
                lead = copy_s
                if chain + waits >= best:
                    break
            lead -= copy_s
            # Conditions and no min(): a plan comes here tens of thousands of times.
            if lead < beside_s:
                lead = lead + use_s if lead + use_s < beside_s else beside_s
            if lead < ahead_s:
                lead = lead + gap_s if lead + gap_s < ahead_s else ahead_s
        return max(least, chain + waits)

    def _divide(self, on_cpu: Mask) -> _Divided:
        cpu = (on_cpu & self.from_disk.computable)[self._order] & self._left_out
        streamed = self._left_out & ~cpu
        copy_s = float(self._copy_s @ streamed) + self.host_kv.copy_s
        host_s = float(self._cpu_s @ cpu)
        # Adjacent shards on the CPU save a hand-off.
        handoffs = self._handoffs.copy()
        handoffs[1:] -= cpu[:-1]
        turns = np.where(cpu, self._shared_s + handoffs * self.handoff_s, self._device_s)
        # Copies and the CPU share host memory. Each is slowed down for the share of time in which the other works.
        both_s = max(copy_s, float(turns.sum()) + self._always_s + host_s)
        host_slower = 1 + self._beside.cpu_longer * min(copy_s / both_s, 1.0)
        copy_slower = 1 + self._beside.copies_longer * host_s / both_s
        return _Divided(cpu, streamed, copy_s, host_s, turns, host_slower, copy_slower)

    def _held_up(self, free_s: float, kv_copy_s: float) -> float:
        """How long the graph waits for single experts whose copies stand behind keys and values. These are copied a
        layer at once, and longer than the link is free between the experts of two layers.

        :param free_s: the time in which the link copies no experts.
        :param kv_copy_s: the time of the copies of keys and values.
        """
        n_experts = int((self._expert_copy_s > 0).sum()) if self._streamed_singly else 0
        if not n_experts or not kv_copy_s:
            return 0.0
        return max(kv_copy_s - self.host_kv.n_layers * free_s / n_experts, 0.0)
