"""The messages between the broker and its engine process. Each is a frozen dataclass, checked in both directions.

Commands go to the engine, and events come from it. The annotation of a field defines its check
(:mod:`frameshard.wire.checks`). On the stream (:mod:`frameshard.wire.channel`) a message is a map. Its name is under
``op`` for a command and under ``ev`` for an event. Fields that have their default are left out.

To add a message, add it here and where it is sent and received: in broker/ and in engine/process.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Annotated, Any

from frameshard.errors import BadArgument, BadMessage
from frameshard.records import record
from frameshard.wire import channel, checks, codec
from frameshard.wire import messages as m
from frameshard.wire.checks import Bytes, Count, Id, Seconds, Text, Tokens
from frameshard.wire.launch import MAX_THREADS, EngineOptions

Shapes = Annotated[tuple[tuple[Count, Count, Count], ...], codec.ENGINE.array]
"""How a sequence was divided into graphs. Each item is (tokens kept, tokens decoded, repetitions in a row)."""


IDLE_PRIORITY = -1
"""Of a warm-up: below that of any other job."""

Priority = Annotated[int, checks.integer(IDLE_PRIORITY, m.MAX_PRIORITY)]


@record
class EngineConfig(EngineOptions):
    """The options of the engine: its launch options, and an option that only tools set.

    :raises BadArgument: a value is of the wrong type or out of range; detail has ``field``.
    """

    device: Annotated[str, checks.text(256, least=1)] = "cpu"
    n_outputs_max: Annotated[
        int,
        checks.integer(0, 2**16),
        "Rows of logits that one decode may ask for; 0: as many as the other options need.",
    ] = 0


# ---- broker to engine -----------------------------------------------------------------------------------------------


@record
class Submit:
    """Runs a job, or resumes a job of an earlier engine."""

    job: Id
    kind: m.Kind
    sampling: m.Sampling
    messages: Annotated[tuple[m.ChatMessage, ...], codec.ENGINE.array] = ()
    prompt: Annotated[str, checks.text(codec.ENGINE.string)] = ""
    images: Annotated[tuple[m.Image, ...], m.MAX_IMAGES] = ()
    conversation: Annotated[str, checks.text(256, least=1)] | None = None
    resume: Annotated[tuple[Count, ...], codec.ENGINE.array] = ()
    """The ids of the tokens that the job has already produced."""
    history: Shapes = ()
    """The history of the job's first :class:`Started`."""
    sentences: bool = False
    """Each :class:`Token` marks the ends of sentences in its text."""
    priority: Priority = 1
    warm_up: bool = False
    adapters: Annotated[tuple[m.Adapter, ...], m.MAX_JOB_ADAPTERS] = ()
    thinking: m.Thinking = "off"
    thinking_tokens: Count = 0
    template_keywords: Annotated[str, checks.text(m.MAX_TEMPLATE_KEYWORDS)] = ""
    given: Annotated[str, checks.text(codec.ENGINE.string)] = ""
    """The beginning of the answer that another model has written. The tokens of ``resume`` are behind it."""
    tools: Annotated[tuple[m.Tool, ...], m.MAX_TOOLS] = ()
    tool_choice: Annotated[str, checks.text(64, least=1)] = "auto"

    def __post_init__(self) -> None:
        if self.kind == "chat" and not self.messages:
            raise checks.Refused("a chat has messages", "messages")


@record
class Cancel:
    """Ends a job early. No event follows if the job has already ended."""

    job: Id
    pause: bool = False
    """The job will be submitted again: the engine keeps its KV if it can."""


@record
class SetPriority:
    """Changes the priority of a job. Nothing happens if the job has already ended."""

    job: Id
    priority: Priority


@record
class SetBudget:
    """Changes the budget, parks or unparks. The answers are :class:`BudgetGranted`, sometimes :class:`BudgetLate`, then
    :class:`BudgetReleased` and :class:`BudgetObserved`. Until the release :class:`BudgetRefused` may come instead."""

    seq: Count
    vram_budget_bytes: Bytes
    timeout_s: Seconds = 5.0
    parked: bool = False
    host_budget_bytes: Bytes = 0
    """The limit for the host memory of all processes; 0: none."""
    known_generation: Count | None = None
    """For a change that the sidecar makes on its own: the last budget in the frame block of which the broker knows. A
    later one stays in force. None for a host's change."""


@record
class OpenFrameBlock:
    """Opens the frame block at this path and paces the engine by it."""

    path: Annotated[str, checks.text(4096)]


