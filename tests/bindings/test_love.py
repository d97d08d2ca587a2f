"""samples/love_tavern plays by itself in the real LÖVE, on a virtual display (apt-get install love xvfb)."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

TAVERN = Path(__file__).parents[2] / "samples" / "love_tavern"
XVFB = ["xvfb-run", "--auto-servernum", "--server-args=-screen 0 1280x720x24"]


def love(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*XVFB, "love", str(TAVERN), *arguments], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


def test_memory_moves_while_she_speaks(program_env: dict[str, str], model_path: Path, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    options = ["--device", "emulated", "--python", sys.executable, "--unattended", "--screenshot", str(shot)]
    result = love(program_env, str(model_path), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("3 answers; ")
    picture = shot.read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (1280, 720)
    assert len(picture) > 100_000, "a scene, and not one colour"


def test_a_missing_model_is_named(program_env: dict[str, str], tmp_path: Path) -> None:
    result = love(program_env, str(tmp_path / "no.gguf"), "--python", sys.executable, "--unattended")
    assert result.returncode == 1
    assert "model_not_found" in result.stderr
    assert "traceback" not in result.stderr.lower()
