"""Turns the body of an OpenAI request into what the sidecar is asked.

Every field is used, refused by name, or one of :data:`IGNORED`. A field that is null or an empty list counts as
missing.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from frameshard.errors import ContextOverflow
from frameshard.http.refusal import Refusal, bad, unsupported
from frameshard.tools import Tool
from frameshard.wire import checks, codec
from frameshard.wire import messages as m

CONVERSATION_HEADER = "x-frameshard-conversation"
PRIORITY_HEADER = "x-frameshard-priority"
LOCAL_HEADER = "x-frameshard-local-only"
"""Keeps a job in the sidecar. A sidecar whose fallback server this is sends it, so that no job goes in circles."""

IGNORED = frozenset(
    {"model", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prediction"}
    | {"cache_prompt", "id_slot", "mirostat_eta", "mirostat_tau"}
)
"""They do not change the answer. `model`: one model is loaded, and the response names it. The last ones are those of
llama.cpp's server."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "functions": (),
    "function_call": ("none", "auto"),
    "audio": (),
    "web_search_options": (),
    "verbosity": (),
    "dimensions": (),
    "grammar": ("",),
    "mirostat": (0,),
}
"""Fields of things that are not built, with the values that do not ask for them."""

NOT_SAMPLING = frozenset({"json_schema", "logit_bias", "max_tokens", "stop"})
"""Fields of :class:`frameshard.Sampling` that OpenAI has in another form."""

SAMPLING = frozenset(checks.fields_of(m.Sampling)) - NOT_SAMPLING
"""Fields of :class:`frameshard.Sampling` that may be given under their own names."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
REASONING_FORMATS = ("auto", "deepseek", "none")
"""Where llama.cpp's server puts the thought. Here it has a field of its own, as with the first two."""

LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
"""Fields that limit the length of the answer."""

MESSAGE_FIELDS = frozenset({"role", "content"})
OF_ROLES = {
    "assistant": MESSAGE_FIELDS | {"reasoning_content", "tool_calls"},
    "tool": MESSAGE_FIELDS | {"tool_call_id", "name"},
}
"""Fields of messages. The thought in `reasoning_content` is dropped, because thoughts of earlier answers are not part
of a prompt; so is the `name` of a tool, which its call has."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TOOL_FIELDS = frozenset({"name", "description", "parameters", "strict"})
COMMON = frozenset(
    {"logit_bias", "max_tokens", "stop", "stream", "stream_options", "user", *SAMPLING, *IGNORED, *NEUTRAL}
)
THOUGHT = frozenset({"reasoning_effort", "chat_template_kwargs", "reasoning_format", "thinking_tokens"})
TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CHAT = COMMON | THOUGHT | TOOLS | {"messages", "max_completion_tokens", "response_format"}
EMBEDDINGS = frozenset({"input", "model", "encoding_format", "dimensions", "user"})
MAX_TEXTS = 2048
"""To embed in one request."""

MAX_MESSAGES = codec.CLIENT.array
MAX_VALUES = 100_000
"""In one body. A large body of small values takes a hundred times its size, and seconds in which nobody is answered."""

COMPLETION = COMMON | {"prompt"}

Document = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a request asks the sidecar for.

    :param messages: of a chat; empty for a completion.
    :param thought: `thinking`, `thinking_tokens` and `template_keywords` of the job.
    :param max_calls: further calls of the answer are left out.
    :param limited: the length of the answer is what the client has asked for.
    :param stream: the answer is sent as it is generated.
    :param usage: a stream ends with the number of tokens.
    """

    messages: tuple[m.ChatMessage, ...]
    prompt: str
    images: tuple[bytes, ...]
    sampling: m.Sampling
    thought: Document
    tools: tuple[Tool, ...]
    tool_choice: str
    max_calls: int
    limited: bool
    conversation: str | None
    priority: int
    local_only: bool
    stream: bool
    usage: bool


