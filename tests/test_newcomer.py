"""The output of the command line for a new user: help, progress, tables, errors."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from frameshard.cli import COMMANDS, common, simulate
from frameshard.errors import below_floor
from frameshard.simulation.player import Change, Job, Recording, Sample

EMULATED = ("--device", "emulated:20", "--threads", "1")
ENVIRONMENT = {**os.environ, "COLUMNS": "80"}


def frameshard(*args: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "frameshard", *args]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert result.returncode == code, result.stderr
    return result


def too_wide(text: str) -> list[str]:
    """The lines over 80 columns, except for those that begin with a path."""
    return [line for line in text.splitlines() if len(line) > common.WIDTH and not line.lstrip().startswith("/")]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_and_fits_a_terminal(command: str) -> None:
    said = frameshard(*filter(None, [command]), "--help").stdout
    assert said.startswith(f"usage: frameshard {command}")
    assert len(said.splitlines()) > 5
    assert too_wide(said) == []


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "--vram-budget", "1,floor,1000GiB", "--profile", "h100-80gb-pcie5-16c"),
        ("profile",),
        ("bench", "--vram-budget", "floor", "--prompt", "16", "--generate", "2", "--repeat", "1"),
        ("verify", "--vram-budget", "floor", "--prompt", "16", "--generate", "3", "--ctx", "256"),
    ],
)
def test_tables_fit_a_terminal(args: tuple[str, ...], model_path: Path) -> None:
    result = frameshard(*args, "--model", "smollm2-135m", *EMULATED)
    assert len(result.stdout.splitlines()) > 2
    assert too_wide(result.stdout) == []


def test_lists_fit_a_terminal(model_path: Path) -> None:
    assert too_wide(frameshard("models", "list").stdout) == []
    assert too_wide(frameshard("simulate", "--list").stdout) == []


def test_what_chat_says_of_itself_fits_a_terminal(shallow_model: Path) -> None:
    said = frameshard(
        "chat", "--model", str(shallow_model), *EMULATED, stdin="/help\n/stats\n/budget\n/budget 64\n"
    ).stderr
    notes = said.partition("/help for commands\n")[2]
    assert "the floor is" in notes
    assert too_wide(notes) == []


def test_a_long_simulation_fits_a_terminal() -> None:
    recording = Recording("streaming_cell", 1 << 34, 1 << 36, seconds=123.4, frames_ms=[16.6, 133.3])
    recording.changes = [
        Change(1.0, 1 << 30, "parked", 0.5, "message", 12.3456),
        Change(2.0, 1, "active", 1, "page", 9.9),
    ]
    recording.jobs = [Job(0.0, "mira", "?", n_generated=999)] * 99
    recording.samples = [Sample(0.0, 0.1, 0, 0, None, 0.0, None)]
    recording.problems = ["lost"] * 10
    text = simulate.table([recording] * 2)
    assert "98901" in text
    assert too_wide(text) == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("plan", "--model", "smolm2", "--vram-budget", "64"), "known names are smollm2-135m"),
        (("plan", "--model", "smollm2-135m", "--vram-budget", "lots"), "'lots' is not a size: a number of MiB"),
        (("chat", "--model", "smollm2-135m", "--vram-budget", "lots"), "argument --vram-budget: 'lots' is not a size"),
        (("bench", "--model", "smollm2-135m", "--parallel", "0"), "argument --parallel: '0' is not a positive"),
        (("bench", "--model", "smollm2-135m", "--threads", "1025"), "argument --threads: '1025' is more than 1024"),
        (("chat", "--model", "smollm2-135m", "--device", "CUDA7"), "no device named 'CUDA7'; there are:"),
        (("simulate", "menu"), "--model is needed"),
        (("top", "--connect", "/nowhere"), "no sidecar has left its connect file at /nowhere"),
        (("top", "--connect", "a", "b"), "name one connect file"),
        (("top", "--connect", __file__), "test_newcomer.py is no connect file: not JSON"),
        (("models", "path", ""), "no model file ''; known names are smollm2-135m"),
        (("serve", "--model", "smollm2-135m", "--fallback-model", "m"), "--fallback-model is for --fallback"),
        (("bench", "--model", "smollm2-135m", "--ctx", "99"), "need a context of 577 tokens, --ctx is 99"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(args: tuple[str, ...], says: str, model_path: Path) -> None:
    result = frameshard(*args, code=2)
    assert "ERROR" not in result.stderr
    assert "WARNING" not in result.stderr
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("frameshard: ")]
    assert says in said


@pytest.mark.parametrize(("n_bytes", "says"), [(3 << 19, "1.5 MiB"), (60 << 20, "60 MiB"), (7, "7 bytes")])
def test_a_budget_below_the_floor_is_told_as_it_was_given(n_bytes: int, says: str) -> None:
    begins, _, advice = below_floor(n_bytes, 64 << 20).message.partition(": ")
    assert begins == f"a VRAM budget of {says} is below the floor of 64 MiB"
    assert advice.startswith("give 64 MiB or more, ")


def test_a_cache_that_cannot_be_written_is_said_once(
    shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path / "file"))
    said = frameshard("profile", "--model", str(shallow_model), *EMULATED, "--seconds", "0.5")
    assert said.stderr.count("the profile is not kept") == 1
    assert "kept in" not in said.stdout


def test_a_first_measurement_and_each_row_are_said(
    shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal the progress is written as lines to stderr, and stdout has only JSON."""
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(tmp_path))
    small = ("--vram-budget", "floor,40", "--prompt", "16", "--generate", "2", "--repeat", "1")
    result = frameshard("bench", "--model", str(shallow_model), *EMULATED, *small, "--json")
    assert len(json.loads(result.stdout)["rows"]) == 2
    words = ("loading smollm2-shallow", "measuring this machine", "1 of 2", "2 of 2")
    positions = [result.stderr.index(each) for each in words]
    assert positions == sorted(positions)


def test_on_a_terminal_there_is_a_bar(shallow_model: Path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    small = ("--vram-budget", "floor,40", "--prompt", "16", "--generate", "2", "--repeat", "1", "--json")
    bench = subprocess.Popen(
        [sys.executable, "-m", "frameshard", "bench", "--model", str(shallow_model), *EMULATED, *small],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**ENVIRONMENT, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 1 << 16):
            seen += data
    except OSError:  # the terminal is closed
        pass
    finally:
        os.close(ours)
    out, _ = bench.communicate(timeout=60)
    assert bench.returncode == 0, seen
    assert len(json.loads(out)["rows"]) == 2
    assert b"0/2" in seen
    assert b"frameshard: 1 of 2" not in seen
    assert seen.endswith(b"\x1b[2K") or b"\x1b[?25h" in seen  # the cursor is visible again
