"""Rules for causes that say what they are: a line of a log, an exit, a kernel's report, a look at a machine.

The one idea: the same rule runs three times, on other facts each time: deep causes, what was seen, what is only claimed. What
a sign means is a row of `meanings`; here the earliest is chosen, and whom it names.
"""

from collections import Counter
from collections.abc import Sequence

from elasticrl.contract.evidence import HEALTH, Evidence, Kind, Sign, mistaken
from elasticrl.contract.verdict import Confidence, Fault, Verdict, rank_names
from elasticrl.core.judge.case import Case, after, earliest, witnessed
from elasticrl.core.judge.meanings import CONSEQUENCES, ENDS, EXPLAINS, MEANINGS, SNAPSHOTS, VAGUE

NEAR_S = 60.0  # a cause is looked for this long after what it shows as
TOGETHER_S = 2.0  # nodes that go within this went for one reason: a rack's power, a switch


def deep(case: Case) -> Verdict | None:
    """Causes that explain everything else, before comparisons are made."""
    return declared(case) if any(MEANINGS[fact.sign].depth == 0 for fact in case.causes) else None


def seen(case: Case) -> Verdict | None:
    """The same, of what agents, beats, stacks and neighbours have seen: it goes before what any log claims."""
    return _first_of(case, tuple(filter(witnessed, case.causes)))


def declared(case: Case) -> Verdict | None:
    """A cause that says what it is: the earliest, unless a deeper one stands beside it."""
    return _first_of(case, case.causes)


def _first_of(case: Case, causes: Sequence[Evidence]) -> Verdict | None:
    if not causes:
        return None
    first = earliest(causes)
    deeper = [fact for fact in causes if MEANINGS[fact.sign].depth == 0 and not after(fact, first, NEAR_S)]
    if deeper:
        # How a process ended says less than what it said before it did.
        first = earliest(deeper)
        said = [fact for fact in deeper if fact.kind is not Kind.EXIT and fact.rank in {None, first.rank}]
        first = earliest(said) if said and first.kind is Kind.EXIT else first
    elif first.sign in VAGUE | {Sign.ABSENT}:
        # It does not know; let everything speak that does.
        known = [fact for fact in causes if fact.sign not in {first.sign, *VAGUE}]
        known = known or [fact for fact in causes if fact.sign is not first.sign and fact.sign is not Sign.RAISED]
        if known:
            first = earliest(known)
        elif (
            any(fact.sign in CONSEQUENCES and fact.sign is not Sign.ABORTED for fact in case.evidence)
            and first.sign is Sign.RAISED
        ):
            return None
    return _verdict(case, _surer(_of_rank(first, causes), causes))


def _surer(first: Evidence, causes: Sequence[Evidence]) -> Evidence:
    """Of a rank's log, read up to the middle of a traceback, and the exception that the rank itself has named as it ended, the
    second knows more. Found in the lab, on a busy machine: the verdict was less sure the more was known.
    """
    if first.sign is not Sign.MISTAKE or first.rank is None:
        return first
    named = (fact for fact in causes if mistaken(fact) and fact.rank == first.rank and not after(fact, first, NEAR_S))
    return next(named, first)


def _of_rank(first: Evidence, causes: Sequence[Evidence]) -> Evidence:
    """What is seen of a machine before one of its ranks ends of it is told by that rank: memory is full, and who was killed."""
    if first.source != HEALTH or first.rank is not None:
        return first
    same = [f for f in causes if f.rank is not None and f.node == first.node and witnessed(f)]
    return next((f for f in same if MEANINGS[f.sign].fault is MEANINGS[first.sign].fault), first)


