"""frameshard bench on the command line, and the layers that it puts on the GPU for llama.cpp."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from frameshard.cli import figures
from frameshard.cli.upstream import attention_on_gpu, layers_on_gpu, placement
from frameshard.errors import FrameshardError
from frameshard.plan.model import Model, read_model


def bench(model_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = ("bench", "--model", str(model_path), "--device", "emulated:2", "--threads", "1")
    small = ("--prompt", "32", "--generate", "4", "--repeat", "1")
    return subprocess.run(
        [sys.executable, "-m", "frameshard", *command, *small, *args], capture_output=True, text=True, timeout=300
    )


def test_rows_and_a_time_line(shallow_model: Path, tmp_path: Path) -> None:
    picture = tmp_path / "time.svg"
    result = bench(
        shallow_model,
        "--vram-budget",
        "30,full",
        "--stream-only",
        "--timeline",
        str(picture),
        "--json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["rows"][0]["budget_mb"] == 30.0
    for row in document["rows"]:
        assert row["peak_vram_mb"] <= row["budget_mb"]
        assert row["ubatch"] == 256  # in stream-only mode it is the same at every budget, and at most the context
        assert row["runs"]["decode_tps"] == [row["decode_tps"]]
    # Four tokens are measured from the prompt on, so the first one's share of the prediction is large, unless
    # everything is resident.
    shares = [row["predicted_decode_tps"] / row["plan"]["predicted_decode_tps"] for row in document["rows"]]
    assert 0 < shares[0] < 0.99
    assert shares[1] == pytest.approx(1)
    assert document["rows"][0]["prefill_copied_mb"] > 0
    for name in ("decode", "prefill"):
        lanes = document["timeline"][name]["lanes"]
        assert list(lanes) == ["copy", "device", "cpu"]
        assert all(0 <= lane["busy"] <= 1 for lane in lanes.values())
        assert lanes["device"]["busy"] > 0
        assert lanes["copy"]["busy"] > 0
        assert lanes["cpu"]["busy"] == 0
    assert "<svg" in picture.read_text()


def test_a_picture_that_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    window = figures.Window("one token", [], 0.0, 1.0)
    with pytest.raises(FrameshardError, match=r"nowhere/time\.svg could not be drawn: .*No such file"):
        figures.draw_apart(figures.draw_timeline, str(tmp_path / "nowhere" / "time.svg"), "a title", [window])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--timeline", "out.txt"), "not the name of a picture"),
        (("--vs", "/no/such/program", "--vs-budget", "weights"), "cannot run /no/such/program"),
        (("--vs", sys.executable, "--vs-budget", "weights"), "failed:"),
        (("--vs", "any", "--device", "cpu"), "nothing is placed"),
        (("--timeline", "out.svg", "--device", "cpu"), "nothing is placed"),
        (("--vs", "any"), "no driver counts VRAM on emulated:2, so llama.cpp cannot be held to the budget: add"),
        (("--vs", "any", "--vs-budget", "both"), "no driver counts VRAM on emulated:2"),
        (("--vs-budget", "process"), "name its program with --vs"),
        (("--image", "32x32"), "--prompt has no effect with --image"),
        (
            ("--vs-budget", "both", "--vs", "any", "--image", "32x32"),
            "with --image the budget is for llama.cpp's weights",
        ),
    ],
)
def test_what_cannot_be_run_is_said(args: tuple[str, ...], says: str, shallow_model: Path) -> None:
    result = bench(shallow_model, *args)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_budget_below_the_floor_is_refused_before_anything_is_measured(shallow_model: Path) -> None:
    result = bench(shallow_model, "--vram-budget", "full,1")
    assert result.returncode == 2
    assert "below the floor" in result.stderr
    assert "tokens of prompt" not in result.stderr


def in_vram(model: Model, ngl: int, ncmoe: int = 0) -> int:
    """The bytes of weights that llama.cpp puts on a GPU: first the head, then the last layers."""
    n_bytes = 0
    tied = not any(tensor.name == "output.weight" for tensor in model.tensors)
    for tensor in model.tensors:
        part = tensor.name.split(".")
        if part[0] != "blk":
            here = ngl > 0 and (tied or part[0] != "token_embd")
        else:
            here = int(part[1]) >= model.n_layer + 1 - ngl and not ("exps" in part[2] and int(part[1]) < ncmoe)
        n_bytes += tensor.n_bytes if here else 0
    return n_bytes


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9, 1.0])
def test_llama_cpp_gets_as_much_as_fits(share: float, model_path: Path, moe_path: Path) -> None:
    for path in (model_path, moe_path):
        model = read_model(path)
        budget = int(in_vram(model, 999) * share)
        names, values = placement(model, budget)[::2], [int(value) for value in placement(model, budget)[1::2]]
        assert in_vram(model, *values) <= budget
        if names == ["-ngl", "-ncmoe"]:
            more = [values[0], values[1] - 1] if values[1] else values
        else:
            assert names == ["-ngl"]
            more = [values[0] + 1] if values[0] <= model.n_layer else values
        assert more == values or in_vram(model, *more) > budget


def test_placements_are_all_there_are_and_count_what_is_on_the_gpu(model_path: Path, moe_path: Path) -> None:
    for path in (model_path, moe_path):
        model = read_model(path)
        found = layers_on_gpu(model, kv_bytes=model.n_layer * 1000)
        layers = [f"-ngl {n}" + (f" -ncmoe {model.n_layer}" if n and model.n_expert else "") for n in range(32)]
        experts = [f"-ngl 999 -ncmoe {n}" for n in reversed(range(30))] if model.n_expert else []
        assert [" ".join(args) for args, _ in found] == layers + experts
        for args, n_bytes in found:
            values = [int(value) for value in args[1::2]]
            assert n_bytes == in_vram(model, *values) + 1000 * max(0, min(values[0] - 1, model.n_layer))


def test_attention_on_the_gpu_leaves_networks_to_the_cpu(model_path: Path, moe_path: Path) -> None:
    assert attention_on_gpu(read_model(moe_path), kv_bytes=1000) == []
    model = read_model(model_path)
    found = attention_on_gpu(model, kv_bytes=1000)
    assert len(found) == model.n_layer
    whole, before = in_vram(model, 999) + 1000, 0
    for n_layers, ((*ngl, option, pattern), n_bytes) in zip(range(model.n_layer, 0, -1), found, strict=True):
        assert [*ngl, option] == ["-ngl", "999", "-ot"]
        # llama.cpp searches each expression in a tensor's name.
        expressions = [each.removesuffix("=CPU") for each in pattern.split(",")]
        on_cpu = [t for t in model.tensors if any(re.search(each, t.name) for each in expressions)]
        assert {int(t.name.split(".")[1]) for t in on_cpu} == set(range(n_layers))
        assert {t.name.split(".")[2] for t in on_cpu} == {"ffn_gate", "ffn_up", "ffn_down"}
        assert before < n_bytes == whole - sum(t.n_bytes for t in on_cpu)
        before = n_bytes


def test_nothing_above_the_largest_budget_is_held(shallow_model: Path) -> None:
    script = """
