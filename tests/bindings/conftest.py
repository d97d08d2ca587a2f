"""The files that `make bindings` has built, and the environment for programs that use them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import engine_packages
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


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries: the real one for Linux if `make bindings` has built it; others are stand-ins."""
    folder = tmp_path_factory.mktemp("native")
    built = os.environ.get("FRAMESHARD_BINDINGS")
    linux = ["linux-x86_64/libframeshard.so", "linux-x86_64/libframeshard_godot.so"]
    windows = [f"windows-x86_64/{name}" for name in ("frameshard.dll", "libframeshard.dll.a", "frameshard_godot.dll")]
    for name in (*linux, *windows, "licences/libzmq.txt"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if built and path.suffix == ".so":
            shutil.copyfile(next(Path(built).rglob(path.name)), path)
        else:
            path.write_text(f"stands for {name}")
    return folder


@pytest.fixture(scope="session")
def packages(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    engine_packages.make(native, folder)
    return folder
