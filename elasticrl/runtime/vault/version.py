"""Versions of the job's state and the history they lie on.

The one idea: a generation starts from a version that an earlier generation made, so history is a chain of `Cut`s, and what a
generation made after the point where its successor started is not part of it (`alive`). Holdings in memory, records in the
ledger and checkpoints on disk are all judged by that one rule.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The state after update `update` of step `step`. Example: Version(1284, 2), written 1284.2."""

    step: int
    update: int = 0

    def __str__(self) -> str:
        return f"{self.step}.{self.update}"


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """`generation` started from `start`. Example: Cut(14, Version(1260))."""

    generation: int
    start: Version

    def to_json(self) -> list[int]:
        """Plain numbers."""
        return [self.generation, self.start.step, self.start.update]


Made = tuple[Version, int]
"""A version as one generation made it. Another may make the same one again, cut for its own world."""

Lineage = tuple[Cut, ...]
"""The chain of generations that led to a state, oldest first, ending with the one that made it. Empty: not known."""

KEPT_CUTS = (
    256  # a job of a thousand reforms must not carry a thousand cuts; what is older than these is long committed
)


def grow(lineage: Lineage, generation: int, start: Version) -> Lineage:
    """The lineage of a new generation that continues from `start` of `lineage`.

    >>> grow((Cut(1, Version(0)),), 2, Version(40))
    (Cut(generation=1, start=Version(step=0, update=0)), Cut(generation=2, start=Version(step=40, update=0)))
    """
    assert all(cut.generation < generation for cut in lineage), (
        f"generation {generation} is not newer than {lineage[-1]}"
    )
    return (*lineage, Cut(generation, start))[-KEPT_CUTS:]


def alive(lineage: Lineage, generation: int, version: Version) -> bool:
    """Whether `version` as `generation` made it lies on this history. Without a known history everything does."""
    if not lineage:
        return True
    known = any(cut.generation == generation for cut in lineage)
    return known and all(version <= cut.start for cut in lineage if cut.generation > generation)


def bounds(lineage: Lineage) -> dict[int, Version | None]:
    """Up to which version what each generation made lies on this history: `alive` for many, in one pass. None: all of it.

    >>> bounds((Cut(1, Version(0)), Cut(2, Version(40))))
    {2: None, 1: Version(step=40, update=0)}
    """
    found: dict[int, Version | None] = {}
    least: Version | None = None
    for cut in reversed(lineage):
        found[cut.generation] = least
        least = cut.start if least is None else min(least, cut.start)
    return found


def longest(lineage: Lineage, others: Iterable[Lineage]) -> Lineage:
    """A lineage with the cuts that it has lost to `KEPT_CUTS`, as far as others still have them."""
    by_cut = {cut: other for other in others for cut in other[1:]}
    while lineage and (other := by_cut.get(lineage[0])):
        lineage = (*other[: other.index(lineage[0])], *lineage)
    return lineage


def mark(lineage: Lineage) -> str:
    """What tells a lineage from others in a few letters.

    >>> mark(())
    '4f53cda18c2baa0c'
    """
    return hashlib.sha256(repr([cut.to_json() for cut in lineage]).encode()).hexdigest()[:16]


def version_to_json(version: Version | None) -> list[int] | None:
    """Plain numbers."""
    return None if version is None else [version.step, version.update]


def version_from_json(row: Sequence[int] | None) -> Version | None:
    """The reverse."""
    return None if row is None else Version(*map(int, row))


def lineage_from_json(rows: Iterable[Iterable[int]]) -> Lineage:
    """The reverse of `[cut.to_json() for cut in lineage]`."""
    return tuple(Cut(generation, Version(step, update)) for generation, step, update in rows)
