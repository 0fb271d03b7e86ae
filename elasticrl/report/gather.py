"""What is kept of lines while they go by, so that a run of hundreds of nodes and weeks fits into memory.

The one idea: each line is looked at once and let go. What has to be exact is a figure that every line goes into; what is a
picture or a median is made from rows, and where these would be too many from those of every second, fourth, eighth step: all
ranks of a step, or none.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final, Generic, TypeVar

from elasticrl.base.goodput import stepped
from elasticrl.base.parsed import HIGHEST
from elasticrl.base.words import count
from elasticrl.diagnose.incident import Incident
from elasticrl.report.values import Happening, Life, Log, Pace, Took

LINES: Final = 200_000  # rows that are kept of a kind, about a kilobyte each
CASES: Final = 200  # incidents that are told
#: What a daemon says while it is in the job, and never on its way up.
LIVELY: Final = frozenset(
    {"plan.adopted", "workers.changed", "node.state", "checkpoint.committed", "recovery.done", "daemon.stopped"}
)
ABSENT: Final = "\0"  # a field that a line has not

Row = TypeVar("Row")


class Thin(Generic[Row]):
    """Rows of steps: all of them, or those of every so manieth step.

    >>> thin = Thin(int, most=3)
    >>> for step in range(6):
    ...     thin.add(step)
    >>> thin.rows, thin.every, thin.seen
    ([0, 2, 4, 5], 2, 6)
    >>> thin.add(5)  # of another rank
    >>> thin.rows
    [0, 2, 4, 5, 5]
    """

    def __init__(self, step_of: Callable[[Row], int], most: int | None = None) -> None:
        self._step_of, self._most = step_of, LINES if most is None else most
        self._kept: list[Row] = []
        self._newest: list[Row] = []  # all ranks'
        self.every, self.seen = 1, 0

    def add(self, row: Row) -> None:
        """One more."""
        self.seen += 1
        step = self._step_of(row)
        if not self._newest or step > (newest := self._step_of(self._newest[0])):
            self._newest = [row]
        elif step == newest:
            self._newest.append(row)
        if step % self.every:
            return
        self._kept.append(row)
        while len(self._kept) > self._most:
            fewer = [kept for kept in self._kept if not self._step_of(kept) % (2 * self.every)]
            if not fewer or self.every > self._step_of(self._newest[0]):
                self._most *= 2  # one step of more ranks than that: none of them may go
                break
            self._kept, self.every = fewer, 2 * self.every

    @property
    def rows(self) -> list[Row]:
        """In the order in which they came, and the newest step whichever it is."""
        kept = not self._newest or not self._step_of(self._newest[0]) % self.every
        return [*self._kept, *(() if kept else self._newest)]


class Runs:
    """Which jobs and runs the events of some logs are of."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._seen: dict[tuple[str, str], list[float]] = {}  # (job, run): how many, the first, the last

    def add(self, event: Happening) -> None:
        """One more event."""
        self.nodes.add(event.node)
        seen = self._seen.setdefault(_whose(event), [0, inf, -inf])
        seen[0] += 1
        seen[1], seen[2] = min(seen[1], event.at), max(seen[2], event.at)

    def newest(self, job: str | None = None) -> tuple[str, Callable[[Happening], bool], float | None, Counter[str]]:
        """The job (`job`, if it was asked for) and its run that was on last: which events are theirs, since when, if there was
        another before, and how many each other one has: a machine's journal has all that ever ran on it.
        """
        by_end = sorted(self._seen, key=lambda whose: self._seen[whose][2], reverse=True)
        job = job or next((job for job, _ in by_end if job not in ("", ABSENT)), "")
        mine = [whose for whose in by_end if whose[0] in (job, ABSENT)]
        run = next((run for _, run in mine if run not in ("", ABSENT)), ABSENT)
        others = sorted(
            (whose for whose in by_end if whose not in mine or whose[1] not in (run, ABSENT)),
            key=lambda whose: self._seen[whose][1],
        )
        if not others:
            return job, lambda _: True, None, Counter()
        names: Counter[str] = Counter()
        for of, name in others:
            said = f"job {job if of == ABSENT else of}" + (f", run {name}" if name not in ("", ABSENT) else "")
            names[said] += int(self._seen[of, name][0])
        begun = min((self._seen[whose][1] for whose in mine if whose[1] == run), default=-inf)

        def ours(event: Happening) -> bool:
            of, name = _whose(event)
            return of in (job, ABSENT) and name in (run, ABSENT) and event.at >= begun

        return job, ours, begun, names


