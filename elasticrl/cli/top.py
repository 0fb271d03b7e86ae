"""`elasticrl top`: what each worker of this machine is doing now, how fast, and what it takes.

The one idea: it only looks. Workers beat into pages of shared memory anyway and the kernel counts anyway, so watching costs
them nothing, and works while the daemon is busy or away.
"""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from elasticrl.cli.options import Job, Run

if TYPE_CHECKING:
    from elasticrl.contract.beats import Snapshot

LOOK_S: Final = 0.05
FIRST_S: Final = 1.0  # until the first picture, at most
KEPT_S: Final = 30.0  # of looks, for shares and rates
Every = Annotated[float, typer.Option("--every", min=0.2, help="Seconds between pictures.")]
Once = Annotated[bool, typer.Option("--once", help="Look for so long, print one picture, and end.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, once.")]
HEAD: Final = (
    "node", "rank", "team", "pid", "state", "step", "a step", "phase", "for", "waits", "cpu", "memory", "moves", "of the time",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("top")(top)


def top(job: Job = None, run_dir: Run = None, every: Every = 1.0, once: Once = False, as_json: AsJson = False) -> None:
    """What each worker of this machine is doing: phase, rate, waits, processor, memory, network."""
    import sys

    from elasticrl.cli import screen
    from elasticrl.cli.main import Exit

    board = Board(run_dir, job)
    shown_once = once or as_json or not sys.stdout.isatty()
    board.rest(every if shown_once else min(every, FIRST_S))
    if shown_once:
        if not board.seen:
            typer.echo(board.none(), err=True)
            raise typer.Exit(Exit.FAILED)
        typer.echo(json.dumps([asdict(row) for row in board.rows()], indent=2) if as_json else board.text())
        return
    screen.watch(board.text, every_s=every, meanwhile=lambda: board.look(time.monotonic()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A worker at one moment."""

    at: float
    phase: str
    waiting: bool
    step: int
    bytes: int
    cpu_s: float


@dataclass(slots=True, kw_only=True)
class Seen:
    """What is known of one worker."""

    node: str
    pid: int
    beat: "Snapshot"
    rank: int | None = None
    team: int | None = None
    rss: int = 0
    looks: deque[Look] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is shown of one worker. Rates and shares are of the last 30 s.

    Example: Row(node="n0", rank=0, team=None, pid=4711, state="training", step=128, step_s=0.52, phase="update", phase_s=0.3,
        waits=0.1, cpu=0.98, memory=412_000_000, bytes_s=81_920.0, shares={"update": 0.9, "rollout": 0.1})
    """

    node: str
    rank: int | None
    team: int | None  # None: workers share nothing
    pid: int
    state: str
    step: int
    step_s: float | None
    phase: str
    phase_s: float
    waits: float
    cpu: float
    memory: int
    bytes_s: float
    shares: Mapping[str, float]


def row_of(seen: Seen, now: float) -> Row:
    """The picture of one worker. Pure."""
    looks = list(seen.looks)
    span = looks[-1].at - looks[0].at if len(looks) > 1 else 0.0
    phases: dict[str, int] = {}
    for look in looks:
        phases[look.phase] = phases.get(look.phase, 0) + 1
    shares = {name: count / len(looks) for name, count in sorted(phases.items(), key=lambda kv: -kv[1])}
    beat = seen.beat
    return Row(
        node=seen.node, rank=seen.rank, team=seen.team, pid=seen.pid, state=beat.state.name.lower(), step=beat.step,
        step_s=step_time(looks), phase=beat.phase, phase_s=max(0.0, now - beat.since),
        waits=sum(look.waiting for look in looks) / len(looks) if looks else 0.0,
        cpu=(looks[-1].cpu_s - looks[0].cpu_s) / span if span else 0.0, memory=seen.rss,
        bytes_s=(looks[-1].bytes - looks[0].bytes) / span if span else 0.0, shares=shares,
    )  # fmt: skip


def step_time(looks: list[Look]) -> float | None:
    """Seconds of a step: between the first and the last one that was seen to end; None before two were.

    >>> look = lambda at, step: Look(at=at, phase="", waiting=False, step=step, bytes=0, cpu_s=0.0)
    >>> step_time([look(0.0, 1), look(0.5, 2), look(1.0, 2), look(1.5, 4)])
    0.5
    """
    ends = [(late.at, late.step) for early, late in pairwise(looks) if late.step > early.step]
    if len(ends) < 2:
        return None
    return (ends[-1][0] - ends[0][0]) / (ends[-1][1] - ends[0][1])


class Board:
    """All workers that beat on this machine."""

    def __init__(self, run_dir: Path | None, job: str | None) -> None:
        self._run_dir = run_dir
        self._job = job
        self._ranks: dict[int, tuple[int, int | None]] = {}  # by pid, as daemons say
        self._asked = -1e9
        self._net = (time.monotonic(), net())
        self.seen: dict[Path, Seen] = {}

    def rest(self, seconds: float) -> None:
        """Look at the beats until then."""
        end = time.monotonic() + seconds
        while True:
            self.look(time.monotonic())
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(LOOK_S, left))

    def look(self, now: float) -> None:
        """Every page once; whose process has gone is forgotten."""
        from elasticrl.base.process import life
        from elasticrl.cli import find

        present: set[Path] = set()
        for folder in find.run_dirs(self._run_dir):
            for page in folder.glob(f"{self._job or '*'}/*/beats/process_*"):
                beat = read(page)
                process = life(beat.pid) if beat is not None and beat.generation else None
                if beat is None or process is None:
                    continue
                present.add(page)
                known = self.seen.setdefault(page, Seen(node=page.parents[1].name, pid=beat.pid, beat=beat))
                if known.pid != beat.pid:
                    known.looks.clear()
                known.pid, known.beat, known.rss = beat.pid, beat, process.memory
                seen = Look(
                    at=now,
                    phase=beat.phase,
                    waiting=beat.waiting,
                    step=beat.step,
                    bytes=beat.bytes,
                    cpu_s=process.cpu_s,
                )
                known.looks.append(seen)
                while known.looks[0].at < now - KEPT_S:
                    known.looks.popleft()
        for gone in self.seen.keys() - present:
            del self.seen[gone]
        if any(known.pid not in self._ranks for known in self.seen.values()) and now - self._asked > 2.0:
            self._asked = now
            self._ranks = ranks(self._run_dir, self._job)
        for known in self.seen.values():
            known.rank, known.team = self._ranks.get(known.pid, (None, None))

    def rows(self) -> list[Row]:
        """By node and rank."""
        now = time.monotonic()
        found = [row_of(seen, now) for seen in self.seen.values() if seen.looks]
        return sorted(found, key=lambda row: (row.node, row.rank is None, row.rank or 0, row.pid))

    def none(self) -> str:
        """Why there is nothing to show."""
        from elasticrl.cli import find

        pattern = f"{self._job or '*'}/*/beats"
        shut = [each for folder in find.run_dirs(self._run_dir) for each in folder.glob(pattern) if find.shut(each)]
        if shut:
            return f"{shut[0]} is its user's alone, {shut[0].owner()}'s: sudo -u {shut[0].owner()} elasticrl top"
        return "no worker of a job beats on this machine; elasticrl status says why"

    def _rates(self) -> tuple[float, float]:
        """This machine's bytes a second, in and out, since the last picture."""
        (before, counted), self._net = self._net, (time.monotonic(), net())
        span = max(1e-6, self._net[0] - before)
        return (self._net[1][0] - counted[0]) / span, (self._net[1][1] - counted[1]) / span

    def text(self) -> str:
        """The picture."""
        from elasticrl.cli.render import size

        rows = self.rows()
        if not rows:
            return self.none()
        taken, given = self._rates()
        load = os.getloadavg()[0]
        free, total = memory()
        head = (
            f"load {load:.1f} on {os.cpu_count()} processors   memory {size(total - free)} of {size(total)}   "
            f"network in {size(taken)}/s, out {size(given)}/s"
        )
        return "\n".join([head, "", *shown(rows)])


def shown(rows: list[Row]) -> list[str]:
    """The table, without columns in which nothing stands."""
    from elasticrl.report.table import table

    empty = {"moves": not any(row.bytes_s for row in rows), "team": all(row.team is None for row in rows)}
    kept = [i for i, name in enumerate(HEAD) if not empty.get(name)]
    return table([HEAD[i] for i in kept], [[row[i] for i in kept] for row in map(cells, rows)])


def cells(row: Row) -> tuple[str, ...]:
    """A row as text."""
    from elasticrl.base.words import span
    from elasticrl.cli.render import size

    shares = ", ".join(f"{name} {share:.0%}" for name, share in list(row.shares.items())[:4] if share >= 0.005)
    return (
        row.node, span(row.rank, 1), span(row.team, 1), str(row.pid), row.state, f"{row.step:,}",
        f"{row.step_s:.3g} s" if row.step_s is not None else "-", row.phase, f"{row.phase_s:.1f} s", f"{row.waits:.0%}",
        f"{row.cpu:.0%}", size(row.memory), f"{size(row.bytes_s)}/s", shares,
    )  # fmt: skip


def read(page: Path) -> "Snapshot | None":
    """The newest whole beat of a page, without mapping it."""
    from elasticrl.contract.beats import FIRST, HALF, unpack

    try:
        data = page.read_bytes()
    except OSError:
        return None
    if len(data) < FIRST + 2 * HALF:
        return None
    copies = [copy for start in (FIRST, FIRST + HALF) if (copy := unpack(data[start : start + HALF]))]
    return max(copies, key=lambda copy: copy[0])[1] if copies else None


def memory() -> tuple[int, int]:
    """Available and total bytes of this machine."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    return tuple(int(found[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))  # type: ignore[return-value] # two


def net() -> tuple[int, int]:
    """Bytes in and out of this machine's interfaces so far, loopback included: local gangs speak over it."""
    rows = [
        line.split(":", 1)[1].split() for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    ]
    return sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)


def ranks(run_dir: Path | None, job: str | None) -> dict[int, tuple[int, int | None]]:
    """Each worker's rank by its pid, and its team's number where there are teams, as this machine's daemons say."""
    from elasticrl.cli import find
    from elasticrl.daemon.client import Unanswered, ask

    found: dict[int, tuple[int, int | None]] = {}
    for path in find.sockets(run_dir, job):
        try:
            workers = ask(path, "logs", deadline_s=1.0)
            found |= {int(each["pid"]): (int(each["rank"]), each.get("team")) for each in workers}
        except Unanswered:
            continue
    return found
