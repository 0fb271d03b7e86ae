"""The same GRPO script of TRL under elasticrl and under torchrun: steps made while workers are killed, and when nothing fails.

    python bench/grpo.py [--minutes 5] [--every 30] [--sides exact,kept,supervised,torchrun]
    python bench/grpo.py --quiet [--rounds 3] [--seconds 40]

Three one-worker nodes on loopback, gloo, a model with random weights (`--hidden`, `--layers`). At level supervised and under
torchrun the script saves each tenth step and resumes from its newest whole checkpoint; torchrun has the best settings that we
know (bench/recovery.py) and --max-restarts=100. The clock begins 45 s after all ranks have made some steps. Then a worker is
killed (kill -9), another rank each time, until the minutes are over. All sides have the same kills, one after the other.

made     steps that all ranks have made by the end, and that were not lost
again    steps that were made more than once, by any rank
stopped  the longest that nobody made a step

With `--quiet` nothing is killed: seconds for each step, in rounds, and `exact` beside `torchrun` in each of them.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["HF_HUB_OFFLINE"] = "1"

from bench.levels import listening
from bench.recovery import kill_tree, torchrun, torchrun_env
from bench.report import show, some_of
from elasticrl.ppo import tiny
from elasticrl.store.embedded import free_ports
from tests.levels.scripts import NODES, Line, Running, lines_of

SCRIPT = Path(__file__).with_name("grpo_script.py")
PATIENCE_S = 240.0
SETTLE_S = 45.0  # beside training each node's spare process imports what the script does
#: The level of the job, the script's own, and what else the job is told.
LEVELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exact": ("exact", "exact", {"lanes": {"count": 3}, "vault": {"copies": 1}, "checkpoint": {"every": 100}}),
    "kept": ("kept", "kept", {"vault": {"copies": 1}}),
    "supervised": ("supervised", "plain", {}),
}
SIDES = (*LEVELS, "torchrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a side has made. Example: Made(side="exact", made=412, again=3, stopped_s=0.9, kills=9, per_s=1.41)"""

    side: str
    made: int
    again: int
    stopped_s: float
    kills: int
    per_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """A running side: its lines, and how a rank's worker is killed."""

    lines: Callable[[float], list[Line]]
    kill: Callable[[int], float]
    warm: Callable[[], None]  # waits for spare processes


@contextmanager
def elastic(side: str, more: list[str]) -> Iterator[Job]:
    """Under daemons."""
    level, own, conf = LEVELS[side]
    plain = {"health": {"node_strikes": 99}, "agent": {"env": {"OMP_NUM_THREADS": "1"}}}
    with Running(SCRIPT, "--level", own, *more, level=level, conf={**plain, **conf}) as run:
        run.job.start(*NODES)

        def kill(number: int) -> float:
            pid, at = run.job.worker(NODES[number]), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            return at

        yield Job(run.lines, kill, run.warm)


