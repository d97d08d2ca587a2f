"""The protocol: one frozen dataclass for each message, checked in both directions.

This file is the source of everything that mirrors the protocol. The annotation of a field has its check
(:mod:`frameshard.wire.checks`) and one line of text. ``make generate`` writes bindings/generated-manifest.json from
them, and from that the tables of bindings/PROTOCOL.md and the declarations of the bindings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from frameshard.errors import BadArgument, BadMessage, FrameshardError, VersionMismatch, from_wire
from frameshard.wire import checks, codec
from frameshard.wire.checks import Bytes, Count, Id, Name, Seconds, Text, Tokens

VERSION = 1
"""Of the protocol. A sidecar must have at least the version that a client was written for."""

FEATURES: tuple[str, ...] = ()
"""What this version has beyond the first: names that bindings/PROTOCOL.md lists under "Features"."""

MAX_WINDOW = 256
"""Events that may be under way to a client for one job."""

# ---- fields that many messages have ---------------------------------------------------------------------------------

RequestId = Annotated[Id, "Number of the request; its answer has the same."]
Epoch = Annotated[Id, "Number of the sidecar's launch."]
Job = Annotated[Id, "Number of the job."]
Seq = Annotated[Count, "Number of the event within its job, from 0 without gaps."]
Timeline = Annotated[Count, "As the job was submitted with it."]
Features = Annotated[tuple[Annotated[str, checks.text(64, least=1)], ...], 64]

# ---- records inside messages ----------------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant"]
StopString = Annotated[str, checks.text(256, least=1)]
Kind = Literal["chat", "completion"]
Reason = Literal["stop", "length"]
EngineState = Literal["loading", "ready", "restarting", "hibernated", "off"]
LeaseState = Literal["active", "parked", "hibernated"]
Decision = Literal["granted", "partial"]
NoticeKind = Literal["wants", "gives_back", "late", "pressure", "other_process", "state"]
Mode = Literal["planned", "stream_only"]
SchedulingMode = Literal["prioritize_graphics", "balance", "prioritize_compute"]
ImageFormat = Literal["encoded", "rgb", "rgba"]
Phase = Literal["encode", "prefill"]

MAX_IMAGES = 8
"""Of one job."""

MAX_INLINE_BYTES = 900_000
"""Of an image inside a message; larger ones are read from shared memory."""

MAX_IMAGE_BYTES = 64 << 20
"""Of one image, wherever it is read from."""


@dataclass(frozen=True)
class ChatMessage:
    """One turn of a conversation."""

    role: Annotated[Role, "Who says it."]
    content: Annotated[
        Text,
        "What is said. Control tokens written out in it, such as <|im_end|>, are text; beside images they are refused.",
    ]


@dataclass(frozen=True)
class Image:
    """A picture. Its bytes are `data`, or the first `size` bytes of the shared memory at `path`."""

    format: Annotated[
        ImageFormat, "A PNG or JPEG file (`encoded`), or rows of 8-bit pixels from the top; alpha is not used."
    ]
    data: Annotated[bytes, checks.binary(MAX_INLINE_BYTES), "The bytes; empty with `path`."] = b""
    path: Annotated[str, checks.text(4096), "Shared memory that begins with the bytes; empty with `data`."] = ""
    size: Annotated[int, checks.integer(0, MAX_IMAGE_BYTES, "bytes"), "Bytes at `path`."] = 0
    width: Annotated[int, checks.integer(0, 1 << 16, "pixels"), "Width of `rgb` and `rgba`."] = 0
    height: Annotated[int, checks.integer(0, 1 << 16, "pixels"), "Height of `rgb` and `rgba`."] = 0
    stride: Annotated[
        int, checks.integer(0, 1 << 24, "bytes"), "From one row to the next; 0: rows follow each other without a gap."
    ] = 0


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    In mode ``stream_only`` the same values, prompt and seed give the same text. In mode ``planned`` the plan,
    speculative decoding and a restart of the engine may change it where two tokens are nearly as likely.
    """

    max_tokens: Annotated[int, checks.integer(1, 1 << 20, "tokens"), "Length of the answer at most."] = 256
    temperature: Annotated[float, checks.number(0, 5), "Randomness of the choice; 0: always the likeliest token."] = 0.8
    top_k: Annotated[int, checks.integer(0, 1 << 20), "Only so many of the likeliest tokens; 0: off."] = 40
    top_p: Annotated[float, checks.number(0, 1), "Only the likeliest tokens of so much probability; 1: off."] = 0.95
    min_p: Annotated[
        float, checks.number(0, 1), "Only tokens of at least this share of the likeliest one's probability; 0: off."
    ] = 0.05
    repeat_penalty: Annotated[float, checks.number(0.5, 2), "Makes tokens of the last ones less likely; 1: off."] = 1.0
    seed: Annotated[
        Annotated[int, checks.integer(0, 2**32 - 1)] | None,
        "Seed of the random numbers; without it the sidecar draws one.",
    ] = None
    stop: Annotated[tuple[StopString, ...], 16, "The answer ends before any of these."] = ()
    json_schema: Annotated[
        Text,
        "A JSON schema: the answer is JSON that fits it, unless `max_tokens` or `stop` ends it before; empty: off.",
    ] = ""
    frequency_penalty: Annotated[
        float, checks.number(-2, 2), "Taken from a token's logit for each time that it is among the last 64; 0: off."
    ] = 0.0
    presence_penalty: Annotated[
        float, checks.number(-2, 2), "Taken from a token's logit once if it is among the last 64; 0: off."
    ] = 0.0


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class ErrorInfo:
    """An error as the protocol has it; :func:`frameshard.errors.from_wire` makes the exception of it."""

    code: Annotated[Count, "Stable number of the error."]
    name: Annotated[str, checks.text(64), "Stable name of the error, for programs."]
    message: Annotated[Text, "A sentence for a person."]
    retriable: Annotated[bool, "The same may succeed later without a change."]
    detail: Annotated[Mapping[str, Any], "Figures, such as `floor_bytes`."]

    @classmethod
    def of(cls, error: FrameshardError) -> ErrorInfo:
        """What `error` says. A detail that the protocol cannot carry is left out rather than losing the error."""
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


