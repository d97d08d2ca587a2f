"""The engine process with a real model, driven as by the broker."""

from __future__ import annotations

import collections
import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from engine_driver import EngineProcess, Event, engine, ids, text, user

import tiny_models
from frameshard.sentences import MAX_HELD, Splitter
from sidecars import DEADLINE_S

CASTLE = user("Who lives in the old castle?")
PERSONA = [
    {"role": "system", "content": "You are the innkeeper of the Red Dragon. Answer in short sentences."},
    {"role": "user", "content": "Good evening! What is for dinner?"},
]
LONG = "The wind blew over the hills and the old road was empty. "


@pytest.fixture(scope="module")
def cpu(shallow_model: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model) as child:
        yield child


@pytest.fixture(scope="module")
def exact(shallow_model: Path) -> Iterator[EngineProcess]:
    with engine(shallow_model, mode="stream_only") as child:
        yield child


@pytest.fixture(scope="module")
def fluent(model_path: Path) -> Iterator[EngineProcess]:
    """The whole model, for what its first layers cannot do: speak a language, and come to an end."""
    with engine(model_path) as child:
        yield child


def reference(model_path: Path, question: str, n: int) -> str:
    """The greedy answer of a separate program that uses only llama.cpp and none of the engine's code."""
    loop = Path(__file__).parent / "reference_loop.py"
    done = subprocess.run(
        [sys.executable, str(loop), str(model_path), question, str(n)], capture_output=True, check=True, timeout=120
    )
    return done.stdout.decode()


