"""The C library: frameshard.h's statuses and structs, and the code that fills and reads those structs.

Fields of a C struct keep their place: the order and the types are read from frameshard.h, and what is new goes to the
end. So a program that was built against an older header goes on working.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from files import BINDINGS, region, with_region
from manifest import Manifest

HEADER = BINDINGS / "c" / "include" / "frameshard.h"
STATUSES = BINDINGS / "c" / "src" / "seam.cpp"
OPTIONS = BINDINGS / "c" / "src" / "options.cpp"
OPTIONS_H = BINDINGS / "c" / "src" / "options.h"
WORDS_H = BINDINGS / "c" / "src" / "words.h"
CODEC = BINDINGS / "c" / "src" / "codec.cpp"
WIDTH = 118
LINE = 120  # clang-format breaks longer ones


# Words that C has numbers for, and how those are called.
ENUMS = {
    "Decision": "FS_DECISION_",
    "EngineState": "FS_ENGINE_",
    "ImageFormat": "FS_IMAGE_",
    "LeaseState": "FS_LEASE_",
    "LoadingStage": "FS_LOADING_",
    "NoticeKind": "FS_NOTICE_",
    "Phase": "FS_PHASE_",
    "Reason": "FS_REASON_",
    "SchedulingMode": "FS_",
}


# Records in arrays of options, and what C calls their structs. These are written by hand, with a function `fields_of`.
STRUCTS = {"LogitBias": "fs_logit_bias"}

# What each FS_EVENT_... brings: a message, or a record that comes one at a time.
EVENTS = {
    "READY": "ModelInfo",
    "STARTED": "started",
    "TEXT": "delta",
    "DONE": "done",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "BUDGET_RELEASED": "released",
    "BUDGET_OBSERVED": "observed",
    "BUDGET": "budget",
    "STATS": "stats",
    "REFUSED": "error",
    "ENGINE": "engine",
    "LEASE": "lease",
    "NOTICE": "notice",
    "CAPS": "caps_and_requirements",
    "PLAN": "PlanRow",
    "FRAME_BLOCK": "frame_block",
    "PROGRESS": "progress",
    "LOADING": "loading",
    "ADAPTERS": "adapters",
    "KV": "kv",
    "PAUSED": "paused",
    "RESUMED": "resumed",
    "TOKEN_COUNT": "token_count",
    "EMBEDDINGS": "embeddings",
    "THOUGHT": "thought",
    "TOOL_CALL": "tool_call",
}

# Members of fs_event that are called otherwise than their field, by event and field or by field. Those of texts and
# maps are `text` and `detail`.
MEMBERS = {
    "id": "request",
    "vram_budget_bytes": "budget_bytes",
    "BUDGET.state": "lease_state",
    "ENGINE.state": "engine_state",
    "ENGINE.error": "text",
    "FAILED.error": "text",
    "REFUSED.error": "text",
    "NOTICE.kind": "notice",
    "NOTICE.detail": "text",
    "CAPS.device": "text",
    "CAPS.context": "detail",
    "CAPS.mode": "detail",
    "STATS.broker": "detail",
    "STATS.engine": "detail",
    "FRAME_BLOCK.path": "text",
    "KV.detail": "text",
    "READY.name": "text",
    "ADAPTERS.adapters": "detail",
    "TOOL_CALL.arguments": "text",
}
INNER = ("epoch", "seq")  # for the library, not for the program


@dataclass(frozen=True)
class Member:
    """A member of a C struct."""

    kind: str
    """The C type."""
    name: str
    text: str
    field: dict[str, Any] | None = None
    """The manifest's field that it sets; None for struct_size, counts and what only the library knows."""


@dataclass(frozen=True)
class Struct:
    """A C struct that mirrors a record, a request or the launch options."""

    name: str
    fields: tuple[dict[str, Any], ...]
    own: tuple[Member, ...] = ()
    """Members that have no field in the manifest."""


def structs(manifest: Manifest) -> list[Struct]:
    """Generated structs. Other generators take their members from :func:`members`."""
    launch = [field for field in manifest["launch"]["fields"] if field["name"] != "engine"]  # see parity.json
    lease = [field for field in manifest["requests"]["budget_set"]["fields"] if field["name"] not in ("id", "epoch")]
    return [
        Struct(
            "fs_launch_options",
            tuple(launch),
            (
                Member(
                    "const char *",
                    "python",
                    "Command of the Python that has frameshard installed. Default: python3, from PATH.",
                ),
                Member(
                    "const char *",
                    "log_file",
                    "Path of a file to which the sidecar appends its log. Default: standard error.",
                ),
                Member(
                    "const char *",
                    "client_name",
                    "Name of the client in the sidecar's log, at most 64 bytes. Default c.",
                ),
                Member(
                    "const char *",
                    "extra_json",
                    "A JSON object with further launch options; they take precedence over the others. Default: none.",
                ),
            ),
        ),
        Struct("fs_sampling", tuple(manifest["records"]["Sampling"]["fields"])),
        Struct("fs_lease", tuple(lease)),
    ]


