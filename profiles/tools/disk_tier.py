"""Measures a model whose weights come from the disk, because a host budget has no room for them.

    python profiles/tools/disk_tier.py M.gguf --device CUDA0 --threads 14 --vram-budget 4GiB \\
        --host-budget 12GiB,8GiB,4GiB --cold 8GiB --link 54 --json

- A sidecar in mode `stream_only` answers a question without a limit, and then at each host budget, when what fits is in
  host memory. The answers must be the same text. The time per token is compared with the slowest lane: the bytes that
  were read over the disk's rate, and the bytes that were copied over the link's.
- Meanwhile the sidecar's own count of host memory is sampled, and what the system counts; no sample may be above the
  budget.
- *Cold*: the model's file is dropped from the page cache, and a sidecar is launched at each of the budgets in --cold.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

import frameshard
from frameshard import native
from frameshard.cli import common
from frameshard.engine import diskprobe

MIB = 1 << 20
QUESTION = "A rider comes to the gate, looks up at the guard, and says that the bridge behind the old mill"
SETTLED_S = 3.0


def launched(args: argparse.Namespace, host_budget_mb: float = 0) -> Any:
    return frameshard.launch(
        args.model,
        device=args.device,
        vram_budget_mb=common.size(args.vram_budget) / MIB,
        host_budget_mb=host_budget_mb,
        mode="stream_only",
        n_ctx=1024,
        n_parallel=1,
        n_threads=args.threads,
        kv_cache_mb=0,
        log=subprocess.DEVNULL,
    )


async def counters(client: frameshard.Client) -> dict[str, Any]:
    engine = (await client.stats()).engine
    assert engine is not None
    return engine


async def answer(client: frameshard.Client, n_tokens: int) -> tuple[str, float, list[float]]:
    """The text, the seconds until its first token, and the seconds between tokens."""
    start, times, text = time.perf_counter(), [], ""
    sampling = frameshard.Sampling(max_tokens=n_tokens, temperature=0.0)
    async with client.complete(QUESTION, sampling=sampling) as stream:
        async for delta in stream:
            times += [time.perf_counter()] * delta.tokens
            text += delta.text
    return text, times[0] - start, [after - before for before, after in itertools.pairwise(times)]


@contextlib.asynccontextmanager
async def sampled(client: frameshard.Client) -> AsyncIterator[dict[str, int]]:
    """Samples host memory: the most that the sidecar and the system counted, and the number of samples."""
    most = {"samples": 0, "most_used_bytes": 0, "most_observed_bytes": 0}

    async def sample() -> None:
        while True:
            host = (await counters(client))["host"]
            most["samples"] += 1
            most["most_used_bytes"] = max(most["most_used_bytes"], host["used_bytes"])
            most["most_observed_bytes"] = max(most["most_observed_bytes"], host["observed_bytes"] or 0)
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample)
        yield most
        nursery.cancel_scope.cancel()


async def settled(client: frameshard.Client, most_s: float) -> float:
    """Waits until no more weights come into host memory. Returns the seconds that it took."""
    start = changed = time.perf_counter()
    held = -1
    while time.perf_counter() - changed < SETTLED_S and time.perf_counter() - start < most_s:
        now = (await counters(client))["host"]["weights_bytes"]
        held, changed = now, changed if now == held else time.perf_counter()
        await trio.sleep(0.1)
    return changed - start


async def measure(client: frameshard.Client, args: argparse.Namespace, rates: dict[str, float]) -> dict[str, Any]:
    before = await counters(client)
    async with sampled(client) as most:
        text, first_s, gaps = await answer(client, args.generate)
    after = await counters(client)
    n_graphs = len(gaps) + 1
    read = (after["host"]["device"]["disk_read_bytes"] - before["host"]["device"]["disk_read_bytes"]) / n_graphs
    copied = (after["copied_bytes"] - before["copied_bytes"]) / n_graphs
    lanes = {"disk_s": read / rates["disk"], "link_s": copied / rates["link"]}
    token_s = statistics.median(gaps)
    host = after["host"]
    return {
        "text": text,
        "first_token_s": first_s,
        "token_s": token_s,
        "read_bytes_per_token": read,
        "copied_bytes_per_token": copied,
        **lanes,
        "over_slowest": token_s / max(lanes.values()) if any(lanes.values()) else None,
        **most,
        **{key: host[key] for key in ("weights_bytes", "pinned_bytes", "processes_bytes", "floor_bytes")},
        "waited_s": host["device"]["disk_waited_s"] - before["host"]["device"]["disk_waited_s"],
    }


def drop_from_cache(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def cold(args: argparse.Namespace, budget_mb: float) -> dict[str, Any]:
    drop_from_cache(args.model)
    start = time.perf_counter()
    async with launched(args, budget_mb) as client:
        ready_s = time.perf_counter() - start
        text, _, gaps = await answer(client, 2)
        return {
            "budget_mb": budget_mb,
            "ready_s": ready_s,
            "first_token_s": time.perf_counter() - start - sum(gaps),
            "text": text,
            "host": (await counters(client))["host"],
        }


async def report(args: argparse.Namespace) -> dict[str, Any]:
    rates = diskprobe.measure(Path(args.model), 2.0, native.parse_device(args.device).disk_gbps)
    of = {"disk": max(rates["rate"]), "link": args.link * 1e9}
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "file_bytes": os.path.getsize(args.model),
        "device": args.device,
        "vram_budget_mb": common.size(args.vram_budget) / MIB,
        "disk": rates,
        "rows": [],
    }
    vram_mb = result["vram_budget_mb"]
    async with launched(args) as client:
        for budget_mb in (0.0, *(common.size(text) / MIB for text in args.host_budget.split(","))):
            start = time.perf_counter()
            await client.set_budget(vram_mb, host_budget_mb=budget_mb, timeout_s=60)
            set_s = time.perf_counter() - start
            row = {"budget_mb": budget_mb, "set_s": set_s, "settled_s": await settled(client, args.settle)}
            row |= await measure(client, args, of)
            result["rows"].append(row)
    result["cold"] = [await cold(args, common.size(text) / MIB) for text in args.cold.split(",") if text]
    texts = {row["text"] for row in result["rows"]}
    return result | {"same_text": len(texts) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=common.positive, default=common.default_threads(), metavar="N")
    parser.add_argument("--vram-budget", required=True, metavar="SIZE")
    parser.add_argument("--host-budget", required=True, metavar="SIZE[,SIZE…]")
    parser.add_argument("--cold", default="", metavar="SIZE[,SIZE…]", help="host budgets of cold starts; 0: no limit")
    parser.add_argument("--generate", type=common.positive, default=8, metavar="N", help="tokens of an answer (8)")
    parser.add_argument(
        "--settle", type=float, default=60, metavar="S", help="longest wait until what fits is read (60)"
    )
    parser.add_argument("--link", type=float, required=True, metavar="GBPS", help="the link's rate in 1e9 bytes/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = trio.run(report, args)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
