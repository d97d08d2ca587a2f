"""Measures tokens per second with and without speculative decoding, at several budgets, for a text with repetitions.

    python profiles/tools/speculation.py M.gguf --device CUDA0 --threads 14 --vram-budget 2GiB,4GiB,8GiB,12GiB --json

Speed depends on shapes, not on values, so the tool also works with random weights. Such a model repeats nothing, so the
answers are given: those of SmolLM2-135M-Instruct as an innkeeper, about a page of lore (dialogue.json). The set
"greedy" has temperature 0. The set "drawn" has 0.7 and repeats less. The model reads the lore and follows these
answers, like a job that is resumed after a crash. Every token is decoded, and tokens are drafted, verified and rejected
as usual; only the sampler's choice is given. A larger model repeats itself less than SmolLM2; tokens_per_step has the
effect of the text.

With --draft-model a third way is measured, "draft", with SmolLM2 (smollm2-135m) as the draft model. The answers consist
of its tokens, so the vocabulary of the other model does not matter. SmolLM2 has generated the greedy set itself, so
only the drawn set shows the effect of a good draft model.

The tool also measures the time of a step of 1 to 16 tokens, to compare it with the plan's prediction, from which the
number of drafted tokens is chosen. With --profile nothing is measured: the gain is computed from the plans for that
machine. This needs only the header of the model's file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

from frameshard.cli import common
from frameshard.engine.batch import Batcher
from frameshard.engine.draft import DraftModel
from frameshard.engine.llama import Rows
from frameshard.engine.lookup import Lookup, best_length
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.models import resolve
from frameshard.plan.memory import DRIVER_BYTES
from frameshard.plan.model import read_model
from frameshard.plan.plans import plan_workload
from frameshard.plan.profile import load
from frameshard.plan.workload import Workload
from frameshard.wire.engine import Done, EngineConfig, JobEvent, Submit
from frameshard.wire.messages import Sampling

MIB = 1 << 20
DIALOGUE = Path(__file__).parent / "dialogue.json"
SETS = ("greedy", "drawn")
LENGTHS = (1, 2, 4, 8, 16)


class Follower(DraftModel):
    """A draft model with the vocabulary of the given text, which may differ from that of the model."""

    def _check_vocabulary(self) -> None:
        pass


def say(runtime: Runtime, draft: DraftModel | None, prompt: list[int], answer: list[int]) -> tuple[int, int, float]:
    """Makes the model follow an answer; returns the tokens, the steps, and the seconds after the first token."""
    runtime.tokenizer.tokenize = lambda *_, **__: prompt  # type: ignore[method-assign] # the dialogue has its own vocabulary
    batcher = Batcher(runtime, draft=draft)
    sampling = Sampling(temperature=0.0, max_tokens=len(answer))
    request = Submit(1, "completion", sampling, prompt="Lead on.", resume=tuple(answer))
    batcher.add(RequestReader(runtime).read(request))
    events: list[JobEvent] = []
    while batcher.busy:
        events = batcher.step() or events
    done, accepted = events[-1], batcher.statistics()["accepted_tokens"]
    assert isinstance(done, Done)
    assert isinstance(accepted, int)
    n = done.n_generated - 1
    return n, n - accepted, done.decode_s


def checking(runtime: Runtime, tokens: list[int]) -> dict[str, dict[str, float]]:
    """For each number of tokens, the measured and the predicted milliseconds of a step."""
    assert runtime.placement.plan is not None
    runtime.clear(0)
    runtime.decode_tokens(0, tokens)
    rows = {}
    for n in LENGTHS:
        took = []
        for _ in range(5):
            start = time.perf_counter()
            runtime.logits(runtime.decode([Rows(0, tokens[:n], "all")])[-1])
            took.append(time.perf_counter() - start)
            runtime.trim(0, len(tokens))
        predicted = runtime.placement.plan.predicted_decode_s(1, n)
        rows[str(n)] = {"ms": round(1e3 * statistics.median(took[1:]), 2), "predicted_ms": round(1e3 * predicted, 2)}
    runtime.clear(0)
    return rows


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """The gain that a profile predicts: for all answers of a set together, and for the answer with the least gain."""
    dialogue = json.loads(DIALOGUE.read_text())
    model = read_model(resolve(args.model))
    profile = load(args.profile).seen_by(model)
    workload = Workload(1024, n_ubatch=args.ubatch)
    budgets = []
    for budget in args.vram_budget:
        plan = plan_workload(model, profile, budget, workload, DRIVER_BYTES)
        took = {n: plan.predicted_decode_s(1, n) for n in LENGTHS}
        row: dict[str, Any] = {
            "budget_mb": round(budget / MIB),
            "step_ms": {str(n): round(1e3 * seconds, 1) for n, seconds in took.items()},
        }
        for each in SETS:
            gains = []
            for one in dialogue[each]:
                seconds, left, lookup = 0.0, one["answer"], Lookup(dialogue["prefix"] + one["rest"])
                while left:
                    length, _ = best_length(lookup.expected, took.__getitem__, LENGTHS[-1])
                    draft = lookup.draft(length - 1)
                    n = 1
                    while n <= len(draft) and n < len(left) and draft[n - 1] == left[n - 1]:
                        n += 1
                    for token in left[:n]:
                        lookup.add(token)
                    left, seconds = left[n:], seconds + took[length]
                gains.append((len(one["answer"]) * took[1], seconds))
            total = sum(alone for alone, _ in gains) / sum(seconds for _, seconds in gains)
            row[each] = {"gain": round(total, 3), "least": round(min(a / s for a, s in gains), 3)}
        budgets.append(row)
    return {"model": args.model, "profile": Path(args.profile).stem, "budgets": budgets}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    dialogue = json.loads(DIALOGUE.read_text())
    config = EngineConfig(
        model=str(resolve(args.model)),
        device=args.device,
        n_ctx=1024,
        n_ubatch=args.ubatch,
        n_parallel=1,
        n_threads=args.threads,
        mode="stream_only" if args.stream_only else "planned",
    )
    with Runtime.load(config) as runtime, contextlib.ExitStack() as stack:
        assert runtime.device is not None
        ways: dict[str, DraftModel | None] = {"off": None, "auto": None}
        if args.draft_model:
            ways["draft"] = stack.enter_context(contextlib.closing(Follower(runtime, str(resolve(args.draft_model)))))
        if runtime.n_vocab <= max(dialogue["prefix"]):
            raise SystemExit("the model's vocabulary is smaller than that of the dialogue")
        budgets = []
        for budget in args.vram_budget:
            runtime.device.set_budget(budget, timeout_s=60.0)
            runtime.placement.replan()
            while runtime.placement.fill():
                pass
            steps = checking(runtime, dialogue["prefix"])
            runs: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
            for _ in range(args.repeat):
                for each in SETS:
                    for way, draft in ways.items():
                        runtime.config = dataclasses.replace(config, speculate="off" if way == "off" else "auto")
                        said = [
                            say(runtime, draft, dialogue["prefix"] + one["rest"], one["answer"][: args.tokens])
                            for one in dialogue[each][: args.answers]
                        ]
                        n, decodes, seconds = (sum(column) for column in zip(*said, strict=True))
                        runs.setdefault((each, way), []).append((n, decodes, seconds))
            row: dict[str, Any] = {"budget_mb": round(budget / MIB), "steps": steps}
            if (draft := ways.get("draft")) is not None:
                row["draft_ms"] = round(1e3 * draft.step_seconds(1), 2)
            for each in SETS:
                off = statistics.median(n / seconds for n, _, seconds in runs[each, "off"])
                row[each] = {}
                for way in ways:
                    rates = [n / seconds for n, _, seconds in runs[each, way]]
                    row[each][way] = {
                        "tps": round(statistics.median(rates), 2),
                        "ratio": round(statistics.median(rates) / off, 3),
                        "tokens_per_step": round(statistics.median(n / steps for n, steps, _ in runs[each, way]), 3),
                        "runs_tps": rates,
                    }
            budgets.append(row)
        return {
            "model": args.model,
            "draft_model": args.draft_model,
            "device": runtime.device_name,
            "mode": runtime.mode,
            "budgets": budgets,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=common.positive, default=0, metavar="N")
    parser.add_argument("--ubatch", type=common.positive, default=512, metavar="N")
    parser.add_argument("--stream-only", action="store_true")
    parser.add_argument("--vram-budget", type=common.parse_budgets, required=True, metavar="A,B,...")
    parser.add_argument("--profile", metavar="FILE", help="predict for this machine instead")
    parser.add_argument("--draft-model", metavar="PATH|NAME", help="also measure with this draft model")
    parser.add_argument("--answers", type=common.positive, default=4, metavar="N", help="of each set (4)")
    parser.add_argument("--tokens", type=common.positive, default=64, metavar="N", help="of each answer (64)")
    parser.add_argument("--repeat", type=common.positive, default=3, metavar="N")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.profile and args.draft_model:
        parser.error("what a draft takes is measured: leave --draft-model out with --profile")
    if args.profile:
        predicted = predict(args)
        if args.json:
            common.emit_json(predicted)
            return
        for row in predicted["budgets"]:
            steps = ", ".join(f"{n}: {took}" for n, took in row["step_ms"].items())
            print(f"{row['budget_mb']} MiB; ms a step by its tokens: {steps}")
            for each in SETS:
                print(f"  {each:6} {row[each]['gain']:.2f} times, least of one answer {row[each]['least']:.2f}")
        return
    report = measure(args)
    if args.json:
        common.emit_json(report)
        return
    for row in report["budgets"]:
        steps = ", ".join(f"{n}: {each['ms']} ({each['predicted_ms']})" for n, each in row["steps"].items())
        print(f"{row['budget_mb']} MiB; ms a step by its tokens, measured (predicted): {steps}")
        if "draft_ms" in row:
            print(f"  the draft model took {row['draft_ms']} ms a token")
        for each in SETS:
            for way, found in row[each].items():
                print(
                    f"  {each:6} {way:5} {found['tps']} tokens/s: {found['ratio']} times, "
                    f"{found['tokens_per_step']} tokens a step"
                )


if __name__ == "__main__":
    main()
