"""What is said to systemd, and asked of it: the notify protocol (READY, STATUS, WATCHDOG, STOPPING), and whether a SIGTERM is
meant for good. Without systemd: nothing.
"""

import os
import socket
import subprocess
from pathlib import Path

ANSWER_S = 3.0


class Notify:
    """Tells systemd how this process is."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        found = dict(os.environ) if environment is None else environment
        path = found.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        watchdog_us = int(found.get("WATCHDOG_USEC", "0") or 0)
        mine = found.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = watchdog_us / 1e6 if mine else 0.0  # 0: systemd does not watch us

    def ready(self, status: str) -> None:
        """Start-up is over."""
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def status(self, text: str) -> None:
        """What `systemctl status` shows."""
        self._send(f"STATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog."""
        self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """SIGHUP has come."""
        self._send("RELOADING=1")

    def stopping(self, text: str, within_s: float = 0.0) -> None:
        """The end has begun. It may take so long, whatever the unit's TimeoutStopSec says: the configuration decides."""
        extend = f"\nEXTEND_TIMEOUT_USEC={within_s * 1e6:.0f}" if within_s else ""
        self._send(f"STOPPING=1\nSTATUS={text}{extend}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.sendto(text.encode(), self._address)
            except OSError:
                pass  # systemd is restarting itself; the next one will arrive

    def booting(self) -> bool:
        """Has systemd started us because the machine has started, and nobody has asked for it?"""
        return bool(self._address) and said_by("systemctl", "is-system-running") in {"initializing", "starting"}

    def for_good(self) -> bool:
        """Is systemd stopping this unit, and not restarting it? Both send the same signal; its list of jobs tells."""
        unit = unit_of(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
        if not self._address or not unit:
            return False
        listed = said_by("systemctl", "list-jobs", "--plain", "--no-legend", "--no-pager")
        # If it does not say: hand over, which loses nothing.
        return any(line.split()[1:3] == [unit, "stop"] for line in listed.splitlines())


def said_by(*command: str) -> str:
    """What a command prints, whatever its exit code; nothing if it does not answer."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def unit_of(cgroups: str) -> str:
    """The unit that a process belongs to, from its /proc/PID/cgroup; empty outside of any.

    >>> unit_of("0::/system.slice/elasticrl.service")
    'elasticrl.service'
    """
    for line in cgroups.splitlines():
        for part in reversed(line.rpartition(":")[2].split("/")):
            if part.endswith(".service"):
                return part
    return ""
