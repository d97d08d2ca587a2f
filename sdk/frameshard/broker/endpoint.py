"""The endpoint of a sidecar and its files.

Each launch has a new directory that only this user can enter. It holds a connect file, also if the option
`connect_file` names another one, and, with ipc, the socket. A lock file shows that the sidecar is alive. The operating
system releases the lock when the process ends, also when it is killed, so the next launch finds and removes the
directory. A path that the user gives for an ipc socket is locked too, because a second bind would take the path over
without an error. The lock file beside it has a name that no other program uses, because it is removed at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from frameshard import system
from frameshard.errors import BadArgument, EndpointInUse
from frameshard.wire.launch import MAX_CONNECT_FILE, parse_info

CONNECT_FILE = "connect.json"

MAX_SOCKET_PATH = 100
"""The most bytes of a socket's path. The limits of operating systems are 104 and 108."""


@contextmanager
def claim(transport: str, endpoint: str | None) -> Iterator[tuple[Path, str]]:
    """Yields the directory of this launch and the endpoint to bind. Both belong to this process until the end of the
    block, which removes them.

    :raises EndpointInUse: another sidecar has the path.
    :raises BadArgument: a path cannot be used.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(_fresh_directory())
        if endpoint is None:
            endpoint = f"ipc://{directory / 'socket'}" if transport == "ipc" else "tcp://127.0.0.1:*"
        if endpoint.startswith("ipc://"):
            stack.enter_context(_socket_path(Path(endpoint[len("ipc://") :])))
        yield directory, endpoint


def closed_name(path: Path) -> Path:
    """The name that a socket's file has while no client may connect."""
    return path.with_name(f".{path.name}.frameshard-closed")


def running() -> list[Path]:
    """The connect files of this user's running sidecars, in the directories of their launches."""
    root = _root()
    _sweep(root)
    return sorted(root.glob(f"run-*/{CONNECT_FILE}"))


@contextmanager
def connect_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes the connect file at `path` atomically. Only this user can read the file. It may
    replace the connect file of another sidecar, but no other file. The end of the block removes it, unless another
    sidecar has replaced it.

    :raises BadArgument: the file cannot be written, or another file is there. The function may raise it too.
    """
    published = None

    def write(data: bytes) -> None:
        """Writes the file under its name until it is whole."""
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        _check_replaceable(path)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            file.write(data)

    def publish(data: bytes) -> None:
        nonlocal published
        try:
            write(data)
            part.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise refusal(error) from None
        published = data

    def refusal(error: OSError | ValueError) -> BadArgument:
        why = error.strerror if isinstance(error, OSError) else error
        return BadArgument(f"cannot write the connect file {path}: {why}", field="connect_file")

    try:
        part = path.with_name(f".{path.name}.{os.getpid()}")
        # Whether it can be written shows now, not after the load. Nothing is left of it if this process is killed then.
        write(b"")
        part.unlink()
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        raise refusal(error) from None
    try:
        yield publish
    finally:
        with contextlib.suppress(OSError):
            if published is not None and _content(path) == published:
                path.unlink()


def _content(path: Path) -> bytes:
    """The content of a file, which a connect file's size limits; empty if there is no file.

    :raises OSError: something else than a file is there, or it cannot be read.
    """
    try:
        return system.read_start(path, MAX_CONNECT_FILE)
    except FileNotFoundError:
        return b""


def _check_replaceable(path: Path) -> None:
    """Checks that there is no file at `path`, an empty one, or a connect file.

    :raises OSError: something else is there.
    """
    content = _content(path)
    try:
        if content:
            parse_info(content)
    except BadArgument:
        raise FileExistsError(
            errno.EEXIST, "a file is there that is no connect file; remove it, or name another path"
        ) from None


@contextmanager
def _fresh_directory() -> Iterator[Path]:
    root = _root()
    try:
        _sweep(root)
        while True:
            directory = Path(tempfile.mkdtemp(dir=root, prefix="run-"))
            lock = system.lock(directory / "lock")
            if lock is not None:
                break  # otherwise another launch has already removed the new directory
    except OSError as error:
        raise _no_root(root, error) from None
    try:
        yield directory
    finally:
        system.remove_locked(directory, lock)


@contextmanager
def _socket_path(path: Path) -> Iterator[None]:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise BadArgument(f"the socket's path is longer than {MAX_SOCKET_PATH} bytes: {path}", field="endpoint")
    lock_file = path.with_name(f".{path.name}.frameshard-lock")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = system.lock(lock_file)
    except OSError as error:
        raise BadArgument(f"cannot listen at {path}: {error.strerror}", field="endpoint") from None
    if lock is None:
        raise EndpointInUse(f"another sidecar listens at {path}", endpoint=f"ipc://{path}")
    try:
        _remove_dead(path)
        yield
    finally:
        with contextlib.suppress(EndpointInUse, BadArgument):  # another program may have taken the path meanwhile
            _remove_dead(path)
        with contextlib.suppress(OSError):
            closed_name(path).unlink()
        with contextlib.suppress(OSError):
            lock_file.unlink()
        os.close(lock)


def _remove_dead(path: Path) -> None:
    """Removes the socket of a program that has ended, as libzmq would do with any socket.

    :raises EndpointInUse: there is something else, or a program listens there.
    :raises BadArgument: it belongs to another user.
    """
    if sys.platform == "win32":
        return  # there are no ipc endpoints
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise EndpointInUse(f"{path} exists and is no socket", endpoint=f"ipc://{path}")
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)  # a program with a full queue of connections is alive
            caller.connect(os.fspath(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        try:
            path.unlink()
        except OSError as error:
            raise BadArgument(
                f"cannot remove the socket {path} of a program that has ended: {error.strerror}", field="endpoint"
            ) from None
        return
    except OSError:
        pass
    raise EndpointInUse(f"another program listens at {path}", endpoint=f"ipc://{path}")


def _root() -> Path:
    """The directory for all launches of this user. Its path is short, because socket paths must be."""
    if sys.platform == "win32":
        root = system.user_directory() / "run"  # Windows lets only this user in
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_root(root, error) from None
        return root
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # The XDG specification has relative paths ignored.
    if runtime and os.path.isabs(runtime) and len(runtime) < 40 and os.access(runtime, os.W_OK):
        root = Path(runtime) / "frameshard"
    else:
        root = Path(f"/tmp/frameshard-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        found = root.lstat()
    except OSError as error:
        raise _no_root(root, error) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise BadArgument(
            f"{root} must be a directory of yours with mode 700; remove it, or set XDG_RUNTIME_DIR to a directory of "
            "yours"
        )
    return root


def _no_root(root: Path, error: OSError) -> BadArgument:
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_RUNTIME_DIR"
    return BadArgument(
        f"cannot make a directory for this launch in {root}: {error.strerror}; set {variable} to a directory of yours"
    )


def _sweep(root: Path) -> None:
    """Removes the directories of killed sidecars."""
    for directory in root.glob("run-*"):
        if sys.platform == "win32" and not (directory / "lock").exists():
            continue  # another launch is making this directory; elsewhere its owner notices, and makes another
        lock = system.lock(directory / "lock")
        if lock is not None:
            system.remove_locked(directory, lock)
