"""The evaluation of the paper on pipelined sharding, predicted for its client systems beside the published figures.

    python profiles/tools/evaluate.py --system cli3 --json

Nothing is measured. Plans for the spec-sheet profiles of the systems give TTFT, tokens/s and the end-to-end latency of
a prompt and 100 tokens, for the four models of the paper, its contexts and its VRAM sizes. All experts are taken to be
chosen equally often. ``paper.json`` has the published figures and says where each is from.

For cli3 the paper's authors also published plain llama.cpp (``-ngl``): 286 cells. They tell the rates of CPU, GPU and
pageable copies that llama.cpp reaches there, for each type of weights. These rates are fitted on every second cell; the
errors on the other cells are a part of the result. Predictions with fitted rates stand beside those from the sheet.
The fit says nothing about copies from pinned memory, which plain llama.cpp does not use.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import synth_gguf
from numpy.typing import NDArray

from frameshard.cli import common
from frameshard.errors import BudgetBelowFloor
from frameshard.plan import profile as profiles
from frameshard.plan.costs import Conditions, Costs
from frameshard.plan.layout import lay_out
from frameshard.plan.memory import DRIVER_BYTES, kv_bytes
from frameshard.plan.model import Model, read_model
from frameshard.plan.plans import plan_workload
from frameshard.plan.profile import BYTES_PER_WEIGHT, Attention, Product, Profile
from frameshard.plan.workload import Workload

PAPER: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text())
BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32)
"""The paper's VRAM sizes in GiB."""
FITTED_ON = "cli3"
GENERATED = 100
"""Tokens of the answer in the end-to-end latency, as in the paper."""
GRID = tuple(2**i for i in range(13))
SLOWER = 1.01  # a longer time up to this factor is no regression: plans are compared to within 1 %

Row = dict[str, Any]
Floats = NDArray[np.float64]


def models(names: Sequence[str]) -> dict[str, Model]:
    """The paper's models, read from files that have a header and no weights."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = os.path.join(folder, f"{name}.gguf")
            synth_gguf.write(synth_gguf.SHAPES[name], path, with_weights=False)
            found[name] = read_model(path)
    return found


# ---- rates from plain llama.cpp --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """A published cell of llama.cpp with the last ``ngl`` layers on the GPU, the output head included."""

    model: str
    context: int
    budget_mb: int
    ubatch: int
    ngl: int
    prompt_tokens: int
    ttft_s: float
    generated: float
    tps: float


@dataclass(frozen=True)
class Rates:
    """What llama.cpp reaches with one type of weights: bytes/s (``*_flops``: operations/s); 0 if the fit cannot tell.

    :param kv_gpu: the KV cache of the layers on the GPU; ``kv_cpu`` of the others.
    :param mixed: tokens/s if nothing but the change between GPU and CPU took time.
    :param copies: weights from pageable memory; ``kv_copies`` the KV cache of the layers on the CPU.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    kv_gpu: float = 0.0
    kv_cpu: float = 0.0
    mixed: float = 0.0
    copies: float = 0.0
    gpu_flops: float = 0.0
    attention_flops: float = 0.0
    kv_copies: float = 0.0


DECODE = ("gpu", "cpu", "kv_gpu", "kv_cpu", "mixed")
PREFILL = ("copies", "gpu_flops", "attention_flops", "kv_copies")


@dataclass(frozen=True)
class Placed:
    """llama.cpp's placement of a model with ``-ngl``.

    :param on_gpu: 1 for each shard on the GPU, 0 for the others; shape [shards].
    :param layers: the share of layers on the GPU.
    """

    costs: Costs
    on_gpu: Floats
    layers: float


def place(model: Model, profile: Profile, ngl: int) -> Placed:
    layout, first = lay_out(model, profile.device), max(model.n_layer - ngl, 0)
    is_on = [ngl > model.n_layer if shard.layer is None else shard.layer >= first for shard in layout.ladder]
    on_gpu = np.array(is_on, dtype=np.float64)
    costs = Costs(layout, profile, on_gpu, Conditions(0, 0, profile.handoff_s, math.inf))
    return Placed(costs, on_gpu, 1 - first / model.n_layer)


def decode_terms(cell: Plain, model: Model, placed: Placed) -> tuple[list[float], float]:
    """The bytes that a token reads at each of the rates ``DECODE``, and the seconds that no rate explains."""
    costs, off = placed.costs, 1 - placed.on_gpu
    active = costs.shards.n_bytes * costs.shards.active
    kv = kv_bytes(model, 256) / 256 * (cell.prompt_tokens + cell.generated / 2)
    mixed = placed.layers > 0 and off.any()
    amounts = [active @ placed.on_gpu, active @ off, kv * placed.layers, kv * (1 - placed.layers), mixed]
    return [float(amount) for amount in amounts], float(costs.kernels_s.sum() + costs.meetings_s @ off)


