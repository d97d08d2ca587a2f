"""PROTOCOL.md: the tables of messages, records, launch options and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from files import BINDINGS, with_region
from manifest import Manifest

DOCUMENT = BINDINGS / "PROTOCOL.md"
MOST = 2**53 - 1

# Sections of the document, and what of the manifest their headings of the third level name.
SECTIONS = {
    "Requests": ("requests",),
    "Answers": ("answers", "unasked"),
    "Events of a job": ("events",),
    "Records": ("records",),
}


def generate(manifest: Manifest, made: dict[Path, str]) -> dict[Path, str]:
    content = DOCUMENT.read_text()
    for title, groups in SECTIONS.items():
        for group in groups:
            for name, message in manifest[group].items():
                content = _with_table(content, title, name, _table(message["fields"]))
    content = with_region(content, "launch options", _table(manifest["launch"]["fields"]))
    content = with_region(content, "connect file", _table(manifest["connect"]["fields"]))
    content = with_region(content, "errors", _errors(manifest))
    return {DOCUMENT: content}


def _with_table(content: str, title: str, name: str, table: str) -> str:
    """`content` with another first table under a heading."""
    section = re.search(rf"^## {re.escape(title)}\b.*?(?=^## |\Z)", content, re.M | re.S)
    if section is None:
        raise SystemExit(f"PROTOCOL.md has no heading `## {title}`")
    part = re.search(rf"^### {re.escape(name)}\n.*?(?=^### |\Z)", section[0], re.M | re.S)
    if part is None:
        raise SystemExit(f"PROTOCOL.md has no heading `### {name}` under `## {title}`")
    old = re.search(r"^\| field \|.*?\n(?!\|)", part[0] + "\n", re.M | re.S)
    if old is None:
        raise SystemExit(f"PROTOCOL.md has no table under `### {name}`: put `| field |` where it shall stand")
    begin = section.start() + part.start() + old.start()
    end = min(section.start() + part.start() + old.end(), len(content))
    return content[:begin] + table + content[end:]


def _table(fields: list[dict[str, Any]]) -> str:
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        cells = (f"`{field['name']}`", f"`{notation(field)}`{_unit(field)}", _default(field), _escaped(field["text"]))
        lines.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return "\n".join(lines) + "\n"


def _errors(manifest: Manifest) -> str:
    lines = ["| code | name | retriable | meaning |", "| --- | --- | --- | --- |"]
    for error in manifest["errors"]:
        retriable = "yes" if error["retriable"] else "no"
        lines.append(f"| {error['code']} | `{error['name']}` | {retriable} | {_escaped(error['about'])} |")
    return "\n".join(lines) + "\n"


def notation(field: dict[str, Any]) -> str:
    """A type as the section "Types" of the document writes it."""
    kind = field["type"]
    if kind == "int":
        text = {(1, MOST): "id", (0, MOST): "uint"}.get((field["min"], field["max"])) or _range("int", field)
    elif kind == "number":
        text = _range("number 0," if field.get("or_zero") else "number", field)
    elif kind in ("text", "bin"):
        text = _range(kind, field)
    elif kind == "word":
        text = " ".join(f'"{word}"' for word in field["words"])
    elif kind == "array":
        text = f"array {field['max']} of {notation(field['items'])}"
    elif kind == "pair":
        text = "pair " + " ".join(notation(item) for item in field["items"])
    else:
        text = field["record"] if kind == "record" else kind
    return text + (" or nil" if field.get("nullable") else "")


def _range(kind: str, field: dict[str, Any]) -> str:
    return f"{kind} {_figure(field['min'])}..{_figure(field['max'])}"


def _figure(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return ""
    value = field["default"]
    if "default_words" in field:
        return str(field["default_words"])
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        return _figure(value)
    return "nil" if value is None else str(value).lower()


def _unit(field: dict[str, Any]) -> str:
    """The unit, where the field's name does not end with it."""
    unit = field.get("unit", "")
    told = {"bytes": "_bytes", "s": ("_s", "seconds"), "tokens/s": "tokens_per_second", "tokens": "tokens"}
    return f", {unit}" if unit and not field["name"].endswith(told.get(unit, ())) else ""


def _escaped(text: str) -> str:
    """Markdown in which nothing ends a cell or is taken for HTML."""
    return re.sub(r"<\|\w+\|>", lambda found: "`" + found[0] + "`", text).replace("|", "\\|")
