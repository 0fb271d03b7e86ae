"""What befell a job so far, for whoever asks how it is: since when it runs, its faults in number and the newest in words, the
nodes that went without a word.

The one idea: one key of the store. The leader writes it when a fault is over, again with its incident, when a fault outlasts
its first plan, when nodes come and go, and at a pause. Where the leader does not, a deputy does. No decision reads it, so it
may be late, or lost with the store. A new leader goes on with what the last one wrote. What a fault cost is also told by those
few who may have seen more of it, and the highest counts: who hears of a death by the plan does not know how long that took.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from elasticrl.base.value import dataclass
from elasticrl.contract.cause import ORDERLY, names
from elasticrl.contract.model import Intent, Member, Phase, Plan, Record, View
from elasticrl.contract.verdict import Fault, Verdict
from elasticrl.shell import keys
from elasticrl.status.recovery import Done, Stages
from elasticrl.store.protocol import Entry, Put, Store, StoreError, Unchanged

LEFT = 64  # names of nodes that are kept
PAUSES_S = (0.0, 1.0, 5.0, 30.0, 120.0)  # before each attempt to write it down: the store may be what broke


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A fault that is over, or not yet.

    Example: Broken(at=1764000000.0, verdict=verdict, said="n03: rank 1 died: signal 9 (SIGKILL)", generation=15, seconds=0.21)
    """

    at: float  # by the wall clock
    verdict: Verdict  # what it was, as far as is known
    said: str  # in words
    generation: int  # that it led to
    broke: int = 0  # the one in which there was the first sign of it
    seconds: float | None = None  # without a sealed step; None: not known, or not yet
    steps: int | None = None  # lost, and made again; None: not known
    rung: str = ""  # what was done about it; "": not known
    lasts: bool = False  # no gang has sealed a step since

    @classmethod
    def of(cls, verdict: Verdict, *, at: float, generation: int, broke: int, lasts: bool = False) -> "Broken":
        """By its verdict, of which the grounds are left out: its incident has them."""
        bare = replace(verdict, because=(), against=())
        return cls(at=at, verdict=bare, said=verdict.said, generation=generation, broke=broke, lasts=lasts)

    def same(self, other: "Broken") -> bool:
        """Is the other one this one told anew, one before it, or how this one ended?"""
        if self.lasts:
            return other.broke <= self.generation
        return other.broke < self.generation and other.generation <= self.generation

    def joined(self, later: "Broken") -> "Broken":
        """With what came before it was over; or in the words of who knows more by then, where they are about the same."""
        mine, other = self.verdict, later.verdict
        if later.generation == self.generation:
            return replace(dearer(self, later), lasts=later.lasts)
        if mine.fault != other.fault or not set(mine.nodes).isdisjoint(other.nodes):
            return dearer(later, self)
        verdict = replace(
            other, nodes=(*mine.nodes, *other.nodes), ranks=tuple(dict.fromkeys((*mine.ranks, *other.ranks)))
        )
        return dearer(replace(later, verdict=verdict, said=f"{self.said}; {later.said}"), self)

    def until(self, done: Done) -> "Broken":
        """It, and how it ended."""
        return replace(
            self, generation=done.generation, seconds=done.total_s, steps=done.lost, rung=done.rung, lasts=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A node that has gone without a word: nobody has drained it, and it is not back.

    Example: Missing(member=Member(node="n03", incarnation=1), at=1764000000.0)
    """

    member: Member
    at: float  # when that was seen, by the wall clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Who has come and gone since the leader looked last.

    Example: Moves(went=(Member(node="n03", incarnation=1),), there=frozenset({"n00", "n01"}))
    """

    went: tuple[Member, ...] = ()  # without a word
    left: tuple[str, ...] = ()  # in order
    came: tuple[str, ...] = ()
    there: frozenset[str] = frozenset()  # who is there now
    begun: bool = False  # the job has begun again after its end
    stopped: float | None = None  # when it was saved last before that, by the wall clock
    paused: bool = False  # an operator has it wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Of one job. Example: Past(began=1763990000.0, faults=2, last=Broken(...))"""

    began: float  # by the wall clock
    stopped_s: float = 0.0  # of the time since, for how long it was stopped, or paused
    paused: float = 0.0  # since when it is, by the wall clock; 0: it is not
    resumed: float = 0.0  # when the newest pause ended
    faults: int = 0
    last: Broken | None = None
    missing: tuple[Missing, ...] = ()  # the oldest first
    left: tuple[str, ...] = ()  # nodes that left in order, and are not back
    most: int = 0  # nodes that were there at once

    def after(self, broken: Broken) -> "Past":
        """With one more; or the newest one told anew, by who knows more of it."""
        if self.last is None or not self.last.same(broken):
            return replace(self, faults=self.faults + 1, last=broken)
        if broken.generation < self.last.generation:
            return self  # an older one told anew is not the last
        if broken.lasts and not self.last.lasts:
            return self  # it is over
        if self.last.lasts and broken.seconds is None:
            return replace(self, last=self.last.joined(broken))
        return replace(self, last=dearer(broken, self.last))

    def over(self, done: Done, plan: Plan | None, now: float) -> "Past":
        """With the end of a fault, as who leads has timed it; its incident will tell more. `plan`: that answered it."""
        last, verdict = self.last, plan.verdict if plan else None
        if last is not None and last.lasts and done.broke <= last.generation <= done.generation:
            return replace(self, last=last.until(done))
        if verdict is None or verdict.fault is Fault.UNKNOWN:
            return self
        told = Broken.of(verdict, at=now - done.total_s, generation=done.generation, broke=done.broke)
        return self.after(told.until(done))

    def cost(self, broken: Broken) -> "Past":
        """With the newest at what it cost somebody else, if that was more."""
        if self.last is None or broken.generation != self.last.generation:
            return self
        return replace(self, last=dearer(self.last, broken))

    def moved(self, moves: Moves, now: float) -> "Past":
        """With who has come and gone. A job that begins again, or is paused, has no fault that lasts."""
        there, last = len(moves.there), self.last
        return replace(
            self._stood(moves, now),
            last=replace(last, lasts=False) if last and (moves.begun or moves.paused) else last,
            missing=self._missing(moves, now),
            left=(*(node for node in self.left if node not in moves.there), *moves.left)[-LEFT:],
            most=there if moves.begun else max(self.most, there),
        )

    def _missing(self, moves: Moves, now: float) -> tuple[Missing, ...]:
        """Who came back is missing no more. One that nobody knew takes the place of whoever is missing longest: nodes of a
        scheduler come under other names.
        """
        known = {*self.left, *(each.member.node for each in self.missing)}
        fresh = sum(name not in known for name in moves.came)
        still = [each for each in self.missing if each.member.node not in moves.there][fresh:]
        gone = [member for member in moves.went if member.node not in moves.there]
        again = {member.node for member in gone} - {each.member.node for each in still if each.member in gone}
        still = [each for each in still if each.member.node not in again]
        return (*still, *(Missing(member=each, at=now) for each in gone if each.node in again))

    def _stood(self, moves: Moves, now: float) -> "Past":
        """With the time for which it was stopped or paused, if it goes on now; a pause before a stop counts once."""
        goes_on = self.paused > 0.0 and not moves.paused
        since = self.paused if goes_on else now
        if moves.stopped is not None:
            since = min(max(moves.stopped, self.began, self.resumed), since)
        return replace(
            self,
            stopped_s=self.stopped_s + max(0.0, now - since),
            paused=(self.paused or now) if moves.paused else 0.0,
            resumed=now if goes_on else self.resumed,
        )

    def stood_s(self, until: float) -> float:
        """For how long the job was stopped or paused by then."""
        return self.stopped_s + (max(0.0, until - self.paused) if self.paused else 0.0)

    def lasted_s(self, until: float) -> float:
        """For how long it ran."""
        return max(0.0, until - self.began - self.stood_s(until))

    def without(self, node: str) -> "Past":
        """Nobody waits for this node any more."""
        return replace(self, missing=tuple(each for each in self.missing if each.member.node != node))


def lasting(before: Plan | None, plan: Plan, stages: Stages, *, at: float, paused: bool = False) -> tuple[Broken, ...]:
    """Faults that are not over with this plan, the first one first: nobody trains by it, or it is the second attempt. Of a job
    that is `paused` none lasts. Other faults are told once they are over; until then the plan says it all. `stages`: as they
    were `before`.
    """
    since, trains, told = stages.since(plan), plan.phase is Phase.TRAIN, list[Broken]()
    if plan.phase is Phase.STOP or (before is not None and before.generation >= plan.generation):
        return ()  # the job is over; or the plan was read anew
    if (
        before is not None
        and (verdict := _fault(before))
        and (before.phase is not Phase.TRAIN or since < before.generation)
    ):
        first = min(since, before.generation - 1)
        told.append(Broken.of(verdict, at=at, generation=before.generation, broke=first, lasts=not paused))
    if (verdict := _fault(plan)) and (told or not trains):
        told.append(Broken.of(verdict, at=at, generation=plan.generation, broke=since, lasts=not paused))
    return tuple(told)


def _fault(plan: Plan) -> Verdict | None:
    """That it answers; None for one by which somebody leaves, of which nothing is known."""
    verdict = plan.verdict
    return None if verdict and verdict.fault is Fault.UNKNOWN and plan.says(*ORDERLY) else verdict


def dearer(told: Broken, other: Broken) -> Broken:
    """A fault at what it cost whom it cost more."""
    seconds = [each.seconds for each in (told, other) if each.seconds is not None]
    steps = [each.steps for each in (told, other) if each.steps is not None]
    return replace(told, at=min(told.at, other.at), seconds=max(seconds, default=None), steps=max(steps, default=None))


class Roster:
    """The leader's: who was there when it looked last."""

    def __init__(self) -> None:
        self._there: Mapping[str, Record] | None = None  # None: it does not lead
        self._over = False  # the plan that it saw last was an earlier run's
        self._paused = False  # the job was

    def look(self, view: View) -> Moves | None:
        """Who has come and gone since; None for nobody. Who begins to lead goes by the plan: its forerunner may have died."""
        now, before = view.records, self._there
        if now is None or view.plan is None or view.plan.phase is Phase.STOP:
            self._there = None
            self._over = self._over or (view.plan is not None and view.plan.phase is Phase.STOP)
            return None
        self._there, over, self._over = now, self._over, False
        was, self._paused = self._paused, view.intent is Intent.PAUSE and view.plan.phase is Phase.HOLD
        if before is None:
            seated, left = (
                {seat.member.node: seat.member for seat in view.plan.seats},
                names(view.plan.causes, *ORDERLY),
            )
            went = tuple(each for node, each in sorted(seated.items()) if node not in now and each not in left)
            stopped = view.commit.written if over and view.commit else None
            return Moves(went=went, there=frozenset(now), begun=over, stopped=stopped or None, paused=self._paused)
        if was == self._paused and (before is now or before.keys() == now.keys()):
            return None
        gone = [record for node, record in sorted(before.items()) if node not in now]
        return Moves(
            went=tuple(record.member for record in gone if not record.leaving),
            left=tuple(record.member.node for record in gone if record.leaving),
            came=tuple(sorted(now.keys() - before.keys())), there=frozenset(now), paused=self._paused,
        )  # fmt: skip

    def forget(self) -> None:
        """It leads no more."""
        self._there = None


async def read(store: Store) -> Past | None:
    """What was written; None if nothing was, or nothing that can be read."""
    return _read(await store.get(keys.PAST))


def _read(entry: Entry | None) -> Past | None:
    try:
        return keys.load(Past, entry.value, entry.key) if entry else None
    except keys.Unreadable:
        return None


class Scribe:
    """Writes down what comes, one after the other."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def write(
        self, store: Store, now: float, broken: Broken | None = None, *, anew: bool = True, after_s: float = 0.0
    ) -> None:
        """That the job runs and, with `broken`, what befell it. With `anew` all of the fault is written, whether or not it was
        told already; without, only what nobody told within `after_s`, and what it cost. It gives up after some attempts.
        """

        def told(past: Past) -> Past:
            if broken is None:
                return past
            known = past.last is not None and not past.last.lasts and past.last.generation >= broken.generation
            return past.after(broken) if anew or not known else past.cost(broken)

        await asyncio.sleep(after_s)
        await self.change(store, now, told)

    async def change(self, store: Store, now: float, of: Callable[[Past], Past]) -> None:
        """What was written, changed. After some attempts it stays as it was."""
        async with self._one:
            for pause in PAUSES_S:
                await asyncio.sleep(pause)  # nothing waits for it
                try:
                    await _changed(store, lambda past: of(past or Past(began=now)))
                except StoreError:
                    continue
                return


async def forget(store: Store, node: str) -> bool:
    """Somebody says that nobody waits for this node any more; False: nobody did."""
    return await _changed(store, lambda past: past.without(node) if past else None)


async def _changed(store: Store, of: Callable[[Past | None], Past | None]) -> bool:
    """Write what becomes of it, by one of several who may write at once; False: nothing else."""
    while True:
        entry = await store.get(keys.PAST)
        past = _read(entry)
        fresh = of(past)
        if fresh is None or fresh == past:
            return False
        same = Unchanged(key=keys.PAST, revision=entry.mod_revision if entry else 0)
        if (await store.txn([same], [Put(key=keys.PAST, value=keys.dump(fresh))])).ok:
            return True
