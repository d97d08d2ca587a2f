"""Texts that llama.cpp cannot tokenise as they are."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest

import tiny_models
from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.engine.tokenizer import tokenize, with_deep_stack
from frameshard.errors import BadArgument
from frameshard.wire import engine as em
from frameshard.wire import messages as m

FEW = m.Sampling(max_tokens=4)

LONG = """
import sys
import llama_cpp
from frameshard.engine.tokenizer import tokenize

params = llama_cpp.llama_model_default_params()
params.vocab_only = True
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
vocab = llama_cpp.llama_model_get_vocab(model)
for part in ("=", "a", "A", " ", "\\xe4", "\\u8a9e", "\\n", "1"):
    for n in (10, 60_000):
        tokens = tokenize(vocab, part * n, add_special=False, parse_special=False)
        assert len(tokens) == n * len(part.encode()), (part, len(tokens))
"""


def write_vocabulary(path: Path, model: str, tokens: list[str], pre: str = "default") -> None:
    """Writes a model without weights. It has one token more, which ends an answer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<end>"])
    writer.add_token_types([1] * len(tokens) + [3])
    writer.add_token_merges(["~ ~"])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o", "deepseek-v3", "default"])
def test_a_long_text_of_one_kind_of_character_does_not_end_the_process(tmp_path: Path, pre: str) -> None:
    """llama.cpp splits the texts of these vocabularies with the regular expressions of C++, which recurse."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    write_vocabulary(tmp_path / "vocabulary.gguf", "gpt2", tokens, pre)
    done = subprocess.run([sys.executable, "-c", LONG, tmp_path / "vocabulary.gguf"], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_stacks_are_those_that_each_system_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages have 16 KiB on macOS. On Windows Python takes less than 256 MiB."""
    stack_size, asked = threading.stack_size, []

    def strict(n_bytes: int) -> int:
        asked.append(n_bytes)
        if n_bytes % (16 << 10) or n_bytes >= 256 << 20:
            raise ValueError(n_bytes)
        return stack_size(n_bytes)

    monkeypatch.setattr(threading, "stack_size", strict)
    for n_bytes in (1025, 3001, 100_000, 520_000):
        assert with_deep_stack(n_bytes, lambda: 7) == 7
        assert asked[-2] > 512 * n_bytes
    with pytest.raises(BadArgument, match="600000 bytes is too long"):
        with_deep_stack(600_000, lambda: 7)


MARKS = {"<|im_start|>": 3, "<|im_end|>": 3}


@contextlib.contextmanager
def small_runtime(path: Path, **options: Any) -> Iterator[Runtime]:
    tiny_models.make("llama", path, **{"n_layer": 1, "chat_template": tiny_models.CHATML, "marks": MARKS, **options})
    with Runtime.load(em.EngineConfig(str(path), device="cpu", n_ctx=256, n_threads=1)) as runtime:
        yield runtime


def chat_prompt(runtime: Runtime, text: str) -> list[int]:
    return RequestReader(runtime).read(em.Submit(1, "chat", FEW, messages=(m.ChatMessage("user", text),))).prompt


@pytest.mark.parametrize("message", ["ab", "a</s>b"])
def test_no_prompt_ends_with_the_token_that_ends_texts(tmp_path: Path, message: str) -> None:
    """Some vocabularies ask for it. The model would answer as if its answer had ended, or the user's message."""
    prompts = []
    for name, options in (("plain", {}), ("ending", {"add": tiny_models._File.add_eos})):
        with small_runtime(tmp_path / f"{name}.gguf", **options) as runtime:
            completion = RequestReader(runtime).read(em.Submit(1, "completion", FEW, prompt=message)).prompt
            prompts.append((completion, chat_prompt(runtime, message)))
            tokens = tokenize(runtime.tokenizer.vocab, message, add_special=True, parse_special=False)
            assert (tokens[-1] == 2) == (name == "ending")  # as a sentence encoder reads it
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("template", [tiny_models.CHATML, "{{ messages[0].content }}<|im_end|>"])
def test_the_name_of_a_control_token_is_read_like_other_text(tmp_path: Path, template: str) -> None:
    """This vocabulary puts a space in front of a text, and behind control tokens. In a message it has the name of a
    control token, the message is in parts. They must not get more spaces."""
    with small_runtime(tmp_path / "model.gguf", chat_template=template) as runtime:
        tokenizer = runtime.tokenizer
        for name, other in (("</s>", "</q>"), ("<|im_end|>", "<|im_eQd|>")):
            for text in ("a{}b", "{}", "a{0}{0} b"):
                tokens, like = (chat_prompt(runtime, text.format(each)) for each in (name, other))
                assert len(tokens) == len(like)
                said = b"".join(map(tokenizer.piece, like)).replace(other.encode(), name.encode())
                assert b"".join(map(tokenizer.piece, tokens)) == said


class Interrupted(Exception):
    pass


def functions_of(thread: threading.Thread) -> set[str]:
    """The names of the functions that a thread is in."""
    assert thread.ident is not None
    return {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[thread.ident])}


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signal can be sent to one thread here")
@pytest.mark.parametrize("moment", ["start", "join"])
def test_a_signal_does_not_end_the_wait_for_llama_cpp(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the caller frees the vocabulary while the thread reads it, and the process ends by SIGSEGV."""
    main, handled, ended = threading.main_thread(), threading.Event(), threading.Event()

    def handle(*_: object) -> None:
        handled.set()
        raise Interrupted

    def call() -> int:
        while moment not in functions_of(main):
            time.sleep(0.001)
        time.sleep(0.05)
        signal.pthread_kill(main.ident or 0, signal.SIGUSR1)
        assert handled.wait(60)
        time.sleep(0.2)
        ended.set()
        return 7

    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        really_start(thread)
        handled.wait(60)

    if moment == "start":
        monkeypatch.setattr(threading.Thread, "start", start)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Interrupted):
            with_deep_stack(2000, call)
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    write_vocabulary(path, "rwkv", ["a", "b", "ab"])
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(bytes(path), params)
    try:
        vocab = llama_cpp.llama_model_get_vocab(model)
        assert tokenize(vocab, "aba", add_special=True, parse_special=False) == [2, 0]
        with pytest.raises(BadArgument, match="no tokens for a part"):
            tokenize(vocab, "abc", add_special=True, parse_special=False)
    finally:
        llama_cpp.llama_model_free(model)
