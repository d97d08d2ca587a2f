"""Tools of programs: schemas from functions, and calls, results and their history in conversations."""

from __future__ import annotations

import enum
import functools
import json
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, TypedDict

import anyio
import jsonschema
import pytest
import trio

import frameshard
import sidecars
from frameshard import sync
from frameshard.conversation import Conversations, Turn
from frameshard.errors import BadArgument, ConnectionLost, JobCancelled, Overloaded
from frameshard.testing import fake_engine
from frameshard.tools import Tool, tool
from frameshard.wire import codec, saves
from frameshard.wire import messages as m
from frameshard.wire.messages import ChatMessage, ModelInfo, ToolCall
from sidecars import in_both


class Mood(enum.Enum):
    CALM = "calm"
    ANGRY = "angry"


@dataclass
class Item:
    name: str
    count: int = 1
    tags: list[str] = field(default_factory=list)


class Place(TypedDict, total=False):
    x: float
    y: float


@tool
def sell(
    item: Item,
    mood: Mood,
    how: Literal["fast", "slow", 3],
    place: Place,
    prices: dict[str, float],
    to: Optional[str] = None,  # noqa: UP045
    bulk: list[Item] | bool = False,
) -> str:
    """Sells an item.

    Only by day."""
    return f"{item.name} {item.count} {mood.name} {how} {place.get('x')} {prices} {to} {bulk}"


ARGUMENTS: dict[str, Any] = {
    "item": {"name": "sword", "count": 2, "tags": ["old"]},
    "mood": "angry",
    "how": 3,
    "place": {"x": 1},
    "prices": {"gold": 2},
    "to": None,
    "bulk": [{"name": "nail"}],
}


def test_the_schema_comes_from_the_hints() -> None:
    assert (sell.name, sell.description) == ("sell", "Sells an item.\n\nOnly by day.")
    assert isinstance(sell.schema, dict)
    jsonschema.Draft202012Validator.check_schema(sell.schema)
    jsonschema.validate(ARGUMENTS, sell.schema)
    assert sell.schema["required"] == ["item", "mood", "how", "place", "prices"]
    for wrong in (
        {"mood": "glad"},
        {"how": 4},
        {"item": {"count": 1}},
        {"item": {"name": "x", "colour": 1}},
        {"place": {"x": "far"}},
        {"prices": {"gold": "much"}},
        {"to": 5},
        {"bulk": 5},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**ARGUMENTS, **wrong}, sell.schema)


def test_a_tool_is_the_function_and_runs_calls() -> None:
    said = "sword 2 ANGRY 3 1.0 {'gold': 2.0} None [Item(name='nail', count=1, tags=[])]"
    assert sell.run(ToolCall("a", "sell", json.dumps(ARGUMENTS))) == said
    assert sell(Item("axe"), Mood.CALM, "fast", {}, {}) == "axe 1 CALM fast None {} None False"
    with pytest.raises(BadArgument, match="no call of 'sell'"):
        sell.run(ToolCall("a", "buy", "{}"))
    with pytest.raises(BadArgument, match="no function"):
        Tool("look").run(ToolCall("a", "look", "{}"))
    with pytest.raises(BadArgument, match="4300 digits"):
        sell.run(ToolCall("a", "sell", '{"count": ' + "7" * 4400 + "}"))


def test_what_has_no_schema_is_refused_at_once() -> None:
    def no_hint(item) -> None:  # type: ignore[no-untyped-def]
        pass

    def no_schema(item: Path) -> None:
        pass

    def many(*items: str) -> None:
        pass

    for function, why in ((no_hint, "give the parameter item a type"), (no_schema, "no JSON schema"), (many, "a name")):
        with pytest.raises(BadArgument, match=why):
            tool(function)


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall("a", name, arguments)


@dataclass
class Attack:
    kind: Literal["attack"]
    target: str


@dataclass
class Heal:
    kind: Literal["heal"]
    target: str


@dataclass
class ById:
    who: int


@dataclass
class ByName:
    who: str


@dataclass
class Party:
    members: list[ById] | list[ByName]


