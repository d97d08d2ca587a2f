"""What may happen when. The code asks these tables; it has no second opinion."""

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
# - A job runs when the engine has said "started". After an engine's death it runs on: the replay's "started" is silent.
# - Exactly one terminal event per job, whatever races: whoever comes second finds an empty row.
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
# - "stranger": the server does not know this connection (the transport came back after a freeze). Hello again, with the
#   session's number; what was unanswered is sent again after the welcome.
# - A welcome that did not resume means that the jobs are gone, so the session is lost; it is never silently a new one.
# - "silence": pings stayed unanswered while this side was awake. "gone": the program knows more than the transport.
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
