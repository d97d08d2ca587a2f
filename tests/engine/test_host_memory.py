"""Host memory with real processes: its parts, the limit, shrinks while jobs run, and a machine short of memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

import frameshard
from frameshard import program
from frameshard.engine import hostcount, hostmemory
from frameshard.engine.budgets import Budgets
from frameshard.engine.hostmemory import SPARE_BYTES, HostMemory, share
from frameshard.engine.kvstore import Blob, KvStore
from frameshard.engine.pressure import Pressure
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor
from frameshard.wire.engine import BudgetObserved, EngineConfig, SetBudget
from sidecars import DEADLINE_S

MIB = 1 << 20
VRAM_MB = 50
FEW = frameshard.Sampling(max_tokens=12, temperature=0.0)
LORE = "The inn stands by the old harbour, and its keeper knows every ship that has come in since the flood. "
PARTS = ("weights_bytes", "pinned_bytes", "kv_blocks_bytes", "kv_store_bytes", "processes_bytes")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="host memory is counted on Linux")


def play(model: Path, main: Callable[[frameshard.Client], Awaitable[None]], **options: Any) -> None:
    options = {
        "device": "emulated",
        "vram_budget_mb": VRAM_MB,
        "n_ctx": 1024,
        "n_parallel": 1,
        "n_threads": 1,
        "mode": "stream_only",
        **options,
    }

    async def bounded() -> None:
        with trio.fail_after(900):
            async with frameshard.launch(model, log=subprocess.DEVNULL, **options) as client:
                await main(client)

    trio.run(bounded)


async def figures(client: frameshard.Client) -> dict[str, Any]:
    engine = (await client.stats()).engine
    assert engine is not None
    host: dict[str, Any] = engine["host"]
    return host


async def talk(client: frameshard.Client, n_turns: int, n_words: int = 5) -> list[str]:
    """Three conversations that take turns in one sequence, so that each of them is copied to the KV store."""
    texts = []
    for turn in range(n_turns):
        for name in ("innkeeper", "fisher", "smith"):
            said = f"{name} {turn}: {LORE * n_words}" if turn == 0 else f"And then, {name}?"
            texts.append((await client.ask(said, conversation=name, sampling=FEW).completed()).text)
    return texts


def test_the_parts_add_up_to_what_the_system_counts(shallow_model: Path) -> None:
    async def main(client: frameshard.Client) -> None:
        await talk(client, 1)
        # Without a limit, measurements may be a minute apart.
        await client.set_budget(VRAM_MB, host_budget_mb=8192, timeout_s=60)
        while True:  # until the jobs' memory has been measured
            host = await figures(client)
            if host["kv_store_bytes"] and abs(host["observed_bytes"] - host["used_bytes"]) < 8 * MIB:
                break
            await trio.sleep(0.1)
        await client.set_budget(VRAM_MB, host_budget_mb=0, timeout_s=60)
        host = await figures(client)
        assert sum(host[part] for part in PARTS) == host["used_bytes"]
        assert abs(host["weights_bytes"] - shallow_model.stat().st_size) < 8 * MIB
        assert host["processes_bytes"] < 400 * MIB  # without the emulated device's VRAM, and broker and engine once
        assert host["budget_bytes"] == host["pressed_bytes"] == 0
        budget = await client.budget()
        assert budget.host_floor_bytes >= host["weights_bytes"] + SPARE_BYTES
        caps = await client.caps_and_requirements()
        assert caps.host_total_bytes is not None
        assert caps.host_free_bytes is not None
        assert 0 < caps.host_free_bytes < caps.host_total_bytes

    play(shallow_model, main)


@pytest.mark.parametrize("named", ["itself", "by a link", "otherwise since"])
def test_all_files_of_a_model_are_counted_apart(tmp_path: Path, named: str) -> None:
    first, second = (tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2))
    for path in (first, second):
        path.write_bytes(bytes(4 * MIB))
        if named == "by a link":  # as in the cache of the Hugging Face hub
            path.rename(path.with_suffix(".blob"))
            path.symlink_to(path.with_suffix(".blob"))
    pages = hostcount.ModelPages(str(first))
    if named == "otherwise since":
        second = second.rename(tmp_path / "renamed")
    before = hostcount.own(pages, emulated=False)
    with open(second, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not any(mapped[:: mmap.PAGESIZE])
        after = hostcount.own(pages, emulated=False)
    assert (before.mapped_bytes, after.mapped_bytes) == (0, 4 * MIB)
    assert after.bytes < before.bytes + 2 * MIB
    assert pages.cached_bytes() in (8 * MIB, None)
    os.sync()  # pages that were just written stay
    pages.forget()
    assert pages.cached_bytes() in (0, None)


def test_a_limit_below_the_floor_is_refused_and_changes_nothing(shallow_model: Path) -> None:
    async def main(client: frameshard.Client) -> None:
        before = await client.budget()
        with pytest.raises(BudgetBelowFloor, match="set host_budget_mb to") as below:
            await client.set_budget(VRAM_MB - 10, host_budget_mb=50)
        assert below.value.detail["host_floor_bytes"] > 50 * MIB
        after = await client.budget()
        assert (after.vram_budget_bytes, after.host_budget_bytes) == (before.vram_budget_bytes, 0)
        # The other budget's floor: the host budget stays.
        with pytest.raises(BudgetBelowFloor) as below:
            await client.set_budget(1, host_budget_mb=4096)
        assert "host_floor_bytes" not in below.value.detail
        assert (await client.budget()).host_budget_bytes == 0

    play(shallow_model, main)
    with pytest.raises(BudgetBelowFloor, match="host budget"):
        play(shallow_model, main, host_budget_mb=60)


def test_blocks_that_a_change_of_vram_moves_must_have_room_in_the_limit(model_path: Path) -> None:
    """The whole conversation is in VRAM. A limit for host memory without room for it does not let it move there."""

    async def main(client: frameshard.Client) -> None:
        await client.ask(LORE * 60, conversation="innkeeper", sampling=FEW).completed()
        budget = await client.budget()
        least_mb, wide_mb = budget.floor_bytes / MIB + 1, budget.vram_budget_bytes / MIB
        low_mb = budget.host_floor_bytes / MIB + 4
        await client.set_budget(wide_mb, host_budget_mb=low_mb, timeout_s=60)
        needed = 0
        for asked in ({"vram_budget_mb": least_mb}, {"vram_budget_mb": wide_mb, "state": "parked"}):
            with pytest.raises(BudgetBelowFloor) as below:
                await client.set_budget(**asked, timeout_s=60)
            needed = below.value.detail["host_floor_bytes"]
            assert needed > low_mb * MIB
            after = await client.budget()
            assert (after.vram_budget_bytes, after.state) == (budget.vram_budget_bytes, "active")
            assert after.host_used_bytes <= after.host_budget_bytes == int(low_mb * MIB)
        # With room for them both are possible, and the limit holds.
        for asked in ({"vram_budget_mb": least_mb}, {"vram_budget_mb": wide_mb, "state": "parked"}):
            released = await client.set_budget(**asked, host_budget_mb=needed / MIB + 16, timeout_s=60)
            assert released.host_used_bytes <= released.host_budget_bytes
            assert (await figures(client))["kv_blocks_bytes"] > 4 * MIB
        await client.set_budget(wide_mb, timeout_s=60)
        await client.ask("And then?", conversation="innkeeper", sampling=FEW).completed()
        host = await figures(client)
        assert host["used_bytes"] <= host["budget_bytes"]

    play(model_path, main, vram_budget_mb=290, n_ctx=2048, kv_cache_mb=0)


def test_the_floor_that_a_host_was_told_is_accepted_when_the_processes_have_grown(shallow_model: Path) -> None:
    async def main(client: frameshard.Client) -> None:
        told_bytes = (await client.budget()).host_floor_bytes
        await talk(client, 1)
        released = await client.set_budget(VRAM_MB, host_budget_mb=told_bytes / MIB, timeout_s=60)
        assert released.host_used_bytes <= released.host_budget_bytes == told_bytes
        while (await client.budget()).host_floor_bytes <= told_bytes:
            await trio.sleep(0.05)

    play(shallow_model, main)


def test_the_limit_of_the_launch_holds_in_the_next_engine(shallow_model: Path) -> None:
    async def main(client: frameshard.Client) -> None:
        await client.set_budget(VRAM_MB, state="hibernated")
        assert (await client.budget()).host_budget_bytes == 900 * MIB
        await client.set_budget(VRAM_MB, host_budget_mb=800, timeout_s=60)  # a new engine is started with it
        host = await figures(client)
        assert host["budget_bytes"] == 800 * MIB
        assert (await client.set_budget(VRAM_MB, timeout_s=60)).host_budget_bytes == 800 * MIB
        assert (await client.set_budget(VRAM_MB, host_budget_mb=0, timeout_s=60)).host_budget_bytes == 0

    play(shallow_model, main, host_budget_mb=900)


def test_a_mixture_of_experts_starts_within_a_limit_below_its_file(own_moe: Path) -> None:
    limit_mb = own_moe.stat().st_size / MIB
    texts: list[str] = []

    async def main(client: frameshard.Client) -> None:
        texts.append((await client.ask(LORE, sampling=FEW).completed()).text)
        host = await figures(client)
        if host["budget_bytes"]:
            assert host["used_bytes"] <= host["budget_bytes"]
            assert host["observed_bytes"] <= host["budget_bytes"]
            assert host["device"]["disk_read_bytes"] > 0

    play(own_moe, main)
    play(own_moe, main, host_budget_mb=limit_mb)
    assert texts[0] == texts[1]


def test_the_processes_are_the_same_with_a_limit(own_moe: Path) -> None:
    """What weights have, up to 427 MiB, is not counted as the processes', also before anything was read into it. The
    processes' share of libraries depends on how many others use them."""

    async def main(client: frameshard.Client) -> None:
        await client.ask(LORE, sampling=FEW).completed()
        found = []
        for limit_mb in (8192, 400):
            await client.set_budget(VRAM_MB, host_budget_mb=limit_mb, timeout_s=60)
            for _ in range(hostmemory._REMEMBERED):  # until no earlier measurement counts
                with pytest.raises(BudgetBelowFloor):  # host memory is measured anew
                    await client.set_budget(VRAM_MB, host_budget_mb=1)
            found.append((await figures(client))["processes_bytes"])
        assert abs(found[1] - found[0]) < 64 * MIB

    play(own_moe, main)


