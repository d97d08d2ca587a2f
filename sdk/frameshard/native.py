"""The Python interface of the shard device: ctypes for ``native/include/frameshard_device.h``.

Order of calls: :class:`ShardDevice` -> :meth:`~ShardDevice.set_shards` -> llama model with ``devices =
device.devices_array`` -> llama context -> :meth:`~ShardDevice.commit` -> :meth:`~ShardDevice.set_plan` ->
:meth:`~ShardDevice.fill` -> decode. There is one device per process. Sizes are bytes, times seconds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import errors, ggml
from .records import record

STREAMED = 1
CPU = 2
EMULATED = "emulated"

LLAMA_CPP_PYTHON = "0.3.36"
INTERFACE_VERSION = 11


class _Config(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("inner_device", ctypes.c_char_p),
        ("budget_bytes", ctypes.c_uint64),
        ("n_threads", ctypes.c_uint32),
        ("piece_bytes", ctypes.c_uint64),
        ("step_bytes", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_uint64),
        ("copy_bytes", ctypes.c_uint64),
        ("emulated_link_gbps", ctypes.c_double),
        ("emulated_vram_bytes", ctypes.c_uint64),
        ("emulated_disk_gbps", ctypes.c_double),
    )


class _ShardTensor(ctypes.Structure):
    _fields_ = (("tensor", ctypes.c_char_p), ("shard", ctypes.c_uint32))


class _Tier(ctypes.Structure):
    _fields_ = (("min_tokens", ctypes.c_uint32), ("placement", ctypes.POINTER(ctypes.c_uint8)))


class HostPath(enum.IntEnum):
    """How weights in host memory reach the device. ``fsd_host_path`` in frameshard_device.h describes each."""

    DIRECT = 0
    REGISTERED = 1
    IMPORTED = 2
    COPIED = 3
    STAGED = 4


@record
class Stats:
    """The device's figures. ``fsd_stats`` in frameshard_device.h describes each."""

    budget_bytes: int
    used_bytes: int
    peak_bytes: int
    overhead_bytes: int
    pool_bytes: int
    buffers_bytes: int
    kv_bytes: int
    graph_bytes: int
    least_graph_bytes: int
    most_graph_bytes: int
    floor_graph_bytes: int
    refused_graph_bytes: int
    kv_host_bytes: int
    core_bytes: int
    arena_bytes: int
    ring_bytes: int
    scratch_bytes: int
    floor_bytes: int
    full_bytes: int
    resident_bytes: int
    streamed_bytes: int
    cpu_bytes: int
    resident_shards: int
    streamed_shards: int
    cpu_shards: int
    graphs: int
    steps: int
    copies: int
    copied_bytes: int
    kv_copied_bytes: int
    cpu_segments: int
    evicted_slabs: int
    filled_slabs: int
    recompiles: int
    expert_hits: int
    experts_streamed: int
    experts_on_cpu: int
    experts_ahead: int
    experts_again: int
    budget_generation: int
    copy_busy_s: float
    cpu_busy_s: float
    cpu_read_bytes: int
    host_weights: HostPath
    imported_bytes: int
    staged_bytes: int
    image_floor_bytes: int
    host_budget_bytes: int
    host_used_bytes: int
    host_floor_bytes: int
    host_weights_bytes: int
    disk_read_bytes: int
    disk_waited_s: float
    disk_expert_reads: int
    lacks_workspaces: bool
    host_mapped: bool


def _c_type(name: str, annotation: str) -> Any:
    if annotation == "float":
        return ctypes.c_double
    return ctypes.c_uint32 if annotation in ("bool", "HostPath") or name.endswith("_shards") else ctypes.c_uint64


class _Stats(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((f.name, _c_type(f.name, str(f.type))) for f in dataclasses.fields(Stats)),
    )


@record
class MachineRates:
    """Rates that depend only on the machine, in bytes/s and seconds. ``fsd_machine_rates`` describes each."""

    threads: tuple[int, ...]
    piece_bytes: tuple[int, ...]
    h2d: tuple[float, ...]
    h2d_pinned: tuple[float, ...]
    h2d_pageable: tuple[float, ...]
    d2h_pinned: tuple[float, ...]
    d2h_pageable: tuple[float, ...]
    dram: tuple[float, ...]
    dram_beside_copies: tuple[float, ...]
    handoff_s: float
    kernel_s: float


@record
class ProductRates:
    """Rates of products with one kind of weights, in FLOP/s and bytes/s. ``fsd_product_rates`` describes each."""

    tokens: tuple[int, ...]
    cpu_flops: tuple[float, ...]
    gpu_flops: tuple[float, ...]
    cpu_beside_copies: float
    h2d_beside_cpu: float


@record
class AttentionRates:
    """Rates of flash attention; 0 if the device cannot do it. ``fsd_attention_rates`` describes each."""

    kv_bytes: float
    flops: float


