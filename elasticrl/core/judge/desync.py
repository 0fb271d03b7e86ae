"""The rule for ranks that are in different collectives under the same number of the same group.

The one idea: recorders prove it; what watchdogs print of operations and sizes is compared where there are no recorders.
"""

from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict, rank_names
from elasticrl.core.judge.case import Case
from elasticrl.core.judge.meanings import MEANINGS

#: Operations in which every rank must bring the same number of elements; recorders write all_reduce.
EVEN = frozenset({"ALLREDUCE", "BROADCAST", "ALLGATHERBASE", "ALLGATHER", "COALESCED", "REDUCESCATTERBASE", "REDUCESCATTER",
                  "ALLREDUCECOALESCED", "REDUCE", "BARRIER"})  # fmt: skip

#: Operations of which one end is another than the other: that they differ between ranks says nothing.
PAIRED = frozenset({"send", "recv", "batch_isend_irecv", "wait_tensor"})


def disagreed(case: Case) -> Verdict | None:
    """Ranks that wait in different collectives under the same number of the same group."""
    if compared := _compared(case):
        return compared
    for group, works in case.groups.items():
        by_seq: dict[int, dict[int, Evidence]] = {}
        for fact in works:
            if fact.rank is not None and fact.seq is not None and fact.op:
                by_seq.setdefault(fact.seq, {}).setdefault(fact.rank, fact)
        for seq, ranks in sorted(by_seq.items()):
            shapes: dict[tuple[object, ...], list[int]] = {}
            for rank, fact in sorted(ranks.items()):
                shapes.setdefault(_shape(fact), []).append(rank)
            if len(shapes) < 2:
                continue
            majority = max(map(len, shapes.values()))
            odd = sorted(r for members in shapes.values() if len(members) < majority for r in members)
            ranks_named = tuple(odd or sorted(ranks))
            what = "; ".join(f"{rank_names(members)}: {_shape_words(ranks[members[0]])}" for members in shapes.values())
            return Verdict(
                fault=Fault.DESYNC, ranks=ranks_named, confidence=Confidence.HIGH if group else Confidence.MEDIUM,
                cause=f"ranks are in different collectives at the same number {seq}: {what}",
                remedy=MEANINGS[Sign.MISMATCH].remedy,
                because=tuple(ranks[r] for r in sorted(ranks))[:6],
                against=("the ranks belong to different process groups (their names are not in these lines)",) if not group
                else (MEANINGS[Sign.MISMATCH].contradicted_by,),
            )  # fmt: skip
    return None


def apart(case: Case) -> Verdict | None:
    """All ranks were looked at in the same moment, and all wait, but in different operations: nobody can come."""
    inside = {
        f.rank: f for f in case.waits if f.kind is Kind.STACK and f.rank is not None and f.op and f.op not in PAIRED
    }
    sides: dict[str, list[int]] = {}
    for rank, fact in sorted(inside.items()):
        sides.setdefault(str(fact.op), []).append(rank)
    if len(sides) < 2 or case.facts.heard - set(inside):
        return None
    most = max(map(len, sides.values()))
    odd = sorted(rank for members in sides.values() if len(members) < most for rank in members)
    return Verdict(
        fault=Fault.DESYNC, ranks=tuple(odd), confidence=Confidence.MEDIUM,
        cause="all ranks wait, but in different operations: "
        + "; ".join(f"{rank_names(members)} in {op}" for op, members in sides.items()),
        remedy=MEANINGS[Sign.MISMATCH].remedy, because=tuple(inside[rank] for rank in sorted(inside))[:6],
        against=("the ranks are in different process groups, and each of them is complete",),
    )  # fmt: skip


def _compared(case: Case) -> Verdict | None:
    """What recorders prove: ranks have entered different collectives under the same number."""
    parted = case.parted
    if parted is None:
        return None
    told = [f for f in case.evidence if f.kind is Kind.RECORDER and f.calls and f.group == parted.group]
    what = "; ".join(f"{rank_names(members)}: {side}" for side, members in parted.sides)
    return Verdict(
        fault=Fault.DESYNC, ranks=parted.odd, confidence=Confidence.HIGH,
        cause=f"ranks are in different collectives at the same number {parted.seq}: {what}",
        remedy=MEANINGS[Sign.MISMATCH].remedy, because=tuple(told[:6]), against=(MEANINGS[Sign.MISMATCH].contradicted_by,),
    )  # fmt: skip


def _shape(fact: Evidence) -> tuple[object, ...]:
    return (fact.op, fact.numel_in, fact.numel_out) if str(fact.op).upper().replace("_", "") in EVEN else (fact.op,)


def _shape_words(fact: Evidence) -> str:
    return f"{fact.op}({fact.numel_in} -> {fact.numel_out})" if fact.numel_in is not None else str(fact.op)
