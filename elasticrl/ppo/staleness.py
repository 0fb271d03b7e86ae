"""By which weights a sample is generated: a function of its step's number, and of nothing that happens.

The idea: with `steps` k the weights go to the engine every k steps, and what it generates by them are the samples of the k
steps that come next. So generation runs beside training, at most two sets of weights are in use, and no sample is older than k
steps, whoever was slow, died or came meanwhile.

    k = 2      step  0    1    2    3    4
    trains on        w0   w0   w0   w2   w2     (w2: the weights that step 2 began with)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticrl.config import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """`steps` 0: each step generates its own samples. `share`: of each batch, with `steps` 1; the rest is generated when it is
    needed.

    Example: Staleness(steps=2)
    """

    steps: int = 0
    share: float = 1.0

    def __bool__(self) -> bool:
        return self.steps > 0

    def period(self, step: int) -> int:
        """The first step of the period that a step is in: its weights generate what comes next.

        >>> [Staleness(steps=2).period(step) for step in range(5)], [Staleness(steps=1).period(step) for step in range(3)]
        ([0, 0, 2, 2, 4], [0, 1, 2])
        """
        return step // self.steps * self.steps

    def ahead(self, step: int, end: int = 0) -> range:
        """The steps whose samples are generated while this one trains, of a job that ends before step `end`; 0: it does not.

        >>> [list(Staleness(steps=2).ahead(step, 4)) for step in range(4)], list(Staleness().ahead(3))
        ([[1, 2], [2], [3], []], [])
        """
        if not self.steps:
            return range(0)
        last = self.period(step) + self.steps + 1
        return range(step + 1, min(last, end) if end else last)

    def renews(self, step: int) -> bool:
        """Whether the engine gets new weights when this step is over.

        >>> [Staleness(steps=2).renews(step) for step in range(4)], Staleness().renews(0)
        ([False, True, False, True], True)
        """
        return not self.steps or (step + 1) % self.steps == 0

    def part(self, count: int, group: int = 1) -> int:
        """How many of a lane's samples are generated ahead: whole groups.

        >>> Staleness(steps=1).part(12, 4), Staleness(steps=1, share=0.5).part(12, 4), Staleness().part(12, 4)
        (12, 4, 0)
        """
        return int(count // group * self.share) * group if self.steps else 0


ON_TIME = Staleness()


def staleness_of(tree: Tree) -> Staleness:
    """What a configuration asks for."""
    return Staleness(steps=tree.rollout.staleness, share=tree.rollout.stale_share)


def rows_at_once(tree: Tree) -> int:
    """How many samples of a lane are generated at once: those ahead, or the others."""
    each = -(-tree.ppo.generated // tree.lanes.count)
    ahead = staleness_of(tree).part(each, tree.ppo.part(tree.lanes.count))
    return max(ahead, each - ahead)
