"""What happened, reckoned from what was left behind. Pure: values in, values out.

The one idea: nothing is told twice. When the job trained, what each recovery cost and who was slow follow from the same few
events that operators see, so the page cannot disagree with the logs it was made from.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Final

from elasticrl.base.goodput import APART, goodput, stepped
from elasticrl.contract.cause import goes_on, orderly
from elasticrl.diagnose.incident import Incident
from elasticrl.report.values import Left, Life, Log, Note, Took

STAGES: Final = ("detect", "decide", "reform", "restore", "first_step")
TRAINING: Final = frozenset({"training"})
STILL: Final = frozenset(
    {"hold", "probe", "stop"}
)  # phases of a plan in which no step is made, whatever its workers say
SHOWN: Final = 24  # nodes or ranks that are drawn; more would be a texture
UNSHOWN: Final = APART - {"reform"}  # before a rank came, and between two groups; how long those take to form is shown
BINS: Final = 96  # columns of the heat map
MANY: Final = 8  # ranks from which on the median of all stands for that of the others
SLOW: Final = 1.05  # of the others' median: what nobody would call slow is not shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a node did for a while. Example: Span(node="n0", start=1.0, end=4.5, state="training")"""

    node: str
    start: float
    end: float
    state: str  # starting, training, recovering, waiting, done


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One plan. `step`: the newest sealed when it was adopted."""

    number: int
    at: float
    phase: str
    rung: str
    world: int
    members: int
    reason: str
    step: int = 0
    asked: bool = False  # it is what an operator wanted: a node leaves, a paused job goes on
    again: bool = False  # it goes on after a hold, for the fault that this answered

    @property
    def fault(self) -> bool:
        """It answers something that went wrong."""
        return self.rung not in ("", "start") and not self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a new generation cost, by the node that it took longest on."""

    generation: int
    at: float  # its end
    rung: str
    node: str
    total_s: float
    stages: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """How old something was: 0 at `start`, `end - start` at `end`."""

    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """How slow a rank was, beside the others' median: 1.0 is like them. Columns are stretches of time."""

    edges: tuple[float, ...]
    ranks: tuple[int, ...]
    nodes: Mapping[int, str]
    cells: Mapping[int, tuple[float | None, ...]]

    @property
    def worst(self) -> float:
        """The greatest of all."""
        return max((value for row in self.cells.values() for value in row if value is not None), default=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the page tells."""

    left: Left
    begin: float
    end: float
    nodes: tuple[str, ...]
    spans: tuple[Span, ...]  # of the first `SHOWN` nodes
    generations: tuple[Generation, ...]
    recoveries: tuple[Recovery, ...]
    incidents: tuple[Incident, ...]  # each once; `node` names all who saw it
    trained_s: float
    held_s: float
    since: float | None  # when it first trained
    counted: float | None  # the same, or since when steps' times are kept: what is older goes
    until: float  # its stop, or the end of its logs
    steps: int
    outcome: str
    commits: tuple[Age, ...]
    sealed: tuple[Age, ...]
    phases: tuple[tuple[int, Mapping[str, float]], ...]  # (step, seconds by phase), mean of ranks
    phases_of: str
    heat: Heat | None
    curve: tuple[Note, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]  # what was too much to be told whole, in sentences

    @property
    def goodput(self) -> float | None:
        """Sealed steps, each at what a step usually takes, by the time from the first training to the end; None without
        steps.jsonl.
        """
        pace, lines = self.left.pace, [line for line in self.left.took if stepped(line.seconds)]
        if self.counted is None or self.until <= self.counted or pace.first is None or not lines:
            return None
        usual = median(sum(line.seconds.values()) / line.steps for line in lines)
        return goodput(pace.newest - pace.first, usual, self.until - self.counted)

    @property
    def trained(self) -> float | None:
        """Share of that time in which the whole gang trained."""
        if self.since is None or self.until <= self.since:
            return None
        return min(1.0, self.trained_s / (self.until - self.since))

    @property
    def faults(self) -> tuple[Generation, ...]:
        """The generations that answer a fault, each one's first."""
        return tuple(each for each in self.generations if each.fault and not each.again)


def tell(left: Left) -> Story:
    """The whole story."""
    log, pace = left.log, left.pace
    nodes = tuple(sorted(name for name in {*log.nodes, *pace.nodes} if name))
    begin = min([log.begin] * bool(log.events) + [pace.begin] * bool(pace.lines), default=0.0)
    end = max([log.end] * bool(log.events) + [pace.end] * bool(pace.lines), default=0.0)
    generations = _generations(left)
    spans, training = _spans(left, nodes, end)
    trained, since, until = _trained(training, generations, end)
    counted = _counted(left, since)
    phases, phases_of = _phases(left)
    curve = tuple({note.step: note for note in left.notes if note.facts}.values())
    steps = max(
        log.steps, pace.steps, max((note.step + 1 for note in left.notes), default=0),
        max(left.digests.steps, default=0) if left.digests else 0,
    )  # fmt: skip
    return Story(
        left=left, begin=begin, end=end, nodes=nodes, spans=spans, generations=generations,
        recoveries=_recoveries(log, generations), incidents=left.incidents,
        trained_s=trained, held_s=_held(generations, since, until),
        since=since, counted=counted, until=until, steps=steps, outcome=_outcome(generations),
        commits=_ages(log.committed, since, end), sealed=_ages(pace.sealed, counted, until),
        phases=phases, phases_of=phases_of, heat=heat(left.took), curve=curve, missing=_missing(left, curve),
        left_out=_left_out(left),
    )  # fmt: skip


def _counted(left: Left, since: float | None) -> float | None:
    """Since when steps' times are kept: from the first training on, unless the oldest have gone (`steps.LIMIT`)."""
    pace = left.pace
    if since is None or pace.first is None or pace.first <= left.log.trained:
        return since
    return max(since, pace.began)


def _generations(left: Left) -> tuple[Generation, ...]:
    """Each plan once, as the first node adopted it."""
    sealed = sorted((at, step) for reached in (left.pace.sealed, left.log.reached) for step, at in reached.items())
    newest = list(accumulate((step for _, step in sealed), max, initial=0))
    found: list[Generation] = []
    for number, each in sorted(left.log.plans.items()):
        reason, causes = str(each.said.get("reason", "")), each.said.get("causes") or ()
        held = found[-1] if found and found[-1].phase == "hold" else None
        found.append(
            Generation(
                number=number, at=each.at, phase=str(each.said.get("phase", "")), rung=str(each.said.get("rung", "")),
                world=each.whole("world"), members=each.whole("members"), reason=reason,
                step=newest[bisect_right(sealed, (each.at, 1 << 62))],
                asked=orderly(causes) or (held is not None and held.rung in ("", "start")),
                again=held is not None and held.fault and goes_on(causes),
            )
        )  # fmt: skip
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """When nodes began and ceased to train, all of them together, each in the order of time."""

    starts: Sequence[float]
    ends: Sequence[float]


def _spans(left: Left, nodes: Sequence[str], end: float) -> tuple[tuple[Span, ...], Training]:
    """What the nodes did that are shown, and when any of them trained."""
    shown: list[Span] = []
    starts, ends = array("d"), array("d")
    for place, node in enumerate(nodes):
        life, seen = left.log.nodes.get(node, Life()), left.pace.nodes.get(node, ())
        for span in _spans_of(node, life, sorted([*life.signs, *seen]), end):
            if span.state == "training":
                starts.append(span.start)
                ends.append(span.end)
            if place < SHOWN:
                shown.append(span)
    return tuple(shown), Training(starts=array("d", sorted(starts)), ends=array("d", sorted(ends)))


def _spans_of(node: str, life: Life, signs: Sequence[float], end: float) -> Iterator[Span]:
    """What a node did, from its own log. Where that breaks off and begins again, it was away."""
    state, since, trained = "", 0.0, False

    def until(at: float) -> Iterator[Span]:
        if state and at > since:
            yield Span(node=node, start=since, end=at, state=state)

    for at, what in life:
        fresh = state
        if what in ("daemon.started", "daemon.adopted"):
            before = bisect_left(signs, at)
            yield from until(signs[before - 1] if before else at)  # its last sign of life
            fresh, trained = ("starting", False) if what == "daemon.started" else (state or "starting", trained)
            state, since = fresh, at
            continue
        if what == "daemon.stopped":
            yield from until(at)
            state = ""
            continue
        fresh, trained = state_of(what, trained=trained)
        if fresh != state:
            yield from until(at)
            state, since = fresh, at
    yield from until(min(end, signs[-1]) if signs else end)


def state_of(work: str, *, trained: bool) -> tuple[str, bool]:
    """The state for a word of `workers.changed`, and whether they have trained by now."""
    if work in TRAINING:
        return "training", True
    if work == "done":
        return "done", trained
    if work == "none":
        return "waiting", trained
    return ("recovering" if trained else "starting"), trained


def _trained(training: Training, generations: Sequence[Generation], end: float) -> tuple[float, float | None, float]:
    """Seconds in which as many nodes trained as the plan has; when that first was so, and when the job was over."""
    starts, ends = training.starts, training.ends
    if not starts:
        return 0.0, None, 0.0
    plans = sorted(generations, key=lambda each: each.at)
    newest: list[Generation] = []  # of the plans so far
    for each in plans:
        newest.append(each if not newest or each.number > newest[-1].number else newest[-1])
    adopted = [each.at for each in plans]
    over = newest[-1].at if newest and newest[-1].phase == "stop" else end
    total, since = 0.0, None
    for start, stop in pairwise(sorted([*starts, *ends, *adopted])):
        if stop == start:
            continue
        plan = newest[place - 1] if (place := bisect_right(adopted, start)) else None
        # Those that have begun, and are not over before `stop`, as that is an edge.
        here = bisect_right(starts, start) - bisect_right(ends, start)
        if here and (plan is None or (here >= plan.members and plan.phase not in STILL)):
            total += stop - start
            since = start if since is None else since
    return total, since, over if since is not None else 0.0


def _held(generations: Sequence[Generation], since: float | None, until: float) -> float:
    """Seconds from the first training to the end in which the plan was to hold."""
    if since is None:
        return 0.0
    edges = [*(each.at for each in generations[1:]), until]
    return sum(
        max(0.0, min(end, until) - max(each.at, since))
        for each, end in zip(generations, edges, strict=False)
        if each.phase == "hold"
    )


def _recoveries(log: Log, generations: Sequence[Generation]) -> tuple[Recovery, ...]:
    """A generation that answers no fault, as a drain's, is none; one whose plan is not known may be."""
    reasons = {each.number: each.reason for each in generations}
    smooth = {each.number for each in generations if not each.fault}
    return tuple(
        Recovery(
            generation=number, at=each.at, rung=str(each.said.get("rung", "")), node=each.node,
            total_s=float(each.said["total_s"]), reason=reasons.get(number, ""),
            stages={str(name): float(value) for name, value in each.said["stages"].items()},
        )
        for number, each in sorted(log.recovered.items())
        if number not in smooth
    )  # fmt: skip


def _ages(made: Mapping[int, float], since: float | None, end: float) -> tuple[Age, ...]:
    """From one renewal to the next: each time that a newer step than ever before was reached. `made`: when each first was."""
    newest, last = -1, since
    found: list[Age] = []
    for at, step in sorted((at, step) for step, at in made.items()):
        if step <= newest:
            continue
        if last is not None and at > last:
            found.append(Age(start=last, end=at))
        newest, last = step, at
    if last is not None and end > last and found:
        found.append(Age(start=last, end=end))
    return tuple(found)


def _phases(left: Left) -> tuple[tuple[tuple[int, Mapping[str, float]], ...], str]:
    """Each step's phases: the mean of all ranks, or rank 0's own words where nothing else was kept."""
    lines = [line for line in left.took or left.said if stepped(line.seconds)]
    whose = "mean of all ranks" if left.took else "as rank 0 printed them"
    by_step: dict[int, list[Took]] = defaultdict(list)
    newest: dict[int, int] = {}
    for line in lines:
        if line.generation > newest.get(line.step, -1):
            newest[line.step], by_step[line.step] = line.generation, []
        if line.generation == newest[line.step]:
            by_step[line.step].append(line)
    found = []
    for step in sorted(by_step):
        rows = by_step[step]
        names = [name for name in dict.fromkeys(n for row in rows for n in row.seconds) if name not in UNSHOWN]
        found.append((step, {n: sum(row.seconds.get(n, 0.0) / row.steps for row in rows) / len(rows) for n in names}))
    return tuple(found), whose if found else ""


def heat(lines: Sequence[Took], bins: int = BINS) -> Heat | None:
    """Each rank's own work, less its waits, over the others' median, by stretches of time.

    >>> rows = [Took(at=t, node="n", rank=r, step=t, generation=1, seconds={"update": 2.0 if r == 2 else 1.0})
    ...         for t in range(4) for r in range(3)]
    >>> heat(rows, bins=2).cells[2]
    (2.0, 2.0)
    """
    ranks = tuple(sorted({line.rank for line in lines}))
    if len(ranks) < 2:
        return None
    begin, end = min(line.at for line in lines), max(line.at for line in lines)
    columns = max(1, min(bins, len({line.step for line in lines})))
    width = (end - begin) / columns or 1.0
    work: dict[tuple[int, int], list[float]] = defaultdict(list)
    by_step: dict[tuple[int, int], list[Took]] = defaultdict(list)
    for line in lines:
        if stepped(line.seconds):
            by_step[line.generation, line.step].append(line)
    for rows in by_step.values():
        spent = [(row, own(row)) for row in rows]
        whole = median(value for _, value in spent) if len(rows) > MANY else 0.0  # of many, one more changes little
        for row, mine in spent:
            usual = whole or median([value for other, value in spent if other is not row] or [0.0])
            if usual > 0:
                work[row.rank, min(columns - 1, int((row.at - begin) / width))].append(mine / usual)
    cells = {r: tuple(median(work[r, c]) if (r, c) in work else None for c in range(columns)) for r in ranks}
    nodes = {line.rank: line.node for line in lines}
    return Heat(edges=tuple(begin + width * i for i in range(columns + 1)), ranks=ranks, nodes=nodes, cells=cells)


def own(line: Took) -> float:
    """Seconds of a rank's own work in a step: without waiting for others, and without forming groups."""
    spent = sum(value for name, value in line.seconds.items() if name not in APART)
    return max(0.0, spent - sum(line.waited.values())) / line.steps


def _outcome(generations: Sequence[Generation]) -> str:
    if not generations:
        return "no plan was found"
    last = generations[-1]
    return last.reason if last.phase == "stop" else f"it goes on, or was cut off: {last.reason}"


def _left_out(left: Left) -> tuple[str, ...]:
    """What was more than is kept, so that a long run of many nodes fits into memory."""
    said = []
    if left.every > 1:
        whose = f"{left.pace.lines:,} lines of steps' times" if left.pace.lines else "the steps that rank 0 printed"
        said.append(
            f"Of {whose} those of each step that {left.every} divides are kept: what a step usually takes, its phases and the "
            "slow ranks are reckoned from them."
        )
    if left.noted > 1:
        said.append(f"Of the trainer's notes those of each step that {left.noted} divides are kept.")
    if left.untold:
        said.append(f"Of {len(left.incidents) + left.untold:,} incidents the newest {len(left.incidents):,} are told.")
    return tuple(said)


def _missing(left: Left, curve: Sequence[Note]) -> tuple[str, ...]:
    """What the page would show if it had been kept, and which line keeps it."""
    said = []
    if not left.log.events:
        said.append(
            "No daemon's log: timeline, goodput and recoveries are missing. With telemetry.format json (the default off a "
            "terminal) it is the daemon's output: `elasticrl run` keeps it in log_dir; under systemd: "
            "`journalctl -u elasticrl -o cat > RUN/n00.log`."
        )
    if not left.took:
        said.append(
            "No steps.jsonl: goodput and the heat map of slow ranks are missing. Each daemon writes it to its log folder."
        )
    if not curve:
        said.append(
            "No reward or KL: they are drawn for jobs of elasticrl.ppo. What TRL and transformers log is in rank 0's log."
        )
    elif not any("loss" in note.facts for note in curve):
        said.append("No loss: the trainer notes reward and KL only; `loss` in its history would be drawn here.")
    if left.log.events and not left.incidents:
        said.append("No incident was written down: daemons keep them in state_dir/JOB/NODE/incidents.")
    if left.digests is None:
        said.append("No digests: whether steps came to the same bits is not known. `lanes.digest` writes them.")
    if left.samples is None:
        said.append("No ledger: whether each sample was used once is not known.")
    return tuple(said)