@record
class LookRates:
    """Rates of a quick look, in FLOP/s and bytes/s. ``fsd_look_rates`` describes each."""

    tokens: tuple[int, ...]
    h2d: float
    cpu_flops: tuple[float, ...]
    gpu_flops: tuple[float, ...]


class ProbeStopped(Exception):
    """:meth:`ShardDevice.stop_probe` or a change of the budget has ended a measurement."""


@record
class Pacing:
    """How the device's work is paced by the host's frames. ``fsd_pacing`` describes each figure."""

    pacing: bool
    frames: int
    late_frames: int
    frame_time_s: float
    target_frame_s: float
    longest_step_s: float
    waited_s: float
    share: float
    gpu_busy_s: float


class _Pacing(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        *((f.name, _c_type(f.name, str(f.type))) for f in dataclasses.fields(Pacing)),
    )


SCHEDULING_MODES = ("prioritize_graphics", "balance", "prioritize_compute")


_PIECES, _THREADS, _BATCHES, _LOOK_BATCHES = 4, 3, 5, 3


class _MachineRates(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("threads", ctypes.c_uint32 * _THREADS),
        ("piece_bytes", ctypes.c_uint64 * _PIECES),
        ("h2d", ctypes.c_double * _PIECES),
        ("h2d_pinned", ctypes.c_double * _PIECES),
        ("h2d_pageable", ctypes.c_double * _PIECES),
        ("d2h_pinned", ctypes.c_double * _PIECES),
        ("d2h_pageable", ctypes.c_double * _PIECES),
        ("dram", ctypes.c_double * _THREADS),
        ("dram_beside_copies", ctypes.c_double * _THREADS),
        ("handoff_s", ctypes.c_double),
        ("kernel_s", ctypes.c_double),
    )


class _ProductRates(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32 * _BATCHES),
        ("cpu_flops", ctypes.c_double * _BATCHES),
        ("gpu_flops", ctypes.c_double * _BATCHES),
        ("cpu_beside_copies", ctypes.c_double),
        ("h2d_beside_cpu", ctypes.c_double),
    )


class _AttentionRates(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("kv_bytes", ctypes.c_double),
        ("flops", ctypes.c_double),
    )


class _LookRates(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32 * _LOOK_BATCHES),
        ("h2d", ctypes.c_double),
        ("cpu_flops", ctypes.c_double * _LOOK_BATCHES),
        ("gpu_flops", ctypes.c_double * _LOOK_BATCHES),
    )


def _values(raw: ctypes.Structure) -> dict[str, Any]:
    """The fields of a struct by name; arrays become tuples."""
    values = {name: getattr(raw, name) for name, *_ in raw._fields_ if name != "struct_size"}
    return {name: tuple(value) if isinstance(value, ctypes.Array) else value for name, value in values.items()}


def check_llama_cpp_python() -> None:
    """Checks that the pinned version of llama-cpp-python is installed, because the plugin depends on its ABI.

    :raises VersionMismatch: it is another version.
    """
    import llama_cpp

    found = llama_cpp.__version__  # not by importlib.metadata, which takes long to import
    if found != LLAMA_CPP_PYTHON:
        raise errors.VersionMismatch(
            f"llama-cpp-python {found} is installed, frameshard needs {LLAMA_CPP_PYTHON}: "
            f"pip install llama-cpp-python=={LLAMA_CPP_PYTHON}",
            found=found,
            needed=LLAMA_CPP_PYTHON,
        )


def _library_path() -> Path:
    name = ggml.LIBRARY_FILE.format("frameshard_device")
    path = Path(os.environ.get("FRAMESHARD_DEVICE_LIB") or Path(__file__).parent / name)
    if not path.exists():
        raise errors.VersionMismatch(
            f"the shard device library {path.name} is not installed with the package: reinstall frameshard "
            "(pip install . in its source tree)"
        )
    return path


