"""What plans know of layers with a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from frameshard.plan.memory import DRIVER_BYTES, estimate_context, estimate_steps, kv_bytes
from frameshard.plan.model import Model, read_model
from frameshard.plan.plans import plan_workload
from frameshard.plan.profile import load
from frameshard.plan.windows import SLIDING_STEP, sliding_cells
from frameshard.plan.workload import Workload

TOOLS = Path(__file__).parents[2] / "profiles" / "tools"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("gemma") / "gemma3-12b.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        tool = __import__("synth_gguf")
        tool.write(tool.SHAPES["gemma3-12b-q4_0"], str(path), with_weights=False)
    return read_model(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemma3", {0, 2}),
        ("gpt-oss", {0, 2}),
        ("gemma4", {0, 1, 2}),
        ("llama", set()),
    ],
)
def test_the_layers_with_a_window(name: str, expected: set[int], tiny_model: Callable[[str], Path]) -> None:
    assert read_model(tiny_model(name)).sliding_layers == expected


def test_every_sixth_layer_of_gemma_3_keeps_all_cells(gemma: Model) -> None:
    assert set(range(48)) - gemma.sliding_layers == {5, 11, 17, 23, 29, 35, 41, 47}


def test_fewer_cells_are_kept_where_that_spares_half_of_them(gemma: Model) -> None:
    cells = 1024 + SLIDING_STEP
    assert sliding_cells(gemma, 2 * cells, 0, exact=False) == cells
    assert sliding_cells(gemma, 2 * cells - 256, 0, exact=False) == 0
    assert sliding_cells(gemma, 2 * cells, 512, exact=False) == 1536
    assert sliding_cells(gemma, 1 << 20, 0, exact=True) == 0


def test_a_long_context_takes_a_quarter(gemma: Model) -> None:
    workload = Workload(1 << 15, 32_000, n_ubatch=0)
    few, all_cells = (
        estimate_context(gemma, "CUDA0", each) for each in (workload, dataclasses.replace(workload, exact=True))
    )
    of_a_layer = 2 * 8 * 256 * 2  # keys and values of 8 heads of 256 numbers of 16 bits
    assert few.used == pytest.approx(of_a_layer * (8 * 32_000 + 40 * 3072), rel=0.03)
    assert all_cells.used == pytest.approx(of_a_layer * 48 * 32_000, rel=0.03)
    assert kv_bytes(gemma, 32_000, n_sliding=3072) == pytest.approx(few.used, rel=0.03)
    assert estimate_steps(gemma, "CUDA0", workload).most_tokens == SLIDING_STEP


def test_a_long_context_costs_less_time(gemma: Model) -> None:
    workload = Workload(1 << 15, 32_000, n_ubatch=512)
    few, all_cells = (
        plan_workload(gemma, load("h100-80gb-pcie5-16c"), 6 << 30, each, DRIVER_BYTES)
        for each in (workload, dataclasses.replace(workload, exact=True))
    )
    assert few.predicted_decode_tps() > 1.5 * all_cells.predicted_decode_tps()
