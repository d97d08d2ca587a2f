"""A bundle for Windows, made here and tried under Wine, which is too old for the newest Python and numpy.

FRAMESHARD_WINDOWS is the directory in which native/windows/build.sh has built and tests/windows/test.sh has run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if "FRAMESHARD_WINDOWS" not in os.environ:
    pytest.skip("`make windows` runs these", allow_module_level=True)
if sys.version_info[:2] != (3, 11):
    pytest.skip(
        "the Python for Windows of these tests is 3.11, and a bundle needs the same here", allow_module_level=True
    )

BUILT = Path(os.environ["FRAMESHARD_WINDOWS"])
HERE = Path(__file__).parent
TALK = """
import sys, trio, frameshard
async def main():
    options = {"device": "emulated", "n_threads": 1, "vram_budget_mb": 128}
    async with frameshard.launch(sys.argv[1], **options) as client:
        answer = await client.ask("Who are you?", sampling=frameshard.Sampling(max_tokens=8)).completed()
        print(answer.n_generated, frameshard.__file__)
trio.run(main)
"""


def wine(*command: str | Path, **environment: str) -> str:
    """The output of a program. It must succeed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = {**kept, "WINEPREFIX": str(BUILT / "wine"), "WINEDEBUG": "-all", **environment}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 600}
    result = subprocess.run(["wine", *map(str, command)], env=environment, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle with what Wine needs (see test.sh), moved after it was made; and its manifest."""
    directory = tmp_path_factory.mktemp("windows")
    constraint = directory / "constraint.txt"
    pins = (HERE / "requirements.txt").read_text().splitlines()
    constraint.write_text("".join(f"{line}\n" for line in pins if not line.startswith("#")))
    command = [sys.executable, "-m", "frameshard", "bundle", directory / "made", "--json"]
    command += ["--platform", "windows-x86_64", "--native", BUILT, "--python", BUILT / "packages" / "embed" / "cp311"]
    environment = os.environ | {"UV_CONSTRAINT": str(constraint)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    place = directory / "a game's place"
    shutil.move(directory / "made", place)
    shutil.copy(BUILT / "python" / "bcryptprimitives.dll", place / "sidecar")
    shutil.copy(HERE / "wine_sitecustomize.py", place / "sidecar" / "packages" / "sitecustomize.py")
    with (place / "sidecar" / "python311._pth").open("a") as paths:
        paths.write("import site\n")
    return place, json.loads(result.stdout)


def test_the_command_line(bundled: tuple[Path, dict[str, Any]]) -> None:
    place, manifest = bundled
    assert f"frameshard {manifest['frameshard']}" in wine("cmd", "/c", place / "frameshard.cmd", "--version")


def test_it_talks_and_takes_nothing_from_its_environment(
    bundled: tuple[Path, dict[str, Any]], model_path: Path, tmp_path: Path
) -> None:
    place, _ = bundled
    (tmp_path / "frameshard.py").write_text("raise SystemExit('taken from PYTHONPATH')")
    script = tmp_path / "talk.py"
    script.write_text(TALK)
    said = wine(place / "sidecar" / "python.exe", script, f"Z:{model_path}", PYTHONPATH=f"Z:{tmp_path}")
    n_generated, module = said.split(maxsplit=1)
    assert n_generated == "8"
    assert "sidecar\\packages" in module


def test_the_manifest(bundled: tuple[Path, dict[str, Any]]) -> None:
    place, manifest = bundled
    assert manifest["system"] == {
        "os": "windows",
        "machine": "x86_64",
        "cpu": {"level": "x86-64-v3", "flags": ["avx", "avx2", "bmi2", "f16c", "fma"]},
    }
    assert {"frameshard", "llama-cpp-python", "numpy", "pyzmq", "cffi"} <= set(manifest["packages"])
    assert not list(place.rglob("*.so"))
    assert not list(place.rglob("*tkinter*"))
    there = {path.name for path in (place / "licences").iterdir()}
    assert {*manifest["packages"], "llama.cpp", "python", "gcc-mingw-w64", "mingw-w64"} - there == set(
        manifest["without_licence_text"]
    )
