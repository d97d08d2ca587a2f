"""The files that are generated from sdk/frameshard/wire are up to date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_generated_files_are_fresh() -> None:
    check = subprocess.run(
        [sys.executable, REPO / "bindings" / "generate", "--check"], capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", ""), "run `make generate`"


def test_comments_of_csharp_name_its_own_fields() -> None:
    manifest = json.loads((REPO / "bindings" / "generated-manifest.json").read_text())
    options = [manifest["launch"], manifest["records"]["Sampling"], manifest["requests"]["budget_set"]]
    names = {field["name"] for each in options for field in each["fields"] if "_" in field["name"]}
    types = (REPO / "bindings" / "unity" / "Runtime" / "Core" / "Types.cs").read_text()
    assert not names & set(re.findall(r"`(\w+)`", types))
    assert re.search(r'Default csharp\.</summary>\s+public string ClientName = "csharp";', types)
