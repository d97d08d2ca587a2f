"""Starts the engine process, watches it, and starts it again.

Guarantees: the engine ends when this process ends, because its socket closes; an orderly end also kills it. An engine
that stops answering or has ended is replaced, also if another process still holds its socket. An end that was asked for
never counts as a death. A death while jobs ran counts against those jobs (:mod:`frameshard.broker.jobs`). If engines
die repeatedly while no job runs, the engine is off for a pause and then started again. The pauses grow up to a limit,
so the sidecar recovers by itself when the cause is gone.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from frameshard import system
from frameshard.broker.lastwords import LastWords
from frameshard.errors import BadArgument, BadMessage, BadModel, EngineDied, FrameshardError
from frameshard.wire import channel, states
from frameshard.wire import engine as em
from frameshard.wire.launch import ServeConfig

logger = logging.getLogger("frameshard.broker")

WATCH_S = 0.5
"""Seconds between two looks at the engine. Silence is measured in looks, so the time of a suspended machine does not
count."""

STOP_S = 1.0
"""Seconds that the engine has for an orderly end. After that it is killed."""

WORDS_S = 1.0
"""Seconds to read the last output and the last messages of a dead engine. The limit is needed because children of the
engine may keep its pipe and its socket open. Wine does so with the socket of a process that is killed while it
sends."""

BACKOFF_S = 0.25
MAX_BACKOFF_S = 1.0

WAKE_AFTER = 5
"""A client's request can end a pause only after `WAKE_AFTER * off_pause_s` seconds of it. Otherwise clients could make
the broker load the model again and again."""

MAX_BACKLOG = 4096
"""If so many commands wait, the engine does not read them any more, and is killed."""

ENVIRONMENT = {
    "GGML_NO_BACKTRACE": "1",
    # glibc uses memory maps for large allocations, and raises their least size each time one is freed. Then it puts the
    # KV cache and large buffers on the heap, and does not return their memory: 75 to 115 MiB with a model of 140 MiB.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    # By default libgomp's threads spin for 15 ms before they sleep. With one millisecond there are as many tokens per
    # second, and the engine takes 4 to 5 of 16 cores from the game instead of 8 to 9.
    "GOMP_SPINCOUNT": "20000",
}
"""Variables that are added to the environment of the engine process."""

_ASIDE = (em.Alive, em.BudgetEvent, em.Stats, em.Plans, em.TokenCount, em.Kv, em.Watch)
"""Events from other threads of the engine. They do not show that its main thread works."""


class Owner(Protocol):
    """Receives the supervisor's events. Called in the supervisor's task; must not wait."""

    def engine_ready(self, ready: em.Ready) -> None: ...
    def engine_event(self, event: em.Event) -> bool:
        """The engine has sent an event.

        :returns: true if it shows progress (a new token).
        :raises BadMessage: the engine cannot send this event now.
        """

    def engine_lost(self, death: FrameshardError | None) -> bool:
        """The engine has ended.

        :param death: the reason; None if the end was asked for.
        :returns: true if the next engine does without what this one died of.
        """

    def engine_wanted(self) -> bool:
        """False while the lease does not need an engine."""

    def engine_hibernated(self) -> None: ...
    def engine_off(self, error: FrameshardError) -> None: ...
    def engine_busy(self) -> bool:
        """Whether the engine has jobs."""

    def engine_works(self) -> bool:
        """Whether the engine's main thread may be at work: over jobs, or over something else it was told to do."""

    def engine_woken(self) -> None: ...
    def engine_changed(self) -> None:
        """Called after any of the calls above: there may be something to send."""