def _verdict(case: Case, first: Evidence) -> Verdict:
    """The verdict whose cause is `first`: who is blamed, who only waited, and what speaks against it."""
    meaning = MEANINGS[first.sign]
    # Of two that brought different sizes gloo ends the one that brought less: it may be any of the two.
    either = first.kind is Kind.GLOO_ERROR and first.sign is Sign.MISMATCH
    blamed = meaning.fault is not Fault.UNKNOWN and not either
    alike = [fact for fact in case.causes if fact.sign is first.sign and not after(fact, first, NEAR_S)]
    ranks, nodes = _culprits(first, alike)
    nodes = nodes if witnessed(first) else case.known(nodes, first.rank)
    who = rank_names(ranks) or " and ".join(nodes) or ("one rank" if first.sign is not Sign.VERSIONS else "one node")
    if either and ranks:
        who += " or a peer"
    victims = sorted(case.waiting - set(ranks))
    cause = f"{who} {meaning.words}{_detail(first, of_many=first.sign is Sign.NODE_GONE and len(nodes) > 1)}"
    stack = None
    if meaning.fault is Fault.HOST_HANG and first.kind is not Kind.STACK:
        # Beats say that it hangs; its stack, where.
        stack = next(
            (
                f
                for f in case.evidence
                if f.kind is Kind.STACK and f.rank in ranks and f.detail and f.sign is not first.sign
            ),
            None,
        )
        cause += f", {stack.detail}" if stack else ""
    if victims:
        cause += f"; {rank_names(victims)} only waited"
    others = [
        f for f in case.evidence if f.sign in MEANINGS and f.sign is not first.sign and MEANINGS[f.sign].depth == 0
    ]
    told = {id(fact) for fact in (first, *alike)}  # to compare each with each would take the square of the time
    ends = [f for f in case.evidence if f.kind is Kind.EXIT and f.rank in ranks and id(f) not in told]
    doubts = [f"seen too, but later, survived or less sure: {other}" for other in others[:3]]
    confidence = meaning.confidence
    if any(
        f.sign is not first.sign and MEANINGS[f.sign].depth == 0 and not after(f, first, NEAR_S) for f in case.causes
    ):
        confidence = min(confidence, Confidence.MEDIUM, key=list(Confidence).index)
    if not case.facts.nodes and not witnessed(first) and (first.kind is Kind.CARRIER or _doubtful(case, first)):
        # Of a job that is ours its nodes are known, and more than what its logs claim; of any other, logs are all there is.
        confidence = Confidence.LOW
    return Verdict(
        fault=meaning.fault, ranks=ranks if blamed else (), nodes=nodes if blamed else (), cause=cause,
        confidence=confidence,
        remedy=meaning.remedy,
        because=(
            first, *([stack] if stack else []), *[fact for fact in alike if fact is not first][:3], *ends[:1],
            *case.waits[:2],
        ),
        against=(meaning.contradicted_by, *doubts),
    )  # fmt: skip


def _doubtful(case: Case, first: Evidence) -> bool:
    """Whether a log claims a cause of another class beside it, which is as sure, and as deep or not explained by it."""
    meaning = MEANINGS[first.sign]
    explained = EXPLAINS.get(first.sign, ENDS)
    return any(
        (other := MEANINGS[fact.sign]).fault is not meaning.fault
        and (other.depth <= meaning.depth or fact.sign not in explained)
        and other.confidence is not Confidence.LOW
        and not witnessed(fact)
        and not after(fact, first, NEAR_S)
        for fact in case.causes
    )


def _culprits(first: Evidence, alike: list[Evidence]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Whom the fact itself names. A report of a broken path names its far end beside the reporter."""
    if first.ranks:
        return first.ranks, ()
    if first.sign in {Sign.LINK, Sign.FABRIC, Sign.NIC, Sign.COORDINATOR}:
        peers = Counter(fact.peer for fact in alike if fact.peer)
        ends = {fact.node or fact.source for fact in alike if fact.peer}
        if peers and (len(ends) > 1 or not first.node) and len(peers) == 1:
            return (), tuple(peers)  # several cannot reach the same one
        return (), tuple(sorted({name for name in (first.node, first.peer) if name}))
    if first.sign is Sign.NODE_GONE and first.rank is None:
        return (), tuple(sorted({fact.node for fact in alike if fact.node and not after(fact, first, TOGETHER_S)}))
    if first.rank is not None:
        # One look at all ranks at the same moment: whoever it shows in the same way is in it together.
        same = [fact for fact in alike if fact.kind is first.kind] if first.kind in SNAPSHOTS else [first]
        ranks = tuple(sorted({fact.rank for fact in same if fact.rank is not None}))
        return ranks, tuple(sorted({fact.node for fact in same if fact.node}))
    return (), (first.node,) if first.node else ()


def _detail(fact: Evidence, *, of_many: bool = False) -> str:
    whose = f"{fact.node}: " if of_many and fact.node else ""
    return f" ({whose}{fact.detail})" if fact.detail else ""
