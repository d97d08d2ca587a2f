"""Images from the client through broker and engine: shared memory, refused images, and an engine's death."""

from __future__ import annotations

import array
import fcntl
import io
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from PIL import Image

import frameshard
from frameshard import errors, sync, system
from frameshard.images import SharedImages
from frameshard.testing import fake_engine
from frameshard.wire import messages as m
from sidecars import DEADLINE_S, GREEDY, in_trio, launch, raw_peer, until

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
SHORT = frameshard.Sampling(max_tokens=6, temperature=0.0)
QUESTION = "Which word is repeated above?"


def noise(width: int, height: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@contextmanager
def memory(size: int, seals: int = SEALS) -> Iterator[str]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    try:
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


@in_trio
async def test_the_broker_refuses_memory_that_is_not_what_it_should_be(tmp_path: Path) -> None:
    plain = tmp_path / "image"
    plain.write_bytes(b"x" * 300)
    async with launch() as client, raw_peer(client.info) as peer:
        await peer.greet()
        with memory(300) as good, memory(300, SEALS & ~fcntl.F_SEAL_WRITE) as open_to_write, memory(299) as small:
            right = {"format": "rgb", "width": 10, "height": 10}
            cases: list[dict[str, Any]] = [
                {"path": good, "size": 300, **right, "stride": 29},
                {"path": good, "size": 300, **right, "height": 11},
                {"path": good, "size": 300, **right, "width": 0},
                {"path": good, "size": 300, "format": "encoded", "width": 10},
                {"path": good, **right},
                {"path": good, "size": 300, "data": b"x", **right},
                {"path": open_to_write, "size": 300, **right},
                {"path": small, "size": 300, **right},
                {"path": str(plain), "size": 300, **right},
                {"path": "/proc/self/fd/0", "size": 300, **right},
                {"path": f"/proc/{os.getpid()}/fd/999999", "size": 300, **right},
                {"data": b"x" * 299, **right},
                {"data": b"x" * 400, **right},
                right,
            ]
            for number, case in enumerate(cases, 2):
                request = {"t": "submit", "id": number, "epoch": client.info.epoch, "job": number, "kind": "chat"}
                answer = await peer.tell({**request, "messages": [{"role": "user", "content": "x"}], "images": [case]})
                assert (answer.error.name, answer.error.detail["field"]) == ("bad_argument", "images"), case
        stats = await client.stats()
        held = open_files(stats.broker.pid)
        assert not [name for name in held if "memfd:test" in name]  # the broker does not keep refused images


@in_trio
async def test_images_of_all_kinds_reach_the_model(shallow_model: Path, mmproj_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "n_ctx": 512, "n_parallel": 1, "n_threads": 1}
    async with frameshard.launch(shallow_model, mmproj=mmproj_path, **options) as client:
        assert (await client.model_info()).vision == mmproj_path.name
        pixels = noise(400, 400)
        wide = np.zeros((400, 500, 4), np.uint8)
        wide[:, :400, :3] = pixels
        texts = set()
        for image in (
            png(pixels),  # 480 KB: in shared memory
            frameshard.Pixels(pixels.tobytes(), 400, 400),
            frameshard.Pixels(wide.tobytes()[: -4 * 100], 400, 400, "rgba", 2000),
        ):
            async with client.ask(QUESTION, images=[image], sampling=SHORT) as stream:
                seen: list[m.Progress] = []
                stream.on_progress = seen.append
                await stream.completed()
                texts.add(stream.text)
            assert {event.phase for event in seen} == {"encode", "prefill"}
            assert stream.progress == seen[-1]
        assert len(texts) == 1
        with pytest.raises(errors.BadArgument):
            await client.ask(QUESTION, images=[png(pixels)[:-1000]], sampling=SHORT).completed()
        with pytest.raises(errors.BadArgument):
            await client.ask(QUESTION, images=[b""], sampling=SHORT).completed()

        # A stream is left during an encode, and the engine dies during another one.
        async with client.ask(QUESTION, images=[png(noise(300, 300, 2))], sampling=SHORT):
            pass
        expected = (await client.complete(QUESTION, images=[png(noise(300, 300, 3))], sampling=SHORT).completed()).text
        async with client.complete(QUESTION, images=[png(noise(300, 300, 3))], sampling=SHORT) as stream:
            await stream.__anext__()
            engine = (await client.stats()).broker.engine_pid
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
            assert (await stream.completed()).text == expected
        broker = (await client.stats()).broker.pid
        await until(lambda: not any("frameshard-image" in name for _, name in open_files(broker)))
        assert not [name for _, name in open_files(os.getpid()) if "frameshard-image" in name]


def open_files(pid: int) -> list[tuple[int, str]]:
    """The descriptors of a process, and what they stand for."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # it is closed already, as that of the listing itself
            names.append((int(fd), os.readlink(f"/proc/{pid}/fd/{fd}")))
    return names


@in_trio
async def test_images_that_wait_leave_descriptors_for_clients() -> None:
    """At most a quarter of the broker's descriptors is for images, none of those that connections get first."""
    image = b"\x89PNG" + bytes(20_000)
    async with launch(engine=fake_engine(endless=True, delay_s=0.01)) as client, AsyncExitStack() as stack:
        broker = client.info.pid
        resource.prlimit(broker, resource.RLIMIT_NOFILE, (1024, 1024))
        jobs = [client.complete("la", images=[image] * 8, sampling=GREEDY) for _ in range(33)]
        for job in jobs[:32]:
            await stack.enter_async_context(job)
        with pytest.raises(errors.Overloaded, match="too many images wait"):
            await jobs[32].completed()
        held = [fd for fd, name in open_files(broker) if "frameshard-image" in name]
        assert sorted(held) == list(range(768, 1024))
        async with frameshard.connect(client.info) as other:
            await other.stats()
        await jobs[0].aclose()
        with trio.fail_after(DEADLINE_S):
            while True:  # until the broker knows that the first job has ended
                with suppress(errors.Overloaded):
                    await stack.enter_async_context(client.complete("la", images=[image] * 8, sampling=GREEDY))
                    break


@pytest.mark.parametrize(("limit", "used"), [(1024, 1024), (1 << 30, 1 << 16)])
def test_no_descriptor_is_higher_than_need_be(monkeypatch: pytest.MonkeyPatch, limit: int, used: int) -> None:
    """With the limits of some containers, the kernel's table of this process would take GiBs."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert system.max_files() == used


@in_trio
async def test_images_leave_the_message_to_the_texts() -> None:
    """Eight images of 111 KB beside 300 KB of text, in a message of at most 1 MiB."""
    image = frameshard.Pixels(noise(370, 100).tobytes(), 370, 100)
    async with launch() as client:
        texts = [frameshard.ChatMessage(("user", "assistant")[i % 2], "w" * 60_000) for i in range(5)]
        await client.chat(texts, images=[image] * 8, sampling=SHORT).completed()
        for _ in range(6):
            await client.ask("w" * 60_000, conversation="c", sampling=SHORT).completed()
        async with client.ask("w" * 60_000, conversation="c", images=[image] * 8, sampling=SHORT) as stream:
            await stream.completed()
        assert stream.n_dropped == 0


@pytest.mark.parametrize(
    ("images", "why"),
    [
        ("x.png", "read the files first"),
        (["x.png"], "read the files first"),
        (b"\x89PNG", "read the files first"),
        ([Path("x.png")], "read the files first"),
        ([None], "read the files first"),
        (None, "read the files first"),
        (frameshard.Pixels(b"abc", 1, 1), "read the files first"),
        ([frameshard.Pixels(memoryview(bytes(24))[::2], 2, 2)], "has gaps"),
        ([frameshard.Pixels(memoryview(array.array("f", bytes(48))), 2, 2)], "8 bits a channel"),
        ([frameshard.Pixels(memoryview(np.zeros((0, 2, 3), np.uint8)), 2, 0)], "1 to"),
    ],
    ids=["path", "paths", "bytes", "Path", "None in a list", "None", "Pixels", "gaps", "floats", "no rows"],
)
def test_what_is_no_list_of_images_is_refused(images: Any, why: str) -> None:
    with pytest.raises(errors.BadArgument, match=why):
        SharedImages(images)


def test_a_process_with_too_many_open_files_is_told() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.open(os.devnull, os.O_RDONLY)  # there may be others between those in use
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
    try:
        with pytest.raises(errors.BadArgument, match="cannot be shared: "):
            SharedImages([bytes(100_000)] * 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_polled_client_takes_images_too() -> None:
    with sync.Sidecar.launch("no model", engine=fake_engine()) as sidecar:
        job = sidecar.ask("one two", images=[png(noise(20, 20))])
        sidecar.wait_ready()
        while not job.ended:
            sidecar.poll()
            time.sleep(0.002)
        assert job.text == "one two"
