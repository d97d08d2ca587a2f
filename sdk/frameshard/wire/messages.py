"""The protocol: one frozen dataclass for each message, checked in both directions.

This file is the source of everything that mirrors the protocol. The annotation of a field has its check
(:mod:`frameshard.wire.checks`) and one line of text. ``make generate`` writes bindings/generated-manifest.json from
them, and from that the tables of bindings/PROTOCOL.md and the declarations of the bindings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from frameshard.errors import BadArgument, BadMessage, FrameshardError, VersionMismatch, from_wire
from frameshard.records import record
from frameshard.wire import checks, codec
from frameshard.wire.checks import Bytes, Count, Id, Name, Seconds, Text, Tokens

VERSION = 1
"""Of the protocol. A sidecar must have at least the version that a client was written for."""

FEATURES: tuple[str, ...] = ()
"""What this version has beyond the first: names that bindings/PROTOCOL.md lists under "Features"."""

MAX_WINDOW = 256
"""Events that may be under way to a client for one job."""
MAX_NAME_BYTES = 512
"""The longest name of a conversation. In game engines it may be the path of an object."""

# ---- fields that many messages have ---------------------------------------------------------------------------------

RequestId = Annotated[Id, "Number of the request; its answer has the same number."]
Epoch = Annotated[Id, "Number of the sidecar's launch."]
Job = Annotated[Id, "Number of the job."]
Seq = Annotated[Count, "Number of the event within its job, from 0 without gaps."]
Timeline = Annotated[Count, "The `timeline` that the job was submitted with."]
ConversationName = Annotated[str, checks.text(MAX_NAME_BYTES, least=1)]
FilePath = Annotated[str, checks.path(least=1)]
Features = Annotated[tuple[Annotated[str, checks.text(64, least=1)], ...], 64]

# ---- records inside messages ----------------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant", "tool"]
StopString = Annotated[str, checks.text(256, least=1)]
MAX_PRIORITY = 2
Priority = Annotated[int, checks.integer(0, MAX_PRIORITY)]
Choice = Annotated[str, checks.text(4096, least=1)]
EmbedText = Annotated[str, checks.text(codec.CLIENT.string, least=1)]
AdapterName = Annotated[str, checks.text(64, least=1), "Name of the adapter."]
Breaker = Annotated[str, checks.text(40, least=1)]
Kind = Literal["chat", "completion"]
Reason = Literal["stop", "length", "tool_calls"]
EngineState = Literal["loading", "ready", "restarting", "hibernated", "off"]
LeaseState = Literal["active", "parked", "hibernated"]
Decision = Literal["granted", "partial"]
NoticeKind = Literal["wants", "gives_back", "late", "pressure", "other_process", "state", "http", "host_pressure"]
Mode = Literal["planned", "stream_only"]
SchedulingMode = Literal["prioritize_graphics", "balance", "prioritize_compute"]
ImageFormat = Literal["encoded", "rgb", "rgba"]
Phase = Literal["encode", "prefill"]
LoadingStage = Literal["read", "profile", "fill"]
Thinking = Literal["off", "hidden", "shown"]

MAX_TEMPLATE_KEYWORDS = 8192
"""Bytes of a job's template keywords."""

MAX_KV_DETAIL = 400
"""Bytes of the text that says why there is no KV cache."""

MAX_NOTICE_DETAIL = 200
"""Bytes of the text of a notice."""

MAX_IMAGES = 8
"""Of one job."""

MAX_ADAPTERS = 16
"""That are loaded."""

MAX_JOB_ADAPTERS = 2
"""Of one job. With more, the order in which llama.cpp adds them up, and so the last bits, would depend on addresses."""

MAX_TEXTS = 64
"""Of one embed. The rows of an encoder with 4,096 dimensions then fit into one message."""

MAX_TOOLS = 64
"""Of one job."""

MAX_CALLS = 16
"""Of tools, in one answer."""

MAX_INLINE_BYTES = 900_000
"""Of an image inside a message; larger ones are read from shared memory."""

MAX_IMAGE_BYTES = 64 << 20
"""Of one image, wherever it is read from."""


@record
class Tool:
    """A function of the program that the model may call."""

    name: Annotated[
        str,
        checks.text(64, least=1),
        "Name of the tool: letters, digits, `_` and `-`; not `auto`, `required` or `none`.",
    ]
    description: Annotated[Text, "What the tool does and when to use it, for the model."] = ""
    schema: Annotated[Text, "JSON schema of the arguments, which are an object; empty: the tool has no arguments."] = ""


@record
class ToolCall:
    """A call of a tool, in an answer of the model."""

    id: Annotated[str, checks.text(64, least=1), "Id of the call, which its result repeats."]
    name: Annotated[str, checks.text(64, least=1), "Name of the tool."]
    arguments: Annotated[Text, "The arguments as JSON: an object that matches the tool's schema."]


@record
class ChatMessage:
    """One turn of a conversation."""

    role: Annotated[Role, "Who wrote the message. `tool`: it is the result of a call."]
    content: Annotated[
        Text,
        "The text. Control tokens written out in it, such as <|im_end|>, are plain text; in a job with images they are"
        " refused.",
    ]
    tool_calls: Annotated[
        tuple[ToolCall, ...], MAX_CALLS, "The calls of an `assistant` message, which come after its text."
    ] = ()
    tool_call_id: Annotated[
        str, checks.text(64), "Id of the call that a `tool` message is the result of; else empty."
    ] = ""


