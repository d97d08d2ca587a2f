"""Profiles: kept, compared and measured on the real device, one process each because a process has one device."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frameshard import native
from frameshard.errors import BadArgument
from frameshard.plan import machine
from frameshard.plan.machine import Attention, Product, Profile
from frameshard.plan.model import read_model

PRODUCT = Product((1, 16, 512), (1e9, 1e10, 1e11), (1e11, 1e12, 1e13), 7e9, 0.8e9)
PROFILE = Profile(
    {"device": "any", "threads": 4},
    *(1e9, 2e9, 3e9, 4e9, 5e9, 6e9, 7e9, 8e-6),
    products={"Q4_0 1024x512": PRODUCT},
    attention={"64 x 8:2": Attention((1024, 8192), (1e9, 4e9), (1e12, 2e12))},
    copies={"piece_bytes": [1.0], "h2d_pinned": [1e9]},
)

PROBE = """
import json, sys
from frameshard import native
from frameshard.plan import machine
from frameshard.plan.model import read_model
device = native.ShardDevice("emulated:1", vram_budget_bytes=0, n_threads=1)
calls, profiles = [], []
for name in ("probe_machine", "probe_product", "probe_attention"):
    def counted(*args, name=name, probe=getattr(device, name)):
        calls.append(name)
        return probe(*args)
    setattr(device, name, counted)
for path, refresh in zip(sys.argv[1:4], (False, False, True)):
    model = read_model(path)
    profiles.append(machine.load_or_probe(
        device, model, device_name="emulated:1", n_threads=1, refresh=refresh, seconds=0.5).to_dict())
    calls.append("next")
print(json.dumps({"calls": calls, "profiles": profiles}))
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
        {"products": {"Q4_0": dataclasses.asdict(PRODUCT)}},
        {"products": {"Q4_0 8x8": {}}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "tokens": [2, 1, 3]}}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "gpu_flops": [1.0, 0.0, 1.0]}}},
        {"attention": {"64 x 8:2": 5}},
    ],
)
def test_a_bad_profile_is_refused(spoil: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE.to_dict(), **spoil}))
    with pytest.raises(BadArgument):
        machine.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema_version": 2}'])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadArgument, match="not a profile"):
        machine.load(path)
    with pytest.raises(BadArgument, match="cannot read"):
        machine.load(tmp_path / "missing.json")


def test_the_fingerprint_tells_machines_apart_and_not_models() -> None:
    base = machine.fingerprint("emulated:2", 2)
    others = [
        machine.fingerprint("emulated:2", 1),
        machine.fingerprint("emulated:3", 2),
        machine.fingerprint("CUDA0", 2),
    ]
    assert all(other != base for other in others)
    paths = {machine.cached_path(key) for key in (base, *others)}
    assert len(paths) == 4


def test_kinds_are_what_one_product_reads(model_path: Path, moe_path: Path) -> None:
    assert machine.kinds_of(read_model(model_path))[0] == ("Q4_1", 1536, 576)
    # Two of eight experts: a token's products read their rows together.
    assert machine.kinds_of(read_model(moe_path))[0] == ("Q4_1", 2 * 1536, 576)
    assert machine.heads_of(read_model(model_path)) == (64, 9, 3)


def test_rates_are_those_of_the_nearest_weights() -> None:
    one, many = np.array([1.0, 16.0]), np.array([4.0, 10_000.0])
    seconds = PROFILE.seconds_per_weight(("Q4_0", 1024, 512), one, on_cpu=True)
    assert seconds == pytest.approx([2 / 1e9, 2 * 16 / 1e10])
    between, beyond = PROFILE.seconds_per_weight(("Q4_0", 64, 64), many, on_cpu=False)
    assert 2 * 4 / 1e12 < between < 2 * 4 / 1e11
    assert beyond == pytest.approx(2 * 10_000 / 1e13)
    # Of another type: as many bytes a second with one column, as many operations with many.
    one_byte = 1e9 * (18 / 32) / 2
    assert PROFILE.seconds_per_weight(("F16", 64, 64), one, on_cpu=True)[0] == pytest.approx(2 / one_byte)
    assert PROFILE.seconds_per_weight(("F16", 64, 64), many, on_cpu=True)[1] == pytest.approx(2e4 / 1e11)
    plain = dataclasses.replace(PROFILE, products={})
    assert plain.seconds_per_weight(("F16", 8, 8), one, on_cpu=True) == pytest.approx([2 / 4e9, 2 * 16 / 6e9])


