"""``frameshard simulate``: replays a game's frames, VRAM demand and questions with a real sidecar.

The exit status is 1 if the sidecar broke its lease or lost a job.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from frameshard.cli import common, figures, interrupt
from frameshard.errors import BadArgument, FrameshardError
from frameshard.simulation import trace as traces
from frameshard.wire.messages import SchedulingMode

if TYPE_CHECKING:
    from frameshard.simulation.player import Recording


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="replay a game's frames and VRAM demand against a real sidecar",
        description="Plays scripts of a game's frames, VRAM demand and questions one after the other against a "
        "sidecar, and checks that no sample lies above the lease and that no job is lost. Frames are slept, not drawn. "
        "A script's VRAM is scaled to the model's needs, so that any of them plays with any model.",
    )
    parser.add_argument("trace", nargs="*", metavar="TRACE", help="JSON files or names of --list (all of those)")
    parser.add_argument("--list", action="store_true", help="name the scripts that come with frameshard")
    common.add_model_args(parser, required=False)
    common.add_context_args(parser)
    parser.add_argument("--speed", type=common.rate, default=1.0, metavar="N", help="events come N times as fast (1)")
    parser.add_argument(
        "--as-recorded", action="store_true", help="offer the script's own MiB instead of scaling them to the model"
    )
    parser.add_argument(
        "--mode", choices=("planned", "stream_only"), default="planned", help="of the sidecar (planned)"
    )
    parser.add_argument(
        "--scheduling-mode",
        choices=get_args(SchedulingMode),
        default="balance",
        metavar="MODE",
        help=f"who waits for whom on the GPU: {', '.join(get_args(SchedulingMode))} (balance)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw what was seen, as PNG or SVG; needs frameshard[plots]")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = [traces.load(name) for name in args.trace or traces.names()]
    if args.list:
        listed = {trace.name: {"seconds": trace.seconds, "about": trace.about} for trace in chosen}
        if args.json:
            common.emit_json(listed)
        else:
            for name, entry in listed.items():
                print(common.wrapped(f"{name:16}{entry['seconds']:4g} s  {entry['about']}", hanging=24))
        return 0
    if args.model is None:
        raise BadArgument("--model is needed to simulate")
    if args.plot:
        figures.check(args.plot)

    import frameshard
    from frameshard import models
    from frameshard.simulation.player import play

    async def main() -> list[Recording]:
        async with frameshard.launch(
            models.resolve(args.model),
            device=args.device,
            n_ctx=args.ctx,
            n_parallel=args.parallel,
            n_ubatch=args.ubatch,
            kv_type=args.kv_type,
            n_threads=args.threads,
            mode=args.mode,
            name="simulate",
        ) as client:
            await client.set_pacing(args.scheduling_mode)
            found = []
            for trace in chosen:
                print(common.wrapped(f"{trace.name}: {trace.about}"), file=sys.stderr)
                found.append(await play(client, trace, speed=args.speed, as_recorded=args.as_recorded))
            return found

    recordings = interrupt.run_async(main)
    if args.json:
        common.emit_json(
            {"recordings": [{**dataclasses.asdict(each), "summary": summary(each)} for each in recordings]}
        )
    else:
        print(table(recordings))
    for each in recordings:
        for problem in each.problems:
            print(f"{each.trace}: {problem}", file=sys.stderr)
    if args.plot:
        from frameshard.simulation import plot

        try:
            figures.draw_apart(plot.draw, args.plot, recordings)
        except FrameshardError as error:  # the results are printed: --json has no second document for an error
            print(f"frameshard: {error.message}", file=sys.stderr)
            return 2
    return int(any(each.problems for each in recordings))


def summary(recording: Recording) -> dict[str, Any]:
    """The figures of one row of the table."""
    released = [1e3 * change.released_s for change in recording.changes if change.released_s is not None]
    return {
        "trace": recording.trace,
        "seconds": recording.seconds,
        "changes": len(recording.changes),
        "release p50 ms": quantile(released, 0.5),
        "max ms": quantile(released, 1.0),
        "resume ms": 1e3 * max(recording.resumed_s) if recording.resumed_s else None,
        "jobs": len(recording.jobs),
        "tokens": recording.tokens,
        "frame p50 ms": quantile(recording.frames_ms, 0.5),
        "p99 ms": quantile(recording.frames_ms, 0.99),
        "problems": len(recording.problems),
    }


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share of ``values`` lies, between two of them in proportion; None without values."""
    if not values:
        return None
    found, at = sorted(values), share * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(found) - 1)
    return found[below] + (at - below) * (found[above] - found[below])


HEADS = ("trace", "s", "leases", "p50", "max", "back", "jobs", "tokens", "frame", "p99", "faults")
LEGEND = (
    "in ms: leases are released after p50 and max; back: active again after it was parked or hibernated; frame: p50 "
    "and p99 of the time of a frame"
)


def table(recordings: Sequence[Recording]) -> str:
    """A table with a row for each trace, and an explanation of its headings."""
    found = [[_cell(value) for value in summary(each).values()] for each in recordings]
    width = max(len(row[0]) for row in [HEADS, *found])
    rows = [[row[0].ljust(width), *row[1:]] for row in [HEADS, *found]]
    return f"{common.table(rows)}\n{common.wrapped(LEGEND)}"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)
