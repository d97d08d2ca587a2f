"""``frameshard bundle``: makes a folder that a game can ship, with everything that the sidecar needs.

A bundle has copies of this environment's interpreter and packages, and a launcher that uses only these. It runs from
any path and offline. It needs Linux with a C library at least as new as this machine's, and a CPU with the features in
the manifest: any x86-64 since Haswell, if ``make build`` made the environment. A frozen executable was rejected because
it needs another build tool for the same files, and a virtual environment because it contains absolute paths.

::

    DIR/frameshard           the command line
    DIR/sidecar/python       the value of a binding's option `python`
    DIR/sidecar/...          the interpreter, packages and shared libraries
    DIR/client/              libframeshard and its libraries, if it was given
    DIR/models/              model files, if any were asked for
    DIR/licences/            the licence texts of everything in the bundle
    DIR/manifest.json        requirements, sizes, versions, and the models with their hashes
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from frameshard import cpu
from frameshard.cli import common
from frameshard.errors import BadArgument, ModelNotFound, Unsupported

PYTHON = """\
#!/bin/sh
# This bundle's Python, which uses nothing of the machine's.
here=$(dirname -- "$(readlink -f -- "$0")")
unset FRAMESHARD_DEVICE_LIB LLAMA_CPP_LIB_PATH PYTHONSTARTUP
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
STDLIB_LEFT_OUT = re.compile(
    r"(test|idlelib|tkinter|turtledemo|turtle\.py|ensurepip|lib2to3|pydoc_data|site-packages|dist-packages|config-.*"
    r"|lib-dynload)(/|$)"
)
EXTENSIONS_LEFT_OUT = re.compile(r"_tkinter|_test|_ctypes_test|xx|readline|_curses|_dbm|_gdbm|nis")
TESTS = re.compile(r"(^|/)(tests?|_tests)/")
LICENCE = re.compile(r"(licen[cs]e|copying|notice|authors)", re.IGNORECASE)


