"""An engine without a model, for tests of programs that use frameshard.

It is a real process with the messages of :mod:`frameshard.wire.engine`. The real broker starts it::

    async with frameshard.launch("any name", engine=fake_engine(delay_s=0.01)) as client:
        assert (await client.ask("one two").completed()).text == "one two"

It answers a chat with the words of the last message, and a completion with the words of the prompt. With `endless` it
repeats them up to ``max_tokens``. A token is a word with the space before it, so a resumed stream can be compared. Any
file serves as an adapter; a job with adapters gets their names and scales before its words. A job that thinks gets
three words of thought, or as many as its limit allows. With a `tool_choice` that asks for calls, the answer is no text
but a call of each tool, or of the one that is named: the last message, which should be a JSON object, is the arguments.
The other arguments cause faults.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from frameshard import program, system
from frameshard.errors import (
    BY_NAME,
    BadArgument,
    ContextOverflow,
    FrameshardError,
    ModelNotFound,
    below_floor,
    below_host_floor,
    unknown_adapter,
)
from frameshard.sentences import Splitter
from frameshard.wire import channel
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.launch import adapter_of

__all__ = ["fake_engine"]

MIB = 1 << 20
N_PARALLEL = 4
N_THOUGHT = 3
"""Tokens of a thought without a limit."""


def fake_engine(
    *,
    delay_s: float = 0.0,
    endless: bool = False,
    floor_mb: int = 16,
    full_mb: int = 256,
    host_floor_mb: int = 8,
    host_full_mb: int = 64,
    n_ctx: int | None = None,
    fatal: str | None = None,
    crash_at_load: bool = False,
    crash_at_token: int | None = None,
    crash_when_idle: bool = False,
    poison: str | None = None,
    sick: str | None = None,
    hang_at_token: int | None = None,
    nonsense_at_token: int | None = None,
    loading: int | None = None,
) -> tuple[str, ...]:
    """The command of a fake engine, for the `engine` option of :func:`frameshard.launch`.

    :param delay_s: pause before each token.
    :param endless: repeat the words until ``max_tokens``.
    :param floor_mb: smallest VRAM budget, in MiB.
    :param full_mb: VRAM that it holds without a limit, in MiB.
    :param host_floor_mb: smallest host budget, in MiB.
    :param host_full_mb: host memory that it holds without a limit, in MiB, of 1 GiB of which half is free.
    :param n_ctx: the most words of a prompt; by default the launch option of this name.
    :param fatal: name of an error, such as ``bad_model``, that the load fails with.
    :param crash_at_load: die by a signal while loading.
    :param crash_at_token: die by a signal before the token with this number, in every job.
    :param crash_when_idle: die as soon as it is ready.
    :param poison: die by a signal before any token of a job whose text has this word.
    :param sick: path of a file. While it exists, die by a signal while loading.
    :param hang_at_token: hang before the token with this number. The process stays alive.
    :param nonsense_at_token: send bytes that are not a message before the token with this number.
    :param loading: report the load in so many steps.
    """
    options: dict[str, object] = {
        "delay": delay_s,
        "floor": floor_mb,
        "full": full_mb,
        "host-floor": host_floor_mb,
        "host-full": host_full_mb,
        "n-ctx": n_ctx,
        "fatal": fatal,
        "crash-at-token": crash_at_token,
        "poison": poison,
        "sick": sick,
        "hang-at-token": hang_at_token,
        "nonsense-at-token": nonsense_at_token,
        "loading": loading,
    }
    flags = {"endless": endless, "crash-at-load": crash_at_load, "crash-when-idle": crash_when_idle}
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return program.command("frameshard.testing", *words, *(f"--{name}" for name, on in flags.items() if on))


@dataclass
class _Job:
    number: int
    words: list[str]
    max_tokens: int
    n_prompt: int
    produced: int
    mark: Callable[..., tuple[str, tuple[int, ...]]] | None
    """:meth:`frameshard.sentences.Splitter.feed`, where sentences are asked for."""
    n_thought: int = 0
    """So many tokens are thought before the words."""
    calls: tuple[m.ToolCall, ...] = ()
    """They come with the last of the words, none of which is sent."""


class _FakeEngine:
    def __init__(self, sock: socket.socket, args: argparse.Namespace) -> None:
        self._sock = sock
        self._args = args
        self._reader = channel.Reader()
        self._jobs: dict[int, _Job] = {}
        self._budget = self._host_budget = 0
        self._parked = False
        self._n_ctx = 0
        self._settings: dict[str, Any] = {}
        self._adapters: dict[str, int] = {}  # their sizes by name

    def run(self) -> None:
        due = 0.0
        while True:
            wait = max(0.0, due - time.monotonic()) if self._jobs and not self._parked else None
            readable, _, _ = select.select([self._sock], [], [], wait)
            if readable:
                data = self._sock.recv(1 << 16)
                if not data:
                    return
                for fields in self._reader.feed(data):
                    command = em.read_command(fields)
                    if isinstance(command, em.Stop):
                        return
                    self._obey(command)
            if time.monotonic() >= due and not self._parked:
                for job in list(self._jobs.values()):
                    self._step(job)
                due = time.monotonic() + self._args.delay

    def _say(self, event: em.Event) -> None:
        self._sock.sendall(em.pack(event))

    def _obey(self, command: em.Command) -> None:
        if isinstance(command, em.EngineConfig):
            self._load(command)
        elif isinstance(command, em.Submit):
            self._submit(command)
        elif isinstance(command, em.Cancel):
            if self._jobs.pop(command.job, None):
                self._say(em.Cancelled(command.job))
        elif isinstance(command, em.SetBudget):
            self._set_budget(command)
        elif isinstance(command, em.LoadAdapter):
            self._load_adapter(command)
        elif isinstance(command, em.UnloadAdapter):
            self._adapters.pop(command.name, None)
            self._say_adapters(command.seq)
        elif isinstance(command, em.MakePlans):
            self._plan(command)
        elif isinstance(command, em.CountTokens):
            contents = [message.content for message in command.messages] or [command.prompt]
            n_tokens = len(" ".join(contents).split())
            self._say(em.TokenCount(command.seq, n_tokens, max(0, self._n_ctx - n_tokens)))
        elif isinstance(command, em.GetStats):
            self._say(em.Stats(command.seq, self._stats()))
        elif isinstance(command, em.OpenFrameBlock | em.SetPacing):
            self._settings[em.NAMES[type(command)]] = asdict(command)
        elif isinstance(command, em.SaveKv | em.LoadKv):
            self._say(em.Kv(command.seq, detail="there is no model"))
        elif isinstance(command, em.Ping):
            self._say(em.Pong(command.seq))
        elif isinstance(command, em.AskAlive):
            self._say(em.Alive())

    def _stats(self) -> dict[str, Any]:
        return {"jobs_running": len(self._jobs), "used_bytes": self._used(), "settings": self._settings}

    def _load(self, config: em.EngineConfig) -> None:
        if self._args.crash_at_load or (self._args.sick and os.path.exists(self._args.sick)):
            print("the device is on fire", file=sys.stderr, flush=True)
            _die()
        if self._args.fatal:
            self._fail(BY_NAME[self._args.fatal]("as the test wants"))
        self._budget = config.vram_budget_bytes
        if 0 < self._budget < self._floor():
            self._fail(below_floor(self._budget, self._floor()))
        self._host_budget = config.host_budget_bytes
        if 0 < self._host_budget < self._args.host_floor * MIB:
            self._fail(below_host_floor(self._host_budget, self._args.host_floor * MIB))
        for done in range(self._args.loading):
            self._say(em.Loading("read", done + 1, self._args.loading))
        self._n_ctx = self._args.n_ctx or config.n_ctx
        for named in config.adapters:
            name, path = adapter_of(named)
            if not os.path.isfile(path):
                self._fail(ModelNotFound(f"cannot read {path}", path=path, adapter=name))
            self._adapters[name] = os.path.getsize(path)
        model = m.ModelInfo(
            name=os.path.basename(config.model),
            arch="echo",
            device=config.device,
            n_ctx=self._n_ctx,
            n_parallel=config.n_parallel,
            n_vocab=2**31,
            n_layer=0,
            chat=True,
            floor_bytes=self._floor(),
            full_bytes=self._args.full * MIB,
            plan={},
            fingerprint=hashlib.sha256(config.model.encode()).hexdigest(),
            template_fingerprint=hashlib.sha256(b"the last message").hexdigest(),
            thinks=True,
        )
        self._watch()
        self._say(em.Ready(model, self._budget, n_ubatch=config.n_ubatch, n_threads=1, load_s=0.0))
        if self._args.crash_when_idle:
            _die()

    def _fail(self, error: FrameshardError) -> NoReturn:
        self._say(em.Fatal(m.ErrorInfo.of(error)))
        sys.exit(3)

    def _load_adapter(self, command: em.LoadAdapter) -> None:
        if not os.path.isfile(command.path):
            error = ModelNotFound(f"cannot read {command.path}", path=command.path)
            self._say(em.Adapters(command.seq, error=m.ErrorInfo.of(error)))
            return
        self._adapters[command.name] = os.path.getsize(command.path)
        self._say_adapters(command.seq)

    def _say_adapters(self, seq: int) -> None:
        loaded = tuple(m.AdapterInfo(name, size) for name, size in sorted(self._adapters.items()))
        self._say(em.Adapters(seq, loaded, self._floor()))

    def _submit(self, request: em.Submit) -> None:
        contents = [message.content for message in request.messages] or [request.prompt]
        adapted = [f"{adapter.name}={adapter.scale:g}" for adapter in request.adapters]
        said = [*adapted, *contents[-1].split()]
        words = [word if at == 0 else f" {word}" for at, word in enumerate(said)] or [""]
        most = 0 if request.warm_up else request.sampling.max_tokens
        n_thought = 0 if request.thinking == "off" else request.thinking_tokens or N_THOUGHT
        called = [tool.name for tool in request.tools if request.tool_choice in ("required", tool.name)]
        job = _Job(
            number=request.job,
            words=words,
            max_tokens=most if self._args.endless and not called else min(most, n_thought + len(words)),
            n_prompt=len(" ".join(contents).split()),
            produced=len(request.given.split()) + len(request.resume),
            mark=Splitter().feed if request.sentences else None,
            n_thought=n_thought,
            calls=tuple(m.ToolCall(f"call{at}", name, contents[-1]) for at, name in enumerate(called)),
        )
        for adapter in request.adapters:
            if adapter.name not in self._adapters:
                why = unknown_adapter(adapter.name, self._adapters)
                self._say(em.Failed(job.number, m.ErrorInfo.of(why)))
                return
        if job.n_prompt > self._n_ctx:
            overflow = ContextOverflow("too many words", n_prompt=job.n_prompt, n_ctx=self._n_ctx)
            self._say(em.Failed(job.number, m.ErrorInfo.of(overflow)))
            return
        history = ((job.n_prompt, job.n_prompt, 1),)
        n_given = job.produced - len(request.resume)
        expected = tuple(self._token(job, index) for index in range(n_given, job.produced))
        if request.resume != expected or (request.history or history) != history:
            error = BadArgument("resumed with tokens that this engine has not produced")
            self._say(em.Failed(job.number, m.ErrorInfo.of(error)))
            return
        for index in range(job.produced):
            self._text(job, index)
        self._jobs[job.number] = job
        seed = request.sampling.seed or 0
        n_reused = max(job.n_prompt - 1, 0)  # as if the KV cache had all but the token that is always computed
        self._say(em.Started(job.number, job.n_prompt, n_reused, seed=seed, history=history, n_given=n_given))

    def _step(self, job: _Job) -> None:
        index = job.produced
        if index >= job.max_tokens:
            del self._jobs[job.number]
            reason: m.Reason = "stop" if job.max_tokens and not self._args.endless else "length"
            if job.calls:
                reason = "tool_calls" if index == job.n_thought + len(job.words) else "length"
            decode_s = self._args.delay * index
            n_left = max(0, self._n_ctx - job.n_prompt - index)
            self._say(em.Done(job.number, reason, job.n_prompt, index, 0.0, decode_s, n_left))
            return
        if index == self._args.crash_at_token or self._args.poison in job.words:
            _die()
        if index == self._args.hang_at_token:
            while True:
                time.sleep(60)
        if index == self._args.nonsense_at_token:
            self._sock.sendall(b"\xff" * 8)
        job.produced += 1
        self._say(em.Token(job.number, index, self._token(job, index), *self._text(job, index)))

    def _text(self, job: _Job, index: int) -> tuple[str, tuple[int, ...], str, tuple[m.ToolCall, ...]]:
        """What a token sets free, where sentences end in it, its thought and its calls. To be asked for each token
        once, in order."""
        if index < job.n_thought:
            return "", (), f"hm{index} ", ()
        at = index - job.n_thought
        if job.calls:
            return "", (), "", job.calls if at + 1 == len(job.words) else ()
        word = job.words[at % len(job.words)]
        if at and not at % len(job.words):
            word = f" {word}"
        return (*(job.mark(word, last=index + 1 == job.max_tokens) if job.mark else (word, ())), "", ())

    def _token(self, job: _Job, index: int) -> int:
        return sum(job.words[index % len(job.words)].encode()) + index

    def _set_budget(self, command: em.SetBudget) -> None:
        budget = command.vram_budget_bytes
        if 0 < budget < self._floor():
            self._say(em.BudgetRefused(command.seq, m.ErrorInfo.of(below_floor(budget, self._floor()))))
            return
        host_budget, host_floor = command.host_budget_bytes, self._args.host_floor * MIB
        if 0 < host_budget < host_floor:
            self._say(em.BudgetRefused(command.seq, m.ErrorInfo.of(below_host_floor(host_budget, host_floor))))
            return
        self._parked = command.parked
        self._budget, self._host_budget = budget, host_budget
        self._say(em.BudgetGranted(command.seq, budget, 0.0))
        self._say(em.BudgetReleased(command.seq, budget, self._used(), 0.0, host_budget, self._host_used()))
        self._say(em.BudgetObserved(command.seq, None, 0.0, self._host_used()))

    def _watch(self) -> None:
        device = (self._used(), self._floor(), self._args.full * MIB, None, None, (), 0)
        self._say(em.Watch(*device, self._host_used(), self._args.host_floor * MIB, 1 << 30, 1 << 29))

    def _plan(self, question: em.MakePlans) -> None:
        rows = []
        for budget in question.budgets:
            fits = budget == 0 or budget >= self._floor()
            rows.append(
                m.PlanRow(
                    vram_budget_bytes=budget,
                    fits=fits,
                    ttft_s=0.001 * question.prompt_tokens if fits else None,
                    tokens_per_second=100.0 if fits else None,
                    resident_bytes=budget,
                    streamed_bytes=0,
                    cpu_bytes=0,
                )
            )
        self._say(em.Plans(question.seq, tuple(rows)))

    def _floor(self) -> int:
        return int(self._args.floor * MIB) + sum(self._adapters.values())

    def _host_used(self) -> int:
        full = int(self._args.host_full * MIB)
        return min(self._host_budget, full) if self._host_budget else full

    def _used(self) -> int:
        full = int(self._args.full * MIB)
        if self._parked:
            return 0
        return min(self._budget, full) if self._budget else full


def _die() -> NoReturn:
    system.kill(os.getpid())
    raise AssertionError


def _main() -> None:
    parser = argparse.ArgumentParser(prog="frameshard.testing")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--floor", type=int, default=16)
    parser.add_argument("--full", type=int, default=256)
    parser.add_argument("--host-floor", type=int, default=8)
    parser.add_argument("--host-full", type=int, default=64)
    for name in ("--fatal", "--poison", "--sick"):
        parser.add_argument(name)
    parser.add_argument("--n-ctx", type=int)
    for name in ("--crash-at-token", "--hang-at-token", "--nonsense-at-token"):
        parser.add_argument(name, type=int)
    parser.add_argument("--loading", type=int, default=0)
    for name in ("--endless", "--crash-at-load", "--crash-when-idle"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    with system.inherited_socket(args.fd) as sock:
        _FakeEngine(sock, args).run()


if __name__ == "__main__":
    _main()
