"""One message is one msgpack map, and no larger or deeper than the limits here.

msgpack's own defaults turn a frame of 1 MiB into 75 MiB of objects, keep the last of two equal keys (where another
decoder may keep the first) and let extension types through. So every limit is explicit, and what the library cannot
bound (total number of elements, depth, integer range, NaN) is checked here. Both directions are checked: what
:func:`encode` returns, :func:`decode` accepts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from frameshard.errors import BadArgument, BadMessage

MAX_ID = 2**53 - 1
"""Largest integer of the protocol: what a double, and so every script language, holds exactly."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one frame. Lengths of strings and binaries are bytes, of arrays and maps elements."""

    frame: int
    string: int
    binary: int
    array: int
    map: int
    elements: int
    """Array elements and map entries in the whole frame: without it a frame of empty arrays fans out 60-fold."""
    depth: int = 8
    """The outermost map has depth 1."""


CLIENT = Limits(frame=1 << 20, string=1 << 16, binary=1 << 20, array=1024, map=64, elements=1 << 14)
"""Between clients and broker, where the other side may be hostile."""

ENGINE = Limits(frame=16 << 20, string=1 << 20, binary=1 << 20, array=1 << 20, map=1024, elements=1 << 20)
"""Between the broker and its own child; token lists are as long as a context."""


class _Refused(ValueError):
    """What breaks a limit; translated to the error of the direction at the seam."""


def encode(message: dict[str, Any], limits: Limits = CLIENT) -> bytes:
    """The frame for `message`. Raises :class:`BadArgument` when it breaks a limit or holds a foreign type."""
    try:
        if _check(message, limits, 1) > limits.elements:
            raise _Refused(f"more than {limits.elements} elements")
        frame: bytes = msgpack.packb(message, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadArgument(f"cannot be sent: {error}") from None
    if len(frame) > limits.frame:
        raise BadArgument(f"cannot be sent: {len(frame)} bytes, the limit is {limits.frame}")
    return frame


def decode(frame: bytes, limits: Limits = CLIENT) -> dict[str, Any]:
    """The map in `frame`. Raises :class:`BadMessage` for everything else, whatever the bytes are."""
    if len(frame) > limits.frame:
        raise BadMessage(f"{len(frame)} bytes, the limit is {limits.frame}")
    elements = 0

    def count(added: int) -> None:
        nonlocal elements
        elements += added
        if elements > limits.elements:
            raise _Refused(f"more than {limits.elements} elements")

    def to_list(items: list[Any]) -> list[Any]:
        count(len(items))
        return items

    def to_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        count(len(pairs))
        result = dict(pairs)
        if len(result) != len(pairs):
            raise _Refused("a key occurs twice")
        return result

    try:
        message = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            use_list=True,
            timestamp=0,
            ext_hook=_refuse_extension,
            list_hook=to_list,
            object_pairs_hook=to_map,
            max_str_len=limits.string,
            max_bin_len=limits.binary,
            max_array_len=limits.array,
            max_map_len=limits.map,
            max_ext_len=0,
        )
        if type(message) is not dict:
            raise _Refused("not a map")
        _check(message, limits, 1)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadMessage(f"not a message: {error or type(error).__name__}") from None
    return message


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise _Refused("extension types are not used")


def _check(value: object, limits: Limits, depth: int) -> int:
    """Elements in `value`; raises for what the format allows and the protocol does not."""
    if isinstance(value, str):
        if len(value) > limits.string // 4 and len(value.encode()) > limits.string:
            raise _Refused(f"a string of more than {limits.string} bytes")
    elif value is None or isinstance(value, bool):
        pass
    elif isinstance(value, int):
        if not -MAX_ID <= value <= MAX_ID:
            raise _Refused("an integer beyond 2^53")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused("a number that is not finite")
    elif isinstance(value, bytes):
        if len(value) > limits.binary:
            raise _Refused(f"a binary of more than {limits.binary} bytes")
    elif isinstance(value, (dict, list, tuple)):
        if depth > limits.depth:
            raise _Refused(f"nested deeper than {limits.depth}")
        if isinstance(value, dict):
            if len(value) > limits.map:
                raise _Refused(f"a map of more than {limits.map} entries")
            for key in value:
                if not isinstance(key, str):
                    raise _Refused("a key that is not a string")
                _check(key, limits, depth)
        elif len(value) > limits.array:
            raise _Refused(f"an array of more than {limits.array} elements")
        items = value.values() if isinstance(value, dict) else value
        return len(value) + sum(_check(item, limits, depth + 1) for item in items)
    else:
        raise _Refused(f"a {type(value).__name__}, which is no type of the protocol")
    return 0