def parse(body: bytes) -> Document:
    """Reads a JSON object. Fields that are null or empty lists are left out.

    :raises Refusal: it is anything else, or has more than :data:`MAX_VALUES` values.
    """
    if _has_too_many_values(body):
        raise Refusal(413, f"the body has more than {MAX_VALUES} values", "request_too_large")
    try:
        document = json.loads(body.decode(), parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False).encode()  # refuses half a surrogate pair, which JSON can escape
    except RecursionError:
        raise bad("the body is nested too deeply") from None
    except ValueError as error:
        raise bad(f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(document, dict):
        raise bad("the body must be a JSON object")
    return _present(document)


def _has_too_many_values(body: bytes) -> bool:
    """Counts what separates values, and only if these are many, without those in strings."""

    def separates_many(data: bytes) -> bool:
        return sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES

    if not separates_many(body):
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # each quote that is left begins or ends a string
    most_quotes = 4 * (MAX_VALUES + 1)  # each value may be a string and have a name
    return bare.count(b'"') > most_quotes or separates_many(b"".join(bare.split(b'"')[::2]))


def read(document: Document, headers: Mapping[str, str], *, chat: bool, n_ctx: int, thinks: bool = False) -> Asked:
    """Turns a parsed body into what the sidecar is asked.

    :param headers: of the HTTP request, by their names in small letters.
    :param chat: the body is of ``/v1/chat/completions``, else of ``/v1/completions``.
    :param n_ctx: the context in tokens; an answer without a limit gets a quarter of it, or what is free: see
        :func:`shortened`.
    :param thinks: the model can think before it answers.
    :raises Refusal: a field is wrong, unknown, or asks for something that is not built.
    """
    _check_names(document, CHAT if chat else COMPLETION)
    messages, images = _messages(document.get("messages")) if chat else ((), ())
    stream = _flag(document, "stream")
    options = document.get("stream_options")
    if options is not None and not stream:
        raise bad("stream_options is for requests with stream", "stream_options")
    name = headers.get(CONVERSATION_HEADER)
    conversation, named_by = (_utf8(name), CONVERSATION_HEADER) if name else (document.get("user"), "user")
    tools = _tools(document.get("tools", []))
    sampling = _sampling(document, n_ctx)
    if tools and sampling.json_schema:
        raise unsupported("an answer with tools has no other form: leave response_format out", "response_format")
    return Asked(
        messages=messages,
        prompt="" if chat else _prompt(document.get("prompt")),
        images=images,
        sampling=sampling,
        tools=tools,
        tool_choice=_tool_choice(document.get("tool_choice", "auto"), [tool.name for tool in tools]),
        max_calls=m.MAX_CALLS if _flag(document, "parallel_tool_calls", True) else 1,
        limited=not LIMITS.isdisjoint(document),
        thought=_thought(document, thinks) if chat else {},
        conversation=_checked("conversation", conversation, named_by),
        priority=_priority(headers.get(PRIORITY_HEADER)),
        local_only=headers.get(LOCAL_HEADER) is not None,
        stream=stream,
        usage=options is not None and _usage(options),
    )


def shortened(asked: Asked, error: ContextOverflow) -> Asked:
    """The request with a shorter answer, if the client has set no limit.

    :param error: prompt and answer do not fit into the context.
    :raises ContextOverflow: the client has set a limit, or the prompt leaves no room for an answer.
    """
    n_prompt, n_ctx = error.detail.get("n_prompt"), error.detail.get("n_ctx")
    if asked.limited or not isinstance(n_prompt, int) or not isinstance(n_ctx, int):
        raise error
    n_free = n_ctx - n_prompt
    if not 0 < n_free < asked.sampling.max_tokens:
        raise ContextOverflow(
            f"a prompt of at least {n_prompt} tokens leaves no room for an answer in the {n_ctx} tokens of a "
            "conversation: shorten the prompt, or launch with a larger n_ctx (--ctx on the command line)",
            **error.detail,
        )
    return dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, max_tokens=n_free))


@dataclass(frozen=True)
class Texts:
    """Texts to embed.

    :param base64: the rows are wanted as base64.
    """

    texts: tuple[str, ...]
    base64: bool


def read_embeddings(document: Document) -> Texts:
    """Reads the body of ``/v1/embeddings``.

    :raises Refusal: as :func:`read`.
    """
    _check_names(document, EMBEDDINGS)
    given = document.get("input", ())
    texts = given if isinstance(given, list) else [given]
    if not 0 < len(texts) <= MAX_TEXTS or not all(isinstance(text, str) and text for text in texts):
        raise bad(f"input must be one to {MAX_TEXTS} texts, none of them empty; tokens are not read", "input")
    for at, text in enumerate(texts):
        if len(text.encode()) > codec.CLIENT.string:
            raise bad(f"input[{at}] has more than {codec.CLIENT.string} bytes: embed it in parts", "input")
    form = document.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise bad("encoding_format must be float or base64", "encoding_format")
    return Texts(tuple(texts), form == "base64")


def _check_names(document: Document, known: frozenset[str]) -> None:
    for name, value in document.items():
        if name not in known:
            raise Refusal(400, f"Unrecognized request argument supplied: {name}", "unknown_parameter", name)
        if name in NEUTRAL and not any(_is(value, neutral) for neutral in NEUTRAL[name]):
            raise unsupported(f"{name} is not supported by this server: leave it out", name)


