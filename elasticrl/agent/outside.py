"""What can be seen of a script from outside, as it says nothing itself: whether it computes, and whether it writes.

The one idea: a process that neither uses a processor nor writes a line for a long time hangs, or waits for somebody who hangs.
Its newest sign of either takes the place of a beat's time, so that all that judges beats judges this too.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from elasticrl.base.process import Life
from elasticrl.base.value import dataclass
from elasticrl.contract.beats import Snapshot
from elasticrl.contract.model import UNTOLD

#: A process uses a processor if it has used this part of one since its last sign. The threads that watch over collectives wake
#: up now and then though all else stands still: those take less.
BUSY: Final = 0.02
LOOK_S: Final = 1.0  # between two looks: the kernel counts hundredths of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One process, at its newest sign of life and at the look that is compared with."""

    since: float
    looked: float
    cpu_s: float
    written: int  # bytes of its log


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """All seated processes of a node, by pid.

    Example: Outside(seen={4711: Seen(since=812.4, looked=813.0, cpu_s=81.2, written=1024)})
    """

    seen: Mapping[int, Seen] = field(default_factory=dict)

    def after(self, now: float, lives: Mapping[int, tuple[Life, int]]) -> "Outside":
        """A later look at processes: how each is, and how long its log."""
        return Outside(seen={pid: _later(self.seen.get(pid), now, *each) for pid, each in lives.items()})

    def since(self, pid: int, beat: Snapshot) -> Snapshot:
        """This beat, of a script that has told nothing, with the time of its newest sign."""
        seen = self.seen.get(pid)
        if beat.phase != UNTOLD or seen is None:
            return beat
        return replace(beat, since=max(beat.since, seen.since))


def _later(before: Seen | None, now: float, life: Life, written: int) -> Seen:
    if before is None:
        return Seen(since=now, looked=now, cpu_s=life.cpu_s, written=written)
    if written != before.written:
        return Seen(since=now, looked=now, cpu_s=life.cpu_s, written=written)
    if now < before.looked + LOOK_S:
        return before
    busy = life.cpu_s - before.cpu_s > BUSY * (now - before.looked)
    since = now if busy and not life.stopped else before.since
    return replace(before, since=since, looked=now, cpu_s=life.cpu_s)


def length(log: Path) -> int:
    """Bytes of a log; 0 where there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
