"""Profiles: reading, writing, errors, and the rates that they give."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from frameshard.errors import BadArgument
from frameshard.plan import profile as profiles
from frameshard.plan.model import read_model
from frameshard.plan.profile import Attention, Kind, Product, Profile

PRODUCT = Product((1, 16, 512), (1e9, 1e10, 1e11), (1e11, 1e12, 1e13), 7e9, 0.8e9)
PROFILE = Profile(
    {"device": "any", "threads": 4},
    *(1e9, 2e9, 3e9, 4e9, 5e9, 6e9, 7e9, 8e-6),
    products={"Q4_0 1024x512": PRODUCT},
    attention={"64 x 8:2": Attention((1024, 8192), (1e9, 4e9), (1e12, 2e12))},
    copies={"piece_bytes": [1.0], "h2d_pinned": [1e9]},
)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profiles.save(PROFILE, tmp_path / "deep" / "profile.json")
    assert profiles.load(tmp_path / "deep" / "profile.json") == PROFILE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["profile.json"]


def test_a_profile_replaces_no_link_and_no_pipe(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("target")
    for _ in range(2):  # a link to nothing, and to a file
        profiles.save(PROFILE, link)
        assert link.is_symlink()
        assert profiles.load(tmp_path / "target") == PROFILE
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    profiles.save(PROFILE, pipe)
    assert pipe.is_fifo()
    assert os.read(reading, 1 << 16).decode() == PROFILE.to_json()
    os.close(reading)
    with pytest.raises(IsADirectoryError):
        profiles.save(PROFILE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_measurements_of_another_version_are_left_out() -> None:
    """The CPU's attention over keys and values in host memory was measured once."""
    document = json.loads(PROFILE.to_json())
    document["attention"]["64 x 8:2"]["host_kv_bytes"] = [1e9, 2e9]
    document["products"]["Q4_0 1024x512"]["npu_flops"] = [1e9]
    assert Profile.from_json(json.dumps(document)) == PROFILE


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
        {"fingerprint": {}},
        {"fingerprint": {"device": 5}},
        {"copies": {"piece_bytes": [1, "4M"], "h2d_pinned": [1, 2]}},
        {"disk": {"read_bytes": [1 << 20], "rate": ["fast"]}},
        {"disk": {"read_bytes": 1 << 20, "rate": 1e9}},
        {"disk": {"read_bytes": [float("inf")], "rate": [1e9]}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "tokens": 1}}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "h2d_beside_cpu": "fast"}}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "h2d_beside_cpu": -1.0}}},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "cpu_beside_copies": float("nan")}}},
        {"fingerprint": {"device": "CUDA0", "cores": float("nan")}},
        {"fingerprint": {"device": "CUDA0", "cores": [8]}},
        {"fingerprint": {"device": "\ud800"}},
        {"host_memory": {"dram": [1e9, float("nan")]}},
        {"handoff_s": 1e308},
        {"products": {"Q4_0 8x8": {**dataclasses.asdict(PRODUCT), "tokens": [t + 3 for t in PRODUCT.tokens]}}},
        {"products": {"Q4_0 ²x8": dataclasses.asdict(PRODUCT)}},
        {"schema_version": "2"},
    ],
)
def test_a_bad_profile_is_refused(spoil: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE.to_dict(), **spoil}))
    with pytest.raises(BadArgument, match=re.escape(str(path))):
        profiles.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema_version": 2}', "[" * 100_000])
def test_what_is_no_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(BadArgument, match="not a profile"):
        profiles.load(path)
    with pytest.raises(BadArgument, match="cannot read"):
        profiles.load(tmp_path / "missing.json")


def test_kinds_are_what_one_product_reads(model_path: Path, moe_path: Path) -> None:
    assert profiles.kinds_of(read_model(model_path))[0] == Kind("Q4_1", 1536, 576)
    # A token uses two of eight experts, so the rows of both count.
    kinds = profiles.kinds_of(read_model(moe_path))
    assert kinds[0] == Kind("Q4_1", 2 * 1536, 576, 2, 8)
    assert any(kind.n_used == 0 for kind in kinds)  # for all that are no experts
    assert profiles.heads_of(read_model(model_path)) == (64, 9, 3)


def test_rates_are_those_of_the_nearest_weights() -> None:
    one, many = np.array([1.0, 16.0]), np.array([4.0, 10_000.0])
    seconds = PROFILE.seconds_per_weight(Kind("Q4_0", 1024, 512), one, on_cpu=True)
    assert seconds == pytest.approx([2 / 1e9, 2 * 16 / 1e10])
    between, beyond = PROFILE.seconds_per_weight(Kind("Q4_0", 64, 64), many, on_cpu=False)
    assert 2 * 4 / 1e12 < between < 2 * 4 / 1e11
    assert beyond == pytest.approx(2 * 10_000 / 1e13)
    # For a type that was not measured: the same bytes/s with one column, the same operations/s with many.
    one_byte = 1e9 * (18 / 32) / 2
    assert PROFILE.seconds_per_weight(Kind("F16", 64, 64), one, on_cpu=True)[0] == pytest.approx(2 / one_byte)
    assert PROFILE.seconds_per_weight(Kind("F16", 64, 64), many, on_cpu=True)[1] == pytest.approx(2e4 / 1e11)
    plain = dataclasses.replace(PROFILE, products={})
    assert plain.seconds_per_weight(Kind("F16", 8, 8), one, on_cpu=True) == pytest.approx([2 / 4e9, 2 * 16 / 6e9])


def test_experts_have_rates_of_their_own() -> None:
    experts = dataclasses.replace(PRODUCT, gpu_flops=(1e11, 2e11, 3e11))
    both = dataclasses.replace(PROFILE, products={"Q4_0 1024x512": PRODUCT, "Q4_0 2048x512 2/8": experts})
    for kind, rate in ((Kind("Q4_0", 1024, 512, 2, 8), 2e11), (Kind("Q4_0", 2048, 512), 1e12)):
        assert both.seconds_per_weight(kind, np.array([16.0]), on_cpu=False) == pytest.approx([2 * 16 / rate])
    only = dataclasses.replace(PROFILE, products={"Q4_0 1024x512": PRODUCT})  # by an older version
    dense = only.seconds_per_weight(Kind("Q4_0", 1024, 512, 2, 8), np.array([16.0]), on_cpu=False)
    assert dense == pytest.approx([2 * 16 / 1e12])


@pytest.mark.parametrize("name", ["Q4_0 1024", "Q9 1x1", "Q4_0 0x8", "Q4_0 8x8 0/8", "Q4_0 8x8 2", "Q4_0 8x8 2/8 "])
def test_what_is_no_kind_is_refused(name: str) -> None:
    with pytest.raises(BadArgument, match="not a kind of weights"):
        profiles.parse_kind(name)


def test_a_kind_survives_its_name() -> None:
    for kind in (Kind("Q4_0", 1024, 512), Kind("Q4_0", 2048, 512, 2, 8)):
        assert profiles.parse_kind(profiles.kind_name(kind)) == kind


def test_a_disturbed_measurement_of_a_large_matrix_does_not_count() -> None:
    """The CPU does not read a large matrix more slowly than a small one. Small ones may be slower."""
    (product,) = PROFILE.products.values()
    one = np.array([1.0])
    for large, small, expected in ((1e9, 2e9, (2e9, 2e9)), (2e9, 1e9, (2e9, 1e9))):
        products = {
            name: dataclasses.replace(product, cpu_flops=(rate, *product.cpu_flops[1:]))
            for name, rate in (("Q4_0 4096x4096", large), ("Q4_0 512x512", small))
        }
        profile = dataclasses.replace(PROFILE, products=products)
        found = [2 / profile.seconds_per_weight(Kind("Q4_0", n, n), one, on_cpu=True)[0] for n in (4096, 512)]
        assert found == pytest.approx(expected)


def test_a_model_sees_the_rates_of_its_weights(model_path: Path) -> None:
    seen = PROFILE.seen_by(read_model(model_path))
    assert seen.cpu_gemv == pytest.approx(1e9 / 2 * 18 / 32)  # from Q4_0: 18 bytes for 32 weights
    assert (seen.cpu_flops, seen.gpu_flops) == (1e11, 1e13)
    assert seen.memory == 7.8e9  # CPU and copies together
    assert PROFILE.attention_rates((64, 8, 2), 1024) == pytest.approx((1e9, 1e12))
    assert PROFILE.attention_rates((64, 8, 2), 2896.3) == pytest.approx((2e9, 2e12**0.5 * 1e12**0.5), rel=1e-3)
    assert PROFILE.attention_rates((128, 8, 2), 1024) == (PROFILE.gpu_gemv, PROFILE.gpu_flops)


def test_memory_serves_both_but_not_less_than_one() -> None:
    assert dataclasses.replace(PROFILE, dram=8e9).memory == 10e9
    assert dataclasses.replace(PROFILE, dram=1e9).memory == 4e9  # the measured rate of the CPU alone


def test_profiles_come_with_the_package() -> None:
    assert {"laptop-rtx-4060-8gb", "desktop-rtx-5090-32gb", "h100-80gb-pcie5-16c"} <= set(profiles.names())
    for name in profiles.names():
        profile = profiles.load(name)
        assert profile.fingerprint["device"] == "CUDA0"
        if "rtx" in name:  # it was not measured, so each figure has its source
            assert not profile.products
            assert set(profile.sources) == {
                name for name, value in profile.to_dict().items() if isinstance(value, float)
            }
    with pytest.raises(BadArgument, match="desktop-rtx-3060-12gb"):
        profiles.load("desktop-rtx-3060")
