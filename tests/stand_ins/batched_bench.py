"""Stands in for llama.cpp's llama-batched-bench: takes VRAM by its arguments, and answers with rates by its arguments.

The file ``$STAND_IN`` says how much: ``weights`` (with KV) by ``"NGL NCMOE OT"``, ``fixed``, ``per_ubatch_token`` and
``per_prompt_token`` in bytes. ``staged`` is taken too unless all weights are on the GPU, or with ``--no-op-offload``,
which is ten times slower in prompts. ``attention_pays`` is how much more a byte is worth on the GPU with ``-ot``. Each
run adds its arguments to the file ``runs`` in the folder ``$STAND_IN_VRAM``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    args = [each for each in sys.argv[1:] if each != "--no-op-offload"]
    copies = len(args) == len(sys.argv) - 1
    given = dict(zip(args[::2], args[1::2], strict=True))
    folder = Path(os.environ["STAND_IN_VRAM"])
    with open(folder / "runs", "a") as runs:
        runs.write(json.dumps(given | {"copies": copies}) + "\n")
    machine = json.loads(Path(os.environ["STAND_IN"]).read_text())
    ubatch = int(given["-ub"])
    weights = machine["weights"][f"{given['-ngl']} {given.get('-ncmoe', '0')} {given.get('-ot', '')}"]
    whole = max(machine["weights"].values())
    prompts = [int(each) for each in given["-npp"].split(",")]
    used = weights + machine["fixed"] + ubatch * machine["per_ubatch_token"]
    used += max(prompts) * machine["per_prompt_token"]
    used += machine["staged"] if weights < whole and copies else 0
    for parts in (8, 4, 2, 1):  # a look at the VRAM reads it up to three times, and counts the first
        take(folder, used // parts)
    share = weights / whole
    if "-ot" in given:
        share = min(share * machine["attention_pays"], 1.0)
    speed = {"t_pp": (2 - share) * (1 if copies else 10) * 1000 / ubatch, "speed_tg": 10 / (2 - share)}
    for _ in prompts:
        for tokens in map(int, given["-ntg"].split(",")):
            print(json.dumps({"tg": tokens, **speed}), flush=True)


def take(folder: Path, n_bytes: int) -> None:
    """Takes VRAM, and waits until somebody has seen it."""
    mine, seen = folder / str(os.getpid()), folder / f"{os.getpid()}.seen"
    (folder / "new").write_text(str(n_bytes))
    (folder / "new").rename(mine)  # so that nobody reads an empty file
    deadline = time.monotonic() + 60
    while not (seen.exists() and seen.read_text() == str(n_bytes)):
        assert time.monotonic() < deadline, "nobody looks"
        time.sleep(0.002)


main()
