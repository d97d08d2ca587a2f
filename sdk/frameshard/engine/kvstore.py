"""Copies of KV cells in host memory, so that a text that was read once need not be read again.

A :class:`Blob` is what llama.cpp gives for a sequence, with its tokens. The store keeps the most recently used blobs
within a limit of bytes (launch option ``kv_cache_bytes``). It makes no copies itself: see
:mod:`frameshard.engine.reuse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frameshard.engine.sequences import Cells


@dataclass(eq=False, kw_only=True)
class Blob(Cells):
    """A copy of the cells of one sequence.

    :param data: the cells as llama.cpp saves them, shape [bytes]. Only the same model with the same type of KV cache
        can read them.
    :param job: the paused job that continues from here; 0: none.
    """

    data: npt.NDArray[np.uint8]
    job: int = 0


class KvStore:
    """The blobs, of which the least recently used are evicted.

    :param limit_bytes: the most bytes of all blobs; 0: none are kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._blobs: list[Blob] = []  # the most recently used last
        self._bytes = self._hits = self._evictions = 0

    def __iter__(self) -> Iterator[Blob]:
        """The blobs, the most recently used first."""
        return reversed(self._blobs)

    def put(self, blob: Blob) -> bool:
        """Keeps a blob, as the most recently used one. It takes the place of the conversation's earlier blob, and of
        one with the same text.

        :returns: false if it is larger than the limit. Then nothing changes.
        """
        if blob.data.nbytes > self.limit_bytes:
            return False
        for other in list(self):
            same_text = (other.tokens, other.adapters, other.shapes) == (blob.tokens, blob.adapters, blob.shapes)
            if same_text or (blob.conversation is not None and other.conversation == blob.conversation):
                self.drop(other)
        while self._bytes + blob.data.nbytes > self.limit_bytes:
            self.drop(self._blobs[0])
            self._evictions += 1
        self._blobs.append(blob)
        self._bytes += blob.data.nbytes
        return True

    def use(self, blob: Blob) -> None:
        """Counts a hit, and makes ``blob`` the most recently used one."""
        self._hits += 1
        self._blobs.remove(blob)
        self._blobs.append(blob)

    def drop(self, blob: Blob) -> None:
        """Frees a blob."""
        self._blobs.remove(blob)
        self._bytes -= blob.data.nbytes

    def statistics(self) -> dict[str, object]:
        """[any thread] Its figures, for :meth:`Batcher.statistics`."""
        return {
            "kv_cache_bytes": self._bytes,
            "kv_cache_entries": len(self._blobs),
            "kv_cache_hits": self._hits,
            "kv_cache_evictions": self._evictions,
        }
