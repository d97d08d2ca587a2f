"""The tensors and shards of a model, read from its GGUF header.

Reading also checks the header (:mod:`frameshard.plan.checks`). It loads no weights and does not need llama.cpp. A file
of 16 GiB with a vocabulary of 150,000 tokens takes a fraction of a second.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from frameshard.errors import BadModel
from frameshard.plan import checks
from frameshard.plan.header import (
    MAX_LAYERS,
    Header,
    Tensor,
    Value,
    Wrong,
    read_header,
    unique,
    whole,
    wrong,
)

CORE_MAX_BYTES = 64 << 10
"""Tensors up to this size (norms, biases) are the *core*. It is always resident."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The unit of placement.

    :param kind: attention (or a recurrent layer in its place), shared (router and experts that every token uses), ffn
        (a dense feed-forward network without its down projection), ffn_down, experts, output, vision, other, or core.
    :param active_bytes: the bytes that one token reads on average. Of experts that is the share that a token uses; of
        layers that decoding does not use it is 0; otherwise it is all bytes.
    """

    name: str
    kind: str
    layer: int | None
    tensors: tuple[Tensor, ...]
    n_bytes: int
    active_bytes: int


@dataclass(frozen=True, eq=False)
class Model:
    """A checked model file.

    :param shards: in the order of the file. The token embedding stays in host memory and is in no shard, unless it is
        the output head too.
    :param metadata: all keys of the header, except for long arrays.
    """

    path: Path
    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    file_bytes: int
    tensors: tuple[Tensor, ...] = field(repr=False)
    shards: tuple[Shard, ...] = field(repr=False)
    chat_template: str | None = field(repr=False)
    metadata: Mapping[str, Value] = field(repr=False)
    fingerprint: str
    """SHA-256, in hex, of what :attr:`frameshard.plan.header.Header.fingerprint` says; of a split model, of those of
    its files."""

    @cached_property
    def core(self) -> Shard | None:
        return next((shard for shard in self.shards if shard.kind == "core"), None)

    @property
    def core_bytes(self) -> int:
        return self.core.n_bytes if self.core else 0

    @cached_property
    def embedding_by_layer(self) -> int:
        """The values of a token's embedding for single layers, all layers together; 0: the model has none."""
        return next((t.shape[0] for t in self.tensors if t.name == "per_layer_token_embd.weight"), 0)

    @cached_property
    def recurrent_layers(self) -> frozenset[int]:
        """The layers with a recurrent state."""
        return self._layers_with(_RECURRENT)

    @cached_property
    def attention_layers(self) -> frozenset[int]:
        """The layers in which tokens attend to each other."""
        fused = self._layers_with(_FUSED) - self.recurrent_layers  # the others are linear attention
        found = self._layers_with(_QUERIES) | fused
        if not found and not self.recurrent_layers:
            found = frozenset(range(self.n_layer))  # tensors with other names
        kv_heads = self.by_layer("attention.head_count_kv", -1)
        return frozenset(layer for layer in found if kv_heads[layer])

    @cached_property
    def cached_layers(self) -> frozenset[int]:
        """The layers that keep keys and values. The other attention layers use those of layers before them."""
        n_shared = self.integer("attention.shared_kv_layers")
        n_cached = _CACHED_OF_GEMMA_3N if self.arch == "gemma3n" else self.n_layer - n_shared
        return frozenset(layer for layer in self.attention_layers if layer < n_cached)

    @cached_property
    def sliding_layers(self) -> frozenset[int]:
        """The layers that keep keys and values and attend to the last tokens only, in a sliding window. Empty if it is
        not known which do."""
        if self.arch not in _SLIDING_PERIODS or not self.integer("attention.sliding_window"):
            return frozenset()
        key = "attention.sliding_window_pattern"
        if isinstance(self.metadata.get(f"{self.arch}.{key}"), tuple):
            slides = [bool(each) for each in self.by_layer(key)]
        else:
            period = self.integer(key, _SLIDING_PERIODS[self.arch])
            slides = [layer % period < period - 1 if period else True for layer in range(self.n_layer)]
        return frozenset(layer for layer in self.cached_layers if slides[layer])

    def rope_factors(self, n_ctx: int) -> str:
        """Which RoPE factors llama.cpp takes for sequences of ``n_ctx`` tokens, "short" or "long"; "" if the model does
        not have both."""
        if all(tensor.name != "rope_factors_long.weight" for tensor in self.tensors):
            return ""
        return "long" if n_ctx > self.integer("rope.scaling.original_context_length", self.n_ctx_train) else "short"

    def _layers_with(self, tensors: re.Pattern[str]) -> frozenset[int]:
        """The layers with a tensor of such a name, without those for multi-token prediction."""
        found = (int(match[1]) for tensor in self.tensors if (match := tensors.match(tensor.name)))
        n_loaded = self.n_layer - self.integer("nextn_predict_layers")
        return frozenset(layer for layer in found if layer < n_loaded)

    def integer(self, key: str, default: int = 0) -> int:
        """The architecture's value of ``key``, for example ``attention.head_count``; the largest if layers differ."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, tuple):
            return int(max(value, default=default))
        return int(value) if isinstance(value, int | float) else default

    def by_layer(self, key: str, default: int = 0) -> tuple[int, ...]:
        """The architecture's value of ``key`` for each layer; a single value is repeated."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, tuple) and len(value) >= self.n_layer:
            return tuple(int(v) for v in value[: self.n_layer])
        return (self.integer(key, default),) * self.n_layer


