"""Experts on the emulated device: copies, the expert cache, and the counts that are kept for the next run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

RUN = """
import json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.memory import estimate_steps, fixed_vram
from frameshard.plan.layout import lay_out
from frameshard.plan.model import read_model
from frameshard.plan.workload import Workload

path = sys.argv[1]
model = read_model(path)
fixed = fixed_vram(model, "emulated") + estimate_steps(model, "emulated", Workload(256, n_ubatch=64)).most_bytes
ring = lay_out(model, "emulated").min_ring_bytes
budget = fixed + 3 * ring
config = EngineConfig(
    model=path, device="emulated:20", n_ctx=256, n_ubatch=64, n_parallel=1, n_threads=1, vram_budget_bytes=budget,
    mode="stream_only",
)
with Runtime.load(config, measure=False) as runtime:
    recalled = runtime.placement.routing is not None and runtime.placement.routing.likely.tolist()
    experts = [(i, shard) for i, shard in enumerate(runtime.placement.ladder) if shard.kind == "experts"]
    counted = [sum(runtime.device.expert_uses(i, model.n_expert)) for i, _ in experts]
    words = runtime.tokenizer.tokenize("The keeper counts ships, gulls and the hours until the lamp is lit again. " * 8)
    copied, hits = [], []
    for tokens in ([words[0]] * 64, words[:64], words[:64]):
        runtime.clear(0)
        before = runtime.device.stats()
        runtime.decode_tokens(0, tokens)
        copied.append(runtime.device.stats().copied_bytes - before.copied_bytes)
    logits = runtime.decode_tokens(0, [words[65]])[0].tolist()
    for word in words[66:90]:
        before = runtime.device.stats()
        runtime.decode_tokens(0, [word])
        now = runtime.device.stats()
        hits.append(now.expert_hits - before.expert_hits)
    runtime.device.clear_expert_cache()
    before = runtime.device.stats()
    runtime.decode_tokens(0, [words[90]])
    forgotten = runtime.device.stats().expert_hits - before.expert_hits
    learned = runtime.placement.learn()
    again = runtime.placement.learn()
    print(json.dumps({
        "counted": counted,
        "recalled": recalled, "routing": runtime.placement.routing.likely.tolist(), "learned": learned, "again": again,
        "copied": copied, "hits": hits, "forgotten": forgotten, "logits": logits[:16],
        "experts": sum(shard.n_bytes for _, shard in experts), "resident": runtime.device.stats().resident_bytes,
        "ring": runtime.device.stats().ring_bytes,
    }))
"""


def run(model: Path, cache: Path) -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(model)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert result.returncode == 0, result.stderr
    figures: dict[str, object] = json.loads(result.stdout)
    return figures


def test_only_what_is_chosen_is_copied_and_the_next_run_knows(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_model("qwen3moe")
    first = run(path, tmp_path)
    one, many, same = first["copied"]  # type: ignore[misc]
    # A prompt with the same word 64 times uses a few experts of each layer. One of many words uses nearly all.
    assert one < 0.6 * many
    assert same <= many
    assert sum(first["hits"]) > 0  # type: ignore[arg-type]
    assert first["forgotten"] == 0
    assert first["recalled"] is False
    assert not any(first["counted"])  # type: ignore[call-overload]  # the token of the warm-up does not count
    assert first["learned"]
    assert not first["again"]
    routing = first["routing"]
    assert isinstance(routing, list)
    for layer in routing:
        assert len(layer) == 16
        assert layer == sorted(layer, reverse=True)
        assert 0 < sum(layer) < 16
    second = run(path, tmp_path)
    assert second["recalled"] == routing
    assert all(second["counted"])  # type: ignore[call-overload]
    assert second["logits"] == first["logits"]
