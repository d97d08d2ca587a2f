"""The division of a grant between a streaming pool and a sidecar: its rules, with any demand and any slow peers."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frameshard.arbiter import Arbiter, BudgetStep, PoolNeeds, SidecarNeeds, useful_budget
from frameshard.wire.messages import PlanRow

GRANT, FLOOR, USEFUL, STEP, DWELL_S = 1000, 100, 700, 50, 1.0


def row(budget_bytes: int, rate: float | None) -> PlanRow:
    return PlanRow(budget_bytes, rate is not None, None, rate, 0, 0, 0)


@dataclass
class Game:
    """A pool and a sidecar that follow the arbiter as slowly as the test wants, and hold as much as they may.

    The sidecar takes more at once when a growth is asked for, and gives back only with its answer.
    """

    arbiter: Arbiter
    grant: int = GRANT
    sidecar: SidecarNeeds = field(default_factory=lambda: SidecarNeeds(FLOOR, USEFUL))
    now: float = 0.0
    pool_holds: int = 0
    sidecar_holds: int = 0
    limit: int = 0
    under_way: BudgetStep | None = None
    steps: list[BudgetStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sidecar_holds = self.arbiter.budget_bytes

    def frame(self, soon: int, *, seconds: float = 0.1, answers: bool = True, evicts: bool = True) -> None:
        self.now += seconds
        if self.under_way is not None and answers:
            self.sidecar_holds = self.under_way.budget_bytes
            self.under_way = None
            self.arbiter.released(self.sidecar_holds)
        decision = self.arbiter.decide(self.now, self.grant, PoolNeeds(self.pool_holds, soon // 2, soon), self.sidecar)
        self.limit = decision.pool_limit_bytes
        if decision.step is not None:
            assert self.under_way is None
            self.under_way = decision.step
            self.steps.append(decision.step)
            self.sidecar_holds = max(self.sidecar_holds, decision.step.budget_bytes)
        if self.limit >= self.pool_holds or evicts:
            self.pool_holds = self.limit


def game(budget: int = 300, *, may_park: bool = False) -> Game:
    return Game(Arbiter(budget, step_bytes=STEP, dwell_s=DWELL_S, may_park=may_park))


FRAMES = st.lists(
    st.tuples(
        st.integers(0, 1200),  # what the pool wants
        st.sampled_from([0.01, 0.1, 0.5, 1.5]),  # seconds
        st.booleans(),  # whether the sidecar answers
        st.booleans(),  # whether the pool evicts
    ),
    max_size=60,
)


@given(FRAMES, st.integers(FLOOR, GRANT), st.booleans(), st.integers(0, 1000), st.integers(0, 1000))
def test_both_never_hold_more_than_the_grant(
    frames: list[tuple[int, float, bool, bool]], budget: int, may_park: bool, floor: int, useful: int
) -> None:
    play = game(budget, may_park=may_park)
    for soon, seconds, answers, evicts in frames:
        play.frame(soon, seconds=seconds, answers=answers, evicts=evicts)
        assert play.pool_holds + play.sidecar_holds <= GRANT
        play.sidecar = SidecarNeeds(floor, useful)
    assert may_park or all(step.state == "active" for step in play.steps)


@given(FRAMES, st.integers(0, 300))
def test_a_budget_is_never_below_the_floor(frames: list[tuple[int, float, bool, bool]], floor: int) -> None:
    play = game()
    play.sidecar = SidecarNeeds(floor, USEFUL)
    for soon, seconds, answers, evicts in frames:
        play.frame(soon, seconds=seconds, answers=answers, evicts=evicts)
    assert all(step.budget_bytes >= floor for step in play.steps)


@given(FRAMES, st.integers(0, 1200), st.booleans(), st.integers(1, 900), st.integers(1, 900))
def test_a_constant_demand_causes_two_changes_at_most(
    frames: list[tuple[int, float, bool, bool]], soon: int, may_park: bool, floor: int, useful: int
) -> None:
    play = game(may_park=may_park)
    for wanted, seconds, answers, evicts in frames:
        play.frame(wanted, seconds=seconds, answers=answers, evicts=evicts)
    play.frame(soon)
    play.frame(soon)  # what was under way is answered
    play.sidecar = SidecarNeeds(floor, useful)
    n_before = len(play.steps)
    for _ in range(100):
        play.frame(soon)
    assert len(play.steps) <= n_before + 2
    n_before = len(play.steps)
    for _ in range(100):
        play.frame(soon)
    assert len(play.steps) == n_before
    assert play.limit == play.grant - play.arbiter.charged_bytes


@given(FRAMES, st.lists(st.integers(0, 1500), min_size=1))
def test_a_grant_that_falls_is_kept_when_both_have_followed(
    frames: list[tuple[int, float, bool, bool]], grants: list[int]
) -> None:
    play = game()
    for at, (soon, seconds, answers, evicts) in enumerate(frames):
        play.grant = grants[at % len(grants)]
        play.frame(soon, seconds=seconds, answers=answers, evicts=evicts)
        assert play.limit <= max(0, play.grant - play.arbiter.charged_bytes)
    for _ in range(3):
        play.frame(0)
    assert play.pool_holds + play.sidecar_holds <= max(play.grant, FLOOR)


def test_the_demand_takes_back_at_once_and_the_pool_waits_for_the_release() -> None:
    play = game(600)
    play.frame(soon=800, answers=False)
    assert play.steps == [BudgetStep(200)]
    for _ in range(5):
        play.frame(soon=800, answers=False)
        assert play.limit == 400
    play.frame(soon=800)
    assert play.limit == 800
    assert len(play.steps) == 1


def test_the_sidecar_grows_after_the_dwell_time_and_when_the_pool_has_evicted() -> None:
    play = game(200)
    for _ in range(9):
        play.frame(soon=800)
    assert play.pool_holds == 800
    for _ in range(9):
        play.frame(soon=250, evicts=False)
        assert play.limit == 800
    for _ in range(20):
        play.frame(soon=250, evicts=False)
    assert play.limit == GRANT - USEFUL
    assert play.steps == []
    play.frame(soon=250)
    play.frame(soon=250)
    assert play.steps == [BudgetStep(USEFUL)]


def test_a_peak_within_the_dwell_time_holds_the_growth_back() -> None:
    play = game(200)
    for _ in range(10):
        for _ in range(8):
            play.frame(soon=250)
        play.frame(soon=750)
    assert {step.budget_bytes for step in play.steps} <= {250}


def test_growth_below_a_step_does_not_happen() -> None:
    play = game(200)
    for _ in range(40):
        play.frame(soon=GRANT - 200 - STEP + 1)
    assert play.steps == []
    for _ in range(40):
        play.frame(soon=GRANT - 200 - STEP)
    assert play.steps == [BudgetStep(250)]
    play = game(230)
    for _ in range(40):
        play.frame(soon=GRANT - 250)
    assert play.steps == []


def test_what_the_sidecar_does_not_want_is_the_pools() -> None:
    play = game(600)
    play.sidecar = SidecarNeeds(FLOOR, 120)
    play.frame(soon=100)
    play.frame(soon=100)
    assert play.steps == [BudgetStep(150)]
    assert play.limit == GRANT - 150
    for _ in range(20):
        play.frame(soon=100)
    play.sidecar = SidecarNeeds(FLOOR, USEFUL)
    play.frame(soon=100)  # the room has been there: the pool evicts at once
    play.frame(soon=100)
    assert play.steps[1:] == [BudgetStep(USEFUL)]


def test_it_parks_only_where_it_may() -> None:
    play = game()
    for _ in range(5):
        play.frame(soon=950)
    assert play.steps == [BudgetStep(FLOOR)]
    play = game(may_park=True)
    for _ in range(5):
        play.frame(soon=950)
    assert play.steps == [BudgetStep(0, "parked")]
    assert play.limit == GRANT
    for _ in range(9):
        play.frame(soon=850)
    assert len(play.steps) == 1
    for _ in range(5):
        play.frame(soon=850)
    assert play.steps[1:] == [BudgetStep(150)]


def test_a_refused_step_changes_nothing_and_comes_again_later() -> None:
    play = game(600)
    play.frame(soon=800, answers=False)
    play.arbiter.refused(play.now)
    play.under_way = None
    for _ in range(8):
        play.frame(soon=800)
        assert play.limit == 400
    assert len(play.steps) == 1
    for _ in range(4):
        play.frame(soon=800)
    assert len(play.steps) == 2
    assert play.limit == 800


def test_the_room_for_a_refused_growth_goes_back_to_the_pool() -> None:
    play = game(200)
    while not play.steps:
        play.frame(soon=250, answers=False)
    assert play.limit == GRANT - USEFUL
    play.arbiter.refused(play.now)
    play.under_way = None
    play.frame(soon=250)
    assert play.limit == 800


def test_what_a_late_release_still_holds_counts() -> None:
    play = game(600)
    play.frame(soon=800, answers=False)
    play.arbiter.released(500)
    play.under_way = None
    play.frame(soon=800)
    assert play.limit == 500
    play.arbiter.holds(150)
    play.frame(soon=800)
    assert play.limit == 800  # it may take the rest of its budget


def test_the_useful_budget_is_the_smallest_that_is_fast() -> None:
    rows = [row(100, None), row(200, 10.0), row(300, 19.7), row(400, 20.0), row(500, 20.0)]
    assert useful_budget(rows) == 300
    assert useful_budget(rows[:2]) == 200
    assert useful_budget(rows[:1]) == 0


def test_wrong_parameters_are_refused() -> None:
    for wrong in ({"step_bytes": 0}, {"step_bytes": 1, "dwell_s": -1.0}):
        with pytest.raises(ValueError, match="must"):
            Arbiter(100, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must"):
        Arbiter(0, step_bytes=1)
    with pytest.raises(RuntimeError, match="no step"):
        Arbiter(1, step_bytes=1).released(1)


def test_the_runs_for_the_other_languages_are_fresh() -> None:
    """bindings/arbiter.json, which the C library repeats, has what the arbiter decides."""
    script = Path(__file__).parent / "conformance" / "make_arbiter.py"
    made = runpy.run_path(str(script))
    assert made["FILE"].read_text() == made["text"](), "run `make generate`"
    states = {call[4] for run in json.loads(made["text"]()) for call in run["calls"] if call[0] == "decide"}
    assert states == {0, 1, 2}