@dataclass(frozen=True)
class ModelInfo:
    """The model that is loaded."""

    name: Annotated[str, checks.text(4096), "The file's name."]
    arch: Annotated[Name, "The model's architecture, as its file has it."]
    device: Annotated[Name, "Where it runs."]
    n_ctx: Annotated[Tokens, "Context of one conversation."]
    n_parallel: Annotated[Count, "Jobs that run at a time."]
    n_vocab: Annotated[Count, "Entries of the vocabulary."]
    n_layer: Annotated[Count, "Layers."]
    chat: Annotated[bool, "The model has a chat template."]
    floor_bytes: Annotated[Bytes, "No VRAM budget below it is possible."]
    full_bytes: Annotated[Bytes, "With this budget all weights are resident."]
    plan: Annotated[Mapping[str, Any], "Placements and predicted times at the budget of the load."]
    vision: Annotated[Name, "Name of what reads images; empty where nothing does."] = ""


@dataclass(frozen=True)
class ServerLimits:
    """What this sidecar accepts."""

    message_bytes: Annotated[Bytes, "Largest frame."]
    string_bytes: Annotated[Bytes, "Longest string."]
    jobs: Annotated[Count, "Jobs of this client that may be open at a time."]
    window: Annotated[Count, "The largest window of a job."]
    silent_s: Annotated[Seconds, "A client whose connection is gone for so long loses its jobs."]


