"""systemd's notify protocol: READY, STATUS, WATCHDOG and STOPPING, as datagrams to the socket it names. Without it: nothing."""

import os
import socket


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

    def stopping(self, text: str) -> None:
        """The end has begun."""
        self._send(f"STOPPING=1\nSTATUS={text}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.sendto(text.encode(), self._address)
            except OSError:
                pass  # systemd is restarting itself; the next one will arrive