def last(events: list[Event]) -> Event:
    return events[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_the_main_thread_sleeps_while_there_is_no_job(deep_model: Path, device: str) -> None:
    with engine(deep_model, device=device) as child:
        child.run("Hello", params={"max_tokens": 4})
        stat = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/stat")
        sleeps, deadline = 0, time.monotonic() + 60.0  # what follows a job is done by then
        while sleeps < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
            sleeps = sleeps + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        assert sleeps == 20


# --- one job ----------------------------------------------------------------------------------------------------------


def test_greedy_chat_streams_what_llama_cpp_says(cpu: EngineProcess, shallow_model: Path) -> None:
    events = cpu.run(CASTLE, params={"max_tokens": 40})
    assert [event["ev"] for event in events] == ["started"] + ["token"] * 40 + ["done"]
    assert [event["n"] for event in events[1:-1]] == list(range(40))
    assert text(events) == reference(shallow_model, CASTLE[0]["content"], 40)
    done = last(events)
    assert done["reason"] == "length"
    assert done["n_generated"] == 40
    assert done["n_prompt"] == events[0]["n_prompt"] > 0
    assert done["prefill_s"] > 0
    assert done["decode_s"] > 0


def test_tokens_are_counted_as_a_job_reads_them(cpu: EngineProcess) -> None:
    tool = {"name": "price", "description": "What an item costs.", "schema": '{"properties": {"item": {}}}'}
    for prompt, fields, more in (
        (CASTLE, {"messages": CASTLE}, {}),
        (CASTLE, {"messages": CASTLE}, {"tools": [tool]}),
        ("Once upon a time", {"prompt": "Once upon a time"}, {}),
    ):
        events = cpu.run(prompt, params={"max_tokens": 5}, **more)
        cpu.send(op="count", seq=7, **fields, **more)
        count = cpu.wait_for("count")
        assert count["n_tokens"] == events[0]["n_prompt"]
        assert count["n_left"] == 512 - count["n_tokens"] == last(events)["n_left"] + last(events)["n_generated"]
    cpu.send(op="count", seq=8, prompt="one two " * 400)
    count = cpu.wait_for("count")
    assert count["n_tokens"] > 512
    assert "n_left" not in count  # none
    cpu.send(op="count", seq=9, prompt=LONG * 1000)
    assert cpu.wait_for("count")["error"]["name"] == "context_overflow"


def test_the_model_ends_its_answer_itself(fluent: EngineProcess) -> None:
    events = fluent.run(user("Say yes."), params={"max_tokens": 200})
    assert last(events)["reason"] == "stop"
    assert "<|im_end|>" not in text(events)


def test_a_seed_repeats_and_another_differs(cpu: EngineProcess) -> None:
    warm = {"temperature": 1.0, "repeat_penalty": 1.2, "top_k": 0, "min_p": 0.0, "max_tokens": 30}
    first = cpu.run(CASTLE, params={**warm, "seed": 7})
    assert first[0]["seed"] == 7
    assert ids(cpu.run(CASTLE, params={**warm, "seed": 7})) == ids(first)
    assert ids(cpu.run(CASTLE, params={**warm, "seed": 8})) != ids(first)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_penalties_make_tokens_of_the_last_ones_rarer(cpu: EngineProcess, penalty: str) -> None:
    def repeated(weight: float) -> int:
        """How often the most frequent token is in the answer."""
        said = ids(cpu.run("one one one one one one", params={"max_tokens": 30, penalty: weight}))
        return collections.Counter(said).most_common(1)[0][1]

    assert repeated(2.0) < repeated(0.0)
    assert repeated(-2.0) >= repeated(0.0)


def test_penalties_are_for_the_last_tokens_and_frequency_counts_them(cpu: EngineProcess) -> None:
    wish = {"max_tokens": 1, "logit_bias": [{"text": " gold", "bias": 40}]}
    others, gold = LONG * 8, " gold" * 30

    def says_gold(prompt: str, **penalty: float) -> bool:
        return text(cpu.run(prompt, params={**wish, **penalty})) == " gold"

    assert says_gold(others + gold)
    assert says_gold(others + gold, presence_penalty=2.0)
    assert not says_gold(others + gold, frequency_penalty=2.0)
    assert says_gold(gold + others, frequency_penalty=2.0)


def test_xtc_removes_the_likeliest_tokens(cpu: EngineProcess) -> None:
    """At threshold 0 it leaves the least likely of the tokens that it is given: of these two, the second."""
    params = {"temperature": 5.0, "top_k": 2, "min_p": 0.0, "top_p": 1.0, "max_tokens": 1, "xtc_threshold": 0.0}
    likeliest = ids(cpu.run(CASTLE, params={"temperature": 0.0, "max_tokens": 1}))
    drawn = {
        probability: {
            ids(cpu.run(CASTLE, conversation="xtc", params={**params, "seed": seed, "xtc_probability": probability}))[0]
            for seed in range(20)
        }
        for probability in (0.0, 1.0)
    }
    assert likeliest[0] in drawn[0.0]
    assert len(drawn[0.0]) == 2
    assert len(drawn[1.0]) == 1
    assert likeliest[0] not in drawn[1.0]


def test_typical_p_draws_from_fewer_tokens(cpu: EngineProcess) -> None:
    def drawn(typical_p: float) -> int:
        params = {"temperature": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "max_tokens": 1, "typical_p": typical_p}
        runs = (cpu.run(CASTLE, conversation="typical", params={**params, "seed": seed}) for seed in range(40))
        return len({ids(run)[0] for run in runs})

    assert drawn(0.05) < drawn(1.0)


def test_a_bias_bans_and_forces_tokens(cpu: EngineProcess) -> None:
    params = {"max_tokens": 3, "logit_bias": []}
    (first, *_) = ids(cpu.run(CASTLE, params=params))
    assert first not in ids(cpu.run(CASTLE, params={**params, "logit_bias": [{"token": first, "bias": -100}]}))
    forced = cpu.run(CASTLE, params={**params, "temperature": 1.0, "logit_bias": [{"text": " the", "bias": 100}]})
    assert text(forced) == " the the the"
    once = [{"text": " the", "bias": 40}, {"text": " gold", "bias": 80}]
    twice = [*once, {"text": " the", "bias": 80}]
    # With top_k 0 the samplers get all tokens, else a few.
    for more in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 0}):
        said = [text(cpu.run(CASTLE, params={**params, **more, "logit_bias": biases})) for biases in (once, twice)]
        assert said == [" gold gold gold", " the the the"]  # biases add up


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.2, "top_k": 200, "min_p": 0.0},
        {"temperature": 0.0},
        {"temperature": 0.0, "repeat_penalty": 1.8},
        {"temperature": 1.0, "top_k": 2, "min_p": 0.0, "frequency_penalty": 2.0},
        {"temperature": 1.0, "top_k": 3, "presence_penalty": -2.0, "repeat_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": [{"text": " the", "bias": 5}, {"text": ",", "bias": -100}]},
    ],
)
def test_the_text_is_the_same_when_the_samplers_get_all_tokens(cpu: EngineProcess, params: dict[str, Any]) -> None:
    """They get those that may be drawn, but with DRY all; here it penalises nothing."""
    params = {"max_tokens": 40, "seed": 11, **params}
    with_all = {**params, "dry_multiplier": 1.0, "dry_allowed_length": 1000}
    assert ids(cpu.run(CASTLE, params=params)) == ids(cpu.run(CASTLE, params=with_all))


