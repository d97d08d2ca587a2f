"""Calls of tools: how a model writes them, and what a request may ask for.

A model has learned one syntax for calls, and its chat template shows it. So the template is rendered with calls whose
names and arguments are known, and the text around these is the syntax. No list of models is needed. A template that
shows no calls, or no JSON in them, gets a syntax of our own: the tools are described in the system message, calls are
part of the text of the assistant, and results are messages of the user.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from frameshard.engine.chat import ChatTemplate
from frameshard.engine.forms import Form
from frameshard.errors import BadArgument, Unsupported
from frameshard.records import record
from frameshard.wire import messages as m
from frameshard.wire.toolchecks import CALL_ID_LENGTH, call_id_of, check_message, schema_of

_MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")  # a mark with which calls may begin, such as <tool_call>
_WORD_MARK = r"<[^<>\s]+>|\[[^\[\]\s]+\]"  # a mark that is one word

Message = dict[str, Any]
"""A message, tool or call in the form that chat templates take."""


@record
class CallSyntax:
    """The text around the names and arguments of the calls in an answer.

    :param begin: before the first name.
    :param between: between a name and its arguments.
    :param join: between the arguments of a call and the name of the next; empty if an answer has only one call.
    :param end: after the last arguments.
    :param native: the chat template renders tools, calls and results.
    :param text_arguments: the chat template takes arguments as text, not as an object.
    :param braces: the chat template writes the outer braces of arguments that it takes as text.
    """

    begin: str
    between: str
    join: str
    end: str
    native: bool = True
    text_arguments: bool = False
    braces: bool = False

    @property
    def trigger(self) -> str:
        """The beginning of :attr:`begin` that does not occur in the text of an answer: a call follows it."""
        mark = _MARK.match(self.begin)
        return mark[0] if mark else self.begin

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Returns the text of calls.

        :param calls: the name and the arguments of each.
        """
        texts = (f"{name}{self.between}{arguments}" for name, arguments in calls)
        return self.begin + (self.join or self.end + self.begin).join(texts) + self.end


OWN = CallSyntax(
    begin='<tool_call>\n{"name": "',
    between='", "arguments": ',
    join='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
    native=False,
)
"""The syntax for models without one: that of Hermes, which many models have seen."""

RESULT = "<tool_response>", "</tool_response>"
"""Around the result of a call, in our own syntax."""


# ---- what a request asks for -----------------------------------------------------------------------------------------


def form(
    tools: Sequence[m.Tool], choice: str, syntax: CallSyntax, with_marks: Callable[[str], list[tuple[str, int | None]]]
) -> Form:
    """The form of an answer that may have calls.

    :param with_marks: divides a text into texts and marks: see :meth:`Tokenizer.with_marks`.
    :raises BadArgument: as :func:`~frameshard.wire.toolchecks.schema_of`.
    """
    first = with_marks(syntax.begin)[:1]
    if first[0][1] is None:
        first = [(syntax.trigger, None)]
    ((trigger, _),) = first
    spec = {
        "tools": [(tool.name, json.dumps(schema_of(tool))) for tool in tools],
        "choice": choice,
        "max_calls": m.MAX_CALLS,
        "trigger": trigger,
        "syntax": {
            "trigger": first,
            "begin": with_marks(syntax.begin[len(trigger) :]),
            "between": with_marks(syntax.between),
            "join": with_marks(syntax.join),
            "end": with_marks(syntax.end),
        },
    }
    return Form("tools", json.dumps(spec))


def _for_template(tools: Sequence[m.Tool]) -> list[Message]:
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": schema_of(tool)},
        }
        for tool in tools
    ]


def chat(
    messages: Iterable[m.ChatMessage], tools: Sequence[m.Tool], syntax: CallSyntax | None, apart: Callable[[str], str]
) -> tuple[list[Message], list[Message] | None]:
    """The messages and tools in the form that the chat template takes.

    :param syntax: None if there are neither tools nor calls.
    :param apart: changes each text that comes from outside.
    :returns: the messages, and the tools for the template.
    :raises BadArgument: a call, a result or a schema is wrong.
    """
    rendered: list[Message] = []
    names: dict[str, str] = {}  # of the calls so far, by id
    for message in messages:
        check_message(message, names)
        names |= {call.id: call.name for call in message.tool_calls}
        content = apart(message.content)
        if syntax is None or not (message.tool_calls or message.role == "tool"):
            rendered.append({"role": message.role, "content": content})
        elif syntax.native and message.role == "tool":
            call_id = message.tool_call_id
            rendered.append(_result(_shown_id(call_id), names[call_id], content))
        elif syntax.native:
            rendered.append({"role": message.role, "content": content, "tool_calls": _calls(message, syntax, apart)})
        elif message.role == "tool":
            _add_own_result(rendered, content)
        else:
            calls = syntax.written([(call.name, apart(call.arguments)) for call in message.tool_calls])
            rendered.append({"role": message.role, "content": "\n".join(filter(None, (content, calls)))})
    if syntax is None or not tools:
        return rendered, None
    described = [_through(apart, tool) for tool in _for_template(tools)]
    if syntax.native:
        return rendered, described
    system = rendered.pop(0)["content"] if rendered[0]["role"] == "system" else ""
    first = {"role": "system", "content": "\n\n".join(filter(None, (system, _described(described))))}
    return [first, *rendered], None


