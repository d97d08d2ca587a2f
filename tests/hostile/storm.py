"""Causes random faults around a running sidecar. Every answer must arrive unchanged.

    python tests/hostile/storm.py MODEL.gguf --seconds 600 --seed 1

A good client repeats the same questions and embeds a text. Meanwhile a seeded script kills, crashes and stops engine
and broker, kills the embedder, changes the budget, parks and hibernates, cancels jobs, and makes other clients vanish
or stop reading. The sidecar runs in stream-only mode. With one conversation at a time, each text must be that of an
undisturbed run. With several, texts are not compared: the last bits of the logits depend on which conversations share a
decode.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import commandline
import trio

import frameshard
from frameshard import errors, models

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a program Python does not search tests/
from sidecars import children

PEERS = Path(__file__).with_name("peers.py")
WORDS = "mira pours another cup and tells of the road that leads north past the mill into the hills where rain falls"
WORKERS = 6
N_QUESTIONS = 8
QUIET_S = 60.0
"""At the end all jobs must be done within so many seconds, also those of vanished clients."""


@dataclass
class Report:
    """The result: among others ``faults`` by kind, and ``longest_silence_s``, the longest time that a job with text
    was without an event. The wait for its turn is not part of it: that is as long as the other clients' jobs are, and
    ``fault_pacing`` makes these slow."""

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    embeddings: int = 0
    changed: int = 0
    cancelled: int = 0
    given_up: int = 0
    longest_silence_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    restarts: int = 0
    broker_rss_mb: tuple[float, float] = (0.0, 0.0)
    broker_fds: tuple[int, int] = (0, 0)


def question(number: int) -> tuple[str, frameshard.Sampling]:
    """Some questions are greedy and some sampled. Some prompts are longer than a chunk."""
    pick = random.Random(number)
    prompt = " ".join(pick.choice(WORDS.split()) for _ in range(pick.choice((4, 20, 90))))
    temperature = 0.0 if number % 2 else 0.9
    return prompt, frameshard.Sampling(max_tokens=pick.choice((16, 60, 120)), temperature=temperature, seed=number)


class Storm:
    """The sidecar, the good client, and the faults."""

    def __init__(self, client: frameshard.Client, info: str, seed: int, *, stuck_s: float, same_texts: bool) -> None:
        self.report = Report(seed)
        self._client = client
        self._info = info
        self._stuck_s = stuck_s
        self._same_texts = same_texts
        self._random = random.Random(seed)
        self._expected: dict[int, str] = {}
        self._streams: dict[int, frameshard.Stream] = {}
        self._heard: dict[int, float] = {}
        self._peers: list[subprocess.Popen[bytes]] = []
        self._over = False
        self._broker = 0
        self._engine: int | None = None

    async def run(self, seconds: float, pause_s: float) -> Report:
        """Causes faults for ``seconds``, one every ``pause_s`` on average."""
        budget = await self._client.budget()
        self._floor, self._full = budget.floor_bytes, budget.full_bytes
        self._broker = (await self._client.stats()).broker.pid
        for number in range(N_QUESTIONS):
            prompt, sampling = question(number)
            self._expected[number] = (await self._client.complete(prompt, sampling=sampling).completed()).text
        before: tuple[float, int] | None = None
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for worker in range(WORKERS):
                nursery.start_soon(self._ask, worker)
            nursery.start_soon(self._watch)
            nursery.start_soon(self._embed)
            while (passed := trio.current_time() - started) < seconds:
                await self._fault()
                if before is None and passed > seconds / 4:
                    before = look(self._broker)
                await trio.sleep(self._random.expovariate(1 / pause_s))
            await self._calm()
            self._over = True
            with trio.move_on_after(QUIET_S) as late:
                while self._streams:
                    await trio.sleep(0.05)
            if late.cancelled_caught:
                self.report.problems.append(f"{len(self._streams)} jobs had not ended {QUIET_S:g} s after the storm")
            nursery.cancel_scope.cancel()
        await self._settle(before)
        return self.report

    async def _settle(self, before: tuple[float, int] | None) -> None:
        """Checks that no job runs, texts are as before, and memory and descriptors have not grown."""
        report = self.report
        for peer in self._peers:
            peer.kill()
            peer.wait()
        with trio.move_on_after(QUIET_S) as late:
            while (stats := (await self._client.stats()).broker).jobs_running + stats.jobs_queued:
                await trio.sleep(0.2)
        if late.cancelled_caught:
            report.problems.append(f"jobs of vanished clients were still there after {QUIET_S:g} s")
        report.restarts = stats.engine_restarts
        if stats.pid != self._broker or stats.engine != "ready":
            report.problems.append(f"not as before: {stats}")
        for number in self._expected:
            prompt, sampling = question(number)
            self._compare(number, (await self._client.complete(prompt, sampling=sampling).completed()).text)
        after = look(self._broker)
        if before is not None:
            report.broker_rss_mb, report.broker_fds = (before[0], after[0]), (before[1], after[1])

    # --- the good client ------------------------------------------------------------------------------------------

    async def _ask(self, worker: int) -> None:
        pick = random.Random(worker)
        while not self._over:
            number = pick.randrange(N_QUESTIONS)
            prompt, sampling = question(number)
            stream = self._client.complete(prompt, sampling=sampling)
            self._streams[worker] = stream
            try:
                async with stream:
                    async for _ in stream:
                        self._hear(worker)
                self.report.answers += 1
                self._compare(number, stream.text)
            except errors.JobCancelled:
                self.report.cancelled += 1
            except errors.EngineDied:
                self.report.given_up += 1  # the job was in the engine at two deaths, without an event between them
            except errors.ConnectionLost:
                raise  # the sidecar has ended
            except errors.FrameshardError as error:
                self.report.problems.append(f"question {number}: {error.name}: {error}")
                await trio.sleep(1.0)
            finally:
                del self._streams[worker]
                if worker in self._heard:
                    self._hear(worker)
                    del self._heard[worker]

    async def _embed(self) -> None:
        expected = b""
        while not self._over:
            try:
                rows = (await self._client.embed([WORDS])).tobytes()
            except errors.EngineDied:
                self.report.given_up += 1  # the process died twice during the request
                continue
            expected = expected or rows
            self.report.embeddings += 1
            if rows != expected:
                self.report.problems.append("another embedding of the same text")
            await trio.sleep(0.1)

    def _compare(self, number: int, text: str) -> None:
        expected = self._expected[number]
        if self._same_texts and text != expected:
            self.report.changed += 1
            same = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), -1)
            self.report.problems.append(f"question {number}: another text from character {same} of {len(expected)} on")

    def _hear(self, worker: int) -> None:
        now = trio.current_time()
        self.report.longest_silence_s = max(self.report.longest_silence_s, now - self._heard.get(worker, now))
        self._heard[worker] = now

    async def _watch(self) -> None:
        """Updates the longest silence, also while a silence lasts."""
        while True:
            await trio.sleep(1.0)
            for heard in self._heard.values():
                silence = trio.current_time() - heard
                self.report.longest_silence_s = max(self.report.longest_silence_s, silence)

    # --- faults ---------------------------------------------------------------------------------------------------

    async def _fault(self) -> None:
        kinds = [name for name in dir(self) if name.startswith("fault_")]
        name = self._random.choice(kinds)
        with trio.move_on_after(1.0):
            self._engine = (await self._client.stats()).broker.engine_pid
        with trio.move_on_after(self._stuck_s) as late:
            # The machine is busy, and the engine may have just died.
            with contextlib.suppress(errors.DeadlineMissed, errors.EngineDied, errors.Overloaded):
                await getattr(self, name)()
        if late.cancelled_caught:
            self.report.problems.append(f"{name} was not answered within {self._stuck_s:g} s")
        kind = name.removeprefix("fault_")
        self.report.faults[kind] = self.report.faults.get(kind, 0) + 1

    async def _calm(self) -> None:
        for pid in (self._broker, self._engine):
            self._signal(pid, signal.SIGCONT)
        with trio.fail_after(QUIET_S):
            while True:
                try:
                    await self._client.set_budget(0, timeout_s=30.0)
                    return
                except (errors.DeadlineMissed, errors.EngineDied):
                    await trio.sleep(0.5)

    def _signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def _freeze(self, pids: tuple[int | None, ...], seconds: float) -> None:
        for pid in pids:
            self._signal(pid, signal.SIGSTOP)
        try:
            await trio.sleep(seconds)
        finally:
            for pid in pids:
                self._signal(pid, signal.SIGCONT)

    async def fault_kill(self) -> None:
        self._signal(self._engine, signal.SIGKILL)

    async def fault_crash(self) -> None:
        self._signal(self._engine, signal.SIGSEGV)

    async def fault_kill_embedder(self) -> None:
        for pid in children(self._broker):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if b"frameshard.engine.embedder" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    self._signal(pid, signal.SIGKILL)

    async def fault_freeze_engine(self) -> None:
        await self._freeze((self._engine,), self._random.uniform(0.1, 2.0))

    async def fault_stop_engine_for_good(self) -> None:
        self._signal(self._engine, signal.SIGSTOP)

    async def fault_freeze_broker(self) -> None:
        await self._freeze((self._broker,), self._random.uniform(0.1, 3.0))

    async def fault_freeze_all(self) -> None:
        await self._freeze((self._broker, self._engine), self._random.uniform(0.1, 3.0))

    async def fault_budget(self) -> None:
        n_bytes = self._random.randint(self._floor, self._full)
        await self._client.set_budget(n_bytes / 2**20, timeout_s=20.0)

    async def fault_budget_below_floor(self) -> None:
        try:
            await self._client.set_budget(self._floor / 2 / 2**20, timeout_s=20.0)
        except errors.BudgetBelowFloor:
            return
        self.report.problems.append("a budget below the floor was taken")

    async def fault_park(self) -> None:
        await self._away("parked")

    async def fault_hibernate(self) -> None:
        await self._away("hibernated")

    async def _away(self, state: str) -> None:
        try:
            await self._client.set_budget(0, state=state, timeout_s=20.0)
            await trio.sleep(self._random.uniform(0.0, 0.5))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(30.0):
                await self._client.set_budget(0, timeout_s=20.0)

    async def fault_cancel(self) -> None:
        if self._streams:
            await self._random.choice(list(self._streams.values())).cancel()

    async def fault_vanish(self) -> None:
        peer = self._peer("vanish")
        await trio.sleep(self._random.uniform(0.5, 3.0))
        peer.kill()

    async def fault_slow_reader(self) -> None:
        self._peer("slow")

    def _peer(self, kind: str) -> subprocess.Popen[bytes]:
        peer = subprocess.Popen([sys.executable, str(PEERS), kind, self._info], stderr=subprocess.DEVNULL)
        self._peers.append(peer)
        for old in self._peers[:-8]:  # a machine of two cores can start only so many at once
            old.kill()
        return peer

    async def fault_pacing(self) -> None:
        mode = self._random.choice(("prioritize_graphics", "balance", "prioritize_compute"))
        await self._client.set_pacing(mode, target_tokens_per_second=self._random.choice((0, 0, 50.0)))

    async def fault_questions(self) -> None:
        """Asks for plans and figures during the faults."""
        await self._client.plan([self._floor / 2**20, self._full / 2**20])
        await self._client.caps_and_requirements()


def look(pid: int) -> tuple[float, int]:
    """The private memory (MiB) and the file descriptors of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024, len(os.listdir(f"/proc/{pid}/fd"))


async def storm(
    model: Path, *, seconds: float, seed: int, pause: float = 1.0, parallel: int = 1, stuck_s: float = 30.0
) -> Report:
    """Launches a sidecar on the emulated device and runs the storm on it.

    :param pause: seconds between two faults on average.
    :param parallel: conversations at once.
    :param stuck_s: a fault that takes longer than so many seconds is a problem.
    """
    with tempfile.TemporaryDirectory() as directory:
        connect_file = os.path.join(directory, "connect.json")
        async with frameshard.launch(
            model,
            device="emulated",
            mode="stream_only",
            n_ctx=1024,
            n_parallel=parallel,
            n_threads=1,
            connect_file=connect_file,
            embedder=models.resolve(models.ENCODER),
            log=subprocess.DEVNULL,
        ) as client:
            return await Storm(client, connect_file, seed, stuck_s=stuck_s, same_texts=parallel == 1).run(
                seconds, pause
            )


if __name__ == "__main__":
    pause = (1.0, "seconds between two faults on average")
    sys.exit(commandline.main(__doc__, storm, pause=pause, parallel=(1, "conversations at once")))