@dataclass(frozen=True)
class PlanRow:
    """Predictions at one budget, while decoding."""

    vram_budget_bytes: Annotated[Bytes, "As asked."]
    fits: Annotated[bool, "False: below the floor. The predictions are missing then and the sizes 0."]
    ttft_s: Annotated[Seconds | None, "Time to the first token of a prompt."]
    tokens_per_second: Annotated[
        Annotated[float, checks.number(0, 1e9, "tokens/s")] | None, "Rate of decoding, of one job."
    ]
    resident_bytes: Annotated[Bytes, "Weights that stay in VRAM."]
    streamed_bytes: Annotated[Bytes, "Weights that are copied to the device for each token."]
    cpu_bytes: Annotated[Bytes, "Weights that the CPU computes with."]


# ---- client to broker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First message of a connection."""

    id: RequestId
    protocol: Annotated[Count, "Version that the client was written for."]
    client: Annotated[str, checks.text(64), "A name for the sidecar's log."]
    epoch: Annotated[Id | None, "The launch that is meant; without it, any."] = None
    session: Annotated[Id | None, "The session to resume; without it, a new one."] = None
    notices: Annotated[bool, "This session wants `notice` messages."] = False
    features: Annotated[Features, "Names of the additions to the protocol that the client knows."] = ()


@dataclass(frozen=True)
class Submit:
    """Asks for a job."""

    id: RequestId
    epoch: Epoch
    job: Annotated[Id, "Number of the job, chosen by the client and never used again in the session."]
    kind: Annotated[Kind, "A chat has `messages`, a completion a `prompt`."]
    messages: Annotated[tuple[ChatMessage, ...], "Messages of a chat, at least one."] = ()
    prompt: Annotated[Text, "Prompt of a completion, not empty."] = ""
    conversation: Annotated[
        Annotated[str, checks.text(128, least=1)] | None,
        "Name of the KV cache to keep: a later prompt that begins with the same messages is read faster.",
    ] = None
    sampling: Annotated[Sampling, "How tokens are chosen."] = DEFAULT_SAMPLING
    timeline: Annotated[Count, "Comes back in each event of the job."] = 0
    window: Annotated[
        int, checks.integer(1, MAX_WINDOW), "Events that may be under way before the client gives credit."
    ] = 32
    images: Annotated[
        tuple[Image, ...], MAX_IMAGES, "Images; they stand before the last message of a chat, or before the prompt."
    ] = ()

    def __post_init__(self) -> None:
        if self.kind == "chat" and (not self.messages or self.prompt):
            raise checks.Refused("messages: a chat has messages and no prompt")
        if self.kind == "completion" and (self.messages or not self.prompt):
            raise checks.Refused("prompt: a completion has a prompt and no messages")


@dataclass(frozen=True)
class Cancel:
    """Ends a job early. The job's last event says how it ended."""

    id: RequestId
    epoch: Epoch
    job: Job


@dataclass(frozen=True)
class Credit:
    """The client has taken all events of a job before `next`."""

    epoch: Epoch
    job: Job
    next: Annotated[Count, "All events before this one are taken."]
    resend: Annotated[bool, "Asks for those from `next` on once more."] = False


@dataclass(frozen=True)
class BudgetSet:
    """The host proposes a lease."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[
        Bytes, "All that the sidecar holds in VRAM has to fit; 0: no limit. Not `active`: the budget to come back to."
    ]
    timeout_s: Annotated[float, checks.number(0.001, 60, "s"), "Deadline of the release."] = 5.0
    state: Annotated[
        LeaseState, "`parked` keeps no more than the driver's context in VRAM, `hibernated` ends the engine process."
    ] = "active"
    floor_bytes: Annotated[Bytes, "What the sidecar keeps while it is idle; 0: it gives nothing back on its own."] = 0
    version: Annotated[
        Count, "Refused with `stale_lease` unless it is above the one in force; 0: the last word counts."
    ] = 0
    reason: Annotated[str, checks.text(64), "For the sidecar's log."] = ""


@dataclass(frozen=True)
class FrameBlockGet:
    """Where the frame block is."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class Pacing:
    """How the sidecar shares the GPU with the host's frames."""

    id: RequestId
    epoch: Epoch
    scheduling_mode: Annotated[
        SchedulingMode,
        "Use only what the frames leave; some more as long as they keep their time; take no notice of them.",
    ] = "balance"
    target_tokens_per_second: Annotated[
        float,
        checks.number(0.1, 10_000, "tokens/s", or_zero=True),
        "Of all jobs together, tokens come no faster; 0: as fast as they can.",
    ] = 0.0


