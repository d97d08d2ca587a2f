"""The messages between the broker and its embedder process, on a stream of :mod:`frameshard.wire.channel`.

The process sends :class:`Loaded`, or :class:`Refused` and ends. After that it answers each :class:`Encode` with a
:class:`Row` or :class:`Refused`, in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from frameshard.errors import BadMessage
from frameshard.records import record
from frameshard.wire import channel, checks, codec
from frameshard.wire import messages as m
from frameshard.wire.checks import Count


@record
class Encode:
    """Asks for the embedding of a text."""

    text: m.EmbedText


@record
class Loaded:
    """The sentence encoder is loaded and has encoded a text."""

    n_dim: Count


@record
class Row:
    """The embedding: little-endian 16-bit floats of length 1, and how many tokens the text has."""

    row: Annotated[bytes, checks.binary(codec.CLIENT.binary)]
    n_tokens: Count


@record
class Refused:
    """The file cannot be used, or the text cannot be encoded."""

    error: m.ErrorInfo


Message = Encode | Loaded | Row | Refused

_TYPES: dict[str, type[Any]] = {"encode": Encode, "loaded": Loaded, "row": Row, "refused": Refused}
_NAMES = {cls: name for name, cls in _TYPES.items()}


def pack(message: Message) -> bytes:
    """Returns the bytes of `message` for the stream."""
    return channel.pack({"t": _NAMES[type(message)], **dataclasses.asdict(message)})


def read(fields: Mapping[str, Any]) -> Message:
    """Converts a map from the stream to a message.

    :raises BadMessage: the map is not a valid message.
    """
    name = fields.get("t")
    if not isinstance(name, str) or name not in _TYPES:
        raise BadMessage("t: unknown message")
    try:
        message: Message = checks.convert(_TYPES[name], {key: value for key, value in fields.items() if key != "t"})
    except checks.Refused as refused:
        raise BadMessage(f"{name}.{refused}") from None
    return message
