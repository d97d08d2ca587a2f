"""The ``frameshard`` command.

Each subcommand is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of
the called command is imported. So ``frameshard --help`` answers at once, and a command without a GPU loads no GPU
library.

Exit status: 0 if the command succeeded, 1 if its check failed, 2 after an error (with ``--json`` there is also
``{"error": ...}`` on stdout), 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from frameshard.cli import interrupt
from frameshard.cli.common import emit_json
from frameshard.errors import BadArgument, FrameshardError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS = {
    "chat": "talk to a model in the terminal and change its VRAM while it answers",
    "serve": "run the sidecar that games connect to",
    "http": "OpenAI's HTTP interface in front of a running sidecar",
    "top": "watch a running sidecar: lease, shards, ring, tokens, jobs, frames",
    "models": "fetch models, and list those at hand",
    "plan": "what fits into a VRAM budget and how fast it would run, without loading anything",
    "profile": "measure this machine's rates, which plans are made from",
    "bench": "measured speed at each budget, beside the prediction and the physical bound",
    "simulate": "replay a game's frames and VRAM demand against a real sidecar",
    "bundle": "lay out what a game ships: the sidecar with all it needs, licences, model hashes",
    "doctor": "what this machine has, and what frameshard can use of it, for bug reports",
    "verify": "prove that answers stay right at each budget and across a change in mid-answer",
}

IN_PROCESS = ("plan", "profile", "bench", "verify")
"""Commands that run native code in this process. During native code Python cannot react to Ctrl-C."""

DESCRIPTION = """\
frameshard runs a language model beside a game on one GPU and hands VRAM back to
the game while the model talks.
"""

EPILOG = """\
start here:
  frameshard chat --model smollm2-135m
      talk to a model of 94 MiB, which is fetched on first use
  frameshard chat --model smollm2-135m --device emulated --vram-budget 128
      the same on an emulated card of 128 MiB: no GPU needed
  frameshard plan --model my.gguf --vram-budget 2GiB,4GiB
      what would fit, and how fast it would be
  frameshard serve --model my.gguf --vram-budget 4GiB
      the process that a game talks to

--model     a GGUF file, or a name that `frameshard models list` knows
--device    auto (best GPU, else the CPU), cpu, emulated, or a name that
            llama.cpp gives, such as CUDA0 or Vulkan0
budgets     in MiB, or with a unit: 512, 1.5GiB, 800MB
--json      one JSON document on stdout; messages go to stderr
Ctrl-C      ends a command at once, with exit status 130; in `chat` it ends the
            answer that comes, if there is one

`frameshard COMMAND --help` explains one command.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our errors, so that ``--json`` works for them too. It takes options by their whole
    names only, of which ``--json`` is one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        (file or sys.stdout).write(self.format_help())  # argparse's own ignores that it cannot be written

    def error(self, message: str) -> NoReturn:
        raise BadArgument(f"{message} (see {self.prog} --help)")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser for all commands. Only `command` has its options; the others have a line of help."""
    parser = Parser(
        prog="frameshard",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions in use and exit")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        if name == command:
            importlib.import_module(f"frameshard.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def versions() -> str:
    from importlib import metadata  # takes as long as all else that is imported here

    found = dict.fromkeys(("frameshard", "llama-cpp-python"), "not installed")  # as in a source tree
    for name in found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return "\n".join(f"{name} {version}" for name, version in found.items())


def _print_any_text() -> None:
    """Lets stdout take text that its encoding does not have, such as that of a model on a code page of Windows. Names
    of files that are not UTF-8 go through a UTF-8 stdout as they are. Python prints any text to stderr by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


def _open_missing_streams() -> None:
    """Opens the null device for each standard stream that is closed, as by a shell's ``>&-`` or for ``pythonw.exe``.
    Else its number would go to the next file that is opened, and ``sys.stdout`` would be None."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                null = os.open(os.devnull, os.O_RDWR)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
                os.set_inheritable(number, True)  # for child processes, as any standard stream
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to a file that is open. Those of the files that a command itself writes are typed."""


def _discard_output() -> None:
    """What is left in the buffer goes nowhere. Else Python's flush at exit would fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        _open_missing_streams()
        _print_any_text()
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C during the exit would print a traceback
        return interrupt.STATUS
    except BrokenPipeError:  # the reader of our output has ended, as in "frameshard plan ... | head"
        _discard_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _discard_output()
        with contextlib.suppress(OSError):  # it may be the same file
            print(f"frameshard: cannot write the output: {error.strerror}", file=sys.stderr)
        return 2


def _run(argv: list[str]) -> int:
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        parser = build_parser(command)
        args = parser.parse_args(argv)
        if args.version:
            print(versions())
            return 0
        if args.command is None:
            parser.print_help()
            return 0
        with interrupt.prompt() if args.command in IN_PROCESS else contextlib.nullcontext():
            return int(args.run(args))
    except SystemExit as ended:  # of --help, whose text is not flushed yet
        return int(ended.code or 0)
    except FrameshardError as error:
        print(f"frameshard: {error.message}", file=sys.stderr)
        if "--json" in argv:
            emit_json({"error": error.to_wire()})
        return 2
