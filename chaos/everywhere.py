"""`python -m chaos.everywhere`: each second fault at every place of a recovery; exit code 1 if a guarantee did not hold.

The one idea: a place is a moment between two events of a run, and a run is its seed, so the events before the second fault are
those of the run without it. So all cases of a place share one run up to there, and each goes on from a copy of it. Each case is
an ordinary scenario with two faults at times, and is saved as one.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import islice, pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from chaos.faults import KINDS, Fault
from chaos.history import Asked, Committed, Left, Planned, Sealed, Struck
from chaos.scenario import Expect, Scenario, save
from chaos.sim.cluster import Cluster, Shape
from chaos.sim.drive import Result, Run
from chaos.sim.twin import twin
from elasticrl.contract.model import Phase
from elasticrl.contract.settings import Health, Membership, Recovery, Settings, Timeouts

ROOT: Final = Path(__file__).parent.parent
NODES: Final = ("n00", "n01", "n02")
FIRST_S = 6.0  # when the first fault strikes: all train
SEED = "0"


def _settings(*, least: int) -> Settings:
    """Short deadlines, so that a recovery is short, and everything that can happen does."""
    return Settings(
        lanes=6,
        retry_s=0.5,
        membership=Membership(min_nodes=least, lease_ttl_s=3.0, keepalive_s=1.0, report_s=2.0, settle_s=0.3),
        recovery=Recovery(
            start_s=8.0, reform_s=4.0, replace_s=6.0, restart_s=10.0, reload_s=15.0, probe_s=3.0, drain_s=5.0
        ),
        health=Health(quarantine_s=4.0, quarantine_max_s=8.0),
        timeouts=Timeouts(default_phase_s=3.0, floor_s=1.0, slack=5.0, confirm_s=0.5, dump_s=1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A first fault, on three nodes, and what has to be so for its recovery to be over.

    `until`: a step is sealed after the last plan (`sealed`), a save has been committed, and one from its beginning
    (`committed`), or all have left (`over`).
    """

    does: str
    fault: Fault | None
    least: int = 2  # nodes that the job needs
    late: int = 0
    until: str = "sealed"

    @property
    def scenario(self) -> Scenario:
        """The run with the first fault alone."""
        shape = Shape(
            nodes=len(NODES), late=self.late, settings=_settings(least=self.least), save_every=4, save_s=0.6,
            warm_s=(0.5, 0.8), agent_s=1.0,
        )  # fmt: skip
        faults = (self.fault,) if self.fault else ()
        return Scenario(seed=SEED, shape=shape, faults=faults, trouble_s=FIRST_S + 12.0, liveness_s=90.0)


def _first(kind: str, node: str = "n01", **more: object) -> Fault:
    return Fault(kind=kind, node=node, at=FIRST_S, **more)  # type: ignore[arg-type]


BASES: Final[dict[str, Base]] = {
    "worker": Base(does="a worker is killed", fault=_first("kill_worker")),
    "node": Base(does="a node is killed, and comes back", fault=_first("kill_node", for_s=1.5)),
    "needed": Base(does="a node is killed that the job needs, and comes back", fault=_first("kill_node", for_s=1.5), least=3),
    "leader": Base(does="the leader's node is killed, and comes back", fault=_first("kill_node", "leader", for_s=1.5)),
    "stall": Base(does="a worker stands still", fault=_first("hang_worker")),
    "stop": Base(does="the job is stopped", fault=_first("stop"), until="over"),
    "drain": Base(does="a node is drained that can be spared", fault=_first("drain")),
    "drain-needed": Base(does="a node is drained that cannot be spared", fault=_first("drain"), least=3),
    "join": Base(does="a node joins", fault=_first("join_node", "n02"), late=1),
    "save": Base(does="a checkpoint is saved", fault=None, until="committed"),
    "pause": Base(does="the job is paused and goes on", fault=_first("pause", for_s=1.5)),
    "probe": Base(
        does="two nodes lose their data path for a while: a probe",
        fault=_first("cut_link", "n00", peer="n01", scope="data", for_s=5.0),
    ),
}  # fmt: skip

