"""What is known of the fault that is being judged: facts as they come in, from this node and from all, and what of them counts.

The one idea: a fact is filed once, with the time at which this core learned of it, and forgotten after a minute (at the leader
75 s). Which of them
belong to a fault is said by the gang that they speak of, not by when they came: a dead worker's last words may be read when
the next gang trains already. What speaks of no gang (a disk, a counter) counts where a node is in trouble anyway.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import replace

from elasticrl.contract.evidence import HEALTH, NOISE, Evidence, Kind, Sign, bounded
from elasticrl.contract.model import Member, Plan
from elasticrl.contract.verdict import Fault
from elasticrl.core.judge.meanings import CONSEQUENCES, HARD, LASTING, MEANINGS, SNAPSHOTS, WAITS

KEPT_S = 60.0
KEPT = 200  # of this node, or of all together at the leader
AGAIN_S = 5.0  # what a log says over and over is told anew no more often
TOLD = 16  # of this node, in its record
WAYS = "ways"  # the source of facts of how long the ways to the neighbours take
STATES = frozenset({HEALTH, WAYS})  # whose newest word on the same thing is the one that holds
SIGABRT = 6
PARTING = frozenset({Sign.ABORTED, Sign.MISMATCH})  # after which ranks are compared by what they had entered

Filed = tuple[Evidence, ...]
Passed = Mapping[int, float]  # generation -> until when its gang has outlived what was found


def identity(fact: Evidence) -> Hashable:
    """What makes two reports the same fact, whoever told it and when."""
    return (
        fact.kind, fact.sign, fact.rank, fact.node, fact.peer, fact.generation, fact.op, fact.seq, fact.group,
        fact.detail,
    )  # fmt: skip


def file(
    known: Filed, fresh: Iterable[Evidence], now: float, *, kept_s: float = KEPT_S, passed: Passed | None = None
) -> Filed:
    """The facts with the new ones among them, the oldest first. The very same tuple if there is nothing new.

    What a log says again counts anew once its gang has outlived what it had said before (`passed`, which the leader knows; a
    node tells it again after a while).
    """
    fresh = list(fresh)
    known = _without_repeated(known, fresh, now, passed)
    have = {identity(fact) for fact in known}
    again = {_place(fact) for fact in fresh if fact.kind in SNAPSHOTS and identity(bounded(fact)) not in have}
    if again:  # where a rank is now; where it was before would be put beside where others are now
        known = tuple(fact for fact in known if fact.kind not in SNAPSHOTS or _place(fact) not in again)
        have = {identity(fact) for fact in known}
    over = {_check(fact) for fact in fresh if fact.source in STATES and identity(bounded(fact)) not in have}
    left = tuple(fact for fact in known if fact.source not in STATES or _check(fact) not in over) if over else known
    withdrawn = len(left) < len(known)  # a disk that was full has room again, a way is quick again, or the reverse
    if withdrawn:
        known, have = left, {identity(fact) for fact in left}
    found = []
    for fact in fresh:
        # That a way works tells which end of a broken one is at fault; that a machine is well again takes back what was said.
        if fact.sign in NOISE and fact.kind is not Kind.PROBE and fact.source != HEALTH:
            continue
        cut = bounded(fact)
        if identity(cut) not in have:
            have.add(identity(cut))
            found.append(replace(cut, when=now, clock="core"))
    stale = bool(again) or withdrawn or any((fact.when or 0.0) < now - kept_s for fact in known)
    if not found and not stale:
        return known
    return (*(fact for fact in known if (fact.when or 0.0) >= now - kept_s), *found)[-KEPT:]


def _without_repeated(known: Filed, fresh: Iterable[Evidence], now: float, passed: Passed | None) -> Filed:
    said = {identity(cut): cut.line_no for cut in map(bounded, fresh) if cut.line_no is not None}

    def over(fact: Evidence) -> bool:
        newer = (said.get(identity(fact)) or 0) > (fact.line_no or 0) if said and fact.line_no is not None else False
        if passed is None:
            return newer and (fact.when or 0.0) <= now - AGAIN_S
        return newer and fact.generation is not None and outlived(fact, passed, fact.generation)

    left = tuple(fact for fact in known if not over(fact))
    return left if len(left) < len(known) else known


def outlived(fact: Evidence, passed: Passed, gang: int) -> bool:
    """Whether all ranks have made steps since: then it explains nothing that came later. Found live: what a noisy rank had
    printed half a minute before was held to be why its node's cable was out, and hid another node's full disk.

    Not what somebody of ours sees, which is taken back when it is over, and nothing that stays as it is.
    """
    if (fact.line_no is None and fact.kind in HARD) or fact.source == HEALTH or fact.sign in LASTING:
        return False
    return (fact.when or 0.0) < passed.get(gang if fact.generation is None else fact.generation, -math.inf)


def _check(fact: Evidence) -> Hashable:
    """Of what a fact of a machine's health speaks: of which check, or of which way."""
    what = fact.peer if fact.kind is Kind.PROBE else fact.check
    return fact.kind, fact.node, what


