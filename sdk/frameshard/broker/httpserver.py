"""Runs the HTTP server (:mod:`frameshard.http`) of a sidecar as a process of its own.

The socket is bound here, before the model is loaded: an address that is in use is an error of the launch, and the port
stays the same when the process is started again. Clients that connect while no process runs wait in the socket's queue.
The process is an ordinary client of the sidecar. If it ends, the sidecar goes on and starts it again, after a pause
that grows, because what has ended it may end it again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable
from subprocess import PIPE

import trio

from frameshard import program, system
from frameshard.broker.lastwords import LastWords
from frameshard.errors import BadArgument
from frameshard.wire import launch

logger = logging.getLogger("frameshard.broker")

PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
WELL_S = 60.0
"""If a process has run for at least this many seconds, the next pause is `PAUSE_S` again."""

END_S = 1.0
"""Seconds that the process has for its end. After that it is killed."""

WORDS_S = 1.0
"""Seconds to read the last output of a dead process."""

BACKLOG = 128


class HttpServer:
    """
    :param config: `http` is set.
    :param on_end: called when the process has ended, with the reason and the seconds until it is started again.
    :raises BadArgument: packages are missing, or the address cannot be listened on.
    """

    def __init__(self, config: launch.ServeConfig, on_end: Callable[[str, float], None]) -> None:
        check_installed()
        host, port = launch.address_of(config.http, "http")
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise BadArgument(f"cannot listen on {config.http}: {error.strerror}", field="http") from None
        self._on_end = on_end
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/v1"
        self.key = config.http_key or secrets.token_urlsafe(32)

    def close(self) -> None:
        self._socket.close()

    async def run(self, info: launch.ConnectInfo, serving: trio.Event) -> None:
        """Keeps a process running until this is cancelled.

        :param info: of the sidecar.
        :param serving: set when the sidecar serves.
        """
        await serving.wait()
        pause_s = PAUSE_S
        while True:
            begun = trio.current_time()
            why = await self._live(info)
            if trio.current_time() - begun >= WELL_S:
                pause_s = PAUSE_S
            logger.warning("the HTTP server has ended, and is started again in %g s: %s", pause_s, why)
            self._on_end(why, pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _live(self, info: launch.ConnectInfo) -> str:
        """Runs one process.

        :returns: how it ended, and its last lines.
        """
        try:
            process = await system.start(program.command("frameshard.http"), self._socket, stdin=PIPE)
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        assert process.stdin is not None
        assert process.stdout is not None
        words = LastWords()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(words.listen, process.stdout)
                with contextlib.suppress(trio.BrokenResourceError):
                    await process.stdin.send_all(launch.info_line(info))
                await process.wait()
                with trio.move_on_after(WORDS_S):
                    await words.ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await process.stdin.aclose()  # this ends the process
                with trio.move_on_after(END_S):
                    await process.wait()
                process.kill()
                await process.wait()
                await trio.aclose_forcefully(process.stdout)
        how = system.ending(process.returncode or 0)
        return f"{how}: {words}" if str(words) else how


def check_installed() -> None:
    """Checks that Starlette and Hypercorn are installed.

    :raises BadArgument: they are not.
    """
    if not all(map(importlib.util.find_spec, ("hypercorn", "starlette"))):
        raise BadArgument(
            "the HTTP interface needs Starlette and Hypercorn: pip install 'frameshard[http]'; "
            "for a bundle: frameshard bundle --with http",
            field="http",
        )
