"""The embedder process: turns texts into embeddings with a sentence encoder. The broker starts it.

It has one thread that computes: at idle priority, threads of one graph would wait for each other while the game runs.
One text is encoded at a time, so a row does not depend on other texts, not even in its last bits.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import llama_cpp
import numpy as np

from frameshard import cpu, system
from frameshard.engine import llamalog
from frameshard.engine.llama import load_file
from frameshard.engine.tokenizer import tokenize
from frameshard.errors import BadModel, ContextOverflow, FrameshardError, OutOfMemory, internal
from frameshard.models import locate
from frameshard.plan.encoder import read_encoder
from frameshard.wire import channel
from frameshard.wire import embedder as wire
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

MAX_TOKENS = 2048
"""The longest text, also for encoders with a longer context: the compute buffers grow with the square of it."""

MAX_DIMENSIONS = 4096


class Encoder:
    """A sentence encoder on the CPU.

    :param path: path of its GGUF file, or of a part of a file (:func:`frameshard.models.locate`).
    :raises ModelNotFound: there is no such file.
    :raises BadModel: it is not a sentence encoder, llama.cpp refuses it, or its weights produce NaN.
    :raises OutOfMemory: there is no memory for it.
    """

    def __init__(self, path: str) -> None:
        model = read_encoder(path)
        cpu.check()
        llamalog.install()
        params = llama_cpp.llama_model_default_params()
        self._devices = (ctypes.c_void_p * 1)(None)  # no device but the CPU; llama.cpp keeps the pointer
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p).value
        params.n_gpu_layers = 0
        params.use_extra_bufts = not cpu.must_avoid_amx()
        self._path = path
        self._model = load_file(locate(path), params)
        if not self._model:
            raise BadModel(f"llama.cpp refuses {path}: {llamalog.last_errors()}", path=path)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_dim = int(llama_cpp.llama_model_n_embd_out(self._model))
        if not 1 <= self.n_dim <= MAX_DIMENSIONS:
            raise BadModel(f"{path} has {self.n_dim} dimensions, not from 1 to {MAX_DIMENSIONS}", path=path)
        self.n_ctx = min(model.n_ctx_train, MAX_TOKENS)
        self._context = self._make_context()
        self._memory = llama_cpp.llama_get_memory(self._context)  # null for encoders without a KV cache
        self._make_batch()
        self.encode("a")  # what crashes or yields NaN does so at the load

    def _make_context(self) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_ctx
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = 1
        params.embeddings = True
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise OutOfMemory(f"llama.cpp cannot make a context of {self.n_ctx} tokens: {llamalog.last_errors()}")
        return context

    def _make_batch(self) -> None:
        n = self.n_ctx
        self._batch = llama_cpp.llama_batch_init(n, 0, 1)
        self._tokens = np.ctypeslib.as_array(self._batch.token, (n,))
        np.ctypeslib.as_array(self._batch.pos, (n,))[:] = np.arange(n)
        np.ctypeslib.as_array(self._batch.n_seq_id, (n,))[:] = 1
        np.ctypeslib.as_array(self._batch.logits, (n,))[:] = 1
        for i in range(n):
            self._batch.seq_id[i][0] = 0

    def encode(self, text: str) -> wire.Row:
        """Returns the embedding of a text, ``n_dim`` little-endian 16-bit floats whose squares add up to 1, and the
        number of its tokens, with the marks around it.

        :raises ContextOverflow: the text is longer than the context; detail has ``n_prompt`` and ``n_ctx`` in tokens.
        :raises BadModel: the encoder yields NaN, or nothing but zeros.
        :raises FrameshardError: llama.cpp failed.
        """
        tokens = tokenize(self._vocab, text, add_special=True, parse_special=False)
        n = len(tokens)
        if n > self.n_ctx:
            raise ContextOverflow(
                f"it has {n} tokens, and the encoder reads at most {self.n_ctx}: embed it in parts",
                n_prompt=n,
                n_ctx=self.n_ctx,
            )
        self._tokens[:n] = tokens
        self._batch.n_tokens = n
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)
            code = llama_cpp.llama_decode(self._context, self._batch)
        else:
            code = llama_cpp.llama_encode(self._context, self._batch)
        if code:
            raise FrameshardError(f"llama.cpp could not encode a text ({code}): {llamalog.last_errors()}")
        row = np.ctypeslib.as_array(llama_cpp.llama_get_embeddings_seq(self._context, 0), (self.n_dim,))
        length = float(np.linalg.norm(row.astype(np.float64)))
        if not 0 < length < float("inf"):
            raise BadModel(f"{self._path} encodes a text as NaN or zeros: the file is damaged", path=self._path)
        return wire.Row((row / length).astype("<f2").tobytes(), n)


def _receive(sock: socket.socket, texts: queue.Queue[str]) -> NoReturn:
    """[reader thread] Queues what comes. Ends the process when the broker has ended or closed the stream, also in the
    middle of a text."""
    reader = channel.Reader()
    try:
        while data := sock.recv(1 << 16):
            for fields in reader.feed(data):
                message = wire.read(fields)
                assert isinstance(message, wire.Encode)
                texts.put(message.text)
    finally:
        os._exit(0)


def _answer(encoder: Encoder, text: str) -> wire.Message:
    try:
        return encoder.encode(text)
    except Exception as error:
        return wire.Refused(m.ErrorInfo.of(internal(logger, "an embedding", error)))


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the process.

    :returns: the exit code: 1 if the file cannot be used.
    """
    parser = argparse.ArgumentParser(prog="frameshard.engine.embedder")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("path")
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="engine: %(levelname)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the broker handles Ctrl-C
    sock = system.inherited_socket(args.fd)
    texts: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_receive, args=(sock, texts), daemon=True, name="reader").start()
    try:
        encoder = Encoder(args.path)
    except Exception as error:
        sock.sendall(wire.pack(wire.Refused(m.ErrorInfo.of(internal(logger, "the load of the encoder", error)))))
        return 1
    sock.sendall(wire.pack(wire.Loaded(encoder.n_dim)))
    while True:
        sock.sendall(wire.pack(_answer(encoder, texts.get())))


if __name__ == "__main__":
    sys.exit(main())
