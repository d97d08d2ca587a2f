"""A sidecar with a real model, and what is left after kills: tests that run on every system, among them Windows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors, system
from frameshard.broker import endpoint
from frameshard.broker.images import Images
from frameshard.images import Pixels, SharedImages
from frameshard.testing import fake_engine
from frameshard.wire import messages as m
from sidecars import GREEDY, alive, gone_after, in_trio, launch, until, until_lost, until_ready

HOST = """
import sys, trio, frameshard
from frameshard.testing import fake_engine
async def main():
    async with frameshard.launch("no model", engine=fake_engine(endless=True, delay_s=0.001)) as client:
        stats = await client.stats()
        print(stats.broker.pid, stats.broker.engine_pid, flush=True)
        async with client.complete("la", sampling=frameshard.Sampling(max_tokens=100_000)) as stream:
            async for delta in stream:
                pass
trio.run(main)
"""

DEAF = "import time; time.sleep(3600)"  # an engine that notices nothing


async def pids(client: frameshard.Client) -> tuple[int, int]:
    """The process ids of broker and engine."""
    await until_ready(client)
    broker = (await client.stats()).broker
    assert broker.engine_pid is not None
    return broker.pid, broker.engine_pid


@in_trio
async def test_a_model_speaks_on_cpu_and_emulated_device(model_path: Path) -> None:
    texts = []
    for device, budget_mb in (("cpu", 0), ("emulated", 128)):
        options = {"device": device, "vram_budget_mb": budget_mb, "mode": "stream_only", "n_threads": 1}
        async with frameshard.launch(model_path, **options) as client:
            sampling = frameshard.Sampling(max_tokens=16, temperature=0.0)
            texts.append((await client.ask("Who are you?", sampling=sampling).completed()).text)
            if budget_mb:
                await shrink_by_frame_block(client, 120 << 20)
    assert texts[0]
    assert texts[0] == texts[1]


async def shrink_by_frame_block(client: frameshard.Client, budget: int) -> None:
    with await client.frame_block() as block:
        block.begin()
        block.end(gpu_busy_ms=1.0)
        generation = block.set_budget(budget)
        await until(lambda: block.answer.applied_generation == generation)
        assert block.answer.budget_bytes == budget
        assert block.answer.used_bytes <= budget


@in_trio
async def test_a_killed_engine_is_replaced() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.001)) as client:
        broker, engine = await pids(client)
        os.kill(engine, signal.SIGKILL)
        gone_after([engine])
        await until_ready(client, restarts=1)
        assert (await client.stats()).broker.pid == broker
        few = frameshard.Sampling(max_tokens=3)
        assert (await client.ask("li", sampling=few).completed()).text == "li li li"
        last = await pids(client)
    gone_after(list(last))


@pytest.mark.usefixtures("own_runtime_directory")
@in_trio
async def test_a_killed_broker_takes_its_engine_along() -> None:
    async with launch(engine=fake_engine(endless=True, delay_s=0.001)) as client:
        async with client.complete("la", sampling=GREEDY) as stream:
            await stream.__anext__()
            broker, engine = await pids(client)
            (left,) = endpoint.running()
            os.kill(broker, signal.SIGKILL)
            gone_after([broker, engine])
            await until_lost(client)
    async with launch():  # removes what the killed sidecar has left
        assert not left.parent.exists()
        assert len(endpoint.running()) == 1
    assert endpoint.running() == []
    assert list(left.parent.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there a directory is removed only with its lock")
@pytest.mark.usefixtures("own_runtime_directory")
@in_trio
async def test_a_directory_that_lost_its_lock_is_removed() -> None:
    async with launch():
        (running,) = endpoint.running()
        left = running.parent.with_name("run-killed")  # in the middle of its removal, or before it had a lock
        left.mkdir()
        async with launch():
            assert not left.exists()
        assert running.exists()


@pytest.mark.skipif(sys.platform != "win32", reason="elsewhere an engine must notice the end itself")
@in_trio
async def test_a_killed_broker_takes_a_deaf_engine_along(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    engine = f"import os, pathlib; pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{os.getppid()}}'); {DEAF}"
    with trio.move_on_after(60):
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(errors.EngineDied):
                    async with launch(engine=(sys.executable, "-c", engine)):
                        pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait)
            await until(lambda: note.exists() and " " in note.read_text())
            deaf, broker = map(int, note.read_text().split())
            os.kill(broker, signal.SIGKILL)
    gone_after([broker, deaf])


def test_a_killed_host_leaves_no_process() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        left = [int(pid) for pid in host.stdout.readline().split()]
        assert len(left) == 2
        assert all(map(alive, left))
        host.kill()
    gone_after(left)


IMAGE = Pixels(bytes(3 * 1000 * 1000), 1000, 1000)


@pytest.mark.skipif(sys.platform == "linux", reason="there images are in memory files")
def test_only_shared_images_are_taken(tmp_path: Path) -> None:
    images = Images()
    shared = SharedImages([IMAGE])
    (image,) = shared.wire
    held = images.hold([image])
    if sys.platform == "win32":
        with pytest.raises(PermissionError):
            os.open(image.path, os.O_RDWR)
    with open(system.open_to_read(held.images[0].path), "rb") as file:
        assert file.read() == IMAGE.data
    directory = system.image_directory()
    (directory / "other").write_bytes(bytes(3000))
    outside = tmp_path / "image-1"
    outside.write_bytes(bytes(3000))
    wrong = [outside, directory / "other", directory / "image-2", f"{directory}/../image-1", "//host/share/image-1"]
    for path in map(str, wrong):
        with pytest.raises(errors.BadArgument):
            images.hold([m.Image("rgb", b"", path, 300, 10, 10, 0)])
    held.close()
    shared.close()
    assert not Path(image.path).exists()


@pytest.mark.skipif(sys.platform != "win32", reason="only Windows refuses to write to a file")
def test_an_image_that_can_still_be_written_is_refused() -> None:
    path = system.image_directory() / "image-3"
    with open(path, "wb") as file:
        file.write(bytes(300))
        file.flush()
        with pytest.raises(errors.BadArgument):
            Images().hold([m.Image("rgb", b"", str(path), 300, 10, 10, 0)])
    path.unlink()
