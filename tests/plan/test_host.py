"""Plans with a host budget smaller than the model."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from frameshard.engine import diskprobe
from frameshard.errors import BadArgument, BudgetBelowFloor
from frameshard.native import CPU
from frameshard.plan.host import host_floor, host_share
from frameshard.plan.layout import lay_out
from frameshard.plan.model import read_model
from frameshard.plan.plans import make_plan
from frameshard.plan.profile import Profile, save
from frameshard.plan.routing import of_shares

MIB = 1 << 20
PLAIN = Profile({"device": "emulated"}, 2e9, 2e9, 9e9, 5e9, 2e10, 4e10, 8e10, 17e-6)
WITH_DISK = replace(PLAIN, disk={"read_bytes": [65536, 1048576], "rate": [2e8, 5e8]})


def test_less_host_memory_means_more_reads(model_path: Path) -> None:
    model = read_model(model_path)
    layout = lay_out(model, "emulated")
    plan = partial(make_plan, model, fixed_bytes=8 * MIB, budget_bytes=40 * MIB)
    floor = host_floor(layout, "emulated")
    budgets = [floor, *range(floor + MIB, model.file_bytes, 8 * MIB), 0]
    plans = [plan(WITH_DISK, host_budget_bytes=budget) for budget in budgets]
    read = [each.disk_bytes for each in plans]
    assert read == sorted(read, reverse=True)
    assert read[0] > model.file_bytes / 3
    assert read[-1] == 0
    assert plans[-1] == plan(PLAIN)
    for each in plans:
        assert each.predicted_decode_s() >= each.disk_bytes / 5e8
        assert each.predicted_decode_tps() <= each.bound_decode_tps() * 1.000001
    n_bytes = np.array([shard.n_bytes for shard in layout.ladder])
    held = [round(float(layout.resident_share(n) @ n_bytes)) for n in range(len(layout.sizes.slabs) + 1)]
    for budget in budgets:
        # What is resident in VRAM or on the CPU is not read.
        n_slabs = len(layout.sizes.slabs) // 3
        share = host_share(layout, "emulated", n_slabs, budget).read
        assert (share <= 1 - layout.resident_share(n_slabs) + 1e-9).all()
        tier = plan(WITH_DISK, host_budget_bytes=budget).tiers[0]
        from_disk = host_share(layout, "emulated", held.index(tier.resident_bytes), budget).read > 0
        on_cpu = np.array(tier.placements) == CPU
        assert tier.cpu_bytes <= n_bytes[on_cpu & ~from_disk].sum()
    with pytest.raises(BudgetBelowFloor) as error:
        plan(WITH_DISK, host_budget_bytes=floor - 1)
    assert error.value.detail["floor_bytes"] == floor
    with pytest.raises(BadArgument, match="frameshard profile"):
        plan(PLAIN, host_budget_bytes=floor)


def test_experts_that_are_used_less_come_from_disk(moe_path: Path) -> None:
    model = read_model(moe_path)
    layout = lay_out(model, "emulated")
    experts = sum(shard.n_bytes for shard in layout.ladder if shard.kind == "experts")
    floor = host_floor(layout, "emulated")
    assert floor < experts / 2
    least = host_share(layout, "emulated", 0, floor)
    assert least.read.max() == 1
    assert all(least.read[i] == 0 for i, shard in enumerate(layout.ladder) if shard.kind == "experts")
    plan = partial(make_plan, model, WITH_DISK, fixed_bytes=8 * MIB, budget_bytes=40 * MIB)
    budgets = [floor, *range(floor + MIB, model.file_bytes, 16 * MIB), 0]
    plans = [plan(host_budget_bytes=budget) for budget in budgets]
    read = [each.disk_bytes for each in plans]
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0
    active = sum(shard.active_bytes for shard in layout.ladder)
    assert 0.7 * active < read[0] < active  # a token uses a quarter of the experts
    for each in plans:
        assert each.predicted_decode_s() >= each.disk_bytes / 5e8
        assert each.predicted_decode_tps() <= each.bound_decode_tps() * 1.000001
    # Some choices of a router are more frequent: these experts stay in host memory.
    even = plan(host_budget_bytes=model.file_bytes // 2)
    often = of_shares([(0.4, 0.3, 0.2, 0.02, 0.02, 0.02, 0.02, 0.02)], model.n_expert_used)
    favourites = plan(host_budget_bytes=model.file_bytes // 2, routing=often)
    assert favourites.disk_bytes < 0.6 * even.disk_bytes


def test_the_command_line_takes_a_host_budget(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(WITH_DISK, path)
    command = [sys.executable, "-m", "frameshard", "plan", "--model", str(model_path), "--profile", str(path)]
    command += ["--vram-budget", "full,floor", "--ctx", "512", "--parallel", "1", "--host-budget", "40", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    full, small = json.loads(result.stdout)["rows"]
    assert full["disk_bytes"] == 0
    assert small["disk_bytes"] > 0
    assert small["predicted_decode_tps"] < full["predicted_decode_tps"]


def test_both_budgets_are_drawn(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path, picture = tmp_path / "profile.json", tmp_path / "surface.svg"
    save(WITH_DISK, path)
    command = [sys.executable, "-m", "frameshard", "plan", "--model", str(tiny_model("llama")), "--profile", str(path)]
    command += ["--vram-budget", "9", "--ctx", "512", "--parallel", "1", "--host-budget", "4", "--plot", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "planning with" in result.stderr  # it takes some seconds
    drawn = picture.read_text()
    assert "host memory for weights" in drawn
    assert "VRAM budget" in drawn


@pytest.mark.skipif(sys.platform != "linux", reason="direct reads are measured on Linux alone")
def test_the_disk_is_measured(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = diskprobe.measure(model_path, 0.4)
    assert rates["read_bytes"] == [float(size) for size in diskprobe.READ_BYTES]
    assert min(rates["rate"]) > 0
    assert max(diskprobe.measure(model_path, 0.2, most_gbps=0.001)["rate"]) <= 1e6
    small = tmp_path / "small"
    small.write_bytes(b"x" * (100 * mmap.PAGESIZE))
    assert diskprobe.measure(small, 0.2).get("read_bytes", []) in ([65536.0, 262144.0], [])
    assert diskprobe.measure(tmp_path / "none", 0.2) == {}
    first, second = (tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2))
    first.write_bytes(b"no weights")
    second.write_bytes(bytes(diskprobe.READ_BYTES[-1]))
    measured = []
    monkeypatch.setattr(diskprobe, "measure", lambda path, most_gbps: measured.append(path) or {})
    assert diskprobe.measure_model(first, "emulated") == {}
    assert measured == [second]
    second.unlink()
    assert diskprobe.measure_model(first, "emulated") == {}
    assert measured == [second]
    assert replace(PLAIN, disk=rates).disk_rate(1 << 20) == pytest.approx(rates["rate"][2])


@pytest.mark.parametrize(
    ("sizes", "rates"),
    [([], []), ([4096.0], []), ([8192.0, 4096.0], [1e9, 2e9]), ([4096.0] * 2, [1e9] * 2), ([0.5], [1e9])]
    + [([4096.0], [rate]) for rate in (0.0, -1e9, float("nan"), float("inf"))],
)
def test_kept_rates_that_make_no_sense_are_not_used(
    sizes: list[float], rates: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such rates in its profile no model on this disk would load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    diskprobe.keep(model, "emulated", WITH_DISK.disk)
    assert diskprobe.recall(model, "emulated") == WITH_DISK.disk
    diskprobe.keep(model, "emulated", {"read_bytes": sizes, "rate": rates})
    assert diskprobe.recall(model, "emulated") == {}


@pytest.mark.skipif(sys.platform != "linux", reason="direct reads are measured on Linux alone")
def test_a_file_that_becomes_shorter_ends_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(b"")
    monkeypatch.setattr(os, "fstat", lambda _: mock.Mock(st_size=64 << 20))  # before it was cut
    assert diskprobe.measure(cut, 0.2) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="direct reads are measured on Linux alone")
def test_rates_are_kept_for_each_disk(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def rates_of(device: str) -> list[float]:
        command = [sys.executable, "-m", "frameshard", "profile", "--json", "--seconds", "0.5", "--threads", "1"]
        command += ["--model", str(model_path), "--device", device]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        rates: list[float] = json.loads(result.stdout)["disk"]["rate"]
        return rates

    slow, other, again = map(rates_of, ("emulated:1:0.001", "emulated:1", "emulated:1:0.001"))
    assert max(slow) <= 1e6 < min(other)
    assert again == slow  # not measured again
    assert diskprobe.recall(model_path, "emulated:25:0.001")["rate"] == slow
    assert diskprobe.recall(model_path, "emulated:1:0.002") == {}
    monkeypatch.setattr(os, "statvfs", lambda _: mock.Mock(f_fsid=7))  # another disk has got the number
    assert diskprobe.recall(model_path, "emulated:1") == {}