#: What changes nothing in the simulator, is only the opposite of another, or needs what the cases have not: probes of
#: every way (`shape.deep`), a script, a server; or that is found out only when all are looked at.
LEFT_OUT: Final = (
    "clock_step",
    "admit",
    "crash_loop",
    "ask_drain",
    "nccl_breaks",
    "late_ways",
    "start_again",
    "stray_worker",
    "part_ways",
    "quiet_log",
    "wait_outside",
    "reset_links",
    "disk_line",
    "versions_line",
)
#: How long a second fault lasts, and how strong it is, where its own least would say nothing.
LASTS_S: Final = {
    "stop_worker": 2.0, "slow_worker": 3.0, "sick_node": 5.0, "store_outage": 4.0, "power_cut": 2.0, "clock_rate": 5.0,
}  # fmt: skip
VALUE: Final = {
    "slow_worker": 3.0, "lossy_node": 0.6, "store_loss": 0.4, "store_delay": 0.8, "store_repeat": 1.5, "stale_view": 1.5,
    "late_commit": 2.0, "late_plan": 1.0, "clock_rate": 1.05, "slow_disk": 4.0,
}  # fmt: skip
WAYS: Final[tuple[Literal["both", "in"], ...]] = ("both", "in")
#: Second faults that leave workers, vaults and disks alone, and the store in reach before long: a stop ends with all saved.
HARMLESS: Final = (
    "kill_daemon", "pause_daemon", "lose_lease", "stale_view", "lost_publishes", "store_failover", "store_compaction",
    "store_delay", "store_repeat", "late_plan", "late_commit", "clock_rate", "drain", "stop", "pause", "slow_disk",
)  # fmt: skip


def seconds() -> Iterator[Fault]:
    """Every second fault: each kind, on each node (or pair of nodes) that it may befall."""
    for kind, known in KINDS.items():
        if kind in LEFT_OUT:
            continue
        for_s = LASTS_S.get(kind, min(max(known.for_s[0], 1.0), known.for_s[1])) if known.for_s else None
        fault = Fault(kind=kind, at=0.0, for_s=for_s, value=VALUE.get(kind, 0.0))
        if kind == "cut_link":
            yield from (replace(fault, node=a, peer=b) for a, b in (*pairwise(NODES), (NODES[-1], NODES[0])))
        elif kind == "cut_store":
            yield from (replace(fault, node=node, way=way) for node in NODES for way in WAYS)
        elif known.reach == "node" or kind in ("drain", "join_node"):
            yield from (replace(fault, node=node) for node in NODES)
        else:
            yield fault


def named(fault: Fault) -> str:
    """A second fault in one word. Example: "cut_store:n01:in"."""
    return ":".join(filter(None, (fault.kind, fault.node, fault.peer, fault.way if fault.way != "both" else "")))


SECONDS: Final = {named(fault): fault for fault in seconds()}


# ---- places


def mark(cluster: Cluster) -> tuple[object, ...]:
    """What a second fault may meet: while it is the same, one moment is as good as another."""
    gang = cluster.running
    nodes = (
        (
            node.life, node.agent_life, node.work, node.generation, node.phase, node.saved, node.step, node.warm, node.lease,
            node.stall, node.next_plan is None, node.request, len(node.running), node.state and _known(node.state),
        )
        for node in cluster.nodes.values()
    )  # fmt: skip
    trains = gang and (gang.plan.generation, gang.phase, gang.broken, gang.running)
    return (cluster.store.revision, len(cluster.world.history), trains, len(cluster.disk.active), *nodes)


def _known(state: object) -> tuple[object, ...]:
    names = ("suspects", "leaving", "stalled_at", "vacant_since", "met", "lost_since", "probed")
    return (*(getattr(state, name) for name in names), state.view.revision, state.lead is None)  # type: ignore[attr-defined]


@cache
def places(name: str) -> tuple[float, ...]:
    """The moments of a base's recovery, one after each event of it that changed anything."""
    base = BASES[name]
    run = Run(base.scenario, SEED)
    world, cluster = run.world, run.cluster
    cluster.start()
    world.run(FIRST_S - 1e-6)
    found: list[float] = []
    before = mark(cluster)
    while world.due() <= base.scenario.trouble_s:
        at = world.due()
        world.run(at)
        after = mark(cluster)
        if after != before and (free := world.due()) > at:
            middle = (at + free) / 2
            short = round(middle, 6)
            found.append(short if at < short < free else middle)
        before = after
    end = _over(base, run)
    return tuple(at for at in found if FIRST_S <= at <= end)


def _over(base: Base, run: Run) -> float:
    history = run.world.history
    if base.until == "over":
        return max(fact.at for fact in history if isinstance(fact, Left)) + 0.1
    if base.until == "committed":
        return [fact.at for fact in history if isinstance(fact, Committed) and fact.at > FIRST_S][1] + 0.1
    last = max(fact.at for fact in history if isinstance(fact, Planned | Struck | Left))
    return next((fact.at for fact in history if isinstance(fact, Sealed) and fact.at > last), last) + 0.1


# ---- one case


