"""Calls of tools: that each validates, and what the mask of allowed tokens costs for a token.

    python profiles/tools/calls.py MODEL [--tools 40] [--seeds 200] [--answers]

As many calls are drawn as there are tools times seeds. Each is drawn token by token from the mask of all tools, all
tokens with equal probability: without a model's liking for sensible text this is the hardest test of the grammar. The
times are CPU times of the thread, so that other programs do not count. An answer without tools has no mask.

With --answers the model itself writes the calls, in a sidecar on the CPU: an answer for each tool and seed.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import trio

import frameshard
from frameshard.engine.calls import CallReader
from frameshard.engine.runtime import Runtime
from frameshard.engine.tools import form
from frameshard.text import utf8_decoder
from frameshard.wire.engine import EngineConfig
from frameshard.wire.messages import Tool

MOST_TOKENS = 2000
N_PARALLEL = 16


def schema(number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "item": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "mood": {"enum": ["calm", "angry", f"mood {number}"]},
            "where": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "maxItems": 3},
            "note": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}]},
        },
        "required": ["item", "count"],
    }


def draw(model: str, schemas: dict[str, dict[str, Any]], n_seeds: int) -> None:
    """Draws calls from the mask alone, and prints how many are valid and what the mask costs."""
    tools = [Tool(name, f"Does {name}.", json.dumps(each)) for name, each in schemas.items()]
    with Runtime.load(EngineConfig(model, n_ctx=512, n_parallel=1, n_threads=1)) as runtime:
        tokenizer = runtime.tokenizer
        syntax, times, begun = tokenizer.call_syntax, [], []
        drawn = valid = unended = 0
        held = form(tools, "required", syntax, tokenizer.with_marks)
        for turn in range(len(tools)):
            for seed in range(n_seeds):
                dice, reader = random.Random(f"{turn} {seed}"), CallReader(syntax, str, must_call=True)
                decoder = utf8_decoder()
                started = time.thread_time()
                matcher = runtime.forms.matcher(held)
                begun.append(time.thread_time() - started)
                found: list[Any] = []
                for _ in range(MOST_TOKENS):
                    started = time.thread_time()
                    allowed = matcher.allowed()
                    times.append(time.thread_time() - started)
                    token = int(dice.choice(allowed))
                    matcher.accept(token)
                    piece = tokenizer.call_pieces.get(token, tokenizer.piece(token))
                    found += reader.feed(decoder.decode(piece)).calls
                    if found:
                        break
                drawn += 1
                if not found:
                    unended += 1
                    continue
                jsonschema.validate(json.loads(found[0].arguments), schemas[found[0].name])
                valid += 1
    print(f"{valid} of {drawn} calls valid, {unended} without an end after {MOST_TOKENS} tokens")
    for what, row in (("a matcher", begun), ("a mask", times)):
        p50, p99 = 1e3 * np.percentile(row, [50, 99])
        print(f"{what} with {len(tools)} tools: p50 {p50:.3f} ms, p99 {p99:.3f} ms, n {len(row)}")


async def ask(model: str, schemas: dict[str, dict[str, Any]], n_seeds: int) -> None:
    """Lets the model call each tool with each seed, and prints how many calls are valid."""
    counts = {"calls": 0, "answers": 0, "cut off by max_tokens": 0}

    async def answer(name: str, seed: int) -> None:
        tool = frameshard.Tool(name, f"Does {name}.", schemas[name])
        sampling = frameshard.Sampling(max_tokens=120, temperature=1.0, seed=seed)
        async with turns:
            done = await client.ask("Do it.", tools=[tool], tool_choice="required", sampling=sampling).completed()
        for call in done.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
        assert done.tool_calls or done.reason == "length", done
        counts["calls"] += len(done.tool_calls)
        counts["answers"] += 1
        counts["cut off by max_tokens"] += done.reason == "length"
        if counts["answers"] % 500 == 0:
            print(", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)

    turns = trio.CapacityLimiter(N_PARALLEL)
    async with frameshard.launch(model, device="cpu", n_ctx=512, n_parallel=N_PARALLEL) as client:
        async with trio.open_nursery() as nursery:
            for name in schemas:
                for seed in range(n_seeds):
                    nursery.start_soon(answer, name, seed)
    print(f"all calls valid: {counts['calls']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tools", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--answers", action="store_true", help="let the model write the calls")
    args = parser.parse_args()
    schemas = {f"tool_{number:02}": schema(number) for number in range(args.tools)}
    if args.answers:
        trio.run(ask, args.model, schemas, args.seeds)
    else:
        draw(args.model, schemas, args.seeds)


if __name__ == "__main__":
    main()
