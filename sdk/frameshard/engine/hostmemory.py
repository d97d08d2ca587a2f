"""The host memory of the sidecar's processes: its parts, and the limit for them.

The limit is the host budget of the lease, or the sidecar's own limit while the system is short of memory, whichever is
smaller. Each part has a share of it: the shard device (weights, pinned memory, KV blocks) and the KV store hold theirs
at every moment. All else that the processes hold is measured every :data:`MEASURE_S` seconds, and :data:`SPARE_BYTES`
are left free for what it grows by in between. Without a limit it is measured less often if that takes long.

Without a limit nothing changes: the KV store may hold what the launch option ``kv_cache_bytes`` allows.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import threading
import time
from dataclasses import asdict

from frameshard.engine import hostcount
from frameshard.engine.embeddings import MAX_BYTES, Embeddings
from frameshard.engine.kvstore import KvStore
from frameshard.engine.runtime import Runtime
from frameshard.errors import BudgetBelowFloor, DeadlineMissed, Unsupported, below_host_floor
from frameshard.native import EMULATED, HostPath
from frameshard.records import record

logger = logging.getLogger("frameshard.engine")

MEASURE_S = 2.0

UNLIMITED_SHARE = 1 / 500
"""The most of the time that measurements take without a limit. One walks all pages of the model's file that are mapped,
which takes 110 ms for 16 GiB. Meanwhile no memory can be mapped or unmapped in this process, so a budget that falls
would wait for it. Under a limit few pages are mapped."""

SPARE_BYTES = 32 << 20
"""Part of the floor: what Python, libraries and drivers may take between two measurements."""

LEAST_SPARE_BYTES = 16 << 20
"""A host budget that leaves so much of it is accepted: the processes may have grown since the host was told the
floor."""

STORE_SHARE = 4
"""The KV store gets one of so many parts of what is above the floor, and more where the weights need less."""

STEP_BYTES = 4 << 20
"""The shard device's share is changed if it differs by so much."""

RECLAIMABLE = (HostPath.DIRECT, HostPath.STAGED)
"""Where weights are pages of the mapped file that are not pinned, the system can take these pages back itself. Memory
that holds weights in their place could only be swapped."""

POLL_S = 0.002

_MEASUREMENTS = 2  # at most, of processes while weights come and go
_REMEMBERED = 3
"""What the processes hold is the most of so many measurements: memory that a read from disk is still filling is counted
as weights already, so one measurement beside reads finds too little."""


@record
class Parts:
    """What is held in host memory, in bytes. Each part is counted once.

    :param weights_bytes: the model's file as far as it is mapped, and the vision tower's weights.
    :param pinned_bytes: memory through which copies to the device pass.
    :param kv_blocks_bytes: KV blocks of running conversations that have no room in VRAM.
    :param kv_store_bytes: copies of KV caches in the KV store, memory kept for the next copy, and embeddings of images.
    :param processes_bytes: all else of broker, engine and the processes that these have started, when it was last
        measured; 0 if the system does not tell.
    """

    weights_bytes: int
    pinned_bytes: int
    kv_blocks_bytes: int
    kv_store_bytes: int
    processes_bytes: int

    @property
    def used_bytes(self) -> int:
        return sum(asdict(self).values())


def share(spare_bytes: int, wanted_bytes: int, most_bytes: int, *, weights_first: bool) -> int:
    """The limit of the KV store.

    :param spare_bytes: of the limit, above the floor.
    :param wanted_bytes: what the shard device could use of it.
    :param most_bytes: the launch option ``kv_cache_bytes``.
    :param weights_first: the KV store gets only what the shard device has no use for.
    """
    least = 0 if weights_first else spare_bytes // STORE_SHARE
    return min(most_bytes, max(least, spare_bytes - wanted_bytes, 0))


