"""A device that refuses memory, fails or hangs. The engine reports it, and ends or continues."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from engine_driver import EngineProcess, engine, ids, user

from sidecars import DEADLINE_S

CASTLE = user("Who lives in the old castle?")
FIELDS: dict[str, object] = {
    "device": "emulated",
    "mode": "stream_only",
    "n_ctx": 512,
    "n_parallel": 1,
    "n_threads": 1,
    "vram_budget_bytes": 100 << 20,
}


def test_each_refused_allocation_of_loading(deep_model: Path) -> None:
    outcomes = []
    answers = set()
    for k in range(1, 13):
        child = EngineProcess(faults=f"alloc={k}")
        try:
            event = child.load(deep_model, **FIELDS)
            if event["ev"] == "fatal":
                assert event["error"]["name"] == "out_of_memory"
                assert event["error"]["retriable"] is True
                assert child.process.wait(DEADLINE_S) == 3
            else:  # the memory was for a slab of the arena, and the engine continues without it
                answers.add(tuple(ids(child.run("Once upon a time", params={"max_tokens": 8}))))
                assert child.stats()["peak_bytes"] <= 100 << 20
            outcomes.append(event["ev"])
        finally:
            child.close()
    assert set(outcomes) == {"fatal", "ready"}
    assert len(answers) == 1


IMPATIENT = "from frameshard.engine import batch, process; batch.TAKEN_S = 0.0; process.main()"


@pytest.mark.parametrize("ms", [400, 4000])
def test_jobs_wait_for_vram_that_another_program_holds(deep_model: Path, ms: int) -> None:
    """If they wait too long they fail alone, and later ones do not. A busy machine may take seconds for a decode, so
    the engine that is to wait too long does not wait at all."""
    params = {"max_tokens": 40, "temperature": 1.0, "seed": 1}
    with engine(deep_model, **FIELDS) as child:
        expected = ids(child.run("Once upon a time", params=params))
    faults = f"other_mb=8190,other_from=20,other_ms={ms}"
    child = EngineProcess(faults) if ms == 400 else EngineProcess(faults, program=("-c", IMPATIENT))
    try:
        assert child.load(deep_model, **FIELDS)["ev"] == "ready"
        events = [child.run("Once upon a time", params=params)]
        until = time.monotonic() + 60
        while events[-1][-1]["ev"] == "failed" and time.monotonic() < until:
            assert events[-1][-1]["error"]["name"] == "out_of_memory"
            assert events[-1][-1]["error"]["retriable"] is True
            time.sleep(0.2)  # the other program is still there
            events.append(child.run("Once upon a time", params=params))
        assert ids(events[-1]) == expected
        assert (len(events) == 1) == (ms == 400)
    finally:
        child.close()


def test_a_failed_compute_ends_the_engine(model_path: Path) -> None:
    child = EngineProcess(faults="compute_fail=200")
    try:
        assert child.load(model_path, **FIELDS)["ev"] == "ready"
        job = child.submit(CASTLE, params={"max_tokens": 200})
        child.wait_for("token", job=job)
        assert child.wait_for("fatal", "done", "failed")["ev"] == "fatal"
        assert child.process.wait(DEADLINE_S) == 3
    finally:
        child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has weights on disk")
def test_a_disk_that_fails_is_the_reason_why_the_engine_ends(own_deep_model: Path) -> None:
    child = EngineProcess(faults="disk_fail=40")
    try:
        ready = child.load(own_deep_model, **FIELDS)
        assert ready["ev"] == "ready"
        vram = ready["model"]["floor_bytes"]
        child.budget(vram, host_bytes=1)
        child.wait_for("refused")  # host memory is measured anew
        child.budget(vram, host_bytes=child.stats()["host"]["floor_bytes"])
        assert child.wait_for("refused", "released")["ev"] == "released"
        child.submit(CASTLE, params={"max_tokens": 200})
        why = child.wait_for("fatal", "done", "failed")
        assert why["ev"] == "fatal"
        assert "the model file cannot be read: the emulated disk has failed" in why["error"]["message"]
        assert child.process.wait(DEADLINE_S) == 3
    finally:
        child.close()


@pytest.mark.parametrize("stop", [False, True])
def test_a_hung_device_shows_and_does_not_keep_the_process(model_path: Path, stop: bool) -> None:
    child = EngineProcess(faults="compute_stuck=200,stuck_ms=600000")
    try:
        assert child.load(model_path, **FIELDS)["ev"] == "ready"
        job = child.submit(CASTLE, params={"max_tokens": 200})
        child.wait_for("token", job=job)
        silent = False
        deadline = time.monotonic() + 60
        while not silent:
            assert time.monotonic() < deadline
            child.send(op="ping", seq=1)
            try:
                child.wait_for("pong", seconds=4)
            except TimeoutError:
                silent = True
        assert child.stats()["jobs_running"] == 1  # requests that do not need the device are still answered
        if stop:
            child.send(op="stop")
        child.socket.close()
        child.process.wait(DEADLINE_S)
    finally:
        child.close()
