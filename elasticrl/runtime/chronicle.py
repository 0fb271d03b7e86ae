"""The chronicle: the digest of a run's state after each step, written down as it happens. Standard library only.

The one idea: a job's bits do not depend on who computes them, so every line about one step must say the same, whichever
process, generation or run wrote it. Two lines that differ are a finding; the first step where two runs' lines differ is where
they parted. Nothing is decided while training: a line costs one write, and one that can't be written costs itself alone.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elasticrl.base.owned import made_closed
from elasticrl.base.regular import read_regular
from elasticrl.base.words import count
from elasticrl.runtime.bits import Bits, difference
from elasticrl.runtime.data.ledger import SUFFIX, decode, encode, files_of
from elasticrl.runtime.digest import parting
from elasticrl.runtime.vault.errors import DataError

FOLDER = "digests"
SHOWN = 20  # findings that are spelled out


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one process wrote about one step.

    Example: Line(step=1284, generation=14, digest="9f86d081884c7d65", writer="n03-w0-5f1c22aa")
    """

    step: int
    generation: int
    digest: str
    writer: str
    link: str = ""  # of the chain of digests; empty where none was made


class Chronicle:
    """One process's chronicle. `kind` says what the digests are of, and `bits` what computes them (`str(runtime.bits.bits())`):
    asked with the first line, as finding out takes a moment and most processes write none.

    Digests of different kinds are never compared. Nothing here raises for the disk's sake: `problem` is the sentence to log.
    """

    def __init__(
        self, run_dir: Path, writer: str, *, kind: str = "full", bits: Callable[[], str] = str,
        script: Callable[[], Mapping[str, str]] = dict,
    ) -> None:  # fmt: skip
        self.directory = run_dir / FOLDER
        self.writer = f"{writer}-{secrets.token_hex(4)}"  # every process is a writer of its own: no file has two
        self.problem = ""  # why the newest line could not be written; empty when it could
        self.lost = 0  # lines that could not be written
        self._kind, self._bits, self._script = kind, bits, script
        self._file: int | None = None

    @property
    def path(self) -> Path:
        """Its file."""
        return self.directory / f"{self.writer}{SUFFIX}"

    def add(self, *, step: int, generation: int, digest: str, link: str = "") -> None:
        """`digest` is that of the state after `step`, as this generation computed it, and `link` the chain's there. Not
        flushed: a kill loses nothing.
        """
        try:
            if self._file is None:
                self._file = self._open()
            chained = {"link": link} if link else {}
            self._put(self._file, encode({"step": step, "generation": generation, "digest": digest, **chained}))
            self.problem = ""
        except OSError as error:
            self.lost += 1
            self.problem = (
                f"The chronicle {self.directory} takes no more lines ({error.strerror or error}): free some space. "
                f"Training goes on; {count(self.lost, 'step')} cannot be compared with other runs."
            )

    def close(self) -> None:
        """No more lines will come."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        made_closed(self.directory.parent)
        self.directory.mkdir(exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(file).st_size == 0:
                head = {"chronicle": 1, "writer": self.writer, "kind": self._kind, "bits": self._bits()}
                head |= {"script": dict(script)} if (script := self._script()) else {}
                self._put(file, encode(head))
        except OSError:
            os.close(file)
            raise
        return file

    def _put(self, file: int, line: bytes) -> None:
        before = os.fstat(file).st_size
        if os.write(file, line) != len(line):
            # Half a line on a full disk: taken back, or the next line would be glued to it and lost as well.
            with suppress(OSError):
                os.ftruncate(file, before)
            raise OSError(0, "no space for a whole line")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a run's processes wrote. `findings` are sentences: steps whose bits were not the same each time.

    Example: History(steps={0: "9f86...", 1: "60303a..."}, kind="full", generations=3, rerun=1, lines=6)
    """

    steps: Mapping[int, str]  # the digest that counts: the newest generation's
    kind: str = ""
    bits: tuple[str, ...] = ()  # the different fingerprints of what computed, in the order of their first line
    scripts: tuple[Mapping[str, str], ...] = ()  # the different programs, likewise
    rows: tuple[Line, ...] = ()  # all lines, by step, the newest generation first
    generations: int = 0
    rerun: int = 0  # steps that more than one generation computed
    lines: int = 0
    torn: int = 0  # last lines that a kill or a power cut cut short
    findings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """The same bits each time a step was computed."""
        return not self.findings

    @property
    def sentence(self) -> str:
        """For people."""
        if not self.ok:
            more = f" ... and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
            return f"NOT the same bits, {len(self.findings)} findings: " + "; ".join(self.findings[:SHOWN]) + more
        return (
            f"{count(len(self.steps), 'step')} in {count(self.generations, 'generation')}, {self.lines} digests: "
            f"{count(self.rerun, 'step')} computed again, each to the same bits"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs beside each other. Example: Comparison(steps=1284, first=0, last=1283, parted=None)"""

    steps: int  # that both wrote about
    first: int | None = None
    last: int | None = None
    parted: int | None = None  # the first step whose digests differ
    digests: tuple[str, str] | None = None  # at that step
    why: str = ""  # what is known to differ between them

    @property
    def ok(self) -> bool:
        """The same bits wherever they can be compared, and they can be."""
        return self.steps > 0 and self.parted is None

    @property
    def sentence(self) -> str:
        """For people."""
        if not self.steps:
            return f"They cannot be compared: {self.why}"
        if self.parted is None:
            return f"the same bits in {count(self.steps, 'step')} ({self.first} to {self.last})"
        assert self.digests is not None
        ours, theirs = self.digests
        reason = f"; the second {self.why}" if self.why else ""
        return f"they part at step {self.parted} ({ours} and {theirs}), of {count(self.steps, 'step')} that both have{reason}"


@dataclass(slots=True)
class _Read:
    """All files of a chronicle."""

    lines: list[Line] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)  # kind -> a writer of it
    bits: dict[str, None] = field(default_factory=dict)
    scripts: list[Mapping[str, str]] = field(default_factory=list)
    torn: int = 0
    problems: list[str] = field(default_factory=list)


def read(run_dir: Path) -> History:
    """Read everything that a run's processes wrote, and find the steps whose bits differ. DataError if there is nothing.

    The nodes' own directories may lie side by side in `run_dir`.
    """
    found = _Read()
    for path in files_of(run_dir, FOLDER):
        _read_file(path, found)
    if not found.kinds and not found.problems:
        raise DataError(
            f"There is no chronicle in {run_dir / FOLDER}: is this the run's directory, and is lanes.digest on? Where each "
            "node has a disk of its own (checkpoint.shared: false), only those that carried rank 0 have a part of it."
        )
    if len(found.kinds) > 1:
        kinds = " and ".join(f"{kind} ({writer})" for kind, writer in sorted(found.kinds.items()))
        found.problems.append(f"digests of several kinds are mixed: {kinds}; the setting was changed within the run")
    by_step: dict[int, list[Line]] = {}
    for line in found.lines:
        by_step.setdefault(line.step, []).append(line)
    steps: dict[int, str] = {}
    rows: list[Line] = []
    for step in sorted(by_step):
        lines = sorted(by_step[step], key=lambda line: (-line.generation, line.writer))
        steps[step] = lines[0].digest
        rows += lines
        finding = _differing(step, lines)
        if finding:
            found.problems.append(finding)
    return History(
        steps=steps,
        kind=min(found.kinds, default=""),
        bits=tuple(found.bits),
        scripts=tuple(found.scripts),
        rows=tuple(rows),
        generations=len({line.generation for line in found.lines}),
        rerun=sum(len({line.generation for line in lines}) > 1 for lines in by_step.values()),
        lines=len(found.lines),
        torn=found.torn,
        findings=tuple(found.problems),
    )


def compare(ours: History, theirs: History) -> Comparison:
    """Where two runs part, of the steps that both wrote about."""
    if ours.kind != theirs.kind:
        why = f"one has digests of kind {ours.kind!r} and the other of kind {theirs.kind!r} (lanes.digest)."
        return Comparison(steps=0, why=why)
    both = sorted(ours.steps.keys() & theirs.steps.keys())
    if not both:
        return Comparison(steps=0, why="no step is in both of them.")
    parted = parting(ours.steps, theirs.steps)
    return Comparison(
        steps=len(both),
        first=both[0],
        last=both[-1],
        parted=parted,
        digests=None if parted is None else (ours.steps[parted], theirs.steps[parted]),
        why=_other_bits(ours.bits, theirs.bits) if parted is not None else "",
    )


def _read_file(path: Path, found: _Read) -> None:
    lines = read_regular(path).split(b"\n")
    for number, text in enumerate(lines, 1):
        body = decode(text) if text else {}
        match body:
            case {"step": int(step), "generation": int(generation), "digest": str(digest), **more}:
                link = str(more.get("link", ""))
                found.lines.append(Line(step=step, generation=generation, digest=digest, writer=path.stem, link=link))
            case {"chronicle": 1, "kind": str(kind), "bits": str(bits), **more}:
                found.kinds.setdefault(kind, path.stem)
                if bits:
                    found.bits.setdefault(bits)
                script = more.get("script")
                if isinstance(script, dict) and script not in found.scripts:
                    found.scripts.append({str(name): str(value) for name, value in script.items()})
            case None if number == len(lines):  # no end of line: the writer was killed in it
                found.torn += 1
            case None:
                found.problems.append(f"line {number} of {path.name} was changed")
            case {} if body:
                found.problems.append(f"line {number} of {path.name} is of a newer release")


def _differing(step: int, lines: list[Line]) -> str:
    """Empty if all say the same. Else who said what, the newest generation first."""
    said: dict[str, Line] = {}
    for line in lines:
        said.setdefault(line.digest, line)
    if len(said) == 1:
        return ""
    each = " and ".join(f"{line.digest} (generation {line.generation}, {line.writer})" for line in said.values())
    return f"step {step} has {len(said)} different digests: {each}"


def _other_bits(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """What is known of why two runs' bits differ."""
    for other in theirs:
        for own in ours:
            with suppress(ValueError, TypeError, KeyError):
                if found := difference(Bits.parse(other), Bits.parse(own)):
                    return found
    return ""
