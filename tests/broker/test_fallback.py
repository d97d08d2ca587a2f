"""Jobs at the fallback server: a sidecar with the fake engine, and as the server our own HTTP server before a second
sidecar, behind a proxy that cuts, stalls and lies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import ssl
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio
from hypothesis import strategies as st

import frameshard
from fallbacks import END, KEY, MODEL, N_CTX, SSE, until_none_is_remote, with_fallback
from frameshard import errors
from frameshard.broker import fallback
from frameshard.broker.answer import AnswerReader, BadAnswer
from frameshard.broker.jobs import Jobs
from frameshard.testing import fake_engine
from frameshard.wire import engine as em
from frameshard.wire import launch as options
from frameshard.wire import messages as m
from frameshard.wire.connection import ServerConnection
from proxy import PASS, REFUSE, Fault, proxy, response
from servers import Server
from sidecars import DEADLINE_S, in_trio, started, until, until_ready

remote = pytest.importorskip("frameshard.broker.remote", reason="httpx is not installed", exc_type=ImportError)

TEXT = "One two three. " + " ".join(f"word{i}" for i in range(20)) + ". The end"


@in_trio
async def test_jobs_go_to_the_server_while_the_lease_is_parked(http: Server, place: Path) -> None:
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        assert not (await client.ask(TEXT).completed()).remote
        await client.set_budget(0, state="parked")
        async with client.ask(TEXT, sentences=True) as stream:
            deltas = [delta async for delta in stream]
        assert stream.remote
        assert stream.result is not None
        assert stream.result.remote
        assert (stream.result.n_prompt, stream.result.n_generated) == (len(TEXT.split()), len(TEXT.split()))
        assert stream.text == TEXT
        assert sum(delta.sentence_end for delta in deltas) == 2
        stopped = await client.ask(TEXT, sampling=frameshard.Sampling(stop=("word7",))).completed()
        assert stopped.text == TEXT[: TEXT.index("word7")]
        assert stopped.reason == "stop"
        assert stopped.n_generated > 0
        short = await client.ask(TEXT, sampling=frameshard.Sampling(max_tokens=2)).completed()
        assert (short.text, short.n_generated, short.remote) == ("One two", 2, True)

        asked = json.loads(door.heads[-1].split(b"\r\n\r\n")[-1] or b"{}")
        assert asked["model"] == MODEL
        assert asked["messages"][-1] == {"role": "user", "content": TEXT}
        assert f"bearer {KEY}" in b"".join(door.heads).decode().lower()

        for kept in (
            client.ask(TEXT, local_only=True),
            client.complete(TEXT),
            client.ask(TEXT, sampling=frameshard.Sampling(choices=("yes", "no"))),
            client.ask(TEXT, sampling=frameshard.Sampling(top_k=7)),
        ):
            await kept.__aenter__()
            assert (await client.stats()).broker.jobs_remote == 0
            await client.set_budget(0)
            assert not (await kept.completed()).remote
            await client.set_budget(0, state="parked")
        await client.set_budget(0, state="hibernated")
        assert (await client.ask(TEXT).completed()).remote
        await client.set_budget(0)
        await until_ready(client)
        assert not (await client.ask(TEXT).completed()).remote


BEFORE_TEXT = [
    REFUSE,
    Fault(after=20),
    Fault(say=b"HTTP/9 what\r\n\r\n"),
    Fault(say=response(b"no", status="500 Oh")),
    Fault(say=response(b"no", status="429 Busy")),
    Fault(say=response(b"", status="302 Found", extra="Location: http://127.0.0.1:1/elsewhere\r\n")),
    Fault(say=response(SSE + END, kind="application/json")),
    Fault(say=response(SSE + END, extra="Content-Encoding: gzip\r\n")),
    Fault(say=response(b"data: nonsense\n\n")),
    Fault(say=response(b"data: \xff\xfe\n\n")),
    Fault(say=response(b'data: {"choices":[{"delta":{"content":"\\ud800"}}]}\n\n')),
    Fault(say=response(b"data: [DONE]\n\n")),
    Fault(say=response(b'data: {"error":{"message":"overloaded"}}\n\n')),
    Fault(say=response(b"data: " + b"x" * 100_000)),
    Fault(say=response(b": " + b"x" * 1000 + b"\n" * 3_000_000)),
    Fault(say=response(b"data: " + b"[" * 50_000 + b"\n\n")),
    Fault(say=response(b"")),
]


@in_trio
async def test_a_failure_before_the_text_puts_the_job_back(http: Server, place: Path) -> None:
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        await client.set_budget(0, state="parked")
        faults = list(BEFORE_TEXT)
        door.choose = lambda: faults.pop() if faults else PASS
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                done = await client.ask(TEXT).completed()
                assert (done.text, done.remote) == (TEXT, True)

            for _ in BEFORE_TEXT:
                nursery.start_soon(ask)
        assert not faults
        door.choose = lambda: REFUSE
        before = door.n_faults
        async with client.ask(TEXT) as stream:
            await until(lambda: door.n_faults >= before + 2)  # tried again
            await client.set_budget(0)
            done = await stream.completed()
        assert (done.text, done.remote) == (TEXT, False)


@in_trio
async def test_the_engine_goes_on_from_a_text_that_is_cut_off(http: Server, place: Path) -> None:
    faults = [
        Fault(after=1500),
        Fault(say=response(SSE)),
        Fault(say=response(SSE + b"data: nonsense\n\n")),
        Fault(say=response(SSE + SSE.replace(b'"}', b'"},"finish_reason":"content_filter"'))),
        Fault(say=response(SSE + b"data: " + b"x" * 100_000)),
    ]
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        for fault in faults:
            for sentences in (False, True):
                await client.set_budget(0, state="parked")
                door.choose = lambda fault=fault: fault
                async with client.ask(TEXT, sentences=sentences) as stream:
                    ends = 0
                    while "One" not in stream.text:
                        ends += (await stream.__anext__()).sentence_end
                    assert stream.remote
                    await until_none_is_remote(client)
                    await client.set_budget(0)
                    ends += sum([delta.sentence_end async for delta in stream])
                done = await stream.completed()
                assert (done.text, done.remote) == (TEXT, False), fault
                assert done.n_generated == len(TEXT.split())
                assert ends == (2 if sentences else 0)


@in_trio
async def test_an_answer_that_has_begun_is_not_begun_again_with_less_history(place: Path) -> None:
    """The server takes a conversation that is longer than the engine's context."""
    async with proxy(0) as door, with_fallback(door, place, engine=fake_engine(n_ctx=12)) as client:
        for index in range(2):
            await client.ask(f"a b {index}", conversation="mira").completed()
        before = client.history("mira")
        await client.set_budget(0, state="parked")
        door.choose = lambda: Fault(say=response(SSE))  # it breaks off
        async with client.ask("c d e", conversation="mira") as stream:
            while "One two" not in stream.text:
                await stream.__anext__()
            await until_none_is_remote(client)
            await client.set_budget(0)
            with pytest.raises(errors.ContextOverflow):
                await stream.completed()
        assert stream.n_dropped == 0
        said = (m.ChatMessage("user", "c d e"), m.ChatMessage("assistant", stream.text))
        assert client.history("mira") == (*before, *said)