def prefill_terms(cell: Plain, model: Model, placed: Placed) -> tuple[list[float], float]:
    """The same for a prompt and the rates ``PREFILL``. Each graph copies all weights that are not on the GPU, except
    for the output head, which computes one row."""
    costs, shards, n = placed.costs, placed.costs.shards, cell.prompt_tokens
    starts = range(0, n, cell.ubatch)
    inner = ~shards.masks["output"]
    weights = shards.n_weights.sum(axis=0) * shards.active
    head_dim, n_head, _ = profiles.heads_of(model)
    amounts = [
        len(starts) * float((shards.n_bytes * inner) @ (1 - placed.on_gpu)),
        2.0 * n * float(weights @ inner),
        4.0 * head_dim * n_head * model.n_layer * n * n / 2,
        kv_bytes(model, 256) / 256 * (1 - placed.layers) * sum(starts),
    ]
    return amounts, len(starts) * float(costs.kernels_s.sum()) + n * float(costs.passes_s.sum())


def fit(terms: Floats, overhead_s: Floats, seconds: Floats) -> Floats:
    """The rates with the least squares of relative errors.

    :param terms: shape [cells, rates]; ``overhead_s`` and ``seconds``: shape [cells].
    :returns: shape [rates]; 0 for rates that would be negative, whose terms are left out.
    """
    scale = np.maximum(terms.max(axis=0), 1e-300)
    relative = terms / scale / seconds[:, None]
    columns = [i for i in range(terms.shape[1]) if terms[:, i].any()]
    while True:
        inverse = np.linalg.lstsq(relative[:, columns], 1 - overhead_s / seconds, rcond=None)[0]
        if (inverse > 0).all():
            break
        del columns[int(np.argmin(inverse))]
    rates = np.zeros(terms.shape[1])
    rates[columns] = scale[columns] / inverse
    return rates


def errors(predicted: Floats, seconds: Floats) -> Row:
    off = np.abs(predicted / seconds - 1)
    return {"median": float(np.median(off)), "p90": float(np.quantile(off, 0.9)), "most": float(off.max())}


def plain_cells(kind: str) -> list[Plain]:
    """The published cells of models with weights of this kind, in the order of models, contexts, ubatches, budgets."""
    cells = [Plain(*row) for row in PAPER["plain"]]
    return [cell for cell in cells if synth_gguf.SHAPES[cell.model].kind == kind]


def calibrate(kind: str, found: dict[str, Model], profile: Profile) -> tuple[Rates, list[Row]]:
    """Fits the rates on every second published cell; the errors are those on the other cells."""
    cells = plain_cells(kind)
    held_out = np.arange(len(cells)) % 2 == 1
    placed = {(cell.model, cell.ngl): place(found[cell.model], profile, cell.ngl) for cell in cells}
    fitted: dict[str, float] = {}
    report = []
    for what, names, terms_of, seconds_of in (
        ("decode", DECODE, decode_terms, lambda cell: 1 / cell.tps),
        ("prefill", PREFILL, prefill_terms, lambda cell: cell.ttft_s),
    ):
        found_terms = [terms_of(cell, found[cell.model], placed[cell.model, cell.ngl]) for cell in cells]
        terms = np.array([amounts for amounts, _ in found_terms])
        if what == "decode" and all(each.layers < 1 for each in placed.values()):
            terms[:, DECODE.index("mixed")] = 0.0  # nothing tells this time from the CPU's
        overhead = np.array([seconds for _, seconds in found_terms])
        seconds = np.array([seconds_of(cell) for cell in cells])
        rates = fit(terms[~held_out], overhead[~held_out], seconds[~held_out])
        fitted.update(zip(names, rates.tolist(), strict=True))
        spec = np.array([getattr(spec_rates(profile), name) for name in names])
        by_fit = terms @ np.divide(1, rates, out=np.zeros_like(rates), where=rates > 0) + overhead
        by_spec = terms @ (1 / spec) + overhead
        report.append(
            {
                "weights": kind,
                "figure": what,
                "cells": len(cells),
                "held_out": int(held_out.sum()),
                "spec_sheet": errors(by_spec[held_out], seconds[held_out]),
                "fitted": errors(by_fit[held_out], seconds[held_out]),
            }
        )
    return Rates(**fitted), report


