"""Programs in C and C++ that test parts of the C client. `make bindings` builds those that need its libraries."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

import frameshard
import servers
import sidecars
from frameshard.testing import fake_engine

FS_EVENT_TEXT = 3
REPO = Path(__file__).parents[2]
BUILT = os.environ.get("FRAMESHARD_BINDINGS")
"""The directory in which `make bindings` has built the C library and programs with it."""


def run(command: list[str | Path], **options: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("part", ["plugin", "sample"])
def test_the_unreal_layer_compiles(part: str, tmp_path: Path) -> None:
    """It is compiled with stubs of the engine, because Unreal is not installed."""
    layer = REPO / "bindings" / "unreal" / "Source" / "Frameshard"
    sample = REPO / "samples" / "unreal_tavern" / "Source" / "UnrealTavern"
    sources = sorted((layer / "Private" if part == "plugin" else sample).glob("*.cpp"))
    assert sources
    whole = tmp_path / "layer.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-fno-exceptions", "-fno-rtti"]
    inner = [layer / "Private", REPO / "bindings" / "c" / "include"] if part == "plugin" else []
    places = [REPO / "tests" / "unreal_stubs", layer / "Public", *inner]
    run(["g++", *flags, *(f"-I{place}" for place in places), whole])


def test_the_project_of_unreal_is_whole() -> None:
    project = REPO / "samples" / "unreal_tavern"
    about = json.loads((project / "UnrealTavern.uproject").read_text())
    assert about["FileVersion"] == 3
    for module in about["Modules"]:
        assert (project / "Source" / module["Name"] / f"{module['Name']}.Build.cs").is_file()
    plugin = json.loads((REPO / "bindings" / "unreal" / "Frameshard.uplugin").read_text())
    assert {plugin["Name"] for plugin in about["Plugins"]} == {module["Name"] for module in plugin["Modules"]}
    settings = (REPO / "bindings" / "unreal" / "Source" / "Frameshard" / "Public" / "FrameshardSettings.h").read_text()
    config = (
        (project / "Config" / "DefaultGame.ini").read_text().partition("[/Script/Frameshard.FrameshardSettings]\n")[2]
    )
    for name in re.findall(r"^(\w+)=", config.partition("\n[")[0], flags=re.MULTILINE):
        assert re.search(rf"^\t\w+ b?{name}( =|;)", settings, flags=re.MULTILINE), name


@pytest.mark.skipif(BUILT is None, reason="`make bindings` runs this one")
@pytest.mark.parametrize(
    "program", ["arbiter", "codec_vectors", "growth", "saves", "host", "idle", "game", "unreal_layer"]
)
def test_program(program: str, model_path: Path, mmproj_path: Path) -> None:
    arguments: dict[str, list[str | Path]] = {
        "arbiter": [REPO / "bindings" / "arbiter.json"],
        "codec_vectors": [REPO / "bindings" / "vectors"],
        "saves": [REPO / "bindings" / "saves"],
        "idle": [model_path, sys.executable],
        "game": [model_path, sys.executable],
        "unreal_layer": [model_path, sys.executable, mmproj_path],
    }
    run([Path(str(BUILT)) / program, *arguments.get(program, [])])


def test_the_program_in_the_readme_talks(program_env: dict[str, str], built: Path, tmp_path: Path) -> None:
    """It is compiled and run with the commands of the README, and with the files of `cmake --install`."""
    readme = (REPO / "bindings" / "c" / "README.md").read_text()
    (source,) = re.findall(r"```c\n(.*?)```", readme, flags=re.DOTALL)
    assert source == (REPO / "bindings" / "c" / "examples" / "npc.c").read_text()
    assert len([line for line in source.splitlines() if line.strip("{} ")]) <= 20
    build, use = re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL)
    assert "--prefix ~/.local" in build
    home = tmp_path / "home"
    run(["cmake", "--install", built, "--prefix", home / ".local"])
    (tmp_path / "bindings").symlink_to(REPO / "bindings")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    bare = ("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH", "FRAMESHARD_LIBRARY")
    env = {name: value for name, value in program_env.items() if name not in bare}
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    env |= {"HOME": str(home), "XDG_CACHE_HOME": cache, "CFLAGS": ""}
    said = subprocess.run(
        ["sh", "-ec", use], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    assert said.stdout.strip()
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{REPO}/bindings/c/include"]
    run(["gcc", *flags, "-fsyntax-only", REPO / "bindings" / "c" / "examples" / "npc.c"])


CONSUMER = """
cmake_minimum_required(VERSION 3.24)
project(consumer C CXX)
find_package(frameshard REQUIRED)
add_executable(shared npc.c)
target_link_libraries(shared PRIVATE frameshard::frameshard)
add_executable(static npc.c)
set_target_properties(static PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(static PRIVATE frameshard::frameshard_static)
"""


def test_what_is_installed_may_be_moved(built: Path, tmp_path: Path) -> None:
    """pkg-config and CMake find the header and the libraries at their new path."""
    run(["cmake", "--install", built, "--prefix", tmp_path / "first"])
    moved = (tmp_path / "first").rename(tmp_path / "second")
    (pc,) = moved.glob("lib*/**/frameshard.pc")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "frameshard"], env=os.environ | {"PKG_CONFIG_PATH": str(pc.parent)},
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout.split()  # fmt: skip
    places = {kind: [Path(flag[2:]).resolve() for flag in flags if flag.startswith(kind)] for kind in ("-I", "-L")}
    assert moved.resolve() / "include" in places["-I"]
    assert pc.resolve().parents[1] in places["-L"]
    project = tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(CONSUMER)
    (project / "npc.c").write_text((REPO / "bindings" / "c" / "examples" / "npc.c").read_text())
    run(["cmake", "-S", project, "-B", project / "build", f"-DCMAKE_PREFIX_PATH={moved}"])
    run(["cmake", "--build", project / "build"])


def ask_the_runner(
    built: Path, commands: list[dict[str, Any]], last: str, cwd: Path | None = None
) -> list[dict[str, Any]]:
    """Gives commands to the C runner, and polls until the event `last` comes; returns all events. No request may be
    refused."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with sidecars.started([built / "runner_c"], cwd=cwd, **pipes) as runner:
        assert runner.stdin is not None
        assert runner.stdout is not None

        def tell(command: dict[str, Any]) -> dict[str, Any]:
            runner.stdin.write(json.dumps(command) + "\n")
            runner.stdin.flush()
            answer: dict[str, Any] = json.loads(runner.stdout.readline())
            assert answer["ok"], (command, answer)
            return answer

        events: list[dict[str, Any]] = []
        for command in commands:
            tell(command)
        deadline = time.monotonic() + 120
        while not any(event["type"] in (last, "closed") for event in events):
            assert time.monotonic() < deadline, events
            events += tell({"do": "poll", "limit": 64, "timeout_s": 1.0})["events"]
            assert not any(event["type"] == "refused" for event in events), events
        tell({"do": "close"})
    return events


def test_an_image_in_c(built: Path, model_path: Path, mmproj_path: Path, tmp_path: Path) -> None:
    """Pixels in shared memory give progress and an answer; without a vision tower they give an error."""
    pixels = tmp_path / "pixels"
    pixels.write_bytes(bytes(range(256)) * (224 * 224 * 3 // 256))
    images = [{"format": "rgb", "width": 224, "height": 224, "file": str(pixels)}]
    ask = {"do": "ask", "text": "What is it?", "options": {"images": images, "sampling": {"max_tokens": 4}}}
    sees = {"model": str(model_path), "device": "cpu", "n_ctx": 1024, "n_parallel": 1, "python": sys.executable}
    events = ask_the_runner(built, [{"do": "launch", "options": sees | {"mmproj": str(mmproj_path)}}, ask], "done")
    types = [event["type"] for event in events]
    assert types[0] == "ready"
    assert types[-1] == "done"
    assert types.index("started") < types.index("progress") < types.index("text")
    assert {"encode", "prefill"} >= {event["phase"] for event in events if event["type"] == "progress"}
    (failed,) = [
        event for event in ask_the_runner(built, [{"do": "launch", "options": sees}, ask], "failed") if event["job"]
    ][-1:]
    assert failed["status"] == "unsupported"


def test_a_client_that_does_not_wait_says_goodbye(built: Path, tmp_path: Path) -> None:
    """fs_close with the timeout 0 cancels the jobs at a sidecar that goes on."""
    library = ctypes.CDLL(str(built / "libframeshard.so"))
    library.fs_close.argtypes = [ctypes.c_void_p, ctypes.c_double]
    client, event = ctypes.c_void_p(), ctypes.create_string_buffer(1024)
    with servers.sidecar(tmp_path, silent_s=1e6, engine=fake_engine(endless=True, delay_s=0.1)) as (connect_file, _):
        assert library.fs_connect(str(connect_file).encode(), None, ctypes.byref(client)) == 0
        assert library.fs_ask(client, b"Hello!", -1, None, None) == 0
        servers.until(lambda: library.fs_poll(client, event, 1024, 1) == 1 and event.raw[0] == FS_EVENT_TEXT)
        library.fs_close(client, 0)

        async def jobs_running() -> int:
            async with frameshard.connect(connect_file) as other:
                return (await other.stats()).broker.jobs_running

        servers.until(lambda: trio.run(jobs_running) == 0)


def test_a_path_of_an_adapter_is_relative_to_the_game(built: Path, tmp_path: Path) -> None:
    """The sidecar has another working directory."""
    game = tmp_path / "game"
    game.mkdir()
    (game / "accent.gguf").write_bytes(b"GGUF")
    with servers.sidecar(tmp_path) as (connect_file, _):
        load = {"do": "load_adapter", "name": "accent", "path": "accent.gguf"}
        ask_the_runner(built, [{"do": "connect", "file": str(connect_file)}, load], "adapters", game)


def test_the_c_library_takes_no_module_from_the_working_directory(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in {*sys.stdlib_module_names, "frameshard", "msgpack", "trio", "zmq"}:
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'marks')!r}, 'a').write(__name__ + ' ')")
    options = {"model": "none", "python": sys.executable, "engine": list(fake_engine())}
    ask = {"do": "complete", "prompt": "a b", "options": {}}
    for known in ("1", "0"):  # Python 3.10 does not know PYTHONSAFEPATH
        python = options["python"]
        if known == "0":
            python = str(tmp_path / "python3")
            Path(python).write_text(f'#!/bin/sh\nunset PYTHONSAFEPATH\nexec {sys.executable} "$@"\n')
            Path(python).chmod(0o755)
        events = ask_the_runner(built, [{"do": "launch", "options": {**options, "python": python}}, ask], "done", trap)
        assert events[-1]["type"] == "done", events
        assert not (tmp_path / "marks").exists(), (tmp_path / "marks").read_text()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:1;127.0.0.1:2",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*",
        "tcp://10.0.0.1:5555",
        "ipc://a",
        "ipc:///tmp/",
    ],
)
def test_a_connect_file_that_leads_elsewhere_is_refused(built: Path, tmp_path: Path, endpoint: str) -> None:
    keys = dict.fromkeys(("server_key", "client_key", "client_secret"), "0" * 40)
    (tmp_path / "connect.json").write_text(
        json.dumps({"protocol": 1, "epoch": 1, "pid": 1, "endpoint": endpoint, **keys})
    )
    command = json.dumps({"do": "connect", "file": str(tmp_path / "connect.json")})
    said = subprocess.run([built / "runner_c"], input=command + "\n", capture_output=True, text=True, timeout=60)
    answer = json.loads(said.stdout.splitlines()[0])
    assert (answer["ok"], answer["error"]) == (False, "bad_argument")


