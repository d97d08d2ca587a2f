"""The engine process. Each plan that is made beside decodes waits until some of them have ended: see test_replanner.

Its log says how many, and of each plan that is adopted the budget.
"""

import sys
import threading
from collections.abc import Sequence

from frameshard.engine.llama import Rows
from frameshard.engine.placement import Placement
from frameshard.engine.process import main
from frameshard.engine.runtime import Runtime
from frameshard.plan.plans import Plan

DECODES = 8
PATIENCE_S = 120.0
n_decodes, decoded = 0, threading.Condition()

decode, next_plan, adopt = Runtime.decode, Placement.next_plan, Placement.adopt


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def counted_decode(runtime: Runtime, batch: Sequence[Rows], *, ahead: bool = False) -> list[int]:
    global n_decodes
    with decoded:
        n_decodes += 1
        decoded.notify_all()
    return decode(runtime, batch, ahead=ahead)


def late_plan(placement: Placement) -> Plan:
    if threading.current_thread() is not threading.main_thread():
        with decoded:
            begun = n_decodes
            decoded.wait_for(lambda: n_decodes >= begun + DECODES, PATIENCE_S)
            say(f"beside {n_decodes - begun} decodes")
    return next_plan(placement)


def told_adopt(placement: Placement, plan: Plan) -> None:
    say(f"adopted at {plan.budget_bytes}")
    adopt(placement, plan)


Runtime.decode, Placement.next_plan, Placement.adopt = counted_decode, late_plan, told_adopt
main()
