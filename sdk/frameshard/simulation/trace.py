"""A trace is a script of a game: its frames, its demand for memory and its questions to the model, with their times.

It is a JSON file:

    {
      "about": "the streets fill up while Mira talks",
      "seconds": 12,                            its length
      "card_mb": 8192,                          VRAM of the GPU; the part that the game leaves is for the sidecar
      "events": [
        {"at": 0, "do": "draw", "frame_ms": 16.7, "gpu_busy_ms": 9.5},
        {"at": 0, "do": "vram", "game_mb": 3100},
        {"at": 1, "do": "ask", "who": "mira", "text": "Who comes there?", "max_tokens": 40},
        {"at": 4, "do": "vram", "game_mb": 5800, "deadline_ms": 500, "by": "page"}
      ]
    }

| do | meaning |
| --- | --- |
| draw | from now on frames take `frame_ms`, and the game keeps the GPU busy for `gpu_busy_ms` of each |
| idle | the game draws no frames (menu, loading, another window) until the next draw |
| vram | the game needs `game_mb`; the sidecar gets the rest, `by` a "message" or by the frame block ("page") |
| host | the sidecar may hold `above_floor_mb` more than its floor in host memory; without it, there is no limit |
| lease | the sidecar must be "parked" or "hibernated" because the game needs the whole GPU, or "active" again |
| ask | sends `text` in the conversation with `who`; the questions of one conversation are asked one after another |
| cancel | cancels the answer of `who` |

Events are in the order of `at`, in seconds from the start. Deadlines (`deadline_ms`, 1 to 60,000) are in real time,
also in a replay at another speed.
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
    """The game draws frames from now on."""

    at: checks.Seconds
    frame_ms: checks.Seconds
    gpu_busy_ms: checks.Seconds = 0.0


@dataclass(frozen=True)
class Idle:
    """The game draws no frames from now on."""

    at: checks.Seconds


@dataclass(frozen=True)
class Vram:
    """The VRAM that the game needs from now on."""

    at: checks.Seconds
    game_mb: checks.Count
    deadline_ms: checks.Seconds = 1000.0
    by: Literal["message", "page"] = "message"


@dataclass(frozen=True)
class Host:
    """The host memory that the sidecar may hold from now on, above its floor; None: there is no limit."""

    at: checks.Seconds
    above_floor_mb: checks.Count | None = None
    deadline_ms: checks.Seconds = 1000.0


@dataclass(frozen=True)
class Lease:
    """A state of the sidecar. Budgets that are set while it is not active apply when it is active again."""

    at: checks.Seconds
    state: m.LeaseState
    deadline_ms: checks.Seconds = 10000.0


@dataclass(frozen=True)
class Ask:
    """A question to the model."""

    at: checks.Seconds
    who: checks.Name
    text: checks.Text
    max_tokens: checks.Id = 32


@dataclass(frozen=True)
class Cancel:
    """The end of a job before its answer is complete."""

    at: checks.Seconds
    who: checks.Name


Event = Draw | Idle | Vram | Host | Lease | Ask | Cancel
KINDS: dict[str, type[Event]] = {
    "draw": Draw,
    "idle": Idle,
    "vram": Vram,
    "host": Host,
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
    """A script with its name. `seconds` is its length at speed 1."""

    name: str
    about: str
    seconds: float
    card_mb: int
    events: tuple[Event, ...]

    def offers(self) -> list[int]:
        """The MiB that the game leaves to the sidecar, in the order of events."""
        return [self.card_mb - event.game_mb for event in self.events if isinstance(event, Vram)]


def names() -> list[str]:
    """The names of the traces that come with the package."""
    return sorted(path.name.removesuffix(".json") for path in _shipped().iterdir() if path.name.endswith(".json"))


def load(name: str) -> Trace:
    """Loads a trace.

    :param name: the path of a file, or the name of a trace that comes with the package.
    :raises BadArgument: there is no such trace, or it is wrong.
    """
    if name in names():
        return parse(name, (_shipped() / f"{name}.json").read_text(encoding="utf-8"))
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadArgument(f"no trace {name}: {error}; by name there are {', '.join(names())}") from None
    return parse(path.stem, text)


def parse(name: str, text: str) -> Trace:
    """Reads the trace in a file's `text`.

    :raises BadArgument: the trace is wrong; the message says where.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
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
            if isinstance(event, (Vram, Host, Lease)) and not 1 <= event.deadline_ms <= 60_000:
                raise checks.Refused("deadline_ms: must be from 1 to 60000")
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
