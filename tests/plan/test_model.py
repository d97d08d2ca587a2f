"""Reading GGUF headers. A bad header gives BadModel with a reason, and never another error."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import mutants
import tiny_models
from frameshard.errors import BadModel, ModelNotFound
from frameshard.plan.header import GGML_TYPES
from frameshard.plan.model import CORE_MAX_BYTES, Model, read_model
from work import count_calls


def kinds(model: Model) -> dict[str, int]:
    out: dict[str, int] = {}
    for shard in model.shards:
        out[shard.kind] = out.get(shard.kind, 0) + 1
    return out


def test_the_demo_model(model_path: Path) -> None:
    model = read_model(model_path)
    assert (model.arch, model.n_layer, model.n_embd, model.n_vocab) == ("llama", 30, 576, 49152)
    assert (model.n_expert, model.n_ctx_train, model.file_bytes) == (0, 8192, model_path.stat().st_size)
    assert model.chat_template is not None
    assert "<|im_start|>" in model.chat_template
    assert kinds(model) == {"attention": 30, "ffn": 30, "ffn_down": 30, "output": 1, "core": 1}
    output = next(shard for shard in model.shards if shard.kind == "output")
    assert [tensor.name for tensor in output.tensors] == ["token_embd.weight"]  # it is the output head too
    assert model.integer("attention.head_count_kv") == 3
    assert model.by_layer("attention.head_count_kv") == (3,) * 30


def test_experts_count_as_active_by_their_share(moe_path: Path) -> None:
    model = read_model(moe_path)
    assert (model.n_expert, model.n_expert_used) == (8, 2)
    experts = [shard for shard in model.shards if shard.kind == "experts"]
    assert len(experts) == 30
    assert all(shard.active_bytes == shard.n_bytes // 4 for shard in experts)
    others = [shard for shard in model.shards if shard.kind != "experts"]
    assert all(shard.active_bytes == shard.n_bytes for shard in others)


@pytest.mark.parametrize("name", tiny_models.ARCHS)
def test_every_tensor_is_in_one_shard_or_stays_on_the_host(name: str, tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model(name)
    model = read_model(path)
    assert model.arch == tiny_models.ARCHS[name].arch
    named = [tensor.name for shard in model.shards for tensor in shard.tensors]
    assert len(named) == len(set(named))
    left = {tensor.name for tensor in model.tensors} - set(named)
    tied = "output.weight" not in {tensor.name for tensor in model.tensors}
    assert left <= {"token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight"}
    assert ("token_embd.weight" in left) == (not tied)
    for shard in model.shards:
        assert shard.n_bytes == sum(tensor.n_bytes for tensor in shard.tensors)
        small = [tensor.n_bytes <= CORE_MAX_BYTES for tensor in shard.tensors]
        assert all(small) if shard.kind == "core" else not any(small)
    with open(path, "rb") as file:
        for tensor, want in zip(model.tensors, gguf.GGUFReader(path).tensors, strict=True):
            assert (tensor.name, tensor.offset, tensor.n_bytes) == (want.name, want.data_offset, want.n_bytes)
            assert tensor.shape == tuple(want.shape.tolist())
            file.seek(tensor.offset)
            assert file.read(min(16, tensor.n_bytes)) == want.data.tobytes()[:16]


def test_kinds_of_shards(tiny_model: Callable[[str], Path]) -> None:
    assert kinds(read_model(tiny_model("deepseek2"))) == {
        "attention": 4,
        "ffn": 1,
        "ffn_down": 1,
        "experts": 3,
        "shared": 3,
        "output": 1,
        "core": 1,
    }
    assert kinds(read_model(tiny_model("rwkv7"))) == {"attention": 4, "ffn": 4, "output": 1, "core": 1}
    assert kinds(read_model(tiny_model("mamba2"))) == {"attention": 4, "output": 1, "core": 1}


@pytest.mark.parametrize(
    ("name", "attention", "cached", "recurrent"),
    [
        ("llama", {0, 1, 2, 3}, {0, 1, 2, 3}, set()),
        ("deepseek2", {0, 1, 2, 3}, {0, 1, 2, 3}, set()),
        ("gemma3n", set(range(22)), set(range(20)), set()),
        ("gemma4", set(range(6)), set(range(4)), set()),
        ("glm4moe", {0, 1, 2, 3}, {0, 1, 2, 3}, set()),
        ("qwen35moe", {1, 3}, {1, 3}, {0, 2}),
        ("lfm2", {1, 3}, {1, 3}, {0, 2}),
        ("falcon-h1", {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}),
        ("rwkv7", set(), set(), {0, 1, 2, 3}),
    ],
)
def test_what_layers_keep(
    name: str, attention: set[int], cached: set[int], recurrent: set[int], tiny_model: Callable[[str], Path]
) -> None:
    model = read_model(tiny_model(name))
    assert (model.attention_layers, model.cached_layers, model.recurrent_layers) == (attention, cached, recurrent)


def test_linear_attention_of_another_size_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    file = mutants.Gguf(tiny_model("qwen35moe"))
    file.key("qwen35moe.ssm.inner_size").value = 512
    with pytest.raises(BadModel, match="inner_size is 512, not 4 heads of 64 values"):
        read_model(file.write(tmp_path / "model.gguf", sparse=True))


def test_sizes_of_types() -> None:
    known = {int(number): sizes for number, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    del known[gguf.GGMLQuantizationType.Q8_1]  # older releases of gguf have a wrong size
    assert known.items() <= {number: (block, size) for number, (_, block, size) in GGML_TYPES.items()}.items()


class Gguf:
    """A small GGUF file in which each field can be wrong."""

    def __init__(self) -> None:
        self.magic, self.version = b"GGUF", 3
        self.keys: list[tuple[bytes, int, bytes]] = []
        self.tensors: list[tuple[bytes, tuple[int, ...], int, int | None]] = []
        self.n_tensors: int | None = None
        self.n_keys: int | None = None
        self.cut = 0
        self.set("general.architecture", "llama")
        for key, value in (("block_count", 2), ("embedding_length", 64), ("context_length", 128)):
            self.set(f"llama.{key}", value)
        self.set("llama.attention.head_count", 4)
        for i in range(2):
            self.tensors.append((b"blk.%d.attn_q.weight" % i, (64, 64), 1, None))
            self.tensors.append((b"blk.%d.attn_norm.weight" % i, (64,), 0, None))

    def set(self, key: str, value: object) -> None:
        if isinstance(value, str):
            kind, raw = 8, struct.pack("<Q", len(value.encode())) + value.encode()
        elif isinstance(value, bool):
            kind, raw = 7, struct.pack("<?", value)
        elif isinstance(value, int):
            kind, raw = 4, struct.pack("<I", value)
        elif isinstance(value, float):
            kind, raw = 6, struct.pack("<f", value)
        elif isinstance(value, list) and value and isinstance(value[0], bytes):
            kind = 9
            raw = struct.pack("<IQ", 8, len(value)) + b"".join(struct.pack("<Q", len(v)) + v for v in value)
        elif isinstance(value, list):
            kind, raw = 9, struct.pack("<IQ", 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
        else:
            raise TypeError(value)
        self.keys = [entry for entry in self.keys if entry[0] != key.encode()]
        self.keys.append((key.encode(), kind, raw))

    def write(self, path: Path) -> Path:
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<q", len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += struct.pack("<q", len(self.keys) if self.n_keys is None else self.n_keys)
        for key, kind, raw in self.keys:
            out += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + raw
        offset = 0
        for name, shape, ggml_type, where in self.tensors:
            out += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
            out += b"".join(struct.pack("<q", n) for n in shape)
            out += struct.pack("<IQ", ggml_type, offset if where is None else where)
            block, size = GGML_TYPES.get(ggml_type, ("", 1, 4))[1:]
            offset += -(-max(int(np.prod(shape, dtype=object)), 0) // block * size // 32) * 32
        start = -(-len(out) // 32) * 32
        path.write_bytes(out)
        os.truncate(path, min(start + offset, 1 << 40) - self.cut)
        return path


def test_the_hand_written_file_is_fine(tmp_path: Path) -> None:
    model = read_model(Gguf().write(tmp_path / "m.gguf"))
    assert (model.n_layer, model.n_embd, model.n_vocab, model.chat_template) == (2, 64, 0, None)


def _byte_vocabulary() -> list[bytes]:
    return [b"<0x%02X>" % i for i in range(256)] + [b"a", b"b"]


def _tensor(file: Gguf, name: bytes, shape: tuple[int, ...] = (64, 64), ggml_type: int = 1) -> None:
    file.tensors.append((name, shape, ggml_type, None))


def _vocabulary(file: Gguf, tokens: list[bytes], **more: object) -> None:
    file.set("tokenizer.ggml.tokens", tokens)
    for key, value in more.items():
        file.set(f"tokenizer.ggml.{key}", value)


def _second_of_two(file: Gguf) -> None:
    file.set("split.count", 2)
    file.set("split.no", 1)


BAD: dict[str, tuple[str, Callable[[Gguf], object]]] = {
    "magic": ("not a GGUF", lambda f: setattr(f, "magic", b"PK\3\4")),
    "old version": ("version 1", lambda f: setattr(f, "version", 1)),
    "other byte order": ("version", lambda f: setattr(f, "version", 3 << 24)),
    "tensor count": ("cannot be in a file", lambda f: setattr(f, "n_tensors", 1 << 60)),
    "negative count": ("cannot be in a file", lambda f: setattr(f, "n_keys", -1)),
    "too few keys": ("tensor|truncated|dimensions", lambda f: setattr(f, "n_keys", 2)),
    "short": ("truncated: tensor", lambda f: setattr(f, "cut", 1)),
    "no architecture": ("architecture", lambda f: f.keys.pop(0)),
    "key twice": ("twice", lambda f: f.keys.append(f.keys[1])),
    "key with zero byte": ("zero byte", lambda f: f.keys.append((b"a\0b", 4, b"\0\0\0\0"))),
    "key type": ("unknown type 99", lambda f: f.keys.append((b"k", 99, b"\0\0\0\0"))),
    "nested array": ("unknown type 9", lambda f: f.keys.append((b"k", 9, struct.pack("<IQ", 9, 1)))),
    "endless string": ("truncated", lambda f: f.keys.append((b"k", 8, struct.pack("<Q", 1 << 62)))),
    "endless array": ("truncated", lambda f: f.keys.append((b"k", 9, struct.pack("<IQ", 4, 1 << 61)))),
    "endless strings": ("truncated", lambda f: f.keys.append((b"k", 9, struct.pack("<IQ", 8, 1 << 61)))),
    "alignment": ("power of two", lambda f: f.set("general.alignment", 24)),
    "no tensors": ("no tensors", lambda f: f.tensors.clear()),
    "tensor twice": ("twice", lambda f: f.tensors.append(f.tensors[0])),
    "long tensor name": ("longer than", lambda f: _tensor(f, b"x" * 64)),
    "five dimensions": ("5 dimensions", lambda f: _tensor(f, b"x", (1, 1, 1, 1, 1))),
    "empty dimension": ("dimension of 0", lambda f: _tensor(f, b"x", (64, 0))),
    "negative dimension": ("dimension of -64", lambda f: _tensor(f, b"x", (64, -64))),
    "overflowing shape": ("impossible shape", lambda f: _tensor(f, b"x", (1 << 40, 1 << 40))),
    "tensor type": ("unknown type 4", lambda f: _tensor(f, b"x", (64, 64), 4)),
    "part of a block": ("whole blocks", lambda f: _tensor(f, b"x", (48, 64), 2)),
    "integer weights": ("type I32", lambda f: _tensor(f, b"blk.0.ffn_up.weight", (64, 64), 26)),
    "quantised norm": ("type Q8_0", lambda f: _tensor(f, b"blk.0.ffn_norm.weight", (64,), 8)),
    "16-bit bias": ("type F16", lambda f: _tensor(f, b"blk.0.attn_q.bias", (64,), 1)),
    "latent attention": ("4 key-value heads", lambda f: f.set("llama.attention.key_length_mla", 32)),
    "offset": ("offset 32", lambda f: f.tensors.append((b"x", (64,), 0, 32))),
    "layer too high": ("beyond the 2", lambda f: _tensor(f, b"blk.2.attn_q.weight")),
    "no layers": ("block_count", lambda f: f.set("llama.block_count", 0)),
    "too many layers": ("block_count", lambda f: f.set("llama.block_count", 513)),
    "layers as text": ("not a whole number", lambda f: f.set("llama.block_count", "two")),
    "no embedding": ("embedding_length", lambda f: f.set("llama.embedding_length", 0)),
    "no context": ("context_length", lambda f: f.set("llama.context_length", 0)),
    "heads": ("4 attention heads and 3", lambda f: f.set("llama.attention.head_count_kv", 3)),
    "heads of one layer": ("2 layers", lambda f: f.set("llama.attention.head_count_kv", [4])),
    "head size": ("heads|rows", lambda f: f.set("llama.attention.key_length", 1 << 30)),
    "rotated part": ("rope.dimension_count is 18", lambda f: f.set("llama.rope.dimension_count", 18)),
    "nothing rotated": ("rope.dimension_count is 0", lambda f: f.set("llama.rope.dimension_count", 0)),
    "a part rotated of what is rotated whole": (
        "rope.dimension_count is 8, and llama rotates all 16",
        lambda f: f.set("llama.rope.dimension_count", 8),
    ),
    "nothing rotated in windows": (
        "rope.dimension_count_swa is 0",
        lambda f: f.set("llama.rope.dimension_count_swa", 0),
    ),
    "frequency": (r"rope.freq_base is 0.0, not a number above 0", lambda f: f.set("llama.rope.freq_base", 0.0)),
    "heads that the queries do not have": (
        "attn_q.weight has 64 rows, which llama.attention.head_count 512 does not fit",
        lambda f: f.set("llama.attention.head_count", 512),
    ),
    "heads of another width": (
        "attn_q.weight has 64 rows, which llama.attention.head_count 8 does not fit",
        lambda f: (f.set("llama.attention.head_count", 8), f.set("llama.attention.key_length", 16)),
    ),
    "key-value heads that the keys do not have": (
        "attn_k.weight has 32 rows, which llama.attention.head_count_kv 4 does not fit",
        lambda f: _tensor(f, b"blk.0.attn_k.weight", (64, 32)),
    ),
    "value heads of another width": (
        "attn_v.weight has 32 rows, which llama.attention.head_count_kv 4 does not fit",
        lambda f: _tensor(f, b"blk.0.attn_v.weight", (64, 32)),
    ),
    "sections wider than a head": (
        "dimension_sections is .*, more than the 16 values",
        lambda f: f.set("llama.rope.dimension_sections", [8, 9]),
    ),
    "16-bit scale of a state": ("type F16", lambda f: _tensor(f, b"blk.0.ssm_d", (1, 8), 1)),
    "no layer with a window": (
        "leaves no layer",
        lambda f: (
            f.set("llama.attention.sliding_window", 32),
            f.set("llama.attention.sliding_window_pattern", 1),
        ),
    ),
    "16-bit norm of heads": ("type F16", lambda f: _tensor(f, b"blk.0.ssm_norm.weight", (64, 2), 1)),
    "a missing bias": (
        "blk.1.ffn_up.bias is missing",
        lambda f: (
            f.set("llama.block_count", 3),
            *(_tensor(f, b"blk.%d.ffn_up.weight" % i) for i in range(3)),
            *(_tensor(f, b"blk.%d.ffn_up.bias" % i, (64,), 0) for i in (0, 2)),
        ),
    ),
    "integer scale": ("type I32", lambda f: _tensor(f, b"blk.0.layer_output_scale.weight", (1,), 26)),
    "bytes in a wordpiece vocabulary": (
        "bert",
        lambda f: _vocabulary(f, [b"a", b"b"], model="bert", token_type=[1, 6]),
    ),
    "odd rotated part": ("rope.dimension_count is 15", lambda f: f.set("llama.rope.dimension_count", 15)),
    "rope scaling": ("scaling.type", lambda f: f.set("llama.rope.scaling.type", "wild")),
    "not a number": ("is nan", lambda f: f.set("llama.rope.freq_base", float("nan"))),
    "negative epsilon": ("epsilon", lambda f: f.set("llama.attention.layer_norm_rms_epsilon", -1.0)),
    "experts": ("expert_count is 1025", lambda f: f.set("llama.expert_count", 1025)),
    "experts without use": ("uses 0 of 8", lambda f: f.set("llama.expert_count", 8)),
    "use without experts": ("uses 2 of 0", lambda f: f.set("llama.expert_used_count", 2)),
    "groups": ("groups", lambda f: f.set("llama.expert_group_count", 2)),
    "shared caches": ("share", lambda f: f.set("llama.attention.shared_kv_layers", 1)),
    "prediction layers": ("nextn", lambda f: f.set("llama.nextn_predict_layers", 2)),
    "head size of linear attention": ("head_size", lambda f: f.set("llama.wkv.head_size", 48)),
    "token twice": ("token 1 .* twice", lambda f: _vocabulary(f, [b"a", b"a"])),
    "token twice as a C string": ("twice", lambda f: _vocabulary(f, [b"a", b"a\0b"])),
    "token like an empty one": ("twice", lambda f: _vocabulary(f, [b"[EMPTY_1]", b""])),
    "tokens as numbers": ("not strings", lambda f: f.set("tokenizer.ggml.tokens", [1, 2])),
    "scores": ("1 entries for 2", lambda f: _vocabulary(f, [b"a", b"b"], scores=[0])),
    "special token": ("eos_token_id is 2", lambda f: _vocabulary(f, [b"a", b"b"], eos_token_id=2)),
    "no mark in front": (
        "bos_token_id names no token",
        lambda f: _vocabulary(f, [b"a", b"b"], model="t5", add_bos_token=True, eos_token_id=1),
    ),
    "no mark behind": (
        "seperator_token_id names no token",
        lambda f: _vocabulary(f, [b"a", b"b"], model="bert", bos_token_id=0),
    ),
    "missing byte": ("byte 0x00", lambda f: _vocabulary(f, [b"a", b"b"], model="llama")),
    "byte without number": (
        "names none",
        lambda f: _vocabulary(f, _byte_vocabulary(), model="llama", token_type=[6] * 256 + [1, 6]),
    ),
    "second file of several": ("give the first", _second_of_two),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_words(case: str, tmp_path: Path) -> None:
    says, spoil = BAD[case]
    file = Gguf()
    spoil(file)
    with pytest.raises(BadModel, match=says) as caught:
        read_model(file.write(tmp_path / "bad.gguf"))
    assert str(caught.value).startswith("bad.gguf: ")
    assert caught.value.detail == {"path": str(tmp_path / "bad.gguf")}


def test_what_looks_odd_but_is_fine(tmp_path: Path) -> None:
    file = Gguf()
    _vocabulary(file, [*_byte_vocabulary(), b""], model="llama", token_type=[6] * 256 + [1, 1, 1, 6])
    file.set("tokenizer.ggml.padding_token_id", 70_000)  # it is never used, and published files have such numbers
    file.set("tokenizer.ggml.eot_token_id", 0xFFFFFFFF)
    file.set("llama.attention.head_count_kv", [4, 0])
    for name in (b"weird.tensor", b"blk.1.quite.unknown.weight", b"v.blk.0.attn_q.weight", b"output.weight"):
        _tensor(file, name, (64, 1024))
    model = read_model(file.write(tmp_path / "odd.gguf"))
    assert model.by_layer("attention.head_count_kv") == (4, 0)
    names = {shard.name: shard.kind for shard in model.shards}
    assert names == {
        "core": "core",
        "other": "other",
        "blk.1.other": "other",
        "v.blk.0": "vision",
        "output": "output",
    }


def test_layers_for_prediction_are_never_active(tmp_path: Path) -> None:
    file = Gguf()
    file.set("llama.nextn_predict_layers", 1)
    for i in range(2):
        _tensor(file, b"blk.%d.ffn_up.weight" % i, (64, 4096))
    model = read_model(file.write(tmp_path / "nextn.gguf"))
    assert {shard.layer: shard.active_bytes for shard in model.shards if shard.kind == "ffn"} == {
        0: 64 * 4096 * 2,
        1: 0,
    }


@pytest.mark.parametrize("n_bytes", [0, 3, 4, 20, 100])
def test_truncated_headers(n_bytes: int, tmp_path: Path) -> None:
    path = Gguf().write(tmp_path / "cut.gguf")
    os.truncate(path, n_bytes)
    with pytest.raises(BadModel, match=r"truncated|not a GGUF|cannot be in"):
        read_model(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No such file"):
        read_model(tmp_path / "missing.gguf")
    with pytest.raises(ModelNotFound, match=r"not a file|directory"):
        read_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelNotFound, match="not a file"):
        read_model(tmp_path / "pipe")


def test_a_model_in_several_files(tmp_path: Path) -> None:
    for i, layer in enumerate((0, 1)):
        file = Gguf()
        file.tensors = file.tensors[2 * layer : 2 * layer + 2]
        file.set("split.count", 2)
        file.set("split.no", i)
        file.write(tmp_path / f"m-0000{i + 1}-of-00002.gguf")
    model = read_model(tmp_path / "m-00001-of-00002.gguf")
    assert [(tensor.name, tensor.part) for tensor in model.tensors if "attn_q" in tensor.name] == [
        ("blk.0.attn_q.weight", 0),
        ("blk.1.attn_q.weight", 1),
    ]
    assert model.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelNotFound, match="00002"):
        read_model(tmp_path / "m-00001-of-00002.gguf")


def test_the_fingerprint_tells_models_apart(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """It changes with a weight, with the header and with the size, and does not depend on the path."""
    whole = tiny_model("llama").read_bytes()
    weight = bytearray(whole)
    weight[read_model(tiny_model("llama")).tensors[-1].offset] ^= 1
    header = whole.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.mode1")
    found = []
    for index, content in enumerate((whole, bytes(weight), header, whole + b"x")):
        path = tmp_path / f"{index}.gguf"
        path.write_bytes(content)
        found.append(read_model(path).fingerprint)
    assert found[0] == read_model(tiny_model("llama")).fingerprint
    assert len(set(found)) == 4


def test_a_large_file_is_little_work(tmp_path: Path) -> None:
    file = Gguf()
    _vocabulary(file, [b"token %d" % i for i in range(150_000)], scores=[0] * 150_000)
    file.set("tokenizer.ggml.merges", [b"ab cd %d" % i for i in range(150_000)])
    for i in range(16):
        _tensor(file, b"large.%d" % i, (1 << 20, 1 << 9))
    path = file.write(tmp_path / "large.gguf")
    models: list[Model] = []
    # Reading takes a few calls for each token, and none for each weight.
    assert count_calls(lambda: models.append(read_model(path))) < 1_500_000
    (model,) = models
    assert model.n_vocab == 150_000
    assert model.file_bytes > 16 << 30


@pytest.mark.parametrize("name", tiny_models.ARCHS)
def test_well_formed_mutants_are_read_or_refused(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    sound = mutants.Gguf(tiny_model(name))
    path = tmp_path / "mutant.gguf"
    outcomes = []
    for seed in range(60):
        file = copy.deepcopy(sound)
        done = mutants.mutate(file, random.Random(f"{name}{seed}"))
        print("seed", f"{name}{seed}", done)  # shown if the next lines fail
        try:
            read_model(file.write(path, sparse=True))
            outcomes.append("read")
        except BadModel:
            outcomes.append("refused")
    assert set(outcomes) == {"read", "refused"}


@pytest.mark.parametrize("seed", range(0, 500, 50))
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_mutants_are_read_or_refused(name: str, seed: int, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    whole = tiny_model(name).read_bytes()
    header_bytes = min(tensor.offset for tensor in read_model(tiny_model(name)).tensors)
    path = tmp_path / "mutant.gguf"
    for i in range(seed, seed + 50):
        rng = random.Random(i)
        header = bytearray(whole[:header_bytes])
        for _ in range(rng.choice([1, 1, 2, 8])):
            # Half of the changes are outside the vocabulary, which is most of the header.
            at = rng.randrange(len(header)) if rng.random() < 0.5 else -rng.randrange(1, 6000)
            what = rng.randrange(4)
            if what == 0:
                header[at] = rng.randrange(256)
            elif what == 1:
                header[at] ^= 1 << rng.randrange(8)
            elif what == 2:
                del header[at]
            else:
                header[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]))
        path.write_bytes(header)
        os.truncate(path, rng.choice([len(whole), len(whole), rng.randrange(len(whole))]))
        print("seed", i)  # shown if the next line fails
        with contextlib.suppress(BadModel):
            read_model(path)
