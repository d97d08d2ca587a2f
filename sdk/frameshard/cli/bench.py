"""``frameshard bench``: measures TTFT and tokens per second at several budgets, and compares them with the plan.

The model is loaded once, and the budget changes between rows. Each figure is the median of ``--repeat`` runs. The runs
of the rows alternate, so that a slow phase of the machine affects all rows. With ``--vs`` llama.cpp's own benchmark
runs after each row with the same budget (:mod:`frameshard.cli.comparison`). Both programs prefill the prompt once
before the measured run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import common, figures, interrupt, progress
from .vram import Sampler

if TYPE_CHECKING:
    from frameshard.cli.comparison import Comparison, Theirs
    from frameshard.engine.runtime import Runtime
    from frameshard.plan.workload import Workload

MIB = 2**20
_DRAWN = 3  # tokens decoded for a time line; it shows the second
_THEIRS = {"upstream": "", "upstream_by_weights": ", for weights"}  # of llama.cpp: the keys in a row, and in headings
_START = 61  # each sequence begins so many words later: with the same text all would use the same experts


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure speed and VRAM at several budgets, beside the plan's prediction",
        description="Measures time to first token, decoding and peak VRAM at each budget. Ctrl-C prints what was"
        " measured until then.",
    )
    common.add_model_args(parser)
    parser.add_argument(
        "--vram-budget",
        default="full",
        metavar="A,B,...",
        help="budgets in MiB or with a unit; also: floor, full (full)",
    )
    parser.add_argument("--prompt", type=common.positive, metavar="N", help="tokens of each prompt (512)")
    parser.add_argument("--generate", type=common.positive, default=64, metavar="N", help="tokens decoded (64)")
    parser.add_argument("--parallel", type=common.positive, metavar="N", help="sequences at once (1)")
    parser.add_argument(
        "--ctx", type=common.positive, metavar="N", help="context of each sequence in tokens (what the rows need)"
    )
    common.add_ubatch_arg(parser)
    common.add_kv_type_arg(parser)
    parser.add_argument("--repeat", type=common.positive, default=3, metavar="N", help="runs of each row (3)")
    parser.add_argument("--stream-only", action="store_true", help="compute nothing on the CPU")
    parser.add_argument(
        "--vs",
        metavar="LLAMA_BATCHED_BENCH",
        help="also run this program of llama.cpp at each budget, with its best setting that fits",
    )
    parser.add_argument(
        "--vs-budget",
        choices=("process", "weights", "both"),
        help="what of llama.cpp the budget is for: its whole process, as the driver counts it; its weights alone, as"
        " its users choose -ngl, so that the process takes more; or one after the other (process)",
    )
    parser.add_argument(
        "--vs-threads", type=common.positive, metavar="N", help="CPU threads of llama.cpp (all; emulated: as ours)"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw what copies, GPU and CPU do in one token and one prompt step at the first budget (.svg, .png, .pdf)",
    )
    parser.add_argument(
        "--image",
        metavar="WxH,...",
        help="images of these sizes instead of a prompt of text; --vs is llama-mtmd-cli then",
    )
    parser.add_argument("--mmproj", metavar="PATH|NAME", help="what reads images for this model")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.set_defaults(run=run)


@dataclass
class _Row:
    """The measurements at one budget. A budget of ``None`` is llama.cpp without the shard device."""

    budget: int | None
    ubatch: int = 0
    ttft: list[float] = field(default_factory=list)
    decode_tps: list[float] = field(default_factory=list)
    ledger_peak: int = 0
    nvml_peak: int | None = None
    copied: int = 0
    experts: dict[str, float] = field(default_factory=dict)
    plan: Any = None
    theirs: dict[str, Theirs] = field(default_factory=dict)  # llama.cpp's runs, by allowance

    @property
    def was_measured(self) -> bool:
        """Whether it has at least one run, beside one of llama.cpp if that is compared."""
        return bool(self.decode_tps) and all(each.runs or not each.setting for each in self.theirs.values())


def run(args: argparse.Namespace) -> int:
    from frameshard import errors, models
    from frameshard.engine import gpus
    from frameshard.engine.practice import GROUP
    from frameshard.plan.workload import Workload
    from frameshard.wire.engine import EngineConfig

    from . import comparison

    if args.image:
        from . import bench_images

        if args.vs_budget in ("process", "both"):
            raise errors.BadArgument("with --image the budget is for llama.cpp's weights: leave out --vs-budget")
        for option in ("prompt", "parallel", "ctx", "timeline", "markdown"):
            if getattr(args, option):
                raise errors.BadArgument(f"--{option} has no effect with --image: leave it out")
        args.image = bench_images.parse_sizes(args.image)
        return bench_images.run(args)
    args.prompt, args.parallel = args.prompt or 512, args.parallel or 1
    device = gpus.resolve(args.device).device
    needed = args.prompt + 1 + max(args.generate, GROUP, _DRAWN)
    _check(args, device, needed)
    config = EngineConfig(
        model=str(models.resolve(args.model)),
        device=device,
        n_ctx=args.ctx or needed,
        n_ubatch=max(args.ubatch, args.parallel) if args.ubatch else 0,
        n_parallel=args.parallel,
        n_threads=args.threads,
        mode="stream_only" if args.stream_only else "planned",
        kv_type=args.kv_type,
    )
    result: dict[str, object] = {"model": args.model, "device": device, "threads": args.threads}
    result["kv_type"] = args.kv_type
    n_rows = 1 if device == "cpu" else len(args.vram_budget.split(","))
    n_theirs = len(comparison.allowances(args)) if args.vs else 0
    n_steps = n_rows * (n_theirs + args.repeat * (1 + n_theirs))
    with (
        progress.steps(n_steps) as steps,
        common.load_within(config, args.vram_budget) as runtime,
    ):
        workload = Workload(runtime.n_ctx_seq, args.prompt, args.generate, args.parallel, config.n_ubatch, args.kv_type)
        result |= {key: getattr(workload, f"n_{key}") for key in ("prompt", "generate", "parallel")}
        result["ctx"] = workload.n_ctx
        if runtime.device is not None:
            result["floor_mb"] = round(runtime.device.stats().floor_bytes / MIB, 3)
        rows = [_Row(budget) for budget in common.budgets_of(args.vram_budget, runtime)]
        beside = comparison.Comparison(runtime, workload, args) if args.vs else None
        if beside is not None:
            result["equal_vram"] = "process" in beside.allowances
            _choose(rows, beside, steps)
        with interrupt.printed(lambda: _report(result, [row for row in rows if row.was_measured], workload, args)):
            _repeat(rows, runtime, workload, beside, args, steps)
            if args.timeline:
                _set_budget(rows[0], runtime)
                _fill(rows[0], runtime, workload)
                windows = _windows(runtime, workload, any_tokens=bool(args.vs))
    if args.timeline:
        title = f"{runtime.model_info.path.name}, {common.format_size(rows[0].budget or 0)}, {runtime.device_name}"
        summaries = {name: window.summary() for name, window in windows.items()}
        result["timeline"] = {"file": args.timeline, **summaries}
    _report(result, rows, workload, args)
    if args.timeline:
        figures.draw_apart(figures.draw_timeline, args.timeline, title, list(windows.values()))
        if not args.json:
            print(f"drawn in {args.timeline}")
    return 0


def _repeat(
    rows: list[_Row],
    runtime: Runtime,
    workload: Workload,
    beside: Comparison | None,
    args: argparse.Namespace,
    steps: progress.Steps,
) -> None:
    """Measures all rows ``--repeat`` times, in turns with llama.cpp."""
    for _ in range(args.repeat):
        for row in rows:
            where = "" if row.budget is None else f" at {common.format_size(row.budget)}"
            steps.next(f"{args.prompt} tokens of prompt, {args.generate} decoded{where}")
            _measure(row, runtime, workload, any_tokens=bool(args.vs))
            for allowance, theirs in row.theirs.items():
                assert beside is not None
                assert row.budget is not None
                steps.next(beside.what(theirs, allowance, row.budget))
                beside.measure(theirs)


def _report(result: dict[str, Any], rows: list[_Row], workload: Workload, args: argparse.Namespace) -> None:
    """Prints the rows, if there are any. After Ctrl-C these are fewer, or medians of fewer runs."""
    if not rows:
        return
    result["repeat"] = min(len(row.ttft) for row in rows)
    result["rows"] = [_document(row, workload) for row in rows]
    if args.json:
        common.emit_json(result)
    else:
        _print(result, rows, markdown=args.markdown)


def _check(args: argparse.Namespace, device: str, needed: int) -> None:
    """Checks arguments that depend on each other.

    :param needed: the context that prompt and answer take, in tokens.
    :raises BadArgument: they do not go together.
    :raises Unsupported: the device cannot record a time line.
    """
    from frameshard import errors

    from . import comparison

    if device == "cpu" and (args.vs or args.timeline):
        raise errors.BadArgument("on the CPU alone nothing is placed: name a GPU, or --device emulated")
    comparison.check(args, device)
    if args.timeline:
        if device.startswith("Vulkan"):
            raise errors.Unsupported(f"--timeline cannot be recorded on {device}: leave it out")
        figures.check(args.timeline)
    if args.ctx and args.ctx < needed:
        raise errors.BadArgument(f"--prompt and --generate need a context of {needed} tokens, --ctx is {args.ctx}")


def _set_budget(row: _Row, runtime: Runtime) -> None:
    assert runtime.device is not None
    assert row.budget is not None
    runtime.device.set_budget(row.budget, timeout_s=60.0)
    runtime.device.reset_peak()


def _fill(row: _Row, runtime: Runtime, workload: Workload) -> None:
    placement = runtime.placement
    assert placement is not None
    assert row.budget is not None
    placement.replan()
    _fill_up(runtime)
    # The same plan as the engine's, but for the context in the middle of the answer.
    row.plan = placement.plan_for(row.budget, workload.n_prompt + workload.n_generate // 2, workload.n_parallel)


def _fill_up(runtime: Runtime) -> None:
    """Brings weights back to the VRAM that a prompt has used, as the engine does."""
    if runtime.placement is not None:
        while runtime.placement.fill():
            pass


def _measure(row: _Row, runtime: Runtime, workload: Workload, *, any_tokens: bool) -> None:
    words, tokens = _tokens(runtime, workload.n_prompt, any_at_all=any_tokens)
    device = runtime.device
    if row.budget is not None:
        _set_budget(row, runtime)
    with Sampler(runtime.observer) as nvml:
        if row.budget is not None:
            _fill(row, runtime, workload)
        row.ubatch = runtime.step
        _read(runtime, workload.n_parallel, tokens)
        _decode(runtime, workload.n_parallel, tokens)  # compiles the decode graph and fills the ring
        # The engine does this too: now it is known which experts this text needs, and how fast the CPU is.
        if _practise(runtime, workload.n_parallel, tokens):
            _fill(row, runtime, workload)
            _read(runtime, workload.n_parallel, tokens)
            _decode(runtime, workload.n_parallel, tokens)
        before = device.stats() if device is not None else None
        start = time.perf_counter()
        _read(runtime, workload.n_parallel, tokens)
        middle = time.perf_counter()
        between = device.stats() if device is not None else None
        _fill_up(runtime)
        for i in range(workload.n_generate):
            _decode(runtime, workload.n_parallel, words, i)
        end = time.perf_counter()
    if device is not None and before is not None and between is not None:
        row.copied = between.copied_bytes - before.copied_bytes
        row.experts = {
            what: (getattr(device.stats(), name) - getattr(between, name)) / workload.n_generate
            for what, name in (
                ("cached", "expert_hits"),
                ("copied", "experts_streamed"),
                ("cpu", "experts_on_cpu"),
                ("ahead", "experts_ahead"),
                ("again", "experts_again"),
            )
        }
    row.ttft.append(middle - start)
    row.decode_tps.append(workload.n_parallel * workload.n_generate / (end - middle))
    if device is not None:
        row.ledger_peak = max(row.ledger_peak, device.stats().peak_bytes)
    if nvml.peak_bytes is not None:
        row.nvml_peak = max(row.nvml_peak or 0, nvml.peak_bytes)


def _practise(runtime: Runtime, parallel: int, words: list[int]) -> bool:
    """Decodes some tokens of every sequence, from which the engine learns.

    :returns: whether a new plan is needed.
    """
    from frameshard.engine.practice import GROUP

    placement = runtime.placement
    if placement is None:
        return False
    _fill_up(runtime)
    for i in range(GROUP):
        start = time.perf_counter()
        _decode(runtime, parallel, words, 1 + i)
        placement.rates.observe(placement.plan, runtime.decoded, time.perf_counter() - start)
    return placement.learn()


def _choose(rows: list[_Row], beside: Comparison, steps: progress.Steps) -> None:
    """Chooses llama.cpp's settings for each row."""
    for allowance in beside.allowances:
        for row in rows:
            assert row.budget is not None
            steps.next(f"llama.cpp's best setting at {common.format_size(row.budget)}")
            row.theirs[allowance] = beside.choose(row.budget, allowance)


