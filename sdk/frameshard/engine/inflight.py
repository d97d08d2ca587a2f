"""The decode that runs, and what ends it early: all its jobs are cancelled, or a more urgent job has come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from frameshard.engine.job import Job


class InFlight:
    """The jobs of the running decode. Any thread may call :meth:`interrupt` and :meth:`preempt`.

    :param abort: aborts the running decode. It may be called when none runs any more.
    :param resume: allows decodes again.
    """

    def __init__(self, abort: Callable[[], None], resume: Callable[[], None]) -> None:
        self._abort, self._resume = abort, resume
        self._lock = threading.Lock()
        self._jobs: frozenset[int] = frozenset()
        self._interrupted: set[int] = set()
        self._gives_way_to = math.inf  # the least priority of a job for which the decode is aborted
        self.others_wait = False
        """A job has come since the decode began, for which it is not aborted."""

    @property
    def running(self) -> bool:
        """[any thread] A decode is running right now."""
        return bool(self._jobs)

    def begin(self, jobs: Sequence[Job], *, can_repeat: bool) -> bool:
        """Notes that a decode of ``jobs`` begins. :meth:`end` must follow.

        :param can_repeat: the decode may be aborted for a more urgent job, and runs again later. If the last decode of
            one of the jobs was aborted, this one is not, so all jobs get on.
        :returns: false if all of them are interrupted. Then no decode begins.
        """
        with self._lock:
            ids = frozenset(job.id for job in jobs)
            if ids <= self._interrupted:
                return False
            self._jobs, self._gives_way_to, self.others_wait = ids, math.inf, False
            if can_repeat and not any(job.gave_way for job in jobs):
                self._gives_way_to = 1 + max(job.priority for job in jobs)
            return True

    def end(self) -> None:
        """Notes that the decode has ended."""
        with self._lock:
            self._jobs = frozenset()
            self._resume()

    def interrupt(self, job_id: int) -> None:
        """Aborts the running decode if no other job takes part in it, and lets no other begin for this job alone."""
        with self._lock:
            self._interrupted.add(job_id)
            if self._jobs and self._jobs <= self._interrupted:
                self._abort()

    def preempt(self, priority: int) -> None:
        """Aborts the running decode for a job of this priority, if all jobs that take part have lower ones and can
        repeat it."""
        with self._lock:
            if self._jobs and priority >= self._gives_way_to:
                self._abort()
            else:
                self.others_wait = True

    def forget(self, job_id: int) -> None:
        """Forgets the interrupt of a job that has ended."""
        with self._lock:
            self._interrupted.discard(job_id)
