"""A model's own chat template, rendered without trust: it is a program from a downloaded file."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from frameshard.errors import BadArgument, Unsupported

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_PROMPT_BYTES = 1 << 20


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. ``bos`` and ``eos`` are the texts that the template may refer to.

    :raises Unsupported: the template is too large or not one that the sandbox can run.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise Unsupported(f"the model's chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._tokens = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise Unsupported(f"the model's chat template cannot be used: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for ``messages`` (each with ``role`` and ``content``), ending where the assistant is to speak.

        :raises BadArgument: the template refuses these messages, or the prompt is over 1 MiB.
        """
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=[dict(m) for m in messages], add_generation_prompt=True, tools=None, **self._tokens
            ):
                parts.append(part)
                size += len(part)
                if size > MAX_PROMPT_BYTES:
                    raise BadArgument(f"the prompt is longer than {MAX_PROMPT_BYTES} bytes")
        except BadArgument:
            raise
        # The template is the model file's own program: whatever it raises is its answer to these messages.
        except Exception as error:
            raise BadArgument(f"the model's chat template refuses these messages: {error}") from None
        return "".join(parts)
