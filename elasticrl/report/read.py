"""Finds what a run left in a folder, whatever wrote it, and makes values of it.

The one idea: files are known by what their lines say, not by their names; so a run's own folder, a support bundle, or a few
files that somebody copied together (`journalctl -u elasticrl -o cat > n00.log`) make the same report. What is missing is said.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from stat import S_ISREG
from sys import intern
from typing import Any, Final

from elasticrl.diagnose.incident import Incident, found
from elasticrl.runtime.checkpoint.manifest import MANIFEST
from elasticrl.runtime.checkpoint.place import place
from elasticrl.runtime.checkpoint.shelf import Entry, listing
from elasticrl.runtime.chronicle import FOLDER as DIGESTS
from elasticrl.runtime.chronicle import History
from elasticrl.runtime.chronicle import read as read_digests
from elasticrl.runtime.data.audit import Audit, audit
from elasticrl.runtime.data.ledger import FOLDER as LEDGER
from elasticrl.runtime.vault.errors import StateError

LOOKED_AT: Final = 20  # of a file's JSON lines, to know what it is
BIGGEST: Final = 512 * 1024 * 1024  # bytes of a file that is looked at
LOG: Final = re.compile(r"\.(jsonl|log(\.\d+)?)$")  # rotated ones too
SAID: Final = re.compile(r"\[Step (\d+)\] (.*)")  # what the trainer prints of a step
TIME: Final = re.compile(r"(\w+): (\d+(?:\.\d+)?)ms")
FACT: Final = re.compile(r"\b(reward|kl|loss) (-?\d+(?:\.\d+)?)")
ATTEMPT: Final = re.compile(r"attempt_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One event of a daemon's log.

    Example: Happening(at=1763764533.58, node="n0", name="plan.adopted", said={"generation": 1})
    """

    at: float  # seconds since 1970
    node: str
    name: str
    said: Mapping[str, Any]

    def whole(self, field_name: str) -> int:
        """A field that is a whole number; 0 if it is not there."""
        value = self.said.get(field_name)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What one rank's step took.

    Example: Took(at=1763764533.58, node="n0", rank=0, step=3, generation=1, seconds={"update": 0.5})
    """

    at: float
    node: str
    rank: int
    step: int
    generation: int
    seconds: Mapping[str, float]
    waited: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What the trainer noted of a step.

    Example: Note(step=3, generation=1, facts={"reward": 0.4, "kl": 0.1}, at=1763764533.58)
    """

    step: int
    generation: int
    facts: Mapping[str, float]
    at: float | None = None  # seconds since 1970, where it was written down


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """All that a run left behind, as far as it was found."""

    where: str
    job: str = ""
    happenings: tuple[Happening, ...] = ()
    took: tuple[Took, ...] = ()
    said: tuple[Took, ...] = ()  # the same by rank 0's own word, without times of day
    notes: tuple[Note, ...] = ()
    incidents: tuple[Incident, ...] = ()
    checkpoints: tuple[Entry, ...] = ()
    digests: History | None = None
    samples: Audit | None = None
    files: tuple[str, ...] = ()  # what was read, in words
    unread: tuple[str, ...] = ()  # and what could not be, or was passed over


def read(folder: Path) -> Left:
    """Everything below a folder."""
    gathered = _Gathered()
    for path in sorted(path for path in folder.rglob("*") if LOG.search(path.name)):
        if not {DIGESTS, LEDGER, "trace", "etcd", "incidents"} & set(path.parts[-3:]):
            _one(path, gathered)
    home, passed = _home(folder, gathered)
    incidents, broken = found(sorted({path.parent for path in folder.rglob("incidents/*.json")}))
    unread = [*gathered.unread, *broken, *passed]
    job, begun = _newest(gathered, unread)
    incidents = [each for each in incidents if each.job == job or not job]
    if begun is not None:
        gathered.took = [line for line in gathered.took if line.at >= begun]
        incidents = [each for each in incidents if datetime.fromisoformat(each.began).timestamp() >= begun]
    digests = samples = None
    entries: list[Entry] = []
    if home is not None:
        digests, samples, entries = _state(home, unread)
    notes = _chosen(gathered.notes, unread)
    if not notes or any("loss" in each.facts for each in gathered.printed):
        notes = tuple(gathered.printed) or notes  # the trainer's own events say more than its history
    files = (
        f"{len(gathered.logs)} daemon logs ({len(gathered.happenings)} events)",
        f"{len(gathered.took)} lines of steps' times",
        f"{len(notes)} notes of the trainer",
        f"{len(incidents)} incidents",
        f"{len(entries)} checkpoints",
    )
    return Left(
        where=folder.name or str(folder),
        job=job or (home.name if home else folder.name),
        happenings=tuple(sorted(gathered.happenings, key=lambda each: each.at)),
        took=tuple(sorted(gathered.took, key=lambda each: each.at)),
        said=tuple(sorted(gathered.said, key=lambda each: (each.step, each.generation))),
        notes=tuple(sorted(notes, key=lambda note: (note.step, note.generation))),
        incidents=tuple(incidents),
        checkpoints=tuple(entries),
        digests=digests,
        samples=samples,
        files=tuple(text for text in files if not text.startswith("0 ")),
        unread=tuple(unread),
    )


