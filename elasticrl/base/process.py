"""What the kernel says of a process, from /proc/PID/stat.

The one idea: a pid alone may be somebody else's by now; with the moment of its start it names one process.
"""

import os
from typing import Final

from elasticrl.base.value import dataclass

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_EXITING: Final = 0x4  # PF_EXITING of the kernel's flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A process that has not ended.

    Example: Life(pid=4711, started=9911823, stopped=False, cpu_s=81.2, memory=412_000_000)
    """

    pid: int
    started: int  # clock ticks after boot
    stopped: bool
    cpu_s: float  # all its threads, user and system
    memory: int  # resident bytes


def life(pid: int) -> Life | None:
    """How it is; None if the process is gone, a zombie included."""
    fields = _stat(pid)
    if not fields or fields[0] in "ZX":
        return None
    return Life(
        pid=pid, started=int(fields[19]), stopped=fields[0] in "Tt",
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS, memory=int(fields[21]) * _PAGE,
    )  # fmt: skip


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it does not run."""
    now = life(pid)
    return now.started if now else 0


def held_since(pid: int) -> int:
    """The same, but a process that was killed counts until its last thread has ended: it keeps its ports and files so long."""
    fields = _stat(pid)
    ended = not fields or fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) < 2)  # field 17: how many threads
    return 0 if ended else int(fields[19])


def killed_by(pid: int) -> int:
    """The signal that is ending a process just now; 0: none is. The kernel frees a process's memory, a second for some ten
    gigabytes, before it closes its files or says that it has ended.
    """
    fields = _stat(pid)
    return int(fields[49]) & 0x7F if len(fields) > 49 and int(fields[6]) & _EXITING else 0


def state(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T, t, Z; "" if there is none."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """The fields from the state on, [] if there is no such process. The name before may hold blanks and brackets."""
    try:
        file = os.open(
            f"/proc/{pid}/stat", os.O_RDONLY
        )  # ten times a second for each worker: pathlib takes thrice as long
    except OSError:
        return []
    try:
        text = os.read(file, 4096).decode(errors="replace")
    except OSError:  # it has died since
        return []
    finally:
        os.close(file)
    return text.rpartition(")")[2].split()
