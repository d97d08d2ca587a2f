"""A thread that does one piece of work after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


def one_thread(name: str) -> ThreadPoolExecutor:
    """Returns an executor whose one thread runs already. Python would start it for the first work, when the system may
    have none: the work would stay in the queue.

    :raises RuntimeError: the system gives no thread.
    """
    executor = ThreadPoolExecutor(1, name)
    executor.submit(lambda: None)
    return executor
