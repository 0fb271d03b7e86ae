"""One moment as the leader sees it: who keeps a seat, who has lost it and why, who could take one.

The one idea: the facts are sorted out once, here; the rules (`lead.RULES`) only read them, and write a next plan by
`Scene.train` or `Scene.write`.

Long because it is one list of facts, a few lines each, that are derived from each other.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import filterfalse
from math import inf
from operator import is_
from typing import TypeVar

from elasticrl.base.value import dataclass
from elasticrl.contract import versions
from elasticrl.contract.cause import KEPT, Cause, Why, orderly
from elasticrl.contract.evidence import Sign, of_exit
from elasticrl.contract.model import (
    LOADING,
    MEETING,
    OUTSIDE,
    Intent,
    Member,
    Phase,
    Plan,
    Quarantine,
    Record,
    Rung,
    Seat,
    Strike,
    View,
    Work,
)
from elasticrl.contract.partition import Pair
from elasticrl.contract.settings import Settings
from elasticrl.contract.verdict import Verdict
from elasticrl.core.node.rows import Fate, Rows, member_of, rows_of, step_of
from elasticrl.core.node.state import Lead
from elasticrl.core.node.suspect import Conviction, conviction, neighbours, split

T = TypeVar("T")
BACK_TTLS = 3  # so many leases long a member that is heard may be without one
PUTS_OUT = frozenset({Why.SILENT, Why.UNREACHED, Why.UNJOINED})  # for these a node is kept out, unless a cap spares it


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A rule's answer: the plan to have (None: the present one stays), whom to confine, when to look again, and why."""

    plan: Plan | None = None
    confine: tuple[Quarantine, ...] = ()
    wake_at: float = inf
    why: str = ""
    verdict: Verdict | None = None  # on what the plan answers
    inspect: bool = False  # ask everybody where his workers are


class timeless(cached_property[T]):  # noqa: N801 - as the one that it is
    """What follows from the facts alone, without the leader's memory. (`candidates` asks it who is doubted: those whom a newer
    memory adds are convicted, and no candidates in any case.)
    """


