"""The command line that all programs here share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio


def main(description: str | None, attack: Callable[..., Awaitable[Any]], **options: tuple[float | str, str]) -> int:
    """Runs `attack` on a model and prints its report.

    :param attack: gets the model's path, ``seconds``, ``seed`` and `options`; returns a report with ``problems`` (a
        list of errors) and ``changed`` (texts that differ from the expected ones).
    :param options: further options of this attack: for each its default and help.
    :returns: the exit code; 1 if the report has a problem.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    for name, (default, text) in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} ({default})")
    values = vars(parser.parse_args())
    model = values.pop("model")

    async def run() -> Any:
        return await attack(model, **values)

    report = trio.run(run)
    print(json.dumps(dataclasses.asdict(report), indent=2))
    return bool(report.problems or report.changed)
