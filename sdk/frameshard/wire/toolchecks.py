"""Checks of what a job asks for with tools: their names and schemas, and the calls and results in its messages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from frameshard.errors import BadArgument
from frameshard.wire import messages as m

CHOICES = ("auto", "required", "none")

CALL_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyz"
CALL_ID_LENGTH = 9
"""Ids of calls have this form because some chat templates take no other."""

MAX_DEPTH = 64
"""The most levels of the JSON in tools, calls and template keywords. Python and templates read it recursively, with
limited stacks."""

_NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A string, which may end with the text, or a bracket outside strings."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_id_of(text: str) -> str:
    """The id of a call that belongs to a text: the same for the same text."""
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    n_chars = len(CALL_ID_CHARS)
    return "".join(CALL_ID_CHARS[value // n_chars**i % n_chars] for i in range(CALL_ID_LENGTH))


def check(tools: Sequence[m.Tool], choice: str) -> None:
    """Checks the names of tools and the choice among them.

    :raises BadArgument: a name is invalid or there twice, or there is no such choice.
    """
    names = [tool.name for tool in tools]
    for name in names:
        if not _NAME.fullmatch(name) or name in CHOICES:
            raise BadArgument(
                f"tools: {name!r} is no name of a tool: take 1 to 64 letters, digits, '_' and '-', and not"
                f" {', '.join(CHOICES)}",
                field="tools",
            )
        if names.count(name) > 1:
            raise BadArgument(f"tools: {name!r} is there twice", field="tools")
    if not tools and choice != "auto":
        raise BadArgument("tool_choice: there are no tools", field="tool_choice")
    if choice not in (*CHOICES, *names):
        raise BadArgument(
            f"tool_choice: there is no tool {choice!r}: name one of the tools, or {', '.join(CHOICES)}",
            field="tool_choice",
        )


def too_deep(text: str) -> bool:
    """Whether a text of JSON, or the beginning of one, has more than :data:`MAX_DEPTH` levels."""
    depth = 0
    for found in _NESTING.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found[0], 0)
        if depth > MAX_DEPTH:
            return True
    return False


def schema_of(tool: m.Tool) -> dict[str, Any]:
    """The schema of a tool's arguments.

    :raises BadArgument: it is not the schema of an object, or too deep.
    """
    if too_deep(tool.schema):
        raise BadArgument(f"tools: the schema of {tool.name!r} has more than {MAX_DEPTH} levels", field="tools")
    try:
        schema = json.loads(tool.schema) if tool.schema else _NO_ARGUMENTS
    except ValueError as error:
        raise BadArgument(f"tools: the schema of {tool.name!r} is not JSON: {error}", field="tools") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise BadArgument(f"tools: the schema of {tool.name!r} is not that of an object", field="tools")
    return {"type": "object", **schema}


def check_message(message: m.ChatMessage, names: Mapping[str, str]) -> None:
    """Checks the calls or the result in a message.

    :param names: of the tools of the calls before it, by the calls' ids.
    :raises BadArgument: a call is invalid, or the call of a result is missing.
    """
    if message.tool_calls and message.role != "assistant":
        raise BadArgument("messages: only an assistant message has tool_calls", field="messages")
    if message.role != "tool" and message.tool_call_id:
        raise BadArgument("messages: only a tool message has a tool_call_id", field="messages")
    if message.role == "tool" and message.tool_call_id not in names:
        raise BadArgument(
            f"messages: no call before this tool message has the id {message.tool_call_id!r}", field="messages"
        )
    for call in message.tool_calls:
        if too_deep(call.arguments):
            raise BadArgument(
                f"messages: the arguments of the call {call.id!r} have more than {MAX_DEPTH} levels", field="messages"
            )
        try:
            valid = isinstance(json.loads(call.arguments, parse_int=str), dict)  # Python limits an int's digits
        except ValueError:
            valid = False
        if not valid or not _NAME.fullmatch(call.name):
            raise BadArgument(
                f"messages: the call {call.id!r} has no valid name, or its arguments are no JSON object",
                field="messages",
            )
