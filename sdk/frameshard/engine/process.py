"""The engine process: ``python -m frameshard.engine.process --fd N``, started by the broker.

``N`` is one end of a Unix stream socket pair. Each frame is a 4-byte little-endian length and one msgpack map, whose
``op`` (from the broker) or ``ev`` (to it) names it.

Threads: the *reader* takes frames and never waits for the GPU; what can act in the middle of a decode (interrupting a
job, statistics) it does itself, the rest goes to the *main* thread in order. Two *prepare* threads make requests ready
to run, and one *plan* thread answers what-if questions. The *budget* thread waits for the device to release memory. The
main thread decodes, and between decodes answers pings: a stuck engine shows by its silence. One
decode can last longer than the broker's patience (a long chunk of a large model on a slow CPU), so while a decode
visibly moves the reader answers in its place.

The process ends when the socket does: it must never outlive the broker.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from frameshard.engine.batch import Batcher, Event, Job
from frameshard.engine.draft import DraftModel
from frameshard.engine.prepare import Preparation
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import DecodeAborted, Runtime
from frameshard.engine.vision import Vision
from frameshard.engine.watch import Watcher
from frameshard.errors import (
    BadArgument,
    BadMessage,
    BadModel,
    BudgetBelowFloor,
    DeadlineMissed,
    EngineDied,
    FrameshardError,
    Overloaded,
    Unsupported,
)
from frameshard.native import SCHEDULING_MODES, Pacing, ShardDevice, on_abort
from frameshard.wire import channel, checks
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

EXIT_FATAL = 3
CLEANUP_S = 0.5
"""How long the main thread gets to free the model when the broker is gone."""

PAGE_S = 0.004
"""Between two looks at the frame block while nothing runs that looks at it."""

FILL_S = 0.005
"""Weights are copied in pieces of about this long when there is new room. Between two pieces a shrink takes effect."""

FILL_STEPS = 4
"""Between two decodes they are copied for as long as so many decodes take: then they need not be streamed any more."""

MAX_PLANS = 8
"""What-if questions that wait at most."""

LEARN_EVERY = 64  # decodes between two looks at what experts are chosen

MIN_CHUNK = 32
"""Prompt tokens that are read in one go at least, also when the host's frames are short of time."""

STUCK_S = 2.0
"""A decode in which nothing moves for so long leaves pings unanswered; one operation may take about a second."""

OBSERVE_EVERY_S = 2.0
PARTIAL_S = 60.0
"""For a release of which the host knows that it will be late."""

WATCH_S = 0.25
WATCH_TELL_S = 1.0
OOM_SCORE_ADJ = 500  # when memory runs out, the sidecar goes before the game

_DEVICE_WORDS = ("CUDA error", "ggml-cuda", "ggml-vulkan", "ggml-metal")
"""Of an abort at load for which not the file but the device is to blame."""

Message = dict[str, Any]


class BrokerGone(Exception):
    """The other end of the channel is closed."""


