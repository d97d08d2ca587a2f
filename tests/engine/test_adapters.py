"""LoRA adapters, on tiny models with synthetic adapters: results, VRAM, jobs with different sets, and damaged files."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

import frameshard
import mutants
import sidecars
from frameshard import errors
from make_adapter import make_adapter
from sidecars import in_trio

MIB = 1 << 20


@pytest.fixture
def adapters(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., dict[str, Path]]:
    def make(arch: str, ranks: tuple[int, int] = (8, 4)) -> dict[str, Path]:
        for name, rank, seed in zip("ab", ranks, (1, 2), strict=True):
            make_adapter(tiny_model(arch), tmp_path / f"{name}.gguf", rank=rank, seed=seed)
        return {name: tmp_path / f"{name}.gguf" for name in "ab"}

    return make


@pytest.mark.parametrize(("arch", "ranks"), [("llama", (8, 4)), ("qwen3moe", (8, 4)), ("llama", (1, 1))])
def test_streamed_at_the_floor_the_bits_are_those_of_llama_cpp(
    arch: str,
    ranks: tuple[int, int],
    tiny_model: Callable[[str], Path],
    adapters: Callable[..., dict[str, Path]],
) -> None:
    driver = Path(__file__).with_name("adapter_driver.py")
    command = [sys.executable, str(driver), str(tiny_model(arch)), *map(str, adapters(arch, ranks).values())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_plan_counts_adapters(tiny_model: Callable[[str], Path], adapters: Callable[[str], dict[str, Path]]) -> None:
    files = adapters("llama")
    options = [word for name, path in files.items() for word in ("--adapter", f"{name}={path}")]
    floors = []
    for more in ([], options):
        command = [sys.executable, "-m", "frameshard", "plan", "--model", str(tiny_model("llama")), "--json", *more]
        command += ["--vram-budget", "floor", "--profile", "laptop-rtx-4060-8gb", "--ubatch", "512"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        floors.append(json.loads(ended.stdout)["floor_bytes"])
    grown = floors[1] - floors[0]
    # Each is smaller than the unit in which CUDA's driver gives VRAM.
    matrices = len(files) * (2 << 20)
    assert matrices <= grown < matrices + (4 << 20)  # and what compute buffers may grow by


@in_trio
async def test_an_adapter_that_is_unloaded_while_parked_is_not_in_the_floor(
    tiny_model: Callable[[str], Path], adapters: Callable[..., dict[str, Path]]
) -> None:
    files = adapters("llama", (128, 4))
    launch = frameshard.launch(
        tiny_model("llama"), device="emulated", n_ctx=256, n_parallel=1, adapters={"b": files["b"]}
    )
    async with launch as client:
        floor = (await client.stats()).engine["floor_bytes"]
        assert (await client.adapter_load("a", files["a"])).floor_bytes > floor
        await client.set_budget(0, state="parked", timeout_s=60)
        unloaded = (await client.adapter_unload("a")).floor_bytes
        assert (await client.set_budget(unloaded / MIB, timeout_s=60)).vram_budget_bytes == unloaded
        assert (await client.stats()).engine["floor_bytes"] == unloaded
        assert await alone(client, "Once upon", adapters={"b": 1.0})


def text(n: int = 24, **options: Any) -> dict[str, Any]:
    return {"sampling": frameshard.Sampling(max_tokens=n, temperature=0.0), **options}


async def alone(client: frameshard.Client, prompt: str, **options: Any) -> str:
    return (await client.complete(prompt, **text(**options)).completed()).text


@in_trio
async def test_jobs_keep_their_adapters(
    tiny_model: Callable[[str], Path], adapters: Callable[[str], dict[str, Path]], tmp_path: Path
) -> None:
    """Together, through a shrink to the floor and an engine's death, each job has the text that it has alone."""
    files = adapters("llama")
    sets: list[dict[str, float]] = [{}, {"a": 1.0}, {"b": 1.0}, {"b": -0.5, "a": 0.7}]
    options: dict[str, Any] = {"device": "emulated", "mode": "stream_only", "n_ctx": 512, "n_ubatch": 32}
    launch = frameshard.launch(
        tiny_model("llama"), adapters={"a": files["a"]}, log=subprocess.DEVNULL, n_threads=1, hang_still_s=60, **options
    )
    async with launch as client:
        assert [each.name for each in (await client.adapter_load("b", files["b"])).adapters] == ["a", "b"]
        loaded = await client.adapter_load("b", files["b"])  # again: nothing changes
        expected = [await alone(client, "Once upon", adapters=adapters) for adapters in sets]
        assert len(set(expected)) == len(sets)

        texts: dict[int, str] = {}

        async def run(number: int) -> None:
            async with client.complete("Once upon", **text(adapters=sets[number])) as stream:
                async for _ in stream:
                    texts[number] = stream.text

        async with trio.open_nursery() as nursery:
            for number in range(len(sets)):
                nursery.start_soon(run, number)
            while len(texts) < len(sets):
                await trio.sleep(0.005)
            released = await client.set_budget(loaded.floor_bytes / MIB, timeout_s=60)
            assert released.used_bytes <= loaded.floor_bytes
            pid = (await client.stats()).broker.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert [texts[number] for number in range(len(sets))] == expected

        await sidecars.until_ready(client, 1)
        await client.set_budget(loaded.floor_bytes / MIB, state="parked", timeout_s=60)
        with pytest.raises(errors.BadArgument, match="parked"):
            await client.adapter_load("c", files["a"])
        await client.set_budget(loaded.floor_bytes / MIB, timeout_s=60)
        assert await alone(client, "Once upon", adapters=sets[3]) == expected[3]
        await client.set_budget(loaded.floor_bytes / MIB, state="hibernated", timeout_s=60)
        await client.set_budget(loaded.floor_bytes / MIB, timeout_s=60)
        assert await alone(client, "Once upon", adapters=sets[3]) == expected[3]

        # Cells of a conversation are not used with other adapters.
        conversation = text(conversation="inn")
        await client.complete("Once upon a time", **conversation).completed()
        other = await client.complete("Once upon a time", **conversation, adapters={"a": 1.0}).completed()
        same = await client.complete("Once upon a time", **conversation, adapters={"a": 1.0}).completed()
        assert other.n_reused == 0 < same.n_reused
        assert other.text == same.text == await alone(client, "Once upon a time", adapters={"a": 1.0})

        with pytest.raises(errors.BadArgument) as unknown:
            await alone(client, "Once", adapters={"c": 1.0})
        assert unknown.value.detail["loaded"] == ["a", "b"]
        await client.set_pacing(target_tokens_per_second=5)
        async with client.complete("Once", **text(400, adapters={"b": 1.0})):
            with pytest.raises(errors.BadArgument, match="jobs use the adapter"):
                await client.adapter_unload("b")
        await client.set_pacing()
        with pytest.raises(errors.BudgetBelowFloor) as small:
            await client.adapter_load("c", files["a"])
        assert small.value.detail["floor_bytes"] > loaded.floor_bytes

        await client.set_budget(0, timeout_s=60)
        (tmp_path / "cut.gguf").write_bytes(files["a"].read_bytes()[:-1000])
        make_adapter(tiny_model("gemma3"), tmp_path / "other.gguf")
        make_adapter(tiny_model("llama"), tmp_path / "nan.gguf", gain=float("nan"))
        wrong = {tiny_model("llama"): "adapter", tmp_path / "cut.gguf": "truncated", tmp_path / "other.gguf": "arch"}
        wrong[tmp_path / "nan.gguf"] = "NaN"
        for path, why in wrong.items():
            with pytest.raises(errors.BadModel, match=why):
                await client.adapter_load("c", path)
        with pytest.raises(errors.ModelNotFound):
            await client.adapter_load("c", tmp_path / "none.gguf")
        left = await client.adapter_unload("b")
        assert [each.name for each in left.adapters] == ["a"]
        assert left.floor_bytes < loaded.floor_bytes
        assert (await client.stats()).broker.engine_restarts == 1


