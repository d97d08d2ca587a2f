"""Ctrl-C ends every command at once: no traceback, exit status 130, no process left."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sidecars
from sidecars import DEADLINE_S, alive, gone_after


def _default_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell that runs the tests may ignore it


@contextlib.contextmanager
def running(*args: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in a new process session. If the test fails, it is killed with all processes that it started."""
    with subprocess.Popen(
        [sys.executable, "-m", "frameshard", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        preexec_fn=_default_sigint,
    ) as process:
        try:
            yield process
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The child processes of `pid`, and their children."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(path.name))
    found, open_ones = [], [pid]
    while open_ones:
        open_ones = [child for parent in open_ones for child in children.get(parent, [])]
        found += open_ones
    return found


def read_until(process: subprocess.Popen[bytes], *words: bytes) -> bytes:
    """Reads stderr until one of the words is in it; returns what was read."""
    assert process.stderr is not None
    said, give_up_at = b"", time.monotonic() + DEADLINE_S
    while not any(word in said for word in words):
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, give_up_at - time.monotonic()))
        assert ready, said
        data = os.read(process.stderr.fileno(), 1 << 16)
        assert data, said
        said += data
    return said


def interrupted(process: subprocess.Popen[bytes]) -> bytes:
    """Sends SIGINT to the command only, and checks how it ends; returns what it wrote to stdout then."""
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    at = time.monotonic()
    out, err = process.communicate(timeout=DEADLINE_S)
    print(f"ended {time.monotonic() - at:.2f} s after the signal, {len(started)} children")
    assert process.returncode == 130, (out, err)
    assert b"Traceback" not in err, err
    assert b"KeyboardInterrupt" not in err, err
    gone_after(started, DEADLINE_S)
    assert not any(map(alive, started))
    return out


def options(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model", str(model), "--device", "emulated:0.2", *more)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("bench", "--vram-budget", "floor"), b"loading"),
        (("bench", "--vram-budget", "floor", "--prompt", "512"), b"1 of 3"),
        (("bench", "--device", "cpu", "--prompt", "4096"), b"1 of 3"),
        (("verify", "--vram-budget", "floor"), b"on emulated"),
        (("profile", "--seconds", "30"), b"measuring"),
        (("plan", "--vram-budget", "floor"), b"measuring"),
    ],
)
def test_native_code_does_not_hold_it_up(args: tuple[str, ...], words: bytes, model_path: Path, tmp_path: Path) -> None:
    """SIGINT comes during a load, a decode on each device, and a measurement."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)} if words == b"measuring" else {}
    with running(args[0], *options(model_path), *args[1:], **cache) as process:
        read_until(process, words)
        assert interrupted(process) == b""


HELD = """
import ctypes, sys
from frameshard.cli import interrupt

try:
    with interrupt.prompt():
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_lock.argtypes = [ctypes.c_void_p]
        mutex = ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        print("loading", file=sys.stderr, flush=True)
        libc.pthread_mutex_lock(mutex)
except KeyboardInterrupt:  # as commands do: the signal may come before the second lock
    sys.exit(130)
"""


def test_a_native_call_that_does_not_return_does_not_hold_it_up() -> None:
    """The second lock waits for the first, also behind a signal."""
    with sidecars.started([sys.executable, "-c", HELD], stderr=subprocess.PIPE, preexec_fn=_default_sigint) as process:
        read_until(process, b"loading")
        interrupted(process)


@pytest.mark.parametrize("moment", ["it loads", "it serves"])
@pytest.mark.parametrize(
    ("args", "serves"),
    [(("chat",), b"/help for commands"), (("serve",), b"serving;"), (("simulate", "menu"), b"menu:")],
)
def test_a_sidecar_ends_too(args: tuple[str, ...], serves: bytes, moment: str, deep_model: Path) -> None:
    words = serves if moment == "it serves" else b"loading"
    with running(*args, *options(deep_model)) as process:
        read_until(process, words)
        assert descendants(process.pid)
        interrupted(process)


LOST = """
import signal, trio, weakref
from frameshard.cli import interrupt

class Thing:
    pass

async def main():
    thing = Thing()
    gone = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    await trio.sleep_forever()

