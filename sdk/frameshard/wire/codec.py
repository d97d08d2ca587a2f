"""Encodes and decodes frames. A frame is one message: a msgpack map within the limits of this module.

With msgpack's defaults a frame of 1 MiB can become 75 MiB of objects. Of two equal keys the last is kept, although
another decoder may keep the first. Extension types are accepted. So this module sets all of msgpack's limits, and
checks those that msgpack does not have: the number of elements, depth, the range of integers, and NaN. It checks in
both directions, so :func:`decode` accepts all that :func:`encode` returns.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from frameshard.errors import BadArgument, BadMessage
from frameshard.records import record

MAX_ID = 2**53 - 1
"""The largest integer of the protocol. A double, the number type of many script languages, holds it exactly."""


@record
class Limits:
    """The limits of one frame. Limits of frames, strings and binaries are in bytes, those of arrays and maps in
    elements."""

    frame: int
    string: int
    binary: int
    array: int
    map: int
    elements: int
    """The most array elements and map entries in the whole frame. Without this limit, a frame of empty arrays could
    take 60 times its size in memory."""
    depth: int = 8
    """The deepest nesting; the outermost map has depth 1."""


CLIENT = Limits(frame=1 << 20, string=1 << 16, binary=1 << 20, array=1024, map=64, elements=1 << 14)
"""The limits between clients and the broker. The other side is not trusted."""

ENGINE = Limits(frame=16 << 20, string=1 << 20, binary=1 << 20, array=1 << 20, map=1024, elements=1 << 20)
"""The limits between the broker and the engine. They are larger, because lists of tokens are as long as a context."""


class _Refused(ValueError):
    """A limit is exceeded. Becomes BadArgument in :func:`encode`, BadMessage in :func:`decode`."""


def encode(message: dict[str, Any], limits: Limits = CLIENT) -> bytes:
    """Encodes `message` as a frame.

    :raises BadArgument: the message exceeds a limit, or has a value whose type the protocol does not have.
    """
    try:
        if _check(message, limits, 1) > limits.elements:
            raise _Refused(f"more than {limits.elements} elements")
        frame: bytes = msgpack.packb(message, use_bin_type=True)
    except UnicodeEncodeError:
        raise BadArgument("cannot be sent: a text is not valid Unicode: it has half of a surrogate pair") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise BadArgument(f"cannot be sent: {error}") from None
    if len(frame) > limits.frame:
        raise BadArgument(f"cannot be sent: {len(frame)} bytes, the limit is {limits.frame}")
    return frame


def decode(frame: bytes, limits: Limits = CLIENT) -> dict[str, Any]:
    """Decodes `frame` to a map. The frame may be any bytes.

    :raises BadMessage: the frame is not a map within the limits.
    """
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
    """Checks a value against the protocol's rules.

    :returns: the number of elements in `value`.
    :raises _Refused: the value breaks a rule.
    """
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