def _is(value: object, other: object) -> bool:
    """Equality of JSON values: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _sampling(document: Document, n_ctx: int) -> m.Sampling:
    fields = {name: document[name] for name in SAMPLING & document.keys()}
    limit = "max_completion_tokens" if "max_completion_tokens" in document else "max_tokens"
    fields["max_tokens"] = document.get(limit, max(1, n_ctx // 4))
    stop = document.get("stop", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else stop
    fields["logit_bias"] = _biases(document.get("logit_bias", {}))
    if "response_format" in document:
        fields["json_schema"] = _schema(document["response_format"])
    try:
        return checks.convert(m.Sampling, fields)
    except checks.Refused as refused:
        names = {"max_tokens": limit, "json_schema": "response_format", "bias": "logit_bias", "token": "logit_bias"}
        name = names.get(refused.field, refused.field)
        hint = "; it is one string or a list of strings" if name == "stop" else ""
        raise bad(f"{refused}{hint}", name) from None


def _thought(document: Document, thinks: bool) -> Document:
    """Whether and how long the model thinks, and what its chat template is told."""
    effort = document.get("reasoning_effort", "none")
    if effort not in EFFORTS:
        raise bad(f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort")
    if effort != "none" and not thinks:
        raise unsupported("the model does not think: leave reasoning_effort out", "reasoning_effort")
    keywords = document.get("chat_template_kwargs", {})
    if not isinstance(keywords, dict) or not isinstance(keywords.get("enable_thinking", False), bool):
        raise bad(
            "chat_template_kwargs must be an object, and enable_thinking in it true or false", "chat_template_kwargs"
        )
    # A template ignores a variable that it does not know, so enable_thinking is no fault for a model that cannot think.
    thinking = thinks and keywords.get("enable_thinking", effort != "none")
    told = {name: value for name, value in keywords.items() if name != "enable_thinking"}
    if effort != "none":
        told.setdefault("reasoning_effort", effort)
    where = document.get("reasoning_format", "auto")
    if where not in REASONING_FORMATS or (where == "none" and thinking):
        raise unsupported("the thought comes as reasoning_content: leave reasoning_format out", "reasoning_format")
    return {
        "thinking": "shown" if thinking else "off",
        "thinking_tokens": _checked("thinking_tokens", document.get("thinking_tokens", 0), "thinking_tokens"),
        "template_keywords": _checked(
            "template_keywords", json.dumps(told, ensure_ascii=False) if told else "", "chat_template_kwargs"
        ),
    }


def _biases(given: object) -> list[Document]:
    """OpenAI has a map from ids of tokens to biases."""
    if not isinstance(given, dict) or not all(re.fullmatch("[0-9]{1,10}", token) for token in given):
        raise bad("logit_bias must be an object whose names are ids of tokens", "logit_bias")
    return [{"token": int(token), "bias": bias} for token, bias in given.items()]


def _schema(form: object) -> str:
    """The JSON schema that ``response_format`` asks for; empty for text."""
    match form:
        case {"type": "text", **rest} if not rest:
            return ""
        case {"type": "json_object", **rest} if not rest:
            return '{"type":"object"}'
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    raise bad(
        'response_format is {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        "response_format",
    )


def _messages(given: object) -> tuple[tuple[m.ChatMessage, ...], tuple[bytes, ...]]:
    if not isinstance(given, list) or len(given) > MAX_MESSAGES or not all(isinstance(each, dict) for each in given):
        raise bad(f"messages must be a list of one to {MAX_MESSAGES} objects", "messages")
    read = [_message(_present(each), f"messages[{i}]", last=i == len(given) - 1) for i, each in enumerate(given)]
    messages = _checked("messages", [message for message, _ in read], "messages")
    return messages, tuple(image for _, images in read for image in images)


def _message(given: Document, where: str, *, last: bool) -> tuple[Document, list[bytes]]:
    """The fields of a message, and its images."""
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    for name in given.keys() - OF_ROLES.get(role, MESSAGE_FIELDS):
        raise unsupported(f"{where}.{name} is not supported by this server: leave it out", f"{where}.{name}")
    text, images = _content(given, where, last=last and role == "user")
    message: Document = {"role": ROLES[role], "content": text}
    if role == "tool":
        if not given.get("tool_call_id"):
            raise bad(f"{where}.tool_call_id is missing: the id of the call", f"{where}.tool_call_id")
        message["tool_call_id"] = given["tool_call_id"]
    if "tool_calls" in given:
        message["tool_calls"] = _calls(given["tool_calls"], f"{where}.tool_calls")
    return message, images


def _calls(given: object, where: str) -> list[Document]:
    calls = []
    for each in given if isinstance(given, list) else [given]:
        match each:
            case {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}:
                calls.append({"id": id, "name": name, "arguments": arguments})
            case _:
                raise bad(f'{where} must be {{"id", "type": "function", "function": {{"name", "arguments"}}}}', where)
    return calls


def _tools(given: object) -> tuple[Tool, ...]:
    if not isinstance(given, list) or len(given) > m.MAX_TOOLS:
        raise bad(f"tools must be a list of at most {m.MAX_TOOLS} objects", "tools")
    tools = tuple(_tool(each, f"tools[{i}]") for i, each in enumerate(given))
    _checked("tools", [dataclasses.asdict(tool.wire()) for tool in tools], "tools")
    return tools


def _tool(given: object, where: str) -> Tool:
    """A tool. Calls always match its schema, so `strict` changes nothing."""
    match given:
        case {"type": "function", "function": {"name": str(name)} as function}:
            function = _present(function)
        case _:
            raise bad(
                f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}', where
            )
    for field in function.keys() - TOOL_FIELDS:
        raise unsupported(f"{where}.function.{field} is not supported by this server: leave it out", where)
    description, schema = function.get("description", ""), function.get("parameters", {})
    if not isinstance(description, str) or not isinstance(schema, dict):
        raise bad(f"{where}: description must be a text and parameters an object", where)
    return Tool(name, description, schema or "")


def _tool_choice(given: object, tools: list[str]) -> str:
    """As the sidecar has it.

    :param tools: names of the tools.
    """
    match given:
        case "auto" | "none":
            return str(given) if tools else "auto"
        case "required" if tools:
            return "required"
        case {"type": "function", "function": {"name": str(name)}} if name in tools:
            return name
    raise bad(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}, with the '
        "name of one of the tools",
        "tool_choice",
    )


def _content(given: Document, where: str, *, last: bool) -> tuple[str, list[bytes]]:
    """The text of a message, and its images and sounds.

    :param last: it may have images and sounds.
    """
    content = given.get("content", "")
    if isinstance(content, str):
        return content, []
    texts, images = [], []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}.content[{i}]"
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}} if last:
                images.append(_image(url, f"{place}.image_url"))
            case {"type": "input_audio", "input_audio": {"data": str(data)}} if last:
                images.append(_binary(data, f"{place}.input_audio", "data is not base64"))
            case {"type": "image_url" | "input_audio"} if not last:
                raise unsupported("images and sounds are read in the last message only: leave earlier ones out", place)
            case _:
                raise bad(f"{place} must be a text, an image_url with a url or an input_audio with data", place)
    return "\n".join(texts), images


def _image(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise bad("an image must be a data URL, data:image/png;base64,...: this server fetches nothing", where)
    return _binary(data, where, "the data URL is not base64")


def _binary(data: str, where: str, complaint: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise bad(complaint, where) from None


def _prompt(given: object) -> str:
    if isinstance(given, list) and len(given) == 1:
        given = given[0]
    if not isinstance(given, str) or not given:
        raise bad("prompt must be one string, not empty", "prompt")
    return str(_checked("prompt", given, "prompt"))


def _utf8(header: str) -> str:
    """The text of a header. Headers are read as Latin-1, so this decodes the bytes that were sent."""
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        raise bad(f"the header {CONVERSATION_HEADER} must be UTF-8", CONVERSATION_HEADER) from None


def _priority(header: str | None) -> int:
    if header is None:
        return m.Submit.priority
    if header not in [str(number) for number in range(m.MAX_PRIORITY + 1)]:
        raise bad(f"the header {PRIORITY_HEADER} must be a number from 0 to {m.MAX_PRIORITY}", PRIORITY_HEADER)
    return int(header)


def _usage(options: object) -> bool:
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise bad('stream_options must be {"include_usage": true}', "stream_options")
    return _flag(_present(options), "include_usage")


def _flag(document: Document, name: str, default: bool = False) -> bool:
    value = document.get(name, default)
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false", name)
    return value


def _checked(field: str, value: object, param: str) -> Any:
    """The value of a field of a job, checked as the protocol does."""
    try:
        return checks.fields_of(m.Submit)[field].check.take(value, True)
    except checks.Refused as refused:
        raise bad(f"{param}: {refused}", param) from None


def _present(document: Document) -> Document:
    return {name: value for name, value in document.items() if value is not None and value != []}


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON value")
