"""Divides VRAM between a game's streaming pool and a sidecar while the game runs.

    deal = await frameshard.Deal.begin(client, grant_bytes=6 << 30)
    nursery.start_soon(deal.run)
    while playing:                                      # in each frame
        pool.limit_bytes = deal.update(PoolNeeds(pool.held_bytes, now_bytes, soon_bytes))
        ...                                             # evict down to the limit, load up to it, draw

:class:`frameshard.arbiter.Arbiter` decides; here is the I/O. A budget is asked for in :meth:`Deal.update`, in the same
frame; :meth:`Deal.run` waits for the answers, hears the sidecar's notices and reads its figures.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

import anyio

from frameshard.arbiter import Arbiter, BudgetStep, PoolNeeds, SidecarNeeds, useful_budget
from frameshard.client import BudgetChange, Client
from frameshard.errors import (
    BadArgument,
    BudgetBelowFloor,
    ConnectionLost,
    FrameshardError,
    Unsupported,
    below_floor,
)
from frameshard.inbox import EndOfChannel, WouldBlock
from frameshard.wire.messages import Budget, Notice

MIB = 1 << 20
STEPS = 64
"""By default the step is this part of the grant."""

N_PLANNED = 16
"""So many budgets from floor to full are planned, to find the smallest that is fast enough."""

HEAR_S = 0.05
LOOK_S = 0.5
"""Seconds between two looks for notices, and between two readings of the sidecar's figures."""

SPARE_BYTES = 256 << 20
"""Of the device's free memory so much is not granted. A sidecar shrinks by itself where less than 128 MiB are free."""

N_READINGS = 5
"""The grant from the device is the median of so many readings: free memory is measured a little before or after what
the game and the sidecar hold."""


