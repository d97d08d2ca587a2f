"""Sampling parameters and llama.cpp's sampler chain.

The random generator for token ``i`` of a job is seeded only from ``(seed, i)``. So a resumed job continues with the
same text without a saved generator state: the logits and the tokens before are enough.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from frameshard.engine.forms import Matcher
from frameshard.wire.messages import Sampling

PENALTY_WINDOW = 64
"""The number of last tokens, of prompt and answer, that the penalties apply to."""

NO_PENALTIES = (1.0, 0.0, 0.0)
"""The penalties for repetition, frequency and presence that change nothing."""

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's breakers, for a request that names none."""

COLUMN = 64
"""To find the most likely tokens, the logits are split into columns of so many, and the largest of each is compared."""

GREEDY_BELOW = 0.001  # with a lower temperature, the divided logits may exceed the range of a float

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def token_seed(seed: int, index: int) -> int:
    """Returns the 32-bit seed of the generator for token ``index``. It is a splitmix64 hash, so that the seeds of
    neighbouring tokens are unrelated."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    folded = (x ^ (x >> 31)) & 0xFFFFFFFF
    return folded if folded != llama_cpp.LLAMA_DEFAULT_SEED else 0  # the default seed would mean "random"


def likeliest(logits: npt.NDArray[np.float32], k: int, changing: Collection[int] = ()) -> npt.NDArray[np.intp] | None:
    """The ``k`` most likely tokens, and often a few more. The time of llama.cpp's samplers grows with the number of
    tokens that they get: for a vocabulary of 150,000 it is 0.8 ms.

    :param logits: of all tokens, shape [n_vocab].
    :param k: 0: all tokens may be needed.
    :param changing: tokens whose logits the samplers change first. The result has these, and the ``k`` most likely ones
        whatever the changes are.
    :returns: their ids, ascending; None for all tokens.
    """
    if k:
        k += len(changing)  # so many of the most likely may become less likely
    n_columns = len(logits) // COLUMN
    if not 0 < k <= n_columns:
        return None
    most = logits[: n_columns * COLUMN].reshape(COLUMN, n_columns).max(axis=0)
    least = np.partition(most, n_columns - k)[n_columns - k]  # k columns have a logit that is at least as large
    found = np.flatnonzero(logits >= least)
    return np.union1d(found, np.fromiter(changing, np.intp)) if changing else found


class Dry:
    """llama.cpp's DRY sampler, which penalises the continuation of repeated sequences.

    :param sampler: llama.cpp's sampler, which this object frees.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)

    @classmethod
    def make(cls, vocab: Any, params: Sampling, n_ctx: int) -> Dry:
        """Makes the sampler. This searches the vocabulary for each breaker, 10 to 100 ms.

        :param vocab: llama.cpp's vocabulary.
        :param n_ctx: the tokens of a whole context.
        """
        breakers = [text.encode("utf-8", "replace") for text in params.dry_sequence_breakers or DRY_BREAKERS]
        last_n = n_ctx if params.dry_penalty_last_n < 0 else params.dry_penalty_last_n
        weights = params.dry_multiplier, params.dry_base, params.dry_allowed_length, last_n
        array = (ctypes.c_char_p * len(breakers))(*breakers)
        return cls(llama_cpp.llama_sampler_init_dry(vocab, *weights, array, len(breakers)))

    def copy(self) -> Any:
        """Returns a copy of llama.cpp's sampler, which the caller frees."""
        return llama_cpp.llama_sampler_clone(self._sampler)

    def after(self, tokens: Sequence[int]) -> Dry:
        """Returns a copy that has seen ``tokens``."""
        copy = self.copy()
        for token in tokens:
            llama_cpp.llama_sampler_accept(copy, token)
        return Dry(copy)


class Prepared(NamedTuple):
    """What takes long to make for a sampler. The threads that prepare requests make it.

    :param matcher: computes the tokens that the form of the answer allows; ``None`` for any text.
    :param biases: pairs of a token and what is added to its logit.
    :param dry: the DRY sampler after the prompt; ``None``: off.
    """

    matcher: Matcher | None = None
    biases: Sequence[tuple[int, float]] = ()
    dry: Dry | None = None


NOTHING_PREPARED = Prepared()


