"""Frames on the stream between broker and engine. Each is its length in 4 bytes, little-endian, and a msgpack map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from frameshard.errors import BadMessage
from frameshard.wire import codec

_HEADER = 4


def pack(message: dict[str, Any]) -> bytes:
    """Returns the bytes of one frame.

    :raises BadArgument: the message breaks a limit of the codec.
    """
    body = codec.encode(message, codec.ENGINE)
    return len(body).to_bytes(_HEADER, "little") + body


class Reader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Adds `data`, and yields the messages that are now complete.

        :raises BadMessage: the stream is damaged. All messages before the damage come first.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER:
            size = int.from_bytes(self._buffer[:_HEADER], "little")
            if size > codec.ENGINE.frame:
                raise BadMessage(f"a frame of {size} bytes, the limit is {codec.ENGINE.frame}")
            if len(self._buffer) < _HEADER + size:
                break
            frame = bytes(self._buffer[_HEADER : _HEADER + size])
            del self._buffer[: _HEADER + size]
            yield codec.decode(frame, codec.ENGINE)
