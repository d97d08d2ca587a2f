"""Shared by the tests of the HTTP server: real sidecars and servers as processes, and requests to them."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameshard.testing import fake_engine
from sidecars import DEADLINE_S, started


def until(condition: Callable[[], bool]) -> None:
    """Polls until the condition is true."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


HOST = """
import json, sys
import trio
import frameshard

async def main():
    options = json.loads(sys.argv[1])
    async with frameshard.launch(options.pop("model"), **options) as client:
        print(client.info.pid, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)

trio.run(main)
"""


@contextmanager
def sidecar(directory: Path, **options: Any) -> Iterator[tuple[Path, int]]:
    """A sidecar in a process of its own; by default with the fake engine.

    :returns: its connect file and its process id.
    """
    connect_file = directory / "connect.json"
    options = {"model": "no model", "connect_file": str(connect_file), **options}
    if options["model"] == "no model":
        options.setdefault("engine", fake_engine())
    command = [sys.executable, "-c", HOST, json.dumps(options)]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        line = host.stdout.readline()
        assert line, "the sidecar did not start"
        try:
            yield connect_file, int(line)
        finally:
            host.communicate(timeout=DEADLINE_S)


@dataclass
class Answer:
    """A response that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, whose form is checked."""
        document = self.json
        assert list(document) == ["error"]
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert document["error"]["message"]
        return dict(document["error"])

    def events(self) -> list[Any]:
        """The documents of a stream that is complete."""
        assert self.headers["content-type"].startswith("text/event-stream")
        *events, end, rest = self.body.decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Server:
    """A running ``frameshard http``."""

    process: subprocess.Popen[str]
    port: int
    key: str | None
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def begin(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        """Sends a request with the key. Read its response with ``getresponse``."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        connection = self.connection()
        connection.request(
            method, path, body, {**key, **{name.replace("_", "-"): text for name, text in headers.items()}}
        )
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        with contextlib.closing(self.begin(method, path, body, **headers)) as connection:
            response = connection.getresponse()
            named = {name.lower(): text for name, text in response.getheaders()}
            return Answer(response.status, named, response.read())

    def chat(self, text: str = "one two", **fields: Any) -> Answer:
        return self.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def metric(self, name: str) -> float:
        """A figure of ``/metrics`` without labels."""
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(f"frameshard_{name} ")]
        return float(value)

    def raw(self, data: bytes) -> bytes:
        """Sends bytes, and returns the beginning of what the server says to them."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(data)
                return peer.recv(1 << 16)
        return b""


@contextmanager
def server(connect_file: Path, *args: str) -> Iterator[Server]:
    """A server, which must end in good order and must not have logged a traceback."""
    log = connect_file.with_name("server.log")
    command = [sys.executable, "-m", "frameshard", "http", "--connect", str(connect_file), *args]
    with (
        log.open("w") as written,
        started(command, stdout=subprocess.PIPE, stderr=written, text=True) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        key = Path(ready["key_file"]).read_text().strip() if "key_file" in ready else ready["key"]
        try:
            yield Server(process, int(ready["url"].split(":")[2].split("/")[0]), key, log, ready)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) in (0, 2)
    assert "Traceback" not in log.read_text(), log.read_text()
