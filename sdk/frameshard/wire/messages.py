"""The protocol: one frozen dataclass for each message, checked strictly in both directions.

The annotation of a field is its check (:mod:`frameshard.wire.checks`). Names of messages and fields are those of
bindings/PROTOCOL.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from frameshard.errors import BadArgument, BadMessage, FrameshardError, VersionMismatch, from_wire
from frameshard.wire import checks, codec
from frameshard.wire.checks import Count, Id, Name, Seconds, Text

VERSION = 1
"""Of the protocol. Both sides must have the same."""

MAX_WINDOW = 256
"""Events that may be under way to a client for one job."""

MIN_RATE, MAX_RATE = 0.1, 10_000.0
"""Bounds of a target of tokens per second, but for 0."""


def _rate(value: Any) -> float:
    if type(value) not in (int, float) or not (value == 0 or MIN_RATE <= value <= MAX_RATE):
        raise checks.Refused(f"must be 0 or a number from {MIN_RATE} to {MAX_RATE}")
    return float(value)


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

    role: Role
    content: Text


@dataclass(frozen=True)
class Image:
    """A picture: a PNG or JPEG file (`encoded`), or rows of 8-bit pixels from the top, `stride` bytes apart (0: without
    a gap). Its bytes are `data`, or the first `size` of the shared memory at `path`."""

    format: ImageFormat
    data: Annotated[bytes, checks.binary(MAX_INLINE_BYTES)] = b""
    path: Annotated[str, checks.text(4096)] = ""
    size: Annotated[int, checks.integer(0, MAX_IMAGE_BYTES)] = 0
    width: Annotated[int, checks.integer(0, 1 << 16)] = 0
    height: Annotated[int, checks.integer(0, 1 << 16)] = 0
    stride: Annotated[int, checks.integer(0, 1 << 24)] = 0


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. The same values and the same `seed` give the same text.

    `max_tokens` bounds the answer; `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; without a `seed` the
    sidecar draws one. Generation ends before any of the strings in `stop`. With a `json_schema`, a JSON schema as text,
    the answer is JSON that fits it, unless `max_tokens` or `stop` ends it before; bindings/PROTOCOL.md, "JSON schemas",
    says what of a schema is understood.
    """

    max_tokens: Annotated[int, checks.integer(1, 1 << 20)] = 256
    temperature: Annotated[float, checks.number(0, 5)] = 0.8
    top_k: Annotated[int, checks.integer(0, 1 << 20)] = 40
    top_p: Annotated[float, checks.number(0, 1)] = 0.95
    min_p: Annotated[float, checks.number(0, 1)] = 0.05
    repeat_penalty: Annotated[float, checks.number(0.5, 2)] = 1.0
    seed: Annotated[int, checks.integer(0, 2**32 - 1)] | None = None
    stop: Annotated[tuple[StopString, ...], 16] = ()
    json_schema: Text = ""


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True)
class ErrorInfo:
    """An error on its way; :func:`frameshard.errors.from_wire` makes the exception of it."""

    code: Count
    name: Annotated[str, checks.text(64)]
    message: Text
    retriable: bool
    detail: Mapping[str, Any]

    @classmethod
    def of(cls, error: FrameshardError) -> ErrorInfo:
        """What `error` says. A detail that the wire cannot carry is left out rather than losing the error."""
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
    """The model that is loaded.

    `n_ctx` is how many tokens one conversation has room for, and `n_parallel` jobs run at a time. No VRAM budget below
    `floor_bytes` is possible; with `full_bytes` all weights are resident. `vision` names what reads images, "" for
    nothing.
    """

    name: Annotated[str, checks.text(4096)]
    arch: Name
    device: Name
    n_ctx: Count
    n_parallel: Count
    n_vocab: Count
    n_layer: Count
    chat: bool
    floor_bytes: Count
    full_bytes: Count
    plan: Mapping[str, Any]
    vision: Name = ""


@dataclass(frozen=True)
class ServerLimits:
    """What this server accepts."""

    message_bytes: Count
    string_bytes: Count
    jobs: Count
    window: Count
    silent_s: Seconds


@dataclass(frozen=True)
class PlanRow:
    """Predictions at one budget; the times are null where it does not fit."""

    vram_budget_bytes: Count
    fits: bool
    ttft_s: Seconds | None
    tokens_per_second: Annotated[float, checks.number(0, 1e9)] | None
    resident_bytes: Count
    streamed_bytes: Count
    cpu_bytes: Count


