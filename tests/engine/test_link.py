"""The engine's end of the stream to the broker."""

from __future__ import annotations

import socket
import threading

from frameshard.engine.link import Link
from frameshard.wire import engine as em


def test_of_two_reports_the_later_one_has_the_newer_figures() -> None:
    """A second thread reports while the first has read its figures and not sent them yet."""
    ours, brokers = socket.socketpair()
    link, used_bytes, second_reports = Link(ours), [7], threading.Event()

    def released() -> em.BudgetReleased:
        return em.BudgetReleased(1, 7, used_bytes[0], 0.0, 0, 0)

    def first() -> em.BudgetReleased:
        event = released()
        used_bytes[0] = 5
        second.start()
        assert second_reports.wait(10)
        second.join(0.2)  # it must wait for this report
        return event

    def report() -> None:
        second_reports.set()
        link.send_made(released)

    second = threading.Thread(target=report)
    with ours, brokers:
        link.send_made(first)
        second.join(10)
        received = Link(brokers).received()
        assert [next(received)["used_bytes"] for _ in range(2)] == [7, 5]
