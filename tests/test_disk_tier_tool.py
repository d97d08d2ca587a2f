"""profiles/tools/disk_tier.py measures weights from the disk, and llama.cpp beside them."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from frameshard.engine import hostcount

TOOL = Path(__file__).parents[1] / "profiles" / "tools" / "disk_tier.py"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is counted on Linux")


def test_a_text_that_changes_its_experts_is_read_from_disk(own_moe: Path) -> None:
    command = [sys.executable, str(TOOL), str(own_moe), "--device", "emulated", "--threads", "1", "--link", "10"]
    command += ["--vram-budget", "120MiB", "--host-budget", "300MiB", "--cold", "300MiB", "--generate", "6", "--vs"]
    command += ["--settle", "5", "--vs-most", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["same_text"]
    whole, limited = result["rows"]
    assert whole["read_bytes_per_token"] == 0
    assert limited["read_bytes_per_token"] > 0
    assert 0 < limited["host_hit_rate"] < 1
    assert limited["of_disk_bound"] > 0
    assert max(limited["most_used_bytes"], limited["most_observed_bytes"]) <= 300 * MIB
    (cold,) = result["cold"]
    assert cold["cached_bytes_before"] < MIB
    assert 0 < cold["ready_s"] < cold["first_token_s"]
    # Where no memory cgroup can be made, the row says so.
    for beside in (limited["llama"], cold["llama"]):
        assert beside["first_token_s"] > 0 if "why" not in beside else "cgroup" in beside["why"]
    if os.access("/sys/fs/cgroup/memory", os.W_OK):
        assert "why" not in cold["llama"]


@pytest.fixture
def mapped_llama(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOL.parent)
    return importlib.import_module("mapped_llama")


def test_memory_beyond_a_limit_is_held(mapped_llama: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 1 GiB available, of which no other process takes any."""
    read = 'pathlib.Path("/proc/meminfo").read_text()'
    assert read in mapped_llama.HOLDER
    played = '"MemAvailable: %d kB" % ((1 << 20) - sum(map(len, held)) // 1024)'
    monkeypatch.setattr(mapped_llama, "HOLDER", mapped_llama.HOLDER.replace(read, played))
    with mapped_llama.memory_left(624 * MIB) as holder:
        assert 399 * MIB < hostcount.process_bytes(holder) < 500 * MIB


def test_the_end_of_the_holder_is_noticed(mapped_llama: ModuleType) -> None:
    machine = hostcount.machine()
    assert machine is not None

    def ended() -> None:
        with mapped_llama.memory_left(machine.total_bytes) as holder:
            os.kill(holder, signal.SIGKILL)
            os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)

    with pytest.raises(OSError, match="was ended"):
        ended()
