"""Makes packages of engines, and reads them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "bindings" / "packages"


def make(native: Path, out: Path) -> str:
    """Makes the packages of the libraries in `native`; returns what is printed."""
    command = [sys.executable, str(PACKAGES), "--native", str(native), "--out", str(out)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def files(packages: Path, pattern: str) -> dict[str, bytes]:
    """The files of the one package that matches."""
    (path,) = packages.glob(pattern)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as tarball:
        members = [(member.name, tarball.extractfile(member)) for member in tarball]
        return {name: content.read() for name, content in members if content is not None}
