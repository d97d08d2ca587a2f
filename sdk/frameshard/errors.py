"""All errors that a user can get. The name says what went wrong, and the message says what to do.

For programs, an error has a ``code`` and a ``name``, which never change. ``retriable`` is true if the same call may
succeed later. ``detail`` is a map with figures such as the floor of a budget. The protocol sends these four and the
message; only :func:`from_wire` and :meth:`FrameshardError.to_wire` convert them.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, TypeVar

_AT_A_LIMIT = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NO_THREAD = "can't start new thread"  # how Python says that the system gives none


class FrameshardError(Exception):
    """A defect of frameshard, or an error that this version does not know.

    This is the base class of all errors. ``str(error)`` is a message for people; ``name`` and ``code`` are for
    programs.

    :param message: the message.
    :param detail: figures for programs.
    """

    code: ClassVar[int] = 1
    name: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, /, **detail: object) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def to_wire(self) -> dict[str, object]:
        """Returns the protocol's error map: code, name, message, retriable, detail."""
        return {
            "code": self.code,
            "name": self.name,
            "message": self.message,
            "retriable": self.retriable,
            "detail": dict(self.detail),
        }


class BadArgument(FrameshardError):
    """A value from the caller is out of range or has the wrong type."""

    code, name = 10, "bad_argument"


class BadMessage(FrameshardError):
    """A message is malformed, too large or unknown, or a field has the wrong type. The message has no effect."""

    code, name = 11, "bad_message"


class UnknownJob(FrameshardError):
    """This session has no such job: it never existed, or it has ended."""

    code, name = 12, "unknown_job"


class ContextOverflow(FrameshardError):
    """The prompt and the answer do not fit into the context; detail has ``n_prompt`` and ``n_ctx``."""

    code, name = 13, "context_overflow"


class Unsupported(FrameshardError):
    """The request is valid, but this model or this build cannot do it."""

    code, name = 14, "unsupported"


class BadSave(FrameshardError):
    """The bytes are no saved conversation, or the save is damaged, too large or of a newer format. Nothing changes."""

    code, name = 15, "bad_save"


class ModelNotFound(FrameshardError):
    """The model file does not exist or cannot be read."""

    code, name = 20, "model_not_found"


class BadModel(FrameshardError):
    """The file is not a usable GGUF model. It is truncated or inconsistent, llama.cpp refuses it or crashes while it
    loads it, or its weights produce NaN. A job fails with this error if only its tokens use such weights."""

    code, name = 21, "bad_model"


class UnknownDevice(FrameshardError):
    """There is no device of that name; detail has the existing ``devices``. No other device is used instead."""

    code, name = 22, "unknown_device"


class BudgetBelowFloor(FrameshardError):
    """The VRAM budget is below the floor of the model; detail has ``budget_bytes`` and ``floor_bytes``. Or the host
    budget is below the floor of the sidecar; detail has ``host_budget_bytes`` and ``host_floor_bytes``."""

    code, name = 23, "budget_below_floor"


class VersionMismatch(FrameshardError):
    """The versions of the protocol, llama-cpp-python and the shard device do not match."""

    code, name = 24, "version_mismatch"


class OutOfMemory(FrameshardError):
    """The device refused memory that the budget allows, because another program uses it: lower the budget. Or the
    system has no host memory, thread, process or open file for a request."""

    code, name, retriable = 25, "out_of_memory", True


class StaleLease(FrameshardError):
    """The version of a budget is not above the one in force: it came late or twice; detail has ``version``."""

    code, name = 26, "stale_lease"


class EndpointInUse(FrameshardError):
    """Another sidecar listens on this endpoint."""

    code, name = 30, "endpoint_in_use"


class ConnectionLost(FrameshardError):
    """The sidecar does not answer any more. The jobs of this client have ended; launch or connect again."""

    code, name, retriable = 31, "connection_lost", True


class EngineDied(FrameshardError):
    """The engine process died twice while it ran this job, or dies again and again and is off for a while. The message
    says why; detail has ``reason`` (the name of an error) and ``last_words`` (its last output)."""

    code, name, retriable = 32, "engine_died", True


class Overloaded(FrameshardError):
    """Too many jobs are waiting, or this client does not read its events. Try again when some jobs have ended."""

    code, name, retriable = 33, "overloaded", True


class DeadlineMissed(FrameshardError):
    """A request was not completed within its time, or a job had no token by its deadline. A request stays in force if
    the message says so."""

    code, name, retriable = 34, "deadline_missed", True


class JobCancelled(FrameshardError):
    """The job was cancelled before it ended."""

    code, name = 40, "cancelled"