@dataclass(slots=True)
class _Gathered:
    happenings: list[Happening] = field(default_factory=list)
    took: list[Took] = field(default_factory=list)
    said: list[Took] = field(default_factory=list)
    printed: list[Note] = field(default_factory=list)
    notes: dict[Path, list[Note]] = field(default_factory=dict)
    logs: list[Path] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def _newest(gathered: _Gathered, unread: list[str]) -> tuple[str, float | None]:
    """The job and the run that was on last, and since when, if there was another before: a machine's journal has all that ever
    ran on it. Of the others nothing is told but that they were there.
    """
    events = sorted(gathered.happenings, key=lambda each: each.at)
    job = next((str(name) for each in reversed(events) if (name := each.said.get("job"))), "")
    mine = [each for each in events if each.said.get("job", job) == job]
    run = next((name for each in reversed(mine) if (name := each.said.get("run"))), None)
    others = [each for each in events if each.said.get("job", job) != job or each.said.get("run", run) != run]
    if not others:
        return job, None
    names = Counter(
        f"job {each.said.get('job', job)}" + (f", run {name}" if (name := each.said.get("run")) else "")
        for each in others
    )
    unread += [f"{name}: another one ({count} events)" for name, count in names.items()]
    begun = min(each.at for each in mine if each.said.get("run") == run)
    gathered.happenings = [each for each in mine if each.at >= begun and each.said.get("run", run) == run]
    return job, begun


def _one(path: Path, into: _Gathered) -> None:
    """A file, by what its first JSON lines say; one without any may be a worker's output. Line by line: a log may be long."""
    try:
        status = path.stat()  # a run that goes on may have taken it away since it was listed
        if not S_ISREG(status.st_mode):
            return
        if status.st_size > BIGGEST:
            into.unread.append(f"{path.name}: over {BIGGEST // 2**20} MiB; read it by parts")
            return
        with path.open(encoding="utf-8", errors="replace") as stream:
            objects = _objects(stream)
            first = list(islice(objects, LOOKED_AT))
            if not _known(path, first, chain(first, objects), into):
                _output(path, into)
    except OSError as error:
        into.unread.append(f"{path.name}: {error.strerror}")


def _known(path: Path, first: Sequence[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]], into: _Gathered) -> bool:
    """A file of JSON lines, if it is one that we know."""
    if any("event" in line and "at" in line for line in first):
        into.logs.append(path)
        into.happenings += [event for line in lines if (event := happening(line))]
    elif first and {"step", "rank", "seconds"} <= first[0].keys():
        into.took += [row for line in lines if (row := took(line))]
    elif first and {"step", "reward"} <= first[0].keys():
        into.notes[path] = [told for line in lines if (told := note(line))]
    else:
        steps = [pair for line in lines if (pair := step_event(line))]
        into.said += [times for times, _ in steps]
        into.printed += [facts for _, facts in steps]
        return bool(steps)
    return True


def _output(path: Path, into: _Gathered) -> None:
    """What a worker printed for people."""
    if ".log" in path.name and (attempt := ATTEMPT.search(str(path))):
        with path.open(encoding="utf-8", errors="replace") as stream:
            for times, facts in printed(stream, int(attempt[1])):
                into.said.append(times)
                into.printed.append(facts)


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            try:
                plain = json.loads(line)
            except ValueError:
                continue  # a line that a kill cut short
            if isinstance(plain, dict):
                yield plain