@dataclass
class Alone:
    leader: str
    members: list[ById] = field(default_factory=list)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Attack | Heal, {"kind": "heal", "target": "x"}, Heal("heal", "x")),
        (ById | ByName, {"who": "Mira"}, ByName("Mira")),
        (list[Attack] | list[Heal], [{"kind": "heal", "target": "x"}], [Heal("heal", "x")]),
        (dict[str, Heal] | Attack, {"kind": "attack", "target": "x"}, Attack("attack", "x")),
        (dict[str, ById] | dict[str, ByName], {"a": {"who": "Mira"}}, {"a": ByName("Mira")}),
        (Alone | Party, {"members": [{"who": "Mira"}]}, Party([ByName("Mira")])),
        (Alone | Place, {"x": 1}, {"x": 1.0}),
        (Alone | dict, {"leader": "Mira", "age": 5}, {"leader": "Mira", "age": 5}),
        (Literal[1] | bool, True, True),
        (Literal[1, "1"] | float, 1.5, 1.5),
        (list[int] | list[float], [1, 2.5], [1.0, 2.5]),
        (Mood | str, "glad", "glad"),
    ],
)
def test_of_a_union_the_function_gets_the_type_that_fits(kind: Any, value: object, expected: object) -> None:
    def take(it) -> Any:  # type: ignore[no-untyped-def]
        return it

    take.__annotations__["it"] = kind
    taker = tool(take)
    jsonschema.validate({"it": value}, taker.schema)
    given = taker.run(call("take", json.dumps({"it": value})))
    assert (given, repr(given)) == (expected, repr(expected))


class Base(TypedDict):
    a: int
    b: typing.NotRequired[int]


class Derived(Base, total=False):
    c: typing.Annotated[typing.Required[float], "in metres"]
    d: float


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no NotRequired")
def test_marks_of_a_typed_dict_count_in_a_module_whose_hints_are_texts() -> None:
    def place(where: Derived) -> Derived:
        return where

    placer = tool(place)
    assert isinstance(placer.schema, dict)
    assert sorted(placer.schema["properties"]["where"]["required"]) == ["a", "c"]
    assert placer.run(call("place", '{"where": {"a": 1, "c": 2}}')) == {"a": 1, "c": 2.0}


@dataclass
class Counted:
    x: int
    made: typing.ClassVar[int] = 0
    double: int = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.x


def test_a_dataclass_is_made_from_what_its_constructor_takes() -> None:
    def count(it: Counted) -> int:
        return it.double

    counter = tool(count)
    assert isinstance(counter.schema, dict)
    assert counter.schema["properties"]["it"]["properties"] == {"x": {"type": "integer"}}
    assert counter.run(call("count", '{"it": {"x": 4}}')) == 8


def test_maps_may_leave_the_types_of_their_values_open() -> None:
    def note(a: typing.Dict, b: typing.Mapping, c: Optional[typing.Dict] = None) -> Any:  # noqa: UP006, UP045
        return a, b, c

    noter = tool(note)
    assert isinstance(noter.schema, dict)
    assert noter.schema["properties"]["a"] == {"type": "object", "additionalProperties": True}
    assert noter.run(call("note", '{"a": {"x": 1}, "b": {}, "c": {"y": [2]}}')) == ({"x": 1}, {}, {"y": [2]})


class Shop:
    def __init__(self, gold: int) -> None:
        self.gold = gold

    def price(self, item: str) -> str:
        """What an item costs."""
        return f"{self.gold} for {item}"

    def __call__(self, item: str) -> None:
        pass


def test_the_method_of_an_object_is_a_tool_and_that_of_a_class_is_none() -> None:
    priced = tool(Shop(5).price)
    assert (priced.name, priced.description) == ("price", "What an item costs.")
    assert priced.run(call("price", '{"item": "ale"}')) == "5 for ale"
    with pytest.raises(BadArgument, match="make a tool of the method of an object"):
        tool(Shop.price)