@in_trio
async def test_the_server_answers_while_the_engine_is_off(http: Server, place: Path) -> None:
    sick = place / "sick"
    engine = fake_engine(sick=str(sick))
    async with proxy(http.port) as door:
        async with with_fallback(door, place, engine=engine, restart_limit=0, off_pause_s=1000.0) as client:
            sick.touch()
            engine_pid = (await client.stats()).broker.engine_pid
            assert engine_pid is not None
            os.kill(engine_pid, signal.SIGKILL)
            with trio.fail_after(DEADLINE_S):
                while (await client.stats()).broker.engine != "off":
                    await trio.sleep(0.01)
            assert (await client.ask(TEXT).completed()).remote
            with pytest.raises(errors.EngineDied):
                await client.ask(TEXT, local_only=True).completed()
            door.choose = lambda: Fault(after=1500)
            stream = client.ask(TEXT)
            with pytest.raises(errors.EngineDied, match="fallback server") as failed:
                await stream.completed()
            assert failed.value.retriable
            assert TEXT.startswith(stream.text)
            assert stream.text
            door.choose = lambda: Fault(say=response(b"no", status="400 Bad Request"))
            with pytest.raises(errors.EngineDied, match="fallback server"):
                await client.ask(TEXT).completed()
            door.choose = lambda: PASS
            assert (await client.ask(TEXT).completed()).remote
    sick.unlink()


