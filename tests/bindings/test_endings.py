"""The programs in the READMEs of the bindings end with a message and a status if something fails. None hangs.

Each is built from the text of its README. It is run with a missing model, a Python without frameshard, a budget below
the floor, a job that fails, and a sidecar that ends during an answer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sidecars
from frameshard.testing import fake_engine

REPO = Path(__file__).parents[2]
BINDINGS = REPO / "bindings"
HANG_S = 240.0
LANGUAGES = ["c", "cpp", "csharp", "lua"]


def block(readme: str, language: str, n: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", (BINDINGS / readme).read_text(), flags=re.DOTALL)[n]


@pytest.fixture(scope="module")
def programs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The command of each language's program. Its further arguments are MODEL PYTHON."""
    folder = tmp_path_factory.mktemp("programs")
    sources = {
        "npc.c": block("c/README.md", "c"),
        "npc.cpp": block("c/README.md", "cpp"),
        "Npc.cs": block("unity/README.md", "csharp", 1),
        "npc.lua": block("lua/README.md", "lua"),
    }
    for name, text in sources.items():
        (folder / name).write_text(text)
    link = [f"-I{BINDINGS}/c/include", f"-L{built}", "-lframeshard", f"-Wl,-rpath,{built}"]
    core = sorted((BINDINGS / "unity" / "Runtime" / "Core").glob("*.cs"))
    commands: list[list[str | Path]] = [
        ["gcc", folder / "npc.c", *link, "-o", folder / "npc-c"],
        ["g++", "-std=c++17", folder / "npc.cpp", *link, "-o", folder / "npc-cpp"],
        ["mcs", "-langversion:7", "-nowarn:0649", f"-out:{folder}/npc.exe", *core, folder / "Npc.cs"],
    ]
    for command in commands:
        subprocess.run(command, check=True, timeout=300)
    return {
        "c": [f"{folder}/npc-c"],
        "cpp": [f"{folder}/npc-cpp"],
        "csharp": ["mono", f"{folder}/npc.exe"],
        "lua": ["luajit", f"{folder}/npc.lua"],
    }


def environment(program_env: dict[str, str], python: Path) -> dict[str, str]:
    """An environment in which `python3` is `python`."""
    (python.parent / "python3").symlink_to(python)
    lua = {"LUA_PATH": f"{BINDINGS}/lua/?.lua"}
    return program_env | lua | {"PATH": f"{python.parent}:{os.environ['PATH']}"}


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fails(command: list[str], env: dict[str, str]) -> str:
    """Runs a program that must fail; returns its message."""
    result = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stderr


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_model_that_is_missing(
    language: str, programs: dict[str, list[str]], program_env: dict[str, str], tmp_path: Path
) -> None:
    python = script(tmp_path / "bin" / "python", f'exec {sys.executable} "$@"')
    missing = str(tmp_path / "no.gguf")
    said = fails([*programs[language], missing, str(python)], environment(program_env, python))
    assert said.count("model_not_found: ") == 1
    assert missing in said


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_python_without_frameshard(
    language: str, programs: dict[str, list[str]], program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    python = script(tmp_path / "bin" / "python", f'exec {sys.executable} -I -S "$@"')
    said = fails([*programs[language], str(model_path), str(python)], environment(program_env, python))
    assert said.count("engine_died: ") == 1
    (line,) = [line for line in said.splitlines() if line.startswith("engine_died: ")]
    assert re.search(r"ended before it was ready: \S*python3? ended with status 1, and its last words are: ", line)
    assert "No module named" in said
    assert "in which frameshard is installed" in said


CHANGED = """
import json, sys
from frameshard.broker import __main__ as broker
read = broker._read_line
broker._read_line = lambda fd: json.dumps(json.loads(read(fd)) | {changes!r}).encode()
sys.argv[1:] = sys.argv[3:]  # without -c and its program
sys.exit(broker.main())
"""


def changed(folder: Path, **changes: Any) -> Path:
    """A Python that changes options of the sidecar, because the programs set nearly none."""
    folder.mkdir()
    (folder / "changed.py").write_text(CHANGED.format(changes=changes))
    return script(folder / "python", f'echo $$ > {folder}/pid\nexec {sys.executable} {folder}/changed.py "$@"')


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_budget_below_the_floor(
    language: str, programs: dict[str, list[str]], program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    python = changed(tmp_path / "bin", device="emulated", vram_budget_bytes=1)
    said = fails([*programs[language], str(model_path), str(python)], environment(program_env, python))
    assert said.count("budget_below_floor: ") == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_job_that_fails(
    language: str, programs: dict[str, list[str]], program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    """The engine dies at the third token of every job. The sidecar goes on."""
    python = changed(tmp_path / "bin", engine=fake_engine(endless=True, crash_at_token=3))
    said = fails([*programs[language], str(model_path), str(python)], environment(program_env, python))
    assert said.count("engine_died: ") == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_sidecar_that_is_killed(
    language: str, programs: dict[str, list[str]], program_env: dict[str, str], model_path: Path, tmp_path: Path
) -> None:
    """It is killed during an answer that would take at least half a minute."""
    python = changed(tmp_path / "bin", engine=fake_engine(endless=True, delay_s=0.5))
    command = [*programs[language], str(model_path), str(python)]
    with sidecars.started(
        command, env=environment(program_env, python), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        if language == "csharp":
            assert program.stdout.readline() == b"You: Good evening!\n"
        assert program.stdout.read(1)
        os.kill(int((python.parent / "pid").read_text()), signal.SIGKILL)
        errors = program.communicate(timeout=HANG_S)[1].decode()
    assert program.returncode == 1, errors
    assert errors.count("connection_lost: ") == 1
    assert "the sidecar has ended by signal 9" in errors
