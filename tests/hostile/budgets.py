"""Changes the budget of an engine every few milliseconds while it reads prompts and answers.

    python tests/hostile/budgets.py MODEL.gguf --seconds 600 --seed 1

A seeded script submits jobs, changes the budget, parks the engine and cancels jobs, also while it is parked. The engine
must live, hold every budget, and end every job. In mode stream-only with one job at a time each text must be that of an
undisturbed run.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import commandline

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_driver import ENDS, EngineProcess, Event, ids

PROMPTS = ["Mira pours another cup. " * n for n in (1, 2, 5, 10, 20)]
PAUSE_S = 0.015
"""The longest time between two disturbances."""

GROWING_DRIVER = """
from frameshard.engine import process, runtime

class Driver:
    source, pid = "nvml", 0

    def __init__(self):
        self.workspaces = 0

    def used(self):
        stats = devices[0].stats()
        if stats.lacks_workspaces:
            self.workspaces = 0
        return stats.used_bytes - stats.overhead_bytes + (300 << 20) + self.workspaces

    def totals(self):
        return None

    def others(self):
        return {}

def open_device(*args, **options):
    devices.append(shard_device(*args, **options))
    return devices[0]

def decode_and_grow(self, batch, **options):
    rows = decode(self, batch, **options)
    if len(batch) > 1:
        self.observer.workspaces = 64 << 20
    return rows

devices, shard_device, decode = [], runtime.ShardDevice, runtime.Runtime.decode
runtime.EMULATED = "none, so that the driver is asked"
runtime.find_observer, runtime.ShardDevice, runtime.Runtime.decode = Driver, open_device, decode_and_grow
process.main()
"""
"""An engine whose driver takes 64 MiB at each first decode of several sequences, as CUDA does for recurrent models."""

QUIET_S = 60.0
"""At the end all jobs must be done within so many seconds."""


def _params(n: int) -> dict[str, object]:
    """How the answer to prompt ``n`` is sampled."""
    return {"max_tokens": 4 + 8 * n, "temperature": 1.0, "seed": n}


@dataclass
class Report:
    """The result: ``ends`` counts how jobs have ended, and ``budgets`` the changes of the budget."""

    seed: int
    ends: dict[str, int] = field(default_factory=dict)
    budgets: int = 0
    changed: int = 0
    problems: list[str] = field(default_factory=list)


class Rush:
    """The engine, its jobs, and the changes.

    :param child: an engine that has loaded a model.
    :param same_texts: compare the texts.
    """

    def __init__(self, child: EngineProcess, seed: int, *, parallel: int, same_texts: bool) -> None:
        self.report = Report(seed)
        self._child, self._parallel = child, parallel
        self._random = random.Random(seed)
        self._jobs: dict[int, int] = {}
        """The prompt of each job that has not ended."""
        self._texts: dict[int, list[int]] = {}
        stats = child.stats()
        self._floor = stats["floor_bytes"]
        self._most = max(stats["full_bytes"], self._floor * 3 // 2)
        self._expected = [self._ask(n) for n in range(len(PROMPTS))] if same_texts else []

    def run(self, seconds: float) -> Report:
        """Disturbs the engine for ``seconds``, and then lets its jobs end."""
        try:
            self._run(seconds)
        except (OSError, EOFError) as error:
            self.report.problems.append(f"the engine is gone: {error!r}")
        return self.report

    def _run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.report.problems:
            self._disturb()
            time.sleep(self._random.uniform(0.0, PAUSE_S))
            self._hear()
        self._child.budget(0)
        until = time.monotonic() + QUIET_S
        while self._jobs and not self.report.problems:
            if time.monotonic() > until:
                self.report.problems.append(f"{len(self._jobs)} jobs had not ended {QUIET_S:g} s after the last change")
            time.sleep(PAUSE_S)
            self._hear()
        if not self.report.problems:
            for n in range(len(self._expected)):
                self._compare(n, self._ask(n))

    def _disturb(self) -> None:
        choice = self._random.random()
        if choice < 0.4:
            if len(self._jobs) <= 2 * self._parallel:
                self._submit(self._random.randrange(len(PROMPTS)))
        elif choice < 0.6:
            if self._jobs:
                self._child.send(op="cancel", job=self._random.choice(list(self._jobs)))
        else:
            self.report.budgets += 1
            between = self._random.randint(self._floor, self._most)
            budget = self._random.choice((0, self._floor, between, between, self._most))
            self._child.budget(budget, parked=self._random.random() < 0.1)

    def _submit(self, n: int) -> None:
        job = self._child.submit(PROMPTS[n], params=_params(n), priority=self._random.randrange(3))
        self._jobs[job], self._texts[job] = n, []

    def _hear(self) -> None:
        """Takes what the engine has said so far."""
        self._child.send(op="ping", seq=0)
        while (event := self._child.next_event(seconds=QUIET_S))["ev"] != "pong":
            self._take(event)

    def _take(self, event: Event) -> None:
        kind = event["ev"]
        if kind == "token":
            self._texts[event["job"]].append(event["id"])
        elif kind in ENDS:
            n, text = self._jobs.pop(event["job"]), self._texts.pop(event["job"])
            self.report.ends[kind] = self.report.ends.get(kind, 0) + 1
            self._compare(n, text, whole=kind == "done")
        elif kind == "released" and 0 < event["vram_budget_bytes"] < event["used_bytes"]:
            self.report.problems.append(f"more than the budget is in use: {event}")
        if kind in ("fatal", "failed", "refused"):
            self.report.problems.append(str(event["error"]))

    def _ask(self, n: int) -> list[int]:
        return ids(self._child.run(PROMPTS[n], params=_params(n)))

    def _compare(self, n: int, text: list[int], *, whole: bool = True) -> None:
        if self._expected and text != (self._expected[n] if whole else self._expected[n][: len(text)]):
            self.report.changed += 1
            self.report.problems.append(f"prompt {n}: {text} in place of {self._expected[n]}")


async def rush(
    model: Path,
    *,
    seconds: float,
    seed: int,
    device: str = "emulated",
    parallel: int = 1,
    planned: int = 0,
    unit_kb: int = 0,
    driver_grows: int = 0,
) -> Report:
    """Loads a model on a device and disturbs it.

    :param parallel: jobs at once.
    :param planned: 1 for mode planned, 0 for stream-only.
    :param unit_kb: VRAM is allocated in multiples of so many KiB, as by the drivers of GPUs.
    :param driver_grows: 1 for the engine of :data:`GROWING_DRIVER`.
    """
    program = ("-c", GROWING_DRIVER) if driver_grows else ()
    child = EngineProcess(faults=f"unit_kb={unit_kb}", program=program)
    try:
        mode = "planned" if planned else "stream_only"
        child.load(model, device=device, mode=mode, n_ctx=1024, n_parallel=parallel, n_threads=1)
        return Rush(child, seed, parallel=parallel, same_texts=not planned and parallel == 1).run(seconds)
    finally:
        child.close()


if __name__ == "__main__":
    options = {
        "device": ("emulated", "the device"),
        "parallel": (1, "jobs at once"),
        "planned": (0, "1 for mode planned, 0 for stream-only"),
        "unit_kb": (0, "VRAM is allocated in multiples of so many KiB"),
        "driver_grows": (0, "1 for a driver that takes VRAM during use"),
    }
    sys.exit(commandline.main(__doc__, rush, **options))
