"""A request that takes long to prepare delays no other job. Each test has such a request, and a job that generates."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_driver import PATIENCE_S, EngineProcess, engine, ids, user
from hypothesis import given
from hypothesis import strategies as st

import tiny_models
from frameshard.engine.job import Job
from frameshard.engine.prepare import Preparation
from frameshard.engine.runtime import Runtime
from frameshard.engine.tokenizer import LONG_TEXT_CHARS
from frameshard.errors import BadArgument
from frameshard.wire import messages as m
from frameshard.wire.engine import EngineConfig, Submit
from sidecars import DEADLINE_S

# It takes a second of CPU time if the message asks for it.
SLOW_TEMPLATE = (
    "{% if 'slow' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}"
    "{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)
# By its bytes it might fit the context, so it must be tokenised, which takes a second: each byte becomes a token.
LONG = "\u2581" * 36_000
TALK = {"temperature": 0.0, "max_tokens": 16_000}
MANY = 20
"""The least number of tokens that the other job generates meanwhile. With a single thread it would be at most one."""


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    path = tmp_path_factory.mktemp("model") / "slow.gguf"
    tiny_models.make("llama", path, chat_template=SLOW_TEMPLATE)
    with engine(path, n_ctx=16384, n_parallel=2) as running:
        yield running


@pytest.fixture
def talker(child: EngineProcess) -> Iterator[int]:
    job = child.submit("Once upon a time", params=TALK)
    child.wait_for("token", job=job)
    yield job
    child.send(op="cancel", job=job)
    assert child.finish(job)[job][-1]["ev"] == "cancelled"


def tokens_until_failure(
    child: EngineProcess, talker: int, prompt: str | list[dict[str, str]]
) -> tuple[int, dict[str, Any]]:
    """Submits a job that fails. Counts the tokens of ``talker`` from when the engine reads it until it has failed."""
    with child.at_once():
        child.send(op="stats", seq=0)
        job = child.submit(prompt)
    child.wait_for("stats")
    count = 0
    while (event := child.next_event()).get("job") != job:
        count += event["ev"] == "token" and event["job"] == talker
    assert event["ev"] == "failed", event
    return count, event


def test_others_talk_while_a_long_prompt_is_tokenised(child: EngineProcess, talker: int) -> None:
    count, failed = tokens_until_failure(child, talker, LONG)
    assert failed["error"]["name"] == "context_overflow"
    assert failed["error"]["detail"]["n_prompt"] == 108_004
    assert count >= MANY


def test_others_talk_while_a_template_takes_its_time(child: EngineProcess, talker: int) -> None:
    count, failed = tokens_until_failure(child, talker, user("be slow"))
    assert failed["error"]["name"] == "bad_argument"
    assert count >= MANY


def test_short_requests_do_not_wait_for_long_ones(child: EngineProcess) -> None:
    long = [child.submit(LONG) for _ in range(2)]
    short = child.submit("abc", params={"max_tokens": 2})
    order = []
    while len(order) < 3:
        event = child.next_event()
        if event["ev"] in ("done", "failed") and event["job"] in (short, *long):
            order.append(event["job"])
    assert order == [short, *long]


MUCH = "x" * (1 << 14)
HELLO = m.ChatMessage("user", "Hello.")
CALLED = m.ChatMessage("assistant", "", (m.ToolCall("call00001", "look", "{}"), m.ToolCall("call00002", "look", MUCH)))


@pytest.mark.parametrize(
    "long",
    [
        {"messages": (HELLO, m.ChatMessage("user", MUCH))},
        {"messages": (HELLO, CALLED)},
        {"messages": (HELLO,), "given": MUCH + "x"},
        {"messages": (HELLO,), "tools": (m.Tool("look", MUCH),)},
        {"messages": (HELLO,), "tools": (m.Tool("look", "", MUCH),)},
        {"messages": (HELLO,), "sampling": m.Sampling(lark=MUCH)},
    ],
)
def test_each_text_of_a_request_counts(long: dict[str, Any]) -> None:
    """A short request is delivered while the long one before it is still read."""
    delivered: queue.SimpleQueue[int] = queue.SimpleQueue()
    released = threading.Event()

    def read(request: Submit) -> Job:
        if request.job == 1:
            released.wait()
        raise BadArgument("not needed")

    preparation = Preparation(read, lambda number, _: delivered.put(number))
    preparation.submit(Submit(**{"job": 1, "kind": "chat", "sampling": m.Sampling(), **long}))
    preparation.submit(Submit(2, "chat", m.Sampling(), (HELLO,)))
    try:
        assert delivered.get(timeout=60) == 2
    finally:
        released.set()
        assert preparation.close(60)


def test_short_requests_do_not_wait_for_a_new_form() -> None:
    """To compile one may take seconds. One that is known may be short."""
    delivered: queue.SimpleQueue[int] = queue.SimpleQueue()
    ready = {1: threading.Event(), 2: threading.Event(), 3: threading.Event()}

    def read(request: Submit) -> Job:
        if request.job in ready:
            assert ready[request.job].wait(PATIENCE_S)
        raise BadArgument("read")

    preparation = Preparation(read, lambda job, outcome: delivered.put(job))

    def submit(job: int, choices: tuple[str, ...] = (), **fields: Any) -> None:
        preparation.submit(Submit(job, "completion", m.Sampling(choices=choices), prompt="abc", **fields))

    def next_one() -> int:
        return delivered.get(timeout=PATIENCE_S)

    try:
        submit(1, ("yes", "no"))
        submit(4)
        assert next_one() == 4
        ready[1].set()
        assert next_one() == 1
        submit(2, tools=(m.Tool("price"),))
        submit(5, ("yes", "no"))
        assert next_one() == 5
        submit(6, ("yes", "never"))
        submit(3)  # nothing else is in the way of short ones
        submit(7)
        ready[2].set()
        assert [next_one(), next_one()] == [2, 6]
        ready[3].set()
        assert [next_one(), next_one()] == [3, 7]
    finally:
        for each in ready.values():
            each.set()
        assert preparation.close(PATIENCE_S)


def test_jobs_of_one_conversation_keep_their_order(child: EngineProcess) -> None:
    """Those that can start do so in their order. A refusal does not wait until the jobs before it start."""
    prompts = ["\u2581" * 6000 + " one", "two", user("three"), "\u2581" * 6000 + " four", "five"]
    one, two, three, four, five = (
        child.submit(prompt, conversation="c", params={"max_tokens": 1}) for prompt in prompts
    )
    order: dict[str, list[int]] = {"started": [], "failed": []}
    while sum(map(len, order.values())) < len(prompts):
        event = child.next_event()
        if event["ev"] in order:
            order[event["ev"]].append(event["job"])
    assert order == {"started": [two, three, five], "failed": [one, four]}


def test_a_job_that_is_being_read_can_be_cancelled(child: EngineProcess, talker: int) -> None:
    job = child.submit(LONG, conversation="cancelled")
    behind = child.submit("abc", conversation="cancelled", params={"max_tokens": 1})
    child.send(op="cancel", job=job)
    events = child.finish(job, behind)
    assert [event["ev"] for event in events[job]] == ["cancelled"]
    assert [event["ev"] for event in events[behind]] == ["started", "token", "done"]
    # There are no more events of the job, and its number can be used again.
    child.send(op="submit", job=job, kind="completion", prompt="abc", sampling={"max_tokens": 2})
    assert [event["ev"] for event in child.finish(job)[job]] == ["started", "token", "token", "done"]


def test_a_number_that_is_being_read_is_in_use(child: EngineProcess) -> None:
    job = child.submit(LONG)
    child.send(op="submit", job=job, kind="completion", prompt="x", sampling={})
    assert [child.wait_for("failed", job=job)["error"]["name"] for _ in range(2)] == [
        "bad_argument",
        "context_overflow",
    ]


def test_the_engine_ends_while_a_request_is_read(tmp_path: Path) -> None:
    tiny_models.make("llama", tmp_path / "tiny.gguf")
    child = EngineProcess()
    try:
        child.load(tmp_path / "tiny.gguf", device="cpu", n_ctx=512, n_parallel=1, n_threads=1)
        child.submit(LONG)
        child.send(op="stop")
        assert child.process.wait(DEADLINE_S) == 0
    finally:
        child.close()


def test_plans_wait_in_one_short_queue(tiny_model: Callable[[str], Path]) -> None:
    with engine(tiny_model("llama"), device="emulated", n_ctx=16384, n_parallel=2) as child:
        talker = child.submit("Once upon a time", params=TALK)
        child.wait_for("token", job=talker)
        for seq in range(30):
            child.send(op="plan", seq=seq, budgets=[0] * 4, prompt_tokens=100)
        answers: dict[int, Any] = {}
        tokens = 0
        while len(answers) < 30:
            event = child.next_event()
            tokens += event["ev"] == "token"
            if event["ev"] == "plan":
                answers[event["seq"]] = event.get("error", {}).get("name") or len(event["rows"])
        assert set(answers.values()) == {4, "overloaded"}
        assert answers[0] == 4
        assert tokens


# --- how few tokens a text can have -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["smollm2", "llama"])
def runtime(request: pytest.FixtureRequest, model_path: Path, tiny_model: Callable[[str], Path]) -> Iterator[Runtime]:
    path = model_path if request.param == "smollm2" else tiny_model("llama")
    with Runtime.load(EngineConfig(model=str(path), n_ctx=256, n_parallel=1, n_threads=1)) as loaded:
        yield loaded


PIECES = st.sampled_from(
    ["the ", "  ", "\u2581", "<|im_end|>", "internationally", "\n\n", "0", "旅", "\x00", "w12 w13"]
)


TEXTS = st.text() | st.lists(PIECES | st.characters()).map("".join)


@given(text=TEXTS, times=st.integers(1, 50), control=st.booleans())
def test_no_text_has_fewer_tokens_than_the_bound(runtime: Runtime, text: str, times: int, control: bool) -> None:
    least = runtime.tokenizer._least_tokens
    assert least is not None
    text *= times
    assert least.of(text.encode("utf-8", "replace")) <= len(
        runtime.tokenizer.tokenize(text, add_special=False, parse_special=control)
    )


@pytest.mark.parametrize("text", ["The wind blew over the hills. ", "a", " ", "{", "\n", "\U0001f409", "abc def 123, "])
def test_the_bound_refuses_what_is_far_too_long(runtime: Runtime, text: str) -> None:
    long = (text * (1 << 20))[: (1 << 20) // len(text[:1].encode())]
    assert runtime.tokenizer.least_tokens(long) > 4096
    assert runtime.tokenizer.least_tokens(long[:LONG_TEXT_CHARS]) > 0
    assert runtime.tokenizer.least_tokens(long[: LONG_TEXT_CHARS - 1]) == 0


def test_a_prompt_that_cannot_fit_is_refused_unread(model_path: Path) -> None:
    with engine(model_path, n_ctx=2048, n_parallel=1) as child:
        for prompt in ("The wind blew. " * 60_000, user("The wind blew. " * 4_000) * 15):
            (failed,) = child.run(prompt)
            assert failed["error"]["name"] == "context_overflow"
            assert "a prompt of at least" in failed["error"]["message"]
            assert failed["error"]["detail"]["n_prompt"] > 2048
        assert ids(child.run("Hello", params={"max_tokens": 2}))
