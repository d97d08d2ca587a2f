"""``python -m frameshard.http``: a sidecar starts its HTTP server with this program.

It inherits the listening socket. On standard input it gets one line, the content of a connect file, and the end of this
pipe ends it, so it never outlives the sidecar.
"""

from __future__ import annotations

import argparse
import logging
import sys

import trio

from frameshard import system
from frameshard.errors import FrameshardError
from frameshard.http.server import Options, serve
from frameshard.wire import launch


def main() -> int:
    parser = argparse.ArgumentParser(prog="frameshard.http")
    parser.add_argument("--fd", type=int, required=True)
    fd = parser.parse_args().fd
    logging.basicConfig(stream=sys.stderr, format="http: %(levelname)s: %(message)s")
    with open(0, "rb", buffering=0, closefd=False) as pipe:
        info = launch.parse_info(pipe.readline())
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(system.inherited_socket(fd)))
    try:
        trio.run(_serve, info, listener)
    except FrameshardError as error:
        logging.error("%s", error)
        return 2
    return 0


async def _serve(info: launch.ConnectInfo, listener: trio.SocketListener) -> None:
    host = listener.socket.getsockname()[0]
    failure: FrameshardError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_with_sidecar, nursery.cancel_scope)
        try:
            await serve(info, Options(host, 0, info.http_key), listener=listener)
        except FrameshardError as error:  # raised behind the nursery, which would wrap it in an exception group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _end_with_sidecar(scope: trio.CancelScope) -> None:
    await system.pipe_has_ended(0)
    scope.cancel()


if __name__ == "__main__":
    sys.exit(main())
