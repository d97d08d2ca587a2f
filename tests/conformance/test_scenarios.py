"""Plays scenarios.json with the runner of each binding and real sidecars. README.md describes both formats."""

from __future__ import annotations

import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import newer
import pytest
import runners
import trio
import zmq

import frameshard
import sidecars
from frameshard.testing import fake_engine

HERE = Path(__file__).parent
SCENARIOS: list[dict[str, Any]] = json.loads((HERE / "scenarios.json").read_bytes())
DEADLINE_S = 120.0
ENDS = ("done", "failed", "cancelled")
READ = ("started", "thought", "text", *ENDS)
LETTERS = "é漢🐈ж"


class Runner:
    """A runner's process, and its events that no step has used yet."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.events: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        try:
            line = self._lines.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError(f"the runner does not answer {command}") from None
        assert line, f"the runner ended with status {self.process.wait()} at {command}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self) -> None:
        """Passes on the lines that the runner writes, and an empty one at their end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def poll(self, timeout_s: float) -> bool:
        """Reads the runner's events; false if there are none."""
        answer = self.do(do="poll", limit=64, timeout_s=timeout_s)
        assert answer["ok"], answer
        self.events += answer["events"]
        return bool(answer["events"])

    def close(self) -> int:
        """Closes the runner's input: it closes its client and ends. Returns its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._reader.join()
            self.process.stdout.close()


class Stranger:
    """A sidecar of another protocol version: it refuses every hello."""

    def __init__(self, place: Path, protocol: int) -> None:
        server, secret = zmq.curve_keypair()
        client, client_secret = zmq.curve_keypair()
        self.info: dict[str, Any] = {
            "protocol": 1,
            "epoch": 7,
            "pid": os.getpid(),
            "server_key": server.decode(),
            "client_key": client.decode(),
            "client_secret": client_secret.decode(),
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = secret
        self.info["endpoint"] = newer.bind(self._socket, place / "stranger.sock")
        self._protocol = protocol
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(50):
                continue
            peer, frame = self._socket.recv_multipart()
            error = {"code": 24, "name": "version_mismatch", "message": "another version", "retriable": False}
            error["detail"] = {"protocol": self._protocol}
            said = {"t": "error", "id": msgpack.unpackb(frame)["id"], "epoch": 7, "error": error}
            self._socket.send_multipart([peer, msgpack.packb(said)])

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)


class Play:
    """One scenario with one runner."""

    def __init__(self, runner: Runner, place: Path, fixture: Callable[[str], Any]) -> None:
        self.runner = runner
        self.place = place
        self.fixture = fixture
        self.names: dict[str, Any] = {}
        self.sidecars: list[subprocess.Popen[bytes]] = []
        self.strangers: list[Stranger | newer.Newer] = []
        self.servers: list[http.server.ThreadingHTTPServer] = []
        self.files = 0

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()
        for stranger in self.strangers:
            stranger.close()
        for sidecar in self.sidecars:
            assert sidecar.stdin is not None
            assert sidecar.stdout is not None
            sidecar.stdin.close()
            sidecar.stdout.close()
            sidecar.wait(DEADLINE_S)

    def run(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            kind = next(key for key in step if key != "as")
            try:
                getattr(self, f"_{kind}")({name: self.value(value) for name, value in step.items() if name != "steps"})
            except Exception as error:
                raise AssertionError(f"at {json.dumps(step)[:300]}: {str(error)[:2000]}") from None
            if kind == "for":
                for item in self.value(step["in"]):
                    self.names[step["for"]] = item
                    self.run(step["steps"])

    # ---- values -----------------------------------------------------------------------------------------------------

    def value(self, said: Any) -> Any:
        """A value of the scenario, with names and makers replaced by their values."""
        if isinstance(said, str) and said.startswith("$"):
            return self.names[said[1:]]
        if isinstance(said, list):
            return [self.value(item) for item in said]
        if isinstance(said, dict):
            if "utf8" in said:
                return _utf8(self.value(said["utf8"]), self.value(said.get("shift", 0)))
            if "words" in said:
                return " ".join(f"w{index}" for index in range(said["words"]))
            if "thought" in said:
                return "".join(f"hm{index} " for index in range(said["thought"]))
            if "sum" in said:
                return sum(self.value(said["sum"]))
            return {name: self.value(item) for name, item in said.items()}
        return said

    def _keep(self, step: dict[str, Any], value: Any) -> None:
        if "as" in step:
            self.names[step["as"]] = value

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The first line for a sidecar: with models by the fixtures' names, or with a fake engine and its faults."""
        options = dict(options)
        if "engine" in options:
            options["engine"] = list(fake_engine(**options["engine"]))
        if "embedder" in options:
            options["embedder"] = str(self.fixture(options["embedder"]))
        options["model"] = str(self.fixture(options["model"])) if "model" in options else "none"
        return options

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _for(self, step: dict[str, Any]) -> None:
        pass

    def _do(self, step: dict[str, Any]) -> None:
        command = {name: value for name, value in step.items() if name not in ("as", "error", "answer")}
        if command["do"] == "launch":
            command["options"] = self._options(command["options"]) | {"python": sys.executable}
        answer = self.runner.do(**command)
        number = answer.get("job") or answer.get("request")
        self._keep(step, answer.get("data") or number)
        if "error" not in step:
            assert answer["ok"], answer
            assert _fits(answer, step.get("answer", {})), answer
        elif answer["ok"]:
            about = {"job": answer["job"]} if "job" in answer else {"request": number} if number else {}
            event = self.find(lambda event: event["type"] in ("failed", "refused", "closed") and _fits(event, about))
            assert event["status"] == step["error"], event
        else:
            assert answer["error"] == step["error"], answer
        if command["do"] == "close":
            self.runner.events.clear()

    def _event(self, step: dict[str, Any]) -> None:
        wanted = step["event"]
        keys = ["type", "job", "request"] + (["state", "kind"] if wanted["type"] in ("engine", "notice") else [])
        keys += ["stage", "done"] if wanted["type"] == "loading" else []
        keys = [name for name in keys if name in wanted]
        event = self.find(lambda event: all(event.get(name) == wanted[name] for name in keys))
        assert _fits(event, wanted), event
        for name, field in step.get("as", {}).items():
            self.names[name] = event[field]

    def _read(self, step: dict[str, Any]) -> None:
        """Reads the further events of a job, to its end."""
        job, text, types, tokens = step["read"], step.get("after", ""), [], 0
        thought = step.get("after_thought", "")
        sentences, spoken = [], 0
        while not types or types[-1] not in ENDS:
            event = self.find(lambda event: event.get("job") == job and event["type"] in READ)
            types.append(event["type"])
            if event["type"] == "thought":
                thought += event["text"]
                tokens += event.get("tokens", 0)
            if event["type"] == "text":
                assert event["text"], "a delta without text"
                text += event["text"]
                tokens += event.get("tokens", 0)
                if event["sentence_end"]:
                    sentences.append(text[spoken:])
                    spoken = len(text)
            if "timeline" in step:
                assert event["timeline"] == step["timeline"], event
        assert not [late for late in self.runner.events if late.get("job") == job and late["type"] in (*ENDS, "text")]
        assert "started" not in types[1:], types
        assert _fits(event, step.get("last", {"type": "done"})), event
        if event["type"] == "done":
            assert tokens <= event["n_generated"], (tokens, event)
        if "text" in step:
            assert text == step["text"], (text[:200], step["text"][:200])
        if "thought" in step:
            assert thought == step["thought"], thought
        if "sentences" in step:
            assert sentences == step["sentences"], sentences
        if "begins" in step:
            assert step["begins"].startswith(text), text[:200]
        if "events_at_most" in step:
            assert len(types) <= step["events_at_most"], types
        assert "\ufffd" not in text
        self._keep(step, text)

    def _made(self, step: dict[str, Any]) -> None:
        Path(step["made"]).touch()

    def _removed(self, step: dict[str, Any]) -> None:
        Path(step["removed"]).unlink()

    def _kill(self, step: dict[str, Any]) -> None:
        stats = self.stats()
        if step["kill"] == "http":
            (pid,) = set(sidecars.children(stats["pid"])) - {stats["engine_pid"]}
        else:
            pid = stats[{"sidecar": "pid", "engine": "engine_pid"}[step["kill"]]]
        os.kill(pid, signal.SIGKILL)

    def _serve(self, step: dict[str, Any]) -> None:
        """Starts a server with OpenAI's interface that answers each chat with a text. The name of the step stands for
        its base URL."""
        pytest.importorskip("httpx")  # the sidecar needs it
        parts = [{"delta": {"content": step["serve"]}}, {"delta": {}, "finish_reason": "stop"}]
        usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
        events = [*({"choices": [part]} for part in parts), usage]
        stream = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"

        class Chat(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(stream)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.servers.append(server)
        self._keep(step, f"http://127.0.0.1:{server.server_port}/v1")

    def _fetch(self, step: dict[str, Any]) -> None:
        url, key = step["at"]
        request = urllib.request.Request(url + step["fetch"], headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                status = response.status
        except urllib.error.HTTPError as refused:
            status = refused.code
        assert status == step["status"]

    def _until_idle(self, step: dict[str, Any]) -> None:
        """Waits until the engine is idle. Another client asks for that, so that the runner's client does not poll."""
        info = frameshard.ConnectInfo(**json.loads(Path(step["until_idle"]).read_text()))

        @sidecars.in_trio
        async def idle() -> None:
            async with frameshard.connect(info) as client:

                async def busy() -> int:
                    broker = (await client.stats()).broker
                    return broker.jobs_queued + broker.jobs_running

                while await busy():
                    await trio.sleep(0.01)

        idle()

    def _sidecar(self, step: dict[str, Any]) -> None:
        """Starts a sidecar. The name of the step stands for its connect file."""
        file = self._file()
        process = subprocess.Popen(
            [sys.executable, "-m", "frameshard.broker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.sidecars.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        line = self._options(step["sidecar"]) | {"connect_file": str(file)}
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
        assert b"ready" in process.stdout.readline()
        self._keep(step, str(file))

    def _file(self) -> Path:
        self.files += 1
        return self.place / f"sidecar-{self.files}.json"

    def _fresh_file(self, step: dict[str, Any]) -> None:
        self.names[step["fresh_file"]] = str(self._file())

    def _edited(self, step: dict[str, Any]) -> None:
        """Makes a changed copy of a connect file."""
        file = self._file()
        file.write_text(json.dumps(json.loads(Path(step["edited"]).read_text()) | step["with"]))
        self._keep(step, str(file))

    def _stranger(self, step: dict[str, Any]) -> None:
        stranger = Stranger(self.place, step["stranger"]["protocol"])
        self.strangers.append(stranger)
        file = self._file()
        file.write_text(json.dumps(stranger.info))
        self._keep(step, str(file))

    def _newer(self, step: dict[str, Any]) -> None:
        """Makes a newer sidecar from a running one. The name of the step stands for its connect file."""
        made = newer.Newer(Path(step["newer"]), self.place)
        self.strangers.append(made)
        file = self._file()
        file.write_text(json.dumps(made.info))
        self._keep(step, str(file))

    def _page(self, step: dict[str, Any]) -> None:
        """Checks the content of the frame block."""
        at = {"frame": 16, "target_frame_ns": 32, "gpu_busy_ns": 48}
        page = Path(step["path"]).read_bytes()
        found = {name: int.from_bytes(page[at[name] : at[name] + 8], "little") for name in step["page"]}
        assert _fits(found, step["page"]), found

    def _pid(self, step: dict[str, Any]) -> None:
        self.names[step["pid"]] = self.stats()["pid"]

    def _gone(self, step: dict[str, Any]) -> None:
        sidecars.gone_after([step["gone"]], DEADLINE_S)

    def _alive(self, step: dict[str, Any]) -> None:
        assert sidecars.alive(step["alive"])

    # ---- events -----------------------------------------------------------------------------------------------------

    def find(self, wanted: Any) -> dict[str, Any]:
        """The next event that matches. Others are kept in order for later steps."""
        deadline, seen = time.monotonic() + DEADLINE_S, 0
        while True:
            events = self.runner.events
            for at in range(seen, len(events)):
                if wanted(events[at]):
                    return events.pop(at)
            seen = len(events)
            if not self.runner.poll(1.0):
                there = [tuple(event.get(name) for name in ("type", "job", "request", "status")) for event in events]
                late = time.monotonic() > deadline or any(event["type"] == "closed" for event in events)
                assert not late, f"it does not come; there are {there[:20]}"

    def stats(self) -> dict[str, Any]:
        request = self.runner.do(do="get_stats")["request"]
        broker: dict[str, Any] = self.find(lambda event: event.get("request") == request)["detail"]["broker"]
        return broker


def _utf8(size: int, shift: int) -> str:
    """A text of at most `size` bytes: `shift` bytes of ASCII, then characters of 2, 3, 4 and 2 bytes."""
    text = "a" * shift + LETTERS * (size // len(LETTERS.encode()) + 1)
    return text.encode()[:size].decode(errors="ignore")


def _fits(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        if wanted and set(wanted) <= {"min", "max"}:
            return bool(wanted.get("min", found) <= found <= wanted.get("max", found))
        return isinstance(found, dict) and all(name in found and _fits(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_fits, found, wanted))
    return bool(found == wanted)


@pytest.fixture(scope="session", params=runners.NAMES)
def command(request: pytest.FixtureRequest) -> list[str]:
    """The command of a binding's runner, which is built if necessary."""
    return runners.command(request.param)


@pytest.fixture(scope="session")
def idle(command: list[str]) -> Iterator[list[Runner]]:
    """The runner of the scenarios before, if the last of them has passed."""
    left: list[Runner] = []
    yield left
    for runner in left:
        assert runner.close() == 0


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
def test_scenario(
    command: list[str], idle: list[Runner], scenario: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    runner = idle.pop() if idle else Runner(command)
    play = Play(runner, tmp_path, request.getfixturevalue)
    try:
        play.run(scenario["steps"])
        play.run([{"do": "close"}])
        idle.append(runner)
    finally:
        status = 0 if idle else runner.close()
        play.close()
    assert status == 0
