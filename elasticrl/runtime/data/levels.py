"""A curriculum's arithmetic: which level of the data each sample comes from, where the mix of levels changes by step. Pure.

The one idea: within a stage one short pattern of levels is repeated (`pattern`). So how many samples of each level came before
any place is a division, and a step is found without walking to it. Imports nothing but the standard library.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

Stage = tuple[int, ...]
"""The first step of a stage, then the weight of each level in it. Example: (200, 1, 3)"""

MOST = 1000  # the sum of a stage's weights: its pattern is as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From sample `start` of a segment on, `pattern` is repeated; `before` are the samples of each level up to there.

    Example: Stretch(start=640, pattern=(1, 0, 1, 1), before=(640, 0))
    """

    start: int
    pattern: tuple[int, ...]
    before: tuple[int, ...]

    def counts(self, number: int) -> tuple[int, ...]:
        """The samples of each level before sample `number` of the segment."""
        rounds, rest = divmod(number - self.start, len(self.pattern))
        return tuple(
            before + rounds * self.pattern.count(level) + self.pattern[:rest].count(level)
            for level, before in enumerate(self.before)
        )


@lru_cache(maxsize=256)
def pattern(weights: tuple[int, ...]) -> tuple[int, ...]:
    """A round of levels, each as often as it weighs, and as evenly as can be: whoever has waited longest is next.

    >>> pattern((3, 1)), pattern((2, 2)), pattern((0, 5))
    ((0, 0, 1, 0), (0, 1), (1,))
    """
    shares = [weight // gcd(*weights) for weight in weights]
    whole, owed, found = sum(shares), [0] * len(weights), list[int]()
    for _ in range(whole):
        owed = [its + share for its, share in zip(owed, shares, strict=True)]
        level = max(range(len(owed)), key=lambda i: (owed[i], -i))
        owed[level] -= whole
        found.append(level)
    return tuple(found)


@lru_cache(maxsize=256)
def stretches(stages: tuple[Stage, ...], used: tuple[int, ...], *, first: int, step: int) -> tuple[Stretch, ...]:
    """Of a segment that begins at sample `first` of the job, of which a step takes `step`; `used` are the samples of each level
    before it.
    """
    found: list[Stretch] = []
    for begins, *weights in stages:
        start = max(begins * step - first, 0)
        before = found[-1].counts(start) if found else used
        if found and found[-1].start == start:
            before = found.pop().before  # over before the segment began
        found.append(Stretch(start=start, pattern=pattern(tuple(weights)), before=before))
    return tuple(found)


def drawn(its: tuple[Stretch, ...], number: int) -> tuple[int, int]:
    """(level, how many of it came before) of sample `number` of a segment."""
    stretch = _at(its, number)
    level = stretch.pattern[(number - stretch.start) % len(stretch.pattern)]
    return level, stretch.counts(number)[level]


def counts(its: tuple[Stretch, ...], number: int) -> tuple[int, ...]:
    """The samples of each level before sample `number` of a segment."""
    return _at(its, number).counts(number)


def _at(its: tuple[Stretch, ...], number: int) -> Stretch:
    return next(stretch for stretch in reversed(its) if stretch.start <= number)


def fault(levels: tuple[int, ...], stages: tuple[Stage, ...], size: int | None) -> str:
    """What is wrong with them; "" if nothing is."""
    numbers = [*levels, *(number for stage in stages for number in stage)]
    if any(type(number) is not int or number < 0 for number in numbers):
        return "levels and stages are whole numbers"
    if min(levels, default=0) < 1 or sum(levels) != size:
        return f"levels of {list(levels)} samples are not the {size} of the data"
    begins = [stage[0] for stage in stages if stage]
    if len(begins) != len(stages) or begins[:1] != [0] or begins != sorted(set(begins)):
        return "the first stage begins at step 0, and each later one after the one before"
    if any(len(stage) != 1 + len(levels) or not 1 <= sum(stage[1:]) <= MOST for stage in stages):
        return f"each stage has a weight for each level, 1 to {MOST} in all"
    return ""