@record
class Image:
    """An image or a sound. Its bytes are `data`, or the first `size` bytes of the shared memory at `path`."""

    format: Annotated[
        ImageFormat,
        "`encoded`: a PNG or JPEG file, or a sound as a WAV or MP3 file. `rgb`, `rgba`: rows of pixels from top to"
        " bottom, 8 bits a channel; alpha is ignored.",
    ]
    data: Annotated[bytes, checks.binary(MAX_INLINE_BYTES), "The bytes of the image; empty if `path` is given."] = b""
    path: Annotated[
        str, checks.path(), "Path of shared memory that begins with the bytes; empty if `data` is given."
    ] = ""
    size: Annotated[int, checks.integer(0, MAX_IMAGE_BYTES, "bytes"), "Number of bytes at `path`."] = 0
    width: Annotated[int, checks.integer(0, 1 << 16, "pixels"), "Width of an `rgb` or `rgba` image."] = 0
    height: Annotated[int, checks.integer(0, 1 << 16, "pixels"), "Height of an `rgb` or `rgba` image."] = 0
    stride: Annotated[
        int,
        checks.integer(0, 1 << 24, "bytes"),
        "Bytes from the start of one row to the start of the next; 0: there is no gap between rows.",
    ] = 0


@record
class Adapter:
    """A LoRA adapter of a job."""

    name: AdapterName
    scale: Annotated[
        float, checks.number(-4, 4), "How strongly the adapter changes the model; 1: as it was trained, 0: not at all."
    ] = 1.0


@record
class AdapterInfo:
    """A LoRA adapter that is loaded."""

    name: AdapterName
    size_bytes: Annotated[Bytes, "Size of its weights. They are in VRAM at every budget."]


@record
class LogitBias:
    """Makes a token, or each token of a text, more or less likely. Exactly one of `token` and `text` is set."""

    bias: Annotated[
        float, checks.number(-100, 100), "Added to the logits. -100 in effect bans a token, 100 in effect forces it."
    ]
    token: Annotated[
        Annotated[int, checks.integer(0, (1 << 31) - 1)] | None, "Id of a token; without it, the tokens of `text`."
    ] = None
    text: Annotated[
        str,
        checks.text(256),
        "The bias holds for each token of this text. Most words have one token with a space before it and another one"
        " without it.",
    ] = ""


@record
class Sampling:
    """How tokens are chosen.

    In mode ``stream_only`` the same values, prompt and seed give the same text; with some weights and models only if as
    many other jobs generate meanwhile (docs/characters.md). In mode ``planned`` the plan, speculative decoding and a
    restart of the engine may change the text where two tokens are almost equally likely.
    """

    max_tokens: Annotated[int, checks.integer(1, 1 << 20, "tokens"), "Maximum length of the answer in tokens."] = 256
    temperature: Annotated[float, checks.number(0, 5), "Randomness of the choice; 0: always the most likely token."] = (
        0.8
    )
    top_k: Annotated[int, checks.integer(0, 1 << 20), "Choose only among this many most likely tokens; 0: off."] = 40
    top_p: Annotated[
        float,
        checks.number(0, 1),
        "Choose only among the most likely tokens whose probabilities add up to this value; 1: off.",
    ] = 0.95
    min_p: Annotated[
        float,
        checks.number(0, 1),
        "Choose only among tokens with at least this fraction of the highest probability; 0: off.",
    ] = 0.05
    repeat_penalty: Annotated[
        float, checks.number(0.5, 2), "Above 1, tokens that occur among the last 64 become less likely; 1: off."
    ] = 1.0
    seed: Annotated[
        Annotated[int, checks.integer(0, 2**32 - 1)] | None,
        "Seed of the random numbers; without it the sidecar chooses one.",
    ] = None
    stop: Annotated[tuple[StopString, ...], 16, "Strings that end the answer; they are not part of it."] = ()
    json_schema: Annotated[
        Text,
        "A JSON schema. The answer is JSON that matches it, unless `max_tokens` or `stop` ends the answer early; empty:"
        " off.",
    ] = ""
    frequency_penalty: Annotated[
        float,
        checks.number(-2, 2),
        "Subtracted from a token's logit for each time that the token occurs among the last 64; 0: off.",
    ] = 0.0
    presence_penalty: Annotated[
        float, checks.number(-2, 2), "Subtracted once from a token's logit if the token is among the last 64; 0: off."
    ] = 0.0
    typical_p: Annotated[
        float,
        checks.number(0, 1),
        "Locally typical sampling: choose only among the most typical tokens whose probabilities add up to this value;"
        " 1: off.",
    ] = 1.0
    xtc_probability: Annotated[
        float,
        checks.number(0, 1),
        "XTC sampling: the chance that all tokens above `xtc_threshold`, except the least likely of them, are removed;"
        " 0: off.",
    ] = 0.0
    xtc_threshold: Annotated[
        float, checks.number(0, 0.5), "XTC sampling removes only tokens with at least this probability."
    ] = 0.1
    choices: Annotated[
        tuple[Choice, ...],
        256,
        "The answer is exactly one of these strings. Set at most one of `json_schema`, `choices`, `regex` and `lark`.",
    ] = ()
    regex: Annotated[
        Text, "The whole answer matches this regular expression, in the syntax of Rust's regex crate; empty: off."
    ] = ""
    lark: Annotated[Text, "The answer matches this grammar in llguidance's variant of Lark; empty: off."] = ""
    logit_bias: Annotated[
        tuple[LogitBias, ...],
        256,
        "Tokens that are more or less likely than the model finds them. Several biases of one token add up. An answer"
        " with a form still has it.",
    ] = ()
    dry_multiplier: Annotated[
        float,
        checks.number(0, 100),
        "DRY sampling: a token that would repeat a sequence of n tokens, n at least `dry_allowed_length`, loses"
        " `dry_multiplier` * `dry_base` ^ (n - `dry_allowed_length`) of its logit; 0: off.",
    ] = 0.0
    dry_base: Annotated[float, checks.number(1, 10), "DRY sampling: growth of the penalty with each token."] = 1.75
    dry_allowed_length: Annotated[
        int,
        checks.integer(1, 1024, "tokens"),
        "DRY sampling: shortest repeated sequence whose next token is penalised.",
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        checks.integer(-1, 1 << 20, "tokens"),
        "DRY sampling: how many of the last tokens are searched for repeats; 0: off, -1: the whole context.",
    ] = -1
    dry_sequence_breakers: Annotated[
        tuple[Breaker, ...],
        16,
        "DRY sampling: no sequence goes beyond one of these strings; empty: line break, colon, quotation mark and"
        " asterisk.",
    ] = ()


DEFAULT_SAMPLING = Sampling()


