"""Measures how fast budgets take effect: random changes of a running sidecar's budget. Checks that texts do not change.

    python profiles/tools/negotiate.py MODEL.gguf --device CUDA0 --json

There are 200 changes of 256 MiB to 2 GiB during decode, and 50 during prefill of 8,192 tokens. The mode is stream-only,
so the text must be that of an undisturbed run. If NVML exists, the VRAM in use is sampled all the time: after the
deadline of 50 ms no sample may be above the budget. The tool needs a GPU that nothing else uses. --refill measures how
fast weights become resident again during decode, --cancel how fast answers and prompts end.

    python profiles/tools/negotiate.py MODEL.gguf --mmproj MMPROJ.gguf --image 1920x1080 --decode 0 --prefill 0

This makes 50 shrinks while images are encoded. Each image is new. A shrink counts only if it was requested before the
end of the encode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import trio

import frameshard

MIB = 1 << 20
DEADLINE_S = 0.050
SAMPLE_S = 0.005
WORDS = "the innkeeper pours another cup and tells of the road that leads north past the mill into the hills "


@dataclass
class Card:
    """The VRAM in use on the first GPU, counted by NVML, minus the VRAM in use before the sidecar started."""

    samples: list[tuple[float, int]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> bool:
        """Starts sampling; false if there is no NVML."""
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception as error:
            print(f"no NVML, use of the card is not sampled: {error}", file=sys.stderr)
            return False
        before = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

        def sample() -> None:
            while not self._stop.wait(SAMPLE_S):
                self.samples.append((time.monotonic(), int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - before))

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@dataclass
class Change:
    """One change of the budget: the time of its request, and the seconds until it was released and observed."""

    at: float
    budget_bytes: int
    shrink: bool
    phase: str
    released_s: float = 0.0
    round_trip_s: float = 0.0
    observed_s: float | None = None


class Run:
    def __init__(self, client: frameshard.Client, args: argparse.Namespace, bounds: frameshard.Budget) -> None:
        self.client, self.args, self.bounds = client, args, bounds
        self.random = random.Random(args.seed)
        self.changes: list[Change] = []
        self.looks: list[tuple[float, float]] = []
        self.wrong_texts = 0
        self.texts = 0
        self.refills: list[dict[str, float]] = []
        self.cancels: dict[str, list[float]] = {"decode": [], "prefill": []}

    async def set(self, budget_bytes: int, phase: str, shrink: bool) -> None:
        change = Change(time.monotonic(), budget_bytes, shrink, phase)
        self.changes.append(change)

        def released(result: frameshard.Released) -> None:
            change.round_trip_s, change.released_s = time.monotonic() - change.at, result.seconds

        result = await self.client.set_budget(budget_bytes / MIB, on_released=released, observe=shrink)
        if result.observed is not None and result.observed.observed_bytes is not None:
            change.observed_s = result.observed.seconds

    def shrunk(self) -> int:
        room = self.bounds.full_bytes - self.bounds.floor_bytes
        low, high = (256 * MIB, 2048 * MIB) if room > 2048 * MIB else (room // 8, room)
        return self.bounds.full_bytes - self.random.randint(low, high) // MIB * MIB

    async def answer(self, prompt: str, n: int) -> frameshard.Completion:
        sampling = frameshard.Sampling(max_tokens=n, temperature=0.0)
        return await self.client.complete(prompt, sampling=sampling).completed()

    async def long_prompt(self) -> str:
        """Makes a prompt of about --prompt tokens."""
        short = await self.answer(WORDS * 10, 1)
        return WORDS * max(1, int(10 * self.args.prompt / short.n_prompt) - 1)

    def check(self, text: str, expected: str) -> None:
        self.texts += 1
        self.wrong_texts += text != expected

    async def look(self, heard: trio.Event | None = None) -> None:
        """Submits a job with a new image. Appends the start and end of its encode to `looks`, as far as a client can
        see them, and sets `heard` at the start."""
        width, height = map(int, self.args.image.split("x"))
        picture = frameshard.Pixels(self.random.randbytes(3 * width * height), width, height)
        sampling = frameshard.Sampling(max_tokens=1, temperature=0.0)
        stream = self.client.complete("What is this?", images=[picture], sampling=sampling)
        encoded: list[float] = []
        stream.on_progress = lambda event: encoded.append(time.monotonic()) if event.phase == "encode" else None
        async with stream:
            start = time.monotonic()
            if heard is not None:
                heard.set()
            await stream.completed()
        self.looks.append((start, encoded[0]))

    async def looking(self) -> None:
        for _ in range(3):
            await self.look()
        usual = sorted(end - start for start, end in self.looks)[1]
        print(f"a picture of {self.args.image}: {usual:.2f} s to its encoding, undisturbed", file=sys.stderr)
        for _ in range(self.args.encode):
            async with trio.open_nursery() as nursery:
                heard = trio.Event()
                nursery.start_soon(self.look, heard)
                await heard.wait()
                await trio.sleep(usual * self.random.uniform(0.2, 0.8))
                await self.set(self.shrunk(), "encode", True)
            if self.changes[-1].at > self.looks[-1][1]:
                self.changes[-1].phase = "after an encode"
            await self.set(self.bounds.full_bytes, "encode", False)

    async def decoding(self) -> None:
        prompt = "Once upon a time"
        expected = (await self.answer(prompt, self.args.tokens)).text
        async with trio.open_nursery() as nursery:

            async def speak() -> None:
                while True:
                    self.check((await self.answer(prompt, self.args.tokens)).text, expected)

            nursery.start_soon(speak)
            for _ in range(self.args.decode // 2):
                await self.set(self.shrunk(), "decode", True)
                await trio.sleep(0.03)
                await self.set(self.bounds.full_bytes, "decode", False)
                await trio.sleep(0.12)
            while not self.texts:  # wait for at least one complete answer
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    async def refilling(self) -> None:
        """Shrinks the budget by 8 GiB and back. Measures when weights begin to become resident again, how fast, and the
        tokens per second meanwhile. The copies of weights that count as resident may take up to 10 ms more."""
        count = 0

        async def speak() -> None:
            nonlocal count
            sampling = frameshard.Sampling(max_tokens=self.args.tokens, temperature=0.0)
            while True:
                async with self.client.complete("Once upon a time", sampling=sampling) as stream:
                    async for delta in stream:
                        count += delta.tokens

        async def resident() -> int:
            return int(((await self.client.stats()).engine or {})["resident_bytes"])

        whole = await resident()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(speak)
            for _ in range(self.args.refill):
                room = self.bounds.full_bytes - self.bounds.floor_bytes
                await self.set(self.bounds.full_bytes - min(8192 * MIB, room // 2), "refill", True)
                await trio.sleep(0.5)
                held, before, asked = await resident(), count, time.monotonic()
                await self.set(self.bounds.full_bytes, "refill", False)
                while (now := await resident()) <= held:
                    await trio.sleep(0.001)
                begin, at_first = time.monotonic(), now
                while (now := await resident()) < whole:
                    await trio.sleep(0.001)
                seconds = time.monotonic() - begin
                self.refills.append(
                    {
                        "begins_after_ms": 1000 * (begin - asked),
                        "gb": (now - held) / 1e9,
                        "gb_per_s": (now - at_first) / seconds / 1e9,
                        "tokens": count - before,
                    }
                )
            nursery.cancel_scope.cancel()

    async def cancelling(self) -> None:
        """Measures the time from a cancel to the job's last event, during decode and during prefill."""
        prompt = await self.long_prompt()
        usual = (await self.answer(prompt, 2)).prefill_s
        for phase, text in (("decode", "Once upon a time"), ("prefill", prompt)):
            for _ in range(self.args.cancel):
                sampling = frameshard.Sampling(max_tokens=self.args.tokens, temperature=0.0)
                async with self.client.complete(text, sampling=sampling) as stream:
                    if phase == "decode":
                        await anext(stream)
                    await trio.sleep((usual if phase == "prefill" else 0.5) * self.random.uniform(0.2, 0.8))
                    begin = time.monotonic()
                    await stream.cancel()
                    try:
                        await stream.completed()
                    except frameshard.errors.JobCancelled:
                        self.cancels[phase].append(1000 * (time.monotonic() - begin))

    async def reading(self) -> None:
        prompt = await self.long_prompt()
        undisturbed = await self.answer(prompt, 2)
        undisturbed = await self.answer(prompt, 2)
        print(f"prompt of {undisturbed.n_prompt} tokens: {undisturbed.prefill_s:.2f} s undisturbed", file=sys.stderr)
        for _ in range(self.args.prefill):
            async with trio.open_nursery() as nursery:

                async def read() -> None:
                    self.check((await self.answer(prompt, 2)).text, undisturbed.text)

                nursery.start_soon(read)
                await trio.sleep(undisturbed.prefill_s * self.random.uniform(0.2, 0.8))
                await self.set(self.shrunk(), "prefill", True)
            await self.set(self.bounds.full_bytes, "prefill", False)


