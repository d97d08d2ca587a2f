"""State tables: the events that may happen in each state, and the state that follows."""

from __future__ import annotations

from enum import Enum


class Job(Enum):
    """The state of a job at the broker."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Rules:
# - A job is running once the engine has sent "started". It stays running when the engine dies, and the client does not
#   get the "started" of the next engine.
# - A job has exactly one last event: the states after it allow no events.
# - The broker cancels a queued job without the engine.
# - A job stays running while it is paused: its client gets "paused" when it has left the engine, and "resumed" when the
#   engine has started it again.
JOB: dict[Job, dict[str, Job]] = {
    Job.QUEUED: {"started": Job.RUNNING, "failed": Job.FAILED, "cancelled": Job.CANCELLED},
    Job.RUNNING: {
        "started": Job.RUNNING,
        "progress": Job.RUNNING,
        "token": Job.RUNNING,
        "done": Job.DONE,
        "failed": Job.FAILED,
        "cancelled": Job.CANCELLED,
    },
    Job.DONE: {},
    Job.FAILED: {},
    Job.CANCELLED: {},
}


class Session(Enum):
    """The state of a session, as its client sees it."""

    GREETING = "greeting"
    OPEN = "open"
    RESUMING = "resuming"
    LOST = "lost"
    CLOSED = "closed"


# Rules:
# - Before the first welcome, only hello is sent.
# - "stranger": the sidecar does not know this connection, because the transport has connected again after a freeze. The
#   client sends hello again with the session's number, and after the welcome all requests without an answer.
# - A welcome with a new session means that the jobs are gone, so the session is lost. The client does not use the new
#   session.
# - "silence": the sidecar did not answer pings while this side was running. "gone": the program knows that the sidecar
#   has ended.
SESSION: dict[Session, dict[str, Session]] = {
    Session.GREETING: {
        "welcome": Session.OPEN,
        "refused": Session.LOST,
        "silence": Session.LOST,
        "gone": Session.LOST,
        "close": Session.CLOSED,
    },
    Session.OPEN: {
        "stranger": Session.RESUMING,
        "silence": Session.LOST,
        "gone": Session.LOST,
        "close": Session.CLOSED,
    },
    Session.RESUMING: {
        "resumed": Session.OPEN,
        "welcome": Session.LOST,
        "refused": Session.LOST,
        "silence": Session.LOST,
        "gone": Session.LOST,
        "close": Session.CLOSED,
    },
    Session.LOST: {"close": Session.CLOSED},
    Session.CLOSED: {},
}


class Engine(Enum):
    """The state of the engine process. The messages `welcome`, `stats` and `engine` have these values."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    HIBERNATED = "hibernated"
    OFF = "off"


# Rules:
# - If the first load fails, the sidecar ends with the engine's error.
# - "died": the engine ended without being told to. "gave up": it has died too often (the restart limit), also without
#   jobs, or it reported an error while it loaded that an immediate restart cannot solve.
# - Hibernated: the engine was told to end, and its jobs wait. "woken" starts a new engine.
# - Off: the broker waits before it starts the engine again, longer each time up to a limit. Meanwhile jobs are refused
#   with the reason. "tried again" ends the wait after its time, or earlier if a client asks for a job or a budget.
ENGINE: dict[Engine, dict[str, Engine]] = {
    Engine.LOADING: {"ready": Engine.READY},
    Engine.READY: {"died": Engine.RESTARTING, "hibernated": Engine.HIBERNATED},
    Engine.RESTARTING: {
        "ready": Engine.READY,
        "died": Engine.RESTARTING,
        "gave up": Engine.OFF,
        "hibernated": Engine.HIBERNATED,
    },
    Engine.HIBERNATED: {"woken": Engine.RESTARTING},
    Engine.OFF: {"tried again": Engine.RESTARTING},
}


class Lease(Enum):
    """The state of the VRAM lease at the broker."""

    ACTIVE = "active"
    PARKED = "parked"
    HIBERNATING = "hibernating"
    """The engine was told to end."""
    HIBERNATED = "hibernated"
    """There is no engine process."""
    WAKING = "waking"
    """The lease is active again, but no engine is ready yet: the old one may still be ending, the new one loading."""


class Do(Enum):
    """The actions of the broker at a step of the lease. :class:`frameshard.broker.leases.Lease` has a method for
    each."""

    GRANT = "grant the change at once: no engine has to be asked"
    TELL = "tell the engine the change"
    TELL_ALL = "tell the engine all changes that have not been released"
    SETTLE = "answer the changes that the end of the engine has fulfilled"
    DROP = "drop commands that no engine has got"
    GIVE_BACK = "shrink to what the host lets an idle sidecar keep"
    TAKE_AGAIN = "grow to the host's budget again"
    SHRINK = "shrink below the host's budget until enough of the device is free"


