"""What ranks tell each other beside a vote: a few numbers that cost no message of their own.

The one idea: a vote is heard by all from all, so whatever rides on it is known to everybody at the same moment. Who is asked to
end, whether newcomers are there, whose copies are late, what keeping a state costs, and the digest of the newest one: each rank
sends its part, and all come to the same whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from elasticrl.runtime.digest import MASK, Digest, outliers, strangers
from elasticrl.runtime.replicated import Replicated

if TYPE_CHECKING:
    from elasticrl.runtime.strategy import Strategy

SAMPLE = 16  # lanes.digest: sample takes each parameter once in so many updates
REPLICA = "replica"  # the row of a digest that is of the parameters a rank computes with: equal on all, not a part
COMMON = "common"  # the same, of those that all members of a team have whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What all ranks' notes say together.

    Example: Heard(ending=False, parting=False, late=False, cost_s=0.03, since_s=4.1, digest="9f86d081884c7d65", odd=())
    """

    ending: bool  # some rank is asked to end with this step
    parting: bool  # all ranks know of a plan that adds to the gang, and one that those are there whom it adds
    late: bool  # some rank's copies did not arrive in time
    cost_s: float  # of the newest state that was kept, where it cost most
    since_s: float  # since that one was begun, where it is longest ago
    digest: str | None  # of the whole state; None where none was made
    odd: tuple[int, ...]  # the ranks that compute with other parameters than the others

    def worth(self, part: float) -> bool:
        """Whether another state may be kept now, at no more than this part of the time."""
        return part >= 1.0 or (part > 0.0 and self.cost_s <= part * self.since_s)


def write(
    *, ending: bool, added: int, late: bool, cost_s: float, since_s: float, digests: Sequence[Digest]
) -> tuple[float, ...]:
    """One rank's notes. A sum of 64 bits is two numbers, each exact as a float. `added`: 1 if this rank knows of a plan that
    adds to the gang, 2 if it knows that those are there whom it adds.
    """
    words = [value for digest in digests for _, value in sorted(digest.sums.items())]
    halves = (half for word in words for half in (word >> 32, word & 0xFFFFFFFF))
    return (float(ending), float(added), float(late), cost_s, since_s, *map(float, halves))


def read(rows: Sequence[Sequence[float]], digests: Sequence[Digest], *, members: int = 1) -> Heard:
    """All ranks' notes, in rank order, of which each wrote those of its part of `digests`. `members`: of a team."""
    words = [[(int(hi) << 32) | int(lo) for hi, lo in zip(row[5::2], row[6::2], strict=True)] for row in rows]
    odd: set[int] = set()
    names: list[str] = []
    at = 0
    for digest in digests:
        sums: dict[str, int] = {}
        for row in sorted(digest.sums):
            values = [word[at] for word in words]
            at += 1
            if row == REPLICA:
                odd |= set(strangers(values, members))
            elif row == COMMON:
                odd |= set(outliers(values))
            else:
                sums[row] = sum(values) & MASK
        names.append(replace(digest, sums=sums).hex)
    return Heard(
        ending=any(row[0] for row in rows),
        parting=min(row[1] for row in rows) >= 1 and max(row[1] for row in rows) >= 2,
        late=any(row[2] for row in rows),
        cost_s=max(row[3] for row in rows),
        since_s=max(row[4] for row in rows),
        digest="-".join(names) or None,
        odd=tuple(sorted(odd)),
    )


def digests(
    strategies: Mapping[str, Strategy], count: int, how: Literal["off", "sample", "full"]
) -> tuple[Digest, ...]:
    """This rank's part of the digest of each role's newest version, after `count` updates."""
    found: list[Digest] = []
    for _, strategy in sorted(strategies.items()) if how != "off" else ():
        shard = strategy.shard
        names = sorted(shard.layout.shapes)
        if how == "sample":
            names = names[count % SAMPLE :: SAMPLE] or names[:1]
        sums = dict(shard.digest(strategy.counted(names)))
        if isinstance(strategy, Replicated):
            sums[REPLICA] = strategy.replica(names)
            if strategy.team is not None:
                sums[COMMON] = strategy.replica(strategy.common.intersection(names))
        found.append(Digest(version=shard.version, sums=sums))
    return tuple(found)
