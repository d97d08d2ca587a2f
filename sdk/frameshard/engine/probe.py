"""Measures the machine with the shard device, and keeps the resulting profile.

A profile belongs to a fingerprint: the processor, the thread count, the device, its driver and its link. The
measurement takes a few seconds. The profile is kept in frameshard's cache directory until the fingerprint changes. Some
rates depend on the model: products with its kinds of weights, and attention with its heads. These are measured when a
model first needs them, and added to the profile. Rates are per second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from frameshard.errors import BadArgument
from frameshard.models import cache_dir
from frameshard.native import EMULATED, ShardDevice, parse_device
from frameshard.plan.header import GGML_NUMBERS
from frameshard.plan.model import Model
from frameshard.plan.profile import (
    Attention,
    KvType,
    Product,
    Profile,
    heads_name,
    heads_of,
    kind_name,
    kinds_of,
    load,
    save,
)

logger = logging.getLogger("frameshard.plan")

_COPY_BYTES = 16 << 20  # size of one copy; the shard device's default
# This matrix is so large, and its type so simple to compute, that a product with one column runs at the full rate of
# the device's memory.
_MEMORY_KIND = ("F16", 8192, 8192)
_CELLS = (1024, 8192)  # context lengths at which attention is measured


def fingerprint(device: str, n_threads: int) -> dict[str, str | int | float]:
    """The properties of machine and device that a profile is valid for.

    :param device: the device's name, as for :func:`frameshard.native.parse_device`.
    :param n_threads: threads of the CPU part.
    """
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
    """The path of the kept profile with the fingerprint ``key``."""
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
    """Loads the kept profile of this machine and device. Measures the rates that this model needs and that are not in
    the profile yet.

    :param refresh: measure everything again.
    :param seconds: time in seconds for all measurements together.
    :raises BadArgument: the model has no matrices.
    :raises OutOfMemory: the budget has no room for the measurements.
    """
    key = fingerprint(device_name, n_threads)
    path = cached_path(key)
    kept = None
    if not refresh and path.is_file():
        with contextlib.suppress(BadArgument):  # another version has written it: measure again
            kept = load(path)
        if kept is not None and dict(kept.fingerprint) != key:
            kept = None
    profile = _measure(device, model, kv_type, kept, key, seconds)
    if profile is not kept:
        try:
            save(profile, path)
        except OSError as error:  # a read-only cache: the next start measures again
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
    """Measures the rates that this model needs and that are not in ``kept``.

    :returns: ``kept`` with the new rates; ``kept`` itself if there are none.
    """
    known = kept.products if kept else {}
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
            rates = device.probe_product(GGML_NUMBERS[kind[0]], kind[1], kind[2], 0.5 * seconds / len(kinds))
            # In a small budget there is no room for the largest products. Their rates are 0.
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
    name, number = heads_name(heads, kv_type), GGML_NUMBERS[kv_type.upper()]
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
    piece = machine.piece_bytes.index(_COPY_BYTES)
    values = dataclasses.asdict(machine)
    return Profile(
        fingerprint=key,
        h2d=max(machine.h2d_pinned[: piece + 1]),  # a larger copy is never slower, so a lower rate is a disturbance
        d2h=machine.d2h_pageable[piece],
        dram=max(machine.dram),
        cpu_gemv=1.0,  # these four depend on the model: seen_by() sets them
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
    """The names of NVIDIA's GPUs, their driver and links; empty without NVIDIA's driver."""
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
    except pynvml.NVMLError:  # some virtual machines do not report the link
        return "unknown"
