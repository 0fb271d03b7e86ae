"""A verdict as a page of text that a human can read aloud: what, who, since when, how sure, what to do, and on what grounds."""

from collections import Counter
from collections.abc import Sequence
from textwrap import fill

from elasticrl.base.words import count
from elasticrl.contract.evidence import Evidence
from elasticrl.contract.verdict import Fault, Verdict
from elasticrl.core.judge.meanings import WAITS
from elasticrl.diagnose.logs import Reading
from elasticrl.diagnose.transport import REMEDY, Ways

WIDTH = 110
TITLES = {
    Fault.DEAD_RANK: "a rank died", Fault.DEAD_NODE: "a node died",
    Fault.NETWORK: "the network", Fault.FABRIC: "the GPU fabric",
    Fault.DESYNC: "ranks out of step", Fault.STRAGGLER: "a slow rank", Fault.HOST_HANG: "a host that hangs",
    Fault.OOM_GPU: "out of GPU memory", Fault.OOM_HOST: "out of host memory", Fault.DISK: "a disk",
    Fault.GPU_FAULT: "a broken GPU",
    Fault.CONFIG: "a setting", Fault.VERSION_MISMATCH: "versions or files that differ",
    Fault.COORDINATOR: "the coordinating store",
    Fault.DIVERGENCE: "bits that parted", Fault.USER_ERROR: "the program", Fault.UNKNOWN: "unknown",
}  # fmt: skip


def plain(verdict: Verdict, evidence: Sequence[Evidence], ways: Ways | None = None) -> dict[str, object]:
    """For JSON: the form that scripts rely on. `transport`: which way NCCL chose, and who said so, if the logs have it."""
    told: dict[str, object] = {"verdict": verdict.plain(), "evidence": [fact.plain() for fact in evidence]}
    return {**told, "transport": ways.plain(), "sockets": ways.fallen} if ways and ways.chosen else told


def page(verdict: Verdict, reading: Reading) -> str:
    """For people."""
    who = [*(f"rank {rank}" for rank in verdict.ranks), *(f"node {node}" for node in verdict.nodes)]
    lines = [
        f"VERDICT     {verdict.fault}: {TITLES[verdict.fault]} (confidence {verdict.confidence})",
        *_entry("CAUSE", verdict.cause),
        *_entry("CULPRIT", ", ".join(who) or "unknown (the evidence names nobody)"),
    ]
    if since := began(reading.evidence):
        lines += _entry("SINCE", since)
    lines += _entry("DO", verdict.remedy)
    lines += ["BECAUSE", *(f"  - {_cut(str(fact))}  [{place(fact)}]" for fact in verdict.because)]
    lines += ["UNLESS", *(f"  - {_cut(text)}" for text in verdict.against)]
    if reading.ways.said:
        lines += _entry("NCCL", f"chose {reading.ways.said}")
    if reading.ways.fallen:
        lines += _entry("", f"{reading.ways.fallen}. {REMEDY}")
    kinds = Counter(str(fact.kind) for fact in reading.evidence)
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    more = f"; {reading.more} more that are like these" if reading.more else ""
    read = f"{count(len(reading.files), 'file')}, {count(len(reading.evidence), 'fact')}"
    lines += _entry("READ", f"{read}{': ' + counted if counted else ''}{more}")
    lines += [f"            not read: {reason}" for reason in reading.unread]
    return "\n".join(lines)


def began(evidence: Sequence[Evidence]) -> str:
    """When the earliest wait began: when it was reported, less how long it had waited."""
    waits = [fact for fact in evidence if fact.sign in WAITS and fact.when is not None and fact.elapsed_ms]
    if not waits:
        return ""
    first = min(waits, key=lambda fact: (fact.when or 0.0) - (fact.elapsed_ms or 0) / 1000)
    start = ((first.when or 0.0) - (first.elapsed_ms or 0) / 1000) % 86400
    clock = f"{int(start // 3600):02}:{int(start % 3600 // 60):02}:{int(start % 60):02}"
    return f"about {clock}, when the earliest of the waits that timed out began (seen at {first.at})"


def place(fact: Evidence) -> str:
    """Where a fact stands: file:line."""
    return f"{fact.source}:{fact.line_no}" if fact.line_no else fact.source or str(fact.kind)


def _entry(name: str, text: str) -> list[str]:
    return fill(text, WIDTH, initial_indent=f"{name:12}", subsequent_indent=" " * 12).splitlines()


def _cut(text: str) -> str:
    return text if len(text) <= 2 * WIDTH else text[: 2 * WIDTH - 1] + "…"
