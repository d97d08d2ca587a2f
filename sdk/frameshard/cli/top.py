"""``frameshard top``: shows a running sidecar in the terminal, while a game uses it.

It is an ordinary client, and it changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameshard.cli import common, interrupt
from frameshard.errors import BadArgument, ConnectionLost

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    import frameshard

MIB = 1 << 20
INTERVAL_S = 0.25
HOST_PARTS = (
    ("weights", ("weights_bytes",), "green"),
    ("pinned", ("pinned_bytes",), "yellow"),
    ("KV", ("kv_blocks_bytes", "kv_store_bytes"), "cyan"),
    ("processes", ("processes_bytes",), "bright_black"),
)
HISTORY = 40
SPARKS = "▁▂▃▄▅▆▇█"
PLACEMENTS = {"R": ("█", "green"), "S": ("▒", "yellow"), "C": ("░", "blue"), ".": (" ", "")}
KINDS = ("attention", "ffn", "ffn_down", "shared", "experts", "output", "vision", "other")
PARTS = (
    ("weights", ("core_bytes", "arena_bytes"), "green"),
    ("ring", ("ring_bytes", "scratch_bytes"), "yellow"),
    ("KV and compute", ("buffers_bytes",), "cyan"),
    ("driver", ("overhead_bytes",), "bright_black"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch a running sidecar: lease, shards, ring, tokens, jobs, frames",
        description="A live view of a sidecar that runs, until Ctrl-C. Needs frameshard[top]. Without a connect file "
        "it takes the only sidecar of this user that serves, also one that a game has launched.",
    )
    parser.add_argument(
        "--connect",
        metavar="FILE",
        help="the sidecar's connect file (default: that of the only running sidecar)",
    )
    parser.add_argument("connect_file", nargs="?", metavar="FILE", help="the same, without --connect")
    parser.add_argument("--once", action="store_true", help="print one screen and leave")
    common.add_json_arg(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import trio

    import frameshard

    async def once() -> View:
        async with frameshard.connect(target, name="top") as client:
            view = View(await client.model_info())
            await view.look(client)
            return view

    async def watch() -> None:
        from rich.live import Live

        async with frameshard.connect(target, name="top") as client:
            view = View(await client.model_info())
            with Live(screen=True, auto_refresh=False) as live:
                while True:
                    await view.look(client)
                    live.update(fitting(view, live.console), refresh=True)
                    await trio.sleep(INTERVAL_S)

    if not args.json:
        check_rich()
    if args.connect and args.connect_file:
        raise BadArgument("name one connect file: --connect FILE")
    target = args.connect or args.connect_file or only_one()
    if args.json:
        view = interrupt.run_async(once)
        engine = dict(view.engine) or None
        figures = {name: dataclasses.asdict(getattr(view, name)) for name in ("model", "budget", "broker")}
        common.emit_json({**figures, "engine": engine})
    elif args.once or not sys.stdout.isatty():
        from rich.console import Console

        Console().print(page(interrupt.run_async(once)))
    else:
        interrupt.run_async(watch)
    return 0


def check_rich() -> None:
    """Checks that rich is installed, which draws the screen.

    :raises BadArgument: it is not.
    """
    try:
        import rich  # noqa: F401
    except ImportError:
        raise BadArgument(
            "the view needs rich: pip install 'frameshard[top]'; for a bundle: frameshard bundle --with top; "
            "--json does without"
        ) from None


def only_one() -> Path:
    """The connect file of the only running sidecar.

    :raises ConnectionLost: no sidecar is running.
    :raises BadArgument: several sidecars are running.
    """
    from frameshard.broker.endpoint import running

    found = running()
    if not found:
        raise ConnectionLost(
            "no sidecar serves; `frameshard serve` starts one, or name a connect file with --connect FILE"
        )
    if len(found) > 1:
        raise BadArgument(f"{len(found)} sidecars serve, choose one with --connect: {' '.join(map(str, found))}")
    return found[0]


@dataclass
class View:
    """The figures of the sidecar, with their recent history."""

    model: frameshard.ModelInfo
    budget: frameshard.Budget = field(init=False)
    broker: frameshard.BrokerStats = field(init=False)
    engine: dict[str, Any] = field(default_factory=dict)
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    frames_ms: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    copies_per_s: float = 0.0
    _at: float = 0.0

    async def look(self, client: frameshard.Client) -> None:
        """Asks the sidecar for its present figures."""
        stats = await client.stats()
        self.budget = await client.budget()
        now, copied = time.monotonic(), self.engine.get("copied_bytes", 0)
        self.broker, self.engine = stats.broker, dict(stats.engine or {})
        if self._at:
            self.copies_per_s = max(0, self.engine.get("copied_bytes", 0) - copied) / (now - self._at)
        self._at = now
        self.rates.append(self.engine.get("tokens_per_second", 0.0))
        if "pacing" in self.engine:
            self.frames_ms.append(1e3 * self.engine["pacing"]["frame_time_s"])


def fitting(view: View, console: Console) -> RenderableType:
    """The content of the screen, without legends and bounds if it is too low for them. What is still too much is cut at
    the end, where the shards are."""
    whole = page(view)
    return whole if len(console.render_lines(whole)) <= console.height else page(view, legends=False)


def page(view: View, *, legends: bool = True) -> RenderableType:
    """All there is to show.

    :param legends: with what explains the bars.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    title = Text.assemble(("frameshard top", "bold"), f"  {view.model.name} on {view.model.device}")  # no markup
    leases = Group(lease(view, legends), host(view, legends))
    panels = [("lease", leases, "magenta"), ("work", work(view), "yellow"), ("shards", shards(view, legends), "green")]
    rooms = (Panel(body, title=name, title_align="left", border_style=style) for name, body, style in panels)
    return Group(title, *rooms)


