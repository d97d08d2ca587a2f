"""``frameshard profile``: measures what plans are made from."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from . import common

if TYPE_CHECKING:
    from frameshard.plan.machine import Profile
    from frameshard.plan.model import Model

_ROWS = (
    ("copies to the device", "h2d", 1e9, "GB/s"),
    ("copies from the device", "d2h", 1e9, "GB/s"),
    ("host memory, read", "dram", 1e9, "GB/s"),
    ("weights of one token, CPU", "cpu_gemv", 1e9, "GB/s"),
    ("weights of one token, device", "gpu_gemv", 1e9, "GB/s"),
    ("products for a prompt, CPU", "cpu_flops", 1e12, "TFLOP/s"),
    ("products for a prompt, device", "gpu_flops", 1e12, "TFLOP/s"),
    ("hand-off to the CPU and back", "handoff_s", 1e-6, "us"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's rates, which plans are made from",
        description="Measures copies, memory and matrix products of the model's shape in a few seconds, and keeps the "
        "result for this machine and device.",
    )
    common.add_model_args(parser)
    parser.add_argument("--seconds", type=common.rate, default=5.0, metavar="S", help="how long to measure (5)")
    parser.add_argument("--output", metavar="FILE", help="write the profile to this file too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from frameshard import models
    from frameshard.plan import machine
    from frameshard.plan.model import read_model

    profile = measure(args, read_model(models.resolve(args.model)), refresh=True, seconds=args.seconds)
    if args.output:
        machine.save(profile, args.output)
    path = machine.cached_path(profile.fingerprint)
    if args.json:
        common.emit_json({"path": str(path), **profile.to_dict()})
        return 0
    print(table(profile))
    print(f"kept in {path}")
    return 0


def table(profile: Profile) -> str:
    """A profile for people."""
    lines = [", ".join(f"{key}: {value}" for key, value in profile.fingerprint.items())]
    lines += [f"{label:30}{getattr(profile, name) / unit:10.2f} {unit_name}" for label, name, unit, unit_name in _ROWS]
    return "\n".join(lines)


def measure(args: argparse.Namespace, model: Model, *, refresh: bool = False, seconds: float = 5.0) -> Profile:
    """The profile for ``--device``, measured unless one is kept and ``refresh`` is false."""
    from frameshard import native
    from frameshard.errors import BadArgument
    from frameshard.plan.machine import load_or_probe

    inner = args.device
    if inner == "cpu":
        raise BadArgument("on the CPU alone there is nothing to place: name a GPU, or --device emulated")
    if inner == "auto":
        inner = next(iter(native.gpu_devices()), "emulated")
        print(f"device auto: using {inner}", file=sys.stderr)
    link_gbps = args.link_gbps or 0.0
    device = native.ShardDevice(inner, budget_bytes=0, n_threads=args.threads, link_gbps=link_gbps)
    return load_or_probe(
        device,
        model,
        inner=inner,
        n_threads=args.threads,
        link_gbps=link_gbps,
        refresh=refresh,
        seconds=seconds,
    )
