"""What a game does, as a script: frames, VRAM demand and questions to the model, each at its time.

A trace is a JSON file:

    {
      "about": "the streets fill up while Mira talks",
      "seconds": 12,                            how long it lasts
      "card_mb": 8192,                          the card; what the game leaves of it is offered to the sidecar
      "events": [
        {"at": 0, "do": "draw", "frame_ms": 16.7, "gpu_busy_ms": 9.5},
        {"at": 0, "do": "vram", "game_mb": 3100},
        {"at": 1, "do": "ask", "who": "mira", "text": "Who comes there?", "max_tokens": 40},
        {"at": 4, "do": "vram", "game_mb": 5800, "deadline_ms": 500, "by": "page"}
      ]
    }

| do | says |
| --- | --- |
| draw | frames of `frame_ms` from now on, of which the game keeps the GPU busy for `gpu_busy_ms` |
| idle | nothing is drawn that matters (menu, loading, another window) until the next draw |
| vram | the game needs `game_mb`; the rest is offered `by` a "message" or the frame block's "page" |
| lease | the sidecar shall be "parked" or "hibernated" while the game wants all of the card, or "active" again |
| ask | says `text` in the conversation with `who`; questions to one of them wait for each other |
| cancel | the game no longer wants what `who` is saying |

Events are in order of `at`, seconds from the start. A deadline is real time, also in a replay at another speed.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from frameshard.errors import BadArgument
from frameshard.wire import checks
from frameshard.wire import messages as m


@dataclass(frozen=True)
class Draw:
    """Frames from now on."""

    at: checks.Seconds
    frame_ms: checks.Seconds
    gpu_busy_ms: checks.Seconds = 0.0


@dataclass(frozen=True)
class Idle:
    """No frames from now on."""

    at: checks.Seconds


@dataclass(frozen=True)
class Vram:
    """The game's need."""

    at: checks.Seconds
    game_mb: checks.Count
    deadline_ms: checks.Seconds = 1000.0
    by: Literal["message", "page"] = "message"


@dataclass(frozen=True)
class Lease:
    """A state of the sidecar. Budgets for another one than active are those to come back to."""

    at: checks.Seconds
    state: m.LeaseState
    deadline_ms: checks.Seconds = 10000.0


@dataclass(frozen=True)
class Ask:
    """A question."""

    at: checks.Seconds
    who: checks.Name
    text: checks.Text
    max_tokens: checks.Id = 32


@dataclass(frozen=True)
class Cancel:
    """Its end before its end."""

    at: checks.Seconds
    who: checks.Name


Event = Draw | Idle | Vram | Lease | Ask | Cancel
KINDS: dict[str, type[Event]] = {
    "draw": Draw,
    "idle": Idle,
    "vram": Vram,
    "lease": Lease,
    "ask": Ask,
    "cancel": Cancel,
}


@dataclass(frozen=True)
class _File:
    about: checks.Text
    seconds: checks.Seconds
    card_mb: checks.Count
    events: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Trace:
    """A script with its name; `seconds` are at speed 1."""

    name: str
    about: str
    seconds: float
    card_mb: int
    events: tuple[Event, ...]

    def offers(self) -> list[int]:
        """MiB that the game leaves to the sidecar, in order."""
        return [self.card_mb - event.game_mb for event in self.events if isinstance(event, Vram)]


def names() -> list[str]:
    """Traces that come with the package."""
    return sorted(path.name.removesuffix(".json") for path in _shipped().iterdir() if path.name.endswith(".json"))


def load(name: str) -> Trace:
    """A trace by its path, or one that comes with the package by its name. Raises :class:`BadArgument`."""
    if name in names():
        return parse(name, (_shipped() / f"{name}.json").read_text(encoding="utf-8"))
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadArgument(f"no trace {name}: {error}; by name there are {', '.join(names())}") from None
    return parse(path.stem, text)


def parse(name: str, text: str) -> Trace:
    """The trace in a file's `text`. Raises :class:`BadArgument`, saying where it is wrong."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise BadArgument(f"trace {name} is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadArgument(f"trace {name} is no JSON object")
    where = ""
    try:
        file = checks.convert(_File, document)
        events: list[Event] = []
        for index, fields in enumerate(file.events):
            where = f"event {index}: "
            events.append(_event(fields))
            event = events[-1]
            if event.at > file.seconds or (index and event.at < events[index - 1].at):
                raise checks.Refused("at: events are in order, none after the end")
            if isinstance(event, Vram) and event.game_mb > file.card_mb:
                raise checks.Refused("game_mb: more than the card has")
            if isinstance(event, Draw) and not 1 <= event.frame_ms <= 1000:
                raise checks.Refused("frame_ms: must be from 1 to 1000")
        where = ""
        states = [event.state for event in events if isinstance(event, Lease)]
        if states and states[-1] != "active":
            raise checks.Refused("events: the last lease must be active, or jobs never end")
    except checks.Refused as refused:
        raise BadArgument(f"trace {name}: {where}{refused}") from None
    return Trace(name, file.about, file.seconds, file.card_mb, tuple(events))


def _event(fields: Mapping[str, Any]) -> Event:
    rest = dict(fields)
    kind = rest.pop("do", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise checks.Refused(f"do: must be one of {', '.join(KINDS)}")
    return checks.convert(KINDS[kind], rest)


def _shipped() -> Any:
    return importlib.resources.files("frameshard") / "simulation" / "traces"
