"""Goodput: what a job that is struck again and again seals of what an undisturbed one would, and whether its bits are the same.

    python bench/goodput.py [--minutes 20] [--every 30] [--mixed] [--sides elasticrl,torchrun-tuned,...] [--record] [--json]

Three one-worker nodes on loopback, 50 ms steps, gloo. elasticrl has a warm spare process on each node and a fourth node as a
spare; the others are as bench/race sets them up, and what is counted there are steps, since nothing is sealed. Every `--every`
seconds a fault strikes, of each kind in turn, on a node that a seed chooses among those that train. Nodes that were killed are
started again `--back` seconds later.

worker  kill -9 of one worker
node    kill -9 of everything of one node
stop    SIGSTOP of one worker, for good     (with --mixed, as the next two)
hang    a training thread sleeps for good
cut     a node falls silent without closing anything, and dies before it comes back

A job to which nothing happens runs for `--calm` seconds before and after: its median step is the measure. So each side is
measured by itself, at the time at which it ran, and the shares are compared. The sides do not take turns within their minutes:
what is asked is what becomes of one job that is struck again and again, and each turn would begin another one.

goodput         sealed steps x median step of the undisturbed job / wall time
of undisturbed  the same, as a share of the undisturbed job's own goodput, which noise keeps below 1
lost            wall time - sealed steps x mean step of the undisturbed job; for a kind of fault: until the next fault
bits            are the digests of all steps those of the same job done by one process that nothing happens to?

With `--record` each side's result is kept in bench/race/goodput.jsonl as soon as it is there; `bench/race/race.py --report`
takes it into the race's page and the comparison's table.

A job that makes no step for three minutes is lost. It is ended then; the rest of its minutes counts all the same.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.race.race import unfit
from bench.race.results import JOBS
from bench.race.sides import SIDES as RACERS
from bench.race.sides import Peer
from bench.recovery import GOALS, NODES, PROGRAM, STALLS, STEP_MS, spares
from bench.report import Watch, commit, cpu, dump, end_cleanly, seconds, show, some_of, summary
from chaos.live.errors import Late
from chaos.live.local import Job, Sealed
from elasticrl.config import dumps, load
from elasticrl.runtime.chronicle import compare, read

SPARE = "n3"
PLAIN = ("worker", "node")
MIXED = ("worker", "stop", "node", "hang", "cut")  # those that take a node away are not neighbours
LOSES_NODE = ("node", "cut")
#: What each fault may cost, by the issue that asked for bench/recovery.py: a node that is gone is followed by one that joins.
BUDGETS = {kind: GOALS[kind] + (STALLS["join"] if kind in LOSES_NODE else 0.0) for kind in MIXED}
LEEWAY = 1.2  # times the sum of the budgets, for faults of all kinds together
GOAL = 0.97
LOST_S = 180.0  # without a step; three times what the race waits for a recovery
STEADY, ALIKE = 0.98, 0.05  # an undisturbed job's own goodput, and how far the two stretches' medians may be apart


# ---- what is reckoned


def moments(lines: Sequence[Sealed]) -> list[float]:
    """When each step was first known to be sealed, oldest first; a step that is made again counts once."""
    first: dict[int, float] = {}
    for line in lines:
        first[line.step] = min(line.at, first.get(line.step, line.at))
    return sorted(first.values())


def within(times: Sequence[float], start: float, end: float) -> int:
    """How many steps were sealed after `start`, until `end`."""
    return bisect_right(times, end) - bisect_right(times, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How an undisturbed job goes. Example: Pace(median_s=0.0503, mean_s=0.0505, medians=(0.0502, 0.0504), steps=2380)"""

    median_s: float
    mean_s: float
    medians: tuple[float, ...]  # of each stretch
    steps: int

    @classmethod
    def of(cls, stretches: Sequence[Sequence[float]]) -> "Pace":
        """From the moments of its steps."""
        gaps = [[b - a for a, b in pairwise(times)] for times in stretches]
        every = [gap for some in gaps for gap in some]
        medians = tuple(statistics.median(some) for some in gaps)
        return cls(median_s=statistics.median(every), mean_s=statistics.fmean(every), medians=medians, steps=len(every))

    @property
    def goodput(self) -> float:
        """The undisturbed job's own."""
        return self.median_s / self.mean_s

    @property
    def noise(self) -> str:
        """Why nothing can be told by it; empty if it can."""
        if self.goodput < STEADY:
            return f"too noisy to tell: the undisturbed job's own goodput is {self.goodput:.3f}, less than {STEADY}"
        if max(self.medians) > (1 + ALIKE) * min(self.medians):
            said = " and ".join(f"{1000 * median:.1f} ms" for median in self.medians)
            return f"too noisy to tell: the undisturbed job's median step was {said}"
        return ""


