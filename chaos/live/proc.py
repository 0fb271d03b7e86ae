"""What the kernel says of this host's processes: who there is, whose they are, and with what each was started.

The one idea: whoever may be dead is not asked himself; of one that is gone the kernel says nothing, and so does this. Whether a
process is stopped, and since when it runs, is read as the daemon reads it.
"""

from pathlib import Path

from elasticrl.base.process import life, state


def all_pids() -> list[int]:
    """Every process of the host."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def alive(pid: int) -> bool:
    """Does it run, or stand still?"""
    return life(pid) is not None


def stopped(pid: int) -> bool:
    """Was it stopped by a signal?"""
    return state(pid) == "T"


def parent(pid: int) -> int:
    """Its parent's number; 0 if it is gone."""
    return int(_status(pid, "PPid") or 0)


def inner_pid(pid: int) -> int:
    """Its number in the innermost process namespace; 0 if it is gone."""
    return int(_status(pid, "NSpid").rpartition("\t")[2] or 0)


def words(pid: int) -> list[str]:
    """Its command line, word by word; empty if it is gone."""
    return _list(pid, "cmdline")


def command_line(pid: int) -> str:
    """The same as one line."""
    return " ".join(words(pid)).strip()


def environment(pid: int) -> list[str]:
    """As it was started, NAME=value; empty if it is gone."""
    return _list(pid, "environ")


def _status(pid: int, name: str) -> str:
    """One line of what the kernel says of it in words."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(f"{name}:")), "")


def _list(pid: int, name: str) -> list[str]:
    """A file in which each word ends with a zero."""
    try:
        text = Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.removesuffix("\0").split("\0") if text else []
