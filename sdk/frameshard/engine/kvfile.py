"""The KV cache of a conversation in a file, so that a game which loads a save need not read the text again.

llama.cpp trusts the cells that it is given: wrong lengths would make it read beyond their end. So a file is used only
if each value of its header is that of the running engine, its sizes are those of the file, and its checksum over all
bytes is right. The checksum finds damage, not forgery: a program that may write the file is trusted.

    magic, format, bytes of the header | header | tokens, int32 | shapes, 3 x int32 | cells | SHA-256 of all before
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Annotated, BinaryIO

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import ggml
from frameshard.engine.adapters import AdapterSet
from frameshard.engine.kvstore import Blob
from frameshard.engine.link import BrokerGone
from frameshard.engine.llama import Memory
from frameshard.engine.onethread import one_thread
from frameshard.engine.reuse import Reuse
from frameshard.engine.runtime import STOCK, Runtime
from frameshard.engine.sequences import pack_shapes
from frameshard.errors import BadMessage, internal
from frameshard.native import INTERFACE_VERSION
from frameshard.records import record
from frameshard.wire import checks, codec
from frameshard.wire import engine as em
from frameshard.wire import messages as m
from frameshard.wire.checks import Bytes, Count, Tokens

logger = logging.getLogger("frameshard.engine")

_START = struct.Struct("<4sII")
_MAGIC, _FORMAT = b"FSKV", 3
_MAX_HEADER = 4096
_SHA_BYTES = 32
_READ_BYTES = 1 << 20


class Unusable(Exception):
    """The file cannot be used. ``str()`` says why."""


@record
class UsedAdapter:
    """An adapter with which cells were computed.

    :param fingerprint: that of its file.
    """

    adapter: m.Adapter
    fingerprint: Annotated[str, checks.text(64)]


@record
class _Header:
    """:param engine: what must be equal, so that the cells are those that this engine would compute."""

    engine: Mapping[str, str]
    adapters: Annotated[tuple[UsedAdapter, ...], m.MAX_JOB_ADAPTERS]
    n_tokens: Tokens
    n_shapes: Count
    cell_bytes: Bytes

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of the tokens, the shapes and the cells."""
        return 4 * self.n_tokens, 12 * self.n_shapes, self.cell_bytes


def identity(runtime: Runtime) -> dict[str, str]:
    """Returns what the cells of a file depend on besides the text."""
    gpu = ggml.gpu_handles().get(runtime.device_name.removeprefix(STOCK))
    depends = {
        "model": runtime.model_info.fingerprint,
        "kv_type": runtime.config.kv_type,
        "device": runtime.device_name,
        "mode": runtime.mode,
        "llama_cpp": llama_cpp.__version__,
        "frameshard": str(INTERFACE_VERSION),
        "gpu": "" if gpu is None else ggml.description(gpu),
        "rope_factors": runtime.model_info.rope_factors(runtime.n_ctx_seq),
        "n_parallel": str(runtime.config.n_parallel),  # llama.cpp refuses the cells of another number of sequences
    }
    # What an engine does not have is left out, so that its earlier files can still be read.
    return {name: value for name, value in depends.items() if value}