@dataclass(slots=True)
class Struck:
    """What came of a job that was struck again and again."""

    begun: float = 0.0
    ended: float = 0.0
    faults: list[tuple[float, str]] = field(default_factory=list)  # when, and of which kind
    missed: int = 0  # faults that found nobody to strike
    times: list[float] = field(default_factory=list)  # of its steps
    lost: bool = False  # it makes no step any more
    wrong: str = ""  # a bug in a log, two digests of one step, or a job that is lost
    same: bool | None = None  # bits; None: there is nothing to compare
    bits: str = ""

    @property
    def wall_s(self) -> float:
        """All the time there was."""
        return self.ended - self.begun

    @property
    def steps(self) -> int:
        """Sealed in that time."""
        return within(self.times, self.begun, self.ended)

    def goodput(self, pace: Pace) -> float:
        """See the module's text."""
        return self.steps * pace.median_s / self.wall_s

    def lost_s(self, pace: Pace) -> float:
        """See the module's text."""
        return self.wall_s - self.steps * pace.mean_s

    def lost_by_kind(self, pace: Pace) -> dict[str, list[float]]:
        """What each fault has cost, until the next one."""
        found: dict[str, list[float]] = {}
        ends = [at for at, _ in self.faults[1:]] + [self.ended]
        for (at, kind), end in zip(self.faults, ends, strict=True):
            found.setdefault(kind, []).append(end - at - within(self.times, at, end) * pace.mean_s)
        return found

    @property
    def budget_s(self) -> float:
        """What all its faults may cost together."""
        return LEEWAY * sum(BUDGETS[kind] for _, kind in self.faults)


# ---- the sides


class Ours:
    """elasticrl: three nodes that train, one that waits, a spare process on each."""

    def __init__(self) -> None:
        conf = {
            "job": {"program": str(PROGRAM), "seed": 7},
            "membership": {"max_nodes": len(NODES)},
            "timeouts": {"floor": "2s", "slack": 10, "confirm": "300ms"},
            "lanes": {"count": 6, "digest": "full"},
            "checkpoint": {"every": 400},
        }
        args = ("--step-ms", str(STEP_MS), "--faults", "{folder}/fault")
        self.job = Job(etcd=1, name="bench", conf=conf, script_args=args)

    def __enter__(self) -> Self:
        self.job.__enter__()
        try:
            self.job.start(*NODES)
            self.job.until_steps(3, within_s=180.0, count=5)
            self.job.start(SPARE)
            self.job.until(lambda: all(spares(self.job, n) for n in (*NODES, SPARE)), 180.0, "a spare on every node")
            time.sleep(2.0)  # budgets are learned from what is usual
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.job.__exit__(*(exc or (None, None, None)))

    def lines(self) -> list[Sealed]:
        """One for each step and rank."""
        return self.job.sealed()

    def strike(self, kind: str, node: str) -> Callable[[], object] | None:
        """Do it; what is to be done before the node is started again, if it is gone."""
        job = self.job
        if kind == "hang":
            rank = next(line.rank for line in reversed(job.sealed()) if line.node == node)
            job.fault(step=job.sealed()[-1].step, rank=rank, do="hang", at="lane")
            return None
        if kind in ("worker", "stop"):
            os.kill(job.worker(node), signal.SIGKILL if kind == "worker" else signal.SIGSTOP)
            return None
        daemon = job.daemons[node]
        pids = [daemon.pid, job.worker(node), job.agent(node), job.vault(node)]  # the daemon first: it says nothing
        for pid in filter(None, pids):
            os.kill(pid, signal.SIGKILL if kind == "node" else signal.SIGSTOP)

        def end() -> None:
            for pid in filter(None, pids if kind == "cut" else ()):
                os.kill(pid, signal.SIGKILL)
            daemon.wait(10.0)

        return end

    def start(self, node: str) -> None:
        """It comes back."""
        self.job.start(node)

    def judge(self, struck: Struck) -> None:
        """The bits, and whatever the logs say. The job is ended first: nobody waits for more of it."""
        for node in list(self.job.daemons):
            self.job.end(node)
        try:
            self.job.check()
        except AssertionError as error:
            struck.wrong = str(error)
        ours = read(self.job.folder / "saves" / self.job.name)
        same = compare(read(self.alone(max(ours.steps) + 1)), ours)
        struck.same, struck.bits = same.ok and ours.ok, f"{same.sentence}; {ours.sentence}"

    def alone(self, steps: int) -> Path:
        """The same job in one process that nothing happens to, as fast as it can; where it left its digests."""
        folder = self.job.folder / "alone"
        folder.mkdir()
        own = [
            f"job.steps={steps}", f"checkpoint.dir={folder / 'saves'}", f"vault.dir={folder / 'vault'}", "node.name=alone",
            "membership.min_nodes=1", "vault.copies=0",
        ]  # fmt: skip
        (folder / "config.json").write_text(dumps(load(self.job.folder / "job.yaml", own)))
        env = {**os.environ, "ELASTICRL_CONFIG": str(folder / "config.json"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROGRAM), "--step-ms", "0"]
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the job in one process failed: {done.stderr[-1000:]}")
        return folder / "saves" / self.job.name


