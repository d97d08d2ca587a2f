"""Guessed tokens change how fast a text comes and nothing else, on the real model; so do a draft model's.

llama.cpp's CPU kernels give a token the same bits in a batch of any length, as long as its sequence has fewer than 512
cells: there the text must be that of an engine that never guesses. With more, attention adds up in another order for a
single token, so a text is repeated only if its batches are.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

from frameshard.engine.draft import Draft, Guesses
from frameshard.engine.lookup import Lookup, best_length
from frameshard.engine.runtime import DecodeAborted, EngineConfig, Rows, Runtime

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
    with engine(model_path, **STREAMING, n_ctx=1024) as child:
        yield child


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[EngineProcess]:
    with engine(model_path, **STREAMING, n_ctx=1024, speculate="off") as child:
        yield child


@pytest.fixture(scope="module")
def drafting(model_path: Path) -> Iterator[EngineProcess]:
    """The model is its own draft: nearly all that it guesses of a greedy answer is right, and of a drawn one much is
    not."""
    with engine(model_path, **STREAMING, n_ctx=1024, draft_model=str(model_path)) as child:
        yield child


def drafted(child: EngineProcess) -> tuple[int, int]:
    """The draft model's guesses decoded so far, and those of them that were right."""
    stats = child.stats()
    return stats["drafted_tokens"], stats["drafted_right"]


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
            child.load(model_path, **STREAMING, n_ctx=1024, n_parallel=4, n_threads=1)
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
    fields: dict[str, object] = {"device": "emulated", "link_gbps": 1.0, "n_ctx": 512, "n_parallel": 1}
    with engine(model_path, **fields, draft_model=str(model_path)) as child:
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


# --- a draft model ----------------------------------------------------------------------------------------------------

TALE = user("Tell me a tale of a fox and a clock.")


def test_a_draft_does_not_change_the_text(drafting: EngineProcess, plain: EngineProcess) -> None:
    answer = ids(drafting.run(TALE, params={"max_tokens": 20}))
    assert answer == ids(plain.run(TALE, params={"max_tokens": 20}))
    made, right = drafted(drafting)
    assert right > 0.5 * made
    assert right > 0.3 * len(answer)  # 1.4 tokens a step and more
    params = {**WARM, "max_tokens": 24}
    whole = drafting.run(TALE, params=params)
    assert ids(whole) == ids(plain.run(TALE, params=params))
    drawn = drafted(drafting)
    assert right < drawn[1] < drawn[0]
    assert drafted(plain) == (0, 0)
    said = ids(whole)[:11]  # and another engine ends it
    rest = drafting.run(TALE, params=params, resume=said, history=whole[0]["history"])
    assert said + ids(rest) == ids(whole)


def test_a_draft_beside_an_answer_of_a_given_form(drafting: EngineProcess, plain: EngineProcess) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    params = {"json_schema": json.dumps({**schema, "required": ["name", "age"]}), "max_tokens": 40}
    before = drafted(drafting)
    answer = text(drafting.run(user("Who are you?"), params=params))
    assert set(json.loads(answer)) == {"name", "age"}
    assert answer == text(plain.run(user("Who are you?"), params=params))
    assert drafted(drafting)[0] > before[0]


def test_a_draft_for_jobs_together_and_one_that_is_cancelled(drafting: EngineProcess) -> None:
    params = {"max_tokens": 12}
    before = drafted(drafting)
    alone = [ids(drafting.run(prompt, params=params)) for prompt in (TALE, REPEATING)]
    stopped = drafting.submit(REPEATING, conversation="inn", params={"max_tokens": 400})
    jobs = [drafting.submit(prompt, params=params) for prompt in (TALE, REPEATING)]
    drafting.wait_for("token", job=stopped)
    drafting.send(op="cancel", job=stopped)
    events = drafting.finish(stopped, *jobs)
    assert events[stopped][-1]["ev"] == "cancelled"
    assert [ids(events[job]) for job in jobs] == alone
    again = drafting.run(REPEATING, conversation="inn", params=params)
    assert again[0]["n_reused"] > 40
    assert ids(again) == alone[1]
    assert drafted(drafting)[1] > before[1]


