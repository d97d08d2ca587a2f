"""Starting a sidecar: imports, endpoints, and the errors if it cannot start."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import zmq

import frameshard
from frameshard import errors, program
from frameshard.broker import endpoint as places
from frameshard.broker.listener import Listener
from frameshard.testing import fake_engine
from frameshard.wire import launch as wire_launch
from sidecars import directory_of, in_both, in_trio, launch

DEPENDENCIES = ("llama_cpp", "msgpack", "numpy", "pynvml", "trio", "zmq")

ASK = """
import sys, trio, frameshard
from frameshard.testing import fake_engine

async def main():
    async with frameshard.launch("no model", engine=fake_engine()) as client:
        print((await client.complete("a b").completed()).text)
trio.run(main)
"""
ASK_SYNC = """
import time
from frameshard.sync import Finished, Sidecar
from frameshard.testing import fake_engine

with Sidecar.launch("no model", engine=fake_engine()) as sidecar:
    sidecar.wait_ready()
    job = sidecar.complete("a b")
    while not job.ended:
        sidecar.poll()
        time.sleep(0.002)
    print(job.text)
"""
REAL_ENGINE = """
import trio, frameshard, frameshard.errors

async def main():
    try:
        async with frameshard.launch("no model"):
            pass
    except frameshard.errors.ModelNotFound:
        print("a b")
trio.run(main)
"""
DRAW = """
from frameshard.cli import figures

figures.draw_apart(print, "a b")
"""
PIP = """
from frameshard import program
import subprocess

subprocess.run(program.command("pip", "--version"), check=True, stdout=subprocess.DEVNULL)
print("a b")
"""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A directory with a module for every name that the sidecar could import. Each writes a file when it is
    imported."""
    directory = tmp_path / "trap"
    directory.mkdir()
    marked = f"open({str(tmp_path / 'marks')!r}, 'a').write(__name__ + ' ')\n"
    for name in {*sys.stdlib_module_names, *DEPENDENCIES, "frameshard", "pip"}:
        (directory / f"{name}.py").write_text(marked)
    return directory


