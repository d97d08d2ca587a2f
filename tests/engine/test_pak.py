"""Models that are parts of larger files, as a game packs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import EngineProcess, engine, ids, user

import frameshard
from frameshard import models
from frameshard.errors import BadModel, ModelNotFound
from frameshard.plan.adapter import read_adapter
from frameshard.plan.header import read_header
from frameshard.plan.model import read_model
from make_adapter import make_adapter
from sidecars import in_trio

OFFSET = 3 * 4096 + 32  # not at the beginning of a page
MIB = 1 << 20
CASTLE = user("Who lives in the old castle?")


@pytest.fixture(scope="module")
def pak(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with other bytes before and behind the model."""
    path = tmp_path_factory.mktemp("pak") / "game.pak"
    path.write_bytes(b"\xa5" * OFFSET + shallow_model.read_bytes() + b"\x5a" * 5000)
    return path


def part(pak: Path, offset: int, n_bytes: int) -> Path:
    return Path(f"{pak}@{offset}+{n_bytes}")


@pytest.mark.parametrize("device", ["emulated", "cpu"])
def test_answers_as_the_file_does(device: str, pak: Path, shallow_model: Path) -> None:
    packed = part(pak, OFFSET, shallow_model.stat().st_size)
    budget = 64 << 20 if device == "emulated" else 0  # weights are streamed and resident
    fields = {"device": device, "mode": "stream_only", "vram_budget_bytes": budget, "n_parallel": 1}
    answers = []
    for path in (shallow_model, packed):
        with engine(path, **fields) as child:
            answers.append(ids(child.run(CASTLE)))
    assert answers[0] == answers[1]
    assert len(answers[0]) > 4


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is counted on Linux")
def test_the_rest_of_the_pak_counts_as_no_host_memory(shallow_model: Path, tmp_path: Path) -> None:
    around, budget = 50 * MIB, 64 * MIB
    path = tmp_path / "large.pak"
    with open(path, "wb") as file:
        file.truncate(around + OFFSET)
        file.seek(around + OFFSET)
        file.write(shallow_model.read_bytes())
        file.truncate(file.tell() + around)
    found = []
    for each in (shallow_model, part(path, around + OFFSET, shallow_model.stat().st_size)):
        fields = {"device": "emulated", "mode": "stream_only", "vram_budget_bytes": budget, "n_parallel": 1}
        with engine(each, **fields) as child:
            child.run(CASTLE)
            child.budget(budget, host_bytes=1)
            child.wait_for("refused")  # host memory is measured anew
            host = child.stats()["host"]
            found.append([host["weights_bytes"], host["processes_bytes"], host["floor_bytes"]])
            # With room for the model the disk tier stays closed.
            child.budget(budget, host_bytes=host["used_bytes"] + around, timeout_s=60)
            assert child.wait_for("refused", "released")["ev"] == "released"
            child.run(CASTLE)
            host = child.stats()["host"]
            assert host["device"]["disk_read_bytes"] == 0
            assert host["used_bytes"] <= host["budget_bytes"]
    for bare, packed in zip(*found, strict=True):
        assert abs(packed - bare) < 32 * MIB


def test_only_the_part_is_read_ahead(tmp_path: Path) -> None:
    (tmp_path / "game.pak").write_bytes(bytes(6 << 20))

    def n_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    for path, n_bytes in ((tmp_path / "game.pak", 6 << 20), (part(tmp_path / "game.pak", 32, 3 << 20), 3 << 20)):
        before = n_read()
        models.read_ahead(path)
        assert 0 <= n_read() - before - n_bytes < 1 << 20


def test_a_draft_model_may_be_packed_and_a_vision_tower_may_not(pak: Path, shallow_model: Path) -> None:
    packed = str(part(pak, OFFSET, shallow_model.stat().st_size))
    fields = {"device": "emulated", "n_ctx": 256, "n_parallel": 1, "n_threads": 1}
    with engine(shallow_model, draft_model=packed, **fields) as child:
        assert ids(child.run(CASTLE))
    child = EngineProcess()
    try:
        refused = child.load(shallow_model, mmproj=packed, **fields)
        assert refused["error"]["name"] == "unsupported"
        assert "a file of its own" in refused["error"]["message"]
    finally:
        child.close()


