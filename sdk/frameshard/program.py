"""Runs a module as a program, in a process of its own, without importing from the working directory.

``python -m`` and ``python -c`` put the working directory first on ``sys.path``, so a ``msgpack.py`` in it would be
imported. ``-P`` and ``PYTHONSAFEPATH`` prevent that from Python 3.11 on only; ``-I`` ignores ``PYTHONPATH`` as well. So
this file is run by its path: Python puts the file's directory first, and it is removed again before anything else is
imported. The environment is not changed.
"""

from __future__ import annotations

import os
import sys

FILE = os.path.abspath(__file__)


def command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of ``python -m module arguments``, without the working directory."""
    return (sys.executable, FILE, module, *arguments)


def _main() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
    import runpy

    del sys.argv[0]  # the module's name is next, which the module's own path replaces
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
