"""Weights that do not fit the host budget come from the disk, on the emulated device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can replace pages of a mapping")

HEAD = """
import ctypes, json, mmap, os, sys, threading, time
import numpy as np
from frameshard.engine import hostcount
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor, FrameshardError
from frameshard.wire.engine import EngineConfig

MIB = 1 << 20
path = sys.argv[1]
file_bytes = os.path.getsize(path)
# Under a limit each graph of the mixture of experts reads a hundred megabytes, so a few graphs have to do.
tokens = [300 + 7 * i % 700 for i in range(80 if file_bytes < 100 * MIB else 68)]

def load(mode="stream_only", device="emulated", **options):
    return Runtime.load(EngineConfig(
        model=path, device=device, n_ctx=256, n_ubatch=64, n_parallel=1, n_threads=1, mode=mode,
        vram_budget_bytes=(10 if file_bytes < 64 * MIB else 48) * MIB, **options))

def decode(runtime):
    runtime.clear(0)
    return np.concatenate([runtime.decode_tokens(0, part) for part in (tokens[:64], *([each] for each in tokens[64:]))])

def cached_bytes():
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        there = (ctypes.c_ubyte * (-(-file_bytes // mmap.PAGESIZE)))()
        address = np.frombuffer(pages, np.uint8)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address.ctypes.data), ctypes.c_size_t(file_bytes), there) == 0
        del address
        return sum(each & 1 for each in there) * mmap.PAGESIZE

class Sampler(threading.Thread):
    def __init__(self, device):
        super().__init__(daemon=True)
        self.device, self.most, self.n, self.over = device, 0, 0, False
    def run(self):
        while not self.over:
            self.most = max(self.most, self.device.stats().host_used_bytes)
            self.n += 1
            time.sleep(0.001)
    def stop(self):
        self.over = True
        self.join()
        return self.most
"""

CAPS = """
with load() as runtime:
    device = runtime.device
    expected = decode(runtime)
    whole = device.stats()
    found = []
    for percent in (75, 50, 25):
        cap = file_bytes * percent // 100
        device.set_host_budget(cap)
        sampler = Sampler(device)
        sampler.start()
        before = device.stats()
        same = [bool((decode(runtime) == expected).all()) for _ in range(2)]
        after, most = device.stats(), sampler.stop()
        read = after.disk_read_bytes - before.disk_read_bytes
        found.append([cap, most, read, same, cached_bytes(), after.host_floor_bytes])
    device.set_host_budget(0)
    while device.stats().host_used_bytes < file_bytes // 2:  # it grows by and by
        decode(runtime)
    grown = bool((decode(runtime) == expected).all())
    print(json.dumps([whole.host_used_bytes, whole.disk_read_bytes, found, grown]))
"""

CHANGES = """
with load() as runtime:
    device = runtime.device
    expected = decode(runtime)
    least = device.stats().host_floor_bytes
    try:
        device.set_host_budget(least - 1)
        refused = 0
    except BudgetBelowFloor as error:
        refused = error.detail["floor_bytes"]
    took, over, done = [], [], False
    def change():
        random = np.random.default_rng(3)
        while not done:
            cap = int(random.integers(least + 2 * MIB, file_bytes))
            start = time.monotonic()
            device.set_host_budget(cap, 60)
            took.append(time.monotonic() - start)
            over.append(device.stats().host_used_bytes > cap)
    thread = threading.Thread(target=change)
    thread.start()
    same = [bool((decode(runtime) == expected).all()) for _ in range(4 if file_bytes < 100 * MIB else 1)]
    done = True
    thread.join()
    print(json.dumps([least, refused, same, len(took), sum(over)]))
"""

PLANNED = """
with load("planned") as runtime:
    device = runtime.device
    expected = decode(runtime)
    device.set_host_budget(file_bytes // 2)
    near = float(np.abs(decode(runtime) - expected).max())
    os.truncate(path, file_bytes // 2)
    try:
        decode(runtime)
        why = ""
    except FrameshardError as error:
        why = str(error)
    print(json.dumps([near, device.stats().disk_read_bytes, why]))
"""

LOADED = """
def drop():
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

drop()
cap, most = file_bytes // 2, []
with load(host_budget_bytes=cap + hostcount.process_bytes(os.getpid())) as runtime:
    most.append(runtime.device.stats().host_used_bytes)
    touched, read = cached_bytes(), runtime.device.stats().disk_read_bytes
    limited = decode(runtime)
    most.append(runtime.device.stats().host_used_bytes)
    runtime.device.set_host_budget(0)
drop()
print(json.dumps([cap, max(most), touched, read, bool(np.isfinite(limited).all()), limited[:, :64].tolist()]))
"""

UNLIMITED = """
with load() as runtime:
    print(json.dumps([cached_bytes(), decode(runtime)[:, :64].tolist()]))
"""

REFUSED = """
with load(host_budget_bytes=MIB) as runtime:  # the engine refuses it, with what all of the sidecar needs
    print(json.dumps([runtime.device.stats().host_budget_bytes, len(decode(runtime))]))
"""

IN_MEMORY = """
with load() as runtime:
    device = runtime.device
    floor = device.stats().host_floor_bytes
    device.set_host_budget(floor)
    try:
        device.set_host_budget(floor - 1)
        refused = 0
    except BudgetBelowFloor as error:
        refused = error.detail["floor_bytes"]
    decode(runtime)
    print(json.dumps([floor, refused, device.stats().disk_read_bytes]))
"""

MEASURED = """
import queue
from dataclasses import replace
from frameshard.engine import idle

commands = queue.SimpleQueue()
replans = []
with load("planned", "emulated:2:0.1") as runtime:
    placement = runtime.placement
    rates = placement.rates
    rates._profile = replace(rates.profile, disk={})  # as on a machine that was never profiled
    disk = idle.IdleDisk(rates, commands.put, lambda: replans.append(1))
    work = idle.Idle(idle.IdleProfile(runtime, lambda: None), disk, lambda: False)
    found = [disk.due_in() is None]  # without a limit plans do not need it
    runtime.device.set_host_budget(file_bytes // 2)
    placement.replan()
    before = placement.plan.predicted_decode_tps()
    for disturbed in (True, False):
        while (due_in := disk.due_in()) is not None:  # until the thread has begun
            time.sleep(due_in)
            work.work()
        found.append(work.due_in() is None)  # nothing else is measured meanwhile
        if disturbed:
            disk.disturb()
        take = commands.get(timeout=60)
        faster = replace(rates.profile, h2d=rates.profile.h2d * 2)
        rates.adopt_profile(faster)  # the main thread has taken the other measurements first
        take()
        found.append(len(replans) == (0 if disturbed else 1))
        found.append(rates.profile.h2d == faster.h2d)
        found.append(bool(rates.profile.disk) == (not disturbed))
    placement.replan()
    found.append(placement.plan.predicted_decode_tps() < before)
    found.append(disk.due_in() is None)
    print(json.dumps([found, max(rates.profile.disk["rate"])]))
"""

REMOVED = """
import queue
from dataclasses import replace
from frameshard.engine import idle

commands = queue.SimpleQueue()
with load("planned", "emulated:2:0.1") as runtime:
    rates = runtime.placement.rates
    rates._profile = replace(rates.profile, disk={})  # as on a machine that was never profiled
    disk = idle.IdleDisk(rates, commands.put, lambda: None)
    runtime.device.set_host_budget(file_bytes // 2)
    os.unlink(path)
    while not disk.running:
        time.sleep(disk.due_in())
        disk.work()
    commands.get(timeout=60)()
    print(json.dumps([disk.running, rates.profile.disk, rates.lacks_disk, bool(np.isfinite(decode(runtime)).all())]))
"""

COUNTED = """
from frameshard.engine import hostcount, hostmemory
from frameshard.engine.kvstore import KvStore

with load() as runtime:
    host = hostmemory.HostMemory(runtime, KvStore(0))
    host.measure()
    before = host.parts().processes_bytes
    real, caps = hostcount.own, [file_bytes // 2, file_bytes // 4]

    def own(*args, **options):
        found = real(*args, **options)
        runtime.device.set_host_budget(caps.pop(0))  # weights are dropped while the system is asked
        return found

    hostcount.own = own
    host.measure()
    hostcount.own = real
    during = host.parts().processes_bytes
    host.measure()
    print(json.dumps([before, during, host.parts().processes_bytes, len(caps)]))
"""

OTHERS = """
import subprocess
from frameshard.engine import hostmemory
from frameshard.engine.kvstore import KvStore

with load() as runtime:
    host = hostmemory.HostMemory(runtime, KvStore(0))
    os.sync()  # pages that were just written stay
    runtime.device.set_host_budget(file_bytes // 2)
    decode(runtime)
    host.measure()
    before = host.parts().processes_bytes
    subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)  # as a backup does
    read = cached_bytes()
    host.measure()
    after, left, observed = host.parts().processes_bytes, cached_bytes(), host.observed_bytes
    hostcount.ModelPages.cached_bytes = lambda self: None  # as of a file that another user owns
    subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    host.measure()
    print(json.dumps([before, read, after, left, observed, host.parts().processes_bytes, host.observed_bytes]))
"""

UNTOLD = """
pages = hostcount.ModelPages(path)
told = pages.cached_bytes()
pages.forget()
forgotten = pages.cached_bytes()
os.seteuid(65534)
print(json.dumps([told, forgotten, hostcount.ModelPages(path).cached_bytes()]))
"""


def run(script: str, model: Path) -> Any:
    command = [sys.executable, "-c", HEAD + script, str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.fixture(params=["own_deep_model", "own_shallow_moe"])
def any_model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_the_cap_is_kept_and_the_text_is_the_same(any_model: Path) -> None:
    file_bytes = any_model.stat().st_size
    whole, read_before, found, grown = run(CAPS, any_model)
    assert whole >= file_bytes * 0.9
    assert read_before == 0
    reads = []
    for cap, most, read, same, cached, floor in found:
        assert floor <= most <= cap
        assert same == [True, True]
        assert cached <= 8 << 20  # some rows of the embedding
        reads.append(read)
    assert reads == sorted(reads)
    assert reads[0] > 0
    assert grown


def test_a_load_under_a_cap_does_not_read_the_file(any_model: Path) -> None:
    file_bytes = any_model.stat().st_size
    cap, most, touched, read, sound, limited = run(LOADED, any_model)
    assert most <= cap
    assert touched < 8 << 20
    assert read < 1.5 * file_bytes
    assert sound
    whole, unlimited = run(UNLIMITED, any_model)
    assert whole > 0.9 * file_bytes
    assert limited == unlimited


def test_a_cap_below_the_floor_does_not_end_the_load(own_model: Path) -> None:
    budget, n_rows = run(REFUSED, own_model)
    assert budget == 0
    assert n_rows == 17


def test_the_cap_changes_during_decodes(any_model: Path) -> None:
    least, refused, same, n_changes, n_over = run(CHANGES, any_model)
    assert refused == least
    assert set(same) == {True}
    assert n_changes > 5
    assert n_over == 0


def test_planned_weights_come_from_disk_and_a_changed_file_is_noticed(any_model: Path) -> None:
    near, read, why = run(PLANNED, any_model)
    assert near < 0.5
    assert read > 0
    assert "was changed while it was in use" in why


def test_a_file_in_memory_is_needed_whole(own_deep_model: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        copy = Path(shutil.copy(own_deep_model, directory))
        floor, refused, read = run(IN_MEMORY, copy)
        assert floor == refused
        assert floor >= copy.stat().st_size * 0.9  # the header is not mapped
        assert read == 0


def test_a_thread_measures_the_disk_in_an_idle_moment(own_deep_model: Path) -> None:
    found, rate = run(MEASURED, own_deep_model)
    assert found == [True] * 11
    assert rate <= 0.1e9


def test_idle_moments_go_on_when_the_model_file_is_removed(own_deep_model: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        assert run(REMOVED, Path(shutil.copy(own_deep_model, directory))) == [False, {}, False, True]


def test_weights_that_are_dropped_meanwhile_do_not_count_as_the_processes(own_deep_model: Path) -> None:
    before, during, after, n_left = run(COUNTED, own_deep_model)
    assert n_left == 0
    assert max(during, after) < before + (8 << 20)


def test_what_another_program_reads_of_the_file_does_not_count_as_the_processes(own_deep_model: Path) -> None:
    file_bytes = own_deep_model.stat().st_size
    before, read, after, left, observed, untold, untold_observed = run(OTHERS, own_deep_model)
    assert read > 0.9 * file_bytes
    assert left < 8 << 20  # some rows of the embedding
    assert max(after, untold) < before + (8 << 20)
    assert abs(untold_observed - observed) < 8 << 20


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")
def test_pages_of_a_file_that_another_user_owns_are_not_known() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        Path(directory).chmod(0o755)
        file = Path(directory) / "model.gguf"
        file.write_bytes(bytes(4 << 20))
        file.chmod(0o644)
        os.sync()
        told, forgotten, untold = run(UNTOLD, file)
    assert (told, forgotten) == (4 << 20, 0)
    assert untold is None
