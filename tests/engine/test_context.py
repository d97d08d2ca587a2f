"""The VRAM of the KV cache follows the length of the conversation, on the emulated device."""

from __future__ import annotations

import json
from pathlib import Path

from engine_driver import engine, text

from forks import run_script

MIB = 1 << 20
LONG = "The wind blew over the hills and the old road was empty. " * 5
FIELDS: dict[str, object] = {
    "device": "emulated",
    "mode": "stream_only",
    "n_ctx": 2048,
    "n_ubatch": 64,
    "n_parallel": 2,
}


def test_vram_goes_with_the_context_in_use(deep_model: Path) -> None:
    with engine(deep_model, **FIELDS) as child:
        empty = child.stats()
        assert empty["kv_bytes"] < 4 * MIB  # a full context takes 48 MiB
        alone = text(child.run(LONG, conversation="a"))
        one = child.stats()
        short = text(child.run("Once upon a time", conversation="b"))
        two = child.stats()
        assert empty["kv_bytes"] < one["kv_bytes"] < two["kv_bytes"] < 16 * MIB
        # A short text replaces the long one: the VRAM is freed, and the text is the same.
        assert text(child.run("Once upon a time", conversation="c")) == short
        assert child.stats()["kv_bytes"] <= two["kv_bytes"] // 2
        assert child.stats()["kv_host_bytes"] == 0
    floor = int(empty["floor_bytes"])
    with engine(deep_model, **FIELDS, vram_budget_bytes=floor) as child:
        # At the floor the KV cache does not fit in VRAM: it passes through the KV window.
        assert text(child.run(LONG, conversation="a")) == alone
        stats = child.stats()
        assert stats["kv_host_bytes"] > 0
        assert stats["peak_bytes"] <= floor == stats["floor_bytes"]
        assert stats["used_bytes"] < empty["full_bytes"] // 2


ADOPT = """
import dataclasses, json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.plan.layout import lay_out

config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=1024, n_ubatch=64, n_parallel=1, n_threads=1, kv_type="q8_0"
)
with Runtime.load(config, measure=False) as runtime:
    device = runtime.device
    device.set_budget((device.stats().floor_bytes + device.stats().full_bytes) // 2)
    runtime.decode_tokens(0, [1])
    runtime.placement.replan()
    made = runtime.placement.plan.ring_bytes
    least = lay_out(runtime.model_info, "emulated").min_ring_bytes
    adopted = dataclasses.replace(runtime.placement.plan, ring_bytes=least)
    runtime.placement.adopt(adopted)
    runtime.decode_tokens(0, list(range(100, 400)))  # a second page of keys and values
    print(json.dumps([runtime.placement.plan is adopted, made, adopted.ring_bytes, device.stats().ring_bytes]))
"""


def test_an_adopted_plan_stays_while_the_context_grows_a_little(model_path: Path) -> None:
    """Its ring is smaller than that of the plan before. That must not look as if the KV cache had taken its room."""
    result = run_script(ADOPT, model_path)
    assert result.returncode == 0, result.stderr
    stays, made, adopted, ring = json.loads(result.stdout)
    assert stays
    assert ring == adopted < made


PROMPTS = """
import json, sys
from frameshard.engine.batch import Batcher
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig, Submit
from frameshard.wire.messages import Sampling

config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=2048, n_parallel=1, n_threads=1, vram_budget_bytes=25 << 20
)
with Runtime.load(config, measure=False) as runtime:
    batcher, plans, seen = Batcher(runtime), [], []
    adopt = runtime.placement.adopt
    runtime.placement.adopt = lambda plan: (plans.append(plan), adopt(plan))

    def read(number, n_tokens):
        plans.clear()
        request = Submit(number, "completion", Sampling(max_tokens=2), prompt="a" * n_tokens)
        batcher.add(RequestReader(runtime).read(request))
        while not any(slot.job and slot.job.produced for slot in batcher._slots):
            batcher.step()
        before = len(plans)
        while runtime.placement.fill():
            pass
        after = plans[-1] if plans else None
        while batcher.busy:
            batcher.step()
        while runtime.placement.fill():
            pass
        return before, after

    kv_bytes = 2 * 16 * 3 * 64 * 2  # a token's
    assert 16 * kv_bytes * 512 > 25 << 20 > 4 * kv_bytes * 512
    first, again, longer = read(1, 400), read(2, 410), read(3, 1900)
    print(json.dumps([first[0], first[1] is not None, again[0], again[1] is first[1], longer[0]]))
"""