def test_a_model_sees_the_rates_of_its_weights(model_path: Path) -> None:
    seen = PROFILE.seen_by(read_model(model_path))
    assert seen.cpu_gemv == pytest.approx(1e9 / 2 * 18 / 32)  # as Q4_0, which was measured: 18 bytes for 32 weights
    assert (seen.cpu_flops, seen.gpu_flops) == (1e11, 1e13)
    assert seen.memory == 7.8e9  # both at once
    assert PROFILE.attention_rates((64, 8, 2), 1024) == pytest.approx((1e9, 1e12))
    assert PROFILE.attention_rates((64, 8, 2), 2896.3) == pytest.approx((2e9, 2e12**0.5 * 1e12**0.5), rel=1e-3)
    assert PROFILE.attention_rates((128, 8, 2), 1024) == (PROFILE.gpu_gemv, PROFILE.gpu_flops)


def test_memory_serves_both_but_not_less_than_one() -> None:
    assert dataclasses.replace(PROFILE, dram=8e9).memory == 10e9
    assert dataclasses.replace(PROFILE, dram=1e9).memory == 4e9  # what the CPU alone was seen to draw


def test_profiles_come_with_the_package() -> None:
    assert {"laptop-rtx-4060-8gb", "desktop-rtx-5090-32gb", "h100-80gb-pcie5-16c"} <= set(machine.names())
    for name in machine.names():
        profile = machine.load(name)
        assert profile.fingerprint["device"] == "CUDA0"
        if "rtx" in name:  # not measured: each figure says where it is from
            assert not profile.products
            assert set(profile.sources) == {
                name for name, value in profile.to_dict().items() if isinstance(value, float)
            }
    with pytest.raises(BadArgument, match="desktop-rtx-3060-12gb"):
        machine.load("desktop-rtx-3060")


def test_measures_what_is_missing_and_all_when_told(
    model_path: Path, moe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = map(str, (model_path, moe_path, model_path))
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *paths], capture_output=True, text=True, timeout=300, check=True
    )
    document = json.loads(result.stdout)
    first, second, third = document["profiles"]
    calls = " ".join(document["calls"]).split("next")
    assert calls[0].count("probe_product") == len(first["products"]) > 0
    assert calls[0].count("probe_machine") == 1
    assert first["products"].keys() > {"F16 8192x8192"}  # the device's memory, whatever the model
    assert second["products"].keys() > first["products"].keys()
    assert calls[1].count("probe_product") == len(second["products"]) - len(first["products"])
    assert "probe_machine" not in calls[1]
    assert "probe_attention" not in calls[1]
    assert calls[2].split() == calls[0].split()
    assert first["fingerprint"] == third["fingerprint"]
    assert 0.3e9 < first["h2d"] < 1.1e9  # a link of 1 GB/s
    kept = machine.load(machine.cached_path(first["fingerprint"]))
    assert kept.to_dict() == third


def test_a_device_name_with_a_copy_rate() -> None:
    assert native.parse_device("emulated:25") == ("emulated", 25.0)
    for name in ("emulated", "CUDA0", "auto", "stock:CUDA0"):
        assert native.parse_device(name) == (name, 0.0)
    for name in ("emulated:", "emulated:fast", "emulated:0", "emulated:-1", "emulated:nan", "emulated:1e9"):
        with pytest.raises(BadArgument, match="25e9 bytes/s"):
            native.parse_device(name)
