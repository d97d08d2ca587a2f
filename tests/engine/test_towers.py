"""A tiny tower of every kind that libmtmd reads: on the shard device, at several budgets, and with stock libmtmd."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tower_driver
from engine_driver import EngineProcess, engine, ids

import tiny_models
import tiny_towers
from forks import Fork
from frameshard.engine.sounds import tone

INPUTS = {
    "vision": ("200x150", "96x300", "700x650"),
    "audio": ("1", "7.5"),
    "both": ("1", "200x150", "7.5", "700x650"),
}
IMAGE = {"format": "rgb", "width": 60, "height": 60, "data": bytes(range(180)) * 60}


@pytest.fixture(scope="module")
def marked_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the file of a model by its name in ``tiny_models.ARCHS``. It has the tokens that towers put around
    images."""

    @functools.cache
    def marked(name: str) -> Path:
        path = tmp_path_factory.mktemp("marked") / f"{name}.gguf"
        tiny_models.make(name, path, marks=tiny_towers.MARKS)
        return path

    return marked


def encoded(model: Path, mmproj: Path, device: str, inputs: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    out = mmproj.with_name(device)
    assert Fork(tower_driver.main, model, mmproj, device, out, inputs).wait(240) == 0
    with np.load(out.with_suffix(".npz")) as arrays:
        return dict(arrays), json.loads(out.with_suffix(".json").read_text())


@pytest.mark.parametrize("name", tiny_towers.TOWERS)
def test_embeddings_are_those_of_libmtmd(name: str, marked_model: Callable[[str], Path], tmp_path: Path) -> None:
    tower = tiny_towers.TOWERS[name]
    model, mmproj = marked_model(tower.model), tmp_path / "mmproj.gguf"
    tiny_towers.make(name, mmproj)
    inputs = INPUTS[tower.kind]
    expected, _ = encoded(model, mmproj, "cpu", [*inputs, *(f"{each}~" for each in inputs[:1])])
    others = {key: expected.pop(key) for key in [*expected] if "~" in key}
    for key, other in others.items():
        first = expected[key.replace("~", "")]
        assert first.std() > 1e-3
        assert first.shape == other.shape
        assert np.linalg.norm(first - other) > 1e-2 * np.linalg.norm(first)
    found, figures = encoded(model, mmproj, "emulated", inputs)
    for key, known in expected.items():
        assert np.linalg.norm(found[key] - known) < 3e-3 * np.linalg.norm(known), key
        assert np.array_equal(found[key.replace("all", "least")], found[key]), key
    floors, again = figures["floors"]
    assert again == floors  # whatever was encoded before
    assert figures["peak"] <= max(floors)
    assert figures.get("needed", max(floors)) == max(floors)


def test_an_image_that_one_step_must_decode(tmp_path: Path) -> None:
    """Gemma 3 has 16 tokens for each image here, each of which sees all others."""
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("gemma3", model)
    tiny_towers.make("gemma3", mmproj)
    image = {"format": "rgb", "width": 64, "height": 64, "data": bytes(3 * 64 * 64)}
    with engine(model, mmproj=str(mmproj), device="emulated", n_ctx=512, n_ubatch=8, n_parallel=1) as child:
        events = child.run("What is this?", images=[image])
        assert events[-1]["ev"] == "failed"
        assert "launch with n_ubatch=16" in events[-1]["error"]["message"]
        assert child.run("Hello.", params={"max_tokens": 3})[-1]["ev"] == "done"


@pytest.mark.parametrize(("arch", "tower"), [("llama", "hunyuanvl"), ("glm4moe", "gemma3")])
def test_images_that_need_positions_in_several_dimensions(arch: str, tower: str, tmp_path: Path) -> None:
    """Without them llama.cpp ends the process at the first image."""
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make(arch, model)
    tiny_towers.make(tower, mmproj)
    child = EngineProcess()
    try:
        event = child.load(model, mmproj=str(mmproj), device="cpu", n_ctx=512, n_parallel=1)
    finally:
        child.close()
    assert (event["ev"], event["error"]["name"]) == ("fatal", "bad_model")
    assert "M-RoPE" in event["error"]["message"]


def test_drafts_behind_an_image_end_with_the_context(tmp_path: Path) -> None:
    """An image of Qwen2-VL takes more cells of the KV cache than positions."""
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("qwen2vl", model)
    tiny_towers.make("qwen2vl", mmproj)
    image = {"format": "rgb", "width": 300, "height": 280, "data": bytes(3 * 300 * 280)}
    fields: dict[str, Any] = {"device": "emulated", "mode": "stream_only", "n_ctx": 512, "n_parallel": 1}
    with engine(model, mmproj=str(mmproj), **fields) as child:
        n_prompt = child.run("a b c", images=[image], params={"max_tokens": 1})[0]["n_prompt"]
        params = {"max_tokens": 512 - n_prompt, "logit_bias": [{"token": 300, "bias": 100.0}]}
        events = child.run("a b c", images=[image], params=params)
        assert len(ids(events)) == 512 - n_prompt, events[-1]
        assert child.stats()["accepted_tokens"] > 100


def test_an_image_has_its_place_in_the_prompt(tmp_path: Path) -> None:
    """DeepSeek V4's tower puts up to three tokens in front of an image, as its place needs. So the kept embedding of an
    image does not fit another place."""
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("llama", model)
    tiny_towers.make("deepseek4v", mmproj)

    def image(width: int) -> dict[str, object]:
        return {"format": "rgb", "width": width, "height": 150, "data": bytes(range(150)) * 3 * width}

    def answer(child: EngineProcess, *widths: int) -> tuple[int, list[int]]:
        params = {"max_tokens": 3, "seed": 1, "temperature": 4.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        events = child.run("What is this?", images=[image(width) for width in widths], params=params)
        return events[0]["n_prompt"], ids(events)

    fields: dict[str, Any] = {"device": "cpu", "n_ctx": 512, "n_parallel": 1, "n_threads": 1, "mode": "stream_only"}
    with engine(model, mmproj=str(mmproj), **fields) as child:
        known = answer(child, 200)
        seen = [answer(child, width, 200) for width in (60, 130)]
    sizes = set()
    for width, after in zip((60, 130), seen, strict=True):
        with engine(model, mmproj=str(mmproj), **fields) as child:
            alone = answer(child, width)
            assert answer(child, width, 200) == after
            sizes.add(after[0] - alone[0])
    assert len({*sizes, known[0]}) > 1


def test_a_job_has_an_image_and_a_sound(tmp_path: Path) -> None:
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("llama", model)
    tiny_towers.make("gemma4", mmproj)
    (tmp_path / "tone.wav").write_bytes(tone(2.0).data)
    sound = {"format": "encoded", "path": str(tmp_path / "tone.wav"), "size": len(tone(2.0).data)}
    image = {"format": "rgb", "width": 200, "height": 150, "data": bytes(range(150)) * 600}
    with engine(model, mmproj=str(mmproj), device="emulated", n_ctx=512, n_parallel=1) as child:
        lengths = []
        for given in ([], [image], [sound], [image, sound]):
            events = child.run("What do you see and hear?", images=given, params={"max_tokens": 3})
            assert events[-1]["ev"] == "done"
            lengths.append(events[0]["n_prompt"])
    text, seen, heard, both = lengths
    assert seen > text + 10
    assert heard > text + 10
    assert both - seen >= heard - text - 3  # but for what stands around a sound


def test_an_image_for_which_the_device_has_no_memory(tmp_path: Path) -> None:
    """Only its job fails, and it may be sent again."""
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("llama", model)
    tiny_towers.make("qwen2vl", mmproj)
    for allocation in range(12, 40):
        faults = f"alloc={allocation}"
        child = EngineProcess(faults)
        try:
            loaded = child.load(model, mmproj=str(mmproj), device="emulated", n_ctx=512, n_parallel=1, n_ubatch=128)
            if loaded["ev"] != "ready":
                continue
            image = {"format": "rgb", "width": 300, "height": 280, "data": bytes(3 * 300 * 280)}
            ends = [child.run("What is this?", images=[image], params={"max_tokens": 2})[-1] for _ in range(2)]
        finally:
            child.close()
        if ends[0]["ev"] == "failed":
            assert ends[0]["error"]["name"] == "out_of_memory"
            assert ends[1]["ev"] == "done"
            return
    pytest.fail("no allocation of an image was refused")


@pytest.mark.parametrize("tried", [False, True], ids=["new", "tried with its own model"])
def test_a_tower_whose_tokens_the_vocabulary_lacks(
    tried: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own, other, mmproj = (tmp_path / name for name in ("own.gguf", "other.gguf", "mmproj.gguf"))
    tiny_models.make("llama", own, marks=tiny_towers.MARKS)
    tiny_models.make("llama", other)
    tiny_towers.make("idefics3", mmproj)
    fields: dict[str, Any] = {"mmproj": str(mmproj), "device": "cpu", "n_ctx": 512, "n_parallel": 1}
    if tried:
        with engine(own, **fields) as child:
            assert child.run("What is this?", images=[IMAGE], params={"max_tokens": 1})[-1]["ev"] == "done"
    child = EngineProcess()
    try:
        event = child.load(other, **fields)
    finally:
        child.close()
    assert (event["ev"], event["error"]["name"]) == ("fatal", "bad_model")
    assert "tokens that this model's vocabulary lacks" in event["error"]["message"]


def test_an_image_that_a_prompt_has_twice_is_encoded_once(tmp_path: Path) -> None:
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    tiny_models.make("llama", model)
    tiny_towers.make("internvl", mmproj)
    fields: dict[str, Any] = {"mmproj": str(mmproj), "device": "emulated", "n_ctx": 1024, "n_parallel": 1}
    with engine(model, **fields, kv_cache_bytes=0) as child:
        graphs = []
        for _ in range(2):
            before = child.stats()["graphs"]
            assert child.run("What is this?", images=[IMAGE] * 2, params={"max_tokens": 1})[-1]["ev"] == "done"
            graphs.append(child.stats()["graphs"] - before)
    assert graphs[0] == graphs[1] + 1  # that of the tower


def test_a_prompt_of_images_does_not_end_with_the_token_that_ends_texts(tmp_path: Path) -> None:
    """Some vocabularies ask for it, and libmtmd adds it."""
    mmproj = tmp_path / "mmproj.gguf"
    tiny_towers.make("internvl", mmproj)
    fields: dict[str, Any] = {"mmproj": str(mmproj), "device": "cpu", "n_ctx": 512, "n_parallel": 1}
    started = []
    for name, options in (("plain", {}), ("ending", {"add": tiny_models._File.add_eos})):
        model = tmp_path / f"{name}.gguf"
        tiny_models.make("llama", model, n_layer=1, **options)
        with engine(model, **fields) as child:
            started.append(child.run("What is this?", images=[IMAGE], params={"max_tokens": 1})[0])
    assert started[0]["n_prompt"] == started[1]["n_prompt"]


REFUSING = """
import sys
from frameshard.engine import process, vision
decode, calls = vision.mtmd.mtmd_helper_decode_image_chunk, []
def refuse_once(*args):
    calls.append(args)
    return -2 if len(calls) == 1 else decode(*args)
vision.mtmd.mtmd_helper_decode_image_chunk = refuse_once
sys.exit(process.main())
"""
"""An engine in which llama.cpp gets no memory for the first decode of an image."""


def test_an_image_whose_decode_gets_no_memory_fails_alone(tmp_path: Path) -> None:
    model, mmproj, program = (tmp_path / name for name in ("model.gguf", "mmproj.gguf", "refusing.py"))
    tiny_models.make("llama", model)
    tiny_towers.make("internvl", mmproj)
    program.write_text(REFUSING)
    child = EngineProcess(program=[str(program)])
    try:
        child.load(model, mmproj=str(mmproj), device="emulated", n_ctx=512, n_parallel=1, n_ubatch=128)
        ends = [child.run("What is this?", images=[IMAGE], params={"max_tokens": 2})[-1] for _ in range(2)]
    finally:
        child.close()
    assert (ends[0]["ev"], ends[0]["error"]["name"], ends[1]["ev"]) == ("failed", "out_of_memory", "done")
