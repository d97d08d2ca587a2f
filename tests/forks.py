"""Processes that have imported the engine before they start, which takes longer than to load a tiny model.

Each is a fork of a server that has done nothing else, so nothing of llama.cpp is in use in it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import IO, Any

import frameshard.engine  # sets variables of the environment, which the server has too
from frameshard import ggml

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", f"{frameshard.engine.__name__}.process"])
SCRIPT_S = 600.0
"""The longest time of a script, in seconds."""


class Fd:
    """A file descriptor as an argument: the function gets its number in the new process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _number, (DupFd(self._fd),)


def _number(fd: Any) -> int:
    number: int = fd.detach()
    return number


class Fork:
    """A process that calls ``function(*args)``.

    :param environment: None for that of this process.
    :param stderr: where its messages go, if not to those of this process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: object,
        environment: dict[str, str] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        given = environment or dict(os.environ), Fd(2 if stderr is None else stderr.fileno())
        self._process = CONTEXT.Process(target=_run, args=(*given, function, *args), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int:
        """Waits for the end.

        :returns: the exit status; that of a process that was killed is negative.
        :raises TimeoutError: the process has not ended after so many seconds.
        """
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} has not ended after {seconds:g} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(environment: dict[str, str], errors: int, function: Callable[..., object], *args: object) -> None:
    at_start = ggml.environment_before()  # of the server
    for name in at_start.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if at_start.get(name) != value})
    os.dup2(errors, 2)
    os.close(errors)
    function(*args)


def run_script(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fork, as ``python -c`` does it with these arguments. What it prints is in the result."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        words = ["-c", *map(str, args)]
        fork = Fork(_script, Fd(output.fileno()), script, words, stderr=errors)
        try:
            status = fork.wait(SCRIPT_S)
        finally:
            fork.kill()
        printed = []
        for file in (output, errors):
            file.seek(0)
            printed.append(file.read().decode())
        return subprocess.CompletedProcess(words, status, *printed)


def _script(output: int, script: str, words: list[str]) -> None:
    os.dup2(output, 1)
    os.close(output)
    sys.argv = words
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
