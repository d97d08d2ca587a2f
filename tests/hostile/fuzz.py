"""Sends requests with wrong values in every field to a running sidecar, which also serves a good client.

    python tests/hostile/fuzz.py MODEL.gguf --seconds 600 --seed 1

Each message is made from a valid one. Some of its fields get values of another type, size or meaning, and sometimes the
frame itself is damaged. Messages that are still valid are carried out by the real engine. The broker must answer a ping
after each message, no engine may die, and the text of the good client must not change.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import commandline
import msgpack
import trio

import frameshard
from frameshard import errors, models
from frameshard.wire import messages as m

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a program Python does not search tests/
from sidecars import RawPeer, raw_peer

ANSWER_S = 30.0
DROPPED_S = 0.3
"""After so many seconds without an answer to a ping, a new connection is made: the broker drops peers that break the
protocol."""

ASIDE_EVERY = 25
"""The number of messages between two checks of the engine. The checks also restore the lease."""

INTEGERS = (-1, 0, 1, 2, 31, 33, 255, 65536, 2**31, 2**32, 2**53 - 1, 2**53, 2**63, 2**64 - 1, -(2**63))
NUMBERS = (0.0, -0.0, 1e-12, 0.01, 1.0, 1e6, 1e300, -1.0, float("nan"), float("inf"), float("-inf"))
SCHEMAS = (
    '{"type":["string","null"]}',
    '{"type":"object","properties":{"a":{"type":"string"}},"required":null}',
    '{"const":"\\u0000"}',
    '{"const":"a\\\\b\\"c\\nd"}',
    '{"const":' + "[" * 200 + "]" * 200 + "}",
    '{"$ref":"#"}',
    '{"$ref":"http://example.com/schema"}',
    '{"type":"string","pattern":"(a+)+$"}',
    '{"type":"string","pattern":"("}',
    '{"type":"array","items":{"type":"integer"},"minItems":1000000000}',
    '{"enum":[]}',
    "{}",
    "[]",
    "null",
    "{",
    '{"anyOf":[' + ",".join(f'{{"type":"string","maxLength":{n}}}' for n in range(90)) + "]}",
)
TEXTS = (
    "",
    "\0",
    "a",
    "../../../etc/passwd",
    "ipc:///tmp/x",
    "<|im_start|>system\n",
    "{{ 9**9**9 }}",
    "\U0001f409" * 8000,
    "x" * 65535,
    "x" * 65536,
    "x" * 70000,
    *SCHEMAS,
)
WRONG: tuple[Any, ...] = (None, True, False, b"", b"\xff" * 300, [], [[]] * 20, {}, {"a": 1}, {"t": {"t": {"t": {}}}})
TALK = {"kind": "chat", "messages": [{"role": "user", "content": "hello"}], "sampling": {"max_tokens": 40}}
BASES: dict[str, list[dict[str, Any]]] = {
    "hello": [{"protocol": m.VERSION, "client": "fuzz"}],
    "submit": [
        {"kind": "completion", "prompt": "once upon a time", "sampling": {"max_tokens": 8}},
        {**TALK, "tools": [{"name": "look"}], "tool_choice": "required"},
        {**TALK, "thinking": "shown"},
    ],
    "cancel": [{"job": 1}],
    "priority_set": [{"job": 1, "priority": 0}],
    "count_tokens": [{"prompt": "once upon a time"}, {"messages": TALK["messages"]}],
    "adapter_load": [{"name": "pirate", "path": "/no/such.gguf"}],
    "adapter_unload": [{"name": "pirate"}],
    "kv_save": [{"conversation": "inn", "path": "/no/such/directory/kv"}],
    "kv_load": [{"conversation": "inn", "path": "/no/such/directory/kv"}],
    "credit": [{"job": 1, "next": 8}],
    "budget_set": [{"vram_budget_bytes": 0}],
    "budget_get": [{}],
    "caps_and_requirements": [{}],
    "plan": [{"budgets": [1 << 28], "prompt_tokens": 64}],
    "embed": [{"texts": ["once upon a time"]}],
    "frame_block": [{}],
    "pacing": [{"scheduling_mode": "balance", "target_tokens_per_second": 0.0}],
    "model_info": [{}],
    "stats": [{}],
    "ping": [{}],
    "bye": [{}],
}
"""Valid messages of each kind, except for ``shutdown``, which would end the sidecar."""

NESTED: dict[str, dict[str, Any]] = {
    "sampling": {each.name: None for each in dataclasses.fields(m.Sampling)},
    "messages": {each.name: None for each in dataclasses.fields(m.ChatMessage)} | {"role": "user", "content": "hello"},
    "tools": {each.name: None for each in dataclasses.fields(m.Tool)} | {"name": "look"},
    "images": {each.name: None for each in dataclasses.fields(m.Image)},
}


@dataclass
class Report:
    seed: int
    sent: int = 0
    refused: int = 0
    taken: int = 0
    connections: int = 0
    answers: int = 0
    changed: int = 0
    restarts: int = 0
    slowest_ping_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Fuzzer:
    """Makes messages. The same seed gives the same messages."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        pools: list[Callable[[], Any]] = [
            lambda: self._random.choice(INTEGERS),
            lambda: self._random.choice(NUMBERS),
            lambda: self._random.choice(TEXTS),
            lambda: self._random.choice(WRONG),
            lambda: self._random.randrange(2**16),
        ]
        if depth < 3:
            pools.append(lambda: [self.value(depth + 1) for _ in range(self._random.choice((1, 2, 17, 40)))])
            pools.append(lambda: {str(i): self.value(depth + 1) for i in range(self._random.choice((1, 3, 70)))})
        return self._random.choice(pools)()

    def nested(self, name: str) -> Any:
        """A record of the right kind with some wrong fields, or a list of such records."""
        fields = dict(NESTED[name])
        for key in self._random.sample(list(fields), self._random.randint(1, len(fields))):
            fields[key] = self.value(1)
        fields = {key: value for key, value in fields.items() if value is not None}
        if name == "sampling":
            fields.setdefault("max_tokens", 8)
            if self._random.random() < 0.5:
                fields["json_schema"] = self._random.choice(SCHEMAS)
            return fields
        return [fields] * self._random.choice((1, 2, 9))

    def fields(self) -> dict[str, Any]:
        """The map of a message, without number and epoch."""
        kind = self._random.choice(list(BASES))
        fields = {"t": kind, **self._random.choice(BASES[kind])}
        allowed = [each.name for each in dataclasses.fields(m.REQUESTS[kind]) if each.name not in ("id", "epoch")]
        for name in self._random.sample(allowed, min(len(allowed), self._random.randint(0, 3))):
            fields[name] = self.nested(name) if name in NESTED and self._random.random() < 0.7 else self.value()
        if self._random.random() < 0.05:
            fields[self._random.choice(("x", "t", ""))] = self.value()
        return fields

    def frames(self, fields: dict[str, Any]) -> list[bytes]:
        """The message's parts; one in ten is damaged."""
        frame = bytearray(msgpack.packb(fields))
        if self._random.random() < 0.9:
            return [bytes(frame)]
        for _ in range(self._random.randint(1, 4)):
            frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        cut = bytes(frame[: self._random.randint(0, len(frame))])
        return [cut] * self._random.choice((1, 1, 2, 5))

    def wrong_number(self, right: int) -> Any:
        """The right number, or sometimes another value."""
        return self.value() if self._random.random() < 0.02 else right


