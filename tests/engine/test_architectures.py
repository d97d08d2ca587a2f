"""Every kind of memory in llama.cpp: KV caches that can be cut, sliding windows, and recurrent states that cannot."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import MEMORIES, EngineProcess, engine, ids, text

import tiny_models
from frameshard.errors import Unsupported
from frameshard.plan.memory import check_context, check_sequences
from frameshard.plan.model import read_model

PROMPT = "abc def ghi jkl mno pqr stu vwx yz. " * 3
PARAMS = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
PLACES = [*((arch, "emulated") for arch in tiny_models.ARCHS), *((arch, "cpu") for arch in MEMORIES)]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def child(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[EngineProcess]:
    arch, device = request.param
    with engine(tiny_model(arch), device=device, mode="stream_only", n_ctx=1024, n_parallel=2, n_ubatch=32) as running:
        yield running


def test_speaks_resumes_and_goes_on(child: EngineProcess) -> None:
    whole = child.run(PROMPT, params=PARAMS)
    produced = ids(whole)
    assert len(produced) == whole[-1]["n_generated"] > 0
    for cut in (0, 1, len(produced) // 2, len(produced)):
        job = child.submit(PROMPT, params=PARAMS, resume=produced[:cut], history=whole[0]["history"])
        assert ids(child.finish(job)[job]) == produced[cut:]

    # A second turn that continues the sequence, the same turn again, and a text with another beginning.
    first = child.run(PROMPT, conversation="c", params=PARAMS)
    assert ids(first) == produced
    second = child.run(PROMPT + text(first) + " and then", conversation="c", params=PARAMS)
    assert second[-1]["ev"] == "done"
    again = child.run(PROMPT, conversation="c", params=PARAMS)
    assert again[-1]["ev"] == "done"
    assert ids(child.run("xyz", conversation="c", params=PARAMS)) == ids(child.run("xyz", params=PARAMS))


def test_a_cancelled_prompt_leaves_a_sound_sequence(child: EngineProcess) -> None:
    alone = ids(child.run(PROMPT, params=PARAMS))
    for delay_s in (0, 0.01):
        job = child.submit(PROMPT * 3, conversation="d")
        child.wait_for("started", job=job)
        time.sleep(delay_s)
        child.send(op="cancel", job=job)
        child.finish(job)
        after = child.run("q" + PROMPT, conversation="d", params=PARAMS)
        # The chat template's first tokens may be reused, which depends on when the cancel came. Recurrent layers add up
        # other sums for steps that are cut elsewhere, so the comparison is cut in the same places.
        afresh = child.submit("q" + PROMPT, params=PARAMS, resume=[], history=after[0]["history"])
        assert ids(after) == ids(child.finish(afresh)[afresh])
        assert ids(child.run(PROMPT, params=PARAMS)) == alone


def test_jobs_end_while_the_engine_is_parked(child: EngineProcess) -> None:
    """Those without a conversation give up their sequence, of which nothing can be changed then."""
    alone = ids(child.run(PROMPT, params=PARAMS))
    with child.slowly():
        jobs = [child.submit(PROMPT, conversation=name, params={**PARAMS, "max_tokens": 500}) for name in (None, "p")]
        child.wait_for("token", job=jobs[1])
        child.budget(0, parked=True)
        child.wait_for("released")
        for job in jobs:
            child.send(op="cancel", job=job)
        assert [events[-1]["ev"] for events in child.finish(*jobs).values()] == ["cancelled"] * 2
        child.budget(0)
        child.wait_for("released")
    assert ids(child.run(PROMPT, params=PARAMS)) == alone


LOAD = """
import os, sys
from frameshard.cli.upstream import environment
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

with Runtime.load(EngineConfig(sys.argv[1], device="cpu", n_ctx=256, n_parallel=1, n_ubatch=16, n_threads=1)):
    print(*(each.get("GGML_CUDA_PDL") for each in (os.environ, environment())))
"""


@pytest.mark.parametrize("arch", ["gemma3", "gemma3n", "gemma4"])
def test_cuda_starts_no_kernel_early_for_models_with_embeddings_by_layer(
    arch: str, tiny_model: Callable[[str], Path]
) -> None:
    command = [sys.executable, "-c", LOAD, str(tiny_model(arch))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    # llama.cpp's own programs, which are compared with, start as they would without us.
    assert ran.stdout.split() == ["None" if arch == "gemma3" else "0", "None"], ran.stderr


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "mamba2", "deepseek4"])
def test_the_floor_is_enough_where_vram_comes_in_units(arch: str, tiny_model: Callable[[str], Path]) -> None:
    """The drivers of GPUs give VRAM in units of 2 MiB. Nodes of DeepSeek V4 read two KV blocks, which then must both
    be in VRAM."""
    fields: dict[str, object] = {"device": "emulated", "mode": "stream_only", "n_ctx": 1024, "n_parallel": 2}
    child = EngineProcess(faults="unit_kb=2048")
    try:
        assert child.load(tiny_model(arch), **fields, n_ubatch=32, n_threads=1)["ev"] == "ready"
        expected = ids(child.run(PROMPT, params=PARAMS))
        floor_bytes = child.stats()["floor_bytes"]
        for parked in (False, True):
            child.budget(floor_bytes, parked=parked)
            child.wait_for("released")
        child.budget(floor_bytes)
        child.wait_for("released")
        assert ids(child.run(PROMPT, params=PARAMS)) == expected
        assert child.stats()["used_bytes"] <= floor_bytes
    finally:
        child.close()


def test_three_sequences_with_steps_that_are_no_multiple_of_three(tiny_model: Callable[[str], Path]) -> None:
    """llama.cpp aborts with this model when it lays out such a step."""
    with engine(tiny_model("kimi-linear"), device="cpu", n_ctx=1024, n_parallel=3, n_ubatch=32) as running:
        jobs = [running.submit(PROMPT, params=PARAMS) for _ in range(3)]
        ended = running.finish(*jobs)
        assert [ended[job][-1]["ev"] for job in jobs] == ["done"] * 3


def test_a_context_with_more_tokens_than_the_model_has_positions_for(tiny_model: Callable[[str], Path]) -> None:
    """llama.cpp aborts at the first token beyond them."""
    gpt2 = read_model(tiny_model("gpt2"))
    most = gpt2.n_ctx_train
    check_context(gpt2, most)
    check_context(read_model(tiny_model("llama")), most + 1)
    child = EngineProcess()
    try:
        event = child.load(gpt2.path, device="cpu", n_ctx=most + 1, n_parallel=1)
    finally:
        child.close()
    assert (event["ev"], event["error"]["name"]) == ("fatal", "unsupported")
    assert event["error"]["detail"]["n_ctx"] == most
    assert f"n_ctx {most}" in event["error"]["message"]


def test_models_that_llama_cpp_mixes_up_are_refused(tiny_model: Callable[[str], Path]) -> None:
    llama = read_model(tiny_model("llama"))
    check_sequences(llama, 64)
    plamo = dataclasses.replace(llama, arch="plamo2")
    check_sequences(plamo, 2)
    with pytest.raises(Unsupported, match="n_parallel 2"):
        check_sequences(plamo, 3)
    with pytest.raises(Unsupported, match="logits of other tokens"):
        check_sequences(dataclasses.replace(llama, arch="cogvlm"), 1)
