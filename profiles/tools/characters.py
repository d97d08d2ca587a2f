"""Measures what the KV store saves: characters that share one lore, and switches between conversations.

    python profiles/tools/characters.py M.gguf --device CUDA0 --threads 14 --vram-budget 8GiB --json

Twelve characters begin with the same lore and answer one question each: how many tokens each of them reads. Two
conversations take turns in one sequence: the time of a switch (one KV cache is copied to host memory, the other one
back), and how long the same text takes to read. The time to the first token of a switched conversation also has one
decode of what is new in it. Speed depends on shapes, not on values, so the tool also works with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from frameshard.cli import common
from frameshard.cli.passage import PASSAGE
from frameshard.engine.batch import Batcher
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.models import resolve
from frameshard.wire.engine import Done, EngineConfig, JobEvent, Started, Submit
from frameshard.wire.messages import Sampling

N_CHARACTERS = 12


class Talk:
    """Runs jobs one after the other, and records the seconds of each copy of a KV cache."""

    def __init__(self, runtime: Runtime) -> None:
        self.saves: list[float] = []
        self.restores: list[float] = []
        runtime.save = self._timed(runtime.save, self.saves)  # type: ignore[method-assign]
        runtime.restore = self._timed(runtime.restore, self.restores)  # type: ignore[method-assign]
        self._runtime = runtime
        self._batcher = Batcher(runtime)
        self._jobs = 0

    def say(self, prompt: str, conversation: str) -> tuple[Started, Done]:
        """Runs a job that generates one token."""
        self._jobs += 1
        sampling = Sampling(temperature=0.0, max_tokens=1)
        request = Submit(self._jobs, "completion", sampling, prompt=prompt, conversation=conversation)
        self._batcher.add(RequestReader(self._runtime).read(request))
        events: list[JobEvent] = []
        while self._batcher.busy:
            events += self._batcher.step()
        started, done = events[0], events[-1]
        assert isinstance(started, Started)
        assert isinstance(done, Done)
        return started, done

    @staticmethod
    def _timed(call: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            took.append(time.perf_counter() - start)
            return result

        return timed


def text_of(runtime: Runtime, n_tokens: int, head: str = "") -> str:
    """A text of about ``n_tokens`` tokens that begins with ``head``."""
    words = (head + PASSAGE).split()
    while len(runtime.tokenizer.tokenize(" ".join(words), add_special=True, parse_special=False)) < n_tokens:
        words += PASSAGE.split()
    low, high = 1, len(words)
    while low < high:
        middle = (low + high) // 2
        n = len(runtime.tokenizer.tokenize(" ".join(words[:middle]), add_special=True, parse_special=False))
        low, high = (middle + 1, high) if n < n_tokens else (low, middle)
    return " ".join(words[:low])


def characters(runtime: Runtime, n_lore: int) -> dict[str, Any]:
    talk, lore = Talk(runtime), text_of(runtime, n_lore)
    said = [talk.say(f"{lore}\n\nVillager {i} says:", f"npc{i}") for i in range(N_CHARACTERS)]
    return {
        "n_prompt": said[0][0].n_prompt,
        "n_read": [started.n_prompt - started.n_reused for started, _ in said],
        "ttft_s": [round(done.prefill_s, 4) for _, done in said],
    }


def switches(runtime: Runtime, n_tokens: int, repeat: int) -> dict[str, Any]:
    talk = Talk(runtime)
    texts = {name: text_of(runtime, n_tokens, f"The {name} speaks. ") for name in ("fox", "owl")}
    read, switched, n_read = [], [], []
    for turn in range(repeat + 1):
        for name in texts:
            texts[name] += f"\nAnd {turn}?"
            started, done = talk.say(texts[name], name)
            if turn == 0:
                read.append(done.prefill_s)
            else:
                switched.append(done.prefill_s)
                n_read.append(started.n_prompt - started.n_reused)
    save_s, restore_s = statistics.median(talk.saves), statistics.median(talk.restores)
    return {
        "n_prompt": started.n_prompt,
        "bytes": runtime.llama.saved_bytes(0),
        "read_s": round(statistics.median(read), 4),
        "save_s": round(save_s, 5),
        "restore_s": round(restore_s, 5),
        "copy_share": round((save_s + restore_s) / statistics.median(read), 4),
        "switch_ttft_s": round(statistics.median(switched), 4),
        "switch_n_read": n_read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=common.positive, default=0, metavar="N")
    parser.add_argument("--ubatch", type=common.positive, default=512, metavar="N")
    parser.add_argument("--vram-budget", type=common.size, default=0, metavar="SIZE", help="(no limit)")
    parser.add_argument("--lore", type=common.positive, default=560, metavar="N", help="tokens that all share (560)")
    parser.add_argument("--tokens", type=common.positive, default=1000, metavar="N", help="of a conversation (1000)")
    parser.add_argument("--repeat", type=common.positive, default=5, metavar="N", help="switches of each (5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        model=str(resolve(args.model)),
        device=args.device,
        vram_budget_bytes=args.vram_budget,
        n_ctx=args.tokens + 512,
        n_ubatch=args.ubatch,
        n_parallel=1,
        n_threads=args.threads,
    )
    with Runtime.load(config) as runtime:
        report = {
            "model": args.model,
            "device": runtime.device_name,
            "budget_mb": args.vram_budget / 2**20,
            "characters": characters(runtime, args.lore),
            "switch": switches(runtime, args.tokens, args.repeat),
        }
    if args.json:
        common.emit_json(report)
        return
    found, switch = report["characters"], report["switch"]
    print(f"{N_CHARACTERS} characters, prompts of {found['n_prompt']} tokens; each read: {found['n_read']}")
    print(f"  seconds to the first token: {found['ttft_s']}")
    print(f"a conversation of {switch['n_prompt']} tokens, {switch['bytes'] / 2**20:.1f} MiB:")
    print(f"  read in {switch['read_s']} s; switched to in {switch['switch_ttft_s']} s")
    print(
        f"  copied to host memory in {1e3 * switch['save_s']:.1f} ms and back in {1e3 * switch['restore_s']:.1f} ms: "
        f"{100 * switch['copy_share']:.1f} % of reading it"
    )


if __name__ == "__main__":
    main()