@pytest.mark.parametrize("choice", ["yes", "no"])
def test_a_biased_answer_has_its_form(cpu: EngineProcess, choice: str) -> None:
    bias = [{"text": choice, "bias": 40}, {"text": " the", "bias": 100}]
    params = {"temperature": 1.0, "choices": ["yes", "no"], "logit_bias": bias}
    assert text(cpu.run(CASTLE, params=params)) == choice


def test_dry_stops_repeats_up_to_a_breaker(fluent: EngineProcess) -> None:
    song = " one two three four," * 6

    def sung(**params: object) -> str:
        return text(fluent.run(song, params={"max_tokens": 12, **params}))

    plain = sung()
    assert plain.startswith(" one two three four,")
    assert not sung(dry_multiplier=5.0).startswith(" one two three four")
    assert sung(dry_multiplier=5.0, dry_penalty_last_n=0) == plain
    assert sung(dry_multiplier=5.0, dry_penalty_last_n=3) == plain  # too few tokens to repeat
    assert sung(dry_multiplier=5.0, dry_allowed_length=100) == plain
    assert sung(dry_multiplier=5.0, dry_sequence_breakers=["one", "two", "three", "four", ","]) == plain


def test_without_a_seed_the_started_event_names_one_that_repeats(cpu: EngineProcess) -> None:
    warm = {"temperature": 1.0, "max_tokens": 20}
    first = cpu.run(CASTLE, params=warm)
    assert ids(cpu.run(CASTLE, params={**warm, "seed": first[0]["seed"]})) == ids(first)


def test_stop_strings_across_tokens(cpu: EngineProcess) -> None:
    whole = text(cpu.run(CASTLE, params={"max_tokens": 40}))
    for start in range(5, len(whole) - 12, 25):
        stop = whole[start : start + 12]
        events = cpu.run(CASTLE, params={"max_tokens": 40, "stop": ["never said", stop]})
        assert text(events) == whole[: whole.index(stop)]
        assert last(events)["reason"] == "stop"


def test_text_held_back_for_a_stop_string_comes_with_the_last_token(cpu: EngineProcess) -> None:
    whole = text(cpu.run(CASTLE, params={"max_tokens": 20}))
    assert text(cpu.run(CASTLE, params={"max_tokens": 20, "stop": [whole[-6:] + "\0"]})) == whole


def test_a_completion_reads_no_control_tokens_in_the_prompt(cpu: EngineProcess) -> None:
    plain = cpu.run("<|im_start|>", params={"max_tokens": 1})
    assert plain[0]["n_prompt"] > 1


# --- sentences --------------------------------------------------------------------------------------------------------


def ends(events: list[Event]) -> list[int]:
    """Where sentences end in the whole text."""
    found, length = [], 0
    for event in events:
        if event["ev"] == "token":
            found += [length + end for end in event.get("ends", ())]
            length += len(event["text"])
    return found


SCHEMA = '{"type": "object", "properties": {"say": {"type": "string"}}, "required": ["say"]}'


@pytest.mark.parametrize(
    "params", [{}, {"stop": ["castle", "e."]}, {"json_schema": SCHEMA}, {"max_tokens": 3}], ids=str
)
def test_sentences_change_no_text_and_are_those_of_the_whole(cpu: EngineProcess, params: dict[str, object]) -> None:
    params = {"max_tokens": 60, **params}
    plain, marked = (cpu.run(PERSONA, params=params, sentences=asked) for asked in (False, True))
    assert ids(marked) == ids(plain)
    assert text(marked) == text(plain)
    assert last(marked)["reason"] == last(plain)["reason"]
    assert ends(plain) == []
    assert ends(marked) == list(Splitter().feed(text(plain), last=True).ends) != []


