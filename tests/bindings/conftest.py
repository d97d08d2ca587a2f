"""The files that `make bindings` has built, and the environment for programs that use them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built() -> Path:
    """The directory of the C library. Tests that need it run only in `make bindings`; then it must be complete."""
    folder = os.environ.get("FRAMESHARD_BINDINGS")
    if folder is None:
        pytest.skip("`make bindings` runs this one")
    assert (Path(folder) / "libframeshard.so").is_file(), f"the C library has not been built in {folder}"
    return Path(folder)


@pytest.fixture(scope="session")
def program_env(built: Path, model_path: Path, mmproj_path: Path) -> dict[str, str]:
    """The environment in which programs find the library, the model and a Python with frameshard."""
    return {
        **os.environ,
        "FRAMESHARD_LIBRARY": str(built / "libframeshard.so"),
        "LD_LIBRARY_PATH": str(built),  # for Mono
        "FRAMESHARD_MODEL": str(model_path),
        "FRAMESHARD_MMPROJ": str(mmproj_path),
        "FRAMESHARD_PYTHON": sys.executable,
    }
