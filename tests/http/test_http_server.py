"""The HTTP server with the fake engine: refusals, faults, hostile clients, and many streams at once."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.connection
import pytest
import trio
from trio.testing import MockClock

from frameshard.errors import BadArgument, JobCancelled
from frameshard.http.exchange import MAX_BODY_BYTES, Exchanges
from frameshard.http.guard import MAX_HEADER_BYTES
from frameshard.http.listener import MAX_CONNECTIONS, Listener, open_listener
from frameshard.http.refusal import Refusal, of_error
from frameshard.http.request import MAX_VALUES
from frameshard.http.server import Options, key_in
from frameshard.testing import fake_engine
from frameshard.wire.launch import address_of
from servers import Answer, Server, server, sidecar, until
from sidecars import DEADLINE_S

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "one two"}]
N_STREAMS = 100


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The connect file of a sidecar that takes many jobs, and whose engine dies when it reads `poison`."""
    engine = fake_engine(poison="poison")
    options = {"engine": engine, "max_client_jobs": N_STREAMS + 1, "max_jobs": N_STREAMS + 1}
    with sidecar(tmp_path_factory.mktemp("http"), **options) as (connect_file, _):
        yield connect_file


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[Server]:
    with server(place, "--allow-origin", "http://localhost:3000") as running:
        yield running


