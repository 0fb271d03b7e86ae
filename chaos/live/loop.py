"""A node without namespaces: processes on a loopback address of their own, told apart by a mark in their environment.

The one idea: it answers the same questions as a box, so the same strikes work on it; what needs a cable, a kernel or a disk of
its own is left out, and said so.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.live.box import Box
from chaos.live.proc import alive, all_pids, environment
from elasticrl.base.process import started_at
from elasticrl.store.embedded import tied

MARK = "ELASTICRL_CHAOS_BOX"


class LoopBox(Box):
    """A box that is not one."""

    def __init__(self, name: str, *, address: str, wire: str, folder: Path) -> None:
        super().__init__(name, address=address, wire=wire, bridge="", log=folder / f"{name}.box.log")
        self.folder = folder / f"{name}.files"
        self._on = False

    @property
    def on(self) -> bool:
        """Is it powered?"""
        return self._on

    def boot(self) -> None:
        """There is nothing to boot."""
        self.folder.mkdir(exist_ok=True)
        self._on = True

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start something with its mark."""
        # As a box's PID 1 dies with the driver, each process here does: nothing stays behind a driver that is killed.
        return self._launch(tied(command), log, {**(env or {}), MARK: self.wire})

    def path(self, inner: str) -> Path:
        """Its files lie in a folder of the lab."""
        return self.folder / inner.lstrip("/")

    def inner(self, path: str) -> str:
        """Where its own processes find one of its files."""
        return str(self.path(path))

    def pids(self) -> list[int]:
        """All processes that carry its mark."""
        mark = f"{MARK}={self.wire}"
        mine = (pid for pid in all_pids() if mark in environment(pid) and alive(pid))
        return sorted(mine, key=lambda pid: (started_at(pid), pid))

    def host_pid(self, inner: int) -> int:
        """There is but one count."""
        return inner if inner in self.pids() else 0

    def kill(self) -> None:
        """All its processes are gone."""
        deadline = time.monotonic() + 10.0
        while (left := self.pids()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._reap()
        self._on = False

    def unfreeze(self) -> None:
        """It cannot be frozen."""
