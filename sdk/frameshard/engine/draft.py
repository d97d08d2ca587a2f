"""A small model with the same vocabulary guesses what the large one will say: speculative decoding (Leviathan et al.,
2023). It says what it holds most likely; what is drawn from the large model's logits is all that counts.

The draft is a :class:`~frameshard.engine.runtime.Runtime` on the CPU: weights, keys and values are in host memory, and
neither the shard device nor a lease knows of it. Its context is the large model's, but all of it is taken at once and
therefore limited; longer texts are not guessed. It computes between the large model's decodes, with as many threads.
What it holds of a sequence is the text so far, right guesses included, and can be read again: nothing of a draft is
ever saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import llama_cpp

from frameshard.engine.runtime import EngineConfig, Rows, Runtime
from frameshard.errors import BadModel, Unsupported

CONTEXT = 16384
"""Tokens of context of all sequences at most."""

CHUNK = 256
"""Tokens that are read before one decode at most, so that a long prompt holds up nobody."""

# Vocabularies of one family may differ by so many tokens at the end and in the first few; llama.cpp allows as much.
_PADDING = 128
_FIRST = 5
# Of a decode's time, what a guess takes in stream-only mode, times what the draft's file is of the model's: memory is
# read two to five times as fast as a link copies. And what reading a token takes of that.
_SHARE = 0.3
_READING = 0.125
_SPREAD = 64  # decodes that have to make up for reading a text, if the answers last that long
_NEWS = 0.1  # what a new measurement weighs beside the older ones
_FADING = 0.995  # what is left of the times that were measured, by each decode that goes without the draft

_MEMORY = 0.95  # what an older guess weighs beside the next token
_DOUBT = 4.0  # guesses that it takes to be half as sure of the text's own rate as of the usual one
_USUAL = 0.6  # how often a draft's guess is right


class Guesses:
    """The draft's guesses for one answer, and what they were worth of late: by the text alone, as for a lookup."""

    def __init__(self) -> None:
        self.next: list[int] = []
        """What the draft says comes next."""
        self._right = self._tried = 0.0

    def add(self, token: int) -> None:
        """The answer goes on with ``token``."""
        self._right *= _MEMORY
        self._tried *= _MEMORY
        if self.next:
            right = token == self.next.pop(0)
            self._tried += 1
            self._right += right
            if not right:
                self.next.clear()

    def expected(self, n: int) -> float:
        """How many tokens a decode with ``n`` guesses will yield on average; see :meth:`Lookup.expected`."""
        rate = (self._right + _DOUBT * _USUAL) / (self._tried + _DOUBT)
        return sum(rate**i for i in range(n + 1))


