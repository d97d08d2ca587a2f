"""``python -m frameshard.broker``: a host starts a sidecar with this program. See bindings/PROTOCOL.md, "Starting a
sidecar".

The host writes one line of JSON to standard input and keeps it open. The program writes one line of JSON to standard
output, and before it lines with the progress of the load if the host asks for them. The arguments have no keys and no
path of a model, because every user of the machine can read them. The exit code is 0 after an orderly end, and 3 after
an error, which the line names.

With ``--log-fd N`` the log goes to that inherited descriptor. A host can then pass a pipe as standard error, to read
why Python did not start or what it could not import. This program closes the pipe when it begins, so the host need not
read it later.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

from frameshard import system
from frameshard.broker import log
from frameshard.broker.process import serve
from frameshard.errors import BadArgument, FrameshardError, internal
from frameshard.wire import launch, messages

MAX_LINE = 1 << 20
"""Bytes of the line of JSON. 16 adapters with the longest paths take a fifth of it if each character is escaped."""

EXIT_ERROR = 3


logger = logging.getLogger("frameshard.broker")


def main() -> int:
    parser = argparse.ArgumentParser(prog="frameshard.broker")
    parser.add_argument("--log-fd", type=int)
    log_fd: int | None = parser.parse_args().log_fd
    if log_fd is not None:
        file = system.inherited_file(log_fd)
        os.dup2(file, 2)
        os.close(file)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="sidecar: %(levelname)s: %(message)s")
    log.install()
    # Standard output is replaced, so that libraries cannot write to it and only the one line goes there.
    out = os.dup(1)
    os.dup2(2, 1)

    def say(line: bytes) -> None:
        nonlocal out
        if out >= 0:
            with contextlib.suppress(OSError):  # the host has ended; _watch_host notices that, too
                os.write(out, line)
                os.close(out)
            out = -1

    def loading(progress: messages.Loading) -> None:
        if config.loading == "on" and out >= 0:
            with contextlib.suppress(OSError):
                os.write(out, launch.loading_line(progress))

    def ready(info: launch.ConnectInfo, _: Path) -> None:
        say(launch.ready_line(info))

    try:
        config = launch.parse_config(_read_line(0))
        serve(config, on_ready=ready, on_loading=loading, host_pipe=0)
    except FrameshardError as error:
        say(launch.error_line(error))
        return EXIT_ERROR
    except Exception as defect:
        say(launch.error_line(internal(logger, "the sidecar", defect)))
        return EXIT_ERROR
    return 0


def _read_line(fd: int) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) >= MAX_LINE:
            raise BadArgument(f"the line of JSON on standard input is longer than {MAX_LINE} bytes: shorten options")
        # One byte at a time, so that nothing after the line is read: _watch_host reads the rest of this pipe.
        byte = os.read(fd, 1)
        if not byte:
            raise BadArgument("standard input must begin with one line of JSON")
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
