"""A process of its own for work on what others wrote: templates of downloaded files, schemas and grammars of clients.

A thread can neither be stopped nor bounded, and a library that does such work may crash. So the work is done in a child
process that limits its address space and the CPU time of each request. CPU time does not depend on what else the
machine does. A request that is out of CPU time ends the process.

Requests and answers are lines of JSON. The child runs this file with the path of a worker file, which defines
``MEMORY_BYTES``, ``CPU_S`` and a class ``Worker`` with ``answer(request) -> answer``. Where ``answer["error"]`` is
``out_of_memory``, the process ends: what such an error left in memory is unknown. This file imports the standard
library only, and workers import nothing of frameshard, so that a start is quick: ``engine/__init__`` loads llama.cpp.

Windows has neither ``resource`` nor ``setitimer``. A job object with ``ProcessMemoryLimit`` and
``PerProcessUserTimeLimit`` would take their place; only the bound on waiting is in force there today.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]  # packages are found where the engine would find them

import contextlib
import json
import os
import runpy
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PATIENCE_S = 60.0
"""For an answer. The process bounds its own CPU time; this is for one that was stopped or that the machine starves."""

OUT_OF_TIME = -getattr(signal, "SIGPROF", 0)
""":attr:`Gone.status` of a process whose CPU time was used up."""


class Gone(Exception):
    """The process has ended or does not answer. ``status`` is that of :class:`subprocess.Popen`."""

    def __init__(self, status: int) -> None:
        self.status = status


class Confined:
    """The child process, from the side that asks. One request at a time."""

    def __init__(self, worker: Path) -> None:
        search = [entry for entry in sys.path if os.path.isabs(entry)]
        self._process = subprocess.Popen(
            # By the file's path and not with -c, which puts the working directory first on the path.
            [sys.executable, "-S", __file__, str(worker), *search],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """:raises Gone: there is no answer; the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(PATIENCE_S, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer
        except (OSError, ValueError):  # a closed pipe, or half an answer
            self._process.kill()
            raise Gone(self._process.wait()) from None
        finally:
            watch.cancel()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


def _limit_cpu(seconds: float) -> None:
    """The default action of the timer's signal ends the process, also in the middle of one long operation."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(worker: str) -> None:
    """The child: answers requests until the input ends."""
    names = runpy.run_path(worker)
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (names["MEMORY_BYTES"], names["MEMORY_BYTES"]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work, answers = names["Worker"](), sys.stdout.buffer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(names["CPU_S"])
        answer = work.answer(request)
        _limit_cpu(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if answer.get("error") == "out_of_memory":
            break
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
