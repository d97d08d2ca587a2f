"""The CPU: whether the installed ggml fits it, and how many threads to take.

libggml-cpu is compiled for a fixed set of instructions and does not look at the CPU before it uses them.
``make build`` compiles it for Haswell (native/tools/llama_wheel.py); a llama-cpp-python from elsewhere is often
compiled for the CPU that compiled it. Nothing here executes code of ggml that needs those instructions.
"""

from __future__ import annotations

import os
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
"""ggml's features that a CPU must have, with Linux's names of what they take."""
AMX = "amx_int8"
"""The one feature that ggml looks for on the CPU before it uses it; ggml and Linux call it the same."""


_V3 = frozenset({"avx", "avx2", "bmi2", "f16c", "fma"})
_LEVELS = {"x86-64-v2": frozenset[str](), "x86-64-v3": _V3, "x86-64-v4": _V3 | {"avx512"}}


def flags() -> frozenset[str] | None:
    """What this CPU can do, in the words of Linux; ``None`` where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    names = ("flags", "Features")  # x86, ARM
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(names)), None)


def compiled_for() -> frozenset[str] | None:
    """The features that ggml's CPU part was compiled with, of ``NEEDS`` and ``AMX``. ``None`` where it is not linked to
    llama.cpp: there ggml chooses among several files, each for a kind of CPU."""
    import llama_cpp

    library = llama_cpp.llama_cpp._lib
    if not hasattr(library, "ggml_cpu_has_avx2"):
        return None
    return frozenset(name for name in (*NEEDS, AMX) if library[f"ggml_cpu_has_{name}"]())


def needed_flags(features: Set[str]) -> list[str]:
    """What a CPU must have for a ggml that was compiled with ``features``, in the words of Linux."""
    return sorted(flag for name in features if name in NEEDS for flag in NEEDS[name])


def level(features: Set[str]) -> str | None:
    """The least level of the x86-64 ABI that has all of ``features``, ``None`` if none has; numpy needs the second."""
    return next((name for name, has in _LEVELS.items() if features - {AMX} <= has), None)


def check() -> None:
    """Must come before anything that makes ggml compute or asks for its devices.

    :raises Unsupported: ggml was compiled for instructions that this CPU lacks; it would die by SIGILL.
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
    """Whether models must be loaded without ggml's extra buffer types, of which AMX is one: where ggml was compiled
    with AMX and the CPU has it.

    gcc 12 drops the stores before ``_tile_loadconfig``, so that the first product of a matrix in AMX's buffer type ends
    the process. A library does not tell its compiler, so no AMX is trusted. What is not known is taken for yes.
    """
    return all(where is None or AMX in where for where in (compiled_for(), flags()))


def default_threads() -> int:
    """Half of the logical CPUs that this process may use: the game and the copies need the others, copies collapse when
    every core computes, and SMT siblings add little."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // 2)
