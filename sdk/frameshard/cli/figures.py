"""Draws measurements and plans with matplotlib, which the extra ``plots`` installs."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameshard import program
from frameshard.errors import BadArgument, FrameshardError

if TYPE_CHECKING:
    from frameshard.native import Span
    from frameshard.plan.plans import Plan

_FORMATS = (".svg", ".png", ".pdf")
_LANES = {"copy": ("copies", "#4477aa"), "device": ("GPU", "#228833"), "cpu": ("CPU", "#ee6677")}


def check(path: str) -> None:
    """Checks before a measurement that its picture can be written to ``path``.

    :raises BadArgument: it cannot.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise BadArgument(f"{path} is not the name of a picture: end it with {', '.join(_FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise BadArgument(f"there is no folder for {path}")
    # It is not imported here, because its libraries must not be in the process that is measured.
    if importlib.util.find_spec("matplotlib") is None:
        raise BadArgument("pictures need matplotlib: pip install 'frameshard[plots]'")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)


@dataclass(frozen=True)
class Window:
    """The executor's work between two times of ``time.perf_counter``."""

    what: str
    spans: Sequence[Span]
    start_s: float
    end_s: float

    def lane(self, name: str) -> list[tuple[float, float]]:
        """The spans of a lane, cut at the ends of the window: (start, length) in seconds, from the window's start."""
        cut = [
            (max(span.start_s, self.start_s), min(span.end_s, self.end_s)) for span in self.spans if span.lane == name
        ]
        return [(start - self.start_s, end - start) for start, end in cut if end > start]

    def summary(self) -> dict[str, Any]:
        """The window's length in seconds, and for each lane the share of time in which it is busy and its rate in that
        time, in GB/s of weights."""
        length = self.end_s - self.start_s
        lanes = {}
        for name in _LANES:
            spans = [
                span
                for span in self.spans
                if span.lane == name and self.start_s < span.end_s and span.start_s < self.end_s
            ]
            seconds = sum(span.end_s - span.start_s for span in spans)
            n_bytes = sum(span.n_bytes for span in spans)
            busy = sum(seconds for _, seconds in self.lane(name)) / length
            lanes[name] = {"busy": busy, "gbps": n_bytes / seconds / 1e9 if seconds else 0.0}
        return {"what": self.what, "seconds": length, "lanes": lanes}


def draw_apart(draw: Callable[..., None], path: str, *args: object) -> None:
    """Calls ``draw(path, *args)``, with a function of a module, in another process. In one process with llama.cpp
    some builds of matplotlib crash, because both bring a C++ runtime.

    :raises FrameshardError: nothing was drawn."""
    drawn = subprocess.run(
        program.command("frameshard.cli.figures"),
        input=pickle.dumps((draw, (path, *args))),
        stderr=subprocess.PIPE,
        check=False,
    )
    if drawn.returncode:
        lines = drawn.stderr.decode(errors="replace").strip().splitlines()
        died = drawn.returncode < 0  # its output does not explain a crash
        why = f"matplotlib ended with status {drawn.returncode}" if died or not lines else lines[-1]
        raise FrameshardError(f"{path} could not be drawn: {why}")