def test_what_is_no_connect_file_is_refused_at_once(built: Path, tmp_path: Path) -> None:
    """A pipe must not be waited for, and a model not be read."""
    library = ctypes.CDLL(str(built / "libframeshard.so"))
    library.fs_last_error.restype = ctypes.c_char_p
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    client = ctypes.c_void_p()
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "large"):
        status = library.fs_connect(str(path).encode(), None, ctypes.byref(client))
        assert status == frameshard.errors.BadArgument.code
        assert f"{path} is no connect file" in library.fs_last_error(None).decode()


def test_signals_of_the_host_leave_no_threads_of_closed_clients(built: Path, tmp_path: Path) -> None:
    library = ctypes.CDLL(str(built / "libframeshard.so"))
    library.fs_close.argtypes = [ctypes.c_void_p, ctypes.c_double]
    public = zmq.curve_keypair()[0].decode()
    keys = dict.fromkeys(("server_key", "client_key", "client_secret"), public)
    info = {"protocol": 1, "epoch": 1, "pid": 1, "endpoint": "tcp://127.0.0.1:9", **keys}
    (tmp_path / "connect.json").write_text(json.dumps(info))
    client = ctypes.c_void_p()
    before = len(os.listdir("/proc/self/task"))
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(60):
            assert library.fs_connect(str(tmp_path / "connect.json").encode(), None, ctypes.byref(client)) == 0
            library.fs_close(client, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert len(os.listdir("/proc/self/task")) <= before