def test_a_hundred_shrinks_while_jobs_run_change_no_text(own_deep_model: Path) -> None:
    """Shrinks to little more than the floor and growths take turns, first while prompts are read, then during answers.
    Each release is within the limit by both counts. Most weights come from disk then."""
    calm: list[str] = []
    shrunk: list[str] = []
    once: set[str] = set()
    again: set[str] = set()
    evictions, vram_mb = 0, 20

    async def undisturbed(client: frameshard.Client) -> None:
        calm.extend(await talk(client, 2, n_words=2))
        once.add((await client.ask(LORE * 2, sampling=FEW).completed()).text)

    async def main(client: frameshard.Client) -> None:
        nonlocal evictions
        n_shrinks = 0

        async def shrink() -> None:
            nonlocal n_shrinks
            while True:
                low_mb = (await client.budget()).host_floor_bytes / MIB + 1
                try:
                    released = await client.set_budget(
                        vram_mb, host_budget_mb=low_mb, observe=n_shrinks % 20 == 0, timeout_s=60
                    )
                except BudgetBelowFloor:  # the processes have grown meanwhile
                    continue
                assert released.host_used_bytes <= released.host_budget_bytes == int(low_mb * MIB)
                if released.observed is not None:
                    assert released.observed.host_observed_bytes is not None
                    assert released.observed.host_observed_bytes <= int(low_mb * MIB)
                n_shrinks += 1
                return

        async def disturb() -> None:
            while True:
                await shrink()
                await trio.sleep(0.02)
                await client.set_budget(vram_mb, host_budget_mb=0, observe=False, timeout_s=60)
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(disturb)
            shrunk.extend(await talk(client, 2, n_words=2))
            while n_shrinks < 100:
                again.add((await client.ask(LORE * 2, sampling=FEW).completed()).text)
            nursery.cancel_scope.cancel()
        await client.set_budget(vram_mb, host_budget_mb=0, timeout_s=60)
        await talk(client, 1)  # a copy of at least one conversation is in the store then
        await shrink()
        engine = (await client.stats()).engine
        assert engine is not None
        evictions = engine["kv_cache_evictions"]
        assert engine["host"]["device"]["disk_read_bytes"] > 0

    options = {"vram_budget_mb": vram_mb}
    play(own_deep_model, undisturbed, **options)
    play(own_deep_model, main, **options)
    assert shrunk == calm
    assert again <= once
    assert evictions > 0