def test_a_prompt_does_not_wait_for_a_plan(deep_model: Path) -> None:
    """It takes more than a sixteenth of the budget. The new plan is made after it, and kept for the next prompt. A
    prompt that takes more than a quarter gets its plan before."""
    result = run_script(PROMPTS, deep_model)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [0, True, 0, True, 1]


AGAIN = """
import json, sys
from frameshard.engine.runtime import Runtime
from frameshard.plan.layout import lay_out
from frameshard.wire.engine import EngineConfig

config = EngineConfig(model=sys.argv[1], device="emulated", n_ctx=2048, n_ubatch=256, n_parallel=1, n_threads=1)
with Runtime.load(config, measure=False) as runtime:
    device, seen = runtime.device, []
    least = lay_out(runtime.model_info, "emulated").min_ring_bytes
    kv_bytes = 2 * 16 * 3 * 64 * 2 * 1500
    for quarters in (0, 3):
        runtime.clear(0)
        device.set_budget(device.stats().floor_bytes + kv_bytes // 2 + quarters * least // 4)
        device.set_plan([(0, [1] * len(runtime.placement.ladder))], ring_bytes=4 * least)  # all streamed
        for _ in range(2):
            runtime.clear(0)
            runtime.decode_tokens(0, [5] * 1500)
            stats = device.stats()
            seen.append([stats.ring_bytes, stats.kv_bytes, stats.kv_host_bytes])
            while runtime.placement.fill():
                pass
    print(json.dumps([least, *seen]))
"""


def test_keys_and_values_leave_a_prompt_the_ring(deep_model: Path) -> None:
    """Those of the prompt before it are in VRAM when the next prompt takes its compute buffer. If they stayed and the
    ring shrank to one step, copies of weights would wait for kernels. Plans give it a fourth step, which goes alone
    where there is no room for it."""
    result = run_script(AGAIN, deep_model)
    assert result.returncode == 0, result.stderr
    least, *seen = json.loads(result.stdout)
    assert seen[::2] == seen[1::2]
    for ring, kv, kv_host in seen:
        assert kv > 0
        assert kv_host > 0
        assert ring >= 3 * least


PAGE = """
import json, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig

config = EngineConfig(
    model=sys.argv[1], device="emulated", n_ctx=2048, n_parallel=1, n_threads=1, vram_budget_bytes=int(sys.argv[2])
)
with Runtime.load(config, measure=False) as runtime:
    placement, outdated = runtime.placement, []
    placement.on_outdated = lambda: outdated.append(True)
    decode, before = placement.plan.tiers[0], runtime.device.stats()
    runtime.decode_tokens(0, [5] * 300)
    placement.fill()
    after = runtime.device.stats()
    taken = after.kv_bytes + after.kv_host_bytes - before.kv_bytes - before.kv_host_bytes
    print(json.dumps([taken, decode.streamed_bytes + decode.cpu_bytes, len(outdated)]))
"""


def a_page(model: Path, budget_bytes: int) -> list[int]:
    """Takes a second page of keys and values. Returns its bytes, those that were left out of VRAM before, and the
    number of plans that were asked for."""
    result = run_script(PAGE, model, budget_bytes)
    assert result.returncode == 0, result.stderr
    found: list[int] = json.loads(result.stdout)
    return found


def test_what_displaces_much_of_the_rest_gets_a_plan(model_path: Path) -> None:
    """A page takes less than a sixteenth of the budget, but more than a sixteenth of what is left out of VRAM."""
    budget_bytes = 100 << 20
    taken, left_out, n_asked = a_page(model_path, budget_bytes)
    assert left_out / 16 < taken < budget_bytes / 16
    assert n_asked == 1


def test_what_displaces_nothing_needs_no_plan(model_path: Path) -> None:
    taken, left_out, n_asked = a_page(model_path, 1 << 30)
    assert taken > left_out == 0
    assert n_asked == 0
