"""Checks the arguments of calls against JSON schemas. This is the worker of a :mod:`frameshard.confined` process: a
regular expression in a schema may take any time.

A request is ``{"calls"}``, a list of pairs: a schema, and the arguments as text. The answer is ``{}`` if all are valid,
else ``{"error"}``: ``invalid`` (arguments are no JSON object, or do not match), ``schema`` (a schema cannot be used) or
``out_of_memory``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jsonschema
import referencing
from jsonschema.validators import validator_for

MEMORY_BYTES = 256 << 20
"""The limit on the address space of the process, which takes 40 MiB without a schema."""

CPU_S = 1.0
"""The limit on the CPU time of one answer's calls. Ordinary ones take a few milliseconds."""

_NOTHING_ELSE: referencing.Registry[Any] = referencing.Registry()
"""Without it jsonschema would fetch what a `$ref` names."""


class Worker:
    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Answers one request."""
        try:
            for schema, text in request["calls"]:
                if error := _error(schema, text):
                    return {"error": error}
        except MemoryError:
            return {"error": "out_of_memory"}
        return {}


def _error(schema: Mapping[str, Any], text: str) -> str:
    try:
        arguments = json.loads(text, parse_constant=_refuse)
        json.dumps(arguments, ensure_ascii=False).encode()  # refuses half a surrogate pair
    except (ValueError, RecursionError):
        return "invalid"
    if not isinstance(arguments, dict):
        return "invalid"
    try:
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        return "" if kind(schema, registry=_NOTHING_ELSE).is_valid(arguments) else "invalid"
    except MemoryError:
        raise
    except Exception:  # such as a reference that leads nowhere or in circles
        return "schema"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
