"""``frameshard verify``: compares the shard device at several budgets with stock llama.cpp, on the same text.

Stream-only rows must give the same bits as the shard device at the largest given budget, also if the budget changes
during the answer. Planned rows may compute on the CPU, and divide a graph as the plan wants, so they round differently.
There the most likely next token and the perplexity must agree with stock llama.cpp, or the KL divergence must be no
larger than rounding makes it. The device's ledger must stay within the budget at every allocation.

No run uses more VRAM than the largest given budget. If ``full`` is given, everything is resident in the run that
stream-only rows are compared with, and the reference of a GPU is stock llama.cpp on that GPU. Otherwise the reference
is stock llama.cpp on the CPU. A planned row uses GPU and CPU. So it may differ from the reference as much as these two
differ from each other, which is measured too and printed as ``processors``.

The text is in the second of two sequences, and another one in the first: sequences have cells of their own.
"""

from __future__ import annotations

import argparse
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import common, progress
from .vram import Sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from frameshard.engine.runtime import Runtime
    from frameshard.native import ShardDevice
    from frameshard.plan.plans import Mode
    from frameshard.wire.engine import EngineConfig

    Floats = npt.NDArray[np.float32]

logger = logging.getLogger("frameshard.verify")

TOP1_AGREEMENT = 0.97  # planned rows: share of positions with the same most likely token as stock llama.cpp
PERPLEXITY_RATIO = 0.01  # planned rows: relative difference of perplexity
KL_OF_ROUNDING = 0.01
"""Planned rows: a KL divergence up to this can come from rounding alone. Stock llama.cpp differs by 0.004 from
itself if it reads 96 tokens in steps of 64 or of 4 (SmolLM2-135M, Q4_1). A wrong choice of experts makes 0.8."""
MODES: tuple[Mode, ...] = ("stream_only", "planned")
_SEQUENCE = 1
_LEAST_GENERATED = 3
_LOGITS_OF_PROMPT = 16  # so many rows of logits of the prompt are compared; one graph computes several


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="prove that a model's output does not change with the VRAM budget",
        description="Runs one text through stock llama.cpp and through the shard device at each budget, with a change "
        "of budget in mid-generation. Exit status 1 if a row fails.",
    )
    common.add_model_args(parser)
    parser.add_argument(
        "--vram-budget", required=True, metavar="A,B,...", help="budgets in MiB or with a unit; also: floor, full"
    )
    parser.add_argument("--prompt", type=common.positive, default=96, metavar="N", help="tokens of prompt (96)")
    parser.add_argument(
        "--generate", type=common.positive, default=64, metavar="N", help="tokens one by one, 3 or more (64)"
    )
    parser.add_argument("--ctx", type=common.positive, default=512, metavar="N", help="context in tokens (512)")
    parser.add_argument("--ubatch", type=common.positive, default=64, metavar="N", help="prompt tokens at once (64)")
    common.add_kv_type_arg(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from frameshard import errors, models
    from frameshard.engine import gpus
    from frameshard.engine.scratch import try_files
    from frameshard.wire.engine import EngineConfig

    device = gpus.resolve(args.device).device
    if device == "cpu":
        raise errors.BadArgument(
            "verify compares the shard device with stock llama.cpp: name a GPU, or --device emulated"
        )
    parts = [part.strip() for part in args.vram_budget.split(",")]
    # 0 is no limit, as in other commands: everything is resident.
    wanted = [part if part in ("floor", "full") or common.parse_size(part) else "full" for part in parts]
    if args.generate < _LEAST_GENERATED:
        raise errors.BadArgument(
            f"--generate must be at least {_LEAST_GENERATED}: the budget changes after a third of these tokens, and "
            "back after two thirds"
        )
    if args.prompt + args.generate > args.ctx:
        raise errors.BadArgument(
            f"--prompt and --generate need {args.prompt + args.generate} tokens, --ctx is {args.ctx}"
        )

    def config(device: str) -> EngineConfig:
        return EngineConfig(
            model=str(models.resolve(args.model)),
            device=device,
            n_ctx=args.ctx,
            n_ubatch=args.ubatch,
            n_parallel=_SEQUENCE + 1,
            n_threads=args.threads,
            n_outputs_max=_LOGITS_OF_PROMPT,
            kv_type=args.kv_type,
        )

    with progress.steps(1 + len(wanted) * len(MODES)) as steps:
        try_files(str(models.resolve(args.model)))
        document, rows = _compare(args, device, wanted, config, steps)
    if args.json:
        common.emit_json(_finite(document | {"rows": rows}))
    return 0 if all(row["ok"] for row in rows) else 1


def _compare(
    args: argparse.Namespace,
    device: str,
    wanted: Sequence[str],
    config: Callable[[str], EngineConfig],
    steps: progress.Steps,
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Measures the references and a row for each budget and mode. Rows are printed at once, except with ``--json``.

    :returns: the references, and the rows.
    """
    from frameshard.engine.runtime import STOCK, Runtime
    from frameshard.native import EMULATED, parse_device

    name = parse_device(device).inner
    reference_device = f"{STOCK}{name}" if "full" in wanted and name != EMULATED else "cpu"
    steps.next("stock llama.cpp")
    with Runtime.load(config(reference_device)) as runtime:
        tokens = _tokens(runtime, args.prompt + args.generate)
        reference = _logits(runtime, tokens, args.prompt)
    document: dict[str, object] = {"model": args.model, "device": name, "reference": reference_device}
    processors: dict[str, float] = {}
    if reference_device != "cpu":
        with Runtime.load(config("cpu")) as runtime:
            processors = _agreement(_logits(runtime, tokens, args.prompt), reference, tokens)
    rows = []
    listed = ",".join(wanted)
    with common.load_within(config(device), listed) as runtime:
        budgets = [budget for budget in common.budgets_of(listed, runtime) if budget is not None]
        most = max(budgets)
        _set_mode(runtime, "stream_only", most)
        resident = _logits(runtime, tokens, args.prompt)
        if reference_device == "cpu" and name != EMULATED:
            processors = _agreement(resident, reference, tokens)
        if processors:
            document["processors"] = processors
        spread = max(KL_OF_ROUNDING, processors.get("kl", 0.0))
        for budget in budgets:
            for mode in MODES:
                steps.next(f"{mode} at {common.format_size(budget)}")
                row = _row(runtime, tokens, args.prompt, budget, most, mode, reference, resident, spread)
                rows.append(row)
                if not args.json:
                    if len(rows) == 1:
                        steps.print(_HEADER)
                    steps.print(_line(row))
    return document, rows


def _finite(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: such figures become None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tokens(runtime: Runtime, n: int) -> list[int]:
    from .passage import PASSAGE

    tokens = runtime.tokenizer.tokenize(PASSAGE)
    return (tokens * -(-n // len(tokens)))[:n]


def _logits(
    runtime: Runtime, tokens: Sequence[int], n_prompt: int, before: Callable[[int], None] | None = None
) -> Floats:
    """The logits of the last positions of the prompt, computed together, and of each later token, computed alone.

    :returns: shape [rows, n_vocab].
    """
    import numpy as np

    if not runtime.length(0):
        runtime.decode_tokens(0, tokens[:0:-1], "none")
    runtime.clear(_SEQUENCE)
    tail = min(_LOGITS_OF_PROMPT, n_prompt, runtime.n_ubatch)
    if n_prompt > tail:
        runtime.decode_tokens(_SEQUENCE, tokens[: n_prompt - tail], "none")
    out = [runtime.decode_tokens(_SEQUENCE, tokens[n_prompt - tail : n_prompt], "all")]
    for i in range(n_prompt, len(tokens)):
        if before is not None:
            before(i - n_prompt)
        out.append(runtime.decode_tokens(_SEQUENCE, tokens[i : i + 1]))
    return np.concatenate(out)


def _set_mode(runtime: Runtime, mode: Mode, budget: int) -> None:
    placement = runtime.placement
    assert placement is not None
    placement.mode = mode
    placement.device.set_budget(budget)
    placement.learn()
    placement.replan()
    placement.fill()


class _MidGeneration:
    """Changes the budget during the decode of a token, after a third of the tokens, and back after two thirds. The
    other budget is smaller if possible, and otherwise larger, but at most ``most``. All sizes are bytes."""

    def __init__(self, runtime: Runtime, budget: int, most: int, n_generate: int) -> None:
        assert runtime.placement is not None
        self.placement, self.device, self.budget = runtime.placement, runtime.placement.device, budget
        floor, full = self.device.stats().floor_bytes, self.device.stats().full_bytes
        room = budget - floor
        self.other = floor + room // 3 if room > (full - floor) // 16 else min(floor + (full - floor) // 2, most)
        self.at = {n_generate // 3: self.other, 2 * n_generate // 3: budget}
        self.peaks: list[tuple[int, int]] = []
        self.pending: threading.Thread | None = None

    def __call__(self, index: int) -> None:
        self._join()
        if index in self.at:
            self.peaks.append((self.device.stats().budget_bytes, self.device.stats().peak_bytes))
            self.pending = threading.Thread(target=_change_budget, args=(self.device, self.at[index]))
            self.pending.start()

    def _join(self) -> None:
        if self.pending is not None:
            self.pending.join()
            self.pending = None
            self.placement.replan()
            self.placement.fill()

    def finish(self) -> list[tuple[int, int]]:
        """For each part of the run with the same budget: (budget, peak bytes)."""
        self._join()
        self.peaks.append((self.device.stats().budget_bytes, self.device.stats().peak_bytes))
        return self.peaks


def _change_budget(device: ShardDevice, budget: int) -> None:
    device.set_budget(budget, timeout_s=60.0)
    device.reset_peak()


def _row(
    runtime: Runtime,
    tokens: Sequence[int],
    n_prompt: int,
    budget: int,
    most: int,
    mode: Mode,
    reference: Floats,
    resident: Floats,
    spread: float,
) -> dict[str, object]:
    """Measures one row of the result.

    :param most: the largest budget in bytes that may be used.
    :param reference: logits of stock llama.cpp, shape [rows, n_vocab].
    :param resident: logits of the shard device at the largest budget, shape [rows, n_vocab].
    :param spread: as for :func:`agrees`.
    """
    import numpy as np

    assert runtime.device is not None
    _set_mode(runtime, mode, budget)
    runtime.device.reset_peak()
    change = _MidGeneration(runtime, budget, most, len(tokens) - n_prompt)
    with Sampler(runtime.observer) as nvml:
        logits = _logits(runtime, tokens, n_prompt, change)
        peaks = change.finish()

    agreement = _agreement(logits, reference, tokens)
    diff = float(np.abs(logits - resident).max())
    within = all(peak <= limit for limit, peak in peaks)
    if nvml.peak_bytes is not None:
        within = within and nvml.peak_bytes <= max(limit for limit, _ in peaks)
    same = diff == 0.0 if mode == "stream_only" else agrees(agreement, spread)
    return {
        "budget_mb": round(budget / 2**20, 3),
        "mode": mode,
        "max_abs_logit_diff": diff,
        **agreement,
        "peak_vram_mb": round(max(peak for limit, peak in peaks if limit == budget) / 2**20, 3),
        "peak_nvml_mb": None if nvml.peak_bytes is None else round(nvml.peak_bytes / 2**20, 3),
        "changed_to_mb": round(change.other / 2**20, 3),
        "within_budget": within,
        "ok": bool(same and within and np.isfinite(logits).all()),
    }


def agrees(agreement: dict[str, float], spread: float) -> bool:
    """Whether a planned row agrees with stock llama.cpp.

    :param spread: the KL divergence that a row may have in any case.
    """
    ratio = agreement["perplexity"] / agreement["perplexity_ref"]
    alike = agreement["top1_agreement"] >= TOP1_AGREEMENT and abs(ratio - 1) <= PERPLEXITY_RATIO
    return alike or agreement["kl"] <= spread


def _agreement(logits: Floats, reference: Floats, tokens: Sequence[int]) -> dict[str, float]:
    import numpy as np

    # Row k predicts the token after it. For the last row that token is not known.
    targets = np.array(tokens[len(tokens) - len(logits) + 1 :])
    log_p, log_ref = _log_softmax(logits), _log_softmax(reference)
    return {
        "top1_agreement": round(float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean()), 4),
        "kl": float((np.exp(log_ref) * (log_ref - log_p)).sum(axis=1).mean()),
        "perplexity": _perplexity(log_p, targets),
        "perplexity_ref": _perplexity(log_ref, targets),
    }


def _log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    import numpy as np

    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _perplexity(log_p: npt.NDArray[np.float64], targets: npt.NDArray[np.int64]) -> float:
    import numpy as np

    return float(np.exp(-log_p[np.arange(len(targets)), targets].mean()))


_HEADER = (
    f"{'MiB':>6} {'mode':>11} {'logit diff':>10} {'top-1':>6} {'KL':>8} {'ppl':>8} {'ref':>8} {'peak':>6} {'':6}"
).rstrip()


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['budget_mb']:>6.0f} {row['mode']:>11} {row['max_abs_logit_diff']:>10.3g} {row['top1_agreement']:>6.3f} "
        f"{row['kl']:>8.2g} {row['perplexity']:>8.5g} {row['perplexity_ref']:>8.5g} {row['peak_vram_mb']:>6.0f} "
        f"{'ok' if row['ok'] else 'FAILED'}"
    )
