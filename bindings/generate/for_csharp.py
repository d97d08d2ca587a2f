"""The C# binding: numbers and structs of frameshard.h, the classes with options, and the code that fills structs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import for_c
from files import BINDINGS, with_region
from manifest import Manifest

CORE = BINDINGS / "unity" / "Runtime" / "Core"
TYPES, NATIVE, OPTIONS = CORE / "Types.cs", CORE / "Native.cs", CORE / "Options.cs"

# What a C type is in a blittable struct; pointers are IntPtr.
KINDS = {
    "uint32_t": "uint",
    "int32_t": "int",
    "uint64_t": "ulong",
    "int64_t": "long",
    "double": "double",
    "fs_status": "int",
}

# What C# calls the protocol's words and the structs with options.
ENUMS = {
    "Decision": "LeaseDecision",
    "EngineState": "EngineState",
    "ImageFormat": "ImageFormat",
    "LeaseState": "LeaseState",
    "LoadingStage": "LoadingStage",
    "NoticeKind": "NoticeKind",
    "Phase": "Phase",
    "Reason": "StopReason",
    "SchedulingMode": "SchedulingMode",
}
CLASSES = {"fs_launch_options": "LaunchOptions", "fs_sampling": "Sampling", "fs_lease": "Lease"}
# People set these in MiB.
SIZES = {
    "vram_budget_bytes": "VramBudgetMb",
    "floor_bytes": "FloorMb",
    "kv_cache_bytes": "KvCacheMb",
    "host_budget_bytes": "HostBudgetMb",
}
INITIAL = {"client_name": "csharp"}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    codes = [f"        {pascal(error['name'])} = {error['code']}," for error in manifest["errors"]]
    native, types = NATIVE.read_text(), with_region(TYPES.read_text(), "error codes", "\n".join(codes))
    cases = [(f"                case ErrorCode.{pascal(error['name'])}:", error) for error in manifest["errors"]]
    names = [f'{case} return "{error["name"]}";' for case, error in cases]
    types = with_region(types, "error names", "\n".join(names))
    retriable = [case for case, error in cases if error["retriable"]]
    types = with_region(types, "retriable errors", "\n".join(retriable))
    for name, numbers in for_c.numbers(manifest).items():
        lines = [f"        {pascal(word)} = {number}," for word, number in numbers.items()]
        types = with_region(types, ENUMS[name], "\n".join(lines))
    fills = []
    for struct in for_c.structs(manifest):
        native = with_region(native, struct.name, "\n".join(_members(struct)))
        types = with_region(types, struct.name, "\n".join(_fields(struct)))
        fills.append("\n".join(_fill(struct)))
    native = with_region(native, "fs_event", "\n".join(_event(manifest)))
    options = with_region(OPTIONS.read_text(), "options", "\n\n".join(fills))
    return {TYPES: types, NATIVE: native, OPTIONS: options}


def _given(struct: for_c.Struct) -> Iterator[for_c.Member]:
    """Members that a program sets, so without struct_size and counts."""
    yield from (member for member in for_c.members(struct) if member.field is not None or member in struct.own)


def _name(member: for_c.Member) -> str:
    name = SIZES.get(member.name) or pascal(member.name)
    return f"{name[:-1]}Seconds" if member.name.endswith("_s") else name


def _fields(struct: for_c.Struct) -> Iterator[str]:
    names = {member.name: _name(member) for member in _given(struct)}
    for member in _given(struct):
        text = member.text if member.field is None else _text(member.field)
        if member.name in INITIAL:
            text = re.sub(r"Default \w+\.$", f"Default {INITIAL[member.name]}.", text)
        text = re.sub(r"`(\w+)`", lambda word: f"`{names.get(word[1], word[1])}`", text)
        lines = textwrap.wrap(f"<summary>{escape(text)}</summary>", 108)
        yield from (f"        /// {line}" for line in lines)
        initial = f' = "{INITIAL[member.name]}"' if member.name in INITIAL else ""
        if member.field is not None and (enum := _enum(member.field)):
            initial = f" = {enum}.{pascal(str(member.field['default']))}"
        if member.name in SIZES and member.field is not None and member.field.get("default"):
            initial = f" = {member.field['default'] >> 20}"
        yield f"        public {_kind(member)} {_name(member)}{initial};"


def _text(field: dict[str, Any]) -> str:
    text: str = field["text"].rstrip(".")
    default = field.get("default")
    if field["name"] in SIZES:
        text += ". In MiB"
        default = default and default >> 20
    elif field["type"] == "word" and not _enum(field):
        text += f". One of {', '.join(field['words'])}"
    return f"{text}. Default {default}." if default and not _enum(field) else f"{text}."


def _enum(field: dict[str, Any]) -> str:
    return ENUMS.get(field.get("name_of_words", ""), "")


def _kind(member: for_c.Member) -> str:
    field = member.field
    if field is None or field["type"] in ("text", "word"):
        return (field and _enum(field)) or "string"
    if field["name"] in SIZES:
        return "double?" if field.get("nullable") else "double"
    if field["type"] == "array":
        return f"{field['items'].get('record', 'string')}[]"
    if field.get("nullable") and field["max"] < 2**32:
        return "uint?"
    required = field["name"] == "version"  # 0 is what it means when it is left out
    return KINDS[member.kind] + ("" if required else "?")


def _fill(struct: for_c.Struct) -> Iterator[str]:
    name = CLASSES[struct.name]
    yield f"        internal static void Fill(ref Native.{name} native, {name} options, Utf8 texts)"
    yield "        {"
    for member in _given(struct):
        field, kind = member.field, _kind(member)
        target, given = f"native.{pascal(member.name)}", f"options.{_name(member)}"
        if kind == "string":
            yield from _unless_null(given, f'{target} = texts.Name({given}, "{_name(member)}");')
        elif kind.endswith("[]"):
            (count,) = (each for each in for_c.members(struct) if each.name == f"n_{member.name}")
            made = f'texts.Names({given}, "{_name(member)}")' if kind == "string[]" else f"Records({given}, texts)"
            yield from _unless_null(given, f"{target} = {made};")
            yield f"            native.{pascal(count.name)} = ({KINDS[count.kind]})({given}?.Length ?? 0);"
        elif field is not None and field["name"] in SIZES:
            if field.get("nullable"):
                value = f"({KINDS[member.kind]})Sidecar.Bytes({given}.Value)"
                yield f"            if ({given}.HasValue) {target} = {value};"
            else:
                yield f"            {target} = Sidecar.Bytes({given});"
        elif field is not None and _enum(field):
            yield f"            {target} = ({KINDS[member.kind]}){given};"
        elif kind.endswith("?"):
            yield f"            {target} = {given} ?? {target};"
        else:
            yield f"            {target} = {given};"
    yield "        }"


def _unless_null(given: str, statement: str) -> Iterator[str]:
    line = f"            if ({given} != null) {statement}"
    if len(line) <= 120:
        yield line
    else:
        yield f"            if ({given} != null)"
        yield f"                {statement}"


def _members(struct: for_c.Struct) -> Iterator[str]:
    for member in for_c.members(struct):
        yield f"            internal {KINDS.get(member.kind, 'IntPtr')} {pascal(member.name)};"


def _event(manifest: Manifest) -> Iterator[str]:
    for member in for_c.event_members(manifest):
        kind = "EventType" if member.name == "type" else KINDS.get(member.kind, "IntPtr")
        yield f"            internal {kind} {pascal(member.name)};"


def pascal(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