# ---- client to broker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """First message of a connection. `session` resumes one; `epoch` refuses any other launch of the server; only who
    asks for `notices` gets them."""

    id: Id
    protocol: Count
    client: Annotated[str, checks.text(64)]
    epoch: Id | None = None
    session: Id | None = None
    notices: bool = False


@dataclass(frozen=True)
class Submit:
    """Asks for a job. `job` is chosen by the client and never used again in the session."""

    id: Id
    epoch: Id
    job: Id
    kind: Kind
    messages: tuple[ChatMessage, ...] = ()
    prompt: Text = ""
    conversation: Annotated[str, checks.text(128, least=1)] | None = None
    sampling: Sampling = DEFAULT_SAMPLING
    timeline: Count = 0
    window: Annotated[int, checks.integer(1, MAX_WINDOW)] = 32
    images: Annotated[tuple[Image, ...], MAX_IMAGES] = ()

    def __post_init__(self) -> None:
        if self.kind == "chat" and (not self.messages or self.prompt):
            raise checks.Refused("messages: a chat has messages and no prompt")
        if self.kind == "completion" and (self.messages or not self.prompt):
            raise checks.Refused("prompt: a completion has a prompt and no messages")


@dataclass(frozen=True)
class Cancel:
    """Ends a job early. The job's last event says how it ended."""

    id: Id
    epoch: Id
    job: Id


@dataclass(frozen=True)
class Credit:
    """The client has taken all events of `job` before `next`; `resend` asks for those from `next` on once more."""

    epoch: Id
    job: Id
    next: Count
    resend: bool = False


@dataclass(frozen=True)
class BudgetSet:
    """The host's word on VRAM: everything the sidecar holds there must fit; 0 is no limit. `state` parks or hibernates
    the sidecar, `floor_bytes` is what it keeps when it is idle, and a `version` makes late messages harmless."""

    id: Id
    epoch: Id
    vram_budget_bytes: Count
    timeout_s: Annotated[float, checks.number(0.001, 60)] = 5.0
    state: LeaseState = "active"
    floor_bytes: Count = 0
    version: Count = 0
    reason: Annotated[str, checks.text(64)] = ""


@dataclass(frozen=True)
class FrameBlockGet:
    """Where the page is in which the host says when it draws."""

    id: Id
    epoch: Id


@dataclass(frozen=True)
class Pacing:
    """How the sidecar shares the GPU with the host's frames. 0 tokens per second is no bound."""

    id: Id
    epoch: Id
    scheduling_mode: SchedulingMode = "balance"
    target_tokens_per_second: Annotated[float, _rate] = 0.0


@dataclass(frozen=True)
class BudgetGet:
    id: Id
    epoch: Id


@dataclass(frozen=True)
class CapsGet:
    """What there is, and what the model needs."""

    id: Id
    epoch: Id


@dataclass(frozen=True)
class PlanGet:
    """What if: predictions at these budgets. Changes nothing."""

    id: Id
    epoch: Id
    budgets: Annotated[tuple[Count, ...], 32]
    prompt_tokens: Annotated[int, checks.integer(1, 1 << 20)] = 512


@dataclass(frozen=True)
class ModelInfoGet:
    id: Id
    epoch: Id


@dataclass(frozen=True)
class StatsGet:
    id: Id
    epoch: Id


@dataclass(frozen=True)
class Ping:
    id: Id
    epoch: Id


@dataclass(frozen=True)
class Bye:
    """The client leaves: its jobs are cancelled and the session ends."""

    id: Id
    epoch: Id


@dataclass(frozen=True)
class Shutdown:
    """Ends the sidecar."""

    id: Id
    epoch: Id


# ---- broker to client: answers, with the request's id ---------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """Answer to hello. `resumed` is true when the session asked for was found; if not, its jobs are lost."""

    id: Id
    epoch: Id
    protocol: Count
    session: Id
    resumed: bool
    server: Annotated[str, checks.text(64)]
    limits: ServerLimits
    engine: EngineState
    model: ModelInfo | None


@dataclass(frozen=True)
class Model:
    id: Id
    epoch: Id
    model: ModelInfo


@dataclass(frozen=True)
class Ok:
    """The request has been taken; for submit: the job is queued."""

    id: Id
    epoch: Id


@dataclass(frozen=True)
class Error:
    """The request has been refused and has changed nothing. `id` is null when the frame did not show one."""

    id: Id | None
    epoch: Id
    error: ErrorInfo


@dataclass(frozen=True)
class Lease:
    """First answer to budget_set: ``partial`` when only `vram_budget_bytes` can be reached by the deadline; all of it
    takes `seconds`, predicted."""

    id: Id
    epoch: Id
    decision: Decision
    vram_budget_bytes: Count
    seconds: Seconds
    version: Count


@dataclass(frozen=True)
class Released:
    """Second answer to budget_set: what the sidecar holds, exact by its own count, and after what time."""

    id: Id
    epoch: Id
    vram_budget_bytes: Count
    used_bytes: Count
    seconds: Seconds


@dataclass(frozen=True)
class Observed:
    """Third answer to budget_set: what the driver counts for the engine process, or null where it does not say."""

    id: Id
    epoch: Id
    observed_bytes: Count | None
    seconds: Seconds


@dataclass(frozen=True)
class Budget:
    id: Id
    epoch: Id
    vram_budget_bytes: Count
    floor_bytes: Count
    full_bytes: Count
    state: LeaseState
    version: Count
    wanted_bytes: Count
    used_bytes: Count


