"""Files with KV caches: what is refused before llama.cpp sees it, and how they are written."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frameshard.engine import kvfile
from frameshard.engine.kvstore import Blob

ENGINE = {"model": "ab" * 32, "kv_type": "f16", "device": "CUDA0", "mode": "stream_only", "llama_cpp": "1"}
LIMITS = {"most_tokens": 512, "most_bytes": 1 << 20, "memory": lambda n_bytes: np.empty(n_bytes, np.uint8)}


def blob() -> Blob:
    cells = np.frombuffer(random.Random(3).randbytes(5000), np.uint8)
    return Blob(tokens=list(range(40)), shapes=[(16, 16), (16, 16), (8, 16)], data=cells)


def read(path: Path, engine: dict[str, str] = ENGINE, **limits: Any) -> Blob:
    found = kvfile.read(str(path), engine, **{**LIMITS, **limits})
    assert (found.file_bytes, found.adapters) == (path.stat().st_size, ())
    return found.blob


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    path, written = tmp_path / "mira.kv", blob()
    assert kvfile.write(str(path), ENGINE, written) == path.stat().st_size
    found = read(path)
    assert (found.tokens, found.shapes) == (written.tokens, written.shapes)
    assert found.data.tobytes() == written.data.tobytes()
    assert found.conversation is None


def test_a_thousand_damaged_files_are_refused(tmp_path: Path) -> None:
    path, dice = tmp_path / "mira.kv", random.Random(19)
    kvfile.write(str(path), ENGINE, blob())
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
    kvfile.write(str(path), ENGINE, blob())
    for name in ENGINE:
        with pytest.raises(kvfile.Unusable, match=f"another engine: {name}"):
            read(path, {**ENGINE, name: "other"})
    with pytest.raises(kvfile.Unusable, match="more than the context"):
        read(path, most_tokens=39)
    with pytest.raises(kvfile.Unusable, match="more than the KV store"):
        read(path, most_bytes=4999)


def test_links_are_not_followed_and_others_cannot_read(tmp_path: Path) -> None:
    path, target = tmp_path / "mira.kv", tmp_path / "target"
    target.write_text("not to be touched")
    path.symlink_to(target)
    with pytest.raises(kvfile.Unusable):
        read(path)
    kvfile.write(str(path), ENGINE, blob())
    assert target.read_text() == "not to be touched"
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(tmp_path.iterdir()) == [path, target]
    with pytest.raises(OSError, match=r"directory"):
        kvfile.write(str(tmp_path), ENGINE, blob())
    assert sorted(tmp_path.iterdir()) == [path, target]
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(kvfile.Unusable):
            read(other)
    with pytest.raises(FileExistsError, match="pipe is there"):
        kvfile.write(str(tmp_path / "pipe"), ENGINE, blob())
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "pipe", target]