def test_what_a_draft_says(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameshard.engine.draft.CHUNK", 96)
    config = EngineConfig(str(model_path), device="emulated", n_ctx=1024, n_parallel=2, n_threads=1)
    with Runtime.load(config) as runtime, contextlib.closing(Draft(runtime, str(model_path))) as draft:
        assert runtime.device is not None
        before = runtime.device.stats()
        texts = {0: runtime.tokenize(REPEATING), 1: runtime.tokenize("Once upon a")}
        guesses = draft.guess(texts, 6)
        assert draft.guess({1: texts[1]}, 6) == {1: guesses[1]}
        assert draft.unread(0, texts[0] + guesses[0][:3] + [1]) == 1  # the first three were right
        other = texts[0][:20] + texts[1]
        assert draft.unread(0, other) == len(texts[1])
        assert draft.guess({0: other}, 2) != {0: guesses[0][:2]}
        assert draft.guess({0: texts[0]}, 6) == {0: guesses[0]}
        long = texts[1] * 40
        steps = 0
        while not (guess := draft.guess({1: long}, 1)):
            steps += 1
        assert steps == (len(long) - 1) // 96
        assert draft.unread(1, long + guess[1]) == 1
        assert 0 < draft.seconds(1, 1, 0, 9) < draft.seconds(1, 4, 0, 9) < draft.seconds(1, 4, 100, 9)
        assert draft.seconds(1, 4, 100, 90) < draft.seconds(1, 4, 100, 9)
        took = draft.seconds(1, 4, 0, 9)
        for _ in range(200):
            draft.pass_over()
        assert draft.seconds(1, 4, 0, 9) < 0.4 * took  # worth a try again
        after = runtime.device.stats()
        assert (after.used_bytes, after.buffers_bytes) == (before.used_bytes, before.buffers_bytes)
        for seq, tokens in texts.items():
            runtime.decode([Rows(seq, tokens[:-1], "none")])
            rows = runtime.decode([Rows(seq, tokens[-1:] + guesses[seq][:-1], "all")])
            assert [int(runtime.logits(row).argmax()) for row in rows] == guesses[seq]
        runtime.abort()
        with pytest.raises(DecodeAborted):
            draft.guess({0: other}, 2)
        runtime.resume()
        assert draft.guess({0: texts[0]}, 6) == {0: guesses[0]}


@pytest.mark.parametrize("other", ["size", "piece", "state"])
def test_a_draft_that_cannot_guess_is_refused(
    other: str, model_path: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, draft = tiny_model("llama"), tmp_path / "draft.gguf"
    if other == "piece":
        draft.write_bytes(model.read_bytes().replace("▁w700".encode(), "▁x700".encode()))
    else:
        draft = model_path if other == "size" else tiny_model("rwkv7")
    child = EngineProcess()
    try:
        event = child.load(model, device="emulated", n_ctx=256, n_parallel=1, n_threads=1, draft_model=str(draft))
        assert event["ev"] == "fatal"
        expected = {
            "size": ("bad_model", "its vocabulary has 49152 tokens, not 1024"),
            "piece": ("bad_model", "token 959 is '▁x700'"),
            "state": ("unsupported", "choose another"),
        }
        assert event["error"]["name"] == expected[other][0]
        assert expected[other][1] in event["error"]["message"]
    finally:
        child.close()


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


def test_what_a_draft_is_worth_is_learned() -> None:
    guesses = Guesses()
    usual = guesses.expected(1)
    for token in range(40):
        guesses.next = [token] if token % 2 else []
        guesses.add(token)
    assert guesses.expected(1) > usual + 0.1
    for token in range(40):
        guesses.next = [token + 1, token + 1]
        guesses.add(token)
        assert not guesses.next  # what follows a wrong one is no guess any more
    assert guesses.expected(8) < 1.2
    for token in range(100):
        guesses.add(token)
    assert guesses.expected(1) == pytest.approx(usual, abs=0.02)  # worth a try again


def test_as_many_guesses_as_pay() -> None:
    def expected(n_guesses: int) -> float:
        return sum(0.8**i for i in range(n_guesses + 1))

    assert best_length(expected, lambda n: 1.0, 16)[0] == 16
    assert best_length(expected, lambda n: 1.0, 7)[0] == 4
    assert best_length(expected, lambda n: 1.0 + 0.2 * (n - 1), 16)[0] == 4
    assert best_length(expected, lambda n: float(n), 16)[0] == 1
