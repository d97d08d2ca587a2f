"""Builds and starts the runner of each binding."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPO = HERE.parents[2]
BUILT = os.environ.get("FRAMESHARD_BINDINGS")
"""The directory in which `make bindings` has built the C library and programs with it. If set, every runner must be
there."""


def _built(name: str) -> list[str]:
    if BUILT is None:
        pytest.skip("`make bindings` runs this one")
    program = Path(BUILT) / (name + ".exe" * (sys.platform == "win32"))
    assert program.is_file(), f"{program} has not been built"
    return [str(program)]


def _csharp() -> list[str]:
    """Compiles the runner, which takes a few seconds. Mono finds the library beside the program. For Windows
    tests/windows/test.sh has compiled it."""
    if sys.platform == "win32":
        return [os.environ["FRAMESHARD_DOTNET"], *_built("runner_csharp")]
    program = Path(_built("libframeshard.so")[0]).with_name("runner_csharp.exe")
    sources = [*sorted((REPO / "bindings" / "unity" / "Runtime" / "Core").glob("*.cs")), HERE / "Runner.cs"]
    # 0649 warns of fields that only C code sets.
    options = ["-langversion:7", "-warnaserror", "-nowarn:0649", "-r:System.Core", "-r:System.Json"]
    subprocess.run(["mcs", *options, f"-out:{program}", *map(str, sources)], check=True)
    return ["mono", str(program)]


def _lua() -> list[str]:
    if sys.platform == "win32":
        pytest.skip("LuaJIT for Windows is in no package that tests/windows/test.sh could fetch")
    return ["env", f"FRAMESHARD_LIBRARY={_built('libframeshard.so')[0]}", "luajit", str(HERE / "runner.lua")]


RUNNERS: dict[str, Callable[[], list[str]]] = {
    "python": lambda: [sys.executable, str(HERE / "runner.py")],
    "c": lambda: _built("runner_c"),
    "cpp": lambda: _built("runner_cpp"),
    "csharp": _csharp,
    "lua": _lua,
}
NAMES = list(RUNNERS)


def command(name: str) -> list[str]:
    """The command of a runner. Skips the test if this run has not built it."""
    return RUNNERS[name]()
