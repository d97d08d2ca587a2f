"""Thought and embeddings through the HTTP server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from test_answers import text_of

import frameshard
from frameshard.http import request
from frameshard.http.app import EMBED_TEXTS, make_app
from frameshard.http.guard import Access
from frameshard.http.listener import Listener, open_listener
from servers import Server, server, sidecar


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, switching_model: Path, encoder_path: Path) -> Iterator[Path]:
    """The connect file of a sidecar with a model that can think, and a sentence encoder."""
    options: dict[str, Any] = {"model": str(switching_model), "embedder": str(encoder_path), "device": "emulated"}
    with sidecar(tmp_path_factory.mktemp("http"), **options, n_ctx=512, mode="stream_only") as (connect_file, _):
        yield connect_file


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[Server]:
    with server(place) as running:
        yield running


def test_a_thought_is_apart_from_the_answer(http: Server, place: Path) -> None:
    async def asked() -> tuple[str, str, int]:
        async with frameshard.connect(place) as client:
            sampling = frameshard.Sampling(max_tokens=60, seed=7, choices=("night", "day"))
            options: Any = {"thinking": "shown", "thinking_tokens": 8, "sampling": sampling}
            async with client.chat([frameshard.ChatMessage("user", "Is it night?")], **options) as stream:
                done = await stream.completed()
            return stream.thought, done.text, done.n_thought

    thought, text, n_thought = trio.run(asked)
    assert thought.strip()
    fields: Any = {
        "thinking_tokens": 8,
        "max_tokens": 60,
        "seed": 7,
        "choices": ["night", "day"],
    }  # the form begins a thought
    for wanted in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        whole = http.chat("Is it night?", **fields, **wanted).json
        message = whole["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, text)
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": n_thought}
    chunks = http.chat("Is it night?", **fields, reasoning_effort="low", stream=True).events()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    assert text_of(chunks) == text
    kinds = [next(iter(delta), "end") for delta in deltas]
    assert kinds == sorted(kinds, key=["role", "reasoning_content", "content", "end"].index)
    for unwanted in ({}, {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert "reasoning_content" not in http.chat("Is it night?", **fields, **unwanted).json["choices"][0]["message"]
    told = [{"role": "assistant", "content": text, "reasoning_content": thought}, {"role": "user", "content": "Why?"}]
    assert http.ask("POST", "/v1/chat/completions", {"messages": told, "max_tokens": 2}).status == 200


def test_wrong_wishes_for_thought_are_refused(http: Server) -> None:
    for fields, param in (
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, None),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"thinking_tokens": -1}, "thinking_tokens"),
        ({"reasoning_effort": "low", "reasoning_format": "none"}, "reasoning_format"),
    ):
        refused = http.chat(**fields)
        assert (refused.status, None if refused.status == 200 else refused.error["param"]) == (
            (400, param) if param else (200, None)
        ), fields


def test_what_a_model_that_cannot_think_is_asked() -> None:
    document = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": True}}
    asked = request.read({**document, "reasoning_format": "none"}, {}, chat=True, n_ctx=512)
    assert asked.thought == {"thinking": "off", "thinking_tokens": 0, "template_keywords": ""}
    with pytest.raises(request.Refusal, match="does not think"):
        request.read({**document, "reasoning_effort": "high"}, {}, chat=True, n_ctx=512)


def test_texts_are_embedded(http: Server, place: Path) -> None:
    async def asked() -> Any:
        async with frameshard.connect(place) as client:
            return await client.embed(["My goat is called Pip.", "It rained."])

    rows = trio.run(asked).astype(np.float32)
    both = http.ask("POST", "/v1/embeddings", {"input": ["My goat is called Pip.", "It rained."], "model": "any"}).json
    assert [each["index"] for each in both["data"]] == [0, 1]
    assert np.array_equal(np.array([each["embedding"] for each in both["data"]], np.float32), rows)
    assert both["usage"] == {"prompt_tokens": 13, "total_tokens": 13}  # 8 and 5, with the marks of the encoder
    assert both["model"].endswith(".gguf")
    assert both["model"] in [each["id"] for each in http.ask("GET", "/v1/models").json["data"]]
    one = http.ask("POST", "/v1/embeddings", {"input": "It rained.", "encoding_format": "base64"}).json
    found = np.frombuffer(base64.b64decode(one["data"][0]["embedding"]), "<f4")
    assert np.array_equal(found, rows[1])
    assert one["usage"]["prompt_tokens"] == 5
    many = http.ask("POST", "/v1/embeddings", {"input": ["a"] * 65}).json
    assert (len(many["data"]), many["usage"]["total_tokens"]) == (65, 3 * 65)  # several requests of the sidecar
    long = ["a" + " " * 65_535] * 20  # as long as the sidecar takes
    many = http.ask("POST", "/v1/embeddings", {"input": long}).json
    assert (len(many["data"]), many["usage"]["total_tokens"]) == (20, 3 * 20)
    for wrong in ([], "", ["a", ""], [1, 2], [[1]], 7, ["a"] * 2049):
        refused = http.ask("POST", "/v1/embeddings", {"input": wrong})
        assert (refused.status, refused.error["param"]) == (400, "input"), wrong
    assert http.ask("POST", "/v1/embeddings", {"input": "a", "dimensions": 8}).error["param"] == "dimensions"
    assert http.ask("POST", "/v1/embeddings", {"input": "a", "encoding_format": "x"}).status == 400
    for texts, at in (("word " * 600, 0), (["a"] * 70 + ["word " * 600], 70)):
        refused = http.ask("POST", "/v1/embeddings", {"input": texts})
        assert (refused.error["code"], refused.error["param"]) == ("context_length_exceeded", "input")
        assert refused.error["message"].startswith(f"input[{at}]: it has ")
    refused = http.ask("POST", "/v1/embeddings", {"input": ["a"] * 70 + ["x" * 70_000]})
    assert (refused.error["code"], refused.error["param"]) == ("invalid_value", "input")
    assert refused.error["message"].startswith("input[70] has more than 65536 bytes")


def test_the_texts_of_a_client_that_left_are_not_embedded() -> None:
    class Encoder:
        """A client of a sidecar whose encoder does not answer yet."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        async def embed_counted(self, texts: Sequence[str]) -> Any:
            self.asked.append(len(texts))
            await trio.sleep_forever()

    async def main() -> None:
        encoder: Any = Encoder()
        model: Any = SimpleNamespace(embedder="encoder.gguf")
        socket = await open_listener("127.0.0.1", 0)
        listener = Listener(socket, make_app(encoder, model, Access(None), lambda: 0))
        body = json.dumps({"input": ["It rained."] * 400}).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            async with await trio.open_tcp_stream("127.0.0.1", socket.socket.getsockname()[1]) as peer:
                await peer.send_all(head.encode() + body)
                while not encoder.asked:
                    await trio.sleep(0.01)
            while listener.connections:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        assert encoder.asked == [EMBED_TEXTS]

    trio.run(main)
