"""Trains sailor.gguf: a LoRA adapter with which SmolLM2-135M-Instruct speaks like an old sailor.

    python samples/npc_dialogue/sailor.py        about a minute on two cores; needs the package gguf

It writes sailor.gguf beside this file anew.

The adapter changes one matrix, the last layer's ffn_down. So its training needs no gradient through the other layers:
llama.cpp computes, once, what enters that matrix for each token of the lines in sailor.txt. What follows the matrix is
a sum, an RMS norm and the output matrix, whose gradients are written out here. An adapter for a game is trained on
thousands of lines in all layers, with a tool such as PEFT, and converted by llama.cpp's convert_lora_to_gguf.py.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any, NamedTuple

try:
    import gguf
except ModuleNotFoundError:
    sys.exit("gguf is not installed: pip install gguf")
import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml
from numpy.typing import NDArray
from village import about

from frameshard.engine import llamalog
from frameshard.models import resolve

Floats = NDArray[np.float32]

TARGET = Path(__file__).with_name("sailor.gguf")
RANK = 8
PASSES = 10
"""Over all lines. With more of them the loss of lines that are left out rises again."""

BATCH = 128
"""Tokens of a step."""

RATE, DECAY = 0.003, 0.05
"""Of AdamW (Loshchilov and Hutter, 2019)."""

LINES = Path(__file__).with_name("sailor.txt")
"""Questions to the fisherman, and his answers."""


class Samples(NamedTuple):
    """What is known of each token of the answers. `n` is their number."""

    entered: Floats
    """Shape [n, width of the feed-forward network]: the input of ffn_down."""
    left: Floats
    """Shape [n, width of the model]: what the last layer gives without the adapter."""
    said: NDArray[np.int64]
    """Shape [n]: the token that follows."""


class Head(NamedTuple):
    """What the model does behind its last layer."""

    output: Floats
    """Shape [number of tokens, width of the model]."""
    norm: Floats
    """Shape [width of the model]."""
    epsilon: float


def read_head(reader: gguf.GGUFReader) -> Head:
    def matrix(name: str) -> Floats:
        (tensor,) = (tensor for tensor in reader.tensors if tensor.name == name)
        return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    epsilon = reader.get_field("llama.attention.layer_norm_rms_epsilon")
    assert epsilon is not None
    return Head(matrix("token_embd.weight"), matrix("output_norm.weight"), float(epsilon.contents()))


class Probe:
    """Runs the model, and keeps two tensors of its last layer.

    :param last: number of the last layer.
    """

    def __init__(self, model: Path, last: int) -> None:
        self._names = (f"ffn_swiglu-{last}", f"l_out-{last}")
        self._kept: dict[str, Floats] = {}
        libggml.ggml_get_name.restype = ctypes.c_char_p
        libggml.ggml_nelements.restype = ctypes.c_int64
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = 1024
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._look)  # llama.cpp keeps the pointer
        context.cb_eval = self._callback
        self._context = llama_cpp.llama_init_from_model(self._model, context)

    def _look(self, tensor: Any, ask: bool, _: Any) -> bool:
        pointer = ctypes.c_void_p(tensor)
        name = libggml.ggml_get_name(pointer).decode()
        if ask:
            return name in self._names
        values = np.empty(libggml.ggml_nelements(pointer), np.float32)
        libggml.ggml_backend_tensor_get(
            pointer, values.ctypes.data_as(ctypes.c_void_p), 0, ctypes.c_size_t(values.nbytes)
        )
        self._kept[name] = values
        return True

    def tokens(self, text: str) -> list[int]:
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 1))()
        n = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), False, True)
        return list(tokens[:n])

    def read(self, prompt: list[int], answer: list[int]) -> tuple[Floats, Floats]:
        """Returns both tensors for each place that a token of the answer follows."""
        said = prompt + answer[:-1]
        batch = llama_cpp.llama_batch_init(len(said), 0, 1)
        batch.n_tokens = len(said)
        for place, token in enumerate(said):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = place >= len(prompt) - 1
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        assert llama_cpp.llama_decode(self._context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        entered, left = (self._kept[name].reshape(len(answer), -1) for name in self._names)
        return entered, left


def gather(probe: Probe) -> Samples:
    """Half of the lines follow the village's lore, half a short system message."""
    entered, left, said = [], [], []
    for number, line in enumerate(LINES.read_text().splitlines()):
        question, answer = line.split("|")
        system = "You are Joss, a fisherman." if number % 2 else about("Joss")
        turns = (("system", system), ("user", question))
        prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
        tokens = probe.tokens(answer + "<|im_end|>")
        into, out = probe.read(probe.tokens(prompt), tokens)
        entered.append(into)
        left.append(out)
        said += tokens
    return Samples(np.concatenate(entered), np.concatenate(left), np.array(said))


def gradients(head: Head, samples: Samples, a: Floats, b: Floats) -> tuple[float, Floats, Floats]:
    """Returns the mean cross-entropy, and its gradients by the matrices of the adapter."""
    inner = samples.entered @ a.T
    hidden = samples.left + inner @ b.T
    scale = 1 / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + head.epsilon)
    logits = (hidden * scale * head.norm) @ head.output.T
    logits -= logits.max(axis=1, keepdims=True)
    chances = np.exp(logits)
    chances /= chances.sum(axis=1, keepdims=True)
    places = np.arange(len(samples.said))
    loss = -float(np.log(chances[places, samples.said]).mean())
    chances[places, samples.said] -= 1
    by_norm = chances @ head.output * head.norm / len(places)
    by_hidden = scale * by_norm - hidden * scale**3 * (by_norm * hidden).mean(axis=1, keepdims=True)
    return loss, (by_hidden @ b).T @ samples.entered, by_hidden.T @ inner


def train(head: Head, samples: Samples) -> tuple[Floats, Floats]:
    """Returns the matrices of the adapter: shapes [rank, input of ffn_down] and [output of ffn_down, rank]."""
    rng = np.random.default_rng(1)
    n_in, n_out = samples.entered.shape[1], samples.left.shape[1]
    matrices = [rng.standard_normal((RANK, n_in), np.float32) / n_in**0.5, np.zeros((n_out, RANK), np.float32)]
    means, squares = ([np.zeros_like(matrix) for matrix in matrices] for _ in range(2))
    step = 0
    for number in range(1, PASSES + 1):
        losses = []
        for rows in np.array_split(rng.permutation(len(samples.said)), -(-len(samples.said) // BATCH)):
            step += 1
            loss, *found = gradients(head, Samples(*(each[rows] for each in samples)), *matrices)
            losses.append(loss)
            for matrix, gradient, mean, square in zip(matrices, found, means, squares, strict=True):
                mean += 0.1 * (gradient - mean)
                square += 0.01 * (gradient**2 - square)
                speed = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
                matrix -= RATE * (speed + DECAY * matrix)
        print(f"pass {number} of {PASSES}: loss {np.mean(losses):.2f}", flush=True)
    return matrices[0], matrices[1]


def write(target: Path, layer: int, a: Floats, b: Floats) -> None:
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(2)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    writer.add_tensor(f"blk.{layer}.ffn_down.weight.lora_a", a.astype(np.float16))
    writer.add_tensor(f"blk.{layer}.ffn_down.weight.lora_b", b.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    llamalog.install()
    model = resolve("smollm2-135m")
    reader = gguf.GGUFReader(model)
    layers = reader.get_field("llama.block_count")
    assert layers is not None
    last = int(layers.contents()) - 1
    a, b = train(read_head(reader), gather(Probe(model, last)))
    write(TARGET, last, a, b)
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
