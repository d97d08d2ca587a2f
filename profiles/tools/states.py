"""Parks and hibernates a sidecar during answers. Measures the VRAM that this frees, and the time to wake up again.

    python profiles/tools/states.py --model M.gguf --device CUDA0

For each turn it prints the VRAM from NVML and from the sidecar's ledger, the seconds until released, until active again
and until the next token, and whether the text is that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

import trio

import frameshard
from frameshard.models import resolve

MIB = 1 << 20
PROMPT = "Tell me everything about the old lighthouse at the end of the bay, and about who keeps it."


async def turn(client: frameshard.Client, state: str, budget_mb: float, args: argparse.Namespace) -> dict[str, Any]:
    """Generates one answer, and parks or hibernates the sidecar in the middle of it."""
    sampling = frameshard.Sampling(max_tokens=args.tokens, temperature=0.0)
    figures: dict[str, Any] = {"state": state}
    async with client.complete(PROMPT, sampling=sampling) as stream:
        for _ in range(args.tokens // 3):
            await stream.__anext__()
        if state != "active":
            down = await client.set_budget(budget_mb, state=state, timeout_s=60)
            figures["down_s"], figures["used_mb"] = down.seconds, down.used_bytes / MIB
            if down.observed is not None and down.observed.observed_bytes is not None:
                figures["observed_mb"] = down.observed.observed_bytes / MIB
            asked = trio.current_time()
            figures["back_s"] = (await client.set_budget(budget_mb, timeout_s=60)).seconds
            await stream.__anext__()
            figures["next_token_s"] = trio.current_time() - asked
        await stream.completed()
        figures["text"] = stream.text
    seconds = {name: round(value, 3) for name, value in figures.items() if name != "text" and name != "state"}
    print(state, seconds, file=sys.stderr, flush=True)
    return figures


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {"device": args.device, "n_ctx": args.ctx, "mode": "stream_only"}
    async with frameshard.launch(resolve(args.model), log=subprocess.DEVNULL, **options) as client:
        caps = await client.caps_and_requirements()
        budget_mb = args.vram_budget or -(-caps.full_bytes // MIB)
        await client.set_budget(budget_mb)
        alone = (await turn(client, "active", budget_mb, args))["text"]
        report: dict[str, Any] = {"model": args.model, "device": caps.device, "budget_mb": budget_mb}
        for state in ("parked", "hibernated"):
            turns = [await turn(client, state, budget_mb, args) for _ in range(args.turns)]
            figures = {"texts_wrong": sum(each["text"] != alone for each in turns)}
            for name in ("down_s", "back_s", "next_token_s", "used_mb", "observed_mb"):
                values = [each[name] for each in turns if name in each]
                if values:
                    figures[name] = {"median": statistics.median(values), "max": max(values)}
            report[state] = figures
        return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--vram-budget", type=float, default=0, help="MiB; all that the model wants by default")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=90)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(trio.run(measure, args), indent=1))


if __name__ == "__main__":
    main()
