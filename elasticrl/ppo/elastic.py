"""The trainer's run over the elastic runtime: any number of workers, any of which may die.

The idea: everything that must not be lost is a part of the runtime's state, the buffer of the present step included; so a step
that was cut short goes on at the newest stage or update that is whole everywhere, with the same samples. What the trainer calls
a lane's micro-batch is a leaf of the runtime's tree of sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from elasticrl.base.words import count
from elasticrl.ppo.run import Ahead, Buffer
from elasticrl.runtime.data.cursor import SampleId
from elasticrl.runtime.trained import strategy_of
from elasticrl.runtime.vault.errors import CheckpointRefused
from elasticrl.runtime.vault.piece import Piece, whole
from elasticrl.runtime.vault.source import dtype_of, name_of

if TYPE_CHECKING:
    from elasticrl.config import Tree
    from elasticrl.ppo.flow import Keeps
    from elasticrl.ppo.run import Joins
    from elasticrl.runtime.asked import Kind
    from elasticrl.runtime.audited import Result
    from elasticrl.runtime.data.cursor import Cursor
    from elasticrl.runtime.rng import Streams
    from elasticrl.runtime.run import Run
    from elasticrl.runtime.scalars import Tally
    from elasticrl.runtime.spikes import Guard
    from elasticrl.runtime.step import Lane
    from elasticrl.runtime.strategy import Reduced

T = TypeVar("T")
LAST = "sync"
NOTHING: Mapping[str, Any] = {"ids": [], "rows": {}, "ahead": {}}  # of a lane


class ElasticRun:
    """`ppo.run.Run` over `runtime.run.Run`.

    Example: with elasticrl.runtime.join() as base: run = ElasticRun(base, parts=2)
    """

    def __init__(self, base: Run, *, parts: int, last: str = LAST) -> None:
        """`last` is the stage after which a step's rows are not needed any more."""
        self.base, self._last = base, last
        self.buffer = Buffer()
        self.cursor: Cursor | None = None  # which deals the samples of steps, once the data is here
        self._lane: Lane | None = None  # whose pass is under way
        self.seconds: dict[str, float] = {}
        self.own: dict[str, float] = {}  # the same, less what was waited for others
        self._within = [0.0, 0.0]  # of the same, what the parts of this phase took
        self.lockstep = any(collective(base.tree, role) for role in ("actor", "critic", "ref", "reward"))
        inexact = any(strategy_of(base.tree, role) == "deepspeed" for role in ("actor", "critic"))
        self.joins: Joins = "all" if inexact else "most" if self.lockstep else "none"
        base.parts_per_lane = parts
        base.lends(lambda lane: self.buffer.rows[lane], self._borrow)
        part = BufferPart(
            self.buffer, lambda: base.carried, lanes=base.tree.lanes.count,
            recipe=lambda: self.cursor.recipe() if self.cursor else "",
        )  # fmt: skip
        base.register(buffer=part)

    @property
    def streams(self) -> Streams:
        """Those of the gang's run: they depend on step and update, never on who computes."""
        return self.base.streams

    @property
    def version(self) -> int:
        """How many updates the gang has sealed."""
        return self.base.progress.count

    @property
    def life(self) -> str:
        """The name of this job's present life, which weights and engines are marked with."""
        return self.base.life

    @property
    def first(self) -> bool:
        """Whether this is the rank that does for the gang what one rank does."""
        return self.base.first

    @property
    def asks(self) -> bool:
        """Whether this worker asks engines and scorers for its lanes: of a team one member does."""
        return self.base.asks

    def ask_once(self, ask: Callable[[], T], kind: Kind[T]) -> T:
        """One member of the team asks, and tells the others what came of it."""
        return self.base.ask_once(ask, kind)

    def check(self) -> None:
        """Leaves the step where the gang has to form anew."""
        self.base.check("rollout")

    @property
    def lanes(self) -> Sequence[int]:
        """The lanes that this rank carries; in lockstep its last one again until all ranks have as many."""
        mine = self.base.carried
        return [*mine, *[mine[-1]] * (self.base.rounds - len(mine))] if self.lockstep else mine

    def begin(self, step: int) -> None:
        """Goes to this step: the buffer keeps what is of it, and times are counted from 0."""
        self.buffer.begin(step)
        self.seconds, self.own, self._within = {}, {}, [0.0, 0.0]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Beats say this phase inside, and its time is counted."""
        with self.base.phase(name), self.part(name):
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time inside, less that of parts inside of it; and the same less what was waited for others."""
        start, waited = time.perf_counter(), self.base.meter.waited_s
        outer, self._within = self._within, [0.0, 0.0]
        try:
            yield
        finally:
            took = time.perf_counter() - start
            own = took - (self.base.meter.waited_s - waited)
            inner, self._within = self._within, [outer[0] + took, outer[1] + own]
            self.seconds[name] = self.seconds.get(name, 0.0) + took - inner[0]
            self.own[name] = self.own.get(name, 0.0) + own - inner[1]

    def keep(self, stage: str, *, how: Keeps = "never") -> None:
        """Marks the stage as done, and keeps the state as `how` says. What is cheaper to make again is not kept."""
        self.buffer.done.append(stage)
        if how != "never":
            self.base.keep(always=how == "always")
        if stage == self._last:  # the step is over: its samples need not be copied into the vault once more
            self.buffer.rows, self.buffer.ids = {}, {}

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """The batch's tally, folded over all ranks in the order of lanes."""
        return self.base.exchange(tallies)

    def gather(self, numbers: Mapping[int, Sequence[float]]) -> dict[int, Sequence[float]]:
        """Each lane's numbers, told by whoever carries it to all ranks."""
        told = self.base.tell({str(lane): list(its) for lane, its in numbers.items()})
        # Of those who carry the same lanes, the members of a team, the first ones count, as in a tally.
        return {int(lane): its for words in reversed(told) for lane, its in words.items()}

    def passes(self, role: str) -> Iterator[tuple[int, int, Tally]]:
        """One backward pass after the other, a part of a lane each. A rank with fewer makes as many all the same."""
        parts = self.base.parts_per_lane
        for number, lane in enumerate(self.base.passes(role)):
            self._lane = lane
            part = (lane.index if lane.again else number) % parts
            yield lane.index // parts, part, lane.tally  # a ghost plays the parts that the others have then
            lane.done()

    def _borrow(self, lane: int, rows: Mapping[str, torch.Tensor] | None) -> None:
        """What a lane that is carried elsewhere is computed from, for the time of an audit."""
        if rows is None:
            self.buffer.rows.pop(lane, None)
        else:
            self.buffer.rows[lane] = dict(rows)

    def twice(self, what: str, result: Callable[[int], Result], *, lends: bool = False) -> None:
        """Has another rank make it once more and compare, where an audit has drawn it."""
        self.base.twice(what, result, lends=lends)

    def leave_out(self) -> None:
        """Leaves the present pass out of the gradient."""
        assert self._lane is not None
        self._lane.leave_out()

    def used(self, lane: int, epoch: int, ids: Sequence[str], *, filtered: bool = False) -> None:
        """Notes for the ledger which samples enter the update. Of a group's samples the first stands for their prompt."""
        prompts = [name for name in ids if name.partition(".")[2] in ("", "0")]
        for weights, found in weights_of(self.buffer, lane, prompts).items() or [(None, list[str]())]:
            samples = [_sample(name.partition(".")[0]) for name in found]
            self.base.used(lane, samples, turn=epoch, filtered=filtered, by=weights)

    def update(
        self, *, lr_factor: float, max_norm: float | None, keeps: bool = True, skips: bool = False,
        guard: Guard | None = None,
    ) -> Mapping[str, Reduced]:  # fmt: skip
        """Applies all roles' gradients and seals them as one version."""
        found = self.base.update_all(lr_factor=lr_factor, max_norm=max_norm, keeps=keeps, skips=skips, guard=guard)
        assert found is not None, "the trainer's step is guarded: what cuts it short is raised"
        return found


