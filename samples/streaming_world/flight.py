"""The flight: frames, the streaming pool, the villagers' talk and the recording."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from pool import Pool
from scene import Scene
from talk import ABOUT, QUESTIONS, VILLAGERS
from world import World

import frameshard
from frameshard.errors import ConnectionLost, FrameshardError, Unsupported
from frameshard.frame import FrameBlock
from frameshard.models import resolve

MIB = 1 << 20
SIZE = (960, 540)
FRAME_S = 1 / 60
MOST_STEP_S = 1 / 20
"""A frame moves the camera by no more than this time, so that the flight is the same on a slow machine."""

MOST_LOAD_S = 20.0
"""The flight begins after so many seconds, even if not all that is in view is there."""

SETTLED_S = 1.0
"""What has no room gets none, if the pool's limit has not changed for so long."""

STREAM_S, LOAD_S = 0.007, 0.05
"""So long may the pool work in a frame of the flight, and of the loading screen. Where drawing takes longer than twice
that time, it may work half as long as that."""

SAMPLE_S = 1 / 30
AGAIN_S = 1.0
"""After an error a villager is asked again in so many seconds."""

TURNS = 10
"""How often the other tasks have a turn in a frame that is late."""

ANSWER = frameshard.Sampling(max_tokens=48, temperature=0.6, repeat_penalty=1.1, seed=7)
GAME, POOL, SIDECAR, FREE = (0.55, 0.56, 0.60), (0.35, 0.65, 0.41), (0.16, 0.50, 0.62), (0.20, 0.20, 0.22)


