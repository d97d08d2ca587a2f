"""A model and one context of it in llama.cpp: load, fill a batch, decode.

llama.cpp's return codes become ``frameshard.errors`` here. What sequences hold is :class:`~.runtime.Runtime`'s.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard import cpu
from frameshard.engine import llamalog
from frameshard.errors import BadArgument, BadModel, ContextOverflow, FrameshardError, OutOfMemory, Unsupported
from frameshard.plan.model import Model
from frameshard.wire.engine import EngineConfig

logger = logging.getLogger("frameshard.engine")

ALL_LAYERS = 999
KV_PAGE = 256
"""Cells in which the KV cache is allocated; llama.cpp reads it in steps of as many."""
KV_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}


class DecodeAborted(Exception):
    """:meth:`Runtime.abort` stopped the decode. The sequences of that batch are back at the length they had before it,
    except where :meth:`Runtime.length` says otherwise: a recurrent state cannot be rolled back, that one is empty."""


@dataclass(frozen=True)
class Rows:
    """Part of a decode batch: ``tokens`` go to the end of sequence ``seq``; ``logits`` is "last", "all" or "none"."""

    seq: int
    tokens: Sequence[int]
    logits: str = "last"


class Llama:
    """A loaded model; :meth:`make_context` comes next. Free it with :meth:`close`.

    :param model: what the file's header says.
    :param devices: handles of ggml devices, ``None`` at the end; ``(None,)`` is the CPU alone.
    :raises BadModel: llama.cpp refuses the file.
    :raises Unsupported: the model does not generate text.
    """

    def __init__(self, model: Model, devices: ctypes.Array[ctypes.c_void_p]) -> None:
        self._context: Any = None
        self._devices = devices  # llama.cpp keeps the pointer
        params = llama_cpp.llama_model_default_params()
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        if cpu.must_avoid_amx():
            logger.warning("llama-cpp-python was compiled with AMX, which gcc 12 gets wrong: loading without it")
            params.use_extra_bufts = False
        params.n_gpu_layers = ALL_LAYERS if devices[0] else 0
        params.devices = ctypes.cast(devices, ctypes.c_void_p).value
        self._model: Any = llama_cpp.llama_model_load_from_file(os.fsencode(model.path), params)
        if not self._model:
            raise BadModel(f"llama.cpp refuses {model.path}: {llamalog.last_errors()}")
        if (
            llama_cpp.llama_model_has_encoder(self._model)
            or not llama_cpp.llama_model_has_decoder(self._model)
            or llama_cpp.llama_model_is_diffusion(self._model)
        ):
            self.close()
            raise Unsupported("this model does not generate text token by token", arch=model.arch)

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
        """The end of a sequence can be removed; a recurrent state has no end."""
        return not (llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model))

    def make_context(self, config: EngineConfig, n_threads: int, n_outputs_max: int, abort_callback: Any) -> None:
        """Makes the context.

        :param n_outputs_max: most rows of logits of one decode.
        :param abort_callback: ``ggml_abort_callback`` for the CPU; ``None``: the device is told otherwise.
        :raises OutOfMemory: llama.cpp cannot make it.
        """
        params = llama_cpp.llama_context_default_params()
        # Whole pages for each sequence: llama.cpp divides this number, and rounds the result.
        params.n_ctx = -(-config.n_ctx // KV_PAGE) * KV_PAGE * config.n_parallel
        params.n_batch = config.n_ubatch
        params.n_ubatch = config.n_ubatch
        params.n_seq_max = config.n_parallel
        params.type_k = params.type_v = KV_TYPES[config.kv_type]
        params.n_outputs_max = n_outputs_max
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        params.kv_unified = False
        params.offload_kqv = params.op_offload = bool(self._devices[0])
        params.no_perf = True
        self._abort_callback = abort_callback  # llama.cpp keeps the pointer
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
        """Context of each sequence in tokens."""
        self.n_ubatch = int(llama_cpp.llama_n_ubatch(self._context))
        """Most tokens of one decode."""
        self.n_outputs_max = n_outputs_max
        self._make_batch()

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

        :param starts: tokens that the sequence of each of ``batch`` holds already.
        :returns: the rows of logits that it will yield.
        :raises BadArgument: too many or no tokens, impossible token ids, or too many rows of logits.
        """
        n, outputs = 0, []
        for rows, start in zip(batch, starts, strict=True):
            count = len(rows.tokens)
            end = n + count
            if end > self.n_ubatch:
                raise BadArgument(f"a batch has at most {self.n_ubatch} tokens")
            self._tokens[n:end] = rows.tokens
            self._positions[n:end] = np.arange(start, start + count)
            self._seqs[n:end] = rows.seq
            self._wanted[n:end] = rows.logits == "all"
            if rows.logits == "last" and count:
                self._wanted[end - 1] = 1
            outputs += [int(row) + n for row in np.flatnonzero(self._wanted[n:end])]
            n = end
        if not n:
            raise BadArgument("an empty batch")
        if int(self._tokens[:n].min()) < 0 or int(self._tokens[:n].max()) >= self.n_vocab:
            raise BadArgument(f"token ids must be from 0 to {self.n_vocab - 1}")
        if len(outputs) > self.n_outputs_max:  # llama.cpp ends the process here
            raise BadArgument(f"a batch has at most {self.n_outputs_max} rows of logits")
        self._batch.n_tokens = n
        return outputs

    def decode(self) -> None:
        """Decodes the batch that was filled.

        :raises DecodeAborted: part of the batch may be in the cache.
        :raises ContextOverflow: the cache is full; nothing was changed.
        :raises OutOfMemory: memory for the graph was refused.
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
        """Logits of a row of the last decode, shape [n_vocab]; a view that the next decode overwrites."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,))

    def remove(self, seq: int, start: int) -> bool:
        """Removes the tokens of sequence ``seq`` from ``start`` on; False where its memory cannot be cut there."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, start if start > 0 else -1, -1))

    def close(self) -> None:
        """Frees the context, then the model. Safe to call twice."""
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None
