"""Answers of a real model through the HTTP server."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import trio
from PIL import Image

import frameshard
import tiny_audio
from frameshard.engine.sounds import tone
from frameshard.http import request
from servers import Server, server, sidecar, until

N_CTX = 512  # of the sidecar in conftest.py
STORY = {"messages": [{"role": "user", "content": "Tell me a very long story."}], "max_tokens": 400}


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


def test_a_stream_and_a_whole_answer_are_those_of_the_sidecar(http: Server, place: Path) -> None:
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "presence_penalty": 0.5, "max_completion_tokens": 16}
    sampling = frameshard.Sampling(temperature=0.9, top_p=0.9, seed=7, presence_penalty=0.5, max_tokens=16)
    messages = [("system", "You are Mira."), ("user", "Who are you?"), ("assistant", "Mira."), ("user", "And I?")]

    async def asked() -> tuple[frameshard.Completion, frameshard.Completion]:
        async with frameshard.connect(place) as client:
            turns = [frameshard.ChatMessage(role, text) for role, text in messages]
            return (
                await client.chat(turns, sampling=sampling).completed(),
                await client.complete("Once upon a time", sampling=sampling).completed(),
            )

    chat, completion = trio.run(asked)
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in messages]
    parts[0]["role"] = "developer"
    whole = http.ask("POST", "/v1/chat/completions", {"model": "gpt-4o", "messages": parts, **fields}).json
    assert whole["object"] == "chat.completion"
    assert whole["model"] == http.ask("GET", "/v1/models").json["data"][0]["id"]
    assert whole["choices"][0]["message"]["content"] == chat.text
    assert whole["choices"][0]["finish_reason"] == chat.reason
    usage = {"prompt_tokens": chat.n_prompt, "completion_tokens": chat.n_generated}
    usage["total_tokens"] = chat.n_prompt + chat.n_generated
    assert whole["usage"].items() >= usage.items()

    streamed = {"messages": parts, **fields, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = http.ask("POST", "/v1/chat/completions", streamed).events()
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(chunks) == chat.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [chat.reason]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert last["choices"] == []
    assert last["usage"].items() >= usage.items()

    plain = {"prompt": "Once upon a time", **fields, "max_tokens": 16}
    del plain["max_completion_tokens"]
    assert http.ask("POST", "/v1/completions", plain).json["choices"][0]["text"] == completion.text
    chunks = http.ask("POST", "/v1/completions", {**plain, "stream": True}).events()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == completion.text
    assert all("usage" not in chunk for chunk in chunks)


def test_stops_forms_and_the_end_of_the_context(http: Server) -> None:
    stopped = http.chat("Count from 1 to 9.", temperature=0, stop=["\n", " "], max_tokens=32).json
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert " " not in stopped["choices"][0]["message"]["content"]

    schema = {"type": "object", "properties": {"armed": {"type": "boolean"}, "mood": {"enum": ["calm", "angry"]}}}
    schema |= {"required": ["armed", "mood"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "npc", "strict": True, "schema": schema}}
    shaped = http.chat("A guard, as JSON.", response_format=form, seed=1, stream=True, max_tokens=80).events()
    jsonschema.validate(json.loads(text_of(shaped)), schema)
    free = http.chat("A guard, as JSON.", response_format={"type": "json_object"}, temperature=0, max_tokens=8).json
    assert free["choices"][0]["message"]["content"].startswith("{")

    choice = http.chat("Is it night?", choices=["certainly", "hardly"]).json["choices"][0]
    assert choice["message"]["content"] in ("certainly", "hardly")

    for stream in (False, True):
        refused = http.chat("word " * 900, stream=stream, max_tokens=256)
        assert refused.status == 400
        assert refused.error["code"] == "context_length_exceeded"
        assert refused.error["param"] == "messages"
        assert "lower max_tokens" in refused.error["message"]
        for prompt in ("word " * 1200, "猫" * 1200):
            refused = http.ask("POST", "/v1/completions", {"prompt": prompt, "stream": stream})
            assert (refused.error["code"], refused.error["param"]) == ("context_length_exceeded", "prompt")
            assert "max_tokens" not in refused.error["message"]
    form = {"type": "json_schema", "json_schema": {"name": "npc", "schema": {"type": "wizard"}}}
    refused = http.chat("A guard.", response_format=form)
    assert (refused.status, refused.error["param"]) == (400, "response_format")
    assert refused.error["message"].startswith("response_format: ")


def test_an_answer_without_a_limit_takes_what_is_free(http: Server) -> None:
    prompt = {"prompt": "word " * 480, "temperature": 0, "logit_bias": {"0": -100, "2": -100}}
    usage = http.ask("POST", "/v1/completions", prompt).json["usage"]
    assert 0 < usage["completion_tokens"] < N_CTX // 4
    assert usage["total_tokens"] == N_CTX
    *_, last = http.ask(
        "POST", "/v1/completions", {**prompt, "stream": True, "stream_options": {"include_usage": True}}
    ).events()
    assert last["usage"]["total_tokens"] == N_CTX


def test_a_named_conversation_keeps_its_tokens(http: Server) -> None:
    first = {"messages": [{"role": "user", "content": "Who are you, and where do you live?"}], "max_tokens": 8}
    answer = http.ask("POST", "/v1/chat/completions", {**first, "user": "mira"}).json["choices"][0]["message"]
    second = {**first, "messages": [*first["messages"], answer, {"role": "user", "content": "Since when?"}]}
    usage = http.ask("POST", "/v1/chat/completions", {**second, "user": "mira"}).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_user_or_a_header_names_the_conversation() -> None:
    document = {"prompt": "one", "user": "mira"}
    name = "x-frameshard-conversation"
    sent = "Jürgen".encode().decode("latin-1")  # as Starlette reads the bytes of a header
    for headers, conversation in (({}, "mira"), ({name: "bran"}, "bran"), ({name: sent}, "Jürgen")):
        assert request.read(document, headers, chat=False, n_ctx=512).conversation == conversation
    for wrong in ("\xfc", "x" * 513):
        with pytest.raises(request.Refusal) as refused:
            request.read(document, {name: wrong}, chat=False, n_ctx=512)
        assert (refused.value.status, refused.value.param) == (400, name)


PRICE = {
    "type": "object",
    "properties": {"item": {"enum": ["sword", "shield"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["item", "count"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "price", "description": "What it costs.", "parameters": PRICE}}]


def test_tools_are_called_and_their_results_read(http: Server, calling: Server) -> None:
    # With this seed and temperature it calls twice. A model as small as this one often calls until max_tokens.
    asked: dict[str, Any] = {
        "temperature": 0.9,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 1,
        "max_tokens": 120,
    }
    whole = calling.chat("How much are two swords?", **asked).json
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    call = message["tool_calls"][0]
    assert (call["type"], call["function"]["name"], message["content"]) == ("function", "price", None)
    jsonschema.validate(json.loads(call["function"]["arguments"]), PRICE)

    named = {"tool_choice": {"type": "function", "function": {"name": "price"}}, "parallel_tool_calls": False}
    chunks = calling.chat("How much are two swords?", **{**asked, **named}, stream=True).events()
    (streamed,) = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert streamed["index"] == 0
    assert streamed["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    # One token earlier the call is whole, and the model could begin another one.
    n_tokens = whole["usage"]["completion_tokens"]
    for several, reason in ((True, "length"), (False, "tool_calls")):
        cut_off = {**asked, "parallel_tool_calls": several, "max_tokens": n_tokens - 1}
        last = calling.chat("How much are two swords?", **cut_off).json["choices"][0]
        assert (last["finish_reason"], len(last["message"]["tool_calls"])) == (reason, 1)
        chunks = calling.chat("How much are two swords?", **cut_off, stream=True).events()
        assert chunks[-1]["choices"][0]["finish_reason"] == reason

    def n_prompt(turns: list[dict[str, Any]]) -> int:
        asked = {"messages": turns, "tools": TOOLS, "max_tokens": 1}
        return int(http.ask("POST", "/v1/chat/completions", asked).json["usage"]["prompt_tokens"])

    turns = [{"role": "user", "content": "How much are two swords?"}, message]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "24"} for each in message["tool_calls"]]
    assert n_prompt(turns[:1]) < n_prompt(turns) < n_prompt(turns + results)
    silent = http.chat("How much?", **{**asked, "tool_choice": "none", "max_tokens": 4}).json["choices"][0]["message"]
    assert "tool_calls" not in silent
    cut = http.chat("How much?", **{**asked, "max_tokens": 3}).json["choices"][0]
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    form = {"type": "json_object"}
    assert http.chat("How much?", **asked, response_format=form).error["param"] == "response_format"


def test_an_image_is_read(http: Server) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def ask(*parts: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]
        return http.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    assert ask(image).json["usage"]["prompt_tokens"] > ask().json["usage"]["prompt_tokens"]
    broken = ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    assert (broken.status, broken.error["type"], broken.error["param"]) == (400, "invalid_request_error", "messages")
    assert http.ask("GET", "/props").json["modalities"] == {"vision": True, "audio": False}


def test_a_sound_is_heard(tmp_path: Path, talking_model: Path) -> None:
    mmproj = tmp_path / "mmproj.gguf"
    tiny_audio.make(mmproj)
    options: dict[str, Any] = {"model": str(talking_model), "mmproj": str(mmproj), "device": "cpu"}
    with sidecar(tmp_path, **options, n_ctx=512) as (connect_file, _), server(connect_file) as http:

        def ask(*parts: dict[str, Any]) -> Any:
            messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]
            return http.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4})

        def sound(data: str) -> dict[str, Any]:
            return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

        heard = ask(sound(base64.b64encode(tone(2.0).data).decode()))
        assert heard.json["usage"]["prompt_tokens"] > ask().json["usage"]["prompt_tokens"]
        broken = ask(sound("no base64"))
        assert (broken.status, broken.error["param"]) == (400, "messages[0].content[1].input_audio")
        assert http.ask("GET", "/props").json["modalities"] == {"vision": False, "audio": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_job(http: Server, stream: bool) -> None:
    connection = http.begin("POST", "/v1/chat/completions", {**STORY, "stream": stream})
    if stream:
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
    else:
        until(lambda: http.metric("jobs_running") == 1)
    connection.close()
    until(lambda: http.metric("jobs_running") + http.metric("jobs_queued") == 0)
    until(lambda: http.metric("http_connections") == 1)


def test_the_lease_is_read_and_set(http: Server) -> None:
    before = http.ask("GET", "/lease").json
    with contextlib.closing(http.begin("POST", "/v1/chat/completions", {**STORY, "stream": True})) as connection:
        response = connection.getresponse()
        assert response.readline()
        lease = http.ask("PUT", "/lease", {"vram_budget_mb": 160, "version": 7, "reason": "test"}).json
        assert lease["vram_budget_bytes"] == 160 << 20
        assert lease["used_bytes"] <= 160 << 20
        again = http.ask("GET", "/lease").json
        assert lease.keys() == again.keys()
        for name in ("vram_budget_bytes", "floor_bytes", "state", "version", "host_budget_bytes"):
            assert lease[name] == again[name]  # the memory in use may have changed meanwhile
        assert (lease["state"], lease["version"]) == ("active", 7)
    assert http.metric("vram_budget_bytes") == 160 << 20

    stale = http.ask("PUT", "/lease", {"vram_budget_mb": 170, "version": 6})
    assert (stale.status, stale.error["code"]) == (409, "stale_lease")
    low = http.ask("PUT", "/lease", {"vram_budget_mb": 1})
    assert (low.status, low.error["code"]) == (400, "budget_below_floor")
    for wrong in (
        {},
        {"vram_budget_mb": "x"},
        {"vram_budget_mb": 1, "budget": 1},
        {"vram_budget_mb": 200, "state": "no"},
    ):
        refused = http.ask("PUT", "/lease", wrong)
        assert (refused.status, refused.error["code"]) == (400, "invalid_value"), wrong
    assert http.ask("PUT", "/lease", {"vram_budget_mb": 0, "state": "parked"}).status == 200
    assert http.ask("GET", "/health").json == {"status": "unavailable", "engine": "ready", "lease": "parked"}
    assert http.ask("PUT", "/lease", {"vram_budget_mb": 0}).json["floor_bytes"] == before["floor_bytes"]
    assert http.ask("GET", "/health").status == 200
