"""Shows the progress of a command on standard error: a bar if that is a terminal and rich is installed, otherwise a
line for each step.

Slow operations (loading, measuring) write a log line when they begin. The bar shows this line as its text.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import interrupt

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from frameshard import Loading

logger = logging.getLogger("frameshard")


class Steps:
    """Work in ``total`` steps; this class writes lines instead of a bar."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.begun = 0

    def next(self, text: str) -> None:
        """Ends the step before and begins the next one.

        :param text: what the next step does.
        """
        self.begun += 1
        logger.info("%d of %d: %s", self.begun, self.total, text)

    def print(self, line: str) -> None:
        """Prints a line of the command's result to stdout."""
        print(line, flush=True)


class _Bar(Steps):
    def __init__(self, total: int, progress: Progress, task: TaskID) -> None:
        super().__init__(total)
        self._progress, self._task = progress, task

    def next(self, text: str) -> None:
        self._progress.update(self._task, completed=self.begun, description=text)
        self.begun += 1

    def print(self, line: str) -> None:
        self._progress.stop()
        super().print(line)
        self._progress.start()


class _ToBar(logging.Handler):
    """Makes log lines the text of the bar. Warnings are printed above the bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        super().__init__()
        self._progress, self._task = progress, task

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno <= logging.INFO:
            self._progress.update(self._task, description=text)
        else:
            self._progress.console.print(f"{record.name}: {text}", markup=False, highlight=False)


def loading(progress: Loading) -> None:
    """Shows how far a sidecar has loaded its model, in a line of the terminal that later output overwrites."""
    if not sys.stderr.isatty():
        return
    unit = "" if progress.stage == "profile" else " MiB"
    text = f"loading: {progress.stage} {progress.done} of {progress.total}{unit}"
    print(f"\r{'' if progress.done == progress.total else text}\x1b[K", end="\r", file=sys.stderr, flush=True)


@contextlib.contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Shows the progress of the ``with`` block."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield Steps(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
    task = progress.add_task("", total=total)
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [_ToBar(progress, task)]
    interrupt.at_end.append(progress.stop)
    try:
        with progress:
            yield _Bar(total, progress, task)
    finally:
        interrupt.at_end.remove(progress.stop)
        root.handlers = handlers
