"""Measures a model whose weights come from the disk, because a host budget has no room for them.

    python profiles/tools/disk_tier.py M.gguf --device CUDA0 --threads 14 --vram-budget 4GiB \\
        --host-budget 12GiB,8GiB,4GiB --cold 8GiB --link 54 --vs --json

- A sidecar in mode `stream_only` answers a question without a limit, and then at each host budget, when what fits is in
  host memory. The answers must be the same text. The time per token is compared with the slowest lane: the bytes that
  were read over the disk's rate, and the bytes that were copied over the link's.
- The tokens of the text are drawn almost evenly from the vocabulary, so that it changes its experts. With
  `--text likely` each is the most likely one; random weights then repeat a few tokens, and soon need the same experts.
- For single experts: the share of choices that the cache in VRAM has, and of matrices that it lacks, those that host
  memory has.
- Meanwhile the sidecar's own count of host memory is sampled, and what the system counts; no sample may be above the
  budget.
- *Cold*: the model's file is dropped from the page cache, and a sidecar is launched at each of the budgets in --cold.
- With `--vs` llama.cpp runs after that with its file mapped, from a cold cache, in a memory cgroup with each of these
  limits, and with as much on the GPU as the VRAM budget has room for (`mapped_llama.py`). A rate that the emulated
  device sets for its disk does not bind llama.cpp. Where no memory cgroup can be made, `--hold-memory` has a process
  hold all memory of the machine beyond the limit. Nothing else should run on that machine.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mapped_llama
import trio

import frameshard
from frameshard import native
from frameshard.cli import common
from frameshard.engine import diskprobe, hostcount
from frameshard.plan.model import read_model

MIB = 1 << 20
OTHER = "Before the first light the miller's daughter carries water from the well, and counts the lanterns"
QUESTION = "A rider comes to the gate, looks up at the guard, and says that the bridge behind the old mill"
SETTLED_S = 3.0
SAMPLING = {
    "even": frameshard.Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=mapped_llama.SEED),
    "likely": frameshard.Sampling(temperature=0.0),
}


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


@dataclass
class Answer:
    """A text, the seconds until its first token, and the seconds between tokens."""

    text: str
    first_s: float
    gaps: list[float]


async def answer(client: frameshard.Client, kind: str, n_tokens: int, question: str = QUESTION) -> Answer:
    start, times, text = time.perf_counter(), [], ""
    sampling = replace(SAMPLING[kind], max_tokens=n_tokens)
    async with client.complete(question, conversation="the only one", sampling=sampling) as stream:
        async for delta in stream:
            times += [time.perf_counter()] * delta.tokens
            text += delta.text
    return Answer(text, times[0] - start, [after - before for before, after in itertools.pairwise(times)])


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


def experts(model: str, before: dict[str, Any], after: dict[str, Any]) -> dict[str, float | None]:
    """The shares of single experts that were where they were looked for: first in VRAM, then in host memory."""
    names = [tensor.name for tensor in read_model(model).tensors if "_exps." in tensor.name]
    n_layers = len({name.split(".")[1] for name in names})
    new = {key: after[key] - before[key] for key in ("expert_hits", "experts_streamed", "experts_on_cpu")}
    missed = new["experts_streamed"] + new["experts_on_cpu"]
    read = after["host"]["device"]["disk_expert_reads"] - before["host"]["device"]["disk_expert_reads"]
    return {
        "vram_hit_rate": new["expert_hits"] / (new["expert_hits"] + missed) if missed else None,
        "host_hit_rate": 1 - read / (missed * len(names) / n_layers) if missed else None,
    }


async def measure(
    client: frameshard.Client, args: argparse.Namespace, rates: dict[str, float], budget_mb: float
) -> dict[str, Any]:
    async with sampled(client) as most:
        # The one sequence has the other question then, so that this one is read, also after another budget.
        await answer(client, args.text, 1, OTHER)
        first_s = (await answer(client, args.text, 1)).first_s
        before = await counters(client)
        # It finds its question in the KV cache: its graphs are all decodes.
        found = await answer(client, args.text, args.generate)
        after = await counters(client)
    n_graphs = after["graphs"] - before["graphs"]
    read = (after["host"]["device"]["disk_read_bytes"] - before["host"]["device"]["disk_read_bytes"]) / n_graphs
    copied = (after["copied_bytes"] - before["copied_bytes"]) / n_graphs
    lanes = {"disk_s": read / rates["disk"], "link_s": copied / rates["link"]}
    token_s = statistics.mean(found.gaps)
    host = after["host"]
    return {
        "text": found.text,
        "first_token_s": first_s,
        "token_s": token_s,
        "median_token_s": statistics.median(found.gaps),
        "graphs": n_graphs,
        "read_bytes_per_token": read,
        "copied_bytes_per_token": copied,
        **lanes,
        "over_slowest": token_s / max(lanes.values()) if any(lanes.values()) else None,
        "of_disk_bound": lanes["disk_s"] / token_s,
        **experts(args.model, before, after),
        **most,
        **{key: host[key] for key in ("weights_bytes", "pinned_bytes", "processes_bytes", "floor_bytes")},
        "waited_s": host["device"]["disk_waited_s"] - before["host"]["device"]["disk_waited_s"],
    }


def drop_from_cache(path: str) -> int | None:
    """Drops a file from the page cache, as far as no process maps its pages. Returns the bytes that are still there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hostcount.ModelPages(path).cached_bytes() if hostcount.counts() else None


