"""The connections to the fallback server, a server with OpenAI's HTTP interface.

Guarantees: each attempt ends with one :class:`~frameshard.broker.fallback.Finished` or
:class:`~frameshard.broker.fallback.Broken`, unless it is dropped: then its connection is closed and nothing follows.
The number of connections, the bytes of an answer, the time without a byte and the whole time are limited. Redirects are
not followed, and proxies of the environment are not used. Nothing that the server says is part of an error or of the
log, and neither is the key.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import trio

from frameshard import system
from frameshard.broker import fallback
from frameshard.broker.answer import AnswerReader, BadAnswer
from frameshard.broker.arguments import ArgumentChecker, CannotBeChecked
from frameshard.errors import BadArgument, ConnectionLost, FrameshardError, internal
from frameshard.wire import messages as m
from frameshard.wire.launch import ServeConfig

logger = logging.getLogger("frameshard.broker")

CONNECT_S = 10.0
SILENCE_S = 30.0
"""An attempt fails after so many seconds without a byte from the server."""

TOTAL_S = 600.0
"""An attempt fails after so many seconds, whatever the server sends."""

LINGER_S = 5.0
"""When the text is complete, the number of tokens is awaited for at most this many seconds."""

REFUSED = (400, 405, 413, 415, 422, 501)
"""Statuses that the same request would have again."""

LOCAL_HEADER = "x-frameshard-local-only"
"""Tells another sidecar to answer itself, so that no job goes round in circles."""


class _Failed(Exception):
    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Remote:
    """
    :param url: the base URL.
    :param key: sent as a bearer token; empty: none.
    :param silence_s: how long an attempt waits for the next byte.
    """

    def __init__(self, url: str, key: str = "", *, silence_s: float = SILENCE_S) -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        headers = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(
            headers={**headers, LOCAL_HEADER: "1"},
            verify=ssl.create_default_context(),
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=fallback.MAX_REMOTE, keepalive_expiry=5.0),
            follow_redirects=False,
            trust_env=False,
        )
        self._send, self._receive = trio.open_memory_channel[fallback.Command](float("inf"))
        self._checker = ArgumentChecker()
        self._scopes: dict[int, trio.CancelScope] = {}
        self._last_failure = ""

    def send(self, command: fallback.Command) -> None:
        """Carries out a command. Does not wait."""
        self._send.send_nowait(command)

    async def run(self, on_event: Callable[[fallback.Event], None]) -> None:
        """Runs until it is cancelled.

        :param on_event: called with what becomes of the attempts.
        """
        with closing(self._checker):
            async with self._client, trio.open_nursery() as nursery:
                async for command in self._receive:
                    if isinstance(command, fallback.Ask):
                        scope = self._scopes[command.attempt] = trio.CancelScope()
                        nursery.start_soon(self._attempt, command, scope, on_event)
                    elif (dropped := self._scopes.pop(command.attempt, None)) is not None:
                        dropped.cancel()

    async def _attempt(
        self, ask: fallback.Ask, scope: trio.CancelScope, on_event: Callable[[fallback.Event], None]
    ) -> None:
        with scope:
            event = await self._outcome(ask, on_event)
            if self._scopes.pop(ask.attempt, None) is not None:  # otherwise it was dropped
                on_event(event)

    async def _outcome(self, ask: fallback.Ask, on_event: Callable[[fallback.Event], None]) -> fallback.Event:
        """The last event of an attempt."""
        tools = fallback.callable_tools(ask.request)
        reader = AnswerReader(
            ask.request.sampling.max_tokens,
            [tool.name for tool in tools],
            must_call=fallback.must_call(ask.request),
        )
        failure: _Failed | None = await self._ask(ask, reader, on_event)
        if reader.reason is not None:  # what fails after the end of the answer does no harm
            failure = await self._check_calls(reader, tools)
            if failure is None:
                self._last_failure = ""
                n_generated = max(reader.n_generated, reader.n_parts)  # a part has a token or more
                return fallback.Finished(
                    ask.attempt, ask.job, reader.reason, reader.n_prompt, n_generated, reader.calls
                )
        assert failure is not None
        if str(failure) != self._last_failure:  # not once for each job
            logger.warning("the fallback server fails: %s", failure)
            self._last_failure = str(failure)
        why: FrameshardError = ConnectionLost(f"the fallback server fails: {failure}")
        return fallback.Broken(ask.attempt, ask.job, why, failure.refused)

    async def _ask(
        self, ask: fallback.Ask, reader: AnswerReader, on_event: Callable[[fallback.Event], None]
    ) -> _Failed:
        """Reads the answer.

        :returns: why it has no end, if it has none.
        """
        try:
            with trio.move_on_after(TOTAL_S) as limit:
                async with self._response(ask.body) as response:
                    await self._read(ask, response, reader, limit, on_event)
                return _Failed("it cuts an answer off")
        except _Failed as error:
            return error
        except BadAnswer as error:
            return _Failed(str(error))
        except Exception as error:
            return _Failed(f"{internal(logger, 'an attempt', error).name} error")
        return _Failed("it takes too long")

    async def _check_calls(self, reader: AnswerReader, tools: Sequence[m.Tool]) -> _Failed | None:
        try:
            await self._checker.check(reader.calls, tools)
        except BadAnswer as error:
            return _Failed(str(error))
        except CannotBeChecked as error:
            return _Failed(str(error), refused=True)
        except Exception as error:
            return _Failed(f"{internal(logger, 'the check of a call', error).name} error")
        return None

    @asynccontextmanager
    async def _response(self, body: bytes) -> AsyncIterator[httpx.Response]:
        """The response to a question. Exceptions of httpx become :class:`_Failed`."""
        try:
            async with self._client.stream("POST", self._url, content=body) as response:
                self._client.cookies.clear()
                self._check(response)
                yield response
        except httpx.ConnectError as error:  # the connection is not made, so nothing of the request is in its text
            raise _Failed(f"it cannot be reached: {_reason(error)}") from None
        except httpx.TimeoutException:
            raise _Failed("it is silent for too long") from None
        except httpx.HTTPError as error:
            raise _Failed(f"it breaks HTTP or the connection ({type(error).__name__})") from None

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status != 200:
            hint = {401: ", so the key is wrong", 403: ", so the key is wrong", 404: ", so URL or model is wrong"}
            redirects = ": redirects are not followed" if 300 <= status < 400 else ""
            message = f"it answers with status {status}{hint.get(status, '')}{redirects}"
            raise _Failed(message, refused=status in REFUSED)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream" or response.headers.get("content-encoding", "identity") != "identity":
            raise _Failed("it answers with another content type than text/event-stream")

    async def _read(
        self,
        ask: fallback.Ask,
        response: httpx.Response,
        reader: AnswerReader,
        limit: trio.CancelScope,
        on_event: Callable[[fallback.Event], None],
    ) -> None:
        async for data in response.aiter_raw():
            for text in reader.feed(data):
                if ask.attempt in self._scopes:
                    on_event(fallback.Text(ask.attempt, ask.job, text))
            if reader.over or ask.attempt not in self._scopes:
                return
            if reader.reason is not None:
                limit.deadline = min(limit.deadline, trio.current_time() + LINGER_S)


def _reason(error: BaseException) -> str:
    """Why there is no connection. If TLS fails, httpx does not say why; OpenSSL's reason has no word of the server."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS fails: {cause.reason}"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def open_remote(config: ServeConfig) -> Remote:
    """The connections that the launch options describe.

    :raises BadArgument: the key cannot be read.
    """
    for name in ("httpx", "httpcore"):  # their debug messages have headers
        logging.getLogger(name).setLevel(logging.WARNING)
    return Remote(config.fallback, _key(config))


def _key(config: ServeConfig) -> str:
    """The key, which is taken out of the environment, so that the engine does not inherit it. Errors do not repeat the
    options, in case one of them is the key itself."""
    if config.fallback_key_env:
        field, key = "fallback_key_env", os.environ.pop(config.fallback_key_env, "")
    elif config.fallback_key_file:
        field, path = "fallback_key_file", Path(config.fallback_key_file)
        try:
            if why := system.why_not_secret(path):
                raise BadArgument(f"{field}: the file {why}", field=field)
            key = path.read_text().strip()
        except (OSError, ValueError) as error:
            raise BadArgument(f"{field}: cannot be read: {type(error).__name__}", field=field) from None
    else:
        return ""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise BadArgument(f"{field}: has no key: one line of printable ASCII", field=field)
    return key
