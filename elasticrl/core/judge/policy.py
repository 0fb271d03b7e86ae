"""From a verdict to what is done about it. Pure.

The one idea: the operator's word for a class of fault (`policy.*`) is the most that may be done; what the verdict does not
carry, or what would cost the cluster more than the fault, falls back to the next milder thing, and the reason says so.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from elasticrl.base.value import dataclass
from elasticrl.contract.verdict import Confidence, Fault, Verdict
from elasticrl.core.judge.case import witnessed


class Act(StrEnum):
    """What can be done, as the configuration calls it."""

    REPORT = "report"
    RESTART = "restart"  # up the ladder from rung 1: who is dead or sick is replaced by a process that is warm, or a spare node
    REPLACE = "replace"  # of a slow rank alone: a spare node takes the place of its node
    QUARANTINE = "quarantine"
    FALLBACK = "fallback"  # go on over gloo
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What is known when it is decided.

    Example: Scope(known=8, min_nodes=4, held=frozenset({"n07"}), recent=1, share=0.5, gloo=True)
    """

    known: int  # nodes of the job, those in quarantine included
    min_nodes: int = 1
    held: frozenset[str] = frozenset()  # in quarantine
    recent: int = 0  # quarantines that began in the last hour
    share: float = 0.5  # `health.quarantine_share`: of the known nodes, at once and in an hour
    gloo: bool = False  # `comm.fallback: gloo`, and the probe has shown that gloo carries what is needed
    slow: str = ""  # why it would be too slow all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is done, to whom, and the sentence for log, status and incident.

    Example: Answer(act=Act.QUARANTINE, nodes=("n03",), reason="n03 cannot be reached by its peers: quarantined")
    """

    act: Act
    nodes: tuple[str, ...] = ()
    reason: str = ""
    milder: str = field(default="", compare=False)  # why it is not what the policy says
    capped: bool = field(default=False, compare=False)  # because of a cap: the evidence would have carried it


def proven(verdict: Verdict) -> bool:
    """Is it sure enough to stop the job, or to keep a node out that is up? That a worker of ours was seen to die is, though who
    killed it is not known; that a log speaks of a death is not.
    """
    seen = verdict.fault is Fault.DEAD_RANK and bool(verdict.because) and witnessed(verdict.because[0])
    return verdict.confidence is Confidence.HIGH or (seen and verdict.confidence is Confidence.MEDIUM)


def answer(verdict: Verdict, policy: Mapping[Fault, Act], scope: Scope) -> Answer:
    """What to do about a verdict on a gang that has stalled or broken."""
    wanted = policy.get(verdict.fault, Act.RESTART)
    act, milder = _allowed(wanted, verdict, scope)
    said = f"{verdict.cause}: {DONE[act]}" + (f" ({milder})" if milder else "")
    named = verdict.confidence is not Confidence.LOW and bool(verdict.nodes)
    capped = named and wanted is Act.QUARANTINE and act is not wanted
    return Answer(act=act, nodes=verdict.nodes, reason=said, milder=milder, capped=capped)


DONE: Mapping[Act, str] = {
    Act.REPORT: "reported", Act.RESTART: "the process group was formed anew", Act.REPLACE: "replaced",
    Act.QUARANTINE: "quarantined", Act.FALLBACK: "going on over gloo", Act.STOP: "the job stops",
}  # fmt: skip


def _allowed(wanted: Act, verdict: Verdict, scope: Scope) -> tuple[Act, str]:
    if wanted in {Act.REPORT, Act.RESTART}:
        return wanted, ""
    if verdict.confidence is Confidence.LOW:
        return Act.RESTART, f"policy says {wanted}, and the evidence is weak"
    if wanted is Act.STOP:
        return (wanted, "") if proven(verdict) else (Act.RESTART, "policy says stop, and it is not proven")
    if wanted is Act.FALLBACK:
        broken = verdict.fault is Fault.FABRIC and verdict.confidence is Confidence.HIGH
        if broken and scope.gloo and not scope.slow:
            return wanted, ""
        why = "gloo cannot carry it" if not scope.gloo else scope.slow if broken else "NCCL is not proven broken"
        return Act.RESTART, f"policy says fallback, and {why}"
    if not (verdict.nodes or verdict.ranks):
        return Act.RESTART, f"policy says {wanted}, and the evidence names nobody"
    if wanted is Act.QUARANTINE and (why := _too_many(verdict.nodes, scope)):
        return Act.RESTART, f"policy says quarantine, and {why}"
    return wanted, ""


def _too_many(nodes: tuple[str, ...], scope: Scope) -> str:
    """Why these nodes may not all be kept out; "" if they may."""
    new = set(nodes) - scope.held
    if not nodes:
        return "no node is named"
    if not new:
        return ""  # they are out already
    left = scope.known - len(scope.held) - len(new)
    if left < scope.min_nodes:
        return f"{left} nodes would be left of {scope.min_nodes} that are needed (membership.min_nodes)"
    most = int(scope.share * scope.known)
    if max(len(scope.held), scope.recent) + len(new) > most:
        return f"no more than {most} nodes may be out at once or in an hour (health.quarantine_share)"
    return ""
