from __future__ import annotations

from frameshard.engine.sampling import token_seed


def test_token_seeds_differ_and_are_never_llamas_random_one() -> None:
    seeds = {token_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9_990
    assert 0xFFFFFFFF not in seeds
