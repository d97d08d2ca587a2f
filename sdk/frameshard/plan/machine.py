"""The machine as the planner sees it: a profile of rates.

A measured profile belongs to a fingerprint: the processor, the thread count, the device with its driver and link. It is
measured once in a few seconds and kept in frameshard's cache directory until the fingerprint changes. What depends on
the model (products with its kinds of weights, attention with its heads) is measured when a model first needs it and
added. A profile may also be written from spec sheets, for machines that are not at hand; it says then where each figure
is from. ``profiles/README.md`` describes the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pynvml
from numpy.typing import NDArray

from frameshard.errors import BadArgument
from frameshard.models import cache_dir
from frameshard.native import EMULATED, parse_device
from frameshard.plan.header import GGML_TYPES, Tensor
from frameshard.plan.model import Model, Shard

if TYPE_CHECKING:
    from frameshard.native import ShardDevice

logger = logging.getLogger("frameshard.plan")

SCHEMA_VERSION = 2

Floats = NDArray[np.float64]
Kind = tuple[str, int, int]
"""A kind of weights: ggml type, rows and columns of the matrix that one product reads."""
KvType = Literal["f16", "q8_0", "q4_0"]
"""How keys and values are kept: 16 bits each, or in blocks of 32 with a scale, 8.5 or 4.5 bits each."""
BYTES_PER_WEIGHT = {name: n_bytes / block for name, block, n_bytes in GGML_TYPES.values()}

# Host memory serves CPU and copies together at more than a read loop alone reaches: 97 + 52 GB/s beside 119 GB/s on the
# machine of an H100 with 16 cores. For profiles in which it was not measured.
_MEMORY_OVER_READ = 1.25
# A kernel of a few microseconds in a graph of hundreds: what is left of a token's time on an H100 when all weights are
# resident and their bytes are paid for.
_KERNEL_S = 2e-6
_COPY_PIECE = 16 << 20  # the shard device's chunk
_MOST_KINDS = 3  # kinds of weights measured for one model
_LEAST_SHARE = 0.1  # of the model's bytes: rarer kinds take the rates of the nearest one
# Large enough, and simple enough to compute, for its rate with one column to be that of the device's memory.
_MEMORY_KIND = ("F16", 8192, 8192)
_CELLS = (1024, 8192)  # contexts at which attention is measured


@dataclass(frozen=True)
class Product:
    """Rates of products with one kind of weights: FLOP/s by columns (``tokens``, ascending from 1), and the bytes/s of
    weights that the CPU reads and the copy engine moves when both work at once."""

    tokens: tuple[int, ...]
    cpu_flops: tuple[float, ...]
    gpu_flops: tuple[float, ...]
    cpu_beside_copies: float
    h2d_beside_cpu: float


@dataclass(frozen=True)
class Attention:
    """Rates of flash attention on the device by ``cells`` of context: bytes/s of keys and values that one token reads,
    FLOP/s of a prompt."""

    cells: tuple[int, ...]
    kv_bytes: tuple[float, ...]
    flops: tuple[float, ...]


@dataclass(frozen=True)
class Profile:
    """Rates of a machine: bytes per second (``*_gemv`` of weights), operations per second (``*_flops``) and seconds.

    ``products`` by kind ("Q4_0 11520x4096") and ``attention`` by heads ("128 x 32:8") refine the plain rates, which
    stand for whatever is not in them. ``cpu_beside_copies`` and ``h2d_beside_cpu`` are what CPU and copies reach at the
    same time, 0 where not measured. ``copies`` by ``piece_bytes`` say what small pieces cost; ``host_memory`` is for
    people. ``sources`` says of each figure that was not measured where it is from.
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
    def memory(self) -> float:
        """What CPU and copies can draw from host memory together."""
        together = self.cpu_beside_copies + self.h2d_beside_cpu or self.dram * _MEMORY_OVER_READ
        return max(together, self.dram, self.cpu_gemv, self.h2d)

    @property
    def device_memory(self) -> float:
        """Bytes/s of the device's memory: the best of what products with one column read. Small or quantised ones reach
        less."""
        read = [p.gpu_flops[0] / 2 * BYTES_PER_WEIGHT[name.split()[0]] for name, p in self.products.items()]
        return max([self.gpu_gemv, *read])

    def copy_rate(self, piece_bytes: float) -> float:
        """Bytes/s of copies to the device in pieces of this size; where that was not measured, as in large ones."""
        if not self.copies:
            return self.h2d
        sizes, rates = (np.array(self.copies[name], dtype=np.float64) for name in ("piece_bytes", "h2d_pinned"))
        return min(float(np.interp(np.log(piece_bytes), np.log(sizes), rates)), self.h2d)

    @property
    def slowdowns(self) -> tuple[float, float]:
        """By how much the CPU and copies take longer while both are at work, of their time alone."""
        if self.cpu_beside_copies and self.h2d_beside_cpu:
            slowed = (self.cpu_gemv / self.cpu_beside_copies, self.h2d / self.h2d_beside_cpu)
        else:
            slowed = ((self.cpu_gemv + self.h2d) / self.memory,) * 2
        return max(slowed[0] - 1.0, 0.0), max(slowed[1] - 1.0, 0.0)

    def seconds_per_weight(self, kind: Kind, tokens: Floats, *, on_cpu: bool) -> Floats:
        """Seconds that each weight of a matrix takes in products of ``tokens`` columns (at least 1)."""
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
        """(bytes/s of keys and values for a token, FLOP/s for a prompt) at ``cells`` of context. Where a quantised type
        was not measured, it takes as long as 16 bits do."""
        known, of_16_bits = self.attention.get(heads_name(heads, kv_type)), 1.0
        if known is None:
            known, of_16_bits = self.attention.get(heads_name(heads)), kv_value_bytes(kv_type) / 2
        if known is None:
            return self.gpu_gemv * of_16_bits, self.gpu_flops
        at = np.array([max(cells, 1.0)])
        kv_bytes, flops = _at(at, known.cells, known.kv_bytes), _at(at, known.cells, known.flops)
        return float(kv_bytes[0]) * of_16_bits, float(flops[0])

    def seen_by(self, model: Model) -> Profile:
        """The same profile with plain rates that are those of the weights most of the model consists of."""
        kinds = kinds_of(model)
        name, product = self._nearest(kinds[0]) if kinds else ("", None)
        return self if product is None else self._with(name, product)

    def _with(self, type_name: str, product: Product) -> Profile:
        gemv = BYTES_PER_WEIGHT[type_name] / 2
        # Memory is one for all shapes, and whatever else went on has only lowered a rate: the best is nearest.
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
        """The product measured with the most similar weights and their type: the same if there is one, then of like
        size."""

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
        """Raises :class:`BadArgument` if the text is not a profile of this schema version."""
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
    """Rates between those measured, straight in logarithms; beyond them the nearest."""
    return np.exp(np.interp(np.log(x), np.log(at), np.log(rates)))