class Theirs:
    """One of the race's others, as bench/race sets it up: three nodes. The one that hosts the rendezvous is spared."""

    def __init__(self, name: str) -> None:
        self.side: Peer = RACERS[name]()

    def __enter__(self) -> Self:
        self.side.__enter__()
        try:
            self.side.start(*NODES)
            self.side.ready(len(NODES))
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.__exit__(*exc)

    def lines(self) -> list[Sealed]:
        """One for each step and rank."""
        return self.side.lines()

    def strike(self, kind: str, node: str) -> Callable[[], object] | None:
        """Do it; what is to be done before the node is started again, if it is gone."""
        if kind == "worker":
            os.kill(self.side.pid(node), signal.SIGKILL)
            return None
        if node == NODES[0] and not self.side.host():
            raise ProcessLookupError("its death would end the job")
        self.side.end(node)
        return lambda: None

    def start(self, node: str) -> None:
        """It comes back."""
        self.side.start(node)

    def judge(self, struck: Struck) -> None:
        """There is nothing to compare."""


SIDES: dict[str, Callable[[], Ours | Theirs]] = {
    "elasticrl": Ours,
    **{name: partial(Theirs, name) for name in RACERS if name != "elasticrl"},
}


# ---- one side's runs


def calm(side: str, wanted_s: float) -> list[float]:
    """The moments of the steps of a job to which nothing happens."""
    with SIDES[side]() as job:
        begun = time.monotonic()
        time.sleep(wanted_s)  # it is this stretch that is measured
        return [at for at in moments(job.lines()) if at > begun]


def disturb(side: str, kinds: Sequence[str], options: argparse.Namespace) -> Struck:
    """Strike a job at its times, and see what it comes to."""
    chance = Random(options.seed)
    struck = Struck()
    back: list[tuple[float, str, Callable[[], object]]] = []  # when, which node, and what to do before
    with SIDES[side]() as job:
        struck.begun = time.monotonic()
        strikes = max(1, round(60 * options.minutes / options.every))
        struck.ended = struck.begun + strikes * options.every
        for number, kind in enumerate(islice(cycle(kinds), strikes)):
            wait(job, struck.begun + number * options.every, back)
            now = time.monotonic()
            if now - struck.begun > LOST_S and not within(moments(job.lines()), now - LOST_S, now):
                break
            training = sorted({line.node for line in job.lines() if line.at > now - 3.0})
            chance.shuffle(training)
            for node in training:
                try:
                    last = job.strike(kind, node)
                except (OSError, LookupError, Late) as error:
                    print(f"  {side}: {kind} of {node}: {error}", file=sys.stderr)
                    continue
                struck.faults.append((now, kind))
                if last is not None:
                    back.append((now + options.back, node, last))
                break
            else:
                struck.missed += 1
            print(f"  {now - struck.begun:6.1f} s  {side}: {kind} ({', '.join(training)} trained)", file=sys.stderr)
        else:
            wait(job, struck.ended, back)
        struck.times = moments(job.lines())
        struck.lost = not within(struck.times, struck.ended - options.every, struck.ended)
        if struck.lost:
            last = max(struck.begun, *struck.times) - struck.begun
            struck.wrong = f"its last step was after {last:.0f} s; {len(struck.faults)} faults struck it"
        job.judge(struck)
    return struck


def wait(job: Ours | Theirs, until: float, back: list[tuple[float, str, Callable[[], object]]]) -> None:
    """Until then, and meanwhile start the nodes whose time has come."""
    while (now := time.monotonic()) < until:
        for entry in [entry for entry in back if entry[0] <= now]:
            back.remove(entry)
            entry[2]()
            job.start(entry[1])
        time.sleep(0.02)  # between looks at the clock


def result(struck: Struck, pace: Pace) -> dict[str, Any]:
    """All figures of one side."""
    return {
        "steps": struck.steps,
        "wall_s": struck.wall_s,
        "goodput": struck.goodput(pace),
        "of_undisturbed": struck.goodput(pace) / pace.goodput,
        "lost_s": struck.lost_s(pace),
        "budget_s": struck.budget_s,
        "lost_by_kind_s": {kind: summary(values) for kind, values in struck.lost_by_kind(pace).items()},
        "faults": dict(Counter(kind for _, kind in struck.faults)),
        "missed": struck.missed,
        "same_bits": struck.same,
        "bits": struck.bits,
        "lost": struck.lost,
        "wrong": struck.wrong,
        "undisturbed": {
            "median_step_s": pace.median_s,
            "mean_step_s": pace.mean_s,
            "medians_s": pace.medians,
            "steps": pace.steps,
            "goodput": pace.goodput,
        },
    }


