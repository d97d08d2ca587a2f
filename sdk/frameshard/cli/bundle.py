"""``frameshard bundle``: makes a folder that a game can ship, with everything that the sidecar needs.

A bundle has an interpreter, packages and native libraries, and uses only these. It runs from any path and offline. Its
needs are in the manifest: a bundle of ``make build`` needs any x86-64 CPU since Haswell; a bundle for Linux needs a C
library at least as new as that of the machine that made it. A frozen executable was rejected because it needs another
build tool for the same files, and a virtual environment because it contains absolute paths.

::

    DIR/frameshard           the command line; frameshard.cmd on Windows
    DIR/sidecar/python       the value of a binding's option `python`; python.exe on Windows
    DIR/sidecar/...          the interpreter, packages and shared libraries
    DIR/client/              the client libraries that were given; on Linux with the libraries that they need
    DIR/models/              model files, if any were asked for
    DIR/licences/            the licence texts of everything in the bundle
    DIR/manifest.json        requirements, sizes, versions, and the models with their hashes
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import marshal
import os
import platform
import py_compile
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from frameshard.cli import bundle_linux, bundle_windows, common
from frameshard.cli.bundle_files import EXTRAS, Contents, File
from frameshard.errors import BadArgument, ModelNotFound, Unsupported

LINUX, WINDOWS = "linux-x86_64", "windows-x86_64"
LICENCE = re.compile(r"(licen[cs]e|copying|notice|authors)", re.IGNORECASE)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bundle",
        help="lay out what a game ships: the sidecar with all it needs, licences, model hashes",
        description="Lays out the sidecar in DIR, so that it runs from any path on a machine where nothing is "
        "installed: this environment's, for a Linux like this one, or one for Windows. Games launch it as "
        "DIR/sidecar/python (python.exe); DIR/frameshard (frameshard.cmd) is the command line.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to; must be new or empty")
    parser.add_argument(
        "--model", action="append", default=[], metavar="M", help="a model to name in the manifest, with its hash"
    )
    parser.add_argument("--with-models", action="store_true", help="copy the models' files too")
    parser.add_argument(
        "--client",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a client library: libframeshard.so, frameshard.dll",
    )
    parser.add_argument(
        "--with",
        dest="extras",
        action="extend",
        default=[],
        type=_extras,
        metavar="EXTRA,...",
        help=f"optional parts of frameshard to take in: {', '.join(EXTRAS)}",
    )
    parser.add_argument("--platform", choices=[LINUX, WINDOWS], help="whose players (default: of this machine)")
    parser.add_argument(
        "--native", type=Path, metavar="DIR", help=f"for {WINDOWS}: what native/windows/build.sh has built"
    )
    parser.add_argument(
        "--python",
        type=Path,
        metavar="DIR",
        help=f"for {WINDOWS}: a Python for Windows; without it uv downloads a python-build-standalone",
    )
    common.add_json_arg(parser)
    parser.set_defaults(run=run)


def _extras(text: str) -> list[str]:
    extras = text.split(",")
    if unknown := [extra for extra in extras if extra not in EXTRAS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(EXTRAS)}")
    return extras


def run(args: argparse.Namespace) -> int:
    directory: Path = args.directory.absolute()
    try:
        existed = directory.exists()
        if existed and (not directory.is_dir() or any(directory.iterdir())):
            raise BadArgument(f"{directory} is not an empty directory", path=str(directory))
        for library in args.client:
            if not library.is_file():
                raise BadArgument(f"there is no client library {library}", path=str(library))
            with open(library, "rb"):
                pass
    except OSError as error:
        raise BadArgument(f"cannot read {error.filename}: {error.strerror}", path=str(error.filename)) from error
    models = list(dict.fromkeys(_models(args.model)))
    with tempfile.TemporaryDirectory(prefix="frameshard-bundle-") as work:
        contents = _contents(args, Path(work))
        files = list(contents.files)
        if args.with_models:
            files += [File(path, Path("models") / path.name, "models") for path in models]
        texts, silent = _licences(contents)
        files += texts
        _check_targets(files)
        _check_space(directory, files)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _removed_on_failure(directory, keep=existed):
                sizes = _write(directory, files, contents.launchers)
                manifest = _manifest(contents, sizes, models, args.with_models, silent)
                (directory / "manifest.json").write_text(common.to_json(manifest))
        except OSError as error:
            raise BadArgument(f"cannot write {directory}: {error}", path=str(directory)) from error
    if args.json:
        common.emit_json(manifest)
    else:
        _report(directory, sizes, contents, silent)
    return 0


def _contents(args: argparse.Namespace, work: Path) -> Contents:
    """
    :param work: a directory for files of the bundle that are not on this machine yet.
    """
    if args.platform == WINDOWS:
        if args.native is None:
            raise BadArgument(f"--platform {WINDOWS} needs --native", field="native")
        return bundle_windows.contents(args.client, args.extras, args.native, args.python, work)
    for option in ("native", "python"):
        if getattr(args, option) is not None:
            raise BadArgument(f"--{option} is for --platform {WINDOWS}", field=option)
    if args.platform == LINUX and platform.machine() != "x86_64":
        raise Unsupported(f"a bundle for {LINUX} is made on such a machine, and this one is {platform.machine()}")
    return bundle_linux.contents(args.client, args.extras)


def _report(directory: Path, sizes: dict[str, int], contents: Contents, silent: list[str]) -> None:
    for part, size in sizes.items():
        print(f"{part:24}{size / 2**20:8.1f} MiB")
    print(f"{'total':24}{sum(sizes.values()) / 2**20:8.1f} MiB")
    needs = contents.system["cpu"]
    if isinstance(needs, dict) and needs["level"] != "x86-64-v3":
        print(
            f"llama.cpp was compiled for this CPU: the bundle needs {needs['level'] or needs['flags']}; "
            "what `make build` makes needs x86-64-v3, Haswell and later",
            file=sys.stderr,
        )
    for name in silent:
        print(f"no licence text found for {name}: add it to {directory / 'licences'}", file=sys.stderr)


def _models(names: list[str]) -> Iterator[Path]:
    from frameshard import models

    for name in names:
        for part in (name, models.mmproj_of(name)):
            if part is not None:
                for path in models.files_of(models.resolve(part).absolute()):
                    _check_readable(path)
                    yield path


def _check_readable(model: Path) -> None:
    try:
        with open(model, "rb"):
            pass
    except OSError as error:
        raise ModelNotFound(f"cannot read {model}: {error.strerror}", path=str(model)) from error


def _licences(contents: Contents) -> tuple[list[File], list[str]]:
    """The licence texts, and the names of the parts without one on this machine."""
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
    for name, distribution in contents.distributions.items():
        found = [
            Path(str(distribution.locate_file(file)))
            for file in distribution.files or []
            if file.parts[0].endswith(".dist-info") and LICENCE.match(file.name)
        ]
        extra = ours / f"{name}.txt"
        take(name, found + ([extra] if extra.is_file() else []))
    take("llama.cpp", [ours / "llama.cpp.txt"])
    if any(file.part == "client library" for file in contents.files):
        take("libframeshard", [ours / "libframeshard.txt"])
    for name, sources in contents.licences.items():
        take(name, sources)
    return texts, silent


def _check_targets(files: list[File]) -> None:
    """
    :raises BadArgument: two files would have the same path in the bundle.
    """
    sources: dict[Path, Path] = {}
    for file in files:
        other = sources.setdefault(file.target, file.source)
        if os.path.realpath(other) != os.path.realpath(file.source):
            why = f"{other} and {file.source} would both be {file.target} in the bundle: rename one of them"
            raise BadArgument(why, path=str(file.source))


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


def _write(directory: Path, files: list[File], launchers: dict[str, str]) -> dict[str, int]:
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
            if _compile(file, compiled):
                sizes[file.part] += compiled.stat().st_size
    for name, text in launchers.items():
        path = directory / name
        path.write_text(text)
        path.chmod(0o755)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _compile(file: File, compiled: Path) -> bool:
    """Compiles a module to byte code that is valid for any date of the source: installers of games do not keep
    dates. It names the module by its path in the bundle, and nothing of this machine."""
    existing = Path(importlib.util.cache_from_source(str(file.source)))
    text = file.source.read_bytes()
    if existing.is_file():
        code = existing.read_bytes()
        stat = file.source.stat()
        dated = code[4:16] == b"".join(
            value.to_bytes(4, "little") for value in (0, int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF)
        )
        if dated and code[:4] == importlib.util.MAGIC_NUMBER:
            unchecked = (1).to_bytes(4, "little")  # PEP 552: identified by its hash, and never compared with the source
            named = marshal.dumps(_named(marshal.loads(code[16:]), file.target.as_posix()))
            compiled.write_bytes(code[:4] + unchecked + importlib.util.source_hash(text) + named)
            return True
    try:
        py_compile.compile(
            str(file.source),
            cfile=str(compiled),
            dfile=file.target.as_posix(),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except py_compile.PyCompileError:  # the file is a template, or is for another Python
        return False
    return True


def _named(code: CodeType, name: str) -> CodeType:
    """The code, and all code in it, as of the file `name`."""
    inside = tuple(_named(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=inside)


def _manifest(
    contents: Contents,
    sizes: dict[str, int],
    models: list[Path],
    with_models: bool,
    silent: list[str],
) -> dict[str, object]:
    return {
        "frameshard": contents.distributions["frameshard"].version,
        "python": contents.python,
        "system": contents.system,
        "packages": {name: distribution.version for name, distribution in contents.distributions.items()},
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


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelNotFound(f"cannot read {path}: {error.strerror}", path=str(path)) from error
    return digest.hexdigest()