@in_trio
async def test_a_deadline_that_the_plan_cannot_meet_sends_a_job_away(http: Server, place: Path) -> None:
    """The fake engine plans a millisecond for each word of the prompt."""
    long = " ".join(["w"] * 32_000)
    three = frameshard.Sampling(max_tokens=3)
    async with proxy(http.port) as door:
        engine = fake_engine(delay_s=0.02, endless=True)
        async with with_fallback(door, place, engine=engine, n_ctx=N_CTX, n_parallel=1) as client:
            async with client.ask(TEXT, sampling=frameshard.Sampling(max_tokens=100_000)) as busy:
                await busy.__anext__()
                for deadline_ms in (31_000, 33_000):  # the plan says 32 s: it goes at once, or after a second
                    near = await client.ask(long, deadline_ms=deadline_ms, sampling=three).completed()
                    assert (near.text, near.remote) == ("w w w", True)
            far = await client.ask(long, deadline_ms=3_600_000, sampling=three).completed()
            assert (far.text, far.remote) == ("w w w", False)


@in_trio
async def test_a_cancelled_job_closes_its_connection(http: Server, place: Path) -> None:
    async with proxy(http.port) as door, with_fallback(door, place) as client:
        await client.set_budget(0, state="parked")
        door.choose = lambda: Fault(after=1500, stall=True)
        async with client.ask(TEXT) as stream:
            await stream.__anext__()
            assert door.n_open == 1
            await stream.cancel()
            with pytest.raises(errors.JobCancelled):
                await stream.completed()
        await until(lambda: door.n_open == 0)
        door.choose = lambda: Fault(after=0, stall=True)
        with pytest.raises(errors.DeadlineMissed):
            await client.ask(TEXT, deadline_ms=50).completed()
        await until(lambda: door.n_open == 0)
        async with frameshard.connect(client.info) as other:
            await other.ask(TEXT).__aenter__()
            await until(lambda: door.n_open == 1)
        await until(lambda: door.n_open == 0)


N_JOBS = 120


@in_trio
async def test_every_job_of_a_storm_ends_once_and_no_text_is_doubled(http: Server, place: Path) -> None:
    """Faults of the network while the lease is parked and unparked and the engine is killed. The key is in no log,
    error or figure."""
    random_ = random.Random(20)
    lies = [*BEFORE_TEXT, *(Fault(after=n) for n in (300, 1000, 2000, 4000))]
    ends: Counter[int] = Counter()
    seen: list[str] = []
    log = place / "storm.log"
    with log.open("w") as written:
        async with proxy(http.port) as door:
            door.choose = lambda: random_.choice(lies) if random_.random() < 0.3 else PASS
            scope = with_fallback(door, place, log=written.fileno(), max_client_jobs=N_JOBS, n_parallel=4)
            async with scope as client, trio.open_nursery() as nursery:
                over = trio.Event()

                async def ask(number: int) -> None:
                    text = f"job {number}: " + " ".join(f"w{i}" for i in range(30))
                    try:
                        given = {"conversation": f"{number % 40}", "priority": number % 3, "sentences": number % 2 == 0}
                        done = await client.chat([m.ChatMessage("user", text)], **given).completed()
                        assert done.text == text
                        seen.append(repr(done))
                    except errors.EngineDied as error:
                        seen.append(repr(error) + str(error.detail))
                    ends[number] += 1
                    if len(ends) == N_JOBS:
                        over.set()

                async def disturb() -> None:
                    for turn in range(12):
                        await client.set_budget(0, state="parked" if turn % 2 == 0 else "active")
                        await trio.sleep(0.2)
                        if turn % 4 == 1:
                            pid = (await client.stats()).broker.engine_pid
                            if pid is not None:
                                os.kill(pid, signal.SIGKILL)
                                await until_ready(client)
                        seen.append(repr(await client.stats()))

                for number in range(N_JOBS):
                    nursery.start_soon(ask, number)
                await disturb()
                door.choose = lambda: PASS
                await over.wait()
                seen.append(repr(client) + repr(scope))
                stats = (await client.stats()).broker
                assert (stats.jobs_queued, stats.jobs_running, stats.jobs_remote) == (0, 0, 0)
    assert ends == dict.fromkeys(range(N_JOBS), 1)
    assert "fallback server fails" in log.read_text()
    for shown in (*seen, log.read_text(), http.log.read_text()):
        assert KEY not in shown


