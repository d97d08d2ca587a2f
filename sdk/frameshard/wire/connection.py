"""Both sides of a session without I/O: frames and times in, typed messages and frames out.

The transport may lose everything in transit when a connection breaks and is made again (a message that is too large, a
peer that was frozen). For any transport that keeps the order of messages within a connection, this module guarantees:

- Events of a job arrive once, in order and without gaps. The sidecar keeps what the client has not taken; the client
  drops duplicates, asks again after a gap, and learns of a lost tail from the next pong.
- A client that reads slowly gets fewer and larger deltas. Its events in transit are bounded by its window, and the text
  kept for it by `held_bytes`; beyond that the job fails with Overloaded. No other job waits for it.
- Answers are sent before events, so a budget never queues behind tokens.
- A request is carried out once although it may be sent twice (again after a resumption): jobs have numbers chosen by
  the client, changes of the budget are recognised by their request's id, and all other requests set a state.
- Silence is counted in this side's own beats and looks: time during which this process was itself stopped (breakpoint,
  suspended machine) does not count. A peer that is silent while its connection is open is stopped or busy, not dead:
  the system closes a dead process's connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from frameshard.errors import BadArgument, BadMessage, ConnectionLost, FrameshardError, Overloaded, VersionMismatch
from frameshard.wire import checks, states
from frameshard.wire import messages as m

MAX_ANSWERS = 256
"""Answers kept for a client that sends requests and does not read."""

MAX_NOTICES = 64
"""With so many answers waiting, notices are dropped."""

BEAT_S = 0.5
"""Seconds between two calls of :meth:`ClientConnection.beat`."""

LOST_AFTER_BEATS = 5
"""Beats without an answer after which the session is lost, where no connection takes a ping."""

STOPPED_BEATS = 40
"""The same where a connection takes pings: the sidecar is stopped (console, debugger, cgroup freezer), or hangs."""

GREETING_BEATS = 10
"""The same for the first answer: a connection has to be made, and the machine is busy during a launch."""


_BUDGET_ANSWERS = (m.Lease, m.Released, m.Observed)


class _Outbox:
    """Events of one job that a client has not taken."""

    def __init__(self, job: int, timeline: int, window: int) -> None:
        self.job = job
        self.timeline = timeline
        self.window = window
        self.taken = 0  # by the client: events before this number are not kept
        self.sent = 0
        self.numbered = 0
        self.kept: deque[bytes] = deque()  # frames of taken..numbered
        self.waiting: deque[tuple[type[Any], dict[str, Any]]] = deque()
        """Beyond the window: a start, a delta for each sentence (without `sentences`, one), an end."""
        self.held_bytes = 0  # of text that waits
        self.ended = False

    def add(self, kind: type[Any], fields: dict[str, Any], epoch: int) -> None:
        last, held = self.waiting[-1] if self.waiting else (None, {})
        if kind is last is m.Delta and not held["sentence_end"]:
            held["text"] += fields["text"]
            held["tokens"] += fields["tokens"]
            held["sentence_end"] = fields["sentence_end"]
        else:
            self.waiting.append((kind, fields))
        self.held_bytes += len(fields.get("text", "").encode())
        self.ended = self.ended or kind in m.TERMINAL
        self.number(epoch)

    def number(self, epoch: int) -> None:
        while self.waiting and self.numbered < self.taken + self.window:
            kind, fields = self.waiting.popleft()
            self.held_bytes -= len(fields.get("text", "").encode())
            event = kind(job=self.job, seq=self.numbered, epoch=epoch, timeline=self.timeline, **fields)
            self.kept.append(m.encode(event))
            self.numbered += 1

    @property
    def over(self) -> bool:
        return self.ended and not self.waiting and self.taken == self.numbered


class ServerConnection:
    """The sidecar's side of one session. A job's stream of events lasts from :meth:`open` until its last event has been
    taken."""

    def __init__(self, session: int, *, epoch: int, held_bytes: int, now: float) -> None:
        self.session = session
        self.epoch = epoch
        self.heard_at = now
        self.silent_looks = 0
        """Looks of the broker at which everything received had been read, since something came from the client."""
        self.overrun = False
        """The client does not read its answers; the session must end."""
        self._held_bytes = held_bytes
        self._answers: deque[bytes] = deque()
        self._streams: dict[int, _Outbox] = {}
        self._sending: _Outbox | None = None

    def receive(self, frame: bytes, now: float) -> m.Request | None:
        """A request to carry out, or None where it was dealt with here."""
        self.heard_at = now
        self.silent_looks = 0
        try:
            request = m.decode_request(frame)
            if isinstance(request, m.Hello):
                return request
            if request.epoch != self.epoch:
                raise ConnectionLost("this request was meant for another launch of the sidecar", id=_id_of(request))
            if isinstance(request, m.Credit):
                self._credit(request)
                return None
        except FrameshardError as error:
            self.refuse(error.detail.pop("id", None), error)
            return None
        if isinstance(request, m.Ping):
            self.reply(self.pong(request.id))
            return None
        return request

    def pong(self, request_id: int) -> m.Pong:
        """A pong, which says how far each job's events have been sent."""
        return m.Pong(request_id, self.epoch, tuple((stream.job, stream.sent) for stream in self._streams.values()))

    def reply(self, answer: m.Reply | m.Unasked) -> None:
        """Queues an answer, before all events."""
        if len(self._answers) >= MAX_ANSWERS:
            self.overrun = True
            return
        self._answers.append(m.encode(answer))

    def notify(self, notice: m.Notice) -> None:
        """Queues a notice like an answer; drops it where many answers wait."""
        if len(self._answers) < MAX_NOTICES:
            self._answers.append(m.encode(notice))

    def ok(self, request_id: int) -> None:
        self.reply(m.Ok(request_id, self.epoch))

    def refuse(self, request_id: object, error: FrameshardError) -> None:
        """Answers a request with `error`."""
        self.reply(m.Error(request_id if type(request_id) is int else None, self.epoch, m.ErrorInfo.of(error)))

    @property
    def jobs(self) -> Iterable[int]:
        """Jobs whose last event the client has not taken."""
        return self._streams.keys()

    def open(self, job: int, timeline: int, window: int) -> None:
        """Begins the stream of a job's events."""
        self._streams[job] = _Outbox(job, timeline, window)

    def resumed(self) -> None:
        """The client is on another connection; what was sent on the last one may be lost."""
        for stream in self._streams.values():
            stream.sent = stream.taken

    def started(self, job: int, n_prompt: int, seed: int) -> None:
        self._streams[job].add(m.Started, {"n_prompt": n_prompt, "seed": seed}, self.epoch)

    def progress(self, job: int, phase: str, done: int, total: int) -> None:
        """Left out while the window is full: the next one has newer figures."""
        stream = self._streams[job]
        if stream.numbered < stream.taken + stream.window:
            stream.add(m.Progress, {"phase": phase, "done": done, "total": total}, self.epoch)

    def delta(self, job: int, text: str, tokens: int, *, sentence_end: bool = False) -> None:
        """More text.

        :param sentence_end: the text ends a sentence: what follows is not put into the same delta.
        :raises Overloaded: too much text is kept already; the job must be failed.
        """
        stream = self._streams[job]
        if stream.waiting and stream.held_bytes + len(text.encode()) > self._held_bytes:
            raise Overloaded("the client does not read this job's events", held_bytes=self._held_bytes)
        stream.add(m.Delta, {"text": text, "tokens": tokens, "sentence_end": sentence_end}, self.epoch)

    def done(
        self,
        job: int,
        *,
        reason: str,
        n_prompt: int,
        n_generated: int,
        prefill_s: float,
        decode_s: float,
        n_reused: int,
    ) -> None:
        fields = {
            "reason": reason,
            "n_prompt": n_prompt,
            "n_generated": n_generated,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "n_reused": n_reused,
        }
        self._streams[job].add(m.Done, fields, self.epoch)

    def failed(self, job: int, error: FrameshardError) -> None:
        self._streams[job].add(m.Failed, {"error": m.ErrorInfo.of(error)}, self.epoch)

    def cancelled(self, job: int) -> None:
        self._streams[job].add(m.Cancelled, {}, self.epoch)

    def next_frame(self) -> bytes | None:
        """What to send next; the same again until :meth:`sent`."""
        if self._answers:
            return self._answers[0]
        self._sending = next((stream for stream in self._streams.values() if stream.sent < stream.numbered), None)
        return None if self._sending is None else self._sending.kept[self._sending.sent - self._sending.taken]

    def sent(self) -> None:
        """The transport has taken the frame that :meth:`next_frame` returned."""
        if self._answers:
            self._answers.popleft()
        elif self._sending is not None:
            self._sending.sent += 1
            # Another job's turn next, so that a long burst delays no job.
            self._streams[self._sending.job] = self._streams.pop(self._sending.job)

    def _credit(self, credit: m.Credit) -> None:
        stream = self._streams.get(credit.job)
        if stream is None:
            return  # it crossed with the end of the job
        if credit.next > stream.numbered:
            raise BadMessage(f"credit.next: job {credit.job} has no event {credit.next - 1} yet")
        while stream.taken < credit.next:
            stream.kept.popleft()
            stream.taken += 1
        # Behind a resend, events are taken that are not sent again yet.
        stream.sent = stream.taken if credit.resend else max(stream.sent, stream.taken)
        stream.number(self.epoch)
        if stream.over:
            del self._streams[stream.job]


