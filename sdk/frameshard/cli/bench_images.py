"""``frameshard bench --image``: measures the time to read an image and answer, at several budgets.

Each run uses a new image. The latency is measured from the end of preprocessing, for which both programs have the same
code, to the last token. ``--vs`` also runs llama.cpp's ``llama-mtmd-cli``. There the vision tower is on the GPU if
twice its size fits in the budget, which leaves room for its activations; otherwise it is on the CPU. As many layers of
the model are on the GPU as fit in the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import common, interrupt, progress
from .vram import Sampler

if TYPE_CHECKING:
    from frameshard.engine.runtime import Runtime
    from frameshard.engine.vision import Image, Vision

MIB = 2**20
PROMPT = "\nWhat is this?"
CONTEXT = 5120
"""Tokens of context: 4096 for an image, the most that known models need, and the rest for text and answer."""


@dataclass
class _Row:
    image: tuple[int, int]
    budget: int | None
    encode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    image_tokens: int = 0
    ubatch: int = 0
    ledger_peak: int = 0
    nvml_peak: int | None = None
    error: str | None = None
    upstream: list[tuple[float, float, int | None]] = field(default_factory=list)
    placement: list[str] = field(default_factory=list)

    @property
    def was_measured(self) -> bool:
        """Whether it has at least one run, or was refused."""
        return bool(self.latency) or self.error is not None


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """The widths and heights in a text such as ``"1920x1080,1280x720"``.

    :raises BadArgument: the text does not have this form.
    """
    from frameshard.errors import BadArgument

    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", part)
        if match is None:
            raise BadArgument(f"{part!r} is not the size of an image, such as 1920x1080")
        sizes.append((int(match[1]), int(match[2])))
    return sizes


def run(args: argparse.Namespace) -> int:
    from frameshard import errors, models
    from frameshard.engine import gpus
    from frameshard.engine.vision import Vision
    from frameshard.wire.engine import EngineConfig

    from . import upstream

    mmproj = args.mmproj or models.mmproj_of(args.model)
    if mmproj is None:
        raise errors.BadArgument("--image needs --mmproj, the file with which this model reads images")
    if args.vs:
        upstream.check(args.vs)
    device = gpus.resolve(args.device).device
    config = EngineConfig(
        model=str(models.resolve(args.model)),
        mmproj=str(models.resolve(mmproj)),
        device=device,
        n_ctx=CONTEXT + args.generate,
        n_ubatch=args.ubatch,
        n_parallel=1,
        n_threads=args.threads,
        mode="stream_only" if args.stream_only else "planned",
        kv_type=args.kv_type,
    )
    result: dict[str, Any] = {"model": args.model, "mmproj": str(mmproj), "device": config.device}
    seeds = iter(range(10**6))
    n_rows = len(args.image) * (1 if device == "cpu" else len(args.vram_budget.split(",")))
    with (
        progress.steps(args.repeat * n_rows * (2 if args.vs else 1)) as steps,
        common.load_within(config, args.vram_budget) as runtime,
    ):
        result["generate"] = args.generate
        vision = Vision(runtime, config.mmproj)
        rows = [_Row(image, budget) for image in args.image for budget in common.budgets_of(args.vram_budget, runtime)]
        with interrupt.printed(lambda: _report(result, [row for row in rows if row.was_measured], args)):
            for _ in range(args.repeat):
                for row in rows:
                    where = "" if row.budget is None else f" at {common.format_size(row.budget)}"
                    steps.next(f"{row.image[0]}x{row.image[1]}{where}")
                    if row.error is None:
                        _measure(row, runtime, vision, seeds, args)
                    if args.vs and row.budget is not None:
                        steps.next(f"llama.cpp{where}")
                        _measure_upstream(row, runtime, config.mmproj, seeds, args)
        vision.close()
    _report(result, rows, args)
    return 0


def _report(result: dict[str, Any], rows: list[_Row], args: argparse.Namespace) -> None:
    """Prints the rows, if there are any. After Ctrl-C these are fewer, or medians of fewer runs."""
    if not rows:
        return
    result["repeat"] = min((len(row.latency) for row in rows if row.error is None), default=args.repeat)
    result["rows"] = [_document(row) for row in rows]
    if args.json:
        common.emit_json(result)
    else:
        _print(result)


def noise(seed: int, width: int, height: int) -> Image:
    """An image of random pixels, so that no cache has it."""
    import numpy as np

    from frameshard.engine.vision import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image(width, height, pixels.tobytes())


def _measure(row: _Row, runtime: Runtime, vision: Vision, seeds: Iterator[int], args: argparse.Namespace) -> None:
    from frameshard.engine.llama import Rows
    from frameshard.engine.vision import Picture
    from frameshard.errors import BudgetBelowFloor

    device = runtime.device
    if row.budget is not None:
        assert device is not None
        assert runtime.placement is not None
        device.set_budget(row.budget, timeout_s=60.0)
        runtime.placement.replan()
        while runtime.placement.fill():
            pass
        device.reset_peak()
    row.ubatch = runtime.step
    image = noise(next(seeds), *row.image)
    runtime.clear(0)
    with Sampler(runtime.observer) as nvml:
        parts = vision.tokenize(vision.marker + PROMPT, [image], add_special=True)
        start = at = time.perf_counter()
        encode = prefill = 0.0
        row.image_tokens, last = 0, -1
        try:
            for part in parts:
                if isinstance(part, Picture):
                    vision.encode(part)
                    encode += time.perf_counter() - at
                    at = time.perf_counter()
                    vision.decode(0, part)
                    row.image_tokens += part.n_tokens
                else:
                    last = runtime.decode([Rows(0, part)])[0]
                prefill += time.perf_counter() - at
                at = time.perf_counter()
        except BudgetBelowFloor as error:
            row.error = error.message
            return
        token = int(runtime.logits(last).argmax())
        first = time.perf_counter()
        for _ in range(args.generate - 1):
            token = int(runtime.logits(runtime.decode([Rows(0, [token])])[0]).argmax())
        end = time.perf_counter()
    for times, value in ((row.encode, encode), (row.prefill, prefill), (row.ttft, first - start)):
        times.append(value)
    row.latency.append(end - start)
    if device is not None:
        row.ledger_peak = max(row.ledger_peak, device.stats().peak_bytes)
    if nvml.peak_bytes is not None:
        row.nvml_peak = max(row.nvml_peak or 0, nvml.peak_bytes)


def _measure_upstream(row: _Row, runtime: Runtime, mmproj: str, seeds: Iterator[int], args: argparse.Namespace) -> None:
    """Runs llama.cpp's program and reads the times that it prints, without loading and preprocessing."""
    from frameshard.engine.observer import find_observer
    from frameshard.errors import FrameshardError
    from frameshard.native import EMULATED

    from . import upstream

    assert runtime.device is not None
    assert row.budget is not None
    emulated = runtime.device_name == EMULATED
    tower = os.path.getsize(mmproj)
    if emulated:
        row.placement = ["-ngl", "0", "--no-mmproj-offload", "-dev", "none"]
    elif row.budget >= 2 * tower:
        row.placement = upstream.placement(runtime.model_info, row.budget - 2 * tower)
    else:
        row.placement = [*upstream.placement(runtime.model_info, row.budget), "--no-mmproj-offload"]
    runtime.device.set_budget(runtime.device.stats().floor_bytes, timeout_s=60.0)
    image = noise(next(seeds), *row.image)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "image.ppm"
        file.write_bytes(f"P6 {image.width} {image.height} 255\n".encode() + image.pixels)
        command = [args.vs, "-m", runtime.config.model, "--mmproj", mmproj, "--image", str(file), "-p", PROMPT.strip()]
        command += ["-n", str(args.generate), "-c", str(runtime.n_ctx_seq), "-t", str(args.vs_threads or args.threads)]
        command += ["--temp", "0", "-fa", "on", "--chat-template", "vicuna", "--ignore-eos", *row.placement]
        command += ["-lv", "4", *upstream.batch(), *upstream.kv_type(args.kv_type)]  # -lv 4: prints its times
        observer = None if emulated else find_observer()
        log = Path(scratch) / "log"
        with open(log, "wb") as out:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=upstream.environment()
                )
            except OSError as error:
                raise FrameshardError(f"cannot run {args.vs}: {error.strerror}") from error
            if observer is not None:
                observer.pid = process.pid
            try:
                with Sampler(observer) as nvml:
                    code = process.wait()
            finally:
                process.kill()
                process.wait()
        words = log.read_text(errors="replace")
    encode = [int(ms) for ms in re.findall(r"(?:encoding done|slice encoded) in (\d+) ms", words)]
    # The prompt's time of llama.cpp includes the encode.
    prompt = re.findall(r"prompt eval time = +([0-9.]+) ms", words)
    speech = re.findall(r" eval time = +([0-9.]+) ms", words)
    if code != 0 or not encode or not prompt or float(prompt[-1]) < sum(encode):
        raise FrameshardError(f"{' '.join(command)} failed: {'; '.join(words.splitlines()[-3:])}")
    latency = (float(prompt[-1]) + float(speech[-1])) / 1e3
    row.upstream.append((sum(encode) / 1e3, latency, nvml.peak_bytes))