def test_the_engine_gives_a_job_back_that_has_no_token() -> None:
    jobs = Jobs(slots=2, max_jobs=9, max_client_jobs=9, model=MODEL)
    client = ServerConnection(1, epoch=1, held_bytes=1 << 14, now=0.0)
    jobs.engine_ready()
    number = jobs.submit(client, submit(deadline_ms=5000, conversation="inn"), 0.0)
    jobs.engine_event(em.Started(number, 9, 0, 0))
    assert jobs.unread(number, 100) == 100
    jobs.predicted(number, 6.0, 1.0)  # it would have its first token 2 s late
    assert jobs.commands[1:] == [em.Cancel(number, pause=True)]
    jobs.engine_event(em.Cancelled(number))
    assert jobs.commands[2:] == []  # it does not go back to the engine
    jobs.depart(1.0)
    (asked,) = jobs.asks
    assert isinstance(asked, fallback.Ask)
    broken = fallback.Broken(asked.attempt, number, errors.ConnectionLost("gone"), False)
    jobs.fallback_event(broken, 2.0)  # there is room, so the engine has it again
    assert isinstance(jobs.commands[2], em.Submit)
    jobs.fallback_event(broken, 2.0)  # of an old attempt: nothing happens
    jobs.set_room(False)
    jobs.depart(2.1)
    assert jobs.commands[3:] == []  # not before its pause is over
    assert jobs.next_departure(2.1) == math.inf
    jobs.depart(2.5)
    assert jobs.commands[3:] == [em.Cancel(number, pause=True)]
    jobs.engine_event(em.Cancelled(number))
    jobs.depart(2.5)
    again = jobs.asks[1]
    assert isinstance(again, fallback.Ask)
    jobs.fallback_event(fallback.Text(again.attempt, number, "Hello"), 3.0)
    jobs.set_room(True)
    jobs.depart(9.0)
    jobs.fallback_event(fallback.Finished(again.attempt, number, "stop", 0, 0), 9.0)
    jobs.fallback_event(fallback.Finished(again.attempt, number, "stop", 0, 0), 9.0)
    told = []
    while (frame := client.next_frame()) is not None:
        client.sent()
        told.append(m.decode_answer(frame))
    assert [type(event) for event in told] == [m.Started, m.Paused, m.Resumed, m.Delta, m.Done]
    assert told[-1].remote
    assert jobs.open == 0

    local = jobs.submit(client, dataclasses.replace(submit(conversation="inn"), job=2), 0.0)
    for event in (em.Started(local, 9, 0, 0), em.Token(local, 0, 5, "a"), em.Done(local, "stop", 9, 1, 0.0, 0.0)):
        jobs.engine_event(event)
    later = jobs.submit(client, dataclasses.replace(submit(conversation="inn"), job=3), 0.0)
    assert (jobs.unread(later, 100), jobs.unread(later, 3)) == (90, 1)


def test_a_job_taken_back_for_want_of_room_goes_to_the_server_when_there_is_room_again() -> None:
    jobs = Jobs(slots=1, max_jobs=9, max_client_jobs=9, model=MODEL)
    jobs.engine_ready()
    number = jobs.submit(ServerConnection(1, epoch=1, held_bytes=1 << 14, now=0.0), submit(), 0.0)
    jobs.set_room(False)
    jobs.depart(1.0)
    assert jobs.commands[1:] == [em.Cancel(number, pause=True)]
    jobs.set_room(True)  # before the engine has answered
    jobs.engine_event(em.Cancelled(number))
    jobs.depart(1.0)
    (asked,) = jobs.asks
    assert isinstance(asked, fallback.Ask)
    jobs.fallback_event(fallback.Broken(asked.attempt, number, errors.ConnectionLost("gone"), False), 2.0)
    assert isinstance(jobs.commands[2], em.Submit)


def test_a_server_that_fails_is_asked_less_and_less_often() -> None:
    jobs = Jobs(slots=1, max_jobs=9, max_client_jobs=9, model=MODEL)
    number = jobs.submit(ServerConnection(1, epoch=1, held_bytes=1 << 14, now=0.0), submit(), 0.0)
    jobs.set_room(False)
    now, pauses = 10.0, []
    for _ in range(9):
        jobs.depart(now)
        asked = jobs.asks.pop()
        assert isinstance(asked, fallback.Ask)
        jobs.fallback_event(fallback.Broken(asked.attempt, number, errors.ConnectionLost("gone"), False), now)
        jobs.depart(now)
        assert jobs.asks == []
        pauses.append(jobs.next_departure(now) - now)
        now += pauses[-1]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@in_trio
