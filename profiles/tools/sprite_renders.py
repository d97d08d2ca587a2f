"""Tests the sprite tower with all its test images: in stock libmtmd, with all weights resident, and at small budgets.

    python profiles/tools/sprite_renders.py [--device emulated] [--budgets 40,48,64,96] [--limit N] [--json]

Each image gets one chat question at temperature 0. The sidecars run in stream-only mode, so the answers must be the
same at every budget. For each run the tool prints how many answers name the sprite correctly, how many are the same as
with all weights resident, and the peak of VRAM. The exit status is 1 if an answer differs or a peak is above its
budget.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import trio
from llama_cpp import mtmd_cpp as mtmd

import frameshard
from frameshard import cpu, models
from frameshard.cli.common import parse_size
from frameshard.engine.chat import ChatTemplate
from frameshard.plan.model import read_model

QUESTION = "Which word is repeated above?"
N_CTX, N_UBATCH, MAX_TOKENS = 1024, 128, 12


def stock(model_path: Path, mmproj: Path, pictures: list[Path], n_threads: int) -> dict[str, str]:
    """The answers of llama.cpp and libmtmd alone on the CPU, with libmtmd's own loop, by the name of the image."""
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    mtmd.mtmd_helper_log_set(quiet, None)
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = not cpu.must_avoid_amx()
    model = llama_cpp.llama_model_load_from_file(str(model_path).encode(), params)
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx, context_params.n_threads, context_params.n_threads_batch = N_CTX, n_threads, n_threads
    context = llama_cpp.llama_init_from_model(model, context_params)
    vision_params = mtmd.mtmd_context_params_default()
    vision_params.use_gpu, vision_params.print_timings, vision_params.n_threads = False, False, n_threads
    vision = mtmd.mtmd_init_from_file(str(mmproj).encode(), model, vision_params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    template = read_model(model_path).chat_template
    assert template is not None
    content = f"{mtmd.mtmd_default_marker().decode()}\n{QUESTION}"
    prompt = ChatTemplate(template, bos="", eos="").render([{"role": "user", "content": content}]).encode()
    answers = {}
    for picture in pictures:
        bitmap = mtmd.mtmd_helper_bitmap_init_from_file(vision, str(picture).encode(), False)
        bitmap = getattr(bitmap, "bitmap", bitmap)
        chunks = mtmd.mtmd_input_chunks_init()
        text = mtmd.mtmd_input_text(prompt, len(prompt), True, True)
        assert mtmd.mtmd_tokenize(vision, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1) == 0
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        end = llama_cpp.llama_pos(0)
        assert mtmd.mtmd_helper_eval_chunks(vision, context, chunks, 0, 0, N_UBATCH, True, ctypes.byref(end)) == 0
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        sampler, said = llama_cpp.llama_sampler_init_greedy(), b""
        for _ in range(MAX_TOKENS):
            token = llama_cpp.llama_sampler_sample(sampler, context, -1)
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                break
            piece = ctypes.create_string_buffer(64)
            size = llama_cpp.llama_token_to_piece(vocab, token, piece, 64, 0, False)
            said += piece.raw[:size]
            llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1))
        answers[picture.name] = said.decode(errors="replace")
    return answers


async def sidecar(
    model: Path, mmproj: Path, pictures: list[Path], device: str, budget: int, n_threads: int
) -> tuple[dict[str, str], int]:
    """A sidecar's answers by the name of the image, and its peak of VRAM in bytes."""
    options = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "n_parallel": 1, "mode": "stream_only", "n_threads": n_threads}
    sampling = frameshard.Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
    launched = frameshard.launch(
        model, mmproj=mmproj, device=device, vram_budget_mb=budget / 2**20, hang_busy_s=600.0, **options
    )
    async with launched as client:
        answers = {}
        for picture in pictures:
            asked = client.ask(QUESTION, images=[picture.read_bytes()], sampling=sampling)
            answers[picture.name] = (await asked.completed()).text
        stats = await client.stats()
        assert stats.engine is not None
        return answers, int(stats.engine.get("peak_bytes", 0))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="emulated")
    parser.add_argument("--budgets", default="40,48,64,96", help="MiB, or with a unit")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=int, default=None, help="name only the first N images")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model, mmproj = models.resolve("smollm2-135m"), models.resolve(models.SPRITES)
    pictures = sorted((models.sprites_dir() / "renders").glob("*.png"))[: args.limit]
    runs: dict[str, tuple[dict[str, str], int, int]] = {}
    for budget in [0, *map(parse_size, args.budgets.split(","))]:
        name = f"{budget / 2**20:g} MiB" if budget else "resident"
        answers, peak = trio.run(sidecar, model, mmproj, pictures, args.device, budget, args.threads)
        runs[name] = answers, peak, budget
        print(f"{name}: done", file=sys.stderr, flush=True)
    runs["stock libmtmd"] = stock(model, mmproj, pictures, args.threads), 0, 0
    expected, bad = runs["resident"][0], False
    table = []
    for name, (answers, peak, budget) in runs.items():
        right = sum(picture.rsplit("_", 1)[0] in answer.lower() for picture, answer in answers.items())
        same = sum(answers[picture] == expected[picture] for picture in expected)
        bad = bad or (name != "stock libmtmd" and same < len(pictures)) or bool(budget and peak > budget)
        table.append({"run": name, "right": right, "same_as_resident": same, "of": len(pictures), "peak_bytes": peak})
    if args.json:
        print(json.dumps({"device": args.device, "runs": table, "answers": expected}, indent=1))
    else:
        for row in table:
            peak = f"{row['peak_bytes'] / 2**20:.1f} MiB" if row["peak_bytes"] else "-"
            print(f"{row['run']:14} right {row['right']} of {row['of']}, as resident {row['same_as_resident']}, {peak}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
