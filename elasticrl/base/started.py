"""A process that a guardian starts or finds, and that may outlive it: agent, vault, etcd, engine.

The one idea: pid and birth together name one process for good. So nothing is signalled, waited for or believed that only has
its number by now. Who started it clears its corpse away whenever it is asked whether it lives.
"""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from elasticrl.base.owned import appended
from elasticrl.base.process import held_since, started_at, state
from elasticrl.base.regular import open_regular
from elasticrl.base.value import dataclass

LOOK_S: Final = 0.02
_children: dict[tuple[int, int], "subprocess.Popen[bytes]"] = {}  # those that this process started, by pid and birth
_codes: dict[tuple[int, int], int] = {}  # how those ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One process.

    Example: Started(pid=4711, born=9911823)
    """

    pid: int
    born: int  # clock ticks after boot

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has this number now; if none has, one that has ended."""
        return cls(pid=pid, born=started_at(pid))

    @property
    def alive(self) -> bool:
        """Whether this very process exists, running or stopped, or is killed and has threads that have not ended yet."""
        self._clear_away()
        return bool(self.born) and held_since(self.pid) == self.born

    @property
    def stopped(self) -> bool:
        """Whether all its threads are stopped, or there are none any more."""
        try:
            threads = [int(thread.name) for thread in Path(f"/proc/{self.pid}/task").iterdir()]
        except OSError:
            return True
        return all(state(thread) in {"T", "t", "Z", "X", ""} for thread in threads)

    @property
    def code(self) -> int | None:
        """How a child of ours ended, as Popen has it; None if that is not known, or not yet."""
        self._clear_away()
        return _codes.get((self.pid, self.born))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process, and never to another one that has its pid by now."""
        if not self.born:
            return
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    async def gone(self, within_s: float) -> bool:
        """Wait until it has ended, but no longer than this."""
        deadline = time.monotonic() + within_s
        while self.alive:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def kill(self, within_s: float) -> bool:
        """Kill it. False: it hangs in the kernel."""
        self.send(signal.SIGKILL)
        return await self.gone(within_s)

    async def end(self, within_s: float) -> bool:
        """Ask it to end, and kill it if it does not within that time. False: it hangs in the kernel."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        return await self.gone(within_s) or await self.kill(within_s)

    def _clear_away(self) -> None:
        key = self.pid, self.born
        child = _children.get(key)
        if child is not None and child.poll() is not None:
            _codes[key] = child.returncode
            _children.pop(key, None)


def start(
    command: Sequence[str], log: Path, *, env: Mapping[str, str], cwd: Path | None = None, keep: Sequence[int] = ()
) -> Started:
    """Start it in a session of its own, so that it outlives us; what it says goes to the log. `keep`: open files that it gets.
    OSError if it cannot be.
    """
    with appended(log) as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env, cwd=cwd,
            pass_fds=keep,
        )  # fmt: skip
    process = Started.of(child.pid)
    _children[process.pid, process.born] = child
    return process


def last_words(log: Path, most: int = 16 * 1024) -> str:
    """The end of what a log says, at most so many bytes; empty if it says nothing, or cannot be read."""
    with suppress(OSError), open_regular(log) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read().decode(errors="replace").strip()
    return ""


def last_line(log: Path, most: int = 500) -> str:
    """Its last line that is not empty, shortened."""
    return next((line.strip()[:most] for line in reversed(last_words(log).splitlines()) if line.strip()), "")


NOBODY: Final = Started(pid=0, born=0)
