"""`python -m chaos.everywhere`: each second fault at every place of a recovery; exit code 1 if a guarantee did not hold.

The one idea: a place is a moment between two events of a run, and a run is its seed, so the events before the second fault are
those of the run without it. Each case is an ordinary scenario with two faults at times, and is saved as one.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Final, Literal

from chaos.case import Violation
from chaos.faults import KINDS, Fault
from chaos.history import Asked, Committed, Left, Planned, Sealed, Struck
from chaos.scenario import Expect, Scenario, save
from chaos.sim.cluster import Cluster, Shape
from chaos.sim.drive import Run
from elasticrl.contract.model import Phase
from elasticrl.contract.settings import Health, Membership, Recovery, Settings, Timeouts

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


def judged(name: str, second: str, place: int) -> list[Violation] | None:
    """What is wrong with one case; None: the fault has nothing to act on at that place."""
    scenario = case(name, second, place)
    run = Run(scenario, SEED)
    last, at = len(scenario.faults) - 1, scenario.faults[-1].at or 0.0

    def struck() -> None:
        if not any(isinstance(fact, Struck) and fact.number == last for fact in run.world.history):
            run.world.halted = True

    run.world.later(at, struck)
    result = run.drive()
    if run.world.halted and not any(isinstance(fact, Struck) and fact.number == last for fact in result.history):
        return None
    if any(isinstance(fact, Asked) and fact.verb == "stop" for fact in result.history) and not _stopped(run):
        return [v for v in result.violations if v.check != "what_was_expected"]
    return result.violations


def _stopped(run: Run) -> bool:
    plan = run.cluster.store.shared.plan
    return plan is not None and plan.phase is Phase.STOP


# ---- all of them


@dataclass(slots=True)
class Tally:
    """What many cases came to."""

    runs: Counter[str] = field(default_factory=Counter)  # by base
    idle: int = 0  # the fault had nothing to act on
    failed: list[tuple[str, str, int, str]] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Those too."""
        self.runs += other.runs
        self.idle += other.idle
        self.failed += other.failed


def cases(bases: Iterable[str], kinds: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """All cases, in an order that is always the same."""
    for name in bases:
        for second in SECONDS:
            if not kinds or SECONDS[second].kind in kinds or second in kinds:
                yield from ((name, second, place) for place in range(len(places(name))))


def batch(some: Sequence[tuple[str, str, int]]) -> Tally:
    """A few cases."""
    tally = Tally()
    for name, second, place in some:
        found = judged(name, second, place)
        if found is None:
            tally.idle += 1
            continue
        tally.runs[name] += 1
        if found:
            tally.failed.append((name, second, place, str(found[0])))
    return tally


def every(wanted: Iterable[tuple[str, str, int]], workers: int) -> Tally:
    """These cases, over this many processes."""
    total, left = Tally(), iter(wanted)
    with ProcessPoolExecutor(workers) as pool:
        batches = iter(lambda: list(islice(left, 40)), [])
        for tally in pool.map(batch, batches):
            total.add(tally)
            for name, second, place, what in tally.failed:
                print(f"VIOLATION  python -m chaos.everywhere --one {name} {second} {place}  {what}", flush=True)
    return total


def show(total: Tally, seconds_s: float) -> None:
    """The counts, and how to repeat what failed."""
    kinds = Counter((name, second) for name, second, _, _ in total.failed)
    for name in total.runs:
        failed = sum(n for (base, _), n in kinds.items() if base == name)
        print(
            f"{name:<14}{BASES[name].does:<56}{len(places(name)):>5} places{total.runs[name]:>8} runs{failed:>6} violations"
        )
    for (name, second), failed in sorted(kinds.items()):
        print(f"violated: {name} x {second} at {failed} places")
    print(
        f"{total.runs.total()} runs of {len(total.runs)} bases and {len(SECONDS)} second faults, {total.idle} places with "
        f"nothing to act on, {seconds_s:.0f} s: {len(total.failed) or 'no'} violation{'s' * (len(total.failed) != 1)}"
    )


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
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.one:
        return one(args.one[0], args.one[1], int(args.one[2]), args.save)
    begun = time.monotonic()
    chosen = islice(cases(args.base or BASES, args.fault), args.sample // 2, None, args.sample)
    total = every(chosen, args.workers)
    show(total, time.monotonic() - begun)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
