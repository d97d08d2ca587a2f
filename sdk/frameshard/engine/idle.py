"""What the engine does while it has nothing to do: it copies conversations ahead of time, and measures the machine and,
under a host budget, the model's disk.

Copies (:meth:`frameshard.engine.reuse.Reuse.copy_ahead`) are made one at a time, so that a job waits for one copy at
most. They are made while the host draws frames, too: they take no compute of the GPU, and without them the same copy
would be made in the same game when another conversation needs the sequence, while its job waits.

A launch without a kept profile plans from an estimate, so that a player does not wait. The measurements are made here,
in idle moments and one at a time. Each ends at once when a command comes, and is made again later. Each result is kept;
when all are there, a new plan is made from them.

Nothing is measured while the engine is parked, or while the host draws frames by the frame block: the measurements
would delay its frames, and its frames would falsify them. They take VRAM within the budget only, from weights that are
copied back afterwards. The machine is not measured while a host budget has no room for the memory that copies are timed
with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from frameshard.engine import diskprobe
from frameshard.engine.rates import Rates
from frameshard.engine.runtime import Runtime
from frameshard.errors import OutOfMemory, internal
from frameshard.native import ProbeStopped, ShardDevice

logger = logging.getLogger("frameshard.engine")

QUIET_S = 1.0
"""The machine is measured after so many seconds without a command or a decode."""

HOST_BYTES = 2560 << 20
"""Host memory that the measurements need at most: a buffer each of pinned, pageable and imported memory. Each is larger
than any processor's cache. When threads read memory, one of the three is left, and their own takes less than the other
two (native/src/probe.cpp)."""

COPY_QUIET_S = 0.25
"""Conversations are copied after so many seconds without a command or a decode. Jobs of characters that talk in turns
without a pause come sooner."""


class IdleProfile:
    """The measurements that a runtime's profile lacks.

    :param runtime: a loaded model. If it has no shard device, or its profile is measured, there is nothing to do.
    :param replan: asks the main thread for a new plan.
    """

    def __init__(self, runtime: Runtime, replan: Callable[[], None]) -> None:
        placement = runtime.placement
        self._runtime = runtime
        self._left = placement.rates.measurements if placement is not None else None
        self._replan = replan
        self._disturbed_at = time.monotonic()
        self._started_at = 0.0  # of the running measurement; 0: none runs
        self._told = False

    @property
    def measuring_s(self) -> float:
        """[any thread] For how many seconds a measurement has run; 0 if none runs."""
        started_at = self._started_at
        return time.monotonic() - started_at if started_at else 0.0

    def disturb(self) -> None:
        """[any thread] Ends the running measurement, because the device is wanted. The moment is not idle any more."""
        self._disturbed_at = time.monotonic()
        if self._left is not None and self._runtime.device is not None:
            self._runtime.device.stop_probe(True)

    def due_in(self) -> float | None:
        """Seconds until the next measurement may begin if nothing comes between; None if none is left."""
        return None if self._left is None else max(0.0, self._disturbed_at + QUIET_S - time.monotonic())

    def work(self) -> bool:
        """Makes the next measurement, if the moment is still idle. Only the main thread may call it, between decodes.

        :returns: whether weights may have been evicted, so that the caller must fill again.
        """
        device, placement = self._runtime.device, self._runtime.placement
        if self._left is None or device is None or placement is None:
            return False
        # In this order, so that a disturbance in between is seen: disturb() sets the time first.
        device.stop_probe(False)
        if self.due_in():
            return False
        if device.pacing().pacing or self._lacks_host_memory(device):
            self._disturbed_at = time.monotonic()
            return False
        try:
            self._started_at = time.monotonic()
            self._left.step()
        except ProbeStopped:
            return True
        except OutOfMemory:  # a host that gives more room later has a measured profile from the next launch on
            logger.info("the budget has no room to measure this machine: plans stay those from an estimate")
            self._left = None
            return True
        finally:
            self._started_at = 0.0
        if self._left.complete:
            placement.rates.adopt_profile(self._left.profile())
            self._left = None
            logger.info("plans are made from the measured profile now")
            self._replan()
        return True

    def _lacks_host_memory(self, device: ShardDevice) -> bool:
        stats = device.stats()
        lacks = 0 < stats.host_budget_bytes < stats.host_used_bytes + HOST_BYTES
        if lacks and not self._told:
            logger.info("the host limit has no room to measure this machine: plans stay those from an estimate")
            self._told = True
        return lacks


class IdleDisk:
    """The measurement of the model's disk, for plans under a host budget. A thread makes it, so that no job waits for
    it, and hands the result to the main thread, which alone changes the profile. If a job comes meanwhile, its reads
    falsify the result, and it is made again later.

    :param rates: of the model; ``None`` without a shard device.
    :param on_main: runs a function in the main thread, between two decodes.
    :param replan: asks the main thread for a new plan.
    """

    def __init__(
        self,
        rates: Rates | None,
        on_main: Callable[[Callable[[], None]], None],
        replan: Callable[[], None],
    ) -> None:
        self.running = False
        """A measurement has begun whose result the main thread has not taken yet."""
        self._rates = rates
        self._on_main = on_main
        self._replan = replan
        self._disturbed_at = time.monotonic()

    def disturb(self) -> None:
        """[any thread] The moment is not idle any more."""
        self._disturbed_at = time.monotonic()

    def due_in(self) -> float | None:
        """Seconds until the measurement may begin if nothing comes between; None if there is none to make."""
        if self._rates is None or self.running or not self._rates.lacks_disk:
            return None
        return max(0.0, self._disturbed_at + QUIET_S - time.monotonic())

    def work(self) -> None:
        """Starts the measurement, if the moment is still idle."""
        if self._rates is not None and self.due_in() == 0.0:
            given = self._rates, self._disturbed_at
            try:
                threading.Thread(target=self._measure, args=given, name="disk", daemon=True).start()
                self.running = True
            except RuntimeError:  # the system gives no thread now: try again later
                self.disturb()

    def _measure(self, rates: Rates, disturbed_at: float) -> None:
        of_disk: diskprobe.Rates = {}
        try:
            of_disk = rates.measure_disk()
        except Exception as error:  # the idle moments go on
            internal(logger, "the measurement of the disk", error)
        self._on_main(lambda: self._take(rates, of_disk, disturbed_at))

    def _take(self, rates: Rates, of_disk: diskprobe.Rates, disturbed_at: float) -> None:
        self.running = False
        if self._disturbed_at == disturbed_at:
            rates.adopt_disk(of_disk)
            self._replan()


class Idle:
    """The work of idle moments. Only the main thread may call it, except for methods with [any thread].

    :param profile: the measurements that the profile lacks.
    :param disk: the measurement of the disk.
    :param copy_ahead: copies a conversation; returns false if there is nothing to copy.
    """

    def __init__(self, profile: IdleProfile, disk: IdleDisk, copy_ahead: Callable[[], bool]) -> None:
        self._profile = profile
        self._disk = disk
        self._copy_ahead = copy_ahead
        self._disturbed_at = time.monotonic()
        self._may_copy = False
        """A conversation may have changed since the last copy."""

    @property
    def measuring_s(self) -> float:
        """[any thread] For how many seconds a measurement has run; 0 if none runs."""
        return self._profile.measuring_s

    def disturb(self) -> None:
        """[any thread] Ends the running measurement, because the device is wanted. The moment is not idle any more."""
        self._disturbed_at = time.monotonic()
        self._may_copy = True
        self._profile.disturb()
        self._disk.disturb()

    def due_in(self) -> float | None:
        """Seconds until there is work if nothing comes between; None if there is none."""
        # The two measurements would falsify each other.
        profile_due_in = None if self._disk.running else self._profile.due_in()
        due = [self._copy_due_in(), profile_due_in, self._disk.due_in()]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def work(self) -> bool:
        """Copies one conversation or makes one measurement, if the moment is still idle. To be called between decodes.

        :returns: whether weights may have been evicted, so that the caller must fill again.
        """
        if self._copy_due_in() != 0.0:
            self._disk.work()
            return not self._disk.running and self._profile.work()
        self._may_copy = False  # before the copy: a disturbance in between sets it again
        if self._copy_ahead():
            self._may_copy = True
        return False

    def _copy_due_in(self) -> float | None:
        return max(0.0, self._disturbed_at + COPY_QUIET_S - time.monotonic()) if self._may_copy else None