@in_trio
async def test_adapters_may_be_packed(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded at the launch or later, they change the text as their file does, and no copy of them is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    alone, packed = tmp_path / "alone.gguf", tmp_path / "game.pak"
    make_adapter(tiny_model("llama"), alone)
    packed.write_bytes(b"\xa5" * OFFSET + alone.read_bytes() + b"\x5a" * 500)
    inside = part(packed, OFFSET, alone.stat().st_size)
    fields: dict[str, Any] = {"device": "emulated", "n_ctx": 256, "n_ubatch": 32, "n_threads": 1}
    greedy = frameshard.Sampling(max_tokens=12, temperature=0.0)
    async with frameshard.launch(
        tiny_model("llama"), adapters={"packed": inside}, mode="stream_only", log=subprocess.DEVNULL, **fields
    ) as client:
        await client.adapter_load("alone", alone)
        await client.adapter_load("later", inside)
        texts = [
            (await client.complete("Once upon", sampling=greedy, adapters=adapters).completed()).text
            for adapters in ({}, {"alone": 1.0}, {"packed": 1.0}, {"later": 1.0})
        ]
        with pytest.raises(BadModel, match="the part ends at byte"):
            await client.adapter_load("beyond", part(packed, OFFSET, 10 * packed.stat().st_size))
    assert texts[0] != texts[1] == texts[2] == texts[3]
    assert not list(temporary.rglob("*.gguf"))


def test_what_is_wrong_with_a_part(pak: Path, shallow_model: Path) -> None:
    n_bytes = shallow_model.stat().st_size
    assert read_model(part(pak, OFFSET, n_bytes)).tensors == read_model(shallow_model).tensors
    for offset, size, says in (
        (OFFSET, n_bytes + 10_000, "the part ends at byte"),
        (1 << 40, n_bytes, "the part ends at byte"),
        (OFFSET, n_bytes - 100_000, "truncated: tensor"),
        (OFFSET, 100, "cannot be in a file of 100 bytes"),
        (OFFSET + 1, n_bytes, "not a multiple of 32"),
        (OFFSET - 32, n_bytes, "not a GGUF file"),
        (0, 0, "not a GGUF file"),
    ):
        with pytest.raises(BadModel, match=says):
            read_model(part(pak, offset, size))
    with pytest.raises(ModelNotFound, match="missing"):
        read_model(part(pak.with_name("missing.pak"), 0, 100))


def test_packed_files_are_told_apart_by_their_weights(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Saved caches and conversations name their model and adapters by fingerprint. It depends on the GGUF alone."""
    model_file, adapter_file = tiny_model("llama"), tmp_path / "adapter.gguf"
    make_adapter(model_file, adapter_file)
    model = read_model(model_file)

    def fingerprint(path: Path) -> str:
        return read_model(path).fingerprint if whole == model_file else read_adapter(path, model).fingerprint

    for whole in (model_file, adapter_file):
        content = whole.read_bytes()
        last = read_header(whole).tensors[-1]
        other = content[: last.offset] + bytes([content[last.offset] ^ 1]) + content[last.offset + 1 :]
        packed, changed = tmp_path / "game.pak", tmp_path / "changed.pak"
        packed.write_bytes(bytes(1 << 20) + content)
        changed.write_bytes(bytes(1 << 20) + other)
        assert fingerprint(part(packed, 1 << 20, len(content))) == fingerprint(whole)
        assert fingerprint(part(changed, 1 << 20, len(content))) != fingerprint(whole)


def test_a_file_of_exactly_that_name_is_taken(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    named = tmp_path / "game.pak@64+128"
    assert models.locate(named) == models.ModelFile(tmp_path / "game.pak", 64, 128)
    named.write_bytes(tiny_model("llama").read_bytes())
    assert models.locate(named) == models.ModelFile(named)
    assert read_model(named).arch == "llama"


def test_the_command_line_takes_one(pak: Path, shallow_model: Path) -> None:
    packed = str(part(pak, OFFSET, shallow_model.stat().st_size))

    def run(*args: str, said: str = "") -> dict[str, object]:
        command = [sys.executable, "-m", "frameshard", args[0], "--json", "--model", packed, *args[1:]]
        done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=300, check=True)
        document: dict[str, object] = json.loads(done.stdout)
        return document

    profile = str(Path(__file__).parents[2] / "profiles" / "laptop-rtx-4060-8gb.json")
    assert run("plan", "--vram-budget", "2GiB", "--profile", profile)["rows"]
    answers = run("chat", "--device", "cpu", "--max-tokens", "4", "--ctx", "256", said="Hello?\n")["answers"]
    assert isinstance(answers, list)
    assert answers[0]["answer"]
