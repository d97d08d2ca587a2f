"""Files with KV caches: what is refused before llama.cpp sees it, and how they are written."""

from __future__ import annotations

import dataclasses
import os
import random
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batcher_driver import tale, talk
from engine_driver import EngineProcess

import tiny_models
from frameshard import ggml
from frameshard.engine import kvfile
from frameshard.engine.kvstore import Blob

ENGINE = {
    "model": "ab" * 32,
    "kv_type": "f16",
    "device": "CUDA0",
    "mode": "stream_only",
    "llama_cpp": "1",
    "n_parallel": "4",
}
LIMITS = {"most_tokens": 512, "most_bytes": 1 << 20, "memory": lambda n_bytes: np.empty(n_bytes, np.uint8)}


def blob() -> Blob:
    cells = np.frombuffer(random.Random(3).randbytes(5000), np.uint8)
    return Blob(tokens=list(range(40)), shapes=[(16, 16), (16, 16), (8, 16)], data=cells)


def write(path: Path, content: Blob) -> int:
    return kvfile.write(str(path), ENGINE, content, kvfile.create(str(path), f"{path}.part"))


def read(path: Path, engine: dict[str, str] = ENGINE, **limits: Any) -> Blob:
    found = kvfile.read(str(path), engine, **{**LIMITS, **limits})
    assert (found.file_bytes, found.adapters) == (path.stat().st_size, ())
    return found.blob


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "mira.kv", blob()
    assert write(path, written) == path.stat().st_size
    found = read(path)
    assert (found.tokens, found.shapes) == (written.tokens, written.shapes)
    assert found.data.tobytes() == written.data.tobytes()
    assert found.conversation is None


def test_a_thousand_damaged_files_are_refused(tmp_path: Path) -> None:
    path, dice = tmp_path / "mira.kv", random.Random(19)
    write(path, blob())
    whole = path.read_bytes()
    for _ in range(1000):
        copy = bytearray(whole)
        at = dice.choice((dice.randint(0, 300), dice.randint(0, len(copy))))
        copy[at : at + dice.randint(0, 7)] = dice.randbytes(dice.randint(0, 7))
        if copy != whole:
            path.write_bytes(copy)
            with pytest.raises(kvfile.Unusable):
                read(path)


def test_only_the_engines_own_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "mira.kv"
    write(path, blob())
    for name in ENGINE:
        with pytest.raises(kvfile.Unusable, match=f"another engine: {name}"):
            read(path, {**ENGINE, name: "other"})
    with pytest.raises(kvfile.Unusable, match="more than the context"):
        read(path, most_tokens=39)
    with pytest.raises(kvfile.Unusable, match="more than the KV store"):
        read(path, most_bytes=4999)


def test_a_file_of_an_earlier_version_does_not_say_n_parallel(tmp_path: Path) -> None:
    path, content = tmp_path / "mira.kv", blob()
    earlier = {name: value for name, value in ENGINE.items() if name != "n_parallel"}
    kvfile.write(str(path), earlier, content, kvfile.create(str(path), f"{path}.part"))
    assert read(path).tokens == content.tokens


def test_a_file_is_refused_whose_cells_llama_cpp_refuses(tiny_model: Callable[[str], Path]) -> None:
    """It takes those of an engine with another context, also if the sliding windows of that one keep more cells."""
    path = tiny_model("gemma3")
    with talk(path, n_ctx=512, n_ubatch=512) as one:
        one.say(tale("fox"), "fox")
        usual, copy = kvfile.identity(one.runtime), one.batcher.reuse.copy_of("fox")
        assert copy is not None
    for n_parallel in (1, 2):
        with talk(path, n_ctx=4096, n_ubatch=16, n_parallel=n_parallel) as one:
            assert 0 < one.runtime.llama.sliding_cells < len(copy.tokens)
            same = kvfile.identity(one.runtime) == usual
            assert one.runtime.restore(0, copy.data, len(copy.tokens)) == same == (n_parallel == 1)


def test_the_engine_is_told_by_all_that_changes_its_cells(tiny_model: Callable[[str], Path]) -> None:
    """Else a launch with another option would go on from cells that it would not have computed."""

    def identity(name: str = "llama", **options: object) -> dict[str, str]:
        with talk(tiny_model(name), **options) as one:
            return kvfile.identity(one.runtime)

    usual = identity()
    assert usual == identity(n_ctx=512, kv_cache_bytes=0)
    others = {"name": "qwen3moe", "mode": "stream_only", "kv_type": "q8_0", "device": "emulated", "n_parallel": 2}
    for option, value in others.items():
        assert identity(**{option: value}) != usual, option


