"""A saved conversation as bytes. All bindings read and write this one format: bindings/PROTOCOL.md, "Saves".

A save comes from a player's disk, so nothing in it is trusted: sizes, checksum and every field are checked, and the
limits of frames bound what is allocated. The checksum finds damage, not forgery; a forged save is still only text.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from frameshard.errors import BadMessage, BadSave
from frameshard.wire import checks, codec
from frameshard.wire.checks import Text

FORMAT = 1

MAX_BYTES = codec.CLIENT.frame

Exchange = tuple[str, str]
"""A question and its answer."""

_MAGIC = b"FSSV"
_HEAD = struct.Struct("<4sI")  # magic, format; the checksum follows
_CHECKSUM = struct.Struct("<I")
_START = _HEAD.size + _CHECKSUM.size

_MAX_EXCHANGES = 510
_MAX_TEXT_BYTES = codec.CLIENT.frame - 2 * codec.CLIENT.string
_EXCHANGE_BYTES = 64  # of a frame, for names and lengths around the texts of one exchange


@dataclass(frozen=True)
class Save:
    """The content of a save. Fields are written in this order."""

    exchanges: Annotated[tuple[tuple[Text, Text], ...], "Each question and its answer, oldest first."]
    model: Annotated[str, checks.text(64), "`fingerprint` of ModelInfo."]
    system: Annotated[Text, "The system text; empty: none."]
    template: Annotated[str, checks.text(64), "`template_fingerprint` of ModelInfo."]
    writer: Annotated[str, checks.text(64), "Name of the client that wrote the save."]


def write(save: Save) -> bytes:
    """Returns the bytes of a save."""
    body = codec.encode({name: getattr(save, name) for name in checks.fields_of(Save)})
    head = _HEAD.pack(_MAGIC, FORMAT)
    return head + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))) + body


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
    if number != FORMAT:
        raise BadSave(f"the save has format {number}, this version reads format {FORMAT}: update frameshard")
    try:
        save: Save = checks.convert(Save, codec.decode(body))
    except (BadMessage, checks.Refused) as error:
        raise BadSave(f"the save is damaged: {error}") from None
    return save


def newest(exchanges: Sequence[Exchange], other_bytes: int) -> tuple[Exchange, ...]:
    """Returns the newest exchanges that fit into one message beside `other_bytes` of text."""
    first, n_bytes = len(exchanges), other_bytes
    while first > 0 and len(exchanges) - first < _MAX_EXCHANGES:
        n_bytes += sum(len(text.encode()) for text in exchanges[first - 1]) + _EXCHANGE_BYTES
        if n_bytes > _MAX_TEXT_BYTES:
            break
        first -= 1
    return tuple(exchanges[first:])