def record(side: str, found: dict[str, Any], options: argparse.Namespace, noise: str) -> None:
    """For the race's page."""
    facts = {"day": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit(), "machine": f"{os.cpu_count()} cores, {cpu()}"}
    job = {
        "side": side,
        "mixed": options.mixed,
        "settings": settings(options),
        "result": found,
        "noise": noise,
        **facts,
    }
    with JOBS.open("a", encoding="utf-8") as jobs:
        jobs.write(json.dumps(job) + "\n")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for."""
    return {name: getattr(options, name) for name in ("minutes", "every", "back", "calm", "seed")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="with faults, for each side")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--back", type=float, default=5.0, help="seconds until a node that was killed is started again")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds of the undisturbed job, before and after")
    parser.add_argument("--mixed", action="store_true", help="faults of all kinds; for elasticrl alone")
    parser.add_argument("--seed", type=int, default=0, help="which nodes are struck")
    parser.add_argument("--sides", default="elasticrl", type=some_of(SIDES))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--json", action="store_true")
    end_cleanly()
    options = parser.parse_args()
    sides = options.sides
    if options.mixed and sides != ["elasticrl"]:
        parser.error("the others do not notice a stopped or hung worker, or a silent node, within minutes")
    if problems := [f"{side}: {why}" for side in sides if (why := unfit(side))]:
        parser.error("; ".join(problems))
    kinds, watch = MIXED if options.mixed else PLAIN, Watch()
    struck, paces = {}, {}
    for side in sides:
        before = calm(side, options.calm)
        watch.look()
        struck[side] = disturb(side, kinds, options)
        watch.look()
        paces[side] = Pace.of([before, calm(side, options.calm)])
        watch.look()
        if options.record:
            noise = "; ".join(filter(None, (watch.noise(), paces[side].noise)))
            record(side, result(struck[side], paces[side]), options, noise)
    results = {side: result(struck[side], paces[side]) for side in sides}
    noise = "; ".join(filter(None, [watch.noise(), *(paces[side].noise for side in sides)]))
    met: dict[str, bool] = {}
    if ours := results.get("elasticrl"):
        met = {"same bits": bool(ours["same_bits"]), "nothing went wrong": not ours["wrong"] and not ours["missed"]}
        if options.mixed:
            met["lost time within the budgets"] = ours["lost_s"] <= ours["budget_s"]
        else:
            met["goodput"] = ours["of_undisturbed"] >= GOAL
    if options.json:
        dump({"bench": "goodput", "settings": settings(options), "mixed": options.mixed, "results": results, "goal": GOAL,
              "budgets_s": BUDGETS, "met": met, "noise": noise, "machine": watch.machine()})  # fmt: skip
        return 0 if all(met.values()) else 1
    table(options, results, met, noise)
    return 0 if all(met.values()) else 1


def table(options: argparse.Namespace, results: dict[str, dict[str, Any]], met: dict[str, bool], noise: str) -> None:
    """For people."""
    bits = {True: "same", False: "OTHER", None: "-"}
    rows = [
        (
            side,
            f"{found['goodput']:.4f}",
            f"{found['of_undisturbed']:.4f}",
            str(found["steps"]),
            f"{found['lost_s']:.1f} s",
            str(sum(found["faults"].values())),
            bits[found["same_bits"]],
            f"{1000 * found['undisturbed']['median_step_s']:.1f} ms",
            f"{found['undisturbed']['goodput']:.4f}",
        )
        for side, found in results.items()
    ]
    notes = []
    for side, found in results.items():
        notes += [f"{side}: {kind} cost {seconds(cost)}" for kind, cost in found["lost_by_kind_s"].items()]
        if options.mixed:
            notes.append(f"{side}: lost {found['lost_s']:.1f} s, budgets with 20 % leeway {found['budget_s']:.1f} s")
        notes += [f"{side}: {text}" for text in (found["wrong"], found["bits"]) if text]
        if found["missed"]:
            notes.append(f"{side}: {found['missed']} faults found nobody to strike")
    notes.append(f"not met: {[name for name, good in met.items() if not good] or 'none'}")
    head = (
        "side", "goodput", "of undisturbed", "steps", "lost", "faults", "bits", "undisturbed step", "undisturbed goodput",
    )  # fmt: skip
    show(
        f"{options.minutes:g} minutes, a fault every {options.every:g} s",
        head,
        rows,
        [*notes, *([noise] if noise else [])],
    )


if __name__ == "__main__":
    sys.exit(main())
