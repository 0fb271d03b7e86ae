"""What the daemon costs a step, on a machine that is never quiet: the same job twice at once, under a daemon and without.

    python bench/cost.py [--world 2] [--rounds 6] [--steps 20] [--sides daemon,plain] [--json]          (as root)

The job is that of bench/ppo.py, and so are the sides. Each has a cgroup of its own, which gets half of the processors, so
whatever else the machine does, it does to both. What daemon, agent, vault and etcd take, they take from the half of their side.
A round is the time in which both train; its ratio says how many steps the other side made for each of the first. Shown are the
ratios' median and its 95 % interval; with fewer than six rounds there is none. `--sides plain,plain` shows how exact that is.

Between them the sides want all the memory's bandwidth and both caches, as the workers of one job do; a step is twice as long.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
CHOICE = ("daemon", "daemon-each", "plain")


def group_of(number: int) -> Path:
    """A cgroup that shares the processors with the other, half and half, however many processes either has."""
    base = Path("/sys/fs/cgroup/cpu")
    group = (base if base.exists() else base.parent) / f"elasticrl-bench-{number}"
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise SystemExit(f"each side wants a cgroup of its own, and {group} cannot be made: {error}") from None
    return group


def run(number: int, side: str, job: Mapping[str, Any], folder: Path, world: int, steps: int, told: Connection) -> None:
    """One side, in a process of its own: when its steps ended."""
    end_cleanly()
    (group_of(number) / "cgroup.procs").write_text(str(os.getpid()))
    if side == "plain":
        found = ppo.script("ppo_plain.py", Path(sys.executable), job, folder, world, steps)
    else:
        found = ppo.daemon(job, folder, world, steps, vault={} if side == "daemon-each" else ppo.SELDOM)
    told.send(found.marks)


def both(sides: Sequence[str], job: Mapping[str, Any], folder: Path, world: int, steps: int) -> list[list[float]]:
    """At once. The one that is done first leaves the other all that there is, which counts no more."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for number, side in enumerate(sides):
        ours, theirs = context.Pipe()
        ends.append(ours)
        given = (number, side, job, folder / str(number), world, steps, theirs)
        processes.append(context.Process(target=run, args=given))
        processes[-1].start()
        theirs.close()
    try:
        return [end.recv() for end in ends]  # EOFError if a side ended without a word; it has said why
    finally:
        for process in processes:
            process.terminate()
            process.join()
        for number in range(len(sides)):
            remove(group_of(number))


def remove(group: Path) -> None:
    """As soon as nobody is in it."""
    deadline = time.monotonic() + EMPTY_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def made(marks: Sequence[float], at: float) -> float:
    """How many steps had ended by then, a part of one counted as such.

    >>> [made([10.0, 12.0, 16.0], at) for at in (10.0, 11.0, 15.0, 16.0)]
    [1.0, 1.5, 2.75, 3.0]
    """
    whole = bisect_right(marks, at)
    if whole == len(marks):
        return float(whole)
    return whole + (at - marks[whole - 1]) / (marks[whole] - marks[whole - 1])


def ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Steps of the second for each of the first, while both trained."""
    start, end = max(first[ppo.WARM_UP], second[ppo.WARM_UP]), min(first[-1], second[-1])
    made_by = [made(marks, end) - made(marks, start) for marks in (first, second)]
    return made_by[1] / made_by[0]


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
    ratios: list[float] = []
    steps: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="bench-cost-") as base:
        job = ppo.models(Path(base))
        one_round = partial(both, job=job, world=options.world, steps=options.steps)
        for number in range(options.rounds):
            turned = number % 2 == 1
            marks = one_round(sides[::-1] if turned else sides, folder=Path(base) / str(number))
            marks = marks[::-1] if turned else marks
            ratios.append(ratio(*marks))
            for took, ended in zip(steps, marks, strict=True):
                took.extend([after - before for before, after in pairwise(ended)][ppo.WARM_UP :])
            print(f"round {number + 1}: {ratios[-1]:.4f}", file=sys.stderr)
    between = ppo.interval(ratios)
    verdict = "too few rounds to tell"
    if between is not None:
        verdict = "met" if between[1] <= ppo.GOAL else "missed" if between[0] > ppo.GOAL else "too noisy to tell"
    if options.json:
        found = {"ratio": summary(ratios), "ratio_95": between, "ratios": ratios, "goal": ppo.GOAL, "verdict": verdict}
        dump({"bench": "cost", "results": found, "sides": sides, "world": options.world, "machine": machine()})
        return 0
    show(
        f"{options.world} workers, both sides at once, each with half of {os.cpu_count()} processors",
        ("side", "a step"),
        [(side, seconds(summary(row))) for side, row in zip(sides, steps, strict=True)],
        [
            f"{sides[0]} by {sides[1]}: {median(ratios):.4f} ({min(ratios):.4f}-{max(ratios):.4f}, n={len(ratios)}"
            + (f"; 95 % {between[0]:.4f}-{between[1]:.4f}" if between else "")
            + f"); goal at most {ppo.GOAL:.2f}: {verdict}"
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