@record
class ErrorInfo:
    """An error as the protocol sends it; :func:`frameshard.errors.from_wire` turns it into an exception."""

    code: Annotated[Count, "Stable number of the error."]
    name: Annotated[str, checks.text(64), "Stable name of the error, for programs."]
    message: Annotated[Text, "A sentence for a person."]
    retriable: Annotated[bool, "True if the same request may succeed later without a change."]
    detail: Annotated[Mapping[str, Any], "Values that belong to the error, such as `floor_bytes`."]

    @classmethod
    def of(cls, error: FrameshardError) -> ErrorInfo:
        """What `error` says. A detail that the protocol cannot carry is left out, so that the error is not lost."""
        detail: dict[str, Any] = {}
        for key, value in error.detail.items():
            try:
                codec.encode({"error": {"detail": {key: value}}})
            except BadArgument:
                continue
            detail[key] = value
        return cls(error.code, error.name, error.message[:4096], error.retriable, detail)

    def exception(self) -> FrameshardError:
        return from_wire(dataclasses.asdict(self))


@record
class ModelInfo:
    """The model that is loaded."""

    name: Annotated[str, checks.text(4096), "The file's name."]
    arch: Annotated[Name, "The model's architecture, as its file has it."]
    device: Annotated[Name, "Name of the device that the model runs on."]
    n_ctx: Annotated[Tokens, "Context length of one conversation in tokens."]
    n_parallel: Annotated[Count, "Number of jobs that run at once."]
    n_vocab: Annotated[Count, "Number of tokens in the vocabulary."]
    n_layer: Annotated[Count, "Number of layers."]
    chat: Annotated[bool, "True if the model has a chat template."]
    floor_bytes: Annotated[Bytes, "The smallest VRAM budget that the model can run in."]
    full_bytes: Annotated[Bytes, "With this VRAM budget all weights are resident."]
    plan: Annotated[
        Mapping[str, Any], "Placements and predicted times at the VRAM budget that the model was loaded with."
    ]
    vision: Annotated[Name, "Name of the vision tower; empty if the model has none."] = ""
    fingerprint: Annotated[
        str,
        checks.text(64),
        "SHA-256 of the size and the header of the model's file and of the first 4 KiB of each tensor, in hex; empty:"
        " not known.",
    ] = ""
    template_fingerprint: Annotated[
        str, checks.text(64), "SHA-256 of the chat template, in hex; empty: the model has none, or it is not known."
    ] = ""
    embedder: Annotated[
        str, checks.text(4096), "The name of the sentence encoder's file; empty: there is none, and `embed` is refused."
    ] = ""
    thinks: Annotated[bool, "True if the model can think before it answers: jobs may set `thinking`."] = False
    passed_over: Annotated[
        str,
        checks.text(4096),
        "Why better devices than `device` were not taken, on a line each; empty: the best was taken, or the launch"
        " named it.",
    ] = ""
    sees: Annotated[bool, "True if jobs may have images: the vision tower reads them."] = False
    hears: Annotated[bool, "True if jobs may have sounds, in the place of images: the vision tower reads them."] = False


@record
class ServerLimits:
    """What this sidecar accepts."""

    message_bytes: Annotated[Bytes, "Size of the largest message."]
    string_bytes: Annotated[Bytes, "Size of the longest string."]
    jobs: Annotated[Count, "Maximum number of unfinished jobs of this client."]
    window: Annotated[Count, "Largest `window` of a job."]
    silent_s: Annotated[Seconds, "A client that stays disconnected for this long loses its jobs."]


@record
class PlanRow:
    """Predictions at one VRAM budget. The sizes hold while tokens are generated."""

    vram_budget_bytes: Annotated[Bytes, "The VRAM budget that was asked about."]
    fits: Annotated[
        bool, "False if the budget is below the floor; then the predictions are missing and the sizes are 0."
    ]
    ttft_s: Annotated[Seconds | None, "Predicted time from the request to the first token of the answer."]
    tokens_per_second: Annotated[
        Annotated[float, checks.number(0, 1e9, "tokens/s")] | None, "Predicted rate at which one job generates tokens."
    ]
    resident_bytes: Annotated[Bytes, "Weights that stay in VRAM."]
    streamed_bytes: Annotated[Bytes, "Weights that are copied to VRAM for each token."]
    cpu_bytes: Annotated[Bytes, "Weights of the shards that the CPU computes."]


# ---- client to broker -----------------------------------------------------------------------------------------------


@record
class Hello:
    """First message of a connection."""

    id: RequestId
    protocol: Annotated[Count, "Protocol version that the client was written for."]
    client: Annotated[str, checks.text(64), "Name of the client, for the sidecar's log."]
    epoch: Annotated[Id | None, "The launch that the client wants to reach; without it, any launch."] = None
    session: Annotated[Id | None, "The session to resume; without it, a new session starts."] = None
    notices: Annotated[bool, "True if the client wants `notice` messages."] = False
    features: Annotated[Features, "Names of the additions to the protocol that the client knows."] = ()


