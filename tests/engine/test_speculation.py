"""Guessed tokens change how fast a text comes and nothing else, on the real model.

llama.cpp's CPU kernels give a token the same bits in a batch of any length, as long as its sequence has fewer than 512
cells: there the text must be that of an engine that never guesses. With more, attention adds up in another order for a
single token, so a text is repeated only if its batches are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

from frameshard.engine.lookup import Lookup

RULES = (
    "Rules of the Red Dragon Inn: no weapons at the table, no magic indoors, no talk of the drowned bell after dark, "
    "and every guest pays before sleeping.\n"
)
REPEATING = RULES * 2 + "Rules of the Red Dragon Inn: no weapons"
LONG = RULES * 7  # its answer passes 256 cells, where the kernels get 512
WARM = {"temperature": 0.8, "seed": 4}
PROMPTS = (REPEATING, user(RULES + "Repeat the rules of the house."))
STREAMING: dict[str, object] = {"device": "emulated", "mode": "stream_only"}


@pytest.fixture(scope="module")
def guessing(model_path: Path) -> Iterator[EngineProcess]:
    with engine(model_path, **STREAMING, n_ctx=4096) as child:
        yield child


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[EngineProcess]:
    with engine(model_path, **STREAMING, n_ctx=4096, speculate="off") as child:
        yield child


def guessed(child: EngineProcess) -> tuple[int, int]:
    """Guesses decoded so far, and those of them that were right."""
    stats = child.stats()
    return stats["guessed_tokens"], stats["guessed_right"]


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {**WARM, "repeat_penalty": 1.05}, {"max_tokens": 60, "stop": ["after dark"]}])
def test_the_text_of_an_engine_that_never_guesses(
    guessing: EngineProcess, plain: EngineProcess, params: dict[str, object]
) -> None:
    before = guessed(guessing)
    for prompt in PROMPTS:
        events = guessing.run(prompt, params=params)
        expected = plain.run(prompt, params=params)
        assert [event["n"] for event in events if event["ev"] == "token"] == list(range(len(ids(events))))
        assert [e for e in events if e["ev"] == "token"] == [{**e, "job": events[0]["job"]} for e in expected[1:-1]]
        assert [events[-1][key] for key in ("reason", "n_generated")] == [
            expected[-1][key] for key in ("reason", "n_generated")
        ]
    assert guessed(guessing)[1] > before[1]
    assert guessed(plain) == (0, 0)


def test_an_answer_of_a_given_form(guessing: EngineProcess, plain: EngineProcess) -> None:
    schema = {"type": "array", "items": {"enum": ["no weapons", "no magic"]}, "minItems": 5, "maxItems": 8}
    params = {"json_schema": json.dumps(schema), "max_tokens": 80, **WARM}
    before = guessed(guessing)
    answer = text(guessing.run(user(RULES + "List the rules."), params=params))
    assert 5 <= len(json.loads(answer)) <= 8
    assert answer == text(plain.run(user(RULES + "List the rules."), params=params))
    assert guessed(guessing)[1] > before[1]


def test_jobs_together_say_what_they_say_alone(guessing: EngineProcess) -> None:
    alone = [ids(guessing.run(prompt, params=WARM)) for prompt in PROMPTS]
    before = guessed(guessing)
    jobs = [guessing.submit(prompt, params=WARM) for prompt in PROMPTS]
    together = guessing.finish(*jobs)
    assert [ids(together[job]) for job in jobs] == alone
    assert guessed(guessing)[1] > before[1]


def test_a_shorter_answer_begins_the_longer_one(guessing: EngineProcess) -> None:
    whole = ids(guessing.run(REPEATING, params={"max_tokens": 20}))
    for n in (1, 2, 3, 7, 12, 19):
        events = guessing.run(REPEATING, params={"max_tokens": n})
        assert ids(events) == whole[:n]
        assert (events[-1]["reason"], events[-1]["n_generated"]) == ("length", n)


def test_same_text_at_any_budget(guessing: EngineProcess) -> None:
    params = {"max_tokens": 50, **WARM}
    before = guessed(guessing)
    alone = ids(guessing.run(LONG, params=params))
    assert guessed(guessing)[1] > before[1]
    stats = guessing.stats()
    floor, full = stats["floor_bytes"], stats["full_bytes"]
    budgets = {3: floor, 12: (floor + full) // 2, 25: floor}
    job = guessing.submit(LONG, params=params)
    events: list[Event] = []
    while not events or events[-1]["ev"] != "done":
        event = guessing.next_event()
        if event.get("job") == job:
            events.append(event)
            if event["ev"] == "token" and event["n"] in budgets:
                guessing.budget(budgets[event["n"]])
    assert ids(events) == alone
    assert ids(guessing.run(LONG, params=params)) == alone
    guessing.budget(0)
    guessing.wait_for("budget")
    guessing.wait_for("budget")


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_engine_is_killed_in_the_middle_of_an_answer(guessing: EngineProcess, model_path: Path) -> None:
    """And another goes on where it was: in a second turn, so that guesses of the first are in what is read again."""
    turn = user(RULES * 5 + "Repeat the rules.")
    first = guessing.run(turn, conversation="inn", params=WARM)
    turn += [{"role": "assistant", "content": text(first)}, *user("Again, all of the rules.")]
    params = {"max_tokens": 50, **WARM}
    before = guessed(guessing)
    whole = guessing.run(turn, conversation="inn", params=params)
    assert whole[0]["n_reused"] > first[0]["n_prompt"]
    assert any(kept < decoded for kept, decoded, _ in whole[0]["history"])
    assert guessed(guessing)[1] > before[1]
    said: list[int] = []
    for _ in range(2):
        child = EngineProcess()
        try:
            child.load(model_path, **STREAMING, n_ctx=4096, n_parallel=4, n_threads=1)
            job = child.submit(turn, params=params, resume=said, history=whole[0]["history"])
            for _ in range(9):
                said.append(child.wait_for("token", job=job)["id"])
            child.process.kill()
        finally:
            child.close()
    assert said == ids(whole)[:18]
    rest = guessing.run(turn, params=params, resume=said, history=whole[0]["history"])
    assert said + ids(rest) == ids(whole)


def test_a_conversation_goes_on_from_what_was_kept(guessing: EngineProcess) -> None:
    """Its answers end in the middle of guesses: by length, by a stop string, and by a cancel."""
    prompt = "Count: 1 2 3 1 2 3 1 2 3"
    for params in ({"max_tokens": 17}, {"stop": [" 3 1"]}, {}):
        job = guessing.submit(prompt, conversation="kept", params={"max_tokens": 400, **params})
        if not params:
            for _ in range(9):
                guessing.wait_for("token", job=job)
            guessing.send(op="cancel", job=job)
        guessing.finish(job)
        prompt += " 1 2 3 1 2 3 4 5 6"
    again = guessing.run(prompt, conversation="kept")
    assert again[0]["n_reused"] > 30
    assert ids(again) == ids(guessing.run(prompt))


def test_up_to_the_end_of_the_context(model_path: Path) -> None:
    with engine(model_path, **STREAMING, n_ctx=256, n_parallel=1) as child:
        events = child.run("Count: 1 2 3 1 2 3 1 2 3", params={"max_tokens": None})
        assert (events[-1]["reason"], events[-1]["n_generated"]) == ("length", 256 - events[0]["n_prompt"])
        assert guessed(child)[1] > 50


def test_planned_mode_says_the_same(model_path: Path, plain: EngineProcess) -> None:
    with engine(model_path, device="emulated", link_gbps=1.0, n_ctx=512, n_parallel=1) as child:
        child.budget(child.stats()["floor_bytes"])
        for prompt in (REPEATING, "Count: 1 2 3 1 2 3 1 2 3"):
            assert ids(child.run(prompt, params=WARM)) == ids(plain.run(prompt, params=WARM))


# --- when not to ------------------------------------------------------------------------------------------------------


def test_text_that_does_not_repeat_is_not_guessed(guessing: EngineProcess) -> None:
    before = guessed(guessing)
    wild = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "max_tokens": 60}
    assert len(ids(guessing.run("Once upon a time", params=wild))) == 60
    assert guessed(guessing) == before


@pytest.mark.parametrize("name", ["lfm2", "rwkv7"])
def test_a_state_that_cannot_go_back_is_never_guessed_for(name: str, tiny_model: Callable[[str], Path]) -> None:
    with engine(tiny_model(name), **STREAMING, n_ctx=512, n_parallel=1) as child:
        child.run("ab ab ab ab ab ab ab ab", params={"max_tokens": 40})
        assert guessed(child) == (0, 0)


def test_experts_are_not_guessed_for_in_stream_only_mode(moe_path: Path) -> None:
    with engine(moe_path, **STREAMING, n_ctx=512, n_parallel=1) as child:
        child.run(REPEATING, params={"max_tokens": 8})
        assert guessed(child) == (0, 0)


# --- the guesses themselves -------------------------------------------------------------------------------------------


def test_a_guess_is_what_followed_the_longest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 9, 2, 3, 5, 9, 8, 1, 2, 3])
    assert lookup.guess(3) == [4, 9, 2]
    lookup.add(4)
    assert lookup.guess(1) == [9]


def test_without_a_match_there_is_no_guess() -> None:
    lookup = Lookup([1, 2, 3, 4])
    assert not lookup.matched
    assert lookup.guess(4) == []
    assert lookup.expected(4) == 1.0


def test_a_text_that_goes_round_is_guessed_beyond_its_end() -> None:
    assert Lookup([7, 1, 2, 1, 2, 1, 2]).guess(5) == [1, 2, 1, 2, 1]


def test_an_image_is_not_guessed() -> None:
    lookup = Lookup([1, 2, 3, -5, -6, 4, 1, 2])
    assert lookup.guess(3) == [3]
    assert not Lookup([1, -5, -6, 2, -5, -6]).matched


def test_what_a_guess_is_worth_is_learned() -> None:
    numbers = random.Random(2)
    lookup = Lookup([1, 2, 3])
    for _ in range(40):  # 1 2 is followed by something else each time
        for token in (numbers.randrange(100, 10_000), 1, 2):
            lookup.add(token)
    assert lookup.expected(1) < 1.1
    for token in [3, 4, 5, 6, 7, 8, 1, 2] * 6:
        lookup.add(token)
    assert lookup.expected(8) > 6