@record
class SetPacing:
    """Sets how the GPU is shared with the host's frames, and the rate of tokens."""

    scheduling_mode: m.SchedulingMode
    target_tokens_per_second: Annotated[float, checks.number(0, 1e9)]
    """The limit for all jobs together; 0: no limit."""


@record
class LoadAdapter:
    """Loads a LoRA adapter. The answer is :class:`Adapters`."""

    seq: Count
    name: m.AdapterName
    path: Annotated[str, checks.path(least=1)]


@record
class UnloadAdapter:
    """Unloads a LoRA adapter that no job uses. The answer is :class:`Adapters`."""

    seq: Count
    name: m.AdapterName


@record
class MakePlans:
    """Asks for a prediction for each budget. The answer is :class:`Plans`."""

    seq: Count
    budgets: Annotated[tuple[Bytes, ...], 32]
    prompt_tokens: Annotated[int, checks.integer(1, 1 << 20)]


@record
class SaveKv:
    """Asks to write the KV cache of a conversation to a file. The answer is :class:`Kv`.

    :param part: path of the file until it is whole. The broker removes what a dead engine has left there.
    """

    seq: Count
    conversation: Text
    path: Text
    part: Text


@record
class LoadKv:
    """Asks to read the KV cache of a conversation from a file. The answer is :class:`Kv`."""

    seq: Count
    conversation: Text
    path: Text


@record
class CountTokens:
    """Asks how many tokens a prompt has. The answer is :class:`TokenCount`."""

    seq: Count
    messages: Annotated[tuple[m.ChatMessage, ...], codec.ENGINE.array] = ()
    prompt: Annotated[str, checks.text(codec.ENGINE.string)] = ""
    tools: Annotated[tuple[m.Tool, ...], m.MAX_TOOLS] = ()


@record
class GetStats:
    """Asks for statistics. The answer is :class:`Stats`."""

    seq: Count


@record
class AskAlive:
    """Asks whether the process runs. The reader thread answers :class:`Alive` at once, also if the main thread is
    stuck."""


@record
class Ping:
    """Asks whether the engine makes progress. The answer is :class:`Pong`, from the main thread or while a decode makes
    progress."""

    seq: Count


@record
class Stop:
    """Tells the engine to free the model and to end."""


Command = (
    EngineConfig
    | Submit
    | Cancel
    | SetPriority
    | SetBudget
    | OpenFrameBlock
    | SetPacing
    | LoadAdapter
    | UnloadAdapter
    | MakePlans
    | SaveKv
    | LoadKv
    | CountTokens
    | GetStats
    | AskAlive
    | Ping
    | Stop
)

# ---- engine to broker -----------------------------------------------------------------------------------------------


@record
class Ready:
    """The model is loaded, and the engine accepts jobs."""

    model: m.ModelInfo
    vram_budget_bytes: Bytes
    n_ubatch: Count
    n_threads: Annotated[int, checks.integer(0, MAX_THREADS)]
    load_s: Seconds


@record
class Loading:
    """How far the model is loaded; see :class:`frameshard.wire.messages.Loading`."""

    stage: m.LoadingStage
    done: Count
    total: Count


@record
class Fatal:
    """The engine ends with this error."""

    error: m.ErrorInfo


@record
class Started:
    """The job has a sequence and runs."""

    job: Id
    n_prompt: Count
    n_reused: Count
    """How many tokens of the prompt were already in the KV cache."""
    seed: Count
    history: Shapes = ()
    """In mode ``stream_only``: how the prompt is divided into graphs, so that a resumed job has the same bits."""
    n_given: Count = 0
    """How many tokens :attr:`Submit.given` has."""


@record
class Progress:
    """The progress of a job with images or a long prompt; see :class:`frameshard.wire.messages.Progress`."""

    job: Id
    phase: m.Phase
    done: Count
    total: Count


@record
class Token:
    """One more token of an answer."""

    job: Id
    n: Count
    """Its position in the answer, from 0."""
    id: Count
    text: Text
    """The text that is complete with this token; it may be empty."""
    ends: Annotated[tuple[Count, ...], codec.ENGINE.array] = ()
    """The positions in ``text`` at which sentences end, in characters, ascending. Empty without
    :attr:`Submit.sentences`."""
    thought: Text = ""
    """The part of the model's thought that is complete with this token; it is not in ``text``."""
    calls: Annotated[tuple[m.ToolCall, ...], m.MAX_CALLS] = ()
    """The calls of tools that are complete with this token. They come after ``text``."""

    def __post_init__(self) -> None:
        places = (0, *self.ends)
        if any(a >= b for a, b in itertools.pairwise(places)) or places[-1] > len(self.text):
            raise checks.Refused("sentences end inside the text, one behind the other", "ends")