def check_library() -> None:
    """Checks that the plugin library loads and fits this package.

    :raises VersionMismatch: it does not.
    """
    _library()


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Loads the plugin library for functions that need no device, without registering it with ggml."""
    check_llama_cpp_python()
    ggml.registry()
    path = _library_path()
    lib = ctypes.CDLL(str(path))
    lib.fsd_last_error.restype = ctypes.c_char_p
    if lib.fsd_interface_version() != INTERFACE_VERSION:
        raise errors.VersionMismatch(
            f"{path.name} speaks interface {lib.fsd_interface_version()}, this package {INTERFACE_VERSION}: "
            "reinstall frameshard"
        )
    return lib


def _load() -> tuple[ctypes.CDLL, int]:
    """Loads the plugin library and registers it with ggml.

    :returns: the library and ggml's handle of its device.
    """
    check_llama_cpp_python()
    registry = ggml.registry()
    path = _library_path()
    if not registry.ggml_backend_dev_by_name(b"FRAMESHARD0") and not registry.ggml_backend_load(str(path).encode()):
        raise errors.VersionMismatch(
            f"ggml refused {path.name}: it was built against another ggml than the one that runs; "
            f"reinstall frameshard against llama-cpp-python {LLAMA_CPP_PYTHON}"
        )
    return _library(), registry.ggml_backend_dev_by_name(b"FRAMESHARD0")


class WeightShape(NamedTuple):
    """A weight tensor from a GGUF header. ``shape`` is in ggml's order (contiguous dimension first); ``shard`` is the
    index of its shard in the ladder."""

    name: str
    shard: int
    ggml_type: int
    shape: Sequence[int]


class KvShape(NamedTuple):
    """A tensor of a layer's KV cache. Keys and values are two tensors, with a stream for each sequence. A recurrent
    state has one stream, with a cell for each sequence.

    ``row`` is the number of values in a cell, ``cells`` the cells of each stream, ``streams`` the number of streams,
    and ``used`` the cells in use of each stream."""

    layer: int
    ggml_type: int
    row: int
    cells: int
    streams: int
    used: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The pieces and slabs of a model on the shard device, and the VRAM it needs, in bytes. ``fsd_layout`` describes
    each figure.

    ``slabs`` has the size of each slab, in the order of the ladder. The ``piece_*`` arrays have one value for each
    piece, in the order of the ladder: the index of its weight in the call, its shard, its slab, and its bytes on the
    device.
    """

    prefill_tokens: int
    unit_bytes: int
    piece_bytes: int
    step_bytes: int
    slab_bytes: int
    min_ring_bytes: int
    arena_bytes: int
    core_bytes: int
    scratch_bytes: int
    fixed_bytes: int
    kv_window_bytes: int
    kv_bytes: int
    kv_used_bytes: int
    floor_bytes: int
    full_bytes: int
    weights_beside_kv_bytes: int
    expert_slots_passing: int
    pool_share: float
    slabs: NDArray[np.int64] = dataclasses.field(repr=False)
    piece_weights: NDArray[np.int64] = dataclasses.field(repr=False)
    piece_shards: NDArray[np.int64] = dataclasses.field(repr=False)
    piece_slabs: NDArray[np.int64] = dataclasses.field(repr=False)
    piece_padded_bytes: NDArray[np.int64] = dataclasses.field(repr=False)

    def fit(self, room_bytes: int, wanted_ring_bytes: int) -> tuple[int, int]:
        """Divides VRAM between the ring and resident slabs.

        :param room_bytes: VRAM without the fixed part and the KV cache.
        :param wanted_ring_bytes: size of the ring, if not everything can be resident.
        :returns: bytes of the ring, 0 if everything is resident; the number of resident slabs.
        :raises BudgetBelowFloor: there is room neither for all slabs nor for the smallest ring.
        """
        ring, n_slabs = ctypes.c_uint64(), ctypes.c_size_t()
        sizes = (max(room_bytes, 0), wanted_ring_bytes, self.min_ring_bytes, self.unit_bytes)
        status = _library().fsd_fit(
            *(ctypes.c_uint64(size) for size in sizes),
            self.slabs.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(self.slabs)),
            ctypes.byref(ring),
            ctypes.byref(n_slabs),
        )
        if status == _BELOW_FLOOR:
            text = _library().fsd_last_error().decode()
            raise errors.BudgetBelowFloor(text, budget_bytes=room_bytes, floor_bytes=self.min_ring_bytes)
        if status != 0:
            raise errors.BadArgument(_library().fsd_last_error().decode())
        return ring.value, n_slabs.value


_BELOW_FLOOR = 5


class _WeightShape(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shard", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("ne", ctypes.c_int64 * 4),
    )


class _KvShape(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("row", ctypes.c_int64),
        ("cells", ctypes.c_int64),
        ("streams", ctypes.c_int64),
        ("used", ctypes.c_int64),
    )


class _LayoutRequest(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("inner_device", ctypes.c_char_p),
        ("piece_bytes", ctypes.c_uint64),
        ("step_bytes", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_uint64),
        ("weights", ctypes.POINTER(_WeightShape)),
        ("n_weights", ctypes.c_size_t),
        ("kv", ctypes.POINTER(_KvShape)),
        ("n_kv", ctypes.c_size_t),
        ("buffers", ctypes.POINTER(ctypes.c_uint64)),
        ("n_buffers", ctypes.c_size_t),
        ("overhead_bytes", ctypes.c_uint64),
    )


_LAYOUT_SIZES = tuple(f.name for f in dataclasses.fields(Layout) if f.type == "int")


