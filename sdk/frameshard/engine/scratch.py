"""Tries to load model files in a separate process, which a bad file may crash. Programs that load a model into their
own process call this first. The sidecar does not need it, because its engine is a separate process.

A file that loaded is not tried again until it changes.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from frameshard import models, program, system
from frameshard.errors import BadModel, EngineDied, FrameshardError, from_wire
from frameshard.native import LLAMA_CPP_PYTHON
from frameshard.plan.model import read_model

logger = logging.getLogger("frameshard.engine")

TRY_S = 600.0
"""The longest time to load a file, in seconds. A file larger than memory on a slow disk needs minutes."""

_WORDS = 4  # lines of the process's output that an error message quotes


def try_files(model: str, mmproj: str = "") -> None:
    """Loads the model on the CPU in a separate process and decodes a token there. With ``mmproj``, also encodes an
    image.

    :param model: path of the model file.
    :param mmproj: path of the vision tower's file; "" for none.
    :raises BadModel: a file crashed the process, took too long, or cannot be used.
    :raises EngineDied: the process was killed.
    """
    read_model(model)
    files = [*models.files_of(Path(model)), *([Path(mmproj)] if mmproj else [])]
    part = models.locate(model)
    passed = models.verdict("scratch", files, LLAMA_CPP_PYTHON, part.offset, part.n_bytes)
    if models.has_passed(passed):
        return
    names = " with ".join(file.name for file in files[:1] + files[len(files) - bool(mmproj) :])
    logger.warning("trying %s in a process of its own; that is done once for a file", names)
    command = program.command("frameshard.engine.scratch", model, mmproj)
    try:
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False)
    except subprocess.TimeoutExpired:
        raise BadModel(f"{names} did not load within {TRY_S:g} s", path=model) from None
    if tried.returncode == 0:
        models.pass_verdict(passed)
        return
    if tried.stdout:
        raise from_wire(json.loads(tried.stdout))
    said = "; ".join(tried.stderr.decode("utf-8", "replace").strip().splitlines()[-_WORDS:])
    how = system.ending(tried.returncode)
    if how == system.KILLED:
        raise EngineDied(f"the process that tried {names} was killed: {said}", last_words=said)
    raise BadModel(f"llama.cpp ended with {how} while it loaded {names}: {said}", path=model, last_words=said)


def main(model: str, mmproj: str) -> int:
    """Runs in the separate process. Prints an error as one JSON document.

    :returns: the exit code: 0 if the files loaded, else 1.
    """
    from frameshard.engine.runtime import Runtime
    from frameshard.engine.vision import Vision
    from frameshard.wire.engine import EngineConfig

    config = EngineConfig(model, device="cpu", n_ctx=256, n_parallel=1, n_ubatch=32, mmproj=mmproj)
    try:
        with Runtime.load(config) as runtime:
            if mmproj:
                vision = Vision(runtime, mmproj)
                vision.try_out()
                vision.close()
    except FrameshardError as error:
        print(json.dumps(error.to_wire()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