@dataclass(frozen=True)
class File:
    """One file of the bundle: its source, its path in the bundle, and the part whose size it adds to."""

    source: Path
    target: Path
    part: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bundle",
        help="lay out what a game ships: the sidecar with all it needs, licences, model hashes",
        description="Copies this environment's sidecar into DIR, so that it runs from any path on a Linux like this "
        "one where nothing is installed. Games launch it as DIR/sidecar/python; DIR/frameshard is the command line.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to; must be new or empty")
    parser.add_argument(
        "--model", action="append", default=[], metavar="M", help="a model to name in the manifest, with its hash"
    )
    parser.add_argument("--with-models", action="store_true", help="copy the models' files too")
    parser.add_argument(
        "--client", action="append", default=[], type=Path, metavar="FILE", help="a client library: libframeshard.so"
    )
    common.add_json_arg(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise Unsupported("bundles are made on Linux only, for Linux")
    directory: Path = args.directory.absolute()
    existed = directory.exists()
    if existed and (not directory.is_dir() or any(directory.iterdir())):
        raise BadArgument(f"{directory} is not an empty directory", path=str(directory))
    models = list(_models(args.model))
    distributions = _closure("frameshard")
    files = [*_interpreter(), *_packages(distributions)]
    if args.with_models:
        files += [File(path, Path("models") / path.name, "models") for path in models]
    for library in args.client:
        if not library.is_file():
            raise BadArgument(f"there is no client library {library}", path=str(library))
        files.append(File(library, Path("client") / library.name, "client library"))
    files += _shared_libraries(files)
    texts, silent = _licences(distributions, files)
    files += texts
    _check_space(directory, files)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _removed_on_failure(directory, keep=existed):
            sizes = _write(directory, files)
            manifest = _manifest(distributions, sizes, models, args.with_models, silent)
            (directory / "manifest.json").write_text(common.to_json(manifest))
    except OSError as error:
        raise BadArgument(f"cannot write {directory}: {error.strerror}", path=str(directory)) from error
    if args.json:
        common.emit_json(manifest)
        return 0
    for part, size in sizes.items():
        print(f"{part:24}{size / 2**20:8.1f} MiB")
    print(f"{'total':24}{sum(sizes.values()) / 2**20:8.1f} MiB")
    needs = _cpu_needs()
    if needs and needs["level"] != "x86-64-v3":
        print(
            f"llama-cpp-python was compiled for this CPU: the bundle needs {needs['level'] or needs['flags']}; "
            "what `make build` makes needs x86-64-v3, Haswell and later",
            file=sys.stderr,
        )
    for name in silent:
        print(f"no licence text found for {name}: add it to {directory / 'licences'}", file=sys.stderr)
    return 0


def _models(names: list[str]) -> Iterator[Path]:
    from frameshard import models

    for name in names:
        yield from models.files_of(models.resolve(name).absolute())


def _closure(root: str) -> dict[str, metadata.Distribution]:
    """The installed distributions that `root` needs, and `root` itself, by name."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [(root, True)]
    while wanted:
        name, needed = wanted.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if needed:
                why = f"{name} is not installed here: a bundle is made of what pip has installed (pip install .)"
                raise Unsupported(why, package=name) from None
            continue  # the requirement is for another system or Python
        found[key] = distribution
        for requirement in distribution.requires or []:
            what, _, marker = requirement.partition(";")
            if "extra" not in marker:
                match = re.match(r"[A-Za-z0-9._-]+", what.strip())
                assert match is not None, requirement
                wanted.append((match[0], not marker))
    return dict(sorted(found.items()))


def _interpreter() -> Iterator[File]:
    """The interpreter and its standard library, without modules that only programs with a user interface import."""
    home, base = Path("sidecar/home"), Path(sys.base_prefix)
    yield File(Path(os.path.realpath(sys.executable)), home / "bin" / "python3", "python")
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix})) / "lib-dynload"
    if not stdlib.is_relative_to(base):
        raise Unsupported(f"this Python keeps its library outside of its home: {stdlib}", path=str(stdlib))
    for path in _files(stdlib):
        name = path.relative_to(stdlib).as_posix()
        if not STDLIB_LEFT_OUT.match(name) and not TESTS.search(name):
            yield File(path, home / path.relative_to(base), "python")
    for path in sorted(extensions.glob("*.so")):
        if not EXTENSIONS_LEFT_OUT.match(path.name):
            yield File(path, home / extensions.relative_to(base) / path.name, "python")


def _packages(distributions: dict[str, metadata.Distribution]) -> Iterator[File]:
    """The files that pip has installed for each distribution, without scripts, tests, headers and duplicates."""
    for name, distribution in distributions.items():
        if distribution.files is None:
            raise Unsupported(f"{name} was not installed by pip: its files are not known", package=name)
        for file in distribution.files:
            top = file.parts[0]
            # llama-cpp-python installs its libraries again under lib/, for programs that compile against it.
            if top not in ("..", "bin", "lib", "include") and file.suffix != ".pyc" and not TESTS.search(str(file)):
                yield File(Path(str(distribution.locate_file(file))), Path("sidecar/packages") / file, name)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")


def _shared_libraries(files: list[File]) -> Iterator[File]:
    """The libraries of this machine that files of the bundle are linked with, as found by `ldd`."""
    inside = {os.path.realpath(file.source) for file in files}
    seen: set[tuple[str, str]] = set()
    for part in ("sidecar", "client"):
        binaries = [str(f.source) for f in files if f.target.parts[0] == part and _is_elf(f.source)]
        if not binaries:
            continue
        try:
            told = subprocess.run(["ldd", *binaries], capture_output=True, text=True).stdout
        except FileNotFoundError:
            raise Unsupported("this system has no ldd, which tells what libraries a bundle needs") from None
        for name, path in re.findall(r"^\s*(\S+) => (/\S+)", told, flags=re.MULTILINE):
            if name.startswith(SYSTEM_LIBRARIES) or os.path.realpath(path) in inside or (part, name) in seen:
                continue
            seen.add((part, name))
            place = Path("sidecar/lib" if part == "sidecar" else "client")
            yield File(Path(path), place / name, "shared libraries" if part == "sidecar" else "client library")


def _is_elf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def _licences(distributions: dict[str, metadata.Distribution], files: list[File]) -> tuple[list[File], list[str]]:
    """The licence texts, and the names of packages without one on this machine."""
    texts: list[File] = []
    silent: list[str] = []

    def take(name: str, sources: list[Path]) -> None:
        for source in sources:
            *above, last = source.parts
            tail = above[above.index("licenses") + 1 :] if "licenses" in above else []
            texts.append(File(source, Path("licences", name, *tail, last), "licences"))
        if not sources:
            silent.append(name)

    ours = Path(__file__).parents[1] / "licences"
    for name, distribution in distributions.items():
        found = [
            Path(str(distribution.locate_file(file)))
            for file in distribution.files or []
            if file.parts[0].endswith(".dist-info") and LICENCE.match(file.name)
        ]
        extra = ours / f"{name}.txt"
        take(name, found + ([extra] if extra.is_file() else []))
    take("llama.cpp", [ours / "llama.cpp.txt"])
    if any(file.part == "client library" for file in files):
        take("libframeshard", [ours / "libframeshard.txt"])
    stdlib = Path(sysconfig.get_path("stdlib"))
    python = [path for path in (stdlib / "LICENSE.txt",) if path.is_file()]
    foreign = {
        file.target.name.partition(".so")[0]: file.source
        for file in files
        if file.target.parent in (Path("sidecar/lib"), Path("client"))
        and not file.target.name.startswith("libframeshard")
    }
    copyrights = _debian_copyrights([stdlib / "os.py", *foreign.values()])
    take("python", python + copyrights.get(stdlib / "os.py", []))
    for name, source in foreign.items():
        take(name, python if name.startswith("libpython") and python else copyrights.get(source, []))
    return texts, silent


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


def _check_space(directory: Path, files: list[File]) -> None:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    needed = sum(file.source.stat().st_size for file in files)
    free = shutil.disk_usage(there).free
    if needed > free:
        why = f"{directory} needs {common.format_size(needed)}, of which {common.format_size(free)} are free"
        raise BadArgument(why, path=str(directory), needed_bytes=needed, free_bytes=free)


@contextlib.contextmanager
def _removed_on_failure(directory: Path, *, keep: bool) -> Iterator[None]:
    """Removes the directory if the block fails, so that no incomplete bundle is left."""
    try:
        yield
    except BaseException:
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if not keep:
            directory.rmdir()
        raise


def _write(directory: Path, files: list[File]) -> dict[str, int]:
    """Copies all files.

    :returns: the bytes of each part, largest first.
    """
    sizes: dict[str, int] = {}
    made: set[Path] = set()
    for file in files:
        target = directory / file.target
        if target.parent not in made:
            target.parent.mkdir(parents=True, exist_ok=True)
            made.add(target.parent)
        shutil.copyfile(file.source, target)
        shutil.copymode(file.source, target)
        sizes[file.part] = sizes.get(file.part, 0) + target.stat().st_size
        if target.suffix == ".py":
            compiled = Path(importlib.util.cache_from_source(str(target)))
            if compiled.parent not in made:
                compiled.parent.mkdir(exist_ok=True)
                made.add(compiled.parent)
            if _compile(file.source, target, compiled):
                sizes[file.part] += compiled.stat().st_size
    for name, text in (("sidecar/python", PYTHON), ("frameshard", COMMAND)):
        path = directory / name
        path.write_text(text)
        path.chmod(0o755)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _compile(source: Path, target: Path, compiled: Path) -> bool:
    """Compiles a module to byte code that is valid for any date of the source: installers of games do not keep
    dates."""
    existing = Path(importlib.util.cache_from_source(str(source)))
    text = source.read_bytes()
    if existing.is_file():
        code = existing.read_bytes()
        stat = source.stat()
        dated = code[4:16] == b"".join(
            value.to_bytes(4, "little") for value in (0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF)
        )
        if dated and code[:4] == importlib.util.MAGIC_NUMBER:
            unchecked = (1).to_bytes(4, "little")  # PEP 552: identified by its hash, and never compared with the source
            compiled.write_bytes(code[:4] + unchecked + importlib.util.source_hash(text) + code[16:])
            return True
    try:
        py_compile.compile(
            str(source),
            cfile=str(compiled),
            dfile=str(target),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except py_compile.PyCompileError:  # the file is a template, or is for another Python
        return False
    return True


def _manifest(
    distributions: dict[str, metadata.Distribution],
    sizes: dict[str, int],
    models: list[Path],
    with_models: bool,
    silent: list[str],
) -> dict[str, object]:
    libc = platform.libc_ver()
    return {
        "frameshard": distributions["frameshard"].version,
        "python": platform.python_version(),
        "system": {"os": "linux", "machine": platform.machine(), libc[0] or "libc": libc[1], "cpu": _cpu_needs()},
        "packages": {name: distribution.version for name, distribution in distributions.items()},
        "bytes": sizes,
        "total_bytes": sum(sizes.values()),
        "models": [
            {
                "file": path.name,
                "path": f"models/{path.name}" if with_models else None,
                "bytes": path.stat().st_size,
                "sha256": _sha256(path),
            }
            for path in models
        ],
        "without_licence_text": silent,
    }


def _cpu_needs() -> dict[str, object] | None:
    """The CPU features that ggml was compiled for, which include those that other parts need; ``None`` if unknown."""
    features = cpu.compiled_for()
    if features is None or platform.machine() != "x86_64":
        return None
    return {"level": cpu.level(features), "flags": cpu.needed_flags(features)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    return digest.hexdigest()
