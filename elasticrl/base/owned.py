"""Whose a folder is, and what we put into our own: what lies in one that others can change says what they want.

The one idea: the processes of a node find each other, and what they are to run, by names in folders. Below `/tmp` or `/dev/shm`
anybody can have made such a folder first. So each is looked at before anything in it is believed.
"""

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import IO


def bound(path: Path, mode: int) -> socket.socket:
    """A socket in this place, not listening yet, for those whom the mode lets in. What a forerunner left there is replaced.

    It gets its mode by itself: a umask for the time being would be that of a process which is started meanwhile.
    """
    path.unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(str(path))
        path.chmod(mode)
    except BaseException:
        found.close()
        raise
    return found


def write_private(path: Path, text: str, *, sync: bool = False) -> None:
    """Write a file that nobody else can read, whole or not at all; `sync`: it is on the disk when this returns."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)  # of a forerunner that was killed; or of somebody else, who would keep it open
    private = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(private, "w", encoding="utf-8") as file:
        file.write(text)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    fresh.replace(path)


def opened(path: Path) -> IO[str]:
    """A file to be locked, made if need be; never one to which somebody has put a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "a+", encoding="utf-8")


def taken_by(lock: IO[str], more: str = "") -> str:
    """The pid of who has this file, opened with `a+`, and what `more` it says of itself; empty if it is ours from now on, until
    it is closed.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().strip() or "unknown"
    lock.truncate(0)
    lock.write(f"{os.getpid()} {more}".strip())
    lock.flush()
    return ""


def appended(log: Path) -> IO[bytes]:
    """A log to be added to, made if need be; never what somebody's link leads to."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(log, flags, 0o640), "ab")


def made_closed(folder: Path) -> None:
    """Make a folder in which prompts and answers may lie (logs, traces, checkpoints), and those above it that are missing,
    closed to others; what the group may do, the umask says. One that is there keeps its mode: whoever made it has chosen.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o770, exist_ok=True)


def shared(folder: Path) -> str:
    """Why this is no directory that only this user can enter; empty if it is one."""
    status = folder.lstat()
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not mode & 0o077:
        return ""
    return f"{folder} is not a directory that only user {os.getuid()} can enter (owner {status.st_uid}, mode {mode:o})"


def foreign(folder: Path) -> str:
    """Why somebody else could have a say in what lies in base/job/node: the one rule for all folders of a job. Empty if nobody
    could; what is missing is passed over. The base may be a folder like `/tmp`.
    """
    base, job = folder.parents[1], folder.parent
    for each in (base, job, folder):
        if os.path.lexists(each) and (why := strange(each, crowded=each == base)):
            return why
    return ""


def unsafe(folder: Path) -> str:
    """The same, where nobody but this user may even enter the last one."""
    if why := foreign(folder):
        return f"{why}: somebody could put another {folder.name} in its place"
    return shared(folder) if os.path.lexists(folder) else ""


def strange(folder: Path, *, crowded: bool = True) -> str:
    """Who else than this user and root could put other files there, in words; empty if nobody. The group of this process may:
    mostly every user has a group of his own. `crowded`: in such as `/tmp` others may make files, and touch none but their own.

    >>> strange(Path("/"))
    ''
    """
    try:
        link, status = folder.lstat(), folder.stat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    ours = (0, os.geteuid())
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no directory"
    if link.st_uid not in ours or status.st_uid not in ours:
        return f"{folder} belongs to user {status.st_uid if link.st_uid in ours else link.st_uid}"
    if crowded and status.st_mode & stat.S_ISVTX:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"{folder} can be written to by everybody"
    if status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
        return f"{folder} can be written to by group {status.st_gid}"
    return ""
