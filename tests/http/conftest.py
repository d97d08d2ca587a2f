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
    with sidecar(tmp_path_factory.mktemp("http"), **options, n_ctx=512, mode="stream_only") as (connect_file, _):
        yield connect_file


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[Server]:
    with server(place) as running:
        yield running


@pytest.fixture
def calling(tmp_path: Path, wordy_model: Path) -> Iterator[Server]:
    """A server in front of a model that ends its calls of tools, which the first layers of SmolLM2 never do."""
    options: dict[str, Any] = {"model": str(wordy_model), "device": "cpu"}
    with sidecar(tmp_path, **options, n_ctx=1024) as (connect_file, _), server(connect_file) as running:
        yield running
