"""Saved conversations: what is refused, and what fits. The vectors of bindings/saves are tested with the document."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest

from frameshard.errors import BadSave
from frameshard.wire import messages as m
from frameshard.wire import saves

CALL = m.ToolCall("abc", "price", '{"item": "room"}')
STEPS = m.ChatMessage("assistant", "", (CALL,)), m.ChatMessage("tool", "2 gold", tool_call_id="abc")
TOLD = [saves.Exchange("Any rooms left?", "One. 🐈"), saves.Exchange("Für zwei?", "Ja.", STEPS)]
MIRA = saves.save_of(TOLD, "Be kind.", "ab" * 32, "cd" * 32, "python")


def damaged(data: bytes, dice: random.Random) -> bytes:
    """A copy with some bytes changed, removed or added."""
    copy = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randint(0, len(copy))
        copy[at : at + dice.randint(0, 7)] = dice.randbytes(dice.randint(0, 3))
    return bytes(copy)


def test_a_thousand_damaged_saves_are_refused() -> None:
    data, dice = saves.write(MIRA), random.Random(19)
    for _ in range(1000):
        copy = damaged(data, dice)
        if copy != data:
            with pytest.raises(BadSave):
                saves.read(copy)


@pytest.mark.parametrize("exchange", [2, 255])
def test_a_step_of_no_exchange_is_refused(exchange: int) -> None:
    """The checksum of a save says nothing about who has written it."""
    steps = MIRA.steps[0], replace(MIRA.steps[1], exchange=exchange)
    with pytest.raises(BadSave, match="its steps are wrong"):
        saves.read(saves.write(replace(MIRA, steps=steps)))


def test_a_large_save_is_refused_before_it_is_decoded() -> None:
    data = saves.write(MIRA) + bytes(64 << 20)
    tracemalloc.start()
    with pytest.raises(BadSave, match="at most 1048576"):
        saves.read(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_newest_exchanges_that_fit_are_kept() -> None:
    exchanges = [saves.Exchange(f"question {index}", "a" * 40) for index in range(1000)]
    assert saves.newest(exchanges, 0) == tuple(exchanges[-510:])
    long = [saves.Exchange(f"question {index}", "ä" * 32768) for index in range(20)]
    kept = saves.newest(long, 100)
    assert kept == tuple(long[-13:])
    assert saves.exchanges_of(saves.read(saves.write(saves.save_of(kept, "s" * 100, "", "", "")))) == kept
    assert len(saves.write(saves.save_of(kept, "s" * 65536, "", "", ""))) <= saves.MAX_BYTES


def test_calls_and_results_are_kept() -> None:
    """A save without them is as it was before there were tools."""
    assert saves.exchanges_of(saves.read(saves.write(MIRA))) == tuple(TOLD)
    assert saves.write(MIRA)[4:8] == b"\2\0\0\0"
    plain = saves.write(saves.save_of(TOLD[:1], "Be kind.", "", "", "python"))
    assert plain[4:8] == b"\1\0\0\0"
    assert b"steps" not in plain
    many = [saves.Exchange("q", "a", STEPS)] * 1000
    assert len(saves.newest(many, 0)) == 255
    large = m.ChatMessage("assistant", "", (m.ToolCall("x", "y", "z" * 60_000),) * 4)
    kept = saves.newest([saves.Exchange("q", "a", (large,))] * 10, 0)
    assert len(kept) == 3
    assert len(saves.write(saves.save_of(kept, "s" * 65536, "", "", ""))) <= saves.MAX_BYTES
