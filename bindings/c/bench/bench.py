"""Measures the C client with a real sidecar and a real model: ``bench.py HOST MODEL [DEVICE [JOBS]]``.

HOST is the program of ``host.c``. The engine records when it has produced the first token of each job, before it sends
the token. The host records when fs_poll returned the token's text. Both use CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from frameshard import models


def engine(stamps: str, arguments: list[str]) -> None:
    """Runs the usual engine, and writes the time of each first token to the file `stamps`."""
    import time

    from frameshard.engine import process

    file = os.open(stamps, os.O_WRONLY | os.O_APPEND)
    send = process.Channel.send

    def stamped(self: process.Channel, message: dict[str, Any]) -> None:
        if message.get("ev") == "token" and message["n"] == 0:
            os.write(file, b"%d\n" % time.monotonic_ns())
        send(self, message)

    process.Channel.send = stamped  # type: ignore[method-assign]
    process.main(arguments)


def main(host: str, model: str, device: str = "cpu", jobs: str = "200") -> None:
    with tempfile.NamedTemporaryFile() as stamps:
        extra = {
            "engine": [sys.executable, str(Path(__file__).resolve()), "--engine", stamps.name],
            "device": device,
            "n_threads": 1,
            "n_ctx": 256,
        }
        path = str(models.resolve(model))
        said = subprocess.run(
            [host, path, sys.executable, json.dumps(extra), jobs], stdout=subprocess.PIPE, text=True, check=True
        )
        produced = [int(line) for line in Path(stamps.name).read_text().split()]
    found = json.loads(said.stdout)
    seen = found.pop("first_text_ns")
    assert len(seen) == len(produced), (len(seen), len(produced))
    late_ms = sorted((there - made) / 1e6 for made, there in zip(produced, seen, strict=True))
    found["jobs"] = len(late_ms)
    found["first_event_ms_p5"] = round(late_ms[len(late_ms) // 20], 3)
    found["first_event_ms_p50"] = round(statistics.median(late_ms), 3)
    found["first_event_ms_p99"] = round(late_ms[len(late_ms) * 99 // 100], 3)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        engine(sys.argv[2], sys.argv[3:])
    else:
        main(*sys.argv[1:])
