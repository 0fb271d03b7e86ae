"""What is said of a step: its metrics, its times, one line for people; and the learning rate's schedule.

The idea: metrics come from one tally of the whole batch, folded in the order of lanes, so they too are the same for any number
of workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticrl.ppo.advantages import explained_variance

if TYPE_CHECKING:
    from elasticrl.runtime.scalars import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an operator sees of a step. Example: Report(step=12, metrics={"reward": 0.71}, seconds={"rollout": 0.185})"""

    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, step: int, facts: Mapping[str, float], seconds: Mapping[str, float]) -> Report:
        """From the buffer's facts, without those that are only counts for the losses."""
        metrics = {name: value for name, value in facts.items() if not name.startswith("entries.")}
        return cls(step=step, metrics=metrics, seconds=dict(seconds))

    def line(self) -> str:
        """Example: [Step 1234] rollout: 185ms | reward: 2ms | ... | reward 0.710 kl 0.021"""
        times = " | ".join(f"{name}: {seconds * 1000:.0f}ms" for name, seconds in self.seconds.items())
        facts = " ".join(
            f"{name} {self.metrics[name]:.3f}" for name in ("reward", "kl", "loss") if name in self.metrics
        )
        return f"[Step {self.step}] {times} | {facts}"


def lr_factor(schedule: str, step: int, *, warmup: int, steps: int) -> float:
    """What the learning rate is multiplied by in a step: a rise over `warmup` steps, then the schedule's way down to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[schedule]


def facts_of(whole: Tally) -> dict[str, float]:
    """A step's metrics, and the counts that losses are divided by."""
    m = whole.moments
    found = {
        "reward": m["scores"].mean,
        "reward_std": m["scores"].std(),
        "kl": m["kl"].mean,
        "length": m["length"].mean,
    }
    found |= {"rollout_gap": m["gap"].mean, "rollout_gap_std": m["gap"].std(), "advantage_std": m["advantages"].std()}
    if "returns" in m:
        found["explained_variance"] = explained_variance(m["returns"], m["errors"])
    found["ended"] = whole.sums["ended"] / max(m["scores"].count, 1.0)
    return found | {name: value for name, value in whole.sums.items() if name.startswith("entries.")}
