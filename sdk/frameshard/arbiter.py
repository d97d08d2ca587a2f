"""Decides how the VRAM that the system grants is divided between a game's streaming pool and the sidecar.

:class:`Arbiter` does no I/O, and time is a parameter. :class:`frameshard.Deal` asks it in each frame and carries out
what it decides; a game that talks to the sidecar in another way can do the same.

Its rules:

- The pool goes first. If what it wants now or soon leaves the sidecar less than its budget, the sidecar shrinks at
  once, but not below its floor.
- The sidecar gets the rest, up to the budget above which it would be no faster. What neither needs is in the pool's
  limit, so that the pool can keep what is out of view.
- The sidecar grows only after the room for it has been there for the dwell time, and only by a step or more. So a
  demand that does not change causes at most two changes.
- The pool's limit rises when the sidecar has released the memory. The sidecar may grow when the pool holds no more than
  its new limit. So the sum of both never lies above a grant that stays the same. If the grant falls, the sum lies below
  it again when both have followed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Literal

from frameshard.records import record
from frameshard.wire.messages import PlanRow

ENOUGH_SHARE = 0.98
"""A budget is enough for the sidecar if it reaches this share of the best predicted rate."""


@record
class PoolNeeds:
    """What a streaming pool holds and wants, in bytes.

    :param held_bytes: VRAM that it holds. What it has evicted counts until the driver has freed it.
    :param now_bytes: wanted for what is in view.
    :param soon_bytes: wanted for what comes into view within the next frames. They must be as many as the sidecar's
        release and the loading of a cell take.
    """

    held_bytes: int
    now_bytes: int
    soon_bytes: int


@record
class SidecarNeeds:
    """What a sidecar can do with VRAM, in bytes.

    :param floor_bytes: the smallest budget.
    :param useful_bytes: with more it would not be faster (:func:`useful_budget`), or it does not want more now.
    """

    floor_bytes: int
    useful_bytes: int


@record
class BudgetStep:
    """A change of the sidecar's lease that must be asked for now. If `state` is ``parked``, `budget_bytes` is 0."""

    budget_bytes: int
    state: Literal["active", "parked"] = "active"


@record
class Decision:
    """What holds from now on.

    :param pool_limit_bytes: the pool may hold so much. If it holds more, it must evict.
    :param step: the change to ask the sidecar for; None if there is none, or if one is still under way.
    """

    pool_limit_bytes: int
    step: BudgetStep | None = None


def useful_budget(rows: Iterable[PlanRow]) -> int:
    """The smallest of the planned budgets, in bytes, that is about as fast as the best one; 0 if none fits.

    :param rows: the answer of :meth:`frameshard.Client.plan`.
    """
    rates = {row.vram_budget_bytes: row.tokens_per_second or 0.0 for row in rows if row.fits}
    enough = ENOUGH_SHARE * max(rates.values(), default=0.0)
    return min((budget for budget, rate in rates.items() if rate >= enough), default=0)