def spec_rates(profile: Profile) -> Rates:
    """What the spec sheet says about the same figures."""
    gpu, cpu, pageable = profile.gpu_gemv, profile.cpu_gemv, profile.h2d_pageable
    return Rates(gpu, cpu, gpu, cpu, 1 / profile.handoff_s, pageable, profile.gpu_flops, profile.gpu_flops, pageable)


def fitted_profile(profile: Profile, rates: Rates, model: Model) -> Profile:
    """The profile with the fitted rates in the places where a measured profile has them. Rates that the fit cannot tell
    stay those of the spec sheet."""
    kind = profiles.kinds_of(model)[0]
    per_weight = BYTES_PER_WEIGHT[kind.type_name]
    cpu, gpu = rates.cpu or profile.cpu_gemv, rates.gpu or profile.gpu_gemv
    gpu_flops = rates.gpu_flops or profile.gpu_flops
    dram = max(profile.dram, cpu)
    product = Product(
        GRID,
        tuple(min(2 * n * cpu / per_weight, profile.cpu_flops) for n in GRID),
        tuple(min(2 * n * gpu / per_weight, gpu_flops) for n in GRID),
        min(cpu, dram - profile.h2d_beside_cpu),
        profile.h2d_beside_cpu,
    )
    attention = Attention((1,), (rates.kv_gpu or gpu,), (rates.attention_flops or profile.gpu_flops,))
    return dataclasses.replace(
        profile,
        dram=dram,
        h2d_pageable=rates.copies or profile.h2d_pageable,
        products={profiles.kind_name(kind): product},
        attention={profiles.heads_name(profiles.heads_of(model)): attention},
    )


# ---- predictions -----------------------------------------------------------------------------------------------------


def predict(model: Model, profile: Profile, context: int, n_prompt: int, budget_gib: int) -> Row | None:
    """What ``frameshard plan --parallel 1`` predicts; ``None`` below the floor."""
    workload = Workload(context, n_prompt, n_ubatch=0)
    seen, budget = profile.seen_by(model), budget_gib << 30
    try:
        plan = plan_workload(model, seen, budget, workload, DRIVER_BYTES)
    except BudgetBelowFloor:
        return None
    return {"ubatch": plan.n_ubatch, **latencies(plan.predicted_ttft(n_prompt), plan.predicted_decode_tps())}


def latencies(ttft_s: float, tps: float) -> Row:
    return {"ttft_s": ttft_s, "tps": tps, "e2e_s": ttft_s + GENERATED / tps}


def published(system: str, model: str, context: int, budget_gib: int) -> Row | None:
    key = [system, model, context, budget_gib]
    return next((latencies(*row[4:]) for row in PAPER["published"] if row[:4] == key), None)


def plain_of(system: str, model: str, context: int, budget_gib: int) -> Row | None:
    """Plain llama.cpp's published cell with the shortest end-to-end latency. With more VRAM than the largest published
    budget everything was on the GPU already."""
    if system != FITTED_ON:
        return None
    cells = [c for c in (Plain(*row) for row in PAPER["plain"]) if (c.model, c.context) == (model, context)]
    at = max((c.budget_mb for c in cells if c.budget_mb <= budget_gib * 1000), default=None)
    return min((latencies(c.ttft_s, c.tps) for c in cells if c.budget_mb == at), key=lambda r: r["e2e_s"], default=None)


def evaluate(args: argparse.Namespace) -> Row:
    system = PAPER["systems"][args.system]
    spec = profiles.load(Path(__file__).parents[1] / f"{system['profile']}.json")
    chosen = [name for name in PAPER["models"] if name in args.model and name not in system["out_of_memory"]]
    kinds = {name: synth_gguf.SHAPES[name].kind for name in chosen}
    wanted = (
        {cell.model for kind in set(kinds.values()) for cell in plain_cells(kind)} if args.system == FITTED_ON else ()
    )
    found = models([name for name in PAPER["models"] if name in {*chosen, *wanted}])
    rates: dict[str, Rates] = {}
    report: list[Row] = []
    if args.system == FITTED_ON:
        for kind in dict.fromkeys(kinds.values()):
            rates[kind], errors_of_kind = calibrate(kind, found, spec)
            report += errors_of_kind
    rows = []
    for name in chosen:
        fitted = fitted_profile(spec, rates[kinds[name]], found[name]) if rates else None
        for context in args.ctx:
            n_prompt = PAPER["models"][name][str(context)]
            for budget in (each for each in args.vram if each <= system["vram_gb"]):
                cell = (context, n_prompt, budget)
                rows.append(
                    {
                        "model": name,
                        "context": context,
                        "prompt_tokens": n_prompt,
                        "budget_gib": budget,
                        "spec_sheet": predict(found[name], spec, *cell),
                        "fitted": predict(found[name], fitted, *cell) if fitted else None,
                        "published": published(args.system, name, context, budget),
                        "llama_cpp": plain_of(args.system, name, context, budget),
                    }
                )
    return {
        "system": args.system,
        "profile": system["profile"],
        "generated": GENERATED,
        "rates": {kind: dataclasses.asdict(each) for kind, each in rates.items()},
        "calibration": report,
        "rows": rows,
        "beside_published": [each for way in ("spec_sheet", "fitted") for each in beside_published(rows, way)],
        "slower_with_more_vram": [each for way in ("spec_sheet", "fitted") for each in regressions(rows, way)],
    }