def _measured(value: object) -> bool:
    return isinstance(value, int | float) and -HIGHEST < value < HIGHEST  # which no NaN is


def _whose(event: Happening) -> tuple[str, str]:
    job, run = (event.said.get(name, ABSENT) for name in ("job", "run"))
    return ("" if job is None else str(job)), ("" if run is None else str(run))


@dataclass(slots=True)
class _Node:
    at: "array[float]" = field(default_factory=lambda: array("d"))
    what: "array[int]" = field(default_factory=lambda: array("I"))
    signs: "array[float]" = field(default_factory=lambda: array("d"))


class Logs:
    """What daemons' events come to."""

    def __init__(self) -> None:
        self._events, self._begin, self._end = 0, inf, -inf
        self._nodes: dict[str, _Node] = {}
        self._words: dict[str, int] = {}
        self._plans: dict[int, Happening] = {}
        self._recovered: dict[int, Happening] = {}
        self._committed: dict[int, float] = {}
        self._reached: dict[int, float] = {}
        self._steps = 0
        self._milestone: tuple[float, str] = (-inf, "")
        self._trained: tuple[float, int] = (inf, 0)

    def add(self, event: Happening) -> None:
        """One more event."""
        self._events += 1
        self._begin, self._end = min(self._begin, event.at), max(self._end, event.at)
        node = self._nodes.setdefault(event.node, _Node())
        if event.name in LIVELY:
            node.signs.append(event.at)
        if (keep := KEEP.get(event.name)) is not None:
            keep(self, event, node)

    def _change(self, event: Happening, node: _Node, word: str) -> None:
        node.at.append(event.at)
        node.what.append(self._words.setdefault(word, len(self._words)))

    def _daemon(self, event: Happening, node: _Node) -> None:
        word = "daemon.adopted" if event.name == "daemon.started" and event.said.get("adopted") else event.name
        self._change(event, node, word)

    def _workers(self, event: Happening, node: _Node) -> None:
        word, step = str(event.said.get("work", "")), event.whole("step")
        self._change(event, node, word)
        first(self._reached, step, event.at)
        self._steps = max(self._steps, step)
        if word == "training" and event.at < self._trained[0]:
            self._trained = event.at, step

    def _far(self, event: Happening, _: _Node) -> None:
        self._milestone = max(self._milestone, (event.at, str(event.said.get("said", ""))))

    def _exit(self, event: Happening, _: _Node) -> None:
        first(self._reached, event.whole("step"), event.at)

    def _commit(self, event: Happening, _: _Node) -> None:
        first(self._committed, event.whole("step"), event.at)

    def _plan(self, event: Happening, _: _Node) -> None:
        number = event.whole("generation")
        if number not in self._plans or event.at < self._plans[number].at:
            self._plans[number] = event

    def _recovery(self, event: Happening, _: _Node) -> None:
        stages, total = event.said.get("stages"), event.said.get("total_s")
        if not isinstance(stages, dict) or not all(map(_measured, (total, *stages.values()))):
            return
        known = self._recovered.get(number := event.whole("generation"))
        if known is None or (total, -event.at) > (known.said["total_s"], -known.at):
            self._recovered[number] = event

    def starts(self) -> dict[str, list[float]]:
        """When each node's daemon began."""
        begun = {place for word, place in self._words.items() if word in ("daemon.started", "daemon.adopted")}
        return {
            name: sorted(at for at, what in zip(node.at, node.what, strict=True) if what in begun)
            for name, node in self._nodes.items()
        }

    def value(self) -> Log:
        """What they come to."""
        if not self._events:
            return Log()
        words = tuple(self._words)
        return Log(
            events=self._events, begin=self._begin, end=self._end,
            nodes={name: _life(node, words) for name, node in self._nodes.items()},
            plans=self._plans, recovered=self._recovered, committed=self._committed, reached=self._reached,
            steps=self._steps, trained=self._trained[1], milestone=self._milestone[1],
        )  # fmt: skip


#: What is kept of an event, by its name; of others, that they were.
KEEP: Final[Mapping[str, Callable[[Logs, Happening, _Node], None]]] = {
    "daemon.started": Logs._daemon,  # noqa: SLF001 # a table of its own methods
    "daemon.stopped": Logs._daemon,  # noqa: SLF001
    "workers.changed": Logs._workers,  # noqa: SLF001
    "milestone.read": Logs._far,  # noqa: SLF001
    "worker.exited": Logs._exit,  # noqa: SLF001
    "checkpoint.committed": Logs._commit,  # noqa: SLF001
    "plan.adopted": Logs._plan,  # noqa: SLF001
    "recovery.done": Logs._recovery,  # noqa: SLF001
}


