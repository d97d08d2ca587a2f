"""Draws lines in panels as SVG text. The same figures give the same bytes. results.py render uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_W, PANEL_H, GAP_X, GAP_Y = 330, 170, 76, 74
LEFT, TOP, BOTTOM = 58, 92, 46
COLOURS = ("#1f6fb4", "#d1712b", "#4c9a5a")


@dataclass(frozen=True)
class Series:
    """A line: its name, and its points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[Series]


def ticks(most: float) -> list[float]:
    """About four round values from 0 to at least ``most``."""
    step = 10 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 4 >= most * 0.9)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _panel(panel: Panel, x0: float, y0: float, x_most: float) -> list[str]:
    ys = ticks(max(y for series in panel.series for _, y in series.points))
    xs = ticks(x_most)

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + PANEL_W * x / xs[-1], y0 + PANEL_H * (1 - y / ys[-1])

    lines = [_text(x0, y0 - 12, panel.title, 13, more=' font-weight="bold"')]
    for y in ys:
        _, row = at(0, y)
        lines.append(f'<path d="M{x0:.1f} {row:.1f}h{PANEL_W}" stroke="#ddd"/>')
        lines.append(_text(x0 - 6, row + 4, f"{y:g}", 11, "end"))
    for x in xs:
        column, _ = at(x, 0)
        lines.append(_text(column, y0 + PANEL_H + 16, f"{x:g}", 11, "middle"))
    for colour, series in zip(COLOURS, panel.series, strict=False):
        points = [at(x, y) for x, y in series.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
    return lines


def svg(title: str, x_label: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """Draws all panels with one title, one legend and the same x axis. All axes start at 0."""
    rows = math.ceil(len(panels) / columns)
    width = LEFT + columns * PANEL_W + (columns - 1) * GAP_X + 20
    height = TOP + rows * PANEL_H + (rows - 1) * GAP_Y + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(LEFT, 26, title, 15, more=' font-weight="bold"'),
    ]
    x = float(LEFT)
    for colour, series in zip(COLOURS, panels[0].series, strict=False):
        lines.append(f'<circle cx="{x + 5:.1f}" cy="46" r="5" fill="{colour}"/>')
        lines.append(_text(x + 16, 50, series.name))
        x += 40 + 7 * len(series.name)
    x_most = max(x for panel in panels for series in panel.series for x, _ in series.points)
    for i, panel in enumerate(panels):
        column, row = i % columns, i // columns
        lines += _panel(panel, LEFT + column * (PANEL_W + GAP_X), TOP + row * (PANEL_H + GAP_Y), x_most)
    lines.append(_text(width / 2, height - 10, x_label, 12, "middle"))
    return "\n".join([*lines, "</svg>", ""])
