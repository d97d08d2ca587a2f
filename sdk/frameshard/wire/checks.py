"""Converts a map to a frozen dataclass and checks it strictly, for the messages of the protocol and of the engine.

The annotation of a field says which values the field accepts. It may end with one line of text for documents::

    temperature: Annotated[float, number(0, 5), "0 is greedy."] = 0.8

Documents and bindings are generated from these annotations; see bindings/generate. Fields without a default are
required, and unknown fields are refused. A boolean field does not accept an integer, and an integer field does not
accept a float.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from frameshard.errors import BadArgument
from frameshard.records import record
from frameshard.wire import codec

T = TypeVar("T")


class Refused(ValueError):
    """A field does not accept its value. ``str()`` gives the field and the reason. For a record inside a message it
    gives all enclosing fields, the outermost first. `field` is the innermost one."""

    field: str

    def __init__(self, reason: str | Refused, field: str = "") -> None:
        super().__init__(f"{field}: {reason}" if field else str(reason))
        inner: str = reason.field if isinstance(reason, Refused) else ""
        self.field = inner or field


@dataclass(frozen=True, eq=False)
class Check:
    """Checks the values of a field.

    :param description: describes the accepted values as data, for bindings/generated-manifest.json.
    :param take: converts a value from msgpack to the typed value, or raises :class:`Refused`. If its second argument is
        true, unknown fields and unknown words are refused.
    """

    description: Mapping[str, Any]
    take: Callable[[Any, bool], Any]


@record
class Default:
    """Part of an annotation: describes a default that depends on the machine.

    :param words: the description, for documents.
    """

    words: str


@record
class Field:
    """One field of a message or record."""

    name: str
    check: Check
    required: bool
    default: Any
    """``dataclasses.MISSING`` if the field is required."""
    text: str
    default_words: str


def integer(low: int = 0, high: int = codec.MAX_ID, unit: str = "") -> Check:
    def take(value: Any, strict: bool) -> int:
        if type(value) is not int or not low <= value <= high:
            raise Refused(f"must be an integer from {low} to {high}")
        return value

    return Check({"type": "int", "min": low, "max": high, **_unit(unit)}, take)


def number(low: float, high: float, unit: str = "", *, or_zero: bool = False) -> Check:
    """A number from `low` to `high`.

    :param unit: the unit, for documents.
    :param or_zero: accept 0 as well, although it is below `low`.
    """
    zero = "0 or " if or_zero else ""

    def take(value: Any, strict: bool) -> float:
        if type(value) not in (int, float) or not (low <= value <= high or (or_zero and value == 0)):
            raise Refused(f"must be {zero}a number from {low} to {high}")
        return float(value)

    return Check(
        {"type": "number", "min": low, "max": high, **({"or_zero": True} if or_zero else {}), **_unit(unit)}, take
    )


def text(limit: int, least: int = 0) -> Check:
    """A string.

    :param limit: the most bytes of UTF-8.
    :param least: the fewest bytes of UTF-8.
    """

    def take(value: Any, strict: bool) -> str:
        try:
            if type(value) is str and least <= len(value.encode()) <= limit:
                return value
        except UnicodeEncodeError:  # such as a file's name that is not UTF-8
            raise Refused("must be UTF-8") from None
        raise Refused(f"must be a string of {least} to {limit} bytes")

    return Check({"type": "text", "min": least, "max": limit}, take)


def path(least: int = 0) -> Check:
    """The path of a file; "" means no file if `least` is 0."""
    check = text(4096, least)

    def take(value: Any, strict: bool) -> str:
        found: str = check.take(value, strict)
        if "\0" in found:
            raise Refused("must be a path without NUL")
        return found

    return Check({**check.description, "path": True}, take)


def binary(limit: int) -> Check:
    def take(value: Any, strict: bool) -> bytes:
        if type(value) is not bytes or len(value) > limit:
            raise Refused(f"must be a binary of at most {limit} bytes")
        return value

    return Check({"type": "bin", "min": 0, "max": limit}, take)


def _unit(unit: str) -> dict[str, str]:
    return {"unit": unit} if unit else {}


def _boolean() -> Check:
    def take(value: Any, strict: bool) -> bool:
        if type(value) is not bool:
            raise Refused("must be true or false")
        return value

    return Check({"type": "bool"}, take)


def _map() -> Check:
    def take(value: Any, strict: bool) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise Refused("must be a map")
        return value

    return Check({"type": "map"}, take)


def words(*allowed: str) -> Check:
    """One of these words."""

    def take(value: Any, strict: bool) -> str:
        if type(value) is not str or (value not in allowed and (strict or not value)):
            raise Refused(f"must be one of {', '.join(allowed)}")
        return value

    return Check({"type": "word", "words": list(allowed)}, take)


def _array(inner: Check, limit: int) -> Check:
    def take(value: Any, strict: bool) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > limit:
            raise Refused(f"must be an array of at most {limit}")
        return tuple(inner.take(item, strict) for item in value)

    return Check({"type": "array", "max": limit, "items": inner.description}, take)


def _tuple(*inner: Check) -> Check:
    def take(value: Any, strict: bool) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(inner):
            raise Refused(f"must be an array of {len(inner)}")
        return tuple(check.take(item, strict) for check, item in zip(inner, value, strict=True))

    kind = "pair" if len(inner) == 2 else "tuple"
    return Check({"type": kind, "items": [check.description for check in inner]}, take)


def _record(cls: type[Any]) -> Check:
    mapping = _map()
    return Check(
        {"type": "record", "record": cls.__name__},
        lambda value, strict: convert(cls, mapping.take(value, strict), strict=strict),
    )


def _or_none(inner: Check) -> Check:
    return Check(
        {**inner.description, "nullable": True},
        lambda value, strict: None if value is None else inner.take(value, strict),
    )


def _check_for(hint: Any) -> Check:
    """Returns the check for an annotation. An array without its own limit gets the codec's limit for clients."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for note in args[1:]:
            if isinstance(note, Check):
                return note
            if isinstance(note, int):
                return _array(_check_for(get_args(args[0])[0]), note)
        return _check_for(args[0])
    if origin is Literal:
        return words(*args)
    if origin in (Union, UnionType):
        return _or_none(_check_for(args[0]))
    if origin is tuple:
        if args[1] is Ellipsis:
            return _array(_check_for(args[0]), codec.CLIENT.array)
        return _tuple(*map(_check_for, args))
    if origin is Mapping:
        return _map()
    return _boolean() if hint is bool else _record(hint)


