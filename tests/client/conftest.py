"""Patience with sidecars that the machine pauses while they end. One that is killed leaves its files behind."""

from __future__ import annotations

import pytest

import frameshard.client
from frameshard.sync import Sidecar
from sidecars import DEADLINE_S


@pytest.fixture(autouse=True)
def time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameshard.client, "EXIT_S", DEADLINE_S)
    monkeypatch.setattr(Sidecar.close, "__defaults__", (DEADLINE_S,))
