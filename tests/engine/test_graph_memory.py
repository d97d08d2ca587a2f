"""The VRAM of compute buffers follows the graph in use, on the emulated device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import engine, ids

from forks import run_script
from make_adapter import make_adapter

MIB = 1 << 20

PROMPT_AND_ANSWER = """
import json, sys
import numpy as np
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

tokens = [300 + 7 * i % 700 for i in range(1000)]
config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=1024, n_ubatch=512, n_parallel=1, n_threads=1, mode="stream_only",
    vram_budget_bytes=int(sys.argv[2]),
)
with Runtime.load(config, measure=False) as runtime:
    seen, logits = [], []
    for part in (tokens[:512], tokens[512:514], tokens[514:767], tokens[767:768]):
        logits.append(runtime.decode_tokens(0, part)[-1])
        seen.append(runtime.device.stats())
        if len(part) < 3:
            while runtime.placement.fill():
                pass
            seen.append(runtime.device.stats())
    names = ("graph_bytes", "least_graph_bytes", "most_graph_bytes", "floor_bytes", "arena_bytes", "peak_bytes")
    print(json.dumps([[{name: getattr(each, name) for name in names} for each in seen], np.stack(logits).tolist()]))
"""

LOW_FLOOR = """
import contextlib, json, sys
from frameshard.engine.batch import Batcher
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor
from frameshard.wire import engine as em
from frameshard.wire.messages import Adapter, Sampling

path, adapter, mode, why = sys.argv[1:]
config = em.EngineConfig(
    path, device="emulated", n_ctx=1024, n_ubatch=128, n_parallel=2, n_threads=1, mode=mode, adapters=("a=" + adapter,)
)
ends = []
with Runtime.load(config, measure=False) as runtime:
    device, batcher, reader = runtime.device, Batcher(runtime), RequestReader(runtime)

    def run_job(*adapters):
        sampling = Sampling(max_tokens=4)
        batcher.add(reader.read(em.Submit(len(ends), "completion", sampling, prompt="a" * 400, adapters=adapters)))
        while batcher.busy:
            events = batcher.step()
        ends.append(events[-1].error.name if isinstance(events[-1], em.Failed) else events[-1].reason)

    if why == "graphs are larger":
        device.set_floor_graphs(device.stats().floor_graph_bytes // 10)
    run_job()
    device.set_budget(device.stats().floor_bytes, timeout_s=60)
    if why == "the driver takes more":
        with contextlib.suppress(BudgetBelowFloor):
            device.set_overhead(device.stats().overhead_bytes + (8 << 20))
    run_job()
    run_job(Adapter("a"))  # llama.cpp makes its compute buffers anew
    device.set_budget(0, timeout_s=60)
    run_job()
print(json.dumps(ends))
"""


@pytest.mark.parametrize("why", ["graphs are larger", "the driver takes more"])
@pytest.mark.parametrize("mode", ["planned", "stream_only"])
def test_a_floor_that_is_too_low_fails_the_job_alone(
    mode: str, why: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, adapter = tiny_model("llama"), tmp_path / "adapter.gguf"
    make_adapter(model, adapter)
    result = run_script(LOW_FLOOR, model, adapter, mode, why)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["length", "budget_below_floor", "budget_below_floor", "length"]


def test_decoding_has_the_vram_that_prompts_need(deep_model: Path) -> None:
    """A prompt evicts weights for its graphs, and afterwards they return. The logits are those without a budget."""

    def run(budget_bytes: int) -> tuple[list[dict[str, int]], list[list[float]]]:
        result = run_script(PROMPT_AND_ANSWER, deep_model, budget_bytes)
        assert result.returncode == 0, result.stderr
        stats, logits = json.loads(result.stdout)
        return stats, logits

    _, expected = run(0)
    for budget in (20 * MIB, 26 * MIB):
        stats, logits = run(budget)
        prompt, decoded, filled, more, _, filled_again = stats
        assert logits == expected
        assert decoded["graph_bytes"] < prompt["graph_bytes"] / 8
        assert prompt["graph_bytes"] <= prompt["most_graph_bytes"]
        assert decoded["graph_bytes"] < more["graph_bytes"] < prompt["graph_bytes"]
        assert prompt["arena_bytes"] < filled["arena_bytes"]
        assert more["arena_bytes"] < filled_again["arena_bytes"]
        assert len({each["floor_bytes"] for each in stats}) == 1  # it has room for the largest graph
        assert stats[-1]["peak_bytes"] <= budget


ANSWERS = """
import json, sys
import numpy as np
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

tokens = [300 + 7 * i % 700 for i in range(900)]
config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=1024, n_ubatch=512, n_parallel=1, n_threads=1, mode="stream_only",
)
with Runtime.load(config, measure=False) as runtime:
    seen, answers = [], []
    for length in map(int, sys.argv[2:]):
        runtime.clear(0)
        runtime.decode_tokens(0, tokens[:length])
        after_prompt = runtime.device.stats()
        while runtime.placement.fill():
            pass
        answer = [runtime.decode_tokens(0, [token])[-1] for token in tokens[800:804]]
        after_answer = runtime.device.stats()
        seen.append({
            "recompiles": after_answer.recompiles - after_prompt.recompiles,
            "prompt_bytes": after_prompt.graph_bytes, "answer_bytes": after_answer.graph_bytes,
        })
        answers.append(np.stack(answer).tolist())
    print(json.dumps([seen, answers]))
