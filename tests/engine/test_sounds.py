"""Sounds in the engine process: a tower that hears, within the budget of the language model."""

from __future__ import annotations

import contextlib
import io
import struct
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


MP3_OF_13_BYTES = b"\xff\xe3\x08\xc0" + bytes(9)
"""A frame of 72 ms at 8 kHz in one channel, without a bit rate."""

FLAC_THAT_CLAIMS_DAYS = b"fLaC\x80\0\0\x22\x10\0\x10\0" + bytes(6) + b"\x0a\xc4\x42\xff\xff\xff\xff\xff" + bytes(116)


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


def riff(
    codec: int, samples: bytes, *, rate: int = 16_000, bits: int = 16, block: int = 2, before: bytes = b""
) -> bytes:
    """A WAV file with one channel."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, codec, 1, rate, rate * block, block, bits)
    body = b"WAVE" + before + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def floats(*, last: float) -> bytes:
    """A WAV file of 1 s, whose samples are floats."""
    return riff(3, np.array([*np.sin(np.arange(15_999)), last], "<f4").tobytes(), bits=32, block=4)


def with_length(frame: bytes, n_frames: int) -> bytes:
    """An MP3 frame of MPEG 1 in stereo that says how many frames the file has."""
    return frame[:36] + b"Xing" + struct.pack(">II", 1, n_frames) + frame[48:]


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
        assert (refused["ev"], refused["error"]["name"]) == ("failed", "budget_below_floor")
        needed = refused["error"]["detail"]["floor_bytes"]
        assert needed > floor
        assert child.run(QUESTION, params=FEW)[-1]["ev"] == "done"
        assert child.stats()["peak_bytes"] <= floor
    with engine(deep_model, mmproj=str(ear_path), vram_budget_bytes=needed, **FIELDS) as child:
        assert heard(child, wav(90))[-1]["ev"] == "done"
        assert child.stats()["peak_bytes"] <= needed


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"RIFF", "cut off"),
        (b"RIFF" + bytes(100), "damaged"),
        (wav(90, seconds=0.1)[:24] + bytes(4) + wav(90, seconds=0.1)[28:], "has 1 and 0: convert it"),
        (wav(90, rate=4000), "8000 to 192000 samples per second, and this one has 1 and 4000: convert it"),
        (wav(90, seconds=0.1)[:36], "damaged or cut off"),
        (wav(90, seconds=0), "damaged or cut off"),
        (riff(2, bytes(1000), bits=4, block=1), "4 bits and 1 channels in blocks of 1 bytes"),
        (riff(2, bytes(3), bits=4, block=256), "no WAV or MP3"),  # less than a block's header
        (riff(0x11, bytes(1000), bits=4, block=4), "damaged"),
        (riff(0x55, bytes(1000)), "samples of format 85 is not read"),
        (with_length(SILENT_MP3, 1_000_000) + SILENT_MP3 * 50, "has 1000000: cut it to 600 s"),
        (MP3_OF_13_BYTES * 100_000, "has 100000: cut it to 600 s"),
        (b"ID3\4" + bytes(6) + FLAC_THAT_CLAIMS_DAYS, "no WAV or MP3"),
        (wav(90, rate=8000, seconds=0.1) + bytes(MAX_WAV_BYTES), "at most 8 MiB"),
        (b"ID3" + bytes(MAX_MP3_BYTES), "at most 4 MiB"),
        (b"ID3" + bytes(1000), "no WAV or MP3"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no PNG or JPEG"),
    ],
    ids=[
        "cut off",
        "no header",
        "no rate",
        "low rate",
        "no samples",
        "empty",
        "ADPCM without blocks",
        "ADPCM cut off",
        "IMA ADPCM without blocks",
        "unknown codec",
        "MP3 that claims days",
        "MP3 of small frames",
        "FLAC",
        "long WAV",
        "long MP3",
        "no MP3",
        "image",
    ],
)
def test_what_is_no_sound_is_refused(unbound: EngineProcess, data: bytes, why: str) -> None:
    refused = heard(unbound, data)[-1]
    assert (refused["ev"], refused["error"]["name"]) == ("failed", "bad_argument")
    assert why in refused["error"]["message"]


def test_a_sound_that_is_too_long_is_refused(unbound: EngineProcess) -> None:
    refused = heard(unbound, tone(MAX_SECONDS + 1, 8000).data)[-1]
    assert (refused["ev"], refused["error"]["name"]) == ("failed", "bad_argument")
    assert f"must be from 0.1 to {MAX_SECONDS} s long" in refused["error"]["message"]


@pytest.mark.parametrize("sample", [np.nan, np.inf, -np.inf], ids=str)
def test_a_sound_whose_samples_are_no_numbers_fails_alone(unbound: EngineProcess, sample: float) -> None:
    expected = ids(heard(unbound, floats(last=0.0)))
    for _ in range(2):  # it is not remembered either
        refused = heard(unbound, floats(last=sample))[-1]
        assert refused["error"]["name"] == "bad_argument"
        assert "samples that are no numbers" in refused["error"]["message"]
    assert ids(heard(unbound, floats(last=0.0))) == expected


def test_files_of_other_programs_are_heard(unbound: EngineProcess) -> None:
    """Recorders put chunks before the format, and players tags before the first frame."""
    samples = wav(90)[44:]
    chunk = struct.pack("<4sI", b"bext", 7) + bytes(8)  # of an odd size
    assert ids(heard(unbound, riff(1, samples, before=chunk))) == ids(heard(unbound, wav(90)))
    tag = b"ID3\4\0\0" + bytes([0, 0, 1, 2]) + b"Xing" * 32 + bytes(2)
    expected = ids(heard(unbound, SILENT_MP3 * 50))
    assert ids(heard(unbound, tag + SILENT_MP3 * 50)) == expected
    assert ids(heard(unbound, with_length(SILENT_MP3, 50) + SILENT_MP3 * 50)) == expected
    for codec, bits, block in ((2, 4, 256), (0x11, 4, 256), (6, 8, 1), (7, 8, 1), (3, 64, 8)):
        assert heard(unbound, riff(codec, bytes(40_001), bits=bits, block=block))[-1]["ev"] == "done"


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
