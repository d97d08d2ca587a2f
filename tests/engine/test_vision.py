"""Images in the engine process: the vision tower within the budget of the language model."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from engine_driver import EngineProcess, Event, engine, ids, user
from PIL import Image

import frameshard
import mutants
from frameshard.broker.frameblock import FrameBlockMemory
from frameshard.engine import vision
from frameshard.errors import BadArgument, BadModel
from frameshard.frame import FrameBlock
from frameshard.wire import messages as m
from servers import until

MIB = 1 << 20
FIELDS: dict[str, object] = {
    "device": "emulated",
    "mode": "stream_only",
    "n_ctx": 1024,
    "n_ubatch": 128,
    "n_parallel": 1,
}
FLOOR = 32 * MIB
TOWER = 8 * MIB
"""The VRAM that the language model needs with that context, and the VRAM that the tiny tower needs, both rounded up."""

QUESTION = user("Which word is repeated above?")
SEEN = {"temperature": 4.0, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 5}
"""The likeliest tokens of the shallow model are the same after any image; those that a seed draws are not."""


def picture(seed: int, width: int = 224, height: int = 224) -> dict[str, Any]:
    """An image of coloured squares."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 256, (-(-height // 50), -(-width // 50), 3), dtype=np.uint8)
    pixels = squares.repeat(50, 0).repeat(50, 1)[:height, :width]
    return {"format": "rgb", "width": width, "height": height, "stride": 0, "data": pixels.tobytes()}


def answers(child: EngineProcess, *seeds: int) -> list[list[int]]:
    return [ids(child.run(QUESTION, images=[picture(seed)], params=SEEN)) for seed in seeds]


def held(stats: dict[str, int]) -> int:
    """The bytes of buffers without what follows the context in use and the latest graph."""
    return stats["buffers_bytes"] - stats["kv_bytes"] - stats["graph_bytes"]


def kept(stats: dict[str, int]) -> int:
    """The bytes in use without what follows the latest graph."""
    return stats["used_bytes"] - stats["graph_bytes"]


@pytest.fixture(scope="module")
def resident(shallow_model: Path, mmproj_path: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model, mmproj=str(mmproj_path), **FIELDS) as child:
        yield child


@pytest.fixture(scope="module")
def expected(resident: EngineProcess) -> list[list[int]]:
    found = answers(resident, 1, 2)
    assert len({tuple(tokens) for tokens in found}) > 1  # the answers depend on the images
    return found


@pytest.mark.parametrize("budget", [FLOOR + TOWER, 48 * MIB, 96 * MIB])  # the least, too little and enough
def test_any_budget_gives_the_same_answer_within_it(
    budget: int, shallow_model: Path, mmproj_path: Path, expected: list[list[int]]
) -> None:
    with engine(shallow_model, mmproj=str(mmproj_path), vram_budget_bytes=budget, **FIELDS) as child:
        before = child.stats()
        assert answers(child, 1, 2) == expected
        deadline = time.monotonic() + 60
        while kept(after := child.stats()) < kept(before) - 4 * MIB:  # evicted weights return, but a slab
            assert time.monotonic() < deadline
            child.send(op="ping", seq=0)  # answered by the main thread: it has taken a turn since
            child.wait_for("pong")
    assert after["peak_bytes"] <= budget
    assert held(before) == held(after)  # the tower holds nothing any more
    assert after["copied_bytes"] > before["copied_bytes"]
    if FLOOR + TOWER < budget < 96 * MIB:
        assert after["evicted_slabs"] > before["evicted_slabs"]  # weights were evicted; the ring alone was not enough


def phases(events: list[Event]) -> list[tuple[str, int, int]]:
    return [(event["phase"], event["done"], event["total"]) for event in events if event["ev"] == "progress"]


def test_several_images_and_progress(resident: EngineProcess) -> None:
    events = resident.run(QUESTION, images=[picture(5), picture(6)], params=SEEN)
    assert events[0]["ev"] == "started"
    n = events[0]["n_prompt"]
    assert n > 2 * 64
    seen = phases(events)
    assert [each for each in seen if each[0] == "encode"] == [("encode", 1, 2), ("encode", 2, 2)]
    assert seen[-1] == ("prefill", n, n)
    swapped = resident.run(QUESTION, images=[picture(6), picture(5)], params=SEEN)
    again = resident.run(QUESTION, images=[picture(5), picture(6)], params=SEEN)
    assert ids(again) == ids(events) != ids(swapped)