# Rules:
# - "active", "parked", "hibernated": a host asks for this state (budget_set). If several hosts ask, the last one wins.
# - Only a running engine can be parked. While the lease is waking, "parked" hibernates it instead. While it is
#   hibernating or hibernated, "parked" is refused.
# - "ready": an engine is ready. "lost": the engine has ended. "gone": it has ended, and no engine is started until the
#   lease is active.
# - "undo ...": the newest change was refused, by the engine or because no engine can be started now (Engine.OFF). The
#   lease returns to the state before that change.
# - "jobs", "idle", "pressure": the sidecar changes its use of VRAM on its own. These events happen only while no change
#   is in progress.
# - The state does not change with a budget in the frame block, nor if a host asks for another budget in the same state.
LEASE: dict[Lease, dict[str, tuple[Lease, tuple[Do, ...]]]] = {
    Lease.ACTIVE: {
        "active": (Lease.ACTIVE, (Do.TELL,)),
        "parked": (Lease.PARKED, (Do.TELL,)),
        "hibernated": (Lease.HIBERNATING, (Do.GRANT,)),
        "ready": (Lease.ACTIVE, (Do.TELL_ALL,)),
        "lost": (Lease.ACTIVE, (Do.DROP,)),
        "gone": (Lease.WAKING, (Do.SETTLE,)),
        "undo active": (Lease.ACTIVE, ()),
        "undo parked": (Lease.PARKED, ()),
        "undo hibernated": (Lease.HIBERNATING, ()),
        "idle": (Lease.ACTIVE, (Do.GIVE_BACK,)),
        "jobs": (Lease.ACTIVE, (Do.TAKE_AGAIN,)),
        "pressure": (Lease.ACTIVE, (Do.SHRINK,)),
    },
    Lease.PARKED: {
        "active": (Lease.ACTIVE, (Do.TELL,)),
        "parked": (Lease.PARKED, (Do.TELL,)),
        "hibernated": (Lease.HIBERNATING, (Do.GRANT,)),
        "ready": (Lease.PARKED, (Do.TELL_ALL,)),
        "lost": (Lease.PARKED, (Do.DROP,)),
        "gone": (Lease.HIBERNATED, (Do.SETTLE,)),
        "undo active": (Lease.ACTIVE, ()),
        "undo parked": (Lease.PARKED, ()),
        "undo hibernated": (Lease.HIBERNATING, ()),
    },
    Lease.HIBERNATING: {
        "active": (Lease.WAKING, (Do.GRANT,)),
        "hibernated": (Lease.HIBERNATING, (Do.GRANT,)),
        "ready": (Lease.HIBERNATING, ()),
        "lost": (Lease.HIBERNATING, (Do.DROP,)),
        "gone": (Lease.HIBERNATED, (Do.SETTLE,)),
        "undo active": (Lease.WAKING, ()),
        "undo parked": (Lease.HIBERNATING, ()),
        "undo hibernated": (Lease.HIBERNATING, ()),
    },
    Lease.HIBERNATED: {
        "active": (Lease.WAKING, (Do.GRANT,)),
        "hibernated": (Lease.HIBERNATED, (Do.GRANT, Do.SETTLE)),
        "ready": (Lease.HIBERNATING, ()),
        "lost": (Lease.HIBERNATED, (Do.DROP,)),
        "gone": (Lease.HIBERNATED, (Do.SETTLE,)),
        "undo active": (Lease.WAKING, ()),
        "undo parked": (Lease.HIBERNATED, ()),
        "undo hibernated": (Lease.HIBERNATED, ()),
    },
    Lease.WAKING: {
        "active": (Lease.WAKING, (Do.GRANT,)),
        "parked": (Lease.HIBERNATING, (Do.GRANT,)),
        "hibernated": (Lease.HIBERNATING, (Do.GRANT,)),
        "ready": (Lease.ACTIVE, (Do.TELL_ALL,)),
        "lost": (Lease.WAKING, (Do.DROP,)),
        "gone": (Lease.WAKING, (Do.SETTLE,)),
        "undo active": (Lease.WAKING, ()),
        "undo parked": (Lease.HIBERNATING, ()),
        "undo hibernated": (Lease.HIBERNATING, ()),
    },
}
LEASE_REFUSED: dict[tuple[Lease, str], str] = {
    (Lease.HIBERNATING, "parked"): "a hibernated sidecar has to become active before it can be parked",
    (Lease.HIBERNATED, "parked"): "a hibernated sidecar has to become active before it can be parked",
}
"""The requests of hosts that are refused, and the reasons."""


class Change(Enum):
    """The state of a host's change of the lease."""

    ASKED = "asked"
    GRANTED = "granted"
    RELEASED = "released"
    OVER = "over"


# Rules:
# - The host gets one answer for each step: lease, released, observed; or an error, after which none follows. What was
#   released is in force and cannot be refused any more.
# - A second "granted" comes if the broker grants the change while there is no engine, and the engine grants it later.
# - "late": after half of the time, the engine predicts that the deadline will be missed. It may come after "released".
CHANGE: dict[Change, dict[str, Change]] = {
    Change.ASKED: {"granted": Change.GRANTED, "refused": Change.OVER},
    Change.GRANTED: {
        "granted": Change.GRANTED,
        "late": Change.GRANTED,
        "released": Change.RELEASED,
        "refused": Change.OVER,
    },
    Change.RELEASED: {"late": Change.RELEASED, "observed": Change.OVER},
    Change.OVER: {},
}
