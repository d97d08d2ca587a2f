"""Each result has its origin, and the page of results is up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).parents[1]
TOOL = REPO / "profiles" / "tools" / "results.py"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOL.parent)
    spec = importlib.util.spec_from_file_location("results", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_result_says_where_it_is_from(results: ModuleType) -> None:
    assert len(results.files()) > 20
    for path in results.files():
        results.kind(path)
        for result in results.read(path):
            meta = result["meta"]
            assert set(meta) == set(results.META), path
            assert all(isinstance(value, str) and value for value in meta.values()), path


def test_runs_have_names_of_letters(results: ModuleType) -> None:
    made = [{"meta": {"commit": str(i // 2)}} for i in range(108)]
    names = results.runs(made)
    assert [names[2 * i] for i in (0, 25, 26, 51, 52, 53)] == ["a", "z", "aa", "az", "ba", "bb"]
    assert all(names[2 * i] == names[2 * i + 1] for i in range(54))


def test_the_page_and_the_chart_are_fresh() -> None:
    checked = subprocess.run([sys.executable, str(TOOL), "render", "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_no_cell_holds_several_figures(results: ModuleType) -> None:
    """A column has one meaning, so there is no cell such as "0.297, 0.281, 0.270" or "2.01 (6.78 x)"."""
    page = results.PAGE.read_text()
    cells = [cell.strip() for line in page.splitlines() if line.startswith("|") for cell in line.strip("|").split("|")]
    assert len(cells) > 1000
    assert [cell for cell in cells if re.search(r"\d, \d|\d \(\d", cell)] == []


def test_a_recorded_command_has_its_meta(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "states-test.json"
    command = [sys.executable, str(TOOL), "record", str(path), "--", sys.executable, "-c", "print('{\"figure\": 1}')"]
    for append in ([], ["--append"]):
        subprocess.run([*command[:3], *append, *command[3:]], cwd=REPO, check=True, timeout=300)
    first, second = json.loads(path.read_text())
    assert first["figure"] == second["figure"] == 1
    assert set(first["meta"]) == {"commit", "date", "machine", "driver", "command"}
    assert first["meta"]["command"].endswith("""-c 'print('"'"'{"figure": 1}'"'"')'""")


def test_rows_at_equal_vram_have_tables_of_their_own(results: ModuleType) -> None:
    (old, *_) = results.read(REPO / "profiles" / "h100-80gb-pcie5-16c" / "bench-minitron-8b-f16.json")
    row = old["rows"][0]
    unfit = {key: row[key] for key in row if not key.endswith("_ratio")}
    unfit["upstream"] = dict.fromkeys(("placement", "ttft_s", "decode_tps", "peak_nvml_mb"))
    above = row | {"upstream": row["upstream"] | {"peak_nvml_mb": row["budget_mb"] + 27}}
    held = old | {"equal_vram": True, "rows": [unfit, above]}
    lines = results.bench([old, held])
    assert lines[-len(results.bench([old])) :] == results.bench([old])
    assert lines[0] == "Time to first token, both within the budget:"
    of_old = lines.index("Time to first token, llama.cpp above the budget:")
    cells = [line.strip("| ").split(" | ") for line in lines[:of_old] if line.startswith("| 1,024")]
    assert len(cells) == 4
    assert cells[0][7:9] == ["-", "-"]  # llama.cpp's time, and the speedup
    assert cells[2][6:] == ["-", "-", results.number(row["peak_nvml_mb"]), "-", "does not fit", "a"]
    assert cells[3][9].endswith("(**27 above**)")
    # A row that was measured with both allowances is in both tables.
    both = old | {"equal_vram": True, "rows": [unfit | {"upstream_by_weights": row["upstream"]}]}
    lines = results.bench([both])
    of_weights = lines.index("Time to first token, llama.cpp above the budget:")
    assert results.bench([old | {"rows": [row]}]) == lines[of_weights:]
    assert sum(line.count("does not fit") for line in lines[:of_weights]) == 1


def test_the_readme_quotes_the_files(results: ModuleType) -> None:
    """The figures in the table of the README are those of the result files."""
    readme = (REPO / "README.md").read_text()

    def figures(path: str) -> dict[str, Any]:
        (found,) = results.read(REPO / "profiles" / path)
        return found

    changes = figures("h100-80gb-pcie5-16c/negotiate-minitron-8b-f16.json")["rows"]
    for name in ("decode shrink released", "prefill shrink released"):
        row = changes[name]
        assert f"{row['p50_ms']:.1f} ms median, {row['max_ms']:.1f} ms at most of {row['n']}" in readme
    states = figures("vm-2c/states-smollm2.json")
    parked, hibernated = (states[state]["next_token_s"] for state in ("parked", "hibernated"))
    assert f"{parked['median'] * 1e3:.0f} ms median, {parked['max'] * 1e3:.0f} ms at most of 5" in readme
    assert f"{hibernated['median']:.1f} s median, {hibernated['max']:.1f} s at most of 5" in readme
    film = json.loads((REPO / ".assets" / "film.json").read_text())
    assert f"from {film['full_mb']:.0f} to {film['changes'][0][2]:.0f} MiB" in " ".join(readme.split())


def test_the_page_of_papers_quotes_the_predictions(results: ModuleType) -> None:
    text = " ".join((REPO / "docs" / "paper.md").read_text().split())
    systems = {each["system"]: each for each in results.read(REPO / "profiles" / "paper" / "evaluation-predicted.json")}

    def beside(system: str, rates: str, figure: str) -> dict[str, Any]:
        (row,) = (
            row for row in systems[system]["beside_published"] if (row["rates"], row["figure"]) == (rates, figure)
        )
        return row

    def off(figure: str) -> tuple[str, int]:
        errors = [row["fitted"] for row in systems["cli3"]["calibration"] if row["figure"] == figure]
        medians = sorted(round(100 * error["median"]) for error in errors)
        return f"{medians[0]} to {medians[-1]} %", round(100 * max(error["most"] for error in errors))

    (decode, most_decode), (prompts, most_prompts) = off("decode"), off("prefill")
    assert (
        f"the fit is off by {decode} for decoding (median; {most_decode} % at most) and {prompts} for prompts "
        f"({most_prompts} % at most)"
    ) in text
    tps, e2e = (beside("cli3", "fitted", figure) for figure in ("tps", "e2e_s"))
    assert (
        f"would reach {tps['median']:.2f} times their tokens/s in the median of {tps['cells']} cells "
        f"({tps['least']:.2f} to {tps['most']:.2f}), and {e2e['median']:.2f} of their end-to-end latency "
        f"({e2e['least']:.2f} to {e2e['most']:.2f})"
    ) in text
    cli3, cli2, cli1 = (beside(system, "spec_sheet", "tps")["median"] for system in ("cli3", "cli2", "cli1"))
    assert f"are {cli3:.2f}, {cli2:.2f} and {cli1:.2f} times theirs on cli3, cli2 and cli1" in text


@pytest.mark.parametrize("printed", ['{"error": {"name": "bad_argument"}}', ""])
def test_a_failed_command_leaves_the_results(printed: str, tmp_path: Path) -> None:
    path = tmp_path / "machine" / "states-test.json"
    path.parent.mkdir()
    path.write_text("[]")
    command = [sys.executable, str(TOOL), "record", str(path), "--", sys.executable, "-c", f"print({printed!r})"]
    failed = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert failed.returncode == 1
    assert "is left as it was, because the command failed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert path.read_text() == "[]"


def test_measured_speculation_is_shown(results: ModuleType) -> None:
    way = {"tps": 20.5, "ratio": 1.5, "tokens_per_step": 1.75, "runs_tps": [20.5] * 3}
    row = {"budget_mb": 2048, "steps": {}, "greedy": {"off": way, "auto": way}, "drawn": {"off": way}}
    shown = results.speculation([{"model": "m.gguf", "device": "CUDA0", "mode": "planned", "budgets": [row]}])
    assert shown[0] == "m.gguf on CUDA0, measured:"
    assert "| 2,048 | greedy | auto | 20.5 | 1.50 | 1.75 | 3 |" in shown


def test_what_nvml_does_not_count_is_not_shown(results: ModuleType) -> None:
    folder = REPO / "profiles" / "h100-80gb-pcie5-16c"
    (images, *_) = results.read(folder / "bench-image-qwen2.5-vl-7b.json")
    row = next(row for row in images["rows"] if "error" not in row)
    for changed in ({"peak_nvml_mb": None}, {"budget_mb": None}):
        assert not any("above" in line for line in results.bench_image([images | {"rows": [row | changed]}]))
    (changes,) = results.read(folder / "negotiate-minitron-8b-f16.json")
    counts = dict.fromkeys(("nvml_samples", "nvml_samples_above_budget"))
    assert results.negotiate([changes | counts])[-2].endswith("not sampled by NVML.")


def test_the_agreement_of_processors_is_shown(results: ModuleType) -> None:
    (found, *_) = results.read(REPO / "profiles" / "h100-80gb-pcie5-16c" / "verify-minitron-4b-f16-vulkan.json")
    (line,) = (line for line in results.verify([found]) if line.startswith("Reference"))
    kl = results.number(found["processors"]["kl"])
    assert line.endswith(f"Beside it, the device with all weights resident: same token 1.000, KL {kl}.")