@record
class Submit:
    """Asks for a job."""

    id: RequestId
    epoch: Epoch
    job: Annotated[Id, "Number of the job, chosen by the client and never used again in the session."]
    kind: Annotated[Kind, "A chat has `messages`, a completion a `prompt`."]
    messages: Annotated[tuple[ChatMessage, ...], "Messages of a chat, at least one."] = ()
    prompt: Annotated[Text, "Prompt of a completion, not empty."] = ""
    conversation: Annotated[
        ConversationName | None,
        "Name of the conversation. Its KV cache is kept, so a later prompt that begins with the same messages is"
        " computed faster.",
    ] = None
    sampling: Annotated[Sampling, "How tokens are chosen."] = DEFAULT_SAMPLING
    timeline: Annotated[Count, "A number that each event of the job repeats."] = 0
    window: Annotated[
        int, checks.integer(1, MAX_WINDOW), "Maximum number of events that are sent before the client gives credit."
    ] = 32
    images: Annotated[
        tuple[Image, ...],
        MAX_IMAGES,
        "Images. They are placed before the last message of a chat, or before the prompt.",
    ] = ()
    sentences: Annotated[bool, "Deltas say where sentences end, for text to speech."] = False
    priority: Annotated[
        Priority,
        "0: background, 1: normal, 2: urgent. A job pauses a running job of lower priority if `n_parallel` jobs run; "
        "the paused job continues later, in mode `stream_only` with the same text.",
    ] = 1
    warm_up: Annotated[
        bool,
        "The prompt is only read, so that later jobs whose prompt begins with it need not read it. All other jobs go"
        " first. The job ends with `done` and has no text.",
    ] = False
    adapters: Annotated[
        tuple[Adapter, ...],
        MAX_JOB_ADAPTERS,
        "LoRA adapters, for the whole job. Jobs with equal adapters are computed together, others in turns.",
    ] = ()
    deadline_ms: Annotated[
        int,
        checks.integer(0, 3_600_000),
        "Milliseconds from now to the job's first token. Of jobs of equal priority the one with the earliest deadline"
        " goes first. A job without a token by then fails with `deadline_missed`; 0: no deadline.",
    ] = 0
    thinking: Annotated[
        Thinking,
        "Whether the model thinks before it answers. `off`: it answers at once. `hidden`: it thinks, and the thought is"
        " not sent. `shown`: the thought comes in events `thought`. A thought is in no text. Refused with `unsupported`"
        " if the model does not think.",
    ] = "off"
    thinking_tokens: Annotated[
        int,
        checks.integer(0, 1 << 20, "tokens"),
        "Maximum length of the thought; then it is ended, and the answer begins. 0: no limit but `max_tokens`, which"
        " counts thought and answer.",
    ] = 0
    template_keywords: Annotated[
        str,
        checks.text(MAX_TEMPLATE_KEYWORDS),
        "A JSON object with further variables for the model's chat template, such as `reasoning_effort`; empty: none.",
    ] = ""
    local_only: Annotated[bool, "The job never goes to the server of the launch option `fallback`."] = False
    tools: Annotated[tuple[Tool, ...], MAX_TOOLS, "The tools that the model may call; only for a chat."] = ()
    tool_choice: Annotated[
        str,
        checks.text(64, least=1),
        "`auto`: the answer is text, or ends with calls. `required`: it is calls. `none`: it is text. The name of a"
        " tool: it is calls of this tool.",
    ] = "auto"

    def __post_init__(self) -> None:
        if self.kind == "completion" and (self.thinking != "off" or self.template_keywords):
            raise checks.Refused("a completion has no chat template, which thoughts and keywords need", "thinking")
        if self.warm_up and self.images:
            raise checks.Refused("images cannot be read ahead", "warm_up")
        if self.kind == "chat" and (not self.messages or self.prompt):
            raise checks.Refused("a chat has messages and no prompt", "messages")
        if self.kind == "completion" and (self.messages or not self.prompt):
            raise checks.Refused("a completion has a prompt and no messages", "prompt")
        if not isinstance(self.sampling, Sampling):
            raise checks.Refused("must be a Sampling, such as Sampling(temperature=0)", "sampling")
        biases = [bias for bias in self.sampling.logit_bias if isinstance(bias, LogitBias)]
        if any((bias.token is None) != bool(bias.text) for bias in biases):
            raise checks.Refused("each logit_bias has either a token or a text", "sampling")


@record
class Cancel:
    """Ends a job early. The job's last event says how it ended."""

    id: RequestId
    epoch: Epoch
    job: Job


@record
class PrioritySet:
    """Changes the priority of a job, whether it waits or runs."""

    id: RequestId
    epoch: Epoch
    job: Job
    priority: Annotated[Priority, "0: background, 1: normal, 2: urgent."]


@record
class Credit:
    """The client has taken all events of a job before `next`."""

    epoch: Epoch
    job: Job
    next: Annotated[Count, "Number of the first event that the client has not taken yet."]
    resend: Annotated[bool, "True to have the events from `next` on sent again."] = False


@record
class BudgetSet:
    """The host proposes a lease."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[
        Bytes,
        "Limit for all VRAM that the sidecar uses; 0: no limit. If `state` is not `active`: the budget to use once it"
        " is active again.",
    ]
    timeout_s: Annotated[
        float, checks.number(0.001, 60, "s"), "Time that the sidecar has to release the VRAM above the budget."
    ] = 5.0
    state: Annotated[
        LeaseState,
        "`parked`: only the driver's context stays in VRAM. `hibernated`: the engine process ends and no VRAM is used.",
    ] = "active"
    floor_bytes: Annotated[
        Bytes, "The idle floor: a sidecar without a job for 5 s shrinks to this VRAM budget on its own; 0: it does not."
    ] = 0
    version: Annotated[
        Count,
        "Version of the lease. It is refused with `stale_lease` unless it is higher than the version in force; 0: never"
        " refused for its version.",
    ] = 0
    reason: Annotated[str, checks.text(64), "Text for the sidecar's log."] = ""
    host_budget_bytes: Annotated[
        Bytes | None,
        "Limit for all host memory that the sidecar's processes use; 0: no limit. If it is missing, the limit in force"
        " stays.",
    ] = None


@record
class AdapterLoad:
    """Loads a LoRA adapter. If the same file is loaded under this name already, nothing changes."""

    id: RequestId
    epoch: Epoch
    name: AdapterName
    path: Annotated[str, checks.path(least=1), "Path of the adapter's GGUF file."]


@record
class AdapterUnload:
    """Unloads a LoRA adapter. It is refused while a job that has not ended uses the adapter. If no adapter of this name
    is loaded, nothing changes."""

    id: RequestId
    epoch: Epoch
    name: AdapterName


@record
class FrameBlockGet:
    """Asks where the frame block is."""

    id: RequestId
    epoch: Epoch


@record
class Pacing:
    """How the sidecar shares the GPU with the host's frames."""

    id: RequestId
    epoch: Epoch
    scheduling_mode: Annotated[
        SchedulingMode,
        "`prioritize_graphics`: use only the GPU time that frames leave free; what does not fit into it starts after"
        " four frames all the same. `balance`: use more, as long as frames stay within their target time."
        " `prioritize_compute`: ignore frames.",
    ] = "balance"
    target_tokens_per_second: Annotated[
        float,
        checks.number(0.1, 10_000, "tokens/s", or_zero=True),
        "Limit for the tokens per second of all jobs together; 0: no limit.",
    ] = 0.0


