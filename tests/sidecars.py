"""Shared by the tests of broker and client: deadlines, peers that can break the protocol, and checks of processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
import zmq

import frameshard
from frameshard import errors
from frameshard.broker import endpoint
from frameshard.testing import fake_engine
from frameshard.transport import Socket, configure
from frameshard.wire import codec
from frameshard.wire import messages as m

DEADLINE_S = 180.0
"""Ends a test that hangs. It is long, so that no result depends on the speed of the machine."""

PATIENT = {"hang_still_s": 60.0, "hang_idle_s": 60.0}
"""Options of launches: an engine that the machine pauses for seconds is not replaced. Many tests count the restarts."""

WORDS = " ".join(f"word{index}" for index in range(200))
GREEDY = frameshard.Sampling(max_tokens=100_000, temperature=0.0)


def in_trio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an asynchronous test for at most :data:`DEADLINE_S`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def main() -> None:
            with trio.fail_after(DEADLINE_S):
                await test(**fixtures)

        trio.run(main)

    return run


def in_both(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Like :func:`in_trio`, once in trio and once in asyncio. The test waits with anyio."""

    @pytest.mark.parametrize("library", ["trio", "asyncio"])
    @functools.wraps(test)
    def run(library: str, **fixtures: Any) -> None:
        async def main() -> None:
            with anyio.fail_after(DEADLINE_S):
                await test(**fixtures)

        anyio.run(main, backend=library)

    signature = inspect.signature(test)
    library = inspect.Parameter("library", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), library])  # type: ignore[attr-defined]
    return run


def launch(**options: Any) -> frameshard.ClientScope:
    """Launches a sidecar with the fake engine."""
    options = {"engine": fake_engine(), **PATIENT, **options}
    return frameshard.launch("no model", **options)


async def until(condition: Callable[[], bool]) -> None:
    """Polls until the condition is true."""
    with trio.fail_after(DEADLINE_S):
        while not condition():
            await trio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process is running. A zombie is not."""
    if sys.platform == "win32":
        return not _ends_within(pid, 0)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The child processes that were not waited for."""
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            lists = Path(f"/proc/{pid}/task").glob("*/children")
            return [int(child) for tasks in lists for child in tasks.read_text().split()]


def gone_after(pids: list[int], timeout_s: float = 60.0) -> float:
    """Waits until all processes have ended. Fails after `timeout_s`.

    :returns: the seconds that it took.
    """
    started = time.monotonic()
    for pid in pids:
        if sys.platform == "win32":
            assert _ends_within(pid, max(0.0, started + timeout_s - time.monotonic())), pid
            continue
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                ended, _, _ = select.select([fd], [], [], max(0.0, started + timeout_s - time.monotonic()))
            finally:
                os.close(fd)
            assert ended, [pid for pid in pids if alive(pid)]
    return time.monotonic() - started


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a process has ended, or ends in so many seconds. For Windows."""
    import _winapi

    try:
        process = _winapi.OpenProcess(0x00100000, False, pid)  # SYNCHRONIZE
    except OSError:
        return True
    try:
        return _winapi.WaitForSingleObject(process, int(1000 * seconds)) == 0
    finally:
        _winapi.CloseHandle(process)


async def until_ready(client: frameshard.Client, restarts: int = 0) -> None:
    """Waits until an engine is ready, after so many restarts. A job may end just before its engine is killed: then the
    end of the job does not show that the next engine runs."""
    with trio.fail_after(DEADLINE_S):
        while (broker := (await client.stats()).broker).engine != "ready" or broker.engine_restarts < restarts:
            await trio.sleep(0.01)


async def until_lost(client: frameshard.Client) -> None:
    """Waits until the client has noticed the end of its sidecar."""
    with anyio.fail_after(DEADLINE_S), contextlib.suppress(errors.ConnectionLost):
        while True:
            await client.stats()


def directory_of(info: frameshard.ConnectInfo) -> Path:
    """The directory of the sidecar's launch."""
    if info.endpoint.startswith("tcp:"):
        files = [file for file in endpoint.running() if json.loads(file.read_bytes())["epoch"] == info.epoch]
        return files[0].parent
    return Path(info.endpoint.removeprefix("ipc://")).parent


@contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a process. If the block fails, the process is killed: the end of a block of Popen would wait for it."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def host(script: str, *args: str) -> subprocess.Popen[str]:
    """Starts a process that runs `script`; its output can be read."""
    return subprocess.Popen([sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True)


def freeze(pid: int) -> None:
    if sys.platform == "win32":
        _tell_windows(pid, "NtSuspendProcess")
    else:
        os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    if sys.platform == "win32":
        _tell_windows(pid, "NtResumeProcess")
    else:
        os.kill(pid, signal.SIGCONT)


def _tell_windows(pid: int, call: str) -> None:
    import _winapi
    import ctypes

    try:
        process = _winapi.OpenProcess(0x0800, False, pid)  # PROCESS_SUSPEND_RESUME
    except OSError as error:
        raise ProcessLookupError(f"no process {pid}") from error
    try:
        status = getattr(ctypes.WinDLL("ntdll"), call)(ctypes.c_void_p(process))
        assert status == 0, hex(status & 0xFFFFFFFF)
    finally:
        _winapi.CloseHandle(process)


class RawPeer:
    """A connection that sends any frames, also wrong ones."""

    def __init__(self, socket: Socket, epoch: int) -> None:
        self.socket = socket
        self.epoch = epoch

    async def send(self, *parts: bytes) -> None:
        while not self.socket.try_send(list(parts)):
            await trio.sleep(0.01)

    async def say(self, message: m.Request) -> None:
        await self.send(m.encode(message))

    async def hear(self) -> Any:
        (frame,) = await self.socket.receive()
        return m.decode_answer(frame)

    async def hear_of(self, request_id: int) -> Any:
        """The answer to a request. Messages before it are dropped."""
        while True:
            answer = await self.hear()
            if getattr(answer, "id", None) == request_id:
                return answer

    async def greet(self, **fields: Any) -> Any:
        await self.say(m.Hello(1, m.VERSION, "raw", **fields))
        return await self.hear()

    async def tell(self, fields: dict[str, Any]) -> Any:
        """Sends any map and returns the next message."""
        await self.send(codec.encode(fields))
        return await self.hear()


@asynccontextmanager
async def raw_peer(info: frameshard.ConnectInfo, *, keys: tuple[bytes, bytes] | None = None) -> AsyncIterator[RawPeer]:
    """A peer with the keys of the launch, or with `keys`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    configure(dealer, linger_ms=0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, -1)
    public, secret = keys or (info.client_key.encode(), info.client_secret.encode())
    dealer.setsockopt(zmq.CURVE_SERVERKEY, info.server_key.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
    dealer.connect(info.endpoint)
    try:
        yield RawPeer(Socket(dealer), info.epoch)
    finally:
        context.destroy(linger=0)
