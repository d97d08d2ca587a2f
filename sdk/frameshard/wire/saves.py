"""A saved conversation as bytes. All bindings read and write this one format: bindings/PROTOCOL.md, "Saves".

A save comes from a player's disk, so nothing in it is trusted: sizes, checksum and every field are checked, and the
limits of frames bound what is allocated. The checksum finds damage, not forgery; a forged save is still only text.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

from frameshard.errors import BadMessage, BadSave
from frameshard.records import record
from frameshard.wire import checks, codec
from frameshard.wire import messages as m
from frameshard.wire.checks import Count, Text

FORMAT = 2
"""Of a save with steps. One without them has format 1, so that an older version reads it."""

MAX_BYTES = codec.CLIENT.frame


class Exchange(NamedTuple):
    """A question and its answer.

    :param steps: the messages between them: calls of tools, and their results.
    """

    question: str
    answer: str
    steps: tuple[m.ChatMessage, ...] = ()

    @property
    def waiting(self) -> bool:
        """It ends with calls that have no results yet."""
        return bool(self.steps and self.steps[-1].tool_calls)

    def messages(self) -> tuple[m.ChatMessage, ...]:
        answer = (m.ChatMessage("assistant", self.answer),) if self.answer or not self.steps else ()
        return (m.ChatMessage("user", self.question), *self.steps, *answer)

    @property
    def n_bytes(self) -> int:
        """Of a frame, at most."""
        calls = [call for step in self.steps for call in step.tool_calls]
        texts = [
            self.question,
            self.answer,
            *(text for step in self.steps for text in (step.content, step.tool_call_id)),
        ]
        texts += [text for call in calls for text in (call.id, call.name, call.arguments)]
        n_records = 1 + len(self.steps) + len(calls)
        return sum(len(text.encode(errors="replace")) for text in texts) + _RECORD_BYTES * n_records


_MAGIC = b"FSSV"
_HEAD = struct.Struct("<4sI")  # magic, format; the checksum follows
_CHECKSUM = struct.Struct("<I")
_START = _HEAD.size + _CHECKSUM.size

_MAX_MESSAGES = 1020  # of a history
_MAX_PROMPT_MESSAGES = codec.CLIENT.array - 1  # beside the system message
_MAX_TEXT_BYTES = codec.CLIENT.frame - 2 * codec.CLIENT.string
_RECORD_BYTES = 64  # of a frame, for names and lengths around the texts of an exchange, a step or a call


@record
class Step:
    """A message between a question and its answer. Fields are written in this order."""

    content: Annotated[Text, "`content` of the message."]
    exchange: Annotated[Count, "Number of the exchange, from 0."]
    role: Annotated[m.Role, "`assistant` for calls, `tool` for a result."]
    tool_call_id: Annotated[str, checks.text(64), "As in ChatMessage."]
    tool_calls: Annotated[
        tuple[m.ToolCall, ...], m.MAX_CALLS, "As in ChatMessage, with its fields in alphabetical order."
    ]


@record
class Save:
    """The content of a save. Fields are written in this order."""

    exchanges: Annotated[tuple[tuple[Text, Text], ...], "Each question and its answer, oldest first."]
    model: Annotated[str, checks.text(64), "`fingerprint` of ModelInfo."]
    steps: Annotated[
        tuple[Step, ...], "Calls of tools and their results, oldest first; only in format 2, and there at least one."
    ]
    system: Annotated[Text, "The system text; empty: none."]
    template: Annotated[str, checks.text(64), "`template_fingerprint` of ModelInfo."]
    writer: Annotated[str, checks.text(64), "Name of the client that wrote the save."]


def save_of(exchanges: Sequence[Exchange], system: str, model: str, template: str, writer: str) -> Save:
    """The save of a conversation."""
    steps = tuple(
        Step(step.content, number, step.role, step.tool_call_id, step.tool_calls)
        for number, exchange in enumerate(exchanges)
        for step in exchange.steps
    )
    pairs = tuple((exchange.question, exchange.answer) for exchange in exchanges)
    return Save(pairs, model, steps, system, template, writer)


def exchanges_of(save: Save) -> tuple[Exchange, ...]:
    """The exchanges of a save."""
    steps: list[list[m.ChatMessage]] = [[] for _ in save.exchanges]
    for step in save.steps:
        steps[step.exchange].append(m.ChatMessage(step.role, step.content, step.tool_calls, step.tool_call_id))
    return tuple(Exchange(*pair, tuple(between)) for pair, between in zip(save.exchanges, steps, strict=True))


def write(save: Save) -> bytes:
    """Returns the bytes of a save."""
    fields = _sorted(asdict(save))
    if not save.steps:
        del fields["steps"]
    body = codec.encode(fields)
    head = _HEAD.pack(_MAGIC, FORMAT if save.steps else 1)
    return head + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))) + body


def _sorted(value: Any) -> Any:
    """The value with the keys of its maps in alphabetical order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, (list, tuple)) else value


def read(data: bytes) -> Save:
    """Reads a save. The data may be any bytes.

    :raises BadSave: it is no save, it is damaged or too large, or its format is newer.
    """
    if len(data) > MAX_BYTES:
        raise BadSave(f"the save has {len(data)} bytes, and at most {MAX_BYTES} are possible")
    if len(data) < _START or not data.startswith(_MAGIC):
        raise BadSave("these bytes are no saved conversation")
    body = data[_START:]
    (checksum,) = _CHECKSUM.unpack_from(data, _HEAD.size)
    if checksum != zlib.crc32(body, zlib.crc32(data[: _HEAD.size])):
        raise BadSave("the save is damaged: its checksum is wrong")
    _, number = _HEAD.unpack_from(data)
    if not 1 <= number <= FORMAT:
        raise BadSave(f"the save has format {number}, this version reads formats 1 to {FORMAT}: update frameshard")
    try:
        fields = codec.decode(body)
        save: Save = checks.convert(Save, {"steps": (), **fields} if number == 1 else fields)
        if (number == 1) == bool(save.steps) or any(step.exchange >= len(save.exchanges) for step in save.steps):
            raise BadMessage("its steps are wrong")
    except (BadMessage, checks.Refused) as error:
        raise BadSave(f"the save is damaged: {error}") from None
    return save


def newest(exchanges: Sequence[Exchange], other_bytes: int, other_messages: int = 0) -> tuple[Exchange, ...]:
    """Returns the newest exchanges that fit into one frame beside `other_bytes` of texts and options, and beside a
    system message and `other_messages`."""
    first, n_bytes, n_messages = len(exchanges), other_bytes, 0
    most = min(_MAX_MESSAGES, _MAX_PROMPT_MESSAGES - other_messages)
    while first > 0:
        n_bytes += exchanges[first - 1].n_bytes
        n_messages += 2 + len(exchanges[first - 1].steps)
        if n_bytes > _MAX_TEXT_BYTES or n_messages > most:
            break
        first -= 1
    return tuple(exchanges[first:])
