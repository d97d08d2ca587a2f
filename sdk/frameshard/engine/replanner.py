"""Makes new plans, while jobs run beside the decodes. A plan takes a tenth of a second, for which no token should wait.

A thread makes the plan, and the main thread adopts it between two decodes. Until then the device keeps within its
budget with the old plan.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

from frameshard.engine.onethread import one_thread
from frameshard.engine.placement import Placement
from frameshard.errors import BudgetBelowFloor
from frameshard.plan.plans import Plan

logger = logging.getLogger("frameshard.engine")


class Replanner:
    """Makes one plan at a time. Only the main thread may use it, except for :meth:`want`.

    :param on_main: [any thread] runs a function in the main thread, between two decodes.
    :param adopt: gives a plan to the device.
    """

    def __init__(self, on_main: Callable[[Callable[[], None]], None], adopt: Callable[[Plan], None]) -> None:
        self._on_main, self._adopt = on_main, adopt
        self._wanted = threading.Event()
        self._thread = one_thread("replan")
        self._made: Future[Plan] | None = None

    def want(self) -> None:
        """[any thread] Asks for a plan: the one in force was made for another state of the device."""
        self._wanted.set()

    @property
    def outdated(self) -> bool:
        """A plan is wanted, or one that was wanted is not adopted yet."""
        return self._wanted.is_set() or self._made is not None

    def work(self, placement: Placement, *, busy: bool) -> bool:
        """Makes the plan that is wanted, if one is.

        :param busy: jobs run, so the thread makes it.
        :returns: whether a plan was made here and adopted.
        """
        if not self._wanted.is_set() or self._made is not None:
            return False
        self._wanted.clear()
        if not busy:
            placement.replan_if_fits()
            return True
        placement.begin_plan()
        self._made = self._thread.submit(placement.next_plan)
        take = partial(self._take, placement, placement.n_adopted, self._made)
        self._made.add_done_callback(lambda _: self._on_main(take))
        return False

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
