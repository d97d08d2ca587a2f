"""What differs between operating systems: child processes, locks, shared files, and places for files.

On Windows a child inherits the handle of a file where it inherits a file descriptor elsewhere, and gets a socket
through its standard input. A job object ends it with the sidecar.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import trio  # it starts slowly, and programs on asyncio do without it

if sys.platform == "win32":
    import _winapi
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    for _name, _result, _arguments in (
        ("OpenProcess", wintypes.HANDLE, (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)),
        ("SetPriorityClass", wintypes.BOOL, (wintypes.HANDLE, wintypes.DWORD)),
        ("CreateJobObjectW", wintypes.HANDLE, (wintypes.LPVOID, wintypes.LPCWSTR)),
        ("SetInformationJobObject", wintypes.BOOL, (wintypes.HANDLE, ctypes.c_int, wintypes.LPVOID, wintypes.DWORD)),
        ("AssignProcessToJobObject", wintypes.BOOL, (wintypes.HANDLE, wintypes.HANDLE)),
        ("K32GetProcessMemoryInfo", wintypes.BOOL, (wintypes.HANDLE, wintypes.LPVOID, wintypes.DWORD)),
    ):
        _function = getattr(_kernel, _name)
        _function.restype, _function.argtypes = _result, _arguments
    _THIS_PROCESS = wintypes.HANDLE(-1)
    _APART = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
else:
    import fcntl

_STATM = Path("/proc/self/statm")
OPEN_MAX = 10240
"""The file descriptors that macOS gives a process in any case, also where the limit is infinite."""

MAX_FILES = 1 << 16
"""More are not used. The kernel's table of a process's descriptors has a place for each number up to the highest one in
use: with the limits of some containers, GiBs."""

PARENT_CHECK_S = 0.25
ALONE_CHECK_S = 0.1
DENIED_S = 2.0  # so long a file may be denied because it is being deleted
_SHARING_VIOLATION = 32  # of Windows: another process has the file open
_PAIR_TRIES = 8
_LENGTH = 4  # bytes

# ---- child processes ------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    """How a child process is started.

    :param name: the argument that tells it which file it inherits.
    :param options: for ``anyio.open_process`` or :class:`subprocess.Popen`.
    """

    name: str
    options: Mapping[str, Any]


@contextmanager
def inheriting(fd: int) -> Iterator[Child]:
    """A child process that is started in this block inherits the file `fd`, and gets it by :func:`inherited_file`.
    Ctrl-C in the terminal does not reach it."""
    if sys.platform == "win32":
        handle = msvcrt.get_osfhandle(fd)
        os.set_handle_inheritable(handle, True)
        try:
            startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
            yield Child(str(handle), {"startupinfo": startup, "creationflags": _APART})
        finally:
            os.set_handle_inheritable(handle, False)
    else:
        yield Child(str(fd), {"pass_fds": (fd,), "start_new_session": True})


async def start(
    command: Sequence[str],
    sock: socket.socket,
    *,
    stdin: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
) -> trio.Process:
    """Starts a child process, which gets the socket by :func:`inherited_socket`. Its command line is `command` with
    ``--fd N`` at the end; its output can be read. Ctrl-C in the terminal does not reach it.

    :param stdin: ``DEVNULL`` or ``PIPE``.
    :param env: the environment; None for that of this process.
    :raises OSError: it cannot be started.
    """
    import trio

    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if sys.platform != "win32":
        number = sock.fileno()
        command = [*command, "--fd", str(number)]
        return await _open_process(command, stdin=stdin, **output, env=env, pass_fds=(number,), start_new_session=True)
    else:
        # The child reads what it needs for the socket from its standard input. It must be the process that is started
        # here, and in a virtual environment sys.executable starts another one.
        base = getattr(sys, "_base_executable", sys.executable)
        executable = None
        if command[0] == sys.executable != base:
            executable, env = base, {**(env or os.environ), "__PYVENV_LAUNCHER__": sys.executable}
        with trio.CancelScope(shield=True):
            process = await _open_process(
                [*command, "--fd", "0"],
                stdin=subprocess.PIPE,
                **output,
                env=env,
                executable=executable,
                creationflags=_APART,
            )
            assert process.stdin is not None
            with suppress(OSError, trio.BrokenResourceError):  # it has ended already
                shared = sock.share(process.pid)
                await process.stdin.send_all(len(shared).to_bytes(_LENGTH, "little") + shared)
            if stdin == subprocess.DEVNULL:
                await process.stdin.aclose()
        return process


async def _open_process(command: Sequence[str], **options: Any) -> trio.Process:
    """
    :raises OSError: it cannot be started; also if the system has no thread to start it in.
    """
    import trio

    try:
        return await trio.lowlevel.open_process(command, **options)
    except RuntimeError as error:  # how Python says that it gets no thread
        raise OSError(errno.EAGAIN, str(error)) from None


async def start_with_stream(command: Sequence[str], env: Mapping[str, str]) -> tuple[trio.Process, trio.SocketStream]:
    """Starts a child process like :func:`start`, with one end of a pair of sockets.

    :returns: the process, and the other end.
    :raises OSError: it cannot be started.
    """
    import trio

    ours, theirs = socket_pair()
    try:
        with theirs:
            process = await start(command, theirs, env=env)
    except BaseException:
        ours.close()
        raise
    return process, trio.SocketStream(trio.socket.from_stdlib_socket(ours))


def inherited_socket(number: int) -> socket.socket:
    """The socket that this process has got from the one that has started it.

    :param number: of the argument ``--fd``.
    """
    if sys.platform == "win32":
        length = int.from_bytes(_read(number, _LENGTH), "little")
        return socket.fromshare(_read(number, length))
    sock = socket.socket(fileno=number)
    sock.set_inheritable(False)
    return sock


def _read(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.read(fd, length - len(data))):
        data += more
    return data


def inherited_file(number: int) -> int:
    """The file descriptor, open for writing, of a file that this process has inherited."""
    if sys.platform == "win32":
        return msvcrt.open_osfhandle(number, os.O_WRONLY | os.O_BINARY)
    return number


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that are connected with each other, and with no other process."""
    for _ in range(_PAIR_TRIES):
        pair = socket.socketpair()
        if sys.platform != "win32":
            return pair
        # Windows has only loopback TCP, and before 3.11.10 Python does not check who has connected.
        one, other = pair
        if one.getpeername() == other.getsockname() and other.getpeername() == one.getsockname():
            for sock in pair:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return pair
        one.close()
        other.close()
    raise ConnectionError("other processes take the connections of this one")


