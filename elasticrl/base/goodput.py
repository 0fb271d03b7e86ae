"""Goodput: how much of a job's time went into steps that count.

The one idea: only sealed steps count, each once and at what a step usually takes. So time goes missing for whatever kept the
job from them: a recovery, a start, a step that was made again or that stood still. Report, metric and bench mean this by it.
"""

from collections.abc import Iterable
from typing import Final

APART: Final = frozenset({"warm", "parked", "done", "reform"})  # phases that are no part of a step


def stepped(phases: Iterable[str]) -> bool:
    """Is a line of these phases of steps? A rank that joins a gang leaves one as well, of how it came to where the others are.

    >>> stepped(["reform", "rollout", "update"]), stepped(["warm", "reform"])
    (True, False)
    """
    return not APART.issuperset(phases)


def goodput(steps: int, usual_s: float, wall_s: float) -> float:
    """The share of `wall_s` that so many sealed steps should have taken; at most 1.

    >>> goodput(97, 0.5, 50.0)
    0.97
    """
    return min(1.0, steps * usual_s / wall_s) if wall_s > 0 else 0.0
