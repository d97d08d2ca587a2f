"""``frameshard doctor``, each time as a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import frameshard
from frameshard import native


def doctor(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameshard", "doctor", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def document_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return dict(json.loads(result.stdout))


def test_a_machine_that_works() -> None:
    result = doctor("--json")
    found = document_of(result)
    assert result.returncode == 0
    assert found["works"]
    assert "pytest" not in found["versions"]
    assert found["versions"]["llama-cpp-python"] == native.LLAMA_CPP_PYTHON
    assert found["machine"]["cpu"]
    assert found["devices"]["native library"]
    assert found["devices"]["auto"] in ("cpu", *found["devices"])


def test_a_source_tree_that_was_never_installed(tmp_path: Path) -> None:
    """Its packages are those of this Python, without what pip has noted about frameshard."""
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(place).iterdir():
            if not entry.name.startswith("frameshard"):
                (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / "frameshard").symlink_to(Path(frameshard.__file__).parent)
    result, version = (
        subprocess.run(
            [sys.executable, "-S", "-m", "frameshard", *args],  # -S: no other place has packages
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        for args in (["doctor", "--json"], ["--version"])
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert version.stdout == f"frameshard not installed\nllama-cpp-python {native.LLAMA_CPP_PYTHON}\n"
    found = document_of(result)
    assert found["versions"]["frameshard"] == "not installed, run from its source"
    assert found["versions"]["llama-cpp-python"] == native.LLAMA_CPP_PYTHON
    assert found["works"]


def test_the_page_is_narrow_and_names_nobody() -> None:
    result = doctor()
    assert result.returncode == 0
    assert "models can run here" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert str(Path.home()) not in result.stdout


@pytest.mark.parametrize(
    ("home", "cache", "shown"),
    [
        ("/home/al", "/home/al/.cache", "~/.cache/frameshard"),
        ("/home/al", "/home/alice/.cache", "/home/alice/.cache/frameshard"),
        ("/home/al", "/mnt/home/al", "/mnt/home/al/frameshard"),
        ("/", "/var/cache", "/var/cache/frameshard"),
    ],
)
def test_only_the_home_directory_is_made_anonymous(home: str, cache: str, shown: str) -> None:
    assert document_of(doctor("--json", HOME=home, XDG_CACHE_HOME=cache))["files"]["cache"] == shown


def test_a_cache_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    cache = tmp_path / ("a" * 300)  # no file system has such a name; modes do not stop tests that run as root
    result = doctor("--json", XDG_CACHE_HOME=str(cache))
    found = document_of(result)
    assert result.returncode == 0, result.stderr
    assert found["files"]["cache"].startswith(str(cache))
    assert found["versions"]["llama-cpp-python"] == native.LLAMA_CPP_PYTHON


def test_a_driver_that_writes_no_text(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os; os.write(2, b'\\xc1\\xff driver'); os._exit(1)")
    result = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1, result.stderr
    assert any(problem.endswith(" driver") for problem in document_of(result)["problems"])


def test_a_library_that_writes_to_stdout(tmp_path: Path) -> None:
    """As the banner of a driver, before and behind what has been found."""
    source = f"import atexit, os, sys; sys.path.remove({str(tmp_path)!r}); del sys.modules['llama_cpp']\n"
    source += "os.write(1, b'banner'); atexit.register(os.write, 1, b'farewell'); import llama_cpp\n"
    (tmp_path / "llama_cpp.py").write_text(source)
    result = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert document_of(result)["works"]
    assert result.returncode == 0


def test_a_missing_native_library_is_a_problem(tmp_path: Path) -> None:
    result = doctor("--json", FRAMESHARD_DEVICE_LIB=str(tmp_path / "gone.so"))
    found = document_of(result)
    assert result.returncode == 1
    assert not found["works"]
    assert any("gone.so is not installed" in problem for problem in found["problems"])


def test_a_driver_library_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise RuntimeError('libcuda.so.1: cannot open shared object file')")
    result = doctor("--json", PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1
    assert any("libcuda.so.1" in problem for problem in document_of(result)["problems"])


def test_a_driver_that_ends_its_process_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os; os.abort()")
    result = doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1
    assert "ended with status -6" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