@record
class BudgetGet:
    """Asks for the budget in force and its bounds."""

    id: RequestId
    epoch: Epoch


@record
class CapsGet:
    """Asks what the device has and what the model needs."""

    id: RequestId
    epoch: Epoch


@record
class PlanGet:
    """Asks for predictions at some VRAM budgets. Changes nothing."""

    id: RequestId
    epoch: Epoch
    budgets: Annotated[tuple[Bytes, ...], 32, "VRAM budgets; 0: no limit."]
    prompt_tokens: Annotated[
        int, checks.integer(1, 1 << 20, "tokens"), "Length of the prompt whose time to first token is predicted."
    ] = 512


@record
class KvSave:
    """Asks the sidecar to write the KV cache of a conversation to a file, so that `kv_load` need not compute it again.
    Only this user can read the file. It replaces an earlier one when it is whole."""

    id: RequestId
    epoch: Epoch
    conversation: Annotated[ConversationName, "Name of the conversation."]
    path: Annotated[FilePath, "Absolute path of the file. An existing file is replaced, a link is not followed."]


@record
class KvLoad:
    """Asks the sidecar to read the KV cache of a conversation from a file of `kv_save`."""

    id: RequestId
    epoch: Epoch
    conversation: Annotated[ConversationName, "Name of the conversation that will continue from it."]
    path: Annotated[FilePath, "Absolute path of the file. A link is not followed."]


@record
class CountTokens:
    """Asks how many tokens a prompt has, without a job. It has either `messages` or a `prompt`."""

    id: RequestId
    epoch: Epoch
    messages: Annotated[
        tuple[ChatMessage, ...], "Messages of a chat. They are counted as the chat template renders them."
    ] = ()
    prompt: Annotated[Text, "Prompt of a completion, if there are no messages."] = ""
    tools: Annotated[
        tuple[Tool, ...], MAX_TOOLS, "Tools of a chat, which its prompt describes; none for a completion."
    ] = ()

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.prompt):
            raise checks.Refused("either messages or a prompt is counted", "prompt")
        if self.tools and not self.messages:
            raise checks.Refused("only a chat has tools", "tools")


@record
class Embed:
    """Asks the sentence encoder for the embeddings of texts. Texts of similar meaning have embeddings with a large dot
    product. The requests of several clients take turns after each text."""

    id: RequestId
    epoch: Epoch
    texts: Annotated[
        tuple[EmbedText, ...],
        MAX_TEXTS,
        "The texts, at least one. Each must fit into the context of the encoder, often 512 tokens; nothing is cut off.",
    ]

    def __post_init__(self) -> None:
        if not self.texts:
            raise checks.Refused("at least one text is embedded", "texts")


@record
class ModelInfoGet:
    """Asks for a description of the loaded model."""

    id: RequestId
    epoch: Epoch


@record
class StatsGet:
    """Asks for the current figures of the sidecar."""

    id: RequestId
    epoch: Epoch


@record
class Ping:
    """Shows that the client is alive."""

    id: RequestId
    epoch: Epoch


@record
class Bye:
    """The client leaves: its jobs are cancelled and the session ends."""

    id: RequestId
    epoch: Epoch


@record
class Shutdown:
    """Ends the sidecar, for all its clients."""

    id: RequestId
    epoch: Epoch


# ---- broker to client: answers, with the request's id ---------------------------------------------------------------


@record
class Welcome:
    """Answer to hello."""

    id: RequestId
    epoch: Annotated[Id, "Number of the launch; every request repeats it."]
    protocol: Annotated[Count, "Protocol version that the sidecar speaks."]
    session: Annotated[Id, "Number of the session; a client needs it to resume the session."]
    resumed: Annotated[bool, "True if the session to resume was found. If not, its jobs are lost."]
    server: Annotated[str, checks.text(64), "Name of the sidecar's software."]
    limits: Annotated[ServerLimits, "What the sidecar accepts."]
    engine: Annotated[EngineState, "State of the engine process."]
    model: Annotated[ModelInfo | None, "The model that is loaded."]
    features: Annotated[Features, "Names of the additions to the protocol that the sidecar has."] = ()


@record
class Model:
    """Answer to model_info."""

    id: RequestId
    epoch: Epoch
    model: Annotated[ModelInfo, "The model that is loaded."]


@record
class Ok:
    """The request was accepted. After submit: the job is queued."""

    id: RequestId
    epoch: Epoch


@record
class Error:
    """The request was refused and has changed nothing, except where `budget_set` says otherwise."""

    id: Annotated[Id | None, "Number of the request; missing if it could not be read."]
    epoch: Epoch
    error: Annotated[ErrorInfo, "Why the request was refused."]


@record
class Lease:
    """First answer to budget_set, at once."""

    id: RequestId
    epoch: Epoch
    decision: Annotated[Decision, "`granted`, or `partial`: only a part of the VRAM can be released by the deadline."]
    vram_budget_bytes: Annotated[Bytes, "VRAM budget that will be reached by the deadline."]
    seconds: Annotated[
        Seconds, "Predicted time until the release is complete; 0: it is immediate, or nothing was measured yet."
    ]
    version: Annotated[Count, "Version of the lease in force; 0: it has none."]
    host_budget_bytes: Annotated[Bytes, "Host budget that will be reached by the deadline; 0: no limit."] = 0