def test_the_store_is_within_a_strict_limit_in_a_hundred_thousand_samples() -> None:
    """One thread makes copies, one changes the limit, and one looks at the counter. A copy that is being made can
    only be waited for, so after a shrink that much may be held until the copy is done."""
    store = KvStore(8 * MIB)
    store.set_limit(8 * MIB, strict=True)
    sizes, limits = (MIB, 3 * MIB // 2, MIB // 2), (8 * MIB, 2 * MIB, 5 * MIB, 0, 3 * MIB)
    n_samples = n_copies = n_refused = 0
    over = threading.Event()

    def copy() -> None:
        nonlocal n_copies, n_refused
        at = 0
        while not over.is_set():
            at += 1
            try:
                data = store.memory(sizes[at % 3])
            except MemoryError:
                n_refused += 1
                continue
            n_copies += store.put(Blob(tokens=[at], data=data))
            del data

    copier = threading.Thread(target=copy)
    copier.start()
    ends = time.monotonic() + DEADLINE_S
    try:
        while n_samples < 100_000 or n_copies <= 100:
            assert time.monotonic() < ends
            limit = limits[n_samples // 1000 % len(limits)]
            store.set_limit(limit, strict=True)
            while store.held_bytes > limit:  # until the copy that was being made is done
                assert time.monotonic() < ends
                time.sleep(0)
            for _ in range(1000):
                assert store.held_bytes <= limit
                n_samples += 1
    finally:
        over.set()
        copier.join()
    assert n_refused > 0


def test_the_share_of_the_store() -> None:
    assert share(100, 0, 1000, weights_first=False) == 100
    assert share(100, 300, 1000, weights_first=False) == 25
    assert share(100, 60, 1000, weights_first=False) == 40
    assert share(100, 60, 30, weights_first=False) == 30
    assert share(100, 300, 1000, weights_first=True) == 0
    assert share(-5, 0, 1000, weights_first=False) == 0


EMBEDDINGS = """
import sys
import numpy as np
from frameshard.engine.embeddings import Embeddings, copied
from frameshard.engine.hostmemory import HostMemory
from frameshard.engine.kvstore import KvStore
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

MIB = 1 << 20
config = EngineConfig(sys.argv[1], device="cpu", n_ctx=512, n_parallel=1, kv_cache_bytes=0)
with Runtime.load(config, measure=False) as runtime:
    embeddings = Embeddings()
    host = HostMemory(runtime, KvStore(0), embeddings)
    host.measure()
    floor = host.floor_bytes
    for i in range(100):
        embeddings.put(b"%d" % i, copied(np.ones((1024, 1024), np.float32)))
    assert host.parts().kv_store_bytes == 256 * MIB
    host.measure()
    assert host.floor_bytes < floor + 16 * MIB
    host.check(host.floor_bytes + 64 * MIB)
    host.set_budget(host.floor_bytes + 64 * MIB, 1.0)
    assert 32 * MIB < embeddings.held_bytes <= 64 * MIB
    host.measure()
    assert (host.observed_bytes or 0) < host.budget_bytes
    assert embeddings.get(b"0") is None
    assert embeddings.get(b"99") is not None
    host.set_budget(0, 1.0)
    assert host.press(1 << 40)
    assert embeddings.held_bytes == 0
"""


def test_the_embeddings_of_images_are_within_the_limit(tiny_model: Callable[[str], Path]) -> None:
    """They have a part of the store's share, and are no part of the floor. In a process of its own, because all that a
    process holds is counted."""
    command = [sys.executable, "-c", EMBEDDINGS, str(tiny_model("llama"))]
    subprocess.run(command, check=True, timeout=DEADLINE_S)


def test_a_device_that_holds_more_than_its_part_is_asked_again(tmp_path: Path) -> None:
    """Its part changes by less than a step, but what it holds has grown beyond it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(4096))
    device = mock.Mock()
    device.stats.return_value = stats = mock.Mock(
        host_floor_bytes=10 * MIB, host_used_bytes=0, host_budget_bytes=0, host_mapped=False
    )
    device.set_host_budget.side_effect = lambda limit_bytes, _: setattr(stats, "host_budget_bytes", limit_bytes)
    runtime: Any = mock.Mock(device=device)
    runtime.config.model, runtime.config.kv_cache_bytes, runtime.model_info.file_bytes = str(path), 0, 64 * MIB
    host = HostMemory(runtime, KvStore(0))
    host.budget_bytes = 1 << 30
    host.follow_vram()
    host.follow_vram()
    assert device.set_host_budget.call_count == 1
    stats.host_used_bytes = stats.host_budget_bytes + 1
    host.follow_vram()
    assert device.set_host_budget.call_count == 2


class _Host:
    """Stands for the engine's host memory: 100 MiB are held, and 40 can be given back."""

    def __init__(self) -> None:
        self.pressed_bytes = 0

    def press(self, missing_bytes: int) -> bool:
        pressed = max(60 * MIB, 100 * MIB - missing_bytes)
        lower = not self.pressed_bytes or pressed < self.pressed_bytes
        self.pressed_bytes = pressed
        return lower

    def ease(self) -> None:
        self.pressed_bytes = 0


def test_the_own_limit_ends_when_the_machine_has_had_enough_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, int]] = []
    now = 100.0
    monkeypatch.setattr("frameshard.engine.pressure.time.monotonic", lambda: now)
    host: Any = _Host()
    watch = Pressure(host, lambda limit, why: told.append((now, limit)), tmp_path)

    def look(seconds: int, **machine: Any) -> None:
        nonlocal now
        play_machine(tmp_path, **machine)
        for _ in range(4 * seconds):
            watch.look()
            now += 0.25

    look(5, available_mb=9000)
    look(5, available_mb=800)  # of 16 GiB: below a twentieth
    assert told == [(105.0, 60 * MIB)]  # once: no more can be given
    look(20, available_mb=2000)
    look(5, available_mb=1000)  # not yet twice as much: the wait begins anew
    look(29, available_mb=2000)
    assert len(told) == 1
    look(3, available_mb=2000)
    assert [limit for _, limit in told] == [60 * MIB, 0]
    look(60, available_mb=2000)
    look(2, available_mb=8000, stalled=9.0)
    look(2, available_mb=9000, stalled=60.0)  # more than half is available: other tasks have limits of their own
    assert len(told) == 2
    look(1, available_mb=8000, stalled=11.0)
    assert len(told) == 3
    assert host.pressed_bytes < 100 * MIB


