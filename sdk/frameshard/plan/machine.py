"""The machine as the planner sees it: a profile of measured rates.

A profile belongs to a fingerprint: the processor, the thread count, the device with its driver, and the type of the
weights, because a product of 4-bit weights runs at another rate than one of 16-bit weights. It is measured once in a
few seconds and kept in frameshard's cache directory until the fingerprint changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml

from frameshard.errors import BadArgument
from frameshard.models import cache_dir
from frameshard.plan.model import GGML_TYPES, Model

if TYPE_CHECKING:
    from frameshard.native import ShardDevice

logger = logging.getLogger("frameshard.plan")

SCHEMA_VERSION = 1

# Host memory serves CPU and copies together at more than a read loop alone reaches: 97 + 52 GB/s beside 119 GB/s on the
# machine of an H100 with 16 cores.
_MEMORY_OVER_READ = 1.25
# A kernel of a few microseconds in a graph of hundreds: what is left of a token's time on an H100 when all weights are
# resident and their bytes are paid for.
_KERNEL_S = 2e-6


@dataclass(frozen=True)
class Profile:
    """Measured rates: bytes per second (``*_gemv`` of weights), operations per second (``*_flops``) and seconds."""

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

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0.0 if field.name.endswith("_s") else 1.0
            if field.name != "fingerprint" and not least <= value < float("inf"):
                raise BadArgument(f"the profile's {field.name} is {value}")

    @property
    def memory(self) -> float:
        """What CPU and copies can draw from host memory together."""
        return max(self.dram * _MEMORY_OVER_READ, self.cpu_gemv, self.h2d)

    def to_dict(self) -> dict[str, object]:
        """Plain values under ``schema_version``, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "fingerprint"}
        return {"schema_version": SCHEMA_VERSION, "fingerprint": dict(self.fingerprint), **values}

    def to_json(self) -> str:
        """One JSON document; :meth:`from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises :class:`BadArgument` if the text is not a profile of this schema version."""
        try:
            document = json.loads(text)
            if document["schema_version"] != SCHEMA_VERSION:
                raise BadArgument(f"the profile has schema version {document['schema_version']}, not {SCHEMA_VERSION}")
            fingerprint = dict(document["fingerprint"])
            rates = {field.name: float(document[field.name]) for field in fields(cls) if field.name != "fingerprint"}
        except (ValueError, TypeError, KeyError) as error:
            raise BadArgument(f"not a profile: {error!r}") from error
        return cls(fingerprint, **rates)


def load(path: str | os.PathLike[str]) -> Profile:
    """A profile from a file. Raises :class:`BadArgument` if it cannot be read or is none."""
    try:
        return Profile.from_json(Path(path).read_text("utf-8"))
    except OSError as error:
        raise BadArgument(f"cannot read the profile {os.fspath(path)}: {error.strerror}") from error


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile; whoever reads the file meanwhile sees the old one or the new one, whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(profile.to_json(), "utf-8")
    os.replace(part, target)


def fingerprint(model: Model, *, inner: str, n_threads: int, link_gbps: float = 0.0) -> dict[str, str | int | float]:
    """What a profile depends on. ``inner`` is the device's name, ``link_gbps`` the emulated device's bandwidth."""
    ggml_type, rows, cols = typical_product(model)
    out: dict[str, str | int | float] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": n_threads,
        "device": inner,
        "weights": f"{GGML_TYPES[ggml_type][0]} {rows}x{cols}",
    }
    if inner == "emulated":
        out["link_gbps"] = link_gbps
    else:
        out |= _gpu_names()
    return out


def typical_product(model: Model) -> tuple[int, int, int]:
    """(ggml type, rows, columns) of the matrices that hold most of the model's bytes."""
    n_bytes: Counter[tuple[int, int, int]] = Counter()
    for shard in model.shards:
        for tensor in shard.tensors:
            if len(tensor.shape) >= 2:
                n_bytes[tensor.ggml_type, tensor.shape[1], tensor.shape[0]] += tensor.n_bytes
    if not n_bytes:
        raise BadArgument(f"{model.path.name} has no matrices to measure with")
    return max(n_bytes, key=lambda product: (n_bytes[product], product))


def probe(
    device: ShardDevice, model: Model, *, inner: str, n_threads: int, link_gbps: float = 0.0, seconds: float = 5.0
) -> Profile:
    """Measure this machine with products of the model's shape, in about ``seconds``."""
    ggml_type, rows, cols = typical_product(model)
    result = device.probe(ggml_type, rows, cols, seconds)
    return Profile(
        fingerprint=fingerprint(model, inner=inner, n_threads=n_threads, link_gbps=link_gbps),
        h2d=result.h2d_pinned,
        d2h=result.d2h,
        dram=result.dram_read,
        cpu_gemv=result.cpu_gemv,
        gpu_gemv=result.gpu_gemv,
        cpu_flops=result.cpu_gemm,
        gpu_flops=result.gpu_gemm,
        handoff_s=result.handoff_s,
    )


def cached_path(key: Mapping[str, str | int | float]) -> Path:
    """Where the profile of a fingerprint is kept."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{digest}.json"


def load_or_probe(
    device: ShardDevice,
    model: Model,
    *,
    inner: str,
    n_threads: int,
    link_gbps: float = 0.0,
    refresh: bool = False,
    seconds: float = 5.0,
) -> Profile:
    """The profile kept for this machine, device and kind of weights, else a new one, which is kept."""
    key = fingerprint(model, inner=inner, n_threads=n_threads, link_gbps=link_gbps)
    path = cached_path(key)
    if not refresh and path.is_file():
        try:
            profile = load(path)
            if dict(profile.fingerprint) == key:
                return profile
        except BadArgument:
            pass  # written by another version: measured anew
    profile = probe(device, model, inner=inner, n_threads=n_threads, link_gbps=link_gbps, seconds=seconds)
    try:
        save(profile, path)
    except OSError as error:  # a read-only cache costs seconds at the next start, nothing else
        logger.warning("the profile is not kept: %s", error)
    return profile


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _gpu_names() -> dict[str, str]:
    """Names of NVIDIA's GPUs and their driver; empty where there is no such driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        names = [
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        return {"gpus": ", ".join(map(str, names)), "driver": str(pynvml.nvmlSystemGetDriverVersion())}
    finally:
        pynvml.nvmlShutdown()