def _document(row: _Row) -> dict[str, Any]:
    document: dict[str, Any] = {"image": "x".join(map(str, row.image))}
    document["budget_mb"] = None if row.budget is None else round(row.budget / MIB, 3)
    if row.error is not None:
        document["error"] = row.error
    else:
        names = ("encode", "prefill", "ttft", "latency")
        document |= {f"{name}_s": statistics.median(getattr(row, name)) for name in names}
        document |= {
            "ubatch": row.ubatch,
            "image_tokens": row.image_tokens,
            "peak_vram_mb": round(row.ledger_peak / MIB, 3),
            "peak_nvml_mb": None if row.nvml_peak is None else round(row.nvml_peak / MIB, 3),
            "runs": {f"{name}_s": getattr(row, name) for name in names},
        }
    if row.upstream:
        peaks = [peak for _, _, peak in row.upstream if peak]
        document["upstream"] = {
            "placement": " ".join(row.placement),
            "encode_s": statistics.median(encode for encode, _, _ in row.upstream),
            "latency_s": statistics.median(latency for _, latency, _ in row.upstream),
            "peak_nvml_mb": round(max(peaks) / MIB, 3) if peaks else None,
        }
        if row.error is None:
            document["latency_ratio"] = document["upstream"]["latency_s"] / document["latency_s"]
    return document


