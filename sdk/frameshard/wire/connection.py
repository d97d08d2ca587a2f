"""Both sides of a session, without I/O. Frames and times go in; typed messages and frames come out.

The transport may lose the messages in transit when a connection breaks and is made again, for example after a message
that is too large or while a peer is frozen. For any transport that keeps the order of messages within a connection,
this module guarantees:

- The events of a job arrive once, in order and without gaps. The sidecar keeps events until the client has taken them.
  The client drops duplicates, and asks again after a gap. If the last events are lost, the next pong shows that.
- A client that reads slowly gets fewer and larger deltas. Its window limits its events in transit, and `held_bytes`
  limits the text that is kept for it. Above that limit the job fails with Overloaded. No other job waits for it. Calls
  of tools are not text: a job has few of them, and each may be larger than that limit.
- Answers are sent before events, so the answer to a budget never waits behind tokens.
- A request is carried out once, although it may be sent again after the session is resumed. The client gives each job a
  number, changes of the budget are recognised by their request's id, and all other requests may be repeated.
- Silence is counted in beats of the client and looks of the broker, not in seconds. So the time during which this
  process was itself stopped (breakpoint, suspended machine) does not count. A peer that is silent on an open connection
  is stopped or busy, not dead: the operating system closes the connections of a dead process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from frameshard.errors import (
    BadArgument,
    BadMessage,
    ConnectionLost,
    FrameshardError,
    Overloaded,
    VersionMismatch,
    again,
)
from frameshard.wire import checks, states
from frameshard.wire import messages as m

MAX_ANSWERS = 256
MAX_ANSWERS_BYTES = 1 << 20
"""If a client sends requests and does not read, `MAX_ANSWERS` answers are kept for it, whatever their size. Further
ones are kept until all together take `MAX_ANSWERS_BYTES`. A program may send thousands of requests at once before it
reads the first answer."""

MAX_NOTICES = 64
"""Notices are dropped while so many answers wait."""

BEAT_S = 0.5
"""Seconds between two calls of :meth:`ClientConnection.beat`."""

LOST_AFTER_BEATS = 5
"""The session is lost after so many beats without an answer if the transport does not accept a ping."""

STOPPED_BEATS = 40
"""The session is lost after so many beats without an answer if the transport accepts pings. The sidecar is then stopped
(console, debugger, cgroup freezer) or hangs."""

GREETING_BEATS = 10
"""The session is lost after so many beats without the first answer. It needs time, because a connection must be made
and the machine is busy during a launch."""

MAX_IN_TRANSIT = 64
"""The most requests about jobs that a client sends before it has received their answers. A program with many tasks may
send faster than it reads, and the sidecar ends the session of a client that does not read its answers."""

_ABOUT_JOBS = (m.Submit, m.Cancel, m.PrioritySet)
"""The sidecar answers these requests at once, without its engine."""

_BUDGET_ANSWERS = (m.Lease, m.Released, m.Observed)


class _Outbox:
    """The events of one job that its client has not taken."""

    def __init__(self, job: int, timeline: int, window: int) -> None:
        self.job = job
        self.timeline = timeline
        self.window = window
        self.taken = 0  # the client has taken all events before this number
        self.sent = 0  # the transport has taken all events before this number
        self.numbered = 0  # the number of the next event
        self.kept: deque[bytes] = deque()  # the frames of the events from `taken` to `numbered`
        self.waiting: deque[tuple[type[Any], dict[str, Any]]] = deque()
        """Events that do not fit into the window yet. Thoughts are joined, and deltas up to the end of a sentence. A
        `paused` and the `resumed` after it, or the other way round, cancel each other out, so few of them wait."""
        self.held_bytes = 0  # bytes of the text in `waiting`
        self.ended = False

    def add(self, kind: type[Any], fields: dict[str, Any], epoch: int) -> None:
        last, held = self.waiting[-1] if self.waiting else (None, {})
        if kind is last is m.Thought:
            held["text"] += fields["text"]
            held["tokens"] += fields["tokens"]
        elif kind is last is m.Delta and not held["sentence_end"]:
            held["text"] += fields["text"]
            held["tokens"] += fields["tokens"]
            held["sentence_end"] = fields["sentence_end"]
        elif {kind, last} == {m.Paused, m.Resumed}:
            self.waiting.pop()
        else:
            self.waiting.append((kind, fields))
        self.held_bytes += _text_bytes(fields)
        self.ended = self.ended or kind in m.TERMINAL
        self.number(epoch)

    def number(self, epoch: int) -> None:
        while self.waiting and self.numbered < self.taken + self.window:
            kind, fields = self.waiting.popleft()
            self.held_bytes -= _text_bytes(fields)
            event = kind(job=self.job, seq=self.numbered, epoch=epoch, timeline=self.timeline, **fields)
            self.kept.append(m.encode(event))
            self.numbered += 1

    @property
    def over(self) -> bool:
        return self.ended and not self.waiting and self.taken == self.numbered


def _text_bytes(fields: dict[str, Any]) -> int:
    """The bytes of an event's text."""
    return len(fields.get("text", "").encode())


