"""The audit: proof from the ledger that every sample was used exactly once, or the names of those that were not.

The one idea: the cursor is a function, so what *should* have been used is computed again from the data's description in the
ledger, and compared with what was written when it was used. Nothing is taken on trust from the run that is audited.

A run may go on while its ledger is read, file by file. So the sizes of all files are noted before the first is read: what is
judged ends with the newest step that had been begun by then. Each step before it is whole in all files whenever they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticrl.base.regular import read_regular
from elasticrl.base.words import count
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
    skipped: int = 0  # uses in updates that were left out, as something in them was not finite
    filtered: int = 0  # of samples that an update was made without
    beyond: int = 0  # records of steps that were begun while this was read: they are left out
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
                f"{self.samples} samples in {self.steps} steps and {count(self.generations, 'generation')}: "
                f"each used exactly once ({self.superseded} superseded records, {self.torn} torn lines do not count)"
                f"{self._left_out}{self._through}"
            )
        found = [*self._absence, *self.problems, *self.duplicates, *self.missing]
        more = f" ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        claim = "NOT proven" if self.absent else "NOT exactly once"
        return f"{claim}, {count(len(found), 'finding')}: " + "; ".join(found[:SHOWN]) + more + self._through

    @property
    def _left_out(self) -> str:
        skipped = f"; {self.skipped} of them in updates that were skipped" if self.skipped else ""
        return f"{skipped}; {self.filtered} of them filtered out" if self.filtered else skipped

    @property
    def _through(self) -> str:
        if not self.beyond:
            return ""
        return f"; judged through step {self.last}: the run goes on, and what it has written meanwhile is left out"

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


Use = tuple[int, SampleId]
"""A turn and a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was judged, beside the judgement. `plans`: by generation, what each of its workers wrote of it."""

    audit: Audit
    segments: tuple[Segment, ...]
    used: Mapping[int, Mapping[Use, Record]]  # by step
    lineages: Mapping[int, Lineage]
    plans: Mapping[int, Sequence[Mapping[str, Any]]]


MOST = 1_000  # samples for each that there is: more are not looked for one by one


@dataclass(slots=True)
class _Read:
    """All files of a ledger."""

    records: dict[tuple[str, int], Record] = field(default_factory=dict)
    late: set[tuple[str, int]] = field(default_factory=set)  # those of them that were written after sizes were noted
    lineages: dict[int, Lineage] = field(default_factory=dict)
    segments: dict[int, tuple[Segment, ...]] = field(default_factory=dict)
    nodes: dict[int, tuple[str, ...]] = field(
        default_factory=dict
    )  # that have a ledger of a generation, if each has one
    here: set[str] = field(default_factory=set)  # nodes of whom there is one
    plans: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    repeated: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)


def audit(run_dir: Path, *, through: Version | None = None) -> Audit:
    """Read the whole ledger of a run and judge it. The nodes' own directories may lie side by side in `run_dir`.

    `through`: up to this version, the last update of a step (a commit, or the end of a job): that step must be complete.
    Without it, up to the last step that is complete: the one after it may just have been under way.
    """
    return examine(run_dir, through=through).audit


def examine(run_dir: Path, *, through: Version | None = None) -> Examined:
    """As `audit`, with what was judged."""
    read = _read(run_dir)
    generation = max(read.lineages)
    lineage, segments = longest(read.lineages[generation], read.lineages.values()), read.segments[generation]
    if not segments:
        raise DataError(
            f"The ledger in {run_dir / FOLDER} does not say which samples its steps take, so there is nothing to hold it "
            "against: register the Cursor or StreamLoader in the script (run.register(data=...))."
        )
    until = bounds(lineage)
    known = [r for r in read.records.values() if r.generation <= generation]  # a newer one began while this was read
    lie = [r for r in known if r.generation in until and ((end := until[r.generation]) is None or r.version <= end)]
    first = segments[0].first // segments[0].walk.draws
    begun = max((r.version.step for r in lie if r.serial not in read.late), default=first - 1)
    counted = [r for r in lie if r.version.step <= begun]
    beyond = len(read.records) - len(known) + len(lie) - len(counted)
    if through is not None:
        counted = [r for r in counted if r.version <= through]
    duplicates, used = _uses(counted)
    last = max(used, default=first - 1)
    if _strange(counted, segments, last - first + 1):
        raise DataError(
            f"The ledger in {run_dir / FOLDER} has {len(counted)} records, up to step {last}: "
            "no run has written so few of so many."
        )
    if segments[-1].walk.size is None:
        expected = _expected_of_stream(segments[0], used, last)
    else:
        expected = ((step, _expected(segments, step)) for step in range(first, last + 1))
    missing: list[str] = []
    problems = list(read.problems)
    for step, uses in expected:
        there = used.get(step, {}).keys()
        lacking = uses - there
        if lacking and step == last and through is None:
            last -= 1  # under way when the run ended
            continue
        missing.extend(f"step {step}: {_use(use)} was not used" for use in sorted(lacking))
        strange = sorted(there - uses)
        problems.extend(f"step {step}: {_use(use)} was used and is not among the step's samples" for use in strange)
    absent = sorted({node for number in until for node in read.nodes.get(number, ())} - read.here) if missing else []
    through_last = [record for step, uses in used.items() if step <= last for record in uses.values()]
    found = Audit(
        steps=max(last - first + 1, 0), last=last, samples=len(through_last),
        generations=len(read.lineages), superseded=len(known) - len(lie), repeated=read.repeated, torn=read.torn,
        beyond=beyond, skipped=sum(record.skipped for record in through_last),
        filtered=sum(record.filtered for record in through_last),
        duplicates=tuple(duplicates), missing=() if absent else tuple(missing), problems=tuple(problems),
        absent=tuple(absent),
    )  # fmt: skip
    plans = {number: read.plans.get(number, ()) for number in sorted(read.lineages)}
    return Examined(audit=found, segments=segments, used=used, lineages=read.lineages, plans=plans)


def _read(run_dir: Path) -> _Read:
    found = _Read()
    noted = {path: path.stat().st_size for path in files_of(run_dir, FOLDER)}
    # Listed again: who came in between may have written some of a step that these sizes hold the rest of.
    for path in files_of(run_dir, FOLDER):
        lines, size, end = read_regular(path).split(b"\n"), noted.get(path, 0), 0
        found.here.add(path.stem.rsplit("-", 2)[0])  # NODE-WRITER-LIFE
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            end += len(line) + 1
            body = decode(line)
            if body is None:
                if number == len(lines):  # no end of line: the writer was killed in it
                    found.torn += 1
                else:
                    found.problems.append(f"line {number} of {path.name} was changed")
                continue
            try:
                _take(found, body, late=end > size)
            except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
                found.problems.append(f"line {number} of {path.name} is not as this version writes it")
    if not found.lineages:
        raise DataError(f"There is no ledger in {run_dir / FOLDER}: is this the run's directory?")
    return found


def _strange(counted: Sequence[Record], segments: Sequence[Segment], steps: int) -> bool:
    """Whether it speaks of so many more samples than it has that to count them would take for ever."""
    most = MOST * (MOST + sum(len(record.ids) for record in counted))
    step = max(each.walk.batch * each.walk.draws * each.walk.turns for each in segments)
    stream = segments[-1].walk.size is None
    return steps * step > most or (stream and any(id_.index > most for record in counted for id_ in record.ids))


def _take(found: _Read, body: Mapping[str, Any], *, late: bool) -> None:
    """A whole line; ValueError and the like for one that no writer of ours has written."""
    if "record" in body:
        _add(found, Record.from_json(body["record"]), late=late)
    elif not late:
        generation = int(body["generation"])
        lineage = lineage_from_json(body["lineage"])
        segments = tuple(Segment.from_json(row) for row in body["segments"])
        nodes = tuple(map(str, body.get("nodes", ())))
        found.lineages[generation], found.segments[generation], found.nodes[generation] = lineage, segments, nodes
        if isinstance(plan := body.get("plan"), dict):
            found.plans.setdefault(generation, []).append(plan)


def _add(found: _Read, record: Record, *, late: bool) -> None:
    known = found.records.setdefault(record.serial, record)
    if known is record:
        if late:
            found.late.add(record.serial)
        return
    if not late:
        found.late.discard(record.serial)
    if known == record:
        found.repeated += 1
    else:
        writer, number = record.serial
        found.problems.append(f"record {number} of {writer} exists in two versions")


def _uses(records: Iterable[Record]) -> tuple[list[str], dict[int, dict[Use, Record]]]:
    """Every use, by steps, and a sentence for each that occurs twice: within a step, or in two steps of one epoch."""
    duplicates: list[str] = []
    used: dict[int, dict[Use, Record]] = {}
    step_of: dict[Use, int] = {}
    for record in sorted(records, key=lambda r: (r.version, r.lane, r.generation, r.serial)):
        step = record.version.step
        uses = used.setdefault(step, {})
        for sample in record.ids:
            use = (record.turn, sample)
            if (other := uses.get(use)) is not None:
                duplicates.append(
                    f"step {step}: {_use(use)} was used twice (lane {other.lane} of generation {other.generation}, "
                    f"lane {record.lane} of generation {record.generation})"
                )
                continue
            uses[use] = record
            if (before := step_of.setdefault(use, step)) != step:
                duplicates.append(f"{_use(use)} was used in step {before} and in step {step}")
    return duplicates, used


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


def _expected_of_stream(
    segment: Segment, used: Mapping[int, Mapping[Use, Record]], last: int
) -> Iterator[tuple[int, set[Use]]]:
    """What a stream's steps must have used: its samples in their order, an epoch's last one being the last that was seen."""
    ends: dict[int, int] = {}
    for _, sample in (use for uses in used.values() for use in uses):
        ends[sample.epoch] = max(ends.get(sample.epoch, -1), sample.index)
    row = [SampleId(epoch, index) for epoch in sorted(ends) for index in range(ends[epoch] + 1)]
    walk = segment.walk
    size = walk.batch * walk.draws
    first = segment.first // walk.draws
    for step in range(first, last + 1):
        samples = row[(step - first) * size :][:size]
        yield step, {(turn, sample) for sample in samples for turn in range(walk.turns)}


def _use(use: Use) -> str:
    turn, sample = use
    return f"sample {sample}" + (f" in turn {turn}" if turn else "")