class _Layout(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("prefill_tokens", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in _LAYOUT_SIZES[1:-1]),
        ("expert_slots_passing", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("pool_share", ctypes.c_double),
        ("n_slabs", ctypes.c_size_t),
        ("n_pieces", ctypes.c_size_t),
    )


_PIECE = np.dtype(
    [("weight", "u4"), ("shard", "u4"), ("slab", "u4"), ("bytes", "u8"), ("padded_bytes", "u8")], align=True
)


def lay_out(
    inner: str,
    weights: Sequence[WeightShape],
    *,
    kv: Sequence[KvShape] = (),
    buffers: Sequence[int] = (),
    overhead_bytes: int = 0,
    piece_bytes: int = 0,
    step_bytes: int = 0,
    slab_bytes: int = 0,
) -> Layout:
    """Computes the layout of a model without a device, from the shapes in its GGUF header.

    It is the layout that :meth:`ShardDevice.commit` makes. With the same arguments the device's ``floor_bytes``,
    ``full_bytes``, ``core_bytes`` and ``scratch_bytes`` are the same numbers. Only the caller's arguments may be
    estimates: for example, the sizes of compute buffers are known only when there is a llama context.

    :param inner: name of the inner device; this machine need not have it. ``"emulated"`` counts bytes, all others whole
        units of 2 MiB.
    :param weights: all weights that the device will hold. First those of the ladder, by shard, in the same order as for
        :meth:`ShardDevice.set_shards`; then those of the core, with the length of the ladder as their shard.
    :param kv: the KV cache and recurrent state, by layer.
    :param buffers: bytes of each of llama.cpp's compute buffers.
    :param overhead_bytes: VRAM of the driver's context and libraries.
    :param piece_bytes: as for :class:`ShardDevice`, like ``step_bytes`` and ``slab_bytes``. 0: a size that fits the
        model.
    :raises BadArgument: a shape is impossible, or shards are not in ascending order.
    """
    lib = _library()
    shapes = (_WeightShape * max(len(weights), 1))()
    for i, weight in enumerate(weights):
        ne = (*weight.shape, 1, 1, 1, 1)[:4]
        shapes[i] = _WeightShape(weight.name.encode(), weight.shard, weight.ggml_type, (ctypes.c_int64 * 4)(*ne))
    request = _LayoutRequest(
        struct_size=ctypes.sizeof(_LayoutRequest),
        inner_device=inner.encode(),
        piece_bytes=piece_bytes,
        step_bytes=step_bytes,
        slab_bytes=slab_bytes,
        weights=shapes,
        n_weights=len(weights),
        kv=(_KvShape * max(len(kv), 1))(*(_KvShape(*tensor) for tensor in kv)),
        n_kv=len(kv),
        buffers=(ctypes.c_uint64 * max(len(buffers), 1))(*buffers),
        n_buffers=len(buffers),
        overhead_bytes=overhead_bytes,
    )
    raw = _Layout(struct_size=ctypes.sizeof(_Layout))
    slabs, pieces = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=_PIECE)
    for _ in range(2):  # the first call returns the lengths of the arrays
        status = lib.fsd_lay_out(
            ctypes.byref(request),
            ctypes.byref(raw),
            slabs.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(slabs)),
            pieces.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(pieces)),
        )
        if status != 0:
            raise errors.BadArgument(lib.fsd_last_error().decode())
        if len(slabs) != raw.n_slabs or len(pieces) != raw.n_pieces:
            slabs, pieces = np.zeros(raw.n_slabs, dtype=np.int64), np.zeros(raw.n_pieces, dtype=_PIECE)
    columns = {name: pieces[name].astype(np.int64) for name in ("weight", "shard", "slab", "padded_bytes")}
    return Layout(
        **{name: getattr(raw, name) for name in _LAYOUT_SIZES},
        pool_share=raw.pool_share,
        slabs=slabs,
        piece_weights=columns["weight"],
        piece_shards=columns["shard"],
        piece_slabs=columns["slab"],
        piece_padded_bytes=columns["padded_bytes"],
    )


