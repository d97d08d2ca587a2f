from __future__ import annotations

import numpy as np
import pytest

from frameshard.engine.sampling import likeliest, token_seed


def test_token_seeds_differ_and_are_never_llamas_random_one() -> None:
    seeds = {token_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9_990
    assert 0xFFFFFFFF not in seeds


@pytest.mark.parametrize("n_vocab", [64 * 40, 64 * 40 + 63, 49_152, 151_936])
@pytest.mark.parametrize("k", [1, 2, 40])
def test_the_likeliest_tokens_are_among_those_that_are_kept(n_vocab: int, k: int) -> None:
    random = np.random.default_rng(k)
    for _ in range(10):
        logits = random.standard_normal(n_vocab).astype(np.float32)
        logits[random.integers(n_vocab, size=100)] = 8.0  # many are equal
        logits[-30:] += random.integers(20)  # beside each other, at the end
        logits[random.integers(n_vocab, size=n_vocab // 2)] = -np.inf
        kept = likeliest(logits, k)
        assert kept is not None
        assert list(kept) == sorted(set(kept))
        assert sorted(logits[kept])[-k:] == sorted(logits)[-k:]
        assert len(kept) < n_vocab // 4


@pytest.mark.parametrize("k", [1, 2, 40])
def test_the_likeliest_tokens_are_kept_whatever_changes(k: int) -> None:
    random = np.random.default_rng(k)
    for change in (-30.0, 30.0):
        logits = random.standard_normal(49_152).astype(np.float32)
        changing = {*logits.argsort()[-20:].tolist(), *random.integers(49_152, size=40).tolist()}
        kept = likeliest(logits, k, changing)
        assert kept is not None
        assert list(kept) == sorted(set(kept))
        logits[list(changing)] += change
        assert sorted(logits[kept])[-k:] == sorted(logits)[-k:]
        assert len(kept) < 1000


def test_all_tokens_are_kept_for_a_sampler_that_may_need_them() -> None:
    logits = np.zeros(6400, np.float32)
    assert likeliest(logits, 0) is None
    assert likeliest(logits, 0, {1}) is None
    assert likeliest(logits, 101) is None
    assert likeliest(logits, 99, {1, 2}) is None
    kept = likeliest(logits, 100)
    assert kept is not None
    assert len(kept) == 6400  # all are equally likely
