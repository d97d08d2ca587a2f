"""Tools that a model may call, from functions of the program.

    @frameshard.tool
    def price(item: str, count: int = 1) -> int:
        \"\"\"What an item costs, in gold.\"\"\"
        return PRICES[item] * count

A tool is still the function, and :meth:`Tool.run` calls it with the arguments of a call.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

from frameshard.errors import BadArgument
from frameshard.records import record
from frameshard.wire import messages as m

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS, _MAPS = (list, Sequence), (dict, Mapping)
_REQUIRED = {getattr(typing, "Required", None): True, getattr(typing, "NotRequired", None): False}  # not in Python 3.10
_MAX_VALUE_CHARS = 100  # of a value in an error

Schema = dict[str, Any]


@record
class Tool:
    """A function that the model may call.

    :param name: letters, digits, `_` and `-`, at most 64.
    :param description: what it does and when to use it, for the model.
    :param schema: the JSON schema of its arguments, an object, as a mapping or as text; empty: it has no arguments.
    :param function: what :meth:`run` calls; None: the program carries out the calls itself.
    """

    name: str
    description: str = ""
    schema: Mapping[str, Any] | str = ""
    function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)

    def run(self, call: m.ToolCall) -> Any:
        """Calls the function with the arguments of a call, converted to its parameters' types. Of a union, an argument
        becomes the first type that it fits.

        :raises BadArgument: the call is for another tool; the tool has no function; Python cannot read the arguments,
            such as an integer of more than 4,300 digits; or they do not fit the function's parameters.
        """
        if call.name != self.name:
            raise BadArgument(f"a call of {call.name!r} is no call of {self.name!r}", field="name")
        function = self._function
        hints = _hints(function)
        try:
            given = json.loads(call.arguments)
        except (ValueError, RecursionError) as error:
            raise self._misfit(f"cannot be read: {error}") from None
        if not isinstance(given, dict):
            raise self._misfit("are no JSON object")
        try:
            _signature(function, follow_wrapped=False).bind(**given)
        except TypeError as error:
            raise self._misfit(f"do not fit its function: {error}") from None
        for name, value in given.items():
            if not _fits(value, hints.get(name, Any)):
                shown = repr(value)[:_MAX_VALUE_CHARS]
                raise self._misfit(f"do not fit its function: {name} is {shown}, which is no {_named(hints[name])}")
        return function(**{name: _converted(value, hints.get(name, Any)) for name, value in given.items()})

    def _misfit(self, why: str) -> BadArgument:
        return BadArgument(f"the arguments of the call of {self.name!r} {why}", field="arguments")

    @property
    def _function(self) -> Callable[..., Any]:
        if self.function is None:
            raise BadArgument(f"the tool {self.name!r} has no function", field="function")
        return self.function

    def wire(self) -> m.Tool:
        """The tool as the protocol has it."""
        schema = self.schema if isinstance(self.schema, str) else json.dumps(self.schema, ensure_ascii=False)
        return m.Tool(self.name, self.description, schema)


def tool(function: Callable[..., Any]) -> Tool:
    """Makes a tool of a function. Its name and its docstring become those of the tool, and the hints of its parameters
    the schema: str, int, float, bool, None, list, dict with names, Literal, Enum, Optional and unions, dataclasses and
    TypedDict. A method is made a tool by its object: ``tool(shop.price)``.

    :raises BadArgument: it is no function; or a parameter has no hint, or one that has no schema: a type that has its
        own type in it, or a choice of no values, or of values that JSON does not give back, has none.
    """
    hints = _hints(function)
    properties: Schema = {}
    required: list[str] = []
    for name, parameter in _signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadArgument(f"{function.__name__}: {name} must be a parameter with a name of its own", field=name)
        if name not in hints and name in ("self", "cls"):
            raise BadArgument(
                f"{function.__name__}: make a tool of the method of an object, such as frameshard.tool(shop.price)",
                field=name,
            )
        if name not in hints:
            raise BadArgument(f"{function.__name__}: give the parameter {name} a type, such as {name}: str", field=name)
        properties[name] = _schema(hints[name], f"{function.__name__}: {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(function.__name__, inspect.getdoc(function) or "", schema, function)


def _hints(function: Any) -> dict[str, Any]:
    """The hints of a function or a class.

    :raises BadArgument: it is neither, or a type in them is not known.
    """
    if not (callable(function) and hasattr(function, "__name__")):  # such as a partial function
        raise _no_function(function)
    try:
        return typing.get_type_hints(function, include_extras=False)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise BadArgument(f"{function.__name__}: a type is not known: {error}") from None


def _signature(function: Any, *, follow_wrapped: bool = True) -> inspect.Signature:
    """The parameters of a function or a class.

    :param follow_wrapped: those of the function that a decorator has wrapped, which has the hints.
    :raises BadArgument: they cannot be known, such as those of ``dict``.
    """
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        raise _no_function(function) from None


def _no_function(function: Any) -> BadArgument:
    return BadArgument(f"{function!r} has no parameters with types: wrap it in a function", field="function")


def _named(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _schema(hint: Any, where: str, within: tuple[Any, ...] = ()) -> Schema:
    """The JSON schema of a type.

    :param within: the dataclasses and TypedDicts that it is a part of.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], where)
    if origin is Literal:
        return _choice(list(args), where)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, where, within) for arg in args]}
    if kind in _LISTS:
        return {"type": "array", **({"items": _schema(args[0], where, within)} if args else {})}
    if kind in _MAPS and (not args or args[0] is str):
        return {"type": "object", "additionalProperties": _schema(args[1], where, within) if args else True}
    if _is_record(hint):
        return _record(hint, where, within)
    raise BadArgument(f"{where}: no JSON schema for the type {getattr(hint, '__name__', hint)}", field=where)