class Channel:
    """Frames on the broker's socket. :meth:`send` may be called from any thread, :meth:`messages` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """:raises BrokerGone: nobody will read it."""
        frame = channel.pack(message)
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise BrokerGone(str(error)) from None

    def messages(self) -> Iterator[Message]:
        """Each message that comes, until the broker closes.

        :raises BadMessage: what came is no message; the stream cannot be trusted any more.
        """
        reader = channel.Reader()
        while data := self._socket.recv(1 << 16):
            yield from reader.feed(data)


class Engine:
    """Everything between the channel and the :class:`Runtime`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._budgets: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._runtime: Runtime | None = None
        self._batcher: Batcher | None = None
        self._preparation: Preparation | None = None
        self._plans: queue.Queue[Message] = queue.Queue(MAX_PLANS)
        self._vision: Vision | None = None
        self._loading = ""
        """The file that is being loaded."""
        self._loaded = threading.Event()
        self._closed = threading.Event()
        self._replan = threading.Event()
        self._stop = False
        self._filling = False
        self._fill_until = 0.0
        self._progress = -1
        self._moved_at = 0.0
        self._page = False
        self._budget_known = 0
        self._releases: collections.deque[tuple[int, float]] = collections.deque(maxlen=8)  # bytes and seconds
        self._parked = False
        self._target = 0.0  # tokens per second, 0 for no bound
        self._due = 0.0  # when the next decode may start
        self._steps = 0

    # --- main thread ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serves until told to stop; returns the exit code."""
        for work in (self._read, self._serve_budgets, self._serve_plans, self._watch):
            threading.Thread(target=work, daemon=True, name=work.__name__).start()
        try:
            while not self._stop:
                self._turn()
        except BrokerGone:
            return 0
        except Exception as error:
            return self._fatal(_typed(error))
        # What a request is still read with must not be freed; the system takes it all anyway.
        if self._preparation is None or self._preparation.close(CLEANUP_S / 2):
            if self._batcher is not None:
                self._batcher.close()
            if self._runtime is not None:
                self._runtime.close()
        self._closed.set()
        return 0

    def _fatal(self, error: FrameshardError) -> int:
        """Nothing is freed: a device that failed may never return from it."""
        try:
            self._channel.send({"ev": "fatal", "error": error.to_wire()})
        except BrokerGone:
            logger.error("fatal: %s", error)
        return EXIT_FATAL

    def aborted(self, why: str) -> NoReturn:
        """[any thread] ggml is about to abort the process: tells the broker why, and ends at once. An abort would take
        its time to write a core file of all that is mapped."""
        if self._loaded.is_set() or any(word in why for word in _DEVICE_WORDS):
            os._exit(self._fatal(EngineDied(f"ggml aborted: {why}", last_words=why)))
        os._exit(self._fatal(BadModel(f"llama.cpp cannot use {self._loading}: {why}", last_words=why)))

    def _turn(self) -> None:
        """Commands that came, then one decode unless new room is being filled, then a piece of filling."""
        busy = self._batcher is not None and self._batcher.busy and not self._parked
        wait: float | None = max(0.0, self._due - time.monotonic()) if busy else None
        if self._filling and not self._parked:
            wait = 0.0
        with contextlib.suppress(queue.Empty):
            while not self._stop:
                self._commands.get(block=wait != 0.0, timeout=wait)()
                wait = 0.0
        if self._runtime is None or self._batcher is None or self._stop or self._parked:
            return
        if self._replan.is_set():
            self._replan.clear()
            try:
                self._runtime.replan()
            except BudgetBelowFloor as error:  # the device accepted this budget and keeps it with the plan it has
                logger.warning("%s", error)
            self._filling = True
        filling = self._filling and time.monotonic() < self._fill_until
        if self._batcher.busy and not filling and time.monotonic() >= self._due:
            self._step(self._runtime, self._batcher)
        if self._filling or self._runtime.unfilled:
            self._filling = self._runtime.fill(self._fill_bytes) > 0

    def _step(self, runtime: Runtime, batcher: Batcher) -> None:
        if self._page:
            self._follow_frames(runtime, batcher)
        started = time.monotonic()
        events = batcher.step()
        ended = time.monotonic()
        self._fill_until = ended + FILL_STEPS * (ended - started)
        self._steps += 1
        if self._steps % LEARN_EVERY == 0 and runtime.learn():
            self._replan.set()
        self._send_all(events)
        # An encode has borrowed room from weights: they come back while the first tokens run.
        self._filling = self._filling or any(event["ev"] == "progress" for event in events)
        if self._target > 0:
            produced = sum(event["ev"] == "token" for event in events)
            # A late token does not make the next ones come faster than the target.
            self._due = max(self._due, time.monotonic() - 1 / self._target) + produced / self._target
        else:
            self._due = 0.0

    def _follow_frames(self, runtime: Runtime, batcher: Batcher) -> None:
        assert runtime.device is not None
        pacing = runtime.device.pacing()
        batcher.chunk = self._chunk(runtime, pacing, batcher.chunk)
        # Beside a game each turn to the CPU and back waits for the device anew, so the plan is another one.
        busy_s, planned_s = pacing.gpu_busy_s, runtime.gpu_busy_s
        if (busy_s > 0) != (planned_s > 0) or not planned_s / 2 <= busy_s <= planned_s * 2:
            runtime.gpu_busy_s = busy_s
            self._replan.set()

    def _chunk(self, runtime: Runtime, pacing: Pacing, chunk: int) -> int:
        """Prompt tokens to read in one go: fewer when single steps are long beside the host's frame."""
        if not pacing.pacing:
            return runtime.n_ubatch
        if pacing.longest_step_s > pacing.target_frame_s / 8:
            return max(min(MIN_CHUNK, runtime.n_ubatch), chunk // 2)
        return min(runtime.n_ubatch, chunk * 2) if pacing.longest_step_s < pacing.target_frame_s / 32 else chunk

    def _load(self, message: Message) -> None:
        if self._runtime is not None:
            raise BadMessage("load came twice")
        started = time.monotonic()
        try:
            config = checks.convert(EngineConfig, message)
        except checks.Refused as refused:
            raise BadArgument(f"load: {refused}") from None
        self._loading = config.model
        self._runtime = Runtime.load(config)
        mmproj = self._runtime.config.mmproj
        if mmproj:
            self._loading = mmproj
            self._vision = Vision(self._runtime, mmproj)
            with contextlib.suppress(DecodeAborted):  # told to stop meanwhile
                self._vision.try_out()
            self._filling = True  # an encode borrows room from weights
        self._batcher = Batcher(self._runtime, self._vision, self._make_draft(self._runtime))
        self._preparation = Preparation(RequestReader(self._runtime, self._vision).read, self._prepared)
        self._fill_bytes = int(self._runtime.profile.h2d * FILL_S) if self._runtime.profile else 0
        self._budget_known = self._runtime.budget_bytes
        self._watcher = Watcher(self._runtime)
        self._channel.send(self._watcher.look(parked=False))
        self._loaded.set()
        self._channel.send({"ev": "ready", "info": {**self._info(), "load_s": time.monotonic() - started}})

    def _make_draft(self, runtime: Runtime) -> DraftModel | None:
        if not runtime.config.draft_model:
            return None
        if not runtime.can_speculate:
            logger.warning("the draft model is not loaded: nothing is drafted (speculate off, CPU or recurrent model)")
            return None
        self._loading = runtime.config.draft_model
        return DraftModel(runtime, runtime.config.draft_model)

    def _prepared(self, number: object, outcome: Job | FrameshardError) -> None:
        """[any thread] A request has been read."""
        self._commands.put(lambda: self._submit(number, outcome))

    def _submit(self, number: object, outcome: Job | FrameshardError) -> None:
        assert self._batcher is not None
        if isinstance(outcome, Job):
            try:
                self._batcher.add(outcome)
                return
            except FrameshardError as error:
                outcome = error
        self._channel.send({"ev": "failed", "job": number, "error": outcome.to_wire()})

    def _cancel(self, job: int) -> None:
        if self._batcher is not None:
            self._send_all(self._batcher.cancel(job))

    def _send_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._channel.send(event)

    def _set_target(self, rate: float) -> None:
        """What was due at the old rate is not due any more."""
        self._target, self._due = rate, 0.0

    def _stop_main(self) -> None:
        self._stop = True

    # --- reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for message in self._channel.messages():
                self._dispatch(message)
        except (OSError, BrokerGone) as error:
            logger.info("the broker's channel closed: %s", error)
        except FrameshardError as error:
            logger.error("the broker's channel cannot be read: %s", error)
        finally:
            # The broker is gone. Whatever the main thread does, the process ends now.
            self._end()
            self._closed.wait(CLEANUP_S)
            os._exit(0)

    def _dispatch(self, message: Message) -> None:
        op = message.pop("op", None)
        if op == "load":
            self._commands.put(lambda: self._load(message))
        elif op == "submit":
            if self._preparation is None:
                raise BadMessage("submit came before the engine was ready")
            self._preparation.submit(message)
        elif op == "cancel":
            job = _integer(message, "job")
            if self._preparation is not None and self._preparation.cancel(job):
                self._commands.put(lambda: self._channel.send({"ev": "cancelled", "job": job}))
                return
            if self._batcher is not None:
                self._batcher.interrupt(job)
            self._commands.put(lambda: self._cancel(job))
        elif op == "budget":
            self._budgets.put(message)
        elif op == "frame_block":
            self._open_page(str(message.get("path")))
        elif op == "pacing":
            self._set_pacing(str(message.get("mode")), message.get("target"))
        elif op == "plan":
            self._ask_plan(message)
        elif op == "stats":
            self._channel.send({"ev": "stats", "seq": _integer(message, "seq"), "stats": self._stats()})
        elif op == "alive":
            self._channel.send({"ev": "alive"})
        elif op == "ping":
            self._ping(_integer(message, "seq"))
        elif op == "stop":
            self._end()
        else:
            raise BadMessage(f"unknown op {op!r}")

    def _open_page(self, path: str) -> None:
        """On the CPU alone there is nothing to keep out of the way of."""
        if self._runtime is not None and self._runtime.device is not None:
            self._runtime.device.open_frame_block(path)
            self._page = True

    def _set_pacing(self, mode: str, target: object) -> None:
        if mode not in SCHEDULING_MODES or not isinstance(target, (int, float)):
            raise BadMessage("pacing needs a mode and a number")
        if self._runtime is not None and self._runtime.device is not None:
            self._runtime.device.set_scheduling_mode(mode)
        rate = float(target)
        self._commands.put(lambda: self._set_target(rate))

    def _end(self) -> None:
        self._commands.put(self._stop_main)
        if self._runtime is not None:
            self._runtime.abort()

    def _ping(self, seq: int) -> None:
        pong = {"ev": "pong", "seq": seq}
        if self._runtime is not None and self._batcher is not None and self._batcher.decoding:
            progress, now = self._runtime.progress, time.monotonic()
            if progress != self._progress:
                self._progress, self._moved_at = progress, now
            if now - self._moved_at < STUCK_S:
                self._channel.send(pong)
                return
        self._commands.put(lambda: self._channel.send(pong))

    def _stats(self) -> dict[str, object]:
        runtime, batcher = self._runtime, self._batcher
        if runtime is None or batcher is None:
            return {}
        stats: dict[str, object] = batcher.statistics()
        stats["nvml"] = runtime.observer is not None and runtime.observer.available
        if runtime.device is not None:
            stats.update(dataclasses.asdict(runtime.device.stats()))
            stats["budget_bytes"] = runtime.budget_bytes
            stats["placement"] = runtime.placement()
            if self._page:
                stats["pacing"] = dataclasses.asdict(runtime.device.pacing())
        if runtime.observer is not None:
            stats["observed_bytes"] = runtime.observer.used()
        return stats

    def _info(self) -> dict[str, object]:
        assert self._runtime is not None
        runtime, model = self._runtime, self._runtime.model_info
        device = runtime.device.stats() if runtime.device is not None else None
        return {
            "name": os.path.basename(runtime.config.model),
            "arch": model.arch,
            "device": runtime.device_name,
            "n_layer": model.n_layer,
            "n_vocab": runtime.n_vocab,
            "n_ctx": runtime.n_ctx_seq,
            "n_parallel": runtime.config.n_parallel,
            "n_ubatch": runtime.n_ubatch,
            "n_threads": runtime.n_threads,
            "chat": runtime.chat is not None,
            "vision": self._vision.name if self._vision is not None else "",
            "file_bytes": model.file_bytes,
            "budget_bytes": runtime.budget_bytes,
            "floor_bytes": device.floor_bytes if device else 0,
            "full_bytes": device.full_bytes if device else 0,
            "plan": runtime.plan.summary() if runtime.plan else {},
        }

    def _ask_plan(self, message: Message) -> None:
        try:
            self._plans.put_nowait(message)
        except queue.Full:
            error = Overloaded(f"{MAX_PLANS} plans are asked for already")
            self._channel.send({"ev": "plan", "seq": message.get("seq"), "error": error.to_wire()})

    # --- plan thread ----------------------------------------------------------------------------------------------

    def _serve_plans(self) -> None:
        """What-if questions, one at a time. None is worth a pause of a decode."""
        self._loaded.wait()
        assert self._runtime is not None
        with contextlib.suppress(BrokerGone):
            while True:
                message = self._plans.get()
                event: Event = {"ev": "plan", "seq": message.get("seq")}
                try:
                    event["rows"] = self._predict(self._runtime, message)
                except Exception as error:
                    event["error"] = _typed(error).to_wire()
                self._channel.send(event)

    def _predict(self, runtime: Runtime, message: Message) -> list[dict[str, object]]:
        if runtime.device is None:
            raise Unsupported("plans are made for a shard device, and this model runs on the CPU alone")
        n_prompt = _integer(message, "prompt_tokens")
        rows: list[dict[str, object]] = []
        for budget in message["budgets"]:
            if self._stop:
                raise EngineDied("the engine ends")
            rows.append(runtime.what_if(budget, n_prompt))
        return rows

    # --- watch thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Tells the broker of the device's memory and of who else uses it."""
        self._loaded.wait()
        told, told_at = b"", 0.0
        with contextlib.suppress(BrokerGone):
            while not self._stop:  # a model that is being freed has figures of its own
                time.sleep(WATCH_S)
                look = self._watcher.look(parked=self._parked)
                frame = channel.pack(look)
                if frame != told or time.monotonic() - told_at >= WATCH_TELL_S:
                    told, told_at = frame, time.monotonic()
                    self._channel.send(look)

    # --- budget thread --------------------------------------------------------------------------------------------

    def _serve_budgets(self) -> None:
        self._loaded.wait()
        assert self._runtime is not None
        standing, since = -1, time.monotonic()
        looked = 0.0
        while True:
            try:
                message = self._budgets.get(timeout=PAGE_S if self._page else OBSERVE_EVERY_S)
            except queue.Empty:
                if self._page:
                    self._look_at_page(self._runtime)
                if self._runtime.observer is None or time.monotonic() - looked < OBSERVE_EVERY_S:
                    continue
                looked = time.monotonic()
                used = self._runtime.device.stats().used_bytes if self._runtime.device else 0
                if used != standing:
                    standing, since = used, time.monotonic()
                elif time.monotonic() - since >= 2 * OBSERVE_EVERY_S and not self._parked:
                    self._measure_overhead(self._runtime)
                continue
            with contextlib.suppress(BrokerGone):  # the reader sees that too, and ends the process
                self._set_budget(self._runtime, message)

    def _look_at_page(self, runtime: Runtime) -> None:
        """Takes a budget from the frame block, and reports one that the device took there during a graph."""
        assert runtime.device is not None
        runtime.device.poll_frame_block()
        if runtime.budget_bytes == self._budget_known:
            return
        self._budget_known = runtime.budget_bytes
        self._replan.set()
        self._commands.put(lambda: None)
        with contextlib.suppress(BrokerGone):
            used = runtime.device.stats().used_bytes
            told = {"budget_bytes": self._budget_known, "used_bytes": used, "seconds": 0.0}
            self._channel.send({"ev": "budget", "seq": 0, "phase": "released", **told})

    def _measure_overhead(self, runtime: Runtime) -> None:
        try:
            runtime.measure_overhead()
        except BudgetBelowFloor as error:
            logger.warning("%s", error)

    def _set_budget(self, runtime: Runtime, message: Message) -> None:
        started = time.monotonic()
        event: Event = {"ev": "budget", "seq": message.get("seq")}
        try:
            wanted, timeout_s = _integer(message, "bytes"), _seconds(message, "timeout_s", 5.0)
            park = message.get("state") == "parked"
            patience_s = self._say_lease(runtime, event, wanted, timeout_s, park)
            if park or self._parked:
                self._set_parked(runtime, park, wanted, timeout_s)
            elif runtime.device is not None:
                self._change_budget(runtime.device, event, wanted, timeout_s, patience_s)
        except BrokerGone:
            raise
        except Exception as error:
            self._channel.send({**event, "phase": "refused", "error": _typed(error).to_wire()})
            return
        self._budget_known = runtime.budget_bytes
        # Without a shard device the process holds no VRAM, and any budget is kept.
        used = runtime.device.stats().used_bytes if runtime.device is not None else 0
        self._channel.send(
            {
                **event,
                "phase": "released",
                "budget_bytes": runtime.budget_bytes,
                "used_bytes": used,
                "seconds": time.monotonic() - started,
            }
        )
        observed = self._await_observed(runtime, used if park else wanted, started + timeout_s)
        self._channel.send(
            {**event, "phase": "observed", "observed_bytes": observed, "seconds": time.monotonic() - started}
        )

    def _change_budget(
        self, device: ShardDevice, event: Event, wanted: int, timeout_s: float, patience_s: float
    ) -> None:
        """Waits at most ``patience_s``, and half-way to the deadline warns that it will not be held."""
        before, started = device.stats().used_bytes, time.monotonic()

        def warn() -> None:
            used, passed = device.stats().used_bytes, time.monotonic() - started
            if used > wanted:
                rate = (before - used) / passed
                reached = max(wanted, used - int(rate * (timeout_s - passed)))
                seconds = passed + (used - wanted) / rate if rate else 0.0
                with contextlib.suppress(BrokerGone):
                    self._channel.send({**event, "phase": "late", "budget_bytes": reached, "seconds": seconds})

        warning = threading.Timer(timeout_s / 2, warn)
        if 0 < wanted < before and patience_s <= timeout_s:  # else it has been said already
            warning.start()
        try:
            device.set_budget(wanted, patience_s)
        finally:
            warning.cancel()
            self._replan.set()
            self._commands.put(lambda: None)  # wakes an idle main thread
        released = before - device.stats().used_bytes
        if released > 0:
            self._releases.append((released, time.monotonic() - started))

    def _set_parked(self, runtime: Runtime, park: bool, wanted: int, timeout_s: float) -> None:
        """:raises DeadlineMissed: a decode that was running has not ended in time; it is done when that has."""
        done = threading.Event()
        failure: list[FrameshardError] = []

        def change() -> None:
            try:
                if park != self._parked and runtime.device is not None:
                    (runtime.device.park if park else runtime.device.unpark)()
                self._parked = park
                self._replan.set()
            except FrameshardError as error:
                failure.append(error)
            done.set()

        if runtime.device is not None:
            if park and not self._parked:  # between two shards, while the decode goes on that has to end first
                runtime.device.set_budget(runtime.device.stats().floor_bytes, timeout_s)
            else:
                runtime.device.set_budget(wanted, timeout_s)
        self._commands.put(change)
        if not done.wait(timeout_s):
            raise DeadlineMissed("a decode is still running; it stays in force")
        if failure:
            raise failure[0]
        if park and runtime.device is not None:
            runtime.device.set_budget(wanted, timeout_s)  # is in force when the memory is taken again

    def _say_lease(self, runtime: Runtime, event: Event, wanted: int, timeout_s: float, park: bool) -> float:
        """What can be reached by the deadline, by earlier releases; before there were any, all of it. Returns how long
        to wait for it.

        :raises BudgetBelowFloor: nothing changes.
        """
        reached, seconds = wanted, 0.0
        if runtime.device is not None:
            stats = runtime.device.stats()
            if 0 < wanted < stats.floor_bytes:
                raise BudgetBelowFloor(
                    f"a VRAM budget of {wanted >> 20} MiB is below the floor of {-(-stats.floor_bytes >> 20)} MiB",
                    budget_bytes=wanted,
                    floor_bytes=stats.floor_bytes,
                )
            excess = stats.used_bytes - wanted if wanted and not park else 0
            # A release takes a while to begin, whatever its size: small ones say nothing of large ones.
            told = [took * max(1.0, excess / n) for n, took in self._releases if 8 * n >= excess]
            if excess > 0 and told:
                seconds = min(told)
                if seconds > timeout_s:
                    reached = stats.used_bytes - int(excess * timeout_s / seconds)
        self._channel.send({**event, "phase": "lease", "budget_bytes": reached, "seconds": seconds})
        return timeout_s if reached == wanted else max(timeout_s, PARTIAL_S)

    def _await_observed(self, runtime: Runtime, wanted: int, deadline: float) -> int | None:
        """The driver's figure as soon as it is within the budget, else the last one before ``deadline`` or before the
        next change: that one must not wait for a driver that counts late."""
        if runtime.observer is None:
            return None
        observed = runtime.observer.used()
        while observed is not None and wanted and observed > wanted and time.monotonic() < deadline:
            if not self._budgets.empty():
                break
            time.sleep(0.02)  # NVML has no event for this
            observed = runtime.observer.used()
        return observed


def _typed(error: Exception) -> FrameshardError:
    """The error, or what stands for one that nobody has foreseen; the log gets where that came from."""
    if isinstance(error, FrameshardError):
        return error
    logger.error("a defect of the engine", exc_info=error)
    return FrameshardError(f"{type(error).__name__}: {error}")


def _integer(message: Message, name: str) -> int:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadMessage(f"{name} must be a whole number")
    return value


def _seconds(message: Message, name: str, default: float) -> float:
    value = message.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 3600:
        raise BadArgument(f"{name} must be a number of seconds up to 3600", field=name)
    return float(value)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the child process."""
    parser = argparse.ArgumentParser(prog="frameshard.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="engine: %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the broker's to answer
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(str(OOM_SCORE_ADJ))
    sock = socket.socket(fileno=args.fd)
    sock.set_inheritable(False)
    engine = Engine(Channel(sock))
    on_abort(engine.aborted)
    code = engine.run()
    logging.shutdown()
    # Without unwinding: other threads still wait in native code, and the plugin must never be unloaded.
    os._exit(code)


if __name__ == "__main__":
    main()
