"""The machine as plans see it: a profile of rates, which is data alone.

A profile is measured (:mod:`frameshard.engine.probe`) or written from spec sheets, for machines that are not at hand;
``sources`` then says where each figure is from. ``profiles/README.md`` describes the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from frameshard.errors import BadArgument
from frameshard.plan.header import GGML_TYPES, Tensor
from frameshard.plan.model import Model, Shard

SCHEMA_VERSION = 2

Floats = NDArray[np.float64]
Kind = tuple[str, int, int]
"""A kind of weights: ggml type, rows and columns of the matrix that one product reads."""
KvType = Literal["f16", "q8_0", "q4_0"]
"""Type of the KV cache: 16 bits a value, or blocks of 32 values with a scale (8.5 or 4.5 bits a value)."""
BYTES_PER_WEIGHT = {name: n_bytes / block for name, block, n_bytes in GGML_TYPES.values()}

# Rate of host memory for CPU and copies together, relative to reads by the CPU alone: 97 + 52 GB/s against 119 GB/s on
# the machine of an H100 with 16 cores. For profiles in which it was not measured.
_MEMORY_OVER_READ = 1.25
# Time of a kernel's launch in a graph of hundreds: a token's time on an H100 with all weights resident, less the time
# to read them.
_KERNEL_S = 2e-6
_MOST_KINDS = 3  # kinds of weights measured for one model
_LEAST_SHARE = 0.1  # of the model's bytes: rarer kinds take the rates of the most similar one


@dataclass(frozen=True)
class Product:
    """Rates of products with one kind of weights.

    :param tokens: numbers of columns, ascending from 1.
    :param cpu_flops: FLOP/s of the CPU at each of them.
    :param gpu_flops: FLOP/s of the device.
    :param cpu_beside_copies: bytes/s of weights that the CPU reads while copies run.
    :param h2d_beside_cpu: bytes/s of copies to the device meanwhile.
    """

    tokens: tuple[int, ...]
    cpu_flops: tuple[float, ...]
    gpu_flops: tuple[float, ...]
    cpu_beside_copies: float
    h2d_beside_cpu: float


@dataclass(frozen=True)
class Attention:
    """Rates of flash attention on the device.

    :param cells: cells of context, ascending.
    :param kv_bytes: bytes/s of the KV cache that one token reads, at each.
    :param flops: FLOP/s of a prefill.
    """

    cells: tuple[int, ...]
    kv_bytes: tuple[float, ...]
    flops: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """Rates of a machine: bytes per second (``*_gemv`` of weights), operations per second (``*_flops``) and seconds.

    ``products`` by kind ("Q4_0 11520x4096") and ``attention`` by heads ("128 x 32:8") refine the plain rates, which
    apply to whatever is not in them. ``cpu_beside_copies`` and ``h2d_beside_cpu`` are the rates of CPU and copies at
    the same time, 0 where not measured. ``copies`` are rates by ``piece_bytes``, the size of a copy. Plans do not use
    ``host_memory``. ``sources`` says where figures are from that were not measured.

    :raises BadArgument: a rate is out of range.
    """

    fingerprint: Mapping[str, str | int | float]
    h2d: float
    d2h: float
    dram: float
    cpu_gemv: float
    gpu_gemv: float
    cpu_flops: float
    gpu_flops: float
    handoff_s: float
    kernel_s: float = _KERNEL_S
    h2d_pageable: float = 10e9
    cpu_beside_copies: float = 0.0
    h2d_beside_cpu: float = 0.0
    products: Mapping[str, Product] = field(default_factory=dict)
    attention: Mapping[str, Attention] = field(default_factory=dict)
    copies: Mapping[str, list[float]] = field(default_factory=dict)
    host_memory: Mapping[str, list[float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            least = 0.0 if name.endswith("_s") or "beside" in name else 1.0
            if not least <= value < float("inf"):
                raise BadArgument(f"the profile's {name} is {value}")
        for key, product in self.products.items():
            parse_kind(key)
            _check_curve(key, product.tokens, product.cpu_flops, product.gpu_flops)
        for key, attention in self.attention.items():
            _check_curve(key, attention.cells, attention.kv_bytes, attention.flops)
        if self.copies:
            sizes = tuple(map(int, self.copies.get("piece_bytes", ())))
            _check_curve("copies", sizes, tuple(self.copies.get("h2d_pinned", ())))

    @property
    def device(self) -> str:
        """The inner device's name."""
        return str(self.fingerprint.get("device"))

    @property
    def memory(self) -> float:
        """Bytes/s that CPU and copies read from host memory together."""
        together = self.cpu_beside_copies + self.h2d_beside_cpu or self.dram * _MEMORY_OVER_READ
        return max(together, self.dram, self.cpu_gemv, self.h2d)

    @property
    def device_memory(self) -> float:
        """Bytes/s of the device's memory: the best rate of products with one column. Small or quantised ones are
        slower."""
        read = [p.gpu_flops[0] / 2 * BYTES_PER_WEIGHT[name.split()[0]] for name, p in self.products.items()]
        return max([self.gpu_gemv, *read])

    def copy_rate(self, n_bytes: float) -> float:
        """Bytes/s of copies of ``n_bytes`` each to the device; where that was not measured, of large ones."""
        if not self.copies:
            return self.h2d
        sizes, rates = (np.array(self.copies[name], dtype=np.float64) for name in ("piece_bytes", "h2d_pinned"))
        return min(float(np.interp(np.log(n_bytes), np.log(sizes), rates)), self.h2d)

    @property
    def slowdowns(self) -> tuple[float, float]:
        """How much longer the CPU and copies take while both work, as shares of their time alone."""
        if self.cpu_beside_copies and self.h2d_beside_cpu:
            slowed = (self.cpu_gemv / self.cpu_beside_copies, self.h2d / self.h2d_beside_cpu)
        else:
            slowed = ((self.cpu_gemv + self.h2d) / self.memory,) * 2
        return max(slowed[0] - 1.0, 0.0), max(slowed[1] - 1.0, 0.0)

    def seconds_per_weight(self, kind: Kind, tokens: Floats, *, on_cpu: bool) -> Floats:
        """Seconds that each weight of a matrix takes.

        :param tokens: columns of each product, at least 1; any shape.
        :returns: of the same shape.
        """
        name, product = self._nearest(kind)
        if product is not None and name == kind[0]:
            flops = _at(tokens, product.tokens, product.cpu_flops if on_cpu else product.gpu_flops)
            return 2 * tokens / flops
        plain = self if product is None else self._with(name, product)
        gemv, most = (plain.cpu_gemv, plain.cpu_flops) if on_cpu else (plain.gpu_gemv, plain.gpu_flops)
        return np.maximum(BYTES_PER_WEIGHT[kind[0]] / gemv, 2 * tokens / most)

    def attention_rates(
        self, heads: tuple[int, int, int], cells: float, kv_type: KvType = "f16"
    ) -> tuple[float, float]:
        """(bytes/s of the KV cache for a token, FLOP/s for a prefill) at ``cells`` of context. A quantised type that
        was not measured takes as long as 16 bits."""
        known, of_16_bits = self.attention.get(heads_name(heads, kv_type)), 1.0
        if known is None:
            known, of_16_bits = self.attention.get(heads_name(heads)), kv_value_bytes(kv_type) / 2
        if known is None:
            return self.gpu_gemv * of_16_bits, self.gpu_flops
        at = np.array([max(cells, 1.0)])
        kv_bytes, flops = _at(at, known.cells, known.kv_bytes), _at(at, known.cells, known.flops)
        return float(kv_bytes[0]) * of_16_bits, float(flops[0])

    def seen_by(self, model: Model) -> Profile:
        """The same profile, with the plain rates of the kind of weights that most of the model consists of."""
        kinds = kinds_of(model)
        name, product = self._nearest(kinds[0]) if kinds else ("", None)
        return self if product is None else self._with(name, product)

    def _with(self, type_name: str, product: Product) -> Profile:
        gemv = BYTES_PER_WEIGHT[type_name] / 2
        # Shapes share one memory, and other load only lowers a rate: the best measurement is the most accurate.
        same = (each for key, each in self.products.items() if parse_kind(key)[0] == type_name)
        beside = max(same, key=lambda each: each.cpu_beside_copies + each.h2d_beside_cpu)
        return dataclasses.replace(
            self,
            cpu_gemv=product.cpu_flops[0] * gemv,
            gpu_gemv=product.gpu_flops[0] * gemv,
            cpu_flops=product.cpu_flops[-1],
            gpu_flops=product.gpu_flops[-1],
            cpu_beside_copies=beside.cpu_beside_copies,
            h2d_beside_cpu=beside.h2d_beside_cpu,
        )

    def _nearest(self, kind: Kind) -> tuple[str, Product | None]:
        """The measurement with the most similar weights, and their type: of the same type if there is one, then of the
        most similar size."""

        def distance(key: str) -> tuple[float, float]:
            name, rows, cols = parse_kind(key)
            other_type = abs(np.log(BYTES_PER_WEIGHT[name] / BYTES_PER_WEIGHT[kind[0]]))
            return (0.0 if name == kind[0] else 1 + other_type), abs(np.log(rows * cols / (kind[1] * kind[2])))

        nearest = min(self.products, key=distance, default=None)
        return ("", None) if nearest is None else (parse_kind(nearest)[0], self.products[nearest])

    def to_dict(self) -> dict[str, object]:
        """Plain values under ``schema_version``, for JSON."""
        document: dict[str, object] = json.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """One JSON document; :meth:`from_json` reads it back."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """
        :raises BadArgument: not a profile of this schema version.
        """
        try:
            document = json.loads(text)
            if document["schema_version"] != SCHEMA_VERSION:
                raise BadArgument(f"the profile has schema version {document['schema_version']}, not {SCHEMA_VERSION}")
            values: dict[str, Any] = {name: float(document[name]) for name in _RATES}
            for name, kind in (("products", Product), ("attention", Attention)):
                values[name] = {str(key): _curves(kind, each) for key, each in dict(document.get(name, {})).items()}
            for name in ("fingerprint", "copies", "host_memory", "sources"):
                values[name] = dict(document[name] if name == "fingerprint" else document.get(name, {}))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadArgument(f"not a profile: {error!r}") from error
        return cls(**values)


_RATES = tuple(each.name for each in fields(Profile) if each.type == "float")


def _curves(kind: Any, values: Mapping[str, Any]) -> Any:
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _check_curve(key: str, at: tuple[int, ...], *rates: tuple[float, ...]) -> None:
    rising = list(at) == sorted(set(at)) and min(at, default=0) >= 1
    if not rising or any(len(each) != len(at) or not all(0 < rate < float("inf") for rate in each) for each in rates):
        raise BadArgument(f"the profile's rates of {key} make no sense")


def _at(x: Floats, at: tuple[int, ...], rates: tuple[float, ...]) -> Floats:
    """Interpolates rates linearly in logarithms; beyond the ends the nearest."""
    return np.exp(np.interp(np.log(x), np.log(at), np.log(rates)))


def kind_name(kind: Kind) -> str:
    """As in a profile's ``products``."""
    return f"{kind[0]} {kind[1]}x{kind[2]}"


