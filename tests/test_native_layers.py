"""The native sources have no circular includes and no long functions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "native" / "src"
MAX_FUNCTION_LINES = 80


def includes(path: Path) -> set[str]:
    names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
    return {name for name in names if (SOURCES / name).is_file()}


def test_includes_have_no_circle() -> None:
    left = {path.name: includes(path) for path in SOURCES.glob("*.h")}
    assert left
    while left:
        ready = {name for name, needs in left.items() if not needs & left.keys()}
        assert ready, left
        left = {name: needs for name, needs in left.items() if name not in ready}


CONTROL = re.compile(r"(if|else|for|while|switch|do|try|catch|} else|} while)\b")


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.[ch]*")), ids=lambda path: path.name)
def test_functions_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    heads: dict[int, int] = {}  # for each indent its last line: for a closing brace that is the first line of its block
    for number, line in enumerate(lines, 1):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text == "}" and not CONTROL.match(lines[heads[indent] - 1].strip()):
            assert number - heads[indent] < MAX_FUNCTION_LINES, f"{path.name}:{heads[indent]}"
        if text and not text.startswith("#"):
            heads[indent] = number
