"""The engine process: ``python -m frameshard.engine.process --fd N``, started by the broker.

``N`` is one end of a Unix stream socket pair; the messages are those of :mod:`frameshard.wire.engine`.

Threads:

main     decodes. Between decodes it runs what other threads have queued, and answers pings, so a stuck engine does not
         answer. One decode may take longer than the broker waits (a large model on a slow CPU). So the reader answers
         pings while a decode makes progress.
reader   receives commands and never waits for the GPU. It interrupts jobs and answers requests for statistics. It
         passes all other commands to other threads.
prepare  two threads that make requests ready to run (:mod:`frameshard.engine.prepare`).
budget   changes the budget, and waits until the device has released memory (:mod:`frameshard.engine.budgets`).
adapter  checks and reads the file of a LoRA adapter, one thread for each load.
plan     answers what-if questions (:mod:`frameshard.engine.whatif`).
replan   makes new plans while the main thread decodes (:mod:`frameshard.engine.replanner`).
count    counts the tokens of prompts (:mod:`frameshard.engine.counting`).
watch    reports the memory of device and host to the broker (:mod:`frameshard.engine.watch`), and gives host memory
         back while the machine is short of it (:mod:`frameshard.engine.pressure`). Ends an engine in which the
         preparation of a request hangs.

The process ends when the broker closes the socket, so it never outlives the broker.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from frameshard import models, system
from frameshard.engine import report
from frameshard.engine.batch import Batcher
from frameshard.engine.budgets import Budgets
from frameshard.engine.counting import Counting
from frameshard.engine.draft import DraftModel
from frameshard.engine.hostcount import PROC
from frameshard.engine.hostmemory import HostMemory
from frameshard.engine.idle import Idle, IdleDisk, IdleProfile
from frameshard.engine.job import Job
from frameshard.engine.kvfile import KvFiles
from frameshard.engine.kvstore import KvStore
from frameshard.engine.link import BrokerGone, Link
from frameshard.engine.llama import DecodeAborted
from frameshard.engine.pace import Pace
from frameshard.engine.prepare import Preparation
from frameshard.engine.pressure import Pressure
from frameshard.engine.replanner import Replanner
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.engine.vision import Vision
from frameshard.engine.watch import Watcher
from frameshard.engine.whatif import WhatIf
from frameshard.errors import BadArgument, BadMessage, BadModel, EngineDied, FrameshardError, internal
from frameshard.ggml import on_abort
from frameshard.native import ShardDevice
from frameshard.plan.adapter import AdapterFile, read_adapter
from frameshard.plan.memory import kv_bytes
from frameshard.plan.plans import Plan
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

EXIT_FATAL = 3
CLEANUP_S = 0.5
"""Seconds that the main thread has to free the model when the broker is gone."""

FILL_S = 0.005
"""When there is room in VRAM, weights are copied there for about this many seconds at a time. A smaller budget takes
effect in between."""

FILL_STEPS = 1
"""Between two decodes, weights are copied to VRAM for at most the time of this many decodes: the next token waits for
them."""

LEARN_EVERY = 64
"""The plan is adapted to the experts that the router picks after every so many decodes."""

MEASURE_S = 30.0
"""After so many seconds of one measurement of the machine, pings are not answered."""

STUCK_S = 2.0
"""After a decode has made no progress for so many seconds, pings are not answered. One operation may take a second."""

PREPARE_S = 300.0
"""If a request is not ready to run after so many seconds, its thread hangs. The processes that render a prompt and
check a form have a minute each, and are tried twice."""

SPARES_AT_LOAD_S = 0.5
"""A launch takes host memory for the KV cache for at most so many seconds."""

FIRST_COPY_TOKENS = 512
"""A launch takes host memory for one copy of a KV cache of so many tokens."""

LOAD_RELEASE_S = 5.0
WATCH_S = 0.25
WATCH_SEND_S = 1.0
OOM_SCORE_ADJ = 500  # when memory runs out, the kernel kills the sidecar before the game

_DEVICE_WORDS = ("CUDA error", "ggml-cuda", "ggml-vulkan", "ggml-metal")
"""If a model fails to load with one of these words in the message, the device is at fault and not the file."""


class Engine:
    """Carries out the broker's commands with a :class:`Runtime`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Functions that the main thread will call."""
        self._adapter_commands: queue.SimpleQueue[em.LoadAdapter | em.UnloadAdapter] = queue.SimpleQueue()
        self._budgets = Budgets(link, self._commands.put, self._want_plan)
        self._what_if = WhatIf(link.send)
        self._counting = Counting(link.send)
        self._pace = Pace()
        self._runtime: Runtime | None = None
        self._batcher: Batcher | None = None
        self._watcher: Watcher | None = None
        self._preparation: Preparation | None = None
        self._kv_files: KvFiles | None = None
        self._vision: Vision | None = None
        self._idle: Idle | None = None
        self._loading = ""
        """The file that is being loaded."""
        self._loaded = threading.Event()
        self._closed = threading.Event()
        self._replanner = Replanner(self._commands.put, self._adopt)
        self._stop = False
        self._filling = False
        """True while there may be room in VRAM for more weights."""
        self._sparing = False
        """True while KV blocks may lack spare host memory."""
        self._fill_until = 0.0
        self._progress = -1
        self._progress_at = 0.0
        self._n_decodes = 0

    # --- main thread ----------------------------------------------------------------------------------------------

    def run(self, proc: Path) -> int:
        """Runs until a stop command comes or the broker ends.

        :param proc: where /proc is, to read how much memory the machine has.
        :returns: the exit code.
        """
        try:
            threading.Thread(target=self._read, daemon=True, name="reader").start()
            for name, serve in (
                ("budget", self._serve_budgets),
                ("plan", self._what_if.serve),
                ("count", self._counting.serve),
                ("adapter", self._serve_adapters),
                ("watch", partial(self._watch, proc)),
            ):
                threading.Thread(target=self._when_loaded, args=(name, serve), daemon=True, name=name).start()
            while not self._stop:
                self._turn()
        except BrokerGone:
            return 0
        except Exception as error:
            return self._fatal(internal(logger, "the engine", error))
        finally:
            if self._kv_files is not None:
                self._kv_files.close(CLEANUP_S / 2)
        # The model is freed only if no other thread still uses it. The system frees all memory at exit anyway.
        prepared = self._preparation is None or self._preparation.close(CLEANUP_S / 2)
        if prepared and self._counting.close(CLEANUP_S / 4) and self._replanner.close(CLEANUP_S / 4):
            if self._batcher is not None:
                self._batcher.close()
            if self._runtime is not None:
                self._runtime.close()
        self._closed.set()
        return 0

    def _fatal(self, error: FrameshardError) -> int:
        """Reports the error that ends the engine. Frees nothing, because that may hang after a device has failed.

        :returns: the exit code.
        """
        try:
            self._link.send(em.Fatal(m.ErrorInfo.of(error)))
        except BrokerGone:
            logger.error("fatal: %s", error)
        return EXIT_FATAL

    def aborted(self, why: str) -> NoReturn:
        """[any thread] Called when ggml is about to abort the process. Reports the reason and ends the process at once,
        because an abort would take long to write a core file of all mapped memory."""
        if self._loaded.is_set() or any(word in why for word in _DEVICE_WORDS):
            os._exit(self._fatal(EngineDied(f"ggml aborted: {why}", last_words=why)))
        os._exit(self._fatal(BadModel(f"llama.cpp cannot use {self._loading}: {why}", last_words=why)))

    def _turn(self) -> None:
        """Runs the functions that other threads have queued. Then runs one decode, unless it is time to copy weights.
        Then copies some weights to free VRAM."""
        parked = self._budgets.parked
        busy = self._batcher is not None and self._batcher.busy and not parked
        wait: float | None = max(0.0, self._pace.due_at - time.monotonic()) if busy else None
        if (self._filling or (self._sparing and not busy)) and not parked:
            wait = 0.0
        elif self._idle is not None and not busy and not parked:
            wait = self._idle.due_in()
        with contextlib.suppress(queue.Empty):
            while not self._stop:
                self._commands.get(block=wait != 0.0, timeout=wait)()
                wait = 0.0
        if self._runtime is None or self._batcher is None or self._stop or self._budgets.parked:
            return
        placement = self._runtime.placement
        if placement is not None and self._replanner.work(placement, busy=busy):
            self._filling = True
        if self._idle is not None and not self._batcher.busy and not self._filling and self._idle.work():
            self._filling = True  # the measurement has evicted weights to get room
            return
        filling = self._filling and time.monotonic() < self._fill_until
        if self._batcher.busy and not filling and time.monotonic() >= self._pace.due_at:
            self._decode(self._runtime, self._batcher)
        if placement is None:
            self._filling = False
        elif self._filling or placement.unfilled:
            self._filling = placement.fill(int(placement.rates.profile.h2d * FILL_S)) > 0
            self._sparing = True
        elif self._sparing and not self._batcher.busy:
            self._sparing = placement.device.add_spare() > 0

    def _adopt(self, plan: Plan) -> None:
        """Adopts a plan of the replan thread. After parking there will be a newer one."""
        if self._runtime is not None and self._runtime.placement is not None and not self._budgets.parked:
            self._runtime.placement.adopt(plan)
            self._filling = True

    def _decode(self, runtime: Runtime, batcher: Batcher) -> None:
        if self._budgets.has_frame_block and self._pace.follow_frames(runtime, batcher):
            self._replanner.want()
        prefilling = batcher.prefilling
        runtime.decoded = []
        started = time.monotonic()
        events = batcher.step()
        ended = time.monotonic()
        self._send_all(events)  # nobody needs to wait for what follows
        self._observe(runtime, ended - started, prefilling=prefilling)
        if runtime.placement is not None and not batcher.busy:
            runtime.placement.rates.keep()
        self._fill_until = ended + FILL_STEPS * (ended - started)
        self._n_decodes += 1
        if self._n_decodes % LEARN_EVERY == 0 and runtime.placement is not None and runtime.placement.learn():
            self._replanner.want()
        if self._idle is not None:
            self._idle.disturb()
        # Prompts and the encoder of images have evicted weights to get room. Between the first tokens they come back.
        encoded = any(isinstance(event, em.Progress) and event.phase == "encode" for event in events)
        self._filling = self._filling or encoded or (prefilling and not batcher.prefilling)
        self._pace.produced(sum(isinstance(event, em.Token) for event in events))

    def _observe(self, runtime: Runtime, seconds: float, *, prefilling: bool) -> None:
        """Compares the time of graphs with its prediction, unless the host draws frames, the plan is outdated, or
        weights are still to be copied. A prompt evicts weights, so these copies do not matter to it."""
        placement, graphs = runtime.placement, runtime.decoded
        if placement is None or not graphs or placement.gpu_busy_s or self._replanner.outdated:
            return
        if self._filling and not prefilling:
            return
        placement.rates.observe(placement.plan, graphs, seconds)

    def _load(self, config: em.EngineConfig) -> None:
        if self._runtime is not None:
            raise BadMessage("load came twice")
        started = time.monotonic()
        self._loading = config.model
        runtime = self._runtime = Runtime.load(config, measure=False, on_loading=report.Loading(self._link.send))
        mmproj = runtime.config.mmproj
        if mmproj:
            self._loading = mmproj
            self._vision = Vision(runtime, mmproj)
            with contextlib.suppress(DecodeAborted):  # a stop command came meanwhile
                self._vision.try_out()
            self._filling = True  # the encoder of images has evicted weights to get room
        self._sparing = runtime.placement is not None
        if runtime.placement is not None:
            runtime.placement.on_outdated = self._replanner.want
        self._batcher = Batcher(runtime, self._vision, self._make_draft(runtime))
        self._preparation = Preparation(RequestReader(runtime, self._vision).read, self._prepared)
        self._kv_files = KvFiles(runtime, self._batcher.reuse, self._link.send, self._commands.put)
        rates = None if runtime.placement is None else runtime.placement.rates
        disk = IdleDisk(rates, self._commands.put, self._want_plan)
        self._idle = Idle(IdleProfile(runtime, self._want_plan), disk, self._batcher.reuse.copy_ahead)
        _ = runtime.tokenizer.chat  # starts the process that renders prompts, which the floor counts
        host = HostMemory(runtime, self._batcher.store, None if self._vision is None else self._vision.embeddings)
        host.measure()
        host.check(config.host_budget_bytes, spare_bytes=0)
        host.set_budget(config.host_budget_bytes, LOAD_RELEASE_S)
        self._watcher = Watcher(runtime, host)
        self._link.send(self._watcher.look(parked=False))
        if runtime.device is not None:
            self._take_spares(runtime, runtime.device, self._batcher.store)
        gc.collect()
        gc.freeze()  # these objects stay; if each full collection looked at them, tokens would wait 15 ms
        self._loaded.set()
        self._link.send(report.ready(runtime, self._vision, time.monotonic() - started))

    def _take_spares(self, runtime: Runtime, device: ShardDevice, store: KvStore) -> None:
        """Takes host memory for the KV cache: to copy it to for an urgent job, and to move it to when the budget falls.
        Neither should wait for new pages. What takes longer is left to idle moments."""
        until = time.monotonic() + SPARES_AT_LOAD_S
        if not runtime.config.host_budget_bytes:
            store.reserve(kv_bytes(runtime.model_info, FIRST_COPY_TOKENS, kv_type=runtime.config.kv_type))
        while self._sparing and time.monotonic() < until:
            self._sparing = device.add_spare() > 0

    def _make_draft(self, runtime: Runtime) -> DraftModel | None:
        if not runtime.config.draft_model:
            return None
        if not runtime.can_speculate:
            logger.warning("the draft model is not loaded: nothing is drafted (speculate off, CPU or recurrent model)")
            return None
        self._loading = runtime.config.draft_model
        return DraftModel(runtime, runtime.config.draft_model)

    def _serve_adapters(self, runtime: Runtime) -> None:
        """[adapter thread] Passes loads and unloads to the main thread in the order of the commands. An unload waits
        for the files of earlier loads: it may be for one of them."""
        while True:
            command = self._adapter_commands.get()
            if isinstance(command, em.LoadAdapter):
                self._read_adapter(runtime, command)
            else:
                change = partial(self._unload_adapter, command.name)
                self._commands.put(partial(self._change_adapters, command.seq, change))

    def _read_adapter(self, runtime: Runtime, command: em.LoadAdapter) -> None:
        """[adapter thread] Checks an adapter's file and reads it into the page cache, so that the main thread loads it
        fast."""
        try:
            file = read_adapter(command.path, runtime.model_info)
            models.read_ahead(command.path)
        except Exception as error:
            why = m.ErrorInfo.of(internal(logger, f"the load of the adapter {command.name}", error))
            self._commands.put(lambda: self._link.send(em.Adapters(command.seq, error=why)))
            return
        self._commands.put(partial(self._change_adapters, command.seq, partial(self._load_adapter, command.name, file)))

    def _load_adapter(self, name: str, file: AdapterFile) -> None:
        assert self._runtime is not None
        if self._budgets.parked:
            raise BadArgument("the sidecar is parked: set its VRAM budget to active first")
        self._runtime.load_adapter(name, file)

    def _unload_adapter(self, name: str) -> None:
        assert self._runtime is not None
        assert self._batcher is not None
        if self._batcher.uses(name):
            raise BadArgument(f"jobs use the adapter {name!r}: it can be unloaded when they have ended")
        self._runtime.adapters.unload(name)

    def _change_adapters(self, seq: int, change: Callable[[], None]) -> None:
        """Changes the loaded adapters between two decodes, and answers."""
        assert self._runtime is not None
        try:
            change()
        except FrameshardError as error:
            self._link.send(em.Adapters(seq, error=m.ErrorInfo.of(error)))
            return
        self._want_plan()
        device = self._runtime.device
        floor_bytes = device.stats().floor_bytes if device is not None else 0
        self._link.send(em.Adapters(seq, self._runtime.adapters.describe(), floor_bytes))

    def _prepared(self, number: int, outcome: Job | FrameshardError) -> None:
        """[any thread] Passes a request that is ready to run, or its error, to the main thread."""
        if self._idle is not None:
            self._idle.disturb()
        self._commands.put(lambda: self._submit(number, outcome))
        if isinstance(outcome, Job) and self._batcher is not None:
            self._batcher.preempt(outcome.priority)

    def _submit(self, number: int, outcome: Job | FrameshardError) -> None:
        assert self._batcher is not None
        if isinstance(outcome, Job):
            try:
                self._batcher.add(outcome)
                return
            except FrameshardError as error:
                outcome = error
        self._link.send(em.Failed(number, m.ErrorInfo.of(outcome)))

    def _cancel(self, command: em.Cancel) -> None:
        if self._batcher is not None:
            # A parked device cannot read its KV cache.
            keep = command.pause and not self._budgets.parked
            self._send_all(self._batcher.cancel(command.job, keep=keep))

    def _save_kv(self, command: em.SaveKv) -> None:
        assert self._kv_files is not None
        self._kv_files.save(command, parked=self._budgets.parked)

    def _send_all(self, events: Sequence[em.JobEvent]) -> None:
        for event in events:
            self._link.send(event)

    def _stop_main(self) -> None:
        self._stop = True
        self._what_if.end()

    # --- reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            for fields in self._link.received():
                self._take(fields)
        except (OSError, BrokerGone) as error:
            logger.info("the broker's channel closed: %s", error)
        except FrameshardError as error:
            logger.error("the broker's channel cannot be read: %s", error)
        except Exception as error:
            self._fail("the reader thread", error)
        finally:
            # The broker is gone. The process ends within CLEANUP_S, whatever the main thread does.
            self._end()
            self._closed.wait(CLEANUP_S)
            os._exit(0)

    def _take(self, fields: dict[str, Any]) -> None:
        """Carries out a command, or refuses it with an event.

        :raises BadMessage: the command is invalid, and no event exists to refuse it.
        """
        try:
            command = em.read_command(fields)
        except BadMessage as error:
            refusal = em.refusal(fields, error)
            if refusal is None:
                raise
            self._link.send(refusal)
            if isinstance(refusal, em.Fatal):
                os._exit(EXIT_FATAL)
            return
        self._obey(command)

    def _obey(self, command: em.Command) -> None:
        if self._idle is not None and not isinstance(command, em.GetStats | em.AskAlive | em.Ping):
            self._idle.disturb()
        if isinstance(command, em.EngineConfig):
            self._commands.put(partial(self._load, command))
        elif isinstance(command, em.Submit):
            if self._preparation is None:
                raise BadMessage("submit came before the engine was ready")
            self._preparation.submit(command)
        elif isinstance(command, em.Cancel):
            self._interrupt(command)
        elif isinstance(command, em.SetPriority):
            self._set_priority(command)
        elif isinstance(command, em.SetBudget):
            self._budgets.ask(command)
        elif isinstance(command, em.OpenFrameBlock):
            self._open_frame_block(command.path)
        elif isinstance(command, em.SetPacing):
            if self._runtime is not None and self._runtime.device is not None:
                self._runtime.device.set_scheduling_mode(command.scheduling_mode)
            self._commands.put(partial(self._pace.set_target, command.target_tokens_per_second))
        elif isinstance(command, em.LoadAdapter | em.UnloadAdapter):
            self._adapter_commands.put(command)
        elif isinstance(command, em.MakePlans):
            self._what_if.ask(command)
        elif isinstance(command, em.SaveKv):
            self._commands.put(partial(self._save_kv, command))
        elif isinstance(command, em.LoadKv):
            if self._kv_files is None:
                raise BadMessage("kv_load came before the engine was ready")
            self._commands.put(partial(self._kv_files.load, command))  # behind saves, which may write the file
        elif isinstance(command, em.CountTokens):
            self._counting.ask(command)
        elif isinstance(command, em.GetStats):
            self._link.send(em.Stats(command.seq, self._statistics()))
        elif isinstance(command, em.AskAlive):
            self._link.send(em.Alive())
        elif isinstance(command, em.Ping):
            self._ping(command.seq)
        else:
            self._end()

    def _interrupt(self, command: em.Cancel) -> None:
        if self._preparation is not None and self._preparation.cancel(command.job):
            self._commands.put(lambda: self._link.send(em.Cancelled(command.job)))
            return
        if self._batcher is not None:
            self._batcher.interrupt(command.job)
        self._commands.put(lambda: self._cancel(command))

    def _open_frame_block(self, path: str) -> None:
        """Follows the host's frames from now on. If the frame block is gone, jobs run without it."""
        if self._runtime is None:
            return
        try:
            if self._runtime.device is not None:
                self._runtime.device.open_frame_block(path)
                self._budgets.follow_frame_block()
            else:  # the CPU is not paced
                self._budgets.answer_frame_block(path)
        except BadArgument as error:
            logger.warning("the host's frames are not followed: %s", error)

    def _set_priority(self, command: em.SetPriority) -> None:
        if self._preparation is not None and self._preparation.set_priority(command.job, command.priority):
            return
        batcher = self._batcher
        if batcher is not None:
            self._commands.put(lambda: batcher.set_priority(command.job, command.priority))

    def _statistics(self) -> dict[str, object]:
        if self._runtime is None or self._batcher is None or self._watcher is None:
            return {}
        has_frame_block = self._budgets.has_frame_block
        return report.statistics(self._runtime, self._batcher, self._watcher.host, has_frame_block=has_frame_block)

    def _end(self) -> None:
        self._commands.put(self._stop_main)
        if self._idle is not None:
            self._idle.disturb()
        if self._runtime is not None:
            self._runtime.abort()

    def _ping(self, seq: int) -> None:
        """Answers a ping while a decode makes progress, or while the machine is measured; else passes it to the main
        thread."""
        if self._idle is not None and 0 < self._idle.measuring_s < MEASURE_S:
            self._link.send(em.Pong(seq))
            return
        if self._runtime is not None and self._batcher is not None and self._batcher.decoding:
            progress, now = self._runtime.progress, time.monotonic()
            if progress != self._progress:
                self._progress, self._progress_at = progress, now
            if now - self._progress_at < STUCK_S:
                self._link.send(em.Pong(seq))
                return
        self._commands.put(lambda: self._link.send(em.Pong(seq)))

    # --- other threads --------------------------------------------------------------------------------------------

    def _want_plan(self) -> None:
        """[any thread] Asks the main thread for a new plan."""
        self._replanner.want()
        self._commands.put(lambda: None)  # wakes the main thread if it is idle

    def _when_loaded(self, name: str, serve: Callable[[Runtime], None]) -> None:
        """Runs a thread's work. If it fails, the engine ends: nobody would answer what the thread is asked."""
        self._loaded.wait()
        assert self._runtime is not None
        try:
            serve(self._runtime)
        except BrokerGone:
            pass  # the reader thread ends the process
        except Exception as error:
            self._fail(f"the {name} thread", error)

    def _fail(self, what: str, error: Exception) -> None:
        """[any thread] Ends the process with the error, unless it ends already: then the model is being freed."""
        if not self._stop:
            os._exit(self._fatal(internal(logger, what, error)))

    def _serve_budgets(self, runtime: Runtime) -> None:
        """[budget thread]"""
        assert self._watcher is not None
        self._budgets.serve(runtime, self._watcher.host)

    def _watch(self, proc: Path, _runtime: Runtime) -> None:
        """[watch thread] Reports the memory of device and host when it has changed, and at least every second."""
        assert self._watcher is not None
        host, sent, sent_at = self._watcher.host, None, 0.0
        pressure = Pressure(host, lambda limit, why: self._link.send(em.HostPressure(limit, why)), proc)
        while not self._stop:  # while the model is being freed, the figures mean nothing
            time.sleep(WATCH_S)
            if self._preparation is not None and self._preparation.busy_s > PREPARE_S:
                self._fail("a request", EngineDied(f"a request was not ready to run after {PREPARE_S:g} s"))
            host.look()
            pressure.look()
            look = self._watcher.look(parked=self._budgets.parked)
            if look != sent or time.monotonic() - sent_at >= WATCH_SEND_S:
                sent, sent_at = look, time.monotonic()
                self._link.send_made(partial(self._watcher.newest, look))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point of the process."""
    parser = argparse.ArgumentParser(prog="frameshard.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--proc", type=Path, default=PROC, help="where /proc is; tests play a machine short of memory")
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="engine: %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the broker handles Ctrl-C
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(str(OOM_SCORE_ADJ))
    sock = system.inherited_socket(args.fd)
    engine = Engine(Link(sock))
    on_abort(engine.aborted)
    code = engine.run(args.proc)
    logging.shutdown()
    # Skips Python's cleanup: other threads still wait in native code, and the plugin must never be unloaded.
    os._exit(code)


if __name__ == "__main__":
    main()
