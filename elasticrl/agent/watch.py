"""A look at this node's workers. Their beats say how they are; a script that tells nothing is looked at from outside.

The one idea: what is usual for a worker is learned here, look by look, so that what is not can be told.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Final

from elasticrl.agent import pool
from elasticrl.agent.gather import Beating, Stride, Usual, look
from elasticrl.agent.logs import Logs
from elasticrl.agent.outside import Outside, length
from elasticrl.agent.progress import NOTHING, Heard, Progress
from elasticrl.agent.spec import Spec
from elasticrl.base.process import life
from elasticrl.contract.model import UNTOLD, Facts, Lap, Pace
from elasticrl.core.node.suspect import Budgets

EVERY_S: Final = 1.0  # the shortest time in which a stride is measured, and between looks at the sizes of logs
QUIET_S: Final = 0.5  # a beat younger than this needs no look at the kernel's word


class Watch:
    """One agent's."""

    def __init__(self, spec: Spec, logs: Logs) -> None:
        self._script, self._logs = spec.script, logs
        self._usual = Usual(budgets=Budgets(settings=spec.timeouts))
        self._stride = Stride()
        self._outside = Outside()
        self._progress = Progress(spec.progress) if spec.reads else None
        self._heard: Mapping[int, Heard] = {}
        self._rotated_at = 0.0

    @property
    def pace(self) -> tuple[Pace, ...]:
        """How long a step takes each of them, phase by phase."""
        return self._stride.took

    @property
    def lap(self) -> Lap | None:
        """What a step takes them all, and what it moves."""
        return self._stride.lap

    def look(self, seated: Mapping[int, pool.Process], generation: int) -> Facts:
        """What all of them together are seen to do, in that generation."""
        now = time.monotonic()
        self._look_from_outside(now, seated.values())
        beating = [self._beating(slot, process, generation, now) for slot, process in sorted(seated.items())]
        self._usual = self._usual.learn(beating, now)
        self._stride = self._stride.after(beating, now, EVERY_S)
        return look(beating, generation, self._usual.budgets, now, time.time())

    def rotate(self, seated: Iterable[pool.Process]) -> None:
        """A log that has grown too large, once a second."""
        if (now := time.monotonic()) < self._rotated_at + EVERY_S:
            return
        self._rotated_at = now
        for process in seated:
            if self._logs.rotate(process.log):
                process.reopen()

    def _beating(self, slot: int, process: pool.Process, generation: int, now: float) -> Beating:
        beat = self._outside.since(process.pid, process.beat())
        if process.writes_elsewhere(beat):
            self._logs.show(generation)
        quiet = now - beat.since > QUIET_S
        alive = life(process.pid) if quiet and not process.finished else None
        stopped = alive is not None and alive.stopped
        heard = self._heard.get(process.pid, NOTHING)
        return Beating(
            slot=slot, beat=beat, stopped=stopped, finished=process.finished, script=self._script,
            rhythm=heard.rhythm, milestone=heard.milestone,
        )  # fmt: skip

    def _look_from_outside(self, now: float, seated: Iterable[pool.Process]) -> None:
        """At scripts that have told nothing."""
        silent = [p for p in seated if not p.finished and p.beat().phase == UNTOLD]
        found = {p.pid: (alive, length(p.log)) for p in silent if (alive := life(p.pid)) is not None}
        self._outside = self._outside.after(now, found)
        if self._progress is not None:
            self._heard = self._progress.look(now, {p.pid: p.log for p in silent})