class Deal:
    """A division of VRAM that is in force; made by :meth:`begin`. While it runs, nobody else may set the budget."""

    def __init__(self, client: Client, arbiter: Arbiter, grant_bytes: int | None) -> None:
        self.grant_bytes = grant_bytes
        """VRAM in bytes that pool and sidecar may hold together. Set it when the system grants more or less. None: what
        is free on the device and what both hold, less 256 MiB."""
        self.arbiter = arbiter
        """What it decides by. Its `charged_bytes` are the most that the sidecar holds now."""
        self._client = client
        self._notices = client.notices()
        self._readings: deque[int] = deque(maxlen=N_READINGS)
        self._held_bytes = 0
        self._floor_bytes = self._useful_bytes = 0
        self._planned_for: tuple[int, str | None] | None = None  # what the plans depend on
        self._wanted_bytes: int | None = None  # the last notice said so; None for no limit
        self._change: tuple[BudgetChange, BudgetStep] | None = None
        self._asked = anyio.Event()
        self._error: FrameshardError | None = None

    @classmethod
    async def begin(
        cls,
        client: Client,
        *,
        grant_bytes: int | None = None,
        step_bytes: int | None = None,
        dwell_s: float = 1.0,
        may_park: bool = False,
    ) -> Deal:
        """Reads what the sidecar needs and can do with more. A sidecar without a budget gets one.

        The pool must be empty, or hold no more than the grant leaves beside the sidecar.

        :param grant_bytes: see :attr:`grant_bytes`.
        :param step_bytes: see :class:`Arbiter`, as the further parameters. By default 1/64 of the grant.
        :raises BadArgument: the device does not report its free memory, so that `grant_bytes` must be given.
        :raises BudgetBelowFloor: the model cannot run in the grant.
        :raises Unsupported: the model runs on the CPU, without a shard device.
        :raises EngineDied: no engine is running.
        :raises Overloaded: many requests wait.
        """
        budget = await client.budget()
        if not budget.full_bytes:
            raise Unsupported("the model runs on the CPU: there is no VRAM to divide")
        grant = await _free_for_both(client, budget, 0) if grant_bytes is None else grant_bytes
        if grant < budget.floor_bytes:
            raise below_floor(grant, budget.floor_bytes)
        first = budget.vram_budget_bytes
        if not 0 < first <= grant or budget.state != "active":
            first = max(budget.floor_bytes, min(budget.full_bytes, grant))
            await client.set_budget(first / MIB, observe=False)
        step = step_bytes or max(MIB, grant // STEPS)
        deal = cls(client, Arbiter(first, step_bytes=step, dwell_s=dwell_s, may_park=may_park), grant_bytes)
        await deal._look()
        return deal

    def __repr__(self) -> str:
        return f"<Deal about {self._grant() / MIB:.0f} MiB, {self.arbiter!r}>"

    @property
    def needs(self) -> SidecarNeeds:
        """What the sidecar can do with VRAM at present."""
        useful = self._useful_bytes
        return SidecarNeeds(
            self._floor_bytes, useful if self._wanted_bytes is None else min(useful, self._wanted_bytes)
        )

    def update(self, pool: PoolNeeds) -> int:
        """Call it in each frame. It returns at once; a new budget for the sidecar is sent without waiting.

        :returns: what the pool may hold from now on, in bytes. If it holds more, it must evict in this frame.
        """
        self._held_bytes = pool.held_bytes
        decision = self.arbiter.decide(time.monotonic(), self._grant(), pool, self.needs)
        if decision.step is not None:
            try:
                self._change = self._ask(decision.step), decision.step
            except FrameshardError as error:
                self._error = error
            self._asked.set()
        return decision.pool_limit_bytes

    async def run(self) -> None:
        """Runs until it is cancelled. Meanwhile the sidecar follows what :meth:`update` decides. While it cannot,
        because its engine is off or many requests wait, its budget stays what it is, and a step is tried again later.

        :raises FrameshardError: the sidecar is gone or refuses every budget. The pool's limit stays what it is.
        """
        look_at = time.monotonic() + LOOK_S
        while True:
            with anyio.move_on_after(HEAR_S):
                await self._asked.wait()
            if self._error is not None:
                raise self._error
            if self._change is not None:
                under_way, self._change, self._asked = self._change, None, anyio.Event()
                await self._carried_out(*under_way)
            self._hear()
            if time.monotonic() >= look_at:
                await self._look_again()
                look_at = time.monotonic() + LOOK_S

    def _grant(self) -> int:
        return int(statistics.median(self._readings)) if self.grant_bytes is None else self.grant_bytes

    def _ask(self, step: BudgetStep) -> BudgetChange:
        # While it has no jobs it shrinks to its floor by itself, and says so.
        floor_mb = self._floor_bytes / MIB
        if step.state == "parked":
            return self._client.change_budget(self.arbiter.budget_bytes / MIB, state="parked", floor_mb=floor_mb)
        return self._client.change_budget(step.budget_bytes / MIB, floor_mb=floor_mb)

    async def _carried_out(self, change: BudgetChange, step: BudgetStep) -> None:
        """Waits until the step is in force or refused."""
        try:
            await change.granted()
            used_bytes = (await change.released()).used_bytes
        except BudgetBelowFloor as error:
            floor_bytes = error.detail.get("floor_bytes")
            self._floor_bytes = floor_bytes if isinstance(floor_bytes, int) else self._floor_bytes
            self.arbiter.refused(time.monotonic())
            return
        except FrameshardError as error:
            if not _passes(error):
                raise
            # It may be in force all the same: more than the budget is still held, or an engine has died after it.
            budget = await self._client.budget()
            in_force = BudgetStep(budget.vram_budget_bytes) if budget.state == "active" else BudgetStep(0, "parked")
            if in_force != step:
                self.arbiter.refused(time.monotonic())
                return
            used_bytes = budget.used_bytes
        finally:
            change.close()
        self.arbiter.released(used_bytes)

    def _hear(self) -> None:
        try:
            while True:
                self._heed(self._notices.receive_nowait())
        except (WouldBlock, EndOfChannel):
            pass  # if the connection is lost, the next reading says why

    def _heed(self, notice: Notice) -> None:
        if notice.kind == "wants":
            # A parked sidecar wants its budget back, which was the floor: that says nothing about more.
            if self.arbiter.budget_bytes:
                self._wanted_bytes = notice.vram_budget_bytes
        elif notice.kind == "gives_back":
            # It has taken up its whole budget again if it says no less than that.
            less = notice.vram_budget_bytes < self.arbiter.budget_bytes
            self._wanted_bytes = notice.vram_budget_bytes if less else None

    async def _look_again(self) -> None:
        """Reads the figures, unless the sidecar cannot tell them now. The next look is due soon."""
        try:
            await self._look()
        except FrameshardError as error:
            if not _passes(error):
                raise

    async def _look(self) -> None:
        """Reads the sidecar's figures, and those of the device if they are the grant."""
        budget = await self._client.budget()
        if self.grant_bytes is None:
            self._readings.append(await _free_for_both(self._client, budget, self._held_bytes))
        self.arbiter.holds(budget.used_bytes)
        self._floor_bytes = budget.floor_bytes
        engine = (await self._client.stats()).engine or {}
        basis = (budget.full_bytes // self.arbiter.step_bytes, engine.get("profile"))
        if engine and basis != self._planned_for:
            await self._plan(budget)
            self._planned_for = basis

    async def _plan(self, budget: Budget) -> None:
        wide = budget.full_bytes - budget.floor_bytes
        budgets = [(budget.floor_bytes + wide * i / (N_PLANNED - 1)) / MIB for i in range(N_PLANNED)]
        self._useful_bytes = useful_budget(await self._client.plan(budgets))


def _passes(error: FrameshardError) -> bool:
    """Whether the sidecar may do later what it could not do now."""
    return error.retriable and not isinstance(error, ConnectionLost)


async def _free_for_both(client: Client, budget: Budget, held_bytes: int) -> int:
    """One reading of the VRAM that pool and sidecar may hold together.

    :param held_bytes: what the pool holds.
    :raises BadArgument: the device does not report its free memory.
    """
    free_bytes = (await client.caps_and_requirements()).free_bytes
    if free_bytes is None:
        raise BadArgument("this device does not report its free memory: give grant_bytes", field="grant_bytes")
    return max(0, free_bytes + budget.used_bytes + held_bytes - SPARE_BYTES)
