"""OpenAI's own Python package against the HTTP server, used as its examples use it."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel

from frameshard.testing import fake_engine
from servers import Server, server, sidecar, until

TIMEOUT_S = 120.0


class Guard(BaseModel):
    """The answer that a test asks for."""

    armed: bool
    mood: Literal["calm", "angry"]


def options(http: Server, **more: Any) -> dict[str, Any]:
    given = {"base_url": http.ready["url"], "api_key": http.key, "timeout": TIMEOUT_S, "max_retries": 0}
    return {**given, **more}


def messages(text: Any) -> list[Any]:
    return [{"role": "system", "content": "You are Mira."}, {"role": "user", "content": text}]


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package. Its import takes half a second, so only a process that runs these tests imports it."""
    return pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture
def client(openai: Any, http: Server) -> Iterator[Any]:
    with openai.OpenAI(**options(http)) as client:
        yield client


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of an engine that dies at the word `poison`, and never ends an answer to other words."""
    engine = fake_engine(poison="poison", endless=True, delay_s=0.01)
    with sidecar(tmp_path_factory.mktemp("sick"), engine=engine) as (connect_file, _):
        with server(connect_file) as running:
            yield running


def test_models(openai: Any, client: Any) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_an_answer_and_a_stream_have_the_same_text(client: Any) -> None:
    asked: Any = {"model": "any", "messages": messages("Who are you?"), "max_completion_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**asked, user="mira")
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage.completion_tokens == 12
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(**asked, extra_body={"choices": ["Mira"]}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "Mira"
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.status_code == 200
    assert raw.parse().choices[0].message.content == choice.message.content
    plain = client.completions.create(model="any", prompt="Once upon a time", max_tokens=8, temperature=0)
    assert plain.choices[0].text


def test_asyncio(openai: Any, http: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(**options(http)) as client:

            async def ask(number: int) -> str:
                asked: Any = {"messages": messages(f"Say {number}."), "max_tokens": 4, "temperature": 0}
                text = ""
                async for chunk in await client.chat.completions.create(model="any", **asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
                whole = await client.chat.completions.create(model="any", **asked)
                assert whole.choices[0].message.content == text
                return text

            assert all(await asyncio.gather(*map(ask, range(3))))

    asyncio.run(main())


def test_a_parsed_answer_and_an_image(openai: Any, client: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "text", "text": "Is the guard armed?"}, {"type": "image_url", "image_url": {"url": url}}]
    for text in ("A guard, as JSON.", content):
        parsed = client.chat.completions.parse(model="any", messages=messages(text), response_format=Guard, seed=1)
        assert isinstance(parsed.choices[0].message.parsed, Guard)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="any", messages=messages("A guard."), response_format=Guard, max_completion_tokens=2
        )


class Price(BaseModel):
    """What an item costs."""

    item: Literal["sword", "shield"]
    count: Literal[1, 2]


def test_tools(openai: Any, calling: Server) -> None:
    asked: Any = {"model": "any", "tools": [openai.pydantic_function_tool(Price)], "tool_choice": "required"}
    asked |= {"temperature": 0.9, "seed": 1}  # with these the model ends its calls
    with openai.OpenAI(**options(calling)) as client:
        with client.chat.completions.stream(messages=messages("How much are two swords?"), **asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0].message
        assert "tool_calls.function.arguments.done" in kinds
        assert isinstance(final.tool_calls[0].function.parsed_arguments, Price)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "24 gold"} for call in final.tool_calls]
        turns = [*messages("How much are two swords?"), final, *results]
        answer = client.chat.completions.create(
            model="any", messages=turns, tools=asked["tools"], tool_choice="none", temperature=0, max_tokens=8
        )
        assert answer.choices[0].message.content


def test_errors_have_their_classes(openai: Any, http: Server, client: Any) -> None:
    asked: Any = {"model": "any", "messages": messages("Who are you?")}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, n=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "n")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked, stream=True, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=messages("word " * 2000))
    assert refused.value.code == "context_length_exceeded"
    with openai.OpenAI(**options(http, api_key="wrong")) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with openai.OpenAI(**options(http, base_url="http://127.0.0.1:9/v1")) as lost:
        with pytest.raises(openai.APIConnectionError):
            lost.models.list()


def test_retries_and_timeouts(openai: Any, sick: Server) -> None:
    def failures() -> int:
        lines = sick.ask("GET", "/metrics").body.decode().splitlines()
        name = 'frameshard_http_responses_total{path="/v1/chat/completions",status="503"} '
        return sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))

    with openai.OpenAI(**options(sick, max_retries=1)) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.chat.completions.create(model="any", messages=messages("poison"))
        assert failed.value.code == "engine_died"
        assert failures() == 2
    with openai.OpenAI(**options(sick, timeout=0.5)) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="any", messages=messages("one"), max_tokens=100_000)


def test_a_stream_that_is_closed_ends_its_job(openai: Any, sick: Server) -> None:
    with openai.OpenAI(**options(sick)) as client:
        stream = client.chat.completions.create(model="any", messages=messages("one"), max_tokens=100_000, stream=True)
        with stream:
            next(iter(stream))
            assert sick.metric("jobs_running") == 1
    until(lambda: sick.metric("jobs_running") + sick.metric("jobs_queued") == 0)
