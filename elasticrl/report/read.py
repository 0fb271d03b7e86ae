"""Finds what a run left in a folder, whatever wrote it, and makes values of it.

The one idea: files are known by what their lines say, not by their names; so a run's own folder, a support bundle, or a few
files that somebody copied together (`journalctl -u elasticrl -o cat > n00.log`) make the same report. What is missing is said.
The report is of one job: what lies there of others is passed over, and named (`owners`).
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from stat import S_ISREG
from sys import intern
from typing import Any, Final, TypeVar

from elasticrl.base.parsed import instant, parsed, real, whole
from elasticrl.base.regular import open_regular_text, read_regular
from elasticrl.contract.evaluated import Evaluated, Sample
from elasticrl.diagnose.incident import Unreadable, load
from elasticrl.report.gather import Cases, Logs, Paces, Runs, Thin
from elasticrl.report.owners import Owners, chosen
from elasticrl.report.values import Happening, Left, Log, Note, Took
from elasticrl.runtime.checkpoint.manifest import MANIFEST, Manifest
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
SAID: Final = re.compile(r"\[Step (\d{1,15})\] (.*)")  # what the trainer prints of a step
TIME: Final = re.compile(r"(\w+): (\d{1,15}(?:\.\d+)?)ms")
Row = TypeVar("Row")
FACT: Final = re.compile(r"\b(reward|kl|loss) (-?\d{1,15}(?:\.\d+)?)")
NOTED: Final[tuple[str, ...]] = ("reward", "kl", "loss", "padding")
PART: Final = re.compile(r"reward/\w+(?<!_std)")  # the mean of one of several rewards
CUT: Final = 400  # characters of a prompt or an answer
SAMPLES: Final = 100  # of an evaluation
ATTEMPT: Final = re.compile(r"attempt_(\d+)")


def read(folder: Path, job: str | None = None) -> Left:
    """Everything below a folder that is of one job, each line by itself; Unchosen if several lie there and none is named.

    Daemons' logs are gone through twice: first for whose run is the newest, then for what it left; and steps' times after them,
    as a node's last sign of life is known by its next start.
    """
    gathered = _Gathered()
    for path in sorted(path for path in folder.rglob("*") if LOG.search(path.name)):
        if not {DIGESTS, LEDGER, "trace", "etcd", "incidents"} & set(path.parts[-3:]):
            _sort(path, gathered)
    homes = _homes(folder)
    beside = {inside: name for inside in _incidents(folder) if (name := _job_of_incidents(inside))}
    beside |= {home: name for home in homes if (name := _job_of_state(home))}
    known = {*chain(*gathered.logs.values()), *beside.values()}
    folders = {name for home in homes for name in (home.name, home.parent.name) if name == job}
    logged = any(gathered.logs.values())
    said = list(gathered.logs.values()) if logged else [{name} for name in beside.values()]
    asked = chosen(folder, said, job, known | folders)
    job, ours, begun, others = gathered.runs.newest(asked)
    job = job or (next(iter(known)) if len(known) == 1 else "")
    vouched = {path: {name} for path, name in beside.items()} | gathered.logs
    mine = _Mine(job, Owners(folder, vouched, known | folders))
    logs = Logs()
    told = mine.logs(gathered.logs)
    for event in _each(told, happening, gathered.unread):
        if ours(event):
            logs.add(event)
    paces = Paces(logs.starts())
    for line in _each(mine.only(gathered.steps), took, gathered.unread):
        if begun is None or line.at >= begun:
            paces.add(line)
    said_of_steps, histories, evaluated = _words(mine.only(gathered.words), mine.only(gathered.notes), gathered.unread)
    cases, broken = _cases(folder, job, begun)
    home, passed = _home(folder, mine.only(homes), gathered.runs.nodes)
    unread = [*gathered.unread, *broken, *passed]
    unread += [f"{name}: another one ({number} events)" for name, number in others.items()]
    unread += [f"job {name}: {number} of its files and folders" for name, number in sorted(mine.others.items())]
    digests = samples = None
    entries: list[Entry] = []
    if home is not None:
        digests, samples, entries = _state(home, unread)
    log, pace = logs.value(), paces.value()
    history, printed = _chosen(histories, log, unread), said_of_steps.rows
    told_of = [its for path, its in evaluated.items() if path is None or histories[path] is history]
    evaluations = {step: each for its in reversed(told_of) for step, each in its.items()}
    notes, noted = (history.rows, history.every) if history is not None else ([], 1)
    if printed and (not notes or any("loss" in facts.facts for _, facts in printed)):
        # The trainer's own events say more than its history.
        notes, noted = [facts for _, facts in printed], said_of_steps.every
    files = (
        f"{len(told)} daemon logs ({log.events} events)",
        f"{pace.lines} lines of steps' times",
        f"{len(notes)} notes of the trainer",
        f"{len(evaluations)} evaluations",
        cases.sentence,
        f"{len(entries)} checkpoints",
    )
    return Left(
        where=folder.name or str(folder),
        job=job or (home.name if home else folder.name),
        log=log,
        pace=pace,
        took=tuple(sorted(paces.rows.rows, key=lambda each: each.at)),
        every=paces.rows.every if pace.lines else said_of_steps.every,
        said=tuple(sorted((times for times, _ in printed), key=lambda each: (each.step, each.generation))),
        notes=tuple(sorted(notes, key=lambda note: (note.step, note.generation))),
        noted=noted,
        evaluated=tuple(each for _, each in sorted(evaluations.items())),
        incidents=cases.told(),
        untold=cases.untold,
        checkpoints=tuple(entries),
        digests=digests,
        samples=samples,
        files=tuple(text for text in files if not text.startswith("0 ")),
        unread=tuple(unread),
    )


@dataclass(slots=True)
class _Gathered:
    """Files, by what they are."""

    runs: Runs = field(default_factory=Runs)
    logs: dict[Path, set[str]] = field(default_factory=dict)  # daemons', and the jobs that each names
    steps: list[Path] = field(default_factory=list)
    words: list[Path] = field(default_factory=list)  # what workers printed, perhaps
    notes: list[Path] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Mine:
    """What is of the job that is told. Others' is counted."""

    job: str
    owners: Owners
    others: Counter[str] = field(default_factory=Counter)

    def logs(self, named: Mapping[Path, Collection[str]]) -> list[Path]:
        """Daemons' logs that name the job, or none and may be of it."""
        silent = self.only(path for path, names in named.items() if not names)
        return [path for path, names in named.items() if self.job in names or path in silent]

    def only(self, paths: Iterable[Path]) -> list[Path]:
        """Those of the job, or perhaps of it."""
        found = []
        for path in paths:
            whose = self.owners.of(path)
            if not self.job or whose in (None, self.job):
                found.append(path)
            else:
                self.others[str(whose)] += 1
        return found


