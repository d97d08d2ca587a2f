"""Every binding can set each field of a request and each launch option, and read each field of an answer or event.
Exceptions and their reasons are in bindings/parity.json.

The test searches the public declarations of a binding for names: ``floor_bytes`` may be ``floor_mb``, ``FloorMb`` or
the name in parity.json under ``names``. The scenarios test that the values arrive.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

import frameshard
from frameshard import options, sync
from frameshard.wire import checks
from frameshard.wire import messages as m

BINDINGS = Path(__file__).parents[2] / "bindings"
MANIFEST: dict[str, Any] = json.loads((BINDINGS / "generated-manifest.json").read_text())
PARITY: dict[str, Any] = json.loads((BINDINGS / "parity.json").read_text())
NATIVE = ("c", "lua", "csharp", "unreal")

# Fields that the library sets, not the program.
INNER = {"id", "epoch", "seq", "job", "kind", "messages", "prompt"}


def fields(group: str, name: str) -> list[str]:
    return [field["name"] for field in MANIFEST[group][name]["fields"] if field["name"] not in INNER]


SET = {
    "launch": [field["name"] for field in MANIFEST["launch"]["fields"]],
    "sampling": fields("records", "Sampling"),
    "submit": fields("requests", "submit"),
    "budget_set": fields("requests", "budget_set"),
    "pacing": fields("requests", "pacing"),
    "plan": fields("requests", "plan"),
    "image": [name for name in fields("records", "Image") if name != "path"],
}
READ = {
    name: fields(group, name)
    for group in ("events", "answers", "unasked")
    for name in MANIFEST[group]
    if name not in ("welcome", "pong", "ok")
} | {name: fields("records", name) for name in ("ModelInfo", "PlanRow", "BrokerStats", "ErrorInfo")}


# Generated parts of a binding's declarations in which a program only sets fields.
OPTIONS = "fs_launch_options|fs_sampling|fs_lease|options|launch options|sampling|lease"


def declarations(binding: str, read: bool) -> str:
    """The public declarations of a binding, without comments.

    :param read: without options, too: the seed of an answer is not in them, although a seed is.
    """
    files = {
        "c": ["c/include/frameshard.h"],
        "lua": ["lua/frameshard.lua"],
        "csharp": [f"unity/Runtime/Core/{path.name}" for path in (BINDINGS / "unity/Runtime/Core").glob("*.cs")],
        "unreal": [
            f"unreal/Source/Frameshard/Public/{path.name}" for path in (BINDINGS / "unreal").rglob("Public/*.h")
        ],
    }[binding]
    text = "\n".join((BINDINGS / file).read_text() for file in files if not file.endswith("Native.cs"))
    if read:
        text = re.sub(rf"generated: ({OPTIONS})\b.*?end of \1", "", text, flags=re.S)
    text = re.sub(r"ffi\.cdef\(\[\[.*?\]\]\)|/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"^\s*(//|--).*$", "", text, flags=re.M)


def spellings(name: str) -> set[str]:
    """The spellings of a field's name in bindings."""
    names = {name}
    names |= {name.removesuffix("_bytes") + "_mb"} if name.endswith("_bytes") else set()
    names |= {name.removesuffix("_s") + "_seconds"} if name.endswith("_s") else set()
    pascal = {"".join(word.capitalize() for word in name.split("_")) for name in names}
    camel = {name[0].lower() + name[1:] for name in pascal}
    return names | pascal | camel | {f"b{name}" for name in pascal}


def lacks(binding: str) -> set[str]:
    """The fields that a binding does not have, each as ``GROUP.NAME``."""
    return _lacks(binding, SET, declarations(binding, read=False)) | _lacks(
        binding, READ, declarations(binding, read=True)
    )


def _lacks(binding: str, wanted: dict[str, list[str]], text: str) -> set[str]:
    renamed = {**PARITY["names"].get("all", {}), **PARITY["names"].get(binding, {})}
    missing = set()
    for group, names in wanted.items():
        for name in names:
            known = spellings(name)
            for key in (name, f"{group}.{name}"):
                known |= {other for called in renamed.get(key, []) for other in spellings(called)}
            if not any(re.search(rf"\b{word}\b", text) for word in known):
                missing.add(f"{group}.{name}")
    return missing


@pytest.mark.parametrize("binding", NATIVE)
def test_a_binding_has_every_field(binding: str) -> None:
    explained = PARITY["missing"].get(binding, {})
    unexplained = {
        name for name in lacks(binding) if name not in explained and f"{name.split('.')[0]}.*" not in explained
    }
    assert not unexplained, f"{binding} lacks these: add them, or say in bindings/parity.json why not"


@pytest.mark.parametrize("binding", NATIVE)
def test_no_explanation_is_out_of_date(binding: str) -> None:
    missing = lacks(binding)
    groups = {f"{name.split('.')[0]}.*" for name in missing}
    assert PARITY["missing"].get(binding, {}).keys() <= missing | groups


def test_what_is_explained_exists() -> None:
    known = {f"{group}.{name}" for wanted in (SET, READ) for group, names in wanted.items() for name in [*names, "*"]}
    for binding, missing in PARITY["missing"].items():
        assert missing.keys() <= known, binding
        assert all(missing.values()), binding


def parameters(function: Any) -> set[str]:
    """The names of keyword arguments, with those in a typed dict."""
    names = set()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = re.match(r"Unpack\[(\w+)\]", str(parameter.annotation))
        names |= set(typing.get_type_hints(getattr(options, kind[1]))) if kind else {name}
    return names


@pytest.mark.parametrize("client", [frameshard.Client, sync.Sidecar])
def test_python_sets_every_field(client: Any) -> None:
    launch = frameshard.launch if client is frameshard.Client else sync.Sidecar.launch
    takes = {
        "launch": parameters(launch),
        "submit": parameters(client.ask) & parameters(client.chat) & parameters(client.complete),
        "budget_set": parameters(client.set_budget),
        "pacing": parameters(client.set_pacing),
        "plan": parameters(client.plan),
    }
    missing = {
        f"{group}.{name}"
        for group, known in takes.items()
        for name in SET[group]
        if not known & (spellings(name) | {f"{name}_mb"})
    }
    assert missing == set()


def test_python_hands_on_whole_messages() -> None:
    """Both clients return the messages of the protocol, so every field is there."""
    given = {frameshard.Delta, frameshard.Progress, frameshard.ModelInfo, frameshard.Engine, frameshard.Notice}
    given |= {frameshard.Lease, frameshard.Released, frameshard.Observed, frameshard.Loading}
    given |= {frameshard.Budget, frameshard.Caps, frameshard.Stats, frameshard.PlanRow}
    for event in typing.get_args(sync.Event):
        for hint in typing.get_type_hints(event).values():
            given -= {
                hint,
                *typing.get_args(hint),
                *(inner for each in typing.get_args(hint) for inner in typing.get_args(each)),
            }
        given -= {event}
    assert given == set()
    assert issubclass(frameshard.Completion, m.Done)
    assert checks.fields_of(m.Done).keys() < set(typing.get_type_hints(frameshard.Completion))