def kill(pid: int) -> None:
    """Ends a child process at once."""
    if sys.platform == "win32":
        with suppress(OSError):  # it has ended
            os.kill(pid, signal.SIGTERM)  # TerminateProcess
    else:
        os.kill(pid, signal.SIGKILL)


def may_run(pid: int) -> bool:
    """False if there is surely no process of this number in this namespace."""
    if sys.platform == "win32":
        try:
            process = _winapi.OpenProcess(0x100000, False, pid)  # SYNCHRONIZE
        except OSError as error:
            return error.winerror != 87  # ERROR_INVALID_PARAMETER: no such process
        try:  # a process that has ended is there as long as anyone has a handle of it
            return _winapi.WaitForSingleObject(process, 0) != _winapi.WAIT_OBJECT_0
        finally:
            _winapi.CloseHandle(process)
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process can have this number
        return False
    except PermissionError:
        pass
    return True


def ending(returncode: int) -> str:
    """How a child process has ended: "signal 9", "exit code 3", on Windows also "exception 0xC0000005"."""
    if returncode < 0:
        return f"signal {-returncode}"
    return f"exit code {returncode}" if returncode < 0xC0000000 else f"exception 0x{returncode:08X}"


if sys.platform == "win32":
    KILLED = ending(signal.SIGTERM)
    CRASHES = tuple(map(ending, (3, 0xC0000005, 0xC0000094, 0xC0000409)))  # abort, bad address, 1 / 0, fast fail
else:
    KILLED = ending(-signal.SIGKILL)
    """How a process ends that :func:`kill` has ended, or on Linux the kernel because memory ran out."""

    CRASHES = tuple(ending(-number) for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS))
    """How a process ends that crashes."""