def _add_own_result(rendered: list[Message], content: str) -> None:
    """Adds a result in our own syntax. The results of one answer are one message."""
    result = f"{RESULT[0]}\n{content}\n{RESULT[1]}"
    if rendered[-1]["role"] == "user":
        rendered[-1]["content"] += "\n" + result
    else:
        rendered.append({"role": "user", "content": result})


def _through(apart: Callable[[str], str], value: Any) -> Any:
    """A JSON value with all its texts changed."""
    if isinstance(value, str):
        return apart(value)
    if isinstance(value, dict):
        return {apart(key): _through(apart, each) for key, each in value.items()}
    return [_through(apart, each) for each in value] if isinstance(value, list) else value


def _calls(message: m.ChatMessage, syntax: CallSyntax, apart: Callable[[str], str]) -> list[Message]:
    def arguments(text: str) -> Any:
        if not syntax.text_arguments:
            try:
                return _through(apart, json.loads(text))
            except ValueError:
                most = sys.get_int_max_str_digits()
                raise BadArgument(
                    f"messages: the arguments of a call have an integer of more than {most} digits, which the chat "
                    "template of this model cannot show: leave the call out",
                    field="messages",
                ) from None
        return apart(text.strip()[1:-1] if syntax.braces else text)

    return [_call(_shown_id(call.id), call.name, arguments(call.arguments)) for call in message.tool_calls]


def _shown_id(call_id: str) -> str:
    """The id of a call in a prompt. Programs and other servers may make ids of any form, and templates of Mistral
    accept only ones like ours."""
    is_like_ours = len(call_id) == CALL_ID_LENGTH and call_id.isascii() and call_id.isalnum()
    return call_id if is_like_ours else call_id_of(call_id)


def _call(call_id: str, name: str, arguments: object) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(call_id: str, name: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _described(tools: Sequence[Message]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = OWN.written([("NAME", "{...}")])
    return (
        "You can call functions. Each line describes one, with the JSON schema of its arguments:\n"
        f"{lines}\n"
        f"To call a function, end the answer with its name and arguments, in this form:\n{example}\n"
        f"The result follows in {RESULT[0]}{RESULT[1]}."
    )


# ---- the syntax of a model -------------------------------------------------------------------------------------------

_PROBE_NAMES = "probe_first_tool", "probe_second_tool"
_PROBE_IDS = "probe0001", "probe0002"  # some templates accept only nine letters and digits
_PROBE_ARGUMENTS: tuple[dict[str, Any], ...] = ({"probe_key": "first value"}, {"probe_key": "second value"})
_PROBE_TEXT, _PROBE_WORDS, _PROBE_RESULT = "Probe text.", "Probe description.", "Probe result."
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": _PROBE_WORDS,
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
        },
    }
    for name in _PROBE_NAMES
]
_WITH_TOOLS: Message = {"tools": _PROBE_TOOLS}
_USER: Message = {"role": "user", "content": "Probe question?"}
_ID = "|".join(_PROBE_IDS)
_ID_FIELD = re.compile(rf',\s*"id":\s*"(?:{_ID})"|"id":\s*"(?:{_ID})",\s*|(?:{_WORD_MARK})(?:{_ID})')


def find_syntax(template: ChatTemplate, ends: Sequence[str], closing: str = "") -> CallSyntax:
    """Returns the syntax of calls that a chat template shows; :data:`OWN` if it shows none, or one whose calls cannot
    follow where the text of an answer begins.

    :param ends: the texts of the tokens that end an answer.
    :param closing: the text that ends a thought and begins the answer; empty if the model does not think.
    :raises Unsupported: it shows none, and it drops or refuses system messages.
    """
    for text_arguments in (False, True):
        syntax = _shown(template, ends, closing.strip(), text_arguments=text_arguments)
        if syntax is not None:
            return syntax
    system = _rendered(template, [{"role": "system", "content": _PROBE_WORDS}, _USER], tools={})
    if system is None or _PROBE_WORDS not in system:
        raise Unsupported("no tools with this model: its chat template shows none, and takes no system message")
    return OWN


