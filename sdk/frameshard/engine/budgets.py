"""Changes the budgets for VRAM and host memory, and parks the engine.

A new budget comes in a command or in the frame block. The *budget* thread makes the change, so that it takes effect in
the middle of a decode: the shard device evicts weights between two steps. Parking also frees the VRAM of llama.cpp's
context, so the main thread does that between two decodes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable

from frameshard.engine.hostmemory import HostMemory
from frameshard.engine.link import BrokerGone, Link
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor, DeadlineMissed, FrameshardError, below_floor, internal
from frameshard.frame import Unlimited
from frameshard.native import ShardDevice
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

FRAME_BLOCK_S = 0.004
"""Seconds between two reads of the frame block while no decode runs. A decode reads it itself."""

OBSERVE_EVERY_S = 2.0
PARTIAL_S = 60.0
"""The longest wait for a release, in seconds, if the grant has told the host that it will be late."""

RETRY_EVERY_S = 1.0
"""Seconds between two attempts to park, or to take VRAM again, if the first one was late and has failed."""

_PARK_FAILS = "the engine cannot be parked yet, and keeps the floor of its VRAM"
_UNPARK_FAILS = "VRAM cannot be taken again yet, so all jobs wait"

OBSERVED_POLL_S = 0.02  # polled, because NVML has no event for a change


class Budgets:
    """Changes the budget of one runtime.

    :param link: to the broker.
    :param on_main: runs a function in the main thread, between two decodes.
    :param replan: asks the main thread for a new plan.
    """

    def __init__(
        self,
        link: Link,
        on_main: Callable[[Callable[[], None]], None],
        replan: Callable[[], None],
    ) -> None:
        self.parked = False
        """True while the context and all weights are out of VRAM. Nothing is decoded then."""
        self.has_frame_block = False
        """True if the device reads a frame block. :meth:`follow_frame_block` sets it."""
        self._link = link
        self._on_main = on_main
        self._replan = replan
        self._asked: collections.deque[em.SetBudget] = collections.deque()
        self._awake = threading.Event()
        """Set when the budget thread has something new to look at."""
        self._unlimited: Unlimited | None = None
        """Answers the budgets in the frame block, if there is no device that reads it."""
        self._known_generation = 0
        """The last budget in the frame block that was reported to the broker."""
        self._wish: em.SetBudget | None = None
        """A change between active and parked that was not done in time. If it fails in the end, it is made again."""
        self._why_late = ""
        """Why the last attempt has failed, as it was logged."""
        self._park_done = threading.Event()
        """Set once the main thread has made the last change of :attr:`parked`."""
        self._park_done.set()
        self._releases: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)  # (bytes, seconds)

    def ask(self, command: em.SetBudget) -> None:
        """[any thread] Queues a change."""
        self._asked.append(command)
        self._awake.set()

    def follow_frame_block(self) -> None:
        """[any thread] Says that the device now reads a frame block. The budget thread reads it from now on, too."""
        self.has_frame_block = True
        self._awake.set()  # else its current wait goes on for up to OBSERVE_EVERY_S

    def answer_frame_block(self, path: str) -> None:
        """[any thread] Says that there is a frame block, and no device that reads it: the engine holds no VRAM.

        :raises BadArgument: it cannot be opened.
        """
        self._unlimited = Unlimited(path)
        self._awake.set()

    def serve(self, runtime: Runtime, host: HostMemory) -> None:
        """[budget thread] Makes the changes one after the other, and follows the frame block. Never returns.

        :param host: the host memory of the processes.
        """
        self._host = host
        standing_bytes, since = -1, time.monotonic()
        observe_at = time.monotonic() + OBSERVE_EVERY_S
        while True:
            retry_at = self._retry_at()
            self._rest(runtime, min(observe_at, retry_at))
            if self._asked:
                with contextlib.suppress(BrokerGone):  # the reader thread notices this, too, and ends the process
                    self._carry_out(runtime, self._asked.popleft())
                continue
            if time.monotonic() >= retry_at:
                self._retry(runtime)
            if time.monotonic() < observe_at:
                continue
            observe_at = time.monotonic() + OBSERVE_EVERY_S
            if runtime.observer is None:
                continue
            used = _used_bytes(runtime)
            if used != standing_bytes:
                standing_bytes, since = used, time.monotonic()
            elif time.monotonic() - since >= 2 * OBSERVE_EVERY_S and not self.parked:
                self._measure_overhead(runtime)

    def _rest(self, runtime: Runtime, until: float) -> None:
        """Waits until a change is queued, or the time ``until``. Follows the frame block meanwhile."""
        while not self._asked and time.monotonic() < until:
            left_s = _seconds_to(until)
            follows = self.has_frame_block or self._unlimited is not None
            self._awake.wait(min(FRAME_BLOCK_S, left_s) if follows else left_s)
            self._awake.clear()
            if self._unlimited is not None:
                self._unlimited.answer()
            if self.has_frame_block:
                self._read_frame_block(runtime)

    def _read_frame_block(self, runtime: Runtime) -> None:
        """Reads the budget in the frame block. Reports it to the broker if it is new, also if the device has already
        taken it during a graph, or if it is as large as the one before: that may have been a limit of the sidecar."""
        assert runtime.device is not None
        generation = runtime.device.poll_frame_block()
        if generation <= self._known_generation:
            return
        self._known_generation = generation
        self._replan()
        with contextlib.suppress(BrokerGone):
            self._send_released(runtime, 0, 0.0, generation)

    def _retry_at(self) -> float:
        """When :attr:`_wish` is to be made again, because the last attempt was late and has failed."""
        fails = self._wish is not None and self.parked != self._wish.parked and self._park_done.is_set()
        return time.monotonic() + RETRY_EVERY_S if fails else math.inf

    def _retry(self, runtime: Runtime) -> None:
        assert self._wish is not None
        try:
            self._set_parked(runtime, self._wish, time.monotonic() + RETRY_EVERY_S)
            self._host.follow_vram()
        except FrameshardError as error:
            if str(error) != self._why_late:
                self._why_late = str(error)
                logger.warning("%s: %s", _PARK_FAILS if self._wish.parked else _UNPARK_FAILS, error)

    def _send_released(self, runtime: Runtime, seq: int, seconds: float, generation: int = 0) -> None:
        self._link.send_made(
            lambda: em.BudgetReleased(
                seq,
                runtime.vram_budget_bytes,
                _used_bytes(runtime),
                seconds,
                self._host.budget_bytes,
                self._host.parts().used_bytes,
                generation,
            )
        )

    def _measure_overhead(self, runtime: Runtime) -> None:
        assert runtime.placement is not None
        try:
            runtime.placement.overhead.measure()
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    def _carry_out(self, runtime: Runtime, command: em.SetBudget) -> None:
        """Makes a change and sends all answers to its command."""
        started = time.monotonic()
        try:
            self._host.check(command.host_budget_bytes)
            with _lowered_floor(runtime, command.vram_budget_bytes):
                host_changed = self._change_both(runtime, command, started + self._grant(runtime, command))
        except BrokerGone:
            raise
        except Exception as error:
            why = internal(logger, "a change of the budget", error)
            if isinstance(why, DeadlineMissed) and self._wish is not None and self._wish.seq != command.seq:
                self._wish = None  # this change is in force instead
            self._link.send(em.BudgetRefused(command.seq, m.ErrorInfo.of(why)))
            return
        self._wish = None
        used = _used_bytes(runtime)
        self._send_released(runtime, command.seq, time.monotonic() - started)
        measures = host_changed and not self._asked  # the next change must not wait
        host_observed = self._host.measure() if measures else self._host.observed_bytes
        within_bytes = used if command.parked else command.vram_budget_bytes
        observed = self._await_observed(runtime, within_bytes, started + command.timeout_s)
        self._link.send(em.BudgetObserved(command.seq, observed, time.monotonic() - started, host_observed))

    def _change_both(self, runtime: Runtime, command: em.SetBudget, deadline: float) -> bool:
        """Changes the budgets of VRAM and of host memory, the second also if the first is late. VRAM comes first, for
        which the game waits, unless host memory gets more room: what leaves VRAM may need it.

        :param deadline: how long to wait for both.
        :returns: whether the host budget is another one than before.
        :raises DeadlineMissed: one of them is not complete. Both are in force all the same.
        :raises BudgetBelowFloor: KV blocks that would leave VRAM have no room in host memory. Nothing has changed.
        :raises FrameshardError: the change of VRAM has failed. The host budget is the one of before.
        """
        wanted, before = command.host_budget_bytes, self._host.budget_bytes
        self._host.check_move(wanted, command.vram_budget_bytes, parked=command.parked and not self.parked)

        def change_vram() -> None:
            if command.parked or self.parked or not self._park_done.is_set():
                self._set_parked(runtime, command, deadline)
            elif runtime.device is not None:
                self._change(runtime, runtime.device, command, deadline)
            self._host.follow_vram()

        def change_host() -> None:
            self._host.set_budget(wanted, _seconds_to(deadline))

        rises = wanted == 0 or 0 < before < wanted
        late: DeadlineMissed | None = None
        for change in (change_host, change_vram) if rises else (change_vram, change_host):
            try:
                change()
            except DeadlineMissed as error:
                late = late or error
            except Exception:
                with contextlib.suppress(DeadlineMissed):  # the whole change is refused: what was in force stays
                    self._host.set_budget(before, 0.0)
                raise
        if late is not None:
            raise late
        return wanted != before

    def _grant(self, runtime: Runtime, command: em.SetBudget) -> float:
        """Sends the grant: the budget that can be reached by the deadline, predicted from earlier releases. Without
        earlier releases this is the whole change.

        :returns: how long to wait for the release, in seconds.
        :raises BudgetBelowFloor: the budget is below the floor. Nothing has changed.
        """
        wanted, timeout_s = command.vram_budget_bytes, command.timeout_s
        reached, seconds = wanted, 0.0
        if runtime.device is not None:
            stats = runtime.device.stats()
            if 0 < wanted < stats.floor_bytes:
                raise below_floor(wanted, stats.floor_bytes)
            excess = stats.used_bytes - wanted if wanted and not command.parked else 0
            # Every release has a constant delay, so a small release does not predict a much larger one.
            predicted = [took * max(1.0, excess / n) for n, took in self._releases if 8 * n >= excess]
            if excess > 0 and predicted:
                seconds = min(predicted)
                if seconds > timeout_s:
                    reached = stats.used_bytes - int(excess * timeout_s / seconds)
        self._link.send(em.BudgetGranted(command.seq, reached, seconds))
        return timeout_s if reached == wanted else max(timeout_s, PARTIAL_S)

    def _change(self, runtime: Runtime, device: ShardDevice, command: em.SetBudget, deadline: float) -> None:
        """Sets the budget and waits for the release. After half of ``timeout_s``, warns the broker if it will be late.

        :raises DeadlineMissed: the release is not complete. The budget is in force all the same.
        """
        wanted, timeout_s = command.vram_budget_bytes, command.timeout_s
        before, started = device.stats().used_bytes, time.monotonic()
        patience_s = _seconds_to(deadline)

        def warn() -> None:
            used, passed = device.stats().used_bytes, time.monotonic() - started
            if used > wanted:
                rate = (before - used) / passed
                reached = max(wanted, used - int(rate * (timeout_s - passed)))
                seconds = passed + (used - wanted) / rate if rate else 0.0
                with contextlib.suppress(BrokerGone):
                    self._link.send(em.BudgetLate(command.seq, reached, seconds))

        warning = threading.Timer(timeout_s / 2, warn)
        if 0 < wanted < before and patience_s <= timeout_s:  # if it is longer, the grant said that it will be late
            with contextlib.suppress(RuntimeError):  # the system gives no thread now
                warning.start()
        try:
            with runtime.floor_lock:
                device.set_budget(wanted, patience_s, command.known_generation)
        finally:
            warning.cancel()
            self._replan()
        released = before - device.stats().used_bytes
        if released > 0:
            self._releases.append((released, time.monotonic() - started))

    def _set_parked(self, runtime: Runtime, command: em.SetBudget, deadline: float) -> None:
        """Parks or unparks in the main thread, which also sets the budget, so that late changes keep their order.

        :raises DeadlineMissed: a running decode has not ended in time, or VRAM could not be taken in time. The change
            is made later, and tried until it works or another change is asked for. An engine that cannot be parked
            keeps only the floor of its VRAM meanwhile.
        :raises OutOfMemory: host memory has no room for the KV cache, or the device none to unpark. The engine stays
            parked or active as it was. An active one has the VRAM budget of before.
        """
        park, device = command.parked, runtime.device
        before_bytes = runtime.vram_budget_bytes
        done = self._park_done = threading.Event()
        failure: list[FrameshardError] = []

        def change() -> None:
            try:
                if park and not self.parked and device is not None:
                    device.park()
                self.parked = self.parked or park
                if device is not None:
                    with runtime.floor_lock:  # while parked, this limits the memory that unparking takes again
                        device.set_budget(command.vram_budget_bytes, known_generation=command.known_generation)
                if self.parked and not park:
                    runtime.unpark()
                    self.parked = False
                self._replan()
            except FrameshardError as error:
                failure.append(error)
                if time.monotonic() >= deadline:  # the command had its last answer
                    logger.warning("a late change of the lease has failed: %s", error)
            done.set()

        if park and not self.parked and device is not None:
            # Weights are evicted at once. The VRAM of the context can be freed only after the running decode.
            with contextlib.suppress(DeadlineMissed), runtime.floor_lock:
                device.set_budget(device.stats().floor_bytes, _seconds_to(deadline))
        self._on_main(change)
        if not done.wait(_seconds_to(deadline)):
            known = self._known_generation if command.known_generation is None else command.known_generation
            self._wish = dataclasses.replace(command, known_generation=known)
            why = "a decode is still running" if park else "VRAM is not taken again yet"
            raise DeadlineMissed(f"{why}; it stays in force")
        if failure:
            if park and not self.parked and device is not None:
                with runtime.floor_lock:
                    device.set_budget(before_bytes)
                self._replan()
            raise failure[0]

    def _await_observed(self, runtime: Runtime, within_bytes: int, deadline: float) -> int | None:
        """Polls the VRAM that the driver counts, until it is within the budget, ``deadline`` has passed, or the next
        change is queued: that one must not wait for a driver that counts late. The frame block is followed meanwhile.

        :returns: the last count in bytes; None if the driver gives none.
        """
        if runtime.observer is None:
            return None
        observed = runtime.observer.used()
        while observed is not None and within_bytes and observed > within_bytes and time.monotonic() < deadline:
            if self._asked:
                break
            self._rest(runtime, time.monotonic() + OBSERVED_POLL_S)
            observed = runtime.observer.used()
        return observed


def _lowered_floor(runtime: Runtime, budget_bytes: int) -> contextlib.AbstractContextManager[None]:
    placement = runtime.placement
    return contextlib.nullcontext() if placement is None else placement.overhead.lowered_floor(budget_bytes)


def _seconds_to(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _used_bytes(runtime: Runtime) -> int:
    """The bytes that the ledger counts; 0 without a shard device, because the process then holds no VRAM."""
    return runtime.device.stats().used_bytes if runtime.device is not None else 0