@record
class Done:
    """The answer is complete."""

    job: Id
    reason: m.Reason
    n_prompt: Count
    n_generated: Count
    prefill_s: Seconds
    decode_s: Seconds
    n_left: Count = 0
    """How many tokens still fit into the context."""


@record
class Failed:
    """The job has ended with an error."""

    job: Id
    error: m.ErrorInfo


@record
class Cancelled:
    """The job has ended because of a :class:`Cancel`."""

    job: Id


@record
class BudgetGranted:
    """The first answer to :class:`SetBudget`, a prediction: the budget that is reached by the deadline, and the seconds
    until the whole change is complete."""

    seq: Count
    vram_budget_bytes: Bytes
    seconds: Seconds


@record
class BudgetLate:
    """Comes after half of the time if the deadline will be missed. The fields are as in :class:`BudgetGranted`."""

    seq: Count
    vram_budget_bytes: Bytes
    seconds: Seconds


@record
class BudgetReleased:
    """The second answer to :class:`SetBudget`: the budget in force, and the bytes that the ledger counts. With ``seq``
    0 it reports a budget that the host has written into the frame block, the ``generation`` of that one."""

    seq: Count
    vram_budget_bytes: Bytes
    used_bytes: Bytes
    seconds: Seconds
    host_budget_bytes: Bytes = 0
    host_used_bytes: Bytes = 0
    generation: Count = 0


@record
class BudgetObserved:
    """The third answer to :class:`SetBudget`: the bytes that the driver counts, and the host memory that the system
    counts; None if there is no count."""

    seq: Count
    observed_bytes: Bytes | None
    seconds: Seconds
    host_observed_bytes: Bytes | None = None


@record
class BudgetRefused:
    """The last answer to :class:`SetBudget` if the change fails: the error."""

    seq: Count
    error: m.ErrorInfo


@record
class Stats:
    """The engine's statistics, for the protocol's ``stats`` answer."""

    seq: Count
    stats: Mapping[str, Any]


@record
class Plans:
    """The answer to :class:`MakePlans`: one row for each budget, or the error."""

    seq: Count
    rows: Annotated[tuple[m.PlanRow, ...], 32] = ()
    error: m.ErrorInfo | None = None


@record
class Adapters:
    """The answer to :class:`LoadAdapter` and :class:`UnloadAdapter`: the adapters that are loaded now and the floor
    with them, or the error."""

    seq: Count
    adapters: Annotated[tuple[m.AdapterInfo, ...], m.MAX_ADAPTERS] = ()
    floor_bytes: Bytes = 0
    error: m.ErrorInfo | None = None


@record
class Kv:
    """The answer to :class:`SaveKv` and :class:`LoadKv`.

    :param n_tokens: of the KV cache that was written or read; 0: none, and `detail` says why.
    """

    seq: Count
    n_tokens: Tokens = 0
    file_bytes: Bytes = 0
    detail: Annotated[str, checks.text(m.MAX_KV_DETAIL)] = ""


@record
class TokenCount:
    """The answer to :class:`CountTokens`: the tokens of the prompt and how many still fit into the context behind it,
    or the error."""

    seq: Count
    n_tokens: Count = 0
    n_left: Count = 0
    error: m.ErrorInfo | None = None


@record
class Watch:
    """The state of the device's memory and of host memory. Bytes that neither driver nor system give are None."""

    used_bytes: Bytes
    floor_bytes: Bytes
    full_bytes: Bytes
    total_bytes: Bytes | None
    free_bytes: Bytes | None
    appeared: tuple[tuple[Count, Bytes], ...]
    """(process id, bytes) of each process that has begun to use the device since the last report. The id 0 means that
    the process is not known."""
    excess_bytes: Bytes
    """The bytes above the budget that the driver counts."""
    host_used_bytes: Bytes = 0
    host_floor_bytes: Bytes = 0
    host_total_bytes: Bytes | None = None
    host_free_bytes: Bytes | None = None


@record
class HostPressure:
    """The engine has set a limit of its own for host memory, because the machine is short of it; 0: the limit ends."""

    limit_bytes: Bytes
    why: Annotated[str, checks.text(m.MAX_NOTICE_DETAIL)]


@record
class Alive:
    """The answer to :class:`AskAlive`."""


@record
class Pong:
    """The answer to :class:`Ping`."""

    seq: Count


JobEvent = Started | Progress | Token | Done | Failed | Cancelled
BudgetEvent = BudgetGranted | BudgetLate | BudgetReleased | BudgetObserved | BudgetRefused
Answer = Stats | Plans | TokenCount | Adapters | Kv
Event = Loading | Ready | Fatal | JobEvent | BudgetEvent | Answer | Watch | HostPressure | Alive | Pong
Message = Command | Event

