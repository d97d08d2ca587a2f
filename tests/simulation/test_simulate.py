"""The six traces with a real sidecar, and the check of the lease."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import frameshard
from frameshard.cli import figures
from frameshard.cli import simulate as command
from frameshard.errors import BadArgument
from frameshard.simulation import plot, trace
from frameshard.simulation.player import MIB, Change, Recording, Sample, over_the_lease, play
from sidecars import in_trio


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "frameshard", "simulate", *args], capture_output=True, text=True, timeout=300
    )


def shortened(name: str, directory: Path) -> str:
    """A trace of the package with short answers, and with deadlines that a busy machine can keep."""
    document = json.loads(Path(trace.__file__).with_name("traces").joinpath(f"{name}.json").read_text())
    for event in document["events"]:
        if event["do"] in ("vram", "host", "lease"):
            event["deadline_ms"] = 30_000
        elif event["do"] == "ask":
            event["max_tokens"] = 12
    path = directory / f"{name}.json"
    path.write_text(json.dumps(document))
    return str(path)


def test_the_six_traces_play_and_no_lease_is_broken(own_shallow_model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "six.png"
    result = simulate(
        *(shortened(name, tmp_path) for name in trace.names()),
        "--model", str(own_shallow_model), "--device", "emulated:4", "--speed", "8", "--json",
        "--scheduling-mode", "prioritize_compute", "--plot", str(picture),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    recordings = json.loads(result.stdout)["recordings"]
    assert [recording["trace"] for recording in recordings] == trace.names()
    for recording in recordings:
        assert recording["problems"] == []
        assert recording["samples"]
        assert recording["frames_ms"]
        assert recording["changes"]
        assert all(change["released_s"] is not None for change in recording["changes"])
        jobs = recording["jobs"]
        assert all(job["outcome"] in ("stop", "length") or job["cancelled"] for job in jobs)
        for who in {job["who"] for job in jobs}:
            told = [job["n_prompt"] for job in jobs if job["who"] == who and not job["cancelled"]]
            assert told == sorted(told)  # the prompt includes what was said before
        states = [change["state"] for change in recording["changes"]]
        away = {"alt_tab": "parked", "level_load": "hibernated"}.get(recording["trace"])
        assert (away in states) is (away is not None)
        assert (recording["summary"]["resume ms"] is None) is (away is None)
        print(recording["trace"], "active again after", recording["summary"]["resume ms"], "ms")
    assert picture.read_bytes().startswith(b"\x89PNG")


@in_trio
async def test_a_conversation_goes_on_where_it_was(shallow_model: Path) -> None:
    """The sidecar is parked and hibernated during an answer, and the answer does not change. After hibernation the
    conversation is prefilled in other chunks, so of later questions only the prompt must be the same."""
    asks = (
        trace.Ask(0.0, "mira", "Tell me a long story.", 32),
        trace.Ask(0.1, "mira", "And how does it end?", 8),
        trace.Ask(0.2, "mira", "Who told you?", 8),
    )
    away = [
        trace.Lease(1.0, "parked"),
        trace.Lease(1.5, "active"),
        trace.Lease(2.5, "hibernated"),
        trace.Lease(3.0, "active"),
    ]

    async def played(events: Sequence[trace.Event]) -> Recording:
        async with frameshard.launch(
            shallow_model, device="emulated:2", n_ctx=512, n_parallel=1, n_threads=1, mode="stream_only"
        ) as client:
            recording = await play(client, trace.Trace("away", "", 3.0, 8192, tuple(events)))
            assert recording.problems == []
            return recording

    undisturbed, disturbed = await played(asks), await played([*asks, *away])
    assert len(disturbed.resumed_s) == 2
    for before, after in zip(undisturbed.jobs, disturbed.jobs, strict=True):
        assert after.n_prompt == before.n_prompt
    assert disturbed.jobs[0].text == undisturbed.jobs[0].text


def test_the_list_needs_no_model() -> None:
    listed = simulate("--list")
    assert [line.split()[0] for line in listed.stdout.splitlines() if line[0] != " "] == trace.names()
    assert set(json.loads(simulate("--list", "--json").stdout)) == set(trace.names())


@pytest.mark.parametrize(
    "args",
    [
        ("menu",),
        ("--model", "smollm2-135m", "no such trace"),
        ("--model", "/missing.gguf", "menu", "--plot", "picture.xyz"),
        ("--model", "/missing.gguf", "menu", "--plot", "/missing/picture.png"),
    ],
)
def test_wrong_use_is_typed(args: tuple[str, ...]) -> None:
    result = simulate(*args, "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["name"] == "bad_argument"


def test_a_device_without_vram_is_refused(shallow_model: Path) -> None:
    result = simulate("menu", "--model", str(shallow_model), "--device", "cpu", "--json")
    assert json.loads(result.stdout)["error"]["name"] == "bad_argument"


def test_the_mode_is_the_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, mode: str, **__: object) -> None:
        raise BadArgument(f"asked for {mode}")

    monkeypatch.setattr(frameshard, "launch", launch)
    args = ["simulate", "menu", "--model", __file__, "--mode", "stream_only"]
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(BadArgument, match="asked for stream_only"):
        command.run(parser.parse_args(args))


def test_quantiles() -> None:
    assert command.quantile([], 0.5) is None
    assert [command.quantile([59.0, 1.0], share) for share in (0.0, 0.5, 1.0)] == [1.0, 30.0, 59.0]
    assert command.quantile([1.0, 2.0, 7.0], 0.5) == 2.0


def judged(used_mb: float, at: float) -> list[str]:
    """Checks one sample. A shrink at 1 s is released after 0.2 s. A second one at 2 s has a deadline of 0.5 s and is
    never released."""
    recording = Recording("t", 0, 0)
    recording.changes = [
        Change(1.0, 100 * MIB, "active", 0.5, "message", 0.2),
        Change(2.0, 50 * MIB, "active", 0.5, "message"),
    ]
    recording.samples = [Sample(at, at + 0.01, int(used_mb * MIB), 0, None, 0.0, None)]
    found = over_the_lease(recording, 200 * MIB, 0)
    # The same with host memory: nothing is said of VRAM then.
    for change in recording.changes:
        change.budget_bytes, change.host_budget_bytes = 0, change.budget_bytes
    recording.samples = [Sample(at, at + 0.01, 0, 0, None, 0.0, None, int(used_mb * MIB))]
    of_host = over_the_lease(recording, 0, 200 * MIB)
    assert [problem.replace("host lease", "lease") for problem in of_host] == found
    return found


@pytest.mark.parametrize(
    ("used_mb", "at", "kept"),
    [
        (200, 0.5, True),  # the first budget
        (201, 0.5, False),
        (200, 1.1, True),  # the shrink is not released yet
        (101, 1.3, False),  # released, though its deadline is later
        (100, 2.4, True),
        (101, 2.4, False),  # during a change the larger of the two budgets counts
        (51, 2.6, False),  # after the deadline
        (50, 2.6, True),
        (200, 0.995, True),  # the sample began before the shrink
    ],
)
def test_the_judge(used_mb: float, at: float, kept: bool) -> None:
    assert (judged(used_mb, at) == []) is kept


def test_the_largest_excess_is_said() -> None:
    samples = [Sample(at, at, mb * MIB, 0, None, 0.0, None) for at, mb in ((0.1, 3), (0.2, 9), (0.3, 4))]
    recording = Recording("t", 0, 0, samples=samples)
    assert over_the_lease(recording, MIB, 0) == ["8.0 MiB above the lease at 0.20 s"]


def test_without_a_limit_no_host_memory_is_too_much() -> None:
    recording = Recording("t", 0, 0)
    recording.changes = [
        Change(1.0, 0, "active", 0.5, "message", 0.2, host_budget_bytes=100 * MIB),
        Change(2.0, 0, "active", 0.5, "message", 0.2),
    ]
    recording.samples = [Sample(at, at, 0, 0, None, 0.0, None, 101 * MIB) for at in (0.5, 1.5, 2.5)]
    assert over_the_lease(recording, 0, 0) == ["1.0 MiB above the host lease at 1.50 s"]


@in_trio
async def test_a_script_limits_host_memory(own_shallow_model: Path, tmp_path: Path) -> None:
    """The limit is the sidecar's floor and what the script adds, until the script lifts it."""
    events = (
        trace.Host(0.0, 24, deadline_ms=30_000),
        trace.Ask(0.0, "mira", "Who comes there?", 8),
        trace.Host(1.5, None, deadline_ms=30_000),
    )
    async with frameshard.launch(own_shallow_model, device="emulated", n_ctx=512, n_threads=1) as client:
        recording = await play(client, trace.Trace("maps", "", 2.0, 8192, events))
        assert (await client.budget()).host_budget_bytes == 0
    assert recording.problems == []
    limited, lifted = recording.changes
    assert limited.host_budget_bytes >= recording.host_floor_bytes > own_shallow_model.stat().st_size
    assert lifted.host_budget_bytes == 0
    assert all(sample.host_used_bytes > own_shallow_model.stat().st_size for sample in recording.samples)
    figures.draw_apart(plot.draw, str(tmp_path / "maps.svg"), [recording])
    assert "host, MiB" in (tmp_path / "maps.svg").read_text()


