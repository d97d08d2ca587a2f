from __future__ import annotations

import pytest

from frameshard.engine.sampling import SamplingParams, token_seed
from frameshard.errors import BadArgument


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"temperature": "hot"},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"min_p": -1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_k": 2**31},
        {"repeat_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"seed": -1},
        {"seed": 2**53},
        {"stop": "text"},
        {"stop": [""]},
        {"stop": [1]},
        {"stop": ["x"] * 17},
        {"stop": ["x" * 1025]},
        {"mirostat": 2},
    ],
)
def test_bad_parameters_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(BadArgument) as caught:
        SamplingParams.from_wire(bad)
    assert caught.value.detail["field"] == next(iter(bad))


def test_limits_are_allowed() -> None:
    params = SamplingParams.from_wire(
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "seed": 2**53 - 1, "stop": ["é" * 512], "max_tokens": 1}
    )
    assert params.stop == ("é" * 512,)


def test_token_seeds_differ_and_are_never_llamas_random_one() -> None:
    seeds = {token_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9_990
    assert 0xFFFFFFFF not in seeds