def test_a_decorator_may_give_a_function_more_arguments() -> None:
    def with_shop(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def wrapped(**arguments: Any) -> str:
            return function(Shop(5), **arguments)

        return wrapped

    @with_shop
    def visit(shop: Shop, item: Item) -> str:
        return f"{shop.gold} for {item.name}"

    schema = {"type": "object", "properties": {"item": {"type": "object"}}, "required": ["item"]}
    assert Tool("visit", "", schema, visit).run(call("visit", '{"item": {"name": "ale"}}')) == "5 for ale"


@pytest.mark.parametrize("what", [functools.partial(Shop(5).price, "ale"), Shop(5), dict, classmethod(print)])
def test_what_is_no_function_is_refused_at_once(what: Any) -> None:
    with pytest.raises(BadArgument, match="wrap it in a function"):
        tool(what)


def test_a_type_that_is_not_known_is_refused_at_once() -> None:
    def go(where: typing.Place) -> None:  # type: ignore[name-defined]
        pass

    with pytest.raises(BadArgument, match=r"go: a type is not known: .*Place"):
        tool(go)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("[1]", "no JSON object"),
        ('"x"', "no JSON object"),
        ("[" * 30_000 + "]" * 30_000, "no JSON object" if sys.version_info >= (3, 14) else "cannot be read"),
        ("{}", "missing a required argument: 'count'"),
        ('{"count": 1, "colour": 2}', "unexpected keyword argument 'colour'"),
        ('{"count": 3.5}', "count is 3.5, which is no int"),
        ('{"count": 1e400}', "count is inf, which is no int"),
        ('{"count": true}', "count is True, which is no int"),
        ('{"count": 1, "share": 1e400}', "share is inf, which is no float"),
        ('{"count": 1, "share": 1' + "0" * 400 + "}", "which is no float"),
        ('{"count": 1, "mood": "glad"}', "mood is 'glad', which is no Mood"),
        ('{"count": 1, "item": {"count": 2}}', "which is no Item"),
        ('{"count": 1, "item": {"name": "x", "colour": 2}}', "which is no Item"),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_refused(arguments: str, why: str) -> None:
    with pytest.raises(BadArgument, match=why) as refused:
        weigh.run(call("weigh", arguments))
    assert refused.value.detail["field"] == "arguments"
    assert len(str(refused.value)) < 300


@tool
def weigh(count: int, share: float = 1.0, mood: Mood = Mood.CALM, item: Item = Item("axe")) -> Any:  # noqa: B008
    """Weighs something."""
    return count, share, mood, item


def test_a_whole_number_may_be_written_with_a_point() -> None:
    count, share, *_ = weigh.run(call("weigh", '{"count": 3.0, "share": 2}'))
    assert (repr(count), repr(share)) == ("3", "2.0")


@dataclass
class Node:
    name: str
    children: list[Node]


class Tree(TypedDict):
    kids: list[Tree]


class Nobody(enum.Enum):
    pass


class Corner(enum.Enum):
    ORIGIN = 1
    FAR = (1, 2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Node, "Node has values of its own type"),
        (list[Tree], "Tree has values of its own type"),
        (Corner, r"does not give back the value \(1, 2\)"),
        (Literal["a", b"b"], "does not give back the value b'b'"),
        (Nobody, "an Enum without members"),
    ],
)
def test_a_type_without_a_schema_is_refused_at_once(kind: Any, why: str) -> None:
    def place(where) -> None:  # type: ignore[no-untyped-def]
        pass

    place.__annotations__["where"] = kind
    with pytest.raises(BadArgument, match=why):
        tool(place)


# --- conversations ----------------------------------------------------------------------------------------------------

PRICE, LOOK = ToolCall("id1", "price", '{"item": "ale"}'), ToolCall("id2", "look", "{}")


def turn(conversations: Conversations, question: Any, answer: str = "", *calls: ToolCall) -> tuple[ChatMessage, ...]:
    """Plays a turn; returns its prompt."""
    told = Turn(conversations, "mira", None, question)
    told.begin()
    prompt = told.messages({})
    told.answer, told.calls = answer, calls
    told.end()
    return prompt


