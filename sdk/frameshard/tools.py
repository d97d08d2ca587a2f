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
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from frameshard.errors import BadArgument
from frameshard.wire import messages as m

_SIMPLE = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}

Schema = dict[str, Any]


@dataclass(frozen=True)
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
        """Calls the function with the arguments of a call, converted to its parameters' types.

        :raises BadArgument: the call is for another tool, the tool has no function, or Python cannot read the
            arguments, such as an integer of more than 4,300 digits.
        """
        if call.name != self.name:
            raise BadArgument(f"a call of {call.name!r} is no call of {self.name!r}", field="name")
        function = self._function
        hints = _hints(function)
        try:
            given = json.loads(call.arguments)
        except ValueError as error:
            raise BadArgument(
                f"the arguments of the call of {call.name!r} cannot be read: {error}", field="arguments"
            ) from None
        return function(**{name: _converted(value, hints.get(name, Any)) for name, value in given.items()})

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
    TypedDict.

    :raises BadArgument: a parameter has no hint, or one that has no schema: a type that has its own type in it, or a
        choice of values that JSON does not give back, has none.
    """
    hints = _hints(function)
    properties: Schema = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadArgument(f"{function.__name__}: {name} must be a parameter with a name of its own", field=name)
        if name not in hints:
            raise BadArgument(f"{function.__name__}: give the parameter {name} a type, such as {name}: str", field=name)
        properties[name] = _schema(hints[name], f"{function.__name__}: {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(function.__name__, inspect.getdoc(function) or "", schema, function)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=False)
    except NameError as error:
        raise BadArgument(f"{getattr(function, '__name__', function)}: a type is not known: {error}") from None


def _schema(hint: Any, where: str, within: tuple[Any, ...] = ()) -> Schema:
    """The JSON schema of a type.

    :param within: the dataclasses and TypedDicts that it is a part of.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint], where)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is Literal:
        return _choice(list(args), where)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(arg, where, within) for arg in args]}
    if origin in (list, Sequence) or hint is list:
        return {"type": "array", **({"items": _schema(args[0], where, within)} if args else {})}
    if (origin in (dict, Mapping) and args[0] is str) or hint is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], where, within) if args else True}
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _record(hint, where, within)
    raise BadArgument(f"{where}: no JSON schema for the type {getattr(hint, '__name__', hint)}", field=where)


def _choice(values: list[Any], where: str) -> Schema:
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
    hints = _hints(cls)
    if dataclasses.is_dataclass(cls):
        without = (dataclasses.MISSING, dataclasses.MISSING)
        required = [each.name for each in dataclasses.fields(cls) if (each.default, each.default_factory) == without]
    else:
        required = sorted(cls.__required_keys__)
    properties = {name: _schema(hint, f"{where}.{name}", (*within, cls)) for name, hint in hints.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _converted(value: Any, hint: Any) -> Any:
    """A value from JSON as a value of a type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        fitting = [arg for arg in args if _fits(value, arg)]
        return _converted(value, fitting[0]) if fitting else value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if isinstance(value, list) and args:
        return [_converted(item, args[0]) for item in value]
    if isinstance(value, dict) and (dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        hints = typing.get_type_hints(hint)
        return typing.cast(Any, hint)(**{name: _converted(item, hints[name]) for name, item in value.items()})
    if isinstance(value, dict) and origin in (dict, Mapping):
        return {name: _converted(item, args[1]) for name, item in value.items()}
    return float(value) if hint is float else value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON may be meant for a type of a union."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return value.keys() <= {each.name for each in dataclasses.fields(hint)}
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is float:
        return type(value) in (int, float)
    kinds = {Sequence: list, Mapping: dict}
    if typing.is_typeddict(origin):
        return isinstance(value, dict)
    return type(value) is kinds.get(origin, origin)
