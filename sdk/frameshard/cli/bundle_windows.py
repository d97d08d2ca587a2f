"""The contents of a bundle for Windows. They are gathered on any system: the shard device and llama.cpp from where they
were built for Windows, an interpreter and packages by uv.

The interpreter gets a ``._pth`` file, with which it takes no path from the environment or from the registry.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib import metadata, util
from pathlib import Path

from frameshard import cpu, ggml, models
from frameshard.cli.bundle_files import (
    Contents,
    File,
    extension_files,
    installed,
    normal,
    package_files,
    requirements,
    stdlib_files,
)
from frameshard.errors import BadArgument, DownloadFailed, Unsupported

COMMAND = """\
@"%~dp0sidecar\\python.exe" "%~dp0sidecar\\packages\\frameshard\\program.py" frameshard %*\r
"""
VERSION = "{}.{}".format(*sys.version_info)
"""Of the interpreter in the bundle: that of this one, which compiles the modules."""

STEM = "python{}{}".format(*sys.version_info)
"""The name of the interpreter's files."""

HERE = ("frameshard", "llama-cpp-python")
"""The packages that are copied from this environment, without what was compiled for it."""

PROGRAMS = re.compile(r"(python.*\.(exe|dll|zip)|vcruntime.*\.dll|lib(ffi|crypto|ssl).*\.dll|sqlite3\.dll|.*\.pyd)")


def contents(clients: list[Path], extras: Collection[str], native: Path, python: Path | None, work: Path) -> Contents:
    """
    :param clients: client libraries, each with the libraries that it needs.
    :param extras: the extras of frameshard to take in.
    :param native: where native/windows/build.sh has built.
    :param python: an interpreter for Windows; None: uv downloads one.
    :param work: an empty directory, into which the packages are downloaded.
    :raises BadArgument: a directory lacks something.
    :raises Unsupported: uv is not installed.
    :raises DownloadFailed: uv could not download something.
    """
    libraries, needs = _native(native), _cpu_needs(native)
    python = _downloaded_python() if python is None else python
    interpreter = list(_interpreter(python))
    ours = {name: installed(name) for name in HERE}
    theirs = _downloaded_packages(ours, extras, work)
    files = [*interpreter, *libraries]
    for_linux = re.compile(rf".*\.so|{re.escape(ggml.LAYER_FILE)}")
    files += [file for file in package_files(ours) if not for_linux.fullmatch(file.source.name) and file.part in ours]
    files += package_files(theirs)
    files += [File(path, Path("client") / path.name, "client library") for path in clients]
    paths = f"{STEM}.zip\nLib\nDLLs\npackages\n"
    launchers = {f"sidecar/{STEM}._pth": paths, "frameshard.cmd": COMMAND}
    licences = {"python": sorted(python.glob("LICENSE*"))}
    for text in sorted((native / "llama" / "licences").glob("*.txt")):
        licences[text.stem] = [text]
    system = {"os": "windows", "machine": "x86_64", "cpu": needs}
    return Contents(files, launchers, dict(sorted({**ours, **theirs}.items())), licences, VERSION, system)


def _native(native: Path) -> list[File]:
    """The shard device, and llama.cpp's libraries with those of the compiler."""
    device, layer = (native / "device" / name for name in ("frameshard_device.dll", ggml.LAYER_FILE))
    libraries = sorted((native / "llama" / "bin").glob("*.dll"))
    if not device.is_file() or not layer.is_file() or not libraries:
        raise BadArgument(
            f"{native} has no device/frameshard_device.dll or no llama/bin/*.dll: native/windows/build.sh makes them",
            field="native",
        )
    packages = Path("sidecar/packages")
    files = [File(path, packages / "frameshard" / path.name, "frameshard") for path in (device, layer)]
    return files + [File(path, packages / "llama_cpp" / "lib" / path.name, "llama-cpp-python") for path in libraries]


def _cpu_needs(native: Path) -> dict[str, object] | None:
    """What ggml was compiled for, by the options of its build; ``None`` if unknown."""
    try:
        options = (native / "llama-build" / "CMakeCache.txt").read_text()
    except OSError:
        return None
    on = {name.lower() for name in re.findall(r"^GGML_(\w+):BOOL=ON$", options, flags=re.MULTILINE)}
    return None if "native" in on else cpu.described(on & {*cpu.NEEDS, cpu.AMX})


def _interpreter(python: Path) -> Iterator[File]:
    """The interpreter and its standard library: python.org's embeddable package or python-build-standalone."""
    if not (python / f"{STEM}.dll").is_file() or not (python / "python.exe").is_file():
        raise BadArgument(
            f"{python} is no Python {VERSION} for Windows: python.exe or its DLL is missing", field="python"
        )
    home = Path("sidecar")
    for directory in ("", "DLLs"):
        programs = (path for path in (python / directory).glob("*") if PROGRAMS.fullmatch(path.name))
        yield from extension_files(programs, home / directory)
    yield from stdlib_files(python / "Lib", home / "Lib")


def _downloaded_python() -> Path:
    """A python-build-standalone in the cache, whose hash uv knows."""
    cache = models.cache_dir() / "python"
    pattern = f"cpython-{VERSION}.*-windows-x86_64-none"
    if not list(cache.glob(pattern)):
        _uv("python", "install", f"cpython-{VERSION}-windows-x86_64-none", "--no-bin", "--install-dir", str(cache))
    return max(cache.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _downloaded_packages(
    ours: dict[str, metadata.Distribution], extras: Collection[str], work: Path
) -> dict[str, metadata.Distribution]:
    """The packages that `ours` and these extras of frameshard need on Windows, by name."""
    needs = [need for key, each in ours.items() for need in requirements(each, extras if key == "frameshard" else ())]
    wanted = [line for line, name in needs if name not in ours]
    uses = ("--python", sys.executable, "--python-platform", "x86_64-pc-windows-msvc", "--python-version", VERSION)
    _uv("pip", "install", "--only-binary", ":all:", *uses, "--target", str(work), *wanted)
    return {normal(each.metadata["Name"]): each for each in metadata.distributions(path=[str(work)])}


def _uv(*arguments: str) -> None:
    """Runs uv, which shows its progress and says what is wrong on standard error."""
    if util.find_spec("uv") is None:
        raise Unsupported("a bundle for Windows needs uv: pip install 'frameshard[bundle]'", package="uv")
    status = subprocess.run([sys.executable, "-m", "uv", *arguments, "--no-config"], stdout=sys.stderr).returncode
    if status:
        raise DownloadFailed(f"uv {' '.join(arguments[:2])} ended with status {status}: its output says why")