def kind_name(kind: Kind) -> str:
    """As in a profile's ``products``."""
    return f"{kind[0]} {kind[1]}x{kind[2]}"


def parse_kind(name: str) -> Kind:
    """Reads :func:`kind_name`. Raises :class:`BadArgument`."""
    type_name, _, shape = name.partition(" ")
    rows, _, cols = shape.partition("x")
    if type_name not in BYTES_PER_WEIGHT or not (rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        raise BadArgument(f"{name!r} is not a kind of weights such as 'Q4_0 11520x4096'")
    return type_name, int(rows), int(cols)


def kind_of(model: Model, shard: Shard, tensor: Tensor) -> Kind:
    """The matrix that one product with this tensor reads: of experts, those that a token uses, stacked."""
    cols, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
    return tensor.type_name, rows * max(model.n_expert_used, 1) if shard.kind == "experts" else rows, cols


def kinds_of(model: Model) -> list[Kind]:
    """The kinds of weights that make up most of the model, largest first. The output head is left out: of a prompt it
    computes one row."""
    n_bytes: Counter[Kind] = Counter()
    for shard in model.shards:
        for tensor in shard.tensors:
            if len(tensor.shape) >= 2 and shard.kind not in ("core", "output"):
                n_bytes[kind_of(model, shard, tensor)] += tensor.n_bytes
    total = sum(n_bytes.values())
    kinds = sorted(n_bytes, key=lambda kind: (-n_bytes[kind], kind))
    return [kind for kind in kinds if n_bytes[kind] >= _LEAST_SHARE * total][:_MOST_KINDS]


def heads_of(model: Model) -> tuple[int, int, int]:
    """(values of a head, heads, heads of keys and values) of the model's largest attention; zeros without attention."""
    heads, kv_heads = model.integer("attention.head_count"), model.integer("attention.head_count_kv")
    kv_heads = kv_heads or heads
    return (model.integer("attention.key_length") or model.n_embd // heads, heads, kv_heads) if heads else (0, 0, 0)


def heads_name(heads: tuple[int, int, int], kv_type: KvType = "f16") -> str:
    """As in a profile's ``attention``."""
    return f"{heads[0]} x {heads[1]}:{heads[2]}" + ("" if kv_type == "f16" else f" {kv_type}")


def kv_value_bytes(kv_type: KvType) -> float:
    """Bytes of a key's or value's number."""
    return BYTES_PER_WEIGHT[kv_type.upper()]


def load(name_or_path: str | os.PathLike[str]) -> Profile:
    """A profile from a file, or one of those that come with the package by its name. Raises :class:`BadArgument` if it
    cannot be read or is none."""
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
    """Write a profile; whoever reads the file meanwhile sees the old one or the new one, whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(profile.to_json(), "utf-8")
    os.replace(part, target)


def fingerprint(device: str, n_threads: int) -> dict[str, str | int | float]:
    """What a profile depends on; ``device`` as :func:`frameshard.native.parse_device` has it."""
    name, link_gbps = parse_device(device)
    out: dict[str, str | int | float] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": n_threads,
        "device": name,
    }
    if name == EMULATED:
        out["link_gbps"] = link_gbps
    else:
        out |= _gpu_names()
    return out


def cached_path(key: Mapping[str, str | int | float]) -> Path:
    """Where the profile of a fingerprint is kept."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{digest}.json"


def load_or_probe(
    device: ShardDevice,
    model: Model,
    *,
    device_name: str,
    n_threads: int,
    kv_type: KvType = "f16",
    refresh: bool = False,
    seconds: float = 5.0,
) -> Profile:
    """The profile kept for this machine and device, as this model sees it with keys and values kept as ``kv_type``.
    What is not in it yet is measured, in about ``seconds`` if that is all of it, and kept; with ``refresh`` everything
    is."""
    key = fingerprint(device_name, n_threads)
    path = cached_path(key)
    kept = None
    if not refresh and path.is_file():
        with contextlib.suppress(BadArgument):  # written by another version: measured anew
            kept = load(path)
        if kept is not None and dict(kept.fingerprint) != key:
            kept = None
    profile = _measure(device, model, kv_type, kept, key, seconds)
    if profile is not kept:
        try:
            save(profile, path)
        except OSError as error:  # a read-only cache costs seconds at the next start, nothing else
            logger.warning("the profile is not kept: %s", error)
    return profile.seen_by(model)


def _measure(
    device: ShardDevice,
    model: Model,
    kv_type: KvType,
    kept: Profile | None,
    key: Mapping[str, str | int | float],
    seconds: float,
) -> Profile:
    """``kept`` with what this model needs and is not in it; ``kept`` itself if nothing is missing."""
    known = kept.products if kept else {}
    numbers = {name: number for number, (name, _, _) in GGML_TYPES.items()}
    products = {}
    kinds = kinds_of(model)
    if not kinds:
        raise BadArgument(f"{model.path.name} has no matrices to measure with")
    kinds = list(dict.fromkeys([*kinds, _MEMORY_KIND]))
    new = [kind for kind in kinds if kind_name(kind) not in known]
    if new or kept is None:
        logger.info("measuring this machine for %s, about %.0f s; the result is kept", model.path.name, seconds)
    for kind in kinds:
        if kind in new:
            rates = device.probe_product(numbers[kind[0]], kind[1], kind[2], 0.5 * seconds / len(kinds))
            # The largest products of a small budget find no room.
            found = [i for i in range(len(rates.tokens)) if min(rates.cpu_flops[i], rates.gpu_flops[i]) > 0]
            products[kind_name(kind)] = Product(
                tuple(rates.tokens[i] for i in found),
                tuple(rates.cpu_flops[i] for i in found),
                tuple(rates.gpu_flops[i] for i in found),
                rates.cpu_beside_copies,
                rates.h2d_beside_cpu,
            )
    attention = {}
    heads = heads_of(model)
    name, number = heads_name(heads, kv_type), numbers[kv_type.upper()]
    if all(heads) and heads[1] % heads[2] == 0 and (kept is None or name not in kept.attention):
        each = {n: device.probe_attention(*heads, number, n, 0.1 * seconds / len(_CELLS)) for n in _CELLS}
        each = {n: rates for n, rates in each.items() if min(rates.kv_bytes, rates.flops) > 0}
        if each:
            attention[name] = Attention(
                tuple(each),
                tuple(rates.kv_bytes for rates in each.values()),
                tuple(rates.flops for rates in each.values()),
            )
    if kept is not None:
        if not products and not attention:
            return kept
        return dataclasses.replace(
            kept, products={**kept.products, **products}, attention={**kept.attention, **attention}
        )
    machine = device.probe_machine(0.4 * seconds)
    piece = machine.piece_bytes.index(_COPY_PIECE)
    values = dataclasses.asdict(machine)
    return Profile(
        fingerprint=key,
        h2d=max(machine.h2d_pinned[: piece + 1]),  # larger pieces are no slower
        d2h=machine.d2h_pageable[piece],
        dram=max(machine.dram),
        cpu_gemv=1.0,  # these four are what a model sees: seen_by()
        gpu_gemv=1.0,
        cpu_flops=1.0,
        gpu_flops=1.0,
        handoff_s=machine.handoff_s,
        h2d_pageable=machine.h2d_pageable[piece],
        products=products,
        attention=attention,
        copies={name: list(values[name]) for name in values if name.startswith(("piece", "h2d", "d2h"))},
        host_memory={name: list(values[name]) for name in ("threads", "dram", "dram_beside_copies")},
    ).seen_by(model)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpu_names() -> dict[str, str | int | float]:
    """Names of NVIDIA's GPUs, their driver and links; empty where there is no such driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return {
            "gpus": ", ".join(str(pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus),
            "links": ", ".join(map(_link, gpus)),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        }
    finally:
        pynvml.nvmlShutdown()


def _link(gpu: Any) -> str:
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)
        return f"PCIe {generation} x{pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)}"
    except pynvml.NVMLError:  # some virtual machines do not tell
        return "unknown"