class Sampler:
    """The sampler chain of one job: logit bias, penalties, DRY, top-k, typical-p, top-p, min-p, XTC, temperature, then
    the random draw. Free it with :meth:`close`.

    :param seed: the job's seed.
    :param context_tokens: the prompt's tokens, which the penalties apply to as well.
    :param prepared: of an answer with a form, the chain gets only the tokens that the matcher allows.
    :param answering: whether the next token is of the answer's text. Else the form does not apply to it.
    """

    def __init__(
        self,
        params: Sampling,
        seed: int,
        n_vocab: int,
        context_tokens: Sequence[int],
        prepared: Prepared = NOTHING_PREPARED,
        answering: Callable[[], bool] = lambda: True,
    ) -> None:
        self._params = params
        self._seed = seed
        self._n_vocab = n_vocab
        self._matcher = prepared.matcher
        self._answering = answering
        self._draws = params.temperature >= GREEDY_BELOW
        self._top_k = params.top_k if self._draws else 1
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        self._biased = frozenset(token for token, _ in prepared.biases)
        self._penalised = deque[int](maxlen=0)
        steps: list[Any] = []  # those that change logits
        if biases := prepared.biases:
            array = (llama_cpp.llama_logit_bias * len(biases))(*biases)
            steps.append(llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(biases), array))
        weights = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        if weights != NO_PENALTIES:
            penalties = llama_cpp.llama_sampler_init_penalties(n_vocab, PENALTY_WINDOW, *weights)
            self._penalised = deque(context_tokens[-PENALTY_WINDOW:], maxlen=PENALTY_WINDOW)
            for token in self._penalised:
                llama_cpp.llama_sampler_accept(penalties, token)
            steps.append(penalties)
        if prepared.dry is not None:
            steps.append(prepared.dry.copy())
            self._top_k = 0  # it may change the logits of any token
        if self._draws:
            if params.top_k > 0:
                steps.append(llama_cpp.llama_sampler_init_top_k(params.top_k))
            if params.typical_p < 1.0:
                steps.append(llama_cpp.llama_sampler_init_typical(params.typical_p, 1))
            if params.top_p < 1.0:
                steps.append(llama_cpp.llama_sampler_init_top_p(params.top_p, 1))
            if params.min_p > 0.0:
                steps.append(llama_cpp.llama_sampler_init_min_p(params.min_p, 1))
        else:
            steps.append(llama_cpp.llama_sampler_init_greedy())
        for step in steps:
            llama_cpp.llama_sampler_chain_add(self._chain, step)

    @property
    def _form(self) -> Matcher | None:
        """The form that the next token must fit; ``None`` if it has none."""
        return self._matcher if self._answering() else None

    @property
    def complete(self) -> bool:
        """True if the answer has a form and is complete by it."""
        return self._form is not None and self._form.complete

    def sample(self, context: Any, row: int, index: int) -> int:
        """Samples and accepts token ``index`` of the answer, from ``row`` of the context's last decode.

        :raises BadArgument: the answer's form is too complex.
        """
        steps = self._seeded_steps(token_seed(self._seed, index)) if self._draws else []
        for step in steps:
            llama_cpp.llama_sampler_chain_add(self._chain, step)
        try:
            return self._choose(context, row)
        finally:
            for _ in steps:
                last = llama_cpp.llama_sampler_chain_n(self._chain) - 1
                llama_cpp.llama_sampler_free(llama_cpp.llama_sampler_chain_remove(self._chain, last))

    def _seeded_steps(self, seed: int) -> list[Any]:
        """Returns the end of the chain, from the first step that uses random numbers. It is made anew for each
        token."""
        params, steps = self._params, []
        if params.xtc_probability > 0.0:
            xtc = params.xtc_probability, params.xtc_threshold
            steps.append(llama_cpp.llama_sampler_init_xtc(*xtc, 1, token_seed(seed, 0)))
        steps.append(llama_cpp.llama_sampler_init_temp(params.temperature))
        steps.append(llama_cpp.llama_sampler_init_dist(seed))
        return steps

    def _choose(self, context: Any, row: int) -> int:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (self._n_vocab,))
        allowed = (
            likeliest(logits, self._top_k, self._biased.union(self._penalised))
            if self._form is None
            else self._form.allowed()
        )
        if allowed is None:
            token = int(llama_cpp.llama_sampler_sample(self._chain, context, row))  # accepts it, too
            self._penalised.append(token)
            return token
        candidates = np.zeros(len(allowed), _CANDIDATE)
        candidates["id"] = allowed
        candidates["logit"] = logits[allowed]
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        array = llama_cpp.llama_token_data_array(data, len(allowed), -1, False)
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Adds a token that was not sampled here to the penalties and to the answer's form.

        :raises BadArgument: the form does not allow the token.
        """
        llama_cpp.llama_sampler_accept(self._chain, token)
        self._penalised.append(token)
        if self._form is not None:
            self._form.accept(token)

    def close(self) -> None:
        """Frees the chain. Safe to call twice."""
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
