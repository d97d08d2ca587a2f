"""One loaded model and what its sequences hold. Calls into llama.cpp are made in ``llama``, ``tokenizer`` and
``sampling`` alone.

Guarantees: a :class:`Runtime` belongs to the thread that made it, except for what says [any thread]; what a sequence
holds is known exactly after every call, also after an aborted one.

Each sequence has KV cells of its own (``kv_unified`` off). A unified cache would let one conversation use the room of
all, but then the cells of a sequence, and with them the order in which attention adds up, depend on what other
sequences do: the same text could not be promised. So every sequence has room for ``n_ctx`` tokens, and llama.cpp's own
``n_ctx`` is that times ``n_parallel``. VRAM is taken for the cells in use alone. An unused context costs its mask in
the compute buffers, and the KV window for one layer in the floor.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import cpu
from frameshard.cpu import default_threads
from frameshard.engine import llamalog
from frameshard.engine.llama import DecodeAborted, Llama, Rows
from frameshard.engine.nvml import Observer
from frameshard.engine.placement import Placement
from frameshard.engine.schema import Schemas
from frameshard.engine.tokenizer import Tokenizer
from frameshard.errors import BadModel, ContextOverflow
from frameshard.native import EMULATED, ShardDevice, device_handle, gpu_devices, parse_device
from frameshard.plan.memory import check_kv_type, logits_rows
from frameshard.plan.model import Model, read_model
from frameshard.plan.ubatch import PLAIN_UBATCH
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

STOCK = "stock:"
"""Before a device's name: llama.cpp uses it without the shard device."""


