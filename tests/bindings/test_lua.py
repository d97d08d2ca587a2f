"""The Lua module in LuaJIT with a real sidecar (apt-get install luajit)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
LUA = REPO / "bindings" / "lua"


def luajit(env: dict[str, str], *arguments: str | Path) -> str:
    result = subprocess.run(
        ["luajit", *arguments], env=env | {"LUA_PATH": f"{LUA}/?.lua"}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_module(program_env: dict[str, str]) -> None:
    assert luajit(program_env, REPO / "tests" / "bindings" / "module.lua") == "ok\n"


def test_calls_of_tools_and_their_results(program_env: dict[str, str], talking_model: Path) -> None:
    """Through the C library, so this is also its test."""
    script = REPO / "tests" / "bindings" / "tools.lua"
    assert luajit(program_env, script, sys.executable, talking_model) == "ok\n"


def test_the_program_in_the_readme_talks(program_env: dict[str, str], model_path: Path, tmp_path: Path) -> None:
    (script,) = re.findall(r"```lua\n(.*?)```", (LUA / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "innkeeper.lua").write_text(script)
    said = luajit(program_env, tmp_path / "innkeeper.lua", model_path, sys.executable)
    found = re.fullmatch(r"(.+)\n\((\d+) bytes\)\n", said, flags=re.DOTALL)
    assert found is not None, said
    assert len(found[1].encode()) == int(found[2])
