"""Draws recordings of flights side by side: VRAM by owner, frame times, tokens per second.

python samples/streaming_world/plot.py deal.json static.json no_ai.json flights.png
"""

from __future__ import annotations

import json
import sys
from typing import Any

MIB = 1 << 20
INK, GAME, POOL, SIDECAR, WANTED, TOKENS, FRAMES = (
    "#30343b", "#9a9ca3", "#5aa469", "#2a7f9e", "#1f5130", "#d08c1f", "#6a5acd"
)  # fmt: skip
WINDOW_S = 1.0
"""Tokens per second are counted over so many seconds."""

FRAME_MS = 1000 / 60


def main() -> int:
    *sources, picture = sys.argv[1:] or [""]
    if not sources:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        flights = [read(source) for source in sources]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("drawing needs matplotlib: pip install 'frameshard[plots]'", file=sys.stderr)
        return 2
    figure = Figure(figsize=(1.2 + 4.4 * len(flights), 6.4), dpi=110, layout="constrained")
    grid = figure.subplots(3, len(flights), squeeze=False, sharex="col", sharey="row", height_ratios=(3, 1.2, 1.2))
    for column, flight in enumerate(flights):
        draw_vram(grid[0][column], flight)
        draw_frames(grid[1][column], flight)
        draw_tokens(grid[2][column], flight)
    for row, label in enumerate(("VRAM, MiB", "frame, ms", "tokens/s")):
        grid[row][0].set_ylabel(label, color=INK)
    for axes in grid.flat:
        axes.tick_params(labelsize=8, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    longest = sorted(frame[1] for flight in flights for frame in flight["frames"])
    grid[1][0].set_ylim(0, max(2 * FRAME_MS, 1.1 * longest[int(0.99 * (len(longest) - 1))]))
    lines = {label: line for axes in grid[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=6, fontsize=9, frameon=False)
    with_ai = next((flight for flight in flights if flight["model"]), None)
    drawn = f"drawn by {flights[0]['renderer']}"
    about = f"{with_ai['model']} on {with_ai['device']}; {drawn}" if with_ai else drawn
    figure.supxlabel(f"seconds     ({about})", fontsize=8, color=INK)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:  # there is no such folder, or no such format of pictures
        print(f"{picture}: {error}", file=sys.stderr)
        return 2
    return 0


def read(source: str) -> dict[str, Any]:
    """
    :raises OSError: the file cannot be read.
    :raises ValueError: it has no recording.
    """
    try:
        with open(source) as file:
            flight = json.load(file)
    except ValueError as error:
        raise ValueError(f"{source} is no recording of a flight: {error}") from None
    if not isinstance(flight, dict) or not flight.get("frames"):
        raise ValueError(f"{source} has no frames of a flight")
    return flight


def draw_vram(axes: Any, flight: dict[str, Any]) -> None:
    frames, samples = flight["frames"], flight["samples"]
    at = [frame[0] for frame in frames]
    fixed = [flight["fixed_bytes"] / MIB] * len(at)
    pool = [frame[6] / MIB for frame in frames]
    # What the sidecar holds at a frame is its latest sample, but no more than it may hold then.
    held, latest = [], 0
    for frame in frames:
        while latest + 1 < len(samples) and samples[latest + 1][1] <= frame[0]:
            latest += 1
        held.append(min(samples[latest][2], frame[7]) / MIB if samples else 0.0)
    tokens = sum(count for _, count in flight["deltas"])
    misses = sum(frame[9] for frame in frames)
    said = f", {tokens} tokens" if samples else ""
    axes.set_title(f"{flight['kind']}: {misses} misses{said}", fontsize=10, color=INK)
    colours, labels = (GAME, POOL, SIDECAR), ("game", "pool", "sidecar")
    axes.stackplot(at, fixed, pool, held, colors=colours, labels=labels, alpha=0.75, lw=0)
    wanted = [flight["fixed_bytes"] / MIB + frame[4] / MIB for frame in frames]
    axes.plot(at, wanted, color=WANTED, lw=1.2, label="the pool wants")
    axes.axhline(flight["grant_bytes"] / MIB, color=INK, lw=1.0, ls="--", label="grant")
    top = 1.07 * flight["grant_bytes"] / MIB
    axes.set_ylim(0, top)
    borders = [0.0, *flight["borders"]]
    for district, border in enumerate(borders):
        name = "field" if district % 2 else "city"
        axes.axvline(border, color=INK, lw=0.5, alpha=0.4)
        axes.text(border, top, f" {name}", fontsize=7, color=INK, va="top")


def draw_frames(axes: Any, flight: dict[str, Any]) -> None:
    axes.plot(
        [frame[0] for frame in flight["frames"]], [frame[1] for frame in flight["frames"]], ".", color=FRAMES, ms=2
    )
    axes.axhline(FRAME_MS, color=INK, lw=0.6, ls=":")
    axes.text(0, FRAME_MS, " 1/60 s", fontsize=7, color=INK, va="bottom")


def draw_tokens(axes: Any, flight: dict[str, Any]) -> None:
    deltas = flight["deltas"]
    if not deltas:
        return
    times = [at / 10 for at in range(int(10 * flight["seconds"]))]
    rates = [sum(count for at, count in deltas if time - WINDOW_S < at <= time) / WINDOW_S for time in times]
    axes.fill_between(times, rates, color=TOKENS, alpha=0.6, lw=0)


if __name__ == "__main__":
    sys.exit(main())