def create(path: str, part: str) -> BinaryIO:
    """Returns the new file `part`, from which :func:`write` makes the one at `path`. Only this user can read it.

    :raises OSError: it cannot be made, or what is at `path` is no file.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = os.lstat(path).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            raise FileExistsError(errno.EEXIST, "a directory, a device or a pipe is there")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return open(part, "wb", opener=lambda name, _: os.open(name, flags, 0o600))


def write(path: str, engine: Mapping[str, str], blob: Blob, part: BinaryIO) -> int:
    """Writes a blob to a file, which appears when it is whole, in the place of an earlier one or of a link.

    :param part: the file until then, from :func:`create`. It is closed.
    :returns: the bytes of the file.
    :raises OSError: it cannot be written. Nothing is left.
    """
    try:
        tokens = np.array(blob.tokens, "<i4")
        shapes = np.array(pack_shapes(blob.shapes), "<i4").reshape(-1, 3)
        header = codec.encode(
            {
                "engine": dict(engine),
                "adapters": [
                    {"adapter": {"name": each.name, "scale": scale}, "fingerprint": each.file.fingerprint}
                    for each, scale in blob.adapters
                ],
                "n_tokens": len(tokens),
                "n_shapes": len(shapes),
                "cell_bytes": blob.data.nbytes,
            }
        )
        checksum, n_bytes = hashlib.sha256(), 0
        start = _START.pack(_MAGIC, _FORMAT, len(header)) + header
        for piece in (start, tokens.tobytes(), shapes.tobytes(), blob.data.data):
            part.write(piece)
            checksum.update(piece)
            n_bytes += len(piece)
        part.write(checksum.digest())
        part.close()
        os.replace(part.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.close()  # Windows does not remove an open file
        with contextlib.suppress(OSError):
            os.unlink(part.name)
        raise
    return n_bytes + _SHA_BYTES


@record
class Content:
    """What is in a file.

    :param blob: the cells. It belongs to no conversation, and its adapters are missing.
    """

    blob: Blob
    adapters: tuple[UsedAdapter, ...]
    file_bytes: int


def read(path: str, engine: Mapping[str, str], *, most_tokens: int, most_bytes: int, memory: Memory) -> Content:
    """Reads a file that :func:`write` has written. The file may hold any bytes.

    :param most_tokens: the context of a sequence.
    :param most_bytes: the limit of the KV store.
    :param memory: gives host memory for the cells.
    :raises Unusable: it cannot be read, is damaged or too large, or is of another engine.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unusable("it is no file")
            return _read(file, status.st_size, engine, most_tokens, most_bytes, memory)
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from None
    except MemoryError:
        raise Unusable("there is no host memory for it") from None


def _read(
    file: BinaryIO, n_bytes: int, engine: Mapping[str, str], most_tokens: int, most_bytes: int, memory: Memory
) -> Content:
    checksum = hashlib.sha256()
    header = _read_header(file, checksum)
    if n_bytes != file.tell() + sum(header.sizes) + _SHA_BYTES:
        raise Unusable("it is damaged: its size is wrong")
    if header.n_shapes > header.n_tokens:
        raise Unusable("it is damaged: its numbers are wrong")
    for name, value in engine.items():
        unknown = value if name == "n_parallel" else None  # earlier versions did not write it
        if header.engine.get(name, unknown) != value:
            raise Unusable(f"it is of another engine: {name} is {header.engine.get(name)}, not {value}")
    if header.n_tokens > most_tokens:
        raise Unusable(f"it has {header.n_tokens} tokens, more than the context of {most_tokens}")
    if header.cell_bytes > most_bytes:
        raise Unusable(f"it has {header.cell_bytes} bytes, more than the KV store of {most_bytes}")
    n_tokens, n_shapes, n_cells = header.sizes
    tokens = _read_array(file, np.empty(n_tokens, np.uint8), checksum)
    shapes = _read_array(file, np.empty(n_shapes, np.uint8), checksum)
    data = _read_array(file, memory(n_cells), checksum)
    if file.read(_SHA_BYTES) != checksum.digest():
        raise Unusable("it is damaged: its checksum is wrong")
    packed = shapes.view("<i4").reshape(-1, 3).tolist()
    blob = Blob(
        tokens=tokens.view("<i4").tolist(),
        shapes=[(kept, decoded) for kept, decoded, count in packed for _ in range(count)],
        data=data,
    )
    return Content(blob, header.adapters, n_bytes)


def _read_header(file: BinaryIO, checksum: hashlib._Hash) -> _Header:
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(_MAGIC):
        raise Unusable("it holds no KV cache")
    _, number, n_bytes = _START.unpack(start)
    if number != _FORMAT:
        raise Unusable(f"its format is {number}, not {_FORMAT}")
    if n_bytes > _MAX_HEADER:
        raise Unusable("it is damaged: its header is too large")
    body = file.read(n_bytes)
    checksum.update(start + body)
    try:
        return checks.convert(_Header, codec.decode(body))
    except (BadMessage, checks.Refused) as error:
        raise Unusable(f"it is damaged: {error}") from None


def _read_array(file: BinaryIO, array: npt.NDArray[np.uint8], checksum: hashlib._Hash) -> npt.NDArray[np.uint8]:
    """Fills an array from the file, which is known to have so many bytes, unless it is changed meanwhile."""
    view = array.data
    for at in range(0, array.nbytes, _READ_BYTES):
        piece = view[at : at + _READ_BYTES]
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise Unusable("it was changed while it was read")
        checksum.update(piece)
    return array


