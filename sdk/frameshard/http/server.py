"""Runs the process: connects to the sidecar, listens, and ends with the sidecar or by a signal."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from frameshard import system
from frameshard.client import connect
from frameshard.errors import BadArgument, ConnectionLost
from frameshard.http.app import make_app
from frameshard.http.guard import LOOPBACK, Access
from frameshard.http.listener import Listener, open_listener
from frameshard.wire.launch import ConnectInfo, check_http_key

LAST_WORDS_S = 1.0
"""For so long after the end of the sidecar all requests are refused with 503, so that clients learn of it."""

DEFAULT_PORTS = (("http", "80"), ("https", "443"))
_NAME = r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])"
_HOST = re.compile(_NAME)
_ORIGIN = re.compile(rf"null|(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://{_NAME}(?::(?P<port>[0-9]+))?/?")


@dataclass(frozen=True)
class Options:
    """How the server runs.

    :param host: an IP address to listen on.
    :param port: 0: a free one.
    :param key: the bearer key; None: none is asked for.
    :param hosts: further names that the header Host may have, without a port.
    :param origins: origins of web pages that may ask, such as ``http://localhost:3000``.
    :raises BadArgument: one of them cannot be what a client or a browser sends.
    """

    host: str
    port: int
    key: str | None
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key is None and not ipaddress.ip_address(self.host).is_loopback:
            raise BadArgument("without a key the server listens on loopback addresses only", field="bind")
        object.__setattr__(self, "hosts", tuple(map(_host, self.hosts)))
        object.__setattr__(self, "origins", tuple(map(_origin, self.origins)))


def _host(name: str) -> str:
    """A name as :func:`frameshard.http.guard.refused` looks for it."""
    if not _HOST.fullmatch(name):
        raise BadArgument(
            f"the host {name!r} is no host name or address, such as game.example or [::1], without a port",
            field="allow_host",
        )
    return name.lower()


def _origin(origin: str) -> str:
    """An origin as browsers send it: in small letters, without a slash at its end."""
    found = _ORIGIN.fullmatch(origin)
    if found is None or (str(found["scheme"]).lower(), found["port"]) in DEFAULT_PORTS:
        raise BadArgument(
            f"the origin {origin!r} is none that a browser sends, such as http://localhost:3000: it has a scheme and a"
            " host, and a port unless that is the scheme's own",
            field="allow_origin",
        )
    return origin.lower().rstrip("/")


async def serve(
    sidecar: str | os.PathLike[str] | ConnectInfo,
    options: Options,
    *,
    on_ready: Callable[[str], None] | None = None,
    listener: trio.SocketListener | None = None,
) -> None:
    """Serves until SIGTERM.

    :param sidecar: the connect file of the running sidecar, or its content.
    :param on_ready: called with the base URL when requests are answered.
    :param listener: is listened on instead of the address in `options`.
    :raises ConnectionLost: there is no sidecar, or it has ended.
    :raises BadArgument: the address cannot be listened on.
    """
    lost = False
    async with connect(sidecar, name="http") as client:
        changes = client.engine_changes()
        model = await client.model_info()
        address = f"[{options.host}]" if ":" in options.host else options.host
        access = Access(options.key, (*LOOPBACK, address, *options.hosts), options.origins)
        socket = listener or await open_listener(options.host, options.port)
        server = Listener(socket, make_app(client, model, access, lambda: server.connections))
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                nursery.start_soon(_cancel_at_signal, signals, nursery.cancel_scope)
                if on_ready is not None:
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
            if why := system.why_not_secret(path):
                raise BadArgument(f"the key file {path} {why}", field="key_file") from None
            key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"the key file {path} cannot be used: {error}", field="key_file") from None
    check_http_key(key, "key_file")
    return key


def new_key() -> str:
    return secrets.token_urlsafe(32)
