"""Saved conversations with a real model: the sidecar is killed, and another one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import trio

import frameshard
from frameshard.wire import messages as m
from sidecars import gone_after, in_trio, until_lost

GREEDY = m.Sampling(max_tokens=24, temperature=0.0)
QUESTIONS = ("Any rooms left?", "And what is there for breakfast?", "Thank you. Who lives in the lighthouse?")


def launch(model: Path, **options: object) -> frameshard.ClientScope:
    options = {"device": "emulated", "n_ctx": 512, "n_threads": 1, "mode": "stream_only", **options}
    return frameshard.launch(model, log=subprocess.DEVNULL, **options)  # type: ignore[arg-type]


async def ask(client: frameshard.Client, question: str) -> str:
    text = (await client.ask(question, conversation="inn", system="You keep an inn.", sampling=GREEDY).completed()).text
    assert len(text) > 20
    return text


@in_trio
async def test_a_conversation_goes_on_after_the_sidecar_was_killed(model_path: Path) -> None:
    """At another budget, too. The text is that of an undisturbed run."""
    async with launch(model_path, vram_budget_mb=120) as client:
        undisturbed = [await ask(client, question) for question in QUESTIONS]
    async with launch(model_path, vram_budget_mb=120) as client:
        texts = [await ask(client, question) for question in QUESTIONS[:2]]
        save = client.save("inn")
        broker = (await client.stats()).broker
        assert broker.engine_pid is not None
        for pid in (broker.engine_pid, broker.pid):
            os.kill(pid, signal.SIGKILL)
        await until_lost(client)
    await trio.to_thread.run_sync(gone_after, [broker.pid, broker.engine_pid])
    async with launch(model_path, vram_budget_mb=90) as client:
        assert client.load(save, conversation="inn") == frameshard.LoadResult(same_model=True, same_template=True)
        texts.append(await ask(client, QUESTIONS[2]))
    assert texts == undisturbed
