"""State tables: what may happen in each state, and what follows. The code looks it up here and nowhere else."""

from __future__ import annotations

from enum import Enum


class Job(Enum):
    """Where a job stands at the broker."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


# Rules:
# - A job runs when the engine has sent "started". It stays so when the engine dies: the next "started" is not sent on.
# - A job has exactly one terminal event: a second one finds an empty row.
# - A cancel of a queued job needs no engine.
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
    """Where a session stands, as its client sees it."""

    GREETING = "greeting"
    OPEN = "open"
    RESUMING = "resuming"
    LOST = "lost"
    CLOSED = "closed"


# Rules:
# - Nothing but hello is sent before the first welcome.
# - "stranger": the sidecar does not know this connection (the transport came back after a freeze). Hello is sent again,
#   with the session's number; what was unanswered is sent again after the welcome.
# - A welcome that did not resume means that the jobs are gone, so the session is lost; it is never silently a new one.
# - "silence": pings stayed unanswered while this side was awake. "gone": the program knows that the sidecar has ended.
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
    """Where the engine process stands. The values travel in `welcome`, `stats` and `engine`."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    HIBERNATED = "hibernated"
    OFF = "off"


# Rules:
# - A first load that fails ends the sidecar with the engine's error: there is nothing to serve yet.
# - "died" is any end that was not asked for; "gave up" follows when the engine does not stay alive even without jobs
#   (the restart limit), or reports while it loads an error that another try at once cannot mend.
# - Hibernated is an end that was asked for: the process is gone, its jobs wait. "woken" starts another.
# - Off is a pause, and each is longer than the last up to a limit: jobs are refused with the reason. "tried again"
#   ends it, when it has passed or sooner when a client asks for a job or a budget.
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
    """Where the VRAM lease stands at the broker."""

    ACTIVE = "active"
    PARKED = "parked"
    HIBERNATING = "hibernating"
    """The engine has been told to end."""
    HIBERNATED = "hibernated"
    """No engine process."""
    WAKING = "waking"
    """Active again, and no engine is ready yet: the last one may still end, the next one may load."""


class Do(Enum):
    """What the broker does at a step of the lease; :class:`frameshard.broker.leases.Lease` has a method for each."""

    GRANT = "grant the change at once: no engine has to be asked"
    TELL = "tell the engine the change"
    TELL_ALL = "tell the engine all changes that have not been released"
    SETTLE = "answer the changes that the end of the engine has fulfilled"
    DROP = "drop commands that no engine has got"
    GIVE_BACK = "shrink to what the host lets an idle sidecar keep"
    TAKE_AGAIN = "grow to the host's budget again"
    SHRINK = "shrink below the host's budget until enough of the device is free"


# Rules:
# - "active", "parked", "hibernated": a host asks for it (budget_set). The last word counts, whichever host it is from.
# - To park, an engine has to run. Where one is on its way, parking is hibernating; where none is wanted, it is refused.
# - "ready": an engine is ready. "lost": it has ended. "gone": it has ended, and none is started before the lease is
#   active.
# - "undo ...": the newest change is refused, by the engine or because none can be started now (Engine.OFF); the lease
#   goes back to the state before that change.
# - "jobs", "idle", "pressure": what the sidecar does on its own. They are raised only while no change is under way.
# - A budget in the frame block, and one of a host in the same state, change figures and not the state.
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
"""What a host is refused, and why. Events of the sidecar's own are not raised in other states than `LEASE` has."""


class Change(Enum):
    """Where a host's change of the lease stands: between two of these its VRAM shrinks, is parked or grows."""

    ASKED = "asked"
    GRANTED = "granted"
    RELEASED = "released"
    OVER = "over"


# Rules:
# - Each step answers the host once: lease, released, observed, or an error. "refused" after "granted" is an error.
# - "granted" again: the engine grants what the broker has granted already, while there was no engine.
# - "late": the engine sees half-way to the deadline that it will be missed. A release may overtake it.
CHANGE: dict[Change, dict[str, Change]] = {
    Change.ASKED: {"granted": Change.GRANTED, "refused": Change.OVER},
    Change.GRANTED: {
        "granted": Change.GRANTED,
        "late": Change.GRANTED,
        "released": Change.RELEASED,
        "refused": Change.OVER,
    },
    Change.RELEASED: {"late": Change.RELEASED, "observed": Change.OVER, "refused": Change.OVER},
    Change.OVER: {},
}
