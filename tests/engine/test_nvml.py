"""The VRAM that the driver holds: how much of it is counted, and when."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

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
