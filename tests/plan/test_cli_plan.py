"""frameshard plan, profile and models on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models
from frameshard import models
from frameshard.cli.profile import table
from frameshard.plan import profile as profiles
from frameshard.plan import routing
from frameshard.plan.model import read_model
from frameshard.plan.profile import Profile


def frameshard(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "frameshard", *args], capture_output=True, text=True, timeout=300)


def document(*args: str) -> dict[str, object]:
    result = frameshard(*args, "--json")
    assert result.returncode == 0, result.stderr
    out: dict[str, object] = json.loads(result.stdout)
    return out


@pytest.fixture
def h100(tmp_path: Path) -> str:
    path = tmp_path / "h100.json"
    profiles.save(Profile({"device": "CUDA0"}, 55e9, 50e9, 119e9, 112e9, 2.9e12, 1.2e12, 400e12, 17e-6), path)
    return str(path)


def test_plan_for_another_machine_measures_nothing(model_path: Path, h100: str) -> None:
    args = ("plan", "--model", str(model_path), "--profile", h100, "--ctx", "1024", "--parallel", "1")
    plan = document(*args, "--vram-budget", "floor,600,1GiB,full")
    rows = plan["rows"]
    assert isinstance(rows, list)
    assert plan["device"] == "CUDA0"
    assert [row["budget_mb"] for row in rows[1:3]] == [600.0, 1024.0]
    assert rows[0]["budget_bytes"] == rows[0]["floor_bytes"]
    assert rows[-1]["budget_bytes"] == rows[-1]["full_bytes"]
    assert rows[-1]["ring_bytes"] == 0
    rates = [row["predicted_decode_tps"] for row in rows]
    assert rates == sorted(rates)
    for row in rows:
        assert row["predicted_decode_tps"] <= row["bound_decode_tps"]
        assert row["predicted_ttft_s"] >= row["bound_ttft_s"]

    table = frameshard(*args, "--vram-budget", "600,full")
    assert table.returncode == 0, table.stderr
    assert "llama, 30 layers" in table.stdout.splitlines()[0]
    assert "floor about" in table.stdout
    unlimited = frameshard(*args, "--vram-budget", "0").stdout.splitlines()[-1]
    assert unlimited == table.stdout.splitlines()[-1]
    heads, first, second = table.stdout.splitlines()[-3:]
    assert heads.split()[0] == "budget"
    assert first.split()[0] == "600"
    assert second.split()[0] == f"{rows[-1]['budget_mb']:.0f}"


def test_budgets_below_the_floor_are_shown_beside_others(deep_model: Path, h100: str, tmp_path: Path) -> None:
    """This also holds if ``--ubatch`` is given, and in the picture."""
    args = ("plan", "--model", str(deep_model), "--profile", h100, "--vram-budget", "1,520,600,full")
    plan = document(*args)
    rows = plan["rows"]
    assert isinstance(rows, list)
    assert [row["fits"] for row in rows] == [False, False, True, True]
    assert {row["floor_bytes"] for row in rows} == {plan["floor_bytes"]}
    assert set(rows[0]) == {"budget_mb", "fits", "budget_bytes", "floor_bytes", "full_bytes"}
    picture = tmp_path / "plan.svg"
    table = frameshard(*args, "--plot", str(picture), "--ubatch", "256")
    assert table.returncode == 0, table.stderr
    lines = [line for line in table.stdout.splitlines() if "below the floor of about" in line]
    assert [line.split()[0] for line in lines] == ["1", "520"]
    assert "<svg" in picture.read_text()


def test_plan_for_a_machine_by_name_and_its_plot(model_path: Path, tmp_path: Path) -> None:
    args = ("plan", "--model", str(model_path), "--profile", "laptop-rtx-4060-8gb", "--vram-budget", "full")
    row = document(*args)["rows"]
    picture = tmp_path / "plan.svg"
    result = frameshard(*args, "--plot", str(picture))
    assert isinstance(row, list)
    assert row[0]["predicted_decode_tps"] > 100
    assert "not measured" in result.stdout
    assert "<svg" in picture.read_text()
    refused = frameshard(*args, "--plot", str(tmp_path / "no" / "plan.svg"))
    assert "no folder" in refused.stderr


def test_plan_knows_which_experts_were_chosen(
    moe_path: Path, h100: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = ("plan", "--model", str(moe_path), "--profile", h100, "--ctx", "512", "--vram-budget", "900")

    def rate() -> float:
        rows = document(*args)["rows"]
        assert isinstance(rows, list)
        return float(rows[0]["predicted_decode_tps"])

    before, model = rate(), read_model(moe_path)
    routing.save(model, {f"blk.{i}.experts": [500, 500, 0, 0, 0, 0, 0, 0] for i in range(model.n_layer)})
    assert rate() > 1.1 * before


def test_plan_on_the_emulated_device(model_path: Path) -> None:
    args = ("plan", "--model", str(model_path), "--device", "emulated:2", "--threads", "1")
    plan = document(*args, "--vram-budget", "floor,full", "--ctx", "512", "--parallel", "1", "--prompt", "64")
    profile = plan["profile"]
    assert isinstance(profile, dict)
    assert profile["fingerprint"]["link_gbps"] == 2.0
    assert plan["device"] == "emulated"


@pytest.mark.parametrize(
    ("args", "name", "says"),
    [
        (("--vram-budget", "1"), "budget_below_floor", "below the floor"),
        (("--vram-budget", "lots"), "bad_argument", "not a size"),
        (("--vram-budget", "600", "--prompt", "5000"), "bad_argument", "add --ctx 5512"),
        (("--vram-budget", "600", "--parallel", "100000"), "bad_argument", "argument --parallel"),
        (("--vram-budget", "600", "--ctx", "2147483647"), "bad_argument", "argument --ctx"),
        (("--vram-budget", "600", "--ubatch", "2"), "bad_argument", "n_ubatch: must be at least n_parallel"),
        (("--vram-budget", "600", "--profile", "/missing.json"), "bad_argument", "cannot read"),
        (("--vram-budget", "600", "--model", "/missing.gguf"), "model_not_found", "no model file"),
    ],
)
def test_plan_refuses_in_words(args: tuple[str, ...], name: str, says: str, model_path: Path, h100: str) -> None:
    result = frameshard("plan", "--model", str(model_path), "--profile", h100, *args, "--json")
    assert result.returncode == 2
    error = json.loads(result.stdout)["error"]
    assert error["name"] == name
    assert says in error["message"]
    if name == "budget_below_floor":
        assert error["detail"]["budget_bytes"] == 1 << 20
        assert error["detail"]["floor_bytes"] > 1 << 20


def test_plan_refuses_what_llama_cpp_mixes_up(tmp_path: Path, h100: str) -> None:
    model = tmp_path / "plamo2.gguf"
    file = tiny_models._File("plamo2", model, "plamo2", 1, 64)
    file.key("feed_forward_length", 128)
    file.attention_keys(2, 1, 32)
    file.head()
    file.norms(0, "attn_norm", "ffn_norm")
    file.attention(0, 2, 1, 32)
    file.ffn(0, 128)
    file.close()
    args = ("--model", str(model), "--vram-budget", "600", "--profile", h100, "--parallel", "3", "--json")
    error = json.loads(frameshard("plan", *args).stdout)["error"]
    assert error["name"] == "unsupported"
    assert "more than 2 sequences" in error["message"]


def test_cpu_has_nothing_to_plan(model_path: Path) -> None:
    for command in (("plan", "--vram-budget", "100"), ("profile",)):
        result = frameshard(*command, "--model", str(model_path), "--device", "cpu", "--json")
        assert json.loads(result.stdout)["error"]["name"] == "bad_argument"


def test_profile_prints_keeps_and_writes(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "here.json"
    args = (
        "--model",
        str(model_path),
        "--device",
        "emulated:1",
        "--threads",
        "1",
        "--seconds",
        "0.5",
    )
    profile = document("profile", *args, "--output", str(out))
    kept = Path(str(profile.pop("path")))
    assert kept.is_relative_to(tmp_path / "cache" / "frameshard" / "profiles")
    assert profiles.load(out).to_dict() == profile
    assert profile["disk"]
    assert {**profiles.load(kept).to_dict(), "disk": profile["disk"]} == profile  # a disk's rates are kept apart

    lines = table(profiles.load(kept)).splitlines()
    assert "device: emulated" in lines[0]
    assert any(line.startswith("copies, GB/s") for line in lines)  # the machine's name may take several lines
    assert any(line.startswith("Q4_1 1536x576") for line in lines)

    again = document("profile", *args)  # not measured again
    again.pop("path")
    assert again == profile


def test_models_lists_and_finds(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = document("models", "path", "smollm2-135m")
    assert found == {"name": "smollm2-135m", "path": str(model_path), "bytes": model_path.stat().st_size}
    assert frameshard("models", "path", "smollm2-135m").stdout == f"{model_path}\n"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = models.models_dir() / "hf" / "a" / "b" / "c.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"GGUF")
    listed = document("models", "list")
    assert listed["known"][0] == {
        "name": "smollm2-135m",
        "about": models.KNOWN["smollm2-135m"].about,
        "bytes": models.KNOWN["smollm2-135m"].n_bytes,
        "path": None,
    }
    assert [each["name"] for each in listed["known"][1:]] == [models.SPRITES, models.ENCODER, *models.VISION]
    assert listed["others"] == [{"path": str(other), "bytes": 4}]
    text = frameshard("models", "list").stdout
    assert "not fetched yet" in text
    assert str(other) in text


def test_models_that_do_not_exist() -> None:
    result = frameshard("models", "fetch", "no-such-model", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["name"] == "model_not_found"
    assert frameshard("models").returncode == 2