@record
class Released:
    """Second answer to budget_set: the change is in force."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[
        Bytes, "VRAM budget in force; if parked or hibernated, the budget to use once active again."
    ]
    used_bytes: Annotated[Bytes, "VRAM that the sidecar uses, by its own exact count."]
    seconds: Annotated[Seconds, "Time since the engine was asked."]
    host_budget_bytes: Annotated[Bytes, "Host budget in force; 0: no limit."] = 0
    host_used_bytes: Annotated[Bytes, "Host memory that the sidecar uses, by its own count."] = 0


@record
class Observed:
    """Third answer to budget_set."""

    id: RequestId
    epoch: Epoch
    observed_bytes: Annotated[
        Bytes | None, "VRAM of the engine process as the driver counts it; missing if the driver does not report it."
    ]
    seconds: Annotated[Seconds, "Time since the engine was asked."]
    host_observed_bytes: Annotated[
        Bytes | None,
        "Host memory of the sidecar's processes as the system counts it; missing if it was not measured.",
    ] = None


@record
class Budget:
    """Answer to budget_get."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[Bytes, "VRAM budget in force; 0: no limit."]
    floor_bytes: Annotated[Bytes, "The smallest VRAM budget that the model can run in."]
    full_bytes: Annotated[Bytes, "With this VRAM budget all weights are resident."]
    state: Annotated[LeaseState, "State of the lease."]
    version: Annotated[Count, "Version of the lease in force; 0: it has none."]
    wanted_bytes: Annotated[
        Bytes,
        "VRAM that the sidecar would like to have: `full_bytes` while jobs are open and the budget is lower, else what"
        " it uses.",
    ]
    used_bytes: Annotated[Bytes, "VRAM that the sidecar uses, by its own exact count."]
    host_budget_bytes: Annotated[Bytes, "Host budget in force; 0: no limit."] = 0
    host_floor_bytes: Annotated[Bytes, "The smallest host budget that the sidecar can run in; 0: not known."] = 0
    host_used_bytes: Annotated[Bytes, "Host memory that the sidecar uses, by its own count; 0: not known."] = 0


@record
class Caps:
    """Answer to caps_and_requirements."""

    id: RequestId
    epoch: Epoch
    device: Annotated[Name, "Name of the device that the model runs on."]
    total_bytes: Annotated[Bytes | None, "VRAM of the device; missing if the system does not report it."]
    free_bytes: Annotated[
        Bytes | None, "Free VRAM of the device when it was last measured; missing if the system does not report it."
    ]
    floor_bytes: Annotated[Bytes, "The smallest VRAM budget that the model can run in."]
    full_bytes: Annotated[Bytes, "With this VRAM budget all weights are resident."]
    context: Annotated[Tokens, "Context length of one conversation in tokens."]
    mode: Annotated[Mode, "Mode of the plan; `stream_only` gives the same bits at every budget."]
    host_total_bytes: Annotated[
        Bytes | None, "Host memory of the machine; missing if the system does not report it."
    ] = None
    host_free_bytes: Annotated[
        Bytes | None,
        "Host memory that programs can still take without swapping; missing if the system does not report it.",
    ] = None
    host_floor_bytes: Annotated[Bytes, "The smallest host budget that the sidecar can run in; 0: not known."] = 0


@record
class PlanAnswer:
    """Answer to plan."""

    id: RequestId
    epoch: Epoch
    rows: Annotated[tuple[PlanRow, ...], 32, "One row for each budget, in the order of the request."]


@record
class Adapters:
    """Answer to adapter_load and adapter_unload: the change is in force."""

    id: RequestId
    epoch: Epoch
    adapters: Annotated[tuple[AdapterInfo, ...], MAX_ADAPTERS, "All adapters that are loaded now."]
    floor_bytes: Annotated[Bytes, "The smallest VRAM budget that the model can run in with these adapters."]


@record
class Kv:
    """Answer to kv_save and kv_load."""

    id: RequestId
    epoch: Epoch
    n_tokens: Annotated[
        Tokens,
        "Number of tokens of the KV cache that was written or read; 0: none. Without it the text is read anew.",
    ]
    file_bytes: Annotated[Bytes, "Size of the file that was written or read; 0: none."]
    detail: Annotated[str, checks.text(MAX_KV_DETAIL), "Why `n_tokens` is 0; else empty."]


@record
class TokenCount:
    """Answer to count_tokens."""

    id: RequestId
    epoch: Epoch
    n_tokens: Annotated[Tokens, "Length of the prompt in tokens."]
    n_left: Annotated[Tokens, "Number of tokens that still fit into the context behind the prompt."]


@record
class Embeddings:
    """Answer to embed."""

    id: RequestId
    epoch: Epoch
    n_dim: Annotated[int, checks.integer(1), "Number of dimensions: the length of one row."]
    rows: Annotated[
        bytes,
        checks.binary(codec.CLIENT.binary),
        "One row for each text, in the order of the request: `n_dim` little-endian 16-bit floats, whose squares add up"
        " to 1.",
    ]
    n_tokens: Annotated[
        Tokens,
        "Number of tokens that the encoder has read for all texts, with the marks around each; 0: an older sidecar,"
        " which does not tell.",
    ] = 0


@record
class FrameBlock:
    """Answer to frame_block."""

    id: RequestId
    epoch: Epoch
    path: Annotated[
        str,
        checks.text(4096, least=1),
        "Path of the frame block. The host opens it for reading and writing, and maps it.",
    ]


@record
class BrokerStats:
    """The broker's own figures. They count the jobs of all clients."""

    pid: Annotated[Count, "Process id of the broker."]
    engine_pid: Annotated[Count | None, "Process id of the engine; missing while none runs."]
    engine: Annotated[EngineState, "State of the engine process."]
    engine_restarts: Annotated[Count, "Number of restarts of the engine since the launch."]
    sessions: Annotated[Count, "Number of sessions."]
    jobs_queued: Annotated[Count, "Number of queued jobs."]
    jobs_running: Annotated[Count, "Number of running jobs."]
    uptime_s: Annotated[Seconds, "Time since the launch."]
    jobs_remote: Annotated[Count, "Number of jobs that are at the server of the launch option `fallback`."] = 0


@record
class Stats:
    """Answer to stats."""

    id: RequestId
    epoch: Epoch
    broker: Annotated[BrokerStats, "Figures of the broker."]
    engine: Annotated[
        Mapping[str, Any] | None,
        "Figures of the device, of batches and of the KV store (`kv_cache_bytes`, `kv_cache_entries`, `kv_cache_hits`,"
        " `kv_cache_evictions`); missing while no engine runs, or while too many requests wait for it.",
    ]


