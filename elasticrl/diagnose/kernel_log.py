"""The kernel's log: all that is there, and what comes from now on.

The one idea: an open descriptor of /dev/kmsg is a place in the kernel's ring, one record a read. So whoever watches it keeps it
open and pays for new records only. Who may not open it asks the journal, from the cursor on that it gave with its last answer.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
LIMIT: Final = 1 << 20  # bytes of the newest log that are read at once
ASK_S: Final = 5.0  # until the journal has answered
_JOURNAL: Final = ("--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet")
_CURSOR: Final = "-- cursor: "


class Ring:
    """The kernel's ring, from its beginning or from now on. OSError where this user may not read it."""

    def __init__(self, root: Path = ROOT, *, news: bool) -> None:
        self._handle = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if news:
            os.lseek(self._handle, 0, os.SEEK_END)

    def records(self) -> Iterator[str]:
        """What has come since the last time, as the kernel writes it: numbers, a semicolon, words."""
        size = 0
        while size < LIMIT:
            try:
                record = os.read(self._handle, 8192)
            except BrokenPipeError:
                continue  # the kernel overwrote what was not read yet
            except OSError:  # that was the newest
                return
            if not record:
                return
            size += len(record)
            yield record.decode(errors="replace")

    def close(self) -> None:
        """Let go of it."""
        os.close(self._handle)


class Watch:
    """What the kernel says from now on."""

    REMEDY: Final = (
        "the kernel log cannot be read, so GPUs' errors, OOM kills and broken disks are known by their effects only: "
        "add the user to the group systemd-journal"
    )

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._ring: Ring | None = None
        self._cursor = ""
        try:
            self._ring = Ring(root, news=True)
        except OSError:
            self._cursor = _ask(root, "--lines=0")[1]

    @property
    def deaf(self) -> bool:
        """Neither ring nor journal has answered: it is tried again with each reading."""
        return self._ring is None and not self._cursor

    def read(self) -> str:
        """What is new, as dmesg prints it; "" too where this user may read neither ring nor journal."""
        if self._ring is not None:
            return dmesg("".join(self._ring.records()))
        if not self._cursor:
            self._cursor = _ask(self._root, "--lines=0")[1]
            return ""
        text, cursor = _ask(self._root, f"--after-cursor={self._cursor}")
        self._cursor = cursor or self._cursor
        return text


def whole(root: Path = ROOT) -> tuple[str, str]:
    """The log as dmesg prints it, and where it came from; or "" and why there is none."""
    text, _ = _ask(root, "--lines=5000")
    if text:
        return text, "journal"
    try:
        ring = Ring(root, news=False)
    except OSError as error:
        return "", f"the kernel log cannot be read ({error.strerror}); add the user to the group systemd-journal"
    try:
        return dmesg("".join(ring.records())), "kmsg"
    finally:
        ring.close()


def _ask(root: Path, *what: str) -> tuple[str, str]:
    """What the journal below a root has of the kernel, and the cursor behind it."""
    journal = shutil.which("journalctl")
    if journal is None:
        return "", ""
    try:
        where = () if root == ROOT else (f"--root={root}",)
        done = subprocess.run([journal, *where, *_JOURNAL, "--show-cursor", *what], capture_output=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    lines = done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []
    cursor = lines.pop().removeprefix(_CURSOR) if lines and lines[-1].startswith(_CURSOR) else ""
    return "\n".join(lines).strip(), cursor


def killed_pid(line: str) -> int | None:
    """The process that a line says was killed for want of memory.

    >>> killed_pid("Out of memory: Killed process 7 (python) anon-rss:9kB")
    7
    """
    found = re.search(r"[Kk]illed process (\d+)", line)
    return int(found[1]) if found else None


def dmesg(text: str) -> str:
    """Records of /dev/kmsg as dmesg prints them.

    >>> dmesg("6,339,5140900,-;NVRM: Xid (PCI:0000:44:00): 79")
    '[    5.140900] NVRM: Xid (PCI:0000:44:00): 79'
    """
    lines = []
    for line in text.splitlines():
        head, semicolon, message = line.partition(";")
        fields = head.split(",")
        if semicolon and len(fields) >= 3 and fields[2].isdigit():
            micros = int(fields[2])
            lines.append(f"[{micros // 1_000_000:5}.{micros % 1_000_000:06}] {message}")
    return "\n".join(lines)