def test_an_image_seen_before_is_not_encoded_again(resident: EngineProcess) -> None:
    first = resident.run(QUESTION, images=[picture(7)], params=SEEN)
    graphs = resident.stats()["graphs"]
    again = resident.run(QUESTION, images=[picture(7)], params=SEEN)
    seen_again = resident.stats()["graphs"] - graphs
    other = resident.run(QUESTION, images=[picture(8)], params=SEEN)
    seen_other = resident.stats()["graphs"] - graphs - seen_again
    assert ids(again) == ids(first)
    assert len(ids(other)) == len(ids(first))
    assert seen_other == seen_again + 1  # of the tower


def test_a_conversation_keeps_what_it_has_read_of_an_image(resident: EngineProcess) -> None:
    events = resident.run(QUESTION, images=[picture(9)], params=SEEN, conversation="one")
    again = resident.run(QUESTION, images=[picture(9)], params=SEEN, conversation="one")
    other = resident.run(QUESTION, images=[picture(10)], params=SEEN, conversation="one")
    assert again[0]["n_reused"] > 64
    assert again[0]["n_reused"] == again[0]["n_prompt"] - 1
    assert 0 < other[0]["n_reused"] < 64
    fresh = resident.run(QUESTION, images=[picture(10)], params=SEEN)
    assert ids(other)[0] == ids(fresh)[0]
    assert ids(events)[0] == ids(again)[0]


def test_a_job_goes_on_after_an_engines_death(resident: EngineProcess) -> None:
    events = resident.run(QUESTION, images=[picture(11)], params=SEEN)
    history, tokens = events[0]["history"], ids(events)
    rest = resident.run(QUESTION, images=[picture(11)], params=SEEN, history=history, resume=tokens[:2])
    assert tokens[:2] + ids(rest) == tokens


def test_others_talk_while_an_image_is_decoded(shallow_model: Path, mmproj_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4096, 4096), "red").save(file, "PNG")
    with engine(shallow_model, mmproj=str(mmproj_path), **{**FIELDS, "n_parallel": 2}) as child:
        talker = child.submit("Once upon a time", params={"max_tokens": 800})
        child.wait_for("token", job=talker)
        with child.at_once():
            child.send(op="stats", seq=0)  # its answer shows that the engine reads the image
            job = child.submit(QUESTION, images=[{"format": "encoded", "data": file.getvalue()}], params=SEEN)
        child.wait_for("stats")
        tokens = 0
        while (event := child.next_event()).get("job") != job:
            tokens += event["ev"] == "token"
        assert event["ev"] == "started"
        assert tokens >= 3  # it would be at most one if the image were decoded between two decodes


def failure(child: EngineProcess, **image: Any) -> Event:
    error: Event = child.run(QUESTION, images=[{**picture(1), **image}], params=SEEN)[-1]["error"]
    return error


def test_wrong_images_fail_their_job_alone(resident: EngineProcess, expected: list[list[int]]) -> None:
    encoded = {"format": "encoded", "width": 0, "height": 0}
    for image in (
        {"data": b"x" * 100},
        {"width": 30000, "height": 30000},
        picture(1, 1005, 5),
        {**encoded, "data": b"no picture"},
        {**encoded, "data": b"\x89PNG\r\n\x1a\n" + b"\0" * 50},
    ):
        assert failure(resident, **image)["name"] == "bad_argument", image
    gone = {**encoded, "stride": 0, "path": "/proc/self/fd/999999", "size": 5}
    assert resident.run(QUESTION, images=[gone])[-1]["error"]["name"] == "bad_argument"
    assert answers(resident, 1) == expected[:1]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> m.Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return m.Image("encoded", file.getvalue())


