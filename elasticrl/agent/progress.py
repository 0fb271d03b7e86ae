"""The logs of scripts that tell nothing else, read for how far they are.

The one idea: a look reads what a log has gained, now and then and of much only the newest, and remembers when it last told of
progress: that is another thing than when it was last written to.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elasticrl.base.value import dataclass as value
from elasticrl.contract.model import Milestone
from elasticrl.core.node.suspect import Rhythm
from elasticrl.diagnose.progress import Reader, given
from elasticrl.diagnose.tail import Growing

LOOK_S: Final = 0.5  # between two looks at a log


@value(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a process's log has told.

    Example: Heard(rhythm=Rhythm(newest=812.4), milestone=Milestone(unit="step", at=120, of=500))
    """

    rhythm: Rhythm | None = None  # None: no line of progress yet
    milestone: Milestone | None = None


NOTHING: Final = Heard()


@dataclass(slots=True)
class _Log:
    growing: Growing
    reader: Reader
    looked: float
    heard: Heard = NOTHING


class Progress:
    """All seated processes of a node, by pid. `expression`: an operator's, in place of the table."""

    def __init__(self, expression: str) -> None:
        self._rows = given(expression)
        self._logs: dict[int, _Log] = {}

    def look(self, now: float, paths: Mapping[int, Path]) -> Mapping[int, Heard]:
        """At the logs of these processes, and of no others."""
        for pid in self._logs.keys() - paths:
            self._logs.pop(pid).growing.close()
        for pid, path in paths.items():
            self._look(pid, path, now)
        return {pid: log.heard for pid, log in self._logs.items()}

    def _look(self, pid: int, path: Path, now: float) -> None:
        log = self._logs.get(pid)
        if log is None or log.growing.path != path:  # it has its rank since, and writes elsewhere
            if log is not None:
                log.growing.close()
            self._logs[pid] = log = _Log(Growing(path), Reader(rows=self._rows), now - LOOK_S)
        if now < log.looked + LOOK_S:
            return
        log.looked = now
        before = log.reader
        log.reader = before.after(log.growing.gained())
        if log.reader.moves > before.moves:
            log.heard = after(log.heard, log.reader.milestone, now, time.time())


def after(heard: Heard, milestone: Milestone | None, now: float, wall: float) -> Heard:
    """Its log has told of progress, and of this milestone."""
    mark = int(milestone.at) if milestone else 0
    rhythm = heard.rhythm.at(now, mark) if heard.rhythm else Rhythm(newest=now, mark=mark)
    return Heard(rhythm=rhythm, milestone=replace(milestone, read=round(wall, 1)) if milestone else None)
