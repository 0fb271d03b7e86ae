"""One optimizer update in two phases, the same for every way of spreading a model over ranks.

The idea: an update is `reduce`, vote, `apply`, `publish`, `seal`. Up to the vote no rank has changed anything; the vote is the
exchange of the gradient norm's parts, which nobody can finish before all have reduced. After it every rank writes the next
version beside the present one and publishes the new parameters; the present version stays until `seal`. So at any instant
the gang can go back to the newest version that is whole everywhere, whoever died where.

    for turn in strategy.turns:
        strategy.begin(turn); loss(turn).backward(); strategy.done()
    result = strategy.update(max_norm=1.0)

A GangError may come out of any of these. The strategy is then spent, as late peers may still write to its buffers: leave the
group, close() it, form the next one, make a new strategy, and fill its shard with the newest version that is whole.
How gradients become this rank's shard of their sum, and how parameters get back into the model, is the subclasses' part.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

from elasticrl.runtime.digest import MASK, Digest, signed
from elasticrl.runtime.group import settle
from elasticrl.runtime.lanes import Turn
from elasticrl.runtime.layout import SumPlan, sum_plan
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.scalars import Tally, total
from elasticrl.runtime.team import whole_name
from elasticrl.runtime.torch_names import all_gather_single

if TYPE_CHECKING:
    from elasticrl.runtime.lanes import Deal
    from elasticrl.runtime.layout import Layout
    from elasticrl.runtime.shard import Shard
    from elasticrl.runtime.spikes import Spike
    from elasticrl.runtime.team import Cut, Team
    from elasticrl.runtime.tokens import Tokens

# Where a chaos test may stop a rank, in the order they are passed. "reduce", "apply" and "gather" are in the middle of it.
POINTS = (
    "before_reduce", "reduce", "after_reduce", "before_apply", "apply", "after_apply", "before_gather", "gather",
    "after_gather", "before_seal",
)  # fmt: skip
Point = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What all ranks agree on when everything is reduced and nothing is applied.

    Example: Reduced(norm=3.72, tally=Tally({"tokens": 4096.0}))
    """

    norm: float  # of the summed gradient, before any scale
    tally: Tally  # of all lanes; empty if no lane tallied anything
    notes: tuple[tuple[float, ...], ...] = ()  # what each rank had to say beside, in rank order
    skipped: bool = False  # something was not finite, or a spike, and the next version is the one before
    spikes: tuple[Spike, ...] = ()  # of all roles, where there is a guard


