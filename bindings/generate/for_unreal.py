"""The Unreal plugin: enumerations, properties of settings and parameters, and what fills frameshard.h's structs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import for_c
from files import BINDINGS, with_region
from manifest import Manifest

MODULE = BINDINGS / "unreal" / "Source" / "Frameshard"
TYPES = MODULE / "Public" / "FrameshardTypes.h"
SETTINGS = MODULE / "Public" / "FrameshardSettings.h"
OPTIONS = MODULE / "Private" / "FrameshardOptions.h"

ENUMS = (
    "LeaseState",
    "EngineState",
    "Decision",
    "NoticeKind",
    "Reason",
    "Phase",
    "LoadingStage",
    "ImageFormat",
    "SchedulingMode",
)
# People set these in MiB.
SIZES = {
    "vram_budget_bytes": "VramBudgetMb",
    "floor_bytes": "FloorMb",
    "kv_cache_bytes": "KvCacheMb",
    "host_budget_bytes": "HostBudgetMb",
}
PATHS = ("model", "mmproj", "draft_model", "embedder")  # may begin in the project's Content folder
SAVED = ("connect_file", "fallback_key_file")  # may begin in the project's Saved folder
COMMON = ("model", "mmproj", "device", "vram_budget_bytes", "n_ctx", "n_parallel")  # others are under "Advanced"

# A game that has set nothing keeps VRAM for itself.
DEFAULTS = {"fs_launch_options.vram_budget_bytes": "2048"}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    launch, sampling, lease = for_c.structs(manifest)
    blueprint, config = (
        'EditAnywhere, BlueprintReadWrite, Category = "frameshard"',
        'Config, EditAnywhere, Category = "Sidecar"',
    )
    types = with_region(TYPES.read_text(), "enumerations", "\n".join(_enumerations(manifest)))
    types = with_region(types, "sampling", "\n".join(_properties(sampling, blueprint)))
    types = with_region(types, "lease", "\n".join(_properties(lease, blueprint)))
    settings = with_region(SETTINGS.read_text(), "launch options", "\n".join(_properties(launch, config)))
    sources = ((launch, "UFrameshardSettings"), (sampling, "FFrameshardAskParams"), (lease, "FFrameshardLease"))
    fills = [_fill(struct, source) for struct, source in sources]
    options = with_region(OPTIONS.read_text(), "options", "\n\n".join(fills))
    return {TYPES: types, SETTINGS: settings, OPTIONS: options}


def pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def _name(field: dict[str, Any]) -> str:
    name = SIZES.get(field["name"]) or pascal(field["name"])
    return f"{name[:-1]}Seconds" if field["name"].endswith("_s") else name


def _enumerations(manifest: Manifest) -> Iterator[str]:
    numbers = for_c.numbers(manifest)
    for name in ENUMS:
        yield "UENUM(BlueprintType)"
        yield f"enum class EFrameshard{name} : uint8"
        yield "{"
        yield "\tUnknown = 0 UMETA(Hidden),"
        yield from (f"\t{pascal(word)} = {number}," for word, number in numbers[name].items())
        yield "};"
        yield ""


def _fields(struct: for_c.Struct) -> Iterator[dict[str, Any]]:
    yield from (member.field for member in for_c.members(struct) if member.field is not None)


def _properties(struct: for_c.Struct, specifiers: str) -> Iterator[str]:
    names = {field["name"]: _name(field) for field in _fields(struct)}
    for field in _fields(struct):
        text = re.sub(r"`(\w+)`", lambda word: f"`{names.get(word[1], word[1])}`", _text(field))
        lines = textwrap.wrap(text, 108)
        yield "\t/** " + "\n\t * ".join(lines) + " */"
        words = specifiers
        if struct.name == "fs_launch_options" and field["name"] not in COMMON:
            words += ", AdvancedDisplay"
        yield f"\tUPROPERTY({words}{_meta(field)})"
        default = DEFAULTS.get(f"{struct.name}.{field['name']}") or _default(field)
        yield f"\t{_kind(field)} {_name(field)}{f' = {default}' if default else ''};"
        yield ""


def _text(field: dict[str, Any]) -> str:
    text: str = field["text"].rstrip(".")
    if field["name"] in SIZES:
        text += ". In MiB; below 0: not given" if field.get("nullable") else ". In MiB"
    elif field.get("nullable") and field["type"] == "int":
        text += f". {field['min']} to {field['max']}; below 0: not given"
    elif field["type"] == "word" and not _enumeration(field):
        text += f". One of {', '.join(field['words'])}"
    return text + "."


def _enumeration(field: dict[str, Any]) -> str:
    name = field.get("name_of_words", "")
    return f"EFrameshard{name}" if name in ENUMS else ""


def _kind(field: dict[str, Any]) -> str:
    if field["name"] in SIZES or field["type"] == "number":
        return "double"
    if field["type"] == "int":
        return "int32" if field["max"] < 2**31 and not field.get("nullable") else "int64"
    if field["type"] == "array":
        record = field["items"].get("record")
        return f"TArray<FFrameshard{record}>" if record else "TArray<FString>"
    return _enumeration(field) or "FString"


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    if _enumeration(field):
        return f"{_enumeration(field)}::{pascal(str(default))}"
    if field["name"] in SIZES:
        return "-1" if field.get("nullable") else str((default or 0) >> 20)
    if field["type"] == "int":
        return "-1" if field.get("nullable") else str(default or 0)
    if field["type"] == "number":
        return for_c.figure(default or 0)
    return f'TEXT("{default}")' if default and isinstance(default, str) else ""


def _meta(field: dict[str, Any]) -> str:
    if field["name"] in SIZES and not field.get("nullable"):
        return ', meta = (ClampMin = "0")'
    if field["type"] not in ("int", "number") or field.get("nullable"):
        return ""
    most = f', ClampMax = "{for_c.figure(field["max"])}"' if field["max"] < 2**31 else ""
    return f', meta = (ClampMin = "{for_c.figure(field["min"])}"{most})'


def _fill(struct: for_c.Struct, source: str) -> str:
    lines = [f"inline void FrameshardFill({struct.name}& Made, const {source}& From, FFrameshardTexts& Texts)", "{"]
    if not any(field["type"] in ("text", "word", "array") and not _enumeration(field) for field in _fields(struct)):
        lines[0] = lines[0].replace("& Texts", "&")
    for field in _fields(struct):
        member, given = f"Made.{field['name']}", f"From.{_name(field)}"
        if field["name"] in SIZES:
            value = f"FrameshardBytes({given})"
            if field.get("nullable"):
                value = f"{given} < 0 ? -1 : static_cast<decltype({member})>({value})"
        elif field["name"] in PATHS:
            value = f"Texts.Path({given})"
        elif field["name"] in SAVED:
            value = f"Texts.Saved({given})"
        elif field["type"] == "array":
            lines.append(f"\tMade.n_{field['name']} = static_cast<decltype(Made.n_{field['name']})>({given}.Num());")
            kind = "Records" if "record" in field["items"] else "Adapters" if field["name"] == "adapters" else "List"
            value = f"Texts.{kind}({given})"
        elif field["type"] in ("text", "word") and not _enumeration(field):
            value = f"Texts.Text({given})"
        elif field.get("nullable"):
            value = f"{given} < 0 ? -1 : {given}"
        else:
            value = f"static_cast<decltype({member})>({given})"
        lines.append(f"\t{member} = {value};")
    return "\n".join([*lines, "}"])