async def attack(client: frameshard.Client, info: frameshard.ConnectInfo, report: Report, seconds: float) -> None:
    fuzzer, numbers, started = Fuzzer(report.seed), itertools.count(1), trio.current_time()
    budget = await client.budget()
    while trio.current_time() - started < seconds and not report.problems:
        async with connected(info) as peer:
            report.connections += 1
            while trio.current_time() - started < seconds and not report.problems:
                fields = fuzzer.fields()
                fields["id"] = fuzzer.wrong_number(next(numbers))
                fields["epoch"] = fuzzer.wrong_number(info.epoch)
                if fields["t"] == "submit":
                    fields["job"] = fuzzer.wrong_number(next(numbers))
                report.sent += 1
                await peer.send(*fuzzer.frames(fields))
                if fields["t"] == "bye" or not await alive(peer, next(numbers), report):
                    break  # the broker has dropped this peer, which is allowed
                if report.sent % ASIDE_EVERY == 0:
                    await aside(client, budget, report, fields)
    if not report.taken:
        report.problems.append("nothing was ever taken: what is sent is never valid")


@asynccontextmanager
async def connected(info: frameshard.ConnectInfo) -> AsyncIterator[RawPeer]:
    async with raw_peer(info) as peer:
        with trio.fail_after(ANSWER_S):
            await peer.greet()
        yield peer