class HostMemory:
    """[any thread] Counts and limits the host memory of one engine and its broker.

    :param store: the engine's KV store.
    :param embeddings: those of the engine's vision tower, if it has one. They have a part of the store's share.
    """

    def __init__(self, runtime: Runtime, store: KvStore, embeddings: Embeddings | None = None) -> None:
        self.budget_bytes = 0
        """The host budget in force; 0 for no limit."""
        self.pressed_bytes = 0
        """The sidecar's own limit while the system is short of memory; 0 for none."""
        self.observed_bytes: int | None = None
        """What the system counted at the last measurement; None if it does not count, or was not asked yet."""
        self._runtime = runtime
        self._store = store
        self._embeddings = embeddings
        self._lock = threading.RLock()
        self._asked_bytes = 0  # of the shard device, which may obey later
        self._processes = 0
        self._measured: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._measured_at, self._took_s = -math.inf, 0.0
        self._file = hostcount.ModelPages(runtime.config.model) if hostcount.counts() else None

    # --- figures --------------------------------------------------------------------------------------------------

    def parts(self) -> Parts:
        """The parts, from exact counters and the last measurement."""
        device = self._runtime.device
        if device is None:
            weights, pinned, blocks = self._runtime.model_info.file_bytes, 0, 0
        else:
            stats = device.stats()
            weights, blocks = stats.host_weights_bytes, stats.kv_host_bytes
            pinned = stats.host_used_bytes - weights - blocks
        embeddings = 0 if self._embeddings is None else self._embeddings.held_bytes
        return Parts(weights, pinned, blocks, self._store.held_bytes + embeddings, self._processes)

    @property
    def floor_bytes(self) -> int:
        """The smallest host budget; 0 if the system does not count, so that there can be none."""
        if self._file is None:
            return 0
        return self._device_floor() + self._processes + SPARE_BYTES

    def figures(self) -> dict[str, object]:
        """Its part of the protocol's ``stats`` answer."""
        parts = self.parts()
        return {
            **asdict(parts),
            "used_bytes": parts.used_bytes,
            "observed_bytes": self.observed_bytes,
            "budget_bytes": self.budget_bytes,
            "pressed_bytes": self.pressed_bytes,
            "floor_bytes": self.floor_bytes,
        }

    def measure(self) -> int | None:
        """Measures anew; takes 7 ms for each GiB of the model's file that is mapped. The shares follow.

        :returns: the bytes that the system counts; None if it does not count.
        """
        if self._file is None:
            return None
        began_at = time.monotonic()
        with self._lock:
            steady = False
            for _ in range(_MEASUREMENTS):
                before = self.parts().used_bytes
                own = hostcount.own(self._file, emulated=self._runtime.device_name == EMULATED)
                broker = os.getppid()
                others = sum(hostcount.process_bytes(pid) for pid in hostcount.family(broker) if pid != os.getpid())
                of_file = self._of_file(self._file, own)
                parts = self.parts()
                steady = abs(parts.used_bytes - before) < STEP_BYTES
                if steady:
                    break
            # What weights have taken or freed meanwhile would be counted as the processes'.
            if steady or not self._processes:
                self._measured.append(self._of_processes(parts, own, others))
                self._processes = max(self._measured)
            self.observed_bytes = own.bytes + others + of_file
            self._measured_at = time.monotonic()
            self._took_s = self._measured_at - began_at
            self._give_shares()
        return self.observed_bytes

    def _of_file(self, file: hostcount.ModelPages, own: hostcount.Own) -> int:
        """The pages of the model's file in the page cache; those that this process maps if the system does not tell.
        Where the weights do not need them, those that another program has left there are dropped first.

        :param own: what this process holds.
        """
        cached = file.cached_bytes()
        if not self._is_mapped() and (cached is None or cached > own.resident_bytes):
            file.forget()
            cached = file.cached_bytes()
        return own.resident_bytes if cached is None else cached

    def _of_processes(self, parts: Parts, own: hostcount.Own, others_bytes: int) -> int:
        """What the processes hold besides the other parts. Pages of the model's file that no process of the sidecar
        maps are not theirs: another program has read them, and the system can take them back.

        :param own: what this process holds.
        :param others_bytes: what the others hold.
        """
        # The mapped weights are pages of the file, and the other parts in the engine's own share.
        mapped = min(parts.weights_bytes, own.mapped_bytes)
        if not self._is_mapped():
            mapped = min(mapped, own.resident_bytes)  # memory has taken the place of the mapping's pages
        counted = parts.used_bytes - parts.processes_bytes - mapped
        return max(0, own.bytes + others_bytes - counted) + max(0, own.resident_bytes - mapped)

    def look(self) -> None:
        """To be called several times a second: measures when it is due, and lets the shares follow the counters."""
        if self._measured_before(MEASURE_S if self.limit_bytes else max(MEASURE_S, self._took_s / UNLIMITED_SHARE)):
            self.measure()
        elif self.limit_bytes:
            with self._lock:
                self._give_shares()

    def _measured_before(self, seconds: float) -> bool:
        """Whether the last measurement is at least so many seconds old."""
        return time.monotonic() - self._measured_at >= seconds

    # --- the limit ------------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """The limit in force; 0 for none."""
        return min((limit for limit in (self.budget_bytes, self.pressed_bytes) if limit), default=0)

    def check(self, budget_bytes: int, spare_bytes: int = LEAST_SPARE_BYTES) -> None:
        """
        :param spare_bytes: the part of :data:`SPARE_BYTES` that it must leave. A new engine must fit where the last one
            ran, so it demands none.
        :raises Unsupported: this system does not count host memory.
        :raises BudgetBelowFloor: the host budget is below the floor.
        """
        if not budget_bytes or budget_bytes == self.budget_bytes:
            return
        if self._file is None:
            raise Unsupported(
                "a host budget needs Linux, because this system does not tell what the processes hold: set"
                " host_budget_mb to 0, and bound the KV store by kv_cache_mb",
                field="host_budget_bytes",
            )
        if budget_bytes < self.floor_bytes or self._measured_before(MEASURE_S):
            self.measure()
        if budget_bytes < self.floor_bytes - SPARE_BYTES + spare_bytes:
            raise below_host_floor(budget_bytes, self.floor_bytes)

    def check_move(self, budget_bytes: int, vram_bytes: int, *, parked: bool) -> None:
        """Checks that the KV blocks which a change of VRAM moves to host memory have room in the host budget.

        :param budget_bytes: the host budget; 0 for no limit.
        :param vram_bytes: the new VRAM budget; 0 for no limit.
        :param parked: whether all of them move.
        :raises BudgetBelowFloor: they have none. Nothing has changed.
        """
        device = self._runtime.device
        if not budget_bytes or device is None:
            return
        before = self._runtime.vram_budget_bytes
        shrinks = vram_bytes and (not before or vram_bytes < before)
        if not (parked or shrinks) or not any(map(self._runtime.length, range(self._runtime.config.n_parallel))):
            return  # room that no sequence uses is freed, not moved
        stats = device.stats()
        # Weights leave VRAM first: about what is above the floor has room for blocks.
        moves = stats.kv_bytes - (0 if parked else vram_bytes - stats.floor_bytes)
        if moves > 0 and budget_bytes < self.floor_bytes + moves - SPARE_BYTES + LEAST_SPARE_BYTES:
            raise below_host_floor(budget_bytes, self.floor_bytes + moves)

    def follow_vram(self) -> None:
        """To be called after a change of VRAM: KV blocks may have moved, so the shares change."""
        if self.limit_bytes:
            with self._lock:
                self._give_shares()

    def set_budget(self, budget_bytes: int, timeout_s: float) -> None:
        """Sets the host budget, which :meth:`check` has accepted, and waits until what is held is within it.

        :raises DeadlineMissed: the memory was not released in time. The budget is in force all the same.
        """
        if budget_bytes == self.budget_bytes:
            return
        with self._lock:
            self.budget_bytes = budget_bytes
            self._give_shares()
        self._await_release(timeout_s)

    def press(self, missing_bytes: int) -> bool:
        """Sets the sidecar's own limit below what is held, or lowers it further, but never below the floor. Weights
        that the system can take back itself are left to it.

        :param missing_bytes: how much the system is short of.
        :returns: false if that is not possible.
        """
        with self._lock:
            held = self.parts().used_bytes + SPARE_BYTES
            pressed = max(self._least_bytes(), min(self.limit_bytes or held, held) - missing_bytes)
            if self._file is None or 0 < self.pressed_bytes <= pressed:
                return False
            self.pressed_bytes = pressed
            self._give_shares()
        return True

    def ease(self) -> None:
        """Ends the sidecar's own limit."""
        with self._lock:
            self.pressed_bytes = 0
            self._give_shares()

    def _is_mapped(self) -> bool:
        """Whether all weights are used through the mapping of the model's file."""
        device = self._runtime.device
        return device is None or device.stats().host_mapped

    def _is_reclaimable(self) -> bool:
        """Whether the system can take back the pages of all weights itself."""
        device = self._runtime.device
        return device is not None and self._is_mapped() and device.stats().host_weights in RECLAIMABLE

    def _least_bytes(self) -> int:
        """The least that pressure may set as the limit."""
        return self.floor_bytes + self._device_part(by_pressure=True) - self._device_floor()

    def _device_part(self, *, by_pressure: bool) -> int:
        """The least that the shard device's part may be limited to. Pressure leaves weights that are reclaimable."""
        device = self._runtime.device
        if device is None or not by_pressure or not self._is_reclaimable():
            return self._device_floor()
        return device.stats().host_used_bytes

    def _device_floor(self) -> int:
        device = self._runtime.device
        return self._runtime.model_info.file_bytes if device is None else device.stats().host_floor_bytes

    def _give_shares(self) -> None:
        """Gives the KV store and the shard device their shares of the limit. The sidecar's own limit rises with the
        floor, as the processes grow."""
        if self.pressed_bytes:
            self.pressed_bytes = max(self.pressed_bytes, self._least_bytes())
        most, limit = self._runtime.config.kv_cache_bytes, self.limit_bytes
        most += 0 if self._embeddings is None else MAX_BYTES
        if not limit:
            self._limit_store(most, strict=False)
            self._limit_device(0)
            return
        by_pressure = limit != self.budget_bytes
        least = self._device_part(by_pressure=by_pressure)
        wanted = max(self._runtime.model_info.file_bytes - least, 0)
        spare = limit - least - self._processes - SPARE_BYTES
        kept = share(spare, wanted, most, weights_first=bool(self.pressed_bytes))
        self._limit_store(kept, strict=True)
        if not (by_pressure and self._is_reclaimable()):
            self._limit_device(max(least, least + spare - kept))

    def _limit_store(self, limit_bytes: int, *, strict: bool) -> None:
        """Limits the KV store, and the embeddings of images to a quarter of its share, or to what it has no use for."""
        most = self._runtime.config.kv_cache_bytes
        if self._embeddings is not None:
            embeddings_bytes = min(MAX_BYTES, max(limit_bytes // 4, limit_bytes - most))
            self._embeddings.set_limit(embeddings_bytes)
            limit_bytes -= embeddings_bytes
        self._store.set_limit(min(most, limit_bytes), strict=strict)

    def _limit_device(self, limit_bytes: int) -> None:
        """Limits the shard device's part. Its release is awaited by :meth:`_await_release`."""
        device, asked = self._runtime.device, self._asked_bytes
        # 0 is no limit, and far from every limit: those of small models are smaller than a step.
        differs = (limit_bytes > 0) != (asked > 0) or abs(asked - limit_bytes) >= STEP_BYTES
        if device is not None and (differs or self._is_late() or self._is_over()):
            # Its floor rises with the KV blocks: the next look sets it anew.
            with contextlib.suppress(BudgetBelowFloor):
                with contextlib.suppress(DeadlineMissed):  # it obeys after the graph
                    device.set_host_budget(limit_bytes, 0.0)
                self._asked_bytes = limit_bytes

    def _is_late(self) -> bool:
        """Whether the shard device has not obeyed yet."""
        device = self._runtime.device
        return device is not None and device.stats().host_budget_bytes != self._asked_bytes

    def _is_over(self) -> bool:
        """Whether the shard device holds more than its part: KV blocks have moved to host memory."""
        device = self._runtime.device
        if device is None:
            return False
        stats = device.stats()
        return 0 < stats.host_budget_bytes < stats.host_used_bytes

    def _await_release(self, timeout_s: float) -> None:
        """Waits until what is held is within the host budget: for the shard device, and for copies that are being made,
        which cannot be taken back. What is held may still grow until the device obeys."""
        until = time.monotonic() + timeout_s
        while self.budget_bytes and (self._is_late() or self.budget_bytes < self.parts().used_bytes):
            if time.monotonic() >= until:
                raise DeadlineMissed("host memory is still in use; the host budget stays in force")
            time.sleep(POLL_S)
            if self._is_late():
                with self._lock:
                    self._give_shares()  # a device that has become idle obeys when it is asked
