"""Measures the effect of each mechanism: TTFT and tokens/s with it and without it.

    python profiles/tools/ablation.py MODEL.gguf --device CUDA0 --threads 14 --vram-budget 4GiB --json

The variants are: the plan as it is; a ring of one step (copies do not run ahead, and fewer experts are cached); no
expert cache (it is emptied before each graph); nothing on the CPU; nothing streamed in graphs of less than 32 tokens (a
long prompt would take the CPU half a minute); prompts in ubatches of 256. In all of them as many weights are resident
as fit in the budget. The figures are medians, and the runs of the variants alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace

from frameshard import models
from frameshard.cli import common
from frameshard.cli.passage import PASSAGE
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.native import CPU, STREAMED
from frameshard.plan.layout import lay_out
from frameshard.plan.plans import Plan
from frameshard.wire.engine import EngineConfig

FORGETFUL = "no cache of experts"
VARIANTS = ("as planned", "ring of one step", FORGETFUL, "nothing on the CPU", "nothing streamed", "ubatches of 256")
# For these variants, the placement of all shards in smaller graphs. Graphs of at least so many tokens keep the
# placements of the plan.
PLACED = {"nothing on the CPU": (STREAMED, sys.maxsize), "nothing streamed": (CPU, 32)}


@dataclass
class Row:
    budget: int
    variant: str
    ttft_s: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)

    def document(self) -> dict[str, object]:
        return {
            "budget_mb": self.budget / 2**20,
            "variant": self.variant,
            "ttft_s": statistics.median(self.ttft_s),
            "tokens_per_second": statistics.median(self.tokens_per_second),
            "runs": {"ttft_s": self.ttft_s, "tokens_per_second": self.tokens_per_second},
        }


def arrange(runtime: Runtime, row: Row) -> Plan:
    """Adopts a row's plan and makes its weights resident; returns the plan."""
    runtime.placement.replan()
    plan = runtime.placement.plan
    assert plan is not None
    if row.variant == "ring of one step":
        layout = lay_out(runtime.model_info, runtime.device_name)
        plan = replace(plan, ring_bytes=layout.min_ring_bytes)
    if row.variant in PLACED:
        placement, most = PLACED[row.variant]
        tiers = [
            replace(tier, placements=(placement,) * len(tier.placements)) if tier.min_tokens < most else tier
            for tier in plan.tiers
        ]
        share = 0.0 if row.variant == "nothing streamed" else plan.expert_stream_share
        plan = replace(plan, tiers=tuple(tiers), expert_stream_share=share)
    runtime.placement.adopt(plan)
    while runtime.placement.fill():
        pass
    return plan


def measure(runtime: Runtime, row: Row, words: list[int], args: argparse.Namespace) -> None:
    device = runtime.device
    assert device is not None
    prompt = (words * -(-args.prompt // len(words)))[: args.prompt]
    ubatch = 256 if row.variant == "ubatches of 256" else args.ubatch

    def forget() -> None:
        if row.variant == FORGETFUL:
            device.clear_expert_cache()

    def read() -> None:
        runtime.clear(0)
        for at in range(0, len(prompt), ubatch):
            forget()
            runtime.decode_tokens(0, prompt[at : at + ubatch], "last" if at + ubatch >= len(prompt) else "none")

    def decode(token: int) -> None:
        forget()
        for output in runtime.decode([Rows(0, [token])]):
            runtime.logits(output)

    device.set_budget(row.budget, timeout_s=60.0)
    read()  # the plan depends on how much of the context is used
    decode(words[0])
    plan = arrange(runtime, row)
    read()
    decode(words[0])
    begin = time.perf_counter()
    read()
    middle = time.perf_counter()
    for i in range(args.generate):
        decode(words[i % len(words)])
    end = time.perf_counter()
    if runtime.placement.plan is not plan:
        sys.exit(f"{row.variant}: the context has grown so much that a new plan was made; try a shorter --prompt")
    row.ttft_s.append(middle - begin)
    row.tokens_per_second.append(args.generate / (end - middle))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vram-budget", type=common.parse_budgets, required=True, metavar="A,B,...")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--ubatch", type=int, default=1024)
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    config = EngineConfig(
        model=str(models.resolve(args.model)),
        device=args.device,
        n_ctx=args.prompt + args.generate + 1,
        n_ubatch=args.ubatch,
        n_parallel=1,
        n_threads=args.threads,
    )
    with Runtime.load(config) as runtime:
        variants = [each for each in VARIANTS if each != FORGETFUL or runtime.model_info.n_expert]
        rows = [Row(budget, variant) for budget in args.vram_budget for variant in variants]
        words = runtime.tokenizer.tokenize(PASSAGE)
        for _ in range(args.repeat):
            for row in rows:
                measure(runtime, row, words, args)
    documents = [row.document() for row in rows]
    if args.json:
        print(json.dumps({"model": args.model, "device": args.device, "rows": documents}, indent=1))
        return
    for each in documents:
        print("{budget_mb:8.0f} MiB  {variant:20} TTFT {ttft_s:8.3f} s  {tokens_per_second:8.2f} tok/s".format(**each))


if __name__ == "__main__":
    main()
