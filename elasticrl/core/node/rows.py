"""What the seats' nodes say, one row for each seat, brought up to date by the few records that changed since the last look.

The one idea: of thousands of records a look finds some dozens new. All passes over all are the interpreter's own (`map`,
`compress`, `all`), and Python is run for what has changed alone. The leader keeps the rows between two looks. Without those of
the look before they are made anew, and are the same.
"""

from collections.abc import Iterable, Mapping
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import cast

from elasticrl.base.value import dataclass
from elasticrl.contract.cause import Cause, Why
from elasticrl.contract.model import Plan, Record, Seat, Work

step_of, member_of = attrgetter("step"), attrgetter("member")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a seat: kept by the running processes (`fresh=False`) or by new ones, or gone, with the reason."""

    seat: Seat | None
    fresh: bool = False
    cause: Cause | None = None

    @property
    def leaving(self) -> bool:
        """Does its node leave in order?"""
        return self.cause is not None and self.cause.why is Why.LEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Under one plan. `works`: what each seat's node reports under its generation; None: nothing."""

    plan: Plan
    ranked: tuple[Record | None, ...]
    works: tuple[Work | None, ...]
    counts: Mapping[Work, int]
    doubtful: frozenset[int]  # seats that do not simply go on, as their own records say; by place
    sealed: frozenset[int]  # those that tell of a step sealed in this generation
    plain: tuple[Fate, ...]  # of seats that simply go on

    def doing(self) -> Mapping[Work, tuple[Record, ...]]:
        """By what they do, in rank order."""
        return {work: tuple(self._doing(work)) for work in Work}

    def _doing(self, work: Work) -> Iterable[Record]:
        many, said = self.counts[work], cast("tuple[Record, ...]", self.ranked)  # who reports something has a record
        if many in (0, len(said)):
            return said if many else ()
        return compress(said, map(is_, self.works, repeat(work)))


def goes_on(seat: Seat, record: Record | None) -> bool:
    """Does its node say what one says that keeps its seat and its processes?"""
    if record is None or record.member.incarnation != seat.member.incarnation or record.leaving:
        return False
    return record.work is not Work.FAILED and record.born in (0, seat.born)


def rows_of(plan: Plan, ranked: tuple[Record | None, ...], before: Rows | None) -> Rows:
    """The rows of this moment; `before`: those of an earlier one."""
    if before is None or before.plan is not plan:
        before = Rows(
            plan=plan, ranked=(None,) * len(plan.seats), works=(None,) * len(plan.seats), counts=dict.fromkeys(Work, 0),
            doubtful=frozenset(range(len(plan.seats))), sealed=frozenset(), plain=tuple(Fate(seat=s) for s in plan.seats),
        )  # fmt: skip
    new = list(compress(range(len(ranked)), map(is_not, ranked, before.ranked)))
    if not new:
        return before
    works, counts, here = list(before.works), dict(before.counts), plan.generation
    doubtful, sealed = set(before.doubtful), set(before.sealed)
    for place in new:
        record, was = ranked[place], works[place]
        work = record.work if record is not None and record.generation == here else None
        if work is not was:
            works[place] = work
            if was is not None:
                counts[was] -= 1
            if work is not None:
                counts[work] += 1
        (doubtful.discard if goes_on(plan.seats[place], record) else doubtful.add)(place)
        made = record is not None and record.lap is not None and record.lap.generation >= here
        (sealed.add if made else sealed.discard)(place)
    return Rows(
        plan=plan, ranked=ranked, works=tuple(works), counts=counts, doubtful=frozenset(doubtful),
        sealed=frozenset(sealed), plain=before.plain,
    )  # fmt: skip