class ServerConnection:
    """The sidecar's side of one session. The stream of a job's events begins with :meth:`open` and ends when the client
    has taken the last event.

    :param session: the session's number.
    :param epoch: the number of this launch of the sidecar.
    :param held_bytes: the most bytes of text that are kept for one job.
    :param now: the time in seconds.
    """

    def __init__(self, session: int, *, epoch: int, held_bytes: int, now: float) -> None:
        self.session = session
        self.epoch = epoch
        self.heard_at = now
        self.silent_looks = 0
        """The number of the broker's looks since the last message from the client. A look counts only if the broker had
        read all received messages by then."""
        self.overrun = False
        """True if the client does not read its answers. The session must end."""
        self._held_bytes = held_bytes
        self._answers: deque[bytes] = deque()
        self._answers_bytes = 0
        self._streams: dict[int, _Outbox] = {}
        self._sending: _Outbox | None = None

    def receive(self, frame: bytes, now: float) -> m.Request | None:
        """Decodes a frame from the client.

        :returns: the request that the caller must carry out; None if there is nothing left to do.
        """
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
        """Returns the answer to a ping. It has the number of events that were sent for each job."""
        return m.Pong(request_id, self.epoch, tuple((stream.job, stream.sent) for stream in self._streams.values()))

    def reply(self, answer: m.Reply | m.Unasked) -> None:
        """Queues an answer. It is sent before all events."""
        if len(self._answers) >= MAX_ANSWERS and self._answers_bytes >= MAX_ANSWERS_BYTES:
            self.overrun = True
            return
        self._queue(m.encode(answer))

    def notify(self, notice: m.Notice | m.Loading) -> None:
        """Queues a notice like an answer. Drops it if many answers wait."""
        if len(self._answers) < MAX_NOTICES:
            self._queue(m.encode(notice))

    def _queue(self, frame: bytes) -> None:
        self._answers.append(frame)
        self._answers_bytes += len(frame)

    def ok(self, request_id: int) -> None:
        self.reply(m.Ok(request_id, self.epoch))

    def refuse(self, request_id: object, error: FrameshardError) -> None:
        """Answers a request with `error`."""
        self.reply(m.Error(request_id if type(request_id) is int else None, self.epoch, m.ErrorInfo.of(error)))

    @property
    def jobs(self) -> Iterable[int]:
        """The jobs whose last event the client has not taken."""
        return self._streams.keys()

    def open(self, job: int, timeline: int, window: int) -> None:
        """Begins the stream of a job's events."""
        self._streams[job] = _Outbox(job, timeline, window)

    def resumed(self) -> None:
        """Called when the client has a new connection. Sends again all events that it has not taken, because they may
        be lost."""
        for stream in self._streams.values():
            stream.sent = stream.taken

    def started(self, job: int, n_prompt: int, seed: int, *, remote: bool = False) -> None:
        self._streams[job].add(m.Started, {"n_prompt": n_prompt, "seed": seed, "remote": remote}, self.epoch)

    def progress(self, job: int, phase: str, done: int, total: int) -> None:
        """Adds a progress event. Drops it if the window is full, because the next one has newer figures."""
        stream = self._streams[job]
        if stream.numbered < stream.taken + stream.window:
            stream.add(m.Progress, {"phase": phase, "done": done, "total": total}, self.epoch)

    def delta(self, job: int, text: str, tokens: int, *, sentence_end: bool = False) -> None:
        """Adds text.

        :param tokens: the number of tokens of the text.
        :param sentence_end: a sentence ends with this text, so later text is not joined to the same delta.
        :raises Overloaded: too much text is kept already. The caller must fail the job.
        """
        self._say(m.Delta, job, {"text": text, "tokens": tokens, "sentence_end": sentence_end})

    def thought(self, job: int, text: str, tokens: int) -> None:
        """Adds text of the thought.

        :param tokens: the number of tokens of the text.
        :raises Overloaded: as :meth:`delta`.
        """
        self._say(m.Thought, job, {"text": text, "tokens": tokens})

    def tool_call(self, job: int, call: m.ToolCall) -> None:
        """Adds a call of a tool."""
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        self._streams[job].add(m.ToolCalled, fields, self.epoch)

    def _say(self, kind: type[Any], job: int, fields: dict[str, Any]) -> None:
        stream = self._streams[job]
        if stream.held_bytes and stream.held_bytes + _text_bytes(fields) > self._held_bytes:
            raise Overloaded("the client does not read this job's events", held_bytes=self._held_bytes)
        stream.add(kind, fields, self.epoch)

    def paused(self, job: int) -> None:
        self._streams[job].add(m.Paused, {}, self.epoch)

    def unpaused(self, job: int) -> None:
        self._streams[job].add(m.Resumed, {}, self.epoch)

    def done(
        self,
        job: int,
        *,
        reason: str,
        n_prompt: int,
        n_generated: int,
        prefill_s: float,
        decode_s: float,
        n_reused: int = 0,
        n_left: int = 0,
        n_thought: int = 0,
        remote: bool = False,
    ) -> None:
        fields = {
            "reason": reason,
            "n_prompt": n_prompt,
            "n_generated": n_generated,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "n_reused": n_reused,
            "n_left": n_left,
            "n_thought": n_thought,
            "remote": remote,
        }
        self._streams[job].add(m.Done, fields, self.epoch)

    def failed(self, job: int, error: FrameshardError) -> None:
        self._streams[job].add(m.Failed, {"error": m.ErrorInfo.of(error)}, self.epoch)

    def cancelled(self, job: int) -> None:
        self._streams[job].add(m.Cancelled, {}, self.epoch)

    def next_frame(self) -> bytes | None:
        """Returns the next frame to send, None if there is none. Returns the same frame until :meth:`sent` is
        called."""
        if self._answers:
            return self._answers[0]
        self._sending = next((stream for stream in self._streams.values() if stream.sent < stream.numbered), None)
        return None if self._sending is None else self._sending.kept[self._sending.sent - self._sending.taken]

    def sent(self) -> None:
        """Called when the transport has taken the frame that :meth:`next_frame` returned."""
        if self._answers:
            self._answers_bytes -= len(self._answers.popleft())
        elif self._sending is not None:
            self._sending.sent += 1
            # The job moves to the end of the order, so that many events of one job do not delay another job.
            self._streams[self._sending.job] = self._streams.pop(self._sending.job)

    def _credit(self, credit: m.Credit) -> None:
        stream = self._streams.get(credit.job)
        if stream is None:
            return  # the job has ended in the meantime
        if credit.next > stream.numbered:
            raise BadMessage(f"credit.next: job {credit.job} has no event {credit.next - 1} yet")
        while stream.taken < credit.next:
            stream.kept.popleft()
            stream.taken += 1
        # After a resend, the client may take events before they are sent again.
        stream.sent = stream.taken if credit.resend else max(stream.sent, stream.taken)
        stream.number(self.epoch)
        if stream.over:
            del self._streams[stream.job]


