"""One incident, as it will be told: when it began, what was seen, who was at fault, what was done, what it cost.

The one idea: an incident is built once, by a pure function of the events that the daemon has logged anyway and of the verdict's
evidence; so a log that was kept makes the same page years later. Each is one JSON file in the daemon's state directory, written
whole or not at all, and the oldest go when there are too many.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from elasticrl.base.parsed import instant, parsed
from elasticrl.base.regular import read_regular
from elasticrl.base.value import dataclass
from elasticrl.contract.evidence import Call, Evidence, Kind, Sign
from elasticrl.contract.verdict import Confidence, Fault, Verdict
from elasticrl.diagnose.report import TITLES, WIDTH

VERSION: Final = 1
KEPT: Final = 500  # files of one node; the oldest go
FACTS: Final = 200  # pieces of evidence in a file
MADE: Final = frozenset({"kind", "sign", "ranks", "calls"})  # fields of a fact that are more than a number or a word
WORDS: Final = frozenset({"node", "op", "group", "peer", "detail", "at", "clock", "line", "source"})
MOMENTS: Final = 200  # events in a file

#: Events that belong into the story, and how they are told. `{name}` is a field of the event.
TOLD: Final[Mapping[str, str]] = {
    "worker.exited": "a worker (slot {slot}) ended at step {step}: {cause}",
    "worker.stalled": "a worker (slot {slot}) made no progress in {phase} for {for_s} s (budget {budget_s} s)",
    "neighbour.suspected": "{neighbour} fell silent",
    "neighbour.cleared": "{neighbour} was heard again",
    "agent.lost": "the agent was lost: {reason}",
    "store.lost": "the store did not answer: {reason}",
    "store.back": "the store answered again after {after_s} s",
    "leader.elected": "{member} took the lead",
    "control.asked": "an operator asked for {verb} {target}",
    "plan.adopted": "generation {generation} ({phase}, rung {rung}): {reason}",
    "workers.changed": "workers are {work} (generation {generation}, step {step})",
    "verdict.found": "{fault}, with {confidence} confidence: {cause}",
    "policy.capped": "{reason}",
    "machine.starved": "this machine was short of something: {said}",
    "machine.recovered": "this machine was not short of anything any more",
    "scene.taken": "asked where they are: {said}",
    "probe.done": "tested the way to others: {said}",
    "recovery.done": "the first step of generation {generation} was sealed, {total_s} s after the first sign",
}
#: Those that are something which was done about it, or was not and why.
DONE: Final = frozenset({"plan.adopted", "policy.capped", "control.asked"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One line of the story.

    Example: Moment(at="2026-11-21T20:34:15.120Z", node="n00", event="worker.exited", text="a worker (slot 0) ended ...")
    """

    at: str
    node: str
    event: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """What is kept of one incident.

    Example: Incident(id="20261121203415-g14", job="ppo-7b", node="n00", began="2026-11-21T20:34:15Z", verdict=Verdict(...),
        evidence=(...), timeline=(...), actions=("generation 14 ...",), steps=0, seconds=0.34)
    """

    id: str
    job: str
    node: str  # whose daemon wrote it
    began: str  # UTC
    ended: str = ""  # UTC; empty while it lasts
    generation: int = 0  # the newest that it led to
    verdict: Verdict
    evidence: tuple[Evidence, ...] = ()
    timeline: tuple[Moment, ...] = ()
    actions: tuple[str, ...] = ()
    steps: int | None = None  # lost: made again; None: not known
    seconds: float | None = None  # without a sealed step; None: it is not over

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "v": VERSION, "id": self.id, "job": self.job, "node": self.node, "began": self.began, "ended": self.ended,
            "generation": self.generation, "verdict": self.verdict.plain(),
            "cost": {"steps": self.steps, "seconds": self.seconds}, "actions": list(self.actions),
            "timeline": [asdict(moment) for moment in self.timeline],
            "evidence": [fact.plain() for fact in self.evidence],
        }  # fmt: skip