def lease(view: View, legends: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    budget, engine = view.budget, view.engine
    if not budget.full_bytes:
        return Text("no VRAM: the model runs on the CPU alone")
    top = max(budget.full_bytes, budget.vram_budget_bytes, engine.get("used_bytes", 0), 1)
    parts = [(name, sum(engine.get(key, 0) for key in keys), style) for name, keys, style in PARTS]
    words = f"{size(budget.vram_budget_bytes)} MiB" if budget.vram_budget_bytes else "no limit"
    words += "" if budget.state == "active" else f", {budget.state}"
    bounds = f"the floor is {size(budget.floor_bytes)} MiB, all is resident from {size(budget.full_bytes)} MiB on"
    held = f"{size(engine.get('used_bytes', 0))} MiB, at most {size(engine.get('peak_bytes', 0))}"
    if engine.get("observed_bytes") is not None:
        held += f"; the driver counts {size(engine['observed_bytes'])}"
    bars = grid(
        ("budget", stacked([(budget.vram_budget_bytes or top, "magenta")], top), words),
        ("held", stacked([(n, style) for _, n, style in parts], top), held),
    )
    legend = Text("  ").join(Text(f"■ {name} {size(n)}", style) for name, n, style in parts)
    return Group(bars, grid(("", legend, ""), ("", Text(bounds), ""))) if legends else bars


def host(view: View, legends: bool) -> RenderableType:
    """The lease of host memory."""
    from rich.console import Group
    from rich.text import Text

    budget, figures = view.budget, view.engine.get("host", {})
    if not figures:
        return Text("")
    limits = [limit for limit in (budget.host_budget_bytes, figures["pressed_bytes"]) if limit]
    top = max(figures["used_bytes"], budget.host_budget_bytes, 1)
    parts = [(name, sum(figures[key] for key in keys), style) for name, keys, style in HOST_PARTS]
    words = f"{size(budget.host_budget_bytes)} MiB" if budget.host_budget_bytes else "no limit"
    if figures["pressed_bytes"]:
        words += f"; {size(figures['pressed_bytes'])} under pressure"
    held = f"{size(figures['used_bytes'])} MiB"
    bars = grid(
        ("host", stacked([(min(limits, default=top), "magenta")], top), words),
        ("held", stacked([(n, style) for _, n, style in parts], top), held),
    )
    legend = Text("  ").join(Text(f"■ {name} {size(n)}", style) for name, n, style in parts)
    bounds = f"the floor is {size(figures['floor_bytes'])} MiB" if figures["floor_bytes"] else "not counted here"
    if figures["observed_bytes"] is not None:  # beside a bar there is no room for it in 80 columns
        bounds += f"; the system counts {size(figures['observed_bytes'])} MiB"
    return Group(bars, grid(("", legend, ""), ("", Text(bounds), ""))) if legends else bars


def shards(view: View, legends: bool) -> RenderableType:
    from rich.text import Text

    engine, rows = view.engine, []
    placement = engine.get("placement", {})
    for kind in (*(k for k in KINDS if k in placement), *(k for k in placement if k not in KINDS)):
        letters = Text.assemble(*(PLACEMENTS.get(letter, (letter, "red")) for letter in placement[kind]))
        rows.append((kind, letters, ""))
    words = (("R", "resident", "resident_bytes"), ("S", "streamed", "streamed_bytes"), ("C", "on the CPU", "cpu_bytes"))
    legend = (
        Text(f"{PLACEMENTS[letter][0]} {name} {size(engine.get(key, 0))} MiB", PLACEMENTS[letter][1])
        for letter, name, key in words
    )
    ring = f"{size(engine.get('ring_bytes', 0))} MiB, {view.copies_per_s / 1e9:.2f} GB/s through it"
    explained = [("", Text("  ").join(legend), "")] if legends else []
    return grid(*rows, *explained, ("ring", Text(ring), ""))


def work(view: View) -> RenderableType:
    from rich.text import Text

    broker, engine, pacing = view.broker, view.engine, view.engine.get("pacing")
    jobs = f"{broker.jobs_running} running, {broker.jobs_queued} waiting; "
    jobs += f"conversations kept: {engine.get('conversations', 0)}; "
    jobs += f"KV store: {engine.get('kv_cache_entries', 0)} in {size(engine.get('kv_cache_bytes', 0))} MiB"
    rows = [
        ("tokens", Text(spark(view.rates), "yellow"), f"{engine.get('tokens_per_second', 0.0):.1f} tokens/s"),
        ("jobs", Text(jobs), f"clients: {broker.sessions}"),
    ]
    if pacing:
        words = f"{view.frames_ms[-1]:.1f} ms of {1e3 * pacing['target_frame_s']:.1f}, {pacing['late_frames']} late"
        rows.append(("frames", Text(spark(view.frames_ms), "cyan"), words if pacing["pacing"] else f"{words}; idle"))
    words = f"process {broker.engine_pid or '-'}, up {broker.uptime_s:.0f} s, {broker.engine_restarts} restarts"
    return grid(*rows, ("engine", Text(broker.engine), words))


def grid(*rows: tuple[str, Text, str]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", width=9)
    for row in rows:
        table.add_row(*row)
    return table


def stacked(parts: Iterable[tuple[int, str]], top: int, width: int = 40) -> Text:
    """A bar of stacked parts. A part of `top` would fill the whole width."""
    from rich.text import Text

    bar, total, at = Text(), 0, 0
    for n, style in parts:
        total += n
        end = round(width * min(total / top, 1.0))
        bar.append("━" * (end - at), style)
        at = end
    return bar.append("─" * (width - at), "bright_black")


def spark(values: Iterable[float]) -> str:
    found = list(values)
    top = max(found, default=0.0) or 1.0
    return "".join(SPARKS[min(int(value / top * len(SPARKS)), len(SPARKS) - 1)] for value in found)


def size(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.0f}"