class Beside:
    """llama.cpp, for comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._options: dict[str, Any] = {"prompt": QUESTION, "threads": args.threads}
        vram_bytes = common.size(args.vram_budget)
        self._setting = mapped_llama.best_setting(args.model, args.device, vram_bytes, **self._options)

    def run(self, limit_mb: float, n_tokens: int) -> dict[str, Any]:
        args, cached_bytes = self._args, drop_from_cache(self._args.model)
        found = mapped_llama.run(
            args.model,
            args.device,
            self._setting,
            n_tokens=n_tokens,
            most_s=args.vs_most,
            limit_bytes=int(limit_mb * MIB),
            hold_memory=args.hold_memory,
            **self._options,
        )
        drop_from_cache(args.model)
        return found | {"cached_bytes_before": cached_bytes}


async def cold(args: argparse.Namespace, budget_mb: float) -> dict[str, Any]:
    cached_bytes = drop_from_cache(args.model)
    start = time.perf_counter()
    async with launched(args, budget_mb) as client:
        ready_s = time.perf_counter() - start
        found = await answer(client, args.text, 1)
        return {
            "budget_mb": budget_mb,
            "cached_bytes_before": cached_bytes,
            "ready_s": ready_s,
            "first_token_s": ready_s + found.first_s,
            "text": found.text,
            "host": (await counters(client))["host"],
        }


def sizes_mb(texts: str) -> list[float]:
    return [common.size(text) / MIB for text in texts.split(",") if text]


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
        for budget_mb in (0.0, *sizes_mb(args.host_budget)):
            start = time.perf_counter()
            await client.set_budget(vram_mb, host_budget_mb=budget_mb, timeout_s=60)
            set_s = time.perf_counter() - start
            row = {"budget_mb": budget_mb, "set_s": set_s, "settled_s": await settled(client, args.settle)}
            row |= await measure(client, args, of, budget_mb)
            result["rows"].append(row)
    result["cold"] = [await cold(args, budget_mb) for budget_mb in sizes_mb(args.cold)]
    texts = {row["text"] for row in result["rows"]}
    return result | {"same_text": len(texts) == 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=common.positive, default=common.default_threads(), metavar="N")
    parser.add_argument("--vram-budget", required=True, metavar="SIZE")
    parser.add_argument("--host-budget", default="", metavar="SIZE[,SIZE…]")
    parser.add_argument("--cold", default="", metavar="SIZE[,SIZE…]", help="host budgets of cold starts; 0: no limit")
    parser.add_argument("--generate", type=common.positive, default=32, metavar="N", help="tokens of an answer (32)")
    parser.add_argument("--text", choices=SAMPLING, default="even", help="how its tokens are drawn (even)")
    parser.add_argument("--vs", action="store_true", help="run llama.cpp too")
    parser.add_argument("--hold-memory", action="store_true", help="limit its memory by a process that holds the rest")
    parser.add_argument(
        "--vs-most", type=float, default=90, metavar="S", help="it starts no token so long after the first (90)"
    )
    parser.add_argument(
        "--settle", type=float, default=60, metavar="S", help="longest wait until what fits is read (60)"
    )
    parser.add_argument("--link", type=float, required=True, metavar="GBPS", help="the link's rate in 1e9 bytes/s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = trio.run(report, args)
    if args.vs:  # without a sidecar: when it sees that memory is short, it gives some of its own back
        beside = Beside(args)
        for row in found["rows"][1:]:
            row["llama"] = beside.run(row["budget_mb"], args.generate)
        for row in found["cold"]:
            row["llama"] = beside.run(row["budget_mb"], 1)
    print(json.dumps(found, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