def _there(struct: str) -> list[tuple[str, str]]:
    """Types and names of the members that frameshard.h has already."""
    plain = re.sub(r"/\*.*?\*/", "", region(HEADER.read_text(), struct), flags=re.S)
    return re.findall(r"^    ([\w *]*?[ *])(\w+);", plain, re.M)


def event_fields(manifest: Manifest) -> dict[str, dict[str, str]]:
    """By event, the member of fs_event that has each field of its message."""
    found: dict[str, dict[str, str]] = {}
    for event, name in EVENTS.items():
        groups = (manifest[group] for group in ("answers", "events", "unasked", "records"))
        (message,) = (group[name] for group in groups if name in group)
        for field in message["fields"]:
            member = MEMBERS.get(f"{event}.{field['name']}") or MEMBERS.get(field["name"]) or field["name"]
            if event == "READY" and member not in ("floor_bytes", "full_bytes", "text"):
                member = "detail"
            if field["name"] not in INNER:
                found.setdefault(event, {})[field["name"]] = member
    return found


def event_members(manifest: Manifest) -> list[Member]:
    """fs_event: its members in their order, with what they mean in each event."""
    texts: dict[str, dict[str, list[str]]] = {}
    kinds: dict[str, str] = {}
    for event, fields in event_fields(manifest).items():
        groups = (manifest[group] for group in ("answers", "events", "unasked", "records"))
        (message,) = (group[EVENTS[event]] for group in groups if EVENTS[event] in group)
        for field in message["fields"]:
            member = fields.get(field["name"])
            if member not in (None, "text", "detail", "job", "request", "timeline"):
                about = field["text"]
                if _is_number(field):
                    about += f" {ENUMS[field['name_of_words']]}..., or 0 for a value that this library does not know."
                elif field.get("nullable"):
                    about += " -1 if missing." if field["type"] == "int" else " 0 if missing."
                texts.setdefault(str(member), {}).setdefault(about, []).append(event)
                kinds[str(member)] = _kind(field)
    own = {
        "type": "FS_EVENT_...",
        "status": "FS_OK, or the error.",
        "job": "Number of the job, from fs_ask, fs_chat or fs_complete. 0: the event belongs to no job.",
        "request": "Number of the request, from the function that made it. 0: the event answers no request.",
        "timeline": "The `timeline` of the job's fs_job_options.",
        "text": "UTF-8 with a NUL at the end. Valid until the next fs_poll or fs_close of this client.",
        "detail": "A JSON object, or empty. Valid as long as `text`.",
        "text_length": "Length of `text` in bytes, without the NUL.",
        "detail_length": "Length of `detail` in bytes, without the NUL.",
        "reserved": "Always 0.",
        "n_dropped": "FS_EVENT_STARTED, FS_EVENT_DONE of a job of fs_ask: how many of the conversation's oldest "
        "questions, with their answers, are not in the prompt because the context is full.",
        "n_rows": "Number of rows in `rows`: one for each text, in the order of fs_embed.",
        "rows": "`n_rows` times `n_dim` floats. The squares of each row add up to 1. Valid as long as `text`.",
    }
    there = _there("fs_event")
    order = {name: kind.strip() for kind, name in there}
    order |= {name: kind for name, kind in kinds.items() if name not in order}
    return [Member(kind, name, own.get(name) or _each(texts[name])) for name, kind in order.items()]


def _each(texts: dict[str, list[str]]) -> str:
    """What a member means: one line for each meaning if it depends on the event."""
    if len(texts) == 1:
        return next(iter(texts))
    return "\n".join(f"{', '.join(f'FS_EVENT_{event}' for event in events)}: {text}" for text, events in texts.items())


def numbers(manifest: Manifest) -> dict[str, dict[str, int]]:
    """By enumeration the number of each word: those that frameshard.h has already keep theirs."""
    header, found = HEADER.read_text(), {}
    for name, prefix in ENUMS.items():
        there = dict(re.findall(rf"\b{prefix}(\w+) = (\d+)", region(header, name)))
        known = {word: int(there[word.upper()]) for word in manifest["words"][name] if word.upper() in there}
        for word in manifest["words"][name]:
            known.setdefault(word, max(known.values(), default=0) + 1)
        found[name] = dict(sorted(known.items(), key=lambda item: item[1]))
    return found


