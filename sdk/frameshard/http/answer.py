"""OpenAI's objects for an answer: whole, or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from frameshard.client import Completion
from frameshard.wire import messages as m

if TYPE_CHECKING:
    from frameshard.client import Rows

Document = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The objects of one answer.

    :param chat: of ``/v1/chat/completions``, else of ``/v1/completions``.
    :param model: the name of the model that is loaded.
    :param max_calls: further calls are left out.
    :param usage: each chunk has the field `usage`; only the last one has figures in it.
    """

    chat: bool
    model: str
    usage: bool = False
    max_calls: int = m.MAX_CALLS
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def asked_in(self) -> str:
        """The field of the request that the prompt is in."""
        return asked_in(chat=self.chat)

    def whole(self, done: Completion, thought: str) -> Document:
        choice: Document = {"text": done.text}
        if self.chat:
            message: Document = {"role": "assistant", "content": done.text, "refusal": None}
            if thought:
                message["reasoning_content"] = thought
            if done.tool_calls:
                message |= {"content": done.text or None, "tool_calls": list(map(_call, self._kept(done.tool_calls)))}
            choice = {"message": message}
        reason = self._reason(done)
        return {**self._head("chat.completion"), "choices": [_choice(choice, reason)], "usage": _usage(done)}

    def opening(self) -> list[Document]:
        """The chunks before the first text."""
        return [self._chunk({"role": "assistant", "content": "", "refusal": None})] if self.chat else []

    def part(self, text: str) -> Document:
        return self._chunk({"content": text} if self.chat else {"text": text})

    def thought(self, text: str) -> Document:
        return self._chunk({"reasoning_content": text})

    def calls(self, calls: Sequence[m.ToolCall]) -> list[Document]:
        """The chunks for the last one of `calls`: none if it is left out."""
        index = len(calls) - 1
        return [self._chunk({"tool_calls": [{"index": index, **_call(call)}]}) for call in self._kept(calls)[index:]]

    def _kept(self, calls: Sequence[m.ToolCall]) -> Sequence[m.ToolCall]:
        return calls[: self.max_calls]

    def closing(self, done: Completion) -> list[Document]:
        """The chunks after the last text."""
        last = self._chunk({} if self.chat else {"text": ""}, self._reason(done))
        if not self.usage:
            return [last]
        return [last, {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(done)}]

    def _reason(self, done: Completion) -> str:
        """Why the answer has ended. With all calls that are wanted it is complete, whatever cut off further ones."""
        return "tool_calls" if len(done.tool_calls) >= self.max_calls else done.reason

    def _chunk(self, content: Document, reason: str | None = None) -> Document:
        choice = _choice({"delta": content} if self.chat else content, reason)
        usage = {"usage": None} if self.usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, kind: str) -> Document:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": kind if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }


def asked_in(*, chat: bool) -> str:
    """The field of a request that the prompt is in."""
    return "messages" if chat else "prompt"


def embeddings(rows: Sequence[Rows], n_tokens: int, model: str, *, base64: bool) -> Document:
    """The object of ``/v1/embeddings``.

    :param rows: each of shape [dimensions].
    :param n_tokens: of all texts.
    :param base64: each row is given as the bytes of 32-bit floats.
    """
    data: list[Document] = []
    for index, row in enumerate(rows):
        numbers = row.astype("<f4")
        value = b64encode(numbers.tobytes()).decode() if base64 else numbers.tolist()
        data.append({"object": "embedding", "index": index, "embedding": value})
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


END = b"data: [DONE]\n\n"
"""Ends a stream that is complete."""


def event(document: Document) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _choice(content: Document, reason: str | None) -> Document:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _call(call: m.ToolCall) -> Document:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(done: Completion) -> Document:
    return {
        "prompt_tokens": done.n_prompt,
        "completion_tokens": done.n_generated,
        "total_tokens": done.n_prompt + done.n_generated,
        "prompt_tokens_details": {"cached_tokens": done.n_reused},
        "completion_tokens_details": {"reasoning_tokens": done.n_thought},
    }