class KvFiles:
    """Carries out the broker's commands about files. A thread of its own writes and reads them, so that jobs go on.

    :param reuse: where the cells are.
    :param send: sends an answer; any thread may call it.
    :param post: has the main thread call a function.
    """

    def __init__(
        self,
        runtime: Runtime,
        reuse: Reuse,
        send: Callable[[em.Event], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._runtime = runtime
        self._reuse = reuse
        self._send = send
        self._post = post
        self._engine = identity(runtime)
        self._thread = one_thread("kv files")
        self._lock = threading.Lock()
        self._work: list[Future[None]] = []
        self._part: BinaryIO | None = None
        """The file that is being written."""
        self._closed = False

    def close(self, timeout_s: float) -> None:
        """Waits for the file that is being written. If that takes too long, nothing is left of it. Ends the rest."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([each for each in self._work if not each.done()], timeout_s)
        with self._lock:
            self._closed = True
            if self._part is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._part.name)

    def save(self, command: em.SaveKv, *, parked: bool) -> None:
        """[main thread] Copies the cells, and has them written."""
        blob = None if parked else self._reuse.copy_of(command.conversation)
        if blob is not None:
            self._start(self._write, command, blob)
        elif parked:
            self._refuse(command, "the sidecar is parked")
        else:
            self._refuse(command, "there is none of this conversation that could be copied")

    def load(self, command: em.LoadKv) -> None:
        """[main thread] Has the file read, and then puts its cells into the store."""
        self._start(self._read, command)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # closed: the engine ends
            self._work = [*(each for each in self._work if not each.done()), self._thread.submit(work, *given)]

    def _write(self, command: em.SaveKv, blob: Blob) -> None:
        try:
            with self._lock:
                if self._closed:
                    return
                self._part = create(command.path, command.part)
            n_bytes = write(command.path, self._engine, blob, self._part)
            self._answer(em.Kv(command.seq, len(blob.tokens), n_bytes))
        except OSError as error:
            self._refuse(command, f"the file cannot be written: {error.strerror}")
        except Exception as error:
            self._refuse(command, internal(logger, "writing a KV cache", error).message)
        finally:
            self._part = None

    def _read(self, command: em.LoadKv) -> None:
        try:
            store = self._reuse.store
            content = read(
                command.path,
                self._engine,
                most_tokens=self._runtime.n_ctx_seq,
                most_bytes=store.limit_bytes,
                memory=store.memory,
            )
            self._post(lambda: self._add(command, content))
        except Unusable as why:
            self._refuse(command, f"the file is not used: {why}")
        except Exception as error:
            self._refuse(command, internal(logger, "reading a KV cache", error).message)

    def _add(self, command: em.LoadKv, content: Content) -> None:
        try:
            blob = replace(content.blob, adapters=self._loaded(content.adapters))
        except Unusable as why:
            self._refuse(command, f"the file is not used: {why}")
            return
        if self._reuse.add(blob, command.conversation):
            self._answer(em.Kv(command.seq, len(blob.tokens), content.file_bytes))
        else:
            self._refuse(command, "this sidecar has no KV store: kv_cache_mb is 0, or the model is recurrent")

    def _loaded(self, used: tuple[UsedAdapter, ...]) -> AdapterSet:
        """The adapters with which the cells of a file were computed.

        :raises Unusable: one of them is not loaded under its name.
        """
        loaded = {each.name: each for each in self._runtime.adapters}
        for each in used:
            name = each.adapter.name
            if name not in loaded or loaded[name].file.fingerprint != each.fingerprint:
                raise Unusable(f"it was computed with another adapter {name} than is loaded now, if one is")
        return tuple((loaded[each.adapter.name], each.adapter.scale) for each in used)

    def _refuse(self, command: em.SaveKv | em.LoadKv, why: str) -> None:
        logger.info("the KV cache of a conversation was not saved or loaded: %s", why)
        self._answer(em.Kv(command.seq, detail=why.encode()[: m.MAX_KV_DETAIL].decode(errors="ignore")))

    def _answer(self, answer: em.Kv) -> None:
        with contextlib.suppress(BrokerGone):  # the reader thread ends the process
            self._send(answer)