def draw_timeline(path: str, title: str, windows: Sequence[Window]) -> None:
    """Draws the lanes of copies, GPU and CPU with the share of time in which each is busy, in one chart per window."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(len(windows), figsize=(12, 1.9 * len(windows) + 0.6), squeeze=False)
    for axis, window in zip(axes[:, 0], windows, strict=True):
        length = (window.end_s - window.start_s) * 1e3
        labels = []
        for i, (name, lane) in enumerate(window.summary()["lanes"].items()):
            label, colour = _LANES[name]
            bars = [(start * 1e3, seconds * 1e3) for start, seconds in window.lane(name)]
            axis.broken_barh(bars, (-i - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.15)
            labels.append(f"{label} {lane['busy']:.0%}\n{lane['gbps']:.1f} GB/s")
        axis.set_yticks(range(0, -len(_LANES), -1), labels)
        axis.set_xlim(0, length)
        axis.set_ylim(-len(_LANES) + 0.5, 0.5)
        axis.set_title(f"{window.what}, {length:.1f} ms", loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("ms")
    _save(figure, path, title)


@dataclass(frozen=True)
class Point:
    """A plan's times at one budget: predicted, the bound, and with llama.cpp's static offload."""

    budget_gib: float
    ttft_s: tuple[float, float, float]
    tokens_per_second: tuple[float, float, float]

    @classmethod
    def of(cls, plan: Plan, n_prompt: int) -> Point:
        ttft = (plan.predicted_ttft(n_prompt), plan.bound_ttft(n_prompt), plan.static_ttft(n_prompt))
        rate = (plan.predicted_decode_tps(), plan.bound_decode_tps(), plan.static_decode_tps())
        return cls(plan.budget_bytes / 2**30, ttft, rate)


_TTFT, _RATE = "seconds to the first token, prompt of {}", "tokens per second, one sequence"
_LINES = (
    ("frameshard, predicted", "#4477aa", "-"),
    ("bound", "#4477aa", ":"),
    ("static offload (-ngl)", "#bb5566", "--"),
)


def draw_plans(
    path: str, title: str, sweep: Sequence[Point], marked: Sequence[Point], n_prompt: int, below: Sequence[float]
) -> None:
    """Draws TTFT and tokens per second for the budgets of ``sweep``, with their bounds and llama.cpp's static offload.

    :param sweep: points at ascending budgets; the first is at the floor, and the area below it is grey.
    :param marked: points that are drawn as dots.
    :param below: budgets below the floor, in GiB, that are drawn as lines.
    """
    pyplot = _pyplot()
    panels: list[tuple[str, Callable[[Point], tuple[float, float, float]]]] = [
        (_TTFT.format(n_prompt), lambda point: point.ttft_s),
        (_RATE, lambda point: point.tokens_per_second),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 4.6))
    for axis, (what, values) in zip(axes, panels, strict=True):
        for i, (label, colour, style) in enumerate(_LINES):
            at = [point.budget_gib for point in sweep]
            axis.plot(at, [values(point)[i] for point in sweep], style, color=colour, label=label)
        for point in marked:
            here = (point.budget_gib, values(point)[0])
            axis.plot(*here, "o", color=_LINES[0][1])
            axis.annotate(f"{here[1]:.3g}", here, (4, 5), textcoords="offset points", fontsize=8)
        floor = sweep[0].budget_gib
        axis.axvspan(0, floor, color="0.9", label="below the floor")
        for budget in below:
            axis.axvline(budget, color="0.5", linewidth=1)
        axis.set_xlim(left=max(0.0, min([floor, *below]) - 0.05 * (sweep[-1].budget_gib - floor)))
        axis.set_yscale("log")
        _plain_numbers(axis.yaxis)
        axis.set_title(what, loc="left", fontsize=10)
        axis.set_xlabel("VRAM budget, GiB")
        axis.grid(alpha=0.3, which="both")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(frameon=False)
    _save(figure, path, title)


_LABEL = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def _plain_numbers(axis: Any) -> None:
    """Labels a logarithmic axis with 1, 2 and 5 of each power of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")


@dataclass(frozen=True)
class Surface:
    """Predicted times over two budgets, in GiB: VRAM (ascending, along rows) and host memory (ascending, by row)."""

    vram_gib: Sequence[float]
    host_gib: Sequence[float]
    ttft_s: Sequence[Sequence[float]]
    tokens_per_second: Sequence[Sequence[float]]


def draw_surface(
    path: str, title: str, surface: Surface, marked: Sequence[Point], marked_host_gib: float, n_prompt: int
) -> None:
    """Draws TTFT and tokens per second over budgets of VRAM and of host memory, as colours with contour lines.

    :param marked: points that are drawn as dots, at ``marked_host_gib`` of host memory.
    """
    pyplot = _pyplot()
    from matplotlib.colors import LogNorm

    panels = [
        (_TTFT.format(n_prompt), surface.ttft_s, "viridis_r"),
        (_RATE, surface.tokens_per_second, "viridis"),
    ]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 4.6), sharey=True)
    for number, (axis, (what, values, colours)) in enumerate(zip(axes, panels, strict=True)):
        highest = max(map(max, values))
        norm = LogNorm(min(map(min, values)), highest * 1.001)
        mesh = axis.pcolormesh(surface.vram_gib, surface.host_gib, values, cmap=colours, norm=norm, shading="gouraud")
        _plain_numbers(figure.colorbar(mesh, ax=axis).ax.yaxis)
        levels = [power * digit for power in (0.001, 0.01, 0.1, 1, 10, 100, 1000) for digit in (1, 2, 5)]
        lines = axis.contour(surface.vram_gib, surface.host_gib, values, levels, colors="white", linewidths=0.8)
        axis.clabel(lines, fmt="{:g}".format, fontsize=8)
        for point in marked:
            here = (min(point.budget_gib, surface.vram_gib[-1]), marked_host_gib)
            axis.plot(*here, "o", color="white", markeredgecolor="black", clip_on=False)
            value = (point.ttft_s, point.tokens_per_second)[number][0]
            side = "right" if here[0] == surface.vram_gib[-1] else "center"
            axis.annotate(f"{value:.3g}", here, (0, 8), textcoords="offset points", ha=side, fontsize=8, bbox=_LABEL)
        axis.set_title(what, loc="left", fontsize=10)
        axis.set_xlabel("VRAM budget, GiB")
    axes[0].set_ylabel("host memory for weights, GiB")
    _save(figure, path, title)


def _draw_from_stdin() -> None:
    """Runs in the process that :func:`draw_apart` starts. Reads a function and its arguments, pickled."""
    draw, args = pickle.load(sys.stdin.buffer)
    draw(*args)


if __name__ == "__main__":
    _draw_from_stdin()
