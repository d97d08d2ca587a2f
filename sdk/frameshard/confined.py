"""Processes untrusted input in a child process with limits: templates of downloaded files, schemas and grammars of
clients.

A thread cannot be stopped, its memory cannot be limited, and the libraries that process such input may crash. So a
child process does the work. It limits its address space and the CPU time of each request. CPU time is used because it
does not depend on the load of the machine. A request that exceeds its CPU time ends the process.

Requests and answers are lines of JSON. The child runs this file with the path of a worker file, which defines
``MEMORY_BYTES``, ``CPU_S`` and a class ``Worker`` with ``answer(request) -> answer``. After an answer whose ``error``
is ``out_of_memory`` the process ends, because its state is not known any more. To start quickly, this file imports only
the standard library, and workers import nothing of frameshard: its packages load llama.cpp or trio.

Windows has neither ``resource`` nor ``setitimer``, so only the limit on waiting holds there. A job object with
``ProcessMemoryLimit`` and ``PerProcessUserTimeLimit`` could replace them.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]  # the parent's own search path

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

if sys.platform != "win32":
    import resource

PATIENCE_S = 60.0
"""The longest wait for an answer, in seconds. The process limits its own CPU time; this limit is for a process that was
stopped or gets no CPU time."""

OUT_OF_TIME = -getattr(signal, "SIGPROF", 0)
"""The value of :attr:`Gone.status` if the request exceeded its CPU time."""


_TRIES = 2  # a process that was killed from outside is started again


class Gone(Exception):
    """The process has ended or does not answer.

    :param status: its exit status, as in :class:`subprocess.Popen`.
    """

    def __init__(self, status: int) -> None:
        self.status = status


class Confined:
    """A worker in a child process. The process is started for the first request, and again after it has ended. Any
    thread may use this; requests are answered one at a time. Free it with :meth:`close`.

    :param worker: path of the worker file.
    :param first: each process gets this request first. If it answers with an error, that is the answer to the request
        for which the process was started.
    """

    def __init__(self, worker: Path, first: Mapping[str, object] | None = None) -> None:
        self._worker = worker
        self._first = first
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Sends a request and returns its answer.

        :raises Gone: there is no answer: the request exceeded its CPU time (:data:`OUT_OF_TIME`), or has ended two
            processes.
        """
        with self._lock:
            for attempt in range(1, _TRIES + 1):
                try:
                    return self._ask_once(request)
                except Gone as gone:
                    self._drop()
                    if gone.status == OUT_OF_TIME or attempt == _TRIES:
                        raise
        raise AssertionError

    def close(self) -> None:
        """Ends the process. A request that it works on has no answer. Safe to call twice."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._drop()

    def _ask_once(self, request: Mapping[str, object]) -> dict[str, Any]:
        if self._closed:
            raise Gone(0)
        if self._process is None:
            self._process = _Process(self._worker)
            if self._first is not None and "error" in (answer := self._process.ask(self._first)):
                self._drop()
                return answer
        answer = self._process.ask(request)
        if answer.get("error") == "out_of_memory":
            self._drop()  # the process ends itself after this answer
        return answer

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


class _Process:
    """The child process."""

    def __init__(self, worker: Path) -> None:
        search = [entry for entry in sys.path if os.path.isabs(entry)]
        self._process = subprocess.Popen(
            # The file is run by its path, because -c would put the working directory first on sys.path.
            [sys.executable, "-S", __file__, str(worker), *search],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """
        :raises Gone: there is no answer. The process has ended.
        """
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
        except (OSError, ValueError):  # the pipe is closed, or the answer is incomplete
            self._process.kill()
            raise Gone(self._process.wait()) from None
        finally:
            watch.cancel()

    def kill(self) -> None:
        """Ends the process. Any thread may call this at any time."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self._process.wait()


def _limit_cpu(seconds: float) -> None:
    """Ends the process after so much CPU time; 0 turns the limit off. The timer's signal has no handler, so it ends the
    process even inside one long operation."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(worker: str) -> None:
    """Runs in the child: answers requests until the input ends.

    :param worker: path of the worker file.
    """
    names = runpy.run_path(worker)
    if sys.platform != "win32":
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
