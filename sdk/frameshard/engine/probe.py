"""Measures the machine with the shard device, and keeps the resulting profile.

A profile belongs to a fingerprint: the processor, the thread count, the device, its driver and its link, how weights
are copied to it where their memory could not be registered with the driver, and the version of the measurements. The
measurement takes a few seconds. The profile is kept in frameshard's cache directory until the fingerprint changes.
Some rates depend on the model: products with its kinds of weights, and attention with its heads. These are measured
when a model first needs them, and added to the profile. Rates are per second.

A launch does not wait for that: it plans from an estimate, and :mod:`frameshard.engine.idle` measures later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from frameshard import cpu
from frameshard.errors import BadArgument
from frameshard.native import EMULATED, HostPath, MachineRates, ShardDevice, parse_device
from frameshard.plan import kept
from frameshard.plan.header import GGML_NUMBERS
from frameshard.plan.model import Model
from frameshard.plan.profile import (
    BYTES_PER_WEIGHT,
    KERNEL_S,
    Attention,
    Kind,
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

_PROBES = 6  # the version of what is measured and how: profiles of another version are measured again
_COPY_BYTES = 16 << 20  # size of one copy; the shard device's default
# This matrix is so large, and its type so simple to compute, that a product with one column runs at the full rate of
# the device's memory.
_MEMORY_KIND = Kind("F16", 8192, 8192)
_CELLS = (1024, 8192)  # context lengths at which attention is measured
_USUAL_HANDOFF_S = 30e-6


def fingerprint(device: str, n_threads: int) -> dict[str, str | int | float]:
    """The properties of machine and device that a profile is valid for.

    :param device: the device's name, as for :func:`frameshard.native.parse_device`.
    :param n_threads: threads of the CPU part.
    """
    name, link_gbps, _ = parse_device(device)
    out: dict[str, str | int | float] = {
        "cpu": cpu.name(),
        "cores": os.cpu_count() or 1,
        "threads": n_threads,
        "device": name,
        "probes": _PROBES,
    }
    if name == EMULATED:
        out["link_gbps"] = link_gbps
    else:
        out |= gpu_names()
    return out


def cached_path(key: Mapping[str, str | int | float]) -> Path:
    """The path of the kept profile with the fingerprint ``key``."""
    return kept.path_of(dict(key))


class Measurements:
    """The measurements of one machine, device and model, one after the other. Those that the kept profile has are not
    made again.

    :param refresh: make all of them again.
    :param seconds: time in seconds for all measurements together.
    :raises BadArgument: the model has no matrices.
    """

    def __init__(
        self,
        device: ShardDevice,
        model: Model,
        *,
        device_name: str,
        n_threads: int,
        kv_type: KvType = "f16",
        refresh: bool = False,
        seconds: float = 5.0,
    ) -> None:
        self._device, self._model, self._kv_type, self._seconds = device, model, kv_type, seconds
        self._key = fingerprint(device_name, n_threads)
        path = device.stats().host_weights
        if path in (
            HostPath.IMPORTED,
            HostPath.STAGED,
        ):  # otherwise copies are as fast as the device and its link allow
            self._key["weights"] = path.name.lower()
        self._kinds = kinds_of(model)
        if not self._kinds:
            raise BadArgument(f"{model.path.name} has no matrices to measure with")
        self._kept = None if refresh else _kept(self._key)
        self._machine: MachineRates | None = None
        self._products: dict[str, Product] = {}
        self._attention: dict[str, Attention] = {}
        self._steps = self._missing()
        self._told = False

    def run(self) -> Profile:
        """Makes all measurements at once and returns the profile.

        :raises OutOfMemory: the budget has no room for them.
        """
        if not self.complete:
            name = self._model.path.name
            logger.info("measuring this machine for %s, about %.0f s; the result is kept", name, self._seconds)
        while not self.complete:
            self.step()
        return self.profile()

    @property
    def complete(self) -> bool:
        """No measurement is left; :meth:`profile` has all rates."""
        return not self._steps

    def step(self) -> None:
        """Makes the next measurement, which takes about a second, and keeps what is measured so far.

        :raises OutOfMemory: the budget has no room for it.
        :raises ProbeStopped: it was stopped; the next call makes it again.
        """
        self._steps[0]()
        del self._steps[0]
        if not self._kept and not self._products:
            return  # the rates of copies and memory alone are not a profile
        path = cached_path(self._key)
        try:
            save(self.profile(), path)
        except OSError as error:  # a read-only cache: the next start measures again
            if not self._told:
                logger.warning("the profile is not kept: %s", error)
            self._told = True
        else:
            if self.complete:
                logger.info("the profile of this machine is kept in %s", path)

    def estimate(self) -> Profile:
        """A profile for plans until all measurements were made: the kept one, in which rates for this model are
        missing, or a quick look.

        :raises OutOfMemory: the budget has no room for the look.
        """
        if self._kept is not None:
            return self._kept.seen_by(self._model)
        kind = self._kinds[0]
        look = self._device.look(GGML_NUMBERS[kind.type_name], kind.rows, kind.cols)
        product = Product(look.tokens, look.cpu_flops, look.gpu_flops, 0.0, 0.0)
        source = "a quick look at the launch"
        return Profile(
            fingerprint=self._key,
            h2d=look.h2d,
            d2h=look.h2d,
            dram=product.cpu_flops[0] * BYTES_PER_WEIGHT[kind.type_name] / 2,
            cpu_gemv=1.0,  # these four depend on the model: seen_by() sets them
            gpu_gemv=1.0,
            cpu_flops=1.0,
            gpu_flops=1.0,
            handoff_s=_USUAL_HANDOFF_S,
            products={kind_name(kind): product},
            sources=dict.fromkeys(("h2d", "d2h", "dram", "handoff_s"), source),
        ).seen_by(self._model)

    def profile(self) -> Profile:
        """The profile with all that is measured so far; complete when :attr:`complete`."""
        known = self._kept or self._of_the_machine()
        return dataclasses.replace(
            known, products={**known.products, **self._products}, attention={**known.attention, **self._attention}
        ).seen_by(self._model)

    def _missing(self) -> list[Callable[[], None]]:
        """The measurements to make."""
        steps: list[Callable[[], None]] = []
        if self._kept is None:
            steps.append(self._probe_machine)
        kinds = list(dict.fromkeys([*self._kinds, _MEMORY_KIND]))
        known = self._kept.products if self._kept else {}
        seconds = 0.5 * self._seconds / len(kinds)
        steps += [partial(self._probe_product, kind, seconds) for kind in kinds if kind_name(kind) not in known]
        heads = heads_of(self._model)
        known_heads = self._kept.attention if self._kept else {}
        if all(heads) and heads[1] % heads[2] == 0 and heads_name(heads, self._kv_type) not in known_heads:
            steps.append(self._probe_attention)
        return steps

    def _probe_machine(self) -> None:
        self._machine = self._device.probe_machine(0.4 * self._seconds)

    def _probe_product(self, kind: Kind, seconds: float) -> None:
        rates = self._device.probe_product(
            GGML_NUMBERS[kind.type_name], kind.rows, kind.cols, seconds, n_expert=kind.n_expert, n_used=kind.n_used
        )
        # In a small budget there is no room for the largest products. Their rates are 0.
        found = [i for i in range(len(rates.tokens)) if min(rates.cpu_flops[i], rates.gpu_flops[i]) > 0]
        self._products[kind_name(kind)] = Product(
            tuple(rates.tokens[i] for i in found),
            tuple(rates.cpu_flops[i] for i in found),
            tuple(rates.gpu_flops[i] for i in found),
            rates.cpu_beside_copies,
            rates.h2d_beside_cpu,
        )

    def _probe_attention(self) -> None:
        heads, number = heads_of(self._model), GGML_NUMBERS[self._kv_type.upper()]
        seconds = 0.1 * self._seconds / len(_CELLS)
        each = {n: self._device.probe_attention(*heads, number, n, seconds) for n in _CELLS}
        each = {n: rates for n, rates in each.items() if min(rates.kv_bytes, rates.flops) > 0}
        if each:
            self._attention[heads_name(heads, self._kv_type)] = Attention(
                tuple(each),
                tuple(rates.kv_bytes for rates in each.values()),
                tuple(rates.flops for rates in each.values()),
            )

    def _of_the_machine(self) -> Profile:
        """The rates that do not depend on the model, as a profile."""
        machine = self._machine
        assert machine is not None
        piece = machine.piece_bytes.index(_COPY_BYTES)
        values = dataclasses.asdict(machine)
        return Profile(
            fingerprint=self._key,
            h2d=max(machine.h2d[: piece + 1]),  # a larger copy is never slower: a lower rate is a disturbance
            d2h=machine.d2h_pageable[piece],
            dram=max(machine.dram),
            cpu_gemv=1.0,  # these four depend on the model: seen_by() sets them
            gpu_gemv=1.0,
            cpu_flops=1.0,
            gpu_flops=1.0,
            handoff_s=machine.handoff_s,
            kernel_s=machine.kernel_s or KERNEL_S,
            h2d_pageable=machine.h2d_pageable[piece],
            copies={name: list(values[name]) for name in values if name.startswith(("piece", "h2d", "d2h"))},
            host_memory={name: list(values[name]) for name in ("threads", "dram", "dram_beside_copies")},
        )


def _kept(key: Mapping[str, str | int | float]) -> Profile | None:
    """The kept profile with this fingerprint; None if there is none, it cannot be read, or another version has written
    it."""
    with contextlib.suppress(BadArgument):
        profile = load(cached_path(key))
        return profile if dict(profile.fingerprint) == key else None
    return None


def gpu_names() -> dict[str, str | int | float]:
    """The names of NVIDIA's GPUs, their driver and links; empty without NVIDIA's driver."""
    import pynvml  # here, because it takes 30 ms, which launches without such a GPU need not wait

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return {
            "gpus": ", ".join(str(pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus),
            "links": ", ".join(_link(pynvml, gpu) for gpu in gpus),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        }
    finally:
        pynvml.nvmlShutdown()


def _link(nvml: Any, gpu: Any) -> str:
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)
        return f"PCIe {generation} x{nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)}"
    except nvml.NVMLError:  # some virtual machines do not report the link
        return "unknown"