def test_the_history_keeps_calls_and_results() -> None:
    conversations = Conversations("python")
    turn(conversations, "Hello.", "Welcome.")
    turn(conversations, "What is ale?", "Let me see.", PRICE, LOOK)
    prompt = turn(conversations, {"id2": "dark", "id1": "2 gold"}, "Two gold.")
    assert prompt == (
        ChatMessage("user", "Hello."),
        ChatMessage("assistant", "Welcome."),
        ChatMessage("user", "What is ale?"),
        ChatMessage("assistant", "Let me see.", (PRICE, LOOK)),
        ChatMessage("tool", "2 gold", tool_call_id="id1"),
        ChatMessage("tool", "dark", tool_call_id="id2"),
    )
    assert conversations.history("mira") == (*prompt, ChatMessage("assistant", "Two gold."))


def test_calls_wait_for_their_results_in_a_save_too() -> None:
    model = ModelInfo("m", "llama", "cpu", 1, 1, 1, 1, True, 1, 1, {})
    conversations = Conversations("python")
    turn(conversations, "What is ale?", "", PRICE)
    loaded = Conversations("python")
    loaded.load(conversations.save("mira", model), "mira", model)
    assert loaded.history("mira") == conversations.history("mira")
    for results in ({}, {"id2": "x"}, {"id1": "x", "id2": "y"}):
        with pytest.raises(BadArgument, match="for each of the calls id1"):
            turn(loaded, results)
    prompt = turn(loaded, {"id1": "2 gold"})  # and there is no answer
    assert len(prompt) == 3
    assert turn(loaded, {"id1": "2 gold"}, "Two.") == prompt
    with pytest.raises(BadArgument, match="no calls"):
        turn(loaded, {"id1": "2 gold"})


