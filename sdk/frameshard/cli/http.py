"""``frameshard http``: OpenAI's HTTP interface in front of a running sidecar."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from frameshard.cli import interrupt


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "http",
        help="OpenAI's HTTP interface in front of a running sidecar",
        description="Serves OpenAI's HTTP interface until Ctrl-C, SIGTERM or the end of the sidecar. Needs "
        "frameshard[http]. Prints one line of JSON when it is ready: the base URL, and the key or the file with it. "
        "See docs/http.md.",
    )
    parser.add_argument(
        "--connect",
        metavar="FILE",
        help="the sidecar's connect file (default: that of the only running sidecar)",
    )
    parser.add_argument(
        "--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="where to listen (127.0.0.1 and a free port)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--key-file", metavar="FILE", help="read the key from FILE, or write a new one there (print a new one)"
    )
    keys.add_argument("--no-key", action="store_true", help="ask for no key; on loopback addresses only")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="also answer to this name in the header Host"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="web pages of this origin may ask (none)"
    )
    parser.add_argument("--json", action="store_true", help="print errors as JSON on stdout, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from frameshard.broker import httpserver
    from frameshard.cli.top import only_one
    from frameshard.wire.launch import address_of

    httpserver.check_installed()
    from frameshard.http import server

    host, port = address_of(args.bind, "bind")
    key = None if args.no_key else server.key_in(Path(args.key_file)) if args.key_file else server.new_key()
    options = server.Options(host, port, key, tuple(args.allow_host), tuple(args.allow_origin))
    target = args.connect or only_one()

    def ready(url: str) -> None:
        shown = {"key_file": str(Path(args.key_file).absolute())} if args.key_file else {"key": key}
        sys.stdout.write(json.dumps({"url": url, **shown, "pid": os.getpid()}) + "\n")
        sys.stdout.flush()

    interrupt.run_async(lambda: server.serve(target, options, on_ready=ready))
    return 0
