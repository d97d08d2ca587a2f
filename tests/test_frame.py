"""The frame block: its layout is as documented, and a reader never sees half of a write."""

from __future__ import annotations

import errno
import math
import mmap
import os
import re
import struct
from pathlib import Path

import pytest

from frameshard import errors, frame
from frameshard.broker import frameblock

DOCUMENT = (Path(__file__).parents[1] / "bindings" / "PROTOCOL.md").read_text()
LAYOUT = {name: (int(at), kind) for at, kind, name in re.findall(r"^\| (\d+) \| (u\d\d) \| `(\w+)` \|", DOCUMENT, re.M)}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(bytes(frame.PAGE_BYTES))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), frame.PAGE_BYTES) as mapped:
        frame.initialise(mapped)
    return path


def read(path: Path, name: str) -> int:
    at, kind = LAYOUT[name]
    (value,) = struct.unpack_from("<I" if kind == "u32" else "<Q", path.read_bytes(), at)
    return int(value)


def test_the_document_says_where_everything_lies(page: Path) -> None:
    block = frame.FrameBlock(page, target_frame_ms=16.0)
    assert (read(page, "magic"), read(page, "version"), read(page, "frame")) == (0x42465346, 1, 0)
    before = frame.clock_ns()
    block.begin()
    block.end(gpu_busy_ms=12.0)
    block.begin()
    assert read(page, "sequence") == 4
    assert (read(page, "frame"), read(page, "target_frame_ns"), read(page, "gpu_busy_ns")) == (
        2,
        16_000_000,
        12_000_000,
    )
    start = read(page, "frame_start_ns")
    assert before <= start <= frame.clock_ns()
    assert 0 < read(page, "frame_time_ns") <= start - before
    assert block.set_budget(5 << 20) == 1
    assert (read(page, "budget_generation"), read(page, "vram_budget_bytes")) == (1, 5 << 20)
    block.idle()
    assert read(page, "flags") == frame.IDLE
    block.begin()
    assert read(page, "flags") == 0
    with open(page, "r+b") as file:
        file.seek(LAYOUT["applied_generation"][0])
        file.write(struct.pack("<5Q", 1, 2, 3, 4, 5))
    assert block.answer == frame.Answer(1, 2, 3, 4, 5)
    names = ("applied_generation", "refused_generation", "budget_bytes", "used_bytes", "floor_bytes")
    assert [read(page, name) for name in names] == [1, 2, 3, 4, 5]


def test_a_second_writer_goes_on_where_the_first_ended(page: Path) -> None:
    with frame.FrameBlock(page) as first:
        first.begin()
        first.set_budget(7)
    with frame.FrameBlock(page) as second:
        second.begin()
        assert second.set_budget(8) == 2
    assert (read(page, "frame"), read(page, "sequence") % 2) == (2, 0)


def test_a_pause_is_not_a_frame(page: Path) -> None:
    with frame.FrameBlock(page) as block:
        block.begin()
        block.begin()
        drawn_ns = read(page, "frame_time_ns")
        block.idle()
        block.begin()
        assert read(page, "frame_time_ns") == drawn_ns > 0


def test_the_time_without_a_writer_is_not_a_frame(page: Path) -> None:
    with frame.FrameBlock(page) as first:
        first.begin()
    with frame.FrameBlock(page) as second:
        second.begin()
        assert read(page, "frame_time_ns") == 0
        second.begin()
        assert read(page, "frame_time_ns") > 0


def test_a_sidecar_without_vram_grants_each_budget(page: Path) -> None:
    sidecar = frame.Unlimited(str(page))
    sidecar.answer()
    with frame.FrameBlock(page) as block:
        assert block.answer == frame.Answer(0, 0, 0, 0, 0)
        for n_bytes in (7, 0):
            generation = block.set_budget(n_bytes)
            sidecar.answer()
            assert block.answer == frame.Answer(generation, 0, 0, 0, 0)
        with open(page, "r+b") as file:  # a write has begun
            file.seek(LAYOUT["sequence"][0])
            file.write(struct.pack("<I", 5))
            file.seek(LAYOUT["budget_generation"][0])
            file.write(struct.pack("<Q", 3))
        sidecar.answer()
        assert block.answer.applied_generation == 2


def test_a_writer_that_died_in_a_write_does_not_turn_the_sequence_round(page: Path) -> None:
    """Readers wait while the sequence is odd."""
    with open(page, "r+b") as file:
        file.seek(LAYOUT["sequence"][0])
        file.write(struct.pack("<I", 5))
    with frame.FrameBlock(page) as block:
        block.begin()
    assert read(page, "sequence") == 6


def test_a_wrong_number_is_refused_and_changes_nothing(page: Path) -> None:
    with frame.FrameBlock(page) as block:
        block.begin()
        block.set_budget(7)
        for budget in (1.5, -1, 1 << 53, "7"):
            with pytest.raises(errors.BadArgument, match="vram_budget_bytes"):
                block.set_budget(budget)  # type: ignore[arg-type]
        for ms in (math.nan, math.inf, -1, "16"):
            with pytest.raises(errors.BadArgument, match="target_frame_ms"):
                block.target_frame_ms = ms  # type: ignore[assignment]
            with pytest.raises(errors.BadArgument, match="gpu_busy_ms"):
                block.end(gpu_busy_ms=ms)  # type: ignore[arg-type]
        block.begin()
        assert block.set_budget(8) == 2
    with pytest.raises(errors.BadArgument, match="target_frame_ms"):
        frame.FrameBlock(page, target_frame_ms=0)
    assert (read(page, "frame"), read(page, "sequence"), read(page, "vram_budget_bytes")) == (2, 8, 8)
    assert read(page, "target_frame_ns") == 16_666_666


def test_what_is_no_frame_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BadArgument):
        frame.FrameBlock(tmp_path / "none")
    (tmp_path / "other").write_bytes(bytes(frame.PAGE_BYTES))
    with pytest.raises(errors.BadArgument):
        frame.FrameBlock(tmp_path / "other")


def test_nothing_is_left_of_a_frame_block_for_which_there_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that asks again and again would otherwise use up the descriptors of the sidecar."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    memory, free = frameblock.FrameBlockMemory(tmp_path), os.dup(0)
    os.close(free)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        for _ in range(2):
            with pytest.raises(errors.OutOfMemory, match="the frame block cannot be made: Cannot allocate memory"):
                memory.path()
    fd = os.dup(0)
    os.close(fd)
    assert fd == free
    assert not list(tmp_path.iterdir())
    frame.FrameBlock(memory.path()).close()