def test_files_are_read_as_they_look() -> None:
    """Grey values of 16 bits, and photos of a camera that was held upright."""
    grey = np.linspace(0, 255, 64).astype(np.uint8).reshape(1, 64).repeat(2, 0)
    known = vision.Image.read(encoded(Image.fromarray(grey)))
    deep = vision.Image.read(encoded(Image.fromarray(grey.astype(np.uint16) * 257)))
    assert deep == known
    assert known.pixels[:12] == b"".join(bytes([value]) * 3 for value in grey[0, :4])
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = vision.Image.read(encoded(Image.fromarray(grey), "JPEG", exif=exif))
    assert (turned.width, turned.height) == (2, 64)
    assert turned.pixels[0] < 30 < 220 < turned.pixels[-1]


NO_IMAGE = r"is no PNG or JPEG .*, or damaged or cut off$"


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (lambda: encoded(Image.new("L", (14_000, 14_000))), "has 1 to 16777216 pixels"),
        (lambda: encoded(Image.new("L", (10_000, 10_000))), "has 1 to 16777216 pixels"),
        (lambda: m.Image("encoded", b"no picture"), NO_IMAGE),
        (lambda: m.Image("encoded", encoded(Image.new("L", (99, 99))).data[:60]), NO_IMAGE),
        (lambda: encoded(Image.new("RGB", (9, 9)), "WEBP"), NO_IMAGE),
    ],
    ids=["196 megapixels", "100 megapixels", "text", "cut off", "WebP"],
)
@pytest.mark.filterwarnings("error")
def test_files_that_are_no_images_are_refused(image: Callable[[], m.Image], why: str) -> None:
    given = image()  # not made before: each process of tests would make them all
    with pytest.raises(BadArgument, match=why):
        vision.Image.read(given)


def test_a_prompt_of_images_that_does_not_fit(resident: EngineProcess) -> None:
    error = resident.run(QUESTION, images=[picture(n) for n in range(8)], params={**SEEN, "max_tokens": 900})[-1]
    assert error["error"]["name"] == "context_overflow"


def test_without_a_tower_images_are_refused(shallow_model: Path) -> None:
    with engine(shallow_model, n_ctx=512) as child:
        assert failure(child)["name"] == "unsupported"


def test_a_tower_of_another_model_is_refused(tiny_model: Any, mmproj_path: Path) -> None:
    child = EngineProcess()
    try:
        event = child.load(tiny_model("llama"), mmproj=str(mmproj_path), device="cpu", n_ctx=256, n_parallel=1)
        assert (event["ev"], event["error"]["name"]) == ("fatal", "bad_model")
    finally:
        child.close()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: no tower was tried, and no machine was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frameshard" / "verdicts"


def loaded_with(model: Path, mmproj: Path, device: str) -> Event:
    """The first event of an engine that loads both files."""
    child = EngineProcess()
    try:
        return child.load(model, mmproj=str(mmproj), **{**FIELDS, "device": device})
    finally:
        child.close()


def renamed(mmproj: Path, path: Path, name: str) -> Path:
    """A copy with one letter of a tensor's name changed."""
    file = mutants.Gguf(mmproj)
    info = next(each for each in file.tensors if each.name == name.encode())
    info.name = info.name.replace(b".weight", b".weighs")
    return file.write(path)


# libmtmd finds a tensor missing in the same way on any device: each tensor once, and one of them on both devices.
@pytest.mark.parametrize(
    ("tensor", "device"),
    [
        ("v.blk.2.attn_q.weight", "cpu"),
        ("v.blk.2.attn_q.weight", "emulated"),
        ("v.blk.1.ffn_up.weight", "emulated"),
        ("mm.model.mlp.1.weight", "cpu"),
    ],
)
def test_a_tower_with_a_damaged_name_is_refused_at_launch(
    tensor: str, device: str, shallow_model: Path, mmproj_path: Path, tmp_path: Path, fresh_cache: Path
) -> None:
    event = loaded_with(shallow_model, renamed(mmproj_path, tmp_path / "bad.gguf", tensor), device)
    assert event["ev"] == "fatal"
    assert event["error"]["name"] == "bad_model"
    assert "bad.gguf" in event["error"]["message"]
    assert not fresh_cache.exists()


