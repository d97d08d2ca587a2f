"""Turns the form of an answer into a grammar for llguidance. This is the worker of a :mod:`frameshard.engine.confined`
process, because llguidance does not limit the time and memory of every form: an intersection of many patterns or a
large ``multipleOf`` can take very much.

A request is ``{"form", "text"}``. The form is ``json_schema``, ``choices`` (the text is a JSON list of strings),
``regex`` or ``lark``. The answer is ``{"grammar"}``, or ``{"error", "reason"}`` with the error ``refused``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY_BYTES = 256 << 20
"""The limit on the address space of the process, which takes 30 MiB without a form."""

CPU_S = 0.5
"""The limit on the CPU time of one form. An ordinary one takes 1 ms, an ``enum`` of 6,000 values 30 ms."""

# JSON may have one space after a comma or a colon, and none elsewhere. Otherwise a small model may fill its answer with
# white space.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}

# Turns off forced text. llguidance would have to tokenise it with the model's tokenizer, and some tokenizers change the
# bytes of a text.
_HEAD = '%llguidance {"no_forcing": true}\n'

_SLASH = re.compile(r"\\.|/", re.DOTALL)  # finds a slash, and skips characters that are already escaped
_OPTIONS = re.compile(r"^\s*%llguidance", re.MULTILINE)

_PLACE_S = 0.1  # the limit on the time to find the part of a schema that is wrong
_MAX_REASON_CHARS = 500
_ONE_OF = "oneOf is understood only where no value can fit two of its schemas: use anyOf"
# The keywords under which a schema has further schemas: one, a list, or a map of them.
_SINGLE = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COMBINED = {"$ref", "anyOf", "oneOf"}
_OPENING = {"additionalProperties", "patternProperties", "minProperties"}
_OF_OBJECTS = {"properties", "required", *_OPENING}

Schema = Mapping[str, Any]


class Worker:
    """Checks forms without the model's vocabulary: its tokens are the bytes."""

    def __init__(self) -> None:
        self._bytes = LLTokenizer("byte")
        self._limits = LLParserLimits(verbose_errors=False)

    def answer(self, request: Mapping[str, str]) -> dict[str, str]:
        """Answers one request."""
        text = request["text"]
        match request["form"]:
            case "json_schema":
                return self._schema(text)
            case "choices":
                return self._checked("start: " + " | ".join(map(json.dumps, json.loads(text))))
            case "regex":
                escaped = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], text)
                return self._checked(f"start: /{escaped}/")
            case _:
                return _refused("it sets options of llguidance") if _OPTIONS.search(text) else self._checked(text)

    def _checked(self, lark: str) -> dict[str, str]:
        grammar = _HEAD + lark
        reason = self._refusal(grammar)
        return _refused(reason) if reason else {"grammar": grammar}

    def _schema(self, text: str) -> dict[str, str]:
        try:
            return self._closed_schema(json.loads(text))
        except ValueError as error:
            return _refused(f"not JSON: {error}")
        except RecursionError:
            return _refused("too deep")

    def _closed_schema(self, schema: Any) -> dict[str, str]:
        if not isinstance(schema, dict):
            return _refused("a schema is an object")
        _close_objects(schema)
        schema["x-guidance"] = _LAYOUT
        reason = self._schema_refusal(schema)
        if reason:
            return _refused(f"at {self._place(reason, schema, schema, '#', time.process_time() + _PLACE_S)}: {reason}")
        return {"grammar": _HEAD + "start: %json " + json.dumps(schema)}

    def _schema_refusal(self, schema: Schema) -> str:
        return self._refusal(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    def _refusal(self, grammar: str) -> str:
        """Returns the reason why the grammar cannot be used, or "" if it can."""
        matcher = LLMatcher(self._bytes, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
        error = matcher.get_error().removesuffix("<non-verbose/>").strip()
        if error.startswith("NoExtension"):
            return "nothing fits it"
        return _ONE_OF if error.startswith("oneOf constraints") else error

    def _place(self, reason: str, root: Schema, schema: Schema, at: str, until: float) -> str:
        """Returns the JSON pointer of the smallest part of the schema that is refused for the same reason."""
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        for name, part in _parts(schema):
            if time.process_time() > until:
                break
            if isinstance(part, dict) and self._schema_refusal({**shared, **part}) == reason:
                return self._place(reason, root, part, f"{at}/{name}", until)
        return at


def _close_objects(schema: dict[str, Any]) -> None:
    """Forbids properties that the schema does not name, unless it says otherwise: a small model would add its own. A
    schema is not changed if several of its parts may apply to one object."""
    parts = list(_all_parts(schema))
    for part in parts:
        combined = part.keys() & _COMBINED
        if "allOf" in part or len(combined) > 1 or (combined and part.keys() & _OF_OBJECTS):
            return
    for part in parts:
        named, required = part.get("properties"), part.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list):
            continue
        if not part.keys() & _OPENING and all(name in named for name in required if isinstance(name, str)):
            part["additionalProperties"] = False


def _all_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for _, part in _parts(schema):
        if isinstance(part, dict):
            yield from _all_parts(part)


def _refused(reason: str) -> dict[str, str]:
    return {"error": "refused", "reason": reason[:_MAX_REASON_CHARS]}


def _parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    for name in _SINGLE:
        if name in schema:
            yield name, schema[name]
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            yield from ((f"{name}/{i}", part) for i, part in enumerate(schema[name]))
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                yield f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part