COMMANDS: dict[str, type[Any]] = {
    "load": EngineConfig,
    "submit": Submit,
    "cancel": Cancel,
    "priority": SetPriority,
    "budget": SetBudget,
    "frame_block": OpenFrameBlock,
    "pacing": SetPacing,
    "load_adapter": LoadAdapter,
    "unload_adapter": UnloadAdapter,
    "plan": MakePlans,
    "kv_save": SaveKv,
    "kv_load": LoadKv,
    "count": CountTokens,
    "stats": GetStats,
    "alive": AskAlive,
    "ping": Ping,
    "stop": Stop,
}

EVENTS: dict[str, type[Any]] = {
    "loading": Loading,
    "ready": Ready,
    "fatal": Fatal,
    "started": Started,
    "progress": Progress,
    "token": Token,
    "done": Done,
    "failed": Failed,
    "cancelled": Cancelled,
    "granted": BudgetGranted,
    "late": BudgetLate,
    "released": BudgetReleased,
    "observed": BudgetObserved,
    "refused": BudgetRefused,
    "stats": Stats,
    "plan": Plans,
    "count": TokenCount,
    "adapters": Adapters,
    "kv": Kv,
    "watch": Watch,
    "host_pressure": HostPressure,
    "alive": Alive,
    "pong": Pong,
}

NAMES: dict[type[Any], str] = {cls: name for table in (COMMANDS, EVENTS) for name, cls in table.items()}
_COMMAND_TYPES = frozenset(COMMANDS.values())

# ---- conversion -----------------------------------------------------------------------------------------------------


def pack(message: Message) -> bytes:
    """Returns the bytes of `message` for the stream.

    :raises BadArgument: a field has a value that the other side would refuse.
    """
    cls: Any = type(message)
    fields = {"op" if cls in _COMMAND_TYPES else "ev": NAMES[cls]}
    for name, field in checks.fields_of(cls).items():
        value = getattr(message, name)
        if value == field.default:
            continue
        fields[name] = value = _plain(value)
        try:
            field.check.take(value, True)
        except checks.Refused as refused:
            raise BadArgument(f"{NAMES[cls]}.{name}: {refused}") from None
    return channel.pack(fields)


def read_command(fields: Mapping[str, Any]) -> Command:
    """Converts a map from the stream to a command.

    :raises BadMessage: the map is not a valid command.
    """
    command: Command = _read("op", COMMANDS, fields)
    return command


def read_event(fields: Mapping[str, Any]) -> Event:
    """Converts a map from the stream to an event.

    :raises BadMessage: the map is not a valid event.
    """
    event: Event = _read("ev", EVENTS, fields)
    return event


def refusal(fields: Mapping[str, Any], error: BadMessage) -> Event | None:
    """Returns the event that reports an invalid command, so that only this command fails. Returns None if there is no
    such event.

    :param fields: the map of the command.
    :param error: the error of :func:`read_command`.
    """
    why = m.ErrorInfo.of(BadArgument(error.message, **error.detail))
    name, number = fields.get("op"), fields.get("job", fields.get("seq"))
    if name == "load":
        return Fatal(why)
    if type(number) is not int or not 0 < number <= codec.MAX_ID:
        return None
    if name == "submit":
        return Failed(number, why)
    if name == "budget":
        return BudgetRefused(number, why)
    if name in ("load_adapter", "unload_adapter"):
        return Adapters(number, error=why)
    if name in ("kv_save", "kv_load"):
        return Kv(number, detail=why.message[: m.MAX_KV_DETAIL])
    if name == "count":
        return TokenCount(number, error=why)
    return Plans(number, error=why) if name == "plan" else None


def _plain(value: Any) -> Any:
    """Returns `value` with records turned into maps. Fields that have their default are left out."""
    if dataclasses.is_dataclass(value):
        found = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: _plain(each) for name, (each, default) in found.items() if each != default}
    if isinstance(value, tuple | list) and value and dataclasses.is_dataclass(value[0]):
        return [_plain(each) for each in value]
    return value


def _read(key: str, table: dict[str, type[Any]], fields: Mapping[str, Any]) -> Any:
    rest = dict(fields)
    name = rest.pop(key, None)
    if type(name) is not str or name not in table:
        raise BadMessage(f"{key}: unknown message {name!r}")
    try:
        return checks.convert(table[name], rest)
    except checks.Refused as refused:
        raise BadMessage(f"{name}.{refused}", field=refused.field) from None
    except BadArgument as error:
        raise BadMessage(f"{name}.{error}", **error.detail) from None
