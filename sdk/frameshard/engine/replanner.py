"""Makes new plans while the engine decodes. A plan takes a tenth of a second, for which no token should wait.

A thread makes the plan, and the main thread adopts it between two decodes. Until then the device keeps within its
budget with the old plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from frameshard.engine.placement import Placement
from frameshard.errors import BudgetBelowFloor
from frameshard.plan.plans import Plan

logger = logging.getLogger("frameshard.engine")


class Replanner:
    """Makes one plan at a time. Only the main thread uses it.

    :param on_main: [any thread] runs a function in the main thread, between two decodes.
    :param adopt: gives a plan to the device.
    """

    def __init__(self, on_main: Callable[[Callable[[], None]], None], adopt: Callable[[Plan], None]) -> None:
        self._on_main, self._adopt = on_main, adopt
        self._thread = ThreadPoolExecutor(1, "replan")
        self._made: Future[Plan] | None = None

    @property
    def running(self) -> bool:
        """A plan is being made, or was made and is not adopted yet."""
        return self._made is not None

    def start(self, placement: Placement) -> None:
        """Begins a plan for the state in which the device is now."""
        placement.begin_plan()
        self._made = self._thread.submit(placement.next_plan)
        take = partial(self._take, placement, placement.n_adopted, self._made)
        self._made.add_done_callback(lambda _: self._on_main(take))

    def _take(self, placement: Placement, n_adopted: int, made: Future[Plan]) -> None:
        self._made = None
        if placement.n_adopted != n_adopted:
            return  # a prompt needed a newer one meanwhile
        try:
            self._adopt(made.result())
        except BudgetBelowFloor as error:  # the device keeps this budget and the plan that it has
            logger.warning("%s", error)

    def close(self, timeout_s: float) -> bool:
        """Waits for the thread, because the model is about to be freed.

        :returns: false if a plan is still being made after ``timeout_s`` seconds.
        """
        return self._made is None or not wait([self._made], timeout_s).not_done
