"""Who is silent, who is stuck, who cannot be reached: three pure judgements over what was heard, seen and probed.

The idea: one witness proves nothing. A neighbour that hears no beat may itself be deaf, so a node is convicted only by two
accusers that are not convicted themselves, and where the accusations point both ways (a partition) nobody is convicted
and the plan goes to PROBE.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import lru_cache, partial
from math import inf
from operator import attrgetter

from elasticrl.base.value import dataclass
from elasticrl.contract.model import UNTOLD, Member, Phase, Plan, Record, Stall, View, Work
from elasticrl.contract.pairs import turns
from elasticrl.contract.partition import Pair
from elasticrl.contract.settings import Membership, Timeouts

_suspects, _work = attrgetter("suspects"), attrgetter("work")


def neighbours(plan: Plan | None, node: str, reach: int) -> tuple[str, ...]:
    """The nodes that `node` exchanges beats with: `reach` on either side of the ring of the plan's seats and spares."""
    if plan is None or node not in plan.place:
        return ()
    ring = plan.ring
    here = plan.place[node]
    found = dict.fromkeys(
        ring[(here + side * hop) % len(ring)].member.node for hop in range(1, reach + 1) for side in (1, -1)
    )
    found.pop(node, None)
    return tuple(found)


def watched(plan: Plan | None, me: Member, reach: int) -> tuple[str, ...]:
    """This member's neighbours. A plan that knows another life of its node is none of its own.

    Found by a newcomer: daemons of a job that was begun again listened for the lives before, where nobody was any more, and
    their new gang began with accusations.
    """
    return neighbours(plan, me.node, reach) if lives(plan, [me.node]).get(me.node) == me.incarnation else ()


def lives(plan: Plan | None, nodes: Iterable[str]) -> Mapping[str, int]:
    """Which life of each of these nodes the plan knows."""
    return {node: plan.ring[plan.place[node]].member.incarnation for node in nodes if plan and node in plan.place}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the detector knows of one neighbour."""

    life: int
    last: float  # when its newest beat came
    doubted: float | None = None  # since when something else (a reset connection) speaks against it
    refused: bool = False  # and its kernel says that nobody is there to answer
    suspected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """Neighbours' silence, judged. The shell feeds it beats and asks `judge`; it is a value like all others here."""

    settings: Membership
    peers: Mapping[str, Heard] = field(default_factory=dict)
    doubt_s: float  # how long a doubted neighbour has for a sign of life

    def watch(self, lives: Mapping[str, int], now: float) -> "Detector":
        """Another ring, each with its life: forget who is not in it; newcomers, who may be a known node's next life, have until
        `suspect_s` from now.
        """
        known = {node: heard for node, heard in self.peers.items() if heard.life == lives.get(node)}
        return replace(
            self, peers={node: known.get(node) or Heard(life=life, last=now) for node, life in lives.items()}
        )

    def hear(self, node: str, now: float) -> "Detector":
        """A beat came."""
        if node not in self.peers:
            return self
        known = self.peers[node]
        return self._knowing(node, Heard(life=known.life, last=now, suspected=known.suspected))

    def doubt(self, node: str, now: float) -> "Detector":
        """A worker's connection to this node broke: unless a beat comes at once, that is proof."""
        peer = self.peers.get(node)
        if peer is None or peer.doubted is not None:
            return self
        return self._knowing(node, replace(peer, doubted=now))

    def gone(self, node: str) -> "Detector":
        """Proof that a neighbour will not answer: once it is doubted there is no more waiting for it."""
        peer = self.peers.get(node)
        if peer is None:
            return self
        return self._knowing(node, replace(peer, refused=True))

    def _knowing(self, node: str, heard: Heard) -> "Detector":
        return Detector(settings=self.settings, peers={**self.peers, node: heard}, doubt_s=self.doubt_s)

    def limit(self, peer: Heard) -> float:
        """Until when this neighbour's silence is taken for chance."""
        patient = peer.last + self.settings.suspect_s
        if peer.doubted is None:
            return patient
        if peer.refused:
            return peer.doubted
        return min(patient, peer.doubted + self.doubt_s)  # (no beat has come since: `hear` ends a doubt)

    def late(self, now: float) -> tuple[str, ...]:
        """Whose beat is overdue, or doubted: time to ask."""
        overdue_s = 2 * self.settings.beat_s
        return tuple(
            n for n in sorted(self.peers) if now >= self.peers[n].last + overdue_s or self.peers[n].doubted is not None
        )

    def judge(self, now: float) -> tuple["Detector", tuple[str, ...], tuple[str, ...]]:
        """The detector after this moment, who is newly suspected, and who is cleared."""
        silent = {node for node, peer in self.peers.items() if now >= self.limit(peer)}
        suspected = tuple(n for n in sorted(silent) if not self.peers[n].suspected)
        cleared = tuple(n for n in sorted(self.peers) if self.peers[n].suspected and n not in silent)
        if not suspected and not cleared:
            return self, (), ()
        peers = {node: replace(peer, suspected=node in silent) for node, peer in self.peers.items()}
        return replace(self, peers=peers), suspected, cleared


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """Who is held to be dead or cut off, each with its accusers; `unsure` when the accusations point both ways."""

    guilty: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsure: bool = False


