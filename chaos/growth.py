"""What growth costs: the same arrivals and failures under each policy, in updates. `python -m chaos.growth` prints the table.

The one idea: a growth is worth its reform only if it shortens steps, so count what was made in the same virtual time.
"""

from dataclasses import replace
from random import Random

from chaos.faults import Fault
from chaos.history import Planned, Sealed
from chaos.scenario import Scenario
from chaos.sim.cluster import Shape
from chaos.sim.drive import Run
from elasticrl.contract.model import rounds
from elasticrl.contract.settings import Membership, Settings

POLICIES = {
    "always, at once": {"grow": "always", "settle_s": 0.0},
    "always, settle 1 s": {"grow": "always", "settle_s": 1.0},
    "always, settle 5 s": {"grow": "always", "settle_s": 5.0},
    "useful, at once": {"grow": "useful", "settle_s": 0.0},
    "useful, settle 1 s": {"grow": "useful", "settle_s": 1.0},
    "useful, settle 5 s": {"grow": "useful", "settle_s": 5.0},
}
LANE_S = 0.125  # a step takes this long for each round of lanes


def world(seed: int, policy: dict[str, object]) -> Scenario:
    """Nodes that come and go: eight of twelve at first, the others in twos and threes, each may be killed and come back."""
    chance = Random(f"growth {seed}")
    faults = [Fault(kind="join_node", node=f"n{8 + i:02d}", at=10 + 12 * (i // 2) + chance.random()) for i in range(4)]
    faults += [
        Fault(kind="kill_node", node=f"n{chance.randrange(12):02d}", at=40 + 15 * i + chance.random(), for_s=3.0)
        for i in range(6)
    ]
    membership = replace(Membership(min_nodes=2), **policy)  # type: ignore[arg-type]
    shape = Shape(
        nodes=12, late=4, settings=Settings(lanes=16, membership=membership), warm_s=(1.0, 3.0), step_s=LANE_S
    )
    return Scenario(
        name="growth", shape=shape, faults=tuple(faults), trouble_s=140, liveness_s=1, all_must_strike=False
    )


class Priced(Run):
    """A run in which a step takes as long as its busiest rank has lanes."""

    def price(self) -> tuple[int, int]:
        """Updates sealed in the first 140 seconds, and generations."""
        cluster = self.cluster
        plain = cluster.gang

        def gang(plan):  # type: ignore[no-untyped-def]
            made = plain(plan)
            cluster.step_s = LANE_S * rounds(plan.lanes, plan.carriers)
            return made

        cluster.gang = gang  # type: ignore[method-assign]
        cluster.start()
        self.world.run(140.0)
        history = self.world.history
        return sum(isinstance(f, Sealed) for f in history), sum(isinstance(f, Planned) for f in history)


def main() -> None:
    """The table."""
    seeds = range(20)
    print(f"{'policy':<22}{'updates':>9}{'generations':>13}   (mean of {len(seeds)} seeds, 140 virtual seconds)")
    for name, policy in POLICIES.items():
        prices = [Priced(world(seed, policy), str(seed)).price() for seed in seeds]
        updates, generations = (sum(column) / len(prices) for column in zip(*prices, strict=True))
        print(f"{name:<22}{updates:>9.1f}{generations:>13.1f}")


if __name__ == "__main__":
    main()
