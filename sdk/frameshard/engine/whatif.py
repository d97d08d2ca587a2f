"""Answers what-if questions: predictions for budgets that are not in force. A thread computes them during decodes."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from frameshard.engine.runtime import Runtime
from frameshard.errors import EngineDied, Overloaded, Unsupported, internal
from frameshard.wire import checks
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

MAX_WAITING = 8


class WhatIf:
    """Answers questions one at a time.

    :param send: sends an event to the broker.
    """

    def __init__(self, send: Callable[[em.Event], None]) -> None:
        self._send = send
        self._asked: queue.Queue[em.MakePlans] = queue.Queue(MAX_WAITING)
        self._ended = False

    def ask(self, question: em.MakePlans) -> None:
        """[any thread] Queues a question, or refuses it if too many wait."""
        try:
            self._asked.put_nowait(question)
        except queue.Full:
            error = Overloaded(f"{MAX_WAITING} plans are asked for already")
            self._send(em.Plans(question.seq, error=m.ErrorInfo.of(error)))

    def end(self) -> None:
        """[any thread] Stops predictions, because the model is about to be freed."""
        self._ended = True

    def serve(self, runtime: Runtime) -> None:
        """[plan thread] Answers questions.

        :raises BrokerGone: the broker is gone.
        """
        while True:
            question = self._asked.get()
            try:
                answer = em.Plans(question.seq, self._predict(runtime, question))
            except Exception as error:
                answer = em.Plans(question.seq, error=m.ErrorInfo.of(internal(logger, "a plan", error)))
            self._send(answer)

    def _predict(self, runtime: Runtime, question: em.MakePlans) -> tuple[m.PlanRow, ...]:
        placement = runtime.placement
        if placement is None:
            raise Unsupported("plans are made for a shard device, and this model runs on the CPU alone")
        rows = []
        for budget_bytes in question.budgets:
            if self._ended:
                raise EngineDied("the engine ends")
            rows.append(checks.convert(m.PlanRow, placement.what_if(budget_bytes, question.prompt_tokens)))
        return tuple(rows)
