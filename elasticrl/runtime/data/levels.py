"""A curriculum's arithmetic: which level of the data each sample comes from, where the mix of levels changes by step. Pure.

The one idea: within a stage one short pattern of levels is repeated (`pattern`). So how many samples of each level came before
any place is a division, and a step is found without walking to it. Imports nothing but the standard library.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd

Stage = tuple[int, ...]
"""The first step of a stage, then the weight of each level in it. Example: (200, 1, 3)"""

MOST = 1000  # the sum of a stage's weights: its pattern is as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From sample `start` of a segment on, `pattern` is repeated. It began at sample `began`, which is before the segment where
    the one before was in the middle of it; `before` are the samples of each level up to there.

    Example: Stretch.of((1, 3), start=640, began=640, before=(640, 0))
    """

    start: int
    began: int
    before: tuple[int, ...]
    pattern: tuple[int, ...]
    shares: tuple[int, ...]  # of each level in the pattern
    nth: tuple[int, ...]  # of each place: how often its level came before in the pattern. So a sample costs no counting

    @classmethod
    def of(cls, weights: tuple[int, ...], *, start: int, began: int, before: tuple[int, ...]) -> "Stretch":
        """With the pattern of a stage."""
        its, seen, nth = pattern(weights), [0] * len(weights), list[int]()
        for level in its:
            nth.append(seen[level])
            seen[level] += 1
        return cls(start=start, began=began, before=before, pattern=its, shares=tuple(seen), nth=tuple(nth))

    def counts(self, number: int) -> tuple[int, ...]:
        """The samples of each level before sample `number` of the segment."""
        rounds, rest = divmod(number - self.began, len(self.pattern))
        return tuple(
            before + rounds * share + self.pattern[:rest].count(level)
            for level, (before, share) in enumerate(zip(self.before, self.shares, strict=True))
        )


@lru_cache(maxsize=256)
def pattern(weights: tuple[int, ...]) -> tuple[int, ...]:
    """A round of levels, each as often as it weighs. After any number of samples no level is off by more than 1 - 1/(2k - 2)
    of one, with k levels that weigh anything: Tijdeman's algorithm (The chairman assignment problem, 1980). A level may come
    when it is behind by enough, and of those that may the one whose deadline is next does.

    >>> pattern((3, 1)), pattern((2, 2)), pattern((0, 5))
    ((0, 0, 1, 0), (0, 1), (1,))
    """
    shares = {level: weight // gcd(*weights) for level, weight in enumerate(weights) if weight}
    whole, twice = sum(shares.values()), max(2 * len(shares) - 2, 1)
    behind, found = dict.fromkeys(shares, 0), list[int]()  # in parts of a sample, of which it has `whole`
    for _ in range(whole):
        behind = {level: its + shares[level] for level, its in behind.items()}
        may = [level for level, its in behind.items() if twice * its >= whole]
        level = min(may, key=lambda i: Fraction((twice - 1) * whole - twice * behind[i], shares[i]))
        behind[level] -= whole
        found.append(level)
    return tuple(found)


@lru_cache(maxsize=256)
def stretches(
    stages: tuple[Stage, ...], used: tuple[int, ...], *, first: int, step: int, turned: int = 0
) -> tuple[Stretch, ...]:
    """Of a segment that begins at sample `first` of the job, of which a step takes `step`; `used` are the samples of each level
    before it, the last `turned` of them from the pattern that it goes on with.
    """
    found: list[Stretch] = []
    for begins, *its in stages:
        weights, start = tuple(its), begins * step - first
        if start > 0:
            found.append(Stretch.of(weights, start=start, began=start, before=found[-1].counts(start)))
            continue
        part = pattern(weights)[:turned]  # the stages before this one were over when the segment began
        before = tuple(count - part.count(level) for level, count in enumerate(used))
        found = [Stretch.of(weights, start=0, began=-len(part), before=before)]
    return tuple(found)


def drawn(its: tuple[Stretch, ...], number: int) -> tuple[int, int]:
    """(level, how many of it came before) of sample `number` of a segment."""
    stretch = _at(its, number)
    rounds, rest = divmod(number - stretch.began, len(stretch.pattern))
    level = stretch.pattern[rest]
    return level, stretch.before[level] + rounds * stretch.shares[level] + stretch.nth[rest]


def counts(its: tuple[Stretch, ...], number: int) -> tuple[int, ...]:
    """The samples of each level before sample `number` of a segment."""
    return _at(its, number).counts(number)


def turned(its: tuple[Stretch, ...], number: int) -> int:
    """How many samples of its pattern came before sample `number` of a segment."""
    stretch = _at(its, number)
    return (number - stretch.began) % len(stretch.pattern)


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
