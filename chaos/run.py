"""`python -m chaos.run sim` and `live`: scenarios on virtual or real nodes; exit code 1 if a guarantee did not hold."""

import argparse
import gc
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, islice, takewhile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from chaos import history
from chaos.scenario import Scenario, Unusable, big, draw, load, save
from chaos.sim.drive import Run
from chaos.sim.trace import Trace

SCENARIOS = Path(__file__).parent / "scenarios"
LIVE = SCENARIOS / "live"  # with faults that only real machines have
RANDOM_MIN = 5.0


@dataclass(slots=True)
class Tally:
    """What many runs came to."""

    runs: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)  # how to repeat it, and the first violation
    struck: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    events: int = 0
    steps: int = 0
    generations: int = 0

    def add(self, other: "Tally") -> None:
        """Those too."""
        self.runs += other.runs
        self.failed += other.failed
        self.struck += other.struck
        self.virtual_s += other.virtual_s
        self.events += other.events
        self.steps += other.steps
        self.generations += other.generations


def tally_of(scenario: Scenario, seed: str, again: str) -> Tally:
    """One run, counted."""
    result = Run(scenario, seed).drive()
    failed = [(again, str(result.violations[0]))] if result.violations else []
    plans = sum(isinstance(fact, history.Planned) for fact in result.history)
    return Tally(1, failed, result.struck, result.virtual_s, result.events, result.steps, plans)


def tally_seed(seed: int, nodes: int | None) -> Tally:
    """One seed's own scenario."""
    size = f" --nodes {nodes}" if nodes else ""
    return tally_of(draw(seed, nodes), str(seed), f"python -m chaos.run sim --seed {seed}{size}")


def _batch(seeds: tuple[int, ...], nodes: int | None) -> Tally:
    total = Tally()
    for seed in seeds:
        total.add(tally_seed(seed, nodes))
    return total


def _batches(numbers: Iterable[int], size: int) -> Iterator[tuple[int, ...]]:
    batch: list[int] = []
    for number in numbers:
        batch.append(number)
        if len(batch) == size:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)


def many(numbers: Iterable[int], nodes: int | None, seconds: float | None) -> Tally:
    """These seeds over all cores; with `seconds`, as many of them as fit."""
    total = Tally()
    deadline = time.monotonic() + seconds if seconds is not None else None
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        pending = []
        for batch in _batches(numbers, 5):
            pending.append(pool.submit(_batch, batch, nodes))
            while len(pending) > 2 * workers:
                total.add(pending.pop(0).result())
            if deadline is not None and time.monotonic() > deadline:
                break
        for future in pending:
            if deadline is not None and time.monotonic() > deadline and future.cancel():
                continue
            total.add(future.result())
    return total


def show(total: Tally, wall_s: float) -> None:
    """The summary, for people."""
    print(f"\n{total.runs} runs, {total.virtual_s / 3600:.1f} virtual hours, {total.generations} generations, "
          f"{total.steps:,} decisions, {total.events:,} events, {wall_s:.1f} s")  # fmt: skip
    kinds = sorted(total.struck.items(), key=lambda item: (-item[1], item[0]))
    print(f"{sum(total.struck.values())} faults of {len(kinds)} kinds:")
    for row in _batches_of(kinds, 4):
        print("  " + "".join(f"{kind:<18}{number:>6}   " for kind, number in row))
    for again, what in total.failed[:20]:
        print(f"VIOLATION  {what}\n           {again}")
    if len(total.failed) > 20:
        print(f"... and {len(total.failed) - 20} more")
    print("no violation" if not total.failed else f"{len(total.failed)} of {total.runs} runs violated a guarantee")


