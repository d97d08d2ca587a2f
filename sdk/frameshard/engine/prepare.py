"""Turns requests into jobs in threads of their own: to tokenise a long prompt may take seconds, and decoding goes on.

Guarantees: jobs of one conversation are delivered in the order of their requests. Nothing is delivered for a job after
its :meth:`Preparation.cancel`. If a request raises an exception, only its own job fails.

There are two threads. One handles only short texts, so they never wait for a long prompt, an image or a new form.
"""

from __future__ import annotations

import collections
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from frameshard.engine.batch import MAX_QUEUED
from frameshard.engine.job import Job
from frameshard.errors import BadArgument, FrameshardError, Overloaded, internal
from frameshard.wire.engine import Submit

logger = logging.getLogger("frameshard.engine")

SHORT_CHARS = 1 << 14
"""The most characters of a short request. A request with more text, or with an image, goes to the other thread."""

KNOWN_FORMS = 64
"""So many forms are remembered. A request with another one goes to the other thread, because to compile a form may take
seconds: the first one reads the vocabulary."""


@dataclass(eq=False)
class _Entry:
    """A request that is not delivered yet. ``outcome`` is set when it is prepared."""

    request: Submit
    line: object
    """The conversation of the request; an object of its own if it has none."""
    priority: int
    outcome: Job | FrameshardError | None = None


class Preparation:
    """
    :param read: turns a request into a job; called in the threads of this object.
    :param deliver: receives the job's number, and the job or the error; called in any thread; must not wait.
    """

    def __init__(self, read: Callable[[Submit], Job], deliver: Callable[[int, Job | FrameshardError], None]) -> None:
        self._read = read
        self._deliver = deliver
        self._lock = threading.Lock()
        self._open: dict[int, _Entry] = {}  # by job number
        self._lines: dict[object, collections.deque[_Entry]] = {}  # by conversation
        self._begun_at: dict[int, float] = {}  # of the request that a thread is at now, by thread
        self._known_forms: collections.deque[int] = collections.deque(maxlen=KNOWN_FORMS)
        self._short: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), daemon=True, name="prepare")
            for lane in (self._short, self._long)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Submit) -> None:
        """Takes a request. ``deliver`` gets its job or its error."""
        number = request.job
        line = object() if request.conversation is None else request.conversation
        entry = _Entry(request, line, request.priority)
        with self._lock:
            if number in self._open:
                self._deliver(number, BadArgument(f"job {number} exists", field="job"))
                return
            if len(self._open) >= MAX_QUEUED:
                self._deliver(number, Overloaded(f"{MAX_QUEUED} jobs wait already"))
                return
            self._open[number] = entry
            self._lines.setdefault(entry.line, collections.deque()).append(entry)
            form = _form_key(request)
            quick = _is_short(request) and (form is None or form in self._known_forms)
        (self._short if quick else self._long).put(entry)

    def cancel(self, number: int) -> bool:
        """Drops the request of job ``number``: nothing is delivered for it any more.

        :returns: false if there is no such request.
        """
        with self._lock:
            entry = self._open.pop(number, None)
            if entry is None:
                return False
            self._lines[entry.line].remove(entry)
            self._deliver_ready(entry.line)
            return True

    def set_priority(self, number: int, priority: int) -> bool:
        """Changes the priority that job ``number`` will have.

        :returns: false if there is no such request.
        """
        with self._lock:
            entry = self._open.get(number)
            if entry is not None:
                entry.priority = priority
            return entry is not None

    @property
    def busy_s(self) -> float:
        """For so many seconds a thread has been at one request; the longest time of all threads."""
        with self._lock:
            return time.monotonic() - min(self._begun_at.values(), default=math.inf)

    def close(self, timeout_s: float) -> bool:
        """Ends the threads.

        :param timeout_s: seconds to wait for them.
        :returns: false if a thread still runs after that.
        """
        with self._lock:
            self._open.clear()
            self._lines.clear()
        self._short.put(None)
        self._long.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, lane: queue.SimpleQueue[_Entry | None]) -> None:
        while (entry := lane.get()) is not None:
            with self._lock:
                if entry not in self._lines.get(entry.line, ()):
                    continue
                self._begun_at[threading.get_ident()] = time.monotonic()
            outcome = self._outcome(entry.request)
            form = _form_key(entry.request)
            with self._lock:
                del self._begun_at[threading.get_ident()]
                if form is not None and form not in self._known_forms:
                    self._known_forms.append(form)
                entry.outcome = outcome
                self._deliver_ready(entry.line)

    def _outcome(self, request: Submit) -> Job | FrameshardError:
        try:
            return self._read(request)
        except Exception as error:
            return internal(logger, f"job {request.job}", error)

    def _deliver_ready(self, line: object) -> None:
        waiting = self._lines.get(line, collections.deque())
        while waiting and (outcome := waiting[0].outcome) is not None:
            entry = waiting.popleft()
            del self._open[entry.request.job]
            if isinstance(outcome, Job):
                outcome.priority = entry.priority
            self._deliver(entry.request.job, outcome)
        if not waiting:
            self._lines.pop(line, None)


def _form_key(request: Submit) -> int | None:
    """A number for the form that a request asks for; ``None`` if it asks for none."""
    sampling = request.sampling
    forms = sampling.json_schema, sampling.regex, sampling.lark, sampling.choices, request.tools
    asks = any(forms) or request.tool_choice != "auto"
    return hash((forms, request.tool_choice)) if asks else None


def _is_short(request: Submit) -> bool:
    sampling = request.sampling
    forms = sampling.json_schema, sampling.regex, sampling.lark, *sampling.choices
    texts = request.prompt, request.given, *(message.content for message in request.messages)
    calls = (call.arguments for message in request.messages for call in message.tool_calls)
    tools = (text for tool in request.tools for text in (tool.description, tool.schema))
    return not request.images and sum(map(len, (*texts, *forms, *calls, *tools))) <= SHORT_CHARS