def test_a_cancelled_job_lacks_only_what_was_held(cpu: EngineProcess) -> None:
    whole = text(cpu.run(CASTLE, params={"max_tokens": 60}))
    with cpu.slowly():
        job = cpu.submit(CASTLE, params={"max_tokens": 60}, sentences=True)
        events = [cpu.wait_for("token", job=job) for _ in range(5)]
        cpu.send(op="cancel", job=job)
        events += cpu.finish(job)[job]
    assert last(events)["ev"] == "cancelled"
    assert whole.startswith(text(events))
    n = len(ids(events))
    assert len(text(cpu.run(CASTLE, params={"max_tokens": n}))) - len(text(events)) <= MAX_HELD


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_what_was_said_is_read_with_the_prompt(cpu: EngineProcess) -> None:
    """In planned mode the answer so far is prefilled in chunks. The text continues, but may differ."""
    whole = cpu.run(CASTLE, params={"max_tokens": 40})
    produced = ids(whole)
    assert len(produced) == 40
    for cut in (1, 17, 39):
        before = cpu.stats()["prompt_tokens"]
        events = cpu.run(CASTLE, params={"max_tokens": 40}, resume=produced[:cut])
        n_generated = last(events)["n_generated"]
        assert [event["n"] for event in events if event["ev"] == "token"] == list(range(cut, n_generated))
        assert n_generated > cut
        assert last(events)["prefill_s"] > 0
        n_read = cpu.stats()["prompt_tokens"] - before
        assert n_read == whole[0]["n_prompt"] - events[0]["n_reused"] + cut


def test_an_answer_that_was_whole_when_the_engine_died(cpu: EngineProcess, exact: EngineProcess) -> None:
    begin = text(cpu.run(CASTLE, params={"max_tokens": 12}))
    for params, reason in (({"max_tokens": 12}, "length"), ({"max_tokens": 40, "stop": [begin[-4:]]}, "stop")):
        whole = cpu.run(CASTLE, params=params)
        assert last(whole)["reason"] == reason
        for child in (cpu, exact):
            events = child.run(CASTLE, params=params, resume=ids(whole))
            assert [event["ev"] for event in events] == ["started", "done"]
            assert (last(events)["reason"], last(events)["n_generated"]) == (reason, len(ids(whole)))
    assert text(cpu.run(CASTLE, params=params)) == text(whole)  # the sequence was empty again


def test_text_that_was_held_back_when_the_engine_died(cpu: EngineProcess) -> None:
    """The text so far ends with the beginning of a stop string, so this part is sent with the next token."""
    produced = cpu.run(CASTLE, params={"max_tokens": 12})
    stop = text(produced)[-6:] + "\0"
    events = cpu.run(CASTLE, params={"max_tokens": 13, "stop": [stop]}, resume=ids(produced))
    assert text(events).startswith(stop[:-1])
    assert len(ids(events)) == 1