def members(struct: Struct) -> list[Member]:
    """In their order: those that frameshard.h has already, then new ones."""
    known = {member.name: member for member in _expected(struct)}
    there = _there(struct.name)
    old = [Member(kind.strip(), name, known[name].text, known[name].field) for kind, name in there if name in known]
    names = {member.name for member in old}
    return [*old, *(member for member in known.values() if member.name not in names)]


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    header, statuses = HEADER.read_text(), STATUSES.read_text()
    codes = [f"    FS_{error['name'].upper()} = {error['code']}" for error in manifest["errors"]]
    header = with_region(header, "statuses", ",\n".join(["    FS_OK = 0", *codes]))
    rows = [
        f'    {{FS_{error["name"].upper()}, "{error["name"]}", {"true" if error["retriable"] else "false"}}},'
        for error in manifest["errors"]
    ]
    statuses = with_region(statuses, "statuses", "\n".join(['    {FS_OK, "ok", false},', *rows]))
    for struct in structs(manifest):
        header = with_region(header, struct.name, "\n".join(_declarations(struct)))
    lines = [line for member in event_members(manifest) for line in (comment(member.text), f"    {declared(member)};")]
    header = with_region(header, "fs_event", "\n".join(lines))
    for name, known in numbers(manifest).items():
        header = with_region(header, name, _enumerators(region(header, name), ENUMS[name], known))
    return {
        HEADER: header,
        STATUSES: statuses,
        OPTIONS: _options(manifest),
        OPTIONS_H: _options_h(manifest),
        WORDS_H: _words_h(manifest),
        CODEC: with_region(CODEC.read_text(), "answers", _tables(manifest)),
    }


# ---- declarations ---------------------------------------------------------------------------------------------------


def _expected(struct: Struct) -> Iterator[Member]:
    yield Member("uint32_t", "struct_size", f"Set by {struct.name}_init.")
    for field in struct.fields:
        name, text = field["name"], c_text(field)
        if field["type"] == "array":
            record = field["items"].get("record")
            things, kind = ("structs", f"const {STRUCTS[record]} *") if record else ("strings", "const char *const *")
            yield Member("uint64_t", f"n_{name}", f"Number of {things} in `{name}`, at most {field['max']}.")
            yield Member(kind, name, text, field)
        else:
            yield Member(_kind(field), name, text, field)
    yield from struct.own


def _kind(field: dict[str, Any]) -> str:
    """The C type of a new member: 8 bytes wide, so that no hole is left which a later member would fall into."""
    if _is_number(field):
        return "uint64_t"
    if field["type"] in ("text", "word"):
        return "const char *"
    if field["type"] == "number":
        return "double"
    if field["type"] == "bin":
        return "const float *"  # the library turns the 16-bit floats of embeddings into these
    return "int64_t" if field.get("nullable") or field.get("min", 0) < 0 else "uint64_t"


def _is_number(field: dict[str, Any]) -> bool:
    """A word that C has numbers for."""
    return field["type"] == "word" and field.get("name_of_words") in ENUMS


def c_text(field: dict[str, Any]) -> str:
    """The field's text, its range and its default, for a comment."""
    parts = [field["text"].rstrip(".")]
    if field.get("nullable") and field["type"] == "int":
        parts.append(f"Range {field['min']}..{field['max']}, or -1: not given. Default -1")
    elif field["type"] in ("int", "number"):
        if field["max"] < 2**53 - 1:
            unit = f" {field['unit']}" if field.get("unit") else ""
            least = f"{'0 or ' if field.get('or_zero') else ''}{figure(field['min'])}"
            parts.append(f"Range {least}..{figure(field['max'])}{unit}")
        if "default" in field:
            parts.append(f"Default {figure(field['default'])}")
    elif field["type"] == "text" and "default" not in field:
        parts.append(f"{field['min']}..{field['max']} bytes")
    elif field["type"] == "text":
        parts.append(f"At most {field['max']} bytes; NULL (default): {_or_none(field)}")
    elif _is_number(field):
        prefix = ENUMS[field["name_of_words"]]
        parts.append(f"{prefix}... Default {prefix}{str(field['default']).upper()}")
    elif field["type"] == "word":
        parts.append(f"One of {', '.join(field['words'])}; NULL: the default, {_or_none(field)}")
    elif field["type"] == "array" and "record" not in field["items"]:
        parts.append(f"Each has {field['items']['min']}..{field['items']['max']} bytes and a NUL at the end")
    return ". ".join(parts) + "."