@dataclass(frozen=True)
class BudgetGet:
    """The budget in force and its bounds."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class CapsGet:
    """What the device has, and what the model needs."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class PlanGet:
    """Predictions at some budgets. Changes nothing."""

    id: RequestId
    epoch: Epoch
    budgets: Annotated[tuple[Bytes, ...], 32, "Each as `vram_budget_bytes`."]
    prompt_tokens: Annotated[int, checks.integer(1, 1 << 20, "tokens"), "Prompt for the time to the first token."] = 512


@dataclass(frozen=True)
class ModelInfoGet:
    """The model that is loaded."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class StatsGet:
    """Figures of this moment."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class Ping:
    """The client is there."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class Bye:
    """The client leaves: its jobs are cancelled and the session ends."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class Shutdown:
    """Ends the sidecar, for all its clients."""

    id: RequestId
    epoch: Epoch


# ---- broker to client: answers, with the request's id ---------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """Answer to hello."""

    id: RequestId
    epoch: Annotated[Id, "Number of the launch, for every request."]
    protocol: Annotated[Count, "Version that the sidecar speaks."]
    session: Annotated[Id, "Number of the session, to resume it."]
    resumed: Annotated[bool, "The session asked for was found. If not, its jobs are lost."]
    server: Annotated[str, checks.text(64), "Name of the sidecar's software."]
    limits: Annotated[ServerLimits, "What the sidecar accepts."]
    engine: Annotated[EngineState, "Where the engine process stands."]
    model: Annotated[ModelInfo | None, "The model that is loaded."]
    features: Annotated[Features, "Names of the additions to the protocol that the sidecar has."] = ()


@dataclass(frozen=True)
class Model:
    """Answer to model_info."""

    id: RequestId
    epoch: Epoch
    model: Annotated[ModelInfo, "The model that is loaded."]


@dataclass(frozen=True)
class Ok:
    """The request has been taken; for submit: the job is queued."""

    id: RequestId
    epoch: Epoch


@dataclass(frozen=True)
class Error:
    """The request has been refused and has changed nothing, except where `budget_set` says otherwise."""

    id: Annotated[Id | None, "Number of the request; missing when the frame did not show one."]
    epoch: Epoch
    error: Annotated[ErrorInfo, "Why."]


@dataclass(frozen=True)
class Lease:
    """First answer to budget_set, at once."""

    id: RequestId
    epoch: Epoch
    decision: Annotated[Decision, "`partial`: the deadline is too short for all of it."]
    vram_budget_bytes: Annotated[Bytes, "Reached by the deadline."]
    seconds: Annotated[Seconds, "Until all of it is reached, predicted; 0: at once, or nothing was measured yet."]
    version: Annotated[Count, "Version of the lease in force; 0: none was given."]