def _sort(path: Path, into: _Gathered) -> None:
    """A file, by what its first JSON lines say; one without any may be a worker's output. Line by line: a log may be long."""
    try:
        status = path.stat()  # a run that goes on may have taken it away since it was listed
        if not S_ISREG(status.st_mode):
            return
        if status.st_size > BIGGEST:
            into.unread.append(f"{path.name}: over {BIGGEST // 2**20} MiB; read it by parts")
            return
        with open_regular_text(path) as stream:
            objects = _objects(stream)
            first = list(islice(objects, LOOKED_AT))
            if any("event" in line and "at" in line for line in first):
                into.logs[path] = set()
                for event in filter(None, map(happening, chain(first, objects))):
                    into.runs.add(event)
                    if name := event.said.get("job"):
                        into.logs[path].add(str(name))
            elif first and {"step", "rank", "seconds"} <= first[0].keys():
                into.steps.append(path)
            elif any({"step", "reward"} <= line.keys() for line in first):
                into.notes.append(path)
            else:
                into.words.append(path)
    except OSError as error:
        into.unread.append(f"{path.name}: {error.strerror}")


def _words(
    words: Iterable[Path], notes: Iterable[Path], unread: list[str]
) -> tuple[Thin[tuple[Took, Note]], dict[Path, Thin[Note]], dict[Path | None, dict[int, Evaluated]]]:
    """What workers said of their steps, and the trainer's histories; and the evaluations of either, None for workers'."""
    spoken: Thin[tuple[Took, Note]] = Thin(lambda pair: pair[0].step)
    evaluated: dict[Path | None, dict[int, Evaluated]] = {None: {}}
    for path in words:
        before = spoken.seen
        events: Iterator[tuple[Took, Note] | Evaluated] = _each([path], trainer_event, unread)
        for said in events:
            if isinstance(said, Evaluated):
                evaluated[None][said.step] = said
            else:
                spoken.add(said)
        # None of the trainer's events: what it printed for people.
        if spoken.seen == before and ".log" in path.name and (attempt := ATTEMPT.search(str(path))):
            with suppress(OSError), open_regular_text(path) as stream:
                for pair in printed(stream, int(attempt[1])):
                    spoken.add(pair)
    histories = {path: Thin[Note](lambda told: told.step) for path in notes}
    for path, history in histories.items():
        evaluated[path] = {}
        lines: Iterator[Note | Evaluated] = _each([path], history_line, unread)
        for told in lines:
            if isinstance(told, Evaluated):
                evaluated[path][told.step] = told
            else:
                history.add(told)
    return spoken, histories, evaluated


