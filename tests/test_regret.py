"""profiles/tools/regret.py runs a plan and what it could have been instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "profiles" / "tools" / "regret.py"


def regret(model: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), str(model), "--device", "emulated", "--threads", "1", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_many_arrangements_are_run(deep_model: Path) -> None:
    sizes = ("--context", "256", "--generate", "1", "--repeat", "1")
    ran = regret(deep_model, "--vram-budget", "10MiB", *sizes, "--json")
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)["rows"]
    planned, *others = row["arrangements"]
    assert planned["name"] == "as planned"
    assert len(others) >= 20
    assert len({each["name"] for each in others}) == len(others)
    # A larger ring leaves room for fewer resident weights.
    sizes_mb = sorted((each["ring_mb"], each["resident_mb"]) for each in row["arrangements"])
    assert sizes_mb[0][0] < planned["ring_mb"] < sizes_mb[-1][0]
    assert sizes_mb[0][1] > planned["resident_mb"] > sizes_mb[-1][1]
    # The ratio is of those that were measured again.
    again = [each for each in row["arrangements"] if len(each["runs"]) == 2]
    assert planned in again
    assert len(again) == 5
    assert row["best_tokens_per_second"] == max(each["tokens_per_second"] for each in again)
    assert row["planned_over_best"] == row["planned_tokens_per_second"] / row["best_tokens_per_second"]


def test_what_cannot_be_compared_is_refused(deep_model: Path) -> None:
    whole = regret(deep_model, "--vram-budget", "1GiB", "--context", "256", "--generate", "1")
    assert (whole.returncode, whole.stderr.splitlines()[-1]) == (
        1,
        "regret: everything is resident in 1024 MiB: nothing else can be arranged",
    )
    short = regret(deep_model, "--vram-budget", "10MiB", "--context", "24")
    assert short.returncode == 1
    assert "no room for a prompt" in short.stderr
