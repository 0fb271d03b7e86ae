"""From the beats of a node's workers to the one word that the core hears of them. Pure.

The idea: what a worker says of itself only counts for the generation it says it in. A worker that was told of a newer one and
has not taken it yet is joining, whatever its page says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from elasticrl.base.value import dataclass
from elasticrl.contract.beats import Snapshot, Stage
from elasticrl.contract.model import LOADING, MEETING, OUTSIDE, UNTOLD, Facts, Lap, Milestone, Pace, Stall, Work
from elasticrl.core.node.suspect import Budgets, Progress, Rhythm

RESTING = frozenset({Stage.WARM, Stage.PARKED, Stage.DONE})  # nobody expects progress of these


@dataclass(frozen=True, slots=True, kw_only=True)
class Beating:
    """One seated process, as it looks now."""

    slot: int
    beat: Snapshot
    stopped: bool = False  # the kernel says so
    finished: bool = False  # it ended with exit code 0
    rhythm: Rhythm | None = None  # of its log's lines of progress
    milestone: Milestone | None = None  # what the newest of them says
    script: bool = False  # its program has collectives of its own, so its beats cannot say that it waits in one


def look(workers: Iterable[Beating], generation: int, budgets: Budgets, now: float, wall: float = 0.0) -> Facts:
    """What is learned by looking once at all pages. `wall`: what `now` is by the wall clock."""
    workers = list(workers)
    if not workers:
        return Facts()
    stalls = [stall for w in workers if not w.finished and (stall := stall_of(w, budgets, now))]
    # A stopped process is guilty without doubt, then one that waits for nobody; of victims the one that has waited longest.
    # What only a log speaks for comes last.
    worst = min(stalls, key=lambda s: (not s.stopped, s.waiting, s.silent, -s.for_s, s.slot), default=None)
    told = [w.milestone for w in workers if w.milestone]
    newest = max(workers, key=lambda w: w.beat.saved)
    # Who waits outside of the gang says so again and again; the others of this node wait for it.
    shown = min(workers, key=lambda w: (w.beat.phase != OUTSIDE, w.beat.since)).beat
    loads = any(w.beat.state is Stage.WARM and not w.finished for w in workers)  # whatever it says that it does
    return Facts(
        work=work_of(workers, generation, worst if worst and budgets.acts(worst) else None),
        step=min(w.beat.step for w in workers),
        saved=newest.beat.saved,
        manifest=newest.beat.manifest,
        stall=worst,
        milestone=max(told, key=lambda milestone: milestone.read, default=None),
        phase=LOADING if loads else shown.phase,
        restores=any(restores(w, generation, budgets.settings.floor_s, now) for w in workers),
        beat_at=round(wall - (now - shown.since), 1) if shown.since else 0.0,
        restore_s=max(w.beat.restore_s for w in workers),
    )


def work_of(workers: list[Beating], generation: int, stall: Stall | None) -> Work:
    """The word for all of them: done or parked if all are, joining if any is."""
    if all(w.finished or w.beat.state is Stage.DONE for w in workers):
        return Work.DONE
    states = {state_of(w, generation) for w in workers}
    if Stage.JOINING in states:
        return Work.JOINING
    if stall is not None and stall.waiting:
        return Work.STALLED
    if Stage.PARKED in states:
        return Work.PARKED
    return Work.TRAINING


def state_of(worker: Beating, generation: int) -> Stage:
    """Its state in this generation."""
    if worker.finished:
        return Stage.DONE
    behind = worker.beat.generation < generation or worker.beat.state is Stage.WARM
    return Stage.JOINING if behind else worker.beat.state


def restores(worker: Beating, generation: int, patience_s: float, now: float) -> bool:
    """Is state put back into it, since more than a moment, and did some come within `patience_s`?"""
    beat = worker.beat
    here = beat.generation >= generation and beat.state is Stage.JOINING
    return here and not worker.finished and not worker.stopped and now < beat.nearer + patience_s


def stall_of(worker: Beating, budgets: Budgets, now: float) -> Stall | None:
    """The stall this worker is in, if it is in one."""
    beat = worker.beat
    if beat.state in RESTING and not worker.stopped:
        return None
    # A script that stands still may wait for another: only a look at the stacks of all can tell who holds the others up.
    waiting = beat.waiting or (worker.script and not worker.stopped)
    progress = Progress(
        slot=worker.slot, step=beat.step, phase=beat.phase, since=beat.since, waiting=waiting,
        waited_s=beat.waited_s, stopped=worker.stopped, rhythm=worker.rhythm, op=beat.op,
        collective=0 if beat.phase == MEETING else beat.collective,
    )  # fmt: skip
    return budgets.stalled(progress, now)


SIGN_S = 1.0  # who waits outside says so at least as often


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """How long phases usually take here: budgets, the phase each worker was last seen in, and the stall it then was in.
    `halves`: the phase that it has left for a wait outside of the gang, and how long that had taken.
    """

    budgets: Budgets
    seen: Mapping[int, Snapshot] = field(default_factory=dict)
    stalls: Mapping[int, Stall] = field(default_factory=dict)
    halves: Mapping[int, tuple[str, float]] = field(default_factory=dict)

    def learn(self, workers: Sequence[Beating], now: float) -> "Usual":
        """A phase that was left between two looks took about as long as from its beginning to the next one's.

        A phase that a broken gang ended tells how long the fault took, and the rest of a reform after its first collective
        tells nothing. Of both only this is learned: at the same step it may be as long again. It is learned of those who waited
        too, or they would be taken for stalled before the one that is slow.

        One that is left for a wait outside of the gang goes on behind it: it took as long as its parts together.
        """
        budgets, seen, stalls, halves = self.budgets, dict(self.seen), dict(self.stalls), dict(self.halves)
        for worker in workers:
            before, beat = seen.get(worker.slot), worker.beat
            stall = stalls.pop(worker.slot, None)
            if before and not _trained_on(before, beat):
                halves.pop(worker.slot, None)
                budgets = budgets.end(stall) if stall else budgets
            elif before and before.since < beat.since and before.phase not in (MEETING, UNTOLD):
                took, half = beat.since - before.since, halves.pop(worker.slot, None)
                if before.phase == OUTSIDE:
                    # What is waited for comes at any moment between two signs.
                    if beat.phase == OUTSIDE or took > SIGN_S:
                        budgets = budgets.learn(OUTSIDE, took)
                else:
                    half = before.phase, took + (half[1] if half else 0.0)
                waited = OUTSIDE in (before.phase, beat.phase)
                if half and waited and beat.phase in (OUTSIDE, half[0]):
                    halves[worker.slot] = half
                elif half:
                    budgets = budgets.learn(*half)
            seen[worker.slot] = beat
        for worker in workers:
            stall = stall_of(worker, budgets, now)
            at_work = worker.beat.state is Stage.TRAINING and not (worker.finished or worker.stopped)
            if stall and at_work:
                stalls[worker.slot] = stall
        return Usual(budgets=budgets, seen=seen, stalls=stalls, halves=halves)


def _trained_on(before: Snapshot, after: Snapshot) -> bool:
    """Is it the same process, in the same gang?"""
    same = before.pid == after.pid and before.generation == after.generation
    return same and before.state is Stage.TRAINING and after.state in (Stage.TRAINING, Stage.DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """How long a step takes each worker, phase by phase, between two looks that are some time apart."""

    at: float = 0.0
    seen: Mapping[int, Snapshot] = field(default_factory=dict)  # then
    took: tuple[Pace, ...] = ()
    lap: Lap | None = None  # outlives its gang: what broke it is weighed against what was usual

    def after(self, workers: Iterable[Beating], now: float, every_s: float) -> "Stride":
        """A later look. Nothing is said before each worker has made a step in between, under the same generation."""
        workers = list(workers)
        same = all(
            (then := self.seen.get(w.slot)) is not None
            and (then.pid, then.generation) == (w.beat.pid, w.beat.generation)
            for w in workers
        )
        if not workers or not same or len(workers) != len(self.seen):
            return Stride(at=now, seen={w.slot: w.beat for w in workers}, lap=self.lap)
        if now < self.at + every_s or any(w.beat.step <= self.seen[w.slot].step for w in workers):
            return self
        took = tuple(
            Pace(slot=w.slot, phase=name, seconds=round((seconds - before) / steps, 5))
            for w in workers
            for steps in [w.beat.step - self.seen[w.slot].step]
            for then in [dict(self.seen[w.slot].spent)]
            for name, seconds in w.beat.spent
            for before in [then.get(name, 0.0)]
            if seconds > before
        )
        made = [(w.beat, self.seen[w.slot], w.beat.step - self.seen[w.slot].step) for w in workers]
        lap = Lap(
            generation=max((beat.generation for beat, _, _ in made), default=0),
            seconds=round(max((now - self.at) / steps for _, _, steps in made), 4),
            bytes=max((beat.bytes - then.bytes) // steps for beat, then, steps in made),
        )
        return Stride(at=now, seen={w.slot: w.beat for w in workers}, took=took, lap=lap)
