"""Programs in C and C++ that test the C client's parts. Those that need its libraries are built by `make bindings`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parents[2]
BUILT = os.environ.get("FRAMESHARD_BINDINGS")
"""Where `make bindings` has built the C library and what is made with it."""


def run(command: list[str | Path], **options: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr


def test_sentences(tmp_path: Path) -> None:
    """Compiled as engines compile: without exceptions and RTTI."""
    source = REPO / "tests" / "bindings" / "sentences.cpp"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fno-exceptions", "-fno-rtti"]
    run(["g++", *flags, f"-I{REPO}/bindings/c/include", source, "-o", tmp_path / "sentences"])
    run([tmp_path / "sentences"])


def test_the_unreal_layer_compiles(tmp_path: Path) -> None:
    """Against stubs of the engine: it is not here. All in one go, which is faster."""
    layer = REPO / "bindings" / "unreal" / "Source" / "Frameshard"
    sources = sorted((layer / "Private").glob("*.cpp"))
    assert sources
    whole = tmp_path / "layer.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-fno-exceptions", "-fno-rtti"]
    places = [REPO / "tests" / "unreal_stubs", layer / "Public", layer / "Private", REPO / "bindings" / "c" / "include"]
    run(["g++", *flags, *(f"-I{place}" for place in places), whole])


@pytest.mark.skipif(BUILT is None, reason="`make bindings` runs this one")
@pytest.mark.parametrize("program", ["codec_vectors", "host", "game", "unreal_layer"])
def test_program(program: str, model_path: Path) -> None:
    arguments: dict[str, list[str | Path]] = {
        "codec_vectors": [REPO / "bindings" / "vectors"],
        "game": [model_path, sys.executable],
        "unreal_layer": [model_path, sys.executable],
    }
    run([Path(str(BUILT)) / program, *arguments.get(program, [])])


def test_the_program_in_the_readme_talks(program_env: dict[str, str], built: Path, tmp_path: Path) -> None:
    readme = (REPO / "bindings" / "c" / "README.md").read_text()
    (source,) = re.findall(r"```c\n(.*?)```", readme, flags=re.DOTALL)
    assert source == (REPO / "bindings" / "c" / "examples" / "npc.c").read_text()
    assert len(source.splitlines()) <= 20
    (tmp_path / "npc.c").write_text(source)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{REPO}/bindings/c/include"]
    run(["gcc", *flags, tmp_path / "npc.c", f"-L{built}", "-lframeshard", "-o", tmp_path / "npc"])
    command = [tmp_path / "npc", program_env["FRAMESHARD_MODEL"], "Any rooms left?"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the "python3" that has frameshard
    said = subprocess.run(
        command, env=program_env | {"PATH": path}, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    assert said.stdout.strip()


def ask_the_runner(built: Path, commands: list[dict[str, Any]], last: str) -> list[dict[str, Any]]:
    """Gives commands to the C runner, then polls until a job has this last event; returns all events."""
    with subprocess.Popen([built / "runner_c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None

        def tell(command: dict[str, Any]) -> dict[str, Any]:
            runner.stdin.write(json.dumps(command) + "\n")
            runner.stdin.flush()
            answer: dict[str, Any] = json.loads(runner.stdout.readline())
            assert answer["ok"], (command, answer)
            return answer

        events: list[dict[str, Any]] = []
        for command in commands:
            tell(command)
        deadline = time.monotonic() + 120
        while not any(event["type"] in (last, "closed") for event in events):
            assert time.monotonic() < deadline, events
            events += tell({"do": "poll", "limit": 64, "timeout_s": 1.0})["events"]
        tell({"do": "close"})
    return events


def test_an_image_in_c(built: Path, model_path: Path, mmproj_path: Path, tmp_path: Path) -> None:
    """Pixels in shared memory, progress, and an answer; without something that sees, an error by name."""
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(256)) * (224 * 224 * 3 // 256))
    images = [{"format": "rgb", "width": 224, "height": 224, "file": str(pixels)}]
    ask = {"do": "ask", "text": "What is it?", "options": {"images": images, "sampling": {"max_tokens": 4}}}
    sees = {"model": str(model_path), "device": "cpu", "n_ctx": 1024, "n_parallel": 1, "python": sys.executable}
    events = ask_the_runner(built, [{"do": "launch", "options": sees | {"mmproj": str(mmproj_path)}}, ask], "done")
    types = [event["type"] for event in events]
    assert types[0] == "ready"
    assert types[-1] == "done"
    assert types.index("started") < types.index("progress") < types.index("text")
    assert {"encode", "prefill"} >= {event["phase"] for event in events if event["type"] == "progress"}
    (failed,) = [
        event for event in ask_the_runner(built, [{"do": "launch", "options": sees}, ask], "failed") if event["job"]
    ][-1:]
    assert failed["status"] == "unsupported"
