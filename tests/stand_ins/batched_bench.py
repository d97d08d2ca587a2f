"""Stands in for llama.cpp's llama-batched-bench: takes VRAM by its arguments, and answers with rates by its arguments.

The file ``$STAND_IN`` says how much: ``weights`` (with KV) by ``"NGL NCMOE"``, ``fixed`` and ``per_ubatch_token`` in
bytes. ``staged`` is taken too unless all weights are on the GPU. Each run adds its arguments to the file ``runs`` in
the folder ``$STAND_IN_VRAM``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    folder = Path(os.environ["STAND_IN_VRAM"])
    with open(folder / "runs", "a") as runs:
        runs.write(json.dumps(given) + "\n")
    machine = json.loads(Path(os.environ["STAND_IN"]).read_text())
    ubatch = int(given["-ub"])
    weights = machine["weights"][f"{given['-ngl']} {given.get('-ncmoe', '0')}"]
    whole = max(machine["weights"].values())
    used = weights + machine["fixed"] + ubatch * machine["per_ubatch_token"]
    used += machine["staged"] if weights < whole else 0
    for parts in (8, 4, 2, 1):  # a look at the VRAM reads it up to three times, and counts the first
        take(folder, used // parts)
    share = weights / whole
    for tokens in map(int, given["-ntg"].split(",")):
        speed = {"t_pp": (2 - share) * 1000 / ubatch, "speed_tg": 10 / (2 - share)}
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
