"""What ``frameshard bundle --platform windows-x86_64`` refuses. tests/windows/test_windows_bundle.py runs a bundle."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frameshard.cli import bundle_windows


def refusal(directory: Path, *options: str | Path, **environment: str) -> dict[str, Any]:
    """The error of the command, which must leave nothing behind."""
    command = [sys.executable, "-m", "frameshard", "bundle", str(directory / "b"), "--json", *map(str, options)]
    environment = os.environ | environment
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (directory / "b").exists()
    return dict(json.loads(result.stdout)["error"])


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """What a build for Windows leaves, with files that no Windows could load."""
    for name in ("device/frameshard_device.dll", "device/frameshard_vulkan_layer.json", "llama/bin/llama.dll"):
        path = tmp_path / "native" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"MZ")
    return tmp_path / "native"


@contextlib.contextmanager
def mirror(content: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server of Python's downloads that sends `content` for each of them.

    :returns: its URL, and the paths that were asked for.
    """
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def test_options_that_do_not_fit_are_named(tmp_path: Path, native: Path) -> None:
    windows = ("--platform", "windows-x86_64")
    assert refusal(tmp_path, *windows)["detail"]["field"] == "native"
    assert refusal(tmp_path, "--python", tmp_path)["detail"]["field"] == "python"
    assert "native/windows/build.sh" in refusal(tmp_path, *windows, "--native", tmp_path)["message"]
    python = tmp_path / "python"
    python.mkdir()
    error = refusal(tmp_path, *windows, "--native", native, "--python", python)
    assert error["detail"]["field"] == "python"


def test_the_newest_python_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for patch in (9, 15, 2):
        name = f"cpython-{bundle_windows.VERSION}.{patch}-windows-x86_64-none"
        (tmp_path / "frameshard" / "python" / name).mkdir(parents=True)
    assert ".15-" in bundle_windows._downloaded_python().name


def test_a_python_with_another_hash_is_not_taken(tmp_path: Path, native: Path) -> None:
    with mirror(b"not the archive that uv knows") as (url, asked):
        error = refusal(
            tmp_path,
            *("--platform", "windows-x86_64", "--native", native),
            UV_PYTHON_INSTALL_MIRROR=url,
            XDG_CACHE_HOME=str(tmp_path / "cache"),
            UV_CACHE_DIR=str(tmp_path / "uv"),
        )
    assert error["name"] == "download_failed"
    assert any("windows-msvc" in path for path in asked)
    assert not list((tmp_path / "cache").rglob("python.exe"))
