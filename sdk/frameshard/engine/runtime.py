"""One loaded model and its sequences. Only ``llama``, ``tokenizer`` and ``sampling`` call llama.cpp.

Guarantees: only the thread that made a :class:`Runtime` may use it, except for methods marked [any thread]. The number
of tokens in each sequence is known exactly after every call, also after an aborted one.

Each sequence has KV cells of its own (``kv_unified`` off). With a unified cache one conversation could use the room of
all. But the cells of a sequence, and so the order in which attention adds up, would depend on the other sequences, and
the same text could not be promised. So every sequence has room for ``n_ctx`` tokens, and llama.cpp's own ``n_ctx`` is
that times ``n_parallel``. Only cells in use take VRAM. Unused context costs two things: its mask in the compute
buffers, and in the floor the KV window for one layer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import cpu, models
from frameshard.cpu import default_threads
from frameshard.engine import gpus, hostcount, llamalog
from frameshard.engine.adapters import Adapter, Adapters
from frameshard.engine.forms import Forms
from frameshard.engine.llama import DecodeAborted, Llama, Memory, Rows, StepTooLarge, VramTaken
from frameshard.engine.observer import Observer, find_observer
from frameshard.engine.placement import OnLoading, Placement
from frameshard.engine.rates import Rates
from frameshard.engine.tokenizer import Tokenizer
from frameshard.errors import BadModel, BudgetBelowFloor, ContextOverflow, FrameshardError, OutOfMemory, Overloaded
from frameshard.ggml import device_handle, disable_early_kernels, start_llama_cpp
from frameshard.native import EMULATED, ShardDevice, parse_device
from frameshard.plan.adapter import AdapterFile, read_adapter, vram_bytes
from frameshard.plan.layout import lay_out
from frameshard.plan.memory import (
    check_context,
    check_kv_type,
    check_sequences,
    estimate_floor,
    floor_spread,
    logits_rows,
    mask_bytes,
)
from frameshard.plan.model import Model, read_model
from frameshard.plan.plans import GraphSize
from frameshard.plan.steps import EXACT_STEP, floor_step, most_step, next_step, step_sizes
from frameshard.plan.windows import can_take_back, sliding_cells, step_limit
from frameshard.plan.workload import Workload
from frameshard.wire.engine import EngineConfig
from frameshard.wire.launch import adapter_of

logger = logging.getLogger("frameshard.engine")

STOCK = "stock:"
"""Prefix of a device's name: llama.cpp then uses the device directly, without the shard device."""


