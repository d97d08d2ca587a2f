"""Copies of KV cells in host memory, so that a text that was read once need not be read again.

A :class:`Blob` is what llama.cpp gives for a sequence, with its tokens. The store keeps the most recently used blobs
within a limit of bytes (launch option ``kv_cache_bytes``). It makes no copies itself: see
:mod:`frameshard.engine.reuse`.

A copy to host memory is limited by the memory's pages: the kernel clears each one when it is first written to. On a
machine that copies 18 GB/s into used pages, new pages give 11 GB/s if they are large (2 MiB) and 2.6 GB/s if they are
small. So the store keeps the pages of a copy that was dropped for the next copy, within its limit. A GPU copies to
pinned memory several times as fast as to other memory, so the pages are pinned where the device has such memory.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frameshard.engine.sequences import Cells

ROOM = 2
"""Pages are reserved for this many times the bytes of a copy: the next copy of a conversation is larger. Pages that
were never written to take no memory."""

PINNED_ROOM = 9 / 8
"""The same for pinned pages, of which fewer are reserved: they take memory even if they are never written to."""

Pinned = npt.NDArray[np.uint8]


@dataclass(eq=False, kw_only=True)
class Blob(Cells):
    """A copy of the cells of one sequence.

    :param data: the cells as llama.cpp saves them, shape [bytes]. Only the same model with the same type of KV cache
        can read them.
    :param job: the paused job that continues from here; 0: none.
    :param ahead: the sequence still has these cells. The copy was made ahead of time, for the case that it loses them.
    """

    data: npt.NDArray[np.uint8]
    job: int = 0
    ahead: bool = False


class _Pages:
    """[any thread] Memory for copies. The largest of those that nobody refers to any more is kept for the next one.

    :param has_room: whether so many bytes may be kept.
    :param pinned: gives pinned memory of so many bytes, or None.
    """

    def __init__(self, has_room: Callable[[int], bool], pinned: Callable[[int], Pinned | None]) -> None:
        self._has_room = has_room
        self._pinned = pinned
        self._kept: tuple[mmap.mmap | Pinned, int] | None = None
        self._lock = threading.RLock()  # a copy may be freed inside of a call
        self.live_bytes = 0
        """The bytes of the memory of all copies that something refers to."""

    @property
    def held_bytes(self) -> int:
        """The bytes of all copies, and those that are kept."""
        with self._lock:
            return self.live_bytes + self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept for the next copy."""
        kept = self._kept
        return 0 if kept is None else kept[1]

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory for a copy. Its contents are undefined.

        :raises MemoryError: there is none.
        """
        if not n_bytes:
            return np.empty(0, np.uint8)
        with self._lock:
            kept, self._kept = self._kept, None
        pages = None if kept is None else kept[0]
        if pages is None or n_bytes > len(pages):
            kept = pages = None  # too small: freed before other pages are written to
            pages = self._take_pinned(n_bytes)
            pages = self._map(n_bytes) if pages is None else pages
        elif sys.platform == "linux" and isinstance(pages, mmap.mmap):
            beyond = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if beyond < len(pages):
                pages.madvise(mmap.MADV_DONTNEED, beyond)  # an earlier copy may have been larger
        held_bytes = n_bytes
        if isinstance(pages, np.ndarray):
            # Not a slice: a slice of it would keep the pages alive, but not the finalizer.
            data, held_bytes = np.frombuffer(pages.data, np.uint8, n_bytes), pages.nbytes
        else:
            data = np.empty(n_bytes, np.uint8) if pages is None else np.frombuffer(pages, np.uint8, n_bytes)
        with self._lock:
            self.live_bytes += held_bytes
            if not self._has_room(self.kept_bytes):  # kept by another thread meanwhile
                self._kept = None
        weakref.finalize(data, self._freed, pages, held_bytes)
        return data

    def reserve(self, n_bytes: int) -> None:
        """Takes pinned pages ahead of time, so that the next copy need not wait for them."""
        with self._lock:
            pages = self._pinned(n_bytes) if n_bytes > self.kept_bytes and self._has_room(n_bytes) else None
            if pages is not None:
                self._kept = pages, pages.nbytes

    def _take_pinned(self, n_bytes: int) -> Pinned | None:
        roomy = int(n_bytes * PINNED_ROOM)
        return self._pinned(roomy if self._has_room(roomy) else n_bytes)

    @staticmethod
    def _map(n_bytes: int) -> mmap.mmap | None:
        """Pages of this process; None where the system has no such calls.

        :raises MemoryError: there are none.
        """
        if sys.platform != "linux":
            return None
        try:
            pages = mmap.mmap(-1, n_bytes * ROOM, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError from error
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
            pages.madvise(mmap.MADV_DONTDUMP)  # by this it is told from emulated VRAM: see hostcount.py
        return pages

    def drop(self) -> None:
        """Frees what is kept."""
        self._kept = None

    def _freed(self, pages: mmap.mmap | Pinned | None, held_bytes: int) -> None:
        """Called when nothing refers to a copy whose memory has ``held_bytes`` any more."""
        with self._lock:
            self.live_bytes -= held_bytes
            if pages is not None and held_bytes > self.kept_bytes and self._has_room(held_bytes):
                self._kept = pages, held_bytes


def _replaces(blob: Blob, other: Blob) -> bool:
    """Whether ``other`` is not needed beside ``blob``. One of a conversation or a paused job does not stand for another
    with the same text: it is dropped when these go on."""
    if blob.conversation is None and not blob.job and other.conversation is None and not other.job:
        return (other.tokens, other.adapters, other.shapes) == (blob.tokens, blob.adapters, blob.shapes)
    same_talk = blob.conversation is not None and blob.conversation == other.conversation
    return same_talk or (blob.job != 0 and blob.job == other.job)


class KvStore:
    """The blobs. Those that were made ahead of time are evicted first, then the least recently used.

    One thread uses the blobs. Another one may change the limit, which evicts blobs at once; who still refers to an
    evicted blob can go on using it.

    :param limit_bytes: the most bytes of all blobs, and of the memory kept for the next one; 0: none are kept.
    :param pinned: gives pinned memory of so many bytes, or None.
    """

    def __init__(self, limit_bytes: int, pinned: Callable[[int], Pinned | None] = lambda n_bytes: None) -> None:
        self.limit_bytes = limit_bytes
        self._strict = False
        self._lock = threading.RLock()
        self._blobs: list[Blob] = []  # the most recently used last
        self._pages = _Pages(self.has_room, pinned)
        self._bytes = self._hits = self._evictions = 0

    def __iter__(self) -> Iterator[Blob]:
        """The blobs, the most recently used first."""
        return reversed(list(self._blobs))

    @property
    def held_bytes(self) -> int:
        """[any thread] The host memory of all copies, also of those that are being made, and what is kept for the next
        one."""
        return self._pages.held_bytes

    def set_limit(self, limit_bytes: int, *, strict: bool) -> None:
        """[any thread] Changes the limit, and evicts what is above it.

        :param strict: room for a copy is made before the copy, so that the limit holds also while it is made.
        """
        with self._lock:
            self.limit_bytes, self._strict = limit_bytes, strict
            while self._bytes > limit_bytes:
                self._evict()
            if not self.has_room(self._pages.kept_bytes):
                self._pages.drop()

    def put(self, blob: Blob) -> bool:
        """Keeps a blob, as the most recently used one. It takes the place of the earlier blob of its conversation or
        job; if it has neither, of such a one with the same text. Data that several blobs share counts once.

        :returns: false if it is larger than the limit. Then nothing changes.
        """
        with self._lock:
            if blob.data.nbytes > self.limit_bytes:
                return False
            for other in self:
                if _replaces(blob, other):
                    self.drop(other)
            while self._bytes + self._more(blob) > self.limit_bytes:
                self._evict()
            self._bytes += self._more(blob)
            self._blobs.append(blob)
            if not self.has_room(self._pages.kept_bytes):
                self._pages.drop()
            return True

    def has_room(self, n_bytes: int) -> bool:
        """[any thread] Whether so many bytes more can be kept without an eviction."""
        return max(self._bytes, self._pages.live_bytes) + n_bytes <= self.limit_bytes

    def memory(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """[any thread] Memory for the data of a blob. When nothing refers to it any more, a later blob gets it.

        :raises MemoryError: there is none, or the limit is strict and has no room for it.
        """
        with self._lock:
            while self._strict and self._blobs and self._pages.live_bytes + n_bytes > self.limit_bytes:
                self._evict()
            if self._strict and self._pages.live_bytes + n_bytes > self.limit_bytes:
                raise MemoryError
            return self._pages.take(n_bytes)

    def reserve(self, n_bytes: int) -> None:
        """Takes pinned memory for a copy of ``n_bytes`` ahead of time, if the device has such memory and the limit has
        room."""
        with self._lock:
            self._pages.reserve(n_bytes)

    def use(self, blob: Blob) -> None:
        """Counts a hit, and makes ``blob`` the most recently used one."""
        with self._lock:
            self._hits += 1
            if blob in self._blobs:
                self._blobs.remove(blob)
                self._blobs.append(blob)

    def drop(self, blob: Blob) -> None:
        """Frees a blob. Nothing happens if it was evicted."""
        with self._lock:
            if blob in self._blobs:
                self._blobs.remove(blob)
                self._bytes -= self._more(blob)

    def _more(self, blob: Blob) -> int:
        """The bytes of a blob that no blob in the store shares with it."""
        return 0 if any(other.data is blob.data for other in self._blobs) else blob.data.nbytes

    def _evict(self) -> None:
        victim = next((other for other in self._blobs if other.ahead), None)
        if victim is None:
            victim = self._blobs[0]
            self._evictions += 1
        self.drop(victim)

    def statistics(self) -> dict[str, object]:
        """[any thread] Its figures, for :meth:`Batcher.statistics`."""
        return {
            "kv_cache_bytes": self._bytes,
            "kv_cache_entries": len(self._blobs),
            "kv_cache_hits": self._hits,
            "kv_cache_evictions": self._evictions,
        }