@record
class Pong:
    """Answer to ping."""

    id: RequestId
    epoch: Epoch
    jobs: Annotated[
        tuple[tuple[Id, Count], ...], "For each open job: its number, and how many of its events were sent."
    ]


# ---- broker to client: events of a job, numbered from 0 without gaps ------------------------------------------------


@record
class Started:
    """The job has started to run."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    n_prompt: Annotated[Tokens, "Length of the prompt in tokens; 0: not known, because the job is at a server."]
    seed: Annotated[Count, "Seed of the random numbers: the requested one, or the one that the sidecar chose."] = 0
    remote: Annotated[bool, "True if the server of the launch option `fallback` answers, not the engine."] = False


@record
class Progress:
    """How far a job with images or a long prompt has come, before its first token."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    phase: Annotated[Phase, "`encode`: images are encoded. `prefill`: the prompt is computed."]
    done: Annotated[Count, "Number of images encoded, or of prompt tokens computed."]
    total: Annotated[
        Count, "Number of images to encode (higher if the model cuts images into tiles), or of prompt tokens."
    ]


@record
class Delta:
    """The next part of the answer."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    text: Annotated[
        str,
        checks.text(codec.CLIENT.string, least=1),
        "The next part of the answer. It never ends within a code point.",
    ]
    tokens: Annotated[
        int,
        checks.integer(0, unit="tokens"),
        "Number of tokens of this part, including tokens without text of their own. 0 only if a sentence or a thought"
        " ends inside a token.",
    ]
    sentence_end: Annotated[
        bool, "True if the text ends a sentence, which began after the last such delta. Only for jobs with `sentences`."
    ] = False


@record
class Thought:
    """The next part of what the model thinks before it answers. Only for jobs whose `thinking` is `shown`."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    text: Annotated[
        str,
        checks.text(codec.CLIENT.string, least=1),
        "The next part of the thought. It never ends within a code point.",
    ]
    tokens: Annotated[
        int, checks.integer(0, unit="tokens"), "Number of tokens of this part, including tokens without text."
    ]


@record
class ToolCalled:
    """The model calls a tool. The event comes when the call is whole."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    call_id: Annotated[str, checks.text(64, least=1), "Id of the call, which its result repeats."]
    name: Annotated[str, checks.text(64, least=1), "Name of the tool."]
    arguments: Annotated[Text, "The arguments as JSON: an object that matches the tool's schema."]


@record
class Paused:
    """A job of higher priority has taken this job's sequence, or the fallback server has broken off its answer. The job
    continues on its own: `resumed` follows."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline


@record
class Resumed:
    """The job continues after `paused`."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline


@record
class Done:
    """Last event: the answer is complete."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    reason: Annotated[
        Reason,
        "`stop`: the model ended the answer, or a stop string came. `length`: `max_tokens` was reached. `tool_calls`:"
        " the answer ends with calls of tools.",
    ]
    n_prompt: Annotated[Tokens, "Length of the prompt in tokens."]
    n_generated: Annotated[Tokens, "Length of the answer in tokens, with its thought."]
    prefill_s: Annotated[Seconds, "Time from the start of the prefill to the first token."]
    decode_s: Annotated[Seconds, "Time from the first token to the end of the answer."]
    n_reused: Annotated[Tokens, "Number of prompt tokens that were already in the KV cache or in the KV store."] = 0
    n_left: Annotated[Tokens, "Number of tokens that still fit into the context behind prompt and answer."] = 0
    n_thought: Annotated[Tokens, "Number of the tokens in `n_generated` that were thought, sent or not."] = 0
    remote: Annotated[
        bool,
        "True if the server of the launch option `fallback` has ended the answer. The numbers of tokens are those that"
        " it reports; if it reports none, `n_prompt` is 0 and `n_generated` the number of parts that it sent.",
    ] = False


@record
class Failed:
    """Last event: the job ended with an error. The text that was sent before stays valid."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    error: Annotated[
        ErrorInfo, "The error, such as `context_overflow`, `engine_died`, `overloaded` or `connection_lost`."
    ]


@record
class Cancelled:
    """Last event: the job was cancelled."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline


@record
class UnknownEvent:
    """A job's event of a kind that this version does not know. It is counted and credited like any other."""

    job: Job
    seq: Seq
    epoch: Epoch


# ---- broker to client: to every session -----------------------------------------------------------------------------


@record
class Engine:
    """The engine process changed its state. After a restart, jobs continue on their own."""

    epoch: Epoch
    state: Annotated[EngineState, "New state of the engine process."]
    restarts: Annotated[Count, "Number of restarts of the engine since the launch."]
    error: Annotated[ErrorInfo | None, "Why the engine is off."] = None


@record
class Notice:
    """News about memory, the lease and the HTTP server, for sessions that asked for it. The client need not react."""

    epoch: Epoch
    kind: Annotated[NoticeKind, "What the notice is about."]
    vram_budget_bytes: Annotated[
        Bytes,
        "For `other_process`: VRAM that the other process uses (0: unknown). For `http` and `host_pressure`: 0."
        " For other kinds: a VRAM budget.",
    ]
    seconds: Annotated[
        Seconds,
        "For `late`: predicted time until the release is complete. For `state`: how long the change took. For `http`:"
        " seconds until the HTTP server, which has ended, is started again. Else 0.",
    ]
    detail: Annotated[
        str, checks.text(MAX_NOTICE_DETAIL), "Text for a log. For `state`: the new state. For `http`: how it ended."
    ]
    host_budget_bytes: Annotated[
        Bytes,
        "For `host_pressure`: the sidecar's own limit for its host memory while the system is short of it; 0: the"
        " pressure is over. Else 0.",
    ] = 0


