"""A rank's shard: its pieces of the parameters and of the optimizer's state, in two versions.

The idea: version N + 1 is written beside version N, never over it. Until N + 1 is sealed, N is whole on every rank, so an
update that was cut short anywhere is undone by looking at the other row; and once it is sealed it stays unchanged through
all of the next step, which is when the vault copies it, without haste and without a copy of its own.

One row is one contiguous tensor (the parameters first, then each optimizer slot), the same for every strategy.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from elasticrl.runtime.digest import MASK, digest_of
from elasticrl.runtime.layout import UNIT, Edge, Halving, Layout, Piece, SumPlan, blocks, common, halving, sum_plan
from elasticrl.runtime.misuse import Misuse
from elasticrl.runtime.optim import Rule, Stock, apply, rows_of, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

STORES = 3  # rows of memory: of two versions, and of the gradient
SPARE = 1.5  # so much more memory is asked for on the host, where it costs nothing until it is used: a gang may shrink
FOLD = 262_144  # elements whose squares are added up at a time, so that they stay in cache


class Shard:
    """What one rank owns of version `version`, and what it will own of the next.

    `rule_of` gives each parameter's rule by name and is asked anew at every update, so schedules may change it.
    """

    def __init__(
        self, layout: Layout, rank: int, rule_of: Callable[[str], Rule], *, dtype: torch.dtype, device: torch.device,
        old: Shard | None = None, fills: bool = False,
    ) -> None:  # fmt: skip
        """With `fills` all of its pieces are filled before anybody reads them, and of its gradients all is written.

        `old` is one of an earlier generation, which is spent. Its memory is used again, but for its present version, which can
        be read until this one's first update: new memory takes a second for four gigabytes.
        """
        self.layout, self.rank, self.pieces = layout, rank, layout.pieces[rank]
        self.rows = rows_of(rule_of, layout.shapes)
        spent = old._stores if old is not None else ()  # noqa: SLF001 - another one of this class
        free = [store for store in spent if (store.dtype, store.device) == (dtype, device)]
        state, after, grad = free if len(free) == STORES else (None, None, None)
        count = len(self.rows) * layout.size
        self._state, self._after = (_room(kept, count, dtype, device) for kept in (after, state))
        self._grad = _room(grad, layout.size, dtype, device)
        self.grad = self._grad[: layout.size]
        self._version = 0
        self.applied = False  # the next version has been written, but may yet be given up
        self._rule_of = rule_of
        self._both = [store[:count].view(len(self.rows), layout.size) for store in (self._state, self._after)]
        self._now = 0
        if fills:
            self._clear(self.state)
        else:
            self.state.zero_()
            self.grad.zero_()
        if old is None:
            self.clear()
        self._other: int | None = None  # the version that the other row holds whole
        # Of the next version and of the gradient, what no earlier shard has had.
        had = old.layout.size if old is not None else 0
        self._new = [
            self._after[len(self.rows) * had if self._after is state else 0 : count],
            self._grad[had if self._grad is grad else 0 : layout.size],
        ]

    def new(self) -> list[torch.Tensor]:
        """Memory that the first update writes to and that the machine has not given yet. Told once."""
        found, self._new = [part for part in self._new if part.numel()], []
        return found

    @property
    def _stores(self) -> tuple[torch.Tensor, ...]:
        """Its memory: of the present version, of the other one, and of the gradient."""
        both = (self._state, self._after)
        return both[self._now], both[1 - self._now], self._grad

    @property
    def version(self) -> int:
        """How many updates it has had. Whoever fills `state` from elsewhere sets it; the other row is worth nothing then."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version, self._other = version, None

    @property
    def state(self) -> torch.Tensor:
        """[rows, size] of `version`: unchanged until the update after the next one is applied."""
        return self._both[self._now]

    @property
    def held(self) -> dict[int, torch.Tensor]:
        """The versions that are whole here, as [rows, size]: this one, and its predecessor or successor unless an update was
        cut short in the middle of writing it. A gang that reforms agrees on the newest that is whole everywhere.
        """
        return {self.version: self.state} | ({} if self._other is None else {self._other: self.next})

    @property
    def next(self) -> torch.Tensor:
        """[rows, size] of the version being made."""
        return self._both[1 - self._now]

    @cached_property
    def sums(self) -> SumPlan:
        """How every rank finishes the sums of all ranks' `squares`."""
        return sum_plan(self.layout)

    def squares(self) -> list[float]:
        """The sums of the gradient's squares over each of this rank's blocks, in `halving`'s order, in float64. Written as
        additions of neighbours, whose order is ours and no library's.
        """
        plan = self._halving
        found: list[torch.Tensor] = []
        if plan.bodies:
            row = torch.cat([_unit_sums(part) for body in self._bodies() for part in torch.split(body, FOLD)])
            for done, go_on in self._levels:
                found.append(row[done])
                row = _neighbours(row if go_on is None else row[go_on])
        edges = torch.cat([self.grad[:0], *(self.grad[edge.there] for edge in plan.edges)]).tolist()
        return [*torch.cat(found).tolist(), *_edge_sums(plan.edges, edges)] if found else _edge_sums(plan.edges, edges)

    def _bodies(self) -> list[torch.Tensor]:
        """The whole units of the gradient, one after the other."""
        runs: list[range] = []  # neighbours as one: a shard is usually a single run, which then needs no copy
        for part in self._halving.bodies:
            runs[-1:] = (
                [range(runs[-1].start, part.stop)] if runs and runs[-1].stop == part.start else [*runs[-1:], part]
            )
        bodies = [self.grad[part.start : part.stop] for part in runs]
        return bodies if len(bodies) == 1 else [torch.cat(bodies)]

    @cached_property
    def _halving(self) -> Halving:
        return halving(self.pieces, self.layout.size)

    @cached_property
    def _levels(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The halvings' places as tensors; None where everything goes on."""

        def places(ranges: Iterable[range]) -> torch.Tensor:
            each = [torch.arange(part.start, part.stop, device=self.grad.device) for part in ranges]
            return torch.cat(each) if each else torch.arange(0, device=self.grad.device)

        return [
            (places(range(n, n + 1) for n in level.done), places(level.go_on) if level.done else None)
            for level in self._halving.levels
        ]

    def apply(self, *, scale: float, lr_factor: float = 1.0, halfway: Callable[[], None] = lambda: None) -> None:
        """Writes the next version from this one and scale * gradient."""
        assert not self.applied, f"version {self.version + 1} was applied but neither sealed nor given up"
        runs = self.runs_of(self.rank)
        self._other = None
        for i, (rule, start, stop) in enumerate(runs):
            if i == len(runs) // 2:
                halfway()
            part = (slice(None), slice(start, stop))
            apply(
                scaled(rule, lr_factor), self.state[part], self.next[part], self.grad[start:stop], scale=scale,
                count=self.version + 1, rows=self.rows,
            )  # fmt: skip
        self.applied, self._other = True, self.version + 1

    def pass_over(self) -> None:
        """The next version is this one: its update is skipped."""
        assert not self.applied, f"version {self.version + 1} was applied but neither sealed nor given up"
        if self.version == 0 and any(isinstance(rule, Stock) for rule, _, _ in self.runs_of(self.rank)):
            raise Misuse(
                "The very first update cannot be skipped: a torch optimizer makes its state in it. Look at what that update's "
                "loss is made of, or use a rule of elasticrl.runtime.optim (AdamW, SGD), whose state begins with zeros."
            )
        self._other = None
        self.next.copy_(self.state)
        self.applied, self._other = True, self.version + 1

    def seal(self) -> None:
        """The next version is whole everywhere: it becomes this one, and this one's memory is free for the one after."""
        assert self.applied, "nothing was applied"
        self._now, self._other, self._version, self.applied = 1 - self._now, self._version, self._version + 1, False

    def touch(self) -> None:
        """Has the machine give it all of its memory now."""
        self.next.zero_()
        self._new = []

    def take_over(self, other: Shard, version: int) -> list[tuple[int, Piece]]:
        """What of that version lies in a shard that was cut in another way, copied from there. Returns what it lacks: rows, and
        the pieces of them, with their places here.
        """
        assert other.rows == self.rows, f"{other.rows} and {self.rows}"
        state = other.held[version]
        both, lacks = common(self.pieces, other.pieces)
        for mine, theirs in both:
            self.state[:, mine.there] = state[:, theirs.there]
        return [(row, piece) for row in range(len(self.rows)) for piece in lacks]

    def clear(self) -> None:
        """Zeros in the next version where no piece lies: what is there is sent and added too. Not before an old shard, whose
        memory this may be, was read.
        """
        self._clear(self.next)

    def _clear(self, rows: torch.Tensor) -> None:
        for hole in _holes(self.pieces, self.layout.size):
            rows[:, hole] = 0

    def go_to(self, version: int) -> None:
        """Makes one of the versions `held` here the present one."""
        assert version in self.held, f"version {version} is not here, only {sorted(self.held)}"
        if version != self._version:
            self._now, self._other, self._version = 1 - self._now, self._version, version
        self.applied = False

    def digest(self, names: Collection[str] | None = None) -> dict[str, int]:
        """This rank's part of the state's digest, per row; parts are added modulo 2**64. `names`: of these parameters only."""
        state = self.next if self.applied else self.state
        pieces = [piece for piece in self.pieces if names is None or piece.name in names]
        return {
            row: sum(digest_of(state[i, piece.there], piece.start, row, piece.name) for piece in pieces) & MASK
            for i, row in enumerate(self.rows)
        }

    def runs_of(self, rank: int) -> list[tuple[Rule, int, int]]:
        """A rank's shard, cut only where the rule changes. Runs begin at whole units and take padding along: 0 stays 0."""
        pieces = self.layout.pieces[rank]
        if not pieces:  # more ranks than there are rows to shard
            return []
        starts: list[tuple[Rule, int]] = []
        for piece in sorted(pieces, key=lambda piece: piece.at):
            rule = self._rule_of(piece.name)
            assert piece.at % UNIT == 0, piece
            if not starts or starts[-1][0] != rule:
                starts.append((rule, piece.at))
        stops = [*(start for _, start in starts[1:]), self.layout.size]
        return [(rule, start, stop) for (rule, start), stop in zip(starts, stops, strict=True)]


def _room(kept: torch.Tensor | None, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for so many elements, whatever is in it."""
    if kept is not None and kept.numel() >= count:
        return kept
    return torch.empty(int(count * (SPARE if device.type == "cpu" else 1)), dtype=dtype, device=device)


def _holes(pieces: Sequence[Piece], size: int) -> list[slice]:
    """What no piece covers."""
    found, at = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.at):
        found += [slice(at, piece.at)] if at < piece.at else []
        at = piece.at + piece.count
    return [*found, slice(at, size)] if at < size else found


def _unit_sums(values: torch.Tensor) -> torch.Tensor:
    """[units] float64: sums of squares over whole units."""
    row = values.double().square_()
    for _ in range(UNIT.bit_length() - 1):
        row = _neighbours(row)
    return row


def _neighbours(row: torch.Tensor) -> torch.Tensor:
    pairs = row.view(-1, 2)
    return pairs[:, 0] + pairs[:, 1]


def _edge_sums(edges: Sequence[Edge], values: Sequence[float]) -> list[float]:
    """The same over the blocks of each edge: less than a unit each, so plain numbers do."""
    found: list[float] = []
    at = 0
    for edge in edges:
        row = [value * value for value in values[at : at + edge.stop - edge.start]]
        at += len(row)
        for block in blocks(edge.start, edge.stop):
            part = row[block.lo - edge.start : block.hi - edge.start]
            while len(part) > 1:
                part = [left + right for left, right in zip(part[::2], part[1::2], strict=True)]
            found += part
    return found
