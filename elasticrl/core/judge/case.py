"""The case before the judge: all evidence, sorted once into what it can be. The rules only read it.

The one idea: a fact is worth what the facts around it leave of it. What was survived, what came after the end, and what a log
claims against somebody who is seen at work, is no cause. A log may hold a million lines that look like faults: what a fact is
compared with is found by its rank, clock or number, never by a look at all others.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import inf

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import HEALTH, NOISE, SAVE, Evidence, Kind, Sign, mistaken
from elasticrl.contract.verdict import Confidence, Known
from elasticrl.core.judge.meanings import (
    DISKS,
    EXPLAINS,
    GOING_ON,
    HARD,
    MEANINGS,
    PLAIN,
    SNAPSHOTS,
    TROUBLE,
    UNCLAIMED,
    WAITS,
    WATCHDOGS,
)
from elasticrl.core.judge.parting import Parted, part

MOVED_S = 2.0  # who was waiting so shortly before it was seen elsewhere has moved on: it is slow, not stuck
LATE_S = 2.0  # what came this long after the first wait ended is a consequence of the end


@dataclass(frozen=True)  # no slots: what follows is computed once
class Case:
    """The evidence, sorted into what it can be."""

    evidence: tuple[Evidence, ...]
    facts: Known

    @cached_property
    def serious(self) -> tuple[Evidence, ...]:
        """All but noise."""
        return tuple(fact for fact in self.evidence if fact.sign not in NOISE)

    @cached_property
    def waits(self) -> tuple[Evidence, ...]:
        """What the victims say."""
        return tuple(fact for fact in self.evidence if fact.sign in WAITS)

    @cached_property
    def waiting(self) -> frozenset[int]:
        """The ranks that waited."""
        named = {rank for fact in self.evidence if fact.sign is Sign.WAITED for rank in fact.ranks}
        return frozenset(named | {fact.rank for fact in self.waits if fact.rank is not None})

    @cached_property
    def causes(self) -> tuple[Evidence, ...]:
        """What can be a cause, without what was survived and what came after the end."""
        return tuple(
            f
            for f in self.evidence
            if f.sign in MEANINGS
            and not self.survived(f)
            and not self.late(f)
            and self.believed(f)
            and self.fits(f)
            and not (self.plain and f.source == HEALTH and f.kind in {Kind.DISK, Kind.LIMIT})
        )

    @cached_property
    def plain(self) -> bool:
        """Whether it was seen how the gang was broken, in a way that no full disk or limit of a machine explains."""
        return self.ways or self.parted is not None or any(witnessed(f) and f.sign in PLAIN for f in self.evidence)

    @cached_property
    def ways(self) -> bool:
        """Whether the way between some nodes was found broken, or slow."""
        return any(f.kind is Kind.PROBE and any(f.sign in signs for signs, _ in TROUBLE) for f in self.evidence)

    @cached_property
    def befell(self) -> Mapping[str | None, Sequence[Evidence]]:
        """What was seen to befall each node and its ranks: ends, silences, who stands still or elsewhere."""
        told = (f for f in self.evidence if f.kind in HARD and f.kind is not Kind.PROBE and witnessed(f))
        found: dict[str | None, list[Evidence]] = {}
        for fact in (*(f for f in told if f.sign in MEANINGS or f.sign is Sign.ABORTED), *self.away.values()):
            found.setdefault(self.home(fact), []).append(fact)
        return found

    def home(self, fact: Evidence) -> str | None:
        """The node that it speaks of."""
        return fact.node or (None if fact.rank is None else self.facts.nodes.get(fact.rank))

    def fits(self, fact: Evidence) -> bool:
        """Whether it can explain what was seen to befall its node. A disk that is full stops no dataloader, and nothing that a
        program prints silences its node. No machine makes a program raise what only a mistake of its own does.
        """
        here = self.befell.get(self.home(fact), ())
        if fact.kind not in HARD and fact.rank is None and fact.sign in EXPLAINS:
            saving = fact.sign in DISKS
            told = (f for f in here if not mistaken(f))
            fitting = (f.sign in EXPLAINS[fact.sign] or (saving and f.phase == SAVE) for f in told)
            return not self.befell or any(fitting)
        claimed = not witnessed(fact) and MEANINGS[fact.sign].soft and fact.sign is not Sign.HOST_MEMORY
        if claimed and fact.sign in EXPLAINS and any(mistaken(f) for f in here if f.rank == fact.rank):
            return False
        return not (claimed and here) or any(f.sign not in UNCLAIMED for f in here)

    @cached_property
    def accused(self) -> frozenset[int]:
        """Ranks that hard facts speak against."""
        against = {*MEANINGS, Sign.LEFT}
        hard = (f for f in self.evidence if f.kind in HARD and f.source and f.sign in against)
        named = frozenset(rank for f in hard for rank in ((f.rank,) if f.rank is not None else f.ranks))
        return named | self.aborted | frozenset(self.away) | frozenset(self.parted.odd if self.parted else ())

    @cached_property
    def aborted(self) -> frozenset[int]:
        """Ranks that were seen to end by abort(), and not because their watchdog had waited for others."""
        told = frozenset(
            f.rank for f in self.evidence if f.sign is Sign.ABORTED and witnessed(f) and f.rank is not None
        )
        return told - {f.rank for f in self.evidence if f.kind in WATCHDOGS}

    @cached_property
    def parted(self) -> Parted | None:
        """Where the recorders of the ranks differ, if they do."""
        return part(self.evidence)

    @cached_property
    def seen_waiting(self) -> frozenset[int]:
        """Ranks that were seen in a collective, whatever their logs say."""
        return frozenset(f.rank for f in self.waits if f.kind in GOING_ON and witnessed(f) and f.rank is not None)

    @cached_property
    def away(self) -> Mapping[int, Evidence]:
        """Who was seen outside of collectives while most others were seen in one. When most are elsewhere, that a few wait
        proves nothing about anybody.
        """
        found = {
            f.rank: f for f in self.evidence if f.sign is Sign.ELSEWHERE and f.rank is not None and not self.moved(f)
        }
        there = {f.rank for f in self.waits if f.kind in SNAPSHOTS and f.rank is not None} - set(found)
        return found if found and there and len(found) <= len(there) else {}

    def moved(self, fact: Evidence) -> bool:
        """Whether its rank was waiting a moment before: between two collectives of a slow way anybody is seen elsewhere."""
        waited = self._beaten.get((fact.rank, fact.clock), ())
        return any(fact.when is not None and 0.0 <= fact.when - when <= MOVED_S for when in waited)

    @cached_property
    def _beaten(self) -> Mapping[tuple[int | None, str], Sequence[float]]:
        """When each rank's beats said that it waits, by the clock that they are told by."""
        found: dict[tuple[int | None, str], list[float]] = {}
        for fact in self.waits:
            if fact.kind is Kind.BEAT and fact.when is not None:
                found.setdefault((fact.rank, fact.clock), []).append(fact.when)
        return found

    @cached_property
    def groups(self) -> Mapping[str, list[Evidence]]:
        """Waits by process group. What bears no group is compared only if no rank shows two numbers at once ("" then)."""
        named: dict[str, list[Evidence]] = {}
        placed = (*self.waits, *(fact for fact in self.evidence if fact.sign is Sign.BEHIND))
        for fact in placed:
            if fact.group:
                named.setdefault(fact.group, []).append(fact)
        works = _works(named)
        groups: dict[str, list[Evidence]] = {}
        loose: list[Evidence] = []
        for fact in placed:
            if fact.rank is None:
                continue
            group = fact.group or works.get((fact.rank, fact.seq))
            if group:
                groups.setdefault(group, []).append(fact)
            if not fact.group and fact.seq is not None:
                loose.append(fact)
        per_rank: dict[int | None, set[int | None]] = {}
        for fact in loose:
            per_rank.setdefault(fact.rank, set()).add(fact.seq)
        # Ranks whose lines found different groups must not meet again under "".
        apart = {works.get((fact.rank, fact.seq)) for fact in loose} - {None}
        if len(apart) <= 1 and all(len(seqs) == 1 for seqs in per_rank.values()):
            groups.setdefault("", []).extend(loose)
        return groups

    def survived(self, fact: Evidence) -> bool:
        """Whether its rank went on working after it: it waited later than this, in a wait that began after this."""
        meaning = MEANINGS[fact.sign]
        if fact.rank is None:
            return False
        if (
            not witnessed(fact)
            and fact.rank in self.seen_waiting
            and (meaning.soft or meaning.confidence is Confidence.LOW)
        ):
            return True  # it goes on, and keeps up with the others: its log is noise, however often it says so
        if not meaning.soft or fact.when is None:
            return False
        return self._begun.get((fact.rank, fact.clock), -inf) > fact.when + LATE_S

    @cached_property
    def _begun(self) -> Mapping[tuple[int | None, str], float]:
        """When each rank's latest wait began, by the clock that it is told by."""
        found: dict[tuple[int | None, str], float] = {}
        for wait in self.waits:
            if wait.when is not None:
                who, began = (wait.rank, wait.clock), wait.when - (wait.elapsed_ms or 0) / 1000
                found[who] = max(began, found.get(who, began))
        return found

    def late(self, fact: Evidence) -> bool:
        """Whether it came only after a wait had ended, and so is part of the tear-down. That a wait has ended is what a log
        claims: nothing that was seen since is made light of for that.
        """
        if fact.when is None or fact.kind is Kind.XID or witnessed(fact):
            return False
        return fact.when > self._ended.get(fact.clock, inf) + LATE_S

    @cached_property
    def _ended(self) -> Mapping[str, float]:
        """When the first wait had ended, by each clock."""
        found: dict[str, float] = {}
        for wait in self.waits:
            if wait.when is not None and wait.kind not in GOING_ON:
                found[wait.clock] = min(wait.when, found.get(wait.clock, wait.when))
        return found

    def believed(self, fact: Evidence) -> bool:
        """A log's claim counts less where hard facts name somebody else: an innocent rank may be noisy.

        Of two that brought different sizes gloo ends the one that brought less, who may be any of the two: recorders know.
        """
        if fact.kind is Kind.GLOO_ERROR and fact.sign is Sign.MISMATCH and self.parted is not None:
            return False
        if (
            self.parted is not None
            and not witnessed(fact)
            and fact.rank is not None
            and fact.rank not in self.parted.odd
        ):
            return not MEANINGS[fact.sign].soft  # though it may have been the one that gloo ended
        if fact.kind in HARD or fact.rank is None or not (self.accused or self.silenced or self.ways):
            return True
        return fact.rank in self.accused or fact.node in self.silenced or not MEANINGS[fact.sign].soft

    @cached_property
    def silenced(self) -> frozenset[str]:
        """Nodes that were seen to go, or to be out of order."""
        told = (f for f in self.evidence if f.sign in {Sign.NODE_GONE, Sign.UNHEARD} and witnessed(f))
        ill = (f for f in self.evidence if f.source == HEALTH and f.sign in MEANINGS)
        return frozenset(f.node for f in (*told, *ill) if f.node)

    def known(self, names: tuple[str, ...], rank: int | None) -> tuple[str, ...]:
        """Of the names that a log gives, those of the gang's nodes, else where the rank runs that gave them. (A host may call
        itself what it likes; where nothing is known of the gang, that is all there is.)
        """
        ours = frozenset(self.facts.nodes.values())
        if not ours or not names:
            return names
        return tuple(name for name in names if name in ours) or self.nodes_of(() if rank is None else (rank,))

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Where ranks run, as far as that is known."""
        seen = {fact.rank: fact.node for fact in self.evidence if fact.rank is not None and fact.node}
        return tuple(sorted({node for rank in ranks if (node := self.facts.nodes.get(rank) or seen.get(rank))}))


def _works(named: Mapping[str, Sequence[Evidence]]) -> Mapping[tuple[int | None, int | None], str]:
    """The group that a rank's lines name for a work: by its number, or as the one after the last completed."""
    found: dict[tuple[int | None, int | None], str] = {}
    for group, facts in named.items():
        for fact in facts:
            after_last = None if fact.last_completed is None else fact.last_completed + 1
            for seq in {fact.seq, after_last} - {None}:
                found.setdefault((fact.rank, seq), group)
    return found


def witnessed(fact: Evidence) -> bool:
    """Whether somebody of ours saw it, rather than that a log claims it."""
    return (fact.kind in HARD or fact.source == HEALTH) and fact.line_no is None


def earliest(facts: Iterable[Evidence]) -> Evidence:
    """By the clock where all have the same one, else in the order found."""
    listed = list(facts)
    if len({fact.clock for fact in listed}) == 1 and all(fact.when is not None for fact in listed):
        return min(listed, key=lambda fact: fact.when or 0.0)
    return listed[0]


def after(fact: Evidence, other: Evidence, seconds: float) -> bool:
    """Whether a fact is known to be later than another one by more than this."""
    if fact.when is None or other.when is None or fact.clock != other.clock:
        return False
    return fact.when > other.when + seconds
