"""Makes damaged GGUF files: seeded changes of the keys, tensors and length of a file.

If bytes are changed at random, most files can no longer be parsed. The files made here can: their numbers, types, names
or shapes are wrong, as if a defective converter or an attacker had written them.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

_PACKED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 32, 10: 64, 11: 64}
_NUMBERS = (
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    16,
    31,
    32,
    48,
    64,
    100,
    128,
    256,
    511,
    512,
    1023,
    4096,
    65535,
    1 << 20,
    1 << 31,
    2**32 - 1,
)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, 0.5, float("inf"), float("nan"))
_WORDS = ("", "none", "yarn", "longrope", "linear", "gpt2", "llama", "bert", "qwen2", "default", "relu", "x" * 300)


@dataclass
class Key:
    """A key of the header. ``kind`` is its type in the file; for an array ``element`` is the type of its elements."""

    name: bytes
    kind: int
    value: Any
    element: int = 0


@dataclass
class Info:
    """A tensor's entry. If ``offset`` is None, the right offset is written."""

    name: bytes
    shape: list[int]
    ggml_type: int
    data: bytes = field(repr=False)
    offset: int | None = None


class Gguf:
    """A file in memory that can be changed and written."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys = [_key(each) for name, each in reader.fields.items() if not name.startswith("GGUF.")]
        self.tensors = [
            Info(each.name.encode(), [int(n) for n in each.shape], int(each.tensor_type), each.data.tobytes())
            for each in reader.tensors
        ]
        self.cut: float | None = None
        """The share of the file to write; None for all of it."""

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.name == name.encode())

    def write(self, path: Path, *, sparse: bool = False) -> Path:
        """Writes the file. With ``sparse`` it has its full length but no weights, which a header check does not
        read."""
        out = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))]
        out += [_text(key.name) + struct.pack("<I", key.kind) + _value(key) for key in self.keys]
        offset = 0
        for each in self.tensors:
            shape = struct.pack(f"<I{len(each.shape)}Q", len(each.shape), *(n % (1 << 64) for n in each.shape))
            where = offset if each.offset is None else each.offset
            out.append(_text(each.name) + shape + struct.pack("<IQ", each.ggml_type, where))
            offset += -(-len(each.data) // 32) * 32
        header = b"".join(out)
        header += bytes(-len(header) % 32)
        with open(path, "wb") as file:
            file.write(header)
            for each in () if sparse else self.tensors:
                file.write(each.data + bytes(-len(each.data) % 32))
            file.truncate(int((len(header) + offset) * (1.0 if self.cut is None else self.cut)))
        return path


def _key(entry: gguf.ReaderField) -> Key:
    kind, name = int(entry.types[0]), entry.name.encode()
    if kind == _ARRAY:
        element = int(entry.types[1])
        parts = [entry.parts[i] for i in entry.data]
        return Key(name, kind, [p.tobytes() if element == _STRING else p[0].item() for p in parts], element)
    part = entry.parts[entry.data[0]]
    return Key(name, kind, part.tobytes() if kind == _STRING else part[0].item())


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _scalar(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value if isinstance(value, bytes) else str(value).encode())
    if kind in _BITS:
        number = 0 if isinstance(value, bytes) or value != value or abs(value) > 1e30 else int(value)
        return struct.pack("<" + _PACKED[kind].upper(), number % (1 << _BITS[kind]))
    number = 0 if isinstance(value, bytes) else value
    return struct.pack("<" + _PACKED[kind], bool(number) if kind == 7 else float(number))


def _value(key: Key) -> bytes:
    if key.kind != _ARRAY:
        return _scalar(key.kind, key.value)
    return struct.pack("<IQ", key.element, len(key.value)) + b"".join(_scalar(key.element, v) for v in key.value)


def mutate(file: Gguf, rng: random.Random) -> list[str]:
    """Makes one to three changes to ``file``.

    :returns: a description of each.
    """
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change = rng.choices((_number, _array, _kind, _word, _key_gone, _tensor), (8, 3, 1, 1, 1, 6))[0]
        done.append(change(file, rng))
    if rng.random() < 0.03:
        file.cut = rng.random()
        done.append(f"cut to {file.cut:.3f}")
    return done


def _other(value: int, rng: random.Random) -> int:
    near = (value - 1, value + 1, value * 2, value // 2, value * 3, -1, -value)
    return rng.choice(near if rng.random() < 0.5 else _NUMBERS)


def _number(file: Gguf, rng: random.Random) -> str:
    arch = file.key("general.architecture").value + b"."
    own = [key for key in file.keys if key.kind in _PACKED and key.name.startswith(arch)]
    every = [key for key in file.keys if key.kind in _PACKED]
    key = rng.choice(own if own and rng.random() < 0.85 else every or own)
    if key.kind in (6, 12):
        key.value = rng.choice((*_FLOATS, key.value * 2))
    elif key.kind == 7:
        key.value = not key.value
    else:
        key.value = _other(int(key.value), rng)
    return f"{key.name.decode()} = {key.value}"


def _array(file: Gguf, rng: random.Random) -> str:
    """Changes an array of numbers, or replaces a number by an array with one value per layer."""
    lists = [key for key in file.keys if key.kind == _ARRAY and key.value and len(key.value) <= 512]
    longs = [key for key in file.keys if key.kind == _ARRAY and len(key.value) > 512]
    if lists and rng.random() < 0.6:
        key = rng.choice(lists)
    elif longs and rng.random() < 0.4:
        key = rng.choice(longs)
    else:
        scalars = [key for key in file.keys if key.kind in _BITS]
        key = rng.choice(scalars)
        key.element, key.kind = key.kind, _ARRAY
        key.value = [key.value] * rng.choice((1, 2, 4, 6, 512, 600))
    at = rng.randrange(len(key.value))
    what = rng.randrange(4)
    if what == 0:
        del key.value[at:]
    elif what == 1:
        key.value += key.value[at:] or [0]
    elif isinstance(key.value[at], bytes):
        key.value[at] = rng.choice((b"", b"<0x00>", key.value[at - 1], b"\xff\xfe", b"a\0b"))
    elif isinstance(key.value[at], float):
        key.value[at] = rng.choice(_FLOATS)
    else:
        key.value[at] = _other(int(key.value[at]), rng)
    return f"array {key.name.decode()}: {what} at {at} of {len(key.value)}"


def _kind(file: Gguf, rng: random.Random) -> str:
    key = rng.choice([key for key in file.keys if key.kind in _PACKED])
    key.kind = rng.choice((*_PACKED, _STRING))
    return f"{key.name.decode()} is of type {key.kind}"


def _word(file: Gguf, rng: random.Random) -> str:
    key = rng.choice([key for key in file.keys if key.kind == _STRING])
    key.value = rng.choice(_WORDS).encode()
    return f"{key.name.decode()} = {key.value[:20]!r}"


def _key_gone(file: Gguf, rng: random.Random) -> str:
    keys = [key for key in file.keys if key.name != b"general.architecture"]
    key = rng.choice(keys)
    file.keys.remove(key)
    return f"without {key.name.decode()}"


def _tensor(file: Gguf, rng: random.Random) -> str:
    each = rng.choice(file.tensors)
    was = each.name.decode()
    what = rng.randrange(8)
    if what <= 2:
        at = rng.randrange(len(each.shape))
        each.shape[at] = rng.choice(
            (each.shape[at] * 2, each.shape[at] // 2, each.shape[at] + 32, each.shape[at] - 1, 1, 32, 256, 0)
        )
        _refit(each, rng)
    elif what == 3:
        if len(each.shape) > 1 and rng.random() < 0.7:
            each.shape.reverse()
        else:
            each.shape = [*each.shape, 1][-4:] if rng.random() < 0.5 else [1, *each.shape][:4]
    elif what == 4:
        each.ggml_type = rng.choice((0, 1, 2, 3, 8, 12, 14, 24, 26, 28, 30, 39))
        _refit(each, rng)
    elif what == 5:
        at = rng.randrange(len(each.name))
        each.name = each.name[:at] + bytes([rng.choice(b"abkqv0123_.")]) + each.name[at + 1 :]
    elif what == 6:
        other = rng.choice(file.tensors)
        each.name, other.name = other.name, each.name
    elif rng.random() < 0.7:
        file.tensors.remove(each)
    else:
        each.offset = rng.choice((0, 32, 1, 1 << 40, len(each.data)))
    return f"tensor {was}: {what} {each.name!r} {each.shape} {each.ggml_type}"


def _refit(each: Info, rng: random.Random) -> None:
    """Changes a shape or type. In most cases the bytes of the tensor stay the same, so that the other offsets are
    right."""
    try:
        block, size = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(each.ggml_type)]
    except ValueError:
        return
    n = 1
    for dim in each.shape:
        n *= max(dim, 0)
    if rng.random() < 0.9 and n // block * size <= 1 << 26:
        need = n // block * size
        each.data = (each.data * (need // max(len(each.data), 1) + 1))[:need]
