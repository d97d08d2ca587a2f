"""Messages between broker and engine: each one encoded and decoded, and wrong ones that both sides refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from frameshard.errors import BadArgument, BadMessage, Overloaded
from frameshard.wire import channel
from frameshard.wire import engine as em
from frameshard.wire import messages as m

MIB = 1 << 20
WHY = m.ErrorInfo.of(Overloaded("too many", max_jobs=3))
MODEL = m.ModelInfo("a.gguf", "llama", "CUDA0", 512, 2, 32000, 30, True, 16 * MIB, 256 * MIB, {"ring_bytes": 7}, "eye")
ROW = m.PlanRow(64 * MIB, True, 0.5, 12.5, MIB, 2 * MIB, 3 * MIB)
COMMANDS: list[em.Command] = [
    em.EngineConfig("a.gguf", device="CUDA0", vram_budget_bytes=64 * MIB, mode="stream_only", kv_type="q8_0"),
    em.Submit(1, "completion", m.Sampling(), prompt="Once"),
    em.Submit(
        2,
        "chat",
        m.Sampling(max_tokens=9, temperature=0.0, seed=2**32 - 1, stop=("é" * 128,), json_schema="{}"),
        messages=(m.ChatMessage("user", "Hello"), m.ChatMessage("assistant", "Hi")),
        images=(m.Image("encoded", data=b"png"), m.Image("rgb", path="/proc/1/fd/3", size=12, width=2, height=2)),
        conversation="7/inn",
        adapters=(m.Adapter("pirate", -0.5), m.Adapter("old")),
        resume=tuple(range(3000)),
        history=((8, 8, 40), (1, 3, 1)),
        given="It was",
    ),
    em.Cancel(3),
    em.SetPriority(3, 2),
    em.CountTokens(3, prompt="Once"),
    em.CountTokens(3, (m.ChatMessage("user", "Hi"),), tools=(m.Tool("look"),)),
    em.SetBudget(4, 64 * MIB, 0.5, parked=True),
    em.OpenFrameBlock("/proc/1/fd/4"),
    em.SetPacing("balance", 12.5),
    em.MakePlans(5, (0, 64 * MIB), 512),
    em.LoadAdapter(6, "pirate", "pirate.gguf"),
    em.UnloadAdapter(6, "pirate"),
    em.SaveKv(6, "4711/mira", "/saves/mira.kv", "/saves/mira.kv.7f.part"),
    em.LoadKv(7, "4711/mira", "/saves/mira.kv"),
    em.GetStats(6),
    em.AskAlive(),
    em.Ping(0),
    em.Stop(),
]
EVENTS: list[em.Event] = [
    em.Loading("read", 12, 94),
    em.Ready(MODEL, 64 * MIB, 512, 4, 1.5),
    em.Fatal(WHY),
    em.Started(1, 12, 3, 2**32 - 1, ((8, 8, 1), (4, 8, 1))),
    em.Progress(1, "encode", 1, 2),
    em.Token(1, 0, 31999, ""),
    em.Token(1, 0, 31999, "猫。犬", (2, 3)),
    em.Done(1, "length", 12, 9, 0.5, 1.5),
    em.Failed(1, WHY),
    em.Cancelled(1),
    em.BudgetGranted(4, 64 * MIB, 0.0),
    em.BudgetLate(4, 65 * MIB, 0.7),
    em.BudgetReleased(0, 64 * MIB, 63 * MIB, 0.4),
    em.BudgetObserved(4, None, 0.6),
    em.BudgetReleased(5, 64 * MIB, 63 * MIB, 0.4, 900 * MIB, 800 * MIB),
    em.BudgetObserved(5, 64 * MIB, 0.6, 810 * MIB),
    em.HostPressure(700 * MIB, "300 MiB of the machine's memory are available"),
    em.BudgetRefused(4, WHY),
    em.Stats(6, {"jobs_running": 1, "placement": [[0, 1]]}),
    em.Plans(5, (ROW,)),
    em.Kv(6, 577, 13 * MIB),
    em.Kv(7, detail="the file is not used"),
    em.Plans(5, error=WHY),
    em.TokenCount(3, 1, 511),
    em.Adapters(6, (m.AdapterInfo("pirate", MIB),), 2 * MIB),
    em.Adapters(6, error=WHY),
    em.Watch(MIB, 2 * MIB, 3 * MIB, None, 5 * MIB, ((77, MIB), (0, MIB)), 0),
    em.Alive(),
    em.Pong(0),
]


def test_each_message_has_an_example() -> None:
    assert {type(command) for command in COMMANDS} == set(em.COMMANDS.values())
    assert {type(event) for event in EVENTS} == set(em.EVENTS.values())


@pytest.mark.parametrize("message", [*COMMANDS, *EVENTS], ids=lambda message: type(message).__name__)
def test_a_message_comes_as_it_was_sent(message: em.Message) -> None:
    (fields,) = channel.Reader().feed(em.pack(message))
    assert (em.read_command if "op" in fields else em.read_event)(fields) == message


WRONG: list[dict[str, Any]] = [
    {},
    {"op": "dance"},
    {"op": ["ping"]},
    {"op": "ping"},
    {"op": "ping", "seq": -1},
    {"op": "ping", "seq": True},
    {"op": "ping", "seq": 1, "more": 1},
    {"op": "pong", "seq": 1},  # an event
    {"op": "submit", "job": 0, "kind": "completion", "sampling": {}, "prompt": "x"},
    {"op": "budget", "seq": 1, "vram_budget_bytes": 1, "timeout_s": math.inf},
    {"op": "load"},
    {"op": "load", "model": ""},
    {"op": "load", "model": "a\0b"},
    {"op": "load", "model": "a.gguf", "adapters": ["pirate=a\0b"]},
    {"op": "load_adapter", "seq": 1, "name": "pirate", "path": "a\0b"},
    {"op": "load", "model": "a.gguf", "n_ubatch": 2, "n_parallel": 3},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_is_no_command_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        em.read_command(fields)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": True},
        {"temperature": "hot"},
        {"top_p": 1.5},
        {"min_p": -1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"repeat_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"max_tokens": None},
        {"seed": -1},
        {"seed": 2**32},
        {"stop": "text"},
        {"stop": [""]},
        {"stop": [1]},
        {"stop": ["x"] * 17},
        {"stop": ["x" * 257]},
        {"mirostat": 2},
    ],
    ids=str,
)
def test_a_wrong_job_fails_alone_and_names_the_field(sampling: dict[str, Any]) -> None:
    fields = {"op": "submit", "job": 8, "kind": "completion", "prompt": "x", "sampling": sampling}
    with pytest.raises(BadMessage) as caught:
        em.read_command(fields)
    refused = em.refusal(fields, caught.value)
    assert isinstance(refused, em.Failed)
    assert (refused.job, refused.error.name) == (8, "bad_argument")
    assert next(iter(sampling)) in refused.error.message


def test_a_wrong_command_that_has_an_answer_is_answered() -> None:
    why = BadMessage("no")
    assert isinstance(em.refusal({"op": "load"}, why), em.Fatal)
    assert isinstance(em.refusal({"op": "budget", "seq": 3}, why), em.BudgetRefused)
    assert isinstance(em.refusal({"op": "plan", "seq": 3}, why), em.Plans)
    assert isinstance(em.refusal({"op": "kv_load", "seq": 3}, why), em.Kv)
    for fields in ({"op": "submit"}, {"op": "submit", "job": "x"}, {"op": "cancel", "job": 1}, {}):
        assert em.refusal(fields, why) is None


@pytest.mark.parametrize("ends", [[0], [3], [1, 1], [2, 1], [True], "1", 1], ids=str)
def test_ends_of_sentences_lie_in_their_text(ends: object) -> None:
    with pytest.raises(BadMessage, match="ends"):
        em.read_event({"ev": "token", "job": 1, "n": 0, "id": 5, "text": "猫。", "ends": ends})


def test_a_list_is_sent_like_a_tuple() -> None:
    biases = [m.LogitBias(text=" magic", bias=5.0)]
    command = em.Submit(1, "completion", m.Sampling(logit_bias=biases), prompt="Once")  # type: ignore[arg-type]
    (fields,) = channel.Reader().feed(em.pack(command))
    same = em.Submit(1, "completion", m.Sampling(logit_bias=tuple(biases)), prompt="Once")
    assert em.read_command(fields) == same


def test_what_the_other_side_would_refuse_is_not_sent() -> None:
    for message in (em.Ping(-1), em.Token(1, 0, 5, "x" * 70_000), em.SetBudget(1, 1 << 60)):
        with pytest.raises(BadArgument):
            em.pack(message)


def test_an_engine_configuration_names_the_wrong_field() -> None:
    with pytest.raises(BadArgument) as caught:
        em.EngineConfig("a.gguf", n_ctx=0)
    assert caught.value.detail["field"] == "n_ctx"
