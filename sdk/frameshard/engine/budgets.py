"""VRAM budgets and parking: what the host asks for, what is granted, what is in force, and what the driver observes.

A budget comes as a command or in the frame block. All of it runs in the *budget* thread, so that a change takes effect
in the middle of a decode: the shard device evicts between two steps. Parking frees the context as well, so it is done
by the main thread between two decodes.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from frameshard.engine.link import BrokerGone
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor, DeadlineMissed, FrameshardError, below_floor, internal
from frameshard.native import ShardDevice
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

FRAME_BLOCK_S = 0.004
"""Between two looks at the frame block while no decode runs that looks at it."""

OBSERVE_EVERY_S = 2.0
PARTIAL_S = 60.0
"""For a release that the host knows to be late."""

OBSERVED_POLL_S = 0.02  # NVML has no event for a change


class Budgets:
    """Changes of one runtime's budget.

    :param send: sends an event to the broker.
    :param on_main: runs a function in the main thread, between two decodes.
    :param replan: asks the main thread for a new plan.
    """

    def __init__(
        self,
        send: Callable[[em.Event], None],
        on_main: Callable[[Callable[[], None]], None],
        replan: Callable[[], None],
    ) -> None:
        self.parked = False
        """The context and all weights are out of VRAM; nothing is decoded."""
        self.has_frame_block = False
        """The device reads a frame block."""
        self._send = send
        self._on_main = on_main
        self._replan = replan
        self._asked: queue.SimpleQueue[em.SetBudget] = queue.SimpleQueue()
        self._known_bytes = 0
        """The budget that the broker knows."""
        self._releases: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)  # bytes and seconds

    def ask(self, command: em.SetBudget) -> None:
        """[any thread] Queues a change."""
        self._asked.put(command)

    def serve(self, runtime: Runtime) -> None:
        """[budget thread] Carries out changes one after the other; never returns."""
        self._known_bytes = runtime.vram_budget_bytes
        standing_bytes, since = -1, time.monotonic()
        observed_at = 0.0
        while True:
            try:
                command = self._asked.get(timeout=FRAME_BLOCK_S if self.has_frame_block else OBSERVE_EVERY_S)
            except queue.Empty:
                if self.has_frame_block:
                    self._follow_frame_block(runtime)
                if runtime.observer is None or time.monotonic() - observed_at < OBSERVE_EVERY_S:
                    continue
                observed_at = time.monotonic()
                used = _used_bytes(runtime)
                if used != standing_bytes:
                    standing_bytes, since = used, time.monotonic()
                elif time.monotonic() - since >= 2 * OBSERVE_EVERY_S and not self.parked:
                    self._measure_overhead(runtime)
                continue
            with contextlib.suppress(BrokerGone):  # the reader thread sees that too, and ends the process
                self._carry_out(runtime, command)

    def _follow_frame_block(self, runtime: Runtime) -> None:
        """Takes a budget from the frame block, and reports a budget that the device took from there during a graph."""
        assert runtime.device is not None
        runtime.device.poll_frame_block()
        if runtime.vram_budget_bytes == self._known_bytes:
            return
        self._known_bytes = runtime.vram_budget_bytes
        self._replan()
        with contextlib.suppress(BrokerGone):
            self._send(em.BudgetReleased(0, self._known_bytes, _used_bytes(runtime), 0.0))

    def _measure_overhead(self, runtime: Runtime) -> None:
        assert runtime.placement is not None
        try:
            runtime.placement.overhead.measure()
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    def _carry_out(self, runtime: Runtime, command: em.SetBudget) -> None:
        """Sends all answers to a command."""
        started = time.monotonic()
        try:
            patience_s = self._grant(runtime, command)
            if command.parked or self.parked:
                self._set_parked(runtime, command)
            elif runtime.device is not None:
                self._change(runtime.device, command, patience_s)
        except BrokerGone:
            raise
        except Exception as error:
            why = internal(logger, "a change of the VRAM budget", error)
            self._send(em.BudgetRefused(command.seq, m.ErrorInfo.of(why)))
            return
        self._known_bytes = runtime.vram_budget_bytes
        used = _used_bytes(runtime)
        self._send(em.BudgetReleased(command.seq, runtime.vram_budget_bytes, used, time.monotonic() - started))
        within_bytes = used if command.parked else command.vram_budget_bytes
        observed = self._await_observed(runtime, within_bytes, started + command.timeout_s)
        self._send(em.BudgetObserved(command.seq, observed, time.monotonic() - started))

    def _grant(self, runtime: Runtime, command: em.SetBudget) -> float:
        """Sends what can be reached by the deadline: predicted from earlier releases, or all of it before the first.

        :returns: how long to wait for the release, in seconds.
        :raises BudgetBelowFloor: nothing changes.
        """
        wanted, timeout_s = command.vram_budget_bytes, command.timeout_s
        reached, seconds = wanted, 0.0
        if runtime.device is not None:
            stats = runtime.device.stats()
            if 0 < wanted < stats.floor_bytes:
                raise below_floor(wanted, stats.floor_bytes)
            excess = stats.used_bytes - wanted if wanted and not command.parked else 0
            # A release takes a while to begin, whatever its size: small releases do not predict large ones.
            predicted = [took * max(1.0, excess / n) for n, took in self._releases if 8 * n >= excess]
            if excess > 0 and predicted:
                seconds = min(predicted)
                if seconds > timeout_s:
                    reached = stats.used_bytes - int(excess * timeout_s / seconds)
        self._send(em.BudgetGranted(command.seq, reached, seconds))
        return timeout_s if reached == wanted else max(timeout_s, PARTIAL_S)

    def _change(self, device: ShardDevice, command: em.SetBudget, patience_s: float) -> None:
        """Waits for the release ``patience_s`` at most. Half-way to the deadline, warns if it will be missed.

        :raises DeadlineMissed: the release is not complete; the budget is in force.
        """
        wanted, timeout_s = command.vram_budget_bytes, command.timeout_s
        before, started = device.stats().used_bytes, time.monotonic()

        def warn() -> None:
            used, passed = device.stats().used_bytes, time.monotonic() - started
            if used > wanted:
                rate = (before - used) / passed
                reached = max(wanted, used - int(rate * (timeout_s - passed)))
                seconds = passed + (used - wanted) / rate if rate else 0.0
                with contextlib.suppress(BrokerGone):
                    self._send(em.BudgetLate(command.seq, reached, seconds))

        warning = threading.Timer(timeout_s / 2, warn)
        if 0 < wanted < before and patience_s <= timeout_s:  # else the grant has announced it
            warning.start()
        try:
            device.set_budget(wanted, patience_s)
        finally:
            warning.cancel()
            self._replan()
        released = before - device.stats().used_bytes
        if released > 0:
            self._releases.append((released, time.monotonic() - started))

    def _set_parked(self, runtime: Runtime, command: em.SetBudget) -> None:
        """
        :raises DeadlineMissed: the decode that was running has not ended in time; the change is made when it has.
        """
        park, wanted, timeout_s = command.parked, command.vram_budget_bytes, command.timeout_s
        done = threading.Event()
        failure: list[FrameshardError] = []

        def change() -> None:
            try:
                if park != self.parked and runtime.device is not None:
                    (runtime.device.park if park else runtime.device.unpark)()
                self.parked = park
                self._replan()
            except FrameshardError as error:
                failure.append(error)
            done.set()

        if runtime.device is not None:
            # Weights go at once, while the decode runs that has to end before the context can go.
            evicts_first = park and not self.parked
            runtime.device.set_budget(runtime.device.stats().floor_bytes if evicts_first else wanted, timeout_s)
        self._on_main(change)
        if not done.wait(timeout_s):
            raise DeadlineMissed("a decode is still running; it stays in force")
        if failure:
            raise failure[0]
        if park and runtime.device is not None:
            runtime.device.set_budget(wanted, timeout_s)  # is in force when the memory is taken again

    def _await_observed(self, runtime: Runtime, within_bytes: int, deadline: float) -> int | None:
        """The driver's figure as soon as it is within the budget, else the last one before ``deadline`` or before the
        next change, which must not wait for a driver that counts late."""
        if runtime.observer is None:
            return None
        observed = runtime.observer.used()
        while observed is not None and within_bytes and observed > within_bytes and time.monotonic() < deadline:
            if not self._asked.empty():
                break
            time.sleep(OBSERVED_POLL_S)
            observed = runtime.observer.used()
        return observed


def _used_bytes(runtime: Runtime) -> int:
    """By the ledger; 0 without a shard device, where the process holds no VRAM."""
    return runtime.device.stats().used_bytes if runtime.device is not None else 0
