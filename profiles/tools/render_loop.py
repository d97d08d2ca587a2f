"""Measures a game's frame times: without a running job, with one but without pacing, and in each scheduling mode.

    python profiles/tools/render_loop.py MODEL.gguf --device CUDA0 --frames gl --json

A separate process draws 60 frames per second and writes the frame block. With ``--frames gl`` it runs a fragment shader
through headless EGL (needs moderngl) that takes 12 ms of GPU time. With ``--frames cpu``, for machines without a GPU,
it computes on one core for that time. Meanwhile one job decodes, and then jobs prefill. ``frame`` is the time from the
start of a frame to the start of the next, ``work`` from its start to the end of its drawing. ``low_1`` is the frame
rate of the slowest 1 % of frames.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import trio

import frameshard
from frameshard.frame import FrameBlock

PERIOD_S = 1 / 60
WORDS = "the innkeeper pours another cup and tells of the road that leads north past the mill into the hills "
Draw = Callable[[], float]

VERTEX = """
#version 330
void main() { gl_Position = vec4(vec2(gl_VertexID & 1, gl_VertexID >> 1) * 4.0 - 1.0, 0.0, 1.0); }
"""
FRAGMENT = """
#version 330
uniform int rounds;
out vec4 colour;
void main() {
    vec4 v = gl_FragCoord * 0.001;
    for (int i = 0; i < rounds; i++) v = fract(v * 1.7 + v.yzwx * v.wxyz);
    colour = v;
}
"""


# ---- the process that draws -----------------------------------------------------------------------------------------


def gl_frames(busy_s: float) -> Draw:
    """A function that draws a frame through EGL and returns its GPU time."""
    import moderngl

    context = moderngl.create_context(standalone=True, backend="egl", require=330)
    print(f"drawing on {context.info['GL_RENDERER']}", file=sys.stderr)
    target = context.framebuffer([context.texture((1920, 1080), 4)])
    program = context.program(vertex_shader=VERTEX, fragment_shader=FRAGMENT)
    array = context.vertex_array(program, [])
    query = context.query(time=True)
    target.use()

    def draw() -> float:
        with query:
            array.render(moderngl.TRIANGLE_STRIP, vertices=3)
        context.finish()
        return float(query.elapsed * 1e-9)

    rounds = 100
    for _ in range(12):  # during the first draws the GPU's clock rises
        program["rounds"].value = rounds
        took = sorted(draw() for _ in range(5))[2]
        rounds = max(1, min(10_000_000, int(rounds * min(busy_s / max(took, 1e-6), 8.0))))
    program["rounds"].value = rounds
    print(f"{rounds} rounds take {draw() * 1000:.2f} ms", file=sys.stderr)
    return draw


def cpu_frames(busy_s: float) -> Draw:
    """A function that does a fixed amount of work. It takes about `busy_s` if nothing else runs."""

    def work(rounds: int) -> float:
        started = time.perf_counter()
        value = 1
        for _ in range(rounds):
            value = value * 1103515245 + 12345 & 0x7FFFFFFF
        return time.perf_counter() - started

    rounds = int(20000 * busy_s / min(work(20000) for _ in range(20)))
    return lambda: work(rounds)


def draw_for(draw: Draw, seconds: float, block: FrameBlock | None) -> dict[str, Any]:
    """Draws for so many seconds; returns the figures of this phase."""
    begins, works = [], []
    busy: collections.deque[float] = collections.deque(maxlen=30)
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        while (left := due - time.perf_counter()) > 0:
            if left > 0.0015:
                time.sleep(left - 0.001)
        begin = time.perf_counter()
        begins.append(begin)
        if block is not None:
            block.begin()
        busy.append(draw())
        works.append(time.perf_counter() - begin)
        if block is not None:
            # Report the shortest time of the last frames: other work on the GPU can only make a frame longer.
            block.end(gpu_busy_ms=min(busy) * 1000)
        due = max(due + PERIOD_S, time.perf_counter())
    if block is not None:
        block.idle()
    frames, drawn = np.diff(begins)[5:] * 1000, np.array(works)[5:] * 1000
    slowest = np.sort(frames)[-max(1, len(frames) // 100) :]
    return {
        "frames": len(frames),
        **{f"frame_p{p}_ms": float(np.percentile(frames, p)) for p in (50, 95, 99)},
        "low_1_fps": float(1000 / slowest.mean()),
        **{f"work_p{p}_ms": float(np.percentile(drawn, p)) for p in (50, 99)},
    }


def drawer(args: argparse.Namespace) -> None:
    """The drawing process. It reads phases as lines of JSON from standard input."""
    draw = {"gl": gl_frames, "cpu": cpu_frames}[args.frames](args.busy_ms / 1000)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        phase = json.loads(line)
        block = FrameBlock(phase["page"], target_frame_ms=PERIOD_S * 1000) if phase["page"] else None
        print(json.dumps(draw_for(draw, phase["seconds"], block)), flush=True)
        if block is not None:
            block.close()


# ---- the host -------------------------------------------------------------------------------------------------------


class Drawer:
    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.buffer = b""

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self.buffer:
            data = await self.process.stdout.receive_some()
            if not data:
                raise SystemExit("the drawing process has ended; its last words are above")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    async def phase(self, seconds: float, page: str | None) -> dict[str, Any]:
        assert self.process.stdin is not None
        await self.process.stdin.send_all(json.dumps({"seconds": seconds, "page": page}).encode() + b"\n")
        return await self.line()


async def speak(client: frameshard.Client, count: list[int]) -> None:
    sampling = frameshard.Sampling(max_tokens=4096, temperature=0.0)
    while True:
        async with client.complete("Once upon a time", sampling=sampling) as stream:
            async for delta in stream:
                count[0] += delta.tokens


async def read(client: frameshard.Client, prompt: str, count: list[int]) -> None:
    sampling = frameshard.Sampling(max_tokens=1, temperature=0.0)
    while True:
        count[0] += (await client.complete(prompt, sampling=sampling).completed()).n_prompt


async def prompt_tokens(client: frameshard.Client) -> int:
    """The number of prompt tokens that the engine has computed so far."""
    engine = (await client.stats()).engine or {}
    return int(engine.get("prompt_tokens", 0))


async def main(args: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--draw", "--frames", args.frames, "--busy-ms", str(args.busy_ms), "-"]
    process = await trio.lowlevel.open_process(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rows: dict[str, dict[str, Any]] = {}
    try:
        drawn = Drawer(process)
        await drawn.line()
        rows["AI off"] = await drawn.phase(args.seconds, None)
        async with frameshard.launch(
            args.model,
            device=args.device,
            vram_budget_mb=args.vram_budget_mb,
            n_ctx=args.prompt + 4608,
            n_parallel=1,
            n_ubatch=args.ubatch,
            n_threads=args.threads,
        ) as client:
            short = await client.complete(WORDS * 10, sampling=frameshard.Sampling(max_tokens=1)).completed()
            prompt = WORDS * max(1, int(10 * args.prompt / short.n_prompt) - 1)
            rows["loaded, no job"] = await drawn.phase(args.seconds, None)
            page = None
            for mode in ("unpaced", "prioritize_graphics", "balance", "prioritize_compute"):
                if mode != "unpaced":
                    await client.set_pacing(mode)
                    page = page or (await client.frame_block()).path
                for work in ("decode", "prefill"):
                    count = [0]
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(
                            *((speak, client, count) if work == "decode" else (read, client, prompt, count))
                        )
                        if work == "decode":
                            while not count[0]:
                                await trio.sleep(0.01)
                        before = count[0], await prompt_tokens(client), time.monotonic()
                        row = await drawn.phase(args.seconds, page)
                        passed = time.monotonic() - before[2]
                        done = count[0] - before[0] if work == "decode" else await prompt_tokens(client) - before[1]
                        row["tokens_per_second"] = done / passed
                        nursery.cancel_scope.cancel()
                    rows[f"{mode}, {work}"] = row
            model = await client.model_info()
    finally:
        process.kill()
        await process.wait()
    return {"model": model.name, "device": model.device, "vram_budget_mb": args.vram_budget_mb, "rows": rows}


def print_table(document: dict[str, Any]) -> None:
    columns = ("frame_p50_ms", "frame_p95_ms", "frame_p99_ms", "low_1_fps", "work_p50_ms", "work_p99_ms")
    print(f"{'':30}" + "".join(f"{name:>14}" for name in (*columns, "tokens/s")))
    for name, row in document["rows"].items():
        speed = f"{row['tokens_per_second']:14.1f}" if "tokens_per_second" in row else ""
        print(f"{name:30}" + "".join(f"{row[column]:14.2f}" for column in columns) + speed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--frames", choices=("gl", "cpu"), required=True)
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--vram-budget-mb", type=float, default=0.0, help="of the sidecar (no limit)")
    parser.add_argument("--busy-ms", type=float, default=12.0, help="GPU time of a frame (12)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (10)")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens (8192)")
    parser.add_argument("--ubatch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--draw", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.draw:
        drawer(arguments)
        sys.exit()
    document = trio.run(main, arguments)
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)
