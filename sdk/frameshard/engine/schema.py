"""Answers of a given form: a grammar for llama.cpp from a JSON schema.

A schema comes from a client and becomes a program that the engine runs for each token, so only what is known to stay
small is taken: few keywords, bounded depth, size and repetition. Everything else is refused by name.
"""

from __future__ import annotations

import json
from typing import Any

from llama_cpp.llama_grammar import json_schema_to_gbnf

from frameshard.errors import BadArgument

MAX_BYTES = 4096
MAX_DEPTH = 6
MAX_ITEMS = 32
MAX_CHOICES = 64
MAX_PARTS = 128
_WORDS = {"$schema", "title", "description"}  # say nothing about the form
_KEYWORDS = {"type", "properties", "required", "items", "minItems", "maxItems", "enum", "const", "anyOf"}
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def grammar_of(schema: str) -> str:
    """The grammar of values that fit ``schema``. All properties of an object come in the order of their names there.

    :raises BadArgument: not JSON, too large, or more than this understands.
    """
    if len(schema.encode()) > MAX_BYTES:
        raise _refused(f"more than {MAX_BYTES} bytes")
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _refused(f"not JSON: {error}") from None
    _Check().take(value, 1)
    return str(json_schema_to_gbnf(schema, list(dict.fromkeys(_names(value)))))


class _Check:
    """Takes a schema apart; counts its parts."""

    def __init__(self) -> None:
        self._parts = 0

    def take(self, schema: Any, depth: int) -> None:
        self._parts += 1
        if not isinstance(schema, dict):
            raise _refused("a schema is an object")
        if depth > MAX_DEPTH or self._parts > MAX_PARTS:
            raise _refused(f"deeper than {MAX_DEPTH} or of more than {MAX_PARTS} parts")
        for word in schema.keys() - _WORDS - _KEYWORDS:
            raise _refused(f"{word} is not understood")
        if "enum" in schema and not (isinstance(schema["enum"], list) and 0 < len(schema["enum"]) <= MAX_CHOICES):
            raise _refused(f"enum has 1 to {MAX_CHOICES} values")
        if "type" in schema and schema["type"] not in _TYPES:
            raise _refused("type is one of " + ", ".join(sorted(_TYPES)))
        if not schema.keys() & {"type", "enum", "const", "anyOf"}:
            raise _refused("a part needs type, enum, const or anyOf")
        for word in ("minItems", "maxItems"):
            if word in schema and not (type(schema[word]) is int and 0 <= schema[word] <= MAX_ITEMS):
                raise _refused(f"{word} is from 0 to {MAX_ITEMS}")
        if schema.get("type") == "array" and "items" not in schema:
            raise _refused("an array needs items")
        parts = [schema["items"]] if "items" in schema else []
        properties, choices = schema.get("properties", {}), schema.get("anyOf", [])
        if not isinstance(properties, dict) or not isinstance(choices, list):
            raise _refused("properties is an object, anyOf an array")
        if schema.get("type") == "object" and set(schema.get("required", [])) != set(properties):
            raise _refused("an object needs properties, all of them required")
        for part in [*parts, *properties.values(), *choices]:
            self.take(part, depth + 1)


def _names(schema: Any) -> list[str]:
    """Names of all properties, in the order of the schema."""
    found = []
    for name, part in schema.get("properties", {}).items():
        found += [name, *_names(part)]
    for part in [*([schema["items"]] if "items" in schema else []), *schema.get("anyOf", [])]:
        found += _names(part)
    return found


def _refused(why: str) -> BadArgument:
    return BadArgument(f"json_schema: {why}", field="json_schema")
