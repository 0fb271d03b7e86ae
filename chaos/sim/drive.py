"""One run from its scenario to its verdict: trouble, healing, and the demand that the job be well again."""

from collections import Counter
from dataclasses import dataclass

from chaos.case import Violation
from chaos.checks import judge
from chaos.history import Committed, Ended, Fact, History, Sealed
from chaos.scenario import Scenario
from chaos.sim.cluster import Cluster
from chaos.sim.nemesis import Nemesis
from chaos.sim.world import World
from elasticrl.contract.model import Phase, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    scenario: Scenario
    seed: str
    history: History
    violations: list[Violation]
    struck: Counter[str]
    virtual_s: float
    events: int
    steps: int


class Run:
    """A scenario in motion."""

    def __init__(self, scenario: Scenario, seed: str) -> None:
        self.scenario, self.seed = scenario, seed
        self.world = World(seed)
        self.cluster = Cluster(self.world, scenario.shape)
        self.nemesis = Nemesis(self.cluster, scenario.faults)
        self._well_since: float | None = None
        self._mark = (-1, -1, -1)
        self._seals = self._commits = self._counted = 0

    def drive(self) -> Result:
        """All of it."""
        self.cluster.start()
        return self.go_on()

    def become(self, scenario: Scenario) -> None:
        """From here on it is a run of this scenario, which is the same so far, and has more faults, all of them ahead."""
        self.nemesis.add(scenario.faults[len(self.scenario.faults) :])
        self.scenario = scenario

    def go_on(self) -> Result:
        """The rest of it, from wherever it has come to."""
        self.world.run(self.scenario.trouble_s)
        self.nemesis.heal()
        until = self.world.now + self.scenario.liveness_s
        lacks = "nothing was looked at"
        while self.world.now < until:
            self.world.run(self.world.now + 0.5)
            lacks = self.lacking()
            if not lacks and self._well_since is not None and self.world.now - self._well_since >= 4.0:
                break
        self._end(lacks)
        violations = judge(self.scenario, self.world.history)
        return Result(
            scenario=self.scenario,
            seed=self.seed,
            history=self.world.history,
            violations=violations,
            struck=Counter(self.nemesis.struck),
            virtual_s=self.world.now,
            events=self.world.events,
            steps=self.cluster.steps,
        )

    def _end(self, lacks: str) -> None:
        plan = self.cluster.store.shared.plan
        seated = tuple(seat.member.node for seat in plan.seats) if plan else ()
        alive = tuple(name for name, node in sorted(self.cluster.nodes.items()) if node.daemon_up)
        self.world.note(
            Ended(
                at=self.world.now,
                alive=alive,
                seated=seated,
                want=self._want(),
                lively=not lacks,
                lacks=lacks,
                writes=self.cluster.store.writes,
            )
        )

    # ---- what well means

    def lacking(self) -> str:
        """What is not yet as it should be; empty when the job is well."""
        plan = self.cluster.store.shared.plan
        if plan is not None and plan.phase is Phase.STOP:
            # Who finds the end at its first look takes it for that of a run before, and waits for the next one.
            up = [
                name
                for name, node in sorted(self.cluster.nodes.items())
                if node.daemon_up and node.found != plan.generation
            ]
            self._well_since = self._well_since if self._well_since is not None and not up else self.world.now
            return f"the job is over, and {', '.join(up)} have not left" if up else ""
        lacks = self._unfit()
        generation = plan.generation if plan else 0
        if lacks or generation != self._mark[0]:
            self._well_since = self.world.now
            self._mark = (generation, self._count(Sealed), self._count(Committed))
            return lacks or "the plan has just changed"
        if self._count(Sealed) < self._mark[1] + 2:
            return "no updates are sealed"
        if self._count(Committed) < self._mark[2] + 1 and not self.cluster.script:
            return "nothing is committed"
        return ""

    def _count(self, kind: type[Fact]) -> int:
        for fact in self.world.history[self._counted :]:
            self._seals += type(fact) is Sealed
            self._commits += type(fact) is Committed
        self._counted = len(self.world.history)
        return self._seals if kind is Sealed else self._commits

    def _unfit(self) -> str:
        plan = self.cluster.store.shared.plan
        if plan is None:
            return "there is no plan"
        if plan.phase is not Phase.TRAIN:
            return f"generation {plan.generation} is {plan.phase.value}: {plan.reason}"
        seated = {seat.member.node for seat in plan.seats}
        idle = [
            n for n, node in sorted(self.cluster.nodes.items()) if node.alive and node.daemon_up and n not in seated
        ]
        if idle:
            return f"{', '.join(idle)} still work without a seat"
        out = sorted(set(self._fit()) - {seat.member.node for seat in plan.seats})
        if out and len(plan.seats) < self._want():
            return f"{', '.join(out)} fit and not seated: {plan.reason}"
        return ""

    def _fit(self) -> list[str]:
        shape, plan = self.scenario.shape, self.cluster.store.shared.plan
        up = [n for n, node in sorted(self.cluster.nodes.items()) if node.daemon_up and n not in shape.alien]
        seated = plan.seats[0].member.node if plan and plan.seats else ""
        return [n for n in up if not seated or (n in shape.foreign) == (seated in shape.foreign)]

    def _want(self) -> int:
        """How many seats the configuration gives to the nodes that are there."""
        shape = self.scenario.shape
        membership, lanes = shape.settings.membership, shape.settings.lanes
        carriers = shape.slots // shape.settings.team  # of a node
        fit = len(self._fit())
        most = min(fit, membership.max_nodes, lanes // carriers)
        want = min(most, max(fit - membership.spares, membership.min_nodes))
        if membership.grow == "useful":
            best = rounds(lanes, want * carriers)
            while want > membership.min_nodes and rounds(lanes, (want - 1) * carriers) == best:
                want -= 1
        return want


def run(scenario: Scenario, seed: str) -> Result:
    """One run."""
    return Run(scenario, seed).drive()
