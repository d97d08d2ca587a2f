"""Measures how far a plan is from the best of many arrangements that are really run: its regret.

    python profiles/tools/regret.py MODEL.gguf --device CUDA0 --threads 14 --vram-budget 4GiB --context 1024 --json

An arrangement differs from the plan in what a decoded token depends on: the size of the ring (and with it how many
weights are resident and how many experts are cached), the kinds and layers that the CPU computes, and the share of
missing experts that is copied. A prompt is read once for each budget. Then each arrangement is adopted, filled, and
decodes the last tokens of the context after the same prompt. The best few and the plan are measured again in turns,
because the best of many noisy figures is too good; the ratio is that of these medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frameshard import models
from frameshard.cli import common, progress
from frameshard.cli.passage import PASSAGE
from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.errors import BadArgument, FrameshardError
from frameshard.native import CPU, STREAMED
from frameshard.plan.layout import Layout, lay_out
from frameshard.plan.plans import Plan
from frameshard.wire.engine import EngineConfig

PLANNED = "as planned"
RINGS = (0.5, 0.75, 1.25, 1.5, 2.0, 3.0)  # sizes of the ring, relative to the planned one
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a kind on the CPU, and of missing experts that are copied
MOVED = (1 / 8, 1 / 4, 1 / 2)  # of the shards on the CPU that are streamed instead, and the reverse
N_RANDOM, FLIPPED = 4, 0.25  # sets in which each shard has changed its place with this probability
N_BEST = 4  # arrangements that are measured again, beside the plan
ANSWER = 3  # the longest answer, times --generate: in further passes two measured parts after one that is not


@dataclass
class Arrangement:
    name: str
    plan: Plan = field(repr=False)
    first: float = 0.0  # tokens per second in the first pass
    again: list[float] = field(default_factory=list)
    resident_bytes: int = 0
    ring_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.again) if self.again else self.first

    def document(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tokens_per_second": self.tokens_per_second,
            "runs": [self.first, *self.again],
            "resident_mb": self.resident_bytes / 2**20,
            "ring_mb": self.ring_bytes / 2**20,
        }


def arrangements(plan: Plan, layout: Layout) -> list[Arrangement]:
    """The plan, and all that is compared with it. None comes twice."""
    found: dict[object, Arrangement] = {}
    for name, other in [(PLANNED, plan), *_others(plan, layout)]:
        tier = other.tiers[0]
        key = (other.ring_bytes, tier.placements[plan.resident :], other.expert_stream_share)
        found.setdefault(key, Arrangement(name, other))
    return list(found.values())


def _others(plan: Plan, layout: Layout) -> Iterator[tuple[str, Plan]]:
    order = [i for i in layout.use_order.tolist() if i >= plan.resident]  # the shards that are not resident, as used
    for factor in RINGS:
        ring_bytes = max(round(plan.ring_bytes * factor), layout.min_ring_bytes)
        yield f"ring x {factor:g}", replace(plan, ring_bytes=ring_bytes)
    for name, changed in _moves(plan.tiers[0].placements, order, layout):
        yield name, _placed(plan, changed)
    if any(layout.ladder[i].kind == "experts" for i in order):
        for share in SHARES:
            yield f"{share:.0%} of missing experts copied", replace(plan, expert_stream_share=share)


def _moves(planned: Sequence[int], order: list[int], layout: Layout) -> Iterator[tuple[str, dict[int, int]]]:
    """Other places for the shards that are not resident: for each that changes, its new place."""
    for kind in sorted({layout.ladder[i].kind for i in order}):
        members = [i for i in order if layout.ladder[i].kind == kind]
        for share in SHARES:
            yield f"{share:.0%} of {kind} on the CPU", dict.fromkeys(members, STREAMED) | _all(members, share, CPU)
    on_cpu, streamed = ([i for i in order if planned[i] == place] for place in (CPU, STREAMED))
    for share in MOVED:
        yield f"{share:.0%} more on the CPU", _all(streamed, share, CPU)
        yield f"{share:.0%} more streamed", _all(on_cpu, share, STREAMED)
    nothing, n = dict.fromkeys(order, STREAMED), len(on_cpu)
    yield "the first on the CPU", nothing | dict.fromkeys(order[:n], CPU)
    yield "the last on the CPU", nothing | dict.fromkeys(order[len(order) - n :], CPU)
    yield "all on the CPU", dict.fromkeys(order, CPU)
    yield "all streamed", nothing
    for seed in range(N_RANDOM):
        draw = random.Random(seed)
        flipped = [i for i in order if draw.random() < FLIPPED]
        yield f"{FLIPPED:.0%} changed at random, {seed}", {i: STREAMED + CPU - planned[i] for i in flipped}


def _all(members: list[int], share: float, place: int) -> dict[int, int]:
    """A share of the members, evenly spread, in one place."""
    count = round(len(members) * share)
    return {members[int((i + 0.5) * len(members) / count)]: place for i in range(count)}


def _placed(plan: Plan, changed: dict[int, int]) -> Plan:
    first = plan.tiers[0]
    places = tuple(changed.get(i, place) for i, place in enumerate(first.placements))
    return replace(plan, tiers=(replace(first, placements=places), *plan.tiers[1:]))


def measure(runtime: Runtime, each: Arrangement, words: list[int], n_prompt: int, n_generate: int) -> float:
    """Adopts an arrangement and decodes after the prompt that sequence 0 holds; returns tokens per second."""
    placement, device = runtime.placement, runtime.device
    assert placement is not None
    assert device is not None
    placement.adopt(each.plan)
    while placement.fill():
        pass
    begin = 0.0
    # The first tokens compile the graph, and fill the ring and the cache of experts.
    for i in range(-(n_generate // 2), n_generate):
        if i == 0:
            begin = time.perf_counter()
        for row in runtime.decode([Rows(0, [words[i % len(words)]])]):
            runtime.logits(row)
    rate = n_generate / (time.perf_counter() - begin)
    stats = device.stats()
    each.resident_bytes, each.ring_bytes = stats.resident_bytes, stats.ring_bytes
    if placement.plan is not each.plan:
        raise BadArgument(f"{each.name}: the context has grown and a new plan was made: try a multiple of 256 tokens")
    runtime.trim(0, n_prompt)
    return rate


def cell(runtime: Runtime, budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all arrangements at a budget."""
    placement, device = runtime.placement, runtime.device
    assert placement is not None
    assert device is not None
    device.set_budget(budget, timeout_s=60.0)
    words = runtime.tokenizer.tokenize(PASSAGE)
    n_prompt = args.context - ANSWER * args.generate
    prompt = (words * -(-n_prompt // len(words)))[:n_prompt]
    for _ in range(2):  # the second time the plan knows the context, and which experts this text needs
        runtime.clear(0)
        runtime.decode_tokens(0, prompt)
        placement.learn()
        placement.replan()
    plan = placement.plan
    layout = lay_out(runtime.model_info, runtime.device_name)
    if plan.resident == len(layout.ladder):
        raise BadArgument(f"everything is resident in {common.format_size(budget)}: nothing else can be arranged")
    found = arrangements(plan, layout)
    with progress.steps(len(found) + args.repeat * (1 + N_BEST)) as steps:
        for each in found:
            steps.next(f"{each.name} at {common.format_size(budget)}")
            each.first = measure(runtime, each, words, n_prompt, args.generate)
        ahead = sorted(found[1:], key=lambda each: each.first, reverse=True)[:N_BEST]
        for _ in range(args.repeat):
            for each in (found[0], *ahead):
                steps.next(f"{each.name} at {common.format_size(budget)} again")
                each.again.append(measure(runtime, each, words, n_prompt, 2 * args.generate))
    best = max((found[0], *ahead), key=lambda each: each.tokens_per_second)
    return {
        "budget_mb": budget / 2**20,
        "predicted_tokens_per_second": plan.predicted_decode_tps(),
        "planned_tokens_per_second": found[0].tokens_per_second,
        "best": best.name,
        "best_tokens_per_second": best.tokens_per_second,
        "planned_over_best": found[0].tokens_per_second / best.tokens_per_second,
        "arrangements": [each.document() for each in found],
    }


def run(args: argparse.Namespace) -> None:
    if args.context <= ANSWER * args.generate:
        raise BadArgument(f"a --context of {args.context} has no room for a prompt and {ANSWER} x --generate tokens")
    config = EngineConfig(
        model=str(models.resolve(args.model)),
        device=args.device,
        n_ctx=args.context,
        n_ubatch=args.ubatch,
        n_parallel=1,
        n_threads=args.threads,
    )
    with common.load_within(config, args.vram_budget) as runtime:
        if runtime.device is None or not runtime.llama.can_trim:
            raise BadArgument("name a GPU or --device emulated, and a model whose last tokens can be taken back")
        rows = [cell(runtime, common.parse_size(budget), args) for budget in args.vram_budget.split(",")]
    if args.json:
        about = {key: getattr(args, key) for key in ("device", "threads", "context", "generate", "repeat")}
        print(json.dumps({"model": Path(args.model).name, **about, "rows": rows}, indent=1))
        return
    for row in rows:
        print(
            "{budget_mb:.0f} MiB: {planned_tokens_per_second:.2f} tok/s as planned (predicted"
            " {predicted_tokens_per_second:.2f}), {best_tokens_per_second:.2f} with {best}:"
            " {planned_over_best:.3f} of the best of {n}".format(**row, n=len(row["arrangements"]))
        )
        for each in sorted(row["arrangements"], key=lambda each: -each["tokens_per_second"]):
            print("  {tokens_per_second:8.2f}  {name}".format(**each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vram-budget", required=True, metavar="A,B,...", help="in MiB or with a unit")
    parser.add_argument("--context", type=common.positive, default=1024, help="tokens, the answer included (1024)")
    parser.add_argument("--ubatch", type=int, default=0, help="0: chosen for the prompt")
    parser.add_argument("--generate", type=common.positive, default=8, help="tokens of each arrangement in a pass (8)")
    parser.add_argument("--repeat", type=common.positive, default=3, help="further passes of the best few (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    try:
        run(parser.parse_args())
    except FrameshardError as error:
        sys.exit(f"regret: {error}")


if __name__ == "__main__":
    main()