def happening(line: Mapping[str, Any]) -> Happening | None:
    """A daemon's log line, if it is one."""
    try:
        at = datetime.fromisoformat(str(line["at"]))
    except (KeyError, ValueError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return Happening(at=at.timestamp(), node=str(line.get("node", "")), name=str(line.get("event")), said=line)


def took(line: Mapping[str, Any]) -> Took | None:
    """A line of steps.jsonl."""
    try:
        return Took(
            at=float(line["at"]), node=intern(str(line["node"])), rank=int(line["rank"]), step=int(line["step"]),
            generation=int(line["generation"]), seconds=_seconds(line["seconds"]), waited=_seconds(line.get("waited", {})),
            steps=max(1, int(line.get("steps", 1))), bytes=int(line.get("bytes", 0)),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _seconds(given: Mapping[str, Any]) -> dict[str, float]:
    """By phase; the names of a hundred thousand lines are kept once."""
    return {intern(str(name)): float(value) for name, value in given.items()}


def step_event(line: Mapping[str, Any]) -> tuple[Took, Note] | None:
    """A trainer's event `ppo.step`, if it is one."""
    if line.get("event") != "ppo.step":
        return None
    try:
        step, generation = int(line["step"]), int(line.get("generation", 0))
        seconds = {str(name): float(value) for name, value in line["seconds"].items()}
        metrics = {str(name): float(value) for name, value in line["metrics"].items()}
        at = datetime.fromisoformat(str(line["ts"])).timestamp() if "ts" in line else None
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    loss = [metrics[name] for name in ("loss", "policy_loss", "preference_loss") if name in metrics]
    facts = {name: metrics[name] for name in ("reward", "kl") if name in metrics} | ({"loss": loss[0]} if loss else {})
    times = Took(at=0.0, node="", rank=0, step=step, generation=generation, seconds=seconds)
    return times, Note(step=step, generation=generation, facts=facts, at=at)


def note(line: Mapping[str, Any]) -> Note | None:
    """A line of the trainer's history."""
    try:
        facts = {name: float(line[name]) for name in ("reward", "kl", "loss") if line.get(name) is not None}
        at = float(line["wall"]) if "wall" in line else None
        return Note(step=int(line["step"]), generation=int(line.get("generation", 0)), facts=facts, at=at)
    except (KeyError, ValueError, TypeError):
        return None


def printed(lines: Iterable[str], generation: int) -> Iterator[tuple[Took, Note]]:
    """What the trainer printed of its steps: `[Step 57] rollout: 9ms | update: 541ms | reward 0.692 kl 8.135`.

    >>> [(times, facts)] = printed(["[Step 57] rollout: 9ms | update: 541ms | reward 0.692 kl 8.135"], 3)
    >>> dict(times.seconds), dict(facts.facts)
    ({'rollout': 0.009, 'update': 0.541}, {'reward': 0.692, 'kl': 8.135})
    """
    for said in filter(None, map(SAID.match, lines)):
        step, rest = said.groups()
        seconds = {name: float(ms) / 1000 for name, ms in TIME.findall(rest)}
        facts = {name: float(value) for name, value in FACT.findall(rest)}
        yield (
            Took(at=0.0, node="", rank=0, step=int(step), generation=generation, seconds=seconds),
            Note(step=int(step), generation=generation, facts=facts),
        )


def _chosen(histories: Mapping[Path, Sequence[Note]], unread: list[str]) -> tuple[Note, ...]:
    """Of several histories in one folder, that of the run with most generations: the others are what it is compared with."""
    if not histories:
        return ()
    ranked = sorted(histories.items(), key=lambda item: (-len({n.generation for n in item[1]}), -len(item[1])))
    unread += [f"{path.name}: another run's history" for path, _ in ranked[1:]]
    return tuple(ranked[0][1])


def _home(folder: Path, gathered: _Gathered) -> tuple[Path | None, list[str]]:
    """Where checkpoints, ledger and digests are; of several runs, that with most generations."""
    marks = {path.parent for name in (DIGESTS, LEDGER) for path in folder.rglob(name) if path.is_dir()}
    marks |= {path.parent.parent for path in folder.rglob(MANIFEST)}
    # Nodes' own directories side by side are one run.
    homes = sorted(marks)
    if len(homes) <= 1:
        return (homes[0] if homes else None), []
    logged = {each.node for each in gathered.happenings}
    if {home.name for home in homes} <= logged:
        return homes[0].parent, []
    ranked = sorted(homes, key=lambda home: (-_generations(home), str(home)))
    return ranked[0], [f"{home.relative_to(folder)}: another run's state" for home in ranked[1:]]


def _generations(home: Path) -> int:
    try:
        return read_digests(home).generations
    except (StateError, OSError):
        return len(list((home / LEDGER).glob("*"))) if (home / LEDGER).is_dir() else 0


def _state(home: Path, unread: list[str]) -> tuple[History | None, Audit | None, list[Entry]]:
    digests = samples = None
    try:
        digests = read_digests(home)
    except (StateError, OSError) as error:
        unread.append(str(error))
    try:
        samples = audit(home)
    except (StateError, OSError, ValueError) as error:
        unread.append(str(error))
    try:
        entries: Iterable[Entry] = listing(place(str(home)))
    except (StateError, OSError) as error:
        unread.append(str(error))
        entries = ()
    return digests, samples, list(entries)