async def alive(peer: RawPeer, number: int, report: Report) -> bool:
    """Whether a ping is answered. Counts the errors that come before its answer."""
    sent_at = trio.current_time()
    await peer.say(m.Ping(number, peer.epoch))
    with trio.move_on_after(DROPPED_S):
        while True:
            answer = await peer.hear()
            if getattr(answer, "id", None) == number:
                if isinstance(answer, m.Error):
                    return False  # the session is gone
                report.slowest_ping_s = max(report.slowest_ping_s, trio.current_time() - sent_at)
                return True
            if isinstance(answer, m.Error):
                report.refused += 1
            else:
                report.taken += 1
    return False


async def aside(client: frameshard.Client, budget: frameshard.Budget, report: Report, last: dict[str, Any]) -> None:
    """Checks that the engine is alive, and that the lease can be restored."""
    with trio.fail_after(ANSWER_S):
        broker = (await client.stats()).broker
        if broker.engine_restarts != report.restarts:
            report.restarts = broker.engine_restarts
            report.problems.append(f"the engine died within {ASIDE_EVERY} messages up to number {report.sent}: {last}")
        try:
            await client.set_budget(budget.full_bytes / 2**20, timeout_s=20.0)
        except errors.FrameshardError as error:
            report.problems.append(f"the lease cannot be set back: {error}")
        await client.set_pacing("balance", target_tokens_per_second=0.0)


async def good_client(client: frameshard.Client, report: Report, over: trio.Event) -> None:
    sampling = frameshard.Sampling(max_tokens=40, temperature=0.0)
    expected = (await client.complete("the innkeeper", sampling=sampling).completed()).text
    while not over.is_set():
        try:
            found = (await client.complete("the innkeeper", sampling=sampling).completed()).text
        except errors.FrameshardError as error:
            report.problems.append(f"the good client's job: {error.name}: {error}")
            return
        report.answers += 1
        report.changed += found != expected


async def fuzz(model: Path, *, seconds: float, seed: int) -> Report:
    """Launches a sidecar on the emulated device and sends it wrong messages."""
    report, over = Report(seed), trio.Event()
    scope = frameshard.launch(
        model,
        device="emulated",
        mode="stream_only",
        n_ctx=256,
        n_parallel=4,
        n_threads=1,
        embedder=models.resolve(models.ENCODER),
        log=subprocess.DEVNULL,
    )
    async with scope as client, trio.open_nursery() as nursery:
        nursery.start_soon(good_client, client, report, over)
        try:
            await attack(client, client.info, report, seconds)
            await client.set_pacing("balance", target_tokens_per_second=0.0)  # the last job may be slowed down
        finally:
            over.set()
    return report


if __name__ == "__main__":
    sys.exit(commandline.main(__doc__, fuzz))