import sys
from frameshard.cli import common
from frameshard.wire.engine import EngineConfig
config = EngineConfig(model=sys.argv[1], device="emulated", n_ctx=512, n_parallel=1, n_threads=1)
with common.load_within(config, "30,40") as runtime:
    print(runtime.device.stats().peak_bytes)
"""
    command = [sys.executable, "-c", script, str(shallow_model)]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0 < peak <= 40 << 20


def test_llama_cpp_runs_without_our_vulkan_layer(tmp_path: Path) -> None:
    code = """
import os
from frameshard import ggml
from frameshard.cli import upstream
before = upstream.environment()
ggml.registry()
assert upstream.environment() == before, "there is no layer yet"
assert os.environ["VK_INSTANCE_LAYERS"] == "VK_LAYER_other"
open(os.path.join(os.environ["FOLDER"], ggml.LAYER_FILE), "w").close()
for _ in range(2):
    ggml.registry()
assert os.environ["VK_INSTANCE_LAYERS"].split(os.pathsep) == ["VK_LAYER_other", ggml.VULKAN_LAYER]
assert os.environ["VK_ADD_LAYER_PATH"] == os.environ["FOLDER"]
assert upstream.environment() == before
"""
    theirs = {"VK_INSTANCE_LAYERS": "VK_LAYER_other", "FOLDER": str(tmp_path)}
    ours = {"FRAMESHARD_DEVICE_LIB": str(tmp_path / "libframeshard_device.so")}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("VK_", "GGML_"))}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **theirs, **ours}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
