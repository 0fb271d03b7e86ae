"""What the daemon costs a step, on a machine that is never quiet: the same job twice at once, under a daemon and without.

    python bench/cost.py [--world 2] [--rounds 6] [--steps 20] [--sides daemon,plain] [--json]          (as root)

The job is that of bench/ppo.py, and so are the sides. Each has a cgroup of its own, so whatever else the machine does, it does
to both, and the kernel counts what each takes: workers, daemon, agent, vault, etcd. A round is the time in which both train.
Shown is, of all rounds the median and its 95 % interval (with fewer than six rounds there is none), the processors' time that
a step takes the first side by what it takes the other. Steps in the same time would say less: how the kernel deals processors
to two cgroups of equal weight favours one of them by as much as a tenth. `--sides plain,plain` shows how exact it is.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import ppo
from bench.report import dump, end_cleanly, machine, seconds, show, summary

EMPTY_S = 10.0
SAMPLE_S = 0.25
CHOICE = ("daemon", "daemon-each", "plain")


class Half:
    """A cgroup with half of the processors while there is another, and a count of what is taken."""

    def __init__(self, number: int) -> None:
        base = Path("/sys/fs/cgroup")
        old = [base / name for name in ("cpu", "cpuacct") if (base / name).exists()]
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

    def used_s(self) -> float:
        """Processor time so far, of all that were ever in it."""
        if (usage := self.groups[-1] / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e9
        return int((self.groups[-1] / "cpu.stat").read_text().split()[1]) / 1e6

    def remove(self) -> None:
        """As soon as nobody is in it."""
        deadline = time.monotonic() + EMPTY_S
        while (left := [group for group in self.groups if group.exists()]) and time.monotonic() < deadline:
            for group in left:
                with suppress(OSError):
                    group.rmdir()
            time.sleep(0.1)  # the kernel tells nobody when a cgroup is empty


@dataclass(slots=True)
class Seen:
    """Of one side."""

    marks: list[float] = field(default_factory=list)  # when each step ended
    used: list[tuple[float, float]] = field(default_factory=list)  # processor time by then

    def used_by(self, at: float) -> float:
        return self.used[bisect_left(self.used, (at,))][1]


def run(number: int, side: str, job: Mapping[str, Any], folder: Path, world: int, steps: int, told: Connection) -> None:
    """One side, in a process of its own: when its steps ended."""
    end_cleanly()
    Half(number).join()
    if side == "plain":
        found = ppo.script("ppo_plain.py", Path(sys.executable), job, folder, world, steps)
    else:
        found = ppo.daemon(job, folder, world, steps, vault={} if side == "daemon-each" else ppo.SELDOM)
    told.send(found.marks)


def both(sides: Sequence[str], job: Mapping[str, Any], folder: Path, world: int, steps: int) -> list[Seen]:
    """At once. The one that is done first leaves the other all that there is, which counts no more."""
    context = multiprocessing.get_context("spawn")
    halves, seen = [Half(number) for number in range(len(sides))], [Seen() for _ in sides]
    ends, processes = [], []
    for half in halves:
        half.make()
    for number, side in enumerate(sides):
        ours, theirs = context.Pipe()
        ends.append(ours)
        given = (number, side, job, folder / str(number), world, steps, theirs)
        processes.append(context.Process(target=run, args=given))
        processes[-1].start()
        theirs.close()
    try:
        while waited := [(end, one) for end, one in zip(ends, seen, strict=True) if not one.marks]:
            for half, one in zip(halves, seen, strict=True):
                one.used.append((time.time(), half.used_s()))
            for end, one in waited:
                if end.poll(SAMPLE_S / len(waited)):
                    one.marks = end.recv()  # EOFError if a side ended without a word; it has said why
        return seen
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for half in halves:
            half.remove()


def made(marks: Sequence[float], at: float) -> float:
    """How many steps had ended by then, a part of one counted as such.

    >>> [made([10.0, 12.0, 16.0], at) for at in (10.0, 11.0, 15.0, 16.0)]
    [1.0, 1.5, 2.75, 3.0]
    """
    whole = bisect_right(marks, at)
    if whole == len(marks):
        return float(whole)
    return whole + (at - marks[whole - 1]) / (marks[whole] - marks[whole - 1])


def ratio(first: Seen, second: Seen) -> float:
    """What a step took the first by what it took the second, of the processors' time, while both trained."""
    start = max(one.marks[ppo.WARM_UP] for one in (first, second))
    end = min(one.marks[-1] for one in (first, second))
    took = [
        (one.used_by(end) - one.used_by(start)) / (made(one.marks, end) - made(one.marks, start))
        for one in (first, second)
    ]
    return took[0] / took[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sides", default="daemon,plain")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    sides = options.sides.split(",")
    if len(sides) != 2 or not set(sides) <= set(CHOICE):
        raise SystemExit(f"--sides wants two of {', '.join(CHOICE)}")
    found: list[float] = []
    steps: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="bench-cost-") as base:
        job = ppo.models(Path(base))
        one_round = partial(both, job=job, world=options.world, steps=options.steps)
        for number in range(options.rounds):
            turned = number % 2 == 1
            seen = one_round(sides[::-1] if turned else sides, folder=Path(base) / str(number))
            seen = seen[::-1] if turned else seen
            found.append(ratio(*seen))
            for took, one in zip(steps, seen, strict=True):
                took.extend([after - before for before, after in pairwise(one.marks)][ppo.WARM_UP :])
            print(f"round {number + 1}: {found[-1]:.4f}", file=sys.stderr)
    between = ppo.interval(found)
    verdict = "too few rounds to tell"
    if between is not None:
        verdict = "met" if between[1] <= ppo.GOAL else "missed" if between[0] > ppo.GOAL else "too noisy to tell"
    if options.json:
        told = {"ratio": summary(found), "ratio_95": between, "ratios": found, "goal": ppo.GOAL, "verdict": verdict}
        dump({"bench": "cost", "results": told, "sides": sides, "world": options.world, "machine": machine()})
        return 0
    sure = f"; 95 % {between[0]:.4f}-{between[1]:.4f}" if between else ""
    note = (
        f"processors' time of a step, {sides[0]} by {sides[1]}: {median(found):.4f} "
        f"({min(found):.4f}-{max(found):.4f}, n={len(found)}{sure}); goal at most {ppo.GOAL:.2f}: {verdict}"
    )
    show(
        f"{options.world} workers, both sides at once on {os.cpu_count()} processors",
        ("side", "a step"),
        [(side, seconds(summary(row))) for side, row in zip(sides, steps, strict=True)],
        [note],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
