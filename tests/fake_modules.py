"""GPU modules without a GPU, compiled from fake_module.c."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEADERS = Path(__file__).parents[1] / "native" / "tools" / "headers.py"
SOURCE = Path(__file__).parent / "fake_module.c"
NAMES = {"cuda": "CUDA", "vulkan": "Vulkan"}

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="needs a C compiler, on Linux"
)


@functools.cache
def _of_ggml() -> tuple[str, ...]:
    """The compiler's options for ggml's headers and its library."""
    told = subprocess.run([sys.executable, str(HEADERS)], capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    return f"-I{found['include']}", f"-I{found['internal']}", f"{found['lib']}/libggml-base.so"


def compile_module(directory: Path, module: str, *broken: str, libraries: tuple[str, ...] = ()) -> None:
    """Makes a GPU module in a directory.

    :param broken: what is wrong with it, as fake_module.c names it.
    :param libraries: the linker's further arguments.
    """
    command = ["cc", "-shared", "-fPIC", "-o", directory / f"libggml-{module}.so", SOURCE]
    command += [f'-DNAME="{NAMES[module]}"', *(f"-D{what}" for what in broken), *_of_ggml(), *libraries]
    subprocess.run(command, check=True)