def case(name: str, second: str, place: int) -> Scenario:
    """The scenario of one case."""
    base, fault, at = BASES[name], SECONDS[second], places(name)[place]
    plain = base.scenario
    stops = "stop" in (base.fault.kind if base.fault else "", fault.kind)
    saved = stops and fault.kind in HARMLESS and (base.fault is None or base.fault.kind in HARMLESS)
    return replace(
        plain,
        name=f"{name}-{second}-{place}".replace(":", "-"),
        about=f"{base.does}; {KINDS[fault.kind].does} {fault.node} {fault.peer}".strip(),
        faults=(*plain.faults, replace(fault, at=at)),
        trouble_s=max(FIRST_S + 6.0, at + (fault.for_s or 0.0) + 0.5),
        expect=Expect(ends_saved=saved),
    )


def begun(name: str, place: int) -> Run:
    """A base's run, as it is at a place: what all cases of that place have in common."""
    run = Run(BASES[name].scenario, SEED)
    run.cluster.start()
    run.world.run(places(name)[place])
    return run


def result(run: Run) -> Result | None:
    """The rest of a case that has not come to its second fault; None: that one has nothing to act on there."""
    last = len(run.scenario.faults) - 1
    run.world.run(run.scenario.faults[last].at or 0.0)
    if not any(isinstance(fact, Struck) and fact.number == last for fact in run.world.history):
        return None
    return run.go_on()


def verdict(run: Run) -> list[str] | None:
    """What is wrong with a case that has not come to its second fault; None: that one has nothing to act on there."""
    found = result(run)
    if found is None:
        return None
    stopped = not _stopped(run) and any(isinstance(fact, Asked) and fact.verb == "stop" for fact in found.history)
    return [str(each) for each in found.violations if not (stopped and each.check == "what_was_expected")]


def judged(name: str, second: str, place: int) -> list[str] | None:
    """The verdict of one case that is run from its beginning."""
    run = Run(case(name, second, place), SEED)
    run.cluster.start()
    return verdict(run)


def _stopped(run: Run) -> bool:
    plan = run.cluster.store.shared.plan
    return plan is not None and plan.phase is Phase.STOP


# ---- all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Cases that have a place in common. Example: Unit(base="stop", place=17, seconds=("lose_lease:n00", "stop"))"""

    base: str
    place: int
    seconds: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """Where it is."""
        return self.base, self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What a unit's cases came to: one line of a file of results."""

    base: str
    place: int
    code: str  # a digest of the sources that it was run with
    idle: int  # cases in which the fault had nothing to act on
    ran: int
    failed: tuple[tuple[str, str], ...]  # second faults, and their first violation
    spent_s: float  # of a processor


