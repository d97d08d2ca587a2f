"""The HTTP server that a sidecar starts: the launch option `http`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import frameshard
from frameshard.errors import BadArgument
from frameshard.sync import Ready, Sidecar
from frameshard.testing import fake_engine
from frameshard.wire import launch as wire_launch
from sidecars import DEADLINE_S, alive, children, gone_after, in_trio, started

launch = partial(frameshard.launch, "no model", http="127.0.0.1:0", log=subprocess.DEVNULL)


def ask(url: str, key: str, document: Any = None) -> Any:
    """The answer to a GET of a URL, or to a POST of a document."""
    data = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.load(response)


def chat(url: str, key: str) -> str:
    messages = [{"role": "user", "content": "one two"}]
    said = ask(f"{url}/chat/completions", key, {"messages": messages, "max_tokens": 8})["choices"][0]
    return str(said["message"]["content"])


async def server_of(client: frameshard.Client) -> int:
    """The process id of the HTTP server, when it runs."""
    engine = (await client.stats()).broker.engine_pid
    others: set[int] = set()
    while not others:
        await trio.sleep(0.01)
        others = set(children(client.info.pid)) - {engine}
    (pid,) = others
    return pid


@in_trio
async def test_every_client_is_told_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "connect.json"
    async with launch(engine=fake_engine(), connect_file=file) as client:
        assert client.http_url.startswith("http://127.0.0.1:")
        assert client.http_key not in repr(client) + repr(client.info)
        pid = await server_of(client)
        process = Path(f"/proc/{pid}")
        assert client.http_key.encode() not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert await trio.to_thread.run_sync(chat, client.http_url, client.http_key) == "one two"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await trio.to_thread.run_sync(chat, client.http_url, "wrong")
        async with frameshard.connect(file) as other:
            assert (other.http_url, other.http_key) == (client.http_url, client.http_key)
        older = {name: value for name, value in dataclasses.asdict(client.info).items() if "http" not in name}
        async with frameshard.connect(frameshard.ConnectInfo(**older)) as other:
            assert (other.http_url, other.http_key) == ("", "")
    await trio.to_thread.run_sync(gone_after, [pid])


def test_the_polled_client_is_told_too() -> None:
    sidecar = Sidecar.launch("no model", engine=fake_engine(), http="localhost:0", http_key="innkeeper")
    with sidecar:
        sidecar.wait_ready(DEADLINE_S)
        (ready,) = [event for event in sidecar.poll() if isinstance(event, Ready)]
        assert ready.http_key == "innkeeper"
        assert chat(ready.http_url, "innkeeper") == "one two"
        assert "innkeeper" not in repr(ready)


@in_trio
async def test_another_one_is_started_where_one_has_ended() -> None:
    async with launch(engine=fake_engine(delay_s=0.01, endless=True)) as client:
        notices = client.notices()
        async with client.ask("one two", sampling=frameshard.Sampling(max_tokens=100_000)) as stream:
            await anext(stream)
            for pause_s in (0.5, 1.0):
                os.kill(await server_of(client), signal.SIGKILL)
                with trio.fail_after(DEADLINE_S):
                    notice = await anext(each async for each in notices if each.kind == "http")
                assert (notice.seconds, notice.detail) == (pause_s, "signal 9")
                models = await trio.to_thread.run_sync(ask, f"{client.http_url}/models", client.http_key)
                assert models["data"]
            await anext(stream)


@in_trio
async def test_it_ends_with_a_killed_sidecar() -> None:
    async with launch(engine=fake_engine()) as client:
        pid = await server_of(client)
        await trio.to_thread.run_sync(ask, f"{client.http_url}/models", client.http_key)
        os.kill(client.info.pid, signal.SIGKILL)
        await trio.to_thread.run_sync(gone_after, [pid])


@in_trio
async def test_what_cannot_be_is_an_error_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(BadArgument, match=r"cannot listen on .*in use") as refused:
            async with launch(engine=fake_engine(), http=f"127.0.0.1:{taken.getsockname()[1]}"):
                pass
    assert refused.value.detail["field"] == "http"
    for options in ({"http": "nowhere"}, {"http": "127.0.0.1:70000"}, {"http_key": "two words"}, {"http_key": "é"}):
        with pytest.raises(BadArgument):
            launch(engine=fake_engine(), **options)

    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['hypercorn'] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(BadArgument, match=r"pip install 'frameshard\[http\]'"):
        async with launch(engine=fake_engine()):
            pass
    async with launch(engine=fake_engine(), http="") as client:
        assert client.http_url == ""


def test_it_says_in_one_line_why_it_cannot_serve() -> None:
    """Such as to a sidecar that has ended in the meantime."""
    keys = {"server_key": "k" * 40, "client_key": "k" * 40, "client_secret": "k" * 40}
    info = frameshard.ConnectInfo(
        0, "ipc:///nowhere", 1, 1, **keys, http_url="http://127.0.0.1/v1", http_key="innkeeper"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "frameshard.http", "--fd", str(listener.fileno())]
        with started(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[listener.fileno()]) as server:
            assert server.stdin is not None
            server.stdin.write(wire_launch.info_line(info))
            server.stdin.flush()
            assert server.wait(DEADLINE_S) == 2
            assert server.stderr is not None
            (line,) = server.stderr.read().decode().splitlines()
    assert line.startswith("http: ERROR: the sidecar speaks protocol 0")


def test_serve_offers_it_too(model_path: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    options = ["--device", "cpu", "--ctx", "256", "--http", "127.0.0.1:0", "--http-key-file", str(key_file), "--json"]
    command = [sys.executable, "-m", "frameshard", "serve", "--model", str(model_path), *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sidecar:
        assert sidecar.stdout is not None
        lines = [*itertools.takewhile(lambda line: line != "}\n", sidecar.stdout), "}"]
        ready = json.loads("".join(lines))
        key = key_file.read_text().strip()
        assert json.loads(Path(ready["connect_file"]).read_text())["http_key"] == key
        assert chat(ready["http_url"], key)
        processes = children(ready["pid"])
        assert len(processes) == 2
        sidecar.terminate()
        assert sidecar.wait(DEADLINE_S) == 0
    assert not any(map(alive, processes))
