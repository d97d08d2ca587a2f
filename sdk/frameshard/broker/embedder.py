"""Embeds texts for clients in a process of its own.

The first request starts the process, so a sidecar whose clients embed nothing pays nothing for it. After a load that
failed, the next request tries again. The process gets one text at a time; the clients take turns, so a long request
delays another client by one text. If the process dies, another one is started and encodes the same text. A request
during which it dies twice fails. The engine and its jobs are not affected.

Guarantees: texts are encoded only when nothing else wants the CPU, as far as the system can do that; the load, about a
second of one CPU, has the usual priority. No GPU is visible to the process. It ends when this process ends, because its
socket closes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from frameshard import program, system
from frameshard.broker.lastwords import LastWords
from frameshard.broker.supervisor import ENVIRONMENT, WORDS_S, end_reading
from frameshard.errors import BadMessage, BadModel, EngineDied, FrameshardError, Overloaded, Unsupported
from frameshard.wire import channel
from frameshard.wire import embedder as wire
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection

logger = logging.getLogger("frameshard.broker")

MAX_WAITING = 64
"""The most requests that may wait."""

MAX_CLIENT_WAITING = 16
"""Those of one client."""

MAX_DEATHS = 2
"""A request fails after so many deaths of the process."""

ANSWER_S = 600.0
"""The longest time for a load or for one text. It is long because other programs may use nearly all CPU time."""

HIDE_GPUS = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "GGML_DISABLE_VULKAN": "1",
}
"""Variables of the process: llama.cpp finds no device but the CPU, so it does not open one."""

NICE = 19
AUTOGROUP_TRIES = 5
AUTOGROUP_S = 0.15
"""Linux lets a process set the priority of an autogroup about ten times a second in all."""


@dataclass(eq=False)
class _Asked:
    """A request that is not answered yet, and the rows that it has so far."""

    connection: ServerConnection
    request: m.Embed
    rows: list[wire.Row] = field(default_factory=list)
    deaths: int = 0


class Embedder:
    """Runs one process at a time.

    :param path: path of the sentence encoder; "" if there is none.
    :param epoch: the number of the launch.
    :param changed: called when there is something to send.
    """

    def __init__(self, path: str, epoch: int, changed: Callable[[], None]) -> None:
        self._path = path
        self._epoch = epoch
        self._changed = changed
        self._waiting: dict[ServerConnection, deque[_Asked]] = {}  # the client whose turn it is comes first
        self._current: _Asked | None = None  # the process has a text of this request
        self._n_dim = 0  # of the running process; 0: it has not loaded the encoder yet
        self._fatal: FrameshardError | None = None
        self._news = trio.Event()

    def ask(self, connection: ServerConnection, request: m.Embed) -> None:
        """Queues a request. Its answer follows. One that waits already is not queued again: a client repeats what has
        no answer when it resumes its session.

        :raises Unsupported: there is no sentence encoder.
        :raises Overloaded: too many requests wait.
        """
        if not self._path:
            raise Unsupported("this sidecar has no sentence encoder: launch it with embedder=PATH of a GGUF file")
        mine = self._waiting.get(connection, deque())
        if any(asked.request.id == request.id for asked in mine):
            return
        if len(mine) >= MAX_CLIENT_WAITING or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Overloaded("too many texts wait to be embedded: ask again when some answers have come")
        mine.append(_Asked(connection, request))
        self._waiting[connection] = mine
        self._news.set()

    def drop(self, connection: ServerConnection) -> None:
        """Forgets the requests of a client that has gone."""
        self._waiting.pop(connection, None)

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._until(lambda: bool(self._waiting))
            status = await self._live()
            logger.warning("the embedder ended with %s", status)
            self._lost(status)
            self._changed()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news = trio.Event()
            await self._news.wait()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _next_text(self) -> str:
        """Takes the next client's turn."""
        connection = next(iter(self._waiting))
        mine = self._waiting[connection] = self._waiting.pop(connection)  # now it is last
        self._current = mine[0]
        return self._current.request.texts[len(self._current.rows)]

    def _answered(self, event: wire.Message) -> None:
        """Takes the process's answer to the text.

        :raises BadMessage: it is no answer to a text.
        """
        if not isinstance(event, wire.Row | wire.Refused):
            raise BadMessage("the embedder has not answered the text")
        asked, self._current = self._current, None
        assert asked is not None
        if not any(asked in mine for mine in self._waiting.values()):
            return  # the client has gone
        if isinstance(event, wire.Refused):
            n = len(asked.rows)
            error = event.error.exception()
            self._fail(asked, type(error)(f"texts[{n}]: {error.message}", **{**error.detail, "text": n}))
            return
        asked.rows.append(event)
        if len(asked.rows) == len(asked.request.texts):
            rows, n_tokens = b"".join(row.row for row in asked.rows), sum(row.n_tokens for row in asked.rows)
            asked.connection.reply(m.Embeddings(asked.request.id, self._epoch, self._n_dim, rows, n_tokens))
            self._remove(asked)

    def _fail(self, asked: _Asked, error: FrameshardError) -> None:
        asked.connection.refuse(asked.request.id, error)
        self._remove(asked)

    def _remove(self, asked: _Asked) -> None:
        mine = self._waiting[asked.connection]
        mine.remove(asked)
        if not mine:
            del self._waiting[asked.connection]

    def _lost(self, status: str) -> None:
        """The process has ended. Fails what cannot be tried again."""
        everyone = [asked for mine in self._waiting.values() for asked in mine]
        if self._fatal is not None:  # another process would refuse the file too
            for asked in everyone:
                self._fail(asked, self._fatal)
            return
        for asked in [self._current] if self._current is not None else everyone:
            asked.deaths += 1
            if asked.deaths == MAX_DEATHS and asked in everyone:
                self._fail(asked, EngineDied(f"the embedder ended twice, now with {status}"))

    # ---- process ----------------------------------------------------------------------------------------------------

    async def _live(self) -> str:
        """Runs one process.

        :returns: how it ended.
        """
        self._current, self._n_dim, self._fatal = None, 0, None
        words = LastWords()
        command = program.command("frameshard.engine.embedder", self._path)
        try:
            process, stream = await system.start_with_stream(command, {**os.environ, **ENVIRONMENT, **HIDE_GPUS})
        except OSError as error:
            return f"no process: {error.strerror or error}"
        assert process.stdout is not None
        async with trio.open_nursery() as listening:
            listening.start_soon(words.listen, process.stdout)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._feed, stream, process)
                    nursery.start_soon(end_reading, process, nursery.cancel_scope)
                    await self._read(stream)
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
                    await trio.aclose_forcefully(stream)
            with trio.move_on_after(WORDS_S):
                await words.ended.wait()
            listening.cancel_scope.cancel()
        await trio.aclose_forcefully(process.stdout)
        code = process.returncode
        assert code is not None
        how = system.ending(code)
        status = f"{how}: {words}" if str(words) else how
        if not self._n_dim and self._fatal is None and how in system.CRASHES:
            self._fatal = BadModel(f"llama.cpp ended while it loaded {self._path}, with {status}", path=self._path)
        return status

    async def _feed(self, stream: trio.SocketStream, process: trio.Process) -> None:
        """Passes one text after the other to the process. Kills it if it does not answer."""
        with trio.move_on_after(ANSWER_S) as wait:
            await self._until(lambda: self._n_dim > 0)
            await _make_idle(process.pid)
        while not wait.cancelled_caught:
            await self._until(lambda: bool(self._waiting))
            with trio.move_on_after(ANSWER_S) as wait:
                try:
                    await stream.send_all(wire.pack(wire.Encode(self._next_text())))
                except trio.BrokenResourceError:
                    return  # _read notices the end too
                await self._until(lambda: self._current is None)
        logger.warning("killing the embedder: it does not answer")
        process.kill()

    async def _read(self, stream: trio.SocketStream) -> None:
        """Takes what the process sends, until it ends."""
        reader = channel.Reader()
        with suppress(trio.BrokenResourceError, BadMessage):
            while data := await stream.receive_some(1 << 16):
                for fields in reader.feed(data):
                    event = wire.read(fields)
                    if isinstance(event, wire.Loaded):
                        self._n_dim = event.n_dim
                    elif self._current is not None:
                        self._answered(event)
                    elif isinstance(event, wire.Refused):
                        self._fatal = event.error.exception()
                self._news.set()
                self._changed()


async def _make_idle(pid: int) -> None:
    """Gives the main thread of a process the lowest priority that the system has. The process has its own session."""
    if sys.platform == "win32":
        system.make_idle(pid)
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    # With autogroups, Linux compares processes by priority only inside one session, and sessions by this file.
    for _ in range(AUTOGROUP_TRIES):
        try:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(NICE))
            return
        except BlockingIOError:
            await trio.sleep(AUTOGROUP_S)
        except OSError:
            return  # this kernel has none, or the process has ended
