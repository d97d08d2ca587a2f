"""Pictures of measurements and plans, by matplotlib, which the extra ``plots`` installs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameshard.errors import BadArgument

if TYPE_CHECKING:
    from frameshard.native import Span

_FORMATS = (".svg", ".png", ".pdf")
_LANES = {"copy": ("copies", "#4477aa"), "device": ("GPU", "#228833"), "cpu": ("CPU", "#ee6677")}


def check(path: str) -> None:
    """Raises :class:`BadArgument` if no picture can be written to ``path``: better before measuring than after."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise BadArgument(f"{path} is not the name of a picture: end it with {', '.join(_FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise BadArgument(f"there is no folder for {path}")
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise BadArgument("pictures need matplotlib: pip install 'frameshard[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@dataclass(frozen=True)
class Window:
    """What the executor did between two moments of ``time.perf_counter``."""

    what: str
    spans: Sequence[Span]
    start_s: float
    end_s: float

    def lane(self, name: str) -> list[tuple[float, float]]:
        """(start, length) in seconds from the window's start of each span in it, cut at its ends."""
        cut = [
            (max(span.start_s, self.start_s), min(span.end_s, self.end_s)) for span in self.spans if span.lane == name
        ]
        return [(start - self.start_s, end - start) for start, end in cut if end > start]

    def summary(self) -> dict[str, Any]:
        """The window's length and, of each lane, its busy share of it and its rate while busy in GB/s of weights."""
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


def draw_timeline(path: str, title: str, windows: Sequence[Window]) -> None:
    """A lane each for copies, GPU and CPU, one picture a window, with the busy share of each lane."""
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
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
