"""Answers how many tokens a prompt has. A thread of its own does this, because a long text may take seconds."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from frameshard.engine.request import RequestReader
from frameshard.engine.runtime import Runtime
from frameshard.errors import Overloaded, internal
from frameshard.wire import engine as em
from frameshard.wire import messages as m

logger = logging.getLogger("frameshard.engine")

MAX_WAITING = 32


class Counting:
    """Answers questions one at a time.

    :param send: sends an event to the broker.
    """

    def __init__(self, send: Callable[[em.Event], None]) -> None:
        self._send = send
        self._asked: queue.Queue[em.CountTokens] = queue.Queue(MAX_WAITING)
        self._counting = threading.Lock()

    def ask(self, question: em.CountTokens) -> None:
        """[any thread] Queues a question, or refuses it if too many wait."""
        try:
            self._asked.put_nowait(question)
        except queue.Full:
            error = Overloaded(f"{MAX_WAITING} prompts wait to be counted already")
            self._send(em.TokenCount(question.seq, error=m.ErrorInfo.of(error)))

    def close(self, timeout_s: float) -> bool:
        """Stops counting, because the model is about to be freed.

        :returns: false if a text is still being counted after ``timeout_s``.
        """
        return self._counting.acquire(timeout=timeout_s)

    def serve(self, runtime: Runtime) -> None:
        """[count thread] Answers questions.

        :raises BrokerGone: the broker is gone.
        """
        reader = RequestReader(runtime)
        while True:
            question = self._asked.get()
            try:
                with self._counting:
                    n_tokens = reader.count(question)
                answer = em.TokenCount(question.seq, n_tokens, max(0, runtime.n_ctx_seq - n_tokens))
            except Exception as error:
                answer = em.TokenCount(question.seq, error=m.ErrorInfo.of(internal(logger, "a count", error)))
            self._send(answer)