class BufferPart:
    """The buffer as a part of the state: each lane's rows belong to whoever carries the lane. `recipe` stands for what steps
    are made of (`Cursor.recipe`): rows of a step that was made of something else are of no use.
    """

    def __init__(
        self,
        buffer: Buffer,
        carried: Callable[[], Sequence[int]],
        *,
        lanes: int,
        recipe: Callable[[], str] = lambda: "",
    ) -> None:
        self._buffer, self._carried, self._lanes, self._recipe = buffer, carried, lanes, recipe

    def pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The carried lanes' rows, whole."""
        kinds = [("", self._buffer.rows)]
        kinds += [(f"ahead.{step}.", its.rows) for step, its in sorted(self._buffer.ahead.items())]
        for lane in self._carried():
            for kind, lanes in kinds:
                for name, rows in sorted(lanes.get(lane, {}).items()):
                    full = f"buffer.{lane}.{kind}{name}"
                    yield whole(full, name_of(rows.dtype), tuple(rows.shape)), rows

    def values(self) -> Mapping[str, Any]:
        """What all ranks know alike, and each carried lane's ids and shapes."""
        buffer = self._buffer
        lanes = {
            f"lane.{lane}": {
                "ids": list(buffer.ids.get(lane, ())),
                "rows": _shapes(buffer.rows.get(lane, {})),
                "ahead": {
                    str(step): {"ids": list(its.ids[lane]), "rows": _shapes(its.rows[lane])}
                    for step, its in sorted(buffer.ahead.items())
                    if lane in its.rows
                },
            }
            for lane in self._carried()
        }
        head = {"step": buffer.step, "done": list(buffer.done), "facts": dict(buffer.facts)}
        head["ahead"] = {str(step): [its.version, its.of] for step, its in sorted(buffer.ahead.items())}
        head["recipe"] = self._recipe()
        return {"head": head, **lanes}

    def prepare(self, values: Mapping[str, Any], /) -> None:
        """Room for the rows of the lanes that are carried now."""
        of = self._of(values)
        self._buffer.rows = {lane: _room(its["rows"]) for lane, its in of}
        self._buffer.ahead = {}
        for step, (version, made_of) in self._early(values).items():
            its = {lane: kept["ahead"][step] for lane, kept in of if step in kept["ahead"]}
            self._buffer.ahead[int(step)] = Ahead(
                int(version),
                str(made_of),
                rows={lane: _room(one["rows"]) for lane, one in its.items()},
                ids={lane: list(one["ids"]) for lane, one in its.items()},
            )

    def restored(self, values: Mapping[str, Any], /) -> None:
        """The rows are filled; the rest is here."""
        head, buffer = values["head"], self._buffer
        buffer.step, buffer.done, buffer.facts = int(head["step"]), list(head["done"]), dict(head["facts"])
        of = self._of(values)
        buffer.ids = {lane: list(its["ids"]) for lane, its in of}

    def empty(self) -> None:
        """Nothing of any step."""
        self._buffer.step = -1
        self._buffer.done, self._buffer.facts, self._buffer.rows, self._buffer.ids = [], {}, {}, {}
        self._buffer.ahead = {}

    def _of(self, values: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
        """What was kept of each lane that is carried now: nothing where the samples were cut into other lanes, or the step was
        made of something else.
        """
        kept = {name: its for name, its in values.items() if name != "head"}
        if why := self._useless(kept.keys(), values):
            if any(its["rows"] for its in kept.values()):
                raise CheckpointRefused(
                    f"The state is from inside of step {values['head']['step']}, whose samples {why} until that step is over."
                )
            return [(lane, NOTHING) for lane in self._carried()]
        return [(lane, kept[f"lane.{lane}"]) for lane in self._carried()]

    def _useless(self, kept: Collection[str], values: Mapping[str, Any]) -> str:
        """Why rows of these lanes are of no use here, and what to do; "" if they are."""
        if kept != {f"lane.{lane}" for lane in range(self._lanes)}:
            return f"are cut into {count(len(kept), 'lane')}, and there are {self._lanes} now: set lanes.count back"
        if self._other(values):
            return (
                "were dealt otherwise, from other data, in another batch, in groups of another size, or by another "
                "curriculum: set the section data, ppo.batch, ppo.gen_batch and ppo.group back"
            )
        return ""

    def _early(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What was generated ahead, by step: of no use where steps are made of something else."""
        return {} if self._other(values) else values["head"]["ahead"]

    def _other(self, values: Mapping[str, Any]) -> bool:
        """Whether steps were made of something else. States of earlier versions do not say."""
        was, now = values["head"].get("recipe"), self._recipe()
        return bool(was and now) and was != now


def weights_of(buffer: Buffer, lane: int, ids: Sequence[str]) -> Mapping[int | None, list[str]]:
    """Which weights generated these samples of a lane, by the step that began with these weights: as it was written down with
    the samples. None: nobody generated them here, or an earlier version did, which did not write it down.
    """
    found: dict[int | None, list[str]] = {}
    written = buffer.rows.get(lane, {}).get("by")
    known: Mapping[str, int] = {} if written is None else dict(zip(buffer.ids[lane], written.tolist(), strict=True))
    for name in ids:
        found.setdefault(known.get(name), []).append(name)
    return found


def collective(tree: Tree, role: str) -> bool:
    """Whether a forward pass of this role needs all ranks, because its weights are sharded."""
    if role in ("ref", "reward"):
        frozen = {"ref": tree.placement.ref, "reward": tree.placement.reward}
        return frozen[role].strategy == "fsdp" and frozen[role].where == "train"
    strategy = strategy_of(tree, role)
    return strategy == "fsdp" or (strategy == "deepspeed" and tree.model.zero_stage == 3)


def _shapes(rows: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: [name_of(x.dtype), list(x.shape)] for name, x in sorted(rows.items())}


def _room(shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=dtype_of(dtype)) for name, (dtype, shape) in shapes.items()}


def _sample(name: str) -> SampleId:
    """The cursor's name of a sample, as it is written."""
    epoch, _, index = name.partition(":")
    return SampleId(int(epoch), int(index))
