"""Reads the header of a GGUF file, keys and tensors, without llama.cpp. Every count and length is checked.

``model`` and ``tower`` check the values, because they depend on what the file is for.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np

from frameshard.errors import BadModel, ModelNotFound
from frameshard.models import ModelFile, locate

# Tensor types in ggml.h of the pinned version: number -> (name, weights in a block, bytes of a block).
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
}
GGML_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}

MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS. Longer arrays cannot be values by layer, and are not kept."""

OFFSET_ALIGNMENT = 32
"""A GGUF in a larger file begins at a multiple of this many bytes: tensors of a memory map must be so aligned."""

_VERSIONS = (2, 3)
_MAX_HEADER = 1 << 30  # bytes; a vocabulary of a million tokens needs a tenth of it
_SAMPLE_BYTES = 4096  # of each tensor, for the fingerprint
_MAX_NAME = 63  # GGML_MAX_NAME without the zero byte at the end
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

Value = int | float | bool | str | tuple[int, ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: ``shape`` in ggml's order (contiguous dimension first), ``offset`` in bytes from the start of its
    GGUF."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    n_bytes: int
    offset: int
    part: int = 0  # index of its file, for a model split into several files

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.ggml_type][0]

    @property
    def n_weights(self) -> int:
        _, block, block_bytes = GGML_TYPES[self.ggml_type]
        return self.n_bytes // block_bytes * block


class Wrong(Exception):
    """An error in the file. The message does not have the file's name; the caller adds it."""


def wrong(text: str) -> NoReturn:
    raise Wrong(text)


@dataclass
class Header:
    metadata: dict[str, Value]
    tokens: list[bytes] | None
    token_types: np.ndarray | None
    array_lengths: dict[str, int]
    tensors: list[Tensor]
    file_bytes: int
    fingerprint: bytes
    """SHA-256 of the file's size, its header and the first 4 KiB of each tensor. It tells models apart within
    milliseconds; it does not protect against a file that was crafted to have the same fingerprint as another."""
    kinds: dict[str, int]
    """GGUF's number for the type of each key."""