def read_model(path: str | os.PathLike[str]) -> Model:
    """Reads and checks the header of a GGUF file. For the first file of a split model it reads the others too.

    :raises ModelNotFound: there is no such file.
    :raises BadModel: the file is not a GGUF, is truncated or contradicts itself. The message says what is wrong.
    """
    path = Path(path)
    header = read_header(path)
    try:
        split_count = whole(header.metadata, "split.count", 1)
        tensors, file_bytes, fingerprint = list(header.tensors), header.file_bytes, header.fingerprint
        if split_count > 1:
            for part, part_path in enumerate(_parts(path, split_count, header)[1:], start=1):
                more = read_header(part_path, part)
                tensors += more.tensors
                file_bytes += more.file_bytes
                fingerprint = hashlib.sha256(fingerprint + more.fingerprint).digest()
            unique((tensor.name for tensor in tensors), "tensor name")
        return _build(path, header, tuple(tensors), file_bytes, fingerprint.hex())
    except Wrong as wrong:
        raise BadModel(f"{path.name}: {wrong}", path=str(path)) from None


def _parts(path: Path, count: int, header: Header) -> list[Path]:
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if whole(header.metadata, "split.no", 0) != 0 or match is None or int(match[2]) != count:
        wrong(f"part of a model split over {count} files; give the first, named like NAME-00001-of-{count:05d}.gguf")
    return [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _build(path: Path, header: Header, tensors: tuple[Tensor, ...], file_bytes: int, fingerprint: str) -> Model:
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        wrong("general.architecture is missing")
    if not tensors:
        wrong("there are no tensors in it")
    if arch == "clip":
        wrong("it is a vision tower, not a language model: give it as mmproj, beside one")
    n_layer = whole(metadata, f"{arch}.block_count", 0)
    if not 1 <= n_layer <= MAX_LAYERS:
        wrong(f"{arch}.block_count is {n_layer}, not from 1 to {MAX_LAYERS}")
    n_embd = whole(metadata, f"{arch}.embedding_length", 0)
    if not 1 <= n_embd <= checks.MAX_EMBD:
        wrong(f"{arch}.embedding_length is {n_embd}, not from 1 to {checks.MAX_EMBD}")
    n_ctx_train = whole(metadata, f"{arch}.context_length", 0)
    if not 1 <= n_ctx_train < 1 << 31:
        wrong(f"{arch}.context_length is {n_ctx_train}, not from 1 to {(1 << 31) - 1}")
    n_vocab = checks.check_vocabulary(header)
    checks.check_numbers(metadata, arch)
    checks.check_heads(metadata, arch, n_layer, n_embd, tensors)
    checks.check_shared_caches(metadata, arch, n_layer)
    for tensor in tensors:
        checks.check_type(tensor)
    checks.check_biases(tensors)
    n_expert, used = checks.check_experts(metadata, arch, n_layer)
    n_nextn = whole(metadata, f"{arch}.nextn_predict_layers", 0)
    if not 0 <= n_nextn < n_layer:
        wrong(f"{arch}.nextn_predict_layers is {n_nextn} of {n_layer} layers")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in checks.ROPE_SCALING:
        wrong(f"{arch}.rope.scaling.type is {scaling!r}")
    template = metadata.get("tokenizer.chat_template")
    return Model(
        path=path,
        arch=arch,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_expert=n_expert,
        n_expert_used=max(used, default=0),
        n_ctx_train=n_ctx_train,
        file_bytes=file_bytes,
        tensors=tensors,
        shards=_make_shards(tensors, n_layer, n_nextn, n_expert, used),
        chat_template=template if isinstance(template, str) else None,
        metadata=MappingProxyType(metadata),
        fingerprint=fingerprint,
    )


_RECURRENT = re.compile(r"blk\.(\d+)\.(?:ssm_|time_mix_|shortconv\.)")
_QUERIES = re.compile(r"blk\.(\d+)\.attn_q(?:_[ab])?\.weight")
_FUSED = re.compile(r"blk\.(\d+)\.attn_qkv\.weight")
_CACHED_OF_GEMMA_3N = 20  # as llama.cpp has it: no key tells
# Of so many layers the last has no sliding window. This is what llama.cpp assumes where a file does not tell; files of
# the architectures with 1 always do.
_SLIDING_PERIODS = {
    "afmoe": 4,
    "cohere2": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gemma4": 1,
    "gpt-oss": 2,
    "mellum": 4,
    "mimo2": 1,
    "olmo2": 4,
    "plamo3": 8,
    "step35": 1,
}

# The kind of a tensor in a layer, by its name after "blk.N.". The first pattern that matches decides.
_GROUPS = (
    ("experts", re.compile(r"ffn_(gate|up|down|gate_up)_(ch)?exps\b|ffn_(gate|up|down)\.\d+\.")),
    ("shared", re.compile(r"ffn_gate_(inp|tid2eid)|ffn_(gate|up|down)_shexp|ffn_(routed|latent)_|exp_probs")),
    ("ffn_down", re.compile(r"ffn_down\b")),
    ("ffn", re.compile(r"ffn_|channel_mix_|hc_ffn_|(pre|post)_ffw_")),
    ("attention", re.compile(r"attn_|cross_attn_|post_attention_|ssm_|time_mix_|shortconv\.|indexer|laurel_|hc_attn_")),
)
_LAYER = re.compile(r"(?P<stack>(?:enc\.|dec\.)?blk\.(?P<layer>\d+))\.(?P<rest>.+)")
_VISION = re.compile(r"(v|a|mm|resampler|model|adapter|s2)\.(.*?\bblk\.(?P<layer>\d+)\.)?")
_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd)\.weight|masked_embd_\w+(\.weight)?")
_OUTPUT = re.compile(r"output|cls|dense_\d|altup_|dec\.output|enc\.output|nextn\.post|fc\b|d2t|markov_|conf_|selector_")


