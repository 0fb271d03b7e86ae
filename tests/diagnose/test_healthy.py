"""Thirty healthy minutes without an incident, in virtual time, with the core that decides on real nodes.

Healthy is not even: ranks jitter, pause for a moment, roll out for long, save slowly, and nodes come and are drained. None of
it may lead to a stall, a suspicion, a probe, a verdict or a word about a slow rank.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from chaos.faults import Fault
from chaos.history import Died, Planned, Suspicion
from chaos.scenario import Scenario
from chaos.sim.cluster import Shape
from chaos.sim.drive import Run
from chaos.sim.node import Node
from elasticrl.contract import events
from elasticrl.contract.events import Action, Event
from elasticrl.contract.model import Pace, Phase, Work
from elasticrl.contract.settings import Membership, Settings, Timeouts
from elasticrl.contract.verdict import Fault as Class

MINUTES = 30
SAID = frozenset({"verdict.found", "straggler.found"})


class Day:
    """A job on which nothing goes wrong."""

    def __init__(self, seed: int) -> None:
        luck = Random(f"healthy {seed}")
        nodes = luck.choice((2, 3, 4, 8))
        self.luck, self.words = luck, []
        settings = Settings(
            lanes=luck.choice((8, 12, 24)), copies=1,
            membership=Membership(min_nodes=1 if nodes == 2 else 2, neighbours=luck.choice((1, 2))),
            timeouts=Timeouts(
                floor_s=luck.choice((2.0, 5.0)), slack=luck.choice((5.0, 10.0)), confirm_s=luck.choice((0.5, 1.0))
            ),
        )  # fmt: skip
        shape = Shape(
            nodes=nodes, late=1 if nodes > 2 else 0, settings=settings, updates=luck.choice((1, 4)),
            save_every=luck.choice((5, 50)), step_s=luck.choice((0.2, 0.5, 3.0)), save_s=luck.choice((0.6, 8.0)),
        )  # fmt: skip
        moves: tuple[Fault, ...] = ()
        if nodes > 2:
            last = f"n{nodes - 1:02}"
            moves = (
                Fault(kind="join_node", node=last, at=60.0 * luck.randint(2, 8)),
                Fault(kind="drain", node="n01", at=60.0 * luck.randint(10, 14)),
                Fault(kind="join_node", node="n01", at=60.0 * luck.randint(16, 20)),
                Fault(kind="pause", at=60.0 * luck.randint(22, 26), for_s=10.0),
            )
        self.run = Run(Scenario(name="healthy", shape=shape, faults=moves, trouble_s=60.0 * MINUTES), str(seed))
        self.step_s = shape.step_s
        self.floor_s = settings.timeouts.floor_s
        for node in self.run.cluster.nodes.values():
            self._listen(node)
        self.run.world.later(5.0, self._vary)
        self.run.world.later(30.0, self._pause, 0.7)

    def _listen(self, node: Node) -> None:
        """What this node says, and how long its own work takes, which the simulator does not tell."""
        perform, post = node.perform, node.post

        def performed(action: Action) -> None:
            if isinstance(action, events.Say) and action.event in SAID:
                self.words.append((self.run.world.now, node.name, action.event, dict(action.fields)))
            perform(action)

        def posted(event: Event) -> None:
            if isinstance(event, events.Workers) and event.work is Work.TRAINING:
                took = self.step_s * node.slow * (0.97 + 0.06 * self.luck.random())
                event = replace(event, pace=(Pace(slot=0, phase="update", seconds=round(took, 5)),))
            post(event)

        node.perform, node.post = performed, posted  # type: ignore[method-assign] # one node's, to listen at

    def _vary(self) -> None:
        """Jitter of each rank; now and then all roll out for long, or the disk is slow."""
        for node in self.run.cluster.nodes.values():
            node.slow = 1.0 + 0.1 * self.luck.random() ** 2
        self.run.cluster.step_s = self.step_s * (3.0 if self.luck.random() < 0.1 else 1.0)
        self.run.cluster.disk.factor = 3.0 if self.luck.random() < 0.2 else 1.0
        self.run.world.later(2.0 + self.luck.random(), self._vary)

    def _pause(self, share: float) -> None:
        """A rank stands still for a part of the least budget: its memory is tidied up."""
        able = [
            node for node in self.run.cluster.nodes.values() if node.work is Work.TRAINING and node.gang is not None
        ]
        if able:
            node = self.luck.choice(able)
            node.hung = {0}
            self.run.world.later(share * self.floor_s * (0.3 + 0.7 * self.luck.random()), self._go_on, node)
        self.run.world.later(10.0 + 40.0 * self.luck.random(), self._pause, share)

    def _go_on(self, node: Node) -> None:
        node.hung = set()

    def live(self, seconds: float) -> list[str]:
        """So long; what was an incident, or nearly one."""
        self.run.cluster.start()
        found: list[str] = []
        for until in range(1, int(seconds) + 1):
            self.run.world.run(float(until))
            for node in self.run.cluster.nodes.values():
                lead = node.state.lead if node.state and node.daemon_up else None
                if node.stall is not None:
                    found.append(f"{until} s: {node.name} has stalled: {node.stall}")
                if lead and lead.dossier.finding and lead.dossier.finding.verdict.fault is not Class.UNKNOWN:
                    found.append(f"{until} s: {node.name} finds {lead.dossier.finding.verdict.cause}")
        facts = self.run.world.history
        found += [f"{fact.at:.0f} s: {fact}" for fact in facts if isinstance(fact, Died)]
        found += [
            f"{fact.at:.0f} s: {fact}"
            for fact in facts
            if isinstance(fact, Suspicion) and fact.suspected and not self._gone(fact)
        ]
        found += [
            f"{fact.at:.0f} s: {fact.plan.reason}"
            for fact in facts
            if isinstance(fact, Planned) and fact.plan.phase is Phase.PROBE
        ]
        return found + [f"{at:.0f} s: {node} says {event} {fields}" for at, node, event, fields in self.words]

    def _gone(self, fact: Suspicion) -> bool:
        """Who was drained has fallen silent by right."""
        return not self.run.cluster.nodes[fact.other].daemon_up or "n01" in fact.other


def trained(day: Day) -> int:
    """How many steps."""
    return day.run.cluster.running.attempted if day.run.cluster.running else 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, *range(4, 24)))])
def test_thirty_healthy_minutes_are_no_incident(seed: int) -> None:
    day = Day(seed)
    assert not day.live(60.0 * MINUTES)
    assert trained(day) > 60.0 * MINUTES / (8 * day.step_s)


def worse(day: Day) -> None:
    """A pause that no budget covers."""
    day.run.world.later(100.0, lambda: setattr(next(iter(day.run.cluster.nodes.values())), "hung", {0}))


def slower(day: Day) -> None:
    """A rank that takes twice as long as the others."""
    day._vary = lambda: None  # type: ignore[method-assign] # its jitter would make the slow one fast again
    day.run.world.later(20.0, lambda: setattr(day.run.cluster.nodes["n01"], "slow", 2.0))


@pytest.mark.parametrize("spoil", [worse, slower])
def test_a_day_that_is_not_healthy_is_told_from_one_that_is(spoil: Callable[[Day], None]) -> None:
    day = Day(3)
    spoil(day)
    assert day.live(180.0)
