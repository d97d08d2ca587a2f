"""Drafts tokens with a small model of the same vocabulary: speculative decoding (Leviathan et al., 2023).

The draft model drafts greedily. The *target*, the model that answers, samples every token from its own logits.

The draft model is a :class:`~frameshard.engine.runtime.Runtime` on the CPU: its weights and KV cache are in host
memory and do not count against the budget. Its KV cache is allocated at once, so its context is as long as the target's
only up to :data:`CONTEXT` tokens, and only as far as the draft model has positions. Nothing is drafted for longer
texts. The draft model computes between the decodes of the target, with the same number of threads.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import llama_cpp

from frameshard.engine.llama import Rows
from frameshard.engine.runtime import Runtime
from frameshard.engine.sequences import common_prefix
from frameshard.errors import BadModel, FrameshardError, Unsupported
from frameshard.plan.memory import longest_context
from frameshard.plan.model import read_model
from frameshard.wire.engine import EngineConfig

CONTEXT = 16384
"""The most tokens in the draft model's context, all sequences together."""

CHUNK = 256
"""The most tokens that are prefilled between two decodes of the target, so that a long prompt delays no other job."""

# Vocabularies of one model family may differ in size by _PADDING tokens and in the first _FIRST tokens. llama.cpp has
# the same limits.
_PADDING = 128
_FIRST = 5
# In stream-only mode costs must not depend on measured times, so they are constants. A drafted token costs _SHARE of a
# decode of the target, times the ratio of the two file sizes: host memory is read two to five times as fast as weights
# are copied. A token of prefill costs _PREFILL_COST of a drafted token.
_SHARE = 0.3
_PREFILL_COST = 0.125
_SPREAD = 64  # the cost of a prefill is spread over at most so many decodes
_NEW_WEIGHT = 0.1  # weight of a new measurement in the moving average
_FADING = 0.995  # each decode without the draft model multiplies the measured times by this

_DECAY = 0.95  # weight of an observation relative to the next one
_PRIOR_WEIGHT = 4.0  # the usual rate counts as so many observations
_USUAL = 0.6  # usual acceptance rate


