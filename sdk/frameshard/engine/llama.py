"""Loads a model with one context in llama.cpp, fills batches and decodes them.

This module turns llama.cpp's return codes into ``frameshard.errors``. :class:`~.runtime.Runtime` keeps track of the
tokens in each sequence.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import cpu
from frameshard.engine import llamalog
from frameshard.errors import BadArgument, BadModel, ContextOverflow, FrameshardError, OutOfMemory, Unsupported
from frameshard.models import ModelFile, locate
from frameshard.plan.model import Model
from frameshard.records import record
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

ALL_LAYERS = 999
KV_PAGE = 256
"""The KV cache is allocated and read in multiples of this many cells."""
KV_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}

Memory = Callable[[int], npt.NDArray[np.uint8]]
"""Gives memory of so many bytes; raises ``MemoryError`` if there is none."""


class DecodeAborted(Exception):
    """:meth:`Runtime.abort` stopped the decode. The sequences of the batch have the length that they had before. A
    sequence with a recurrent state is empty instead, because such a state cannot be rolled back;
    :meth:`Runtime.length` tells."""


class StepTooLarge(DecodeAborted):
    """The budget has no room for a graph of so many tokens, or no more: decode at most :attr:`Runtime.step` of them.
    The sequences are as after :class:`DecodeAborted`."""


class VramTaken(OutOfMemory):
    """Other programs hold VRAM that the budget allows, and the rest has no room for a decode. The sequences are as
    after :class:`DecodeAborted`. The decode can be repeated."""


def _embeds(model: Model) -> bool:
    """Whether a model's tokens attend to those behind them, so that it can embed a text but not continue one. llama.cpp
    would draw tokens from it, and abort at a prompt of several steps."""
    by_arch = "bert" in model.arch or model.arch in ("gemma-embedding", "llama-embed")
    return by_arch or model.metadata.get(f"{model.arch}.attention.causal") is False


@record
class Rows:
    """A part of a decode batch.

    :param seq: the sequence.
    :param tokens: the tokens to append to it.
    :param logits: which of the tokens get logits: "last", "all" or "none".
    """

    seq: int
    tokens: Sequence[int]
    logits: str = "last"


def load_file(file: ModelFile, params: Any) -> Any:
    """Loads a model; returns None if llama.cpp refuses it.

    :raises Unsupported: the model is a part of a file, and this is Windows: llama.cpp would need the C runtime's own
        file, which Python cannot open there.
    """
    if file.n_bytes is None:
        return llama_cpp.llama_model_load_from_file(os.fsencode(file.path), params)
    if sys.platform == "win32":
        raise Unsupported("on Windows a model must be a file of its own, not a part of one", path=str(file.path))
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with open(file.path, "rb") as opened:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(opened.fileno()), b"rb"))
    try:
        libc.fseeko(stream, ctypes.c_long(file.offset), os.SEEK_SET)
        return llama_cpp.llama_model_load_from_file_ptr(stream, params)  # the memory map outlives the stream
    finally:
        libc.fclose(stream)


class Llama:
    """A loaded model. Call :meth:`make_context` before anything else. Free it with :meth:`close`.

    :param model: the contents of the file's header.
    :param devices: handles of ggml devices, ``None`` at the end; ``(None,)`` uses only the CPU.
    :param on_read: called with the share of the file that is read, from 0 to 1.
    :raises BadModel: llama.cpp refuses the file.
    :raises Unsupported: the model does not generate text.
    """

    def __init__(
        self, model: Model, devices: ctypes.Array[ctypes.c_void_p], on_read: Callable[[float], None] | None = None
    ) -> None:
        self._context: Any = None
        self._devices = devices  # kept alive, because llama.cpp keeps the pointer
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        if cpu.must_avoid_amx():
            logger.warning("llama-cpp-python was compiled with AMX, which gcc 12 gets wrong: loading without it")
            params.use_extra_bufts = False
        params.n_gpu_layers = ALL_LAYERS if devices[0] else 0
        params.devices = ctypes.cast(devices, ctypes.c_void_p).value
        if on_read is not None:
            params.progress_callback = llama_cpp.llama_progress_callback(lambda share, _: on_read(share) is None)
        self._model: Any = load_file(locate(model.path), params)
        if not self._model:
            raise BadModel(f"llama.cpp refuses {model.path}: {llamalog.last_errors()}")
        if (
            llama_cpp.llama_model_has_encoder(self._model)
            or not llama_cpp.llama_model_has_decoder(self._model)
            or llama_cpp.llama_model_is_diffusion(self._model)
        ):
            self.close()
            raise Unsupported("this model does not generate text token by token", arch=model.arch)
        if _embeds(model):
            self.close()
            raise Unsupported(
                f"{model.path.name} embeds text and does not generate it: name it with the launch option embedder",
                arch=model.arch,
            )

    @property
    def model(self) -> Any:
        """llama.cpp's model."""
        return self._model

    @property
    def context(self) -> Any:
        """llama.cpp's context."""
        return self._context

    @property
    def can_trim(self) -> bool:
        """True if the last tokens of a sequence can be removed. A recurrent state does not allow that."""
        return not (llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model))

    @property
    def window(self) -> int:
        """The tokens in the sliding window of some layers; 0: all layers attend to all tokens."""
        return int(llama_cpp.llama_model_n_swa(self._model))

    def make_context(
        self, config: EngineConfig, n_threads: int, n_outputs_max: int, abort_callback: Any, *, sliding_cells: int = 0
    ) -> None:
        """Makes the context.

        :param n_threads: threads that compute on the CPU.
        :param n_outputs_max: the most rows of logits of one decode.
        :param abort_callback: a ``ggml_abort_callback``, which the CPU calls for each node and which can stop the
            decode; ``None`` with a shard device, which is stopped in another way.
        :param sliding_cells: the cells of a sequence that layers with a sliding window keep; 0: all.
        :raises OutOfMemory: llama.cpp has not enough memory for the context.
        """
        params = llama_cpp.llama_context_default_params()
        # Each sequence gets whole pages, because llama.cpp divides n_ctx by the number of sequences and rounds.
        params.n_ctx = -(-config.n_ctx // KV_PAGE) * KV_PAGE * config.n_parallel
        n_ubatch = config.n_ubatch
        if not self.can_trim:
            # llama.cpp lays out a graph with as many tokens of each sequence, and some hybrid models abort in it if the
            # largest batch is no multiple (Kimi Linear, MiniMax-01).
            n_ubatch = max(n_ubatch - n_ubatch % config.n_parallel, config.n_parallel)
        params.n_batch = params.n_ubatch = n_ubatch
        params.n_seq_max = config.n_parallel
        params.type_k = params.type_v = KV_TYPES[config.kv_type]
        params.n_outputs_max = n_outputs_max
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.kv_unified = False
        params.swa_full = not sliding_cells
        params.offload_kqv = params.op_offload = bool(self._devices[0])
        params.no_perf = True
        self._abort_callback = abort_callback  # kept alive, because llama.cpp keeps the pointer
        if abort_callback is not None:
            params.abort_callback = abort_callback
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise OutOfMemory(
                f"llama.cpp cannot make {config.n_parallel} contexts of {config.n_ctx} tokens: "
                f"{llamalog.last_errors()}; lower n_ctx or n_parallel"
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self.n_ctx_seq = int(llama_cpp.llama_n_ctx_seq(self._context))
        """The context of each sequence, in tokens."""
        self.n_ubatch = int(llama_cpp.llama_n_ubatch(self._context))
        """The most tokens of one decode."""
        self.n_outputs_max = n_outputs_max
        self.sliding_cells = sliding_cells
        self._make_batch()

    def free_context(self) -> None:
        """Frees the context, so that another can be made."""
        llama_cpp.llama_free(self._context)
        self._context = None

    def _make_batch(self) -> None:
        n = self.n_ubatch
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(n, np.int32)
        self._n_seqs = np.ones(n, np.int32)
        self._seqs = np.zeros(n, np.int32)
        self._wanted = np.zeros(n, np.int8)
        self._seq_pointers = (self._seqs.ctypes.data + np.arange(n) * self._seqs.itemsize).astype(np.uintp)
        batch = llama_cpp.llama_batch()
        batch.embd = None
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._n_seqs),
            ("seq_id", self._seq_pointers),
            ("logits", self._wanted),
        ):
            kind = dict(llama_cpp.llama_batch._fields_)[name]
            setattr(batch, name, ctypes.cast(array.ctypes.data, kind))
        self._batch = batch

    def fill_batch(self, batch: Sequence[Rows], starts: Sequence[int]) -> list[int]:
        """Prepares a decode.

        :param batch: the parts of the batch.
        :param starts: for each part, the number of tokens that its sequence already has.
        :returns: the rows of the batch that get logits, for :meth:`logits`.
        :raises BadArgument: no tokens, too many tokens, invalid token ids, or too many rows of logits.
        """
        n, outputs = 0, list[int]()
        for rows, start in zip(batch, starts, strict=True):
            count = len(rows.tokens)
            end = n + count
            if end > self.n_ubatch:
                raise BadArgument(f"a batch has at most {self.n_ubatch} tokens")
            self._tokens[n:end] = rows.tokens
            self._positions[n:end] = np.arange(start, start + count)
            self._seqs[n:end] = rows.seq
            first_wanted = {"all": n, "last": max(end - 1, n), "none": end}[rows.logits]
            self._wanted[n:first_wanted] = 0
            self._wanted[first_wanted:end] = 1
            outputs += range(first_wanted, end)
            n = end
        if not n:
            raise BadArgument("an empty batch")
        if int(self._tokens[:n].min()) < 0 or int(self._tokens[:n].max()) >= self.n_vocab:
            raise BadArgument(f"token ids must be from 0 to {self.n_vocab - 1}")
        if len(outputs) > self.n_outputs_max:  # llama.cpp would end the process
            raise BadArgument(f"a batch has at most {self.n_outputs_max} rows of logits")
        self._batch.n_tokens = n
        return outputs

    def decode(self) -> None:
        """Decodes the batch that :meth:`fill_batch` has prepared.

        :raises DecodeAborted: the decode was stopped. Part of the batch may be in the KV cache.
        :raises ContextOverflow: the KV cache is full. Nothing has changed.
        :raises OutOfMemory: there is no memory for the graph.
        :raises FrameshardError: the device or llama.cpp failed.
        """
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code == 1:
            raise ContextOverflow("no room in the key-value cache", n_ctx=self.n_ctx_seq)
        if code == 2:
            raise DecodeAborted
        if code == -2:
            raise OutOfMemory(f"memory for a decode was refused: {llamalog.last_errors()}")
        if code:
            raise FrameshardError(f"llama_decode failed with {code}: {llamalog.last_errors()}")

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Returns the logits of a row of the last decode, shape [n_vocab]. It is a view that the next decode
        overwrites."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,))

    def can_cut(self, seq: int, length: int) -> bool:
        """Whether sequence ``seq`` still has all cells that its next token needs after a cut to ``length`` positions:
        cells that have left a sliding window may be gone."""
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, seq)) if self.window else 0
        return first <= max(length - self.window + 1, 0)

    def remove(self, seq: int, start: int) -> bool:
        """Removes the tokens of sequence ``seq`` from position ``start`` on. Returns False if its state does not allow
        that."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, start if start > 0 else -1, -1))

    def wipe(self) -> None:
        """Empties all sequences and sets the memory of their cells to 0."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def saved_bytes(self, seq: int) -> int:
        """The size of what :meth:`save` returns for sequence ``seq``."""
        return int(llama_cpp.llama_state_seq_get_size(self._context, seq))

    def save(self, seq: int, memory: Memory) -> npt.NDArray[np.uint8] | None:
        """Copies the cells of sequence ``seq`` to host memory, in llama.cpp's format, shape [bytes]. Cells that have
        left the sliding window are not copied. Returns ``None`` if there is no memory for the copy."""
        try:
            data = memory(self.saved_bytes(seq))
        except MemoryError:
            return None
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        size = llama_cpp.llama_state_seq_get_data(self._context, pointer, data.nbytes, seq)
        return data if size == data.nbytes else None

    def restore(self, seq: int, data: npt.NDArray[np.uint8]) -> bool:
        """Replaces the cells of sequence ``seq`` by those that :meth:`save` has copied. Returns False if llama.cpp
        refuses them; the sequence is empty then."""
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if llama_cpp.llama_state_seq_set_data(self._context, pointer, data.nbytes, seq) == data.nbytes:
            return True
        self.remove(seq, 0)
        return False

    def load_adapter(self, path: str) -> Any:
        """Loads a LoRA adapter whose header was checked (:mod:`frameshard.plan.adapter`).

        :returns: llama.cpp's adapter. It is freed with the model, or by :meth:`free_adapter`.
        :raises BadModel: llama.cpp refuses the file, or there is no memory for it.
        """
        llamalog.install()
        adapter = llama_cpp.llama_adapter_lora_init(self._model, os.fsencode(path))
        if not adapter:
            raise BadModel(f"llama.cpp refuses the adapter {path}: {llamalog.last_errors()}", path=path)
        return adapter

    def free_adapter(self, adapter: Any) -> None:
        """Frees an adapter, which must not be in use."""
        llama_cpp.llama_adapter_lora_free(adapter)

    def set_adapters(self, adapters: Sequence[tuple[Any, float]]) -> None:
        """Sets the adapters and their scales for the next decodes. The next decode then allocates the compute buffers
        again, and ends the process if there is no room for them.

        llama.cpp keeps them in a hash map. With up to two, it adds them up in an order that depends on this call
        alone, so results are the same bits in each process.
        """
        n = len(adapters)
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*(handle for handle, _ in adapters))
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        llama_cpp.llama_set_adapters_lora(self._context, handles, n, scales)

    def close(self) -> None:
        """Frees the context, then the model. Safe to call twice."""
        if self._context:
            self.free_context()
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None
