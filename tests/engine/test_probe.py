"""Measured profiles. Each device is tested in a process of its own, because a process has one shard device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from frameshard import native
from frameshard.engine import probe
from frameshard.errors import BadArgument
from frameshard.plan import profile

PROBE = """
import json, sys
from frameshard import native
from frameshard.engine import probe
from frameshard.plan import profile
from frameshard.plan.model import read_model
probe._MEMORY_KIND = profile.Kind("F16", 2048, 2048)  # a smaller one, to be quick
device = native.ShardDevice("emulated:1", vram_budget_bytes=0, n_threads=1)
calls, profiles = [], []
for name in ("probe_machine", "probe_product", "probe_attention"):
    def counted(*args, name=name, probe=getattr(device, name), **options):
        calls.append(name)
        return probe(*args, **options)
    setattr(device, name, counted)
for path, refresh in zip(sys.argv[1:4], (False, False, True)):
    model = read_model(path)
    measurements = probe.Measurements(
        device, model, device_name="emulated:1", n_threads=1, refresh=refresh, seconds=0.5)
    profiles.append(measurements.run().to_dict())
    calls.append("next")
print(json.dumps({"calls": calls, "profiles": profiles}))
"""

REFUSED = """
from frameshard import errors, native
device = native.ShardDevice("emulated:1", vram_budget_bytes=64, n_threads=1)
for rows, cols, wanted in ((256, 33, errors.BadArgument), (256, 256, errors.OutOfMemory)):
    try:
        device.look(2, rows, cols)
    except wanted as error:
        print(error)
"""


def test_the_fingerprint_tells_machines_apart_and_not_models() -> None:
    base = probe.fingerprint("emulated:2", 2)
    others = [
        probe.fingerprint("emulated:2", 1),
        probe.fingerprint("emulated:3", 2),
        probe.fingerprint("CUDA0", 2),
    ]
    assert all(other != base for other in others)
    paths = {probe.cached_path(key) for key in (base, *others)}
    assert len(paths) == 4


def test_a_probe_that_cannot_measure_says_why() -> None:
    result = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=300, check=True)
    shape, room = result.stdout.splitlines()
    assert "no such shape" in shape
    assert "no room" in room


def test_measures_what_is_missing_and_all_when_told(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(tiny_model(name)) for name in ("llama", "qwen3moe", "llama")]  # with heads alike
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *paths], capture_output=True, text=True, timeout=300, check=True
    )
    document = json.loads(result.stdout)
    first, second, third = document["profiles"]
    calls = " ".join(document["calls"]).split("next")
    assert calls[0].count("probe_product") == len(first["products"]) > 0
    assert calls[0].count("probe_machine") == 1
    assert first["products"].keys() > {"F16 2048x2048"}  # for the rate of the memory
    assert second["products"].keys() > first["products"].keys()
    experts = [profile.parse_kind(name) for name in second["products"] if "/" in name]
    assert {(kind.n_used, kind.n_expert) for kind in experts} == {(4, 16)}
    assert all(min(second["products"][profile.kind_name(kind)]["gpu_flops"]) > 0 for kind in experts)
    assert calls[1].count("probe_product") == len(second["products"]) - len(first["products"])
    assert "probe_machine" not in calls[1]
    assert "probe_attention" not in calls[1]
    assert calls[2].split() == calls[0].split()
    assert first["fingerprint"] == third["fingerprint"]
    assert 0 < first["h2d"] < 1.1e9  # the link has 1 GB/s, and the machine may be busy
    kept = profile.load(probe.cached_path(first["fingerprint"]))
    assert kept.to_dict() == third


def test_a_device_name_with_rates() -> None:
    assert native.parse_device("emulated:25") == ("emulated", 25.0, 0.0)
    assert native.parse_device("emulated:25:3") == ("emulated", 25.0, 3.0)
    for name in ("emulated", "CUDA0", "auto", "stock:CUDA0"):
        assert native.parse_device(name) == (name, 0.0, 0.0)
    for name in (
        "emulated:",
        "emulated:fast",
        "emulated:0",
        "emulated:-1",
        "emulated:nan",
        "emulated:1e9",
        "emulated:25:0",
        "emulated:25:3:1",
    ):
        with pytest.raises(BadArgument, match="25e9 bytes/s"):
            native.parse_device(name)


MANY_THREADS = """
import sys
from frameshard import native
def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
device = native.ShardDevice("emulated", vram_budget_bytes=0, n_threads=24)
before = peak_kib()
rates = device.probe_machine(0.01)
print(list(rates.threads) == [1, 12, 24], min(rates.dram) > 0, (peak_kib() - before) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_the_memory_of_a_measurement_does_not_grow_with_the_threads() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, timeout=300, check=True)
    threads, measured, mib = done.stdout.split()
    assert (threads, measured) == ("True", "True")
    assert int(mib) < 1024 + 3 * 64  # the threads' part and the copies'; 24 parts of 64 MiB are 1,536


