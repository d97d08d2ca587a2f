"""Turns the form of an answer into a grammar for llguidance. This is the worker of a :mod:`frameshard.confined`
process, because llguidance does not limit the time and memory of every form: an intersection of many patterns or a
large ``multipleOf`` can take very much.

A request is ``{"form", "text"}``. The form is ``json_schema``, ``choices`` (the text is a JSON list of strings),
``regex``, ``lark`` or ``tools`` (the text is JSON: see :class:`_Calls`). The answer is ``{"grammar"}``, or
``{"error", "reason"}`` with the error ``refused``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
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
# bytes of a text. It stands behind the grammar, so that the lines in errors are those of the client's text.
_OPTIONS_LINE = '\n%llguidance {"no_forcing": true}\n'

_SLASH = re.compile(r"\\.|/", re.DOTALL)  # finds a slash, and skips characters that are already escaped
_LONE_BACKSLASH = re.compile(r"(?:[^\\]|\\[^\n])*\\(?:\n|\Z)")  # llguidance names only a place in our grammar
_OPTIONS = re.compile(r"^\s*%llguidance", re.MULTILINE)

_OURS = re.compile(r"(\n *\d+ \| *)*\n *\d+ \| %llguidance .*", re.DOTALL)  # the options in an error
_PLACE = re.compile(r"\Aat \d+\(\d+\): |\n *\d+ \| .*", re.DOTALL)  # the line and the text of an error in a grammar
_OF_TOKENS = re.compile(r"at \d+\(\d+\): (unknown special token|Token range)")

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
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_INT64 = range(-(2**63), 2**63)

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
            case "tools":
                return self._tools(json.loads(text))
            case "regex":
                if _LONE_BACKSLASH.match(text):
                    why = "a backslash at the end or before a line break escapes nothing"
                    return _refused(f"{why}: write \\\\ for a backslash, \\n for a line break")
                escaped = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], text)
                checked = self._checked(f"start: /{escaped}/")
                return _refused(_PLACE.sub("", checked["reason"])) if "reason" in checked else checked
            case _:
                return _refused("it sets options of llguidance") if _OPTIONS.search(text) else self._checked(text)

    def _checked(self, lark: str) -> dict[str, str]:
        grammar = lark + _OPTIONS_LINE
        reason = self._refusal(grammar)
        return _refused(reason) if reason else {"grammar": grammar}

    def _schema(self, text: str) -> dict[str, str]:
        schema, reason = self._closed_schema(text)
        return _refused(reason) if reason else {"grammar": f"start: %json {json.dumps(schema)}{_OPTIONS_LINE}"}

    def _tools(self, spec: Mapping[str, Any]) -> dict[str, str]:
        schemas: list[Schema] = []
        for name, text in spec["tools"]:
            schema, reason = self._closed_schema(text)
            if reason:
                return _refused(f"the schema of {name!r}: {reason}")
            schemas.append(schema)
        # The tokens of this process are bytes, so marks are checked as texts.
        refusal = self._refusal(_Calls(spec, schemas, mark_tokens=False).lark() + _OPTIONS_LINE)
        if refusal:
            return _refused(refusal)
        return {"grammar": _Calls(spec, schemas, mark_tokens=True).lark() + _OPTIONS_LINE}

    def _closed_schema(self, text: str) -> tuple[Schema, str]:
        """Returns the schema of a text as llguidance takes it, and the reason why it cannot be used, or ""."""
        try:
            schema = json.loads(text)
            if not isinstance(schema, dict):
                return {}, "a schema is an object"
            _close_objects(schema)
            for where, number in _inexact(schema, "#"):
                return {}, f"at {where}: {number} would be rounded: take a smaller number, or a string"
            schema["x-guidance"] = _LAYOUT
            if reason := self._schema_refusal(schema):
                until = time.process_time() + _PLACE_S
                return {}, f"at {self._place(reason, schema, schema, '#', until)}: {reason}"
        except ValueError as error:
            return {}, f"not JSON: {error}"
        except RecursionError:
            return {}, "too deep"
        return schema, ""

    def _schema_refusal(self, schema: Schema) -> str:
        return self._refusal(LLMatcher.grammar_from_json_schema(json.dumps(schema)))

    def _refusal(self, grammar: str) -> str:
        """Returns the reason why the grammar cannot be used, or "" if it can."""
        matcher = LLMatcher(self._bytes, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
        error = _OURS.sub("", matcher.get_error().removesuffix("<non-verbose/>")).strip()
        if _OF_TOKENS.match(error):  # of this process, which are not the model's
            return "a grammar describes text: it cannot name tokens, such as <|im_end|> or <[2]>"
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


class _Calls:
    """The grammar of an answer that may call tools.

    :param spec: ``tools``, pairs of a name and a schema; ``choice``; ``max_calls``; ``trigger``, the text at which a
        call begins; and ``syntax``: ``trigger``, ``begin`` (what follows the trigger), ``between``, ``join`` and
        ``end``, each in parts: a text, and the id of its token if it is a mark, else null.
    :param schemas: those of the tools.
    :param mark_tokens: marks are tokens; otherwise they are written out.
    """

    def __init__(self, spec: Mapping[str, Any], schemas: Sequence[Schema], *, mark_tokens: bool) -> None:
        self._spec = spec
        self._schemas = schemas

        def term(text: str, token: int | None) -> str:
            return f"<[{token}]>" if mark_tokens and token is not None else json.dumps(text)

        self._syntax = {name: " ".join(term(*part) for part in parts) for name, parts in spec["syntax"].items()}

    def lark(self) -> str:
        """The grammar."""
        spec, syntax = self._spec, self._syntax
        if spec["choice"] == "none":
            trigger = "".join(map(_plain, spec["trigger"]))
            return f"start: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{trigger}(.|\\n)*/\n"
        if spec["choice"] == "auto":
            # A lazy rule ends with the first trigger: the text before a call has none.
            marked = f" | TEXT? {syntax['trigger']}" if syntax["trigger"].startswith("<") else ""
            lines = [f"start: TEXT | (written{marked}) calls", "TEXT: /(.|\\n)*/"]
            lines.append(f"written[lazy]: TEXT {json.dumps(spec['trigger'])}")
        else:
            lines = [f"start: {syntax['trigger']} calls"]
        more = f" ({syntax['join']} call)~0..{spec['max_calls'] - 1}" if syntax["join"] else ""
        lines.append(f"calls: {syntax['begin']} call{more} {syntax['end']}")
        called = [i for i, (name, _) in enumerate(spec["tools"]) if spec["choice"] in ("auto", "required", name)]
        lines.append("call: " + " | ".join(f"call_{i}" for i in called))
        for i in called:
            name, schema = json.dumps(spec["tools"][i][0]), json.dumps(self._schemas[i])
            lines.append(f"call_{i}: {name} {syntax['between']} %json {schema}")
        return "\n".join(lines) + "\n"


def _plain(char: str) -> str:
    """A regular expression for one character."""
    return f"\\x{{{ord(char):x}}}"


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


def _inexact(schema: Schema, at: str) -> Iterator[tuple[str, int | float]]:
    """The numbers for which llguidance would take others, with their places: it has floats of 64 bits for all numbers,
    and limits the bounds of integers to 64 bits."""
    for name in ("const", "enum"):
        for number in _integers(schema.get(name)):
            if not _is_exact(number):
                yield f"{at}/{name}", number
    for name in (*_LOWER, *_UPPER):
        bound = schema.get(name)
        if not isinstance(bound, (int, float)):
            continue
        beyond = bound > _INT64[-1] if name in _LOWER else bound < _INT64[0]
        # The largest integer of 64 bits is a usual bound. It stays what it is for an integer.
        if beyond or (isinstance(bound, int) and bound in _INT64[:-1] and not _is_exact(bound)):
            yield f"{at}/{name}", bound
    for name, part in _parts(schema):
        if isinstance(part, dict):
            yield from _inexact(part, f"{at}/{name}")


def _integers(value: Any) -> Iterator[int]:
    """All integers in a JSON value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


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
