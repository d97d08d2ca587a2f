"""Strict conversion of a map to a frozen dataclass: for the protocol's messages and for the engine's.

The annotation of a field is its check: a function that takes the value from msgpack and returns the typed value, or
raises :class:`Refused`. Fields without a default are required and unknown fields are refused. An integer is never taken
for a boolean, nor a float for an integer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from frameshard.wire import codec

T = TypeVar("T")
Check = Callable[[Any], Any]


class Refused(ValueError):
    """A field does not take its value. ``str()`` names the field and the reason."""


def integer(low: int = 0, high: int = codec.MAX_ID) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Refused(f"must be an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise Refused(f"must be a number from {low} to {high}")
        return float(value)

    return check


def text(limit: int, least: int = 0) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or not least <= len(value.encode(errors="replace")) <= limit:
            raise Refused(f"must be a string of {least} to {limit} bytes")
        return value

    return check


def binary(limit: int) -> Check:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > limit:
            raise Refused(f"must be a binary of at most {limit} bytes")
        return value

    return check


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise Refused("must be true or false")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Refused("must be a map")
    return value


def _one_of(allowed: tuple[str, ...]) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise Refused(f"must be one of {', '.join(allowed)}")
        return value

    return check


def _array(inner: Check, limit: int) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > limit:
            raise Refused(f"must be an array of at most {limit}")
        return tuple(inner(item) for item in value)

    return check


def _pair(first: Check, second: Check) -> Check:
    def check(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise Refused("must be an array of two")
        return first(value[0]), second(value[1])

    return check


def _record(cls: type[Any]) -> Check:
    return lambda value: convert(cls, _mapping(value))


def _check_for(hint: Any) -> Check:
    """The check for an annotation. An array without a limit of its own has the codec's limit for clients."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if isinstance(args[1], int):
            return _array(_check_for(get_args(args[0])[0]), args[1])
        check: Check = args[1]
        return check
    if origin is Literal:
        return _one_of(args)
    if origin in (Union, UnionType):
        inner = _check_for(args[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        if args[1] is Ellipsis:
            return _array(_check_for(args[0]), codec.CLIENT.array)
        return _pair(_check_for(args[0]), _check_for(args[1]))
    if origin is Mapping:
        return _mapping
    return _boolean if hint is bool else _record(hint)


@cache
def _checks(cls: type[Any]) -> dict[str, tuple[Check, bool]]:
    """By field name: its check, and whether it is required."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        field.name: (_check_for(hints[field.name]), field.default is dataclasses.MISSING)
        for field in dataclasses.fields(cls)
    }


Id = Annotated[int, integer(1)]
Count = Annotated[int, integer()]
Seconds = Annotated[float, number(0, 1e9)]
Name = Annotated[str, text(256)]
Text = Annotated[str, text(codec.CLIENT.string)]


def convert(cls: type[T], fields: Mapping[str, Any]) -> T:
    """An instance of `cls` from a map.

    :raises Refused: a field is unknown, missing or has a wrong value.
    """
    known = _checks(cls)  # type: ignore[arg-type]  # mypy finds type[T] not hashable
    values = {}
    for name, value in fields.items():
        if name not in known:
            raise Refused(f"{name}: unknown field")
        try:
            values[name] = known[name][0](value)
        except Refused as refused:
            raise Refused(f"{name}: {refused}") from None
    for name, (_, required) in known.items():
        if required and name not in values:
            raise Refused(f"{name}: missing")
    return cls(**values)