@contextmanager
def stock(more: list[str]) -> Iterator[Job]:
    """Three torchrun agents."""
    folder = Path(tempfile.mkdtemp(prefix="elasticrl-torchrun-"))
    history = folder / "steps"
    history.touch()
    port, agents = free_ports()[0], []
    script = [str(SCRIPT), "--save", str(folder / "own"), "--history", str(history), *more]
    try:
        for node in NODES:
            with (folder / f"{node}.log").open("ab") as log:
                command, env = torchrun(port, script, best=True), torchrun_env(node, best=True)
                agents.append(
                    subprocess.Popen(
                        command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                )
            listening(port)

        def kill(number: int) -> float:
            pids = {line.rank: line.pid for line in lines_of(history)}
            at = time.monotonic()
            try:
                os.kill(pids[number], signal.SIGKILL)
            except ProcessLookupError:
                print("  nobody to kill: it has not begun again", flush=True)
            return at

        yield Job(partial(lines_of, history), kill, lambda: None)
    finally:
        for agent in agents:
            kill_tree(agent.pid)
            agent.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(side: str, more: list[str]) -> Iterator[Job]:
    """A side whose ranks have all made some steps."""
    with stock(more) if side == "torchrun" else elastic(side, more) as job:
        deadline = time.monotonic() + PATIENCE_S
        while not all(sum(line.rank == rank for line in job.lines(0.0)) >= 5 for rank in range(len(NODES))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{side}: no steps within {PATIENCE_S:g} s")
            time.sleep(0.1)
        job.warm()
        time.sleep(SETTLE_S)
        yield job


def common(lines: list[Line]) -> int:
    """The newest step that every rank of a gang has made."""
    newest = {line.rank: line.step for line in lines[-60:]}
    return min(newest.values(), default=0)


def disturbed(side: str, more: list[str], minutes: float, every: float) -> Made:
    """Kills, until the time is over."""
    chance = random.Random(3)
    with running(side, more) as job:
        begun, first, kills = time.monotonic(), common(job.lines(0.0)), 0
        while (left := begun + 60 * minutes - time.monotonic()) > 0:
            time.sleep(min(left, every))
            if left > every + 1.0:  # the last one has time to recover, as all others
                job.kill(chance.randrange(len(NODES)))
                kills += 1
        end = begun + 60 * minutes
        lines = [line for line in job.lines(begun) if line.at <= end]
    return counted(side, lines, first, kills, begun, end)


def counted(side: str, lines: list[Line], first: int, kills: int, begun: float, end: float) -> Made:
    """From the lines of one side."""
    times = sorted({begun, end, *(line.at for line in lines)})
    seen: dict[tuple[int, int], int] = {}
    for line in lines:
        seen[line.rank, line.step] = seen.get((line.rank, line.step), 0) + 1
    again = len({step for (_, step), count in seen.items() if count > 1})
    made = common(lines) - first
    stopped = max(after - before for before, after in pairwise(times))
    return Made(side=side, made=made, again=again, stopped_s=stopped, kills=kills, per_s=made / (end - begun))


def undisturbed(side: str, more: list[str], seconds: float) -> float:
    """Seconds for a step when nothing fails."""
    with running(side, more) as job:
        begun, first = time.monotonic(), common(job.lines(0.0))
        time.sleep(seconds)
        return seconds / max(1, common(job.lines(begun)) - first)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--sides", type=some_of(SIDES), default=list(SIDES))
    asked.add_argument("--minutes", type=float, default=5.0)
    asked.add_argument("--every", type=float, default=30.0, help="seconds from kill to kill")
    asked.add_argument("--quiet", action="store_true", help="nothing is killed")
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=40.0)
    asked.add_argument("--hidden", type=int, default=256)
    asked.add_argument("--layers", type=int, default=4)
    asked.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    args = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="elasticrl-model-") as folder:
        tiny.write(Path(folder) / "model", hidden=args.hidden, layers=args.layers, heads=4, kind="causal")
        more = ["--model", f"{folder}/model", "--tokens", str(args.tokens)]
        if args.quiet:
            return quiet(args, more)
        rows = []
        for side in args.sides:
            found = disturbed(side, more, args.minutes, args.every)
            print(f"{side}: {found}, load {os.getloadavg()[0]:.1f}", flush=True)
            rows.append(
                [
                    side,
                    str(found.made),
                    str(found.again),
                    f"{found.stopped_s:.1f} s",
                    str(found.kills),
                    f"{found.per_s:.2f}",
                ]
            )
        show(
            "steps made while workers are killed", ("side", "made", "again", "stopped", "kills", "steps a second"), rows
        )
    return 0


def quiet(args: argparse.Namespace, more: list[str]) -> int:
    """Seconds for a step of each side, round by round."""
    took: dict[str, list[float]] = {side: [] for side in args.sides}
    for number in range(args.rounds):
        for side in args.sides if number % 2 == 0 else reversed(args.sides):
            took[side].append(undisturbed(side, more, args.seconds))
        print(f"round {number + 1}: { {side: round(each[-1], 4) for side, each in took.items()} }", flush=True)
    rows = [
        [side, f"{statistics.median(each):.3f} s", f"{min(each):.3f} to {max(each):.3f}"] for side, each in took.items()
    ]
    if "torchrun" in took:
        for row, each in zip(rows, took.values(), strict=True):
            ratios = [mine / theirs for mine, theirs in zip(each, took["torchrun"], strict=True)]
            row.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    show("a step when nothing fails", ("side", "median", "range", "beside torchrun's"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
