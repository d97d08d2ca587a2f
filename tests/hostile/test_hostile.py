"""Runs the storm and the fuzzer for 24 seconds in all; ``make hostile`` runs them for FRAMESHARD_HOSTILE_S seconds. Up
to as much time again goes to changes of the budget. They are tried with a model of each kind of memory, by ``make
hostile`` with one of each architecture.

Their reports are printed (``pytest -s``). FRAMESHARD_HOSTILE_SEED repeats a run with a seed that has failed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))
import budgets
import fuzz
import storm
from engine_driver import MEMORIES

import tiny_models

SECONDS = float(os.environ.get("FRAMESHARD_HOSTILE_S", "24"))
SEED = int(os.environ.get("FRAMESHARD_HOSTILE_SEED", "1"))
STUCK_S = 30.0 if "FRAMESHARD_HOSTILE_S" in os.environ else 600.0
"""The longest silence of a job, and the longest time of a fault, in seconds. They depend on the machine, which may be
busy with other tests."""

ARCHS = tuple(tiny_models.ARCHS) if "FRAMESHARD_HOSTILE_S" in os.environ else MEMORIES
RSS_MB = 8.0
FDS = 4

pytestmark = pytest.mark.timeout(SECONDS + 900)


def show(report: budgets.Report | fuzz.Report | storm.Report) -> None:
    print(json.dumps(dataclasses.asdict(report), indent=2))


@pytest.mark.parametrize("parallel", [1, 3])
def test_no_fault_loses_an_answer(tiny_model: Callable[[str], Path], encoder_path: Path, parallel: int) -> None:
    how = {"pause": 0.5, "parallel": parallel, "stuck_s": STUCK_S}
    report = trio.run(lambda: storm.storm(tiny_model("llama"), seconds=SECONDS / 3, seed=SEED, **how))
    show(report)
    assert report.problems == []
    assert report.answers > 0
    assert sum(report.faults.values()) > 0
    assert report.longest_silence_s < STUCK_S
    before, after = report.broker_rss_mb
    assert after < before + RSS_MB
    assert report.broker_fds[1] < report.broker_fds[0] + FDS


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_change_of_the_budget_takes_the_engine_down(
    arch: str, planned: bool, tiny_model: Callable[[str], Path]
) -> None:
    seconds = SECONDS / len(tiny_models.ARCHS) / 2
    how = {"parallel": 2, "planned": 1, "unit_kb": 2048} if planned else {}
    report = trio.run(lambda: budgets.rush(tiny_model(arch), seconds=seconds, seed=SEED, **how))
    show(report)
    assert report.problems == []
    assert report.ends
    assert report.budgets > 0


def test_no_budget_from_the_floor_of_the_load_on_is_refused_while_the_driver_grows(
    tiny_model: Callable[[str], Path],
) -> None:
    how = {"seconds": SECONDS / 3, "parallel": 2, "planned": 1, "driver_grows": 1}
    report = trio.run(lambda: budgets.rush(tiny_model("rwkv6"), seed=SEED, **how))
    show(report)
    assert report.problems == []
    assert report.budgets > 0


def test_no_message_takes_the_service_down(talking_model: Path, encoder_path: Path) -> None:
    report = trio.run(lambda: fuzz.fuzz(talking_model, seconds=SECONDS / 3, seed=SEED))
    show(report)
    assert report.problems == []
    assert report.changed == 0
    assert report.restarts == 0
    assert report.answers > 0
