"""Profiles: kept, compared and measured on the real device, one process each because a process has one device."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from frameshard.errors import BadArgument
from frameshard.plan import machine
from frameshard.plan.machine import Profile
from frameshard.plan.model import read_model

PROFILE = Profile({"device": "any", "threads": 4}, 1e9, 2e9, 3e9, 4e9, 5e9, 6e9, 7e9, 8e-6)

PROBE = """
import json, sys
from frameshard import native
from frameshard.plan import machine
from frameshard.plan.model import read_model
model = read_model(sys.argv[1])
device = native.ShardDevice("emulated", budget_bytes=0, n_threads=1, link_gbps=1.0)
calls = []
probe, device.probe = device.probe, lambda *args: calls.append(args) or probe(*args)
profiles = [
    machine.load_or_probe(device, model, inner="emulated", n_threads=1, link_gbps=1.0, refresh=refresh, seconds=0.5)
    for refresh in (False, False, True)
]
print(json.dumps({"calls": calls, "profiles": [profile.to_dict() for profile in profiles]}))
"""


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    machine.save(PROFILE, tmp_path / "deep" / "profile.json")
    assert machine.load(tmp_path / "deep" / "profile.json") == PROFILE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "spoil",
    [
        {"schema_version": 99},
        {"h2d": 0.0},
        {"h2d": -1.0},
        {"h2d": float("nan")},
        {"h2d": float("inf")},
        {"h2d": "fast"},
        {"fingerprint": 5},
    ],
)
def test_a_bad_profile_is_refused(spoil: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE.to_dict(), **spoil}))
    with pytest.raises(BadArgument):
        machine.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema_version": 1}'])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadArgument, match="not a profile"):
        machine.load(path)
    with pytest.raises(BadArgument, match="cannot read"):
        machine.load(tmp_path / "missing.json")


def test_the_fingerprint_tells_machines_and_weights_apart(model_path: Path, moe_path: Path) -> None:
    model, moe = read_model(model_path), read_model(moe_path)
    base = machine.fingerprint(model, inner="emulated", n_threads=2, link_gbps=2.0)
    assert base["weights"] == "Q4_1 1536x576"
    others = [
        machine.fingerprint(model, inner="emulated", n_threads=1, link_gbps=2.0),
        machine.fingerprint(model, inner="emulated", n_threads=2, link_gbps=3.0),
        machine.fingerprint(model, inner="CUDA0", n_threads=2),
    ]
    assert all(other != base for other in others)
    paths = {machine.cached_path(key) for key in (base, *others)}
    assert len(paths) == 4
    assert machine.fingerprint(moe, inner="emulated", n_threads=2, link_gbps=2.0) == base  # experts have the same shape


def test_memory_serves_both_but_not_less_than_one() -> None:
    assert dataclasses.replace(PROFILE, dram=8e9).memory == 10e9
    assert dataclasses.replace(PROFILE, dram=1e9).memory == 4e9  # what the CPU alone was seen to draw


def test_measures_once_and_again_when_told(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(model_path)], capture_output=True, text=True, timeout=300, check=True
    )
    document = json.loads(result.stdout)
    assert [call[:3] for call in document["calls"]] == [[3, 1536, 576]] * 2  # Q4_1
    first, second, third = document["profiles"]
    assert first == second
    assert first["fingerprint"] == third["fingerprint"]
    assert 0.3e9 < first["h2d"] < 1.1e9  # a link of 1 GB/s
    kept = machine.load(machine.cached_path(first["fingerprint"]))
    assert kept.to_dict() == third