class Runtime:
    """A loaded model with its context. Made by :meth:`load`. As a context manager it closes itself at the end."""

    def __init__(self, config: EngineConfig) -> None:
        """Loads nothing; use :meth:`load`."""
        self.config = config
        self.device: ShardDevice | None = None
        """The shard device; ``None`` if the model runs without one."""
        self.placement: Placement | None = None
        """The placement of each shard; ``None`` without a shard device."""
        self.device_name = ""
        self.passed_over: tuple[str, ...] = ()
        """Why better devices were not taken, if the device was to be chosen."""
        self.floor_lock = threading.Lock()
        """[any thread] Held while the floor may rise, and while the budget is changed."""
        self.observer: Observer | None = None
        """What the driver counts for this process; ``None`` without a real GPU."""
        self._llama: Llama | None = None
        self._adapters: Adapters | None = None
        self._tokenizer: Tokenizer | None = None
        self._forms: Forms | None = None
        self._on_loading: OnLoading = lambda stage, done, total: None
        self._abort = _Abort()
        self._nodes = 0

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        fill: bool = True,
        measure: bool = True,
        on_loading: OnLoading | None = None,
    ) -> Runtime:
        """Checks the file, loads the model, makes the context, takes the VRAM and decodes one token.

        If ``config.n_ubatch`` is 0, each budget has its own largest step of prompts (:attr:`step`).

        :param fill: make weights resident at once.
        :param measure: measure at once what the machine's profile lacks; if false, plan from an estimate.
        :param on_loading: called with the progress of the load.
        :raises ModelNotFound: no such file.
        :raises BadModel: the file is not a GGUF that can be served.
        :raises Unsupported: the model cannot chat or complete (encoder, diffusion), it cannot have a KV cache of type
            ``config.kv_type``, or not so many sequences.
        :raises UnknownDevice: no such device.
        :raises BudgetBelowFloor: the budget is too small for this model, context and adapters; the error names the
            floor.
        :raises OutOfMemory: the device or the host refuses the memory.
        """
        runtime = cls(config)
        runtime._on_loading = on_loading or (lambda stage, done, total: None)
        try:
            runtime._load(fill, measure)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def _load(self, fill: bool, measure: bool) -> None:
        config = self.config
        llamalog.install()
        self.model_info: Model = read_model(config.model)
        check_kv_type(self.model_info, config.kv_type)
        check_sequences(self.model_info, config.n_parallel)
        if self.model_info.embedding_by_layer:
            # Else llama.cpp's logits are wrong by several units (Gemma 3n and 4 on an H100, ggml at our pin).
            disable_early_kernels()
        files = self._adapter_files()
        self._files = _Unchanged(models.files_of(Path(config.model)))  # they must not change after the check
        self.n_threads = config.n_threads or default_threads()
        choice = gpus.resolve(config.device, self._least_bytes)
        device, self.passed_over = choice.device, choice.passed_over
        self.device_name = parse_device(device).inner
        size_mib = -(-self.model_info.file_bytes >> 20)
        logger.info("loading %s (%d MiB) on %s", os.path.basename(config.model), size_mib, self.device_name)

        cpu.check()
        start_llama_cpp()
        devices = self._open_device(device, measure)
        llama = self._llama = Llama(
            self.model_info, devices, lambda share: self._on_loading("read", int(share * size_mib), size_mib)
        )
        check_context(self.model_info, config.n_ctx)
        self._adapters = Adapters(llama)
        tokenizer = self._tokenizer = Tokenizer(llama.model, self.model_info.chat_template)
        self._forms = Forms(tokenizer.grammar_tokens)
        self.n_vocab = tokenizer.n_vocab
        self._make_context(llama)
        self._lengths = [0] * config.n_parallel
        self.decoded: list[GraphSize] = []
        """The sizes of the last decode and of those whose end it waited for."""
        self._behind: dict[int, int] = {}  # the lengths of sequences before a decode that may still run
        if self.placement is not None:
            sizes = step_sizes(self.floor_step, self.n_ubatch)
            self.placement.start(llama, self._lengths, sizes, self._graph_bytes)
        try:
            self._warm_up()
        except OutOfMemory:
            if self.placement is not None:
                self.placement.require_floor()
            raise
        for name, file in files.items():
            with _blaming(name):
                self.load_adapter(name, file, spare=False)
        if self.placement is not None:
            self.placement.settle(fill=fill)

    def _make_context(self, llama: Llama) -> None:
        """Makes the context for the largest steps. If the launch does not say their size, the floor has room for small
        ones only: another context shows how much these need."""
        config, model, exact = self.config, self.model_info, self.config.mode != "planned"
        self.floor_step = most = config.n_ubatch or max(EXACT_STEP, config.n_parallel)
        """The tokens of a step whose own layout of the compute buffer the floor has room for."""
        if self.device is not None and not config.n_ubatch and not exact:
            self.floor_step = floor_step(config.n_parallel, images=bool(config.mmproj))
            limit = step_limit(model, config.n_ctx, exact=exact)
            most = most_step(config.n_ctx, self.floor_step, config.host_budget_bytes, limit)
        n_rows = config.n_outputs_max or logits_rows(config.n_parallel, most, can_speculate=self.can_speculate)
        # On the CPU, progress of a long decode is the count of its nodes. Counting takes 2 % of the time of a token
        # with a 135M model, and less with larger ones.
        counter = None if self.device is not None else llama_cpp.ggml_abort_callback(lambda _: self.on_node())
        n_sliding = sliding_cells(model, config.n_ctx, most, exact=exact)
        floor_bytes, n = 0, self.floor_step
        if self.device is not None and n < most:
            n_small = sliding_cells(model, config.n_ctx, n, exact=exact) if n_sliding else 0
            llama.make_context(replace(config, n_ubatch=n), self.n_threads, n_rows, counter, sliding_cells=n_small)
            floor_bytes = self.device.stats().most_graph_bytes
            floor_bytes += mask_bytes(model, n, config.n_ctx, n_sliding) - mask_bytes(model, n, config.n_ctx, n_small)
            llama.free_context()
        self.config = replace(config, n_ubatch=most)
        llama.make_context(self.config, self.n_threads, n_rows, counter, sliding_cells=n_sliding)
        if self.device is not None and floor_bytes:
            per_token = (self.device.stats().most_graph_bytes - floor_bytes) / (most - self.floor_step)
            self.device.set_floor_graphs(floor_bytes + floor_spread(per_token, n_rows))
        self.n_ctx_seq, self.n_ubatch, self.n_outputs_max = llama.n_ctx_seq, llama.n_ubatch, llama.n_outputs_max

    def _graph_bytes(self, n_tokens: int) -> int:
        """The bytes of the compute buffer of a step, from a graph that is made and does not run.

        :param n_tokens: its tokens; 0 for the largest decode.
        """
        assert self.device is not None
        tokens = [self.tokenizer.first_token] * (n_tokens or min(self.n_outputs_max, self.n_ubatch))
        self.llama.fill_batch([Rows(0, tokens, "last" if n_tokens else "all")], [0])
        with self._allocating(self.device):
            self.llama.decode()
        self.device.end_graph()
        self.llama.remove(0, 0)
        stats = self.device.stats()
        return stats.refused_graph_bytes or stats.graph_bytes

    def _adapter_files(self) -> dict[str, AdapterFile]:
        """The checked files of the adapters in the options, by name."""
        files = {}
        for name, path in map(adapter_of, self.config.adapters):
            with _blaming(name):
                files[name] = read_adapter(path, self.model_info)
        return files

    def _least_bytes(self) -> int:
        """Estimates the VRAM that the model needs, without the driver's own."""
        config = self.config
        n_ubatch = config.n_ubatch or (0 if config.mode == "planned" else EXACT_STEP)
        workload = Workload(
            config.n_ctx,
            0,
            n_ubatch=n_ubatch,
            n_parallel=config.n_parallel,
            kv_type=config.kv_type,
            exact=config.mode != "planned",
            host_budget_bytes=config.host_budget_bytes,
        )
        return estimate_floor(self.model_info, workload, images=bool(config.mmproj))

    def _open_device(self, device: str, measure: bool) -> ctypes.Array[ctypes.c_void_p]:
        """Makes the shard device, if the model uses one.

        :param measure: as for :meth:`load`.
        :returns: the devices for llama.cpp, as an array that ends with NULL.
        """
        if device == "cpu":
            return (ctypes.c_void_p * 1)(None)  # an empty list; without a list llama.cpp takes every GPU that it finds
        if device.startswith(STOCK):
            return (ctypes.c_void_p * 2)(device_handle(device[len(STOCK) :]), None)
        if self.device_name != EMULATED:
            self.observer = find_observer()
        config = self.config
        self.device = ShardDevice(device, vram_budget_bytes=config.vram_budget_bytes, n_threads=self.n_threads)
        rates = Rates(
            self.device,
            device,
            self.model_info,
            config,
            self.n_threads,
            measure=measure,
            on_loading=lambda done: self._on_loading("profile", done, 1),
        )
        self.placement = Placement(self.device, rates, self.model_info, config, self.observer, self._on_loading)
        # A limit that has no room for the file, whatever the processes will take: the load reads only what it needs.
        room_bytes = config.host_budget_bytes - hostcount.process_bytes(os.getpid())
        if config.host_budget_bytes and room_bytes < self.model_info.file_bytes:
            self.device.set_host_budget(max(room_bytes, 1))
        devices: ctypes.Array[ctypes.c_void_p] = self.device.devices_array
        return devices

    def _warm_up(self) -> None:
        """Decodes one token, so that a damaged model fails at the load and not in a job. On a GPU it first runs the
        largest graph that the floor has room for: drivers allocate workspaces at their first use, and that must happen
        before the arena is filled.

        :raises BadModel: the logits are not finite.
        """
        token = self.tokenizer.first_token
        if self.observer is not None:
            assert self.placement is not None
            n_tokens = self.placement.step_at_floor
            n_seq = min(-(-n_tokens // (self.n_ctx_seq - 1)), self.config.n_parallel)
            each = [token] * min(n_tokens // n_seq, self.n_ctx_seq - 1)
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
        if self._forms is not None:
            self._forms.close()
        if self._llama is not None:
            self._llama.close()
        if hasattr(self, "_files"):
            self._files.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def llama(self) -> Llama:
        """The model and context in llama.cpp, for samplers and the vision tower."""
        assert self._llama is not None
        return self._llama

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that are loaded."""
        assert self._adapters is not None
        return self._adapters

    @property
    def tokenizer(self) -> Tokenizer:
        """[any thread] Text to tokens and back."""
        assert self._tokenizer is not None
        return self._tokenizer

    @property
    def forms(self) -> Forms:
        """[any thread] Grammars and matchers for the forms of answers."""
        assert self._forms is not None
        return self._forms

    @property
    def mode(self) -> str:
        """ "planned" or "stream_only"."""
        return self.config.mode if self.placement is None else self.placement.mode

    @property
    def vram_budget_bytes(self) -> int:
        """[any thread] The VRAM budget in force, in bytes; 0 for no limit."""
        return 0 if self.placement is None else self.placement.vram_budget_bytes

    @property
    def step(self) -> int:
        """The most tokens of one decode at the budget in force."""
        return self.n_ubatch if self.placement is None else self.placement.step

    def can_decode_ahead(self, n_tokens: int) -> bool:
        """Whether a decode of ``n_tokens`` tokens may be prepared while one of as many runs. If it fails, both are cut
        off again, and layers with a sliding window must still have the cells before them."""
        return self.device is not None and can_take_back(self.model_info, n_tokens, self.llama.sliding_cells)

    @property
    def can_speculate(self) -> bool:
        """Whether drafted tokens can be decoded. That needs a KV cache from which rejected tokens can be removed, and a
        shard device, because its plan predicts the cost."""
        return self.config.speculate == "auto" and self.device is not None and self.llama.can_trim

    def check_file(self) -> None:
        """Checks that no file of the model was changed in place since it was loaded.

        :raises BadModel: one was changed, so the mapped weights cannot be trusted.
        """
        if (changed := self._files.changed()) is not None:
            raise BadModel(f"{changed} was changed while it was in use")

    # --- adapters -------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, file: AdapterFile, *, spare: bool = True) -> None:
        """Loads a LoRA adapter and decodes one token with it, so that damaged weights are found here and not in a job.
        If the same file is loaded under this name already, nothing changes.

        :param spare: demand some room beyond what is expected to be needed. A new engine must fit the budget in which
            the last one ran, so it does not demand this.
        :raises BadArgument: the name is in use, or too many adapters are loaded.
        :raises BadModel: llama.cpp refuses the file, or it computes NaN or infinity.
        :raises BudgetBelowFloor: the budget has no room for it; nothing has changed.
        :raises Overloaded: all sequences are in use, and the model's state does not allow to try it in one of them.
        """
        if self.adapters.has(name, file):
            return
        # One token is appended and removed again, preferably in an empty sequence.
        room = [seq for seq, n in enumerate(self._lengths) if n == 0 or (self.llama.can_trim and n < self.n_ctx_seq)]
        if not room:
            raise Overloaded("all places are taken, and one is needed to try the adapter: load it when a job has ended")
        with self.floor_lock:
            self._demand_room(file, spare=spare)
            adapter = self.adapters.add(name, file)
            try:
                self._try_adapter(adapter, min(room, key=self._lengths.__getitem__))
            except FrameshardError:
                self.adapters.unload(name)
                raise

    def _demand_room(self, file: AdapterFile, *, spare: bool) -> None:
        if self.device is None:
            return
        stats = self.device.stats()
        unit_bytes = lay_out(self.model_info, self.device.inner).sizes.unit_bytes
        floor_bytes = stats.floor_bytes + vram_bytes([file], self.floor_step if spare else 0, unit_bytes)
        if floor_bytes > stats.budget_bytes:
            raise BudgetBelowFloor(
                f"with the adapter the floor is up to {-(-floor_bytes >> 20)} MiB, and the VRAM budget is"
                f" {stats.budget_bytes >> 20} MiB: raise the budget, or unload other adapters",
                budget_bytes=stats.budget_bytes,
                floor_bytes=floor_bytes,
            )

    def _try_adapter(self, adapter: Adapter, seq: int) -> None:
        """Decodes a token with the adapter, and removes it again. Then lets llama.cpp allocate the compute buffers for
        each set of two, in a decode that is aborted.

        :param seq: a sequence with room.
        :raises BadModel: the logits are not finite.
        """
        before, token = self._lengths[seq], Rows(seq, [self.tokenizer.first_token])
        self.adapters.use(((adapter, 1.0),))
        with contextlib.suppress(DecodeAborted):  # a stop command came meanwhile
            logits = self.decode_tokens(seq, token.tokens)  # again if the budget falls meanwhile
            self.trim(seq, before)
            if not np.isfinite(logits.max()):
                path = str(adapter.file.path)
                raise BadModel(
                    f"{path} computes NaN or infinity: its weights are damaged", path=path, adapter=adapter.name
                )
        if self.device is None:
            return
        for other in self.adapters:
            if other is not adapter:
                self.adapters.use(((adapter, 1.0), (other, 1.0)))
                with self._allocating(self.device):
                    self.decode([token])
                    self.trim(seq, before)

    # --- sequences ------------------------------------------------------------------------------------------------

    def length(self, seq: int) -> int:
        """The number of positions in sequence ``seq``."""
        return self._lengths[seq]

    def can_cut(self, seq: int, length: int) -> bool:
        """Whether the layers with a sliding window still have the cells for a cut to ``length`` positions."""
        return length >= self._lengths[seq] or self.llama.can_cut(seq, length)

    def trim(self, seq: int, length: int) -> int:
        """Cuts sequence ``seq`` to its first ``length`` positions.

        :returns: its new length; 0 if it cannot be cut to that: a recurrent state cannot, and of a sliding window cells
            may be missing.
        """
        if length >= self._lengths[seq]:
            return self._lengths[seq]
        if length <= 0 or not self.llama.can_cut(seq, length) or not self.llama.remove(seq, length):
            length = 0
            self.llama.remove(seq, 0)
        self._set_length(seq, length)
        return length

    def clear(self, seq: int) -> None:
        """Empties sequence ``seq``. While the device is parked, nothing can be freed: :meth:`unpark` does the rest."""
        if self.device is not None and self.device.parked:
            self._lengths[seq] = 0
            return
        self.llama.remove(seq, 0)
        self._set_length(seq, 0)

    def wipe(self) -> None:
        """Empties all sequences and sets the memory of their cells to 0. Attention multiplies removed cells by 0, so
        those that hold NaN would make all later tokens of their sequence NaN."""
        self.llama.wipe()
        for seq in range(len(self._lengths)):
            self._set_length(seq, 0)

    def unpark(self) -> None:
        """Takes the VRAM of a parked device again. Raises the errors of :meth:`ShardDevice.unpark`."""
        if self.device is not None:
            self.device.unpark()
        for seq, length in enumerate(self._lengths):
            if length == 0:
                self.clear(seq)

    def advance(self, seq: int, positions: int) -> None:
        """Adds ``positions`` to the length of sequence ``seq``, after libmtmd has decoded an image into it."""
        self._lengths[seq] += positions

    def save(self, seq: int, memory: Memory) -> npt.NDArray[np.uint8] | None:
        """Copies the cells of sequence ``seq`` to host memory, shape [bytes]; ``None`` if there is no memory for them.
        The engine must not be parked: its cells cannot be read then."""
        data = self.llama.save(seq, memory)
        if data is None:
            logger.warning("no host memory for a copy of the KV cache of %d tokens", self._lengths[seq])
        return data

    def restore(self, seq: int, data: npt.NDArray[np.uint8], length: int) -> bool:
        """Replaces the cells of sequence ``seq`` by a copy of ``length`` positions, made by :meth:`save`.

        :returns: false if llama.cpp refuses the copy. Then the sequence is empty.
        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        self.clear(seq)
        self.expect(seq, length)
        if not self.llama.restore(seq, data):
            logger.warning("llama.cpp refuses a copy of the KV cache of %d tokens", length)
            return False
        self._lengths[seq] = length
        return True

    def expect(self, seq: int, length: int, *, prompt: bool = False) -> None:
        """Takes room for ``length`` tokens in sequence ``seq``, before they are decoded.

        :param prompt: a prompt is read next, not one token.
        :raises OutOfMemory: neither VRAM nor host memory has room.
        """
        if self.placement is not None:
            self.placement.expect(seq, length, prompt=prompt)

    def _set_length(self, seq: int, length: int) -> None:
        self._lengths[seq] = length
        if self.placement is not None:
            self.placement.shrink(seq)

    # --- decoding -------------------------------------------------------------------------------------------------

    def decode(self, batch: Sequence[Rows], *, ahead: bool = False) -> list[int]:
        """Runs one batch of at most ``n_ubatch`` tokens.

        :param batch: the tokens of each sequence, in ascending order of ``seq``: llama.cpp computes only adjacent
            sequences together.
        :param ahead: return once the decode has started on the shard device, so that the next one is prepared
            meanwhile, which must follow; see :meth:`can_decode_ahead`. It has no logits. Its errors are raised by the
            next one: then neither batch is in the sequences.
        :returns: the rows for :meth:`logits`, in the order of the batch.
        :raises DecodeAborted: :meth:`abort` was called.
        :raises StepTooLarge: the budget has no room for so many tokens at once.
        :raises BudgetBelowFloor: it has no room for the smallest step either: the floor was estimated too low.
        :raises VramTaken: other programs hold too much of the VRAM that the budget allows.
        :raises ContextOverflow: a sequence is full; nothing was changed.
        :raises BadArgument: the batch is empty or too large, or a token is not in the vocabulary; nothing was changed.
        :raises BadModel: the model file was changed, and weights are read from it. The runtime is of no more use.
        :raises FrameshardError: the device or llama.cpp failed. The runtime must not be used any more.
        """
        before = {rows.seq: self._lengths[rows.seq] for rows in batch}
        behind, self._behind = self._behind, before if ahead else {}
        succeeded = False
        lost = behind
        try:
            outputs = self._run(batch, ahead=ahead)
            succeeded = True
        except (DecodeAborted, OutOfMemory) as error:
            lost = {**before, **behind}
            self._explain(error, sum(len(rows.tokens) for rows in batch))
        except FrameshardError:
            self.check_file()  # a file that has changed is the better reason
            raise
        finally:
            if self.device is not None and not (ahead and succeeded):
                self.device.end_graph()
            if not succeeded:
                self._behind = {}
                self._cut_back(lost)
        for rows in batch:
            self._lengths[rows.seq] += len(rows.tokens)
        size = GraphSize(sum(len(rows.tokens) for rows in batch), max(before.values()), len(batch))
        self.decoded = [*(self.decoded if behind else ()), size]
        if self.placement is not None and not ahead:
            self.placement.after_decode()
        return outputs

    def _run(self, batch: Sequence[Rows], *, ahead: bool) -> list[int]:
        """Runs a decode, or starts it. Raises errors as :meth:`decode`; does not change the lengths of sequences."""
        starts = [self._lengths[rows.seq] for rows in batch]
        for rows, start in zip(batch, starts, strict=True):
            if start + len(rows.tokens) > self.n_ctx_seq:
                raise ContextOverflow("the context is full", n_prompt=start + len(rows.tokens), n_ctx=self.n_ctx_seq)
        outputs = self.llama.fill_batch(batch, starts)
        for rows, start in zip(batch, starts, strict=True):
            self.expect(rows.seq, start + len(rows.tokens))
        if not ahead:
            self.llama.decode()
            return outputs
        assert self.device is not None
        self.device.set_async(True)
        try:
            self.llama.decode()
        finally:
            self.device.set_async(False)
        return outputs

    def _cut_back(self, lengths: Mapping[int, int]) -> None:
        """Gives the sequences of a batch that did not run the length that they had before. llama.cpp may have kept part
        of the batch. A recurrent state is lost."""
        for seq, before in lengths.items():
            self._lengths[seq] = self.n_ctx_seq
            self.trim(seq, before)

    def _explain(self, error: DecodeAborted | OutOfMemory, n_tokens: int) -> NoReturn:
        """Raises the error of a decode of ``n_tokens`` tokens, or the reason for it."""
        placement = self.placement if not self.aborted else None
        if placement is not None and placement.planned:
            # A budget that falls ends a graph for which it has no room.
            too_large = isinstance(error, DecodeAborted)
            if too_large or (self.mode == "planned" and placement.refuse_step(n_tokens)):
                raise StepTooLarge from error
            if needed := placement.refused_bytes:
                step = f"a step of {n_tokens} tokens" if n_tokens > 1 else "a token"
                raise BudgetBelowFloor(
                    f"{step} needs a VRAM budget of {-(-needed >> 20)} MiB: raise it",
                    budget_bytes=self.vram_budget_bytes,
                    floor_bytes=needed,
                ) from error
        if isinstance(error, OutOfMemory):
            raise self.without_memory(error)
        raise error

    def without_memory(self, error: OutOfMemory) -> OutOfMemory:
        """The reason why a decode got no memory: other programs have it, or else that of ``error``.

        :raises BadModel: the model file was changed.
        """
        self.check_file()
        left = None if self.aborted or self.placement is None else self.placement.left_bytes
        if left is None:
            return error
        return VramTaken(f"other programs leave {left >> 20} MiB of VRAM, and a decode needs more: free some there")

    def next_step(self, n_left: int, most: int | None = None) -> int:
        """The tokens of the next step of a prompt of which ``n_left`` are left; at most ``most``."""
        most = self.step if most is None else min(most, self.step)
        return next_step(n_left, most, exact=self.mode == "stream_only")

    def decode_tokens(self, seq: int, tokens: Sequence[int], logits: str = "last") -> npt.NDArray[np.float32]:
        """Appends ``tokens`` to sequence ``seq`` in steps that fit the budget. Raises the errors of :meth:`decode`, but
        :class:`StepTooLarge` only for a recurrent state, which is lost then.

        :param logits: as for :class:`Rows`; "all" needs a configuration with ``n_outputs_max`` of ``n_ubatch``.
        :returns: a copy of the requested logits, shape [n, n_vocab].
        """
        out: list[npt.NDArray[np.float32]] = []
        begin = self._lengths[seq]
        self.expect(seq, min(begin + len(tokens), self.n_ctx_seq))
        while (at := self._lengths[seq] - begin) < len(tokens):
            chunk = tokens[at : at + self.next_step(len(tokens) - at)]
            last = at + len(chunk) == len(tokens)
            want = logits if logits != "last" or last else "none"
            try:
                ahead = want == "none" and not last and self.can_decode_ahead(len(chunk))
                rows = self.decode([Rows(seq, chunk, want)], ahead=ahead)
            except StepTooLarge:
                if self._lengths[seq] < begin:
                    raise  # a recurrent state is lost
                del out[self._lengths[seq] - begin :]
                continue
            out += [self.logits(row).copy() for row in rows]
        return np.stack(out) if out else np.empty((0, self.n_vocab), np.float32)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last decode, shape [n_vocab]. It is a view that the next decode overwrites."""
        return self.llama.logits(row)

    def is_finite(self, row: int) -> bool:
        """Whether the largest logit of a row of the last decode is finite. It is NaN if any logit of the row is."""
        return bool(np.isfinite(self.logits(row).max()))

    def computes(self, seq: int) -> bool:
        """Decodes one token alone in sequence ``seq``, which must be empty and is empty afterwards. Overwrites all rows
        of the last decode.

        :returns: whether the logits are finite. They were when the model was loaded, so false means that the device has
            failed.
        :raises DecodeAborted: :meth:`abort` was called.
        """
        (row,) = self.decode([Rows(seq, [self.tokenizer.first_token])])
        finite = self.is_finite(row)
        self.clear(seq)
        return finite

    # --- abort and progress ---------------------------------------------------------------------------------------

    def abort(self) -> None:
        """[any thread] Decodes, also the running one, raise :class:`DecodeAborted` until :meth:`resume` is called."""
        self._abort.asked = True
        if self.device is not None:
            self.device.set_abort(True)

    def resume(self) -> None:
        """[any thread] Allows decodes again after :meth:`abort`."""
        if self._abort.asked:
            self._abort.asked = False
            if self.device is not None:
                self.device.set_abort(False)

    @property
    def aborted(self) -> bool:
        """[any thread] Decodes are aborted: :meth:`abort` was called and :meth:`resume` was not called since, or they
        only allocate."""
        return self._abort.asked or self._abort.allocating

    @contextlib.contextmanager
    def _allocating(self, device: ShardDevice) -> Iterator[None]:
        """Decodes allocate their compute buffers, and are aborted then."""
        self._abort.allocating = True
        device.set_abort(True)
        try:
            with contextlib.suppress(DecodeAborted):
                yield
        finally:
            self._abort.allocating = False
            device.set_abort(False)
            if self._abort.asked:  # before or meanwhile
                device.set_abort(True)

    @property
    def progress(self) -> int:
        """[any thread] A number that changes while a decode makes progress. If it stands still, the decode is stuck."""
        return self._nodes + (0 if self.device is None else self.device.stats().steps)

    def on_node(self) -> bool:
        """Callback for each node that the CPU has computed: counts progress.

        :returns: :attr:`aborted`.
        """
        self._nodes += 1
        return self.aborted


class _Abort:
    """Why decodes are aborted."""

    def __init__(self) -> None:
        self.asked = False
        self.allocating = False


@contextlib.contextmanager
def _blaming(adapter: str) -> Iterator[None]:
    """Adds the name of an adapter to errors, for the broker, which goes on without this adapter."""
    try:
        yield
    except FrameshardError as error:
        error.detail["adapter"] = adapter
        raise


class _Unchanged:
    """Files that stay open. Their sizes and times tell whether one was changed in place."""

    def __init__(self, paths: Sequence[Path]) -> None:
        with contextlib.ExitStack() as opened:
            files = [(path, opened.enter_context(open(path, "rb"))) for path in paths]
            self._states = [(path, file, _state(file)) for path, file in files]
            self._files = opened.pop_all()

    def changed(self) -> Path | None:
        """The first one that was changed since it was opened; ``None`` if none was."""
        return next((path for path, file, state in self._states if _state(file) != state), None)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()


def _state(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns
