"""Jobs at the fallback server: which may go there, what it is asked, and the answer that it gives. This module does no
I/O; :mod:`frameshard.broker.remote` has the connections, and :mod:`frameshard.broker.departures` decides when a job
goes.

A job goes only if the server can be asked for all of it: a field that OpenAI's interface does not have keeps the job
here. Fields of `Sampling` that have their defaults are left to the server. A field that is added to the protocol keeps
its jobs here, too, until :func:`question` carries it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from frameshard.errors import BadArgument, FrameshardError
from frameshard.records import record
from frameshard.sentences import Marked, Splitter
from frameshard.text import TextStream
from frameshard.wire import messages as m
from frameshard.wire import toolchecks

MAX_REMOTE = 32
"""The most jobs that are at the server at once."""

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_STOPS = 4
"""Of one request in OpenAI's interface. All stop strings of a job are looked for here as well."""

_CARRIED = {
    m.Submit: frozenset({"kind", "messages", "sampling", "tools", "tool_choice"}),
    m.Sampling: frozenset(
        {"max_tokens", "temperature", "top_p", "seed", "stop", "json_schema", "frequency_penalty", "presence_penalty"}
    ),
    m.ChatMessage: frozenset({"role", "content", "tool_calls", "tool_call_id"}),
    m.Tool: frozenset({"name", "description", "schema"}),
    m.ToolCall: frozenset({"id", "name", "arguments"}),
}
"""The fields that :func:`question` carries."""

_OURS = frozenset(
    {"id", "epoch", "job", "conversation", "timeline", "window", "sentences", "priority", "deadline_ms", "local_only"}
)
"""Fields of a job that the sidecar itself serves, wherever the answer comes from."""


@record
class Ask:
    """Tells the connections to ask the server."""

    attempt: int
    """Its number; each try of a job has another one."""
    job: int
    request: m.Submit
    body: bytes


@record
class Drop:
    """Tells the connections to close that of an attempt."""

    attempt: int


@record
class Text:
    """The next part of an answer, not empty."""

    attempt: int
    job: int
    text: str


class Call(NamedTuple):
    """A call of a tool.

    :param arguments: JSON.
    """

    name: str
    arguments: str


@record
class Finished:
    """The answer is complete, and its calls are valid. The numbers of tokens are those that the server reports; 0:
    none."""

    attempt: int
    job: int
    reason: m.Reason
    n_prompt: int
    n_generated: int
    calls: tuple[Call, ...] = ()


@record
class Broken:
    """The server has not given a whole answer.

    :param refused: it will not give one to the same request later.
    """

    attempt: int
    job: int
    error: FrameshardError
    refused: bool


Command = Ask | Drop
Event = Text | Finished | Broken


class Given:
    """The text that the server has given for one job, cut at stop strings and marked as the engine does it."""

    def __init__(self, request: m.Submit, now: float) -> None:
        self.text = ""
        self.n_pieces = 0
        self.n_tokens = 0
        """How many tokens the engine has found in the text; 0 before it goes on from it."""
        self.started_at = now
        self.first_at = now
        self._stream = TextStream(request.sampling.stop)
        self._marks = Splitter() if request.sentences else None

    @property
    def stopped(self) -> bool:
        """A stop string has ended the answer."""
        return self._stream.stopped

    def add(self, text: str, now: float) -> Marked:
        """Takes a part of the answer, and returns what the client can have of it now."""
        if not self.n_pieces:
            self.first_at = now
        self.text += text
        self.n_pieces += 1
        return self._marked(self._stream.push(text))

    def end(self) -> Marked:
        """Returns what was held back. Nothing follows."""
        return self._marked(self._stream.finish(), last=True)

    def _marked(self, text: str, *, last: bool = False) -> Marked:
        return Marked(text) if self._marks is None else self._marks.feed(text, last=last)


