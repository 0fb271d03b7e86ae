"""Rules for what lies between the ranks: probes of pairs, and collectives that all have entered and none gets through.

The one idea: a probe singles out by what works (`reach`); without one, that nobody is elsewhere leaves only the way.
"""

from collections import Counter
from collections.abc import Sequence

from elasticrl.contract.evidence import Kind
from elasticrl.contract.partition import Reach, single_out
from elasticrl.contract.verdict import Confidence, Fault, Verdict, rank_names
from elasticrl.core.judge.case import Case
from elasticrl.core.judge.meanings import GOING_ON, TELLING, TROUBLE, Trouble


def probed(case: Case) -> Verdict | None:
    """Pairs of nodes that tested each other: the worst kind of trouble there is, and what its pairs have in common."""
    facts = [fact for fact in case.evidence if fact.kind is Kind.PROBE and fact.node and fact.peer]
    for depth, (signs, what) in enumerate(TROUBLE):
        broken = [fact for fact in facts if fact.sign in signs]
        if not broken:
            continue
        worse = {sign for earlier, _ in TROUBLE[: depth + 1] for sign in earlier}
        good = [(str(fact.node), str(fact.peer)) for fact in facts if fact.sign not in worse]
        reach = single_out(((str(fact.node), str(fact.peer)) for fact in broken), good)
        sure = bool(reach.nodes) or what.fault is Fault.FABRIC
        said = Counter(fact.detail for fact in broken if fact.detail).most_common(1)
        detail = said[0][0] if said else ""  # what most of them say: the others may only have lost their partner
        remedy = next((better for words, better in TELLING.items() if words in detail), what.remedy)
        return Verdict(
            fault=what.fault, nodes=reach.blamed, confidence=Confidence.HIGH if sure and not reach.apart else Confidence.MEDIUM,
            cause=_where(reach, what) + f" ({detail})" * bool(detail),
            remedy=remedy, because=tuple(broken[:6]), against=(_doubt(reach), what.contradicted_by),
        )  # fmt: skip
    return None


def _where(reach: Reach, what: Trouble) -> str:
    if reach.everywhere:
        return what.all
    if reach.apart:
        return "the network has fallen apart: " + " | ".join(_few(part) for part in reach.apart)
    parts = [f"{_few(reach.nodes)} {what.node}"] if reach.nodes else []
    parts += [what.link.format(" and ".join(link)) for link in reach.links[:3]]
    return "; ".join(parts)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def _doubt(reach: Reach) -> str:
    if reach.apart:
        return "several links broke by themselves: pairs across, not tested yet, would tell"
    if reach.nodes:
        return "its peers fail with others too (then they are at fault)"
    return "one of the two ends fails with all others (a probe of further pairs tells node from link)"


def never_worked(case: Case) -> Verdict | None:
    """The very first collective is the one that all wait in: it is the set-up, not a rank."""
    works = [fact for fact in case.waits if fact.seq is not None]
    if not works or any((fact.seq or 0) > 1 or (fact.last_completed or 0) > 0 for fact in works):
        return None
    ranks = sorted({fact.rank for fact in works if fact.rank is not None})
    return Verdict(
        fault=Fault.FABRIC, confidence=Confidence.LOW,
        cause=f"the first collective never finished ({rank_names(ranks) or 'all'} waited at sequence number 1): the "
        "communicator has never worked",
        remedy="Not a straggler: try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1, and name NCCL_SOCKET_IFNAME; check "
        "ACS/IOMMU, and that gloo works "
        "between the nodes (if not, it is the network).",
        because=tuple(works[:4]), against=("a rank is missing: still loading, or failed before its first collective",
        "gloo fails as well"),
    )  # fmt: skip


def inside(case: Case) -> Verdict | None:
    """Every rank was seen in a collective, and none gets through: it is no rank, it is what is between them."""
    if not case.facts.world or case.seen_waiting < frozenset(range(case.facts.world)):
        return None
    seen = [fact for fact in case.waits if fact.kind in GOING_ON]
    return Verdict(
        fault=Fault.NETWORK, confidence=Confidence.LOW,
        cause="all ranks are in a collective and none gets through it: the way between some of them",
        remedy="A probe of the pairs tells node, link or path (elasticrl doctor --nodes ...).", because=tuple(seen[:6]),
        against=("the ranks are in different collectives (then it is desync)", "all pairs pass a probe, over NCCL too"),
    )  # fmt: skip