def run_in(trap: Path, command: list[str]) -> str:
    """Runs a program in that directory, without environment variables that protect it; returns its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=trap, env=environment, capture_output=True, text=True, timeout=120)
    marks = trap.parent / "marks"
    assert not marks.exists(), marks.read_text()
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script", [ASK, ASK_SYNC, REAL_ENGINE, DRAW, PIP], ids=["trio", "sync", "engine", "draw", "pip"]
)
def test_nothing_is_imported_from_the_working_directory(script: str, trap: Path, tmp_path: Path) -> None:
    host = tmp_path / "host.py"  # Python searches the directory of a script
    host.write_text(script)
    assert run_in(trap, [sys.executable, str(host)]).split() == ["a", "b"]


def test_the_trap_works(trap: Path) -> None:
    with pytest.raises(AssertionError):
        run_in(trap, [sys.executable, "-c", "import msgpack"])


def test_a_program_keeps_the_rest_of_its_path(tmp_path: Path) -> None:
    """Modules in PYTHONPATH are found, and arguments arrive."""
    (tmp_path / "errors.py").write_text("import sys; print(sys.argv[1:], __name__)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    said = subprocess.run(program.command("errors", "-x", "1"), env=environment, capture_output=True, text=True).stdout
    assert said.strip() == "['-x', '1'] __main__"


@in_trio
async def test_a_sidecar_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("wb") as log:
        monkeypatch.setenv("PYTHONHOME", str(tmp_path))
        with pytest.raises(errors.EngineDied) as died:
            async with launch(log=log.fileno()):
                pass
        monkeypatch.delenv("PYTHONHOME")
        words = "No module named 'encodings'"
        assert words in died.value.message
        assert words in (tmp_path / "log").read_text()
        assert sys.executable in died.value.message
        assert "with status 1" in died.value.message
        assert died.value.detail == {"python": sys.executable, "status": "with status 1"}
        (tmp_path / "trio.py").write_text("import os; os.write(2, b'word' * 5000); os.kill(os.getpid(), 9)")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        with pytest.raises(errors.EngineDied, match="by signal 9, and its last words are: wordword") as died:
            async with launch(log=log.fileno()):
                pass
        assert len(died.value.message) < 2000
        assert (tmp_path / "log").read_text().count("word") == 5000
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
        with pytest.raises(errors.EngineDied, match="no python: No such file or directory"):
            async with launch():
                pass


@in_both
async def test_a_launch_raises_what_its_callback_raises() -> None:
    def fail(_loading: frameshard.Loading) -> None:
        raise ZeroDivisionError("a progress bar")

    with pytest.raises(ZeroDivisionError, match="a progress bar"):
        async with launch(engine=fake_engine(loading=3), on_loading=fail):
            pass


@in_both
async def test_a_launch_says_what_else_has_written_to_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello from here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(errors.FrameshardError, match=r"'hello from here'.*sitecustomize"):
        async with launch():
            pass


@in_trio
async def test_the_log_goes_where_it_was_sent(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        async with launch(log=log.fileno(), engine=fake_engine(crash_at_token=3), name="game") as client:
            await client.set_budget(60.5, state="parked", reason="a\nb")
            await client.set_budget(0)
            with pytest.raises(errors.EngineDied):
                await client.complete("a b c d e").completed()
        text = (tmp_path / "log").read_text()
        assert "sidecar: WARNING: the engine ended (signal 9)" in text
        assert "sidecar: INFO: 'game' sets the VRAM budget to 60.5 MiB, parked; reason: 'a\\nb'\n" in text
        assert "sidecar: INFO: 'game' sets the VRAM budget to no limit, active; reason: ''\n" in text
    with pytest.raises(errors.BadArgument):
        async with launch(log=10**6):
            pass


@pytest.mark.skipif(sys.platform == "win32", reason="Python fills no pipes there without waiting")
@in_trio
async def test_nothing_waits_for_the_reader_of_the_log() -> None:
    """A frozen terminal, or a game that does not read what it has asked for."""
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as log, open(writer, "wb", buffering=0) as pipe:
        async with launch(log=pipe.fileno(), engine=fake_engine(crash_at_token=3)) as client:
            os.set_blocking(writer, False)
            while pipe.write(b"full " * 1000):
                pass
            os.set_blocking(writer, True)
            await client.set_budget(60)  # the sidecar logs this
            with pytest.raises(errors.EngineDied):
                await client.complete("a b c d e").completed()
            assert (await client.complete("a b").completed()).text == "a b"
            os.set_blocking(reader, False)
            text = b""
            while b"while ready" not in text:  # nothing is lost if somebody reads after all
                text += log.read(1 << 16) or b""
                await trio.sleep(0.01)
        assert b"sets the VRAM budget to 60 MiB" in text


ENDPOINTS = [
    "tcp://127.0.0.1:*;0.0.0.0:1",
    "tcp://127.0.0.1:5555;0.0.0.0:1",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:!",
    "tcp://127.0.0.1:65536",
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:05",
    "tcp://127.0.0.1:",
    "tcp://127.0.0.1:5555\n",
    "tcp://127.0.0.1:٣",
    "tcp://0.0.0.0:5555",
    "tcp://127.0.0.1.example.org:5555",
    "ipc://",
    "ipc:///",
    "ipc:///tmp/",
    "ipc:///tmp/a\0b",
    "ipc:///tmp/\ud800",
    "ipc://@abstract",
    "ipc://*",
    "inproc://a",
    "udp://127.0.0.1:5555",
    "",
]


@pytest.mark.parametrize("endpoint", [*ENDPOINTS, 5])
def test_an_endpoint_is_a_path_or_a_port_of_the_loopback(endpoint: Any) -> None:
    with pytest.raises(errors.BadArgument):
        frameshard.ServeConfig("m", endpoint=endpoint)
    info = {"protocol": 1, "epoch": 1, "pid": 1, "server_key": "", "client_key": "", "client_secret": ""}
    with pytest.raises(errors.BadArgument):
        wire_launch.parse_info(json.dumps({**info, "endpoint": endpoint}))
    for right in ("tcp://127.0.0.1:1", "tcp://127.0.0.1:65535", "ipc:///run/a;b", "ipc:///run/é"):
        assert frameshard.ServeConfig("m", endpoint=right).endpoint == right
        assert wire_launch.parse_info(json.dumps({**info, "endpoint": right})).endpoint == right
    assert frameshard.ServeConfig("m", endpoint="tcp://127.0.0.1:*").endpoint
    with pytest.raises(errors.BadArgument):  # `connect` needs a real port
        wire_launch.parse_info(json.dumps({**info, "endpoint": "tcp://127.0.0.1:*"}))


@pytest.mark.parametrize(
    "option", ["model", "mmproj", "draft_model", "adapters", "connect_file", "embedder", "fallback_key_file"]
)
def test_a_path_that_is_not_utf8_is_refused(option: str) -> None:
    path = "/caf\udce9.gguf"  # what Python makes of a name with the byte E9
    options: dict[str, Any] = {"model": "m", option: {"a": path} if option == "adapters" else path}
    with pytest.raises(errors.BadArgument, match="must be UTF-8") as refused:
        frameshard.launch(**options)
    assert refused.value.detail["field"] == option


@in_both
async def test_long_options_arrive(tmp_path: Path) -> None:
    long = tmp_path.joinpath(*["\N{CJK UNIFIED IDEOGRAPH-6A21}" * 80] * 12)  # JSON takes six bytes for each character
    with pytest.raises(errors.ModelNotFound):
        async with launch(adapters={f"a{number}": long / str(number) for number in range(16)}):
            pass
    with pytest.raises(errors.BadArgument, match="longer than 1048576 bytes"):
        async with launch(engine=("x" * 60_000,) * 20):
            pass


def broker(config: dict[str, Any], **environment: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the error of a sidecar that cannot start."""
    done = subprocess.run(
        program.command("frameshard.broker"),
        input=json.dumps({"model": "none", "engine": fake_engine(), **config}) + "\n",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    (line,) = done.stdout.splitlines()
    return done.returncode, json.loads(line)["error"]


def starting(connect_file: Path, engine: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """A sidecar that has begun to start."""
    config = {"model": "none", "engine": engine, "connect_file": str(connect_file)}
    process = subprocess.Popen(
        program.command("frameshard.broker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.usefixtures("own_runtime_directory")
def test_nothing_is_left_of_a_sidecar_that_is_told_to_end_while_it_starts(tmp_path: Path) -> None:
    """As a client does whose launch is cancelled. The signal comes as soon as there is something to remove."""
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    for _ in range(3):
        with starting(tmp_path / "connect.json", fake_engine()) as process:
            while not list(runtime.glob("frameshard/run-*")):
                assert process.poll() is None
            process.terminate()
            assert process.wait(60) == 0
        assert not list(runtime.glob("frameshard/run-*"))
        assert not list(tmp_path.iterdir())


def test_nothing_is_beside_the_connect_file_while_the_model_loads(tmp_path: Path) -> None:
    """A sidecar that is killed then cannot remove it."""
    loading = tmp_path / "loading"
    load = (
        f"import pathlib, socket, sys; pathlib.Path({str(loading)!r}).touch(); "
        "broker = socket.socket(fileno=int(sys.argv[-1])); [*iter(lambda: broker.recv(4096), b'')]"  # until it is gone
    )
    with starting(tmp_path / "connect.json", (sys.executable, "-c", load)) as process:
        while not loading.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert list(tmp_path.iterdir()) == [loading]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path, tmp_path / "file" / "in", "/proc/here", "/", "a\0b", "x" * 300):
        with pytest.raises(errors.BadArgument), places.connect_file(Path(path)):
            pass
    with pytest.raises(errors.BadArgument), places.claim("ipc", "ipc:///proc/no/here"):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        public, secret = zmq.curve_keypair()
        with pytest.raises(errors.EndpointInUse):
            Listener(f"tcp://127.0.0.1:{taken.getsockname()[1]}", secret, public)
    with tempfile.TemporaryDirectory(dir="/tmp") as squatted:
        (Path(squatted) / "frameshard").mkdir(mode=0o755)
        for config, environment in (
            ({"connect_file": str(tmp_path / "no" / "where")}, {}),
            ({}, {"XDG_RUNTIME_DIR": squatted}),
        ):
            status, error = broker(config, **environment)
            assert (status, error["name"]) == (3, "bad_argument"), (config, error)
    assert (tmp_path / "file").read_text() == "precious"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_relative_runtime_directory_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    with places.claim("ipc", None) as (directory, endpoint):
        assert directory.is_absolute()
        assert endpoint == f"ipc://{directory}/socket"
    assert not list((tmp_path / "relative").iterdir())


@pytest.mark.parametrize("option", ["model", "mmproj", "draft_model", "embedder", "connect_file", "adapters"])
def test_a_path_with_a_nul_is_refused(option: str) -> None:
    status, error = broker({option: ["pirate=a\0b"] if option == "adapters" else "a\0b"})
    assert (status, error["name"], error["detail"]) == (3, "bad_argument", {"field": option})


def test_serve_says_it_in_json(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    for args in (["--connect-file", str(tmp_path / "no" / "where")], ["--endpoint", "tcp://127.0.0.1:*;0.0.0.0:1"]):
        command = program.command("frameshard", "serve", "--model", str(model), "--json", *args)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"]["name"] == "bad_argument"
        assert len(done.stderr.splitlines()) == 1, done.stderr


@in_trio
async def test_a_connect_file_replaces_no_other_file(tmp_path: Path) -> None:
    place = tmp_path / "notes.txt"
    os.mkfifo(tmp_path / "fifo")
    for content in ("precious", '{"endpoint": "ipc:///a"}', "[1]"):
        place.write_text(content)
        for path in (place, tmp_path / "fifo"):
            with pytest.raises(errors.BadArgument, match=r"cannot write the connect file .*(remove it|no file)"):
                async with launch(connect_file=str(path)):
                    pass
        assert place.read_text() == content
    place.write_bytes(b"")  # as tempfile.mkstemp leaves one
    async with launch(connect_file=str(place)) as client:
        async with frameshard.connect(place) as other:
            assert other.info == client.info
    assert [each.name for each in tmp_path.iterdir()] == ["fifo"]


def test_a_file_that_appears_during_the_load_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "notes.txt"
    with places.connect_file(place) as publish:
        place.write_text("precious")
        with pytest.raises(errors.BadArgument):
            publish(b"{}")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["precious"]


@in_trio
async def test_an_older_sidecar_leaves_the_connect_file_of_a_newer_one(tmp_path: Path) -> None:
    place = tmp_path / "two.json"
    async with launch(connect_file=str(place)) as older, launch(connect_file=str(place)) as newer:
        found = {json.loads(file.read_bytes())["epoch"] for file in places.running()}
        assert found >= {older.info.epoch, newer.info.epoch}
        directory = directory_of(older.info)
        await older.shutdown()
        while directory.exists():  # the last that a sidecar removes
            await trio.sleep(0.01)
        async with frameshard.connect(place) as other:
            assert other.info == newer.info
    assert list(tmp_path.iterdir()) == []


@in_trio
async def test_a_sidecar_that_fails_leaves_the_connect_file_of_another(tmp_path: Path) -> None:
    place = tmp_path / "connect.json"
    async with launch(connect_file=str(place)) as client:
        with pytest.raises(errors.BadModel):
            async with launch(connect_file=str(place), engine=fake_engine(fatal="bad_model")):
                pass
        async with frameshard.connect(place) as other:
            assert other.info == client.info
    assert directory_of(client.info).exists() is False
    assert list(tmp_path.iterdir()) == []


def test_too_few_files_are_an_error_by_name() -> None:
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); sys.argv = ['broker']; "
        "runpy.run_module('frameshard.broker', run_name='__main__')"
    )
    config = json.dumps({"model": "none", "engine": fake_engine()}) + "\n"
    done = subprocess.run([sys.executable, "-c", script], input=config, capture_output=True, text=True, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["name"], error["detail"]) == (3, "unsupported", {"files": 64, "needed": 1024})


@in_trio
async def test_a_log_that_is_no_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        with pytest.raises(errors.BadArgument, match=r"fileno\(\)"):
            async with frameshard.launch("no model", engine=fake_engine(), log=file):  # type: ignore[arg-type]
                pass
        closed = file.fileno()
    with pytest.raises(errors.BadArgument, match="no open file descriptor"):
        async with frameshard.launch("no model", engine=fake_engine(), log=closed):
            pass