def _or_none(field: dict[str, Any]) -> str:
    return str(field.get("default_words") or field.get("default") or "not given")


def figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def comment(text: str, indent: int = 4) -> str:
    """A C comment; each line of `text` begins a new one."""
    paragraphs = text.replace("*/", "* /").splitlines()
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, WIDTH - indent - 6)]
    return " " * indent + "/* " + ("\n" + " " * (indent + 3)).join(lines) + " */"


def _declarations(struct: Struct) -> Iterator[str]:
    for member in members(struct):
        yield comment(member.text)
        yield f"    {declared(member)};"


def declared(member: Member) -> str:
    return member.kind + ("" if member.kind.endswith("*") else " ") + member.name


def _enumerators(old: str, prefix: str, known: dict[str, int]) -> str:
    """The lines that are there, whose comments are written by hand, and new ones."""
    new = [
        f"    {prefix}{word.upper()} = {number},"
        for word, number in known.items()
        if not re.search(rf"\b{prefix}{word.upper()} = ", old)
    ]
    return "\n".join([old.rstrip("\n"), *new])


# ---- code -----------------------------------------------------------------------------------------------------------


def _options(manifest: Manifest) -> str:
    parts = [
        "// Written by `make generate` from bindings/generated-manifest.json; do not edit.\n",
        '#include "options.h"\n',
        '#include "seam.h"\n#include "words.h"\n',
        "namespace frameshard_core {\n",
    ]
    found = structs(manifest)
    parts += [_reader(struct) for struct in found]
    parts += ["} // namespace frameshard_core\n"]
    parts += [_init(struct) for struct in found]
    return "\n".join(parts)


def _options_h(manifest: Manifest) -> str:
    declared = [f"json fields_of(const {struct.name} &given);" for struct in structs(manifest)]
    return "\n".join(
        [
            "/* Written by `make generate` from bindings/generated-manifest.json; do not edit. */",
            "#ifndef FRAMESHARD_OPTIONS_H",
            "#define FRAMESHARD_OPTIONS_H",
            "",
            '#include "codec.h"',
            '#include "frameshard.h"',
            "",
            "namespace frameshard_core {",
            "",
            "/* The protocol's fields for a struct, without defaults. Throws on a value that is out of range. */",
            *declared,
            "",
            "} // namespace frameshard_core",
            "",
            "#endif",
            "",
        ]
    )


def _init(struct: Struct) -> str:
    lines = [f"void {struct.name}_init({struct.name} *options, uint32_t struct_size) {{"]
    lines += [f"    {struct.name} defaults{{}};", "    defaults.struct_size = struct_size;"]
    for member in members(struct):
        if member.field is not None and (value := _initial(member.field)):
            lines.append(f"    defaults.{member.name} = {value};")
    return "\n".join([*lines, "    frameshard_core::fill(options, struct_size, defaults);", "}\n"])


def _initial(field: dict[str, Any]) -> str:
    """The default as a C value; "" for 0 and NULL."""
    if field["type"] == "int" and field.get("nullable"):
        return "-1"
    if field["type"] in ("int", "number") and field.get("default"):
        return figure(field["default"])
    if _is_number(field):
        return ENUMS[field["name_of_words"]] + str(field["default"]).upper()
    return ""


def _reader(struct: Struct) -> str:
    """Checks what the caller gave and makes a message of it, without fields that have their default."""
    lines = [f"json fields_of(const {struct.name} &given) {{", "    json fields = json::object();"]
    for member in members(struct):
        if member.field is not None:
            lines += _read(member)
    return "\n".join([*lines, "    return fields;", "}\n"])


