"""Thought as clients get it: events of its own, in no history, and whole after the death of an engine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import trio

import frameshard
from frameshard import errors
from frameshard.testing import fake_engine
from frameshard.wire import messages as m
from sidecars import DEADLINE_S, PATIENT, in_trio, launch, until_ready

PROMPT = "Tell me about the old lighthouse at the end of the bay."
SAMPLING = frameshard.Sampling(max_tokens=30, temperature=0.8, seed=5, logit_bias=(m.LogitBias(-100.0, token=2),))
"""Without the bias the model could end its output in the thought."""

LIMIT = 12


def test_the_engine_is_killed_in_a_thought_and_behind_it(opening_model: Path) -> None:
    """Thought and text are those of an undisturbed run, also where the end of the thought is put in."""

    async def main() -> None:
        options = {"device": "emulated", "mode": "stream_only", "n_parallel": 1, "n_ctx": 512, "n_ubatch": 64}
        async with frameshard.launch(
            opening_model, log=subprocess.DEVNULL, n_threads=1, **options, **PATIENT
        ) as client:

            async def said(kill_at: int | None = None) -> tuple[str, str, int, int]:
                """Thought, text and their tokens. The engine is killed when so many tokens have come."""
                broker = (await client.stats()).broker
                heard = 0

                def hear(part: m.Thought | m.Delta) -> None:
                    nonlocal heard, kill_at
                    heard += part.tokens
                    if kill_at is not None and heard >= kill_at:
                        assert broker.engine_pid is not None
                        os.kill(broker.engine_pid, signal.SIGKILL)
                        kill_at = None

                asked = client.ask(PROMPT, sampling=SAMPLING, thinking="shown", thinking_tokens=LIMIT)
                async with asked as stream:
                    stream.on_thought = hear
                    async for delta in stream:
                        hear(delta)
                assert kill_at is None
                assert stream.result is not None
                return stream.thought, stream.text, stream.result.n_thought, stream.result.n_generated

            expected = await said()
            assert expected[0].strip()
            assert expected[1].strip()
            assert expected[2] >= LIMIT
            assert expected[3] == SAMPLING.max_tokens
            places = (1, LIMIT - 1, LIMIT, LIMIT + 4)
            for deaths, place in enumerate(places, 1):
                assert await said(place) == expected
                await until_ready(client, deaths)
            assert (await client.stats()).broker.engine_restarts == len(places)

    async def bounded() -> None:
        with trio.fail_after(2 * DEADLINE_S):
            await main()

    trio.run(bounded)


@in_trio
async def test_a_thought_is_shown_or_hidden_and_in_no_history(opening_model: Path) -> None:
    async with frameshard.launch(opening_model, device="cpu", n_threads=1, log=subprocess.DEVNULL) as client:
        assert (await client.model_info()).thinks
        asked = {"sampling": SAMPLING, "thinking_tokens": LIMIT, "conversation": "keeper"}
        shown = client.ask(PROMPT, thinking="shown", **asked)
        answer = await shown.completed()
        assert shown.thought.strip()
        assert shown.thought not in answer.text
        assert answer.n_thought > 0
        assert [message.content for message in client.history("keeper")] == [PROMPT, answer.text]
        assert shown.thought.encode() not in client.save("keeper")

        hidden = client.ask(PROMPT, thinking="hidden", **{**asked, "conversation": "other"})
        assert (await hidden.completed()).n_thought == answer.n_thought
        assert hidden.thought == ""
        off = await client.ask(PROMPT, sampling=SAMPLING).completed()
        assert off.n_thought == 0
        with pytest.raises(errors.BadArgument, match="completion has no chat template"):
            client.complete(PROMPT, thinking="shown").begin()


@in_trio
async def test_a_slow_reader_gets_larger_parts_of_a_thought() -> None:
    async with launch(engine=fake_engine()) as client:
        parts: list[m.Thought] = []
        async with client.ask("one two", thinking="shown", thinking_tokens=200, window=1) as stream:
            stream.on_thought = parts.append
            while (await client.stats()).broker.jobs_running != 0:
                await trio.sleep(0.01)
            result = await stream.completed()
        assert "".join(part.text for part in parts) == stream.thought == "".join(f"hm{i} " for i in range(200))
        assert sum(part.tokens for part in parts) == result.n_thought == 200
        assert len(parts) < 20
        assert result.text == "one two"
