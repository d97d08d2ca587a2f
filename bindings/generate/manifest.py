"""The manifest: what messages.py and launch.py say, as data for all generators.

bindings/generated-manifest.json has

- ``protocol``: the version;
- ``words``: by name, the words that a field may have (``name_of_words`` of the field);
- ``requests``, ``answers``, ``events`` (of a job), ``unasked``: by the name ``t`` of the message, and ``records`` by
  name: ``{"about": text, "fields": [field, ...]}``; a message also has ``class``, its name in Python;
- ``launch`` (the options of a sidecar) and ``connect`` (what a client needs): the same;
- ``errors``: ``{"code", "name", "retriable", "about"}`` in the order of their codes.

A field is ``{"name", "type", "text"}`` and, by its type, ``min``, ``max``, ``unit``, ``or_zero``, ``words``, ``items``,
``record``, ``nullable``, ``path`` (a text that names a file); with ``default`` unless it is required. ``max`` of a text
or bin is bytes, of an array elements. ``default_words`` stand for a default that depends on the machine.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from typing import Any

from frameshard import errors
from frameshard.wire import checks, launch
from frameshard.wire import messages as m

Manifest = dict[str, Any]


def make() -> Manifest:
    """The manifest of the source tree."""
    words = {
        name: list(typing.get_args(kind)) for name, kind in vars(m).items() if typing.get_origin(kind) is typing.Literal
    }
    events = [name for name, cls in m.ANSWERS.items() if {"job", "seq"} <= checks.fields_of(cls).keys()]
    unasked = [name for name, cls in m.ANSWERS.items() if name not in events and "id" not in checks.fields_of(cls)]
    answers = [name for name in m.ANSWERS if name not in events and name not in unasked]
    messages = [*m.REQUESTS.values(), *m.ANSWERS.values()]
    return {
        "protocol": m.VERSION,
        "words": words,
        "requests": {name: _message(cls, words) for name, cls in m.REQUESTS.items()},
        "answers": {name: _message(m.ANSWERS[name], words) for name in answers},
        "events": {name: _message(m.ANSWERS[name], words) for name in events},
        "unasked": {name: _message(m.ANSWERS[name], words) for name in unasked},
        "records": {cls.__name__: _record(cls, words) for cls in _records(messages)},
        "launch": _record(launch.ServeConfig, words),
        "connect": _record(launch.ConnectInfo, words),
        "errors": [
            {"code": cls.code, "name": cls.name, "retriable": cls.retriable, "about": _about(cls)}
            for cls in sorted(errors.BY_NAME.values(), key=lambda cls: cls.code)
        ],
    }


def text(manifest: Manifest) -> str:
    """The content of generated-manifest.json."""
    return json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"


def _message(cls: type[Any], words: dict[str, list[str]]) -> dict[str, Any]:
    return {"class": cls.__name__, **_record(cls, words)}


def _record(cls: type[Any], words: dict[str, list[str]]) -> dict[str, Any]:
    return {"about": _about(cls), "fields": [_field(field, words) for field in checks.fields_of(cls).values()]}


def _about(cls: type[Any]) -> str:
    """The docstring's first paragraph, as one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].replace("``", "`").split())


def _field(field: checks.Field, words: dict[str, list[str]]) -> dict[str, Any]:
    found = {"name": field.name, **field.check.description}
    if not field.text:
        raise SystemExit(f"the field {field.name} has no text in its annotation")
    if found["type"] == "word":
        names = [name for name, known in words.items() if known == found["words"]]
        found |= {"name_of_words": names[0]} if names else {}
    if field.default_words:
        found |= {"default": None, "default_words": field.default_words}
    elif not field.required:
        found["default"] = _plain(field.default)
    return {**found, "text": field.text}


def _plain(default: Any) -> Any:
    if dataclasses.is_dataclass(default):
        return {}
    if isinstance(default, tuple):
        return list(default)
    return default.decode() if isinstance(default, bytes) else default


def _records(classes: Iterable[type[Any]]) -> list[type[Any]]:
    """Records inside these messages, in the order in which messages.py has them."""
    names: set[str] = set()
    for cls in classes:
        for field in checks.fields_of(cls).values():
            names |= _names(field.check.description)
    for cls in list(vars(m).values()):  # records inside records come behind those that they are in
        if getattr(cls, "__name__", "") in names and dataclasses.is_dataclass(cls):
            for field in checks.fields_of(cls).values():
                names |= _names(field.check.description)
    return [cls for name, cls in vars(m).items() if name in names]


def _names(description: Any) -> set[str]:
    if description["type"] == "record":
        return {description["record"]}
    items = description.get("items", [])
    return {name for item in (items if isinstance(items, list) else [items]) for name in _names(item)}
