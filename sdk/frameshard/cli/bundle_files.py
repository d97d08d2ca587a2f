"""What a bundle is made of, on any platform."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from frameshard.errors import Unsupported

STDLIB_LEFT_OUT = re.compile(
    r"(test|idlelib|tkinter|turtledemo|turtle\.py|ensurepip|lib2to3|pydoc_data|site-packages|dist-packages|config-.*"
    r"|lib-dynload)(/|$)"
)
EXTENSIONS_LEFT_OUT = re.compile(r"_tkinter|_test|_ctypes_test|xx|readline|_curses|_dbm|_gdbm|nis")
GPU_MODULE = "GPU module"
GPU_MODULE_FILE = re.compile(r"frameshard/gpu/(?:lib)?ggml-([a-z]+)\.[a-z]+")
EXTRAS = ("fallback", "http", "top", "vision")
"""The extras of frameshard that a sidecar can use; the others are for developers."""

NOTES_OF_PIP = ("direct_url.json", "INSTALLER", "RECORD", "REQUESTED")
"""Of a .dist-info: where and how a package was installed here. A bundle's Python does not read them."""

TESTS = re.compile(r"(^|/)(tests?|_tests)/")


@dataclass(frozen=True)
class File:
    """One file of the bundle: its source, its path in the bundle, and the part whose size it adds to."""

    source: Path
    target: Path
    part: str


@dataclass(frozen=True)
class Contents:
    """What a bundle for one platform has.

    :param launchers: the texts of its scripts, by their paths in the bundle.
    :param distributions: its Python packages, by name.
    :param licences: the licence texts of its parts that are no packages, by the names of these parts.
    :param python: the version of its interpreter.
    :param system: what it needs to run, for the manifest.
    """

    files: list[File]
    launchers: dict[str, str]
    distributions: dict[str, metadata.Distribution]
    licences: dict[str, list[Path]]
    python: str
    system: Mapping[str, object]


def normal(name: str) -> str:
    """The normalized name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str, source: str = ".") -> metadata.Distribution:
    """
    :param source: what pip should have installed.
    :raises Unsupported: pip has not installed the package here.
    """
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        why = f"{name} is not installed here: a bundle is made of what pip has installed (pip install {source})"
        raise Unsupported(why, package=name) from None


def requirements(distribution: metadata.Distribution, extras: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yields the requirements of a distribution and of some of its extras: the whole line, for an extra without its
    marker, and the package's name."""
    for requirement in distribution.requires or []:
        what, _, marker = requirement.partition(";")
        extra = re.search(r"extra == [\"']([^\"']+)", marker)
        if extra is None or extra[1] in extras:
            match = re.match(r"[A-Za-z0-9._-]+", what.strip())
            assert match is not None, requirement
            yield what.strip() if extra else requirement, match[0]


def package_files(distributions: dict[str, metadata.Distribution]) -> Iterator[File]:
    """The files that pip has installed for each distribution, without scripts, tests, headers and duplicates. Each GPU
    module of frameshard is a part of its own, of a name that begins with :data:`GPU_MODULE`."""
    for name, distribution in distributions.items():
        if distribution.files is None:
            raise Unsupported(f"{name} was not installed by pip: its files are not known", package=name)
        for file in distribution.files:
            top = file.parts[0]
            # llama-cpp-python installs its libraries again under lib/, for programs that compile against it.
            if top.endswith(".dist-info") and file.name in NOTES_OF_PIP:
                continue
            if top not in ("..", "bin", "lib", "include") and file.suffix != ".pyc" and not TESTS.search(str(file)):
                module = GPU_MODULE_FILE.fullmatch(file.as_posix())
                part = f"{GPU_MODULE} {module[1]}" if module else name
                yield File(Path(str(distribution.locate_file(file))), Path("sidecar/packages") / file, part)


def stdlib_files(stdlib: Path, target: Path) -> Iterator[File]:
    """The standard library, without modules that only programs with a user interface import."""
    for path in sorted(stdlib.rglob("*")):
        name = path.relative_to(stdlib).as_posix()
        wanted = not STDLIB_LEFT_OUT.match(name) and not TESTS.search(name)
        if wanted and path.suffix != ".pyc" and path.is_file():
            yield File(path, target / name, "python")


def extension_files(extensions: Iterable[Path], target: Path) -> Iterator[File]:
    """The compiled modules of the standard library, chosen like :func:`stdlib_files`."""
    for path in sorted(extensions):
        if not EXTENSIONS_LEFT_OUT.match(path.name):
            yield File(path, target / path.name, "python")
