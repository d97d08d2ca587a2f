"""frameshard bench --vs: llama.cpp's best setting within a budget is found with few runs."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from frameshard.cli.equal_vram import Finder, Search
from frameshard.cli.upstream import Program, Setting, attention_on_gpu
from frameshard.engine.nvml import NvmlObserver
from frameshard.errors import FrameshardError
from frameshard.plan.model import Model, read_model
from frameshard.plan.workload import Workload
from test_bench import in_vram

STAND_INS = Path(__file__).parent / "stand_ins"
MIB = 1 << 20


# ---- the search alone ------------------------------------------------------------------------------------------------


def searched(sizes: Sequence[int], peaks: Sequence[int], budget: int, overhead: int) -> tuple[int | None, int]:
    """The result of a search, and the number of its runs."""
    search, ran = Search(sizes, budget, overhead), set[int]()
    while (index := search.next) is not None:
        assert index not in ran
        ran.add(index)
        if peaks[index] <= budget:
            search.fits(index, peaks[index])
        else:
            search.does_not_fit(index)
    return search.best, len(ran)


SIZES = [0, *(2000 + 300 * i for i in range(40))]
PEAKS: dict[str, Callable[[int, int], int]] = {
    "as assumed": lambda _, size: size + 1500,
    "less": lambda _, size: size + 700,
    "much more": lambda _, size: size + 4000,
    "staged until all is there": lambda i, size: size + (700 if i == 40 else 1100),
    "each layer takes more": lambda i, size: size + 800 + 40 * i,
    "each layer takes less": lambda i, size: size + 800 - 15 * i,
    "in large pieces": lambda _, size: -(-(size + 900) // 256) * 256,
}


@pytest.mark.parametrize("how", PEAKS)
@pytest.mark.parametrize("budget", [500, 1000, 2500, 3500, 4096, 8192, 12288, 14000, 20000])
def test_the_last_that_fits_is_found_in_few_runs(how: str, budget: int) -> None:
    peaks = [PEAKS[how](i, size) for i, size in enumerate(SIZES)]
    best, runs = searched(SIZES, peaks, budget, 1500)
    fitting = [i for i, peak in enumerate(peaks) if peak <= budget]
    assert best == (fitting[-1] if fitting else None)
    assert runs <= 7
    if best is not None:  # the next budget begins with what this one has shown
        again, runs = searched(SIZES, peaks, budget, peaks[best] - SIZES[best])
        assert again == best
        assert runs <= 2


def test_what_does_not_fit_by_far_takes_one_run() -> None:
    assert searched(SIZES, [size + 3000 for size in SIZES], 2048, 1500) == (None, 1)


def test_what_fits_as_a_whole_takes_one_run() -> None:
    assert searched(SIZES, [size + 1000 for size in SIZES], 24000, 1500) == (40, 1)


# ---- with processes --------------------------------------------------------------------------------------------------


KV_BYTES = 3072 * 2 * 3 * 64 * 2
"""Of a layer of SmolLM2, with 3 KV heads of 64 values, for 3,072 tokens."""


SAYS = ("weights", "fixed", "per_ubatch_token", "per_prompt_token", "staged", "attention_pays")


class Machine:
    """A GPU, and the stand-in of llama.cpp's program for one model."""

    def __init__(
        self, folder: Path, model: Model, fixed_mib: int, mib_per_512: int, staged_mib: int = 0, pays: float = 0.5
    ) -> None:
        self.model = model
        self.vram = folder / "vram"
        self.vram.mkdir()
        self.program = folder / "llama-batched-bench"
        self.program.write_text(f"#!{sys.executable}\n" + (STAND_INS / "batched_bench.py").read_text())
        self.program.chmod(stat.S_IRWXU)
        n = model.n_layer
        self.weights = {
            f"{ngl} {ncmoe} ": in_vram(model, ngl, ncmoe) + KV_BYTES * max(0, min(ngl - 1, n))
            for ngl in [*range(n + 2), 999]
            for ncmoe in range(n + 1 if model.n_expert else 1)
        }
        self.weights |= {f"999 0 {args[3]}": n_bytes for args, n_bytes in attention_on_gpu(model, KV_BYTES * n)}
        self.attention_pays = pays
        self.fixed, self.per_ubatch_token, self.staged = fixed_mib * MIB, mib_per_512 * MIB // 512, staged_mib * MIB
        self.per_prompt_token = 0
        self.whole = max(self.weights.values())
        self.folder = folder
        self.say()
        self.environment = {"STAND_IN": str(folder / "machine.json"), "STAND_IN_VRAM": str(self.vram)}

    def say(self) -> None:
        """Tells the stand-in the sizes."""
        (self.folder / "machine.json").write_text(json.dumps({name: getattr(self, name) for name in SAYS}))

    def peak(self, setting: Setting, n_prompt: int = 0) -> int:
        values = dict(zip(setting.placement[::2], setting.placement[1::2], strict=True))
        weights = self.weights[f"{values['-ngl']} {values.get('-ncmoe', '0')} {values.get('-ot', '')}"]
        staged = self.staged if weights < self.whole else 0
        fixed = self.fixed + n_prompt * self.per_prompt_token
        return weights + fixed + setting.ubatch * self.per_ubatch_token + staged

    def runs(self) -> list[dict[str, Any]]:
        """The arguments of all runs since the last call."""
        file = self.vram / "runs"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Machine, Finder]]:
    spec = importlib.util.spec_from_file_location("pynvml", STAND_INS / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)

    def make(path: Path, workload: Workload, *sizes: int, pays: float = 0.5) -> tuple[Machine, Finder]:
        machine = Machine(tmp_path, read_model(path), *sizes, pays=pays)
        for name, value in machine.environment.items():
            monkeypatch.setenv(name, value)
        program = Program(str(machine.program), machine.model, ("-dev", "CUDA0"), 4, NvmlObserver)
        return machine, Finder(program, workload)

    return make


