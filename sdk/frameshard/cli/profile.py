"""``frameshard profile``: measures the machine's profile, which plans are made from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from . import common, progress

if TYPE_CHECKING:
    from frameshard.plan.model import Model
    from frameshard.plan.profile import Profile


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's rates, which plans are made from",
        description="Measures copies, memory, and products and attention of the model's shapes in a few seconds, and "
        "keeps the result for this machine, device and disk. What is kept already is not measured again.",
    )
    common.add_model_args(parser)
    parser.add_argument("--refresh", action="store_true", help="measure again what is kept")
    parser.add_argument("--seconds", type=common.rate, default=5.0, metavar="S", help="how long to measure (5)")
    parser.add_argument("--output", metavar="FILE", help="write the profile to this file too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import frameshard.engine  # noqa: F401 - llama.cpp before numpy
    from frameshard import models
    from frameshard.engine import probe
    from frameshard.errors import BadArgument
    from frameshard.plan.model import read_model
    from frameshard.plan.profile import save

    model = read_model(models.resolve(args.model))
    with progress.steps(1):
        profile = measure(args, model, refresh=args.refresh, seconds=args.seconds)
    if args.output:
        try:
            save(profile, args.output)
        except OSError as error:
            raise BadArgument(f"cannot write {args.output}: {error.strerror}", path=args.output) from error
    path = probe.cached_path(profile.fingerprint)
    if args.json:
        common.emit_json({"path": str(path), **profile.to_dict()})
        return 0
    print(table(profile))
    if os.path.isfile(path):  # not where the cache cannot be written, or read
        print(f"kept in {path}")
    return 0


def table(profile: Profile) -> str:
    """A profile as a table."""
    from frameshard.plan.profile import BYTES_PER_WEIGHT, parse_kind

    lines = common.wrapped(", ".join(f"{key}: {value}" for key, value in profile.fingerprint.items())).splitlines()
    if profile.sources:
        lines.append("not measured on this machine:")
        shown = {name: f" {value:.4g}" for name, value in vars(profile).items() if isinstance(value, float)}
        lines += [f"  {name}{shown.get(name, '')}: {source}" for name, source in profile.sources.items()]
    for columns, unit in ((profile.copies, 2.0**20), (profile.host_memory, 1.0)):
        for (name, values), first in zip(columns.items(), [True] + [False] * len(columns), strict=False):
            cells = _cells(value / (unit if first else 1e9) for value in values)
            label = {"piece_bytes": "copies, GB/s, in pieces of MiB", "threads": "host memory, GB/s, by threads"}
            lines.append(f"{label.get(name, '  ' + name.replace('_', ' ')):32}{cells}")
    if profile.disk:
        sizes, rates = profile.disk["read_bytes"], profile.disk["rate"]
        lines.append(f"{'disk, GB/s, in reads of MiB':32}" + _cells(size / 2**20 for size in sizes))
        lines.append(f"{'  read':32}" + _cells(rate / 1e9 for rate in rates))
    for name, product in profile.products.items():
        gemv = BYTES_PER_WEIGHT[parse_kind(name).type_name] / 2e9
        lines += [
            f"{name + ', tokens at once':32}" + _cells(product.tokens),
            f"{'  CPU, TFLOP/s':32}" + _cells(rate / 1e12 for rate in product.cpu_flops),
            f"{'  device, TFLOP/s':32}" + _cells(rate / 1e12 for rate in product.gpu_flops),
            f"  one token, GB/s: CPU {product.cpu_flops[0] * gemv:.1f}, beside copies "
            f"{product.cpu_beside_copies / 1e9:.1f} (copies {product.h2d_beside_cpu / 1e9:.1f}), "
            f"device {product.gpu_flops[0] * gemv:.1f}",
        ]
    for name, attention in profile.attention.items():
        lines += [
            f"{'attention ' + name + ', cells':32}" + _cells(attention.cells),
            f"{'  one token, GB/s of KV':32}" + _cells(rate / 1e9 for rate in attention.kv_bytes),
            f"{'  prompt, TFLOP/s':32}" + _cells(rate / 1e12 for rate in attention.flops),
        ]
    lines.append(f"{'hand-off to the CPU and back, us':32}{profile.handoff_s * 1e6:10.4g}")
    return "\n".join(lines)


def _cells(values: Iterable[float]) -> str:
    """The figures of a row, aligned to the right. With many figures the columns are narrower."""
    figures = [f"{value:.4g}" for value in values]
    width = min(10, (common.WIDTH - 32) // max(len(figures), 1))
    return "".join(f"{figure:>{width}}" for figure in figures)


def measure(args: argparse.Namespace, model: Model, *, refresh: bool = False, seconds: float = 5.0) -> Profile:
    """The profile for ``--device``, with the rates of the model's disk. What is not kept is measured, and all if
    ``refresh`` is true.

    :param seconds: time in seconds for all measurements together.
    """
    from frameshard import native
    from frameshard.engine import diskprobe, gpus, llamalog
    from frameshard.engine.probe import Measurements
    from frameshard.errors import BadArgument

    llamalog.install()
    inner = args.device
    if inner == "cpu":
        raise BadArgument("on the CPU alone there is nothing to place: name a GPU, or --device emulated")
    if inner == "auto":
        inner = gpus.resolve(inner).device
        inner = native.EMULATED if inner == "cpu" else inner
    device = native.ShardDevice(inner, vram_budget_bytes=0, n_threads=args.threads)
    measurements = Measurements(
        device, model, device_name=inner, n_threads=args.threads, refresh=refresh, seconds=seconds
    )
    profile = measurements.run()
    of_disk = {} if refresh else diskprobe.recall(model.path, inner)
    if not of_disk:
        of_disk = diskprobe.measure_model(model.path, inner)
        diskprobe.keep(model.path, inner, of_disk)
    return replace(profile, disk=of_disk)