STREAM = """
import functools, json, sys
from frameshard.engine import probe, rates
from frameshard.engine.runtime import Runtime
from frameshard.plan import profile
from frameshard.wire.engine import EngineConfig
probe._MEMORY_KIND = profile.Kind("F16", 2048, 2048)  # a smaller one, to be quick
rates.Measurements = functools.partial(rates.Measurements, seconds=0.5)
config = EngineConfig(model=sys.argv[1], device="emulated:1", n_ctx=256, n_parallel=1, n_threads=1)
with Runtime.load(config) as runtime:
    device, placement = runtime.device, runtime.placement
    placement.mode = "stream_only"
    device.set_budget(device.stats().floor_bytes)
    placement.learn()
    placement.replan()
    before = device.stats()
    logits = runtime.decode_tokens(0, [3, 4, 5])
    stats = device.stats()
print(json.dumps({
    "path": stats.host_weights.name,
    "copied": stats.copied_bytes - before.copied_bytes,
    "staged": stats.staged_bytes - before.staged_bytes,
    "peak_is_within": stats.peak_bytes <= max(stats.full_bytes, stats.floor_bytes),
    "profile": placement.rates.profile.to_dict(),
    "logits": logits.tolist(),
}))
"""


def test_plans_use_the_rate_of_weights_that_cannot_be_pinned(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    documents = []
    for faults in ("", "unpinned=1", "unpinned=2"):
        monkeypatch.setenv("FRAMESHARD_FAULTS", faults)
        result = subprocess.run(
            [sys.executable, "-c", STREAM, path], capture_output=True, text=True, timeout=300, check=True
        )
        documents.append(json.loads(result.stdout))
    pinned, copied, staged = documents
    assert [document["path"] for document in documents] == ["DIRECT", "COPIED", "STAGED"]
    assert pinned["staged"] == copied["staged"] == 0
    assert copied["copied"] == pinned["copied"]
    assert copied["logits"] == pinned["logits"]
    assert copied["profile"]["fingerprint"] == pinned["profile"]["fingerprint"]
    assert staged["staged"] == staged["copied"] == pinned["copied"] > 0
    assert staged["logits"] == pinned["logits"]
    # Each way has a profile of its own, so neither is planned with the other's rates.
    assert staged["profile"]["fingerprint"] == {**pinned["profile"]["fingerprint"], "weights": "staged"}
    assert staged["profile"]["h2d"] == max(staged["profile"]["copies"]["h2d"])
    assert staged["profile"]["copies"]["h2d"] != staged["profile"]["copies"]["h2d_pinned"]
    assert len(list((tmp_path / "frameshard" / "profiles").glob("*.json"))) == 2


WHAT_IF = """
import sys, threading
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
config = EngineConfig(sys.argv[1], device="emulated:1", n_ctx=256, n_parallel=1, n_threads=1)
with Runtime.load(config, measure=False) as runtime:
    device, placement = runtime.device, runtime.placement
    stats, scratch = device.stats, set()
    def seen():
        found = stats()
        scratch.add(found.scratch_bytes)
        return found
    device.stats = seen
    budgets = device.stats().floor_bytes + (1 << 20), device.stats().full_bytes
    rows = [placement.what_if(budget, 64) for budget in budgets]
    assert all(row["fits"] for row in rows), rows
    ended = threading.Event()
    def measure():
        while not ended.is_set():
            device.probe_product(2, 2048, 2048, 0.2)
    thread = threading.Thread(target=measure)
    thread.start()
    try:
        while len(scratch) == 1:  # until a plan is made during a measurement
            found = [placement.what_if(budget, 64) for budget in budgets]
            assert found == rows, found
    finally:
        ended.set()
        thread.join()
"""


def test_a_plan_does_not_count_what_a_measurement_holds(deep_model: Path) -> None:
    """A host may ask what fits while the machine is measured in an idle moment."""
    command = [sys.executable, "-c", WHAT_IF, str(deep_model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