def _id_of(request: m.Request) -> int | None:
    return None if isinstance(request, m.Credit) else request.id


class _Inbox:
    """The state of one job's events at the client."""

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

    :meth:`receive` returns the messages for the program: answers (with the id that the request's method returned),
    events of jobs in order, and engine states. When :attr:`error` is set, all jobs and requests have ended with it.

    :param client: the client's name.
    :param epoch: the number of the sidecar's launch; None: it is taken from the first welcome.
    :param notices: the client wants notices.
    """

    def __init__(self, client: str, *, epoch: int | None = None, notices: bool = False) -> None:
        self.state = states.Session.GREETING
        self.error: FrameshardError | None = None
        self.welcome: m.Welcome | None = None
        self.engine: m.EngineState = "loading"
        """The state of the engine, as the sidecar has said it last."""
        self._client = client
        self._epoch = epoch
        self._notices = notices
        self._ids = 0
        self._jobs = 0
        self._silent_beats = 0
        self.heard_beats = 0
        """The number of beats with a message since the beat before. It measures the time during which both sides were
        running."""
        self._outgoing: deque[bytes] = deque()
        self._waiting: dict[int, bytes] = {}  # requests about jobs that are sent after answers to earlier ones
        self._in_transit = 0  # requests about jobs that were sent and not answered
        self._unanswered: dict[int, m.Request] = {}
        self._heard: dict[int, int] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._hello()

    # ---- requests: each returns its id, which the answer carries ----------------------------------------------------

    def submit(self, kind: m.Kind, *, timeline: int = 0, window: int = 32, **fields: Any) -> tuple[int, int]:
        """Asks for a job.

        :param fields: further fields of :class:`~frameshard.wire.messages.Submit`.
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

    def set_priority(self, job: int, priority: int) -> int:
        return self._request(m.PrioritySet, job=job, priority=priority)

    def abandon(self, job: int) -> None:
        """Called when the program does not want the other events of this job. They are taken and dropped here."""
        inbox = self._inboxes.get(job)
        if inbox is not None:
            inbox.abandoned = True
            self._grant(job, inbox, inbox.expected)
            if inbox.ended:
                del self._inboxes[job]

    def budget_set(self, vram_budget_bytes: int, **terms: Any) -> int:
        """Asks for a budget. There are three answers: lease, released, observed.

        :param terms: further fields of :class:`~frameshard.wire.messages.BudgetSet`.
        """
        return self._request(m.BudgetSet, vram_budget_bytes=vram_budget_bytes, **terms)

    def budget_get(self) -> int:
        return self._request(m.BudgetGet)

    def caps_and_requirements(self) -> int:
        return self._request(m.CapsGet)

    def adapter_load(self, name: str, path: str) -> int:
        return self._request(m.AdapterLoad, name=name, path=path)

    def adapter_unload(self, name: str) -> int:
        return self._request(m.AdapterUnload, name=name)

    def plan(self, budgets: tuple[int, ...], prompt_tokens: int) -> int:
        return self._request(m.PlanGet, budgets=budgets, prompt_tokens=prompt_tokens)

    def count_tokens(self, messages: tuple[m.ChatMessage, ...], prompt: str, tools: tuple[m.Tool, ...]) -> int:
        return self._request(m.CountTokens, messages=messages, prompt=prompt, tools=tools)

    def embed(self, texts: tuple[str, ...]) -> int:
        return self._request(m.Embed, texts=texts)

    def frame_block(self) -> int:
        return self._request(m.FrameBlockGet)

    def pacing(self, scheduling_mode: str, target_tokens_per_second: float) -> int:
        return self._request(
            m.Pacing, scheduling_mode=scheduling_mode, target_tokens_per_second=target_tokens_per_second
        )

    def kv_save(self, conversation: str, path: str) -> int:
        return self._request(m.KvSave, conversation=conversation, path=path)

    def kv_load(self, conversation: str, path: str) -> int:
        return self._request(m.KvLoad, conversation=conversation, path=path)

    def model_info(self) -> int:
        return self._request(m.ModelInfoGet)

    def stats(self) -> int:
        return self._request(m.StatsGet)

    def bye(self) -> int:
        return self._request(m.Bye)

    def shutdown(self) -> int:
        return self._request(m.Shutdown)

    def waits(self, request_id: int) -> bool:
        """Returns true while a request is not sent because of :data:`MAX_IN_TRANSIT`."""
        return request_id in self._waiting

    def taken(self, event: m.JobEvent) -> None:
        """Called when the program has taken `event`. Gives the sidecar credit for further events."""
        inbox = self._inboxes.get(event.job)
        if inbox is None:
            return
        if isinstance(event, m.TERMINAL):
            self._grant(event.job, inbox, event.seq + 1)
            del self._inboxes[event.job]
        elif event.seq + 1 - inbox.granted >= max(1, inbox.window // 2):
            self._grant(event.job, inbox, event.seq + 1)

    def gone(self, error: FrameshardError) -> None:
        """Called when the program knows that the sidecar has ended, for example from its exit status."""
        if self.error is None:
            self._lose("gone", error)

    def close(self) -> None:
        """Ends the session. Later requests raise :class:`ConnectionLost`, or what has ended the session before."""
        if self.error is None:
            self._lose("close", ConnectionLost("the client is closed"))
        else:
            self._move("close")

    # ---- transport --------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | None:
        """Returns the next frame to send, None if there is none. Returns the same frame until :meth:`sent` is
        called."""
        return self._outgoing[0] if self._outgoing else None

    def sent(self) -> None:
        self._outgoing.popleft()

    def beat(self) -> None:
        """Sends a ping, and ends the session if the sidecar does not answer. Call it every :data:`BEAT_S` seconds."""
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
            pass  # the transport does not accept messages now
        elif self.state is states.Session.OPEN:
            assert self._epoch is not None
            self._ids += 1
            self._send(m.Ping(self._ids, self._epoch))
        else:
            self._hello()

    def receive(self, frame: bytes) -> list[m.Reply | m.JobEvent | m.Unasked]:
        """Handles a frame from the sidecar. Returns the messages for the program."""
        if self.state in (states.Session.LOST, states.Session.CLOSED):
            return []
        try:
            message = m.decode_answer(frame)
        except BadMessage as error:
            self._lose("silence", ConnectionLost(f"the sidecar does not speak this protocol: {error.message}"))
            return []
        self._silent_beats = 0
        if message is None:
            return []  # a message that only a newer sidecar has
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
            if isinstance(message, m.Engine):
                self.engine = message.state
            return [message]
        request = self._unanswered.get(message.id)
        if request is None:
            return []  # a second answer: the request was sent again after the session was resumed
        if isinstance(request, m.BudgetSet):
            # After the session was resumed, all three answers come again. Those that were received are dropped.
            heard = self._heard.get(message.id, 0)
            if type(message) is not _BUDGET_ANSWERS[heard]:
                return []
            self._heard[message.id] = heard + 1
            if not isinstance(message, m.Observed):
                return [message]
            del self._heard[message.id]
        self._answered(message.id)
        if isinstance(request, m.Submit) and request.job in self._inboxes:
            self._inboxes[request.job].accepted = True
        return [message]

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _move(self, event: str) -> None:
        self.state = states.SESSION[self.state].get(event, self.state)

    def _send(self, message: m.Request) -> None:
        self._outgoing.append(m.encode(message))

    def _request(self, message: type[Any], **fields: Any) -> int:
        if self.error is not None:
            raise again(self.error)
        if self._epoch is None:
            raise ConnectionLost("not connected yet")
        try:
            request: m.Request = message(id=self._ids + 1, epoch=self._epoch, **fields)
        except checks.Refused as refused:
            raise BadArgument(str(refused), field=refused.field) from None
        self._send_in_turn(request)
        self._ids += 1
        self._unanswered[self._ids] = request
        return self._ids

    def _send_in_turn(self, request: m.Request) -> None:
        """Sends a request about a job when few of them are in transit, and any other request at once."""
        if not isinstance(request, _ABOUT_JOBS):
            self._send(request)
        elif self._in_transit < MAX_IN_TRANSIT:
            self._send(request)
            self._in_transit += 1
        else:
            self._waiting[request.id] = m.encode(request)

    def _answered(self, request_id: int) -> m.Request:
        request = self._unanswered.pop(request_id)
        if isinstance(request, _ABOUT_JOBS):
            if self._waiting:
                self._outgoing.append(self._waiting.pop(next(iter(self._waiting))))
            else:
                self._in_transit -= 1
        return request

    def _hello(self) -> None:
        session = None if self.welcome is None else self.welcome.session
        self._ids += 1
        self._hello_id = self._ids
        self._send(m.Hello(self._ids, m.VERSION, self._client, self._epoch, session, self._notices, m.FEATURES))

    def _lose(self, event: str, error: FrameshardError) -> None:
        self._move(event)
        self.error = error
        self._outgoing.clear()
        self._waiting.clear()
        self._unanswered.clear()
        self._heard.clear()
        self._inboxes.clear()

    def _welcomed(self, welcome: m.Welcome) -> list[m.Reply | m.JobEvent | m.Unasked]:
        self.engine = welcome.engine
        if welcome.protocol < m.VERSION:
            why = f"the sidecar speaks protocol {welcome.protocol}, this client needs {m.VERSION}"
            self._lose("refused", VersionMismatch(why))
        elif self.state is states.Session.RESUMING and not welcome.resumed:
            self._lose("welcome", ConnectionLost("the sidecar has forgotten this session"))
        elif self.state is states.Session.RESUMING:
            self._move("resumed")
            self._waiting.clear()
            self._in_transit = 0
            for request in self._unanswered.values():
                self._send_in_turn(request)
            for job, inbox in self._inboxes.items():
                self._grant(job, inbox, inbox.granted)  # again, because the last credit may be lost
        elif self.state is states.Session.GREETING:
            self._move("welcome")
            self._epoch = welcome.epoch
            self.welcome = welcome
            return [welcome]
        return []

    def _refused(self, refusal: m.Error) -> list[m.Reply | m.JobEvent | m.Unasked]:
        error = refusal.error.exception()
        if self.state in (states.Session.GREETING, states.Session.RESUMING):
            # The sidecar also refuses requests that were in transit before this hello. Only the answer to hello counts.
            if refusal.id == self._hello_id:
                self._lose("refused", error)
        elif isinstance(error, ConnectionLost) and refusal.epoch == self._epoch and self.welcome is not None:
            self._move("stranger")
            self._outgoing.clear()
            self._hello()
        elif refusal.epoch != self._epoch:
            self._lose("silence", error)
        elif refusal.id is not None and refusal.id in self._unanswered:
            request = self._answered(refusal.id)
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
                inbox.asked_again = False  # the events that were sent again are lost, too
                self._ask_again(job, inbox)
            elif inbox.accepted and not inbox.ended and job not in sent:
                del self._inboxes[job]
                gone = m.ErrorInfo.of(ConnectionLost("the sidecar has forgotten this job"))
                lost.append(m.Failed(job, inbox.expected, pong.epoch, inbox.timeline, gone))
        for job in sent.keys() - self._inboxes.keys():
            # The client has taken the job's last event, but the credit for it was lost.
            self._send(m.Credit(pong.epoch, job, sent[job]))
        return lost

    def _ask_again(self, job: int, inbox: _Inbox) -> None:
        # There is one request for each gap. Events in transit after the gap must not cause further requests.
        if not inbox.asked_again:
            inbox.asked_again = True
            self._grant(job, inbox, inbox.granted, resend=True)

    def _grant(self, job: int, inbox: _Inbox, next_seq: int, *, resend: bool = False) -> None:
        assert self._epoch is not None
        inbox.granted = next_seq
        self._send(m.Credit(self._epoch, job, next_seq, resend))