# Fields of a chat, and the status, the code and the param of the refusal.
REFUSALS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hello"}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_value", "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, 400, "unsupported_parameter", "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": [7]}]}, 400, "invalid_value", "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [7]}]}, 400, "invalid_value", "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x" * 70_000}]}, 400, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", None),
    ({"tools": 7}, 400, "invalid_value", "tools"),
    ({"tools": [{"type": "function"}]}, 400, "invalid_value", "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, 400, "unsupported_parameter", "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, 400, "invalid_value", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 65}, 400, "invalid_value", "tools"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({"parallel_tool_calls": 1}, 400, "invalid_value", "parallel_tool_calls"),
    ({"functions": [{"name": "a"}]}, 400, "unsupported_parameter", "functions"),
    ({"n": 2}, 400, "unsupported_parameter", "n"),
    ({"n": True}, 400, "unsupported_parameter", "n"),
    ({"logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({"logprobs": 0}, 400, "unsupported_parameter", "logprobs"),
    ({"messages": [{}] * 1025}, 400, "invalid_value", "messages"),
    ({"frobnicate": 1}, 400, "unknown_parameter", "frobnicate"),
    ({"temperature": 7}, 400, "invalid_value", "temperature"),
    ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({"top_p": -1}, 400, "invalid_value", "top_p"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
    ({"seed": -1}, 400, "invalid_value", "seed"),
    ({"stop": ["a"] * 17}, 400, "invalid_value", "stop"),
    ({"logit_bias": {"gold": 1}}, 400, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_value", "logit_bias"),
    ({"stream": 1}, 400, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
    ({"user": "x" * 513}, 400, "invalid_value", "user"),
]
HARMLESS = {
    "model": "gpt-4o",
    "n": 1,
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {"5": -100},
    "store": False,
    "seed": None,
}


def test_refusals_have_openais_form(http: Server) -> None:
    for fields, status, code, param in REFUSALS:
        refused = http.ask("POST", CHAT, {"messages": HELLO, **fields})
        assert refused.status == status, fields
        error = refused.error
        assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error"), fields
    for name, value in (
        ("image_url", {"url": "https://example.com/a.png"}),
        ("image_url", {"url": "data:image/png;base64,?"}),
    ):
        content = [{"type": "image_url", name: value}]
        assert http.ask("POST", CHAT, {"messages": [{"role": "user", "content": content}]}).error["param"]
    for stop in (5, [5]):
        assert (
            "one string or a list of strings"
            in http.ask("POST", CHAT, {"messages": HELLO, "stop": stop}).error["message"]
        )
    for method, path in (("POST", CHAT), ("PUT", "/lease")):
        refused = http.ask(method, path, gzip.compress(b"{}"), Content_Encoding="gzip")
        assert (refused.status, refused.error["code"]) == (415, "unsupported_content_encoding")
    assert http.ask("POST", CHAT, {"messages": HELLO}, Content_Encoding="identity").status == 200
    for body in (b"", b"{", b"[]", b"\xff", b'{"seed": NaN}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000):
        assert http.ask("POST", CHAT, body).error["code"] == "invalid_value"
    usage = {"stream": True, "stream_options": {"include_usage": None}}
    assert http.ask("POST", CHAT, {"messages": HELLO, **usage}).status == 200
    refused = http.ask("POST", "/v1/completions", {"prompt": "one", "logprobs": 0})
    assert refused.error["param"] == "logprobs", "0 asks for the logprob of the chosen token"
    refused = http.ask("PUT", "/lease", {"vram_budget_mb": 64, "timeout_s": -1})
    assert refused.error["param"] == "timeout_s"
    for prompt in (None, "", ["a", "b"], [1, 2]):
        assert http.ask("POST", "/v1/completions", {"prompt": prompt}).error["param"] == "prompt"
    assert http.ask("POST", CHAT, {"messages": HELLO, **HARMLESS}, X_Frameshard_Priority="2").status == 200
    refused = http.ask("POST", CHAT, {"messages": HELLO}, X_Frameshard_Priority="9")
    assert refused.error["param"] == "x-frameshard-priority"
    assert http.ask("POST", "/v1/embeddings", {"input": "x"}).status == 501
    assert http.ask("GET", "/v1/nothing").error["code"] == "unknown_url"
    assert http.ask("GET", CHAT).status == 405
    assert http.ask("GET", "/v1/models/gpt-4o").error["code"] == "model_not_found"


def test_only_those_who_may_ask_are_answered(http: Server, place: Path) -> None:
    path = "/v1/models"
    assert http.ask("GET", path).status == 200
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {http.key}"}, {"Authorization": ""}):
        refused = http.ask("GET", path, **headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert http.ask("GET", "/health", Authorization="").json["status"] == "ok"
    assert http.ask("GET", path, Host=f"localhost:{http.port}").status == 200
    for target in (f"http://127.0.0.1:{http.port}", "HTTP://localhost"):
        assert http.ask("GET", f"{target}{path}").json == http.ask("GET", path).json
        assert http.ask("GET", f"{target}/health?a=b", Authorization="").status == 200
        assert http.ask("GET", target).error["code"] == "unknown_url"
    for target in ("http://evil.example", "http://127.0.0.1@evil.example", "http://"):
        assert http.ask("GET", f"{target}{path}").error["code"] == "host_not_allowed"
    for host in ("evil.example", f"evil.example:{http.port}", "127.0.0.1.evil.example", "127.0.0.1@evil.example", ""):
        assert http.ask("GET", path, Host=host).error["code"] == "host_not_allowed"
    allowed = http.ask("GET", path, Origin="http://localhost:3000")
    assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = http.ask("GET", path, Origin="http://evil.example")
    assert refused.error["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in refused.headers
    for names in ("authorization", "authorization,content-type,x-frameshard-priority,x-stainless-arch,x-stainless-os"):
        preflight = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": names}
        asked = http.ask("OPTIONS", CHAT, Origin="http://localhost:3000", Authorization="", **preflight)
        assert asked.status == 200, asked.body
        assert asked.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert "access-control-allow-private-network" not in asked.headers
        assert set(names.split(",")) <= set(asked.headers["access-control-allow-headers"].split(","))
    private = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Private_Network": "true"}
    asked = http.ask("OPTIONS", CHAT, Origin="http://localhost:3000", Authorization="", **private)
    assert (asked.status, asked.headers["access-control-allow-private-network"]) == (200, "true")
    assert http.ask("OPTIONS", CHAT, Origin="http://evil.example", Authorization="", **private).status == 400

    with server(place, "--no-key") as other:
        assert other.key is None
        assert other.chat().status == 200


def test_only_names_that_can_be_sent_are_allowed() -> None:
    options = Options("127.0.0.1", 0, "key", ("Game.Example", "[::1]"), ("http://LocalHost:3000/", "null", "app://."))
    assert options.hosts == ("game.example", "[::1]")
    assert options.origins == ("http://localhost:3000", "null", "app://.")
    for host in ("*", "", "game.example:80", "http://game.example", "game/", "caf\xe9"):
        with pytest.raises(BadArgument, match="no host name"):
            Options("127.0.0.1", 0, "key", (host,))
    for origin in ("*", "", "localhost", "http://", "http://a/b", "http://a:80", "https://a:443", "http://caf\xe9"):
        with pytest.raises(BadArgument, match="none that a browser sends"):
            Options("127.0.0.1", 0, "key", (), (origin,))


def test_a_key_is_kept_in_a_private_file(place: Path, tmp_path: Path) -> None:
    kept = tmp_path / "key"
    with server(place, "--key-file", str(kept)) as http:
        assert kept.stat().st_mode & 0o777 == 0o600
        assert "key" not in http.ready
        assert key_in(kept) == http.key
        assert http.chat().status == 200
        assert http.ask("GET", "/v1/models", Origin="http://localhost:3000").error["code"] == "origin_not_allowed"
    kept.chmod(0o644)
    with pytest.raises(BadArgument, match="others may read: chmod 600"):
        key_in(kept)
    for other in (tmp_path, Path(os.devnull)):
        with pytest.raises(BadArgument, match="no regular file and no pipe"):
            key_in(other)
    with pytest.raises(BadArgument, match="without a key"):
        Options(*address_of("0.0.0.0:0", "bind"), key=None)
    with pytest.raises(BadArgument, match="not an address"):
        address_of("nowhere", "bind")


def test_many_streams_at_once_lose_nothing(http: Server) -> None:
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        text = f"{number} " + " ".join(f"word{i}" for i in range(20))
        chunks = http.chat(text, stream=True, max_tokens=100).events()
        answers[number] = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(N_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert {number: text.split()[0] for number, text in answers.items()} == {n: str(n) for n in range(N_STREAMS)}
    assert {len(text.split()) for text in answers.values()} == {21}
    assert http.metric("jobs_running") == 0


def test_faults_of_the_sidecar_have_their_status(http: Server, tmp_path: Path) -> None:
    for stream in (False, True):
        died = http.chat("poison", stream=stream)
        assert (died.status, died.error["code"], died.error["type"]) == (503, "engine_died", "server_error")
        assert died.headers["retry-after"] == "1"
    assert not of_error(JobCancelled("the job was cancelled")).headers
    # The job hangs until the engine is killed for it, twice.
    options = {"engine": fake_engine(endless=True, hang_at_token=5), "hang_busy_s": 3.0, "max_client_jobs": 1}
    with sidecar(tmp_path, **options) as (connect_file, _), server(connect_file) as other:
        with contextlib.closing(other.begin("POST", CHAT, {"messages": HELLO, "stream": True})) as connection:
            response = connection.getresponse()
            assert response.readline()
            busy = other.chat()
            assert (busy.status, busy.error["code"]) == (429, "overloaded")
            *_, last, end = response.read().decode().split("\n\n")
        assert end == ""
        assert '"code":"engine_died"' in last


def test_the_server_ends_with_its_sidecar(tmp_path: Path) -> None:
    with sidecar(tmp_path, engine=fake_engine(delay_s=0.05, endless=True)) as (connect_file, pid):
        with server(connect_file) as http:
            waiting = http.begin("POST", CHAT, {"messages": HELLO, "max_tokens": 100_000})
            stream = http.begin("POST", CHAT, {"messages": HELLO, "max_tokens": 100_000, "stream": True}).getresponse()
            assert stream.readline()
            os.kill(pid, signal.SIGKILL)
            refused = waiting.getresponse()
            body = Answer(refused.status, {}, refused.read())
            assert (body.status, body.error["code"]) == (503, "connection_lost")
            assert b'"code":"connection_lost"' in stream.read()
            assert http.process.wait(DEADLINE_S) == 2
        assert "the sidecar has ended" in http.log.read_text()


def test_hostile_bytes_get_refusals_and_end_nothing(http: Server) -> None:
    key = f"Authorization: Bearer {http.key}\r\nHost: 127.0.0.1\r\n"
    post = f"POST {CHAT} HTTP/1.1\r\n{key}"
    for data in (
        post + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
        post + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /lease HTTP/1.1\r\n\r\n",
        post + "Transfer-Encoding: gzip\r\n\r\n{}",
        post + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        post + "Content-Length: -1\r\n\r\n",
        post + "X: " + "x" * 2 * MAX_HEADER_BYTES + "\r\n\r\n",
        f"GET /health HTTP/1.1\r\n{key}X: " + "x" * MAX_HEADER_BYTES + "\r\n\r\n",
        post + "Host: evil.example\r\nContent-Length: 2\r\n\r\n{}",
        "GET /health HTTP/1.1\r\n\r\n",
        "GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: h2c\r\nHTTP2-Settings: ?\r\nConnection: upgrade\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + "\0" * 100,
        "\0\1\2\r\n\r\n",
    ):
        answered = http.raw(data.encode())
        assert b"200" not in answered.split(b"\r\n")[0], data[:200]
        assert b"Traceback" not in answered
    assert http.ask("GET", "/health", X="x" * (MAX_HEADER_BYTES - 1000)).status == 200
    assert http.ask("GET", "/health", X="x" * MAX_HEADER_BYTES).error["code"] == "headers_too_large"
    many = MAX_VALUES // 2 + 1
    for body in (
        b'{"a":[' + b"{}," * many + b"{}]}",
        b'{"a":[' + b'"\\\\",' * 2 * many,
        b"," * 2 * many + b'"' * 9 * many,
    ):
        assert http.ask("POST", CHAT, body).error["code"] == "request_too_large", body[:20]
    signs = [{"role": "user", "content": '[,"\\' * 15_000}] * 5  # in texts they separate nothing
    assert http.ask("POST", CHAT, {"messages": signs, "max_tokens": 1}).status == 200
    large = b"x" * (MAX_BODY_BYTES + 1)
    assert http.ask("POST", CHAT, large).error["code"] == "request_too_large"
    assert http.ask("POST", CHAT, large, Authorization="").error["code"] == "invalid_api_key"
    assert http.chat().status == 200


def test_no_request_is_smuggled(http: Server) -> None:
    """Each of these hides a change of the lease in what one parser takes for a body and another for a request."""
    before = http.ask("GET", "/lease").json
    key = f"Host: 127.0.0.1\r\nAuthorization: Bearer {http.key}\r\n"
    terms = '{"vram_budget_mb":77,"version":77}'
    change = f"PUT /lease HTTP/1.1\r\n{key}Content-Length: {len(terms)}\r\n\r\n{terms}"
    post, size = f"POST {CHAT} HTTP/1.1\r\n{key}", len(change)

    def everything(data: str) -> bytes:
        with socket.create_connection(("127.0.0.1", http.port), timeout=DEADLINE_S) as peer:
            received = b""
            with contextlib.suppress(ConnectionError):
                peer.sendall(data.encode())
                while part := peer.recv(1 << 16):
                    received += part
            return received

    for framing in (
        f"Transfer-Encoding: chunked\r\nContent-Length: {size + 5}\r\n\r\n0\r\n\r\n",
        f"Transfer-Encoding : chunked\r\nContent-Length: {size + 5}\r\n\r\n0\r\n\r\n",
        f"Transfer-Encoding: \x0bchunked\r\nContent-Length: {size + 5}\r\n\r\n0\r\n\r\n",
        f"Transfer-Encoding: chunked, identity\r\nContent-Length: {size + 5}\r\n\r\n0\r\n\r\n",
        f"X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: {size}\r\n\r\n",
        f"Content-Length: {size}\r\nContent-Length: 0\r\n\r\n",
        f"Content-Length: 0, {size}\r\n\r\n",
        f"Content-Length: +{size}\r\n\r\n",
        f"Content-Length: {size}\nContent-Length: 0\r\n\r\n",
        f"Transfer-Encoding: chunked\r\n\r\n{size:x}\n\r\n",
        f"Transfer-Encoding: chunked\r\n\r\n0x{size:x}\r\n",
        f"Transfer-Encoding: chunked\r\n\r\n{'0' * 30}{size:x}\r\n",
    ):
        received = everything(post + framing + change + f"GET /lease HTTP/1.1\r\n{key}Connection: close\r\n\r\n")
        assert b'"version":77' not in received, framing
        assert http.ask("GET", "/lease").json == before, framing
    # A pipelined request is a request of its own, and needs its own key.
    other = change.replace(str(http.key), "wrong").replace("Content-Length", "Connection: close\r\nContent-Length")
    received = everything(f"GET /v1/models HTTP/1.1\r\n{key}\r\n" + other)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"invalid_api_key" in received
    assert http.ask("GET", "/lease").json == before


def test_streams_that_are_reset_at_once_leave_no_jobs(http: Server) -> None:
    """The flood of HTTP/2 streams that their client resets as soon as it has opened them."""
    client = h2.connection.H2Connection()
    client.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":authority": "127.0.0.1", ":path": CHAT}
    headers |= {"authorization": f"Bearer {http.key}"}
    body = b'{"messages":[{"role":"user","content":"one"}],"stream":true}'
    with socket.create_connection(("127.0.0.1", http.port), timeout=DEADLINE_S) as peer:
        with contextlib.suppress(ConnectionError):
            for _ in range(250):  # the connection's window takes a thousand
                stream = client.get_next_available_stream_id()
                client.send_headers(stream, list(headers.items()))
                client.send_data(stream, body, end_stream=True)
                client.reset_stream(stream)
                peer.sendall(client.data_to_send())
    assert http.chat().status == 200
    until(lambda: http.metric("jobs_running") + http.metric("jobs_queued") == 0)
    until(lambda: http.metric("http_connections") == 1)


def test_connections_are_limited(http: Server) -> None:
    said = http.log.read_text()
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", http.port), timeout=DEADLINE_S))
        refused = http.ask("GET", "/health")
        assert (refused.error["code"], refused.headers["retry-after"]) == ("overloaded", "1")
        with socket.create_connection(("127.0.0.1", http.port), timeout=DEADLINE_S) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
            assert rude.recv(1)
    until(lambda: http.ask("GET", "/health").status == 200)
    until(lambda: http.metric("http_connections") == 1)
    assert "Hypercorn failed" not in http.log.read_text().removeprefix(said)


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    1e308,
    "",
    "x",
    "\0",
    "é\n",
    "\udcff",
    [],
    [[]],
    {},
    {"type": "text"},
    HELLO,
]


def junk(random_: random.Random, value: Any) -> Any:
    """The value with a random part replaced, doubled or left out."""
    if isinstance(value, dict) and value and random_.random() < 0.8:
        name = random_.choice(list(value))
        change = random_.randrange(4)
        if change == 0:
            return {key: each for key, each in value.items() if key != name}
        if change == 1:
            return {**value, random_.choice(["role", "stop", "user", "type", "x" * 300]): random_.choice(JUNK)}
        return {**value, name: junk(random_, value[name])}
    if isinstance(value, list) and value and random_.random() < 0.8:
        return [junk(random_, value[0]), *value[1:]] if random_.random() < 0.7 else value * 2
    return random_.choice(JUNK)


def test_random_requests_get_an_answer_or_a_refusal(http: Server) -> None:
    random_ = random.Random(20)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, part]}],
        "response_format": schema,
    }
    chat |= {
        "stop": ["x"],
        "temperature": 1,
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lease = {"vram_budget_mb": 64, "timeout_s": 1, "state": "active", "floor_mb": 0, "version": 0, "reason": "x"}
    lease["host_budget_mb"] = 64
    for _ in range(150):
        method, path, body = random_.choice([("POST", CHAT, chat), ("PUT", "/lease", lease)])
        for _ in range(random_.randint(1, 3)):
            body = junk(random_, body)
        answered = http.ask(method, path, body)
        assert answered.status in (200, 400, 409), (body, answered)
        if answered.status != 200:
            assert answered.error["type"] == "invalid_request_error"
    assert http.ask("PUT", "/lease", {"vram_budget_mb": 0}).status == 200
    assert http.chat().status == 200


def test_random_bytes_get_refusals(http: Server) -> None:
    random_ = random.Random(4)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {http.key}\r\n"
    body = '{"messages":[{"role":"user","content":"a"}]}'
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    for _ in range(150):
        data = bytearray(random_.choice([whole, chunked]).encode())
        for _ in range(random_.randint(1, 4)):
            data[random_.randrange(len(data))] = random_.randrange(256)
        with socket.create_connection(("127.0.0.1", http.port), timeout=DEADLINE_S) as peer:
            with contextlib.suppress(ConnectionError):
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                answer = peer.recv(1 << 16)
                assert not answer or answer.startswith(b"HTTP/1.1 "), data
                assert b" 500 " not in answer.split(b"\r\n")[0], data
    assert http.chat().status == 200


def test_slow_clients_lose_their_connections() -> None:
    """On a clock that jumps to the next time limit whenever all tasks wait."""
    ended = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/body":
            await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        finally:
            ended.set()

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)

    async def main() -> None:
        socket_ = await open_listener("127.0.0.1", 0)
        listener = Listener(socket_, Exchanges(refusing, lambda path, status: None))
        port = socket_.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run)
            for words in (
                b"",
                b"GET / HTTP/1.1\r\nHos",
                b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
            ):
                async with await trio.open_tcp_stream("127.0.0.1", port) as peer:
                    if words:
                        await peer.send_all(words)
                    received = b"".join([bytes(part) async for part in peer])
                    assert (b"408" in received) == (b"/body" in words)
            async with await trio.open_tcp_stream("127.0.0.1", port) as peer:
                await peer.send_all(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
                await ended.wait()
                while listener.connections:
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.1))
