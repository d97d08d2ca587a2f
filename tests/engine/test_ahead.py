"""Steps of a prompt that are prepared while the one before runs, on the emulated device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forks import run_script

LOAD = """
import contextlib, json, sys
from frameshard.engine.batch import Batcher
from frameshard.engine.llama import DecodeAborted, Rows
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.wire import engine as em
from frameshard.wire.messages import Sampling

path, mode = sys.argv[1:]
config = em.EngineConfig(
    path, device="emulated", n_ctx=1024, n_ubatch=64, n_parallel=2, n_threads=1, mode=mode
)
runtime = Runtime.load(config, fill=False, measure=False)
runtime.device.set_budget(runtime.device.stats().floor_bytes, timeout_s=60)
words = runtime.tokenizer.tokenize("The keeper counts ships, gulls and the hours until the lamp is lit again. " * 8)
tokens = words[:300]
chunks = []
while (n_left := len(tokens) - sum(map(len, chunks))) > 0:
    chunks.append(tokens[len(tokens) - n_left :][: runtime.next_step(n_left)])
"""

SAME = """
for chunk in chunks[:-1]:
    runtime.decode([Rows(0, chunk, "none")])
(row,) = runtime.decode([Rows(0, chunks[-1])])
one_by_one = runtime.logits(row).tolist()
ahead = runtime.decode_tokens(1, tokens)[0].tolist()
stats = runtime.device.stats()
print(json.dumps([one_by_one == ahead, runtime.length(1), stats.streamed_bytes + stats.cpu_bytes]))
"""

TAKEN_BACK = """
def read(first, abort_at=None):
    for i, chunk in list(enumerate(chunks))[first:]:
        if i == abort_at:
            runtime.abort()
        rows = runtime.decode([Rows(0, chunk, "none" if i < 4 else "last")], ahead=i < 4)
    return runtime.logits(rows[0]).tolist()

whole = read(0)
lengths, same = [], []
for abort_at in range(5):
    runtime.clear(0)
    with contextlib.suppress(DecodeAborted):
        read(0, abort_at)
    runtime.resume()
    lengths.append(runtime.length(0))
    same.append(read(lengths[-1] // 64) == whole)
print(json.dumps([lengths, same]))
"""

COPIED = """
batcher, reader = Batcher(runtime), RequestReader(runtime)
copied, graphs = [], []
for n_words in (1, 12):
    prompt = "the keeper counts ships " * n_words
    before = runtime.device.stats()
    batcher.add(reader.read(em.Submit(1, "completion", Sampling(max_tokens=1), prompt=prompt)))
    while batcher.busy:
        batcher.step()
    now = runtime.device.stats()
    copied.append(now.copied_bytes - before.copied_bytes)
    graphs.append(now.graphs - before.graphs)
head = sum(shard.n_bytes for shard in runtime.placement.ladder if shard.kind == "output")
print(json.dumps([copied, graphs, head, now.ring_bytes]))
"""


def run(script: str, model: Path, mode: str = "stream_only") -> Any:
    result = run_script(LOAD + script, model, mode)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "mamba2"])
@pytest.mark.parametrize("mode", ["stream_only", "planned"])
def test_the_result_is_that_of_one_step_after_the_other(
    name: str, mode: str, tiny_model: Callable[[str], Path]
) -> None:
    same, length, left_out_bytes = run(SAME, tiny_model(name), mode)
    assert same
    assert length == 300
    assert left_out_bytes > 0


@pytest.mark.parametrize("name", ["llama", "deepseek4", "falcon-h1", "mamba2"])
def test_a_step_that_was_not_complete_for_certain_is_taken_back(name: str, tiny_model: Callable[[str], Path]) -> None:
    """An abort ends the step that runs or the next one, which raises the error. A recurrent state is lost."""
    lengths, same = run(TAKEN_BACK, tiny_model(name))
    assert lengths == ([0, 0, 64, 128, 192] if name == "llama" else [0] * 5)
    assert same == [True] * 5


def test_only_the_end_of_a_prompt_computes_logits(tiny_model: Callable[[str], Path]) -> None:
    """The output head is copied once for a job, however many steps its prompt takes. What the ring has copied ahead for
    the last graph of a job is copied in vain."""
    (short, long), (once, often), head, ring = run(COPIED, tiny_model("llama"))
    assert (once, often) == (1, 7)
    heads = (often - 1) * head
    assert ring < heads
    assert 4 * short < long < often * short - heads + ring
