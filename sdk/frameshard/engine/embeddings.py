"""The embeddings of images and sounds that were encoded last, so that they need not be encoded again."""

from __future__ import annotations

import collections
import mmap
import threading

import numpy as np
import numpy.typing as npt

MAX_BYTES = 256 << 20
"""The most host memory for embeddings that are kept."""

Embedding = npt.NDArray[np.float32]


def copied(embedding: Embedding) -> Embedding:
    """A copy in pages of its own: they return to the system when nothing refers to the copy any more."""
    copy = np.frombuffer(mmap.mmap(-1, embedding.nbytes), np.float32).reshape(embedding.shape)
    copy[:] = embedding
    return copy


class Embeddings:
    """[any thread] Embeddings within a limit of bytes, by the digests of their pictures. The least recently used are
    dropped first."""

    def __init__(self) -> None:
        self._limit_bytes = MAX_BYTES
        self._kept: collections.OrderedDict[bytes, Embedding] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0
        """The bytes of all embeddings that are kept."""

    def get(self, digest: bytes) -> Embedding | None:
        """The embedding of a picture, which is now the most recently used one; ``None`` if it is not kept."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def put(self, digest: bytes, embedding: Embedding) -> None:
        """Keeps an embedding as the most recently used one, if the limit has room for it."""
        with self._lock:
            if digest not in self._kept and embedding.nbytes <= self._limit_bytes:
                self._drop_to(self._limit_bytes - embedding.nbytes)
                self._kept[digest] = embedding
                self.held_bytes += embedding.nbytes

    def set_limit(self, limit_bytes: int) -> None:
        """Changes the limit, and drops what is above it."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._drop_to(limit_bytes)

    def _drop_to(self, n_bytes: int) -> None:
        while self.held_bytes > n_bytes:
            _, embedding = self._kept.popitem(last=False)
            self.held_bytes -= embedding.nbytes
