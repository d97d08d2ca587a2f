"""Runs a module as a program that does not import from the working directory.

``python -m`` and ``python -c`` put the working directory first on ``sys.path``, so they would import a ``msgpack.py``
in it. ``-P`` and ``PYTHONSAFEPATH`` prevent that only from Python 3.11 on, and ``-I`` also ignores ``PYTHONPATH``. So
this file is run by its path: Python then puts the file's directory first, and this file removes it before it imports
anything else. The environment is not changed.
"""

from __future__ import annotations

import os
import sys

FILE = os.path.abspath(__file__)
_BOUND = "--while-stdin-is-open"


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """Returns the command line that does the same as ``python -m module arguments``, but without the working directory
    on ``sys.path``."""
    return (sys.executable, FILE, module, *arguments)


def bound_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Like :func:`command`, but the program ends when its standard input ends. If this is a pipe that only the starting
    process can write to, the program ends with that process, however it ends."""
    return (sys.executable, FILE, _BOUND, module, *arguments)


def _end_with_stdin() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(1)


def _main() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
    import runpy

    if sys.argv[1] == _BOUND:
        import threading

        threading.Thread(target=_end_with_stdin, daemon=True, name="stdin").start()
        del sys.argv[1]
    del sys.argv[0]  # now the module's name is argv[0], and run_module replaces it by the module's path
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