def _each(paths: Iterable[Path], of: Callable[[Mapping[str, Any]], Row | None], unread: list[str]) -> Iterator[Row]:
    """What the lines of these files say, one after the other."""
    for path in paths:
        try:
            with open_regular_text(path) as stream:
                yield from filter(None, map(of, _objects(stream)))
        except OSError as error:
            unread.append(f"{path.name}: {error.strerror}")


def _cases(folder: Path, job: str, begun: float | None) -> tuple[Cases, list[str]]:
    """The incidents of this job's run, file by file, and what is none."""
    cases, broken = Cases(), []
    for inside in _incidents(folder):
        for path in sorted(inside.glob("*.json")):
            try:
                each = load(path)
            except Unreadable as error:
                broken.append(str(error))
                continue
            if job and each.job != job:
                continue
            if begun is None or instant(each.began) >= begun:
                cases.add(each)
    return cases, broken


def _incidents(folder: Path) -> list[Path]:
    """Where incidents are."""
    return sorted({path.parent for path in folder.rglob("incidents/*.json")})


def _job_of_incidents(inside: Path) -> str:
    """Which job the newest of these incidents names; "" if none can be read."""
    for path in sorted(inside.glob("*.json"), reverse=True):
        with suppress(Unreadable):
            return load(path).job
    return ""


def _job_of_state(home: Path) -> str:
    """Which job the newest checkpoint there names; "" if there is none."""
    for path in sorted(home.glob(f"*/{MANIFEST}"), reverse=True):
        with suppress(StateError, OSError):
            return Manifest.decode(read_regular(path), str(path)).facts.job
    return ""


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            try:
                plain = parsed(line)
            except ValueError:
                continue  # a line that a kill cut short
            if isinstance(plain, dict):
                yield plain


def happening(line: Mapping[str, Any]) -> Happening | None:
    """A daemon's log line, if it is one."""
    try:
        at = instant(str(line["at"]))
    except (KeyError, ValueError):
        return None
    return Happening(at=at, node=str(line.get("node", "")), name=str(line.get("event")), said=line)


