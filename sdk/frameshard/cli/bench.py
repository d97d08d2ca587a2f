"""``frameshard bench``: time to first token and tokens per second at several budgets, beside what the plan predicts.

One model is loaded once; the budget changes between rows. A figure is the median of ``--repeat`` runs, rows
interleaved, so that a slow spell of the machine hits all of them. ``--vs-stock`` runs llama.cpp without the shard
device in turn, in a process of its own: two teams of compute threads in one process disturb each other.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import common
from .vram import Sampler

if TYPE_CHECKING:
    from frameshard.engine.runtime import Runtime

MIB = 2**20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and VRAM at several budgets, beside the plan's prediction",
        description="Measures time to first token, decoding and peak VRAM at each budget.",
    )
    common.add_model_args(parser)
    parser.add_argument(
        "--vram-budget",
        default="full",
        metavar="A,B,...",
        help="budgets in MiB or with a unit; also: floor, full (full)",
    )
    parser.add_argument("--prompt", type=common.positive, default=512, metavar="N", help="tokens of each prompt (512)")
    parser.add_argument("--generate", type=common.positive, default=64, metavar="N", help="tokens decoded (64)")
    parser.add_argument("--parallel", type=common.positive, default=1, metavar="N", help="sequences at once (1)")
    parser.add_argument("--ubatch", type=common.positive, default=512, metavar="N", help="prompt tokens at once (512)")
    parser.add_argument("--repeat", type=common.positive, default=3, metavar="N", help="runs of each row (3)")
    parser.add_argument("--stream-only", action="store_true", help="compute nothing on the CPU")
    parser.add_argument("--vs-stock", action="store_true", help="also run llama.cpp alone on the same cores (emulated)")
    parser.set_defaults(run=run)


@dataclass
class _Row:
    """Measurements of one budget; a budget of ``None`` is llama.cpp without the shard device."""

    budget: int | None
    ttft: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    ledger_peak: int = 0
    nvml_peak: int | None = None
    copied: int = 0
    plan: Any = None


_stock: Runtime | None = None


def run(args: argparse.Namespace) -> int:
    from frameshard import errors
    from frameshard.engine.runtime import resolve_device

    device = resolve_device(args.device)
    if args.vs_stock and device != "emulated":
        raise errors.BadArgument("--vs-stock compares on the CPU's cores: use it with --device emulated")
    with contextlib.ExitStack() as stack:
        other = None
        if args.vs_stock:
            context = multiprocessing.get_context("spawn")
            other = stack.enter_context(ProcessPoolExecutor(1, context, _load_stock, (args,)))
        runtime = stack.enter_context(_load(args, device))
        rows = [_Row(budget) for budget in _budgets(args.vram_budget, runtime)]
        stock = _Row(None)
        for _ in range(args.repeat):
            for row in rows:
                _measure(row, runtime, args)
            if other is not None:
                stock = other.submit(_measure_stock, stock, args).result()
        documents = [_document(row, args) for row in rows]
    result: dict[str, object] = {"model": args.model, "device": device, "threads": args.threads, "rows": documents}
    if args.vs_stock:
        reference = _document(stock, args)
        result["stock"] = reference
        for document in documents:
            document["decode_vs_stock"] = document["decode_tps"] / reference["decode_tps"]
            document["ttft_vs_stock"] = document["ttft_s"] / reference["ttft_s"]
    if args.json:
        common.emit_json(result)
    else:
        _print(documents, result.get("stock"))
    return 0


def _load(args: argparse.Namespace, device: str) -> Runtime:
    from frameshard import models
    from frameshard.engine.runtime import EngineConfig, Runtime

    return Runtime.load(
        EngineConfig(
            model=str(models.resolve(args.model)),
            device=device,
            n_ctx=(args.prompt + args.generate + 1) * args.parallel,
            n_ubatch=max(args.ubatch, args.parallel),
            n_parallel=args.parallel,
            n_threads=args.threads,
            link_gbps=args.link_gbps or 0.0,
            mode="stream_only" if args.stream_only else "planned",
        )
    )


def _load_stock(args: argparse.Namespace) -> None:
    """In the process of ``--vs-stock``: the model without the shard device."""
    global _stock
    _stock = _load(args, "cpu")


def _measure_stock(row: _Row, args: argparse.Namespace) -> _Row:
    assert _stock is not None
    _measure(row, _stock, args)
    return row


def _budgets(text: str, runtime: Runtime) -> Iterator[int | None]:
    if runtime.device is None:
        yield None
        return
    stats = runtime.device.stats()
    named = {"floor": stats.floor_bytes, "full": stats.full_bytes}
    for part in text.split(","):
        yield named[part.strip()] if part.strip() in named else common.parse_size(part)


def _measure(row: _Row, runtime: Runtime, args: argparse.Namespace) -> None:
    from .passage import PASSAGE

    words = runtime.tokenize(PASSAGE)
    tokens = (words * -(-args.prompt // len(words)))[: args.prompt]
    device = runtime.device
    if device is not None and row.budget is not None:
        device.set_budget(row.budget, timeout_s=60.0)
        runtime.replan()
        while runtime.fill():
            pass
        device.reset_peak()
        row.plan = runtime.plan
    for seq in range(args.parallel):
        runtime.clear(seq)
    _decode(runtime, args.parallel, tokens[0])  # compiles the decode graph and fills the ring
    for seq in range(args.parallel):
        runtime.clear(seq)
    with Sampler(runtime.observer) as nvml:
        before = device.stats().copied_bytes if device is not None else 0
        start = time.perf_counter()
        for seq in range(args.parallel):
            runtime.decode_tokens(seq, tokens)
        middle = time.perf_counter()
        row.copied = device.stats().copied_bytes - before if device is not None else 0
        for i in range(args.generate):
            _decode(runtime, args.parallel, words[i % len(words)])
        end = time.perf_counter()
    row.ttft.append(middle - start)
    row.decode_tps.append(args.parallel * args.generate / (end - middle))
    if device is not None:
        row.ledger_peak = max(row.ledger_peak, device.stats().peak_bytes)
    if nvml.peak_bytes is not None:
        row.nvml_peak = max(row.nvml_peak or 0, nvml.peak_bytes)


def _decode(runtime: Runtime, parallel: int, token: int) -> None:
    """One token of every sequence; reading a row of logits waits for the result, as sampling would."""
    from frameshard.engine.runtime import Rows

    for row in runtime.decode([Rows(seq, [token]) for seq in range(parallel)]):
        runtime.logits(row)


def _document(row: _Row, args: argparse.Namespace) -> dict[str, Any]:
    ttft, decode = statistics.median(row.ttft), statistics.median(row.decode_tps)
    document: dict[str, Any] = {
        "budget_mb": None if row.budget is None else round(row.budget / MIB, 3),
        "ttft_s": ttft,
        "prefill_tps": args.prompt * args.parallel / ttft,
        "decode_tps": decode,
        "peak_vram_mb": round(row.ledger_peak / MIB, 3),
        "peak_nvml_mb": None if row.nvml_peak is None else round(row.nvml_peak / MIB, 3),
    }
    if row.plan is not None:
        document |= {
            "prefill_copied_mb": round(row.copied / MIB, 3),
            "predicted_ttft_s": row.plan.predicted_ttft(args.prompt) * args.parallel,
            "predicted_decode_tps": row.plan.predicted_decode_tps(args.parallel),
            "bound_ttft_s": row.plan.bound_ttft(args.prompt) * args.parallel,
            "bound_decode_tps": row.plan.bound_decode_tps(),
            "plan": row.plan.summary(args.prompt, args.parallel),
        }
    return document


def _print(rows: list[dict[str, Any]], stock: object) -> None:
    print(
        f"{'budget':>10} {'TTFT':>9} {'predicted':>10} {'bound':>9} "
        f"{'decode':>12} {'predicted':>10} {'bound':>8} {'peak':>10}"
    )
    for row in rows:
        budget = "-" if row["budget_mb"] is None else f"{row['budget_mb']:.0f} MiB"
        line = f"{budget:>10} {row['ttft_s']:>7.3f} s"
        if "plan" in row:
            line += (
                f" {row['predicted_ttft_s']:>8.3f} s {row['bound_ttft_s']:>7.3f} s {row['decode_tps']:>6.1f} tok/s"
                f" {row['predicted_decode_tps']:>10.1f} {row['bound_decode_tps']:>8.1f} {row['peak_vram_mb']:>6.0f} MiB"
            )
        else:
            line += f" {'':>20} {row['decode_tps']:>6.1f} tok/s"
        print(line)
    if isinstance(stock, dict):
        print(f"{'llama.cpp':>10} {stock['ttft_s']:>7.3f} s {'':>20} {stock['decode_tps']:>6.1f} tok/s")