@dataclass(eq=False)
class Away:
    """What a job has to do with the fallback server.

    :param may_go: the server can be asked for the job.
    """

    may_go: bool
    late_at: float = math.inf
    """From this time on the plan cannot meet the job's deadline."""
    recalled: bool = False
    """It was taken back from the engine to go to the server, and no attempt has failed since."""
    retry_at: float = 0.0
    n_failed: int = 0
    attempt: int = 0
    """The number of the attempt that goes on now; 0: none."""
    given: Given | None = None
    """The text of this attempt; or that of an answer that was broken off, which the engine continues."""

    def failed(self, now: float) -> None:
        """An attempt has failed before any text: the next one follows after a pause."""
        self.attempt, self.given, self.recalled = 0, None, False
        self.retry_at = now + min(FIRST_PAUSE_S * 2 ** min(self.n_failed, 16), MAX_PAUSE_S)
        self.n_failed += 1


def may_go(request: m.Submit) -> bool:
    """Whether the server can be asked for this job, and the client lets it go."""
    if request.local_only or request.kind != "chat" or not _is_carried(request, _OURS):
        return False
    schema = request.sampling.json_schema or "{}"
    if toolchecks.too_deep(schema):
        return False
    try:
        _check_tools(request)
        for tool in request.tools:
            toolchecks.schema_of(tool)
        return isinstance(json.loads(schema), dict)
    except (ValueError, BadArgument):
        return False  # the engine says what is wrong


def _check_tools(request: m.Submit) -> None:
    """
    :raises BadArgument: a tool, the choice, or a call or a result in the messages is wrong.
    """
    toolchecks.check(request.tools, request.tool_choice)
    if request.tools and request.sampling.json_schema:
        raise BadArgument("json_schema: an answer with tools has no other form", field="json_schema")
    names: dict[str, str] = {}
    for message in request.messages:
        toolchecks.check_message(message, names)
        names |= {call.id: call.name for call in message.tool_calls}


def _is_carried(record: Any, others: frozenset[str] = frozenset()) -> bool:
    carried = _CARRIED[type(record)]
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in carried:
            inner = value if isinstance(value, tuple) else (value,)
            if not all(_is_carried(each) for each in inner if type(each) in _CARRIED):
                return False
        elif field.name not in others and value != field.default:
            return False
    return True


def question(request: m.Submit, model: str, seed: int) -> bytes:
    """The body of the request to the server."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": list(map(_message, request.messages)),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(sampling, name):
            body[name] = value
    if sampling.stop:
        body["stop"] = sampling.stop[:MAX_STOPS]
    if sampling.json_schema:
        form = {"name": "answer", "schema": json.loads(sampling.json_schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if request.tools:
        body["tools"] = [
            _function(name=tool.name, description=tool.description, parameters=toolchecks.schema_of(tool))
            for tool in request.tools
        ]
        choice = request.tool_choice
        body["tool_choice"] = choice if choice in toolchecks.CHOICES else _function(name=choice)
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _message(message: m.ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        told["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        told["tool_calls"] = [
            {"id": call.id, **_function(name=call.name, arguments=call.arguments)} for call in message.tool_calls
        ]
    return told


def _function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def callable_tools(request: m.Submit) -> tuple[m.Tool, ...]:
    """The tools that the answer may call."""
    choice = request.tool_choice
    return tuple(tool for tool in request.tools if choice in ("auto", "required", tool.name))


def must_call(request: m.Submit) -> bool:
    """The answer is calls, and no text."""
    return request.tool_choice not in ("auto", "none")


def with_ids(calls: Sequence[Call], messages: Sequence[m.ChatMessage]) -> tuple[m.ToolCall, ...]:
    """The calls of an answer with ids that no call before them has. The server's own are not used: it may give one
    twice, and the chat template of the model here may refuse them."""
    taken = {call.id for message in messages for call in message.tool_calls}
    made: list[m.ToolCall] = []
    for call in calls:
        call_id = ""
        while not call_id or call_id in taken:
            call_id = "".join(secrets.choice(toolchecks.CALL_ID_CHARS) for _ in range(toolchecks.CALL_ID_LENGTH))
        taken.add(call_id)
        made.append(m.ToolCall(call_id, call.name, call.arguments))
    return tuple(made)
