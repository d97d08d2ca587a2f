"""Saved conversations and KV caches with real engines: the sidecar is killed, and another one goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import frameshard
from frameshard.errors import BadArgument
from frameshard.wire import messages as m
from make_adapter import make_adapter
from sidecars import gone_after, in_trio, until_lost

GREEDY = m.Sampling(max_tokens=24, temperature=0.0)
QUESTIONS = ("Any rooms left?", "And what is there for breakfast?", "Thank you. Who lives in the lighthouse?")


def launch(model: Path, **options: object) -> frameshard.ClientScope:
    options = {"device": "emulated", "n_ctx": 512, "n_threads": 1, "mode": "stream_only", **options}
    return frameshard.launch(model, log=subprocess.DEVNULL, **options)  # type: ignore[arg-type]


async def ask(client: frameshard.Client, question: str, sampling: m.Sampling = GREEDY) -> frameshard.Completion:
    stream = client.ask(question, conversation="inn", system="You keep an inn.", sampling=sampling)
    done = await stream.completed()
    assert len(done.text) > 20
    return done


async def kill(client: frameshard.Client) -> None:
    broker = (await client.stats()).broker
    assert broker.engine_pid is not None
    for pid in (broker.engine_pid, broker.pid):
        os.kill(pid, signal.SIGKILL)
    await until_lost(client)
    await trio.to_thread.run_sync(gone_after, [broker.pid, broker.engine_pid])


@in_trio
async def test_a_conversation_goes_on_after_the_sidecar_was_killed(deep_model: Path) -> None:
    """At another budget, too. The text is that of an undisturbed run."""
    async with launch(deep_model, vram_budget_mb=18) as client:
        undisturbed = [(await ask(client, question)).text for question in QUESTIONS]
    async with launch(deep_model, vram_budget_mb=18) as client:
        texts = [(await ask(client, question)).text for question in QUESTIONS[:2]]
        save = client.save("inn")
        await kill(client)
    async with launch(deep_model, vram_budget_mb=14) as client:
        assert client.load(save, conversation="inn") == frameshard.LoadResult(same_model=True, same_template=True)
        texts.append((await ask(client, QUESTIONS[2])).text)
    assert texts == undisturbed


@in_trio
async def test_a_kv_cache_goes_on_after_the_sidecar_was_killed(deep_model: Path, tmp_path: Path) -> None:
    """At another budget, and with random choices, which the smallest difference of the logits would change. Damaged
    files, and a file of another type of KV cache, are not used: the text is read anew."""
    path, random_choices = tmp_path / "inn.kv", m.Sampling(max_tokens=48, temperature=2.0, top_k=0, top_p=1, seed=7)
    async with launch(deep_model, vram_budget_mb=18) as client:
        for question in QUESTIONS[:2]:
            await ask(client, question)
        save, written = client.save("inn"), await client.save_kv("inn", path)
        assert written.detail == ""
        assert written.file_bytes == path.stat().st_size
        undisturbed = await ask(client, QUESTIONS[2], random_choices)
        await kill(client)
    async with launch(deep_model, vram_budget_mb=14) as client:
        client.load(save, conversation="inn")
        read = await client.load_kv(path, conversation="inn")
        assert (read.n_tokens, read.file_bytes) == (written.n_tokens, written.file_bytes)
        again = await ask(client, QUESTIONS[2], random_choices)
        assert (again.text, again.n_reused) == (undisturbed.text, undisturbed.n_reused)
        whole, dice = path.read_bytes(), random.Random(19)
        for _ in range(20):
            at = dice.randrange(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
            answer = await client.load_kv(path, conversation="inn")
            assert answer.n_tokens == 0
            assert answer.detail
        path.write_bytes(whole)
    async with launch(deep_model, kv_type="q8_0") as client:
        client.load(save, conversation="inn")
        answer = await client.load_kv(path, conversation="inn")
        assert (answer.n_tokens, "kv_type" in answer.detail) == (0, True)
        assert (await ask(client, QUESTIONS[2])).n_reused == 0
        with pytest.raises(BadArgument):
            await client.load_kv(path, conversation="")


@in_trio
async def test_a_load_waits_for_the_save_before_it(deep_model: Path, tmp_path: Path) -> None:
    """Also while another job keeps the engine busy: the save waits for its step."""
    path, long = tmp_path / "inn.kv", m.Sampling(max_tokens=400, temperature=0.0)
    async with launch(deep_model) as client, trio.open_nursery() as nursery:
        await ask(client, QUESTIONS[0])
        async with client.ask("Tell a story.", conversation="harbour", sampling=long) as story:
            await story.__anext__()
            nursery.start_soon(client.save_kv, "inn", path)
            await wait_all_tasks_blocked()
            loaded = await client.load_kv(path, conversation="inn")
        assert (loaded.detail, loaded.file_bytes) == ("", path.stat().st_size)


@in_trio
async def test_a_kv_cache_that_adapters_have_made(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It is used with the same adapters under the same names, and not with others."""
    model = tiny_model("llama")
    path = tmp_path / "inn.kv".rjust(255, "i")  # the longest name of most file systems
    files = [tmp_path / f"{seed}.gguf" for seed in (1, 2)]
    for seed, file in enumerate(files, start=1):
        make_adapter(model, file, seed=seed)
    sampling, used = m.Sampling(max_tokens=16, temperature=0.0), {"pirate": 0.8, "sailor": -0.5}

    async def go_on(client: frameshard.Client, prompt: str) -> frameshard.Completion:
        return await client.complete(prompt, sampling=sampling, conversation="inn", adapters=used).completed()

    start = "Once upon a time there was an inn by the sea, and its keeper was an old man."
    names = dict(zip(used, files, strict=True))
    async with launch(model, adapters=names) as client:
        begun = start + (await go_on(client, start)).text
        written = await client.save_kv("inn", path)
        assert (written.detail, written.n_tokens > 0) == ("", True)
        undisturbed = await go_on(client, begun)
        await kill(client)
    async with launch(model, adapters=names) as client:
        assert (await client.load_kv(path, conversation="inn")).n_tokens == written.n_tokens
        again = await go_on(client, begun)
        assert (again.text, again.n_reused) == (undisturbed.text, undisturbed.n_reused)
        assert again.n_reused > 0
    async with launch(model, adapters=dict(zip(used, reversed(files), strict=True))) as client:
        answer = await client.load_kv(path, conversation="inn")
        assert (answer.n_tokens, "pirate" in answer.detail) == (0, True)
        assert (await go_on(client, begun)).n_reused == 0