def _choice(values: list[Any], where: str) -> Schema:
    if not values:
        raise BadArgument(f"{where}: an Enum without members leaves nothing to choose: give it some", field=where)
    for value in values:
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise BadArgument(
                f"{where}: JSON does not give back the value {value!r}: take texts or numbers", field=where
            )
    return {"enum": values}


def _record(cls: Any, where: str, within: tuple[Any, ...]) -> Schema:
    if cls in within:
        raise BadArgument(
            f"{where}: {cls.__name__} has values of its own type in it: make a Tool with a schema of your own, which "
            "may refer to itself with $ref",
            field=where,
        )
    fields = _fields(cls)
    return {
        "type": "object",
        "properties": {name: _schema(each.hint, f"{where}.{name}", (*within, cls)) for name, each in fields.items()},
        "required": [name for name, each in fields.items() if each.required],
        "additionalProperties": False,
    }


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)


class _Field(NamedTuple):
    hint: Any
    required: bool


def _fields(cls: Any) -> dict[str, _Field]:
    """What a value of a dataclass or TypedDict is made from."""
    hints = _hints(cls)
    if dataclasses.is_dataclass(cls):
        parameters = _signature(cls).parameters.values()
        return {each.name: _Field(hints.get(each.name, Any), each.default is each.empty) for each in parameters}
    # `__required_keys__` knows no marks in a module in which hints are texts.
    marked = typing.get_type_hints(cls, include_extras=True)
    return {name: _Field(hint, _required(marked[name], name in cls.__required_keys__)) for name, hint in hints.items()}


def _required(hint: Any, otherwise: bool) -> bool:
    """Whether a field of a TypedDict is required, by its mark."""
    while args := typing.get_args(hint):
        origin = typing.get_origin(hint)
        if origin in _REQUIRED:
            return _REQUIRED[origin]
        hint = args[0]  # the mark may stand in Annotated
    return otherwise


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON can become a value of a type. A type without a schema takes any value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if origin in (Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return any(_same(value, member.value) for member in hint)
    if origin is Literal:
        return any(_same(value, each) for each in args)
    if kind in _LISTS:
        return isinstance(value, list) and (not args or all(_fits(item, args[0]) for item in value))
    if kind in _MAPS:
        return isinstance(value, dict) and (not args or all(_fits(item, args[1]) for item in value.values()))
    if _is_record(hint):
        fields = _fields(hint)
        needed = {name for name, each in fields.items() if each.required}
        named = isinstance(value, dict) and needed <= value.keys() <= fields.keys()
        return named and all(_fits(item, fields[name].hint) for name, item in value.items())
    if hint in (int, float):
        return _is_number(value, hint)
    return hint not in _SIMPLE or type(value) is hint


def _is_number(value: Any, hint: type[int | float]) -> bool:
    """A whole number may be written as 3.0, and a number may be too large for Python."""
    if type(value) is int:
        return hint is int or abs(value) <= sys.float_info.max
    return type(value) is float and math.isfinite(value) and (hint is float or value.is_integer())


def _same(value: Any, choice: Any) -> bool:
    """In Python, True equals 1."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def _converted(value: Any, hint: Any) -> Any:
    """A value from JSON, which fits a type, as a value of it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _converted(value, next(arg for arg in args if _fits(value, arg)))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if isinstance(value, list) and origin in _LISTS and args:
        return [_converted(item, args[0]) for item in value]
    if isinstance(value, dict) and _is_record(hint):
        fields = _fields(hint)
        return typing.cast(Any, hint)(**{name: _converted(item, fields[name].hint) for name, item in value.items()})
    if isinstance(value, dict) and origin in _MAPS and args:
        return {name: _converted(item, args[1]) for name, item in value.items()}
    return hint(value) if hint in (int, float) else value