def took(line: Mapping[str, Any]) -> Took | None:
    """A line of steps.jsonl."""
    try:
        return Took(
            at=instant(line["at"]), node=intern(str(line["node"])), rank=whole(line["rank"]), step=whole(line["step"]),
            generation=whole(line["generation"]), seconds=_seconds(line["seconds"]), waited=_seconds(line.get("waited", {})),
            steps=max(1, whole(line.get("steps", 1))), bytes=whole(line.get("bytes", 0)),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _seconds(given: Mapping[str, Any]) -> dict[str, float]:
    """By phase; the names of a hundred thousand lines are kept once."""
    return {intern(str(name)): real(value, finite=True) for name, value in given.items()}


def trainer_event(line: Mapping[str, Any]) -> tuple[Took, Note] | Evaluated | None:
    """An event of the trainer's that is told here."""
    return evaluation(line, "metrics") if line.get("event") == "ppo.evaluate" else step_event(line)


def history_line(line: Mapping[str, Any]) -> Note | Evaluated | None:
    """A line of the trainer's history."""
    return evaluation(line, "evaluated") if "evaluated" in line else note(line)


def evaluation(line: Mapping[str, Any], figures: str) -> Evaluated | None:
    """An evaluation, if it is one. What is in its samples is cut: a page shows it."""
    try:
        samples = tuple(
            Sample(
                prompt=str(each["prompt"])[:CUT], answer=str(each["answer"])[:CUT], score=real(each["score"]),
                parts={str(name): real(value) for name, value in each.get("parts", {}).items()},
            )
            for each in line.get("samples", ())[:SAMPLES]
        )  # fmt: skip
        found = {str(name): real(value) for name, value in line[figures].items()}
        return Evaluated(step=whole(line["step"]), figures=found, samples=samples)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def step_event(line: Mapping[str, Any]) -> tuple[Took, Note] | None:
    """A trainer's event `ppo.step`, if it is one."""
    if line.get("event") != "ppo.step":
        return None
    try:
        step, generation = whole(line["step"]), whole(line.get("generation", 0))
        seconds = {str(name): real(value, finite=True) for name, value in line["seconds"].items()}
        metrics = {str(name): real(value) for name, value in line["metrics"].items()}
        at = instant(str(line["ts"])) if "ts" in line else None
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    loss = [metrics[name] for name in ("loss", "policy_loss", "preference_loss") if name in metrics]
    facts = {name: value for name, value in metrics.items() if name in NOTED or PART.fullmatch(name)}
    facts |= {"loss": loss[0]} if loss else {}
    times = Took(at=0.0, node="", rank=0, step=step, generation=generation, seconds=seconds)
    return times, Note(step=step, generation=generation, facts=facts, at=at)


def note(line: Mapping[str, Any]) -> Note | None:
    """A line of the trainer's history."""
    try:
        facts = {
            name: real(value)
            for name, value in line.items()
            if (name in NOTED or PART.fullmatch(name)) and value is not None
        }
        at = instant(line["wall"]) if "wall" in line else None
        return Note(step=whole(line["step"]), generation=whole(line.get("generation", 0)), facts=facts, at=at)
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


def _chosen(histories: Mapping[Path, Thin[Note]], log: Log, unread: list[str]) -> Thin[Note] | None:
    """Of several histories in one folder, that of the run with most generations: the others are what it is compared with. None
    that was over before the daemons' logs begin, or begins when they have ended.
    """
    ours = {path: history for path, history in histories.items() if _beside(history, log)}
    ranked = sorted(ours.items(), key=lambda item: (-len({n.generation for n in item[1].rows}), -item[1].seen))
    others = [*(path for path, _ in ranked[1:]), *(path for path in histories if path not in ours)]
    unread += [f"{path.name}: another run's history" for path in others]
    return ranked[0][1] if ranked else None


def _beside(history: Thin[Note], log: Log) -> bool:
    """Whether a history may be of the run that these logs are of; where either tells no times, it may."""
    times = [each.at for each in history.rows if each.at is not None]
    return not times or not log.events or (max(times) >= log.begin and min(times) <= log.end)


def _homes(folder: Path) -> list[Path]:
    """Where checkpoints, ledgers and digests are."""
    marks = {path.parent for name in (DIGESTS, LEDGER) for path in folder.rglob(name) if path.is_dir()}
    return sorted(marks | {path.parent.parent for path in folder.rglob(MANIFEST)})


def _home(folder: Path, homes: Sequence[Path], logged: Collection[str]) -> tuple[Path | None, list[str]]:
    """Which of them is the run's: of several, that with most generations. `logged`: nodes with a log."""
    # Nodes' own directories side by side are one run.
    if len(homes) <= 1:
        return (homes[0] if homes else None), []
    if {home.name for home in homes} <= set(logged):
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
