"""Sounds in the engine process: a tower that hears, within the budget of the language model."""

from __future__ import annotations

import contextlib
import io
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import EngineProcess, Event, engine, ids, user

import frameshard
import tiny_audio
from frameshard.engine.sounds import MAX_MP3_BYTES, MAX_SECONDS, MAX_WAV_BYTES, tone
from frameshard.errors import BadModel
from sidecars import in_trio

MIB = 1 << 20
FIELDS: dict[str, Any] = {"device": "emulated", "mode": "stream_only", "n_ctx": 1024, "n_ubatch": 128, "n_parallel": 1}
FLOOR = 3 * MIB
"""The VRAM that the language model needs with that context, rounded up."""

QUESTION = user("What do you hear?")
FEW = {"temperature": 0.0, "max_tokens": 5}
SILENT_MP3 = b"\xff\xfb\x90\x00" + bytes(413)
"""A frame of 26 ms at 44.1 kHz and 128 kbit/s, without any coefficients."""


def wav(frequency: float, *, seconds: float = 25.0, rate: int = 16_000, channels: int = 1) -> bytes:
    times = np.arange(int(seconds * rate)) / rate
    samples = (8000 * np.sin(2 * np.pi * frequency * times)).astype("<i2").repeat(channels)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return file.getvalue()


def heard(child: EngineProcess, *sounds: bytes) -> list[Event]:
    with contextlib.ExitStack() as files:
        images = []
        for sound in sounds:
            file = files.enter_context(tempfile.NamedTemporaryFile())
            file.write(sound)
            file.flush()
            images.append({"format": "encoded", "path": file.name, "size": len(sound)})
        return child.run(QUESTION, images=images, params=FEW)


@pytest.fixture(scope="module")
def ear_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ear") / "ear.gguf"
    tiny_audio.make(path)
    return path


@pytest.fixture(scope="module")
def unbound(deep_model: Path, ear_path: Path) -> Iterator[EngineProcess]:
    with engine(deep_model, mmproj=str(ear_path), **FIELDS) as child:
        yield child


def test_any_budget_gives_the_same_answer_within_it(unbound: EngineProcess, deep_model: Path, ear_path: Path) -> None:
    sounds = [wav(90), wav(2000, rate=44_100, channels=2)]
    expected = [ids(heard(unbound, sound)) for sound in sounds]
    assert expected[0] != expected[1]
    for budget in (FLOOR + 8 * MIB, 24 * MIB):
        with engine(deep_model, mmproj=str(ear_path), vram_budget_bytes=budget, **FIELDS) as child:
            before = child.stats()
            assert [ids(heard(child, sound)) for sound in sounds] == expected
            after = child.stats()
        assert after["peak_bytes"] <= budget
        held, holds = (stats["buffers_bytes"] - stats["kv_bytes"] - stats["graph_bytes"] for stats in (before, after))
        assert held == holds  # the tower holds nothing any more


def test_the_floor_is_told(deep_model: Path, ear_path: Path) -> None:
    """A sound that the budget has no room for fails alone, with the budget that it needs, and works with that."""
    with engine(deep_model, mmproj=str(ear_path), vram_budget_bytes=96 * MIB, **FIELDS) as child:
        floor = child.stats()["floor_bytes"]
    with engine(deep_model, mmproj=str(ear_path), vram_budget_bytes=floor, **FIELDS) as child:
        refused = heard(child, wav(90))[-1]
        if refused["ev"] == "failed":
            assert refused["error"]["name"] == "budget_below_floor"
            needed = refused["error"]["detail"]["floor_bytes"]
            child.run(QUESTION, params=FEW)
        else:
            needed = floor
        assert child.stats()["peak_bytes"] <= floor
    with engine(deep_model, mmproj=str(ear_path), vram_budget_bytes=needed, **FIELDS) as child:
        assert heard(child, wav(90))[-1]["ev"] == "done"
        assert child.stats()["peak_bytes"] <= needed


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"RIFF", "cut off"),
        (b"RIFF" + bytes(100), "damaged"),
        (wav(90, seconds=0.1)[:24] + bytes(4) + wav(90, seconds=0.1)[28:], "damaged"),  # 0 samples a second
        (wav(90, seconds=0.1)[:36], "no WAV or MP3"),
        (wav(90, seconds=0), "no WAV or MP3"),
        (wav(90, rate=8000, seconds=0.1) + bytes(MAX_WAV_BYTES), "at most 8 MiB"),
        (b"ID3" + bytes(MAX_MP3_BYTES), "at most 4 MiB"),
        (b"ID3" + bytes(1000), "no WAV or MP3"),
        (tone(MAX_SECONDS + 1, 8000).data, f"must be from 0.1 to {MAX_SECONDS} s long"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no PNG or JPEG"),
    ],
    ids=[
        "cut off",
        "no header",
        "no rate",
        "no samples",
        "empty",
        "long WAV",
        "long MP3",
        "no MP3",
        "too long",
        "image",
    ],
)
def test_what_is_no_sound_is_refused(unbound: EngineProcess, data: bytes, why: str) -> None:
    refused = heard(unbound, data)[-1]
    assert (refused["ev"], refused["error"]["name"]) == ("failed", "bad_argument")
    assert why in refused["error"]["message"]


def test_a_tower_hears_or_sees(unbound: EngineProcess, model_path: Path, mmproj_path: Path) -> None:
    grey = {"format": "rgb", "width": 8, "height": 8, "stride": 0, "data": bytes(192)}
    refused = unbound.run(QUESTION, images=[grey], params=FEW)[-1]
    assert (refused["error"]["name"], "sounds only" in refused["error"]["message"]) == ("unsupported", True)
    with engine(model_path, mmproj=str(mmproj_path), **FIELDS) as child:
        refused = heard(child, wav(90))[-1]
    assert (refused["error"]["name"], "images only" in refused["error"]["message"]) == ("unsupported", True)


@in_trio
async def test_a_client_sends_sounds(deep_model: Path, ear_path: Path) -> None:
    """A large one goes through shared memory. A file that makes libmtmd end its process is refused at the launch."""
    few = frameshard.Sampling(max_tokens=3)
    options: dict[str, Any] = {"device": "cpu", "n_ctx": 1024, "n_parallel": 1}
    async with frameshard.launch(deep_model, mmproj=ear_path, **options) as client:
        for sound in (SILENT_MP3 * 50, wav(500, rate=44_100, channels=2)):
            result = await client.ask("What is that?", images=[sound], sampling=few).completed()
            assert result.n_prompt > 375
    fatal = ear_path.with_name("fatal.gguf")
    tiny_audio.make(fatal, stack=8)
    with pytest.raises(BadModel):
        async with frameshard.launch(deep_model, mmproj=fatal, **options):
            pass
