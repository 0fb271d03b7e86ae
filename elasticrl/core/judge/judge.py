"""From evidence to a verdict. A pure function of its arguments.

The one idea: facts have ranks of their own. A *cause* (a GPU off the bus, memory that ran out, a rank that entered another
collective) explains *consequences* (a peer that is gone), and both explain *waits* (a watchdog's timeout). The loudest facts
are waits: every innocent rank prints them. So waits never name the one who waited, a consequence speaks only where there is
no cause, and among causes the earliest wins. What is only likely is said with confidence `low`, and names nobody.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from elasticrl.contract.evidence import Evidence
from elasticrl.contract.verdict import Fault, Known, Verdict
from elasticrl.core.judge.case import Case
from elasticrl.core.judge.causes import declared, deep, seen
from elasticrl.core.judge.desync import apart, disagreed
from elasticrl.core.judge.hangs import elsewhere, lagged, missing
from elasticrl.core.judge.network import inside, never_worked, probed
from elasticrl.core.judge.victims import aborted, cut_off, followed, starved


def judge(evidence: Iterable[Evidence], facts: Known | None = None) -> Verdict:
    """The verdict on a fault. The evidence is in the order it was found in, as far as there is one."""
    case = Case(tuple(evidence), facts or Known())
    for rule in RULES:
        if verdict := rule(case):
            return replace(verdict, nodes=verdict.nodes or case.nodes_of(verdict.ranks))
    return Verdict(
        fault=Fault.UNKNOWN,
        cause="nothing in the evidence shows a failure" if not case.serious else "the evidence does not tell a cause",
        remedy="Collect the logs of all ranks, the kernel log, and the flight recorder (TORCH_FR_BUFFER_SIZE=2000).",
        because=case.serious[:3],
        against=("any line of another rank that failed earlier",),
    )


#: In the order in which they are asked; the first that answers decides.
RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    deep,  # a cause that explains everything else
    probed,  # pairs of nodes that tested each other
    disagreed,  # other collectives under the same number
    seen,  # any cause that was seen, rather than claimed by a log
    elsewhere,  # one look at all ranks: who is outside of collectives
    apart,  # the same look: all wait, and not for the same
    aborted,
    declared,  # any cause that a log claims
    lagged,
    never_worked,
    inside,
    followed,  # no cause: what follows from one that is not shown
    missing,
    starved,  # nothing but waits
    cut_off,  # nothing but a traceback without its end
)
