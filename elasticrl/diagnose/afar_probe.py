"""What is sent to another machine over ssh and run there: it looks at the ranks of a job and prints what it saw, as JSON.

The one idea: that machine may have nothing of ours. So this file needs Python 3.7 and its standard library, reads /proc and the
kernel's log, asks py-spy for stacks where there is one, changes nothing, and decides nothing: `afar` reads what it prints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Tuple  # noqa: UP035 - Python 3.7 has no others

SPY_S = 3.0  # until py-spy has answered
KERNEL = 200_000  # bytes of the kernel's log
MOST = 64  # processes that are looked at
Found = Dict[str, Any]  # noqa: UP006 - as above


def processes(wanted: Iterable[str], root: Path = Path("/proc")) -> List[Found]:  # noqa: UP006
    """All processes that this user may read: pid, parent, and what was wanted of the environment they were started with."""
    names = frozenset(wanted)
    found = []
    for folder in root.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            raw = (folder / "environ").read_bytes()
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it has ended, or is another user's
            continue
        rows = (row.decode(errors="replace").partition("=") for row in raw.split(b"\0"))
        env = {name: value for name, _, value in rows if name in names}
        found.append({"pid": int(folder.name), "parent": parent, "env": env})
    return found


def ranks(found: Sequence[Found], names: Iterable[str]) -> List[int]:  # noqa: UP006
    """The processes that may be ranks, by any launcher's name for them: of a rank and its children the topmost."""
    chosen: Dict[int, None] = {}  # noqa: UP006
    for name in names:
        said = {one["pid"]: one["env"][name] for one in found if one["env"].get(name, "").isdigit()}
        chosen.update(
            {one["pid"]: None for one in found if one["pid"] in said and said.get(one["parent"]) != said[one["pid"]]}
        )
    return list(chosen)[:MOST]


def look(pid: int, spy: str) -> Found:
    """The kernel's letter for a process, what it waits in if that is in the kernel, and py-spy's view of its threads."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return {"state": ""}
    told: Found = {"state": state}
    if state == "D":
        try:
            told["wchan"] = Path(f"/proc/{pid}/wchan").read_text(errors="replace")
        except OSError:
            told["wchan"] = ""
    elif spy and state not in "ZX":
        try:
            done = subprocess.run(
                [spy, "dump", "--pid", str(pid), "--nonblocking", "--json"], timeout=SPY_S, capture_output=True
            )
            told["threads"] = json.loads(done.stdout) if done.returncode == 0 else []
        except (OSError, ValueError, subprocess.TimeoutExpired):
            told["threads"] = []
    return told


def kernel_log() -> str:
    """The newest of the kernel's log, with the seconds since the machine's start; "" where this user may not read it."""
    for command in (
        ["journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet", "--lines=2000"],
        ["dmesg"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, timeout=SPY_S)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout[-KERNEL:].decode(errors="replace")
    return ""


def started_s(pid: int) -> float:
    """When a process started, in seconds after the machine did; 0 if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def main(order: Found) -> None:
    """Look as often as was ordered, and print it."""
    signal.alarm(int(order["within_s"]) + 1)  # whoever asked may be gone: nothing of this stays
    beside = Path(sys.executable).with_name("py-spy")
    spy = shutil.which("py-spy") or (str(beside) if os.access(str(beside), os.X_OK) else "")
    found = processes(order["wanted"])
    pids = ranks(found, order["names"])
    looks: List[Dict[str, Found]] = []  # noqa: UP006
    with ThreadPoolExecutor(max(1, min(8, len(pids)))) as pool:
        for number in range(order["looks"] if pids else 0):
            if number:
                time.sleep(order["apart_s"])
            taken: List[Tuple[int, Found]] = list(zip(pids, pool.map(lambda pid: look(pid, spy), pids)))  # noqa: UP006, B905
            looks.append({str(pid): told for pid, told in taken})
    started = {str(pid): started_s(pid) for pid in pids}
    json.dump({"seen": found, "looks": looks, "started": started, "kernel": kernel_log(), "spy": bool(spy)}, sys.stdout)
    sys.stdout.flush()
