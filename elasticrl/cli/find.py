"""Where the daemons of this machine are: their control sockets, `<run_dir>/<job>/<node>/control.sock`."""

import os
import shlex
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from elasticrl.base.address import CONTROL
from elasticrl.base.owned import shared, strange
from elasticrl.base.parsed import instant, parsed
from elasticrl.base.process import state
from elasticrl.base.regular import read_regular
from elasticrl.base.words import ago

STOPPED: Final = {"T", "t"}  # what the kernel calls a process that somebody has stopped
CREDENTIALS: Final = struct.Struct("3i")  # process, user, group
RUN_LOCK: Final = "run.lock"  # in a job's folder: held by the `elasticrl run` that plays it
ENDED: Final = "ended.json"  # in a job's folder: how `elasticrl run` of it ended, as long as it is not begun again


class NotFound(Exception):
    """No daemon fits, or several do; the message says what to do. `note`: how the job ended that was asked for, if it has."""

    def __init__(self, said: str, note: Mapping[str, Any] | None = None) -> None:
        super().__init__(said)
        self.note: Mapping[str, Any] = note or {}


class NotOurs(Exception):
    """A folder that others can change; the message says which, and what to do."""


def made_private(folder: Path) -> Path:
    """The folder, made if need be; refused unless it is this user's alone. Who can write there can say what our agents run."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        why = shared(folder)
    except OSError as error:
        raise NotOurs(
            f"{folder} cannot be made ({error.strerror}). Set XDG_RUNTIME_DIR to a directory of your own, or unset it."
        ) from None
    if why:
        raise NotOurs(f"{why}. Remove it, or set XDG_RUNTIME_DIR to a directory of your own.")
    return folder


def private_run_dir() -> Path:
    """Where a foreground run keeps its sockets: short (a socket's path may have 107 bytes) and its user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "elasticrl" if runtime else Path(f"/tmp/elasticrl-{os.getuid()}")  # noqa: S108 - made 0700 by its user


def run_dirs(explicit: Path | None = None) -> tuple[Path, ...]:
    """Where to look."""
    if explicit is not None:
        return (explicit,)
    named = os.environ.get("ELASTICRL_RUN_DIR")
    return (Path(named),) if named else (Path("/run/elasticrl"), private_run_dir())


def sockets(explicit: Path | None = None, job: str | None = None, node: str | None = None) -> tuple[Path, ...]:
    """All control sockets that fit."""
    pattern = f"{job or '*'}/{node or '*'}/{CONTROL}"
    return tuple(sorted(within(explicit, pattern)))


def within(explicit: Path | None, pattern: str) -> list[Path]:
    """What fits below the folders in which to look, but for those that others could put something into."""
    found: list[Path] = []
    for folder in run_dirs(explicit):
        with suppress(OSError):  # XDG_RUNTIME_DIR may be another user's, as after `su`
            # /tmp is open to all: whoever was first would answer.
            if folder != private_run_dir() or not strange(folder):
                found += folder.glob(pattern)
    return found


def daemon(explicit: Path | None = None, job: str | None = None, node: str | None = None) -> Path:
    """The socket to ask: the only one, else this host's, else the first of a single job's (all show the same job)."""
    return daemons(explicit, job, node)[0]


def daemons(explicit: Path | None = None, job: str | None = None, node: str | None = None) -> list[Path]:
    """The same, and after it those of the others that show the same job. Whose process is stopped would not answer."""
    found = sockets(explicit, job, node)
    if not found and (closed := [folder for folder in run_dirs(explicit) if shut(folder)]):
        raise NotFound(f"{why_shut(closed[0])}; or ask the store: --store HOST:PORT")
    pids = {path: listener(path) for path in found}
    silent = [path for path in found if pids[path] is None]
    living = [path for path in found if path not in silent]
    if not living:
        raise nobody(explicit, job, found)
    jobs = jobs_of(living)
    if len(jobs) > 1:
        raise NotFound(f"several jobs run here ({', '.join(jobs)}); say which: --job {jobs[0]}")
    able = [path for path in living if state(pids[path] or 0) not in STOPPED]
    if not able:
        name, pid = living[0].parent.name, pids[living[0]]
        raise NotFound(
            f"the daemon of {name} is stopped (process {pid}, by SIGSTOP or a debugger), so it cannot answer. Let it go on: "
            f"kill -CONT {pid}; or ask the store: --store HOST:PORT"
        )
    return sorted(able, key=lambda path: path.parent.name != socket.gethostname())


def nobody(explicit: Path | None, job: str | None, silent: Sequence[Path]) -> NotFound:
    """That nobody is there to be asked, whom else one may mean, and what became of a job that has ended."""
    playing, note = played(explicit, job), ended(explicit, job)
    if job and playing:
        return NotFound(f"`elasticrl run` of {job} has just begun, or is ending: ask again in some seconds")
    others = jobs_of(path for path in sockets(explicit) if not left_behind(path))
    over, report = (told(note), report_of(note)) if note else ("", "elasticrl report RUN")
    if job and others:
        none = over or f"no daemon of the job {job} is here"
        here = f"{none}; jobs that run here: {', '.join(others)}"
        return NotFound(here, note) if over else NotFound(f"{here}. Say which: --job {others[0]}")
    if job and over:
        return NotFound(f"{over}. More: {report}, {incidents_of(note)}", note)
    if playing:
        return NotFound(
            f"`elasticrl run` of {', '.join(playing)} has just begun, or is ending: ask again in some seconds"
        )
    whose = ", ".join(sorted(path.parent.name for path in silent))
    of = f"of the job {job} " if job else ""
    none = (
        f"no daemon of {' or '.join(jobs_of(silent))} answers here (what is left are sockets of {whose})"
        if whose
        else f"no daemon {of}here (looked in {', '.join(map(str, run_dirs(explicit)))})"
    )
    begin = "start it (systemctl start elasticrl, or elasticrl run FILE), or ask the store: --store HOST:PORT"
    if over:
        return NotFound(f"{over}. More: {report}, {incidents_of(note)}. Now there is {none}; {begin}")
    return NotFound(f"{none}; {begin}. What became of a job that has ended: {report}")


def played(explicit: Path | None, job: str | None) -> list[str]:
    """Jobs that an `elasticrl run` of this machine plays, by the locks that are held."""
    held, names = set[str](), []
    with suppress(OSError):
        held.update(Path("/proc/locks").read_text(encoding="utf-8").split())
    for file in within(explicit, f"{job or '*'}/{RUN_LOCK}"):
        with suppress(OSError):
            status = file.stat()
            if f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}" in held:
                names.append(file.parent.name)
    return sorted(names)


