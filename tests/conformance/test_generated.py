"""The files that are generated from sdk/frameshard/wire are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_generated_files_are_fresh() -> None:
    check = subprocess.run(
        [sys.executable, REPO / "bindings" / "generate", "--check"], capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", ""), "run `make generate`"
