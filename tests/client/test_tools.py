"""Tools of programs: schemas from functions, and calls, results and their history in conversations."""

from __future__ import annotations

import enum
import json
import os
import signal
import subprocess
import time
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


@dataclass
class Node:
    name: str
    children: list[Node]


class Tree(TypedDict):
    kids: list[Tree]


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
