"""Measures what a game sees through the client: launches, first tokens, urgent questions, and shrinks to the floor.

    python profiles/tools/play.py M.gguf --device CUDA0 --threads 14 --vram-budget 2GiB,4GiB,8GiB --json

- *Launches* at the first budget, with an empty cache of profiles and with what a launch leaves in it. Then the sidecar
  is idle until it has measured the machine, and what it then predicts is compared with what it predicts after
  `frameshard profile`.
- At each budget: the floor, and the time from the request to the only token of prompts of --prompt tokens that share
  nothing, beside what `frameshard bench` takes for such a prompt at the same budgets, with as many KV cells.
- *Predictions*, if asked for: at each budget, what the plan predicts at the launch and after --practice jobs, beside
  the median of --repeat jobs that follow. Predictions are corrected by what serving shows, so with an empty cache those
  of the first launch are the profile's alone.
- An *urgent* question, at the first budget, while as many background jobs run as there may be: they generate, or they
  read long prompts. One step is the time of one decode of the background, or of one of its prompt steps.
- *Shrinks* from the last budget to the floor while a prompt of --long tokens is read. If NVML exists, the VRAM in use
  is sampled: 50 ms after the request no sample may be above the budget. The tool needs a GPU that nothing else uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import trio
from negotiate import WORDS, Card, Change, above_budget, spread

import frameshard
from frameshard.cli import common

MIB = 1 << 20
BACKGROUND, URGENT = 0, 2
QUESTION = "A rider comes to the gate. Who goes there, and what brings you out in this weather, stranger?"
N_PARALLEL = 3
SETTLED_TOKENS = 40
"""After so many tokens of each background job, VRAM holds the experts that these texts need."""


class Game:
    """A client, and prompts for it that share no beginning."""

    def __init__(self, client: frameshard.Client, args: argparse.Namespace, n_ubatch: int) -> None:
        self.client, self.args, self._n_ubatch = client, args, n_ubatch
        self._random = random.Random(args.seed)
        self._words_per_token = 0.0

    async def prompt(self, n_tokens: int) -> str:
        """A prompt of about ``n_tokens`` tokens."""
        if not self._words_per_token:
            counted = await self.client.count_tokens(WORDS * 10)
            self._words_per_token = len(WORDS.split()) * 10 / counted.n_tokens
        words = WORDS.split()
        self._random.shuffle(words)
        n_words = int(n_tokens * self._words_per_token)
        return " ".join((words * (n_words // len(words) + 1))[:n_words])

    async def first_token_s(self, prompt: str, priority: int = 1) -> float:
        """Seconds until a job with one token is complete, counted here."""
        start = time.perf_counter()
        await self.client.complete(
            prompt, sampling=frameshard.Sampling(max_tokens=1, temperature=0.0), priority=priority
        ).completed()
        return time.perf_counter() - start

    async def ttft(self) -> list[float]:
        await self.first_token_s(await self.prompt(self.args.prompt))  # fills the ring, learns which experts are used
        return [await self.first_token_s(await self.prompt(self.args.prompt)) for _ in range(self.args.repeat)]

    # ---- predictions -------------------------------------------------------------------------------------------------

    async def predictions(self, budget_mb: float) -> dict[str, Any]:
        """What is predicted for a prompt and its answer, before and after other jobs, and what is measured then."""
        (before,) = await predicted(self.client, self.args, [budget_mb])
        for _ in range(self.args.practice):
            await self._job()
        (after,) = await predicted(self.client, self.args, [budget_mb])
        jobs = [await self._job() for _ in range(self.args.repeat)]
        ttft_s, tokens_per_second = (statistics.median(figures) for figures in zip(*jobs, strict=True))
        measured = {"ttft_s": ttft_s, "tokens_per_second": tokens_per_second}
        return {"n_practice": self.args.practice, "before": before, "after": after, "measured": measured, "jobs": jobs}

    async def _job(self) -> tuple[float, float]:
        """Seconds to the first token of a new prompt, and tokens per second after it."""
        sampling = frameshard.Sampling(max_tokens=self.args.generate + 1, temperature=1.0, seed=1)
        prompt = await self.prompt(self.args.prompt)
        done = await self.client.complete(prompt, sampling=sampling).completed()
        return done.prefill_s, (done.n_generated - 1) / done.decode_s

    # ---- urgent questions --------------------------------------------------------------------------------------------

    async def urgent(self) -> dict[str, Any]:
        alone = [await self.first_token_s(f"{i} {QUESTION}", URGENT) for i in range(self.args.repeat + 1)][1:]
        report: dict[str, Any] = {"alone_s": alone}
        for what, background in (("generating", self._generating), ("reading", self._reading)):
            async with background() as step_s:
                found = []
                for i in range(self.args.repeat):
                    await trio.sleep(self._random.uniform(0.5, 1.5))
                    found.append(await self.first_token_s(f"{what} {i} {QUESTION}", URGENT))
            bar = 1.3 * statistics.median(alone) + step_s
            report[what] = {"step_s": step_s, "first_token_s": found, "bar_s": bar}
        return report

    @contextlib.asynccontextmanager
    async def _generating(self) -> AsyncIterator[float]:
        """All places generate. Yields the seconds of one decode of all."""
        arrived = [0] * N_PARALLEL

        async def speak(i: int) -> None:
            while True:
                sampling = frameshard.Sampling(max_tokens=400, temperature=1.0, seed=i)
                async with self.client.complete(
                    f"Villager {i} says:", sampling=sampling, priority=BACKGROUND
                ) as stream:
                    async for delta in stream:
                        arrived[i] += delta.tokens

        async with trio.open_nursery() as nursery:
            for i in range(N_PARALLEL):
                nursery.start_soon(speak, i)
            while min(arrived) < SETTLED_TOKENS:
                await trio.sleep(0.02)
            before, start = min(arrived), time.perf_counter()
            await trio.sleep(3.0)
            yield (time.perf_counter() - start) / max(min(arrived) - before, 1)
            nursery.cancel_scope.cancel()

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[float]:
        """Long prompts are read, one after the other. Yields the seconds of one step of a prompt."""
        prompts = [await self.prompt(self.args.long // 2) for _ in range(40)]
        counted = (await self.client.count_tokens(prompts[-1])).n_tokens
        step_s = await self.first_token_s(prompts.pop()) * min(self._n_ubatch / counted, 1.0)

        async def read() -> None:
            while prompts:
                await self.first_token_s(prompts.pop(), BACKGROUND)

        async with trio.open_nursery() as nursery:
            for _ in range(N_PARALLEL):
                nursery.start_soon(read)
            yield step_s
            nursery.cancel_scope.cancel()

    # ---- shrinks -----------------------------------------------------------------------------------------------------

    async def shrinks(self, budget_mb: float, changes: list[Change]) -> dict[str, Any]:
        whole = await self.first_token_s(await self.prompt(self.args.long))
        refused = 0
        for _ in range(self.args.shrinks):
            floor_bytes = (await self.client.budget()).floor_bytes
            prompt = await self.prompt(self.args.long)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.first_token_s, prompt)
                await trio.sleep(whole * self._random.uniform(0.2, 0.8))
                refused += await self._set(floor_bytes, changes, shrink=True)
            await self._set(round(budget_mb * MIB), changes, shrink=False)
        of = [change for change in changes if change.shrink]
        return {
            "n_prompt": self.args.long,
            "read_s": whole,
            "refused": refused,
            "released": spread([1000 * change.released_s for change in of]),
            "round_trip": spread([1000 * change.round_trip_s for change in of]),
            "observed": spread([1000 * change.observed_s for change in of if change.observed_s is not None]),
        }

    async def _set(self, budget_bytes: int, changes: list[Change], *, shrink: bool) -> bool:
        """Sets the budget. Returns whether it was refused, because the floor has risen meanwhile."""
        change = Change(time.monotonic(), budget_bytes, shrink, "")

        def released(result: frameshard.Released) -> None:
            change.round_trip_s, change.released_s = time.monotonic() - change.at, result.seconds

        try:
            result = await self.client.set_budget(budget_bytes / MIB, on_released=released, observe=shrink)
        except frameshard.errors.BudgetBelowFloor:
            return True
        changes.append(change)
        if result.observed is not None and result.observed.observed_bytes is not None:
            change.observed_s = result.observed.seconds
        return False


async def predicted(client: frameshard.Client, args: argparse.Namespace, budgets: list[float]) -> list[dict[str, Any]]:
    """What the plan predicts at each budget for a prompt of --prompt tokens."""
    return [
        {
            "budget_mb": row.vram_budget_bytes / MIB,
            "ttft_s": row.ttft_s,
            "tokens_per_second": row.tokens_per_second,
        }
        for row in await client.plan(budgets, prompt_tokens=args.prompt)
    ]


def n_ctx(args: argparse.Namespace) -> int:
    """The context of a conversation."""
    return int(args.long) + 1024


def launched(args: argparse.Namespace, budget_mb: float, n_ctx: int) -> Any:
    return frameshard.launch(
        args.model,
        device=args.device,
        vram_budget_mb=budget_mb,
        n_ctx=n_ctx,
        n_parallel=N_PARALLEL,
        n_threads=args.threads,
        log=subprocess.DEVNULL,
    )


# ---- launches --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("XDG_CACHE_HOME")
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


async def launch_s(args: argparse.Namespace, budgets: list[float], *, until_measured: bool) -> dict[str, Any]:
    """Launches a sidecar, and ends it.

    :returns: the seconds, which profile its plans are from, what they predict at each budget, and the seconds until it
        has measured the machine in idle moments.
    """
    start = time.perf_counter()
    async with launched(args, budgets[0], 4096) as client:
        seconds, measured_s = time.perf_counter() - start, None
        profile = ((await client.stats()).engine or {})["profile"]
        while until_measured and ((await client.stats()).engine or {})["profile"] != "measured":
            if time.perf_counter() - start > args.idle:
                break
            await trio.sleep(0.5)
            measured_s = time.perf_counter() - start
        plan = await predicted(client, args, budgets)
        return {"seconds": seconds, "profile": profile, "measured_s": measured_s, "plan": plan}


async def launches(args: argparse.Namespace, budgets: list[float]) -> dict[str, Any]:
    await launch_s(args, budgets, until_measured=False)  # the model's file is in memory from now on
    with empty_cache():
        first = await launch_s(args, budgets, until_measured=True)
        second = await launch_s(args, budgets, until_measured=False)
    with empty_cache():
        command = [sys.executable, "-m", "frameshard", "profile", "--model", args.model, "--device", args.device]
        start = time.perf_counter()
        subprocess.run([*command, "--threads", str(args.threads), "--json"], check=True, stdout=subprocess.DEVNULL)
        profile_s = time.perf_counter() - start
        third = await launch_s(args, budgets, until_measured=False)
    return {
        "first": first,
        "second": second,
        "first_over_second": first["seconds"] / second["seconds"],
        "after_profile": third,
        "profile_s": profile_s,
    }


# ---- the report ------------------------------------------------------------------------------------------------------


def bench(args: argparse.Namespace, budgets: list[float]) -> dict[str, Any]:
    given = ",".join(f"{budget}MiB" for budget in budgets)
    command = [sys.executable, "-m", "frameshard", "bench", "--model", args.model, "--device", args.device]
    command += ["--threads", str(args.threads), "--vram-budget", given, "--prompt", str(args.prompt)]
    command += ["--generate", "4", "--repeat", str(args.repeat), "--ctx", str(N_PARALLEL * n_ctx(args)), "--json"]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(ran.stdout))


async def report(args: argparse.Namespace) -> dict[str, Any]:
    budgets = [float(common.size(text)) / MIB for text in args.vram_budget.split(",")]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "device": args.device,
        "prompt": args.prompt,
        "rows": rows,
    }
    parts = args.parts.split(",")
    if "launches" in parts:
        result["launches"] = await launches(args, budgets)
        if len(parts) == 1:
            return result
    beside = bench(args, budgets) if {"ttft", "urgent"} & {*parts} else {}
    result["bench_floor_mb"] = beside.get("floor_mb")
    for i, budget in enumerate(budgets):
        last = i == len(budgets) - 1
        card, changes = Card(), [Change(time.monotonic(), round(budget * MIB), False, "start")]
        sampled = args.device not in ("cpu", "emulated") and card.start()
        async with launched(args, budget, n_ctx(args)) as client:
            ubatch = beside["rows"][i]["ubatch"] if beside else 0
            game, row = Game(client, args, ubatch), {"budget_mb": budget, "ubatch": ubatch}
            rows.append(row)
            row["floor_mb"] = (await client.budget()).floor_bytes / MIB
            if "ttft" in parts:
                times = await game.ttft()
                row |= {
                    "ttft_s": statistics.median(times),
                    "bench_ttft_s": beside["rows"][i]["ttft_s"],
                    "times_s": times,
                }
            if "predictions" in parts:
                row["predictions"] = await game.predictions(budget)
            if "urgent" in parts and i == 0:
                row["urgent"] = await game.urgent()
            if "shrinks" in parts and last:
                row["shrinks"] = await game.shrinks(budget, changes)
            row["floor_at_end_mb"] = (await client.budget()).floor_bytes / MIB
        card.stop()
        above, worst = above_budget(card.samples, changes)
        row |= {
            "nvml_samples": len(card.samples) if sampled else None,
            "nvml_samples_above_budget": above if sampled else None,
            "nvml_worst_excess_mb": worst / MIB if sampled else None,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=common.positive, default=common.default_threads(), metavar="N")
    parser.add_argument("--vram-budget", required=True, metavar="SIZE[,SIZE…]")
    parser.add_argument("--prompt", type=common.positive, default=1024, metavar="N", help="tokens (1024)")
    parser.add_argument("--long", type=common.positive, default=8192, metavar="N", help="tokens (8192)")
    parser.add_argument("--repeat", type=common.positive, default=5, metavar="N", help="prompts, and questions (5)")
    parser.add_argument("--generate", type=common.positive, default=32, metavar="N", help="predictions: tokens (32)")
    parser.add_argument("--practice", type=common.positive, default=4, metavar="N", help="predictions: jobs (4)")
    parser.add_argument("--shrinks", type=common.positive, default=20, metavar="N", help="to the floor (20)")
    parser.add_argument("--idle", type=common.positive, default=60, metavar="S", help="seconds to measure (60)")
    parser.add_argument(
        "--parts", default="launches,ttft,urgent,shrinks", help="which of these, or predictions (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = trio.run(report, args)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
