"""Checks whether the installed ggml can run on this CPU, and chooses the number of threads.

libggml-cpu is compiled for a fixed set of instructions, and does not check whether the CPU has them. ``make build``
compiles it for Haswell (native/tools/llama_wheel.py). A llama-cpp-python from elsewhere is often compiled for the CPU
of the machine that compiled it. This module runs no code of ggml that needs these instructions.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Set
from pathlib import Path

from .errors import Unsupported

NEEDS: dict[str, tuple[str, ...]] = {
    "avx": ("avx",),
    "avx2": ("avx2",),
    "bmi2": ("bmi2",),
    "f16c": ("f16c",),
    "fma": ("fma",),
    "avx_vnni": ("avx_vnni",),
    "avx512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "avx512_vbmi": ("avx512vbmi",),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
}
"""The features of ggml that it uses without a check. Each has the CPU flags that it needs, with their names in
Linux."""
AMX = "amx_int8"
"""The only feature that ggml checks for before it uses it. It has the same name in ggml and in Linux."""


_V3 = frozenset({"avx", "avx2", "bmi2", "f16c", "fma"})
_LEVELS = {"x86-64-v2": frozenset[str](), "x86-64-v3": _V3, "x86-64-v4": _V3 | {"avx512"}}


def flags() -> frozenset[str] | None:
    """Returns the flags of this CPU, with their names in Linux; ``None`` if they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    names = ("flags", "Features")  # x86, ARM
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(names)), None)


def name() -> str:
    """The CPU's name, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def compiled_for() -> frozenset[str] | None:
    """Returns those of the features ``NEEDS`` and ``AMX`` that libggml-cpu was compiled with. ``None`` if llama.cpp is
    not linked to it: ggml then chooses one of several libraries to fit the CPU."""
    import llama_cpp

    library = llama_cpp.llama_cpp._lib
    if not hasattr(library, "ggml_cpu_has_avx2"):
        return None
    return frozenset(name for name in (*NEEDS, AMX) if library[f"ggml_cpu_has_{name}"]())


def needed_flags(features: Set[str]) -> list[str]:
    """Returns the CPU flags that a ggml with ``features`` needs, with their names in Linux."""
    return sorted(flag for name in features if name in NEEDS for flag in NEEDS[name])


def level(features: Set[str]) -> str | None:
    """Returns the lowest level of the x86-64 ABI that has all of ``features``; ``None`` if no level has. The lowest one
    here is x86-64-v2, because numpy needs it."""
    return next((name for name, has in _LEVELS.items() if features - {AMX} <= has), None)


def described(features: Set[str]) -> dict[str, object]:
    """What a ggml with ``features`` needs, for a manifest."""
    return {"level": level(features), "flags": needed_flags(features)}


def check() -> None:
    """Checks that ggml can run on this CPU. Call it before ggml computes anything or lists its devices.

    :raises Unsupported: ggml was compiled for instructions that this CPU does not have, and would crash (SIGILL).
    """
    features, has = compiled_for(), flags()
    if features is None or has is None:
        return
    if missing := [flag for flag in needed_flags(features) if flag not in has]:
        raise Unsupported(
            f"this CPU has no {', '.join(missing)}, for which the installed llama-cpp-python was compiled. What "
            "frameshard's own build makes runs on x86-64 since Haswell (2013); build llama-cpp-python on this machine "
            "with CMAKE_ARGS=-DGGML_NATIVE=ON to use it here",
            missing=missing,
        )


def must_avoid_amx() -> bool:
    """Returns true if models must be loaded without ggml's extra buffer types, one of which is AMX. That is so if ggml
    was compiled with AMX and the CPU has it, or if this is not known.

    gcc 12 removes the stores before ``_tile_loadconfig``, so the first product of a matrix in AMX's buffer type crashes
    the process. The library does not tell which compiler made it, so AMX is never used.
    """
    return all(where is None or AMX in where for where in (compiled_for(), flags()))


def default_threads() -> int:
    """Returns half the number of logical CPUs that this process may use. The game and the copies need the others:
    copies become very slow when every core computes. A second thread on the same core adds little."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // 2)
