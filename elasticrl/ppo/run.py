"""What the trainer asks of the runtime under it, and the buffer that both share.

The idea: the trainer never speaks of ranks. It asks which lanes are here, gives each lane's backward pass and tally, and says
when a stage's results should be kept; how many workers there are, who died and what is sent where is the runtime's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from elasticrl.ppo.batches import Rows
    from elasticrl.ppo.flow import Keeps
    from elasticrl.runtime.asked import Kind
    from elasticrl.runtime.audited import Result
    from elasticrl.runtime.rng import Streams
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.spikes import Guard
    from elasticrl.runtime.strategy import Reduced

T = TypeVar("T")
Joins = Literal["none", "most", "all"]
"""none: no pass needs another rank; most: each is a collective of all ranks, so all make as many as the one that has most; all:
each part of a lane must have one.
"""


@dataclass(slots=True)
class Ahead:
    """What was generated for a later step. `of` stands for what that step is made of: another batch, or other data, has no use
    for it.

    Example: Ahead(version=12, of="a93b...", rows={3: {"tokens": ...}}, ids={3: ["0/17", ...]})
    """

    version: int  # of the weights: so many updates
    of: str
    rows: dict[int, Rows] = field(default_factory=dict)
    ids: dict[int, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Buffer:
    """What there is of the present step: state like the weights, so that nothing generated is ever generated again.

    Keyed by lane, never by rank. `done` are the stages whose results are whole for all lanes; `facts` are numbers of the whole
    batch, alike on all ranks.

    Example: Buffer(step=12, done=["rollout"], facts={}, rows={3: {"tokens": ...}}, ids={3: ["0/17", ...]})
    """

    step: int = -1
    done: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    ids: dict[int, list[str]] = field(default_factory=dict)
    ahead: dict[int, Ahead] = field(default_factory=dict)  # by step: samples that were generated before it began

    def begin(self, step: int) -> None:
        """Empties it, unless it holds part of this very step; what was generated ahead stays."""
        if step != self.step:
            self.step, self.done, self.facts, self.rows, self.ids = step, [], {}, {}, {}

    def put(self, lane: int, **values: torch.Tensor) -> None:
        """Adds values to a lane's rows, [samples, ...] each, on the host."""
        self.rows.setdefault(lane, {}).update({name: value.detach().cpu() for name, value in values.items()})

    def has(self, lane: int, names: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return set(names) <= self.rows.get(lane, {}).keys()

    def state_dict(self) -> dict[str, Any]:
        """Of the lanes that are here. Lanes' parts of several ranks make up the whole."""
        return {
            "step": self.step,
            "done": list(self.done),
            "facts": dict(self.facts),
            "rows": self.rows,
            "ids": self.ids,
            "ahead": {step: (its.version, its.of, its.rows, its.ids) for step, its in self.ahead.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where the saved one was."""
        self.step, self.done, self.facts = int(state["step"]), list(state["done"]), dict(state["facts"])
        self.rows = {int(lane): dict(rows) for lane, rows in state["rows"].items()}
        self.ids = {int(lane): list(ids) for lane, ids in state["ids"].items()}
        self.ahead = {
            int(step): Ahead(version, of, {**rows}, {**ids})
            for step, (version, of, rows, ids) in state["ahead"].items()
        }


class Run(Protocol):
    """A gang in the middle of a job, seen from one of its workers."""

    @property
    def streams(self) -> Streams:
        """The job's random streams at the present step and update."""

    @property
    def buffer(self) -> Buffer:
        """What there is of the present step."""

    @property
    def version(self) -> int:
        """How many updates the weights have had since the job began."""

    @property
    def lanes(self) -> Sequence[int]:
        """The lanes carried here, in the order in which they are to be computed. In lockstep some may come twice, so that all
        ranks make as many forward passes; computing a lane again changes nothing.
        """

    @property
    def lockstep(self) -> bool:
        """Forward passes are collectives, so none may be left out by one rank alone."""

    @property
    def joins(self) -> Joins:
        """Which passes of an update, of those that a lane may come to, all make, with nothing if they have nothing."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each of the present step's phases took here."""

    def begin(self, step: int) -> None:
        """This step comes now; the buffer and the update are where the newest whole state has them."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What is inside is this phase, for beats, budgets and timings."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """What is inside of a phase has a time of its own, which the phase's is without."""

    def keep(self, stage: str, *, how: Keeps = "never") -> None:
        """The stage is done for the lanes here. What is kept outlives any fault, once the stage is done everywhere."""

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """The whole batch's tally from each carried lane's, folded in the order of lanes."""

    def gather(self, numbers: Mapping[int, Sequence[float]]) -> dict[int, Sequence[float]]:
        """Each lane's numbers from each carried lane's, to the last bit. Collective."""

    def passes(self, role: str) -> Iterator[tuple[int, int, Tally]]:
        """(lane, part of it, tally) in turn: the one backward pass in the loop's body belongs to its gradient of this role's
        weights. So a part is a leaf of the tree of sums, whoever carries its lane.
        """

    @property
    def asks(self) -> bool:
        """Whether this worker asks engines and scorers for its lanes: of a team one member does."""

    def ask_once(self, ask: Callable[[], T], kind: Kind[T]) -> T:
        """What `ask` comes to on the member of the team that asks, on all of its members. Collective of the team; the training
        thread alone calls it.
        """

    def twice(self, what: str, result: Callable[[int], Result], *, lends: bool = False) -> None:
        """What this step made of a lane is made once more elsewhere and compared, if it is its turn. With `lends` the lane's
        rows are in the buffer there meanwhile. Collective.
        """

    def leave_out(self) -> None:
        """In the loop's body, in place of the pass: its leaf is 0. Where passes are collectives all leave it out alike."""

    def used(self, lane: int, epoch: int, ids: Sequence[str], *, filtered: bool = False) -> None:
        """These samples enter the update that comes next, or are `filtered` out of it: a line of the ledger, once the update is
        sealed.
        """

    def update(
        self, *, lr_factor: float, max_norm: float | None, keeps: bool = True, skips: bool = False,
        guard: Guard | None = None,
    ) -> Mapping[str, Reduced]:  # fmt: skip
        """Applies all roles' gradients as one version, seals it, and goes on to the next update of this step. Without `keeps`
        the step cannot be taken up from there. With `skips` a loss or a gradient that is not finite is left out, on all ranks.
        A `guard` does what it says about spikes.
        """