def build(
    events: Iterable[Mapping[str, Any]], verdict: Verdict, evidence: Sequence[Evidence] = (), *, job: str, node: str
) -> Incident | None:
    """The incident that these log lines tell of, oldest first; None if they tell of none.

    The lines are those of the daemon from the first sign to the recovery, as `telemetry.log` writes them.
    """
    lines = sorted((line for line in events if line.get("event") in TOLD), key=lambda line: str(line.get("at")))
    if not lines:
        return None
    moments = tuple(
        Moment(at=str(line.get("at", "")), node=str(line.get("node", node)), event=str(line["event"]), text=told(line))
        for line in lines
    )
    done = next((line for line in reversed(lines) if line["event"] == "recovery.done"), None)
    began = next((moment.at for moment in moments if not moment.event.startswith("machine.")), moments[0].at)
    ended = str(done.get("at", "")) if done else ""
    since = min(began, _before(ended, done)) if done else began
    generation = max((_whole(line.get("generation")) or 0 for line in lines), default=0)
    return Incident(
        id=f"{re.sub(r'[^0-9]', '', began)[:14]:0<14}-g{generation}", job=job, node=node, began=since, ended=ended,
        generation=generation, verdict=verdict, evidence=tuple(evidence[:FACTS]), timeline=moments[-MOMENTS:],
        actions=tuple(m.text for m in moments if m.event in DONE), steps=_lost(lines, done),
        seconds=_seconds(done, began, ended) if done else None,
    )  # fmt: skip


def told(line: Mapping[str, Any]) -> str:
    """A log line as a sentence."""
    values = {key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}
    return TOLD[str(line["event"])].format_map(_Blank(values)).strip()[:400]