@dataclass(frozen=True)
class Caps:
    """`total_bytes` and `free_bytes` of the device are null where the driver does not tell. `context` is the tokens of
    one conversation."""

    id: Id
    epoch: Id
    device: Name
    total_bytes: Count | None
    free_bytes: Count | None
    floor_bytes: Count
    full_bytes: Count
    context: Count
    mode: Mode


@dataclass(frozen=True)
class PlanAnswer:
    """One row for each budget asked, in their order."""

    id: Id
    epoch: Id
    rows: Annotated[tuple[PlanRow, ...], 32]


@dataclass(frozen=True)
class FrameBlock:
    """`path` is to be opened for reading and writing, and mapped."""

    id: Id
    epoch: Id
    path: Annotated[str, checks.text(4096, least=1)]


@dataclass(frozen=True)
class BrokerStats:
    """The broker's own figures. Jobs of all clients."""

    pid: Count
    engine_pid: Count | None
    engine: EngineState
    engine_restarts: Count
    sessions: Count
    jobs_queued: Count
    jobs_running: Count
    uptime_s: Seconds


@dataclass(frozen=True)
class Stats:
    """`engine` is null while no engine runs."""

    id: Id
    epoch: Id
    broker: BrokerStats
    engine: Mapping[str, Any] | None


@dataclass(frozen=True)
class Pong:
    """`jobs` pairs each open job with the number of its events sent so far: a client that has fewer has lost some."""

    id: Id
    epoch: Id
    jobs: tuple[tuple[Id, Count], ...]


# ---- broker to client: events of a job, numbered from 0 without gaps ------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The job runs."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count
    n_prompt: Count


@dataclass(frozen=True)
class Progress:
    """How far a job with images has got: `done` images of `total` are encoded, or tokens of the prompt are read."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count
    phase: Phase
    done: Count
    total: Count


@dataclass(frozen=True)
class Delta:
    """More text, never cut within a code point. `tokens` counts what it was made of since the last delta."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count
    text: Annotated[str, checks.text(codec.CLIENT.string, least=1)]
    tokens: Annotated[int, checks.integer(1)]


@dataclass(frozen=True)
class Done:
    """Last event: the answer is complete."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count
    reason: Reason
    n_prompt: Count
    n_generated: Count
    prefill_s: Seconds
    decode_s: Seconds


@dataclass(frozen=True)
class Failed:
    """Last event: the job ended by an error. The text so far stands."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count
    error: ErrorInfo


@dataclass(frozen=True)
class Cancelled:
    """Last event: the job was cancelled."""

    job: Id
    seq: Count
    epoch: Id
    timeline: Count


# ---- broker to client: to every session -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """The engine process changed state; `error` says why it is off. Jobs go on by themselves after a restart."""

    epoch: Id
    state: EngineState
    restarts: Count
    error: ErrorInfo | None = None


@dataclass(frozen=True)
class Notice:
    """The sidecar's side of the negotiation, to sessions that asked for `notices`. Nothing has to be done."""

    epoch: Id
    kind: NoticeKind
    vram_budget_bytes: Count
    seconds: Seconds
    detail: Annotated[str, checks.text(200)]


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
JobEvent = Started | Progress | Delta | Done | Failed | Cancelled
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
    """The frame for `message`. Raises :class:`BadArgument`, naming the field, for what the other side would refuse."""
    fields = dataclasses.asdict(message)
    try:
        checks.convert(type(message), fields)
    except checks.Refused as refused:
        raise BadArgument(str(refused)) from None
    return codec.encode({"t": _NAMES[type(message)], **fields})


def decode_request(frame: bytes) -> Request:
    """What a client sent.

    Raises :class:`BadMessage`, or :class:`VersionMismatch` for another protocol's hello. The error's detail has ``id``
    when the frame shows one.
    """
    request: Request = _decode(REQUESTS, frame)
    return request


def decode_answer(frame: bytes) -> Reply | JobEvent | Unasked:
    """What a broker sent. Raises :class:`BadMessage`."""
    answer: Reply | JobEvent | Unasked = _decode(ANSWERS, frame)
    return answer


def _decode(table: dict[str, type[Any]], frame: bytes) -> Any:
    fields = codec.decode(frame)
    request_id = fields.get("id")
    detail = {"id": request_id} if type(request_id) is int and request_id > 0 else {}
    name = fields.pop("t", None)
    if type(name) is not str or name not in table:
        raise BadMessage("t: unknown message", **detail)
    if name == "hello" and type(fields.get("protocol")) is int and fields["protocol"] != VERSION:
        # Before its other fields, which another version may have changed.
        raise VersionMismatch(f"this server speaks protocol {VERSION}", protocol=VERSION, **detail)
    try:
        return checks.convert(table[name], fields)
    except checks.Refused as refused:
        raise BadMessage(f"{name}.{refused}", **detail) from None
