"""An engine without a model, for tests of programs that use frameshard.

It is a real process that speaks the engine's side of the channel, started by the real broker::

    async with frameshard.launch("any name", engine=fake_engine(delay_s=0.01)) as client:
        assert (await client.ask("one two").completed()).text == "one two"

It answers a chat with the words of its last message, and a completion with those of its prompt, again and again up to
``max_tokens`` when `endless`. A token is a word with the space before it, so that a replayed stream can be compared.
The other arguments make it misbehave.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from frameshard import program
from frameshard.errors import BY_NAME, BudgetBelowFloor, ContextOverflow
from frameshard.wire import channel

__all__ = ["fake_engine"]

MIB = 1 << 20
N_PARALLEL = 4


def fake_engine(
    *,
    delay_s: float = 0.0,
    endless: bool = False,
    floor_mb: int = 16,
    full_mb: int = 256,
    n_ctx: int | None = None,
    fatal: str | None = None,
    crash_at_load: bool = False,
    crash_at_token: int | None = None,
    crash_when_idle: bool = False,
    poison: str | None = None,
    sick: str | None = None,
    hang_at_token: int | None = None,
    nonsense_at_token: int | None = None,
) -> tuple[str, ...]:
    """The command of a fake engine, for the `engine` option of :func:`frameshard.launch`.

    :param delay_s: pause before each token.
    :param endless: repeat the words until ``max_tokens``.
    :param floor_mb: least VRAM budget, in MiB; `full_mb` is all that it would use.
    :param n_ctx: words that a conversation's prompt may have; what the launch says by default.
    :param fatal: name of an error (``bad_model``) that loading ends with.
    :param crash_at_load: die by a signal while loading.
    :param crash_at_token: die by a signal before the token of this number of any job, each time again.
    :param crash_when_idle: die as soon as it is ready.
    :param poison: die by a signal before any token of a job that has this word.
    :param sick: path of a file; as long as it exists, die by a signal while loading.
    :param hang_at_token: stand still before this token, with the process alive.
    :param nonsense_at_token: send something that is no message instead of this token.
    """
    options: dict[str, object] = {
        "delay": delay_s,
        "floor": floor_mb,
        "full": full_mb,
        "n-ctx": n_ctx,
        "fatal": fatal,
        "crash-at-token": crash_at_token,
        "poison": poison,
        "sick": sick,
        "hang-at-token": hang_at_token,
        "nonsense-at-token": nonsense_at_token,
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
    history: list[list[int]] = field(default_factory=list)


class _FakeEngine:
    def __init__(self, sock: socket.socket, args: argparse.Namespace) -> None:
        self._sock = sock
        self._args = args
        self._reader = channel.Reader()
        self._jobs: dict[int, _Job] = {}
        self._budget = 0
        self._parked = False
        self._n_ctx = 0
        self._settings: dict[str, Any] = {}

    def run(self) -> None:
        due = 0.0
        while True:
            wait = max(0.0, due - time.monotonic()) if self._jobs and not self._parked else None
            readable, _, _ = select.select([self._sock], [], [], wait)
            if readable:
                data = self._sock.recv(1 << 16)
                if not data:
                    return
                for op in self._reader.feed(data):
                    if not self._obey(op):
                        return
            if time.monotonic() >= due and not self._parked:
                for job in list(self._jobs.values()):
                    self._step(job)
                due = time.monotonic() + self._args.delay

    def _say(self, kind: str, **fields: Any) -> None:
        self._sock.sendall(channel.pack({"ev": kind, **fields}))

    def _obey(self, op: dict[str, Any]) -> bool:
        kind = op["op"]
        if kind == "load":
            self._load(op)
        elif kind == "submit":
            self._submit(op)
        elif kind == "cancel":
            if self._jobs.pop(op["job"], None):
                self._say("cancelled", job=op["job"])
        elif kind == "budget":
            self._set_budget(op)
        elif kind == "plan":
            self._plan(op)
        elif kind == "stats":
            self._say("stats", seq=op["seq"], stats=self._stats())
        elif kind in ("frame_block", "pacing"):
            self._settings[kind] = op
        elif kind == "ping":
            self._say("pong", seq=op["seq"])
        elif kind == "alive":
            self._say("alive")
        return bool(kind != "stop")

    def _stats(self) -> dict[str, Any]:
        return {"jobs_running": len(self._jobs), "used_bytes": self._used(), "settings": self._settings}

    def _load(self, op: dict[str, Any]) -> None:
        if self._args.crash_at_load or (self._args.sick and os.path.exists(self._args.sick)):
            print("the device is on fire", file=sys.stderr, flush=True)
            _die()
        if self._args.fatal:
            self._say("fatal", error=BY_NAME[self._args.fatal]("as the test wants").to_wire())
            sys.exit(3)
        self._budget = op["vram_budget_bytes"]
        if 0 < self._budget < self._floor():
            self._say("fatal", error=self._below_floor(self._budget).to_wire())
            sys.exit(3)
        self._n_ctx = self._args.n_ctx or op["n_ctx"]
        info = {
            "name": os.path.basename(op["model"]),
            "arch": "echo",
            "device": op["device"],
            "n_ctx": self._n_ctx,
            "n_parallel": op["n_parallel"],
            "n_vocab": 2**31,
            "n_layer": 0,
            "chat": True,
            "vision": "",
            "floor_bytes": self._floor(),
            "full_bytes": self._args.full * MIB,
            "budget_bytes": self._budget,
            "plan": {},
        }
        self._watch()
        self._say("ready", info=info)
        if self._args.crash_when_idle:
            _die()

    def _submit(self, op: dict[str, Any]) -> None:
        text = op["messages"][-1]["content"] if op["kind"] == "chat" else op["prompt"]
        prompt = " ".join(message["content"] for message in op["messages"]) if op["kind"] == "chat" else text
        words = [word if at == 0 else f" {word}" for at, word in enumerate(text.split())] or [""]
        most = op["params"]["max_tokens"]
        job = _Job(
            number=op["job"],
            words=words,
            max_tokens=most if self._args.endless else min(most, len(words)),
            n_prompt=len(prompt.split()),
            produced=len(op.get("resume", [])),
        )
        if job.n_prompt > self._n_ctx:
            overflow = ContextOverflow("too many words", n_prompt=job.n_prompt, n_ctx=self._n_ctx)
            self._say("failed", job=job.number, error=overflow.to_wire())
            return
        expected = [self._token(job, index) for index in range(job.produced)]
        if op.get("resume", []) != expected or op.get("history", [[job.n_prompt, 1]]) != [[job.n_prompt, 1]]:
            error = BY_NAME["bad_argument"]("resumed with tokens that are not mine")
            self._say("failed", job=job.number, error=error.to_wire())
            return
        self._jobs[job.number] = job
        self._say("started", job=job.number, n_prompt=job.n_prompt, history=[[job.n_prompt, 1]])

    def _step(self, job: _Job) -> None:
        index = job.produced
        if index >= job.max_tokens:
            del self._jobs[job.number]
            reason = "length" if self._args.endless else "stop"
            self._say(
                "done",
                job=job.number,
                reason=reason,
                n_prompt=job.n_prompt,
                n_generated=index,
                prefill_s=0.0,
                decode_s=self._args.delay * index,
            )
            return
        if index == self._args.crash_at_token or self._args.poison in job.words:
            _die()
        if index == self._args.hang_at_token:
            signal.pause()
        if index == self._args.nonsense_at_token:
            self._sock.sendall(b"\xff" * 8)
        word = job.words[index % len(job.words)]
        if index and not index % len(job.words):
            word = f" {word}"
        job.produced += 1
        self._say("token", job=job.number, n=index, id=self._token(job, index), text=word)

    def _token(self, job: _Job, index: int) -> int:
        return sum(job.words[index % len(job.words)].encode()) + index

    def _set_budget(self, op: dict[str, Any]) -> None:
        self._parked = op["state"] == "parked"
        if 0 < op["bytes"] < self._floor():
            error = self._below_floor(op["bytes"])
            self._say("budget", seq=op["seq"], phase="refused", error=error.to_wire())
            return
        self._budget = op["bytes"]
        self._say("budget", seq=op["seq"], phase="lease", budget_bytes=self._budget, seconds=0.0)
        released = {"budget_bytes": self._budget, "used_bytes": self._used(), "seconds": 0.0}
        self._say("budget", seq=op["seq"], phase="released", **released)
        self._say("budget", seq=op["seq"], phase="observed", observed_bytes=None, seconds=0.0)

    def _watch(self) -> None:
        sizes = {"used_bytes": self._used(), "floor_bytes": self._floor(), "full_bytes": int(self._args.full * MIB)}
        self._say("watch", **sizes, total_bytes=None, free_bytes=None, appeared=[], excess_bytes=0)

    def _plan(self, op: dict[str, Any]) -> None:
        rows = []
        for budget in op["budgets"]:
            fits = budget == 0 or budget >= self._floor()
            times = {"ttft_s": 0.001 * op["prompt_tokens"], "tokens_per_second": 100.0} if fits else {}
            held = {"resident_bytes": budget, "streamed_bytes": 0, "cpu_bytes": 0}
            rows.append(
                {"vram_budget_bytes": budget, "fits": fits, "ttft_s": None, "tokens_per_second": None, **times, **held}
            )
        self._say("plan", seq=op["seq"], rows=rows)

    def _floor(self) -> int:
        return int(self._args.floor * MIB)

    def _used(self) -> int:
        full = int(self._args.full * MIB)
        if self._parked:
            return 0
        return min(self._budget, full) if self._budget else full

    def _below_floor(self, budget: int) -> BudgetBelowFloor:
        floor = self._floor()
        return BudgetBelowFloor(
            f"the budget is below the floor of {self._args.floor} MiB", budget_bytes=budget, floor_bytes=floor
        )


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _main() -> None:
    parser = argparse.ArgumentParser(prog="frameshard.testing")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--floor", type=int, default=16)
    parser.add_argument("--full", type=int, default=256)
    for name in ("--fatal", "--poison", "--sick"):
        parser.add_argument(name)
    parser.add_argument("--n-ctx", type=int)
    for name in ("--crash-at-token", "--hang-at-token", "--nonsense-at-token"):
        parser.add_argument(name, type=int)
    for name in ("--endless", "--crash-at-load", "--crash-when-idle"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    with socket.socket(fileno=args.fd) as sock:
        _FakeEngine(sock, args).run()


if __name__ == "__main__":
    _main()
