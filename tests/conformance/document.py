"""A validator made only from bindings/PROTOCOL.md. It does not import frameshard.

It parses the tables of the document. For the rules of frames it has a small msgpack reader.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINDINGS = Path(__file__).parents[2] / "bindings"
DOCUMENT = (BINDINGS / "PROTOCOL.md").read_text()
MAX_INT = 2**53 - 1

Check = Callable[[Any], bool]


class Malformed(Exception):
    """A frame that breaks the rules of the document."""


# ---- frames ---------------------------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.at = 0
        self.elements = 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.frame):
            raise Malformed("cut off")
        self.at += count
        return self.frame[self.at - count : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(f">{form}", self.take(struct.calcsize(f">{form}")))[0]

    def value(self, depth: int) -> Any:
        head = self.number("B")
        if head <= 0x7F:
            return head
        if head <= 0x8F:
            return self.map(head & 15, depth)
        if head <= 0x9F:
            return self.array(head & 15, depth)
        if head <= 0xBF:
            return self.text(head & 31)
        if head >= 0xE0:
            return head - 256
        simple = {0xC0: None, 0xC2: False, 0xC3: True}
        if head in simple:
            return simple[head]
        if head in (0xC4, 0xC5, 0xC6):
            size = self.number("BHI"[head - 0xC4])
            return self.take(size) if size <= 1 << 20 else self.refuse("a long binary")
        if head in (0xCA, 0xCB):
            value = self.number("fd"[head - 0xCA])
            return value if math.isfinite(value) else self.refuse("not finite")
        if 0xCC <= head <= 0xD3:
            value = self.number("BHIQbhiq"[head - 0xCC])
            return value if -MAX_INT <= value <= MAX_INT else self.refuse("a large integer")
        if head in (0xD9, 0xDA, 0xDB):
            return self.text(self.number("BHI"[head - 0xD9]))
        if head in (0xDC, 0xDD):
            return self.array(self.number("HI"[head - 0xDC]), depth)
        if head in (0xDE, 0xDF):
            return self.map(self.number("HI"[head - 0xDE]), depth)
        return self.refuse(f"type {head:#x}")

    def refuse(self, why: str) -> Any:
        raise Malformed(why)

    def text(self, size: int) -> str:
        if size > 1 << 16:
            raise Malformed("a long string")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise Malformed("not UTF-8") from None

    def count(self, count: int, limit: int, depth: int) -> None:
        self.elements += count
        if count > limit or self.elements > 1 << 14 or depth > 8:
            raise Malformed("too many elements or too deep")

    def array(self, count: int, depth: int) -> list[Any]:
        self.count(count, 1024, depth)
        return [self.value(depth + 1) for _ in range(count)]

    def map(self, count: int, depth: int) -> dict[str, Any]:
        self.count(count, 64, depth)
        result: dict[str, Any] = {}
        for _ in range(count):
            key = self.value(depth + 1)
            if not isinstance(key, str) or key in result:
                raise Malformed("a key that is no string, or is there twice")
            result[key] = self.value(depth + 1)
        return result


def read(frame: bytes) -> dict[str, Any]:
    """The map in a frame.

    :raises Malformed: the frame breaks the rules.
    """
    if len(frame) > 1 << 20:
        raise Malformed("too long")
    reader = _Reader(frame)
    value = reader.value(1)
    if not isinstance(value, dict) or reader.at != len(frame):
        raise Malformed("not one map")
    return value


# ---- messages -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    name: str
    type: str
    required: bool


def _sections(title: str) -> dict[str, tuple[Field, ...]]:
    """The tables of fields under a heading of the document, by name."""
    part = re.search(rf"^## {re.escape(title)}.*?(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert part is not None, title
    found = {}
    for name, body in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", part[0], re.MULTILINE | re.DOTALL):
        rows = re.findall(r"^\| `(\w+)` \| `([^|`]+)`(?:, [^|]*)? \| ([^|]*)\|", body, re.MULTILINE)
        found[name] = tuple(Field(field, kind, not default.strip()) for field, kind, default in rows)
    return found


REQUESTS = _sections("Requests")
ANSWERS = _sections("Answers") | _sections("Events of a job")
RECORDS = _sections("Records")
SAVE = _sections("Saves")["Save"]
RECORDS["Step"] = _sections("Saves")["Step"]


def _fits(fields: tuple[Field, ...], value: Any, strict: bool) -> bool:
    if not isinstance(value, dict):
        return False
    known = {field.name: field for field in fields}
    return (
        all(name in known for name in value if strict)
        and all(field.name in value for field in fields if field.required)
        and all(check(known[name].type, strict)(item) for name, item in value.items() if name in known)
    )


def check(notation: str, strict: bool) -> Check:
    """The check for a type of the document. Unless strict, it allows unknown words and fields of a newer sidecar."""
    if notation.endswith(" or nil"):
        inner = check(notation.removesuffix(" or nil"), strict)
        return lambda value: value is None or inner(value)
    word, _, rest = notation.partition(" ")
    if word == "id":
        return check(f"int 1..{MAX_INT}", strict)
    if word == "uint":
        return check(f"int 0..{MAX_INT}", strict)
    if word == "bool":
        return lambda value: isinstance(value, bool)
    if word == "map":
        return lambda value: isinstance(value, dict)
    if notation.startswith('"'):
        words = re.findall(r'"(\w+)"', notation)
        return lambda value: isinstance(value, str) and (value in words or (not strict and value != ""))
    if word == "pair":
        first, second = (check(item, strict) for item in re.findall(r"\w+(?: \d+\.\.\d+)?", rest))
        return lambda value: isinstance(value, list) and len(value) == 2 and first(value[0]) and second(value[1])
    if word == "array":
        limit, _, item = rest.partition(" of ")
        each = check(item, strict)
        return lambda value: isinstance(value, list) and len(value) <= int(limit) and all(map(each, value))
    if word in RECORDS:
        return lambda value: _fits(RECORDS[word], value, strict)
    if rest.startswith("0, "):
        other = check(f"{word} {rest[3:]}", strict)
        return lambda value: (value == 0 and not isinstance(value, bool)) or other(value)
    low, high = map(float, rest.split(".."))
    if word == "bin":
        return lambda value: isinstance(value, bytes) and low <= len(value) <= high
    if word == "text":
        return lambda value: isinstance(value, str) and low <= len(value.encode()) <= high
    kinds = {"int": (int,), "number": (int, float)}[word]
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def valid(direction: str, frame: bytes) -> bool:
    """Whether the document allows this frame from a ``client`` or a ``broker`` of this version."""
    try:
        message = read(frame)
    except Malformed:
        return False
    name = message.pop("t", None)
    table = {"client": REQUESTS, "broker": ANSWERS}[direction]
    if not isinstance(name, str) or name not in table or not _fits(table[name], message, True):
        return False
    if name == "submit":
        return _one_kind(message)
    if name == "count_tokens":
        chat = bool(message.get("messages"))
        return chat != bool(message.get("prompt")) and (chat or not message.get("tools"))
    if name == "embed":
        return bool(message["texts"])
    return True


def taken(frame: bytes) -> bool:
    """Whether a client accepts this frame from a sidecar of this version or a newer one."""
    try:
        message = read(frame)
    except Malformed:
        return False
    name = message.pop("t", None)
    return isinstance(name, str) and (name not in ANSWERS or _fits(ANSWERS[name], message, False))


def known(frame: bytes) -> dict[str, Any]:
    """The part of an accepted frame that a client keeps."""
    message = read(frame)
    if message["t"] in ANSWERS:
        return {"t": message.pop("t"), **_known(ANSWERS[str(read(frame)["t"])], message)}
    counted = {name: message[name] for name in ("job", "seq", "epoch") if name in message}
    return counted if len(counted) == 3 else {}


def _known(fields: tuple[Field, ...], value: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for field in fields:
        if field.name in value:
            record = RECORDS.get(field.type.removesuffix(" or nil").rpartition(" of ")[2])
            item = value[field.name]
            if record is not None and isinstance(item, list):
                item = [_known(record, each) for each in item]
            elif record is not None and item is not None:
                item = _known(record, item)
            kept[field.name] = item
    return kept


def save(data: bytes) -> dict[str, Any]:
    """The map in a saved conversation.

    :raises Malformed: the save breaks the rules.
    """
    if len(data) > 1 << 20 or len(data) < 12 or data[:4] != b"FSSV":
        raise Malformed("no save")
    if int.from_bytes(data[8:12], "little") != zlib.crc32(data[:8] + data[12:]):
        raise Malformed("damaged")
    if (number := int.from_bytes(data[4:8], "little")) not in (1, 2):
        raise Malformed("newer")
    fields = read(data[12:])
    steps = fields.get("steps", [])
    if not _fits(SAVE, fields, True) or (number == 2) != bool(steps):
        raise Malformed("wrong fields")
    if any(step["exchange"] >= len(fields["exchanges"]) for step in steps):
        raise Malformed("a step of no exchange")
    return fields


def _one_kind(submit: dict[str, Any]) -> bool:
    messages, prompt = bool(submit.get("messages")), bool(submit.get("prompt"))
    return (messages, prompt) == ((True, False) if submit["kind"] == "chat" else (False, True))