def above_budget(samples: list[tuple[float, int]], changes: list[Change]) -> tuple[int, int]:
    """The number of samples above the budget in force after its deadline, and by how many bytes at most."""
    count = worst = at = 0
    for when, used in samples:
        while at + 1 < len(changes) and changes[at + 1].at <= when:
            at += 1
        change = changes[at]
        if change.at + DEADLINE_S < when and used > change.budget_bytes:
            count, worst = count + 1, max(worst, used - change.budget_bytes)
    return count, worst


def row(changes: list[Change], value: str) -> dict[str, float]:
    return spread([1000 * found for change in changes if (found := getattr(change, value)) is not None])


def spread(figures: list[float]) -> dict[str, float]:
    figures = sorted(figures)
    if not figures:
        return {}
    return {
        "n": len(figures),
        "p50_ms": statistics.median(figures),
        "p99_ms": figures[min(len(figures) - 1, int(len(figures) * 0.99))],
        "max_ms": figures[-1],
    }


async def main(args: argparse.Namespace) -> dict[str, Any]:
    card = Card()
    sampled = args.device not in ("cpu", "emulated") and card.start()
    started = time.monotonic()
    async with frameshard.launch(
        args.model,
        device=args.device,
        mmproj=args.mmproj,
        n_ctx=args.prompt + 2048,
        n_parallel=1,
        n_ubatch=args.ubatch,
        n_threads=args.threads,
        mode="stream_only",
    ) as client:
        bounds = await client.budget()
        print(
            f"loaded in {time.monotonic() - started:.1f} s; floor {bounds.floor_bytes >> 20} MiB, "
            f"full {bounds.full_bytes >> 20} MiB",
            file=sys.stderr,
        )
        run = Run(client, args, bounds)
        await run.set(bounds.full_bytes, "start", False)
        if args.decode:
            await run.decoding()
        if args.prefill:
            await run.reading()
        if args.refill:
            await run.refilling()
        if args.cancel:
            await run.cancelling()
        if args.mmproj:
            await run.looking()
        stats = (await client.stats()).engine or {}
        model = await client.model_info()
    card.stop()
    rows = {}
    for phase in ("decode", "prefill", "refill", "encode", "after an encode"):
        for shrink, word in ((True, "shrink"), (False, "grow")):
            of = [change for change in run.changes if change.phase == phase and change.shrink is shrink]
            for value in ("released_s", "round_trip_s", "observed_s"):
                if figures := row(of, value):
                    rows[f"{phase} {word} {value.removesuffix('_s')}"] = figures
    rows |= {f"cancel in {phase}": spread(found) for phase, found in run.cancels.items() if found}
    above, worst = above_budget(card.samples, run.changes)
    return {
        "model": model.name,
        "device": model.device,
        "floor_mb": bounds.floor_bytes / MIB,
        "full_mb": bounds.full_bytes / MIB,
        "rows": rows,
        "texts": run.texts,
        "texts_that_differ": run.wrong_texts,
        "refills": run.refills,
        "nvml_samples": len(card.samples) if sampled else None,
        "nvml_samples_above_budget": above if sampled else None,
        "nvml_worst_excess_mb": worst / MIB if sampled else None,
        "ledger_peak_mb": stats.get("peak_bytes", 0) / MIB,
        "seconds": time.monotonic() - started,
    }