def test_a_host_budget_does_not_wait_for_the_own_limit(tiny_model: Callable[[str], Path]) -> None:
    """The processes grow while the machine is short of memory. The own limit is then the new floor, not less."""
    with Runtime.load(EngineConfig(str(tiny_model("llama")), device="cpu", n_ctx=512, n_parallel=1)) as runtime:
        host = HostMemory(runtime, KvStore(8 * MIB))
        host.measure()
        assert host.press(1 << 40)
        before = host.parts().used_bytes
        grown = bytearray(b"x" * (64 * MIB))
        while host.parts().used_bytes < before + len(grown) // 2:
            host.measure()
        assert host.parts().used_bytes < host.pressed_bytes == host.floor_bytes
        for budget_bytes in (1 << 40, 0, 1 << 41):
            host.set_budget(budget_bytes, 0.0)


@pytest.mark.parametrize(
    ("before", "wanted", "order"),
    [
        (100, 200, ["host", "vram"]),
        (100, 0, ["host", "vram"]),
        (200, 100, ["vram", "host"]),
        (0, 100, ["vram", "host"]),
    ],
)
def test_vram_changes_first_unless_the_host_budget_rises(before: int, wanted: int, order: list[str]) -> None:
    """The game waits for VRAM. But what leaves VRAM may need the room that a higher host budget gives; 0: no limit."""
    changed: list[str] = []
    device, host, link = mock.Mock(), mock.Mock(budget_bytes=before), mock.Mock()
    device.stats.return_value = mock.Mock(used_bytes=50, floor_bytes=10)
    device.set_budget.side_effect = lambda *_: changed.append("vram")
    host.set_budget.side_effect = lambda *_: changed.append("host")
    host.measure.return_value = None
    budgets = Budgets(link, lambda change: change(), lambda: None)
    budgets._host = host
    runtime: Any = mock.Mock(device=device, floor_lock=threading.Lock(), placement=None, observer=None)
    budgets._carry_out(runtime, SetBudget(1, 60, 1.0, host_budget_bytes=wanted))
    assert changed == order
    (observed,) = link.send.call_args.args
    assert isinstance(observed, BudgetObserved)


