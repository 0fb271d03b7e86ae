"""When the daemon is told what the workers do: at once if it is news, and at least every second.

The one idea: of what changes all the time only a gang's first sealed step is news, for it says that a recovery is over.
"""

import os
import time
from dataclasses import replace
from typing import Final

from elasticrl.agent.server import Server
from elasticrl.base.started import Started
from elasticrl.contract.model import MEETING, OUTSIDE, Work
from elasticrl.contract.wire import Report

REPORT_S: Final = 1.0  # the longest that a daemon hears nothing


class Reports:
    """One agent's."""

    def __init__(self) -> None:
        self.me = Started.of(os.getpid())
        self._began = (-1, 0)  # the newest generation that trains, and the step that it went on from
        self._sent: Report | None = None
        self._sent_at = 0.0

    def steps(self, report: Report) -> bool:
        """Whether its generation has sealed a step."""
        if report.work is Work.TRAINING and self._began[0] != report.generation:
            self._began = (report.generation, report.step)
        return report.work is Work.TRAINING and report.step > self._began[1]

    def steady(self, generation: int, work: Work, step: int) -> bool:
        """Whether it goes on as it did: nothing forms."""
        return work is Work.TRAINING and self._began[0] == generation and step > self._began[1]

    def send(self, server: Server | None, report: Report, *, grows: bool) -> None:
        """If it is news, or time."""
        now, begun = time.monotonic(), self._began[1]
        changed = news(report, begun, grows=grows) != news(self._sent, begun, grows=grows)
        if server and (changed or now >= self._sent_at + REPORT_S):
            self._sent, self._sent_at = report, now
            server.send(report)


def news(report: Report | None, begun: int, *, grows: bool = False) -> Report | None:
    """A report without what changes all the time. Of steps only the first that a generation seals, beyond that with which it
    has `begun`, is news: it says that a recovery is over. Where a gang `grows`, so is that it has parted.
    """
    if report is None:
        return None
    stall = replace(report.stall, for_s=0.0, budget_s=0.0) if report.stall else None
    phase = report.phase if report.phase in (OUTSIDE, *([MEETING] if grows else [])) else ""
    return replace(
        report, step=int(report.step > begun), stall=stall, pace=(), lap=None, milestone=None, phase=phase, beat_at=0.0
    )
