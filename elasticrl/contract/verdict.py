"""What a verdict is: which class of fault, who, why, how sure, what to do, and what would contradict it.

The judge is `judge.judge`; what facts are worth to it stands in `meanings`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import StrEnum

from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence


class Fault(StrEnum):
    """The class of a fault; `policy` in the config has one action for each."""

    DEAD_RANK = "dead_rank"
    DEAD_NODE = "dead_node"
    NETWORK = "network"
    FABRIC = "fabric"  # gloo works, NCCL does not
    DESYNC = "desync"
    STRAGGLER = "straggler"
    HOST_HANG = "host_hang"
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    DISK = "disk"
    GPU_FAULT = "gpu_fault"
    CONFIG = "config"
    VERSION_MISMATCH = "version_mismatch"
    COORDINATOR = "coordinator"
    DIVERGENCE = "divergence"  # silent data corruption
    USER_ERROR = "user_error"
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How sure a verdict is. `low`: a guess, by what such jobs turned out to have; a person should decide."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known beside the evidence.

    Example: Known(world=8, heard=frozenset(range(8)), nodes={0: "n00", 1: "n00"})
    """

    world: int | None = None
    heard: frozenset[int] = frozenset()  # ranks whose output was seen, whatever it said
    nodes: Mapping[int, str] = field(default_factory=dict)  # where each rank runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer.

    Example: Verdict(fault=Fault.HOST_HANG, ranks=(3,), nodes=("n01",), cause="rank 3 has been in its dataloader for 12 s
    while 7 others wait in ALLREDUCE 4486", confidence=Confidence.HIGH, remedy="...", because=(...), against=(...))
    """

    fault: Fault
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    cause: str
    confidence: Confidence = Confidence.LOW
    remedy: str = ""
    because: tuple[Evidence, ...] = ()
    against: tuple[str, ...] = ()  # what would contradict it, and what was seen that might

    @property
    def said(self) -> str:
        """The cause, with the node that it is about."""
        lacks = [node for node in self.nodes if node not in self.cause]
        return f"{', '.join(lacks)}: {self.cause}" if lacks else self.cause

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "class": str(self.fault),
            "culprit": {"ranks": list(self.ranks), "nodes": list(self.nodes)},
            "cause": self.cause,
            "confidence": str(self.confidence),
            "remedy": self.remedy,
            "because": [str(fact) for fact in self.because],
            "against": list(self.against),
        }


def surest(verdicts: list[Verdict]) -> Verdict:
    """The one with most confidence; of equals the first."""
    known = [verdict for verdict in verdicts if verdict.fault is not Fault.UNKNOWN] or verdicts
    return max(known, key=lambda verdict: list(Confidence).index(verdict.confidence))


def rank_names(ranks: Iterable[int]) -> str:
    """Ranks as people say them; "" if there are none.

    >>> rank_names([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    listed = sorted(set(ranks))
    if not listed:
        return ""
    spans: list[str] = []
    start = previous = listed[0]
    for rank in [*listed[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        spans.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(spans)
