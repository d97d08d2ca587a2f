"""Saved conversations: what is refused, and what fits. The vectors of bindings/saves are tested with the document."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from frameshard.errors import BadSave
from frameshard.wire import saves

MIRA = saves.Save((("Any rooms left?", "One. 🐈"), ("Für zwei?", "Ja.")), "ab" * 32, "Be kind.", "cd" * 32, "python")


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


def test_a_large_save_is_refused_before_it_is_decoded() -> None:
    data = saves.write(MIRA) + bytes(64 << 20)
    tracemalloc.start()
    with pytest.raises(BadSave, match="at most 1048576"):
        saves.read(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_newest_exchanges_that_fit_are_kept() -> None:
    exchanges = [(f"question {index}", "a" * 40) for index in range(1000)]
    assert saves.newest(exchanges, 0) == tuple(exchanges[-510:])
    long = [(f"question {index}", "ä" * 32768) for index in range(20)]
    kept = saves.newest(long, 100)
    assert kept == tuple(long[-13:])
    assert saves.read(saves.write(saves.Save(kept, "", "s" * 100, "", ""))).exchanges == kept
    assert len(saves.write(saves.Save(kept, "", "s" * 65536, "", ""))) <= saves.MAX_BYTES