def _group(name: str) -> tuple[str, str, int | None]:
    """The shard of a tensor that is neither small nor an input: (name, kind, layer)."""
    if match := _LAYER.match(name):
        layer = int(match["layer"])
        kind = next((kind for kind, pattern in _GROUPS if pattern.match(match["rest"])), "other")
        return f"{match['stack']}.{kind}", kind, layer
    if match := _VISION.match(name):
        stack = match[1] if match["layer"] is None else f"{match[1]}.blk.{match['layer']}"
        return stack, "vision", int(match["layer"] or 0)
    return ("output", "output", None) if _OUTPUT.match(name) else ("other", "other", None)


def _make_shards(
    tensors: tuple[Tensor, ...], n_layer: int, n_nextn: int, n_expert: int, used: list[int]
) -> tuple[Shard, ...]:
    names = {tensor.name for tensor in tensors}
    tied = "output.weight" not in names
    groups: dict[tuple[str, str, int | None], list[Tensor]] = {}
    for tensor in tensors:
        group = _group(tensor.name)
        layer = group[2]
        if layer is not None and layer >= n_layer and tensor.name.startswith(("blk.", "enc.")):
            wrong(f"tensor {tensor.name} belongs to a layer beyond the {n_layer} there are")
        if tied and tensor.name == "token_embd.weight":
            group = ("output", "output", None)
        elif _INPUT.fullmatch(tensor.name):
            continue
        elif tensor.n_bytes <= CORE_MAX_BYTES:
            group = ("core", "core", None)
        groups.setdefault(group, []).append(tensor)
    shards: list[Shard] = []
    for (name, kind, layer), members in groups.items():
        n_bytes = sum(tensor.n_bytes for tensor in members)
        active = n_bytes
        if kind == "experts" and n_expert and layer is not None and layer < n_layer:
            active = n_bytes * used[layer] // n_expert
        if layer is not None and kind != "vision" and n_layer - n_nextn <= layer < n_layer:
            active = 0  # layers for multi-token prediction, which decoding does not use
        shards.append(Shard(name, kind, layer, tuple(members), n_bytes, active))
    return tuple(shards)
