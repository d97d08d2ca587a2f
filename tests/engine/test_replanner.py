"""Plans that are made while tokens are: a real engine process on the emulated device."""

from __future__ import annotations

from pathlib import Path

from engine_driver import EngineProcess, text, user

from servers import until

PROGRAM = Path(__file__).with_name("plans_that_wait.py")
CASTLE = user("Who lives in the old castle?")
FIELDS: dict[str, object] = {"device": "emulated", "n_ctx": 1024, "n_parallel": 1, "n_threads": 1}


def test_tokens_do_not_wait_for_a_plan(shallow_model: Path, tmp_path: Path) -> None:
    """The plan for a new budget waits here until some tokens were decoded with the old one."""
    log, params = tmp_path / "log", {"max_tokens": 60}
    with open(log, "wb") as messages:
        child = EngineProcess(program=[str(PROGRAM)], log=messages)
    try:
        ready = child.load(shallow_model, mode="stream_only", speculate="off", **FIELDS)
        assert ready["ev"] == "ready", ready
        alone = text(child.run(CASTLE, params=params))
        with child.slowly():
            job = child.submit(CASTLE, params=params)
            first = child.wait_for("token")
            before = len(log.read_text().splitlines())
            child.budget(floor := ready["model"]["floor_bytes"])
            until(lambda: f"adopted at {floor}" in log.read_text().splitlines()[before:])
        events = child.finish(job)[job]
        assert events[-1]["ev"] == "done"
        assert text([first, *events]) == alone
    finally:
        child.close()
    told = [line.split() for line in log.read_text().splitlines()[before:]]
    beside = next(i for i, words in enumerate(told) if words[0] == "beside")
    assert int(told[beside][1]) >= 8
    assert ["adopted", "at", str(floor)] in told[beside:]