class Runtime:
    """A loaded model with its context. Make it with :meth:`load`; a context manager that closes it."""

    def __init__(self, config: EngineConfig) -> None:
        """Nothing is loaded yet; use :meth:`load`."""
        self.config = config
        self.device: ShardDevice | None = None
        """The shard device; ``None`` on the CPU."""
        self.placement: Placement | None = None
        """What the shard device does with each shard; ``None`` on the CPU."""
        self.device_name = ""
        self.observer: Observer | None = None
        """NVML's view of this process; only for a real GPU."""
        self._llama: Llama | None = None
        self._tokenizer: Tokenizer | None = None
        self._schemas: Schemas | None = None
        self._abort = False
        self._nodes = 0

    @classmethod
    def load(
        cls, config: EngineConfig, *, budgets: Sequence[int] = (), n_prompt: int = 0, fill: bool = True
    ) -> Runtime:
        """Checks the file, loads the model, makes the context, takes the VRAM and decodes one token.

        Where ``config.n_ubatch`` is 0, that is chosen for a prompt of ``n_prompt`` tokens in each sequence at each of
        ``budgets``; without these, for ``config.vram_budget_bytes`` and what it may shrink to.

        :param fill: make weights resident.
        :raises ModelNotFound: no such file.
        :raises BadModel: not a GGUF that can be served.
        :raises Unsupported: a model of a kind that cannot chat or complete (encoder, diffusion), or that has no KV
            cache of type ``config.kv_type``.
        :raises UnknownDevice: no such device.
        :raises BudgetBelowFloor: the budget is too small for this model and context; the error names the floor.
        :raises OutOfMemory: the device or the host refuses the memory.
        """
        runtime = cls(config)
        try:
            runtime._load(budgets, n_prompt, fill)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _load(self, budgets: Sequence[int], n_prompt: int, fill: bool) -> None:
        config = self.config
        llamalog.install()
        self.model_info: Model = read_model(config.model)
        check_kv_type(self.model_info, config.kv_type)
        # What was checked must be what is served: the file is held open and compared before each job.
        self._file = open(config.model, "rb")  # noqa: SIM115 - closed by close()
        self._file_state = _state(os.fstat(self._file.fileno()))
        self.n_threads = config.n_threads or default_threads()
        device = resolve_device(config.device)
        self.device_name, _ = parse_device(device)
        size_mib = -(-self.model_info.file_bytes >> 20)
        logger.info("loading %s (%d MiB) on %s", os.path.basename(config.model), size_mib, self.device_name)

        cpu.check()
        llama_cpp.llama_backend_init()
        llama = self._llama = Llama(self.model_info, self._open_device(device))
        tokenizer = self._tokenizer = Tokenizer(llama.model, self.model_info.chat_template)
        self._schemas = Schemas(tokenizer.grammar_tokens)
        self.n_vocab = tokenizer.n_vocab
        if not config.n_ubatch:
            chosen = self.placement.choose_ubatch(budgets, n_prompt) if self.placement else PLAIN_UBATCH
            config = self.config = replace(config, n_ubatch=max(chosen, config.n_parallel))
        rows = logits_rows(config.n_parallel, config.n_ubatch, can_speculate=self.can_speculate)
        # Counting nodes shows that a long decode on the CPU moves. It costs 2 % of a token of a 135M model, less of
        # others.
        counter = None if self.device is not None else llama_cpp.ggml_abort_callback(lambda _: self.on_node())
        llama.make_context(config, self.n_threads, config.n_outputs_max or rows, counter)
        self.n_ctx_seq, self.n_ubatch, self.n_outputs_max = llama.n_ctx_seq, llama.n_ubatch, llama.n_outputs_max
        self._lengths = [0] * config.n_parallel
        if self.placement is not None:
            self.placement.start(llama, self._lengths)
        self._warm_up()
        if self.placement is not None:
            self.placement.settle(fill=fill)

    def _open_device(self, device: str) -> ctypes.Array[ctypes.c_void_p]:
        """Makes the shard device where there is one.

        :returns: the devices on which llama.cpp puts the model.
        """
        if device == "cpu":
            return (ctypes.c_void_p * 1)(None)  # an empty list: otherwise llama.cpp takes every GPU that it finds
        if device.startswith(STOCK):
            return (ctypes.c_void_p * 2)(device_handle(device[len(STOCK) :]), None)
        if self.device_name != EMULATED:
            self.observer = Observer()
        config = self.config
        self.device = ShardDevice(device, vram_budget_bytes=config.vram_budget_bytes, n_threads=self.n_threads)
        self.placement = Placement(self.device, device, self.model_info, config, self.n_threads, self.observer)
        devices: ctypes.Array[ctypes.c_void_p] = self.device.devices_array
        return devices

    def _warm_up(self) -> None:
        """A model whose first decode fails must fail here, not in a job. On a GPU a graph of the largest size runs,
        too: drivers allocate workspaces at first use, and that must happen while the arena is still empty.

        :raises BadModel: its logits are not finite.
        """
        token = self.tokenizer.first_token
        if self.observer is not None:
            n_seq = min(-(-self.n_ubatch // (self.n_ctx_seq - 1)), self.config.n_parallel)
            each = [token] * min(self.n_ubatch // n_seq, self.n_ctx_seq - 1)
            self.decode([Rows(seq, each) for seq in range(n_seq)])
            for seq in range(n_seq):
                self.clear(seq)
        if not self.computes(0):
            raise BadModel(
                f"{self.config.model} computes NaN or infinity on {self.device_name}: its weights are damaged, or its"
                " numbers do not fit them",
                path=self.config.model,
            )

    def close(self) -> None:
        """Frees the context, then the model. Safe to call twice and after a failed load."""
        if self._tokenizer is not None:
            self._tokenizer.close()
        if self._schemas is not None:
            self._schemas.close()
        if self._llama is not None:
            self._llama.close()
        if hasattr(self, "_file"):
            self._file.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def llama(self) -> Llama:
        """The model and context in llama.cpp, for a sampler or a vision tower."""
        assert self._llama is not None
        return self._llama

    @property
    def tokenizer(self) -> Tokenizer:
        """[any thread] Text to tokens and back."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def schemas(self) -> Schemas:
        """[any thread] Holds answers to JSON schemas."""
        assert self._schemas is not None
        return self._schemas

    @property
    def mode(self) -> str:
        """ "planned" or "stream_only"."""
        return self.config.mode if self.placement is None else self.placement.mode

    @property
    def vram_budget_bytes(self) -> int:
        """[any thread] The VRAM budget in force; 0 for no limit."""
        return 0 if self.placement is None else self.placement.vram_budget_bytes

    @property
    def can_speculate(self) -> bool:
        """Drafted tokens can be decoded: rejected ones can be removed from the cache, and there is a shard device,
        whose plan predicts the cost."""
        return self.config.speculate == "auto" and self.device is not None and self.llama.can_trim

    def check_file(self) -> None:
        """:raises BadModel: the model file was changed in place since it was loaded; its mapping cannot be trusted."""
        if _state(os.fstat(self._file.fileno())) != self._file_state:
            raise BadModel(f"{self.config.model} was changed while it was in use")

    # --- sequences ------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """Tokens that sequence ``seq`` holds."""
        return self._lengths[seq]

    def trim(self, seq: int, length: int) -> int:
        """Cuts sequence ``seq`` to its first ``length`` tokens.

        :returns: its length: ``length``, or 0 where the model's memory cannot be cut (recurrent state).
        """
        if length >= self._lengths[seq]:
            return self._lengths[seq]
        if length <= 0 or not self.llama.remove(seq, length):
            length = 0
            self.llama.remove(seq, 0)
        self._set_length(seq, length)
        return length

    def clear(self, seq: int) -> None:
        """Empties sequence ``seq``."""
        self.llama.remove(seq, 0)
        self._set_length(seq, 0)

    def advance(self, seq: int, positions: int) -> None:
        """Sequence ``seq`` has grown by ``positions`` in the context, by a decode that was not made here."""
        self._lengths[seq] += positions

    def expect(self, seq: int, length: int) -> None:
        """Sequence ``seq`` will soon hold ``length`` tokens: takes room for all of them at once.

        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        if self.placement is not None:
            self.placement.expect(seq, length)

    def _set_length(self, seq: int, length: int) -> None:
        self._lengths[seq] = length
        if self.placement is not None:
            self.placement.shrink(seq)

    # --- decoding -------------------------------------------------------------------------------------------------

    def decode(self, batch: Sequence[Rows]) -> list[int]:
        """Runs one batch of at most ``n_ubatch`` tokens.

        Rows of several sequences must come in ascending order of ``seq``: adjacent ones are computed together.

        :returns: the rows for :meth:`logits`, in the order of the batch.
        :raises DecodeAborted: :meth:`abort` was called.
        :raises ContextOverflow: a sequence is full; nothing was changed.
        :raises BadArgument: the batch is empty or too large, or a token id is impossible; nothing was changed.
        :raises FrameshardError: the device or llama.cpp failed. The runtime must not be used any more.
        """
        starts = [self._lengths[rows.seq] for rows in batch]
        for rows, start in zip(batch, starts, strict=True):
            if start + len(rows.tokens) > self.n_ctx_seq:
                raise ContextOverflow("the context is full", n_prompt=start + len(rows.tokens), n_ctx=self.n_ctx_seq)
        outputs = self.llama.fill_batch(batch, starts)
        for rows, start in zip(batch, starts, strict=True):
            self.expect(rows.seq, start + len(rows.tokens))
        try:
            self.llama.decode()
        except DecodeAborted:
            for rows in batch:
                # llama.cpp removed some of it or none; a recurrent state is lost either way
                before, self._lengths[rows.seq] = self._lengths[rows.seq], self.n_ctx_seq
                self.trim(rows.seq, before)
            raise
        for rows in batch:
            self._lengths[rows.seq] += len(rows.tokens)
        if self.placement is not None:
            self.placement.after_decode()
        return outputs

    def decode_tokens(self, seq: int, tokens: Sequence[int], logits: str = "last") -> npt.NDArray[np.float32]:
        """Appends ``tokens`` to sequence ``seq`` in chunks of ``n_ubatch``. Raises like :meth:`decode`.

        :param logits: as of :class:`Rows`; "all" needs a configuration with ``n_outputs_max`` of ``n_ubatch``.
        :returns: the logits asked for, shape [n, n_vocab].
        """
        out = []
        self.expect(seq, min(self._lengths[seq] + len(tokens), self.n_ctx_seq))
        for at in range(0, len(tokens), self.n_ubatch):
            chunk = tokens[at : at + self.n_ubatch]
            last = at + len(chunk) == len(tokens)
            want = logits if logits != "last" or last else "none"
            out += [self.logits(row).copy() for row in self.decode([Rows(seq, chunk, want)])]
        return np.stack(out) if out else np.empty((0, self.n_vocab), np.float32)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last decode, shape [n_vocab]; a view that the next decode overwrites."""
        return self.llama.logits(row)

    def is_finite(self, row: int) -> bool:
        """The largest logit of a row of the last decode is a number; NaN anywhere in the row makes it none."""
        return bool(np.isfinite(self.logits(row).max()))

    def computes(self, seq: int) -> bool:
        """One token alone, in the empty sequence ``seq``, gives finite logits. It did when the model was loaded: if
        not, the device has failed. Overwrites all rows and leaves ``seq`` empty.

        :raises DecodeAborted: :meth:`abort` was called.
        """
        (row,) = self.decode([Rows(seq, [self.tokenizer.first_token])])
        finite = self.is_finite(row)
        self.clear(seq)
        return finite

    # --- abort and progress ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """[any thread] The running decode, or else the next, ends with :class:`DecodeAborted`, until :meth:`resume`."""
        self._abort = True
        if self.device is not None:
            self.device.set_abort(True)

    def resume(self) -> None:
        """[any thread] Takes :meth:`abort` back."""
        if self._abort:
            self._abort = False
            if self.device is not None:
                self.device.set_abort(False)

    @property
    def aborted(self) -> bool:
        """[any thread] :meth:`abort` is in force."""
        return self._abort

    @property
    def progress(self) -> int:
        """[any thread] A number that changes while a decode makes progress. If it stands still, the decode is stuck."""
        return self._nodes + (0 if self.device is None else self.device.stats().steps)

    def on_node(self) -> bool:
        """For callbacks of computations on the CPU: counts progress, and is true when :meth:`abort` is in force."""
        self._nodes += 1
        return self._abort


def resolve_device(name: str) -> str:
    """The device that ``name`` stands for: ``auto`` is the first GPU, else the CPU, which the log says."""
    if name != "auto":
        return name
    found = gpu_devices()
    name = found[0] if found else "cpu"
    logger.warning("device auto: using %s", name)
    return name


def _state(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