class RestartPolicy:
    """Decides when to start the engine again after a death."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._deaths: deque[float] = deque()  # times of the deaths that count
        self._in_a_row = 0
        self._pauses = 0

    def died(self, now: float, *, progress: bool, busy: bool) -> float | None:
        """To be called when an engine has died.

        :param now: seconds of a monotonic clock.
        :param progress: this engine has produced a new token.
        :param busy: it had jobs; then the death counts against these jobs.
        :returns: seconds to wait before the next start; None if the engine must stay off for :meth:`pause`.
        """
        if progress:
            self._deaths.clear()
            self._in_a_row = 0
        self._in_a_row += 1
        if not busy:
            self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - self._config.restart_window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._config.restart_limit:
            return None
        self._pauses = 0
        return min(BACKOFF_S * (self._in_a_row - 1), MAX_BACKOFF_S)

    def pause(self) -> float:
        """The length of the next pause in seconds. Each is twice as long as the one before, up to a limit."""
        first, longest = self._config.off_pause_s, self._config.off_pause_max_s
        pause: float = min(first * 2 ** min(self._pauses, 32), longest)
        self._pauses += 1
        return pause


async def end_reading(process: trio.Process, reading: trio.CancelScope) -> None:
    """Ends the reading of a dead process's socket. Usually the socket ends by itself, and at once."""
    await process.wait()
    await trio.sleep(WORDS_S)
    reading.cancel()


