"""Draws recordings in one picture: for each VRAM and host memory with their leases, tokens per second, frame times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from frameshard.simulation.player import MIB, Recording

COLUMNS = 3
"""The number of recordings in one row of the picture."""

INK, ASKED, HELD, RESIDENT, TOKENS, FRAMES = "#30343b", "#b5438b", "#2a7f9e", "#5aa469", "#d08c1f", "#6a5acd"


def draw(path: str, recordings: Sequence[Recording]) -> None:
    """Writes the picture. The suffix of `path` decides the format.

    :raises OSError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [recordings[i : i + COLUMNS] for i in range(0, len(recordings), COLUMNS)]
    figure = Figure(figsize=(1.0 + 3.6 * len(rows[0]), 6.6 * len(rows)), dpi=110, layout="constrained")
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        grid = _draw_row(part, row)
    lines = grid[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_row(figure: Any, recordings: Sequence[Recording]) -> Any:
    ratios = (3, 1.6, 1.3, 1.3)
    grid = figure.subplots(4, len(recordings), squeeze=False, sharex="col", sharey="row", height_ratios=ratios)
    for column, recording in enumerate(recordings):
        _vram(grid[0][column], recording)
        _host(grid[1][column], recording)
        _tokens(grid[2][column], recording)
        _frames(grid[3][column], recording)
    for row, label in enumerate(("VRAM, MiB", "host, MiB", "tokens/s", "frame, ms")):
        grid[row][0].set_ylabel(label)
    for axes in grid.flat:
        axes.tick_params(labelsize=8, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    return grid


def _to_the_end(recording: Recording, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The times of the changes of the lease and these `values` of them. The last one holds to the end."""
    ends = [recording.seconds] if recording.changes else []
    return [*(change.at for change in recording.changes), *ends], [*values, *values[-1:]]


def _vram(axes: Any, recording: Recording) -> None:
    samples, changes = recording.samples, recording.changes
    at = [sample.until for sample in samples]
    axes.set_title(recording.trace, fontsize=10, color=INK)
    asked_at, asked = _to_the_end(recording, [change.budget_bytes / MIB for change in changes])
    axes.step(asked_at, asked, where="post", color=ASKED, lw=1.4, label="lease")
    axes.plot(at, [sample.used_bytes / MIB for sample in samples], color=HELD, lw=1.2, label="held")
    resident = [sample.resident_bytes / MIB for sample in samples]
    axes.fill_between(at, resident, color=RESIDENT, alpha=0.35, lw=0, label="weights resident")
    before = "active"
    for change, until in zip(changes, asked_at[1:], strict=True):
        if change.state != "active":
            axes.axvspan(change.at, until, color=INK, alpha=0.08, lw=0)
        if change.state not in ("active", before):
            axes.text(change.at, axes.get_ylim()[1] * 0.98, f" {change.state}", fontsize=7, color=INK, va="top")
        before = change.state
    axes.axhline(recording.floor_bytes / MIB, color=INK, lw=0.7, ls=":", label="floor")


def _host(axes: Any, recording: Recording) -> None:
    samples = recording.samples
    limits = [change.host_budget_bytes / MIB or math.nan for change in recording.changes]  # no line where there is none
    axes.step(*_to_the_end(recording, limits), where="post", color=ASKED, lw=1.4)
    used = [sample.host_used_bytes / MIB or math.nan for sample in samples]  # hibernated: only the broker holds some
    axes.plot([sample.until for sample in samples], used, color=HELD, lw=1.2)
    axes.axhline(recording.host_floor_bytes / MIB, color=INK, lw=0.7, ls=":")


def _tokens(axes: Any, recording: Recording) -> None:
    at = [sample.until for sample in recording.samples]
    axes.plot(at, [sample.tokens_per_second for sample in recording.samples], color=TOKENS, lw=1.1)
    for job in recording.jobs:
        axes.axvline(job.at, color=TOKENS, lw=0.6, alpha=0.5)


def _frames(axes: Any, recording: Recording) -> None:
    drawn = [(sample.until, sample.frame_ms) for sample in recording.samples if sample.frame_ms is not None]
    axes.plot([at for at, _ in drawn], [ms for _, ms in drawn], ".", color=FRAMES, ms=2)
    axes.set_xlabel("s", fontsize=8)