def end_children_with_this_process() -> None:
    """On Windows all children of this process, and theirs, end when it ends, for whatever reason. Elsewhere they must
    notice its end themselves."""
    if sys.platform == "win32":
        limits = (ctypes.c_uint64 * 18)()  # JOBOBJECT_EXTENDED_LIMIT_INFORMATION, which is 144 bytes
        limits[2] = 0x2000  # LimitFlags: JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
        job = _kernel.CreateJobObjectW(None, None)  # open until this process ends
        if not (
            job
            and _kernel.SetInformationJobObject(job, 9, limits, ctypes.sizeof(limits))
            and _kernel.AssignProcessToJobObject(job, _THIS_PROCESS)
        ):
            raise ctypes.WinError(ctypes.get_last_error())


def make_idle(pid: int) -> None:
    """Gives a process the lowest priority, on Windows."""
    if sys.platform == "win32":
        process = _kernel.OpenProcess(0x0200, False, pid)  # PROCESS_SET_INFORMATION
        if process:
            _kernel.SetPriorityClass(process, 0x40)  # IDLE_PRIORITY_CLASS
            _winapi.CloseHandle(process)


@contextmanager
def memory() -> Iterator[Callable[[], int] | None]:
    """A function that returns this process's resident memory in bytes and needs no more file descriptors; None where
    the system does not say it."""
    if sys.platform == "win32":
        counters = (ctypes.c_size_t * 10)(80)  # PROCESS_MEMORY_COUNTERS_EX of 80 bytes

        def resident() -> int:
            _kernel.K32GetProcessMemoryInfo(_THIS_PROCESS, counters, ctypes.sizeof(counters))
            return int(counters[2])  # WorkingSetSize

        yield resident
    elif _STATM.exists():
        with _STATM.open("rb", buffering=0) as statm:

            def resident() -> int:
                statm.seek(0)
                return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

            yield resident
    else:
        yield None


def max_files() -> int:
    """The most file descriptors that this process may have and should use."""
    if sys.platform == "win32":
        return sys.maxsize  # on Windows sockets do not use file descriptors
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OPEN_MAX if most == resource.RLIM_INFINITY else min(most, MAX_FILES)


async def parent_has_ended() -> None:
    """Returns when the process that has started this one has ended."""
    import trio

    parent = os.getppid()
    if sys.platform == "win32":
        process = _kernel.OpenProcess(0x00100000, False, parent)  # SYNCHRONIZE
        if process:
            await trio.lowlevel.WaitForSingleObject(process)
    else:
        while os.getppid() == parent:
            await trio.sleep(PARENT_CHECK_S)


async def pipe_has_ended(fd: int) -> None:
    """Reads a pipe, without a use for the data, until all who could write to it have closed it."""
    import trio

    if sys.platform == "win32":
        with suppress(OSError):
            while await trio.to_thread.run_sync(os.read, fd, 1 << 12, abandon_on_cancel=True):
                pass
    else:
        async with trio.lowlevel.FdStream(fd) as stream:
            while await stream.receive_some(1 << 12):
                pass


# ---- files ----------------------------------------------------------------------------------------------------------


def user_directory() -> Path:
    """The directory for files of this user's programs, on Windows."""
    return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "frameshard"


def home() -> Path | None:
    """This user's home directory; None if neither the environment nor the system's list of users has one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def image_directory() -> Path:
    """The directory of this user in which programs leave images for sidecars, where there are no memory files.

    :raises OSError: it cannot be made, or belongs to somebody else.
    """
    if sys.platform == "win32":
        directory = user_directory() / "images"
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    else:
        return temporary_directory("images")


if sys.platform != "win32":

    def temporary_directory(purpose: str) -> Path:
        """A directory of this user, and of nobody else, among the temporary files.

        :raises OSError: it cannot be made, or belongs to somebody else.
        """
        directory = Path(tempfile.gettempdir()) / f"frameshard-{purpose}-{os.getuid()}"
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            raise PermissionError(errno.EACCES, "it must be a directory of yours with mode 700", str(directory))
        return directory


def lock(path: Path) -> int | None:
    """Opens and locks the lock file at `path`. The operating system releases the lock when the process ends.

    :returns: its file descriptor; None if another process holds the lock or the directory is gone.
    """
    if sys.platform == "win32":
        try:
            return _open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):
            return None
    else:
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    return fd
            except BlockingIOError:
                os.close(fd)
                return None
            except FileNotFoundError:
                pass
            os.close(fd)  # its owner has removed the file after it was opened here


def why_not_secret(path: Path) -> str:
    """Returns why a file may not hold a secret, as the end of a sentence; an empty text if it may.

    :raises OSError: there is no such file, or it cannot be looked at.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        return "is no regular file and no pipe"
    if sys.platform != "win32" and mode & 0o077:
        return "is one that others may read: chmod 600"
    return ""


