"""Renders a model's chat template. A template comes from a downloaded file and is not trusted, so
:mod:`frameshard.engine.renderer` renders it in a separate process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frameshard.confined import OUT_OF_TIME, Confined, Gone
from frameshard.errors import BadArgument, Unsupported

MAX_TEMPLATE_CHARS = 256 * 1024

_RENDERER = Path(__file__).with_name("renderer.py")
NO_VARIABLES: Mapping[str, Any] = {}
OURS = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "enable_thinking", "thinking"}
)
"""Variables that requests cannot set as they like: a prompt must end where the answer begins."""

_PROBE = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """A compiled template. Any thread may use it; it renders one prompt at a time. Free it with :meth:`close`.

    :param source: the template's text.
    :param bos: the text of the BOS token, which the template may use.
    :param eos: the text of the EOS token.
    :raises Unsupported: the template is too large, does not compile, or cannot render a short message within the limits
        on time and memory.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise Unsupported(f"the model's chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        self._variables = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True, "tools": None}
        self._renderer = Confined(_RENDERER, {"source": source})
        answer = self._ask(_PROBE, {})
        if answer.get("error") == "refused" and "error" not in self._ask(_PROBE, {"tools": []}):
            self._variables["tools"] = []  # a template that is made for tools needs a list of them
        # A template that refuses this message may accept others.
        if answer.get("error", "refused") != "refused":
            self.close()
            raise Unsupported(f"the model's chat template cannot be used: {answer['reason']}")

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = NO_VARIABLES) -> str:
        """Renders the prompt for ``messages``, in the form of OpenAI's API: each has ``role`` and ``content``. The
        prompt ends where the assistant's answer begins.

        :param variables: further variables of the template.

        :raises BadArgument: the template refuses these messages, the prompt is over 1 MiB, or rendering takes more than
            a second of CPU time or 256 MiB of memory.
        """
        answer = self._ask(messages, variables)
        if "error" not in answer:
            return str(answer["text"])
        if answer["error"] == "too_long":
            raise BadArgument(str(answer["reason"]), field="messages")
        raise BadArgument(f"the model's chat template refuses these messages: {answer['reason']}", field="messages")

    def close(self) -> None:
        """Ends the process that renders prompts. Safe to call twice."""
        self._renderer.close()

    def _ask(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> dict[str, Any]:
        request = {"messages": [dict(each) for each in messages], "variables": {**self._variables, **variables}}
        try:
            return self._renderer.ask(request)
        except Gone as gone:
            if gone.status == OUT_OF_TIME:
                reason = "takes more than a second of CPU time"
            else:
                reason = f"ends the process that renders it (status {gone.status})"
        return {"error": "died", "reason": f"it {reason}"}
