"""Measures what the KV store saves: characters that share one lore, and switches between conversations.

    python profiles/tools/characters.py M.gguf --device CUDA0 --threads 14 --vram-budget 8GiB --json

Twelve characters begin with the same lore and answer one question each: how many tokens each of them reads. Two
conversations take turns in one sequence: the time of a switch, and how long the same text takes to read. First the jobs
follow each other without a pause, so that a switch copies one KV cache to host memory and the other one back. Then the
engine is idle before each job, and has made the copy to host memory ahead of time. The time to the first token of a
switched conversation also has one decode of what is new in it. Speed depends on shapes, not on values, so the tool also
works with random weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Said:
    """What a job took.

    :param save_s: the seconds in which KV caches were copied to host memory, while the job waited.
    :param restore_s: the seconds in which its KV cache was copied back.
    """

    n_prompt: int
    n_read: int
    ttft_s: float
    save_s: float
    restore_s: float

    @property
    def switch_s(self) -> float:
        """The copies that the job waited for."""
        return self.save_s + self.restore_s


class Talk:
    """Runs jobs one after the other, and records the seconds of the copies of KV caches."""

    def __init__(self, runtime: Runtime) -> None:
        self._saves: list[float] = []
        self._restores: list[float] = []
        runtime.save = self._timed(runtime.save, self._saves)  # type: ignore[method-assign]
        runtime.restore = self._timed(runtime.restore, self._restores)  # type: ignore[method-assign]
        self._runtime = runtime
        self._batcher = Batcher(runtime)
        self._jobs = 0

    def say(self, prompt: str, conversation: str) -> Said:
        """Runs a job that generates one token."""
        self._jobs += 1
        self._saves.clear()
        self._restores.clear()
        sampling = Sampling(temperature=0.0, max_tokens=1)
        request = Submit(self._jobs, "completion", sampling, prompt=prompt, conversation=conversation)
        self._batcher.add(RequestReader(self._runtime).read(request))
        events: list[JobEvent] = []
        while self._batcher.busy:
            events += self._batcher.step()
        started, done = events[0], events[-1]
        assert isinstance(started, Started)
        assert isinstance(done, Done)
        n_read = started.n_prompt - started.n_reused
        return Said(started.n_prompt, n_read, done.prefill_s, sum(self._saves), sum(self._restores))

    def idle(self) -> float:
        """Makes the copies that an idle engine makes ahead of time.

        :returns: their seconds.
        """
        self._saves.clear()
        while self._batcher.reuse.copy_ahead():
            pass
        return sum(self._saves)

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
        "n_prompt": said[0].n_prompt,
        "n_read": [each.n_read for each in said],
        "ttft_s": [round(each.ttft_s, 4) for each in said],
    }


def switches(runtime: Runtime, n_tokens: int, repeat: int) -> dict[str, Any]:
    talk = Talk(runtime)
    texts = {name: text_of(runtime, n_tokens, f"The {name} speaks. ") for name in ("fox", "owl")}
    read = [talk.say(text, name) for name, text in texts.items()]
    busy, idle, ahead_s = [], [], []
    for turn in range(2 * repeat):
        for name in texts:
            texts[name] += f"\nAnd {turn}?"
            if turn < repeat:
                busy.append(talk.say(texts[name], name))
            else:
                ahead_s.append(talk.idle())
                idle.append(talk.say(texts[name], name))
    read_s = statistics.median(said.ttft_s - said.switch_s for said in read)
    busy_s, idle_s = (statistics.median(said.switch_s for said in each) for each in (busy, idle))
    return {
        "n_prompt": idle[-1].n_prompt,
        "bytes": runtime.llama.saved_bytes(0),
        "read_s": round(read_s, 4),
        "save_s": round(statistics.median(said.save_s for said in busy), 5),
        "restore_s": round(statistics.median(said.restore_s for said in busy), 5),
        "copy_share": round(busy_s / read_s, 4),
        "switch_ttft_s": round(statistics.median(said.ttft_s for said in busy), 4),
        "switch_n_read": [said.n_read for said in busy],
        "ahead": {
            "save_s": round(statistics.median(ahead_s), 5),
            "switch_s": round(idle_s, 5),
            "switch_share": round(idle_s / read_s, 4),
            "switch_ttft_s": round(statistics.median(said.ttft_s for said in idle), 4),
            "switch_n_read": [said.n_read for said in idle],
        },
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
    parser.add_argument(
        "--repeat", type=common.positive, default=5, metavar="N", help="switches of each, with and without a pause (5)"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        model=str(resolve(args.model)),
        device=args.device,
        vram_budget_bytes=args.vram_budget,
        n_ctx=args.tokens + 512 + 12 * args.repeat,
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
    print(f"  read in {switch['read_s']} s")
    print(
        f"  switched to without a pause: {1e3 * switch['save_s']:.1f} ms to copy the other one to host memory, "
        f"{1e3 * switch['restore_s']:.1f} ms to copy this one back, {100 * switch['copy_share']:.1f} % of reading it; "
        f"first token after {switch['switch_ttft_s']} s"
    )
    ahead = switch["ahead"]
    print(
        f"  switched to after an idle moment: {1e3 * ahead['switch_s']:.1f} ms, {100 * ahead['switch_share']:.1f} % of "
        f"reading it; first token after {ahead['switch_ttft_s']} s; {1e3 * ahead['save_s']:.1f} ms were spent ahead"
    )


if __name__ == "__main__":
    main()
