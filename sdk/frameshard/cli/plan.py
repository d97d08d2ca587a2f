"""``frameshard plan``: predicts placements and times at several budgets, without loading the model.

The size of llama.cpp's buffers, and so the floor, is an estimate. It is at least as large as the floor of a launch,
except for architectures with tensors of their own (``memory.NOT_ESTIMATED``) and for a launch that reads images. A
budget below the floor is marked in the table; if all budgets are below it, that is an error.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from . import common, figures, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frameshard.plan.model import Model
    from frameshard.plan.plans import Plan
    from frameshard.plan.profile import Profile

_MiB = 1 << 20
_POINTS = 40  # budgets in a plot
_SURFACE = 20, 12  # budgets of VRAM and of host memory in a plot of both
_COLUMNS = ("budget", "resident", "streamed", "cpu", "disk", "ring", "TTFT s", "bound", "tok/s", "bound")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what fits into a VRAM budget and how fast it would run, without loading anything",
        description="For each budget: how many MiB of weights are resident, streamed and computed on the CPU while "
        "decoding, how many of them are read from disk, and the predicted time to the first token and decode rate "
        "beside their bounds. For a mixture of experts, the prediction assumes that experts are chosen as often as "
        "when the model last ran here. A budget below the floor is listed as such; exit status 2 if all are.",
    )
    common.add_model_args(parser)
    common.add_context_args(parser)
    parser.add_argument(
        "--vram-budget", required=True, metavar="A,B,...", help="budgets in MiB or with a unit; also: floor, full"
    )
    common.add_adapter_arg(parser)
    parser.add_argument(
        "--host-budget",
        type=common.size,
        default=0,
        metavar="SIZE",
        help="host memory for weights in MiB or with a unit (no limit); what does not fit is read from disk. The limit "
        "of a launch is for all that its processes hold, so it must be larger",
    )
    parser.add_argument("--prompt", type=common.positive, default=512, metavar="N", help="tokens of prompt (512)")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw both over all budgets, with bounds and llama.cpp's static offload; with --host-budget, over all "
        "budgets of VRAM and of host memory (.svg, .png, .pdf)",
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
    from frameshard.errors import BadArgument
    from frameshard.plan.model import read_model

    if args.plot:
        figures.check(args.plot)
    if args.prompt > args.ctx:
        raise BadArgument(
            f"a prompt of {args.prompt} tokens needs a larger context than {args.ctx}: add --ctx {args.prompt + 512}"
        )
    _check_launch(args)
    words = [word.strip() for word in args.vram_budget.split(",")]
    for size in (word for word in words if word not in ("floor", "full")):
        common.parse_size(size)  # report a typing error before measuring
    model = read_model(models.resolve(args.model))
    forecast = _Forecast(args, model, _profile(args, model))
    named = {"floor": forecast.full.floor_bytes, "full": forecast.full.full_bytes}
    budgets = [named[word] if word in named else common.parse_size(word) for word in words]
    plans = [forecast.at(budget) for budget in budgets]
    if not any(plans):
        forecast.refuse(max(budgets))
    if args.plot:
        forecast.plot(args.plot, budgets)
    if args.json:
        common.emit_json(forecast.document(budgets, plans))
        return 0
    print(forecast.heading())
    shown = [plan.budget_bytes if plan else budget for budget, plan in zip(budgets, plans, strict=True)]
    rows = [[f"{budget / _MiB:.0f}", *_cells(plan, args.prompt)] for budget, plan in zip(shown, plans, strict=True)]
    lines = common.table([_COLUMNS, *rows]).splitlines()
    below = f"  below the floor of about {common.format_size(forecast.full.floor_bytes)}"
    width = max(len(row[0]) for row in [_COLUMNS, *rows])
    for line, plan in zip(lines, [forecast.full, *plans], strict=True):
        print(line if plan else line[:width] + below)
    if args.plot:
        print(f"drawn in {args.plot}")
    return 0


def _check_launch(args: argparse.Namespace) -> None:
    """Checks that a launch would take the options.

    :raises BadArgument: it would not.
    """
    from frameshard.wire.launch import EngineOptions

    EngineOptions(
        args.model,
        device=args.device,
        n_ctx=args.ctx,
        n_ubatch=args.ubatch,
        n_parallel=args.parallel,
        n_threads=args.threads,
        kv_type=args.kv_type,
        adapters=tuple(args.adapter),
        host_budget_bytes=args.host_budget,
    )


def _profile(args: argparse.Namespace, model: Model) -> Profile:
    from frameshard.cli.profile import measure
    from frameshard.plan.profile import load

    if args.profile:
        return load(args.profile).seen_by(model)
    with progress.steps(1):
        return measure(args, model)


class _Forecast:
    """The plans of one model on one machine, with the options of the command line."""

    def __init__(self, args: argparse.Namespace, model: Model, profile: Profile) -> None:
        from frameshard import native
        from frameshard.plan import corrections, memory, plans, routing
        from frameshard.plan.adapter import read_adapter, vram_bytes
        from frameshard.plan.layout import lay_out
        from frameshard.plan.workload import Workload
        from frameshard.wire.launch import adapter_of

        memory.check_kv_type(model, args.kv_type)
        memory.check_context(model, args.ctx)
        memory.check_sequences(model, args.parallel)
        self.model, self.profile, self.n_prompt, self.n_ctx = model, profile, args.prompt, args.ctx
        self.device, self.host_budget = profile.device, args.host_budget
        self.where = str(profile.fingerprint.get("gpus", self.device))
        if profile.sources and not profile.products:
            self.where += ", by its spec sheet (not measured)"
        overhead = 0 if self.device == native.EMULATED else memory.DRIVER_BYTES
        files = [read_adapter(path, model) for _, path in map(adapter_of, args.adapter)]
        workload = Workload(
            args.ctx,
            args.prompt,
            n_parallel=args.parallel,
            n_ubatch=args.ubatch,
            kv_type=args.kv_type,
            host_budget_bytes=args.host_budget,
        )
        steps = memory.estimate_steps(model, self.device, workload)
        unit_bytes = lay_out(model, self.device).sizes.unit_bytes
        fixed = memory.fixed_vram(model, self.device, overhead) + vram_bytes(files, steps.sizes[0][0], unit_bytes)
        self.buffers = fixed + steps.floor_bytes
        self.context = memory.estimate_context(model, self.device, workload)
        self._corrections = corrections.NONE if args.profile else corrections.load(model, profile, "planned")
        self._plan = partial(
            plans.make_plan,
            model,
            profile,
            fixed_bytes=fixed,
            host_budget_bytes=args.host_budget,
            steps=steps,
            context=self.context,
            n_ctx_used=args.prompt,
            n_ubatch=args.ubatch,
            routing=routing.recall(model),
            corrections=self._corrections,
        )
        self.full = self._plan(budget_bytes=0)

    def at(self, budget_bytes: int) -> Plan | None:
        """The plan at a budget (0 for no limit); ``None`` below the floor."""
        return None if 0 < budget_bytes < self.full.floor_bytes else self._plan(budget_bytes=budget_bytes)

    def refuse(self, budget_bytes: int) -> None:
        """Raises the error for a budget below the floor.

        :raises BudgetBelowFloor: always, for such a budget.
        """
        self._plan(budget_bytes=budget_bytes)

    def plot(self, path: str, budgets: Sequence[int]) -> None:
        title = f"{self.model.path.name} on {self.where}"
        marked = [figures.Point.of(plan, self.n_prompt) for plan in map(self.at, budgets) if plan]
        if self.host_budget:
            host_gib = self.host_budget / 2**30
            figures.draw_apart(figures.draw_surface, path, title, self._surface(), marked, host_gib, self.n_prompt)
            return
        floor, full = self.full.floor_bytes, self.full.full_bytes
        step = max(1, (full - floor) // _POINTS)
        plans = [self._plan(budget_bytes=budget) for budget in range(floor, full, step)] + [self.full]
        sweep = [figures.Point.of(plan, self.n_prompt) for plan in plans]
        below = [budget / 2**30 for budget in budgets if self.at(budget) is None]
        figures.draw_apart(figures.draw_plans, path, title, sweep, marked, self.n_prompt, below)

    def _surface(self) -> figures.Surface:
        """From both floors to where everything is resident, and to where the whole file is in host memory."""
        import numpy as np

        from frameshard.plan.host import host_floor
        from frameshard.plan.layout import lay_out

        least = host_floor(lay_out(self.model, self.device), self.device)
        columns, rows = _SURFACE
        vram = np.linspace(self.full.floor_bytes, self.full.full_bytes, columns).astype(int).tolist()
        host = np.linspace(least, max(self.model.file_bytes, least), rows).astype(int).tolist()
        ttft, rate = [], []
        with progress.steps(rows) as steps:
            for host_bytes in host:
                steps.next(f"planning with {common.format_size(host_bytes)} of host memory")
                plans = [self._plan(budget_bytes=budget, host_budget_bytes=host_bytes) for budget in vram]
                ttft.append([plan.predicted_ttft(self.n_prompt) for plan in plans])
                rate.append([plan.predicted_decode_tps() for plan in plans])
        return figures.Surface([n / 2**30 for n in vram], [n / 2**30 for n in host], ttft, rate)

    def document(self, budgets: Sequence[int], plans: Sequence[Plan | None]) -> dict[str, object]:
        """The document for ``--json``. The floor and all figures that depend on it are estimates."""
        bounds = {"floor_bytes": self.full.floor_bytes, "full_bytes": self.full.full_bytes}
        rows = [
            {
                "budget_mb": (plan.budget_bytes if plan else budget) / _MiB,
                "fits": plan is not None,
                **(plan.summary(self.n_prompt) if plan else {"budget_bytes": budget, **bounds}),
            }
            for budget, plan in zip(budgets, plans, strict=True)
        ]
        return {
            "model": str(self.model.path),
            "device": self.device,
            "profile": self.profile.to_dict(),
            **bounds,
            "rows": rows,
        }

    def _launched(self) -> str:
        """How the figures of a launch differ from the estimates."""
        from frameshard.plan.memory import NOT_ESTIMATED

        if self.model.arch in NOT_ESTIMATED:
            return f"which are larger for {self.model.arch}, as it has tensors of its own"
        return "which are no larger unless it reads images"

    def heading(self) -> str:
        model, full = self.model, self.full
        title = f"{model.path.name}: {model.arch}, {model.n_layer} layers, {common.format_size(model.file_bytes)}"
        bounds = (
            f"floor about {common.format_size(full.floor_bytes)}, everything resident from about "
            f"{common.format_size(full.full_bytes)} ({common.format_size(self.buffers)} of it for buffers and "
            f"{common.format_size(self.context.whole)} for a full context of {self.n_ctx} tokens for each job; "
            f"{common.format_size(self.context.used)} for {self.n_prompt} of them). "
            f"Estimated without loading: a launch says the exact figures, {self._launched()}."
        )
        if self._corrections.seen or self._corrections.cpu_factor != 1.0:
            bounds += " Times are corrected by what this model took here while it served."
        return f"{common.wrapped(f'{title}; on {self.where}')}\n{common.wrapped(bounds)}"


def _cells(plan: Plan | None, n_prompt: int) -> list[str]:
    """The cells of a row, without the budget."""
    if plan is None:
        return [""] * (len(_COLUMNS) - 1)
    decode = plan.tiers[0]
    sizes = (decode.resident_bytes, decode.streamed_bytes, decode.cpu_bytes, plan.disk_bytes, plan.ring_bytes)
    times = (plan.predicted_ttft(n_prompt), plan.bound_ttft(n_prompt))
    rates = (plan.predicted_decode_tps(), plan.bound_decode_tps())
    return [f"{size / _MiB:.0f}" for size in sizes] + [f"{value:.4g}" for value in times + rates]
