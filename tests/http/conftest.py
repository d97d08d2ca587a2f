"""A sidecar with a real model, and a server in front of it, for tests of answers. Each module has its own:
pytest would keep one of the folder until all tests of the process have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers import Server, server, sidecar


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shallow_model: Path, mmproj_path: Path) -> Iterator[Path]:
    """The connect file of a sidecar with the first layers of SmolLM2 and a vision tower."""
    options: dict[str, Any] = {"model": str(shallow_model), "mmproj": str(mmproj_path), "device": "emulated"}
    with sidecar(tmp_path_factory.mktemp("http"), **options, n_ctx=1024, mode="stream_only") as (connect_file, _):
        yield connect_file


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[Server]:
    with server(place) as running:
        yield running


@pytest.fixture
def calling(tmp_path: Path, model_path: Path) -> Iterator[Server]:
    """A server in front of SmolLM2 itself: its first layers alone would never end an answer with calls of tools."""
    options: dict[str, Any] = {"model": str(model_path), "device": "cpu"}
    with sidecar(tmp_path, **options, n_ctx=1024) as (connect_file, _), server(connect_file) as running:
        yield running
