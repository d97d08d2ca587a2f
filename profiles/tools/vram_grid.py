"""Checks that a sidecar never holds more VRAM than its budget, at many context lengths and numbers of conversations.

    python profiles/tools/vram_grid.py MODEL.gguf --vram-budget 2GiB --cells 1024x1,4096x2,1024x8 --json

Each cell is TOKENSxCONVERSATIONS: so many prompts of that length are submitted at the same time. All cells with the
same number of conversations run in one sidecar, the shortest first, so that the VRAM that the driver keeps adds up. The
prompts have repetitions, so that speculative decoding is used. With ``--mmproj`` each cell also has one image. NVML is
sampled every 5 ms, for the engine's process and for the whole GPU. The exit status is 1 if a sample of the process is
above the budget. The tool needs a GPU that nothing else uses. On the emulated device it samples the ledger instead.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from collections import defaultdict
from typing import Any

import trio

import frameshard
from frameshard import errors
from frameshard.cli.common import parse_size
from frameshard.engine.observer import find_observer

MIB = 1 << 20
SAMPLE_S = 0.005
WORDS = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w2 w4 w6 w8 "
"""The text of prompts. A token of it has few bytes, also with the vocabulary of tools/synth_gguf.py, because a prompt
may have at most 64 KiB."""
ROOM = 256
"""Tokens of context in addition to the prompt of a cell."""

IMAGE_TOKENS = 4096
"""Tokens of context for an image."""


class Samples:
    """The largest figures of NVML since the last :meth:`take`, in bytes."""

    def __init__(self) -> None:
        self.observer = find_observer()
        self.process = self.card = self.count = 0
        self._before = self._used_of_card()
        self._stop = threading.Event()
        if self.observer.source is not None:
            threading.Thread(target=self._run, daemon=True).start()

    def _used_of_card(self) -> int:
        totals = self.observer.totals()
        return totals[1] - totals[0] if totals is not None else 0

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            card, used = self._used_of_card() - self._before, self.observer.used()
            self.card = max(self.card, card)  # asked before, so that take() has not reset the maximum meanwhile
            if used is not None:
                self.process = max(self.process, used)
                self.count += 1

    def take(self) -> dict[str, Any]:
        found = {"process_mb": self.process / MIB, "card_mb": self.card / MIB, "samples": self.count}
        self.process = self.card = self.count = 0
        return found

    def stop(self) -> None:
        self._stop.set()


def cells(text: str) -> dict[int, list[int]]:
    """The prompt lengths of all cells, by their number of conversations."""
    found = defaultdict(list)
    for part in text.split(","):
        tokens, _, together = part.partition("x")
        found[int(together or 1)].append(int(tokens))
    return {together: sorted(lengths) for together, lengths in sorted(found.items())}


async def run_cell(client: frameshard.Client, args: argparse.Namespace, n_tokens: int, together: int) -> int:
    """Runs all jobs of a cell; returns the length of the longest prompt in tokens."""
    per_word = (await client.complete(WORDS * 10, sampling=frameshard.Sampling(max_tokens=1)).completed()).n_prompt / 10
    prompt = WORDS * max(1, int(n_tokens / per_word))
    lengths: list[int] = []

    async def ask(number: int) -> None:
        sampling = frameshard.Sampling(max_tokens=args.generate, temperature=0.0)
        done = await client.complete(f"{number} {prompt}", sampling=sampling).completed()
        lengths.append(done.n_prompt)

    async with trio.open_nursery() as nursery:
        for number in range(together):
            nursery.start_soon(ask, number)
    if args.mmproj:
        width, height = map(int, args.image.split("x"))
        picture = frameshard.Pixels(random.randbytes(3 * width * height), width, height)
        sampling = frameshard.Sampling(max_tokens=8, temperature=0.0)
        await client.complete("What is this?", images=[picture], sampling=sampling).completed()
    return max(lengths)


async def main(args: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    budget = parse_size(args.vram_budget)
    for together, lengths in cells(args.cells).items():
        samples = Samples()
        try:
            async with frameshard.launch(
                args.model,
                device=args.device,
                mmproj=args.mmproj,
                vram_budget_mb=budget / MIB,
                n_ctx=max(lengths[-1], IMAGE_TOKENS if args.mmproj else 0) + ROOM,
                n_parallel=together,
            ) as client:
                samples.observer.pid = (await client.stats()).broker.engine_pid or 0
                rows.append({"tokens": 0, "together": together, **samples.take()})
                for n_tokens in lengths:
                    real = await run_cell(client, args, n_tokens, together)
                    engine = (await client.stats()).engine or {}
                    if samples.observer.source is None:
                        samples.process, samples.count = engine.get("peak_bytes", 0), 1
                    rows.append(
                        {
                            "tokens": real,
                            "together": together,
                            **samples.take(),
                            "ledger_mb": engine.get("used_bytes", 0) / MIB,
                            "overhead_mb": engine.get("overhead_bytes", 0) / MIB,
                            "drafted": engine.get("drafted_tokens", 0),
                        }
                    )
                    print(rows[-1], file=sys.stderr)
        except errors.BudgetBelowFloor as error:
            rows.append({"tokens": lengths[-1], "together": together, "below_floor": str(error)})
        finally:
            samples.stop()
    above = [row for row in rows if row.get("process_mb", 0) > budget / MIB]
    return {"model": args.model, "budget_mb": budget / MIB, "rows": rows, "above": len(above)}


def print_table(document: dict[str, Any]) -> None:
    print(f"{'tokens':>8}{'at once':>8}{'process MiB':>12}{'card MiB':>10}{'samples':>9}{'ledger':>9}{'drafted':>9}")
    for row in document["rows"]:
        if "below_floor" in row:
            print(f"{row['tokens']:8}{row['together']:8}  {row['below_floor']}")
            continue
        print(
            f"{row['tokens']:8}{row['together']:8}{row['process_mb']:12.0f}{row['card_mb']:10.0f}{row['samples']:9}"
            f"{row.get('ledger_mb', 0):9.0f}{row.get('drafted', 0):9}"
        )
    print(f"budget {document['budget_mb']:.0f} MiB, rows above it: {document['above']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--vram-budget", required=True)
    parser.add_argument("--cells", default="1024x1,4096x1,16384x1,1024x2,4096x2,1024x8", help="TOKENSxTOGETHER,...")
    parser.add_argument("--generate", type=int, default=48, help="tokens of each answer (48)")
    parser.add_argument("--mmproj", default="", help="the vision tower")
    parser.add_argument("--image", default="1280x720", help="size of the images (1280x720)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    document = trio.run(main, arguments)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)
    sys.exit(document["above"] > 0)