def remove_locked(directory: Path, fd: int) -> None:
    """Removes a directory and gives up the lock on its file ``lock``."""
    if sys.platform == "win32":
        # An open file cannot be removed. No other process makes a lock in a directory that is not its own.
        os.close(fd)
        shutil.rmtree(directory, ignore_errors=True)
        if (
            directory.exists()
        ):  # a process still has a file of it mapped: the next launch finds the lock and tries again
            with suppress(OSError):
                (directory / "lock").touch()
    else:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(fd)


def open_alone(path: str, flags: int, *, on_wait: Callable[[], object] = lambda: None) -> int:
    """An opener for :func:`open`, for a file that one process at a time may have open so. Waits for the other one. The
    file may be renamed while it is open.

    :param on_wait: is called once if another process has the file open.
    :raises PermissionError: this user may not write to it.
    """
    if sys.platform == "win32":
        denied_until, waits = 0.0, False
        while True:
            try:
                return _open(path, flags)
            except PermissionError as error:
                # ERROR_ACCESS_DENIED is also said of a file that is being deleted, which takes a moment.
                if error.winerror == _SHARING_VIOLATION:
                    denied_until = 0.0
                    if not waits:
                        on_wait()
                    waits = True
                elif denied_until == 0.0:
                    denied_until = time.monotonic() + DENIED_S
                elif time.monotonic() > denied_until:
                    raise
                time.sleep(ALONE_CHECK_S)
    else:
        fd = os.open(path, flags, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
        except BaseException:
            os.close(fd)
            raise
        return fd


def open_to_read(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Opens a file that its owner may delete meanwhile. On Windows nobody can write to it until it is closed, and it is
    refused while somebody can.

    :param flags: more flags of :func:`os.open`, which Windows does not have.
    """
    if sys.platform == "win32":
        return _open(path, os.O_RDONLY)
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


def read_start(path: Path, most_bytes: int) -> bytes:
    """Returns the first bytes of a file.

    :raises FileExistsError: something else is there, such as a directory or a pipe.
    :raises OSError: there is no such file, or it cannot be read.
    """
    kind = path.stat().st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise FileExistsError(errno.EEXIST, "something is there that is no file")
    with path.open("rb") as file:
        return file.read(most_bytes)


def share(path: Path, data: memoryview) -> Callable[[], None]:
    """Writes a new file for other processes of this user, who open it with :func:`open_to_read`. On Windows it is
    deleted when this process ends, elsewhere only by the function that this returns.

    :returns: deletes the file.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600), "wb") as file:
        file.write(data)
    if sys.platform == "win32":
        fd = _open(path, os.O_RDONLY | os.O_TEMPORARY)
        return partial(os.close, fd)
    return path.unlink


if sys.platform == "win32":

    def _open(path: str | os.PathLike[str], flags: int) -> int:
        """As :func:`os.open`, but while the file is open nobody else can open it to write. With ``O_TEMPORARY`` nobody
        else can delete it, and it is deleted when it is closed."""
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        temporary = flags & os.O_TEMPORARY
        handle = _winapi.CreateFile(
            os.fspath(path),
            0x80000000
            | (0x40000000 if writes else 0)
            | (0x00010000 if temporary else 0),  # GENERIC_READ, _WRITE, DELETE
            0x1 if temporary else 0x5,  # FILE_SHARE_READ, _DELETE
            0,
            4 if writes else 3,  # OPEN_ALWAYS, OPEN_EXISTING
            0x04000000 if temporary else 0x00200000,  # FILE_FLAG_DELETE_ON_CLOSE, _OPEN_REPARSE_POINT: no links
            0,
        )
        return msvcrt.open_osfhandle(handle, flags & os.O_APPEND | os.O_BINARY)
