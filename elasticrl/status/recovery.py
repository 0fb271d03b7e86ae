"""Where each millisecond of a recovery goes, as this node saw it: detect, decide, reform, restore, first step.

It begins with the first sign of trouble here. A sign that is a silence tells how long it had lasted: that is detect. So does
the last step's line, where steps had ceased before there was a sign: what befell another node may show here as nothing else.
A worker's death and a broken connection are signs that the kernel gives at once: their detect is 0.

The one idea: the stages are marked by things that happen anyway (a sign of trouble, a plan, workers joining, a sealed step), so
measuring costs nothing and cannot disagree with what was done.
"""

from dataclasses import replace
from statistics import median

from elasticrl.base.goodput import goodput
from elasticrl.base.value import dataclass
from elasticrl.contract.events import Event, Seen, Suspected, Workers
from elasticrl.contract.evidence import of_exit
from elasticrl.contract.level import RUNTIME, Means
from elasticrl.contract.model import Exit, Member, Milestone, Phase, Plan, Work

FLOW_OF = 16  # lines by which it is known how often one comes
USUAL_OF = 100  # lines: minutes of long steps, a third of a minute of short ones
TROUBLE = frozenset({Work.FAILED, Work.PARKED, Work.STALLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A recovery that is over.

    Example: Done(generation=15, rung="reform", total_s=0.21, stages={"detect": 0.0, "decide": 0.02, ...})
    """

    generation: int
    broke: int = 0  # the generation in which there was the first sign
    rung: str
    total_s: float
    stages: dict[str, float]
    lost: int | None = None  # steps that were sealed before and are made again; None: not known
    silence: bool = False  # its first sign here was a neighbour's silence, which few notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """When the workers here last told of a step, and how long they take to tell of one, of late and in one generation.

    Example: Flow(at=12.0, generation=14, gaps=(0.2, 0.25)).still(13.5, plan_14) == 1.25
    """

    at: float | None = None
    generation: int = 0
    gaps: tuple[float, ...] = ()

    def after(self, generation: int, now: float) -> "Flow":
        """A line has come."""
        if self.at is None or generation != self.generation:
            return Flow(at=now, generation=generation)
        return replace(self, at=now, gaps=(*self.gaps[1 - FLOW_OF :], now - self.at))

    def still(self, now: float, plan: Plan | None) -> float:
        """For how long one has been overdue: the longest of the usual times is not counted, as it may be a long step. 0 where
        they ceased in a gang before this plan's: that was a pause, or a hold.
        """
        if self.at is None or not self.gaps or not (plan is None or plan.grows or self.generation >= plan.generation):
            return 0.0
        return max(0.0, now - self.at - max(self.gaps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The marks of the recovery that is going on, if one is."""

    sign_at: float | None = None  # first sign of trouble here
    broke: int = 0  # as Done's
    detect_s: float = 0.0  # how long there had been nothing to see or hear by then
    silence: bool = False  # as Done's
    plan: Plan | None = None  # that answers it
    plan_at: float = 0.0
    grown: Plan | None = None  # the newest one, which only adds to the gang of that one
    joined_at: float | None = None  # the workers are through their first collective, and have their state
    restore_s: float = 0.0  # how long the slowest of them took to put it back
    step: int = 0  # newest sealed when they were
    newest: int = 0  # step that the workers here have known to be sealed
    lost: int | None = None  # of those, what they did not go on from, since the sign
    paused: bool = False  # the plan holds because an operator wants it to
    milestone: Milestone | None = None  # the newest that a script's log has told of, before there was a sign

    def after(
        self,
        event: Event,
        plan: Plan | None,
        me: Member,
        *,
        paused: bool = False,
        still_s: float = 0.0,
        means: Means = RUNTIME,
    ) -> tuple["Stages", Done | None]:
        """As `_after`, and how far the workers here have come. A fault in whose hold a pause comes is timed by nobody."""
        if paused and not self.paused and self.plan is not None and self.plan.phase is Phase.HOLD:
            pauses = replace(self, sign_at=None, paused=True)
            return pauses.after(event, plan, me, paused=paused, still_s=still_s, means=means)
        if not means.joins and self.joined_at is not None and isinstance(event, Workers):
            if event.work in TROUBLE:  # it ran, and before its first word there is another fault
                over = replace(self, sign_at=None, joined_at=None, lost=None, newest=event.step)
                return over.after(event, plan, me, paused=paused, still_s=still_s, means=means)[0], self.summed(
                    event.now
                )
            return self.begun_again(event, means)
        stages, done = self._after(event, plan, me, paused=paused, still_s=still_s)
        if not means.joins and stages.joined_at is not None and isinstance(event, Workers):
            joined = replace(stages, lost=self.lost, newest=self.newest, milestone=self.milestone)
            return joined.begun_again(event, means)
        if isinstance(event, Workers):
            stages = replace(
                stages, newest=event.step if stages.joined_at == event.now else max(self.newest, event.step)
            )
        if isinstance(event, Workers) and event.milestone is not None and stages.sign_at is None:
            return replace(stages, milestone=event.milestone), done
        return replace(stages, milestone=self.milestone), done

    def begun_again(self, event: Workers, means: Means) -> tuple["Stages", Done | None]:
        """A script runs again. With its first word it is over, and says from which step it has gone on. Where it never says
        one, it is over with the next progress in its log, or now if that told of none; what was lost is not known.
        """
        if means.tells and not event.step:
            return self, None
        before, told = self.milestone, event.milestone
        if not means.tells and before is not None and (told is None or told.read <= before.read):
            return self, None
        lost = max(0, self.newest - event.step + 1) + (self.lost or 0) if self.newest and means.tells else None
        done = replace(self, lost=lost).summed(event.now)
        return replace(self, sign_at=None, joined_at=None, lost=None, newest=event.step), done

    def _after(
        self, event: Event, plan: Plan | None, me: Member, *, paused: bool, still_s: float
    ) -> tuple["Stages", Done | None]:
        """The marks after this event, and the recovery that it ended, if it did. What others recover from without us is not
        ours to time, nor is our own way in, nor how long a job was `paused`. `still_s`: for how long a step has been overdue.
        """
        now = event.now
        match event:
            case Workers() | Suspected() if self.paused or (self.plan is not None and me not in self.plan.seat_of):
                pass
            case Workers(work=work, stall=stall) if (work in TROUBLE or stall) and self.sign_at is None:
                detect_s = max(stall.for_s if stall else 0.0, still_s)
                return replace(self, sign_at=now, broke=self._newest, detect_s=detect_s, silence=False), None
            case Suspected(silent_s=silent_s) if self.sign_at is None:
                detect_s = max(silent_s, still_s)
                return replace(self, sign_at=now, broke=self._newest, detect_s=detect_s, silence=True), None
            case Seen() if plan is not None and plan.generation > self._newest:
                if plan.grows and self.sign_at is not None and self.joined_at is not None:
                    return replace(self, grown=plan), None  # the gang trains on, and its next step ends this
                seated = me in plan.seat_of
                broken = plan.rung > 0 and not self.paused and self.plan is not None  # the first may have been answered
                answers = seated and plan.phase is Phase.TRAIN and (broken or self.sign_at is not None)
                # Where too few are left to go on, or have to be probed, it is not over: the fault began before the hold.
                waits = seated and plan.phase in (Phase.HOLD, Phase.PROBE) and not paused and self.sign_at is not None
                sign_at = (self.sign_at if self.sign_at is not None else now) if answers or waits else None
                fresh = Stages(
                    sign_at=sign_at, broke=self._newest, detect_s=still_s, plan=plan, plan_at=now,
                    paused=paused and plan.phase is Phase.HOLD, newest=self.newest,
                )  # fmt: skip
                if self.sign_at is None:
                    return fresh, None
                was = self
                return replace(fresh, broke=was.broke, detect_s=was.detect_s, silence=was.silence, lost=was.lost), None
            case Workers() if self._joined(event) and self.sign_at is not None and self.sign_at > self.plan_at:
                return replace(
                    self, sign_at=None
                ), None  # an effect of the plan, such as the parting of a gang that grows
            case Workers() if self._joined(event):
                lost = max(0, self.newest - event.step) + (self.lost or 0) if self.newest else self.lost
                return replace(self, joined_at=now, restore_s=event.restore_s, step=event.step, lost=lost), None
            case Workers(step=step) if self.sign_at is not None and self.joined_at is not None and step > self.step:
                plan, plan_at = (self.grown, now) if self.grown else (self.plan, self.plan_at)
                return replace(
                    self, sign_at=None, joined_at=None, lost=None, grown=None, plan=plan, plan_at=plan_at
                ), self.summed(now)
        return self, None

    def since(self, plan: Plan) -> int:
        """The generation in which the fault began that this plan, the next one, answers."""
        return self.broke if self.sign_at is not None else plan.generation - 1

    @property
    def _newest(self) -> int:
        """The newest generation that is known; 0: none."""
        plan = self.grown or self.plan
        return plan.generation if plan else 0

    def _joined(self, workers: Workers) -> bool:
        if self.sign_at is None or self.joined_at is not None or self.plan is None:
            return False
        well = workers.work is Work.TRAINING and workers.stall is None
        return well and workers.generation == self.plan.generation

    def summed(self, now: float) -> Done:
        """The recovery that is over now."""
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
        total_s = sum(stages.values())
        return Done(
            generation=self.plan.generation, broke=self.broke, rung=rung, total_s=total_s, stages=stages, lost=self.lost,
            silence=self.silence,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """How much of the time since this node's workers first made steps went into steps that count: see `base.goodput`.

    A step that is made again counts once, one that stood still at what a step usually takes, and the time between two groups
    not at all.

    Example: Goodput(since=10.0, first=0, newest=97, usual=(0.5, 0.5)).share(60.0) == 0.97
    """

    since: float | None = None  # when they began with the first step that was seen
    first: int = 0  # steps that were there before it
    newest: int = 0  # and steps that are sealed now
    usual: tuple[float, ...] = ()  # seconds of a step, of the newest lines

    def after(self, *, step: int, steps: int, seconds: float, now: float) -> "Goodput":
        """A worker has sealed its `step`th step, and this many of them took so long together."""
        usual = (*self.usual[-USUAL_OF + 1 :], seconds / steps)
        if self.since is None:
            return Goodput(since=now - seconds, first=step - steps, newest=step, usual=usual)
        return replace(self, newest=max(step, self.newest), usual=usual)

    def share(self, now: float) -> float:
        """Of the time until now; 0 before there was a step."""
        if self.since is None:
            return 0.0
        return goodput(self.newest - self.first, median(self.usual), now - self.since)


def kind_of(left: Exit) -> str:
    """What an exit speaks for, for a metric's label: of few words, whatever a program prints.

    >>> kind_of(Exit(generation=3, slot=0, step=7, cause="exit code 1: ValueError: bad prompt", own=True))
    'program'
    >>> kind_of(Exit(generation=3, slot=0, step=7, cause="signal 9 (SIGKILL)", own=False, signal=9))
    'signal 9'
    """
    return f"signal {left.signal}" if left.signal else of_exit(left).sign.value