def beside_published(rows: Sequence[Row], way: str) -> list[Row]:
    """How the predictions of ``way`` compare with the published figures of another program: the factor between them,
    predicted over published, by figure."""
    found = []
    for figure in ("ttft_s", "tps", "e2e_s"):
        factors = [row[way][figure] / row["published"][figure] for row in rows if row[way] and row["published"]]
        if factors:
            found.append(
                {
                    "rates": way,
                    "figure": figure,
                    "cells": len(factors),
                    "least": min(factors),
                    "median": statistics.median(factors),
                    "most": max(factors),
                    "within_a_third": sum(3 / 4 <= factor <= 4 / 3 for factor in factors) / len(factors),
                }
            )
    return found


def regressions(rows: Sequence[Row], way: str) -> list[Row]:
    """The cells whose prediction is worse than that of the same cell with less VRAM, by figure."""
    found = []
    for figure in ("ttft_s", "tps", "e2e_s"):
        best: dict[tuple[str, int], float] = {}
        for row in sorted((row for row in rows if row[way]), key=lambda row: row["budget_gib"]):
            key = (row["model"], row["context"])
            seconds = 1 / row[way][figure] if figure == "tps" else row[way][figure]
            before = best.get(key, math.inf)
            if seconds > SLOWER * before:
                case = {name: row[name] for name in ("model", "context", "budget_gib")}
                found.append({"rates": way, "figure": figure, **case, "by": seconds / before})
            best[key] = min(seconds, before)
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def show(result: Row) -> None:
    ways = [way for way in ("spec_sheet", "fitted", "published", "llama_cpp") if any(r[way] for r in result["rows"])]
    figures = {"ttft_s": "TTFT s", "tps": "tok/s", "e2e_s": "e2e s"}
    heads = ["model", "context", "GiB", *(f"{way.replace('_', ' ')}: {f}" for f in figures.values() for way in ways)]
    lines = [
        [row["model"], str(row["context"]), str(row["budget_gib"])]
        + [f"{row[way][key]:.3g}" if row[way] else "-" for key in figures for way in ways]
        for row in result["rows"]
    ]
    print(
        f"{result['system']} ({result['profile']}), predicted, not measured; end to end: {GENERATED} tokens of answer"
    )
    print(common.table([heads, *lines]))
    for each in result["calibration"]:
        spec, fitted = each["spec_sheet"], each["fitted"]
        print(
            f"plain llama.cpp, {each['weights']}, {each['figure']}: {each['held_out']} held-out cells of "
            f"{each['cells']}, off by {fitted['median']:.0%} (median), {fitted['most']:.0%} (most); by the spec sheet "
            f"{spec['median']:.0%}, {spec['most']:.0%}"
        )
    for each in result["beside_published"]:
        print(
            f"{each['rates']}: {each['figure']} {each['least']:.2f}, {each['median']:.2f}, {each['most']:.2f} of the "
            f"published (least, median, most of {each['cells']}), {each['within_a_third']:.0%} within a third"
        )
    for each in result["slower_with_more_vram"]:
        print(f"slower with more VRAM: {each}")


def numbers(known: Sequence[int]) -> Callable[[str], list[int]]:
    def parse(text: str) -> list[int]:
        chosen = [int(word) for word in text.split(",")]
        if not set(chosen) <= set(known):
            raise ValueError
        return chosen

    return parse


def main() -> None:
    contexts = [int(context) for context in next(iter(PAPER["models"].values()))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True, choices=PAPER["systems"])
    parser.add_argument("--model", nargs="+", choices=PAPER["models"], default=list(PAPER["models"]))
    parser.add_argument("--ctx", type=numbers(contexts), default=contexts, metavar="A,B", help=f"of {contexts}")
    parser.add_argument(
        "--vram", type=numbers(BUDGETS), default=list(BUDGETS), metavar="A,B", help=f"GiB, of {BUDGETS}"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = evaluate(args)
    print(json.dumps(result)) if args.json else show(result)


if __name__ == "__main__":
    main()