class Supervisor:
    """Runs one engine at a time."""

    def __init__(self, config: ServeConfig, owner: Owner, config_of_engine: Callable[[], em.EngineConfig]) -> None:
        self.state = states.Engine.LOADING
        self.pid: int | None = None
        self.restarts = 0
        self.load_s = 0.0
        """Seconds from the last start of an engine until it was ready."""
        self.error: FrameshardError | None = None
        """The reason why the engine is off, or why the first load failed; None otherwise."""
        self._config = config
        self._owner = owner
        self._engine_config = config_of_engine
        self._send: trio.MemorySendChannel[em.Command] | None = None
        self._silent = 0  # looks since the last event of the engine's main thread
        self._still = 0  # looks since the last event of any of its threads
        self._ping_open = False
        self._progress = False
        self._stopping = False
        self._ending = False
        self._woken = trio.Event()
        self._fatal: FrameshardError | None = None
        self._killed_for = ""
        self._words = LastWords()
        self._started_at = 0.0

    async def run(self) -> None:
        """Runs engines until :meth:`stop` is called or the first load fails. Then :attr:`error` has the reason."""
        policy = RestartPolicy(self._config)
        while True:
            status = await self._live()
            if self._stopping:
                return
            was = self.state
            if was is not states.Engine.LOADING and (self._ending or not self._owner.engine_wanted()):
                await self._hibernated()
                continue
            if was is states.Engine.LOADING:  # reported as the error of the launch
                self.error = self._load_failure(status)
                return
            logger.warning("the engine ended (%s) while %s", status, was.value)
            self._move("died")
            death = self._reason(f"the engine ended with {status}", status)
            busy = self._owner.engine_busy()
            delay: float | None = 0.0
            if not self._owner.engine_lost(death):
                delay = policy.died(trio.current_time(), progress=self._progress, busy=busy)
                if was is states.Engine.RESTARTING and self._fatal and not self._fatal.retriable:
                    delay = None
            if delay is None:
                await self._off(death, policy.pause())
            else:
                self._owner.engine_changed()
                await trio.sleep(delay)
            if not self._owner.engine_wanted():
                await self._hibernated()
                continue
            self.restarts += 1

    def send(self, command: em.Command) -> None:
        """Queues a command. Without an engine the command is dropped: each new engine gets the settings in force."""
        if self._send is None:
            return
        if self._send.statistics().current_buffer_used >= MAX_BACKLOG:
            self.kill("it does not read")
            return
        self._send.send_nowait(command)

    def kill(self, why: str) -> None:
        """Kills the engine. Another one is started.

        :param why: the reason, for the log and the error.
        """
        if self.pid is not None:
            logger.warning("killing the engine: %s", why)
            self._killed_for = why
            system.kill(self.pid)

    async def _hibernated(self) -> None:
        """Waits until the lease needs an engine again."""
        self._move("hibernated")
        self._owner.engine_lost(None)
        self._owner.engine_hibernated()
        self._owner.engine_changed()
        while not self._owner.engine_wanted():
            self._woken = trio.Event()
            await self._woken.wait()
        self._ending = False
        self._move("woken")
        self._owner.engine_woken()
        self._owner.engine_changed()

    async def _off(self, death: FrameshardError, pause_s: float) -> None:
        """Waits until the pause is over. Its first part cannot be cut short; after that :meth:`wake` ends it."""
        logger.warning("the engine is off for %g s: %s", pause_s, death)
        self.error = death
        self._move("gave up")
        self._owner.engine_off(self.off())
        self._owner.engine_changed()
        fixed_s = min(pause_s, WAKE_AFTER * self._config.off_pause_s)
        self._woken = trio.Event()
        await trio.sleep(fixed_s)
        with trio.move_on_after(pause_s - fixed_s):
            await self._woken.wait()
        self.error = None
        self._move("tried again")
        self._owner.engine_woken()
        self._owner.engine_changed()

    def off(self) -> FrameshardError:
        """The error for requests that need an engine while it is off."""
        assert self.error is not None
        message = f"the engine is off and will be tried again: {self.error.message}"
        return EngineDied(message, **{**self.error.detail, "reason": self.error.name})

    def wake(self) -> None:
        """Starts an engine: ends hibernation, or a pause that has lasted long enough."""
        self._woken.set()

    def hibernate(self) -> bool:
        """Ends the engine until :meth:`wake` is called. This end does not count as a death.

        :returns: false if there is no engine already; otherwise :meth:`Owner.engine_hibernated` is called later.
        """
        if self.pid is not None and not self._ending:
            self._ending = True
            self.send(em.Stop())
        return self.state is not states.Engine.HIBERNATED

    async def stop(self) -> None:
        """Ends the engine and :meth:`run`. An engine that still loads is killed at once."""
        self._stopping = True
        if self.state is states.Engine.LOADING and self.pid is not None:
            system.kill(self.pid)
        self.send(em.Stop())
        with trio.move_on_after(STOP_S):
            while self.pid is not None:
                await trio.sleep(0.01)
        self.kill("it does not stop")

    def _move(self, event: str) -> None:
        self.state = states.ENGINE[self.state][event]

    def _reason(self, how: str, status: str) -> FrameshardError:
        """The reason why the last engine ended: the error that it has reported; without one, `how` it ended and the
        last lines of its output.

        :param status: as :meth:`_live` returns it.
        """
        if self._fatal is not None:
            return self._fatal
        if self._killed_for:
            how += f", killed because {self._killed_for}"
        elif status == system.KILLED:
            how += ", killed from outside, perhaps because memory ran out"
        wrote = str(self._words)
        return EngineDied(f"{how}: {wrote}" if wrote else how, last_words=wrote)

    def _load_failure(self, status: str) -> FrameshardError:
        """The reason why the first engine never became ready. Until then it only loads the model, so after a crash the
        file is at fault."""
        model = self._config.model
        if self._fatal is None and status in system.CRASHES:
            wrote = str(self._words)
            how = f"llama.cpp ended with {status} while it loaded {model}"
            return BadModel(f"{how}: {wrote}" if wrote else how, last_words=wrote)
        return self._reason(f"the engine ended while it loaded {model} ({status})", status)

    async def _live(self) -> str:
        """Runs one engine process.

        :returns: how it ended, as :func:`frameshard.system.ending` says it, or that it was not started.
        """
        self._fatal, self._words, self._killed_for = None, LastWords(), ""
        self._silent, self._still, self._ping_open, self._progress = 0, 0, False, False
        self._started_at = trio.current_time()
        try:
            config = self._engine_config()
            process, stream = await system.start_with_stream(self._config.engine, {**os.environ, **ENVIRONMENT})
        except FrameshardError as error:  # the engine cannot be told how to load
            self._fatal = error
            return "no process"
        except OSError as error:  # the system lacks memory, processes or descriptors, perhaps not for long
            self._fatal = EngineDied(f"the engine's process cannot be started: {error.strerror or error}")
            return "no process"
        self.pid = process.pid
        self._send, receive = trio.open_memory_channel[em.Command](math.inf)
        self.send(config)
        assert process.stdout is not None
        async with trio.open_nursery() as listening:
            listening.start_soon(self._words.listen, process.stdout)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream, receive)
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._outlive, process, nursery.cancel_scope)
                    await self._read(stream)
                    nursery.cancel_scope.cancel()
            finally:
                with trio.CancelScope(shield=True):
                    process.kill()
                    await process.wait()
                    self.pid = self._send = None
                    await trio.aclose_forcefully(stream)
            with trio.move_on_after(WORDS_S):
                await self._words.ended.wait()
            listening.cancel_scope.cancel()
        await trio.aclose_forcefully(process.stdout)
        code = process.returncode
        assert code is not None
        return system.ending(code)

    async def _outlive(self, process: trio.Process, reading: trio.CancelScope) -> None:
        await process.wait()
        self.pid = None  # from now on this may be the number of another process
        await end_reading(process, reading)

    async def _write(self, stream: trio.SocketStream, commands: trio.MemoryReceiveChannel[em.Command]) -> None:
        try:
            async for command in commands:
                await stream.send_all(em.pack(command))
        except trio.BrokenResourceError:
            pass  # _read notices the end too

    async def _read(self, stream: trio.SocketStream) -> None:
        reader = channel.Reader()
        try:
            while data := await stream.receive_some(1 << 16):
                for fields in reader.feed(data):
                    self._take(em.read_event(fields))
                self._owner.engine_changed()
        except trio.BrokenResourceError:
            pass
        except (BadMessage, BadArgument) as error:  # BadArgument: a client could not be sent this
            # The engine's memory may be damaged, so none of its events can be used any more.
            logger.error("the engine sends what is no message: %s", error)

    def _take(self, event: em.Event) -> None:
        self._still = 0
        if not isinstance(event, _ASIDE):
            self._silent = 0
        if isinstance(event, em.Pong):
            self._ping_open = False
        elif isinstance(event, em.Ready):
            if "ready" not in states.ENGINE[self.state]:
                raise BadMessage(f"ready from an engine that is {self.state.value}")
            self._move("ready")
            self.load_s = trio.current_time() - self._started_at
            self._owner.engine_ready(event)
        elif isinstance(event, em.Fatal):
            self._fatal = event.error.exception()
            if self.state is not states.Engine.LOADING:
                logger.error("the engine reports: %s", self._fatal)
        elif self._owner.engine_event(event):
            self._progress = True

    async def _watch(self) -> None:
        while True:
            ending = self._ending
            await trio.sleep(WATCH_S)
            if ending:
                self.kill("it does not stop")
                return
            self._silent += 1
            self._still += 1
            if self.state is not states.Engine.READY:
                bound = self._config.hang_load_s
                if not _is_stopped(self.pid):  # before it is ready an engine sends nothing
                    self._still = 0
            else:
                bound = self._config.hang_busy_s if self._owner.engine_works() else self._config.hang_idle_s
                if self._still == 1:
                    self.send(em.AskAlive())
            if self._still * WATCH_S > self._config.hang_still_s:
                self.kill(f"no thread of it has answered for {self._config.hang_still_s:g} s: it is stopped")
                return
            if self._silent * WATCH_S > bound:
                self.kill(f"it has not answered for {bound:g} s")
                return
            if not self._ping_open:
                self._ping_open = True
                self.send(em.Ping(0))


def _is_stopped(pid: int | None) -> bool:
    """Whether a signal such as SIGSTOP has stopped the process; false if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
