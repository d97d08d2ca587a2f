"""Model files are tried in a separate process, which may crash, before a command loads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mutants
from frameshard.engine import probe
from frameshard.engine.scratch import try_files
from frameshard.errors import BadModel, ModelNotFound


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for results of tests; it is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "frameshard" / "verdicts"


@pytest.fixture
def killer(mmproj_path: Path, tmp_path: Path) -> Path:
    """A vision tower that crashes libmtmd in the first encode."""
    file = mutants.Gguf(mmproj_path)
    for info in file.tensors:
        info.name = info.name.replace(b".attn_q.weight", b".attn_q.weighs")
    return file.write(tmp_path / "killer.gguf")


def test_a_file_that_loads_is_tried_once(tiny_model: Callable[[str], Path], verdicts: Path) -> None:
    try_files(str(tiny_model("llama")))
    (kept,) = verdicts.iterdir()
    before = kept.stat().st_mtime_ns
    try_files(str(tiny_model("llama")))
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(ModelNotFound):
        try_files("nowhere.gguf")


def test_a_cache_that_cannot_be_read_keeps_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file system has such a name. Modes of folders do not stop tests that run as root."""
    model = tiny_model("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("a" * 300)))
    try_files(str(model))
    assert probe._kept(probe.fingerprint("emulated", 1)) is None


def test_a_file_that_kills_is_a_bad_model(model_path: Path, killer: Path, verdicts: Path) -> None:
    with pytest.raises(BadModel, match=r"signal 11 while it loaded .* with killer\.gguf"):
        try_files(str(model_path), str(killer))
    assert not verdicts.exists()


def test_a_file_that_is_refused_says_why(tiny_model: Callable[[str], Path], tmp_path: Path, verdicts: Path) -> None:
    file = mutants.Gguf(tiny_model("llama"))
    info = next(info for info in file.tensors if info.name == b"blk.1.ffn_up.weight")
    info.data = b"\0\x7e" * (len(info.data) // 2)
    with pytest.raises(BadModel, match="computes NaN"):
        try_files(str(file.write(tmp_path / "nan.gguf")))
    assert not verdicts.exists()


def test_a_command_outlives_it(model_path: Path, killer: Path, verdicts: Path) -> None:
    command = ["bench", "--model", str(model_path), "--image", "64x64", "--mmproj", str(killer), "--device", "emulated"]
    result = subprocess.run([sys.executable, "-m", "frameshard", *command], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2, result.stderr
    assert "llama.cpp ended with signal 11 while it loaded" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert not verdicts.exists()