def _tokens(runtime: Runtime, n: int, *, any_at_all: bool) -> tuple[list[int], list[int]]:
    """The tokens to decode one by one, and a prompt of ``n`` tokens. They are from the passage, or with ``any_at_all``
    from the whole vocabulary as in llama-batched-bench. The choice of experts depends on it."""
    import numpy as np

    from .passage import PASSAGE

    if any_at_all:
        random = np.random.default_rng(n)
        return random.integers(0, runtime.n_vocab, 256).tolist(), random.integers(0, runtime.n_vocab, n).tolist()
    words = runtime.tokenizer.tokenize(PASSAGE)
    return words, (words * -(-n // len(words)))[:n]


def _read(runtime: Runtime, parallel: int, tokens: list[int]) -> None:
    from frameshard.engine.llama import Rows

    for seq in range(parallel):
        runtime.clear(seq)
    # Several prompts share a graph if they fit, so streamed weights are copied once for all of them.
    together = max(1, runtime.step // len(tokens))
    for first in range(0, parallel, together):
        seqs = range(first, min(first + together, parallel))
        if len(seqs) == 1:
            runtime.decode_tokens(first, _turned(tokens, first))
        else:
            runtime.decode([Rows(seq, _turned(tokens, seq)) for seq in seqs])
            runtime.logits(len(seqs) * len(tokens) - 1)


def _decode(runtime: Runtime, parallel: int, words: list[int], i: int = 0) -> None:
    """Decodes one token of every sequence. Reading a row of logits waits for the result, as a sampler would."""
    from frameshard.engine.llama import Rows

    for row in runtime.decode([Rows(seq, [words[(_START * seq + i) % len(words)]]) for seq in range(parallel)]):
        runtime.logits(row)


def _turned(words: list[int], seq: int) -> list[int]:
    """The words, starting with the first word of sequence ``seq``."""
    at = _START * seq % len(words)
    return words[at:] + words[:at]


def _windows(runtime: Runtime, workload: Workload, *, any_tokens: bool) -> dict[str, figures.Window]:
    """The windows of a time line: the second of several tokens after a prompt, and the third of three ubatches. These
    are in the middle of a run, so the ring is in its usual state. The second ubatch waits for a plan, because the first
    has taken room from the ring."""
    assert runtime.device is not None
    words, tokens = _tokens(runtime, workload.n_prompt, any_at_all=any_tokens)
    _read(runtime, workload.n_parallel, tokens)
    _fill_up(runtime)
    _decode(runtime, workload.n_parallel, words)
    runtime.device.start_trace()
    at = [time.perf_counter()]
    for i in range(_DRAWN):
        _decode(runtime, workload.n_parallel, words, 1 + i)
        at.append(time.perf_counter())
    what = "one token" if workload.n_parallel == 1 else f"one token of each of {workload.n_parallel} sequences"
    decode = figures.Window(what, runtime.device.stop_trace(), at[1], at[2])
    runtime.device.start_trace()
    part = tokens[: runtime.step]
    for _ in range(3):
        runtime.clear(0)
        at.append(time.perf_counter())
        runtime.decode_tokens(0, part)
        at.append(time.perf_counter())
    prefill = figures.Window(f"{len(part)} tokens of a prompt", runtime.device.stop_trace(), at[-2], at[-1])
    return {"decode": decode, "prefill": prefill}


def _document(row: _Row, workload: Workload) -> dict[str, Any]:
    ttft, decode = statistics.median(row.ttft), statistics.median(row.decode_tps)
    document: dict[str, Any] = {
        "budget_mb": None if row.budget is None else round(row.budget / MIB, 3),
        "ubatch": row.ubatch,
        "ttft_s": ttft,
        "prefill_tps": workload.n_prompt * workload.n_parallel / ttft,
        "decode_tps": decode,
        "peak_vram_mb": round(row.ledger_peak / MIB, 3),
        "peak_nvml_mb": None if row.nvml_peak is None else round(row.nvml_peak / MIB, 3),
        "runs": {"ttft_s": row.ttft, "decode_tps": row.decode_tps},
    }
    if row.plan is not None:
        answers = (workload.n_prompt, workload.n_generate, workload.n_parallel)
        document |= {
            "prefill_copied_mb": round(row.copied / MIB, 3),
            "experts_a_step": row.experts,  # per decode, in layers that are not resident
            "predicted_ttft_s": row.plan.predicted_ttft(workload.n_prompt, workload.n_parallel),
            "predicted_decode_tps": row.plan.predicted_answer_tps(*answers),
            "cpu_factor": row.plan.cpu_factor,
            "bound_ttft_s": row.plan.bound_ttft(workload.n_prompt, workload.n_parallel),
            "bound_decode_tps": row.plan.bound_decode_tps(workload.n_parallel),
            "plan": row.plan.summary(workload.n_prompt, workload.n_parallel),
        }
    document |= {key: theirs.document(document) for key, theirs in zip(_THEIRS, row.theirs.values(), strict=False)}
    return document


def _print(result: dict[str, Any], rows: list[_Row], *, markdown: bool) -> None:
    columns = ["budget MiB", "TTFT s", "tok/s", "peak MiB"]
    if any(row.plan is not None for row in rows):
        columns[2:2] = ["predicted", "bound"]
        columns[5:5] = ["predicted", "bound"]
    n_ours = len(columns)
    beside = [f"llama.cpp{which}" for key, which in _THEIRS.items() if key in result["rows"][0]]
    for which in beside:
        columns += [which, "TTFT s", "tok/s", "peak MiB", "TTFT ×", "tok/s ×"]  # noqa: RUF001
    table = [columns, *([_cell(value) for value in _values(document)] for document in result["rows"])]
    print(
        common.wrapped(
            f"{result['model']} on {result['device']}, {result['threads']} CPU threads: prompts of {result['prompt']} "
            f"tokens, {result['generate']} decoded, {result['parallel']} at once in contexts of "
            f"{result['ctx']}, keys and values as {result['kv_type']}; medians of {result['repeat']}"
            + ("; llama.cpp's whole process is held to the budget" if result.get("equal_vram") else "")
            + (f"; the floor is {math.ceil(result['floor_mb'])} MiB" if "floor_mb" in result else "")
        ),
        end="\n\n",
    )
    if markdown:
        table.insert(1, ["---"] * len(columns))
        print("\n".join(f"| {' | '.join(cells)} |" for cells in table))
    else:
        print(common.table([cells[:n_ours] for cells in table]))
        for at in range(n_ours, len(columns), 6):
            print("\n" + common.table([cells[:1] + cells[at : at + 6] for cells in table]))
    if "timeline" in result:
        print()
        for name in ("decode", "prefill"):
            each = result["timeline"][name]
            lanes = [f"{name} {lane['busy']:.0%} at {lane['gbps']:.1f} GB/s" for name, lane in each["lanes"].items()]
            print(common.wrapped(f"{each['what']}: {each['seconds'] * 1e3:.1f} ms; busy: {', '.join(lanes)}"))


def _values(document: dict[str, Any]) -> Iterator[object]:
    planned = "plan" in document
    yield "-" if document["budget_mb"] is None else f"{document['budget_mb']:.0f}"
    yield document["ttft_s"]
    if planned:
        yield from (document["predicted_ttft_s"], document["bound_ttft_s"])
    yield document["decode_tps"]
    if planned:
        yield from (document["predicted_decode_tps"], document["bound_decode_tps"])
    yield _peak(document["peak_nvml_mb"] or document["peak_vram_mb"])
    for theirs in (document[key] for key in _THEIRS if key in document):
        yield from (theirs["placement"] or "does not fit", theirs["ttft_s"], theirs["decode_tps"])
        yield _peak(theirs["peak_nvml_mb"])
        yield from (theirs.get("ttft_ratio"), theirs.get("decode_ratio"))


def _peak(mib: float | None) -> str:
    return f"{mib:.0f}" if mib else "-"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