@dataclass(frozen=True)
class Released:
    """Second answer to budget_set: the change is in force."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[Bytes, "In force now; parked or hibernated: to come back to."]
    used_bytes: Annotated[Bytes, "What the sidecar holds, exact by its own count."]
    seconds: Annotated[Seconds, "Since the engine was asked."]


@dataclass(frozen=True)
class Observed:
    """Third answer to budget_set."""

    id: RequestId
    epoch: Epoch
    observed_bytes: Annotated[
        Bytes | None, "What the driver counts for the engine process; missing where it does not tell."
    ]
    seconds: Annotated[Seconds, "Since the engine was asked."]


@dataclass(frozen=True)
class Budget:
    """Answer to budget_get."""

    id: RequestId
    epoch: Epoch
    vram_budget_bytes: Annotated[Bytes, "In force; 0: no limit."]
    floor_bytes: Annotated[Bytes, "No VRAM budget below it is possible."]
    full_bytes: Annotated[Bytes, "With this budget all weights are resident."]
    state: Annotated[LeaseState, "State of the lease."]
    version: Annotated[Count, "Version of the lease in force; 0: none was given."]
    wanted_bytes: Annotated[
        Bytes,
        "What the sidecar would like: `full_bytes` while jobs are open and the budget is below it, else what it holds.",
    ]
    used_bytes: Annotated[Bytes, "What the sidecar holds, exact by its own count."]


@dataclass(frozen=True)
class Caps:
    """Answer to caps_and_requirements."""

    id: RequestId
    epoch: Epoch
    device: Annotated[Name, "Where the model runs."]
    total_bytes: Annotated[Bytes | None, "VRAM of the device; missing where the system does not tell."]
    free_bytes: Annotated[
        Bytes | None, "Free VRAM of the device when last looked at; missing where the system does not tell."
    ]
    floor_bytes: Annotated[Bytes, "No VRAM budget below it is possible."]
    full_bytes: Annotated[Bytes, "With this budget all weights are resident."]
    context: Annotated[Tokens, "Context of one conversation."]
    mode: Annotated[Mode, "`stream_only`: the same bits at any budget."]


@dataclass(frozen=True)
class PlanAnswer:
    """Answer to plan."""

    id: RequestId
    epoch: Epoch
    rows: Annotated[tuple[PlanRow, ...], 32, "One for each budget asked, in their order."]


@dataclass(frozen=True)
class FrameBlock:
    """Answer to frame_block."""

    id: RequestId
    epoch: Epoch
    path: Annotated[str, checks.text(4096, least=1), "To be opened for reading and writing, and mapped."]


@dataclass(frozen=True)
class BrokerStats:
    """The broker's own figures. Jobs are those of all clients."""

    pid: Annotated[Count, "Process of the broker."]
    engine_pid: Annotated[Count | None, "Process of the engine; missing while none runs."]
    engine: Annotated[EngineState, "Where the engine process stands."]
    engine_restarts: Annotated[Count, "Restarts of the engine since the launch."]
    sessions: Annotated[Count, "Clients."]
    jobs_queued: Annotated[Count, "Jobs that wait."]
    jobs_running: Annotated[Count, "Jobs that run."]
    uptime_s: Annotated[Seconds, "Time since the launch."]


@dataclass(frozen=True)
class Stats:
    """Answer to stats."""

    id: RequestId
    epoch: Epoch
    broker: Annotated[BrokerStats, "Figures of the broker."]
    engine: Annotated[Mapping[str, Any] | None, "Figures of the device and of batches; missing while no engine runs."]


@dataclass(frozen=True)
class Pong:
    """Answer to ping."""

    id: RequestId
    epoch: Epoch
    jobs: Annotated[tuple[tuple[Id, Count], ...], "Each open job, and how many of its events have been sent."]


# ---- broker to client: events of a job, numbered from 0 without gaps ------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The job runs."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    n_prompt: Annotated[Tokens, "Length of the prompt."]


@dataclass(frozen=True)
class Progress:
    """How far a job with images has got before its first token."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    phase: Annotated[Phase, "Images are encoded, or the prompt is read."]
    done: Annotated[Count, "Images, or tokens of the prompt."]
    total: Annotated[Count, "Images (more where a model cuts one into tiles), or tokens of the prompt."]


@dataclass(frozen=True)
class Delta:
    """More text of the answer."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    text: Annotated[
        str, checks.text(codec.CLIENT.string, least=1), "More of the answer, never cut within a code point."
    ]
    tokens: Annotated[
        int, checks.integer(1, unit="tokens"), "Since the last delta, those without text of their own included."
    ]


