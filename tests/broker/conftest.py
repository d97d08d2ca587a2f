"""Time for sidecars to end, and a server for the tests of the fallback: our own HTTP server before a second sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import frameshard.client
from fallbacks import KEY, N_CTX
from frameshard.testing import fake_engine
from servers import Server, server, sidecar
from sidecars import DEADLINE_S


@pytest.fixture(autouse=True)
def time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that the machine pauses while it ends is not killed, which would leave its files behind."""
    monkeypatch.setattr(frameshard.client, "EXIT_S", DEADLINE_S)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the file of the key."""
    directory = tmp_path_factory.mktemp("fallback")
    key = directory / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    return directory


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[Server]:
    engine = fake_engine(delay_s=0.002)
    with sidecar(place, engine=engine, n_ctx=N_CTX, max_client_jobs=512, max_jobs=512) as (connect_file, _):
        with server(connect_file, "--key-file", str(place / "key")) as running:
            yield running