NOBODY = Conviction()


def convict(
    accusations: Iterable[tuple[str, str]], watchers: Callable[[str], Iterable[str]] = lambda _: ()
) -> Conviction:
    """Judge (accuser, accused) pairs: the most accused first, whose own word then counts no more.

    Two must accuse, and they must be more than half of the accused's `watchers` that are not guilty themselves: those who
    hear it speak for it. Found by simulation: two neighbours that were deaf at once put out the node between them.

    Who accuses another accuser of the same node as well may be deaf, so neither its word nor its silence counts about that
    node. Found by simulation: of four nodes two went deaf, heard neither each other nor the others, and put those out.

    >>> convict([("b", "a"), ("c", "a"), ("a", "b"), ("a", "c")]).guilty   # a is deaf and dumb, b and c are fine
    {'a': ('b', 'c')}
    >>> convict([("c", "a"), ("c", "b"), ("c", "d"), ("d", "a"), ("d", "b"), ("d", "c")])   # c and d are deaf
    Conviction(guilty={}, unsure=False)
    """
    against: dict[str, set[str]] = {}
    for accuser, accused in accusations:
        against.setdefault(accused, set()).add(accuser)
    if not against:
        return NOBODY
    guilty: dict[str, tuple[str, ...]] = {}

    def proven(but: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """Who is accused by enough of those that watch it, without the doubtful ones among these."""
        found = {}
        for node, accusers in against.items():
            out = but.get(node, set())
            most = sum(watcher not in guilty and watcher not in out for watcher in watchers(node))
            if len(accusers - out) > max(1, most / 2):
                found[node] = accusers - out
        return found

    while True:
        doubtful = {node: _deaf(accusers, against) for node, accusers in against.items()}
        sure = proven(doubtful)
        top = _most_accused(sure)
        every = top or _most_accused(proven({}))
        if any(other in against[node] for node in every for other in every):
            return Conviction(guilty=guilty, unsure=True)
        if not top:
            return Conviction(guilty=guilty)
        for node in top:
            guilty[node] = tuple(sorted(sure[node]))
            del against[node]
        for accusers in against.values():
            accusers.difference_update(top)


def _deaf(accusers: set[str], against: Mapping[str, set[str]]) -> set[str]:
    """Those of these accusers who do not hear another of them."""
    return {one for other in accusers for one in against.get(other, ()) if one in accusers}


def _most_accused(proven: Mapping[str, set[str]]) -> list[str]:
    most = max(map(len, proven.values()), default=0)
    return sorted(node for node, accusers in proven.items() if len(accusers) == most)


def conviction(view: View, reach: int) -> Conviction:
    """What the suspicions in all records amount to; nodes that are in no plan have no neighbours to judge them.

    Nor do they judge, and who is back as another life is not accused for the one that is over. Found by two scenarios. In
    in-halves-that-both-hear-the-store those whom a probe had put out went on accusing, as neighbours of an earlier ring, those
    who had stayed. In drain-during-save a node that came back was seated, and convicted at once by what had been said of its
    life before: who had said so had not read the plan yet.
    """
    plan, records = view.plan, view.records
    if plan is None or not records:
        return NOBODY

    def watchers(node: str) -> tuple[str, ...]:
        return neighbours(plan, node, reach)

    def reborn(node: str) -> bool:
        record = records.get(node)
        return record is not None and record.member.incarnation != lives(plan, [node])[node]

    def accused(record: Record) -> Iterator[str]:
        known = lives(plan, watched(plan, record.member, reach)) if record.suspects else {}
        for node, life in known.items():
            if str(Member(node=node, incarnation=life)) in record.suspects and not reborn(node):
                yield node

    accusers = list(filter(_suspects, records.values()))  # of thousands, few
    return convict(((r.member.node, other) for r in accusers for other in accused(r)), watchers)


def split(
    nodes: Iterable[str], unreachable: Mapping[str, Iterable[str]], tested: Iterable[Pair] = ()
) -> tuple[str, ...]:
    """The nodes to go on with after a probe: all of whom can reach each other, as many as we can tell, in the order given.

    First the largest part that hangs together and of which any has answered (of two equal ones that with more answers, then
    that with the first node), then, inside it, without the node that has most broken links until none is left (of two equal
    ones without the one that has not answered, then the one with fewer that were `tested` and hold, then the later). Who
    answers has a key in `unreachable`.

    Found by simulation: of two nodes the dead one had no complaint, so the other was put out. Pairs that nobody tests hold, so
    one that nobody reached stayed, and one that was well went. A link to one who had gone already counted once more, so both
    ends went, and too few of a half were left.
    """
    order = list(nodes)
    here = set(order)
    broken = {frozenset((a, b)) for a in order for b in unreachable.get(a, ()) if b in here and a != b}

    def fault(links: list[frozenset[str]], node: str) -> tuple[int, bool, int, int]:
        here, holds = (sum(node in pair for pair in pairs) for pairs in (links, whole))
        return (here, node not in unreachable, -holds, order.index(node))

    def worth(part: list[str]) -> tuple[bool, int, int, int]:
        answered = sum(node in unreachable for node in part)
        return (not answered, -len(part), -answered, order.index(part[0]))

    parts = sorted(_parts(order, broken), key=worth)
    kept = set(parts[0]) if parts else set()
    whole = {frozenset(pair) for pair in tested if unreachable.keys() >= set(pair)} - broken
    while True:
        links = [pair for pair in broken if pair <= kept]
        if not links:
            return tuple(node for node in order if node in kept)
        kept.discard(max(kept, key=partial(fault, links)))


def _parts(order: list[str], broken: set[frozenset[str]]) -> list[list[str]]:
    """Connected parts, each in the given order. A link that nobody found broken holds."""
    left = dict.fromkeys(order)
    parts = []
    while left:
        frontier = [next(iter(left))]
        part = set()
        while frontier:
            node = frontier.pop()
            part.add(node)
            left.pop(node, None)
            near = [other for other in left if frozenset((node, other)) not in broken]
            frontier.extend(near)
            for other in near:
                del left[other]
        parts.append([node for node in order if node in part])
    return parts


def probe_links(plan: Plan) -> tuple[Pair, ...]:
    """The pairs that are tested under a PROBE plan: all at ring distances 1, 2, 4, ..., each once, the near ones first. Every
    node computes them alike.

    That is O(log N) for each node, and any cut through the ring shows as broken links on both of its sides. Spares are asked,
    too, and answer: of two seats that do not reach each other, only they can tell which is cut off.
    """
    return _links(tuple(seat.member.node for seat in plan.ring))


def probe_turns(plan: Plan, node: str) -> tuple[Pair, ...]:
    """The pairs that a node tests under a PROBE plan: those of the plan with it, else those of `probe_links`, turn by turn."""
    known = _known.get(id(plan))  # (which no other plan has as long as that one is remembered)
    if known is None:
        pairs = plan.pairs or (pair for turn in turns(probe_links(plan)) for pair in turn)
        if len(_known) >= KNOWN:
            _known.clear()
        known = _known[id(plan)] = plan, _by_node(pairs)
    return known[1].get(node, ())


# Of thousands of nodes this takes a tenth of a second, and is asked for at each event while a probe lasts. To hash a plan, or
# the names in it, would take too long as well.
KNOWN = 4
_known: dict[int, tuple[Plan, Mapping[str, tuple[Pair, ...]]]] = {}


def _by_node(pairs: Iterable[Pair]) -> Mapping[str, tuple[Pair, ...]]:
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        for name in dict.fromkeys(pair):
            found.setdefault(name, []).append(pair)
    return {name: tuple(pairs) for name, pairs in found.items()}


@lru_cache(maxsize=4)
def _links(names: tuple[str, ...]) -> tuple[Pair, ...]:
    hops = [1 << k for k in range(len(names).bit_length()) if 1 << k < len(names)]
    pairs = ((names[i], names[(i + hop) % len(names)]) for hop in hops for i in range(len(names)))
    return tuple(dict.fromkeys((min(pair), max(pair)) for pair in pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a worker's beat page says: which phase, since when, and whether it waits for others there.

    Example: Progress(slot=0, step=1283, phase="update", since=812.4, waiting=True, stopped=False)
    """

    slot: int
    step: int
    phase: str
    since: float
    waiting: bool
    waited_s: float = 0.0  # since then, until it had what it waited for
    stopped: bool = False  # the kernel says so (state T)
    op: str = ""  # the collective, and its number, where it waits in one
    collective: int = 0
    rhythm: "Rhythm | None" = None  # how often its log tells of progress; None: it does not, or is not read


LATELY = 32  # of a phase's durations say what is usual
TWICE = 2.0  # the slowest ever seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """How long a phase took: lately, ever at most, and what nine of ten lately took at most."""

    lately: tuple[float, ...] = ()
    slowest: float = 0.0
    usual: float = 0.0

    def and_then(self, took_s: float) -> "Took":
        """It took so long once more."""
        lately = (*self.lately[1 - LATELY :], took_s)
        usual = sorted(lately)[-1 - len(lately) // 10]
        return Took(lately=lately, slowest=max(self.slowest, took_s), usual=usual)


LINES = 10  # lines of progress, or moments with some, from which on a log has a rhythm
LEAST_S = 60.0  # a log that tells nothing for less is never taken for a hang: saves and evaluations write no line


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How often a script's log tells of progress: when it did last, and how long the pauses between were.

    Example: Rhythm(newest=812.4, pauses=Took(...), seen=40)
    """

    newest: float
    pauses: Took = Took()
    seen: int = 0  # pauses
    mark: int = 0  # how far its newest line says that the script is

    def at(self, now: float, mark: int = 0) -> "Rhythm":
        """It did once more."""
        return Rhythm(newest=now, pauses=self.pauses.and_then(now - self.newest), seen=self.seen + 1, mark=mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How long each phase may take: learned from what is usual, never under the floor, never over the cap.

    A phase that was slow once raises the budget to twice its length, not to ten times. (An update that waited 6 s for a vault
    had hidden a hang for 62 s.) Where a worker was ended for standing still, its phase has twice as long at that step.
    """

    settings: Timeouts
    took: Mapping[str, Took] = field(default_factory=dict)
    ended: Mapping[str, Stall] = field(default_factory=dict)  # by phase: the newest stall that ended with its gang

    def learn(self, phase: str, took_s: float) -> "Budgets":
        """A phase was left after `took_s`."""
        return replace(self, took={**self.took, phase: self.took.get(phase, Took()).and_then(took_s)})

    def end(self, stall: Stall) -> "Budgets":
        """The gang broke up over this stall, which may come again: an evaluation every so many steps is no hang. Found by
        reading: one of 8 s among steps of 50 ms was killed at its step for ever. What it teaches ends with the step, or each
        real hang would delay how the next one is found.
        """
        if not self.acts(stall):
            return self  # something else has ended it
        before = self.ended.get(stall.phase)
        if before is not None and stall.step <= _last(before) and stall.for_s < before.for_s:
            return self
        return replace(self, ended={**self.ended, stall.phase: stall})

    def budget(self, phase: str, step: int | None = None) -> float:
        """Seconds without progress after which a worker in this phase, at this step, is stalled."""
        if phase == UNTOLD:
            return self.settings.quiet_s or inf
        cap = self.settings.phase_s.get(phase, self.settings.default_phase_s)
        seen, ended = self.took.get(phase), self.ended.get(phase)
        if seen is None:
            return cap
        again_s = TWICE * ended.for_s if ended is not None and step is not None and step <= _last(ended) else 0.0
        return min(cap, max(self.settings.floor_s, self.settings.slack * seen.usual, TWICE * seen.slowest, again_s))

    def acts(self, stall: Stall) -> bool:
        """Does this stall end workers? A silent log may be only told of."""
        return not stall.silent or self.settings.progress == "restart"

    def silence(self, rhythm: Rhythm) -> float:
        """Seconds without a line of progress after which a script's log is silent for unusually long. There is no cap: what
        no line tells of (a save, an evaluation) is as long as it is. What was ended for it has twice as long where it was.
        """
        if self.settings.progress == "off" or rhythm.seen < LINES:
            return inf
        ended = self.ended.get(UNTOLD)
        again = ended is not None and ended.silent and rhythm.mark <= _last(ended)
        again_s = TWICE * ended.for_s if ended is not None and again else 0.0
        pauses = rhythm.pauses
        return max(LEAST_S, self.settings.floor_s, self.settings.slack * pauses.usual, TWICE * pauses.slowest, again_s)

    def silent(self, progress: Progress, now: float) -> Stall | None:
        """The stall of a script whose log has told of progress again and again, and does no more."""
        rhythm = progress.rhythm
        if rhythm is None or progress.phase != UNTOLD:
            return None
        budget, for_s = self.silence(rhythm), now - rhythm.newest
        if for_s < budget:
            return None
        return Stall(
            slot=progress.slot, step=rhythm.mark, phase=UNTOLD, for_s=for_s, budget_s=budget, waiting=True, silent=True
        )

    def stalled(self, progress: Progress, now: float) -> Stall | None:
        """The stall that this worker is in, if it is.

        What it has waited for others, for longer than its phase ever took, is nobody's own: who was excused for that is at work
        again when it is over. Found live: as an engine came back, who had waited for its worker was ended for it.
        """
        budget = self.budget(progress.phase, progress.step)
        if progress.stopped:  # the kernel says so: no phase explains it, and its peers must not be suspected first
            budget = min(budget, self.settings.confirm_s)
        excused = not progress.waiting and progress.waited_s > budget / TWICE
        for_s = now - progress.since - (progress.waited_s if excused else 0.0)
        if for_s < budget:
            return self.silent(progress, now)
        return Stall(
            slot=progress.slot, step=progress.step, phase=progress.phase, for_s=for_s, budget_s=budget,
            waiting=progress.waiting, stopped=progress.stopped, op=progress.op if progress.waiting else "",
            collective=progress.collective if progress.waiting else 0,
        )  # fmt: skip


def _last(stall: Stall) -> int:
    """The last step that may be sealed where it comes again: its worker had made one more than it knew to be sealed."""
    return stall.step + 1


def somebody_left(view: View) -> bool:
    """Has somebody's worker left the present gang, as far as this node may see? Then some node may be gone: time to ask
    neighbours, although our own workers have not noticed anything yet.
    """
    plan = view.plan
    if plan is None or plan.phase is not Phase.TRAIN:
        return False
    if not view.records or Work.PARKED not in map(_work, view.records.values()):  # as mostly
        return False
    return any(r.work is Work.PARKED and r.generation == plan.generation for r in view.records.values())
