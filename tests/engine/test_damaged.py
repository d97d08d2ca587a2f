"""Models with damaged weights. Infinite logits are refused at the load, or fail only the job that they are in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import EngineProcess, engine, ids

import mutants

SPOILT = "Q"
"""In the damaged model the token of this character has an embedding of NaN."""

DEVICES = ("cpu", "emulated")
ANSWER = {"max_tokens": 24, "temperature": 0.0}


def fields(device: str) -> dict[str, object]:
    return {"device": device, "n_ctx": 256, "n_parallel": 2, "n_ubatch": 32, "n_threads": 1}


def spoil(model: Path, path: Path, tensor: str, rows: slice) -> Path:
    """A copy of ``model`` with NaN in ``rows`` of a matrix of type F16."""
    file = mutants.Gguf(model)
    info = next(each for each in file.tensors if each.name.decode() == tensor)
    values = np.frombuffer(info.data, np.float16).reshape(info.shape[::-1]).copy()
    values[rows] = np.nan
    info.data = values.tobytes()
    return file.write(path)


@pytest.fixture(scope="module")
def one_token(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    token = 3 + ord(SPOILT)  # a byte token
    path = tmp_path_factory.mktemp("damaged") / "one-token.gguf"
    return spoil(tiny_model("llama"), path, "token_embd.weight", slice(token, token + 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tensor", ["token_embd", "blk.2.ffn_down"])
def test_a_model_that_computes_no_numbers_is_refused(
    device: str, tensor: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = spoil(tiny_model("llama"), tmp_path / "bad.gguf", f"{tensor}.weight", slice(None))
    child = EngineProcess()
    try:
        event = child.load(path, **fields(device))
        assert (event["ev"], event["error"]["name"]) == ("fatal", "bad_model")
        assert "computes NaN" in event["error"]["message"]
    finally:
        child.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_damaged_token_fails_its_job_alone(device: str, one_token: Path) -> None:
    with engine(one_token, **fields(device)) as child:
        alone = ids(child.run("abc abc", params=ANSWER))
        for conversation in (None, "one", "one"):
            other = child.submit("abc abc", params=ANSWER)
            job = child.submit(f"ab{SPOILT} abc", params=ANSWER, conversation=conversation)
            events = child.finish(other, job)
            assert events[job][-1]["ev"] == "failed"
            assert events[job][-1]["error"]["name"] == "bad_model"
            assert ids(events[other]) == alone
        assert ids(child.run("abc abc", params=ANSWER, conversation="one")) == alone


@pytest.mark.parametrize("device", DEVICES)
def test_later_jobs_do_not_meet_the_cells_of_a_damaged_one(device: str, one_token: Path) -> None:
    """Attention multiplies removed cells by 0, and 0 * NaN is NaN. On the CPU it leaves out 64 of them together, in
    steps of at least 64 tokens."""
    options: dict[str, Any] = {**fields(device), "n_ubatch": 128, "mode": "stream_only"}
    healthy, damaged = "e" * 200, SPOILT + "d" * 224
    kept: dict[str, Any] = {"params": ANSWER, "conversation": "one"}
    with engine(one_token, **options) as child:
        alone = ids(child.run(healthy, params=ANSWER))
        first, second = (ids(child.run("abc" * n, **kept)) for n in (40, 41))
    with engine(one_token, **options) as child:
        assert ids(child.run("abc" * 40, **kept)) == first
        for _ in range(2):
            assert child.run(damaged, params=ANSWER)[-1]["error"]["name"] == "bad_model"
            assert ids(child.run(healthy, params=ANSWER)) == alone
        assert ids(child.run("abc" * 41, **kept)) == second
        with child.slowly(20.0):
            other = child.submit(healthy, params=ANSWER)
            begun = child.wait_for("token", job=other)
            job = child.submit(damaged, params=ANSWER)
            events = child.finish(other, job)
        assert events[job][-1]["error"]["name"] == "bad_model"
        assert ids([begun, *events[other]]) == alone
