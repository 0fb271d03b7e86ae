"""Where each millisecond of a recovery goes, as this node saw it: detect, decide, reform, restore, first step.

It begins with the first sign of trouble here. A sign that is a silence tells how long it had lasted: that is detect. A worker's
death and a broken connection are signs that the kernel gives at once: their detect is 0.

The one idea: the stages are marked by things that happen anyway (a sign of trouble, a plan, workers joining, a sealed step), so
measuring costs nothing and cannot disagree with what was done.
"""

import re
from dataclasses import replace

from elasticrl.core.events import Event, Seen, Suspected, Workers
from elasticrl.core.model import Member, Phase, Plan, Work
from elasticrl.core.value import dataclass

TROUBLE = frozenset({Work.FAILED, Work.PARKED, Work.STALLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A recovery that is over.

    Example: Done(generation=15, rung="reform", total_s=0.21, stages={"detect": 0.0, "decide": 0.02, ...})
    """

    generation: int
    rung: str
    total_s: float
    stages: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The marks of the recovery that is going on, if one is."""

    sign_at: float | None = None  # first sign of trouble here
    detect_s: float = 0.0  # how long there had been nothing to see or hear by then
    plan: Plan | None = None  # that answers it
    plan_at: float = 0.0
    joined_at: float | None = None  # the workers are through their first collective, and have their state
    restore_s: float = 0.0  # how long the slowest of them took to put it back
    step: int = 0  # newest sealed when they were

    def after(self, event: Event, plan: Plan | None, me: Member) -> tuple["Watch", Done | None]:
        """The marks after this event, and the recovery that it ended, if it did. What others recover from without us is not
        ours to time, nor is our own way in.
        """
        now = event.now
        match event:
            case Workers(work=work, stall=stall) if (work in TROUBLE or stall) and self.sign_at is None:
                return replace(self, sign_at=now, detect_s=stall.for_s if stall else 0.0), None
            case Suspected(silent_s=silent_s) if self.sign_at is None:
                return replace(self, sign_at=now, detect_s=silent_s), None
            case Seen() if plan is not None and (self.plan is None or plan.generation > self.plan.generation):
                seated = me in plan.seat_of
                answers = seated and plan.phase is Phase.TRAIN and (plan.rung > 0 or self.sign_at is not None)
                sign_at = (self.sign_at if self.sign_at is not None else now) if answers else None
                return Watch(
                    sign_at=sign_at, detect_s=self.detect_s if self.sign_at else 0.0, plan=plan, plan_at=now
                ), None
            case Workers() if self._joined(event) and self.sign_at is not None and self.sign_at > self.plan_at:
                return replace(
                    self, sign_at=None
                ), None  # an effect of the plan, such as the parting of a gang that grows
            case Workers() if self._joined(event):
                return replace(self, joined_at=now, restore_s=event.restore_s, step=event.step), None
            case Workers(step=step) if self.sign_at is not None and self.joined_at is not None and step > self.step:
                return replace(self, sign_at=None, joined_at=None), self._done(now)
        return self, None

    def _joined(self, workers: Workers) -> bool:
        if self.sign_at is None or self.joined_at is not None or self.plan is None:
            return False
        well = workers.work is Work.TRAINING and workers.stall is None
        return well and workers.generation == self.plan.generation

    def _done(self, now: float) -> Done:
        assert self.plan is not None
        assert self.sign_at is not None
        assert self.joined_at is not None
        restore_s = min(self.restore_s, self.joined_at - self.plan_at)
        stages = {
            "detect": self.detect_s,
            "decide": self.plan_at - self.sign_at,
            "reform": self.joined_at - self.plan_at - restore_s,
            "restore": restore_s,
            "first_step": now - self.joined_at,
        }
        rung = self.plan.rung.name.lower()
        return Done(generation=self.plan.generation, rung=rung, total_s=sum(stages.values()), stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How much of the time since this node's workers first trained they have trained.

    Example: Goodput(work=Work.TRAINING, at=60.0, since=10.0, trained_s=48.5).share == 0.97
    """

    work: Work = Work.NONE
    at: float = 0.0
    since: float | None = None  # when they first trained
    trained_s: float = 0.0

    def after(self, work: Work, now: float) -> "Goodput":
        """A moment later. Time counts by what they were doing before it."""
        if self.since is None:
            return replace(self, work=work, at=now, since=now) if work is Work.TRAINING else self
        more_s = now - self.at if self.work is Work.TRAINING else 0.0
        return replace(self, work=work, at=now, trained_s=self.trained_s + more_s)

    @property
    def share(self) -> float:
        """Of the time; 0 before they have trained."""
        return self.trained_s / (self.at - self.since) if self.since is not None and self.at > self.since else 0.0


def kind_of(cause: str) -> str:
    """A cause of an exit without what differs each time, for a metric's label.

    >>> kind_of("exit code 1: ValueError: bad prompt")
    'exit code 1'
    >>> kind_of("stopped in update for 3.0 s (budget 2.0 s)")
    'stopped in update'
    >>> kind_of("signal 9 (SIGKILL)")
    'signal 9'
    """
    return re.split(r":| \(| for |; ", cause, maxsplit=1)[0][:60] or "unknown"