def _id_of(request: m.Request) -> int | None:
    return None if isinstance(request, m.Credit) else request.id


class _Inbox:
    """Events of one job at the client."""

    def __init__(self, timeline: int, window: int) -> None:
        self.timeline = timeline
        self.window = window
        self.expected = 0
        self.granted = 0
        self.accepted = False
        self.asked_again = False
        self.abandoned = False
        self.ended = False


class ClientConnection:
    """The client's side of one session.

    :meth:`receive` returns what is for the program: answers (with the id that the request's method returned), events of
    jobs in order, and engine states. When :attr:`error` is set, all jobs and requests have ended with it.
    """

    def __init__(self, client: str, *, epoch: int | None = None, notices: bool = False) -> None:
        self.state = states.Session.GREETING
        self.error: FrameshardError | None = None
        self.welcome: m.Welcome | None = None
        self._client = client
        self._epoch = epoch
        self._notices = notices
        self._ids = 0
        self._jobs = 0
        self._silent_beats = 0
        self.heard_beats = 0
        """Beats before which something had been received: time during which both sides were awake."""
        self._outgoing: deque[bytes] = deque()
        self._unanswered: dict[int, m.Request] = {}
        self._heard: dict[int, int] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._hello()

    # ---- requests: each returns its id, which the answer carries ----------------------------------------------------

    def submit(self, kind: m.Kind, *, timeline: int = 0, window: int = 32, **fields: Any) -> tuple[int, int]:
        """Asks for a job.

        :param fields: of :class:`~frameshard.wire.messages.Submit`.
        :returns: the request's id and the job's number.
        :raises BadArgument: a field has a wrong value; the message names it.
        """
        job = self._jobs + 1
        request_id = self._request(m.Submit, job=job, kind=kind, timeline=timeline, window=window, **fields)
        self._jobs = job
        self._inboxes[job] = _Inbox(timeline, window)
        return request_id, job

    def cancel(self, job: int) -> int:
        return self._request(m.Cancel, job=job)

    def abandon(self, job: int) -> None:
        """The program does not want the rest of this job's events: they are taken here."""
        inbox = self._inboxes.get(job)
        if inbox is not None:
            inbox.abandoned = True
            self._grant(job, inbox, inbox.expected)
            if inbox.ended:
                del self._inboxes[job]

    def budget_set(self, vram_budget_bytes: int, **terms: Any) -> int:
        """Answered three times: lease, released, observed.

        :param terms: further fields of :class:`~frameshard.wire.messages.BudgetSet`.
        """
        return self._request(m.BudgetSet, vram_budget_bytes=vram_budget_bytes, **terms)

    def budget_get(self) -> int:
        return self._request(m.BudgetGet)

    def caps_and_requirements(self) -> int:
        return self._request(m.CapsGet)

    def plan(self, budgets: tuple[int, ...], prompt_tokens: int) -> int:
        return self._request(m.PlanGet, budgets=budgets, prompt_tokens=prompt_tokens)

    def frame_block(self) -> int:
        return self._request(m.FrameBlockGet)

    def pacing(self, scheduling_mode: str, target_tokens_per_second: float) -> int:
        return self._request(
            m.Pacing, scheduling_mode=scheduling_mode, target_tokens_per_second=target_tokens_per_second
        )

    def model_info(self) -> int:
        return self._request(m.ModelInfoGet)

    def stats(self) -> int:
        return self._request(m.StatsGet)

    def bye(self) -> int:
        return self._request(m.Bye)

    def shutdown(self) -> int:
        return self._request(m.Shutdown)

    def taken(self, event: m.JobEvent) -> None:
        """The program has taken `event`: the sidecar may send as many more."""
        inbox = self._inboxes.get(event.job)
        if inbox is None:
            return
        if isinstance(event, m.TERMINAL):
            self._grant(event.job, inbox, event.seq + 1)
            del self._inboxes[event.job]
        elif event.seq + 1 - inbox.granted >= max(1, inbox.window // 2):
            self._grant(event.job, inbox, event.seq + 1)

    def gone(self, error: FrameshardError) -> None:
        """The program knows by other means that the sidecar has ended."""
        if self.error is None:
            self._lose("gone", error)

    def close(self) -> None:
        self._move("close")

    # ---- transport --------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | None:
        """What to send next; the same again until :meth:`sent`."""
        return self._outgoing[0] if self._outgoing else None

    def sent(self) -> None:
        self._outgoing.popleft()

    def beat(self) -> None:
        """To be called every :data:`BEAT_S` seconds: sends pings, and finds out that the sidecar does not answer."""
        if self.state in (states.Session.LOST, states.Session.CLOSED):
            return
        self.heard_beats += self._silent_beats == 0
        self._silent_beats += 1
        if self.state is states.Session.GREETING:
            most = GREETING_BEATS
        else:
            most = LOST_AFTER_BEATS if self._outgoing else STOPPED_BEATS
        if self._silent_beats > most:
            self._lose("silence", ConnectionLost("the sidecar does not answer"))
        elif self._outgoing:
            pass  # the transport takes nothing now
        elif self.state is states.Session.OPEN:
            assert self._epoch is not None
            self._ids += 1
            self._send(m.Ping(self._ids, self._epoch))
        else:
            self._hello()

    def receive(self, frame: bytes) -> list[m.Reply | m.JobEvent | m.Unasked]:
        """What in this frame is for the program."""
        if self.state in (states.Session.LOST, states.Session.CLOSED):
            return []
        try:
            message = m.decode_answer(frame)
        except BadMessage as error:
            self._lose("silence", ConnectionLost(f"the sidecar does not speak this protocol: {error.message}"))
            return []
        self._silent_beats = 0
        if message is None:
            return []  # of a newer sidecar
        if isinstance(message, m.Welcome):
            return self._welcomed(message)
        if isinstance(message, m.Error):
            return self._refused(message)
        if message.epoch != self._epoch:
            return []
        if isinstance(message, m.Pong):
            return self._compare(message)
        if isinstance(message, m.JobEvent):
            return self._event(message)
        if isinstance(message, m.Unasked):
            return [message]
        request = self._unanswered.get(message.id)
        if request is None:
            return []  # a second answer after a resumption
        if isinstance(request, m.BudgetSet):
            # After a resumption all three come again, from the first on.
            heard = self._heard.get(message.id, 0)
            if type(message) is not _BUDGET_ANSWERS[heard]:
                return []
            self._heard[message.id] = heard + 1
            if not isinstance(message, m.Observed):
                return [message]
            del self._heard[message.id]
        del self._unanswered[message.id]
        if isinstance(request, m.Submit) and request.job in self._inboxes:
            self._inboxes[request.job].accepted = True
        return [message]

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _move(self, event: str) -> None:
        self.state = states.SESSION[self.state].get(event, self.state)

    def _send(self, message: m.Request) -> None:
        self._outgoing.append(m.encode(message))

    def _request(self, message: type[Any], **fields: Any) -> int:
        if self.error is not None or self._epoch is None:
            raise self.error or ConnectionLost("not connected yet")
        try:
            request: m.Request = message(id=self._ids + 1, epoch=self._epoch, **fields)
        except checks.Refused as refused:
            raise BadArgument(str(refused)) from None
        self._send(request)
        self._ids += 1
        self._unanswered[self._ids] = request
        return self._ids

    def _hello(self) -> None:
        session = None if self.welcome is None else self.welcome.session
        self._ids += 1
        self._hello_id = self._ids
        self._send(m.Hello(self._ids, m.VERSION, self._client, self._epoch, session, self._notices, m.FEATURES))

    def _lose(self, event: str, error: FrameshardError) -> None:
        self._move(event)
        self.error = error
        self._outgoing.clear()
        self._unanswered.clear()
        self._heard.clear()
        self._inboxes.clear()

    def _welcomed(self, welcome: m.Welcome) -> list[m.Reply | m.JobEvent | m.Unasked]:
        if welcome.protocol < m.VERSION:
            why = f"the sidecar speaks protocol {welcome.protocol}, this client needs {m.VERSION}"
            self._lose("refused", VersionMismatch(why))
        elif self.state is states.Session.RESUMING and not welcome.resumed:
            self._lose("welcome", ConnectionLost("the sidecar has forgotten this session"))
        elif self.state is states.Session.RESUMING:
            self._move("resumed")
            for request in self._unanswered.values():
                self._send(request)
            for job, inbox in self._inboxes.items():
                self._grant(job, inbox, inbox.granted)  # the last one may be lost
        elif self.state is states.Session.GREETING:
            self._move("welcome")
            self._epoch = welcome.epoch
            self.welcome = welcome
            return [welcome]
        return []

    def _refused(self, refusal: m.Error) -> list[m.Reply | m.JobEvent | m.Unasked]:
        error = refusal.error.exception()
        if self.state in (states.Session.GREETING, states.Session.RESUMING):
            # Requests in transit while we send hello again are refused too; only the answer to hello counts.
            if refusal.id == self._hello_id:
                self._lose("refused", error)
        elif isinstance(error, ConnectionLost) and refusal.epoch == self._epoch and self.welcome is not None:
            self._move("stranger")
            self._outgoing.clear()
            self._hello()
        elif refusal.epoch != self._epoch:
            self._lose("silence", error)
        elif refusal.id is not None and refusal.id in self._unanswered:
            request = self._unanswered.pop(refusal.id)
            self._heard.pop(refusal.id, None)
            if isinstance(request, m.Submit):
                self._inboxes.pop(request.job, None)
            return [refusal]
        return []

    def _event(self, event: m.JobEvent) -> list[m.Reply | m.JobEvent | m.Unasked]:
        inbox = self._inboxes.get(event.job)
        if inbox is None or event.seq < inbox.expected:
            return []
        if event.seq > inbox.expected:
            self._ask_again(event.job, inbox)
            return []
        inbox.expected += 1
        inbox.asked_again = False
        inbox.ended = isinstance(event, m.TERMINAL)
        if inbox.abandoned:
            self.taken(event)
            return []
        return [event]

    def _compare(self, pong: m.Pong) -> list[m.Reply | m.JobEvent | m.Unasked]:
        sent = dict(pong.jobs)
        lost: list[m.Reply | m.JobEvent | m.Unasked] = []
        for job, inbox in list(self._inboxes.items()):
            if sent.get(job, 0) > inbox.expected:
                inbox.asked_again = False  # the events sent again have been lost as well
                self._ask_again(job, inbox)
            elif inbox.accepted and not inbox.ended and job not in sent:
                del self._inboxes[job]
                gone = m.ErrorInfo.of(ConnectionLost("the sidecar has forgotten this job"))
                lost.append(m.Failed(job, inbox.expected, pong.epoch, inbox.timeline, gone))
        for job in sent.keys() - self._inboxes.keys():
            # We have taken its last event, and the credit that says so was lost.
            self._send(m.Credit(pong.epoch, job, sent[job]))
        return lost

    def _ask_again(self, job: int, inbox: _Inbox) -> None:
        # One request for a gap: events in transit behind the gap must not cause another one.
        if not inbox.asked_again:
            inbox.asked_again = True
            self._grant(job, inbox, inbox.granted, resend=True)

    def _grant(self, job: int, inbox: _Inbox, next_seq: int, *, resend: bool = False) -> None:
        assert self._epoch is not None
        inbox.granted = next_seq
        self._send(m.Credit(self._epoch, job, next_seq, resend))
