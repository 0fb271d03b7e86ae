"""Who is slow: times of each phase across the gang, step after step, by statistics that one outlier cannot bend. Pure.

The one idea: a rank is compared with the *others'* median, on a scale that is the largest of three: how far the others lie
apart, how much a rank varies from step to step, and 5 % of the time itself. So a gang of two works, a noisy gang gives nothing,
and a tight one does not turn a millisecond into an alarm. It has to be slow in every one of the last steps.

The times are those of a rank's own work: in a phase with collectives everybody takes as long as the slowest, so what was spent
waiting is taken off before (beats know it).
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign

SIGMA = 1.4826  # median absolute deviations in a standard deviation
SHARE = 0.05  # of the usual time: what nobody would call slow
LEAST_S = 0.0005  # and what nobody could measure
ERRANDS = frozenset({"sync"})  # what some do for all, such as bringing weights to engines: no measure of the others

#: rank -> phase -> seconds of its own work, in one step.
Step = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A rank that is slow in a phase.

    Example: Slow(rank=3, phase="update", seconds=1.9, usual=1.1, z=14.5, steps=5)
    """

    rank: int
    phase: str
    seconds: float  # the median of its last steps
    usual: float  # the others'
    z: float  # the least of its last steps
    steps: int

    def __str__(self) -> str:
        return (
            f"{self.phase} takes {self.seconds:.3g} s, with the others {self.usual:.3g} s, {self.steps} steps in a row"
        )


def slow(history: Sequence[Step], *, z: float, steps: int) -> tuple[Slow, ...]:
    """The ranks that were slow in each of the last `steps` steps (`health.straggler_steps`), the slowest first.

    `history` is of one generation, oldest first; more than `steps` make the noise better known, and 4 times are plenty. `z` is
    `health.straggler_z`.

    >>> slow([{0: {"update": 1.0}, 1: {"update": 1.02}, 2: {"update": 1.9}}] * 5, z=4.0, steps=5)[0].rank
    2
    """
    if len(history) < steps or steps < 1:
        return ()
    ranks = sorted(set.intersection(*(set(step) for step in history)))
    phases = {phase for step in history[-steps:] for rank in ranks for phase in step[rank]}
    found = [hit for phase in sorted(phases - ERRANDS) for hit in _in_phase(history, phase, ranks, z, steps)]
    return tuple(sorted(found, key=lambda hit: (-(hit.seconds - hit.usual), hit.rank, hit.phase)))


def _in_phase(history: Sequence[Step], phase: str, ranks: Sequence[int], z: float, steps: int) -> list[Slow]:
    rows = {rank: [step[rank][phase] for step in history if phase in step[rank]] for rank in ranks}
    rows = {rank: row for rank, row in rows.items() if len(row) >= steps}
    if len(rows) < 2:
        return []
    recent = {rank: row[-steps:] for rank, row in rows.items()}
    typical = {rank: median(row) for rank, row in recent.items()}
    noise = SIGMA * median(_spread(row) for row in rows.values())
    found = []
    for rank, row in recent.items():
        others = [other for other in recent if other != rank]
        apart = SIGMA * _spread([typical[other] for other in others])
        worst = min(
            (mine - usual) / max(apart, noise, SHARE * usual, LEAST_S)
            for i, mine in enumerate(row)
            for usual in [median(recent[other][i] for other in others)]
        )
        if worst > z:
            usual = median(typical[other] for other in others)
            found.append(
                Slow(rank=rank, phase=phase, seconds=typical[rank], usual=usual, z=round(worst, 1), steps=steps)
            )
    # When half of a gang is slow the others are fast: nobody is at fault.
    return found if 2 * len(found) <= len(rows) else []


def _spread(values: Iterable[float]) -> float:
    """The median distance from the median."""
    listed = list(values)
    middle = median(listed)
    return median(abs(value - middle) for value in listed)


def evidence(found: Iterable[Slow], nodes: Mapping[int, str]) -> tuple[Evidence, ...]:
    """What slow ranks speak for."""
    return tuple(
        Evidence(
            kind=Kind.BEAT, sign=Sign.SLOW, rank=hit.rank, node=nodes.get(hit.rank), detail=str(hit),
            elapsed_ms=round(hit.seconds * 1000), source="beats",
        )
        for hit in found
    )  # fmt: skip
