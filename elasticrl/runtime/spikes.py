"""Whether an update is a spike: the norm of its gradient, or a loss of it, far above those of the updates before.

The one idea: a value is judged by the mean and the standard deviation of the last ones. All of these are numbers that all
ranks know alike, and the past is a part of the job's state. So all ranks judge alike, on any number of workers, and a job that
is taken up again judges as if it had never stopped.

What was left out is a part of the past too, once for its step. Without it a job that has come to a new level would be judged by
the old one for ever, and the spread of what is applied, which never has a value beyond the edge, would only shrink. If each
of its updates were, what is bad would be usual by the time that it comes again in a later epoch of the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from elasticrl.runtime.strategy import Reduced

MOST = 1e150  # the sum of a window's squares is finite
LEAST = 0.01  # of the mean: a value that has hardly moved until now may move by so much for each standard deviation


class Spiked(RuntimeError):
    """An update that is a spike, or one spike too many in a row. No rank has applied anything of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is a spike, and what is done about it. All ranks have the same. `losses` are looked at beside the norms: sums of the
    tally, each over `per`, a number that all ranks know alike.

    Example: Guard(sigma=6.0, window=128, in_a_row=8, does="skip", losses=("value_loss",), per=4096.0)
    """

    sigma: float  # standard deviations above the mean
    window: int  # updates that these are of
    in_a_row: int  # spikes one after another in so many steps end the job
    does: Literal["warn", "skip", "stop"]
    losses: tuple[str, ...] = ()
    per: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """One value that has jumped. Example: Spike(name="actor_norm", value=81.2, usual=1.31, spread=0.2)"""

    name: str
    value: float
    usual: float  # the mean of those before
    spread: float  # their standard deviation

    def __str__(self) -> str:
        """Example: actor_norm is 81.2, and 1.31 +- 0.2 before"""
        return f"{self.name} is {self.value:.4g}, and {self.usual:.4g} +- {self.spread:.2g} before"


@dataclass(slots=True)
class Past:
    """What was looked at in the last updates, the newest last; of a step's spikes only the first. A part of the job's state.

    Example: Past(values={"actor_norm": [1.2, 1.41]}, row=1, step=7, spiked=7)
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    row: int = 0  # steps of the spikes one after another until now; updates would count a bad one again in each epoch of a step
    step: int = -1  # the newest of these
    spiked: int = -1  # the newest step with a spike, whatever has come since

    def spikes(self, now: Mapping[str, float], guard: Guard) -> tuple[Spike, ...]:
        """What has jumped. None as long as there is less than half a window to compare with."""
        found = []
        for name, value in sorted(now.items()):
            before = self.values.get(name, [])[-guard.window :]
            if len(before) < max(2, guard.window // 2):
                continue
            usual = fsum(before) / len(before)
            spread = sqrt(fsum((one - usual) * (one - usual) for one in before) / (len(before) - 1))
            if value > usual + guard.sigma * max(spread, LEAST * abs(usual)):
                found.append(Spike(name=name, value=value, usual=usual, spread=spread))
        return tuple(found)

    def steps(self, step: int) -> int:
        """In how many steps spikes have followed one another, if there is one in `step` now."""
        return self.row if step == self.step else self.row + 1

    def add(self, now: Mapping[str, float], guard: Guard, *, spiked: bool, step: int) -> None:
        """An update of `step` is made, or left out. Where nothing could be looked at, it says nothing. A row is of what was
        left out: what was applied does not tell whether that helps.
        """
        again = spiked and step == self.spiked
        if spiked:
            self.row, self.step = (self.steps(step), step) if guard.does == "skip" else (0, -1)
            self.spiked = step
        elif now:
            self.row, self.step = 0, -1
        for name, value in () if again else now.items():
            self.values[name] = [*self.values.get(name, []), value][-guard.window :]

    def state_dict(self) -> dict[str, Any]:
        """Example: {"values": {"actor_norm": [1.2, 1.41]}, "row": 1, "step": 7, "spiked": 7}"""
        values = {name: list(values) for name, values in self.values.items()}
        return {"values": values, "row": self.row, "step": self.step, "spiked": self.spiked}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """The reverse. A state of before there were guards has none."""
        self.values = {str(name): list(map(float, values)) for name, values in state.get("values", {}).items()}
        self.row, self.step = int(state.get("row", 0)), int(state.get("step", -1))
        self.spiked = int(state.get("spiked", -1))


def seen(found: Mapping[str, Reduced], guard: Guard) -> dict[str, float]:
    """What is looked at: each role's norm, and the losses that were tallied. Not what is 0, as where all samples of each group
    are worth the same: many of these would make a spike of each update that learns something. Nor what has no finite square.
    """
    norms = {f"{name}_norm": reduced.norm for name, reduced in found.items()}
    sums = {name: value for reduced in found.values() for name, value in reduced.tally.sums.items()}
    losses = {name: sums[name] / guard.per for name in guard.losses if name in sums}
    return {name: value for name, value in (norms | losses).items() if value and abs(value) < MOST}


def check(spikes: tuple[Spike, ...], past: Past, guard: Guard, *, step: int, update: int) -> None:
    """Each rank raises where the job is to end, so the failure is the program's and no single node's."""
    where, said = f"Update {update} of step {step}", ", ".join(map(str, spikes))
    if spikes and guard.does == "stop":
        raise Spiked(
            f"{where} is a spike: {said}. Nothing of it was applied, and the state before it is kept. Look at the samples of "
            "this update. To go on without such updates, leave them out (skip). To go on with them, raise what counts as a "
            "spike (sigma). If the norm has grown for a while, go on from an older checkpoint with a lower learning rate."
        )
    steps = past.steps(step)
    if spikes and guard.does == "skip" and steps >= guard.in_a_row:
        raise Spiked(
            f"{where} is a spike: {said}. So were all before it in {steps} steps one after another, so to leave "
            "them out does not help. Nothing of them was applied, and the state before them is kept. Go on from an older "
            "checkpoint, with a lower learning rate. To wait longer, raise in_a_row. If the new values are right, raise what "
            "counts as a spike (sigma), or let such updates pass (does: warn)."
        )