LONG_PROMPT = Workload(4096, n_prompt=3000, n_generate=1)
LONG_ANSWER = Workload(4096, n_prompt=100, n_generate=2900)


@pytest.mark.parametrize(("workload", "ubatch"), [(LONG_PROMPT, 2048), (LONG_ANSWER, 512)])
def test_dense_layers(
    workload: Workload,
    ubatch: int,
    model_path: Path,
    finder: Callable[..., tuple[Machine, Finder]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A large ubatch leaves less VRAM to the layers: it pays for a long prompt, and not for a long answer."""
    machine, find = finder(model_path, workload, 900, 10, 3)
    budget = (900 + 4 * 10 + 3 + 60) * MIB
    with caplog.at_level(logging.INFO, logger="frameshard"):
        best = find.find(budget)
    assert best is not None
    assert best.ubatch == ubatch
    more = Setting(("-ngl", str(int(best.placement[1]) + 1)), ubatch)
    assert 0 < int(best.placement[1]) <= machine.model.n_layer
    assert machine.peak(best) <= budget < machine.peak(more)
    runs = machine.runs()
    assert len(runs) == len(caplog.messages) <= 14
    with_attention = [each for each in runs if "-ot" in each]
    assert {each["-ub"] for each in with_attention} == {"2048", "512"}
    assert len(runs) - len(with_attention) <= 8
    assert f"llama.cpp at 1003 MiB: {best} peaks at {-(-machine.peak(best) // MIB)} MiB" in caplog.messages
    assert f"llama.cpp at 1003 MiB: {more} takes more" in caplog.messages
    assert {each["-c"] for each in runs} == {"3072"}  # it decides the peak
    kinds = {(each["-npp"], each["-ntg"]) for each in runs}
    if workload is LONG_ANSWER:
        assert kinds == {("100", "1,8")}
    else:  # the whole prompt is read once, because small ubatches are four times as slow
        assert kinds == {("2048", "1,1"), ("2048,3000", "1")}
        whole = [each for each in runs if each["-npp"] != "2048"]
        assert [each["-ub"] for each in whole] == ["2048"]
        assert whole[0]["-ngl"] == best.placement[1]
    # A second budget begins with what the first has shown.
    assert find.find(budget + 10 * MIB) != best
    assert len([each for each in machine.runs() if "-ot" not in each]) <= 6


def test_a_long_prompt_that_takes_more_gets_fewer_layers(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 10, 3)
    machine.per_prompt_token = 20 << 10  # 19 MiB more than one ubatch takes, three layers
    machine.say()
    budget = (900 + 4 * 10 + 3 + 120) * MIB
    best = find.find(budget)
    assert best is not None
    ngl = int(best.placement[1])
    more = Setting(("-ngl", str(ngl + 1)), best.ubatch)
    assert machine.peak(best, 3000) <= budget < machine.peak(more, 3000)
    beyond = Setting(("-ngl", str(ngl + 2)), best.ubatch)
    assert machine.peak(beyond, 2048) <= budget  # as the search found before it read the whole prompt


def test_what_is_slower_is_tried_where_nothing_else_fits_a_long_prompt(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 10, 3)
    machine.per_prompt_token = 22 << 10  # 44 MiB for one ubatch of 2,048, 64 for the prompt
    machine.say()
    best = find.find(995 * MIB)
    assert best is not None
    assert best.ubatch == 512
    assert {(each["-ub"], each["-npp"]) for each in machine.runs()} == {
        ("2048", "2048"),
        ("2048", "2048,3000"),
        ("512", "2048"),
        ("512", "2048,3000"),
    }


def test_attention_of_all_layers_where_that_is_faster(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, LONG_ANSWER, 900, 10, 3, pays=1.5)
    budget = (900 + 4 * 10 + 3 + 130) * MIB
    best = find.find(budget)
    assert best is not None
    ways = [args for args, _ in attention_on_gpu(machine.model, 0)]
    at = ways.index(best.placement)
    assert machine.peak(best) <= budget < machine.peak(Setting(ways[at + 1], best.ubatch))


def test_short_contexts_are_divided_by_layers_alone(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, Workload(256, n_prompt=100, n_generate=9), 900, 10, 3, pays=1.5)
    assert find.find(1100 * MIB) is not None
    assert not [each for each in machine.runs() if "-ot" in each]


def test_experts_then_layers(moe_path: Path, finder: Callable[..., tuple[Machine, Finder]]) -> None:
    machine, find = finder(moe_path, LONG_PROMPT, 500, 0)
    n = machine.model.n_layer
    # All layers, and the experts of three layers.
    with_three = 500 * MIB + machine.weights[f"999 {n - 3} "]
    best = find.find(with_three + 4096)
    assert best is not None
    assert best.placement == ("-ngl", "999", "-ncmoe", str(n - 3))
    # Not even all layers without experts.
    few = 500 * MIB + machine.weights[f"7 {n} "]
    best = find.find(few + 4096)
    assert best is not None
    assert best.placement == ("-ngl", "7", "-ncmoe", str(n))
    # Everything.
    best = find.find(500 * MIB + machine.whole)
    assert best is not None
    assert best.placement == ("-ngl", "999", "-ncmoe", "0")
    assert str(best).startswith("-ngl 999 -ncmoe 0")


def test_nothing_fits(model_path: Path, finder: Callable[..., tuple[Machine, Finder]]) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 20)
    assert find.find(901 * MIB) is None
    runs = [(each["-ngl"], each["-ub"], each["copies"]) for each in machine.runs() if "-ot" not in each]
    assert runs == [("0", "2048", True), ("0", "512", True), ("0", "512", False)]
    # The larger ubatch alone does not fit.
    found = find.find(930 * MIB)
    assert found is not None
    assert found.ubatch == 512


def test_prompts_on_the_cpu_where_copied_weights_have_no_room(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 20, 300)
    budget = 1000 * MIB
    best = find.find(budget)
    assert best is not None
    assert best.ubatch == 512
    assert best.placement[-1] == "--no-op-offload"
    assert str(best).endswith("--no-op-offload -ub 512")
    more = Setting(("-ngl", str(int(best.placement[1]) + 1)), 512)
    machine.staged = 0
    assert machine.peak(more) > budget
    assert not machine.runs()[-1]["copies"]
    # With room for both the GPU computes prompts.
    best = find.find(1300 * MIB)
    assert best is not None
    assert "--no-op-offload" not in best.placement


def test_a_run_above_the_budget_is_stopped(model_path: Path, finder: Callable[..., tuple[Machine, Finder]]) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 20)
    take = f'echo {2000 * MIB} > "$STAND_IN_VRAM/new"; mv "$STAND_IN_VRAM/new" "$STAND_IN_VRAM/$$"'
    machine.program.write_text(f"#!/bin/sh\n{take}\nexec sleep 3000\n")
    assert find.find(1000 * MIB) is None


def test_a_program_that_fails_or_is_not_counted_is_said(
    model_path: Path, finder: Callable[..., tuple[Machine, Finder]]
) -> None:
    machine, find = finder(model_path, LONG_PROMPT, 900, 20)
    machine.program.write_text("#!/bin/sh\necho no such device >&2\nexit 1\n")
    with pytest.raises(FrameshardError, match=r"failed: no such device"):
        find.find(1000 * MIB)
    machine.program.write_text('#!/bin/sh\necho \'{"tg": 1, "t_pp": 1.0, "speed_tg": 1.0}\'\n')
    with pytest.raises(FrameshardError, match=r"NVML does not count the VRAM of .*llama-batched-bench"):
        find.find(1000 * MIB)


BENCH = """
import sys
from frameshard.cli import comparison, main
comparison.counted = lambda device: True
sys.exit(main(sys.argv[1:]))
"""
"""The command, on the emulated device as if NVML counted VRAM there."""


def bench(path: Path, machine: Machine, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BENCH, "bench", "--model", str(path), "--device", "emulated", "--threads", "1"]
    command += ["--prompt", "32", "--generate", "4", "--repeat", "2", "--vram-budget", "50,60"]
    command += ["--vs", str(machine.program), *args]
    paths = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | machine.environment | {"PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_command_measures_with_what_it_found(shallow_model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, read_model(shallow_model), 52, 1)
    result = bench(shallow_model, machine, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["equal_vram"] is True
    small, large = document["rows"]
    assert small["upstream"] == dict.fromkeys(("placement", "ttft_s", "decode_tps", "peak_nvml_mb"))
    assert "upstream_by_weights" not in large
    theirs = large["upstream"]
    assert theirs["decode_ratio"] == large["decode_tps"] / theirs["decode_tps"]
    assert theirs["ttft_ratio"] == theirs["ttft_s"] / large["ttft_s"]
    assert 0 < theirs["peak_nvml_mb"] <= 60
    assert len(theirs["runs"]["ttft_s"]) == 2
    runs = machine.runs()
    chosen = theirs["placement"].split()
    for each in runs[-2:]:  # those that are measured, after the search
        assert each["-ntg"] == "1,4"
        assert [each["-ngl"], each["-ub"]] == [chosen[1], chosen[3] if "-ub" in chosen else "2048"]
    assert f"llama.cpp at 60 MiB: {theirs['placement']} peaks at {theirs['peak_nvml_mb']:.0f} MiB" in result.stderr


def test_both_allowances_are_measured_in_turn(shallow_model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, read_model(shallow_model), 52, 1)
    result = bench(shallow_model, machine, "--vs-budget", "both", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["equal_vram"] is True
    small, large = document["rows"]
    assert small["upstream"]["placement"] is None
    assert large["upstream"]["peak_nvml_mb"] <= 60
    for row in (small, large):  # on the emulated device llama.cpp runs on the CPU
        assert row["upstream_by_weights"]["placement"] == "-ngl 0"
        assert row["upstream_by_weights"]["decode_ratio"] > 0
    measured = [each for each in machine.runs() if each["-ntg"] == "1,4"]
    held = large["upstream"]["placement"].split()[1]
    assert [each["-ngl"] for each in measured[-6:]] == ["0", held, "0"] * 2
    result = bench(shallow_model, machine, "--vs-budget", "weights", "--json", "--repeat", "1")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["equal_vram"] is False
    assert all(row["upstream"]["placement"] == "-ngl 0" for row in document["rows"])


def test_the_table_says_what_does_not_fit(shallow_model: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, read_model(shallow_model), 80, 1)
    result = bench(shallow_model, machine, "--markdown", "--repeat", "1", "--vs-budget", "both")
    assert result.returncode == 0, result.stderr
    assert "whole process is held to the budget" in " ".join(result.stdout.split())
    assert result.stdout.count("does not fit") == 2
    lines = [line.strip("| \n").split(" | ") for line in result.stdout.splitlines() if line.startswith("|")]
    at = lines[0].index("llama.cpp")
    assert lines[0][at + 6] == "llama.cpp, for weights"
    for cells in lines[2:]:
        assert cells[at : at + 6] == ["does not fit", *["-"] * 5]
        assert cells[at + 6] == "-ngl 0"
        assert all(float(cells[at + i]) > 0 for i in (7, 8, 10, 11))