class Strategy(ABC):
    """The common part. `group` is None for a world of one. With a `team`, `rank` and `group` are those of its index.

    With `tokens` some ranks carry the same lanes, each a leaf of its own for each lane (`Deal.shared`).
    """

    model: torch.nn.Module  # as it computes
    listens = False  # it can digest a lane's gradient before that is added to others'
    _shard: Shard  # both are known once the subclass has the model
    _device: torch.device

    def __init__(
        self, deal: Deal, rank: int, group: dist.ProcessGroup | None, point: Point, team: Team | None = None,
        tokens: Tokens | None = None,
    ) -> None:  # fmt: skip
        assert group is None or group.size() == deal.world, deal
        self.deal, self.rank, self.group, self.point, self.team = deal, rank, group, point, team
        self.everyone = team.everyone if team else group
        self.sharers = tokens.size if tokens else 1  # ranks that carry the same lanes
        self.lanes = deal.lanes // self.sharers
        self._first = self.lanes * tokens.index if tokens else 0  # of this rank's leaves
        self.cuts: Mapping[str, Cut] = {}  # what the team has cut, by the parameter's name
        self.turn: Turn | None = None
        self.shows: int | None = (
            None  # the version whose parameters the model computes with; None: of no one whole version
        )
        self.left_out = False  # there is no backward pass in it
        self.repeats = False  # it is made once more, and nothing of it is added to anything
        self._tallies: dict[int, Tally] = {}
        self._done: list[int] = []
        self._reduced: Reduced | None = None
        self.noted: tuple[int, int] | None = (
            None  # a version of the shard, and the sum of its digest when it was sealed
        )

    @property
    def shard(self) -> Shard:
        """This rank's part of the state."""
        return self._shard

    @property
    def walked(self) -> int:
        """How many of this rank's turns are done, whose gradients wait for an update."""
        return len(self._done)

    @property
    def wire(self) -> torch.device:
        """Where numbers are exchanged: with the model, and not on the host if only the state was moved there."""
        return self._device

    @property
    @abstractmethod
    def turns(self) -> tuple[Turn, ...]:
        """The passes this rank makes in each update."""

    def dealt(self, *, ghosts: bool) -> tuple[Turn, ...]:
        """Those that it was dealt, by their lanes."""
        turns = self.deal.turns(self.rank, ghosts=ghosts)
        return turns if self.sharers == 1 else tuple(replace(turn, lane=turn.lane % self.lanes) for turn in turns)

    def leaf(self, lane: int) -> int:
        """This rank's leaf of a lane in the tree of sums."""
        return self._first + lane

    def begin(self, turn: Turn) -> Tally:
        """The backward pass that follows belongs to this lane. Returns the lane's tally, to be filled in."""
        assert self.turn is None, f"lane {self.turn} is not done"
        expected = self.turns[len(self._done)] if len(self._done) < len(self.turns) else None
        assert turn == expected, f"the next turn of rank {self.rank} is {expected}, not {turn}"
        self.turn = turn
        tally = Tally()
        if not turn.ghost:
            self._tallies[turn.lane] = tally
        return tally

    def repeat(self, leaf: int) -> Tally:
        """The backward pass that follows was made elsewhere, and counts there. Returns a tally that is thrown away."""
        assert self.turn is None, f"lane {self.turn} is not done"
        self.turn, self.repeats = Turn(lane=leaf, ghost=True), True
        return Tally()

    def listen(self, leaves: Iterable[int]) -> None:
        """The gradients of these leaves are digested when they are made."""
        raise NotImplementedError

    def heard(self, leaf: int) -> int:
        """The digest of the gradient that this leaf came to."""
        raise NotImplementedError

    def leave_out(self) -> None:
        """There is no backward pass in this turn, where passes are collectives on no rank: the lane's gradient is 0."""
        self.left_out = True

    def done(self) -> None:
        """The lane's gradient is complete."""
        assert self.turn is not None, "done() without begin()"
        if not self.repeats:
            self._finish(self.turn)
            self._done.append(self.turn.lane)
        self.turn, self.left_out, self.repeats = None, False, False

    def reduce(self, notes: Sequence[float] = ()) -> Reduced:
        """Phase one. When it returns, every rank has its shard of the summed gradient, and no rank has applied anything.

        `notes` are a few numbers, as many from each rank, that travel with the vote and cost no message of their own.
        """
        assert len(self._done) == len(self.turns), f"{len(self._done)} of {len(self.turns)} lanes are done"
        assert not self.shard.applied, "the last update was neither sealed nor given up"
        self.point("before_reduce")
        self._reduce()
        self.point("after_reduce")
        self._reduced = self._vote(notes)
        self._done, self._tallies = [], {}
        return self._reduced

    def skip(self) -> None:
        """Phase two of an update that nobody makes: the next version is the one before."""
        assert self._reduced is not None, "skip() comes after reduce()"
        self.shard.pass_over()
        self._reduced = None

    def apply(self, *, scale: float = 1.0, max_norm: float | None = None, lr_factor: float = 1.0) -> float:
        """Phase two: writes this rank's shard of the next version. The gradient is the lanes' sum times `scale`, clipped to
        `max_norm`. Returns the factor that was used.
        """
        assert self._reduced is not None, "apply() comes after reduce()"
        factor = scale * clip(self._reduced.norm * abs(scale), max_norm)
        self.point("before_apply")
        self.shard.apply(scale=factor, lr_factor=lr_factor, halfway=lambda: self.point("apply"))
        self._reduced = None
        self.point("after_apply")
        return factor

    def publish(self) -> None:
        """Puts the newest parameters, applied or loaded, into the model on every rank. Collective."""
        self.point("before_gather")
        self.shows = None
        self._publish((self.shard.next if self.shard.applied else self.shard.state)[0])
        self.shows = self.shard.version + self.shard.applied
        self.point("after_gather")

    def show(self) -> None:
        """The same at a beginning, where some ranks may have the parameters already. Collective."""
        self.publish()

    def show_ahead(self) -> None:  # noqa: B027 - most can only begin when the shard is filled
        """Begins that before the shard is filled, which goes on meanwhile. What is gone on from is what a rank `shows` that
        shows anything. Collective.
        """

    def forget(self) -> None:  # noqa: B027 - most have nothing under way
        """Lets go of what `show_ahead` has begun, as this rank leaves: what it holds would keep its connections open, and the
        others would wait for it.
        """

    def seal(self) -> None:
        """The update is whole and copied on all ranks: from here on there is no way back before it. For the caller to know."""
        self.point("before_seal")
        self.shard.seal()

    def update(
        self,
        *,
        scale: float = 1.0,
        max_norm: float | None = None,
        lr_factor: float = 1.0,
        seal: bool = True,
    ) -> Reduced:
        """All of it, for whoever has one model and nothing to do between the phases: benches and tests. With seal=False the
        caller seals, when the last copy of every shard is there.
        """
        reduced = self.reduce()
        self.apply(scale=scale, max_norm=max_norm, lr_factor=lr_factor)
        self.publish()
        if seal:
            self.seal()
        return reduced

    def digest(self) -> Digest:
        """Of the newest version, over all ranks. Collective."""
        mine = self.shard.digest(self.counted())
        rows = torch.tensor([signed(mine[row]) for row in self.shard.rows], dtype=torch.int64, device=self.wire)
        everyone = gather(rows, [len(rows)] * self.deal.world * self.members, self.everyone)
        sums = dict.fromkeys(self.shard.rows, 0)
        for theirs in everyone:
            for row, value in zip(self.shard.rows, theirs.tolist(), strict=True):
                sums[row] = (sums[row] + value) & MASK
        return Digest(version=self.shard.version + self.shard.applied, sums=sums)

    @property
    def members(self) -> int:
        """Of a team."""
        return self.team.size if self.team else 1

    def counted(self, names: Collection[str] | None = None) -> Collection[str] | None:
        """Of these parameters (None: of all) those that count here: what a team has whole counts on its first member."""
        if self.team is None or self.team.index == 0:
            return names
        return [
            name for name in (self.shard.layout.shapes if names is None else names) if whole_name(name) in self.cuts
        ]

    @cached_property
    def common(self) -> frozenset[str]:
        """The parameters that all members of a team have whole."""
        return frozenset(name for name in self.shard.layout.shapes if whole_name(name) not in self.cuts)

    def place(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
        """Of what parameter this one is a part, that one's shape, and where it begins in it; None: it is whole."""
        cut = self.cuts.get(whole_name(name)) if self.team else None
        return None if cut is None or self.team is None else (cut.name, cut.shape, cut.box(self.team.index)[0])

    def layouts(self) -> Sequence[Layout]:
        """Of the members of a team, by index; each is that of all ranks of its index."""
        return (self.shard.layout,)

    def exchange(self, tallies: Mapping[int, Tally]) -> Tally:
        """The whole batch's tally from this rank's lanes': for scalars that are needed before the backward pass. Collective."""
        sample, numbers = self._numbers(tallies)
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.wire)
        width = sample.width
        everyone = gather(mine, [1 + len(carried) * width for carried in self.deal.carried], self.group)
        return self._total(sample, [part.tolist() for part in everyone])

    @abstractmethod
    def close(self) -> None:
        """Takes the hooks out of the model, for the next generation's strategy to put in its own."""

    @abstractmethod
    def _finish(self, turn: Turn) -> None: ...

    @abstractmethod
    def _reduce(self) -> None: ...

    @abstractmethod
    def _publish(self, params: torch.Tensor) -> None: ...

    def _vote(self, notes: Sequence[float]) -> Reduced:
        """One exchange: the norm's parts, then the notes, then the lanes' tallies."""
        sums = self._norms
        counts = [sums.plans[rank % len(sums.plans)].counts[rank // len(sums.plans)] for rank in range(sums.ranks)]
        sample, tallies = self._numbers(self._tallies)
        width = sample.width
        squares = self.shard.squares()
        mine = torch.tensor([*squares, *notes, *tallies], dtype=torch.float64, device=self.wire)
        lengths = [
            count + len(notes) + 1 + len(self.deal.carried[rank // self.members]) * width
            for rank, count in enumerate(counts)
        ]
        everyone = [part.tolist() for part in gather(mine, lengths, self.everyone)]
        norm = sums.norm([part[:count] for part, count in zip(everyone, counts, strict=True)])
        rest = [part[count:] for part, count in zip(everyone, counts, strict=True)]
        told = [part[len(notes) :] for part in rest]
        if self.members * self.sharers > 1:
            self._check_teams(told)
        tally = self._total(sample, told[:: self.members])
        return Reduced(norm=norm, tally=tally, notes=tuple(tuple(part[: len(notes)]) for part in rest))

    @cached_property
    def _norms(self) -> _Norms:
        """How every rank finishes the sums of all ranks' squares."""
        if self.team is None:
            return _Norms((self.shard.sums,), (self.shard.sums.roots,))
        layouts = self.layouts()
        plans = tuple(
            self.shard.sums if index == self.team.index else sum_plan(layout) for index, layout in enumerate(layouts)
        )
        counted = tuple(
            tuple(
                root
                for name, root in zip(layout.shapes, plan.roots, strict=True)
                if not index or name not in layouts[0].shapes
            )
            for index, (layout, plan) in enumerate(zip(layouts, plans, strict=True))
        )
        return _Norms(plans, counted)

    def _check_teams(self, told: Sequence[Sequence[float]]) -> None:
        """The members of a team had the same lanes, and computed the same of them. All ranks come to the same conclusion."""
        for rank, mine in enumerate(told):
            first = rank - rank % (self.members * self.sharers)
            if struct.pack(f"{len(mine)}d", *mine) != struct.pack(
                f"{len(told[first])}d", *told[first]
            ):  # NaN is not itself
                raise Misuse(
                    f"Ranks {first} and {rank} are one team and tallied different numbers of the same lanes: a lane's pass "
                    "depends on which member makes it (its data, or random numbers of no lane), or a member computes wrong."
                )

    def _numbers(self, tallies: Mapping[int, Tally]) -> tuple[Tally, list[float]]:
        """The first lane's tally, and what this rank tells of all its lanes: what stands for the names, then each one's row."""
        settle(self.everyone)  # what is read from here on may be what a peer is waited for
        first, *others = (leaf % self.lanes for leaf in self.deal.carried[self.rank])
        names = tallies[first].names
        for lane in others:
            if tallies[lane].names != names:
                raise Misuse(
                    f"Lane {lane} tallied {', '.join(tallies[lane].names) or 'nothing'}, and lane {first} "
                    f"{', '.join(names) or 'nothing'}: tally the same names in every lane, 0 where there is nothing."
                )
        rows = [number for lane in (first, *others) for number in tallies[lane].row()]
        return tallies[first], [_mark(tallies[first]), *rows]

    def _total(self, sample: Tally, rows: list[list[float]]) -> Tally:
        width = sample.width
        tallies: dict[int, Tally] = {}
        for rank, (carried, (mark, *numbers)) in enumerate(zip(self.deal.carried, rows, strict=True)):
            if mark != _mark(sample):
                raise Misuse(
                    f"The lanes of rank {rank} tallied under other names than those of rank {self.rank} "
                    f"({', '.join(sample.names) or 'nothing'}): tally the same names in every lane."
                )
            for i, lane in enumerate(carried):
                if lane < self.lanes:  # of those who carry the same lanes the first ones count
                    tallies[lane] = sample.like(numbers[i * width : (i + 1) * width])
        return total(tallies, self.lanes)


class _Norms(NamedTuple):
    """The plans of a team's members, by index, and of each the roots that count."""

    plans: tuple[SumPlan, ...]
    counted: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Of the gang."""
        return sum(len(plan.counts) for plan in self.plans)

    def norm(self, squares: Sequence[Sequence[float]]) -> float:
        """Of the whole gradient, from each rank's squares."""
        found: list[float] = []
        for index, (plan, roots) in enumerate(zip(self.plans, self.counted, strict=True)):
            values = [value for part in squares[index :: len(self.plans)] for value in part]
            for left, right in plan.adds:
                values[left] += values[right]
            found += [values[root] for root in roots]
        return math.sqrt(math.fsum(found))


def _mark(tally: Tally) -> float:
    """Stands for a tally's names where only numbers travel."""
    return float(crc32("\n".join(tally.names).encode()))


def clip(norm: float, max_norm: float | None) -> float:
    """The factor that brings a gradient of this norm to at most `max_norm`."""
    if max_norm is None or norm <= max_norm:
        return 1.0
    return max_norm / (norm + 1e-6)


def gather(mine: torch.Tensor, lengths: list[int], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Every rank's row of numbers, in rank order; lengths may differ but are known. On the host."""
    if group is None:
        return [mine.cpu()]
    longest = max(lengths)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
    everyone = mine.new_empty(longest * len(lengths))
    all_gather_single(everyone, padded, group=group)
    settle(group)
    rows = everyone.cpu().view(len(lengths), longest)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