def print_table(document: dict[str, Any]) -> None:
    print(f"{'':28}{'n':>6}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    for name, figures in document["rows"].items():
        print(f"{name:28}{figures['n']:6}{figures['p50_ms']:10.2f}{figures['p99_ms']:10.2f}{figures['max_ms']:10.2f}")
    for name in ("texts", "texts_that_differ", "nvml_samples", "nvml_samples_above_budget", "nvml_worst_excess_mb"):
        print(f"{name}: {document[name]}")
    for refill in document["refills"]:
        print("back: " + ", ".join(f"{name} {value:.3g}" for name, value in refill.items()))
    print(f"in {document['seconds']:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--decode", type=int, default=200, help="changes during decode (200)")
    parser.add_argument("--prefill", type=int, default=50, help="shrinks during prefill (50)")
    parser.add_argument("--refill", type=int, default=0, help="grows by 8 GiB during decode (0)")
    parser.add_argument("--cancel", type=int, default=0, help="cancelled answers, and prompts (0)")
    parser.add_argument("--mmproj", help="the vision tower")
    parser.add_argument("--image", default="1920x1080", help="size of the images (1920x1080)")
    parser.add_argument("--encode", type=int, default=50, help="with --mmproj: shrinks during an encode (50)")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens (8192)")
    parser.add_argument("--tokens", type=int, default=600, help="of each answer (600)")
    parser.add_argument("--ubatch", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    document = trio.run(main, arguments)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)