class DownloadFailed(FrameshardError):
    """A file could not be downloaded, or its hash is wrong. What was fetched stays, under another name, if the
    next fetch can go on from there."""

    code, name, retriable = 41, "download_failed", True


_CLASSES: list[type[FrameshardError]] = [FrameshardError, *FrameshardError.__subclasses__()]
BY_NAME = {cls.name: cls for cls in _CLASSES}


def from_wire(error: Mapping[str, object]) -> FrameshardError:
    """Returns the exception for an error map of the protocol. An unknown name becomes :class:`FrameshardError`."""
    cls = BY_NAME.get(str(error.get("name")), FrameshardError)
    detail = error.get("detail")
    return cls(
        str(error.get("message", "")), **({str(k): v for k, v in detail.items()} if isinstance(detail, Mapping) else {})
    )


E = TypeVar("E", bound=FrameshardError)


def again(error: E) -> E:
    """Returns a copy of an error, without a traceback. If one exception is raised by many calls, its traceback grows
    with each of them, and keeps the variables of all."""
    return copy.copy(error)


def internal(logger: logging.Logger, what: str, error: Exception) -> FrameshardError:
    """Turns any exception into a typed error, so that a defect of frameshard fails only one request.

    :param logger: gets the traceback of an exception that is not typed.
    :param what: what failed, as the subject of a sentence, such as "a budget change".
    :returns: `error` itself if it is typed already; ``out_of_memory`` if the system has no more memory, threads,
        processes or file descriptors; else an ``internal`` error.
    """
    if isinstance(error, FrameshardError):
        return error
    if lacks := _lacks(error):
        logger.warning("%s failed: %s", what, lacks)
        return OutOfMemory(f"{what} failed: {lacks}")
    logger.error("%s failed by a defect of frameshard", what, exc_info=error)
    return FrameshardError(f"{what} failed by a defect of frameshard: {type(error).__name__}: {error}")


def _lacks(error: Exception) -> str:
    """What the system has none of, as a sentence; "" if the exception does not say that."""
    if isinstance(error, MemoryError):
        return "there is no host memory for it"
    if isinstance(error, OSError) and error.errno in _AT_A_LIMIT:
        return f"the system is at a limit: {error.strerror}"
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return f"the system is at a limit: {error}"
    return ""


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Turns an exception that is not typed into :class:`BadArgument`. The block only takes what the program gave, so
    the cause is a value of a wrong type, such as a number for a list."""
    try:
        yield
    except FrameshardError:
        raise
    except Exception as error:
        raise BadArgument(f"an argument has a wrong type or value: {type(error).__name__}: {error}") from error


def below_floor(budget_bytes: int, floor_bytes: int) -> BudgetBelowFloor:
    """Returns the error for a VRAM budget that is too small for the model."""
    budget = f"{budget_bytes / (1 << 20):.6g} MiB" if budget_bytes >= 1 << 20 else f"{budget_bytes} bytes"
    floor_mb = -(-floor_bytes >> 20)
    return BudgetBelowFloor(
        f"a VRAM budget of {budget} is below the floor of {floor_mb} MiB: give {floor_mb} MiB or more, lower n_ubatch,"
        " take a smaller model, or park",
        budget_bytes=budget_bytes,
        floor_bytes=floor_bytes,
    )


def below_host_floor(host_budget_bytes: int, host_floor_bytes: int) -> BudgetBelowFloor:
    """Returns the error for a host budget that is too small for the sidecar."""
    floor_mb = -(-host_floor_bytes >> 20)
    return BudgetBelowFloor(
        f"a host budget of {host_budget_bytes / (1 << 20):.1f} MiB is below the floor of {floor_mb} MiB: set"
        f" host_budget_mb to {floor_mb} or more, or take a smaller model",
        host_budget_bytes=host_budget_bytes,
        host_floor_bytes=host_floor_bytes,
    )


def unknown_adapter(name: str, loaded: Iterable[str]) -> BadArgument:
    """Returns the error for an adapter that is not loaded."""
    names = sorted(loaded)
    return BadArgument(
        f"no adapter {name!r} is loaded; loaded are: {', '.join(names) or 'none'}", field="adapters", loaded=names
    )


def only_cause(error: BaseException) -> BaseException | None:
    """The exception of a group that has only one, or only interrupts by Ctrl-C; None for another group."""
    found = list(causes(error))
    alike = len(found) == 1 or all(isinstance(each, KeyboardInterrupt) for each in found)
    return found[0] if alike else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups in it; otherwise the exception itself."""
    parts = getattr(error, "exceptions", None)  # Python 3.10 has no class of groups
    if parts is None:
        yield error
        return
    for part in parts:
        yield from causes(part)