def play_machine(root: Path, *, available_mb: int, stalled: float = 0.0) -> None:
    (root / "pressure").mkdir(parents=True, exist_ok=True)
    lines = f"MemTotal: {16 << 20} kB\nMemAvailable: {available_mb << 10} kB\n"
    for path, text in (
        (root / "meminfo", lines),
        (root / "pressure" / "memory", f"some avg10={stalled:.2f} avg60=0.00 avg300=0.00 total=0\n"),
    ):
        new = path.with_suffix(".new")
        new.write_text(text)
        new.replace(path)  # the engine reads one or the other


@pytest.mark.parametrize(
    "cause", [{"available_mb": 300}, {"available_mb": 8000, "stalled": 40.0}], ids=["low", "stalls"]
)
def test_a_machine_short_of_memory_gets_the_store_back(
    shallow_model: Path, tmp_path: Path, cause: dict[str, Any]
) -> None:
    """A notice says so. The limit is not lowered for ever, and the jobs go on."""
    play_machine(tmp_path, available_mb=9000)

    async def main(client: frameshard.Client) -> None:
        notices = client.notices()
        before = await talk(client, 1)
        assert (await figures(client))["kv_store_bytes"] > 0
        play_machine(tmp_path, **cause)
        notice = await notices.receive()
        while notice.kind != "host_pressure":
            notice = await notices.receive()
        assert notice.host_budget_bytes > shallow_model.stat().st_size
        assert notice.detail
        while (host := await figures(client))["kv_store_bytes"]:
            await trio.sleep(0.05)
        assert host["pressed_bytes"] <= notice.host_budget_bytes
        again = [await client.ask(f"{name} 0: {LORE * 5}", sampling=FEW).completed() for name in ("innkeeper", "smith")]
        assert [each.text for each in again] == [before[0], before[2]]
        host = await figures(client)
        assert 0 < host["used_bytes"] <= host["pressed_bytes"]

    engine = program.command("frameshard.engine.process", "--proc", str(tmp_path))
    play(shallow_model, main, engine=engine)
