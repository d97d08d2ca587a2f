"""Sends llama.cpp's warnings and errors to Python's log, and keeps the last errors for error messages."""

from __future__ import annotations

import collections
import logging

import llama_cpp

logger = logging.getLogger("frameshard.llama")

_LEVELS = {3: logging.WARNING, 4: logging.ERROR}  # ggml_log_level
_OF_ABORTS = (  # not logged: llama.cpp logs these as errors when frameshard stops a decode
    "failed with error 1",
    "compute status: 1",
    "removing memory module entries",
    "failed to decode, ret = 2",
)
# Not logged: a decode for which the budget has no room. It is made again in smaller steps, or its error says this.
_OF_REFUSALS = ("failed with error -2", "compute status: -2", "failed to decode, ret = -2")
# Logged, but not kept: llama.cpp says that a graph has failed. The device has said why before.
_OF_FAILURES = ("failed with error -1", "compute status: -1", "ret = -3")
_errors: collections.deque[str] = collections.deque(maxlen=3)


def _on_log(level: int, text: bytes, _data: object) -> None:
    if level in _LEVELS:
        line = text.decode("utf-8", "replace").strip()
        if any(part in line for part in _OF_ABORTS):
            return
        if not any(part in line for part in _OF_REFUSALS):
            logger.log(_LEVELS[level], "%s", line)
        if level == 4 and not any(part in line for part in _OF_FAILURES):
            _errors.append(line)


_log_callback = llama_cpp.llama_log_callback(_on_log)  # kept alive, because llama.cpp keeps the pointer


def install() -> None:
    """Sends llama.cpp's warnings and errors to Python's log from now on, and forgets earlier errors."""
    _errors.clear()
    llama_cpp.llama_log_set(_log_callback, None)


def last_errors() -> str:
    """Returns the last errors that llama.cpp has logged, as text for an error message."""
    return "; ".join(_errors) or "no reason given"
