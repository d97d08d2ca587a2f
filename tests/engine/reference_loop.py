"""reference_loop.py MODEL QUESTION N [KV]: writes a greedy chat answer of N tokens to stdout, using only llama.cpp's C
interface. KV is the type of the KV cache (F16)."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

from frameshard import cpu

SYSTEM = b"You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the model's template begins with it


QUIET = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)


def main(model_path: str, question: str, n: int, kv_type: str = "f16") -> None:
    llama_cpp.llama_log_set(QUIET, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = not cpu.must_avoid_amx()
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{kv_type.upper()}")
    context = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_model_get_vocab(model)

    chat = (llama_cpp.llama_chat_message * 2)((b"system", SYSTEM), (b"user", question.encode()))
    text = ctypes.create_string_buffer(4096)
    length = llama_cpp.llama_chat_apply_template(b"chatml", chat, 2, True, text, len(text))
    tokens = (llama_cpp.llama_token * 512)()
    count = llama_cpp.llama_tokenize(vocab, text.raw[:length], length, tokens, 512, False, True)

    sampler = llama_cpp.llama_sampler_init_greedy()
    batch = llama_cpp.llama_batch_get_one(tokens, count)
    answer = b""
    for _ in range(n):
        assert llama_cpp.llama_decode(context, batch) == 0
        token = llama_cpp.llama_sampler_sample(sampler, context, -1)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        piece = ctypes.create_string_buffer(64)
        length = llama_cpp.llama_token_to_piece(vocab, token, piece, 64, 0, False)
        answer += piece.raw[:length]
        one = (llama_cpp.llama_token * 1)(token)
        batch = llama_cpp.llama_batch_get_one(one, 1)
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
