"""The audit: proof from the ledger that every sample was used exactly once, or the names of those that were not.

The one idea: the cursor is a function, so what *should* have been used is computed again from the data's description in the
ledger, and compared with what was written when it was used. Nothing is taken on trust from the run that is audited.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from elasticrl.core.words import count
from elasticrl.runtime.data.cursor import SampleId, Segment
from elasticrl.runtime.data.ledger import FOLDER, Record, decode, files_of
from elasticrl.runtime.vault.errors import DataError
from elasticrl.runtime.vault.version import Lineage, Version, bounds, lineage_from_json, longest

SHOWN = 20  # findings of a kind that are spelled out


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What an audit found. `ok` is the proof; otherwise the sentences say what is wrong."""

    steps: int
    last: int  # the last step that is judged
    samples: int  # uses that count, each (step, epoch, turn, sample) once
    generations: int
    superseded: int  # records beyond the version that a later generation went on from
    repeated: int  # records that were written again by the worker that took a lane over
    torn: int  # last lines that a kill cut short
    duplicates: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    absent: tuple[
        str, ...
    ] = ()  # nodes whose ledgers are not here, where each has its own; what they have is not `missing`

    @property
    def ok(self) -> bool:
        """Exactly once."""
        return not (self.duplicates or self.missing or self.problems or self.absent)

    @property
    def sentence(self) -> str:
        """For people."""
        if self.ok:
            return (
                f"{self.samples} uses of samples in {self.steps} steps and {self.generations} generations: each exactly once "
                f"({self.superseded} superseded records, {self.torn} torn lines do not count)"
            )
        found = [*self._absence, *self.problems, *self.duplicates, *self.missing]
        more = f" ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        claim = "NOT proven" if self.absent else "NOT exactly once"
        return f"{claim}, {count(len(found), 'finding')}: " + "; ".join(found[:SHOWN]) + more

    @property
    def _absence(self) -> tuple[str, ...]:
        if not self.absent:
            return ()
        whose = (
            f"the ledgers of {', '.join(self.absent)} are" if self.absent[1:] else f"the ledger of {self.absent[0]} is"
        )
        sentence = (
            f"{whose} not here, and samples are missing without: where each node has a disk of its own "
            "(checkpoint.shared: false), put the directories of all nodes side by side in one, and audit that"
        )
        return (sentence,)


@dataclass(slots=True)
class _Read:
    """All files of a ledger."""

    records: dict[tuple[str, int], Record] = field(default_factory=dict)
    lineages: dict[int, Lineage] = field(default_factory=dict)
    segments: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    nodes: dict[int, tuple[str, ...]] = field(
        default_factory=dict
    )  # that have a ledger of a generation, if each has one
    here: set[str] = field(default_factory=set)  # nodes of whom there is one
    repeated: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)


def audit(run_dir: Path, *, through: Version | None = None) -> Audit:
    """Read the whole ledger of a run and judge it. The nodes' own directories may lie side by side in `run_dir`.

    `through`: up to this version, the last update of a step (a commit, or the end of a job): that step must be complete.
    Without it, up to the last step that is complete: the one after it may just have been under way.
    """
    read = _read(run_dir)
    generation = max(read.lineages)
    lineage, segments = longest(read.lineages[generation], read.lineages.values()), read.segments[generation]
    if not segments:
        raise DataError(
            f"The ledger in {run_dir / FOLDER} does not say which samples its steps take, so there is nothing to hold it "
            "against: register the Cursor or StreamLoader in the script (run.register(data=...))."
        )
    until = bounds(lineage)
    known = (r for r in read.records.values() if r.generation in until)
    counted = [r for r in known if (bound := until[r.generation]) is None or r.version <= bound]
    superseded = len(read.records) - len(counted)
    if through is not None:
        counted = [r for r in counted if r.version <= through]
    duplicates, used = _uses(counted)
    first = segments[0].first // segments[0].walk.draws
    last = max((r.version.step for r in counted), default=first - 1)
    if segments[-1].walk.size is None:
        expected = _expected_of_stream(segments[0], used, last)
    else:
        expected = {step: _expected(segments, step) for step in range(first, last + 1)}
    missing: list[str] = []
    for step, uses in expected.items():
        lacking = sorted(use for use in uses if (step, *use) not in used)
        if lacking and step == last and through is None:
            last -= 1  # under way when the run ended
            continue
        missing.extend(f"step {step}: {_use(use)} was not used" for use in lacking)
    problems = list(read.problems)
    for step, turn, sample in sorted(used):
        if step <= last and (turn, sample) not in expected[step]:
            problems.append(f"step {step}: {_use((turn, sample))} was used and is not among the step's samples")
    absent = sorted({node for number in until for node in read.nodes.get(number, ())} - read.here) if missing else []
    return Audit(
        steps=max(last - first + 1, 0),
        last=last,
        samples=sum(1 for use in used if use[0] <= last),
        generations=len(read.lineages),
        superseded=superseded,
        repeated=read.repeated,
        torn=read.torn,
        duplicates=tuple(duplicates),
        missing=() if absent else tuple(missing),
        problems=tuple(problems),
        absent=tuple(absent),
    )


