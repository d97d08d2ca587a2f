"""The scene with the small vision tower. Skipped until `make vision` has built the tower."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frameshard import models

REPO = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(not models.path_of(models.SPRITES).is_file(), reason="make vision builds the sprite tower"),
    pytest.mark.skipif(importlib.util.find_spec("pygame") is None, reason="pygame-ce is not installed"),
]


def test_the_guard_sees_what_is_drawn(tmp_path: Path) -> None:
    """The scene runs without a window, and the budget changes with each question."""
    shot = tmp_path / "shot.png"
    scene = REPO / "samples" / "scene_reasoning" / "main.py"
    command = [sys.executable, str(scene), "--unattended", "--screenshot", str(shot)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "names sprites" in result.stdout  # the line about the question that this model gets
    said = re.findall(r"^Guard: (.*)$", result.stdout, re.MULTILINE)
    assert len(said) == 6
    assert said[:2] == ["There is a bomb on the table.", "No, a box is in the way."]
    assert re.search(r"6 answers, [1-6] changes of the budget", result.stdout)
    assert shot.stat().st_size > 10_000