@in_trio
async def test_an_unload_waits_for_the_load_before_it(
    tiny_model: Callable[[str], Path], adapters: Callable[[str], dict[str, Path]]
) -> None:
    """Loads read files in a thread, which takes some time. An unload overtakes none of them."""
    slow = """
import sys, time
from frameshard.engine import process

read = process.read_adapter
process.read_adapter = lambda *args: time.sleep(0.5) or read(*args)
process.main()
"""
    options: dict[str, Any] = {"device": "cpu", "n_ctx": 256, "n_parallel": 1, "n_threads": 1, **sidecars.PATIENT}
    engine = (sys.executable, "-c", slow)
    async with frameshard.launch(tiny_model("llama"), engine=engine, log=subprocess.DEVNULL, **options) as client:
        path = adapters("llama")["a"]
        answers = [client.adapter_load("a", path), client.adapter_unload("a"), client.adapter_load("b", path)]
        loaded = [[each.name for each in (await answer).adapters] for answer in answers]
        assert loaded == [["a"], [], ["b"]]


@in_trio
async def test_a_file_that_was_replaced_is_another_one(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "a.gguf"
    make_adapter(model, path, seed=1)
    launch = frameshard.launch(model, log=subprocess.DEVNULL, n_threads=1, device="cpu", n_ctx=512)
    async with launch as client:
        await client.adapter_load("a", path)
        make_adapter(model, tmp_path / "new.gguf", seed=2)
        (tmp_path / "new.gguf").replace(path)
        with pytest.raises(errors.BadArgument, match="another file is loaded under this name: unload it first"):
            await client.adapter_load("a", path)
        before = await alone(client, "Once upon", adapters={"a": 1.0})
        await client.adapter_unload("a")
        await client.adapter_load("a", path)
        assert await alone(client, "Once upon", adapters={"a": 1.0}) != before


TRY = """
import sys
from frameshard.engine.runtime import Runtime
from frameshard.plan.adapter import read_adapter
from frameshard.wire.engine import EngineConfig
from frameshard.errors import FrameshardError

config = EngineConfig(sys.argv[1], device="emulated", n_ctx=256, n_parallel=1, n_ubatch=16, n_threads=1)
with Runtime.load(config, measure=False) as runtime:
    for path in sys.argv[2:]:
        try:
            runtime.load_adapter("a", read_adapter(path, runtime.model_info))
            runtime.decode_tokens(0, [20, 21, 22])
            print("loaded", flush=True)
        except FrameshardError as error:
            print("refused", flush=True)
        runtime.adapters.unload("a")
        runtime.clear(0)
"""


TWO_TOGETHER = """
import sys
from frameshard.engine.llama import DecodeAborted
from frameshard.engine.runtime import Runtime
from frameshard.errors import OutOfMemory
from frameshard.plan.adapter import read_adapter
from frameshard.wire.engine import EngineConfig

model, first, second = sys.argv[1:]
config = EngineConfig(model, device="emulated", n_ctx=256, n_parallel=1, n_ubatch=16, n_threads=1, adapters=(first,))
with Runtime.load(config, measure=False) as runtime:
    another, decode = read_adapter(second, runtime.model_info), runtime.llama.decode

    def load(call):
        calls = [None, call]

        def decode_with_call():
            if calls and (now := calls.pop(0)):
                now()
            decode()

        runtime.llama.decode = decode_with_call
        runtime.load_adapter("b", another)

    def refuse():
        raise OutOfMemory("no memory for compute buffers")

    try:
        load(refuse)
    except OutOfMemory:
        print("failed")
    assert not runtime.aborted and [each.name for each in runtime.adapters] == ["a"]
    assert len(runtime.decode_tokens(0, [5])) == 1

    load(runtime.abort)
    assert runtime.aborted
    try:
        runtime.decode_tokens(0, [5])
    except DecodeAborted:
        print("stopped")
    runtime.resume()
    assert len(runtime.decode_tokens(0, [5])) == 1
"""


def test_two_adapters_are_tried_in_an_abort_that_ends(
    tiny_model: Callable[[str], Path], adapters: Callable[[str], dict[str, Path]]
) -> None:
    """Also if memory is refused then. An abort by a stop command, which comes meanwhile, stays."""
    files = adapters("llama")
    command = [sys.executable, "-c", TWO_TOGETHER, str(tiny_model("llama")), f"a={files['a']}", str(files["b"])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.split()) == (0, ["failed", "stopped"]), ended.stderr[-2000:]


BUDGET_FALLS = """
import sys
from frameshard.engine.llama import DecodeAborted
from frameshard.engine.runtime import Runtime
from frameshard.errors import BadModel
from frameshard.plan.adapter import read_adapter
from frameshard.wire.engine import EngineConfig

config = EngineConfig(sys.argv[1], device="emulated", n_ctx=256, n_parallel=1, n_ubatch=16, n_threads=1)
with Runtime.load(config, measure=False) as runtime:
    decode = runtime.llama.decode

    def ended():
        runtime.llama.decode = decode
        raise DecodeAborted

    runtime.llama.decode = ended
    try:
        runtime.load_adapter("a", read_adapter(sys.argv[2], runtime.model_info))
    except BadModel:
        print("refused")
    assert runtime.length(0) == 0
"""


def test_an_adapter_is_tried_again_if_the_budget_falls_meanwhile(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Such a budget ends the graph. Then damaged weights would not have been found."""
    make_adapter(tiny_model("llama"), tmp_path / "nan.gguf", gain=float("nan"))
    command = [sys.executable, "-c", BUDGET_FALLS, str(tiny_model("llama")), str(tmp_path / "nan.gguf")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "refused\n"), ended.stderr[-2000:]


def test_a_damaged_adapter_is_refused_or_used(
    tiny_model: Callable[[str], Path], adapters: Callable[[str], dict[str, Path]], tmp_path: Path
) -> None:
    sound = mutants.Gguf(adapters("qwen3moe")["a"])
    made, paths = [], []
    for seed in range(8000, 8060):
        rng, file = random.Random(seed), copy.deepcopy(sound)
        made.append(f"seed {seed}: {'; '.join(mutants.mutate(file, rng))}")
        paths.append(file.write(tmp_path / f"{seed}.gguf"))
    command = [sys.executable, "-c", TRY, str(tiny_model("qwen3moe")), *map(str, paths)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=600)
    outcomes = tried.stdout.split()
    assert len(outcomes) == len(paths), f"{made[len(outcomes)]}: {tried.stderr[-2000:]}"
    assert set(outcomes) == {"loaded", "refused"}
