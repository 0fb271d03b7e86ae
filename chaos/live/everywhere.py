"""The ten worst second faults, at every place that a recovery announces, on real nodes (`chaos.run live --everywhere`).

The one idea: the job itself says where it is (a worker in a reform, a plan, a checkpoint's folder), so each case is an ordinary
scenario of two faults, the second of which waits for a place. A case counts if both struck, in that order.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from chaos.case import Violation
from chaos.faults import IN_A_REFORM, Fault
from chaos.live.drive import Outcome
from chaos.scenario import Scenario
from chaos.sim.cluster import Shape
from elasticrl.contract.settings import Health, Membership, Recovery, Settings

NODES: Final = 3
#: Many cases share a job, and none of them may count against the next.
SETTINGS: Final = Settings(
    lanes=12,
    copies=1,
    membership=Membership(min_nodes=2),
    recovery=Recovery(no_progress_limit=30),
    health=Health(node_strikes=30),
)
REFORMS: Final = ("reform", "forming")
SAVES: Final = ("saving", "published", "committing")
TRIES: Final = 3  # a place that is over within milliseconds, or that came before the first fault, is waited for again
Result = Literal["passed", "missed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A first fault, and the places that its recovery announces. `nth`: which plan from the beginning on is the one meant.

    `stands`: the node whose worker stands still at a stage of a reform, and takes the blow there.
    """

    does: str
    fault: Fault | None
    places: tuple[str, ...]
    nth: int = 1
    stands: str = ""


def _first(kind: str, node: str = "n1", **more: object) -> Fault:
    return Fault(kind=kind, node=node, at=0.0, **more)  # type: ignore[arg-type] # as a Fault's fields are


BASES: Final[dict[str, Base]] = {
    "worker": Base(does="a worker is killed", fault=_first("kill_worker"), places=(*REFORMS, *IN_A_REFORM), stands="n0"),
    "node": Base(
        does="a node loses its power", fault=_first("power_cut", for_s=5.0), places=(*REFORMS, *IN_A_REFORM), stands="n0"
    ),
    "leader": Base(
        does="the leader's node loses its power", fault=_first("power_cut", "leader", for_s=5.0), places=("elected", *REFORMS)
    ),
    "drain": Base(
        does="a node is drained, and comes back later", fault=_first("drain_and_back", for_s=6.0),
        places=(*REFORMS, *IN_A_REFORM), stands="n0",
    ),
    "join": Base(
        does="a node comes back", fault=_first("drain_and_back", for_s=0.5), places=(*REFORMS, *IN_A_REFORM), nth=2, stands="n1"
    ),
    "probe": Base(
        does="two nodes do not reach each other for a while: a probe",
        fault=_first("cut_link", "n0", peer="n1", for_s=6.0), places=("probing", "forming"),
    ),
    "save": Base(does="a checkpoint is saved", fault=None, places=(*SAVES, "copying")),
    "stop": Base(does="the job is stopped", fault=_first("stop", ""), places=SAVES),
}  # fmt: skip

#: The second faults: whatever takes away a part that a recovery needs. `node` is whom it is for where no worker stands still.
WORST: Final = (
    Fault(kind="kill_worker", node="rank 0"),
    Fault(kind="stop_worker", node="last rank", for_s=4.0),
    Fault(kind="kill_agent", node="last rank"),
    Fault(kind="kill_daemon", node="leader", for_s=2.0),
    Fault(kind="lose_vault", node="rank 0"),
    Fault(kind="pause_node", node="leader", for_s=4.0),
    Fault(kind="power_cut", node="leader", for_s=5.0),
    Fault(kind="link_down", node="rank 0", for_s=4.0),
    Fault(kind="store_outage", for_s=4.0),
    Fault(kind="disk_full", for_s=4.0),
)


def cases(bases: tuple[str, ...] = tuple(BASES)) -> Iterator[Scenario]:
    """Every case, in an order that is always the same: what ends its job comes last."""
    for name in bases:
        for place in BASES[name].places:
            yield from (case(name, second, place) for second in WORST)


def case(name: str, second: Fault, place: str) -> Scenario:
    """One of them."""
    base, stage = BASES[name], place in IN_A_REFORM
    fault = replace(second, when=place, nth=1 if stage else base.nth, node=base.stands if stage else second.node)
    return Scenario(
        name=f"{name}-{second.kind}-{place}".replace(" ", "-"),
        about=f"{base.does}; {second.kind} at {place!r}",
        shape=Shape(nodes=NODES, settings=SETTINGS),
        faults=(base.fault, fault) if base.fault else (fault,),
    )


def missed(violation: Violation) -> bool:
    """Does it only say that a fault found nothing to act on?"""
    return violation.check in ("every_fault_struck", "every_fault_proved")


def wrong(outcome: Outcome) -> list[Violation]:
    """What a case found: a place that did not come is no fault of the job's, and no proof of anything."""
    return [violation for violation in outcome.violations if not missed(violation)]


def result(outcome: Outcome) -> Result:
    """What a case counts as: it has to have struck with all that it has, the first fault first."""
    if wrong(outcome):
        return "failed"
    whole = outcome.struck == [fault.kind for fault in outcome.scenario.faults]
    return "passed" if whole and not outcome.violations else "missed"


@dataclass(slots=True)
class Tour:
    """The cases that are left, and what became of those that were played."""

    left: deque[Scenario]
    results: dict[str, Counter[Result]] = field(default_factory=dict)  # by base
    tries: Counter[str] = field(default_factory=Counter)
    idle: list[str] = field(default_factory=list)  # which did not strike

    def heard(self, outcome: Outcome) -> list[Violation]:
        """One more; what is wrong with it."""
        name, found = outcome.scenario.name, result(outcome)
        self.tries[name] += 1
        if found == "missed" and self.tries[name] < TRIES:
            self.left.append(outcome.scenario)
            return []
        self.results.setdefault(name.partition("-")[0], Counter())[found] += 1
        self.idle += [name] if found == "missed" else []
        return wrong(outcome)

    def some(self, over: Callable[[], bool]) -> Iterator[Scenario]:
        """Those of the next job."""
        while self.left and not over():
            yield self.left.popleft()

    def show(self, say: Callable[[str], None]) -> None:
        """The counts, base by base."""
        for name, counts in self.results.items():
            words = ", ".join(f"{counts[word]} {word}" for word in ("passed", "missed", "failed"))
            say(f"{name:<8}{BASES[name].does:<60}{words}")
        total = sum(self.results.values(), Counter())
        say(f"{total.total()} cases: {total['passed']} passed, {total['failed']} failed, {total['missed']} did not strike"
            f"{': ' + ', '.join(self.idle[:20]) if self.idle else ''}; {len(self.left)} were not played")  # fmt: skip
