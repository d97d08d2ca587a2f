"""Shows the scene: as a live terminal page, or as plain lines for logs and pipes."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

MIB = 2**20
ASKING = "You (begin with a name; save and load keep and restore the talks; an empty line leaves)"
VRAM_LINES, LEAST_LINES = 11, 18
"""Lines of the panel with the VRAM. A terminal of fewer lines than the second number has the conversation alone."""

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Gauge:
    """Figures of the live page. Sizes in bytes; `full` is what the model takes with all weights resident."""

    budget: int = 0
    used: int = 0
    resident: int = 0
    full: int = 0
    tokens_per_s: float = 0.0
    place: str = ""


class Stage(Protocol):
    def player(self, text: str) -> None: ...
    def npc(self, name: str) -> None: ...
    def says(self, delta: str) -> None: ...
    def falls_silent(self) -> None: ...
    def remark(self, name: str, text: str, note: str) -> None: ...
    def world(self, text: str) -> None: ...
    def gauge(self, gauge: Gauge) -> None: ...
    def ask_player(self) -> str: ...
    def close(self) -> None: ...


def prompt(text: str) -> str:
    """The player's line; empty at the end of input."""
    try:
        return input(text).strip()
    except EOFError:
        return ""


class PlainStage:
    """Plain lines. What the game does during an answer is on a line of its own."""

    def __init__(self) -> None:
        self._speaking = False

    def player(self, text: str) -> None:
        print(f"\nYou: {text}", flush=True)

    def npc(self, name: str) -> None:
        print(f"{name}: ", end="", flush=True)
        self._speaking = True

    def says(self, delta: str) -> None:
        print(delta, end="", flush=True)

    def falls_silent(self) -> None:
        print(flush=True)
        self._speaking = False

    def remark(self, name: str, text: str, note: str) -> None:
        print(f"  {name}, nearby: {text} ({note})", flush=True)

    def world(self, text: str) -> None:
        if self._speaking:
            print(f" ...\n  [game] {text}\n  ...", end="", flush=True)
        else:
            print(f"  [game] {text}", flush=True)

    def gauge(self, gauge: Gauge) -> None:
        pass  # the game's lines have the figures

    def ask_player(self) -> str:
        return prompt(f"\n{ASKING}: ")

    def close(self) -> None:
        sys.stdout.flush()


class LiveStage:
    """A page of the whole terminal: conversation above, VRAM and speed below."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._lines: list[Text] = []
        self._news: deque[str] = deque(maxlen=3)
        self._gauge = Gauge()
        self._rates: deque[float] = deque(maxlen=40)
        self._speaking = False
        self._live = Live(self.page(), console=console, refresh_per_second=15, screen=console.is_terminal)
        self._live.start()

    def player(self, text: str) -> None:
        self._lines.append(Text.assemble(("You  ", "bold cyan"), text))
        self._show()

    def npc(self, name: str) -> None:
        self._lines.append(Text.assemble((f"{name}  ", "bold yellow")))
        self._speaking = True

    def says(self, delta: str) -> None:
        self._lines[-1].append(delta.replace("\n\n", "\n"))
        self._show()

    def falls_silent(self) -> None:
        self._speaking = False
        self._show()

    def remark(self, name: str, text: str, note: str) -> None:
        self._lines.append(Text.assemble((f"{name}, nearby  ", "yellow"), text, (f"  {note}", "bright_black")))
        self._show()

    def world(self, text: str) -> None:
        self._news.append(text)
        if self._speaking:
            self._lines[-1].append(" ◆", "bold magenta")
        self._show()

    def gauge(self, gauge: Gauge) -> None:
        self._gauge = gauge
        if self._speaking and gauge.tokens_per_s:
            self._rates.append(gauge.tokens_per_s)
        self._show()

    def ask_player(self) -> str:
        self._live.stop()
        try:
            self._console.print(self.page())
            return prompt(f"{ASKING}  ")
        finally:
            self._live.start()

    def close(self) -> None:
        self._live.stop()
        if self._console.is_terminal:
            self._console.print(self.page())

    def _show(self) -> None:
        self._live.update(self.page())

    def page(self) -> RenderableType:
        layout = Layout()
        layout.split_column(Layout(name="talk"), Layout(name="vram", size=VRAM_LINES))
        layout["vram"].visible = self._console.height >= LEAST_LINES
        width = max(1, self._console.width - 4)
        height = max(1, self._console.height - 3 - VRAM_LINES * layout["vram"].visible)
        text = Text("\n\n").join(self._lines)
        lines = text.wrap(self._console, width)[-height:]
        layout["talk"].update(Panel(Group(*lines), title=self._title, border_style="yellow", title_align="left"))
        layout["vram"].update(
            Panel(Group(self._bars(), *self._news_lines()), title="VRAM", border_style="magenta", title_align="left")
        )
        return layout

    def _bars(self) -> Table:
        gauge = self._gauge
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", width=9)
        table.add_column(width=40)
        table.add_column()
        top = max(gauge.full, gauge.budget, 1)
        table.add_row("game", Text(gauge.place, "magenta"))
        table.add_row("budget", bar(gauge.budget / top, "magenta"), f"{gauge.budget / MIB:.0f} MiB")
        table.add_row("in use", bar(gauge.used / top, "cyan"), f"{gauge.used / MIB:.0f} MiB")
        table.add_row("resident", bar(gauge.resident / top, "green"), f"{gauge.resident / MIB:.0f} MiB of weights")
        table.add_row("speech", Text(spark(self._rates), "yellow"), f"{gauge.tokens_per_s:.0f} tokens/s")
        return table

    def _news_lines(self) -> list[Text]:
        blank = [""] * (self._news.maxlen or 0)
        return [Text(f"◆ {line}" if line else "", "magenta", no_wrap=True) for line in [*self._news, *blank][:3]]


def bar(share: float, style: str, width: int = 40) -> Text:
    filled = round(max(0.0, min(share, 1.0)) * width)
    return Text.assemble(("━" * filled, style), ("─" * (width - filled), "bright_black"))


def spark(rates: deque[float]) -> str:
    top = max(rates, default=0.0) or 1.0
    return "".join(SPARKS[min(int(rate / top * len(SPARKS)), len(SPARKS) - 1)] for rate in rates)