class Arbiter:
    """Divides a grant. Call :meth:`decide` in each frame, and :meth:`released` or :meth:`refused` when the sidecar has
    answered a step.

    :param budget_bytes: the sidecar's budget at the start; the sidecar holds no more than this.
    :param step_bytes: the sidecar's budgets are multiples of this. It is the least growth.
    :param dwell_s: the sidecar grows into room that has been there for so many seconds.
    :param may_park: if the pool wants more than what the sidecar's floor leaves, park the sidecar. Else the sidecar
        keeps its floor and the pool has to do with less.
    """

    def __init__(self, budget_bytes: int, *, step_bytes: int, dwell_s: float = 1.0, may_park: bool = False) -> None:
        if budget_bytes <= 0 or step_bytes <= 0 or dwell_s < 0:
            raise ValueError("budget_bytes and step_bytes must be above 0, dwell_s must not be below 0")
        self.step_bytes, self.dwell_s, self.may_park = step_bytes, dwell_s, may_park
        self.budget_bytes = budget_bytes
        """The sidecar's budget in force; 0 while it is parked."""
        self.charged_bytes = budget_bytes
        """What the sidecar may hold at most. While a step is under way, this is the larger one of both budgets."""
        self._pending: BudgetStep | None = None
        self._charged_before = budget_bytes
        self._refused_at = -math.inf
        self._began_at: float | None = None
        self._rooms: deque[tuple[float, int]] = deque()
        """Room for the sidecar within the dwell time: (when it was last seen, bytes), both rising. The first one is the
        least room."""

    def __repr__(self) -> str:
        state = "parked" if not self.budget_bytes else f"{self.budget_bytes} bytes"
        return f"<Arbiter of a sidecar, {state}, under way: {self._pending}>"

    def decide(self, now: float, grant_bytes: int, pool: PoolNeeds, sidecar: SidecarNeeds) -> Decision:
        """Divides the grant anew.

        :param now: seconds by any clock that does not go back.
        :param grant_bytes: VRAM that pool and sidecar may hold together.
        """
        room = grant_bytes - max(pool.now_bytes, pool.soon_bytes)
        lasting = self._lasting_room(now, room)
        if self._pending is not None:
            return Decision(max(0, grant_bytes - self.charged_bytes))
        step = self._wanted_step(room, lasting, sidecar)
        if step is None or now < self._refused_at + self.dwell_s:
            return Decision(max(0, grant_bytes - self.charged_bytes))
        limit = max(0, grant_bytes - max(self.charged_bytes, step.budget_bytes))
        if step.budget_bytes > self.charged_bytes and pool.held_bytes > limit:
            return Decision(limit)  # the pool evicts before the sidecar grows
        self._pending, self._charged_before = step, self.charged_bytes
        self.charged_bytes = max(self.charged_bytes, step.budget_bytes)
        return Decision(limit, step)

    def released(self, used_bytes: int) -> None:
        """The step is in force.

        :param used_bytes: what the sidecar holds now. If that is more than the budget, because the release is late, or
            because the driver's context of a parked sidecar stays, it counts until :meth:`holds` says less.
        """
        self.budget_bytes = self._answered().budget_bytes
        self.holds(used_bytes)

    def refused(self, now: float) -> None:
        """The sidecar has refused the step, and its budget is what it was. No other step comes for the dwell time."""
        self._answered()
        self.charged_bytes = self._charged_before
        self._refused_at = now

    def holds(self, used_bytes: int) -> None:
        """Takes a new figure of what the sidecar holds. While a step is under way it changes nothing."""
        if self._pending is None:
            self.charged_bytes = max(self.budget_bytes, used_bytes)

    def _answered(self) -> BudgetStep:
        if self._pending is None:
            raise RuntimeError("no step is under way")
        step, self._pending = self._pending, None
        return step

    def _wanted_step(self, room: int, lasting: int | None, sidecar: SidecarNeeds) -> BudgetStep | None:
        """The step that should come next; None if all is as it should be.

        :param lasting: the room that the sidecar may grow into; None if it must not grow.
        """
        least = self._round_up(sidecar.floor_bytes)
        useful = max(least, self._round_up(sidecar.useful_bytes))
        parked = not self.budget_bytes
        if self.may_park and room < least:
            return None if parked else BudgetStep(0, "parked")
        if not parked and room < self.budget_bytes:
            shrunk = min(useful, max(least, room // self.step_bytes * self.step_bytes))
            return BudgetStep(shrunk) if shrunk < self.budget_bytes else None
        if useful <= self.budget_bytes - self.step_bytes:
            return BudgetStep(useful)
        grown = 0 if lasting is None else min(useful, lasting // self.step_bytes * self.step_bytes)
        if grown >= max(least, self.budget_bytes + self.step_bytes):
            return BudgetStep(grown)
        return None

    def _lasting_room(self, now: float, room: int) -> int | None:
        """The least room within the dwell time; None if it has not passed since the first call."""
        if self._began_at is None:
            self._began_at = now
        while self._rooms and self._rooms[-1][1] >= room:
            self._rooms.pop()
        self._rooms.append((now, room))
        while self._rooms[0][0] < now - self.dwell_s:
            self._rooms.popleft()
        return self._rooms[0][1] if now - self._began_at >= self.dwell_s else None

    def _round_up(self, n_bytes: int) -> int:
        return -(-n_bytes // self.step_bytes) * self.step_bytes