@pytest.mark.parametrize("mode", ["planned", "stream_only"])
def test_an_answer_goes_on_from_a_text_of_another_model(mode: str, cpu: EngineProcess, exact: EngineProcess) -> None:
    child = cpu if mode == "planned" else exact
    answer = text(child.run(CASTLE, params={"max_tokens": 12}))
    for given in (answer[:1], answer[: len(answer) // 2]):
        events = child.run(CASTLE, params={"max_tokens": 16}, given=given)
        n_given, n_generated = events[0]["n_given"], events[-1]["n_generated"]
        tokens = [event for event in events if event["ev"] == "token"]
        assert n_given > 0
        assert [event["n"] for event in tokens] == list(range(n_given, n_generated))
    # An answer that dies later goes on from the text and its own tokens.
    again = child.run(CASTLE, params={"max_tokens": 16}, given=given, resume=ids(events)[:3])
    assert text(again) == "".join(event["text"] for event in tokens[3:])
    # The beginning of a stop string at the end of the text is held back with what follows it.
    stop = answer[3:7] + "\0"
    assert text(child.run(CASTLE, params={"max_tokens": 8, "stop": [stop]}, given=answer[:7])).startswith(stop[:-1])
    # A text of as many tokens as are allowed, or more, is a complete answer.
    events = child.run(CASTLE, params={"max_tokens": 3}, given=answer)
    assert (ids(events), events[-1]["reason"], events[-1]["n_generated"]) == ([], "length", 3)
    number = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema = json.dumps({**number, "additionalProperties": False})
    formed = child.run(CASTLE, params={"json_schema": schema, "max_tokens": 40}, given='{"n": 4')
    assert str(json.loads('{"n": 4' + text(formed))["n"]).startswith("4")
    # A text that the form does not allow fails this job alone.
    refused = child.run(CASTLE, params={"json_schema": "{}"}, given="no JSON")
    assert refused[-1]["ev"] == "failed"


def test_reading_again_can_be_cancelled_and_lets_others_talk(model_path: Path) -> None:
    with engine(model_path, n_ctx=2048, n_parallel=2, n_ubatch=32) as child:
        talker = child.submit(CASTLE, params={"max_tokens": 400})
        child.wait_for("token", job=talker)
        job = child.submit("Once", params={"max_tokens": 1900}, resume=[100] * 1800)
        child.wait_for("started", job=job)
        for _ in range(3):
            child.wait_for("token", job=talker)
        child.send(op="cancel", job=job)
        assert child.wait_for("cancelled", "token", "done", job=job)["ev"] == "cancelled"
        assert child.stats()["prompt_tokens"] < 1800


@pytest.mark.parametrize(
    ("params", "stride"),
    [
        ({"temperature": 0.0, "max_tokens": 20}, 3),
        ({"temperature": 0.9, "seed": 11, "repeat_penalty": 1.1, "max_tokens": 20}, 4),
        ({"temperature": 0.9, "seed": 12, "frequency_penalty": 0.5, "presence_penalty": 0.2, "max_tokens": 20}, 7),
        ({"temperature": 1.2, "seed": 13, "xtc_probability": 0.5, "typical_p": 0.9, "max_tokens": 20}, 7),
        (
            {
                "temperature": 0.9,
                "seed": 14,
                "dry_multiplier": 2.0,
                "logit_bias": [{"text": " dinner dinner", "bias": 8.0}],
                "max_tokens": 20,
            },
            7,
        ),
    ],
)
def test_resume_at_any_token(exact: EngineProcess, params: dict[str, object], stride: int) -> None:
    params = {**params, "stop": ["never said"]}
    whole = exact.run(PERSONA, params=params)
    produced, started = ids(whole), whole[0]
    for cut in range(0, len(produced) + 1, stride):
        job = exact.submit(PERSONA, params=params, resume=produced[:cut], history=started["history"])
        events = exact.finish(job)[job]
        assert events[0] == {**started, "job": job, "seed": events[0]["seed"]}
        assert [event["n"] for event in events if event["ev"] == "token"] == list(range(cut, len(produced)))
        assert ids(events) == produced[cut:]
        assert text(events) == "".join(event["text"] for event in whole[1 + cut : -1])
        assert last(events)["n_generated"] == len(produced)


def test_resume_of_a_later_turn_in_a_new_engine(exact: EngineProcess, shallow_model: Path) -> None:
    """A conversation was prefilled in several parts. The new engine prefills it in the same parts."""
    first = exact.run(PERSONA, conversation="turns")
    turn = [*PERSONA, {"role": "assistant", "content": text(first)}, *user("And to drink?")]
    whole = exact.run(turn, conversation="turns", params={"max_tokens": 40})
    assert whole[0]["n_reused"] > first[0]["n_prompt"]
    cut = 15
    with engine(shallow_model, mode="stream_only") as other:
        job = other.submit(
            turn,
            conversation="turns",
            params={"max_tokens": 40},
            resume=ids(whole)[:cut],
            history=whole[0]["history"],
        )
        assert ids(other.finish(job)[job]) == ids(whole)[cut:]


# --- several jobs -----------------------------------------------------------------------------------------------------


def test_jobs_together_say_what_they_say_alone(cpu: EngineProcess) -> None:
    prompts = [CASTLE, PERSONA, user("Name a sea."), user("Tell me of dragons."), user("What is snow?"), user("Hi")]
    params = {"max_tokens": 12, "temperature": 0.7, "seed": 5}
    alone = [text(cpu.run(prompt, params=params)) for prompt in prompts]
    jobs = [cpu.submit(prompt, params=params) for prompt in prompts]  # two more than can run at once
    together = cpu.finish(*jobs)
    assert [text(together[job]) for job in jobs] == alone


def test_a_long_prompt_does_not_stop_the_others(deep_model: Path) -> None:
    with engine(deep_model, n_ctx=2048, n_parallel=2, n_ubatch=64) as child:
        talker = child.submit(CASTLE, params={"max_tokens": 1900})
        child.wait_for("token", job=talker)
        reader = child.submit(LONG * 15, params={"max_tokens": 1})
        child.wait_for("started", job=reader)
        tokens = 0
        while (event := child.next_event())["ev"] != "done":
            tokens += event["ev"] == "token" and event["job"] == talker
        assert tokens >= 8


def test_conversations_keep_what_they_have_read(cpu: EngineProcess) -> None:
    first = cpu.run(PERSONA, conversation="inn")
    turn = [*PERSONA, {"role": "assistant", "content": text(first)}, *user("And to drink?")]
    fresh = text(cpu.run(turn))
    second = cpu.run(turn, conversation="inn")
    assert second[0]["n_reused"] >= first[0]["n_prompt"]
    assert text(second)[:20] == fresh[:20]
    again = cpu.run(turn, conversation="inn")  # the same turn again: its answer is removed from the KV cache
    assert again[0]["n_reused"] == again[0]["n_prompt"] - 1


def test_jobs_of_one_conversation_run_in_turn(cpu: EngineProcess) -> None:
    jobs = [cpu.submit(user(f"Count to {i}."), conversation="queue", params={"max_tokens": 6}) for i in range(3)]
    order: list[tuple[str, int]] = []
    while len([name for name, _ in order if name == "done"]) < 3:
        event = cpu.next_event()
        if event["ev"] in ("started", "done"):
            order.append((event["ev"], event["job"]))
    assert order == [(name, job) for job in jobs for name in ("started", "done")]


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_cancel_in_a_long_prompt_is_quick_and_harms_nobody(shallow_model: Path) -> None:
    with engine(shallow_model, n_ctx=4096, n_parallel=2, n_ubatch=4096) as child:
        alone = text(child.run(CASTLE))
        read = child.stats()["prompt_tokens"]
        job = child.submit(LONG * 250, conversation="long")
        child.wait_for("started", job=job)
        child.send(op="cancel", job=job)
        assert child.wait_for("cancelled", "done", job=job)["ev"] == "cancelled"
        assert child.stats()["prompt_tokens"] == read  # the prompt is one chunk, and its decode was aborted
        assert text(child.run(CASTLE)) == alone
        assert text(child.run(CASTLE, conversation="long")) == alone  # in the sequence of the aborted job


def test_cancel_while_others_speak(cpu: EngineProcess) -> None:
    alone = text(cpu.run(PERSONA, params={"max_tokens": 40}))
    other, job = cpu.submit(PERSONA, params={"max_tokens": 40}), cpu.submit(CASTLE, params={"max_tokens": 400})
    cpu.wait_for("token", job=job)
    cpu.send(op="cancel", job=job)
    events = cpu.finish(other, job)
    assert last(events[job])["ev"] == "cancelled"
    assert last(events[other])["ev"] == "done"
    assert alone.endswith(text(events[other]))


def test_cancel_before_it_starts_and_after_it_ended(cpu: EngineProcess) -> None:
    with cpu.slowly():
        running = [cpu.submit(CASTLE, params={"max_tokens": 30}) for _ in range(4)]
        queued = cpu.submit(CASTLE)
        cpu.send(op="cancel", job=queued)
        assert [event["ev"] for event in cpu.finish(queued)[queued]] == ["cancelled"]
    cpu.send(op="cancel", job=queued)
    cpu.send(op="cancel", job=123456)
    events = cpu.finish(*running)
    assert all(last(events[job])["ev"] == "done" for job in running)


def test_cancels_at_once_after_submit_are_never_lost(cpu: EngineProcess) -> None:
    for _ in range(30):
        job = cpu.submit(CASTLE, params={"max_tokens": 400})
        cpu.send(op="cancel", job=job)
        assert last(cpu.finish(job)[job])["ev"] == "cancelled"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": LONG * 200}, "context_overflow"),
        ({"sampling": {"max_tokens": 5000}}, "context_overflow"),
        ({"sampling": {"temperature": -1}}, "bad_argument"),
        ({"sampling": {"top_p": "all"}}, "bad_argument"),
        ({"sampling": {"magic": 1}}, "bad_argument"),
        ({"sampling": {"logit_bias": [{"token": 10**6, "bias": 1}]}}, "bad_argument"),
        ({"resume": [-1]}, "bad_argument"),
        ({"resume": [10**9]}, "bad_argument"),
        ({"resume": [1] * 30}, "bad_argument"),
        ({"history": [[0, 1, 1]]}, "bad_argument"),
        ({"history": [[1, 100000, 1]]}, "bad_argument"),
        ({"history": [[1, 1]]}, "bad_argument"),
        ({"history": 7}, "bad_argument"),
        ({"conversation": ""}, "bad_argument"),
        ({"prompt": 7}, "bad_argument"),
        ({"kind": "poem"}, "bad_argument"),
        ({"kind": "chat", "messages": []}, "bad_argument"),
        ({"kind": "chat", "messages": ["hello"]}, "bad_argument"),
        ({"kind": "chat", "messages": [{"role": "user"}]}, "bad_argument"),
        ({"kind": "chat", "messages": [{"role": "user", "content": 1}]}, "bad_argument"),
    ],
)
def test_bad_jobs_fail_alone(cpu: EngineProcess, fields: dict[str, object], name: str) -> None:
    neighbour = cpu.submit("Once upon a time", params={"max_tokens": 8})
    message = {"op": "submit", "kind": "completion", "prompt": "Hello", "sampling": {"max_tokens": 20}, **fields}
    cpu.send(**message, job=900_000)
    events = cpu.finish(900_000, neighbour)
    assert [event["ev"] for event in events[900_000]] == ["failed"]
    error = events[900_000][0]["error"]
    assert error["name"] == name
    if name == "context_overflow":
        assert error["detail"]["n_ctx"] == 512
        assert error["detail"]["n_prompt"] > 0
        assert "shorten the prompt, lower max_tokens, or launch with n_ctx=" in error["message"]
    assert last(events[neighbour])["ev"] == "done"