class DraftState:
    """The drafted tokens for one answer, and their recent acceptance rate. Both depend only on the text."""

    def __init__(self) -> None:
        self.next: list[int] = []
        """The drafted tokens that would follow the text so far."""
        self._accepted = self._tried = 0.0

    def add(self, token: int) -> None:
        """Appends ``token`` to the answer."""
        self._accepted *= _DECAY
        self._tried *= _DECAY
        if self.next:
            accepted = token == self.next.pop(0)
            self._tried += 1
            self._accepted += accepted
            if not accepted:
                self.next.clear()

    def expected(self, n: int) -> float:
        """The expected number of tokens that a decode with ``n`` drafted tokens yields; as :meth:`Lookup.expected`."""
        rate = (self._accepted + _PRIOR_WEIGHT * _USUAL) / (self._tried + _PRIOR_WEIGHT)
        return sum(rate**i for i in range(n + 1))


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Names the draft model in errors, because a launch names another model, too."""
    try:
        yield
    except FrameshardError as error:
        raise type(error)(f"draft model {os.path.basename(path)}: {error.message}", **error.detail) from None


class DraftModel:
    """A loaded draft model. Only the thread of ``target`` may use it. An abort of the target aborts it too.

    :param target: the runtime of the model that answers.
    :param path: the draft model's GGUF file.
    :raises ModelNotFound: no such file.
    :raises BadModel: the file is damaged, or the vocabulary differs from the target's.
    :raises Unsupported: the model cannot draft, because it has a recurrent state or is not a text generator.
    :raises OutOfMemory: host memory was refused.
    """

    def __init__(self, target: Runtime, path: str) -> None:
        self._target = target
        n_ctx = min(target.n_ctx_seq, CONTEXT // target.config.n_parallel)
        with _naming(path):
            config = EngineConfig(
                model=path,
                n_ctx=longest_context(read_model(path), n_ctx) or n_ctx,
                n_ubatch=CHUNK,
                n_parallel=target.config.n_parallel,
                n_threads=target.n_threads,
            )
            self._runtime = Runtime.load(config)
        try:
            with _naming(path):
                self._check_cache()
            self._check_vocabulary()
            self._abort_callback = llama_cpp.ggml_abort_callback(lambda _: target.on_node())
            llama_cpp.llama_set_abort_callback(self._runtime.llama.context, self._abort_callback, None)
            self._held: list[list[int]] = [[] for _ in range(target.config.n_parallel)]
            self._share = _SHARE * self._runtime.model_info.file_bytes / target.model_info.file_bytes
            self._measure()
        except BaseException:
            self._runtime.close()
            raise

    def has_room(self, n_tokens: int) -> bool:
        """Whether a text of ``n_tokens`` tokens, drafted ones included, fits the context."""
        return n_tokens <= self._runtime.n_ctx_seq

    def draft(self, texts: Mapping[int, Sequence[int]], n: int) -> dict[int, list[int]]:
        """Drafts the next ``n`` tokens of each text.

        :param texts: the text of each sequence.
        :returns: the drafted tokens of each sequence. Empty if the texts have more than :data:`CHUNK` tokens to
            prefill: then the call has prefilled :data:`CHUNK` of them.
        :raises DecodeAborted: the target's abort is in force.
        :raises FrameshardError: llama.cpp failed. The draft model must not be used any more.
        """
        unread: dict[int, Sequence[int]] = {}
        for seq, text in sorted(texts.items()):
            if not self.unread(seq, text):
                self._cut(seq, len(text) - 1)  # decode the last token again: its logits predict the next one
            unread[seq] = text[len(self._held[seq]) :]
        if sum(map(len, unread.values())) > self._runtime.n_ubatch:
            longest = max(unread, key=lambda seq: len(unread[seq]))
            self._decode({longest: unread[longest][: self._runtime.n_ubatch]})
            return {}
        drafted: dict[int, list[int]] = {seq: [] for seq in unread}
        for _ in range(n):
            likeliest = self._decode(unread)
            for seq, token in likeliest.items():
                drafted[seq].append(token)
            unread = {seq: [token] for seq, token in likeliest.items()}
        return drafted

    def unread(self, seq: int, text: Sequence[int]) -> int:
        """The number of tokens of ``text`` that are not in the KV cache of ``seq`` yet. Removes tokens from the cache
        that differ from ``text``."""
        held = self._held[seq]
        if text[: len(held)] != held:
            self._cut(seq, common_prefix(held, text))
        return len(text) - len(held)

    def forget(self, seq: int) -> None:
        """Empties sequence ``seq``."""
        self._cut(seq, 0)

    def seconds(self, n_seq: int, n_drafted: int, n_unread: int, n_left: int) -> float:
        """The predicted time of a draft, from recent measurements. In stream-only mode it is relative to the time of a
        decode, as in :meth:`StepCosts.seconds`, and depends only on the arguments.

        :param n_seq: the number of texts to draft for.
        :param n_drafted: the drafted tokens of each text.
        :param n_unread: the tokens to prefill first, all texts together. Their cost is spread over several decodes.
        :param n_left: the most tokens that the answers can still get; limits the number of these decodes.
        """
        if not n_seq:
            return 0.0
        if self._target.mode == "stream_only":
            return self._share * (n_drafted + _PREFILL_COST * n_unread / _SPREAD)
        prefill_s = self._token_s * n_unread / min(_SPREAD, n_left)
        return self._fading * (self.step_seconds(n_seq) * n_drafted + prefill_s)

    def pass_over(self) -> None:
        """To be called for each decode without the draft model. It lowers the measured times a little, so that the
        draft model is tried again at some time: the last measurement may have been an outlier."""
        self._fading *= _FADING

    def step_seconds(self, n_seq: int) -> float:
        """The recent time of one decode with ``n_seq`` sequences. If that was not measured yet, the time of the next
        smaller number."""
        return self._step_s[max(n for n in self._step_s if n <= n_seq)]

    def check_file(self) -> None:
        """Checks that the draft model's file was not changed in place.

        :raises BadModel: it was changed since it was loaded.
        """
        self._runtime.check_file()

    def close(self) -> None:
        """Frees the model."""
        self._runtime.close()

    def _check_cache(self) -> None:
        if not self._runtime.llama.can_trim:
            raise Unsupported(
                "it has a recurrent state, and a draft model must be able to remove tokens from its cache: choose "
                "another",
                arch=self._runtime.model_info.arch,
            )

    def _check_vocabulary(self) -> None:
        for reason in self._differences():
            raise BadModel(
                f"{self._runtime.config.model} cannot be the draft model of {self._target.config.model}: {reason}. "
                "Choose a smaller model of the same family, or none"
            )

    def _differences(self) -> Iterator[str]:
        ours, theirs = self._runtime.tokenizer.vocab, self._target.tokenizer.vocab
        sizes = self._runtime.n_vocab, self._target.n_vocab
        if abs(sizes[0] - sizes[1]) > _PADDING:
            yield f"its vocabulary has {sizes[0]} tokens, not {sizes[1]}"
        if llama_cpp.llama_vocab_type(ours) != llama_cpp.llama_vocab_type(theirs):
            yield "its vocabulary is of another kind"
        for token in range(_FIRST, min(sizes)):
            piece, other = (llama_cpp.llama_vocab_get_text(vocab, token) for vocab in (ours, theirs))
            if piece != other:
                shown = " in its vocabulary, not ".join(
                    repr(each.decode("utf-8", "replace")) for each in (piece, other)
                )
                yield f"token {token} is {shown}"

    def _measure(self) -> None:
        """Measures the first times for :meth:`seconds`."""
        self._step_s: dict[int, float] = {}
        self._fading = 1.0
        n = max(1, min(32, self._runtime.n_ubatch, self._runtime.n_ctx_seq - 5))
        tokens = [0] * n
        start = time.perf_counter()
        self._runtime.decode([Rows(0, tokens, "none")])
        self._token_s = (time.perf_counter() - start) / n
        took = []
        for _ in range(5):
            start = time.perf_counter()
            self._runtime.decode([Rows(0, [0])])
            took.append(time.perf_counter() - start)
        self._step_s[1] = min(took)
        self._runtime.clear(0)

    def _decode(self, texts: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Decodes the text of each sequence.

        :returns: for each sequence the most likely next token.
        """
        runtime, n, n_seq = self._runtime, sum(map(len, texts.values())), len(texts)
        start = time.perf_counter()
        # The target's vocabulary may be a few tokens longer. The last tokens are padding.
        rows = [Rows(seq, [min(token, runtime.n_vocab - 1) for token in text]) for seq, text in texts.items()]
        outputs = runtime.decode(rows)
        for seq, text in texts.items():
            self._held[seq] += text
        n_vocab = self._target.n_vocab
        likeliest = {seq: int(runtime.logits(row)[:n_vocab].argmax()) for seq, row in zip(texts, outputs, strict=True)}
        took = time.perf_counter() - start
        self._fading = 1.0
        if n <= 2 * n_seq:  # a drafting step, not a prefill: its first decode may have two tokens for each sequence
            known = self._step_s.setdefault(n_seq, took)
            self._step_s[n_seq] = known + _NEW_WEIGHT * (took - known)
        else:
            self._token_s += _NEW_WEIGHT * (took / n - self._token_s)
        return likeliest

    def _cut(self, seq: int, length: int) -> None:
        del self._held[seq][self._runtime.trim(seq, length) :]
