"""The flight of samples/streaming_world: a real renderer and a real sidecar under one grant."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio

import frameshard
from frameshard.errors import ConnectionLost
from frameshard.testing import fake_engine

SAMPLE = Path(__file__).parents[1] / "samples" / "streaming_world"
SMALL = ("--grant-mb", "64", "--device", "emulated:0.2")
"""Options of a flight with the wordy model. Over the slow link its answers cost little."""

EGL = "import moderngl; moderngl.create_context(standalone=True, backend='egl', require=330)"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def egl() -> None:
    """OpenGL 3.3 without a display."""
    tried = run("-c", EGL)
    if tried.returncode:
        pytest.skip(f"no OpenGL through EGL (apt-get install libegl1 libgl1-mesa-dri): {tried.stderr.splitlines()[-1]}")


def fly(directory: Path, seconds: int, *options: str) -> dict[str, Any]:
    """Flies and returns the recording."""
    path = directory / "flight.json"
    result = run(str(SAMPLE / "main.py"), "--unattended", "--seconds", str(seconds), "--record", str(path), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    flight: dict[str, Any] = json.loads(path.read_text())
    assert flight["seconds"] >= seconds
    assert flight["frames"]
    return flight


@pytest.mark.usefixtures("egl")
def test_the_deal_keeps_the_grant_and_moves_both_ways(wordy_model: Path, tmp_path: Path) -> None:
    flight = fly(tmp_path, 8, "--model", str(wordy_model), *SMALL)
    grant, fixed = flight["grant_bytes"], flight["fixed_bytes"]
    for _, _, _, _, _, limit, held, may_hold, _, _ in flight["frames"]:
        assert fixed + held + may_hold <= grant
        assert fixed + limit + may_hold <= grant
    for _, _, used, _, _, least_held in flight["samples"]:
        assert fixed + used + least_held <= grant
    assert flight["samples"]

    held, may_hold = ([frame[column] for frame in flight["frames"]] for column in (6, 7))
    field = may_hold.index(max(may_hold))
    for city in (slice(field), slice(field, None)):
        assert min(may_hold[city]) < max(may_hold) - grant / 8
        assert max(held[city]) > min(held) + grant / 8

    assert flight["n_asked"] == len(flight["answers"]) > 0
    for answer in flight["answers"]:
        assert answer["reason"] in ("stop", "length")
        assert answer["text"].strip()
    picture = tmp_path / "flight.png"
    drawn = run(str(SAMPLE / "plot.py"), str(tmp_path / "flight.json"), str(picture))
    assert drawn.returncode == 0, drawn.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("egl")
def test_a_static_split_and_a_flight_without_ai_have_no_deal(wordy_model: Path, tmp_path: Path) -> None:
    static = fly(tmp_path, 5, "--static", "--model", str(wordy_model), *SMALL)
    assert len({frame[7] for frame in static["frames"]}) == 1
    assert static["answers"]
    alone = fly(tmp_path, 5, "--no-ai", "--grant-mb", "24")
    assert {frame[7] for frame in alone["frames"]} == {0}
    assert not alone["answers"]
    assert [frame[8] for frame in alone["frames"]] == [30] * len(alone["frames"])


@pytest.mark.usefixtures("egl")
def test_a_grant_below_the_floor_is_named(wordy_model: Path) -> None:
    result = run(str(SAMPLE / "main.py"), "--unattended", "--grant-mb", "16", "--model", str(wordy_model))
    assert result.returncode == 2
    assert result.stderr.startswith("budget_below_floor: ")
    assert "Traceback" not in result.stderr


def test_no_villager_is_asked_when_the_sidecar_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question fails at once then. Asked again and again, it would leave no other task a turn."""
    pytest.importorskip("moderngl")
    monkeypatch.syspath_prepend(SAMPLE)
    flight, world = (importlib.import_module(name) for name in ("flight", "world"))
    monkeypatch.setattr(flight, "itertools", mock.Mock(cycle=list))  # each question once

    async def main() -> None:
        async with frameshard.launch("any name", engine=fake_engine()) as client:
            recording = flight.Flight("deal", "", "", "", 0, 0, [])
            game = flight.Game(mock.Mock(), world.World.of(128 << 20, 60), recording, client)
            os.kill(client.info.pid, signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await game._talk("Mira")
            assert recording.n_lost == 1

    trio.run(main)


@pytest.mark.parametrize(
    "options", [["--seconds", "nan"], ["--seconds", "inf"], ["--seconds", "4"], ["--record", "/missing/flight.json"]]
)
def test_a_bad_option_is_refused_before_the_flight(options: list[str]) -> None:
    result = run(str(SAMPLE / "main.py"), "--unattended", "--model", "no.gguf", *options)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("main.py: error: ")


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_what_is_no_recording_is_not_drawn(content: str | None, tmp_path: Path) -> None:
    source = tmp_path / "flight.json"
    if content is not None:
        source.write_text(content)
    result = run(str(SAMPLE / "plot.py"), str(source), str(tmp_path / "flight.png"))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert str(source) in result.stderr