class _Reader:
    """Reads a file from its position, only as far as needed. Every length is checked against ``size``."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._start = file.tell()  # of the GGUF, which may lie in a larger file
        self._data = b""
        self.pos = 0

    def _need(self, n: int) -> None:
        end = self.pos + n
        if end > len(self._data):
            if end > self._size:
                wrong(f"truncated: the header needs {end} bytes, the file has {self._size}")
            if end > _MAX_HEADER:
                wrong(f"the header is larger than {_MAX_HEADER} bytes")
            self._data += self._file.read(max(end, 2 * len(self._data), 1 << 20) - len(self._data))
            if end > len(self._data):
                wrong("truncated while it was read")

    def number(self, code: str) -> int:
        size = struct.calcsize(code)
        self._need(size)
        value: int = struct.unpack_from(code, self._data, self.pos)[0]
        self.pos += size
        return value

    def string(self) -> bytes:
        n = self.number("<Q")
        self._need(n)
        self.pos += n
        return self._data[self.pos - n : self.pos]

    def strings(self, n: int) -> list[bytes]:
        if n > (self._size - self.pos) // 8:
            wrong(f"truncated: an array of {n} strings in a file of {self._size} bytes")
        out: list[bytes] = []
        while len(out) < n:
            # No function call for each string: a vocabulary has 10^5 of them.
            data, pos, end_of_data = self._data, self.pos, len(self._data)
            for _ in range(n - len(out)):
                start = pos + 8
                end = start + int.from_bytes(data[pos:start], "little")
                if start > end_of_data or end > end_of_data:
                    break
                out.append(data[start:end])
                pos = end
            self.pos = pos
            if len(out) < n:
                out.append(self.string())
        return out

    def fingerprint(self, tensors: Iterable[Tensor]) -> bytes:
        """Returns :attr:`Header.fingerprint`, after the header was read."""
        found = hashlib.sha256(self._size.to_bytes(8, "little"))
        found.update(memoryview(self._data)[: self.pos])
        for tensor in tensors:
            self._file.seek(self._start + tensor.offset)
            found.update(self._file.read(min(tensor.n_bytes, _SAMPLE_BYTES)))
        return found.digest()

    def array(self, dtype: str, n: int) -> np.ndarray:
        n_bytes = n * np.dtype(dtype).itemsize
        self._need(n_bytes)
        self.pos += n_bytes
        return np.frombuffer(self._data, dtype, n, self.pos - n_bytes)


def read_header(path: Path, part: int = 0) -> Header:
    """Reads the header of a GGUF.

    :param path: a path as :func:`frameshard.models.locate` takes it, so also a part of a larger file.
    :param part: the index of the file, for a model split into several files.
    :raises ModelNotFound: there is no such file.
    :raises BadModel: it is not a GGUF, is truncated or contradicts itself; or the part does not lie in the file.
    """
    found = locate(path)
    try:
        with open(found.path, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelNotFound(f"{found.path} is not a file", path=str(path))
            n_bytes = status.st_size if found.n_bytes is None else _check_part(found, status.st_size)
            file.seek(found.offset)
            return _parse(_Reader(file, n_bytes), n_bytes, part)
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    except Wrong as wrong:
        raise BadModel(f"{path.name}: {wrong}", path=str(path)) from None


def _check_part(found: ModelFile, file_bytes: int) -> int:
    """Checks that a part lies in its file; returns its length in bytes."""
    assert found.n_bytes is not None
    if found.offset + found.n_bytes > file_bytes:
        end = found.offset + found.n_bytes
        wrong(f"the part ends at byte {end}, and {found.path.name} has {file_bytes}: offset or size are wrong")
    if found.offset % OFFSET_ALIGNMENT:
        wrong(f"the offset {found.offset} is not a multiple of {OFFSET_ALIGNMENT}: align models when you pack them")
    return found.n_bytes


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # without it, opening a named pipe would wait


def _parse(reader: _Reader, file_bytes: int, part: int) -> Header:
    magic = reader.array("<u1", 4).tobytes() if file_bytes >= 4 else b""
    if magic != b"GGUF":
        wrong(f"not a GGUF file (it starts with {magic!r})")
    version = reader.number("<I")
    if version not in _VERSIONS:
        wrong(f"GGUF version {version} is not supported (only {' and '.join(map(str, _VERSIONS))})")
    n_tensors, n_keys = reader.number("<q"), reader.number("<q")
    if not 0 <= n_tensors <= file_bytes // 24 or not 0 <= n_keys <= file_bytes // 13:
        wrong(f"{n_tensors} tensors and {n_keys} keys cannot be in a file of {file_bytes} bytes")

    metadata: dict[str, Value] = {}
    array_lengths: dict[str, int] = {}
    kinds: dict[str, int] = {}
    tokens: list[bytes] | None = None
    token_types: np.ndarray | None = None
    for _ in range(n_keys):
        key = _text(reader.string(), "key")
        if key in metadata or key in array_lengths:
            wrong(f"key {key} is there twice")
        kinds[key] = kind = reader.number("<I")
        if kind == _STRING:
            metadata[key] = reader.string().decode("utf-8", "replace")
        elif kind != _ARRAY:
            metadata[key] = _scalar(reader.array(_dtype(key, kind), 1)[0], kind)
        else:
            kind, n = reader.number("<I"), reader.number("<Q")
            array_lengths[key] = n
            if kind == _STRING:
                strings = reader.strings(n)
                if key == "tokenizer.ggml.tokens":
                    tokens = strings
            else:
                values = reader.array(_dtype(key, kind), n)
                if key == "tokenizer.ggml.token_type":
                    token_types = values
                elif n <= MAX_LAYERS:
                    metadata[key] = tuple(values.tolist())
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        wrong(f"general.alignment is {alignment}, not a power of two")
    infos = [_tensor_info(reader, part) for _ in range(n_tensors)]
    unique((info.name for info in infos), "tensor name")

    start = -(-reader.pos // alignment) * alignment
    offset = 0
    tensors: list[Tensor] = []
    for info in infos:
        if info.offset != offset:
            wrong(f"tensor {info.name} is at offset {info.offset}, expected {offset}")
        if start + offset + info.n_bytes > file_bytes:
            end = start + offset + info.n_bytes
            wrong(f"truncated: tensor {info.name} ends at byte {end}, the file has {file_bytes}")
        tensors.append(Tensor(info.name, info.ggml_type, info.shape, info.n_bytes, start + offset, part))
        offset += -(-info.n_bytes // alignment) * alignment
    fingerprint = reader.fingerprint(tensors)
    return Header(metadata, tokens, token_types, array_lengths, tensors, file_bytes, fingerprint, kinds)


def _dtype(key: str, kind: int) -> str:
    return _SCALARS[kind] if kind in _SCALARS else wrong(f"key {key} has unknown type {kind}")


def _scalar(value: np.generic, kind: int) -> Value:
    number: int | float = value.item()
    return bool(number) if kind == _BOOL else number


def _tensor_info(reader: _Reader, part: int) -> Tensor:
    name = _text(reader.string(), "tensor name")
    if len(name.encode()) > _MAX_NAME:
        wrong(f"tensor name {name[:80]} is longer than {_MAX_NAME} bytes")
    n_dims = reader.number("<I")
    if not 1 <= n_dims <= 4:
        wrong(f"tensor {name} has {n_dims} dimensions")
    shape = tuple(reader.number("<q") for _ in range(n_dims))
    ggml_type = reader.number("<I")
    if ggml_type not in GGML_TYPES:
        wrong(f"tensor {name} has unknown type {ggml_type}")
    type_name, block, block_bytes = GGML_TYPES[ggml_type]
    n_weights = 1
    for dim in shape:
        if dim < 1:
            wrong(f"tensor {name} has a dimension of {dim}")
        n_weights *= dim
    if shape[0] % block:
        wrong(f"tensor {name} has rows of {shape[0]} weights, not whole blocks of {block} ({type_name})")
    n_bytes = n_weights // block * block_bytes
    if n_bytes >= 1 << 62:
        wrong(f"tensor {name} has the impossible shape {shape}")
    return Tensor(name, ggml_type, shape, n_bytes, reader.number("<Q"), part)


def _text(raw: bytes, what: str) -> str:
    # llama.cpp compares names as C strings. Two names that differ only after a zero byte are the same there.
    if not raw or b"\0" in raw:
        wrong(f"{what} {raw[:80]!r} is empty or has a zero byte")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        wrong(f"{what} {raw[:80]!r} is not UTF-8")


def unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            wrong(f"{what} {name} is there twice")
        seen.add(name)


def whole(metadata: Mapping[str, Value], key: str, default: int) -> int:
    value = metadata.get(key, default)
    return value if isinstance(value, int) else wrong(f"{key} is {value!r}, not a whole number")
