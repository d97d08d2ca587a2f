"""Messages between the broker and its engine process: one frozen dataclass for each, checked in both directions.

Commands go to the engine, events come from it. The annotation of a field is its check
(:mod:`frameshard.wire.checks`). On the stream (:mod:`frameshard.wire.channel`) a message is a map: its name under
``op`` for a command or ``ev`` for an event, and its fields without those that have their default.

A message is added here, and where it is sent and taken: in broker/ and in engine/process.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from frameshard.errors import BadArgument, BadMessage
from frameshard.wire import channel, checks, codec
from frameshard.wire import messages as m
from frameshard.wire.checks import Bytes, Count, Id, Seconds, Text
from frameshard.wire.launch import EngineOptions

Shapes = Annotated[tuple[tuple[Count, Count, Count], ...], codec.ENGINE.array]
"""How a sequence was cut into graphs: tokens kept, tokens decoded, and how often in a row."""


@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """What the engine loads and how: the launch options for it, and what only tools set.

    :raises BadArgument: a value is of the wrong type or out of range; detail has ``field``.
    """

    device: Annotated[str, checks.text(256, least=1)] = "cpu"
    n_outputs_max: Annotated[
        int,
        checks.integer(0, 2**16),
        "Rows of logits that one decode may ask for; 0: as many as the other options need.",
    ] = 0


# ---- broker to engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    """Runs a job, or goes on with a job that an earlier engine has begun."""

    job: Id
    kind: m.Kind
    sampling: m.Sampling
    messages: Annotated[tuple[m.ChatMessage, ...], codec.ENGINE.array] = ()
    prompt: Annotated[str, checks.text(codec.ENGINE.string)] = ""
    images: Annotated[tuple[m.Image, ...], m.MAX_IMAGES] = ()
    conversation: Annotated[str, checks.text(256, least=1)] | None = None
    resume: Annotated[tuple[Count, ...], codec.ENGINE.array] = ()
    """Tokens that the job has produced before."""
    history: Shapes = ()
    """From the job's first :class:`Started`."""
    sentences: bool = False
    """Tokens say where sentences end."""
    priority: m.Priority = 1

    def __post_init__(self) -> None:
        if self.kind == "chat" and not self.messages:
            raise checks.Refused("a chat has messages", "messages")


@dataclass(frozen=True)
class Cancel:
    """Ends a job early. No event follows where the job has ended already."""

    job: Id


@dataclass(frozen=True)
class SetBudget:
    """Changes the budget or parks. Answered by :class:`BudgetGranted`, perhaps :class:`BudgetLate`, then
    :class:`BudgetReleased` and :class:`BudgetObserved`; :class:`BudgetRefused` may come instead of any of them."""

    seq: Count
    vram_budget_bytes: Bytes
    timeout_s: Seconds = 5.0
    parked: bool = False


@dataclass(frozen=True)
class OpenFrameBlock:
    """Follows the frame block at this path."""

    path: Annotated[str, checks.text(4096)]


@dataclass(frozen=True)
class SetPacing:
    """Shares the GPU with the host's frames."""

    scheduling_mode: m.SchedulingMode
    target_tokens_per_second: Annotated[float, checks.number(0, 1e9)]
    """0 is no bound."""


@dataclass(frozen=True)
class MakePlans:
    """Asks for predictions, one for each budget. Answered by :class:`Plans`."""

    seq: Count
    budgets: Annotated[tuple[Bytes, ...], 32]
    prompt_tokens: Annotated[int, checks.integer(1, 1 << 20)]


@dataclass(frozen=True)
class GetStats:
    """Answered by :class:`Stats`."""

    seq: Count


@dataclass(frozen=True)
class AskAlive:
    """Answered by :class:`Alive` at once, from the reader thread: the process is not stopped."""


@dataclass(frozen=True)
class Ping:
    """Answered by :class:`Pong` from the main thread, or while a decode makes progress."""

    seq: Count


@dataclass(frozen=True)
class Stop:
    """Ends the engine in good order."""


Command = (
    EngineConfig
    | Submit
    | Cancel
    | SetBudget
    | OpenFrameBlock
    | SetPacing
    | MakePlans
    | GetStats
    | AskAlive
    | Ping
    | Stop
)

# ---- engine to broker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The model is loaded and jobs can come."""

    model: m.ModelInfo
    vram_budget_bytes: Bytes
    n_ubatch: Count
    n_threads: Count
    load_s: Seconds


@dataclass(frozen=True)
class Fatal:
    """The engine ends by this error."""

    error: m.ErrorInfo


@dataclass(frozen=True)
class Started:
    """The job has a sequence."""

    job: Id
    n_prompt: Count
    n_reused: Count
    """Tokens of the prompt that were in the KV cache already."""
    seed: Count
    history: Shapes = ()
    """In mode ``stream_only``: how the prompt is cut into graphs, for a resumption with the same bits."""


@dataclass(frozen=True)
class Progress:
    """How far a job with images has got; see :class:`frameshard.wire.messages.Progress`."""

    job: Id
    phase: m.Phase
    done: Count
    total: Count