def test_a_question_instead_of_results_forgets_the_calls() -> None:
    conversations = Conversations("python")
    turn(conversations, "What is ale?", "Let me see.", PRICE)
    turn(conversations, "And wine?", "", PRICE)
    assert turn(conversations, "Never mind.", "As you wish.") == (
        ChatMessage("user", "What is ale?"),
        ChatMessage("assistant", "Let me see."),
        ChatMessage("user", "Never mind."),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("question", ["And wine?", {"id1": "2 gold"}])
def test_a_turn_without_an_answer_leaves_the_history(question: Any, fails: bool) -> None:
    """Also if its prompt was shortened meanwhile."""
    conversations = Conversations("python")
    for word in ("Hello.", "Who is there?"):
        turn(conversations, word, "Mira.")
    turn(conversations, "What is ale?", *(["Let me see."] if isinstance(question, str) else ["", PRICE]))
    whole = conversations.history("mira")
    told = Turn(conversations, "mira", None, question)
    told.begin()
    n_messages = [len(told.messages({}))]
    while told.shorten():
        n_messages.append(len(told.messages({})))
    assert n_messages == sorted(set(n_messages), reverse=True)
    assert told.n_dropped == len(n_messages) - 1 > 1
    told.end(failed=fails)
    assert conversations.history("mira") == whole


def test_an_answer_that_is_longer_than_a_message_can_have_is_cut_in_the_history() -> None:
    conversations = Conversations("python")
    turn(conversations, "Tell me all.", "x" + "ä" * codec.CLIENT.string)
    prompt = turn(conversations, "And then?")
    assert prompt[1].content == "x" + "ä" * (codec.CLIENT.string // 2 - 1)
    m.encode(m.Submit(1, 1, 1, "chat", prompt))  # which refuses what is too large


WAITING = saves.Exchange("What is ale?", "", (ChatMessage("assistant", "", (PRICE,)),))


@in_both
async def test_the_model_reads_results_as_json_with_their_letters() -> None:
    data = saves.write(saves.save_of([WAITING], "", "", "", "python"))
    endless: list[object] = []
    for _ in range(100_000):
        endless = [endless]
    async with sidecars.launch() as client:
        client.load(data, conversation="mira")
        for wrong in (float("nan"), [float("inf")], {1, 2}, object(), endless):
            with pytest.raises(BadArgument, match="results: "):
                client.tool_results({"id1": wrong}, conversation="mira")
        answer = await client.tool_results({"id1": {"name": "Zoë", "price": 2}}, conversation="mira").completed()
        assert answer.text == '{"name": "Zoë", "price": 2}'


@in_both
async def test_a_question_without_an_answer_leaves_the_conversation() -> None:
    data = saves.write(saves.save_of([saves.Exchange("Hello.", "Welcome."), WAITING], "Be kind.", "", "", "python"))
    engine = fake_engine(endless=True, delay_s=0.001)
    options: dict[str, Any] = {"engine": engine, "n_parallel": 1, "max_client_jobs": 2}
    async with sidecars.launch(**options) as client, client.complete("la", sampling=sidecars.GREEDY):
        # All questions wait behind that job, so they get no text.
        def ask(**options: Any) -> frameshard.Stream:
            client.load(data, conversation="mira")
            return client.ask("Never mind.", conversation="mira", system="Be short.", **options)

        def left(system: str) -> bool:
            return client.history("mira") == (ChatMessage("system", system), *exchanges)

        client.load(data, conversation="mira")
        exchanges = client.history("mira")[1:]
        assert len(exchanges) == 4
        for fields in ({"adapters": {"nobody": 1.0}}, {"priority": 7}):
            with pytest.raises(BadArgument):
                await ask(**fields).completed()
            assert left("Be kind."), "refused"
        async with client.complete("la"):
            with pytest.raises(Overloaded):
                await ask().completed()
            assert left("Be kind."), "refused"
            with pytest.raises(Overloaded):
                await client.tool_results({"id1": "2 gold"}, conversation="mira").completed()
            assert left("Be kind."), "refused results"

        async def settled() -> None:
            while (await client.stats()).broker.jobs_queued:
                await anyio.sleep(0.01)

        await settled()
        async with ask():
            assert left("Be short."), "open"
        assert left("Be short."), "left"
        await settled()
        with anyio.move_on_after(0):
            await ask().completed()
        assert left("Be short."), "timeout"
        await settled()
        async with ask() as stream:
            await stream.cancel()
            with pytest.raises(JobCancelled):
                await stream.completed()
        assert left("Be short."), "cancelled"

        async with ask() as stream:
            os.kill((await client.stats()).broker.pid, signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await stream.completed()
        assert left("Be kind."), "lost"


def test_as_much_history_as_fits_beside_the_options_is_in_the_prompt() -> None:
    conversations = Conversations("python")
    conversations.find("mira").exchanges += [saves.Exchange("q" * 30_000, "a" * 30_000)] * 20
    told = Turn(conversations, "mira", None, "on")
    told.begin()
    most = codec.CLIENT.frame - 2 * codec.CLIENT.string  # of a prompt with history
    for n_bytes in range(0, 950_000, 9_973):
        sizes = [60_000] * (n_bytes // 60_000) + [n_bytes % 60_000]
        others = {"tools": tuple(Tool(f"t{at}", "d" * size).wire() for at, size in enumerate(sizes))}
        prompt = told.messages(others)
        frame = len(m.encode(m.Submit(1, 1, 1, "chat", prompt, **others)))  # which refuses what is too large
        assert told.n_dropped == 20 - len(prompt) // 2
        assert frame + 60_000 > most - 2_000 or told.n_dropped == 0, n_bytes


def test_results_of_calls_fit_beside_a_long_history() -> None:
    conversations = Conversations("python")
    mira = conversations.find("mira")
    mira.system = "Be kind."
    mira.exchanges += [saves.Exchange("Hello.", "Welcome.")] * 600
    n_messages = [len(turn(conversations, "What is ale?", "", PRICE, LOOK))]
    for _ in range(30):  # the same question has more and more steps
        prompt = turn(conversations, {"id1": "2 gold", "id2": "dark"}, "", PRICE, LOOK)
        m.encode(m.Submit(1, 1, 1, "chat", prompt))  # which refuses what is too large
        n_messages.append(len(prompt))
    assert n_messages[0] == 1 + 1020 + 1
    assert set(n_messages[1:]) <= {1023, 1024}, "as many as fit"


# --- with a model -----------------------------------------------------------------------------------------------------


@tool
def price(item: Literal["ale", "bread"], count: Literal[1, 2, 3]) -> str:
    """The price of an item."""
    return f"{2 * count} gold for {item}"


HOT = frameshard.Sampling(max_tokens=150, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=5)
OPTIONS: dict[str, Any] = {"device": "emulated", "mode": "stream_only", "n_ctx": 4096, "n_threads": 1}


def play(scene: Callable[[frameshard.Client], Any], model: Path) -> None:
    async def main() -> None:
        with trio.fail_after(300):
            async with frameshard.launch(model, log=subprocess.DEVNULL, **OPTIONS) as client:
                await scene(client)

    trio.run(main)


def test_a_conversation_with_calls_goes_on_after_the_engine_is_killed(talking_model: Path) -> None:
    """The engine is killed inside a call. There is one event for it, that of an undisturbed run."""

    async def scene(client: frameshard.Client) -> None:
        asked: dict[str, Any] = {"tools": [price], "tool_choice": "price", "sampling": HOT}
        expected = await client.ask("What is ale?", **asked).completed()
        question = [ChatMessage("user", "What is ale?")]
        assert (await client.count_tokens(question, tools=[price])).n_tokens == expected.n_prompt
        (call, *_) = expected.tool_calls
        jsonschema.validate(json.loads(call.arguments), price.schema)

        async def graphs() -> int:
            return int((await client.stats()).engine["graphs"])  # type: ignore[index]

        heard: list[ToolCall] = []
        await client.set_pacing(target_tokens_per_second=5)  # the call must not end before the kill
        start = await graphs()
        async with client.ask("What is ale?", conversation="mira", **asked) as stream:
            stream.on_tool_call = heard.append
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.completed)
                while await graphs() < start + 3:
                    await trio.sleep(0.01)
                before = (await client.stats()).broker
                assert before.engine_pid is not None
                assert not heard
                os.kill(before.engine_pid, signal.SIGKILL)
                await client.set_pacing()
        assert tuple(heard) == stream.tool_calls == expected.tool_calls
        await sidecars.until_ready(client, before.engine_restarts + 1)

        results = {each.id: price.run(each) for each in heard}
        said = frameshard.Sampling(max_tokens=8, temperature=0.0)
        answer = await client.tool_results(results, conversation="mira", sampling=said).completed()
        assert answer.reason == "length"
        assert [message.role for message in client.history("mira")][:3] == ["user", "assistant", "tool"]
        assert client.history("mira")[2] == ChatMessage("tool", results[call.id], tool_call_id=call.id)
        assert saves.exchanges_of(saves.read(client.save("mira")))[0].steps[0].tool_calls == stream.tool_calls
        with pytest.raises(BadArgument, match="no calls"):
            await client.tool_results(results, conversation="mira").completed()
        with pytest.raises(BadArgument, match="JSON"):
            client.tool_results({"x": object()}, conversation="mira")

    play(scene, talking_model)


def test_the_polled_client_has_calls_too(talking_model: Path) -> None:
    with sync.Sidecar.launch(talking_model, log=subprocess.DEVNULL, **OPTIONS) as sidecar:

        def until(done: Callable[[list[sync.Event]], bool]) -> list[sync.Event]:
            events: list[sync.Event] = []
            deadline = time.monotonic() + 300
            while not done(events):
                assert time.monotonic() < deadline
                time.sleep(0.01)
                events += sidecar.poll()
            return events

        def finished(job: sync.Job) -> list[sync.Event]:
            return until(lambda _: job.ended)

        def counts(events: list[sync.Event]) -> list[int]:
            arrived = [event.count for event in events if isinstance(event, sync.TokenCountArrived)]
            return [count.n_tokens for count in arrived if count is not None]

        question = [ChatMessage("user", "What is ale?")]
        sidecar.count_tokens(question)
        sidecar.count_tokens(question, tools=[price])
        without, with_tools = counts(until(lambda events: len(counts(events)) == 2))
        job = sidecar.ask("What is ale?", conversation="mira", tools=[price], tool_choice="required", sampling=HOT)
        called = [event.call for event in finished(job) if isinstance(event, sync.ToolCalled)]
        assert called
        assert job.result is not None
        assert job.tool_calls == job.result.tool_calls == tuple(called)
        assert without < with_tools == job.result.n_prompt
        said = frameshard.Sampling(max_tokens=8, temperature=0.0)
        answer = sidecar.tool_results({call.id: 12 for call in called}, conversation="mira", sampling=said)
        finished(answer)
        assert answer.error is None
