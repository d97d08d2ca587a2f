"""A real engine process on a socket pair, for tests that take the broker's place.

Messages are plain maps, as on the stream (frameshard.wire.engine).
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from forks import Fd, Fork
from frameshard.engine import process
from frameshard.wire import channel

PATIENCE_S = 300.0
ENDS = ("done", "failed", "cancelled")
Event = dict[str, Any]
MEMORIES = ("llama", "qwen3moe", "gemma3", "gemma4", "deepseek4", "mamba2", "kimi-linear")
"""A model of :data:`tiny_models.ARCHS` for each kind of memory: a plain KV cache, that of experts, a sliding window,
layers that share the KV cache of others, two KV caches, recurrent states, and layers of these beside a latent KV
cache."""


def _engine(fd: int) -> None:
    process.main(["--fd", str(fd)])


class EngineProcess:
    """An engine process. Every wait has a deadline, after which the test fails.

    :param faults: the fault script of the emulated device.
    :param program: Python's options for the program, if it is not the engine itself; the engine is a fork.
    :param log: where its messages go, if not to those of the test.
    """

    def __init__(self, faults: str = "", program: Sequence[str] = (), log: IO[bytes] | None = None) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "FRAMESHARD_FAULTS": faults}
        self.process: Fork | subprocess.Popen[bytes]
        with theirs:
            if program:
                command = [sys.executable, *program, "--fd", str(theirs.fileno())]
                self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stderr=log)
            else:
                self.process = Fork(_engine, Fd(theirs.fileno()), environment=environment, stderr=log)
        self.socket = ours
        self._reader = channel.Reader()
        self._events: list[Event] = []
        self._dropped_ends: dict[int, Event] = {}
        self._held: bytearray | None = None
        self._numbers = itertools.count(1)

    def send(self, **message: object) -> None:
        packed = channel.pack(message)
        if self._held is None:
            self.socket.sendall(packed)
        else:
            self._held += packed

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Sends all messages of the block in one piece: the engine reads them one right after the other."""
        self._held = packed = bytearray()
        try:
            yield
        finally:
            self._held = None
        self.socket.sendall(packed)

    def next_event(self, *, seconds: float = PATIENCE_S) -> Event:
        """The next event. Skips figures of the device's memory and first answers to a budget.

        :raises EOFError: the engine has closed the stream.
        """
        deadline = time.monotonic() + seconds
        while not self._events:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            events = self._reader.feed(data)
            self._events += [event for event in events if event["ev"] not in ("watch", "granted")]
        return self._events.pop(0)

    def wait_for(self, *names: str, job: int | None = None, seconds: float = PATIENCE_S) -> Event:
        """The next event with one of these names, and of this job if there is one. Events before it are dropped."""
        deadline = time.monotonic() + seconds
        while True:
            event = self.next_event(seconds=deadline - time.monotonic())
            if event["ev"] in names and job in (None, event.get("job")):
                return event
            self._drop(event)

    def _drop(self, event: Event) -> None:
        if event["ev"] in ENDS:
            self._dropped_ends[event["job"]] = event

    def load(self, model: Path, **fields: object) -> Event:
        """Loads a model; returns the "ready" or "fatal" event."""
        self.send(op="load", model=str(model), **fields)
        return self.wait_for("ready", "fatal")

    def submit(self, prompt: str | Sequence[dict[str, str]], **fields: Any) -> int:
        """Submits a completion (a string) or a chat (messages), by default with greedy sampling.

        :returns: the number of the job.
        """
        job = next(self._numbers)
        params = {"temperature": 0.0, "max_tokens": 24, **fields.pop("params", {})}
        kind, field = ("completion", "prompt") if isinstance(prompt, str) else ("chat", "messages")
        self.send(op="submit", job=job, kind=kind, sampling=params, **{field: prompt}, **fields)
        return job

    def finish(self, *jobs: int) -> dict[int, list[Event]]:
        """All further events of these jobs, until the last of them has ended. Events of other jobs are dropped.

        A job whose end was dropped before has that end only.
        """
        events = {job: [self._dropped_ends.pop(job)] if job in self._dropped_ends else [] for job in jobs}
        open_jobs = {job for job in jobs if not events[job]}
        while open_jobs:
            event = self.next_event()
            assert event["ev"] != "fatal", event
            if event.get("job") in open_jobs:
                events[event["job"]].append(event)
                if event["ev"] in ENDS:
                    open_jobs.discard(event["job"])
            else:
                self._drop(event)
        return events

    def until(self, job: int, name: str) -> tuple[list[Event], Event]:
        """The further events of a job until it has ended, and the first event with this name, whichever comes first."""
        events: list[Event] = []
        named: Event | None = None
        while named is None or not events or events[-1]["ev"] not in ENDS:
            event = self.next_event()
            if event["ev"] == name:
                named = named or event
            elif event.get("job") == job:
                events.append(event)
        return events, named

    def run(self, prompt: str | Sequence[dict[str, str]], **fields: Any) -> list[Event]:
        """Submits one job and returns its events."""
        job = self.submit(prompt, **fields)
        return self.finish(job)[job]

    def stats(self) -> Event:
        """The engine's present statistics. Events before them stay, to be read later."""
        seq = next(self._numbers)
        self.send(op="stats", seq=seq)
        before = []
        while (event := self.next_event())["ev"] != "stats":
            before.append(event)
        self._events = before + self._events
        stats: Event = event["stats"]
        return stats

    def budget(self, n_bytes: int, timeout_s: float = 10.0, *, parked: bool = False, host_bytes: int = 0) -> int:
        """Asks for budgets for VRAM and host memory in bytes; returns the number of the request."""
        seq = next(self._numbers)
        asked = {"vram_budget_bytes": n_bytes, "host_budget_bytes": host_bytes}
        self.send(op="budget", seq=seq, timeout_s=timeout_s, parked=parked, **asked)
        return seq

    @contextmanager
    def slowly(self, tokens_per_second: float = 5.0) -> Iterator[None]:
        """Generates no faster than this inside the block, so that a job runs for as long as the test needs it. The text
        stays as it is."""
        self.send(op="pacing", scheduling_mode="balance", target_tokens_per_second=tokens_per_second)
        try:
            yield
        finally:
            self.send(op="pacing", scheduling_mode="balance", target_tokens_per_second=0.0)

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()


@contextmanager
def engine(model: Path, **fields: object) -> Iterator[EngineProcess]:
    """A loaded engine with settings that make tests quick."""
    child = EngineProcess()
    try:
        ready = child.load(model, **{"device": "cpu", "n_ctx": 512, "n_parallel": 4, "n_threads": 1, **fields})
        assert ready["ev"] == "ready", ready
        yield child
    finally:
        child.close()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def text(events: Sequence[Event]) -> str:
    return "".join(event["text"] for event in events if event["ev"] == "token")


def ids(events: Sequence[Event]) -> list[int]:
    return [event["id"] for event in events if event["ev"] == "token"]
