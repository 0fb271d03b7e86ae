"""The scene of a stall on one node, before it is cleaned up: every worker's stack and flight recorder, as evidence.

The one idea: it is one question to all workers at once, bounded by `timeouts.dump`, and what comes back are facts about single
ranks; so the facts of all nodes can be put together in any order, and only the verdict compares.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from elasticrl.base.process import state
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Evidence, Kind, Sign
from elasticrl.diagnose import recorder, stacks
from elasticrl.diagnose.recorder import Entry
from elasticrl.diagnose.stacks import Stack

RECENT = 8  # collectives of a rank that other nodes are told of: so far one rank may be ahead of another


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What was found.

    Example: Scene(evidence=(Evidence(...), ...), said="rank 3 is in its dataloader ...")
    """

    evidence: tuple[Evidence, ...]
    said: str  # for the log


def collect(
    folder: Path,
    workers: Mapping[int, int],
    *,
    within_s: float,
    recorders_s: float | None = None,
    node_of: Callable[[int], str | None] = lambda _: None,
) -> Scene:
    """Ask this node's workers (rank -> pid), whose witnesses stand in `folder`. It blocks: call it in a thread.

    A stack is had from who holds the GIL too, a recorder is not: `recorders_s` is for it alone. Who is stopped is not asked.
    """
    able = {rank: pid for rank, pid in workers.items() if state(pid) not in {"", "T", "t", "Z", "X"}}
    with ThreadPoolExecutor(1, "elasticrl-recorders") as other:
        dumps = other.submit(recorder.collect, folder, able, within_s=within_s if recorders_s is None else recorders_s)
        seen = stacks.collect(folder, workers, within_s=within_s)
        recorders = dumps.result()
    places = stacks.evidence(seen, node_of=node_of)
    return Scene(evidence=(*places, *positions(recorders, seen, node_of)), said=stacks.summary(places))


def positions(
    recorders: Mapping[int, Sequence[Entry]], seen: Mapping[int, Stack], node_of: Callable[[int], str | None]
) -> tuple[Evidence, ...]:
    """Each rank's newest collective of each group. Over gloo only its stack tells whether it is still in it.

    The last ones before it go along: a rank whose tensor had another size is let go by gloo where others still wait.
    """
    found = []
    for rank, entries in sorted(recorders.items()):
        stack = seen.get(rank)
        inside = bool(stack and stack.frames and stacks.activity(stack.frames).what == "collective")
        newest = {entry.group: entry for entry in entries}
        for group, entry in sorted(newest.items()):
            over = entry.state == "completed" or not inside
            found.append(
                Evidence(
                    kind=Kind.RECORDER, sign=Sign.WAITED if not over else Sign.BEHIND, rank=rank, node=node_of(rank),
                    group=group, op=entry.op, seq=entry.seq, numel_in=entry.numel, last_enqueued=entry.seq,
                    last_completed=entry.seq if over else entry.seq - 1, source="recorder",
                    detail=("after " if over else "in ") + str(entry),
                    calls=tuple(each.call for each in entries if each.group == group)[-RECENT:],
                )
            )  # fmt: skip
    return tuple(found)


def entered(
    folder: Path, workers: Mapping[int, int], *, until_ns: int, within_s: float, node_of: Callable[[int], str | None]
) -> tuple[Evidence, ...]:
    """The collectives that these workers had entered by a moment that is over: of a gang that is no more."""
    recorders = recorder.collect(folder, workers, within_s=within_s, until_ns=until_ns)
    return tuple(
        replace(fact, sign=Sign.ENTERED, last_enqueued=None, last_completed=None)
        for fact in positions(recorders, {}, node_of)
    )