class Draft:
    """The draft model in the file ``path`` for ``target``, whose thread it belongs to and whose abort is its own.

    :raises ModelNotFound: no such file.
    :raises BadModel: not a GGUF that can be served, or one with another vocabulary.
    :raises Unsupported: a model of a kind that cannot guess.
    :raises OutOfMemory: the host refuses the memory.
    """

    def __init__(self, target: Runtime, path: str) -> None:
        self._target = target
        self._runtime = Runtime.load(
            EngineConfig(
                model=path,
                n_ctx=min(target.n_ctx_seq, CONTEXT // target.config.n_parallel),
                n_ubatch=CHUNK,
                n_parallel=target.config.n_parallel,
                n_threads=target.n_threads,
            )
        )
        try:
            if not self._runtime.can_go_back:
                raise Unsupported(
                    "a draft model has to take tokens back, and this one cannot (recurrent states): choose another",
                    arch=self._runtime.model_info.arch,
                )
            self._check_vocabulary()
            self._abort_callback = llama_cpp.ggml_abort_callback(lambda _: target.on_node())
            llama_cpp.llama_set_abort_callback(self._runtime.context, self._abort_callback, None)
            self._held: list[list[int]] = [[] for _ in range(target.config.n_parallel)]
            self._share = _SHARE * self._runtime.model_info.file_bytes / target.model_info.file_bytes
            self._measure()
        except BaseException:
            self._runtime.close()
            raise

    def has_room(self, n_tokens: int) -> bool:
        """Texts of so many tokens, guesses included, can be guessed."""
        return n_tokens <= self._runtime.n_ctx_seq

    def guess(self, texts: Mapping[int, Sequence[int]], n: int) -> dict[int, list[int]]:
        """The next ``n`` tokens of each text, by its sequence; none yet while too much of them has to be read first, of
        which each call does a chunk.

        :raises DecodeAborted: the target's abort is in force.
        :raises FrameshardError: llama.cpp failed. The draft must not be used any more.
        """
        unread: dict[int, Sequence[int]] = {}
        for seq, text in sorted(texts.items()):
            if not self.unread(seq, text):
                self._cut(seq, len(text) - 1)  # its logits are what comes next
            unread[seq] = text[len(self._held[seq]) :]
        if sum(map(len, unread.values())) > self._runtime.n_ubatch:
            longest = max(unread, key=lambda seq: len(unread[seq]))
            self._decode({longest: unread[longest][: self._runtime.n_ubatch]})
            return {}
        guessed: dict[int, list[int]] = {seq: [] for seq in unread}
        for _ in range(n):
            said = self._decode(unread)
            for seq, token in said.items():
                guessed[seq].append(token)
            unread = {seq: [token] for seq, token in said.items()}
        return guessed

    def unread(self, seq: int, text: Sequence[int]) -> int:
        """How many tokens of ``text`` the draft has not read yet. What else it held of ``seq`` is forgotten."""
        held = self._held[seq]
        if text[: len(held)] != held:
            self._cut(seq, common_prefix(held, text))
        return len(text) - len(held)

    def forget(self, seq: int) -> None:
        """What sequence ``seq`` holds will be read again."""
        self._cut(seq, 0)

    def seconds(self, n_seq: int, n_guesses: int, n_unread: int, n_left: int) -> float:
        """What it takes to guess so many tokens of each of ``n_seq`` texts, and a share of what it takes to read
        ``n_unread`` of them all first, when answers go on for ``n_left``: by what it took so far. In stream-only mode a
        multiple as of :meth:`Runtime.guess_seconds`, by the text so far alone."""
        if not n_seq:
            return 0.0
        if self._target.mode == "stream_only":
            return self._share * (n_guesses + _READING * n_unread / _SPREAD)
        reading_s = self._token_s * n_unread / min(_SPREAD, n_left)
        return self._fading * (self.step_seconds(n_seq) * n_guesses + reading_s)

    def pass_over(self) -> None:
        """The draft was not worth its time: after many such decodes it is asked again, for what it took last may have
        been a busy moment's figure."""
        self._fading *= _FADING

    def step_seconds(self, n_seq: int) -> float:
        """What the next token of each of ``n_seq`` texts took of late; that of fewer texts until as many were asked
        for."""
        return self._step_s[max(n for n in self._step_s if n <= n_seq)]

    def check_file(self) -> None:
        """:raises BadModel: the draft's file was changed in place since it was loaded."""
        self._runtime.check_file()

    def close(self) -> None:
        """Frees the model."""
        self._runtime.close()

    def _check_vocabulary(self) -> None:
        for reason in self._differences():
            raise BadModel(
                f"{self._runtime.config.model} cannot be the draft model of {self._target.config.model}: {reason}. "
                "Choose a smaller model of the same family, or none"
            )

    def _differences(self) -> Iterator[str]:
        ours, theirs = self._runtime.vocab, self._target.vocab
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
        """First figures for :meth:`seconds`."""
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
        """Reads on, and says of each text what comes next."""
        runtime, n, n_seq = self._runtime, sum(map(len, texts.values())), len(texts)
        start = time.perf_counter()
        # The larger model may have a few tokens more, which no text has.
        rows = [Rows(seq, [min(token, runtime.n_vocab - 1) for token in text]) for seq, text in texts.items()]
        outputs = runtime.decode(rows)
        for seq, text in texts.items():
            self._held[seq] += text
        n_vocab = self._target.n_vocab
        said = {seq: int(runtime.logits(row)[:n_vocab].argmax()) for seq, row in zip(texts, outputs, strict=True)}
        took = time.perf_counter() - start
        self._fading = 1.0
        if n <= 2 * n_seq:  # a decode begins with the token that no guess was needed for
            known = self._step_s.setdefault(n_seq, took)
            self._step_s[n_seq] = known + _NEWS * (took - known)
        else:
            self._token_s += _NEWS * (took / n - self._token_s)
        return said

    def _cut(self, seq: int, length: int) -> None:
        del self._held[seq][length:]
        self._runtime.trim(seq, length)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with together."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