def _read(member: Member) -> list[str]:
    name, field = member.name, member.field
    assert field is not None
    given, key = f"given.{name}", f'fields["{name}"]'
    if _is_number(field):
        words = f"k{field['name_of_words']}"
        return [
            f"    if ({given} != {_initial(field)}) {{",
            f'        {key} = word_of("{name}", {given}, {words});',
            "    }",
        ]
    if field["type"] in ("int", "number", "bool") and "default" not in field:
        return [_checked(name, field), f"    {key} = {given};"]
    if field["type"] in ("int", "number", "bool"):
        unset = figure(field.get("default") or 0) if not field.get("nullable") else "-1"
        check = "    " + _checked(name, field)
        return [f"    if ({given} != {unset}) {{", check, f"        {key} = {given};", "    }"]
    if field["type"] == "text" and "default" not in field:
        return [f'    {key} = text_of("{name}", {given}, {field["min"]}, {field["max"]});']
    if field["type"] == "text":
        least, most = field["min"], field["max"]
        return [
            f"    if ({given} != nullptr) {{",
            f'        {key} = text_of("{name}", {given}, {least}, {most});',
            "    }",
        ]
    if field["type"] == "word":
        words = ", ".join(f'"{word}"' for word in field["words"])
        return [
            f"    if ({given} != nullptr) {{",
            f'        {key} = word_of("{name}", {given}, {{{words}}});',
            "    }",
        ]
    item = field["items"]
    if "record" in item:
        return [
            f"    if (given.n_{name} != 0) {{",
            f'        {key} = records_of("{name}", {given}, given.n_{name}, {field["max"]});',
            "    }",
        ]
    bounds = f"{field['max']}, {item['min']}, {item['max']}"
    read = f'        {key} = texts_of("{name}", {given}, given.n_{name}, {bounds});'
    if len(read) > LINE:
        read = read.replace(" = ", " =\n            ", 1)
    return [f"    if (given.n_{name} != 0) {{", read, "    }"]


def _checked(name: str, field: dict[str, Any]) -> str:
    return f'    check_range("{name}", double(given.{name}), {figure(field["min"])}, {figure(field["max"])});'


def _words_h(manifest: Manifest) -> str:
    lines = [
        "/* Written by `make generate` from bindings/generated-manifest.json; do not edit. */",
        "#ifndef FRAMESHARD_WORDS_H",
        "#define FRAMESHARD_WORDS_H",
        "",
        "namespace frameshard_core {",
        "",
        "/* The protocol's words. Word 0 of a list has the number 1 in frameshard.h, and so on. */",
        "// clang-format off",
    ]
    for name, known in numbers(manifest).items():
        words = ", ".join(f'"{word}"' for word in known)
        lines += textwrap.wrap(f"constexpr const char *k{name}[] = {{{words}}};", LINE, subsequent_indent="    ")
    return "\n".join([*lines, "// clang-format on", "", "} // namespace frameshard_core", "", "#endif", ""])


# ---- what answers have, for the codec -------------------------------------------------------------------------------


def _tables(manifest: Manifest) -> str:
    messages = {**manifest["answers"], **manifest["events"], **manifest["unasked"]}
    used = {field["record"] for message in messages.values() for field in _flat(message["fields"]) if "record" in field}
    lines = ["// clang-format off"]
    for name, record in manifest["records"].items():
        if name in used:
            lines += [f"const Table k{name} = {{", *_rows(record["fields"], 1), "};"]
    lines += ["", "const std::vector<Message> &messages() {", "    static const std::vector<Message> all = {"]
    for name, message in messages.items():
        lines += [f'        {{"{name}", {{', *_rows(message["fields"], 3), "        }},"]
    return "\n".join([*lines, "    };", "    return all;", "}", "// clang-format on"])


def _flat(fields: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for field in fields:
        yield field["items"] if field["type"] == "array" else field


def _rows(fields: list[dict[str, Any]], indent: int) -> Iterator[str]:
    for field in fields:
        kind, least, most, record = _type(field)
        nullable = "true" if field.get("nullable") else "false"
        fallback = json.dumps(json.dumps(field["default"])) if "default" in field else "nullptr"
        values = [f'"{field["name"]}"', f"Type::{kind}", least, most, record, nullable, fallback]
        unset = [None, None, "0", "0", "nullptr", "false", "nullptr"]
        while values[-1] == unset[len(values) - 1]:
            values.pop()
        yield "    " * indent + "{" + ", ".join(values) + "},"


def _type(field: dict[str, Any]) -> tuple[str, str, str, str]:
    """Type, bounds and record of a field in the codec's tables."""
    kind = field["type"]
    if kind == "array":
        item = field["items"]
        kinds = {"record": "Records", "text": "Texts", "pair": "Counts"}
        record = f"&k{item['record']}" if "record" in item else "nullptr"
        return kinds[item["type"]], "0", figure(field["max"]), record
    if kind == "record":
        return "Record", "0", "0", f"&k{field['record']}"
    if kind in ("int", "number", "text"):
        most = "kMost" if field["max"] == 2**53 - 1 else figure(field["max"])
        return kind.capitalize(), figure(field["min"]), most, "nullptr"
    return kind.capitalize(), "0", "0", "nullptr"
