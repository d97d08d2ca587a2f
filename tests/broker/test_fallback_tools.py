"""Tools at the fallback server: what it is asked, which calls it may send, and what becomes of calls that it breaks
off."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import hypothesis
import jsonschema
import pytest
import trio
from hypothesis import strategies as st

import frameshard
from fallbacks import MODEL, N_CTX, SSE, until_none_is_remote, with_fallback
from frameshard import errors
from frameshard.broker import fallback
from frameshard.broker.answer import AnswerReader, BadAnswer
from frameshard.wire import messages as m
from proxy import PASS, REFUSE, Fault, proxy, response
from servers import Server, server, sidecar
from sidecars import DEADLINE_S, children, gone_after, in_trio, until, until_ready

pytest.importorskip("frameshard.broker.remote", reason="httpx is not installed", exc_type=ImportError)


@frameshard.tool
def price(item: Literal["ale", "bread"], count: Literal[1, 2, 3]) -> str:
    """The price of an item."""
    return f"{2 * count} gold for {item}"


LOOK = frameshard.Tool("look", "Looks.")
GOOD = '{"item":"ale","count":2}'


def chunk(*parts: dict[str, Any], reason: str | None = None) -> bytes:
    """A part of an answer with parts of calls."""
    choice = {"index": 0, "delta": {"tool_calls": list(parts)} if parts else {}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def part(index: int, arguments: Any = None, name: Any = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function, **({"id": "same", "type": "function"} if name else {})}


END = chunk(reason="tool_calls") + b"data: [DONE]\n\n"


def call(arguments: str, name: str = "price", index: int = 0) -> bytes:
    """A call in three parts."""
    return (
        chunk(part(index, "", name))
        + chunk(part(index, arguments[: len(arguments) // 2]))
        + chunk(part(index, arguments[len(arguments) // 2 :]))
    )


# --- what goes there --------------------------------------------------------------------------------------------------


def submit(*messages: m.ChatMessage, tools: tuple[m.Tool, ...] = (), **fields: Any) -> m.Submit:
    asked = messages or (m.ChatMessage("user", "x"),)
    return m.Submit(id=1, epoch=1, job=1, kind="chat", messages=asked, tools=tools, **fields)


CALLED = (
    m.ChatMessage("user", "How much?"),
    m.ChatMessage("assistant", "Let me see.", (m.ToolCall("abc", "price", GOOD), m.ToolCall("def", "look", "{}"))),
    m.ChatMessage("tool", "4 gold", tool_call_id="abc"),
    m.ChatMessage("tool", "", tool_call_id="def"),
)


def test_the_server_is_asked_in_openais_form() -> None:
    tools = (price.wire(), LOOK.wire())
    for choice, told in (
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ("look", {"type": "function", "function": {"name": "look"}}),
    ):
        request = submit(*CALLED, tools=tools, tool_choice=choice)
        assert fallback.may_go(request)
        asked = json.loads(fallback.question(request, MODEL, 7))
        assert asked["tool_choice"] == told
    assert [each["type"] for each in asked["tools"]] == ["function", "function"]
    first, second = (each["function"] for each in asked["tools"])
    assert first == {"name": "price", "description": "The price of an item.", "parameters": price.schema}
    jsonschema.validate({}, second["parameters"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"x": 1}, second["parameters"])
    assert asked["messages"] == [
        {"role": "user", "content": "How much?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "abc", "type": "function", "function": {"name": "price", "arguments": GOOD}},
                {"id": "def", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "4 gold", "tool_call_id": "abc"},
        {"role": "tool", "content": "", "tool_call_id": "def"},
    ]
    plain = json.loads(fallback.question(submit(), MODEL, 7))
    assert not plain.keys() & {"tools", "tool_choice"}


def deep(levels: int) -> str:
    return '{"properties":{"a":' * (levels // 2) + "{}" + "}}" * (levels // 2)


def test_tools_that_are_wrong_or_too_deep_stay_here() -> None:
    tools = (price.wire(),)
    assert fallback.may_go(submit(*CALLED))
    assert fallback.may_go(submit(tools=(m.Tool("a", schema=deep(60)),)))
    for kept in (
        submit(tools=tools, tool_choice="look"),
        submit(tool_choice="required"),
        submit(tools=tools * 2),
        submit(tools=(m.Tool("no name"),)),
        submit(tools=(m.Tool("a", schema="{"),)),
        submit(tools=(m.Tool("a", schema='{"type":"array"}'),)),
        *(submit(tools=(m.Tool("a", schema=deep(levels)),)) for levels in (68, 200, 2000)),
        submit(tools=tools, sampling=m.Sampling(json_schema="{}")),
        submit(*CALLED[:1], *CALLED[2:]),  # a result without a call
        submit(m.ChatMessage("user", "x", (m.ToolCall("a", "price", "{}"),))),
        submit(m.ChatMessage("assistant", "x", (m.ToolCall("a", "price", "no JSON"),))),
    ):
        assert not fallback.may_go(kept), kept


def test_ids_are_ours_and_new() -> None:
    made = fallback.with_ids([fallback.Call("price", GOOD)] * 16, CALLED)
    assert len({each.id for each in made} | {"abc", "def"}) == 18
    assert all(len(each.id) == 9 and each.id.isalnum() for each in made)


# --- what it may send -------------------------------------------------------------------------------------------------


def read(data: bytes, sizes: list[int], **given: Any) -> tuple[str, AnswerReader]:
    reader = AnswerReader(10_000, **{"tools": ["price", "look"], **given})
    texts = []
    while data:
        size = sizes.pop() if sizes else len(data)
        texts += list(reader.feed(data[:size]))
        data = data[size:]
    return "".join(texts), reader


@hypothesis.given(st.lists(st.integers(1, 60), max_size=40))
def test_calls_are_the_same_in_any_pieces(sizes: list[int]) -> None:
    mixed = (
        chunk(part(0, "{", "price"))
        + chunk(part(1, "{}", "look"), part(0, '"item":"a', "price"))
        + chunk(part(0, '"}'))
    )
    text, reader = read(SSE + mixed + END, sizes)
    assert (text, reader.reason, reader.over) == ("One two", "tool_calls", True)
    assert reader.calls == (("price", '{"item":"a"}'), ("look", "{}"))
    assert reader.n_parts == 5


def test_servers_that_say_stop_and_servers_that_say_text() -> None:
    _, reader = read(call(GOOD) + END.replace(b"tool_calls", b"stop"), [])
    assert (reader.reason, reader.calls) == ("tool_calls", (("price", GOOD),))
    text, reader = read(SSE + call(GOOD) + END, [], must_call=True)
    assert (text, reader.calls) == ("", (("price", GOOD),))


def test_what_max_tokens_cuts_off_is_no_call() -> None:
    cut = END.replace(b"tool_calls", b"length")
    _, reader = read(call(GOOD) + cut, [], must_call=True)
    assert (reader.reason, reader.calls) == ("length", ())
    _, reader = read(cut, [], must_call=True)
    assert (reader.reason, reader.calls) == ("length", ())
    with pytest.raises(BadAnswer):  # there was no call that could be cut off
        read(SSE + cut, [], must_call=True)
    _, reader = read(call(GOOD) + call('{"item":', index=1) + cut, [])
    assert (reader.reason, reader.calls) == ("length", (("price", GOOD),))


BIG = '{"item":"' + "x" * 70_000 + '"}'
LIES: dict[str, bytes] = {
    "an unknown tool": call("{}", "fly") + END,
    "half a call without a name": chunk(part(0, GOOD)) + END,
    "half a call without arguments": chunk(part(0, "", "price")) + END,
    "a call with another name later": chunk(part(0, "{", "price")) + chunk(part(0, "}", "look")) + END,
    "a gap": call(GOOD) + call(GOOD, index=2) + END,
    "no index": chunk({"function": {"name": "price", "arguments": GOOD}}) + END,
    "an index below zero": call(GOOD, index=-1) + END,
    "an index that is no number": chunk({**part(0, GOOD, "price"), "index": True}) + END,
    "17 calls": b"".join(call(GOOD, index=index) for index in range(17)) + END,
    "one large call": chunk(part(0, "", "price"))
    + b"".join(chunk(part(0, BIG[at : at + 999])) for at in range(0, 70_000, 999)),
    "arguments that are an object": chunk(part(0, {"item": "ale"}, "price")) + END,
    "half a surrogate pair": chunk(part(0, "\ud800", "price")) + END,
    "calls that are no list": b'data: {"choices":[{"delta":{"tool_calls":{"index":0}}}]}\n\n',
    "no call": END,
    "a function in the old form": chunk(reason="function_call"),
}
"""Answers that are refused as soon as they are read."""


@pytest.mark.parametrize("lie", LIES)
def test_calls_that_cannot_be(lie: str) -> None:
    with pytest.raises(BadAnswer):
        read(LIES[lie], [])


def test_calls_that_were_not_asked_for() -> None:
    with pytest.raises(BadAnswer):
        read(call(GOOD) + END, [], tools=[])
    with pytest.raises(BadAnswer):
        read(call("{}", "look") + END, [], tools=["price"])
    with pytest.raises(BadAnswer):
        read(SSE + END.replace(b"tool_calls", b"stop"), [], must_call=True)
    data = b"".join(call('{"item":"' + "x" * 60_000 + '"}', index=index) for index in range(9))
    with pytest.raises(BadAnswer, match="longer than max_tokens"):
        read(data, [])


# --- through both sidecars --------------------------------------------------------------------------------------------

HOT = frameshard.Sampling(max_tokens=150, temperature=1.5, top_p=1.0, seed=5)
BRIEF = frameshard.Sampling(max_tokens=8, temperature=0.0)
TINY: dict[str, Any] = {"device": "emulated", "n_ctx": 4096, "n_threads": 1}


@pytest.fixture(scope="module")
def tiny_http(place: Path, talking_model: Path) -> Iterator[Server]:
    """A server with a model."""
    directory = place / "tiny"
    directory.mkdir()
    with sidecar(directory, model=str(talking_model), **TINY) as (connect_file, _):
        with server(connect_file, "--key-file", str(place / "key")) as running:
            yield running


@in_trio
async def test_a_conversation_with_calls_goes_there_and_comes_back(
    tiny_http: Server, place: Path, talking_model: Path
) -> None:
    """Each turn runs there and here in all orders, with the results of calls from either."""
    mira: dict[str, Any] = {"conversation": "mira", "tools": [price, LOOK]}
    async with proxy(tiny_http.port) as door, with_fallback(door, place, model=talking_model, **TINY) as client:
        order = [True, True, False, True, False, False]
        answer = None
        for away in order:
            await client.set_budget(0, state="parked" if away else "active")
            if answer is not None:  # the results of the calls of the turn before
                results = {each.id: price.run(each) for each in answer.tool_calls}
                said = await client.tool_results(results, **mira, tool_choice="none", sampling=BRIEF).completed()
                assert (said.remote, said.reason, said.tool_calls) == (away, "length", ())
            heard: list[m.ToolCall] = []
            async with client.ask("What is ale?", **mira, tool_choice="price", sampling=HOT) as stream:
                stream.on_tool_call = heard.append
                answer = await stream.completed()
            assert (answer.remote, answer.reason, answer.text) == (away, "tool_calls", "")
            assert tuple(heard) == answer.tool_calls != ()
            for each in heard:
                assert each.name == "price"
                jsonschema.validate(json.loads(each.arguments), price.schema)
        given = [each.id for message in client.history("mira") for each in message.tool_calls]
        assert len(given) == len(set(given)) >= len(order)
        asked = [json.loads(head[head.index(b"{") :]) for head in door.heads if b'"tool_choice"' in head]
        assert {str(each["tool_choice"]) for each in asked} == {
            "none",
            "{'type': 'function', 'function': {'name': 'price'}}",
        }
        await client.set_budget(0, state="parked")
        cut = frameshard.Sampling(max_tokens=2, temperature=0.0)
        short = await client.ask("What is ale?", tools=[price], tool_choice="required", sampling=cut).completed()
        assert (short.remote, short.reason, short.tool_calls) == (True, "length", ())


@in_trio
async def test_calls_of_a_lying_server_are_tried_again(http: Server, place: Path) -> None:
    """The fake engine behind the server calls with the last message as the arguments."""
    invalid = [
        call(text) + END for text in ("{", "[]", '{"item":"gold","count":2}', '{"item":"ale","count":NaN}', "{}")
    ]
    lies = [*LIES.values(), *invalid, SSE + END.replace(b"tool_calls", b"stop"), call("{}", "look") + END]
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        await client.set_budget(0, state="parked")
        faults = [Fault(say=response(lie)) for lie in lies]
        door.choose = lambda: faults.pop() if faults else PASS
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                asked = client.ask(GOOD, tools=[price, LOOK], tool_choice="price")
                done = await asked.completed()
                assert [(each.name, each.arguments) for each in done.tool_calls] == [("price", GOOD)]
                assert (done.remote, done.reason, done.text) == (True, "tool_calls", "")

            for _ in lies:
                nursery.start_soon(ask)
        assert not faults
        before = door.n_faults
        door.choose = lambda: Fault(say=response(call(GOOD) + END))
        async with client.ask("one two", tools=[price], tool_choice="none") as stream:
            await until(lambda: door.n_faults >= before + 2)  # its call was refused, and it was asked again
            door.choose = lambda: PASS
            done = await stream.completed()
        assert (done.text, done.tool_calls) == ("one two", ())


@in_trio
async def test_a_call_that_is_too_deep_is_asked_for_again(http: Server, place: Path) -> None:
    tool = frameshard.Tool("odd", schema={"type": "object"})
    faults = [Fault(say=response(call('{"a":' * 65 + "1" + "}" * 65, "odd") + END))]
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        door.choose = lambda: faults.pop() if faults else PASS
        await client.set_budget(0, state="parked")
        done = await client.ask('{"a":"here"}', tools=[tool], tool_choice="odd").completed()
        assert not faults
        assert (done.remote, [each.arguments for each in done.tool_calls]) == (True, ['{"a":"here"}'])


@in_trio
async def test_a_call_that_is_cut_off_is_made_here(http: Server, place: Path) -> None:
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        for fault in (
            Fault(say=response(call(GOOD)[:-60])),
            Fault(say=response(SSE + call(GOOD))),
            Fault(say=response(call(GOOD) + call(GOOD, index=1))),
        ):
            await client.set_budget(0, state="parked")
            before = door.n_faults
            door.choose = lambda fault=fault: fault
            heard: list[m.ToolCall] = []
            async with client.ask(GOOD, tools=[price], tool_choice="required") as stream:
                stream.on_tool_call = heard.append
                await until(lambda before=before: door.n_faults > before)
                await until_none_is_remote(client)
                door.choose = lambda: REFUSE
                await client.set_budget(0)
                done = await stream.completed()
            assert not done.remote
            assert [each.arguments for each in heard] == [each.arguments for each in done.tool_calls] == [GOOD]
            assert done.text == ""

        # After some text the engine goes on from it.
        await client.set_budget(0, state="parked")
        door.choose = lambda: Fault(say=response(SSE + call(GOOD)))
        async with client.ask("One two three", tools=[price]) as stream:
            assert (await stream.__anext__()).text == "One two"
            await until_none_is_remote(client)
            await client.set_budget(0)
            done = await stream.completed()
        assert (done.text, done.tool_calls, done.remote) == ("One two three", (), False)


@in_trio
async def test_a_call_that_cannot_be_checked_brings_the_job_back(http: Server, place: Path) -> None:
    """The checks of others go on: there is a process for them again."""
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    circle = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    hostile = json.dumps({"a": "a" * 60 + "!"})
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        elsewhere = {"type": "object", "properties": {"a": {"$ref": f"{door.url}/schema"}}}
        for schema in (slow, elsewhere, circle):
            await client.set_budget(0, state="parked")
            door.choose = lambda: Fault(say=response(call(hostile, "odd") + END))
            before = door.n_faults
            tool = frameshard.Tool("odd", schema=schema)
            async with client.ask('{"a":"here"}', tools=[tool], tool_choice="odd") as stream:
                await until(lambda before=before: door.n_faults > before)
                await until_none_is_remote(client)
                door.choose = lambda: PASS
                other = await client.ask(GOOD, tools=[price], tool_choice="price").completed()
                assert (other.remote, [each.arguments for each in other.tool_calls]) == (True, [GOOD])
                n_asked = len(door.heads)
                await client.set_budget(0)
                done = await stream.completed()
            assert len(door.heads) == n_asked  # it was not sent again
            assert (done.remote, [each.arguments for each in done.tool_calls]) == (False, ['{"a":"here"}'])
        assert not any(head.startswith(b"GET") for head in door.heads)  # nobody fetches a schema


@in_trio
async def test_a_cancelled_check_delays_nobody_and_ends_with_the_sidecar(http: Server, place: Path) -> None:
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    hostile = json.dumps({"a": "a" * 60 + "!"})
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        await client.set_budget(0, state="parked")
        pid = client.info.pid
        before = set(children(pid))
        checkers: set[int] = set()

        def is_checking() -> bool:
            checkers.update(set(children(pid)) - before)
            return bool(checkers)

        door.choose = lambda: Fault(say=response(call(hostile, "odd") + END))
        async with client.ask("x", tools=[frameshard.Tool("odd", schema=slow)], tool_choice="odd") as stream:
            await until(is_checking)
            await stream.cancel()
            with pytest.raises(errors.JobCancelled):
                await stream.completed()
        door.choose = lambda: PASS
        assert (await client.ask("one two").completed()).remote
    gone_after([pid, *checkers], DEADLINE_S)


N_JOBS = 60


@in_trio
async def test_every_job_of_a_storm_has_its_call_once(http: Server, place: Path) -> None:
    """Faults of the network while the lease is parked and unparked and the engine is killed."""
    random_ = random.Random(21)
    lies = [Fault(say=response(lie)) for lie in (*LIES.values(), call(GOOD), SSE, call("{}") + END)]
    lies += [REFUSE, *(Fault(after=n) for n in (300, 600, 900, 1200))]
    ends: Counter[int] = Counter()
    async with proxy(http.port) as door:
        door.choose = lambda: random_.choice(lies) if random_.random() < 0.3 else PASS
        async with with_fallback(door, place, max_client_jobs=N_JOBS, n_parallel=4, n_ctx=N_CTX) as client:
            async with trio.open_nursery() as nursery:

                async def ask(number: int) -> None:
                    arguments = json.dumps({"item": "ale", "count": number % 3 + 1, "number": number})
                    tool = frameshard.Tool("price", schema={**price.schema, "additionalProperties": True})
                    heard: list[str] = []
                    try:
                        asked = client.ask(arguments, tools=[tool], tool_choice="price", priority=number % 3)
                        async with asked as stream:
                            stream.on_tool_call = lambda call: heard.append(call.arguments)
                            done = await stream.completed()
                        assert [each.arguments for each in done.tool_calls] == heard == [arguments]
                        assert (done.reason, done.text) == ("tool_calls", "")
                    except errors.EngineDied:
                        assert heard == []
                    ends[number] += 1

                for number in range(N_JOBS):
                    nursery.start_soon(ask, number)
                for turn in range(8):
                    await client.set_budget(0, state="parked" if turn % 2 == 0 else "active")
                    await trio.sleep(0.2)
                    pid = (await client.stats()).broker.engine_pid
                    if turn % 4 == 1 and pid is not None:
                        os.kill(pid, signal.SIGKILL)
                        await until_ready(client)
                door.choose = lambda: PASS
            stats = (await client.stats()).broker
            assert (stats.jobs_queued, stats.jobs_running, stats.jobs_remote) == (0, 0, 0)
    assert ends == dict.fromkeys(range(N_JOBS), 1)
