"""Runs the process: connects to the sidecar, listens, and ends with the sidecar or by a signal."""

from __future__ import annotations

import ipaddress
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from frameshard.client import connect
from frameshard.errors import BadArgument, ConnectionLost
from frameshard.http.app import make_app
from frameshard.http.guard import LOOPBACK, Access
from frameshard.http.listener import Listener, open_listener

LAST_WORDS_S = 1.0
"""For so long after the end of the sidecar all requests are refused with 503, so that clients learn of it."""


@dataclass(frozen=True)
class Options:
    """How the server runs.

    :param host: an IP address to listen on.
    :param port: 0: a free one.
    :param key: the bearer key; None: none is asked for.
    :param hosts: further names that the header Host may have.
    :param origins: origins of web pages that may ask.
    """

    host: str
    port: int
    key: str | None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key is None and not ipaddress.ip_address(self.host).is_loopback:
            raise BadArgument("without a key the server listens on loopback addresses only", field="bind")


async def serve(connect_file: str | os.PathLike[str], options: Options, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM.

    :param connect_file: of the running sidecar.
    :param on_ready: called with the base URL when requests are answered.
    :raises ConnectionLost: there is no sidecar, or it has ended.
    :raises BadArgument: the address cannot be listened on.
    """
    lost = False
    async with connect(connect_file, name="http") as client:
        changes = client.engine_changes()
        model = await client.model_info()
        address = f"[{options.host}]" if ":" in options.host else options.host
        access = Access(options.key, (*LOOPBACK, address, *map(str.lower, options.hosts)), options.origins)
        socket = await open_listener(options.host, options.port)
        listener = Listener(socket, make_app(client, model, access, lambda: listener.connections))
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listener.run)
                nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
                on_ready(f"http://{address}:{socket.socket.getsockname()[1]}/v1")
                async for _ in changes:  # ends with the connection to the sidecar
                    pass
                await trio.sleep(LAST_WORDS_S)
                lost = True
                nursery.cancel_scope.cancel()
    if lost:
        raise ConnectionLost("the sidecar has ended or does not answer any more, so the HTTP server ends too")


async def _cancel_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. The host is an IP address (IPv6 in brackets) or ``localhost``.

    :raises BadArgument: it is anything else.
    """
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError
        return str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))), int(port)
    except ValueError:
        raise BadArgument(
            f"{text!r} is not an address: 127.0.0.1:8080, or port 0 for a free one", field="bind"
        ) from None


def key_in(path: Path) -> str:
    """The key in a file, which only this user may read. If there is no file, it is written with a new key.

    :raises BadArgument: others may read the file, or it cannot be read or written, or is empty.
    """
    try:
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                key = new_key()
                file.write(f"{key}\n")
            return key
        except FileExistsError:
            if os.name == "posix" and path.stat().st_mode & 0o077:
                raise BadArgument(f"others may read the key in {path}: chmod 600 {path}", field="key_file") from None
            key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"the key file {path} cannot be used: {error}", field="key_file") from None
    if not key or not key.isascii() or any(map(str.isspace, key)):
        raise BadArgument(f"the key file {path} has no key: one line of printable ASCII", field="key_file")
    return key


def new_key() -> str:
    return secrets.token_urlsafe(32)
