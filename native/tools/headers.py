"""Finds what the shard device is compiled against, for LlamaCpp.cmake.

ggml's plugin interface has no stable ABI and its version number is not raised when a struct changes, so the build uses
exactly the pinned llama-cpp-python: public headers and libraries of the installed package, and the internal headers
(ggml-backend-impl.h and its neighbours), which only the sdist of the same version carries. The sdist comes through pip
(so its index and proxy settings hold), its hash is checked by pip, and only the headers are kept, in the user's cache.

Prints a JSON object with ``version``, ``include``, ``lib`` and ``internal``. With ``--source DIR`` it unpacks the
sdist into that new directory instead, for builds for another system.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable

VERSION = "0.3.36"
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INTERNAL = "vendor/llama.cpp/ggml/src/"


def cache_dir() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "frameshard"


def installed() -> tuple[pathlib.Path, pathlib.Path]:
    """Include and library directory of llama-cpp-python, which is not imported: that would load its libraries."""
    try:
        package = importlib.metadata.distribution("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"llama-cpp-python is not installed for {sys.executable}: pip install llama-cpp-python=={VERSION}")
    if package.version != VERSION:
        sys.exit(f"llama-cpp-python {package.version} is installed, but frameshard is built for {VERSION}")
    root = pathlib.Path(str(package.locate_file("")))
    # Some builds drop the headers into site-packages, others keep them in the package.
    include = [p for p in (root / "include", root / "llama_cpp" / "include") if (p / "ggml-backend.h").is_file()]
    if not include:
        sys.exit(f"no ggml headers beside llama-cpp-python in {root}")
    return include[0], root / "llama_cpp" / "lib"


def download(target: pathlib.Path) -> None:
    """The pinned sdist, by pip, into `target`. Its build system is not run for more than its metadata."""
    requirement = target / "sdist.txt"
    requirement.write_text(f"llama-cpp-python=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    command += ["--no-build-isolation", "--dest", str(target), "--requirement", str(requirement)]
    for attempt in (1, 2, 3):
        if subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode == 0:
            return
        print(f"download of llama-cpp-python {VERSION} failed (try {attempt} of 3)", file=sys.stderr)
    sys.exit(1)


def unpack(archive: pathlib.Path, folder: str, target: pathlib.Path, wanted: Callable[[str], bool]) -> None:
    """The files of one folder of the sdist for whose path in that folder `wanted` is true, into `target`."""
    with tarfile.open(archive) as sdist:
        for member in sdist:
            name = member.name.partition("/")[2]
            rest = name[len(folder) :]
            if member.isfile() and name.startswith(folder) and wanted(rest):
                source = sdist.extractfile(member)
                if source is not None:
                    path = target / rest
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with source, open(path, "wb") as copy:
                        shutil.copyfileobj(source, copy)


def from_sdist(final: pathlib.Path, folder: str, wanted: Callable[[str], bool]) -> None:
    """Makes the directory `final` with files of the pinned sdist, as :func:`unpack` does. It appears complete."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".sdist-") as scratch:
        work = pathlib.Path(scratch)
        print(f"taking {folder or 'all'} from the llama-cpp-python {VERSION} sdist", file=sys.stderr)
        download(work)
        made = work / "made"
        unpack(work / f"llama_cpp_python-{VERSION}.tar.gz", folder, made, wanted)
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # else another build was faster
                raise


def internal() -> pathlib.Path:
    """Directory with ggml's internal headers of the pinned version, filled on first use."""
    final = cache_dir() / "headers" / f"{VERSION}-{SDIST_SHA256[:12]}"
    if not final.is_dir():
        from_sdist(final, INTERNAL, lambda path: "/" not in path and path.endswith(".h"))
    return final


if __name__ == "__main__":
    if sys.argv[1:2] == ["--source"]:
        from_sdist(pathlib.Path(sys.argv[2]), "", lambda path: True)  # with .git, from which ggml takes its commit
        sys.exit()
    public, libraries = installed()
    found = {"version": VERSION, "include": str(public), "lib": str(libraries), "internal": str(internal())}
    print(json.dumps(found))