@dataclass(frozen=True)  # no slots: what is derived from the facts is computed once, on first use
class Scene:
    """One moment as the leader sees it: the facts, and what they amount to."""

    settings: Settings
    view: View
    plan: Plan | None  # None before the first plan, or when a stopped job is wanted again
    lead: Lead
    me: Member
    now: float
    made: int = 0  # the newest generation in which this node's own workers sealed a step
    formed: int = 0  # that in which they got through the first collective
    since: int = 0  # the store's revision when this node's life began
    deaf: bool = False  # is an answer of the store overdue?

    def recalling(self, lead: Lead) -> "Scene":
        """The same moment with newer timers. What was derived without them is not derived again: that is a pass over all."""
        scene = replace(self, lead=lead)
        vars(scene).update({name: value for name, value in vars(self).items() if name in TIMELESS})
        return scene

    @property
    def new_plan(self) -> bool:
        """Is there a plan that the leader's memory does not speak of yet?"""
        return self.view.generation != self.lead.formation.generation

    @property
    def anew(self) -> bool:
        """Does waiting begin anew, for a new plan's sake, or as what was waited for may not have come through?"""
        return self.new_plan or self.deaf

    @timeless
    def records(self) -> Mapping[str, Record]:
        """Everybody's record, by node. One of a life before the seated one's is none: a store that was set back shows those."""
        records, plan = self.view.records or {}, self.plan
        if plan is None or self._same_lives:
            return records
        of = zip(plan.seats, map(records.get, plan.seated), strict=True)
        old = {s.member.node for s, record in of if record and record.member.incarnation < s.member.incarnation}
        return {node: record for node, record in records.items() if node not in old} if old else records

    @timeless
    def _found(self) -> tuple[Record | None, ...]:
        """What lies in the store under each seat's node, in rank order. (A pass over all without a word of Python for each.)"""
        return tuple(map((self.view.records or {}).get, self.plan.seated)) if self.plan else ()

    @timeless
    def _same_lives(self) -> bool:
        """Is there a record of each seat's own life, as mostly?"""
        found = self._found
        return self.plan is not None and all(found) and all(map(is_, map(member_of, found), self.plan.members))

    @timeless
    def ranked(self) -> tuple[Record | None, ...]:
        """What each seat's node says of itself, in rank order."""
        if self.plan is None or self.records is self.view.records:
            return self._found
        return tuple(map(self.records.get, self.plan.seated))

    @timeless
    def rows(self) -> Rows | None:
        """The same, with what follows from it."""
        return rows_of(self.plan, self.ranked, self.lead.rows) if self.plan else None

    @cached_property
    def stop_answered(self) -> bool:
        """Was a stop asked before any of those began who are here now? Then all have ended of whom it was asked.

        Found under Slurm: it killed a job that was being stopped, queued it again, and the new run obeyed: one node ended with
        75, and those that began later waited for it.
        """
        here = [record.since for record in self.records.values()]
        return self.view.intent is Intent.STOP and bool(here) and all(map(self.older, here))

    def older(self, since: int) -> bool:
        """Was what is wanted of the job wanted before that revision?"""
        return 0 < self.view.intent_revision <= since

    @timeless
    def conviction(self) -> Conviction:
        """Whom the neighbours hold to be dead or cut off."""
        return conviction(self.view, self.settings.membership.neighbours)

    @timeless
    def held(self) -> Mapping[str, Quarantine]:
        """Quarantines that apply, by node."""
        records, quarantines = self.records, self.view.quarantines or {}
        return {n: q for n, q in quarantines.items() if q.binds(records[n].member if n in records else None)}

    @property
    def kept_out(self) -> frozenset[str]:
        """Nodes that are kept out, or are about to be: the leader counts what it wrote before it sees that.

        Found by simulation: two workers failed within the time that news takes, and one more was kept out than may be.
        """
        return frozenset(self.held) | self.lead.custody.confining.keys() | self._put_out

    @cached_property
    def _put_out(self) -> frozenset[str]:
        """Whom the newest plan put out, and of whose quarantine no news has come yet to a leader that is new. (One that has led
        for longer knows of its own.)

        Found by simulation: a new leader had the last one's plan before its quarantines, and put away eight nodes of 24.
        """
        plan = self.plan
        if plan is None or not plan.causes or self.now >= self.lead.since + self.settings.membership.lease_ttl_s:
            return frozenset()
        spared = {member for cause in plan.causes if cause.why is Why.CAPPED for member in cause.who}
        named = {member for cause in plan.causes if cause.why in PUTS_OUT for member in cause.who} - spared
        known = self.view.quarantines or {}
        up = (m.node for m in named if (record := self.records.get(m.node)) and record.member == m)
        return frozenset(node for node in up if node not in known and node not in plan.place)

    @timeless
    def apart(self) -> Mapping[str, frozenset[str]]:
        """Nodes to which a way is known to be cut, each with the others. One end of it stays out, until a test of it passes."""
        found: dict[str, frozenset[str]] = {}
        for node, quarantine in (self.view.quarantines or {}).items():
            record = self.records.get(node)
            for peer in quarantine.beyond(record) if record else ():
                if self.plan and peer in self.plan.place:  # else nobody could test it
                    found[node] = found.get(node, frozenset()) | {peer}
                    found[peer] = found.get(peer, frozenset()) | {node}
        return found

    @timeless
    def found_cut_off(self) -> frozenset[str]:
        """Whose quarantine notes such a way."""
        quarantines = (self.view.quarantines or {}).items()
        return frozenset(node for node, q in quarantines if (record := self.records.get(node)) and q.beyond(record))

    @cached_property
    def unforgiven(self) -> Mapping[Member, Quarantine]:
        """Who is up and not kept out, and has a quarantine that is not forgiven yet."""
        before = self.view.quarantines or {}
        return {
            self.records[node].member: quarantine
            for node, quarantine in before.items()
            if quarantine.strikes and node in self.records and node not in self.held
        }

    def proves_well(self, member: Member) -> bool:
        """Does it train, or could it take a seat at once? Who only waits, or is waited for, has not shown that it is well."""
        if self.plan and member in self.plan.seat_of:
            return self.trained
        return any(record.member == member for record in self.candidates)

    @timeless
    def bits(self) -> str:
        """What decides the job's bits: the fingerprint in its plan, before the first the commonest.

        Found by simulation: when all seats were lost for a moment, the one node with other bits took the job over.
        """
        if self.plan and self.plan.bits:
            return self.plan.bits
        common = Counter(record.bits for record in self.records.values() if record.bits).most_common()
        return min((bits for bits, n in common if n == common[0][1]), default="")

    @timeless
    def wire(self) -> str:
        """What those speak who go on; where nobody does, what most speak. Of a gang all speak the same."""
        going = (record for seat in self.kept if (record := self.record_of(seat)))
        said = next(filter(None, map(versions.wire, going)), "")
        common = [] if said else Counter(filter(None, map(versions.wire, self.records.values()))).most_common()
        return said or min((wire for wire, n in common if n == common[0][1]), default="")

    @cached_property
    def gang(self) -> tuple[str, ...]:
        """The nodes of the newest gang that sealed a step, in rank order: what is newer than the commit is in their vaults."""
        if self.plan is None:
            return ()
        if not self.grown:
            # The gang to which it adds trains on, and what it seals lies with its own.
            before = self.plan.generation - 1
            old = [seat for seat in self.plan.seats if seat.born < self.plan.generation]
            if any((record := self.record_of(seat)) and record.lap and record.lap.generation == before for seat in old):
                return tuple(seat.member.node for seat in old)
        return self.plan.gang if self.plan.gang and not self.settled else self.seated

    @cached_property
    def seated(self) -> tuple[str, ...]:
        """The nodes of the present plan, in rank order."""
        return self.plan.seated if self.plan else ()

    @cached_property
    def settled(self) -> bool:
        """Has the present gang sealed a step? Until then what it went on from lies as the one before has kept it, as far as
        we know: where that is with too few, the workers keep it anew at once, of which nobody is told.

        Found by simulation: a node died, and before the others had made a step the one fell silent that had its shard.
        """
        if self.plan is None or self.sealed_here:
            return self.plan is not None
        made = any(map(step_of, filter(None, self.ranked)))
        return self.trained and not made  # nothing that could be lost; torchrun's workers tell of no steps

    @cached_property
    def sealed_here(self) -> bool:
        """Has a step been sealed in this generation, as its members tell? That stays true whoever is lost afterwards."""
        return self.rows is None or self.made >= self.rows.plan.generation or bool(self.rows.sealed)

    @timeless
    def fates(self) -> tuple[Fate, ...]:
        """One for each seat of the present plan, in rank order. (Of thousands most go on, for which `_fate` is not asked.)"""
        seats = self.plan.seats if self.plan else ()
        fates = list(self.rows.plain) if self.rows else []
        for place in self._doubtful:
            fates[place] = self._fate(seats[place])
        return tuple(fates)

    @timeless
    def _doubtful(self) -> Collection[int]:
        """Places of the seats that may not simply go on, as their own records say, or others'."""
        if self.plan is None or self.rows is None:
            return ()
        if self.plan.phase is Phase.HOLD:
            return range(len(self.plan.seats))
        seat_at = self.plan.seat_at
        suspect = (seat_at[node] for node in (*self.conviction.guilty, *self.held) if node in seat_at)
        return sorted(self.rows.doubtful.union(suspect))

    @timeless
    def amiss(self) -> tuple[int, ...]:
        """Places of the seats that are lost, or that fresh processes keep."""
        return tuple(place for place in self._doubtful if self.fates[place].seat is None or self.fates[place].fresh)

    @timeless
    def missing(self) -> int:
        """How many seats' nodes have no record."""
        return 0 if all(self.ranked) else sum(record is None for record in self.ranked)

    @property
    def lapsed(self) -> bool:
        """Did several members have no record when this node began to lead, or may one have none, as the store had lost all?"""
        if self.lead.formation.planned_at > -inf:
            return self.lead.presence.lapsed
        return self.missing > 1 or self.emptied

    @property
    def emptied(self) -> bool:
        """Had the store lost all leases when this node began to lead?"""
        if self.lead.formation.planned_at > -inf:
            return self.lead.presence.emptied
        return self.plan is not None and (self.plan.again or self.plan.leases_lost)

    @property
    def leases_lost(self) -> bool:
        """May one live of whom the store says nothing, as it had lost all leases? For as long as a lease would last."""
        return self.emptied and self.now < self.lead.since + self.settings.membership.lease_ttl_s

    @property
    def grace(self) -> bool:
        """If so, their leases lapsed with the store, likelier than that they died: each is waited for.

        Found by the scenario all-leases-lapse: when all but one were back, the last one was taken for dead.
        """
        return self.lapsed and self.missing > 0 and self.now < self.grace_until

    @property
    def grace_until(self) -> float:
        """When a new leader takes members without a record for dead, however many they are."""
        return self.lead.since + self.settings.membership.rejoin_s

    @timeless
    def unregistered(self) -> frozenset[Member]:
        """Members whose lease has ended though the gang trains and their neighbours hear them: for a while each may come back.

        Found by a store that lost a third of all requests for ever: a node that trained was put out every few seconds.
        """
        plan, reach = self.plan, self.settings.membership.neighbours
        if plan is None or not self.missing or not self.doing[Work.TRAINING]:
            return frozenset()
        if any(self.doing[work] for work in (Work.STALLED, Work.PARKED, Work.FAILED)):
            return frozenset()
        doubted = {suspect for record in self.records.values() for suspect in record.suspects}
        waits_s = BACK_TTLS * self.settings.membership.lease_ttl_s
        return frozenset(
            seat.member
            for seat in plan.seats
            if seat.beat  # else nobody hears it
            and seat.member.node not in self.records
            and str(seat.member) not in doubted
            and self.now < self.lead.presence.absent.get(seat.member, self.now) + waits_s  # as `lead` adds them up
            and any(node in self.records for node in neighbours(plan, seat.member.node, reach))
        )

    def _fate(self, seat: Seat) -> Fate:
        assert self.plan is not None
        member, record = seat.member, self.records.get(seat.member.node)

        def lost(why: Why, *nodes: str, said: str = "") -> Fate:
            return Fate(seat=None, cause=Cause(why=why, who=(member,), nodes=nodes, said=said))

        if accusers := self.conviction.guilty.get(member.node):
            return lost(Why.SILENT, *accusers)
        if record is None:
            waits = self.grace or member in self.unregistered
            return Fate(seat=seat) if waits else lost(Why.EXPIRED)
        if record.member != member:
            return lost(Why.REBORN, said=str(record.member))
        if member.node in self.held:
            return lost(Why.QUARANTINED, said=self.held[member.node].reason)
        if record.leaving:
            return lost(Why.LEFT)
        if record.generation == self.plan.generation and record.work is Work.FAILED:
            left = record.exit
            said, signal = (left.cause, left.signal) if left else ("its worker failed", 0)
            rank = self.plan.rank_of(member, left.slot) if left else None
            team = self.plan.team_of(rank) if rank is not None else None
            cause = Cause(
                why=Why.FAILED, who=(member,), said=said, signal=signal,
                count=team or 0, of=0 if team is None else self.plan.carriers,
            )  # fmt: skip
            # All begin afresh below exact: to wait until this node has a warm process costs less than two restarts.
            ready = record.warm or not (self.settings.means.in_place or record.problem)
            return Fate(seat=replace(seat, born=self.plan.generation + 1) if ready else None, fresh=True, cause=cause)
        if self.plan.phase is Phase.HOLD and record.work is Work.NONE:
            # Found by simulation: a hold ends workers with a save, and their seat went into a gang before it had new ones; or
            # as that of the workers before, and the plan after that, which came at once, ended those that had just begun.
            if not record.warm:
                return Fate(seat=None, fresh=True, cause=Cause(why=Why.WORKERLESS, who=(member,)))
            return Fate(seat=replace(seat, born=self.plan.generation + 1))
        born = record.born if record.generation == self.plan.generation and record.born else seat.born
        return Fate(seat=replace(seat, born=born))

    @timeless
    def kept(self) -> tuple[Seat, ...]:
        """The seats that go on, in their order."""
        if self.plan and not self._doubtful:
            return self.plan.seats
        return tuple(fate.seat for fate in self.fates if fate.seat)

    def keeps(self, member: Member) -> bool:
        """Does its seat go on?"""
        place = self.plan.seat_at.get(member.node) if self.plan else None
        seat = self.fates[place].seat if place is not None else None
        return seat is not None and seat.member == member

    @timeless
    def candidates(self) -> tuple[Record, ...]:
        """Who could take a seat now, by name."""
        ready = filter(self.ready, self._seatless)
        return tuple(sorted(ready, key=lambda record: (record.member.node, record.member.incarnation)))

    @property
    def _seatless(self) -> Iterable[Record]:
        """Among whom those are to be found who could take a seat: of a plan that is held also among those who lose theirs."""
        plan, records = self.plan, self.records
        if plan is None:
            return records.values()
        alone = len(records) == len(plan.seats) and not self.missing  # who is seated is there, and nobody else
        others = () if alone else tuple(map(records.__getitem__, filterfalse(plan.seat_at.__contains__, records)))
        if plan.phase is Phase.HOLD:
            lost = (r for fate, r in zip(self.fates, self.ranked, strict=True) if r and fate.seat is None)
            return (*others, *lost)  # (of another life's record there is none among those that keep theirs)
        if self._same_lives:
            return others
        reborn = (r for s, r in zip(plan.seats, self.ranked, strict=True) if r and r.member is not s.member)
        return (*others, *reborn)

    def ready(self, record: Record) -> bool:
        """Warm, willing and trusted, and without a seat that it keeps: who has lost its own is not one of these, or is held."""
        member, node = record.member, record.member.node
        if not record.warm or record.leaving or self.keeps(member):
            return False
        readmit_s = self.settings.membership.lease_ttl_s + 1.0
        doubted = self.now < self.lead.custody.doubted.get(member, -inf) + readmit_s
        trusted = node not in self.held and node not in self.conviction.guilty and not doubted
        if node in self.apart and not self.apart[node].isdisjoint(kept.member.node for kept in self.kept):
            return False
        fits = record.bits == self.bits or self.settings.exact != "require"
        return trusted and fits and versions.wire(record) == self.wire

    @timeless
    def coming(self) -> bool:
        """Is somebody in sight who has no seat, and gets ready?"""
        return any(
            not (record.warm or record.problem or record.leaving or self.keeps(record.member) or node in self.held)
            for node, record in self.records.items()
        )

    def record_of(self, seat: Seat) -> Record | None:
        """What this seat's node says of itself. (Another life of it says nothing under this plan.)"""
        return self.records.get(seat.member.node)

    def vault_of(self, seat: Seat) -> str:
        """Where this seat's vault is now, as far as is known."""
        record = self.record_of(seat)
        return record.vault if record and record.member == seat.member and record.vault else seat.vault

    @timeless
    def newest(self) -> int:
        """The newest step that the seats have told of, or that is on disk."""
        return max(self.view.committed, max(map(step_of, filter(None, self.ranked)), default=0))

    @property
    def progressed(self) -> bool:
        """Have the seats made steps that are not on disk, or does a log of theirs say so?"""
        plan = self.plan
        told = any(r.milestone for r in self.ranked if plan and r and r.generation == plan.generation)
        return told or self.newest > self.view.committed

    @property
    def behind(self) -> bool:
        """Have the seats made steps that are not on disk, though the runtime could save them?"""
        if not self.settings.means.commits:
            return False
        return any(record is not None and self.view.committed < record.step for record in self.ranked)

    @property
    def spares(self) -> tuple[Record, ...]:
        """What the plan's spares say of themselves, as long as they are the same lives."""
        spares = self.plan.spares if self.plan else ()

        return tuple(record for spare in spares if (record := self.record_of(spare)) and record.member == spare.member)

    @timeless
    def doing(self) -> Mapping[Work, tuple[Record, ...]]:
        """What the seats' nodes report under the present generation, in rank order. (One pass over all, for every rule.)"""
        return self.rows.doing() if self.rows else dict.fromkeys(Work, ())

    @cached_property
    def loading(self) -> bool:
        """Is somebody's program still on its way to its rank, in this generation?"""
        return any(record.phase == LOADING for record in self.doing[Work.JOINING])

    @cached_property
    def restoring(self) -> bool:
        """Is state put back into somebody's workers, in this generation, and does it come nearer?"""
        return any(record.restores for record in self.doing[Work.JOINING])

    @cached_property
    def grown(self) -> bool:
        """Is there nobody whom the plan adds to a gang, or have all of those been there? Who trains in the present gang has
        been through a collective with everybody; that stays true whoever is lost afterwards.

        Found by simulation: a gang formed, and a worker failed at once. The leader had seen no record that told of the gang,
        though its own workers had trained in it, and left all newcomers behind. Found by reading: a leader in its next life did
        so to one that had failed by then.
        """
        if self.plan is None or not self.plan.grows or self.lead.formation.grown == self.plan.generation:
            return True
        # A newcomer that was given state which is newer than the disk's had met all others by then.
        new = (r for r in self.doing[Work.FAILED] if self.plan.seat_of[r.member].born == r.generation)
        if self.formed == self.plan.generation or any(r.step > self.plan.resume for r in new):
            return True
        return bool(self.doing[Work.TRAINING] or self.doing[Work.STALLED]) or self.sealed_here

    @cached_property
    def on_their_way(self) -> frozenset[Member]:
        """Those whom the plan adds to a gang, and who are not there yet, as far as is known: the gang trains without them. To a
        leader without a seat who has left the larger gang, as others of it have, was there. (One with a seat knows by its own.)

        Found by simulation: a leader in its next life took who had trained in that gang for one that still loads.
        """
        plan = self.plan
        if plan is None or self.grown:
            return frozenset()
        there = {record.member for record in self.doing[Work.JOINING] if record.phase == MEETING}
        left = self.doing[Work.PARKED]
        if self.me not in plan.seat_of and any(record.born < plan.generation for record in left):
            there.update(record.member for record in left)
        return frozenset(seat.member for seat in plan.seats if seat.born == plan.generation) - there

    @property
    def still_trains(self) -> bool:
        """Does the gang to which the plan adds train on still, as far as is known?"""
        plan = self.plan
        if plan is None or self.grown:
            return False
        old = (*self.doing[Work.JOINING], *self.doing[Work.PARKED])
        parted = (record for record in old if record.phase == MEETING or record.work is Work.PARKED)
        return not any(record.born < plan.generation for record in parted)

    @cached_property
    def left_behind(self) -> frozenset[Member]:
        """Newcomers that are left out where the gang has to form again before they have loaded."""
        others = sum(seat.member not in self.on_their_way for seat in self.kept)
        return self.on_their_way if others >= self.settings.membership.min_nodes else frozenset()

    @property
    def staying(self) -> tuple[Seat, ...]:
        """The seats that go on where the gang parts now, in their order."""
        return tuple(seat for seat in self.kept if seat.member not in self.left_behind)

    @property
    def stalled_before_it_grew(self) -> tuple[Record, ...]:
        """Who waits for others in the gang that is to grow, and trains on."""
        return tuple(r for r in self.gang_before if r.stall and r.stall.waiting and r.stall.phase != MEETING)

    @property
    def broken_before_it_grew(self) -> bool:
        """Has somebody of it left it, though those are not there yet for whom it would part?"""
        return bool(self.on_their_way) and any(record.phase == MEETING for record in self.gang_before)

    @property
    def gang_before(self) -> tuple[Record, ...]:
        """Those of the gang to which the plan adds."""
        plan = self.plan
        if plan is None or not plan.grows:
            return ()
        return tuple(record for record in self.doing[Work.JOINING] if record.born < plan.generation)

    @property
    def excused(self) -> bool:
        """Do those who wait in a collective wait for one who waits outside of the gang? That one has a deadline of its own. Who
        has left a broken group is excused by nobody.
        """
        inside = (*self.doing[Work.TRAINING], *self.doing[Work.STALLED], *self.gang_before)
        return not self.doing[Work.PARKED] and any(record.phase == OUTSIDE for record in inside)

    @property
    def patient_until(self) -> float:
        """Until when the one that they waited for may only be on its way to them, if it is back from outside of the gang: for
        as long as their own phase may take. Who has left a broken group waits for nobody.
        """
        stalled = (*self.doing[Work.STALLED], *self.stalled_before_it_grew)
        budgets = [record.stall.budget_s for record in stalled if record.stall]
        return self.lead.stalls.excused_at + max(budgets, default=0.0) if not self.doing[Work.PARKED] else -inf

    def at_work(self, *works: Work) -> bool:
        """Does every seat's node report one of these under the present generation?"""
        return self.plan is not None and sum(len(self.doing[work]) for work in works) == len(self.plan.seats)

    def arrange(self, fates: tuple[Fate, ...], *, grow: bool = True, without: Collection[str] = ()) -> tuple[Seat, ...]:
        """Seats for the next plan: survivors in their order, candidates but these first in the gaps, then behind."""
        generation = self.view.generation + 1
        membership = self.settings.membership
        if self.plan and self.plan.phase is Phase.HOLD and self.apart:
            # Of two ends the one stays out that was found cut off. Found by chaos.spans: it took the seat of one that was well.
            here = sorted((fate.seat.member.node for fate in fates if fate.seat), key=self.found_cut_off.__contains__)
            whole = split(here, {node: self.apart.get(node, ()) for node in here})
            fates = tuple(f if f.seat and f.seat.member.node in whole else replace(f, seat=None) for f in fates)
        waiting = [seat_for(r, generation) for r in self.candidates if r.member.node not in without]
        kept = sum(fate.seat is not None for fate in fates)
        room = membership.max_nodes - kept
        # Spares are held back only from growth: a gap in the gang is what they are there for.
        gaps = len(fates) - kept
        taken = min(
            len(waiting), room, max(gaps, len(waiting) - membership.spares if grow else 0, membership.min_nodes - kept)
        )
        waiting = waiting[: max(taken, 0)]
        seats: list[Seat] = []
        for fate in fates:
            if fate.seat:
                seats.append(fate.seat)
            elif waiting:
                seats.append(waiting.pop(0))
        seats.extend(waiting)
        ranks = 0
        fitting = []
        for seat in seats:  # never more ranks than lanes: a rank without a lane has nothing to do
            if ranks + seat.slots <= self.settings.lanes * self.settings.team:
                fitting.append(seat)
                ranks += seat.slots
        return tuple(fitting)

    def write(
        self,
        phase: Phase,
        seats: tuple[Seat, ...],
        *causes: Cause,
        rung: Rung = Rung.START,
        strike: Strike | None = None,
        exit_code: int | None = None,
        pairs: tuple[Pair, ...] = (),
        waited: int | None = None,
        saves: bool = False,
    ) -> Plan:
        """The next plan. It says where each vault is now: one may have come back at another port since the last.

        A hold or a probe hands on that the vaults are distrusted: else the next gang would form from them. And each plan, that
        somebody may live whose lease the store has lost: else the next leader would take that one for dead.
        """
        rung = Rung.RELOAD if self.distrusted else rung
        seats = tuple(self._found_now(seat) for seat in seats)
        here = {
            seat.member.node for seat in seats
        }  # a stop has seats of lives that are over: the next is no spare beside them
        same = self.gang == tuple(seat.member.node for seat in seats)
        before = self.plan.waited if self.plan else -1
        spares = tuple(seat_for(r, 0) for r in self.candidates if r.member.node not in here)
        offers = (record.endpoint for seat in seats if (record := self.record_of(seat)))  # an agent may be down
        return Plan(
            generation=self.view.generation + 1,
            phase=phase,
            seats=seats,
            spares=spares,
            resume=self.view.committed,
            rung=rung,
            lanes=self.settings.lanes,
            team=self.settings.team,
            endpoint=next((endpoint for endpoint in offers if endpoint), self._met_before(seats)),
            causes=causes[:KEPT],
            strike=None if strike and self.newest > strike.step else strike,  # the job has got on since
            exit_code=exit_code,
            bits=self.bits,
            pairs=pairs,
            backend=self.plan.backend if self.plan else "",
            fallbacks=self.plan.fallbacks if self.plan else 0,
            usual_s=self.plan.usual_s if self.plan else 0.0,
            gang=() if same else self.gang,
            waited=before if waited is None else waited,
            saves=saves,
            leases_lost=self.leases_lost and any(node not in self.records for node in self.gang),
        )

    def _met_before(self, seats: tuple[Seat, ...]) -> str:
        """Where the present gang met, if any of it goes on: for when nobody's record offers a place.

        Found by chaos.explore: a node's first record came once more, late, as it took the office. It offered no place yet.
        """
        plan = self.plan
        return plan.endpoint if plan and {seat.member for seat in seats} & plan.seat_of.keys() else ""

    def _found_now(self, seat: Seat) -> Seat:
        """This seat with where its node's daemon and vault are now: who is let in knows them by the plan alone."""
        record = self.record_of(seat)
        beat = record.beat if record and record.member == seat.member and record.beat else seat.beat
        vault = self.vault_of(seat)
        return seat if (vault, beat) == (seat.vault, seat.beat) else replace(seat, vault=vault, beat=beat)

    def train(
        self, seats: tuple[Seat, ...], *causes: Cause, rung: Rung, strike: Strike | None = None, saves: bool = False
    ) -> Plan:
        """The next plan with these seats, or a hold if they are too few."""
        need, causes = self.settings.membership.min_nodes, (*causes, *self.unlike(seats))
        if not self.settings.means.in_place:
            return self._train_afresh(seats, causes, rung, strike)
        if len(seats) < need:
            few = Cause(why=Why.TOO_FEW, count=len(seats), of=need)
            return self.write(Phase.HOLD, seats, *causes, few, rung=rung, strike=strike)
        rung = Rung.RELOAD if self.distrusted else rung
        if rung >= Rung.RESTART:
            seats = tuple(replace(seat, born=self.view.generation + 1) for seat in seats)
        return self.write(Phase.TRAIN, seats, *causes, rung=rung, strike=strike, saves=saves)

    def _train_afresh(
        self, seats: tuple[Seat, ...], causes: tuple[Cause, ...], rung: Rung, strike: Strike | None
    ) -> Plan:
        """Likewise, where no worker can go on in another gang: each plan has fresh processes on all nodes, whoever was lost."""
        need, kinds = self.settings.membership.min_nodes, [cause.why.value for cause in causes]
        rung = Rung.START if rung is Rung.START or orderly(kinds) else Rung.RESTART
        if len(seats) < need:
            few = Cause(why=Why.TOO_FEW, count=len(seats), of=need)
            return self.write(Phase.HOLD, seats, *causes, few, rung=rung, strike=strike)
        seats = tuple(replace(seat, born=self.view.generation + 1) for seat in seats)
        return self.write(Phase.TRAIN, seats, *causes, rung=rung, strike=strike)

    def suffered(self, record: Record) -> bool:
        """Has a node's worker failed of a peer's end alone, as it says? A script does, as it cannot leave its gang; it says
        nothing of its node. Found by simulation: nodes were kept out for their neighbours' deaths.
        """
        if record.exit is None or (self.settings.means.in_place and record.exit.slot is None):
            return False  # an agent that starts no processes is its node's
        return of_exit(record.exit).sign is Sign.PEER_GONE

    def blames_its_node(self, record: Record) -> bool:
        """Does a worker's end count against its node? Where all park that are well, so does one that says that a peer is gone
        and that ended alone: a card that drops its connections is one node's, and the others could go on without it.
        """
        return not self.suffered(record) or (self.settings.means.in_place and len(self.amiss) == 1)

    @property
    def lasted(self) -> bool:
        """Has a gang that tells no steps trained for so long that it has got on? What failed before it is then over."""
        if self.settings.means.commits or self.newest or self.plan is None or self.plan.phase is not Phase.TRAIN:
            return False
        return self.lead.formation.planned_at + self.settings.recovery.steady_s <= self.now

    def unlike(self, seats: tuple[Seat, ...]) -> tuple[Cause, ...]:
        """Which of those that these seats let in compute other bits than the job, where that is to be said."""
        if self.settings.exact != "warn":
            return ()
        before = self.plan.seat_of if self.plan else {}
        new = (record for seat in seats if seat.member not in before and (record := self.record_of(seat)))
        nodes = sorted(record.member.node for record in new if record.bits and record.bits != self.bits)
        return (Cause(why=Why.UNLIKE, nodes=tuple(nodes)),) if nodes else ()

    @cached_property
    def trained(self) -> bool:
        """Has every seat got through the first collective of this generation?"""
        if self.plan is None or self.plan.phase is not Phase.TRAIN:
            return False
        if self.lead.formation.formed != self.plan.generation and len(self.doing[Work.PARKED]) == len(self.plan.seats):
            return False  # all have left it again before
        there = sum(
            len(self.doing[work]) for work in (Work.TRAINING, Work.STALLED, Work.PARKED, Work.DONE, Work.FAILED)
        )
        return there + len(self.unregistered) == len(self.plan.seats)

    @property
    def distrusted(self) -> bool:
        """Is what the vaults keep under suspicion? It is until a gang has trained from the disk."""
        return self.plan is not None and self.plan.rung is Rung.RELOAD and not self.trained

    @cached_property
    def deadline(self) -> float:
        """When the present rung has had its time, once its programs have loaded, which may take as long as at a first start,
        and no more state comes nearer, which takes as long as its size says. A gang that was to grow begins to form when it
        has parted.

        Found by reading: a state that took longer to copy than `recovery.reform` cost a healthy gang a probe, then all its
        processes, and then the same again.
        """
        recovery = self.settings.recovery
        limit = {
            Rung.START: recovery.start_s,
            Rung.REFORM: recovery.reform_s,
            Rung.REPLACE: recovery.replace_s,
            Rung.RESTART: recovery.restart_s,
            Rung.RELOAD: recovery.reload_s,
        }
        rung_s = limit[self.plan.rung if self.plan else Rung.START]
        if self.loading:
            return self.lead.formation.planned_at + max(rung_s, recovery.start_s)
        begun = max(self.lead.formation.planned_at, self.lead.formation.loaded_at, self.lead.formation.parted_at)
        restored_at = self.now if self.restoring else self.lead.formation.restored_at
        return max(begun, restored_at) + rung_s

    @property
    def stop_due(self) -> float:
        """Until when a job that is to stop may be mended first, to save; for ever where none is to."""
        return self.lead.ends.stop_at + self.settings.recovery.drain_s

    @cached_property
    def settled_at(self) -> float:
        """When nobody new will have come for long enough."""
        return max(self.lead.presence.ready_at, self.lead.since) + self.settings.membership.settle_s


def seat_for(record: Record, born: int) -> Seat:
    """A seat for whoever says this of itself."""
    return Seat(
        member=record.member,
        born=born,
        slots=record.slots,
        beat=record.beat,
        echo=record.echo,
        vault=record.vault,
        probe=record.probe,
    )


TIMELESS = frozenset(name for name, each in vars(Scene).items() if isinstance(each, timeless))
