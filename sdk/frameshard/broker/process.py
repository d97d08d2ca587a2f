"""Runs the sidecar's process: makes its keys, sets its limits, and ends it.

The process ends when the host ends, on a signal, on a client's `shutdown`, or when the first engine fails to load. It
leaves no process, socket or directory behind.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio
import zmq

from frameshard import system
from frameshard.broker import endpoint as places
from frameshard.broker.httpserver import HttpServer
from frameshard.broker.listener import Listener
from frameshard.broker.server import Server
from frameshard.errors import BadArgument, Unsupported
from frameshard.transport import new_number
from frameshard.wire import launch
from frameshard.wire import messages as m
from frameshard.wire.launch import ConnectInfo, ServeConfig

if TYPE_CHECKING:
    from frameshard.broker.remote import Remote  # needs httpx

logger = logging.getLogger("frameshard.broker")

MAX_FILES = 65536
MIN_FILES = 1024
"""The fewest files that the process must be allowed to open. libzmq aborts the process if no descriptor is left. The
sidecar and 32 clients need 70. The rest is for a flood of connections, until the sidecar notices it."""

OOM_SCORE_ADJ = 500

_SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""They ask the sidecar to end."""
if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
    _SIGNALS.append(signal.SIGHUP)


def serve(
    config: ServeConfig,
    *,
    on_ready: Callable[[ConnectInfo, Path], None] | None = None,
    on_loading: Callable[[m.Loading], None] | None = None,
    host_pipe: int | None = None,
) -> int:
    """Runs a sidecar until it is stopped.

    :param on_ready: called once when the model is loaded, with the data for clients to connect and the path of the
        connect file.
    :param on_loading: called with the progress of the first load.
    :param host_pipe: file descriptor whose end of file shows that the host has ended. None: only a signal or a client
        ends the sidecar.
    :returns: the number of the signal that ended it, else 0.
    :raises ModelNotFound: the file does not exist or cannot be read.
    :raises BadModel: the model cannot be served.
    :raises UnknownDevice: there is no such device.
    :raises BudgetBelowFloor: the model cannot run in the budget.
    :raises EndpointInUse: another sidecar has the endpoint.
    :raises BadArgument: options contradict each other, or a file or a socket cannot be made.
    :raises Unsupported: models of this kind cannot be served, or this process may open too few files.
    :raises EngineDied: the engine died while it loaded the model. Later deaths are not raised: clients get an event.
    """
    _prepare_process()
    remote = _open_remote(config) if config.fallback else None
    with ExitStack() as stack:
        signals = stack.enter_context(_noted_signals())
        directory, wanted = stack.enter_context(places.claim(config.transport, config.endpoint))
        connect_files = [directory / places.CONNECT_FILE]  # where `endpoint.running` finds it
        if config.connect_file:
            connect_files.append(Path(config.connect_file))
        publish = [stack.enter_context(places.connect_file(path)) for path in connect_files]
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        epoch = new_number()
        server = Server(config, epoch, directory, remote=remote, on_loading=on_loading)
        http = HttpServer(config, server.http_ended) if config.http else None
        if http is not None:
            stack.callback(http.close)
        listener = Listener(wanted, server_secret, client_public)
        info = ConnectInfo(
            protocol=m.VERSION,
            endpoint=listener.endpoint,
            epoch=epoch,
            pid=os.getpid(),
            server_key=server_public.decode(),
            client_key=client_public.decode(),
            client_secret=client_secret.decode(),
            http_url=http.url if http else "",
            http_key=http.key if http else "",
        )
        serving = trio.Event()

        def announce() -> None:
            for each in publish:
                each(launch.info_line(info))
            serving.set()
            if on_ready is not None:
                on_ready(info, connect_files[-1])

        try:
            run_http = partial(http.run, info, serving) if http else None
            trio.run(_serve, server, listener, announce, host_pipe, run_http, signals)
        finally:
            listener.close()
    if server.error is not None:
        raise server.error
    return signals[0] if signals else 0


def _open_remote(config: ServeConfig) -> Remote:
    """
    :raises BadArgument: a package is not installed, or the server's key cannot be read.
    """
    for package in ("httpx", "jsonschema"):
        if importlib.util.find_spec(package) is None:
            raise BadArgument(
                f"fallback: this needs {package}: pip install 'frameshard[fallback]'; "
                "for a bundle: frameshard bundle --with fallback",
                field="fallback",
            )
    from frameshard.broker.remote import open_remote

    return open_remote(config)


async def _serve(
    server: Server,
    listener: Listener,
    announce: Callable[[], None],
    host_pipe: int | None,
    run_http: Callable[[], Awaitable[None]] | None,
    signals: list[int],
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.run, server)
        nursery.start_soon(_watch_signals, server, signals)
        if host_pipe is not None:
            nursery.start_soon(_watch_host, host_pipe, nursery.cancel_scope)
        if run_http is not None:
            nursery.start_soon(run_http)
        await server.run(announce)
        nursery.cancel_scope.cancel()


def _prepare_process() -> None:
    """Raises the limit on open files, and makes the kernel kill this process before the game when memory runs out.

    :raises Unsupported: the hard limit on open files is too low.
    """
    try:
        system.end_children_with_this_process()
    except OSError as error:
        logger.warning("if the sidecar is killed, its engine may go on: %s", error)
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < MIN_FILES:
        raise Unsupported(
            f"the sidecar may have {wanted} files open and needs {MIN_FILES}: raise the hard limit (ulimit -Hn)",
            files=wanted,
            needed=MIN_FILES,
        )
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yields a list of the signals that came. In the block they do not end the process, which has files to remove."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: noted.append(number)) for number in _SIGNALS}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _watch_signals(server: Server, noted: list[int]) -> None:
    """Stops the server at a signal, also at one that was noted before."""
    with trio.open_signal_receiver(*_SIGNALS) as signals:
        if noted:
            server.stop()
        async for number in signals:
            noted.append(number)
            server.stop()


async def _watch_host(pipe: int, scope: trio.CancelScope) -> None:
    """Ends the sidecar at once when the host has ended.

    The pipe's end of file shows that. If another child of the host has inherited the pipe, a new parent process shows
    it. A parent-death signal is not used, because it already comes when the thread that launched us ends.
    """

    async def watch_parent() -> None:
        await system.parent_has_ended()
        scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_parent)
        await system.pipe_has_ended(pipe)
        scope.cancel()
