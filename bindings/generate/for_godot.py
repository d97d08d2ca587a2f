"""The Godot addon: properties of its nodes for launch options and sampling, and what fills frameshard.h's structs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import for_c
from files import BINDINGS, with_region
from manifest import Manifest

OPTIONS = BINDINGS / "godot" / "src" / "options.h"

# People set these in MiB.
SIZES = {
    "vram_budget_bytes": "vram_budget_mb",
    "kv_cache_bytes": "kv_cache_mb",
    "host_budget_bytes": "host_budget_mb",
}
# A game that has set nothing keeps VRAM for itself.
DEFAULTS = {"fs_launch_options.vram_budget_bytes": "2048"}
OWN = ("python", "log_file", "extra_json")  # of the library, not of the protocol
KINDS = {"text": "std::string", "texts": "std::vector<std::string>", "integer": "int64_t", "number": "double"}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    launch, sampling, _ = for_c.structs(manifest)
    body = [line for struct, name in ((launch, "Launch"), (sampling, "Sampling")) for line in _struct(struct, name)]
    body += _words(manifest)
    return {OPTIONS: with_region(OPTIONS.read_text(), "options", "\n".join(body))}


def _struct(struct: for_c.Struct, name: str) -> Iterator[str]:
    fields = list(_fields(struct))
    yield f"struct {name}Values {{"
    for field in fields:
        default = DEFAULTS.get(f"{struct.name}.{field['name']}") or _default(field)
        yield f"    {KINDS[_kind(field)]} {_name(field)}{f' = {default}' if default else ''};"
    yield "};"
    yield ""
    yield f"inline const Property {name.upper()}_PROPERTIES[] = {{"
    for field in fields:
        hint, text = _hint(field)
        place = f"offsetof({name}Values, {_name(field)})"
        yield f'    {{"{_name(field)}", Kind::{_kind(field)}, {place}, {hint}, "{text}"}},'
    yield "};"
    yield ""
    yield f"inline void fill({struct.name} &made, const {name}Values &from, Texts &texts) {{"
    for field in fields:
        member, given = f"made.{field['name']}", f"from.{_name(field)}"
        if _kind(field) == "texts":
            yield f"    made.n_{field['name']} = decltype(made.n_{field['name']})({given}.size());"
            value = f"texts.{'adapters' if field['name'] == 'adapters' else 'list'}({given})"
        elif field["name"] in SIZES:
            value = f"bytes_of({given})"
        elif _kind(field) == "text":
            value = f"texts.{'path' if field.get('path') else 'text'}({given})"
        elif field.get("nullable"):
            value = f"{given} < 0 ? -1 : saturated<decltype({member})>({given})"
        elif _kind(field) == "integer":
            value = f"saturated<decltype({member})>({given})"
        else:
            value = f"decltype({member})({given})"
        yield f"    {member} = {value};"
    yield "}"
    yield ""


def _fields(struct: for_c.Struct) -> Iterator[dict[str, Any]]:
    """Those that a property can hold, so not the list of records."""
    for member in for_c.members(struct):
        if member.field is not None and "record" not in member.field.get("items", {}):
            yield member.field
        elif member.name in OWN:
            yield {"name": member.name, "type": "text", "path": member.name != "extra_json"}


def _name(field: dict[str, Any]) -> str:
    return str(SIZES.get(field["name"], field["name"]))


def _kind(field: dict[str, Any]) -> str:
    if field["type"] == "array":
        return "texts"
    if field["name"] in SIZES or field["type"] == "number":
        return "number"
    return "integer" if field["type"] == "int" else "text"


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    kind = _kind(field)
    if field["name"] in SIZES:
        return str((default or 0) >> 20)
    if kind == "integer":
        return "-1" if field.get("nullable") else str(default or 0)
    if kind == "number":
        return for_c.figure(default or 0)
    return f'"{default}"' if default and isinstance(default, str) else ""


def _hint(field: dict[str, Any]) -> tuple[int, str]:
    """PropertyHint and its text: a range, some words, a file."""
    kind = _kind(field)
    if field["name"] in SIZES:
        return 1, "0,1048576,1,or_greater,suffix:MiB"
    if field["type"] == "word":
        return 2, ",".join(field["words"])
    if kind in ("integer", "number"):
        least = -1 if field.get("nullable") else 0 if field.get("or_zero") else field["min"]
        step = "1" if kind == "integer" else "0.001"
        return 1, f"{for_c.figure(least)},{for_c.figure(field['max'])},{step}"
    if field.get("path"):
        return 13, "*.gguf" if field["name"] in ("model", "mmproj", "draft_model", "embedder") else ""
    return 0, ""


def _words(manifest: Manifest) -> Iterator[str]:
    """The words that numbers in frameshard.h stand for, from 1 on."""
    for name in ("EngineState", "NoticeKind", "LoadingStage", "LeaseState", "SchedulingMode"):
        numbers = for_c.numbers(manifest)[name]
        assert list(numbers.values()) == list(range(1, len(numbers) + 1))
        words = ", ".join(f'"{word}"' for word in numbers)
        yield f"inline constexpr const char *{name}[] = {{{words}}};"
