"""Reading traces, and the errors for wrong files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frameshard.errors import BadArgument
from frameshard.simulation import trace

WHOLE: dict[str, Any] = {"about": "x", "seconds": 2, "card_mb": 8192, "events": []}


def test_the_shipped_ones() -> None:
    assert trace.names() == ["alt_tab", "combat", "cut_scene", "level_load", "menu", "streaming_cell"]
    for name in trace.names():
        found = trace.load(name)
        assert found.about
        assert found.offers()
        assert any(isinstance(event, trace.Ask) for event in found.events)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**WHOLE, "events": [{"at": 1, "do": "vram", "game_mb": 4096, "by": "page"}]}))
    assert trace.load(str(path)) == trace.Trace("mine", "x", 2.0, 8192, (trace.Vram(1.0, 4096, by="page"),))
    with pytest.raises(BadArgument, match="alt_tab"):
        trace.load(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seconds": "long"}, "seconds: must be a number"),
        ({"events": [{"at": 0, "do": "dance"}]}, "event 0: do: must be one of draw"),
        ({"events": [{"at": 0, "do": "idle", "why": 1}]}, "event 0: why: unknown field"),
        ({"events": [{"at": 0, "do": "ask", "who": "mira"}]}, "event 0: text: missing"),
        ({"events": [{"at": 1, "do": "idle"}, {"at": 0, "do": "idle"}]}, "event 1: at: events are in order"),
        ({"events": [{"at": 3, "do": "idle"}]}, "event 0: at: events are in order, none after the end"),
        ({"events": [{"at": 0, "do": "vram", "game_mb": 9000}]}, "event 0: game_mb: more than the card has"),
        ({"events": [{"at": 0, "do": "draw", "frame_ms": 0}]}, "event 0: frame_ms: must be from 1"),
        ({"events": [{"at": 0, "do": "vram", "game_mb": 1, "deadline_ms": 0}]}, "event 0: deadline_ms: must be from 1"),
        ({"events": [{"at": 0, "do": "host", "deadline_ms": 60001}]}, "event 0: deadline_ms: must be from 1"),
        ({"events": [{"at": 0, "do": "host", "above_floor_mb": -1}]}, "event 0: above_floor_mb: must be"),
        ({"events": [{"at": 0, "do": "lease", "state": "parked"}]}, "events: the last lease must be active"),
        ({"events": [{"at": 0, "do": "lease", "state": "asleep"}]}, "event 0: state: must be one of active"),
        ({"events": 7}, "events: must be an array"),
        ({"music": True}, "music: unknown field"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=f"trace t: {words}"):
        trace.parse("t", json.dumps({**WHOLE, **changed}))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 100_000])
def test_what_is_no_trace_at_all(text: str) -> None:
    with pytest.raises(BadArgument, match="trace t is no JSON"):
        trace.parse("t", text)