@dataclass(frozen=True)
class Done:
    """Last event: the answer is complete."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    reason: Annotated[
        Reason, "The model ended or a stop string came (`stop`), or `max_tokens` were reached (`length`)."
    ]
    n_prompt: Annotated[Tokens, "Length of the prompt."]
    n_generated: Annotated[Tokens, "Length of the answer."]
    prefill_s: Annotated[Seconds, "From the start of the prompt to the first token."]
    decode_s: Annotated[Seconds, "From the first token to the end."]


@dataclass(frozen=True)
class Failed:
    """Last event: the job ended by an error. The text so far stands."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline
    error: Annotated[ErrorInfo, "Such as `context_overflow`, `engine_died`, `overloaded`, `connection_lost`."]


@dataclass(frozen=True)
class Cancelled:
    """Last event: the job was cancelled."""

    job: Job
    seq: Seq
    epoch: Epoch
    timeline: Timeline


@dataclass(frozen=True)
class UnknownEvent:
    """An event of a job that this version does not know. It is counted and given credit for like any other."""

    job: Job
    seq: Seq
    epoch: Epoch


# ---- broker to client: to every session -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """The engine process changed its state. Jobs go on by themselves after a restart."""

    epoch: Epoch
    state: Annotated[EngineState, "New state of the engine process."]
    restarts: Annotated[Count, "Restarts of the engine since the launch."]
    error: Annotated[ErrorInfo | None, "Why it is off."] = None


@dataclass(frozen=True)
class Notice:
    """The sidecar's side of the negotiation, to sessions that asked for notices. Nothing has to be done."""

    epoch: Epoch
    kind: Annotated[NoticeKind, "What the notice is about."]
    vram_budget_bytes: Annotated[
        Bytes, "Of `other_process` what that one holds (0: not known), of the others a budget."
    ]
    seconds: Annotated[
        Seconds, "Of `late` until all is released, predicted; of `state` how long the change took; else 0."
    ]
    detail: Annotated[str, checks.text(200), "Words for a log; of `state` the state."]


# ---- tables ---------------------------------------------------------------------------------------------------------

Request = (
    Hello
    | Submit
    | Cancel
    | Credit
    | BudgetSet
    | BudgetGet
    | CapsGet
    | PlanGet
    | FrameBlockGet
    | Pacing
    | ModelInfoGet
    | StatsGet
    | Ping
    | Bye
    | Shutdown
)
JobEvent = Started | Progress | Delta | Done | Failed | Cancelled | UnknownEvent
Reply = (
    Welcome | Model | Ok | Error | Lease | Released | Observed | Budget | Caps | PlanAnswer | FrameBlock | Stats | Pong
)
Unasked = Engine | Notice
Message = Request | Reply | JobEvent | Unasked

REQUESTS: dict[str, type[Any]] = {
    "hello": Hello,
    "submit": Submit,
    "cancel": Cancel,
    "credit": Credit,
    "budget_set": BudgetSet,
    "budget_get": BudgetGet,
    "caps_and_requirements": CapsGet,
    "plan": PlanGet,
    "frame_block": FrameBlockGet,
    "pacing": Pacing,
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
    "frame_block": FrameBlock,
    "stats": Stats,
    "pong": Pong,
    "started": Started,
    "progress": Progress,
    "delta": Delta,
    "done": Done,
    "failed": Failed,
    "cancelled": Cancelled,
    "engine": Engine,
    "notice": Notice,
}

TERMINAL = (Done, Failed, Cancelled)

_NAMES: dict[type[Any], str] = {cls: name for table in (REQUESTS, ANSWERS) for name, cls in table.items()}

# ---- conversion -----------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The frame for `message`.

    Fields that have their default are left out of requests, so that an older sidecar, which may not know them, takes
    them.

    :raises BadArgument: the other side would refuse it; names the field.
    """
    fields = dataclasses.asdict(message)
    try:
        checks.convert(type(message), fields)
    except checks.Refused as refused:
        raise BadArgument(str(refused)) from None
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
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


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
