"""Whether an update is a spike: the norm of its gradient, or a loss of it, far above those of the updates before.

The one idea: a value is judged by the mean and the standard deviation of the last ones that were applied. All of these are
numbers that all ranks know alike, and the past is a part of the job's state. So all ranks judge alike, on any number of
workers, and a job that is taken up again judges as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import fsum, sqrt
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from elasticrl.runtime.strategy import Reduced

LEAST = 0.01  # of the mean: a value that has hardly moved until now may move by so much for each standard deviation


class Spiked(RuntimeError):
    """An update that is a spike, or one spike too many in a row. No rank has applied anything of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What is a spike, and what is done about it. `losses` are looked at beside the norms: sums of the tally, each over `per`.

    Example: Guard(sigma=6.0, window=128, in_a_row=8, does="skip", losses=("value_loss",), per=4096.0)
    """

    sigma: float  # standard deviations above the mean
    window: int  # updates that these are of
    in_a_row: int  # so many spikes one after another are none
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
    """What was looked at in the updates that were applied, the newest last. A part of the job's state.

    Example: Past(values={"actor_norm": [1.2, 1.41]}, row=0)
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    row: int = 0  # spikes one after another until now

    def spikes(self, now: Mapping[str, float], guard: Guard) -> tuple[Spike, ...]:
        """What has jumped. None as long as there is less than half a window to compare with."""
        found = []
        for name, value in sorted(now.items()):
            before = self.values.get(name, [])[-guard.window :]
            if len(before) < max(2, guard.window // 2):
                continue
            usual = fsum(before) / len(before)
            spread = sqrt(fsum((one - usual) ** 2 for one in before) / (len(before) - 1))
            if value > usual + guard.sigma * max(spread, LEAST * abs(usual)):
                found.append(Spike(name=name, value=value, usual=usual, spread=spread))
        return tuple(found)

    def add(self, now: Mapping[str, float], guard: Guard, *, spiked: bool) -> None:
        """An update is made, or left out: that one is no measure of the next."""
        self.row = self.row + 1 if spiked else 0
        if spiked and guard.does != "warn":
            return
        for name, value in now.items():
            self.values[name] = [*self.values.get(name, []), value][-guard.window :]

    def state_dict(self) -> dict[str, Any]:
        """Example: {"values": {"actor_norm": [1.2, 1.41]}, "row": 0}"""
        return {"values": {name: list(values) for name, values in self.values.items()}, "row": self.row}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """The reverse. A state of before there were guards has none."""
        self.values = {str(name): list(map(float, values)) for name, values in state.get("values", {}).items()}
        self.row = int(state.get("row", 0))


def seen(found: Mapping[str, Reduced], guard: Guard) -> dict[str, float]:
    """What is looked at: each role's norm, and the losses that were tallied."""
    norms = {f"{name}_norm": reduced.norm for name, reduced in found.items()}
    sums = {name: value for reduced in found.values() for name, value in reduced.tally.sums.items()}
    return norms | {name: sums[name] / guard.per for name in guard.losses if name in sums}


def check(spikes: tuple[Spike, ...], past: Past, guard: Guard, where: str) -> None:
    """Each rank raises where the job is to end, so the failure is the program's and no single node's."""
    said = ", ".join(map(str, spikes))
    if spikes and guard.does == "stop":
        raise Spiked(
            f"{where} is a spike: {said}. Nothing of it was applied, and the state before it is kept. Look at the samples of "
            "this update and at the learning rate. To go on without such updates, leave them out (skip); to go on with them, "
            "raise what counts as a spike (sigma)."
        )
    if spikes and guard.does == "skip" and past.row + 1 >= guard.in_a_row:
        raise Spiked(
            f"{where} is spike number {past.row + 1} in a row: {said}. So many are no spike: this is where the job is now. "
            "Nothing of them was applied, and the state before them is kept. Lower the learning rate, or go on from an older "
            "checkpoint. If the new values are right, let such updates pass (warn), or raise what counts as a spike (sigma)."
        )
