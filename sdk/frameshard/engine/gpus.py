"""The choice of a device for ``auto``: the best GPU that works, or the CPU. It is told why better ones were not taken.

A driver that is asked for its devices may crash or hang. So each GPU module is tried in a process of its own, and is
loaded here only if the device that was chosen belongs to it. A module that is linked to a library that this machine
does not have is not tried. Drivers of a llama-cpp-python with GPU backends inside have been asked when ggml was loaded.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from frameshard import ggml, program, system
from frameshard.errors import FrameshardError
from frameshard.records import record

logger = logging.getLogger("frameshard.engine")

TRY_S = 60.0
"""Seconds that a driver has to answer."""

_WORDS = 4  # lines of the process's output that a reason quotes
_MIB = 1 << 20


@record
class Gpu:
    """A GPU that works, with its free and its total memory in bytes."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


@record
class Choice:
    """The device that was chosen.

    :param passed_over: why better devices were not taken, a sentence for each.
    """

    device: str
    passed_over: tuple[str, ...] = ()


class NotWorking(Exception):
    """A GPU module has no device that works. The message says why."""


def resolve(device: str, least_bytes: Callable[[], int] = lambda: 0) -> Choice:
    """The device to use: ``device``, or a choice for ``auto``. The log tells what was chosen, and why.

    :param least_bytes: returns the memory that the model needs on a GPU at least, in bytes. It is called if there is a
        GPU.
    """
    if device != "auto":
        return Choice(device)
    choice = choose(least_bytes)
    for reason in choice.passed_over:
        logger.warning("device auto: not %s", reason)
    logger.warning("device auto: using %s", choice.device)
    return choice


def choose(least_bytes: Callable[[], int] = lambda: 0) -> Choice:
    """Chooses a device for ``auto``, as :func:`resolve` does, without telling the log."""
    passed_over: list[str] = []
    for gpu in _candidates(passed_over):
        needed = least_bytes()
        if gpu.free_bytes >= needed:
            return Choice(gpu.name, tuple(passed_over))
        free, total, needed = gpu.free_bytes // _MIB, gpu.total_bytes // _MIB, -(-needed // _MIB)
        passed_over.append(f"{gpu.name}: {free} of {total} MiB are free, and the model needs about {needed} MiB")
    return Choice("cpu", tuple(passed_over))


def _candidates(passed_over: list[str]) -> Iterator[Gpu]:
    """The GPUs of ggml itself, then those of each module, the best first. Reasons are added to ``passed_over``."""
    yield from registered()
    for module, name in ggml.MODULES.items():
        if not ggml.has_inside(module):
            try:
                yield from try_module(module)
            except NotWorking as reason:
                passed_over.append(f"{name}: {reason}")


def registered() -> Iterator[Gpu]:
    """The GPUs that are registered with ggml, with those of modules that are loaded."""
    for name, device in ggml.gpu_handles().items():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.base().ggml_backend_dev_memory(ctypes.c_void_p(device), ctypes.byref(free), ctypes.byref(total))
        yield Gpu(name, ggml.description(device), free.value, total.value)


def try_module(module: str) -> list[Gpu]:
    """Tries a GPU module in a process of its own: loads it and opens each of its devices.

    :param module: a key of :data:`frameshard.ggml.MODULES`.
    :returns: the devices that work, at least one.
    :raises NotWorking: there is none.
    """
    try:
        ggml.open_module(module)
    except FrameshardError as error:
        raise NotWorking(error.message) from None
    logger.info("asking the driver for %s devices in a process of its own", ggml.MODULES[module])
    command = program.command(__name__, module)
    try:
        tried = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotWorking(f"its driver did not answer within {TRY_S:g} s") from None
    said = _last_words(tried.stderr.decode("utf-8", "replace").splitlines())
    if tried.returncode != 0:
        raise NotWorking(f"its driver ended the process that asked it, with {system.ending(tried.returncode)}{said}")
    try:
        answer = json.loads(tried.stdout)
    except ValueError:
        raise NotWorking(f"its driver ended the process that asked it, without an error{said}") from None
    if "error" in answer:
        raise NotWorking(f"{answer['error']}{said}")
    return [Gpu(**gpu) for gpu in answer["gpus"]]


def _last_words(lines: Iterable[str]) -> str:
    words = [line.strip() for line in lines if line.strip() and not line.startswith("load_backend:")][-_WORDS:]
    return f": {'; '.join(words)}" if words else ""


def main(module: str) -> None:
    """Runs in the process of its own, and ends it before a driver cleans up. Prints a JSON document; all messages of
    ggml and the driver are on standard error."""
    if hasattr(signal, "alarm"):
        signal.alarm(round(TRY_S))  # the process that waits for the answer may have ended
    told = os.dup(1)
    os.dup2(2, 1)
    answer: dict[str, object]
    try:
        ggml.load_module(module)
    except FrameshardError as error:
        answer = {"error": error.message}
    else:
        gpus = [gpu for gpu in registered() if gpu.name.startswith(ggml.MODULES[module])]
        works = [gpu for gpu in gpus if _opens(gpu.name)]
        answer = {"gpus": [asdict(gpu) for gpu in works]}
        if not works:
            answer = {
                "error": "it has no device" if not gpus else f"{', '.join(g.name for g in gpus)} cannot be opened"
            }
    with open(told, "w") as output:
        json.dump(answer, output)
    os._exit(0)


def _opens(device: str) -> bool:
    base = ggml.base()
    base.ggml_backend_dev_init.restype = ctypes.c_void_p
    backend = base.ggml_backend_dev_init(ctypes.c_void_p(ggml.device_handle(device)), None)
    base.ggml_backend_free(ctypes.c_void_p(backend))
    return bool(backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
