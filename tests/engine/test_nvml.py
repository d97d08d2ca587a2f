"""The VRAM that the driver holds: how much of it is counted, and when."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frameshard.engine.nvml import NvmlObserver
from frameshard.engine.overhead import DRIVER_MARGIN, LOOKS, WINDOW_S, OverheadMeter

MIB = 1 << 20
STEP_S = WINDOW_S / LOOKS


def follow(overheads: list[int], counted: int) -> list[int]:
    """The counted overhead after each sample. The driver holds ``overheads`` beyond the ledger, which changes."""
    meter, found = OverheadMeter(), []
    for i, overhead in enumerate(overheads):
        ledger = (1000 + i % 7) * MIB
        told = meter.look(i * STEP_S, ledger + overhead, ledger, counted)
        if told is not None:
            counted = told
            meter.clear()
        found.append(counted)
    return found


def test_growth_is_counted_before_it_uses_up_the_margin() -> None:
    generator, held = random.Random(1), [700 * MIB]
    for _ in range(400):  # a first use of kernels takes up to half of the margin, with pauses between them
        held += [held[-1] + generator.randrange(DRIVER_MARGIN // 2)] * 20
    counted = follow(held, held[0] + DRIVER_MARGIN)
    assert all(true <= told for true, told in zip(held, counted, strict=True))
    assert counted[-1] <= held[-1] + DRIVER_MARGIN


def test_a_release_that_the_driver_counts_late_is_no_growth() -> None:
    counted = 700 * MIB + DRIVER_MARGIN
    late = [700 * MIB] * 20 + [1700 * MIB] * (LOOKS - 1) + [700 * MIB] * 20
    assert set(follow(late, counted)) == {counted}


def test_small_growth_changes_nothing() -> None:
    counted = 700 * MIB + DRIVER_MARGIN
    assert set(follow([700 * MIB] * 20 + [710 * MIB] * 50, counted)) == {counted}


START = """
import json, sys, time
from unittest import mock
from frameshard.engine.budgets import Budgets
from frameshard.engine.overhead import LOOKS, WINDOW_S, DriverOverhead
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor
from frameshard.wire.engine import EngineConfig, SetBudget

MIB = 1 << 20

class Observer:
    held = 300 * MIB  # by the driver

    def used(self):
        stats = runtime.device.stats()
        return stats.used_bytes - stats.overhead_bytes + self.held

def margin():
    stats = device.stats()
    return (stats.overhead_bytes - driver.held) / MIB if stats.used_bytes <= stats.budget_bytes else "above"

def decode():
    until, looks = time.monotonic() + 4 * WINDOW_S, 0
    while time.monotonic() < until or looks < 3 * LOOKS:
        looks += 1
        runtime.clear(0)
        try:
            runtime.decode_tokens(0, [300, 301, 302])
        except BudgetBelowFloor as error:
            return error.name
    return margin()

config = EngineConfig(sys.argv[1], device="emulated", n_ctx=512, n_ubatch=64, n_parallel=1, n_threads=1)
runtime = Runtime.load(config, measure=False)
device, driver, found = runtime.device, Observer(), []
overhead = runtime.placement.overhead = DriverOverhead(device, driver)
overhead.measure(ends_load=True)
floor_bytes = device.stats().floor_bytes
"""

GROWTH = f"""{START}
device.set_budget(floor_bytes, timeout_s=60)
for grown in (20, 66, 90):
    driver.held = (300 + grown) * MIB
    found.append(decode())
device.set_budget(0, timeout_s=60)
found.append(decode())
runtime.close()
print(json.dumps(found))
"""

BUDGETS = f"""{START}
link = mock.Mock()
served = Budgets(link, None, lambda: None)
served._host = mock.Mock(budget_bytes=0, observed_bytes=None)

def set_budget(bytes):
    served._carry_out(runtime, SetBudget(1, bytes, 60.0))
    answer = type(link.send.call_args_list[0].args[0]).__name__
    link.send.reset_mock()
    found.append((answer, margin()))

for grown in (0, 66, 90):
    driver.held = (300 + grown) * MIB
    overhead.measure()
    set_budget(floor_bytes - 1)
    set_budget(floor_bytes)
    set_budget(0)
runtime.close()
print(json.dumps(found))
"""


def margins(script: str, model: Path) -> Any:
    """What ``script`` prints: how much of the margin of the driver, in MiB, is left each time."""
    result = subprocess.run([sys.executable, "-c", script, str(model)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_budget_at_the_floor_is_enough_while_the_driver_takes_the_margin(tiny_model: Callable[[str], Path]) -> None:
    """The driver takes 20, 66 and 90 MiB of the margin, and then the budget grows."""
    assert margins(GROWTH, tiny_model("llama")) == [76, 30, "budget_below_floor", 96]


def test_the_floor_of_the_load_is_enough_after_the_driver_has_taken_the_margin(
    tiny_model: Callable[[str], Path],
) -> None:
    """The driver takes 0, 66 and 90 MiB while the budget has room for the whole margin. Then the game asks for a budget
    below that floor, for the floor, and for all VRAM."""
    refused, granted = "BudgetRefused", "BudgetGranted"
    assert margins(BUDGETS, tiny_model("llama")) == [
        *([refused, 96], [granted, 96], [granted, 96]),
        *([refused, 96], [granted, 30], [granted, 30]),
        *([refused, 96], [refused, 96], [granted, 96]),
    ]


class Driver:
    """A fake of NVML with one GPU and some processes, by id. ``unlisted`` bytes are in use by no listed process."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        self.processes: dict[int, int] = {}
        self.unlisted = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, _handle: int) -> SimpleNamespace:
        used = sum(self.processes.values()) + self.unlisted
        return SimpleNamespace(used=used, free=80_000 * MIB - used, total=80_000 * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:
        return []


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_what_the_card_lacks_beyond_its_processes_is_counted(driver: Driver) -> None:
    driver.processes, driver.unlisted = {7: 3000 * MIB}, 500 * MIB  # a game, and unlisted VRAM from before
    observer = NvmlObserver()
    assert observer.used() is None
    driver.processes[observer.pid] = 518 * MIB
    driver.unlisted += 37 * MIB
    assert observer.used() == (518 + 37) * MIB
    driver.processes[7] += 200 * MIB  # of the game
    driver.processes[observer.pid] += 100 * MIB
    assert observer.used() == (618 + 37) * MIB


def test_memory_that_somebody_else_took_meanwhile_is_not_counted(driver: Driver) -> None:
    observer = NvmlObserver()
    driver.processes[observer.pid] = 518 * MIB
    driver.unlisted = 4000 * MIB
    used = observer.used()
    assert used is not None
    assert used <= (518 + 128) * MIB
