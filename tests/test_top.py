"""``frameshard top`` with a sidecar that another program has launched."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from rich.console import Console

import frameshard
from frameshard.broker.endpoint import running
from frameshard.cli import top
from frameshard.errors import BadArgument
from frameshard.wire import codec
from sidecars import in_trio


async def run_top(*args: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "frameshard", "top", *args]
    return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)


@in_trio
async def test_one_screen_and_its_figures(shallow_model: Path) -> None:
    nobody = await run_top("--once")
    assert nobody.returncode == 2
    assert b"no sidecar serves" in nobody.stderr
    async with frameshard.launch(shallow_model, device="emulated", n_ctx=512, vram_budget_mb=40) as client:
        with await client.frame_block() as frames:
            frames.begin()
            await client.complete("Once upon a time", sampling=frameshard.Sampling(max_tokens=4)).completed()
            view = top.View(await client.model_info())
            await view.look(client)
            document = json.loads((await run_top("--json")).stdout)
            screen = await run_top("--once")
        assert len(document["engine"]) <= codec.CLIENT.map - 4, "a GPU adds entries to these"
        placement = document["engine"]["placement"]
        counted = {letter: sum(row.count(letter) for row in placement.values()) for letter in "RSC"}
        for letter, name in (("R", "resident"), ("S", "streamed"), ("C", "cpu")):
            assert counted[letter] == document["engine"][f"{name}_shards"]
        assert counted["R"] < sum(counted.values())
        assert len(placement["attention"]) == document["model"]["n_layer"]
        assert document["budget"]["vram_budget_bytes"] == 40 << 20
        assert document["budget"]["host_floor_bytes"] > document["engine"]["host"]["weights_bytes"] > 40 << 20
        assert screen.returncode == 0, screen.stderr
        assert max(map(len, screen.stdout.decode().splitlines())) <= 80
        assert "…" not in screen.stdout.decode()  # nothing is cut
        for word in (
            "40 MiB",
            "attention",
            "ring",
            "tokens/s",
            "0 running",
            "clients: 2",
            "frames",
            "host",
            "processes",
        ):
            assert word in screen.stdout.decode()
        view.model = dataclasses.replace(view.model, name="tale [q4] [/b]")  # square brackets are no markup
        for height, explained in ((24, False), (60, True)):
            console = Console(width=80, height=height, file=io.StringIO())
            lines = console.render_lines(top.fitting(view, console))[:height]
            shown = "\n".join("".join(part.text for part in line) for line in lines)
            assert "tale [q4] [/b] on emulated" in shown
            for word in ("budget", "host", "held", "tokens", "jobs", "frames", "engine", "attention"):
                assert f"│ {word} " in shown
            assert ("the floor is" in shown) == ("■ weights" in shown) == ("█ resident" in shown) == explained
        async with frameshard.launch(shallow_model, device="cpu", n_ctx=512) as other:
            second = await run_top()
            assert second.returncode == 2
            assert b"2 sidecars serve" in second.stderr
            named = [json.loads((await run_top("--json", "--connect", str(file))).stdout) for file in running()]
            assert sorted(each["model"]["device"] for each in named) == ["cpu", "emulated"]
            assert other.info.pid


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(BadArgument, match=r"pip install 'frameshard\[top\]'"):
        top.check_rich()