@record
class Loading:
    """How far the engine has loaded the model, at the launch and after each later start of an engine. Sessions get it
    that asked for notices; before the first one, the process that launched the sidecar gets it as a line, if it set
    the launch option `loading`."""

    epoch: Epoch
    stage: Annotated[
        LoadingStage,
        "`read`: the model file is read. `profile`: the machine's profile is read or estimated. `fill`: weights are"
        " copied to VRAM.",
    ]
    done: Annotated[Count, "What is done of `total`."]
    total: Annotated[Count, "MiB of the model file, steps of the profile, or MiB of weights to copy."]


# ---- tables ---------------------------------------------------------------------------------------------------------

Request = (
    Hello
    | Submit
    | Cancel
    | PrioritySet
    | Credit
    | BudgetSet
    | BudgetGet
    | CapsGet
    | PlanGet
    | CountTokens
    | Embed
    | AdapterLoad
    | AdapterUnload
    | FrameBlockGet
    | Pacing
    | KvSave
    | KvLoad
    | ModelInfoGet
    | StatsGet
    | Ping
    | Bye
    | Shutdown
)
JobEvent = (
    Started | Progress | Delta | Thought | ToolCalled | Paused | Resumed | Done | Failed | Cancelled | UnknownEvent
)
Reply = (
    Welcome
    | Model
    | Ok
    | Error
    | Lease
    | Released
    | Observed
    | Budget
    | Caps
    | PlanAnswer
    | TokenCount
    | Embeddings
    | Adapters
    | Kv
    | FrameBlock
    | Stats
    | Pong
)
Unasked = Engine | Notice | Loading
Message = Request | Reply | JobEvent | Unasked

REQUESTS: dict[str, type[Any]] = {
    "hello": Hello,
    "submit": Submit,
    "cancel": Cancel,
    "priority_set": PrioritySet,
    "credit": Credit,
    "budget_set": BudgetSet,
    "budget_get": BudgetGet,
    "caps_and_requirements": CapsGet,
    "plan": PlanGet,
    "count_tokens": CountTokens,
    "embed": Embed,
    "adapter_load": AdapterLoad,
    "adapter_unload": AdapterUnload,
    "frame_block": FrameBlockGet,
    "pacing": Pacing,
    "kv_save": KvSave,
    "kv_load": KvLoad,
    "model_info": ModelInfoGet,
    "stats": StatsGet,
    "ping": Ping,
    "bye": Bye,
    "shutdown": Shutdown,
}

ANSWERS: dict[str, type[Any]] = {
    "welcome": Welcome,
    "model_info": Model,
    "ok": Ok,
    "error": Error,
    "lease": Lease,
    "released": Released,
    "observed": Observed,
    "budget": Budget,
    "caps_and_requirements": Caps,
    "plan": PlanAnswer,
    "token_count": TokenCount,
    "embeddings": Embeddings,
    "adapters": Adapters,
    "kv": Kv,
    "frame_block": FrameBlock,
    "stats": Stats,
    "pong": Pong,
    "started": Started,
    "progress": Progress,
    "delta": Delta,
    "thought": Thought,
    "tool_call": ToolCalled,
    "paused": Paused,
    "resumed": Resumed,
    "done": Done,
    "failed": Failed,
    "cancelled": Cancelled,
    "engine": Engine,
    "notice": Notice,
    "loading": Loading,
}

TERMINAL = (Done, Failed, Cancelled)

_NAMES: dict[type[Any], str] = {cls: name for table in (REQUESTS, ANSWERS) for name, cls in table.items()}

# ---- conversion -----------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The frame for `message`.

    Fields that have their default are left out of requests, so that an older sidecar, which may not know them, takes
    them.

    :raises BadArgument: the other side would refuse it; detail has the innermost ``field``.
    """
    fields = dataclasses.asdict(message)
    try:
        checks.convert(type(message), fields)
    except checks.Refused as refused:
        raise BadArgument(str(refused), field=refused.field) from None
    if isinstance(message, Request):
        fields = _without_defaults(message)
    return codec.encode({"t": _NAMES[type(message)], **fields})


def _without_defaults(record: Any) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            fields[field.name] = _plain(value)
    return fields


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _without_defaults(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def decode_request(frame: bytes) -> Request:
    """What a client sent.

    :raises BadMessage: the frame, the message or a field is wrong or unknown; the error's detail has ``id`` when the
        frame shows one.
    :raises VersionMismatch: the hello of a client that was written for a newer version; likewise.
    """
    fields, name, detail = _opened(frame)
    if name not in REQUESTS:
        raise BadMessage("t: unknown message", **detail)
    if name == "hello" and type(fields.get("protocol")) is int and fields["protocol"] > VERSION:
        # Before its other fields, which a newer version may have changed.
        raise VersionMismatch(f"this sidecar speaks protocol {VERSION}", protocol=VERSION, **detail)
    request: Request = _converted(REQUESTS[name], name, fields, detail, strict=True)
    return request


def decode_answer(frame: bytes) -> Reply | JobEvent | Unasked | None:
    """What a sidecar sent, without fields that this version does not know; None for a message that it does not know.

    :raises BadMessage: the frame is wrong, or a field that this version knows.
    """
    fields, name, detail = _opened(frame)
    if name in ANSWERS:
        answer: Reply | JobEvent | Unasked = _converted(ANSWERS[name], name, fields, detail, strict=False)
        return answer
    try:
        return checks.convert(UnknownEvent, fields, strict=False)
    except checks.Refused:
        return None


def _opened(frame: bytes) -> tuple[dict[str, Any], str, dict[str, int]]:
    """Fields, name and, where it shows one, the id of a message."""
    fields = codec.decode(frame)
    request_id = fields.get("id")
    detail = {"id": request_id} if type(request_id) is int and request_id > 0 else {}
    name = fields.pop("t", None)
    if type(name) is not str:
        raise BadMessage("t: must be a string", **detail)
    return fields, name, detail


def _converted(cls: type[Any], name: str, fields: dict[str, Any], detail: dict[str, int], *, strict: bool) -> Any:
    try:
        return checks.convert(cls, fields, strict=strict)
    except checks.Refused as refused:
        raise BadMessage(f"{name}.{refused}", **detail) from None
