"""Writes bindings/arbiter.json: runs of the arbiter, which the C library has to repeat. `make generate` runs this.

A run has the parameters of the arbiter and calls in order:

    ["decide", seconds, [grant, held, now, soon, floor, useful], pool limit, state, budget]   state: 0 none, 1, 2 parked
    ["released", used], ["holds", used], ["refused", seconds]
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from frameshard.arbiter import Arbiter, BudgetStep, PoolNeeds, SidecarNeeds

FILE = Path(__file__).parents[2] / "bindings" / "arbiter.json"
N_RUNS, N_CALLS = 24, 40
STATES = {"active": 1, "parked": 2}


def make_run(seed: int) -> dict[str, Any]:
    """A run with a demand that jumps and drifts, and peers that are slow, late or refuse."""
    chance = random.Random(seed)
    unit = chance.choice([1, 1 << 20])
    budget, step = chance.randint(1, 900) * unit, chance.choice([1, 7, 50]) * unit
    dwell_s, may_park = chance.choice([0.0, 0.5, 1.0]), chance.random() < 0.4
    arbiter = Arbiter(budget, step_bytes=step, dwell_s=dwell_s, may_park=may_park)
    floor, useful, grant = chance.randint(0, 200) * unit, chance.randint(0, 900) * unit, 1000 * unit
    now, held, soon, calls = 0.0, 0, 0, []
    under_way: BudgetStep | None = None
    for _ in range(N_CALLS):
        now = round(now + chance.choice([0.015625, 0.125, 0.5, 1.0]), 6)
        if under_way is not None and chance.random() < 0.6:
            if chance.random() < 0.85:
                used = under_way.budget_bytes + chance.choice([0, 0, 0, 30]) * unit
                arbiter.released(used)
                calls.append(["released", used])
            else:
                arbiter.refused(now)
                calls.append(["refused", now])
            under_way = None
        if chance.random() < 0.1:
            used = chance.randint(0, 400) * unit
            arbiter.holds(used)
            calls.append(["holds", used])
        if chance.random() < 0.25:
            soon = chance.randint(0, 1100) * unit
        if chance.random() < 0.05:
            grant, floor, useful = (chance.randint(low, 1000) * unit for low in (300, 0, 0))
        needs = [grant, held, chance.randint(0, soon), soon, floor, useful]
        decision = arbiter.decide(now, grant, PoolNeeds(*needs[1:4]), SidecarNeeds(floor, useful))
        asked = decision.step
        state, wanted = (STATES[asked.state], asked.budget_bytes) if asked is not None else (0, 0)
        calls.append(["decide", now, needs, decision.pool_limit_bytes, state, wanted])
        under_way = asked or under_way
        if decision.pool_limit_bytes > held or chance.random() < 0.7:
            held = decision.pool_limit_bytes
    return {"budget": budget, "step": step, "dwell_s": dwell_s, "may_park": may_park, "calls": calls}


def text() -> str:
    """The content of the file."""
    runs = []
    for seed in range(N_RUNS):
        run = make_run(seed)
        calls = ",\n    ".join(json.dumps(call) for call in run.pop("calls"))
        runs.append(f'{json.dumps(run)[:-1]}, "calls": [\n    {calls}]}}')
    return "[" + ",\n".join(runs) + "]\n"


if __name__ == "__main__":
    FILE.write_text(text())
