"""The paths of the server, and what each does."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from frameshard.client import Client, Stream
from frameshard.errors import ContextOverflow, FrameshardError
from frameshard.http import answer, metrics, request
from frameshard.http.exchange import Exchanges
from frameshard.http.guard import Access, Guard
from frameshard.http.refusal import Refusal, bad, of_error
from frameshard.wire import messages as m

if TYPE_CHECKING:
    from frameshard.client import Rows

LEASE_TERMS = frozenset({"vram_budget_mb", "timeout_s", "state", "floor_mb", "version", "reason", "host_budget_mb"})
COMPLETIONS = "/v1/completions"
EMBED_TEXTS = 8
"""In one message to the sidecar. After each message other HTTP clients get their turn, and texts whose client has left
are not sent any more. So many texts always fit into a frame."""


def make_app(client: Client, model: m.ModelInfo, access: Access, connections: Callable[[], int]) -> ASGIApp:
    """The ASGI application.

    :param model: what the sidecar has loaded.
    :param connections: gives the number of open connections, for ``/metrics``.
    """
    responses: Counter[tuple[str, int]] = Counter()
    pages = Pages(client, model, responses, connections)
    routes = [
        Route("/v1/chat/completions", Answers(client, model, chat=True), methods=["POST"]),
        Route(COMPLETIONS, Answers(client, model, chat=False), methods=["POST"]),
        Route("/v1/embeddings", pages.embeddings, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name}", pages.model),
        Route("/health", pages.health, methods=["GET", "POST"]),  # LLMUnity sends a POST
        Route("/props", pages.props),
        Route("/metrics", pages.metrics),
        Route("/lease", pages.lease, methods=["GET", "PUT"]),
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_methods=["GET", "POST", "PUT"],
        allow_headers=["*"],  # OpenAI's JavaScript library sends some of its own
        allow_private_network=True,  # Chrome asks for this before a page of the Internet may reach a loopback address
    )
    inside = Starlette(
        routes=routes,
        middleware=[*([cors] if access.origins else []), Middleware(Guard, access=access)],
        exception_handlers={
            Refusal: _refused,
            FrameshardError: _failed,
            HTTPException: _no_such_page,
            Exception: _defect,
        },
    )
    known = {route.path for route in routes}

    def count(path: str, status: int) -> None:
        responses[path if path in known else "other", status] += 1

    return Exchanges(inside, count)


class Answers:
    """The path of chats, or that of completions. A job ends with its request, however that ends."""

    def __init__(self, client: Client, model: m.ModelInfo, *, chat: bool) -> None:
        self._client = client
        self._model = model
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        document = await _document(http)
        model = self._model
        asked = request.read(document, http.headers, chat=self._chat, n_ctx=model.n_ctx, thinks=model.thinks)
        made = answer.Answer(self._chat, model.name, asked.usage, asked.max_calls)
        while True:
            try:
                async with self._job(asked) as stream:
                    if asked.stream:
                        await _send_stream(send, stream, made)
                    else:
                        response = JSONResponse(made.whole(await stream.completed(), stream.thought))
                        await response(scope, receive, send)
                    return
            except ContextOverflow as error:  # before anything is sent, and mostly before anything is computed
                asked = request.shortened(asked, error)

    def _job(self, asked: request.Asked) -> Stream:
        names = ("images", "sampling", "conversation", "priority", "local_only")
        options: Any = {name: getattr(asked, name) for name in names}
        if self._chat:
            options |= {"tools": asked.tools, "tool_choice": asked.tool_choice, **asked.thought}
            return self._client.chat(asked.messages, **options)
        return self._client.complete(asked.prompt, **options)


async def _send_stream(send: Send, stream: Stream, made: answer.Answer) -> None:
    """Sends an answer as server-sent events.

    An error before the first part is raised, so that the response has its status. A later one is the last event.
    """
    put, parts = trio.open_memory_channel[answer.Document | FrameshardError](math.inf)

    def called(_call: m.ToolCall) -> None:
        for chunk in made.calls(stream.tool_calls):
            put.send_nowait(chunk)

    stream.on_thought = lambda thought: put.send_nowait(made.thought(thought.text))
    stream.on_tool_call = called

    async def read() -> None:
        with put:
            try:
                async for delta in stream:
                    put.send_nowait(made.part(delta.text))
                assert stream.result is not None
                for last in made.closing(stream.result):
                    put.send_nowait(last)
            except FrameshardError as error:
                put.send_nowait(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        first = await parts.receive()
        if not isinstance(first, FrameshardError):
            await _send_parts(send, made, first, parts)
    if isinstance(first, FrameshardError):
        raise first


async def _send_parts(
    send: Send,
    made: answer.Answer,
    first: answer.Document,
    parts: trio.MemoryReceiveChannel[answer.Document | FrameshardError],
) -> None:
    """Sends the first part and all of `parts`."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(data: bytes, *, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": more})

    await say(b"".join(map(answer.event, [*made.opening(), first])))
    async for part in parts:
        if isinstance(part, FrameshardError):
            await say(answer.event(of_error(part, made.asked_in).document()), more=False)
            return
        await say(answer.event(part))
    await say(answer.END, more=False)


