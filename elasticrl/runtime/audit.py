"""Which lane is computed twice, by whom, and what it means if the results differ. Pure.

The one idea: a lane's bits depend on no rank, so whoever computes it again must come to the same bits. Which update is looked
at, which of its lanes, and who does it are functions of names that all ranks know, so nobody asks. Results are compared between
nodes: a device that is wrong twice in the same way agrees with itself, and with nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING

from elasticrl.runtime.rng import seed

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What one pass of one rank came to.

    Example: Computed(rank=2, result="9f86d081884c7d65")
    """

    rank: int
    result: str


class Finding(Enum):
    """What a difference means."""

    NAMED = "named"  # most nodes came to one result, and `ranks` to another
    DOUBTED = "doubted"  # two results stand against each other, and nobody can say which is right
    UNLIKE = "unlike"  # no two passes came to the same: the program's lanes are no function of their samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer to a difference.

    Example: Judgement(finding=Finding.NAMED, ranks=(2,))
    """

    finding: Finding
    ranks: tuple[int, ...] = ()


def drawn(number: int, role: str, step: int, update: int, *, lanes: int, rate: str) -> int | None:
    """The lane of this update that is computed twice; None: none of it is. `number` is the job's seed.

    >>> drawn(7, "model", 12, 0, lanes=8, rate="0"), drawn(7, "model", 12, 0, lanes=8, rate="1")
    (None, 2)
    """
    share = Fraction(rate)
    place = ("audit", number, role, step, update)
    if seed(*place) % share.denominator >= share.numerator:
        return None
    return seed(*place, "lane") % lanes


def second(nodes: Sequence[str], owner: int, chance: int) -> int:
    """The rank that computes a lane of `owner`'s once more: on another node; with one node alone another rank of it, or the
    same. `nodes` are those of the ranks.
    """
    places = _places(nodes)
    return _one_of([rank for rank, place in enumerate(places) if place != places[owner]] or [owner], chance)


def deciders(nodes: Sequence[str], owner: int, other: int, chance: int) -> tuple[int, ...]:
    """Who computes it a third time where `owner` and `other` differ: a rank of a third node. Of two nodes each does it once
    more, by another rank than before where it has one.
    """
    places = _places(nodes)
    both = {places[owner], places[other]}
    if third := [rank for rank, place in enumerate(places) if place not in both]:
        return (_one_of(third, chance),)
    found = []
    for one in sorted({owner, other}):
        own = [rank for rank, place in enumerate(places) if place == places[one] and rank != one]
        found.append(_one_of(own or [one], chance))
    return tuple(found)


def judge(nodes: Sequence[str], found: Sequence[Computed]) -> Judgement:
    """Whose result stands alone. The right one is that of the most nodes, and of equals that which came up most often: a node
    that differs from itself is wrong at least once.
    """
    places = _places(nodes)
    by: dict[str, list[int]] = {}
    for one in found:
        by.setdefault(one.result, []).append(one.rank)
    weights = {result: (len({places[rank] for rank in ranks}), len(ranks)) for result, ranks in by.items()}
    most = max(weights.values())
    if most == (1, 1):
        return Judgement(finding=Finding.UNLIKE)
    right = [result for result, weight in weights.items() if weight == most]
    if len(right) > 1:
        return Judgement(finding=Finding.DOUBTED, ranks=tuple(sorted({one.rank for one in found})))
    odd = {one.rank for one in found if one.result != right[0]}
    return Judgement(finding=Finding.NAMED, ranks=tuple(sorted(odd)))


def _places(nodes: Sequence[str]) -> Sequence[str]:
    """What counts as elsewhere: another node; with one node alone another rank."""
    return nodes if len(set(nodes)) > 1 else [str(rank) for rank in range(len(nodes))]


def _one_of(ranks: Sequence[int], chance: int) -> int:
    return ranks[chance % len(ranks)]
