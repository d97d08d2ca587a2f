"""What `make bindings` has built, and the environment of programs that use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def built() -> Path:
    """Where the C library lies. Only `make bindings` runs what needs it; nothing may be missing then."""
    folder = os.environ.get("FRAMESHARD_BINDINGS")
    if folder is None:
        pytest.skip("`make bindings` runs this one")
    assert (Path(folder) / "libframeshard.so").is_file(), f"the C library has not been built in {folder}"
    return Path(folder)


@pytest.fixture(scope="session")
def program_env(built: Path, model_path: Path, mmproj_path: Path) -> dict[str, str]:
    """Programs find the library, the model and the Python that has frameshard."""
    return {
        **os.environ,
        "FRAMESHARD_LIBRARY": str(built / "libframeshard.so"),
        "LD_LIBRARY_PATH": str(built),  # for Mono
        "FRAMESHARD_MODEL": str(model_path),
        "FRAMESHARD_MMPROJ": str(mmproj_path),
        "FRAMESHARD_PYTHON": sys.executable,
    }