@dataclass(frozen=True)
class Token:
    """One more token of an answer."""

    job: Id
    n: Count
    """Its number in the answer, from 0."""
    id: Count
    text: Text
    """The text that it completes; may be empty."""
    ends: Annotated[tuple[Count, ...], codec.ENGINE.array] = ()
    """Where sentences end in the text, in characters, ascending; of jobs with ``sentences``."""

    def __post_init__(self) -> None:
        places = (0, *self.ends)
        if any(a >= b for a, b in itertools.pairwise(places)) or places[-1] > len(self.text):
            raise checks.Refused("sentences end inside the text, one behind the other", "ends")


@dataclass(frozen=True)
class Done:
    """The answer is complete."""

    job: Id
    reason: m.Reason
    n_prompt: Count
    n_generated: Count
    prefill_s: Seconds
    decode_s: Seconds


@dataclass(frozen=True)
class Failed:
    """The job has ended by an error."""

    job: Id
    error: m.ErrorInfo


@dataclass(frozen=True)
class Cancelled:
    """The job has ended by a :class:`Cancel`."""

    job: Id


@dataclass(frozen=True)
class BudgetGranted:
    """First answer to :class:`SetBudget`: what is reached by the deadline, and the seconds that all of it takes,
    predicted."""

    seq: Count
    vram_budget_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class BudgetLate:
    """Half-way to the deadline: it will be missed. As in :class:`BudgetGranted`."""

    seq: Count
    vram_budget_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class BudgetReleased:
    """Second answer: the budget in force and what the engine holds by its ledger. Number 0 is a budget that the host
    has written into the frame block."""

    seq: Count
    vram_budget_bytes: Bytes
    used_bytes: Bytes
    seconds: Seconds


@dataclass(frozen=True)
class BudgetObserved:
    """Third answer: what the driver counts; None where it does not tell."""

    seq: Count
    observed_bytes: Bytes | None
    seconds: Seconds


@dataclass(frozen=True)
class BudgetRefused:
    """Last answer to :class:`SetBudget`: the error."""

    seq: Count
    error: m.ErrorInfo


@dataclass(frozen=True)
class Stats:
    """Figures for people, as the ``stats`` answer of the protocol passes them on."""

    seq: Count
    stats: Mapping[str, Any]


@dataclass(frozen=True)
class Plans:
    """One row for each budget asked, or the error."""

    seq: Count
    rows: Annotated[tuple[m.PlanRow, ...], 32] = ()
    error: m.ErrorInfo | None = None


@dataclass(frozen=True)
class Watch:
    """A look at the device's memory. `total_bytes` and `free_bytes` are None where the driver does not tell."""

    used_bytes: Bytes
    floor_bytes: Bytes
    full_bytes: Bytes
    total_bytes: Bytes | None
    free_bytes: Bytes | None
    appeared: tuple[tuple[Count, Bytes], ...]
    """Process number and bytes of each process that uses the device since the last look; number 0 is unknown."""
    excess_bytes: Bytes
    """What the driver counts above the budget."""


@dataclass(frozen=True)
class Alive:
    """The answer to :class:`AskAlive`."""


@dataclass(frozen=True)
class Pong:
    """The answer to :class:`Ping`."""

    seq: Count


JobEvent = Started | Progress | Token | Done | Failed | Cancelled
BudgetEvent = BudgetGranted | BudgetLate | BudgetReleased | BudgetObserved | BudgetRefused
Event = Ready | Fatal | JobEvent | BudgetEvent | Stats | Plans | Watch | Alive | Pong
Message = Command | Event

COMMANDS: dict[str, type[Any]] = {
    "load": EngineConfig,
    "submit": Submit,
    "cancel": Cancel,
    "budget": SetBudget,
    "frame_block": OpenFrameBlock,
    "pacing": SetPacing,
    "plan": MakePlans,
    "stats": GetStats,
    "alive": AskAlive,
    "ping": Ping,
    "stop": Stop,
}

EVENTS: dict[str, type[Any]] = {
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
    "watch": Watch,
    "alive": Alive,
    "pong": Pong,
}

NAMES: dict[type[Any], str] = {cls: name for table in (COMMANDS, EVENTS) for name, cls in table.items()}
_COMMAND_TYPES = frozenset(COMMANDS.values())

# ---- conversion -----------------------------------------------------------------------------------------------------


def pack(message: Message) -> bytes:
    """The bytes of `message` on the stream.

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
    """The command in a map from the stream.

    :raises BadMessage: there is none.
    """
    command: Command = _read("op", COMMANDS, fields)
    return command


def read_event(fields: Mapping[str, Any]) -> Event:
    """The event in a map from the stream.

    :raises BadMessage: there is none.
    """
    event: Event = _read("ev", EVENTS, fields)
    return event


def refusal(fields: Mapping[str, Any], error: BadMessage) -> Event | None:
    """The event that answers a command that :func:`read_command` has refused, so that it fails alone; None where no
    event can."""
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
    return Plans(number, error=why) if name == "plan" else None


def _plain(value: Any) -> Any:
    """`value` with a map for each record, without fields that have their default."""
    if dataclasses.is_dataclass(value):
        found = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: _plain(each) for name, (each, default) in found.items() if each != default}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
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
