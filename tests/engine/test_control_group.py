"""The memory of a control group: played directories, and a real group where this process may make one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from frameshard.engine import controlgroup, hostcount

MIB = 1 << 20
UNLIMITED = 0x7FFFFFFFFFFFF000
TOTAL = 16 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine of 16 GiB with 9 GiB available."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "pressure").mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {9 << 20} kB\n")
    (proc / "pressure" / "memory").write_text("some avg10=3.00 avg60=0.00 avg300=0.00 total=0\n")
    return proc


def v2(at: Path, *, limit: str, used_mb: int, cached_mb: int = 0, stalled: float = 0.0) -> None:
    at.mkdir(parents=True, exist_ok=True)
    (at / "memory.max").write_text(f"{limit}\n")
    (at / "memory.high").write_text("max\n")
    (at / "memory.current").write_text(f"{used_mb * MIB}\n")
    (at / "memory.stat").write_text(f"anon 5\nactive_file {cached_mb * MIB}\ninactive_file 0\n")
    (at / "memory.pressure").write_text(f"some avg10={stalled:.2f} avg60=0.00 avg300=0.00 total=0\n")


def v1(at: Path, *, limit_bytes: int, used_mb: int, cached_mb: int = 0) -> None:
    at.mkdir(parents=True, exist_ok=True)
    (at / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
    (at / "memory.usage_in_bytes").write_text(f"{used_mb * MIB}\n")
    (at / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {cached_mb * MIB}\ntotal_active_file 0\n")


def test_a_machine_without_groups(proc: Path, tmp_path: Path) -> None:
    machine = hostcount.machine(proc, tmp_path / "nothing")
    assert machine == hostcount.Machine(TOTAL, 9 << 30, 3.0, "the machine")


def test_the_tightest_group_around_the_process_counts(proc: Path, tmp_path: Path) -> None:
    """A group of a unit without a limit of its own, in a slice that has one."""
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("0::/game.slice/game.service\n")
    v2(groups / "game.slice" / "game.service", limit="max", used_mb=500)
    v2(groups / "game.slice", limit=str(2048 * MIB), used_mb=1500, cached_mb=300, stalled=40.0)
    machine = hostcount.machine(proc, groups)
    assert machine == hostcount.Machine(2048 * MIB, 848 * MIB, 40.0, "the control group")
    (groups / "game.slice" / "memory.high").write_text(f"{1024 * MIB}\n")
    machine = hostcount.machine(proc, groups)
    assert machine == hostcount.Machine(1024 * MIB, 0, 40.0, "the control group")
    v2(groups / "game.slice", limit=str(12 << 30), used_mb=1500)
    machine = hostcount.machine(proc, groups)
    assert machine == hostcount.Machine(TOTAL, 9 << 30, 3.0, "the machine"), "the machine has less available"


@pytest.mark.parametrize("line", ["0::/", "0::/../../game.slice", "0::/kubepods/pod1/abc"])
def test_a_container_sees_its_group_as_the_root(proc: Path, tmp_path: Path, line: str) -> None:
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text(f"1:name=systemd:/\n{line}\n")
    v2(groups, limit=str(1024 * MIB), used_mb=1000, cached_mb=100)
    machine = hostcount.machine(proc, groups)
    assert machine == hostcount.Machine(1024 * MIB, 124 * MIB, 3.0, "the control group")


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_groups_of_version_1(proc: Path, tmp_path: Path, controllers: str) -> None:
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text(f"7:cpuset:/\n4:{controllers}:/docker/abc\n0::/\n")
    v1(groups / controllers, limit_bytes=UNLIMITED, used_mb=3000)
    v1(groups / controllers / "docker" / "abc", limit_bytes=1024 * MIB, used_mb=1000, cached_mb=500)
    machine = hostcount.machine(proc, groups)
    assert machine == hostcount.Machine(1024 * MIB, 524 * MIB, 3.0, "the control group")


@contextlib.contextmanager
def real_group(limit_bytes: int) -> Iterator[Path]:
    version_1 = (controlgroup.MOUNT / "memory").is_dir()
    at = controlgroup.MOUNT / ("memory" if version_1 else "") / f"frameshard-test-{os.getpid()}"
    try:
        at.mkdir()
    except OSError:
        pytest.skip("this process may not make a control group")
    try:
        try:
            (at / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit_bytes))
        except OSError:
            pytest.skip("the group has no limit for memory")
        yield at
    finally:
        at.rmdir()


PROGRAM = """
import pathlib, sys
from frameshard.engine import hostcount
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
held = bytearray(b"x" * (64 << 20))
machine = hostcount.machine()
print(machine.total_bytes, machine.available_bytes, machine.of)
"""


def test_a_real_group() -> None:
    limit_bytes = 512 * MIB
    with real_group(limit_bytes) as group:
        shown = subprocess.run([sys.executable, "-c", PROGRAM, str(group)], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    total, available, of = shown.stdout.split(maxsplit=2)
    assert (int(total), of) == (limit_bytes, "the control group\n")
    assert limit_bytes // 2 < int(available) <= limit_bytes - 64 * MIB
