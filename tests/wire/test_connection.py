"""Client and server core together, over connections that delay, break and come back."""

from __future__ import annotations

import dataclasses
import json
import logging
import random

import pytest

from frameshard.errors import (
    BY_NAME,
    BadArgument,
    BadMessage,
    ConnectionLost,
    EngineDied,
    Overloaded,
    UnknownJob,
    VersionMismatch,
    internal,
)
from frameshard.wire import codec, states
from frameshard.wire import messages as m
from frameshard.wire.connection import (
    LOST_AFTER_BEATS,
    MAX_ANSWERS,
    MAX_ANSWERS_BYTES,
    MAX_IN_TRANSIT,
    STOPPED_BEATS,
    ClientConnection,
    ServerConnection,
)

EPOCH = 77


def welcome(hello: m.Hello, session: int, *, resumed: bool = False) -> m.Welcome:
    limits = m.ServerLimits(1 << 20, 1 << 16, 64, 256, 10.0)
    return m.Welcome(hello.id, EPOCH, m.VERSION, session, resumed, "test", limits, "ready", None)


class Link:
    """A client and the server's side of its session. It does the broker's part: the greeting and the connections."""

    def __init__(self, *, held_bytes: int = 1000) -> None:
        self.server = ServerConnection(5, epoch=EPOCH, held_bytes=held_bytes, now=0.0)
        self.client = ClientConnection("test", epoch=EPOCH)
        self.known = False
        self.requests: list[m.Request] = []
        self.seen: list[object] = []
        self.strangers: list[bytes] = []
        self.exchange()
        assert self.client.state is states.Session.OPEN

    def take_all(self) -> None:
        """Takes the events one by one, also those that come because there is room for them again."""
        taken = 0
        while taken < len(self.events()):
            self.client.taken(self.events()[taken])
            taken += 1
            self.exchange()

    def up(self) -> None:
        while (frame := self.client.next_frame()) is not None:
            self.client.sent()
            request = m.decode_request(frame)
            if isinstance(request, m.Hello):
                self.known = True
                if request.session == 5:
                    self.server.resumed()
                self.server.reply(welcome(request, 5, resumed=request.session == 5))
            elif not self.known:
                lost = m.ErrorInfo.of(ConnectionLost("who are you"))
                self.strangers.append(m.encode(m.Error(getattr(request, "id", None), EPOCH, lost)))
            elif (wanted := self.server.receive(frame, 0.0)) is not None:
                self.requests.append(wanted)
                self.server.ok(wanted.id)  # type: ignore[union-attr]

    def down(self, count: int = 10**9) -> list[bytes]:
        frames = self.strangers
        self.strangers = []
        while self.known and len(frames) < count and (frame := self.server.next_frame()) is not None:
            self.server.sent()
            frames.append(frame)
        return frames

    def deliver(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.seen += self.client.receive(frame)

    def exchange(self) -> None:
        while self.client.next_frame() or self.strangers or (self.known and self.server.next_frame()):
            self.up()
            self.deliver(self.down())

    def submit(self, window: int = 8) -> int:
        _, job = self.client.submit("completion", prompt="x", window=window, timeline=3)
        self.up()
        self.server.open(job, 3, window)
        self.deliver(self.down())
        return job

    def events(self) -> list[m.JobEvent]:
        return [event for event in self.seen if isinstance(event, m.JobEvent)]


def finish(link: Link, job: int) -> None:
    link.server.done(job, reason="stop", n_prompt=1, n_generated=3, prefill_s=0.1, decode_s=0.2, n_reused=0, n_left=1)


def test_a_stream() -> None:
    link = Link()
    job = link.submit()
    link.server.started(job, 1, seed=9)
    for word in ("a", "b", "c"):
        link.server.delta(job, word, 1)
    finish(link, job)
    link.exchange()
    events = link.events()
    assert [event.seq for event in events] == [0, 1, 2, 3, 4]
    assert {(event.epoch, event.timeline, event.job) for event in events} == {(EPOCH, 3, job)}
    assert "".join(event.text for event in events if isinstance(event, m.Delta)) == "abc"
    assert list(link.server.jobs) == [job]
    for event in events:
        link.client.taken(event)
    link.exchange()
    assert list(link.server.jobs) == []


def test_a_slow_reader_gets_larger_deltas() -> None:
    link = Link()
    job = link.submit(window=4)
    link.server.started(job, 1, seed=9)
    for index in range(100):
        link.server.delta(job, f"{index} ", 1)
    finish(link, job)
    link.exchange()
    assert len(link.events()) == 4
    link.take_all()
    deltas = [event for event in link.events() if isinstance(event, m.Delta)]
    assert "".join(delta.text for delta in deltas) == "".join(f"{index} " for index in range(100))
    assert sum(delta.tokens for delta in deltas) == 100
    assert len(deltas) < 10
    assert isinstance(link.events()[-1], m.Done)


def test_a_slow_reader_misses_no_end_of_a_sentence() -> None:
    link = Link()
    job = link.submit(window=2)
    link.server.started(job, 1, seed=9)
    for index in range(100):
        link.server.delta(job, f"{index}", 1)
        link.server.delta(job, ". ", 1, sentence_end=True)
        link.server.delta(job, "Ah! ", 0, sentence_end=True)
    finish(link, job)
    link.exchange()
    link.take_all()
    deltas = [event for event in link.events() if isinstance(event, m.Delta)]
    assert "".join(delta.text + "|" * delta.sentence_end for delta in deltas) == "".join(
        f"{index}. |Ah! |" for index in range(100)
    )
    assert sum(delta.tokens for delta in deltas) == 200
    assert len(deltas) < 205


def test_a_reader_that_stands_still_overloads_its_job_only() -> None:
    link = Link(held_bytes=100)
    job = link.submit(window=4)
    link.server.started(job, 1, seed=9)
    for _ in range(3 + 10):  # fills the window, then 100 held bytes
        link.server.delta(job, "0123456789", 1)
    with pytest.raises(Overloaded):
        link.server.delta(job, "0", 1)
    link.server.failed(job, Overloaded("slow"))
    other = link.submit()
    link.server.started(other, 1, seed=9)
    finish(link, other)
    link.exchange()
    assert [type(event) for event in link.events() if event.job == other] == [m.Started, m.Done]
    for event in list(link.events()):
        link.client.taken(event)
    link.exchange()
    last = [event for event in link.events() if event.job == job][-1]
    assert isinstance(last, m.Failed)
    assert isinstance(last.error.exception(), Overloaded)


def test_a_call_may_be_larger_than_the_text_that_is_kept() -> None:
    """The client reads, but is a little behind. Calls come before and after the text that waits."""
    link = Link(held_bytes=100)
    job = link.submit(window=2)
    link.server.started(job, 1, seed=9)
    calls = [m.ToolCall(f"call{at}", "take", json.dumps({"item": "x" * 1000})) for at in range(3)]
    link.server.delta(job, "I take ", 1)
    link.server.delta(job, "it", 1)  # the window is full
    for call in calls:
        link.server.tool_call(job, call)
    link.server.delta(job, ".", 1)
    finish(link, job)
    link.exchange()
    link.take_all()
    events = link.events()
    heard = [event for event in events if isinstance(event, m.ToolCalled)]
    assert [m.ToolCall(event.call_id, event.name, event.arguments) for event in heard] == calls
    assert "".join(event.text for event in events if isinstance(event, m.Delta)) == "I take it."
    assert isinstance(events[-1], m.Done)


def test_answers_overtake_events() -> None:
    link = Link()
    job = link.submit()
    for _ in range(5):
        link.server.delta(job, "x", 1)
    link.client.budget_get()
    link.up()
    (first,) = link.down(1)
    assert isinstance(m.decode_answer(first), m.Ok)


def test_jobs_take_turns() -> None:
    link = Link()
    one, two = link.submit(), link.submit()
    for _ in range(3):
        link.server.delta(one, "x", 1)
    for _ in range(3):
        link.server.delta(two, "x", 1)
    link.exchange()
    assert [event.job for event in link.events()] == [one, two, one, two, one, two]


def test_duplicates_and_foreign_epochs_are_dropped() -> None:
    link = Link()
    job = link.submit()
    link.server.delta(job, "x", 1)
    frames = link.down()
    link.deliver(frames + frames)
    link.deliver([m.encode(m.Delta(job, 1, EPOCH + 1, 3, "late", 1))])
    assert [event.seq for event in link.events()] == [0]


def test_a_gap_is_filled() -> None:
    link = Link()
    job = link.submit()
    for word in "abcde":
        link.server.delta(job, word, 1)
    frames = link.down()
    link.deliver(frames[:1] + frames[3:])
    link.exchange()
    assert [event.seq for event in link.events()] == [0, 1, 2, 3, 4]


def test_a_gap_is_filled_if_what_was_sent_again_is_lost_too() -> None:
    link = Link()
    job = link.submit()
    for word in "abcde":
        link.server.delta(job, word, 1)
    frames = link.down()
    for _ in range(3):
        link.deliver(frames[3:])  # the client asks for the gap
        link.up()
        link.down()
        link.client.beat()
        link.up()
        link.deliver([frame for frame in link.down() if isinstance(m.decode_answer(frame), m.Pong)])
    link.exchange()
    assert [event.seq for event in link.events()] == [0, 1, 2, 3, 4]


def test_a_pong_from_before_a_job_does_not_end_it() -> None:
    link = Link()
    link.client.beat()
    link.up()
    pong = link.down()
    _, job = link.client.submit("completion", prompt="x", window=8, timeline=3)
    link.deliver(pong)
    link.up()
    link.server.open(job, 3, 8)
    finish(link, job)
    link.exchange()
    assert [type(event) for event in link.events()] == [m.Done]


def test_a_lost_tail_shows_at_the_next_pong() -> None:
    link = Link()
    job = link.submit()
    link.server.delta(job, "a", 1)
    finish(link, job)
    link.down()
    link.client.beat()
    link.exchange()
    assert [type(event) for event in link.events()] == [m.Delta, m.Done]


def test_a_lost_last_credit_is_said_again() -> None:
    link = Link()
    job = link.submit()
    finish(link, job)
    link.exchange()
    link.client.taken(link.events()[0])
    assert link.client.next_frame() is not None
    link.client.sent()
    link.client.beat()
    link.exchange()
    assert list(link.server.jobs) == []


def test_an_abandoned_job_drains_by_itself() -> None:
    link = Link()
    job = link.submit(window=2)
    for word in "abcdefgh":
        link.server.delta(job, word, 1)
    link.exchange()
    link.client.abandon(job)
    link.server.cancelled(job)
    link.exchange()
    assert len(link.events()) == 2
    assert list(link.server.jobs) == []


def test_a_server_that_forgot_a_job_fails_it() -> None:
    link = Link()
    job = link.submit()
    link.server._streams.clear()
    link.client.beat()
    link.exchange()
    (failed,) = link.events()
    assert isinstance(failed, m.Failed)
    assert failed.job == job
    assert failed.timeline == 3
    assert isinstance(failed.error.exception(), ConnectionLost)


@pytest.mark.parametrize("seed", range(50))
def test_streams_stay_whole_over_cuts(seed: int) -> None:
    """The connection breaks at random times, and messages on their way are lost. After the resumption each stream
    arrives complete, and once."""
    rng = random.Random(seed)
    link = Link(held_bytes=40000)
    texts: dict[int, str] = {}
    open_jobs: set[int] = set()
    taken = 0
    for step in range(400):
        action = rng.random()
        if action < 0.05 and len(texts) < 5:
            job = link.submit(window=rng.randint(1, 6)) if link.client.state is states.Session.OPEN else None
            if job is not None and job in link.server.jobs:
                texts[job] = ""
                open_jobs.add(job)
        elif action < 0.5 and open_jobs:
            job = rng.choice(sorted(open_jobs))
            link.server.delta(job, f"{step},", 1)
            texts[job] += f"{step},"
        elif action < 0.52 and open_jobs:
            job = open_jobs.pop()
            finish(link, job)
        elif action < 0.6:
            link.known = False
            link.strangers.clear()
            link.down()
            while link.client.next_frame() is not None:
                link.client.sent()
        elif action < 0.8:
            link.up()
        elif action < 0.95:
            link.deliver(link.down(rng.randint(0, 5)))
        else:
            link.client.beat()
            link.exchange()
        for event in link.events()[taken:]:
            if rng.random() < 0.5:
                break
            link.client.taken(event)
            taken += 1
    for job in open_jobs:
        finish(link, job)
    for _ in range(2000):
        link.client.beat()
        link.exchange()
        for event in link.events()[taken:]:
            link.client.taken(event)
            taken += 1
        if not list(link.server.jobs):
            break
    assert not list(link.server.jobs)
    for job, text in texts.items():
        events = [event for event in link.events() if event.job == job]
        assert [event.seq for event in events] == list(range(len(events)))
        assert isinstance(events[-1], m.Done)
        assert "".join(event.text for event in events if isinstance(event, m.Delta)) == text


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_lease_is_answered_once_over_a_cut(heard: int) -> None:
    """The server repeats all answers in order. An answer that is being sent on the new connection must wait."""
    link = Link()
    request = link.client.budget_set(1 << 30)
    link.exchange()
    answers: list[m.Reply] = [
        m.Lease(request, EPOCH, "granted", 1 << 30, 0.0, 0),
        m.Released(request, EPOCH, 1 << 30, 1 << 29, 0.5),
        m.Observed(request, EPOCH, None, 0.5),
    ]
    for answer in answers[:2]:
        link.server.reply(answer)
    link.deliver(link.down()[:heard])
    link.known = False
    link.client.beat()
    link.up()
    link.deliver(link.down())
    link.server.reply(answers[2])
    link.up()
    link.deliver(link.down())
    for answer in answers:
        link.server.reply(answer)
    link.exchange()
    assert [seen for seen in link.seen if isinstance(seen, (m.Lease, m.Released, m.Observed))] == answers


def test_notices_are_dropped_rather_than_kept_for_a_client_that_does_not_read() -> None:
    server = ServerConnection(5, epoch=EPOCH, held_bytes=0, now=0.0)
    for _ in range(MAX_ANSWERS + 1):
        server.notify(m.Notice(EPOCH, "wants", 1, 0.0, ""))
    assert not server.overrun
    server.ok(1)
    assert not server.overrun


def test_a_server_that_takes_pings_and_is_silent_may_be_stopped() -> None:
    """While the connection is open, the server's process is alive. Without a connection it is lost."""
    link = Link()
    for _ in range(STOPPED_BEATS):
        link.client.beat()
        while link.client.next_frame() is not None:
            link.client.sent()
    assert link.client.error is None
    assert link.client.heard_beats <= 1
    link.client.beat()
    assert isinstance(link.client.error, ConnectionLost)


def test_silence_is_counted_in_beats() -> None:
    link = Link()
    for _ in range(LOST_AFTER_BEATS):
        link.client.beat()
    assert link.client.error is None
    link.client.beat()
    assert isinstance(link.client.error, ConnectionLost)
    assert link.client.state is states.Session.LOST
    with pytest.raises(ConnectionLost):
        link.client.stats()
    assert link.client.next_frame() is None


def test_a_session_that_cannot_be_resumed_is_lost() -> None:
    link = Link()
    link.client.beat()
    link.client.sent()
    lost = m.ErrorInfo.of(ConnectionLost("who are you"))
    link.client.receive(m.encode(m.Error(2, EPOCH, lost)))
    assert link.client.state is states.Session.RESUMING
    hello = m.decode_request(link.client.next_frame() or b"")
    assert isinstance(hello, m.Hello)
    assert hello.session == 5
    link.client.receive(m.encode(welcome(hello, 6)))
    assert isinstance(link.client.error, ConnectionLost)


def test_another_launch_is_not_the_same_server() -> None:
    link = Link()
    link.client.stats()
    frame = link.client.next_frame()
    assert frame is not None
    other = ServerConnection(1, epoch=EPOCH + 1, held_bytes=0, now=0.0)
    assert other.receive(frame, 0.0) is None
    link.client.receive(other.next_frame() or b"")
    assert isinstance(link.client.error, ConnectionLost)


def test_hello_refused() -> None:
    client = ClientConnection("test")
    hello = m.decode_request(client.next_frame() or b"")
    assert isinstance(hello, m.Hello)
    client.receive(m.encode(m.Error(hello.id, EPOCH, m.ErrorInfo.of(VersionMismatch("no")))))
    assert isinstance(client.error, VersionMismatch)


def test_refused_requests_name_their_id() -> None:
    link = Link()
    request_id, job = link.client.submit("completion", prompt="x")
    link.client.sent()
    link.deliver([m.encode(m.Error(request_id, EPOCH, m.ErrorInfo.of(EngineDied("off"))))])
    (refusal,) = [answer for answer in link.seen if isinstance(answer, m.Error)]
    assert refusal.id == request_id
    link.deliver([m.encode(m.Started(job, 0, EPOCH, 0, 1))])
    assert link.events() == []


def test_bad_frames_are_answered_with_their_id() -> None:
    server = ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)
    for frame, request_id in [
        (b"\xc1", None),
        (m.codec.encode({"t": "fly", "id": 9}), 9),
        (m.codec.encode({"t": "stats", "id": 9, "epoch": EPOCH, "extra": 1}), 9),
        (m.codec.encode({"t": "credit", "epoch": EPOCH, "job": 1, "next": -1}), None),
    ]:
        assert server.receive(frame, 0.0) is None
        answer = m.decode_answer(server.next_frame() or b"")
        assert isinstance(answer, m.Error)
        assert (answer.id, answer.error.name) == (request_id, "bad_message")
        server.sent()
    server.open(1, 0, 4)
    server.receive(m.encode(m.Credit(EPOCH, 1, 5)), 0.0)
    answer = m.decode_answer(server.next_frame() or b"")
    assert isinstance(answer, m.Error)


