"""All errors that a user can get: named by what went wrong, with a message that says what to do.

An error has a stable integer ``code``, a stable ``name`` for programs, ``retriable`` (the same call may succeed later
without a change) and a ``detail`` map with figures such as the floor of a budget. The protocol carries the same four;
:func:`from_wire` and :meth:`FrameshardError.to_wire` are the only places that translate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar


class FrameshardError(Exception):
    """A defect, or an error that this version does not know.

    Base class of all others. ``str(error)`` is a sentence for a person; ``name`` and ``code`` are for programs.
    """

    code: ClassVar[int] = 1
    name: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: object) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def to_wire(self) -> dict[str, object]:
        """The protocol's error map: code, name, message, retriable, detail."""
        return {
            "code": self.code,
            "name": self.name,
            "message": self.message,
            "retriable": self.retriable,
            "detail": dict(self.detail),
        }


class BadArgument(FrameshardError):
    """A value given by the caller is out of range or of the wrong type."""

    code, name = 10, "bad_argument"


class BadMessage(FrameshardError):
    """A message is malformed, too large, of an unknown kind or has a field of a wrong type. It has no effect."""

    code, name = 11, "bad_message"


class UnknownJob(FrameshardError):
    """No such job in this session: it never existed or it has ended."""

    code, name = 12, "unknown_job"


class ContextOverflow(FrameshardError):
    """Prompt and answer do not fit the context; detail has ``n_prompt``, ``n_ctx``."""

    code, name = 13, "context_overflow"


class Unsupported(FrameshardError):
    """The request is understood but this model or build cannot do it."""

    code, name = 14, "unsupported"


class ModelNotFound(FrameshardError):
    """The model file does not exist or cannot be read."""

    code, name = 20, "model_not_found"


class BadModel(FrameshardError):
    """The file is not a GGUF that can be served: wrong magic, truncated, inconsistent, refused by llama.cpp, fatal to
    it while it loads, or with weights that compute NaN. A job gets it when only its tokens meet such weights."""

    code, name = 21, "bad_model"


class UnknownDevice(FrameshardError):
    """No device of that name; detail has ``devices``, those there are. Never replaced silently by another."""

    code, name = 22, "unknown_device"


class BudgetBelowFloor(FrameshardError):
    """The VRAM budget is below the floor of the model; detail has ``budget_bytes`` and ``floor_bytes``."""

    code, name = 23, "budget_below_floor"


class VersionMismatch(FrameshardError):
    """Protocol, llama-cpp-python or shard device are not the versions that belong together."""

    code, name = 24, "version_mismatch"


class OutOfMemory(FrameshardError):
    """The device refused memory although the budget allows it: another program holds it. Lower the budget."""

    code, name, retriable = 25, "out_of_memory", True


class StaleLease(FrameshardError):
    """A budget with a version that is not above the one in force: it came late or twice; detail has ``version``."""

    code, name = 26, "stale_lease"


class EndpointInUse(FrameshardError):
    """Another sidecar listens on this endpoint."""

    code, name = 30, "endpoint_in_use"


class ConnectionLost(FrameshardError):
    """The sidecar does not answer any more. Jobs of this client are over; launch or connect again."""

    code, name, retriable = 31, "connection_lost", True


class EngineDied(FrameshardError):
    """The engine process ended: twice over this job, or it is off because it cannot be kept alive now. The message says
    why, and detail has ``reason`` (an error's name) and ``last_words``."""

    code, name, retriable = 32, "engine_died", True


class Overloaded(FrameshardError):
    """Too many jobs wait, or this client does not read its events. Try again when some have ended."""

    code, name, retriable = 33, "overloaded", True


class DeadlineMissed(FrameshardError):
    """A request was not met in the time given; it stays in force where its text says so."""

    code, name, retriable = 34, "deadline_missed", True


class JobCancelled(FrameshardError):
    """The job was cancelled before it ended."""

    code, name = 40, "cancelled"


class DownloadFailed(FrameshardError):
    """A model could not be fetched or its hash is wrong. Nothing half-written is left behind."""

    code, name, retriable = 41, "download_failed", True


_CLASSES: list[type[FrameshardError]] = [FrameshardError, *FrameshardError.__subclasses__()]
BY_NAME = {cls.name: cls for cls in _CLASSES}


def from_wire(error: Mapping[str, object]) -> FrameshardError:
    """The exception for a protocol error map; a name unknown here becomes :class:`FrameshardError`."""
    cls = BY_NAME.get(str(error.get("name")), FrameshardError)
    detail = error.get("detail")
    return cls(
        str(error.get("message", "")), **({str(k): v for k, v in detail.items()} if isinstance(detail, Mapping) else {})
    )


def internal(logger: logging.Logger, what: str, error: Exception) -> FrameshardError:
    """The typed error for any exception, for places where a defect of ours must fail one request alone.

    :param what: what failed, as the subject of a sentence: "a budget change".
    :returns: `error` itself where it is typed already; else an ``internal`` error, and the log gets the traceback.
    """
    if isinstance(error, FrameshardError):
        return error
    logger.error("%s failed by a defect of frameshard", what, exc_info=error)
    return FrameshardError(f"{what} failed by a defect of frameshard: {type(error).__name__}: {error}")


def below_floor(budget_bytes: int, floor_bytes: int) -> BudgetBelowFloor:
    """The error for a VRAM budget that the model cannot run in."""
    budget = f"{budget_bytes >> 20} MiB" if budget_bytes >= 1 << 20 else f"{budget_bytes} bytes"
    return BudgetBelowFloor(
        f"a VRAM budget of {budget} is below the floor of {-(-floor_bytes >> 20)} MiB",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
    )