"""


def test_an_answer_goes_on_with_the_programs_of_the_one_before(deep_model: Path) -> None:
    """If prompts evict nothing, tokens in contexts of about the same length need no new program, and the memory of the
    prompts' graphs stays for the next prompt."""

    def run(*lengths: int) -> tuple[list[dict[str, int]], list[list[float]]]:
        result = run_script(ANSWERS, deep_model, *lengths)
        assert result.returncode == 0, result.stderr
        seen, answers = json.loads(result.stdout)
        return seen, answers

    seen, answers = run(500, 505, 501, 502, 503, 504, 800)
    # llama.cpp's graph grows with each 256 cells of context.
    assert [each["recompiles"] for each in seen] == [1, 0, 0, 0, 0, 0, 1]
    for each in seen:
        assert each["answer_bytes"] >= each["prompt_bytes"]
    assert answers[5:] == [run(length)[1][0] for length in (504, 800)]


SHRINK = """
import json, sys
import numpy as np
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

tokens = [300 + 7 * i % 700 for i in range(513)]
config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=1024, n_ubatch=512, n_parallel=1, n_threads=1, mode="stream_only",
)
with Runtime.load(config, measure=False) as runtime:
    device, seen, logits = runtime.device, [], []

    def run():
        runtime.clear(0)
        runtime.decode_tokens(0, tokens[:512])
        while runtime.placement.fill():
            pass
        logits.append(runtime.decode_tokens(0, tokens[512:])[-1].tolist())
        seen.append(device.stats())

    run()
    idle_bytes = seen[0].graph_bytes - seen[0].least_graph_bytes
    for freed_bytes in (1, idle_bytes // 2, idle_bytes * 9 // 10):
        device.set_budget(0, timeout_s=60)
        run()
        device.set_budget(seen[-1].used_bytes - freed_bytes, timeout_s=60)
        seen.append(device.stats())
    run()  # the prompt's graphs evict weights, which return
    names = ("graph_bytes", "least_graph_bytes", "evicted_slabs", "arena_bytes", "used_bytes", "budget_bytes")
    print(json.dumps([[{name: getattr(each, name) for name in names} for each in seen], logits]))
"""


def test_a_shrink_takes_what_waits_for_the_next_prompt_before_weights(deep_model: Path) -> None:
    result = run_script(SHRINK, deep_model)
    assert result.returncode == 0, result.stderr
    seen, logits = json.loads(result.stdout)
    first, shrinks, last = seen[0], seen[2:-1:2], seen[-1]
    assert first["graph_bytes"] > 4 * first["least_graph_bytes"]
    for shrunk in shrinks:
        assert shrunk["graph_bytes"] < 2 * first["least_graph_bytes"]
        assert shrunk["evicted_slabs"] == 0
        assert shrunk["used_bytes"] <= shrunk["budget_bytes"]
    assert last["evicted_slabs"] > 0
    assert last["arena_bytes"] == first["arena_bytes"]
    assert last["used_bytes"] <= last["budget_bytes"]
    assert all(each == logits[0] for each in logits)


def test_weights_return_after_a_prompt(deep_model: Path) -> None:
    """The engine fills VRAM again when the last prompt is read, also if nothing is decoded afterwards."""
    fields: dict[str, object] = {"device": "emulated", "n_ctx": 1024, "n_parallel": 1, "n_ubatch": 512}
    with engine(deep_model, **fields, vram_budget_bytes=20 * MIB) as child:
        before = child.stats()
        assert len(ids(child.run("a" * 500, params={"max_tokens": 1}))) == 1
        deadline = time.monotonic() + 60
        while child.stats()["graph_bytes"] > before["least_graph_bytes"] + MIB:
            assert time.monotonic() < deadline
            child.send(op="ping", seq=0)  # answered by the main thread: it has taken a turn since
            child.wait_for("pong")
        after = child.stats()
    assert after["evicted_slabs"] > before["evicted_slabs"]
    assert after["peak_bytes"] <= 20 * MIB