def _life(node: _Node, words: Sequence[str]) -> Life:
    order = sorted(range(len(node.at)), key=node.at.__getitem__)
    return Life(
        at=array("d", (node.at[i] for i in order)), what=array("I", (node.what[i] for i in order)), words=words,
        signs=array("d", sorted(node.signs)),
    )  # fmt: skip


def first(times: dict[int, float], step: int, at: float) -> None:
    """When a step was first seen."""
    times[step] = min(at, times.get(step, inf))


class Paces:
    """What lines of steps' times come to. `starts`: of each node's daemon; of a node's signs of life the last before each is
    kept.
    """

    def __init__(self, starts: Mapping[str, Sequence[float]]) -> None:
        self.rows: Thin[Took] = Thin(lambda line: line.step)
        self._starts = starts
        self._begin, self._end, self._steps = inf, -inf, 0
        self._signs: dict[str, dict[int, float]] = {}
        self._sealed: dict[int, float] = {}
        self._first: int | None = None
        self._newest, self._began = 0, inf

    def add(self, line: Took) -> None:
        """One more line."""
        self.rows.add(line)
        self._begin, self._end = min(self._begin, line.at), max(self._end, line.at)
        self._steps = max(self._steps, line.step)
        signs, place = self._signs.setdefault(line.node, {}), bisect_right(self._starts.get(line.node, ()), line.at)
        signs[place] = max(line.at, signs.get(place, -inf))
        first(self._sealed, line.step, line.at)
        if stepped(line.seconds):
            before = line.step - line.steps
            self._first = before if self._first is None else min(self._first, before)
            self._newest = max(self._newest, line.step)
            self._began = min(self._began, line.at - sum(line.seconds.values()))

    def value(self) -> Pace:
        """What they come to."""
        if not self.rows.seen:
            return Pace()
        return Pace(
            lines=self.rows.seen, begin=self._begin, end=self._end, steps=self._steps, sealed=self._sealed,
            nodes={name: array("d", sorted(signs.values())) for name, signs in self._signs.items()},
            first=self._first, newest=self._newest, began=self._began,
        )  # fmt: skip


class Cases:
    """Incidents: what several nodes saw, once: as the one tells it that has most grounds, at the cost of whom it cost most. Of
    more than `CASES` the newest.
    """

    def __init__(self, most: int | None = None) -> None:
        self.seen = 0
        self._most = CASES if most is None else most
        self._best: dict[tuple[Any, ...], Incident] = {}
        self._costs: dict[tuple[Any, ...], float] = {}
        self._nodes: dict[tuple[Any, ...], set[str]] = {}
        self._began: dict[tuple[Any, ...], str] = {}
        self._gone: set[tuple[Any, ...]] = set()

    def add(self, each: Incident) -> None:
        """One more."""
        self.seen += 1
        key = (each.generation, each.verdict.fault, each.verdict.ranks, each.verdict.nodes)
        if key in self._gone:
            return
        known = self._best.get(key)
        if known is None or (_grounds(each), _who(known)) > (_grounds(known), _who(each)):
            self._best[key] = each
        if each.seconds is not None:
            self._costs[key] = max(each.seconds, self._costs.get(key, each.seconds))
        self._nodes.setdefault(key, set()).add(each.node)
        self._began[key] = min(each.began, self._began.get(key, each.began))
        if len(self._best) > self._most:
            oldest = min(self._began, key=self._began.__getitem__)
            self._gone.add(oldest)
            for kept in (self._best, self._costs, self._nodes, self._began):
                kept.pop(oldest, None)

    @property
    def sentence(self) -> str:
        """For people: several nodes may tell of one."""
        told = count(len(self._best) + self.untold, "incident")
        return told if self.seen == len(self._best) + self.untold else f"{told} in {self.seen} nodes' words"

    @property
    def untold(self) -> int:
        """How many are left out."""
        return len(self._gone)

    def told(self) -> tuple[Incident, ...]:
        """Oldest first."""
        found = []
        for key, best in self._best.items():
            nodes = ", ".join(sorted(self._nodes[key]))
            found.append(replace(best, node=nodes, seconds=self._costs.get(key), began=self._began[key]))
        return tuple(sorted(found, key=lambda each: each.began))


def _grounds(each: Incident) -> tuple[int, int, int]:
    return len(each.verdict.because), len(each.evidence), len(each.timeline)


def _who(each: Incident) -> tuple[str, str]:
    return each.began, each.node
