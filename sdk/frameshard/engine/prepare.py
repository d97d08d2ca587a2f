"""Makes jobs ready beside the decode thread: a request may take seconds before it has tokens.

Guarantees: jobs of one conversation are delivered in the order they came; nothing of a job is delivered after its
:meth:`Preparation.cancel`; whatever a request raises becomes that job's failure alone.

There are two threads. Short texts have one to themselves, so that they never wait for a long prompt or an image.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from frameshard.engine.batch import MAX_QUEUED, Job
from frameshard.errors import BadArgument, FrameshardError, Overloaded, internal
from frameshard.wire.engine import Submit

logger = logging.getLogger("frameshard.engine")

SHORT_CHARS = 1 << 14
"""A request with more text, or with an image, is prepared behind others like it."""


@dataclass(eq=False)
class _Entry:
    """A request on its way. ``outcome`` is there when it is prepared."""

    request: Submit
    line: object
    """Its conversation."""
    outcome: Job | FrameshardError | None = None


class Preparation:
    """
    :param read: makes a job of a request; called in a thread of its own.
    :param deliver: gets the job's number, and the job or the error; called in any thread, must not wait.
    """

    def __init__(self, read: Callable[[Submit], Job], deliver: Callable[[int, Job | FrameshardError], None]) -> None:
        self._read = read
        self._deliver = deliver
        self._lock = threading.Lock()
        self._open: dict[int, _Entry] = {}  # by job number
        self._lines: dict[object, collections.deque[_Entry]] = {}  # by conversation
        self._short: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), daemon=True, name="prepare")
            for lane in (self._short, self._long)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Submit) -> None:
        """Takes a request. Its job or its error is delivered."""
        number = request.job
        entry = _Entry(request, object() if request.conversation is None else request.conversation)
        with self._lock:
            if number in self._open:
                self._deliver(number, BadArgument(f"job {number} exists", field="job"))
                return
            if len(self._open) >= MAX_QUEUED:
                self._deliver(number, Overloaded(f"{MAX_QUEUED} jobs wait already"))
                return
            self._open[number] = entry
            self._lines.setdefault(entry.line, collections.deque()).append(entry)
        (self._short if _is_short(request) else self._long).put(entry)

    def cancel(self, number: int) -> bool:
        """Nothing will be delivered of this job any more. False where none is on its way."""
        with self._lock:
            entry = self._open.pop(number, None)
            if entry is None:
                return False
            self._lines[entry.line].remove(entry)
            self._deliver_ready(entry.line)
            return True

    def close(self, timeout_s: float) -> bool:
        """Ends the threads; false where they still work after ``timeout_s``."""
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
            outcome = self._outcome(entry.request)
            with self._lock:
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
            self._deliver(entry.request.job, outcome)
        if not waiting:
            self._lines.pop(line, None)  # an empty one, or none


def _is_short(request: Submit) -> bool:
    texts = [request.prompt, request.sampling.json_schema, *(message.content for message in request.messages)]
    return not request.images and sum(map(len, texts)) <= SHORT_CHARS
