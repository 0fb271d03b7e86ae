"""Scripts of other people under real daemons: what they wrote into their history says how they fared."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chaos.live.local import Job
from chaos.patience import patience

HERE = Path(__file__).parent
NODES = ("n0", "n1", "n2")
PATIENCE_S = 120.0  # a busy machine takes half a minute to import transformers in three processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One step of one rank. Example: Line(at=812.4, pid=4711, rank=1, world=3, step=17)"""

    at: float
    pid: int
    rank: int
    world: int
    step: int


def lines_of(history: Path, after: float = 0.0) -> list[Line]:
    """What a script has written down since then, a step a line."""
    words = [line.split() for line in history.read_text().splitlines() if line.count(" ") == 7]
    found = [Line(at=float(w[0]), pid=int(w[1]), rank=int(w[3]), world=int(w[5]), step=int(w[7])) for w in words]
    return [line for line in found if line.at > after]


class Running:
    """A job whose program is a script. Use it as a context."""

    def __init__(
        self, script: str | Path, *args: str, level: str = "supervised", conf: Mapping[str, Any] | None = None
    ) -> None:
        self.job = Job(name="lv")
        self.history = self.job.folder / "steps"
        self.saves = self.job.folder / "own"
        program = script if isinstance(script, Path) else HERE / script
        mine: dict[str, dict[str, Any]] = {
            "job": {
                "level": level,
                "program": str(program),
                "args": [*self.own, *(arg.format(folder=self.job.folder) for arg in args)],
            },
            "membership": {"min_nodes": 2, "max_nodes": 3, "grow_every": "1s"},
            "vault": {"copies": 0},
            "timeouts": {"floor": "5s", "default_phase": "60s", "confirm": "500ms"},
        }
        for section, values in (conf or {}).items():
            mine.setdefault(section, {}).update(values)
        self.job._conf = mine

    @property
    def own(self) -> tuple[str, ...]:
        """What all of these scripts take."""
        return ("--save", str(self.saves), "--history", str(self.history))

    def __enter__(self) -> Self:
        self.job.__enter__()
        self.saves.mkdir()
        self.history.touch()
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.__exit__(*exc)

    def lines(self, after: float = 0.0) -> list[Line]:
        """What was made since then."""
        return lines_of(self.history, after)

    def until(self, claim: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
        """Wait for this; the claim's value."""
        deadline = time.monotonic() + patience(within_s)
        while not (found := claim()):
            assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
            for node, daemon in self.job.daemons.items():
                assert daemon.poll() is None, f"{what}: the daemon of {node} has ended with {daemon.returncode}"
            time.sleep(0.05)
        return found

    def trains(self, world: int, *, after: float = 0.0, steps: int = 3) -> float:
        """Wait until all ranks of such a world have made some steps; when the first was made."""

        def made() -> float:
            lines = [line for line in self.lines(after) if line.world == world]
            by_rank = [[line for line in lines if line.rank == rank] for rank in range(world)]
            return lines[0].at if all(len(each) >= steps for each in by_rank) else 0.0

        return float(self.until(made, f"{steps} steps in a world of {world}"))

    def warm(self) -> None:
        """Wait until each node has a spare process."""
        self.until(lambda: all(self.job.ask(n, "crew")["spares"] for n in self.job.daemons), "spare processes")

    def hit(self, node: str, number: int = signal.SIGKILL) -> float:
        """Send a node's worker a signal; when."""
        pid, at = self.job.worker(node), time.monotonic()
        os.kill(pid, number)
        return at

    def kill_node(self, node: str) -> float:
        """Everything of a node at once; when its last step was made."""
        at = self.lines()[-1].at
        self.job.kill_node(node)
        self.job.end(node)
        return at

    def ends(self) -> list[int]:
        """Wait for the end of the job, as long as steps are made: the daemons' exit codes."""
        daemons, made, deadline = self.job.daemons.values(), 0, time.monotonic() + PATIENCE_S
        while any(daemon.poll() is None for daemon in daemons):
            if len(self.lines()) > made:
                made, deadline = len(self.lines()), time.monotonic() + PATIENCE_S
            assert time.monotonic() < deadline, f"the job has not ended {PATIENCE_S:g} s after its last step"
            time.sleep(0.1)
        return [daemon.returncode for daemon in daemons]

    def causes(self, node: str = "n0") -> list[tuple[list[str], list[str]]]:
        """Why each plan was made, as one node has adopted it: kinds of causes, and the nodes that they are about."""
        return [(line["causes"], line["nodes"]) for line in self.job.events(node, "plan.adopted")]
