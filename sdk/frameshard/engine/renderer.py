"""Renders one chat template, in a process of its own: a template is a program from a downloaded file.

The sandbox of jinja2 keeps a template from the file system and from Python's internals. It does not bound time or
memory, and a thread can neither be stopped nor bounded. So this process limits itself: its address space, and the CPU
time of each request. CPU time does not depend on what else the machine does. A request that runs out of memory is
answered with an error, one that runs out of time ends the process; :mod:`frameshard.engine.chat` starts it again.

Requests and answers are lines of JSON. The first request is ``{"source"}``, each later one ``{"messages", "tokens"}``,
where ``tokens`` are the variables ``bos_token`` and ``eos_token``. Answers are ``{}``, ``{"text"}`` or
``{"error", "reason"}``, where the error is one of ``unusable`` (the template does not compile), ``refused`` (it raised
an error), ``too_long`` (the prompt is over 1 MiB) and ``out_of_memory``.

Nothing of frameshard is imported here, so that a restart is quick: ``engine/__init__`` loads llama.cpp.

Windows has neither ``resource`` nor ``setitimer``. A job object with ``ProcessMemoryLimit`` and
``PerProcessUserTimeLimit`` would take their place; only the client's bound on waiting is in force there today.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]  # jinja2 is found where the engine would find it

import jinja2
import jinja2.ext
import jinja2.sandbox

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MEMORY_BYTES = 256 << 20
"""Of address space; the process takes 25 MiB of it before it has a template."""

CPU_S = 1.0
"""For one request. An ordinary one takes less than a millisecond."""

MAX_PROMPT_BYTES = 1 << 20
_MAX_REASON_CHARS = 500

OUT_OF_TIME = signal.SIGPROF if hasattr(signal, "SIGPROF") else None
"""The signal that ends a process whose CPU time is used up."""

Answer = dict[str, str]


class _TooLong(Exception):
    pass


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@jinja2.pass_context
def _finalize(_context: object, value: object) -> object:
    """Changes nothing. Since it takes a context, jinja2 cannot compute an output while it compiles, which it otherwise
    does in spite of ``optimized=False``."""
    return value


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
        optimized=False,
        finalize=_finalize,
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _error(kind: str, error: BaseException) -> Answer:
    return {"error": kind, "reason": f"{error}"[:_MAX_REASON_CHARS] or type(error).__name__}


def _render(template: jinja2.Template, request: Mapping[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    tokens = request["tokens"]
    for part in template.generate(messages=request["messages"], add_generation_prompt=True, tools=None, **tokens):
        parts.append(part)
        size += len(part.encode("utf-8", "replace"))
        if size > MAX_PROMPT_BYTES:
            raise _TooLong(f"the prompt is longer than {MAX_PROMPT_BYTES} bytes")
    return "".join(parts)


class _Renderer:
    def __init__(self) -> None:
        self._template: jinja2.Template | None = None

    def answer(self, request: Mapping[str, Any]) -> Answer:
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


def _limit_cpu(seconds: float) -> None:
    """The default action of the timer's signal ends the process, also in the middle of one long operation."""
    if OUT_OF_TIME is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answers requests until the input ends."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer, answers = _Renderer(), sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(CPU_S)
        answer = renderer.answer(request)
        _limit_cpu(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if answer.get("error") == "out_of_memory":
            break  # what the error left in memory is unknown
    os._exit(0)


if __name__ == "__main__":
    main()
