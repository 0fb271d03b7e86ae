"""What a trial has come to, read from what its workers wrote; pure.

The one idea: a step of the same process in the same generation and world as before the blow may have been under way when it
fell, so it proves nothing. *Fresh* steps are those of a configuration that was not seen before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.live.local import Sealed

WATCH_S = 20.0  # how long a job is watched whose coordinator was killed: longer than the peers' keep-alives
NODES = ("n0", "n1", "n2")
PAUSES = ("coordinator", "store", "join")  # may pass without a new configuration: the longest silence counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Samples that went into a try of a step. Example: Deal(step=41, generation=3, rank=0, samples=(240, 243))"""

    step: int
    generation: int
    rank: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trial. Example: Outcome(side="torchrun", fault="worker", survivors_s=4.1, full_s=4.1, steps_lost=12, ...)"""

    side: str
    fault: str
    survivors_s: float | None = None
    full_s: float | None = None
    steps_lost: int | None = None
    samples_lost: int | None = None
    samples_repeated: int | None = None
    same_bits: bool | None = None
    blamed: str = ""
    end: str = ""  # "job lost", "never in 60 s", or why it was not run; empty if all that was waited for came
    load: float = 0.0  # of the machine when the trial began
    day: str = ""  # when that was
    others: float | None = None  # the share of all processors that others took just before; None: nobody looked then
    commit: str = ""  # of elasticrl
    machine: str = ""  # where: a race is run in pieces


def deal(line: str) -> Deal:
    """A line of the samples' file."""
    _, step, _, generation, _, rank, _, samples = line.split()
    taken = tuple(int(sample) for sample in samples.split(","))
    return Deal(step=int(step), generation=int(generation), rank=int(rank), samples=taken)


def fresh(lines: Iterable[Sealed], at: float) -> list[Sealed]:
    """Steps made after the blow by a process, in a generation and a world, that had made none before."""
    lines = list(lines)
    known = {(line.node, line.pid, line.generation, line.world) for line in lines if line.at <= at}
    return [line for line in lines if line.at > at and (line.node, line.pid, line.generation, line.world) not in known]


def first_step(lines: Iterable[Sealed], nodes: Sequence[str], *, world: int | None = None) -> float | None:
    """When the first step was whole that all these nodes have made together."""
    made: dict[tuple[int, int], dict[str, float]] = {}
    for line in lines:
        if line.node in nodes and (world is None or line.world == world):
            made.setdefault((line.generation, line.step), {})[line.node] = line.at
    return min((max(when.values()) for when in made.values() if len(when) == len(nodes)), default=None)


def pause(lines: Iterable[Sealed], nodes: Sequence[str], at: float, until: float) -> float | None:
    """The longest silence of any of these nodes that ended after the blow; None if one of them is silent still."""
    longest = 0.0
    for node in nodes:
        times = [line.at for line in lines if line.node == node and line.at <= until]
        gaps = [later - earlier for earlier, later in pairwise(times) if later > at]
        if not gaps or until - times[-1] > 2.0:
            return None
        longest = max(longest, *gaps)
    return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a gang has come since the blow. Example: Progress(survivors_s=1.2, full_s=None, enough=False)"""

    survivors_s: float | None
    full_s: float | None
    enough: bool  # all that is waited for has come


def progress(lines: Sequence[Sealed], fault: str, survivors: Sequence[str], *, at: float, now: float) -> Progress:
    """Survivors are waited for, and all nodes, unless nobody was struck or the one that was stays away."""
    wants_full = fault != "node" and len(survivors) < len(NODES)
    new = fresh(lines, at)
    full = first_step(new, NODES, world=len(NODES)) if wants_full else None
    if fault in PAUSES:
        first = pause(lines, survivors, at, now)
        enough = first is not None and now - at > WATCH_S
    else:
        step = first_step(new, survivors) if survivors else None
        first = None if step is None else step - at
        enough = first is not None or not survivors
    full_s = None if full is None else full - at
    return Progress(survivors_s=first, full_s=full_s, enough=enough and (full is not None or not wants_full))


def steps_lost(lines: Iterable[Sealed], at: float) -> int | None:
    """Steps that a node had made before the blow and made again, at most; None if nothing went on.

    Each node is compared with itself: the word of one that is slower than others comes late, and is no second time.
    """
    lines = list(lines)
    newest: dict[str, int] = {}
    for line in lines:
        if line.at <= at:
            newest[line.node] = max(line.step, newest.get(line.node, 0))
    again = [newest[line.node] + 1 - line.step for line in lines if line.at > at and line.node in newest]
    return max(0, *again) if again else None


def samples(lines: Iterable[Sealed], deals: Iterable[Deal], since: int = 0) -> tuple[int, int]:
    """How many samples were lost, and how many trained more than once, by the steps that count in the end, from this step on.

    Of a step that was made several times the last counts. The newest step is left out: it may have been under way.
    """
    made = {line.step: line.generation for line in sorted(lines, key=lambda line: line.at)}
    newest = max(made, default=0)
    used: dict[tuple[int, int], tuple[int, ...]] = {}
    dealt: set[int] = set()
    for one in deals:
        if one.step < newest:
            dealt.update(one.samples if one.step >= since else ())
            if made.get(one.step) == one.generation:
                used[one.step, one.rank] = one.samples
    earlier = [sample for (step, _), taken in used.items() if step < since for sample in taken]
    later = [sample for (step, _), taken in used.items() if step >= since for sample in taken]
    counted = {*earlier, *later}
    return len(dealt - counted), len(later) - (len(counted) - len(set(earlier)))


def same_bits(lines: Iterable[Sealed], undisturbed: Mapping[int, str]) -> bool | None:
    """Has the newest step the digest of the undisturbed run? None if that did not come so far."""
    known = [line for line in lines if line.step in undisturbed]
    if not known:
        return None
    last = max(known, key=lambda line: (line.at, line.step))
    return undisturbed[last.step] == last.digest


def names(found: Iterable[tuple[str, str]]) -> str:
    """Who was blamed, by whose log. Example: names([("n0", "exit code 1"), ("n1", "exit code -9")])"""
    by: dict[str, set[str]] = {}
    for node, what in found:
        by.setdefault(what, set()).add(node)
    return "; ".join(f"{what} ({', '.join(sorted(nodes))})" for what, nodes in sorted(by.items()))
