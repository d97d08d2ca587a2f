"""The editor scripts of the Unity package in Mono, with stubs of the editor: downloads, and the step after a build."""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from test_unity import REPO, UNITY, compiled

pytestmark = pytest.mark.usefixtures("built")  # with the bindings, so that Mono is there

CONTENT = b"GGUF" + os.urandom(1 << 20)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [*UNITY.glob("Runtime/*.cs"), *UNITY.glob("Editor/*.cs")]
    sources += [*(REPO / "tests" / "unity_stubs").glob("*.cs"), REPO / "tests" / "bindings" / "EditorTools.cs"]
    return compiled(tmp_path_factory.mktemp("tools") / "tools.exe", *sources)


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends CONTENT, also from the byte that is asked for."""

    served: ClassVar[bytes] = CONTENT
    ranges: ClassVar[list[str | None]] = []
    cut_after: ClassVar[list[int]] = []
    """After so many bytes the next connections break."""
    tag = '"one"'

    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        asked = self.headers["range"]
        self.ranges.append(asked)
        begin = 0
        if asked and self.headers["if-range"] == self.tag:
            begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if begin else 200)
        self.send_header("content-length", str(len(self.served) - begin))
        self.send_header("etag", self.tag)
        self.end_headers()
        end = begin + self.cut_after.pop(0) if self.cut_after else None
        self.wfile.write(self.served[begin:end])

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def download(tools: Path, tmp_path: Path) -> Callable[..., tuple[str, Path]]:
    """Downloads, and returns what the program says and where the file is."""

    def run(url: str, digest: str = "", cancel_at: int = 1 << 40) -> tuple[str, Path]:
        path = tmp_path / "StreamingAssets" / "model.gguf"
        command = ["mono", tools, "download", url, path, digest, str(cancel_at)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert not list(tmp_path.rglob("*.part"))
        return result.stdout.strip(), path

    return run


Download = Callable[..., tuple[str, Path]]


def test_a_download_goes_on_after_broken_connections(download: Download) -> None:
    class Breaking(Handler):
        ranges: ClassVar[list[str | None]] = []
        cut_after: ClassVar[list[int]] = [100_000, 200_000]

    with serving(Breaking) as url:
        said, path = download(f"{url}/model.gguf", DIGEST)
    assert said == f"{len(CONTENT)} {len(CONTENT)}"
    assert path.read_bytes() == CONTENT
    assert Breaking.ranges == [None, "bytes=100000-", "bytes=300000-"]


def test_a_wrong_hash_and_a_refusal_leave_nothing(download: Download) -> None:
    class Wrong(Handler):
        served = CONTENT[:4] + CONTENT[:3:-1]

    with serving(Wrong) as url:
        said, path = download(f"{url}/model.gguf", DIGEST)
        assert "SHA-256" in said
        assert not path.exists()
        said, path = download(f"{url}/missing")
        assert "404" in said
        assert not path.exists()
    assert "http://" in download("nonsense://x")[0]


def test_a_web_page_is_no_model(download: Download) -> None:
    class Page(Handler):
        served = b"<!DOCTYPE html><title>model.gguf</title>"

    with serving(Page) as url:
        said, path = download(f"{url}/model.gguf")
    assert "no GGUF file" in said
    assert not path.exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.com/a/model.gguf?download=true#top", "model.gguf"),
        ("https://example.com/a%2Fb/my%20model.gguf", "my model.gguf"),
        ("https://example.com/a/", "must end with the name of a file"),
        ("https://example.com/..", "must end with the name of a file"),
        ("https://example.com/..%2Fmodel.gguf", "must end with the name of a file"),
        ("https://example.com/..%5Cmodel.gguf", "must end with the name of a file"),
    ],
)
def test_the_file_has_the_name_in_its_address(url: str, said: str, tools: Path) -> None:
    result = subprocess.run(["mono", tools, "name", url], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout


def test_a_cancelled_download_leaves_nothing(download: Download) -> None:
    class Stalling(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[: 1 << 18])
            self.wfile.flush()
            self.rfile.read(1)  # until the client leaves

    with serving(Stalling) as url:
        said, path = download(f"{url}/model.gguf", cancel_at=1)
    assert said.endswith(" cancelled")
    assert not path.exists()


def test_the_bundle_is_copied_into_the_player(tools: Path, tmp_path: Path) -> None:
    def build(target: str, player: str) -> str:
        command = ["mono", tools, "build", target, tmp_path / player]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "no bundle in frameshard/linux" in build("StandaloneLinux64", "Tavern.x86_64")
    python = tmp_path / "frameshard" / "linux" / "sidecar" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    assets = tmp_path / "Tavern_Data" / "StreamingAssets" / "frameshard"
    left, own = assets / "sidecar" / "old", assets / "model.gguf"
    left.parent.mkdir(parents=True)
    left.touch()
    own.write_text("of the game")
    assert build("StandaloneLinux64", "Tavern.x86_64") == ""
    copied = assets / "sidecar" / "python"
    assert copied.read_text() == "#!/bin/sh\n"
    assert os.access(copied, os.X_OK)
    assert not left.exists()
    assert own.read_text() == "of the game"
    assert build("StandaloneOSX", "Tavern.app") == ""