def ended(explicit: Path | None, job: str | None) -> Mapping[str, Any]:
    """How this user's `elasticrl run` of the job ended, or the newest of all; empty: none has said."""
    notes: list[Mapping[str, Any]] = []
    for path in within(explicit, f"{job or '*'}/{ENDED}"):
        with suppress(OSError, ValueError, LookupError, TypeError):  # gone meanwhile, or another version's
            note = parsed(read_regular(path))
            told(note), report_of(note)  # whether it has all that they want
            notes.append(note)
    return max(notes, key=lambda note: instant(note["at"]), default={})


def told(note: Mapping[str, Any]) -> str:
    """What a run says of its end."""
    on = "" if note["state"] == "FINISHED" else "; the same command goes on from there"
    return (
        f"job {note['job']} ended {ago(max(0.0, time.time() - instant(note['at'])))} ago at step {note['step']:,} "
        f"(committed {note['committed']:,}): {note['reason']}{on}"
    )


def report_of(note: Mapping[str, Any]) -> str:
    """The command that tells what happened in it."""
    left = Path(str(note["left"]))
    if len(left.parts) < 3:  # state and logs lie apart, as a system's do
        return "elasticrl report RUN"
    return f"elasticrl report {shlex.quote(str(near(left)))} --job {note['job']}"


def incidents_of(note: Mapping[str, Any]) -> str:
    """The command that lists what went wrong in it."""
    kept = near(Path(str(note.get("state_dir", ""))))
    usual = kept in {Path(), Path("run/state")}  # where it looks by itself
    return "elasticrl incidents" + ("" if usual else f" --state-dir {shlex.quote(str(kept))}")


def near(path: Path) -> Path:
    """As it is written where we are."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def jobs_of(sockets: Iterable[Path]) -> list[str]:
    """Whose they are."""
    return sorted({path.parent.parent.name for path in sockets})


def shut(folder: Path) -> bool:
    """There, and not ours to look into: what is in it looks like nothing."""
    try:
        return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True)
    except OSError:  # nor what is above it
        return False


def why_shut(folder: Path) -> str:
    """In words, and what to do."""
    group = group_of(folder)
    return f"{folder} is closed to this user: it is open to the group {group} (usermod -aG, then log in anew)"


def group_of(folder: Path) -> str:
    """Its group's name, or number where it has none."""
    try:
        return folder.group()
    except KeyError:
        return str(folder.stat().st_gid)


def left_behind(path: Path) -> bool:
    """Does nobody listen there? A killed daemon leaves its socket."""
    return listener(path) is None


def listener(path: Path) -> int | None:
    """The process that listens there, as the kernel knows it; 0 if that cannot be seen, None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
            whose = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError:  # whoever asks it says why
            return 0
    return int(CREDENTIALS.unpack(whose)[0])
