"""Workers that a signal is ending, seen before the kernel says so.

The one idea: the kernel first frees a dead process's memory, then closes its connections, and only then tells its parent. For a
process of 40 gigabytes that is seconds in which its gang waits for it. What it is about to do, /proc shows at once.
"""

import time
from collections.abc import Iterable
from typing import Final

from elasticrl.agent import pool
from elasticrl.base.process import killed_by, life

LARGE: Final = 512 << 20  # resident bytes; less than this is freed sooner than anybody could look
LOOK_S: Final = 0.05  # between looks at large ones
MEASURE_S: Final = 1.0  # and between looks at how large they are


class Dying:
    """One agent's look at its seated processes."""

    def __init__(self) -> None:
        self._large = False
        self._measured_at = -MEASURE_S

    def pause_s(self, running: Iterable[pool.Process]) -> float:
        """How long until the next look."""
        if (now := time.monotonic()) >= self._measured_at + MEASURE_S:
            self._measured_at = now
            self._large = any((alive := life(process.pid)) and alive.memory > LARGE for process in running)
        return LOOK_S if self._large else MEASURE_S

    def look(self, running: Iterable[pool.Process]) -> list[tuple[pool.Process, int]]:
        """Those that are ending, and by which signal."""
        return [(process, sign) for process in running if not process.finished and (sign := killed_by(process.pid))]