def test_many_requests_about_jobs_go_up_as_their_answers_come() -> None:
    link = Link()
    submits = [link.client.submit("completion", prompt="x") for _ in range(2 * MAX_IN_TRANSIT)]
    jobs = [job for _, job in submits]
    assert [link.client.waits(request) for request, _ in submits].count(True) == MAX_IN_TRANSIT
    link.client.budget_set(1 << 30)
    link.up()
    assert [type(request) for request in link.requests] == [m.Submit] * MAX_IN_TRANSIT + [m.BudgetSet]
    link.deliver(link.down(10))
    link.up()
    assert len(link.requests) == MAX_IN_TRANSIT + 11
    link.known = False  # the connection breaks, and what was sent down is lost
    link.down()
    link.client.beat()
    link.exchange()
    asked = [request.job for request in link.requests if isinstance(request, m.Submit)]
    assert list(dict.fromkeys(asked)) == jobs
    assert sum(type(each) is m.Ok for each in link.seen) == len(jobs)
    assert not any(link.client.waits(request) for request, _ in submits)


def test_a_client_that_does_not_read_answers_overruns() -> None:
    server = ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)
    frame_bytes = len(m.encode(m.Pong(1, EPOCH, ())))
    for _ in range(1 + MAX_ANSWERS_BYTES // frame_bytes):
        server.receive(m.encode(m.Ping(1, EPOCH)), 0.0)
    assert not server.overrun
    while server.next_frame():
        server.sent()  # the bytes of answers that were sent do not count any more
    server.receive(m.encode(m.Ping(1, EPOCH)), 0.0)
    assert not server.overrun
    for _ in range(1 + MAX_ANSWERS_BYTES // frame_bytes):
        server.receive(m.encode(m.Ping(1, EPOCH)), 0.0)
    assert server.overrun


def test_large_answers_are_kept_up_to_their_number() -> None:
    server = ServerConnection(1, epoch=EPOCH, held_bytes=0, now=0.0)
    answer = m.Embeddings(1, EPOCH, 8, bytes(MAX_ANSWERS_BYTES // 8))
    for _ in range(MAX_ANSWERS):
        server.reply(answer)
    assert not server.overrun
    server.reply(answer)
    assert server.overrun


def test_bad_arguments_are_found_before_sending() -> None:
    link = Link()
    for kwargs in (
        {"prompt": ""},
        {"prompt": "x" * 70000},
        {"prompt": "x", "window": 0},
        {"prompt": "x", "sampling": m.Sampling(temperature=-1.0)},
        {"prompt": "x", "sampling": m.Sampling(stop=("",))},
        {"prompt": "x", "timeline": -1},
        {"prompt": "x", "messages": (m.ChatMessage("user", "x"),)},
    ):
        with pytest.raises(BadArgument):
            link.client.submit("completion", **kwargs)  # type: ignore[arg-type]
    assert link.client.next_frame() is None
    _, job = link.client.submit("completion", prompt="x")
    assert job == 1


@pytest.mark.parametrize("name", BY_NAME)
def test_errors_keep_their_class(name: str) -> None:
    error = m.ErrorInfo.of(BY_NAME[name]("why", field="n")).exception()
    assert (type(error), error.message, error.detail) == (BY_NAME[name], "why", {"field": "n"})


@pytest.mark.parametrize(("raised", "name"), [(MemoryError(), "out_of_memory"), (ValueError("no"), "internal")])
def test_an_exception_becomes_an_error_with_a_name(raised: Exception, name: str) -> None:
    error = internal(logging.getLogger("frameshard.test"), "a count", raised)
    assert (error.name, error.message.startswith("a count failed")) == (name, True)


def test_unknown_error_names_keep_their_words() -> None:
    info = m.ErrorInfo.of(UnknownJob("no job 3", job=3, odd=object()))
    assert info.detail == {"job": 3}
    assert isinstance(info.exception(), UnknownJob)


def test_a_detail_may_have_any_name() -> None:
    """Those of a newer sidecar are not known."""
    detail = {"message": "a", "self": "b"}
    error = m.ErrorInfo(33, "overloaded", "why", True, detail).exception()
    assert (error.message, error.detail) == ("why", detail)


def test_state_tables_are_closed() -> None:
    for table in (states.JOB, states.SESSION, states.ENGINE):
        assert set(table) == set(type(next(iter(table))))
        assert {target for row in table.values() for target in row.values()} <= set(table)


# ---- a newer sidecar ------------------------------------------------------------------------------------------------


def hear(link: Link, **message: object) -> list[object]:
    return list(link.client.receive(codec.encode(message)))


def test_unknown_events_of_a_job_are_counted_and_given_credit_for() -> None:
    link = Link()
    job = link.submit(window=4)
    link.exchange()
    event = {"job": job, "epoch": EPOCH, "timeline": 3}
    handed = hear(link, t="started", seq=0, n_prompt=1, **event)
    for seq in (1, 2, 3):
        handed += hear(link, t="hum", seq=seq, tune=[1, 2], **event)
    assert link.client.next_frame() is None  # no resend
    for one in handed:
        assert isinstance(one, (m.Started, m.UnknownEvent))
        link.client.taken(one)
    credits = []
    while (frame := link.client.next_frame()) is not None:
        credits.append(m.decode_request(frame))
        link.client.sent()
    assert credits == [m.Credit(EPOCH, job, 2), m.Credit(EPOCH, job, 4)]
    (delta,) = hear(link, t="delta", seq=4, text="la", tokens=1, logprobs=[0.5], **event)
    assert isinstance(delta, m.Delta)
    assert delta.text == "la"


def test_unknown_messages_fields_and_words_end_nothing() -> None:
    link = Link()
    assert hear(link, t="weather") == hear(link, t="weather", epoch=EPOCH, id=1, rain=True) == []
    (change,) = hear(link, t="engine", epoch=EPOCH, state="dreaming", restarts=0, dream="sheep")
    assert isinstance(change, m.Engine)
    assert change.state == "dreaming"
    assert link.client.state is states.Session.OPEN


@pytest.mark.parametrize(("version", "state"), [(m.VERSION + 6, states.Session.OPEN), (0, states.Session.LOST)])
def test_a_sidecar_of_at_least_this_version_is_taken(version: int, state: states.Session) -> None:
    client = ClientConnection("test", epoch=EPOCH)
    frame = client.next_frame()
    assert frame is not None
    hello = m.decode_request(frame)
    assert isinstance(hello, m.Hello)
    client.receive(m.encode(dataclasses.replace(welcome(hello, 5), protocol=version, features=("songs",))))
    assert client.state is state
    assert (client.error is None) == (state is states.Session.OPEN)


def test_lists_of_a_program_are_sent_as_they_are() -> None:
    biases = [m.LogitBias(text=" magic", bias=5.0)]
    sampling = m.Sampling(logit_bias=biases, stop=["."])  # type: ignore[arg-type]
    frame = m.encode(m.Submit(1, EPOCH, 1, "completion", prompt="x", sampling=sampling))
    request = m.decode_request(frame)
    assert isinstance(request, m.Submit)
    assert request.sampling == m.Sampling(logit_bias=tuple(biases), stop=(".",))


def test_requests_leave_out_defaults_and_stay_strict() -> None:
    frame = m.encode(m.Submit(1, EPOCH, 1, "completion", prompt="x", sampling=m.Sampling(top_k=7)))
    assert codec.decode(frame) == {
        "t": "submit",
        "id": 1,
        "epoch": EPOCH,
        "job": 1,
        "kind": "completion",
        "prompt": "x",
        "sampling": {"top_k": 7},
    }
    for wrong in ({"mood": "good"}, {"sampling": {"mood": "good"}}, {"kind": "song"}):
        with pytest.raises(BadMessage):
            m.decode_request(codec.encode({**codec.decode(frame), **wrong}))
    with pytest.raises(VersionMismatch):
        m.decode_request(codec.encode({"t": "hello", "id": 1, "protocol": m.VERSION + 1, "mood": "good"}))