class Pages:
    """The other paths."""

    def __init__(
        self,
        client: Client,
        model: m.ModelInfo,
        responses: Counter[tuple[str, int]],
        connections: Callable[[], int],
    ) -> None:
        self._client = client
        self._model = model
        self._responses = responses
        self._connections = connections

    async def models(self, _request: Request) -> Response:
        names = filter(None, (self._model.name, self._model.embedder))
        return JSONResponse({"object": "list", "data": [_described(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in filter(None, (self._model.name, self._model.embedder)):
            message = f"The model {name!r} does not exist; {self._model.name!r} is loaded"
            raise Refusal(404, message, "model_not_found", "model")
        return JSONResponse(_described(name))

    async def embeddings(self, http: Request) -> Response:
        """Rows for texts."""
        if not self._model.embedder:
            raise Refusal(
                501,
                "there is no sentence encoder: launch the sidecar with the option embedder",
                "not_implemented",
                headers={"x-should-retry": "false"},  # OpenAI's clients ask again after 500 and above
            )
        asked = request.read_embeddings(await _document(http))
        rows: list[Rows] = []
        n_tokens = 0
        for begin in range(0, len(asked.texts), EMBED_TEXTS):
            try:
                some, n_read = await self._client.embed_counted(asked.texts[begin : begin + EMBED_TEXTS])
            except ContextOverflow as error:
                at = int(str(error.detail["text"]))
                message = error.message.replace(f"texts[{at}]", f"input[{begin + at}]")
                raise Refusal(400, message, "context_length_exceeded", "input") from None
            rows += list(some)
            n_tokens += n_read
        return JSONResponse(answer.embeddings(rows, n_tokens, self._model.embedder, base64=asked.base64))

    async def health(self, _request: Request) -> Response:
        """200 if a request would be answered now."""
        stats, budget = await self._client.stats(), await self._client.budget()
        well = stats.broker.engine == "ready" and budget.state == "active"
        state = {"status": "ok" if well else "unavailable", "engine": stats.broker.engine, "lease": budget.state}
        return JSONResponse(state, 200 if well else 503)

    async def props(self, _request: Request) -> Response:
        """What llama.cpp's server tells under this path, as far as a client of the sidecar knows it."""
        model = self._model
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": model.n_ctx},
                "total_slots": model.n_parallel,
                "model_path": model.name,
                "modalities": {"vision": model.sees, "audio": model.hears},
                "device": model.device,
            }
        )

    async def metrics(self, _request: Request) -> Response:
        stats, budget = await self._client.stats(), await self._client.budget()
        page = metrics.page(stats, budget, self._responses, self._connections())
        return PlainTextResponse(page, media_type=metrics.CONTENT_TYPE)

    async def lease(self, http: Request) -> Response:
        """The lease in force. A PUT changes it first, and is answered when the memory is released."""
        if http.method == "PUT":
            await self._client.set_budget(**_terms(await _document(http)), observe=False)
        budget = dataclasses.asdict(await self._client.budget())
        return JSONResponse({name: value for name, value in budget.items() if name not in ("id", "epoch")})


async def _document(http: Request) -> request.Document:
    """The JSON object in the body.

    :raises Refusal: the body is compressed, too large or too slow, or is no JSON object.
    """
    encoding = http.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise Refusal(
            415,
            f"a body with Content-Encoding: {encoding} is not read: send it uncompressed",
            "unsupported_content_encoding",
            headers={"Accept-Encoding": "identity"},
        )
    return request.parse(await http.body())


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "frameshard"}


def _terms(document: request.Document) -> Any:
    """The arguments of :meth:`Client.set_budget`.

    :raises Refusal: a name or a type is wrong. The client checks the ranges.
    """
    for name in document.keys() - LEASE_TERMS:
        raise bad(f"a lease has no {name}, only {', '.join(sorted(LEASE_TERMS))}", name)
    if "vram_budget_mb" not in document:
        raise bad("vram_budget_mb is missing; 0: no limit", "vram_budget_mb")
    return document


async def _refused(_request: Request, refusal: Refusal) -> Response:
    return refusal.response()


async def _failed(request: Request, error: FrameshardError) -> Response:
    return of_error(error, answer.asked_in(chat=request.url.path != COMPLETIONS)).response()


async def _no_such_page(request: Request, error: HTTPException) -> Response:
    known = error.status_code == 405
    message = f"{request.method} {request.url.path} is not served here"
    code = "method_not_supported" if known else "unknown_url"
    return Refusal(error.status_code, message, code, headers=error.headers).response()


async def _defect(_request: Request, _error: Exception) -> Response:
    return Refusal(500, "the request failed by a defect of frameshard; its log has more", "internal").response()
