"""Checks of a GGUF header. llama.cpp does not check all of it, and some errors end the process: a repeated token
string, more experts used than there are, a norm of integers. These checks report such errors as :class:`BadModel`. They
cover the errors that any architecture can have. An error that only single architectures have may still end an engine
process.

Each function raises :class:`~.header.Wrong`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from frameshard.plan.header import GGML_TYPES, Header, Tensor, Value, whole, wrong

_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_EMBD = 1 << 20
_MAX_HEADS = 1 << 16
_BYTE = 6  # token type
_PLAIN = ("F32", "F16", "BF16")
_NO_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")
_TABLE = re.compile(r"tid2eid|ordering|d2t|position_ids")
ROPE_SCALING = ("none", "linear", "yarn", "longrope")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# From the pinned version of llama.cpp: architectures that do not rotate keys (_UNROTATED), and those that abort unless
# all values of a head are rotated (_ROTATED_WHOLE).
_UNROTATED = _words(
    "gpt2 gptj mpt refact bloom mamba mamba2 jamba jina-bert-v2 t5 t5encoder jais rwkv6 rwkv6qwen2 rwkv7 arwkv7"
    " wavtokenizer-dec nemotron_h nemotron_h_moe kimi-linear kimi-k3 glm5-next"
)
_ROTATED_WHOLE = _words(
    "apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5"
    " ernie4_5-moe exaone exaone-moe exaone4 falcon granite granite_swa graniteswitch grok grovemoe hunyuan-moe"
    " hunyuan_vl hy_v3 internlm2 jais2 llada llada-moe llama llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion"
    " paddleocr pangu-embedded plamo pockettts qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss"
    " smallthinker smollm3 starcoder2 talkie xverse"
)


def check_vocabulary(header: Header) -> int:
    """Checks the vocabulary.

    :returns: the number of tokens; 0 for a file without a vocabulary.
    """
    if header.tokens is None:
        if "tokenizer.ggml.tokens" in header.array_lengths:
            wrong("tokenizer.ggml.tokens are not strings")
        return 0
    n_vocab = len(header.tokens)
    # llama.cpp reads tokens as C strings, and names an empty one after its number.
    words = [token.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, token in enumerate(header.tokens)]
    if len(set(words)) != n_vocab:
        seen: set[bytes] = set()
        for i, word in enumerate(words):
            if word in seen:
                wrong(f"token {i} ({word[:80]!r}) is in the vocabulary twice")
            seen.add(word)
    _check_bytes(header, words)
    for name in ("scores", "token_type"):
        n = header.array_lengths.get(f"tokenizer.ggml.{name}", n_vocab)
        if n < n_vocab:
            wrong(f"tokenizer.ggml.{name} has {n} entries for {n_vocab} tokens")
    for key, value in header.metadata.items():
        # The padding token is not checked: it is never used, and in some published files it is out of range.
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id") and key != "tokenizer.ggml.padding_token_id":
            token = whole(header.metadata, key, 0)
            if not 0 <= token < n_vocab and token not in (-1, 0xFFFFFFFF):
                wrong(f"{key} is {value}, the vocabulary has {n_vocab} tokens")
    _check_marks(header, n_vocab)
    return n_vocab


def _check_marks(header: Header, n_vocab: int) -> None:
    """llama.cpp puts marks around a text, and aborts if the vocabulary has no such token. Other kinds of vocabulary
    have one by default."""
    marks: dict[str, int] = {}  # with llama.cpp's default; -1: none
    if header.metadata.get("tokenizer.ggml.model") == "bert":
        marks = {"bos": 101, "seperator": 102}
    elif header.metadata.get("tokenizer.ggml.model") == "t5":
        kinds = (("bos", -1, False), ("eos", 1, True))
        marks = {
            name: token for name, token, adds in kinds if header.metadata.get(f"tokenizer.ggml.add_{name}_token", adds)
        }
    for name, default in marks.items():
        token = whole(header.metadata, f"tokenizer.ggml.{name}_token_id", default)
        if not (0 <= token < n_vocab or 0 <= default < n_vocab):
            wrong(f"tokenizer.ggml.{name}_token_id names no token, and texts need that mark")


def _check_bytes(header: Header, words: list[bytes]) -> None:
    """A sentencepiece vocabulary must have a token for every byte, named by its hexadecimal number. A wordpiece
    vocabulary must have no byte tokens."""
    types = header.token_types[: len(words)] if header.token_types is not None else np.zeros(0)
    if header.metadata.get("tokenizer.ggml.model") == "bert" and _BYTE in types:
        wrong("tokenizer.ggml.model is bert, whose vocabularies have no byte tokens, and this one has")
    if header.metadata.get("tokenizer.ggml.model") != "llama":
        return
    known = set(words)
    for byte in range(256):
        if b"<0x%02X>" % byte not in known and bytes([byte]) not in known:
            wrong(f"the vocabulary has no token for byte 0x{byte:02X}")
    for i in np.flatnonzero(types == _BYTE):
        if not re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", words[i]):
            wrong(f"token {i} ({words[i][:80]!r}) is marked as a byte but names none")


def check_numbers(metadata: Mapping[str, Value], arch: str) -> None:
    for key, value in metadata.items():
        if key.startswith(f"{arch}."):
            numbers = value if isinstance(value, tuple) else (value,)
            # llama.cpp writes this bound into every file that it saves, as -inf where there is none.
            numbers = () if key == f"{arch}.kda.gate_lower_bound" and value == -math.inf else numbers
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                wrong(f"{key} is {value}")
            if key.endswith("_epsilon") and not (isinstance(value, float) and value >= 0):
                wrong(f"{key} is {value}, not a number from 0 up")
            if (key.endswith((".rope.freq_base", ".rope.freq_base_swa")) and arch not in _UNROTATED) and not (
                isinstance(value, float) and value > 0
            ):
                wrong(f"{key} is {value}, not a number above 0")


def check_type(tensor: Tensor) -> None:
    name, kind = tensor.name, GGML_TYPES[tensor.ggml_type][0]
    if name.endswith(".bias") or "norm" in name:
        # The CPU adds and multiplies vectors only if they are 32-bit numbers.
        if kind not in (_PLAIN if len(tensor.shape) > 1 and not name.endswith("norm.weight") else ("F32",)):
            wrong(f"tensor {name} is of type {kind}, which no bias or norm can be")
    elif kind != "F32" and (_SCALE.search(name) or (len(tensor.shape) == 1 and "scale" in name)):
        wrong(f"tensor {name} is of type {kind}, which no scale can be")
    elif kind in _NO_WEIGHTS and not _TABLE.search(name):
        wrong(f"tensor {name} is of type {kind}, which no weights can be")


_SCALE = re.compile(r"lerp_|\.ssm_[ad]$")


def check_biases(tensors: tuple[Tensor, ...]) -> None:
    """Checks that no bias is missing in a single layer: llama.cpp would follow a null pointer."""
    found: dict[tuple[str, str], set[int]] = {}
    for tensor in tensors:
        match = _PART.fullmatch(tensor.name)
        if match is not None:
            found.setdefault((match[2], match[3]), set()).add(int(match[1]))
    for (part, suffix), weights in found.items():
        without = weights - found.get((part, "bias"), set())
        if suffix == "weight" and len(weights) > 2 and len(without) == 1:
            wrong(f"tensor blk.{without.pop()}.{part}.bias is missing, and every other layer has one")


_PART = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def whole_by_layer(metadata: Mapping[str, Value], key: str, n_layer: int, default: int) -> list[int]:
    value = metadata.get(key, default)
    if isinstance(value, tuple):
        if len(value) < n_layer:
            wrong(f"{key} has {len(value)} entries for {n_layer} layers")
        return [v if isinstance(v, int) else wrong(f"{key} has {v!r} in it") for v in value[:n_layer]]
    return [whole(metadata, key, default)] * n_layer


def check_heads(
    metadata: Mapping[str, Value], arch: str, n_layer: int, n_embd: int, tensors: tuple[Tensor, ...]
) -> None:
    heads = whole_by_layer(metadata, f"{arch}.attention.head_count", n_layer, 0)
    kv_heads = metadata.get(f"{arch}.attention.head_count_kv")
    by_layer = heads if kv_heads is None else whole_by_layer(metadata, f"{arch}.attention.head_count_kv", n_layer, 0)
    for layer, (n_head, n_head_kv) in enumerate(zip(heads, by_layer, strict=True)):
        if not 0 <= n_head <= _MAX_HEADS or not 0 <= n_head_kv <= _MAX_HEADS or (n_head_kv and n_head % n_head_kv):
            wrong(f"layer {layer} has {n_head} attention heads and {n_head_kv} key-value heads")
    n_head, rotated = max(heads, default=0), 0
    for suffix in ("", "_swa"):
        lengths = [whole(metadata, f"{arch}.attention.{key}_length{suffix}", 0) for key in ("key", "value")]
        if not all(0 <= length <= MAX_EMBD for length in lengths):
            wrong(f"the attention heads of {arch} are {lengths[0]} and {lengths[1]} wide")
        width = lengths[0] or whole(metadata, f"{arch}.attention.key_length", 0) or n_embd // max(n_head, 1)
        # Without this key all values of a head are rotated. Without the key for windows, the other key applies there.
        usual = 0 if arch in _UNROTATED else rotated if suffix else width
        rotated = max(whole_by_layer(metadata, f"{arch}.rope.dimension_count{suffix}", n_layer, usual), default=0)
        if n_head:
            _check_rotated(metadata, arch, suffix, width)
            _check_sections(metadata, arch, width)
        latent = whole(metadata, f"{arch}.attention.key_length_mla{suffix}", 0)
        rank = whole(metadata, f"{arch}.attention.kv_lora_rank{suffix}", 0)
        if latent and max(by_layer) != 1:
            wrong(f"latent attention has {max(by_layer)} key-value heads, not 1")
        if latent and rotated and (rotated >= latent or width != rank + rotated):
            wrong(f"latent attention of rank {rank} and {rotated} rotated values has keys {width} and {latent} wide")
    for tensor in tensors:
        match = _PROJECTION.fullmatch(tensor.name)
        if match is not None and len(tensor.shape) == 2 and int(match[1]) < n_layer:
            layer = int(match[1])
            _check_projection(metadata, arch, tensor, heads[layer], by_layer[layer], n_embd)
    inner, n_state, n_value_heads = (
        whole(metadata, f"{arch}.ssm.{key}", 0) for key in ("inner_size", "state_size", "time_step_rank")
    )
    if arch in _GATED and inner != n_state * n_value_heads:
        wrong(f"{arch}.ssm.inner_size is {inner}, not {n_value_heads} heads of {n_state} values")
    head_size = whole(metadata, f"{arch}.wkv.head_size", 1)
    if head_size == 0 and "rwkv" not in arch:
        head_size = 1  # llama.cpp writes 0 into the files of all others that it saves
    if head_size < 1 or n_embd % head_size:
        wrong(f"{arch}.wkv.head_size is {head_size}, which does not divide an embedding of {n_embd}")


def _check_rotated(metadata: Mapping[str, Value], arch: str, suffix: str, width: int) -> None:
    """Checks how many of the ``width`` values of a head are rotated."""
    key = f"{arch}.rope.dimension_count{suffix}"
    value = metadata.get(key, width)
    for rotated in value if isinstance(value, tuple) else (whole(metadata, key, width),):
        if not isinstance(rotated, int) or not 0 <= rotated <= width or (rotated % 2 and rotated != width):
            wrong(f"{key} is {rotated}, not an even number up to the {width} values of a head")
        if rotated == 0 and key in metadata and arch not in _UNROTATED:
            wrong(f"{key} is 0, not an even number from 2 to the {width} values of a head")
        if rotated != width and not suffix and arch in _ROTATED_WHOLE:
            wrong(f"{key} is {rotated}, and {arch} rotates all {width} values of a head")


def _check_sections(metadata: Mapping[str, Value], arch: str, width: int) -> None:
    """Checks the sections of a head that are rotated by different positions."""
    key = f"{arch}.rope.dimension_sections"
    sections = metadata.get(key)
    if not isinstance(sections, tuple):
        return
    sizes = [n for n in sections if isinstance(n, int) and n >= 0]
    if len(sizes) < len(sections):
        wrong(f"{key} is {sections}, not numbers from 0 up")
    if sum(sizes) > width:
        wrong(f"{key} is {sections}, more than the {width} values of a head")


_PROJECTION = re.compile(r"blk\.(\d+)\.attn_([qkv])\.weight")
_GATED = ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")


def _check_projection(
    metadata: Mapping[str, Value], arch: str, tensor: Tensor, n_head: int, n_head_kv: int, n_embd: int
) -> None:
    """Checks the rows of a projection: one row for each value of each head. In some architectures queries have twice as
    many, because each has a gate of the same size."""
    if not n_head or not n_head_kv:
        return
    part = "value" if tensor.name.endswith("attn_v.weight") else "key"
    names = (f"attention.{part}_length_swa", f"attention.{part}_length_mla")
    widths = {whole(metadata, f"{arch}.attention.{part}_length", n_embd // n_head)}
    widths |= {whole(metadata, f"{arch}.{name}", 0) for name in names}
    queries = tensor.name.endswith("attn_q.weight")
    n = (n_head * (2 if arch in _GATED else 1)) if queries else n_head_kv
    counts = (n,) if part == "value" else (n, n_head)  # linear attention has n_head key heads
    fits = {each * width for width in widths for each in counts}
    fits.add(n_head * whole(metadata, f"{arch}.kda.head_dim", 0))
    if tensor.shape[1] not in fits:
        key = "head_count" if queries else "head_count_kv"
        wrong(f"{tensor.name} has {tensor.shape[1]} rows, which {arch}.attention.{key} {n} does not fit")


def check_shared_caches(metadata: Mapping[str, Value], arch: str, n_layer: int) -> None:
    """Checks layers that share a KV cache. A layer without its own uses the cache of one of the last two layers that
    have one. That layer must have the same kind of window."""
    n_shared = whole(metadata, f"{arch}.attention.shared_kv_layers", 0)
    if not 0 <= n_shared <= max(n_layer - 2, 0):
        wrong(f"{n_shared} of {n_layer} layers share the KV cache of others")
    windows = metadata.get(f"{arch}.attention.sliding_window_pattern")
    none_left = windows == 1 or (isinstance(windows, tuple) and not any(windows[:n_layer]))
    if whole(metadata, f"{arch}.attention.sliding_window", 0) and none_left:
        wrong(f"{arch}.attention.sliding_window_pattern is {windows}, which leaves no layer with the window")
    if n_shared and isinstance(windows, tuple):
        if len(windows) != n_layer:
            wrong(f"{arch}.attention.sliding_window_pattern has {len(windows)} entries for {n_layer} layers")
        owners = windows[: n_layer - n_shared][-2:]
        if any(bool(owners[0 if window else 1]) != bool(window) for window in windows[n_layer - n_shared :]):
            wrong(f"{arch} has layers that share a KV cache with another kind of window")


def check_experts(metadata: Mapping[str, Value], arch: str, n_layer: int) -> tuple[int, list[int]]:
    """Checks the experts.

    :returns: the number of experts, and for each layer how many of them a token uses.
    """
    n_expert = whole(metadata, f"{arch}.expert_count", 0)
    used = whole_by_layer(metadata, f"{arch}.expert_used_count", n_layer, 0)
    if arch.startswith("hunyuan") and n_expert == 1:
        return 0, [0] * n_layer  # this is how files of its dense models are written
    if not 0 <= n_expert <= _MAX_EXPERTS:
        wrong(f"{arch}.expert_count is {n_expert}, more than {_MAX_EXPERTS}")
    most = max(used, default=0)
    if min(used, default=0) < 0 or most > n_expert or (n_expert and not most):
        wrong(f"{arch} uses {most} of {n_expert} experts")
    groups = whole(metadata, f"{arch}.expert_group_count", 0)
    groups_used = whole(metadata, f"{arch}.expert_group_used_count", 0)
    if groups < 0 or (groups and groups >= n_expert):
        wrong(f"{arch} has {groups} groups of {n_expert} experts")
    if groups > 1 and (n_expert % groups or not 0 < groups_used < groups):
        wrong(f"{arch} uses {groups_used} of {groups} groups of {n_expert} experts")
    return n_expert, used
