"""`python -m chaos.spans`: faults that end just as something comes of them; exit code 1 if a guarantee did not hold.

The one idea: what a fault comes to depends on which deadline it outlasts. So it is put in for good first, and what comes of it
(a lease ends, a node is suspected, a plan is written) says when its deadlines are. Then it ends some milliseconds before or
after one of these moments, or after a time of the settings, beside a nuisance that makes news late. A case is its number: it is
an ordinary scenario, and is saved as one.

Found on a real systemd: a daemon that was back just as its lease ended took itself for lost. No seed had drawn that length.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count, islice, takewhile
from pathlib import Path
from random import Random
from typing import Final

from chaos.faults import KINDS, Fault
from chaos.history import Began, Confined, Died, Elected, Expired, History, Inspected, Left, Planned, Suspicion
from chaos.scenario import Scenario, save
from chaos.sim.cluster import Shape
from chaos.sim.drive import run
from elasticrl.contract.settings import Health, Membership, Recovery, Settings, Timeouts
from elasticrl.core.lead.scene import BACK_TTLS

STEADY_S: Final = 12.0  # from then on all train, whatever was drawn
FOR_GOOD_S: Final = 25.0  # so long one is watched that does not end
AFTER_S: Final = 12.0  # of trouble, after the fault is over: what follows from it shows
ANSWER_S: Final = 1.5  # a request to the store, its deadline, and the next one
EACH: Final = 16  # cases of one fault in one world
BATCH: Final = 2 * EACH
#: What comes of a fault, and may be what the next one meets.
SHOWS: Final = (Began, Confined, Died, Elected, Expired, Inspected, Left, Planned, Suspicion)

#: What lasts and needs no shape of its own. (`join_node`, probes of every way and scripts are not drawn here.)
LEFT_OUT: Final = ("late_ways", "wait_outside", "quiet_log", "nccl_breaks")
LASTING: Final = tuple(kind for kind, known in KINDS.items() if known.for_s and kind not in LEFT_OUT)
#: What has no length: twice, as far apart as one.
TWICE: Final = ("lose_lease", "store_failover", "store_compaction", "kill_daemon", "kill_worker")
#: What befalls a daemon, its clock or its way to the store, while its workers train on.
OF_A_DAEMON: Final = ("kill_daemon", "pause_daemon", "cut_store", "stale_view", "lost_publishes")
NUISANCES: Final = ("", "", "store_delay", "store_delay", "store_loss", "store_repeat", "lossy_node", "lose_lease")


def deadlines(settings: Settings) -> dict[str, float]:
    """Every length of time that the core compares something with, by the name of its setting."""
    membership, recovery, health, timeouts = settings.membership, settings.recovery, settings.health, settings.timeouts
    return {
        "lease": membership.lease_ttl_s,
        "keepalive": membership.keepalive_s,
        "lease less keepalive": membership.lease_ttl_s - membership.keepalive_s,
        "lease and readmission": membership.lease_ttl_s + 1.0,
        "back without a lease": BACK_TTLS * membership.lease_ttl_s,
        "rejoin": membership.rejoin_s,
        "settle": membership.settle_s,
        "suspect": membership.suspect_s,
        "report": membership.report_s,
        "retry": settings.retry_s,
        "confirm": timeouts.confirm_s,
        "phase": timeouts.floor_s,
        "dump": timeouts.dump_s,
        "quarantine": health.quarantine_s,
        **{
            name: getattr(recovery, f"{name}_s")
            for name in ("start", "reform", "replace", "restart", "reload", "probe", "drain")
        },
    }


def _settings(chance: Random, nodes: int) -> Settings:
    ttl_s = chance.choice((2.0, 3.0, 5.0))
    least = chance.choice((1, max(1, nodes - 1), nodes))
    return Settings(
        lanes=chance.choice((4, 12)),
        retry_s=chance.choice((0.3, 0.5, 1.0)),
        copies=min(1, least - 1),
        membership=Membership(
            min_nodes=least,
            lease_ttl_s=ttl_s,
            keepalive_s=ttl_s * chance.choice((0.25, 0.3, 0.33)),
            report_s=chance.choice((0.5, 2.0)),
            settle_s=chance.choice((0.3, 1.0)),
            rejoin_s=chance.choice((0.0, 2.0)),
            deputies=chance.choice((0, 2)),
        ),
        recovery=Recovery(
            start_s=8.0, reform_s=chance.choice((2.0, 4.0)), replace_s=chance.choice((4.0, 6.0)), restart_s=8.0,
            reload_s=chance.choice((10.0, 15.0)), probe_s=chance.choice((2.0, 3.0)), drain_s=chance.choice((3.0, 5.0)),
        ),
        health=Health(quarantine_s=4.0, quarantine_max_s=8.0),
        timeouts=Timeouts(default_phase_s=3.0, floor_s=1.0, slack=5.0, confirm_s=0.5, dump_s=1.0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One case: its scenario, which deadline its first fault lasts about as long as, and what befalls it beside that."""

    scenario: Scenario
    deadline: str
    nuisance: str

    @property
    def first(self) -> Fault:
        """The fault whose length is what is tried."""
        return self.scenario.faults[0]

    @property
    def title(self) -> str:
        """Example: "kill_daemon x lease, store_delay"."""
        return f"{self.first.kind} x {self.deadline}" + (f", {self.nuisance}" if self.nuisance else "")

    @property
    def costs_nothing(self) -> bool:
        """Is it a fault of a daemon alone that is over before its lease may end, and that no two others can take for a death?

        A lone node's daemon may be away for as long as it likes: there is nobody who could go on without it.
        """
        shape, fault, for_s = self.scenario.shape, self.first, self.first.for_s
        if fault.kind not in OF_A_DAEMON or for_s is None or self.nuisance not in {"", "store_delay"}:
            return False
        membership = shape.settings.membership
        unheard = fault.kind in {"kill_daemon", "pause_daemon"}
        if unheard and shape.nodes > 2 and not (shape.vault_goes and fault.kind == "kill_daemon"):
            return for_s < membership.suspect_s - membership.beat_s
        if shape.nodes == 1 and unheard:
            return True
        late_s = max((other.value for other in self.scenario.faults[1:]), default=0.0) + shape.apart_s
        return for_s + late_s < membership.lease_ttl_s - membership.keepalive_s - ANSWER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What many cases have in common: nodes, settings, and one fault that lasts for good, or strikes once."""

    seed: str
    shape: Shape
    fault: Fault

    def scenario(self, faults: tuple[Fault, ...], until: float) -> Scenario:
        """A run in it. All have one seed: up to the end of the fault they are the run in which it does not end."""
        return Scenario(seed=self.seed, shape=self.shape, faults=faults, trouble_s=until, all_must_strike=False)


def world(number: int) -> World:
    """The world of a number."""
    chance = Random(f"span's world {number}")
    nodes = chance.choice((1, 1, 2, 2, 3, 4))
    settings = _settings(chance, nodes)
    names = [f"n{i:02d}" for i in range(nodes)]
    shape = Shape(
        nodes=nodes,
        settings=settings,
        save_every=chance.choice((2, 5)),
        step_s=chance.choice((0.25, 0.5)),
        warm_s=(0.5, 0.8),
        agent_s=chance.choice((0.5, 2.0)),
        apart_s=chance.choice((0.0, 0.05, 0.8)),
        vault_goes=chance.random() < 0.3,
    )
    kind = chance.choice(LASTING + TWICE if chance.random() < 0.5 else OF_A_DAEMON)
    once = 0.3 if KINDS[kind].for_s and kind in TWICE and chance.random() < 0.3 else None
    fault = Fault(
        kind=kind,
        at=round(STEADY_S + 2 * settings.membership.lease_ttl_s * chance.random(), 3),
        for_s=once,
        node=chance.choice((*names, "leader")),
        peer=chance.choice(names),
        value=round(chance.uniform(*KINDS[kind].value), 3),
        way=chance.choice(("both", "both", "in", "out")),
        scope=chance.choice(("all", "all", "beat", "data")),
    )
    return World(seed=str(number), shape=shape, fault=fault)


@lru_cache(maxsize=4)
def moments(number: int) -> dict[str, tuple[float, ...]]:
    """When something comes of a world's fault that lasts for good, by what that is."""
    here = world(number)
    begun = here.fault.at or 0.0
    history = run(here.scenario((here.fault,), begun + FOR_GOOD_S), here.seed).history
    found: dict[str, list[float]] = {}
    for fact in history:
        if isinstance(fact, SHOWS) and begun < fact.at < begun + FOR_GOOD_S:
            found.setdefault(type(fact).__name__.lower(), []).append(fact.at - begun)
    return {name: tuple(times) for name, times in found.items()}


