"""What the daemon costs a step, on a machine whose speed changes: the same job under a daemon and without, in one run.

    python bench/cost.py [--world 2] [--rounds 12] [--swaps 8] [--turn 1.2] [--sides daemon,plain] [--beside] [--json] (as root)

The job is that of bench/ppo.py, and so are the sides. Each lives in a cgroup of its own (workers, daemon, agent, vault, etcd).
They take turns: one of the two is always frozen, so that the other has the whole machine. A turn is a second or so, shorter
than what the machine's speed takes to change; one side has a turn, then twice the other, then the first again, and a round is
some of these swaps, long enough for steps. After half of the rounds both begin anew, in the other order. With `--beside`
both run at the same time, each with all its processes on one processor, and change places after each turn. That is the hardest
that a machine can be on a daemon: what it does all the time, however little, stands beside half as much work, and nothing hides
on a processor that would idle.
Counted are the time in which a side was not frozen, the processors' time that it took, and the steps, a part of one as such.
Shown is, of all rounds, the median of what a step takes the first side by what it takes the other, and its 95 % interval (with
fewer than six rounds there is none). `--sides plain,plain` shows how exact that is.

    python bench/cost.py --sides daemon-each,other --other ../before --world 2 --beside

tells this checkout from another one, which has a .venv of its own: `other` is its `daemon-each`.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import ppo
from bench.processes import Processes
from bench.report import Watch, against, dump, end_cleanly, interval, show, some_of, summary

PATIENCE_S = 300.0  # for a side to begin
EMPTY_S = 10.0
SITTINGS = (
    2  # who begins first is slower by some tenths of a percent for as long as both live, so each begins first once
)
TOLD_LATE = 1  # steps: under a daemon one is told when the next has sealed it
STEPS = 5_000  # more than there is time for, and few enough that the wait for them fits into a poll
CHOICE = ("daemon", "daemon-each", "plain", "other")
#: What another checkout is told to run: its own code, by our numbers.
OTHER = """
import json, sys
from pathlib import Path
from bench import ppo
from bench.processes import Processes
job, folder, world, steps, waits = json.load(sys.stdin)
ppo.daemon(job, Path(folder), world, steps, Processes(), vault={}, waits=waits)
"""
#: Who was frozen for a turn has neither died nor stalled.
PATIENT = {
    "membership": {"lease_ttl": "10m", "keepalive": "4s"},
    "timeouts": {"floor": "1m"},
    "vault": {"timeout": "4m"},
}


class Freezer:
    """A cgroup that can be frozen, and that counts what it takes."""

    def __init__(self, number: int) -> None:
        base = Path("/sys/fs/cgroup")
        old = [base / name for name in ("cpuacct", "freezer") if (base / name).exists()]
        self.groups = [one / f"elasticrl-bench-{number}" for one in old or [base]]

    def make(self) -> None:
        for group in self.groups:
            try:
                group.mkdir(exist_ok=True)
            except OSError as error:
                raise SystemExit(f"each side wants a cgroup of its own, and {group} cannot be made: {error}") from None

    def join(self) -> None:
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def freeze(self, *, frozen: bool = True) -> None:
        state, word = self.groups[-1] / "freezer.state", "FROZEN" if frozen else "THAWED"
        if state.exists():
            state.write_text(word)
            done = word
        else:
            (self.groups[-1] / "cgroup.freeze").write_text(str(int(frozen)))
            state, done = self.groups[-1] / "cgroup.events", f"frozen {int(frozen)}"
        while done not in state.read_text():
            time.sleep(0.001)  # the kernel stops each thread where it can, and tells nobody when all are

    def pin(self, processor: int) -> None:
        """All that are in it, while it is frozen; whom they start is where they are."""
        group = self.groups[-1]
        threads = group / "tasks" if (group / "tasks").exists() else group / "cgroup.threads"
        for thread in threads.read_text().split():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {processor})

    def used_s(self) -> float:
        """Processor time so far, of all that were ever in it."""
        if (usage := self.groups[0] / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        return int((self.groups[0] / "cpu.stat").read_text().split()[1]) / 1e6

    def remove(self) -> None:
        """With whoever is left in it."""
        deadline = time.monotonic() + EMPTY_S
        while (left := [group for group in self.groups if group.exists()]) and time.monotonic() < deadline:
            for group in left:
                for pid in (group / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                with suppress(OSError):
                    group.rmdir()
            time.sleep(0.1)  # the kernel tells nobody when a cgroup is empty either


@dataclass(frozen=True, slots=True)
class Turn:
    """When one had the machine, and the processor time that it took."""

    since: float
    until: float
    used_s: float


@dataclass(slots=True)
class Side:
    """One of the two jobs."""

    name: str
    freezer: Freezer
    folder: Path
    process: BaseProcess
    turns: list[Turn] = field(default_factory=list)
    began: tuple[float, float] = (0.0, 0.0)  # this turn: the time, and what it had used

    def begin(self) -> None:
        """Its turn begins."""
        self.began = time.time(), self.freezer.used_s()
        self.freezer.freeze(frozen=False)

    def end(self) -> None:
        """Its turn is over."""
        self.freezer.freeze()
        since, used = self.began
        self.turns.append(Turn(since, time.time(), self.freezer.used_s() - used))
        if self.process.exitcode is not None:
            raise SystemExit(f"{self.name} ended (exit {self.process.exitcode})")


def turn(sides: Sequence[Side], seconds: float) -> None:
    """They run at the same time for so long."""
    for side in sides:
        side.begin()
    time.sleep(seconds)  # the turn itself
    for side in sides:
        side.end()


def advance(side: Side, steps: int) -> None:
    """It runs alone until it has made so many steps."""
    deadline = time.monotonic() + PATIENCE_S
    side.begin()
    while len(ppo.made(side.folder)) < steps and side.process.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.2)  # between looks whether it lives, or has made its steps
    side.end()
    if len(ppo.made(side.folder)) < steps:
        raise SystemExit(f"{side.name} has not made {steps} steps within {PATIENCE_S:.0f} s")


def run(
    name: str, freezer: Freezer, job: Mapping[str, Any], folder: Path, world: int, where: set[int], other: Path
) -> None:
    """A side, in a process of its own, until it is ended."""
    end_cleanly()
    freezer.join()
    os.sched_setaffinity(0, where)
    if name == "other":
        told = json.dumps([job, str(folder), world, STEPS, PATIENT])
        command = [other / ".venv" / "bin" / "python", "-c", OTHER]
        subprocess.run(command, cwd=other, input=told, text=True, check=True)
        return
    seen = Processes()  # which does not look: the cgroup counts
    if name == "plain":
        ppo.script("ppo_plain.py", Path(sys.executable), job, folder, world, STEPS, seen)
    else:
        vault = {} if name == "daemon-each" else ppo.SELDOM
        ppo.daemon(job, folder, world, STEPS, seen, vault=vault, waits=PATIENT)


def own(turns: Sequence[Turn], at: float) -> float:
    """A moment by the clock of somebody who had only these turns.

    >>> [own([Turn(10.0, 12.0, 0.0), Turn(20.0, 25.0, 0.0)], at) for at in (10.0, 11.0, 12.0, 15.0, 20.0, 24.0)]
    [0.0, 1.0, 2.0, 2.0, 2.0, 6.0]
    """
    return fsum(min(at, turn.until) - turn.since for turn in turns if turn.since < at)


def made(marks: Sequence[float], at: float) -> float:
    """How many steps had ended by then, a part of one counted as such.

    >>> [made([10.0, 12.0, 16.0], at) for at in (10.0, 11.0, 15.0, 16.0)]
    [1.0, 1.5, 2.75, 3.0]
    """
    whole = bisect_right(marks, at)
    if whole == len(marks):
        return float(whole)
    return whole + (at - marks[whole - 1]) / (marks[whole] - marks[whole - 1])


def steps(side: Side) -> list[float]:
    """How many it made in each turn but the first, in which it began, and the last, which ended a step."""
    marks = [own(side.turns, step["made"]) for step in ppo.made(side.folder)]
    begun = [made(marks, own(side.turns, turn.since)) for turn in side.turns[1:]]
    return [after - before for before, after in pairwise(begun)]


def costs(side: Side, each: int) -> list[tuple[float, float]]:
    """Of each round, which is so many turns: seconds of a step, and seconds of the processors for it."""
    turns = zip(side.turns[1:-1], steps(side), strict=True)
    parts = [(turn.until - turn.since, turn.used_s, count) for turn, count in turns]
    rounds = [list(map(fsum, zip(*parts[at : at + each], strict=True))) for at in range(0, len(parts), each)]
    return [(took / count, used / count) for took, used, count in rounds]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured, and how."""

    names: Sequence[str]
    world: int
    swaps: int
    turn_s: float
    beside: bool
    other: Path
    job: Mapping[str, Any]
    side: Callable[[str, Freezer, Mapping[str, Any], Path, int, set[int], Path], None] = run  # in a process of its own