def parse_kind(name: str) -> Kind:
    """Reads :func:`kind_name`.

    :raises BadArgument: not of that form.
    """
    type_name, _, shape = name.partition(" ")
    rows, _, cols = shape.partition("x")
    if type_name not in BYTES_PER_WEIGHT or not (rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        raise BadArgument(f"{name!r} is not a kind of weights such as 'Q4_0 11520x4096'")
    return type_name, int(rows), int(cols)


def kind_of(model: Model, shard: Shard, tensor: Tensor) -> Kind:
    """The matrix that one product with this tensor reads: of experts those that a token uses, stacked."""
    cols, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    return tensor.type_name, rows * max(model.n_expert_used, 1) if shard.kind == "experts" else rows, cols


def kinds_of(model: Model) -> list[Kind]:
    """The kinds of weights that make up most of the model, largest first. The output head is left out: a prefill
    computes one row of it."""
    n_bytes: Counter[Kind] = Counter()
    for shard in model.shards:
        for tensor in shard.tensors:
            if len(tensor.shape) >= 2 and shard.kind not in ("core", "output"):
                n_bytes[kind_of(model, shard, tensor)] += tensor.n_bytes
    total = sum(n_bytes.values())
    kinds = sorted(n_bytes, key=lambda kind: (-n_bytes[kind], kind))
    return [kind for kind in kinds if n_bytes[kind] >= _LEAST_SHARE * total][:_MOST_KINDS]


def heads_of(model: Model) -> tuple[int, int, int]:
    """(values of a head, heads, KV heads) of the model's attention; zeros without attention."""
    heads, kv_heads = model.integer("attention.head_count"), model.integer("attention.head_count_kv")
    kv_heads = kv_heads or heads
    return (model.integer("attention.key_length") or model.n_embd // heads, heads, kv_heads) if heads else (0, 0, 0)


def heads_name(heads: tuple[int, int, int], kv_type: KvType = "f16") -> str:
    """As in a profile's ``attention``."""
    return f"{heads[0]} x {heads[1]}:{heads[2]}" + ("" if kv_type == "f16" else f" {kv_type}")


def kv_value_bytes(kv_type: KvType) -> float:
    """Bytes of one value in the KV cache."""
    return BYTES_PER_WEIGHT[kv_type.upper()]


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """A profile from a file, or by name one of those that come with the package.

    :raises BadArgument: the file cannot be read or is no profile.
    """
    path = Path(name_or_path)
    if str(path) in names():
        return Profile.from_json((_shipped() / f"{path}.json").read_text("utf-8"))
    try:
        return Profile.from_json(path.read_text("utf-8"))
    except OSError as error:
        known = ", ".join(names())
        raise BadArgument(f"cannot read the profile {path}: {error.strerror}; by name there are: {known}") from error


def names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in _shipped().glob("*.json"))


def _shipped() -> Path:
    installed = Path(__file__).with_name("profiles")
    return installed if installed.is_dir() else Path(__file__).parents[3] / "profiles"  # the source tree


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a profile atomically.

    :raises OSError: the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(profile.to_json(), "utf-8")
    os.replace(part, target)
