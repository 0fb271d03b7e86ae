"""What going on over gloo costs: computed from a probe before it is decided, measured once the gang trains.

The one idea: a step's bytes over the slowest way that the probe has tried. Where nobody knows them (a gang that had not made a
step yet), nothing is claimed, and nothing is refused for it.
"""

from elasticrl.base.value import dataclass
from elasticrl.contract.model import Plan
from elasticrl.core.lead.scene import Scene


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a step. Example: Cost(usual_s=1.31, bytes=1_881_000, mbps=240.0)"""

    usual_s: float  # how long a step took so far
    bytes: int  # that the rank that sends most sends in it
    mbps: float  # the slowest way

    @property
    def moving_s(self) -> float:
        """How long gloo would be moving them."""
        return 8e-6 * self.bytes / self.mbps

    def __str__(self) -> str:
        return (
            f"moving a step's {self.bytes / 1e6:.3g} MB takes about {self.moving_s:.2g} s at the slowest way's "
            f"{self.mbps:.3g} Mbit/s, where a step took {self.usual_s:.2g} s"
        )


def cost(scene: Scene) -> Cost | None:
    """As the gang's own steps and the probe's results have it; None if either is not known."""
    laps = [record.lap for record in map(scene.record_of, scene.kept) if record and record.lap]
    ways = [way.mbps for way in (*scene.lead.probes.earlier, *scene.lead.probes.results) if way.mbps]
    if not laps or not ways:
        return None
    return Cost(usual_s=max(lap.seconds for lap in laps), bytes=max(lap.bytes for lap in laps), mbps=min(ways))


def too_slow(scene: Scene) -> str:
    """Why gloo is no way on, as slow as it would be here; empty if it is, or nobody can tell."""
    found, limit = cost(scene), scene.settings.fallback_limit
    if found is None or found.moving_s <= limit * found.usual_s:
        return ""
    return f"over gloo {found}: over {limit:g} times that (comm.fallback_limit)"


def measured(plan: Plan | None, scene: Scene) -> str:
    """What steps over gloo take, beside those before; empty until all ranks have made some."""
    if plan is None or not plan.backend or not plan.usual_s:
        return ""
    laps = [record.lap for record in map(scene.record_of, plan.seats) if record and record.lap]
    if len(laps) < len(plan.seats) or any(lap.generation != plan.generation for lap in laps):
        return ""
    now_s = max(lap.seconds for lap in laps)
    return f"over {plan.backend} a step takes {now_s:.2g} s, before {plan.usual_s:.2g} s ({now_s / plan.usual_s:.2g} times)"