@dataclass
class Flight:
    """A recording. Times are in seconds since the start of the flight; `frames`, `samples` and `deltas` have one row
    each for:

    - a frame: when it began, milliseconds until the next one began, milliseconds of work, of GPU time; bytes that the
      pool wants, may hold and holds; bytes that the sidecar may hold; cells in view; cells of those that are missing
    - a sample of the sidecar: the times before and after; bytes that it holds, that the driver counts for it, and for
      all programs on the device (None where the driver does not say); the least bytes that the pool held meanwhile
    - a part of an answer: when it came, and how many tokens it has
    """

    kind: str
    model: str
    device: str
    renderer: str
    grant_bytes: int
    fixed_bytes: int
    borders: list[float]
    seconds: float = 0.0
    frames: list[tuple[float, float, float, float, int, int, int, int, int, int]] = field(default_factory=list)
    samples: list[tuple[float, float, int, int | None, int | None, int]] = field(default_factory=list)
    deltas: list[tuple[float, int]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    n_asked: int = 0
    steps: int = 0

    @property
    def largest_bytes(self) -> int:
        """The largest sum of what game, pool and sidecar hold: by each sample, and by each frame with what the sidecar
        may hold then."""
        frames = (frame[6] + frame[7] for frame in self.frames)
        samples = (sample[2] + sample[5] for sample in self.samples)
        return self.fixed_bytes + max(itertools.chain(frames, samples), default=0)

    @property
    def n_lost(self) -> int:
        """Questions whose answer is missing or was cut off by anything but its end."""
        return self.n_asked - sum(answer["reason"] in ("stop", "length") for answer in self.answers)

    def figures(self) -> dict[str, float | str]:
        """The flight in figures, for its summary and for tables."""
        frames = self.frames or [(0.0,) * 3 + (0,) * 7]
        spread = sorted(frame[1] for frame in frames)
        held = [sample[2] for sample in self.samples] or [0]
        tokens = sum(count for _, count in self.deltas)
        return {
            "kind": self.kind,
            "model": self.model,
            "renderer": self.renderer,
            "grant_mb": self.grant_bytes / MIB,
            "largest_mb": self.largest_bytes / MIB,
            "seconds": self.seconds,
            "frames": len(self.frames),
            "late": sum(frame[2] > 1000 * FRAME_S for frame in self.frames),
            "p99_ms": spread[int(0.99 * (len(spread) - 1))],
            "cells": sum(frame[8] for frame in self.frames),
            "misses": sum(frame[9] for frame in self.frames),
            "least_pool_mb": min(frame[6] for frame in frames) / MIB,
            "most_pool_mb": max(frame[6] for frame in frames) / MIB,
            "least_sidecar_mb": min(held) / MIB,
            "most_sidecar_mb": max(held) / MIB,
            "steps": self.steps,
            "asked": self.n_asked,
            "answers": len(self.answers),
            "lost": self.n_lost,
            "tokens": tokens,
            "tokens_per_s": tokens / max(self.seconds, 1e-9),
        }

    def summary(self) -> str:
        return (
            "{kind}: {frames} frames in {seconds:.1f} s, {late} late, 99 % within {p99_ms:.1f} ms; "
            "{misses} misses in {cells} cells drawn\n"
            "{answers} answers to {asked} questions, {lost} lost; {tokens} tokens, {tokens_per_s:.1f} a second\n"
            "largest sum {largest_mb:.1f} of {grant_mb:.0f} MiB: pool {least_pool_mb:.0f} to {most_pool_mb:.0f}, "
            "sidecar {least_sidecar_mb:.0f} to {most_sidecar_mb:.0f} in {steps} steps"
        ).format(**self.figures())


class Split:
    """A fixed division of VRAM: what :class:`frameshard.Deal` is compared with. `sidecar_bytes` is 0 without AI."""

    def __init__(self, game_bytes: int, sidecar_bytes: int) -> None:
        self.pool_bytes, self.sidecar_bytes = game_bytes - sidecar_bytes, sidecar_bytes

    def update(self, _pool: frameshard.PoolNeeds) -> int:
        return self.pool_bytes


class Game:
    """The host's side: draws frames, and gives the pool and the sidecar their parts."""

    def __init__(self, scene: Scene, world: World, flight: Flight, client: frameshard.Client | None) -> None:
        self._scene, self._world, self._flight, self._client = scene, world, flight, client
        self._pool = Pool(scene.context, scene.program, world)
        self._parts: frameshard.Deal | Split = Split(0, 0)
        self._block: FrameBlock | None = None
        self._busy_ms: list[float] = []
        self._began = time.perf_counter()
        self._second = 0.0
        self._over = self._closed = self._filled = False
        self._least_held = 0
        self._draw_s = 0.0
        self._caption = "streaming world"

    async def play(self, static: bool) -> None:
        """Flies once, and waits for the last answers."""
        game_bytes = self._flight.grant_bytes - self._flight.fixed_bytes
        async with trio.open_nursery() as background:
            self._parts = Split(game_bytes, 0)
            if self._client is not None:
                if not self._flight.device.startswith("emulated"):
                    self._block = await self._client.frame_block(target_frame_ms=1000 * FRAME_S)
                self._parts = await (self._split(game_bytes) if static else self._deal(game_bytes, background))
            await self._load()
            self._began = time.perf_counter()
            async with trio.open_nursery() as talks:
                if self._client is not None:
                    background.start_soon(self._sample)
                    for name in VILLAGERS:
                        talks.start_soon(self._talk, name)
                await self._frames()
            background.cancel_scope.cancel()
        self._pool.close()

    async def _deal(self, game_bytes: int, background: trio.Nursery) -> frameshard.Deal:
        assert self._client is not None
        deal = await frameshard.Deal.begin(self._client, grant_bytes=game_bytes)
        background.start_soon(deal.run)
        return deal

    async def _split(self, game_bytes: int) -> Split:
        """The best split that lets the pool hold all that it wants in a city."""
        assert self._client is not None
        peak = max(self._wanted(at / 20)[1] for at in range(int(20 * self._world.seconds)))
        sidecar = max(game_bytes - peak, (await self._client.budget()).floor_bytes)
        await self._client.set_budget(sidecar / MIB, observe=False)
        return Split(game_bytes, sidecar)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    # ---- frames -----------------------------------------------------------------------------------------------------

    def _wanted(self, second: float) -> tuple[int, int]:
        """The bytes of what is in view, and with what comes soon."""
        in_view = self._pool.wants(self._world.in_view(second))
        return in_view, in_view + self._pool.wants(self._world.soon(second))

    async def _load(self) -> None:
        """The loading screen: until the first cells are there, or have no room and get none."""
        self._pool.prepare()
        due = self._now() + MOST_LOAD_S
        limit, changed_at = 0, self._now()
        while self._now() < min(due, changed_at + SETTLED_S):
            before = limit
            limit, _ = self._follow(LOAD_S)
            if not self._pool.missing(self._world.in_view(0.0)):
                return
            if limit != before or not self._filled:
                changed_at = self._now()
            await trio.sleep(0.01)

    def _follow(self, seconds: float) -> tuple[int, int]:
        """Divides the VRAM and lets the pool follow. Returns the pool's limit, and what it wants."""
        now_bytes, soon_bytes = self._wanted(self._second)
        limit = self._parts.update(frameshard.PoolNeeds(self._pool.held_bytes, now_bytes, soon_bytes))
        in_view, soon = self._world.in_view(self._second), self._world.soon(self._second)
        self._filled = self._pool.follow(limit, in_view, soon, self._world.column_at(self._second), seconds)
        self._least_held = min(self._least_held, self._pool.held_bytes)
        return limit, soon_bytes

    def _may_hold(self) -> int:
        """The bytes that the sidecar may hold at present."""
        parts = self._parts
        return parts.sidecar_bytes if isinstance(parts, Split) else parts.arbiter.charged_bytes

    async def _frames(self) -> None:
        due, before = self._now(), -1.0
        budget = self._may_hold()
        while self._second < self._world.seconds and not self._closed:
            began = self._now()
            row = self._frame(min(began - before, MOST_STEP_S) if before >= 0 else 0.0)
            worked_ms = 1000 * (self._now() - began)
            self._flight.steps += self._may_hold() != budget
            budget = self._may_hold()
            due = max(due + FRAME_S, self._now())
            for _ in range(TURNS):
                await trio.sleep(0)
            while (left := due - self._now()) > 0:
                await trio.sleep(left - 0.001 if left > 0.0015 else 0)
            self._flight.frames.append((began, 1000 * (self._now() - began), worked_ms, *row))
            before = began
        self._flight.seconds, self._over = self._now(), True
        if self._block is not None:
            self._block.idle()

    def _frame(self, step_s: float) -> tuple[float, int, int, int, int, int, int]:
        """Draws one frame. Returns its row of the recording from the GPU time on."""
        flight, world, pool = self._flight, self._world, self._pool
        self._second += step_s
        if self._block is not None:
            self._block.begin()
        limit, wanted = self._follow(max(STREAM_S, self._draw_s / 2))
        in_view, may_hold = world.in_view(self._second), self._may_hold()
        parts = (flight.fixed_bytes, pool.held_bytes, may_hold)
        shares = [
            (part / flight.grant_bytes, colour) for part, colour in zip(parts, (GAME, POOL, SIDECAR), strict=True)
        ]
        bar = [*shares, (1 - sum(share for share, _ in shares), FREE)]
        began = self._now()
        gpu_ms = self._scene.draw(pool, in_view, world.column_at(self._second), bar)
        self._draw_s = self._now() - began
        if self._block is not None:
            # The shortest of the last frames: other work on the GPU can only make a frame longer.
            self._busy_ms = [*self._busy_ms[-29:], gpu_ms]
            self._block.end(gpu_busy_ms=min(self._busy_ms))
        self._closed = self._scene.closed(self._caption)
        return gpu_ms, wanted, limit, pool.held_bytes, may_hold, len(in_view), pool.missing(in_view)

    # ---- the sidecar ------------------------------------------------------------------------------------------------

    async def _talk(self, name: str) -> None:
        """Asks one question after another. The answer that is open at the end of the flight is heard out."""
        assert self._client is not None
        for question in itertools.cycle(QUESTIONS):
            if self._over:
                return
            self._flight.n_asked += 1
            asked_at, text, reason = self._now(), "", ""
            ask = self._client.ask(
                question, conversation=name, system=ABOUT.format(who=VILLAGERS[name]), sampling=ANSWER
            )
            try:
                async with ask as stream:
                    async for delta in stream:
                        text += delta.text
                        self._caption = f"{name}: {text[-100:]}"
                        if not self._over:
                            self._flight.deltas.append((self._now(), delta.tokens))
                assert stream.result is not None
                reason = stream.result.reason
            except (ConnectionLost, Unsupported):
                raise  # no later answer would be better: the sidecar is gone, or the model has no chat template
            except FrameshardError as error:
                reason = error.name
                await trio.sleep(AGAIN_S)
            row = {"at": asked_at, "until": self._now(), "who": name, "asked": question, "text": text, "reason": reason}
            self._flight.answers.append(row)
            print(f"{self._now():5.1f} s  {name}: {' '.join(text.split())}", flush=True)

    async def _sample(self) -> None:
        assert self._client is not None
        while not self._over:
            at, self._least_held = self._now(), self._pool.held_bytes
            engine = (await self._client.stats()).engine or {}
            device = None
            if engine.get("observed_by"):
                caps = await self._client.caps_and_requirements()
                device = caps.total_bytes - caps.free_bytes if caps.total_bytes and caps.free_bytes else None
            held = (engine.get("used_bytes", 0), engine.get("observed_bytes"), device)
            self._flight.samples.append((at, self._now(), *held, self._least_held))
            await trio.sleep(max(0.0, at + SAMPLE_S - self._now()))


@asynccontextmanager
async def sidecar(args: argparse.Namespace, budget_bytes: int) -> AsyncIterator[frameshard.Client | None]:
    """The sidecar of the flight; none if it is to fly without AI."""
    if args.no_ai:
        yield None
        return
    options: dict[str, Any] = {}
    if args.device.startswith("emulated"):
        # The emulated device is as fast as the CPU, so a plan would compute on the CPU what does not fit, at no loss.
        # Stream-only over a link that is slow for so small a model shows what a budget costs on a real GPU.
        options = {"mode": "stream_only", "n_threads": 1}
    scope = frameshard.launch(
        resolve(args.model),
        device=args.device,
        vram_budget_mb=budget_bytes / MIB,
        n_ctx=2048,
        n_parallel=2,
        log=subprocess.DEVNULL,
        **options,
    )
    async with scope as client:
        yield client


async def fly(args: argparse.Namespace, *, window: bool) -> Flight:
    """Flies once with the parts that the arguments ask for."""
    scene = Scene(SIZE, window=window)
    game_bytes = args.grant_mb * MIB - scene.fixed_bytes
    world = World.of(game_bytes, args.seconds)
    async with sidecar(args, game_bytes) as client:  # the pool is still empty
        info = await client.model_info() if client is not None else None
        flight = Flight(
            "without AI" if args.no_ai else "static split" if args.static else "deal",
            info.name if info is not None else "",
            info.device if info is not None else "",
            scene.context.info["GL_RENDERER"],
            args.grant_mb * MIB,
            scene.fixed_bytes,
            world.borders_s(),
        )
        await Game(scene, world, flight, client).play(args.static)
    scene.close()
    return flight