def test_the_engine_is_told_by_its_rope_factors(tmp_path: Path) -> None:
    """Some models have factors for long contexts and others for short ones. llama.cpp chooses by the context."""

    def two_sets(file: Any) -> None:
        file.key("rope.scaling.type", "longrope")
        file.key("rope.scaling.original_context_length", 512)
        file.vector("rope_factors_short.weight", 32, spread=0.0)
        file.vector("rope_factors_long.weight", 32, mean=8.0, spread=0.5)

    model = tmp_path / "longrope.gguf"
    tiny_models.make("llama", model, n_layer=1, add=two_sets)

    def identity(n_ctx: int) -> dict[str, str]:
        with talk(model, n_ctx=n_ctx) as one:
            return kvfile.identity(one.runtime)

    assert identity(512) == identity(256)
    assert identity(768) == identity(1024)
    assert identity(512) != identity(768)


def test_the_engine_is_told_by_its_gpu(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """``CUDA0`` is another GPU on another PC."""
    with talk(tiny_model("llama")) as one:
        one.runtime.device_name = "CUDA0"
        monkeypatch.setattr(ggml, "gpu_handles", lambda: {"CUDA0": 1, "CUDA1": 2})
        monkeypatch.setattr(ggml, "description", {1: "GPU A", 2: "GPU B"}.__getitem__)
        here = kvfile.identity(one.runtime)
        monkeypatch.setattr(ggml, "description", {1: "GPU B", 2: "GPU A"}.__getitem__)
        assert kvfile.identity(one.runtime) != here


def test_links_are_not_followed_and_others_cannot_read(tmp_path: Path) -> None:
    path, target = tmp_path / "mira.kv", tmp_path / "target"
    target.write_text("not to be touched")
    path.symlink_to(target)
    with pytest.raises(kvfile.Unusable):
        read(path)
    write(path, blob())
    assert target.read_text() == "not to be touched"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [path, target]
    with pytest.raises(OSError, match=r"directory"):
        write(tmp_path, blob())
    assert sorted(tmp_path.iterdir()) == [path, target]
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(kvfile.Unusable):
            read(other)
    with pytest.raises(FileExistsError, match="pipe is there"):
        write(tmp_path / "pipe", blob())
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "pipe", target]


@pytest.mark.skipif(sys.platform != "linux", reason="looks which files are open")
def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where an open file cannot be removed."""
    unlink = os.unlink

    def refusing(path: str) -> None:
        opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
        if path in opened:
            raise PermissionError(path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    wrong: Any = SimpleNamespace(nbytes=5000, data=None)
    with pytest.raises(TypeError):
        write(tmp_path / "mira.kv", dataclasses.replace(blob(), data=wrong))
    assert not list(tmp_path.iterdir())


ENDING = """
import hashlib, time
from frameshard.engine import kvfile, process

class Slow:
    def __init__(self):
        self.real = hashlib.sha256()
        self.digest = self.real.digest

    def update(self, piece):
        time.sleep({seconds})
        self.real.update(piece)

kvfile.hashlib = type("", (), {{"sha256": Slow, "_Hash": object}})
process.CLEANUP_S = {patience_s}
process.main()
"""


@pytest.mark.parametrize(("seconds", "patience_s"), [(0.2, 240.0), (240.0, 0.4)])
def test_an_engine_that_ends_leaves_a_whole_file_or_none(
    deep_model: Path, tmp_path: Path, seconds: float, patience_s: float
) -> None:
    child = EngineProcess(program=("-c", ENDING.format(seconds=seconds, patience_s=patience_s)))
    try:
        child.load(deep_model, device="cpu", n_ctx=512, n_parallel=1, n_threads=1)
        child.run("Once upon a time", conversation="mira", params={"max_tokens": 2})
        path = str(tmp_path / "mira.kv")
        child.send(op="kv_save", seq=1, conversation="mira", path=path, part=f"{path}.part")
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
        child.send(op="stop")
        assert child.process.wait(200) == 0
    finally:
        child.close()
    assert [path.name for path in tmp_path.iterdir()] == (["mira.kv"] if patience_s > seconds else [])