async def test_a_job_outlives_a_lease_that_is_parked_and_active_again_at_once(http: Server, place: Path) -> None:
    async with proxy(http.port) as door, with_fallback(door, place, engine=fake_engine(delay_s=0.3)) as client:
        async with client.ask("One two three") as stream:
            client.change_budget(0, state="parked")
            client.change_budget(0)
            assert (await stream.completed()).text == "One two three"


def read_all(data: bytes, sizes: list[int]) -> tuple[str, AnswerReader]:
    """The text of an answer that comes in pieces of these sizes."""
    reader = AnswerReader(100)
    texts = []
    while data:
        size = sizes.pop() if sizes else len(data)
        texts += list(reader.feed(data[:size]))
        data = data[size:]
    return "".join(texts), reader


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":2}}\r\n\r\n'


@hypothesis.given(st.lists(st.integers(1, 40), max_size=60))
def test_an_answer_is_the_same_in_any_pieces(sizes: list[int]) -> None:
    last = END.replace(b"\n\ndata: [DONE]", b"\n\n" + USAGE % b"3" + b"data: [DONE]")
    text, reader = read_all(b": comment\n\n" + SSE + SSE + last, sizes)
    assert (text, reader.reason, reader.over) == ("One twoOne two", "stop", True)
    assert (reader.n_prompt, reader.n_generated) == (3, 2)


@pytest.mark.parametrize("count", [b"-1", b"1.5", b"true", b"null", b'"3"', b"1e9", b"9" * 100, b"{}"])
def test_counts_that_cannot_be_are_left_out(count: bytes) -> None:
    _, reader = read_all(SSE + USAGE % count + END, [])
    assert (reader.n_prompt, reader.n_generated) == (0, 0)


@hypothesis.given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([SSE, END, b"data: ", b"\n", b"{", b'"'])))
)
def test_random_bytes_end_in_text_or_in_an_error(parts: list[bytes]) -> None:
    with contextlib.suppress(BadAnswer):
        text, _ = read_all(b"".join(parts), [])
        text.encode()


def test_an_answer_is_limited() -> None:
    long = b" " * 70_000
    for data in (SSE * 3000, b"\n" * 700_000, b"data:" + long, b"data:" + long + b"\n", b":" + long + b"\n" + END):
        with pytest.raises(BadAnswer):
            read_all(data, [])


def submit(**fields: Any) -> m.Submit:
    asked = {"kind": "chat", "messages": (m.ChatMessage("user", "x"),), **fields}
    return m.Submit(id=1, epoch=1, job=1, **asked)


def sampling(**fields: Any) -> m.Submit:
    return submit(sampling=m.Sampling(**fields))


def test_only_what_the_server_can_be_asked_for_goes_there() -> None:
    assert fallback.may_go(submit(conversation="a", priority=2, deadline_ms=5, sentences=True, window=3))
    assert fallback.may_go(sampling(max_tokens=5, temperature=0, top_p=0.5, seed=3, stop=("x",), json_schema='{"a":1}'))
    for kept in (
        submit(local_only=True),
        submit(kind="completion", prompt="x", messages=()),
        submit(warm_up=True),
        submit(adapters=(m.Adapter("a"),)),
        submit(images=(m.Image("encoded", b"x"),)),
        submit(thinking="shown"),
        *(
            sampling(**{name: value})
            for name, value in {
                "top_k": 1,
                "min_p": 0.5,
                "repeat_penalty": 1.5,
                "typical_p": 0.5,
                "xtc_probability": 0.5,
                "dry_multiplier": 1.0,
                "choices": ("a",),
                "regex": "a",
                "lark": "start: /a/",
                "logit_bias": (m.LogitBias(1.0, 5),),
                "json_schema": "{",
            }.items()
        ),
        *(sampling(json_schema='{"a":' * depth + "1" + "}" * depth) for depth in range(100, 1000, 3)),
    ):
        assert not fallback.may_go(kept), kept
    assert fallback.may_go(sampling(json_schema='{"a":' * 60 + "1" + "}" * 60))
    question = json.loads(fallback.question(sampling(json_schema='{"type":"object"}', stop=("a",) * 9), MODEL, 7))
    assert question["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert (question["seed"], question["stop"], question["model"]) == (7, ["a"] * 4, MODEL)


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("ftp://127.0.0.1/v1", {}),
        ("llm.example.com/v1", {}),
        (f"https://user:{KEY}@llm.example.com/v1", {}),
        (f"https://llm.example.com/v1?key={KEY}", {}),
        (f"https://llm.example.com/v1#{KEY}", {}),
        ("http://llm.example.com/v1", {}),
        ("http://127.0.0.1.example.com/v1", {}),
        ("http://10.0.0.1:99999/v1", {"fallback_http": "anywhere"}),
        ("http://127.0.0.1/v1", {"fallback_model": ""}),
        ("http://127.0.0.1/v1", {"fallback_key_file": "a", "fallback_key_env": "B"}),
    ],
)
def test_wrong_launch_options_are_refused(url: str, more: dict[str, Any]) -> None:
    with pytest.raises(errors.BadArgument) as refused:
        options.make_config({"model": "m", "fallback": url, "fallback_model": MODEL, **more})
    assert refused.value.detail["field"].startswith("fallback")
    assert KEY not in refused.value.message
    for fine in ("http://localhost:8000/v1", "http://127.0.0.7/v1", "http://[::1]:80", "https://llm.example.com/v1"):
        options.make_config({"model": "m", "fallback": fine, "fallback_model": MODEL})
    options.make_config(
        {"model": "m", "fallback": "http://10.0.0.1", "fallback_model": "m", "fallback_http": "anywhere"}
    )


