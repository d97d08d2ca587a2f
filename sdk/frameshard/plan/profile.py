"""The profile: the rates of a machine, for plans.

A profile is measured (:mod:`frameshard.engine.probe`), or for other machines written from data sheets. Then ``sources``
says where each figure is from. ``profiles/README.md`` describes the file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frameshard.errors import BadArgument
from frameshard.plan import kept
from frameshard.plan.header import GGML_TYPES, Tensor
from frameshard.plan.model import Model, Shard
from frameshard.records import record

SCHEMA_VERSION = 2

Floats = NDArray[np.float64]
KvType = Literal["f16", "q8_0", "q4_0"]
"""Type of the KV cache: 16 bits per value, or blocks of 32 values with a scale (8.5 or 4.5 bits per value)."""
BYTES_PER_WEIGHT = {name: n_bytes / block for name, block, n_bytes in GGML_TYPES.values()}

# The rate of host memory for CPU and copies together, relative to reads by the CPU alone: 97 + 52 GB/s to 119 GB/s on
# an H100 machine with 16 cores. It is used with profiles in which that was not measured.
_MEMORY_OVER_READ = 1.25
# The time of one kernel launch in a graph with hundreds of them. On an H100 it was the time of a token with all weights
# resident, minus the time to read weights and KV cache, divided by the kernels: 1.2 us with minitron-8b-q4_0 and 1.1 us
# with qwen3-30b-a3b-q4_0. What only the first token of an answer takes was left out (costs.py).
KERNEL_S = 1.15e-6
_LONGEST_S = 1e3  # for a hand-off or a kernel; sums of larger ones could overflow
_MOST_KINDS = 3  # at most so many kinds of weights are measured for one model
_LEAST_SHARE = 0.1  # a kind with a smaller share of the model's bytes gets the rates of the most similar one


class Kind(NamedTuple):
    """A kind of weights.

    :param type_name: the ggml type.
    :param rows: the rows of the matrix that one product reads; for experts, of all that a token uses.
    :param cols: its columns.
    :param n_used: the experts that a token uses; 0: the weights are no experts.
    :param n_expert: the experts to choose from.
    """

    type_name: str
    rows: int
    cols: int
    n_used: int = 0
    n_expert: int = 0


@record
class Product:
    """The rates of matrix products with one kind of weights.

    :param tokens: the measured numbers of columns, of each chosen expert where they are experts; ascending from 1.
    :param cpu_flops: FLOP/s of the CPU, for each number of columns.
    :param gpu_flops: FLOP/s of the device, for each number of columns.
    :param cpu_beside_copies: bytes/s of weights that the CPU reads while copies run.
    :param h2d_beside_cpu: bytes/s of copies to the device while the CPU computes.
    """

    tokens: tuple[int, ...]
    cpu_flops: tuple[float, ...]
    gpu_flops: tuple[float, ...]
    cpu_beside_copies: float
    h2d_beside_cpu: float


@record
class Attention:
    """The rates of flash attention on the device.

    :param cells: the measured numbers of KV cells, ascending.
    :param kv_bytes: bytes/s at which a decode of one token reads the KV cache, for each number of cells.
    :param flops: FLOP/s of a prefill, for each number of cells.
    """

    cells: tuple[int, ...]
    kv_bytes: tuple[float, ...]
    flops: tuple[float, ...]


@record
class Profile:
    """The rates of a machine: bytes per second, operations per second (``*_flops``) and seconds (``*_s``).

    :param fingerprint: the properties of machine and device that the profile is valid for.
    :param h2d: copies of weights to the device: from pinned host memory where the system allows it.
    :param d2h: copies from the device to host memory.
    :param dram: reads of host memory by the CPU.
    :param cpu_gemv: weights that the CPU reads in products with one column; ``gpu_gemv`` the same for the device.
    :param cpu_flops: products with many columns on the CPU; ``gpu_flops`` the same for the device.
    :param handoff_s: one hand-off from the device to the CPU and back.
    :param kernel_s: one kernel launch.
    :param h2d_pageable: copies from pageable host memory to the device.
    :param cpu_beside_copies: weights that the CPU reads while copies run; 0 if not measured.
    :param h2d_beside_cpu: copies to the device while the CPU computes; 0 if not measured.
    :param products: rates by kind of weights ("Q4_0 11520x4096"). The rates above apply to other kinds.
    :param attention: rates by heads ("128 x 32:8").
    :param copies: rates by the size of a copy (``piece_bytes``).
    :param host_memory: further measurements of host memory. Plans do not use them.
    :param disk: rates of reads of weights from disk by the size of a read (``read_bytes``), four at a time; empty if
        they were not measured.
    :param sources: where figures are from that were not measured.
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
    kernel_s: float = KERNEL_S
    h2d_pageable: float = 10e9
    cpu_beside_copies: float = 0.0
    h2d_beside_cpu: float = 0.0
    products: Mapping[str, Product] = field(default_factory=dict)
    attention: Mapping[str, Attention] = field(default_factory=dict)
    copies: Mapping[str, list[float]] = field(default_factory=dict)
    host_memory: Mapping[str, list[float]] = field(default_factory=dict)
    disk: Mapping[str, list[float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            least = 0.0 if name.endswith("_s") or "beside" in name else 1.0
            if not least <= value < (_LONGEST_S if name.endswith("_s") else float("inf")):
                raise BadArgument(f"the profile's {name} is {value}")
        for key, product in self.products.items():
            parse_kind(key)
            _check_curve(key, product.tokens, product.cpu_flops, product.gpu_flops)
            if product.tokens[:1] != (1,):
                raise BadArgument(f"the profile's rates of {key} do not begin with one token")
            if not all(0 <= rate < float("inf") for rate in (product.cpu_beside_copies, product.h2d_beside_cpu)):
                raise BadArgument(f"the profile's rates of {key} beside each other make no sense")
        for key, attention in self.attention.items():
            _check_curve(key, attention.cells, attention.kv_bytes, attention.flops)
        if self.copies:
            sizes = tuple(map(int, self.copies.get("piece_bytes", ())))
            _check_curve("copies", sizes, tuple(self._weight_copies))
        if self.disk:
            sizes = tuple(map(int, self.disk.get("read_bytes", ())))
            _check_curve("disk", sizes, tuple(self.disk.get("rate", ())))
        for key, value in self.fingerprint.items():
            if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
                raise BadArgument(f"the profile's fingerprint has {value} as {key}")
        for columns in (self.copies, self.host_memory, self.disk):  # the others of these are only shown
            for key, column in columns.items():
                if not all(map(math.isfinite, column)):
                    raise BadArgument(f"the profile's {key} has a value that is no number")

    @property
    def device(self) -> str:
        """The inner device's name."""
        return str(self.fingerprint.get("device"))

    @property
    def cpu_copies(self) -> bool:
        """Whether the CPU makes copies to the device: from memory that is not pinned. It computes nothing meanwhile."""
        return self.fingerprint.get("weights") == "staged"

    @property
    def memory(self) -> float:
        """The bytes/s that the CPU and copies together read from host memory."""
        together = self.cpu_beside_copies + self.h2d_beside_cpu or self.dram * _MEMORY_OVER_READ
        return max(together, self.dram, self.cpu_gemv, self.h2d)

    @property
    def device_memory(self) -> float:
        """The bytes/s of the device's memory. It is the best rate of products with one column: small products and
        quantised types do not reach it."""
        read = [p.gpu_flops[0] / 2 * BYTES_PER_WEIGHT[name.split()[0]] for name, p in self.products.items()]
        return max([self.gpu_gemv, *read])

    @property
    def _weight_copies(self) -> list[float]:
        """The rates of weights' copies by size. Older profiles have only those from pinned memory."""
        return self.copies.get("h2d", self.copies.get("h2d_pinned", []))

    def copy_rates(self, n_bytes: Floats) -> Floats:
        """The bytes/s of copies of ``n_bytes`` each to the device; that of large copies if this was not measured.

        :returns: an array of the shape of ``n_bytes``.
        """
        if not self.copies:
            return np.full_like(n_bytes, self.h2d)
        sizes, rates = (np.array(each, dtype=np.float64) for each in (self.copies["piece_bytes"], self._weight_copies))
        return np.minimum(np.interp(np.log(n_bytes), np.log(sizes), rates), self.h2d)

    def copy_rate(self, n_bytes: float) -> float:
        """As :meth:`copy_rates`, for one size."""
        return float(self.copy_rates(np.array([n_bytes]))[0])

    def disk_rate(self, n_bytes: float) -> float:
        """The bytes/s of reads of ``n_bytes`` each from disk.

        :raises BadArgument: it was not measured.
        """
        if not self.disk:
            raise BadArgument(
                "the profile has no rates of a disk, which a host budget smaller than the model needs: measure them"
                " on that machine with frameshard profile --model, or add them as disk (read_bytes, rate)"
            )
        at = np.array([max(n_bytes, 1.0)])
        sizes = tuple(map(int, self.disk["read_bytes"]))
        return float(_at(at, sizes, tuple(self.disk["rate"]))[0])

    def slowdowns(self, type_name: str) -> tuple[float, float]:
        """How much longer the CPU and copies take if both work at the same time: (CPU, copies), relative to the time
        that each takes alone. 0 for no difference. The shapes of a type were measured at different moments, under
        different other load, so the median over the shapes is used.

        :param type_name: the type of the weights that the CPU reads.
        """
        if self.cpu_copies:
            return 0.0, 0.0  # they never work at the same time
        same = [
            each
            for key, each in self.products.items()
            if parse_kind(key).type_name == type_name and each.cpu_beside_copies and each.h2d_beside_cpu
        ]
        if same:
            gemv = BYTES_PER_WEIGHT[type_name] / 2
            slowed = (
                statistics.median(each.cpu_flops[0] * gemv / each.cpu_beside_copies for each in same),
                statistics.median(self.h2d / each.h2d_beside_cpu for each in same),
            )
        elif self.cpu_beside_copies and self.h2d_beside_cpu:
            slowed = (self.cpu_gemv / self.cpu_beside_copies, self.h2d / self.h2d_beside_cpu)
        else:
            slowed = ((self.cpu_gemv + self.h2d) / self.memory,) * 2
        return max(slowed[0] - 1.0, 0.0), max(slowed[1] - 1.0, 0.0)

    def seconds_per_weight(self, kind: Kind, tokens: Floats, *, on_cpu: bool) -> Floats:
        """The time of a matrix product in seconds, divided by the number of weights in the matrix.

        :param kind: the kind of weights.
        :param tokens: columns of each product, at least 1; any shape.
        :param on_cpu: for the CPU; otherwise for the device.
        :returns: an array of the shape of ``tokens``.
        """
        name, product = self._nearest(kind)
        if product is not None and name == kind.type_name:
            flops = _at(tokens, product.tokens, product.cpu_flops if on_cpu else product.gpu_flops)
            return 2 * tokens / flops
        plain = self if product is None else self._with(name, product)
        gemv, most = (plain.cpu_gemv, plain.cpu_flops) if on_cpu else (plain.gpu_gemv, plain.gpu_flops)
        return np.maximum(BYTES_PER_WEIGHT[kind.type_name] / gemv, 2 * tokens / most)

    def attention_rates(
        self, heads: tuple[int, int, int], cells: float, kv_type: KvType = "f16"
    ) -> tuple[float, float]:
        """The rates of attention with ``cells`` KV cells: (bytes/s at which a decode of one token reads the KV cache,
        FLOP/s of a prefill). A quantised type that was not measured gets the rates of ``f16``.

        :param heads: as from :func:`heads_of`.
        """
        known, of_16_bits = self.attention.get(heads_name(heads, kv_type)), 1.0
        if known is None:
            known, of_16_bits = self.attention.get(heads_name(heads)), kv_value_bytes(kv_type) / 2
        if known is None:
            return self.gpu_gemv * of_16_bits, self.gpu_flops
        at = np.array([max(cells, 1.0)])
        kv_bytes, flops = _at(at, known.cells, known.kv_bytes), _at(at, known.cells, known.flops)
        return float(kv_bytes[0]) * of_16_bits, float(flops[0])

    def seen_by(self, model: Model) -> Profile:
        """The same profile for one model: the plain rates, such as ``cpu_gemv``, become those of the model's most
        frequent kind of weights."""
        kinds = kinds_of(model)
        name, product = self._nearest(kinds[0]) if kinds else ("", None)
        return self if product is None else self._with(name, product)

    def _with(self, type_name: str, product: Product) -> Profile:
        gemv = BYTES_PER_WEIGHT[type_name] / 2
        # All shapes use the same memory, and other load can only lower a rate. So the highest measurement is the most
        # accurate.
        same = (each for key, each in self.products.items() if parse_kind(key).type_name == type_name)
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
        """The measurement with the most similar kind of weights: the same type if there is one, experts for experts,
        and the most similar size.

        :returns: the type of its weights, and its rates.
        """
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = self._find(kind)
        return found

    @cached_property
    def _found(self) -> dict[Kind, tuple[str, Product | None]]:
        """What :meth:`_nearest` has found: each plan asks hundreds of times."""
        return {}

    def _find(self, kind: Kind) -> tuple[str, Product | None]:
        def distance(key: str) -> tuple[float, bool, float]:
            other = parse_kind(key)
            types = abs(np.log(BYTES_PER_WEIGHT[other.type_name] / BYTES_PER_WEIGHT[kind.type_name]))
            size = abs(np.log(other.rows * other.cols / (kind.rows * kind.cols)))
            same_type = other.type_name == kind.type_name
            return (0.0 if same_type else 1 + types), bool(other.n_used) != bool(kind.n_used), size

        nearest = min(self.products, key=distance, default=None)
        if nearest is None:
            return "", None
        found = parse_kind(nearest)
        # With one column the CPU reads large matrices at least as fast as small ones. If a smaller one of the same type
        # was faster, something else ran while this one was measured.
        smaller = [
            each.cpu_flops[0]
            for key, each in self.products.items()
            if (other := parse_kind(key)).type_name == found.type_name
            and other.rows * other.cols <= found.rows * found.cols
        ]
        product = self.products[nearest]
        return found.type_name, dataclasses.replace(product, cpu_flops=(max(smaller), *product.cpu_flops[1:]))

    def to_dict(self) -> dict[str, object]:
        """A dictionary of plain values with ``schema_version``, for JSON."""
        document: dict[str, object] = json.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """A JSON document; :meth:`from_json` reads it."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what :meth:`to_json` has written.

        :raises BadArgument: it is not a profile of this schema version.
        """
        try:
            document = json.loads(text)
            json.dumps(document, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
            if document["schema_version"] != SCHEMA_VERSION:
                found = repr(document["schema_version"])
                raise BadArgument(f"the profile has schema version {found}, not {SCHEMA_VERSION}")
            values: dict[str, Any] = {name: float(document[name]) for name in _RATES}
            for name, kind in (("products", Product), ("attention", Attention)):
                values[name] = {str(key): _curves(kind, each) for key, each in dict(document.get(name, {})).items()}
            for name in ("copies", "host_memory", "disk"):
                columns = dict(document.get(name, {}))
                values[name] = {str(key): list(map(float, column)) for key, column in columns.items()}
            values["sources"] = {str(key): str(each) for key, each in dict(document.get("sources", {})).items()}
            values["fingerprint"] = dict(document["fingerprint"])
            if not isinstance(values["fingerprint"]["device"], str):
                raise BadArgument("not a profile: the device of its fingerprint is not a name")
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise BadArgument(f"not a profile: {error!r}") from error


_RATES = tuple(each.name for each in fields(Profile) if each.type == "float")


def _curves(kind: Any, values: Mapping[str, Any]) -> Any:
    """Reads measurements. What only another version measures is left out."""
    read: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "tuple[int, ...]": lambda column: tuple(map(int, column)),
        "tuple[float, ...]": lambda column: tuple(map(float, column)),
    }
    known = (each for each in fields(kind) if each.name in values)
    return kind(**{each.name: read[str(each.type)](values[each.name]) for each in known})


def _check_curve(key: str, at: tuple[int, ...], *rates: tuple[float, ...]) -> None:
    rising = list(at) == sorted(set(at)) and min(at, default=0) >= 1
    if not rising or any(len(each) != len(at) or not all(0 < rate < float("inf") for rate in each) for each in rates):
        raise BadArgument(f"the profile's rates of {key} make no sense")


def _at(x: Floats, at: tuple[int, ...], rates: tuple[float, ...]) -> Floats:
    """Interpolates the logarithms of rates linearly. Outside the measured range it gives the nearest rate."""
    return np.exp(np.interp(np.log(x), np.log(at), np.log(rates)))


def kind_name(kind: Kind) -> str:
    """The key of a kind of weights in a profile's ``products``."""
    experts = f" {kind.n_used}/{kind.n_expert}" if kind.n_used else ""
    return f"{kind.type_name} {kind.rows}x{kind.cols}{experts}"


@lru_cache(maxsize=256)
def parse_kind(name: str) -> Kind:
    """The kind of weights of a key from :func:`kind_name`.

    :raises BadArgument: the key does not have that form.
    """
    found = re.fullmatch(r"(\S+) ([0-9]+)x([0-9]+)(?: ([0-9]+)/([0-9]+))?", name)
    numbers = [int(number) for number in found.groups()[1:] if number] if found else []
    if found is None or found[1] not in BYTES_PER_WEIGHT or not all(numbers):
        raise BadArgument(f"{name!r} is not a kind of weights such as 'Q4_0 11520x4096' or 'Q4_0 6144x2048 8/128'")
    return Kind(found[1], *numbers)


def kind_of(model: Model, shard: Shard, tensor: Tensor) -> Kind:
    """The kind of the matrix that one product with this tensor reads."""
    cols, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    if shard.kind != "experts" or not model.n_expert_used:
        return Kind(tensor.type_name, rows, cols)
    return Kind(tensor.type_name, rows * model.n_expert_used, cols, model.n_expert_used, model.n_expert)


def kinds_of(model: Model) -> list[Kind]:
    """The kinds of weights with the most bytes in the model, largest first; behind experts also the largest of all
    others. The output head is left out, because a prefill computes only one row of logits."""
    n_bytes: Counter[Kind] = Counter()
    for shard in model.shards:
        for tensor in shard.tensors:
            if len(tensor.shape) >= 2 and shard.kind not in ("core", "output"):
                n_bytes[kind_of(model, shard, tensor)] += tensor.n_bytes
    total = sum(n_bytes.values())
    kinds = sorted(n_bytes, key=lambda kind: (-n_bytes[kind], kind))
    found = [kind for kind in kinds if n_bytes[kind] >= _LEAST_SHARE * total][:_MOST_KINDS]
    others = [kind for kind in kinds if not kind.n_used]
    return found if any(kind in found for kind in others) else found + others[:1]


def heads_of(model: Model) -> tuple[int, int, int]:
    """The model's attention: (values per head, heads, KV heads); zeros without attention."""
    heads, kv_heads = model.integer("attention.head_count"), model.integer("attention.head_count_kv")
    kv_heads = kv_heads or heads
    return (model.integer("attention.key_length") or model.n_embd // heads, heads, kv_heads) if heads else (0, 0, 0)


def heads_name(heads: tuple[int, int, int], kv_type: KvType = "f16") -> str:
    """The key of such heads in a profile's ``attention``."""
    return f"{heads[0]} x {heads[1]}:{heads[2]}" + ("" if kv_type == "f16" else f" {kv_type}")


def kv_value_bytes(kv_type: KvType) -> float:
    """The bytes of one value in the KV cache, with its part of the scale."""
    return BYTES_PER_WEIGHT[kv_type.upper()]


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """Loads a profile.

    :param name_or_path: the path of a file, or the name of a profile that comes with the package.
    :raises BadArgument: the file cannot be read or is not a profile.
    """
    path = Path(name_or_path)
    if str(path) in names():
        return Profile.from_json((_shipped() / f"{path}.json").read_text("utf-8"))
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise BadArgument(f"{path} is not a profile: it is not UTF-8 text") from None
    except OSError as error:
        known = ", ".join(names())
        raise BadArgument(f"cannot read the profile {path}: {error.strerror}; by name there are: {known}") from error
    try:
        return Profile.from_json(text)
    except BadArgument as error:
        raise BadArgument(f"{path}: {error.message}") from error


def names() -> list[str]:
    """The names of the profiles that come with the package."""
    return sorted(path.stem for path in _shipped().glob("*.json"))


def _shipped() -> Path:
    installed = Path(__file__).with_name("profiles")
    return installed if installed.is_dir() else Path(__file__).parents[3] / "profiles"  # in the source tree


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a profile to a file, atomically. A link is followed. A pipe or a device is not replaced but written to.

    :raises OSError: the file cannot be written.
    """
    text = profile.to_json()
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, "utf-8")
    else:
        kept.write(Path(os.path.realpath(path)), text)
