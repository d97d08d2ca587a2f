"""The planner and the shard device have the same pieces and sizes: one from the header, the other in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launches import estimates, exact, load

import forks
import tiny_models
from frameshard import native
from frameshard.errors import BadArgument, BudgetBelowFloor
from frameshard.plan.memory import NOT_ESTIMATED


def launch(what: Callable[..., dict[str, Any]], path: Path, *arguments: float | str) -> dict[str, Any]:
    """Calls a function of launches.py in a process of its own."""
    with ProcessPoolExecutor(1, forks.CONTEXT) as process:
        return process.submit(what, str(path), *arguments).result(300)


def check(figures: dict[str, int]) -> None:
    # The planner's figures are exact, but for llama.cpp's compute buffers: these are an upper bound.
    assert figures["floor"] == figures["estimated_floor"]
    assert figures["device_floor"] <= figures["planned_floor"] <= 1.5 * figures["device_floor"]
    assert 0 < figures["whole"] == figures["estimated_whole"]
    assert figures["kv"] <= figures["whole"]
    assert figures["used"] <= figures["budget"]
    # The numbers may differ a little. Tensors of a shard may be in another order, so the last resident slab may end
    # elsewhere. And there is no new plan for a small change of the context, as after the warm-up.
    assert figures["planned_shards"] == pytest.approx(figures["resident_shards"], abs=figures["shards_of_a_slab"])
    assert figures["planned_bytes"] == pytest.approx(
        figures["resident_bytes"], abs=figures["slab"] + figures["budget"] // 16
    )
    # An estimate may be a little too large, so that a budget made from it is enough.
    true, estimated = figures["fixed"] + figures["whole"], figures["estimated"] + figures["estimated_whole"]
    assert 0.95 * true <= estimated <= 1.6 * true


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_layout_is_the_devices_own(name: str, kv_type: str, tiny_model: Callable[[str], Path]) -> None:
    """lay_out() computes the same numbers from a header as the device has in memory, to the byte."""
    figures = launch(exact, tiny_model(name), kv_type)
    for what, (computed, held) in figures.items():
        assert computed == held, what
    assert figures["all resident"] == (False, False)


def test_shapes_that_no_file_has_are_refused() -> None:
    sound = native.WeightShape("blk.0.ffn_up.weight", 0, 0, (256, 64))
    assert len(native.lay_out("CUDA0", [sound]).slabs) == 0  # a tensor of 64 KiB is in the core
    for change in (
        {"shape": (0, 64)},
        {"shape": (1 << 40, 1 << 40)},
        {"ggml_type": 4},
        {"ggml_type": 2, "shape": (33,)},
    ):
        with pytest.raises(BadArgument, match="weight 1 has"):
            native.lay_out("CUDA0", [sound, sound._replace(**change)])
    with pytest.raises(BadArgument, match="weight 1 has"):
        native.lay_out("CUDA0", [sound._replace(shard=1), sound])
    with pytest.raises(BadArgument, match="KV tensor 0"):
        native.lay_out("CUDA0", [sound], kv=[native.KvShape(0, 1, 256, 512, 1, used=513)])


def test_room_for_no_ring_is_refused() -> None:
    layout = native.lay_out("CUDA0", [native.WeightShape(f"blk.{i}.w", i, 1, (4096, 4096)) for i in range(4)])
    assert layout.unit_bytes == 2 << 20
    assert layout.fit(layout.arena_bytes, 0) == (0, len(layout.slabs))
    assert layout.fit(layout.min_ring_bytes + 1, 0) == (layout.min_ring_bytes, 0)
    with pytest.raises(BudgetBelowFloor):
        layout.fit(layout.min_ring_bytes - 1, 0)


@pytest.mark.parametrize("name", sorted({*tiny_models.ARCHS} - NOT_ESTIMATED))
def test_tiny_models(name: str, tiny_model: Callable[[str], Path]) -> None:
    check(launch(load, tiny_model(name), 0.5))


@pytest.mark.parametrize("name", sorted({*tiny_models.ARCHS} - NOT_ESTIMATED))
def test_a_launch_with_default_options(name: str, tiny_model: Callable[[str], Path]) -> None:
    """The floor has room for small steps only, and the logits of all sequences."""
    figures = launch(estimates, tiny_model(name), 4096, 4, 0, 0)
    launched, estimated = figures["floor"]
    assert launched <= estimated <= 1.5 * launched
    assert figures["step"] == (4096, 4096)
    assert figures["graph"][0] <= figures["graph"][1]


@pytest.mark.parametrize("name", ["falcon-h1", "kimi-linear", "lfm2", "mamba2", "qwen35moe", "rwkv6", "rwkv7"])
def test_recurrent_states_of_many_sequences(name: str, tiny_model: Callable[[str], Path]) -> None:
    launched, estimated = launch(estimates, tiny_model(name), 512, 16, 64, 0)["floor"]
    assert launched <= estimated <= 1.5 * launched


def test_a_step_that_sequences_share_unevenly(tiny_model: Callable[[str], Path]) -> None:
    launched, estimated = launch(estimates, tiny_model("gemma3n"), 2048, 16, 33, 0)["floor"]
    assert launched <= estimated <= 1.5 * launched


def test_a_limit_on_host_memory_makes_steps_smaller(model_path: Path) -> None:
    figures = launch(estimates, model_path, 32768, 1, 0, 1 << 30)
    assert figures["step"] == (512, 512)
    assert figures["floor"][0] <= figures["floor"][1] <= 1.1 * figures["floor"][0]


def test_the_demo_model(model_path: Path) -> None:
    check(launch(load, model_path, 0.4))


def test_experts(moe_path: Path) -> None:
    check(launch(load, moe_path, 0.4))


def test_wide_experts(moe_path: Path) -> None:
    """Two experts of a token are wider than the model: their products take most of a step."""
    figures = launch(estimates, moe_path, 512, 1, 0, 0)
    for launched, estimated in (figures["floor"], figures["graph"]):
        assert launched <= estimated <= 1.2 * launched