def measure(asked: Asked, rounds: int, base: Path, watch: Watch) -> list[list[tuple[float, float]]]:
    """The costs of both."""
    found: list[list[tuple[float, float]]] = [[] for _ in asked.names]
    for sitting, count in enumerate((rounds - rounds // SITTINGS, rounds // SITTINGS)):
        if not count:
            continue
        folder = base / f"sitting-{sitting}"
        folder.mkdir()
        order = [*range(len(asked.names))][:: -1 if sitting else 1]
        told = sit(replace(asked, names=[asked.names[i] for i in order]), folder, count, watch)
        for i, its in zip(order, told, strict=True):
            found[i] += its
    return found


def sit(asked: Asked, base: Path, rounds: int, watch: Watch) -> list[list[tuple[float, float]]]:
    """The costs of both in so many rounds of one sitting: they begin in this order, and end together."""
    processors = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        sides = []
        for number, name in enumerate(asked.names):
            freezer, folder = Freezer(number), base / f"{number}-{name}"
            where = {processors[number]} if asked.beside else set(processors)
            freezer.make()
            stack.callback(freezer.remove)
            process = context.Process(
                target=asked.side,
                args=(name, freezer, asked.job, folder, asked.world, where, asked.other),
            )
            process.start()
            stack.callback(process.join, 60.0)
            stack.callback(process.terminate)
            stack.callback(freezer.freeze, frozen=False)
            sides.append(Side(name, freezer, folder, process))
            advance(sides[-1], ppo.WARM_UP + 1)
        for number in range(rounds):
            for swap in range(asked.swaps):
                first, second = sides if (number + swap) % 2 == 0 else sides[::-1]
                for pair in ((first, second), (second, first)):
                    if asked.beside:
                        for side, processor in zip(pair, processors, strict=False):
                            side.freezer.pin(processor)
                    for together in [pair] if asked.beside else [(side,) for side in pair]:
                        turn(together, asked.turn_s)
            watch.look()  # both are frozen
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for side in sides:
            advance(side, len(ppo.made(side.folder)) + TOLD_LATE + 1)
        return [costs(side, 2 * asked.swaps) for side in sides]


def told(ratios: Sequence[float], goal: float = ppo.GOAL) -> dict[str, Any]:
    """The ratios of all rounds, and whether they meet the goal."""
    between = interval(ratios)
    verdict = against(between, goal)
    return {"ratio": summary(ratios), "ratio_95": between, "ratios": ratios, "goal": goal, "verdict": verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turn", type=float, default=1.2)
    parser.add_argument("--swaps", type=int, default=8)
    parser.add_argument("--sides", default="daemon,plain", type=some_of(CHOICE))
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--other", type=Path, default=Path(), metavar="DIR")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    names = options.sides
    if len(names) != 2:
        parser.error(f"--sides wants two of {', '.join(CHOICE)}")
    if options.beside and len(os.sched_getaffinity(0)) < len(names):
        raise SystemExit("--beside wants a processor for each side")
    if "other" in names and not (options.other / ".venv").exists():
        raise SystemExit(f"--other {options.other}: a checkout with a .venv of its own is wanted")
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-cost-") as base:
        job = ppo.models(Path(base), "ppo", "equal")
        asked = Asked(
            names,
            options.world,
            options.swaps,
            options.turn,
            beside=options.beside,
            other=options.other.resolve(),
            job=job,
        )
        found = measure(asked, options.rounds, Path(base), watch)
    noise = watch.noise()
    pairs = [list(zip(*both, strict=True)) for both in zip(*found, strict=True)]
    results = {
        what: told([ours / theirs for ours, theirs in (pair[i] for pair in pairs)])
        for i, what in enumerate(("time", "processors' time"))
    }
    if options.json:
        settings = {"sides": names, "world": options.world, "beside": options.beside}
        steps = [
            {what: summary([one[i] for one in side]) for i, what in enumerate(("step_s", "processors_s"))}
            for side in found
        ]
        dump(
            {
                "bench": "cost",
                "results": results,
                **settings,
                "steps": steps,
                "noise": noise,
                "machine": watch.machine(),
            }
        )
        return 0
    notes = []
    for what, result in results.items():
        sure = "; 95 % {:.4f}-{:.4f}".format(*result["ratio_95"]) if result["ratio_95"] else ""
        ratio = result["ratio"]
        notes.append(
            f"{what} of a step, {names[0]} by {names[1]}: {ratio['median']:.4f} ({ratio['min']:.4f}-{ratio['max']:.4f}, "
            f"n={ratio['count']}{sure}); goal at most {ppo.GOAL:.2f}: {result['verdict']}"
        )
    rows = [
        (name, *(f"{median(one[i] for one in costs):.3f} s" for i in range(2)))
        for name, costs in zip(names, found, strict=True)
    ]
    places = "each side on a processor of its own" if options.beside else f"on {os.cpu_count()} processors, in turn"
    title = f"{options.world} {'workers' if options.world > 1 else 'worker'}, {places}, turns of {options.turn:.1f} s"
    show(title, ("side", "a step", "processors' time"), rows, [*notes, *([noise] if noise else [])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
