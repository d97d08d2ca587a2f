"""``frameshard plan``: what fits into a budget and how fast it will run, without loading the model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import common

if TYPE_CHECKING:
    from frameshard.plan.planner import Plan

_MiB = 1 << 20
_POINTS = 40  # budgets in a plot
_COLUMNS = ("budget", "resident", "streamed", "cpu", "ring", "TTFT s", "bound", "tok/s", "bound")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what fits into a VRAM budget and how fast it would run, without loading anything",
        description="For each budget: how many MiB of weights are resident, streamed and computed on the CPU while "
        "decoding, and the predicted time to the first token and decode rate beside their bounds. Of a mixture of "
        "experts those are taken to be chosen that were when the model last ran here.",
    )
    common.add_model_args(parser)
    common.add_context_args(parser)
    parser.add_argument(
        "--vram-budget", required=True, metavar="A,B,...", help="budgets in MiB or with a unit; also: floor, full"
    )
    parser.add_argument("--prompt", type=common.positive, default=512, metavar="N", help="tokens of prompt (512)")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw both over all budgets, with bounds and llama.cpp's static offload (.svg, .png, .pdf)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME|FILE",
        help="plan for the machine of this profile, measuring nothing: a file, or a name of those that come with "
        "frameshard, such as laptop-rtx-4060-8gb (an unknown name lists them)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.profile:
        import frameshard.engine  # noqa: F401 - llama.cpp before numpy

    from frameshard import models
    from frameshard.cli import figures
    from frameshard.cli.profile import measure
    from frameshard.plan import machine, planner, routing
    from frameshard.plan.model import read_model

    if args.plot:
        figures.check(args.plot)
    words = [word.strip() for word in args.vram_budget.split(",")]
    budgets = [None if word in ("floor", "full") else common.parse_size(word) for word in words]
    model = read_model(models.resolve(args.model))
    planner.check_kv_type(model, args.kv_type)
    profile = machine.load(args.profile).seen_by(model) if args.profile else measure(args, model)
    device = str(profile.fingerprint.get("device", ""))
    overhead = 0 if device == "emulated" else planner.DRIVER_BYTES
    shares = routing.recall(model)
    if not args.ubatch:
        args.ubatch = planner.choose_ubatch(
            model,
            profile,
            common.sizes_of(args.vram_budget),
            n_ctx=args.ctx,
            n_prompt=args.prompt,
            n_seq=args.parallel,
            kv_type=args.kv_type,
            overhead_bytes=overhead,
            routing=shares,
        )
    unit = planner.vram_unit(device)
    fixed = planner.estimate_fixed(
        model,
        args.ctx,
        args.ubatch,
        args.parallel,
        kv_type=args.kv_type,
        overhead_bytes=overhead,
        unit_bytes=unit,
    )
    n_used = min(args.prompt, args.ctx)
    context = planner.estimate_context(model, args.ctx, n_used, args.parallel, kv_type=args.kv_type, unit_bytes=unit)

    def plan(budget_bytes: int) -> Plan:
        return planner.make_plan(
            model,
            profile,
            budget_bytes=budget_bytes,
            fixed_bytes=fixed,
            context=context,
            n_ctx_used=n_used,
            n_ubatch=args.ubatch,
            routing=shares,
        )

    full = plan(0)
    floors = {"floor": full.floor_bytes, "full": full.full_bytes}
    plans = [plan(floors[word] if size is None else size) for word, size in zip(words, budgets, strict=True)]
    where = str(profile.fingerprint.get("gpus", device))
    if profile.sources and not profile.products:
        where += ", by its spec sheet (not measured)"
    if args.plot:
        step = max(1, (full.full_bytes - full.floor_bytes) // _POINTS)
        sweep = [plan(budget) for budget in range(full.floor_bytes, full.full_bytes, step)] + [full]
        points = [[figures.Point.of(each, args.prompt) for each in some] for some in (sweep, plans)]
        figures.draw_apart(figures.draw_plans, args.plot, f"{model.path.name} on {where}", *points, args.prompt)
    if args.json:
        rows = [{"budget_mb": plan.budget_bytes / _MiB, **plan.summary(args.prompt)} for plan in plans]
        document = {"model": str(model.path), "device": device, "ubatch": args.ubatch, "profile": profile.to_dict()}
        document["rows"] = rows
        common.emit_json(document)
        return 0
    print(
        f"{model.path.name}: {model.arch}, {model.n_layer} layers, {model.file_bytes // _MiB} MiB; on {where}\n"
        f"floor {-(-full.floor_bytes // _MiB)} MiB, everything resident from {-(-full.full_bytes // _MiB)} MiB "
        f"({fixed // _MiB} MiB of it for buffers and {context.whole // _MiB} MiB for a full context of {args.ctx} "
        f"tokens, estimated; {context.used // _MiB} MiB for {n_used} of them), "
        f"prompts by {args.ubatch} tokens"
    )
    print("".join(f"{column:>10}" for column in _COLUMNS))
    for plan_ in plans:
        print(_row(plan_, args.prompt))
    if args.plot:
        print(f"drawn in {args.plot}")
    return 0


def _row(plan: Plan, n_prompt: int) -> str:
    decode = plan.tiers[0]
    sizes = (plan.budget_bytes, decode.resident_bytes, decode.streamed_bytes, decode.cpu_bytes, plan.ring_bytes)
    times = (plan.predicted_ttft(n_prompt), plan.bound_ttft(n_prompt))
    rates = (plan.predicted_decode_tps(), plan.bound_decode_tps())
    cells = [f"{size / _MiB:.0f}" for size in sizes] + [f"{t:.3f}" for t in times] + [f"{r:.1f}" for r in rates]
    return "".join(f"{cell:>10}" for cell in cells)