def _read(run_dir: Path) -> _Read:
    found = _Read()
    for path in files_of(run_dir, FOLDER):
        lines = path.read_bytes().split(b"\n")
        found.here.add(path.stem.rsplit("-", 2)[0])  # NODE-WRITER-LIFE
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            body = decode(line)
            if body is None:
                if number == len(lines):  # no end of line: the writer was killed in it
                    found.torn += 1
                else:
                    found.problems.append(f"line {number} of {path.name} was changed")
            elif "record" in body:
                _add(found, Record.from_json(body["record"]))
            else:
                generation = int(body["generation"])
                found.lineages[generation] = lineage_from_json(body["lineage"])
                found.segments[generation] = tuple(Segment.from_json(row) for row in body["segments"])
                found.nodes[generation] = tuple(map(str, body.get("nodes", ())))
    if not found.lineages:
        raise DataError(f"There is no ledger in {run_dir / FOLDER}: is this the run's directory?")
    return found


def _add(found: _Read, record: Record) -> None:
    known = found.records.setdefault(record.serial, record)
    if known is record:
        return
    if known == record:
        found.repeated += 1
    else:
        writer, number = record.serial
        found.problems.append(f"record {number} of {writer} exists in two versions")


Use = tuple[int, SampleId]
"""A turn and a sample."""


def _uses(records: Iterable[Record]) -> tuple[list[str], set[tuple[int, int, SampleId]]]:
    """Every use, and a sentence for each that occurs twice: within a step, or in two steps of one epoch."""
    duplicates: list[str] = []
    used: dict[tuple[int, int, SampleId], Record] = {}
    step_of: dict[Use, int] = {}
    for record in sorted(records, key=lambda r: (r.version, r.lane, r.generation, r.serial)):
        step = record.version.step
        for sample in record.ids:
            use = (step, record.turn, sample)
            if use in used:
                other = used[use]
                duplicates.append(
                    f"step {step}: {_use(use[1:])} was used twice (lane {other.lane} of generation {other.generation}, "
                    f"lane {record.lane} of generation {record.generation})"
                )
                continue
            used[use] = record
            before = step_of.setdefault(use[1:], step)
            if before != step:
                duplicates.append(f"{_use(use[1:])} was used in step {before} and in step {step}")
    return duplicates, set(used)


def _expected(segments: tuple[Segment, ...], step: int) -> set[Use]:
    """What the cursor says of a step."""
    found: set[Use] = set()
    segment = next((s for s in reversed(segments) if s.first <= step * s.walk.draws), segments[0])
    walk = segment.walk
    start = (step * walk.draws - segment.first) * walk.batch
    for number in range(start, start + walk.batch * walk.draws):
        sample = segment.sample(number)
        found.update((turn, sample) for turn in range(walk.turns))
    return found


def _expected_of_stream(segment: Segment, used: set[tuple[int, int, SampleId]], last: int) -> dict[int, set[Use]]:
    """What a stream's steps must have used: its samples in their order, an epoch's last one being the last that was seen."""
    ends: dict[int, int] = {}
    for _, _, sample in used:
        ends[sample.epoch] = max(ends.get(sample.epoch, -1), sample.index)
    row = [SampleId(epoch, index) for epoch in sorted(ends) for index in range(ends[epoch] + 1)]
    walk = segment.walk
    size = walk.batch * walk.draws
    first = segment.first // walk.draws
    return {
        step: {(turn, sample) for sample in row[(step - first) * size :][:size] for turn in range(walk.turns)}
        for step in range(first, last + 1)
    }


def _use(use: Use) -> str:
    turn, sample = use
    return f"sample {sample}" + (f" in turn {turn}" if turn else "")