def _batches_of(items: list[tuple[str, int]], size: int) -> Iterator[list[tuple[str, int]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def one(scenario: Scenario, seed: str, out: Path, again: str, *, trace: bool) -> Tally:
    """One run with its trace, its history on disk, and its verdict."""
    begun = time.monotonic()
    run = Run(scenario, seed)
    if trace:
        print(f"{scenario.name}: {scenario.about}" if scenario.about else scenario.name)
        Trace(run.cluster).attach()
    result = run.drive()
    path = out / (scenario.name.replace(" ", "-") + ".history.jsonl")
    history.write(result.history, path)
    for violation in result.violations[:10]:
        print(f"VIOLATION  {violation}")
    verdict = "ok" if not result.violations else f"{len(result.violations)} violations"
    print(
        f"{scenario.name}: {verdict}, {result.virtual_s:.0f} virtual seconds, "
        f"{sum(result.struck.values())} of {len(scenario.faults)} faults struck, "
        f"{result.steps:,} decisions in {time.monotonic() - begun:.1f} s; history in {path}"
    )
    print(f"again: {again}")
    failed = [(again, str(result.violations[0]))] if result.violations else []
    return Tally(1, failed, result.struck, result.virtual_s, result.events, result.steps)


def sim(args: argparse.Namespace) -> int:
    """The `sim` verb."""
    out = Path(args.out)
    begun = time.monotonic()
    total = Tally()
    if args.scenarios:
        for path in args.scenarios:
            scenario = load(Path(path))
            if args.nodes:
                scenario = replace(scenario, shape=replace(scenario.shape, nodes=args.nodes))
            seed = str(args.seed) if args.seed is not None else scenario.seed
            size = f" --nodes {args.nodes}" if args.nodes else ""
            again = f"python -m chaos.run sim{size} --seed {seed} {path}"
            total.add(one(scenario, seed, out, again, trace=len(args.scenarios) == 1 and not args.quiet))
    elif args.seed is not None:
        scenario = draw(args.seed, args.nodes)
        size = f" --nodes {args.nodes}" if args.nodes else ""
        again = f"python -m chaos.run sim --seed {args.seed}{size}"
        total = one(scenario, str(args.seed), out, again, trace=not args.quiet)
        if args.save:
            save(replace(scenario, name=Path(args.save).stem), Path(args.save))
            print(f"saved as {args.save}")
    else:
        numbers = count(args.start) if args.seeds is None else range(args.start, args.start + args.seeds)
        total = many(numbers, args.nodes, args.seconds if args.seeds is None else None)
        show(total, time.monotonic() - begun)
    return 1 if total.failed else 0


def big_one(args: argparse.Namespace) -> int:
    """The `big` verb."""
    gc.disable()  # millions of frozen values and hardly a cycle: looking for some costs a sixth of the time
    scenario = big(args.nodes, args.minutes, args.every, args.seed)
    again = f"python -m chaos.run big --nodes {args.nodes} --minutes {args.minutes:g} --every {args.every:g} --seed {args.seed}"
    begun = time.process_time()
    tally = one(scenario, str(args.seed), Path(args.out), again, trace=False)
    spent_s, most_gb = time.process_time() - begun, getrusage(RUSAGE_SELF).ru_maxrss / 1e6
    each_us = 1e6 * spent_s / args.nodes / tally.virtual_s
    print(f"{args.nodes:,} nodes: {spent_s:.0f} s of a processor ({each_us:.0f} us for each node and virtual second), "
          f"{most_gb:.2f} GB")  # fmt: skip
    return 1 if tally.failed else 0


def live(args: argparse.Namespace) -> int:
    """The `live` verb."""
    if args.hosts:
        return elsewhere(args)
    from chaos.faults import ALL
    from chaos.live import box, everywhere
    from chaos.live.play import Play, why_not
    from chaos.live.strikes import left_out

    why = box.missing()
    if why or args.loopback:
        print(f"no namespaces ({why or 'as asked'}): nodes on loopback, without power, cables, disks and cgroups")
    begun = time.monotonic()
    play = Play(Path(args.out), boxes=not why and not args.loopback)
    for kind, lack in left_out(ALL, boxes=True, lacks=play.lacks).items():
        print(f"no {kind}: this machine has {lack}")
    if args.everywhere:
        every = (case for case in everywhere.cases() if not why_not(case, boxes=play.boxes, lacks=play.lacks))
        tour = everywhere.Tour(deque(islice(every, args.sample // 2, None, args.sample)))
        score = play.everywhere(tour, args.minutes)
    elif args.random:
        score = play.random(args.seed, args.minutes or RANDOM_MIN, args.nodes)
    else:
        paths = [Path(path) for path in args.scenarios] or sorted([*LIVE.glob("*.yaml"), *SCENARIOS.glob("*.yaml")])
        score = play.files(load(path) for path in paths)
    score.show(time.monotonic() - begun)
    return 1 if score.failed else 0


def elsewhere(args: argparse.Namespace) -> int:
    """`live --hosts`: on a cluster of one's own."""
    from random import Random

    from chaos.live import hosts
    from chaos.live.play import draw

    cluster = hosts.load(Path(args.hosts))
    tour = hosts.Tour(cluster, say=lambda line: print(line, flush=True), dry=args.dry_run)
    if args.random:
        chance, end = Random(f"hosts {args.seed}"), time.monotonic() + 60.0 * (args.minutes or RANDOM_MIN)
        drawn = (draw(chance, f"seed {args.seed} number {i}", len(cluster.hosts)) for i in count(1))
        fit = (scenario for scenario in drawn if not hosts.why_not(scenario))
        return tour.play(islice(fit, 20) if args.dry_run else takewhile(lambda _: time.monotonic() < end, fit))
    paths = [Path(path) for path in args.scenarios] or sorted([*LIVE.glob("*.yaml"), *SCENARIOS.glob("*.yaml")])
    return tour.play(load(path) for path in paths)


def mutants(args: argparse.Namespace) -> int:
    """The `mutants` verb."""
    from chaos.mutants import table

    return table(budget_s=args.seconds or 600.0, only=args.only)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m chaos.run", description=__doc__)
    verbs = top.add_subparsers(dest="verb", required=True)
    simulate = verbs.add_parser("sim", help="run scenarios or seeds on virtual nodes")
    simulate.add_argument("scenarios", nargs="*", help="scenario files; without any, seeds draw theirs")
    simulate.add_argument("--seeds", type=int, help="so many seeds, over all cores")
    simulate.add_argument("--start", type=int, default=0, help="the first of them")
    simulate.add_argument(
        "--seconds", type=float, default=60.0, help="as many seeds as fit into this time (default 60)"
    )
    simulate.add_argument("--seed", type=int, help="this one seed, with its trace")
    simulate.add_argument("--nodes", type=int, help="so many nodes, whatever the seed or scenario says")
    simulate.add_argument("--save", help="write the seed's scenario to this file")
    simulate.add_argument("--out", default="out/chaos", help="where histories go")
    simulate.add_argument("--quiet", action="store_true", help="no trace")
    simulate.set_defaults(act=sim)
    large = verbs.add_parser("big", help="many nodes for a long time, with a fault every so often")
    large.add_argument("--nodes", type=int, default=4096)
    large.add_argument("--minutes", type=float, default=10.0, help="of virtual time")
    large.add_argument("--every", type=float, default=5.0, help="virtual seconds between faults")
    large.add_argument("--seed", type=int, default=0)
    large.add_argument("--out", default="out/chaos", help="where the history goes")
    large.set_defaults(act=big_one)
    real = verbs.add_parser("live", help="run scenarios or random faults on real nodes")
    real.add_argument("scenarios", nargs="*", help="scenario files; without any, all that make sense on real nodes")
    real.add_argument(
        "--random", action="store_true", help="random faults, one after the other, until the time is over"
    )
    real.add_argument("--seed", type=int, default=0, help="what the random faults are drawn from")
    real.add_argument(
        "--everywhere",
        action="store_true",
        help="the ten worst second faults at each place that a first one's recovery announces",
    )
    real.add_argument("--sample", type=int, default=1, help="with --everywhere: only one case of so many, evenly")
    real.add_argument(
        "--minutes", type=float, help=f"of random faults ({RANDOM_MIN:g}); with --everywhere: so long at most"
    )
    real.add_argument("--nodes", type=int, default=4, help="how many nodes the random faults befall")
    real.add_argument("--hosts", metavar="FILE", help="on these hosts, over ssh, against the job that runs there")
    real.add_argument("--dry-run", action="store_true", help="with --hosts: print what would be done, and do nothing")
    real.add_argument("--loopback", action="store_true", help="without namespaces, even where there could be some")
    real.add_argument("--out", default="out/live", help="where everything about a failure goes")
    real.set_defaults(act=live)
    mutate = verbs.add_parser("mutants", help="break each guard of the core in turn; some check must notice")
    mutate.add_argument("--seconds", type=float, help="give up looking after this time")
    mutate.add_argument("--only", help="only the mutant of this name")
    mutate.set_defaults(act=mutants)
    return top


def main(argv: list[str] | None = None) -> int:
    """Parse, act, and return the exit code."""
    args = parser().parse_args(argv)
    try:
        code: int = args.act(args)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
