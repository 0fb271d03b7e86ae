"""What a program and all that it starts take of processors and memory, looked at from outside.

The idea: one thread looks at all descendants of this process now and then. On a machine that others use too, processor seconds
say more than the clock. Peak memory is each process's own (VmHWM), which the kernel keeps.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import Self

LOOK_S = 0.1
TICK = os.sysconf("SC_CLK_TCK")


class Processes:
    """`with Processes() as seen:` what all descendants of this process take meanwhile."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._used: list[float] = []
        self._of: dict[int, float] = {}  # processor seconds, also of those that have ended
        self.peaks: dict[int, float] = {}  # MiB
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def largest(self) -> float:
        """MiB of the largest process."""
        return max(self.peaks.values(), default=0.0)

    def used(self, at: float) -> float:
        """Processor seconds until then, by the wall clock."""
        i = bisect_left(self._times, at)
        if not 0 < i < len(self._times):
            return self._used[min(i, len(self._used) - 1)]
        share = (at - self._times[i - 1]) / (self._times[i] - self._times[i - 1])
        return self._used[i - 1] + share * (self._used[i] - self._used[i - 1])

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            for pid in descendants(os.getpid()):
                with suppress(OSError, IndexError, StopIteration):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    self._of[pid] = (int(fields[11]) + int(fields[12])) / TICK
                    peak = next(line for line in status if line.startswith("VmHWM"))
                    self.peaks[pid] = int(peak.split()[1]) / 1024
            self._times.append(time.time())
            self._used.append(sum(self._of.values()))


def descendants(pid: int) -> list[int]:
    """All of them."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found[1:]
