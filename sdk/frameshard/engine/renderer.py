"""Renders one chat template. This is the worker of a :mod:`frameshard.confined` process.

A template is a program from a downloaded file. The sandbox of jinja2 keeps it from the file system and from Python's
internals, but limits neither its time nor its memory.

The first request is ``{"source"}``. Each later one is ``{"messages", "variables"}``. An answer is ``{}``, ``{"text"}``
or ``{"error", "reason"}``. The errors are ``unusable`` (the template does not compile), ``refused`` (it raised an
error), ``too_long`` (the prompt is over 1 MiB) and ``out_of_memory``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 256 << 20
"""The limit on the address space of the process, which takes 25 MiB without a template."""

CPU_S = 1.0
"""The limit on the CPU time of one request. An ordinary one takes less than a millisecond."""

MAX_PROMPT_BYTES = 1 << 20
_MAX_REASON_CHARS = 500

Answer = dict[str, str]


class _TooLong(Exception):
    pass


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face has it. jinja2's own filter sorts keys and writes ``<`` as an escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, with which templates mark answers for training. Its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@jinja2.pass_context
def _finalize(_context: object, value: object) -> object:
    """Returns the value as it is. Because this function takes a context, jinja2 cannot compute outputs while it
    compiles. Without it, jinja2 does that even with ``optimized=False``."""
    return value


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,
        finalize=_finalize,
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _error(kind: str, error: BaseException) -> Answer:
    return {"error": kind, "reason": f"{error}"[:_MAX_REASON_CHARS] or type(error).__name__}


def _render(template: jinja2.Template, request: Mapping[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    for part in template.generate({**request["variables"], "messages": request["messages"]}):
        parts.append(part)
        size += len(part.encode("utf-8", "replace"))
        if size > MAX_PROMPT_BYTES:
            raise _TooLong(f"the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    return "".join(parts)


class Worker:
    """Compiles the template of the first request, and renders it for each later one."""

    def __init__(self) -> None:
        self._template: jinja2.Template | None = None

    def answer(self, request: Mapping[str, Any]) -> Answer:
        """Answers one request."""
        try:
            if self._template is None:
                self._template = _environment().from_string(request["source"])
                return {}
            return {"text": _render(self._template, request)}
        except MemoryError:
            return {"error": "out_of_memory", "reason": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except _TooLong as error:
            return _error("too_long", error)
        except Exception as error:  # the template is a program, and may raise anything
            return _error("unusable" if self._template is None else "refused", error)
