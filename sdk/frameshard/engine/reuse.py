"""Which KV cells a job starts from: those of its sequence, a copy of another sequence's, or a blob of the KV store.

A job starts from the longest prefix of its text that any of these has. A copy is made only if it saves at least
:data:`WORTH_TOKENS` tokens, and an eighth of those that are copied. Cells of another text are cut to the common prefix.
If that loses much, the prefix is put into the store as a blob of its own: a prefix that two texts share is likely to be
that of a third.

Cells are put into the store when a conversation loses its sequence, when a job is paused, and after a warm-up.

Once a conversation has lost its sequence, there are more of them than sequences, and others will lose theirs. From then
on the cells of conversations are copied ahead of time, in idle moments (:meth:`Reuse.copy_ahead`), so that a switch has
only to copy cells back. Such a copy changes how fast a job starts, not from which cells: no other blob is evicted for
it, it is evicted before all others, and as long as the sequence has the same cells, only the sequence is looked at.

In stream-only mode a job reports the shapes of what it reuses (``Started.history``). After the engine's death it is
repeated in these shapes, so it then reuses only cells that were decoded in them. A paused job continues from its own
blob, in mid-answer. With a draft model it does not: drafts depend on how many of them were accepted before, which a
blob does not hold.

A copy has only the cells that a sliding window still needs. So with a model that has such windows a copy longer than
the window is used whole or not at all. Where the sequences do not keep all cells either
(:mod:`frameshard.plan.windows`), a text may share a beginning with one that cannot be cut to it. Then this beginning is
read again, and put into the store.

Cells of images are reused only in place, in the sequence of their conversation. A recurrent state cannot be cut to a
prefix, so models that have one copy nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from frameshard.engine.job import Job, Slot
from frameshard.engine.kvstore import Blob, KvStore
from frameshard.engine.runtime import Runtime
from frameshard.engine.sequences import Cells, Shape, common_prefix, repeated
from frameshard.errors import BadArgument

logger = logging.getLogger("frameshard.engine")

WORTH_TOKENS = 32
"""A prompt of fewer tokens is read about as fast as it is copied."""

WORTH_SHARE = 8
"""Reading a token takes about as long as copying this many to host memory and back: on a fast GPU with all weights in
VRAM. Where weights are streamed, reading takes longer."""


class Reuse:
    """Brings the cells that a job can reuse into its sequence.

    :param slots: all sequences of the runtime.
    :param store: the KV store; its limit is 0 if cells are never copied.
    """

    def __init__(self, runtime: Runtime, slots: Sequence[Slot], store: KvStore) -> None:
        self._runtime = runtime
        self._slots = slots
        self.store = store
        self._copies = store.limit_bytes > 0 and runtime.llama.can_trim
        self._crowded = False
        """A conversation has lost its sequence to another job."""

    def begin(self, job: Job, slot: Slot, text: Sequence[int], history: Sequence[Shape]) -> None:
        """Gives ``slot`` to ``job``. Afterwards its tokens are those that the job reuses.

        :param text: the text to prefill.
        :param history: the shapes in which the job must be decoded; empty if they are free.
        """
        n_known = self._known(job, text)
        own = job.conversation is not None and slot.conversation == job.conversation
        if not own:
            self._vacate(slot)
        n_reused = self._shared(slot, job, text, history) if own or not (slot.pictures or job.pictures) else 0
        source = None if job.pictures else self._longer(job, slot, text, history, n_reused)
        if source is None or not self._copy(source, slot):
            self._cut(slot, n_reused)
        else:
            if isinstance(source, Blob):
                self.store.use(source)
            n_reused = self._shared(source, job, text, history)
            n_lost = len(source.tokens) - n_reused
            self._cut(slot, n_reused)
            foreign = source.conversation is None or source.conversation != job.conversation
            if foreign and (n_lost >= WORTH_TOKENS or isinstance(source, Slot)):
                self.store_prefix(slot)
        slot.store_at = n_known if n_known >= len(slot.tokens) + WORTH_TOKENS else 0
        slot.adapters, slot.conversation = job.adapters, job.conversation
        for blob in list(self.store):
            if blob.job == job.id or (blob.conversation is not None and blob.conversation == job.conversation):
                self.store.drop(blob)  # the sequence has it now

    def paused(self, job: Job, slot: Slot, text: list[int]) -> bool:
        """Continues a paused job in mid-answer if its cells are still there.

        :param text: the tokens that its cells must hold.
        :returns: whether ``slot`` holds them now.
        """
        blob = next((blob for blob in self.store if blob.job == job.id), None)
        if blob is None or blob.tokens != text or blob.adapters != job.adapters:
            return False
        self.store.use(blob)
        self.store.drop(blob)
        if slot.conversation != job.conversation:
            self._vacate(slot)
        if not self._copy(blob, slot):
            return False
        slot.adapters, slot.conversation = job.adapters, job.conversation
        return True

    def pause(self, job: Job, slot: Slot) -> None:
        """Keeps the cells of a job that will be resumed."""
        self.keep(slot, job.id)

    def keep(self, slot: Slot, job: int = 0) -> None:
        """Puts what a sequence holds into the store, if it is worth that.

        :param job: the job that will continue from it; 0: a conversation may.
        """
        if self._worth(slot) and (job or slot.conversation) and self._fits(slot):
            self._put(slot, job=job)

    def copy_ahead(self) -> bool:
        """Copies the cells of one conversation whose sequence runs no job, if they are not in the store and it has room
        for them. The sequence that the next conversation would take is the first.

        :returns: false if there is nothing to copy.
        """
        idle = (slot for slot in self._slots if slot.job is None and slot.conversation is not None)
        for slot in sorted(idle, key=lambda slot: slot.used_at) if self._crowded else ():
            # A blob of the conversation has these cells, or it was read from a file to go on from there.
            has_blob = any(blob.conversation == slot.conversation for blob in self.store)
            if self._worth(slot) and not has_blob:
                n_bytes = self._runtime.llama.saved_bytes(slot.seq)
                if self.store.has_room(n_bytes) and self._put(slot, ahead=True):
                    return True
        return False

    def finish_warm_up(self, slot: Slot) -> None:
        """Keeps the cells that a warm-up has read. Those of a conversation or a paused job do not stand for them,
        because these go on to another text.

        :raises BadArgument: they are larger than the store.
        """
        lore = (blob for blob in self.store if blob.conversation is None and not blob.job)
        if any((blob.tokens, blob.adapters) == (slot.tokens, slot.adapters) for blob in lore):
            return
        data = self._saved(slot) if self._fits(slot) else None
        if data is None or not self.store.put(self._blob(slot, data)):
            size_mb = -(-self._runtime.llama.saved_bytes(slot.seq) >> 20)
            raise BadArgument(
                f"the KV cache of these messages has {size_mb} MiB, more than the KV store may hold: launch with a"
                " larger kv_cache_mb",
                field="warm_up",
            )

    def copy_of(self, conversation: str) -> Blob | None:
        """Returns a copy of the cells of a conversation; ``None`` if there are none that could be reused elsewhere."""
        slot = next((slot for slot in self._slots if slot.conversation == conversation), None)
        if slot is None:
            return next((blob for blob in self.store if blob.conversation == conversation), None)
        if not self._copies or not slot.tokens or slot.pictures:
            return None
        data = self._saved(slot)
        return None if data is None else self._blob(slot, data)

    def add(self, blob: Blob, conversation: str) -> bool:
        """Puts a blob that was read from a file into the store.

        :returns: false if there is no store, or the blob is too large for it.
        """
        blob.conversation = conversation
        return self._copies and self.store.put(blob)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _shared(self, cells: Cells, job: Job, text: Sequence[int], history: Sequence[Shape]) -> int:
        """How many tokens of ``cells`` the job can start from."""
        if cells.adapters != job.adapters:
            return 0
        # Decode at least the last token: the first token of the answer is sampled from its logits.
        n = min(common_prefix(cells.tokens, text), len(text) - 1)
        if history:
            n = repeated(cells.shapes, history, n)
        if isinstance(cells, Slot):
            n = cells.whole(n)
        return n if self._can_cut(cells, n) else 0

    def _can_cut(self, cells: Cells, length: int) -> bool:
        """Whether cells can be cut to their first ``length`` tokens."""
        if isinstance(cells, Slot):
            return self._runtime.can_cut(cells.seq, cells.positions(length))
        return length == len(cells.tokens) or self._copy_is_whole(cells)

    def _copy_is_whole(self, cells: Cells) -> bool:
        """Whether a copy of cells has all of them: those that have left a sliding window are not copied."""
        return not 0 < self._runtime.llama.window < len(cells.tokens)

    def _longer(self, job: Job, slot: Slot, text: Sequence[int], history: Sequence[Shape], n_own: int) -> Cells | None:
        """The cells with the longest common prefix that are worth a copy, compared with ``n_own`` tokens of ``slot``.
        Of equal ones, those that are copied fastest: blobs before sequences, short ones before long ones."""
        if not self._copies or len(text) <= n_own + WORTH_TOKENS:
            return None
        others = (other for other in self._slots if other is not slot and not other.pictures)
        blobs = (blob for blob in self.store if not blob.ahead)
        sources: list[Blob | Slot] = [*blobs, *others]
        found = [(self._shared(cells, job, text, history), cells) for cells in sources]
        found = [
            (n, cells)
            for n, cells in found
            if n - n_own >= max(WORTH_TOKENS, len(cells.tokens) // WORTH_SHARE)
            and (n == len(cells.tokens) or self._copy_is_whole(cells))
            and (isinstance(cells, Blob) or self._fits(cells))
        ]
        _, best = max(
            found,
            key=lambda each: (each[0], isinstance(each[1], Blob), -len(each[1].tokens)),
            default=(0, None),
        )
        return best

    def _saved(self, slot: Slot) -> npt.NDArray[np.uint8] | None:
        """A copy of the cells of a sequence, that of the store if it has one; ``None`` if there is no memory."""
        for blob in self.store:
            if (blob.tokens, blob.shapes, blob.adapters) == (slot.tokens, slot.shapes, slot.adapters):
                return blob.data
        return self._runtime.save(slot.seq, self.store.memory)

    def _fits(self, slot: Slot) -> bool:
        """Whether a copy of the sequence is within the limit of the store."""
        return self._runtime.llama.saved_bytes(slot.seq) <= self.store.limit_bytes

    def _copy(self, source: Cells, slot: Slot) -> bool:
        """Copies cells into ``slot``.

        :returns: false if there is no memory for that. Then nothing changes, or the sequence is empty.
        """
        data = source.data if isinstance(source, Blob) else None
        if isinstance(source, Slot):
            data = self._saved(source)
        if data is None:
            return False
        slot.cut(0)
        if not self._runtime.restore(slot.seq, data, len(source.tokens)):
            return False
        slot.tokens, slot.shapes = list(source.tokens), list(source.shapes)
        return True

    def _cut(self, slot: Slot, length: int) -> None:
        """Cuts a sequence to at most ``length`` tokens."""
        position = slot.positions(length)
        slot.cut(length if self._runtime.trim(slot.seq, position) == position else 0)

    def _vacate(self, slot: Slot) -> None:
        """Keeps the cells of a conversation that loses its sequence."""
        self._crowded = self._crowded or slot.conversation is not None
        # The blob of a paused job has the same cells, and the job continues only from a blob with its mark.
        if not any(blob.job and blob.conversation == slot.conversation for blob in self.store):
            self.keep(slot)

    def _worth(self, slot: Slot) -> bool:
        """Whether a copy of the sequence can be reused, and is worth its time."""
        return self._copies and len(slot.tokens) >= WORTH_TOKENS and not slot.pictures

    def _put(self, slot: Slot, *, job: int = 0, ahead: bool = False) -> bool:
        """Puts a copy of a sequence into the store, for its conversation.

        :returns: false if there is no memory for that.
        """
        data = self._saved(slot)
        if data is None:
            return False
        blob = self._blob(slot, data)
        blob.conversation, blob.job, blob.ahead = slot.conversation, job, ahead
        return self.store.put(blob)

    def _known(self, job: Job, text: Sequence[int]) -> int:
        """The most tokens that the text has in common with any cells, if these may be such as cannot be cut to them."""
        if not self._copies or job.pictures or not self._runtime.llama.sliding_cells:
            return 0
        known: list[Cells] = [*(slot for slot in self._slots if not slot.pictures), *self.store]
        shared = (common_prefix(cells.tokens, text) for cells in known if cells.adapters == job.adapters)
        return min(max(shared, default=0), len(text) - 1)

    def store_prefix(self, slot: Slot) -> None:
        """Puts a copy of a sequence into the store that belongs to no conversation."""
        data = self._saved(slot)
        if data is not None:
            self.store.put(self._blob(slot, data))

    def _blob(self, cells: Cells, data: npt.NDArray[np.uint8]) -> Blob:
        """A blob that belongs to no conversation."""
        return Blob(
            tokens=list(cells.tokens),
            shapes=list(cells.shapes),
            adapters=cells.adapters,
            data=data,
        )
