"""A client in plain pyzmq, written only from bindings/PROTOCOL.md, with a real sidecar.

It follows "A client in ten steps" and checks every frame with the document. It uses only the fake engine of frameshard.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import document
import msgpack
import pytest
import zmq

from frameshard.testing import fake_engine

DEADLINE_S = 120


class Sidecar:
    """Step 1: the process and its ready line."""

    def __init__(self, **config: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frameshard.broker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"model": "none", **config}).encode() + b"\n")
        self.process.stdin.flush()
        self.said = json.loads(self.process.stdout.readline())

    def close(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(DEADLINE_S)


class Client:
    """Steps 2 to 10."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, ready["server_key"])
        self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, ready["client_key"])
        self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, ready["client_secret"])
        self.socket.connect(ready["endpoint"])
        self.epoch = ready["epoch"]
        self.ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.expected: dict[int, int] = {}

    def send(self, name: str, **fields: Any) -> int:
        frame = msgpack.packb({"t": name, **fields})
        assert document.valid("client", frame), (name, fields)
        assert self.socket.poll(DEADLINE_S * 1000, zmq.POLLOUT)
        self.socket.send(frame)
        return int(fields.get("id", 0))

    def request(self, name: str, **fields: Any) -> int:
        return self.send(name, id=next(self.ids), epoch=self.epoch, **fields)

    def receive(self) -> dict[str, Any]:
        assert self.socket.poll(DEADLINE_S * 1000)
        frame = self.socket.recv()
        assert not self.socket.getsockopt(zmq.RCVMORE)
        assert document.valid("broker", frame), frame
        return document.read(frame)

    def answer(self, request_id: int) -> dict[str, Any]:
        """The answer to a request. Events before it are kept."""
        while True:
            message = self.receive()
            if message.get("id") == request_id:
                return message
            if "job" in message:
                self.events.append(message)

    def next_event(self) -> dict[str, Any]:
        while not self.events:
            message = self.receive()
            if "job" in message:
                self.events.append(message)
        return self.events.pop(0)

    def read(self, job: int) -> tuple[str, dict[str, Any]]:
        """The text and the last event of a job. Sends credit after each event."""
        text = ""
        while True:
            event = self.next_event()
            if event["job"] != job:
                self.events.append(event)
                continue
            assert event["epoch"] == self.epoch
            assert event["seq"] == self.expected.setdefault(job, 0)
            self.expected[job] += 1
            self.send("credit", epoch=self.epoch, job=job, next=self.expected[job])
            if event["t"] == "delta":
                text += event["text"]
            elif event["t"] != "started":
                return text, event

    def greet(self, **fields: Any) -> dict[str, Any]:
        number = self.send("hello", id=next(self.ids), protocol=1, client="from the document", **fields)
        return self.answer(number)

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    sidecar = Sidecar(engine=list(fake_engine(delay_s=0.001)))
    yield sidecar
    sidecar.close()


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    client = Client(sidecar.said["ready"])
    yield client
    client.close()


def test_a_whole_session(sidecar: Sidecar, client: Client) -> None:
    welcome = client.greet()
    assert (welcome["t"], welcome["protocol"], welcome["epoch"]) == ("welcome", 1, client.epoch)
    told = [{"role": "user", "content": "one two three"}]
    request = client.request("submit", job=1, kind="chat", messages=told, timeline=5, window=2)
    assert client.answer(request)["t"] == "ok"
    text, last = client.read(1)
    assert (text, last["t"], last["reason"], last["timeline"]) == ("one two three", "done", "stop", 5)
    assert client.answer(client.request("model_info"))["model"]["arch"] == "echo"
    change = client.request("budget_set", vram_budget_bytes=20 << 20)
    granted, released, observed = (client.answer(change) for _ in range(3))
    assert (granted["t"], granted["decision"], granted["vram_budget_bytes"]) == ("lease", "granted", 20 << 20)
    assert (released["t"], released["used_bytes"], observed["t"]) == ("released", 20 << 20, "observed")
    refused = client.answer(client.request("budget_set", vram_budget_bytes=1))
    assert (refused["t"], refused["error"]["name"]) == ("error", "budget_below_floor")
    assert refused["error"]["detail"]["floor_bytes"] == client.answer(client.request("budget_get"))["floor_bytes"]
    assert client.answer(client.request("stats"))["broker"]["sessions"] == 1
    assert client.answer(client.request("ping"))["jobs"] == []
    assert client.answer(client.request("bye"))["t"] == "ok"
    assert client.answer(client.request("stats"))["error"]["name"] == "connection_lost"
    assert client.greet()["t"] == "welcome"
    assert client.answer(client.request("shutdown"))["t"] == "ok"
    assert sidecar.process.wait(DEADLINE_S) == 0


def test_credit_and_cancel(client: Client) -> None:
    client.greet()
    words = " ".join(str(index) for index in range(500))
    client.answer(
        client.request("submit", job=9, kind="completion", prompt=words, window=3, sampling={"max_tokens": 500})
    )
    first = [client.next_event() for _ in range(3)]
    assert [event["seq"] for event in first] == [0, 1, 2]
    # Without credit nothing more comes, even after all events of the job are waiting.
    deadline = time.monotonic() + DEADLINE_S
    while client.answer(client.request("stats"))["broker"]["jobs_running"]:
        assert time.monotonic() < deadline
    assert client.answer(client.request("ping"))["jobs"] == [[9, 3]]
    assert client.events == []
    # The sidecar sends events again when the client asks for them.
    client.send("credit", epoch=client.epoch, job=9, next=1, resend=True)
    again = [client.next_event() for _ in range(3)]
    assert [event["seq"] for event in again] == [1, 2, 3]
    assert again[:2] == first[1:]
    client.expected[9] = 4
    client.send("credit", epoch=client.epoch, job=9, next=4)
    text, last = client.read(9)
    assert "".join(event["text"] for event in again) + text == words
    assert last["n_generated"] == 500
    assert client.answer(client.request("cancel", job=9))["error"]["name"] == "unknown_job"


def test_resuming_on_another_connection(sidecar: Sidecar, client: Client) -> None:
    welcome = client.greet()
    words = " ".join(str(index) for index in range(300))
    client.answer(client.request("submit", job=1, kind="completion", prompt=words, sampling={"max_tokens": 300}))
    client.next_event()
    other = Client(sidecar.said["ready"])
    lost = other.answer(other.request("ping"))
    assert (lost["error"]["name"], lost["epoch"]) == ("connection_lost", client.epoch)
    assert other.greet(session=welcome["session"])["resumed"] is True
    text, last = other.read(1)
    assert (text, last["t"]) == (words, "done")
    other.close()


def test_a_sidecar_that_cannot_serve_says_why() -> None:
    sidecar = Sidecar(engine=list(fake_engine(fatal="bad_model")))
    assert sidecar.said["error"]["name"] == "bad_model"
    assert sidecar.close() == 3
    sidecar = Sidecar(colour="red")
    assert sidecar.said["error"]["name"] == "bad_argument"
    assert sidecar.close() == 3
