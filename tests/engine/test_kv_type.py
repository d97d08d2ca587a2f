"""Quantised KV caches on the emulated device."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from engine_driver import engine, text, user

import frameshard
from frameshard.errors import BadArgument, Unsupported
from frameshard.plan.memory import check_kv_type, estimate_context
from frameshard.plan.model import read_model
from frameshard.plan.workload import Workload
from frameshard.wire import messages as m

MIB = 1 << 20
QUESTION = "Tell me about castles."
FIELDS: dict[str, object] = {
    "device": "emulated",
    "mode": "stream_only",
    "kv_type": "q8_0",
    "n_ctx": 1024,
    "n_parallel": 1,
}


def reference(model_path: Path, kv_type: str) -> str:
    loop = Path(__file__).parent / "reference_loop.py"
    done = subprocess.run(
        [sys.executable, str(loop), str(model_path), QUESTION, "40", kv_type],
        capture_output=True,
        check=True,
        timeout=120,
    )
    return done.stdout.decode()


def test_llama_cpps_text_in_half_of_the_bytes_at_any_budget(model_path: Path) -> None:
    with engine(model_path, **FIELDS) as child:
        told = text(child.run(user(QUESTION), params={"max_tokens": 40}, conversation="a"))
        stats = child.stats()
        floor = int(stats["floor_bytes"])
        assert stats["kv_bytes"] == pytest.approx(30 * 2 * 192 * 256 * 34 / 32, rel=0.01)  # 2 bytes per value in F16
    assert told == reference(model_path, "q8_0") != reference(model_path, "q4_0")
    with engine(model_path, **FIELDS, vram_budget_bytes=floor) as child:
        assert text(child.run(user(QUESTION), params={"max_tokens": 40}, conversation="a")) == told
        stats = child.stats()
        assert stats["kv_host_bytes"] > 0
        assert stats["peak_bytes"] <= floor == stats["floor_bytes"]


def test_a_conversation_survives_a_shrink_parking_and_hibernating(deep_model: Path) -> None:
    greedy = m.Sampling(max_tokens=24, temperature=0.0)

    async def main() -> None:
        options = {"n_ctx": 1024, "n_parallel": 1, "n_threads": 1, "mode": "stream_only", "kv_type": "q8_0"}
        with trio.fail_after(120):
            async with frameshard.launch(
                deep_model, device="emulated", vram_budget_mb=20, log=subprocess.DEVNULL, **options
            ) as client:
                low = (await client.caps_and_requirements()).floor_bytes / MIB
                texts = []
                for state in (None, "active", "parked", "hibernated"):
                    async with client.ask(QUESTION, sampling=greedy) as stream:
                        async for _ in stream:
                            if state is not None and len(stream.text) > 20:
                                await client.set_budget(low, state=state, timeout_s=30)
                                await client.set_budget(20, timeout_s=30)
                                state = None
                        texts.append(stream.text)
                assert len(set(texts)) == 1
                assert len(texts[0]) > 40

    trio.run(main)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_an_idle_sidecar_shrinks_to_its_floor(model_path: Path, kv_type: str) -> None:
    """Where no sequence has cells, there is nothing to give back: the padding of quantised rows counted as storage."""

    async def main() -> None:
        options = {"n_ctx": 512, "n_parallel": 3, "n_threads": 1, "kv_type": kv_type}
        with trio.fail_after(120):
            async with frameshard.launch(model_path, device="emulated", log=subprocess.DEVNULL, **options) as client:
                floor_bytes = (await client.caps_and_requirements()).floor_bytes
                await client.set_budget(floor_bytes / MIB, timeout_s=20)
                assert (await client.stats()).engine["used_bytes"] <= floor_bytes

    trio.run(main)


def test_what_llama_cpp_would_refuse_is_said_beforehand(model_path: Path) -> None:
    model = read_model(model_path)
    for kv_type in ("f16", "q8_0", "q4_0"):
        check_kv_type(model, kv_type)
    for name in ("key_length", "value_length_swa"):
        odd = dataclasses.replace(model, metadata={**model.metadata, f"{model.arch}.attention.{name}": 80})
        check_kv_type(odd, "f16")
        with pytest.raises(Unsupported, match="heads of 80") as refused:
            check_kv_type(odd, "q4_0")
        assert "kv_type f16" in refused.value.message
    with pytest.raises(BadArgument, match="f16, q8_0, q4_0"):
        frameshard.launch(model_path, kv_type="q5_1")


def test_plans_count_what_they_take(model_path: Path) -> None:
    model = read_model(model_path)
    f16, q8_0, q4_0 = (
        estimate_context(model, "emulated", Workload(4096, 1000, kv_type=kv_type))
        for kv_type in ("f16", "q8_0", "q4_0")
    )
    for size in ("used", "whole", "window"):
        assert getattr(q8_0, size) == pytest.approx(getattr(f16, size) * 8.5 / 16, rel=0.01)
        assert getattr(q4_0, size) == pytest.approx(getattr(f16, size) * 4.5 / 16, rel=0.01)
