"""Rules for a rank that is not where the others are: its host is elsewhere, or it is behind.

The one idea: the culprit of a hang is silent, so it is found by what all others show: they wait, and it does not.
"""

from elasticrl.contract.evidence import GANG, Evidence, Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict, rank_names
from elasticrl.core.judge.case import Case
from elasticrl.core.judge.meanings import MEANINGS, SNAPSHOTS


def elsewhere(case: Case) -> Verdict | None:
    """All were looked at in the same moment: who is outside of collectives while most wait in one holds them up."""
    away = case.away
    if not away:
        return None
    there = sorted({f.rank for f in case.waits if f.kind in SNAPSHOTS and f.rank is not None} - set(away))
    first = min(away)
    return Verdict(
        fault=Fault.HOST_HANG, ranks=tuple(sorted(away)), confidence=Confidence.HIGH,
        cause=f"{rank_names(away)} {'is' if len(away) == 1 else 'are'} outside of collectives, {away[first].detail}, while "
        f"{rank_names(there)} {'waits' if len(there) == 1 else 'wait'}",
        remedy=MEANINGS[Sign.HOST_STUCK].remedy,
        because=(*(away[rank] for rank in sorted(away)[:3]), *case.waits[:3]),
        against=("a second look shows it moving on: then it is slow, not stuck",),
    )  # fmt: skip


def lagged(case: Case) -> Verdict | None:
    """A rank whose host never enqueued what the others wait in, or whose GPU is behind in the same group."""
    for group, works in case.groups.items():
        if not group:
            continue
        status: dict[int, Evidence] = {}
        for fact in works:
            if fact.rank is not None and fact.last_completed is not None:
                status[fact.rank] = fact
        if len(status) < 2:
            continue
        wanted = max(s.last_completed + 1 for s in status.values() if s.last_completed is not None)
        # Who is seen inside of an earlier collective has not gone elsewhere: it is what it waits for that does not come.
        never = sorted(
            r
            for r, s in status.items()
            if s.last_enqueued is not None and s.last_enqueued < wanted and r not in case.seen_waiting
        )
        behind = sorted(r for r, s in status.items() if s.last_completed is not None and s.last_completed + 1 < wanted)
        if never and len(never) * 2 <= len(status):
            others = sorted(set(status) - set(never))
            return Verdict(
                fault=Fault.HOST_HANG, ranks=tuple(never), confidence=Confidence.MEDIUM,
                cause=f"{rank_names(never)} never entered collective {wanted} of group {group}; {rank_names(others)} "
                "waited there",
                remedy=MEANINGS[Sign.HOST_STUCK].remedy, because=tuple(status[r] for r in (*never, *others))[:6],
                against=("its stack shows it inside that collective",),
            )  # fmt: skip
        if behind and len(behind) * 2 <= len(status):
            return Verdict(
                fault=Fault.NETWORK, ranks=tuple(behind), confidence=Confidence.LOW,
                cause=f"{rank_names(behind)} entered the collective, but does not get through it as the others in group "
                f"{group} did: its link or its GPU",
                remedy=MEANINGS[Sign.LINK].remedy, because=tuple(status[r] for r in sorted(status))[:6],
                against=("its host entered another collective before (see its flight recorder)",),
            )  # fmt: skip
    return None


def missing(case: Case) -> Verdict | None:
    """Ranks that are known to exist and do not wait with the others: the silent one is the one to look at."""
    ours = [fact for fact in case.waits if fact.group in {None, "default_pg", "0", GANG}]
    if not ours or len(case.waiting) < 2:
        return None
    known = case.facts.heard | (frozenset(range(case.facts.world)) if case.facts.world else frozenset())
    absent = sorted(known - case.waiting)
    if not absent or len(absent) * 2 > len(case.waiting):
        return None
    return Verdict(
        fault=Fault.HOST_HANG, ranks=tuple(absent), confidence=Confidence.MEDIUM if case.facts.world else Confidence.LOW,
        cause=f"{rank_names(sorted(case.waiting))} waited and {rank_names(absent)} did not: its host was elsewhere (data, "
        "save, evaluation, a lock)",
        remedy=MEANINGS[Sign.HOST_STUCK].remedy, because=tuple(ours[:6]),
        against=("its log was not collected", "it had left the collective before: an early exit or uneven inputs"),
    )  # fmt: skip
