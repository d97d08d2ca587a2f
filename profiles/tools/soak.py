"""Checks for leaks: plays the traces of `frameshard simulate` for an hour and measures all processes. Linux only.

    python profiles/tools/soak.py smollm2-135m --device emulated --seconds 3600

After each round all jobs have ended and the budget is at its maximum. Then the tool records memory, file descriptors
and shared memory of host, broker and engine, and the ledger of VRAM. One engine runs all the time: where a trace
hibernates the sidecar, it is parked instead. With --hibernate it hibernates, so engines end and start. The first
quarter of rounds is warm-up. The median of the last quarter must not exceed that of the second quarter by more than a
tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

import frameshard
from frameshard import models
from frameshard.cpu import default_threads
from frameshard.simulation import trace as traces
from frameshard.simulation.player import MIB, play

DEADLINE_MS = 30_000.0
"""The deadline of every change of the budget. It is long, because speed is not tested here, and the machine may be
busy."""

PARKED_KV_MB = 64
"""Room for the KV cache in host memory while the sidecar is parked. A trace that hibernates it needs none."""

TOLERANCE = {"rss_mb": 4.0, "shared_mb": 0.05, "fds": 0.0, "threads": 0.0, "vram_mb": 0.5}
MIN_ROUNDS = 8


def look(pid: int) -> dict[str, float]:
    """The private and shared memory (MiB) of a process, without pages of the model file, its file descriptors and its
    threads."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_mb": int(fields["RssAnon"].split()[0]) / 1024,
        "shared_mb": int(fields["RssShmem"].split()[0]) / 1024,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def adapted(trace: traces.Trace, hibernate: bool) -> traces.Trace:
    events: list[traces.Event] = []
    for event in trace.events:
        if isinstance(event, (traces.Vram, traces.Lease)):
            event = replace(event, deadline_ms=DEADLINE_MS)
        if isinstance(event, traces.Lease) and event.state == "hibernated" and not hibernate:
            event = replace(event, state="parked")
        if isinstance(event, traces.Host) and event.above_floor_mb is not None and not hibernate:
            event = replace(event, above_floor_mb=event.above_floor_mb + PARKED_KV_MB)
        events.append(event)
    return replace(trace, events=tuple(events))


async def settled(client: frameshard.Client, problems: list[str]) -> frameshard.Stats:
    """Waits until the budget is at its maximum, all weights are resident and no job is open; returns the figures."""
    await client.set_budget((await client.budget()).full_bytes / MIB, timeout_s=DEADLINE_MS / 1e3)
    with trio.move_on_after(60):
        while True:
            stats = await client.stats()
            engine = stats.engine or {}
            open_jobs = stats.broker.jobs_queued + stats.broker.jobs_running
            if not open_jobs and engine.get("streamed_bytes") == 0 == engine.get("cpu_bytes"):
                return stats
            await trio.sleep(0.05)
    problems.append(f"after a minute there are {open_jobs} open jobs, {engine.get('streamed_bytes')} bytes not back")
    return stats


async def main(args: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, float]] = []
    problems: list[str] = []
    resumed: list[float] = []
    played = {"traces": 0, "changes": 0, "jobs": 0, "tokens": 0, "frames": 0, "samples": 0}
    script = [adapted(traces.load(name), args.hibernate) for name in traces.names()]
    started = time.monotonic()
    async with frameshard.launch(
        models.resolve(args.model), device=args.device, n_ctx=512, n_threads=args.threads
    ) as client:
        await client.set_pacing("prioritize_compute")  # frame times are not measured here
        stats = await settled(client, problems)
        while time.monotonic() - started < args.seconds and not problems:
            for trace in script:
                found = await play(client, trace, speed=args.speed)
                problems += [f"round {len(rounds)}, {trace.name}: {problem}" for problem in found.problems]
                resumed += found.resumed_s
                for name, n in (
                    ("traces", 1),
                    ("changes", len(found.changes)),
                    ("jobs", len(found.jobs)),
                    ("tokens", found.tokens),
                    ("frames", len(found.frames_ms)),
                    ("samples", len(found.samples)),
                ):
                    played[name] += n
            stats = await settled(client, problems)
            engine = stats.engine or {}
            row = {"at": time.monotonic() - started, "vram_mb": engine.get("used_bytes", 0) / MIB}
            if engine.get("observed_bytes") is not None:
                row["observed_mb"] = engine["observed_bytes"] / MIB
            assert stats.broker.engine_pid is not None
            for name, pid in (("host", os.getpid()), ("broker", stats.broker.pid), ("engine", stats.broker.engine_pid)):
                row.update({f"{name} {what}": value for what, value in look(pid).items()})
            rounds.append(row)
            print(" ".join(f"{name} {value:.1f}" for name, value in row.items()), file=sys.stderr, flush=True)
        if stats.broker.engine_restarts:
            problems.append(f"the engine died {stats.broker.engine_restarts} times")
        model = await client.model_info()
    table = grown(rounds, problems)
    return {
        "model": model.name,
        "device": model.device,
        "speed": args.speed,
        "seconds": time.monotonic() - started,
        "rounds": len(rounds),
        "played": played,
        "resumed_s": {"n": len(resumed), "p50": statistics.median(resumed), "most": max(resumed)} if resumed else None,
        "table": table,
        "problems": problems,
    }


def grown(rounds: list[dict[str, float]], problems: list[str]) -> dict[str, dict[str, float]]:
    """For each figure the medians of the second and the last quarter, and the maximum. Adds figures that have grown to
    `problems`."""
    if len(rounds) < MIN_ROUNDS:
        problems.append(f"{len(rounds)} rounds are too few to tell; {MIN_ROUNDS} are needed")
        return {}
    quarter = len(rounds) // 4
    table = {}
    for name in (name for name in rounds[0] if name != "at"):
        values = [row[name] for row in rounds]
        early, late = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        table[name] = {"second_quarter": early, "last_quarter": late, "most": max(values)}
        allowed = TOLERANCE.get(name.split()[-1], TOLERANCE["vram_mb"])
        if late - early > allowed:
            problems.append(f"{name} has grown from {early:.1f} to {late:.1f}; {allowed:g} is tolerated")
    return table


def print_table(document: dict[str, Any]) -> None:
    print(f"{'':22}{'2nd quarter':>12}{'last':>10}{'most':>10}")
    for figure, values in document["table"].items():
        print(f"{figure:22}{values['second_quarter']:12.1f}{values['last_quarter']:10.1f}{values['most']:10.1f}")
    print(", ".join(f"{n} {name}" for name, n in document["played"].items()), f"in {document['seconds']:.0f} s")
    if back := document["resumed_s"]:
        print(f"active again {back['n']} times, after {back['p50']:.2f} s (p50), {back['most']:.2f} s at most")
    for problem in document["problems"]:
        print(problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="emulated:4")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long rounds are begun (3600)")
    parser.add_argument("--speed", type=float, default=20.0, help="of the traces (20)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of the engine (half of the CPUs)")
    parser.add_argument("--hibernate", action="store_true", help="as the traces say, instead of parking")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    document = trio.run(main, arguments)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)
    sys.exit(bool(document["problems"]))