def _print(result: dict[str, Any]) -> None:
    print(f"{result['model']} on {result['device']}: one image, {result['generate']} tokens of answer\n")
    ours = [["image", "budget MiB", "encode s", "prefill s", "TTFT s", "E2E s", "peak MiB"]]
    theirs = [["image", "budget MiB", "E2E s", "peak MiB", "llama.cpp with"]]
    for row in result["rows"]:
        name = [row["image"], "-" if row["budget_mb"] is None else f"{row['budget_mb']:.0f}"]
        if "error" in row:
            ours.append(name + ["-"] * 5)
        else:
            seconds = [f"{row[key]:.3g}" for key in ("encode_s", "prefill_s", "ttft_s", "latency_s")]
            ours.append([*name, *seconds, f"{row['peak_nvml_mb'] or row['peak_vram_mb']:.0f}"])
        if "upstream" in row:
            each = row["upstream"]
            peak = f"{each['peak_nvml_mb'] or 0:.0f}"
            theirs.append([*name, f"{each['latency_s']:.3g}", peak, each["placement"]])
    print(common.table(ours))
    if len(theirs) > 1:
        print("\n" + common.table(theirs))
    for row in result["rows"]:
        if "error" in row:
            print("\n" + common.wrapped(f"{row['image']} at {row['budget_mb']:.0f} MiB: {row['error']}"))