def first_line(code: str, given: dict[str, Any], **environment: str) -> dict[str, Any]:
    """What a sidecar's process says first when it is started."""
    program = f"{code}; import runpy; runpy.run_module('frameshard.broker', run_name='__main__')"
    with started(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps({"model": "no model", "engine": fake_engine(), **given}), file=process.stdin, flush=True)
        line = process.stdout.readline()
        process.stdin.close()
    return dict(json.loads(line))


AT_NO_PORT = {"fallback": "http://127.0.0.1:1/v1", "fallback_model": MODEL}


@pytest.mark.parametrize("package", ["httpx", "jsonschema"])
def test_a_missing_package_is_said_at_the_launch(package: str) -> None:
    missing = first_line(f"import sys; sys.modules['{package}'] = None", AT_NO_PORT)
    assert missing["error"]["name"] == "bad_argument"
    assert f"needs {package}: pip install 'frameshard[fallback]'" in missing["error"]["message"]


def test_a_key_that_cannot_be_used_is_refused_and_not_repeated(tmp_path: Path) -> None:
    open_to_all, empty = tmp_path / "key", tmp_path / "empty"
    open_to_all.write_text(KEY)
    open_to_all.chmod(0o644)
    empty.touch(0o600)
    for wrong in (
        {"fallback_key_file": str(open_to_all)},
        {"fallback_key_file": str(empty)},
        {"fallback_key_file": str(tmp_path)},
        {"fallback_key_file": str(tmp_path / KEY)},
        {"fallback_key_env": KEY},
    ):
        config = options.make_config({"model": "m", **AT_NO_PORT, **wrong})
        with pytest.raises(errors.BadArgument) as refused:
            remote.open_remote(config)
        assert refused.value.detail["field"] == next(iter(wrong))
        assert KEY not in refused.value.message


@in_trio
async def test_a_connection_that_cannot_be_made_gives_the_reason(http: Server) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(Path(__file__).parents[1] / "self-signed.pem")

    async def answer(stream: trio.SSLStream[trio.SocketStream]) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.do_handshake()

    async def reason(url: str) -> str:
        """Why an attempt with a server at this address fails."""
        events: list[fallback.Event] = []
        tried = remote.Remote(url)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tried.run, events.append)
            tried.send(fallback.Ask(1, 1, submit(), b"{}"))
            await until(lambda: bool(events))
            nursery.cancel_scope.cancel()
        (broken,) = events
        assert isinstance(broken, fallback.Broken)
        assert not broken.refused
        return str(broken.error.message)

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_ssl_over_tcp_listeners(0, context, host="localhost")
        port = listener.transport_listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        assert "self-signed certificate" in await reason(f"https://localhost:{port}/v1")
        nursery.cancel_scope.cancel()
    assert "TLS fails: WRONG_VERSION_NUMBER" in await reason(f"https://localhost:{http.port}/v1")
    assert "cannot be reached: " in (refused := await reason("http://127.0.0.1:1/v1"))
    assert not refused.endswith(": ")


def test_the_engine_does_not_inherit_the_key() -> None:
    engine = [sys.executable, "-c", "import os; print('it has', os.environ.get('A_KEY'))"]
    said = first_line("pass", {**AT_NO_PORT, "fallback_key_env": "A_KEY", "engine": engine}, A_KEY=KEY)
    assert "it has None" in said["error"]["message"]
