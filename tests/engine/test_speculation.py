"""Speculative decoding changes the speed of an answer, not its text: with the first layers of a real model, with and
without a draft model.

With fewer than 512 cells, llama.cpp's CPU kernels give a token the same bits in a batch of any length. There the text
must be that of an engine without speculation. With more cells attention adds up in another order for a single token, so
the text is the same only if the batches are the same.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

from frameshard.engine.draft import DraftModel, DraftState
from frameshard.engine.llama import DecodeAborted, Rows
from frameshard.engine.lookup import Lookup, best_length
from frameshard.engine.runtime import Runtime
from frameshard.errors import FrameshardError
from frameshard.wire.engine import EngineConfig

RULES = (
    "Rules of the Red Dragon Inn: no weapons at the table, no magic indoors, no talk of the drowned bell after dark, "
    "and every guest pays before sleeping.\n"
)
REPEATING = RULES * 2 + "Rules of the Red Dragon Inn: no weapons"
LONG = RULES * 7  # beyond 256 cells the kernels get 512
WARM = {"temperature": 0.8, "seed": 4}
PROMPTS = (REPEATING, user(RULES + "Repeat the rules of the house."))
STREAMING: dict[str, object] = {"device": "emulated", "mode": "stream_only"}


@pytest.fixture(scope="module")
def speculating(shallow_model: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model, **STREAMING, n_ctx=1024) as child:
        yield child


@pytest.fixture(scope="module")
def plain(shallow_model: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model, **STREAMING, n_ctx=1024, speculate="off") as child:
        yield child


@pytest.fixture(scope="module")
def drafting(shallow_model: Path) -> Iterator[EngineProcess]:
    """The model is its own draft model. In a greedy answer nearly all drafts are accepted; in a sampled one many are
    rejected."""
    with engine(shallow_model, **STREAMING, n_ctx=1024, draft_model=str(shallow_model)) as child:
        yield child


def by_draft_model(child: EngineProcess) -> tuple[int, int]:
    """The tokens that the draft model has drafted so far, and how many of them were accepted."""
    stats = child.stats()
    return stats["draft_model_tokens"], stats["draft_model_accepted"]


def drafted(child: EngineProcess) -> tuple[int, int]:
    """The tokens drafted so far, and how many of them were accepted."""
    stats = child.stats()
    return stats["drafted_tokens"], stats["accepted_tokens"]


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {**WARM, "repeat_penalty": 1.05}, {"max_tokens": 60, "stop": ["after dark"]}])
def test_the_text_of_an_engine_that_does_not_speculate(
    speculating: EngineProcess, plain: EngineProcess, params: dict[str, object]
) -> None:
    before = drafted(speculating)
    for prompt in PROMPTS:
        events = speculating.run(prompt, params=params)
        expected = plain.run(prompt, params=params)
        assert [event["n"] for event in events if event["ev"] == "token"] == list(range(len(ids(events))))
        assert [e for e in events if e["ev"] == "token"] == [{**e, "job": events[0]["job"]} for e in expected[1:-1]]
        assert [events[-1][key] for key in ("reason", "n_generated")] == [
            expected[-1][key] for key in ("reason", "n_generated")
        ]
    assert drafted(speculating)[1] > before[1]
    assert drafted(plain) == (0, 0)


def test_an_answer_of_a_given_form(speculating: EngineProcess, plain: EngineProcess) -> None:
    schema = {"type": "array", "items": {"enum": ["no weapons", "no magic"]}, "minItems": 5, "maxItems": 8}
    params = {"json_schema": json.dumps(schema), "max_tokens": 80, **WARM}
    before = drafted(speculating)
    answer = text(speculating.run(user(RULES + "List the rules."), params=params))
    assert 5 <= len(json.loads(answer)) <= 8
    assert answer == text(plain.run(user(RULES + "List the rules."), params=params))
    assert drafted(speculating)[1] > before[1]


def test_jobs_together_say_what_they_say_alone(speculating: EngineProcess) -> None:
    alone = [ids(speculating.run(prompt, params=WARM)) for prompt in PROMPTS]
    before = drafted(speculating)
    jobs = [speculating.submit(prompt, params=WARM) for prompt in PROMPTS]
    together = speculating.finish(*jobs)
    assert [ids(together[job]) for job in jobs] == alone
    assert drafted(speculating)[1] > before[1]


def test_a_shorter_answer_begins_the_longer_one(speculating: EngineProcess) -> None:
    whole = ids(speculating.run(REPEATING, params={"max_tokens": 20}))
    for n in (1, 2, 3, 7, 12, 19):
        events = speculating.run(REPEATING, params={"max_tokens": n})
        assert ids(events) == whole[:n]
        assert (events[-1]["reason"], events[-1]["n_generated"]) == ("length", n)


def test_same_text_at_any_budget(speculating: EngineProcess) -> None:
    params = {"max_tokens": 50, **WARM}
    before = drafted(speculating)
    alone = ids(speculating.run(LONG, params=params))
    assert drafted(speculating)[1] > before[1]
    stats = speculating.stats()
    floor, full = stats["floor_bytes"], stats["full_bytes"]
    budgets = {3: floor, 12: (floor + full) // 2, 25: floor}
    job = speculating.submit(LONG, params=params)
    events: list[Event] = []
    while not events or events[-1]["ev"] != "done":
        event = speculating.next_event()
        if event.get("job") == job:
            events.append(event)
            if event["ev"] == "token" and event["n"] in budgets:
                speculating.budget(budgets[event["n"]])
    assert ids(events) == alone
    assert ids(speculating.run(LONG, params=params)) == alone
    speculating.budget(0)
    speculating.wait_for("released", "observed")
    speculating.wait_for("released", "observed")


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_engine_is_killed_in_the_middle_of_an_answer(speculating: EngineProcess, shallow_model: Path) -> None:
    """Another engine continues the answer. It is the second turn, so the repeated part has drafts of the first."""
    turn = user(RULES * 5 + "Repeat the rules.")
    first = speculating.run(turn, conversation="inn", params=WARM)
    turn += [{"role": "assistant", "content": text(first)}, *user("Again, all of the rules.")]
    params = {"max_tokens": 50, **WARM}
    before = drafted(speculating)
    whole = speculating.run(turn, conversation="inn", params=params)
    assert whole[0]["n_reused"] > first[0]["n_prompt"]
    assert any(kept < decoded for kept, decoded, _ in whole[0]["history"])
    assert drafted(speculating)[1] > before[1]
    said: list[int] = []
    for _ in range(2):
        child = EngineProcess()
        try:
            child.load(shallow_model, **STREAMING, n_ctx=1024, n_parallel=4, n_threads=1)
            job = child.submit(turn, params=params, resume=said, history=whole[0]["history"])
            for _ in range(9):
                said.append(child.wait_for("token", job=job)["id"])
            child.process.kill()
        finally:
            child.close()
    assert said == ids(whole)[:18]
    rest = speculating.run(turn, params=params, resume=said, history=whole[0]["history"])
    assert said + ids(rest) == ids(whole)


def test_a_conversation_goes_on_from_what_was_kept(speculating: EngineProcess) -> None:
    """The answers end in the middle of a draft: by length, by a stop string, and by a cancel."""
    prompt = "Count: 1 2 3 1 2 3 1 2 3"
    for end in ("length", "stop", "cancelled"):
        params: dict[str, object] = {"max_tokens": {"length": 17, "stop": 24, "cancelled": 400}[end]}
        if end == "stop":
            params["stop"] = [text(speculating.run(prompt, params={"max_tokens": 20}))[-6:]]
        job = speculating.submit(prompt, conversation="kept", params=params)
        if end == "cancelled":
            for _ in range(9):
                speculating.wait_for("token", job=job)
            speculating.send(op="cancel", job=job)
        last = speculating.finish(job)[job][-1]
        assert last.get("reason", last["ev"]) == end
        prompt += " 1 2 3 1 2 3 4 5 6"
    again = speculating.run(prompt, conversation="kept")
    assert again[0]["n_reused"] > 30
    assert ids(again) == ids(speculating.run(prompt))


def test_up_to_the_end_of_the_context(shallow_model: Path) -> None:
    with engine(shallow_model, **STREAMING, n_ctx=256, n_parallel=1) as child:
        prompt = "Count: 1 2 3 1 2 3 1 2 3"
        room = 256 - child.run(prompt, params={"max_tokens": 1})[0]["n_prompt"]
        events = child.run(prompt, params={"max_tokens": room})
        assert (events[-1]["reason"], events[-1]["n_generated"]) == ("length", room)
        assert drafted(child)[1] > 50


def test_planned_mode_says_the_same(model_path: Path) -> None:
    """Where the next token is clear. Planned mode rounds as its plan wants, and verifies several tokens at once."""
    # So slow a link that a draft pays on any machine, however busy its cores are.
    fields: dict[str, object] = {"device": "emulated:0.2", "n_ctx": 512, "n_parallel": 1}
    params = {"max_tokens": 16}
    with engine(model_path, **STREAMING, n_ctx=1024, speculate="off") as plain:
        expected = ids(plain.run(REPEATING, params=params))
    with engine(model_path, **fields, draft_model=str(model_path)) as child:
        child.budget(child.stats()["floor_bytes"])
        assert ids(child.run(REPEATING, params=params)) == expected
        assert drafted(child)[1] > 0


# --- when not to ------------------------------------------------------------------------------------------------------


def test_nothing_is_drafted_for_text_that_does_not_repeat(speculating: EngineProcess) -> None:
    before = drafted(speculating)
    wild = {
        "temperature": 5.0,
        "presence_penalty": 2.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 1,
        "max_tokens": 60,
    }
    assert len(ids(speculating.run("Once upon a time", params=wild))) == 60
    assert drafted(speculating) == before


@pytest.mark.parametrize("name", ["lfm2", "rwkv7"])
def test_nothing_is_drafted_for_a_recurrent_state(name: str, tiny_model: Callable[[str], Path]) -> None:
    with engine(tiny_model(name), **STREAMING, n_ctx=512, n_parallel=1) as child:
        child.run("ab ab ab ab ab ab ab ab", params={"max_tokens": 40})
        assert drafted(child) == (0, 0)


def test_nothing_is_drafted_for_experts_in_stream_only_mode(shallow_moe: Path) -> None:
    with engine(shallow_moe, **STREAMING, n_ctx=512, n_parallel=1) as child:
        child.run(REPEATING, params={"max_tokens": 8})
        assert drafted(child) == (0, 0)


# --- a draft model ----------------------------------------------------------------------------------------------------

TALE = user("Tell me a tale of a fox and a clock.")


def test_a_draft_does_not_change_the_text(drafting: EngineProcess, plain: EngineProcess) -> None:
    answer = ids(drafting.run(TALE, params={"max_tokens": 20}))
    assert answer == ids(plain.run(TALE, params={"max_tokens": 20}))
    made, right = by_draft_model(drafting)
    assert right > 0.5 * made
    assert right > 0.3 * len(answer)  # at least 1.4 tokens per step
    params = {**WARM, "max_tokens": 24}
    whole = drafting.run(TALE, params=params)
    assert ids(whole) == ids(plain.run(TALE, params=params))
    drawn = by_draft_model(drafting)
    assert right < drawn[1] < drawn[0]
    assert by_draft_model(plain) == (0, 0)
    said = ids(whole)[:11]  # another engine generates the rest
    rest = drafting.run(TALE, params=params, resume=said, history=whole[0]["history"])
    assert said + ids(rest) == ids(whole)


def test_a_draft_beside_an_answer_of_a_given_form(drafting: EngineProcess, plain: EngineProcess) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [20, 30]}}}
    params = {"json_schema": json.dumps({**schema, "required": ["name", "age"]}), "max_tokens": 40}
    before = by_draft_model(drafting)
    answer = text(drafting.run(user("Who are you?"), params=params))
    assert set(json.loads(answer)) == {"name", "age"}
    assert answer == text(plain.run(user("Who are you?"), params=params))
    assert by_draft_model(drafting)[0] > before[0]


def test_a_draft_for_jobs_together_and_one_that_is_cancelled(drafting: EngineProcess) -> None:
    params = {"max_tokens": 12}
    before = by_draft_model(drafting)
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
    assert by_draft_model(drafting)[1] > before[1]


def test_a_draft_model_with_fewer_positions_than_the_context(tiny_model: Callable[[str], Path]) -> None:
    """It drafts for texts that it has positions for."""
    config = EngineConfig(str(tiny_model("llama")), device="cpu", n_ctx=8192, n_parallel=1, n_threads=1)
    with Runtime.load(config, measure=False) as runtime:
        with contextlib.closing(DraftModel(runtime, str(tiny_model("gpt2")))) as draft_model:
            assert draft_model.has_room(4096)
            assert not draft_model.has_room(4097)
            assert len(draft_model.draft({0: [5, 6, 7]}, 3)[0]) == 3
        recurrent = tiny_model("mamba2")
        for path, reason in ((recurrent, "it has a recurrent state"), (recurrent.parent / "none.gguf", "cannot read")):
            with pytest.raises(FrameshardError, match=f"^draft model {path.name}: {reason}"):
                DraftModel(runtime, str(path))


def test_tokens_of_a_draft_model(shallow_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameshard.engine.draft.CHUNK", 96)
    config = EngineConfig(str(shallow_model), device="emulated", n_ctx=1024, n_parallel=2, n_threads=1)
    with (
        Runtime.load(config, measure=False) as runtime,
        contextlib.closing(DraftModel(runtime, str(shallow_model))) as draft_model,
    ):
        assert runtime.device is not None
        before = runtime.device.stats()
        texts = {0: runtime.tokenizer.tokenize(REPEATING), 1: runtime.tokenizer.tokenize("Once upon a")}
        drafts = draft_model.draft(texts, 6)
        assert draft_model.draft({1: texts[1]}, 6) == {1: drafts[1]}
        assert draft_model.unread(0, texts[0] + drafts[0][:3] + [1]) == 1  # the first three were accepted
        other = texts[0][:20] + texts[1]
        assert draft_model.unread(0, other) == len(texts[1])
        assert draft_model.draft({0: other}, 2) != {0: drafts[0][:2]}
        assert draft_model.draft({0: texts[0]}, 6) == {0: drafts[0]}
        long = texts[1] * 40
        steps = 0
        while not (one := draft_model.draft({1: long}, 1)):
            steps += 1
        assert steps == (len(long) - 1) // 96
        assert draft_model.unread(1, long + one[1]) == 1
        assert 0 < draft_model.seconds(1, 1, 0, 9) < draft_model.seconds(1, 4, 0, 9) < draft_model.seconds(1, 4, 100, 9)
        assert draft_model.seconds(1, 4, 100, 90) < draft_model.seconds(1, 4, 100, 9)
        took = draft_model.seconds(1, 4, 0, 9)
        for _ in range(200):
            draft_model.pass_over()
        assert draft_model.seconds(1, 4, 0, 9) < 0.4 * took  # worth a try again
        after = runtime.device.stats()
        assert (after.used_bytes, after.buffers_bytes) == (before.used_bytes, before.buffers_bytes)
        for seq, tokens in texts.items():
            runtime.decode([Rows(seq, tokens[:-1], "none")])
            rows = runtime.decode([Rows(seq, tokens[-1:] + drafts[seq][:-1], "all")])
            assert [int(runtime.logits(row).argmax()) for row in rows] == drafts[seq]
        runtime.abort()
        with pytest.raises(DecodeAborted):
            draft_model.draft({0: other}, 2)
        runtime.resume()
        assert draft_model.draft({0: texts[0]}, 6) == {0: drafts[0]}


def test_a_decode_with_drafts_that_is_repeated(shallow_model: Path) -> None:
    driver = Path(__file__).with_name("draft_driver.py")
    subprocess.run([sys.executable, str(driver), str(shallow_model)], check=True)


@pytest.mark.parametrize("other", ["size", "piece", "state"])
def test_a_draft_model_that_does_not_fit_is_refused(
    other: str, shallow_model: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, draft = tiny_model("llama"), tmp_path / "draft.gguf"
    if other == "piece":
        draft.write_bytes(model.read_bytes().replace("▁w700".encode(), "▁x700".encode()))
    else:
        draft = shallow_model if other == "size" else tiny_model("rwkv7")
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


# --- the drafts themselves -------------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_the_longest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 9, 2, 3, 5, 9, 8, 1, 2, 3])
    assert lookup.draft(3) == [4, 9, 2]
    lookup.add(4)
    assert lookup.draft(1) == [9]


def test_without_a_match_there_is_no_draft() -> None:
    lookup = Lookup([1, 2, 3, 4])
    assert not lookup.matched
    assert lookup.draft(4) == []
    assert lookup.expected(4) == 1.0


def test_a_periodic_text_is_drafted_beyond_its_end() -> None:
    assert Lookup([7, 1, 2, 1, 2, 1, 2]).draft(5) == [1, 2, 1, 2, 1]


def test_an_image_is_not_drafted() -> None:
    lookup = Lookup([1, 2, 3, -5, -6, 4, 1, 2])
    assert lookup.draft(3) == [3]
    assert not Lookup([1, -5, -6, 2, -5, -6]).matched


def test_the_acceptance_rate_of_lookups_is_learned() -> None:
    numbers = random.Random(2)
    lookup = Lookup([1, 2, 3])
    for _ in range(40):  # each time another token follows 1 2
        for token in (numbers.randrange(100, 10_000), 1, 2):
            lookup.add(token)
    assert lookup.expected(1) < 1.1
    for token in [3, 4, 5, 6, 7, 8, 1, 2] * 6:
        lookup.add(token)
    assert lookup.expected(8) > 6


def test_the_acceptance_rate_of_a_draft_model_is_learned() -> None:
    draft = DraftState()
    usual = draft.expected(1)
    for token in range(40):
        draft.next = [token] if token % 2 else []
        draft.add(token)
    assert draft.expected(1) > usual + 0.1
    for token in range(40):
        draft.next = [token + 1, token + 1]
        draft.add(token)
        assert not draft.next  # drafts after a rejected token are dropped
    assert draft.expected(8) < 1.2
    for token in range(100):
        draft.add(token)
    assert draft.expected(1) == pytest.approx(usual, abs=0.02)  # worth a try again


def test_as_many_drafted_tokens_as_pay() -> None:
    def expected(n_drafted: int) -> float:
        return sum(0.8**i for i in range(n_drafted + 1))

    assert best_length(expected, lambda n: 1.0, 16)[0] == 16
    assert best_length(expected, lambda n: 1.0, 7)[0] == 4
    assert best_length(expected, lambda n: 1.0 + 0.2 * (n - 1), 16)[0] == 4
    assert best_length(expected, lambda n: float(n), 16)[0] == 1