class _Span(ctypes.Structure):
    _fields_ = (
        ("lane", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("start_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
        ("bytes", ctypes.c_uint64),
    )


LANES = ("copy", "device", "cpu")


@record
class Span:
    """One operation in a time line. ``lane`` is one of :data:`LANES`, times are seconds of a monotonic clock, and
    ``n_bytes`` are the bytes of weights that it copies or reads."""

    lane: str
    start_s: float
    end_s: float
    n_bytes: int


class Device(NamedTuple):
    """A device's name from the options, split. ``inner`` is the name of the inner device. ``link_gbps`` and
    ``disk_gbps`` are rates of the emulated device in 1e9 bytes/s: of copies, and of reads of weights from disk; 0 is
    unlimited."""

    inner: str
    link_gbps: float = 0.0
    disk_gbps: float = 0.0


def parse_device(device: str) -> Device:
    """Splits a device's name from the options.

    :param device: for example ``CUDA0``, ``emulated``, ``emulated:25`` for an emulated device that copies at most 25e9
        bytes/s, or ``emulated:25:3`` for one whose disk also reads at most 3e9 bytes/s.
    :raises BadArgument: a rate is not a number above 0.
    """
    name, *rates = device.split(":")
    if name != EMULATED or not rates:
        return Device(device)
    try:
        numbers = [float(rate) for rate in rates]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0.0 < rate <= 1e6 for rate in numbers):
        raise errors.BadArgument(
            f"device {device!r}: after emulated: come a copy rate above 0, as in emulated:25 for 25e9 bytes/s, and if"
            " wanted a disk's rate, as in emulated:25:3",
            field="device",
        )
    return Device(name, *numbers)


class ShardDevice:
    """The shard device over one inner device: ``emulated``, ``emulated:25`` (see :func:`parse_device`) or a ggml device
    such as ``CUDA0``.

    :param vram_budget_bytes: the limit for everything that the process holds in VRAM; 0 for no limit.
    :param piece_bytes: largest piece; 0 for a size that fits the model, like ``step_bytes`` and ``slab_bytes``. These
        sizes cannot be changed later.
    :param copy_bytes: size of one transfer to the inner device. Large transfers are quicker. With small ones the host's
        own copies wait less: 16 MiB take 0.3 ms on PCIe 5 x16 and 1.3 ms on a laptop's PCIe 4 x8. While the host writes
        frames, a transfer has at most 4 MiB.
    :raises UnknownDevice: there is no such device.
    :raises VersionMismatch: the installed llama-cpp-python is not the pinned one.
    :raises BadArgument: an argument has a wrong value.
    """

    def __init__(
        self,
        inner: str,
        *,
        vram_budget_bytes: int,
        n_threads: int,
        emulated_vram_bytes: int = 0,
        piece_bytes: int = 0,
        step_bytes: int = 0,
        slab_bytes: int = 0,
        copy_bytes: int = 16 << 20,
    ) -> None:
        self._lib, handle = _load()
        self.parked = False
        """Between :meth:`park` and :meth:`unpark`."""
        self.inner, link_gbps, disk_gbps = parse_device(inner)
        ggml.load_module_of(self.inner)
        config = _Config(
            struct_size=ctypes.sizeof(_Config),
            inner_device=self.inner.encode(),
            budget_bytes=vram_budget_bytes,
            n_threads=n_threads,
            piece_bytes=piece_bytes,
            step_bytes=step_bytes,
            slab_bytes=slab_bytes,
            copy_bytes=copy_bytes,
            emulated_link_gbps=link_gbps,
            emulated_vram_bytes=emulated_vram_bytes,
            emulated_disk_gbps=disk_gbps,
        )
        self._check(self._lib.fsd_configure(ctypes.byref(config)))
        self.devices_array = (ctypes.c_void_p * 2)(handle, None)

    def __repr__(self) -> str:
        s = self.stats()
        return f"<ShardDevice {self.inner} used={s.used_bytes >> 20} MiB of {s.budget_bytes >> 20} MiB>"

    def _check(self, status: int, budget: int | None = None) -> None:
        if status == 0:
            return
        text = self._lib.fsd_last_error().decode()
        if status == 3:
            raise errors.UnknownDevice(text, devices=["cpu", EMULATED, *ggml.gpu_devices()])
        if status == 4:
            raise errors.VersionMismatch(text)
        if status == 5:
            stats = self.stats()
            raise errors.below_floor(stats.budget_bytes if budget is None else budget, stats.floor_bytes)
        if status == 10:
            stats = self.stats()
            wanted = stats.host_budget_bytes if budget is None else budget
            raise errors.BudgetBelowFloor(text, budget_bytes=wanted, floor_bytes=stats.host_floor_bytes)
        if status == 6:
            raise errors.OutOfMemory(text)
        if status == 7:
            raise errors.DeadlineMissed(text)
        if status == 9:
            raise errors.Unsupported(text)
        raise errors.BadArgument(text) if status == 1 else errors.FrameshardError(text)

    def set_shards(self, shards: Sequence[Sequence[str]]) -> None:
        """Sets the ladder.

        :param shards: the names of the tensors of each shard. The last shard is evicted first.
        """
        rows = [(name.encode(), i) for i, names in enumerate(shards) for name in names]
        array = (_ShardTensor * max(len(rows), 1))(*(_ShardTensor(*row) for row in rows))
        self._check(self._lib.fsd_set_shards(array, ctypes.c_size_t(len(rows)), ctypes.c_uint32(len(shards))))

    def commit(self) -> None:
        """Takes the VRAM that the model needs at any budget.

        :raises BudgetBelowFloor: the budget, or the limit on host memory, is too small.
        :raises OutOfMemory: the inner device refuses the memory.
        """
        self._check(self._lib.fsd_commit())

    def set_floor_graphs(self, n_bytes: int) -> None:
        """Sets how many bytes of llama.cpp's compute buffers the floor has room for. Larger graphs run while the budget
        has room for them. Call it once the context exists."""
        self._check(self._lib.fsd_set_floor_graphs(ctypes.c_uint64(n_bytes)))

    def set_async(self, on: bool) -> None:
        """While ``on``, llama_decode returns once its graph has started. If that fails, the next llama_decode fails in
        its place; :meth:`end_graph` waits for it and forgets its failure."""
        self._check(self._lib.fsd_set_async(ctypes.c_int(on)))

    def end_graph(self) -> None:
        """Call it after each decode, once its results were read: a smaller budget may wait for that."""
        self._check(self._lib.fsd_end_graph())

    def park(self) -> None:
        """Frees all VRAM except for the driver's own. The KV cache moves to host memory. No decode may run before
        :meth:`unpark`.

        :raises OutOfMemory: host memory has no room for the KV cache. The device is not parked.
        """
        self._check(self._lib.fsd_park())
        self.parked = True

    def unpark(self) -> None:
        """Takes the VRAM again, within the budget in force. After an error the device stays parked.

        :raises BudgetBelowFloor: the budget is too small.
        :raises OutOfMemory: the inner device refuses the memory.
        """
        self._check(self._lib.fsd_unpark())
        self.parked = False

    def memory(self) -> tuple[int, int]:
        """Any thread: the free and the total bytes of the inner device's memory."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._check(self._lib.fsd_get_memory(ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def take_pinned(self, n_bytes: int) -> NDArray[np.uint8] | None:
        """Any thread: host memory that the device copies from and to at the link's full rate. Its contents are
        undefined. It is freed when nothing refers to it any more.

        :returns: shape [n_bytes]; None if the device has no such memory, or no more of it.
        """
        memory, data = ctypes.c_void_p(), ctypes.c_void_p()
        if self._lib.fsd_take_pinned(ctypes.c_uint64(n_bytes), ctypes.byref(memory), ctypes.byref(data)) != 0:
            return None
        assert data.value is not None
        taken = (ctypes.c_uint8 * n_bytes).from_address(data.value)
        weakref.finalize(taken, self._lib.fsd_free_pinned, memory).atexit = False  # the driver may have ended by then
        return np.ctypeslib.as_array(taken)

    def open_frame_block(self, path: str | None) -> None:
        """Any thread: opens the frame block at ``path``, and paces work by the frames in it. ``None`` closes it.

        :raises BadArgument: it cannot be opened.
        """
        self._check(self._lib.fsd_open_frame_block(None if path is None else os.fsencode(path)))

    def poll_frame_block(self) -> int:
        """Any thread: if no graph runs, applies a budget that the host has written into the frame block. Writes the
        present figures into it. Call it every few milliseconds.

        :returns: the generation of the latest budget in it that came into force, also during a graph; 0: none.
        """
        generation = ctypes.c_uint64()
        self._check(self._lib.fsd_poll_frame_block(ctypes.byref(generation)))
        return generation.value

    def set_scheduling_mode(self, mode: str) -> None:
        """Any thread: sets how the device shares the GPU with the host's frames.

        :param mode: one of :data:`SCHEDULING_MODES`.
        """
        self._check(self._lib.fsd_set_scheduling_mode(ctypes.c_int(SCHEDULING_MODES.index(mode))))

    def pacing(self) -> Pacing:
        """Any thread: the present pacing."""
        raw = _Pacing(struct_size=ctypes.sizeof(_Pacing))
        self._check(self._lib.fsd_get_pacing(ctypes.byref(raw)))
        values = {f.name: getattr(raw, f.name) for f in dataclasses.fields(Pacing)}
        return Pacing(**{**values, "pacing": bool(values["pacing"])})

    def set_plan(
        self,
        tiers: Sequence[tuple[int, Sequence[int]]],
        ring_bytes: int,
        expert_stream_share: float = 0.0,
        *,
        exact: bool = True,
    ) -> None:
        """Sets the plan.

        :param tiers: for each the fewest tokens of a graph, and the placement of each shard while it is not resident.
            Ascending, starting with 0 tokens.
        :param ring_bytes: size of the ring; 0 for no change.
        :param expert_stream_share: from 0 to 1. It concerns single experts on the CPU: this share of them is copied to
            the device instead.
        :param exact: gives the same bits at every budget, if no shard is on the CPU. If false, the device may fuse
            operations.
        """
        n_shards = len(tiers[0][1]) if tiers else 0
        if any(len(p) != n_shards for _, p in tiers):
            raise errors.BadArgument("every tier needs one placement for each shard")
        placements = [(ctypes.c_uint8 * max(n_shards, 1))(*p) for _, p in tiers]
        array = (_Tier * max(len(tiers), 1))()
        for i, (least, _) in enumerate(tiers):
            array[i] = _Tier(least, ctypes.cast(placements[i], ctypes.POINTER(ctypes.c_uint8)))
        self._check(
            self._lib.fsd_set_plan(
                array,
                ctypes.c_size_t(len(tiers)),
                ctypes.c_uint32(n_shards),
                ctypes.c_uint64(ring_bytes),
                ctypes.c_double(expert_stream_share),
                ctypes.c_int(exact),
            )
        )

    def set_budget(self, vram_budget_bytes: int, timeout_s: float = 5.0, known_generation: int | None = None) -> None:
        """Any thread, also while a graph runs: sets the budget. Returns when at most ``vram_budget_bytes`` are in use,
        or when a later budget has replaced it.

        :param known_generation: if the frame block has had a later budget than this one, that one stays. None: the
            budget replaces any.
        :raises BudgetBelowFloor: the budget is too small; nothing changes.
        :raises DeadlineMissed: more was in use after ``timeout_s`` seconds. The budget stays in force.
        """
        known = 2**64 - 1 if known_generation is None else known_generation
        arguments = ctypes.c_uint64(vram_budget_bytes), ctypes.c_uint64(known), ctypes.c_double(timeout_s)
        self._check(self._lib.fsd_set_own_budget(*arguments), vram_budget_bytes)

    def set_host_budget(self, host_budget_bytes: int, timeout_s: float = 5.0) -> None:
        """Any thread, also while a graph runs: limits the host memory that the device holds; 0 for no limit. Returns
        when at most ``host_budget_bytes`` are in use, or when a later limit has replaced it. Before :meth:`commit` the
        floor is not known, so :meth:`commit` checks the limit.

        :raises BudgetBelowFloor: the limit is below ``host_floor_bytes``; nothing changes.
        :raises DeadlineMissed: more was in use after ``timeout_s`` seconds. The limit stays in force.
        """
        status = self._lib.fsd_set_host_budget(ctypes.c_uint64(host_budget_bytes), ctypes.c_double(timeout_s))
        self._check(status, host_budget_bytes)

    def use_kv(self, sequence: int, cells: int) -> None:
        """Takes room for ``cells`` tokens of a sequence. Room that is not needed any more is freed by :meth:`fill`.

        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        self._check(self._lib.fsd_use_kv(ctypes.c_uint32(sequence), ctypes.c_uint64(cells)))

    def fill(self, max_bytes: int = 2**63) -> int:
        """Makes more weights resident, if the budget has room. Call it between decodes.

        :param max_bytes: about the most bytes to copy.
        :returns: the bytes whose copies were started.
        """
        filled = ctypes.c_uint64()
        self._check(self._lib.fsd_fill(ctypes.c_uint64(max_bytes), ctypes.byref(filled)))
        return filled.value

    def add_spare(self) -> int:
        """Takes spare host memory for one block of the KV cache that is in VRAM, so that a smaller budget need not wait
        for it, or clears what an older layout has left there. The system may need 0.1 s. Call it in idle moments.

        :returns: its bytes; 0 when there is no more to do.
        """
        taken = ctypes.c_uint64()
        self._check(self._lib.fsd_add_spare(ctypes.byref(taken)))
        return taken.value

    def expert_uses(self, shard: int, n_expert: int) -> list[int]:
        """How often the router of a layer has recently chosen each expert. Call it between decodes.

        :param shard: the index of the layer's experts in the ladder.
        :returns: a count for each expert; empty if there are none yet.
        """
        uses = (ctypes.c_uint32 * n_expert)()
        n = ctypes.c_size_t()
        self._check(
            self._lib.fsd_get_expert_uses(ctypes.c_uint32(shard), uses, ctypes.c_size_t(n_expert), ctypes.byref(n))
        )
        return list(uses) if n.value else []

    def set_expert_uses(self, shard: int, uses: Sequence[int]) -> None:
        """Replaces the counts of :meth:`expert_uses` with those of an earlier run. Call it between decodes."""
        array = (ctypes.c_uint32 * len(uses))(*uses)
        self._check(self._lib.fsd_set_expert_uses(ctypes.c_uint32(shard), array, ctypes.c_size_t(len(uses))))

    def clear_expert_cache(self) -> None:
        """Empties the expert cache, so that its effect can be measured. Call it between decodes."""
        self._check(self._lib.fsd_clear_expert_cache())

    def set_overhead(self, overhead_bytes: int) -> None:
        """Sets the VRAM that the process holds besides the device's own allocations: driver context and library
        workspaces.

        :raises BudgetBelowFloor: with this overhead the budget is below the floor.
        """
        self._check(self._lib.fsd_set_overhead(ctypes.c_uint64(overhead_bytes)))

    def set_abort(self, on: bool) -> None:
        """Any thread: while ``on``, graphs stop at their next step, and llama_decode returns 2."""
        self._check(self._lib.fsd_set_abort(ctypes.c_int(on)))

    def stats(self) -> Stats:
        """Any thread: the present figures."""
        raw = _Stats(struct_size=ctypes.sizeof(_Stats))
        if self._lib.fsd_get_stats(ctypes.byref(raw)) != 0:
            raise errors.VersionMismatch("the shard device library and this package do not belong together: reinstall")
        values = {f.name: getattr(raw, f.name) for f in dataclasses.fields(Stats)}
        flags = {name: bool(values[name]) for name in ("lacks_workspaces", "host_mapped")}
        return Stats(**{**values, **flags, "host_weights": HostPath(values["host_weights"])})

    def reset_peak(self) -> None:
        """Resets ``peak_bytes`` to the bytes in use."""
        self._check(self._lib.fsd_reset_peak())

    def start_trace(self) -> None:
        """Starts to record a time line of graphs, until :meth:`stop_trace`.

        :raises Unsupported: Vulkan cannot record one.
        """
        self._check(self._lib.fsd_trace_start())

    def stop_trace(self) -> list[Span]:
        """Ends the recording.

        :returns: the time line since :meth:`start_trace`, in the order of start times.
        """
        room = 1 << 20
        spans = (_Span * room)()
        found = ctypes.c_size_t()
        self._check(self._lib.fsd_trace_stop(spans, ctypes.c_size_t(room), ctypes.byref(found)))
        return [Span(LANES[s.lane], s.start_s, s.end_s, s.bytes) for s in spans[: min(found.value, room)]]

    def probe_machine(self, seconds: float) -> MachineRates:
        """Measures copies, host memory and hand-offs in about ``seconds``.

        :raises OutOfMemory: there is no room for the measurement.
        :raises ProbeStopped: it was stopped.
        """
        raw = _MachineRates(struct_size=ctypes.sizeof(_MachineRates))
        self._probed(self._lib.fsd_probe_machine(ctypes.c_double(seconds), ctypes.byref(raw)))
        return MachineRates(**_values(raw))

    def probe_product(
        self, ggml_type: int, rows: int, cols: int, seconds: float, *, n_expert: int = 0, n_used: int = 0
    ) -> ProductRates:
        """Measures products with weights of one type and shape, on the CPU and the inner device.

        :param rows: of the matrix; for experts, of the ``n_used`` that a token uses together.
        :param n_expert: the experts of which each token uses ``n_used``; 0 for other weights.
        :raises OutOfMemory: there is no room for the measurement.
        :raises ProbeStopped: it was stopped.
        :raises BadArgument: the type or the shape is impossible.
        """
        raw = _ProductRates(struct_size=ctypes.sizeof(_ProductRates))
        shape = (ctypes.c_int(ggml_type), *(ctypes.c_int64(n) for n in (rows, cols, n_expert, n_used)))
        self._probed(self._lib.fsd_probe_product(*shape, ctypes.c_double(seconds), ctypes.byref(raw)))
        return ProductRates(**_values(raw))

    def probe_attention(
        self, head_dim: int, n_head: int, n_head_kv: int, ggml_type: int, n_cells: int, seconds: float
    ) -> AttentionRates:
        """Measures attention on the inner device, with ``n_cells`` KV cells of one type.

        :param n_cells: a multiple of 256.
        :raises BadArgument: an argument has a wrong value.
        :raises ProbeStopped: it was stopped.
        """
        raw = _AttentionRates(struct_size=ctypes.sizeof(_AttentionRates), type=ggml_type)
        shape = (ctypes.c_int64(n) for n in (head_dim, n_head, n_head_kv, n_cells))
        self._probed(self._lib.fsd_probe_attention(*shape, ctypes.c_double(seconds), ctypes.byref(raw)))
        return AttentionRates(raw.kv_bytes, raw.flops)

    def look(self, ggml_type: int, rows: int, cols: int) -> LookRates:
        """Measures copies and a few products in a fraction of a second. Raises the errors of :meth:`probe_product`."""
        raw = _LookRates(struct_size=ctypes.sizeof(_LookRates))
        shape = (ctypes.c_int(ggml_type), ctypes.c_int64(rows), ctypes.c_int64(cols))
        self._probed(self._lib.fsd_probe_look(*shape, ctypes.byref(raw)))
        return LookRates(**_values(raw))

    def stop_probe(self, on: bool) -> None:
        """Any thread. While on, measurements end with :class:`ProbeStopped`: a running one within milliseconds, after
        the operation that it measures."""
        self._check(self._lib.fsd_stop_probe(ctypes.c_int(on)))

    def _probed(self, status: int) -> None:
        if status == 8:
            raise ProbeStopped
        self._check(status)
