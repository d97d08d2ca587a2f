"""frameshard.lua: frameshard.h after the preprocessor without its comments, the protocol's words, and the options.

It reads the header as for_c.py has just made it, so it comes after that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import for_c
from files import BINDINGS, with_region
from manifest import Manifest

LUA = BINDINGS / "lua" / "frameshard.lua"

# How the module calls its lists of words.
WORDS = {
    "Decision": "DECISIONS",
    "EngineState": "ENGINE_STATES",
    "ImageFormat": "IMAGE_FORMATS",
    "LeaseState": "LEASE_STATES",
    "LoadingStage": "LOADING_STAGES",
    "NoticeKind": "NOTICES",
    "Phase": "PHASES",
    "Reason": "REASONS",
    "SchedulingMode": "SCHEDULING_MODES",
}
# People set these in MiB.
SIZES = {
    "vram_budget_bytes": "vram_budget_mb",
    "floor_bytes": "floor_mb",
    "kv_cache_bytes": "kv_cache_mb",
    "host_budget_bytes": "host_budget_mb",
}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    content = with_region(LUA.read_text(), "declarations", f"ffi.cdef([[\n{declarations(made)}\n]])")
    content = with_region(content, "words", "\n".join(_words(manifest)))
    return {LUA: with_region(content, "options", "\n".join(_options(manifest)))}


def _words(manifest: Manifest) -> Iterator[str]:
    for name, numbers in for_c.numbers(manifest).items():
        words = ", ".join(f'"{word}"' for word in numbers)
        yield from textwrap.wrap(f"local {WORDS[name]} = {{ {words} }}", 120, subsequent_indent="  ")


def _options(manifest: Manifest) -> Iterator[str]:
    yield "local OPTIONS = {"
    for struct in for_c.structs(manifest):
        yield f"  {struct.name} = {{"
        for member in for_c.members(struct):
            field = member.field
            if field is None and member not in struct.own:
                continue  # struct_size and counts
            text = member.text if field is None else _text(field)
            yield from (f"    -- {line}" for line in textwrap.wrap(text, 113))
            yield f"    {SIZES.get(member.name, member.name)} = {{ {_kind(member)} }},"
        yield "  },"
    yield "}"


def _text(field: dict[str, Any]) -> str:
    text: str = field["text"].rstrip(".")
    default = field.get("default")
    if field["name"] in SIZES:
        text += ". In MiB"
        default = default and default >> 20
    elif field["type"] == "word":
        text += f". One of {', '.join(field['words'])}"
    return f"{text}. Default {default}." if default else f"{text}."


def _kind(member: for_c.Member) -> str:
    """How an option is checked: its kind, then the member of the struct, the bounds or the words."""
    field = member.field
    if member.name in SIZES:
        return f'"mebibytes", "{member.name}"'
    if (
        field is None
        or field["type"] == "text"
        or (field["type"] == "word" and field.get("name_of_words") not in WORDS)
    ):
        return '"text"'
    if field["type"] == "word":
        return f'"word", {WORDS[field["name_of_words"]]}'
    if field["type"] == "array":
        return '"biases"' if "record" in field["items"] else '"texts"'
    kind = "integer" if field["type"] == "int" else "number"
    return f'"{kind}", {for_c.figure(0 if field.get("or_zero") else field["min"])}, {for_c.figure(field["max"])}'


def declarations(made: dict[Path, str]) -> str:
    """The header's declarations: members of structs in a line each, all else in lines of at most 120 characters."""
    header = made[BINDINGS / "c" / "include" / "frameshard.h"]
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace('extern "C" {', "").replace("FS_API ", "")
    lines = []
    for statement in re.findall(r"[^;{}]+(?:\{[^}]*\}[^;{}]*)?;", text):
        plain = " ".join(statement.split())
        if "struct" in plain and "{" in plain:
            head, body, tail = re.split(r" ?[{}] ?", plain)
            lines += [f"{head} {{", *(f"  {member.strip()};" for member in body.split(";") if member.strip())]
            lines.append(f"}} {tail}")
        else:
            kept = re.sub(r" (?==)|(?<==) | (?=[*}])", "\xa0", plain)  # no line ends before or after these
            lines += [line.replace("\xa0", " ") for line in textwrap.wrap(kept, 120, subsequent_indent="  ")]
    return "\n".join(lines)