def _shown(template: ChatTemplate, ends: Sequence[str], closing: str, *, text_arguments: bool) -> CallSyntax | None:
    calls = [
        _call(call_id, name, json.dumps(arguments) if text_arguments else arguments)
        for call_id, name, arguments in zip(_PROBE_IDS, _PROBE_NAMES, _PROBE_ARGUMENTS, strict=True)
    ]
    plain = _rendered(template, [_USER, {"role": "assistant", "content": _PROBE_TEXT}], open_answer=False)
    before, _, after = (plain or "").rpartition(_PROBE_TEXT)
    one = _parts(template, before, calls[:1])
    if one is None or not _takes_results(template, calls[0]):
        return None
    header, begin, between, end = one[0], one[1].lstrip(), one[2], _without_turn_end(one[3], ends)
    if not begin or any(call_id in part for call_id in _PROBE_IDS for part in (begin, between, end)):
        return None
    two = _parts(template, before, calls)
    same = two is not None and [two[1].lstrip(), two[2], two[4]] == [begin, between, between]
    join = two[3] if two is not None and same and _without_turn_end(two[5], ends) == end else ""
    syntax = CallSyntax(begin, between, join, end, text_arguments=text_arguments)
    if syntax.trigger in after or (header and closing.endswith(header)):
        return None  # a text also ends with the trigger, or a call would stand where the end of a thought begins a text
    if between.endswith("{") and end.startswith("}"):
        return replace(syntax, between=between[:-1], join=join[1:], end=end[1:], braces=True)
    return syntax


def _parts(template: ChatTemplate, before: str, calls: Sequence[Message]) -> list[str] | None:
    """What the template writes before a text, if not before calls; and the text before, between and after the names and
    arguments of calls.

    :param before: the same conversation up to a text in place of the calls.
    """
    answer: Message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    text = _rendered(template, [_USER, answer], open_answer=False)
    if text is None or not before or _PROBE_WORDS not in text:
        return None
    at = _answer_at(text, before, _rendered(template, [_USER]))
    parts: list[str] = [before[at:].strip()]
    for call, arguments in zip(calls, _PROBE_ARGUMENTS, strict=False):
        name = call["function"]["name"]
        found = text.find(name, at)
        json_at = _find_json(text, found + len(name), arguments)
        if found < 0 or json_at is None:
            return None
        parts += [text[at:found], text[found + len(name) : json_at[0]]]
        at = json_at[1]
    return [_ID_FIELD.sub("", part) for part in (*parts, text[at:])]


def _answer_at(text: str, before: str, prompt: str | None) -> int:
    """Where the answer begins in the text of a conversation. No mark is cut.

    :param before: the same conversation up to another answer.
    :param prompt: the prompt for an answer.
    """
    at = _common(text, before)
    if prompt is not None and text.startswith(prompt):
        at = max(at, len(prompt))
    marks = re.finditer(_WORD_MARK, text)
    return next((mark.start() for mark in marks if mark.start() < at < mark.end()), at)


def _takes_results(template: ChatTemplate, call: Message) -> bool:
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = _result(call["id"], call["function"]["name"], _PROBE_RESULT)
    return _PROBE_RESULT in (_rendered(template, [_USER, assistant, result]) or "")


def _rendered(
    template: ChatTemplate, messages: list[Message], *, tools: Message = _WITH_TOOLS, open_answer: bool = True
) -> str | None:
    """The text of messages; None if the template refuses them.

    :param tools: the variable of the template that has tools, if there are any.
    """
    try:
        return template.render(messages, {**tools, "add_generation_prompt": open_answer})
    except BadArgument:
        return None


def _common(one: str, other: str) -> int:
    """The length of the beginning that both texts have."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)


def _find_json(text: str, at: int, value: object) -> tuple[int, int] | None:
    """Where ``value`` stands in a text, as JSON."""
    decoder = json.JSONDecoder()
    while (at := text.find("{", at)) >= 0:
        try:
            found, end = decoder.raw_decode(text, at)
        except ValueError:
            found, end = None, at
        if found == value:
            return at, end
        at += 1
    return None


def _without_turn_end(text: str, ends: Sequence[str]) -> str:
    """Cuts a text at the first token that ends an answer."""
    found = [at for end in ends if end and (at := text.find(end)) >= 0]
    return text[: min(found, default=len(text))].rstrip()