class _Blank(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


def _lost(lines: Sequence[Mapping[str, Any]], done: Mapping[str, Any] | None) -> int | None:
    """As the recovery's end says; else the newest step before the last new generation, less the step it went on from."""
    if done is not None and (known := _whole(done.get("lost"))) is not None:
        return known
    turn = next((i for i in range(len(lines) - 1, -1, -1) if lines[i]["event"] == "plan.adopted"), None)
    if turn is None:
        return None
    before = [step for line in lines[:turn] if (step := _whole(line.get("step"))) is not None]
    after = [
        step
        for line in lines[turn:]
        if line["event"] == "workers.changed" and line.get("work") == "training"
        and (step := _whole(line.get("step"))) is not None
    ]  # fmt: skip
    return max(0, max(before) - after[0]) if any(before) and after else None  # of a script that tells none all are 0


def _seconds(done: Mapping[str, Any], began: str, ended: str) -> float | None:
    total = done.get("total_s")
    if isinstance(total, int | float):
        return round(float(total), 3)
    first, last = _moment(began), _moment(ended)
    return round((last - first).total_seconds(), 3) if first and last else None


def _before(ended: str, done: Mapping[str, Any]) -> str:
    """When steps had ceased, which may be some time before the first sign of it."""
    end, total = _moment(ended), done.get("total_s")
    if end is None or not isinstance(total, int | float):
        return ended
    return (end - timedelta(seconds=total)).isoformat()


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def page(incident: Incident) -> str:
    """A page that one can read aloud."""
    verdict = incident.verdict
    who = [*(f"rank {rank}" for rank in verdict.ranks), *(f"node {node}" for node in verdict.nodes)]
    over = (
        "It lasts." if not incident.ended else
        f"It was over after {incident.seconds:.1f} seconds." if incident.seconds is not None else "It is over."
    )  # fmt: skip
    lost = {None: "", 0: "No step was lost.", 1: "One step was made again."}.get(
        incident.steps, f"{incident.steps} steps were made again."
    )
    lines = [
        f"INCIDENT {incident.id} of job {incident.job}, as seen by {incident.node}", "",
        *_prose(f"It began at {_clock(incident.began)}. {over} {lost}"),
        *_prose(f"What it was: {TITLES[verdict.fault]} ({verdict.fault}), with {verdict.confidence} confidence. "
                f"{_sentence(verdict.cause)}"),
        *_prose(f"At fault: {', '.join(who)}." if who else "The evidence names nobody."),
    ]  # fmt: skip
    if incident.actions:
        lines += ["", "What was done:", *(f"  - {action}" for action in incident.actions)]
    if verdict.remedy:
        lines += ["", *_prose(f"What to do: {verdict.remedy}")]
    lines += ["", "What happened:", *(f"  {_clock(m.at)[-12:]}  {m.node}  {m.text}" for m in incident.timeline)]
    if verdict.because:
        lines += ["", "Evidence:", *(f"  - {str(fact)[: 2 * WIDTH]}" for fact in verdict.because)]
    if verdict.against:
        lines += ["", "What would contradict this verdict:", *(f"  - {text}" for text in verdict.against)]
    return "\n".join(lines)


def rows(incidents: Iterable[Incident]) -> list[tuple[str, ...]]:
    """For the list, as HEAD says. What several nodes tell alike of one plan is one row, at the cost of whom it cost most."""
    seen: dict[tuple[object, ...], list[Incident]] = {}
    for each in incidents:
        verdict = each.verdict
        about = (verdict.fault, verdict.confidence, verdict.ranks, verdict.nodes, verdict.cause)
        seen.setdefault((each.job, each.generation, not each.ended, *about), []).append(each)
    return [_row(same) for same in seen.values()]


def _row(same: Sequence[Incident]) -> tuple[str, ...]:
    first, verdict = same[0], same[0].verdict
    who = ", ".join([*(f"rank {rank}" for rank in verdict.ranks), *verdict.nodes]) or "-"
    took = [each.seconds for each in same if each.seconds is not None]
    cost = "lasts" if not first.ended else f"{max(took):.1f} s" if took else "-"
    by = ", ".join(dict.fromkeys(each.node for each in same))
    return first.id, by, str(verdict.fault), str(verdict.confidence), who, cost, verdict.cause[:90]


HEAD: Final = ("id", "seen by", "class", "confidence", "who", "cost", "cause")


def _prose(text: str) -> list[str]:
    return fill(" ".join(text.split()), WIDTH).splitlines()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!")) else ".")


def _clock(at: str) -> str:
    """2026-11-21 20:34:15.120: without the zone, which is UTC."""
    return at.replace("T", " ").removesuffix("Z").partition("+")[0][:23]


class Unreadable(ValueError):
    """A file that is no incident; the message says which and why."""


def save(folder: Path, incident: Incident) -> Path:
    """One file. It replaces an earlier one of the same incident, as when it ends."""
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    path = folder / f"{incident.id}.json"
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # of a daemon that died just then; or somebody's link to elsewhere
    with fresh.open("x", encoding="utf-8") as stream:
        json.dump(incident.plain(), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(path)
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Incident:
    """The incident again, or Unreadable."""
    try:
        plain = parsed(read_regular(path))
        if plain["v"] != VERSION:
            raise Unreadable(f"{path} has version {plain['v']!r}, this elasticrl reads {VERSION}")
        evidence = tuple(_fact(raw) for raw in plain["evidence"])
        instant(str(plain["began"]))  # else it cannot be put in order
        return Incident(
            id=str(plain["id"]), job=str(plain["job"]), node=str(plain["node"]), began=str(plain["began"]),
            ended=str(plain["ended"]), generation=int(plain["generation"]), verdict=_verdict(plain["verdict"], evidence),
            evidence=evidence, timeline=tuple(map(_read_moment, plain["timeline"])),
            actions=tuple(map(str, plain["actions"])), steps=_typed(int, plain["cost"]["steps"]),
            seconds=_typed(float, plain["cost"]["seconds"]),
        )  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{path} is no incident ({type(error).__name__}: {error}); remove it") from None


def _read_moment(plain: Mapping[str, Any]) -> Moment:
    return Moment(**{name: str(said) for name, said in plain.items()})


def _fact(plain: Mapping[str, Any]) -> Evidence:
    names = [field.name for field in fields(Evidence) if field.name in plain]
    known = {
        name: _typed(float if name == "when" else str if name in WORDS else int, plain[name])
        for name in names
        if name not in MADE
    }
    return Evidence(
        kind=Kind(plain["kind"]), sign=Sign(plain["sign"]), ranks=tuple(map(int, plain["ranks"])),
        calls=tuple(
            Call(seq=int(seq), what=str(what), numel=_typed(int, numel)) for seq, what, numel in plain.get("calls", ())
        ),
        **known,
    )  # fmt: skip


def _typed(kind: Callable[[Any], Any], value: Any) -> Any:
    """What a file gives as what it must be: who reads it counts on that."""
    return None if value is None else kind(value)


def _verdict(plain: Mapping[str, Any], evidence: Sequence[Evidence]) -> Verdict:
    """Its grounds were written as sentences; those facts that are still there are found by theirs."""
    said = {str(fact): fact for fact in evidence}
    return Verdict(
        fault=Fault(plain["class"]), ranks=tuple(map(int, plain["culprit"]["ranks"])),
        nodes=tuple(map(str, plain["culprit"]["nodes"])),
        cause=str(plain["cause"]), confidence=Confidence(plain["confidence"]), remedy=str(plain["remedy"]),
        because=tuple(said[text] for text in plain["because"] if text in said), against=tuple(map(str, plain["against"])),
    )  # fmt: skip


def found(folders: Iterable[Path]) -> tuple[list[Incident], list[str]]:
    """All incidents in these folders, oldest first, and what could not be read."""
    incidents, unread = [], []
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            incidents.append(load(path))
        except Unreadable as error:
            unread.append(str(error))
    return sorted(incidents, key=lambda incident: (incident.began, incident.node)), unread


def folder_of(state_dir: Path, job: str, node: str) -> Path:
    """Where a node's daemon keeps those of a job."""
    return state_dir / job / node / "incidents"