def case(number: int) -> Span:
    """The case of a number."""
    chance, here = Random(f"spans {number}"), world(number // EACH)
    known, set_to = moments(number // EACH), deadlines(here.shape.settings)
    if known and chance.random() < 0.75:
        deadline = chance.choice(sorted(known))
        length = chance.choice(known[deadline])
    else:
        deadline = chance.choice(sorted(set_to))
        length = set_to[deadline]
    off = chance.choice((-1, 1)) * 10 ** chance.uniform(-3, -0.3)
    for_s, at = round(max(0.02, length + off), 3), here.fault.at or 0.0
    faults: tuple[Fault, ...] = (replace(here.fault, for_s=for_s),)
    if here.fault.for_s is not None or not KINDS[here.fault.kind].for_s:  # it strikes twice
        faults = (here.fault, replace(here.fault, at=round(at + for_s, 3)))
    nuisance = chance.choice(NUISANCES)
    other = _nuisance(chance, nuisance, [f"n{i:02d}" for i in range(here.shape.nodes)], at + for_s)
    scenario = replace(here.scenario((*faults, *other), at + for_s + AFTER_S), name=f"span-{number}")
    return Span(scenario=scenario, deadline=deadline, nuisance=nuisance)


def _nuisance(chance: Random, kind: str, names: list[str], ends: float) -> tuple[Fault, ...]:
    """What goes on as the first fault ends."""
    if not kind:
        return ()
    before_s = 10 ** chance.uniform(-3, 0.3)
    value = {"store_delay": (0.02, 0.8), "store_loss": (0.1, 0.5), "lossy_node": (0.2, 0.6)}.get(kind, (0.2, 1.5))
    for_s = 2.0 if KINDS[kind].for_s else None
    at, much = round(ends - before_s, 3), round(chance.uniform(*value), 3)
    return (Fault(kind=kind, at=at, node=chance.choice(names), for_s=for_s, value=much),)


def cost(history: History, since: float) -> Planned | None:
    """The first plan from then on."""
    return next((fact for fact in history if isinstance(fact, Planned) and fact.at >= since), None)


def judged(number: int) -> list[str]:
    """What is wrong with a case."""
    span = case(number)
    try:
        result = run(span.scenario, span.scenario.seed)
    except Exception:  # noqa: BLE001 - one case that crashes is a finding, and the others go on
        return [traceback.format_exc()]
    found = [str(violation) for violation in result.violations]
    if span.costs_nothing and (plan := cost(result.history, span.first.at or 0.0)):
        what = f"generation {plan.plan.generation} ({plan.plan.reason}), though only a daemon was away, for less than its lease"
        found.append(f"{plan.at:.3f} s  a_daemon_costs_no_generation: {what}")
    return found


def _batch(numbers: tuple[int, ...]) -> list[tuple[int, list[str]]]:
    return [(number, judged(number)) for number in numbers]


def every(numbers: Iterable[int], workers: int) -> Iterator[tuple[int, list[str]]]:
    """These cases, each with what is wrong with it, over this many processes."""
    left = iter(numbers)
    batches = iter(lambda: tuple(islice(left, BATCH)), ())
    if workers == 1:
        yield from chain.from_iterable(map(_batch, batches))
        return
    with ProcessPoolExecutor(workers) as pool:
        pending = [pool.submit(_batch, batch) for batch in islice(batches, 2 * workers)]
        while pending:
            yield from pending.pop(0).result()
            pending += [pool.submit(_batch, batch) for batch in islice(batches, 1)]


def one(number: int, to: str | None) -> int:
    """One case, and its scenario as a file."""
    span, found = case(number), judged(number)
    for violation in found:
        print(f"VIOLATION  {violation}")
    path = Path(to or f"out/chaos/span-{number}.yaml")
    save(span.scenario, path)
    print(f"{span.title}: {len(found)} violations; saved as {path}: python -m chaos.run sim {path}")
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    """Parse, act, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.spans", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin nothing new after so long")
    parser.add_argument("--cases", type=int, help="so many cases, whatever time they take")
    parser.add_argument("--start", type=int, default=0, help="the first case's number")
    parser.add_argument("--one", type=int, metavar="NUMBER", help="one case")
    parser.add_argument("--save", help="with --one: where its scenario goes")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    if args.one is not None:
        return one(args.one, args.save)
    end = time.monotonic() + 60.0 * args.minutes
    in_time = takewhile(lambda _: time.monotonic() < end, count(args.start))
    numbers = in_time if args.cases is None else range(args.start, args.start + args.cases)
    begun, ran, failed, free = time.monotonic(), Counter[str](), 0, 0
    for number, found in every(numbers, args.workers):
        span = case(number)
        ran[span.first.kind] += 1
        free += span.costs_nothing
        failed += bool(found)
        if found:
            print(f"VIOLATION  python -m chaos.spans --one {number}  {span.title}: {found[0]}", flush=True)
    took_s = time.monotonic() - begun
    print(f"{ran.total()} cases of {len(ran)} faults, {free} of which may cost no generation, {took_s:.0f} s")
    print(f"{failed or 'no'} violation{'s' * (failed != 1)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