def test_host_memory_that_nobody_counts_is_not_drawn() -> None:
    """While the sidecar is hibernated there is no engine that counts it, but the broker holds some."""
    drawn: list[float] = []
    axes = SimpleNamespace(
        step=lambda *_, **__: None, axhline=lambda *_, **__: None, plot=lambda _, values, **__: drawn.extend(values)
    )
    samples = [Sample(at, at, 0, 0, None, 0.0, None, used) for at, used in ((0.0, 5 * MIB), (1.0, 0), (2.0, 5 * MIB))]
    plot._host(axes, Recording("t", 0, 0, samples=samples))
    assert drawn == [5.0, pytest.approx(math.nan, nan_ok=True), 5.0]


def test_a_recording_without_a_lease_is_drawn(tmp_path: Path) -> None:
    samples = [Sample(0.0, 0.5, MIB, MIB, None, 9.0, None)]
    recording = Recording("talk", 16 * MIB, 64 * MIB, samples=samples, seconds=1.0)
    figures.draw_apart(plot.draw, str(tmp_path / "talk.svg"), [recording])
    assert "lease" in (tmp_path / "talk.svg").read_text()


@in_trio
async def test_what_is_refused_is_a_problem_and_says_why(shallow_model: Path) -> None:
    events = (
        trace.Vram(0.0, 8192, deadline_ms=30_000),
        trace.Vram(0.1, 8180, deadline_ms=30_000, by="page"),
        trace.Lease(0.2, "parked", deadline_ms=30_000),
        trace.Lease(0.2, "active", deadline_ms=30_000),
        trace.Ask(0.3, "mira", "The lamp is lit. " * 400),
    )
    async with frameshard.launch(shallow_model, device="emulated", n_ctx=512) as client:
        before = await client.budget()
        recording = await play(client, trace.Trace("greedy", "", 0.3, 8192, events), as_recorded=True)
        assert (await client.budget()).vram_budget_bytes == before.full_bytes
    assert [(change.state, change.budget_bytes) for change in recording.changes[1:]] == [("active", before.full_bytes)]
    assert recording.changes[0].state == "parked"
    by_message, by_page, too_long = recording.problems
    assert "floor" in by_message
    assert "refused" in by_page
    assert "the question to mira at 0.3" in too_long
    assert "ended with context_overflow: " in too_long
