"""Global scalars (token counts, losses, means and variances) that come out the same for any number of workers.

The idea: a scalar belongs to a lane, as a gradient does. Each lane tallies its own in float64, every rank learns every
lane's tally (they are a few numbers), and all fold them over the same tree of lanes. A ghost's tally is never asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch

from elasticrl.runtime.lanes import Fold, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations: mergeable, and exact where a sum of squares would cancel.

    Example: Moments(count=3, mean=2.0, m2=2.0)  # of 1, 2, 3
    """

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: torch.Tensor | Sequence[float], mask: torch.Tensor | None = None) -> Moments:
        """Of one lane's values; where a mask is given, of those under it. A tensor of any shape."""
        if isinstance(values, Sequence):
            numbers: list[float] = [float(value) for value in values]
            count, total = float(len(numbers)), math.fsum(numbers)
            mean = total / count if count else 0.0
            return cls(count=count, mean=mean, m2=math.fsum((value - mean) ** 2 for value in numbers))
        return cls.read(_row(values, mask))

    @classmethod
    def read(cls, row: torch.Tensor) -> Moments:
        """From a tensor of the three, which is waited for if it is on a GPU."""
        count, mean, m2 = row.tolist()
        return cls(count=count, mean=mean, m2=m2)

    def __add__(self, other: Moments) -> Moments:
        """Of both sets (Chan's formula)."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * (other.count / count),
            m2=self.m2 + other.m2 + delta * delta * (self.count * other.count / count),
        )

    def var(self, *, unbiased: bool = False) -> float:
        """The variance; 0 where there are too few values for one."""
        count = self.count - 1 if unbiased else self.count
        return self.m2 / count if count > 0 else 0.0

    def std(self, *, unbiased: bool = False) -> float:
        """The standard deviation."""
        return math.sqrt(self.var(unbiased=unbiased))


def _row(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[3], where the values are: their count, mean and sum of squared deviations. Nothing is read."""
    x = values.detach().double()
    if mask is not None:  # multiplied, not selected: the shapes and so the order of summation stay fixed
        weight = mask.double()
        count = weight.sum()
        mean = torch.where(count != 0, (x * weight).sum() / count, 0.0)
        return torch.stack([count, mean, ((x - mean).square() * weight).sum()])
    count = x.new_full((), float(x.numel()))
    mean = x.mean() if x.numel() else x.new_zeros(())
    return torch.stack([count, mean, (x - mean).square().sum()])


@dataclass(frozen=True, slots=True)
class Tally:
    """What one lane has to say. Names must be the same in all lanes.

    A tensor is added or spread where it is, and read with all others: on a GPU, `loss.item()` in its place would wait for all
    that the GPU has to do, a peer's part of a collective included, and nobody would know that the rank waits for this.

    Example: tally = Tally(); tally.add(tokens=512, loss=loss); tally.spread("advantage", advantages, mask)
    """

    held: dict[str, float | torch.Tensor] = field(default_factory=dict)
    spreads: dict[str, tuple[Moments | torch.Tensor, ...]] = field(default_factory=dict)  # to be added in this order

    def add(self, **values: float | torch.Tensor) -> None:
        """Adds to sums by name: numbers, or tensors of one number."""
        for name, value in values.items():
            number = value.detach().double().reshape(()) if isinstance(value, torch.Tensor) else float(value)
            self.held[name] = self.held.get(name, 0.0) + number

    def spread(self, name: str, values: torch.Tensor | Sequence[float], mask: torch.Tensor | None = None) -> None:
        """Adds values to those whose mean and variance are asked for."""
        before = self.spreads.get(name, (Moments(),))
        if isinstance(values, torch.Tensor):
            self.spreads[name] = (*before, _row(values, mask))
            return
        first, *others = before
        more = Moments.of(values)
        self.spreads[name] = (*before, more) if others or isinstance(first, torch.Tensor) else (first + more,)

    @property
    def moments(self) -> dict[str, Moments]:
        """Of what was spread, by name."""
        return {
            name: reduce(add, (part if isinstance(part, Moments) else Moments.read(part) for part in parts))
            for name, parts in self.spreads.items()
        }

    @property
    def sums(self) -> dict[str, float]:
        """By name."""
        return {name: float(value) for name, value in self.held.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is in a row, in its order."""
        return (*sorted(self.held), *(f"{name} (spread)" for name in sorted(self.spreads)))

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return len(self.held) + 3 * len(self.spreads)

    def row(self) -> list[float]:
        """As plain numbers, in the order of the names."""
        row = [float(self.held[name]) for name in sorted(self.held)]
        for _, found in sorted(self.moments.items()):
            row += (found.count, found.mean, found.m2)
        return row

    def like(self, row: Iterable[float]) -> Tally:
        """Another lane's row, with this one's names."""
        numbers = iter(row)
        held: dict[str, float | torch.Tensor] = {name: next(numbers) for name in sorted(self.held)}
        return Tally(
            held,
            {n: (Moments(count=next(numbers), mean=next(numbers), m2=next(numbers)),) for n in sorted(self.spreads)},
        )

    def __add__(self, other: Tally) -> Tally:
        """Of both lanes."""
        assert self.held.keys() == other.held.keys(), "lanes tally alike"
        assert self.spreads.keys() == other.spreads.keys(), "lanes tally alike"
        theirs = other.moments
        return Tally(
            {name: value + other.held[name] for name, value in self.held.items()},
            {name: (value + theirs[name],) for name, value in self.moments.items()},
        )


def total(tallies: Mapping[int, Tally], lanes: int) -> Tally:
    """The whole batch's tally from all lanes', along the tree."""
    assert sorted(tallies) == list(range(lanes)), f"tallies of lanes {sorted(tallies)} out of {lanes}"
    fold = Fold[Tally](lanes, lambda left, right: left + right)
    for lane in sorted(tallies):
        fold.put(Node(lane, lane + 1), tallies[lane])
    return fold.total()