def test_a_number_in_use_is_refused(cpu: EngineProcess) -> None:
    with cpu.slowly():
        job = cpu.submit(CASTLE, params={"max_tokens": 50})
        cpu.wait_for("started", job=job)
        cpu.send(op="submit", job=job, kind="completion", prompt="x", sampling={})
        assert cpu.wait_for("failed", job=job)["error"]["name"] == "bad_argument"
    assert last(cpu.finish(job)[job])["ev"] == "done"


def load_error(model: Path, **fields: object) -> dict[str, object]:
    child = EngineProcess()
    try:
        event = child.load(model, **{"n_ctx": 512, "n_threads": 1, **fields})
        assert event["ev"] == "fatal", event
        assert child.process.wait(DEADLINE_S) == 3
        error: dict[str, object] = event["error"]
        return error
    finally:
        child.close()


def test_models_that_cannot_be_served(shallow_model: Path, tmp_path: Path) -> None:
    assert load_error(tmp_path / "none.gguf")["name"] == "model_not_found"
    (tmp_path / "text.gguf").write_text("not a model\n" * 1000)
    assert load_error(tmp_path / "text.gguf")["name"] == "bad_model"
    half = tmp_path / "half.gguf"
    shutil.copy(shallow_model, half)
    with half.open("r+b") as file:
        file.truncate(shallow_model.stat().st_size // 2)
    assert load_error(half)["name"] == "bad_model"
    (tmp_path / "empty.gguf").touch()
    assert load_error(tmp_path / "empty.gguf")["name"] == "bad_model"


@pytest.mark.parametrize(
    "fields",
    [{"n_ctx": 0}, {"n_ctx": "all"}, {"n_parallel": 65}, {"mode": "fast"}, {"vram_budget_bytes": -1}, {"colour": 1}],
)
def test_bad_load_fields(shallow_model: Path, fields: dict[str, object]) -> None:
    error = load_error(shallow_model, **fields)
    assert error["name"] == "bad_argument"


def test_a_model_changed_in_use_ends_the_engine(shallow_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(shallow_model, copy)
    with engine(copy) as child:
        copy.touch()
        child.submit(CASTLE)
        event = child.wait_for("fatal")
        assert event["error"]["name"] == "bad_model"
        assert child.process.wait(DEADLINE_S) == 3


@pytest.mark.parametrize("changed", [0, -1])
def test_every_file_of_a_model_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: int) -> None:
    monkeypatch.setattr("gguf.GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=8))
    tiny_models.make("llama", tmp_path / "model.gguf")
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    with engine(files[0]) as child:
        files[changed].touch()
        child.submit("w1 w2 w3")
        event = child.wait_for("fatal", "done")
        assert event["ev"] == "fatal"
        assert event["error"]["message"] == f"{files[changed]} was changed while it was in use"


# --- the process ------------------------------------------------------------------------------------------------------


def test_ready_tells_what_was_loaded(model_path: Path) -> None:
    child = EngineProcess()
    try:
        ready = child.load(model_path, device="cpu", n_ctx=512, n_parallel=2, n_threads=1)
        info = ready["model"]
        assert (info["arch"], info["device"], info["n_ctx"], info["n_layer"]) == ("llama", "cpu", 512, 30)
        assert info["n_vocab"] == 49152
        assert info["chat"] is True
        child.send(op="stats", seq=4)
        stats = child.wait_for("stats")
        assert stats["seq"] == 4
        assert stats["stats"]["jobs_running"] == 0
        assert stats["stats"]["observed_by"] is None
        child.send(op="ping", seq=5)
        assert child.wait_for("pong") == {"ev": "pong", "seq": 5}
        child.send(op="budget", seq=6, vram_budget_bytes=1 << 20, timeout_s=1.0)
        released, observed = child.next_event(), child.next_event()
        assert (released["ev"], released["seq"], released["used_bytes"]) == ("released", 6, 0)
        assert (observed["ev"], observed["seq"], observed["observed_bytes"]) == ("observed", 6, None)
        child.send(op="stop")
        assert child.process.wait(DEADLINE_S) == 0
    finally:
        child.close()


def test_a_frame_block_that_is_gone_does_not_end_it(cpu: EngineProcess, tmp_path: Path) -> None:
    """It may be a file that something has removed since. Each next engine would be told to open it, too."""
    cpu.send(op="frame_block", path=str(tmp_path / "frame-block"))
    assert last(cpu.run("Once"))["ev"] == "done"


def test_pings_are_answered_in_a_long_prompt(model_path: Path) -> None:
    with engine(model_path, n_ctx=8192, n_parallel=1, n_ubatch=4096) as child:
        job = child.submit(LONG * 250)
        child.wait_for("started", job=job)
        for seq in range(30):
            child.send(op="ping", seq=seq)
            time.sleep(0.1)
        # The main thread answers some after the decode: those that come before it begins, and on a slow machine those
        # that come while a single operation takes seconds.
        for _ in range(5):
            assert child.wait_for("pong", "token")["ev"] == "pong"


@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_its_broker(shallow_model: Path, busy: bool) -> None:
    with engine(shallow_model, n_ctx=8192, n_parallel=1, n_ubatch=4096) as child:
        if busy:
            job = child.submit(LONG * 250)
            child.wait_for("started", job=job)
        child.socket.close()
        assert child.process.wait(DEADLINE_S) == 0


def test_it_ends_with_its_broker_before_anything_is_loaded() -> None:
    child = EngineProcess()
    child.socket.close()
    assert child.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x02\x00\x00\x00\x81\xa1"])
def test_a_stream_that_is_no_protocol_ends_it(noise: bytes) -> None:
    child = EngineProcess()
    try:
        child.socket.sendall(noise)
        assert child.process.wait(DEADLINE_S) == 0
    finally:
        child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="takes away descriptors, with which a thread reads /proc")
def test_an_engine_whose_thread_fails_says_why_and_ends(deep_model: Path) -> None:
    """Nobody would answer what that thread is asked: budgets, for example. The broker starts the next engine."""
    import resource

    with engine(deep_model, host_budget_bytes=1 << 30) as child:  # measured every two seconds then
        resource.prlimit(child.process.pid, resource.RLIMIT_NOFILE, (0, 0))
        fatal = child.wait_for("fatal")
        assert fatal["error"]["name"] == "out_of_memory"
        assert "the watch thread failed" in fatal["error"]["message"]
        assert child.process.wait(DEADLINE_S) == 3


def test_it_goes_first_when_memory_runs_out(cpu: EngineProcess) -> None:
    if sys.platform == "linux":
        assert Path(f"/proc/{cpu.process.pid}/oom_score_adj").read_text().strip() == "500"


def test_a_terminals_interrupt_is_not_its_business(cpu: EngineProcess) -> None:
    subprocess.run(["kill", "-INT", str(cpu.process.pid)], check=True)
    assert last(cpu.run("Once"))["ev"] == "done"
