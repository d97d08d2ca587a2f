"""llama.cpp beside the rows of ``frameshard bench``: its settings, its runs, and their part of the result.

There are two allowances. With ``process``, NVML counts no more VRAM for llama.cpp's whole process than the budget. With
``weights``, the budget is for its weights alone, as its users choose ``-ngl``; its whole process takes more.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from frameshard import errors
from frameshard.engine.observer import find_observer
from frameshard.native import EMULATED, parse_device

from . import common, upstream
from .equal_vram import Finder
from .upstream import Measured, Program, Setting, placement

if TYPE_CHECKING:
    from frameshard.engine.runtime import Runtime
    from frameshard.plan.workload import Workload

ALLOWANCES = {"process": ("process",), "weights": ("weights",), "both": ("process", "weights")}
"""The allowances that each value of ``--vs-budget`` compares with."""

MIB = 2**20


def check(args: argparse.Namespace, device: str) -> None:
    """Checks the arguments about llama.cpp.

    :raises BadArgument: they do not go together, there is no such program, or nothing counts VRAM on the device.
    """
    if args.vs_budget and not args.vs:
        raise errors.BadArgument("--vs-budget is about llama.cpp: name its program with --vs")
    if args.vs and "process" in allowances(args) and not counted(device):
        raise errors.BadArgument(
            f"no driver counts VRAM on {device}, so llama.cpp cannot be held to the budget: add --vs-budget weights"
        )
    if args.vs:
        upstream.check(args.vs)


def allowances(args: argparse.Namespace) -> tuple[str, ...]:
    return ALLOWANCES[args.vs_budget or "process"]


def counted(device: str) -> bool:
    """Whether a driver counts VRAM on a device."""
    return parse_device(device)[0] != EMULATED and find_observer().source is not None


@dataclass
class Theirs:
    """llama.cpp's runs at one budget. A setting of ``None`` says that none fits."""

    setting: Setting | None
    runs: list[Measured] = field(default_factory=list)

    def document(self, ours: dict[str, float]) -> dict[str, Any]:
        """The runs as plain values, for JSON.

        :param ours: ``ttft_s`` and ``decode_tps`` of the row.
        """
        if self.setting is None:
            return dict.fromkeys(("placement", "ttft_s", "decode_tps", "peak_nvml_mb"))
        ttft = statistics.median(each.ttft_s for each in self.runs)
        decode = statistics.median(each.decode_tps for each in self.runs)
        peak = max((each.nvml_peak or 0 for each in self.runs), default=0)
        return {
            "placement": str(self.setting),
            "ttft_s": ttft,
            "decode_tps": decode,
            "peak_nvml_mb": round(peak / MIB, 3) if peak else None,
            "ttft_ratio": ttft / ours["ttft_s"],
            "decode_ratio": ours["decode_tps"] / decode,
            "runs": {
                "ttft_s": [each.ttft_s for each in self.runs],
                "decode_tps": [each.decode_tps for each in self.runs],
            },
        }


class Comparison:
    """Runs llama.cpp on the device of a runtime, which holds only its floor meanwhile."""

    def __init__(self, runtime: Runtime, workload: Workload, args: argparse.Namespace) -> None:
        self.allowances = allowances(args)
        emulated = runtime.device_name == EMULATED
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._runtime, self._workload, self._emulated = runtime, workload, emulated
        self._program = Program(
            args.vs,
            runtime.model_info,
            ("-dev", "none" if emulated else runtime.device_name),
            args.vs_threads or (args.threads if emulated else cpus),
            find_observer if counted(runtime.device_name) else None,
        )

    def choose(self, budget_bytes: int, allowance: str) -> Theirs:
        """Chooses llama.cpp's setting at a budget.

        :raises FrameshardError: it was to be found by running it, and that failed.
        """
        if allowance == "process":
            self._yield_vram()
            return Theirs(self._finder.find(budget_bytes))
        by_size = placement(self._runtime.model_info, budget_bytes)
        return Theirs(Setting(("-ngl", "0") if self._emulated else tuple(by_size)))

    def measure(self, theirs: Theirs) -> None:
        """Runs it once more, if a setting fits."""
        if theirs.setting is not None:
            self._yield_vram()
            theirs.runs.append(self._program.run(theirs.setting, self._workload))

    def what(self, theirs: Theirs, allowance: str, budget_bytes: int) -> str:
        """The description of a run, for progress."""
        which = " for its weights" if allowance == "weights" and len(self.allowances) > 1 else ""
        fits = "" if theirs.setting else ": does not fit"
        return f"llama.cpp at {common.format_size(budget_bytes)}{which}{fits}"

    @cached_property
    def _finder(self) -> Finder:
        return Finder(self._program, self._workload)

    def _yield_vram(self) -> None:
        device = self._runtime.device
        assert device is not None
        device.set_budget(device.stats().floor_bytes, timeout_s=60.0)