def test_a_tower_that_crashes_libmtmd_is_refused_at_launch(
    shallow_model: Path, mmproj_path: Path, tmp_path: Path, fresh_cache: Path
) -> None:
    """An optional tensor is missing in every layer, and libmtmd follows a null pointer."""
    file = mutants.Gguf(mmproj_path)
    for info in file.tensors:
        info.name = info.name.replace(b".attn_q.weight", b".attn_q.weighs")
    path = file.write(tmp_path / "bad.gguf")

    async def main() -> None:
        with pytest.raises(BadModel, match=r"signal 11 while it loaded .*trying bad\.gguf"):
            async with frameshard.launch(shallow_model, mmproj=str(path), device="cpu", n_ctx=256, n_parallel=1):
                pass

    trio.run(main)


def test_a_tower_that_computes_no_numbers_is_refused_at_launch(
    shallow_model: Path, mmproj_path: Path, tmp_path: Path, fresh_cache: Path
) -> None:
    file = mutants.Gguf(mmproj_path)
    info = next(each for each in file.tensors if each.name == b"v.blk.2.ffn_down.weight")
    info.data = b"\0\x7e" * (len(info.data) // 2)
    event = loaded_with(shallow_model, file.write(tmp_path / "bad.gguf"), "cpu")
    assert (event["ev"], event["error"]["name"]) == ("fatal", "bad_model")
    assert "computes NaN" in event["error"]["message"]


def test_a_tower_is_tried_once_for_a_device(
    shallow_model: Path, mmproj_path: Path, tmp_path: Path, fresh_cache: Path
) -> None:
    tower = tmp_path / "tower.gguf"
    tower.write_bytes(mmproj_path.read_bytes())
    for device, n in (("cpu", 1), ("cpu", 1), ("emulated", 2), ("emulated", 2)):
        assert loaded_with(shallow_model, tower, device)["ev"] == "ready"
        assert len(list(fresh_cache.iterdir())) == n
    os.utime(tower, (1, 1))
    assert loaded_with(shallow_model, tower, "cpu")["ev"] == "ready"
    assert len(list(fresh_cache.iterdir())) == 3


def cancel_encode(child: EngineProcess, seed: int) -> None:
    """Cancels a job that has begun to encode its image, and would generate many tokens after that."""
    job = child.submit(QUESTION, images=[picture(seed)], params={**SEEN, "max_tokens": 900})
    child.wait_for("started", job=job)
    child.send(op="cancel", job=job)
    assert child.finish(job)[job][-1]["ev"] == "cancelled"


def test_the_cpu_sees_too_and_a_cancel_ends_an_encode(shallow_model: Path, mmproj_path: Path) -> None:
    with engine(shallow_model, mmproj=str(mmproj_path), n_ctx=1024, n_parallel=1) as child:
        assert child.run(QUESTION, images=[picture(1)], params=SEEN)[-1]["ev"] == "done"
        cancel_encode(child, 2)
        assert child.run(QUESTION, images=[picture(1)], params=SEEN)[-1]["ev"] == "done"


def test_shrinks_and_cancels_in_the_middle_of_encodes(
    shallow_model: Path, mmproj_path: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with engine(
        shallow_model, mmproj=str(mmproj_path), vram_budget_bytes=96 * MIB, **{**FIELDS, "device": "emulated:0.5"}
    ) as child:
        before = held(child.stats())
        for seed, budget in ((1, 44 * MIB), (2, 96 * MIB)):
            job = child.submit(QUESTION, images=[picture(seed)], params=SEEN)
            child.wait_for("started", job=job)
            child.budget(budget)
            events, released = child.until(job, "released")
            assert ids(events) == expected[seed - 1]
            assert released["vram_budget_bytes"] == budget
            assert released["used_bytes"] <= budget
        path = FrameBlockMemory(tmp_path).path()  # a budget from the frame block, while the host draws
        child.send(op="frame_block", path=path)
        with FrameBlock(path) as frames:
            job = child.submit(QUESTION, images=[picture(20)], params=SEEN)
            child.wait_for("started", job=job)
            frames.begin()
            generation = frames.set_budget(44 * MIB)
            assert child.finish(job)[job][-1]["ev"] == "done"
            until(lambda: frames.answer.applied_generation == generation)  # an idle engine applies it too, if later
            assert (frames.answer.applied_generation, frames.answer.budget_bytes) == (generation, 44 * MIB)
            assert frames.answer.used_bytes <= 44 * MIB
        cancel_encode(child, 21)
        assert held(child.stats()) == before
        assert answers(child, 1) == expected[:1]