def _place(fact: Evidence) -> Hashable:
    """Of what a snapshot is one. (Where a rank is in the next gang says nothing of where it was in this one.)"""
    return fact.kind, fact.rank, fact.node, fact.group, fact.generation


def told(facts: Filed, generation: int) -> Filed:
    """What goes into a node's record under this generation's plan: few, those of the newest gang first, and of them those that
    can be a cause, the earliest. (A rank that had been noisy in gang after gang left no room for where it was seen at last.)

    That somebody waited for, or lost, a peer of a gang that is no more tells nobody anything: that would be a write of every
    survivor after each fault.
    """
    telling = (*MEANINGS, Sign.ENTERED)
    facts = tuple(
        fact for fact in facts if fact.sign in telling or fact.generation is None or fact.generation >= generation
    )
    if len(facts) <= TOLD:
        return facts

    def weight(fact: Evidence) -> tuple[float, int]:
        newest = math.inf if fact.generation is None else fact.generation
        return -newest, 0 if fact.sign in MEANINGS else 1 if fact.sign not in CONSEQUENCES else 2

    chosen = sorted(range(len(facts)), key=lambda i: (*weight(facts[i]), i))[:TOLD]
    return tuple(facts[i] for i in sorted(chosen))


def concerning(facts: Filed, generations: range, seated: Collection[str], passed: Passed | None = None) -> Filed:
    """Those that count when the fault of these gangs is judged: not what they have outlived.

    Of what a node says of itself apart from any gang (health, the kernel) only that of nodes which something else speaks
    against, if there are such: a full disk elsewhere has killed nobody here. `seated` are the nodes of the gang.
    """
    if passed:
        facts = tuple(fact for fact in facts if not outlived(fact, passed, generations.start))
    ours = [fact for fact in facts if fact.generation in generations and fact.sign is not Sign.SLOW]
    seen = (fact for fact in ours if fact.line_no is None)  # what a log claims may be an innocent's noise
    at_fault = {fact.node for fact in seen if fact.sign in MEANINGS and fact.node is not None}
    among = at_fault or seated
    loose = [fact for fact in facts if fact.generation is None and (fact.node is None or fact.node in among)]
    chosen = {id(fact) for fact in (*ours, *loose)}
    return tuple(fact for fact in facts if id(fact) in chosen)


def speaks(facts: Filed) -> bool:
    """Is there anything to judge?"""
    ends = {Kind.PROBE, Kind.EXIT}
    return any(
        f.sign in MEANINGS or f.sign in WAITS or (f.kind in ends and f.sign is not Sign.PEER_GONE) for f in facts
    )


def gone(node: str, why: str, generation: int, rank: int | None) -> Evidence:
    """A member that is not there any more, as a fact."""
    return Evidence(
        kind=Kind.NODE, sign=Sign.NODE_GONE, node=node, rank=rank, detail=why, source="leader", generation=generation
    )


def left(node: str, plan: Plan) -> Evidence:
    """Its ranks do not form the gang with the others, as a fact."""
    ranks = tuple(rank for rank, name in plan.node_of.items() if name == node)
    said = "left before the gang had formed"
    return Evidence(
        kind=Kind.NODE, sign=Sign.LEFT, node=node, ranks=ranks, detail=said, source="leader", generation=plan.generation
    )


def parted(plan: Plan) -> bool:
    """Did the gang before this plan end as gloo ends who was sent more than it expects?"""
    because = plan.verdict.because if plan.verdict else ()
    return any(cause.signal == SIGABRT for cause in plan.causes) or any(fact.sign in PARTING for fact in because)


def unheard(me: Member, before: Plan, plan: Plan, silent: Collection[str]) -> Evidence | None:
    """What a node has to say that a plan leaves out as dead: that it reads the plan proves that it is the way to it.

    `silent` are those whom it does not hear itself.
    """
    verdict = plan.verdict
    wronged = verdict is not None and verdict.fault is Fault.DEAD_NODE and me.node in verdict.nodes
    if not wronged or me not in before.seat_of or me in plan.seat_of:
        return None
    lost = ", ".join(sorted({seat.member.node for seat in before.seats} & set(silent) - {me.node}))
    said = f"it does not hear {lost} either" if lost else ""
    return Evidence(
        kind=Kind.NODE, sign=Sign.UNHEARD, node=me.node, detail=said, source="daemon", generation=before.generation
    )