def cases(bases: Iterable[str], kinds: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """All cases, in an order that is always the same."""
    for name in bases:
        for second in SECONDS:
            if not kinds or SECONDS[second].kind in kinds or second in kinds:
                yield from ((name, second, place) for place in range(len(places(name))))


def units(some: Iterable[tuple[str, str, int]]) -> list[Unit]:
    """These cases by place, shuffled, but always alike: any share of them is an even sample."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, second, place in some:
        found.setdefault((name, place), []).append(second)
    every = [Unit(base=name, place=place, seconds=tuple(seconds)) for (name, place), seconds in found.items()]
    Random("everywhere").shuffle(every)
    return every


def cover(unit: Unit) -> Covered:
    """All cases of a unit."""
    before, idle, failed = time.process_time(), 0, []
    shared = begun(unit.base, unit.place)
    for second in unit.seconds:
        run = twin(shared)
        run.become(case(unit.base, second, unit.place))
        try:
            found = verdict(run)
        except Exception:  # noqa: BLE001 - one case that crashes is a finding, and the others go on
            found = [traceback.format_exc()]
        idle += found is None
        failed += [(second, found[0])] if found else []
    return Covered(
        base=unit.base, place=unit.place, code=code(), idle=idle, ran=len(unit.seconds) - idle, failed=tuple(failed),
        spent_s=round(time.process_time() - before, 3),
    )  # fmt: skip


@cache
def code() -> str:
    """A digest of all that a case depends on."""
    files = sorted(path for folder in ("chaos", "elasticrl") for path in (ROOT / folder).rglob("*.py"))
    return blake2b(b"".join(path.read_bytes() for path in files), digest_size=4).hexdigest()


def every(wanted: Iterable[Unit], workers: int, minutes: float | None = None) -> Iterator[Covered]:
    """These units over this many processes, as they get done; with `minutes`, those that fit into the time."""
    left, end = iter(wanted), time.monotonic() + 60.0 * minutes if minutes is not None else inf
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(cover, unit) for unit in islice(left, 2 * workers)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
            if time.monotonic() < end:
                pending |= {pool.submit(cover, unit) for unit in islice(left, len(done))}


def load(path: Path) -> dict[tuple[str, int], Covered]:
    """A file of results: the newest of each place."""
    rows = filter(None, map(_row, path.read_text().splitlines() if path.exists() else ()))
    found = (Covered(**row | {"failed": tuple((second, what) for second, what in row["failed"])}) for row in rows)
    return {(each.base, each.place): each for each in found}


def _row(line: str) -> dict[str, Any] | None:
    """A line of results; None of one that whoever was killed had half written."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row


def _failed_once(each: Covered) -> bool:
    """Did it fail with other sources? Then these are tried."""
    return bool(each.failed) and each.code != code()


def show(found: Sequence[Covered], asked: int) -> None:
    """The counts of what was covered, and what failed. `asked`: how many places there were to cover."""
    for name in dict.fromkeys(each.base for each in found):
        some = [each for each in found if each.base == name]
        failed, ran = sum(len(each.failed) for each in some), sum(each.ran for each in some)
        print(
            f"{name:<14}{BASES[name].does:<56}{len(some):>5} of {len(places(name))} places{ran:>8} runs{failed:>6} violations"
        )
    kinds = Counter((each.base, second) for each in found for second, _ in each.failed)
    for (name, second), failed in sorted(kinds.items()):
        print(f"violated: {name} x {second} at {failed} places")
    ran, idle, spent_s = (sum(getattr(each, name) for each in found) for name in ("ran", "idle", "spent_s"))
    other = sum(each.code != code() for each in found)
    print(
        f"{len(found)} of {asked} places covered: {ran} runs, and {idle} cases whose second fault had nothing to act on; "
        f"{spent_s:.0f} s of a processor, {1e3 * spent_s / max(ran, 1):.0f} ms a run"
        + (f"; {other} of these places with other sources than today's" if other else "")
    )
    print(f"{kinds.total() or 'no'} violation{'s' * (kinds.total() != 1)}")


def one(name: str, second: str, place: int, to: str | None) -> int:
    """One case, and its scenario as a file."""
    found = judged(name, second, place)
    if found is None:
        print("the fault has nothing to act on at that place")
    for violation in found or ():
        print(f"VIOLATION  {violation}")
    path = Path(to or f"out/chaos/everywhere-{name}-{second.replace(':', '-')}-{place}.yaml")
    save(case(name, second, place), path)
    print(f"{len(found or ())} violations; saved as {path}: python -m chaos.run sim --seed {SEED} {path}")
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """Parse, act, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.everywhere", description=__doc__)
    parser.add_argument("--base", action="append", default=[], choices=sorted(BASES), help="only this first fault")
    parser.add_argument("--fault", action="append", default=[], help="only this second fault, or kind of them")
    parser.add_argument("--sample", type=int, default=1, help="only one case of so many, evenly")
    parser.add_argument("--one", nargs=3, metavar=("BASE", "FAULT", "PLACE"), help="one case")
    parser.add_argument("--save", help="with --one: where its scenario goes")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the Kth of N parts that together are all")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--to", type=Path, metavar="FILE", help="add results to this file, and leave out what is in it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.one:
        return one(args.one[0], args.one[1], int(args.one[2]), args.save)
    if args.to and (args.fault or args.sample > 1):
        parser.error("--to keeps whole places: it goes with --base and --part, and without --fault and --sample")
    part, parts = map(int, args.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--part {args.part}: there is no such part; the first of {max(parts, 1)} is 1/{max(parts, 1)}")
    asked = units(islice(cases(args.base or BASES, args.fault), args.sample // 2, None, args.sample))[part - 1 :: parts]
    known = load(args.to) if args.to else {}
    found = {unit.key: known[unit.key] for unit in asked if unit.key in known}
    new = [unit for unit in asked if unit.key not in found or _failed_once(found[unit.key])]
    if args.to and args.to.exists() and not args.to.read_text().endswith("\n"):
        with args.to.open("a") as file:
            print(file=file)  # what was half written stays a line of its own
    for each in every(new, args.workers, args.minutes):
        found[each.base, each.place] = each
        for second, what in each.failed:
            print(f"VIOLATION  python -m chaos.everywhere --one {each.base} {second} {each.place}  {what}", flush=True)
        if args.to:
            with args.to.open("a") as file:
                print(json.dumps(asdict(each)), file=file)
    show(list(found.values()), len(asked))
    return 1 if any(each.failed for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