@cache
def fields_of(cls: type[Any]) -> dict[str, Field]:
    """Returns the fields of `cls` by name, from its annotations."""
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        found[field.name] = Field(
            field.name,
            _check_for(hint),
            field.default is dataclasses.MISSING,
            field.default,
            next((note for note in reversed(notes) if isinstance(note, str)), ""),
            next((note.words for note in notes if isinstance(note, Default)), ""),
        )
    return found


Id = Annotated[int, integer(1)]
Count = Annotated[int, integer()]
Bytes = Annotated[int, integer(unit="bytes")]
Tokens = Annotated[int, integer(unit="tokens")]
Seconds = Annotated[float, number(0, 1e9, "s")]
Name = Annotated[str, text(256)]
Text = Annotated[str, text(codec.CLIENT.string)]


def convert(cls: type[T], fields: Mapping[str, Any], *, strict: bool = True) -> T:
    """Makes an instance of `cls` from a map.

    :param strict: false for messages that a newer sidecar may have sent. Unknown fields are then dropped, and unknown
        words are accepted. Missing fields and wrong types are still refused.
    :raises Refused: a field is unknown, missing or has a wrong value.
    """
    known = fields_of(cls)  # type: ignore[arg-type]  # mypy finds type[T] not hashable
    values = {}
    for name, value in fields.items():
        if name in known:
            try:
                values[name] = known[name].check.take(value, strict)
            except Refused as refused:
                raise Refused(refused, name) from None
        elif strict:
            raise Refused("unknown field", name)
    for name, field in known.items():
        if field.required and name not in values:
            raise Refused("missing", name)
    return cls(**values)


def verify(record: object) -> None:
    """Checks a dataclass that a program has made; called by its ``__post_init__``. Replaces each value by the checked
    one, such as a list by a tuple.

    :raises BadArgument: a field has a wrong value; detail has ``field``.
    """
    cls: Any = type(record)
    for name, field in fields_of(cls).items():
        try:
            object.__setattr__(record, name, field.check.take(getattr(record, name), True))
        except Refused as refused:
            raise BadArgument(f"{name}: {refused}", field=name) from None