try:
    interrupt.run_async(main)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_one_that_comes_in_a_callback_is_not_lost() -> None:
    """Python ignores exceptions there."""
    command = [sys.executable, "-c", LOST]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, preexec_fn=_default_sigint)
    assert (result.stdout, result.returncode) == ("interrupted\n", 0), result.stderr


def test_a_second_one_ends_it_without_waiting(model_path: Path) -> None:
    with running("bench", *options(model_path, "--vram-budget", "floor", "--prompt", "512")) as process:
        read_until(process, b"1 of 3")
        process.send_signal(signal.SIGINT)
        interrupted(process)


def test_a_benchmark_prints_what_it_has_measured(thin_model: Path) -> None:
    """Also while a call to llama.cpp takes longer than the main thread is waited for, as at the floor."""
    args = ("--vram-budget", "floor", "--prompt", "64", "--generate", "1", "--repeat", "500", "--json")
    with running("bench", *options(thin_model, *args)) as process:
        read_until(process, b"3 of 500")
        document = json.loads(interrupted(process))
    (row,) = document["rows"]
    assert 2 <= document["repeat"] == len(row["runs"]["ttft_s"]) == len(row["runs"]["decode_tps"]) < 500


def test_a_benchmark_of_images_prints_what_it_has_measured(thin_model: Path, mmproj_path: Path) -> None:
    args = ("--image", "32x32", "--mmproj", str(mmproj_path), "--generate", "1", "--repeat", "500", "--json")
    with running("bench", "--model", str(thin_model), "--device", "emulated", *args) as process:
        read_until(process, b"3 of 500")
        document = json.loads(interrupted(process))
    (row,) = document["rows"]
    assert 2 <= document["repeat"] == len(row["runs"]["latency_s"]) < 500


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def test_while_libraries_are_loaded(model_path: Path) -> None:
    with running("bench", *options(model_path)) as process:
        until(lambda: "libggml" in Path(f"/proc/{process.pid}/maps").read_text())
        interrupted(process)


STARTS = """
import runpy, sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "frameshard.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
sys.argv = ["frameshard", "--version"]
"""
MODULE = 'runpy.run_module("frameshard", run_name="__main__", alter_sys=True)'


@pytest.mark.parametrize("installed", [False, True])
def test_while_the_command_itself_is_imported(installed: bool) -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    entry = re.search(r'^frameshard = "([\w.]+):(\w+)"$', project, re.MULTILINE)
    assert entry is not None
    begin = f"from {entry[1]} import {entry[2]}; sys.exit({entry[2]}())" if installed else MODULE
    ended = subprocess.run([sys.executable, "-c", STARTS + begin], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_while_the_sidecar_is_started(model_path: Path) -> None:
    with running("chat", *options(model_path)) as process:
        until(lambda: bool(descendants(process.pid)))
        interrupted(process)


def test_a_fetch_leaves_nothing(tmp_path: Path) -> None:
    """The server accepts the request and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(DEADLINE_S)
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        model = ("models", "fetch", "hf:someone/something/model.gguf")
        with running(*model, HF_ENDPOINT=hub, XDG_CACHE_HOME=str(tmp_path)) as process:
            server.accept()
            interrupted(process)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith(".fetch")]


def test_top_gives_the_terminal_back(deep_model: Path) -> None:
    ours, theirs = pty.openpty()
    with running("serve", *options(deep_model)) as sidecar:
        connect = read_until(sidecar, b"connect.json").rpartition(b" ")[2].split()[0].decode()
        top = subprocess.Popen(
            [sys.executable, "-m", "frameshard", "top", "--connect", connect],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm"}, preexec_fn=_default_sigint,
        )  # fmt: skip
        os.close(theirs)
        seen = b""
        while b"tokens/s" not in seen:
            assert select.select([ours], [], [], DEADLINE_S)[0], seen
            seen += os.read(ours, 1 << 16)
        top.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal is closed
            while data := os.read(ours, 1 << 16):
                seen += data
        _, err = top.communicate(timeout=DEADLINE_S)
        assert (top.returncode, err) == (130, b"")
        assert b"\x1b[?1049l" in seen  # the screen is as before
        interrupted(sidecar)
    os.close(ours)
