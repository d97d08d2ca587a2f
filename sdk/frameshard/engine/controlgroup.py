"""Reads the limits for host memory of the control groups that this process is in: a container's, or a unit's of
systemd. Linux ends a process of a group that exceeds its limit, also if the machine has memory left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from frameshard.records import record

MOUNT = Path("/sys/fs/cgroup")

_LIMITS = "memory.max", "memory.high", "memory.limit_in_bytes"
_USED = "memory.current", "memory.usage_in_bytes"
"""Files of version 2, then of version 1. Above `memory.high` each allocation waits."""


@record
class Group:
    """A control group with a limit.

    :param available_bytes: what its processes can still take, with the files that the system would drop for it.
    :param stalled: percent of the last 10 s in which a task of the group waited for memory; 0 if the kernel does not
        tell.
    """

    limit_bytes: int
    available_bytes: int
    stalled: float


def tightest(proc: Path, mount: Path = MOUNT) -> Group | None:
    """The group with the least memory available, of those that this process is in. None if there is no limit.

    :param proc: where /proc is.
    :param mount: where the file systems of the control groups are.
    """
    groups = (group for at in _directories(proc, mount) if (group := _read(at)) is not None)
    return min(groups, key=lambda group: group.available_bytes, default=None)


def stall(path: Path) -> float:
    """The ``avg10`` of the line ``some`` of a file of PSI; 0 if there is no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(path.read_text().split()[1].removeprefix("avg10="))
    return 0.0


def _directories(proc: Path, mount: Path) -> Iterator[Path]:
    """Those of the process's groups, and of the groups around them."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):  # of version 1 several may be mounted together
            continue
        top = mount / controllers  # of version 2 without a name
        at = top / path.lstrip("/")
        if ".." in at.parts or not at.is_dir():
            at = top  # in a container the path may be that of the host, and the mount be the container's own group
        while at != top:
            yield at
            at = at.parent
        yield top


def _read(at: Path) -> Group | None:
    """The figures of a group; None if it has no limit."""
    limits = [limit for name in _LIMITS if (limit := _number(at / name)) is not None]
    used = next((used for name in _USED if (used := _number(at / name)) is not None), None)
    if not limits or used is None:
        return None
    cached = 0
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (at / "memory.stat").read_text().splitlines())
        # In version 1 the figures with "total" are those of the group and of all groups in it.
        cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("active_file", "inactive_file"))
    return Group(min(limits), max(min(limits) - used + cached, 0), stall(at / "memory.pressure"))


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or another word, such as ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
