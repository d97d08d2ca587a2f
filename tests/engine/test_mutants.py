"""A damaged file that passes the header checks must not end the process that loads it."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mutants
import tiny_models

SEEDS = range(7000, 7024)

# Each file is loaded in a process of its own. It is forked before llama.cpp has threads, because an import takes a
# second.
LOAD = """
import os, resource, sys
from frameshard.engine.runtime import Runtime
from frameshard.wire.engine import EngineConfig
from frameshard.errors import FrameshardError

def load(path):
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # ends what spins
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        config = EngineConfig(path, device="cpu", n_ctx=256, n_parallel=1, n_ubatch=16, n_threads=1)
        with Runtime.load(config, measure=False) as runtime:
            runtime.decode_tokens(0, runtime.tokenizer.tokenize("hello you")[:8])
        return 0
    except FrameshardError:
        return 1

for path in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        os._exit(load(path))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_mutants_are_refused_or_served(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    sound = {name: mutants.Gguf(tiny_model(name)) for name in tiny_models.ARCHS}
    paths, made = [], []
    for seed in SEEDS:
        rng = random.Random(seed)
        name = rng.choice(list(tiny_models.ARCHS))
        file = copy.deepcopy(sound[name])
        made.append(f"seed {seed}: {name}, {'; '.join(mutants.mutate(file, rng))}")
        paths.append(file.write(tmp_path / f"{seed}.gguf"))
    command = [sys.executable, "-c", LOAD, *map(str, paths)]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    codes = list(map(int, loaded.stdout.split()))
    assert len(codes) == len(paths), loaded.stderr
    died = [f"{what} -> {code}" for what, code in zip(made, codes, strict=True) if code not in (0, 1)]
    assert not died, "\n".join(died)
    assert set(codes) == {0, 1}
