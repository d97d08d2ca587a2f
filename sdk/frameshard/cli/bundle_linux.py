"""The contents of a bundle for Linux: copies of this environment's interpreter, packages and libraries."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterator
from importlib import metadata
from pathlib import Path

from frameshard import cpu
from frameshard.cli.bundle_files import (
    GPU_MODULE,
    Contents,
    File,
    extension_files,
    installed,
    normal,
    package_files,
    requirements,
    stdlib_files,
)
from frameshard.errors import Unsupported

PYTHON = """\
#!/bin/sh
# This bundle's Python, which uses nothing of the machine's.
here=$(dirname -- "$(readlink -f -- "$0")")
unset FRAMESHARD_DEVICE_LIB FRAMESHARD_GPU_MODULES LLAMA_CPP_LIB_PATH PYTHONSTARTUP
export PYTHONHOME="$here/home" PYTHONPATH="$here/packages"
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/home/bin/python3" "$@"
"""
COMMAND = """\
#!/bin/sh
here=$(dirname -- "$(readlink -f -- "$0")")/sidecar
exec "$here/python" "$here/packages/frameshard/program.py" frameshard "$@"
"""

# Libraries that every Linux with a desktop and a driver has. The machine's own ones must be used.
SYSTEM_LIBRARIES = (
    *("ld-linux", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "libutil.", "libresolv.", "libnsl."),
    *("libgcc_s.", "libstdc++.", "libcuda.", "libnvidia-", "libvulkan."),
)


def contents(clients: list[Path], extras: Collection[str]) -> Contents:
    """
    :param clients: client libraries.
    :param extras: the extras of frameshard to take in.
    :raises Unsupported: this environment lacks something.
    """
    if sys.platform != "linux":
        raise Unsupported("bundles of this environment are made on Linux only")
    distributions = _closure("frameshard", extras)
    files = [*_interpreter(), *package_files(distributions)]
    files += [File(path, Path("client") / path.name, "client library") for path in clients]
    files += _shared_libraries(files)
    libc = platform.libc_ver()
    system: dict[str, object] = {"os": "linux", "machine": platform.machine(), libc[0] or "libc": libc[1]}
    system |= {"cpu": _cpu_needs(), "gpu_modules": _gpu_needs(files)}
    launchers = {"sidecar/python": PYTHON, "frameshard": COMMAND}
    return Contents(files, launchers, distributions, _licences(files), platform.python_version(), system)


def _closure(root: str, extras: Collection[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that `root` and these extras of it need, and `root` itself, by name."""
    found: dict[str, metadata.Distribution] = {}
    source = f"'.[{','.join(extras)}]'" if extras else "."
    wanted = [(root, True)]
    while wanted:
        name, needed = wanted.pop()
        key = normal(name)
        if key in found:
            continue
        try:
            found[key] = installed(name, source)
        except Unsupported:
            if needed:
                raise
            continue  # the requirement is for another system or Python
        used = extras if name == root else ()
        wanted += [(name, ";" not in line) for line, name in requirements(found[key], used)]
    return dict(sorted(found.items()))


def _interpreter() -> Iterator[File]:
    """The interpreter and its standard library, without modules that only programs with a user interface import."""
    home, base = Path("sidecar/home"), Path(sys.base_prefix)
    yield File(Path(os.path.realpath(sys.executable)), home / "bin" / "python3", "python")
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})) / "lib-dynload"
    if not stdlib.is_relative_to(base):
        raise Unsupported(f"this Python keeps its library outside of its home: {stdlib}", path=str(stdlib))
    yield from stdlib_files(stdlib, home / stdlib.relative_to(base))
    yield from extension_files(extensions.glob("*.so"), home / extensions.relative_to(base))


def _shared_libraries(files: list[File]) -> Iterator[File]:
    """The libraries of this machine that files of the bundle are linked with, as found by `ldd`. Those that only a GPU
    module needs are of its part."""
    inside = {os.path.realpath(file.source) for file in files}
    seen: set[tuple[str, str]] = set()
    by_part: dict[str, list[str]] = {"shared libraries": []}
    for file in files:
        if file.target.parts[0] in ("sidecar", "client") and _is_elf(file.source):
            own = file.part.startswith(GPU_MODULE) or file.target.parts[0] == "client"
            by_part.setdefault(file.part if own else "shared libraries", []).append(str(file.source))
    for part, binaries in by_part.items():
        top = "client" if part == "client library" else "sidecar"
        for name, path in _linked_with(binaries):
            if name.startswith(SYSTEM_LIBRARIES) or os.path.realpath(path) in inside or (top, name) in seen:
                continue
            seen.add((top, name))
            yield File(Path(path), Path("sidecar/lib" if top == "sidecar" else "client") / name, part)


def _linked_with(binaries: list[str]) -> list[tuple[str, str]]:
    """The names and the paths of the libraries that binaries are linked with."""
    if not binaries:
        return []
    try:
        told = subprocess.run(["ldd", *binaries], capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise Unsupported("this system has no ldd, which tells what libraries a bundle needs") from None
    return re.findall(r"^\s*(\S+) => (/.+?)(?: \(0x[0-9a-f]+\))?$", told, flags=re.MULTILINE)


def _is_elf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _licences(files: list[File]) -> dict[str, list[Path]]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    python = [path for path in (stdlib / "LICENSE.txt",) if path.is_file()]
    foreign = {
        file.target.name.partition(".so")[0]: file.source
        for file in files
        if file.target.parent in (Path("sidecar/lib"), Path("client"))
        and not file.target.name.startswith("libframeshard")
    }
    copyrights = _debian_copyrights([stdlib / "os.py", *foreign.values()])
    texts = {"python": python + copyrights.get(stdlib / "os.py", [])}
    for name, source in foreign.items():
        texts[name] = python if name.startswith("libpython") and python else copyrights.get(source, [])
    return texts


def _debian_copyrights(paths: list[Path]) -> dict[Path, list[Path]]:
    """The copyright files of the Debian packages that the files belong to."""
    # A package may name its files under /lib or under /usr/lib, because /lib has become a link to /usr/lib.
    names: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        names |= {str(path): path, real: path, real.removeprefix("/usr"): path}
    if shutil.which("dpkg-query") is None:
        return {}
    told = subprocess.run(["dpkg-query", "--search", *names], capture_output=True, text=True).stdout
    found: dict[Path, list[Path]] = {}
    for line in told.splitlines():
        packages, _, name = line.partition(": ")
        copyright = Path("/usr/share/doc", re.split(r"[:,]", packages)[0], "copyright")
        if name in names and copyright.is_file():
            found[names[name]] = [copyright]
    return found


def _gpu_needs(files: list[File]) -> dict[str, object]:
    """What each GPU module needs of a machine, as its build has noted it. Its CPU code is for any x86-64."""
    notes = [file for file in files if file.part.startswith(GPU_MODULE) and file.source.suffix == ".json"]
    return {file.part.removeprefix(f"{GPU_MODULE} "): json.loads(file.source.read_text()) for file in notes}


def _cpu_needs() -> dict[str, object] | None:
    """The CPU features that ggml was compiled for, which include those that other parts need; ``None`` if unknown."""
    features = cpu.compiled_for()
    return None if features is None or platform.machine() != "x86_64" else cpu.described(features)
